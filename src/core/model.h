/* core/model.h - a model begins and ends; its world, its mesh, how many units it has

   State: fsdp_world.models.
   Callers: programs, attach.h (fsdpi_detach) and world.h (fsdpi_model_close).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_MODEL_H
#define FSDPI_CORE_MODEL_H

#include "alloc.h"
#include "commit.h"
#include "error.h"
#include "gather.h"
#include "mesh.h"
#include "objects.h"
#include "run.h"
#include "timeline.h"
#include "unit.h"
#include "ext_dispatch.h"

// Takes an extension out and ends it. None of its ops is under way.
static void fsdpi_detach(fsdp_model *m, fsdpi_attached **at) {
    fsdpi_attached *gone = *at;
    *at = gone->next;
    fsdpi_update_listeners(m);
    if (gone->e.destroy) gone->e.destroy(gone->e.user);
    fsdpi_model_free(m, gone);
}

static void fsdpi_model_close(fsdp_model *m) {
    fsdp_world *w = m->world;
    fsdpi_call_all_back(m); // a plan supplies slots
    while (m->attached) {
        fsdpi_attached **last = &m->attached;
        while ((*last)->next) last = &(*last)->next;
        fsdpi_detach(m, last);
    }
    fsdpi_model_free_buffers(m);
    fsdpi_model_free(m, m->norm_blocks);
    for (int i = 0; i < m->num_units; i++) {
        fsdpi_early_free(m->units[i]);
        fsdpi_unit_free(m->units[i]);
    }
    fsdpi_model_free(m, m->units);
    if (m->own_mesh) fsdpi_mesh_free(m->own_mesh);
    fsdpi_free(&w->boot.allocator, m);
}

static fsdp_status fsdpi_model_check(fsdp_world *w, fsdp_model_desc *d) {
    FSDPI_TRY(fsdpi_dtypes_check(w, "model_create", "", d->param_dtype, d->reduce_dtype,
                                 d->output_dtype));
    if (d->grad_dtype && !fsdp_dtype_is_float(d->grad_dtype))
        return fsdpi_invalid_arg(
            w, "[E130] model_create: grad_dtype is %d, expected floating or KEEP", d->grad_dtype);
    if (d->reshard_after_forward < FSDP_RESHARD_NEVER ||
        d->implicit_prefetch < FSDP_PREFETCH_NEVER || d->implicit_prefetch > FSDP_PREFETCH_ALWAYS)
        return fsdpi_invalid_arg(
            w,
            "[E131] model_create: reshard_after_forward is %d, implicit_prefetch %d: "
            "expected FSDP_RESHARD_* or n >= 2, and FSDP_PREFETCH_*",
            d->reshard_after_forward, d->implicit_prefetch);
    if (d->direct_min < 0 || d->fill_bytes < 0 || d->prefetch_bytes < 0)
        return fsdpi_invalid_arg(
            w,
            "[E132] model_create: direct_min %lld, fill_bytes %lld, prefetch_bytes "
            "%lld: expected numbers >= 0",
            (long long)d->direct_min, (long long)d->fill_bytes, (long long)d->prefetch_bytes);
    if (d->reshard_after_forward == FSDP_RESHARD_DEFAULT)
        d->reshard_after_forward = FSDP_RESHARD_ALWAYS;
    if (d->direct_min == 0) d->direct_min = FSDPI_DIRECT_MIN;
    if (d->fill_bytes == 0) d->fill_bytes = 16 << 20;
    return FSDP_OK;
}

FSDP_API FSDP_COLD fsdp_status fsdp_model_create(fsdp_world *world, const fsdp_model_desc *desc,
                                                 fsdp_model **model) {
    fsdp_model_desc d;
    if (!world || !model) return fsdp_fail_null(world, "model_create", "world or model");
    *model = NULL;
    FSDPI_TRY(fsdpi_failed(world));
    FSDPI_TRY(fsdp_desc_read(world, &d, desc, sizeof d, "fsdp_model_desc"));
    FSDPI_TRY(fsdpi_model_check(world, &d));
    fsdp_model *m = (fsdp_model *)fsdpi_alloc(&world->boot.allocator, sizeof *m);
    if (!m) return fsdpi_no_memory(world, "model_create", "", sizeof *m);
    m->world = world;
    m->desc = d;
    m->options = fsdpi_first_options;
    m->host_bytes = (int64_t)sizeof *m;
    fsdp_status status = FSDP_OK;
    if (!d.mesh && !d.mesh_info) {
        fsdp_mesh_desc whole = FSDP_ZERO;
        whole.ndim = 1;
        whole.shape[0] = world->size;
        status = fsdpi_mesh_make(world, &whole, &m->own_mesh);
        if (!status) status = fsdpi_mesh_groups(m->own_mesh, 0);
        m->desc.mesh = m->own_mesh;
    }
    if (!status)
        status = fsdpi_resolve_mesh(world, m->desc.mesh, m->desc.mesh_info, NULL, &m->info);
    if (status) {
        fsdpi_model_close(m);
        return status;
    }
    m->desc.mesh_info = NULL; // it is the caller's, and may not live on
    m->mixed = m->info.shard_mesh_size * m->info.replicate_mesh_size !=
               fsdpi_mesh_numel(m->info.mesh);
    m->number = world->num_models++;
    m->next = world->models;
    world->models = m;
    fsdpi_update_listeners(m);
    *model = m;
    return FSDP_OK;
}

FSDP_API void fsdp_model_destroy(fsdp_model *model) {
    if (!model || fsdpi_is_child(model->world)) return;
    fsdp_world *w = model->world;
    fsdpi_drain(w);
    fsdpi_timeline_end_all(w);
    for (fsdp_model **at = &w->models; *at; at = &(*at)->next) {
        if (*at != model) continue;
        *at = model->next;
        break;
    }
    fsdpi_model_close(model);
}

FSDP_API fsdp_world *fsdp_model_world(const fsdp_model *m) { return m ? m->world : NULL; }
FSDP_API int fsdp_model_run_mode(const fsdp_model *m) { return m ? m->world->mode : 0; }
FSDP_API int64_t fsdp_model_failure(const fsdp_model *m) {
    return m && m->hook_status ? m->hook_failures : 0;
}
FSDP_API int fsdp_num_units(const fsdp_model *m) { return m ? m->num_units : 0; }
FSDP_API int fsdp_num_params(const fsdp_model *m) { return m ? m->num_params : 0; }

FSDP_API fsdp_status fsdp_model_mesh_info(const fsdp_model *model, fsdp_mesh_info *out) {
    if (!model || !out) return fsdpi_null_of(model, "model_mesh_info", "model or out");
    *out = model->info;
    return FSDP_OK;
}

#endif // FSDPI_CORE_MODEL_H
