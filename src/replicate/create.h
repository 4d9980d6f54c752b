/* replicate/create.h - creation

   State: fsdp_replicate, which fsdp_replicate_create fills in.
   Callers: programs.

   A part of fsdp_replicate.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_REPLICATE_H
#include "../../fsdp_replicate.h"
#endif
#ifndef FSDPI_REPLICATE_CREATE_H
#define FSDPI_REPLICATE_CREATE_H

#include "objects.h"
#include "unused.h"

#include <stdio.h>
#include <string.h>

typedef struct fsdpi_rep_work { // needed only during creation
    fsdp_param_desc *params;    // [2 * num_params] in order; then those of one bucket
    int64_t *nbytes, *counts;   // counts: bytes that count towards caps
    int32_t *key, *order, *bucket, *place;
    char (*names)[16]; // "p0", ...
} fsdpi_rep_work;

// Copies the descs, whose array may have an older header's stride. Finds sizes and keys of tensors.
static fsdp_status fsdpi_rep_params(fsdp_world *world, const fsdp_replicate_desc *d,
                                    fsdpi_rep_work *w) {
    size_t stride = 0;
    for (int i = 0; i < d->num_params; i++) {
        fsdp_param_desc *p = &w->params[i];
        const char *at = (const char *)d->params + (size_t)i * stride;
        char what[64];
        snprintf(what, sizeof what, "fsdp_replicate_desc.params[%d]", i);
        fsdp_status status = fsdp_desc_read(world, p, at, sizeof *p, what);
        if (status) return status;
        if (i == 0) stride = p->size ? p->size : sizeof *p;
        p->size = sizeof *p;
        if (!p->dtype) p->dtype = FSDP_F32;
        snprintf(w->names[i], sizeof w->names[i], "p%d", i);
        if (!p->name) p->name = w->names[i];
        for (int k = 0; k < i; k++)
            if (strcmp(w->params[k].name, p->name) == 0)
                return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                                 "[E953] replicate_create: parameters %d and %d are both named "
                                 "'%s': give each a name of its own",
                                 k, i, p->name);
        double nbytes = (double)fsdp_dtype_size(p->dtype); // fully_shard refuses odd shapes
        for (int k = 0; k < p->ndim && k < FSDP_MAX_DIMS; k++) nbytes *= (double)p->shape[k];
        w->nbytes[i] = nbytes > 0 && nbytes < 9e18 / d->num_params ? (int64_t)nbytes : 0;
        w->counts[i] = p->frozen ? 0 : w->nbytes[i];
        w->key[i] = (int32_t)((uint32_t)p->dtype % 16u) + 16 * (p->keep_dtype != 0) +
                    32 * (p->frozen != 0);
    }
    return FSDP_OK;
}

// Assigns parameters to buckets. Frozen ones come last and fill no bucket, so their buckets are
// last.
static fsdp_status fsdpi_rep_assign(fsdp_world *world, const fsdp_replicate_desc *d,
                                    fsdpi_rep_work *w, int32_t *num_buckets) {
    int64_t two[2] = {d->first_bytes, d->bucket_bytes ? d->bucket_bytes : 25 << 20};
    if (!two[0]) two[0] = d->bucket_bytes ? two[1] : 1 << 20;
    const int64_t *caps = d->num_caps ? d->caps : two;
    int n = d->num_params, num_caps = d->num_caps ? d->num_caps : 2, at = 0;
    if (num_caps < 0 || !caps)
        return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                         "[E954] replicate_create: num_caps is %d, caps is %s: give as many caps, "
                         "or 0 of them",
                         d->num_caps, d->caps ? "given" : "NULL");
    for (int i = 0; i < num_caps; i++)
        if (caps[i] < 1)
            return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                             "[E955] replicate_create: %s[%d] is %lld, expected >= 1 byte",
                             d->num_caps ? "caps" : "first_bytes, bucket_bytes", i,
                             (long long)caps[i]);
    for (int i = 0; i < n; i++) {
        int t = d->order ? d->order[i] : n - 1 - i, known = t >= 0 && t < n;
        if (!known || w->place[t]++)
            return fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                             "[E956] replicate_create: order[%d] is %d%s, expected a permutation "
                             "of 0..%d",
                             i, t, known ? " for the second time" : "", n - 1);
    }
    for (int frozen = 0; frozen < 2; frozen++)
        for (int i = 0; i < n; i++) {
            int t = d->order ? d->order[i] : n - 1 - i;
            if ((w->params[t].frozen != 0) == frozen) w->order[at++] = t;
        }
    *num_buckets = fsdp_replicate_assign(w->counts, w->key, w->order, n, caps, num_caps, w->bucket,
                                         w->place, NULL);
    return FSDP_OK;
}

// Finds the mesh info of the buckets, and the 1-D mesh of its replicas.
static fsdp_status fsdpi_rep_mesh(fsdp_model *model, const fsdp_replicate_desc *d,
                                  fsdp_mesh_info *info, const fsdp_mesh **replicas) {
    fsdp_world *world = fsdp_model_world(model);
    fsdp_mesh *all = NULL;
    fsdp_status status = fsdp_model_mesh_info(model, info);
    if (d->mesh_info) *info = *d->mesh_info;
    if (!status && !d->mesh_info && (d->mesh || info->kind != FSDP_MESH_INFO_DDP)) {
        if (!d->mesh) status = fsdp_mesh_1d(world, "replicate", &all);
        const fsdp_mesh *mesh = d->mesh ? d->mesh : all;
        if (!status && fsdp_mesh_ndim(mesh) != 1)
            status = fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                               "[E957] replicate_create: the mesh is %d-D, expected 1-D: slice "
                               "it, or give a mesh_info of kind DDP",
                               fsdp_mesh_ndim(mesh));
        if (!status) status = fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, info);
    }
    if (!status && (info->kind != FSDP_MESH_INFO_DDP || !info->mesh))
        status = fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                           "[E958] replicate_create: mesh_info is of kind %s and its mesh is %s, "
                           "expected DDP and a mesh: fill it by fsdp_mesh_info_init with "
                           "FSDP_MESH_INFO_DDP",
                           info->kind == FSDP_MESH_INFO_HSDP  ? "HSDP"
                           : info->kind == FSDP_MESH_INFO_DDP ? "DDP"
                                                              : "FSDP",
                           info->mesh ? "given" : "NULL");
    if (status) return status;
    *replicas = info->mesh;
    if (fsdp_mesh_ndim(info->mesh) == 1) return FSDP_OK;
    int32_t dim = info->replicate_mesh_dim;
    status = fsdp_mesh_slice(info->mesh, &dim, 1, &all);
    *replicas = all;
    return status;
}

// Makes a bucket's unit from its parameters.
static fsdp_status fsdpi_rep_bucket_unit(fsdp_replicate *rep, const fsdp_replicate_desc *d,
                                         const fsdp_mesh_info *info, const fsdpi_rep_work *w,
                                         fsdpi_rep_unit *b) {
    int k = (int)(b - rep->buckets);
    fsdp_param_desc *params = w->params + d->num_params;
    fsdp_unit_desc ud = FSDP_ZERO;
    char name[128];
    snprintf(name, sizeof name, "%.100s.%d", d->name ? d->name : "bucket", k);
    b->rep = rep;
    b->members = k ? b[-1].members + b[-1].num_members : rep->members;
    b->shown.index = k;
    for (int i = 0; i < d->num_params; i++) {
        if (w->bucket[i] != k) continue;
        b->members[w->place[i]] = i;
        params[w->place[i]] = w->params[i];
        rep->params[i].bucket = k;
        rep->params[i].index = w->place[i];
        b->nbytes += w->nbytes[i];
        b->num_members++;
    }
    b->part.src = b->part.dst = 4 * (b->members - rep->members);
    b->part.width = b->part.src_pitch = b->part.dst_pitch = 4 * (int64_t)b->num_members;
    b->part.height = 1;
    ud.name = name;
    ud.params = params;
    ud.num_params = b->num_members;
    ud.reshard_after_forward = FSDP_RESHARD_NEVER;
    ud.param_dtype = d->param_dtype;
    ud.reduce_dtype = d->reduce_dtype;
    ud.mesh_info = info;
    fsdp_status status = fsdp_fully_shard(rep->model, &ud, &b->unit);
    if (!status) status = fsdp_set_reduce_scatter_unused_params(rep->model, b->unit, 1);
    // Ranks open a bucket at different times, so it must not start to gather another unit.
    return status ? status : fsdp_set_modules_to_backward_prefetch(b->unit, &b->unit, 1);
}

// Allocates the buffers and the communicator of the op "replicate_used".
static fsdp_status fsdpi_rep_exchange(fsdp_replicate *rep, int num_params) {
    fsdp_model *m = rep->model;
    int pool = fsdp_pool_register(m, "replicate");
    int64_t nbytes = 4 * (int64_t)num_params;
    const fsdp_block whole = {0, 0, nbytes, 1, nbytes, nbytes};
    rep->whole = whole;
    rep->label = fsdp_label_register(m, "replicate_used");
    if (pool < 0 || rep->label < 0) return FSDP_ERR_INVALID_ARG;
    fsdp_status status = fsdp_mesh_comm(rep->mesh, 0, FSDP_STREAM_ALLREDUCE, &rep->comm);
    if (status || !rep->comm) return status;
    status = fsdp_buf_create(m, pool, FSDP_MEMORY_PINNED, nbytes, &rep->mine);
    return status ? status : fsdp_buf_create(m, pool, FSDP_MEMORY_DEVICE, nbytes, &rep->ours);
}

static fsdp_status fsdpi_rep_build(fsdp_replicate *rep, const fsdp_replicate_desc *d,
                                   const fsdp_mesh_info *info, fsdpi_rep_work *w) {
    fsdp_world *world = fsdp_model_world(rep->model);
    fsdp_status status = fsdpi_rep_params(world, d, w);
    if (!status) status = fsdpi_rep_assign(world, d, w, &rep->num_buckets);
    for (int k = 0; k < rep->num_buckets && !status; k++)
        status = fsdpi_rep_bucket_unit(rep, d, info, w, &rep->buckets[k]);
    if (!status) status = fsdpi_rep_exchange(rep, d->num_params);
    if (status) return status;
    rep->num_params = d->num_params;
    rep->late = d->late != 0;
    rep->moved = 1;
    rep->witness = -1;
    fsdpi_rep_clear(rep);
    rep->extension.name = "replicate";
    rep->extension.user = rep;
    rep->extension.call = fsdpi_rep_call;
    rep->extension.relayout = fsdpi_rep_relayout;
    rep->extension.destroy = fsdpi_rep_destroy;
    return fsdp_attach(rep->model, &rep->extension);
}

FSDP_API fsdp_status fsdp_replicate_create(fsdp_model *model, const fsdp_replicate_desc *desc,
                                           fsdp_replicate **rep) {
    if (!model || !desc || !rep)
        return fsdp_fail_null(fsdp_model_world(model), "replicate_create", "model, desc or rep");
    fsdp_world *world = fsdp_model_world(model);
    fsdp_replicate_desc d;
    fsdpi_rep_work w;
    fsdp_mesh_info info;
    const fsdp_mesh *mesh = NULL;
    void *room = NULL, *temporary = NULL;
    *rep = NULL;
    fsdp_status status = fsdp_desc_read(world, &d, desc, sizeof d, "fsdp_replicate_desc");
    if (!status && (d.num_params < 1 || !d.params))
        status = fsdp_fail(world, FSDP_ERR_INVALID_ARG,
                           "[E959] replicate_create: num_params is %d, params is %s, expected "
                           ">= 1 and an array",
                           d.num_params, d.params ? "given" : "NULL");
    if (!status) status = fsdpi_rep_mesh(model, &d, &info, &mesh);
    if (status) return status;
    int64_t n = d.num_params,
            each = (int64_t)(sizeof(fsdpi_rep_unit) + sizeof(fsdpi_rep_param)) + 2 * 8 + 5 * 4;
    int64_t work = n * ((int64_t)(2 * sizeof(fsdp_param_desc) + sizeof *w.names) + 2 * 8 + 4 * 4);
    status = fsdp_alloc(model, FSDP_MEMORY_HOST, (int64_t)sizeof **rep + n * each,
                        "replicate_create: no memory for its tables", &room);
    if (!status)
        status = fsdp_alloc(model, FSDP_MEMORY_HOST, work,
                            "replicate_create: no memory to assign buckets", &temporary);
    if (!status) {
        fsdp_replicate *made = (fsdp_replicate *)room;
        made->model = model;
        made->mesh = mesh;
        made->buckets = (fsdpi_rep_unit *)(void *)(made + 1);
        made->offsets = (int64_t *)(void *)(made->buckets + n);
        made->numels = made->offsets + n;
        made->params = (fsdpi_rep_param *)(void *)(made->numels + n);
        made->members = (int32_t *)(void *)(made->params + n);
        made->trainable = made->members + n;
        made->seen = made->trainable + n;
        made->order = made->seen + n;
        made->found = made->order + n;
        w.params = (fsdp_param_desc *)temporary;
        w.nbytes = (int64_t *)(void *)(w.params + 2 * n);
        w.counts = w.nbytes + n;
        w.key = (int32_t *)(void *)(w.counts + n);
        w.order = w.key + n;
        w.bucket = w.order + n;
        w.place = w.bucket + n;
        w.names = (char(*)[16])(void *)(w.place + n);
        status = fsdpi_rep_build(made, &d, &info, &w);
        if (status) fsdpi_rep_destroy(made);
        else *rep = made;
    } else fsdp_free(model, FSDP_MEMORY_HOST, room, 0);
    fsdp_free(model, FSDP_MEMORY_HOST, temporary, work);
    return status;
}

#endif // FSDPI_REPLICATE_CREATE_H
