/* optim/kernels.h - the loops over elements: AdamW, SGD, unscaling, averages

   The loops over elements. Invariant: equal inputs give equal bits with any compiler flags. Pragmas
   make arithmetic precise, but clang -Ofast fuses a product with a sum in spite of its pragma: so
   one loop stores the products of a block, and another one adds them. Blocks stay in the
   first-level cache.
   Callers: programs, updates.h (fsdpi_unscale), adamw_sgd.h (fsdpi_sgd_prepare) and muon.h
     (fsdpi_muon_prepare).
   Source: torch.optim, single-tensor functions.

   A part of fsdp_optim.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_OPTIM_H
#include "../../fsdp_optim.h"
#endif
#ifndef FSDPI_OPTIM_KERNELS_H
#define FSDPI_OPTIM_KERNELS_H

#include <math.h>
#include <string.h>

#if defined(__GNUC__)
#define FSDPI_OPTIM_RESTRICT __restrict
#define FSDPI_OPTIM_NOINLINE __attribute__((noinline))
#else
#define FSDPI_OPTIM_RESTRICT
#define FSDPI_OPTIM_NOINLINE
#endif

#define FSDPI_OPTIM_BLOCK 512 // elements of a block

// The source of random bits for stochastic rounding; see fsdp_update.
typedef struct fsdpi_rounding {
    uint64_t key;
    int64_t at, row, pitch;
} fsdpi_rounding;

// Returns the final mix of murmur3, a hash: each bit of h changes half of the bits.
static inline uint32_t fsdpi_stir(uint32_t h) {
    h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
    h = (h ^ (h >> 13)) * 0xC2B2AE35u;
    return h ^ (h >> 16);
}

// Returns 16 random bits for an element. Uses 32-bit products, which vector units have.
static inline uint32_t fsdpi_chance(uint64_t key, uint64_t index) {
    uint32_t high = (uint32_t)(index >> 32) * 0x9E3779B9u + (uint32_t)(key >> 32);
    return fsdpi_stir(fsdpi_stir((uint32_t)index + (uint32_t)key) ^ high) >> 16;
}

/* Rounds x stochastically. On entry p holds x rounded to nearest. If x lies between two bf16,
   random bits are added to the 16 bits that are cut off; a carry gives the bf16 further from
   zero. Beyond the largest bf16 p is unchanged, since x has no two neighbours there. */
static FSDPI_OPTIM_NOINLINE void fsdpi_round_row(uint16_t *FSDPI_OPTIM_RESTRICT p,
                                                 const float *FSDPI_OPTIM_RESTRICT x, size_t count,
                                                 uint64_t key, uint64_t index) {
    for (size_t i = 0; i < count; i++) {
        uint32_t u, nearest = p[i];
        memcpy(&u, &x[i], sizeof u);
        uint32_t chosen = (u + fsdpi_chance(key, index + i)) >> 16;
        p[i] = (uint16_t)((u & 0x7FFFFFFFu) > 0x7F7F0000u ? nearest : chosen);
    }
}

// Stores f32 results as 16-bit parameters. The first one is element i of a run.
static void fsdpi_optim_store(void *p, fsdp_dtype dtype, const float *x, size_t count,
                              const fsdpi_rounding *r, int64_t i) {
    (void)fsdp_convert(p, dtype, x, FSDP_F32, (int64_t)count);
    for (size_t done = 0, n; r && done < count; done += n, i += (int64_t)n) {
        int64_t column = i % r->row;
        n = count - done;
        if ((int64_t)n > r->row - column) n = (size_t)(r->row - column);
        fsdpi_round_row((uint16_t *)p + done, x + done, n, r->key,
                        (uint64_t)(r->at + i / r->row * r->pitch + column));
    }
}

/* Compiles one body for both arithmetic types: fsdpi_real is double if wide, otherwise float. */
#define FSDPI_IN_REAL(wide, ...)                                                                   \
    do {                                                                                           \
        if (wide) {                                                                                \
            typedef double fsdpi_real;                                                             \
            __VA_ARGS__                                                                            \
        } else {                                                                                   \
            typedef float fsdpi_real;                                                              \
            __VA_ARGS__                                                                            \
        }                                                                                          \
    } while (0)

/* Computes out = sqrt(x), correctly rounded, by instructions. Compilers do not vectorise the C
   library's functions because of errno, and clang -Ofast estimates them in spite of its pragmas. */
#if defined(__GNUC__) && (defined(__SSE2__) || defined(__aarch64__))
#if defined(__aarch64__)
#define FSDPI_SQRT(s, d) "fsqrt %0." d ", %0." d : "+w"(v)
#elif defined(__AVX__)
#define FSDPI_SQRT(s, d) "vsqrt" s " {%0, %0|%0, %0}" : "+x"(v)
#else
#define FSDPI_SQRT(s, d) "sqrt" s " {%0, %0|%0, %0}" : "+x"(v)
#endif
typedef float fsdpi_f32x4 __attribute__((vector_size(16)));

static inline void fsdpi_sqrt_16(int wide, char *out, const char *x, size_t nbytes) { // <= 16 bytes
    fsdpi_f32x4 v = {0, 0, 0, 0};
    memcpy(&v, x, nbytes);
    if (wide) __asm__(FSDPI_SQRT("pd", "2d"));
    else __asm__(FSDPI_SQRT("ps", "4s"));
    memcpy(out, &v, nbytes);
}
static void fsdpi_sqrt(int wide, void *out, const void *x, size_t count) {
    size_t nbytes = count * (wide ? sizeof(double) : sizeof(float)), at = 0;
    char *to = (char *)out;
    const char *from = (const char *)x;
    for (; at + 16 <= nbytes; at += 16) fsdpi_sqrt_16(wide, to + at, from + at, 16);
    if (at < nbytes) fsdpi_sqrt_16(wide, to + at, from + at, nbytes - at);
}
#undef FSDPI_SQRT
#else
static void fsdpi_sqrt(int wide, void *out, const void *x, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (wide) ((double *)out)[i] = sqrt(((const double *)x)[i]);
        else ((float *)out)[i] = sqrtf(((const float *)x)[i]);
}
#endif

// Computes y += x.
static void fsdpi_add(int wide, void *y, const void *x, size_t count) {
    FSDPI_IN_REAL(wide, {
        fsdpi_real *FSDPI_OPTIM_RESTRICT to = (fsdpi_real *)y;
        const fsdpi_real *FSDPI_OPTIM_RESTRICT from = (const fsdpi_real *)x;
        for (size_t i = 0; i < count; i++) to[i] = to[i] + from[i];
    });
}

// Computes y = a * x.
static void fsdpi_scale(int wide, void *y, double a, const void *x, size_t count) {
    FSDPI_IN_REAL(wide, {
        fsdpi_real *FSDPI_OPTIM_RESTRICT to = (fsdpi_real *)y;
        const fsdpi_real *FSDPI_OPTIM_RESTRICT from = (const fsdpi_real *)x, factor = (fsdpi_real)a;
        for (size_t i = 0; i < count; i++) to[i] = factor * from[i];
    });
}

// Numbers that depend only on the settings and on t.
typedef struct fsdpi_adamw_scalars {
    double decay;       // 1 - lr*weight_decay
    double lerp;        // 1 - beta1
    double beta2, gain; // beta2, 1 - beta2
    double root, eps;   // sqrt(1 - beta2^t), eps
    double rate;        // -lr/(1 - beta1^t)
} fsdpi_adamw_scalars;

// Calls pow through a pointer that hides it from compilers: -Ofast would give other numbers.
static double fsdpi_pow(double x, int64_t y) {
    double (*volatile function)(double, double) = pow;
    return function(x, (double)y);
}

static fsdpi_adamw_scalars fsdpi_adamw_prepare(const fsdp_adamw_hyper *h) {
    fsdpi_adamw_scalars k;
    volatile double decay = h->lr * h->weight_decay; // rounded first: not fused
    double bias1 = 1 - fsdpi_pow(h->beta1, h->step), bias2 = 1 - fsdpi_pow(h->beta2, h->step);
    k.decay = 1 - decay;
    k.lerp = 1 - h->beta1;
    k.beta2 = h->beta2;
    k.gain = 1 - h->beta2;
    fsdpi_sqrt(1, &k.root, &bias2, 1);
    k.eps = h->eps;
    k.rate = -(h->lr / bias1);
    return k;
}

static FSDPI_OPTIM_NOINLINE void fsdpi_adamw_block(int wide, void *params, const void *grads,
                                                   void *first, void *second, size_t count,
                                                   const fsdpi_adamw_scalars *k) {
    FSDPI_IN_REAL(wide, {
        fsdpi_real *FSDPI_OPTIM_RESTRICT p = (fsdpi_real *)params;
        const fsdpi_real *FSDPI_OPTIM_RESTRICT g = (const fsdpi_real *)grads;
        fsdpi_real *FSDPI_OPTIM_RESTRICT m = (fsdpi_real *)first;
        fsdpi_real *FSDPI_OPTIM_RESTRICT v = (fsdpi_real *)second;
        fsdpi_real to_m[FSDPI_OPTIM_BLOCK], to_v[FSDPI_OPTIM_BLOCK];
        fsdpi_real decay = (fsdpi_real)k->decay, weight = (fsdpi_real)k->lerp,
                   beta2 = (fsdpi_real)k->beta2, gain = (fsdpi_real)k->gain,
                   root = (fsdpi_real)k->root, eps = (fsdpi_real)k->eps, rate = (fsdpi_real)k->rate;
        int from_g = weight >= (fsdpi_real)0.5; // torch.lerp starts from the nearer end
        if (from_g) weight = weight - 1;
        for (size_t i = 0; i < count; i++) {
            fsdpi_real d = g[i] - m[i], scaled = gain * g[i];
            to_m[i] = d * weight;
            to_v[i] = scaled * g[i];
            v[i] = v[i] * beta2;
            p[i] = p[i] * decay;
        }
        if (from_g) memcpy(m, g, count * sizeof *m);
        for (size_t i = 0; i < count; i++) {
            m[i] = m[i] + to_m[i];
            v[i] = v[i] + to_v[i];
        }
        fsdpi_sqrt(wide, to_v, v, count);
        for (size_t i = 0; i < count; i++) {
            fsdpi_real den = to_v[i] / root, num = rate * m[i];
            den = den + eps;
            num = num / den;
            p[i] = p[i] + num;
        }
    });
}

// Returns a block of gradients in the arithmetic type, f64 if wide: in place, or converted to tmp.
static const void *fsdpi_optim_grads(double *tmp, int wide, const void *g, fsdp_dtype dtype,
                                     size_t count) {
    if (wide) return fsdp_cast_if_needed(tmp, FSDP_F64, g, dtype, (int64_t)count);
    float *narrow = (float *)(void *)tmp;
    if (dtype != FSDP_F64) return fsdp_cast_if_needed(narrow, FSDP_F32, g, dtype, (int64_t)count);
    for (size_t i = 0; i < count; i++) narrow[i] = (float)((const double *)g)[i];
    return narrow;
}

static void fsdpi_adamw(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype, const void *g, void *m,
                        void *v, int64_t count, const fsdpi_adamw_scalars *k,
                        const fsdpi_rounding *r) {
    size_t size = fsdp_dtype_size(dtype), wide = dtype == FSDP_F64 ? sizeof(double) : sizeof(float);
    double g64[FSDPI_OPTIM_BLOCK];
    float p32[FSDPI_OPTIM_BLOCK];
    for (size_t at = 0; at < (size_t)count; at += FSDPI_OPTIM_BLOCK) {
        size_t n = (size_t)count - at < FSDPI_OPTIM_BLOCK ? (size_t)count - at : FSDPI_OPTIM_BLOCK;
        char *pp = (char *)p + at * size, *mm = (char *)m + at * wide, *vv = (char *)v + at * wide;
        const void *gg = (const char *)g + at * fsdp_dtype_size(grad_dtype);
        gg = fsdpi_optim_grads(g64, dtype == FSDP_F64, gg, grad_dtype, n);
        if (size < wide) (void)fsdp_convert(p32, FSDP_F32, pp, dtype, (int64_t)n);
        fsdpi_adamw_block(dtype == FSDP_F64, size < wide ? (void *)p32 : pp, gg, mm, vv, n, k);
        if (size < wide) fsdpi_optim_store(pp, dtype, p32, n, r, (int64_t)at);
    }
}

typedef struct fsdpi_sgd_scalars {
    double lr, momentum, gain, weight_decay; // gain: 1 - dampening
    double nesterov, fresh;                  // 0 or 1; fresh: the buffer takes the gradient
} fsdpi_sgd_scalars;

static fsdpi_sgd_scalars fsdpi_sgd_prepare(const fsdp_sgd_hyper *h) {
    fsdpi_sgd_scalars k;
    k.lr = h->lr;
    k.momentum = h->momentum;
    k.gain = 1 - h->dampening;
    k.weight_decay = h->weight_decay;
    k.nesterov = h->nesterov ? 1 : 0;
    k.fresh = h->step <= 1 ? 1 : 0;
    return k;
}

static FSDPI_OPTIM_NOINLINE void fsdpi_sgd_block(int wide, void *p, const void *g, void *buffer,
                                                 size_t count, const fsdpi_sgd_scalars *k) {
    FSDPI_IN_REAL(wide, {
        fsdpi_real d[FSDPI_OPTIM_BLOCK], product[FSDPI_OPTIM_BLOCK];
        fsdpi_real *b = (fsdpi_real *)buffer, momentum = (fsdpi_real)k->momentum;
        memcpy(d, g, count * sizeof *d);
        if (k->weight_decay > 0) {
            fsdpi_scale(wide, product, k->weight_decay, p, count);
            fsdpi_add(wide, d, product, count);
        }
        if (k->momentum > 0 && k->fresh > 0) {
            memcpy(b, d, count * sizeof *b);
        } else if (k->momentum > 0) {
            fsdpi_scale(wide, product, k->gain, d, count);
            for (size_t i = 0; i < count; i++) b[i] = b[i] * momentum;
            fsdpi_add(wide, b, product, count);
        }
        if (k->momentum > 0 && k->nesterov > 0) {
            fsdpi_scale(wide, product, k->momentum, b, count);
            fsdpi_add(wide, d, product, count);
        }
        fsdpi_scale(wide, product, -k->lr, k->momentum > 0 && !(k->nesterov > 0) ? b : d, count);
        fsdpi_add(wide, p, product, count);
    });
}

static void fsdpi_sgd(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype, const void *g, void *b,
                      int64_t count, const fsdpi_sgd_scalars *k, const fsdpi_rounding *r) {
    size_t size = fsdp_dtype_size(dtype), wide = dtype == FSDP_F64 ? sizeof(double) : sizeof(float);
    double g64[FSDPI_OPTIM_BLOCK];
    float p32[FSDPI_OPTIM_BLOCK];
    for (size_t at = 0; at < (size_t)count; at += FSDPI_OPTIM_BLOCK) {
        size_t n = (size_t)count - at < FSDPI_OPTIM_BLOCK ? (size_t)count - at : FSDPI_OPTIM_BLOCK;
        char *pp = (char *)p + at * size, *bb = b ? (char *)b + at * wide : NULL;
        const void *gg = (const char *)g + at * fsdp_dtype_size(grad_dtype);
        gg = fsdpi_optim_grads(g64, dtype == FSDP_F64, gg, grad_dtype, n);
        if (size < wide) (void)fsdp_convert(p32, FSDP_F32, pp, dtype, (int64_t)n);
        fsdpi_sgd_block(dtype == FSDP_F64, size < wide ? (void *)p32 : pp, gg, bb, n, k);
        if (size < wide) fsdpi_optim_store(pp, dtype, p32, n, r, (int64_t)at);
    }
}

FSDP_API void fsdp_adamw_update(float *p, const float *g, float *m, float *v, int64_t count,
                                const fsdp_adamw_hyper *hypers) {
    (void)fsdp_adamw_update_as(FSDP_F32, p, FSDP_F32, g, m, v, count, hypers);
}

FSDP_API fsdp_status fsdp_adamw_update_as(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype,
                                          const void *g, void *m, void *v, int64_t count,
                                          const fsdp_adamw_hyper *hypers) {
    if (grad_dtype == FSDP_DTYPE_KEEP) grad_dtype = dtype;
    if (!fsdp_dtype_is_float(dtype) || !fsdp_dtype_is_float(grad_dtype) || count < 0 || !hypers)
        return FSDP_ERR_INVALID_ARG;
    if (count == 0) return FSDP_OK;
    if (!p || !g || !m || !v) return FSDP_ERR_INVALID_ARG;
    fsdpi_adamw_scalars k = fsdpi_adamw_prepare(hypers);
    fsdpi_adamw(dtype, p, grad_dtype, g, m, v, count, &k, NULL);
    return FSDP_OK;
}

FSDP_API void fsdp_sgd_update(float *p, const float *g, float *b, int64_t count,
                              const fsdp_sgd_hyper *hypers) {
    (void)fsdp_sgd_update_as(FSDP_F32, p, FSDP_F32, g, b, count, hypers);
}

FSDP_API fsdp_status fsdp_sgd_update_as(fsdp_dtype dtype, void *p, fsdp_dtype grad_dtype,
                                        const void *g, void *b, int64_t count,
                                        const fsdp_sgd_hyper *hypers) {
    if (grad_dtype == FSDP_DTYPE_KEEP) grad_dtype = dtype;
    if (!fsdp_dtype_is_float(dtype) || !fsdp_dtype_is_float(grad_dtype) || count < 0 || !hypers)
        return FSDP_ERR_INVALID_ARG;
    if (count == 0) return FSDP_OK;
    if (!p || !g || (!b && hypers->momentum > 0)) return FSDP_ERR_INVALID_ARG;
    fsdpi_sgd_scalars k = fsdpi_sgd_prepare(hypers);
    fsdpi_sgd(dtype, p, grad_dtype, g, b, count, &k, NULL);
    return FSDP_OK;
}

#ifndef FSDP_MATH_ONLY
// Computes b += (g - b) * s[0], and u = g + (b - g) * s[1] or u = b. Stores products before adding
// them.
static FSDPI_OPTIM_NOINLINE void fsdpi_momentum_block(float *u, const float *g, float *b,
                                                      size_t count, const double *s) {
    float products[FSDPI_OPTIM_BLOCK], weight = (float)s[0], momentum = (float)s[1];
    for (size_t i = 0; i < count; i++) products[i] = (g[i] - b[i]) * weight;
    for (size_t i = 0; i < count; i++) b[i] = b[i] + products[i];
    for (size_t i = 0; i < count; i++) products[i] = (b[i] - g[i]) * momentum;
    if (s[2] > 0)
        for (size_t i = 0; i < count; i++) u[i] = g[i] + products[i];
    else memcpy(u, b, count * sizeof *u);
}

// Computes p = p * s[0] - s[1] * x.
static FSDPI_OPTIM_NOINLINE void fsdpi_muon_block(float *p, const float *x, size_t count,
                                                  const double *s) {
    float products[FSDPI_OPTIM_BLOCK], decay = (float)s[0], rate = (float)s[1];
    for (size_t i = 0; i < count; i++) products[i] = rate * x[i];
    for (size_t i = 0; i < count; i++) p[i] = p[i] * decay;
    for (size_t i = 0; i < count; i++) p[i] = p[i] - products[i];
}

// Runs both kinds of Muon's updates in f32.
static void fsdpi_muon(const fsdp_update *u, const fsdpi_rounding *r) {
    size_t size = fsdp_dtype_size(u->dtype);
    double g64[FSDPI_OPTIM_BLOCK];
    float p32[FSDPI_OPTIM_BLOCK];
    for (size_t at = 0; at < (size_t)u->count; at += FSDPI_OPTIM_BLOCK) {
        size_t rest = (size_t)u->count - at,
               n = rest < FSDPI_OPTIM_BLOCK ? rest : FSDPI_OPTIM_BLOCK;
        char *p = (char *)u->param + at * size;
        const void *g = (const char *)u->grad + at * fsdp_dtype_size(u->grad_dtype);
        const float *grad = (const float *)fsdpi_optim_grads(g64, 0, g, u->grad_dtype, n);
        float *to = size == sizeof *p32 ? (float *)(void *)p : p32;
        if (u->kind == FSDP_UPDATE_MOMENTUM) {
            fsdpi_momentum_block(to, grad, (float *)u->first + at, n, u->scalars);
        } else {
            if (to == p32) (void)fsdp_convert(p32, FSDP_F32, p, u->dtype, (int64_t)n);
            fsdpi_muon_block(to, grad, n, u->scalars);
        }
        if (to == p32) fsdpi_optim_store(p, u->dtype, p32, n, r, (int64_t)at);
    }
}

// Sets the scalars of FSDP_UPDATE_MUON: 1 - lr*weight_decay, lr*factor*sqrt(max(ratio, least)).
static inline void fsdpi_muon_prepare(double *scalars, double lr, const fsdp_optim_group *group,
                                      double rows, double columns, double least, double factor) {
    double rate = lr * group->lr_scale, ratio = rows / columns;
    volatile double decay = rate * group->weight_decay; // as in AdamW
    if (ratio < least) ratio = least;
    fsdpi_sqrt(1, &ratio, &ratio, 1);
    ratio = ratio * factor;
    scalars[0] = 1 - decay;
    scalars[1] = rate * ratio;
}

// Returns 1 if x is infinite or NaN. Tests the exponent bits, which is correct with -Ofast.
static inline uint32_t fsdpi_is_bad_f32(float x) {
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (u & 0x7F800000u) == 0x7F800000u;
}
static inline uint32_t fsdpi_is_bad_f64(double x) {
    uint64_t u;
    memcpy(&u, &x, sizeof u);
    return (u & 0x7FF0000000000000u) == 0x7FF0000000000000u;
}

// Computes x *= factor. Returns nonzero if an element was not finite.
static FSDPI_OPTIM_NOINLINE uint32_t fsdpi_unscale_block(int wide, void *data, size_t count,
                                                         float factor) {
    uint32_t bad = 0;
    FSDPI_IN_REAL(wide, {
        fsdpi_real *x = (fsdpi_real *)data;
        for (size_t i = 0; i < count; i++)
            bad |= wide ? fsdpi_is_bad_f64((double)x[i]) : fsdpi_is_bad_f32((float)x[i]);
        for (size_t i = 0; i < count; i++) x[i] = x[i] * (fsdpi_real)factor;
    });
    return bad;
}

static uint32_t fsdpi_unscale(fsdp_dtype dtype, void *x, int64_t count, float factor) {
    size_t size = fsdp_dtype_size(dtype);
    float x32[FSDPI_OPTIM_BLOCK];
    uint32_t bad = 0;
    for (size_t at = 0; at < (size_t)count; at += FSDPI_OPTIM_BLOCK) {
        size_t n = (size_t)count - at < FSDPI_OPTIM_BLOCK ? (size_t)count - at : FSDPI_OPTIM_BLOCK;
        void *xx = (char *)x + at * size;
        if (size < sizeof *x32) (void)fsdp_convert(x32, FSDP_F32, xx, dtype, (int64_t)n);
        bad |= fsdpi_unscale_block(dtype == FSDP_F64, size < sizeof *x32 ? x32 : xx, n, factor);
        if (size < sizeof *x32) (void)fsdp_convert(xx, dtype, x32, FSDP_F32, (int64_t)n);
    }
    return bad;
}
// Computes average = lerp(average, weights, gain) from the nearer end, product and sum rounded at
// once, as torch.lerp. fma is a function, so that no flag can replace it.
static FSDPI_OPTIM_NOINLINE void fsdpi_ema_block(int wide, void *average, const void *weights,
                                                 size_t count, double gain) {
    FSDPI_IN_REAL(wide, {
        fsdpi_real *FSDPI_OPTIM_RESTRICT a = (fsdpi_real *)average;
        const fsdpi_real *FSDPI_OPTIM_RESTRICT w = (const fsdpi_real *)weights;
        fsdpi_real d[FSDPI_OPTIM_BLOCK], weight = (fsdpi_real)gain;
        const int from_w = weight >= (fsdpi_real)0.5;
        if (from_w) weight = weight - 1;
        for (size_t i = 0; i < count; i++) d[i] = w[i] - a[i];
        if (from_w) memcpy(a, w, count * sizeof *a);
        for (size_t i = 0; i < count; i++)
            a[i] = wide ? (fsdpi_real)fma((double)d[i], (double)weight, (double)a[i])
                        : (fsdpi_real)fmaf((float)d[i], (float)weight, (float)a[i]);
    });
}

// Swaps a block of p and its average. For 16-bit parameters the average does not change.
static void fsdpi_ema_swap_block(fsdp_dtype dtype, void *p, void *average, void *bits, size_t count,
                                 int back) {
    char kept[FSDPI_OPTIM_BLOCK * sizeof(double)];
    const size_t nbytes = count * fsdp_dtype_size(dtype);
    if (bits && back) memcpy(p, bits, nbytes);
    if (bits && back) return;
    memcpy(bits ? bits : kept, p, nbytes);
    if (bits) (void)fsdp_convert(p, dtype, average, FSDP_F32, (int64_t)count);
    else memcpy(p, average, nbytes);
    if (!bits) memcpy(average, kept, nbytes);
}

// Runs action `act`, FSDP_EMA_*. bits: saved 16-bit parameters; unused for other dtypes.
static void fsdpi_ema(fsdp_dtype dtype, void *p, void *average, void *bits, int64_t count,
                      double gain, int act) {
    size_t size = fsdp_dtype_size(dtype), wide = dtype == FSDP_F64 ? sizeof(double) : sizeof(float);
    float w32[FSDPI_OPTIM_BLOCK];
    for (size_t at = 0; at < (size_t)count; at += FSDPI_OPTIM_BLOCK) {
        size_t n = (size_t)count - at < FSDPI_OPTIM_BLOCK ? (size_t)count - at : FSDPI_OPTIM_BLOCK;
        char *pp = (char *)p + at * size, *aa = (char *)average + at * wide;
        char *kept = size < wide ? (char *)bits + at * size : NULL;
        if (act >= FSDP_EMA_SWAP) {
            fsdpi_ema_swap_block(dtype, pp, aa, kept, n, act == FSDP_EMA_SWAP_BACK);
            continue;
        }
        if (size < wide) (void)fsdp_convert(w32, FSDP_F32, pp, dtype, (int64_t)n);
        const void *w = size < wide ? (void *)w32 : pp;
        if (act == FSDP_EMA_COPY) memcpy(aa, w, n * wide);
        else fsdpi_ema_block(dtype == FSDP_F64, aa, w, n, gain);
    }
}
#endif // FSDP_MATH_ONLY

#endif // FSDPI_OPTIM_KERNELS_H
