/* fsdp_shm.h - the default backend of fsdp.h: ranks of one Linux host, as processes or as threads

   Nothing to install, nothing to configure, nothing left behind. Included by fsdp.h itself unless
   another backend is selected; including it by hand does no harm.

   How it works
   - All ranks see one block of common memory: processes an anonymous file (memfd) that rank 0 hands
     to the others over an abstract unix socket named from the job's id and the user; threads the
     heap. Both vanish with the last rank, however it ends; the size of /dev/shm does not matter.
   - A collective is: publish what I am about to do and where my buffer is, wait for all, compare,
     move data, wait for all. Each rank reads its peers' memory directly, once.
   - send and recv concern two ranks alone: each shows its record to the other one and waits for it,
     without a barrier; several pairs of a comm may do so at the same time.
   - Each process has an arena of its own in the file. It maps its new allocation and the same place
     in the arenas of all peers side by side. Where ranks have allocated alike, that is all there is
     to map; an allocation of a peer that lies elsewhere is mapped at its first use.
   - Sums run in rank order (fsdpi_reduce): the same bits whoever computes them, at every run.
   - Waits have a deadline, and every 50 ms look for peers that died: each process holds a lock on
     its byte of the file, which the kernel drops when the process ends in any way. Unlike a process
     id it cannot be mistaken for a later process. fsdpi_shm_live says what keeps it.

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
   open        boot->threads NULL: a process per rank; else a thread per rank. After a failure
               error_text(NULL) has the text, for the calling thread
   split       blocks until every rank of the parent has come; OUT_OF_MEMORY there aborts the world
   run         of different comms may be called from different threads of a rank at the same time.
               Knows all_to_all, send and recv too. What peers read (src of gather, scatter,
               all_to_all and send, dst of the others and in place) has to lie in memory of alloc,
               unless the comm has one rank. INVALID_ARG and UNSUPPORTED are found before anybody is
               told of the call: the comm goes on, peers that came wait
   alloc       does not wait; takes memory for good, so that its use cannot fail later; zero-filled.
               What a peer has allocated differently is mapped at its first use; if the process has
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

#include "fsdp_comm.h" // the base: what all backends do in the same way
#include "fsdp_shm_world.h"
#include "../core/reduce.h"

// clang-format off
static const fsdpi_transport fsdpi_shm_transport = {
    sizeof(fsdpi_shm_comm), sizeof(fsdpi_shm_world), FSDPI_MAX_SRCS,
    {FSDPI_SHM_KINDS, FSDP_CAP_FUSED_REDUCE, 2, 0, NULL},
    fsdpi_shm_open_world, fsdpi_shm_prepare, fsdpi_shm_connect, fsdpi_shm_leave, fsdpi_shm_close,
    fsdpi_shm_show, fsdpi_shm_hear, fsdpi_shm_move, NULL,
    fsdpi_shm_tell, fsdpi_shm_verdict, fsdpi_shm_say_last,
    fsdpi_shm_take, fsdpi_shm_give, fsdpi_advise_host};
// clang-format on

static fsdp_status fsdpi_shm_open(const fsdp_boot *boot, fsdp_caps *caps, fsdp_comm **out) {
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
