/* stub.h - how tests control and watch the stand-ins for the CUDA runtime and NCCL

   Environment, for programs that do not call these functions (read at the first call):
       FSDP_STUB_SYNC=1          every op is done on return
       FSDP_STUB_FAIL=name:nth:code,...   as stub_fail; name empty: any function
       FSDP_STUB_PROGRESS=n      as stub_set(STUB_PROGRESS, n)
       FSDP_STUB_DEVICES=n       as stub_set(STUB_DEVICES, n)
       FSDP_STUB_NCCL_VERSION=v  what ncclGetVersion says
       FSDP_STUB_PROTECT=1       as stub_set(STUB_PROTECT, 1)
       FSDP_STUB_CHECKS=1        race checker, synchronous; the first race ends the process
       FSDP_STUB_SMS=n           as stub_set(STUB_SMS, n)
       FSDP_STUB_DRIVER_VERSION=v  as stub_set(STUB_DRIVER_VERSION, v)
   and as the libraries read them:
       CUDA_LAUNCH_BLOCKING=1    as stub_set(STUB_BLOCKING, 1)
       CUDA_MODULE_LOADING=EAGER as stub_set(STUB_LAZY, 0)
       NCCL_HOSTID, NCCL_MULTI_RANK_GPU_ENABLE, NCCL_COMM_BLOCKING, NCCL_MAX_CTAS,
       NCCL_LAUNCH_ORDER_IMPLICIT
   The stand-in for NCCL sets FSDP_NCCL_WARM_UP=0 where it is not set: large sums are slow here.
   Children of fork keep the settings and begin anew with everything else; but if CUDA was in use
   before, all of it fails there.

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
    STUB_DEVICES,  /* devices. Default 8 */
    STUB_NCCL_VERSION, /* of the library, at run time. Default: that of the header */
    STUB_TOTAL_MIB,    /* memory of all devices together. Default 16384 */
    STUB_WINDOWS_WORK, /* 0: ncclCommWindowRegister succeeds without a window. Default 1 */
    STUB_PROTECT, /* 1: new device memory is out of the host's reach (signal 11) while no op runs */
    STUB_DRIVER,  /* 1: while a cudaFree waits for the device, cudaEventQuery waits for it */
    STUB_KEEPS,   /* 1: ncclCommDeregister and ncclCommWindowDeregister do not return */
    STUB_BLOCKING,       /* 1: kernels, of NCCL too, are done on return; copies and fills are not */
    STUB_LAZY,           /* 1: the first launch of a kernel waits for the device. Default 1 */
    STUB_SMS,            /* of a device: kernels of communicators run beside each other in their
                            room only. Default 132 */
    STUB_MAX_PITCH,      /* of a 2-D copy, in bytes. Default 2^31 - 1 */
    STUB_DRIVER_VERSION, /* before 12010, kernels have 4 KiB of parameters, not 32. Default 13000 */
    STUB_F64_RATIO,      /* of f32 to f64 in operations per second. Default 2 */
    STUB_SETTINGS
};
void stub_set(int setting, int value);

/* Calls of a function so far, by name ("cudaMalloc"); NULL: of all functions. */
int64_t stub_count(const char *name);
void stub_count_reset(void);

/* The nth call from now on (1: the next) of a function returns the code; name NULL: of any that
   returns a code. Functions that free or destroy do their work all the same. CUDA codes of 700 to
   799 are sticky: from then on every call of this process returns them. */
void stub_fail(const char *name, int nth, int code);
int stub_failed(void);      /* injected failures so far */
void stub_fail_clear(void); /* no more of them; forgets a sticky error */

enum {
    STUB_STREAMS,
    STUB_EVENTS,
    STUB_DEVICE_BYTES, /* of cudaMalloc, cudaMallocManaged and ncclMemAlloc */
    STUB_PINNED_BYTES,
    STUB_COMMS,
    STUB_REGISTRATIONS,
    STUB_WINDOWS,
    STUB_GRAPHS, /* and executable ones */
    STUB_KINDS
};
int64_t stub_live(int kind); /* objects that exist */

/* The last kernel of a communicator, by the order of issue, that has begun on a device of this
   process, from 1 on; 0: none. */
int stub_begun(int device);

/* What ncclCommGetAsyncError says from now on; comm NULL: of all comms, also of later ones. */
void stub_async_error(ncclComm_t comm, ncclResult_t code);

/* The race checker: synchronous mode, before the first stream or allocation. */
void stub_checks(int on);
int64_t stub_races(void);
const char *stub_race_text(void); /* of the first one; "" */
void stub_host_read(const void *ptr, size_t nbytes);
void stub_host_write(const void *ptr, size_t nbytes);
void stub_ignore_wait(int nth); /* the nth cudaStreamWaitEvent from now on does nothing */
int64_t stub_waits(void);       /* cudaStreamWaitEvent calls so far: how many there are to ignore */

#ifdef __cplusplus
}
#endif
#endif
