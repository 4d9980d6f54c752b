/* test_checkpoint_train.c - checkpoints of a run: it resumes with equal bits; saves during training
   and their memory; ranks with slow disks; and PyTorch's tests of state_dict.

   SPDX-License-Identifier: MIT */
#include "lab_ckmodel.h"

/* ---- a net that is trained ------------------------------------------------------------------- */

static const ck_param net_rows[] = {{0, "w", FSDP_F32, 2, {7, 5}, 0, 0, 0},
                                    {0, "b", FSDP_F32, 1, {7}, 0, 0, 0},
                                    {1, "w", FSDP_F32, 2, {5, 7}, 1, 0, 0},
                                    {1, "frozen", FSDP_F32, 1, {3}, 0, 1, 0},
                                    {2, "w", FSDP_F32, 2, {130, 9}, 0, 0, 0}};
static const ck_net net = {net_rows, 5};
enum { UNITS = 3, STEPS = 20, HALF = 10 };

typedef struct run_case {
    const char *name;
    ck_layout first, second;
    int same;  /* equal bits; otherwise 1e-6 */
    int micro; /* batches of a step; all but the last do not reduce */
} run_case;

static double noise(int step, int micro, int rank, int64_t element) {
    uint64_t h = lab_hash((uint64_t)step, (uint64_t)micro, (uint64_t)rank, (uint64_t)element);
    return (double)(h >> 40) / 16777216.0 - 0.5;
}
static void start_value(void *user, const fsdp_param_view *block) {
    (void)user;
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k,
                noise(-1, (int)strlen(block->name) + ck_row(block)->unit, 0,
                      fsdp_view_index(block, k)));
}

/* Gradients depend on the parameters, the step and, if a run continues on the same mesh, the rank.
   scale: of a scaler; in one of seven steps a gradient is infinite. */
static void batch(ck_model *m, int step, int micro, int by_rank, double scale) {
    fsdp_world *w = m->w;
    for (int u = 0; u < UNITS; u++) lab_forward(w, m->unit[u]);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(w, fsdp_pre_backward(m->unit[u]));
        fsdp_param_view v = FSDP_ZERO;
        while (fsdp_next_param(m->model, &v)) {
            if (v.unit != m->unit[u] || !v.requires_grad) continue;
            const float *data = (const float *)fsdp_data(v.unit, v.index);
            float *grad = (float *)fsdp_grad(v.unit, v.index);
            CHECK(data && grad);
            for (int64_t k = 0; k < lab_full_numel(&v); k++)
                grad[k] += (float)(scale * ((double)data[k] * 0.25 + noise(step, micro,
                                                                           by_rank ? m->r->rank : 0,
                                                                           k + 1000 * v.ordinal)));
            if (m->scaler && step % 7 == 5) grad[0] = (float)LAB_INF;
        }
        CALL(w, fsdp_post_backward(m->unit[u]));
    }
    CALL(w, fsdp_finalize_backward(m->model));
}
static void train_step(ck_model *m, int step, int micro, int by_rank) {
    double scale = fsdp_grad_scaler_scale(m->scaler);
    for (int b = 0; b < micro; b++) {
        CALL(m->w, fsdp_set_requires_gradient_sync(m->model, NULL, b == micro - 1));
        batch(m, step, b, by_rank, scale);
    }
    if (m->scaler) CALL(m->w, fsdp_grad_scaler_unscale(m->scaler));
    if (fsdp_grad_scaler_found_inf(m->scaler) != 1) {
        if (m->adamw) CALL(m->w, fsdp_adamw_step(m->adamw, 0.01));
        if (m->sgd) CALL(m->w, fsdp_sgd_step(m->sgd, 0.05));
    }
    if (m->scaler) CALL(m->w, fsdp_grad_scaler_update(m->scaler));
    CALL(m->w, fsdp_zero_grad(m->model));
}
static void begin_run(ck_model *m, lab_rank *r, fsdp_world *w, const ck_layout *at) {
    fsdp_grad_scaler_desc sd = FSDP_ZERO;
    ck_layout plain = *at;
    plain.scaler = 0;
    ck_make(m, r, w, &net, at);
    m->at = &plain;
    ck_optimizers(m);
    m->at = at;
    sd.growth_interval = 3;
    if (at->scaler) CALL(w, fsdp_grad_scaler_create(m->model, &sd, &m->scaler));
    ck_open(m, NULL);
    CALL(w, fsdp_init_params(m->model, start_value, NULL));
}

/* Keeps all parameters and the scale of a run that was not interrupted. */
static void keep_result(ck_model *m, const char *name) {
    fsdp_param_view v = FSDP_ZERO;
    float *all = (float *)lab_zeros(4096, sizeof *all);
    char path[600];
    int64_t at = 0;
    while (fsdp_next_param(m->model, &v)) {
        CALL(m->w, fsdp_param_full(v.unit, v.index, all + at));
        at += lab_full_numel(&v);
    }
    all[at++] = (float)fsdp_grad_scaler_scale(m->scaler);
    snprintf(path, sizeof path, "%s/%s", h_tmpdir(), name);
    if (m->r->rank == 0) ck_spit(path, all, at * 4);
    free(all);
}
static void same_result(double most) {
    char a[600], b[600];
    int64_t a_bytes, b_bytes;
    snprintf(a, sizeof a, "%s/whole", h_tmpdir());
    snprintf(b, sizeof b, "%s/resumed", h_tmpdir());
    char *x = ck_slurp(a, &a_bytes), *y = ck_slurp(b, &b_bytes);
    CHECK(x && y && a_bytes == b_bytes && a_bytes > 4 * 1000);
    for (int64_t k = 0; k < a_bytes / 4; k++) {
        float p = ((float *)(void *)x)[k], q = ((float *)(void *)y)[k];
        CHECK_MSG(most > 0 ? (double)(p - q) <= most && (double)(q - p) <= most
                           : !memcmp(&p, &q, sizeof p),
                  "parameter %lld: %.9g when resumed, %.9g else", (long long)k, (double)q,
                  (double)p);
    }
    free(x);
    free(y);
}

static void whole_run(lab_rank *r) {
    const run_case *c = (const run_case *)r->arg;
    char dir[512];
    ck_model m;
    fsdp_world *w = lab_world(r, 0, c->first.lanes, NULL);
    begin_run(&m, r, w, &c->first);
    for (int step = 0; step < STEPS; step++) {
        if (step == HALF) ck_save(&m, ck_dir(dir, "run"), step);
        train_step(&m, step, c->micro, c->same);
    }
    keep_result(&m, "whole");
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
}
static void resumed_run(lab_rank *r) {
    const run_case *c = (const run_case *)r->arg;
    char dir[512], path[FSDP_CHECKPOINT_PATH];
    int64_t step;
    ck_model m;
    fsdp_world *w = lab_world(r, 1, c->second.lanes, NULL);
    begin_run(&m, r, w, &c->second);
    train_step(&m, 99, 1, 0); /* any earlier state */
    CALL(w, fsdp_checkpoint_find(m.ck, ck_dir(dir, "run"), -1, path, sizeof path, &step));
    CHECK_EQ_INT(step, HALF);
    CALL(w, fsdp_checkpoint_load(m.ck, path, NULL));
    for (; step < STEPS; step++) train_step(&m, (int)step, c->micro, c->same);
    keep_result(&m, "resumed");
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
}
static void run_as(const ck_layout *at, void (*body)(lab_rank *r), const run_case *c) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1, how.processes = at->processes;
    lab_run(at->size, &how, body, (void *)(uintptr_t)c);
}
#define FSDP(size, optim, scaler, lanes, processes)                                                \
    { "fsdp", size, CK_FSDP, 0, 0, 0, optim, scaler, 0, 0, 0, lanes, processes }
#define HSDP22(optim)                                                                              \
    { "hsdp", 4, CK_HSDP, 2, 2, 0, optim, 0, 0, 0, 0, 0, 0 }
static const run_case runs[] = {
    {"adamw/inline", FSDP(2, CK_ADAMW, 0, 0, 0), FSDP(2, CK_ADAMW, 0, 0, 0), 1, 1},
    {"adamw/lanes", FSDP(3, CK_ADAMW, 0, 2, 0), FSDP(3, CK_ADAMW, 0, 2, 0), 1, 1},
    {"adamw/inline_to_lane", FSDP(2, CK_ADAMW, 0, 0, 0), FSDP(2, CK_ADAMW, 0, 1, 0), 1, 1},
    {"adamw/processes", FSDP(2, CK_ADAMW, 0, 0, 1), FSDP(2, CK_ADAMW, 0, 0, 1), 1, 1},
    {"momentum/inline", FSDP(2, CK_MOMENTUM, 0, 0, 0), FSDP(2, CK_MOMENTUM, 0, 0, 0), 1, 1},
    {"sgd/inline", FSDP(2, CK_SGD, 0, 0, 0), FSDP(2, CK_SGD, 0, 0, 0), 1, 1},
    {"scaler/inline", FSDP(2, CK_ADAMW, 1, 0, 0), FSDP(2, CK_ADAMW, 1, 0, 0), 1, 1},
    {"scaler/lanes", FSDP(2, CK_MOMENTUM, 1, 2, 0), FSDP(2, CK_MOMENTUM, 1, 2, 0), 1, 2},
    {"accumulation/inline", FSDP(3, CK_ADAMW, 0, 0, 0), FSDP(3, CK_ADAMW, 0, 0, 0), 1, 3},
    {"hsdp/inline", HSDP22(CK_ADAMW), HSDP22(CK_ADAMW), 1, 1},
    {"1_to_3", FSDP(1, CK_ADAMW, 0, 0, 0), FSDP(3, CK_ADAMW, 0, 0, 0), 0, 1},
    {"4_to_2", FSDP(4, CK_MOMENTUM, 1, 0, 0), FSDP(2, CK_MOMENTUM, 1, 0, 0), 0, 2},
    {"3_to_hsdp", FSDP(3, CK_ADAMW, 0, 0, 0), HSDP22(CK_ADAMW), 0, 1},
    {"hsdp_to_1", HSDP22(CK_SGD), FSDP(1, CK_SGD, 0, 0, 0), 0, 1},
};
TEST_P(checkpoint_run, resumes, runs) {
    run_as(&row->first, whole_run, row);
    run_as(&row->second, resumed_run, row);
    same_result(row->same ? 0 : 1e-6);
}

/* ---- saves during training ------------------------------------------------------------------- */

static const ck_param large_rows[] = {{0, "w", FSDP_F32, 2, {6001, 100}, 0, 0, 0},
                                      {1, "b", FSDP_BF16, 1, {77}, 0, 0, 0},
                                      {2, "w", FSDP_F32, 2, {50, 100}, 1, 0, 0}};
static const ck_net large = {large_rows, 3};
static const ck_net small = {net_rows, 5};

typedef struct async_case {
    const char *name;
    const ck_net *net;
    ck_layout at;
    int64_t stage; /* -1: as many bytes as this rank writes */
} async_case;
static const async_case asyncs[] = {
    {"all/W=1", &large, FSDP(1, CK_ADAMW, 0, 0, 0), 0},
    {"all/W=3", &large, FSDP(3, CK_ADAMW, 1, 0, 0), 0},
    {"all/hsdp", &large, HSDP22(CK_ADAMW), 0},
    {"all/lanes", &small, FSDP(2, CK_MOMENTUM, 1, 2, 0), 0},
    {"all/processes", &large, FSDP(2, CK_ADAMW, 0, 1, 1), 0},
    {"exact/W=2", &large, FSDP(2, CK_ADAMW, 0, 0, 0), -1},
    {"4MiB/W=1", &large, FSDP(1, CK_ADAMW, 0, 0, 0), 4 << 20},
    {"1MiB/W=2", &large, FSDP(2, CK_ADAMW, 0, 0, 0), 1 << 20},
    {"odd/W=2", &large, FSDP(2, CK_ADAMW, 0, 0, 0), 99991},
    {"bytes/W=2", &small, FSDP(2, CK_ADAMW, 0, 0, 0), 7},
};

/* The worker waits at its first write until all ranks have set a mark. */
typedef struct gate {
    int place, count, closed;
} gate;
static int wait_at_gate(ck_files *f, const char *call, const char *path) {
    gate *g = (gate *)f->user;
    (void)path;
    if (g && g->closed && !strcmp(call, "write")) h_await_marks(g->place, g->count);
    return 0;
}
static void open_gated(ck_model *m, ck_files *files, gate *g, int64_t stage) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    memset(files, 0, sizeof *files);
    files->before = wait_at_gate, files->user = g;
    d.no_sync = 1, d.num_blobs = 2, d.stage_bytes = stage;
    d.files = &ck_file_ops, d.files_user = files;
    ck_open(m, &d);
}

static void async(lab_rank *r) {
    const async_case *c = (const async_case *)r->arg;
    gate g = {0, c->at.size, 1};
    ck_files files;
    char dir[512];
    int busy = 0;
    ck_model m;
    fsdp_world *w = lab_world(r, 0, c->at.lanes, NULL);
    ck_make(&m, r, w, c->net, &c->at);
    ck_optimizers(&m);
    ck_open(&m, NULL);
    ck_fill(&m, 1);
    const int64_t all = fsdp_checkpoint_nbytes(m.ck);
    CHECK(all > 0);
    fsdp_checkpoint_destroy(m.ck);
    const int64_t stage = c->stage < 0 ? all : c->stage;
    open_gated(&m, &files, &g, stage);
    CHECK_EQ_INT(fsdp_checkpoint_nbytes(m.ck), stage > 0 && stage < all ? stage : all);
    /* with a smaller buffer the call must wait for the worker */
    g.closed = stage == 0 || stage >= all;
    CALL(w, fsdp_checkpoint_save_async(m.ck, ck_dir(dir, "run"), 1));
    ck_fill(&m, 2); /* while the save runs */
    if (g.closed)
        for (int k = 0; k < 3; k++) {
            CALL(w, fsdp_checkpoint_poll(m.ck, &busy));
            CHECK_EQ_INT(busy, 1);
            CHECK(!ck_exists(ck_step_path(dir, 1)));
        }
    h_mark(0);
    CALL(w, fsdp_checkpoint_save_async(m.ck, dir, 2)); /* completes the first save */
    CHECK(ck_exists(ck_step_path(dir, 1)));
    ck_fill(&m, 3);
    do CALL(w, fsdp_checkpoint_poll(m.ck, &busy));
    while (busy);
    CHECK(ck_exists(ck_step_path(dir, 2)));
    CHECK_EQ_INT(ck_report(&m).step, 2);
    CHECK_EQ_INT(ck_report(&m).bytes, all);
    CALL(w, fsdp_checkpoint_save_async(m.ck, dir, 3));
    ck_fill(&m, 4);
    ck_save(&m, dir, 4);
    CHECK_EQ_INT(ck_num_names(dir), 4);
    ck_fill(&m, 5);
    CALL(w, fsdp_checkpoint_save_async(m.ck, dir, 5));
    ck_fill(&m, 6);
    for (int step = 5; step >= 1; step--) { /* the first of these loads completes the save */
        ck_load(&m, dir, step, FSDP_VERIFY_ALL);
        ck_check(&m, (uint64_t)step, 1);
    }
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
}
TEST_P(checkpoint_async, values, asyncs, NCCL) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1, how.processes = row->at.processes;
    lab_run(row->at.size, &how, async, (void *)(uintptr_t)row);
}

/* An allocator that knows its maximum. */
typedef struct peak_heap {
    w_heap heap; /* first: it is the user of both functions */
    int64_t peak;
} peak_heap;
static void *peak_alloc(size_t size, size_t align, void *user) {
    peak_heap *h = (peak_heap *)user;
    void *ptr = w_heap_alloc(size, align, &h->heap);
    if (h->heap.live_bytes > h->peak) h->peak = h->heap.live_bytes;
    return ptr;
}
static fsdp_world *peak_world(lab_rank *r, peak_heap *h) {
    fsdp_world_desc d = w_desc(r->rank, r->size, &r->start->threads[0], w_job("peak"), 0);
    fsdp_world *w;
    w_heap_use(&h->heap, &d);
    h->peak = 0;
    d.allocator.alloc = peak_alloc;
    CALL(NULL, fsdp_init(&d, &w));
    return w;
}
/* Returns the maximum of additional bytes during one save, and its number of allocations. */
static int64_t peak_of(ck_model *m, peak_heap *h, int is_async, const char *dir, int step,
                       int64_t *allocations) {
    int64_t before = h->heap.live_bytes, count = w_allocations(&h->heap);
    h->peak = before;
    if (is_async) CALL(m->w, fsdp_checkpoint_save_async(m->ck, dir, step));
    else CALL(m->w, fsdp_checkpoint_save(m->ck, dir, step));
    CALL(m->w, fsdp_checkpoint_wait(m->ck));
    *allocations = w_allocations(&h->heap) - count;
    return h->peak - before;
}
static void memory(lab_rank *r) {
    const async_case *c = (const async_case *)r->arg;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    int64_t count, all, tables, more, copies = 0;
    char dir[512];
    peak_heap h;
    ck_model m;
    fsdp_world *w = peak_world(r, &h);
    ck_make(&m, r, w, c->net, &c->at);
    ck_optimizers(&m);
    ck_open(&m, NULL);
    ck_fill(&m, 1);
    all = fsdp_checkpoint_nbytes(m.ck);
    fsdp_checkpoint_destroy(m.ck);
    d.no_sync = 1, d.num_blobs = 2, d.stage_bytes = c->stage < 0 ? all : c->stage;
    ck_open(&m, &d);
    ck_dir(dir, "run");
    tables = peak_of(&m, &h, 0, dir, 1, &count);
    if (lib_on_streams(w)) { /* at most two pieces */
        copies = d.stage_bytes ? d.stage_bytes : 8 << 20;
        if (copies > all) copies = all;
    } /* no copies in host memory */
    CHECK_MSG(tables - copies < 100000 && tables >= copies, "a save took %lld bytes",
              (long long)tables);
    CHECK(count > 0);
    CHECK_EQ_INT(peak_of(&m, &h, 0, dir, 2, &count), 0);
    CHECK_EQ_INT(count, 0);
    more = fsdp_checkpoint_nbytes(m.ck);
    more = more > copies ? more + 64 : 0; /* fsdp_alloc uses 64 bytes before each block */
    CHECK_EQ_INT(peak_of(&m, &h, 1, dir, 3, &count), more);
    CHECK_EQ_INT(count, more > 0);
    for (int step = 4; step < 8; step++) {
        CHECK_EQ_INT(peak_of(&m, &h, step & 1, dir, step, &count), 0);
        CHECK_EQ_INT(count, 0);
    }
    /* A load frees what it allocates: headers, tables, two pieces. */
    int64_t before = h.heap.live_bytes;
    h.peak = before;
    ck_load(&m, dir, 7, FSDP_VERIFY_ALL);
    CHECK_EQ_INT(h.heap.live_bytes, before);
    CHECK_MSG(h.peak - before <= 8 << 20, "a load took %lld bytes", (long long)(h.peak - before));
    ck_load(&m, dir, 6, FSDP_VERIFY_NONE);
    CHECK_EQ_INT(h.heap.live_bytes, before);
    ck_check(&m, 1, 1);
    /* A file call that fails, or lack of memory, leaks nothing. */
    for (int64_t n = 0; n < 4; n++) {
        w_fail(&h.heap, r->rank == 0 ? n : -1);
        fsdp_status status = fsdp_checkpoint_load(m.ck, ck_step_path(dir, 7), NULL);
        CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
        CHECK(strstr(fsdp_last_error(w), "checkpoint: no memory") != NULL);
        w_fail(&h.heap, -1);
        CHECK_EQ_INT(h.heap.live_bytes, before);
    }
    before = h.heap.live;
    fsdp_checkpoint_destroy(m.ck);
    CHECK(h.heap.live < before);
    count = h.heap.live;
    ck_open(&m, NULL); /* destroying an object frees all of its memory */
    fsdp_checkpoint_destroy(m.ck);
    CHECK_EQ_INT(h.heap.live, count);
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
}
static const async_case memories[] = {
    {"all/W=1", &large, FSDP(1, CK_ADAMW, 0, 0, 0), 0},
    {"all/W=2", &large, FSDP(2, CK_ADAMW, 0, 0, 0), 0},
    {"exact/W=2", &large, FSDP(2, CK_ADAMW, 0, 0, 0), -1},
    {"4MiB/W=1", &large, FSDP(1, CK_ADAMW, 0, 0, 0), 4 << 20},
    {"small/W=3", &large, FSDP(3, CK_ADAMW, 0, 0, 0), 5000},
};
TEST_P(checkpoint_async, memory, memories) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1;
    lab_run(row->at.size, &how, memory, (void *)(uintptr_t)row);
}

/* A save without a wait is abandoned; a failed one is reported by poll or wait, on all ranks. */
static int fail_second(ck_files *f, const char *call, const char *path) {
    (void)path;
    return f->user && f->rank == 1 && !strcmp(call, "write") ? ENOSPC : 0;
}
static void given_up(lab_rank *r) {
    static const ck_layout at = FSDP(2, CK_ADAMW, 0, 0, 0);
    fsdp_checkpoint_desc d = FSDP_ZERO;
    gate g = {0, 2, 1};
    ck_files files;
    char dir[512], path[700];
    int64_t step;
    int busy = 1;
    fsdp_status status = FSDP_OK;
    ck_model m;
    ck_make(&m, r, r->w, &small, &at);
    ck_optimizers(&m);
    open_gated(&m, &files, &g, 0);
    ck_fill(&m, 1);
    CALL(r->w, fsdp_checkpoint_save_async(m.ck, ck_dir(dir, "run"), 1));
    h_mark(0);
    fsdp_checkpoint_destroy(m.ck);
    CALL(r->w, fsdp_barrier(r->w));
    CHECK_EQ_INT(ck_num_names(dir), 1); /* the one that begins with a dot */
    CHECK(!ck_exists(ck_step_path(dir, 1)));
    memset(&files, 0, sizeof files);
    files.before = fail_second, files.rank = r->rank, files.user = &files;
    d.files = &ck_file_ops, d.files_user = &files, d.keep = 1, d.num_blobs = 2;
    ck_open(&m, &d);
    CALL(r->w, fsdp_checkpoint_find(m.ck, dir, -1, path, sizeof path, &step));
    CHECK_EQ_INT(step, -1);
    CALL(r->w, fsdp_checkpoint_save_async(m.ck, dir, 2));
    while (!status && busy) status = fsdp_checkpoint_poll(m.ck, &busy);
    CHECK_STATUS(status, FSDP_ERR_IO);
    CHECK_EQ_INT(busy, 0);
    W_CHECK(strstr(fsdp_last_error(r->w), "rank 1: [E423] checkpoint_poll: write of "), "%s",
            fsdp_last_error(r->w));
    CALL(r->w, fsdp_checkpoint_save_async(m.ck, dir, 3));
    REFUSED_AS(FSDP_ERR_IO, r->w, fsdp_checkpoint_wait(m.ck),
               "rank 1: [E423] checkpoint_wait: write of ");
    CALL(r->w, fsdp_checkpoint_wait(m.ck));
    CALL(r->w, fsdp_barrier(r->w));
    CHECK_EQ_INT(ck_num_names(dir), 1);
    fsdp_checkpoint_destroy(m.ck);
    d.stage_bytes = 64; /* the worker fails while the call still copies, or shortly after */
    ck_open(&m, &d);
    status = fsdp_checkpoint_save_async(m.ck, dir, 3);
    if (!status) status = fsdp_checkpoint_wait(m.ck);
    CHECK_STATUS(status, FSDP_ERR_IO);
    CALL(r->w, fsdp_barrier(r->w));
    CHECK_EQ_INT(ck_num_names(dir), 1);
    files.user = NULL;
    CALL(r->w, fsdp_checkpoint_save_async(m.ck, dir, 4));
    CALL(r->w, fsdp_checkpoint_wait(m.ck));
    CHECK_EQ_INT(ck_num_names(dir), 1); /* with keep, the rest is removed */
    ck_fill(&m, 2);
    ck_load(&m, dir, 4, FSDP_VERIFY_ALL);
    ck_check(&m, 1, 1);
    CALL(r->w, fsdp_checkpoint_save_async(m.ck, dir, 5));
    ck_end(&m); /* destroying the model also abandons it */
}
TEST(checkpoint_async, given_up) { lab_run(2, NULL, given_up, NULL); }

/* ---- slow disks ------------------------------------------------------------------------------ */

enum { DEADLINE_MS = 1000 };
typedef struct slow {
    const char *call;
    int rank, times; /* times: remaining calls */
} slow;
static int dawdle(ck_files *f, const char *call, const char *path) {
    slow *s = (slow *)f->user;
    int64_t end = h_now_ms() + 5 * DEADLINE_MS;
    (void)path;
    if (f->rank != s->rank || s->times <= 0 || strcmp(call, s->call) != 0) return 0;
    s->times--;
    while (h_now_ms() < end) w_sleep_ns(10000000);
    return 0;
}
static fsdp_world *hasty_world(lab_rank *r, int timeout_ms) {
    fsdp_world_desc d = w_desc(r->rank, r->size, &r->start->threads[0], w_job("slow"), 0);
    fsdp_world *w;
    d.timeout_ms = timeout_ms;
    CALL(NULL, fsdp_init(&d, &w));
    return w;
}
static void open_slow(ck_model *m, lab_rank *r, ck_files *files, slow *s, int stall_ms) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    memset(files, 0, sizeof *files);
    files->before = dawdle, files->rank = r->rank, files->user = s;
    d.num_blobs = 2, d.files = &ck_file_ops, d.files_user = files, d.stall_ms = stall_ms;
    ck_open(m, &d);
}
static const slow slow_calls[] = {
    {"write", 1, 1}, {"sync", 2, 1}, {"rename", 0, 1}, {"read", 1, 1}, {"open", 0, 1}};
static void slow_body(lab_rank *r) {
    static const ck_layout at = FSDP(3, CK_ADAMW, 0, 0, 0);
    slow s = *(const slow *)r->arg;
    ck_files files;
    char dir[512], path[700];
    int64_t step;
    ck_model m;
    fsdp_world *w = hasty_world(r, DEADLINE_MS);
    ck_make(&m, r, w, &small, &at);
    ck_optimizers(&m);
    open_slow(&m, r, &files, &s, 0);
    ck_fill(&m, 1);
    ck_dir(dir, "run");
    if (strcmp(s.call, "read") && strcmp(s.call, "open")) { /* also during training */
        CALL(w, fsdp_checkpoint_save_async(m.ck, dir, 1));
        ck_fill(&m, 2);
        CALL(w, fsdp_barrier(w));
    }
    ck_save(&m, dir, 2);
    CALL(w, fsdp_checkpoint_find(m.ck, dir, -1, path, sizeof path, &step));
    CHECK_EQ_INT(step, 2);
    ck_load(&m, dir, 2, FSDP_VERIFY_ALL);
    if (r->rank == s.rank) CHECK_EQ_INT(s.times, 0);
    CALL(w, fsdp_barrier(w));
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
}
static void on_hasty(int size, void (*body)(lab_rank *r), const void *arg) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1;
    lab_run(size, &how, body, (void *)(uintptr_t)arg);
}
TEST(checkpoint_slow, write, SLOW | AT_NIGHT(ASAN)) { on_hasty(3, slow_body, &slow_calls[0]); }
TEST(long_checkpoint_slow, sync, NIGHT) { on_hasty(3, slow_body, &slow_calls[1]); }
TEST(long_checkpoint_slow, rename, NIGHT) { on_hasty(3, slow_body, &slow_calls[2]); }
TEST(checkpoint_slow, read, SLOW | AT_NIGHT(ASAN)) { on_hasty(3, slow_body, &slow_calls[3]); }
TEST(long_checkpoint_slow, open, NIGHT) { on_hasty(3, slow_body, &slow_calls[4]); }

/* A file call does not end: all ranks fail, and the object is unusable, but not the world. If the
   call ends later, its thread touches neither files nor the model. */
static const struct stall {
    const char *name, *call;
} stalls[] = {{"save", "write"}, {"load", "read"}};
static int num_calls; /* rank 1's calls in the save or load, without close */
static int hang(ck_files *f, const char *call, const char *path) {
    const struct stall *s = (const struct stall *)f->user;
    (void)path;
    if (f->rank != 1 || !s) return 0;
    if (!strcmp(call, "close")) {
        h_mark(2);
        return 0;
    }
    num_calls++;
    if (!strcmp(call, s->call)) h_await_marks(1, 1);
    return 0;
}
static void end_hang(void) {
    h_mark(1);
    h_await_marks(2, 1);
    CHECK_EQ_INT(num_calls, 2); /* open or create, and the one that hung */
}
static void stalled(lab_rank *r) {
    static const ck_layout at = FSDP(2, CK_ADAMW, 0, 0, 0);
    const struct stall *s = (const struct stall *)r->arg;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    static ck_files files[2]; /* the hung thread may read it */
    char dir[512], text[100];
    ck_model m;
    fsdp_world *w = hasty_world(r, 30000);
    ck_make(&m, r, w, &large, &at);
    ck_optimizers(&m);
    memset(&files[r->rank], 0, sizeof *files);
    files[r->rank].before = hang, files[r->rank].rank = r->rank;
    d.num_blobs = 2, d.files = &ck_file_ops, d.files_user = &files[r->rank], d.stall_ms = 300;
    ck_open(&m, &d);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    files[r->rank].user = r->arg;
    const int is_load = !strcmp(s->name, "load");
    snprintf(text, sizeof text, "rank 1: [E422] checkpoint_%s: no progress for 300 ms in %s of ",
             s->name, s->call);
    if (is_load)
        REFUSED_AS(FSDP_ERR_IO, w, fsdp_checkpoint_load(m.ck, ck_step_path(dir, 1), NULL), text);
    else REFUSED_AS(FSDP_ERR_IO, w, fsdp_checkpoint_save(m.ck, dir, 2), text);
    REFUSED_AS(FSDP_ERR_IO, w, fsdp_checkpoint_save_async(m.ck, dir, 2),
               "rank 1: [E422] checkpoint_save_async: no progress");
    REFUSED_AS(FSDP_ERR_IO, w, fsdp_checkpoint_load(m.ck, ck_step_path(dir, 1), NULL),
               "rank 1: [E422] checkpoint_load: no progress");
    CALL(w, fsdp_barrier(w));
    CHECK_EQ_INT(ck_num_names(dir), 1); /* rank 0 has removed the temporary directory */
    fsdp_checkpoint_destroy(m.ck);
    ck_open(&m, NULL); /* another object */
    ck_fill(&m, 2);
    ck_load(&m, dir, 1, FSDP_VERIFY_ALL);
    ck_check(&m, 1, 1);
    CALL(w, fsdp_barrier(w));
    if (is_load && r->rank) end_hang(); /* this call itself writes into the model */
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
    if (!is_load && r->rank) end_hang();
}
/* Not with AddressSanitizer: memory of a hung thread stays allocated. */
TEST_P(checkpoint_slow, stalled, stalls, SLOW | NO(ASAN)) { on_hasty(2, stalled, row); }

/* ---- state dicts through files: PyTorch's test_fully_shard_state_dict ------------------------ */

enum { MLP_ROWS = 12 };

/* Returns a net of MLPs of this width; the widest are sharded along the larger dim. With tensor
   parallelism there is one, and a unit for the parameters that all ranks of a group have. */
static ck_net mlps(ck_param rows[MLP_ROWS], int dim, int tp) {
    ck_net out = {rows, tp ? 4 : 12};
    for (int u = 0; u < out.count / 4; u++) {
        const ck_param in = {u, "in_proj", FSDP_F32, 2, {4 * dim, dim}, 0, 0, tp};
        const ck_param in_bias = {u, "in_bias", FSDP_F32, 1, {4 * dim}, 0, 0, tp};
        const ck_param to = {u, "out_proj", FSDP_F32, 2, {dim, 4 * dim}, dim == 16, 0, 2 * tp};
        const ck_param to_bias = {u + tp, "out_bias", FSDP_F32, 1, {dim}, 0, 0, 0};
        rows[4 * u] = in, rows[4 * u + 1] = in_bias;
        rows[4 * u + 2] = to, rows[4 * u + 3] = to_bias;
    }
    return out;
}

static int pointers(const ck_model *m, void *out[MLP_ROWS]) {
    fsdp_param_view v = FSDP_ZERO;
    int count = 0;
    while (fsdp_next_param(m->model, &v)) out[count++] = v.shard;
    return count;
}
/* Checks that a forward gathers the loaded values. */
static void check_gathered(ck_model *m, int unit, uint64_t seed) {
    fsdp_param_view v = FSDP_ZERO;
    char name[64];
    CALL(m->w, fsdp_pre_forward(m->unit[unit]));
    while (fsdp_next_param(m->model, &v)) {
        fsdp_param_view whole;
        if (v.unit != m->unit[unit] || m->dm) continue;
        snprintf(name, sizeof name, "h.%d.%s", ck_row(&v)->unit, ck_row(&v)->name);
        const char *data = (const char *)fsdp_data(v.unit, v.index);
        whole = v;
        for (int64_t k = 0; k < lab_full_numel(&whole); k++) {
            uint64_t bits = lab_hash(seed, ck_name_hash(name), (uint64_t)k, 0);
            W_CHECK(!memcmp(data + 4 * k, &bits, 4), "'%s' as gathered, element %lld", name,
                    (long long)k);
        }
    }
    CALL(m->w, fsdp_post_forward(m->unit[unit]));
}

static void dict_body(lab_rank *r) {
    static const int dims[] = {2, 3, 4, 5, 16};
    const ck_layout *at = (const ck_layout *)r->arg;
    for (int n = 0; n < 5; n++) {
        ck_param rows[MLP_ROWS];
        ck_net toy = mlps(rows, dims[n], 0);
        void *before[MLP_ROWS], *after[MLP_ROWS];
        char dir[512], name[16];
        ck_model m;
        snprintf(w_case, sizeof w_case, "%s, dim %d", at->name, dims[n]);
        snprintf(name, sizeof name, "dim%d", dims[n]);
        ck_dir(dir, name);
        ck_begin(&m, r, r->w, &toy, at);
        for (int kept = 0; kept < 2; kept++) { /* 1: after a forward that never reshards */
            CALL(r->w,
                 fsdp_set_reshard_after_forward(m.model, NULL, kept ? FSDP_RESHARD_NEVER : 1));
            ck_fill(&m, 1);
            pointers(&m, before);
            for (int u = 0; u < 3; u++) lab_forward(r->w, m.unit[u]);
            ck_save(&m, dir, kept);
            ck_fill(&m, 2);
            for (int u = 0; u < 3; u++) lab_forward(r->w, m.unit[u]);
            ck_load(&m, dir, kept, FSDP_VERIFY_READ);
            ck_check(&m, 1, 1);
            CHECK_EQ_INT(pointers(&m, after), toy.count);
            CHECK_EQ_MEM(before, after, sizeof(void *) * (size_t)toy.count);
            for (int u = 0; u < 3; u++) check_gathered(&m, u, 1);
            CALL(r->w, fsdp_model_reset(m.model));
        }
        ck_end(&m);
    }
}
static const ck_layout dict_layouts[] = {{"dp", 8, CK_FSDP, 0, 0, 0, CK_NONE, 0, 0, 0, 0, 0, 0},
                                         {"hsdp", 8, CK_HSDP, 4, 2, 0, CK_NONE, 0, 0, 0, 0, 0, 0}};
/* PyTorch: test_fully_shard_state_dict.py test_dp_state_dict_save_load. Done: through files, also
   after a forward that never reshards. */
TEST_P(state_dict, dp_state_dict_save_load, dict_layouts) {
    lab_run(8, NULL, dict_body, (void *)(uintptr_t)row);
}

/* A single rank reads the full tensors of any mesh: full_tensor, and full_state_dict of rank 0. */
static void whole_dict(lab_rank *r) {
    static const ck_layout one = {"one", 1, CK_FSDP, 0, 0, 0, CK_NONE, 0, 0, 0, 0, 0, 0};
    const ck_net *toy = (const ck_net *)r->arg;
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, toy, &one);
    ck_fill(&m, 3);
    ck_load(&m, ck_dir(dir, "tp"), 1, FSDP_VERIFY_ALL);
    ck_check(&m, 1, 0);
    ck_fill(&m, 5);
    ck_save(&m, dir, 2);
    ck_end(&m);
}
typedef struct tp_dict {
    const ck_net *net;
    const ck_layout *at;
    int load; /* 1: loads a checkpoint that one rank has saved */
} tp_dict;
static void tp_dict_body(lab_rank *r) {
    const tp_dict *c = (const tp_dict *)r->arg;
    void *before[MLP_ROWS], *after[MLP_ROWS];
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, c->net, c->at);
    ck_fill(&m, 1);
    if (!c->load) ck_save(&m, ck_dir(dir, "tp"), 1);
    const int count = pointers(&m, before);
    ck_fill(&m, 2);
    ck_load(&m, ck_dir(dir, "tp"), c->load ? 2 : 1, FSDP_VERIFY_READ);
    ck_check(&m, c->load ? 5 : 1, !c->load);
    CHECK_EQ_INT(pointers(&m, after), count);
    CHECK_EQ_MEM(before, after, sizeof(void *) * (size_t)count);
    ck_end(&m);
}
static void tp_dicts(const ck_layout *at, const int *dims, int count) {
    for (int n = 0; n < count; n++) {
        ck_param rows[MLP_ROWS];
        ck_net toy = mlps(rows, dims[n], at->kind == CK_FSDP ? 0 : 1);
        tp_dict c = {&toy, at, 0};
        lab_run(at->size, NULL, tp_dict_body, &c);
        lab_run(1, NULL, whole_dict, &toy);
        c.load = 1;
        lab_run(at->size, NULL, tp_dict_body, &c);
        h_remove_tree(h_tmpdir());
    }
}
static const int tp_dims[] = {4, 5, 6, 8, 10};
static const ck_layout dp_tp = {"dp_tp", 8, CK_TP, 2, 4, 0, CK_NONE, 0, 0, 0, 0, 0, 0};
static const ck_layout hsdp_tp = {"hsdp_tp", 8, CK_HSDP_TP, 2, 2, 0, CK_NONE, 0, 0, 0, 0, 0, 0};
static const ck_layout offloaded = {"offload", 4, CK_FSDP, 0, 0, 0, CK_NONE, 0, 0, 1, 0, 0, 0};
/* PyTorch: test_fully_shard_state_dict.py test_dp_tp_state_dict_save_load,
   test_hsdp_tp_state_dict_save_load. Done: through files; any bits (PyTorch: 1 and 42 + rank). */
TEST(state_dict, dp_tp_state_dict_save_load) { tp_dicts(&dp_tp, tp_dims, 5); }
TEST(state_dict, hsdp_tp_state_dict_save_load) { tp_dicts(&hsdp_tp, tp_dims, 5); }
/* PyTorch: test_fully_shard_state_dict.py test_2d_state_dict_correctness. Partly: through files:
   one rank loads as whole tensors what 2x4 ranks saved, and the reverse. The rest:
   fully_shard_dtensor.sharded_by_tp_then_fsdp. */
TEST(state_dict, 2d_state_dict_correctness) { tp_dicts(&dp_tp, tp_dims + 1, 1); }
/* PyTorch: test_fully_shard_state_dict.py test_rank0_offload_full_state_dict. Done: through files:
   one rank loads as whole tensors what 4 ranks with offload saved, and the reverse. */
TEST(state_dict, rank0_offload_full_state_dict) { tp_dicts(&offloaded, tp_dims + 1, 1); }

/* Loads a part of a model, then the rest, in several calls. */
static int only_unit(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    (void)out;
    return ck_row(v)->unit == *(const int *)user;
}
static void check_unit(const ck_model *m, int unit, uint64_t seed) {
    fsdp_param_view v = FSDP_ZERO;
    char name[64];
    while (fsdp_next_param(m->model, &v)) {
        ck_visit t = {CK_CHECK, seed, -1, 0, 0};
        if (ck_row(&v)->unit != unit) continue;
        snprintf(name, sizeof name, "h.%d.%s", unit, ck_row(&v)->name);
        ck_array(m, &t, name, v.dtype, FSDP_MEMORY_DEVICE, v.shard, v.numel, &v);
    }
}
static void offload_dict(lab_rank *r) {
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    ck_param rows[MLP_ROWS];
    ck_net toy = mlps(rows, 5, 0);
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, &toy, &offloaded);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    ck_fill(&m, 2);
    for (int unit = 0; unit < 3; unit++) {
        ld.source = only_unit, ld.user = &unit;
        CALL(r->w, fsdp_checkpoint_load(m.ck, ck_step_path(dir, 1), &ld));
        for (int u = 0; u < 3; u++) check_unit(&m, u, u <= unit ? 1 : 2);
    }
    for (int u = 0; u < 3; u++) check_gathered(&m, u, 1);
    ck_end(&m);
}
/* PyTorch: test_fully_shard_state_dict.py test_dp_state_dict_cpu_offload. Partly: through files: a
   load of each unit, the others keep their values. The rest: fully_shard_state_dict.cpu_offload. */
TEST(state_dict, dp_state_dict_cpu_offload) { lab_run(4, NULL, offload_dict, NULL); }

/* Saves contain the values that were loaded last: nothing is cached. */
static void cached(lab_rank *r) {
    ck_param rows[MLP_ROWS];
    ck_net toy = mlps(rows, 3, 0);
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, &toy, &dict_layouts[0]);
    ck_dir(dir, "run");
    for (int step = 0; step < 5; step++) {
        ck_fill(&m, 10 + (uint64_t)step);
        for (int u = 0; u < 3; u++) lab_forward(r->w, m.unit[u]);
        ck_save(&m, dir, step);
    }
    for (int step = 4; step >= 0; step--) {
        ck_load(&m, dir, step, FSDP_VERIFY_NONE);
        ck_check(&m, 10 + (uint64_t)step, 1);
        for (int u = 0; u < 3; u++) check_gathered(&m, u, 10 + (uint64_t)step);
    }
    ck_end(&m);
}
/* PyTorch: test_fully_shard_state_dict.py test_cached_state_dict. Partly: through files: five
   saves, and loads of each, in one job. The rest: fully_shard_state_dict.cached. */
TEST(state_dict, cached_state_dict) { lab_run(8, NULL, cached, NULL); }
