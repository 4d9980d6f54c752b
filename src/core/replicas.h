/* core/replicas.h - compares the parameters of replicas, at the first finalize

   Replicas average gradients, not parameters: replicas that start out different stay different.
   Source: torch: _sync_module_states, _verify_param_shape.
   Callers: params.h (fsdpi_is_replicated) and step.h (fsdpi_replicas_check).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_REPLICAS_H
#define FSDPI_CORE_REPLICAS_H

#include "../base/hash.h"
#include "../base/macros.h"
#include "alloc.h"
#include "error.h"
#include "layout.h"
#include "objects.h"
#include "pool.h"
#include "run.h"
#include "world.h"

#include <string.h>

// Returns 1 if the unit has several replicas, and this rank is one of their ranks.
static int fsdpi_is_replicated(const fsdp_unit *u) {
    return u->desc.info.replicate_comm && fsdpi_replicas(u) > 1;
}

// Runs a collective of a unit's replicas on host data.
static fsdp_status fsdpi_replicas_meet(const fsdp_unit *u, int kind, const char *what, int root,
                                       void *data, int64_t count, fsdp_dtype dtype) {
    fsdp_op op = fsdpi_world_op(kind, FSDP_LABEL_WORLD, what, dtype);
    op.redop = FSDP_MAX;
    op.group_size = fsdpi_replicas(u);
    op.root = root;
    return fsdpi_host_collective(u->model->world, u->desc.info.replicate_comm, &op, (char *)data,
                                 count);
}

// Sets *different to 1 if replicas of the unit pass different numbers. The maxima of the number and
// of its complement are the largest and the smallest number.
static fsdp_status fsdpi_replicas_compare(const fsdp_unit *u, const char *what, uint64_t number,
                                          int *different) {
    int64_t most[2] = {(int64_t)number, (int64_t)~number};
    fsdp_status status = fsdpi_replicas_meet(u, FSDP_OP_ALL_REDUCE, what, 0, most, 2, FSDP_I64);
    *different = !status && most[0] != ~most[1];
    return status;
}

// Returns this rank's rows of a parameter, and sets *nbytes to their size.
static char *fsdpi_own_rows(const fsdp_unit *u, const fsdpi_param *p, size_t *nbytes) {
    *nbytes = (size_t)fsdpi_bytes(p->lay.local_numel, p->dtype);
    return fsdpi_flat_of(u, fsdpi_dtype_group_of(u, p))->shard->ptr +
           fsdpi_bytes(p->lay.shard_offset, p->dtype);
}

// Adds all rows of a unit to the hash *h. If the host cannot read them, copies them to `room` of
// `most` bytes, piece by piece.
static fsdp_status fsdpi_hash_values(const fsdp_unit *u, char *room, size_t most, uint64_t *h) {
    for (int i = 0; i < u->desc.num_params; i++) {
        size_t nbytes;
        const char *rows = fsdpi_own_rows(u, &u->params[i], &nbytes);
        for (size_t at = 0; room && at < nbytes; at += most) {
            size_t piece = nbytes - at < most ? nbytes - at : most;
            FSDPI_TRY(fsdpi_transfer(u->model->world, room, rows + at, piece));
            *h = fsdpi_hash_bytes(*h, room, piece);
        }
        if (!room) *h = fsdpi_hash_bytes(*h, rows, nbytes);
    }
    return FSDP_OK;
}

/* Warns if replicas hold different parameters. Training continues, as in PyTorch, although averages
   of their gradients mean little. Called by the first finalize. */
static FSDP_COLD FSDPI_NOINLINE fsdp_status fsdpi_replicas_check(fsdp_model *m) {
    enum { ROOM = 1 << 20 };
    char *room = NULL;
    const fsdp_unit *first = NULL;
    int count = 0;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units && !status; i++) {
        const fsdp_unit *u = m->units[i];
        uint64_t number = u->layout.hash; // names and shapes, too: a unit may have no reduction
        int different = 0;
        if (!fsdpi_is_replicated(u)) continue;
        if (!room && !fsdpi_is_readable(m->world, m->flats[u->params[0].dtype].shard)) {
            room = (char *)fsdpi_model_alloc(m, ROOM);
            if (!room) status = fsdpi_no_memory(m->world, "finalize_backward", "", ROOM);
        }
        if (!status) status = fsdpi_hash_values(u, room, ROOM, &number);
        status = fsdpi_fail_together(m->world, status);
        if (!status)
            status = fsdpi_replicas_compare(u, "finalize_backward: replicas", number, &different);
        if (different && !first) first = u;
        count += different;
    }
    fsdpi_model_free(m, room);
    if (!status && first)
        fsdp_warn(m->world,
                  "[E219] finalize_backward: replicas hold different parameters in unit '%s' (%d "
                  "such units), and stay different: let all ranks load or init the same values, or "
                  "call fsdp_model_broadcast before the first step",
                  first->desc.name, count);
    return status;
}

#endif // FSDPI_CORE_REPLICAS_H
