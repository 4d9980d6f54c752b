/* test_driver.c - the seam for extensions: what an observer sees, what it can replace, and that the
   counters and the bytes are those of the operations.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#define FSDP_NO_BACKEND
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include "sim.h"

enum { MAX_PARAMS = 12, MAX_UNITS = 3, NUM_UNITS = 3 };

typedef struct {
    const char *name;
    int world, async, threads, unfused;
    fsdp_dtype dtype, param, reduce; /* of the shards; desc's param_dtype, reduce_dtype */
    int64_t direct_min;
} setting;

static const setting settings[] = {
    {"W=1/inline", 1, 0, 0, 0, FSDP_F32, 0, 0, 0},
    {"W=1/cast", 1, 1, 0, 0, FSDP_F32, FSDP_BF16, 0, 0},
    {"W=2/inline", 2, 0, 0, 0, FSDP_F32, 0, 0, 1},
    {"W=2/lanes", 2, 0, 2, 0, FSDP_F32, FSDP_BF16, FSDP_F32, 1},
    {"W=3/async", 3, 1, 0, 0, FSDP_F32, 0, 0, FSDP_DIRECT_NEVER},
    {"W=4/async/bf16", 4, 1, 0, 0, FSDP_F32, FSDP_BF16, FSDP_F32, 256},
    {"W=4/async/unfused", 4, 1, 0, 1, FSDP_F32, FSDP_BF16, FSDP_F32, 256},
    {"W=4/all_bf16", 4, 0, 0, 0, FSDP_BF16, 0, 0, 64},
    {"W=5/narrow_reduce", 5, 1, 0, 0, FSDP_F32, FSDP_F32, FSDP_BF16, 1},
    {"W=7/f64", 7, 0, 0, 0, FSDP_F64, 0, 0, 128},
    {"W=64/async", 64, 1, 0, 0, FSDP_F32, FSDP_F16, FSDP_F32, 0},
    {"W=1024/inline", 1024, 0, 0, 1, FSDP_F32, 0, 0, 0},
};

/* Shapes by unit; 0 rows are there, too. frozen: bits. */
static const struct {
    int num_params, frozen;
    struct {
        int64_t rows, cols;
        int dim;
    } params[6];
} shapes[NUM_UNITS] = {
    {3, 0, {{8, 16, 0}, {16, 0, 0}, {1, 5, 1}}},
    {6, 0x12, {{17, 9, 0}, {5, 4, 0}, {3, 50, 1}, {0, 7, 0}, {33, 2, 0}, {1, 1, 0}}},
    {1, 0, {{40, 3, 0}}},
};

/* ---- an observer that adds up ---------------------------------------------------------------- */

typedef struct {
    int call;
    const fsdp_unit *unit;
} said;

typedef struct {
    sim s;
    fsdp_model *model;
    fsdp_unit *units[NUM_UNITS];
    uint64_t last_seq, calls[FSDP_OP_COUNT], bytes[FSDP_OP_COUNT];
    said marks[256], hooks[256];
    int num_marks, num_hooks;
    uint32_t swallow; /* 1u << kind */
    int replace;      /* the hook answers this call itself, -1: none */
} bed;

static int on_op(void *user, fsdp_model *model, const fsdp_op *op) {
    bed *b = (bed *)user;
    CHECK(model == b->model);
    CHECK_EQ_INT(op->seq, b->last_seq + 1); /* none is left out, none comes twice */
    CHECK(op->kind < FSDP_OP_COUNT && op->label < FSDP_LABEL_COUNT &&
          op->stream < FSDP_STREAM_COUNT);
    CHECK(op->state < FSDP_STATE_COUNT && op->what && *op->what);
    b->last_seq = op->seq;
    b->calls[op->kind]++;
    b->bytes[op->kind] += op->bytes;
    if (op->kind == FSDP_OP_HOOK) {
        CHECK(b->num_marks < 256);
        b->marks[b->num_marks].call = (int)op->count;
        b->marks[b->num_marks++].unit = op->unit;
        CHECK_EQ_INT(op->bytes, 0);
    } else if (op->unit) {
        CHECK_EQ_STR(op->what, fsdp_unit_name(op->unit));
    }
    return (b->swallow >> op->kind & 1) != 0;
}

static int on_hook(void *user, fsdp_model *model, fsdp_unit *unit, int call) {
    bed *b = (bed *)user;
    CHECK(model == b->model && b->num_hooks < 256);
    b->hooks[b->num_hooks].call = call;
    b->hooks[b->num_hooks++].unit = unit;
    return call == b->replace;
}

static void observe(bed *b, int hook, int op) {
    fsdp_driver d = {NULL, NULL, NULL};
    d.hook = hook ? on_hook : NULL;
    d.op = op ? on_op : NULL;
    d.user = b;
    CHECK_OK(fsdp_set_driver(b->model, &d));
}

static void bed_open(bed *b, const setting *set) {
    memset(b, 0, sizeof *b);
    b->replace = -1;
    sim_init(&b->s, set->world, set->world - 1);
    b->s.async = set->async;
    b->s.threads = set->threads;
    b->s.fused = !set->unfused;
    CHECK(sim_open(&b->s));
    fsdp_model_desc md = FSDP_ZERO;
    md.param_dtype = set->param;
    md.reduce_dtype = set->reduce;
    md.direct_min = set->direct_min;
    CHECK_OK(fsdp_model_create(b->s.world, &md, &b->model));
    for (int i = 0; i < NUM_UNITS; i++) {
        fsdp_param_desc p[6];
        fsdp_unit_desc ud = FSDP_ZERO;
        for (int k = 0; k < shapes[i].num_params; k++) {
            p[k] = shapes[i].params[k].cols
                       ? fsdp_mat(NULL, shapes[i].params[k].rows, shapes[i].params[k].cols)
                       : fsdp_vec(NULL, shapes[i].params[k].rows);
            p[k].shard_dim = shapes[i].params[k].dim;
            p[k].frozen = shapes[i].frozen >> k & 1;
            p[k].dtype = set->dtype;
        }
        ud.params = p;
        ud.num_params = shapes[i].num_params;
        CHECK_OK(fsdp_fully_shard(b->model, &ud, &b->units[i]));
    }
}

static void bed_close(bed *b) { CHECK_EQ_INT(sim_close(&b->s), 0); }

static void step(bed *b) {
    double norm;
    for (int i = 0; i < NUM_UNITS; i++) {
        CHECK_OK(fsdp_pre_forward(b->units[i]));
        CHECK_OK(fsdp_post_forward(b->units[i]));
    }
    for (int i = NUM_UNITS - 1; i >= 0; i--) {
        CHECK_OK(fsdp_pre_backward(b->units[i]));
        CHECK(fsdp_grad(b->units[i], 0));
        CHECK_OK(fsdp_post_backward(b->units[i]));
    }
    CHECK_OK(fsdp_finalize_backward(b->model));
    CHECK_OK(fsdp_clip_grad_norm(b->model, 1.0, &norm));
    CHECK_OK(fsdp_params_changed(b->model));
    CHECK_OK(fsdp_zero_grad(b->model));
}

/* ---- what an observer sees ------------------------------------------------------------------- */

TEST_P(driver, counters_are_the_sum_of_the_ops, settings) {
    bed b;
    bed_open(&b, row);
    observe(&b, 0, 1);
    for (int k = 0; k < 3; k++) {
        if (k == 1) CHECK_OK(fsdp_set_requires_gradient_sync(b.model, NULL, 0));
        if (k == 2) CHECK_OK(fsdp_set_requires_gradient_sync(b.model, NULL, 1));
        step(&b);
    }
    fsdp_counters c = FSDP_ZERO;
    CHECK_OK(fsdp_model_counters(b.model, &c));
    for (int kind = 0; kind < FSDP_OP_COUNT; kind++) {
        CHECK_EQ_INT(c.calls[kind], b.calls[kind]);
        CHECK_EQ_INT(c.bytes[kind], b.bytes[kind]);
    }
    if (!row->threads) { /* and what the tables were asked for */
        for (int kind = FSDP_OP_ALL_GATHER; kind <= FSDP_OP_BROADCAST; kind++) {
            CHECK_EQ_INT(b.s.colls[kind], c.calls[kind]);
            CHECK_EQ_INT(b.s.coll_bytes[kind], c.bytes[kind]);
        }
        CHECK_EQ_INT(b.s.works,
                     c.calls[FSDP_OP_COPY] + c.calls[FSDP_OP_ZERO] + c.calls[FSDP_OP_NORM]);
    }
    bed_close(&b);
}

/* Each call of a step once, in order, before its work. */
TEST_P(driver, markers_of_calls, settings) {
    bed b;
    bed_open(&b, row);
    observe(&b, 0, 1);
    step(&b);
    int n = 0;
    for (int half = 0; half < 2; half++)
        for (int i = 0; i < NUM_UNITS; i++)
            for (int end = 0; end < 2; end++, n++) {
                CHECK(n < b.num_marks);
                CHECK_EQ_INT(b.marks[n].call,
                             (half ? FSDP_CALL_PRE_BACKWARD : FSDP_CALL_PRE_FORWARD) + end);
                CHECK(b.marks[n].unit == b.units[half ? NUM_UNITS - 1 - i : i]);
            }
    CHECK(n < b.num_marks);
    CHECK_EQ_INT(b.marks[n].call, FSDP_CALL_FINALIZE);
    CHECK(b.marks[n].unit == NULL);
    static const int after[] = {FSDP_CALL_CLIP, FSDP_CALL_PARAMS_CHANGED, FSDP_CALL_ZERO_GRAD};
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(b.marks[++n].call, after[i]);
    CHECK_EQ_INT(b.num_marks, n + 1);
    double full[128]; /* of any dtype */
    memset(full, 0, sizeof full);
    CHECK_OK(fsdp_param_load(b.units[0], 0, full));
    CHECK_EQ_INT(b.marks[b.num_marks - 1].call, FSDP_CALL_LOAD);
    CHECK_OK(fsdp_param_full(b.units[0], 0, full));
    CHECK_EQ_INT(b.marks[b.num_marks - 1].call, FSDP_CALL_FULL);
    CHECK_OK(fsdp_unshard(b.units[1]));
    CHECK_EQ_INT(b.marks[b.num_marks - 1].call, FSDP_CALL_UNSHARD);
    CHECK_OK(fsdp_wait(b.units[1]));
    CHECK_EQ_INT(b.marks[b.num_marks - 1].call, FSDP_CALL_WAIT);
    CHECK_OK(fsdp_reshard(b.units[1]));
    CHECK_EQ_INT(b.marks[b.num_marks - 1].call, FSDP_CALL_RESHARD);
    CHECK(b.marks[b.num_marks - 1].unit == b.units[1]);
    CHECK_OK(fsdp_model_reset(b.model));
    CHECK_EQ_INT(b.marks[b.num_marks - 1].call, FSDP_CALL_RESET);
    /* getters leave none, impossible calls neither */
    int num = b.num_marks;
    CHECK(!fsdp_data(b.units[0], 0));
    CHECK_STATUS(fsdp_post_forward(b.units[0]), FSDP_ERR_INVALID_STATE);
    CHECK_EQ_INT(b.num_marks, num);
    /* removed: nothing is seen any more, the model works on */
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE);
    CHECK_OK(fsdp_set_driver(b.model, NULL));
    uint64_t seq = b.last_seq;
    step(&b);
    CHECK_EQ_INT(b.last_seq, seq);
    bed_close(&b);
}

/* ---- an observer that acts ------------------------------------------------------------------- */

/* Ops that the observer takes are not run; everything else goes on as if they had been. */
TEST_P(driver, swallowed_ops_are_not_run, settings) {
    bed b;
    bed_open(&b, row);
    observe(&b, 0, 1);
    b.swallow = 1u << FSDP_OP_ALL_GATHER | 1u << FSDP_OP_REDUCE_SCATTER | 1u << FSDP_OP_ALL_REDUCE;
    step(&b);
    for (int kind = 0; kind < FSDP_OP_COUNT; kind++) CHECK_EQ_INT(b.s.colls[kind], 0);
    if (!row->threads)
        CHECK_EQ_INT(b.s.works,
                     b.calls[FSDP_OP_COPY] + b.calls[FSDP_OP_ZERO] + b.calls[FSDP_OP_NORM]);
    uint64_t works = b.s.works;
    int64_t waits = b.s.waits;
    b.swallow = ~0u;
    memset(b.calls, 0, sizeof b.calls);
    for (int k = 0; k < 2; k++) step(&b);
    CHECK_EQ_INT(b.s.works, works);
    CHECK_EQ_INT(b.s.waits, waits);
    CHECK(b.calls[FSDP_OP_HOOK] >= 2 * (4 * NUM_UNITS + 1)); /* still shown */
    for (int i = 0; i < NUM_UNITS; i++) {
        CHECK_EQ_INT(fsdp_unit_state(b.units[i]), FSDP_STATE_IDLE);
        CHECK_EQ_INT(fsdp_unit_storage(b.units[i]), FSDP_STORAGE_SHARDED);
    }
    b.swallow = 0;
    step(&b);
    CHECK(row->world == 1 || row->threads || b.s.colls[FSDP_OP_ALL_GATHER] > 0);
    bed_close(&b);
}

/* A hook that answers a call has done its work: the table is not asked. */
TEST_P(driver, hook_replaces_a_call, settings) {
    static const struct {
        fsdp_status (*run)(fsdp_unit *);
        int call;
    } calls[] = {{fsdp_pre_forward, FSDP_CALL_PRE_FORWARD},
                 {fsdp_post_forward, FSDP_CALL_POST_FORWARD},
                 {fsdp_pre_backward, FSDP_CALL_PRE_BACKWARD},
                 {fsdp_post_backward, FSDP_CALL_POST_BACKWARD},
                 {fsdp_unshard, FSDP_CALL_UNSHARD},
                 {fsdp_wait, FSDP_CALL_WAIT},
                 {fsdp_reshard, FSDP_CALL_RESHARD}};
    bed b;
    bed_open(&b, row);
    observe(&b, 1, 1);
    for (int i = 0; i < 7; i++) {
        b.replace = calls[i].call;
        uint64_t seq = b.last_seq;
        int hooks = b.num_hooks;
        CHECK_OK(calls[i].run(b.units[1])); /* possible or not */
        CHECK_EQ_INT(b.last_seq, seq);
        CHECK_EQ_INT(b.num_hooks, hooks + 1);
        CHECK_EQ_INT(b.hooks[hooks].call, calls[i].call);
        CHECK(b.hooks[hooks].unit == b.units[1]);
        CHECK_EQ_INT(fsdp_unit_state(b.units[1]), FSDP_STATE_IDLE);
        CHECK_EQ_INT(fsdp_unit_storage(b.units[1]), FSDP_STORAGE_SHARDED);
    }
    /* finalize: the open unit would make it impossible */
    b.replace = -1;
    CHECK_OK(fsdp_pre_forward(b.units[0]));
    b.replace = FSDP_CALL_FINALIZE;
    uint64_t seq = b.last_seq;
    CHECK_OK(fsdp_finalize_backward(b.model));
    CHECK_EQ_INT(b.last_seq, seq);
    CHECK(b.hooks[b.num_hooks - 1].unit == NULL &&
          b.hooks[b.num_hooks - 1].call == FSDP_CALL_FINALIZE);
    CHECK_EQ_INT(fsdp_unit_state(b.units[0]), FSDP_STATE_FORWARD);
    /* a hook that only looks changes nothing, and sees impossible calls before the table refuses
       them */
    b.replace = -1;
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE);
    CHECK_STATUS(fsdp_post_backward(b.units[2]), FSDP_ERR_INVALID_STATE);
    CHECK_EQ_INT(b.hooks[b.num_hooks - 1].call, FSDP_CALL_POST_BACKWARD);
    CHECK_OK(fsdp_post_forward(b.units[0]));
    bed_close(&b);
}

/* ---- bytes moved equal the formula ----------------------------------------------------------- */

TEST_P(driver, bytes_equal_the_formula, settings) {
    bed b;
    bed_open(&b, row);
    uint64_t gather = 0, reduce = 0, others = (uint64_t)row->world - 1;
    fsdp_dtype param = row->param ? row->param : row->dtype,
               reduction = row->reduce ? row->reduce : row->dtype;
    /* the reduction sends what the caller wrote, if the backend widens while it sums, or else a
       cast copy */
    int widens = reduction == FSDP_F32 && (param == FSDP_BF16 || param == FSDP_F16) &&
                 !row->unfused;
    fsdp_dtype sent = param == reduction || widens ? param : reduction;
    for (int i = 0; i < NUM_UNITS; i++) {
        uint64_t all = 0,
                 trained = 0; /* elements of one rank's stored shards; plus one flag of use each */
        for (int k = 0; k < shapes[i].num_params; k++) {
            uint64_t cut = (uint64_t)shapes[i].params[k].rows,
                     rest = (uint64_t)shapes[i].params[k].cols;
            if (rest == 0) rest = 1;
            if (shapes[i].params[k].dim == 1) {
                uint64_t swap = cut;
                cut = rest;
                rest = swap;
            }
            uint64_t stored = (cut + others) / (others + 1) * rest;
            all += stored;
            if (!(shapes[i].frozen >> k & 1)) trained += stored + 1;
        }
        gather += 2 * others * all * fsdp_dtype_size(param); /* forward and backward */
        reduce += others * trained * fsdp_dtype_size(sent);
    }
    for (int k = 1; k <= 3; k++) {
        fsdp_counters c = FSDP_ZERO;
        step(&b);
        CHECK_OK(fsdp_model_counters(b.model, &c));
        CHECK_EQ_INT(c.bytes[FSDP_OP_ALL_GATHER], (uint64_t)k * gather);
        CHECK_EQ_INT(c.bytes[FSDP_OP_REDUCE_SCATTER], (uint64_t)k * reduce);
        CHECK_EQ_INT(c.calls[FSDP_OP_ALL_GATHER], row->world > 1 ? k * 2 * NUM_UNITS : 0);
        CHECK_EQ_INT(c.calls[FSDP_OP_REDUCE_SCATTER], row->world > 1 ? k * NUM_UNITS : 0);
        CHECK_EQ_INT(c.bytes[FSDP_OP_ALL_REDUCE], /* the norm */
                     (uint64_t)k * sim_all_reduce_bytes(sizeof(double), row->world));
        CHECK_EQ_INT(c.calls[FSDP_OP_HOOK], 0); /* nobody listens */
    }
    bed_close(&b);
}
