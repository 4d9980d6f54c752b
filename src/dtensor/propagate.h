/* dtensor/propagate.h - what an operation on distributed tensors needs and gives

   An operation is a list of rows. For one mesh dim, a row gives the placements of the inputs and
   the resulting placement of the output. Mesh dims are independent of each other. In the first row
   of each list all tensors are replicated.
   Callers: programs.
   Source: torch/distributed/tensor/_ops, _sharding_prop.py.

   A part of fsdp_dtensor.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_DTENSOR_H
#include "../../fsdp_dtensor.h"
#endif
#ifndef FSDPI_DTENSOR_PROPAGATE_H
#define FSDPI_DTENSOR_PROPAGATE_H

#include "route.h"
#include "spec.h"

#include <string.h>

enum { FSDPI_DT_WHOLE = -1, FSDPI_DT_ADDS = -2 }; // >= 0: cut along this dim
enum { FSDPI_DT_MASKED = 1, FSDPI_DT_EVEN = 2, FSDPI_DT_MEAN = 4 }; // flags of a row
enum { FSDPI_DT_ROWS = 24, FSDPI_DT_STACK = 128 << 10 };

typedef struct fsdpi_dt_row {
    int8_t out, in[FSDP_TENSOR_OP_INPUTS], flags;
} fsdpi_dt_row;

typedef struct fsdpi_dt_op {
    int op, num_in, num_rows, ndim; // ndim, shape: of the output
    int mesh_ndim;
    const fsdp_spec *const *in;
    fsdp_tensor_op_args args;
    int64_t shape[FSDP_MAX_DIMS];
    fsdpi_dt_row rows[FSDPI_DT_ROWS];
    int order[FSDP_MAX_DIMS]; // this candidate's mesh dims, in the order in which they cut
    const fsdpi_dt_row *chosen[FSDP_MAX_DIMS];
    fsdp_links links;
    int64_t best_ps;
    int best_changes, best_adds, found;
} fsdpi_dt_op;

static fsdpi_dt_row *fsdpi_dt_add(fsdpi_dt_op *o, int out, int a, int b, int c) {
    fsdpi_dt_row *r = &o->rows[o->num_rows++];
    r->out = (int8_t)out, r->flags = 0;
    r->in[0] = (int8_t)a, r->in[1] = (int8_t)b, r->in[2] = (int8_t)c, r->in[3] = (int8_t)c;
    return r;
}

static int64_t fsdpi_dt_size(const fsdpi_dt_op *o, int input, int dim) {
    return o->in[input]->shape[dim];
}

/* -------------------------------------------------------------------------------------------- */
// The rows of each operation, and the shape of its output. These functions return 0 if the inputs
// do not fit.

static int fsdpi_dt_rows_mm(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE, P = FSDPI_DT_ADDS, batch = o->op == FSDP_TENSOR_OP_BMM;
    int m = batch, k = batch + 1; // dims of x; k is also y's last dim
    if (o->num_in != 2 || o->in[0]->ndim != k + 1 || o->in[1]->ndim != k + 1) return 0;
    if (fsdpi_dt_size(o, 0, k) != fsdpi_dt_size(o, 1, m)) return 0;
    if (batch && fsdpi_dt_size(o, 0, 0) != fsdpi_dt_size(o, 1, 0)) return 0;
    o->ndim = k + 1;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    o->shape[k] = fsdpi_dt_size(o, 1, k);
    if (batch) fsdpi_dt_add(o, 0, 0, 0, R);
    fsdpi_dt_add(o, P, k, m, R);
    fsdpi_dt_add(o, m, m, R, R);
    fsdpi_dt_add(o, k, R, k, R);
    fsdpi_dt_add(o, P, P, R, R);
    fsdpi_dt_add(o, P, R, P, R);
    return 1;
}

static int fsdpi_dt_rows_linear(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE, P = FSDPI_DT_ADDS;
    if (o->num_in < 2 || o->num_in > 3 || o->in[0]->ndim < 1 || o->in[1]->ndim != 2) return 0;
    int k = o->in[0]->ndim - 1;
    int64_t n = fsdpi_dt_size(o, 1, 0);
    if (fsdpi_dt_size(o, 0, k) != fsdpi_dt_size(o, 1, 1)) return 0;
    if (o->num_in == 3 && (o->in[2]->ndim != 1 || fsdpi_dt_size(o, 2, 0) != n)) return 0;
    o->ndim = k + 1;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    o->shape[k] = n;
    fsdpi_dt_add(o, P, k, 1, P);
    for (int d = 0; d < k; d++) fsdpi_dt_add(o, d, d, R, R);
    fsdpi_dt_add(o, k, R, 0, 0);
    fsdpi_dt_add(o, P, P, R, P);
    fsdpi_dt_add(o, P, R, P, P);
    return 1;
}

static int fsdpi_dt_rows_binary(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE, P = FSDPI_DT_ADDS;
    int lacks = o->num_in == 2 ? o->in[0]->ndim - o->in[1]->ndim : -1;
    if (lacks < 0) return 0;
    o->ndim = o->in[0]->ndim;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    for (int d = 0; d < o->ndim; d++) {
        int64_t size = d < lacks ? 1 : fsdpi_dt_size(o, 1, d - lacks);
        if (size != 1 && size != o->shape[d]) return 0;
        fsdpi_dt_add(o, d, d, d >= lacks && size == o->shape[d] ? d - lacks : R, R);
    }
    if (o->op == FSDP_TENSOR_OP_ADD) fsdpi_dt_add(o, P, P, P, R);
    else fsdpi_dt_add(o, P, P, R, R), fsdpi_dt_add(o, P, R, P, R);
    return 1;
}

// Adds rows of operations on each element, or on each row of the last dims. Weights are replicated.
static int fsdpi_dt_rows_each(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE, P = FSDPI_DT_ADDS;
    int most = o->op == FSDP_TENSOR_OP_LAYER_NORM ? 3 : o->op == FSDP_TENSOR_OP_RMS_NORM ? 2 : 1;
    int each = o->op == FSDP_TENSOR_OP_SCALE || o->op == FSDP_TENSOR_OP_POINTWISE;
    int last = each ? 0 : o->args.num_dims ? o->args.num_dims : 1;
    if (o->num_in < 1 || o->num_in > most || last < 0 || last > o->in[0]->ndim) return 0;
    o->ndim = o->in[0]->ndim;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    for (int i = 1; i < o->num_in; i++) {
        if (o->in[i]->ndim != last) return 0;
        for (int d = 0; d < last; d++)
            if (fsdpi_dt_size(o, i, d) != o->shape[o->ndim - last + d]) return 0;
    }
    for (int d = 0; d < o->ndim - last; d++) fsdpi_dt_add(o, d, d, R, R);
    if (o->op == FSDP_TENSOR_OP_SCALE) fsdpi_dt_add(o, P, P, R, R);
    return 1;
}

static int fsdpi_dt_rows_transpose(fsdpi_dt_op *o) {
    int seen = 0;
    o->ndim = o->in[0]->ndim;
    if (o->num_in != 1 || (o->args.num_dims ? o->args.num_dims != o->ndim : o->ndim < 2)) return 0;
    for (int d = 0; d < o->ndim; d++) {
        int64_t from = o->args.num_dims  ? o->args.shape[d]
                       : d < o->ndim - 2 ? d
                                         : 2 * o->ndim - 3 - d;
        if (from < 0 || from >= o->ndim || seen >> from & 1) return 0;
        seen |= 1 << from;
        o->shape[d] = fsdpi_dt_size(o, 0, (int)from);
        fsdpi_dt_add(o, d, (int)from, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    }
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    return 1;
}

static int fsdpi_dt_rows_slice(fsdpi_dt_op *o) {
    int dim = o->args.dim < 0 ? o->args.dim + o->in[0]->ndim : o->args.dim;
    o->ndim = o->in[0]->ndim;
    if (o->num_in != 1 || dim < 0 || dim >= o->ndim || o->args.num_dims != 1) return 0;
    if (o->args.shape[0] < 0 || o->args.shape[0] > fsdpi_dt_size(o, 0, dim)) return 0;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    o->shape[dim] = o->args.shape[0];
    for (int d = 0; d < o->ndim; d++)
        if (d != dim || o->shape[d] == fsdpi_dt_size(o, 0, d))
            fsdpi_dt_add(o, d, d, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    return 1;
}

// Returns the first dim of more than one element in [begin, end), or -1.
static int fsdpi_dt_first(const int64_t *shape, int begin, int end) {
    while (begin < end && shape[begin] == 1) begin++;
    return begin < end ? begin : -1;
}

// Dims form groups of equal size on both sides, and the first dims of a group correspond. Parts
// have identical elements if the first dims are equal, or if both are cut evenly.
static int fsdpi_dt_rows_reshape(fsdpi_dt_op *o) {
    const int64_t *a = o->in[0]->shape, *b = o->shape;
    int na = o->in[0]->ndim, i = 0, k = 0;
    if (o->num_in != 1 || o->args.num_dims < 0 || o->args.num_dims > FSDP_MAX_DIMS) return 0;
    o->ndim = o->args.num_dims;
    for (int d = 0; d < o->ndim; d++)
        if ((o->shape[d] = o->args.shape[d]) < 0) return 0;
    int64_t numel = fsdpi_dt_numel(na, a);
    if (numel != fsdpi_dt_numel(o->ndim, b)) return 0;
    while (numel && i < na && k < o->ndim) {
        int begin_a = i, begin_b = k;
        int64_t size_a = a[i++], size_b = b[k++];
        while (size_a != size_b)
            if (size_a < size_b) size_a *= a[i++];
            else size_b *= b[k++];
        int from = fsdpi_dt_first(a, begin_a, i), to = fsdpi_dt_first(b, begin_b, k);
        if (from < 0) continue;
        fsdpi_dt_row *r = fsdpi_dt_add(o, to, from, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
        if (a[from] != b[to]) r->flags = FSDPI_DT_EVEN;
    }
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    return 1;
}

static int fsdpi_dt_rows_sum(fsdpi_dt_op *o) {
    int gone = 0, ndim = o->in[0]->ndim, mean = o->op == FSDP_TENSOR_OP_MEAN;
    if (o->num_in != 1 || o->args.num_dims < 0 || o->args.num_dims > ndim) return 0;
    for (int i = 0; i < o->args.num_dims; i++) {
        int64_t d = o->args.shape[i] < 0 ? o->args.shape[i] + ndim : o->args.shape[i];
        if (d < 0 || d >= ndim || gone >> d & 1) return 0;
        gone |= 1 << d;
    }
    if (!o->args.num_dims) gone = (1 << ndim) - 1;
    for (int d = 0; d < ndim; d++) {
        int goes = gone >> d & 1;
        fsdpi_dt_row *r = fsdpi_dt_add(o, goes ? FSDPI_DT_ADDS : o->ndim, d, FSDPI_DT_WHOLE,
                                       FSDPI_DT_WHOLE);
        if (goes && mean) r->flags = FSDPI_DT_EVEN | FSDPI_DT_MEAN;
        if (!goes) o->shape[o->ndim++] = fsdpi_dt_size(o, 0, d);
    }
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    return 1;
}

static int fsdpi_dt_rows_cat(fsdpi_dt_op *o) {
    int dim = o->args.dim < 0 ? o->args.dim + o->in[0]->ndim : o->args.dim;
    o->ndim = o->in[0]->ndim;
    if (dim < 0 || dim >= o->ndim) return 0;
    memcpy(o->shape, o->in[0]->shape, sizeof o->shape);
    for (int i = 1; i < o->num_in; i++) {
        if (o->in[i]->ndim != o->ndim) return 0;
        for (int d = 0; d < o->ndim; d++)
            if (d != dim && fsdpi_dt_size(o, i, d) != o->shape[d]) return 0;
        o->shape[dim] += fsdpi_dt_size(o, i, dim);
    }
    for (int d = 0; d < o->ndim; d++)
        if (d != dim) fsdpi_dt_add(o, d, d, d, d);
    fsdpi_dt_add(o, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_ADDS, FSDPI_DT_ADDS);
    return 1;
}

static int fsdpi_dt_rows_embedding(fsdpi_dt_op *o) {
    const int R = FSDPI_DT_WHOLE;
    if (o->num_in != 2 || o->in[0]->ndim != 2 || o->in[1]->ndim >= FSDP_MAX_DIMS) return 0;
    int last = o->in[1]->ndim;
    o->ndim = last + 1;
    memcpy(o->shape, o->in[1]->shape, sizeof o->shape);
    o->shape[last] = fsdpi_dt_size(o, 0, 1);
    fsdpi_dt_add(o, last, 1, R, R);
    fsdpi_dt_add(o, FSDPI_DT_ADDS, 0, R, R)->flags = FSDPI_DT_MASKED;
    for (int d = 0; d < last; d++) fsdpi_dt_add(o, d, R, d, R);
    return 1;
}

static int fsdpi_dt_rows(fsdpi_dt_op *o) {
    fsdpi_dt_add(o, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE, FSDPI_DT_WHOLE);
    switch (o->op) {
    case FSDP_TENSOR_OP_MM:
    case FSDP_TENSOR_OP_BMM: return fsdpi_dt_rows_mm(o);
    case FSDP_TENSOR_OP_LINEAR: return fsdpi_dt_rows_linear(o);
    case FSDP_TENSOR_OP_ADD:
    case FSDP_TENSOR_OP_MUL: return fsdpi_dt_rows_binary(o);
    case FSDP_TENSOR_OP_TRANSPOSE: return fsdpi_dt_rows_transpose(o);
    case FSDP_TENSOR_OP_SLICE: return fsdpi_dt_rows_slice(o);
    case FSDP_TENSOR_OP_RESHAPE: return fsdpi_dt_rows_reshape(o);
    case FSDP_TENSOR_OP_SUM:
    case FSDP_TENSOR_OP_MEAN: return fsdpi_dt_rows_sum(o);
    case FSDP_TENSOR_OP_CAT: return fsdpi_dt_rows_cat(o);
    case FSDP_TENSOR_OP_EMBEDDING: return fsdpi_dt_rows_embedding(o);
    default: return fsdpi_dt_rows_each(o);
    }
}

/* -------------------------------------------------------------------------------------------- */
// Candidates: a row for each mesh dim, and an order of cuts.

// Returns 1 if the operation only moves elements. It works on partial values of any op; others only
// on sums.
static int fsdpi_dt_moves_only(int op) {
    return op == FSDP_TENSOR_OP_TRANSPOSE || op == FSDP_TENSOR_OP_SLICE ||
           op == FSDP_TENSOR_OP_RESHAPE || op == FSDP_TENSOR_OP_CAT;
}

// Returns the op of partial values in mesh dim m: that of the first input with partial values
// there. If the operation itself makes partial values, they are sums, and all others must be sums
// too.
static int fsdpi_dt_op_of(const fsdpi_dt_op *o, int m) {
    int op = FSDP_SUM;
    for (int i = o->num_in - 1; i >= 0; i--) {
        if (o->chosen[m]->in[i] >= 0) return FSDP_SUM;
        if (o->chosen[m]->in[i] == FSDPI_DT_ADDS && o->in[i]->place[m].kind == FSDP_PARTIAL)
            op = o->in[i]->place[m].op;
    }
    return op;
}

// Returns a row's entry for input i, or for the output (-1).
static int fsdpi_dt_code_of(const fsdpi_dt_row *r, int i) { return i < 0 ? r->out : r->in[i]; }

// Computes the spec of input i, or of the output (-1), with the chosen rows.
static void fsdpi_dt_spec_of(const fsdpi_dt_op *o, int i, fsdp_spec *s) {
    int8_t cuts[FSDP_MAX_DIMS];
    const fsdp_spec *like = o->in[i < 0 ? 0 : i];
    memset(cuts, 0, sizeof cuts);
    *s = *like;
    memset(s->place, 0, sizeof s->place);
    if (i < 0) s->ndim = o->ndim, memcpy(s->shape, o->shape, sizeof s->shape);
    for (int k = 0; k < s->mesh_ndim; k++) {
        int m = o->order[k], code = fsdpi_dt_code_of(o->chosen[m], i);
        fsdp_placement *p = &s->place[m];
        if (code == FSDPI_DT_ADDS) {
            int mean = i < 0 && (o->chosen[m]->flags & FSDPI_DT_MEAN);
            p->kind = FSDP_PARTIAL, p->op = (int8_t)(mean ? FSDP_AVG : fsdpi_dt_op_of(o, m));
        } else if (code >= 0) {
            p->kind = FSDP_SHARD, p->dim = (int8_t)code, p->order = cuts[code]++;
        }
    }
}

static int64_t fsdpi_dt_pieces(const fsdp_spec *s, int dim) {
    int64_t pieces = 1;
    for (int m = 0; m < s->mesh_ndim; m++)
        if (fsdpi_dt_cuts(&s->place[m], dim)) pieces *= s->mesh_shape[m];
    return pieces;
}

// Returns 1 if partial values of different mesh dims commute.
static int fsdpi_dt_adds_fit(const fsdp_spec *s) {
    for (int m = 0; m < s->mesh_ndim; m++)
        if (s->place[m].kind == FSDP_PARTIAL && fsdpi_dt_other_op(s, s->place[m].op, m) >= 0)
            return 0;
    return 1;
}

// Returns 1 if input i may be redistributed to the spec that the rows need. A cut input does not
// become partial: that is free here, and expensive in the next operation.
static int fsdpi_dt_fits(const fsdpi_dt_op *o, int i, const fsdp_spec *need) {
    const fsdp_spec *given = o->in[i];
    if (fsdpi_dt_no_way(given, need) >= 0 || !fsdpi_dt_adds_fit(need)) return 0;
    for (int m = 0; m < need->mesh_ndim; m++) {
        const fsdp_placement *p = &need->place[m];
        if (p->kind == FSDP_PARTIAL && (given->place[m].kind == FSDP_SHARD ||
                                        (!fsdpi_dt_sums(p->op) && !fsdpi_dt_moves_only(o->op))))
            return 0;
        if (p->kind != FSDP_SHARD) continue;
        int64_t pieces = fsdpi_dt_pieces(need, p->dim), size = need->shape[p->dim];
        if (!fsdpi_dt_cuts(&given->place[m], p->dim) && size < pieces) return 0;
        if ((o->chosen[m]->flags & FSDPI_DT_EVEN) && size % pieces) return 0;
    }
    return 1;
}

// Returns 1 if the output of a reshape is cut evenly.
static int fsdpi_dt_out_fits(const fsdpi_dt_op *o, const fsdp_spec *out) {
    for (int m = 0; m < out->mesh_ndim; m++)
        if ((o->chosen[m]->flags & FSDPI_DT_EVEN) && out->place[m].kind == FSDP_SHARD &&
            out->shape[out->place[m].dim] % fsdpi_dt_pieces(out, out->place[m].dim))
            return 0;
    return fsdpi_dt_adds_fit(out);
}

// Computes the placement of input i's gradient: cut as the input is. If the input is replicated,
// and another one is cut or partial, the gradient is partial.
static void fsdpi_dt_grad_of(const fsdpi_dt_op *o, int i, fsdp_spec *grad) {
    for (int m = 0; m < grad->mesh_ndim; m++) {
        fsdp_placement *p = &grad->place[m];
        if (p->kind == FSDP_SHARD) continue;
        int adds = p->kind == FSDP_REPLICATE && o->chosen[m] != o->rows;
        memset(p, 0, sizeof *p);
        if (adds) p->kind = FSDP_PARTIAL;
    }
    if (o->op == FSDP_TENSOR_OP_EMBEDDING && i == 1) memset(grad, 0, sizeof *grad); // no gradient
}

// Compares the candidate with the best so far, and keeps the better one.
static fsdp_status fsdpi_dt_weigh(fsdpi_dt_op *o, void *scratch, fsdp_propagation *best) {
    fsdp_propagation c;
    fsdp_route route;
    int changes = 0, adds = 0;
    int64_t sum = 0;
    memset(&c, 0, sizeof c);
    fsdpi_dt_spec_of(o, -1, &c.out);
    if (!fsdpi_dt_out_fits(o, &c.out)) return FSDP_OK;
    for (int i = 0; i < o->num_in; i++) {
        fsdpi_dt_spec_of(o, i, &c.in[i]);
        if (!fsdpi_dt_fits(o, i, &c.in[i])) return FSDP_OK;
        for (int m = 0; m < o->mesh_ndim; m++)
            changes += memcmp(&o->in[i]->place[m], &c.in[i].place[m], sizeof c.in[i].place[m]) != 0;
        c.grad[i] = c.in[i];
        fsdpi_dt_grad_of(o, i, &c.grad[i]);
    }
    for (int i = 0; i < o->num_in; i++) {
        int64_t ps = 0;
        if (!memcmp(o->in[i], &c.in[i], sizeof c.in[i])) continue;
        fsdp_status status = fsdpi_dt_route(o->in[i], &c.in[i], &o->links, scratch, FSDPI_DT_STACK,
                                            &route, &ps);
        if (status) return status;
        sum += ps;
    }
    for (int m = 0; m < o->mesh_ndim; m++) {
        adds += c.out.place[m].kind == FSDP_PARTIAL;
        c.masked |= o->chosen[m]->flags & FSDPI_DT_MASKED;
    }
    int better = sum != o->best_ps            ? sum < o->best_ps
                 : changes != o->best_changes ? changes < o->best_changes
                                              : adds < o->best_adds;
    if (o->found && !better) return FSDP_OK;
    o->found = 1, o->best_ps = sum, o->best_changes = changes, o->best_adds = adds;
    c.cost_us = (double)sum / 1e6, c.num_in = o->num_in;
    *best = c;
    return fsdpi_dt_check_sizes("propagate", o->mesh_ndim, o->in[0]->mesh_shape, o->in[0]->dtype,
                                o->ndim, o->shape);
}

// Returns 1 if a row may be taken for mesh dim m: an input is placed so already, or it is the first
// row.
static int fsdpi_dt_is_open(const fsdpi_dt_op *o, const fsdpi_dt_row *r, int m) {
    for (int i = 0; i < o->num_in; i++) {
        const fsdp_placement *p = &o->in[i]->place[m];
        if (r->in[i] == FSDPI_DT_ADDS && p->kind == FSDP_PARTIAL) return 1;
        if (r->in[i] >= 0 && fsdpi_dt_cuts(p, r->in[i])) return 1;
    }
    return r == o->rows;
}

// Tries all combinations of rows; the last mesh dim changes fastest.
static fsdp_status fsdpi_dt_choose(fsdpi_dt_op *o, void *scratch, fsdp_propagation *best) {
    int m = 0;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < o->mesh_ndim; i++) o->chosen[i] = o->rows;
    while (m >= 0 && !status) {
        status = fsdpi_dt_weigh(o, scratch, best);
        for (m = o->mesh_ndim - 1; m >= 0; m--) {
            const fsdpi_dt_row *end = o->rows + o->num_rows;
            do o->chosen[m]++;
            while (o->chosen[m] < end && !fsdpi_dt_is_open(o, o->chosen[m], m));
            if (o->chosen[m] < end) break;
            o->chosen[m] = o->rows;
        }
    }
    return status;
}

// Orders all mesh dims so that each dim's cuts in a spec appear in the order in which they are
// made. Repeatedly takes the leftmost mesh dim whose earlier cuts have been taken.
static void fsdpi_dt_order(const fsdp_spec *s, int *order) {
    int taken = 0;
    for (int k = 0; k < s->mesh_ndim; k++)
        for (int m = 0; m < s->mesh_ndim; m++) {
            int ready = !(taken >> m & 1);
            for (int q = 0; q < s->mesh_ndim && s->place[m].kind == FSDP_SHARD; q++)
                if (fsdpi_dt_cuts(&s->place[q], s->place[m].dim) &&
                    s->place[q].order < s->place[m].order)
                    ready &= taken >> q & 1;
            if (!ready) continue;
            order[k] = m, taken |= 1 << m;
            break;
        }
}

static const char *fsdpi_dt_op_name(int op) {
    static const char *const names[FSDP_TENSOR_OP_COUNT] = {
#define FSDP_X(name, text) text,
        FSDP_TENSOR_OP_LIST(FSDP_X)
#undef FSDP_X
    };
    return names[op];
}

static fsdp_status fsdpi_dt_op_begin(fsdpi_dt_op *o, const fsdp_tensor_op_args *args) {
    if (args) o->args = *args;
    for (int i = 0; i < o->num_in; i++) {
        fsdp_status status = fsdpi_dt_known("propagate", o->in[i]);
        if (status) return status;
        if (o->in[i]->mesh_ndim != o->in[0]->mesh_ndim ||
            memcmp(o->in[i]->mesh_shape, o->in[0]->mesh_shape, sizeof o->in[0]->mesh_shape) != 0)
            return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                                 "[E198] propagate: inputs 0 and %d of %s are on different meshes: "
                                 "bring them to one",
                                 i, fsdpi_dt_op_name(o->op));
    }
    o->mesh_ndim = o->in[0]->mesh_ndim;
    if (!fsdpi_dt_rows(o))
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E199] propagate: %d inputs of these shapes and args do not fit %s: see "
            "FSDP_TENSOR_OP_LIST",
            o->num_in, fsdpi_dt_op_name(o->op));
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_propagate(int op, const fsdp_spec *const *in, int num_in,
                                    const fsdp_tensor_op_args *args, const fsdp_links *links,
                                    fsdp_propagation *out) {
    int64_t scratch[FSDPI_DT_STACK / sizeof(int64_t)];
    fsdpi_dt_op o;
    fsdp_propagation best;
    memset(&o, 0, sizeof o), memset(&best, 0, sizeof best);
    if (op < 0 || op >= FSDP_TENSOR_OP_COUNT)
        return fsdpi_dt_fail(FSDP_ERR_UNSUPPORTED,
                             "[E172] propagate: there is no op %d: pass FSDP_TENSOR_OP_MM, ...",
                             op);
    if (!in || !out || num_in < 1 || num_in > FSDP_TENSOR_OP_INPUTS)
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E197] propagate: in or out is NULL, or %d is no number of inputs: pass "
            "1..%d of them",
            num_in, FSDP_TENSOR_OP_INPUTS);
    o.op = op, o.in = in, o.num_in = num_in;
    fsdp_status status = fsdpi_dt_op_begin(&o, args);
    if (!status) status = fsdpi_dt_read_links("propagate", links, &o.links);
    for (int i = 0; i < num_in && !status; i++) { // each distinct order of cuts
        int known[FSDP_MAX_DIMS], again = i > 0;
        memcpy(known, o.order, sizeof known);
        fsdpi_dt_order(in[i], o.order);
        again = again && !memcmp(known, o.order, sizeof known);
        if (!again) status = fsdpi_dt_choose(&o, scratch, &best);
    }
    if (!status) *out = best;
    return status;
}

#endif // FSDPI_DTENSOR_PROPAGATE_H
