/* core/commit.h - commit: lays out units, allocates flat blocks and moves the data of old ones

   State: fsdp_model.flats, laid_out, committed and num_commits; the lists and templates of units.
   Callers: every call of a step (fsdpi_commit); fsdp_set_requires_grad and fsdp_model_cast
   (fsdpi_request_commit); model.h and predict.h (fsdpi_model_free_buffers).

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_COMMIT_H
#define FSDPI_CORE_COMMIT_H

#include "alloc.h"
#include "error.h"
#include "gather.h"
#include "layout.h"
#include "objects.h"
#include "ops.h"
#include "pool.h"
#include "run.h"
#include "shard_math.h"
#include "template.h"
#include "unit.h"
#include "ext_dispatch.h"

#include <stdlib.h>
#include <string.h>

// Assigns each unit its place in the flat blocks: trainables of all units, then frozen parameters.
// A block has at least one element, so that empty parameters have an address.
static void fsdpi_place_units(fsdp_model *m) {
    for (int d = 0; d < FSDP_DTYPE_COUNT; d++)
        m->flats[d].train_numel = m->flats[d].numel = m->flats[d].grad_numel = 0;
    for (int trainable = 1; trainable >= 0; trainable--) {
        for (int i = 0; i < m->num_units; i++) {
            fsdp_unit *u = m->units[i];
            for (int k = 0; k < u->layout.num_parts; k++) {
                fsdpi_flat_block *flat = fsdpi_flat_of(u, &u->layout.parts[k]);
                fsdpi_param_list *list = trainable ? &u->layout.parts[k].train
                                                   : &u->layout.parts[k].frozen;
                list->base = flat->numel;
                int64_t align = fsdpi_align_numel(m, u->layout.parts[k].dtype);
                flat->numel += fsdpi_align_up(list->shard_numel, align);
                if (trainable) flat->train_numel = flat->grad_numel = flat->numel;
            }
        }
    }
    for (int i = 0; i < m->num_units; i++) {
        for (int k = 0; k < m->units[i]->layout.num_parts; k++) {
            const fsdpi_dtype_group *part = &m->units[i]->layout.parts[k];
            fsdpi_flat_block *flat = fsdpi_flat_of(m->units[i], part);
            if (flat->numel == 0) flat->numel = 1;
            if (part->num_train && flat->grad_numel == 0) flat->grad_numel = 1;
        }
    }
}

// Places all lists of a unit, then its templates, in the memory at `at`, unless `at` is NULL: first
// lists of segments, then lists of blocks, by dtype group. Returns the bytes that they need.
enum { FSDPI_SEG_WORKS = 6, FSDPI_PART_WORKS = 7 };
static size_t fsdpi_place_lists(fsdp_unit *u, char *at) {
    size_t params = (size_t)u->desc.num_params, segs = params + 2 * (size_t)u->layout.num_parts,
           bytes = 0;
    fsdpi_op_list *with_segs[FSDPI_SEG_WORKS] = {
        &u->layout.all_gather,        &u->layout.slice_gather, &u->layout.reduce_scatter[0],
        &u->layout.reduce_scatter[1], &u->layout.to_out[0],    &u->layout.to_out[1]};
    for (int i = 0; i < u->desc.num_params; i++) segs += (size_t)u->params[i].num_strings;
    for (int i = 0; i < FSDPI_SEG_WORKS; i++, bytes += segs * sizeof(fsdp_seg))
        if (at) with_segs[i]->segs = (fsdp_seg *)(void *)(at + bytes);
    fsdpi_op_list *whole[2] = {&u->layout.slice_copy, &u->layout.whole_out};
    for (int i = 0; i < 2; i++, bytes += (params + 1) * sizeof(fsdp_block))
        if (at) whole[i]->blocks = (fsdp_block *)(void *)(at + bytes);
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_dtype_group *part = &u->layout.parts[k];
        size_t out = (size_t)part->copy_out.num, cat = (size_t)part->chunk_cat.num;
        size_t rooms[FSDPI_PART_WORKS] = {segs, out, cat, cat + params, cat + params, 1, 1};
        fsdpi_op_list *works[FSDPI_PART_WORKS] = {&part->copy_in, &part->copy_out, &part->chunk_cat,
                                                  &part->divide,  &part->to_in,    &part->to_shard,
                                                  &part->rescale};
        for (int i = 0; i < FSDPI_PART_WORKS; bytes += rooms[i++] * sizeof(fsdp_block))
            if (at) works[i]->blocks = (fsdp_block *)(void *)(at + bytes);
    }
    if (at) u->layout.templates[0] = (fsdpi_template *)(void *)(at + bytes);
    return bytes + (size_t)fsdpi_templates_max(u) * sizeof(fsdpi_template);
}

static fsdp_status fsdpi_unit_build(fsdp_unit *u, fsdp_layout_param *tmp) {
    fsdp_model *m = u->model;
    char *at = (char *)fsdpi_model_alloc(m, fsdpi_place_lists(u, NULL));
    if (!at)
        return fsdpi_no_memory(m->world, "commit: lists of unit", u->desc.name,
                               fsdpi_place_lists(u, NULL));
    u->layout.lists = at;
    (void)fsdpi_place_lists(u, at);
    (void)fsdpi_layout_compute(u, tmp);
    fsdp_seg *gather = u->layout.all_gather.segs;
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_dtype_group *part = &u->layout.parts[k];
        int bytes = u->layout.gather_dtype == FSDP_U8 && !part->extended; // convert to bytes
        fsdpi_dtype_group_lists(u, part, gather);
        for (int i = 0; i < part->num_gather; i++, gather++) {
            gather->full *= bytes ? fsdpi_bytes(1, part->param_dtype) : 1;
            gather->count *= bytes ? fsdpi_bytes(1, part->param_dtype) : 1;
        }
    }
    // Ranks may differ in where the unit's shards begin: tensor parallelism may cut others unevenly
    fsdp_seg *first = u->layout.all_gather.segs;
    u->layout.gather_begin = first < gather ? first->shard : 0;
    for (fsdp_seg *s = first; s < gather; s++)
        if (s->shard < u->layout.gather_begin) u->layout.gather_begin = s->shard;
    for (fsdp_seg *s = first; s < gather; s++) s->shard -= u->layout.gather_begin;
    fsdpi_reduce_lists(u);
    for (int k = 0; k < u->layout.num_parts; k++) fsdpi_sum_list(u, &u->layout.parts[k]);
    fsdpi_slice_lists(u);
    fsdpi_count(&u->layout.all_gather);
    return FSDP_OK;
}

// Undoes fsdpi_unit_build: the sizes stay, and the lists are empty. The caller has freed the lists.
static void fsdpi_unit_unbuild(fsdp_unit *u) {
    static const fsdpi_op_list none = {NULL, NULL, 0, 0};
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_dtype_group *part = &u->layout.parts[k];
        part->copy_in = part->divide = part->to_in = part->to_shard = part->rescale = none;
        part->copy_out.blocks = part->chunk_cat.blocks = NULL;
        part->copy_out.count = part->chunk_cat.count = 0;
    }
    u->layout.all_gather = u->layout.slice_gather = none;
    for (int k = 0; k < 2; k++) u->layout.reduce_scatter[k] = u->layout.to_out[k] = none;
    u->layout.slice_copy = u->layout.whole_out = none;
    u->layout.whole_grad = u->layout.padded_in = none;
    u->layout.lists = NULL;
    memset(u->layout.templates, 0, sizeof u->layout.templates);
    u->layout.pad_in = 0;
}

// Allocates the flat blocks of a pool: SHARD or SHARD_GRAD.
static fsdp_status fsdpi_blocks_new(fsdp_model *m, int pool) {
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_flat_block *flat = &m->flats[d];
        const int grads = pool == FSDP_POOL_SHARD_GRAD;
        const int64_t bytes = grads ? fsdpi_bytes(flat->grad_numel, fsdpi_grad_dtype(m, d))
                                    : fsdpi_bytes(flat->numel, d);
        if (bytes)
            FSDPI_TRY(fsdpi_buf_new(m, pool, (size_t)bytes, grads ? &flat->grad : &flat->shard));
    }
    return FSDP_OK;
}

static void fsdpi_blocks_free(fsdp_model *m) {
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_buf_free(m, m->flats[d].shard);
        fsdpi_buf_free(m, m->flats[d].grad);
        m->flats[d].shard = m->flats[d].grad = NULL;
    }
    fsdpi_buf_free(m, m->scalar);
    fsdpi_buf_free(m, m->full_scratch);
    fsdpi_model_free(m, m->full_copy);
    m->scalar = m->full_scratch = NULL;
    m->norm_type = 0;
    m->full_copy = NULL;
}

static fsdp_status fsdpi_commit_tables(fsdp_model *m) {
    int most = 1;
    for (int i = 0; i < m->num_units; i++)
        if (m->units[i]->desc.num_params > most) most = m->units[i]->desc.num_params;
    fsdp_layout_param *tmp = (fsdp_layout_param *)fsdpi_model_alloc(m, (size_t)most * sizeof *tmp);
    if (!tmp) return fsdpi_no_memory(m->world, "commit", "", (size_t)most * sizeof *tmp);
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units && !status; i++) status = fsdpi_unit_build(m->units[i], tmp);
    fsdpi_model_free(m, tmp);
    const size_t bytes = 2 * (size_t)m->num_params * sizeof *m->norm_blocks;
    m->norm_blocks = (fsdp_block *)fsdpi_model_alloc(m, bytes);
    if (!status && !m->norm_blocks) status = fsdpi_no_memory(m->world, "commit", "", bytes);
    return status;
}

static void fsdpi_uncommit(fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++) {
        fsdpi_model_free(m, m->units[i]->layout.lists);
        fsdpi_unit_unbuild(m->units[i]);
    }
    fsdpi_model_free(m, m->norm_blocks);
    m->norm_blocks = NULL;
    fsdpi_blocks_free(m);
}

static void fsdpi_old_free(fsdp_model *m) {
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        fsdpi_buf_free(m, m->flats[d].old_shard);
        fsdpi_buf_free(m, m->flats[d].old_grad);
        m->flats[d].old_shard = m->flats[d].old_grad = NULL;
    }
}

static fsdp_status fsdpi_move_one(fsdp_unit *u, const fsdpi_param *p, fsdp_buf *from,
                                  fsdp_dtype from_dtype, fsdp_buf *to, fsdp_dtype to_dtype) {
    fsdp_block *block = &u->model->norm_blocks[p->ordinal];
    // On one rank the padding depends on the dtype.
    int64_t numel = fsdpi_shards(u) == 1 ? p->lay.numel : p->lay.shard_numel;
    fsdpi_op_list work = {block, NULL, 1, (uint64_t)numel};
    fsdp_op op = fsdpi_op(u->model, u, FSDP_OP_COPY, FSDP_LABEL_MOVE, FSDP_STREAM_COMPUTE);
    *block = fsdpi_row_block(p->old_offset, p->lay.shard_offset, numel);
    return fsdpi_emit_work(u->model, &op, from, from_dtype, to, to_dtype, &work);
}

// Frees the shards of a unit that were loaded before the first layout.
static void fsdpi_early_free(fsdp_unit *u) {
    for (int i = 0; u->params && i < u->desc.num_params; i++) {
        fsdpi_buf_free(u->model, u->params[i].early);
        u->params[i].early = NULL;
    }
}

// Makes the shards those of the previous layout: the next fsdpi_move copies from them.
static void fsdpi_shards_retire(fsdp_model *m) {
    for (int i = 0; i < m->num_units; i++)
        for (int k = 0; k < m->units[i]->desc.num_params; k++) {
            fsdpi_param *p = &m->units[i]->params[k];
            p->old_offset = p->lay.shard_offset;
            p->old_dtype = p->dtype;
        }
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        m->flats[d].old_shard = m->flats[d].shard;
        m->flats[d].shard = NULL;
    }
}

// Copies shards and reduced gradients from the blocks of the previous layout, if there is one, and
// frees these blocks. A shard that was loaded before the first layout has its own buffer, which is
// freed when its unit has moved.
static fsdp_status fsdpi_move(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < m->num_units; i++) {
        fsdp_unit *u = m->units[i];
        int early = 0;
        if (u->state.shard_grad == FSDPI_SHARD_GRAD_NONE)
            u->state.shard_grad = FSDPI_SHARD_GRAD_ZERO; // new blocks are zero
        for (int k = 0; k < u->desc.num_params && !status; k++) {
            fsdpi_param *p = &u->params[k];
            const fsdpi_flat_block *flat = &m->flats[p->dtype], *old = &m->flats[p->old_dtype];
            fsdp_buf *from = p->early ? p->early : old->old_shard;
            if (!from) continue;
            early |= p->early != NULL;
            status = fsdpi_move_one(u, p, from, p->old_dtype, flat->shard, p->dtype);
            if (!status && (*fsdpi_use(u, k) & FSDPI_USE_REDUCED))
                status = fsdpi_move_one(u, p, old->old_grad, fsdpi_grad_dtype(m, p->old_dtype),
                                        flat->grad, fsdpi_grad_dtype(m, p->dtype));
        }
        if (status || !early) continue;
        status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
        if (!status) fsdpi_early_free(u);
    }
    if (!status) status = fsdpi_sync(m->world, FSDP_STREAM_COMPUTE);
    fsdpi_old_free(m);
    return status;
}

static fsdp_commit_hook *fsdpi_commit_hooks;

FSDP_API void fsdp_on_commit(fsdp_commit_hook *hook) {
    if (!hook || !hook->fn) return;
    hook->next = fsdpi_commit_hooks;
    fsdpi_commit_hooks = hook;
}

static FSDP_COLD fsdp_status fsdpi_lay_out(fsdp_model *m) {
    fsdp_status status = FSDP_OK;
    if (m->num_units == 0)
        return fsdp_fail(m->world, FSDP_ERR_INVALID_STATE,
                         "[E201] commit: the model has no units: call fsdp_fully_shard first");
    for (int i = 0; i < m->num_units && !status; i++)
        if (!m->units[i]->layout.num_parts) status = fsdpi_unit_arrange(m->units[i]);
    if (status) return fsdpi_fail_together(m->world, status);
    fsdpi_place_units(m);
    for (int i = 0; i < m->num_classes; i++) m->classes[i].units = m->classes[i].ahead = 0;
    for (int i = 0; i < m->num_units && !status; i++) status = fsdpi_unit_classes(m->units[i]);
    if (!status) status = fsdpi_commit_tables(m);
    if (!status) status = fsdpi_blocks_new(m, FSDP_POOL_SHARD);
    if (!status) status = fsdpi_buf_new(m, FSDP_POOL_SCRATCH, sizeof(double), &m->scalar);
    // The first layout's gradients get memory after early loads have released theirs. Later layouts
    // move gradients, too.
    const int is_first = !m->num_commits;
    if (!status && !is_first) status = fsdpi_blocks_new(m, FSDP_POOL_SHARD_GRAD);
    if (!status) status = fsdpi_move(m);
    if (!status && is_first) {
        status = fsdpi_blocks_new(m, FSDP_POOL_SHARD_GRAD);
        if (status) fsdpi_shards_retire(m); // the values are in the new blocks
    }
    for (int i = 0; i < m->num_units && !status; i++) fsdpi_templates_make(m->units[i]);
    if (status) {
        fsdpi_uncommit(m);
        return fsdpi_fail_together(m->world, status);
    }
    m->laid_out = m->committed = 1;
    m->num_commits++;
    for (const fsdpi_attached *a = m->attached; a; a = a->next)
        if (a->e.relayout) a->e.relayout(a->e.user, m);
    const int listed = m->world->models != NULL; // the world of a prediction lists none
    for (fsdp_commit_hook *h = is_first && listed ? fsdpi_commit_hooks : NULL; h; h = h->next)
        h->fn(m);
    return FSDP_OK;
}

// Lays out the model if needed, and notifies extensions. If one of them fails, the next call
// notifies them again.
static fsdp_status fsdpi_commit(fsdp_model *m) {
    FSDPI_TRY(fsdpi_failed(m->world));
    if (m->committed) return FSDP_OK;
    if (!m->laid_out) FSDPI_TRY(fsdpi_lay_out(m));
    m->committed = 1; // extensions may read parameters
    fsdp_status status = fsdpi_tell_values(m, FSDP_VALUES_MOVED, -1);
    m->committed = !status;
    return fsdpi_fail_together(m->world, status);
}

/* Discards the layout, because a parameter is to be frozen, unfrozen or cast: the next commit makes
   another one and moves the data of the blocks. Frees the slots, since their sizes change. */
static fsdp_status fsdpi_request_commit(fsdp_model *m) {
    fsdpi_drain(m->world);
    for (int i = 0; i < m->num_units; i++) FSDPI_TRY(fsdpi_do_reshard(m->units[i]));
    fsdpi_drain(m->world);
    for (int i = 0; i < m->num_classes; i++)
        while (m->classes[i].count) fsdpi_buf_free(m, m->classes[i].slots[--m->classes[i].count]);
    fsdpi_shards_retire(m);
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        m->flats[d].old_grad = m->flats[d].grad;
        m->flats[d].grad = NULL;
    }
    fsdpi_uncommit(m);
    m->laid_out = m->committed = 0;
    return FSDP_OK;
}

static void fsdpi_fallback_free(fsdp_model *m) {
    if (m->fallback)
        m->world->device_ops->free(m->world->device, FSDP_MEMORY_PINNED, m->fallback,
                                   m->fallback_bytes);
    m->fallback_bytes = 0;
}

// Frees the slots, blocks and tables of a model, or of the copy that a prediction makes.
static void fsdpi_model_free_buffers(fsdp_model *m) {
    for (int i = 0; i < m->num_classes; i++) {
        for (int k = 0; k < m->classes[i].count; k++) fsdpi_buf_free(m, m->classes[i].slots[k]);
        fsdpi_model_free(m, m->classes[i].slots);
    }
    fsdpi_blocks_free(m);
    fsdpi_old_free(m);
    fsdpi_model_free(m, m->classes);
    fsdpi_model_free(m, m->order);
    fsdpi_fallback_free(m);
}

FSDP_API fsdp_status fsdp_model_commit(fsdp_model *model) {
    return model ? fsdpi_commit(model) : fsdp_fail_null(NULL, "model_commit", "model");
}

#endif // FSDPI_CORE_COMMIT_H
