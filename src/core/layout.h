/* core/layout.h - the layout of a unit's slots, and the lists of blocks and segments of its ops

   State: fsdpi_unit_layout, the parameters' fsdp_layout_param, and their offsets in slots. Sizes
   and offsets in slots are equal on all ranks.
   Callers: unit.h measures (fsdpi_layout_compute); commit.h fills the lists.
   Source: torch: foreach_all_gather, foreach_reduce.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_LAYOUT_H
#define FSDPI_CORE_LAYOUT_H

#include "alloc.h"
#include "objects.h"
#include "shard_math.h"

static int64_t fsdpi_bytes(int64_t numel, fsdp_dtype dtype) {
    return numel * (int64_t)fsdp_dtype_size(dtype);
}

static int fsdpi_shards(const fsdp_unit *u) { return u->desc.info.shard_mesh_size; }       // W
static int fsdpi_replicas(const fsdp_unit *u) { return u->desc.info.replicate_mesh_size; } // R

static fsdpi_dtype_group *fsdpi_dtype_group_of(const fsdp_unit *u, const fsdpi_param *p) {
    return &u->layout.parts[p->part];
}

// Returns the flat block that holds a dtype group's shards.
static fsdpi_flat_block *fsdpi_flat_of(const fsdp_unit *u, const fsdpi_dtype_group *part) {
    return &u->model->flats[part->dtype];
}
// Returns the dtype of shard gradients of parameters that are stored in `dtype`.
static fsdp_dtype fsdpi_grad_dtype(const fsdp_model *m, fsdp_dtype dtype) {
    return m->desc.grad_dtype && fsdp_dtype_is_float(dtype) ? m->desc.grad_dtype : dtype;
}

// Returns the alignment of full parameters and gradients in slots, in elements: a cache line, or on
// GPUs 256 bytes, as cudaMalloc aligns.
static int64_t fsdpi_align_numel(const fsdp_model *m, fsdp_dtype dtype) {
    return (m->world->mode == FSDP_RUN_STREAMS ? 256 : FSDPI_ALIGN) /
           (int64_t)fsdp_dtype_size(dtype);
}
static int64_t fsdpi_aligned(const fsdp_model *m, int64_t bytes) {
    return fsdpi_align_up(bytes, fsdpi_align_numel(m, FSDP_U8));
}

/* Lays out the trainable or the frozen parameters of a dtype group. Writes their offsets to tmp, in
   order, and fills segs and blocks unless they are NULL. Requires room in tmp for all parameters of
   the unit. */
static fsdp_status fsdpi_param_list_layout(const fsdp_unit *u, const fsdpi_dtype_group *part,
                                           int trainable, fsdp_layout *lay, fsdp_layout_param *tmp,
                                           fsdp_seg *segs, fsdp_block *blocks) {
    int64_t least = u->model->desc.direct_min, size = (int64_t)fsdp_dtype_size(part->param_dtype);
    int count = 0;
    for (int i = 0; i < u->desc.num_params; i++)
        if (fsdpi_dtype_group_of(u, &u->params[i]) == part &&
            u->params[i].requires_grad == trainable)
            tmp[count++] = u->params[i].lay;
    lay->world = fsdpi_shards(u);
    lay->rank = u->desc.info.shard_mesh_rank;
    lay->align = fsdpi_align_numel(u->model, part->param_dtype);
    lay->direct_numel = least == FSDP_DIRECT_NEVER ? least : fsdpi_ceil_div(least, size);
    return fsdp_layout_params(lay, tmp, count, segs, blocks);
}

// Copies the layouts in tmp to the parameters of the list; gradients: only their offsets in GRAD.
static void fsdpi_param_list_store(fsdp_unit *u, const fsdpi_dtype_group *part, int trainable,
                                   const fsdp_layout_param *tmp, int gradients) {
    for (int i = 0, k = 0; i < u->desc.num_params; i++) {
        fsdpi_param *p = &u->params[i];
        if (fsdpi_dtype_group_of(u, p) != part || p->requires_grad != trainable) continue;
        if (gradients) p->grad_offset = tmp[k++].full_offset;
        else p->lay = tmp[k++];
    }
}

/* Lays out a dtype group with an extension in the GATHER slot: each string, rank after rank, then
   the parameter that the extension computes from the strings. */
static void fsdpi_extended_layout(fsdp_unit *u, fsdpi_dtype_group *part) {
    fsdpi_param *p = part->extended;
    fsdpi_op_list *gather = &u->layout.all_gather;
    int64_t at = u->layout.slot_bytes;
    for (int i = 0; i < p->num_strings; i++) {
        fsdp_seg seg = {0, at, p->string_bytes[i]};
        if (gather->segs) gather->segs[gather->num] = seg;
        gather->num++;
        part->num_gather++;
        p->string_offset[i] = at;
        at = fsdpi_aligned(u->model, at + fsdpi_shards(u) * p->string_bytes[i]);
    }
    p->lay.full_offset = at / (int64_t)fsdp_dtype_size(part->param_dtype);
    u->layout.slot_bytes = fsdpi_aligned(
        u->model, at + fsdpi_bytes(fsdpi_shards(u) * p->lay.shard_numel, part->param_dtype));
}

/* Lays out a dtype group in the GATHER slot, after the groups before it:
   [trainables | frozen | trainables copied out | frozen copied out] */
static void fsdpi_slot_layout(fsdp_unit *u, fsdpi_dtype_group *part, fsdp_layout_param *tmp) {
    int world = fsdpi_shards(u);
    int64_t size = (int64_t)fsdp_dtype_size(part->param_dtype);
    int64_t align = fsdpi_align_numel(u->model, part->param_dtype);
    fsdpi_op_list *gather = &u->layout.all_gather, *out = &part->copy_out;
    part->slot = u->layout.slot_bytes / size;
    part->num_gather = 0;
    int64_t frozen_full = fsdpi_align_up(part->slot + world * part->train.shard_numel, align);
    int64_t finals = fsdpi_align_up(frozen_full + world * part->frozen.shard_numel, align);
    int64_t end = finals;
    for (int trainable = 1; trainable >= 0; trainable--) {
        fsdp_layout lay = FSDP_ZERO;
        lay.shard_base = trainable ? part->train.base : part->frozen.base;
        lay.full_base = trainable ? part->slot : frozen_full;
        lay.final_base = end;
        int lists = gather->segs && !part->extended;
        (void)fsdpi_param_list_layout(u, part, trainable, &lay, tmp,
                                      lists ? gather->segs + gather->num : NULL,
                                      lists && out->blocks ? out->blocks + out->num : NULL);
        fsdpi_param_list_store(u, part, trainable, tmp, 0);
        end += lay.final_numel;
        if (part->extended) continue; // its strings are gathered instead of its shard
        gather->num += lay.num_segs;
        part->num_gather += lay.num_segs;
        out->num += lay.num_blocks;
    }
    if (part->extended) fsdpi_extended_layout(u, part);
    else u->layout.slot_bytes = fsdpi_aligned(u->model, end * size);
}

/* Lays out a dtype group in the GRAD slot, after the groups before it: [reduce input: trainables |
   gradients of packed parameters, as the caller writes them]. If the unit has several groups, its
   reduce input is the slot REDUCE_IN. */
static void fsdpi_grad_layout(fsdp_unit *u, fsdpi_dtype_group *part, fsdp_layout_param *tmp) {
    int64_t size = (int64_t)fsdp_dtype_size(part->param_dtype);
    int64_t reduce = fsdpi_shards(u) * part->train.shard_numel;
    fsdpi_op_list *scatter = &u->layout.reduce_scatter[0];
    fsdp_layout lay = FSDP_ZERO;
    if (part->num_train == 0) return;
    part->grad = u->layout.grad_bytes / size;
    lay.shard_base = part->train.base;
    lay.full_base = part->grad;
    lay.final_base = fsdpi_align_up(part->grad + reduce,
                                    fsdpi_align_numel(u->model, part->param_dtype));
    (void)fsdpi_param_list_layout(u, part, 1, &lay, tmp,
                                  scatter->segs ? scatter->segs + scatter->num : NULL,
                                  part->chunk_cat.blocks);
    fsdpi_param_list_store(u, part, 1, tmp, 1);
    part->chunk_cat.num = lay.num_blocks;
    for (int i = 0; scatter->segs && i < lay.num_segs; i++) // offset in REDUCE_IN
        scatter->segs[scatter->num + i].full += fsdpi_shards(u) * part->reduce - part->grad;
    scatter->num += lay.num_segs;
    u->layout.grad_bytes = fsdpi_aligned(u->model, (lay.final_base + lay.final_numel) * size);
}

#define FSDPI_UNIT_MAX ((int64_t)1 << 56) // elements: the bytes of a unit's slots fit 63 bits

/* Computes the layout of a unit's slots, and fills the lists if they are allocated (at commit).
   Requires room in tmp for all parameters of the unit. Returns FSDP_ERR_INVALID_ARG if the unit has
   more than FSDPI_UNIT_MAX elements. */
static FSDP_COLD fsdp_status fsdpi_layout_compute(fsdp_unit *u, fsdp_layout_param *tmp) {
    int world = fsdpi_shards(u);
    int64_t total = 0;
    u->layout.slot_bytes = u->layout.grad_bytes = u->layout.slice_bytes = u->layout.train_numel = 0;
    u->layout.all_gather.num = u->layout.reduce_scatter[0].num = 0;
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_dtype_group *part = &u->layout.parts[k];
        part->copy_out.num = part->chunk_cat.num = 0;
        part->reduce = u->layout.train_numel;
        for (int trainable = 1; trainable >= 0; trainable--) {
            fsdp_layout lay = FSDP_ZERO;
            fsdp_status status = fsdpi_param_list_layout(u, part, trainable, &lay, tmp, NULL, NULL);
            if (status) return status;
            fsdpi_param_list *list = trainable ? &part->train : &part->frozen;
            list->shard_numel = lay.shard_numel;
            list->packed_numel = lay.packed_numel;
            total += lay.shard_numel;
            if (total > FSDPI_UNIT_MAX / world) return FSDP_ERR_INVALID_ARG;
        }
        u->layout.train_numel += part->train.shard_numel;
    }
    u->layout.reduce_numel = world * u->layout.train_numel;
    for (int k = 0; k < u->layout.num_parts; k++) {
        fsdpi_slot_layout(u, &u->layout.parts[k], tmp);
        fsdpi_grad_layout(u, &u->layout.parts[k], tmp);
    }
    for (int i = 0; i < u->desc.num_params && u->desc.slices; i++)
        u->layout.slice_bytes += fsdpi_bytes(world * u->params[i].lay.shard_numel / u->desc.slices,
                                             fsdpi_dtype_group_of(u, &u->params[i])->param_dtype);
    return FSDP_OK;
}

/* -------------------------------------------------------------------------------------------- */
// The lists of ops.

// Returns a block of one row of `width` elements, from offset src to offset dst.
static fsdp_block fsdpi_row_block(int64_t src, int64_t dst, int64_t width) {
    fsdp_block b = {src, dst, width, 1, width, width};
    return b;
}

static fsdp_block fsdpi_reversed(fsdp_block b) {
    fsdp_block r = {b.dst, b.src, b.width, b.height, b.dst_pitch, b.src_pitch};
    return r;
}

static void fsdpi_add_block(fsdpi_op_list *work, fsdp_block block) {
    work->blocks[work->num++] = block;
    work->count += (uint64_t)(block.width * block.height);
}

// Sets work->count to the number of elements in its blocks or segments.
static void fsdpi_count(fsdpi_op_list *work) {
    work->count = 0;
    for (int i = 0; i < work->num; i++)
        work->count += (uint64_t)(work->blocks ? work->blocks[i].width * work->blocks[i].height
                                               : work->segs[i].count);
}

// Fills the lists of a dtype group that use offsets in flat blocks or that reverse the layout's.
static void fsdpi_dtype_group_lists(fsdp_unit *u, fsdpi_dtype_group *part, const fsdp_seg *gather) {
    int world = fsdpi_shards(u), rank = u->desc.info.shard_mesh_rank;
    int64_t numel = part->train.shard_numel;
    for (int i = 0; i < part->num_gather && !part->extended; i++) {
        fsdp_seg s = gather[i];
        fsdpi_add_block(&part->copy_in, fsdpi_row_block(s.shard, s.full + rank * s.count, s.count));
    }
    for (int i = 0; i < part->chunk_cat.num; i++) { // from the packed gradients to the reduce input
        part->chunk_cat.blocks[i] = fsdpi_reversed(part->chunk_cat.blocks[i]);
        fsdpi_add_block(&part->divide, part->chunk_cat.blocks[i]);
    }
    fsdpi_count(&part->chunk_cat);
    fsdpi_count(&part->copy_out);
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        if (!p->requires_grad || fsdpi_dtype_group_of(u, p) != part) continue;
        if (p->lay.direct)
            fsdpi_add_block(&part->divide, fsdpi_row_block(p->grad_offset, p->grad_offset,
                                                           world * p->lay.shard_numel));
        else
            u->layout.pad_in |= p->lay.shard_dim > 0 && p->lay.shape[p->lay.shard_dim] % world != 0;
    }
    fsdpi_add_block(&part->to_shard, fsdpi_row_block(part->reduce, part->train.base, numel));
    fsdpi_add_block(&part->rescale, fsdpi_row_block(part->train.base, part->train.base, numel));
}

/* Fills the segments of REDUCE_IN from those of GRAD. In GRAD they stay apart, since each direct
   parameter is contiguous there. In REDUCE_IN adjacent segments are joined if their counts are
   multiples of 16 bytes, with which copies and networks are fast: so a reduction has few segments.
   If a reduction may read either slot, none is joined, since all ranks must have equal segments. */
static void fsdpi_join_segs(const fsdp_unit *u, fsdpi_op_list *to, const fsdpi_op_list *from) {
    int64_t unit = 16 / (int64_t)fsdp_dtype_size(u->layout.reduce_dtype);
    int joins = !u->layout.grads_ahead; // gradients are always copied to REDUCE_IN
    to->num = 0;
    for (int i = 0; i < from->num; i++) {
        fsdp_seg s = from->segs[i], *last = to->segs + (i > 0 ? to->num - 1 : 0);
        if (i > 0 && joins && last->count % unit == 0 && s.count % unit == 0)
            last->count += s.count;
        else to->segs[to->num++] = s;
    }
}

// Fills the segments of reductions to the flat block (SCATTER) and to REDUCE_OUT (TO_OUT).
static void fsdpi_reduce_lists(fsdp_unit *u) {
    fsdpi_unit_layout *l = &u->layout;
    int world = fsdpi_shards(u);
    fsdpi_join_segs(u, &l->reduce_scatter[1], &l->reduce_scatter[0]);
    for (int k = 0; k < 2; k++) {
        l->to_out[k].num = l->reduce_scatter[k].num;
        for (int i = 0; i < l->to_out[k].num; i++) {
            fsdp_seg s = l->reduce_scatter[k].segs[i];
            s.shard = s.full / world; // each segment is `world` times as long in full
            l->to_out[k].segs[i] = s;
        }
        fsdpi_count(&l->reduce_scatter[k]);
        fsdpi_count(&l->to_out[k]);
    }
    fsdpi_add_block(&l->whole_out, fsdpi_row_block(0, 0, l->train_numel));
    l->whole_grad.count = (uint64_t)l->grad_bytes;
    if (l->pad_in) l->padded_in.count = (uint64_t)fsdpi_bytes(l->reduce_numel, l->reduce_dtype);
}

// Fills to_in: the blocks from the gradients in GRAD to the segments of REDUCE_IN.
static void fsdpi_sum_list(fsdp_unit *u, fsdpi_dtype_group *part) {
    fsdp_layout lay = FSDP_ZERO;
    lay.world = fsdpi_shards(u);
    for (int i = 0; i < u->desc.num_params; i++) {
        const fsdpi_param *p = &u->params[i];
        fsdp_layout_param full = p->lay;
        const fsdp_seg *s = u->layout.to_out[1].segs;
        int64_t at = part->reduce + full.shard_offset - part->train.base;
        if (!p->requires_grad || fsdpi_dtype_group_of(u, p) != part || full.shard_numel == 0)
            continue;
        while (at >= s->shard + s->count) s++;
        full.full_offset = p->grad_offset;
        if (full.direct) full.shard_dim = 0; // on one rank: contiguous in any dim
        fsdp_block *blocks = part->to_in.blocks + part->to_in.num;
        int num = fsdpi_layout_blocks(&lay, &full, at + s->full - s->shard, s->count, blocks);
        for (int k = 0; k < num; k++) fsdpi_add_block(&part->to_in, fsdpi_reversed(blocks[k]));
    }
}

// Fills the lists that keep, and gather again, 1/n of each parameter: reshard_after_forward = n.
static void fsdpi_slice_lists(fsdp_unit *u) {
    int64_t at = 0, bytes = u->layout.gather_dtype == FSDP_U8;
    for (int i = 0; i < u->desc.num_params && u->desc.slices; i++) {
        const fsdpi_param *p = &u->params[i];
        int64_t size = bytes ? fsdpi_bytes(1, fsdpi_dtype_group_of(u, p)->param_dtype) : 1;
        int64_t count = fsdpi_shards(u) / u->desc.slices * p->lay.shard_numel * size;
        int64_t full = p->lay.full_offset * size,
                me = u->desc.info.shard_mesh_rank % u->desc.slices;
        fsdp_seg s = {at, full, count};
        u->layout.slice_gather.segs[u->layout.slice_gather.num++] = s;
        fsdpi_add_block(&u->layout.slice_copy, fsdpi_row_block(full + me * count, at, count));
        at += count;
    }
    fsdpi_count(&u->layout.slice_gather);
}

#endif // FSDPI_CORE_LAYOUT_H
