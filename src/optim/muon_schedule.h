/* optim/muon_schedule.h - Muon's schedule: the owner of each matrix, and buckets of matrices

   Owners of matrices, and buckets of matrices that share one collective. Invariants: they depend
   only on the model and the desc, so that all ranks have equal ones; they fit the optimizer's table
   `laid`. A part contains one rank's rows of all matrices of one owner, each in space for the
   largest shard, so that offsets in a part are equal on all ranks.
   Callers: muon.h (fsdpi_muon_group).

   A part of fsdp_muon.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_MUON_H
#include "../../fsdp_muon.h"
#endif
#ifndef FSDPI_OPTIM_MUON_SCHEDULE_H
#define FSDPI_OPTIM_MUON_SCHEDULE_H

#include "states.h"

#include <string.h>

typedef struct fsdpi_muon_matrix {
    int32_t param, ordinal;      // index in the optimizer's table; ordinal in the model
    int32_t mesh;                // ordinal of the first parameter with the same groups of ranks
    int32_t owner;               // replica * shards + rank in the shard group; -1: not yet chosen
    fsdp_mesh_info info;         // mesh of its unit
    int64_t rows, columns, side; // sizes; side: the smaller of the two
    int64_t outer, dim, inner;   // sizes around and along dim, which is cut
    int64_t chunk, at;           // elements of the largest shard; offset in a part
} fsdpi_muon_matrix;

typedef struct fsdpi_muon_bucket {
    int32_t first, num;                    // first matrix, and number of matrices
    int32_t shards, replicas, replica, me; // replicas: exchange results; me: index among owners
    int is_used;                           // 1: a matrix has a gradient in this step
    int64_t part;                          // elements
    fsdp_comm *comm, *replicas_comm;       // NULL: one rank
    fsdp_seg all; // for the gather over replicas: a list must outlive its op
} fsdpi_muon_bucket;

// Buffers: memory for products, then that of buckets. WHOLE and the buffer after it alternate. If
// nothing is sent, all after U are U.
enum { FSDPI_MUON_ROOM, FSDPI_MUON_U, FSDPI_MUON_X, FSDPI_MUON_WHOLE, FSDPI_MUON_BUFS = 5 };

typedef struct fsdpi_muon_opt {
    fsdp_optim base;
    fsdp_muon_desc desc;
    fsdp_dtype dtype; // dtype of products
    int laid, label, num, num_buckets;
    int travels; // 1: a matrix is on several ranks
    double lr;   // learning rate of this step
    fsdpi_muon_matrix *matrices;
    fsdpi_muon_bucket *buckets;
    fsdp_block *blocks; // [ranks of the world]
    int64_t *loads;     // [2][ranks of the world]
    fsdp_buf *bufs[FSDPI_MUON_BUFS];
    int64_t most, square;         // elements of the largest matrix, and of its square
    char *room, *x, *y, *s, *t;   // a norm; matrices x and y; squares s and t
    const fsdpi_muon_matrix *now; // the matrix being computed
} fsdpi_muon_opt;

// Returns the result of desc.take for a parameter, or the default.
static int fsdpi_muon_taken(const fsdp_muon_desc *d, const fsdp_param_view *v) {
    if (d->take) return d->take(d->user, v);
    return v->ndim == 2 || (d->flatten && v->ndim > 2);
}

// Returns the group of a parameter; negative: AdamW updates it.
static int fsdpi_muon_group(void *user, const fsdp_param_view *v) {
    const fsdp_muon_desc *d = (const fsdp_muon_desc *)user;
    if (!fsdpi_muon_taken(d, v)) return -1;
    return d->group ? d->group(d->user, v) : 0;
}

// Fails if Muon cannot update a matrix that desc.take chooses.
static fsdp_status fsdpi_muon_check(const fsdpi_muon_opt *o, const char *what,
                                    const fsdp_param_view *v, const fsdp_mesh_info *info,
                                    int taken) {
    const char *expected = NULL;
    int64_t numel = 1;
    for (int i = 0; i < v->ndim; i++) numel *= v->shape[i];
    if (taken == 0) expected = "that desc.take returns for it what it did when Muon was made";
    else if (taken < 0 || numel % taken) expected = "a number of columns that divides its elements";
    else if (taken == 1 && v->ndim != 2 && !(o->desc.flatten && v->ndim > 2))
        expected = "2 dims, or with desc.flatten more";
    else if (v->dtype == FSDP_F64 || !fsdp_dtype_is_float(v->dtype)) expected = "f32, bf16 or f16";
    for (int dim = 0; !expected && dim < fsdp_mesh_ndim(info->mesh); dim++)
        if (dim != info->shard_mesh_dim && dim != info->replicate_mesh_dim &&
            fsdp_mesh_size(info->mesh, dim) > 1)
            expected = "a whole matrix; its mesh has a dim that neither shards nor replicates, so "
                       "that tensor parallelism cuts it";
    if (!expected) return FSDP_OK;
    return fsdp_fail(fsdp_model_world(o->base.model), FSDP_ERR_INVALID_ARG,
                     "[E9010] %s: Muon would take parameter '%s' of unit '%s' (desc.take: %d), "
                     "which has %d dims and is %s; expected %s%s",
                     what, v->name, fsdp_unit_label(v->unit), taken, v->ndim,
                     fsdp_dtype_name(v->dtype), expected,
                     taken ? ": let desc.take return 0 for it, and AdamW may have it" : "");
}

// Lists the trainable matrices in backward order, those with the same groups of ranks together.
static fsdp_status fsdpi_muon_list(fsdpi_muon_opt *o, const char *what) {
    fsdp_param_view v = FSDP_ZERO;
    o->num = 0, o->most = o->square = 0;
    while (fsdp_next_param(o->base.model, &v)) {
        const fsdpi_optim_param *p = fsdpi_optim_find(&o->base, v.ordinal);
        const int taken = fsdpi_muon_taken(&o->desc, &v);
        fsdpi_muon_matrix m;
        memset(&m, 0, sizeof m);
        if (!p || !v.requires_grad) continue;
        fsdp_status status = fsdp_unit_mesh_info(v.unit, &m.info);
        if (!status) status = fsdpi_muon_check(o, what, &v, &m.info, taken);
        if (status) return status;
        m.param = (int32_t)(p - o->base.params);
        m.ordinal = m.mesh = v.ordinal, m.owner = -1;
        m.columns = taken, m.outer = m.inner = 1, m.dim = v.shape[v.shard_dim];
        for (int d = 0; d < v.ndim; d++) {
            if (d > 0 && taken == 1) m.columns *= v.shape[d];
            if (d != v.shard_dim) *(d < v.shard_dim ? &m.outer : &m.inner) *= v.shape[d];
        }
        const int64_t numel = m.outer * m.dim * m.inner, shards = m.info.shard_mesh_size;
        if (numel == 0) continue;
        m.rows = numel / m.columns, m.side = m.rows < m.columns ? m.rows : m.columns;
        m.chunk = (m.dim + shards - 1) / shards * m.outer * m.inner;
        if (numel > o->most) o->most = numel;
        if (m.side * m.side > o->square) o->square = m.side * m.side;
        for (int i = 0; i < o->num; i++)
            if (m.info.shard_comm == o->matrices[i].info.shard_comm &&
                m.info.replicate_comm == o->matrices[i].info.replicate_comm)
                m.mesh = o->matrices[i].mesh;
        int at = o->num++;
        for (; at > 0 && o->matrices[at - 1].mesh <= m.mesh; at--)
            o->matrices[at] = o->matrices[at - 1];
        o->matrices[at] = m;
    }
    return FSDP_OK;
}

// Returns a number proportional to the time of its products.
static int64_t fsdpi_muon_cost(const fsdpi_muon_matrix *m) {
    return m->rows * m->columns * m->side;
}

// Assigns matrices first .. end-1 to owners, longest processing time first. Ties go to the first in
// the model.
static void fsdpi_muon_own(fsdpi_muon_opt *o, int first, int end, int owners) {
    memset(o->loads, 0, (size_t)owners * sizeof *o->loads);
    for (int left = end - first; left > 0; left--) {
        fsdpi_muon_matrix *next = NULL;
        int least = 0;
        for (int i = end - 1; i >= first; i--) { // the last one is the first in the model
            fsdpi_muon_matrix *m = &o->matrices[i];
            if (m->owner < 0 && (!next || fsdpi_muon_cost(m) > fsdpi_muon_cost(next))) next = m;
        }
        for (int k = 1; k < owners; k++)
            if (o->loads[k] < o->loads[least]) least = k;
        next->owner = least;
        o->loads[least] += fsdpi_muon_cost(next);
    }
}

// Cuts matrices first .. end-1, whose groups of ranks are those of `like`, into buckets.
static void fsdpi_muon_cut(fsdpi_muon_opt *o, int first, int end, int owners,
                           const fsdpi_muon_bucket *like) {
    const int64_t limit = o->desc.bucket_bytes / (int64_t)fsdp_dtype_size(o->desc.dtype);
    int64_t *whole = o->loads, *parts = o->loads + owners;
    fsdpi_muon_bucket *f = NULL;
    for (int i = first; i < end; i++) {
        fsdpi_muon_matrix *m = &o->matrices[i];
        int64_t numel = m->rows * m->columns;
        if (!f || (whole[m->owner] && whole[m->owner] + numel > limit)) {
            f = &o->buckets[o->num_buckets++];
            *f = *like;
            f->first = i;
            memset(o->loads, 0, 2 * (size_t)owners * sizeof *o->loads);
        }
        f->num++;
        m->at = parts[m->owner];
        whole[m->owner] += numel;
        parts[m->owner] += m->chunk;
        if (parts[m->owner] > f->part) f->part = parts[m->owner];
        f->all.count = f->part * f->shards;
    }
}

// Chooses owners and buckets for the current layout. Makes communicators for stream EXTENSION.
static fsdp_status fsdpi_muon_plan(fsdpi_muon_opt *o, const char *what) {
    const int stream = FSDP_STREAM_EXTENSION;
    fsdp_status status = fsdpi_muon_list(o, what);
    o->num_buckets = o->travels = 0;
    for (int first = 0, end = 0; first < o->num && !status; first = end) {
        const fsdp_mesh_info *i = &o->matrices[first].info;
        fsdpi_muon_bucket like;
        memset(&like, 0, sizeof like);
        while (end < o->num && o->matrices[end].mesh == o->matrices[first].mesh) end++;
        like.shards = i->shard_mesh_size, like.replicas = 1;
        if (like.shards > 1)
            status = fsdp_mesh_comm(i->mesh, i->shard_mesh_dim, stream, &like.comm);
        // Replicas compute a part each if that sends no more than if each computes all. In that
        // case a rank sends 2 (W-1)/W of its rows. With R replicas it sends 1/R of that, and
        // (R-1)/R in the gather: as much if W is 2, and less if W is larger.
        if (!status && i->replicate_mesh_size > 1 && o->desc.replicas != FSDP_MUON_ALL_EACH &&
            (like.shards > 1 || o->desc.replicas == FSDP_MUON_A_PART_EACH)) {
            like.replicas = i->replicate_mesh_size, like.replica = i->replicate_mesh_rank;
            status = fsdp_mesh_comm(i->mesh, i->replicate_mesh_dim, stream, &like.replicas_comm);
        }
        const int owners = like.shards * like.replicas;
        like.me = like.replica * like.shards + i->shard_mesh_rank;
        o->travels |= owners > 1;
        fsdpi_muon_own(o, first, end, owners);
        fsdpi_muon_cut(o, first, end, owners, &like);
    }
    return status;
}

#endif // FSDPI_OPTIM_MUON_SCHEDULE_H
