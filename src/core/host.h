/* core/host.h - the device table over host memory; the default device of every world

   An op is done when the call returns. If worker threads (run.h) make the calls, the caller does
   not wait for them.
   Callers: backends.h (fsdpi_host_ops), clip.h (fsdpi_root), run.h (fsdpi_host_copy) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_CORE_HOST_H
#define FSDPI_CORE_HOST_H

#include "alloc.h"
#include "../base/float.h"
#include "../base/macros.h"
#include "../base/reduce.h"

#include <math.h>
#include <string.h>

struct fsdp_device {
    fsdp_allocator allocator;
};

static fsdp_status fsdpi_host_open(const fsdp_boot *boot, fsdp_device **out) {
    *out = (fsdp_device *)fsdpi_alloc(&boot->allocator, sizeof **out);
    if (!*out) return FSDP_ERR_OUT_OF_MEMORY;
    (*out)->allocator = boot->allocator;
    return FSDP_OK;
}

static void fsdpi_host_close(fsdp_device *device) {
    fsdp_allocator allocator = device->allocator;
    fsdpi_free(&allocator, device);
}

static fsdp_status fsdpi_host_alloc(fsdp_device *device, int kind, size_t size, void **ptr) {
    (void)kind; // all of it is host memory
    *ptr = fsdpi_alloc(&device->allocator, size);
    return *ptr ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
}

static void fsdpi_host_free(fsdp_device *device, int kind, void *ptr, size_t size) {
    (void)kind, (void)size;
    fsdpi_free(&device->allocator, ptr);
}

// Returns the norm, given the sum of |x|^p, or the maximum if p is infinite.
static double fsdpi_root(double sum, double p) {
    return !fsdpi_is_finite(p) ? sum : p == 2 ? sqrt(sum) : pow(sum, 1 / p);
}

static fsdp_status fsdpi_host_copy(fsdp_device *device, void *stream, const fsdp_op *op) {
    size_t in = fsdp_dtype_size(op->dtype), out = fsdp_dtype_size(op->out_dtype);
    const fsdp_block *blocks = (const fsdp_block *)op->list;
    double scale = op->scale;
    (void)device, (void)stream;
    if (op->clip) { // scale is the largest norm, and the copy is in place
        double norm = fsdpi_root(*op->clip, op->norm_type), factor = scale / (norm + 1e-6);
        scale = factor < 1.0 || fsdpi_is_nan(norm) ? factor : 1.0;
        if (scale == 1.0) return FSDP_OK;
    }
    for (uint32_t i = 0; i < op->list_count; i++) {
        fsdp_block b = blocks[i];
        if (b.src_pitch == b.width && b.dst_pitch == b.width) { // no gaps: one long row
            b.width *= b.height;
            b.height = 1;
        }
        for (int64_t row = 0; row < b.height; row++) {
            const char *src = (const char *)op->src_ptr + (size_t)(b.src + row * b.src_pitch) * in;
            char *dst = (char *)op->dst_ptr + (size_t)(b.dst + row * b.dst_pitch) * out;
            fsdpi_reduce(dst, op->out_dtype, &src, 1, op->dtype, (size_t)b.width, scale,
                         op->accumulate, FSDP_SUM);
        }
    }
    return FSDP_OK;
}

static fsdp_status fsdpi_host_zero(fsdp_device *device, void *stream, const fsdp_op *op) {
    (void)device, (void)stream;
    memset(op->dst_ptr, op->fill, (size_t)op->bytes);
    return FSDP_OK;
}

// Arithmetic is precise, as in float.h. Norms are rare, so the code is made small (O2).
FSDP_PRECISE_BEGIN("O2")

// Returns the sum of |x|^p in f64: eight running sums, added in a fixed order. So the bits depend
// neither on alignment nor on how the compiler vectorises.
static FSDPI_NOINLINE double fsdpi_sum_powers(const void *src, fsdp_dtype dtype, size_t count,
                                              double p) {
    double sums[8] = {0, 0, 0, 0, 0, 0, 0, 0}, tmp[FSDPI_BLOCK];
    size_t size = fsdp_dtype_size(dtype);
    for (size_t at = 0; at < count; at += FSDPI_BLOCK) {
        size_t n = count - at < FSDPI_BLOCK ? count - at : FSDPI_BLOCK;
        const double *x = fsdpi_load_f64(tmp, (const char *)src + at * size, dtype, n);
        size_t i = 0;
        // Products have a loop of their own: clang -Ofast fuses product and sum despite the
        // pragmas.
        if (p == 2)
            for (size_t k = 0; k < n; k++) tmp[k] = x[k] * x[k];
        else if (p == 1)
            for (size_t k = 0; k < n; k++) tmp[k] = fabs(x[k]);
        else
            for (size_t k = 0; k < n; k++) tmp[k] = pow(fabs(x[k]), p);
        for (; i + 8 <= n; i += 8)
            for (int k = 0; k < 8; k++) sums[k] += tmp[i + (size_t)k];
        for (int k = 0; i < n; i++, k++) sums[k] += tmp[i];
    }
    return ((sums[0] + sums[1]) + (sums[2] + sums[3])) +
           ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

// Sets *most to max(*most, |x|). Compares bits as integers: they have the order of the magnitudes,
// and NaN is above infinity, so that a NaN stays.
static FSDPI_NOINLINE void fsdpi_max_abs(double *most, const void *src, fsdp_dtype dtype,
                                         size_t count) {
    double tmp[FSDPI_BLOCK];
    size_t size = fsdp_dtype_size(dtype);
    uint64_t best, bits;
    memcpy(&best, most, sizeof best);
    for (size_t at = 0; at < count; at += FSDPI_BLOCK) {
        size_t n = count - at < FSDPI_BLOCK ? count - at : FSDPI_BLOCK;
        const double *x = fsdpi_load_f64(tmp, (const char *)src + at * size, dtype, n);
        for (size_t i = 0; i < n; i++) {
            memcpy(&bits, &x[i], sizeof bits);
            bits &= 0x7FFFFFFFFFFFFFFFull;
            if (bits > best) best = bits;
        }
    }
    memcpy(most, &best, sizeof best);
}

FSDP_PRECISE_END

static fsdp_status fsdpi_host_norm(fsdp_device *device, void *stream, const fsdp_op *op) {
    const fsdp_block *blocks = (const fsdp_block *)op->list;
    size_t in = fsdp_dtype_size(op->dtype);
    double *norm = (double *)op->dst_ptr;
    (void)device, (void)stream;
    if (!op->accumulate) *norm = 0;
    for (uint32_t i = 0; i < op->list_count; i++) {
        const char *src = (const char *)op->src_ptr + (size_t)blocks[i].src * in;
        size_t count = (size_t)blocks[i].width;
        if (!fsdpi_is_finite(op->norm_type)) fsdpi_max_abs(norm, src, op->dtype, count);
        else *norm += fsdpi_sum_powers(src, op->dtype, count, op->norm_type);
    }
    return FSDP_OK;
}

static const fsdp_device_ops *fsdpi_host_ops(void) {
    // clang-format off
    static const fsdp_device_ops ops = {
        FSDP_DEVICE_VERSION, sizeof(fsdp_device_ops), FSDP_DEVICE_HOST, "host", fsdpi_host_open,
        fsdpi_host_close, fsdpi_host_alloc, fsdpi_host_free, NULL, NULL, NULL, NULL, NULL, NULL,
        NULL, NULL, fsdpi_host_copy, fsdpi_host_zero, fsdpi_host_norm, NULL, NULL};
    // clang-format on
    return &ops;
}

#endif // FSDPI_CORE_HOST_H
