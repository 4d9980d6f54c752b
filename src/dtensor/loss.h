/* dtensor/loss.h - the local loops of a cross-entropy whose classes are cut over the ranks

   Source: torch/distributed/tensor/parallel/loss.py. There, a rank without classes fails. Here, it
   takes part with -infinity and 0.
   Callers: programs.

   A part of fsdp_dtensor.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_DTENSOR_H
#include "../../fsdp_dtensor.h"
#endif
#ifndef FSDPI_DTENSOR_LOSS_H
#define FSDPI_DTENSOR_LOSS_H

#include "spec.h"

#include <math.h>

// Infinities and NaN must be exact, even if the program is compiled with -Ofast.
FSDP_PRECISE_BEGIN("O2")

enum { FSDPI_DT_BLOCK = 256 }; // elements converted at a time

typedef struct fsdpi_dt_logits {
    const char *at; // the next element
    fsdp_dtype dtype;
    int64_t rows, cols, first;
    double block[FSDPI_DT_BLOCK];
} fsdpi_dt_logits;

static fsdp_status fsdpi_dt_logits_begin(fsdpi_dt_logits *l, const char *call, const void *logits,
                                         fsdp_dtype dtype, int64_t rows, int64_t cols,
                                         int64_t first) {
    l->at = (const char *)logits, l->dtype = dtype;
    l->rows = rows, l->cols = cols, l->first = first;
    if (!fsdp_dtype_is_float(dtype))
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E194] %s: dtype %d is no floating one: pass FSDP_F32, F64, F16 or BF16", call,
            (int)dtype);
    if (rows < 0 || cols < 0 || first < 0 || first > FSDPI_DT_MOST ||
        fsdpi_dt_mul(rows, cols, FSDPI_DT_MOST / 8) > FSDPI_DT_MOST / 8)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E195] %s: %lld rows of %lld classes from %lld on: pass sizes >= 0",
                             call, (long long)rows, (long long)cols, (long long)first);
    return FSDP_OK;
}

static fsdp_status fsdpi_dt_loss_null(const char *call) {
    return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                         "[E196] %s: an array is NULL that has elements: pass all arrays", call);
}

// Reads the next block of a row that has `left` elements left. Returns its number of elements.
static int fsdpi_dt_logits_next(fsdpi_dt_logits *l, int64_t left) {
    int count = left < FSDPI_DT_BLOCK ? (int)left : FSDPI_DT_BLOCK;
    (void)fsdp_convert(l->block, FSDP_F64, l->at, l->dtype, count); // arguments have been checked
    l->at += (size_t)count * fsdp_dtype_size(l->dtype);
    return count;
}

// Returns the index of a row's target among this rank's classes; -1: another rank has it, or none.
static int64_t fsdpi_dt_target(const fsdpi_dt_logits *l, int64_t target) {
    return target >= l->first && target - l->first < l->cols ? target - l->first : -1;
}

FSDP_API fsdp_status fsdp_loss_parallel_max(const void *logits, fsdp_dtype dtype, int64_t rows,
                                            int64_t cols, float *maxima) {
    fsdpi_dt_logits l;
    fsdp_status status = fsdpi_dt_logits_begin(&l, "loss_parallel_max", logits, dtype, rows, cols,
                                               0);
    if (status) return status;
    if (rows && (!maxima || (cols && !logits))) return fsdpi_dt_loss_null("loss_parallel_max");
    for (int64_t i = 0; i < rows; i++) {
        double most = -HUGE_VAL;
        for (int64_t left = cols; left > 0;) {
            int count = fsdpi_dt_logits_next(&l, left);
            for (int k = 0; k < count; k++) // keeps a NaN
                if (l.block[k] > most || l.block[k] != l.block[k]) most = l.block[k];
            left -= count;
        }
        maxima[i] = (float)most;
    }
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_loss_parallel_sums(const void *logits, fsdp_dtype dtype, int64_t rows,
                                             int64_t cols, int64_t first, const int64_t *targets,
                                             const float *maxima, float *sums) {
    fsdpi_dt_logits l;
    fsdp_status status = fsdpi_dt_logits_begin(&l, "loss_parallel_sums", logits, dtype, rows, cols,
                                               first);
    if (status) return status;
    if (rows && (!targets || !maxima || !sums || (cols && !logits)))
        return fsdpi_dt_loss_null("loss_parallel_sums");
    for (int64_t i = 0; i < rows; i++) {
        double sum = 0, hit = 0;
        int64_t target = fsdpi_dt_target(&l, targets[i]), at = 0;
        while (at < cols) {
            int count = fsdpi_dt_logits_next(&l, cols - at);
            for (int k = 0; k < count; k++) sum += exp(l.block[k] - (double)maxima[i]);
            if (target >= at && target < at + count) hit = l.block[target - at] - (double)maxima[i];
            at += count;
        }
        sums[i] = (float)sum, sums[rows + i] = (float)hit;
    }
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_loss_parallel_grad(void *grad, const void *logits, fsdp_dtype dtype,
                                             int64_t rows, int64_t cols, int64_t first,
                                             const int64_t *targets, const float *maxima,
                                             const float *sums, const float *dout) {
    fsdpi_dt_logits l;
    char *out = (char *)grad;
    fsdp_status status = fsdpi_dt_logits_begin(&l, "loss_parallel_grad", logits, dtype, rows, cols,
                                               first);
    if (status) return status;
    if (rows && (!targets || !maxima || !sums || !dout || (cols && (!logits || !grad))))
        return fsdpi_dt_loss_null("loss_parallel_grad");
    for (int64_t i = 0; i < rows; i++) {
        int64_t target = fsdpi_dt_target(&l, targets[i]), at = 0;
        double scale = (double)dout[i];
        while (at < cols) {
            int count = fsdpi_dt_logits_next(&l, cols - at);
            for (int k = 0; k < count; k++) { // without a gradient it is 0, even if a logit is NaN
                double p = exp(l.block[k] - (double)maxima[i]) / (double)sums[i] -
                           (at + k == target);
                l.block[k] = scale == 0 ? 0 : p * scale;
            }
            (void)fsdp_convert(out, dtype, l.block, FSDP_F64, count);
            out += (size_t)count * fsdp_dtype_size(dtype);
            at += count;
        }
    }
    return FSDP_OK;
}

FSDP_PRECISE_END

#endif // FSDPI_DTENSOR_LOSS_H
