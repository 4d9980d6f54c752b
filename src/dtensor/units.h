/* dtensor/units.h - units whose parameters tensor parallelism cuts or replicates

   From parameters with the shapes of whole tensors to fsdp_fully_shard. A cut unit consists of this
   rank's parts. FSDP shards those, so that the order of cuts is (tp, dp). A replicated unit has the
   ranks of tp among its replicas, so that the core sums its gradients over them, and norms count it
   once.
   State: fsdp_dmesh.units.
   Callers: programs.

   A part of fsdp_dtensor.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_DTENSOR_H
#include "../../fsdp_dtensor.h"
#endif
#ifndef FSDPI_DTENSOR_UNITS_H
#define FSDPI_DTENSOR_UNITS_H

#include "mesh.h"
#include "redistribute.h"

#include <string.h>

static int fsdpi_dt_tp_size(const fsdp_dmesh *dm) { return dm->shape[dm->tp]; }
static int fsdpi_dt_tp_rank(const fsdp_dmesh *dm) { return dm->coord[dm->tp]; }

// Returns this tp rank's share of `size` rows. fully_shard refuses a negative number later.
static fsdp_range fsdpi_dt_tp_rows(const fsdp_dmesh *dm, int64_t size) {
    fsdp_range mine = {0, size, 0};
    (void)fsdp_shard_range(size, fsdpi_dt_tp_size(dm), fsdpi_dt_tp_rank(dm), &mine);
    return mine;
}

static const fsdpi_dt_unit *fsdpi_dt_find_unit(const fsdp_dmesh *dm, const fsdp_unit *unit) {
    const fsdpi_dt_unit *u = dm->units;
    while (u && u->unit != unit) u = u->next;
    return u;
}

// Computes the mesh info of a unit: the ranks that shard and replicate it.
static fsdp_status fsdpi_dt_unit_info(const fsdp_dmesh *dm, int is_cut, fsdp_mesh_info *info) {
    const fsdp_mesh *mesh = dm->mesh;
    int shard = dm->shard, replicate = dm->replicate;
    if (!is_cut && dm->tp >= 0 && replicate >= 0) {
        mesh = dm->replica_mesh;
        if (shard >= 0) shard -= (shard > dm->tp) + (shard > replicate);
        replicate = fsdp_mesh_ndim(mesh) - 1;
    } else if (!is_cut && dm->tp >= 0) replicate = dm->tp;
    if (shard < 0 && replicate < 0) mesh = dm->unit_mesh, shard = 0;
    int kind = shard < 0       ? FSDP_MESH_INFO_DDP
               : replicate < 0 ? FSDP_MESH_INFO_FSDP
                               : FSDP_MESH_INFO_HSDP;
    return fsdp_mesh_info_init(mesh, kind, shard, replicate, info);
}

// Fails if the mesh has a data-parallel dim that units neither shard nor replicate over.
static fsdp_status fsdpi_dt_check_data_dims(const fsdp_dmesh *dm, const char *name) {
    static const char *const names[3] = {"dp", "dp_shard", "dp_replicate"};
    for (int i = 0; i < 3; i++) {
        int dim = fsdp_mesh_dim(dm->mesh, names[i]);
        if (dim >= 0 && dm->shape[dim] > 1 && dim != dm->tp && dim != dm->shard &&
            dim != dm->replicate)
            return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                             "[E036] tp_fully_shard: '%.200s': dm's mesh has a dim '%s' of %d "
                             "ranks over which the model's mesh_info does not shard or replicate, "
                             "so that gradients would not be averaged over it: give the model a "
                             "mesh_info that shards or replicates over it, or rename the dim",
                             name, names[i], dm->shape[dim]);
    }
    return FSDP_OK;
}

// Checks that the dims of dm's mesh define which ranks shard, replicate and cut a unit.
static fsdp_status fsdpi_dt_check_dims(const fsdp_dmesh *dm, const char *name, int is_cut,
                                       int partial) {
    fsdp_mesh_info info = FSDP_ZERO;
    if (dm->tp < 0 && (is_cut || partial))
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E033] tp_fully_shard: '%.200s': dm's mesh has no dim 'tp' over which "
                         "%s: name the dim in fsdp_dmesh_desc.tp_dim, or give the mesh one of 1 "
                         "rank",
                         name, is_cut ? "parameters are cut" : "gradients are addends");
    if (!dm->is_other) return fsdpi_dt_check_data_dims(dm, name);
    fsdp_status status = fsdp_model_mesh_info(dm->model, &info);
    if (status) return status;
    return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                     "[E034] tp_fully_shard: '%.200s': the model's mesh_info shards over %d ranks "
                     "and replicates over %d, and dm's mesh would do so over others (shard_dim: "
                     "dim %d, replicate_dim: dim %d; -1: none): give the model a mesh_info on this "
                     "mesh, or name its dims in fsdp_dmesh_desc",
                     name, info.shard_mesh_size, info.replicate_mesh_size, dm->shard,
                     dm->replicate);
}

// Sets *is_cut to 1 if every parameter is cut, to 0 if every one is replicated. Otherwise fails.
static fsdp_status fsdpi_dt_check_tp(const fsdp_dmesh *dm, const fsdp_tp_unit_desc *d,
                                     int *is_cut) {
    const fsdp_unit_desc *u = &d->unit;
    const char *name = !u->name ? "a unit without name" : *u->name ? u->name : "(root)";
    if (!u->params || u->num_params < 1 || !d->tp || u->mesh || u->mesh_info)
        return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                         "[E026] tp_fully_shard: '%.200s': params or tp is NULL, num_params is %d, "
                         "or a mesh is given: pass a placement for each of 1 or more parameters, "
                         "and no mesh: dm has it",
                         name, u->num_params);
    *is_cut = d->tp[0].kind == FSDP_SHARD;
    for (int i = 0; i < u->num_params; i++) {
        const fsdp_param_desc *p = &u->params[i];
        const fsdp_placement *tp = &d->tp[i];
        int cut = tp->kind == FSDP_SHARD;
        if (tp->kind != FSDP_REPLICATE && !cut)
            return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                             "[E027] tp_fully_shard: '%.200s': parameter %d has placement %d, "
                             "expected FSDP_SHARD or FSDP_REPLICATE",
                             name, i, tp->kind);
        if (cut && (p->ndim > FSDP_MAX_DIMS || tp->dim < -p->ndim || tp->dim >= p->ndim))
            return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                             "[E028] tp_fully_shard: '%.200s': parameter %d is cut along dim %d "
                             "and has %d dims: name one of them",
                             name, i, tp->dim, p->ndim);
        if (cut != *is_cut)
            return fsdp_fail(dm->world, FSDP_ERR_INVALID_ARG,
                             "[E029] tp_fully_shard: '%.200s': parameter 0 ('%.100s') is %s and "
                             "parameter %d ('%.100s') is %s: make two units, one of those that tp "
                             "cuts and one of those that it replicates",
                             name, u->params[0].name ? u->params[0].name : "",
                             *is_cut ? "cut" : "replicated", i, p->name ? p->name : "",
                             cut ? "cut" : "replicated");
    }
    return fsdpi_dt_check_dims(dm, name, *is_cut, d->partial_grads);
}

// Replaces each parameter by this rank's part of it. u keeps the dims and the whole lengths.
static void fsdpi_dt_cut_params(const fsdp_dmesh *dm, const fsdp_tp_unit_desc *d,
                                fsdp_param_desc *params, fsdpi_dt_unit *u) {
    for (int i = 0; i < d->unit.num_params; i++) {
        fsdp_param_desc *p = &params[i];
        int dim = d->tp[i].dim < 0 ? d->tp[i].dim + p->ndim : d->tp[i].dim;
        u->dims[i] = dim;
        u->sizes[i] = p->shape[dim];
        p->shape[dim] = fsdpi_dt_tp_rows(dm, p->shape[dim]).count;
    }
}

static fsdp_status fsdpi_dt_unit_new(fsdp_dmesh *dm, int num_params, fsdpi_dt_unit **out) {
    fsdpi_dt_unit *u;
    fsdp_status status = fsdpi_dt_alloc(dm->model, sizeof *u, (void **)out);
    if (status) return status;
    u = *out;
    u->num_params = num_params;
    status = fsdpi_dt_alloc(dm->model, (size_t)num_params * sizeof *u->dims, (void **)&u->dims);
    return status ? status
                  : fsdpi_dt_alloc(dm->model, (size_t)num_params * sizeof *u->sizes,
                                   (void **)&u->sizes);
}

// Makes the reduction a sum instead of a mean if gradients are partial over tp.
static fsdp_status fsdpi_dt_set_factor(const fsdp_dmesh *dm, fsdp_unit *unit, int partial) {
    int ranks = (dm->shard < 0 ? 1 : dm->shape[dm->shard]) *
                (dm->replicate < 0 ? 1 : dm->shape[dm->replicate]);
    if (!partial || fsdpi_dt_tp_size(dm) == 1) return FSDP_OK;
    return fsdp_set_gradient_divide_factor(dm->model, unit, ranks);
}

FSDP_API fsdp_status fsdp_tp_fully_shard(fsdp_dmesh *dm, const fsdp_tp_unit_desc *desc,
                                         fsdp_unit **unit) {
    fsdp_tp_unit_desc d;
    fsdp_mesh_info info;
    fsdp_param_desc *params = NULL;
    fsdpi_dt_unit *u = NULL;
    int is_cut = 0;
    if (!dm || !desc || !unit)
        return fsdp_fail_null(dm ? dm->world : NULL, "tp_fully_shard", "dm, desc or unit");
    *unit = NULL;
    fsdp_status status = fsdp_desc_read(dm->world, &d, desc, sizeof d, "fsdp_tp_unit_desc");
    if (!status) status = fsdpi_dt_check_tp(dm, &d, &is_cut);
    if (!status) status = fsdpi_dt_unit_info(dm, is_cut, &info);
    if (status) return status;
    d.unit.mesh_info = &info;
    if (is_cut) {
        size_t bytes = (size_t)d.unit.num_params * sizeof *params;
        status = fsdpi_dt_alloc(dm->model, bytes, (void **)&params);
        if (!status) status = fsdpi_dt_unit_new(dm, d.unit.num_params, &u);
        if (!status) {
            memcpy(params, d.unit.params, bytes);
            fsdpi_dt_cut_params(dm, &d, params, u);
            d.unit.params = params;
        }
    }
    if (!status) status = fsdp_fully_shard(dm->model, &d.unit, unit);
    if (!status && !is_cut) status = fsdpi_dt_set_factor(dm, *unit, d.partial_grads);
    fsdpi_dt_free(dm->model, params);
    if (!*unit) fsdpi_dt_free_unit(dm, u);
    else if (u) {
        u->unit = *unit;
        u->next = dm->units;
        dm->units = u;
    }
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Whole tensors.

FSDP_API fsdp_status fsdp_tp_view(const fsdp_dmesh *dm, const fsdp_param_view *local,
                                  fsdp_param_view *out) {
    if (!dm || !local || !out)
        return fsdp_fail_null(dm ? dm->world : NULL, "tp_view", "dm, local or out");
    const fsdpi_dt_unit *u = fsdpi_dt_find_unit(dm, local->unit);
    *out = *local;
    if (!u || local->index < 0 || local->index >= u->num_params) return FSDP_OK;
    int dim = u->dims[local->index];
    fsdp_range mine = fsdpi_dt_tp_rows(dm, u->sizes[local->index]);
    out->shape[dim] = u->sizes[local->index];
    out->start[dim] += mine.start;
    return FSDP_OK;
}

// Returns the elements in tp rank k's part of a parameter. Sets *block to its position in the
// whole.
static int64_t fsdpi_dt_tp_part(const fsdp_dmesh *dm, const fsdp_param_view *whole, int dim, int k,
                                fsdp_block *block) {
    fsdpi_dt_copy copy = {block, 0, 0};
    fsdpi_dt_piece(&copy, 0, whole->ndim, whole->shape, dim, fsdpi_dt_tp_size(dm), k, 0);
    return copy.count;
}

// Copies rows between a whole tensor and a contiguous part of it.
static void fsdpi_dt_move_part(char *to, const char *from, const fsdp_block *b, int back,
                               int64_t size) {
    for (int64_t i = 0; i < b->height; i++) {
        int64_t whole = (b->src + i * b->src_pitch) * size, part = i * b->width * size;
        memcpy(to + (back ? whole : part), from + (back ? part : whole), (size_t)(b->width * size));
    }
}

// Sets *view to the parameter with its whole shape, and *dim to the dim that tp cuts; -1: none.
static fsdp_status fsdpi_dt_tp_param(fsdp_dmesh *dm, fsdp_unit *unit, int index, const char *call,
                                     fsdp_param_view *view, int *dim) {
    fsdp_param_view local;
    *dim = -1;
    if (!dm || !unit) return fsdp_fail_null(dm ? dm->world : NULL, call, "dm or unit");
    fsdp_status status = fsdp_param_view_get(unit, index, &local);
    const fsdpi_dt_unit *u = fsdpi_dt_find_unit(dm, unit);
    if (u && !status) *dim = u->dims[index];
    return status ? status : fsdp_tp_view(dm, &local, view);
}

FSDP_API fsdp_status fsdp_tp_param_load(fsdp_dmesh *dm, fsdp_unit *unit, int index,
                                        const void *full) {
    fsdp_param_view v;
    fsdp_block block = {0, 0, 0, 0, 0, 0};
    char *part;
    int dim;
    fsdp_status status = fsdpi_dt_tp_param(dm, unit, index, "tp_param_load", &v, &dim);
    if (status || dim < 0 || !full) return status ? status : fsdp_param_load(unit, index, full);
    int64_t size = fsdpi_dt_bytes_of(v.dtype);
    int64_t count = fsdpi_dt_tp_part(dm, &v, dim, fsdpi_dt_tp_rank(dm), &block);
    status = fsdp_alloc(dm->model, FSDP_MEMORY_HOST, count * size,
                        "tp_param_load: no memory for a part", (void **)&part);
    if (status) return status;
    fsdpi_dt_move_part(part, (const char *)full, &block, 0, size);
    status = fsdp_param_load(unit, index, part);
    fsdpi_dt_free(dm->model, part);
    return status;
}

FSDP_API fsdp_status fsdp_tp_param_full(fsdp_dmesh *dm, fsdp_unit *unit, int index, int grad,
                                        void *full) {
    fsdp_param_view v;
    fsdp_block block = {0, 0, 0, 0, 0, 0};
    char *parts = NULL;
    int dim;
    fsdp_status status = fsdpi_dt_tp_param(dm, unit, index, "tp_param_full", &v, &dim);
    if (status) return status;
    if (dim < 0)
        return grad ? fsdp_param_full_grad(unit, index, full) : fsdp_param_full(unit, index, full);
    int64_t size = fsdpi_dt_bytes_of(grad ? v.grad_dtype : v.dtype);
    int64_t largest = fsdpi_dt_tp_part(dm, &v, dim, 0, &block) * size;
    status = fsdp_alloc(dm->model, FSDP_MEMORY_HOST, 2 * largest,
                        "tp_param_full: no memory for two parts", (void **)&parts);
    if (status) return status;
    status = grad ? fsdp_param_full_grad(unit, index, parts) : fsdp_param_full(unit, index, parts);
    for (int k = 0; k < fsdpi_dt_tp_size(dm) && !status; k++) { // the part of each rank in turn
        char *part = k == fsdpi_dt_tp_rank(dm) ? parts : parts + largest;
        int64_t bytes = fsdpi_dt_tp_part(dm, &v, dim, k, &block) * size;
        if (bytes) status = fsdp_broadcast(dm->world, dm->dim_mesh[dm->tp], part, bytes, k);
        if (bytes && full && !status) fsdpi_dt_move_part((char *)full, part, &block, 1, size);
    }
    fsdpi_dt_free(dm->model, parts);
    return status;
}

#endif // FSDPI_DTENSOR_UNITS_H
