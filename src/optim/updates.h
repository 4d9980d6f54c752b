/* optim/updates.h - updates as ops, which the loops or a device make

   Updates as ops. Invariant: an op contains all that an update needs, so that the loops in
   kernels.h and a device compute the same.
   Callers: states.h (fsdpi_optim_host_bytes), muon.h (fsdpi_optim_host_bytes), ema.h
     (fsdpi_optim_emit) and others.

   A part of fsdp_optim.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_OPTIM_H
#include "../../fsdp_optim.h"
#endif
#ifndef FSDPI_OPTIM_UPDATES_H
#define FSDPI_OPTIM_UPDATES_H

#include "kernels.h"

#include <string.h>

// Runs one update with the loops. An fsdp_update has the kernels' scalars in their order.
static void fsdpi_optim_host_update(const fsdp_update *u) {
    fsdpi_adamw_scalars adamw;
    fsdpi_sgd_scalars sgd;
    const fsdpi_rounding rounding = {u->key, u->at, u->row, u->pitch};
    const fsdpi_rounding *r = u->rounds && u->dtype == FSDP_BF16 ? &rounding : NULL;
    if (u->kind == FSDP_UPDATE_ADAMW) {
        memcpy(&adamw, u->scalars, sizeof adamw);
        fsdpi_adamw(u->dtype, u->param, u->grad_dtype, u->grad, u->first, u->second, u->count,
                    &adamw, r);
    } else if (u->kind == FSDP_UPDATE_SGD) {
        memcpy(&sgd, u->scalars, sizeof sgd);
        fsdpi_sgd(u->dtype, u->param, u->grad_dtype, u->grad, u->first, u->count, &sgd, r);
    } else if (u->kind == FSDP_UPDATE_EMA) {
        fsdpi_ema(u->dtype, u->param, u->first, u->second, u->count, u->scalars[0],
                  (int)u->scalars[1]);
    } else if (u->kind == FSDP_UPDATE_MOMENTUM || u->kind == FSDP_UPDATE_MUON) {
        fsdpi_muon(u, r);
    } else if (u->first) {
        double norm;
        fsdpi_sqrt(1, &norm, u->first, 1);
        norm = 1 / (norm < u->scalars[0] ? u->scalars[0] : norm);
        (void)fsdpi_unscale(u->grad_dtype, u->grad, u->count, (float)norm);
    } else {
        *u->found |= (int32_t)fsdpi_unscale(u->grad_dtype, u->grad, u->count, (float)u->scalars[0]);
    }
}

static fsdp_status fsdpi_optim_call(const fsdp_op *op, void *stream) {
    const fsdp_update *runs = (const fsdp_update *)op->list;
    (void)stream;
    for (uint32_t i = 0; i < op->list_count; i++) fsdpi_optim_host_update(&runs[i]);
    return FSDP_OK;
}

// Emits the runs of a step: the device runs them on stream COMPUTE, or the loops do. The op names
// the first run, and the buffers that the runs read and write, if any.
static fsdp_status fsdpi_optim_emit_on(fsdp_model *m, int memory, const char *what,
                                       const fsdp_update *runs, int num, fsdp_buf *src,
                                       fsdp_buf *dst) {
    fsdp_op op;
    if (num == 0) return FSDP_OK;
    const int param = runs->param != NULL;
    fsdp_op_init(&op, m, NULL, FSDP_OP_UPDATE, fsdp_label_register(m, "optimizer"),
                 FSDP_STREAM_COMPUTE);
    op.what = what;
    op.src = src, op.dst = dst;
    op.dtype = runs->grad_dtype;
    op.out_dtype = param ? runs->dtype : runs->grad_dtype;
    op.src_ptr = runs->grad ? runs->grad : runs->param;
    op.dst_ptr = param ? runs->param : runs->grad;
    op.list = runs;
    op.list_count = (uint32_t)num;
    for (int i = 0; i < num; i++) {
        op.count += (uint64_t)runs[i].count;
        op.bytes += (uint64_t)runs[i].count *
                    fsdp_dtype_size(param ? runs[i].dtype : runs[i].grad_dtype);
    }
    if (memory == FSDP_MEMORY_HOST) op.call = fsdpi_optim_call;
    return fsdp_emit(m, &op);
}
static fsdp_status fsdpi_optim_emit(fsdp_model *m, int memory, const char *what,
                                    const fsdp_update *runs, int num) {
    return fsdpi_optim_emit_on(m, memory, what, runs, num, NULL, NULL);
}

static fsdp_status fsdpi_optim_copy(fsdp_model *m, int memory, void *dst, const void *src,
                                    size_t nbytes) {
    if (memory == FSDP_MEMORY_DEVICE) return fsdp_transfer(m, dst, src, (int64_t)nbytes);
    memcpy(dst, src, nbytes);
    return FSDP_OK;
}

static int64_t fsdpi_optim_host_bytes(const fsdp_model *m) {
    fsdp_memory memory = FSDP_ZERO;
    return fsdp_model_memory(m, &memory) ? 0 : memory.host_bytes;
}

#endif // FSDPI_OPTIM_UPDATES_H
