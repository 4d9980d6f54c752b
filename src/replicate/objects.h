/* replicate/objects.h - the object of a replicated model

   State: which gradients of this backward are ready, and which buckets are being reduced. Units
   have all other state. Invariants: buckets are reduced in the order of their index; a call in a
   wrong order changes nothing.
   Callers: step.h (fsdpi_rep_view), unused.h (fsdpi_rep_view) and others.

   A part of fsdp_replicate.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_REPLICATE_H
#include "../../fsdp_replicate.h"
#endif
#ifndef FSDPI_REPLICATE_OBJECTS_H
#define FSDPI_REPLICATE_OBJECTS_H

typedef struct fsdpi_rep_unit {
    fsdp_replicate *rep;
    fsdp_unit *unit;
    int32_t *members; // [num_members] parameters, in order
    int64_t nbytes;
    int32_t num_members, pending, open; // in this backward: members not ready; 1: writable
    int32_t has_hooks;                  // 1: a trainable member has a post-accumulate hook
    int32_t due;                        // 1: a backward has ended, and its use is not compared yet
    int32_t sends;                      // 1: the used parameters are sent with its reduction
    fsdp_block part;                    // range in the use of all parameters, in bytes
    fsdp_replicate_bucket shown;        // passed to hooks
} fsdpi_rep_unit;

typedef struct fsdpi_rep_param {
    int32_t bucket, index; // index: in the bucket's unit
    uint8_t ready, had;    // in this backward: had: 1: it began with a gradient
    uint8_t used;
} fsdpi_rep_param;

struct fsdp_replicate {
    fsdp_model *model;
    fsdp_extension extension;
    const fsdp_mesh *mesh; // 1-D
    fsdp_replicate_hook hook;
    void *hook_user;
    fsdpi_rep_unit *buckets;
    fsdpi_rep_param *params;
    int64_t *offsets, *numels;    // trainable parameters, bucket after bucket
    int32_t *members, *trainable; // bucket after bucket
    int32_t *seen, *order;        // parameters as they get ready; those in a complete backward
    int32_t num_params, num_buckets, num_seen, num_order;
    int32_t next;               // first bucket that is not reduced
    int32_t late, began, moved; // began: a backward has; moved: `shown` must be filled in
    int32_t inside, changed;    // inside: in the model's backward; changed: `has_hooks` is stale
    int32_t witness, each;      // witness: has a gradient if any has, or -1; each: 1: test all
    fsdp_status failed;         // the first failure of this backward
    // Use of parameters: an i32 per parameter, bucket after bucket; 1: used.
    fsdp_buf *mine, *ours;        // this rank's, in host memory; the maximum over the replicas
    int32_t *found;               // the host's copy of `ours`
    fsdp_block whole;             // range of all, in bytes
    fsdp_comm *comm;              // NULL: one rank
    int32_t label, sent, copying; // sent: 1: all, in this finalize; copying: an op reads `mine`
};

static fsdp_status fsdpi_rep_view(const fsdp_replicate *rep, int param, fsdp_param_view *out) {
    const fsdpi_rep_param *p = &rep->params[param];
    return fsdp_param_view_get(rep->buckets[p->bucket].unit, p->index, out);
}

static void fsdpi_rep_clear(fsdp_replicate *rep) { // for the next backward
    for (int i = 0; i < rep->num_params; i++) rep->params[i].ready = 0;
    for (int k = 0; k < rep->num_buckets; k++) {
        rep->buckets[k].pending = rep->buckets[k].num_members;
        rep->buckets[k].open = 0;
    }
    rep->next = rep->num_seen = rep->began = 0;
    rep->failed = FSDP_OK;
}

#endif // FSDPI_REPLICATE_OBJECTS_H
