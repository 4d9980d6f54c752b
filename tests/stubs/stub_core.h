/* stub_core.h - functions of stub_cuda.c for stub_nccl.c; not for tests

   SPDX-License-Identifier: MIT */
#ifndef FSDP_STUB_CORE_H
#define FSDP_STUB_CORE_H
#include "stub.h"
#include <stdint.h> /* uint32_t */

/* A vector clock: for each actor (a host thread or a stream), the step up to which all its steps
   are known to be done. */
enum { STUB_ACTORS = 256 };
typedef struct stub_clock {
    uint32_t at[STUB_ACTORS];
} stub_clock;

/* A position in a stream: the op with this number. Streams live as long as the process. */
typedef struct stub_point {
    cudaStream_t stream; /* NULL: none */
    uint64_t seq;
} stub_point;

/* State that a thread takes over from the thread for which it works. */
typedef struct stub_thread {
    int device;
    void *host;
} stub_thread;

__attribute__((noreturn, format(printf, 1, 2))) void stub_die(const char *format, ...);
/* Counts a call. Returns 0, or an injected code. */
int stub_enter(const char *name);
int stub_get(int setting);
int stub_is_forked(void); /* from a process that has used CUDA */
void stub_live_add(int kind, int64_t amount);

stub_thread stub_thread_get(void);
void stub_thread_set(stub_thread thread);

/* Returns the stream of a handle on a device; NULL: not a stream, of another device, or captured.
   */
cudaStream_t stub_stream(cudaStream_t handle, int device);
stub_point stub_tail(cudaStream_t stream); /* the stream's last op so far */
/* Appends an op to a stream, to run after `deps` as well; `done` is called after the body, or NULL.
   The clock, if not NULL, is joined before the op and updated after it. */
stub_point stub_submit(cudaStream_t stream, const char *name, void (*body)(void *arg), void *arg,
                       const stub_point *deps, int num_deps, stub_clock *clock);
void stub_wait(stub_point point); /* the host waits, and learns the clock */

/* Memory of the stub. stub_find returns 1 if one allocation contains the whole range, otherwise 0.
   */
typedef struct stub_memory {
    char *base;
    size_t size, align; /* align distinguishes ncclMemAlloc from cudaMalloc */
    enum cudaMemoryType type;
    int device;
} stub_memory;
int stub_find(const void *ptr, size_t nbytes, stub_memory *out);
cudaError_t stub_alloc(void **ptr, size_t size, size_t used, size_t align,
                       enum cudaMemoryType type);
cudaError_t stub_free(void *ptr, const char *who);
void stub_register(const void *ptr, int delta); /* registered memory must not be freed */
#endif
