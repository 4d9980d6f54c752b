/* test_golden_tp.c - PyTorch's tensor parallelism, recorded in tests/golden/train_tp.txt (trainings
   with FSDP) and tp.txt (styles of single modules, losses), once more through fsdp_dtensor.h on
   ranks: shapes, gradients, losses, norms, final parameters, and which collectives a step takes.
   Every case is run.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab_tp.h"

/* ---- train_tp.txt: a case ---------------------------------------------------------------------- */

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

/* The cuts that the file names have to be those of the net. */
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

/* The whole case; every record that has to be there is. */
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

/* ---- train_tp.txt: a rank ---------------------------------------------------------------------- */

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
        const int64_t *want = c->shape[i][fsdp_rank(t->w)];
        fsdp_param_view v = lab_view(t->w, t->unit[p->unit], p->index);
        CHECK_MSG(!memcmp(v.local_shape, want, (size_t)p->ndim * sizeof *want),
                  "case %s: %s has %lld x .., expected %lld x ..", t->net->name, p->name,
                  (long long)v.local_shape[0], (long long)want[0]);
    }
}

/* As the scheme has it. With sequence parallel each linear that is cut along its outputs gathers in
   forward and scatters in backward, each one that is cut along its inputs the other way round; else
   one of both reduces. embedding and head together are as a block, the loss reduces twice. */
static void check_records(const tp_rank *t) {
    const tp_net *net = t->net;
    int pairs = net->blocks + (net->vocab > 0), loss = net->vocab ? 2 : 0, units = net->blocks + 1;
    int is_cut = t->num_tp > 1, dp = net->shards > 1;
    int64_t piece = tp_padded(net->tokens, t->num_tp) * net->d;
    CHECK_EQ_INT(tp_count(t, FSDP_OP_ALL_GATHER), net->sp && is_cut ? 2 * pairs : 0);
    CHECK_EQ_INT(tp_count(t, FSDP_OP_REDUCE_SCATTER), net->sp && is_cut ? 2 * pairs : 0);
    CHECK_EQ_INT(tp_count(t, FSDP_OP_ALL_REDUCE), is_cut ? (net->sp ? 0 : 2 * pairs) + loss : 0);
    CHECK_EQ_INT(tp_count(t, FSDP_OP_ALL_TO_ALL), 0);
    for (int n = t->log_begin; n < t->log.num; n++) {
        const fsdp_op *op = &t->log.ops[n];
        int whole = op->kind == FSDP_OP_ALL_REDUCE;
        if (op->label != t->label || !op->comm) continue;
        CHECK_EQ_INT(op->group_size, t->num_tp);
        if (strncmp(op->what, "loss", 4) != 0)
            CHECK_EQ_INT(op->count, whole ? net->tokens * net->d : piece);
    }
    /* Units: the replicated one and that of the vocabulary stay open in between. */
    int gathers = 1 + (net->vocab > 0) + 2 * net->blocks;
    units += net->vocab > 0;
    CHECK_EQ_INT(lab_count_ops(&t->log, t->log_begin, FSDP_OP_ALL_GATHER, FSDP_LABEL_GATHER, NULL),
                 dp ? gathers : 0);
    CHECK_EQ_INT(
        lab_count_ops(&t->log, t->log_begin, FSDP_OP_REDUCE_SCATTER, FSDP_LABEL_REDUCE, NULL),
        dp ? units : 0);
    CHECK_EQ_INT(
        lab_count_ops(&t->log, t->log_begin, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, NULL),
        is_cut); /* of the replicated one */
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

TEST_P_TIMEOUT(golden_tp, train, ways, 300) {
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
