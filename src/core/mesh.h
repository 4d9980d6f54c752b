/* core/mesh.h - ranks arranged in N dims, their process groups, and mesh infos

   State: fsdp_world.meshes and subgroups. A mesh arranges ranks in N dims, row-major. It has one
   communicator per dim, or two if gathers and reductions may run at once.
   Source: torch: DeviceMesh, _fsdp_common.py mesh infos.
   Callers: programs, model.h (fsdpi_mesh_numel), world.h (fsdpi_split), unit.h
     (fsdpi_mesh_subgroup) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_MESH_H
#define FSDPI_CORE_MESH_H

#include "alloc.h"
#include "error.h"
#include "flight.h"
#include "objects.h"

#include <string.h>
#include <unistd.h>

static int fsdpi_mesh_numel(const fsdp_mesh *mesh) {
    int numel = 1;
    for (int d = 0; d < mesh->ndim; d++) numel *= mesh->shape[d];
    return numel;
}

static void fsdpi_mesh_free(fsdp_mesh *mesh) {
    fsdp_world *w = mesh->world;
    const fsdp_allocator *a = &w->boot.allocator;
    for (fsdpi_subgroup **at = &w->subgroups, *sub; (sub = *at) != NULL;) {
        if (sub->mesh != mesh) {
            at = &sub->next;
            continue;
        }
        *at = sub->next;
        if (sub->comm) w->comm_ops->close(sub->comm);
        fsdpi_free(a, sub);
    }
    for (int d = 0; d < mesh->ndim; d++) {
        fsdp_comm *gather = mesh->gather_comm[d], *reduce = mesh->reduce_comm[d];
        if (mesh->borrowed[d]) gather = reduce = NULL;
        if (reduce && reduce != gather && reduce != w->reduce_comm) w->comm_ops->close(reduce);
        if (gather && gather != w->comm) w->comm_ops->close(gather);
        fsdpi_free(a, mesh->names[d]);
    }
    fsdpi_free(a, mesh->ranks);
    fsdpi_free(a, mesh);
}

// Fails unless each rank exists and appears once. If the ranks do not increase, marks each with a
// bit.
static fsdp_status fsdpi_mesh_check_ranks(fsdp_world *w, const int32_t *ranks, int64_t numel) {
    const size_t bytes = (size_t)w->size / 8 + 1;
    int increasing = 1;
    for (int64_t i = 0; i < numel; i++) {
        if (ranks[i] < 0 || ranks[i] >= w->size)
            return fsdpi_invalid_arg(w, "[E113] mesh: ranks has %d, expected 0..%d", ranks[i],
                                     w->size - 1);
        increasing &= i == 0 || ranks[i] > ranks[i - 1];
    }
    if (increasing) return FSDP_OK;
    uint8_t *seen = (uint8_t *)fsdpi_alloc(&w->boot.allocator, bytes);
    if (!seen) return fsdpi_fail_together(w, fsdpi_no_memory(w, "mesh: ranks", "", bytes));
    int64_t i = 0;
    for (; i < numel && !(seen[ranks[i] / 8] >> ranks[i] % 8 & 1); i++)
        seen[ranks[i] / 8] = (uint8_t)(seen[ranks[i] / 8] | 1u << ranks[i] % 8);
    fsdpi_free(&w->boot.allocator, seen);
    if (i == numel) return FSDP_OK;
    return fsdpi_invalid_arg(w, "[E114] mesh: rank %d appears twice in ranks", ranks[i]);
}

// Returns 1 if a mesh has all ranks of `part`. Fast if the ranks are in equal order.
static int fsdpi_mesh_contains(const fsdp_mesh *mesh, const fsdp_mesh *part) {
    int num = fsdpi_mesh_numel(mesh), num_part = fsdpi_mesh_numel(part), at = 0;
    for (int i = 0; i < num_part; i++) {
        int tries = 0;
        while (tries < num && mesh->ranks[at] != part->ranks[i]) {
            at = at + 1 < num ? at + 1 : 0;
            tries++;
        }
        if (tries == num) return 0;
    }
    return 1;
}

static int fsdpi_mesh_stride(const fsdp_mesh *mesh, int dim) {
    int stride = 1;
    for (int d = dim + 1; d < mesh->ndim; d++) stride *= mesh->shape[d];
    return stride;
}

// Writes to out the world ranks of the places that have this rank's coordinates in all other dims,
// row-major. If this rank is outside the mesh: those of the first place.
static void fsdpi_mesh_members(const fsdp_mesh *mesh, const int32_t *dims, int num_dims,
                               int32_t *out) {
    int numel = 1, base = 0;
    for (int d = 0; d < mesh->ndim; d++)
        if (mesh->coord[d] > 0) base += mesh->coord[d] * fsdpi_mesh_stride(mesh, d);
    for (int k = 0; k < num_dims; k++) {
        numel *= mesh->shape[dims[k]];
        if (mesh->coord[0] >= 0) base -= mesh->coord[dims[k]] * fsdpi_mesh_stride(mesh, dims[k]);
    }
    for (int i = 0; i < numel; i++) {
        int at = base;
        for (int k = num_dims - 1, rest = i; k >= 0; rest /= mesh->shape[dims[k]], k--)
            at += rest % mesh->shape[dims[k]] * fsdpi_mesh_stride(mesh, dims[k]);
        out[i] = mesh->ranks[at];
    }
}

// Writes to out the world ranks of `size` neighbours along a dim, of which this rank is one. If
// this rank is outside the mesh: those of the first place.
static void fsdpi_mesh_neighbours(const fsdp_mesh *mesh, int dim, int size, int32_t *out) {
    int at = 0;
    for (int d = 0; d < mesh->ndim; d++) {
        int32_t place = mesh->coord[d] < 0 ? 0 : mesh->coord[d];
        at += (d == dim ? place / size * size : place) * fsdpi_mesh_stride(mesh, d);
    }
    for (int k = 0; k < size; k++) out[k] = mesh->ranks[at + k * fsdpi_mesh_stride(mesh, dim)];
}

// Makes the communicator of a group, with its number (fsdpi_comm_number).
static fsdp_status fsdpi_split(fsdp_world *w, fsdp_comm *parent, const fsdp_group *group,
                               int number, fsdp_comm **out) {
    fsdp_op op = FSDP_ZERO;
    op.kind = FSDPI_SPLIT;
    op.what = group->name;
    op.comm = parent;
    fsdpi_flight_op *flight = w->flight ? fsdpi_flight_begin(w, &op) : NULL;
    fsdp_status status = w->comm_ops->split(parent, group, out);
    if (status) return fsdpi_world_fail(w, status, "%s", w->comm_ops->error_text(parent));
    if (flight) fsdpi_flight_end(w, flight);
    if (group->color >= 0)
        fsdpi_flight_add(w, *out, number, group->name, group->ranks, group->size, group->index);
    return FSDP_OK;
}

// Splits the world along a dim. If `size` is less than the dim's, it splits the dim's group into
// groups of `size` neighbours.
static fsdp_status fsdpi_mesh_split(const fsdp_mesh *mesh, int dim, int size, int stream,
                                    const char *name, fsdp_comm **out) {
    fsdp_world *w = mesh->world;
    fsdp_comm *parent = size < mesh->shape[dim] ? mesh->gather_comm[dim] : w->comm;
    const int32_t me = mesh->coord[dim];
    const size_t bytes = (size_t)size * sizeof(int32_t);
    int32_t *members = (int32_t *)fsdpi_alloc(&w->boot.allocator, bytes);
    if (!members) return fsdpi_no_memory(w, "mesh: group", "", bytes);
    fsdpi_mesh_neighbours(mesh, dim, size, members);
    fsdp_group group = {me < 0 ? -1 : members[0], me < 0 ? -1 : me % size, size, stream, members,
                        name ? name : "mesh"};
    fsdp_status status = fsdpi_split(w, parent, &group, ++w->num_comms, out);
    fsdpi_free(&w->boot.allocator, members);
    return status;
}

// Returns the number of a communicator in the order of creation, and sets the mesh (NULL: the
// world), dim and size of *group. 1: the world's; 0: none.
static int32_t fsdpi_comm_number(const fsdp_world *w, const fsdp_comm *comm,
                                 fsdpi_subgroup *group) {
    group->mesh = NULL, group->dim = 0, group->size = w->size;
    if (!comm || comm == w->comm) return comm != NULL;
    if (comm == w->reduce_comm) return 2;
    for (const fsdp_mesh *mesh = w->meshes; mesh; mesh = mesh->next)
        for (int d = 0; d < mesh->ndim; d++) {
            if (mesh->borrowed[d]) continue;
            group->mesh = mesh, group->dim = d, group->size = mesh->shape[d];
            if (comm == mesh->gather_comm[d]) return mesh->comm_number[d];
            if (comm == mesh->reduce_comm[d]) return mesh->comm_number[d] + 1;
        }
    for (const fsdpi_subgroup *sub = w->subgroups; sub; sub = sub->next) {
        if (comm != sub->comm) continue;
        *group = *sub;
        return sub->number;
    }
    return 0;
}

FSDP_API int fsdp_comm_ranks(const fsdp_world *world, const fsdp_comm *comm, int32_t *out) {
    if (!world || !comm) return 0;
    fsdpi_subgroup group;
    if (!fsdpi_comm_number(world, comm, &group)) return 0;
    for (int32_t k = 0; out && !group.mesh && k < group.size; k++) out[k] = k;
    if (out && group.mesh) fsdpi_mesh_neighbours(group.mesh, group.dim, group.size, out);
    return group.size;
}

// Sets *out to this rank's group of `size` neighbours along a dim, for one stream. The first use
// makes it.
static fsdp_status fsdpi_mesh_subgroup(const fsdp_mesh *mesh, int dim, int size, int stream,
                                       const char *name, fsdp_comm **out) {
    fsdp_world *w = mesh->world;
    fsdpi_subgroup *sub = w->subgroups;
    while (sub &&
           !(sub->mesh == mesh && sub->dim == dim && sub->size == size && sub->stream == stream))
        sub = sub->next;
    *out = sub ? sub->comm : NULL;
    if (sub) return FSDP_OK;
    sub = (fsdpi_subgroup *)fsdpi_alloc(&w->boot.allocator, sizeof *sub);
    fsdp_status status = sub ? fsdpi_mesh_split(mesh, dim, size, stream, name, &sub->comm)
                             : fsdpi_no_memory(w, "mesh: group", "", sizeof *sub);
    if (status) {
        fsdpi_free(&w->boot.allocator, sub);
        return fsdpi_fail_together(w, status);
    }
    fsdpi_subgroup made = {mesh, dim, size, stream, w->num_comms, sub->comm, w->subgroups};
    *sub = made;
    w->subgroups = sub;
    *out = sub->comm;
    return FSDP_OK;
}

static fsdp_status fsdpi_mesh_groups(fsdp_mesh *mesh, int dim) {
    fsdp_world *w = mesh->world;
    int in_order = 1;
    if (mesh->shape[dim] == 1) return FSDP_OK;
    for (int i = 0; i < mesh->shape[dim]; i++) in_order &= mesh->ranks[i] == i;
    if (mesh->ndim == 1 && mesh->shape[0] == w->size && in_order) { // the world's own groups
        mesh->gather_comm[0] = w->comm;
        mesh->reduce_comm[0] = w->reduce_comm;
        return FSDP_OK;
    }
    FSDPI_TRY(fsdpi_mesh_split(mesh, dim, mesh->shape[dim], FSDP_STREAM_GATHER, mesh->names[dim],
                               &mesh->gather_comm[dim]));
    mesh->comm_number[dim] = w->num_comms;
    mesh->reduce_comm[dim] = mesh->gather_comm[dim];
    if (w->reduce_comm == w->comm) return FSDP_OK;
    return fsdpi_mesh_split(mesh, dim, mesh->shape[dim], FSDP_STREAM_REDUCE, mesh->names[dim],
                            &mesh->reduce_comm[dim]);
}

static fsdp_status fsdpi_mesh_make(fsdp_world *w, const fsdp_mesh_desc *d, fsdp_mesh **out) {
    const fsdp_allocator *a = &w->boot.allocator;
    fsdp_mesh *mesh = (fsdp_mesh *)fsdpi_alloc(a, sizeof *mesh);
    if (!mesh) return fsdpi_no_memory(w, "mesh", "", sizeof *mesh);
    mesh->world = w;
    mesh->ndim = d->ndim;
    memcpy(mesh->shape, d->shape, sizeof mesh->shape);
    int numel = mesh->root_numel = fsdpi_mesh_numel(mesh), mine = -1, missing = 0;
    mesh->ranks = (int32_t *)fsdpi_alloc(a, (size_t)numel * sizeof *mesh->ranks);
    for (int i = 0; i < d->ndim; i++) {
        if (!d->names[i]) continue;
        mesh->names[i] = fsdpi_copy_text(a, d->names[i]);
        missing |= !mesh->names[i];
    }
    if (!mesh->ranks || missing) {
        fsdpi_mesh_free(mesh);
        return fsdpi_no_memory(w, "mesh: ranks and names", "", (size_t)numel * sizeof(int32_t));
    }
    for (int i = 0; i < numel; i++) {
        mesh->ranks[i] = d->ranks ? d->ranks[i] : i;
        if (mesh->ranks[i] == w->rank) mine = i;
    }
    for (int i = d->ndim - 1, rest = mine; i >= 0; i--) {
        mesh->coord[i] = mine < 0 ? -1 : rest % mesh->shape[i];
        rest = mine < 0 ? -1 : rest / mesh->shape[i];
    }
    *out = mesh;
    return FSDP_OK;
}

// Makes a mesh of the world from `parent` (NULL: from none). from[dim]: the dim of `parent` whose
// groups this dim shares; -1: this dim makes its own. `from` NULL: all dims make their own.
static FSDP_COLD fsdp_status fsdpi_mesh_add(fsdp_world *w, const fsdp_mesh_desc *d,
                                            const fsdp_mesh *parent, const int32_t *from,
                                            fsdp_mesh **out) {
    fsdp_mesh *mesh;
    int alone = 1; // this rank makes it without the others, since no dim makes groups
    fsdp_status status = fsdpi_mesh_make(w, d, &mesh);
    for (int dim = 0; dim < d->ndim; dim++) alone &= from && from[dim] >= 0;
    if (!status && parent) mesh->root_numel = parent->root_numel;
    for (int dim = 0; !status && dim < mesh->ndim; dim++) {
        mesh->borrowed[dim] = from && from[dim] >= 0;
        if (mesh->borrowed[dim]) {
            mesh->gather_comm[dim] = parent->gather_comm[from[dim]];
            mesh->reduce_comm[dim] = parent->reduce_comm[from[dim]];
            continue;
        }
        status = fsdpi_mesh_groups(mesh, dim);
        if (status) fsdpi_mesh_free(mesh);
    }
    if (status) return alone ? status : fsdpi_fail_together(w, status);
    mesh->next = w->meshes;
    w->meshes = mesh;
    *out = mesh;
    return FSDP_OK;
}

FSDP_API FSDP_COLD fsdp_status fsdp_mesh_create(fsdp_world *world, const fsdp_mesh_desc *desc,
                                                fsdp_mesh **mesh) {
    fsdp_mesh_desc d;
    if (!world || !desc || !mesh)
        return fsdp_fail_null(world, "mesh_create", "world, desc or mesh");
    *mesh = NULL;
    FSDPI_TRY(fsdpi_failed(world));
    FSDPI_TRY(fsdp_desc_read(world, &d, desc, sizeof d, "fsdp_mesh_desc"));
    if (d.ndim < 1 || d.ndim > FSDP_MAX_DIMS)
        return fsdpi_invalid_arg(world, "[E110] mesh: ndim is %d, expected 1..%d", d.ndim,
                                 FSDP_MAX_DIMS);
    int64_t numel = 1;
    for (int i = 0; i < d.ndim; i++) {
        if (d.shape[i] < 1)
            return fsdpi_invalid_arg(world, "[E111] mesh: size of dim %d is %d, expected >= 1", i,
                                     d.shape[i]);
        numel *= d.shape[i];
        if (numel > world->size)
            return fsdpi_invalid_arg(
                world, "[E112] mesh: the product of the sizes exceeds %d ranks", world->size);
    }
    if (d.ranks) FSDPI_TRY(fsdpi_mesh_check_ranks(world, d.ranks, numel));
    return fsdpi_mesh_add(world, &d, NULL, NULL, mesh);
}

FSDP_API fsdp_status fsdp_mesh_1d(fsdp_world *world, const char *name, fsdp_mesh **mesh) {
    fsdp_mesh_desc d = FSDP_ZERO;
    d.ndim = 1;
    d.shape[0] = world ? world->size : 1;
    d.names[0] = name;
    return fsdp_mesh_create(world, &d, mesh);
}

// Makes the checks of all functions that make a mesh from a mesh.
static fsdp_status fsdpi_mesh_call(const fsdp_mesh *mesh, const char *what, fsdp_mesh **out) {
    if (!mesh || !out) return fsdp_fail_null(mesh ? mesh->world : NULL, what, "mesh or out");
    *out = NULL;
    return fsdpi_failed(mesh->world);
}

FSDP_API FSDP_COLD fsdp_status fsdp_mesh_slice(const fsdp_mesh *mesh, const int32_t *dims,
                                               int num_dims, fsdp_mesh **out) {
    fsdp_mesh_desc d = FSDP_ZERO;
    FSDPI_TRY(fsdpi_mesh_call(mesh, "mesh_slice", out));
    fsdp_world *w = mesh->world;
    int numel = 1;
    for (int i = 0; i < num_dims; i++) {
        if (!dims || dims[i] < 0 || dims[i] >= mesh->ndim || (i > 0 && dims[i] <= dims[i - 1]))
            return fsdpi_invalid_arg(
                w, "[E115] mesh_slice: dims[%d] is %d, expected increasing dims of %d", i,
                dims ? dims[i] : -1, mesh->ndim);
        d.shape[i] = mesh->shape[dims[i]];
        d.names[i] = mesh->names[dims[i]];
        numel *= d.shape[i];
    }
    if (num_dims < 1)
        return fsdpi_invalid_arg(w, "[E116] mesh_slice: num_dims is %d, expected >= 1", num_dims);
    d.ndim = num_dims;
    int32_t *ranks = (int32_t *)fsdpi_alloc(&w->boot.allocator, (size_t)numel * sizeof *ranks);
    if (!ranks) return fsdpi_no_memory(w, "mesh_slice", "", (size_t)numel * sizeof *ranks);
    fsdpi_mesh_members(mesh, dims, num_dims, ranks);
    d.ranks = ranks;
    fsdp_status status = fsdpi_mesh_add(w, &d, mesh, dims, out);
    fsdpi_free(&w->boot.allocator, ranks);
    return status;
}

FSDP_API fsdp_status fsdp_mesh_flatten(const fsdp_mesh *mesh, const char *name, fsdp_mesh **out) {
    fsdp_mesh_desc d = FSDP_ZERO;
    FSDPI_TRY(fsdpi_mesh_call(mesh, "mesh_flatten", out));
    d.ndim = 1;
    d.shape[0] = fsdpi_mesh_numel(mesh);
    d.names[0] = name;
    d.ranks = mesh->ranks;
    return fsdpi_mesh_add(mesh->world, &d, mesh, NULL, out);
}

FSDP_API FSDP_COLD fsdp_status fsdp_mesh_unflatten(const fsdp_mesh *mesh, int dim, int outer,
                                                   const char *const names[2], fsdp_mesh **out) {
    fsdp_mesh_desc d = FSDP_ZERO;
    int32_t from[FSDP_MAX_DIMS];
    FSDPI_TRY(fsdpi_mesh_call(mesh, "mesh_unflatten", out));
    if (dim < 0 || dim >= mesh->ndim || mesh->ndim == FSDP_MAX_DIMS || outer < 1 ||
        mesh->shape[dim] % outer != 0)
        return fsdpi_invalid_arg(
            mesh->world,
            "[E117] mesh_unflatten: dim is %d and outer is %d: expected a dim of the "
            "%d-D mesh, a divisor of its size %d, and at most %d dims afterwards",
            dim, outer, mesh->ndim, fsdp_mesh_size(mesh, dim), FSDP_MAX_DIMS);
    d.ndim = mesh->ndim + 1;
    for (int i = 0; i < d.ndim; i++) {
        int old = i > dim ? i - 1 : i;
        from[i] = old == dim ? -1 : old;
        d.shape[i] = mesh->shape[old];
        d.names[i] = old != dim ? mesh->names[old] : names ? names[i - dim] : NULL;
    }
    d.shape[dim] = outer;
    d.shape[dim + 1] = mesh->shape[dim] / outer;
    d.ranks = mesh->ranks;
    return fsdpi_mesh_add(mesh->world, &d, mesh, from, out);
}

FSDP_API int fsdp_mesh_dim(const fsdp_mesh *mesh, const char *name) {
    for (int d = 0; mesh && name && d < mesh->ndim; d++)
        if (mesh->names[d] && strcmp(mesh->names[d], name) == 0) return d;
    return -1;
}

FSDP_API int fsdp_mesh_equal(const fsdp_mesh *a, const fsdp_mesh *b) {
    if (!a || !b || a->ndim != b->ndim) return a == b;
    for (int d = 0; d < a->ndim; d++) {
        const char *x = a->names[d] ? a->names[d] : "", *y = b->names[d] ? b->names[d] : "";
        if (a->shape[d] != b->shape[d] || strcmp(x, y) != 0) return 0;
    }
    return memcmp(a->ranks, b->ranks, (size_t)fsdpi_mesh_numel(a) * sizeof *a->ranks) == 0;
}

FSDP_API int fsdp_mesh_ranks(const fsdp_mesh *mesh, int dim, int32_t *out) {
    int size = fsdp_mesh_size(mesh, dim);
    if (size < 0 || mesh->coord[0] < 0) return -1;
    if (out && dim < 0) memcpy(out, mesh->ranks, (size_t)size * sizeof *out);
    else if (out) fsdpi_mesh_neighbours(mesh, dim, size, out);
    return size;
}

FSDP_API int fsdp_mesh_ndim(const fsdp_mesh *mesh) { return mesh ? mesh->ndim : -1; }

FSDP_API int fsdp_mesh_size(const fsdp_mesh *mesh, int dim) {
    if (!mesh || dim < -1 || dim >= mesh->ndim) return -1;
    return dim < 0 ? fsdpi_mesh_numel(mesh) : mesh->shape[dim];
}

FSDP_API int fsdp_mesh_rank(const fsdp_mesh *mesh, int dim) {
    return !mesh || dim < 0 || dim >= mesh->ndim ? -1 : mesh->coord[dim];
}

FSDP_API FSDP_COLD fsdp_status fsdp_mesh_info_init(const fsdp_mesh *mesh, int kind, int shard_dim,
                                                   int replicate_dim, fsdp_mesh_info *out) {
    static const char *const names[] = {"FSDP", "DDP", "HSDP"};
    static const char *const needs[] = {"a shard_dim only", "a replicate_dim only",
                                        "a shard_dim and a replicate_dim"};
    if (!mesh || !out)
        return fsdp_fail_null(mesh ? mesh->world : NULL, "mesh_info_init", "mesh or out");
    fsdp_world *w = mesh->world;
    if (kind < FSDP_MESH_INFO_FSDP || kind > FSDP_MESH_INFO_HSDP)
        return fsdpi_invalid_arg(w, "[E118] mesh_info_init: kind is %d, expected FSDP_MESH_INFO_*",
                                 kind);
    int shards = kind != FSDP_MESH_INFO_DDP, replicates = kind != FSDP_MESH_INFO_FSDP;
    if (shards != (shard_dim >= 0) || replicates != (replicate_dim >= 0) || shard_dim < -1 ||
        replicate_dim < -1)
        return fsdpi_invalid_arg(
            w, "[E120] mesh_info_init: shard_dim %d, replicate_dim %d: %s needs %s", shard_dim,
            replicate_dim, names[kind], needs[kind]);
    if (shard_dim >= mesh->ndim || replicate_dim >= mesh->ndim || shard_dim == replicate_dim)
        return fsdpi_invalid_arg(
            w,
            "[E121] mesh_info_init: shard_dim %d, replicate_dim %d: expected two "
            "different dims of a %d-D mesh",
            shard_dim, replicate_dim, mesh->ndim);
    if (mesh->coord[0] < 0)
        return fsdpi_invalid_arg(w, "[E122] mesh_info_init: this rank is outside the mesh");
    memset(out, 0, sizeof *out);
    out->mesh = mesh;
    out->kind = kind;
    out->shard_mesh_dim = shards ? shard_dim : -1;
    out->replicate_mesh_dim = replicates ? replicate_dim : -1;
    out->shard_mesh_size = shards ? mesh->shape[shard_dim] : 1;
    out->shard_mesh_rank = shards ? mesh->coord[shard_dim] : 0;
    out->replicate_mesh_size = replicates ? mesh->shape[replicate_dim] : 1;
    out->replicate_mesh_rank = replicates ? mesh->coord[replicate_dim] : 0;
    out->shard_comm = shards ? mesh->gather_comm[shard_dim] : NULL;
    out->replicate_comm = replicates ? mesh->gather_comm[replicate_dim] : NULL;
    return FSDP_OK;
}

// Returns the communicator of reductions along a dim; NULL if dim is -1.
static fsdp_comm *fsdpi_reduce_comm(const fsdp_mesh *mesh, int dim) {
    return dim < 0 ? NULL : mesh->reduce_comm[dim];
}

FSDP_API fsdp_status fsdp_mesh_comm(const fsdp_mesh *mesh, int dim, int stream, fsdp_comm **comm) {
    if (!mesh || !comm)
        return fsdp_fail_null(mesh ? mesh->world : NULL, "mesh_comm", "mesh or comm");
    fsdp_world *w = mesh->world;
    *comm = NULL;
    FSDPI_TRY(fsdpi_failed(w));
    if (dim < 0 || dim >= mesh->ndim || stream < 0 || stream >= FSDP_STREAM_COUNT ||
        mesh->coord[0] < 0)
        return fsdpi_invalid_arg(
            w,
            "[E108] mesh_comm: dim is %d of a %d-D mesh, stream is %d: expected a "
            "dim, one of FSDP_STREAM_*, and a rank that is in the mesh",
            dim, mesh->ndim, stream);
    int own = stream == FSDP_STREAM_COMPUTE || stream == FSDP_STREAM_EXTENSION;
    if (mesh->shape[dim] == 1) return FSDP_OK;
    if (own && w->mode != FSDP_RUN_INLINE && w->caps.comm_threads > 1)
        return fsdpi_mesh_subgroup(mesh, dim, mesh->shape[dim], stream, "extension", comm);
    *comm = own || stream == FSDP_STREAM_GATHER ? mesh->gather_comm[dim] : mesh->reduce_comm[dim];
    return FSDP_OK;
}

FSDP_API fsdp_world *fsdp_mesh_world(const fsdp_mesh *mesh) { return mesh ? mesh->world : NULL; }

#endif // FSDPI_CORE_MESH_H
