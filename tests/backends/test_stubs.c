/* test_stubs.c - the stubs of the CUDA runtime and NCCL (tests/stubs) behave like the real
   libraries where fsdp.h depends on it, and detect the faults that they exist for: a missing wait,
   memory that is freed too early, a call that fails, an object that is never freed.

   gcc -std=c99 -O1 -g -I. -Itests -Itests/stubs tests/backends/test_stubs.c tests/stubs/stub_cuda.c \
       tests/stubs/stub_nccl.c -o test_stubs -pthread -lm

   SPDX-License-Identifier: MIT */
#define TAGS NO(SHM) | STUB | STUB_ASAN | STUB_TSAN
#include "harness.h"
#define FSDP_STATIC
#define FSDP_IMPLEMENTATION
#include "src/base/reduce.h"
#include "stubs/stub.h"

#define CUDA(call)    CHECK_STATUS(call, cudaSuccess)
#define NCCL_OK(call) CHECK_STATUS(call, ncclSuccess)

/* ---- kernels --------------------------------------------------------------------------------- */

typedef struct {
    int *dst;
    const int *src; /* may be NULL */
    size_t count;
    int value;
    int *gate; /* may be NULL; otherwise waits until it is not 0 */
} add;

/* dst = src + value, in two blocks. */
static void add_body(const void *params, unsigned block_index) {
    const add *p = (const add *)params;
    size_t begin = block_index ? p->count / 2 : 0, end = block_index ? p->count : p->count / 2;
    long ns = 0;
    while (p->gate && !__atomic_load_n(p->gate, __ATOMIC_ACQUIRE)) h_nap(&ns);
    if (p->src) fsdp_stub_touch(p->src + begin, (end - begin) * sizeof *p->src, 0);
    if (p->dst) fsdp_stub_touch(p->dst + begin, (end - begin) * sizeof *p->dst, 1);
    for (size_t i = begin; i < end && p->dst; i++) p->dst[i] = (p->src ? p->src[i] : 0) + p->value;
}

static void launch(cudaStream_t stream, int *dst, const int *src, size_t count, int value,
                   int *gate) {
    add p = {dst, src, count, value, gate};
    CUDA(fsdp_stub_launch(add_body, &p, sizeof p, 2, stream));
    p.dst = NULL; /* the launch has its own copy */
}

static int *device_ints(size_t count) {
    void *ptr = NULL;
    CUDA(cudaMalloc(&ptr, count * sizeof(int)));
    return (int *)ptr;
}

static cudaStream_t a_stream(void) {
    cudaStream_t stream;
    CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    return stream;
}

static cudaEvent_t an_event(void) {
    cudaEvent_t event;
    CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    return event;
}

static void wait_for_gate(void *gate) {
    long ns = 0;
    while (!__atomic_load_n((int *)gate, __ATOMIC_ACQUIRE)) h_nap(&ns);
}
static void open_gate(int *gate) { __atomic_store_n(gate, 1, __ATOMIC_RELEASE); }

/* Checks that a stream makes no progress for a while. */
static void check_waits(cudaStream_t stream) {
    for (int i = 0; i < 20; i++) {
        struct timespec t = {0, 1000000};
        CHECK_STATUS(cudaStreamQuery(stream), cudaErrorNotReady);
        nanosleep(&t, NULL);
    }
    CHECK_STATUS(cudaGetLastError(), cudaErrorNotReady); /* as in CUDA */
}

static void check_nothing_left(void) {
    for (int kind = 0; kind < STUB_KINDS; kind++)
        CHECK_MSG(stub_live(kind) == 0, "kind %d: %lld left", kind, (long long)stub_live(kind));
}

/* Returns the signal that ends a process which calls fn; 0: none. */
static int ends_by(void (*fn)(void)) {
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        int null = open("/dev/null", O_WRONLY);
        dup2(null, STDERR_FILENO);
        signal(SIGABRT, SIG_DFL);
        signal(SIGSEGV, SIG_DFL);
        fn();
        _exit(0);
    }
    CHECK(waitpid(pid, &status, 0) == pid);
    return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
}
static int aborts(void (*fn)(void)) { return ends_by(fn) == SIGABRT; }

/* ---- streams and events ---------------------------------------------------------------------- */

TEST(stub_cuda, event_orders_streams) {
    cudaStream_t a = a_stream(), b = a_stream(), c = a_stream();
    cudaEvent_t e = an_event();
    int *x = device_ints(64), *y = device_ints(64), gate = 0, out[64];
    launch(a, x, NULL, 64, 1, &gate);
    CUDA(cudaEventRecord(e, a));
    CUDA(cudaStreamWaitEvent(b, e, 0));
    launch(b, y, x, 64, 10, NULL);
    CUDA(cudaEventRecord(e, a)); /* the wait is for the earlier record */
    launch(c, NULL, NULL, 0, 0, NULL);
    CUDA(cudaStreamSynchronize(c)); /* nothing delays this stream */
    check_waits(b);
    CHECK_STATUS(cudaEventQuery(e), cudaErrorNotReady);
    open_gate(&gate);
    CUDA(cudaEventSynchronize(e));
    CUDA(cudaEventQuery(e));
    CUDA(cudaMemcpyAsync(out, y, sizeof out, cudaMemcpyDeviceToHost, b));
    for (int i = 0; i < 64; i++) CHECK_EQ_INT(out[i], 11);
    CUDA(cudaEventDestroy(e));
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaStreamDestroy(b));
    CUDA(cudaStreamDestroy(c));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    check_nothing_left();
}

TEST(stub_cuda, event_generations) {
    cudaStream_t a = a_stream(), b = a_stream();
    cudaEvent_t e = an_event();
    int gate = 0;
    CUDA(cudaStreamWaitEvent(b, e, 0)); /* never recorded: nothing to wait for */
    CUDA(cudaStreamSynchronize(b));
    CUDA(cudaEventQuery(e));
    CUDA(cudaEventRecord(e, a));
    CUDA(cudaStreamSynchronize(a));
    CUDA(cudaStreamWaitEvent(b, e, 0));
    launch(a, NULL, NULL, 0, 0, &gate);
    CUDA(cudaEventRecord(e, a));
    CUDA(cudaStreamSynchronize(b)); /* it waited for the first record only */
    CHECK_STATUS(cudaEventQuery(e), cudaErrorNotReady);
    CUDA(cudaEventDestroy(e)); /* allowed while the event is in use */
    CUDA(cudaStreamDestroy(a));
    open_gate(&gate);
    CUDA(cudaStreamDestroy(b));
    CHECK_STATUS(cudaStreamSynchronize(b), cudaErrorInvalidResourceHandle);
    check_nothing_left();
}

TEST(stub_cuda, default_stream) {
    cudaStream_t blocking, apart = a_stream();
    int gate = 0, second = 0;
    CUDA(cudaStreamCreateWithFlags(&blocking, cudaStreamDefault));
    launch(NULL, NULL, NULL, 0, 0, &gate);
    launch(blocking, NULL, NULL, 0, 0, NULL);
    launch(apart, NULL, NULL, 0, 0, NULL);
    CUDA(cudaStreamSynchronize(apart));
    check_waits(blocking);
    open_gate(&gate);
    CUDA(cudaStreamSynchronize(blocking));
    launch(blocking, NULL, NULL, 0, 0, &second);
    launch(cudaStreamLegacy, NULL, NULL, 0, 0, NULL);
    check_waits(NULL); /* the same stream */
    open_gate(&second);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaStreamQuery(cudaStreamLegacy));
    CUDA(cudaStreamDestroy(blocking));
    CUDA(cudaStreamDestroy(apart));
}

TEST(stub_cuda, host_memory) {
    cudaStream_t s = a_stream();
    int pageable[4] = {1, 2, 3, 4}, *x = device_ints(8), gate = 0, out[8];
    void *ptr;
    CUDA(cudaMallocHost(&ptr, 4 * sizeof(int)));
    int *pinned = (int *)ptr;
    for (int i = 0; i < 4; i++) pinned[i] = i + 1;
    launch(s, NULL, NULL, 0, 0, &gate);
    CUDA(cudaMemcpyAsync(x, pageable, 16, cudaMemcpyHostToDevice, s));
    CUDA(cudaMemcpyAsync(x + 4, pinned, 16, cudaMemcpyHostToDevice, s));
    pageable[0] = pinned[0] = 7; /* too late for pageable memory, but not for pinned memory */
    open_gate(&gate);
    CUDA(cudaMemcpyAsync(out, x, sizeof out, cudaMemcpyDeviceToHost, s));
    CHECK_EQ_INT(out[0], 1);
    CHECK_EQ_INT(out[4], 7);
    CUDA(cudaFreeHost(pinned));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(s));
    check_nothing_left();
}

TEST(stub_cuda, memory) {
    struct cudaPointerAttributes attributes;
    size_t before, left, total;
    void *managed;
    int host[4] = {0}, *x;
    CUDA(cudaMemGetInfo(&before, &total));
    x = device_ints(1024);
    CHECK_EQ_INT(*(unsigned char *)x, 0xCB); /* memory is not zero */
    CUDA(cudaMemGetInfo(&left, &total));
    CHECK_EQ_INT(before - left, 4096);
    CHECK_EQ_INT(stub_live(STUB_DEVICE_BYTES), 4096);
    CUDA(cudaPointerGetAttributes(&attributes, x + 1023));
    CHECK_EQ_INT(attributes.type, cudaMemoryTypeDevice);
    CUDA(cudaPointerGetAttributes(&attributes, host));
    CHECK_EQ_INT(attributes.type, cudaMemoryTypeUnregistered);
    CHECK_STATUS(cudaMemcpy(x, host, 16, cudaMemcpyDeviceToHost), cudaErrorInvalidMemcpyDirection);
    CHECK_STATUS(cudaMemset(x + 1020, 0, 17), cudaErrorInvalidValue);
    CHECK_STATUS(cudaFree(x + 1), cudaErrorInvalidValue);
    CHECK_STATUS(cudaFreeHost(x), cudaErrorInvalidValue);
    CUDA(cudaMallocManaged(&managed, 64, cudaMemAttachGlobal));
    CUDA(cudaMemcpy(managed, host, 16, cudaMemcpyHostToDevice));
    CUDA(cudaMemcpy2DAsync(x + 1, 12, managed, 8, 4, 2, cudaMemcpyDeviceToDevice, NULL));
    CUDA(cudaMemsetAsync(x, 0x11, 4, NULL));
    CUDA(cudaMemcpy(host, x, 16, cudaMemcpyDefault));
    CHECK_EQ_INT(host[0], 0x11111111);
    CHECK_EQ_INT(host[1], 0);
    CHECK_EQ_INT(host[2], (int)0xCBCBCBCBu);
    CUDA(cudaFree(managed));
    CUDA(cudaFree(x));
    CUDA(cudaFree(NULL));
    stub_set(STUB_TOTAL_MIB, 1);
    CHECK_STATUS(cudaMalloc(&managed, (1 << 20) + 1), cudaErrorMemoryAllocation);
    CHECK(!managed);
    check_nothing_left();
}

TEST(stub_cuda, synchronous) {
    int *x = device_ints(2);
    stub_set(STUB_SYNC, 1);
    cudaStream_t s = a_stream();
    launch(s, x, NULL, 2, 5, NULL);
    CHECK_EQ_INT(x[1], 5);
    CUDA(cudaStreamQuery(s));
    CUDA(cudaStreamDestroy(s));
    CUDA(cudaFree(x));
}

TEST(stub_cuda, devices) {
    int count, device, value;
    cudaStream_t s;
    CUDA(cudaGetDeviceCount(&count));
    CHECK_EQ_INT(count, 8);
    CUDA(cudaSetDevice(3));
    CUDA(cudaGetDevice(&device));
    CHECK_EQ_INT(device, 3);
    CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMultiProcessorCount, 3));
    CHECK(value > 0);
    CHECK_STATUS(cudaSetDevice(8), cudaErrorInvalidDevice);
    CHECK_STATUS(cudaPeekAtLastError(), cudaErrorInvalidDevice);
    CHECK_STATUS(cudaGetLastError(), cudaErrorInvalidDevice);
    CUDA(cudaGetLastError());
    CHECK_EQ_STR(cudaGetErrorName(cudaErrorNotReady), "cudaErrorNotReady");
    stub_set(STUB_DEVICES, 0);
    CHECK_STATUS(cudaGetDeviceCount(&count), cudaErrorNoDevice);
    CUDA(cudaStreamCreateWithPriority(&s, cudaStreamNonBlocking, -1));
    CUDA(cudaStreamDestroy(s));
}

static int *out_of_reach; /* device memory */
static void host_reads(void) { _exit(*(volatile int *)out_of_reach == 1); }
static void device_reads(void) {
    int out;
    launch(NULL, out_of_reach, out_of_reach, 4, 1, NULL);
    CUDA(cudaMemcpy(&out, out_of_reach, sizeof out, cudaMemcpyDeviceToHost));
}

TEST(stub_cuda, protected_memory) {
    void *managed;
    stub_set(STUB_SYNC, 1);
    stub_set(STUB_PROTECT, 1);
    out_of_reach = device_ints(4);
    launch(NULL, out_of_reach, NULL, 4, 1, NULL);
    device_reads();
    CHECK_EQ_INT(ends_by(host_reads), SIGSEGV);
    int *first = out_of_reach, *freed = device_ints(4), *last = device_ints(4);
    CUDA(cudaMallocManaged(&managed, 16, cudaMemAttachGlobal));
    CUDA(cudaFree(freed));
    launch(NULL, first, NULL, 4, 1, NULL); /* on both sides of what was freed */
    launch(NULL, last, NULL, 4, 1, NULL);
    int *const unreadable[] = {first, freed, last};
    for (int i = 0; i < 3; i++) {
        out_of_reach = unreadable[i];
        CHECK_EQ_INT(ends_by(host_reads), SIGSEGV);
    }
    out_of_reach = (int *)managed;
    CHECK_EQ_INT(ends_by(host_reads), 0);
    CUDA(cudaFree(first));
    CUDA(cudaFree(last));
    CUDA(cudaFree(managed));
    check_nothing_left();
}

static void *use_streams(void *arg) {
    for (int i = 0; i < 200; i++) {
        cudaStream_t s = a_stream();
        int *x = device_ints(16), out[16];
        launch(s, x, NULL, 16, i, NULL);
        CUDA(cudaMemcpyAsync(out, x, sizeof out, cudaMemcpyDeviceToHost, s));
        CHECK_EQ_INT(out[15], i);
        CUDA(cudaFree(x));
        CUDA(cudaStreamDestroy(s));
    }
    return arg;
}

TEST(stub_cuda, threads) {
    pthread_t t[4];
    for (int i = 0; i < 4; i++) CHECK(!pthread_create(&t[i], NULL, use_streams, NULL));
    for (int i = 0; i < 4; i++) CHECK(!pthread_join(t[i], NULL));
    check_nothing_left();
}

/* CUDA is not usable in a child if the parent has used it; otherwise the child starts from scratch.
   */
static void in_child(int rank, int world, void *arg) {
    int *is_used = (int *)arg, count = 0, version = 0;
    cudaStream_t stream;
    ncclComm_t comm;
    ncclUniqueId id;
    (void)rank, (void)world;
    CHECK_EQ_INT(stub_live(STUB_STREAMS), 0);
    CHECK_EQ_INT(stub_count(NULL), 0);
    CUDA(cudaDriverGetVersion(&version));
    if (!*is_used) {
        use_streams(NULL);
    } else {
        CHECK_STATUS(cudaGetDeviceCount(&count), cudaErrorInitializationError);
        CHECK_STATUS(cudaStreamCreateWithFlags(&stream, 0), cudaErrorInitializationError);
        NCCL_OK(ncclGetUniqueId(&id));
        CHECK_STATUS(ncclCommInitRank(&comm, 1, id, 0), ncclUnhandledCudaError);
    }
    check_nothing_left();
}

TEST(stub_cuda, fork) {
    int gate = 0, is_used = 0, version = 0;
    CUDA(cudaDriverGetVersion(&version)); /* does not count as use */
    h_ranks_proc(2, in_child, &is_used);
#ifdef __SANITIZE_THREAD__
    SKIP("this sanitizer has no threads in children of a process that has some");
#endif
    cudaStream_t s = a_stream();
    /* The stream's thread is at the gate before the fork: a thread that is just starting may hold
       the lock of an address sanitizer's allocator, which no child could ever take again. */
    launch(s, NULL, NULL, 0, 0, NULL);
    CUDA(cudaStreamSynchronize(s));
    launch(s, NULL, NULL, 0, 0, &gate);
    is_used = 1;
    h_ranks_proc(2, in_child, &is_used);
    open_gate(&gate);
    CUDA(cudaStreamSynchronize(s));
    CUDA(cudaStreamDestroy(s));
}

static int launched; /* the thread's launch has returned */
static void other_body(const void *params, unsigned block_index) {
    (void)params, (void)block_index;
}
static void *launch_other(void *arg) {
    int none = 0;
    cudaStream_t s = a_stream();
    CUDA(fsdp_stub_launch(other_body, &none, sizeof none, 1, s));
    __atomic_store_n(&launched, 1, __ATOMIC_SEQ_CST);
    CUDA(cudaStreamSynchronize(s));
    CUDA(cudaStreamDestroy(s));
    return arg;
}

/* The first launch of a kernel waits for all work, if modules are loaded lazily and this one is not
   loaded yet. */
static const struct {
    const char *name;
    int lazy, loaded, waits;
} loadings[] = {{"lazy", 1, 0, 1}, {"eager", 0, 0, 0}, {"loaded", 1, 1, 0}};

TEST_P(stub_cuda, first_launch, loadings) {
    pthread_t thread;
    cudaStream_t s = a_stream();
    int gate = 0;
    long nap = 0;
    stub_set(STUB_LAZY, row->lazy);
    if (row->loaded) CUDA(fsdp_stub_load(other_body));
    launch(s, NULL, NULL, 0, 0, &gate);
    CHECK(!pthread_create(&thread, NULL, launch_other, NULL));
    if (!row->waits)
        while (!__atomic_load_n(&launched, __ATOMIC_SEQ_CST)) h_nap(&nap);
    check_waits(s);
    CHECK_EQ_INT(__atomic_load_n(&launched, __ATOMIC_SEQ_CST), !row->waits);
    open_gate(&gate);
    CHECK(!pthread_join(thread, NULL));
    CUDA(cudaStreamSynchronize(s));
    CUDA(cudaStreamDestroy(s));
}

static void *open_later(void *gate) {
    usleep(50000);
    open_gate((int *)gate);
    return gate;
}

/* With CUDA_LAUNCH_BLOCKING a kernel has ended when its launch returns; copies and fills have not.
   */
TEST(stub_cuda, blocking_launches) {
    pthread_t thread;
    cudaStream_t a = a_stream(), b = a_stream();
    cudaEvent_t e = an_event();
    int gate = 0, hold = 0, *x = device_ints(16);
    stub_set(STUB_BLOCKING, 1);
    CHECK(!pthread_create(&thread, NULL, open_later, &gate));
    launch(a, x, NULL, 16, 1, &gate);
    CHECK_EQ_INT(gate, 1);
    CUDA(cudaStreamQuery(a));
    CHECK(!pthread_join(thread, NULL));
    CUDA(cudaLaunchHostFunc(b, wait_for_gate, &hold)); /* not a kernel */
    CUDA(cudaMemsetAsync(x, 0, 16 * sizeof *x, b));
    CUDA(cudaEventRecord(e, b));
    check_waits(b);
    CHECK_STATUS(cudaEventQuery(e), cudaErrorNotReady);
    open_gate(&hold);
    CUDA(cudaStreamSynchronize(b));
    CUDA(cudaEventDestroy(e));
    CUDA(cudaFree(x));
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaStreamDestroy(b));
}

/* Calls that a device or a driver rejects. */
TEST(stub_cuda, limits) {
    enum { LARGE = 5000 };
    static const char params[LARGE];
    char *x = (char *)device_ints(64), *y = (char *)device_ints(64);
    int value = 0;
    CUDA(cudaDeviceGetAttribute(&value, cudaDevAttrMaxPitch, 0));
    CHECK_EQ_INT(value, 2147483647);
    stub_set(STUB_MAX_PITCH, 32);
    CUDA(cudaMemcpy2DAsync(x, 32, y, 32, 8, 2, cudaMemcpyDefault, NULL));
    CHECK_STATUS(cudaMemcpy2DAsync(x, 33, y, 32, 8, 2, cudaMemcpyDefault, NULL),
                 cudaErrorInvalidPitchValue);
    CHECK_STATUS(cudaMemcpy2DAsync(x, 32, y, 33, 8, 2, cudaMemcpyDefault, NULL),
                 cudaErrorInvalidPitchValue);
    CUDA(fsdp_stub_launch(other_body, params, LARGE, 1, NULL));
    stub_set(STUB_DRIVER_VERSION, 12000);
    CHECK_STATUS(fsdp_stub_launch(other_body, params, LARGE, 1, NULL), cudaErrorInvalidValue);
    CUDA(fsdp_stub_launch(other_body, params, 4096, 1, NULL));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
}

/* ---- captures and graphs --------------------------------------------------------------------- */

enum { GLOBAL = cudaStreamCaptureModeGlobal, RELAXED = cudaStreamCaptureModeRelaxed };

static void begin_capture(cudaStream_t stream, int mode) {
    CUDA(cudaStreamBeginCapture(stream, (enum cudaStreamCaptureMode)mode));
}

/* Ends a capture. Returns a graph that can be launched. */
static cudaGraphExec_t end_capture(cudaStream_t stream) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    CUDA(cudaStreamEndCapture(stream, &graph));
    CHECK(graph != NULL);
    CUDA(cudaGraphInstantiate(&exec, graph, 0));
    CUDA(cudaGraphDestroy(graph));
    return exec;
}

/* A capture that has failed ends with the code, without a graph, and the stream works again. */
static void check_spoiled(cudaStream_t stream, cudaError_t code) {
    cudaGraph_t graph = (cudaGraph_t)(void *)&graph;
    CHECK_STATUS(cudaStreamEndCapture(stream, &graph), code);
    CHECK(graph == NULL);
    (void)cudaGetLastError();
    CUDA(cudaStreamSynchronize(stream));
}

static enum cudaStreamCaptureStatus capture_status(cudaStream_t stream) {
    enum cudaStreamCaptureStatus status;
    CUDA(cudaStreamIsCapturing(stream, &status));
    return status;
}

static int first_int(cudaStream_t stream, const int *x) {
    int value;
    CUDA(cudaMemcpyAsync(&value, x, sizeof value, cudaMemcpyDeviceToHost, stream));
    return value;
}

/* Captured work does not run; then it runs once for each launch, in the stream's order. */
TEST(stub_graph, replay) {
    cudaStream_t a = a_stream();
    int *x = device_ints(8), *y = device_ints(8), gate = 0;
    CUDA(cudaMemsetAsync(x, 0, 8 * sizeof *x, a));
    CUDA(cudaMemsetAsync(y, 0, 8 * sizeof *y, a));
    CHECK(capture_status(a) == cudaStreamCaptureStatusNone);
    begin_capture(a, GLOBAL);
    CHECK(capture_status(a) == cudaStreamCaptureStatusActive);
    launch(a, x, x, 8, 1, NULL);
    CUDA(cudaMemcpyAsync(y, x, 8 * sizeof *y, cudaMemcpyDeviceToDevice, a));
    CUDA(cudaMemsetAsync(y + 1, 0, sizeof *y, a));
    cudaGraphExec_t exec = end_capture(a);
    CHECK(capture_status(a) == cudaStreamCaptureStatusNone);
    CHECK_EQ_INT(first_int(a, x), 0);
    launch(a, x, x, 8, 10, &gate);
    int64_t launches = stub_count("launch");
    CUDA(cudaGraphLaunch(exec, a));
    CHECK_EQ_INT(stub_count("launch"), launches);
    check_waits(a);
    open_gate(&gate);
    CHECK_EQ_INT(first_int(a, y), 11);
    CUDA(cudaGraphLaunch(exec, a));
    CUDA(cudaGraphLaunch(exec, a));
    launch(a, x, x, 8, 100, NULL);
    CHECK_EQ_INT(first_int(a, x), 113);
    CHECK_EQ_INT(first_int(a, y), 13);
    CHECK_EQ_INT(first_int(a, y + 1), 0);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    check_nothing_left();
}

/* A graph of two streams: the event orders them in every launch, and stream b stays usable
   meanwhile. */
TEST(stub_graph, streams_join) {
    cudaStream_t a = a_stream(), b = a_stream(), c = a_stream();
    cudaEvent_t fork = an_event(), joined = an_event();
    int *x = device_ints(1), *y = device_ints(1), gate = 0, other = 0;
    CUDA(cudaMemsetAsync(x, 0, sizeof *x, a));
    CUDA(cudaStreamSynchronize(a));
    launch(b, NULL, NULL, 0, 0, &other); /* before the capture: not part of it */
    begin_capture(a, GLOBAL);
    launch(a, x, x, 1, 1, &gate);
    CUDA(cudaEventRecord(fork, a));
    CUDA(cudaStreamWaitEvent(b, fork, 0));
    CHECK(capture_status(b) == cudaStreamCaptureStatusActive);
    launch(b, y, x, 1, 10, NULL);
    CUDA(cudaEventRecord(joined, b));
    CUDA(cudaStreamWaitEvent(a, joined, 0));
    launch(a, x, y, 1, 100, NULL);
    cudaGraphExec_t exec = end_capture(a);
    CHECK(capture_status(b) == cudaStreamCaptureStatusNone);
    CUDA(cudaGraphLaunch(exec, a));
    CUDA(cudaGraphLaunch(exec, c)); /* runs after the previous launch */
    check_waits(a);
    check_waits(c);
    open_gate(&gate);
    CUDA(cudaStreamSynchronize(c)); /* earlier work of b does not delay it */
    CHECK_STATUS(cudaStreamQuery(b), cudaErrorNotReady);
    CHECK_EQ_INT(first_int(c, x), 222);
    CHECK_EQ_INT(first_int(c, y), 122);
    /* An event of a capture is not usable outside, until it is recorded there. */
    CHECK_STATUS(cudaEventQuery(fork), cudaErrorCapturedEvent);
    CHECK_STATUS(cudaEventSynchronize(fork), cudaErrorCapturedEvent);
    CHECK_STATUS(cudaStreamWaitEvent(c, fork, 0), cudaErrorCapturedEvent);
    CUDA(cudaEventRecord(fork, c));
    CUDA(cudaEventSynchronize(fork));
    (void)cudaGetLastError();
    open_gate(&other);
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaEventDestroy(fork));
    CUDA(cudaEventDestroy(joined));
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaStreamDestroy(b));
    CUDA(cudaStreamDestroy(c));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    check_nothing_left();
}

/* A launch that is running when its graph is destroyed completes. */
TEST(stub_graph, destroy_in_flight) {
    cudaStream_t a = a_stream();
    int *x = device_ints(1), gate = 0;
    begin_capture(a, GLOBAL);
    launch(a, x, NULL, 1, 7, &gate);
    cudaGraphExec_t exec = end_capture(a);
    CUDA(cudaGraphLaunch(exec, a));
    CUDA(cudaGraphExecDestroy(exec));
    open_gate(&gate);
    CHECK_EQ_INT(first_int(a, x), 7);
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaFree(x));
    check_nothing_left();
}

/* Calls that a capture forbids: each returns a code, and the capture ends with a code. */
typedef struct {
    cudaStream_t a, b; /* this thread captures a */
    cudaEvent_t before, inside, never;
    int *x;
} scene_of_capture;

static cudaError_t forbidden_alloc(scene_of_capture *s) {
    void *ptr = s;
    cudaError_t error = cudaMalloc(&ptr, 4);
    CHECK(ptr == NULL);
    return error;
}
static cudaError_t forbidden_pinned(scene_of_capture *s) {
    void *ptr = s;
    return cudaMallocHost(&ptr, 4);
}
static cudaError_t forbidden_free(scene_of_capture *s) { return cudaFree(s->x); }
static cudaError_t forbidden_sync(scene_of_capture *s) { return cudaStreamSynchronize(s->a); }
static cudaError_t forbidden_query(scene_of_capture *s) { return cudaStreamQuery(s->a); }
static cudaError_t forbidden_device(scene_of_capture *s) {
    (void)s;
    return cudaDeviceSynchronize();
}
static cudaError_t forbidden_inside(scene_of_capture *s) { return cudaEventSynchronize(s->inside); }
static cudaError_t forbidden_look(scene_of_capture *s) { return cudaEventQuery(s->before); }
static cudaError_t forbidden_before(scene_of_capture *s) {
    return cudaStreamWaitEvent(s->a, s->before, 0);
}
static cudaError_t forbidden_never(scene_of_capture *s) {
    return cudaStreamWaitEvent(s->a, s->never, 0);
}
static cudaError_t forbidden_legacy(scene_of_capture *s) {
    return cudaMemsetAsync(s->x, 0, 4, cudaStreamLegacy);
}
static cudaError_t forbidden_copy(scene_of_capture *s) {
    int value;
    return cudaMemcpy(&value, s->x, sizeof value, cudaMemcpyDeviceToHost);
}
static cudaError_t forbidden_pageable(scene_of_capture *s) {
    int value = 0;
    return cudaMemcpyAsync(s->x, &value, sizeof value, cudaMemcpyHostToDevice, s->a);
}
static cudaError_t forbidden_end(scene_of_capture *s) {
    cudaGraph_t graph;
    CUDA(cudaStreamWaitEvent(s->b, s->inside, 0));
    launch(s->b, s->x, NULL, 1, 1, NULL);
    return cudaStreamEndCapture(s->b, &graph);
}
static cudaError_t forbidden_merge(scene_of_capture *s) {
    CUDA(cudaStreamBeginCapture(s->b, cudaStreamCaptureModeRelaxed));
    cudaError_t error = cudaStreamWaitEvent(s->b, s->inside, 0);
    check_spoiled(s->b, cudaErrorStreamCaptureInvalidated);
    return error;
}
static cudaError_t begin_again(scene_of_capture *s) {
    CHECK_STATUS(cudaStreamBeginCapture(s->a, cudaStreamCaptureModeGlobal), cudaErrorIllegalState);
    CUDA(cudaStreamWaitEvent(s->b, s->inside, 0));
    launch(s->b, s->x, NULL, 1, 1, NULL);
    return cudaErrorUnknown; /* no more: the end of the capture finds b */
}

enum { /* columns of the table */
       UNSUPPORTED = cudaErrorStreamCaptureUnsupported,
       INVALIDATED = cudaErrorStreamCaptureInvalidated,
       ISOLATION = cudaErrorStreamCaptureIsolation,
       IMPLICIT = cudaErrorStreamCaptureImplicit,
       UNMATCHED = cudaErrorStreamCaptureUnmatched,
       UNJOINED = cudaErrorStreamCaptureUnjoined,
       MERGE = cudaErrorStreamCaptureMerge,
       OF_THREAD = cudaStreamCaptureModeThreadLocal
};
static const struct {
    const char *name;
    cudaError_t (*act)(scene_of_capture *s);
    int blocking, mode, code, end; /* end 0: the capture continues */
} breaches[] = {
    {"alloc", forbidden_alloc, 0, GLOBAL, UNSUPPORTED, INVALIDATED},
    {"pinned", forbidden_pinned, 0, OF_THREAD, UNSUPPORTED, INVALIDATED},
    {"free", forbidden_free, 0, GLOBAL, UNSUPPORTED, INVALIDATED},
    {"sync", forbidden_sync, 0, RELAXED, UNSUPPORTED, INVALIDATED},
    {"query", forbidden_query, 0, RELAXED, UNSUPPORTED, INVALIDATED},
    {"device", forbidden_device, 0, RELAXED, UNSUPPORTED, INVALIDATED},
    {"event", forbidden_inside, 0, RELAXED, cudaErrorCapturedEvent, INVALIDATED},
    {"look", forbidden_look, 0, GLOBAL, UNSUPPORTED, INVALIDATED},
    {"look_relaxed", forbidden_look, 0, RELAXED, cudaSuccess, cudaSuccess},
    {"before", forbidden_before, 0, RELAXED, ISOLATION, INVALIDATED},
    {"never", forbidden_never, 0, RELAXED, ISOLATION, INVALIDATED},
    {"legacy", forbidden_legacy, 1, RELAXED, IMPLICIT, INVALIDATED},
    {"legacy_outside", forbidden_legacy, 0, GLOBAL, cudaSuccess, cudaSuccess},
    {"copy", forbidden_copy, 0, GLOBAL, UNSUPPORTED, INVALIDATED},
    {"pageable", forbidden_pageable, 0, RELAXED, UNSUPPORTED, INVALIDATED},
    {"end_elsewhere", forbidden_end, 0, GLOBAL, UNMATCHED, UNJOINED},
    {"merge", forbidden_merge, 0, GLOBAL, MERGE, INVALIDATED},
    {"unjoined", begin_again, 0, GLOBAL, cudaErrorUnknown, UNJOINED},
};

TEST_P(stub_graph, forbids, breaches, NO(STUB_TSAN)) {
    scene_of_capture s;
    enum cudaStreamCaptureStatus status;
    CUDA(
        cudaStreamCreateWithFlags(&s.a, row->blocking ? cudaStreamDefault : cudaStreamNonBlocking));
    s.b = a_stream();
    s.before = an_event();
    s.inside = an_event();
    s.never = an_event();
    s.x = device_ints(1);
    CUDA(cudaEventRecord(s.before, s.b));
    CUDA(cudaStreamSynchronize(s.b));
    begin_capture(s.a, row->mode);
    launch(s.a, s.x, NULL, 1, 1, NULL);
    CUDA(cudaEventRecord(s.inside, s.a));
    CHECK_STATUS(row->act(&s), row->code);
    if (row->blocking) {
        CHECK_STATUS(cudaStreamIsCapturing(NULL, &status), cudaErrorStreamCaptureImplicit);
    }
    if (row->end == cudaErrorStreamCaptureInvalidated) {
        add p = {s.x, NULL, 1, 1, NULL};
        CHECK(capture_status(s.a) == cudaStreamCaptureStatusInvalidated);
        CHECK_STATUS(fsdp_stub_launch(add_body, &p, sizeof p, 1, s.a),
                     cudaErrorStreamCaptureInvalidated);
    }
    if (row->end) check_spoiled(s.a, (cudaError_t)row->end);
    else CUDA(cudaGraphExecDestroy(end_capture(s.a)));
    CUDA(cudaMemset(s.x, 0, sizeof *s.x));
    CUDA(cudaEventDestroy(s.before));
    CUDA(cudaEventDestroy(s.inside));
    CUDA(cudaEventDestroy(s.never));
    CUDA(cudaStreamDestroy(s.a));
    CUDA(cudaStreamDestroy(s.b));
    CUDA(cudaFree(s.x));
    check_nothing_left();
}

/* Another thread: calls that may wait, during captures in two modes, in its own three modes. */
typedef struct {
    cudaStream_t captured;
    int mode;
    cudaError_t malloc_code, end_code;
} bystander;

static void *stand_by(void *arg) {
    bystander *b = (bystander *)arg;
    enum cudaStreamCaptureMode mode = (enum cudaStreamCaptureMode)b->mode;
    cudaGraph_t graph;
    void *ptr;
    CUDA(cudaThreadExchangeStreamCaptureMode(&mode));
    CHECK(mode == cudaStreamCaptureModeGlobal);
    b->end_code = cudaStreamEndCapture(b->captured, &graph);
    b->malloc_code = cudaMalloc(&ptr, 4);
    if (!b->malloc_code) CUDA(cudaFree(ptr));
    return NULL;
}

TEST(stub_graph, other_threads) {
    for (int mode = GLOBAL; mode < RELAXED; mode++) {
        for (int theirs = GLOBAL; theirs <= RELAXED; theirs++) {
            cudaStream_t a = a_stream();
            bystander b = {a, theirs, cudaSuccess, cudaSuccess};
            int hurts = mode == GLOBAL && theirs == GLOBAL;
            pthread_t id;
            begin_capture(a, mode);
            CHECK(pthread_create(&id, NULL, stand_by, &b) == 0);
            CHECK(pthread_join(id, NULL) == 0);
            CHECK_STATUS(b.end_code, cudaErrorStreamCaptureWrongThread);
            CHECK_STATUS(b.malloc_code, hurts ? cudaErrorStreamCaptureUnsupported : cudaSuccess);
            if (hurts) check_spoiled(a, cudaErrorStreamCaptureInvalidated);
            else CUDA(cudaGraphExecDestroy(end_capture(a)));
            CUDA(cudaStreamDestroy(a));
        }
    }
    CHECK_STATUS(cudaStreamBeginCapture(NULL, cudaStreamCaptureModeGlobal),
                 cudaErrorStreamCaptureUnsupported);
    check_nothing_left();
}

/* The stub cannot capture collectives. */
TEST(stub_graph, no_collectives) {
    cudaStream_t a = a_stream();
    ncclUniqueId id;
    ncclComm_t comm;
    int *x = device_ints(1);
    NCCL_OK(ncclGetUniqueId(&id));
    NCCL_OK(ncclCommInitRank(&comm, 1, id, 0));
    NCCL_OK(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, a));
    begin_capture(a, RELAXED);
    CHECK_STATUS(ncclAllReduce(x, x, 1, ncclInt, ncclSum, comm, a), ncclInvalidArgument);
    CUDA(cudaGraphExecDestroy(end_capture(a)));
    NCCL_OK(ncclCommDestroy(comm));
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaFree(x));
    check_nothing_left();
}

/* The race checker works in graphs: with the order between the two streams, and without. */
static const struct {
    const char *name;
    int ignored; /* the wait that has no effect */
} orders[] = {{"both", 0}, {"no_fork", 1}};

TEST_P(stub_graph, races, orders) {
    stub_checks(1);
    cudaStream_t a = a_stream(), b = a_stream();
    cudaEvent_t start = an_event(), fork = an_event(), joined = an_event();
    int *x = device_ints(1), *y = device_ints(1), *z = device_ints(1);
    begin_capture(a, GLOBAL);
    CUDA(cudaEventRecord(start, a));
    CUDA(cudaStreamWaitEvent(b, start, 0)); /* b is now captured as well */
    launch(a, x, NULL, 1, 1, NULL);
    CUDA(cudaEventRecord(fork, a));
    launch(a, z, NULL, 1, 1, NULL); /* the record is not the last operation of its stream */
    stub_ignore_wait(row->ignored);
    CUDA(cudaStreamWaitEvent(b, fork, 0));
    launch(b, y, x, 1, 10, NULL);
    CUDA(cudaEventRecord(joined, b));
    CUDA(cudaStreamWaitEvent(a, joined, 0));
    cudaGraphExec_t exec = end_capture(a);
    CHECK_EQ_INT(stub_races(), 0);
    for (int i = 0; i < 3; i++) CUDA(cudaGraphLaunch(exec, a));
    CHECK_MSG((stub_races() > 0) == (row->ignored > 0), "%s", stub_race_text());
    CUDA(cudaGraphExecDestroy(exec));
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaStreamDestroy(b));
    CUDA(cudaEventDestroy(start));
    CUDA(cudaEventDestroy(fork));
    CUDA(cudaEventDestroy(joined));
    CUDA(cudaFree(x));
    CUDA(cudaFree(y));
    CUDA(cudaFree(z));
}

/* ---- counts and failures --------------------------------------------------------------------- */

TEST(stub_fail, counts) {
    void *ptr;
    CHECK_EQ_INT(stub_count("cudaMalloc"), 0);
    CUDA(cudaMalloc(&ptr, 16));
    CUDA(cudaFree(ptr));
    CUDA(cudaFree(NULL));
    CHECK_EQ_INT(stub_count("cudaMalloc"), 1);
    CHECK_EQ_INT(stub_count("cudaFree"), 2);
    CHECK_EQ_INT(stub_count(NULL), 3);
    stub_count_reset();
    CHECK_EQ_INT(stub_count(NULL), 0);
}

TEST(stub_fail, nth) {
    void *ptr;
    ncclUniqueId id;
    stub_fail("cudaMalloc", 2, cudaErrorMemoryAllocation);
    stub_fail("ncclGetUniqueId", 1, ncclSystemError);
    CUDA(cudaMalloc(&ptr, 16));
    CHECK_EQ_INT(stub_failed(), 0);
    void *other = NULL;
    CHECK_STATUS(cudaMalloc(&other, 16), cudaErrorMemoryAllocation);
    CHECK_STATUS(cudaGetLastError(), cudaErrorMemoryAllocation);
    CHECK_STATUS(ncclGetUniqueId(&id), ncclSystemError);
    CHECK_EQ_INT(stub_failed(), 2);
    stub_fail("cudaFree", 1, cudaErrorUnknown);
    CHECK_STATUS(cudaFree(ptr), cudaErrorUnknown);
    CHECK_EQ_INT(stub_live(STUB_DEVICE_BYTES), 0); /* the memory is freed despite the error */
}

TEST(stub_fail, any_and_sticky) {
    int device, version;
    void *ptr;
    CUDA(cudaMalloc(&ptr, 16));
    stub_fail(NULL, 2, cudaErrorIllegalAddress);
    CUDA(cudaGetDevice(&device));
    CHECK_STATUS(cudaDriverGetVersion(&version), cudaErrorIllegalAddress);
    CHECK_STATUS(cudaGetDevice(&device), cudaErrorIllegalAddress); /* the context is lost */
    CHECK_STATUS(cudaGetLastError(), cudaErrorIllegalAddress);
    CHECK_STATUS(cudaGetLastError(), cudaErrorIllegalAddress);
    CHECK_STATUS(cudaFree(ptr), cudaErrorIllegalAddress);
    CHECK_EQ_INT(stub_live(STUB_DEVICE_BYTES), 0);
    stub_fail_clear();
    CUDA(cudaGetDevice(&device));
    stub_fail(NULL, 1, cudaErrorUnknown); /* NCCL reports its own code for it */
    CHECK_STATUS(ncclGetVersion(&version), ncclUnhandledCudaError);
}

TEST(stub_fail, environment) {
    int version;
    setenv("FSDP_STUB_FAIL", "cudaDriverGetVersion:2:35,ncclGetVersion:1:3", 1);
    setenv("FSDP_STUB_NCCL_VERSION", "21803", 1);
    CUDA(cudaDriverGetVersion(&version));
    CHECK_STATUS(cudaDriverGetVersion(&version), cudaErrorInsufficientDriver);
    CHECK_STATUS(ncclGetVersion(&version), ncclInternalError);
    NCCL_OK(ncclGetVersion(&version));
    CHECK_EQ_INT(version, 21803);
}

/* ---- the race checker ------------------------------------------------------------------------ */

typedef struct {
    cudaStream_t a, b;
    cudaEvent_t e;
    int *x, *y, *pinned;
} scene;

static void wait_b(scene *s) {
    CUDA(cudaEventRecord(s->e, s->a));
    CUDA(cudaStreamWaitEvent(s->b, s->e, 0));
}
static void ordered(scene *s) {
    launch(s->a, s->x, NULL, 64, 1, NULL);
    wait_b(s);
    launch(s->b, s->y, s->x, 64, 1, NULL);
}
static void no_wait(scene *s) {
    launch(s->a, s->x, NULL, 64, 1, NULL);
    launch(s->b, s->y, s->x, 64, 1, NULL);
}
static void write_after_read(scene *s) {
    launch(s->a, s->y, s->x, 64, 1, NULL);
    launch(s->b, s->x, NULL, 64, 1, NULL);
}
static void write_after_write(scene *s) {
    launch(s->a, s->x, NULL, 64, 1, NULL);
    CUDA(cudaMemsetAsync(s->x, 0, 4, s->b));
}
static void two_readers(scene *s) {
    launch(s->a, s->y, s->x, 32, 1, NULL);
    launch(s->b, s->y + 32, s->x, 32, 1, NULL);
}
static void one_of_two_readers(scene *s) {
    two_readers(s);
    launch(s->b, s->x, NULL, 32, 1, NULL);
}
static void neighbours(scene *s) { /* halves of 4 bytes */
    CUDA(cudaMemsetAsync(s->x, 0, 2, s->a));
    CUDA(cudaMemsetAsync((char *)s->x + 2, 0, 2, s->b));
}
static void wait_of_before(scene *s) {
    CUDA(cudaEventRecord(s->e, s->a));
    launch(s->a, s->x, NULL, 64, 1, NULL);
    CUDA(cudaStreamWaitEvent(s->b, s->e, 0));
    launch(s->b, s->y, s->x, 64, 1, NULL);
}
static void older_event(scene *s) { /* the stream has later work */
    launch(s->a, s->x, NULL, 64, 1, NULL);
    CUDA(cudaEventRecord(s->e, s->a));
    launch(s->a, s->pinned, NULL, 64, 1, NULL);
    CUDA(cudaStreamWaitEvent(s->b, s->e, 0));
    launch(s->b, s->y, s->x, 64, 1, NULL);
}
static void ignored(scene *s) {
    stub_ignore_wait(1);
    ordered(s);
}
static void another_ignored(scene *s) {
    stub_ignore_wait(2);
    ordered(s);
}
static void host_no_sync(scene *s) {
    launch(s->a, s->x, NULL, 64, 1, NULL);
    stub_host_read(s->x, 4);
}
static void host_sync(scene *s) {
    launch(s->a, s->x, NULL, 64, 1, NULL);
    CUDA(cudaStreamSynchronize(s->a));
    stub_host_read(s->x, 4);
}
static void host_query(scene *s) {
    launch(s->a, s->x, NULL, 64, 1, NULL);
    CUDA(cudaEventRecord(s->e, s->a));
    CUDA(cudaEventQuery(s->e));
    stub_host_read(s->x, 4);
    launch(s->b, s->y, s->x, 64, 1, NULL); /* the host knew of it when it launched */
}
static void pinned_too_early(scene *s) {
    stub_host_write(s->pinned, 256);
    CUDA(cudaMemcpyAsync(s->x, s->pinned, 256, cudaMemcpyHostToDevice, s->a));
    stub_host_write(s->pinned, 256);
}
static void pinned_read_fine(scene *s) {
    CUDA(cudaMemcpyAsync(s->x, s->pinned, 256, cudaMemcpyHostToDevice, s->a));
    stub_host_read(s->pinned, 256);
}
static void default_orders(scene *s) {
    cudaStream_t c;
    CUDA(cudaStreamCreateWithFlags(&c, cudaStreamDefault));
    launch(c, s->x, NULL, 64, 1, NULL);
    launch(NULL, s->y, s->x, 64, 1, NULL);
    launch(c, s->x, s->y, 64, 1, NULL);
    CUDA(cudaStreamDestroy(c));
}
static void default_does_not(scene *s) {
    launch(s->a, s->x, NULL, 64, 1, NULL);
    launch(NULL, s->y, s->x, 64, 1, NULL);
}
static void free_in_use(scene *s) {
    launch(s->a, s->x, NULL, 64, 1, NULL);
    CUDA(cudaFree(s->x));
    s->x = NULL;
}
static void free_after_sync(scene *s) {
    launch(s->a, s->x, NULL, 64, 1, NULL);
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(s->x));
    s->x = NULL;
}
static void whole(const scene *s, cudaStream_t t) { CUDA(cudaMemsetAsync(s->x, 0, 256, t)); }
static void whole_twice(scene *s) {
    whole(s, s->a);
    whole(s, s->b);
}
static void part_of_whole(scene *s) {
    whole(s, s->a);
    CUDA(cudaMemsetAsync(s->x + 7, 0, 4, s->b));
}
static void whole_after_part(scene *s) {
    CUDA(cudaMemsetAsync(s->x + 7, 0, 4, s->b));
    whole(s, s->a);
}
static void whole_waits(scene *s) { /* both for the whole and for the part */
    whole(s, s->a);
    CUDA(cudaEventRecord(s->e, s->a));
    CUDA(cudaStreamWaitEvent(s->b, s->e, 0));
    CUDA(cudaMemsetAsync(s->x + 7, 0, 4, s->b));
    CUDA(cudaEventRecord(s->e, s->b));
    CUDA(cudaStreamWaitEvent(s->a, s->e, 0));
    whole(s, s->a);
}
static void free_of_whole(scene *s) {
    whole(s, s->a);
    CUDA(cudaFree(s->x));
    s->x = NULL;
}
static void outside(scene *s) {
    static int foreign[64];
    launch(s->a, foreign, NULL, 64, 1, NULL);
}
static void beyond(scene *s) { launch(s->a, NULL, s->x + 1, 64, 1, NULL); }
static void through_thread(scene *s);

static const struct {
    const char *name;
    void (*play)(scene *);
    int races;
} scenes[] = {{"ordered", ordered, 0},
              {"no_wait", no_wait, 2}, /* one for each block of the kernel */
              {"write_after_read", write_after_read, 2},
              {"write_after_write", write_after_write, 1},
              {"two_readers", two_readers, 0},
              {"one_of_two_readers", one_of_two_readers, 2},
              {"neighbours", neighbours, 0},
              {"wait_of_before", wait_of_before, 2},
              {"older_event", older_event, 0},
              {"ignored", ignored, 2},
              {"another_ignored", another_ignored, 0},
              {"host_no_sync", host_no_sync, 1},
              {"host_sync", host_sync, 0},
              {"host_query", host_query, 0},
              {"pinned_too_early", pinned_too_early, 1},
              {"pinned_read_fine", pinned_read_fine, 0},
              {"default_orders", default_orders, 0},
              {"default_does_not", default_does_not, 2},
              {"free_in_use", free_in_use, 1},
              {"free_after_sync", free_after_sync, 0},
              {"whole_twice", whole_twice, 1},
              {"part_of_whole", part_of_whole, 1},
              {"whole_after_part", whole_after_part, 1},
              {"whole_waits", whole_waits, 0},
              {"free_of_whole", free_of_whole, 1},
              {"outside", outside, 2},
              {"beyond", beyond, 1},
              {"through_thread", through_thread, 0}};

static void *launch_there(void *arg) {
    scene *s = (scene *)arg;
    launch(s->a, s->x, NULL, 64, 1, NULL);
    CUDA(cudaStreamSynchronize(s->a));
    return NULL;
}
static void through_thread(scene *s) { /* a join passes on that thread's knowledge */
    pthread_t t;
    CUDA(cudaMemsetAsync(s->x, 0, 4, s->a));
    CHECK(!pthread_create(&t, NULL, launch_there, s));
    CHECK(!pthread_join(t, NULL));
    stub_host_read(s->x, 4);
}

TEST_P(stub_race, scenes, scenes) {
    scene s;
    void *pinned;
    stub_checks(1);
    s.a = a_stream();
    s.b = a_stream();
    s.e = an_event();
    s.x = device_ints(64);
    s.y = device_ints(64);
    CUDA(cudaMallocHost(&pinned, 256));
    s.pinned = (int *)pinned;
    row->play(&s);
    CHECK_MSG(stub_races() == row->races, "%lld races: %s", (long long)stub_races(),
              stub_race_text());
    CHECK((stub_race_text()[0] != 0) == (row->races > 0));
    CUDA(cudaEventDestroy(s.e));
}

/* ---- collectives ----------------------------------------------------------------------------- */

static ncclUniqueId *shared_ids; /* shared by the ranks of a test */

static void share_ids(int count) {
    void *at = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    shared_ids = (ncclUniqueId *)at;
    for (int i = 0; i < count; i++) NCCL_OK(ncclGetUniqueId(&shared_ids[i]));
}

/* Ranks as threads or processes, with asynchronous streams or synchronous ones. */
static const struct {
    const char *name;
    int sync;
} modes[] = {{"async", 0}, {"sync", 1}};
static const struct {
    const char *name;
    int world, threads, sync;
} teams[] = {{"W=1", 1, 0, 0},         {"W=2", 2, 0, 0},
             {"W=3", 3, 0, 0},         {"W=4", 4, 0, 0},
             {"W=2_sync", 2, 0, 1},    {"W=2_threads", 2, 1, 0},
             {"W=4_threads", 4, 1, 0}, {"W=3_threads_sync", 3, 1, 1}};
static const struct {
    const char *name;
    int world, threads, sync;
} pairs[] = {{"processes", 2, 0, 0}, {"threads", 2, 1, 0}, {"sync", 2, 0, 1}},
  quick[] = {{"processes", 3, 0, 0}, {"threads", 3, 1, 0}};
static int is_sync;

static h_rank_fn as_process;
static void run_process(int rank, int world, void *arg) {
    as_process(rank, world, arg);
    check_nothing_left();
}

static void run_team(int world, int threads, int sync, h_rank_fn body) {
    is_sync = sync;
    stub_set(STUB_SYNC, sync);
    share_ids(8);
    as_process = body;
    if (threads) h_ranks_thread(world, body, NULL);
    else h_ranks_proc(world, run_process, NULL);
    check_nothing_left();
}
#define RUN_TEAM(body) run_team(row->world, row->threads, row->sync, body)

static ncclComm_t join_comm(int rank, int world, int which) {
    ncclComm_t comm;
    CUDA(cudaSetDevice(rank));
    NCCL_OK(ncclCommInitRank(&comm, world, shared_ids[which], rank));
    return comm;
}

enum { TYPES = 5 };
static const struct {
    ncclDataType_t nccl;
    fsdp_dtype own;
    size_t size;
} types[TYPES] = {{ncclFloat32, FSDP_F32, 4},
                  {ncclFloat64, FSDP_F64, 8},
                  {ncclBfloat16, FSDP_BF16, 2},
                  {ncclFloat16, FSDP_F16, 2},
                  {ncclInt64, FSDP_I64, 8}};

/* Returns element i of a rank. Sums of floats need rounding. */
static double value_of(int rank, size_t i, int type) {
    double x = (double)((i * 7919 + (size_t)rank * 104729) % 2003) - 1000.0;
    return types[type].own == FSDP_I64 ? x : x / 7.0;
}

static void fill(void *to, int rank, size_t first, size_t count, int type) {
    double *x = (double *)malloc(count * sizeof *x);
    CHECK(x != NULL);
    for (size_t i = 0; i < count; i++) {
        x[i] = value_of(rank, first + i, type);
        int64_t whole = (int64_t)x[i];
        if (types[type].own == FSDP_I64) memcpy(&x[i], &whole, sizeof whole);
    }
    if (types[type].own == FSDP_I64) memcpy(to, x, count * sizeof *x);
    else CHECK_OK(fsdp_convert(to, types[type].own, x, FSDP_F64, (int64_t)count));
    free(x);
}

/* Computes the reduction over all ranks, in rank order. */
static void expect_reduced(void *to, int world, size_t first, size_t count, int type,
                           fsdp_redop redop) {
    char *all = (char *)malloc(count * types[type].size * (size_t)world);
    const char *srcs[8];
    CHECK(all != NULL);
    for (int k = 0; k < world; k++) {
        srcs[k] = all + (size_t)k * count * types[type].size;
        fill(all + (size_t)k * count * types[type].size, k, first, count, type);
    }
    fsdpi_reduce(to, types[type].own, srcs, world, types[type].own, count, 1.0, 0, redop);
    free(all);
}

typedef struct {
    int rank, world;
    ncclComm_t comm;
    cudaStream_t stream;
    char *src, *dst, *want; /* device, device, host; each has `room` bytes per rank */
    size_t room;
} player;

static void check_dst(player *p, const char *at, size_t bytes) {
    char *got = (char *)malloc(bytes);
    CHECK(got != NULL);
    CUDA(cudaMemcpyAsync(got, at, bytes, cudaMemcpyDeviceToHost, p->stream));
    CHECK_EQ_MEM(got, p->want, bytes);
    free(got);
}

static void upload(player *p, char *to, size_t first, size_t count, int type) {
    size_t bytes = count * types[type].size;
    char *host = (char *)malloc(bytes);
    CHECK(host != NULL);
    fill(host, p->rank, first, count, type);
    CUDA(cudaMemcpyAsync(to, host, bytes, cudaMemcpyHostToDevice, p->stream));
    free(host);
}

static void play_gather(player *p, size_t n, int type, int in_place) {
    size_t one = n * types[type].size;
    char *src = in_place ? p->dst + (size_t)p->rank * one : p->src;
    upload(p, src, 0, n, type);
    NCCL_OK(ncclAllGather(src, p->dst, n, types[type].nccl, p->comm, p->stream));
    for (int k = 0; k < p->world; k++) fill(p->want + (size_t)k * one, k, 0, n, type);
    check_dst(p, p->dst, one * (size_t)p->world);
}

static void play_scatter(player *p, size_t n, int type, int in_place) {
    size_t mine = n * (size_t)p->rank;
    char *dst = in_place ? p->src + mine * types[type].size : p->dst;
    upload(p, p->src, 0, n * (size_t)p->world, type);
    NCCL_OK(ncclReduceScatter(p->src, dst, n, types[type].nccl, ncclSum, p->comm, p->stream));
    expect_reduced(p->want, p->world, mine, n, type, FSDP_SUM);
    check_dst(p, dst, n * types[type].size);
}

static void play_reduce(player *p, size_t n, int type, int in_place) {
    static const ncclRedOp_t ops[] = {ncclSum, ncclMax, ncclMin};
    static const fsdp_redop own[] = {FSDP_SUM, FSDP_MAX, FSDP_MIN};
    char *dst = in_place ? p->src : p->dst;
    for (int i = 0; i < 3; i++) {
        upload(p, p->src, 0, n, type);
        NCCL_OK(ncclAllReduce(p->src, dst, n, types[type].nccl, ops[i], p->comm, p->stream));
        expect_reduced(p->want, p->world, 0, n, type, own[i]);
        check_dst(p, dst, n * types[type].size);
    }
}

static void play_others(player *p, size_t n, int type) {
    size_t one = n * types[type].size;
    int root = p->world - 1, next = (p->rank + 1) % p->world;
    int before = (p->rank + p->world - 1) % p->world;
    upload(p, p->src, 0, n, type);
    NCCL_OK(ncclBroadcast(p->src, p->dst, n, types[type].nccl, root, p->comm, p->stream));
    fill(p->want, root, 0, n, type);
    check_dst(p, p->dst, one);
    upload(p, p->src, 0, n * (size_t)p->world, type);
    NCCL_OK(ncclAlltoAll(p->src, p->dst, n, types[type].nccl, p->comm, p->stream));
    for (int k = 0; k < p->world; k++)
        fill(p->want + (size_t)k * one, k, (size_t)p->rank * n, n, type);
    check_dst(p, p->dst, one * (size_t)p->world);
    NCCL_OK(ncclGroupStart()); /* a ring; one rank sends to itself */
    NCCL_OK(ncclSend(p->src, n, types[type].nccl, next, p->comm, p->stream));
    NCCL_OK(ncclRecv(p->dst, n, types[type].nccl, before, p->comm, p->stream));
    NCCL_OK(ncclGroupEnd());
    fill(p->want, before, 0, n, type);
    check_dst(p, p->dst, one);
}

static void collectives(int rank, int world, void *arg) {
    static const size_t counts[] = {1, 3, 1000, 40000}; /* the last in several chunks */
    void *ptr;
    player p;
    (void)arg;
    p.rank = rank;
    p.world = world;
    p.comm = join_comm(rank, world, 0);
    p.stream = a_stream();
    p.room = 40000 * 8;
    CUDA(cudaMalloc(&ptr, p.room * (size_t)world));
    p.src = (char *)ptr;
    CUDA(cudaMalloc(&ptr, p.room * (size_t)world));
    p.dst = (char *)ptr;
    p.want = (char *)malloc(p.room * (size_t)world);
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
        for (int type = 0; type < TYPES; type++) {
            /* the other types take long */
            if (counts[c] > 1000 && types[type].own != FSDP_F64) continue;
            for (int in_place = 0; in_place < 2; in_place++) {
                play_gather(&p, counts[c], type, in_place);
                play_scatter(&p, counts[c], type, in_place);
                play_reduce(&p, counts[c], type, in_place);
            }
            play_others(&p, counts[c], type);
        }
    free(p.want);
    CUDA(cudaFree(p.src));
    CUDA(cudaFree(p.dst));
    CUDA(cudaStreamDestroy(p.stream));
    NCCL_OK(ncclCommDestroy(p.comm));
}
TEST_P(stub_nccl, collectives, teams, row->world > 3 ? MANY_RANKS : 0) { RUN_TEAM(collectives); }

/* Colors by parity, keys in reverse; with more than two ranks, the last is in no group. */
static void splits(int rank, int world, void *arg) {
    ncclComm_t comm = join_comm(rank, world, 0), child, again;
    int left_out = world > 2 && rank == world - 1, members = 0, behind = 0, size, mine;
    (void)arg;
    NCCL_OK(ncclCommSplit(comm, left_out ? NCCL_SPLIT_NOCOLOR : rank % 2, -rank, &child, NULL));
    CHECK((child == NULL) == left_out);
    for (int k = 0; k < world; k++) {
        if (k % 2 != rank % 2 || (world > 2 && k == world - 1)) continue;
        members++;
        behind += k > rank;
    }
    if (child) {
        NCCL_OK(ncclCommCount(child, &size));
        NCCL_OK(ncclCommUserRank(child, &mine));
        CHECK_EQ_INT(size, members);
        CHECK_EQ_INT(mine, behind);
        NCCL_OK(ncclCommSplit(child, 0, 0, &again, NULL)); /* equal keys keep the order */
        NCCL_OK(ncclCommUserRank(again, &size));
        CHECK_EQ_INT(size, mine);
        NCCL_OK(ncclCommDestroy(again));
        NCCL_OK(ncclCommFinalize(child));
        NCCL_OK(ncclCommDestroy(child));
    }
    NCCL_OK(ncclCommDestroy(comm));
}
TEST_P(stub_nccl, split, teams, row->world > 3 ? MANY_RANKS : 0) { RUN_TEAM(splits); }

/* Operations of a group launch at its end only, where its streams wait for each other; operations
   of one comm keep their order on any stream. */
static void groups(int rank, int world, void *arg) {
    ncclComm_t comm = join_comm(rank, world, 0);
    cudaStream_t a = a_stream(), b = a_stream();
    int *x = device_ints(8), gate = 0, out[2];
    (void)arg;
    launch(a, x, NULL, 2, 1, NULL);
    CUDA(cudaStreamSynchronize(a));
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, a));
    NCCL_OK(ncclAllReduce(x + 1, x + 1, 1, ncclInt32, ncclSum, comm, b));
    NCCL_OK(ncclAllReduce(x + 1, x + 1, 0, ncclInt32, ncclSum, comm, b));
    NCCL_OK(ncclGroupEnd());
    launch(b, x + 1, NULL, 1, 10, NULL); /* runs before the collectives, which were called first */
    if (!is_sync) launch(a, NULL, NULL, 0, 0, &gate);
    NCCL_OK(ncclGroupEnd());
    if (!is_sync) check_waits(b);
    open_gate(&gate);
    CUDA(cudaMemcpyAsync(out, x, sizeof out, cudaMemcpyDeviceToHost, b));
    CHECK_EQ_INT(out[0], world);
    CHECK_EQ_INT(out[1], 10 * world);
    gate = 0;
    if (!is_sync) launch(a, NULL, NULL, 0, 0, &gate);
    NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, a));
    NCCL_OK(ncclAllReduce(x + 1, x + 1, 1, ncclInt32, ncclSum, comm, b));
    if (!is_sync) check_waits(b);
    open_gate(&gate);
    NCCL_OK(ncclGroupStart()); /* one invalid call: none is launched */
    NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, a));
    CHECK_STATUS(ncclBroadcast(x, x, 1, ncclInt32, world, comm, a), ncclInvalidArgument);
    CHECK_STATUS(ncclGroupEnd(), ncclInvalidArgument);
    CHECK_STATUS(ncclGroupEnd(), ncclInvalidUsage);
    CUDA(cudaStreamDestroy(a));
    CUDA(cudaStreamDestroy(b));
    NCCL_OK(ncclCommDestroy(comm));
    CUDA(cudaFree(x));
}
TEST_P(stub_nccl, groups, teams, row->world > 3 ? MANY_RANKS : 0) { RUN_TEAM(groups); }

/* One thread drives all ranks, each on its device. */
TEST_P(stub_nccl, one_thread, modes) {
    ncclComm_t comms[3];
    int *x[3], out;
    stub_set(STUB_SYNC, row->sync);
    share_ids(1);
    NCCL_OK(ncclGroupStart());
    for (int r = 0; r < 3; r++) {
        CUDA(cudaSetDevice(r));
        NCCL_OK(ncclCommInitRank(&comms[r], 3, shared_ids[0], r));
    }
    NCCL_OK(ncclGroupEnd());
    NCCL_OK(ncclGroupStart());
    for (int r = 0; r < 3; r++) {
        CUDA(cudaSetDevice(r));
        x[r] = device_ints(1);
        launch(NULL, x[r], NULL, 1, r + 1, NULL);
        NCCL_OK(ncclAllReduce(x[r], x[r], 1, ncclInt32, ncclSum, comms[r], NULL));
    }
    NCCL_OK(ncclGroupEnd());
    for (int r = 0; r < 3; r++) {
        CUDA(cudaSetDevice(r));
        CUDA(cudaMemcpy(&out, x[r], sizeof out, cudaMemcpyDeviceToHost));
        CHECK_EQ_INT(out, 6);
        CUDA(cudaFree(x[r]));
    }
    NCCL_OK(ncclGroupStart());
    for (int r = 0; r < 3; r++) NCCL_OK(ncclCommDestroy(comms[r]));
    NCCL_OK(ncclGroupEnd());
    check_nothing_left();
}

/* ---- invalid calls --------------------------------------------------------------------------- */

static ncclComm_t alone(void) {
    share_ids(1);
    return join_comm(0, 1, 0);
}

TEST(stub_nccl, arguments) {
    ncclComm_t comm = alone(), other = NULL;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    static float foreign[4];
    float *x = (float *)(void *)device_ints(4);
    void *pinned;
    CUDA(cudaMallocHost(&pinned, 16));
    CHECK_STATUS(ncclAllReduce(foreign, foreign, 4, ncclFloat, ncclSum, comm, NULL),
                 ncclInvalidArgument);
    CHECK(strstr(ncclGetLastError(comm), "allocation") != NULL);
    CHECK_STATUS(ncclAllReduce(x, x, 5, ncclFloat, ncclSum, comm, NULL), ncclInvalidArgument);
    CHECK_STATUS(ncclAllReduce(x, x, 4, ncclFloat, ncclNumOps, comm, NULL), ncclInvalidArgument);
    CHECK_STATUS(ncclSend(x, 4, ncclFloat, 1, comm, NULL), ncclInvalidArgument);
    NCCL_OK(ncclAllReduce(pinned, pinned, 4, ncclFloat, ncclSum, comm, NULL));
    /* empty, so dropped */
    NCCL_OK(ncclAllReduce(foreign, foreign, 0, ncclFloat, ncclSum, comm, NULL));
    CHECK_STATUS(ncclCommInitRank(&other, 2, shared_ids[0], 2), ncclInvalidArgument);
    config.magic = 0;
    CHECK_STATUS(ncclCommInitRankConfig(&other, 1, shared_ids[0], 0, &config), ncclInvalidArgument);
    /* the id is used */
    CHECK_STATUS(ncclCommInitRank(&other, 1, shared_ids[0], 0), ncclInvalidUsage);
    CHECK(!other);
    CUDA(cudaSetDevice(1));
    cudaStream_t elsewhere = a_stream();
    CHECK_STATUS(ncclAllReduce(x, x, 4, ncclFloat, ncclSum, comm, elsewhere), ncclInvalidArgument);
    NCCL_OK(ncclCommFinalize(comm));
    CHECK_STATUS(ncclAllReduce(x, x, 4, ncclFloat, ncclSum, comm, NULL), ncclInvalidArgument);
    NCCL_OK(ncclCommDestroy(comm));
    CHECK_STATUS(ncclCommInitRank(&other, 1, shared_ids[0], 0), ncclSystemError);
    CUDA(cudaStreamDestroy(elsewhere));
    CUDA(cudaFree(x));
    CUDA(cudaFreeHost(pinned));
    check_nothing_left();
}

static void gather_overlaps(void) {
    ncclComm_t comm = alone();
    int *x = device_ints(8);
    NCCL_OK(ncclAllGather(x + 1, x, 4, ncclInt32, comm, NULL));
}
static void scatter_overlaps(void) {
    ncclComm_t comm = alone();
    int *x = device_ints(8);
    NCCL_OK(ncclReduceScatter(x, x + 2, 4, ncclInt32, ncclSum, comm, NULL));
}
static void touches_nothing(void) {
    ncclComm_t comm = alone();
    int *x = device_ints(8);
    NCCL_OK(ncclAllGather(x + 4, x, 4, ncclInt32, comm, NULL));
    CUDA(cudaDeviceSynchronize());
}
static void freed_while_registered(void) {
    ncclComm_t comm = alone();
    void *ptr, *handle;
    NCCL_OK(ncclMemAlloc(&ptr, 1));
    NCCL_OK(ncclCommRegister(comm, ptr, 64, &handle));
    NCCL_OK(ncclMemFree(ptr));
}

/* Two ranks that share a GPU and seem to share a host are refused; the others lose them. */
static const struct {
    const char *name, *host;
    int threads, devices, version, same;
} sharing[] = {
    {"processes", NULL, 0, 1, 22809, 1},        {"threads", NULL, 1, 1, 22809, 1},
    {"hosts", "fake", 0, 1, 22809, 0},          {"threads_of_a_host", "fake", 1, 1, 22809, 1},
    {"two_of_three", NULL, 0, 2, 22809, 1},     {"a_gpu_each", NULL, 1, 3, 22809, 0},
    {"enabled,2.30", "enable", 1, 1, 23003, 0}, {"enabled,2.28", "enable", 1, 1, 22809, 1}};
static void shares(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    int device = rank % sharing[row].devices, alone = world % sharing[row].devices && device;
    ncclComm_t comm;
    ncclResult_t expected = !sharing[row].same ? ncclSuccess
                            : alone            ? ncclRemoteError
                                               : ncclInvalidUsage;
    CUDA(cudaSetDevice(device));
    CHECK_STATUS(ncclCommInitRank(&comm, world, shared_ids[0], rank), expected);
    if (expected == ncclSuccess) NCCL_OK(ncclCommDestroy(comm));
    if (expected == ncclInvalidUsage)
        CHECK_MSG(strstr(ncclGetLastError(NULL), "Duplicate GPU detected"), "%s",
                  ncclGetLastError(NULL));
}
TEST_P(stub_nccl, one_gpu, sharing) {
    void *arg = (void *)(uintptr_t)(row - sharing);
    share_ids(1);
    stub_set(STUB_NCCL_VERSION, row->version);
    if (row->host && strcmp(row->host, "enable") == 0) setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 1);
    else if (row->host) setenv("NCCL_HOSTID", row->host, 1);
    if (row->threads) h_ranks_thread(3, shares, arg);
    else h_ranks_proc(3, shares, arg);
    check_nothing_left();
}

/* Two communicators do not fit at the same time, and each rank starts them in another order: they
   hang, unless NCCL starts them in the order of issue. */
static const struct {
    const char *name, *order;
    int sms, version, ends, keeps; /* keeps: the order of issue */
} room_orders[] = {{"room", "0", 48, 22809, 1, 0},
                   {"no_room", "0", 47, 22809, 0, 0},
                   {"order", "1", 47, 22809, 1, 1},
                   {"order_of_2.25", "1", 47, 22505, 0, 0}};
static void await_begun(int device, int nth) {
    long nap = 0;
    while (stub_begun(device) < nth) h_nap(&nap);
}
static void crosses(int rank, int world, void *arg) {
    size_t row = (size_t)(uintptr_t)arg;
    ncclComm_t a = join_comm(rank, world, 0), b = join_comm(rank, world, 1);
    cudaStream_t s = a_stream(), t = a_stream();
    int gate = 0, *x = device_ints(2);
    if (rank == 0) launch(s, NULL, NULL, 0, 0, &gate);
    NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, a, s));
    h_mark(0);
    h_await_marks(0, 2);                 /* before this, rank 1 issues nothing */
    if (rank == 1) await_begun(rank, 1); /* the first one */
    NCCL_OK(ncclAllReduce(x + 1, x + 1, 1, ncclInt32, ncclSum, b, t));
    if (rank == 0 && !room_orders[row].keeps) await_begun(rank, 2); /* the second one */
    open_gate(&gate);
    if (!room_orders[row].ends) {
        check_waits(s);
        check_waits(t);
        NCCL_OK(ncclCommAbort(a));
        NCCL_OK(ncclCommAbort(b));
    }
    CUDA(cudaStreamSynchronize(s));
    CUDA(cudaStreamSynchronize(t));
    if (room_orders[row].ends) {
        NCCL_OK(ncclCommDestroy(a));
        NCCL_OK(ncclCommDestroy(b));
    }
    CUDA(cudaStreamDestroy(s));
    CUDA(cudaStreamDestroy(t));
    CUDA(cudaFree(x));
    check_nothing_left();
}
TEST_P(stub_nccl, room, room_orders) {
    share_ids(2);
    stub_set(STUB_SMS, row->sms);
    stub_set(STUB_NCCL_VERSION, row->version);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", row->order, 1);
    h_ranks_proc(2, crosses, (void *)(uintptr_t)(row - room_orders));
}

/* With CUDA_LAUNCH_BLOCKING the end of a group waits for peers; an abort ends the wait. */
static void *abort_soon(void *comm) {
    usleep(100000);
    NCCL_OK(ncclCommAbort((ncclComm_t)comm));
    return comm;
}
static void blocks_alone(int rank, int world, void *arg) {
    ncclComm_t comm = join_comm(rank, world, 0);
    cudaStream_t s = a_stream();
    int *x = device_ints(1);
    pthread_t thread;
    (void)arg;
    stub_set(STUB_BLOCKING, 1);
    NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, s));
    CUDA(cudaStreamQuery(s));
    CHECK(!pthread_create(&thread, NULL, abort_soon, comm));
    int64_t start = h_now_ms();
    if (rank == 0) NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, s));
    if (rank == 0) CHECK(h_now_ms() - start >= 90);
    CHECK(!pthread_join(thread, NULL));
    CUDA(cudaStreamSynchronize(s));
    CUDA(cudaStreamDestroy(s));
    CUDA(cudaFree(x));
}
TEST(stub_nccl, blocking_launches) { run_team(2, 0, 0, blocks_alone); }

TEST(stub_nccl, overlap) {
    CHECK(aborts(gather_overlaps));
    CHECK(aborts(scatter_overlaps));
    CHECK(!aborts(touches_nothing));
}

/* ---- registration ---------------------------------------------------------------------------- */

static void registers(int rank, int world, void *arg) {
    ncclComm_t comm = join_comm(rank, world, 0);
    ncclWindow_t window;
    void *ptr, *handle, *plain;
    (void)arg;
    NCCL_OK(ncclMemAlloc(&ptr, 100));
    CUDA(cudaMalloc(&plain, 4096));
    NCCL_OK(ncclCommRegister(comm, ptr, 64, &handle));
    NCCL_OK(ncclAllReduce(ptr, ptr, 4, ncclInt32, ncclSum, comm, NULL));
    NCCL_OK(ncclCommDeregister(comm, handle));
    NCCL_OK(ncclCommWindowRegister(comm, ptr, 100, &window, NCCL_WIN_COLL_SYMMETRIC));
    CHECK(window != NULL);
    NCCL_OK(ncclCommWindowDeregister(comm, window));
    stub_set(STUB_WINDOWS_WORK, 0);
    NCCL_OK(ncclCommWindowRegister(comm, ptr, 100, &window, NCCL_WIN_COLL_SYMMETRIC));
    CHECK(!window);
    CHECK_STATUS(ncclCommWindowRegister(comm, plain, 4096, &window, 0), ncclInvalidArgument);
    CHECK_STATUS(cudaFree(ptr), cudaErrorInvalidValue);
    CHECK_STATUS(ncclMemFree(plain), ncclInvalidArgument);
    CUDA(cudaDeviceSynchronize());
    NCCL_OK(ncclMemFree(ptr));
    CUDA(cudaFree(plain));
    NCCL_OK(ncclCommDestroy(comm));
}
TEST_P(stub_nccl, registers, pairs) { RUN_TEAM(registers); }

TEST(stub_nccl, registered_memory) {
    void *ptr;
    NCCL_OK(ncclMemAlloc(&ptr, 1));
    CHECK_EQ_INT(stub_live(STUB_DEVICE_BYTES), 2 << 20);
    NCCL_OK(ncclMemFree(ptr));
    CHECK(aborts(freed_while_registered));
}

/* Offsets that differ between ranks, and a comm that uses them. */
static void registers_apart(int rank, int world, void *arg) {
    ncclComm_t comm = join_comm(rank, world, 0);
    void *ptr, *handle;
    (void)arg;
    NCCL_OK(ncclMemAlloc(&ptr, 4096));
    NCCL_OK(ncclCommRegister(comm, (char *)ptr + 256 * rank, 64, &handle));
    NCCL_OK(ncclAllReduce(ptr, ptr, 4, ncclInt32, ncclSum, comm, NULL));
    CUDA(cudaDeviceSynchronize());
}
static void run_apart(void) { h_ranks_thread(2, registers_apart, NULL); }
TEST(stub_nccl, registers_apart) {
    share_ids(1);
    CHECK(aborts(run_apart));
}

/* ---- failures -------------------------------------------------------------------------------- */

static uint32_t *turn; /* shared by the ranks of a test */
static void make_turn(void) {
    void *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    turn = (uint32_t *)at;
}
static void next_turn(void) { __atomic_add_fetch(turn, 1u, __ATOMIC_ACQ_REL); }
static void await_turn(uint32_t n) {
    long ns = 0;
    while (__atomic_load_n(turn, __ATOMIC_ACQUIRE) < n) h_nap(&ns);
}

typedef struct {
    ncclComm_t comm;
    int after_ms;
} killer;
static void *abort_later(void *arg) {
    killer *k = (killer *)arg;
    struct timespec t = {0, k->after_ms * 1000000L};
    nanosleep(&t, NULL);
    NCCL_OK(ncclCommAbort(k->comm));
    return NULL;
}

/* A missing peer is not noticed. An abort ends operations that hang on this rank, and on no other
   rank. */
static void lone_abort(int rank, int world, void *arg) {
    ncclComm_t comm = join_comm(rank, world, 0);
    killer k = {comm, 200}; /* ms: long after the call has begun, even on a busy machine */
    pthread_t t;
    int *x = device_ints(4);
    ncclResult_t async;
    (void)arg;
    CUDA(cudaDeviceSynchronize());
    if (rank == 0) {
        CHECK(!pthread_create(&t, NULL, abort_later, &k)); /* in synchronous mode the call hangs */
        NCCL_OK(ncclAllReduce(x, x, 4, ncclInt32, ncclSum, comm, NULL));
        CUDA(cudaDeviceSynchronize());
        CHECK(!pthread_join(t, NULL));
        next_turn();
        await_turn(2);
    } else {
        await_turn(1); /* rank 0 has gone; this rank does not notice */
        int64_t start = h_now_ms();
        CHECK(!pthread_create(&t, NULL, abort_later, &k));
        NCCL_OK(ncclCommGetAsyncError(comm, &async));
        NCCL_OK(async);
        NCCL_OK(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, NULL));
        CUDA(cudaDeviceSynchronize());
        CHECK(h_now_ms() - start >= 190);
        CHECK(!pthread_join(t, NULL));
        next_turn();
    }
    CUDA(cudaFree(x));
}
TEST_P(stub_nccl, lone_abort, pairs) {
    make_turn();
    RUN_TEAM(lone_abort);
}

static void peer_dies(int rank, int world, void *arg) {
    ncclComm_t comm = join_comm(rank, world, 0);
    int *x = device_ints(4);
    ncclResult_t async;
    (void)arg;
    if (rank == 1) h_die(SIGKILL);
    NCCL_OK(ncclAllReduce(x, x, 4, ncclInt32, ncclSum, comm, NULL));
    check_waits(NULL);
    NCCL_OK(ncclCommGetAsyncError(comm, &async));
    NCCL_OK(async);
    stub_async_error(comm, ncclRemoteError);
    NCCL_OK(ncclCommGetAsyncError(comm, &async));
    CHECK_STATUS(async, ncclRemoteError);
    NCCL_OK(ncclCommAbort(comm));
    CUDA(cudaDeviceSynchronize());
    CUDA(cudaFree(x));
    check_nothing_left();
}
TEST(stub_nccl, peer_dies) {
    share_ids(1);
    h_ranks_proc(2, peer_dies, NULL);
}

/* Counts that differ: a hang, or garbage. */
static void disagree(int rank, int world, void *arg) {
    ncclComm_t comm = join_comm(rank, world, 0);
    int *x = device_ints(4), out;
    (void)arg;
    stub_set(STUB_GARBAGE, 1);
    NCCL_OK(ncclAllReduce(x, x, (size_t)rank + 1, ncclInt32, ncclSum, comm, NULL));
    CUDA(cudaMemcpy(&out, x, sizeof out, cudaMemcpyDeviceToHost));
    CHECK_EQ_INT(out, (int)0xEEEEEEEEu);
    next_turn();
    await_turn((uint32_t)world);
    stub_set(STUB_GARBAGE, 0);
    next_turn();
    await_turn(2 * (uint32_t)world);
    NCCL_OK(ncclAllReduce(x, x, (size_t)rank + 1, ncclInt32, ncclSum, comm, NULL));
    check_waits(NULL);
    NCCL_OK(ncclCommAbort(comm));
    CUDA(cudaFree(x)); /* waits, and ends */
}
TEST_P(stub_nccl, disagree, quick) {
    make_turn();
    RUN_TEAM(disagree);
}

/* Destroy waits for the peers, and for the operations before it. */
static void destroys(int rank, int world, void *arg) {
    ncclComm_t comm = join_comm(rank, world, 0);
    int gate = 0;
    (void)arg;
    if (rank == 0) {
        NCCL_OK(ncclCommDestroy(comm));
        CHECK_EQ_INT(__atomic_load_n(turn, __ATOMIC_ACQUIRE), 1);
    } else {
        struct timespec t = {0, 20000000};
        launch(NULL, NULL, NULL, 0, 0, is_sync ? NULL : &gate);
        nanosleep(&t, NULL);
        open_gate(&gate);
        next_turn();
        NCCL_OK(ncclCommDestroy(comm));
    }
}
TEST_P(stub_nccl, destroy_waits, pairs) {
    make_turn();
    RUN_TEAM(destroys);
}

/* The second rank to arrive is refused, whichever it is. The first one waits until it aborts. */
static void versions_differ(int rank, int world, void *arg) {
    ncclComm_t comm = NULL;
    ncclResult_t state = ncclInProgress;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    (void)arg;
    config.blocking = 0;
    if (rank == 0) stub_set(STUB_NCCL_VERSION, 21803);
    CHECK_STATUS(ncclCommInitRankConfig(&comm, world, shared_ids[0], rank, &config),
                 ncclInProgress);
    while (state == ncclInProgress && !__atomic_load_n(turn, __ATOMIC_ACQUIRE)) {
        NCCL_OK(ncclCommGetAsyncError(comm, &state));
        sched_yield();
    }
    if (state != ncclInProgress) {
        CHECK_STATUS(state, ncclInvalidUsage);
        next_turn();
    }
    NCCL_OK(ncclCommAbort(comm));
    CHECK_EQ_INT(__atomic_load_n(turn, __ATOMIC_ACQUIRE), 1);
    check_nothing_left();
}
TEST(stub_nccl, versions_differ) {
    make_turn();
    share_ids(1);
    h_ranks_proc(2, versions_differ, NULL);
}

/* ---- non-blocking communicators -------------------------------------------------------------- */

static void poll_comm(ncclComm_t comm, int least) {
    ncclResult_t state = ncclInProgress;
    int polls = -1;
    while (state == ncclInProgress) {
        NCCL_OK(ncclCommGetAsyncError(comm, &state));
        polls++;
        sched_yield();
    }
    NCCL_OK(state);
    CHECK_MSG(polls >= least, "%d polls, at least %d", polls, least);
}

static void in_progress(int rank, int world, void *arg) {
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    ncclComm_t comm = NULL, child = (ncclComm_t)(void *)&config;
    cudaStream_t s;
    int *x, out;
    (void)arg;
    CUDA(cudaSetDevice(rank));
    s = a_stream();
    config.blocking = 0;
    CHECK_STATUS(ncclCommInitRankConfig(&comm, world, shared_ids[0], rank, &config),
                 ncclInProgress);
    CHECK(comm != NULL);
    x = device_ints(2);
    CHECK_STATUS(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, s), ncclInvalidArgument);
    poll_comm(comm, 3);
    launch(s, x, NULL, 1, 1, NULL);
    CHECK_STATUS(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, s), ncclInProgress);
    CHECK_STATUS(ncclAllReduce(x, x, 1, ncclInt32, ncclSum, comm, s), ncclInvalidArgument);
    CUDA(cudaMemcpyAsync(&out, x, sizeof out, cudaMemcpyDeviceToHost, s));
    CHECK_EQ_INT(out, 1); /* not launched yet */
    poll_comm(comm, 3);
    CUDA(cudaMemcpyAsync(&out, x, sizeof out, cudaMemcpyDeviceToHost, s));
    CHECK_EQ_INT(out, world);
    CHECK_STATUS(ncclCommSplit(comm, 0, rank, &child, NULL), ncclInProgress);
    CHECK(!child);
    poll_comm(comm, 3);
    CHECK(child != NULL);
    poll_comm(child, 3);
    CHECK_STATUS(ncclCommFinalize(child), ncclInProgress);
    poll_comm(child, 3);
    NCCL_OK(ncclCommDestroy(child));
    NCCL_OK(ncclCommDestroy(comm));
    CUDA(cudaStreamDestroy(s));
    CUDA(cudaFree(x));
}
TEST_P(stub_nccl, in_progress, pairs) {
    stub_set(STUB_PROGRESS, 3);
    RUN_TEAM(in_progress);
}

/* ---- collectives and the race checker -------------------------------------------------------- */

static const struct {
    const char *name;
    /* waits before and after; joined: the second stream is part of the group */
    int before, after, joined, races;
} joints[] = {{"waits", 1, 1, 0, 0},
              {"not_before", 0, 1, 0, 1},
              {"not_after", 1, 0, 0, 1},
              {"group", 0, 0, 1, 0}};

/* A kernel of stream b writes the input of a collective on stream a, and reads the result. */
TEST_P(stub_race, collective, joints) {
    scene s;
    stub_checks(1);
    ncclComm_t comm = alone();
    s.a = a_stream();
    s.b = a_stream();
    s.e = an_event();
    s.x = device_ints(64);
    s.y = device_ints(64);
    launch(s.b, s.x, NULL, 64, 1, NULL);
    if (row->before) {
        CUDA(cudaEventRecord(s.e, s.b));
        CUDA(cudaStreamWaitEvent(s.a, s.e, 0));
    }
    NCCL_OK(ncclGroupStart());
    NCCL_OK(ncclAllReduce(s.x, s.x, 32, ncclInt32, ncclSum, comm, s.a));
    if (row->joined) NCCL_OK(ncclAllReduce(s.y, s.y, 1, ncclInt32, ncclSum, comm, s.b));
    NCCL_OK(ncclGroupEnd());
    if (row->after) wait_b(&s);
    launch(s.b, s.y, s.x, 32, 1, NULL);
    CHECK_MSG((stub_races() > 0) == row->races, "%lld races: %s", (long long)stub_races(),
              stub_race_text());
    CHECK(!row->races || strstr(stub_race_text(), "ncclAllReduce") != NULL);
    CUDA(cudaEventDestroy(s.e));
    NCCL_OK(ncclCommDestroy(comm));
}

/* One comm on two streams: its operations are ordered, the work around them is not. */
TEST(stub_race, one_comm) {
    scene s;
    stub_checks(1);
    ncclComm_t comm = alone();
    s.a = a_stream();
    s.b = a_stream();
    s.x = device_ints(64);
    NCCL_OK(ncclAllReduce(s.x, s.x, 64, ncclInt32, ncclSum, comm, s.a));
    NCCL_OK(ncclAllReduce(s.x, s.x, 64, ncclInt32, ncclSum, comm, s.b));
    CHECK_EQ_INT(stub_races(), 0);
    CUDA(cudaMemsetAsync(s.x, 0, 4, s.a));
    CHECK_EQ_INT(stub_races(), 1);
    NCCL_OK(ncclCommDestroy(comm));
}

/* An in-place gather does not write a rank's own part, which may be read meanwhile. */
static void own_part(int rank, int world, void *arg) {
    (void)arg;
    stub_checks(1);
    ncclComm_t comm = join_comm(rank, world, 0);
    cudaStream_t a = a_stream(), b = a_stream();
    int *x = device_ints(64 * (size_t)world), *y = device_ints(64);
    NCCL_OK(ncclAllGather(x + 64 * rank, x, 64, ncclInt32, comm, a));
    launch(b, y, x + 64 * rank, 64, 1, NULL);
    CHECK_MSG(stub_races() == 0, "%s", stub_race_text());
    launch(b, y, x + 64 * ((rank + 1) % world), 64, 1, NULL);
    CHECK_EQ_INT(stub_races(), 2);
    NCCL_OK(ncclCommDestroy(comm));
}
TEST(stub_race, own_part) {
    share_ids(1);
    h_ranks_proc(3, own_part, NULL);
}

static void race_by_environment(void) {
    setenv("FSDP_STUB_CHECKS", "1", 1);
    int *x = device_ints(64);
    cudaStream_t a = a_stream(), b = a_stream();
    launch(a, x, NULL, 64, 1, NULL);
    launch(b, NULL, x, 64, 1, NULL);
}
TEST(stub_race, environment) { CHECK(aborts(race_by_environment)); }
