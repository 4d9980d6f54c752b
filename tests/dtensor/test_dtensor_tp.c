/* test_dtensor_tp.c - tensor parallelism with FSDP, HSDP, DDP and by itself, compared with the same
   net on full tensors: losses and gradients of every step, norms, replicas. A transformer block.
   Conversion between full tensors and parts; clipping of parts with different sizes; a mesh that is
   a slice; errors; lack of memory.

   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(ASAN | GLOO | NCCL)
#include "harness.h"
#include "lab_tp.h"
#include "lab_block.h"

/* ---- a net compared with full tensors ------------------------------------------------------- */

static const tp_opt adamw = {0, 0.015625, 0.875, 0.96875, 0.015625, 0.03125};
static const tp_opt sgd = {1, 0.125, 0.5, 0, 0, 0.03125};

typedef struct job {
    tp_net nets[2]; /* one for each stage */
    tp_story want[2];
    const tp_opt *opt;
    double limit; /* largest difference, relative to the largest number */
} job;

static void near_to(const tp_net *net, const char *what, int step, const double *got,
                    const double *want, int64_t count, double limit) {
    double most = 1;
    for (int64_t i = 0; i < count; i++) most = fabs(want[i]) > most ? fabs(want[i]) : most;
    for (int64_t i = 0; i < count; i++)
        CHECK_MSG(fabs(got[i] - want[i]) <= limit * most,
                  "%s: %s of step %d, %lld: %.9g, expected %.9g", net->name, what, step,
                  (long long)i, got[i], want[i]);
}

/* Returns a hash of a step's ops, which must be equal in each step. */
static uint64_t hash_records(const tp_rank *t) {
    uint64_t hash = 1;
    for (int n = t->log_begin; n < t->log_end; n++) {
        const fsdp_op *op = &t->on.log.ops[n];
        const uint64_t is[] = {op->kind,     op->label, op->stream, op->dtype,
                               op->redop,    op->count, op->bytes,  (uint64_t)op->group_size,
                               op->what_hash};
        lab_fold(&hash, is, sizeof is);
    }
    return hash;
}

/* Checks that units gather and reduce in the model's dtypes. */
static void check_dtypes(const tp_rank *t) {
    const tp_net *net = t->net;
    for (int n = t->log_begin; n < t->log_end; n++) {
        const fsdp_op *op = &t->on.log.ops[n];
        if (op->kind == FSDP_OP_ALL_GATHER && op->label == FSDP_LABEL_GATHER)
            CHECK_EQ_INT(op->dtype, tp_dtype(net));
        if (op->comm && (op->label == FSDP_LABEL_REDUCE || op->label == FSDP_LABEL_REPLICAS))
            CHECK_EQ_INT(op->out_dtype, FSDP_F32); /* dtype of the sum; it may read bf16 */
    }
}

static void train_rank(lab_rank *r) {
    const job *j = (const job *)r->arg;
    int stage = j->nets[0].stages ? r->rank / (r->size / j->nets[0].stages) : 0;
    const tp_net *net = &j->nets[stage];
    const tp_story *want = &j->want[stage];
    tp_rank *t = (tp_rank *)lab_zeros(1, sizeof *t);
    uint64_t records = 0;
    tp_story got;
    snprintf(w_case, sizeof w_case, "%s", net->name);
    tp_story_make(&got, net);
    tp_open(t, net, r->w, j->opt);
    if (!getenv("FSDP_BACKEND")) t->heap = r->heap;
    for (int step = 0; step < net->steps; step++) {
        tp_step(t, j->opt, step, &got);
        near_to(net, "loss", step, &got.loss[step][t->data], &want->loss[step][t->data], 1,
                j->limit);
        near_to(net, "gradient", step, got.grad[step], want->grad[step], net->total, j->limit);
        if (net->clip_p > 0)
            near_to(net, "norm", step, &got.norm[step], &want->norm[step], 1, j->limit);
        check_dtypes(t);
        if (step > 2) CHECK_MSG(hash_records(t) == records, "other records than of the last step");
        records = hash_records(t);
    }
    tp_whole_tensors(t, 0, got.final);
    near_to(net, "parameter", net->steps, got.final, want->final, net->total, j->limit);
    tp_close(t);
    lab_end(r);
    tp_story_free(&got, net);
    free(t);
}

static int ranks_of(const tp_net *net) {
    int ranks = net->tp;
    if (net->replicas) ranks *= net->replicas;
    if (net->shards) ranks *= net->shards;
    return net->stages ? ranks * net->stages : ranks;
}

/* Trains the net on ranks and on full tensors, and compares them. */
static void beside(const tp_net *net, const tp_opt *opt, double limit, const lab_how *how) {
    int stages = net->stages ? net->stages : 1;
    static job j;
    memset(&j, 0, sizeof j);
    CHECK(stages <= 2);
    for (int i = 0; i < stages; i++) {
        j.nets[i] = *net;
        for (int k = 0; k < net->num_params; k++) j.nets[i].params[k].seed += 7777 * (uint64_t)i;
        tp_story_make(&j.want[i], net);
    }
    j.opt = opt, j.limit = limit;
    tp_tell(j.nets, stages, opt, j.want);
    lab_run(ranks_of(net), how, train_rank, &j);
    for (int i = 0; i < stages; i++) tp_story_free(&j.want[i], net);
}

static void small_net(tp_net *net, const char *name, int replicas, int shards, int tp, int sp) {
    memset(net, 0, sizeof *net);
    net->name = name;
    net->replicas = replicas, net->shards = shards, net->tp = tp, net->sp = sp;
    net->blocks = 2, net->micro = 1, net->steps = 5, net->tokens = 5, net->seed = 4000;
    net->d = net->hidden = 6, net->raf = FSDP_RESHARD_ALWAYS;
}

typedef struct mesh_row {
    const char *name;
    int replicas, shards, tp, given_mesh, lanes, processes, tp_first;
} mesh_row;
static const mesh_row meshes[] = {
    {"fsdp_2x2", 0, 2, 2, 0, 0, 0, 0},
    {"tp_before_fsdp", 0, 2, 3, 1, 0, 0, 1},
    {"tp_before_hsdp", 2, 2, 2, 0, 0, 0, 1},
    {"tp_before_ddp", 2, 0, 2, 1, 0, 0, 1},
    {"fsdp_2x2_mesh", 0, 2, 2, 1, 1, 0, 0},
    {"fsdp_3x2", 0, 3, 2, 1, 0, 0, 0},
    {"fsdp_2x3", 0, 2, 3, 0, 2, 0, 0},
    {"fsdp_1x2", 0, 1, 2, 1, 0, 0, 0},
    {"fsdp_2x1", 0, 2, 1, 0, 0, 0, 0},
    {"hsdp_2x2x2", 2, 2, 2, 0, 0, 0, 0},
    {"hsdp_2x1x2_mesh", 2, 1, 2, 1, 0, 0, 0},
    {"hsdp_2x2x2_lanes", 2, 2, 2, 1, 2, 0, 0},
    {"ddp_2x2", 2, 0, 2, 0, 0, 0, 0},
    {"ddp_3x2_mesh", 3, 0, 2, 1, 0, 0, 0},
    {"ddp_2x2_lanes", 2, 0, 2, 0, 1, 0, 0},
    {"tp_2", 0, 0, 2, 0, 0, 0, 0},
    {"tp_4", 0, 0, 4, 0, 0, 0, 0},
    {"tp_3_lanes", 0, 0, 3, 0, 2, 0, 0},
    {"fsdp_2x2_processes", 0, 2, 2, 1, 0, 1, 0},
    {"hsdp_2x2x2_processes", 2, 2, 2, 0, 0, 1, 0},
    {"ddp_2x2_processes", 2, 0, 2, 1, 0, 1, 0},
};

/* MLPs with 3, 16 and 17 hidden features: with 3, a part of four ranks is empty, and one of three
   is not sharded evenly. Plain: replicated gradients are equal. Sequence parallel: they are
   partial, and tokens are sharded unevenly. */
TEST_P(dtensor_tp, parity, meshes,
       SECONDS(300) | (row->replicas && row->shards ? SLOW : 0) | (row->processes ? NO(NCCL) : 0)) {
    static const int64_t dims[] = {3, 16, 17};
    for (int sp = 0; sp < 2; sp++)
        for (int i = 0; i < 3; i++) {
            static tp_net net;
            lab_how how = FSDP_ZERO;
            small_net(&net, row->name, row->replicas, row->shards, row->tp, sp);
            net.d = net.hidden = dims[i], net.given_mesh = row->given_mesh;
            net.tp_first = row->tp_first;
            if (i == 1) net.hidden = 4 * net.d;
            tp_fill_net(&net);
            how.job = "tp_parity", how.lanes = row->lanes, how.processes = row->processes;
            beside(&net, i ? &adamw : &sgd, 4e-6, &how);
        }
}

enum { FREEZE_NONE, FREEZE_SOME, FREEZE_UNIT };
typedef struct feature {
    const char *name;
    int micro, no_sync, recompute, freeze, raf, shard_dim;
    int64_t vocab;
    fsdp_dtype param, reduce;
    double clip_p, max_norm;
} feature;
static const feature features[] = {
    {"microbatches", 3, 0, 0, 0, FSDP_RESHARD_ALWAYS, 0, 0, 0, 0, 0, 0},
    {"no_sync", 3, 1, 0, 0, FSDP_RESHARD_ALWAYS, 0, 0, 0, 0, 0, 0},
    {"recompute", 1, 0, 1, 0, FSDP_RESHARD_ALWAYS, 0, 0, 0, 0, 0, 0},
    {"recompute_open", 1, 0, 1, 0, FSDP_RESHARD_NEVER, 0, 0, 0, 0, 0, 0},
    {"frozen", 1, 0, 0, FREEZE_SOME, FSDP_RESHARD_ALWAYS, 0, 0, 0, 0, 0, 0},
    {"frozen_unit", 2, 1, 0, FREEZE_UNIT, FSDP_RESHARD_ALWAYS, 0, 0, 0, 0, 2, 0.25},
    {"bf16", 1, 0, 0, 0, FSDP_RESHARD_ALWAYS, 0, 0, FSDP_BF16, FSDP_F32, 0, 0},
    {"bf16_no_sync", 2, 1, 1, 0, FSDP_RESHARD_NEVER, 0, 0, FSDP_BF16, FSDP_F32, 2, 0.5},
    {"clip", 1, 0, 0, 0, FSDP_RESHARD_ALWAYS, 0, 0, 0, 0, 2, 0.25},
    {"clip_1", 1, 0, 0, 0, FSDP_RESHARD_ALWAYS, 0, 0, 0, 0, 1, 0.5},
    {"clip_inf", 1, 0, 0, 0, FSDP_RESHARD_ALWAYS, 0, 0, 0, 0, HUGE_VAL, 0.0625},
    {"columns", 1, 0, 0, 0, FSDP_RESHARD_ALWAYS, 1, 0, 0, 0, 2, 0.5},
    {"vocabulary", 1, 0, 0, 0, FSDP_RESHARD_ALWAYS, 0, 11, 0, 0, 0, 0},
    {"vocabulary_of_1", 2, 1, 1, 0, FSDP_RESHARD_ALWAYS, 0, 1, 0, 0, 2, 0.25},
};

static void take_feature(tp_net *net, const feature *f) {
    net->micro = f->micro, net->no_sync = f->no_sync, net->recompute = f->recompute;
    net->raf = f->raf, net->vocab = f->vocab;
    net->param_dtype = f->param, net->reduce_dtype = f->reduce;
    net->clip_p = f->clip_p, net->max_norm = f->max_norm;
    tp_fill_net(net);
    for (int i = 0; i < net->num_params; i++) {
        tp_param *p = &net->params[i];
        if (p->ndim > 1) p->shard_dim = f->shard_dim;
        int some = p->role == TP_W1 || p->role == TP_EMB || p->role == TP_B2;
        int unit = p->cut && p->unit == TP_BLOCK;
        p->frozen = (f->freeze == FREEZE_SOME && some) || (f->freeze == FREEZE_UNIT && unit);
    }
}

/* bf16 gradients are rounded before they are summed, on each rank that has a part. */
TEST_P(dtensor_tp, features, features, SECONDS(300) | SLOW) {
    static const int on[][3] = {{0, 2, 2}, {2, 2, 2}, {2, 0, 2}, {0, 0, 3}};
    for (size_t i = 0; i < sizeof on / sizeof *on; i++)
        for (int sp = 0; sp < 2; sp++) {
            static tp_net net;
            lab_how how = FSDP_ZERO;
            small_net(&net, row->name, on[i][0], on[i][1], on[i][2], sp);
            take_feature(&net, row);
            how.job = "tp_features", how.lanes = (int)(i + (size_t)sp) % 3;
            beside(&net, &sgd, row->param ? 0.015 : 4e-6, &how);
        }
}

/* Pipeline stages: the mesh of tensors is a slice, and all stages share one norm. */
static const struct {
    const char *name;
    int shards, lanes, processes;
    double p;
} stage_rows[] = {{"inline", 2, 0, 0, 2},
                  {"lanes", 2, 2, 0, HUGE_VAL},
                  {"processes", 2, 0, 1, 2},
                  {"one_shard", 1, 1, 0, 1}};
TEST_P(dtensor_tp, stages, stage_rows, row->processes ? NO(NCCL) : 0) {
    for (int sp = 0; sp < 2; sp++) {
        static tp_net net;
        lab_how how = FSDP_ZERO;
        small_net(&net, row->name, 0, row->shards, 2, sp);
        net.stages = 2, net.given_mesh = 1, net.clip_p = row->p, net.max_norm = 0.125;
        tp_fill_net(&net);
        how.job = "tp_stages", how.lanes = row->lanes, how.processes = row->processes;
        beside(&net, &sgd, 4e-6, &how);
    }
}

/* ---- a transformer block -------------------------------------------------------------------- */

typedef struct block_row {
    const char *name;
    block_net net;
    int lanes, processes;
} block_row;
typedef struct block_job {
    const block_row *row;
    float *y[4], *dx[4];     /* of each rank with its own data */
    double *grad[BK_PARAMS]; /* mean */
} block_job;

static void block_near(const float *got, const float *want, int64_t count, const char *what) {
    double most = 1;
    for (int64_t i = 0; i < count; i++)
        if (fabs((double)want[i]) > most) most = fabs((double)want[i]);
    for (int64_t i = 0; i < count; i++)
        W_CHECK(fabs((double)got[i] - (double)want[i]) <= 4e-6 * most,
                "%s, element %lld: %.9g, expected %.9g", what, (long long)i, (double)got[i],
                (double)want[i]);
}

/* Computes the block in one process, on the data of each rank of dp in turn. */
static void block_tell(block_job *j, const block_net *net) {
    block_net whole_net = *net;
    blk b;
    whole_net.tp = 1, whole_net.sp = 0;
    block_open_whole(&b, &whole_net);
    const int64_t count = b.tokens * net->d;
    for (int data = 0; data < net->dp; data++) {
        block_feed(&b, data);
        block_forward(&b);
        block_backward(&b);
        j->y[data] = (float *)lab_zeros((size_t)count, sizeof(float));
        j->dx[data] = (float *)lab_zeros((size_t)count, sizeof(float));
        memcpy(j->y[data], b.y, (size_t)count * sizeof(float));
        memcpy(j->dx[data], b.dx, (size_t)count * sizeof(float));
    }
    for (int k = 0; k < BK_PARAMS; k++) {
        j->grad[k] = lab_doubles(block_numel(&b, k));
        for (int64_t i = 0; i < block_numel(&b, k); i++)
            j->grad[k][i] = (double)b.g[k][i] / net->dp;
    }
    block_close(&b);
}

/* Checks the collectives of a pass: the elements of the scheme, over tp only, and no copies, as all
   activations are in memory that peers read. */
static void block_counts(const blk *b, const char *pass, int from, int end, int sums) {
    const block_net *net = b->net;
    const int64_t piece = (b->tokens + net->tp - 1) / net->tp * net->d;
    char want[160];
    if (net->sp)
        snprintf(want, sizeof want, "AG %lld/%d, RS %lld/%d, AG %lld/%d, RS %lld/%d",
                 (long long)piece, net->tp, (long long)piece, net->tp, (long long)piece, net->tp,
                 (long long)piece, net->tp);
    else
        snprintf(want, sizeof want, "AR %lld/%d, AR %lld/%d", (long long)(b->tokens * net->d),
                 net->tp, (long long)(b->tokens * net->d), net->tp);
    const char *got = bed_records(&b->on, from, end, COLLECTIVES);
    W_CHECK(!strcmp(got, net->tp > 1 ? want : ""), "%s: %s, expected %s", pass, got, want);
    W_CHECK(lab_count_ops(&b->on.log, from, -1, -1, NULL) > 0, "no record");
    /* units: over dp, and the replicated unit over tp */
    for (int i = from; i < end; i++) {
        const fsdp_op *op = &b->on.log.ops[i];
        if (op->kind < FSDP_OP_ALL_GATHER || op->kind > FSDP_OP_RECV || op->label == b->on.label ||
            op->label == FSDP_LABEL_WORLD) /* replicas are compared once */
            continue;
        sums -= op->label == FSDP_LABEL_REPLICAS;
        CHECK_EQ_INT(op->group_size, op->label == FSDP_LABEL_REPLICAS ? net->tp : net->dp);
    }
    CHECK_EQ_INT(sums, 0);
}

static void block_rank(lab_rank *r) {
    const block_job *j = (const block_job *)r->arg;
    const block_net *net = &j->row->net;
    uint64_t bits = 0;
    blk *b = (blk *)lab_zeros(1, sizeof *b);
    snprintf(w_case, sizeof w_case, "%s, rank %d", j->row->name, r->rank);
    block_open(b, net, r->w);
    bed_watch(&b->on);
    const int data = b->on.coord[0];
    const int64_t at = b->first * net->d, count = b->rows * net->d;
    for (int step = 0; step < 3; step++) {
        uint64_t hash = 1;
        fsdp_param_view v = FSDP_ZERO;
        block_feed(b, data);
        const int from = b->on.log.num;
        block_forward(b);
        const int half = b->on.log.num;
        block_backward(b);
        const int end = b->on.log.num;
        block_counts(b, "forward", from, half, 0);
        block_counts(b, "backward", half, end, net->tp > 1);
        block_near(b->y, j->y[data] + at, count, "y");
        block_near(b->dx, j->dx[data] + at, count, "dx");
        lab_fold(&hash, b->y, (size_t)count * sizeof(float));
        lab_fold(&hash, b->dx, (size_t)count * sizeof(float));
        while (fsdp_next_param(b->on.model, &v))
            if (v.shard_grad) lab_fold(&hash, v.shard_grad, (size_t)v.numel * sizeof(float));
        if (step) W_CHECK(hash == bits, "step %d has other bits", step);
        bits = hash;
        for (int k = 0; k < BK_PARAMS && step == 2; k++) {
            int64_t shape[3];
            block_shape(net, k, net->heads, net->hidden, shape);
            const int64_t numel = lab_numel(3, shape);
            float *full = (float *)lab_zeros((size_t)numel, sizeof *full);
            float *want = (float *)lab_zeros((size_t)numel, sizeof *want);
            for (int64_t i = 0; i < numel; i++) want[i] = (float)j->grad[k][i];
            CALL(r->w, fsdp_tp_param_full(b->on.dm, b->unit[k >= BK_CUT],
                                          k >= BK_CUT ? k - BK_CUT : k, 1, full));
            block_near(full, want, numel, "a gradient");
            free(full), free(want);
        }
        CALL(r->w, fsdp_zero_grad(b->on.model));
    }
    block_close(b);
    lab_end(r);
    free(b);
}

/* batch, context, d, heads, size, hidden, dp, tp, sp, overlap */
#define BLOCK(dp, tp, sp, overlap, heads, hidden, context)                                         \
    { 2, context, 10, heads, 4, hidden, dp, tp, sp, overlap, 77 }
static const block_row block_rows[] = {
    {"1x2,plain", BLOCK(1, 2, 0, 0, 4, 16, 6), 0, 0},
    {"1x2,sequence", BLOCK(1, 2, 1, 0, 4, 16, 6), 0, 0},
    {"1x4,sequence", BLOCK(1, 4, 1, 0, 4, 16, 6), 0, 0},
    {"2x2,plain", BLOCK(2, 2, 0, 0, 4, 16, 6), 2, 0},
    {"2x2,sequence", BLOCK(2, 2, 1, 0, 4, 16, 6), 0, 0},
    {"2x2,plain,overlap", BLOCK(2, 2, 0, 1, 4, 16, 6), 1, 0},
    {"2x2,sequence,overlap", BLOCK(2, 2, 1, 1, 4, 16, 6), 2, 0},
    {"2x3,uneven,plain", BLOCK(2, 3, 0, 0, 4, 11, 5), 0, 0},
    {"2x3,uneven,sequence", BLOCK(2, 3, 1, 0, 4, 11, 5), 1, 0},
    {"1x3,a rank without heads", BLOCK(1, 3, 1, 1, 2, 2, 5), 2, 0},
    {"2x1", BLOCK(2, 1, 1, 0, 3, 16, 6), 0, 0},
    {"2x2,sequence,processes", BLOCK(2, 2, 1, 1, 4, 16, 6), 1, 1},
};
TEST_P(dtensor_tp, transformer_block, block_rows, row->processes ? NO(NCCL) : 0) {
    lab_how how = FSDP_ZERO;
    block_job j;
    memset(&j, 0, sizeof j);
    j.row = row;
    block_tell(&j, &row->net);
    how.job = "tp_block", how.lanes = row->lanes, how.processes = row->processes;
    lab_run(row->net.dp * row->net.tp, &how, block_rank, &j);
    for (int i = 0; i < row->net.dp; i++) free(j.y[i]), free(j.dx[i]);
    for (int k = 0; k < BK_PARAMS; k++) free(j.grad[k]);
}

/* ---- a mesh without a net ------------------------------------------------------------------- */

static void bed_open(bed *b, fsdp_world *w, int dp, int tp, fsdp_dtype grad) {
    fsdp_model_desc md = FSDP_ZERO;
    md.grad_dtype = grad;
    bed_begin(b, w, lab_mesh2(w, dp, tp, "dp", "tp"), &md);
}

/* ---- whole tensors -------------------------------------------------------------------------- */

typedef struct tensor {
    int ndim;
    int64_t shape[3];
    int tp_dim, shard_dim; /* tp_dim 9: replicated */
    fsdp_dtype dtype;
} tensor;
enum { NOT_CUT = 9 };
static const tensor tensors[] = {
    {3, {3, 5, 4}, 0, 0, FSDP_F32},  {3, {3, 5, 4}, 1, 0, FSDP_F32},
    {3, {3, 5, 4}, -1, 1, FSDP_F64}, {3, {4, 7, 2}, 1, 1, FSDP_BF16},
    {2, {7, 2}, 0, 0, FSDP_F32},     {2, {7, 2}, -2, 1, FSDP_F32},
    {2, {2, 5}, 0, 0, FSDP_F32},     {2, {4, 1}, 1, 0, FSDP_F32},
    {2, {2, 9}, 1, 1, FSDP_BF16},    {1, {8}, 0, 0, FSDP_F32},
    {1, {1}, 0, 0, FSDP_F32},        {2, {0, 3}, 0, 0, FSDP_F32},
    {2, {3, 0}, 0, 0, FSDP_F32},     {2, {5, 3}, NOT_CUT, 0, FSDP_F32},
    {1, {4}, NOT_CUT, 0, FSDP_BF16}, {3, {2, 3, 4}, NOT_CUT, 2, FSDP_F32},
};
enum { TENSORS = sizeof tensors / sizeof *tensors };

/* Returns a value that is exact in every dtype, like sums of three; adjacent values differ. */
static double value_of(int seed, int64_t i) { return (double)((i * 7 + seed * 13) % 61 + 1); }

static void check_whole(const tensor *t, fsdp_dtype dtype, const void *full, int seed,
                        const char *what) {
    for (int64_t i = 0; i < lab_numel(t->ndim, t->shape); i++)
        W_CHECK(lab_same(lab_get(full, dtype, i), value_of(seed, i)),
                "%s: element %lld is %g, expected %g", what, (long long)i, lab_get(full, dtype, i),
                value_of(seed, i));
}

/* Returns the index in the full tensor of element k in this rank's gathered part. */
static int64_t part_index(const bed *b, const tensor *t, int64_t k, int64_t *numel) {
    fsdp_placement place = {FSDP_REPLICATE, 0, 0, 0};
    int32_t size = fsdp_mesh_size(b->mesh, 1), coord = fsdp_mesh_rank(b->mesh, 1);
    fsdp_spec s;
    fsdp_local l;
    if (t->tp_dim != NOT_CUT) place.kind = FSDP_SHARD, place.dim = (int8_t)t->tp_dim;
    CHECK_OK(fsdp_spec_init(&s, 1, &size, &place, t->dtype, t->ndim, t->shape));
    CHECK_OK(fsdp_spec_local(&s, &coord, &l));
    *numel = l.numel;
    return k < l.numel ? whole_index(&s, &l, k) : -1;
}

static void fill_view(void *user, const fsdp_param_view *block) {
    const bed *b = (const bed *)user;
    const tensor *t = (const tensor *)block->user;
    fsdp_param_view v;
    CHECK_OK(fsdp_tp_view(b->dm, block, &v));
    CHECK_EQ_MEM(v.shape, t->shape, (size_t)t->ndim * sizeof *t->shape);
    for (int64_t k = 0; k < v.numel; k++)
        lab_put(v.data, v.dtype, k, value_of(1, fsdp_view_index(&v, k)));
}

/* Writes gradients, which are equal on all ranks with their own data: the mean is the value
   written. */
static void write_grad(const bed *b, fsdp_unit *unit, int index, const tensor *t) {
    int64_t numel, at;
    void *grad = fsdp_grad(unit, index);
    CHECK(grad != NULL);
    part_index(b, t, 0, &numel);
    for (int64_t k = 0; k < numel; k++) {
        at = part_index(b, t, k, &numel);
        lab_put(grad, t->dtype, k, value_of(3, at));
    }
}

/* Checks a full tensor. Only rank `keeper` keeps it; a negative one: all do. */
static void whole_is(bed *b, fsdp_unit *unit, int index, const tensor *t, int seed, int grad,
                     int keeper) {
    int64_t numel = lab_numel(t->ndim, t->shape);
    int keeps = keeper < 0 || fsdp_rank(b->w) == keeper;
    fsdp_param_view v = lab_view(b->w, unit, index);
    fsdp_dtype dtype = grad ? v.grad_dtype : t->dtype;
    void *full = lab_zeros((size_t)numel + 1, fsdp_dtype_size(dtype));
    CALL(b->w, fsdp_tp_param_full(b->dm, unit, index, grad, keeps ? full : NULL));
    if (keeps) check_whole(t, dtype, full, seed, grad ? "gradient" : "parameter");
    free(full);
}

typedef struct trip {
    const char *name;
    int sizes[2], lanes, processes;
    fsdp_dtype grad; /* dtype of shard gradients; KEEP: the parameter's */
} trip;

static void round_trips(lab_rank *r) {
    const trip *c = (const trip *)r->arg;
    enum { SETS = 2 * FSDP_DTYPE_COUNT }; /* units: sharded or not, by dtype */
    fsdp_param_desc params[SETS][TENSORS];
    fsdp_placement tp[SETS][TENSORS];
    fsdp_unit *unit[SETS];
    int count[SETS] = {0}, of[TENSORS], index[TENSORS];
    bed b;
    bed_open(&b, r->w, c->sizes[0], c->sizes[1], c->grad);
    memset(tp, 0, sizeof tp);
    for (int i = 0; i < TENSORS; i++) {
        const tensor *t = &tensors[i];
        int cut = t->tp_dim != NOT_CUT, set = of[i] = 2 * (int)t->dtype + cut;
        int k = index[i] = count[set]++;
        params[set][k] = lab_desc(t->ndim, t->shape, t->shard_dim, t->dtype, 0);
        params[set][k].user = (void *)(uintptr_t)t;
        if (cut) tp[set][k].kind = FSDP_SHARD, tp[set][k].dim = (int8_t)t->tp_dim;
    }
    for (int u = 0; u < SETS; u++)
        if (count[u]) unit[u] = bed_unit(&b, params[u], tp[u], count[u], 0);
    CALL(r->w, fsdp_init_params(b.model, fill_view, &b));
    for (int i = 0; i < TENSORS; i++) {
        const tensor *t = &tensors[i];
        int64_t numel = lab_numel(t->ndim, t->shape);
        snprintf(w_case, sizeof w_case, "tensor %d", i);
        whole_is(&b, unit[of[i]], index[i], t, 1, 0, -1); /* from init */
        void *full = lab_zeros((size_t)numel + 1, fsdp_dtype_size(t->dtype));
        for (int64_t k = 0; k < numel; k++) lab_put(full, t->dtype, k, value_of(2, k));
        CALL(r->w, fsdp_tp_param_load(b.dm, unit[of[i]], index[i], full));
        free(full);
        whole_is(&b, unit[of[i]], index[i], t, 2, 0, i % r->size);
        whole_is(&b, unit[of[i]], index[i], t, 2, 0, -1);
    }
    for (int u = 0; u < SETS; u++)
        if (count[u]) lab_forward(r->w, unit[u]);
    for (int u = 0; u < SETS; u++) {
        if (!count[u]) continue;
        CALL(r->w, fsdp_pre_backward(unit[u]));
        for (int i = 0; i < TENSORS; i++)
            if (of[i] == u) write_grad(&b, unit[u], index[i], &tensors[i]);
        CALL(r->w, fsdp_post_backward(unit[u]));
    }
    CALL(r->w, fsdp_finalize_backward(b.model));
    for (int i = 0; i < TENSORS; i++) {
        snprintf(w_case, sizeof w_case, "gradient %d", i);
        whole_is(&b, unit[of[i]], index[i], &tensors[i], 3, 1, -1);
        whole_is(&b, unit[of[i]], index[i], &tensors[i], 3, 1, (i + 1) % r->size);
        whole_is(&b, unit[of[i]], index[i], &tensors[i], 2, 0, -1); /* unchanged */
    }
}
static const trip trips[] = {
    {"2x3", {2, 3}, 0, 0, 0}, {"1x4", {1, 4}, 1, 0, 0},
    {"3x1", {3, 1}, 0, 0, 0}, {"2x3_f64_gradients", {2, 3}, 0, 0, FSDP_F64},
    {"1x1", {1, 1}, 0, 0, 0}, {"2x2_f32_gradients", {2, 2}, 2, 0, FSDP_F32},
    {"2x2", {2, 2}, 2, 0, 0}, {"2x2_processes", {2, 2}, 0, 1, 0}};
TEST_P(dtensor_tp, whole_tensors, trips, row->processes ? NO(NCCL) : 0) {
    lab_how how = FSDP_ZERO;
    how.job = "tp_trips", how.lanes = row->lanes, how.processes = row->processes;
    lab_run(row->sizes[0] * row->sizes[1], &how, round_trips, (void *)(uintptr_t)row);
}

/* ---- parts of different sizes --------------------------------------------------------------- */

/* Two tp ranks have 33 and 32 of 65 rows: their shards and slots differ in size, and in their
   number of pages; these ranks then sum norms and the gradients of replicas. */
static void clip_rank(lab_rank *r) {
    const int64_t rows = 65, columns = 160, vector = 7;
    const int64_t shape[2] = {rows, columns};
    fsdp_param_desc matrix = lab_desc(2, shape, 0, FSDP_F32, 0);
    fsdp_param_desc bias = lab_desc(1, &vector, 0, FSDP_F32, 0);
    fsdp_placement cut = {FSDP_SHARD, 0, 0, 0}, whole = {FSDP_REPLICATE, 0, 0, 0};
    const tensor t = {2, {rows, columns}, 0, 0, FSDP_F32};
    fsdp_clip_desc clip = FSDP_ZERO;
    double norm, sum = 0, want;
    int64_t numel;
    bed b;
    bed_open(&b, r->w, *(const int *)r->arg, 2, FSDP_DTYPE_KEEP);
    fsdp_unit *unit[2] = {bed_unit(&b, &bias, &whole, 1, 1), bed_unit(&b, &matrix, &cut, 1, 0)};
    for (int64_t i = 0; i < rows * columns; i++) sum += value_of(3, i) * value_of(3, i);
    for (int64_t i = 0; i < vector; i++) sum += 9 * value_of(5, i) * value_of(5, i);
    want = sqrt(sum), clip.max_norm = 2;
    for (int step = 0; step < 3; step++) {
        for (int u = 0; u < 2; u++) lab_forward(r->w, unit[u]);
        for (int u = 0; u < 2; u++) CALL(r->w, fsdp_pre_backward(unit[u]));
        write_grad(&b, unit[1], 0, &t);
        float *g = (float *)fsdp_grad(unit[0], 0); /* partial values: 1 and 2 times */
        for (int64_t i = 0; i < vector; i++)
            g[i] = (float)(value_of(5, i) * (1 + fsdp_mesh_rank(b.mesh, 1)));
        for (int u = 0; u < 2; u++) CALL(r->w, fsdp_post_backward(unit[u]));
        CALL(r->w, fsdp_finalize_backward(b.model));
        CALL(r->w, fsdp_clip_grads(b.model, &clip, &norm));
        CHECK_NEAR(norm, want, 1e-12 * want);
        part_index(&b, &t, 0, &numel);
        CHECK_EQ_INT(numel, (fsdp_mesh_rank(b.mesh, 1) ? 32 : 33) * columns);
        float *full = (float *)lab_zeros((size_t)(rows * columns), sizeof *full);
        CALL(r->w, fsdp_tp_param_full(b.dm, unit[1], 0, 1, full));
        for (int64_t i = 0; i < rows * columns; i++)
            CHECK_NEAR(full[i], value_of(3, i) * 2 / (want + 1e-6), 1e-6);
        CALL(r->w, fsdp_tp_param_full(b.dm, unit[0], 0, 1, full));
        for (int64_t i = 0; i < vector; i++)
            CHECK_NEAR(full[i], 3 * value_of(5, i) * 2 / (want + 1e-6), 1e-6);
        free(full);
        CALL(r->w, fsdp_zero_grad(b.model));
    }
}
static const struct {
    const char *name;
    int dp, lanes, processes;
} clips[] = {{"1x2", 1, 0, 0},
             {"2x2", 2, 0, 0},
             {"2x2_1_lane", 2, 1, 0},
             {"2x2_2_lanes", 2, 2, 0},
             {"1x2_processes", 1, 0, 1},
             {"2x2_processes", 2, 0, 1},
             {"2x2_processes_1_lane", 2, 1, 1},
             {"2x2_processes_2_lanes", 2, 2, 1}};
TEST_P(dtensor_tp, clip_of_33_and_32_rows, clips, row->processes ? NO(NCCL) : 0) {
    lab_how how = FSDP_ZERO;
    int dp = row->dp;
    how.job = "tp_clip", how.lanes = row->lanes, how.processes = row->processes;
    lab_run(2 * dp, &how, clip_rank, &dp);
}

/* ---- errors --------------------------------------------------------------------------------- */

static fsdp_status create(fsdp_model *m, const fsdp_mesh *mesh, const char *tp, const char *shard,
                          const char *replicate) {
    fsdp_dmesh_desc d = FSDP_ZERO;
    fsdp_dmesh *dm;
    d.mesh = mesh, d.tp_dim = tp, d.shard_dim = shard, d.replicate_dim = replicate;
    fsdp_status status = fsdp_dmesh_create(m, &d, &dm);
    CHECK((dm == NULL) == (status != FSDP_OK));
    return status;
}

static void refused_meshes(lab_rank *r) {
    fsdp_world *w = r->w, *other = lab_world(r, 1, 0, NULL);
    const int32_t first = 0, one = 1, sizes[3] = {2, 1, 1}, inner[2] = {1, 2};
    const char *const names[3] = {"pp", "dp_replicate", "tp"};
    fsdp_model *m = lab_model(w, NULL);
    fsdp_mesh *mesh = lab_mesh2(w, 1, 2, "dp", "tp"), *slice;
    REFUSED(w, create(m, mesh, "experts", NULL, NULL),
            "[E003] dmesh_create: the mesh has no dim 'experts', which tp_dim names: name one of "
            "its dims, or pass NULL");
    REFUSED(w, create(m, mesh, NULL, "rows", NULL), "no dim 'rows', which shard_dim names");
    REFUSED(w, create(m, mesh, NULL, NULL, "copies"), "no dim 'copies', which replicate_dim names");
    const char *outside = "[E004] dmesh_create: mesh is NULL, of another world, or without this "
                          "rank: pass a mesh of the model's world that this rank is in";
    REFUSED(w, create(m, NULL, NULL, NULL, NULL), outside);
    REFUSED(w, create(m, lab_mesh2(other, 1, 2, "dp", "tp"), NULL, NULL, NULL), outside);
    fsdp_mesh *alone = lab_mesh(w, 1, &one, names + 2, &first);
    if (r->rank == 1) REFUSED(w, create(m, alone, NULL, NULL, NULL), outside);
    else
        REFUSED_AS(FSDP_ERR_INVALID_STATE, w, create(m, alone, NULL, NULL, NULL),
                   "[E008] dmesh_create: it failed on another rank: see its log");
    REFUSED(w, create(m, mesh, "dp", "dp", NULL),
            "[E006] dmesh_create: two of tp_dim, shard_dim and replicate_dim name one dim: name "
            "three different ones");
    REFUSED(w, create(m, mesh, NULL, "tp", NULL), "[E006]");
    REFUSED(w, create(m, mesh, NULL, "dp", "dp"), "[E006]");
    REFUSED(w, create(m, mesh, NULL, NULL, "tp"), "[E006]");
    fsdp_mesh *whole = lab_mesh(w, 3, sizes, names, NULL);
    CALL(w, fsdp_mesh_slice(whole, inner, 2, &slice));
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, w, create(m, slice, NULL, NULL, NULL),
               "[E025] dmesh_create: a mesh with tp_dim and replicate_dim has 1 of 2 ranks: pass "
               "one with all ranks of the world");
    fsdp_model_desc md = FSDP_ZERO;
    md.mesh = lab_slice(w, mesh, 0);
    fsdp_model *small = lab_model(w, &md);
    REFUSED(w, create(small, mesh, NULL, NULL, NULL),
            "[E005] dmesh_create: the model's mesh has 1 ranks and this one 2, so that norms would "
            "leave ranks out: give fsdp_model_desc.mesh_info on the whole mesh instead of a slice");
    CALL(w, create(m, mesh, NULL, NULL, NULL)); /* the refused calls did no harm */
    CALL(w, create(m, mesh, "tp", "dp", NULL));
    CHECK_OK(fsdp_shutdown(other));
}
/* PyTorch: test_fully_shard_dtensor.py test_validation_invalid_dim_names. Done: a name for
   `shard_dim` or `replicate_dim` that the mesh lacks is refused, with the name in the text. */
TEST(dtensor_tp, refused_meshes) { lab_run(2, NULL, refused_meshes, NULL); }

static void refused_units(lab_rank *r) {
    fsdp_world *w = r->w;
    fsdp_param_desc p[3] = {fsdp_mat("a", 4, 3), fsdp_vec("b", 3), fsdp_vec("c", 3)};
    fsdp_placement tp[3];
    fsdp_tp_unit_desc d = FSDP_ZERO;
    fsdp_param_view v = FSDP_ZERO, out;
    fsdp_unit *unit;
    bed b;
    bed_open(&b, w, 1, 2, FSDP_DTYPE_KEEP);
    memset(tp, 0, sizeof tp);
    d.unit.name = "h.0", d.unit.params = p, d.unit.num_params = 3, d.tp = tp;
#define SHARD_REFUSED(text)                                                                        \
    do {                                                                                           \
        unit = (fsdp_unit *)&b;                                                                    \
        REFUSED(w, fsdp_tp_fully_shard(b.dm, &d, &unit), text);                                    \
        CHECK(!unit);                                                                              \
    } while (0)
#define LACKS(count)                                                                               \
    "[E026] tp_fully_shard: 'h.0': params or tp is NULL, num_params is " count ", or a mesh is "   \
    "given: pass a placement for each of 1 or more parameters, and no mesh: dm has it"
    d.tp = NULL;
    SHARD_REFUSED(LACKS("3"));
    d.tp = tp, d.unit.params = NULL;
    SHARD_REFUSED(LACKS("3"));
    d.unit.params = p, d.unit.num_params = 0;
    SHARD_REFUSED(LACKS("0"));
    d.unit.num_params = 3, d.unit.mesh = b.mesh;
    SHARD_REFUSED(LACKS("3"));
    fsdp_mesh_info info;
    CALL(w, fsdp_model_mesh_info(b.model, &info));
    d.unit.mesh = NULL, d.unit.mesh_info = &info;
    SHARD_REFUSED(LACKS("3"));
    d.unit.mesh_info = NULL, tp[1].kind = FSDP_PARTIAL;
    SHARD_REFUSED("[E027] tp_fully_shard: 'h.0': parameter 1 has placement 2, expected FSDP_SHARD "
                  "or FSDP_REPLICATE");
    tp[0].kind = tp[1].kind = tp[2].kind = FSDP_SHARD;
    tp[1].dim = 1;
    SHARD_REFUSED("[E028] tp_fully_shard: 'h.0': parameter 1 is cut along dim 1 and has 1 dims: "
                  "name one of them");
    tp[1].dim = -2;
    SHARD_REFUSED("parameter 1 is cut along dim -2 and has 1 dims");
    tp[1].dim = 0, p[0].ndim = FSDP_MAX_DIMS + 1;
    SHARD_REFUSED("[E028] tp_fully_shard: 'h.0': parameter 0 is cut along dim 0");
    p[0].ndim = 2, tp[2].kind = FSDP_REPLICATE;
    SHARD_REFUSED("[E029] tp_fully_shard: 'h.0': parameter 0 ('a') is cut and parameter 2 ('c') is "
                  "replicated: make two units, one of those that tp cuts and one of those that it "
                  "replicates");
    tp[0].kind = tp[1].kind = FSDP_REPLICATE, tp[2].kind = FSDP_SHARD;
    SHARD_REFUSED("parameter 0 ('a') is replicated and parameter 2 ('c') is cut: make two units");
    for (int i = 0; i < 3; i++) tp[i].kind = FSDP_SHARD;
    p[1].shape[0] = -3; /* an error of fsdp_fully_shard */
    SHARD_REFUSED("[E143] unit 'h.0', parameter 'b': size of dim 0 is -3");
    p[1].shape[0] = 3, d.size = 8;
    SHARD_REFUSED("fsdp_tp_unit_desc");
    d.size = 0;
    v.ndim = 2, v.shape[0] = 5;
    CALL(w, fsdp_tp_view(b.dm, &v, &out)); /* a view of no unit, though one was refused */
    CHECK_EQ_MEM(&out, &v, sizeof v);
    const char *all = "[E101] tp_fully_shard: dm, desc or unit is NULL";
    REFUSED(NULL, fsdp_tp_fully_shard(NULL, &d, &unit), all);
    REFUSED(w, fsdp_tp_fully_shard(b.dm, NULL, &unit), all);
    REFUSED(w, fsdp_tp_fully_shard(b.dm, &d, NULL), all);
    CALL(w, fsdp_tp_fully_shard(b.dm, &d, &unit)); /* the refused calls did no harm */
}
/* PyTorch: test_fully_shard_dtensor.py test_validation_spmd_mesh_non_dtensor_params. Done:
   parameters without placements are refused. */
/* PyTorch: test_fully_shard_dtensor.py test_validation_mesh_mismatch. Differs: a parameter has no
   mesh of its own. A mesh or a mesh info in a unit's desc is refused, as the dmesh has it. */
TEST(dtensor_tp, refused_units) { lab_run(2, NULL, refused_units, NULL); }

/* ---- dims of the mesh ------------------------------------------------------------------------ */

/* The model's mesh_info decides which dims shard and replicate, whatever their names are. If the
   desc or the usual names contradict it, a unit is refused. */
typedef struct dims_row {
    const char *name, *names[3];
    int shape[3], first; /* first: the dmesh is the slice from this dim on */
    int info[2];         /* dims of the model's mesh_info; both -1: the default, all ranks shard */
    const char *desc[3]; /* names of tp_dim, shard_dim, replicate_dim */
    int want[3];         /* sharded unit: shards, replicas, parts; or it is refused */
    const char *text;
    int merged; /* the model's mesh has the last two dims as one */
} dims_row;

/* Makes a unit with one vector of 8 elements; returns its mesh. */
static fsdp_status a_unit(fsdp_dmesh *dm, int kind, int partial, fsdp_unit **unit,
                          fsdp_mesh_info *info) {
    const fsdp_param_desc p = fsdp_vec("w", 8);
    fsdp_placement tp = {0, 0, 0, 0};
    fsdp_tp_unit_desc d = FSDP_ZERO;
    tp.kind = (int8_t)kind;
    d.unit.params = &p, d.unit.num_params = 1, d.tp = &tp, d.partial_grads = partial;
    fsdp_status status = fsdp_tp_fully_shard(dm, &d, unit);
    return status ? status : fsdp_unit_mesh_info(*unit, info);
}

/* Ranks with different data have different gradients; those of one tp group have equal ones. Every
   rank gets the mean over all data. */
static void step_of_dims(const lab_rank *r, fsdp_model *m, fsdp_unit *unit, int num, int data) {
    const int64_t count = lab_view(r->w, unit, 0).shape[0];
    lab_forward(r->w, unit);
    CALL(r->w, fsdp_pre_backward(unit));
    float *grad = (float *)fsdp_grad(unit, 0);
    for (int64_t i = 0; i < count; i++) grad[i] = (float)(2 * data);
    CALL(r->w, fsdp_post_backward(unit));
    CALL(r->w, fsdp_finalize_backward(m));
    const fsdp_param_view v = lab_view(r->w, unit, 0);
    for (int64_t i = 0; i < v.numel; i++)
        CHECK_NEAR((double)((float *)v.shard_grad)[i], num - 1, 1e-6);
    CALL(r->w, fsdp_zero_grad(m));
}

static fsdp_dmesh *dmesh_of(lab_rank *r, const dims_row *row, fsdp_model **m, int *stages) {
    const int shard = row->info[0], replicate = row->info[1];
    int32_t from[3] = {0, 1, 2}, shape[3], ndim = 0;
    fsdp_mesh_info info;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_dmesh *dm;
    for (*stages = 1; ndim < 3 && row->shape[ndim]; ndim++) {
        shape[ndim] = row->shape[ndim];
        if (ndim < row->first) *stages *= shape[ndim];
    }
    fsdp_mesh *all = lab_mesh(r->w, ndim, shape, row->names, NULL), *mine = all;
    if (row->first) CALL(r->w, fsdp_mesh_slice(all, from + row->first, ndim - row->first, &mine));
    int kind = shard < 0       ? FSDP_MESH_INFO_DDP
               : replicate < 0 ? FSDP_MESH_INFO_FSDP
                               : FSDP_MESH_INFO_HSDP;
    if (row->merged) shape[ndim - 2] *= shape[ndim - 1];
    fsdp_mesh *its = row->merged ? lab_mesh(r->w, ndim - 1, shape, row->names, NULL) : all;
    if (shard >= 0 || replicate >= 0) {
        CALL(r->w, fsdp_mesh_info_init(its, kind, shard, replicate, &info));
        md.mesh_info = &info;
    }
    *m = lab_model(r->w, &md);
    dd.mesh = mine;
    dd.tp_dim = row->desc[0], dd.shard_dim = row->desc[1], dd.replicate_dim = row->desc[2];
    CALL(r->w, fsdp_dmesh_create(*m, &dd, &dm)); /* redistributions do not depend on it */
    return dm;
}

static void rank_of_dims(lab_rank *r) {
    const dims_row *row = (const dims_row *)r->arg;
    int stages;
    fsdp_mesh_info info;
    fsdp_model *m;
    fsdp_unit *cut, *whole;
    fsdp_dmesh *dm = dmesh_of(r, row, &m, &stages);
    const int shards = row->want[0], replicas = row->want[1], parts = row->want[2];
    if (row->text) {
        const int lacks = strstr(row->text, "E033") != NULL;
        REFUSED(r->w, a_unit(dm, FSDP_SHARD, 0, &cut, &info), row->text);
        CHECK(!cut);
        REFUSED(r->w, a_unit(dm, FSDP_REPLICATE, 1, &cut, &info),
                lacks ? "gradients are addends" : row->text);
        if (lacks) CALL(r->w, a_unit(dm, FSDP_REPLICATE, 0, &whole, &info));
        return;
    }
    CALL(r->w, a_unit(dm, FSDP_SHARD, 0, &cut, &info));
    CHECK_EQ_INT(info.shard_mesh_size, shards);
    CHECK_EQ_INT(info.replicate_mesh_size, replicas);
    CALL(r->w, a_unit(dm, FSDP_REPLICATE, 0, &whole, &info));
    CHECK_EQ_INT(info.shard_mesh_size, shards);
    CHECK_EQ_INT(info.replicate_mesh_size, replicas * parts);
    const int ranks = r->size / stages, data = r->rank % ranks / parts;
    CHECK_EQ_INT(lab_view(r->w, cut, 0).shape[0], 8 / parts);
    step_of_dims(r, m, cut, ranks / parts, data);
    step_of_dims(r, m, whole, ranks / parts, data);
}

#define UNIT_REFUSED(id) "[" id "] tp_fully_shard: 'a unit without name': "
static const char no_tp[] = UNIT_REFUSED(
    "E033") "dm's mesh has no dim 'tp' over which parameters are cut: name the dim in "
            "fsdp_dmesh_desc.tp_dim, or give the mesh one of 1 rank";
static const char other_4[] = UNIT_REFUSED(
    "E034") "the model's mesh_info shards over 4 ranks and replicates over 1, and "
            "dm's mesh would do so over others (shard_dim: dim -1, replicate_dim: "
            "dim -1; -1: none): give the model a mesh_info on this mesh, or name its "
            "dims in fsdp_dmesh_desc";
#define OTHER UNIT_REFUSED("E034") "the model's mesh_info shards over "
#define IDLE(dim)                                                                                  \
    UNIT_REFUSED("E036")                                                                           \
    "dm's mesh has a dim '" dim "' of 2 ranks over which the model's mesh_info does not shard or " \
    "replicate, so that gradients would not be averaged over it: give the model a mesh_info that " \
    "shards or replicates over it, or rename the dim"
#define USUAL                                                                                      \
    { "dp_replicate", "dp_shard", "tp" }
static const dims_row dims_rows[] = {
    {"hsdp", USUAL, {2, 2, 2}, 0, {1, 0}, {NULL}, {2, 2, 2}, NULL, 0},
    {"other_names", {"copies", "rows", "tp"}, {2, 1, 2}, 0, {1, 0}, {NULL}, {1, 2, 2}, NULL, 0},
    {"crossed_names", USUAL, {1, 2, 2}, 0, {0, 1}, {NULL}, {1, 2, 2}, NULL, 0},
    {"as_they_are", {"a", "b", "tp"}, {2, 2, 2}, 0, {1, 0}, {NULL, "b", "a"}, {2, 2, 2}, NULL, 0},
    {"no_name", {NULL, "tp"}, {2, 2}, 0, {0, -1}, {NULL}, {2, 1, 2}, NULL, 0},
    {"fsdp", {"fsdp", "tp"}, {2, 2}, 0, {0, -1}, {NULL}, {2, 1, 2}, NULL, 0},
    {"ddp_over_dp", {"dp", "tp"}, {2, 2}, 0, {-1, 0}, {NULL}, {1, 2, 2}, NULL, 0},
    {"over_tp_too", {"x", "tp"}, {2, 2}, 0, {0, 1}, {NULL}, {2, 1, 2}, NULL, 0},
    {"tp_shards", {"x", "tp"}, {2, 2}, 0, {1, 0}, {NULL}, {1, 2, 2}, NULL, 0},
    {"tp_named", {"dp", "model"}, {2, 2}, 0, {0, -1}, {"model"}, {2, 1, 2}, NULL, 0},
    {"tp_of_1", {"x", "tp"}, {2, 1}, 0, {0, -1}, {NULL}, {2, 1, 1}, NULL, 0},
    {"stages", {"pp", "x", "tp"}, {2, 2, 2}, 1, {1, -1}, {NULL}, {2, 1, 2}, NULL, 0},
    {"stages_over_tp", {"pp", "x", "tp"}, {2, 2, 2}, 1, {1, 2}, {NULL}, {2, 1, 2}, NULL, 0},
    {"default", {"dp", "tp"}, {2, 2}, 0, {-1, -1}, {NULL}, {2, 1, 2}, NULL, 0},
    {"default_hsdp", USUAL, {2, 2, 2}, 0, {-1, -1}, {NULL}, {2, 2, 2}, NULL, 0},
    {"merged", USUAL, {2, 2, 2}, 0, {1, 0}, {NULL}, {2, 2, 2}, NULL, 1},
    {"default_named", {"x", "tp"}, {2, 2}, 0, {-1, -1}, {NULL, "x"}, {2, 1, 2}, NULL, 0},
    {"bad_default", {"x", "tp"}, {2, 2}, 0, {-1, -1}, {NULL}, {0}, other_4, 0},
    {"bad_1_of_2", {"x", "dp", "tp"}, {2, 2, 2}, 0, {-1, -1}, {NULL}, {0}, OTHER "8", 0},
    {"bad_crossed", {"a", "b", "tp"}, {2, 2, 2}, 0, {1, 0}, {NULL, "a", "b"}, {0}, OTHER "2", 0},
    {"bad_replicas", {"a", "b", "tp"}, {1, 2, 2}, 0, {0, 1}, {NULL, "b", "a"}, {0}, OTHER "1", 0},
    {"bad_other_dim", {"a", "b", "tp"}, {2, 2, 2}, 0, {0, -1}, {NULL, "b"}, {0}, OTHER "2", 0},
    {"bad_named", {"dp", "b", "tp"}, {2, 2, 2}, 0, {0, -1}, {NULL, "b"}, {0}, OTHER "2", 0},
    {"idle_shards_tp", {"dp", "tp"}, {2, 2}, 0, {1, -1}, {NULL}, {0}, IDLE("dp"), 0},
    {"idle_copies_tp", {"dp", "tp"}, {2, 2}, 0, {-1, 1}, {NULL}, {0}, IDLE("dp"), 0},
    {"idle_hsdp", USUAL, {2, 2, 2}, 0, {2, 1}, {NULL}, {0}, IDLE("dp_replicate"), 0},
    {"idle_shard", USUAL, {2, 2, 2}, 0, {2, 0}, {NULL}, {0}, IDLE("dp_shard"), 0},
    {"idle_no_copies", USUAL, {2, 2, 2}, 0, {1, -1}, {NULL}, {0}, IDLE("dp_replicate"), 0},
    {"idle_no_shards", USUAL, {2, 2, 2}, 0, {-1, 0}, {NULL}, {0}, IDLE("dp_shard"), 0},
    {"idle_of_1", USUAL, {1, 2, 2}, 0, {1, -1}, {NULL}, {2, 1, 2}, NULL, 0},
    {"tp_called_dp", {"x", "dp"}, {2, 2}, 0, {0, -1}, {"dp"}, {2, 1, 2}, NULL, 0},
    {"bad_no_tp", {"dp", "model"}, {2, 2}, 0, {0, -1}, {NULL}, {0}, no_tp, 0},
};
TEST_P(dtensor_tp, dims_of_the_mesh, dims_rows) {
    int ranks = 1;
    for (int m = 0; m < 3 && row->shape[m]; m++) ranks *= row->shape[m];
    lab_run(ranks, NULL, rank_of_dims, (void *)(uintptr_t)row);
}

static void refused_tensors(lab_rank *r) {
    fsdp_world *w = r->w;
    fsdp_param_desc p = fsdp_mat("a", 4, 3);
    fsdp_placement rows = {FSDP_SHARD, 0, 0, 0};
    fsdp_param_view v, out;
    bed b;
    bed_open(&b, w, 1, 2, FSDP_DTYPE_KEEP);
    fsdp_unit *unit = bed_unit(&b, &p, &rows, 1, 0);
    const char *view = "[E101] tp_view: dm, local or out is NULL";
    v = lab_view(w, unit, 0);
    REFUSED(NULL, fsdp_tp_view(NULL, &v, &out), view);
    REFUSED(w, fsdp_tp_view(b.dm, NULL, &out), view);
    REFUSED(w, fsdp_tp_view(b.dm, &v, NULL), view);
    float full[12];
    const char *load = "[E101] tp_param_load: dm or unit is NULL";
    const char *gather = "[E101] tp_param_full: dm or unit is NULL";
    REFUSED(NULL, fsdp_tp_param_load(NULL, unit, 0, full), load);
    REFUSED(w, fsdp_tp_param_load(b.dm, NULL, 0, full), load);
    REFUSED(NULL, fsdp_tp_param_full(NULL, unit, 0, 0, full), gather);
    REFUSED(w, fsdp_tp_param_full(b.dm, NULL, 0, 0, full), gather);
    CHECK_STATUS(fsdp_tp_param_load(b.dm, unit, 0, NULL), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_tp_param_load(b.dm, unit, 1, full), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdp_tp_param_full(b.dm, unit, -1, 0, full), FSDP_ERR_INVALID_ARG);
    v.index = 1; /* not in the unit */
    CALL(w, fsdp_tp_view(b.dm, &v, &out));
    CHECK_EQ_MEM(&out, &v, sizeof v);
}
TEST(dtensor_tp, refused_tensors) { lab_run(2, NULL, refused_tensors, NULL); }

/* A unit made by fsdp_fully_shard is accepted as it is. */
static void plain_unit(lab_rank *r) {
    const int64_t shape[2] = {5, 3};
    fsdp_param_desc p = lab_desc(2, shape, 0, FSDP_F32, 0);
    const tensor t = {2, {5, 3}, NOT_CUT, 0, FSDP_F32};
    fsdp_param_view v, out;
    float full[15];
    bed b;
    bed_open(&b, r->w, 1, 2, FSDP_DTYPE_KEEP);
    fsdp_unit *unit = lab_unit(r->w, b.model, NULL, &p, 1);
    v = lab_view(r->w, unit, 0);
    CALL(r->w, fsdp_tp_view(b.dm, &v, &out));
    CHECK_EQ_MEM(&out, &v, sizeof v);
    for (int64_t i = 0; i < 15; i++) full[i] = (float)value_of(4, i);
    CALL(r->w, fsdp_tp_param_load(b.dm, unit, 0, full));
    whole_is(&b, unit, 0, &t, 4, 0, -1);
}
TEST(dtensor_tp, plain_unit) { lab_run(2, NULL, plain_unit, NULL); }

/* Replicas that diverge are found and named; parts of a sharded parameter have no replicas here. */
static void drift(lab_rank *r) {
    const int64_t rows = 6;
    const int32_t sizes[2] = {1, 3};
    fsdp_param_desc p = lab_desc(1, &rows, 0, FSDP_F32, 0);
    fsdp_placement whole = {FSDP_REPLICATE, 0, 0, 0}, cut = {FSDP_SHARD, 0, 0, 0};
    fsdp_placement place[2] = {{FSDP_SHARD, 0, 0, 0}, {FSDP_REPLICATE, 0, 0, 0}};
    fsdp_spec spec;
    bed b;
    bed_open(&b, r->w, 1, 3, FSDP_DTYPE_KEEP);
    fsdp_unit *unit[2] = {bed_unit(&b, &p, &whole, 1, 0), bed_unit(&b, &p, &cut, 1, 0)};
    for (int u = 0; u < 2; u++) {
        float *shard = (float *)lab_view(r->w, unit[u], 0).shard;
        if (u) place[1] = cut, place[0].order = 1; /* tp shards first */
        CHECK_OK(fsdp_spec_init(&spec, 2, sizes, place, FSDP_F32, 1, &rows));
        CALL(r->w, fsdp_dtensor_check(b.dm, &spec, shard, "norm"));
        if (r->rank == 2) shard[1] = 1;
        if (u) CALL(r->w, fsdp_dtensor_check(b.dm, &spec, shard, "norm"));
        else
            REFUSED_AS(FSDP_ERR_CORRUPT, r->w, fsdp_dtensor_check(b.dm, &spec, shard, "norm"),
                       "[E024] dtensor_check: 'norm': ranks");
        const char *text = fsdp_last_error(r->w);
        CHECK(u || strstr(text, "ranks 0 and 2 ") || strstr(text, "ranks 2 and 0 "));
    }
}
TEST(dtensor_tp, drift) { lab_run(3, NULL, drift, NULL); }

/* ---- lack of memory ------------------------------------------------------------------------- */

static fsdp_status all_calls(fsdp_world *w, const fsdp_mesh *mesh, fsdp_model **m) {
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_tp_unit_desc d = FSDP_ZERO;
    fsdp_dmesh *dm;
    fsdp_param_desc p[2] = {fsdp_mat("a", 4, 3), fsdp_vec("b", 3)};
    fsdp_placement cut[2] = {{FSDP_SHARD, 1, 0, 0}, {FSDP_SHARD, 0, 0, 0}};
    fsdp_placement whole[2] = {{FSDP_REPLICATE, 0, 0, 0}, {FSDP_REPLICATE, 0, 0, 0}};
    fsdp_unit *unit[2];
    float full[12] = {0};
    fsdp_status status = fsdp_model_create(w, NULL, m);
    dd.mesh = mesh;
    if (!status) status = fsdp_dmesh_create(*m, &dd, &dm);
    d.unit.params = p, d.unit.num_params = 2, d.tp = cut;
    if (!status) status = fsdp_tp_fully_shard(dm, &d, &unit[0]);
    d.tp = whole, d.partial_grads = 1;
    if (!status) status = fsdp_tp_fully_shard(dm, &d, &unit[1]);
    for (int u = 0; u < 2; u++) {
        if (!status) status = fsdp_tp_param_load(dm, unit[u], 0, full);
        if (!status) status = fsdp_tp_param_full(dm, unit[u], 0, 0, full);
    }
    return status;
}

/* Each allocation fails once; the world still works, and nothing leaks, which lab_run checks. */
static void scarce(lab_rank *r) {
    static const char *const names[3] = {"dp_replicate", "dp_shard", "tp"};
    const int32_t sizes[3] = {1, 1, 1};
    int *failures = (int *)r->arg;
    for (int ndim = 1; ndim <= 3; ndim++) {
        fsdp_mesh *mesh = lab_mesh(r->w, ndim, sizes, names + 3 - ndim, NULL);
        fsdp_status status = FSDP_ERR_OUT_OF_MEMORY;
        for (int n = 0; status; n++) {
            fsdp_model *m = NULL;
            r->heap->failures = 0;
            w_fail(r->heap, n);
            status = all_calls(r->w, mesh, &m);
            w_fail(r->heap, -1);
            W_CHECK(status == (r->heap->failures ? FSDP_ERR_OUT_OF_MEMORY : FSDP_OK),
                    "allocation %d: %s: %s", n, fsdp_status_name(status), fsdp_last_error(r->w));
            *failures += r->heap->failures;
            fsdp_model_destroy(m);
        }
    }
}
TEST(dtensor_tp, scarce_memory) {
    int failures = 0;
    lab_run(1, NULL, scarce, &failures);
    h_message("%d allocations failed, one after the other", failures);
    CHECK(failures > 30);
}
