/* lab_bed.h - one rank of a mesh of tensors: its model, the mesh, the dmesh that distributes
   tensors over it, and an observer of ops. Tests of fsdp_dtensor.h begin with one.

       bed b;
       bed_begin(&b, w, lab_mesh2(w, 2, 2, "dp", "tp"), NULL);

   SPDX-License-Identifier: MIT */
#ifndef LAB_BED_H
#define LAB_BED_H
#include "lab.h"
#include "lab_dtensor.h"

typedef struct bed {
    fsdp_world *w;
    fsdp_model *model;
    fsdp_mesh *mesh, *dim[DIMS]; /* dim: slice of each dim */
    fsdp_dmesh *dm;
    int32_t ndim, shape[DIMS], coord[DIMS];
    int overlap, checks; /* checks: number of parts compared */
    fsdp_links links;
    lab_log log; /* after bed_watch */
    int label;   /* label of redistributions */
} bed;

/* Makes a new dmesh, without the redistributions of the previous one. */
H_FN void bed_renew(bed *b) {
    fsdp_dmesh_desc d = FSDP_ZERO;
    fsdp_dmesh_destroy(b->dm);
    d.mesh = b->mesh, d.overlap = b->overlap, d.links = b->links;
    CALL(b->w, fsdp_dmesh_create(b->model, &d, &b->dm));
}

/* Notes this rank's position in a mesh. */
H_FN void bed_locate(bed *b, fsdp_world *w, fsdp_mesh *mesh) {
    memset(b, 0, sizeof *b);
    b->w = w, b->mesh = mesh, b->ndim = fsdp_mesh_ndim(mesh);
    for (int m = 0; m < b->ndim; m++) {
        b->shape[m] = fsdp_mesh_size(mesh, m), b->coord[m] = fsdp_mesh_rank(mesh, m);
        b->dim[m] = lab_slice(w, mesh, m);
    }
}
/* Makes a model and its dmesh. desc NULL: the model shards over dim 0. */
H_FN void bed_make(bed *b, const fsdp_model_desc *desc, int overlap) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    if (!desc) CALL(b->w, fsdp_mesh_info_init(b->mesh, FSDP_MESH_INFO_FSDP, 0, -1, &info));
    md.mesh_info = &info;
    b->model = lab_model(b->w, desc ? desc : &md);
    b->overlap = overlap;
    bed_renew(b);
}
H_FN void bed_begin(bed *b, fsdp_world *w, fsdp_mesh *mesh, const fsdp_model_desc *desc) {
    bed_locate(b, w, mesh);
    bed_make(b, desc, 0);
}
/* Starts the log of the model's ops in b->log. */
H_FN void bed_watch(bed *b) {
    b->label = fsdp_label_register(b->model, "activation");
    lab_watch(&b->log, b->w, b->model);
}

/* Makes a unit whose parameters tensor parallelism shards or replicates. */
H_FN fsdp_unit *bed_unit(bed *b, const fsdp_param_desc *params, const fsdp_placement *tp, int count,
                         int partial) {
    fsdp_tp_unit_desc d = FSDP_ZERO;
    fsdp_unit *unit = NULL;
    d.unit.params = params, d.unit.num_params = count, d.tp = tp, d.partial_grads = partial;
    CALL(b->w, fsdp_tp_fully_shard(b->dm, &d, &unit));
    return unit;
}

/* ---- ops ------------------------------------------------------------------------------------- */

enum { COLLECTIVES, ALL_RECORDS };

/* Returns the ops [from, end) of redistributions as text: "AG 16/2" is an all-gather over 2
   ranks, with 16 elements from each. ALL_RECORDS: local copies and markers, too. */
H_FN const char *bed_records(const bed *b, int from, int end, int what) {
    static const char *const names[] = {"copy", "zero", "norm", "AG", "RS", "AR", "bcast", "A2A"};
    static __thread char text[600];
    size_t used = 0;
    text[0] = 0;
    for (int i = from; i < end; i++) {
        const fsdp_op *op = &b->log.ops[i];
        int wire = op->kind >= FSDP_OP_ALL_GATHER && op->kind <= FSDP_OP_RECV;
        if (op->label != b->label || (what == COLLECTIVES && !wire)) continue;
        used += (size_t)snprintf(
            text + used, sizeof text - used, "%s%s%s %lld", used ? ", " : "",
            op->kind <= FSDP_OP_ALL_TO_ALL ? names[op->kind] : fsdp_op_name(op->kind),
            op->kind == FSDP_OP_ALL_REDUCE && op->redop == FSDP_MAX ? " max" : "",
            (long long)op->count);
        if (wire) used += (size_t)snprintf(text + used, sizeof text - used, "/%d", op->group_size);
        CHECK(used < sizeof text);
    }
    return text;
}
#endif
