/* lab_tensor.h - helpers for tests of distributed tensors on ranks: a rig, which is one rank of a
   mesh with its tensors and a log of ops; steps that run twice; layers in one process.

   A body gets a rig and uses nothing but its world. So it runs on threads, on processes, with
   worker threads, or in one process as rank 0, while all other ranks hold its data (rig_who).

   SPDX-License-Identifier: MIT */
#ifndef LAB_TENSOR_H
#define LAB_TENSOR_H
#include "lab.h"
#include "sim.h"
#include "lab_bed.h"

/* ---- a rank of a mesh ------------------------------------------------------------------------ */

enum { RIG_MEMORY = 96 };

typedef struct rig {
    bed b;
    sim *s; /* simulates the device and all other ranks; NULL: real ones */
    int ranks, rank;
    uint64_t hash;                  /* hash of the results of the current step: rig_saw */
    const fsdp_redistribution *any; /* a redistribution of dm */
    void *memory[RIG_MEMORY];
    int64_t bytes[RIG_MEMORY];
    int num_memory;
    const void *arg;
} rig;

/* Ways to run a body. */
enum { RIG_RANKS, RIG_SIM_INLINE, RIG_SIM_STREAMS };
typedef struct way {
    const char *name;
    int lanes, processes, played; /* played: RIG_* */
} way;
typedef struct task {
    void (*body)(rig *r);
    const void *arg;
    int ndim;
    int32_t mesh[2];
    int overlap, apart; /* apart: the model shards over dp only */
} task;

/* Replaces the mesh of tensors, without the redistributions of the previous one. */
H_FN void rig_renew(rig *r, int overlap) {
    r->b.overlap = overlap;
    r->any = NULL;
    bed_renew(&r->b);
}

/* Opens a rank of a mesh, on which the model shards and replicates as `info` says. */
H_FN void rig_begin(rig *r, fsdp_world *w, fsdp_mesh *mesh, const fsdp_mesh_info *info, int overlap,
                    sim *s) {
    fsdp_model_desc md = FSDP_ZERO;
    memset(r, 0, sizeof *r);
    r->s = s, r->ranks = fsdp_mesh_size(mesh, -1), r->rank = fsdp_rank(w);
    snprintf(w_case, sizeof w_case, "rank %d of %d", r->rank, fsdp_world_size(w));
    md.mesh_info = info;
    bed_locate(&r->b, w, mesh);
    bed_make(&r->b, info ? &md : NULL, overlap);
    bed_watch(&r->b);
}
/* One dim is "tp"; two are "dp", which shards, and "tp". The ranks of tp are replicas of the model,
   so that its replicated parameters have their groups. */
H_FN void rig_open(rig *r, fsdp_world *w, const task *t, sim *s) {
    static const char *const names[2] = {"dp", "tp"};
    const int both = t->ndim > 1;
    fsdp_mesh *mesh = lab_mesh(w, t->ndim, t->mesh, both ? names : names + 1, NULL);
    fsdp_mesh_info info;
    const int kind = t->apart ? FSDP_MESH_INFO_FSDP
                     : both   ? FSDP_MESH_INFO_HSDP
                              : FSDP_MESH_INFO_DDP;
    CALL(w, fsdp_mesh_info_init(mesh, kind, both ? 0 : -1, t->apart ? -1 : both, &info));
    rig_begin(r, w, mesh, &info, t->overlap, s);
    r->arg = t->arg;
}
H_FN void rig_close(rig *r) {
    for (int i = 0; i < r->num_memory; i++)
        fsdp_free(r->b.model, FSDP_MEMORY_DEVICE, r->memory[i], r->bytes[i]);
    fsdp_model_destroy(r->b.model);
    free(r->b.log.ops);
}

H_FN void rig_on_rank(lab_rank *lr) {
    const task *t = (const task *)lr->arg;
    rig *r = (rig *)lab_zeros(1, sizeof *r);
    rig_open(r, lr->w, t, NULL);
    t->body(r);
    rig_close(r);
    free(r);
}

/* Runs one process as rank 0; all other ranks hold its data. No access may race. */
H_FN void rig_simulate(const task *t, int ranks, int streams) {
    sim s;
    rig *r = (rig *)lab_zeros(1, sizeof *r);
    sim_init(&s, ranks, 0);
    s.checks = ranks < 100, s.async = streams;
    CHECK(sim_open(&s) != NULL);
    rig_open(r, s.world, t, &s);
    t->body(r);
    rig_close(r);
    free(r);
    CHECK_MSG(!s.races, "%d races, first: %s", s.races, s.race);
    CHECK_EQ_INT(sim_close(&s), 0);
}

H_FN void run_task(const way *how, const task *t) {
    lab_how h = FSDP_ZERO;
    int ranks = t->mesh[0] * (t->ndim > 1 ? t->mesh[1] : 1);
    h.lanes = how->lanes, h.processes = how->processes, h.job = "dtensor";
    if (how->played) rig_simulate(t, ranks, how->played == RIG_SIM_STREAMS);
    else lab_run(ranks, &h, rig_on_rank, (void *)(uintptr_t)t);
}
H_FN void run_on(const way *how, int ranks, void (*body)(rig *r)) {
    task t = FSDP_ZERO;
    t.body = body, t.ndim = 1, t.mesh[0] = ranks;
    run_task(how, &t);
}
H_FN void run_with_overlap(const way *how, int ranks, void (*body)(rig *r)) { /* with overlap */
    task t = FSDP_ZERO;
    t.body = body, t.ndim = 1, t.mesh[0] = ranks, t.overlap = 1;
    run_task(how, &t);
}
H_FN void run_on2(const way *how, int rows, int columns, void (*body)(rig *r), const void *arg) {
    task t = FSDP_ZERO;
    t.body = body, t.ndim = 2, t.mesh[0] = rows, t.mesh[1] = columns, t.arg = arg;
    run_task(how, &t);
}

/* Returns the rank whose data rank k holds: this one if all ranks are identical. */
H_FN int rig_who(const rig *r, int k) { return r->s ? r->rank : k; }

/* ---- tensors --------------------------------------------------------------------------------- */

/* rig_own returns device memory that no peer reads; rig_shared, memory that peers read in place. */
H_FN float *rig_own(rig *r, int64_t count) {
    void *ptr;
    const int64_t bytes = (count ? count : 1) * (int64_t)sizeof(float);
    CHECK(r->num_memory < RIG_MEMORY);
    CALL(r->b.w, fsdp_alloc(r->b.model, FSDP_MEMORY_DEVICE, bytes, "a tensor", &ptr));
    r->bytes[r->num_memory] = bytes;
    r->memory[r->num_memory++] = ptr;
    return (float *)ptr;
}
H_FN float *rig_shared(rig *r, int64_t count) {
    void *ptr;
    CALL(r->b.w, fsdp_dmesh_alloc(r->b.dm, count * (int64_t)sizeof(float), &ptr));
    return (float *)ptr;
}

/* Parses "S0 R" for a tensor of up to three dims; a negative size: no such dim. */
H_FN fsdp_spec spec3(const rig *r, const char *words, int64_t a, int64_t b, int64_t c) {
    fsdp_placement place[DIMS];
    fsdp_spec s;
    int64_t shape[3];
    int ndim = 0;
    shape[0] = a, shape[1] = b, shape[2] = c;
    while (ndim < 3 && shape[ndim] >= 0) ndim++;
    memset(place, 0, sizeof place);
    placements(words, NULL, place);
    CHECK_OK(fsdp_spec_init(&s, r->b.ndim, r->b.shape, place, FSDP_F32, ndim, shape));
    return s;
}
H_FN fsdp_spec spec2(const rig *r, const char *words, int64_t a, int64_t b) {
    return spec3(r, words, a, b, -1);
}
H_FN fsdp_spec spec1(const rig *r, const char *words, int64_t a) {
    return spec3(r, words, a, -1, -1);
}

H_FN fsdp_redistribution *redist(rig *r, const char *name, fsdp_spec from, fsdp_spec to) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *out;
    d.name = name, d.from = from, d.to = to;
    CALL(r->b.w, fsdp_redistribution_create(r->b.dm, &d, &out));
    r->any = out;
    return out;
}
H_FN fsdp_redistribution *backward_of(rig *r, fsdp_redistribution *forward, const fsdp_spec *grad) {
    fsdp_redistribution *out;
    CALL(r->b.w, fsdp_redistribution_create_backward(forward, grad, &out));
    return out;
}
H_FN fsdp_redistribution_info info_of(const rig *r, const fsdp_redistribution *x) {
    fsdp_redistribution_info info;
    CALL(r->b.w, fsdp_redistribution_get(x, &info));
    return info;
}
H_FN int64_t routes_of(const rig *r) { return r->any ? (int64_t)info_of(r, r->any).routes : 0; }

H_FN void settle(const rig *r) { lab_settle(r->b.w, r->b.model); }
H_FN void run_redist(const rig *r, fsdp_redistribution *x, float *dst, const float *src) {
    CALL(r->b.w, fsdp_redistribute(x, dst, src));
    settle(r);
}
H_FN void run_async(const rig *r, fsdp_redistribution *x, float *dst, const float *src) {
    CALL(r->b.w, fsdp_redistribute_begin(x, dst, src));
    CALL(r->b.w, fsdp_redistribute_wait(x));
    settle(r);
}

/* Returns -1, 0 or 1, so that sums are exact in any order. */
H_FN float unit_value(int64_t seed, int64_t i) {
    return (float)(int)(lab_hash((uint64_t)seed, (uint64_t)i, 5, 9) % 3) - 1;
}
H_FN float *values(int64_t seed, int64_t count) { /* the caller frees them */
    float *x = (float *)lab_zeros((size_t)count, sizeof *x);
    for (int64_t i = 0; i < count; i++) x[i] = unit_value(seed, i);
    return x;
}
/* Copies this rank's part of a full tensor into `part`, or compares them bit by bit. */
H_FN int64_t put_part(const rig *r, const fsdp_spec *s, const float *whole, float *part) {
    fsdp_local l;
    CHECK_OK(fsdp_spec_local(s, r->b.coord, &l));
    for (int64_t i = 0; i < l.numel; i++) part[i] = whole[whole_index(s, &l, i)];
    return l.numel;
}
H_FN void check_part(const rig *r, const fsdp_spec *s, const float *whole, const float *part,
                     const char *what) {
    fsdp_local l;
    CHECK_OK(fsdp_spec_local(s, r->b.coord, &l));
    for (int64_t i = 0; i < l.numel; i++)
        W_CHECK(lab_bits32(part[i]) == lab_bits32(whole[whole_index(s, &l, i)]) ||
                    (part[i] == 0 && whole[whole_index(s, &l, i)] == 0),
                "%s: element %lld is %g, expected %g", what, (long long)i, (double)part[i],
                (double)whole[whole_index(s, &l, i)]);
}
H_FN void check_same(const float *got, const float *want, int64_t count, const char *what) {
    for (int64_t i = 0; i < count; i++)
        W_CHECK(lab_bits32(got[i]) == lab_bits32(want[i]) || (got[i] == 0 && want[i] == 0),
                "%s: element %lld is %g, expected %g", what, (long long)i, (double)got[i],
                (double)want[i]);
}
H_FN void rig_saw(rig *r, const float *x, int64_t count) {
    lab_fold(&r->hash, x, (size_t)count * sizeof *x);
}

/* ---- ops ------------------------------------------------------------------------------------- */

H_FN const char *records_in(const rig *r, int from, int end, int what) {
    return bed_records(&r->b, from, end, what);
}
H_FN const char *records_from(const rig *r, int from, int what) {
    return records_in(r, from, r->b.log.num, what);
}
/* Counts all collectives: every byte that leaves a rank is in one. */
H_FN int collectives_in(const rig *r, int from, int end) {
    int count = 0;
    for (int i = from; i < end; i++)
        count += r->b.log.ops[i].kind >= FSDP_OP_ALL_GATHER && r->b.log.ops[i].kind <= FSDP_OP_RECV;
    return count;
}

/* Compares all fields except the numbers of ops and steps, and their events. */
H_FN int same_record(const fsdp_op *a, const fsdp_op *b) {
    int same = a->bytes == b->bytes && a->count == b->count && a->kind == b->kind &&
               a->label == b->label && a->stream == b->stream && a->state == b->state &&
               a->dtype == b->dtype && a->out_dtype == b->out_dtype &&
               a->accumulate == b->accumulate && a->in_place == b->in_place &&
               a->redop == b->redop && a->fill == b->fill && a->timed == b->timed &&
               a->pool == b->pool && a->root == b->root && a->group_size == b->group_size &&
               a->comm_number == b->comm_number && a->num_waits == b->num_waits &&
               a->custom == b->custom && lab_same(a->scale, b->scale) &&
               lab_same(a->norm_type, b->norm_type) && a->clip == b->clip &&
               a->list_count == b->list_count && a->slot == b->slot && a->model == b->model &&
               a->unit == b->unit && a->what == b->what && a->what_hash == b->what_hash &&
               a->given == b->given && !memcmp(a->agree, b->agree, sizeof a->agree) &&
               a->comm == b->comm && a->src == b->src && a->dst == b->dst && a->list == b->list &&
               a->src_ptr == b->src_ptr && a->dst_ptr == b->dst_ptr && a->call == b->call;
    for (int i = 0; i < a->num_waits && same; i++) same = a->wait[i].stream == b->wait[i].stream;
    return same;
}
H_FN void check_records_again(const rig *r, int first, int second, int end) {
    CHECK_EQ_INT(second - first, end - second);
    for (int i = 0; i < end - second; i++) {
        const fsdp_op *a = &r->b.log.ops[first + i], *b = &r->b.log.ops[second + i];
        W_CHECK(same_record(a, b),
                "record %d is %s %s of '%s', and was %s %s of '%s', or has other fields", i,
                fsdp_op_name(b->kind), fsdp_op_label(b), b->what, fsdp_op_name(a->kind),
                fsdp_op_label(a), a->what);
    }
}

/* TWICE: the counterpart of compiling once in PyTorch. The second run of a step has the ops and the
   bits of the first one; it allocates nothing and searches no route. Returns the index of the first
   op. */
H_FN int twice(rig *r, void (*step)(rig *r, void *arg), void *arg) {
    fsdp_counters was, now;
    const int first = r->b.log.num;
    r->hash = 1;
    step(r, arg);
    const int second = r->b.log.num;
    const uint64_t bits = r->hash;
    const int64_t routes = routes_of(r);
    CALL(r->b.w, fsdp_model_counters(r->b.model, &was));
    r->hash = 1;
    step(r, arg);
    CALL(r->b.w, fsdp_model_counters(r->b.model, &now));
    check_records_again(r, first, second, r->b.log.num);
    CHECK_EQ_INT((int64_t)(now.allocations - was.allocations), 0);
    CHECK_EQ_INT(routes_of(r), routes);
    W_CHECK(r->hash == bits, "the second run has other bits");
    return first;
}

/* ---- layers in one process ------------------------------------------------------------------- */

/* out (m,n) = or += x (m,k) y (k,n); tx, ty: the factor is transposed. Sums in double. */
H_FN void matmul(float *out, int add, const float *x, int tx, const float *y, int ty, int64_t m,
                 int64_t k, int64_t n) {
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) {
            double sum = add ? (double)out[i * n + j] : 0;
            for (int64_t l = 0; l < k; l++)
                sum += (double)x[tx ? l * m + i : i * k + l] *
                       (double)y[ty ? j * k + l : l * n + j];
            out[i * n + j] = (float)sum;
        }
}
/* Adds b to each row; adds sums of columns to b. b may be NULL. */
H_FN void add_bias(float *x, const float *b, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < rows * n && b; i++) x[i] += b[i % n];
}
H_FN void bias_grad(float *b, const float *dx, int64_t rows, int64_t n) {
    for (int64_t i = 0; i < rows * n && b; i++) b[i % n] += dx[i];
}

/* Computes h = relu(x w1^T + b1), y = h w2^T for each row; the caller adds b2, after the sum over
   ranks. w1 (wide, d), w2 (d, wide). */
H_FN void mlp_forward(const float *w1, const float *b1, const float *w2, const float *x, float *h,
                      float *y, int64_t rows, int64_t d, int64_t wide) {
    matmul(h, 0, x, 0, w1, 1, rows, d, wide);
    add_bias(h, b1, rows, wide);
    for (int64_t i = 0; i < rows * wide; i++) h[i] = h[i] > 0 ? h[i] : 0;
    if (y) matmul(y, 0, h, 0, w2, 1, rows, wide, d);
}
/* Adds to dw1, db1, dw2; stores dx if it is not NULL. dh: memory for rows x wide. */
H_FN void mlp_backward(const float *w1, const float *w2, const float *x, const float *h,
                       const float *dy, float *dh, float *dw1, float *db1, float *dw2, float *dx,
                       int64_t rows, int64_t d, int64_t wide) {
    matmul(dw2, 1, dy, 1, h, 0, d, rows, wide);
    matmul(dh, 0, dy, 0, w2, 0, rows, d, wide);
    for (int64_t i = 0; i < rows * wide; i++) dh[i] = h[i] > 0 ? dh[i] : 0;
    bias_grad(db1, dh, rows, wide);
    matmul(dw1, 1, dh, 1, x, 0, wide, rows, d);
    if (dx) matmul(dx, 0, dh, 0, w1, 0, rows, wide, d);
}
#endif
