/* core/report.h - reports allocated memory, and describes a model as text

   Callers: programs, predict.h (fsdpi_fill_memory) and world.h (fsdpi_say_mode).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_REPORT_H
#define FSDPI_CORE_REPORT_H

#include "../base/os.h"
#include "../base/text.h"
#include "error.h"
#include "grad_path.h"
#include "grads.h"
#include "layout.h"
#include "objects.h"

#include <string.h>

// Adds the run mode to a text, for fsdp_model_describe and the log.
static void fsdpi_say_mode(fsdpi_text *t, const fsdp_world *w) {
    static const char *const texts[] = {"inline", "in a worker thread", "in two worker threads"};
    int threads = w->mode != FSDP_RUN_INLINE;
    threads += w->workers[FSDP_STREAM_GATHER] != w->workers[FSDP_STREAM_REDUCE];
    if (w->mode == FSDP_RUN_STREAMS) fsdpi_text_add(t, "on streams of %s", w->device_ops->name);
    else fsdpi_text_add(t, "%s, %s", texts[threads], w->mode_reason);
}

// Returns the bytes of a unit's full parameters and gradients, in the dtypes that are stored.
static int64_t fsdpi_unsharded(const fsdp_unit *u) {
    int64_t bytes = 0;
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        bytes += fsdpi_bytes(p->lay.numel, p->dtype);
        if (p->requires_grad)
            bytes += fsdpi_bytes(p->lay.numel, fsdpi_grad_dtype(u->model, p->dtype));
    }
    return bytes;
}

static void fsdpi_fill_memory(const fsdp_model *m, fsdp_memory *out) {
    memset(out, 0, sizeof *out);
    for (int pool = 0; pool < FSDP_POOL_MAX; pool++) {
        out->pool_bytes[pool] = m->pool_bytes[pool];
        out->pool_slots[pool] = m->pool_slots[pool];
        out->total_bytes += m->pool_bytes[pool];
    }
    for (int i = 0; i < m->num_units; i++) out->unsharded_bytes += fsdpi_unsharded(m->units[i]);
    out->host_bytes = m->host_bytes;
    if (m->world->caps.comm_bytes) out->comm_bytes = FSDPI_LOAD(m->world->caps.comm_bytes);
}

FSDP_API fsdp_status fsdp_model_memory(const fsdp_model *model, fsdp_memory *out) {
    if (!model || !out) return fsdpi_null_of(model, "model_memory", "model or out");
    fsdpi_fill_memory(model, out);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_unit_memory(const fsdp_unit *unit, fsdp_memory *out) {
    if (!unit || !out)
        return fsdpi_null_of(unit ? unit->model : NULL, "unit_memory", "unit or out");
    memset(out, 0, sizeof *out);
    for (int k = 0; k < unit->layout.num_parts; k++) {
        const fsdpi_dtype_group *part = &unit->layout.parts[k];
        fsdp_dtype grad = fsdpi_grad_dtype(unit->model, part->dtype);
        out->pool_bytes[FSDP_POOL_SHARD] += fsdpi_bytes(
            part->train.shard_numel + part->frozen.shard_numel, part->dtype);
        out->pool_bytes[FSDP_POOL_SHARD_GRAD] += fsdpi_bytes(part->train.shard_numel, grad);
    }
    for (int pool = 0; pool <= FSDP_POOL_REDUCE_OUT; pool++) {
        int slot = pool < FSDP_POOL_GATHER ? -1 : unit->layout.classes[pool];
        if (slot >= 0) out->pool_bytes[pool] = (int64_t)unit->model->classes[slot].bytes;
        out->pool_slots[pool] = unit->state.slot[pool] != NULL;
        out->total_bytes += out->pool_bytes[pool];
    }
    out->unsharded_bytes = fsdpi_unsharded(unit);
    return FSDP_OK;
}

static void fsdpi_describe_param(fsdpi_text *t, const fsdp_unit *u, const fsdpi_param *p) {
    fsdpi_text_add(t, "    %-24s %-4s [", p->name, fsdp_dtype_name(p->dtype));
    for (int d = 0; d < p->lay.ndim; d++)
        fsdpi_text_add(t, "%s%lld", d ? ", " : "", (long long)p->lay.shape[d]);
    fsdpi_text_add(t, "] dim %d, rows %lld..%lld of %lld a rank, %s%s%s\n", p->lay.shard_dim,
                   (long long)p->lay.start, (long long)(p->lay.start + p->lay.rows),
                   (long long)p->lay.chunk,
                   p->num_strings  ? "extension"
                   : p->lay.direct ? "direct"
                                   : "packed",
                   p->requires_grad ? "" : ", frozen",
                   fsdpi_dtype_group_of(u, p)->param_dtype == p->dtype ? "" : ", cast");
}

// Prints the steps after a backward: "    gradients: chunk_cat in the slot, reduce_scatter to ...".
static void fsdpi_describe_route(fsdpi_text *t, const fsdp_unit *u) {
    static const char *const gathers[] = {"nothing: the full parameters are the shards",
                                          "the shards as they are",
                                          "this rank's part of the slot, which is filled before"};
    static const char *const texts[FSDPI_STEP_COUNT] = {
#define FSDP_X(name, op, label, stream, group, work, call, text) text,
        FSDPI_STEP_LIST(FSDP_X)
#undef FSDP_X
    };
    int held = fsdpi_held(u);
    fsdpi_text_add(t, "    gathered: %s\n", gathers[u->layout.gather]);
    if (u->layout.num_train == 0) return;
    if (fsdpi_facts_write_shard(&u->facts, held)) {
        fsdpi_text_add(t, "    gradients: written into the shard gradient\n");
        return;
    }
    fsdpi_grad_path r = fsdpi_grad_path_of(&u->facts, held | FSDPI_HELD_GRAD);
    fsdpi_text_add(t, "    gradients:%s", r.num ? "" : " kept in the slot");
    const char *comma = " ";
    for (int i = 0; i < r.num; i++) {
        if (r.steps[i].kind == FSDPI_STEP_ZERO_IN && !u->layout.pad_in) continue;
        fsdpi_text_add(t, "%s%s", comma, texts[r.steps[i].kind]);
        comma = ", ";
    }
    fsdpi_text_add(t, "%s\n", r.done ? "" : "; the reduction waits");
}

FSDP_API FSDP_COLD size_t fsdp_model_describe(const fsdp_model *model, char *buf, size_t cap) {
    fsdpi_text t = {buf, buf ? cap : 0, 0};
    fsdp_memory mem;
    if (buf && cap) buf[0] = 0;
    if (!model) return 0;
    fsdpi_fill_memory(model, &mem);
    fsdpi_text_add(&t, "model: %d units, %d parameters, rank %d of %d; collectives run ",
                   model->num_units, model->num_params, model->world->rank, model->world->size);
    fsdpi_say_mode(&t, model->world);
    fsdpi_text_add(&t, "\n");
    for (int i = 0; i < model->num_units; i++) {
        const fsdp_unit *u = model->units[i];
        fsdp_memory own;
        (void)fsdp_unit_memory(u, &own);
        fsdpi_text_add(&t,
                       "  unit %d '%s': %d shards x %d replicas, gathered as %s, reduced in %s, "
                       "reshard_after_forward %d; bytes: shard %lld, gradient %lld, gathered %lld, "
                       "unsharded %lld\n",
                       i, u->desc.name, fsdpi_shards(u), fsdpi_replicas(u),
                       fsdp_dtype_name(u->layout.gather_dtype),
                       fsdp_dtype_name(u->layout.reduce_dtype), u->options.reshard_after_forward,
                       (long long)own.pool_bytes[FSDP_POOL_SHARD],
                       (long long)own.pool_bytes[FSDP_POOL_SHARD_GRAD],
                       (long long)own.pool_bytes[FSDP_POOL_GATHER], (long long)own.unsharded_bytes);
        fsdpi_describe_route(&t, u);
        for (int k = 0; k < u->desc.num_params; k++) fsdpi_describe_param(&t, u, &u->params[k]);
    }
    fsdpi_text_add(&t, "  memory:");
    for (int pool = 0; pool < FSDP_POOL_MAX; pool++)
        if (mem.pool_bytes[pool])
            fsdpi_text_add(&t, " %s %lld in %d,", fsdp_model_pool_name(model, pool),
                           (long long)mem.pool_bytes[pool], mem.pool_slots[pool]);
    fsdpi_text_add(&t, " total %lld bytes", (long long)mem.total_bytes);
    if (mem.comm_bytes) fsdpi_text_add(&t, "; communicators %lld", (long long)mem.comm_bytes);
    fsdpi_text_add(&t, "\n");
    return t.used;
}

FSDP_API fsdp_status fsdp_model_desc_get(const fsdp_model *model, fsdp_model_desc *out) {
    if (!model || !out) return fsdpi_null_of(model, "model_desc_get", "model or out");
    *out = model->desc;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_unit_desc_get(const fsdp_unit *unit, fsdp_unit_desc *out) {
    if (!unit || !out)
        return fsdpi_null_of(unit ? unit->model : NULL, "unit_desc_get", "unit or out");
    memset(out, 0, sizeof *out);
    out->name = unit->desc.own_name;
    out->num_params = unit->desc.num_params;
    out->reshard_after_forward = unit->options.reshard_after_forward;
    out->param_dtype = unit->desc.policy_dtype;
    out->reduce_dtype = unit->desc.policy_reduce;
    out->output_dtype = unit->desc.output_dtype;
    out->keep_forward_inputs = unit->desc.keep_inputs;
    out->user = unit->desc.user;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_param_desc_get(const fsdp_unit *unit, int index, fsdp_param_desc *out) {
    if (!unit || !out)
        return fsdpi_null_of(unit ? unit->model : NULL, "param_desc_get", "unit or out");
    memset(out, 0, sizeof *out);
    FSDPI_TRY(fsdpi_check_index(unit, index, "param_desc_get"));
    const fsdpi_param *p = &unit->params[index];
    out->name = p->name;
    out->user = p->user;
    out->dtype = p->dtype;
    out->ndim = p->lay.ndim;
    memcpy(out->shape, p->lay.shape, sizeof out->shape);
    out->shard_dim = p->lay.shard_dim;
    out->frozen = !p->requires_grad;
    out->keep_dtype = p->keep_dtype;
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_model_counters(const fsdp_model *model, fsdp_counters *out) {
    if (!model || !out) return fsdpi_null_of(model, "model_counters", "model or out");
    *out = model->counters;
    return FSDP_OK;
}

#endif // FSDPI_CORE_REPORT_H
