/* nccl.h - a stub for NCCL's header: the part that fsdp.h and its tests use, with the real names,
   values and signatures. stub_nccl.c implements it, stub.h controls it.

   -DFSDP_STUB_NCCL=22304 makes it the header of 2.23.4: later declarations are hidden, so that a
   build shows whether all uses are guarded.

   SPDX-License-Identifier: MIT */
#ifndef FSDP_STUB_NCCL_H
#define FSDP_STUB_NCCL_H
#include "cuda_runtime.h"
#include <limits.h> /* INT_MIN */
#include <stdint.h> /* uint64_t */

#ifndef FSDP_STUB_NCCL
#define FSDP_STUB_NCCL 22809
#endif
#define NCCL_MAJOR            (FSDP_STUB_NCCL / 10000)
#define NCCL_MINOR            (FSDP_STUB_NCCL / 100 % 100)
#define NCCL_PATCH            (FSDP_STUB_NCCL % 100)
#define NCCL_SUFFIX           ""
#define NCCL_VERSION(X, Y, Z) ((X)*10000 + (Y)*100 + (Z)) /* for 2.9 and later */
#define NCCL_VERSION_CODE     FSDP_STUB_NCCL

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ncclComm *ncclComm_t;
#define NCCL_COMM_NULL       NULL
#define NCCL_UNIQUE_ID_BYTES 128
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
#if FSDP_STUB_NCCL >= 23003
    ncclTimeout = 8,
    ncclNumResults = 9
#else
    ncclNumResults = 8
#endif
} ncclResult_t;

typedef enum {
    ncclSum = 0,
    ncclProd = 1,
    ncclMax = 2,
    ncclMin = 3,
    ncclAvg = 4,
    ncclNumOps = 5,
    ncclMaxRedOp = 0x7fffffff
} ncclRedOp_t;

typedef enum {
    ncclInt8 = 0,
    ncclChar = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclInt = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclHalf = 6,
    ncclFloat32 = 7,
    ncclFloat = 7,
    ncclFloat64 = 8,
    ncclDouble = 8,
#if defined(__cplusplus) || FSDP_STUB_NCCL >= 22403 /* as with the real headers */
    ncclBfloat16 = 9,
#endif
#if FSDP_STUB_NCCL >= 22403
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12
#else
    ncclNumTypes = 10
#endif
} ncclDataType_t;

#define NCCL_CONFIG_UNDEF_INT INT_MIN
#define NCCL_CONFIG_UNDEF_PTR NULL
#define NCCL_SPLIT_NOCOLOR    (-1)

/* Grows with the version; `size` shows the version with which a caller was built. */
typedef struct {
    size_t size;
    unsigned magic, version;
    int blocking, cgaClusterSize, minCTAs, maxCTAs;
    const char *netName;
    int splitShare;
#if FSDP_STUB_NCCL >= 22602
    int trafficClass;
#endif
#if FSDP_STUB_NCCL >= 22703
    const char *commName;
    int collnetEnable, CTAPolicy, shrinkShare, nvlsCTAs;
#endif
#if FSDP_STUB_NCCL >= 22803
    int nChannelsPerNetPeer, nvlinkCentricSched;
#endif
#if FSDP_STUB_NCCL >= 22902
    int graphUsageMode, numRmaCtx;
#endif
#if FSDP_STUB_NCCL >= 23003
    int maxP2pPeers, graphStreamOrdering;
#endif
#if FSDP_STUB_NCCL >= 23102
    int launchOrderImplicit, numRmaSig, rmaEagerInit, hostCftMode;
#endif
} ncclConfig_t;

#define FSDP_STUB_UNDEF NCCL_CONFIG_UNDEF_INT
#if FSDP_STUB_NCCL >= 22602
#define FSDP_STUB_CONFIG_226 , FSDP_STUB_UNDEF
#else
#define FSDP_STUB_CONFIG_226
#endif
#if FSDP_STUB_NCCL >= 22703
#define FSDP_STUB_CONFIG_227                                                                       \
    , NCCL_CONFIG_UNDEF_PTR, FSDP_STUB_UNDEF, FSDP_STUB_UNDEF, FSDP_STUB_UNDEF, FSDP_STUB_UNDEF
#else
#define FSDP_STUB_CONFIG_227
#endif
#if FSDP_STUB_NCCL >= 22803
#define FSDP_STUB_CONFIG_228 , FSDP_STUB_UNDEF, FSDP_STUB_UNDEF
#else
#define FSDP_STUB_CONFIG_228
#endif
#if FSDP_STUB_NCCL >= 22902
#define FSDP_STUB_CONFIG_229 , FSDP_STUB_UNDEF, FSDP_STUB_UNDEF
#else
#define FSDP_STUB_CONFIG_229
#endif
#if FSDP_STUB_NCCL >= 23003
#define FSDP_STUB_CONFIG_230 , FSDP_STUB_UNDEF, FSDP_STUB_UNDEF
#else
#define FSDP_STUB_CONFIG_230
#endif
#if FSDP_STUB_NCCL >= 23102
#define FSDP_STUB_CONFIG_231 , FSDP_STUB_UNDEF, FSDP_STUB_UNDEF, FSDP_STUB_UNDEF, FSDP_STUB_UNDEF
#else
#define FSDP_STUB_CONFIG_231
#endif
#define NCCL_CONFIG_INITIALIZER                                                                    \
    {                                                                                              \
        sizeof(ncclConfig_t), 0xcafebeefu, NCCL_VERSION_CODE, FSDP_STUB_UNDEF, FSDP_STUB_UNDEF,    \
            FSDP_STUB_UNDEF, FSDP_STUB_UNDEF, NCCL_CONFIG_UNDEF_PTR,                               \
            FSDP_STUB_UNDEF FSDP_STUB_CONFIG_226 FSDP_STUB_CONFIG_227 FSDP_STUB_CONFIG_228         \
                FSDP_STUB_CONFIG_229 FSDP_STUB_CONFIG_230 FSDP_STUB_CONFIG_231                     \
    }

ncclResult_t ncclGetVersion(int *version);
ncclResult_t ncclGetUniqueId(ncclUniqueId *id);
ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank);
ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId id, int rank,
                                    ncclConfig_t *config);
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *child,
                           ncclConfig_t *config);
ncclResult_t ncclCommFinalize(ncclComm_t comm);
ncclResult_t ncclCommDestroy(ncclComm_t comm);
ncclResult_t ncclCommAbort(ncclComm_t comm);
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *result);
ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);
const char *ncclGetErrorString(ncclResult_t result);
const char *ncclGetLastError(ncclComm_t comm);
ncclResult_t ncclGroupStart(void);
ncclResult_t ncclGroupEnd(void);

ncclResult_t ncclAllGather(const void *src, void *dst, size_t sendcount, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclReduceScatter(const void *src, void *dst, size_t recvcount, ncclDataType_t type,
                               ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclAllReduce(const void *src, void *dst, size_t count, ncclDataType_t type,
                           ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclBroadcast(const void *src, void *dst, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t stream);
ncclResult_t ncclSend(const void *src, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);
ncclResult_t ncclRecv(void *dst, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream);

#if FSDP_STUB_NCCL >= 21901
ncclResult_t ncclMemAlloc(void **ptr, size_t size);
ncclResult_t ncclMemFree(void *ptr);
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *ptr, size_t size, void **handle);
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);
#endif
#if FSDP_STUB_NCCL >= 22703
#define NCCL_WIN_DEFAULT           0x00
#define NCCL_WIN_COLL_SYMMETRIC    0x01
#define NCCL_CTA_POLICY_DEFAULT    0x00
#define NCCL_CTA_POLICY_EFFICIENCY 0x01
typedef struct ncclWindow_vidmem *ncclWindow_t;
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *ptr, size_t size, ncclWindow_t *window,
                                    int flags);
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t window);
#endif
#if FSDP_STUB_NCCL >= 22803
#define NCCL_CTA_POLICY_ZERO        0x02
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
ncclResult_t ncclAlltoAll(const void *src, void *dst, size_t count, ncclDataType_t type,
                          ncclComm_t comm, cudaStream_t stream);
#endif
#if FSDP_STUB_NCCL >= 22907
typedef enum {
    ncclStatGpuMemSuspend = 0,
    ncclStatGpuMemSuspended = 1,
    ncclStatGpuMemPersist = 2,
    ncclStatGpuMemTotal = 3
} ncclCommMemStat_t;
ncclResult_t ncclCommMemStats(ncclComm_t comm, ncclCommMemStat_t stat, uint64_t *value);
#endif
#if FSDP_STUB_NCCL >= 23102
/* Configuration of one collective; equal on all ranks. */
typedef struct {
    size_t size;
    unsigned magic, version;
    struct ncclConfigExt *ext;
    int minCTAs, maxCTAs, nvlsCTAs, cgaClusterSize;
    const char *algSelection;
    int forceAlgSelection, CTAPolicy;
    uint64_t userProfilerTag;
} ncclCollConfig_t;
#define NCCL_COLLCONFIG_INITIALIZER                                                                \
    {                                                                                              \
        sizeof(ncclCollConfig_t), 0xcafebeefu, NCCL_VERSION_CODE, NCCL_CONFIG_UNDEF_PTR,           \
            FSDP_STUB_UNDEF, FSDP_STUB_UNDEF, FSDP_STUB_UNDEF, FSDP_STUB_UNDEF,                    \
            NCCL_CONFIG_UNDEF_PTR, 1, FSDP_STUB_UNDEF, 0                                           \
    }
ncclResult_t ncclAllGatherConfig(const void *src, void *dst, size_t sendcount, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config);
ncclResult_t ncclReduceScatterConfig(const void *src, void *dst, size_t recvcount,
                                     ncclDataType_t type, ncclRedOp_t op, ncclComm_t comm,
                                     cudaStream_t stream, const ncclCollConfig_t *config);
ncclResult_t ncclAllReduceConfig(const void *src, void *dst, size_t count, ncclDataType_t type,
                                 ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config);
ncclResult_t ncclBroadcastConfig(const void *src, void *dst, size_t count, ncclDataType_t type,
                                 int root, ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config);
#endif

#ifdef __cplusplus
}
#endif
#endif
