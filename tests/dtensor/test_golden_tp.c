/* test_golden_tp.c - PyTorch's tensor parallelism, recorded in tests/golden/train_tp.txt (trainings
   with FSDP) and tp.txt (styles of single modules, losses), repeated with fsdp_dtensor.h on ranks:
   shapes, gradients, losses, norms, final parameters, and the collectives of a step. Every case
   runs.

   SPDX-License-Identifier: MIT */
#define TAGS SLOW | AT_NIGHT(ASAN | GLOO | NCCL)
#include "harness.h"
#include "lab_tp.h"

/* ---- train_tp.txt: a case ------------------------------------------------------------------- */

enum { MAX_OPTS = 4, MAX_RANKS = 64 };
typedef struct test_case {
    tp_net net;
    int ranks, num_opts, shapes, grads, losses[MAX_OPTS], norms[MAX_OPTS], finals[MAX_OPTS];
    int64_t shape[TP_PARAMS][MAX_RANKS][2];
    double *grad;
    tp_opt opts[MAX_OPTS];
    tp_story stories[MAX_OPTS]; /* loss, norm and final */
} test_case;

static int read_int(golden *g, int lowest, int highest) {
    int64_t x = golden_int(g);
    if (x >= lowest && x <= highest) return (int)x;
    golden_fail(g, "%lld is not in %d..%d", (long long)x, lowest, highest);
    return lowest;
}

static int read_role(golden *g, const char *name, int *block) {
    static const char *const inner[] = {"norm.weight", "net1.weight", "net1.bias", "net2.weight",
                                        "net2.bias"};
    static const char *const outer[] = {"emb.weight", "norm.weight", "head.weight"};
    char rest[32] = "";
    *block = 0;
    if (sscanf(name, "blocks.%d.%31s", block, rest) == 2)
        for (int i = 0; i < 5; i++)
            if (!strcmp(rest, inner[i])) return i;
    for (int i = 0; i < 3; i++)
        if (!strcmp(name, outer[i])) return TP_EMB + i;
    golden_fail(g, "parameter %s does not belong to the model", name);
    return TP_ROOT;
}

/* Reads a parameter: the shardings in the file must be those of the net. */
static void read_param(test_case *c, golden *g) {
    fsdp_placement tp;
    int block, unit;
    if (read_int(g, 0, TP_PARAMS - 1) != c->net.num_params) golden_fail(g, "out of order");
    unit = read_int(g, 0, TP_BLOCKS);
    const char *name = golden_word(g);
    int role = read_role(g, name, &block);
    if (block < 0 || block >= c->net.blocks) golden_fail(g, "no such block");
    if (g->error[0]) return;
    tp_param *p = tp_add(&c->net, role, block);
    snprintf(p->name, sizeof p->name, "%s", name);
    p->seed = golden_seed(g), p->scale = golden_num(g), p->base = golden_num(g);
    read_placement(g, &tp);
    golden_int(g);
    p->shard_dim = read_int(g, 0, 1); /* on dp */
    for (int i = 0; i < 4; i++) golden_int(g);
    int64_t shape[2] = {0, 0};
    int ndim = read_int(g, 1, 2);
    golden_ints(g, ndim, shape);
    if (unit != (role > TP_B2 ? 0 : block + 1) || (tp.kind == FSDP_SHARD) != p->cut ||
        (p->cut && tp.dim != tp_tp_dim(p)) || ndim != p->ndim ||
        memcmp(shape, p->shape, sizeof shape) != 0)
        golden_fail(g, "unit, cut or shape are not those of the model");
}

static void read_values(const test_case *c, golden *g, double *out) {
    const tp_param *p = &c->net.params[read_int(g, 0, c->net.num_params - 1)];
    if (golden_int(g) != p->numel) golden_fail(g, "not as many as %s has", p->name);
    golden_nums(g, p->numel, out + p->at);
}

static void read_result(test_case *c, golden *g) {
    int k = c->num_opts - 1;
    if (golden_is(g, "shape")) {
        int p = read_int(g, 0, c->net.num_params - 1), rank = read_int(g, 0, c->ranks - 1);
        golden_ints(g, c->net.params[p].ndim, c->shape[p][rank]), c->shapes++;
    } else if (golden_is(g, "grad")) {
        if (!c->grad) c->grad = lab_doubles(c->net.total);
        read_values(c, g, c->grad), c->grads++;
    } else if (golden_is(g, "opt") && k + 1 < MAX_OPTS) {
        tp_opt *o = &c->opts[++k];
        tp_story_make(&c->stories[k], &c->net);
        o->sgd = !strcmp(golden_word(g), "sgd");
        o->lr = golden_num(g), o->a = golden_num(g), o->b = golden_num(g), o->c = golden_num(g);
        o->decay = golden_num(g);
        c->num_opts++;
    } else if (golden_is(g, "loss") && k >= 0) {
        int step = read_int(g, 0, c->net.steps - 1), dp = read_int(g, 0, c->net.shards - 1);
        c->stories[k].loss[step][dp] = golden_num(g), c->losses[k]++;
    } else if (golden_is(g, "norm") && k >= 0) {
        int step = read_int(g, 0, c->net.steps - 1);
        c->stories[k].norm[step] = golden_num(g), c->norms[k]++;
    } else if (golden_is(g, "final") && k >= 0) {
        read_values(c, g, c->stories[k].final), c->finals[k]++;
    }
}

/* Reads a whole case, and checks that no record is missing. */
static void read_case(test_case *c, golden *g) {
    tp_net *net = &c->net;
    memset(c, 0, sizeof *c);
    net->name = g->name, net->micro = 1, net->raf = FSDP_RESHARD_ALWAYS;
    while (golden_line(g)) {
        if (golden_is(g, "world")) {
            net->shards = read_int(g, 1, TP_DATA), net->tp = read_int(g, 1, MAX_RANKS / TP_DATA);
            c->ranks = net->shards * net->tp;
        } else if (golden_is(g, "model")) {
            net->blocks = read_int(g, 1, TP_BLOCKS), net->tokens = golden_int(g);
            net->d = golden_int(g), net->hidden = golden_int(g), net->vocab = golden_int(g);
            net->sp = read_int(g, 0, 1);
        } else if (golden_is(g, "steps")) {
            net->steps = read_int(g, 1, TP_STEPS), net->seed = golden_seed(g);
        } else if (golden_is(g, "clip")) {
            net->clip_p = golden_num(g), net->max_norm = golden_num(g);
        } else if (golden_is(g, "param")) read_param(c, g);
        else read_result(c, g);
    }
    CHECK_MSG(!g->error[0], "%s", g->error);
    int n = net->num_params;
    CHECK_MSG(c->ranks && n == 5 * net->blocks + (net->vocab ? 3 : 1) && c->num_opts &&
                  c->shapes == n * c->ranks && c->grads == n,
              "case %s lacks a record", net->name);
    for (int k = 0; k < c->num_opts; k++)
        CHECK_MSG(c->losses[k] == net->steps * net->shards && c->finals[k] == n &&
                      c->norms[k] == (net->clip_p > 0 ? net->steps : 0),
                  "case %s: %d loss, %d norm, %d final", net->name, c->losses[k], c->norms[k],
                  c->finals[k]);
}
static void free_case(test_case *c) {
    for (int k = 0; k < c->num_opts; k++) tp_story_free(&c->stories[k], &c->net);
    free(c->grad);
}

/* ---- train_tp.txt: a rank ------------------------------------------------------------------- */

typedef struct job {
    const test_case *c;
    int opt;
} job;

static void near_to(const tp_rank *t, const char *what, int64_t i, double got, double want,
                    double limit) {
    CHECK_MSG(fabs(got - want) <= limit, "case %s: %s[%lld] is %.9g, expected %.9g within %g",
              t->net->name, what, (long long)i, got, want, limit);
}

static void check_shapes(tp_rank *t, const test_case *c) {
    for (int i = 0; i < t->net->num_params; i++) {
        const tp_param *p = &t->net->params[i];
        const int64_t *want = c->shape[i][fsdp_rank(t->on.w)];
        fsdp_param_view v = lab_view(t->on.w, t->unit[p->unit], p->index);
        CHECK_MSG(!memcmp(v.local_shape, want, (size_t)p->ndim * sizeof *want),
                  "case %s: %s has %lld x .., expected %lld x ..", t->net->name, p->name,
                  (long long)v.local_shape[0], (long long)want[0]);
    }
}

/* Checks the collectives of the scheme. With sequence parallelism each linear that is sharded along
   its outputs gathers in forward and scatters in backward, each one that is sharded along its
   inputs does the reverse; otherwise one of the two reduces. embedding and head together count like
   a block, the loss reduces twice. */
static void check_records(const tp_rank *t) {
    const tp_net *net = t->net;
    int pairs = net->blocks + (net->vocab > 0), loss = net->vocab ? 2 : 0, units = net->blocks + 1;
    int is_cut = t->num_tp > 1, dp = net->shards > 1;
    int64_t piece = tp_padded(net->tokens, t->num_tp) * net->d;
    CHECK_EQ_INT(tp_count(t, FSDP_OP_ALL_GATHER), net->sp && is_cut ? 2 * pairs : 0);
    CHECK_EQ_INT(tp_count(t, FSDP_OP_REDUCE_SCATTER), net->sp && is_cut ? 2 * pairs : 0);
    CHECK_EQ_INT(tp_count(t, FSDP_OP_ALL_REDUCE), is_cut ? (net->sp ? 0 : 2 * pairs) + loss : 0);
    CHECK_EQ_INT(tp_count(t, FSDP_OP_ALL_TO_ALL), 0);
    for (int n = t->log_begin; n < t->on.log.num; n++) {
        const fsdp_op *op = &t->on.log.ops[n];
        int whole = op->kind == FSDP_OP_ALL_REDUCE;
        if (op->label != t->on.label || !op->comm) continue;
        CHECK_EQ_INT(op->group_size, t->num_tp);
        if (strncmp(op->what, "loss", 4) != 0)
            CHECK_EQ_INT(op->count, whole ? net->tokens * net->d : piece);
    }
    /* Units: the replicated one and the vocabulary's stay open in between. */
    int gathers = 1 + (net->vocab > 0) + 2 * net->blocks;
    units += net->vocab > 0;
    CHECK_EQ_INT(
        lab_count_ops(&t->on.log, t->log_begin, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, NULL),
        dp ? gathers : 0);
    CHECK_EQ_INT(
        lab_count_ops(&t->on.log, t->log_begin, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, NULL),
        dp ? units : 0);
    CHECK_EQ_INT(
        lab_count_ops(&t->on.log, t->log_begin, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, NULL),
        is_cut); /* the replicated unit's */
}

static void on_rank(lab_rank *r) {
    const job *j = (const job *)r->arg;
    const test_case *c = j->c;
    const tp_opt *o = &c->opts[j->opt];
    const tp_story *want = &c->stories[j->opt];
    tp_rank *t = (tp_rank *)lab_zeros(1, sizeof *t);
    tp_story got;
    snprintf(w_case, sizeof w_case, "%s, %s", c->net.name, o->sgd ? "sgd" : "adamw");
    tp_story_make(&got, &c->net);
    tp_open(t, &c->net, r->w, o);
    check_shapes(t, c);
    for (int step = 0; step < c->net.steps; step++) {
        tp_step(t, o, step, &got);
        check_records(t);
        near_to(t, "loss of step", step, got.loss[step][t->data], want->loss[step][t->data], 2e-6);
        if (c->net.clip_p > 0)
            near_to(t, "norm of step", step, got.norm[step] / want->norm[step], 1, 2e-6);
        for (int64_t i = 0; i < c->net.total && !step; i++)
            near_to(t, "grad", i, got.grad[0][i], c->grad[i], 2e-6);
    }
    tp_whole_tensors(t, 0, got.final);
    for (int64_t i = 0; i < c->net.total; i++)
        near_to(t, "final", i, got.final[i], want->final[i], 4e-6);
    tp_close(t);
    lab_end(r);
    tp_story_free(&got, &c->net);
    free(t);
}

static const struct {
    const char *name;
    int lanes, processes, plain;
} ways[] = {{"inline", 0, 0, 0},
            {"1_lane", 1, 0, 0},
            {"2_lanes", 2, 0, 0},
            {"not_fused", 0, 0, 1},
            {"processes", 0, 1, 0}};

TEST_P(golden_tp, train, ways, SECONDS(300) | (row == ways ? GLOO : 0)) {
    static test_case c;
    int cases = 0;
    fsdp_comm_ops plain = w_plain();
    golden g;
    GOLDEN_OPEN(&g, "train_tp.txt", "train_tp");
    for (; golden_case(&g); cases++) {
        read_case(&c, &g);
        for (int k = 0; k < c.num_opts; k++) {
            lab_how how = FSDP_ZERO;
            job j = {&c, k};
            how.job = "golden_tp", how.lanes = row->lanes, how.processes = row->processes;
            how.comm_ops = row->plain ? &plain : NULL;
            lab_run(c.ranks, &how, on_rank, &j);
        }
        free_case(&c);
    }
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0);
}

/* ---- tp.txt: styles ------------------------------------------------------------------------- */

enum { COLWISE, ROWWISE, EMBED_COL, EMBED_ROW, SEQ, ATTN, STYLES };
static const char *const style_names[STYLES] = {"colwise",   "rowwise", "embed_col",
                                                "embed_row", "seq",     "attn"};
enum { STYLE_PARAMS = 8, STYLE_COMMS = 8, STYLE_IDS = 64 };

typedef struct comm_line {
    int kind;
    int64_t in, out;
} comm_line;

typedef struct weight {
    char name[24];
    int ndim, cut;
    int64_t shape[2];
    uint64_t seed;
    double scale, *grad;
    fsdp_placement place;
} weight;

typedef struct style {
    char name[64];
    int tp, kind, num_weights, num_fwd, num_bwd, num_ids, adds_dx;
    fsdp_placement input, output; /* output: placement of the module's output */
    weight weights[STYLE_PARAMS];
    int64_t x[2], y[2], ids[STYLE_IDS];
    uint64_t x_seed, y_seed;
    double x_scale, y_scale, *out, *dx;
    comm_line fwd[STYLE_COMMS], bwd[STYLE_COMMS];
} style;

static const fsdp_placement whole_tensor = {FSDP_REPLICATE, 0, 0, 0},
                            rows_cut = {FSDP_SHARD, 0, 0, 0}, columns_cut = {FSDP_SHARD, 1, 0, 0},
                            addends_of = {FSDP_PARTIAL, 0, FSDP_SUM, 0};

static void read_style(style *s, golden *g) {
    const char *word = golden_word(g);
    s->kind = -1;
    for (int k = 0; k < STYLES; k++)
        if (!strcmp(word, style_names[k])) s->kind = k;
    if (s->kind < 0) golden_fail(g, "no such style");
    read_placement(g, &s->input);
    int by_columns = s->kind == COLWISE || s->kind == EMBED_COL;
    s->output = by_columns ? columns_cut : s->kind == SEQ ? rows_cut : whole_tensor;
    if (golden_left(g) == 3) read_placement(g, &s->output);
    else CHECK_EQ_STR(golden_word(g), "default");
}

static void read_weight(style *s, golden *g) {
    CHECK(s->num_weights < STYLE_PARAMS);
    weight *w = &s->weights[s->num_weights++];
    snprintf(w->name, sizeof w->name, "%s", golden_word(g));
    w->seed = golden_seed(g), w->scale = golden_num(g), w->ndim = read_int(g, 1, 2);
    golden_ints(g, w->ndim, w->shape);
}

static double *read_numbers(golden *g, int64_t count) {
    double *x = lab_doubles(count + 1);
    if (golden_int(g) != count) golden_fail(g, "not as many as there are elements");
    golden_nums(g, count, x);
    return x;
}

static void read_grad(style *s, golden *g) {
    fsdp_placement arrives;
    const char *name = golden_word(g);
    weight *w = NULL;
    for (int i = 0; i < s->num_weights; i++)
        if (!strcmp(s->weights[i].name, name)) w = &s->weights[i];
    CHECK_MSG(w != NULL, "%s", name);
    read_placement(g, &w->place), read_placement(g, &arrives);
    w->cut = w->place.kind == FSDP_SHARD;
    w->grad = read_numbers(g, lab_numel(w->ndim, w->shape));
}

static void read_comm(golden *g, comm_line *lines, int *count) {
    const char *word = golden_word(g);
    CHECK(*count < STYLE_COMMS);
    comm_line *l = &lines[(*count)++];
    l->kind = !strcmp(word, "all_gather")       ? FSDP_OP_ALL_GATHER
              : !strcmp(word, "reduce_scatter") ? FSDP_OP_REDUCE_SCATTER
              : !strcmp(word, "all_reduce")     ? FSDP_OP_ALL_REDUCE
                                                : -1;
    if (l->kind < 0) golden_fail(g, "no such collective");
    l->in = golden_int(g), l->out = golden_int(g);
}

static void read_line_of_style(style *s, golden *g) {
    fsdp_placement place;
    if (golden_is(g, "style")) read_style(s, g);
    else if (golden_is(g, "param")) read_weight(s, g);
    else if (golden_is(g, "grad")) read_grad(s, g);
    else if (golden_is(g, "fwd")) read_comm(g, s->fwd, &s->num_fwd);
    else if (golden_is(g, "bwd")) read_comm(g, s->bwd, &s->num_bwd);
    else if (golden_is(g, "ids")) {
        s->num_ids = read_int(g, 0, STYLE_IDS);
        golden_ints(g, s->num_ids, s->ids);
    } else if (golden_is(g, "input") || golden_is(g, "dout")) {
        int is_x = golden_is(g, "input");
        *(is_x ? &s->x_seed : &s->y_seed) = golden_seed(g);
        *(is_x ? &s->x_scale : &s->y_scale) = golden_num(g);
        read_int(g, 2, 2), golden_ints(g, 2, is_x ? s->x : s->y);
    } else if (golden_is(g, "out")) {
        read_placement(g, &place);
        CHECK(place.kind == s->output.kind && place.dim == s->output.dim);
        s->out = read_numbers(g, s->y[0] * s->y[1]);
    } else if (golden_is(g, "dx")) {
        read_placement(g, &place);
        s->adds_dx = place.kind == FSDP_PARTIAL;
        s->dx = read_numbers(g, s->x[0] * s->x[1]);
    }
}

/* A module on one rank: x is redistributed from the declared placement to the one of the
   computation, y from the computed placement to the output's. */
typedef struct module {
    const style *s;
    fsdp_world *w;
    fsdp_model *model;
    fsdp_dmesh *dm;
    fsdp_unit *unit[2]; /* units of replicated weights and of sharded ones */
    int at[STYLE_PARAMS], rank;
    fsdp_redistribution *in, *in_back, *out, *out_back;
    fsdp_spec x, x_used, y_raw, y;
    float *px, *px_used, *py_raw, *py, *pdy_used, *pdx_used, *pdx;
    lab_log log;
} module;

static fsdp_spec spec_on_tp(const module *m, const fsdp_placement *place, const int64_t *shape) {
    int32_t mesh = m->s->tp;
    fsdp_spec s;
    CHECK_OK(fsdp_spec_init(&s, 1, &mesh, place, FSDP_F32, 2, shape));
    return s;
}
static int64_t part_of(const module *m, const fsdp_spec *s, fsdp_local *l) {
    int32_t coord = m->rank;
    CHECK_OK(fsdp_spec_local(s, &coord, l));
    return l->numel;
}
static fsdp_redistribution *way(module *m, const char *name, const fsdp_spec *from,
                                const fsdp_spec *to) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *r;
    d.name = name, d.from = *from, d.to = *to;
    CALL(m->w, fsdp_redistribution_create(m->dm, &d, &r));
    return r;
}
/* Returns memory that is large enough for a part in either placement. */
static float *part_memory(module *m, const fsdp_spec *s) {
    int64_t rows = tp_padded(s->shape[0], m->s->tp), columns = tp_padded(s->shape[1], m->s->tp);
    void *ptr;
    CALL(m->w, fsdp_dmesh_alloc(m->dm, rows * columns * m->s->tp * m->s->tp * 4, &ptr));
    return (float *)ptr;
}

static void fill_weights(void *user, const fsdp_param_view *block) {
    const weight *w = (const weight *)block->user;
    fsdp_param_view v;
    CHECK_OK(fsdp_tp_view(((module *)user)->dm, block, &v));
    for (int64_t k = 0; k < v.numel; k++)
        ((float *)v.data)[k] = (float)golden_value(w->seed, (uint64_t)fsdp_view_index(&v, k),
                                                   w->scale);
}

/* Makes the units. A bias of a row-parallel linear is added to the output: if that is sharded by
   rows, the bias has partial gradients, like a norm. */
static void make_units(module *m) {
    const style *s = m->s;
    for (int cut = 0; cut < 2; cut++) {
        fsdp_param_desc p[STYLE_PARAMS];
        fsdp_placement tp[STYLE_PARAMS];
        fsdp_tp_unit_desc d = FSDP_ZERO;
        int n = 0;
        for (int i = 0; i < s->num_weights; i++) {
            const weight *w = &s->weights[i];
            if (w->cut != cut) continue;
            p[n] = lab_desc(w->ndim, w->shape, 0, FSDP_F32, 0);
            p[n].user = (void *)(uintptr_t)w, tp[n] = w->place, m->at[i] = n++;
        }
        d.unit.params = p, d.unit.num_params = n, d.tp = tp;
        d.partial_grads = s->output.kind == FSDP_SHARD && s->output.dim == 0;
        if (n) CALL(m->w, fsdp_tp_fully_shard(m->dm, &d, &m->unit[cut]));
    }
    CALL(m->w, fsdp_init_params(m->model, fill_weights, m));
}

static void make_module(module *m) {
    const style *s = m->s;
    const char *const name = "tp";
    const int32_t size = s->tp;
    fsdp_dmesh_desc d = FSDP_ZERO;
    m->model = lab_model(m->w, NULL);
    d.mesh = lab_mesh(m->w, 1, &size, &name, NULL);
    CALL(m->w, fsdp_dmesh_create(m->model, &d, &m->dm));
    make_units(m);
    int adds = s->kind == ROWWISE || s->kind == EMBED_ROW || s->kind == ATTN;
    int by_columns = s->kind == COLWISE || s->kind == EMBED_COL;
    m->y = spec_on_tp(m, &s->output, s->y);
    m->y_raw = spec_on_tp(m, adds ? &addends_of : by_columns ? &columns_cut : &rows_cut, s->y);
    m->out = way(m, "out", &m->y_raw, &m->y);
    CALL(m->w, fsdp_redistribution_create_backward(m->out, NULL, &m->out_back));
    m->py = part_memory(m, &m->y), m->py_raw = part_memory(m, &m->y_raw);
    m->pdy_used = part_memory(m, &m->y);
    if (s->num_ids) return;
    fsdp_spec sums = spec_on_tp(m, &addends_of, s->x);
    m->x = spec_on_tp(m, &s->input, s->x);
    m->x_used = spec_on_tp(m,
                           s->kind == ROWWISE ? &columns_cut
                           : s->kind == SEQ   ? &rows_cut
                                              : &whole_tensor,
                           s->x);
    m->in = way(m, "in", &m->x, &m->x_used);
    adds = s->kind == COLWISE || s->kind == ATTN;
    CALL(m->w, fsdp_redistribution_create_backward(m->in, adds ? &sums : NULL, &m->in_back));
    m->px = part_memory(m, &m->x), m->px_used = part_memory(m, &m->x);
    m->pdx_used = part_memory(m, &m->x), m->pdx = part_memory(m, &m->x);
}

static int weight_of(const module *m, const char *name) {
    for (int i = 0; i < m->s->num_weights; i++)
        if (!strcmp(m->s->weights[i].name, name)) return i;
    return -1;
}
/* Returns this rank's part, in f64. */
static double *weight_part(const module *m, const char *name, int64_t *numel) {
    int i = weight_of(m, name);
    CHECK(i >= 0);
    const weight *w = &m->s->weights[i];
    fsdp_range r;
    int dim = w->place.dim;
    CHECK_OK(fsdp_shard_range(w->shape[dim], m->s->tp, m->rank, &r));
    *numel = w->cut ? r.count * (w->ndim == 2 ? w->shape[!dim] : 1) : lab_numel(w->ndim, w->shape);
    double *x = lab_doubles(*numel + 1);
    lab_settle(m->w, m->model);
    lab_load(x, fsdp_data(m->unit[w->cut], m->at[i]), FSDP_F32, *numel);
    return x;
}
static void put_grad(const module *m, const char *name, const double *g, int64_t numel) {
    int i = weight_of(m, name);
    void *grad = fsdp_grad(m->unit[m->s->weights[i].cut], m->at[i]);
    lab_settle(m->w, m->model);
    lab_store(grad, FSDP_F32, g, numel);
}
static void redistribute(const module *m, fsdp_redistribution *r, float *dst, const float *src) {
    CALL(m->w, fsdp_redistribute(r, dst, src));
    lab_settle(m->w, m->model);
}

/* LayerNorm over the last dim: y = (x - mean) / root * w + b, with root = sqrt(variance + eps). dy
   NULL: forward. */
static void layer_norm(const module *m, float *y, const float *x, int64_t rows, const float *dy,
                       float *dx) {
    int64_t d = m->s->x[1], n;
    double *w = weight_part(m, "weight", &n), *b = weight_part(m, "bias", &n);
    double *dw = lab_doubles(d), *db = lab_doubles(d), *u = lab_doubles(d), *g = lab_doubles(d);
    for (int64_t r = 0; r < rows; r++) {
        double mean = 0, variance = 0, sum_g = 0, sum_gu = 0;
        for (int64_t k = 0; k < d; k++) mean += (double)x[r * d + k] / (double)d;
        for (int64_t k = 0; k < d; k++)
            u[k] = (double)x[r * d + k] - mean, variance += u[k] * u[k] / (double)d;
        double root = sqrt(variance + 1e-5);
        for (int64_t k = 0; k < d; k++) {
            u[k] /= root;
            if (!dy) y[r * d + k] = (float)(u[k] * w[k] + b[k]);
            if (!dy) continue;
            double of_y = (double)dy[r * d + k];
            g[k] = of_y * w[k];
            dw[k] += of_y * u[k], db[k] += of_y;
            sum_g += g[k] / (double)d, sum_gu += g[k] * u[k] / (double)d;
        }
        for (int64_t k = 0; k < d && dy; k++)
            dx[r * d + k] = (float)((g[k] - sum_g - u[k] * sum_gu) / root);
    }
    if (dy) put_grad(m, "weight", dw, d), put_grad(m, "bias", db, d);
    free(w), free(b), free(dw), free(db), free(u), free(g);
}

/* Looks up rows of a table; rows that this rank lacks give zeros. */
static void embed(const module *m, float *y) {
    int64_t n, d, first = 0, rows = m->s->weights[0].shape[0];
    double *w = weight_part(m, "weight", &n);
    fsdp_range r;
    CHECK_OK(fsdp_shard_range(rows, m->s->tp, m->rank, &r));
    if (m->s->kind == EMBED_ROW) first = r.start, rows = r.count, d = m->s->y[1];
    else d = n / rows;
    for (int64_t i = 0; i < m->s->num_ids; i++)
        for (int64_t k = 0; k < d; k++) {
            int64_t row = m->s->ids[i] - first;
            y[i * d + k] = row >= 0 && row < rows ? (float)w[row * d + k] : 0;
        }
    free(w);
}
static void embed_back(const module *m, const float *dy) {
    int64_t n, d, first = 0, rows = m->s->weights[0].shape[0];
    double *g = weight_part(m, "weight", &n);
    fsdp_range r;
    CHECK_OK(fsdp_shard_range(rows, m->s->tp, m->rank, &r));
    if (m->s->kind == EMBED_ROW) first = r.start, rows = r.count, d = m->s->y[1];
    else d = n / rows;
    for (int64_t k = 0; k < n; k++) g[k] = 0;
    for (int64_t i = 0; i < m->s->num_ids; i++)
        for (int64_t k = 0; k < d; k++) {
            int64_t row = m->s->ids[i] - first;
            if (row >= 0 && row < rows) g[row * d + k] += (double)dy[i * d + k];
        }
    put_grad(m, "weight", g, n);
    free(g);
}

/* Returns the sides of a linear on this rank: x has `in` columns, y `out` columns. */
static void linear_sides(const module *m, const char *name, int64_t *out, int64_t *in) {
    const weight *w = &m->s->weights[weight_of(m, name)];
    fsdp_range r;
    CHECK_OK(fsdp_shard_range(w->shape[w->place.dim], m->s->tp, m->rank, &r));
    *out = w->place.dim ? w->shape[0] : r.count;
    *in = w->place.dim ? r.count : w->shape[1];
}
static void linear(const module *m, const char *name, const double *b, float *y, const float *x) {
    int64_t out, in, n;
    double *w = weight_part(m, name, &n);
    linear_sides(m, name, &out, &in);
    tp_linear(y, x, w, b, m->s->x[0], out, in);
    free(w);
}
/* Writes the weight's gradient; dx may be NULL. */
static void linear_back(const module *m, const char *name, const float *dy, const float *x,
                        float *dx) {
    int64_t out, in, n;
    double *w = weight_part(m, name, &n);
    linear_sides(m, name, &out, &in);
    tp_linear_dx(dx, dy, w, m->s->x[0], out, in);
    tp_linear_dw(w, dy, x, m->s->x[0], out, in);
    put_grad(m, name, w, n);
    free(w);
}

static const char *const attn_in[] = {"wq.weight", "wk.weight", "wv.weight"};
static void attention(const module *m, float *y, const float *x, const float *dy, float *dx) {
    int64_t rows = m->s->x[0], all = rows * m->s->x[1];
    float *mid = (float *)lab_zeros((size_t)all, sizeof *mid), *one;
    one = (float *)lab_zeros((size_t)all, sizeof *one);
    for (int i = 0; i < 3; i++) {
        linear(m, attn_in[i], NULL, one, x);
        for (int64_t k = 0; k < all; k++) mid[k] += one[k];
    }
    if (!dy) linear(m, "wo.weight", NULL, y, mid);
    else {
        linear_back(m, "wo.weight", dy, mid, one);
        memcpy(mid, one, (size_t)all * sizeof *mid);
        memset(dx, 0, (size_t)all * sizeof *dx);
        for (int i = 0; i < 3; i++) {
            linear_back(m, attn_in[i], mid, x, one);
            for (int64_t k = 0; k < all; k++) dx[k] += one[k];
        }
    }
    free(mid), free(one);
}

static void run_forward(module *m) {
    const style *s = m->s;
    fsdp_local l;
    int64_t n = 0;
    double *b = s->kind == COLWISE || s->kind == ROWWISE ? weight_part(m, "bias", &n) : NULL;
    if (!s->num_ids) redistribute(m, m->in, m->px_used, m->px);
    switch (s->kind) {
    case COLWISE: linear(m, "weight", b, m->py_raw, m->px_used); break;
    case ROWWISE: linear(m, "weight", NULL, m->py_raw, m->px_used); break;
    case SEQ:
        layer_norm(m, m->py_raw, m->px_used, part_of(m, &m->x, &l) / s->x[1], NULL, NULL);
        break;
    case ATTN: attention(m, m->py_raw, m->px_used, NULL, NULL); break;
    default: embed(m, m->py_raw);
    }
    redistribute(m, m->out, m->py, m->py_raw);
    for (int64_t k = 0; s->kind == ROWWISE && k < part_of(m, &m->y, &l); k++)
        m->py[k] = (float)((double)m->py[k] + b[k % n]);
    free(b);
}

/* py contains the gradient of the output. */
static void run_backward(module *m) {
    const style *s = m->s;
    fsdp_local l;
    redistribute(m, m->out_back, m->pdy_used, m->py);
    if (s->kind == COLWISE || s->kind == ROWWISE) {
        int by_columns = s->kind == COLWISE;
        part_of(m, by_columns ? &m->y_raw : &m->y, &l);
        double *db = lab_doubles(l.shape[1] + 1);
        tp_rows_sum(db, by_columns ? m->pdy_used : m->py, NULL, l.shape[0], l.shape[1]);
        put_grad(m, "bias", db, l.shape[1]);
        free(db);
        linear_back(m, "weight", m->pdy_used, m->px_used, m->pdx_used);
    } else if (s->kind == SEQ) {
        layer_norm(m, NULL, m->px_used, part_of(m, &m->x, &l) / s->x[1], m->pdy_used, m->pdx_used);
    } else if (s->kind == ATTN) attention(m, NULL, m->px_used, m->pdy_used, m->pdx_used);
    else embed_back(m, m->pdy_used);
    if (!s->num_ids) redistribute(m, m->in_back, m->pdx, m->pdx_used);
}

static void check_part_of(module *m, const fsdp_spec *spec, const float *part, const double *want,
                          const char *what) {
    fsdp_local l;
    int64_t numel = part_of(m, spec, &l);
    for (int64_t i = 0; i < numel; i++) {
        double x = want[whole_index(spec, &l, i)];
        CHECK_MSG(fabs((double)part[i] - x) <= 2e-6, "case %s: %s[%lld] is %.9g, expected %.9g",
                  m->s->name, what, (long long)i, (double)part[i], x);
    }
}
static void fill_part_of(module *m, const fsdp_spec *spec, float *part, uint64_t seed,
                         double scale) {
    fsdp_local l;
    int64_t numel = part_of(m, spec, &l);
    for (int64_t i = 0; i < numel; i++)
        part[i] = (float)golden_value(seed, (uint64_t)whole_index(spec, &l, i), scale);
}

/* Checks that the collectives since op `from` are these, in order. */
static void check_comms(const module *m, int from, const comm_line *lines, int count,
                        const char *what) {
    int label = fsdp_label_register(m->model, "activation"), seen = 0;
    for (int n = from; n < m->log.num; n++) {
        const fsdp_op *op = &m->log.ops[n];
        if (op->label != label || !op->comm) continue;
        CHECK_MSG(seen < count, "case %s: %s: more than %d collectives", m->s->name, what, count);
        const comm_line *l = &lines[seen++];
        int64_t one = (int64_t)op->count, all = one * m->s->tp;
        int gathers = op->kind == FSDP_OP_ALL_GATHER, reduces = op->kind == FSDP_OP_ALL_REDUCE;
        CHECK_MSG(op->kind == l->kind && l->in == (gathers || reduces ? one : all) &&
                      l->out == (gathers ? all : one),
                  "case %s: %s: collective %d is of kind %d with %lld elements", m->s->name, what,
                  seen - 1, op->kind, (long long)one);
    }
    CHECK_MSG(seen == count, "case %s: %s: %d collectives, expected %d", m->s->name, what, seen,
              count);
}

static void check_weights(module *m) {
    for (int i = 0; i < m->s->num_weights; i++) {
        const weight *w = &m->s->weights[i];
        int64_t numel = lab_numel(w->ndim, w->shape);
        float *full = (float *)lab_zeros((size_t)numel, sizeof *full);
        CALL(m->w, fsdp_tp_param_full(m->dm, m->unit[w->cut], m->at[i], 1, full));
        for (int64_t k = 0; k < numel; k++)
            CHECK_MSG(fabs((double)full[k] - w->grad[k]) <= 2e-6,
                      "case %s: grad %s[%lld] is %.9g, expected %.9g", m->s->name, w->name,
                      (long long)k, (double)full[k], w->grad[k]);
        free(full);
    }
}

/* PyTorch does not shard a dim that is shorter than the group, so such a linear gathers there. That
   is not compared: here a part may be empty. */
static int is_odd(const style *s) { return s->kind == COLWISE && s->y[1] < s->tp; }

static void hook_units(module *m, fsdp_status (*hook)(fsdp_unit *)) {
    for (int u = 0; u < 2; u++)
        if (m->unit[u]) CALL(m->w, hook(m->unit[u]));
}

static void style_rank(lab_rank *r) {
    const style *s = (const style *)r->arg;
    module m;
    comm_line bwd[STYLE_COMMS];
    int num_bwd = is_odd(s) ? 0 : s->num_bwd;
    memset(&m, 0, sizeof m);
    m.s = s, m.w = r->w, m.rank = r->rank;
    make_module(&m);
    lab_watch(&m.log, r->w, m.model);
    hook_units(&m, fsdp_pre_forward);
    if (!s->num_ids) fill_part_of(&m, &m.x, m.px, s->x_seed, s->x_scale);
    int from = m.log.num;
    run_forward(&m);
    check_comms(&m, from, s->fwd, is_odd(s) ? 0 : s->num_fwd, "forward");
    check_part_of(&m, &m.y, m.py, s->out, "out");
    hook_units(&m, fsdp_post_forward);
    hook_units(&m, fsdp_pre_backward);
    fill_part_of(&m, &m.y, m.py, s->y_seed, s->y_scale);
    from = m.log.num;
    run_backward(&m);
    memcpy(bwd, s->bwd, sizeof bwd);
    if (s->adds_dx ||
        is_odd(s)) { /* PyTorch leaves it partial; here the input gets its declared placement */
        comm_line sum = {FSDP_OP_ALL_REDUCE, s->x[0] * s->x[1], s->x[0] * s->x[1]};
        bwd[num_bwd++] = sum;
    }
    check_comms(&m, from, bwd, num_bwd, "backward");
    if (!s->num_ids) check_part_of(&m, &m.x, m.pdx, s->dx, "dx");
    hook_units(&m, fsdp_post_backward);
    CALL(r->w, fsdp_finalize_backward(m.model));
    check_weights(&m);
    free(m.log.ops);
}

/* ---- tp.txt: losses ------------------------------------------------------------------------- */

typedef struct loss_case {
    char name[64];
    int tp, mean, none, weighted, reduces;
    int64_t rows, classes, ignore;
    int64_t *targets;
    uint64_t seed;
    double *value, *dx;
} loss_case;

static void read_line_of_loss(loss_case *c, golden *g) {
    if (golden_is(g, "loss")) {
        const char *word = golden_word(g);
        c->mean = !strcmp(word, "mean"), c->none = !strcmp(word, "none");
        c->rows = golden_int(g), c->classes = golden_int(g), c->seed = golden_seed(g);
        c->ignore = golden_int(g), c->weighted = read_int(g, 0, 1);
    } else if (golden_is(g, "targets")) {
        CHECK_EQ_INT(golden_int(g), c->rows);
        c->targets = (int64_t *)lab_zeros((size_t)c->rows, sizeof *c->targets);
        golden_ints(g, c->rows, c->targets);
    } else if (golden_is(g, "value")) c->value = read_numbers(g, c->none ? c->rows : 1);
    else if (golden_is(g, "dx")) {
        fsdp_placement place;
        CHECK(read_placement(g, &place) && place.kind == FSDP_SHARD && place.dim == 1);
        c->dx = read_numbers(g, c->rows * c->classes);
    }
}

/* MAX and SUM over tp of n numbers. */
static void reduce_rows(module *m, int op, float *x, int64_t n) {
    fsdp_placement adds = addends_of;
    fsdp_spec from, to;
    int32_t mesh = m->s->tp;
    adds.op = (int8_t)op;
    CHECK_OK(fsdp_spec_init(&from, 1, &mesh, &adds, FSDP_F32, 1, &n));
    CHECK_OK(fsdp_spec_init(&to, 1, &mesh, &whole_tensor, FSDP_F32, 1, &n));
    redistribute(m, way(m, "loss", &from, &to), x, x);
}

static void loss_rank(lab_rank *r) {
    const loss_case *c = (const loss_case *)r->arg;
    const char *const name = "tp";
    const int32_t size = c->tp;
    fsdp_dmesh_desc d = FSDP_ZERO;
    style s;
    module m;
    fsdp_range mine;
    void *max, *sums;
    int64_t n = c->rows;
    memset(&m, 0, sizeof m), memset(&s, 0, sizeof s);
    s.tp = c->tp, m.s = &s, m.w = r->w, m.model = lab_model(r->w, NULL);
    d.mesh = lab_mesh(r->w, 1, &size, &name, NULL);
    CALL(r->w, fsdp_dmesh_create(m.model, &d, &m.dm));
    CALL(r->w, fsdp_dmesh_alloc(m.dm, n * 4, &max));
    CALL(r->w, fsdp_dmesh_alloc(m.dm, n * 8, &sums));
    lab_watch(&m.log, r->w, m.model);
    CHECK_OK(fsdp_shard_range(c->classes, c->tp, r->rank, &mine));
    float *x = (float *)lab_zeros((size_t)(n * mine.count) + 1, sizeof *x);
    float *dout = (float *)lab_zeros((size_t)n, sizeof *dout);
    for (int64_t k = 0; k < n * mine.count; k++) {
        int64_t at = k / mine.count * c->classes + mine.start + k % mine.count;
        x[k] = (float)golden_value(c->seed, (uint64_t)at, 4);
    }
    CHECK_OK(fsdp_loss_parallel_max(x, FSDP_F32, n, mine.count, (float *)max));
    reduce_rows(&m, FSDP_MAX, (float *)max, n);
    CHECK_OK(fsdp_loss_parallel_sums(x, FSDP_F32, n, mine.count, mine.start, c->targets,
                                     (float *)max, (float *)sums));
    reduce_rows(&m, FSDP_SUM, (float *)sums, 2 * n);
    double total = 0, loss = 0, *weight_of_row = lab_doubles(n);
    for (int64_t i = 0; i < n; i++) {
        uint64_t t = (uint64_t)c->targets[i];
        if (c->targets[i] != c->ignore)
            weight_of_row[i] = c->weighted ? golden_value(c->seed + 1, t, 1) + 1 : 1;
        total += weight_of_row[i];
    }
    for (int64_t i = 0; i < n; i++) {
        const float *all = (const float *)sums;
        double part = weight_of_row[i] * (log((double)all[i]) - (double)all[n + i]);
        double of = c->mean ? 1 / total : c->none ? golden_value(c->seed + 2, (uint64_t)i, 2) : 1;
        dout[i] = (float)(of * weight_of_row[i]);
        loss += c->mean ? part / total : part;
        if (c->none) CHECK_NEAR(part, c->value[i], 4e-6);
    }
    if (!c->none) CHECK_NEAR(loss, c->value[0], 4e-6);
    CHECK_OK(fsdp_loss_parallel_grad(x, x, FSDP_F32, n, mine.count, mine.start, c->targets,
                                     (float *)max, (float *)sums, dout));
    for (int64_t k = 0; k < n * mine.count; k++) {
        int64_t at = k / mine.count * c->classes + mine.start + k % mine.count;
        CHECK_NEAR(x[k], c->dx[at], 2e-6);
    }
    int label = fsdp_label_register(m.model, "activation"); /* PyTorch reduces three times */
    CHECK_EQ_INT(lab_count_ops(&m.log, 0, FSDP_OP_ALL_REDUCE, label, NULL), 2);
    free(x), free(dout), free(weight_of_row), free(m.log.ops);
}

TEST_P(golden_tp, styles, ways, SECONDS(300) | (row == ways ? GLOO : 0)) {
    static style s;
    int cases = 0, losses = 0, odd = 0;
    fsdp_comm_ops plain = w_plain();
    golden g;
    GOLDEN_OPEN(&g, "tp.txt", "tp");
    for (; golden_case(&g); cases++) {
        lab_how how = FSDP_ZERO;
        loss_case c;
        int tp = 0;
        memset(&s, 0, sizeof s), memset(&c, 0, sizeof c);
        snprintf(s.name, sizeof s.name, "%s", g.name);
        while (golden_line(&g)) {
            if (golden_is(&g, "mesh")) read_int(&g, 1, 1), tp = s.tp = c.tp = read_int(&g, 1, 64);
            else if (golden_is(&g, "loss") || c.rows) read_line_of_loss(&c, &g);
            else read_line_of_style(&s, &g);
        }
        how.job = "golden_styles", how.lanes = row->lanes, how.processes = row->processes;
        how.comm_ops = row->plain ? &plain : NULL;
        CHECK_MSG(!g.error[0] && (c.rows ? c.value && c.dx && c.targets : s.out != NULL),
                  "case %s lacks a record; %s", s.name, g.error);
        lab_run(tp, &how, c.rows ? loss_rank : style_rank, c.rows ? (void *)&c : (void *)&s);
        losses += c.rows > 0, odd += !c.rows && is_odd(&s);
        for (int i = 0; i < s.num_weights; i++) free(s.weights[i].grad);
        free(s.out), free(s.dx), free(c.targets), free(c.value), free(c.dx);
    }
    GOLDEN_CLOSE(&g);
    h_message("%d cases, %d of them losses; of %d the collectives are not PyTorch's", cases, losses,
              odd);
    CHECK(cases > 0);
}
