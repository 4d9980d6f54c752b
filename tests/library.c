/* library.c - the one object of a variant (shared memory, Gloo, stand-ins of NCCL; a sanitizer): the
   library's implementation, and the few of its private functions that tests have a use for. Tests
   are linked with it. Those that look at more private names include it instead.

   SPDX-License-Identifier: MIT */
#define FSDP_BACKEND_FAKE 1 /* beside those of the variant: never the default */
#ifdef HARNESS_H            /* in a test: the compiler leaves out what the test does not reach */
#pragma GCC system_header   /* the one object shows the warnings */
/* If gcc inlines nothing, the linker takes public functions from the one object, so that a
   test compiles only the private functions that it calls. A private function that keeps an error in
   this thread keeps it in the test's copy. A test whose macros change what the library calls
   defines LIBRARY_WHOLE, and compiles everything. */
#if defined(__NO_INLINE__) && !defined(__clang__) && !defined(LIBRARY_WHOLE)
#define LIBRARY_APART
#define FSDP_API extern __inline __attribute__((__gnu_inline__))
#else
#define FSDP_STATIC
#endif
#endif
#define FSDP_IMPLEMENTATION
#include "fsdp_optim.h"
#include "fsdp_muon.h"
#include "fsdp_replicate.h"
#include "fsdp_compress.h"
#include "library.h"
#ifndef LIBRARY_APART
#include "plan/plan_parse.h"

const fsdp_device_ops *lib_host_ops(void) { return fsdpi_host_ops(); }
void lib_host_update(const fsdp_update *u) { fsdpi_optim_host_update(u); }
void lib_sum(void *dst, fsdp_dtype to, const void *src, fsdp_dtype from, size_t count, double scale,
             int accumulate) {
    const char *one = (const char *)src;
    fsdpi_reduce(dst, to, &one, 1, from, count, scale, accumulate, FSDP_SUM);
}
uint64_t lib_coll_bytes(int kind, uint64_t group_size, uint64_t nbytes) {
    return fsdpi_coll_bytes(kind, group_size, nbytes);
}
fsdp_status lib_failed(const fsdp_world *w) { return fsdpi_failed(w); }
fsdp_status lib_assert(fsdp_world *w, int holds) { return FSDP_ASSERT(w, holds); }
void lib_drain(fsdp_world *w) { fsdpi_drain(w); }
void lib_wait(void *stream) {
#ifdef FSDP_BACKEND_NCCL
    const char *backend = getenv("FSDP_BACKEND");
    if (stream && backend && strcmp(backend, "nccl") == 0)
        (void)cudaStreamSynchronize((cudaStream_t)stream);
#endif
    (void)stream;
}
int lib_on_streams(const fsdp_world *w) { return w->mode == FSDP_RUN_STREAMS; }
fsdp_comm *lib_comm(const fsdp_world *w, const fsdp_comm_ops **ops) {
    *ops = w->comm_ops;
    return w->comm;
}
const void *lib_frozen(const fsdp_model *m, fsdp_dtype dtype, int64_t *numel) {
    const fsdpi_flat_block *block = &m->flats[dtype];
    *numel = block->numel - block->train_numel;
    return *numel ? block->shard->ptr + (size_t)block->train_numel * fsdp_dtype_size(dtype) : NULL;
}
uint32_t lib_crc32c_by_table(uint32_t crc, const void *data, int64_t nbytes) {
    return ~fsdpi_crc_by_table(~crc, (const unsigned char *)data, nbytes);
}
int lib_has_crc32c(void) { return fsdpi_crc_has_instruction(); }
#else
#undef FSDP_API /* a header that a test adds to the library is compiled in the test */
#define FSDP_API extern
#endif
