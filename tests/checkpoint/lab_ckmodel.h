/* lab_ckmodel.h - models for tests of checkpoints: a net of parameters on any mesh, whose elements
   have arbitrary bits that follow from a seed, a name and the index in the full tensor. So each
   rank of each mesh knows its expected contents. Also file calls that count, wait and fail.

   SPDX-License-Identifier: MIT */
#ifndef LAB_CKMODEL_H
#define LAB_CKMODEL_H
#include "lab.h"

enum { CK_PARAMS = 16, CK_UNITS = 4, CK_NUMBERS = 6 };

typedef struct ck_param {
    int unit;
    const char *name;
    fsdp_dtype dtype;
    int ndim;
    int64_t shape[3];
    int shard_dim, frozen, tp; /* tp: 1 + the dim that tensor parallelism shards; 0: none */
} ck_param;

typedef struct ck_net {
    const ck_param *params; /* parameters of a unit are adjacent */
    int count;
} ck_net;

/* Distribution over ranks. MIXED: the first unit on replicas of shards, the others on all ranks. */
enum { CK_FSDP, CK_HSDP, CK_DDP, CK_MIXED, CK_TP, CK_BUCKETS, CK_HSDP_TP };
enum { CK_NONE, CK_ADAMW, CK_SGD, CK_MOMENTUM };

typedef struct ck_layout {
    const char *name;
    int size, kind, a, b; /* a times b: replicas and shards, or dp and tp; HSDP_TP: see ck_make */
    int64_t cap;          /* BUCKETS: bytes of each bucket */
    int optim, scaler, averages, offload, gather, lanes, processes;
} ck_layout;

typedef struct ck_model {
    const ck_net *net;
    const ck_layout *at;
    lab_rank *r;
    fsdp_world *w;
    fsdp_model *model;
    fsdp_unit *unit[CK_UNITS];
    fsdp_dmesh *dm;
    fsdp_replicate *rep;
    fsdp_adamw *adamw;
    fsdp_sgd *sgd;
    fsdp_grad_scaler *scaler;
    fsdp_checkpoint *ck;
    float *average[CK_PARAMS]; /* states of an extension, in host memory */
    int64_t numel[CK_PARAMS];
    int32_t numbers[CK_NUMBERS];
    int16_t count;
    unsigned char loader[5], rng[3];
    fsdp_checkpoint_blob blobs[2];
} ck_model;

/* ---- a gather extension: the shard unchanged, in two tensors --------------------------------- */

H_FN int ck_gather_sizes(void *user, int64_t shard_numel, int64_t nbytes[FSDP_GATHER_TENSORS]) {
    (void)user;
    nbytes[0] = 4 * shard_numel;
    return 1;
}
H_FN fsdp_status ck_gather_pre(void *user, const fsdp_param_view *v, void *const *strings,
                               void *stream) {
    lib_wait(stream);
    (void)user, (void)stream;
    memcpy(strings[0], v->shard, (size_t)v->numel * 4);
    return FSDP_OK;
}
H_FN fsdp_status ck_gather_post(void *user, const fsdp_param_view *v, const void *const *gathered,
                                void *full, fsdp_dtype dtype, void *stream) {
    lib_wait(stream);
    (void)user, (void)stream, (void)dtype;
    memcpy(full, gathered[0], (size_t)lab_full_numel(v) * 4);
    return FSDP_OK;
}
static const fsdp_gather_extension ck_gather
    __attribute__((unused)) = {ck_gather_sizes, ck_gather_pre, ck_gather_post, NULL};

/* ---- an extension with states of its own ----------------------------------------------------- */

/* An average of each floating parameter; a table and a number that are equal on all ranks. */
H_FN fsdp_status ck_average_item(void *user, fsdp_model *model, int index, fsdp_state_item *item) {
    ck_model *m = (ck_model *)user;
    int of = 0;
    (void)model;
    if (!item) return FSDP_OK;
    for (; of < m->net->count; of++)
        if (m->average[of] && index-- == 0) break;
    item->memory = FSDP_MEMORY_HOST;
    if (of < m->net->count) {
        item->name = "average", item->sharded = 1, item->ordinal = of;
        item->dtype = FSDP_F32, item->data = m->average[of];
    } else if (index == 0) {
        item->name = "table", item->dtype = FSDP_I32, item->ndim = 2;
        item->shape[0] = 2, item->shape[1] = 3, item->numel = CK_NUMBERS;
        item->data = m->numbers;
    } else if (index == 1) {
        item->name = "count", item->dtype = FSDP_BF16, item->numel = 1, item->data = &m->count;
    }
    return FSDP_OK;
}
H_FN void ck_average_relayout(void *user, fsdp_model *model) {
    ck_model *m = (ck_model *)user;
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(model, &v)) m->numel[v.ordinal] = v.numel;
}
H_FN void ck_average_begin(ck_model *m) {
    fsdp_extension e = FSDP_ZERO;
    fsdp_param_view v = FSDP_ZERO;
    e.name = "averages", e.user = m, e.state = ck_average_item, e.relayout = ck_average_relayout;
    CALL(m->w, fsdp_model_commit(m->model));
    while (fsdp_next_param(m->model, &v)) {
        if (v.dtype != FSDP_F32 && v.dtype != FSDP_BF16) continue;
        m->average[v.ordinal] = (float *)lab_zeros((size_t)v.numel, sizeof(float));
    }
    CALL(m->w, fsdp_attach(m->model, &e));
}

/* ---- models ---------------------------------------------------------------------------------- */

H_FN const ck_param *ck_row(const fsdp_param_view *v) { return (const ck_param *)v->user; }

/* Fills in the descs of a unit (negative: of all), with full names if `whole`. */
H_FN int ck_descs(const ck_model *m, int unit, fsdp_param_desc *out, char (*whole)[32]) {
    int count = 0;
    for (int p = 0; p < m->net->count; p++) {
        const ck_param *row = &m->net->params[p];
        if (unit >= 0 && row->unit != unit) continue;
        fsdp_param_desc *d = &out[count];
        *d = lab_desc(row->ndim, row->shape, row->shard_dim, row->dtype, row->frozen);
        d->name = row->name, d->user = (void *)(uintptr_t)row;
        if (whole) {
            snprintf(whole[count], 32, "h.%d.%s", row->unit, row->name);
            d->name = whole[count];
        }
        if (m->at->gather && row->dtype == FSDP_F32 && row->ndim == 2 && !row->shard_dim)
            d->extension = &ck_gather;
        count++;
    }
    return count;
}

H_FN void ck_tp_unit(ck_model *m, int u, const fsdp_param_desc *d, int count, const char *name) {
    fsdp_tp_unit_desc ud = FSDP_ZERO;
    fsdp_placement tp[CK_PARAMS];
    memset(tp, 0, sizeof tp);
    for (int i = 0; i < count; i++) {
        int dim = ((const ck_param *)d[i].user)->tp;
        if (dim) tp[i].kind = FSDP_SHARD, tp[i].dim = (int8_t)(dim - 1);
    }
    ud.unit.params = d, ud.unit.num_params = count, ud.unit.name = name, ud.tp = tp;
    CALL(m->w, fsdp_tp_fully_shard(m->dm, &ud, &m->unit[u]));
}

H_FN void ck_units(ck_model *m) {
    char name[16];
    for (int u = 0; u < CK_UNITS; u++) {
        fsdp_param_desc d[CK_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        int count = ck_descs(m, u, d, NULL);
        if (!count) continue;
        snprintf(name, sizeof name, "h.%d", u);
        ud.params = d, ud.num_params = count, ud.name = name;
        if (m->at->kind == CK_MIXED && u == 0) ud.mesh = lab_hsdp(m->w, m->at->a, m->at->b);
        if (m->dm) ck_tp_unit(m, u, d, count, name);
        else CALL(m->w, fsdp_fully_shard(m->model, &ud, &m->unit[u]));
    }
}

H_FN void ck_make(ck_model *m, lab_rank *r, fsdp_world *w, const ck_net *net, const ck_layout *at) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info ddp;
    memset(m, 0, sizeof *m);
    m->r = r, m->w = w, m->net = net, m->at = at;
    md.cpu_offload = at->offload;
    if (at->kind == CK_HSDP) md.mesh = lab_hsdp(w, at->a, at->b);
    if (at->kind == CK_DDP) {
        fsdp_mesh *mesh;
        CALL(w, fsdp_mesh_1d(w, "dp", &mesh));
        CALL(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &ddp));
        md.mesh_info = &ddp;
    }
    m->model = lab_model(w, &md);
    if (at->kind == CK_TP) {
        fsdp_dmesh_desc dd = FSDP_ZERO;
        dd.mesh = lab_mesh2(w, at->a, at->b, "dp", "tp");
        CALL(w, fsdp_dmesh_create(m->model, &dd, &m->dm));
    }
    if (at->kind == CK_HSDP_TP) { /* a replicas of 2 shards of b parts */
        static const char *const names[] = {"dp_replicate", "dp_shard", "tp"};
        const int32_t shape[] = {at->a, 2, at->b};
        fsdp_dmesh_desc dd = FSDP_ZERO;
        dd.mesh = lab_mesh(w, 3, shape, names, NULL);
        CALL(w, fsdp_dmesh_create(m->model, &dd, &m->dm));
    }
    if (at->kind == CK_BUCKETS) {
        fsdp_replicate_desc rd = FSDP_ZERO;
        fsdp_param_desc d[CK_PARAMS];
        char whole[CK_PARAMS][32];
        rd.params = d, rd.num_params = ck_descs(m, -1, d, whole), rd.bucket_bytes = at->cap;
        CALL(w, fsdp_replicate_create(m->model, &rd, &m->rep));
    } else {
        ck_units(m);
    }
}

H_FN void ck_optimizers(ck_model *m) {
    fsdp_sgd_desc s = fsdp_sgd_defaults();
    if (m->at->optim == CK_ADAMW) CALL(m->w, fsdp_adamw_create(m->model, NULL, &m->adamw));
    if (m->at->optim == CK_MOMENTUM) s.momentum = 0.5;
    if (m->at->optim == CK_SGD || m->at->optim == CK_MOMENTUM)
        CALL(m->w, fsdp_sgd_create(m->model, &s, &m->sgd));
    if (m->at->scaler) CALL(m->w, fsdp_grad_scaler_create(m->model, NULL, &m->scaler));
    if (m->at->averages) ck_average_begin(m);
}

/* Returns a view with its place in the full tensor. */
H_FN fsdp_param_view ck_whole(const ck_model *m, const fsdp_param_view *v) {
    fsdp_param_view out = *v;
    if (m->dm) CALL(m->w, fsdp_tp_view(m->dm, v, &out));
    return out;
}
H_FN void ck_place(void *user, const fsdp_param_view *v, fsdp_checkpoint_place *place) {
    const ck_model *m = (const ck_model *)user;
    fsdp_param_view whole = ck_whole(m, v);
    for (int d = 0; d < v->ndim; d++) {
        place->shape[d] = whole.shape[d];
        place->start[d] = whole.start[d] - v->start[d];
    }
}

/* like NULL: two blobs, no fsync. */
H_FN void ck_open(ck_model *m, const fsdp_checkpoint_desc *like) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    if (like) d = *like;
    else d.num_blobs = 2, d.no_sync = 1;
    m->blobs[0].name = "loader", m->blobs[0].data = m->loader;
    m->blobs[0].nbytes = sizeof m->loader;
    m->blobs[1].name = "rng", m->blobs[1].data = m->rng, m->blobs[1].nbytes = sizeof m->rng;
    m->blobs[1].per_rank = 1;
    if (d.num_blobs && !d.blobs) d.blobs = m->blobs;
    if (m->dm) d.place = ck_place, d.user = m;
    if (m->at->kind == CK_BUCKETS) d.param_names = 1;
    CALL(m->w, fsdp_checkpoint_create(m->model, &d, &m->ck));
}
H_FN void ck_begin(ck_model *m, lab_rank *r, fsdp_world *w, const ck_net *net,
                   const ck_layout *at) {
    ck_make(m, r, w, net, at);
    ck_optimizers(m);
    ck_open(m, NULL);
}
H_FN void ck_end(ck_model *m) {
    fsdp_model_destroy(m->model);
    for (int p = 0; p < CK_PARAMS; p++) free(m->average[p]);
}

/* ---- contents -------------------------------------------------------------------------------- */

enum { CK_FILL, CK_CHECK, CK_DIGEST, CK_BYTES };

typedef struct ck_visit {
    int what;
    uint64_t seed;
    int64_t step;    /* CHECK: expected step of states; -1: by the seed */
    uint64_t digest; /* DIGEST */
    int64_t bytes;   /* BYTES: of files, that this rank needs */
} ck_visit;

H_FN uint64_t ck_name_hash(const char *name) {
    uint64_t h = 14695981039346656037u;
    lab_fold(&h, name, strlen(name));
    return h;
}

/* Visits an array of this rank. v NULL: it is equal on all ranks; otherwise element k is the
   view's. */
H_FN void ck_array(const ck_model *m, ck_visit *t, const char *name, fsdp_dtype dtype, int memory,
                   void *data, int64_t numel, const fsdp_param_view *v) {
    const size_t size = fsdp_dtype_size(dtype), nbytes = (size_t)numel * size;
    const uint64_t h = ck_name_hash(name);
    char *copy = (char *)lab_zeros(nbytes, 1);
    if (t->what == CK_BYTES) t->bytes += (int64_t)nbytes;
    if (t->what == CK_BYTES || !numel) {
        free(copy);
        return;
    }
    if (t->what != CK_FILL && memory == FSDP_MEMORY_HOST) memcpy(copy, data, nbytes);
    else if (t->what != CK_FILL) CALL(m->w, fsdp_transfer(m->model, copy, data, (int64_t)nbytes));
    if (t->what == CK_DIGEST) lab_fold(&t->digest, copy, nbytes);
    for (int64_t k = 0; k < numel && t->what != CK_DIGEST; k++) {
        int64_t at = v ? fsdp_view_index(v, k) : k;
        uint64_t bits = lab_hash(t->seed, h, (uint64_t)at, 0);
        if (t->what == CK_FILL) memcpy(copy + (size_t)k * size, &bits, size);
        else
            W_CHECK(!memcmp(copy + (size_t)k * size, &bits, size),
                    "'%s': element %lld of seed %llu has other bits", name, (long long)at,
                    (unsigned long long)t->seed);
    }
    if (t->what == CK_FILL && memory == FSDP_MEMORY_HOST) memcpy(data, copy, nbytes);
    else if (t->what == CK_FILL) CALL(m->w, fsdp_transfer(m->model, data, copy, (int64_t)nbytes));
    free(copy);
}

/* Visits a step, or the five numbers of the scaler, which do not allow every bit pattern. */
H_FN void ck_number(ck_visit *t, const char *name, void *data, int scaler) {
    const uint64_t h = lab_hash(t->seed, ck_name_hash(name), 0, 0);
    double five[5] = {0, 2, 0.5, 2000, 0};
    int64_t step = t->step >= 0 ? t->step : (int64_t)(h % 100000);
    five[0] = (double)((uint64_t)1 << (h % 30)), five[4] = (double)(h % 1999);
    const void *want = scaler ? (const void *)five : (const void *)&step;
    const size_t nbytes = scaler ? sizeof five : sizeof step;
    if (t->what == CK_BYTES) t->bytes += (int64_t)nbytes;
    if (t->what == CK_FILL) memcpy(data, want, nbytes);
    if (t->what == CK_DIGEST) lab_fold(&t->digest, data, nbytes);
    if (t->what == CK_CHECK)
        W_CHECK(!memcmp(data, want, nbytes), "'%s' of seed %llu: %g, expected %g", name,
                (unsigned long long)t->seed, scaler ? *(double *)data : (double)*(int64_t *)data,
                scaler ? five[0] : (double)step);
}

H_FN void ck_visit_params(const ck_model *m, ck_visit *t) {
    fsdp_param_view v = FSDP_ZERO;
    char name[64];
    while (fsdp_next_param(m->model, &v)) {
        fsdp_param_view whole = ck_whole(m, &v);
        snprintf(name, sizeof name, "h.%d.%s", ck_row(&v)->unit, ck_row(&v)->name);
        ck_array(m, t, name, v.dtype, FSDP_MEMORY_DEVICE, v.shard, v.numel, &whole);
    }
}
H_FN void ck_visit_states(const ck_model *m, ck_visit *t) {
    fsdp_state_item item;
    char name[128];
    memset(&item, 0, sizeof item);
    for (;;) {
        fsdp_param_view v = FSDP_ZERO, whole;
        CALL(m->w, fsdp_next_state(m->model, &item));
        if (!item.name) return;
        snprintf(name, sizeof name, "%s.%s", item.extension, item.name);
        if (item.ordinal >= 0) {
            CALL(m->w, fsdp_param_at(m->model, item.ordinal, &v));
            whole = ck_whole(m, &v);
            snprintf(name, sizeof name, "h.%d.%s.%s", ck_row(&v)->unit, ck_row(&v)->name,
                     item.name);
        }
        if (item.ordinal >= 0 && !lab_full_numel(&v)) continue; /* such a state is in no file */
        if (!strcmp(item.name, "step")) ck_number(t, name, item.data, 0);
        else if (!strcmp(item.extension, "grad_scaler")) ck_number(t, name, item.data, 1);
        else
            ck_array(m, t, name, item.dtype, item.memory, item.data, item.numel,
                     item.sharded ? &whole : NULL);
    }
}
H_FN void ck_visit_blobs(ck_model *m, ck_visit *t, int per_rank) {
    char name[32];
    snprintf(name, sizeof name, "rng.%d", fsdp_rank(m->w));
    ck_array(m, t, "loader", FSDP_U8, FSDP_MEMORY_HOST, m->loader, sizeof m->loader, NULL);
    if (per_rank) ck_array(m, t, name, FSDP_U8, FSDP_MEMORY_HOST, m->rng, sizeof m->rng, NULL);
}

H_FN void ck_fill(ck_model *m, uint64_t seed) {
    ck_visit t = {CK_FILL, seed, -1, 0, 0};
    CALL(m->w, fsdp_params_writable(m->model));
    ck_visit_params(m, &t);
    ck_visit_states(m, &t);
    ck_visit_blobs(m, &t, 1);
    CALL(m->w, fsdp_state_loaded(m->model));
    CALL(m->w, fsdp_params_changed(m->model));
}
H_FN void ck_check_params(const ck_model *m, uint64_t seed) {
    ck_visit t = {CK_CHECK, seed, -1, 0, 0};
    ck_visit_params(m, &t);
}
/* same_size: each rank's blobs were loaded as well. */
H_FN void ck_check(ck_model *m, uint64_t seed, int same_size) {
    ck_visit t = {CK_CHECK, seed, -1, 0, 0};
    ck_visit_params(m, &t);
    ck_visit_states(m, &t);
    ck_visit_blobs(m, &t, same_size);
}
H_FN uint64_t ck_digest(ck_model *m) {
    ck_visit t = {CK_DIGEST, 0, -1, 1, 0};
    ck_visit_params(m, &t);
    ck_visit_states(m, &t);
    ck_visit_blobs(m, &t, 1);
    return t.digest;
}
/* Returns the bytes of files that a load on this rank needs. */
H_FN int64_t ck_bytes(ck_model *m, int same_size) {
    ck_visit t = {CK_BYTES, 0, -1, 0, 0};
    ck_visit_params(m, &t);
    ck_visit_states(m, &t);
    ck_visit_blobs(m, &t, same_size);
    return t.bytes;
}
/* Returns the bytes of all tensors of a net with AdamW, and of the blobs of `size` ranks. */
H_FN int64_t ck_total(const ck_net *net, int size) {
    int64_t bytes = 5 + 3 * (int64_t)size;
    for (int p = 0; p < net->count; p++) {
        const ck_param *x = &net->params[p];
        int64_t numel = lab_numel(x->ndim, x->shape);
        bytes += numel * (int64_t)fsdp_dtype_size(x->dtype);
        if (!x->frozen && numel) bytes += 2 * numel * (x->dtype == FSDP_F64 ? 8 : 4) + 8;
    }
    return bytes;
}

H_FN fsdp_checkpoint_report ck_report(const ck_model *m) {
    fsdp_checkpoint_report report;
    CALL(m->w, fsdp_checkpoint_last_report(m->ck, &report));
    return report;
}
H_FN void ck_save(ck_model *m, const char *dir, int64_t step) {
    CALL(m->w, fsdp_checkpoint_save(m->ck, dir, step));
}
/* Returns DIR/step-NNNNNNNN. */
H_FN const char *ck_step_path(const char *dir, int64_t step) {
    static __thread char path[FSDP_CHECKPOINT_PATH];
    snprintf(path, sizeof path, "%s/step-%08lld", dir, (long long)step);
    return path;
}
H_FN void ck_load(ck_model *m, const char *dir, int64_t step, int verify) {
    fsdp_checkpoint_load_desc d = FSDP_ZERO;
    d.verify = verify;
    CALL(m->w, fsdp_checkpoint_load(m->ck, ck_step_path(dir, step), &d));
}

/* ---- files ----------------------------------------------------------------------------------- */

/* Returns a file's contents and size, or NULL if it does not exist. The caller frees them. */
H_FN char *ck_slurp(const char *path, int64_t *nbytes) {
    FILE *f = fopen(path, "rb");
    *nbytes = 0;
    if (!f) return NULL;
    CHECK(!fseek(f, 0, SEEK_END));
    *nbytes = ftell(f);
    rewind(f);
    char *text = (char *)lab_zeros((size_t)*nbytes + 1, 1);
    CHECK_EQ_INT(fread(text, 1, (size_t)*nbytes, f), *nbytes);
    fclose(f);
    return text;
}
H_FN void ck_spit(const char *path, const void *text, int64_t nbytes) {
    FILE *f = fopen(path, "wb");
    CHECK_MSG(f != NULL, "%s", path);
    CHECK_EQ_INT(fwrite(text, 1, (size_t)nbytes, f), nbytes);
    CHECK(!fclose(f));
}
H_FN int ck_exists(const char *path) {
    struct stat st;
    return !stat(path, &st);
}
/* Returns the number of names in a directory, or -1 if it does not exist. */
H_FN int ck_num_names(const char *path) {
    DIR *dir = opendir(path);
    int count = 0;
    if (!dir) return -1;
    for (struct dirent *e; (e = readdir(dir)) != NULL;)
        count += strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0;
    closedir(dir);
    return count;
}
H_FN const char *ck_shard_path(const char *dir, int64_t step, int rank) {
    static __thread char path[FSDP_CHECKPOINT_PATH + 64];
    snprintf(path, sizeof path, "%s/shard-%05d-model-00001-of-00001.safetensors",
             ck_step_path(dir, step), rank + 1);
    return path;
}
/* Returns a directory of this test: all ranks get the same name. */
H_FN const char *ck_dir(char out[512], const char *name) {
    snprintf(out, 512, "%s/%s", h_tmpdir(), name);
    return out;
}

/* ---- file calls of a test -------------------------------------------------------------------- */

/* The system's file calls. `before` sees each call; if it returns an errno value, the call fails
   with it. */
typedef struct ck_files {
    int (*before)(struct ck_files *f, const char *call, const char *path);
    void *user;
    int64_t calls, written, read; /* bytes */
    int rank;
} ck_files;
typedef struct ck_file {
    int fd;
    char path[FSDP_CHECKPOINT_PATH];
} ck_file;

H_FN int ck_ask(void *user, const char *call, const char *path) {
    ck_files *f = (ck_files *)user;
    __atomic_add_fetch(&f->calls, 1, __ATOMIC_SEQ_CST);
    return f->before ? f->before(f, call, path) : 0;
}
H_FN int ck_f_open(void *user, const char *path, int create, void **file, int64_t *nbytes) {
    struct stat st;
    int error = ck_ask(user, create ? "create" : "open", path);
    if (error) return error;
    int fd = open(path, create ? O_WRONLY | O_CREAT | O_EXCL : O_RDONLY | O_NONBLOCK, 0666);
    if (fd < 0) return errno;
    if (fstat(fd, &st) || !S_ISREG(st.st_mode)) {
        close(fd);
        return EINVAL;
    }
    ck_file *f = (ck_file *)lab_zeros(1, sizeof *f);
    f->fd = fd, *nbytes = (int64_t)st.st_size, *file = f;
    snprintf(f->path, sizeof f->path, "%s", path);
    return 0;
}
H_FN int ck_f_read(void *user, void *file, void *data, int64_t nbytes, int64_t at, int64_t *done) {
    ck_file *f = (ck_file *)file;
    int error = ck_ask(user, "read", f->path);
    ssize_t n = error ? 0 : pread(f->fd, data, (size_t)nbytes, (off_t)at);
    *done = n < 0 ? 0 : (int64_t)n;
    __atomic_add_fetch(&((ck_files *)user)->read, *done, __ATOMIC_SEQ_CST);
    return error ? error : n < 0 ? errno : 0;
}
H_FN int ck_f_write(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                    int64_t *done) {
    ck_file *f = (ck_file *)file;
    int error = ck_ask(user, "write", f->path);
    ssize_t n = error ? 0 : pwrite(f->fd, data, (size_t)nbytes, (off_t)at);
    *done = n < 0 ? 0 : (int64_t)n;
    __atomic_add_fetch(&((ck_files *)user)->written, *done, __ATOMIC_SEQ_CST);
    return error ? error : n < 0 ? errno : 0;
}
H_FN int ck_f_sync(void *user, void *file) { return ck_ask(user, "sync", ((ck_file *)file)->path); }
H_FN int ck_f_close(void *user, void *file) {
    ck_file *f = (ck_file *)file;
    int error = ck_ask(user, "close", f->path);
    close(f->fd);
    free(f);
    return error;
}
H_FN int ck_f_make_dir(void *user, const char *path) {
    int error = ck_ask(user, "make_dir", path);
    return error ? error : mkdir(path, 0777) ? errno : 0;
}
H_FN int ck_f_sync_dir(void *user, const char *path) { return ck_ask(user, "sync_dir", path); }
H_FN int ck_f_rename(void *user, const char *from, const char *to) {
    int error = ck_ask(user, "rename", to);
    return error ? error : ck_exists(to) ? EEXIST : rename(from, to) ? errno : 0;
}
H_FN int ck_f_remove(void *user, const char *path, int is_dir) {
    int error = ck_ask(user, "remove", path);
    return error ? error : (is_dir ? rmdir(path) : unlink(path)) ? errno : 0;
}
H_FN int ck_f_list(void *user, const char *path, int (*each)(void *arg, const char *name),
                   void *arg) {
    int error = ck_ask(user, "list", path), stop = 0;
    DIR *dir = error ? NULL : opendir(path);
    if (!dir) return error ? error : errno;
    for (struct dirent *e; !stop && (e = readdir(dir)) != NULL;)
        if (strcmp(e->d_name, ".") != 0 && strcmp(e->d_name, "..") != 0)
            stop = each(arg, e->d_name);
    closedir(dir);
    return 0;
}
static const fsdp_file_ops ck_file_ops __attribute__((unused)) = {
    1,          sizeof(fsdp_file_ops), ck_f_open,     ck_f_read,   ck_f_write,  ck_f_sync,
    ck_f_close, ck_f_make_dir,         ck_f_sync_dir, ck_f_rename, ck_f_remove, ck_f_list};
#endif
