/* library.h - the library as tests see it: the declarations of its headers, and the few private
   functions that library.c exports.

   SPDX-License-Identifier: MIT */
#ifndef LIBRARY_H
#define LIBRARY_H
#include "fsdp_optim.h"
#include "fsdp_muon.h"
#include "fsdp_replicate.h"
#include "fsdp_compress.h"
#include "fsdp_plan.h"
#include "fsdp_dtensor.h"
#include "fsdp_checkpoint.h"
#include "fsdp_safetensors.h"
#if defined(FSDP_BACKEND_SHM) || !(defined(FSDP_BACKEND_GLOO) || defined(FSDP_BACKEND_NCCL))
#include "backends/fsdp_shm.h"
#endif
#ifdef FSDP_BACKEND_GLOO
#include "backends/fsdp_gloo.h"
#endif
#ifdef FSDP_BACKEND_NCCL
#include "backends/fsdp_nccl.h"
#endif
#include "backends/fsdp_fake.h"

#ifdef __cplusplus
extern "C" {
#endif
const fsdp_device_ops *lib_host_ops(void);
void lib_host_update(const fsdp_update *u);
/* Sets dst to scale * src, or adds it, as a reduction does. */
void lib_sum(void *dst, fsdp_dtype to, const void *src, fsdp_dtype from, size_t count, double scale,
             int accumulate);
uint64_t lib_coll_bytes(int kind, uint64_t group_size, uint64_t nbytes); // as counters count them
fsdp_status lib_failed(const fsdp_world *w); // status that ended the world
fsdp_status lib_assert(fsdp_world *w, int holds);
void lib_drain(fsdp_world *w); // waits until all worker threads are idle
/* Waits for work on a stream before the host reads or writes its data; NULL: it is done already. */
void lib_wait(void *stream);
int lib_on_streams(const fsdp_world *w);     // ops run on streams of the device
fsdp_comm *lib_comm(const fsdp_world *w, const fsdp_comm_ops **ops);
const void *lib_frozen(const fsdp_model *m, fsdp_dtype dtype, int64_t *numel); // frozen shards
uint32_t lib_crc32c_by_table(uint32_t crc, const void *data, int64_t nbytes);
int lib_has_crc32c(void); // fsdp_crc32c uses an instruction
int lib_plan_prove(const char *text, fsdp_plan_proof *out); // plan/plan_parse.h
#ifdef __cplusplus
}
#endif

#endif
