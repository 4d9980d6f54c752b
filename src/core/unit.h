/* core/unit.h - fsdp_fully_shard: checks a desc, and makes a unit and its parameters

   State: the fields of fsdp_unit, until commit lays out the model.
   Callers: trainers (fsdp_fully_shard); commit.h and options.h (fsdpi_unit_arrange).
   Source: torch: fully_shard, FSDPParamGroup.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_UNIT_H
#define FSDPI_CORE_UNIT_H

#include "../base/hash.h"
#include "../base/macros.h"
#include "alloc.h"
#include "error.h"
#include "grad_path.h"
#include "layout.h"
#include "mesh.h"
#include "objects.h"
#include "pool.h"
#include "run.h"
#include "shard_math.h"

#include <stdio.h>
#include <string.h>

static fsdpi_state fsdpi_state_new(void) {
    fsdpi_state s = FSDP_ZERO;
    s.last_order = -1;
    s.shard_grad = FSDPI_SHARD_GRAD_ZERO; // new blocks are zero
    return s;
}

static uint8_t *fsdpi_use(const fsdp_unit *u, int i) { return (uint8_t *)u->use + i; }

// Returns the bytes of one allocation: the parameters, then their marks (fsdp_unit.use).
static size_t fsdpi_params_bytes(const fsdp_unit *u) {
    return (size_t)u->desc.num_params * sizeof *u->params + 8 * (size_t)u->use_words;
}

static void fsdpi_unit_free(fsdp_unit *u) {
    fsdp_model *m = u->model;
    for (int i = 0; u->params && i < u->desc.num_params; i++)
        fsdpi_model_free(m, u->params[i].name);
    fsdpi_model_free(m, u->params);
    fsdpi_model_free(m, u->layout.parts);
    fsdpi_model_free(m, u->desc.name);
    fsdpi_model_free(m, u->layout.lists);
    fsdpi_model_free(m, u->options.prefetch[0]);
    fsdpi_model_free(m, u->options.prefetch[1]);
    fsdpi_model_free(m, u);
}

static fsdp_status fsdpi_param_check(fsdp_world *w, const char *unit, const char *name,
                                     fsdp_param_desc *d) {
    if (d->ndim == 0 && d->shape[0] != 0)
        return fsdpi_invalid_arg(
            w,
            "[E140] unit '%s', parameter '%s': ndim is 0 and shape[0] is %lld: set ndim, or leave "
            "shape zero for a scalar",
            unit, name, (long long)d->shape[0]);
    if (d->ndim == 0) d->ndim = 1, d->shape[0] = 1; // a scalar is a vector of one element
    if (d->ndim < 0 || d->ndim > FSDP_MAX_DIMS)
        return fsdpi_invalid_arg(w, "[E141] unit '%s', parameter '%s': ndim is %d, expected 0..%d",
                                 unit, name, d->ndim, FSDP_MAX_DIMS);
    if (d->shard_dim < -d->ndim || d->shard_dim >= d->ndim)
        return fsdpi_invalid_arg(
            w, "[E142] unit '%s', parameter '%s': shard_dim is %d, expected %d..%d", unit, name,
            d->shard_dim, -d->ndim, d->ndim - 1);
    if (d->shard_dim < 0) d->shard_dim += d->ndim;
    for (int i = 0; i < d->ndim; i++)
        if (d->shape[i] < 0)
            return fsdpi_invalid_arg(
                w, "[E143] unit '%s', parameter '%s': size of dim %d is %lld, expected >= 0", unit,
                name, i, (long long)d->shape[i]);
    if (d->dtype == FSDP_DTYPE_KEEP) d->dtype = FSDP_F32;
    if (!fsdp_dtype_size(d->dtype))
        return fsdpi_invalid_arg(
            w, "[E144] unit '%s', parameter '%s': dtype is %d, expected FSDP_F32, ...", unit, name,
            d->dtype);
    if (!d->frozen && !fsdp_dtype_is_float(d->dtype))
        return fsdpi_invalid_arg(w,
                                 "[E145] unit '%s', parameter '%s': dtype is %s and it requires a "
                                 "gradient: only floating parameters can: set frozen to 1",
                                 unit, name, fsdp_dtype_name(d->dtype));
    return FSDP_OK;
}

static fsdp_status fsdpi_param_extension(fsdp_unit *u, fsdpi_param *p,
                                         const fsdp_gather_extension *extension) {
    fsdp_world *w = u->model->world;
    int64_t rest = fsdpi_numel(p->lay.shape, 0, p->lay.shard_dim);
    rest = fsdpi_mul(rest, fsdpi_numel(p->lay.shape, p->lay.shard_dim + 1, p->lay.ndim));
    p->extension = *extension;
    if (!extension->sizes || !extension->pre_all_gather || !extension->post_all_gather)
        return fsdpi_invalid_arg(
            w,
            "[E917] unit '%s', parameter '%s': its extension lacks a function: give "
            "sizes, pre_all_gather and post_all_gather",
            u->desc.name, p->name);
    int64_t rows = fsdpi_ceil_div(p->lay.shape[p->lay.shard_dim], fsdpi_shards(u));
    int64_t numel = fsdpi_mul(rest, rows), sum = 0;
    p->num_strings = numel < 0 ? 0 : extension->sizes(extension->user, numel, p->string_bytes);
    int good = p->num_strings >= 1 && p->num_strings <= FSDP_GATHER_TENSORS;
    for (int i = 0; good && i < p->num_strings; i++) {
        good = p->string_bytes[i] >= 0 && p->string_bytes[i] <= FSDPI_NUMEL_MAX / fsdpi_shards(u);
        sum += good ? p->string_bytes[i] : 0;
        good = good && sum <= FSDPI_NUMEL_MAX / fsdpi_shards(u) / 8;
    }
    return good ? FSDP_OK
                : fsdpi_invalid_arg(
                      w,
                      "[E918] unit '%s', parameter '%s': its extension returned %d strings: "
                      "expected 1..%d, of sizes >= 0",
                      u->desc.name, p->name, p->num_strings, FSDP_GATHER_TENSORS);
}

/* Returns FSDP_OK if p may require a gradient: all trainables of a unit must have one stored dtype.
   Source: torch: FSDPParamGroup._init_mp_dtypes. */
static fsdp_status fsdpi_trainable_check(const fsdp_unit *u, const fsdpi_param *p) {
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *other = &u->params[i];
        if (other->requires_grad && other->dtype != p->dtype)
            return fsdpi_invalid_arg(
                u->model->world,
                "[E1000] unit '%s': trainable parameters '%s' and '%s' are stored as "
                "%s and %s, expected one dtype: put them into two units",
                u->desc.name, other->name, p->name, fsdp_dtype_name(other->dtype),
                fsdp_dtype_name(p->dtype));
    }
    return FSDP_OK;
}

// Makes the parameters of a unit from their descs. In a program that was built with an older header
// the descs are shorter: the `size` of the first one is the stride of the array.
static fsdp_status fsdpi_unit_params(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    uint32_t stride = 0;
    for (int i = 0; i < d->num_params; i++) {
        const char *at = (const char *)d->params +
                         (size_t)i * (stride ? stride : sizeof(fsdp_param_desc));
        fsdp_param_desc pd;
        char what[64], fallback[16];
        snprintf(what, sizeof what, "fsdp_unit_desc.params[%d]", i);
        FSDPI_TRY(fsdp_desc_read(m->world, &pd, at, sizeof pd, what));
        if (i == 0) stride = pd.size ? pd.size : (uint32_t)sizeof pd;
        snprintf(fallback, sizeof fallback, "p%d", i);
        const char *name = pd.name ? pd.name : fallback;
        FSDPI_TRY(fsdpi_param_check(m->world, u->desc.name, name, &pd));
        fsdpi_param *p = &u->params[i];
        p->name = fsdpi_copy_text(&m->world->boot.allocator, name);
        if (!p->name)
            return fsdpi_no_memory(m->world, "fully_shard of unit", u->desc.name, strlen(name) + 1);
        m->host_bytes += (int64_t)fsdpi_alloc_size(p->name);
        for (int k = 0; k < i; k++)
            if (strcmp(u->params[k].name, p->name) == 0)
                return fsdpi_invalid_arg(
                    m->world,
                    "[E146] unit '%s': parameters %d and %d are both named '%s': give "
                    "each a name of its own",
                    u->desc.name, k, i, p->name);
        p->user = pd.user;
        p->dtype = pd.dtype;
        if (!pd.frozen) FSDPI_TRY(fsdpi_trainable_check(u, p));
        p->requires_grad = !pd.frozen;
        p->keep_dtype = pd.keep_dtype;
        p->lay.ndim = pd.ndim;
        p->lay.shard_dim = pd.shard_dim;
        memcpy(p->lay.shape, pd.shape, sizeof p->lay.shape);
        if (pd.extension) FSDPI_TRY(fsdpi_param_extension(u, p, pd.extension));
    }
    return FSDP_OK;
}

static int fsdpi_is_whole_name(const char *whole, const char *unit, const char *name) {
    size_t n = strlen(unit);
    return strncmp(whole, unit, n) == 0 && whole[n] == '.' && strcmp(whole + n + 1, name) == 0;
}

// Returns 1 if two parameters have one whole name: unit "h.0" and name "w" is the same as the name
// "h.0.w" in a unit of any name.
static int fsdpi_same_param(const char *unit, const char *name, const char *other_unit,
                            const char *other) {
    return fsdpi_is_whole_name(other, unit, name) || fsdpi_is_whole_name(name, other_unit, other) ||
           (strcmp(unit, other_unit) == 0 && strcmp(name, other) == 0);
}

/* Fails if a unit shards a parameter that another unit replicates, or the reverse.
   Source: torch: _is_composable_with_fsdp, the registry of composable APIs. */
static fsdp_status fsdpi_unit_composes(const fsdp_unit *u) {
    fsdp_model *m = u->model;
    int replicates = u->desc.info.kind == FSDP_MESH_INFO_DDP;
    for (int k = 0; k < m->num_units; k++) {
        const fsdp_unit *other = m->units[k];
        if ((other->desc.info.kind == FSDP_MESH_INFO_DDP) == replicates) continue;
        for (int i = 0; i < u->desc.num_params; i++)
            for (int j = 0; j < other->desc.num_params; j++)
                if (fsdpi_same_param(u->desc.own_name, u->params[i].name, other->desc.own_name,
                                     other->params[j].name))
                    return fsdpi_invalid_arg(
                        m->world,
                        "[E193] unit '%s', parameter '%s': unit '%s' %s it already, "
                        "and a parameter is sharded or replicated, not both: leave "
                        "it out of one of the two units",
                        u->desc.name, u->params[i].name, other->desc.name,
                        replicates ? "shards" : "replicates");
    }
    return FSDP_OK;
}

static FSDPI_NOINLINE void fsdpi_mix(uint64_t *h, uint64_t x) {
    *h = fsdpi_hash_words(*h, &x, 1);
}

// Sets layout.hash and layout.agree from everything that ranks must agree on. Every collective of
// the unit compares them.
static void fsdpi_unit_agree(fsdp_unit *u) {
    const fsdp_model_desc *md = &u->model->desc;
    uint64_t h[FSDP_AGREE_COUNT] = {0};
    h[FSDP_AGREE_NAMES] = fsdpi_hash(fsdpi_hash_text(u->desc.name), (uint64_t)u->desc.num_params);
    h[FSDP_AGREE_DTYPES] = (uint64_t)u->desc.policy_dtype;
    h[FSDP_AGREE_REDUCE_DTYPE] = (uint64_t)u->layout.reduce_dtype;
    h[FSDP_AGREE_GRAD_DTYPE] = (uint64_t)md->grad_dtype;
    h[FSDP_AGREE_SLICES] = (uint64_t)u->desc.slices;
    h[FSDP_AGREE_DIRECT_MIN] = fsdpi_hash(1, (uint64_t)md->direct_min);
    h[FSDP_AGREE_MESH] = fsdpi_hash((uint64_t)fsdpi_shards(u), (uint64_t)fsdpi_replicas(u));
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        fsdpi_mix(&h[FSDP_AGREE_NAMES], fsdpi_hash_text(p->name));
        fsdpi_mix(&h[FSDP_AGREE_SHAPES], (uint64_t)p->lay.ndim);
        for (int d = 0; d < p->lay.ndim; d++)
            fsdpi_mix(&h[FSDP_AGREE_SHAPES], (uint64_t)p->lay.shape[d]);
        fsdpi_mix(&h[FSDP_AGREE_SHARD_DIM], (uint64_t)p->lay.shard_dim);
        fsdpi_mix(&h[FSDP_AGREE_DTYPES], (uint64_t)p->dtype << 1 | (uint64_t)(p->keep_dtype != 0));
        fsdpi_mix(&h[FSDP_AGREE_REQUIRES_GRAD], (uint64_t)p->requires_grad);
        for (int k = 0; k < p->num_strings; k++)
            fsdpi_mix(&h[FSDP_AGREE_STRINGS], (uint64_t)p->string_bytes[k]);
    }
    u->layout.hash = 0;
    for (int k = 0; k < FSDP_AGREE_COUNT; k++) {
        u->layout.hash = fsdpi_hash(u->layout.hash, h[k]);
        u->layout.agree[k] = (uint8_t)h[k];
    }
}

/* Sets u->facts, and the fields that follow from them: the gradient path, layout.gather and
   layout.grads_ahead. Called again after an option has changed. No option changes the two fields of
   the layout. */
static void fsdpi_unit_facts(fsdp_unit *u) {
    fsdpi_unit_layout *l = &u->layout;
    const fsdpi_dtype_group *part = &l->parts[l->first_train];
    const fsdp_model_desc *md = &u->model->desc;
    fsdpi_facts f = FSDP_ZERO;
    f.shards = fsdpi_shards(u);
    f.replicas = fsdpi_replicas(u);
    f.one_part = l->num_parts == 1;
    f.one_train = l->train_parts <= 1;
    f.extended = l->parts[0].extended != NULL;
    f.stored = part->dtype;
    f.gathered = part->param_dtype;
    f.grad = fsdpi_grad_dtype(u->model, part->dtype);
    f.reduce = l->reduce_dtype;
    f.offload = md->cpu_offload != 0;
    f.debug = md->debug || fsdpi_is_guarded(u->model->world);
    f.fuses = (u->model->world->caps.flags & FSDP_CAP_FUSED_REDUCE) != 0;
    f.hook = u->options.all_reduce_hook != NULL;
    f.custom_all_reduce = u->options.custom[FSDPI_CUSTOM_ALL_REDUCE] != NULL;
#define FSDP_X(type, name, initial) f.name = u->options.name;
    FSDPI_GRAD_PATH_OPTIONS(FSDP_X)
#undef FSDP_X
    if (f.divide_factor == 0) f.divide_factor = f.shards * f.replicas;
    u->facts = f;
    u->route = fsdpi_grad_path_of(&f, 0);
    l->gather = (uint8_t)fsdpi_facts_gather(&f);
    l->grads_ahead = (uint8_t)!fsdpi_facts_copy_first(&f, 0);
}

/* Sorts the parameters into dtype groups, counts the trainables, and computes the sizes of the
   layout and the slot classes. Called again after fsdp_set_requires_grad and fsdp_model_cast. */
static FSDP_COLD fsdp_status fsdpi_unit_parts(fsdp_unit *u) {
    fsdp_model *m = u->model;
    u->layout.num_parts = u->layout.num_train = u->layout.train_parts = u->layout.first_train = 0;
    u->layout.reduce_dtype = u->desc.policy_reduce ? u->desc.policy_reduce : FSDP_F32;
    for (int i = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        int casts = u->desc.policy_dtype && fsdp_dtype_is_float(p->dtype) && !p->keep_dtype, k = 0;
        fsdpi_dtype_group new_part = FSDP_ZERO, *part;
        new_part.dtype = p->dtype;
        new_part.param_dtype = casts ? u->desc.policy_dtype : p->dtype;
        new_part.extended = p->extension.sizes ? p : NULL;
        while (k < u->layout.num_parts && (u->layout.parts[k].dtype != new_part.dtype ||
                                           u->layout.parts[k].param_dtype != new_part.param_dtype ||
                                           u->layout.parts[k].extended || new_part.extended))
            k++;
        part = &u->layout.parts[k];
        if (k == u->layout.num_parts) u->layout.parts[u->layout.num_parts++] = new_part;
        p->part = k;
        if (!p->requires_grad) continue;
        u->layout.num_train++;
        if (part->num_train++ == 0 && u->layout.train_parts++ == 0) u->layout.first_train = k;
        if (!u->desc.policy_reduce) u->layout.reduce_dtype = fsdpi_grad_dtype(m, p->dtype);
    }
    int bytes = u->layout.num_parts > 1 || u->layout.parts[0].extended;
    u->layout.gather_dtype = bytes ? FSDP_U8 : u->layout.parts[0].param_dtype;
    fsdpi_unit_agree(u);
    const size_t room = (size_t)u->desc.num_params * sizeof(fsdp_layout_param);
    fsdp_layout_param *tmp = (fsdp_layout_param *)fsdpi_model_alloc(m, room);
    if (!tmp) return fsdpi_no_memory(m->world, "layout of unit", u->desc.name, room);
    fsdp_status status = fsdpi_layout_compute(u, tmp);
    fsdpi_model_free(m, tmp);
    if (status)
        return fsdp_fail(m->world, status, "[E147] unit '%s' has more than 2^56 elements: split it",
                         u->desc.name);
    fsdpi_unit_facts(u);
    return fsdpi_unit_classes(u);
}

// Calls fsdpi_unit_parts. On failure num_parts is 0, so that commit arranges the unit again.
static fsdp_status fsdpi_unit_arrange(fsdp_unit *u) {
    fsdp_status status = fsdpi_unit_parts(u);
    if (status) u->layout.num_parts = 0;
    return status;
}

static fsdp_status fsdpi_dtypes_check(fsdp_world *w, const char *what, const char *name,
                                      fsdp_dtype param, fsdp_dtype reduce, fsdp_dtype output) {
    if ((!param || fsdp_dtype_is_float(param)) && (!reduce || fsdp_dtype_is_float(reduce)) &&
        (!output || fsdp_dtype_is_float(output)))
        return FSDP_OK;
    return fsdpi_invalid_arg(
        w,
        "[E148] %s%s%s%s: param_dtype is %d, reduce_dtype is %d, output_dtype is %d: "
        "expected floating dtypes or KEEP",
        what, *name ? " '" : "", name, *name ? "'" : "", param, reduce, output);
}

// Sets *out from a desc's mesh info or its mesh; if it has neither, copies `otherwise`.
static fsdp_status fsdpi_resolve_mesh(fsdp_world *w, const fsdp_mesh *mesh,
                                      const fsdp_mesh_info *info, const fsdp_mesh_info *otherwise,
                                      fsdp_mesh_info *out) {
    int kind = FSDP_MESH_INFO_FSDP, shard = 0, replicate = -1;
    if (!mesh && !info) {
        *out = *otherwise;
        return FSDP_OK;
    }
    if (info) {
        mesh = info->mesh;
        kind = info->kind;
        shard = info->shard_mesh_dim;
        replicate = info->replicate_mesh_dim;
    }
    if (!mesh || mesh->world != w)
        return fsdpi_invalid_arg(
            w, "[E123] the desc's mesh is of another world, or its mesh_info has no "
               "mesh: make it in this world");
    if (!info && mesh->ndim > 2)
        return fsdpi_invalid_arg(
            w,
            "[E124] the desc's mesh is %d-D, expected 1-D (FSDP) or 2-D (HSDP): slice "
            "it, or give a mesh_info with the dims that shard and replicate",
            mesh->ndim);
    if (!info && mesh->ndim == 2) {
        if (!mesh->names[0] || !mesh->names[1])
            return fsdpi_invalid_arg(
                w, "[E125] the desc's mesh is 2-D and its dims have no names: name "
                   "them (dim 0 replicates, dim 1 shards), or give mesh_info");
        kind = FSDP_MESH_INFO_HSDP;
        replicate = 0;
        shard = 1;
    }
    return fsdp_mesh_info_init(mesh, kind, shard, replicate, out);
}

// Sets the communicators of a unit, and resolves reshard_after_forward.
static fsdp_status fsdpi_unit_groups(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    const fsdp_mesh_info *info = &u->desc.info;
    int n = d->reshard_after_forward ? d->reshard_after_forward : m->desc.reshard_after_forward;
    if (n < FSDP_RESHARD_NEVER || (n > 1 && fsdpi_shards(u) % n != 0))
        return fsdpi_invalid_arg(m->world,
                                 "[E149] unit '%s': reshard_after_forward is %d, expected "
                                 "FSDP_RESHARD_DEFAULT, _ALWAYS, _NEVER or a divisor of %d shards",
                                 u->desc.name, n, fsdpi_shards(u));
    if (n > 1 && n == fsdpi_shards(u)) n = FSDP_RESHARD_ALWAYS;
    u->options.reshard_after_forward = n;
    u->desc.slices = n > 1 ? n : 0;
    return n > 1 ? fsdpi_mesh_subgroup(info->mesh, info->shard_mesh_dim, n, FSDP_STREAM_GATHER,
                                       "post_forward", &u->desc.slice_comm)
                 : FSDP_OK;
}

// Returns a unit's name as texts print it.
static const char *fsdpi_shown_name(const char *name) { return *name ? name : "(root)"; }

static fsdp_status fsdpi_unit_fill(fsdp_unit *u, const fsdp_unit_desc *d) {
    fsdp_model *m = u->model;
    const fsdp_model_desc *md = &m->desc;
    size_t count = (size_t)d->num_params;
    char fallback[24];
    snprintf(fallback, sizeof fallback, "unit%d", m->num_units);
    const char *name = d->name ? d->name : fallback;
    u->desc.name = fsdpi_copy_text(&m->world->boot.allocator, fsdpi_shown_name(name));
    u->desc.own_name = *name ? u->desc.name : "";
    if (u->desc.name) m->host_bytes += (int64_t)fsdpi_alloc_size(u->desc.name);
    u->desc.num_params = d->num_params;
    u->use_words = (u->desc.num_params + 7) >> 3;
    u->params = (fsdpi_param *)fsdpi_model_alloc(m, fsdpi_params_bytes(u));
    u->layout.parts = (fsdpi_dtype_group *)fsdpi_model_alloc(m, count * sizeof *u->layout.parts);
    if (!u->desc.name || !u->params || !u->layout.parts)
        return fsdpi_no_memory(m->world, "fully_shard of unit", fsdpi_shown_name(name),
                               count * (sizeof *u->params + sizeof *u->layout.parts));
    FSDPI_TRY(fsdpi_dtypes_check(m->world, "fully_shard of unit", u->desc.name, d->param_dtype,
                                 d->reduce_dtype, d->output_dtype));
    FSDPI_TRY(fsdpi_resolve_mesh(m->world, d->mesh, d->mesh_info, &m->info, &u->desc.info));
    u->desc.policy_dtype = d->param_dtype ? d->param_dtype : md->param_dtype;
    u->desc.policy_reduce = d->reduce_dtype ? d->reduce_dtype : md->reduce_dtype;
    u->desc.output_dtype = d->output_dtype ? d->output_dtype : md->output_dtype;
    u->desc.keep_inputs = d->keep_forward_inputs || md->keep_forward_inputs;
    u->use = (uint64_t *)(void *)(u->params + count);
    FSDPI_TRY(fsdpi_unit_params(u, d));
    FSDPI_TRY(fsdpi_unit_composes(u));
    FSDPI_TRY(fsdpi_unit_groups(u, d));
    return fsdpi_unit_arrange(u);
}

FSDP_API FSDP_COLD fsdp_status fsdp_fully_shard(fsdp_model *model, const fsdp_unit_desc *desc,
                                                fsdp_unit **unit) {
    fsdp_unit_desc d;
    if (!model || !desc || !unit) return fsdpi_null_of(model, "fully_shard", "model, desc or unit");
    *unit = NULL;
    fsdp_world *w = model->world;
    FSDPI_TRY(fsdpi_failed(w));
    FSDPI_TRY(fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_unit_desc"));
    if (model->num_commits > 0)
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E207] fully_shard: the model is committed: add units before the first "
                         "hook or init");
    if (d.num_params < 1 || !d.params)
        return fsdpi_invalid_arg(
            w, "[E150] unit '%s': num_params is %d, params is %s, expected >= 1 and an array",
            d.name ? fsdpi_shown_name(d.name) : "", d.num_params, d.params ? "given" : "NULL");
    fsdp_unit *u = (fsdp_unit *)fsdpi_model_alloc(model, sizeof *u);
    const char *name = d.name ? fsdpi_shown_name(d.name) : "";
    if (!u) return fsdpi_no_memory(w, "fully_shard of unit", name, sizeof *u);
    fsdp_status status = fsdpi_grow(model, (void **)&model->units, model->num_units,
                                    &model->cap_units, sizeof *model->units, "fully_shard of unit",
                                    name);
    if (status) {
        fsdpi_model_free(model, u);
        return status;
    }
    u->model = model;
    u->desc.user = d.user;
    u->desc.index = model->num_units;
#define FSDP_X(type, name, initial) u->options.name = initial;
    FSDPI_OPTIONS(FSDP_X)
#undef FSDP_X
    u->state = fsdpi_state_new();
    status = fsdpi_unit_fill(u, &d);
    if (status) {
        fsdpi_unit_free(u);
        return status;
    }
    model->settings = 0;
    for (int i = 0; i < u->desc.num_params; i++) u->params[i].ordinal = model->num_params + i;
    model->num_params += u->desc.num_params;
    model->mixed |= u->desc.info.shard_comm != model->info.shard_comm ||
                    u->desc.info.replicate_comm != model->info.replicate_comm ||
                    u->desc.info.shard_mesh_size != model->info.shard_mesh_size;
    if (u->desc.info.mesh != model->info.mesh &&
        !fsdpi_mesh_contains(model->info.mesh, u->desc.info.mesh))
        model->outside = u;
    model->units[model->num_units++] = u;
    *unit = u;
    return FSDP_OK;
}

FSDP_API const char *fsdp_unit_name(const fsdp_unit *unit) {
    return unit ? unit->desc.own_name : "";
}
FSDP_API const char *fsdp_unit_label(const fsdp_unit *unit) { return unit ? unit->desc.name : ""; }

FSDP_API fsdp_status fsdp_unit_mesh_info(const fsdp_unit *unit, fsdp_mesh_info *out) {
    if (!unit || !out)
        return fsdpi_null_of(unit ? unit->model : NULL, "unit_mesh_info", "unit or out");
    *out = unit->desc.info;
    return FSDP_OK;
}

FSDP_API fsdp_training_state fsdp_unit_state(const fsdp_unit *unit) {
    return unit ? (fsdp_training_state)unit->state.training : FSDP_STATE_COUNT;
}
FSDP_API fsdp_storage_state fsdp_unit_storage(const fsdp_unit *unit) {
    return unit ? (fsdp_storage_state)unit->state.storage : FSDP_STORAGE_COUNT;
}

#endif // FSDPI_CORE_UNIT_H
