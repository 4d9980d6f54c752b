/* core/backends.h - the table of the backends that are compiled in

   Callers: world.h (fsdpi_ranks_meet).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_BACKENDS_H
#define FSDPI_CORE_BACKENDS_H

// The parts that backends use: `make single` puts these parts into the one header of fsdp.h.
#include "../base/os_net.h"
#include "alloc.h"
#include "error.h"
#include "host.h"
#include "launch.h"
#include "objects.h"
#include "run.h"

#include <string.h>

// Backends, and the devices whose memory their collectives work on.
#if !defined(FSDP_BACKEND_SHM) && !defined(FSDP_BACKEND_GLOO) && !defined(FSDP_BACKEND_NCCL) &&    \
    !defined(FSDP_NO_BACKEND)
#define FSDP_BACKEND_SHM 1
#endif
#ifdef FSDP_BACKEND_SHM
#include "../../backends/fsdp_shm.h"
#endif
#ifdef FSDP_BACKEND_GLOO
#include "../../backends/fsdp_gloo.h"
#endif
#ifdef FSDP_BACKEND_NCCL
#include "../../backends/fsdp_nccl.h"
#endif
#ifdef FSDP_BACKEND_FAKE
#include "../../backends/fsdp_fake.h"
#endif

// The first one that can serve a job is taken. The last two fields: see fsdpi_backend.
static const fsdpi_backend fsdpi_backends[] = {
#ifdef FSDP_BACKEND_SHM
    {"shm", fsdp_shm_comm_ops, fsdpi_host_ops, 1, 0},
#endif
#ifdef FSDP_BACKEND_GLOO
    {"gloo", fsdp_gloo_comm_ops, fsdpi_host_ops, 0, 0},
#endif
#ifdef FSDP_BACKEND_NCCL
    {"nccl", fsdp_nccl_comm_ops, fsdp_cuda_device_ops, 0, 0},
#endif
#ifdef FSDP_BACKEND_FAKE
    {"fake", fsdp_fake_comm_ops, fsdpi_host_ops, 0, 1},
#endif
    {NULL, NULL, NULL, 0, 0}};

// Returns the backend with this name. If name is NULL, returns the first one that can serve the job
// and has the device of the first entry, since a program does not move to GPUs by itself. If there
// is none, returns the last entry.
static const fsdpi_backend *fsdpi_find_backend(const char *name, int is_spread) {
    const fsdpi_backend *first = fsdpi_backends, *b = first;
    while (b->name && (name ? strcmp(name, b->name) != 0
                            : (is_spread && b->one_host) || b->alone ||
                                  b->device_ops != first->device_ops))
        b++;
    return b;
}

// Returns 1 if the backend's ranks must find each other, so that the job needs a name.
static int fsdpi_ranks_meet(const fsdp_comm_ops *ops) {
    const fsdpi_backend *b = fsdpi_backends;
    while (b->name && b->comm_ops() != ops) b++;
    return !b->alone;
}

#endif // FSDPI_CORE_BACKENDS_H
