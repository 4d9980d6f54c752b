/* fsdp_cuda.h - GPUs as a device: memory, streams and copies over the CUDA runtime

   -DFSDP_BACKEND_NCCL compiles it in, with fsdp_nccl.h. The kernels are in fsdp_cuda.cu, whose
   object the program is linked with; a program that is itself compiled by nvcc gets them with the
   implementation of fsdp.h and needs no object:

       nvcc -O3 -c backends/fsdp_cuda.cu
       cc -DFSDP_BACKEND_NCCL -I. -I$CUDA_HOME/include prog.c fsdp_cuda.o -lnccl -lcudart ...

   How it works
   - COMPUTE is the legacy default stream until fsdp_set_stream names another one. The streams of
     gathers and reductions are made here, without the legacy stream's implicit order, and with the
     greatest priority: a gather that is ready goes before the caller's next kernel.
   - Lists of blocks are parameters of the kernels: no table is uploaded, so none can be stale.
   - A copy without arithmetic from or to one place is a cudaMemcpyAsync, for any host memory. All
     other copies are kernels, which read pinned memory where it is.
   - New memory is filled with zeros in a separate stream, without a wait for other work.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif

#ifndef FSDP_CUDA_H
#define FSDP_CUDA_H
#ifndef FSDP_MATH_ONLY

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
/* fsdp_cuda_device_ops - the table of CUDA devices, named "cuda"
   Result      never NULL; static
   open        takes device boot->local_rank modulo the number of visible ones, and makes it the
               calling thread's current device; the world's calls come from that thread
   Arithmetic  copies, AdamW, SGD and unscale give the bits of the host; norms are summed in another
               order than on the host, which is the same in every run
   Memory      FSDP_CUDA_MANAGED=1 in the environment: managed memory, which the host can read and
               write between calls. Each call waits for the work that it gives to COMPUTE (for
               tests: slower, and nothing overlaps)
   Thread      any */
// clang-format on
FSDP_API const fsdp_device_ops *fsdp_cuda_device_ops(void);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_CUDA_H

/* ============================================================================================ */

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_CUDA_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_CUDA_IMPLEMENTED

#include "../src/base/os.h"
#include "../src/base/text.h"
#include "../src/core/alloc.h"
#include "../src/core/error.h"
#include "fsdp_cuda_kernels.h"
#include "fsdp_signature.h" // the clock

#include <cuda_runtime_api.h>
#include <stdio.h>
#include <string.h>
#ifdef __CUDACC__
#include "fsdp_cuda.cu"
#endif

#define FSDPI_CUDA_SPIN_NS  20000 // spin of a wait before its first sleep
#define FSDPI_CUDA_NAP_NS   20000 // the first sleep
#define FSDPI_CUDA_NAP_MAX  80000 // the longest one
#define FSDPI_CUDA_PARTIALS 48
// f32 operations per second divided by those of f64: 2 on GPUs for data centers, 32 or 64 on
// others; CUDA reports it per device. If it is larger than this limit, norms add up pairs of f32:
// an element then takes about ten operations of f32, instead of two of f64. The limit is not
// measured.
#define FSDPI_CUDA_F64_RATIO 8
#define FSDPI_CUDA_GRACE_NS ((int64_t)3000000000) // after the deadline: the backend may say more

// A rank's device, for its own table and for NCCL's.
typedef struct fsdpi_cuda_place {
    const fsdp_boot *boot;
    int ordinal, is_managed;
    cudaStream_t setup; // for zero-filling, and for work that is done on return
    cudaEvent_t is_set;
    char error[320]; // text of the last failure
} fsdpi_cuda_place;

typedef struct fsdpi_cuda_device {
    fsdp_boot boot;
    fsdpi_cuda_place place;
    size_t max_pitch;             // most bytes from row to row in a 2-D copy
    int sums_in_pairs;            // 1: norms use two f32, since f64 is slow here
    void *own[FSDP_STREAM_COUNT]; // streams that the library made; others are the caller's
    // Device memory for norms; the last one is in use. Each is at least twice as large as the one
    // before, which stays: a captured graph may have its address.
    double *partials[FSDPI_CUDA_PARTIALS];
    int num_arrays;
    size_t num_partials; // room in the last one
} fsdpi_cuda_device;

static fsdpi_cuda_device *fsdpi_cuda_of(fsdp_device *device) {
    return (fsdpi_cuda_device *)(void *)device;
}

/* -------------------------------------------------------------------------------------------- */
// Failures of the runtime as statuses and texts.

static fsdp_status fsdpi_cuda_read_managed(int *is_managed, fsdpi_text *error) {
    *is_managed = 0;
    return fsdpi_env_int("FSDP_CUDA_MANAGED", 0, 1, is_managed, error);
}

#define FSDPI_CUDA_NO_GRAPH                                                                        \
    "a CUDA graph can be captured on one rank, without casts (docs/gpu.md, CUDA graphs)"

// Returns the status of a result of the runtime, and writes its text to `error`.
static fsdp_status fsdpi_cuda_status(char *error, size_t cap, int ordinal, int result,
                                     const char *what) {
    cudaError_t e = (cudaError_t)result;
    if (e == cudaSuccess) return FSDP_OK;
    (void)cudaGetLastError(); // resets the error, which a later call would return again
    int is_captured = e >= cudaErrorStreamCaptureUnsupported &&
                      e <= cudaErrorStreamCaptureWrongThread;
    (void)snprintf(error, cap, "[E810] %s: CUDA error %d (%s) on device %d: %s%s", what, result,
                   cudaGetErrorName(e), ordinal, cudaGetErrorString(e),
                   is_captured ? "; " FSDPI_CUDA_NO_GRAPH : "");
    if (is_captured) return FSDP_ERR_UNSUPPORTED;
    return e == cudaErrorMemoryAllocation ? FSDP_ERR_OUT_OF_MEMORY : FSDP_ERR_BACKEND;
}

static fsdp_status fsdpi_cuda_check(fsdpi_cuda_place *at, int result, const char *what) {
    return fsdpi_cuda_status(at->error, sizeof at->error, at->ordinal, result, what);
}

static const char *fsdpi_cuda_error_text(fsdp_device *device) {
    return device ? fsdpi_cuda_of(device)->place.error : fsdpi_thread_error;
}

/* Waits for an event by polling: a blocking wait of the runtime has no deadline. Returns FSDP_OK if
   the event has happened, ABORTED if *stop is not 0. */
static fsdp_status fsdpi_cuda_await(const fsdp_boot *boot, cudaEvent_t event, int64_t timeout_ns,
                                    const uint32_t *stop, cudaError_t *result) {
    int64_t start = fsdpi_boot_now(boot), nap_ns = 0;
    for (;;) {
        *result = cudaEventQuery(event);
        if (*result == cudaSuccess) return FSDP_OK;
        if (*result != cudaErrorNotReady) return FSDP_ERR_BACKEND;
        (void)cudaGetLastError(); // "not ready" is no failure of a later call
        if (stop && FSDPI_LOAD(stop)) return FSDP_ERR_ABORTED;
        int64_t since = fsdpi_boot_now(boot) - start;
        if (since > timeout_ns) return FSDP_ERR_TIMEOUT;
        if (since < FSDPI_CUDA_SPIN_NS) continue;
        fsdpi_nap(&nap_ns, FSDPI_CUDA_NAP_NS, FSDPI_CUDA_NAP_MAX);
    }
}

/* Waits until the work of a stream is done, and returns 1: its memory may then be freed. If the
   work does not end in time, marks the device as hung, and returns 0: no memory is freed. */
static int fsdpi_cuda_idle(const fsdp_boot *boot, cudaStream_t stream, int64_t timeout_ns) {
    int64_t start = fsdpi_boot_now(boot), nap_ns = 0;
    while (!fsdpi_boot_is_hung(boot) && cudaStreamQuery(stream) == cudaErrorNotReady) {
        (void)cudaGetLastError(); // "not ready" is no failure of a later call
        if (fsdpi_boot_now(boot) - start > timeout_ns) {
            if (boot->hung) FSDPI_STORE(boot->hung, 1u);
            return 0;
        }
        fsdpi_nap(&nap_ns, FSDPI_CUDA_NAP_NS, FSDPI_CUDA_NAP_MAX);
    }
    return !fsdpi_boot_is_hung(boot);
}

/* -------------------------------------------------------------------------------------------- */
// The device, its memory, streams and events.

// Makes the rank's device current.
static fsdp_status fsdpi_cuda_select(fsdpi_cuda_place *at) {
    int count = 0;
    cudaError_t e = cudaGetDeviceCount(&count);
    if (e == cudaSuccess && count > 0) {
        at->ordinal = at->boot->local_rank % count;
        return fsdpi_cuda_check(at, (int)cudaSetDevice(at->ordinal), "cudaSetDevice");
    }
    (void)cudaGetLastError();
    (void)snprintf(
        at->error, sizeof at->error,
        "[E811] no CUDA device: %s. Check the GPU and its driver (nvidia-smi) and "
        "CUDA_VISIBLE_DEVICES, or train with FSDP_BACKEND=shm or gloo, if it is compiled in",
        e == cudaSuccess ? "none is visible" : cudaGetErrorString(e));
    return FSDP_ERR_BACKEND;
}

static fsdp_status fsdpi_cuda_place_open(fsdpi_cuda_place *at, const fsdp_boot *boot) {
    at->boot = boot;
    fsdpi_text error = {at->error, sizeof at->error, 0};
    fsdp_status status = fsdpi_cuda_read_managed(&at->is_managed, &error);
    if (!status) status = fsdpi_cuda_select(at);
    if (status) return status;
    cudaError_t e = cudaStreamCreateWithFlags(&at->setup, cudaStreamNonBlocking);
    if (e == cudaSuccess) e = cudaEventCreateWithFlags(&at->is_set, cudaEventDisableTiming);
    return fsdpi_cuda_check(at, (int)e, "making a stream");
}

static void fsdpi_cuda_place_close(fsdpi_cuda_place *at) {
    if (at->is_set) (void)cudaEventDestroy(at->is_set);
    if (at->setup) (void)cudaStreamDestroy(at->setup);
}

static fsdp_status fsdpi_cuda_late(fsdpi_cuda_place *at) {
    (void)snprintf(at->error, sizeof at->error,
                   "[E812] device %d has not finished in time: find a kernel of yours that does "
                   "not end, or raise FSDP_TIMEOUT_MS if a step takes longer",
                   at->ordinal);
    return FSDP_ERR_TIMEOUT;
}

// Waits for the work of a stream. `result`: the result of the calls that gave it the work.
static fsdp_status fsdpi_cuda_settle(fsdpi_cuda_place *at, cudaStream_t on, int result,
                                     const char *what) {
    cudaError_t e = (cudaError_t)result;
    fsdp_status status = FSDP_ERR_BACKEND;
    int64_t limit = at->boot->timeout_ns < INT64_MAX / 2
                        ? at->boot->timeout_ns + (on == at->setup ? 0 : FSDPI_CUDA_GRACE_NS)
                        : INT64_MAX;
    if (e == cudaSuccess) e = cudaEventRecord(at->is_set, on);
    if (e == cudaSuccess) status = fsdpi_cuda_await(at->boot, at->is_set, limit, NULL, &e);
    if (status == FSDP_ERR_BACKEND) // the work may still run, and its memory is freed next
        (void)fsdpi_cuda_idle(at->boot, on, at->boot->timeout_ns);
    if (status != FSDP_ERR_TIMEOUT) return fsdpi_cuda_check(at, (int)e, what);
    if (at->boot->hung) FSDPI_STORE(at->boot->hung, 1u);
    return fsdpi_cuda_late(at);
}

static int fsdpi_cuda_is_one(const char *variable) {
    const char *value = fsdpi_env(variable);
    return value && strcmp(value, "1") == 0;
}

static void fsdpi_cuda_warn(const fsdp_boot *boot) {
    if (boot->rank == 0 && fsdpi_cuda_is_one("CUDA_DEVICE_MAX_CONNECTIONS"))
        fsdpi_boot_log(boot, FSDP_LOG_WARN,
                       "[E813] CUDA_DEVICE_MAX_CONNECTIONS is 1: streams wait for each other, and "
                       "no collective runs beside a kernel; leave it unset, or set 8 to 32");
    if (boot->rank == 0 && fsdpi_cuda_is_one("CUDA_LAUNCH_BLOCKING"))
        fsdpi_boot_log(boot, FSDP_LOG_WARN,
                       "[E814] CUDA_LAUNCH_BLOCKING is 1: each collective waits for all ranks, and "
                       "a late rank cannot be named; set it only to find a kernel that fails");
}

/* Loads all kernels now: the first launch of a kernel that is not loaded may wait for the whole
   device, and so for a peer. */
static fsdp_status fsdpi_cuda_prepare(fsdpi_cuda_device *d) {
    int max_pitch = 0, ratio = 0;
    cudaError_t e = cudaDeviceGetAttribute(&max_pitch, cudaDevAttrMaxPitch, d->place.ordinal);
    if (e == cudaSuccess)
        e = cudaDeviceGetAttribute(&ratio, cudaDevAttrSingleToDoublePrecisionPerfRatio,
                                   d->place.ordinal);
    d->max_pitch = (size_t)max_pitch;
    d->sums_in_pairs = ratio > FSDPI_CUDA_F64_RATIO;
    if (e != cudaSuccess) return fsdpi_cuda_check(&d->place, (int)e, "cudaDeviceGetAttribute");
    return fsdpi_cuda_check(&d->place, fsdp_cuda_load(), "loading kernels");
}

static void fsdpi_cuda_close(fsdp_device *device) {
    fsdpi_cuda_device *d = fsdpi_cuda_of(device);
    fsdp_allocator allocator = d->boot.allocator;
    for (int i = 0; i < d->num_arrays && !fsdpi_boot_is_hung(&d->boot); i++)
        (void)cudaFree(d->partials[i]);
    fsdpi_cuda_place_close(&d->place);
    fsdpi_free(&allocator, d);
}

static fsdp_status fsdpi_cuda_open(const fsdp_boot *boot, fsdp_device **out) {
    fsdpi_cuda_device *d = (fsdpi_cuda_device *)fsdpi_alloc(&boot->allocator, sizeof *d);
    *out = NULL;
    if (!d) return FSDP_ERR_OUT_OF_MEMORY;
    d->boot = *boot;
    fsdp_status status = fsdpi_cuda_place_open(&d->place, &d->boot);
    if (!status) status = fsdpi_cuda_prepare(d);
    if (status) {
        fsdpi_copy_name(fsdpi_thread_error, sizeof fsdpi_thread_error, d->place.error);
        fsdpi_cuda_close((fsdp_device *)(void *)d);
        return status;
    }
    fsdpi_cuda_warn(boot);
    *out = (fsdp_device *)(void *)d;
    return FSDP_OK;
}

// Allocates device memory with any contents.
static fsdp_status fsdpi_cuda_get(fsdpi_cuda_place *at, size_t size, void **ptr) {
    char what[96];
    size_t left = 0, total = 0;
    *ptr = NULL;
    cudaError_t e = at->is_managed ? cudaMallocManaged(ptr, size, cudaMemAttachGlobal)
                                   : cudaMalloc(ptr, size);
    if (e == cudaSuccess) return FSDP_OK;
    (void)snprintf(what, sizeof what, "allocating %llu bytes of device memory",
                   (unsigned long long)size);
    fsdp_status status = fsdpi_cuda_check(at, (int)e, what);
    size_t used = strlen(at->error);
    if (cudaMemGetInfo(&left, &total) == cudaSuccess)
        (void)snprintf(at->error + used, sizeof at->error - used,
                       "; the device has %.1f of %.1f MiB left", (double)left / 1048576,
                       (double)total / 1048576);
    (void)cudaGetLastError();
    return status;
}

// Fills with zeros. If the device hangs, does nothing: the world has failed, and nothing reads the
// memory.
static fsdp_status fsdpi_cuda_fill(fsdpi_cuda_place *at, void *ptr, size_t size) {
    if (fsdpi_boot_is_hung(at->boot)) return FSDP_OK;
    return fsdpi_cuda_settle(at, at->setup, (int)cudaMemsetAsync(ptr, 0, size, at->setup),
                             "filling memory with zeros");
}

static fsdp_status fsdpi_cuda_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    fsdpi_cuda_place *at = &fsdpi_cuda_of(device)->place;
    *ptr = NULL;
    if (kind == FSDP_MEMORY_PINNED) {
        cudaError_t e = cudaMallocHost(ptr, size);
        if (e == cudaSuccess) memset(*ptr, 0, size);
        return fsdpi_cuda_check(at, (int)e, "allocating pinned host memory");
    }
    fsdp_status status = fsdpi_cuda_get(at, size, ptr);
    if (!status) status = fsdpi_cuda_fill(at, *ptr, size);
    if (!status) return FSDP_OK;
    if (*ptr && !fsdpi_boot_is_hung(at->boot)) (void)cudaFree(*ptr);
    *ptr = NULL;
    return status;
}

static void fsdpi_cuda_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    (void)size;
    if (fsdpi_boot_is_hung(&fsdpi_cuda_of(device)->boot)) return;
    (void)(kind == FSDP_MEMORY_PINNED ? cudaFreeHost(ptr) : cudaFree(ptr));
}

static fsdp_status fsdpi_cuda_stream(fsdp_device *device, int stream, void **native) {
    fsdpi_cuda_device *d = fsdpi_cuda_of(device);
    cudaStream_t made = cudaStreamLegacy;
    int least = 0, greatest = 0;
    *native = NULL;
    if (stream != FSDP_STREAM_COMPUTE) {
        cudaError_t e = cudaDeviceGetStreamPriorityRange(&least, &greatest);
        if (e == cudaSuccess)
            e = cudaStreamCreateWithPriority(&made, cudaStreamNonBlocking, greatest);
        fsdp_status status = fsdpi_cuda_check(&d->place, (int)e, "cudaStreamCreateWithPriority");
        if (status) return status;
        d->own[stream] = (void *)made;
    }
    *native = (void *)made;
    return FSDP_OK;
}

static fsdp_status fsdpi_cuda_event(fsdp_device *device, void **native) {
    cudaEvent_t made = NULL;
    cudaError_t e = cudaEventCreateWithFlags(&made, cudaEventDisableTiming);
    *native = (void *)made;
    return fsdpi_cuda_check(&fsdpi_cuda_of(device)->place, (int)e, "cudaEventCreateWithFlags");
}

// Makes an event with a time, which costs the device a little more per record.
static fsdp_status fsdpi_cuda_timer(fsdp_device *device, void **native) {
    cudaEvent_t made = NULL;
    cudaError_t e = cudaEventCreateWithFlags(&made, cudaEventDefault);
    *native = (void *)made;
    return fsdpi_cuda_check(&fsdpi_cuda_of(device)->place, (int)e, "cudaEventCreateWithFlags");
}

static fsdp_status fsdpi_cuda_elapsed(fsdp_device *device, void *from, void *to, int64_t *ns) {
    float ms = 0;
    cudaError_t e = cudaEventElapsedTime(&ms, (cudaEvent_t)from, (cudaEvent_t)to);
    *ns = (int64_t)((double)ms * 1e6);
    return fsdpi_cuda_check(&fsdpi_cuda_of(device)->place, (int)e, "cudaEventElapsedTime");
}

static void fsdpi_cuda_destroy(fsdp_device *device, void *stream, void *event) {
    (void)device;
    if (stream && (cudaStream_t)stream != cudaStreamLegacy)
        (void)cudaStreamDestroy((cudaStream_t)stream);
    if (event) (void)cudaEventDestroy((cudaEvent_t)event);
}

/* Ends a call that has given work to a stream. If the table's stream is NULL, waits for the work.
   Also waits on the caller's stream if memory is managed: the host may read or write it next. */
static fsdp_status fsdpi_cuda_done(fsdpi_cuda_device *d, void *stream, int result,
                                   const char *what) {
    int is_own = !d->place.is_managed;
    for (int i = 0; i < FSDP_STREAM_COUNT && !is_own; i++) is_own = d->own[i] == stream;
    if (stream && is_own) return fsdpi_cuda_check(&d->place, result, what);
    return fsdpi_cuda_settle(&d->place, stream ? (cudaStream_t)stream : d->place.setup, result,
                             what);
}

static fsdp_status fsdpi_cuda_record(fsdp_device *device, void *stream, void *event) {
    return fsdpi_cuda_done(fsdpi_cuda_of(device), stream,
                           (int)cudaEventRecord((cudaEvent_t)event, (cudaStream_t)stream),
                           "cudaEventRecord");
}

static fsdp_status fsdpi_cuda_wait(fsdp_device *device, void *stream, void *event) {
    return fsdpi_cuda_done(fsdpi_cuda_of(device), stream,
                           (int)cudaStreamWaitEvent((cudaStream_t)stream, (cudaEvent_t)event, 0),
                           "cudaStreamWaitEvent");
}

static fsdp_status fsdpi_cuda_sync(fsdp_device *device, void *event, int64_t timeout_ns) {
    fsdpi_cuda_device *d = fsdpi_cuda_of(device);
    cudaError_t e = cudaSuccess;
    fsdp_status status = fsdpi_cuda_await(&d->boot, (cudaEvent_t)event, timeout_ns, NULL, &e);
    if (status == FSDP_ERR_TIMEOUT) return timeout_ns ? fsdpi_cuda_late(&d->place) : status;
    return fsdpi_cuda_check(&d->place, (int)e, "work on the device");
}

/* -------------------------------------------------------------------------------------------- */
// Ops as work on a stream.

static cudaStream_t fsdpi_cuda_on(const fsdpi_cuda_device *d, void *stream) {
    return stream ? (cudaStream_t)stream : d->place.setup;
}

// Rows of bytes, in any memory.
static int fsdpi_cuda_rows(const fsdpi_cuda_device *d, cudaStream_t on, char *dst, size_t dst_pitch,
                           const char *src, size_t src_pitch, size_t row, size_t height) {
    cudaError_t e = cudaSuccess;
    if (src_pitch == row && dst_pitch == row) {
        row *= height;
        height = 1;
    } else if (src_pitch <= d->max_pitch && dst_pitch <= d->max_pitch) {
        return (int)cudaMemcpy2DAsync(dst, dst_pitch, src, src_pitch, row, height,
                                      cudaMemcpyDefault, on);
    }
    for (size_t y = 0; y < height && e == cudaSuccess; y++)
        e = cudaMemcpyAsync(dst + y * dst_pitch, src + y * src_pitch, row, cudaMemcpyDefault, on);
    return (int)e;
}

static fsdp_status fsdpi_cuda_copy(fsdp_device *device, void *stream, const fsdp_op *op) {
    fsdpi_cuda_device *d = fsdpi_cuda_of(device);
    const fsdp_block *b = (const fsdp_block *)op->list;
    cudaStream_t on = fsdpi_cuda_on(d, stream);
    int is_plain = op->dtype == op->out_dtype && op->scale == 1.0 && !op->accumulate;
    size_t size = fsdp_dtype_size(op->dtype);
    int result = 0;
    if (op->clip) {
        result = fsdp_cuda_clip((void *)on, op->dst_ptr, op->dtype, b, op->list_count, op->scale,
                                op->norm_type, op->clip);
    } else if (op->list_count == 1 && is_plain && (b->height == 1 || b->src_pitch >= b->width)) {
        size_t row = (size_t)b->width * size;
        const char *src = (const char *)op->src_ptr + (size_t)b->src * size;
        char *dst = (char *)op->dst_ptr + (size_t)b->dst * size;
        size_t src_pitch = b->height == 1 ? row : (size_t)b->src_pitch * size;
        size_t dst_pitch = b->height == 1 ? row : (size_t)b->dst_pitch * size;
        if (dst == src && dst_pitch == src_pitch) return FSDP_OK;
        result = fsdpi_cuda_rows(d, on, dst, dst_pitch, src, src_pitch, row, (size_t)b->height);
    } else {
        result = fsdp_cuda_copy((void *)on, op->dst_ptr, op->out_dtype, op->src_ptr, op->dtype, b,
                                op->list_count, op->scale, op->accumulate);
    }
    return fsdpi_cuda_done(d, stream, result, fsdp_label_name(op->label));
}

static fsdp_status fsdpi_cuda_zero(fsdp_device *device, void *stream, const fsdp_op *op) {
    fsdpi_cuda_device *d = fsdpi_cuda_of(device);
    cudaStream_t on = fsdpi_cuda_on(d, stream);
    cudaError_t e = cudaMemsetAsync(op->dst_ptr, op->fill, (size_t)op->bytes, on);
    return fsdpi_cuda_done(d, stream, (int)e, "cudaMemsetAsync");
}

// Makes room for the partial sums of a norm, in the first step that has one.
static fsdp_status fsdpi_cuda_make_partials(fsdpi_cuda_device *d, size_t num) {
    void *ptr = NULL;
    if (num <= d->num_partials) return FSDP_OK;
    if (num < 2 * d->num_partials) num = 2 * d->num_partials;
    fsdp_status status = fsdpi_cuda_get(&d->place, num * sizeof(double), &ptr);
    if (status) return status;
    d->partials[d->num_arrays++] = (double *)ptr;
    d->num_partials = num;
    return FSDP_OK;
}

static fsdp_status fsdpi_cuda_norm(fsdp_device *device, void *stream, const fsdp_op *op) {
    fsdpi_cuda_device *d = fsdpi_cuda_of(device);
    const fsdp_block *blocks = (const fsdp_block *)op->list;
    cudaStream_t on = fsdpi_cuda_on(d, stream);
    size_t partials = fsdp_cuda_norm_partials(blocks, op->list_count);
    fsdp_status status = fsdpi_cuda_make_partials(d, partials);
    if (status) return status;
    int result = fsdp_cuda_norm((void *)on, (double *)op->dst_ptr, op->src_ptr, op->dtype, blocks,
                                op->list_count, op->norm_type, op->accumulate, d->sums_in_pairs,
                                d->num_arrays ? d->partials[d->num_arrays - 1] : NULL);
    return fsdpi_cuda_done(d, stream, result, "norm");
}

static fsdp_status fsdpi_cuda_update(fsdp_device *device, void *stream, const fsdp_update *runs,
                                     uint32_t num) {
    fsdpi_cuda_device *d = fsdpi_cuda_of(device);
    int result = fsdp_cuda_update((void *)fsdpi_cuda_on(d, stream), runs, num);
    return fsdpi_cuda_done(d, stream, result, "update");
}

#define FSDPI_CUDA_OPS(flags)                                                                      \
    {                                                                                              \
        FSDP_DEVICE_VERSION, sizeof(fsdp_device_ops), (flags), "cuda", fsdpi_cuda_open,            \
            fsdpi_cuda_close, fsdpi_cuda_alloc, fsdpi_cuda_free, fsdpi_cuda_stream,                \
            fsdpi_cuda_event, fsdpi_cuda_destroy, fsdpi_cuda_record, fsdpi_cuda_wait,              \
            fsdpi_cuda_sync, fsdpi_cuda_timer, fsdpi_cuda_elapsed, fsdpi_cuda_copy,                \
            fsdpi_cuda_zero, fsdpi_cuda_norm, fsdpi_cuda_update, fsdpi_cuda_error_text             \
    }

FSDP_API const fsdp_device_ops *fsdp_cuda_device_ops(void) {
    static const fsdp_device_ops ops = FSDPI_CUDA_OPS(FSDP_DEVICE_ASYNC);
    static const fsdp_device_ops managed = FSDPI_CUDA_OPS(FSDP_DEVICE_ASYNC | FSDP_DEVICE_HOST);
    char ignored[200]; // open reports errors in the variable
    fsdpi_text error = {ignored, sizeof ignored, 0};
    int is_managed;
    (void)fsdpi_cuda_read_managed(&is_managed, &error);
    return is_managed ? &managed : &ops;
}
#endif // FSDP_IMPLEMENTATION
