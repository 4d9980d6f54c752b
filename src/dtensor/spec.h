/* dtensor/spec.h - specs: checks, parts of ranks, strided placements

   Invariant: an accepted spec is normalized: dims >= 0, orders explicit, all other fields 0.
   Callers: programs, propagate.h (fsdpi_dt_fail), route.h (fsdpi_dt_fail), redistribute.h
     (fsdpi_dt_numel) and others.
   Source: torch/distributed/tensor/_dtensor_spec.py, _utils.py, placement_types.py.

   A part of fsdp_dtensor.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_DTENSOR_H
#include "../../fsdp_dtensor.h"
#endif
#ifndef FSDPI_DTENSOR_SPEC_H
#define FSDPI_DTENSOR_SPEC_H

#include <string.h>

// With FSDP_MATH_ONLY there is no world, and a failure has no text.
#ifdef FSDP_MATH_ONLY
static fsdp_status fsdpi_dt_fail(fsdp_status status, const char *format, ...) {
    (void)format;
    return status;
}
#else
// The world of the current call. NULL: the call only has specs, which belong to no world.
static __thread fsdp_world *fsdpi_dt_world;
#define fsdpi_dt_fail(...) fsdp_fail(fsdpi_dt_world, __VA_ARGS__)
#endif

#define FSDPI_DT_MOST ((int64_t)1 << 62) // bytes of a tensor

// Returns a * b for a, b >= 0, or most + 1 if that exceeds `most`.
static int64_t fsdpi_dt_mul(int64_t a, int64_t b, int64_t most) {
    return a && b > most / a ? most + 1 : a * b;
}

static int64_t fsdpi_dt_numel(int ndim, const int64_t *shape) {
    int64_t numel = 1;
    for (int d = 0; d < ndim; d++) // 0 if a dim is empty, however long the others are
        if (!shape[d]) return 0;
    for (int d = 0; d < ndim; d++) numel = fsdpi_dt_mul(numel, shape[d], FSDPI_DT_MOST);
    return numel;
}

static int fsdpi_dt_cuts(const fsdp_placement *p, int dim) {
    return p->kind == FSDP_SHARD && p->dim == dim;
}

// Returns the mesh dim that makes cut number `order` of a tensor dim, or -1.
static int fsdpi_dt_cut_at(const fsdp_spec *s, int dim, int order) {
    for (int m = 0; m < s->mesh_ndim; m++)
        if (fsdpi_dt_cuts(&s->place[m], dim) && s->place[m].order == order) return m;
    return -1;
}

static fsdp_status fsdpi_dt_check_sizes(const char *call, int mesh_ndim, const int32_t *mesh_shape,
                                        fsdp_dtype dtype, int ndim, const int64_t *shape) {
    int64_t ranks = 1, bytes = (int64_t)fsdp_dtype_size(dtype);
    if (mesh_ndim < 1 || mesh_ndim > FSDP_MAX_DIMS || ndim < 0 || ndim > FSDP_MAX_DIMS)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E126] %s: the mesh has %d dims, expected 1..%d, and the tensor %d, "
                             "expected 0..%d",
                             call, mesh_ndim, FSDP_MAX_DIMS, ndim, FSDP_MAX_DIMS);
    if (!bytes)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E127] %s: dtype %d is none: pass FSDP_F32, ...", call, (int)dtype);
    for (int m = 0; m < mesh_ndim; m++) {
        ranks = mesh_shape[m] < 1 ? INT32_MAX + (int64_t)1
                                  : fsdpi_dt_mul(ranks, mesh_shape[m], INT32_MAX);
        if (ranks > INT32_MAX)
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E128] %s: mesh dim %d has %d ranks: pass sizes >= 1 whose product "
                "is less than 2^31",
                call, m, (int)mesh_shape[m]);
    }
    for (int d = 0; d < ndim; d++)
        if (shape[d] < 0 || shape[d] > FSDPI_DT_MOST)
            return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                                 "[E129] %s: dim %d of the tensor has size %lld: pass 0..2^62",
                                 call, d, (long long)shape[d]);
    if (fsdpi_dt_mul(bytes, fsdpi_dt_numel(ndim, shape), FSDPI_DT_MOST) > FSDPI_DT_MOST)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E133] %s: the tensor has more than 2^62 bytes: pass a smaller shape",
                             call);
    return FSDP_OK;
}

// Checks the placement of mesh dim m, and writes it to out with dim >= 0 and without fields that
// its kind does not use.
static fsdp_status fsdpi_dt_check_place(const char *call, fsdp_spec *out, int m,
                                        const fsdp_placement *p) {
    fsdp_placement *to = &out->place[m];
    to->kind = p->kind;
    if (p->kind == FSDP_SHARD) {
        if (p->dim < -out->ndim || p->dim >= out->ndim)
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E134] %s: mesh dim %d cuts tensor dim %d of a tensor of %d dims: "
                "pass a dim that it has; a scalar can only be REPLICATE or PARTIAL",
                call, m, p->dim, out->ndim);
        to->dim = (int8_t)(p->dim < 0 ? p->dim + out->ndim : p->dim);
        to->order = p->order;
    } else if (p->kind == FSDP_PARTIAL) {
        if (p->op < FSDP_SUM || p->op > FSDP_AVG)
            return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                                 "[E135] %s: mesh dim %d is PARTIAL of op %d: pass FSDP_SUM, "
                                 "FSDP_MAX, FSDP_MIN or FSDP_AVG",
                                 call, m, p->op);
        to->op = p->op;
    } else if (p->kind != FSDP_REPLICATE) {
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E136] %s: mesh dim %d has kind %d: pass FSDP_REPLICATE, FSDP_SHARD "
                             "or FSDP_PARTIAL",
                             call, m, p->kind);
    }
    return FSDP_OK;
}

// Returns 1 if partial values of two ops commute: a spec may have both only in that case.
static int fsdpi_dt_ops_commute(int a, int b) {
    return a == b || (a == FSDP_SUM && b == FSDP_AVG) || (a == FSDP_AVG && b == FSDP_SUM);
}

// Returns the mesh dim, other than `except`, whose partial values do not commute with op; -1: none.
static int fsdpi_dt_other_op(const fsdp_spec *s, int op, int except) {
    for (int m = 0; m < s->mesh_ndim; m++)
        if (m != except && s->place[m].kind == FSDP_PARTIAL &&
            !fsdpi_dt_ops_commute(s->place[m].op, op))
            return m;
    return -1;
}

// Checks that the orders of one tensor dim are a permutation; all 0 means from left to right.
static fsdp_status fsdpi_dt_check_orders(const char *call, fsdp_spec *s, int dim) {
    int count = 0, given = 0, next = 0;
    for (int m = 0; m < s->mesh_ndim; m++)
        if (fsdpi_dt_cuts(&s->place[m], dim)) count++, given |= s->place[m].order != 0;
    for (int m = 0; m < s->mesh_ndim && !given; m++)
        if (fsdpi_dt_cuts(&s->place[m], dim)) s->place[m].order = (int8_t)next++;
    for (int order = 0; order < count; order++)
        if (fsdpi_dt_cut_at(s, dim, order) < 0)
            return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                                 "[E137] %s: %d mesh dims cut tensor dim %d, and none of them has "
                                 "order %d: give them the orders 0..%d, or all 0",
                                 call, count, dim, order, count - 1);
    return FSDP_OK;
}

static fsdp_status fsdpi_dt_fill(const char *call, fsdp_spec *out, int mesh_ndim,
                                 const int32_t *mesh_shape, const fsdp_placement *place,
                                 fsdp_dtype dtype, int ndim, const int64_t *shape) {
    fsdp_spec s;
    memset(&s, 0, sizeof s);
    if (!out || !mesh_shape || !place || (ndim > 0 && !shape))
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E138] %s: the spec, a shape or the placements are NULL: pass them",
                             call);
    fsdp_status status = fsdpi_dt_check_sizes(call, mesh_ndim, mesh_shape, dtype, ndim, shape);
    if (status) return status;
    s.mesh_ndim = mesh_ndim, s.ndim = ndim, s.dtype = dtype;
    memcpy(s.mesh_shape, mesh_shape, (size_t)mesh_ndim * sizeof *mesh_shape);
    if (ndim) memcpy(s.shape, shape, (size_t)ndim * sizeof *shape);
    for (int m = 0; m < mesh_ndim && !status; m++) {
        status = fsdpi_dt_check_place(call, &s, m, &place[m]);
        if (status || s.place[m].kind != FSDP_PARTIAL) continue;
        int other = fsdpi_dt_other_op(&s, s.place[m].op, m);
        if (other >= 0)
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E139] %s: mesh dims %d and %d are PARTIAL of two ops: reduce one "
                "of them first; only SUM and AVG may stand together",
                call, other, m);
    }
    for (int d = 0; d < ndim && !status; d++) status = fsdpi_dt_check_orders(call, &s, d);
    if (!status) *out = s;
    return status;
}

FSDP_API fsdp_status fsdp_spec_init(fsdp_spec *out, int mesh_ndim, const int32_t *mesh_shape,
                                    const fsdp_placement *place, fsdp_dtype dtype, int ndim,
                                    const int64_t *shape) {
    return fsdpi_dt_fill("spec_init", out, mesh_ndim, mesh_shape, place, dtype, ndim, shape);
}

FSDP_API fsdp_status fsdp_spec_infer(fsdp_spec *out, int mesh_ndim, const int32_t *mesh_shape,
                                     const fsdp_placement *place, fsdp_dtype dtype, int ndim,
                                     const int64_t *local_shape) {
    fsdp_spec s;
    memset(&s, 0, sizeof s); // for compilers that do not see that it is set
    fsdp_status status = fsdpi_dt_fill("spec_infer", out ? &s : NULL, mesh_ndim, mesh_shape, place,
                                       dtype, ndim, local_shape);
    if (status) return status;
    for (int m = 0; m < s.mesh_ndim; m++)
        if (s.place[m].kind == FSDP_SHARD) {
            int64_t *size = &s.shape[s.place[m].dim];
            *size = fsdpi_dt_mul(*size, s.mesh_shape[m], FSDPI_DT_MOST);
        }
    return fsdpi_dt_fill("spec_infer", out, s.mesh_ndim, s.mesh_shape, s.place, dtype, s.ndim,
                         s.shape);
}

// Checks that a spec is as fsdp_spec_init fills it. A caller may have changed it, or set it by
// hand.
static fsdp_status fsdpi_dt_known(const char *call, const fsdp_spec *spec) {
    fsdp_spec s;
    if (!spec)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG, "[E154] %s: a spec is NULL: pass it", call);
    fsdp_status status = fsdpi_dt_fill(call, &s, spec->mesh_ndim, spec->mesh_shape, spec->place,
                                       spec->dtype, spec->ndim, spec->shape);
    if (!status && memcmp(&s, spec, sizeof s) != 0)
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E155] %s: the spec has a field that fsdp_spec_init does not leave so: "
            "fill it by fsdp_spec_init",
            call);
    return status;
}

FSDP_API fsdp_status fsdp_spec_local(const fsdp_spec *spec, const int32_t *coord, fsdp_local *out) {
    fsdp_local l;
    fsdp_status status = fsdpi_dt_known("spec_local", spec);
    if (status) return status;
    if (!coord || !out)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E156] spec_local: coord or out is NULL: pass both");
    for (int m = 0; m < spec->mesh_ndim; m++)
        if (coord[m] < 0 || coord[m] >= spec->mesh_shape[m])
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E157] spec_local: the coordinate in mesh dim %d is %d: pass 0..%d", m,
                (int)coord[m], (int)spec->mesh_shape[m] - 1);
    memset(&l, 0, sizeof l);
    for (int d = 0; d < spec->ndim; d++) {
        fsdp_range range = {0, spec->shape[d], spec->shape[d]};
        for (int k = 0, m; (m = fsdpi_dt_cut_at(spec, d, k)) >= 0 && !status; k++) {
            int64_t begin = range.start;
            status = fsdp_shard_range(range.count, spec->mesh_shape[m], coord[m], &range);
            range.start += begin;
        }
        l.shape[d] = range.count;
        l.start[d] = range.count ? range.start : spec->shape[d];
    }
    l.numel = fsdpi_dt_numel(spec->ndim, l.shape);
    *out = l;
    return status;
}

/* -------------------------------------------------------------------------------------------- */
// Strided placements: a mesh dim that cuts after one to its right is written as a _StridedShard.
// Its factor is the number of pieces that existed before its cut.

FSDP_API fsdp_status fsdp_spec_to_strided(const fsdp_spec *spec, int64_t *factor) {
    fsdp_status status = fsdpi_dt_known("spec_to_strided", spec);
    if (status) return status;
    if (!factor)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E158] spec_to_strided: factor is NULL: pass it");
    for (int m = 0; m < spec->mesh_ndim; m++) {
        const fsdp_placement *p = &spec->place[m];
        factor[m] = 1;
        for (int right = m + 1; right < spec->mesh_ndim && p->kind == FSDP_SHARD; right++)
            if (fsdpi_dt_cuts(&spec->place[right], p->dim) && spec->place[right].order < p->order)
                factor[m] *= spec->mesh_shape[right];
    }
    return FSDP_OK;
}

// Inserts mesh dim m at the first order at which there are `factor` pieces already; later cuts move
// on by one. Call it from right to left: the dims to the right of m must have their orders. Returns
// 0 if there is no such order.
static int fsdpi_dt_insert(fsdp_spec *s, int m, int64_t factor) {
    int dim = s->place[m].dim, at = 0, right;
    int64_t pieces = 1;
    for (; pieces != factor; at++) {
        for (right = m + 1; right < s->mesh_ndim; right++)
            if (fsdpi_dt_cuts(&s->place[right], dim) && s->place[right].order == at) break;
        if (right == s->mesh_ndim) return 0;
        pieces *= s->mesh_shape[right];
    }
    for (right = m + 1; right < s->mesh_ndim; right++)
        if (fsdpi_dt_cuts(&s->place[right], dim) && s->place[right].order >= at)
            s->place[right].order++;
    s->place[m].order = (int8_t)at;
    return 1;
}

FSDP_API fsdp_status fsdp_spec_from_strided(fsdp_spec *spec, const int64_t *factor) {
    fsdp_status status = fsdpi_dt_known("spec_from_strided", spec);
    if (status) return status;
    fsdp_spec s = *spec;
    for (int m = s.mesh_ndim - 1; m >= 0; m--) {
        if (s.place[m].kind != FSDP_SHARD) continue;
        if (!factor || factor[m] < 1)
            return fsdpi_dt_fail(
                FSDP_ERR_INVALID_ARG,
                "[E159] spec_from_strided: the factor of mesh dim %d is missing or "
                "less than 1: pass 1 for a plain Shard",
                m);
        if (!fsdpi_dt_insert(&s, m, factor[m]))
            return fsdpi_dt_fail(
                FSDP_ERR_UNSUPPORTED,
                "[E174] spec_from_strided: no order of cuts has the factor %lld at "
                "mesh dim %d: gather such a tensor where it was made",
                (long long)factor[m], m);
    }
    *spec = s;
    return FSDP_OK;
}

#endif // FSDPI_DTENSOR_SPEC_H
