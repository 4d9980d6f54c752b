/* test_trace.c - traces (fsdp_trace.h): every record compared with those that a test's extension
   has seen, inline, with worker threads and on the simulated device; truncated and hostile files;
   clocks; memory, system calls and failures.

   SPDX-License-Identifier: MIT */
#define TAGS NO(GLOO | NCCL)
#include "harness.h"
#include "library.c"
#include "fsdp_trace.h"
#include "fsdp_plan.h"
#include "fsdp_optim.h"
#include "lab_net.h"
#include "sim.h"
#include "../../tools/fsdptrace_json.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

enum { NUM = 5, UNITS = 3, FIRST = 3, LAST = 5, MOST = 4000 };

static const lab_param rows[NUM] = {{0, "a.w", FSDP_F32, 0, 0, 2, 0, {7, 5}},
                                    {0, "a.b", FSDP_F32, 0, 0, 1, 0, {3}},
                                    {1, "b.w", FSDP_F32, 0, 0, 2, 0, {80, 8}},
                                    {2, "c.w", FSDP_F32, 0, 0, 2, 0, {24, 16}},
                                    {2, "c.b", FSDP_F32, 0, 0, 1, 0, {17}}};
static const lab_net net = {rows, NUM, UNITS};

/* ---- records that an extension of the test sees ---------------------------------------------- */

typedef struct {
    fsdpi_tr_event record[MOST];
    char what[MOST][32]; /* name of each record */
    int num, calls, step, on;
    uint32_t seq;
} witness;

static void witness_add(witness *x, const fsdp_op *op, int64_t begin, int64_t end) {
    int at = __atomic_fetch_add(&x->num, 1, __ATOMIC_SEQ_CST);
    CHECK(at < MOST);
    fsdpi_tr_event *r = &x->record[at];
    const fsdp_buf *buf = op->kind == FSDP_OP_RELEASE ? op->src : op->dst;
    int marker = op->kind > FSDP_OP_HOOK;
    r->begin_ns = begin, r->end_ns = end, r->bytes = op->bytes;
    if (marker) r->bytes = (uint64_t)fsdp_buf_nbytes(buf);
    r->waited_ns = (uint32_t)op->waited_ns, r->seq = (uint32_t)op->seq;
    r->slot = marker ? (uint32_t)op->slot : 0;
    r->comm = op->comm_number, r->kind = op->kind;
    r->label = marker ? op->pool : op->label, r->stream = op->stream, r->state = op->state;
    snprintf(x->what[at], sizeof x->what[0], "%s", op->what);
}
static int witness_op(void *user, fsdp_model *model, fsdp_op *op) {
    witness *x = (witness *)user;
    (void)model;
    if (x->on && op->kind > FSDP_OP_HOOK) witness_add(x, op, 0, 0);
    return 0;
}
static void witness_ran(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin, int64_t end) {
    witness *x = (witness *)user;
    (void)model;
    if (__atomic_load_n(&x->on, __ATOMIC_SEQ_CST)) witness_add(x, op, begin, end);
}
static void witness_returned(void *user, fsdp_model *model, fsdp_unit *unit, int call) {
    (void)model, (void)unit, (void)call;
    ((witness *)user)->calls += ((witness *)user)->on;
}
static void witness_attach(witness *x, fsdp_world *w, fsdp_model *m) {
    fsdp_extension e = FSDP_ZERO;
    e.name = "witness", e.user = x, e.op = witness_op, e.ran = witness_ran;
    e.returned = witness_returned;
    CALL(w, fsdp_attach(m, &e));
}

/* ---- a training ------------------------------------------------------------------------------ */

typedef struct {
    const char *name;
    /* never: 1: until post_backward; 2: always */
    int world, replicas, lanes, never, reduce, planned;
} mode;
static const mode modes[] = {
    {"inline", 2, 0, 0, 0, 0, 0},    {"lanes", 2, 0, 1, 0, 0, 0},
    {"two_lanes", 3, 0, 2, 0, 0, 0}, {"hsdp", 4, 2, 2, 0, 0, 0},
    {"never", 2, 0, 0, 1, 0, 0},     {"bf16", 2, 0, 2, 0, FSDP_BF16, 0},
    {"alone", 1, 0, 0, 0, 0, 0},     {"planned", 2, 0, 2, 0, 0, 1},
    {"kept", 2, 0, 0, 2, 0, 0},
};

static char *dir_of(const char *name) {
    static __thread char text[400];
    snprintf(text, sizeof text, "%s/%s", h_tmpdir(), name);
    return text;
}

static void build(lab_built *m, fsdp_world *w, const mode *x) {
    fsdp_model_desc md = FSDP_ZERO;
    md.reduce_dtype = x->reduce, md.param_dtype = x->reduce;
    md.reshard_after_forward = x->never ? FSDP_RESHARD_NEVER : 0;
    if (x->replicas) md.mesh = lab_hsdp(w, x->replicas, x->world / x->replicas);
    lab_build(m, &net, w, &md);
    if (x->never == 2) CALL(w, fsdp_set_reshard_after_backward(m->model, NULL, 0));
}
static void step_of(lab_built *m, fsdp_adamw *opt) {
    lab_forwards(m);
    for (int u = UNITS - 1; u >= 0; u--) {
        CALL(m->w, fsdp_pre_backward(m->unit[u]));
        for (int p = 0; p < NUM; p++) {
            fsdp_param_view v;
            CALL(m->w, fsdp_param_at(m->model, p, &v));
            if (rows[p].unit == u && v.requires_grad) (void)lab_grad(m, p);
        }
        CALL(m->w, fsdp_post_backward(m->unit[u]));
    }
    CALL(m->w, fsdp_finalize_backward(m->model));
    double loss = 1;
    CALL(m->w, fsdp_all_reduce(m->w, NULL, &loss, 1, FSDP_F64, FSDP_SUM));
    CALL(m->w, fsdp_clip_grad_norm(m->model, 1.0, &loss));
    CALL(m->w, fsdp_adamw_step(opt, 1e-3));
    CALL(m->w, fsdp_zero_grad(m->model));
}

static fsdp_trace *start(lab_built *m, const char *dir, int64_t records) {
    fsdp_trace_desc d = FSDP_ZERO;
    fsdp_trace *t;
    d.dir = dir, d.first_step = FIRST, d.last_step = LAST, d.records = records;
    CALL(m->w, fsdp_trace_start(m->model, &d, &t));
    return t;
}

/* ---- every record ---------------------------------------------------------------------------- */

static int by_key(const fsdpi_tr_event *a, const fsdpi_tr_event *b) {
    int world_a = a->label == FSDP_LABEL_WORLD || a->label == FSDP_LABEL_TRANSFER;
    int world_b = b->label == FSDP_LABEL_WORLD || b->label == FSDP_LABEL_TRANSFER;
    if (a->kind > FSDP_OP_HOOK) world_a = 0;
    if (b->kind > FSDP_OP_HOOK) world_b = 0;
    return world_a == world_b && a->kind == b->kind && a->seq == b->seq;
}

/* Compares the file of a rank with the witness's records. */
static void compare(const fsdpi_tr_rank *r, const witness *x, const char *name, int kept) {
    int others = 0, calls = 0, marked = 0, held = 0;
    for (uint64_t i = 0; i < r->num_records; i++) {
        const fsdpi_tr_event *o = &r->records[i];
        int found = 0;
        CHECK(o->step >= FIRST && o->step <= LAST);
        CHECK(o->begin_ns <= o->end_ns);
        if (o->kind == FSDPI_TR_CALL) {
            /* a unit's name, or that of an extension's call */
            const char *call = fsdpi_tr_name(r, o->what);
            calls += !*call || o->what < r->num_units;
            if (!strcmp(call, "adamw_step")) CHECK_EQ_INT(o->label, FSDP_CALL_PARAMS_CHANGED);
            continue;
        }
        if (o->slot == FSDPI_TR_HELD) {
            CHECK_EQ_INT(o->kind, FSDP_OP_ACQUIRE);
            CHECK_EQ_INT(o->label, FSDP_POOL_GATHER);
            CHECK_EQ_INT(o->bytes, r->units[held].slot_bytes[FSDP_POOL_GATHER]);
            CHECK_EQ_INT(o->what, held++);
            continue;
        }
        others++;
        for (int k = 0; k < x->num; k++) {
            const fsdpi_tr_event *want = &x->record[k];
            if (!by_key(o, want)) continue;
            found++;
            fsdpi_tr_event like = *o;
            like.step = 0, like.what = 0;
            if (o->kind > FSDP_OP_HOOK) like.begin_ns = like.end_ns = 0, marked++;
            CHECK_MSG(!memcmp(&like, want, sizeof like), "%s: record %u, %s", name, o->seq,
                      fsdp_op_name(o->kind));
            CHECK_EQ_STR(fsdpi_tr_name(r, o->what), x->what[k]);
        }
        CHECK_MSG(found == 1, "%s: %s %u is there %d times", name, fsdp_op_name(o->kind), o->seq,
                  found);
    }
    CHECK_EQ_INT(others, x->num);
    CHECK_EQ_INT(calls, x->calls);
    CHECK(marked > 0 || r->head.size == 1);
    CHECK_EQ_INT(held, kept);
    CHECK_EQ_INT(r->head.dropped, 0);
    CHECK_EQ_INT(r->num_steps, LAST - FIRST + 1);
    for (uint64_t k = 0; k < r->num_steps; k++) {
        CHECK_EQ_INT(r->steps[k].number, FIRST + k);
        CHECK(r->steps[k].begin_ns < r->steps[k].end_ns);
        if (k) CHECK(r->steps[k].begin_ns >= r->steps[k - 1].end_ns);
    }
}

/* Checks the file's description of the model. */
static void check_model(const fsdpi_tr_rank *r, const mode *x) {
    CHECK_EQ_INT(r->num_units, UNITS);
    CHECK_EQ_INT(r->num_params, NUM);
    CHECK_EQ_INT(r->head.size, x->world);
    CHECK_EQ_INT(r->head.run, x->lanes ? FSDP_RUN_THREADS : FSDP_RUN_INLINE);
    CHECK_EQ_INT(r->num_kept, 1);
    CHECK_EQ_STR(fsdpi_tr_text(r, r->kept[0].name), "adamw");
    uint64_t at = 0;
    for (int u = 0; u < UNITS; u++) {
        const fsdpi_tr_unit *unit = &r->units[u];
        char name[16];
        snprintf(name, sizeof name, "unit%d", u);
        CHECK_EQ_STR(fsdpi_tr_name(r, (uint32_t)u), name);
        CHECK_EQ_INT(unit->replicas, x->replicas ? x->replicas : 1);
        CHECK_EQ_INT(unit->shards, x->world / (x->replicas ? x->replicas : 1));
        CHECK_EQ_INT(unit->reshard_after_forward, x->never ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS);
        CHECK_EQ_INT(unit->param_dtype, x->reduce);
        for (int p = 0; p < unit->num_params; p++, at++) {
            CHECK_EQ_STR(fsdpi_tr_text(r, r->params[at].name), rows[at].name);
            CHECK_EQ_INT(rows[at].unit, u);
            CHECK_EQ_INT(r->params[at].ndim, rows[at].ndim);
            CHECK_EQ_INT(r->params[at].shape[0], rows[at].shape[0]);
        }
    }
    CHECK_EQ_INT(at, NUM);
    CHECK_EQ_STR(fsdpi_tr_text(r, r->pools[FSDP_POOL_GATHER].name), "gathered parameters");
    CHECK(r->pools[FSDP_POOL_SHARD].bytes > 0);
}

/* Checks that collectives are matched, and that the last member is one that began last. */
static void check_matches(const fsdpi_tr_job *job) {
    int matched = 0;
    for (int k = 0; k < job->num; k++)
        for (uint64_t i = 0; i < job->rank[k].num_records; i++) {
            const fsdpi_tr_event *o = &job->rank[k].records[i];
            if (!fsdpi_tr_is_collective(o)) continue;
            CHECK_MSG(job->rank[k].last[i] >= 0, "%s %u of rank %d has no peers",
                      fsdp_op_name(o->kind), o->seq, k);
            CHECK(job->rank[k].peers_ns[i] >= o->begin_ns);
            /* no rank ends before the last one has arrived */
            CHECK(job->rank[k].peers_ns[i] <= o->end_ns);
            if (job->rank[k].last[i] == k) CHECK_EQ_INT(job->rank[k].peers_ns[i], o->begin_ns);
            matched++;
        }
    CHECK(matched > 0 || job->size == 1);
}

static witness *seen; /* [ranks] */

static void train(lab_rank *r) {
    const mode *x = (const mode *)r->arg;
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    fsdp_plan *plan;
    int64_t allocations = 0;
    build(&m, r->w, x);
    fsdp_trace *t = start(&m, dir_of("t"), 0);
    witness_attach(&seen[r->rank], r->w, m.model); /* before the plan, which answers calls itself */
    if (x->planned) CALL(r->w, fsdp_plan_create(m.model, NULL, &plan));
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    for (int step = 0; step <= LAST + 2; step++) {
        if (step == FIRST || step == LAST + 1) {
            CALL(r->w, fsdp_wait_stream(m.model, -1));
            __atomic_store_n(&seen[r->rank].on, step == FIRST, __ATOMIC_SEQ_CST);
        }
        if (step == FIRST) allocations = w_allocations(r->heap);
        step_of(&m, opt);
        if (step == LAST) W_CHECK(w_allocations(r->heap) == allocations, "a step has allocated");
    }
    CALL(r->w, fsdp_trace_stop(t));
}
TEST_P(trace, records, modes) {
    lab_how how = FSDP_ZERO;
    char why[400];
    fsdpi_tr_job job;
    how.job = "trace", how.lanes = row->lanes;
    seen = (witness *)lab_zeros((size_t)row->world, sizeof *seen);
    lab_run(row->world, &how, train, (void *)(uintptr_t)row);
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why), "%s", why);
    CHECK_EQ_INT(job.num, row->world);
    for (int k = 0; k < job.num; k++) {
        CHECK_EQ_INT(job.rank[k].error_ns, 0);
        compare(&job.rank[k], &seen[k], row->name, row->never == 2 ? UNITS : 0);
        check_model(&job.rank[k], row);
    }
    check_matches(&job);
    fsdpi_tr_free(&job);
    free(seen);
}

/* ---- the simulated device: times come from its events, in later calls ------------------------ */

TEST(trace, on_streams) {
    sim s;
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    fsdpi_tr_job job;
    char why[400];
    mode x = modes[0];
    x.world = 4;
    sim_init(&s, 4, 0);
    fsdp_world *w = sim_open(&s);
    CHECK(w != NULL);
    build(&m, w, &x);
    fsdp_trace *t = start(&m, dir_of("t"), 0);
    CALL(w, fsdp_adamw_create(m.model, NULL, &opt));
    seen = (witness *)lab_zeros(1, sizeof *seen);
    witness_attach(seen, w, m.model);
    for (int step = 0; step <= LAST + 1; step++) {
        if (step == FIRST || step == LAST + 1) {
            CALL(w, fsdp_wait_stream(m.model, -1));
            seen->on = step == FIRST;
        }
        step_of(&m, opt);
        sim_compute(&s, 5000);
    }
    CALL(w, fsdp_trace_stop(t));
    CHECK_EQ_INT(sim_close(&s), 0);
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why), "%s", why);
    CHECK_EQ_INT(job.size, 4);
    CHECK_EQ_INT(job.num, 1); /* no process runs the other ranks */
    CHECK_EQ_INT(job.rank[0].head.run, FSDP_RUN_STREAMS);
    compare(&job.rank[0], seen, "streams", 0);
    uint32_t waited = 0;
    for (uint64_t i = 0; i < job.rank[0].num_records; i++)
        if (job.rank[0].records[i].kind == FSDP_OP_WAIT) waited |= job.rank[0].records[i].waited_ns;
    CHECK(waited > 0);
    fsdpi_tr_free(&job);
    free(seen);
}

/* ---- room, spans, environment, several models ------------------------------------------------ */

typedef struct {
    const char *dir;
    int64_t records;
    int plain, spans, last; /* plain: the program does not use traces; last: steps */
} small;

static void train_alone(lab_rank *r) {
    const small *x = (const small *)r->arg;
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    build(&m, r->w, &modes[6]);
    fsdp_trace *t = x->plain ? NULL : start(&m, x->dir, x->records);
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    for (int step = 0; step <= x->last; step++) {
        int64_t now = fsdp_now(r->w);
        for (int k = 0; k < x->spans; k++) fsdp_trace_span(t, k % 2 ? "load" : "log", now + k, now + 9);
        step_of(&m, opt);
        for (int k = 0; k < x->spans; k++) fsdp_trace_span(t, k % 2 ? "load" : "log", now + k, now + 9);
    }
    if (!x->plain) CALL(r->w, fsdp_trace_stop(t));
}
static void read_one(const char *dir, fsdpi_tr_job *job) {
    char why[400];
    CHECK_MSG(!fsdpi_tr_read(dir, NULL, 0, job, why, sizeof why), "%s", why);
    CHECK_EQ_INT(job->num, 1);
}

TEST(trace, room) {
    fsdpi_tr_job all, few;
    small x = {dir_of("all"), 0, 0, 0, LAST + 1};
    char first[400];
    snprintf(first, sizeof first, "%s", x.dir);
    x.dir = first;
    lab_run(1, NULL, train_alone, &x);
    read_one(x.dir, &all);
    x.dir = dir_of("few"), x.records = 10;
    lab_run(1, NULL, train_alone, &x);
    read_one(x.dir, &few);
    CHECK_EQ_INT(few.rank[0].num_records, 10);
    CHECK_EQ_INT(few.rank[0].head.dropped, all.rank[0].num_records - 10);
    CHECK_EQ_INT(all.rank[0].head.dropped, 0);
    fsdpi_tr_free(&all), fsdpi_tr_free(&few);
}

TEST(trace, spans) {
    small x = {dir_of("t"), 0, 0, 4, LAST + 1};
    fsdpi_tr_job job;
    int found = 0;
    lab_run(1, NULL, train_alone, &x);
    read_one(x.dir, &job);
    const fsdpi_tr_rank *r = &job.rank[0];
    for (uint64_t i = 0; i < r->num_records; i++) {
        const fsdpi_tr_event *o = &r->records[i];
        if (o->kind != FSDPI_TR_SPAN) continue;
        const char *name = fsdpi_tr_name(r, o->what);
        int64_t length = o->end_ns - o->begin_ns;
        CHECK_EQ_STR(name, length == 9 || length == 7 ? "log" : "load");
        found++;
    }
    /* Records lie before and after each step. The first four came before the first step; two of
       these began after its start, and none is lost: a record that began before the trace is in no
       step. */
    CHECK(found >= 2 * 4 * (LAST - FIRST) && found <= 2 * 4 * (LAST - FIRST + 1));
    fsdpi_tr_free(&job);
}

static char logged[1200];
static void keep_log(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)user;
    snprintf(logged, sizeof logged, "%s", text);
}

TEST(trace, environment) {
    small x = {NULL, 0, 1, 0, 3};
    fsdpi_tr_job job;
    w_log = keep_log;
    CHECK(!setenv("FSDP_TRACE", dir_of("t"), 1) && !setenv("FSDP_TRACE_STEPS", "1:2", 1));
    lab_run(1, NULL, train_alone, &x);
    CHECK_EQ_STR(logged, "");
    read_one(dir_of("t"), &job);
    CHECK_EQ_INT(job.rank[0].num_steps, 2);
    CHECK_EQ_INT(job.rank[0].steps[0].number, 1);
    fsdpi_tr_free(&job);
    /* The program ends within the last step: destroying the model writes the file. */
    CHECK(!setenv("FSDP_TRACE", dir_of("u"), 1) && !setenv("FSDP_TRACE_STEPS", "2:100", 1));
    lab_run(1, NULL, train_alone, &x);
    read_one(dir_of("u"), &job);
    CHECK_EQ_INT(job.rank[0].num_steps, 2);
    CHECK_EQ_INT(job.rank[0].num_kept, 1); /* although the optimizer was destroyed earlier */
    CHECK_EQ_STR(fsdpi_tr_text(&job.rank[0], job.rank[0].kept[0].name), "adamw");
    CHECK(job.rank[0].kept[0].bytes > job.rank[0].pools[FSDP_POOL_SHARD].bytes);
    fsdpi_tr_free(&job);
    /* Errors are logged, and the program continues. */
    CHECK(!setenv("FSDP_TRACE_STEPS", "5:2x", 1));
    lab_run(1, NULL, train_alone, &x);
    CHECK_MSG(strstr(logged, "[E9004]"), "%s", logged);
    CHECK(!setenv("FSDP_TRACE_STEPS", "", 1) && !setenv("FSDP_TRACE", "/dev/null/x", 1));
    lab_run(1, NULL, train_alone, &x);
    CHECK_MSG(strstr(logged, "[E9006]"), "%s", logged);
    CHECK(!unsetenv("FSDP_TRACE") && !unsetenv("FSDP_TRACE_STEPS"));
}

static void two_models(lab_rank *r) {
    lab_built a = FSDP_ZERO, b = FSDP_ZERO;
    fsdp_adamw *opt, *other;
    build(&a, r->w, &modes[6]);
    build(&b, r->w, &modes[6]);
    fsdp_trace *t = start(&a, dir_of("t"), 0), *u = start(&b, dir_of("t"), 0), *none;
    CALL(r->w, fsdp_adamw_create(a.model, NULL, &opt));
    CALL(r->w, fsdp_adamw_create(b.model, NULL, &other));
    for (int step = 0; step <= LAST + 1; step++) step_of(&a, opt), step_of(&b, other);
    CHECK_STATUS(fsdp_trace_start(a.model, NULL, &none), FSDP_ERR_INVALID_STATE);
    CHECK(none == NULL);
    CALL(r->w, fsdp_trace_stop(t));
    CALL(r->w, fsdp_trace_stop(u));
    CALL(r->w, fsdp_trace_stop(NULL));
}
TEST(trace, two_models) {
    fsdpi_tr_job job;
    char why[400], name[200];
    lab_run(1, NULL, two_models, NULL);
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why), "%s", why);
    CHECK_EQ_INT(job.num, 1); /* the one that was written last */
    snprintf(name, sizeof name, "%s", job.job);
    CHECK(*job.other && strlen(job.other) < strlen(name) && !strncmp(job.other, name, strlen(job.other)));
    fsdpi_tr_free(&job);
    char *turn = strstr(name, "-1");
    while (turn && turn[2]) turn = strstr(turn + 1, "-1");
    CHECK_MSG(turn != NULL, "%s", name); /* its file is the second model's */
    *turn = 0;
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), name, 0, &job, why, sizeof why), "%s", why);
    CHECK_EQ_STR(job.job, name);
    fsdpi_tr_free(&job);
}

/* ---- failures -------------------------------------------------------------------------------- */

static void failures(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_trace_desc d = FSDP_ZERO;
    fsdp_trace *t = NULL;
    fsdp_plan *plan;
    int64_t n = 0;
    build(&m, r->w, &modes[0]);
    CALL(r->w, fsdp_model_commit(m.model));
    CHECK_STATUS(fsdp_trace_start(NULL, NULL, &t), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_trace_start(m.model, NULL, &t), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(r->w), "[E9003]"));
    d.dir = "/dev/null/x";
    CHECK_STATUS(fsdp_trace_start(m.model, &d, &t), FSDP_ERR_IO);
    CHECK(strstr(fsdp_last_error(r->w), "[E9006]"));
    d.dir = dir_of("t"), d.first_step = 5, d.last_step = 4;
    CHECK_STATUS(fsdp_trace_start(m.model, &d, &t), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(r->w), "[E9005]"));
    d.first_step = 0, d.records = INT64_MAX;
    CHECK_STATUS(fsdp_trace_start(m.model, &d, &t), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(r->w), "[E9005]"));
    d.records = 0;
    /* One rank has no memory: no other rank waits, and all may try again. */
    for (fsdp_status status = FSDP_ERR_OUT_OF_MEMORY; status; n++) {
        if (r->rank == 1) w_fail(r->heap, n);
        status = fsdp_trace_start(m.model, &d, &t);
        w_fail(r->heap, -1);
        if (status) CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
        if (status) CHECK(t == NULL);
        if (status && !r->rank) CHECK(strstr(fsdp_last_error(r->w), "[E9009]"));
        CHECK(n < 50);
    }
    CHECK(n >= 3);
    CALL(r->w, fsdp_trace_stop(t));
    CALL(r->w, fsdp_plan_create(m.model, NULL, &plan));
    CHECK_STATUS(fsdp_trace_start(m.model, &d, &t), FSDP_ERR_INVALID_STATE);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "has a plan"), "%s", fsdp_last_error(r->w));
}
TEST(trace, failures) { lab_run(2, NULL, failures, NULL); }

enum { STOP, NEXT_STEP, MODEL_ENDS };
static void cannot_write(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    build(&m, r->w, &modes[6]);
    fsdp_trace *t = start(&m, dir_of("t"), 0);
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    CHECK(!rmdir(dir_of("t")));
    for (int step = 0; step <= LAST; step++) step_of(&m, opt);
    const int when = *(const int *)r->arg;
    if (when == MODEL_ENDS) return;
    if (when == NEXT_STEP) step_of(&m, opt); /* writing was tried, and the error logged */
    CHECK_STATUS(fsdp_trace_stop(t), FSDP_ERR_IO);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "[E9001]"), "%s", fsdp_last_error(r->w));
    step_of(&m, opt);
}
TEST(trace, cannot_write) {
    w_log = keep_log;
    for (int when = STOP; when <= MODEL_ENDS; when++) {
        logged[0] = 0;
        lab_run(1, NULL, cannot_write, &when);
        CHECK_MSG(strstr(logged, "[E9001]") && strstr(logged, "Make room"), "%d: %s", when, logged);
    }
}

/* A program that ends before the first traced step logs why there is no file; one that ends within
   it has a file. */
static void ends_early(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    build(&m, r->w, &modes[6]);
    (void)start(&m, dir_of("t"), 0);
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    for (int step = 0; step < *(const int *)r->arg; step++) step_of(&m, opt);
}
TEST(trace, ends_early) {
    w_log = keep_log;
    for (int steps = 0; steps <= FIRST + 1; steps++) {
        logged[0] = 0;
        lab_run(1, NULL, ends_early, &steps);
        CHECK_MSG((strstr(logged, "[E9011]") && strstr(logged, "FSDP_TRACE_STEPS=0:2")) ==
                      (steps <= FIRST),
                  "%d steps: %s", steps, logged);
    }
}

/* A trace reads an average's size without changing the average: the average of a parameter that is
   thawed between two updates is the same as without a trace. */
static float averages[2][NUM];
static void average(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    fsdp_ema *ema;
    fsdp_param_view v;
    fsdp_ema_desc d = fsdp_ema_defaults();
    const int traced = *(const int *)r->arg;
    d.decay = 0.5, d.every = 3;
    build(&m, r->w, &modes[6]);
    CALL(r->w, fsdp_init_params(m.model, lab_fill, NULL));
    CALL(r->w, fsdp_set_requires_grad(m.unit[0], 0, 0));
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    CALL(r->w, fsdp_ema_create(m.model, &d, &ema));
    if (traced) (void)start(&m, dir_of("t"), 0);
    for (int step = 0; step <= LAST; step++) {
        if (step == FIRST) CALL(r->w, fsdp_set_requires_grad(m.unit[0], 0, 1));
        step_of(&m, opt);
        CALL(r->w, fsdp_ema_update(ema));
    }
    CALL(r->w, fsdp_ema_swap(ema));
    for (int p = 0; p < NUM; p++) {
        CALL(r->w, fsdp_param_at(m.model, p, &v));
        averages[traced][p] = ((float *)v.shard)[1];
    }
    CALL(r->w, fsdp_ema_swap(ema));
}
TEST(trace, changes_no_average) {
    w_log = keep_log;
    logged[0] = 0;
    for (int traced = 0; traced < 2; traced++) lab_run(1, NULL, average, &traced);
    CHECK_EQ_MEM(averages[0], averages[1], sizeof averages[0]);
    CHECK_MSG(!logged[0], "%s", logged);
}

/* The states of each extension are counted separately. */
static void states(lab_rank *r) {
    static fsdpi_tr_job job;
    lab_built m = FSDP_ZERO;
    fsdp_state_item item = FSDP_ZERO;
    fsdp_adamw *opt;
    fsdp_ema *ema;
    int64_t adamw = 0, all = 0;
    char why[512];
    build(&m, r->w, &modes[6]);
    CALL(r->w, fsdp_init_params(m.model, lab_fill, NULL));
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    CALL(r->w, fsdp_ema_create(m.model, NULL, &ema));
    fsdp_trace *t = start(&m, dir_of("t"), 0);
    for (int step = 0; step <= LAST; step++) step_of(&m, opt);
    CALL(r->w, fsdp_trace_stop(t));
    item.sizes_only = 1;
    while (!fsdp_next_state(m.model, &item) && item.name) {
        const int64_t bytes = item.numel * (int64_t)fsdp_dtype_size(item.dtype);
        all += bytes;
        if (!strcmp(item.extension, "adamw")) adamw += bytes;
    }
    CHECK(adamw > 0 && adamw < all);
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why), "%s", why);
    const fsdpi_tr_rank *x = &job.rank[0];
    CHECK_EQ_INT(x->num_kept, 2);
    CHECK_EQ_STR(fsdpi_tr_text(x, x->kept[0].name), "adamw");
    CHECK_EQ_STR(fsdpi_tr_text(x, x->kept[1].name), "ema");
    CHECK_EQ_INT(x->kept[0].bytes, adamw);
    CHECK_EQ_INT(x->kept[1].bytes, all - adamw);
    fsdpi_tr_free(&job);
}
TEST(trace, states_of_each_extension) { lab_run(1, NULL, states, NULL); }

/* The program's work between a call and fsdp_params_changed counts as its own: here its optimizer
   after a clip. */
static void own_optimizer(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    double norm;
    int64_t clipped[LAST + 2];
    char why[512];
    static fsdpi_tr_job job;
    build(&m, r->w, &modes[6]);
    fsdp_trace *t = start(&m, dir_of("t"), 0);
    for (int step = 0; step <= LAST + 1; step++) {
        lab_forwards(&m);
        for (int u = UNITS - 1; u >= 0; u--) {
            CALL(r->w, fsdp_pre_backward(m.unit[u]));
            CALL(r->w, fsdp_post_backward(m.unit[u]));
        }
        CALL(r->w, fsdp_finalize_backward(m.model));
        CALL(r->w, fsdp_clip_grad_norm(m.model, 1.0, &norm));
        clipped[step] = fsdp_now(r->w);
        CALL(r->w, fsdp_params_changed(m.model));
    }
    CALL(r->w, fsdp_trace_stop(t));
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why), "%s", why);
    int clips = 0;
    for (uint64_t i = 0; i < job.rank[0].num_records; i++) {
        const fsdpi_tr_event *o = &job.rank[0].records[i];
        if (o->kind != FSDPI_TR_CALL || o->label != FSDP_CALL_CLIP) continue;
        CHECK(o->step >= FIRST && o->step <= LAST + 1);
        CHECK(o->end_ns <= clipped[o->step < LAST + 1 ? o->step : LAST + 1]);
        clips++;
    }
    CHECK_EQ_INT(clips, LAST - FIRST + 1);
    fsdpi_tr_free(&job);
}
TEST(trace, own_optimizer) { lab_run(1, NULL, own_optimizer, NULL); }

/* The library reads the clock for a trace only while steps are recorded. */
static int64_t clock_reads;
static int64_t counted_now(void *user) {
    clock_reads++;
    return w_now_ns(user);
}
static const struct {
    const char *name;
    int async;
} devices[] = {{"inline", 0}, {"streams", 1}};
TEST_P(trace, clock_after_it, devices) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "quiet", 0);
    fsdp_world *w;
    sim s;
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    int64_t reads[LAST + 4], events[LAST + 4];
    d.clock.now_ns = counted_now;
    sim_init(&s, 4, 0);
    if (row->async) w = sim_open(&s);
    else CALL(NULL, fsdp_init(&d, &w));
    build(&m, w, &modes[row->async ? 0 : 6]);
    CALL(w, fsdp_adamw_create(m.model, NULL, &opt));
    for (int step = 0; step < LAST + 4; step++) {
        fsdp_trace *t = step == 2 ? start(&m, dir_of("t"), 0) : NULL;
        (void)t; /* destroying the model stops it */
        reads[step] = clock_reads, events[step] = s.records;
        step_of(&m, opt);
        reads[step] = clock_reads - reads[step], events[step] = s.records - events[step];
    }
    if (!row->async) CHECK_EQ_INT(reads[LAST + 3], reads[1]);
    if (!row->async) CHECK(reads[LAST] > reads[1]);
    if (row->async) CHECK_EQ_INT(events[LAST + 3], events[1]);
    if (row->async) CHECK(events[LAST] > events[1]);
    if (row->async) CHECK_EQ_INT(sim_close(&s), 0);
    else CHECK_OK(fsdp_shutdown(w));
}

/* Steps whose finalize fails are started again, more often than there is memory for steps. */
static void fail_and_reset(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    build(&m, r->w, &modes[6]);
    fsdp_trace *t = start(&m, dir_of("t"), 0);
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    for (int step = 0; step <= LAST; step++) {
        for (int k = 0; k < 100; k++) {
            CALL(r->w, fsdp_pre_forward(m.unit[0]));
            CHECK_STATUS(fsdp_finalize_backward(m.model), FSDP_ERR_INVALID_STATE);
            CHECK_MSG(strstr(fsdp_last_error(r->w), "[E2"), "%s", fsdp_last_error(r->w));
            CALL(r->w, fsdp_model_reset(m.model));
        }
        step_of(&m, opt);
        CHECK_EQ_INT(t->num_steps, step < FIRST ? 0 : step - FIRST + 1);
    }
    CALL(r->w, fsdp_trace_stop(t));
}
TEST(trace, failed_steps) {
    fsdpi_tr_job job;
    lab_run(1, NULL, fail_and_reset, NULL);
    read_one(dir_of("t"), &job);
    CHECK_EQ_INT(job.rank[0].num_steps, LAST - FIRST + 1);
    for (int k = 0; k <= LAST - FIRST; k++) CHECK_EQ_INT(job.rank[0].steps[k].number, FIRST + k);
    fsdpi_tr_free(&job);
}

/* The file of an earlier run is deleted when the next one starts; a file is not a directory. */
static void start_again(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_trace_desc d = FSDP_ZERO;
    char path[1024];
    build(&m, r->w, &modes[6]);
    fsdp_trace *t = start(&m, dir_of("t"), 0);
    snprintf(path, sizeof path, "%s", t->path);
    CALL(r->w, fsdp_trace_stop(t));
    CHECK(!access(path, F_OK));
    d.dir = path;
    CHECK_STATUS(fsdp_trace_start(m.model, &d, &t), FSDP_ERR_IO);
    CHECK_MSG(strstr(fsdp_last_error(r->w), "[E9006]"), "%s", fsdp_last_error(r->w));
    t = start(&m, dir_of("t"), 0);
    CHECK(access(path, F_OK) && errno == ENOENT);
    CALL(r->w, fsdp_trace_stop(t));
    CHECK(!access(path, F_OK));
}
TEST(trace, earlier_file) { lab_run(1, NULL, start_again, NULL); }

/* ---- no system call -------------------------------------------------------------------------- */

static void allow_only_the_end(void) {
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_exit_group, 1, 0),
        BPF_STMT(BPF_RET | BPF_K, 0x80000000u /* SECCOMP_RET_KILL_PROCESS */),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog filter = {4, code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter))
        _exit(77);
}
TEST(trace, no_system_call) {
#ifdef W_SANITIZED
    SKIP("the sanitizer makes system calls");
#endif
    int status = -1;
    pid_t child = fork();
    if (!child) {
        lab_built m = FSDP_ZERO;
        fsdp_adamw *opt;
        fsdp_world_desc d = w_desc(0, 1, NULL, "quiet", 0);
        fsdp_world *w;
        CALL(NULL, fsdp_init(&d, &w));
        build(&m, w, &modes[6]);
        fsdp_trace *t = start(&m, dir_of("t"), 0);
        CALL(w, fsdp_adamw_create(m.model, NULL, &opt));
        for (int step = 0; step < FIRST; step++) step_of(&m, opt);
        allow_only_the_end();
        for (int step = FIRST; step <= LAST; step++) step_of(&m, opt);
        _exit(t->next_record > 100 && t->num_steps == LAST - FIRST + 1 ? 0 : 1);
    }
    CHECK_EQ_INT(waitpid(child, &status, 0), child);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) SKIP("seccomp is not permitted here");
    CHECK_MSG(WIFEXITED(status) && !WEXITSTATUS(status), "status 0x%x", (unsigned)status);
}

/* ---- untrusted files ------------------------------------------------------------------------- */

static unsigned char *bytes_of(const char *dir, char *path, size_t cap, size_t *size) {
    fsdpi_tr_job job;
    read_one(dir, &job);
    snprintf(path, cap, "%s/%s.0.trace", dir, job.job);
    fsdpi_tr_free(&job);
    FILE *file = fopen(path, "rb");
    CHECK(file && !fseek(file, 0, SEEK_END));
    *size = (size_t)ftell(file);
    unsigned char *bytes = (unsigned char *)lab_zeros(*size, 1);
    rewind(file);
    CHECK(fread(bytes, *size, 1, file) == 1);
    fclose(file);
    return bytes;
}
static void put_bytes(const char *path, const unsigned char *bytes, size_t size) {
    FILE *file = fopen(path, "wb");
    CHECK(file && fwrite(bytes, 1, size, file) == size && !fclose(file));
}
static void set_sum(unsigned char *bytes, size_t size) {
    uint64_t sum = fsdpi_tr_sum(bytes, size - sizeof sum);
    memcpy(bytes + size - sizeof sum, &sum, sizeof sum);
}
static int is_refused(const char *dir) {
    char why[400];
    fsdpi_tr_job job;
    if (fsdpi_tr_read(dir, NULL, 1, &job, why, sizeof why)) {
        CHECK(*why && !job.rank && !job.num);
        return 1;
    }
    const fsdpi_tr_rank *r = &job.rank[0]; /* accepted contents must be usable */
    uint64_t read = 0;
    for (uint64_t i = 0; i < r->num_records; i++)
        read += strlen(fsdpi_tr_name(r, r->records[i].what)) +
                strlen(fsdp_op_name(r->records[i].kind));
    for (uint64_t i = 0; i < r->num_pools; i++) read += strlen(fsdpi_tr_text(r, r->pools[i].name));
    CHECK(read > 0);
    FILE *none = fopen("/dev/null", "w");
    CHECK(none != NULL);
    if (json_write(&job, none, why, sizeof why)) CHECK(*why);
    fclose(none);
    fsdpi_tr_free(&job);
    return 0;
}

TEST(trace, damaged_files, SECONDS(120)) {
    small x = {dir_of("t"), 40, 0, 0, LAST + 1};
    char path[400];
    size_t size;
    lab_run(1, NULL, train_alone, &x);
    unsigned char *bytes = bytes_of(x.dir, path, sizeof path, &size);
    CHECK(size < FSDPI_TR_BLOCK);
    CHECK(!is_refused(x.dir));
    for (size_t i = 0; i < size; i++) { /* flips a bit of each byte, and truncates before it */
        bytes[i] ^= (unsigned char)(1 << i % 8);
        put_bytes(path, bytes, size);
        CHECK_MSG(is_refused(x.dir), "byte %zu", i);
        bytes[i] ^= (unsigned char)(1 << i % 8);
        put_bytes(path, bytes, i);
        CHECK_MSG(is_refused(x.dir), "cut at %zu", i);
    }
    free(bytes);
}

/* With valid checksums: whatever a file contains, it is refused or usable. */
TEST(trace, hostile_files, SECONDS(120)) {
    small x = {dir_of("t"), 40, 0, 0, LAST + 1};
    char path[400];
    size_t size;
    uint64_t seed = h_seed();
    int refused = 0, turns = 3000;
    lab_run(1, NULL, train_alone, &x);
    unsigned char *bytes = bytes_of(x.dir, path, sizeof path, &size);
    unsigned char *bad = (unsigned char *)lab_zeros(size, 1);
    for (int turn = 0; turn < turns; turn++) {
        static const uint64_t words[] = {0, 1, 255, 65535, 1u << 20, UINT32_MAX, UINT64_MAX,
                                         (uint64_t)1 << 63, (uint64_t)1 << 60};
        memcpy(bad, bytes, size);
        for (int k = lab_pick(&seed, 3); k >= 0; k--) {
            size_t at = (size_t)lab_pick(&seed, (int)size - 16), width = (size_t)1 << lab_pick(&seed, 4);
            at -= at % width;
            if (lab_pick(&seed, 4)) memcpy(bad + at, &words[lab_pick(&seed, 9)], width);
            else bad[at] = (unsigned char)lab_pick(&seed, 256);
        }
        set_sum(bad, size);
        put_bytes(path, bad, size);
        refused += is_refused(x.dir);
    }
    CHECK(refused > turns / 10);
    set_sum(bytes, size);
    put_bytes(path, bytes, size);
    CHECK(!is_refused(x.dir));
    free(bytes), free(bad);
}

TEST(trace, no_file) {
    char path[400], why[400];
    fsdpi_tr_job job;
    CHECK(!mkdir(dir_of("t"), 0777));
    snprintf(path, sizeof path, "%s/x.0.trace", dir_of("t"));
    CHECK(!mkfifo(path, 0600));
    CHECK(fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why));
    CHECK_MSG(strstr(why, "x.0.trace: it is damaged, or of another version"), "%s", why);
    CHECK(!unlink(path));
    CHECK(fsdpi_tr_read(dir_of("t"), "x", 0, &job, why, sizeof why));
    CHECK_MSG(strstr(why, "there are no traces (*.trace) of job x"), "%s", why);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static char written[1 << 20];
static int json_of(const fsdpi_tr_job *job, char *why, size_t cap) {
    FILE *file = tmpfile();
    CHECK(file != NULL);
    int status = json_write(job, file, why, cap);
    rewind(file);
    written[fread(written, 1, sizeof written - 1, file)] = 0;
    fclose(file);
    return status;
}
static int count_of(const char *text) {
    int num = 0;
    for (const char *at = written; (at = strstr(at, text)) != NULL; at++) num++;
    return num;
}
static void train_two(lab_rank *r) {
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    build(&m, r->w, &modes[0]);
    fsdp_trace *t = start(&m, dir_of("t"), 0);
    CALL(r->w, fsdp_adamw_create(m.model, NULL, &opt));
    for (int step = 0; step <= LAST; step++) step_of(&m, opt);
    CALL(r->w, fsdp_trace_stop(t));
}
/* A file that is damaged, of another version or of another run is skipped and named; the others are
   read, whatever the time of day of their hosts. */
TEST(trace, left_out) {
    static const char *const wants[] = {"damaged or cut, at byte", "of another version of fsdp.h",
                                        "of another run of the job", "", ""};
    char text[4096], path[2][400], why[400], name[500];
    unsigned char *bytes[2];
    size_t size;
    fsdpi_tr_job job;
    lab_run(2, NULL, train_two, NULL);
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why), "%s", why);
    for (int k = 0; k < 2; k++)
        snprintf(path[k], sizeof path[k], "%s/%s.%d.trace", dir_of("t"), job.job, k);
    fsdpi_tr_free(&job);
    for (int bad = 0; bad < 2; bad++)
        for (int kind = 0; kind < 5; kind++) {
            fsdpi_tr_header h;
            FILE *file = fopen(path[bad], "rb");
            CHECK(file != NULL);
            bytes[0] = (unsigned char *)lab_zeros(FSDPI_TR_BLOCK, 1);
            bytes[1] = (unsigned char *)lab_zeros(FSDPI_TR_BLOCK, 1);
            size = fread(bytes[0], 1, FSDPI_TR_BLOCK, file);
            CHECK(size < FSDPI_TR_BLOCK);
            fclose(file);
            memcpy(bytes[1], bytes[0], size);
            memcpy(&h, bytes[1], sizeof h);
            if (kind == 1) memcpy(h.magic, "fsdptr03", sizeof h.magic);
            if (kind == 2) h.id++;
            /* the later one counts */
            if (kind == 2 && !bad) h.real_ns -= 1000000000;
            if (kind == 2 && bad) h.real_ns -= 2000000000;
            if (kind > 2) h.real_ns += (kind == 3 ? -1 : 1) * (int64_t)30 * 86400 * 1000000000;
            memcpy(bytes[1], &h, sizeof h);
            set_sum(bytes[1], size);
            if (kind == 0) bytes[1][size / 2] ^= 1;
            put_bytes(path[bad], bytes[1], size);
            CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why), "%s", why);
            CHECK_EQ_INT(job.num, kind < 3 ? 1 : 2);
            CHECK_EQ_INT(job.size, 2);
            CHECK_EQ_INT(job.rank[0].head.rank, kind < 3 ? !bad : 0);
            CHECK_EQ_INT(job.notes.num, kind < 3);
            snprintf(name, sizeof name, "%s:\n    ", strrchr(path[bad], '/') + 1);
            CHECK_MSG(strstr(job.notes.text, wants[kind]), "%s", job.notes.text);
            CHECK_MSG(kind > 2 || strstr(job.notes.text, name), "%s", job.notes.text);
            int known = 0; /* without the other member the last rank is unknown */
            for (uint64_t i = 0; i < job.rank[0].num_records; i++)
                known += job.rank[0].last[i] >= 0 || job.rank[0].peers_ns[i];
            CHECK_EQ_INT(known > 0, kind > 2);
            fsdpi_tr_free(&job);
            CHECK_OK(fsdp_trace_report(dir_of("t"), text, sizeof text));
            CHECK_MSG(kind > 2 || (strstr(text, "left out:\n") && strstr(text, "traces of 1 of 2")),
                      "%s", text);
            put_bytes(path[bad], bytes[0], size);
            free(bytes[0]), free(bytes[1]);
        }
}

/* Compares each encoding of a number in one to four bytes with the rules of UTF-8. */
TEST(trace, utf8) {
    static const unsigned long least[5] = {0, 0, 0x80, 0x800, 0x10000};
    for (unsigned long code = 1; code < 0x200000; code++)
        for (int num = 1; num <= 4; num++) {
            static const unsigned char lead[5] = {0, 0, 0xc0, 0xe0, 0xf0};
            unsigned char c[5] = {0, 0, 0, 0, 0};
            if (code >> (num == 1 ? 7 : 5 * num + 1)) continue; /* too large for this encoding */
            for (int k = num - 1; k > 0; k--)
                c[k] = (unsigned char)(0x80 | (code >> (6 * (num - 1 - k)) & 0x3f));
            c[0] = (unsigned char)(lead[num] | code >> (6 * (num - 1)));
            const int good = code >= least[num] && code <= 0x10ffff && (code < 0xd800 || code > 0xdfff);
            CHECK_MSG(json_utf8(c) == (good ? num : 0), "%lx as %d bytes: %d", code, num, json_utf8(c));
        }
}

/* The error of a clock is the worse one of its two groups of meetings. */
TEST(trace, clock_error) {
    for (int wide = 0; wide < 2; wide++) {
        static fsdpi_tr_meeting a[2 * FSDPI_TR_MEETINGS], b[2 * FSDPI_TR_MEETINGS];
        fsdpi_tr_rank r[2];
        fsdpi_tr_job job;
        fsdpi_tr_why why = {NULL, 0};
        int64_t shift[2];
        memset(r, 0, sizeof r), memset(&job, 0, sizeof job);
        for (int k = 0; k < 2 * FSDPI_TR_MEETINGS; k++) {
            const int64_t took = k / FSDPI_TR_MEETINGS == wide ? 5000 : 10, at = 1000000 * (k + 1);
            a[k].came_ns = at, a[k].left_ns = at + took;
            b[k].came_ns = at + 7, b[k].left_ns = at + took + 7;
        }
        r[0].meetings = a, r[1].meetings = b;
        r[0].num_meetings = r[1].num_meetings = 2 * FSDPI_TR_MEETINGS;
        r[0].head.clock = 1, r[1].head.clock = 2, r[1].head.rank = 1;
        job.rank = r, job.num = 2;
        CHECK_EQ_INT(fsdpi_tr_clock_of(&job, 1, 0, shift, &why), 0);
        CHECK_EQ_INT(shift[0], -7);
        CHECK_EQ_INT(shift[1], -7);
        CHECK_EQ_INT(r[1].error_ns, 5000);
    }
}

/* Clocks drift by a thousandth at most. A larger drift between two groups of meetings counts as error,
   which is refused if it exceeds the sum of both errors. Drift in ns over 1 ms, each clock known to
   500 ns. */
TEST(trace, clock_drift) {
    for (int64_t drift = -4100; drift <= 4100; drift += 200) {
        const int64_t span = 1000000, size = drift < 0 ? -drift : drift, more = size - 1000;
        const int64_t shift[2] = {70, 70 + drift};
        fsdpi_tr_meeting m[2];
        fsdpi_tr_event o;
        fsdpi_tr_rank first, r;
        fsdpi_tr_why why = {NULL, 0};
        memset(m, 0, sizeof m), memset(&o, 0, sizeof o);
        memset(&first, 0, sizeof first), memset(&r, 0, sizeof r);
        m[1].came_ns = m[1].left_ns = o.begin_ns = o.end_ns = span;
        r.meetings = m, r.num_meetings = 2, r.records = &o, r.num_records = 1, r.error_ns = 500;
        CHECK_EQ_INT(fsdpi_tr_shift(&r, &first, shift, &why), more > 1000 ? -1 : 0);
        if (more > 1000) continue;
        CHECK_NEAR((double)r.error_ns, (double)(500 + (more > 0 ? more : 0)), 1);
        CHECK_NEAR((double)(o.begin_ns - span - 70),
                   (double)(size <= 1000 ? drift : drift < 0 ? -1000 : 1000), 1);
    }
}

/* Events are in the order of their begin; of two that begin together the longer one is first. */
TEST(trace, order) {
    enum { ALL = 24 };
    fsdpi_tr_event all[ALL];
    memset(all, 0, sizeof all);
    for (int i = 0; i < ALL; i++) { /* sorted by hand; numbers wrap */
        all[i].begin_ns = i / 12, all[i].end_ns = 3 - i / 6 % 2;
        all[i].seq = UINT32_MAX + (uint32_t)(i / 2 % 3), all[i].kind = (uint8_t)(i % 2);
    }
    for (int i = 0; i < ALL; i++)
        for (int k = 0; k < ALL; k++) {
            const int order = fsdpi_tr_by_time(&all[i], &all[k]);
            CHECK_EQ_INT((order > 0) - (order < 0), (i > k) - (i < k));
        }
}

/* Collectives that have waited for a stream and for a rank, on one stream; some that begin before
   the previous one ends; and a name that is partly UTF-8. */
TEST(trace, json) {
    fsdpi_tr_job job;
    char why[400];
    lab_run(2, NULL, train_two, NULL);
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why), "%s", why);
    fsdpi_tr_rank *r = &job.rank[0];
    int num = 0, ranks = job.num;
    for (uint64_t i = 0; i < r->num_records; i++)
        if (fsdpi_tr_is_collective(&r->records[i])) r->records[num++] = r->records[i];
    CHECK(num > 10);
    r->num_records = (uint64_t)num, r->num_steps = 0, job.num = 1;
    for (int i = 0; i < num; i++) {
        fsdpi_tr_event *o = &r->records[i];
        o->begin_ns = 1000000 * (i + 1), o->end_ns = o->begin_ns + 600000;
        o->stream = FSDP_STREAM_COMPUTE, o->waited_ns = 3000, o->what = 0;
        r->peers_ns[i] = o->begin_ns + 100000, r->last[i] = 1;
    }
    memcpy(r->text + r->names[0], "\xc3\xa4\xffxy", 5);
    CHECK_MSG(!json_of(&job, why, sizeof why), "%s", why);
    CHECK_EQ_INT(count_of("\"waits for another stream\""), num);
    CHECK_EQ_INT(count_of("\"waits for rank 1\""), num);
    CHECK_EQ_INT(count_of("\"transfer\""), num);
    CHECK_EQ_INT(count_of("\"\xc3\xa4\\ufffdxy "), num);
    CHECK_EQ_INT(count_of("\"ts\":603.000,\"name\":\"transfer"), 0);
    r->records[1].begin_ns = r->records[0].end_ns - 40000; /* it has waited for 3 us */
    CHECK_MSG(!json_of(&job, why, sizeof why), "%s", why);
    CHECK_EQ_INT(count_of("\"waits for another stream\""), num - 1);
    CHECK_EQ_INT(count_of("\"ts\":603.000,\"name\":\"waits for rank 1\",\"dur\":500.000"), 1);
    r->records[1].begin_ns = r->records[0].end_ns - 48000;
    CHECK_EQ_INT(json_of(&job, why, sizeof why), -1);
    CHECK_MSG(strstr(why, "overlap on a thread"), "%s", why);
    job.num = ranks;
    fsdpi_tr_free(&job);
}

/* ---- clocks ---------------------------------------------------------------------------------- */

static fsdp_threads shared;
static int64_t late_now(void *user) {
    (void)user;
    return w_now_ns(NULL) + 5000000000;
}
static void other_clock(int rank, int size, void *arg) {
    fsdp_world_desc d = w_desc(rank, size, &shared, "clocks", 0);
    lab_built m = FSDP_ZERO;
    fsdp_adamw *opt;
    fsdp_world *w;
    (void)arg;
    if (rank == 1) d.clock.now_ns = late_now;
    CALL(NULL, fsdp_init(&d, &w));
    build(&m, w, &modes[0]);
    fsdp_trace *t = start(&m, dir_of("t"), 0);
    CALL(w, fsdp_adamw_create(m.model, NULL, &opt));
    for (int step = 0; step <= LAST + 1; step++) step_of(&m, opt);
    CALL(w, fsdp_trace_stop(t));
    CHECK_OK(fsdp_shutdown(w));
}
/* Ranks 0 and 2 share a clock; rank 1 seems to be on a host with another one. */
TEST(trace, clocks) {
    fsdpi_tr_job job;
    char why[400] = "", path[400];
    shared.size = 3;
    h_ranks_thread(3, other_clock, NULL);
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why), "%s", why);
    const fsdpi_tr_rank *late = &job.rank[1];
    CHECK_EQ_INT(job.rank[2].error_ns, 0);
    CHECK_EQ_INT(job.rank[2].shift_ns, 0);
    CHECK(late->error_ns > 0 && late->error_ns < 5000000000);
    CHECK_EQ_INT(late->num_meetings, 2 * FSDPI_TR_MEETINGS);
    int64_t off = late->shift_ns + 5000000000;
    h_message("off by %lld ns, at most %lld", (long long)off, (long long)late->error_ns);
    CHECK(off <= late->error_ns && -off <= late->error_ns);
    int64_t worst = 0; /* no rank leaves a collective before all have arrived */
    for (uint64_t i = 0; i < late->num_records; i++) {
        if (!fsdpi_tr_is_collective(&late->records[i])) continue;
        CHECK(late->last[i] >= 0);
        int64_t early = late->peers_ns[i] - late->records[i].end_ns;
        if (worst < early) worst = early;
    }
    CHECK(worst <= 2 * late->error_ns);
    snprintf(path, sizeof path, "%s/%s.1.trace", dir_of("t"), job.job);
    fsdpi_tr_free(&job);

    FILE *file = fopen(path, "rb"); /* as if it had met no rank */
    static unsigned char bytes[1 << 20];
    CHECK(file != NULL);
    size_t size = fread(bytes, 1, sizeof bytes, file);
    fclose(file);
    CHECK(size < FSDPI_TR_BLOCK);
    fsdpi_tr_header head;
    memcpy(&head, bytes, sizeof head);
    head.mesh++;
    memcpy(bytes, &head, sizeof head);
    set_sum(bytes, size);
    put_bytes(path, bytes, size);
    CHECK(fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why));
    CHECK_MSG(strstr(why, "ranks 0 and 1 were not compared"), "%s", why);
    CHECK_MSG(!fsdpi_tr_read(dir_of("t"), NULL, 1, &job, why, sizeof why), "%s", why);
    CHECK_EQ_INT(job.rank[1].error_ns, -1);
    off = job.rank[1].shift_ns + 5000000000;
    CHECK(off < 1000000000 && off > -1000000000);
    fsdpi_tr_free(&job);

    head.mesh--; /* an impossible meeting */
    memcpy(bytes, &head, sizeof head);
    fsdpi_tr_meeting *one =
        (fsdpi_tr_meeting *)(void *)(bytes + head.section[FSDPI_TR_IN_MEETINGS].at);
    one[3].came_ns += 3600000000000, one[3].left_ns += 3600000000000;
    set_sum(bytes, size);
    put_bytes(path, bytes, size);
    CHECK(fsdpi_tr_read(dir_of("t"), NULL, 0, &job, why, sizeof why));
    CHECK_MSG(strstr(why, "contradict"), "%s", why);
}

/* ---- queries of the recorder ----------------------------------------------------------------- */

static void groups(lab_rank *r) {
    int32_t got[8], want[8];
    lab_built m = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_unit_desc ud;
    fsdp_model_desc md;
    build(&m, r->w, &modes[3]);
    CALL(r->w, fsdp_model_commit(m.model));
    CALL(r->w, fsdp_model_mesh_info(m.model, &info));
    CHECK_EQ_INT(fsdp_comm_ranks(r->w, info.shard_comm, got), 2);
    CHECK_EQ_INT(fsdp_mesh_ranks(info.mesh, info.shard_mesh_dim, want), 2);
    CHECK_EQ_MEM(got, want, 2 * sizeof *got);
    CHECK_EQ_INT(fsdp_comm_ranks(r->w, info.replicate_comm, got), 2);
    CHECK_EQ_INT(fsdp_mesh_ranks(info.mesh, info.replicate_mesh_dim, want), 2);
    CHECK_EQ_MEM(got, want, 2 * sizeof *got);
    CHECK_EQ_INT(fsdp_comm_ranks(r->w, NULL, got), 0);
    CHECK_EQ_INT(fsdp_comm_ranks(NULL, info.shard_comm, got), 0);
    CALL(r->w, fsdp_unit_desc_get(m.unit[2], &ud));
    CHECK_EQ_STR(ud.name, "unit2");
    CHECK_EQ_INT(ud.num_params, 2);
    CALL(r->w, fsdp_model_desc_get(m.model, &md));
    CHECK_EQ_INT(md.reshard_after_forward, FSDP_RESHARD_ALWAYS);
    CHECK_STATUS(fsdp_unit_desc_get(NULL, &ud), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_model_desc_get(m.model, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_EQ_INT(fsdp_model_number(m.model), 0);
    CHECK_EQ_INT(fsdp_model_number(NULL), 0);
    CHECK_EQ_STR(fsdp_world_job(NULL), "");
    CHECK(*fsdp_world_job(r->w));
    CHECK_EQ_INT(fsdp_now(NULL), 0);
    fsdp_extension none = FSDP_ZERO; /* not attached */
    CHECK_STATUS(fsdp_extension_mute(NULL, &none), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_extension_mute(m.model, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_extension_mute(m.model, &none), FSDP_ERR_INVALID_ARG);
}
TEST(trace, groups) {
    lab_how how = FSDP_ZERO;
    how.lanes = 2;
    lab_run(4, &how, groups, NULL);
}
