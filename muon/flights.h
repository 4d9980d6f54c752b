/* muon/flights.h - Muon's schedule: who computes which matrix, and which matrices travel together

   A part of fsdp_muon.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_MUON_H
#include "../fsdp_muon.h"
#endif
#ifndef FSDPI_MUON_FLIGHTS_H
#define FSDPI_MUON_FLIGHTS_H

#include "../optim/states.h"

#include <string.h>

// Owns: owners and flights. Invariants: they follow from the model and the desc alone, so that all
// ranks have the same; they fit the optimizer's table `laid`. A part has the rows of one rank of
// all matrices of one owner, each with room for the largest shard, so that places in a part are the
// same for all ranks.

typedef struct fsdpi_muon_matrix {
    int32_t param, ordinal;    // in the optimizer's table; in the model
    int32_t mesh;              // ordinal of the first parameter with the same mesh
    int32_t owner;             // replica * shards + rank in the shard group; -1: not yet chosen
    int64_t rows, columns;     // of the matrix
    int64_t outer, dim, inner; // it is cut along dim
    int64_t chunk, at;         // elements of the largest shard; place in a part
} fsdpi_muon_matrix;

typedef struct fsdpi_muon_flight {
    int32_t first, num;                      // of matrices
    int32_t shards, rank, replicas, replica; // replicas: that exchange results, 1 or more
    int is_used;                             // 1: in this step a matrix has a gradient
    int64_t part;                            // elements
    fsdp_comm *comm, *replicas_comm;
    fsdp_seg all; // of the gather over the replicas: a list has to outlive its record
} fsdpi_muon_flight;

struct fsdp_muon {
    fsdpi_optim base;
    fsdp_muon_desc desc;
    fsdp_dtype dtype; // of products
    int laid, label, pool;
    int num, num_flights;
    int travels;        // 1: matrices have several ranks
    int64_t host_bytes; // of buffers and room
    fsdpi_muon_matrix *matrices;
    fsdpi_muon_flight *flights;
    int64_t *loads;     // [2][ranks of the world]
    fsdp_block *blocks; // [ranks of the world]
    fsdp_buf *u, *x, *whole[2];
    void *room;                       // double norm; matrices x, y; squares s, t; packed tiles
    int64_t room_bytes, most, square; // elements of the largest matrix, and of its square
};

// Address behind so many elements of the dtype that travels.
static char *fsdpi_muon_part(const fsdp_muon *o, const fsdp_buf *buf, int64_t elements) {
    return (char *)fsdp_buf_ptr(buf) + elements * (int64_t)fsdp_dtype_size(o->desc.dtype);
}

static int64_t fsdpi_muon_least(int64_t a, int64_t b) { return a < b ? a : b; }

// What desc.take says of a parameter.
static int fsdpi_muon_taken(const fsdp_muon_desc *d, const fsdp_param_view *v) {
    if (d->take) return d->take(d->user, v);
    return v->ndim == 2 || (d->flatten && v->ndim > 2);
}

// The group of a parameter; negative: AdamW's.
static int fsdpi_muon_group(void *user, const fsdp_param_view *v) {
    const fsdp_muon_desc *d = (const fsdp_muon_desc *)user;
    if (!fsdpi_muon_taken(d, v)) return -1;
    return d->group ? d->group(d->user, v) : 0;
}

// Can Muon have this parameter?
static fsdp_status fsdpi_muon_check(fsdp_world *w, const char *name, const fsdp_muon_desc *d,
                                    const fsdp_param_view *v) {
    fsdp_mesh_info info = FSDP_ZERO;
    const int taken = fsdpi_muon_taken(d, v);
    int64_t numel = 1;
    for (int i = 0; i < v->ndim; i++) numel *= v->shape[i];
    if (taken < 0 || numel % taken)
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E9018] %s: desc.take returned %d columns for parameter '%s' of unit "
                         "'%s', expected a number that divides its %lld elements",
                         name, taken, v->name, v->unit_name, (long long)numel);
    if (taken == 1 && (v->ndim < 2 || (v->ndim > 2 && !d->flatten)))
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E9010] %s: parameter '%s' of unit '%s' has %d dims, expected 2: leave "
                         "it out by desc.take%s",
                         name, v->name, v->unit_name, v->ndim,
                         v->ndim > 2 ? ", or set desc.flatten" : "");
    if (v->dtype == FSDP_F64 || !fsdp_dtype_is_float(v->dtype))
        return fsdp_fail(w, FSDP_ERR_INVALID_ARG,
                         "[E9011] %s: parameter '%s' of unit '%s' is %s, expected f32, bf16 or "
                         "f16: leave it out by desc.take",
                         name, v->name, v->unit_name, fsdp_dtype_name(v->dtype));
    fsdp_status status = fsdp_unit_mesh_info(v->unit, &info);
    for (int dim = 0; !status && dim < fsdp_mesh_ndim(info.mesh); dim++)
        if (dim != info.shard_mesh_dim && dim != info.replicate_mesh_dim &&
            fsdp_mesh_size(info.mesh, dim) > 1)
            return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                             "[E9012] %s: unit '%s' has parameter '%s', and is on a mesh of which "
                             "dim %d neither shards nor replicates: tensor parallelism cuts its "
                             "matrices, and Muon needs whole ones: leave them out by desc.take",
                             name, v->unit_name, v->name, dim);
    return status;
}

// Do the ranks of each shard group share the matrices of all replicas?
static int fsdpi_muon_spreads(const fsdp_muon *o, const fsdp_mesh_info *info) {
    int64_t w = info->shard_mesh_size;
    if (o->desc.replicas) return o->desc.replicas == FSDP_MUON_A_PART_EACH;
    // Each all: 2 (W-1)/W of this rank's rows. With R replicas 1/R of that, and (R-1)/R by the
    // gather: as much if W is 2, and less if W is more.
    return w >= 2;
}

// Lists the trainable matrices, those of a mesh together, in the order of backward.
static fsdp_status fsdpi_muon_list(fsdp_muon *o, const char *what) {
    fsdp_param_view v = FSDP_ZERO;
    o->num = 0;
    while (fsdp_next_param(o->base.model, &v)) {
        const fsdpi_optim_param *p = fsdpi_optim_find(&o->base, v.ordinal);
        const int taken = fsdpi_muon_taken(&o->desc, &v);
        fsdpi_muon_matrix m = {0, v.ordinal, v.ordinal, -1, 0, taken > 1 ? taken : 1,
                               1, 1,         1,         0,  0};
        fsdp_mesh_info mine = FSDP_ZERO, other = FSDP_ZERO;
        if (!p || !v.requires_grad) continue;
        m.param = (int32_t)(p - o->base.params);
        for (int d = 1; d < v.ndim && taken == 1; d++) m.columns *= v.shape[d];
        for (int d = 0; d < v.shard_dim; d++) m.outer *= v.shape[d];
        for (int d = v.shard_dim + 1; d < v.ndim; d++) m.inner *= v.shape[d];
        m.dim = v.shape[v.shard_dim];
        if (m.outer * m.dim * m.inner == 0) continue;
        m.rows = m.outer * m.dim * m.inner / m.columns;
        // Once more: a cast may have made it f64.
        fsdp_status status = fsdpi_muon_check(fsdp_model_world(o->base.model), what, &o->desc, &v);
        if (!status) status = fsdp_unit_mesh_info(v.unit, &mine);
        for (int i = 0; i < o->num && !status && m.mesh == m.ordinal; i++) {
            status = fsdp_unit_mesh_info(o->base.params[o->matrices[i].param].unit, &other);
            if (fsdp_mesh_equal(mine.mesh, other.mesh) && mine.kind == other.kind &&
                mine.shard_mesh_dim == other.shard_mesh_dim &&
                mine.replicate_mesh_dim == other.replicate_mesh_dim)
                m.mesh = o->matrices[i].mesh;
        }
        if (status) return status;
        m.chunk = (m.dim + mine.shard_mesh_size - 1) / mine.shard_mesh_size * m.outer * m.inner;
        int at = o->num++;
        for (; at > 0 && o->matrices[at - 1].mesh <= m.mesh; at--)
            o->matrices[at] = o->matrices[at - 1];
        o->matrices[at] = m;
    }
    return FSDP_OK;
}

static int64_t fsdpi_muon_cost(const fsdp_muon *o, const fsdpi_muon_matrix *m) {
    return m->rows * m->columns * fsdpi_muon_least(m->rows, m->columns) * 3 * o->desc.ns_steps;
}

// Owners of matrices first .. end-1: longest processing time first; ties: the first in the model.
static void fsdpi_muon_own(fsdp_muon *o, int first, int end, int owners) {
    memset(o->loads, 0, (size_t)owners * sizeof *o->loads);
    for (int left = end - first; left > 0; left--) {
        fsdpi_muon_matrix *next = NULL;
        int least = 0;
        for (int i = end - 1; i >= first; i--) { // the last one is the first in the model
            fsdpi_muon_matrix *m = &o->matrices[i];
            if (m->owner < 0 && (!next || fsdpi_muon_cost(o, m) > fsdpi_muon_cost(o, next)))
                next = m;
        }
        for (int k = 1; k < owners; k++)
            if (o->loads[k] < o->loads[least]) least = k;
        next->owner = least;
        o->loads[least] += fsdpi_muon_cost(o, next);
    }
}

// Cuts matrices first .. end-1, which have the mesh of `like`, into flights.
static void fsdpi_muon_cut(fsdp_muon *o, int first, int end, int owners,
                           const fsdpi_muon_flight *like) {
    const int64_t limit = o->desc.flight_bytes / (int64_t)fsdp_dtype_size(o->desc.dtype);
    int64_t *whole = o->loads, *parts = o->loads + owners;
    fsdpi_muon_flight *f = NULL;
    for (int i = first; i < end; i++) {
        fsdpi_muon_matrix *m = &o->matrices[i];
        int64_t numel = m->rows * m->columns;
        if (!f || (whole[m->owner] && whole[m->owner] + numel > limit)) {
            f = &o->flights[o->num_flights++];
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

// Owners and flights of the present layout. Makes groups for the stream EXTENSION.
static fsdp_status fsdpi_muon_plan(fsdp_muon *o, const char *what) {
    fsdp_status status = fsdpi_muon_list(o, what);
    o->num_flights = o->travels = 0;
    for (int first = 0, end; first < o->num && !status; first = end) {
        fsdp_mesh_info info = FSDP_ZERO;
        fsdpi_muon_flight like = {0, 0, 1, 0, 1, 0, 0, 0, NULL, NULL, {0, 0, 0}};
        status = fsdp_unit_mesh_info(o->base.params[o->matrices[first].param].unit, &info);
        for (end = first; end < o->num && o->matrices[end].mesh == o->matrices[first].mesh;) end++;
        if (status) return status;
        like.shards = info.shard_mesh_size, like.rank = info.shard_mesh_rank;
        if (like.shards > 1)
            status = fsdp_mesh_comm(info.mesh, info.shard_mesh_dim, FSDP_STREAM_EXTENSION,
                                    &like.comm);
        if (!status && info.replicate_mesh_size > 1 && fsdpi_muon_spreads(o, &info)) {
            like.replicas = info.replicate_mesh_size, like.replica = info.replicate_mesh_rank;
            status = fsdp_mesh_comm(info.mesh, info.replicate_mesh_dim, FSDP_STREAM_EXTENSION,
                                    &like.replicas_comm);
        }
        if (like.shards > 1 || like.replicas > 1) o->travels = 1;
        fsdpi_muon_own(o, first, end, like.shards * like.replicas);
        fsdpi_muon_cut(o, first, end, like.shards * like.replicas, &like);
    }
    return status;
}

#endif // FSDPI_MUON_FLIGHTS_H
