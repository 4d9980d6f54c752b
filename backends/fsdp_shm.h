/* fsdp_shm.h - the default backend of fsdp.h: ranks of one Linux host, as processes or as threads

   There is nothing to install or to configure, and no files remain. fsdp.h includes it, unless
   another backend is selected; a program may include it, too.

   How it works
   - All ranks see one block of common memory. Threads have it on the heap. Processes have an
     anonymous file (memfd), which rank 0 hands to the others over an abstract unix socket that is
     named from the job's id and the user. Both vanish with the last rank, however it ends; the size
     of /dev/shm does not matter.
   - In a collective each rank shows its signature and the location of its buffer, waits for all
     ranks, compares, moves data, and waits for all ranks. It reads its peers' memory directly,
     once.
   - send and recv are between two ranks: each shows its signature to the other one and waits for
     it, without a barrier. Several pairs of a comm may do so at the same time.
   - Each process has a separate range of the file. It maps a new allocation together with the same
     offset in the ranges of all peers. If ranks allocate equal sizes in the same order, no other
     map is needed. Otherwise a peer's allocation is mapped at its first use.
   - Sums run in rank order (fsdpi_reduce): their bits are equal on every rank and in every run.
   - Waits have a deadline, and check every 50 ms for peers that have died: each process holds a
     lock on its byte of the file, which the kernel drops when the process ends. A later process
     cannot be mistaken for it, as with a process id. fsdpi_shm_live says what keeps the lock.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../fsdp.h"
#endif

#ifndef FSDP_SHM_H
#define FSDP_SHM_H
#ifndef FSDP_MATH_ONLY

#ifdef __cplusplus
extern "C" {
#endif

// clang-format off
/* fsdp_shm_comm_ops - the table of this backend, named "shm"
   Result      never NULL; static
   open        boot->threads NULL: a process per rank; otherwise a thread per rank. After a failure
               error_text(NULL) returns the text, for the calling thread
   split       blocks until every rank of the parent has called it; OUT_OF_MEMORY there aborts the
               world
   run         different comms may run in different threads of a rank at the same time. Supports
               all_to_all, send and recv, too. Buffers that peers read (src of gather, scatter,
               all_to_all and send, dst of other kinds and in place) must come from alloc, unless
               the comm has one rank. Returns INVALID_ARG and UNSUPPORTED before this rank shows its
               signature: the comm stays usable, and peers in the call wait
   alloc       does not wait; reserves real memory, so that its use cannot fail later; zero-filled.
               An allocation that differs on a peer is mapped at its first use; if the process has
               no address space for it, that collective is OUT_OF_MEMORY on all ranks
   close       groups before their world; peers that wait for this rank get PEER_LOST
   abort       from any thread      poll never blocks
   Limits      FSDPI_MAX_SRCS ranks, one user, Linux
   Thread      any */
// clang-format on
FSDP_API const fsdp_comm_ops *fsdp_shm_comm_ops(void);

#ifdef __cplusplus
}
#endif
#endif // FSDP_MATH_ONLY
#endif // FSDP_SHM_H

#if defined(FSDP_IMPLEMENTATION) && !defined(FSDP_SHM_IMPLEMENTED) && !defined(FSDP_MATH_ONLY)
#define FSDP_SHM_IMPLEMENTED

#include "fsdp_comm.h" // the base of all backends
#include "fsdp_shm_world.h"
#include "../src/base/reduce.h"

// clang-format off
static const fsdpi_transport fsdpi_shm_transport = {
    sizeof(fsdpi_shm_comm), sizeof(fsdpi_shm_world), FSDPI_MAX_SRCS,
    {FSDPI_SHM_KINDS, FSDP_CAP_FUSED_REDUCE, 2, 0, NULL, NULL},
    fsdpi_shm_open_world, fsdpi_shm_prepare, fsdpi_shm_connect, fsdpi_shm_leave, fsdpi_shm_close,
    fsdpi_shm_show, fsdpi_shm_hear, fsdpi_shm_move, NULL,
    fsdpi_shm_tell, fsdpi_shm_failure, fsdpi_shm_ask,
    fsdpi_shm_take, fsdpi_shm_give, fsdpi_advise_host};
// clang-format on

static FSDP_COLD fsdp_status fsdpi_shm_open(const fsdp_boot *boot, fsdp_caps *caps,
                                            fsdp_comm **out) {
    return fsdpi_comm_open(&fsdpi_shm_transport, boot, caps, out);
}

FSDP_API const fsdp_comm_ops *fsdp_shm_comm_ops(void) {
    static const fsdp_comm_ops ops = {
        FSDP_COMM_VERSION,     sizeof(fsdp_comm_ops), "shm",
        fsdpi_shm_open,        fsdpi_comm_split,      fsdpi_comm_close,
        fsdpi_comm_run,        fsdpi_comm_alloc,      fsdpi_comm_free,
        fsdpi_comm_error_text, fsdpi_comm_abort,      fsdpi_comm_poll,
    };
    return &ops;
}
#endif // FSDP_IMPLEMENTATION
