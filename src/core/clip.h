/* core/clip.h - the norm of all gradients, and clipping

   State: fsdp_model.scalar, norm_type and norm_blocks.
   Callers: programs.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_CLIP_H
#define FSDPI_CORE_CLIP_H

#include "../base/float.h"
#include "../base/hash.h"
#include "error.h"
#include "host.h"
#include "layout.h"
#include "mesh.h"
#include "objects.h"
#include "ops.h"
#include "run.h"
#include "step.h"
#include "unit.h"

#include <string.h>

// Writes the blocks of all reduced gradients of parameters stored in `dtype` to `out`, and returns
// their number. For a norm that is summed over all ranks of the mesh, only the first replica has
// blocks: otherwise its gradients would count once per replica.
static int fsdpi_grad_blocks(fsdp_model *m, fsdp_dtype dtype, int norm, fsdp_block *out) {
    int num = 0;
    for (int i = 0; i < m->num_units; i++) {
        const fsdp_unit *u = m->units[i];
        int silent = u->state.shard_grad != FSDPI_SHARD_GRAD_REDUCED ||
                     (norm && m->mixed && u->desc.info.replicate_mesh_rank > 0);
        for (int k = 0; k < u->desc.num_params && !silent; k++) {
            const fsdpi_param *p = &u->params[k];
            int64_t at = p->lay.shard_offset;
            if ((*fsdpi_use(u, k) & FSDPI_USE_REDUCED) && p->dtype == dtype)
                out[num++] = fsdpi_row_block(at, at, p->lay.local_numel);
        }
    }
    return num;
}

// Reduces m->scalar over one group: the sum, or for an infinite norm type the maximum.
static fsdp_status fsdpi_norm_reduce(fsdp_model *m, uint64_t given, fsdp_comm *comm, int size) {
    fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_ALL_REDUCE, FSDP_LABEL_CLIP, FSDP_STREAM_REDUCE);
    fsdpi_op_list one = {NULL, NULL, 0, 1};
    int is_max = !fsdpi_is_finite(m->norm_type);
    fsdp_dtype dtype = is_max ? FSDP_I64 : FSDP_F64; // magnitudes are in the order of their bits
    if (size == 1) return FSDP_OK;
    op.redop = is_max ? FSDP_MAX : FSDP_SUM;
    op.in_place = 1, op.given = given;
    op.comm = comm;
    op.group_size = size;
    return fsdpi_emit_work(m, &op, m->scalar, dtype, m->scalar, dtype, &one);
}

// Sets m->scalar to the sum of |g|^p of all gradients, or to the maximum. The host does not wait.
static fsdp_status fsdpi_norm(fsdp_model *m, uint64_t given) {
    const fsdp_mesh *mesh = m->info.mesh;
    int num = 0, accumulate = 0;
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        if (!m->flats[d].grad) continue;
        fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_NORM, FSDP_LABEL_CLIP, FSDP_STREAM_COMPUTE);
        op.dtype = (uint8_t)fsdpi_grad_dtype(m, d);
        op.out_dtype = FSDP_F64;
        op.norm_type = m->norm_type;
        op.accumulate = (uint8_t)accumulate;
        op.list = m->norm_blocks + num;
        op.list_count = (uint32_t)fsdpi_grad_blocks(m, d, 1, m->norm_blocks + num);
        for (uint32_t i = 0; i < op.list_count; i++)
            op.count += (uint64_t)m->norm_blocks[num++].width;
        op.src = m->flats[d].grad;
        op.dst = m->scalar;
        op.src_ptr = op.src->ptr;
        op.dst_ptr = op.dst->ptr;
        FSDPI_TRY(fsdpi_emit(m, &op));
        accumulate = 1;
    }
    if (!accumulate) // no trainable parameter at all
        FSDPI_TRY(fsdpi_emit_fill(m, NULL, FSDP_LABEL_CLIP, FSDP_STREAM_COMPUTE, m->scalar,
                                  FSDP_F64, 0, 1, 0));
    if (!m->mixed)
        FSDPI_TRY(fsdpi_norm_reduce(m, given, fsdpi_reduce_comm(mesh, m->info.shard_mesh_dim),
                                    m->info.shard_mesh_size));
    else if (fsdpi_mesh_numel(mesh) == m->world->size)
        FSDPI_TRY(fsdpi_norm_reduce(m, given, m->world->reduce_comm, m->world->size));
    else
        for (int d = 0; d < mesh->ndim; d++)
            FSDPI_TRY(fsdpi_norm_reduce(m, given, mesh->reduce_comm[d], mesh->shape[d]));
    return fsdpi_emit_use(m, NULL, FSDP_LABEL_CLIP, m->scalar);
}

// Emits the ops that scale all gradients by a factor that the device computes from m->scalar. If
// the norm is NaN, gradients become NaN, as in PyTorch; the padding between them stays 0.
static fsdp_status fsdpi_clip(fsdp_model *m, double max_norm) {
    fsdp_block *blocks = m->norm_blocks + m->num_params; // a plan keeps norm and clip of a step
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        if (!m->flats[d].grad) continue;
        fsdpi_op_list work = {blocks, NULL, fsdpi_grad_blocks(m, d, 0, blocks), 0};
        fsdpi_count(&work);
        blocks += work.num;
        fsdp_op op = fsdpi_op(m, NULL, FSDP_OP_COPY, FSDP_LABEL_CLIP, FSDP_STREAM_COMPUTE);
        fsdp_dtype dtype = fsdpi_grad_dtype(m, d);
        op.scale = max_norm;
        op.norm_type = m->norm_type;
        op.clip = (const double *)(const void *)m->scalar->ptr;
        FSDPI_TRY(fsdpi_emit_work(m, &op, m->flats[d].grad, dtype, m->flats[d].grad, dtype, &work));
    }
    return m->desc.cpu_offload ? fsdpi_sync(m->world, FSDP_STREAM_COMPUTE) : FSDP_OK;
}

FSDP_API fsdp_status fsdp_clip_grads(fsdp_model *model, const fsdp_clip_desc *desc, double *norm) {
    fsdp_clip_desc d;
    double total = 0;
    fsdp_world *w = model ? model->world : NULL;
    if (w) FSDPI_TRY(fsdpi_failed(w));
    if (!w || !desc) return fsdp_fail_null(w, "clip_grads", "model or desc");
    FSDPI_TRY(fsdp_desc_read(w, &d, desc, sizeof d, "fsdp_clip_desc"));
    if (!fsdpi_is_nan(d.norm_type) && d.norm_type == 0) d.norm_type = 2;
    if (!(d.max_norm > 0) || fsdpi_is_nan(d.max_norm) || !(d.norm_type > 0) ||
        fsdpi_is_nan(d.norm_type))
        return fsdpi_invalid_arg(
            w, "[E160] clip_grads: max_norm is %g, norm_type is %g: expected both > 0", d.max_norm,
            d.norm_type);
    const int numel = fsdpi_mesh_numel(model->info.mesh);
    const int root_numel = model->info.mesh->root_numel;
    if (numel < root_numel)
        return fsdp_fail(
            w, FSDP_ERR_UNSUPPORTED,
            "[E210] clip_grads: the model's mesh is a slice (%d of %d ranks), and the library does "
            "not know what the others hold: give fsdp_model_desc.mesh_info on the whole mesh",
            numel, root_numel);
    if (model->outside)
        return fsdp_fail(w, FSDP_ERR_UNSUPPORTED,
                         "[E211] clip_grads: the model's mesh lacks ranks of unit '%s': give "
                         "fsdp_model_desc a mesh of all ranks that share units",
                         model->outside->desc.name);
    FSDPI_TRY(fsdpi_model_call(model, FSDP_CALL_CLIP, 0));
    // The norm's collective compares the settings across its ranks; other replicas compare them in
    // their next collective.
    const double settings[3] = {d.max_norm, d.norm_type, (double)d.error_if_nonfinite};
    uint64_t bits[3];
    memcpy(bits, settings, sizeof bits);
    const uint64_t given = fsdpi_hash_words(1, bits, 3);
    model->agreed_hash = fsdpi_hash(model->agreed_hash, given);
    model->norm_type = d.norm_type;
    fsdp_status status = fsdpi_norm(model, given);
    if (status) model->norm_type = 0;
    if (!status && d.error_if_nonfinite) status = fsdp_grad_norm(model, &total);
    int is_bad = !status && !fsdpi_is_finite(total);
    if (!status && !is_bad && fsdpi_is_finite(d.max_norm)) status = fsdpi_clip(model, d.max_norm);
    if (!status && norm) status = fsdp_grad_norm(model, norm);
    if (status || !is_bad) return status;
    return fsdp_fail(w, FSDP_ERR_CORRUPT,
                     "[E212] clip_grads: the norm is %g, so nothing is scaled: look for infinite "
                     "gradients, or set error_if_nonfinite to 0",
                     total);
}

FSDP_API fsdp_status fsdp_grad_norm(fsdp_model *model, double *norm) {
    double total = 0;
    fsdp_world *w = model ? model->world : NULL;
    if (w) FSDPI_TRY(fsdpi_failed(w));
    if (!w || !norm) return fsdp_fail_null(w, "grad_norm", "model or norm");
    if (!(model->norm_type > 0))
        return fsdp_fail(w, FSDP_ERR_INVALID_STATE,
                         "[E202] grad_norm: there is no norm yet: call fsdp_clip_grads first");
    FSDPI_TRY(fsdpi_transfer(w, &total, model->scalar->ptr, sizeof total));
    *norm = fsdpi_root(total, model->norm_type);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_clip_grad_norm(fsdp_model *model, double max_norm, double *norm) {
    fsdp_clip_desc d = FSDP_ZERO;
    d.max_norm = max_norm;
    return fsdp_clip_grads(model, &d, norm);
}

#endif // FSDPI_CORE_CLIP_H
