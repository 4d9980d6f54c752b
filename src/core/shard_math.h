/* core/shard_math.h - computes the rows of each rank's shard, and offsets of parameters in a slot

   Pure functions of sizes. The stored shards of a parameter have equal sizes on all ranks. Chunk k
   starts at row k*c of the padded tensor: the W shards in order are the padded tensor, and all
   padding is at its end.
   Source: torch.chunk; _fsdp_common.py; _fsdp_collectives.py (all_gather copy-out, chunk_cat).
   Callers: programs, layout.h (fsdpi_align_up), params.h (fsdpi_min), unit.h (fsdpi_numel) and
     others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_SHARD_MATH_H
#define FSDPI_CORE_SHARD_MATH_H

#define FSDPI_NUMEL_MAX ((int64_t)1 << 62)

static int64_t fsdpi_ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }
static int64_t fsdpi_align_up(int64_t a, int64_t to) { return fsdpi_ceil_div(a, to) * to; }
static int64_t fsdpi_layout_align(const fsdp_layout *l) { return l->align > 0 ? l->align : 1; }
static int64_t fsdpi_min(int64_t a, int64_t b) { return a < b ? a : b; }

// Returns a * b for a, b >= 0; -1 if it exceeds FSDPI_NUMEL_MAX, or if a is -1.
static int64_t fsdpi_mul(int64_t a, int64_t b) {
    if (a < 0 || (b > 0 && a > FSDPI_NUMEL_MAX / b)) return -1;
    return a * b;
}

// Returns the number of elements of dims [from, to); -1: a size is negative, or there are too many.
static int64_t fsdpi_numel(const int64_t *shape, int from, int to) {
    int64_t numel = 1;
    for (int d = from; d < to; d++) {
        if (shape[d] < 0) return -1;
        numel = fsdpi_mul(numel, shape[d]);
    }
    return numel;
}

static fsdp_range fsdpi_range(int64_t dim_size, int world, int rank) {
    fsdp_range range;
    range.padded = fsdpi_ceil_div(dim_size, world);
    // A chunk that would begin past the end is empty. There rank * padded may overflow.
    int past = range.padded > 0 && rank > dim_size / range.padded;
    range.start = past ? dim_size : fsdpi_min(rank * range.padded, dim_size);
    range.count = fsdpi_min(range.padded, dim_size - range.start);
    return range;
}

FSDP_API fsdp_status fsdp_shard_range(int64_t dim_size, int world, int rank, fsdp_range *out) {
    if (dim_size < 0 || world < 1 || rank < 0 || rank >= world || !out) return FSDP_ERR_INVALID_ARG;
    *out = fsdpi_range(dim_size, world, rank);
    return FSDP_OK;
}

// Computes chunk, sizes and kind of one parameter; fsdp_layout_params computes offsets.
static fsdp_status fsdpi_layout_param(const fsdp_layout *layout, fsdp_layout_param *p) {
    if (p->ndim < 1 || p->ndim > FSDP_MAX_DIMS || p->shard_dim < 0 || p->shard_dim >= p->ndim)
        return FSDP_ERR_INVALID_ARG;
    for (int d = 0; d < p->ndim; d++)
        if (p->shape[d] < 0) return FSDP_ERR_INVALID_ARG;
    const fsdp_range range = fsdpi_range(p->shape[p->shard_dim], layout->world, layout->rank);
    int64_t outer = fsdpi_numel(p->shape, 0, p->shard_dim);
    int64_t inner = fsdpi_numel(p->shape, p->shard_dim + 1, p->ndim);
    int64_t around = outer < 0 || inner < 0 ? -1 : fsdpi_mul(outer, inner);
    p->numel = fsdpi_numel(p->shape, 0, p->ndim);
    p->shard_numel = fsdpi_mul(around, range.padded);
    if (p->numel < 0 || p->shard_numel < 0 || fsdpi_mul(p->shard_numel, layout->world) < 0)
        return FSDP_ERR_INVALID_ARG;
    p->chunk = range.padded;
    p->start = range.start;
    p->rows = range.count;
    p->local_numel = around * range.count;
    // Direct shards are multiples of align, so that the next one is aligned, too. On one rank the
    // shard is the tensor itself, with padding.
    int64_t align = fsdpi_layout_align(layout);
    if (layout->world == 1) p->shard_numel = fsdpi_align_up(p->shard_numel, align);
    p->direct = layout->world == 1 || (p->shard_dim == 0 && p->numel >= layout->direct_numel &&
                                       p->shard_numel > 0 && p->shard_numel % align == 0);
    return FSDP_OK;
}

// Returns the packed parameter if there is only one and it is sharded by rows: its staging is the
// tensor. Otherwise returns NULL. Its shard stays after the direct ones, because its size may not
// be aligned.
static fsdp_layout_param *fsdpi_layout_pack_of_one(fsdp_layout_param *params, int count) {
    fsdp_layout_param *only = NULL;
    for (int i = 0; i < count; i++) {
        if (params[i].direct || params[i].shard_numel == 0) continue;
        if (only) return NULL;
        only = &params[i];
    }
    return only && only->shard_dim == 0 ? only : NULL;
}

// Writes the blocks from a packed parameter's staging rows (row k at stage + k*pitch) to its full
// tensor, unless `out` is NULL. Returns their number.
static int fsdpi_layout_blocks(const fsdp_layout *layout, const fsdp_layout_param *p, int64_t stage,
                               int64_t pitch, fsdp_block *out) {
    if (p->shard_numel == 0) return 0;
    if (p->shard_dim == 0) { // the shards in order are the tensor
        fsdp_block b = {stage,         p->full_offset, p->shard_numel,
                        layout->world, pitch,          p->shard_numel};
        if (out) out[0] = b;
        return 1;
    }
    int64_t outer = fsdpi_numel(p->shape, 0, p->shard_dim);
    int64_t inner = fsdpi_numel(p->shape, p->shard_dim + 1, p->ndim);
    int num = 0;
    for (int k = 0; k < layout->world; k++) {
        fsdp_range range = fsdpi_range(p->shape[p->shard_dim], layout->world, k);
        int64_t width = range.count * inner;
        if (width == 0) continue;
        int64_t to = p->full_offset + range.start * inner, step = p->shape[p->shard_dim] * inner;
        fsdp_block b = {stage + k * pitch, to, width, outer, width, step};
        if (out) out[num] = b;
        num++;
    }
    return num;
}

FSDP_API FSDP_COLD fsdp_status fsdp_layout_params(fsdp_layout *layout, fsdp_layout_param *params,
                                                  int count, fsdp_seg *segs, fsdp_block *blocks) {
    if (!layout || count < 0 || (count > 0 && !params) || layout->world < 1 || layout->rank < 0 ||
        layout->rank >= layout->world)
        return FSDP_ERR_INVALID_ARG;
    int64_t align = fsdpi_layout_align(layout), direct = 0, packed = 0; // numels of one rank
    int num_segs = 0, num_blocks = 0;
    for (int i = 0; i < count; i++) { // its offset among the direct or the packed ones
        fsdp_status status = fsdpi_layout_param(layout, &params[i]);
        if (status) return status;
        int64_t *sum = params[i].direct ? &direct : &packed;
        params[i].shard_offset = *sum;
        *sum += params[i].shard_numel;
        if (*sum > FSDPI_NUMEL_MAX / 4 / layout->world) return FSDP_ERR_INVALID_ARG;
    }
    fsdp_layout_param *only = fsdpi_layout_pack_of_one(params, count);
    layout->shard_numel = direct + packed;
    layout->packed_numel = only ? 0 : packed;
    int64_t gathered = layout->full_base + layout->world * layout->shard_numel;
    int64_t stage = layout->full_base + layout->world * direct;
    int64_t final_base = layout->final_base ? layout->final_base : fsdpi_align_up(gathered, align);
    int64_t final = final_base;
    for (int i = 0; i < count; i++) {
        fsdp_layout_param *p = &params[i];
        if (p->direct) {
            fsdp_seg seg = {layout->shard_base + p->shard_offset,
                            layout->full_base + layout->world * p->shard_offset, p->shard_numel};
            p->full_offset = seg.full;
            if (segs) segs[num_segs] = seg;
            num_segs++;
            p->shard_offset = seg.shard;
            continue;
        }
        int64_t in_pack = p->shard_offset;
        p->shard_offset += layout->shard_base + direct;
        if (p == only) {
            p->full_offset = stage;
            p->direct = 1;
            continue;
        }
        p->full_offset = p->shard_numel > 0 ? final : layout->full_base; // an offset in the slot
        final = fsdpi_align_up(final + layout->world * p->shard_numel, align);
        num_blocks += fsdpi_layout_blocks(layout, p, stage + in_pack, packed,
                                          blocks ? blocks + num_blocks : NULL);
    }
    if (packed > 0) {
        fsdp_seg seg = {layout->shard_base + direct, stage, packed};
        if (segs) segs[num_segs] = seg;
        num_segs++;
    }
    layout->final_numel = final - final_base;
    layout->slot_end = final > final_base ? final : gathered;
    layout->num_segs = num_segs;
    layout->num_blocks = num_blocks;
    return FSDP_OK;
}

#endif // FSDPI_CORE_SHARD_MATH_H
