/* safetensors/box.h - boxes: an interval of each dim of a tensor

   Copies between boxes.
   Callers: programs.
   Source: torch/distributed/checkpoint/resharding.py.

   A part of fsdp_safetensors.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_SAFETENSORS_H
#include "../../fsdp_safetensors.h"
#endif
#ifndef FSDPI_SAFETENSORS_BOX_H
#define FSDPI_SAFETENSORS_BOX_H

#include <string.h>

#define FSDPI_ST_MOST ((int64_t)1 << 62) // sizes, places, elements

static int fsdpi_box_possible(int ndim, const int64_t *start, const int64_t *shape) {
    int64_t numel = 1;
    for (int d = 0; d < ndim; d++)
        if (start[d] < 0 || shape[d] < 0 || start[d] > FSDPI_ST_MOST ||
            shape[d] > FSDPI_ST_MOST - start[d])
            return 0;
    for (int d = 0; d < ndim; d++)
        if (!shape[d]) return 1; // no elements, however long other dims are
    for (int d = 0; d < ndim; d++) {
        if (numel > FSDPI_ST_MOST / shape[d]) return 0;
        numel *= shape[d];
    }
    return 1;
}

FSDP_API void fsdp_box_begin(int ndim, const int64_t *src_start, const int64_t *src_shape,
                             const int64_t *dst_start, const int64_t *dst_shape,
                             fsdp_box_overlap *out) {
    int64_t size[FSDP_MAX_DIMS], src[FSDP_MAX_DIMS], dst[FSDP_MAX_DIMS], src_step = 1, dst_step = 1;
    if (!out) return;
    memset(out, 0, sizeof *out);
    if (ndim > 0 && (!src_start || !src_shape || !dst_start || !dst_shape)) return;
    if (ndim < 0 || ndim > FSDP_MAX_DIMS || !fsdpi_box_possible(ndim, src_start, src_shape) ||
        !fsdpi_box_possible(ndim, dst_start, dst_shape))
        return;
    for (int d = 0; d < ndim; d++) {
        int64_t from = src_start[d] > dst_start[d] ? src_start[d] : dst_start[d];
        int64_t src_end = src_start[d] + src_shape[d], dst_end = dst_start[d] + dst_shape[d];
        size[d] = (src_end < dst_end ? src_end : dst_end) - from;
        src[d] = from - src_start[d];
        dst[d] = from - dst_start[d];
        if (size[d] <= 0) return;
    }
    out->rows = out->elements = 1;
    for (int d = ndim - 1, together = 1; d >= 0; d--) {
        if (together) {
            out->elements *= size[d];
        } else {
            out->rows *= size[d];
            out->size[d] = size[d], out->src_step[d] = src_step, out->dst_step[d] = dst_step;
            if (d + 1 > out->outer) out->outer = d + 1;
        }
        // Runs of this dim are contiguous if both boxes contain only the elements that they share.
        together &= size[d] == src_shape[d] && size[d] == dst_shape[d];
        out->src += src[d] * src_step;
        out->dst += dst[d] * dst_step;
        src_step *= src_shape[d];
        dst_step *= dst_shape[d];
    }
}

FSDP_API int fsdp_box_next(fsdp_box_overlap *o) {
    for (int d = o ? o->outer - 1 : -1; d >= 0; d--) {
        o->src += o->src_step[d];
        o->dst += o->dst_step[d];
        if (++o->at[d] < o->size[d]) return 1;
        o->src -= o->size[d] * o->src_step[d];
        o->dst -= o->size[d] * o->dst_step[d];
        o->at[d] = 0;
    }
    return 0;
}

#endif // FSDPI_SAFETENSORS_BOX_H
