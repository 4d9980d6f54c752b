/* stub.h - functions with which tests control and observe the stubs of the CUDA runtime and NCCL

   Environment, for programs that do not call these functions (read at the first call):
       FSDP_STUB_SYNC=1          every op is done on return
       FSDP_STUB_FAIL=name:nth:code,...   as stub_fail; name empty: any function
       FSDP_STUB_PROGRESS=n      as stub_set(STUB_PROGRESS, n)
       FSDP_STUB_DEVICES=n       as stub_set(STUB_DEVICES, n)
       FSDP_STUB_NCCL_VERSION=v  result of ncclGetVersion
       FSDP_STUB_PROTECT=1       as stub_set(STUB_PROTECT, 1)
       FSDP_STUB_CHECKS=1        race checker, synchronous; the first race ends the process
       FSDP_STUB_SMS=n           as stub_set(STUB_SMS, n)
       FSDP_STUB_DRIVER_VERSION=v  as stub_set(STUB_DRIVER_VERSION, v)
   and as the libraries read them:
       CUDA_LAUNCH_BLOCKING=1    as stub_set(STUB_BLOCKING, 1)
       CUDA_MODULE_LOADING=EAGER as stub_set(STUB_LAZY, 0)
       NCCL_HOSTID, NCCL_MULTI_RANK_GPU_ENABLE, NCCL_COMM_BLOCKING, NCCL_MAX_CTAS,
       NCCL_LAUNCH_ORDER_IMPLICIT
   The NCCL stub sets FSDP_NCCL_WARM_UP=0 if it is not set: large sums are slow here.
   Children of fork keep the settings and reset everything else; but if CUDA was used before the
   fork, all calls fail there.

   SPDX-License-Identifier: MIT */
#ifndef FSDP_STUB_H
#define FSDP_STUB_H
#include "nccl.h"
#include <stdint.h> /* int64_t */

#ifdef __cplusplus
extern "C" {
#endif

enum {
    STUB_SYNC,     /* 1: every op is done on return. Default 0 */
    STUB_PROGRESS, /* polls of ncclCommGetAsyncError that a call on a non-blocking comm takes */
    STUB_GARBAGE,  /* 1: a collective that ranks disagree on ends with garbage. Default 0: hangs */
    STUB_DEVICES,  /* number of devices. Default 8 */
    STUB_NCCL_VERSION, /* version at run time. Default: the header's */
    STUB_TOTAL_MIB,    /* memory of all devices together, in MiB. Default 16384 */
    STUB_WINDOWS_WORK, /* 0: ncclCommWindowRegister succeeds without a window. Default 1 */
    /* 1: the host gets signal 11 when it accesses new device memory while no op runs */
    STUB_PROTECT,
    STUB_DRIVER, /* 1: while a cudaFree waits for the device, cudaEventQuery also waits */
    STUB_KEEPS,  /* 1: ncclCommDeregister and ncclCommWindowDeregister do not return */
    /* 1: kernels, also NCCL's, have ended on return; copies and fills have not */
    STUB_BLOCKING,
    STUB_LAZY,           /* 1: the first launch of a kernel waits for the device. Default 1 */
    STUB_SMS,            /* SMs of a device: kernels of communicators run at the same time only if
                            they fit. Default 132 */
    STUB_MAX_PITCH,      /* maximum pitch of a 2-D copy, in bytes. Default 2^31 - 1 */
    STUB_DRIVER_VERSION, /* before 12010, kernels have 4 KiB of parameters, not 32. Default 13000 */
    STUB_F64_RATIO,      /* ratio of f32 to f64 operations per second. Default 2 */
    STUB_SETTINGS
};
void stub_set(int setting, int value);

/* Returns the number of calls of a function so far, by name ("cudaMalloc"); NULL: of all functions.
   */
int64_t stub_count(const char *name);
void stub_count_reset(void);

/* Makes the nth call from now on (1: the next) of a function return the code; name NULL: of any
   function that returns a code. Functions that free or destroy still do their work. CUDA codes of
   700 to 799 are sticky: from then on every call of this process returns them. */
void stub_fail(const char *name, int nth, int code);
int stub_failed(void);      /* injected failures so far */
void stub_fail_clear(void); /* removes all rules; clears a sticky error */

enum {
    STUB_STREAMS,
    STUB_EVENTS,
    STUB_DEVICE_BYTES, /* from cudaMalloc, cudaMallocManaged and ncclMemAlloc */
    STUB_PINNED_BYTES,
    STUB_COMMS,
    STUB_REGISTRATIONS,
    STUB_WINDOWS,
    STUB_GRAPHS, /* also executable ones */
    STUB_KINDS
};
int64_t stub_live(int kind); /* number of existing objects */

/* Returns the number, in the order of issue from 1, of the last communicator kernel that has begun
   on a device of this process; 0: none. */
int stub_begun(int device);

/* Sets the result of ncclCommGetAsyncError from now on; comm NULL: for all comms, also later ones.
   */
void stub_async_error(ncclComm_t comm, ncclResult_t code);

/* Switches the race checker on, which is synchronous. Call it before the first stream or
   allocation. */
void stub_checks(int on);
int64_t stub_races(void);
const char *stub_race_text(void); /* text of the first race, or "" */
void stub_host_read(const void *ptr, size_t nbytes);
void stub_host_write(const void *ptr, size_t nbytes);
void stub_ignore_wait(int nth); /* the nth cudaStreamWaitEvent from now on has no effect */
int64_t stub_waits(void);       /* number of cudaStreamWaitEvent calls so far */

#ifdef __cplusplus
}
#endif
#endif
