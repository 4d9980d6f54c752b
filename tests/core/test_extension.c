/* test_extension.c - extensions: what one sees, answers, takes and provides, which calls it may
   make, and that counters and bytes are the sums over the ops.
   SPDX-License-Identifier: MIT */
#define TAGS TSAN
/* One process plays any world, so that larger worlds are fast, too. */
#define RANKS(n) ((n) == 4 || (n) == 5 ? MANY_RANKS : 0)
#include "harness.h"
#include "library.c"
#include "lab.h"
#include "sim.h"

enum { MAX_PARAMS = 12, MAX_UNITS = 3, NUM_UNITS = 3 };

typedef struct {
    const char *name;
    int world, async, threads, unfused;
    fsdp_dtype dtype, param, reduce; /* shards' dtype; the unit's param_dtype and reduce_dtype */
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

/* Shapes by unit; one parameter has 0 rows. frozen: bit mask of the frozen parameters. */
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
    uint64_t last_seq, calls[FSDP_OP_COUNT];
    said marks[256], hooks[256];
    int num_marks, num_hooks;
    uint32_t swallow; /* ops that the extension takes, as bits 1u << kind */
    int replace;      /* call that the extension answers itself; -1: none */
    fsdp_status answer;
    fsdp_extension extension;
} bed;

static int on_op(void *user, fsdp_model *model, fsdp_op *op) {
    bed *b = (bed *)user;
    if (!op->model) return 0; /* ops of the world have their own numbers */
    CHECK(model == b->model);
    CHECK_EQ_INT(op->seq, b->last_seq + 1); /* each op is shown once */
    CHECK(op->kind < FSDP_OP_COUNT && op->label < FSDP_LABEL_COUNT + 16 &&
          op->stream < FSDP_STREAM_COUNT);
    CHECK(op->state < FSDP_STATE_COUNT && op->what && *op->what);
    b->last_seq = op->seq;
    b->calls[op->kind]++;
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

static int on_call(void *user, fsdp_model *model, fsdp_unit *unit, int call, fsdp_status *status) {
    bed *b = (bed *)user;
    CHECK(model == b->model && b->num_hooks < 256);
    b->hooks[b->num_hooks].call = call;
    b->hooks[b->num_hooks++].unit = unit;
    CHECK_EQ_INT(*status, FSDP_OK);
    if (call == b->replace) *status = b->answer;
    return call == b->replace;
}

static void observe(bed *b, int call, int op) {
    fsdp_extension e = FSDP_ZERO;
    e.call = call ? on_call : NULL;
    e.op = op ? on_op : NULL;
    e.user = b;
    b->extension = e;
    CHECK_OK(fsdp_attach(b->model, &e));
}

static void bed_open(bed *b, const setting *set) {
    memset(b, 0, sizeof *b);
    b->replace = -1;
    sim_init(&b->s, set->world, set->world - 1);
    b->s.async = set->async;
    b->s.threads = set->threads;
    b->s.fused = !set->unfused;
    b->s.checks = set->world < 64;
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

static void bed_close(bed *b) {
    CHECK_EQ_INT(sim_close(&b->s), 0);
    CHECK_MSG(!b->s.races, "%s", b->s.race);
}

static void forwards(fsdp_unit *const *units) {
    for (int i = 0; i < NUM_UNITS; i++) {
        CHECK_OK(fsdp_pre_forward(units[i]));
        CHECK_OK(fsdp_post_forward(units[i]));
    }
}
/* Runs the backward of all units, and requests the gradients of their first parameters. */
static void backwards(fsdp_unit *const *units) {
    for (int i = NUM_UNITS - 1; i >= 0; i--) {
        CHECK_OK(fsdp_pre_backward(units[i]));
        CHECK(fsdp_grad(units[i], 0));
        CHECK_OK(fsdp_post_backward(units[i]));
    }
    CHECK_OK(fsdp_finalize_backward(units[0]->model));
}

static void step(bed *b) {
    double norm;
    forwards(b->units);
    backwards(b->units);
    CHECK_OK(fsdp_clip_grad_norm(b->model, 1.0, &norm));
    CHECK_OK(fsdp_params_changed(b->model));
    CHECK_OK(fsdp_zero_grad(b->model));
}

/* Makes an op of `unit`, or of the model. */
static fsdp_op op_of(const bed *b, fsdp_unit *unit, int kind, int stream) {
    fsdp_op op;
    fsdp_op_init(&op, b->model, unit, kind, FSDP_LABEL_NONE, stream);
    if (!unit) op.what = "x";
    return op;
}
/* Emits a marker: a unit acquires, has written or releases this buffer. planned: as a plan does. */
static fsdp_status emit_marker_by(const bed *b, fsdp_unit *unit, int kind, fsdp_buf *buf,
                                  int planned) {
    const int is_end = kind == FSDP_OP_RELEASE;
    fsdp_op op = op_of(b, unit, kind, is_end ? FSDP_STREAM_GATHER : FSDP_STREAM_COMPUTE);
    *(is_end ? &op.src : &op.dst) = buf;
    return planned ? fsdpi_plan_emit(b->model, &op, 1) : fsdp_emit(b->model, &op);
}
static fsdp_status emit_marker(const bed *b, fsdp_unit *unit, int kind, fsdp_buf *buf) {
    return emit_marker_by(b, unit, kind, buf, 0);
}
static fsdp_buf *make_buf(const bed *b, int64_t bytes) {
    fsdp_buf *buf;
    CHECK_OK(fsdp_buf_create(b->model, FSDP_POOL_SCRATCH, FSDP_MEMORY_DEVICE, bytes, &buf));
    return buf;
}

/* ---- what an observer sees ------------------------------------------------------------------- */

/* Each call of a step emits one marker, in order, before its work. */
TEST_P(extension, markers_of_calls, settings, RANKS(row->world)) {
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
    double full[128]; /* large enough for each dtype */
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
    /* neither getters nor impossible calls leave markers */
    int num = b.num_marks;
    CHECK(lab_undefined(b.model, fsdp_data(b.units[0], 0)));
    CHECK_STATUS(fsdp_post_forward(b.units[0]), FSDP_ERR_INVALID_STATE);
    CHECK_EQ_INT(b.num_marks, num);
    /* detached: no op is shown, and the model still runs */
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE);
    CHECK_OK(fsdp_detach(b.model, &b.extension));
    uint64_t seq = b.last_seq;
    step(&b);
    CHECK_EQ_INT(b.last_seq, seq);
    bed_close(&b);
}

/* ---- an observer that acts ------------------------------------------------------------------- */

/* Ops that the observer takes do not run; states change as if they had. */
TEST_P(extension, swallowed_ops_are_not_run, settings, RANKS(row->world)) {
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
    CHECK(b.calls[FSDP_OP_HOOK] >= 2 * (4 * NUM_UNITS + 1)); /* markers are still shown */
    for (int i = 0; i < NUM_UNITS; i++) {
        CHECK_EQ_INT(fsdp_unit_state(b.units[i]), FSDP_STATE_IDLE);
        CHECK_EQ_INT(fsdp_unit_storage(b.units[i]), FSDP_STORAGE_SHARDED);
    }
    b.swallow = 0;
    step(&b);
    CHECK(row->world == 1 || row->threads || b.s.colls[FSDP_OP_ALL_GATHER] > 0);
    bed_close(&b);
}

/* An extension that answers a call has done the call's work and returns its status: the
   transition table is not used. A failure is returned by the call, and by finalize. */
TEST_P(extension, answers_a_call, settings, RANKS(row->world)) {
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
        CHECK_OK(calls[i].run(b.units[1])); /* whether the table allows it or not */
        CHECK_EQ_INT(b.last_seq, seq);
        CHECK_EQ_INT(b.num_hooks, hooks + 1);
        CHECK_EQ_INT(b.hooks[hooks].call, calls[i].call);
        CHECK(b.hooks[hooks].unit == b.units[1]);
        CHECK_EQ_INT(fsdp_unit_state(b.units[1]), FSDP_STATE_IDLE);
        CHECK_EQ_INT(fsdp_unit_storage(b.units[1]), FSDP_STORAGE_SHARDED);
        b.answer = FSDP_ERR_CORRUPT;
        CHECK_STATUS(calls[i].run(b.units[1]), FSDP_ERR_CORRUPT);
        b.answer = FSDP_OK;
    }
    b.replace = -1;
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_CORRUPT);
    b.replace = FSDP_CALL_RESET;
    CHECK_OK(fsdp_model_reset(b.model));
    CHECK(b.hooks[b.num_hooks - 1].unit == NULL &&
          b.hooks[b.num_hooks - 1].call == FSDP_CALL_RESET);
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
    b.answer = FSDP_ERR_CORRUPT;
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_CORRUPT);
    /* An extension that answers nothing changes nothing, and sees impossible calls before the
       table refuses them. */
    b.replace = -1;
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE);
    CHECK_STATUS(fsdp_post_backward(b.units[2]), FSDP_ERR_INVALID_STATE);
    CHECK_EQ_INT(b.hooks[b.num_hooks - 1].call, FSDP_CALL_POST_BACKWARD);
    CHECK_OK(fsdp_post_forward(b.units[0]));
    bed_close(&b);
}

/* ---- bytes moved equal the formula ----------------------------------------------------------- */

TEST_P(extension, bytes_equal_the_formula, settings, RANKS(row->world)) {
    bed b;
    bed_open(&b, row);
    uint64_t gather = 0, reduce = 0, others = (uint64_t)row->world - 1;
    fsdp_dtype param = row->param ? row->param : row->dtype,
               reduction = row->reduce ? row->reduce : row->dtype;
    /* The reduction sends the gradients as written if the backend widens while it sums,
       otherwise a cast copy. */
    int widens = reduction == FSDP_F32 && (param == FSDP_BF16 || param == FSDP_F16) &&
                 !row->unfused;
    fsdp_dtype sent = param == reduction || widens ? param : reduction;
    for (int i = 0; i < NUM_UNITS; i++) {
        uint64_t all = 0, trained = 0; /* elements of one rank's stored shards */
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
            if (!(shapes[i].frozen >> k & 1)) trained += stored;
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
        CHECK_EQ_INT(c.bytes[FSDP_OP_ALL_REDUCE],
                     (uint64_t)k *
                         ((2 * others * sizeof(double) + others) / (others + 1))); /* norm */
        CHECK_EQ_INT(c.calls[FSDP_OP_HOOK], 0); /* no extension listens */
    }
    bed_close(&b);
}

/* ---- several extensions, in order ------------------------------------------------------------ */

typedef struct {
    const char *name;
    char *diary;  /* names of the extensions that saw a call, in order */
    int takes;    /* op kind that the extension takes; -1: none */
    double scale; /* not 0: the scale that it writes into copies */
    double seen;  /* scale of the last copy */
    int ops, calls, relayouts;
} guest;

static int guest_call(void *user, fsdp_model *m, fsdp_unit *u, int call, fsdp_status *status) {
    (void)m, (void)u, (void)call, (void)status;
    guest *g = (guest *)user;
    g->calls++;
    strcat(g->diary, g->name);
    return 0;
}
static int guest_op(void *user, fsdp_model *m, fsdp_op *op) {
    (void)m;
    guest *g = (guest *)user;
    g->ops++;
    if (op->kind == FSDP_OP_COPY) {
        g->seen = op->scale;
        if (g->scale > 0) op->scale = g->scale;
    }
    return op->kind == g->takes;
}
static void guest_relayout(void *user, fsdp_model *m) {
    (void)m;
    ((guest *)user)->relayouts++;
}
static void guest_destroy(void *user) {
    guest *g = (guest *)user;
    strcat(g->diary, "~");
    strcat(g->diary, g->name);
}

static fsdp_extension guest_as(guest *g, const char *name, char *diary) {
    fsdp_extension e = FSDP_ZERO;
    memset(g, 0, sizeof *g);
    g->name = name;
    g->diary = diary;
    g->takes = -1;
    e.name = name;
    e.user = g;
    e.call = guest_call;
    e.op = guest_op;
    e.relayout = guest_relayout;
    e.destroy = guest_destroy;
    return e;
}

TEST(extension, several_in_order) {
    char diary[256] = "";
    guest a, b, c;
    bed d;
    bed_open(&d, &settings[1]);
    fsdp_extension ea = guest_as(&a, "a", diary), eb = guest_as(&b, "b", diary),
                   ec = guest_as(&c, "c", diary);
    CHECK_OK(fsdp_attach(d.model, &ea));
    CHECK_OK(fsdp_attach(d.model, &eb));
    CHECK_OK(fsdp_attach(d.model, &ec));
    a.scale = 2; /* scales the casts to bf16 */
    CHECK_OK(fsdp_pre_forward(d.units[0]));
    CHECK_EQ_STR(diary, "abc");
    CHECK_NEAR(a.seen, 1, 0);
    CHECK_NEAR(b.seen, 2, 0);
    CHECK_NEAR(c.seen, 2, 0);
    CHECK_EQ_INT(a.ops, c.ops);
    b.takes = FSDP_OP_COPY; /* b is attached before c: c does not see the ops that b takes */
    uint64_t works = d.s.works;
    int seen = c.ops, before = a.ops;
    CHECK_OK(fsdp_post_forward(d.units[0]));
    CHECK_OK(fsdp_pre_forward(d.units[0]));
    CHECK_EQ_INT(d.s.works, works);
    CHECK(a.ops - before > c.ops - seen);
    CHECK_NEAR(a.seen, 1, 0); /* the library's op is unchanged */
    /* While a unit is open, an extension with call or op cannot be attached; one without can. */
    guest late, quiet;
    fsdp_extension el = guest_as(&late, "l", diary), eq = guest_as(&quiet, "q", diary);
    CHECK_STATUS(fsdp_attach(d.model, &el), FSDP_ERR_INVALID_STATE);
    CHECK(strstr(fsdp_last_error(d.s.world), "attach: unit") != NULL);
    eq.call = NULL, eq.op = NULL;
    CHECK_OK(fsdp_attach(d.model, &eq));
    CHECK_STATUS(fsdp_detach(d.model, &el), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(d.s.world), "detach: 'l' with these contents is not attached") !=
          NULL);
    diary[0] = 0;
    CHECK_OK(fsdp_detach(d.model, &eb));
    CHECK_OK(fsdp_post_forward(d.units[0]));
    CHECK_EQ_STR(diary, "~bac");
    ec.size = 8;
    CHECK_STATUS(fsdp_attach(d.model, &ec), FSDP_ERR_INVALID_ARG);
    diary[0] = 0;
    bed_close(&d);
    CHECK_EQ_STR(diary, "~q~c~a"); /* the last one attached is destroyed first */
}

/* ---- buffers --------------------------------------------------------------------------------- */

enum { MAX_SLOTS = 64 };

typedef struct {
    fsdp_model *model;
    int held[MAX_SLOTS]; /* by slot number: the unit's index + 1 */
    int pools[FSDP_POOL_MAX], acquired, released, wrote, last;
    fsdp_buf *arena, *part;
    int pool;     /* pool whose slots are provided; -1: none */
    int careless; /* also gives a slot that a unit holds */
    int asked, given_back;
} landlord;

static int landlord_op(void *user, fsdp_model *model, fsdp_op *op) {
    landlord *l = (landlord *)user;
    (void)model;
    if (op->kind == FSDP_OP_ACQUIRE || op->kind == FSDP_OP_RELEASE ||
        op->kind == FSDP_OP_GRADS_WRITTEN) {
        fsdp_buf *buf = op->kind == FSDP_OP_RELEASE ? op->src : op->dst;
        CHECK(buf && op->unit && op->slot > 0 && op->slot < MAX_SLOTS && op->bytes == 0);
        CHECK(op->src_ptr == NULL && op->dst_ptr == NULL && op->num_waits == 0);
        if (op->kind == FSDP_OP_ACQUIRE) {
            CHECK_EQ_INT(l->held[op->slot], 0);
            CHECK(buf->held);
            l->held[op->slot] = op->unit->desc.index + 1;
            l->pools[op->pool]++;
            l->acquired++;
        } else {
            CHECK_EQ_INT(l->held[op->slot], op->unit->desc.index + 1);
        }
        if (op->kind == FSDP_OP_GRADS_WRITTEN) {
            CHECK_EQ_INT(op->pool, FSDP_POOL_GRAD);
            l->wrote++;
        }
        if (op->kind == FSDP_OP_RELEASE) {
            CHECK(!buf->held);
            l->held[op->slot] = 0;
            l->pools[op->pool]--;
            l->released++;
        }
    }
    return 0;
}

static fsdp_buf *landlord_buffer(void *user, fsdp_model *model, fsdp_unit *unit, int pool,
                                 fsdp_buf *released) {
    landlord *l = (landlord *)user;
    CHECK(model == l->model && unit);
    if (released) l->given_back++;
    else l->asked++;
    int free_to_give = l->part && (l->careless || !l->part->held);
    return !released && pool == l->pool && free_to_give ? l->part : NULL;
}

/* Attaches and returns an extension that supplies slots of this pool. */
static fsdp_extension landlord_attach(landlord *l, fsdp_model *model) {
    fsdp_extension e = FSDP_ZERO;
    e.buffer = landlord_buffer;
    e.user = l;
    CHECK_OK(fsdp_attach(model, &e));
    return e;
}
static landlord landlord_of(fsdp_model *model, int pool) {
    landlord l;
    memset(&l, 0, sizeof l);
    l.model = model;
    l.pool = pool;
    return l;
}

/* Each acquired slot is released, by its unit. Without a listener there are no markers. */
TEST_P(extension, markers_in_pairs, settings, RANKS(row->world)) {
    bed b;
    bed_open(&b, row);
    landlord l = landlord_of(b.model, -1);
    step(&b);
    fsdp_counters c = FSDP_ZERO;
    CHECK_OK(fsdp_model_counters(b.model, &c));
    CHECK_EQ_INT(
        c.calls[FSDP_OP_ACQUIRE] + c.calls[FSDP_OP_RELEASE] + c.calls[FSDP_OP_GRADS_WRITTEN], 0);
    fsdp_extension e = FSDP_ZERO;
    e.op = landlord_op;
    e.buffer = landlord_buffer;
    e.user = &l;
    CHECK_OK(fsdp_attach(b.model, &e));
    for (int k = 0; k < 3; k++) step(&b);
    CHECK_EQ_INT(l.acquired, l.released);
    CHECK_EQ_INT(l.asked, l.acquired);
    CHECK_EQ_INT(l.given_back, l.released);
    for (int i = 0; i < MAX_SLOTS; i++) CHECK_EQ_INT(l.held[i], 0);
    for (int i = 0; i < FSDP_POOL_MAX; i++) CHECK_EQ_INT(l.pools[i], 0);
    CHECK_OK(fsdp_model_counters(b.model, &c));
    CHECK_EQ_INT(c.calls[FSDP_OP_ACQUIRE], l.acquired);
    CHECK(row->world == 1 || (l.acquired >= 3 * 3 * NUM_UNITS && l.wrote == 3 * NUM_UNITS));
    CHECK_OK(fsdp_detach(b.model, &e));
    bed_close(&b);
}

/* Gathered parameters lie in a slot of the extension; the pool has none, or frees its own. */
TEST(extension, slots_from_elsewhere) {
    bed b;
    fsdp_memory mem;
    bed_open(&b, &settings[5]);
    landlord l = landlord_of(b.model, FSDP_POOL_GATHER);
    b.s.checks = 0;
    int pool = fsdp_pool_register(b.model, "arena");
    CHECK_EQ_INT(pool, FSDP_POOL_COUNT);
    CHECK_EQ_INT(fsdp_pool_register(b.model, "arena"), pool);
    CHECK_EQ_STR(fsdp_model_pool_name(b.model, pool), "arena");
    CHECK_OK(fsdp_buf_create(b.model, pool, FSDP_MEMORY_DEVICE, 65536, &l.arena));
    CHECK_STATUS(fsdp_buf_view(b.model, NULL, 0, 64, &l.part), FSDP_ERR_INVALID_ARG);
    CHECK_OK(fsdp_buf_view(b.model, l.arena, 4096, 32768, &l.part));
    CHECK_EQ_INT(fsdp_buf_nbytes(l.part), 32768);
    CHECK((char *)fsdp_buf_ptr(l.part) == (char *)fsdp_buf_ptr(l.arena) + 4096);
    (void)landlord_attach(&l, b.model);
    for (int k = 0; k < 2; k++) {
        CHECK_OK(fsdp_pre_forward(b.units[1]));
        CHECK(l.part->held);
        CHECK((char *)fsdp_data(b.units[1], 0) >= (char *)fsdp_buf_ptr(l.part) &&
              (char *)fsdp_data(b.units[1], 0) < (char *)fsdp_buf_ptr(l.part) + 32768);
        CHECK_OK(fsdp_post_forward(b.units[1]));
        CHECK(!l.part->held);
    }
    CHECK_OK(fsdp_model_memory(b.model, &mem));
    CHECK_EQ_INT(mem.pool_bytes[FSDP_POOL_GATHER], 0);
    CHECK_EQ_INT(mem.pool_bytes[pool], 65536);
    CHECK_EQ_INT(mem.pool_slots[pool], 1); /* a view is not counted */
    char text[4096];
    (void)fsdp_model_describe(b.model, text, sizeof text);
    CHECK(strstr(text, "arena 65536 in 1") != NULL);
    CHECK_OK(fsdp_model_reset(b.model));
    l.pool = -1;
    step(&b);
    CHECK_OK(fsdp_model_memory(b.model, &mem));
    CHECK(mem.pool_bytes[FSDP_POOL_GATHER] > 0 && mem.pool_bytes[FSDP_POOL_GRAD] > 0);
    CHECK_OK(fsdp_unshard(b.units[0])); /* a held slot stays */
    CHECK_OK(fsdp_pools_trim(b.model));
    CHECK_OK(fsdp_model_memory(b.model, &mem));
    CHECK_EQ_INT(mem.pool_slots[FSDP_POOL_GATHER], 1);
    CHECK_EQ_INT(mem.pool_bytes[FSDP_POOL_GRAD] + mem.pool_bytes[FSDP_POOL_REDUCE_IN], 0);
    CHECK_OK(fsdp_reshard(b.units[0]));
    step(&b);
    fsdp_buf_destroy(b.model, l.part);
    /* too small: refused, and the failure reaches the other ranks */
    CHECK_OK(fsdp_buf_view(b.model, l.arena, 0, 64, &l.part));
    l.pool = FSDP_POOL_GATHER;
    CHECK_STATUS(fsdp_pre_forward(b.units[1]), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(b.s.world), "an extension gave 'unit1' a slot of 64 bytes"));
    fsdp_buf_destroy(b.model, l.part);
    fsdp_buf_destroy(b.model, l.arena);
    bed_close(&b);
}

/* A slot that another unit holds is refused. */
TEST(extension, slot_in_use) {
    bed b;
    bed_open(&b, &settings[5]);
    landlord l = landlord_of(b.model, FSDP_POOL_GATHER);
    l.careless = 1;
    b.s.checks = 0;
    l.arena = make_buf(&b, 65536);
    CHECK_OK(fsdp_buf_view(b.model, l.arena, 0, 65536, &l.part));
    (void)landlord_attach(&l, b.model);
    CHECK_OK(emit_marker(&b, b.units[1], FSDP_OP_ACQUIRE, l.part));
    CHECK(l.part->held);
    CHECK_STATUS(fsdp_unshard(b.units[2]), FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(b.s.world), "an extension gave 'unit2' a slot"));
    (void)emit_marker(&b, b.units[1], FSDP_OP_RELEASE, l.part); /* the world has failed */
    fsdp_buf_destroy(b.model, l.part);
    fsdp_buf_destroy(b.model, l.arena);
    bed_close(&b);
}

/* ---- a dry run of a step, and its replay ----------------------------------------------------- */

enum { TAPE = 400, PARTS = 24, PART = 1 << 26 };

/* A recorded step: its ops in order. The slots of a dry run are views of addresses without
   memory. */
typedef struct {
    fsdp_model *model;
    fsdp_unit *const *units;
    fsdp_op ops[TAPE];
    int num_ops, take, record, num_calls;
    fsdp_buf *parts[PARTS];
    int asked, given_back, refuse; /* slots; the request that is refused, from 1 on */
} tape;

static int tape_op(void *user, fsdp_model *model, fsdp_op *op) {
    tape *t = (tape *)user;
    CHECK(model == t->model);
    if (t->record) {
        CHECK(t->num_ops < TAPE);
        t->ops[t->num_ops++] = *op;
    }
    return t->take;
}

static fsdp_buf *tape_buffer(void *user, fsdp_model *model, fsdp_unit *unit, int pool,
                             fsdp_buf *released) {
    tape *t = (tape *)user;
    int i = 0;
    CHECK(model == t->model && unit);
    CHECK(released || (pool >= FSDP_POOL_GATHER && pool <= FSDP_POOL_REDUCE_OUT));
    if (released) t->given_back++;
    if (released || ++t->asked == t->refuse) return NULL;
    while (i < PARTS && t->parts[i]->held) i++;
    CHECK(i < PARTS);
    return t->parts[i];
}

static fsdp_extension tape_open(tape *t, const bed *b) {
    fsdp_extension e = FSDP_ZERO;
    memset(t, 0, sizeof *t);
    t->model = b->model;
    t->units = b->units;
    for (int i = 0; i < PARTS; i++)
        CHECK_OK(fsdpi_buf_place(b->model, (char *)((intptr_t)(i + 1) * PART), PART, &t->parts[i]));
    e.op = tape_op;
    e.buffer = tape_buffer;
    e.user = t;
    return e;
}

/* Checks that no unit holds a slot of the dry run. */
static void tape_close(tape *t) {
    for (int i = 0; i < PARTS; i++) {
        CHECK(!t->parts[i]->held);
        fsdp_buf_destroy(t->model, t->parts[i]);
    }
}

static void tape_step(tape *t) {
    t->num_ops = 0;
    t->record = 1;
    for (int i = 0; i < NUM_UNITS; i++) {
        CHECK_OK(fsdp_pre_forward(t->units[i]));
        CHECK(fsdp_data(t->units[i], 0));
        CHECK_OK(fsdp_post_forward(t->units[i]));
    }
    for (int i = NUM_UNITS - 1; i >= 0; i--) {
        CHECK_OK(fsdp_pre_backward(t->units[i]));
        for (int k = 0; k < shapes[i].num_params; k++) (void)fsdp_grad(t->units[i], k);
        CHECK_OK(fsdp_post_backward(t->units[i]));
    }
    t->record = 0;
}

/* A byte-for-byte copy of a model, without a list of fields. Its counters may differ, in the
   memory allocated meanwhile. */
typedef struct {
    fsdp_model model;
    fsdp_unit units[NUM_UNITS];
    fsdpi_param params[NUM_UNITS][6];
    fsdpi_forward order[64];
    fsdp_buf bufs[64];
    int num_bufs;
} photo;

static void photograph_buf(photo *p, const fsdp_buf *buf) {
    CHECK(p->num_bufs < 64);
    if (buf) p->bufs[p->num_bufs++] = *buf;
}

static void photograph(const bed *b, photo *p) {
    const fsdp_model *m = b->model;
    memset(p, 0, sizeof *p);
    memcpy(&p->model, m, sizeof *m);
    p->model.counters.allocations = 0;
    for (int i = 0; i < NUM_UNITS; i++) {
        const fsdp_unit *u = b->units[i];
        memcpy(&p->units[i], u, sizeof *u);
        memcpy(p->params[i], u->params, (size_t)u->desc.num_params * sizeof u->params[0]);
    }
    CHECK(m->num_order <= 64);
    if (m->num_order) memcpy(p->order, m->order, (size_t)m->num_order * sizeof *m->order);
    for (int i = 0; i < m->num_classes; i++)
        for (int k = 0; k < m->classes[i].count; k++) photograph_buf(p, m->classes[i].slots[k]);
    for (int d = 1; d < FSDP_DTYPE_COUNT; d++) {
        photograph_buf(p, m->flats[d].shard);
        photograph_buf(p, m->flats[d].grad);
    }
    photograph_buf(p, m->scalar);
}

static void check_photos(const photo *a, const photo *b) {
    CHECK_EQ_MEM(&a->model, &b->model, sizeof a->model);
    for (int i = 0; i < NUM_UNITS; i++) {
        CHECK_EQ_MEM(&a->units[i], &b->units[i], sizeof a->units[i]);
        CHECK_EQ_MEM(a->params[i], b->params[i], sizeof a->params[i]);
    }
    CHECK_EQ_MEM(a->order, b->order, sizeof a->order);
    CHECK_EQ_INT(a->num_bufs, b->num_bufs);
    CHECK_EQ_MEM(a->bufs, b->bufs, sizeof a->bufs);
}

static photo photo_before, photo_after;
static void check_as_before(const bed *b) {
    photograph(b, &photo_after);
    check_photos(&photo_before, &photo_after);
}

static fsdp_status dry_step(void *user) {
    tape *t = (tape *)user;
    tape_step(t);
    return fsdp_finalize_backward(t->model);
}

static fsdp_status dry_without_end(void *user) {
    tape_step((tape *)user);
    return FSDP_OK; /* units are in backward */
}

/* Returns an address of an op, or its offset in the slot. */
static int64_t place_of(const fsdp_buf *buf, const void *ptr) {
    int slot = buf && (buf->is_view ||
                       (buf->pool >= FSDP_POOL_GATHER && buf->pool <= FSDP_POOL_REDUCE_OUT));
    return ptr && slot ? (const char *)ptr - buf->ptr : (int64_t)(intptr_t)ptr;
}

/* A dry run shows the ops of the following step, runs none, and restores the model's state. */
TEST_P(extension, dry_run, settings, RANKS(row->world)) {
    bed b;
    static tape dry, real;
    bed_open(&b, row);
    fsdp_extension e = tape_open(&dry, &b), ee = tape_open(&real, &b);
    ee.buffer = NULL;
    step(&b);
    step(&b);
    photograph(&b, &photo_before);
    uint64_t works = b.s.works, colls = b.s.colls[FSDP_OP_ALL_GATHER];
    CHECK_OK(fsdpi_plan_dry_run(b.model, &e, dry_step, &dry));
    CHECK_EQ_INT(b.s.works, works);
    CHECK_EQ_INT(b.s.colls[FSDP_OP_ALL_GATHER], colls);
    check_as_before(&b);
    CHECK(dry.asked == 0 ? row->world == 1 : dry.given_back == dry.asked);
    CHECK_OK(fsdpi_plan_dry_run(b.model, &e, dry_without_end, &dry));
    check_as_before(&b);
    CHECK_OK(fsdp_attach(b.model, &ee));
    tape_step(&real);
    CHECK_OK(fsdp_finalize_backward(b.model));
    CHECK_EQ_INT(real.num_ops, dry.num_ops);
    for (int i = 0; i < real.num_ops; i++) {
        const fsdp_op *x = &real.ops[i], *y = &dry.ops[i];
        CHECK(x->kind == y->kind && x->label == y->label && x->stream == y->stream);
        CHECK(x->seq == y->seq && x->step == y->step && x->count == y->count);
        CHECK(x->bytes == y->bytes && x->unit == y->unit && x->list == y->list);
        int reduces = x->comm && x->factor != 0; /* in a dry run all parameters are used */
        CHECK((reduces || x->what_hash == y->what_hash) && x->comm == y->comm);
        CHECK(x->state == y->state);
        CHECK(!x->src == !y->src && !x->dst == !y->dst);
        CHECK(place_of(x->src, x->src_ptr) == place_of(y->src, y->src_ptr));
        CHECK(place_of(x->dst, x->dst_ptr) == place_of(y->dst, y->dst_ptr));
    }
    CHECK_OK(fsdp_detach(b.model, &ee));
    step(&b);
    tape_close(&dry);
    tape_close(&real);
    bed_close(&b); /* checks for races */
}

TEST(extension, describe_prints_gradient_paths) {
    static char text[16384];
    bed b;
    bed_open(&b, &settings[5]); /* 4 ranks, bf16, reduced in f32 by a backend that fuses */
    CHECK(fsdp_model_describe(b.model, text, sizeof text) < sizeof text);
    CHECK(strstr(text, "    gathered: this rank's part of the slot, which is filled before\n"));
    CHECK(strstr(text, "    p1                       f32  [5, 4] dim 0, rows 5..5 of 2 a rank, "
                       "packed, frozen, cast\n"));
    CHECK(strstr(text,
                 "    gradients: chunk_cat in the slot, reduce_scatter to the shard gradient\n"));
    CHECK_OK(fsdp_set_requires_gradient_sync(b.model, NULL, 0));
    CHECK(fsdp_model_describe(b.model, text, sizeof text) < sizeof text);
    CHECK(strstr(text, "    gradients: add up in the reduce input; the reduction waits\n"));
    bed_close(&b);
    bed_open(&b, &settings[0]); /* one rank */
    CHECK(fsdp_model_describe(b.model, text, sizeof text) < sizeof text);
    CHECK(W_ASAN || strstr(text, "    gathered: nothing: the full parameters are the shards\n"
                                 "    gradients: written into the shard gradient\n"));
    bed_close(&b);
}

/* Markers that an extension or a plan emits take effect, also without a listener. */
TEST(extension, emitted_markers) {
    bed b;
    bed_open(&b, &settings[5]);
    CHECK_OK(fsdp_model_commit(b.model));
    for (int planned = 0; planned < 2; planned++) {
        fsdp_buf *buf = make_buf(&b, 256);
        CHECK(!buf->held);
        CHECK_OK(emit_marker_by(&b, b.units[0], FSDP_OP_ACQUIRE, buf, planned));
        CHECK(buf->held);
        int logged = b.s.num_logged;
        fsdp_buf_destroy(b.model, buf); /* a unit holds it: it stays */
        CHECK_EQ_INT(b.s.num_logged, logged + 1);
        CHECK_EQ_INT((long long)buf->ready.seq, 0);
        CHECK_OK(emit_marker_by(&b, b.units[0], FSDP_OP_GRADS_WRITTEN, buf, planned));
        CHECK(buf->ready.seq != 0 && buf->ready.stream == FSDP_STREAM_COMPUTE);
        CHECK_OK(emit_marker_by(&b, b.units[0], FSDP_OP_RELEASE, buf, planned));
        CHECK(!buf->held && buf->avail.seq != 0 && buf->avail.stream == FSDP_STREAM_GATHER);
        fsdp_buf_destroy(b.model, buf);
    }
    bed_close(&b);
}

/* An extension cannot be detached from its own callback, or while its slot is in use. */
static int leaves(void *user, fsdp_model *model, fsdp_op *op) {
    fsdp_extension *e = (fsdp_extension *)user;
    (void)op;
    CHECK_STATUS(fsdp_detach(model, e), FSDP_ERR_INVALID_STATE);
    op->kind = FSDP_OP_CALL; /* restored, so that the op runs unchanged */
    op->src = op->dst = NULL;
    return 0;
}
TEST(extension, detach_is_refused) {
    bed b;
    bed_open(&b, &settings[5]);
    fsdp_extension e = FSDP_ZERO;
    e.op = leaves;
    e.user = &e;
    CHECK_OK(fsdp_attach(b.model, &e));
    step(&b);
    CHECK_OK(fsdp_detach(b.model, &e));
    landlord l = landlord_of(b.model, FSDP_POOL_GATHER);
    l.part = make_buf(&b, 65536);
    const fsdp_extension lends = landlord_attach(&l, b.model);
    CHECK_OK(fsdp_unshard(b.units[1]));
    CHECK(l.part->held);
    CHECK_STATUS(fsdp_detach(b.model, &lends), FSDP_ERR_INVALID_STATE);
    CHECK_OK(fsdp_reshard(b.units[1]));
    CHECK_OK(fsdp_detach(b.model, &lends));
    fsdp_buf_destroy(b.model, l.part);
    bed_close(&b);
}

/* A unit with many dtype groups has ops of every kind for each. */
static int many_sizes(void *user, int64_t numel, int64_t bytes[FSDP_GATHER_TENSORS]) {
    (void)user;
    CHECK_EQ_INT(numel, 9); /* of (3, 5), sharded along dim 1 over two ranks and padded */
    bytes[0] = 4 * numel;
    return 1;
}
static fsdp_status many_pre(void *user, const fsdp_param_view *v, void *const *strings,
                            void *stream) {
    (void)user, (void)stream;
    memcpy(strings[0], v->shard, (size_t)v->numel * 4);
    return FSDP_OK;
}
static fsdp_status many_post(void *user, const fsdp_param_view *v, const void *const *gathered,
                             void *full, fsdp_dtype dtype, void *stream) {
    (void)user, (void)v, (void)gathered, (void)full, (void)dtype, (void)stream;
    return FSDP_OK;
}
TEST(extension, many_parts) {
    enum { MANY = 60 };
    static fsdp_param_desc p[MANY];
    fsdp_gather_extension gather = {many_sizes, many_pre, many_post, NULL};
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit *unit;
    bed b;
    memset(&b, 0, sizeof b);
    sim_init(&b.s, 2, 1);
    CHECK(sim_open(&b.s));
    md.reduce_dtype = FSDP_F64;
    CHECK_OK(fsdp_model_create(b.s.world, &md, &b.model));
    for (int i = 0; i < MANY; i++) {
        p[i] = fsdp_mat(NULL, 3, 5);
        p[i].shard_dim = 1;
        p[i].extension = &gather;
    }
    ud.params = p;
    ud.num_params = MANY;
    CHECK_OK(fsdp_fully_shard(b.model, &ud, &unit));
    CHECK_OK(fsdp_model_commit(b.model));
    CHECK_EQ_INT(unit->layout.num_parts, MANY);
    const ptrdiff_t num = unit->layout.templates[FSDPI_STEP_COUNT] - unit->layout.templates[0];
    CHECK(num <= fsdpi_templates_max(unit));
    CHECK(num > FSDPI_STEP_COUNT + 6 * MANY - 20);
    bed_close(&b);
}

/* ---- when ops ran ---------------------------------------------------------------------------- */

typedef struct {
    fsdp_model *model;
    uint32_t lock;
    int64_t last[FSDP_STREAM_COUNT]; /* end of the stream's latest op */
    int told[FSDP_OP_COUNT], bad, of_world, lists;
    int64_t took;                    /* sum of all durations */
    uint64_t step[FSDP_OP_COUNT][2]; /* steps of the first and the last op reported */
} watch;

static void watch_ran(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin,
                      int64_t end) {
    watch *w = (watch *)user;
    fsdpi_lock(&w->lock); /* worker threads report, too */
    int overlaps = op->model && begin < w->last[op->stream];
    if (begin > end || overlaps || model != w->model) w->bad++;
    w->last[op->stream] = end;
    w->took += end - begin;
    w->lists += op->model && (op->list || op->list_count);
    if (op->model && w->told[op->kind] == 0) w->step[op->kind][0] = op->step;
    if (op->model) w->step[op->kind][1] = op->step;
    w->told[op->kind]++;
    w->of_world += !op->model;
    fsdpi_unlock(&w->lock);
}
/* Attaches and returns an extension that notes in *w when ops ran. */
static fsdp_extension watch_ops(watch *w, fsdp_model *model) {
    fsdp_extension e = FSDP_ZERO;
    memset(w, 0, sizeof *w);
    w->model = model;
    e.ran = watch_ran;
    e.user = w;
    CHECK_OK(fsdp_attach(model, &e));
    return e;
}

TEST_P(extension, reports_when_ops_ran, settings, RANKS(row->world)) {
    bed b;
    watch w;
    bed_open(&b, row);
    step(&b);
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    CHECK_OK(fsdp_model_counters(b.model, &before));
    const fsdp_extension e = watch_ops(&w, b.model);
    for (int k = 0; k < 9; k++) step(&b); /* more ops than a device keeps events */
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    CHECK_OK(fsdp_model_counters(b.model, &after));
    CHECK_OK(fsdp_detach(b.model, &e));
    CHECK_EQ_INT(w.bad, 0);
    w.told[FSDP_OP_COPY] -= w.of_world; /* the copy of the norm to the host */
    CHECK_EQ_INT(w.of_world, 9);
    for (int kind = 0; kind < FSDP_OP_HOOK; kind++) {
        CHECK_EQ_INT(w.told[kind], after.calls[kind] - before.calls[kind]);
        if (kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER) /* only within steps */
            CHECK_EQ_INT(w.step[kind][1] - w.step[kind][0], w.told[kind] ? 8 : 0);
    }
    for (int kind = FSDP_OP_HOOK; kind < FSDP_OP_COUNT; kind++) CHECK_EQ_INT(w.told[kind], 0);
    if (row->async) CHECK_EQ_INT(w.lists, 0); /* reported later, when a list may be gone */
    int told = w.told[FSDP_OP_COPY];
    step(&b);
    CHECK_EQ_INT(w.told[FSDP_OP_COPY] + 0, told); /* no more reports after detach */
    bed_close(&b);
}

/* Calls and their ends as letters: lower case for a call, upper case for its end. While the
   extension in the middle answers post_forward, the last one sees neither the call nor its end. */
typedef struct {
    char text[64];
    int answers, fails; /* post_forward; zero_grad */
} calls_seen;
static const char call_letters[] = {'f', 'p', 'b', 'q', 'e', 'z', 'c'};
static void note_call(calls_seen *c, int call, int is_end) {
    static const int calls[] = {FSDP_CALL_PRE_FORWARD,   FSDP_CALL_POST_FORWARD,
                                FSDP_CALL_PRE_BACKWARD,  FSDP_CALL_POST_BACKWARD,
                                FSDP_CALL_FINALIZE,      FSDP_CALL_ZERO_GRAD,
                                FSDP_CALL_PARAMS_CHANGED};
    size_t used = strlen(c->text);
    for (int k = 0; k < 7; k++)
        if (calls[k] == call && used + 2 < sizeof c->text)
            c->text[used] = (char)(call_letters[k] - (is_end ? 'a' - 'A' : 0));
}
static int seen_call(void *user, fsdp_model *model, fsdp_unit *unit, int call,
                     fsdp_status *status) {
    calls_seen *c = (calls_seen *)user;
    (void)model, (void)unit;
    note_call(c, call, 0);
    if (c->fails && call == FSDP_CALL_ZERO_GRAD) *status = FSDP_ERR_IO;
    return (c->answers && call == FSDP_CALL_POST_FORWARD) || *status;
}
static void seen_end(void *user, fsdp_model *model, fsdp_unit *unit, int call) {
    (void)model, (void)unit;
    note_call((calls_seen *)user, call, 1);
}
TEST(extension, reports_when_calls_end) {
    calls_seen seen[3];
    memset(seen, 0, sizeof seen);
    seen[1].answers = 1;
    bed b;
    bed_open(&b, &settings[2]);
    for (int k = 0; k < 3; k++) {
        fsdp_extension e = FSDP_ZERO;
        e.user = &seen[k], e.call = seen_call, e.returned = seen_end;
        CHECK_OK(fsdp_attach(b.model, &e));
    }
    fsdp_unit *u = b.units[2];
    CHECK_OK(fsdp_pre_forward(u));
    CHECK_OK(fsdp_post_forward(u)); /* answered: the core has not run it */
    seen[1].answers = 0;
    CHECK_OK(fsdp_post_forward(u));
    CHECK_OK(fsdp_pre_backward(u));
    CHECK_OK(fsdp_post_backward(u));
    CHECK_OK(fsdp_finalize_backward(b.model));
    CHECK_OK(fsdp_zero_grad(b.model));
    CHECK_OK(fsdp_params_changed(b.model));
    CHECK_OK(fsdp_set_grad_none(u, 0));
    CHECK_EQ_STR(seen[0].text, "fFpPpPbBqQeEzZcCzZ");
    CHECK_EQ_STR(seen[1].text, seen[0].text);
    CHECK_EQ_STR(seen[2].text, "fFpPbBqQeEzZcCzZ");
    for (int k = 0; k < 3; k++) memset(seen[k].text, 0, sizeof seen[k].text);
    CHECK_STATUS(fsdp_post_backward(u), FSDP_ERR_INVALID_STATE); /* ends, too; kept for finalize */
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE);
    CHECK_OK(fsdp_finalize_backward(b.model));
    seen[1].fails = 1;
    CHECK_STATUS(fsdp_zero_grad(b.model), FSDP_ERR_IO);
    seen[1].fails = 0;
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_IO);
    CHECK_EQ_STR(seen[0].text, "qQeEeEzZeE");
    bed_close(&b);
}

/* Time that a stream waited for another one: a WAIT reports how long COMPUTE was idle. */
static int64_t waited_for_use;
static void use_ran(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin, int64_t end) {
    (void)user, (void)model, (void)begin, (void)end;
    if (op->kind == FSDP_OP_WAIT) waited_for_use = op->waited_ns;
    else CHECK_EQ_INT(op->waited_ns, 0);
}
/* A clock that stands still, except that `until_asked`, on a worker thread, waits for a read of
   it and then advances it by WORK. */
enum { WORK = 12345 };
static uint32_t clock_reads, is_asked;
static int64_t clock_time;
static int64_t still_clock(void *user) {
    (void)user;
    __atomic_add_fetch(&clock_reads, 1, __ATOMIC_SEQ_CST);
    return __atomic_load_n(&clock_time, __ATOMIC_SEQ_CST);
}
static fsdp_status until_asked(const fsdp_op *op, void *stream) {
    (void)op, (void)stream;
    uint32_t before = __atomic_load_n(&clock_reads, __ATOMIC_SEQ_CST);
    __atomic_store_n(&is_asked, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&clock_reads, __ATOMIC_SEQ_CST) == before) sched_yield();
    __atomic_add_fetch(&clock_time, WORK, __ATOMIC_SEQ_CST);
    return FSDP_OK;
}
TEST(extension, reports_how_long_a_stream_waited) {
    enum { BLOCK = 1 << 20 };
    for (int lanes = 0; lanes < 2; lanes++) {
        bed b;
        bed_open(&b, &settings[lanes ? 3 : 4]);
        fsdp_extension e = FSDP_ZERO;
        fsdp_buf *buf = make_buf(&b, BLOCK);
        e.ran = use_ran;
        CHECK_OK(fsdp_attach(b.model, &e));
        waited_for_use = -1;
        if (lanes) b.s.world->boot.clock.now_ns = still_clock;
        fsdp_op op = op_of(&b, NULL, lanes ? FSDP_OP_CALL : FSDP_OP_ZERO, FSDP_STREAM_GATHER);
        op.dst = buf, op.bytes = BLOCK, op.call = lanes ? until_asked : NULL;
        CHECK_OK(fsdp_emit(b.model, &op));
        while (lanes && !__atomic_load_n(&is_asked, __ATOMIC_SEQ_CST)) sched_yield();
        op = op_of(&b, NULL, FSDP_OP_WAIT, FSDP_STREAM_COMPUTE);
        op.src = buf;
        CHECK_OK(fsdp_emit(b.model, &op));
        CHECK_OK(fsdp_wait_stream(b.model, -1));
        CHECK_EQ_INT(waited_for_use, lanes ? WORK : sim_cost(BLOCK, b.s.copy_bytes_per_ns));
        CHECK_OK(fsdp_detach(b.model, &e));
        fsdp_buf_destroy(b.model, buf);
        bed_close(&b);
    }
}

/* With more ops under way than events the host waits for the oldest op, and all are reported. */
TEST(extension, more_records_than_events, SLOW | AT_NIGHT(ASAN | TSAN)) {
    enum { NUM = 2 * FSDPI_TIMES_MAX + 3, BLOCK = 1 << 20 };
    bed b;
    watch w;
    bed_open(&b, &settings[4]);
    const fsdp_extension e = watch_ops(&w, b.model);
    fsdp_buf *buf = make_buf(&b, BLOCK);
    int64_t syncs = b.s.syncs, most = 0, each = sim_cost(BLOCK, b.s.copy_bytes_per_ns);
    for (int k = 0; k < NUM; k++) {
        fsdp_op op = op_of(&b, NULL, FSDP_OP_ZERO, FSDP_STREAM_COMPUTE);
        op.dst = buf, op.bytes = BLOCK;
        CHECK_OK(fsdp_emit(b.model, &op));
        int64_t waiting = k + 1 - w.told[FSDP_OP_ZERO];
        if (most < waiting) most = waiting;
    }
    CHECK_EQ_INT(most, FSDPI_TIMES_MAX);
    CHECK(b.s.syncs > syncs);
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    CHECK_EQ_INT(w.told[FSDP_OP_ZERO], NUM);
    CHECK_EQ_INT(w.bad, 0);
    CHECK_MSG(each > 0 && w.took == NUM * each, "%lld ns, %lld each", (long long)w.took,
              (long long)each);
    CHECK_OK(fsdp_detach(b.model, &e));
    fsdp_buf_destroy(b.model, buf);
    bed_close(&b);
}

/* A user's function issues more ops than there are events. Nothing can be reported before it
   returns: ops without an event are not reported. */
static fsdp_buf *much_to_zero;
static fsdp_status zero_much(const fsdp_op *of, void *stream) {
    (void)stream;
    for (int k = 0; k < 2 * FSDPI_TIMES_MAX; k++) {
        fsdp_op op;
        fsdp_op_init(&op, of->model, NULL, FSDP_OP_ZERO, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
        op.what = "x", op.dst = much_to_zero, op.bytes = 64;
        if (fsdp_emit((fsdp_model *)(uintptr_t)of->model, &op)) return FSDP_ERR_INTERNAL;
    }
    return FSDP_OK;
}
TEST(extension, records_without_an_event) {
    bed b;
    watch w;
    bed_open(&b, &settings[4]);
    const fsdp_extension e = watch_ops(&w, b.model);
    much_to_zero = make_buf(&b, 64);
    fsdp_op op = op_of(&b, NULL, FSDP_OP_CALL, FSDP_STREAM_COMPUTE);
    op.call = zero_much;
    CHECK_OK(fsdp_emit(b.model, &op));
    CHECK_EQ_INT(w.told[FSDP_OP_ZERO] + w.told[FSDP_OP_CALL], 0);
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    CHECK_EQ_INT(w.told[FSDP_OP_CALL], 1);
    CHECK_EQ_INT(w.told[FSDP_OP_ZERO], FSDPI_TIMES_MAX - 1);
    CHECK_OK(fsdp_detach(b.model, &e));
    fsdp_buf_destroy(b.model, much_to_zero);
    bed_close(&b);
}

/* An old time base is renewed only while no op waits to be reported, so that distances stay
   short. */
TEST(extension, old_base_of_times) {
    enum { BLOCK = 1 << 20 };
    bed b;
    watch w;
    bed_open(&b, &settings[4]);
    const fsdp_extension e = watch_ops(&w, b.model);
    fsdp_buf *buf = make_buf(&b, BLOCK);
    fsdpi_timeline *t = b.s.world->timeline;
    const int64_t base = t->base_ns;
    step(&b);
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    CHECK_EQ_INT(t->base_ns, base); /* not old yet */
    t->base_ns -= FSDPI_TIMES_BASE + 1;
    memset(w.last, 0, sizeof w.last);
    step(&b);
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    CHECK(t->base_ns >= base);
    CHECK(w.last[FSDP_STREAM_COMPUTE] >= base);
    for (int k = 0; k < 2; k++) { /* the first op's distance is from this base */
        fsdp_op op = op_of(&b, NULL, FSDP_OP_ZERO, FSDP_STREAM_COMPUTE);
        const int64_t aged = t->base_ns - FSDPI_TIMES_BASE - 1;
        if (k > 0) t->base_ns = aged;
        op.dst = buf, op.bytes = BLOCK;
        CHECK_OK(fsdp_emit(b.model, &op));
        if (k > 0) CHECK_EQ_INT(t->base_ns, aged);
    }
    CHECK_EQ_INT(w.bad, 0);
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    fsdp_buf_destroy(b.model, buf);
    CHECK_OK(fsdp_detach(b.model, &e));
    bed_close(&b);
}

TEST(extension, device_without_times) {
    bed b;
    bed_open(&b, &settings[4]);
    b.s.device.elapsed = NULL;
    fsdp_extension e = FSDP_ZERO;
    e.ran = watch_ran;
    CHECK_STATUS(fsdp_attach(b.model, &e), FSDP_ERR_UNSUPPORTED);
    CHECK(strstr(fsdp_last_error(b.s.world), "cannot measure times") != NULL);
    step(&b);
    bed_close(&b);
}

/* ---- layouts and states ---------------------------------------------------------------------- */

TEST(extension, relayout_after_commit_and_freeze) {
    char diary[256] = "";
    guest g;
    bed b;
    bed_open(&b, &settings[2]);
    fsdp_extension e = guest_as(&g, "g", diary);
    e.call = NULL, e.op = NULL;
    CHECK_OK(fsdp_attach(b.model, &e));
    CHECK_EQ_INT(g.relayouts, 0);
    CHECK_OK(fsdp_model_commit(b.model));
    CHECK_EQ_INT(g.relayouts, 1);
    CHECK_OK(fsdp_model_commit(b.model));
    fsdp_memory mem;
    CHECK_OK(fsdp_model_predict(b.model, &mem)); /* commits a copy, not the extension's model */
    CHECK_EQ_INT(g.relayouts, 1);
    CHECK_OK(fsdp_set_requires_grad(b.units[1], 2, 0));
    CHECK_EQ_INT(g.relayouts, 1);
    CHECK_OK(fsdp_pre_forward(b.units[0]));
    CHECK_EQ_INT(g.relayouts, 2);
    CHECK_OK(fsdp_post_forward(b.units[0]));
    bed_close(&b);
}

/* After a failure of MOVED the next call notifies again, and does not lay out again. */
typedef struct {
    int told, fails; /* notifications; the first `fails` of them fail */
    guest of;
} follower;
static fsdp_status follower_values(void *user, fsdp_model *m, int event, int ordinal) {
    follower *f = (follower *)user;
    (void)m;
    CHECK(event == FSDP_VALUES_MOVED && ordinal == -1);
    return f->told++ < f->fails ? FSDP_ERR_OUT_OF_MEMORY : FSDP_OK;
}
static void follower_relayout(void *user, fsdp_model *m) {
    guest_relayout(&((follower *)user)->of, m);
}
TEST(extension, moved_is_notified_again) {
    for (int fails = 0; fails < 3; fails++) {
        follower f;
        bed b;
        fsdp_extension e = FSDP_ZERO;
        memset(&f, 0, sizeof f);
        e.user = &f, e.values = follower_values, e.relayout = follower_relayout;
        bed_open(&b, &settings[0]);
        CHECK_OK(fsdp_attach(b.model, &e));
        for (int layout = 1; layout <= 2; layout++) { /* in commit, in a hook */
            f.told = 0, f.fails = fails;
            for (int k = 0; k <= fails + 1; k++) {
                CHECK_STATUS(layout == 1 ? fsdp_model_commit(b.model)
                                         : fsdp_pre_forward(b.units[0]),
                             k < fails ? FSDP_ERR_OUT_OF_MEMORY : FSDP_OK);
                if (layout == 2 && k >= fails) CHECK_OK(fsdp_post_forward(b.units[0]));
                CHECK_EQ_INT(f.told, k <= fails ? k + 1 : fails + 1);
                CHECK_EQ_INT(f.of.relayouts, layout);
            }
            CHECK_OK(fsdp_set_requires_grad(b.units[1], 2, 0));
        }
        bed_close(&b);
    }
}

/* The states of an optimizer and of a scaler, as items. Checkpoints save and load them. */
TEST(extension, state_items) {
    fsdp_adamw *adamw;
    fsdp_grad_scaler *scaler;
    fsdp_state_item item;
    fsdp_param_view v = FSDP_ZERO;
    int num;
    bed b;
    bed_open(&b, &settings[0]);
    CHECK_OK(fsdp_adamw_create(b.model, NULL, &adamw));
    CHECK_OK(fsdp_grad_scaler_create(b.model, NULL, &scaler));
    for (int all = 0; all < 2; all++) {
        memset(&item, 0, sizeof item);
        for (num = 0; fsdp_next_state(b.model, &item) == FSDP_OK && item.name; num++) {
            const int is_scaler = !strcmp(item.extension, "grad_scaler");
            CHECK_EQ_INT(item.ordinal == -1, is_scaler);
            if (!item.sharded) continue;
            CHECK_OK(fsdp_param_at(b.model, item.ordinal, &v));
            CHECK(item.numel == v.numel && item.ndim == v.ndim);
            CHECK_EQ_MEM(item.shape, v.shape, sizeof item.shape);
        }
        CHECK_EQ_INT(num, 3 * (all ? 10 : 8) + 1); /* two of ten parameters are frozen */
        memset(&v, 0, sizeof v);
        while (fsdp_next_param(b.model, &v)) CHECK_OK(fsdp_state_reserve(b.model, v.ordinal));
    }
    CHECK_STATUS(fsdp_state_reserve(NULL, 0), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_state_reserve(b.model, fsdp_num_params(b.model)), FSDP_ERR_INVALID_ARG);
    const double wrong = -1; /* an invalid scale is refused */
    memset(&item, 0, sizeof item);
    while (fsdp_next_state(b.model, &item) == FSDP_OK && item.name)
        if (item.ordinal == -1) memcpy(item.data, &wrong, sizeof wrong);
    CHECK_STATUS(fsdp_state_loaded(b.model), FSDP_ERR_INVALID_ARG);
    CHECK_OK(fsdp_transfer(b.model, NULL, NULL, 0));
    CHECK_STATUS(fsdp_transfer(b.model, &num, &num, -1), FSDP_ERR_INVALID_ARG);
    bed_close(&b);
}

/* ---- ops of an extension --------------------------------------------------------------------- */

TEST(extension, names) {
    bed b;
    bed_open(&b, &settings[0]);
    int label = fsdp_label_register(b.model, "norms");
    CHECK_EQ_INT(label, FSDP_LABEL_COUNT);
    CHECK_EQ_INT(fsdp_label_register(b.model, "more"), label + 1);
    CHECK_EQ_INT(fsdp_label_register(b.model, "norms"), label);
    CHECK_EQ_STR(fsdp_label_name(label), "extension");
    CHECK_EQ_STR(fsdp_label_name(FSDP_LABEL_COUNT + 16), "?");
    CHECK_EQ_STR(fsdp_pool_name(FSDP_POOL_COUNT), "extension");
    CHECK_EQ_STR(fsdp_pool_name(FSDP_POOL_MAX), "?");
    fsdp_op op;
    fsdp_op_init(&op, b.model, NULL, FSDP_OP_WAIT, label, FSDP_STREAM_COMPUTE);
    CHECK_EQ_STR(fsdp_op_label(&op), "norms");
    CHECK_EQ_STR(op.what, "norms");
    CHECK_EQ_INT(fsdp_label_register(b.model, ""), -1);
    CHECK_EQ_INT(fsdp_label_register(b.model, NULL), -1);
    CHECK_EQ_INT(fsdp_label_register(b.model, "a name that is longer than 31 bytes"), -1);
    for (int i = 2; i < 16; i++) {
        char name[16];
        snprintf(name, sizeof name, "l%d", i);
        CHECK_EQ_INT(fsdp_label_register(b.model, name), label + i);
    }
    CHECK_EQ_INT(fsdp_label_register(b.model, "one too many"), -1);
    for (int i = 0; i < 9; i++) {
        char name[16];
        snprintf(name, sizeof name, "p%d", i);
        CHECK_EQ_INT(fsdp_pool_register(b.model, name), i < 8 ? FSDP_POOL_COUNT + i : -1);
    }
    bed_close(&b);
}

TEST(extension, wrong_records) {
    bed b;
    fsdp_op op;
    fsdp_block block = {0, 0, 1, 1, 1, 1};
    float x = 1, y = 0;
    bed_open(&b, &settings[2]);
    observe(&b, 0, 1);
#define WRONG(kind, change, text)                                                                  \
    do {                                                                                           \
        fsdp_op_init(&op, b.model, NULL, kind, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);              \
        op.what = "x", op.list = &block, op.list_count = 1, op.src_ptr = &x, op.dst_ptr = &y;      \
        op.dtype = op.out_dtype = FSDP_F32, op.count = 1, op.group_size = 2;                       \
        change;                                                                                    \
        CHECK_STATUS(fsdp_emit(b.model, &op), FSDP_ERR_INVALID_ARG);                               \
        CHECK_MSG(strstr(fsdp_last_error(b.s.world), text), "%s", fsdp_last_error(b.s.world));     \
    } while (0)
    WRONG(FSDP_OP_COUNT, , "kind is not one of");
    WRONG(FSDP_OP_COPY, op.stream = FSDP_STREAM_COUNT, "stream is not one of");
    WRONG(FSDP_OP_COPY, op.label = FSDP_LABEL_COUNT, "label is not registered");
    WRONG(FSDP_OP_COPY, op.model = NULL, "model is not this model");
    WRONG(FSDP_OP_COPY, op.what = NULL, "what is NULL");
    WRONG(FSDP_OP_COPY, op.list = NULL, "list is empty");
    WRONG(FSDP_OP_COPY, op.src_ptr = NULL, "src or dst is NULL");
    WRONG(FSDP_OP_ZERO, op.dst_ptr = NULL, "dst is NULL");
    WRONG(FSDP_OP_CALL, , "call is NULL");
    WRONG(FSDP_OP_UPDATE, op.list = NULL, "expected fsdp_updates");
    WRONG(FSDP_OP_UPDATE, op.list_count = 0, "expected fsdp_updates");
    WRONG(FSDP_OP_ALL_REDUCE, , "comm is NULL");
    WRONG(FSDP_OP_ALL_REDUCE, (op.comm = b.s.world->comm, op.group_size = 1), "group_size is less");
    WRONG(FSDP_OP_BROADCAST, (op.comm = b.s.world->comm, op.src_ptr = NULL), "src is NULL");
    WRONG(FSDP_OP_ALL_REDUCE, op.comm = b.s.world->comm, "this operation works in place");
    WRONG(FSDP_OP_BROADCAST, (op.comm = b.s.world->comm, op.root = 7), "root is not a member");
    WRONG(FSDP_OP_ALL_TO_ALL, (op.comm = b.s.world->comm, op.dtype = 99), "dtype is not one of");
    WRONG(FSDP_OP_ALL_TO_ALL, (op.comm = b.s.world->comm, op.group_size = 9), "group_size is not");
    WRONG(FSDP_OP_ALL_TO_ALL, op.comm = (fsdp_comm *)&x, "comm is not a group of this world");
    WRONG(FSDP_OP_COPY, op.out_dtype = 0, "dtype or out_dtype is not one of");
    fsdp_buf *buf;
    CHECK_OK(fsdp_buf_create(b.model, FSDP_POOL_GATHER, FSDP_MEMORY_DEVICE, 256, &buf));
    char *at = (char *)fsdp_buf_ptr(buf);
    WRONG(FSDP_OP_ZERO, (op.dst = buf, op.dst_ptr = at, op.bytes = 257), "not inside of dst");
    WRONG(FSDP_OP_ZERO, (op.dst = buf, op.dst_ptr = at + 255, op.bytes = 2), "not inside of dst");
    WRONG(FSDP_OP_ZERO, (op.dst = buf, op.dst_ptr = at - 1, op.bytes = 1), "not inside of dst");
    fsdp_buf_destroy(b.model, buf);
    CHECK_EQ_INT(b.last_seq, 0);
    /* a marker is only shown; a copy runs */
    fsdp_op_init(&op, b.model, NULL, FSDP_OP_HOOK, FSDP_LABEL_WORLD, FSDP_STREAM_COMPUTE);
    CHECK_OK(fsdp_emit(b.model, &op));
    fsdp_op_init(&op, b.model, NULL, FSDP_OP_COPY, FSDP_LABEL_NONE, FSDP_STREAM_COMPUTE);
    op.what = "x", op.list = &block, op.list_count = 1, op.src_ptr = &x, op.dst_ptr = &y;
    op.dtype = op.out_dtype = FSDP_F32, op.count = 1;
    CHECK_OK(fsdp_emit(b.model, &op));
    CHECK_NEAR(y, 1, 0);
    CHECK_EQ_INT(b.last_seq, 2);
    CHECK_OK(fsdp_call_begin(b.model, FSDP_CALL_EXTENSION, "my_call"));
    CHECK_EQ_INT(b.marks[b.num_marks - 1].call, FSDP_CALL_EXTENSION);
    CHECK_OK(fsdp_pre_forward(b.units[0]));
    CHECK_OK(fsdp_call_begin(b.model, FSDP_CALL_EXTENSION, "my_call"));
    CHECK_STATUS(fsdp_call_begin(b.model, FSDP_CALL_FULL, "my_save"), FSDP_ERR_INVALID_STATE);
    CHECK(strstr(fsdp_last_error(b.s.world), "my_save: unit 'unit0' is in forward") != NULL);
    CHECK_STATUS(fsdp_call_begin(b.model, FSDP_CALL_COUNT, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_OK(fsdp_post_forward(b.units[0]));
    bed_close(&b);
}

/* While the parameters are locked, calls that read shards work; calls that write or move them
   fail. */
TEST(extension, shards_are_locked) {
    static const int writes[] = {FSDP_CALL_PARAMS_CHANGED, FSDP_CALL_LOAD, FSDP_CALL_CLIP,
                                 FSDP_CALL_REQUIRES_GRAD};
    static const int reads[] = {FSDP_CALL_FULL, FSDP_CALL_ZERO_GRAD, FSDP_CALL_EXTENSION};
    bed b;
    bed_open(&b, &settings[0]);
    CHECK_STATUS(fsdp_lock_params(NULL, "x"), FSDP_ERR_INVALID_ARG);
    CHECK_OK(fsdp_lock_params(b.model, NULL));
    CHECK_OK(fsdp_lock_params(b.model, "give them back"));
    CHECK_STATUS(fsdp_lock_params(b.model, "twice"), FSDP_ERR_INVALID_STATE);
    CHECK(strstr(fsdp_last_error(b.s.world), "[E232] lock_params: give them back"));
    for (int i = 0; i < 4; i++) {
        CHECK_STATUS(fsdp_call_begin(b.model, writes[i], "mine"), FSDP_ERR_INVALID_STATE);
        CHECK(strstr(fsdp_last_error(b.s.world), "[E231] mine: give them back"));
        if (i < 3) CHECK_OK(fsdp_call_begin(b.model, reads[i], "mine"));
    }
    CHECK_STATUS(fsdp_params_changed(b.model), FSDP_ERR_INVALID_STATE);
    CHECK(strstr(fsdp_last_error(b.s.world), "[E231] params_changed: give them back"));
    CHECK_OK(fsdp_lock_params(b.model, NULL));
    for (int i = 0; i < 4; i++) CHECK_OK(fsdp_call_begin(b.model, writes[i], "mine"));
    CHECK_OK(fsdp_model_reset(b.model)); /* clears the failure, which finalize would return again */
    bed_close(&b);
}

static fsdp_status call_that_fails(const fsdp_op *op, void *stream) {
    (void)op, (void)stream;
    return FSDP_ERR_CORRUPT;
}

/* An op of one worker thread waits for the op of another thread that it depends on. */
static int flag_of_first, first_was_done;
static fsdp_status takes_long(const fsdp_op *op, void *stream) {
    (void)op, (void)stream;
    w_sleep_ns(30000000);
    __atomic_store_n(&flag_of_first, 1, __ATOMIC_SEQ_CST);
    return FSDP_OK;
}
static fsdp_status is_second(const fsdp_op *op, void *stream) {
    (void)op, (void)stream;
    first_was_done = __atomic_load_n(&flag_of_first, __ATOMIC_SEQ_CST);
    return FSDP_OK;
}
TEST(extension, comm_threads_wait_for_each_other) {
    bed b;
    bed_open(&b, &settings[3]); /* two worker threads */
    CHECK_OK(fsdp_model_commit(b.model));
    fsdp_buf *buf = make_buf(&b, 64);
    for (int k = 0; k < 2; k++) {
        const int from = k ? FSDP_STREAM_REDUCE : FSDP_STREAM_GATHER;
        const int to = k ? FSDP_STREAM_GATHER : FSDP_STREAM_REDUCE;
        flag_of_first = first_was_done = 0;
        fsdp_op op = op_of(&b, NULL, FSDP_OP_CALL, from);
        op.dst = buf, op.call = takes_long;
        CHECK_OK(fsdp_emit(b.model, &op));
        op = op_of(&b, NULL, FSDP_OP_CALL, to);
        op.src = buf, op.call = is_second;
        CHECK_OK(fsdp_emit(b.model, &op));
        CHECK_OK(fsdp_wait_stream(b.model, to));
        CHECK(first_was_done);
    }
    fsdp_buf_destroy(b.model, buf);
    bed_close(&b);
}

/* An op is unchanged while it runs, however many are issued after it. */
static int record_changed;
static fsdp_status looks_at_itself(const fsdp_op *op, void *stream) {
    const fsdp_op was = *op;
    (void)stream;
    w_sleep_ns(op->count % (FSDPI_WORKER_OPS + 1) == 0 ? 30000000 : 0);
    record_changed |= op->count != was.count;
    return FSDP_OK;
}
TEST(extension, more_ops_than_a_comm_thread_holds, SLOW) {
    bed b;
    bed_open(&b, &settings[3]);
    CHECK_OK(fsdp_model_commit(b.model));
    for (int k = 0; k < 3 * FSDPI_WORKER_OPS; k++) {
        fsdp_op op = op_of(&b, NULL, FSDP_OP_CALL, FSDP_STREAM_REDUCE);
        op.count = (uint64_t)k, op.call = looks_at_itself;
        CHECK_OK(fsdp_emit(b.model, &op));
    }
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    CHECK(!record_changed);
    bed_close(&b);
}

/* An extension gets a copy of each op: changes to fields that order ops have no effect. */
typedef struct {
    fsdp_op seen;
    int asked, told, differs;
} forger;
static int differs(const forger *f, const fsdp_op *op) {
    return op->kind != f->seen.kind || op->stream != f->seen.stream || op->seq != f->seen.seq ||
           op->src != f->seen.src || op->dst != f->seen.dst || op->num_waits != f->seen.num_waits ||
           (op->num_waits && op->wait[0].seq != f->seen.wait[0].seq);
}
static int forges(void *user, fsdp_model *model, fsdp_op *op) {
    forger *f = (forger *)user;
    (void)model;
    if (f->asked++ % 2) f->differs += differs(f, op); /* sees the first one's changes */
    f->seen = *op;
    op->kind = FSDP_OP_NORM, op->stream = FSDP_STREAM_REDUCE, op->seq = 7;
    op->src = op->dst = NULL;
    op->num_waits = 2, op->wait[0].seq = op->wait[1].seq = 99;
    return 0;
}
static void forger_ran(void *user, fsdp_model *model, const fsdp_op *op, int64_t begin,
                       int64_t end) {
    forger *f = (forger *)user;
    (void)model, (void)begin, (void)end;
    f->told++;
    f->differs += differs(f, op);
}
TEST(extension, what_stays_of_a_record) {
    bed b;
    forger f;
    memset(&f, 0, sizeof f);
    bed_open(&b, &settings[2]); /* inline: reported at once */
    fsdp_extension e = FSDP_ZERO;
    e.op = forges;
    e.ran = forger_ran;
    e.user = &f;
    for (int k = 0; k < 2; k++) CHECK_OK(fsdp_attach(b.model, &e));
    step(&b);
    CHECK(f.told > 10);
    CHECK_EQ_INT(f.differs, 0);
    bed_close(&b);
}

/* A failing function of an extension aborts the world, as a user's function does. */
TEST(extension, failure_of_a_record) {
    bed b;
    fsdp_op op;
    bed_open(&b, &settings[2]);
    CHECK_OK(fsdp_model_commit(b.model));
    int label = fsdp_label_register(b.model, "mine");
    fsdp_op_init(&op, b.model, b.units[1], FSDP_OP_CALL, label, FSDP_STREAM_EXTENSION);
    op.call = call_that_fails;
    CHECK_STATUS(fsdp_emit(b.model, &op), FSDP_ERR_CORRUPT);
    CHECK(strstr(fsdp_last_error(b.s.world), "your function for call (mine) of unit 'unit1'"));
    CHECK_STATUS(fsdp_world_status(b.s.world), FSDP_ERR_CORRUPT);
    CHECK_STATUS(fsdp_pre_forward(b.units[0]), FSDP_ERR_CORRUPT);
    bed_close(&b);
}

/* A plan's hash of the options: equal for equal options, whatever calls set them, and different
   for others. */
static fsdp_status no_all_reduce(void *user, fsdp_unit *unit, void *sums, int64_t count,
                                 fsdp_dtype dtype, void *stream) {
    (void)user, (void)unit, (void)sums, (void)count, (void)dtype, (void)stream;
    return FSDP_OK;
}
static fsdp_status no_grad(void *user, const fsdp_param_view *v, void *stream) {
    (void)user, (void)v, (void)stream;
    return FSDP_OK;
}
static fsdp_status no_comm(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                           const fsdp_coll *coll) {
    (void)user;
    return ops->run(comm, coll);
}
enum { SETTERS = 21 };
/* Sets option n to a value that differs from its default, or (on = 0) to the default. */
static void set_one(const bed *b, int n, int on) {
    fsdp_model *m = b->model;
    fsdp_unit *u = b->units[0], *v = b->units[1];
    switch (n) {
    case 0: CHECK_OK(fsdp_set_grad_enabled(m, !on)); break;
    case 1: CHECK_OK(fsdp_set_is_last_backward(m, !on)); break;
    case 2: CHECK_OK(fsdp_set_requires_gradient_sync(m, NULL, !on)); break;
    case 3: CHECK_OK(fsdp_set_requires_gradient_sync(m, u, !on)); break;
    case 4: CHECK_OK(fsdp_set_requires_gradient_sync(m, v, !on)); break;
    case 5: CHECK_OK(fsdp_set_requires_all_reduce(m, u, !on)); break;
    case 6: CHECK_OK(fsdp_set_reshard_after_backward(m, u, !on)); break;
    case 7: CHECK_OK(fsdp_set_unshard_in_backward(m, u, !on)); break;
    case 8: CHECK_OK(fsdp_set_reduce_scatter_unused_params(m, u, on)); break;
    case 9:
        CHECK_OK(
            fsdp_set_reshard_after_forward(m, u, on ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS));
        break;
    case 10: CHECK_OK(fsdp_set_gradient_divide_factor(m, u, on ? 3 : 0)); break;
    case 11: CHECK_OK(fsdp_set_modules_to_forward_prefetch(u, b->units + 1, on ? 1 : 0)); break;
    case 12: CHECK_OK(fsdp_set_modules_to_forward_prefetch(u, b->units + 1, on ? 2 : 0)); break;
    case 13: CHECK_OK(fsdp_set_modules_to_backward_prefetch(u, b->units + 1, on ? 1 : 0)); break;
    case 14: CHECK_OK(fsdp_set_all_reduce_hook(u, on ? no_all_reduce : NULL, NULL)); break;
    case 15: CHECK_OK(fsdp_set_post_accumulate_hook(u, 1, on ? no_grad : NULL, NULL)); break;
    case 16: CHECK_OK(fsdp_set_custom_all_gather(u, on ? no_comm : NULL, NULL)); break;
    case 17: CHECK_OK(fsdp_set_custom_reduce_scatter(u, on ? no_comm : NULL, NULL)); break;
    case 18: CHECK_OK(fsdp_set_custom_all_reduce(u, on ? no_comm : NULL, NULL)); break;
    case 19: CHECK_OK(fsdp_set_uneven_inputs(m, on)); break;
    default: CHECK_OK(fsdp_set_requires_grad(v, 2, !on)); break;
    }
    if (n == 19) CHECK_EQ_INT(fsdp_has_uneven_inputs(m), on);
}
TEST(extension, settings_tell_options) {
    bed b;
    uint64_t at[SETTERS][SETTERS];
    bed_open(&b, &settings[2]);
    CHECK_EQ_INT(fsdp_has_uneven_inputs(NULL), 0);
    CHECK_STATUS(fsdp_set_uneven_inputs(NULL, 1), FSDP_ERR_INVALID_ARG);
    const uint64_t first = fsdpi_plan_settings(b.model);
    for (int i = 0; i < SETTERS; i++)
        for (int k = 0; k < SETTERS; k++) {
            set_one(&b, i, 1);
            CHECK(fsdpi_plan_settings(b.model) != first);
            set_one(&b, k, 1);
            at[i][k] = fsdpi_plan_settings(b.model);
            set_one(&b, k, 1); /* a second call changes nothing */
            CHECK(fsdpi_plan_settings(b.model) == at[i][k]);
            CHECK(k > i || at[i][k] == at[k][i] || (i == 12 && k == 11)); /* in either order */
            set_one(&b, i, 0); /* reset in the order in which they were set */
            set_one(&b, k, 0);
            CHECK(fsdpi_plan_settings(b.model) == first);
        }
    for (int i = 0; i < SETTERS; i++) /* all sets of one or two options differ */
        for (int k = 0; k <= i; k++)
            for (int n = 0; n <= i; n++)
                for (int o = 0; o <= n && (n < i || o < k); o++) {
                    int sync = (n == 2 || o == 2 || i == 2 || k == 2) || (i == 12 && k == 11) ||
                               (n == 12 && o == 11) || (i == 5 && k == 3) || (n == 5 && o == 3);
                    CHECK_MSG(sync || at[i][k] != at[n][o], "%d %d, %d %d", i, k, n, o);
                }
    CHECK(at[2][2] != at[3][4] && at[2][2] != at[3][3] && at[3][3] != at[5][5]);
    /* values matter, and so do units and their order in lists */
    CHECK_OK(fsdp_set_gradient_divide_factor(b.model, b.units[0], 4));
    CHECK(fsdpi_plan_settings(b.model) != at[10][10]);
    set_one(&b, 10, 0);
    fsdp_unit *turned[2] = {b.units[2], b.units[1]};
    CHECK_OK(fsdp_set_modules_to_forward_prefetch(b.units[0], turned, 2));
    CHECK(fsdpi_plan_settings(b.model) != at[12][12]);
    CHECK_OK(fsdp_set_modules_to_forward_prefetch(b.units[0], turned, 1));
    CHECK(fsdpi_plan_settings(b.model) != at[11][11]);
    set_one(&b, 11, 0);
    CHECK(fsdpi_plan_settings(b.model) == first);
    CHECK_OK(fsdp_model_cast(b.model, FSDP_BF16));
    CHECK(fsdpi_plan_settings(b.model) != first);
    CHECK_OK(fsdp_model_cast(b.model, FSDP_F32));
    CHECK(fsdpi_plan_settings(b.model) == first);
    step(&b);
    CHECK(fsdpi_plan_settings(b.model) == first);
    bed_close(&b);
}

/* ---- calls in a dry run ---------------------------------------------------------------------- */

typedef struct {
    bed *b;
    tape *t;
    int runs;
    fsdp_status result;
} dry_state;

static dry_state dry_state_as(bed *b, tape *t) {
    dry_state r = {b, t, 0, FSDP_OK};
    return r;
}

/* Sets every option, and makes calls with them. */
static fsdp_status dry_options(void *user) {
    const dry_state *r = (const dry_state *)user;
    fsdp_unit *const *units = r->b->units;
    fsdp_model *m = r->b->model;
    uint64_t was = fsdpi_plan_settings(m);
    for (int round = 0; round < 2; round++) {
        for (int n = 0; n < SETTERS - 1; n++)
            if (n < 11 || n > 13) set_one(r->b, n, round);
        CHECK_OK(fsdp_set_modules_to_forward_prefetch(units[0], NULL, 0));
        CHECK_OK(fsdp_set_modules_to_backward_prefetch(units[2], NULL, 0));
        CHECK(fsdpi_plan_settings(m) != was);
        CHECK_OK(fsdp_pre_forward(units[0]));
        CHECK_EQ_INT(fsdp_unit_storage(units[1]), FSDP_STORAGE_SHARDED);
        CHECK_STATUS(fsdp_pre_backward(units[0]), FSDP_ERR_INVALID_STATE); /* recorded failure */
        CHECK_OK(fsdp_post_forward(units[0]));
    }
    CHECK_OK(fsdp_agree(m, "x", 1));
    CHECK_OK(fsdp_params_changed(m));
    /* changes that a dry run could not undo */
    CHECK_STATUS(fsdp_set_modules_to_forward_prefetch(units[0], units + 1, 1),
                 FSDP_ERR_INVALID_ARG);
    CHECK(strstr(fsdp_last_error(r->b->s.world), "[E173] set_modules_to_forward_prefetch: a "
                                                 "dry run can only remove lists: count is 1"));
    CHECK_STATUS(fsdp_set_requires_grad(units[1], 2, 0), FSDP_ERR_INVALID_STATE);
    CHECK(strstr(fsdp_last_error(r->b->s.world), "[E214] set_requires_grad: a dry run"));
    CHECK_STATUS(fsdp_model_cast(m, FSDP_F64), FSDP_ERR_INVALID_STATE);
    CHECK_STATUS(fsdp_pools_trim(m), FSDP_ERR_INVALID_STATE);
    fsdp_extension e = FSDP_ZERO;
    CHECK_STATUS(fsdp_attach(m, &e), FSDP_ERR_INVALID_STATE);
    e = m->attached->e; /* the extension of the dry run */
    CHECK_STATUS(fsdp_detach(m, &e), FSDP_ERR_INVALID_STATE);
    return FSDP_OK;
}
TEST_P(extension, dry_run_of_options, settings, RANKS(row->world)) {
    static tape t;
    bed b;
    bed_open(&b, row);
    fsdp_extension e = tape_open(&t, &b);
    CHECK_OK(fsdp_set_modules_to_forward_prefetch(b.units[0], b.units + 1, 2));
    CHECK_OK(fsdp_set_modules_to_backward_prefetch(b.units[2], b.units, 1));
    CHECK_OK(fsdp_set_post_accumulate_hook(b.units[1], 0, no_grad, &b));
    step(&b);
    photograph(&b, &photo_before);
    dry_state r = dry_state_as(&b, &t);
    CHECK_OK(fsdpi_plan_dry_run(b.model, &e, dry_options, &r));
    check_as_before(&b);
    CHECK_OK(fsdp_pre_forward(b.units[0])); /* the prefetch lists are restored */
    CHECK(row->world == 1 || fsdp_unit_storage(b.units[1]) == FSDP_STORAGE_IN_FLIGHT);
    CHECK(row->world == 1 || fsdp_unit_storage(b.units[2]) == FSDP_STORAGE_IN_FLIGHT);
    CHECK_OK(fsdp_post_forward(b.units[0]));
    CHECK_OK(fsdp_model_reset(b.model));
    step(&b);
    tape_close(&t);
    bed_close(&b);
}

/* In a dry run no pool provides slots. The first failure ends the dry run; the model is
   restored. */
static fsdp_status dry_until_refused(void *user) {
    dry_state *r = (dry_state *)user;
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < NUM_UNITS && !status; i++) {
        status = fsdp_pre_forward(r->b->units[i]);
        if (!status) status = fsdp_post_forward(r->b->units[i]);
        r->runs += !status;
    }
    return status;
}
TEST(extension, dry_run_without_a_slot) {
    static tape t;
    bed b;
    bed_open(&b, &settings[1]); /* one rank, which gathers in another dtype */
    fsdp_extension e = tape_open(&t, &b);
    step(&b);
    photograph(&b, &photo_before);
    for (int refuse = 1; refuse <= NUM_UNITS + 1; refuse++) {
        dry_state r = dry_state_as(&b, &t);
        t.asked = 0;
        t.refuse = refuse;
        fsdp_status wanted = refuse <= NUM_UNITS ? FSDP_ERR_INVALID_ARG : FSDP_OK;
        CHECK_STATUS(fsdpi_plan_dry_run(b.model, &e, dry_until_refused, &r), wanted);
        CHECK_EQ_INT(r.runs, refuse - 1);
        if (wanted)
            CHECK(strstr(fsdp_last_error(b.s.world), "[E915] an extension gave 'unit") &&
                  strstr(fsdp_last_error(b.s.world),
                         "a slot of 0 bytes for gathered parameters, expected"));
        CHECK_OK(fsdp_world_status(b.s.world));
        check_as_before(&b);
    }
    dry_state r = dry_state_as(&b, &t); /* no extension provides slots */
    e.buffer = NULL;
    CHECK_STATUS(fsdpi_plan_dry_run(b.model, &e, dry_until_refused, &r), FSDP_ERR_INVALID_ARG);
    CHECK_EQ_INT(r.runs, 0);
    check_as_before(&b);
    step(&b);
    tape_close(&t);
    bed_close(&b);
    bed_open(&b, &settings[2]); /* other ranks do not wait: nothing runs */
    e = tape_open(&t, &b);
    r = dry_state_as(&b, &t);
    t.refuse = 1;
    CHECK_STATUS(fsdpi_plan_dry_run(b.model, &e, dry_until_refused, &r), FSDP_ERR_INVALID_ARG);
    CHECK_OK(fsdp_world_status(b.s.world));
    tape_close(&t);
    bed_close(&b);
}

/* Only the extension of a dry run is called; afterwards the attached ones are called again. */
static void guest_ran(void *user, fsdp_model *m, const fsdp_op *op, int64_t begin, int64_t end) {
    (void)m, (void)op, (void)begin, (void)end;
    ((guest *)user)->relayouts++;
}
static fsdp_buf *guest_buffer(void *user, fsdp_model *m, fsdp_unit *u, int pool,
                              fsdp_buf *released) {
    (void)m, (void)u, (void)pool, (void)released;
    ((guest *)user)->relayouts++;
    return NULL;
}
static int tape_counts_calls(void *user, fsdp_model *m, fsdp_unit *u, int call,
                             fsdp_status *status) {
    (void)m, (void)u, (void)call, (void)status;
    ((tape *)user)->num_calls += 1000;
    return 0;
}
TEST_P(extension, dry_run_calls_one_extension, settings, RANKS(row->world)) {
    static tape t;
    char diary[1024] = "";
    guest g, h;
    bed b;
    bed_open(&b, row);
    fsdp_extension eg = guest_as(&g, "g", diary), eh = guest_as(&h, "h", diary),
                   e = tape_open(&t, &b);
    eg.relayout = NULL;
    eg.buffer = guest_buffer;
    eg.ran = guest_ran;
    fsdp_extension attached = e; /* it may be attached */
    attached.buffer = NULL;
    CHECK_OK(fsdp_attach(b.model, &eg));
    CHECK_OK(fsdp_attach(b.model, &attached));
    CHECK_OK(fsdp_attach(b.model, &eh));
    e.call = tape_counts_calls;
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    int calls = g.calls, ops = g.ops;
    dry_state r = dry_state_as(&b, &t);
    CHECK_OK(fsdpi_plan_dry_run(b.model, &e, dry_until_refused, &r)); /* commits first */
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    CHECK(h.relayouts == 1 && g.relayouts == 0); /* the commit's */
    CHECK_EQ_INT(t.num_calls, 2 * NUM_UNITS * 1000);
    CHECK(g.calls == calls && h.calls == calls && g.ops == ops && h.ops == ops);
    CHECK_EQ_STR(diary, "");
    CHECK_OK(fsdp_pre_forward(b.units[0]));
    CHECK_EQ_STR(diary, "gh");
    CHECK(g.ops > ops && h.ops > ops);
    CHECK_OK(fsdp_post_forward(b.units[0]));
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    CHECK(g.relayouts > 0 || row->world == 1);
    CHECK_OK(fsdp_model_reset(b.model));
    CHECK_OK(fsdp_detach(b.model, &attached));
    tape_close(&t);
    bed_close(&b);
}

/* A dry run does not lose the reports of ops that were under way: the attached extension gets
   them. */
TEST(extension, dry_run_after_ops) {
    static tape t;
    bed b;
    watch w;
    bed_open(&b, &settings[4]);
    step(&b);
    const fsdp_extension et = tape_open(&t, &b);
    (void)watch_ops(&w, b.model);
    fsdp_counters from = FSDP_ZERO, to = FSDP_ZERO;
    CHECK_OK(fsdp_model_counters(b.model, &from));
    forwards(b.units);
    CHECK_OK(fsdp_model_counters(b.model, &to));
    uint64_t issued = to.calls[FSDP_OP_ALL_GATHER] - from.calls[FSDP_OP_ALL_GATHER];
    CHECK(issued == NUM_UNITS && (uint64_t)w.told[FSDP_OP_ALL_GATHER] < issued);
    dry_state r = dry_state_as(&b, &t);
    CHECK_OK(fsdpi_plan_dry_run(b.model, &et, dry_until_refused, &r));
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    CHECK_EQ_INT(w.told[FSDP_OP_ALL_GATHER], issued);
    CHECK_EQ_INT(w.bad, 0);
    tape_close(&t);
    bed_close(&b);
}

/* A dry run returns the status of its function; if the function does not run, another one. */
static fsdp_status dry_nothing(void *user) {
    dry_state *r = (dry_state *)user;
    r->runs++;
    return r->result;
}
static fsdp_status dry_within(void *user) { /* the outer dry run continues */
    dry_state *r = (dry_state *)user;
    fsdp_extension e = FSDP_ZERO;
    dry_state inner = dry_state_as(r->b, r->t);
    uint64_t works = r->b->s.works, colls = r->b->s.colls[FSDP_OP_ALL_GATHER];
    inner.result = FSDP_ERR_CORRUPT;
    CHECK_STATUS(fsdpi_plan_dry_run(r->b->model, &e, dry_nothing, &inner), FSDP_ERR_CORRUPT);
    CHECK_EQ_INT(inner.runs, 1);
    int num = r->t->num_ops;
    r->t->record = 1;
    CHECK_OK(dry_until_refused(user));
    r->t->record = 0;
    CHECK(r->t->num_ops > num && r->b->s.works == works);
    CHECK_EQ_INT(r->b->s.colls[FSDP_OP_ALL_GATHER], colls);
    return FSDP_OK;
}
TEST(extension, dry_run_status) {
    static tape t;
    bed b;
    bed_open(&b, &settings[5]);
    fsdp_extension e = tape_open(&t, &b);
    dry_state r = dry_state_as(&b, &t);
    CHECK_OK(fsdpi_plan_dry_run(b.model, &e, dry_nothing, &r)); /* the model is committed then */
    CHECK_EQ_INT(r.runs, 1);
    CHECK_EQ_INT((long long)b.model->num_commits, 1);
    r.result = FSDP_ERR_CORRUPT;
    CHECK_STATUS(fsdpi_plan_dry_run(b.model, &e, dry_nothing, &r), FSDP_ERR_CORRUPT);
    r.result = FSDP_OK;
    CHECK_EQ_INT(r.runs, 2);
    CHECK_OK(fsdp_pre_forward(b.units[1]));
    CHECK_STATUS(fsdpi_plan_dry_run(b.model, &e, dry_nothing, &r), FSDP_ERR_INVALID_STATE);
    CHECK(strstr(fsdp_last_error(b.s.world), "dry run: unit 'unit1' is in forward"));
    CHECK_EQ_INT(r.runs, 2);
    CHECK_OK(fsdp_post_forward(b.units[1]));
    CHECK_OK(fsdp_unshard(b.units[2])); /* idle, and gathered */
    photograph(&b, &photo_before);
    r.runs = 0;
    CHECK_OK(fsdpi_plan_dry_run(b.model, &e, dry_within, &r));
    CHECK_EQ_INT(r.runs, NUM_UNITS);
    check_as_before(&b);
    CHECK_OK(fsdp_wait(b.units[2]));
    CHECK_OK(fsdp_reshard(b.units[2]));
    CHECK_OK(fsdp_model_reset(b.model));
    tape_close(&t);
    bed_close(&b);
}

/* A unit still holds the slot of another extension after a dry run that resharded it. */
static fsdp_status dry_reshard(void *user) {
    fsdp_status status = fsdp_reshard((fsdp_unit *)user);
    return status ? status : fsdp_unshard((fsdp_unit *)user);
}
TEST(extension, dry_run_of_supplied_slots) {
    static tape t;
    bed b;
    bed_open(&b, &settings[5]);
    landlord l = landlord_of(b.model, FSDP_POOL_GATHER);
    l.part = make_buf(&b, 65536);
    const fsdp_extension et = tape_open(&t, &b), e = landlord_attach(&l, b.model);
    CHECK_OK(fsdp_unshard(b.units[1]));
    CHECK(l.part->held);
    CHECK_OK(fsdpi_plan_dry_run(b.model, &et, dry_reshard, b.units[1]));
    CHECK_EQ_INT(l.given_back, 0);
    CHECK(l.part->held && b.units[1]->state.slot[FSDP_POOL_GATHER] == l.part);
    CHECK_OK(fsdp_wait(b.units[1]));
    CHECK_OK(fsdp_reshard(b.units[1]));
    CHECK(!l.part->held);
    CHECK_OK(fsdp_detach(b.model, &e));
    fsdp_buf_destroy(b.model, l.part);
    tape_close(&t);
    bed_close(&b);
}

/* ---- ops emitted again ----------------------------------------------------------------------- */

/* Emits the recorded ops, with fsdp_emit or (`again`) with fsdpi_plan_emit. Both give equal
   numbers, waits, markers, work and times; step and agreed hash are new. */
static fsdp_status emits(const bed *b, tape *t, int again) {
    fsdp_status status = FSDP_OK;
    if (again) return fsdpi_plan_emit(b->model, t->ops, t->num_ops);
    for (int i = 0; i < t->num_ops && !status; i++) {
        t->ops[i].step = b->model->step;
        t->ops[i].given = b->model->agreed_hash;
        t->ops[i].timed = 0;
        status = fsdp_emit(b->model, &t->ops[i]);
    }
    return status;
}
TEST_P(extension, emitted_again, settings, RANKS(row->world)) {
    static tape t, seen[2];
    bed b;
    bed_open(&b, row);
    fsdp_extension e = tape_open(&t, &b), es[2];
    for (int k = 0; k < 2; k++) es[k] = tape_open(&seen[k], &b);
    e.buffer = es[0].buffer = es[1].buffer = NULL;
    step(&b);
    step(&b);
    CHECK_OK(fsdp_attach(b.model, &e));
    tape_step(&t);
    CHECK_OK(fsdp_finalize_backward(b.model));
    CHECK_OK(fsdp_detach(b.model, &e));
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    fsdp_counters c[3];
    uint64_t works[3], colls[3], seq[3];
    int64_t waits[3], busy[3][SIM_ACTORS];
    fsdp_buf left[2][64];
    memset(c, 0, sizeof c);
    for (int i = 0; i < NUM_UNITS; i++) /* as recorded */
        for (int k = 0; k < shapes[i].num_params; k++)
            if (!(shapes[i].frozen >> k & 1)) *fsdpi_use(b.units[i], k) |= FSDPI_USE_USED;
    CHECK_OK(emits(&b, &t, 0)); /* twice, so that both runs start from the same buffers */
    CHECK_OK(fsdp_wait_stream(b.model, -1));
    for (int k = 0; k < 3; k++) {
        CHECK_OK(fsdp_model_counters(b.model, &c[k]));
        works[k] = b.s.works, colls[k] = b.s.colls[FSDP_OP_REDUCE_SCATTER], seq[k] = b.model->seq;
        waits[k] = b.s.waits;
        memcpy(busy[k], b.s.busy, sizeof busy[k]);
        if (k == 2) break;
        CHECK_OK(fsdp_agree(b.model, "lr", 2));
        b.model->step++;
        CHECK_OK(fsdp_attach(b.model, &es[k]));
        seen[k].record = 1;
        t.ops[0].timed = 1;
        CHECK_OK(emits(&b, &t, k));
        CHECK_EQ_INT(t.ops[0].timed, 0);
        CHECK_OK(fsdp_detach(b.model, &es[k]));
        CHECK_OK(fsdp_wait_stream(b.model, -1));
        photograph(&b, &photo_before);
        memcpy(left[k], photo_before.bufs, sizeof left[k]);
    }
    CHECK_EQ_INT(seen[0].num_ops, t.num_ops);
    CHECK_EQ_INT(seen[1].num_ops, t.num_ops);
    for (int i = 0; i < t.num_ops; i++) {
        fsdp_op x = seen[0].ops[i], y = seen[1].ops[i];
        CHECK_EQ_INT(y.seq - x.seq, seq[1] - seq[0]);
        CHECK_EQ_INT(y.step, x.step + 1);
        CHECK(y.given != x.given && y.given == b.model->agreed_hash);
        CHECK_EQ_INT(x.num_waits, y.num_waits);
        for (int n = 0; n < x.num_waits; n++) CHECK_EQ_INT(x.wait[n].stream, y.wait[n].stream);
        x.seq = y.seq, x.step = y.step, x.given = y.given;
        memcpy(x.wait, y.wait, sizeof x.wait); /* the op numbers of a worker thread increase */
        CHECK_EQ_MEM(&x, &y, sizeof x);
    }
    for (int kind = 0; kind < FSDP_OP_COUNT; kind++) {
        CHECK_EQ_INT(c[2].calls[kind] - c[1].calls[kind], c[1].calls[kind] - c[0].calls[kind]);
        CHECK_EQ_INT(c[2].bytes[kind] - c[1].bytes[kind], c[1].bytes[kind] - c[0].bytes[kind]);
    }
    CHECK_EQ_INT(c[2].allocations - c[1].allocations, c[1].allocations - c[0].allocations);
    CHECK_EQ_INT(works[2] - works[1], works[1] - works[0]);
    CHECK_EQ_INT(colls[2] - colls[1], colls[1] - colls[0]);
    CHECK_EQ_INT(waits[2] - waits[1], waits[1] - waits[0]);
    for (int a = 0; a < SIM_ACTORS; a++)
        CHECK_EQ_INT(busy[2][a] - busy[1][a], busy[1][a] - busy[0][a]);
    for (int i = 0; i < photo_before.num_bufs; i++) {
        const fsdp_buf *x = &left[0][i], *y = &left[1][i];
        CHECK_EQ_INT(x->ready.stream, y->ready.stream);
        CHECK_EQ_INT(x->ready.seq != 0, y->ready.seq != 0);
        CHECK_EQ_INT(x->avail.seq != 0, y->avail.seq != 0);
        CHECK_EQ_INT(x->avail.stream, y->avail.stream);
        CHECK_EQ_INT(y->held, 0);
    }
    for (int i = 0; i < NUM_UNITS; i++) fsdpi_usage_clear(b.units[i], FSDPI_USE_USED);
    step(&b);
    tape_close(&t);
    for (int k = 0; k < 2; k++) tape_close(&seen[k]);
    bed_close(&b);
}

/* The first op that fails is the last one. */
TEST(extension, emitted_again_until_one_fails) {
    bed b;
    fsdp_op op[3];
    bed_open(&b, &settings[5]);
    CHECK_OK(fsdp_model_commit(b.model));
    CHECK_OK(fsdpi_plan_emit(b.model, NULL, 0));
    uint64_t seq = b.model->seq;
    for (int i = 0; i < 3; i++) {
        op[i] = op_of(&b, b.units[0], FSDP_OP_CALL, FSDP_STREAM_COMPUTE);
        op[i].call = i == 1 ? call_that_fails : looks_at_itself;
    }
    CHECK_STATUS(fsdpi_plan_emit(b.model, op, 3), FSDP_ERR_CORRUPT);
    CHECK_EQ_INT(b.model->seq, seq + 2);
    CHECK_STATUS(fsdp_world_status(b.s.world), FSDP_ERR_CORRUPT);
    bed_close(&b);
}

/* ---- calls of extensions, custom collectives, and listeners ---------------------------------- */

/* An extension that answers a call with calls to the library. */
typedef struct {
    guest g;
    fsdp_status (*makes)(fsdp_unit *unit);
    int on, twice;
} caller;
static int caller_call(void *user, fsdp_model *m, fsdp_unit *u, int call, fsdp_status *status) {
    caller *c = (caller *)user;
    (void)guest_call(&c->g, m, u, call, status);
    if (call != c->on) return 0;
    *status = c->makes(u);
    if (c->twice && !*status) *status = c->makes(u);
    return 1;
}
TEST_P(extension, calls_of_extensions, settings, RANKS(row->world)) {
    char diary[256] = "";
    caller a, c;
    guest g, h;
    bed b;
    bed_open(&b, row);
    fsdp_extension eg = guest_as(&g, "g", diary), eh = guest_as(&h, "h", diary);
    fsdp_extension ea = guest_as(&a.g, "a", diary), ec = guest_as(&c.g, "c", diary);
    a.makes = c.makes = fsdp_unshard;
    a.on = c.on = FSDP_CALL_WAIT;
    a.twice = c.twice = 0;
    ea.call = ec.call = caller_call;
    ea.user = &a, ec.user = &c;
    ea.op = ec.op = NULL, ea.relayout = ec.relayout = NULL, ea.destroy = ec.destroy = NULL;
    CHECK_OK(fsdp_attach(b.model, &eg));
    CHECK_OK(fsdp_attach(b.model, &ea));
    CHECK_OK(fsdp_attach(b.model, &ec));
    CHECK_OK(fsdp_attach(b.model, &eh));
    /* a's call of the same kind goes to c, which answers it by one that only h sees */
    a.makes = fsdp_pre_forward, a.on = FSDP_CALL_PRE_FORWARD;
    c.makes = fsdp_pre_forward, c.on = FSDP_CALL_PRE_FORWARD;
    CHECK_OK(fsdp_pre_forward(b.units[0]));
    CHECK_EQ_STR(diary, "gach");
    CHECK_EQ_INT(fsdp_unit_state(b.units[0]), FSDP_STATE_FORWARD);
    CHECK(b.model->offered_to == NULL);
    /* Calls of another kind start at the first extension; a's second call reaches c again. */
    diary[0] = 0;
    CHECK_OK(fsdp_post_forward(b.units[0]));
    CHECK_EQ_STR(diary, "gach");
    diary[0] = 0;
    a.makes = fsdp_wait, a.on = FSDP_CALL_UNSHARD, a.twice = 1;
    CHECK_OK(fsdp_unshard(b.units[1]));
    CHECK_EQ_STR(diary, "gachch");
    diary[0] = 0;
    c.on = FSDP_CALL_WAIT, c.makes = fsdp_post_backward; /* a failure reaches the first call */
    CHECK_STATUS(fsdp_unshard(b.units[1]), FSDP_ERR_INVALID_STATE);
    CHECK_EQ_STR(diary, "gach");
    CHECK(b.model->offered_to == NULL && b.model->ext_depth == 0);
    diary[0] = 0;
    c.on = a.on = -1;
    CHECK_OK(fsdp_model_reset(b.model));
    CHECK_EQ_STR(diary, "gach");
    CHECK_OK(fsdp_detach(b.model, &ec));
    CHECK_OK(fsdp_detach(b.model, &ea));
    step(&b);
    bed_close(&b);
}

/* Inline, an extension that only answers calls adds no cost to ops: they set no event. */
TEST(extension, who_listens_to_records) {
    for (int who = 0; who < 5; who++) {
        char diary[64] = "";
        guest g;
        bed b;
        bed_open(&b, &settings[2]);
        fsdp_extension all = guest_as(&g, "g", diary), e = FSDP_ZERO;
        e.user = &g;
        if (who == 1) e.call = all.call;
        if (who == 2) e.buffer = guest_buffer;
        if (who == 3) e.op = all.op;
        if (who == 4) e.ran = guest_ran;
        CHECK_OK(fsdp_attach(b.model, &e));
        fsdp_buf *buf = make_buf(&b, 256);
        fsdp_op op = op_of(&b, b.units[0], FSDP_OP_ZERO, FSDP_STREAM_COMPUTE);
        op.dst = buf, op.bytes = 256;
        uint64_t works = b.s.works;
        CHECK_OK(fsdp_emit(b.model, &op));
        CHECK_EQ_INT(b.s.works, works + 1);
        CHECK_EQ_INT(buf->ready.seq != 0, who >= 3);
        CHECK_EQ_INT(g.ops, who == 3);
        CHECK_EQ_INT(g.relayouts, who == 4);
        step(&b);
        CHECK(g.calls == 0 ? who != 1 : g.calls == 4 * NUM_UNITS + 3); /* hooks and shard writers */
        fsdp_buf_destroy(b.model, buf);
        bed_close(&b);
    }
}

/* ---- collectives on device data -------------------------------------------------------------- */

enum { RANKS = 4, COUNT = 6 };

typedef struct {
    const char *name;
    int lanes, stream;
} channel;
static const channel channels[] = {
    {"inline", 0, FSDP_STREAM_EXTENSION},      {"inline_compute", 0, FSDP_STREAM_COMPUTE},
    {"lane", 1, FSDP_STREAM_EXTENSION},        {"lanes", 2, FSDP_STREAM_EXTENSION},
    {"lanes_compute", 2, FSDP_STREAM_COMPUTE}, {"lanes_gather", 2, FSDP_STREAM_GATHER},
    {"lanes_reduce", 2, FSDP_STREAM_REDUCE}};

typedef struct {
    const channel *c;
    int rank, size;
    fsdp_world *w;
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_buf *in, *out;
    int label;
} post;

static fsdp_op post_op(const post *p, int kind, fsdp_comm *comm) {
    static fsdp_seg segs[RANKS];
    fsdp_op op;
    fsdp_op_init(&op, p->model, NULL, kind, p->label, p->c->stream);
    segs[p->rank].shard = segs[p->rank].full = 0;
    segs[p->rank].count = COUNT;
    op.what = "post";
    op.comm = comm;
    op.group_size = p->size;
    op.dtype = op.out_dtype = FSDP_F32;
    op.count = COUNT;
    op.src = p->in;
    op.dst = p->out;
    if (kind == FSDP_OP_ALL_GATHER || kind == FSDP_OP_REDUCE_SCATTER) {
        op.list = &segs[p->rank];
        op.list_count = 1;
    }
    return op;
}

/* Runs one collective after the caller's writes, and waits for it. */
static int post_run(const post *p, fsdp_op *op) {
    float *in = (float *)fsdp_buf_ptr(p->in), *out = (float *)fsdp_buf_ptr(p->out);
    fsdp_op use;
    for (int i = 0; i < COUNT * RANKS; i++) {
        in[i] = (float)(100 * p->rank + i);
        if (op->kind != FSDP_OP_ALL_REDUCE) out[i] = -1;
    }
    if (op->kind == FSDP_OP_ALL_REDUCE) op->src = p->out, memcpy(out, in, COUNT * sizeof *out);
    if (op->kind == FSDP_OP_BROADCAST && p->rank == op->root) memcpy(out, in, COUNT * sizeof *out);
    if (op->kind == FSDP_OP_BROADCAST) op->src = p->out;
    if (op->kind == FSDP_OP_RECV) op->src = NULL;
    if (op->kind == FSDP_OP_SEND) op->dst = NULL;
    if (!(p->w->caps.kinds & 1u << op->kind)) {
        CHECK_STATUS(fsdp_emit(p->model, op), FSDP_ERR_UNSUPPORTED);
        return 0;
    }
    CALL(p->w, fsdp_emit(p->model, op));
    fsdp_op_init(&use, p->model, NULL, FSDP_OP_WAIT, p->label, FSDP_STREAM_COMPUTE);
    use.src = p->out;
    if (op->kind != FSDP_OP_SEND) CALL(p->w, fsdp_emit(p->model, &use));
    CALL(p->w, fsdp_wait_stream(p->model, p->c->stream));
    return 1;
}

static void post_all_kinds(const post *p, fsdp_comm *comm) {
    const float *out = (const float *)fsdp_buf_ptr(p->out);
    int done = 0;
    fsdp_op op = post_op(p, FSDP_OP_ALL_GATHER, comm);
    if (post_run(p, &op))
        for (int i = 0; i < COUNT * p->size; i++, done++)
            W_CHECK(out[i] == (float)(100 * (i / COUNT) + i % COUNT), "gather: %g", (double)out[i]);
    op = post_op(p, FSDP_OP_REDUCE_SCATTER, comm);
    if (post_run(p, &op))
        for (int i = 0; i < COUNT; i++, done++) {
            int sum = 0;
            for (int r = 0; r < p->size; r++) sum += 100 * r + COUNT * p->rank + i;
            W_CHECK(out[i] == (float)sum, "scatter: %g", (double)out[i]);
        }
    op = post_op(p, FSDP_OP_ALL_REDUCE, comm);
    op.in_place = 1;
    op.redop = FSDP_MAX;
    if (post_run(p, &op))
        for (int i = 0; i < COUNT; i++, done++)
            W_CHECK(out[i] == (float)(100 * (p->size - 1) + i), "max: %g", (double)out[i]);
    op = post_op(p, FSDP_OP_BROADCAST, comm);
    op.root = 1;
    op.in_place = 1;
    if (post_run(p, &op))
        for (int i = 0; i < COUNT; i++, done++)
            W_CHECK(out[i] == (float)(100 + i), "broadcast: %g", (double)out[i]);
    op = post_op(p, FSDP_OP_ALL_TO_ALL, comm);
    if (post_run(p, &op))
        for (int i = 0; i < COUNT * p->size; i++, done++)
            W_CHECK(out[i] == (float)(100 * (i / COUNT) + COUNT * p->rank + i % COUNT),
                    "all_to_all: %g", (double)out[i]);
    if (p->rank < 2) { /* rank 0 sends to rank 1 */
        op = post_op(p, p->rank ? FSDP_OP_RECV : FSDP_OP_SEND, comm);
        op.root = 1 - p->rank;
        if (post_run(p, &op) && p->rank)
            for (int i = 0; i < COUNT; i++) W_CHECK(out[i] == (float)i, "recv: %g", (double)out[i]);
    }
    W_CHECK(done > 0, "nothing was compared");
}

/* All kinds on each stream, while the model's own collectives run. */
static void post_rank(lab_rank *r) {
    fsdp_world *w = r->w;
    post p;
    memset(&p, 0, sizeof p);
    p.c = (const channel *)r->arg;
    p.w = w;
    p.rank = r->rank;
    p.size = r->size;
    fsdp_mesh_desc d = FSDP_ZERO;
    fsdp_param_desc param = fsdp_mat("w", 64, 64);
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.params = &param;
    ud.num_params = 1;
    d.ndim = 2;
    d.shape[0] = 1;
    d.shape[1] = p.size;
    CALL(w, fsdp_mesh_create(w, &d, &p.mesh));
    CALL(w, fsdp_model_create(w, NULL, &p.model));
    CALL(w, fsdp_fully_shard(p.model, &ud, &p.unit));
    CALL(w, fsdp_model_commit(p.model));
    p.label = fsdp_label_register(p.model, "post");
    int pool = fsdp_pool_register(p.model, "posts");
    CALL(w, fsdp_buf_create(p.model, pool, FSDP_MEMORY_DEVICE, COUNT * RANKS * 4, &p.in));
    CALL(w, fsdp_buf_create(p.model, pool, FSDP_MEMORY_DEVICE, COUNT * RANKS * 4, &p.out));
    fsdp_comm *comm, *alone, *again;
    int threads = 0;
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) threads += w->workers[s] != NULL;
    CALL(w, fsdp_mesh_comm(p.mesh, 0, p.c->stream, &alone));
    CALL(w, fsdp_mesh_comm(p.mesh, 1, p.c->stream, &comm));
    CALL(w, fsdp_mesh_comm(p.mesh, 1, p.c->stream, &again));
    W_CHECK(!alone && comm && comm == again, "groups");
    CHECK_STATUS(fsdp_mesh_comm(p.mesh, 2, p.c->stream, &alone), FSDP_ERR_INVALID_ARG);
    int same[FSDP_STREAM_COUNT];
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) { /* streams that run at the same time */
        CALL(w, fsdp_mesh_comm(p.mesh, 1, s, &again));
        same[s] = comm == again;
        for (int t = 0; t < s; t++) {
            fsdp_comm *other;
            fsdpi_subgroup group;
            CALL(w, fsdp_mesh_comm(p.mesh, 1, t, &other));
            W_CHECK((again == other) == (fsdpi_comm_number(w, again, &group) ==
                                         fsdpi_comm_number(w, other, &group)),
                    "groups have numbers of their own");
        }
    }
    if (p.c->lanes > 1 && p.c->stream != FSDP_STREAM_REDUCE)
        for (int s = 0; s < FSDP_STREAM_COUNT; s++)
            W_CHECK(same[s] == (s == p.c->stream), "stream %d has the group of stream %d", s,
                    p.c->stream);
    int own = p.c->lanes > 0 &&
              (p.c->stream == FSDP_STREAM_COMPUTE || p.c->stream == FSDP_STREAM_EXTENSION);
    W_CHECK(own == (comm != p.mesh->gather_comm[1] && comm != p.mesh->reduce_comm[1]), "own group");
    fsdpi_subgroup group;
    W_CHECK(fsdpi_comm_number(w, comm, &group) > 2 && group.size == RANKS, "a number, a size");
    for (int k = 0; k < 3; k++) {
        CALL(w, fsdp_unshard(p.unit)); /* under way meanwhile */
        post_all_kinds(&p, comm);
        CALL(w, fsdp_wait(p.unit));
        CALL(w, fsdp_reshard(p.unit));
    }
    for (int s = 0; s < FSDP_STREAM_COUNT; s++) threads -= w->workers[s] != NULL;
    CHECK_EQ_INT(-threads, p.c->lanes > 0 && p.c->stream == FSDP_STREAM_EXTENSION);
    fsdp_buf_destroy(p.model, p.in);
    fsdp_buf_destroy(p.model, p.out);
}

TEST_P(extension, collectives, channels) {
    lab_how how = FSDP_ZERO;
    how.lanes = row->lanes;
    lab_run(RANKS, &how, post_rank, (void *)(uintptr_t)row);
}

/* ---- without memory -------------------------------------------------------------------------- */

static fsdp_status dry_no_call(void *user) {
    (void)user;
    return FSDP_OK;
}

/* Makes all objects of an extension, with an allocator that may fail once. Returns 1 if it
   failed. */
static int make_everything(fsdp_world *w, fsdp_model *m, char *diary) {
    static guest g;
    fsdp_extension e = guest_as(&g, "g", diary);
    fsdp_buf *whole = NULL, *part = NULL;
    void *ptr = NULL;
    fsdp_adamw *adamw = NULL;
    fsdp_grad_scaler *scaler = NULL;
    fsdp_status status = fsdp_attach(m, &e);
    int attached = !status;
    if (!status) status = fsdp_buf_create(m, FSDP_POOL_SCRATCH, FSDP_MEMORY_DEVICE, 256, &whole);
    if (!status) status = fsdp_buf_view(m, whole, 64, 64, &part);
    if (!status) status = fsdp_alloc(m, FSDP_MEMORY_HOST, 100, "make: no memory", &ptr);
    if (!status) status = fsdp_adamw_create(m, NULL, &adamw);
    if (!status) status = fsdp_grad_scaler_create(m, NULL, &scaler);
    if (!status) status = fsdpi_plan_dry_run(m, &e, dry_no_call, NULL);
    W_CHECK(status == FSDP_OK ||
                (status == FSDP_ERR_OUT_OF_MEMORY && strstr(fsdp_last_error(w), "memory")),
            "%s", fsdp_last_error(w));
    fsdp_grad_scaler_destroy(scaler);
    fsdp_adamw_destroy(adamw);
    fsdp_free(m, FSDP_MEMORY_HOST, ptr, 100);
    fsdp_buf_destroy(m, part);
    fsdp_buf_destroy(m, whole);
    if (attached) CHECK_OK(fsdp_detach(m, &e));
    return status != FSDP_OK;
}

/* An extension makes a call at another call's marker: the ops of each call have the state of
   that call. */
static fsdp_unit *two[2];
static int in_marker, states[2];
static int calls_at_marker(void *user, fsdp_model *model, fsdp_op *op) {
    (void)user, (void)model;
    if (op->kind == FSDP_OP_HOOK && op->count == FSDP_CALL_PRE_FORWARD && !in_marker) {
        in_marker = 1;
        CALL(fsdp_model_world(model), fsdp_unshard(two[1]));
        in_marker = 0;
    }
    if (op->kind == FSDP_OP_COPY && op->unit) states[op->unit == two[1]] = op->state;
    return 0;
}
static fsdp_model *two_units(fsdp_world *w) {
    fsdp_param_desc p = fsdp_mat("w", 8, 8);
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_model *model = lab_model(w, NULL);
    ud.param_dtype = FSDP_BF16;
    for (int i = 0; i < 2; i++) two[i] = lab_unit(w, model, &ud, &p, 1);
    CALL(w, fsdp_model_commit(model));
    return model;
}
static void call_at_a_marker(lab_rank *r) {
    fsdp_model *model = two_units(r->w);
    fsdp_extension e = FSDP_ZERO;
    e.op = calls_at_marker;
    CALL(r->w, fsdp_attach(model, &e));
    states[0] = states[1] = -1;
    CALL(r->w, fsdp_pre_forward(two[0]));
    CALL(r->w, fsdp_post_forward(two[0]));
    CHECK_EQ_INT(states[0], FSDP_STATE_FORWARD);
    CHECK_EQ_INT(states[1], FSDP_STATE_IDLE);
    CALL(r->w, fsdp_reshard(two[1]));
}
TEST(extension, call_at_a_marker) { lab_run(1, NULL, call_at_a_marker, NULL); }

/* fsdp_extension_mute mutes the extension that is named, though the other differs in one
   function only. */
static int seen_by[2];
static int first_sees(void *user, fsdp_model *model, fsdp_op *op) {
    (void)user, (void)model, (void)op;
    return seen_by[0]++, 0;
}
static int second_sees(void *user, fsdp_model *model, fsdp_op *op) {
    (void)user, (void)model, (void)op;
    return seen_by[1]++, 0;
}
static void retire_one(lab_rank *r) {
    fsdp_model *model = two_units(r->w);
    fsdp_extension a = FSDP_ZERO, b = FSDP_ZERO, other = FSDP_ZERO;
    a.op = first_sees, b.op = second_sees, other.name = "other";
    CALL(r->w, fsdp_attach(model, &a));
    CALL(r->w, fsdp_attach(model, &b));
    REFUSED(r->w, fsdp_extension_mute(model, &other), "[E903] extension_mute: 'other'");
    CALL(r->w, fsdp_extension_mute(model, &b));
    seen_by[0] = seen_by[1] = 0;
    CALL(r->w, fsdp_pre_forward(two[0]));
    CALL(r->w, fsdp_post_forward(two[0]));
    CHECK(seen_by[0] > 0 && seen_by[1] == 0);
    CALL(r->w, fsdp_detach(model, &b));
    CALL(r->w, fsdp_detach(model, &a));
}
TEST(extension, retire_one_of_two) { lab_run(1, NULL, retire_one, NULL); }

TEST(extension, no_memory_at_any_allocation) {
    w_heap heap;
    fsdp_world_desc d = w_desc(0, 1, NULL, NULL, 0);
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *u;
    fsdp_param_desc p = fsdp_mat("w", 8, 8);
    fsdp_unit_desc ud = FSDP_ZERO;
    char diary[4096] = "";
    ud.params = &p;
    ud.num_params = 1;
    w_heap_use(&heap, &d);
    CHECK_OK(fsdp_init(&d, &w));
    CHECK_OK(fsdp_model_create(w, NULL, &m));
    CHECK_OK(fsdp_fully_shard(m, &ud, &u));
    CHECK_OK(fsdp_model_commit(m));
    int64_t live = heap.live, n = 0;
    fsdp_memory before, after;
    CHECK_OK(fsdp_model_memory(m, &before));
    do {
        heap.failures = 0;
        heap.fail_at = heap.total + n++;
        (void)make_everything(w, m, diary);
        heap.fail_at = -1;
        CHECK_EQ_INT(heap.live, live);
        CHECK_OK(fsdp_model_memory(m, &after));
        CHECK(!memcmp(&before, &after, sizeof before));
        diary[0] = 0;
    } while (heap.failures);
    CHECK(n > 8);
    const uint64_t thawed = fsdpi_plan_settings(m);
    n = 0;
    do { /* an option that could not be set keeps its value */
        heap.failures = 0;
        heap.fail_at = heap.total + n++;
        fsdp_status status = fsdp_set_requires_grad(u, 0, 0);
        heap.fail_at = -1;
        CHECK_EQ_INT(status == FSDP_OK, !heap.failures);
        CHECK_EQ_INT(fsdpi_plan_settings(m) == thawed, status != FSDP_OK);
    } while (heap.failures);
    CHECK(n > 1);
    CHECK_OK(fsdp_set_requires_grad(u, 0, 1));
    CHECK(fsdpi_plan_settings(m) == thawed);
    CHECK_OK(fsdp_pre_forward(u));
    CHECK_OK(fsdp_post_forward(u));
    CHECK_OK(fsdp_shutdown(w));
    CHECK_EQ_INT(heap.live, 0);
}

/* Replicas differ in one element after the first MiB of a parameter that the host cannot read:
   the library compares all pieces. */
static char said_of_replicas[1 << 12];
static void hear_replicas(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)user;
    snprintf(said_of_replicas, sizeof said_of_replicas, "%.4000s", text);
}
static void differs_in_a_later_piece(lab_rank *r) {
    enum { NUMEL = 1024 * 512 };
    const fsdp_param_desc p = fsdp_mat("w", 1024, 512);
    const int32_t size = r->size;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    const fsdp_mesh *mesh = lab_mesh(r->w, 1, &size, NULL, NULL);
    CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
    md.mesh_info = &info;
    fsdp_model *m = lab_model(r->w, &md);
    fsdp_unit *u = lab_unit(r->w, m, NULL, &p, 1);
    float *full = (float *)lab_zeros(NUMEL, sizeof *full);
    full[NUMEL - 100000] = (float)r->rank;
    CALL(r->w, fsdp_param_load(u, 0, full));
    free(full);
    lab_forward(r->w, u);
    CALL(r->w, fsdp_pre_backward(u));
    (void)fsdp_grad(u, 0);
    CALL(r->w, fsdp_post_backward(u));
    CALL(r->w, fsdp_finalize_backward(m));
    CHECK_MSG(strstr(said_of_replicas, "[E219]"), "%s", said_of_replicas);
}
TEST(extension, replicas_differ_in_a_later_piece) {
    fsdp_device_ops hidden = *fsdpi_host_ops();
    lab_how how = FSDP_ZERO;
    hidden.flags &= ~(uint32_t)FSDP_DEVICE_HOST;
    how.processes = 1, how.device_ops = &hidden;
    w_log = hear_replicas;
    lab_run(2, &how, differs_in_a_later_piece, NULL);
}

/* ---- names of version 0.1 -------------------------------------------------------------------- */

TEST(extension, old_names) {
    CHECK(FSDP_OP_USE == FSDP_OP_WAIT && FSDP_OP_WROTE == FSDP_OP_GRADS_WRITTEN);
    CHECK(FSDP_PLAN_BY_CALLS == FSDP_PLAN_EAGER);
    CHECK(fsdp_buf_part == fsdp_buf_view && fsdp_retire == fsdp_extension_mute);
    CHECK(fsdp_set_uneven == fsdp_set_uneven_inputs && fsdp_is_uneven == fsdp_has_uneven_inputs);
    CHECK(fsdp_lend == fsdp_lock_params && fsdp_model_run == fsdp_model_run_mode);
    CHECK(fsdp_state_hold == fsdp_state_reserve && fsdp_state_written == fsdp_state_loaded);
    CHECK(fsdp_undefined == fsdp_fallback_ptr && FSDP_RUN_LANES == FSDP_RUN_THREADS);
}
