/* test_golden_events.c - replays PyTorch's hook calls, recorded with the effects of FSDP2 in
   tests/golden/events_*.txt. After each call the list of the library's effects is compared with the
   `emit` lines, line by line. Every case is run. The rest of a case that the library cannot express
   is skipped with a message that says why.

   One process plays rank 0 of any world on the test device of sim.h. Ops and unit states become
   lines in upstream's vocabulary (`got`). Upstream's lines (`want`) are compared as they are,
   except for the rules below. Each rule is an intended difference, and is counted when it is used.
   A difference on either side that no rule covers fails.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "golden.h"
#include <math.h> /* fabs */
#include "lab.h"
#include "sim.h"

/* ---- the rules ------------------------------------------------------------------------------- */

/* docs/parity.md says what each one means, and why ("Sequences of events"). */
#define RULES(X)                                                                                   \
    X(ROOT), X(NO_UNIT), X(NO_SETTER), X(SUM), X(DIVIDE_ONCE), X(ALIGNED), X(STATIC),              \
        X(LEFTOVERS), X(UNREACHED), X(ONE_SHARD_SUMS), X(FUSED), X(FINALIZE), X(ONE_SHARD),        \
        X(BYTES), X(EMPTY), X(DROP), X(KEPT), X(SLICE), X(EVALUATION), X(AGAIN), X(ZERO_GRAD)
#define X(name) RULE_##name
enum { RULES(X), NUM_RULES };
#undef X
#define X(name) #name
static const char *const rule_names[NUM_RULES] = {RULES(X)};
#undef X

/* ---- a case ---------------------------------------------------------------------------------- */

enum { TEXT = 96, MICROBATCHES = 64 };
enum { BEGUN = 1, DONE = 2 };                    /* progress of a unit's backward */
enum { SCATTER = 1, REPLICAS = 2, PARTIAL = 4 }; /* the lines of a reduction */

typedef struct {
    fsdp_dtype dtype;
    int trains, shard_dim, ndim;
    int64_t shape[FSDP_MAX_DIMS], numel, shard_numel; /* shard_numel: with padding */
    /* State that follows from the calls: a full gradient waits for its reduction; it is in sums
       that wait for the all-reduce; there is a shard gradient. Upstream's state, then ours. */
    int pending, partial, sharded;
    int our_pending, our_partial, our_sharded;
} param;

typedef struct {               /* factors of a module's gradients, by microbatch */
    int num, scattered, fresh; /* fresh: a gradient was written since post_backward */
    double theirs[MICROBATCHES], ours[MICROBATCHES];
} factors;

typedef struct {
    int parent, num; /* num: without ignored ones; 0: no unit */
    char raf[24];
    fsdp_dtype param_dtype, reduce_dtype;
    param *params;
    fsdp_unit *unit;
    int sync, all_reduce, reduce_unused; /* as set by the calls */
    double divide;                       /* 0: not set */
    /* Upstream: */
    int gathered;               /* it has been unsharded */
    int lost;                   /* upstream still has a slice */
    int empty;                  /* it has no elements */
    int kept;                   /* upstream has a gather under way that we have dropped */
    int last[2];                /* entry of its latest forward: theirs, ours */
    int left;                   /* upstream's lines that this call's reduction must still have */
    int64_t collected, reduced; /* elements of a rank that they reduce, that we reduce */
    int todo;                   /* our lines that this call's reduction must still have, as bits */
    int held;                   /* full gradients wait, or zeros for other ranks */
    int survived;               /* a gradient waits here that upstream's zero_grad dropped */
    int sums, sums_before;      /* we hold sums that wait for the all-reduce: now, before */
    int listed;                 /* it has a prefetch list for backward */
    int reached;                /* by this backward: BEGUN, DONE */
    double pre, post;           /* factors of the line `divide` */
    char gather[TEXT];          /* the latest all-gather over the whole group */
    /* Seen here: */
    char base;         /* S, P or U, in upstream's words */
    int flight, waits; /* a gather is under way; its WAIT op was seen */
    int issuing;       /* ops of the gather are being issued; the state follows them */
    char state;        /* training state of the latest copy-in */
    int open;          /* a reduction that has not ended in this call */
    double scale[2];   /* scales of this call's copies into the sum, and out of it; 0: none yet */
    char sum[TEXT];    /* dtype and elements of its partial sum */
    factors f;
} unit;

typedef struct {
    char (*text)[TEXT];
    int num, cap;
} list;

typedef struct { /* one `emit` line */
    char what[24], dtype[8], op[8], state;
    int unit, group;
    int64_t in, out;
    double a, b;
} emit;

typedef struct { /* the way a case is run */
    const char *name;
    int async, fused;
    int64_t direct_min;
} variant;

typedef struct { /* forwards in order: the unit, and the entry of its previous forward */
    int (*entry)[2];
    int num, cap, target; /* target: prefetched by the latest pre_backward; -1: none */
} record;

typedef struct {
    const variant *v;
    golden *g;
    sim s;
    fsdp_model *model;
    int R, W, num_units, num_made, built, last; /* last: is_last_backward */
    unit *units;
    int *order; /* units in the order of their creation */
    char call[64];
    int turn; /* index of the next unit in finalize, and in lines of gradients */
    int call_unit, num_emits, cap_emits, line;
    emit *emits;
    int training;       /* the current forward is recorded here, too */
    int again;          /* a pre_backward of a unit whose backward is open */
    record forwards[2]; /* theirs, ours */
    list want, got;
    const char *skip; /* the reason why the rest of the case cannot be replayed */
} replay;

static struct { /* totals over all cases */
    int64_t cases, skipped, calls, emits, status, ops[FSDP_OP_COUNT], reductions, rules[NUM_RULES];
} seen;

static __attribute__((noreturn, format(printf, 2, 3))) void broken(replay *r, const char *format,
                                                                   ...) {
    char text[1400], lists[1200] = "";
    size_t used = 0;
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    for (int side = 0; side < 2; side++) {
        const list *l = side ? &r->got : &r->want;
        used += (size_t)snprintf(lists + used, sizeof lists - used,
                                 "\n  %s:", side ? "got" : "want");
        for (int i = 0; i < l->num && used + TEXT + 16 < sizeof lists; i++)
            used += (size_t)snprintf(lists + used, sizeof lists - used, " [%s]", l->text[i]);
    }
    h_fail(H_HERE("replay"), "case %s (%s), line %d: call %s %d: %s%s", r->g->name, r->v->name,
           r->line, r->call, r->call_unit, text, lists);
}

#define NEED(r, cond, ...)                                                                         \
    do {                                                                                           \
        if (!(cond)) broken(r, __VA_ARGS__);                                                       \
    } while (0)
#define DO(r, call) NEED(r, (call) == FSDP_OK, "%s: %s", #call, fsdp_last_error((r)->s.world))

static void rule(int which) { seen.rules[which]++; }

static __attribute__((format(printf, 2, 3))) void put(list *l, const char *format, ...) {
    va_list args;
    if (l->num == l->cap) {
        l->cap = l->cap ? 2 * l->cap : 32;
        l->text = (char(*)[TEXT])realloc(l->text, (size_t)l->cap * sizeof *l->text);
        CHECK(l->text != NULL);
    }
    va_start(args, format);
    vsnprintf(l->text[l->num++], TEXT, format, args);
    va_end(args);
}

static void cut(list *l, int at, int count) {
    memmove(l->text + at, l->text + at + count, (size_t)(l->num - at - count) * sizeof *l->text);
    l->num -= count;
}

/* Returns the index of the line "`what` `unit_index` ...", or -1. */
static int find(const list *l, const char *what, int unit_index) {
    char start[TEXT];
    int length = snprintf(start, sizeof start, "%s %d ", what, unit_index);
    for (int i = 0; i < l->num; i++) {
        char line[TEXT + 1];
        snprintf(line, sizeof line, "%s ", l->text[i]);
        if (!strncmp(line, start, (size_t)length)) return i;
    }
    return -1;
}

static int is_below(const replay *r, int at, int top) {
    while (at >= 0 && at != top) at = r->units[at].parent;
    return at == top;
}

/* ---- the library's effects in upstream's words ----------------------------------------------- */

static int number_of(const replay *r, const fsdp_unit *u) {
    for (int i = 0; i < r->num_units; i++)
        if (u && r->units[i].unit == u) return i;
    return -1;
}

/* Adds the lines of a unit's storage change since the last look. While a gather is under way,
   upstream's state is the one before it. */
static void look_at(replay *r, int i) {
    unit *u = &r->units[i];
    fsdp_storage_state now = fsdp_unit_storage(u->unit);
    int open = now == FSDP_STORAGE_IN_FLIGHT || now == FSDP_STORAGE_UNSHARDED;
    if (u->issuing && !open) return;
    u->issuing = 0;
    if (open && !u->flight && u->base != 'U') { /* no collective has shown it */
        put(&r->got, "unshard %d %c", i, u->state ? u->state : '?');
        u->flight = 1;
    }
    if (now == FSDP_STORAGE_UNSHARDED && u->flight) {
        NEED(r, u->waits, "unit %d is unsharded, but no record says that it was waited for", i);
        put(&r->got, "wait %d", i);
        u->base = 'U';
    }
    if (!open) {
        char to = now == FSDP_STORAGE_SHARDED ? 'S' : 'P';
        if (to != u->base) put(&r->got, "reshard %d %c", i, to);
        if (u->flight) put(&r->got, "drop %d", i);
        u->base = to;
    }
    if (now != FSDP_STORAGE_IN_FLIGHT) u->flight = u->waits = u->state = 0;
}

/* Looks first at the units with a WAIT: their state changed before that of other units. */
static void look(replay *r) {
    for (int waits = 1; waits >= 0; waits--)
        for (int k = 0; k < r->num_units; k++) {
            const unit *u = &r->units[r->order[k]];
            if (u->unit && u->waits == waits) look_at(r, r->order[k]);
        }
}

/* Adds a partial sum for each unit that was reduced over the shards, but not over the replicas. */
static void close_partials(replay *r, int except) {
    for (int k = 0; k < r->num_units; k++) {
        unit *u = &r->units[r->order[k]];
        if (!u->open || r->order[k] == except) continue;
        if (r->R > 1) put(&r->got, "partial %d %s", r->order[k], u->sum);
        u->open = 0;
    }
}

static void multiply(double *a, int from, int to, double by) {
    for (int i = from; i < to; i++) a[i] *= by;
}

/* Multiplies the factors with an op's scale. The copies into a sum or out of it are one op per
   pair of dtypes, all with the same scale, which counts once. */
static void scaled(replay *r, unit *u, int side, const fsdp_op *op, int from) {
    NEED(r, u->scale[side] == 0 || u->scale[side] == op->scale, "%s with %g, and with %g",
         fsdp_label_name(op->label), u->scale[side], op->scale);
    if (u->scale[side] == 0) multiply(u->f.ours, from, u->f.num, op->scale);
    u->scale[side] = op->scale;
}

/* Checks a copy: copies have no lines, only their scales count. Returns 0 if the op is
   unexpected. */
static int saw_copy(replay *r, int i, const fsdp_op *op) {
    unit *u = &r->units[i];
    factors *f = &u->f;
    switch (op->label) {
    case FSDP_LABEL_COPY_IN:
        u->state = "IFBR"[op->state];
        u->issuing = 1;
        return op->scale == 1;
    case FSDP_LABEL_COPY_OUT:
    case FSDP_LABEL_SLICE: return op->scale == 1;
    case FSDP_LABEL_ACC: /* accumulating: only the newest microbatch is copied */
        scaled(r, u, 0, op, op->accumulate ? f->num - 1 : r->W > 1 ? f->scattered : 0);
        return 1;
    case FSDP_LABEL_PARTIAL:
        u->open = 1;
        snprintf(u->sum, sizeof u->sum, "%s %lld", fsdp_dtype_name(op->out_dtype),
                 (long long)op->count);
        return op->scale == 1;
    case FSDP_LABEL_RED_OUT:
        scaled(r, u, 1, op, 0);
        u->open = 0;
        return 1;
    default: return 0;
    }
}

/* Adds the lines of a collective. Returns 0 if the op is unexpected. */
static int saw_collective(replay *r, int i, const fsdp_op *op) {
    unit *u = &r->units[i];
    long long count = (long long)op->count, all = count * op->group_size;
    const char *dtype = fsdp_dtype_name(op->dtype);
    if (op->kind == FSDP_OP_ALL_GATHER && op->label == FSDP_LABEL_GATHER) {
        NEED(r, !u->flight, "unit %d is gathered twice", i);
        put(&r->got, "unshard %d %c", i, "IFBR"[op->state]);
        put(&r->got, "all_gather %d %s %lld %lld %d", i, dtype, count, all, op->group_size);
        u->flight = u->issuing = 1;
        return 1;
    }
    if (op->kind == FSDP_OP_REDUCE_SCATTER && op->label == FSDP_LABEL_REDUCE) {
        NEED(r, op->dtype == op->out_dtype || r->v->fused, "not fused, but of two dtypes");
        put(&r->got, "reduce_scatter %d %s %lld %lld %d", i, dtype, all, count, op->group_size);
        snprintf(u->sum, sizeof u->sum, "%s %lld", fsdp_dtype_name(op->out_dtype), count);
        multiply(u->f.ours, u->f.scattered, u->f.num, op->scale);
        u->open = 1;
        return 1;
    }
    if (op->kind == FSDP_OP_ALL_REDUCE && op->label == FSDP_LABEL_REPLICAS) {
        NEED(r, op->redop == FSDP_SUM, "an all-reduce that is no sum");
        put(&r->got, "all_reduce %d %s %lld %d", i, dtype, count, op->group_size);
        multiply(u->f.ours, 0, u->f.num, op->scale);
        u->open = 0;
        return 1;
    }
    return 0;
}

static void saw(void *user, const fsdp_op *op) {
    replay *r = (replay *)user;
    int i = number_of(r, op->unit), known = 1;
    seen.ops[op->kind]++;
    close_partials(r, i);
    look(r);
    switch (op->kind) {
    case FSDP_OP_HOOK: return;
    case FSDP_OP_ZERO:
        known = op->label == FSDP_LABEL_GRADS || op->label == FSDP_LABEL_ACC ||
                op->label == FSDP_LABEL_FINAL;
        break;
    case FSDP_OP_WAIT:
        known = op->label == FSDP_LABEL_GATHER || op->label == FSDP_LABEL_GRADS ||
                op->label == FSDP_LABEL_FINAL;
        if (i >= 0 && op->label == FSDP_LABEL_GATHER) r->units[i].waits = 1;
        break;
    case FSDP_OP_COPY: known = i >= 0 && saw_copy(r, i, op); break;
    default: known = i >= 0 && saw_collective(r, i, op);
    }
    NEED(r, known && r->call[0], "unexplained op: %s %s of %s, %s, count %lld, scale %g",
         fsdp_op_name(op->kind), fsdp_label_name(op->label), op->what, fsdp_dtype_name(op->dtype),
         (long long)op->count, op->scale);
}

/* ---- the model ------------------------------------------------------------------------------- */

static fsdp_dtype dtype_of(golden *g, const char *word) {
    if (!strcmp(word, "-")) return FSDP_DTYPE_KEEP;
    for (fsdp_dtype d = 1; d < FSDP_DTYPE_COUNT; d++)
        if (!strcmp(word, fsdp_dtype_name(d))) return d;
    golden_fail(g, "'%s' is no dtype", word);
    return FSDP_DTYPE_KEEP;
}

static unit *unit_at(replay *r, int64_t i) {
    if (i < 0 || i >= r->num_units) golden_fail(r->g, "there is no unit %lld", (long long)i);
    return i < 0 || i >= r->num_units ? NULL : &r->units[i];
}

/* `world R W NUNITS XGRAD` */
static void read_world(replay *r) {
    r->R = (int)golden_int(r->g), r->W = (int)golden_int(r->g);
    r->num_units = (int)golden_int(r->g);
    r->units = (unit *)lab_zeros((size_t)r->num_units + 1, sizeof *r->units);
    r->order = (int *)lab_zeros((size_t)r->num_units + 1, sizeof *r->order);
}

/* `unit U PARENT NPARAMS RAF PARAM_DTYPE REDUCE_DTYPE` */
static void read_unit(replay *r) {
    unit *u = unit_at(r, golden_int(r->g));
    if (!u) return;
    u->parent = (int)golden_int(r->g);
    int64_t count = golden_int(r->g);
    snprintf(u->raf, sizeof u->raf, "%s", golden_word(r->g));
    u->param_dtype = dtype_of(r->g, golden_word(r->g));
    u->reduce_dtype = dtype_of(r->g, golden_word(r->g));
    u->params = (param *)lab_zeros((size_t)(count > 0 ? count : 1), sizeof *u->params);
    u->sync = u->all_reduce = 1;
    u->pre = u->post = 1;
    u->base = 'S';
    u->last[0] = u->last[1] = -1;
}

/* `param U P DTYPE REQUIRES_GRAD USED IGNORED SHARDDIM ND shape[ND]` */
static void read_param(replay *r) {
    unit *u = unit_at(r, golden_int(r->g));
    if (!u || !u->params) return;
    (void)golden_int(r->g);
    param *p = &u->params[u->num];
    p->dtype = dtype_of(r->g, golden_word(r->g));
    p->trains = (int)golden_int(r->g);
    (void)golden_int(r->g);
    int ignored = (int)golden_int(r->g);
    p->shard_dim = (int)golden_int(r->g);
    p->ndim = (int)golden_int(r->g);
    CHECK(p->ndim >= 1 && p->ndim <= FSDP_MAX_DIMS);
    golden_ints(r->g, p->ndim, p->shape);
    p->numel = p->shard_numel = 1;
    for (int d = 0; d < p->ndim; d++) {
        int64_t rows = p->shape[d];
        p->numel *= rows;
        p->shard_numel *= d == p->shard_dim ? (rows + r->W - 1) / r->W : rows;
    }
    if (ignored) memset(p, 0, sizeof *p); /* an ignored parameter is not the unit's */
    else u->num++;
}

static int raf_of(const replay *r, int i) {
    const char *raf = r->units[i].raf;
    char *end;
    long n = strtol(raf, &end, 10);
    if (!strcmp(raf, "none") && i == 0) rule(RULE_ROOT);
    if (!strcmp(raf, "none")) return i == 0 ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
    if (!strcmp(raf, "true")) return FSDP_RESHARD_ALWAYS;
    if (!strcmp(raf, "false")) return FSDP_RESHARD_NEVER;
    CHECK_MSG(*raf && !*end, "reshard_after_forward '%s'", raf);
    if (n == 1) return FSDP_RESHARD_NEVER; /* upstream treats 1 as false, and W as true */
    return n == r->W ? FSDP_RESHARD_ALWAYS : (int)n;
}

static void make_unit(replay *r, int i) {
    unit *u = &r->units[i];
    char name[24];
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_param_desc *p = (fsdp_param_desc *)lab_zeros((size_t)u->num + 1, sizeof *p);
    for (int k = 0; k < u->num; k++) {
        p[k].dtype = u->params[k].dtype;
        p[k].frozen = !u->params[k].trains;
        p[k].shard_dim = u->params[k].shard_dim;
        p[k].ndim = u->params[k].ndim;
        memcpy(p[k].shape, u->params[k].shape, sizeof p[k].shape);
    }
    snprintf(name, sizeof name, "u%d", i);
    ud.name = name;
    ud.params = p;
    ud.num_params = u->num;
    ud.param_dtype = u->param_dtype;
    ud.reduce_dtype = u->reduce_dtype;
    ud.reshard_after_forward = raf_of(r, i);
    if (u->num > 0) DO(r, fsdp_fully_shard(r->model, &ud, &u->unit));
    else rule(RULE_NO_UNIT);
    free(p);
}

/* Makes the units in upstream's order of finalize: a module before the modules inside it. Here
   finalize uses the order of creation. */
static void make_units(replay *r, int top) {
    r->order[r->num_made++] = top;
    make_unit(r, top);
    for (int i = 0; i < r->num_units; i++)
        if (r->units[i].parent == top) make_units(r, i);
}

static void build(replay *r) {
    static const char *const names[] = {"rep", "shard"};
    fsdp_mesh *mesh;
    fsdp_mesh_desc me = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    r->built = r->last = 1;
    sim_init(&r->s, r->R * r->W, 0);
    r->s.async = r->v->async;
    r->s.fused = r->v->fused;
    CHECK(sim_open(&r->s));
    me.ndim = r->R > 1 ? 2 : 1;
    me.shape[0] = r->R > 1 ? r->R : r->W;
    me.shape[1] = r->W;
    for (int d = 0; d < me.ndim; d++) me.names[d] = names[d + 2 - me.ndim];
    DO(r, fsdp_mesh_create(r->s.world, &me, &mesh));
    md.mesh = mesh;
    md.implicit_prefetch = r->v->async ? FSDP_PREFETCH_DEFAULT : FSDP_PREFETCH_ALWAYS;
    md.direct_min = r->v->direct_min;
    DO(r, fsdp_model_create(r->s.world, &md, &r->model));
    for (int i = 0; i < r->num_units; i++)
        if (r->units[i].parent < 0) make_units(r, i);
    NEED(r, r->num_made == r->num_units, "the units are no tree");
    if (fsdp_num_units(r->model) == 0) return;
    DO(r, fsdp_model_commit(r->model));
    DO(r, fsdp_set_reduce_scatter_unused_params(r->model, NULL, 0)); /* upstream's default */
    DO(r, sim_watch(&r->s, r->model));
    r->s.on_op = saw;
    r->s.on_op_user = r;
}

/* ---- calls ----------------------------------------------------------------------------------- */

/* Counts a microbatch whose gradients will be reduced. Its gradients may be zeros that
   reduce_scatter_unused_params adds. */
static void count_microbatch(replay *r, unit *u) {
    factors *f = &u->f;
    int zeros = f->num == 0 && u->reduce_unused && u->reached == BEGUN;
    if (!f->fresh && !zeros) return;
    NEED(r, f->num < MICROBATCHES, "too many microbatches");
    f->fresh = 0;
    f->theirs[f->num] = f->ours[f->num] = 1;
    f->num++;
}

static void record_forward(replay *r, unit *u, int side) {
    record *f = &r->forwards[side];
    if (f->num == f->cap) {
        f->cap = f->cap ? 2 * f->cap : 64;
        f->entry = (int(*)[2])realloc(f->entry, (size_t)f->cap * sizeof *f->entry);
        CHECK(f->entry != NULL);
    }
    f->entry[f->num][0] = (int)(u - r->units);
    f->entry[f->num][1] = u->last[side];
    u->last[side] = f->num++;
}

/* Notes the prefetch target of a pre_backward: the unit whose forward came before this unit's
   latest forward that has not run backward. */
static void implicit_target(replay *r, unit *u, int side) {
    record *f = &r->forwards[side];
    int at = u->last[side];
    if (at < 0 || u->reached == BEGUN || (side == 0 && u->listed)) return;
    u->last[side] = f->entry[at][1];
    if (at > 0 && !u->listed) f->target = f->entry[at - 1][0];
}

static void do_hook(replay *r, unit *u) {
    if (!strcmp(r->call, "pre_forward")) DO(r, fsdp_pre_forward(u->unit));
    else if (!strcmp(r->call, "post_forward")) {
        DO(r, fsdp_post_forward(u->unit));
        for (int side = 0; side < 1 + r->training; side++) record_forward(r, u, side);
    } else if (!strcmp(r->call, "pre_backward")) {
        DO(r, fsdp_pre_backward(u->unit));
        for (int side = 0; side < 2; side++) implicit_target(r, u, side);
        r->again = u->reached == BEGUN;
        for (int k = 0; k < u->num; k++)
            u->params[k].our_pending |= u->reduce_unused && u->params[k].trains && !r->again;
        u->reached = BEGUN;
    } else if (!strcmp(r->call, "reshard")) DO(r, fsdp_reshard(u->unit));
    else if (!strcmp(r->call, "wait_handle")) DO(r, fsdp_wait(u->unit));
    else if (!strcmp(r->call, "post_backward")) {
        count_microbatch(r, u);
        DO(r, fsdp_post_backward(u->unit));
        u->reached = DONE;
    } else broken(r, "an unknown call");
}

static void do_unshard(replay *r, unit *u) {
    int64_t async = golden_int(r->g);
    if (!u->unit) return;
    DO(r, fsdp_unshard(u->unit));
    if (!async) DO(r, fsdp_wait(u->unit));
}

/* Writes or adds a gradient into parameter P, as autograd did. */
static void do_grad(replay *r, unit *u) {
    int64_t p = golden_int(r->g);
    if (p < 0 || p >= u->num) golden_fail(r->g, "there is no parameter %lld", (long long)p);
    if (r->g->error[0]) return;
    NEED(r, fsdp_grad(u->unit, (int)p) != NULL, "fsdp_grad: %s", fsdp_last_error(r->s.world));
    u->params[p].pending = u->params[p].our_pending = 1;
    u->f.fresh = 1;
}

static void do_zero_grad(replay *r) {
    for (int i = 0; i < r->num_units; i++) {
        unit *u = &r->units[i];
        for (int k = 0; k < u->num; k++) {
            param *p = &u->params[k];
            if (u->base == 'U' && (p->pending || p->sharded)) rule(RULE_ZERO_GRAD);
            if (u->base == 'U') u->survived |= p->pending, p->pending = 0;
            else p->sharded = 0;
            p->our_sharded = 0;
        }
    }
    if (fsdp_num_units(r->model)) DO(r, fsdp_zero_grad(r->model));
}

static void do_prefetch(replay *r, unit *u, int forward) {
    int64_t count = golden_int(r->g), num = 0;
    fsdp_unit **targets = (fsdp_unit **)lab_zeros((size_t)(count > 0 ? count : 1), sizeof *targets);
    for (int64_t i = 0; i < count; i++) {
        unit *t = unit_at(r, golden_int(r->g));
        if (t && t->unit) targets[num++] = t->unit;
    }
    if (!u->unit && num > 0) r->skip = "a module without parameters that prefetches others";
    if (u->unit && num == 0 && count > 0 && !forward) /* upstream prefetches nothing then */
        r->skip = "a prefetch list of nothing but modules without parameters";
    if (u->unit && forward) DO(r, fsdp_set_modules_to_forward_prefetch(u->unit, targets, (int)num));
    if (u->unit && !forward)
        DO(r, fsdp_set_modules_to_backward_prefetch(u->unit, targets, (int)num));
    if (!forward) u->listed = num > 0;
    free(targets);
}

/* Sets METHOD of one unit. Returns 0 if there is no such setter. */
static int set_one(replay *r, unit *u, double value) {
    const int on = (int)value;
    if (!strcmp(r->call, "set_gradient_divide_factor")) {
        u->divide = value;
        if (u->unit) DO(r, fsdp_set_gradient_divide_factor(r->model, u->unit, value));
        return 1;
    }
    for (int k = 0; k < LAB_SETTERS; k++) {
        if (strcmp(r->call, lab_setters[k].name) != 0) continue;
        if (k == LAB_SYNC) u->sync = on;
        if (k == LAB_SYNC || k == LAB_ALL_REDUCE) u->all_reduce = on;
        if (k == LAB_UNUSED) u->reduce_unused = on;
        const int raf = on ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER;
        if (u->unit) DO(r, lab_setters[k].set(r->model, u->unit, k == LAB_RAF ? raf : on));
        return 1;
    }
    return 0;
}

/* `METHOD U RECURSE VALUE` */
static void do_setter(replay *r) {
    int recurse = (int)golden_int(r->g);
    double value = golden_num(r->g);
    if (!strcmp(r->call, "set_is_last_backward")) { /* sets the whole tree, from any unit */
        r->last = (int)value;
        DO(r, fsdp_set_is_last_backward(r->model, r->last));
        return;
    }
    if (!strcmp(r->call, "set_force_sum_reduction_for_comms") ||
        !strcmp(r->call, "set_reduce_scatter_max_input_buffers")) {
        rule(RULE_NO_SETTER);
        return;
    }
    for (int i = 0; i < r->num_units; i++)
        if (i == r->call_unit || (recurse && is_below(r, i, r->call_unit)))
            NEED(r, set_one(r, &r->units[i], value), "an unknown call");
}

static void do_finalize(replay *r) {
    for (int i = 0; i < r->num_units; i++) count_microbatch(r, &r->units[i]);
    if (fsdp_num_units(r->model)) DO(r, fsdp_finalize_backward(r->model));
}

static void do_call(replay *r) {
    snprintf(r->call, sizeof r->call, "%s", golden_word(r->g));
    r->line = (int)r->g->next;
    r->call_unit = -1;
    r->num_emits = r->want.num = r->got.num = r->s.num_ops = 0;
    r->forwards[0].target = r->forwards[1].target = -1;
    r->again = 0;
    seen.calls++;
    for (int i = 0; i < r->num_units; i++) r->units[i].scale[0] = r->units[i].scale[1] = 0;
    if (!strcmp(r->call, "zero_grad")) do_zero_grad(r);
    else if (!strcmp(r->call, "finalize_backward")) do_finalize(r);
    else {
        unit *u = unit_at(r, golden_int(r->g));
        if (!u) return;
        r->call_unit = (int)(u - r->units);
        if (!strcmp(r->call, "set_modules_to_forward_prefetch")) do_prefetch(r, u, 1);
        else if (!strcmp(r->call, "set_modules_to_backward_prefetch")) do_prefetch(r, u, 0);
        else if (!strncmp(r->call, "set_", 4)) do_setter(r);
        else if (!strcmp(r->call, "unshard")) do_unshard(r, u);
        else if (!strcmp(r->call, "grad")) do_grad(r, u);
        else if (u->unit) do_hook(r, u);
    }
    close_partials(r, -1);
    look(r);
}

/* ---- upstream's effects ---------------------------------------------------------------------- */

static void read_emit(replay *r) {
    golden *g = r->g;
    if (r->num_emits == r->cap_emits) {
        r->cap_emits = r->cap_emits ? 2 * r->cap_emits : 32;
        r->emits = (emit *)realloc(r->emits, (size_t)r->cap_emits * sizeof *r->emits);
        CHECK(r->emits != NULL);
    }
    emit *e = &r->emits[r->num_emits++];
    memset(e, 0, sizeof *e);
    snprintf(e->what, sizeof e->what, "%s", golden_word(g));
    e->unit = (int)golden_int(g);
    if (!unit_at(r, e->unit)) return;
    if (!strcmp(e->what, "unshard") || !strcmp(e->what, "reshard")) e->state = *golden_word(g);
    if (!strcmp(e->what, "divide")) e->a = golden_num(g), e->b = golden_num(g);
    if (!strcmp(e->what, "partial") || strchr(e->what, '_')) {
        if (!strcmp(e->what, "post_backward")) return;
        snprintf(e->dtype, sizeof e->dtype, "%s", golden_word(g));
        e->in = golden_int(g);
        if (!strcmp(e->what, "partial")) return;
        e->out = golden_int(g);
        e->group = (int)golden_int(g);
        if (!strcmp(e->what, "all_gather")) return;
        snprintf(e->op, sizeof e->op, "%s", golden_word(g));
        if (!strcmp(e->op, "PREMUL")) e->a = golden_num(g);
    }
}

/* Computes upstream's post_backward of a unit: the gradients that it reduces, and its number of
   lines. */
static void their_reduction(replay *r, unit *u) {
    int final = r->R == 1 || u->all_reduce;
    u->collected = u->left = 0;
    for (int k = 0; k < u->num && u->sync; k++) {
        param *p = &u->params[k];
        int zeros = u->reduce_unused && u->gathered;
        if (!p->trains || (!p->pending && !p->partial && !zeros)) continue;
        u->left = (r->W > 1) + (r->R > 1);
        u->collected += p->shard_numel;
        p->pending = 0;
        p->partial = !final;
        p->sharded |= final;
    }
}

/* Returns the elements of a parameter's shard in our reductions. */
static int64_t stored_numel(const replay *r, const unit *u, const param *p) {
    const fsdp_dtype gathered = u->param_dtype ? u->param_dtype : p->dtype;
    const int64_t grain = (r->v->async ? 256 : 64) / (int64_t)fsdp_dtype_size(gathered);
    return r->W > 1 ? p->shard_numel : (p->shard_numel + grain - 1) / grain * grain;
}

/* Computes our post_backward of a unit: the elements that it reduces, and its ops. */
static void our_reduction(replay *r, unit *u) {
    int pending = 0, final = r->R == 1 || u->all_reduce;
    u->reduced = u->todo = 0;
    u->sums_before = u->sums;
    for (int k = 0; k < u->num; k++) {
        pending += u->params[k].our_pending;
        if (u->params[k].trains) u->reduced += stored_numel(r, u, &u->params[k]);
    }
    u->held = pending > 0;
    if (!u->sync || (!final && r->W == 1)) return;
    if (!u->held && !u->sums) return;
    if (r->W > 1 && (u->held || u->reached)) u->todo |= SCATTER | (final ? 0 : PARTIAL);
    if (r->R > 1 && final) u->todo |= REPLICAS;
    for (int k = 0; k < u->num; k++) {
        param *p = &u->params[k];
        int used = p->our_pending || p->our_partial;
        p->our_sharded |= used && final;
        p->our_partial = used && !final;
        p->our_pending = 0;
    }
    u->sums = !final;
    u->held = 0;
    if (u->left) u->survived = 0;
}

static void reduction_point(replay *r, int i) {
    their_reduction(r, &r->units[i]);
    our_reduction(r, &r->units[i]);
}

/* Takes a line of upstream's reduction. Returns 0 if a rule says that we have no such op. */
static int ours_too(replay *r, unit *u, int op) {
    NEED(r, u->left-- > 0, "a reduction that does not follow from the calls");
    int due = (u->todo & op) != 0;
    u->todo &= ~op;
    if (due) return 1;
    if (op == PARTIAL && r->W == 1) rule(RULE_ONE_SHARD_SUMS);
    else if (!u->reached && u->sums_before) rule(RULE_LEFTOVERS);
    else if (!u->reached && u->reduce_unused) rule(RULE_UNREACHED);
    else broken(r, "a reduction that should be done here too");
    return 0;
}

/* Checks at the end of a reduction that both multiply each microbatch by the same factor. */
static void compare_factors(replay *r, unit *u, int final) {
    factors *f = &u->f;
    for (int i = 0; i < f->num && final; i++)
        NEED(r, fabs(f->ours[i] - f->theirs[i]) <= 1e-12 * f->theirs[i],
             "gradients of microbatch %d of %d are multiplied with %.17g, not with %.17g", i + 1,
             f->num, f->ours[i], f->theirs[i]);
    f->scattered = final ? 0 : f->num;
    if (final) f->num = 0;
    u->pre = u->post = 1;
    seen.reductions++;
}

static double factor_of(const emit *e) {
    if (!strcmp(e->op, "PREMUL")) return e->a;
    return !strcmp(e->op, "AVG") ? 1.0 / e->group : 1.0;
}

/* Checks the elements of a reduction line against the calls. Returns our number of elements,
   which includes unused parameters. */
static int64_t reduced_numel(replay *r, unit *u, int64_t numel) {
    int64_t all = 0;
    for (int k = 0; k < u->num; k++) all += u->params[k].trains ? u->params[k].shard_numel : 0;
    NEED(r, numel == u->collected, "%lld elements, but the calls say %lld", (long long)numel,
         (long long)u->collected);
    if (all != u->reduced) rule(RULE_ALIGNED);
    if (all != u->collected) rule(RULE_STATIC);
    return u->reduced;
}

static int widens(fsdp_dtype to, fsdp_dtype from) {
    return to == FSDP_F32 && fsdp_dtype_size(from) == 2;
}

/* Returns the dtype of our reduction. A fused one reads gradients of one dtype as they were
   written, unless gradients of earlier microbatches were accumulated in the reduction's dtype. */
static const char *reduce_dtype(replay *r, unit *u, const char *dtype) {
    fsdp_dtype written = FSDP_DTYPE_KEEP, red = dtype_of(r->g, dtype);
    for (int k = 0; k < u->num; k++) {
        fsdp_dtype d = u->param_dtype ? u->param_dtype : u->params[k].dtype;
        if (!u->params[k].trains) continue;
        if (written && written != d) return dtype;
        written = d;
    }
    if (!r->v->fused || !widens(red, written) || u->f.num - u->f.scattered > 1) return dtype;
    rule(RULE_FUSED);
    return fsdp_dtype_name(written);
}

/* Adds the line of an all-gather: as recorded, in bytes, or over the whole group if the slice is
   lost. */
static void expect_gather(replay *r, const emit *e) {
    unit *u = &r->units[e->unit];
    list *l = &r->want;
    int mixed = 0;
    for (int k = 1; k < u->num; k++) mixed |= u->params[k].dtype != u->params[0].dtype;
    mixed = mixed && strcmp(e->dtype, "u8") != 0;
    NEED(r, e->out == e->in * e->group, "not an all-gather");
    if (mixed) rule(RULE_BYTES);
    int64_t size = mixed ? (int64_t)fsdp_dtype_size(dtype_of(r->g, e->dtype)) : 1;
    put(l, "all_gather %d %s %lld %lld %d", e->unit, mixed ? "u8" : e->dtype,
        (long long)(e->in * size), (long long)(e->out * size), e->group);
    char *text = l->text[l->num - 1];
    if (u->lost) memcpy(text, u->gather, TEXT);
    if (e->group == r->W) memcpy(u->gather, text, TEXT);
    u->lost = 0;
}

static void expect_scatter(replay *r, const emit *e) {
    unit *u = &r->units[e->unit];
    int64_t numel = reduced_numel(r, u, e->out);
    int last = r->R == 1;
    NEED(r, e->group == r->W && e->in == e->out * r->W, "not a reduce-scatter of this world");
    if (ours_too(r, u, SCATTER))
        put(&r->want, "reduce_scatter %d %s %lld %lld %d", e->unit, reduce_dtype(r, u, e->dtype),
            (long long)(numel * r->W), (long long)numel, e->group);
    multiply(u->f.theirs, u->f.scattered, u->f.num, factor_of(e) / u->pre);
    if (last) multiply(u->f.theirs, 0, u->f.num, 1 / u->post);
    if (strcmp(e->op, "SUM") != 0 || u->pre != 1 || u->post != 1) rule(RULE_SUM);
    if (last) compare_factors(r, u, 1);
}

static void expect_all_reduce(replay *r, const emit *e) {
    unit *u = &r->units[e->unit];
    int64_t numel = reduced_numel(r, u, e->out);
    NEED(r, e->group == r->R && e->in == e->out, "not an all-reduce of this world");
    if (ours_too(r, u, REPLICAS))
        put(&r->want, "all_reduce %d %s %lld %d", e->unit, e->dtype, (long long)numel, e->group);
    if (r->W == 1) multiply(u->f.theirs, u->f.scattered, u->f.num, 1 / u->pre);
    multiply(u->f.theirs, 0, u->f.num, factor_of(e) / u->post);
    if (strcmp(e->op, "SUM") != 0 || u->pre != 1 || u->post != 1) rule(RULE_SUM);
    if (r->W == 1 && u->divide > 0) {
        rule(RULE_DIVIDE_ONCE);
        for (int i = 0; i < u->f.num; i++) u->f.theirs[i] = 1 / u->divide;
    }
    compare_factors(r, u, 1);
}

static void expect_partial(replay *r, const emit *e) {
    unit *u = &r->units[e->unit];
    int64_t numel = reduced_numel(r, u, e->in);
    if (ours_too(r, u, PARTIAL))
        put(&r->want, "partial %d %s %lld", e->unit, e->dtype, (long long)numel);
    if (r->W == 1) multiply(u->f.theirs, u->f.scattered, u->f.num, 1 / u->pre);
    compare_factors(r, u, 0);
}

/* Ends the reduction of a single rank, which has no line. */
static void one_rank(replay *r, int i) {
    unit *u = &r->units[i];
    if (r->R * r->W > 1 || !u->sync) return;
    if (u->divide > 0) rule(RULE_DIVIDE_ONCE);
    for (int k = 0; k < u->f.num; k++) u->f.theirs[k] = u->divide > 0 ? 1 / u->divide : 1;
    compare_factors(r, u, 1);
}

/* Adds our reduction of gradients that upstream's zero_grad has dropped. */
static void only_ours(replay *r, int i) {
    unit *u = &r->units[i];
    fsdp_dtype red = u->reduce_dtype;
    long long numel = (long long)u->reduced, all = numel * r->W;
    if (!u->todo || u->left || !u->survived || (u->todo & PARTIAL)) return;
    for (int k = 0; k < u->num && !red; k++)
        if (u->params[k].trains) red = u->params[k].dtype;
    const char *name = fsdp_dtype_name(red);
    rule(RULE_ZERO_GRAD);
    if (u->todo & SCATTER)
        put(&r->want, "reduce_scatter %d %s %lld %lld %d", i, reduce_dtype(r, u, name), all, numel,
            r->W);
    if (u->todo & REPLICAS) put(&r->want, "all_reduce %d %s %lld %d", i, name, numel, r->R);
    for (int k = 0; k < u->f.num; k++)
        u->f.theirs[k] = 1 / (u->divide > 0 ? u->divide : r->R * r->W);
    compare_factors(r, u, 1);
    u->todo = u->survived = 0;
}

/* Returns the order index, from `at` on, of the next unit whose post_backward is left to
   finalize; without one, the number of units. */
static int next_unfinished(const replay *r, int at) {
    while (at < r->num_units) {
        const unit *u = &r->units[r->order[at]];
        if (u->unit && u->reached != DONE) break;
        at++;
    }
    return at;
}

/* Adds an upstream line in the form that ours must have. */
static void expect(replay *r, const emit *e) {
    unit *u = &r->units[e->unit];
    list *l = &r->want;
    if (!strcmp(e->what, "unshard") || !strcmp(e->what, "reshard"))
        put(l, "%s %d %c", e->what, e->unit, e->state);
    else if (!strcmp(e->what, "wait")) put(l, "wait %d", e->unit), u->gathered = 1;
    else if (!strcmp(e->what, "drop")) put(l, "drop %d", e->unit);
    else if (!strcmp(e->what, "all_gather") && e->in == 0) {
        rule(RULE_EMPTY);
        u->empty = 1;
    } else if (!strcmp(e->what, "all_gather")) expect_gather(r, e);
    else if (!strcmp(e->what, "post_backward")) {
        r->turn = next_unfinished(r, r->turn);
        NEED(r, r->turn < r->num_units && r->order[r->turn] == e->unit, "not the turn of unit %d",
             e->unit);
        r->turn++;
        rule(RULE_FINALIZE);
        reduction_point(r, e->unit);
        one_rank(r, e->unit);
    } else if (!strcmp(e->what, "divide")) {
        NEED(r, u->pre == 1 && u->post == 1, "divided twice");
        u->pre = e->a, u->post = e->b;
    } else if (!strcmp(e->what, "reduce_scatter")) expect_scatter(r, e);
    else if (!strcmp(e->what, "all_reduce")) expect_all_reduce(r, e);
    else if (!strcmp(e->what, "partial")) expect_partial(r, e);
    else broken(r, "an unknown line: emit %s", e->what);
}

/* ---- comparison ------------------------------------------------------------------------------ */

/* Compares drops of gathers without a wait, and removes their lines. */
static void settle_drops(replay *r) {
    int finalize = !strcmp(r->call, "finalize_backward");
    for (int i = 0; i < r->num_units; i++) {
        unit *u = &r->units[i];
        int theirs = find(&r->want, "drop", i), ours = find(&r->got, "drop", i);
        if (ours > 0 && finalize && find(&r->got, "reshard", i) == ours - 1 &&
            find(&r->want, "reshard", i) < 0) {
            rule(RULE_SLICE);
            u->lost = 1;
            cut(&r->got, --ours, 1);
        }
        int gone = find(&r->want, "reshard", i);
        if (u->lost && gone >= 0 && find(&r->got, "reshard", i) < 0)
            u->lost = 0, cut(&r->want, gone, 1);
        theirs = find(&r->want, "drop", i);
        if (ours >= 0) cut(&r->got, ours, 1);
        if (theirs >= 0) cut(&r->want, theirs, 1);
        if (theirs >= 0 && ours >= 0) rule(RULE_DROP);
        else if (ours >= 0 && !strcmp(r->call, "reshard")) u->kept = 1, rule(RULE_KEPT);
        else if (theirs >= 0 && u->kept) u->kept = 0;
        else NEED(r, theirs < 0 && ours < 0, "the gather of unit %d is dropped by one only", i);
        int again = find(&r->got, "unshard", i), gather = find(&r->got, "all_gather", i);
        if (!u->kept || again < 0 || find(&r->want, "unshard", i) >= 0) continue;
        u->kept = 0; /* upstream uses the kept gather, or issues it again */
        if (gather >= 0) {
            NEED(r, gather == again + 1 && !strcmp(r->got.text[gather], u->gather),
                 "unit %d is gathered again, but not as before", i);
            cut(&r->got, gather, 1);
        }
        cut(&r->got, again, 1);
    }
}

/* Removes a prefetch that only upstream issues, by rule `which`, and notes that upstream has a
   gather under way that we have not. */
static void only_theirs(replay *r, int i, int which) {
    int at = find(&r->want, "unshard", i), gather = find(&r->want, "all_gather", i);
    if (i < 0 || i == r->call_unit || at < 0) return;
    NEED(r, find(&r->got, "unshard", i) < 0, "unit %d is prefetched", i);
    rule(which);
    r->units[i].kept = 1;
    cut(&r->want, at, gather == at + 1 ? 2 : 1);
}

/* Removes prefetches that upstream takes from evaluation forwards or issues in a second
   pre_backward. */
static void settle_prefetches(replay *r) {
    if (r->forwards[0].target != r->forwards[1].target)
        only_theirs(r, r->forwards[0].target, RULE_EVALUATION);
    for (int i = 0; i < r->num_units && r->again; i++) only_theirs(r, i, RULE_AGAIN);
}

/* Resets the state of a backward after finalize. */
static void end_backward(replay *r) {
    if (strcmp(r->call, "finalize_backward") != 0) return;
    for (int i = 0; i < r->num_units; i++) {
        unit *u = &r->units[i];
        u->reached = 0;
        NEED(r, !r->last || !u->kept, "the gather of unit %d is not dropped", i);
        if (r->last) u->last[0] = u->last[1] = -1;
    }
    if (r->last) r->forwards[0].num = r->forwards[1].num = 0;
}

static int by_text(const void *a, const void *b) {
    return strcmp((const char *)a, (const char *)b);
}

/* Removes from the lines what no op shows without a collective: a prefetch's state, and the
   order of prefetches. */
static void settle_quiet(replay *r) {
    for (int side = 0; side < 2; side++) {
        list *l = side ? &r->got : &r->want;
        for (int i = 0, end; i < l->num; i = end + 1) {
            for (end = i; end < l->num && !strncmp(l->text[end], "unshard ", 8); end++) {
                char *state = strrchr(l->text[end], ' ') + 1;
                int index = atoi(l->text[end] + 8), at = find(&r->got, "unshard", index);
                if (at < 0 || !strchr(r->got.text[at], '?')) continue;
                if (r->W > 1 && !r->units[index].empty) continue;
                if (*state != '?' && r->W == 1) rule(RULE_ONE_SHARD);
                *state = '?';
            }
            if (r->W == 1) qsort(l->text + i, (size_t)(end - i), sizeof *l->text, by_text);
        }
    }
}

static void settle(replay *r) {
    if (!r->call[0]) return;
    if (!strcmp(r->call, "post_backward") && r->call_unit >= 0) {
        reduction_point(r, r->call_unit);
        one_rank(r, r->call_unit);
    }
    r->turn = 0;
    for (int i = 0; i < r->num_emits; i++) expect(r, &r->emits[i]);
    for (int i = 0; i < r->num_units; i++) only_ours(r, i);
    if (!strcmp(r->call, "finalize_backward"))
        NEED(r, next_unfinished(r, r->turn) == r->num_units, "a unit is not finished");
    seen.emits += r->num_emits;
    for (int i = 0; i < r->num_units; i++)
        NEED(r, r->units[i].left == 0 && r->units[i].todo == 0,
             "the calls say that unit %d is reduced", i);
    settle_drops(r);
    settle_prefetches(r);

    settle_quiet(r);
    NEED(r, r->want.num == r->got.num, "other things are done");
    for (int i = 0; i < r->want.num; i++)
        NEED(r, !strcmp(r->want.text[i], r->got.text[i]), "not the same: %s, but %s",
             r->want.text[i], r->got.text[i]);
    end_backward(r);
    r->call[0] = 0;
}

/* `status state[NUNITS]` */
static void check_status(replay *r) {
    for (int i = 0; i < r->num_units; i++) {
        const unit *u = &r->units[i];
        char want = *golden_word(r->g), got = !u->unit ? '-' : u->lost ? 'P' : u->base;
        NEED(r, want == got, "status of unit %d is %c, not %c", i, got, want);
    }
    r->turn = 0;
    seen.status++;
}

/* `grads U n sharded[n] unsharded[n]` */
static void check_grads(replay *r) {
    unit *u = unit_at(r, golden_int(r->g));
    int64_t count = golden_int(r->g);
    if (!u || r->g->error[0]) return;
    int i = (int)(u - r->units);
    while (r->turn < i && !r->units[r->turn].unit) r->turn++;
    NEED(r, r->turn++ == i, "not the turn of unit %d", i);
    NEED(r, count == u->num, "%lld gradients of unit %d", (long long)count, i);
    for (int k = 0; k < 2 * u->num; k++) {
        param *p = &u->params[k % u->num];
        int64_t theirs = golden_int(r->g);
        NEED(r, theirs == (k < u->num ? p->sharded : p->pending),
             "gradient %d of unit %d does not follow from the calls", k, i);
    }
    for (int k = 0; k < u->num; k++) {
        fsdp_param_view v;
        DO(r, fsdp_param_view_get(u->unit, k, &v));
        NEED(r, (v.shard_grad != NULL) == u->params[k].our_sharded,
             "unit %d has %s shard gradient of parameter %d", i, v.shard_grad ? "a" : "no", k);
    }
    fsdp_memory m;
    DO(r, fsdp_unit_memory(u->unit, &m));
    int slots = m.pool_slots[FSDP_POOL_GRAD] + m.pool_slots[FSDP_POOL_REDUCE_IN];
    NEED(r, (slots > 0) == u->held, "unit %d holds %d buffers of full gradients", i, slots);
    seen.status++;
}

/* ---- files ----------------------------------------------------------------------------------- */

static void play(golden *g, const variant *v) {
    replay r;
    memset(&r, 0, sizeof r);
    r.v = v, r.g = g;
    while (!r.skip && golden_line(g)) {
        if (golden_is(g, "world")) read_world(&r);
        else if (golden_is(g, "unit")) read_unit(&r);
        else if (golden_is(g, "param")) read_param(&r);
        else {
            if (!r.built) build(&r);
            if (golden_is(g, "emit")) {
                read_emit(&r);
                continue;
            }
            settle(&r);
            if (golden_is(g, "step")) {
                r.training = strcmp(golden_word(g), "forward_nograd") != 0;
                DO(&r, fsdp_set_grad_enabled(r.model, r.training));
            } else if (golden_is(g, "call")) do_call(&r);
            else if (golden_is(g, "status")) check_status(&r);
            else if (golden_is(g, "grads")) check_grads(&r);
        }
    }
    if (r.skip) h_message("%s is left at line %d: %s", g->name, r.line, r.skip);
    else if (!g->error[0]) settle(&r);
    seen.skipped += r.skip != NULL;
    if (r.built) CHECK_EQ_INT(sim_close(&r.s), 0);
    for (int i = 0; i < r.num_units; i++) free(r.units[i].params);
    free(r.units), free(r.order), free(r.emits), free(r.want.text), free(r.got.text);
    free(r.forwards[0].entry), free(r.forwards[1].entry);
    seen.cases++;
}

static void report(void) {
    char text[900] = "";
    size_t used = 0;
    for (int i = 0; i < NUM_RULES; i++)
        if (seen.rules[i])
            used += (size_t)snprintf(text + used, sizeof text - used, "%s%s %lld", used ? ", " : "",
                                     rule_names[i], (long long)seen.rules[i]);
    h_message("%lld cases, %lld of them not to the end, %lld calls, %lld emit lines, %lld lines of "
              "states, %lld reductions",
              (long long)seen.cases, (long long)seen.skipped, (long long)seen.calls,
              (long long)seen.emits, (long long)seen.status, (long long)seen.reductions);
    h_message("%lld gathers, %lld reduce-scatters, %lld all-reduces, %lld copies",
              (long long)seen.ops[FSDP_OP_ALL_GATHER], (long long)seen.ops[FSDP_OP_REDUCE_SCATTER],
              (long long)seen.ops[FSDP_OP_ALL_REDUCE], (long long)seen.ops[FSDP_OP_COPY]);
    h_message("rules: %s", text);
}

// Plays all cases of a file. That of tests/golden has `expected` cases, and none is left out.
static void play_file(const char *file, int expected, const variant *v) {
    int cases = 0;
    golden g;
    GOLDEN_OPEN(&g, file, "events");
    for (; golden_case(&g); cases++) play(&g, v);
    GOLDEN_CLOSE(&g);
    report();
    if (!strcmp(golden_dir(), GOLDEN_DIR)) {
        CHECK_EQ_INT(cases, expected);
        CHECK_EQ_INT(seen.skipped, 0);
    }
    if (seen.emits == 0) SKIP("the file has no emit lines");
}

static const variant variants[] = {
    {"inline", 0, 0, 0},
    {"direct", 0, 0, 1},
    {"fused", 0, 1, 0},
    {"streams", 1, 0, 0},
};

TEST_P(golden_events, cases, variants) { play_file("events_cases.txt", 101, row); }
TEST_P(golden_events, random, variants) { play_file("events_random.txt", 30, row); }
