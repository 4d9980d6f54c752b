/* lab_dtensor.h - helpers for tests of fsdp_dtensor.h: specs from words and from files, and all
   specs of a mesh.

   SPDX-License-Identifier: MIT */
#ifndef LAB_DTENSOR_H
#define LAB_DTENSOR_H
#include "lab.h"
#include "golden.h"

enum { DIMS = FSDP_MAX_DIMS };

/* ---- specs from words ------------------------------------------------------------------------ */

/* Sets placements from words like "S0 P R", and the orders of the shard placements; order -1
   elsewhere. */
H_FN void placements(const char *words, const int *order, fsdp_placement *place) {
    for (int m = 0; *words; m++) {
        memset(&place[m], 0, sizeof *place);
        if (*words == 'S') {
            place[m].kind = FSDP_SHARD;
            place[m].dim = (int8_t)(*++words - '0');
            place[m].order = (int8_t)(order ? order[m] : 0);
        }
        if (*words == 'P') place[m].kind = FSDP_PARTIAL;
        words++;
        words += *words == ' ';
    }
}

/* Reads a placement from a file: `0 0 0` R, `1 D 0` S(D), `3 0 OP` P, with PyTorch's numbers of
   ops. Returns 0 for any other one, which is strided. */
H_FN int read_placement(golden *g, fsdp_placement *p) {
    static const int8_t ops[] = {FSDP_SUM, FSDP_AVG, FSDP_MAX, FSDP_MIN};
    int64_t kind = golden_int(g), dim = golden_int(g), op = golden_int(g);
    memset(p, 0, sizeof *p);
    if (kind == 1) p->kind = FSDP_SHARD, p->dim = (int8_t)dim;
    if (kind == 3 && op >= 0 && op < 4) p->kind = FSDP_PARTIAL, p->op = ops[op];
    return kind == 0 || kind == 1 || kind == 3;
}

/* Reads `mesh ND shape[ND]` and `tensor N shape[N]`. */
H_FN void read_frame(golden *g, fsdp_spec *frame) {
    if (golden_is(g, "mesh")) {
        frame->mesh_ndim = (int32_t)golden_int(g);
        CHECK_MSG(frame->mesh_ndim >= 1 && frame->mesh_ndim <= DIMS, "%s", g->name);
        for (int m = 0; m < frame->mesh_ndim; m++) frame->mesh_shape[m] = (int32_t)golden_int(g);
    } else if (golden_is(g, "tensor")) {
        frame->ndim = (int32_t)golden_int(g);
        CHECK_MSG(frame->ndim >= 0 && frame->ndim <= DIMS, "%s", g->name);
        golden_ints(g, frame->ndim, frame->shape);
    }
}

H_FN void read_spec(golden *g, const fsdp_spec *frame, fsdp_spec *out) {
    fsdp_placement place[DIMS];
    memset(place, 0, sizeof place);
    for (int m = 0; m < frame->mesh_ndim; m++) read_placement(g, &place[m]);
    for (int m = 0; m < frame->mesh_ndim; m++) {
        int64_t order = golden_int(g);
        if (order >= 0) place[m].order = (int8_t)order;
    }
    CHECK_OK(fsdp_spec_init(out, frame->mesh_ndim, frame->mesh_shape, place, frame->dtype,
                            frame->ndim, frame->shape));
}

/* Steps to the next coordinate, row-major: the last mesh dim moves first. Returns 0 after the
   last one. */
H_FN int next_coord(int ndim, const int32_t *mesh, int32_t *coord) {
    for (int m = ndim - 1; m >= 0; m--) {
        if (++coord[m] < mesh[m]) return 1;
        coord[m] = 0;
    }
    return 0;
}

/* ---- values of local tensors ----------------------------------------------------------------- */

/* Returns the index in the full tensor of element `at` (row-major) of a local one. */
H_FN int64_t whole_index(const fsdp_spec *s, const fsdp_local *l, int64_t at) {
    int64_t index = 0, stride = 1;
    for (int d = s->ndim - 1; d >= 0; d--) {
        index += (l->start[d] + at % l->shape[d]) * stride;
        at /= l->shape[d];
        stride *= s->shape[d];
    }
    return index;
}

/* Returns the partial value at coordinate c of n: all n together reduce to `value`. */
H_FN double addend(double value, int op, int c, int n) {
    if (op == FSDP_MAX) return value - (n - 1 - c);
    if (op == FSDP_MIN) return value + c;
    if (op == FSDP_AVG) return value + 2 * c - (n - 1);
    return c ? value * (c + 1) : value * (1 - (n * (n + 1) / 2 - 1));
}

/* Fills in a rank's local tensor of a full one whose element i is value(i); partial values where
   the spec has a partial placement. */
H_FN void fill_part(const fsdp_spec *s, const int32_t *coord, double (*value)(int64_t),
                    void *part) {
    fsdp_local l;
    CHECK_OK(fsdp_spec_local(s, coord, &l));
    for (int64_t i = 0; i < l.numel; i++) {
        double x = value(whole_index(s, &l, i));
        for (int m = 0; m < s->mesh_ndim; m++)
            if (s->place[m].kind == FSDP_PARTIAL)
                x = addend(x, s->place[m].op, coord[m], s->mesh_shape[m]);
        lab_put(part, s->dtype, i, x);
    }
}

/* ---- all small specs ------------------------------------------------------------------------- */

typedef void each_spec(const fsdp_spec *s, void *arg);

/* Calls `each` for all orders of these shard placements: counts through all numbers 0..count-1,
   and keeps the permutations. */
H_FN void all_orders(int mesh_ndim, const int32_t *mesh, fsdp_placement *place, int ndim,
                     const int64_t *shape, each_spec *each, void *arg) {
    fsdp_spec s;
    int count[DIMS], more = 1;
    memset(count, 0, sizeof count);
    for (int m = 0; m < mesh_ndim; m++)
        if (place[m].kind == FSDP_SHARD) count[place[m].dim]++, place[m].order = 0;
    while (more) {
        int used[DIMS], whole = 1;
        memset(used, 0, sizeof used);
        for (int m = 0; m < mesh_ndim; m++)
            if (place[m].kind == FSDP_SHARD) used[place[m].dim] |= 1 << place[m].order;
        for (int d = 0; d < ndim; d++) whole &= used[d] == (1 << count[d]) - 1;
        if (whole) {
            CHECK_OK(fsdp_spec_init(&s, mesh_ndim, mesh, place, FSDP_F32, ndim, shape));
            each(&s, arg);
        }
        more = 0;
        for (int m = 0; m < mesh_ndim && !more; m++) {
            if (place[m].kind != FSDP_SHARD) continue;
            more = ++place[m].order < count[place[m].dim];
            if (!more) place[m].order = 0;
        }
    }
}

/* Calls `each` for all placements R, P, S(d) of one mesh and shape, in all orders. */
H_FN void all_specs(int mesh_ndim, const int32_t *mesh, int ndim, const int64_t *shape,
                    each_spec *each, void *arg) {
    int choice[DIMS] = {0}, m;
    do {
        fsdp_placement place[DIMS];
        memset(place, 0, sizeof place);
        for (m = 0; m < mesh_ndim; m++)
            if (choice[m] == 1) place[m].kind = FSDP_PARTIAL;
            else if (choice[m] > 1)
                place[m].kind = FSDP_SHARD, place[m].dim = (int8_t)(choice[m] - 2);
        all_orders(mesh_ndim, mesh, place, ndim, shape, each, arg);
        for (m = 0; m < mesh_ndim; m++) {
            if (++choice[m] < ndim + 2) break;
            choice[m] = 0;
        }
    } while (m < mesh_ndim);
}
#endif
