/* core/attach.h - extensions are attached and detached; the states that they keep

   State: fsdp_model.attached, the list of extensions.
   Callers: programs.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_ATTACH_H
#define FSDPI_CORE_ATTACH_H

#include "alloc.h"
#include "commit.h"
#include "error.h"
#include "model.h"
#include "objects.h"
#include "run.h"
#include "step.h"
#include "timeline.h"
#include "ext_dispatch.h"

#include <string.h>

FSDP_API FSDP_COLD fsdp_status fsdp_attach(fsdp_model *model, const fsdp_extension *extension) {
    fsdp_extension e;
    if (!model || !extension) return fsdpi_null_of(model, "attach", "model or extension");
    fsdp_world *w = model->world;
    fsdp_status status = FSDP_OK;
    FSDPI_TRY(fsdpi_refuse_in_dry_run(model, "attach"));
    FSDPI_TRY(fsdp_desc_read(w, &e, extension, sizeof e, "fsdp_extension"));
    if (e.call || e.returned || e.op || e.buffer || e.ran)
        status = fsdpi_check_units(model, FSDP_CALL_FULL, "attach");
    if (status) return fsdpi_keep_status(model, status);
    e.size = 0;
    if (!e.name) e.name = "extension";
    if (e.ran || (model->listeners & FSDPI_LISTEN_TIMES))
        fsdpi_drain(w); // worker threads read the list
    if (e.ran && w->mode == FSDP_RUN_STREAMS) status = fsdpi_timeline_open(w);
    if (status)
        return fsdp_fail(w, status,
                         "[E901] attach: '%s' has `ran`, but device %s cannot measure times: %s",
                         e.name, w->device_ops->name, fsdpi_device_text(w, status));
    fsdpi_attached *a = (fsdpi_attached *)fsdpi_model_alloc(model, sizeof *a), **last;
    if (!a) return fsdpi_no_memory(w, "attach: extension", e.name, sizeof *a);
    a->e = e;
    for (last = &model->attached; *last;) last = &(*last)->next;
    *last = a;
    fsdpi_update_listeners(model);
    return FSDP_OK;
}

// Returns the first unit that holds a slot which an extension gave it; NULL: there is none.
static const fsdp_unit *fsdpi_unit_with_foreign_slot(const fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++)
        for (int pool = FSDP_POOL_GATHER; pool <= FSDP_POOL_REDUCE_OUT; pool++) {
            const fsdp_buf *slot = m->units[i]->state.slot[pool];
            const fsdpi_slot_class *c = slot ? &m->classes[m->units[i]->layout.classes[pool]]
                                             : NULL;
            int own = !slot;
            for (int k = 0; !own && k < c->count; k++) own = c->slots[k] == slot;
            if (!own) return m->units[i];
        }
    return NULL;
}

// Drains all streams and reports the times of ops, so that no later report calls an extension.
static void fsdpi_end_times(const fsdp_model *m) {
    if (!(m->listeners & FSDPI_LISTEN_TIMES)) return;
    fsdpi_drain(m->world);
    fsdpi_timeline_end_all(m->world);
}

// Sets *out to the link to the attached extension that is equal to *given. Fails if there is none.
static fsdp_status fsdpi_find_attached(fsdp_model *m, const fsdp_extension *given, const char *what,
                                       fsdpi_attached ***out) {
    fsdp_extension e;
    if (!m || !given) return fsdpi_null_of(m, what, "model or extension");
    if (fsdpi_is_child(m->world)) return fsdpi_failed(m->world);
    FSDPI_TRY(fsdp_desc_read(m->world, &e, given, sizeof e, "fsdp_extension"));
    if (m->dry_run) return fsdpi_refuse_in_dry_run(m, what);
    e.size = 0;
    if (!e.name) e.name = "extension";
    for (*out = &m->attached; **out; *out = &(**out)->next)
        if (memcmp(&(**out)->e, &e, sizeof e) == 0) return FSDP_OK;
    return fsdpi_invalid_arg(m->world,
                             "[E903] %s: '%s' with these contents is not attached to this model",
                             what, e.name);
}

FSDP_API fsdp_status fsdp_detach(fsdp_model *model, const fsdp_extension *extension) {
    fsdpi_attached **at = NULL;
    fsdp_status status = fsdpi_find_attached(model, extension, "detach", &at);
    if (status || !at) return status;
    const fsdp_extension *e = &(*at)->e;
    const fsdp_unit *unit = e->buffer ? fsdpi_unit_with_foreign_slot(model) : NULL;
    if (model->ext_depth || unit)
        return fsdp_fail(model->world, FSDP_ERR_INVALID_STATE,
                         "[E902] detach: '%s' %s%s: detach it between steps, not in an extension",
                         e->name, unit ? "may own a slot of unit " : "is in use",
                         unit ? unit->desc.name : "");
    fsdpi_end_times(model);
    fsdpi_detach(model, at);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_extension_mute(fsdp_model *model, fsdp_extension *extension) {
    fsdpi_attached **at = NULL;
    fsdp_status status = fsdpi_find_attached(model, extension, "extension_mute", &at);
    if (status || !at) return status;
    fsdpi_end_times(model);
    for (int own = 0; own < 2; own++) {
        fsdp_extension *e = own ? extension : &(*at)->e;
        e->call = NULL, e->returned = NULL, e->op = NULL, e->ran = NULL;
    }
    fsdpi_update_listeners(model);
    return FSDP_OK;
}

FSDP_API void *fsdp_find_extension(const fsdp_model *model, const char *name) {
    for (const fsdpi_attached *a = model && name ? model->attached : NULL; a; a = a->next)
        if (strcmp(a->e.name, name) == 0) return a->e.user;
    return NULL;
}

FSDP_API fsdp_status fsdp_next_state(fsdp_model *model, fsdp_state_item *item) {
    if (!model || !item) return fsdpi_null_of(model, "next_state", "model or item");
    fsdp_status status = fsdpi_commit(model);
    int which = item->at[0], index = item->name ? item->at[1] + 1 : 0, sizes = item->sizes_only;
    fsdpi_attached *a = model->attached;
    for (int i = 0; a && i < which; i++) a = a->next;
    memset(item, 0, sizeof *item);
    for (; a && !status; a = a->next, which++, index = 0) {
        if (!a->e.state) continue;
        item->ordinal = -1;
        item->sizes_only = sizes;
        status = a->e.state(a->e.user, model, index, item);
        if (status || !item->name) continue;
        item->extension = a->e.name;
        item->at[0] = which;
        item->sizes_only = sizes; // again: the extension may have set the whole item
        item->at[1] = index;
        fsdp_param_view v;
        if (item->sharded) status = fsdp_param_at(model, item->ordinal, &v);
        if (status || !item->sharded) return status;
        item->ndim = v.ndim;
        memcpy(item->shape, v.shape, sizeof item->shape);
        item->numel = v.numel;
        return FSDP_OK;
    }
    item->name = NULL;
    return status;
}

FSDP_API fsdp_status fsdp_state_reserve(fsdp_model *model, int ordinal) {
    fsdp_param_view v;
    if (!model) return fsdp_fail_null(NULL, "state_reserve", "model");
    fsdp_status status = fsdp_param_at(model, ordinal, &v);
    for (fsdpi_attached *a = model->attached; a && !status; a = a->next)
        if (a->e.hold) status = a->e.hold(a->e.user, model, ordinal);
    return status;
}

FSDP_API fsdp_status fsdp_tell_values(fsdp_model *model, int event, int ordinal) {
    fsdp_param_view v;
    if (!model) return fsdp_fail_null(NULL, "tell_values", "model");
    if (event < FSDP_VALUES_MOVED || event > FSDP_VALUES_WRITTEN)
        return fsdpi_invalid_arg(model->world,
                                 "[E9030] tell_values: event is %d, expected FSDP_VALUES_*", event);
    FSDPI_TRY(fsdpi_commit(model));
    if (event == FSDP_VALUES_REPLACE || event == FSDP_VALUES_WRITTEN)
        FSDPI_TRY(fsdp_param_at(model, ordinal, &v));
    return fsdpi_tell_values(model, event, ordinal);
}

FSDP_API fsdp_status fsdp_state_loaded(fsdp_model *model) {
    if (!model) return fsdp_fail_null(NULL, "state_loaded", "model");
    fsdp_status status = fsdpi_failed(model->world);
    for (fsdpi_attached *a = model->attached; a && !status; a = a->next)
        if (a->e.state) status = a->e.state(a->e.user, model, 0, NULL);
    return status;
}

#endif // FSDPI_CORE_ATTACH_H
