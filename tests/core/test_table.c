/* test_table.c - when each call is possible, what it does, and which arguments are refused
   Every cell of the transition table is tried, and compared with a small model of units, which follows
   transitions.h and not the library's own table. test_model.c makes random calls.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#ifndef FSDPI_DEBUG
#define FSDPI_DEBUG /* each row of the table ends with fsdpi_unit_check */
#endif
#define FSDP_ASSERT(world, condition)                                                              \
    (condition   ? FSDP_OK                                                                         \
     : is_broken ? FSDP_ERR_INTERNAL                                                               \
                 : fsdpi_assert_failed(world, __func__, #condition))
static int is_broken; /* a test has broken a rule, and expects that a check finds it */
#define LIBRARY_WHOLE
#include "library.c"
#include "lab.h"
#include "sim.h"
#include "transitions.h"

/* ---- names and texts of states ---------------------------------------------------------------- */

static const char *const state_names[] = {"IDLE", "FORWARD", "PRE_BACKWARD", "POST_BACKWARD"};
static const char *const storage_names[] = {"SHARDED", "IN_FLIGHT", "UNSHARDED",
                                            "SHARDED_POST_FORWARD"};
/* The words for these states in error texts, in the order of documented[].cells. NULL: no unit can
   be in this state. */
static const char *const told_as[4][4] = {
    {"is idle, and no forward of it waits for a backward",
     "has run forward, and its backward has not begun",
     "has no forward that waits for a backward, and the model's backward has not ended",
     "has run forward, and its turn in the model's backward has not come"},
    {"is in forward, which has not ended", "is in forward, which has not ended",
     "is in forward, which has not ended", "is in forward, which has not ended"},
    {NULL, NULL, "is in backward, which has not ended", "is in backward, which has not ended"},
    {NULL, NULL, "has run its backward, and the model's backward has not ended",
     "has run a backward, and a forward of it waits for another one"}};

/* ---- the model ------------------------------------------------------------------------------- */

enum { MAX_UNITS = 4, MAX_ORDER = 64 };

typedef struct {
    int state, storage, stale, due;
    int newest;    /* its newest entry in `order`, -1: none */
    unsigned told; /* calls that were refused in this step */
} unit_model;

typedef struct {
    int world, async, num_units;
    int backward, failed; /* failed: a hook has, since finalize */
    unit_model units[MAX_UNITS];
    int order[MAX_ORDER], before[MAX_ORDER], num_order; /* forwards: the unit; its entry before */
    int64_t gathers;
} model;

static void model_start(model *m, int world, int async, int num_units) {
    memset(m, 0, sizeof *m);
    m->world = world;
    m->async = async;
    m->num_units = num_units;
    for (int i = 0; i < num_units; i++) m->units[i].newest = -1;
}

static char model_cell(const model *m, int unit, int call) {
    const unit_model *u = &m->units[unit];
    return documented[call].cells[4 * u->state + 2 * m->backward + (u->due > 0)];
}

/* The calls of the model ask all units; returns the first for which it is impossible, or -1. */
static int model_refuses(const model *m, int unit, int call) {
    int all = call == FSDP_CALL_FINALIZE || call >= FSDP_CALL_PARAMS_CHANGED;
    for (int i = all && unit < 0 ? 0 : unit; i < (all && unit < 0 ? m->num_units : unit + 1); i++)
        if (model_cell(m, i, call) == '.') return i;
    return -1;
}

static void model_unshard(model *m, unit_model *u) {
    if (u->stale) u->storage = FSDP_STORAGE_SHARDED;
    u->stale = 0;
    if (u->storage != FSDP_STORAGE_SHARDED) return;
    u->storage = FSDP_STORAGE_IN_FLIGHT;
    m->gathers += m->world > 1;
}
static void model_wait(unit_model *u) {
    if (u->storage == FSDP_STORAGE_IN_FLIGHT) u->storage = FSDP_STORAGE_UNSHARDED;
}
static void model_reshard(unit_model *u) { u->storage = u->stale = 0; }
static void model_forget(model *m) {
    m->num_order = 0;
    for (int i = 0; i < m->num_units; i++) m->units[i].due = 0, m->units[i].newest = -1;
}
static void model_stale(unit_model *u) { u->stale = u->storage != FSDP_STORAGE_SHARDED; }

/* Applies a possible call to one unit of the model. */
static void model_unit(model *m, int unit, int call) {
    unit_model *u = &m->units[unit];
    int opens = u->state == FSDP_STATE_FORWARD &&
                !m->backward; /* post_forward: of a forward proper */
    char next = model_cell(m, unit, call);
    if (call == FSDP_CALL_UNSHARD || call == FSDP_CALL_PRE_FORWARD) model_unshard(m, u);
    if (call == FSDP_CALL_WAIT || call == FSDP_CALL_PRE_FORWARD) model_wait(u);
    if (call == FSDP_CALL_RESHARD) model_reshard(u);
    if (call == FSDP_CALL_POST_FORWARD && opens) {
        CHECK(m->num_order < MAX_ORDER);
        m->order[m->num_order] = unit;
        m->before[m->num_order] = u->newest;
        u->newest = m->num_order++;
        u->due++;
        model_reshard(u);
    }
    if (call == FSDP_CALL_PRE_BACKWARD && next == 'P') {
        model_unshard(m, u);
        model_wait(u);
        int at = u->newest;
        if (at >= 0) u->newest = m->before[at];
        if (at > 0 && m->async) model_unshard(m, &m->units[m->order[at - 1]]);
        u->due--;
        m->backward = 1;
    }
    if (call == FSDP_CALL_POST_BACKWARD || call == FSDP_CALL_FINALIZE || call == FSDP_CALL_RESET)
        model_reshard(u);
    if (call == FSDP_CALL_PARAMS_CHANGED || call == FSDP_CALL_LOAD) model_stale(u);
    if (next != '=') u->state = (int)(strchr(state_letters, next) - state_letters);
}

/* A call; unit -1: of the model. Returns the status it has to give. */
static fsdp_status model_call(model *m, int unit, int call) {
    int hook = call <= FSDP_CALL_RESHARD || call == FSDP_CALL_SET ||
               call == FSDP_CALL_REQUIRES_GRAD || call == FSDP_CALL_ZERO_GRAD ||
               call == FSDP_CALL_PARAMS_CHANGED; /* what may go unchecked */
    int first_failure = m->failed;
    int refuses = model_refuses(m, unit, call);
    if (refuses >= 0) {
        m->units[refuses].told |= 1u << call;
        m->failed |= hook;
        return FSDP_ERR_INVALID_STATE;
    }
    for (int i = 0; i < m->num_units; i++)
        if (unit < 0 || unit == i) model_unit(m, i, call);
    if (call != FSDP_CALL_FINALIZE && call != FSDP_CALL_RESET) return FSDP_OK;
    m->backward = m->failed = 0;
    for (int i = 0; i < m->num_units; i++) m->units[i].told = 0;
    model_forget(m);
    return call == FSDP_CALL_FINALIZE && first_failure ? FSDP_ERR_INVALID_STATE : FSDP_OK;
}

/* ---- the library under test ------------------------------------------------------------------ */

enum { WEIGHT, EMPTY, STILL, BIAS, NUM_PARAMS };

typedef struct {
    const char *name;
    int world, async, threads;
} setting;

static const setting settings[] = {
    {"W=1/inline", 1, 0, 0}, {"W=4/inline", 4, 0, 0},
    {"W=1/async", 1, 1, 0},  {"W=4/async", 4, 1, 0},
    {"W=1/lanes", 1, 0, 2},  {"W=4/lanes", 4, 0, 1}, /* lanes: data stay where they are */
};

typedef struct {
    sim s;
    fsdp_model *model;
    fsdp_unit *units[MAX_UNITS];
    fsdp_unit *added; /* to another model */
    int num_units;
    int64_t gathers, reductions; /* all_gather and reduce_scatter of units */
} bed;

static void bed_count(void *user, const fsdp_op *op) {
    bed *b = (bed *)user;
    b->gathers += op->kind == FSDP_OP_ALL_GATHER && op->label == FSDP_LABEL_GATHER;
    b->reductions += op->kind == FSDP_OP_REDUCE_SCATTER;
    b->s.num_ops = 0; /* they need not be kept */
}

static void bed_open(bed *b, const setting *set, int num_units) {
    static const char *const names[MAX_UNITS] = {"A", "B", "C", "D"};
    memset(b, 0, sizeof *b);
    sim_init(&b->s, set->world, set->world / 2);
    b->s.async = set->async;
    b->s.threads = set->threads;
    CHECK(sim_open(&b->s));
    CHECK_OK(fsdp_model_create(b->s.world, NULL, &b->model));
    for (b->num_units = 0; b->num_units < num_units; b->num_units++) {
        fsdp_param_desc p[NUM_PARAMS];
        fsdp_unit_desc ud = FSDP_ZERO;
        p[WEIGHT] = fsdp_mat("weight", 6, 4);
        p[EMPTY] = fsdp_mat("empty", 0, 4);
        p[STILL] = fsdp_vec("still", 5);
        p[STILL].frozen = 1;
        p[BIAS] = fsdp_vec("bias", 6);
        ud.name = names[b->num_units];
        ud.params = p;
        ud.num_params = NUM_PARAMS;
        CHECK_OK(fsdp_fully_shard(b->model, &ud, &b->units[b->num_units]));
    }
    b->s.on_op = bed_count;
    b->s.on_op_user = b;
    CHECK_OK(sim_watch(&b->s, b->model));
    CHECK_OK(fsdp_model_commit(b->model));
}

static void bed_close(bed *b) { CHECK_EQ_INT(sim_close(&b->s), 0); }

static void bed_compare(const bed *b, const model *m, const char *after) {
    CHECK_MSG(b->model->backward == m->backward, "after %s: phase %d, model %d", after,
              b->model->backward, m->backward);
    for (int i = 0; i < b->num_units; i++) {
        const fsdp_unit *u = b->units[i];
        const unit_model *x = &m->units[i];
        CHECK_MSG((int)fsdp_unit_state(u) == x->state, "after %s: %s is %s, model %s", after,
                  u->desc.name, state_names[fsdp_unit_state(u)], state_names[x->state]);
        CHECK_MSG((int)fsdp_unit_storage(u) == x->storage, "after %s: %s is %s, model %s", after,
                  u->desc.name, storage_names[fsdp_unit_storage(u)], storage_names[x->storage]);
        CHECK_MSG(u->state.forwards == x->due, "after %s: %s has %d forwards due, model %d", after,
                  u->desc.name, u->state.forwards, x->due);
    }
    CHECK_MSG(b->gathers == m->gathers && b->reductions == 0, /* no gradient is requested */
              "after %s: %lld gathers, model %lld; %lld reductions", after, (long long)b->gathers,
              (long long)m->gathers, (long long)b->reductions);
}

/* ---- calls ----------------------------------------------------------------------------------- */

static void fill_ones(void *user, const fsdp_param_view *block) {
    float *data = (float *)block->data;
    CHECK(block->numel > 0);
    for (int64_t i = 0; i < block->numel; i++) data[i] = 1.0f;
    ++*(int *)user;
}

static fsdp_status do_init(fsdp_model *m) {
    int blocks = 0;
    return fsdp_init_params(m, fill_ones, &blocks);
}
static fsdp_status do_clip(fsdp_model *m) {
    double norm;
    return fsdp_clip_grad_norm(m, 1.0, &norm);
}
static int blind(void *user, fsdp_model *m, fsdp_op *op) {
    (void)user, (void)m, (void)op;
    return 0;
}
static fsdp_status do_attach(fsdp_model *m) {
    fsdp_extension extension = FSDP_ZERO;
    extension.op = blind;
    fsdp_status status = fsdp_attach(m, &extension);
    return status ? status : fsdp_detach(m, &extension);
}
static fsdp_status do_load(fsdp_unit *u) {
    float full[24] = {0};
    return fsdp_param_load(u, WEIGHT, full);
}
static fsdp_status do_full(fsdp_unit *u) {
    float full[24];
    return fsdp_param_full(u, WEIGHT, full);
}
static fsdp_status do_full_grad(fsdp_unit *u) {
    float full[24];
    return fsdp_param_full_grad(u, WEIGHT, full);
}
static fsdp_status do_factor(fsdp_unit *u) {
    return fsdp_set_gradient_divide_factor(u->model, u, 0);
}
static fsdp_status do_forward_list(fsdp_unit *u) {
    return fsdp_set_modules_to_forward_prefetch(u, NULL, 0);
}
static fsdp_status do_backward_list(fsdp_unit *u) {
    return fsdp_set_modules_to_backward_prefetch(u, NULL, 0);
}
static fsdp_status do_reduce_hook(fsdp_unit *u) { return fsdp_set_all_reduce_hook(u, NULL, NULL); }
static fsdp_status do_grad_hook(fsdp_unit *u) {
    return fsdp_set_post_accumulate_hook(u, WEIGHT, NULL, NULL);
}
static fsdp_status do_gather_comm(fsdp_unit *u) {
    return fsdp_set_custom_all_gather(u, NULL, NULL);
}
static fsdp_status do_scatter_comm(fsdp_unit *u) {
    return fsdp_set_custom_reduce_scatter(u, NULL, NULL);
}
static fsdp_status do_reduce_comm(fsdp_unit *u) {
    return fsdp_set_custom_all_reduce(u, NULL, NULL);
}
static fsdp_status do_requires_grad(fsdp_unit *u) { return fsdp_set_requires_grad(u, STILL, 0); }

/* Every public call that the table knows, in every form: these, then lab_setters for a unit, and for
   all units. */
typedef struct {
    const char *name;
    int call;
    fsdp_status (*of_unit)(fsdp_unit *);
    fsdp_status (*of_model)(fsdp_model *); /* for all units */
    int one_unit;                          /* of_unit checks only that unit */
} call_form;
static const call_form calls[] = {
    {"pre_forward", FSDP_CALL_PRE_FORWARD, fsdp_pre_forward, NULL, 1},
    {"post_forward", FSDP_CALL_POST_FORWARD, fsdp_post_forward, NULL, 1},
    {"pre_backward", FSDP_CALL_PRE_BACKWARD, fsdp_pre_backward, NULL, 1},
    {"post_backward", FSDP_CALL_POST_BACKWARD, fsdp_post_backward, NULL, 1},
    {"unshard", FSDP_CALL_UNSHARD, fsdp_unshard, NULL, 1},
    {"wait", FSDP_CALL_WAIT, fsdp_wait, NULL, 1},
    {"reshard", FSDP_CALL_RESHARD, fsdp_reshard, NULL, 1},
    {"finalize", FSDP_CALL_FINALIZE, NULL, fsdp_finalize_backward, 0},
    {"params_changed", FSDP_CALL_PARAMS_CHANGED, NULL, fsdp_params_changed, 0},
    {"init_params", FSDP_CALL_LOAD, NULL, do_init, 0},
    {"param_load", FSDP_CALL_LOAD, do_load, NULL, 0},
    {"param_full", FSDP_CALL_FULL, do_full, NULL, 0},
    {"param_full_grad", FSDP_CALL_FULL, do_full_grad, NULL, 0},
    {"zero_grad", FSDP_CALL_ZERO_GRAD, NULL, fsdp_zero_grad, 0},
    {"clip_grad_norm", FSDP_CALL_CLIP, NULL, do_clip, 0},
    {"attach", FSDP_CALL_FULL, NULL, do_attach, 0},
    {"set_gradient_divide_factor", FSDP_CALL_SET, do_factor, NULL, 1},
    {"set_modules_to_forward_prefetch", FSDP_CALL_SET, do_forward_list, NULL, 1},
    {"set_modules_to_backward_prefetch", FSDP_CALL_SET, do_backward_list, NULL, 1},
    {"set_all_reduce_hook", FSDP_CALL_SET, do_reduce_hook, NULL, 1},
    {"set_post_accumulate_hook", FSDP_CALL_SET, do_grad_hook, NULL, 1},
    {"set_custom_all_gather", FSDP_CALL_SET, do_gather_comm, NULL, 1},
    {"set_custom_reduce_scatter", FSDP_CALL_SET, do_scatter_comm, NULL, 1},
    {"set_custom_all_reduce", FSDP_CALL_SET, do_reduce_comm, NULL, 1},
    {"set_requires_grad", FSDP_CALL_REQUIRES_GRAD, do_requires_grad, NULL, 0},
    {"reset", FSDP_CALL_RESET, NULL, fsdp_model_reset, 0},
};
enum { NUM_CALLS = sizeof calls / sizeof *calls, NUM_FORMS = NUM_CALLS + 2 * LAB_SETTERS };
static call_form form_of(int form) {
    if (form < NUM_CALLS) return calls[form];
    const int setter = (form - NUM_CALLS) / 2;
    const call_form f = {lab_setters[setter].name, FSDP_CALL_SET, NULL, NULL, form % 2};
    return f;
}
/* Makes the call; a setter sets its default. */
static fsdp_status make_call(const bed *b, int form, int at) {
    const call_form f = form_of(form);
    const int setter = (form - NUM_CALLS) / 2;
    if (form < NUM_CALLS) return f.of_unit ? f.of_unit(b->units[at]) : f.of_model(b->model);
    return lab_setters[setter].set(b->model, f.one_unit ? b->units[at] : NULL,
                                   setter == LAB_RAF      ? FSDP_RESHARD_ALWAYS
                                   : setter == LAB_UNUSED ? 0
                                                          : 1);
}

/* One call on the library and on the model; `at` is the place of the unit. Compares everything. */
static void call_both(bed *b, model *m, int form, int at) {
    const char *name = form_of(form).name;
    int call = form_of(form).call, unit = form_of(form).one_unit ? at : -1;
    int refuses = model_refuses(m, unit, call), logged = b->s.num_logged;
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    model was = *m;
    CHECK_OK(fsdp_model_counters(b->model, &before));
    fsdp_status expected = model_call(m, unit, call);
    if (!strcmp(name, "attach")) m->failed |= expected != FSDP_OK; /* as of hooks */
    fsdp_status got = make_call(b, form, at);
    CHECK_MSG(got == expected, "%s of %s: %s, expected %s (%s)", name, b->units[at]->desc.name,
              fsdp_status_name(got), fsdp_status_name(expected), fsdp_last_error(b->s.world));
    bed_compare(b, m, name);
    if (refuses < 0) return;
    /* Nothing was changed, and the text says what is missing. */
    char start[256];
    const unit_model *u = &was.units[refuses];
    CHECK_OK(fsdp_model_counters(b->model, &after));
    CHECK_EQ_MEM(&before, &after, sizeof before);
    int is_new = !(u->told >> call & 1); /* logged once in a step */
    CHECK_EQ_INT(b->s.num_logged, logged + is_new);
    if (is_new) CHECK_EQ_STR(b->s.logged, fsdp_last_error(b->s.world));
    if (call != FSDP_CALL_SET && strcmp(name, "attach") != 0) name = documented[call].name;
    snprintf(start, sizeof start, "rank %d: [E206] %s: unit '%s' %s: ", b->s.rank, name,
             b->units[refuses]->desc.name, told_as[u->state][2 * was.backward + (u->due > 0)]);
    CHECK_MSG(!strncmp(fsdp_last_error(b->s.world), start, strlen(start)),
              "\"%s\" does not begin with \"%s\"", fsdp_last_error(b->s.world), start);
    const char *first = strstr(fsdp_last_error(b->s.world), ": call fsdp_");
    int c = FSDP_CALL_PRE_FORWARD;
    CHECK(first != NULL);
    first += strlen(": call fsdp_");
    while (c < FSDP_CALL_EXTENSION &&
           strncmp(first, documented[c].name, strlen(documented[c].name)))
        c++;
    CHECK_MSG(c < FSDP_CALL_EXTENSION && !strcmp(first + strlen(documented[c].name), " first"),
              "%s", fsdp_last_error(b->s.world));
    CHECK_MSG(model_cell(&was, refuses, c) != '.', "%s, which is not possible",
              fsdp_last_error(b->s.world));
}

/* A refused call is logged once in a step. */
static int told(unit_model *x, int call) {
    int before = x->told >> call & 1;
    x->told |= 1u << call;
    return before;
}
/* Getters: what they are asked for, or undefined memory and a text, which finalize tells again. */
static void check_getters(bed *b, model *m, int at, int mark) {
    unit_model *x = &m->units[at];
    for (int i = 0; i < NUM_PARAMS; i++) {
        int logged = b->s.num_logged, ok = x->storage == FSDP_STORAGE_UNSHARDED;
        void *data = fsdp_data(b->units[at], i); /* the empty parameter's too */
        CHECK(data && lab_undefined(b->model, data) == !ok);
        CHECK_EQ_INT(b->s.num_logged - logged, !ok && !told(x, FSDP_CALL_DATA));
        if (!ok) CHECK(strstr(fsdp_last_error(b->s.world), "data: unit '"));
        m->failed |= !ok;
        if (!mark) continue;
        logged = b->s.num_logged;
        ok = model_cell(m, at, FSDP_CALL_GRAD) != '.';
        void *grad = fsdp_grad(b->units[at], i);
        CHECK_EQ_INT(grad == NULL, i == STILL); /* frozen: NULL in any state */
        if (i == STILL) continue;
        CHECK_EQ_INT(lab_undefined(b->model, grad), !ok);
        CHECK_EQ_INT(b->s.num_logged - logged, !ok && !told(x, FSDP_CALL_GRAD));
        if (!ok) CHECK(strstr(fsdp_last_error(b->s.world), "grad: unit '"));
        m->failed |= !ok;
    }
}

/* ---- every cell ------------------------------------------------------------------------------ */

/* Returns how many hooks must come before a call is possible, by the documents, or `most` if that
   number is at least `most`. */
static int hooks_before(int state, int backward, int due, int open, int call, int most) {
    static const int hooks[] = {FSDP_CALL_PRE_FORWARD, FSDP_CALL_POST_FORWARD,
                                FSDP_CALL_PRE_BACKWARD, FSDP_CALL_POST_BACKWARD,
                                FSDP_CALL_FINALIZE};
    const int cell = 4 * state + 2 * backward + (due > 0);
    if (documented[call].cells[cell] != '.' && (call != FSDP_CALL_DATA || open)) return 0;
    for (int i = 0; i < 5 && most > 1; i++) {
        const char next = documented[hooks[i]].cells[cell];
        if (next == '.') continue;
        const int to = next == '=' ? state : (int)(strchr(state_letters, next) - state_letters);
        const int dues = due + (i == 1 && !backward) - (i == 2 && next != '=');
        const int way = 1 + hooks_before(to, i == 2 || (backward && i < 4), dues, i == 0 || i == 2,
                                         call, most - 1);
        if (way < most) most = way;
    }
    return most;
}

/* Checks that the call which the error text names is possible, and is the first one of a shortest
   way to `call`. If a backward is due, it opens parameters, though a forward would do so, too. */
static void check_named(const bed *b, int cell, int call) {
    const int state = cell / 4, backward = cell / 2 % 2, due = cell % 2, most = 5;
    const int before = hooks_before(state, backward, due, 0, call, most);
    const char *first = strstr(fsdp_last_error(b->s.world), ": call fsdp_");
    CHECK(first != NULL);
    int named = 0;
    while (strncmp(first + 12, documented[named].name, strlen(documented[named].name))) named++;
    CHECK_MSG(documented[named].cells[cell] != '.', "%s", fsdp_last_error(b->s.world));
    CHECK_EQ_INT(named == FSDP_CALL_RESET, before == most);
    if (call == FSDP_CALL_DATA && due && state != FSDP_STATE_FORWARD)
        CHECK_EQ_INT(named, FSDP_CALL_PRE_BACKWARD);
    if (before == most || (call == FSDP_CALL_DATA && due)) return;
    const char next = documented[named].cells[cell];
    const int to = next == '=' ? state : (int)(strchr(state_letters, next) - state_letters);
    const int is_back = named == FSDP_CALL_PRE_BACKWARD;
    const int dues = due + (named == FSDP_CALL_POST_FORWARD && !backward) -
                     (is_back && next != '=');
    const int phase = is_back || (backward && named != FSDP_CALL_FINALIZE);
    const int open = is_back || named == FSDP_CALL_PRE_FORWARD;
    CHECK_MSG(hooks_before(to, phase, dues, open, call, most) == before - 1,
              "%s in %s, backward %d, due %d: %s", documented[call].name, state_names[state],
              backward, due, fsdp_last_error(b->s.world));
}

/* The library's own table agrees with the documents, also in cells that no order of calls reaches.
   */
TEST(table, legality_of_every_cell) {
    bed b;
    int cells = 0;
    bed_open(&b, &settings[0], 1);
    fsdp_unit *u = b.units[0];
    for (int call = 0; call < FSDP_CALL_COUNT; call++) {
        CHECK_EQ_STR(fsdpi_call_name(call), documented[call].name);
        for (int cell = 0; cell < 16; cell++, cells++) {
            u->state.training = (uint8_t)(cell / 4);
            b.model->backward = cell / 2 % 2;
            u->state.forwards = cell % 2;
            const fsdpi_row *row = fsdpi_lookup(u, call);
            char next = documented[call].cells[cell];
            CHECK_MSG((row != NULL) == (next != '.'), "%s in %s, backward %d, due %d",
                      documented[call].name, state_names[u->state.training], b.model->backward,
                      u->state.forwards);
            if (row && next != '=') CHECK_EQ_INT(state_letters[row->next], next);
            if (row && next == '=')
                CHECK(row->next == FSDPI_KEEP || row->next == u->state.training);
            u->state.storage = FSDP_STORAGE_SHARDED;
            if (row && call != FSDP_CALL_DATA) continue;
            if (cell / 4 == FSDP_STATE_PRE_BACKWARD && !b.model->backward) continue; /* never */
            CHECK_STATUS(fsdpi_wrong_call(u, call, "wrong"), FSDP_ERR_INVALID_STATE);
            check_named(&b, cell, call);
        }
    }
    u->state.training = 0;
    b.model->backward = u->state.forwards = 0;
    bed_close(&b);
    h_message("%d cells", cells);
}

/* ---- what holds of a unit between two calls ---------------------------------------------------- */

enum { /* slots that a unit holds, as a set of places */
       GATHER = 1 << FSDP_POOL_GATHER,
       SLICE = 1 << FSDP_POOL_SLICE,
       GRAD = 1 << FSDP_POOL_GRAD,
       IN = 1 << FSDP_POOL_REDUCE_IN,
       OUT = 1 << FSDP_POOL_REDUCE_OUT,
       FRESH = 1 << FSDPI_FRESH
};
enum { /* its other marks */
       AHEAD = 1,
       STALE = 2,
       DUE = 4,      /* a forward */
       NEGATIVE = 8, /* less than none is */
       PARTS = 16,   /* trainables of several parts */
       CAST = 32,    /* gradients are reduced in another dtype */
       WATCHED = 64, /* by an extension */
       REHEARSES = 128,
       USED = 256,    /* a parameter */
       REDUCED = 512, /* a parameter */
       ALIAS = 1024   /* the full parameters are the shards */
};

/* States that a call may leave, and states that break one rule each. */
static const struct {
    const char *what;
    int holds;
    int shards, replicas, trains, training, storage, slots, marks, shard_grad;
} states[] = {
#define IDLE    FSDP_STATE_IDLE
#define BACK    FSDP_STATE_PRE_BACKWARD
#define SHARDED FSDP_STORAGE_SHARDED
#define FLIES   FSDP_STORAGE_IN_FLIGHT
#define OPEN    FSDP_STORAGE_UNSHARDED
#define SLICED  FSDP_STORAGE_SHARDED_POST_FORWARD
#define NONE    FSDPI_SHARD_GRAD_NONE
#define ZEROED  FSDPI_SHARD_GRAD_ZERO
#define HAS     FSDPI_SHARD_GRAD_REDUCED
    {"nothing held", 1, 2, 1, 1, IDLE, SHARDED, 0, 0, NONE},
    {"a slot of a gather that is not", 0, 2, 1, 1, IDLE, SHARDED, GATHER, 0, NONE},
    {"gathered", 1, 2, 1, 1, IDLE, OPEN, GATHER, 0, NONE},
    {"gathered into no slot", 0, 2, 1, 1, IDLE, OPEN, 0, 0, NONE},
    {"under way", 1, 2, 1, 1, IDLE, FLIES, GATHER, 0, NONE},
    {"under way into no slot", 0, 2, 1, 1, IDLE, FLIES, 0, 0, NONE},
    {"the shards themselves", 1, 1, 1, 1, IDLE, OPEN, 0, ALIAS, NONE},
    {"the shards themselves, in a slot", 0, 1, 1, 1, IDLE, OPEN, GATHER, ALIAS, NONE},
    {"a slice", 1, 2, 1, 1, IDLE, SLICED, SLICE, 0, NONE},
    {"a slice in no slot", 0, 2, 1, 1, IDLE, SLICED, 0, 0, NONE},
    {"a slot of a slice that is not", 0, 2, 1, 1, IDLE, SHARDED, SLICE, 0, NONE},
    {"prefetched", 1, 2, 1, 1, IDLE, FLIES, GATHER, AHEAD, NONE},
    {"prefetched and waited for", 0, 2, 1, 1, IDLE, OPEN, GATHER, AHEAD, NONE},
    {"prefetched shards", 0, 1, 1, 1, IDLE, FLIES, 0, AHEAD | ALIAS, NONE},
    {"stale", 1, 2, 1, 1, IDLE, OPEN, GATHER, STALE, NONE},
    {"stale, of nothing", 0, 2, 1, 1, IDLE, SHARDED, 0, STALE, NONE},
    {"a forward is due", 1, 2, 1, 1, IDLE, SHARDED, 0, DUE, NONE},
    {"fewer forwards than none", 0, 2, 1, 1, IDLE, SHARDED, 0, NEGATIVE, NONE},
    {"in backward", 1, 2, 1, 1, BACK, OPEN, GATHER | GRAD, USED, NONE},
    {"in backward, nothing is used yet", 1, 2, 1, 2, BACK, OPEN, GATHER | GRAD, 0, ZEROED},
    {"in backward without a slot", 0, 2, 1, 1, BACK, OPEN, GATHER, 0, NONE},
    {"a replica in backward without a slot", 0, 1, 2, 1, BACK, OPEN, GATHER, 0, NONE},
    {"nothing trains, in backward", 1, 2, 1, 0, BACK, OPEN, GATHER, 0, NONE},
    {"nothing trains, with gradients", 0, 2, 1, 0, BACK, OPEN, GATHER | GRAD, 0, NONE},
    {"nothing trains, with a reduce input", 0, 2, 1, 0, BACK, OPEN, GATHER | IN, 0, NONE},
    {"nothing trains, with sums", 0, 2, 2, 0, BACK, OPEN, GATHER | OUT, 0, NONE},
    {"sums of a call", 0, 2, 2, 1, IDLE, SHARDED, OUT | FRESH, USED, NONE},
    {"one rank writes the shard gradient", 1, 1, 1, 1, BACK, OPEN, 0, USED | ALIAS, HAS},
    {"one rank, nothing was there", 1, 1, 1, 1, BACK, OPEN, 0, USED | ALIAS, NONE},
    {"one rank writes what counts as zeros", 0, 1, 1, 1, BACK, OPEN, 0, USED | ALIAS, ZEROED},
    {"one rank, no trainables, zeros", 1, 1, 1, 0, BACK, OPEN, 0, ALIAS, ZEROED},
    {"gradients wait", 1, 2, 1, 1, IDLE, SHARDED, GRAD, USED, NONE},
    {"gradients wait to be cast", 1, 2, 1, 1, IDLE, SHARDED, IN, USED | CAST, NONE},
    {"gradients wait in two slots", 0, 2, 1, 1, IDLE, SHARDED, GRAD | IN, USED, NONE},
    {"a backward adds to them", 1, 2, 1, 1, BACK, OPEN, GATHER | GRAD | IN, USED | CAST, NONE},
    {"of several parts as written", 0, 2, 1, 1, IDLE, SHARDED, GRAD, USED | PARTS, NONE},
    {"of several parts, in backward", 1, 2, 1, 1, BACK, OPEN, GATHER | GRAD, USED | PARTS, NONE},
    {"to be cast, as written", 0, 2, 1, 1, IDLE, SHARDED, GRAD, USED | CAST, NONE},
    {"sums wait", 1, 2, 2, 1, IDLE, SHARDED, OUT, USED, NONE},
    {"sums wait, and gradients", 1, 2, 2, 1, IDLE, SHARDED, OUT | GRAD, USED, NONE},
    {"sums without replicas", 0, 2, 1, 1, IDLE, SHARDED, OUT, USED, NONE},
    {"sums without shards", 0, 1, 2, 1, IDLE, SHARDED, OUT, USED, NONE},
    {"used, and nothing waits", 0, 2, 1, 1, IDLE, SHARDED, 0, USED, NONE},
    {"what waits is not used", 0, 2, 1, 1, IDLE, SHARDED, GRAD, 0, NONE},
    {"a plan keeps it", 1, 2, 1, 1, IDLE, SHARDED, GRAD, WATCHED, NONE},
    {"reduced", 1, 2, 1, 1, IDLE, SHARDED, 0, REDUCED, HAS},
    {"reduced, and zeros", 0, 2, 1, 1, IDLE, SHARDED, 0, REDUCED, ZEROED},
    {"reduced before a dry run", 1, 2, 1, 1, IDLE, SHARDED, 0, REDUCED | REHEARSES, NONE},
};
TEST(table, broken_states_are_found) {
    for (size_t k = 0; k < sizeof states / sizeof *states; k++) {
        static fsdp_model m;
        static fsdp_unit u;
        fsdp_buf buf[FSDPI_PLACES];
        const int marks = states[k].marks;
        uint64_t use = (marks & USED ? FSDPI_USE_USED : 0) |
                       (marks & REDUCED ? FSDPI_USE_REDUCED : 0);
        memset(&m, 0, sizeof m);
        memset(&u, 0, sizeof u);
        memset(buf, 0, sizeof buf);
        u.model = &m, u.use = &use, u.use_words = 1;
        m.listeners = marks & WATCHED ? FSDPI_LISTEN_OPS : 0, m.dry_run = (marks & REHEARSES) != 0;
        u.layout.gather = marks & ALIAS ? FSDPI_GATHER_ALIAS : FSDPI_GATHER_SHARDS;
        u.layout.num_train = states[k].trains;
        u.facts.shards = states[k].shards, u.facts.replicas = states[k].replicas;
        u.facts.one_train = !(marks & PARTS);
        u.facts.gathered = FSDP_F32, u.facts.reduce = marks & CAST ? FSDP_F64 : FSDP_F32;
        u.state.training = (uint8_t)states[k].training,
        u.state.storage = (uint8_t)states[k].storage;
        u.state.ahead = (marks & AHEAD) != 0, u.state.stale = (marks & STALE) != 0;
        u.state.forwards = marks & DUE ? 1 : marks & NEGATIVE ? -1 : 0;
        u.state.shard_grad = (uint8_t)states[k].shard_grad;
        for (int i = 0; i < FSDPI_PLACES; i++)
            if (states[k].slots >> i & 1) u.state.slot[i] = &buf[i], buf[i].held = 1;
        is_broken = 1;
        CHECK_MSG((fsdpi_unit_check(&u) == FSDP_OK) == states[k].holds, "%s", states[k].what);
        for (int i = 0; i < FSDPI_PLACES && states[k].holds; i++) { /* a slot that nobody holds */
            buf[i].held = 0;
            if (u.state.slot[i]) CHECK_MSG(fsdpi_unit_check(&u), "%s: slot %d", states[k].what, i);
            buf[i].held = 1;
        }
        is_broken = 0;
    }
}

/* Forwards without a backward: the record of them ends, and each may still run backward. */
TEST(table, record_of_forwards_is_bounded) {
    enum { FORWARDS = 100 };
    bed b;
    bed_open(&b, &settings[0], 1);
    for (int n = 0; n < FORWARDS; n++) {
        CHECK_OK(fsdp_pre_forward(b.units[0]));
        CHECK_OK(fsdp_post_forward(b.units[0]));
    }
    CHECK_EQ_INT(b.model->num_order, 64);
    CHECK_EQ_INT(b.units[0]->state.forwards, FORWARDS);
    CHECK_OK(fsdp_model_reset(b.model));
    bed_close(&b);
}

/* Without gradients a forward is not recorded: the text of a backward says so, but not that of a call
   which a recorded forward, too, makes impossible. */
TEST(table, text_of_gradients_off) {
    bed b;
    bed_open(&b, &settings[0], 1);
    for (int due = 0; due < 2; due++) {
        CHECK_OK(fsdp_pre_forward(b.units[0]));
        if (!due) CHECK_OK(fsdp_set_grad_enabled(b.model, 0));
        CHECK_OK(fsdp_post_forward(b.units[0]));
        CHECK_OK(fsdp_set_grad_enabled(b.model, 0));
        CHECK_STATUS(due ? fsdp_post_backward(b.units[0]) : fsdp_pre_backward(b.units[0]),
                     FSDP_ERR_INVALID_STATE);
        CHECK_EQ_INT(strstr(fsdp_last_error(b.s.world),
                            " (gradients are off: fsdp_set_grad_enabled): call ") != NULL,
                     !due);
        CHECK_OK(fsdp_set_grad_enabled(b.model, 1));
    }
    bed_close(&b);
}

/* All states of two units that calls can reach, with a shortest way to each. */
typedef struct {
    model m;
    int from, form, at; /* the step that leads here */
} place;

enum { MAX_PLACES = 20000, MAX_WAY = 64 };
static place places[MAX_PLACES];
static int num_places;

static void place_key(const model *m, char *key) {
    *key++ = (char)m->backward;
    *key++ = (char)m->failed;
    for (int i = 0; i < m->num_units; i++) {
        const unit_model *u = &m->units[i];
        *key++ = (char)u->state;
        *key++ = (char)u->storage;
        *key++ = (char)u->stale;
        *key++ = (char)u->due;
    }
}

static int place_known(const model *m) {
    char a[16] = {0}, b[16] = {0};
    place_key(m, a);
    for (int i = 0; i < num_places; i++) {
        place_key(&places[i].m, b);
        if (!memcmp(a, b, sizeof a)) return 1;
    }
    return 0;
}

static void explore(const setting *set) {
    num_places = 1;
    model_start(&places[0].m, set->world, set->async || set->threads, 2);
    places[0].from = -1;
    for (int i = 0; i < num_places; i++)
        for (int form = 0; form < NUM_FORMS; form++)
            for (int at = 0; at < 2; at++) {
                model m = places[i].m;
                const call_form f = form_of(form);
                int unit = f.one_unit ? at : -1;
                if (f.call > FSDP_CALL_PARAMS_CHANGED) continue; /* no new states */
                if (!strcmp(f.name, "attach")) continue;
                if (model_refuses(&m, unit, f.call) >= 0) continue;
                (void)model_call(&m, unit, f.call);
                if (m.units[0].due > 2 || m.units[1].due > 1 || place_known(&m)) continue;
                CHECK(num_places < MAX_PLACES);
                places[num_places].m = m;
                places[num_places].from = i;
                places[num_places].form = form;
                places[num_places++].at = at;
            }
}

static void walk(bed *b, model *m, int to) {
    int way[MAX_WAY], length = 0;
    for (; places[to].from >= 0; to = places[to].from) {
        CHECK(length < MAX_WAY);
        way[length++] = to;
    }
    while (length > 0) {
        const place *p = &places[way[--length]];
        call_both(b, m, p->form, p->at);
    }
}

TEST_P(table, reachable_cells, settings, row->world > 3 ? MANY_RANKS : 0) {
    int cells = 0, cases = 0;
    char seen[4][2][2][3][2];
    memset(seen, 0, sizeof seen);
    explore(row);
    for (int i = 0; i < num_places; i++) {
        const unit_model *u = &places[i].m.units[0];
        char *mark = &seen[u->state][places[i].m.backward][u->due > 0][u->storage][u->stale];
        if (*mark) continue;
        *mark = 1;
        cells++;
        for (int form = 0; form < NUM_FORMS; form++, cases++) {
            bed b;
            model m;
            bed_open(&b, row, 2);
            model_start(&m, row->world, row->async || row->threads, 2);
            walk(&b, &m, i);
            check_getters(&b, &m, 0, 0);
            call_both(&b, &m, form, 0);
            check_getters(&b, &m, 0, 0);
            check_getters(&b, &m, 1, 1);
            check_getters(&b, &m, 0, 1);
            bed_close(&b);
        }
    }
    h_message("%d states of two units, %d cells of one, %d cases", num_places, cells, cases);
}

/* ---- failures are reported again ------------------------------------------------------------- */

TEST_P(table, finalize_reports_the_first_failure_once, settings, row->world > 3 ? MANY_RANKS : 0) {
    bed b;
    bed_open(&b, row, 2);
    CHECK_OK(fsdp_pre_forward(b.units[0]));
    CHECK_STATUS(fsdp_post_backward(b.units[1]), FSDP_ERR_INVALID_STATE);
    CHECK_STATUS(fsdp_reshard(b.units[0]), FSDP_ERR_INVALID_STATE);
    CHECK_STATUS(fsdp_zero_grad(b.model), FSDP_ERR_INVALID_STATE);
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE); /* its own: A is open */
    CHECK(strstr(fsdp_last_error(b.s.world), "finalize_backward: unit 'A'"));
    CHECK_OK(fsdp_post_forward(b.units[0]));
    CHECK_OK(fsdp_pre_backward(b.units[0]));
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE);
    CHECK(strstr(fsdp_last_error(b.s.world),
                 "post_backward: unit 'B' is idle, and no forward of it waits"));
    CHECK_EQ_INT(fsdp_unit_state(b.units[0]), FSDP_STATE_IDLE); /* it has done its work */
    CHECK_OK(fsdp_finalize_backward(b.model));
    CHECK_STATUS(fsdp_post_forward(b.units[1]), FSDP_ERR_INVALID_STATE);
    CHECK_OK(fsdp_model_reset(b.model)); /* forgets it */
    CHECK_OK(fsdp_finalize_backward(b.model));
    CHECK_STATUS(fsdp_clip_grad_norm(b.model, 0.0, NULL), FSDP_ERR_INVALID_ARG); /* no hook */
    CHECK_OK(fsdp_finalize_backward(b.model));
    CHECK(lab_undefined(b.model, fsdp_data(b.units[0], 0))); /* a getter has no status of its own */
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE);
    CHECK(strstr(fsdp_last_error(b.s.world), "data: unit 'A' is idle, and no forward of it waits "
                                             "for a backward, and its parameters are not gathered: "
                                             "call fsdp_pre_forward first"));
    CHECK(lab_undefined(b.model, fsdp_grad(b.units[1], 0)));
    CHECK(lab_undefined(b.model, fsdp_data(b.units[0], 0)));
    CHECK_STATUS(fsdp_finalize_backward(b.model), FSDP_ERR_INVALID_STATE);
    CHECK(strstr(fsdp_last_error(b.s.world), "grad: unit 'B' is idle, and no forward of it waits"));
    CHECK_OK(fsdp_finalize_backward(b.model));
    bed_close(&b);
}

/* ---- arguments that are refused --------------------------------------------------------------- */

/* Arguments that PyTorch 2.15 refuses, and ones without sense that it accepts. Refused here too,
   except in rows with FSDP_OK, with a text that says what to do. The other arguments are tested in
   test_mesh.c (mesh.refused, mesh_info.refused) and test_faults.c (faults.model_descs,
   faults.unit_descs, faults.null_and_range). A row's call is made on two units whose parameters are
   sharded over 4 ranks, after a step. It leaves the model as it was. */
static fsdp_status add_to(bed *b, fsdp_model *m, const fsdp_unit_desc *desc,
                          const fsdp_param_desc *params, int count) {
    fsdp_unit_desc ud = *desc;
    fsdp_unit *unit = b->units[0];
    ud.params = params, ud.num_params = count;
    const fsdp_status status = fsdp_fully_shard(m, &ud, &unit);
    CHECK((status == FSDP_OK) == (unit != NULL));
    if (!status) b->added = unit;
    return status;
}
static fsdp_status add_vector(bed *b, const fsdp_unit_desc *desc, fsdp_param_desc p) {
    fsdp_model *m = NULL;
    CHECK_OK(fsdp_model_create(b->s.world, NULL, &m));
    return add_to(b, m, desc, &p, 1);
}
static const fsdp_unit_desc plain_unit = FSDP_ZERO;

static fsdp_status info_empty(bed *b) { /* fsdp_mesh_info_init has not filled it */
    fsdp_mesh_info zero = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_model *m;
    md.mesh_info = &zero;
    return fsdp_model_create(b->s.world, &md, &m);
}
static fsdp_status mesh_queries(bed *b) { /* they return -1, and have no text */
    fsdp_mesh *line = NULL;
    CHECK_OK(fsdp_mesh_1d(b->s.world, "a", &line));
    CHECK(fsdp_mesh_rank(line, -1) == -1 && fsdp_mesh_rank(line, 1) == -1);
    CHECK_EQ_INT(fsdp_mesh_ranks(line, 1, NULL), -1);
    return FSDP_OK;
}
static fsdp_status mixed_dtypes(bed *b) {
    fsdp_param_desc p[2] = {fsdp_mat("w", 5, 3), fsdp_vec("b", 5)};
    fsdp_model *m = NULL;
    p[1].dtype = FSDP_BF16;
    CHECK_OK(fsdp_model_create(b->s.world, NULL, &m));
    return add_to(b, m, &plain_unit, p, 2);
}
static fsdp_status unit_late(bed *b) {
    const fsdp_param_desc p = fsdp_vec("late", 4);
    return add_to(b, b->model, &plain_unit, &p, 1);
}
static fsdp_status reshard_by(bed *b, int by_model, int by_unit) {
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    const fsdp_param_desc p = fsdp_vec("b", 4);
    fsdp_model *m = NULL;
    md.reshard_after_forward = by_model, ud.reshard_after_forward = by_unit;
    const fsdp_status status = fsdp_model_create(b->s.world, &md, &m);
    return status ? status : add_to(b, m, &ud, &p, 1);
}
static fsdp_status reshard_3(bed *b) { return reshard_by(b, 0, 3); }
static fsdp_status reshard_8(bed *b) { return reshard_by(b, 0, 8); }
static fsdp_status reshard_less(bed *b) { return reshard_by(b, 0, -2); }
static fsdp_status reshard_model(bed *b) { return reshard_by(b, 3, 0); }
static fsdp_status reshard_model_less(bed *b) { return reshard_by(b, -2, 0); }
static fsdp_status unit_reduce_int(bed *b) {
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.reduce_dtype = FSDP_U8;
    return add_vector(b, &ud, fsdp_vec("b", 3));
}
static fsdp_status unit_output_int(bed *b) {
    fsdp_unit_desc ud = FSDP_ZERO;
    ud.output_dtype = FSDP_I8;
    return add_vector(b, &ud, fsdp_vec("b", 3));
}

typedef struct {
    int count;
    int64_t nbytes;
} told_sizes;
static int ext_sizes(void *user, int64_t shard_numel, int64_t nbytes[FSDP_GATHER_TENSORS]) {
    const told_sizes *t = (const told_sizes *)user;
    for (int i = 0; i < t->count && i < FSDP_GATHER_TENSORS; i++)
        nbytes[i] = t->nbytes ? t->nbytes : shard_numel;
    return t->count;
}
static fsdp_status ext_pre(void *user, const fsdp_param_view *view, void *const *strings,
                           void *stream) {
    (void)user, (void)view, (void)strings, (void)stream;
    return FSDP_OK;
}
static fsdp_status ext_post(void *user, const fsdp_param_view *view, const void *const *gathered,
                            void *full, fsdp_dtype dtype, void *stream) {
    (void)user, (void)view, (void)gathered, (void)full, (void)dtype, (void)stream;
    return FSDP_OK;
}
static fsdp_status extended(bed *b, fsdp_gather_extension e, int count, int64_t nbytes) {
    told_sizes sizes = {count, nbytes};
    fsdp_param_desc p = fsdp_mat("w", 5, 3);
    e.user = &sizes;
    p.extension = &e;
    return add_vector(b, &plain_unit, p);
}
static const fsdp_gather_extension whole = {ext_sizes, ext_pre, ext_post, NULL},
                                   no_post = {ext_sizes, ext_pre, NULL, NULL},
                                   no_pre = {ext_sizes, NULL, ext_post, NULL},
                                   no_sizes = {NULL, ext_pre, ext_post, NULL};
static fsdp_status ext_no_post(bed *b) { return extended(b, no_post, 1, 0); }
static fsdp_status ext_no_pre(bed *b) { return extended(b, no_pre, 1, 0); }
static fsdp_status ext_no_sizes(bed *b) { return extended(b, no_sizes, 1, 0); }
static fsdp_status ext_none(bed *b) { return extended(b, whole, 0, 0); }
static fsdp_status ext_less(bed *b) { return extended(b, whole, -1, 0); }
static fsdp_status ext_five(bed *b) { return extended(b, whole, FSDP_GATHER_TENSORS + 1, 0); }
static fsdp_status ext_negative(bed *b) { return extended(b, whole, 1, -4); }
static fsdp_status ext_four(bed *b) { return extended(b, whole, FSDP_GATHER_TENSORS, 0); }

static fsdp_status set_reshard_int(bed *b) {
    return fsdp_set_reshard_after_forward(b->model, b->units[0], 2);
}
static fsdp_unit *foreign(bed *b) {
    CHECK_OK(add_vector(b, &plain_unit, fsdp_vec("b", 4)));
    return b->added;
}
static fsdp_status prefetch_null(bed *b) {
    fsdp_unit *list[2] = {b->units[1], NULL};
    return fsdp_set_modules_to_forward_prefetch(b->units[0], list, 2);
}
static fsdp_status prefetch_null_back(bed *b) {
    fsdp_unit *list[2] = {b->units[1], NULL};
    return fsdp_set_modules_to_backward_prefetch(b->units[0], list, 2);
}
static fsdp_status prefetch_foreign(bed *b) {
    fsdp_unit *list[2] = {b->units[1], foreign(b)};
    return fsdp_set_modules_to_forward_prefetch(b->units[0], list, 2);
}
static fsdp_status prefetch_foreign_back(bed *b) {
    fsdp_unit *list[2] = {b->units[1], foreign(b)};
    return fsdp_set_modules_to_backward_prefetch(b->units[0], list, 2);
}
static fsdp_status prefetch_count(bed *b) {
    return fsdp_set_modules_to_forward_prefetch(b->units[0], b->units, -1);
}
static fsdp_status prefetch_count_back(bed *b) {
    return fsdp_set_modules_to_backward_prefetch(b->units[0], b->units, -1);
}
static fsdp_status prefetch_no_list(bed *b) {
    return fsdp_set_modules_to_forward_prefetch(b->units[0], NULL, 1);
}
static fsdp_status factor_negative(bed *b) {
    return fsdp_set_gradient_divide_factor(b->model, b->units[0], -2);
}
static fsdp_status factor_nan(bed *b) {
    return fsdp_set_gradient_divide_factor(b->model, b->units[0], LAB_NAN);
}
static fsdp_status thaw_integers(bed *b) {
    fsdp_param_desc p = fsdp_vec("codes", 5);
    p.dtype = FSDP_U8, p.frozen = 1;
    CHECK_OK(add_vector(b, &plain_unit, p));
    CHECK_OK(fsdp_set_requires_grad(b->added, 0, 0));
    return fsdp_set_requires_grad(b->added, 0, 1);
}
static fsdp_status thaw_unknown(bed *b) {
    return fsdp_set_requires_grad(b->units[0], NUM_PARAMS, 1);
}
static fsdp_status thaw_negative(bed *b) { return fsdp_set_requires_grad(b->units[0], -1, 0); }
static fsdp_status hook_unknown(bed *b) {
    return fsdp_set_post_accumulate_hook(b->units[0], NUM_PARAMS, NULL, NULL);
}
static fsdp_status hook_negative(bed *b) {
    return fsdp_set_post_accumulate_hook(b->units[0], -1, NULL, NULL);
}
static fsdp_status no_unit(bed *b) {
    const fsdp_status all[] = {fsdp_set_modules_to_forward_prefetch(NULL, b->units, 1),
                               fsdp_set_modules_to_backward_prefetch(NULL, b->units, 1),
                               fsdp_set_requires_grad(NULL, 0, 1),
                               fsdp_set_all_reduce_hook(NULL, NULL, NULL),
                               fsdp_set_post_accumulate_hook(NULL, 0, NULL, NULL),
                               fsdp_set_custom_all_gather(NULL, NULL, NULL),
                               fsdp_set_custom_reduce_scatter(NULL, NULL, NULL),
                               fsdp_set_custom_all_reduce(NULL, NULL, NULL),
                               fsdp_grad_norm(NULL, NULL),
                               fsdp_grad_norm(b->model, NULL),
                               fsdp_clip_grad_norm(NULL, 1, NULL)};
    for (size_t k = 0; k < sizeof all / sizeof *all; k++)
        CHECK_STATUS(all[k], FSDP_ERR_INVALID_ARG);
    return FSDP_OK;
}
static fsdp_status clip_by(bed *b, double max_norm, double norm_type) {
    fsdp_clip_desc d = FSDP_ZERO;
    d.max_norm = max_norm, d.norm_type = norm_type;
    return fsdp_clip_grads(b->model, &d, NULL);
}
static fsdp_status clip_negative(bed *b) { return clip_by(b, -1, 0); }
static fsdp_status clip_zero(bed *b) { return clip_by(b, 0, 0); }
static fsdp_status clip_nan(bed *b) { return clip_by(b, LAB_NAN, 0); }
static fsdp_status clip_short(bed *b) { return fsdp_clip_grad_norm(b->model, -LAB_INF, NULL); }
static fsdp_status clip_norm(bed *b) { return clip_by(b, 1, -2); }
static fsdp_status clip_norm_nan(bed *b) { return clip_by(b, 1, LAB_NAN); }
static fsdp_status clip_norm_less(bed *b) { return clip_by(b, 1, -LAB_INF); }
static fsdp_status clip_no_desc(bed *b) { return fsdp_clip_grads(b->model, NULL, NULL); }

static fsdp_status set_replicated(bed *b) { /* one shard: nothing is kept or freed */
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info ddp;
    fsdp_mesh *line = NULL;
    fsdp_model *m = NULL;
    const fsdp_param_desc p = fsdp_vec("b", 3);
    CHECK_OK(fsdp_mesh_1d(b->s.world, "a", &line));
    CHECK_OK(fsdp_mesh_info_init(line, FSDP_MESH_INFO_DDP, -1, 0, &ddp));
    md.mesh_info = &ddp;
    CHECK_OK(fsdp_model_create(b->s.world, &md, &m));
    CHECK_OK(add_to(b, m, &plain_unit, &p, 1));
    return fsdp_set_reshard_after_forward(m, b->added, FSDP_RESHARD_ALWAYS);
}
static fsdp_status flatten_to_taken(bed *b) {
    fsdp_mesh *line = NULL, *flat = NULL;
    CHECK_OK(fsdp_mesh_1d(b->s.world, "a", &line));
    CHECK_OK(fsdp_mesh_flatten(line, "a", &flat));
    CHECK_EQ_INT(fsdp_mesh_size(flat, 0), 4);
    return FSDP_OK;
}

enum { ARG = FSDP_ERR_INVALID_ARG, STATE = FSDP_ERR_INVALID_STATE };
static const struct {
    const char *name, *upstream; /* the condition; what PyTorch raises or does */
    fsdp_status (*call)(bed *);
    int expected;     /* status */
    const char *word; /* in the text */
} refusals[] = {
    {"mesh_info_not_filled", "TypeError", info_empty, ARG, "its mesh_info has no mesh"},
    {"mesh_dim_unknown", "IndexError", mesh_queries, FSDP_OK, ""},
    {"mixed_original_dtypes", "AssertionError", mixed_dtypes, ARG, "two units"},
    {"unit_after_first_step", "(nothing)", unit_late, STATE, "before the first"},
    {"reshard_no_factor", "ValueError", reshard_3, ARG, "divisor"},
    {"reshard_more_than_ranks", "ValueError", reshard_8, ARG, "divisor"},
    {"reshard_negative", "ValueError", reshard_less, ARG, "_NEVER"},
    {"reshard_no_factor_model", "ValueError", reshard_model, ARG, "divisor"},
    {"reshard_negative_model", "ValueError", reshard_model_less, ARG, "n >= 2"},
    {"reduce_dtype_integer", "RuntimeError in backward", unit_reduce_int, ARG, "floating"},
    {"output_dtype_integer", "RuntimeError in backward", unit_output_int, ARG, "floating"},
    {"extension_without_post", "AssertionError", ext_no_post, ARG, "post_all_gather"},
    {"extension_without_pre", "AssertionError", ext_no_pre, ARG, "pre_all_gather"},
    {"extension_without_sizes", "(no such function)", ext_no_sizes, ARG, "sizes"},
    {"extension_without_tensors", "IndexError", ext_none, ARG,
     "parameter 'w': its extension returned 0"},
    {"extension_fewer_tensors", "IndexError", ext_less, ARG, "1..4"},
    {"extension_five_tensors", "(nothing)", ext_five, ARG, "1..4"},
    {"extension_negative_size", "(no such function)", ext_negative, ARG, "of sizes >= 0"},
    {"set_reshard_int", "ValueError", set_reshard_int, ARG, "FSDP_RESHARD_ALWAYS"},
    {"prefetch_no_unit", "ValueError", prefetch_null, ARG, "not a unit of"},
    {"prefetch_no_unit_backward", "ValueError", prefetch_null_back, ARG, "not a unit of"},
    {"prefetch_another_model", "(nothing)", prefetch_foreign, ARG, "of this model"},
    {"prefetch_another_model_backward", "(nothing)", prefetch_foreign_back, ARG, "of this model"},
    {"prefetch_negative_count", "TypeError", prefetch_count, ARG, "count"},
    {"prefetch_negative_count_backward", "TypeError", prefetch_count_back, ARG, "count"},
    {"prefetch_no_list", "TypeError", prefetch_no_list, ARG, "not a unit of"},
    {"divide_factor_negative", "(nothing)", factor_negative, ARG, "factor"},
    {"divide_factor_nan", "(nothing)", factor_nan, ARG, "factor"},
    {"thaw_integer", "RuntimeError", thaw_integers, ARG, "floating"},
    {"thaw_unknown", "(nothing)", thaw_unknown, ARG, "expected 0..3"},
    {"thaw_negative", "(nothing)", thaw_negative, ARG, "expected 0..3"},
    {"hook_of_unknown", "(nothing)", hook_unknown, ARG, "parameter 4"},
    {"hook_of_negative", "(nothing)", hook_negative, ARG, "parameter -1"},
    {"clip_to_a_negative_norm", "(nothing)", clip_negative, ARG, "max_norm"},
    {"clip_to_zero", "(nothing)", clip_zero, ARG, "max_norm"},
    {"clip_to_nan", "(nothing)", clip_nan, ARG, "max_norm"},
    {"clip_to_minus_infinity", "(nothing)", clip_short, ARG, "max_norm"},
    {"clip_negative_norm_type", "(p of any sign)", clip_norm, ARG, "norm_type"},
    {"clip_norm_type_nan", "(nothing)", clip_norm_nan, ARG, "norm_type"},
    {"clip_norm_type_minus_infinity", "(a norm)", clip_norm_less, ARG, "norm_type"},
    {"clip_without_desc", "TypeError", clip_no_desc, ARG, "desc is NULL"},
    {"no_unit", "(no such call)", no_unit, FSDP_OK, ""},
    {"works_four_tensors", "(works)", ext_four, FSDP_OK, ""},
    {"works_set_reshard_replicated", "AssertionError", set_replicated, FSDP_OK, ""},
    {"works_flatten_to_a_taken_name", "ValueError", flatten_to_taken, FSDP_OK, ""},
};

/* Writes what can be seen of the model: addresses and values, memory, counters, states, its description. */
static void picture(const bed *b, char *text, size_t size) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_counters c = FSDP_ZERO;
    fsdp_memory m = FSDP_ZERO;
    uint64_t hash = 1469598103934665603u;
    while (fsdp_next_param(b->model, &v)) {
        lab_fold(&hash, v.shard, (size_t)v.numel * fsdp_dtype_size(v.dtype));
        lab_fold(&hash, &v, sizeof v);
    }
    CHECK_OK(fsdp_model_memory(b->model, &m));
    CHECK_OK(fsdp_model_counters(b->model, &c));
    lab_fold(&hash, &m, sizeof m);
    lab_fold(&hash, &c, sizeof c);
    size_t used = (size_t)snprintf(text, size, "%llx ", (unsigned long long)hash);
    for (int u = 0; u < b->num_units; u++)
        used += (size_t)snprintf(text + used, size - used, "%d %d ",
                                 (int)fsdp_unit_state(b->units[u]),
                                 (int)fsdp_unit_storage(b->units[u]));
    CHECK(fsdp_model_describe(b->model, text + used, size - used) < size - used);
}
static void train_step(bed *b) {
    for (int u = 0; u < b->num_units; u++) {
        CHECK_OK(fsdp_pre_forward(b->units[u]));
        CHECK_OK(fsdp_post_forward(b->units[u]));
    }
    for (int u = b->num_units - 1; u >= 0; u--) {
        CHECK_OK(fsdp_pre_backward(b->units[u]));
        CHECK(fsdp_grad(b->units[u], WEIGHT));
        CHECK_OK(fsdp_post_backward(b->units[u]));
    }
    CHECK_OK(fsdp_finalize_backward(b->model));
}

TEST_P(table, refused, refusals) {
    char before[4096], after[4096];
    bed b;
    bed_open(&b, &settings[1], 2);
    train_step(&b);
    picture(&b, before, sizeof before);
    const fsdp_status got = row->call(&b);
    CHECK_MSG((int)got == row->expected, "%s: %s", fsdp_status_name(got),
              fsdp_last_error(b.s.world));
    if (got)
        CHECK_MSG(strstr(fsdp_last_error(b.s.world), row->word), "%s", fsdp_last_error(b.s.world));
    picture(&b, after, sizeof after);
    CHECK_EQ_STR(after, before);
    train_step(
        &b); /* finalize does not return it again: only a call at a wrong time stops a step */
    bed_close(&b);
}
