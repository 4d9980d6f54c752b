/* gpt_tp.h - train_gpt.c with --tp N: each block is cut over N ranks by tensor parallelism, and FSDP
   shards what each of them has

   Attention is cut by heads, the MLP by hidden channels, embedding and logits by the vocabulary.
   Between these, every rank has its part of the tokens (sequence parallel): norms, biases after a
   sum and residuals work on those. With R = B*T tokens, r of them on this rank:

       x(r, C) -> norm -> gather -> (R, C) -> qkv, attention of my heads -> projection: addends (R, C)
                -> scatter -> (r, C) + bias + x -> norm -> gather -> fc, gelu -> fcproj: addends
                -> scatter -> (r, C) + bias + x

   gather is an all_gather of tokens, scatter a reduce_scatter of addends to tokens; in backward each
   is the other's. Cross-entropy needs two all_reduces of R numbers instead of all logits.

   SPDX-License-Identifier: MIT */
#ifndef GPT_TP_H
#define GPT_TP_H

// Parameters of a block that tensor parallelism cuts, and those that each of its ranks has whole.
static const int tp_cut[] = {GPT_QKVW, GPT_QKVB, GPT_ATTPROJW, GPT_FCW, GPT_FCB, GPT_FCPROJW};
static const int tp_whole[] = {GPT_LN1W, GPT_LN1B, GPT_ATTPROJB, GPT_LN2W, GPT_LN2B, GPT_FCPROJB};
enum { TP_CUT = 6, TP_WHOLE = 6, TP_EMBED_WHOLE = 3 }; // wpe, lnfw, lnfb are whole, too

typedef struct {
    gpt_param_spec spec; // first: `user` of a parameter points here
    int ordinal;         // the parameter's ordinal in a model without tensor parallelism
} tp_param;

typedef struct {
    float *ln1, *ln2;                                 // (R, C), gathered
    float *qkv, *atty;                                // (R, 3, Ch), (R, Ch) of my heads
    float *att;                                       // (B, Hh, T, T)
    float *mid;                                       // (r, C)
    float *fc, *gelu;                                 // (R, F) of my hidden channels
    float *ln1_mean, *ln1_rstd, *ln2_mean, *ln2_rstd; // (r)
} tp_block;

typedef struct {
    fsdp_mesh *mesh; // (dp, tp)
    fsdp_dmesh *dm;
    fsdp_unit *rest; // the replicated parameters of all blocks
    tp_param *params;
    int tokens, begin, mine;  // R; the first of this rank's tokens; r, their number
    int heads, width, hidden; // this rank's Hh, Ch, F
    int vocab, first;         // number and first of this rank's rows of wte
    fsdp_redistribution *gather, *scatter, *gather_grad, *scatter_grad, *max, *sums, *logits_row;
    float *narrow, *wide;      // (r, C), (R, C): what peers read
    float *row_max, *row_sums; // (R), (2, R)
    float *row;                // (V) logits of one token
    int64_t *targets;          // (R)
    float *dout;               // (R) gradient of each token's loss
    float *memory;
    tp_block *blocks;
    float *x, *lnf, *lnf_mean, *lnf_rstd, *logits; // (L+1, r, C), (R, C), (r), (r), (R, Vh)
    float *dx, *d1, *dwide, *d4, *datt;            // (r, C) twice, (R, C), (R, max(F, 3 Ch))
} tp_state;

static tp_state *tp_of(const trainer *t) { return (tp_state *)t->own; }

static int tp_share(int count, int n, int k, int *first) {
    fsdp_range range = {0, 0, 0};
    (void)fsdp_shard_range(count, n, k, &range);
    if (first) *first = (int)range.start;
    return (int)range.count;
}

/* ---- memory ---------------------------------------------------------------------------------- */

/* Divides memory among all arrays; with memory NULL it only counts. */
static size_t tp_place(const trainer *t, tp_state *s, float *memory) {
    const size_t R = (size_t)s->tokens, r = (size_t)s->mine, C = (size_t)t->cfg.channels;
    const size_t F = (size_t)s->hidden, W = (size_t)s->width, L = (size_t)t->cfg.layers;
    const size_t att = R * (size_t)s->heads * (size_t)t->cfg.context;
    const size_t widest = F > 3 * W ? F : 3 * W;
    size_t at = 0;
    struct {
        float **to;
        size_t numel;
    } all[] = {{&s->x, (L + 1) * r * C},
               {&s->lnf, R * C},
               {&s->lnf_mean, r},
               {&s->lnf_rstd, r},
               {&s->logits, R * (size_t)s->vocab},
               {&s->dx, r * C},
               {&s->d1, r * C},
               {&s->dwide, R * C},
               {&s->d4, R * widest},
               {&s->dout, R},
               {&s->datt, (size_t)GPT_ATT_ROWS * (size_t)t->cfg.context}};
    for (size_t i = 0; i < sizeof all / sizeof *all; at += all[i++].numel)
        if (memory) *all[i].to = memory + at;
    for (size_t l = 0; l < L; l++) {
        tp_block none, *b = memory ? &s->blocks[l] : &none;
        float **const to[] = {&b->ln1,      &b->ln2,      &b->qkv,      &b->atty,
                              &b->att,      &b->mid,      &b->fc,       &b->gelu,
                              &b->ln1_mean, &b->ln1_rstd, &b->ln2_mean, &b->ln2_rstd};
        const size_t numel[] = {R * C, R * C, R * 3 * W, R * W, att, r * C,
                                R * F, R * F, r,         r,     r,   r};
        for (int i = 0; i < 12; at += numel[i++])
            if (memory) *to[i] = memory + at;
    }
    return at;
}

static fsdp_status tp_open_math(trainer *t) {
    const int tp = t->tp, me = t->rank % tp;
    tp_state *s = (tp_state *)calloc(1, sizeof *s);
    t->own = s;
    if (!s) return FSDP_ERR_OUT_OF_MEMORY;
    s->tokens = t->cfg.batch * t->cfg.context;
    s->mine = tp_share(s->tokens, tp, me, &s->begin);
    s->heads = tp_share(t->cfg.heads, tp, me, NULL);
    s->width = s->heads * (t->cfg.channels / t->cfg.heads);
    s->hidden = tp_share(4 * t->cfg.channels, tp, me, NULL);
    s->vocab = tp_share(t->cfg.vocab, tp, me, &s->first);
    t->acts.nbytes = tp_place(t, s, NULL) * sizeof(float);
    s->memory = (float *)malloc(t->acts.nbytes);
    s->blocks = (tp_block *)calloc((size_t)t->cfg.layers, sizeof *s->blocks);
    s->targets = (int64_t *)malloc((size_t)s->tokens * sizeof *s->targets);
    s->params = (tp_param *)calloc(
        (size_t)(GPT_EMBED_PARAM_COUNT + t->cfg.layers * GPT_BLOCK_PARAM_COUNT), sizeof(tp_param));
    if (!s->memory || !s->blocks || !s->targets || !s->params) return FSDP_ERR_OUT_OF_MEMORY;
    (void)tp_place(t, s, s->memory);
    return FSDP_OK;
}

static void tp_close_math(trainer *t) {
    tp_state *s = tp_of(t);
    if (!s) return;
    free(s->params), free(s->targets), free(s->blocks), free(s->memory);
    free(s);
}

/* ---- the model, cut and sharded -------------------------------------------------------------- */

/* A parameter with the shape in which it is cut. */
static fsdp_param_desc tp_desc(const trainer *t, tp_param *p, int which) {
    fsdp_param_desc d = p->spec.cols ? fsdp_mat(p->spec.name, p->spec.rows, p->spec.cols)
                                     : fsdp_vec(p->spec.name, p->spec.rows);
    apart(t, which, &d);
    d.user = p;
    return d;
}

static tp_param *tp_param_of(const trainer *t, int layer, int which) { // layer -1: embed
    tp_state *s = tp_of(t);
    int ordinal = layer < 0 ? which : GPT_EMBED_PARAM_COUNT + layer * GPT_BLOCK_PARAM_COUNT + which;
    s->params[ordinal].spec = layer < 0 ? t->embed_specs[which] : t->block_specs[which];
    s->params[ordinal].ordinal = ordinal;
    return &s->params[ordinal];
}

static fsdp_status tp_add_unit(trainer *t, const char *name, fsdp_param_desc *params,
                               const fsdp_placement *tp, int count, int reshard, fsdp_unit **unit) {
    fsdp_tp_unit_desc d = FSDP_ZERO;
    d.unit.name = name;
    d.unit.params = params;
    d.unit.num_params = count;
    d.unit.reshard_after_forward = reshard;
    d.tp = tp;
    d.partial_grads = 1; // for replicated parameters: each rank sees its own tokens
    return fsdp_tp_fully_shard(tp_of(t)->dm, &d, unit);
}

/* Makes one unit of the parameters that tp replicates: one gather and one reduction for all norms
   and biases. Their names begin with that of the block. */
static fsdp_status tp_add_rest(trainer *t) {
    const int count = TP_EMBED_WHOLE + t->cfg.layers * TP_WHOLE;
    fsdp_param_desc *params = (fsdp_param_desc *)calloc((size_t)count, sizeof *params);
    fsdp_placement *tp = (fsdp_placement *)calloc((size_t)count, sizeof *tp); // all REPLICATE
    char(*names)[32] = (char(*)[32])calloc((size_t)count, sizeof *names);
    fsdp_status status = params && tp && names ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
    for (int i = 0; i < count && !status; i++) {
        const int layer = (i - TP_EMBED_WHOLE) / TP_WHOLE, is_embed = i < TP_EMBED_WHOLE;
        const int which = is_embed ? GPT_WPE + i : tp_whole[(i - TP_EMBED_WHOLE) % TP_WHOLE];
        params[i] = tp_desc(t, tp_param_of(t, is_embed ? -1 : layer, which), -1);
        if (is_embed) continue;
        snprintf(names[i], sizeof names[i], "h.%d.%s", layer, params[i].name);
        params[i].name = names[i];
    }
    if (!status)
        status = tp_add_unit(t, "rest", params, tp, count, FSDP_RESHARD_NEVER, &tp_of(t)->rest);
    free(names), free(tp), free(params);
    return status;
}

static fsdp_status tp_add_block(trainer *t, int layer) {
    static const int8_t dims[TP_CUT] = {1, 1, 1, 0, 0, 1}; // that tp cuts, in the order of tp_cut
    fsdp_param_desc params[TP_CUT];
    fsdp_placement tp[TP_CUT];
    char name[16];
    memset(tp, 0, sizeof tp);
    for (int i = 0; i < TP_CUT; i++) {
        params[i] = tp_desc(t, tp_param_of(t, layer, tp_cut[i]), tp_cut[i]);
        tp[i].kind = FSDP_SHARD;
        tp[i].dim = dims[i];
    }
    snprintf(name, sizeof name, "h.%d", layer);
    return tp_add_unit(t, name, params, tp, TP_CUT,
                       t->j->opt.reshard ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER,
                       &t->blocks[layer]);
}

static void tp_init_rows(void *user, const fsdp_param_view *block) {
    const trainer *t = (const trainer *)user;
    const tp_param *p = (const tp_param *)block->user;
    fsdp_param_view v;
    if (fsdp_tp_view(tp_of(t)->dm, block, &v)) return; // places are those in the whole tensor
    for (int64_t k = 0; k < v.numel; k++)
        fsdp_view_data_f32(&v)[k] = first_value(t->j, &p->spec, p->ordinal, fsdp_view_index(&v, k));
}

/* Returns the spec of a tensor that all of dp replicates, with a placement of `kind` on tp. */
static fsdp_spec tp_spec(const trainer *t, int kind, int op, int ndim, int64_t rows, int64_t cols) {
    const int32_t mesh[2] = {t->num_ranks / t->tp, t->tp};
    const int64_t shape[2] = {rows, cols};
    fsdp_placement place[2];
    fsdp_spec spec;
    memset(place, 0, sizeof place);
    memset(&spec, 0, sizeof spec);
    place[1].kind = (int8_t)kind;
    place[1].op = (int8_t)op;
    (void)fsdp_spec_init(&spec, 2, mesh, place, FSDP_F32, ndim, shape); // create checks it again
    return spec;
}

static fsdp_status tp_way(const trainer *t, const char *name, fsdp_spec from, fsdp_spec to,
                          fsdp_redistribution **out) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    d.name = name;
    d.from = from;
    d.to = to;
    return fsdp_redistribution_create(tp_of(t)->dm, &d, out);
}

/* The ways of activations, and memory that peers read in place. */
static fsdp_status tp_build_ways(trainer *t) {
    tp_state *s = tp_of(t);
    const int64_t R = s->tokens, C = t->cfg.channels, V = t->cfg.vocab;
    const fsdp_spec cut = tp_spec(t, FSDP_SHARD, 0, 2, R, C);
    const fsdp_spec whole = tp_spec(t, FSDP_REPLICATE, 0, 2, R, C);
    const fsdp_spec addends = tp_spec(t, FSDP_PARTIAL, FSDP_SUM, 2, R, C);
    fsdp_redistribution_info narrow, wide;
    fsdp_status status = tp_way(t, "gather", cut, whole, &s->gather);
    if (!status) status = tp_way(t, "scatter", addends, cut, &s->scatter);
    if (!status) status = fsdp_redistribution_create_backward(s->gather, &addends, &s->gather_grad);
    if (!status) status = fsdp_redistribution_create_backward(s->scatter, NULL, &s->scatter_grad);
    if (!status)
        status = tp_way(t, "row max", tp_spec(t, FSDP_PARTIAL, FSDP_MAX, 1, R, 0),
                        tp_spec(t, FSDP_REPLICATE, 0, 1, R, 0), &s->max);
    if (!status)
        status = tp_way(t, "row sums", tp_spec(t, FSDP_PARTIAL, FSDP_SUM, 2, 2, R),
                        tp_spec(t, FSDP_REPLICATE, 0, 2, 2, R), &s->sums);
    if (!status)
        status = tp_way(t, "logits", tp_spec(t, FSDP_SHARD, 0, 1, V, 0),
                        tp_spec(t, FSDP_REPLICATE, 0, 1, V, 0), &s->logits_row);
    if (!status) status = fsdp_redistribution_get(s->gather, &narrow);
    if (!status) status = fsdp_redistribution_get(s->scatter, &wide);
    if (!status) status = fsdp_dmesh_alloc(s->dm, narrow.src_capacity, (void **)&s->narrow);
    if (!status) status = fsdp_dmesh_alloc(s->dm, wide.src_capacity, (void **)&s->wide);
    if (!status) status = fsdp_dmesh_alloc(s->dm, R * 4, (void **)&s->row_max);
    if (!status) status = fsdp_dmesh_alloc(s->dm, 2 * R * 4, (void **)&s->row_sums);
    if (!status) status = fsdp_dmesh_alloc(s->dm, V * 4, (void **)&s->row);
    return status;
}

static fsdp_status tp_build_model(trainer *t) {
    tp_state *s = tp_of(t);
    fsdp_mesh_desc mesh = FSDP_ZERO;
    fsdp_model_desc model = FSDP_ZERO;
    fsdp_dmesh_desc dm = FSDP_ZERO;
    fsdp_mesh_info info;
    const fsdp_placement rows = {FSDP_SHARD, 0, 0, 0};
    mesh.ndim = 2;
    mesh.shape[0] = t->num_ranks / t->tp, mesh.shape[1] = t->tp;
    mesh.names[0] = "dp", mesh.names[1] = "tp";
    fsdp_status status = fsdp_mesh_create(t->world, &mesh, &s->mesh);
    // Norms are over all ranks: the model's mesh has them all.
    if (!status) status = fsdp_mesh_info_init(s->mesh, FSDP_MESH_INFO_HSDP, 0, 1, &info);
    model.mesh_info = &info;
    if (!status) status = fsdp_model_create(t->world, &model, &t->model);
    dm.mesh = s->mesh;
    if (!status) status = fsdp_dmesh_create(t->model, &dm, &s->dm);
    if (!status) status = tp_add_rest(t);
    fsdp_param_desc wte = tp_desc(t, tp_param_of(t, -1, GPT_WTE), -1);
    if (!status) status = tp_add_unit(t, "embed", &wte, &rows, 1, FSDP_RESHARD_NEVER, &t->embed);
    for (int l = 0; l < t->cfg.layers && !status; l++) status = tp_add_block(t, l);
    if (!status) status = tp_build_ways(t);
    if (!status) status = fsdp_model_predict(t->model, &t->predicted);
    if (!status) status = fsdp_init_params(t->model, tp_init_rows, t);
    if (!status) status = fsdp_model_reserve(t->model);
    if (!status) status = create_optimizer(t, NULL, NULL);
    if (!status && t->j->opt.plan) status = fsdp_plan_create(t->model, NULL, &t->plan);
    return status;
}

/* The place of this rank's part in the whole, and the names of a model without tensor parallelism:
   what is whole belongs to `rest` here, and there to embed and to the blocks. */
static void place_param(void *user, const fsdp_param_view *param, fsdp_checkpoint_place *place) {
    const trainer *t = (const trainer *)user;
    fsdp_param_view v;
    if (t->tp == 1 || fsdp_tp_view(tp_of(t)->dm, param, &v)) return;
    for (int d = 0; d < param->ndim; d++) {
        place->shape[d] = v.shape[d];
        place->start[d] = v.start[d] - param->start[d];
    }
    if (param->unit == tp_of(t)->rest)
        snprintf(place->name, sizeof place->name, "%s%s",
                 param->index < TP_EMBED_WHOLE ? "embed." : "", param->name);
}

/* Pointers of a block's parameters, or of their gradients, in the order of enum gpt_block_param. */
static void tp_block_pointers(const trainer *t, int layer, int grads, float **w) {
    void *(*get)(fsdp_unit *, int) = grads ? fsdp_grad : fsdp_data;
    for (int i = 0; i < TP_CUT; i++) w[tp_cut[i]] = (float *)get(t->blocks[layer], i);
    for (int i = 0; i < TP_WHOLE; i++)
        w[tp_whole[i]] = (float *)get(tp_of(t)->rest, TP_EMBED_WHOLE + layer * TP_WHOLE + i);
}

static void tp_embed_pointers(const trainer *t, int grads, float **w) {
    void *(*get)(fsdp_unit *, int) = grads ? fsdp_grad : fsdp_data;
    w[GPT_WTE] = (float *)get(t->embed, 0);
    for (int i = 0; i < TP_EMBED_WHOLE; i++) w[GPT_WPE + i] = (float *)get(tp_of(t)->rest, i);
}

/* ---- forward --------------------------------------------------------------------------------- */

// As the hooks, redistributions are not checked one by one: after a failure they return at once,
// and fsdp_finalize_backward tells.

/* out(R, OC) = x(R, IC) w(OC, IC)^T, without a bias: addends of the tp ranks */
static void tp_addends(float *out, const float *x, const float *w, int R, int IC, int OC) {
    memset(out, 0, (size_t)R * (size_t)OC * sizeof *out);
    if (IC) gemm_f32(GEMM_TRANS_B | GEMM_ADD, R, OC, IC, x, IC, w, IC, out, OC);
}

/* x_out(r, C) = x(r, C) + bias(C) + sum(r, C) */
static void tp_residual(float *x_out, const float *x, const float *bias, const float *sum, int r,
                        int C) {
    for (int i = 0; i < r; i++)
        for (int c = 0; c < C; c++, x_out++) *x_out = *x++ + *sum++ + bias[c];
}

static void tp_norm(const trainer *t, float *whole, float *mean, float *rstd, const float *x,
                    const float *w, const float *b) {
    tp_state *s = tp_of(t);
    gpt_layernorm_forward(s->narrow, mean, rstd, x, w, b, s->mine, t->cfg.channels);
    (void)fsdp_redistribute(s->gather, whole, s->narrow);
}

static void tp_block_forward(const trainer *t, const gpt_config *cfg, float *const *w, tp_block *b,
                             const float *x, float *x_out) {
    tp_state *s = tp_of(t);
    const int R = s->tokens, C = cfg->channels, W = s->width;
    tp_norm(t, b->ln1, b->ln1_mean, b->ln1_rstd, x, w[GPT_LN1W], w[GPT_LN1B]);
    if (W) {
        gpt_linear_forward(b->qkv, b->ln1, w[GPT_QKVW], w[GPT_QKVB], R, C, 3 * W);
        gpt_attention_forward(b->atty, b->att, b->qkv, cfg->batch, cfg->context, W, s->heads);
    }
    tp_addends(s->wide, b->atty, w[GPT_ATTPROJW], R, W, C);
    (void)fsdp_redistribute(s->scatter, s->d1, s->wide);
    tp_residual(b->mid, x, w[GPT_ATTPROJB], s->d1, s->mine, C);
    tp_norm(t, b->ln2, b->ln2_mean, b->ln2_rstd, b->mid, w[GPT_LN2W], w[GPT_LN2B]);
    if (s->hidden) {
        gpt_linear_forward(b->fc, b->ln2, w[GPT_FCW], w[GPT_FCB], R, C, s->hidden);
        gpt_gelu_forward(b->gelu, b->fc, (ptrdiff_t)R * s->hidden);
    }
    tp_addends(s->wide, b->gelu, w[GPT_FCPROJW], R, s->hidden, C);
    (void)fsdp_redistribute(s->scatter, s->d1, s->wide);
    tp_residual(x_out, b->mid, w[GPT_FCPROJB], s->d1, s->mine, C);
}

/* x(r, C): rows of wte that another rank has count as zeros, and the sum is the embedding. */
static void tp_embed_forward(const trainer *t, const gpt_config *cfg, float *const *w, float *x) {
    tp_state *s = tp_of(t);
    const int C = cfg->channels;
    memset(s->wide, 0, (size_t)s->tokens * (size_t)C * sizeof(float));
    for (int i = 0; i < s->tokens; i++) {
        const int row = t->inputs[i] - s->first;
        if (row >= 0 && row < s->vocab)
            memcpy(s->wide + (ptrdiff_t)i * C, w[GPT_WTE] + (ptrdiff_t)row * C,
                   (size_t)C * sizeof(float));
    }
    (void)fsdp_redistribute(s->scatter, x, s->wide);
    for (int i = 0; i < s->mine; i++)
        for (int c = 0; c < C; c++, x++)
            *x += w[GPT_WPE][(ptrdiff_t)((s->begin + i) % cfg->context) * C + c];
}

/* The residual stream before block `layer`, (r, C) */
static float *tp_x(const trainer *t, int layer) {
    const tp_state *s = tp_of(t);
    return s->x + (size_t)layer * (size_t)s->mine * (size_t)t->cfg.channels;
}

static void tp_logits(const trainer *t, const gpt_config *cfg) {
    tp_state *s = tp_of(t);
    float *we[GPT_EMBED_PARAM_COUNT], *w[GPT_BLOCK_PARAM_COUNT];
    fsdp_pre_forward(s->rest);
    fsdp_pre_forward(t->embed);
    tp_embed_pointers(t, 0, we);
    tp_embed_forward(t, cfg, we, tp_x(t, 0));
    for (int l = 0; l < cfg->layers; l++) {
        fsdp_pre_forward(t->blocks[l]);
        tp_block_pointers(t, l, 0, w);
        tp_block_forward(t, cfg, w, &s->blocks[l], tp_x(t, l), tp_x(t, l + 1));
        fsdp_post_forward(t->blocks[l]);
    }
    tp_norm(t, s->lnf, s->lnf_mean, s->lnf_rstd, tp_x(t, cfg->layers), we[GPT_LNFW], we[GPT_LNFB]);
    if (s->vocab)
        gemm_f32(GEMM_TRANS_B, s->tokens, s->vocab, cfg->channels, s->lnf, cfg->channels,
                 we[GPT_WTE], cfg->channels, s->logits, s->vocab);
    fsdp_post_forward(t->embed);
    fsdp_post_forward(s->rest);
}

/* The summed loss of this rank's batch; what its gradient needs stays in row_max and row_sums. */
static double tp_forward(trainer *t) {
    tp_state *s = tp_of(t);
    const int R = s->tokens;
    double sum = 0.0;
    tp_logits(t, &t->cfg);
    for (int i = 0; i < R; i++)
        s->targets[i] = t->targets[i], s->dout[i] = t->targets[i] == GPT_IGNORED ? 0.0f : 1.0f;
    (void)fsdp_loss_parallel_max(s->logits, FSDP_F32, R, s->vocab, s->row_max);
    (void)fsdp_redistribute(s->max, s->row_max, s->row_max);
    (void)fsdp_loss_parallel_sums(s->logits, FSDP_F32, R, s->vocab, s->first, s->targets,
                                  s->row_max, s->row_sums);
    (void)fsdp_redistribute(s->sums, s->row_sums, s->row_sums);
    for (int i = 0; i < R; i++)
        if (t->targets[i] != GPT_IGNORED)
            sum += log((double)s->row_sums[i]) - (double)s->row_sums[R + i];
    return sum;
}

/* ---- backward -------------------------------------------------------------------------------- */

/* bias(C) += columns of my rows of dx */
static void tp_bias_backward(float *bias, const float *dx, int r, int C) {
    for (int i = 0; i < r; i++)
        for (int c = 0; c < C; c++) bias[c] += dx[(ptrdiff_t)i * C + c];
}

/* dw(OC, IC) += dout(R, OC)^T x(R, IC), and dx(R, IC) = dout w */
static void tp_product_backward(float *dx, float *dw, const float *dout, const float *x,
                                const float *w, int R, int IC, int OC) {
    if (!IC) return;
    gemm_f32(GEMM_TRANS_A | GEMM_ADD, OC, IC, R, dout, OC, x, IC, dw, IC);
    gemm_f32(0, R, IC, OC, dout, OC, w, IC, dx, IC);
}

/* Behind a linear layer that was cut by columns: its addends of dx, summed and cut by tokens. */
static void tp_columns_backward(const trainer *t, float *dx, float *dw, float *dbias,
                                const float *dout, const float *x, const float *w, int OC) {
    tp_state *s = tp_of(t);
    const int C = t->cfg.channels;
    if (OC) gpt_linear_backward(s->wide, dw, dbias, dout, x, w, s->tokens, C, OC);
    else memset(s->wide, 0, (size_t)s->tokens * (size_t)C * sizeof(float));
    (void)fsdp_redistribute(s->gather_grad, dx, s->wide);
}

/* dwide(R, C) = the gradients of all tokens, of which this rank has dx(r, C) */
static void tp_all_tokens(const trainer *t) {
    tp_state *s = tp_of(t);
    memcpy(s->narrow, s->dx, (size_t)s->mine * (size_t)t->cfg.channels * sizeof(float));
    (void)fsdp_redistribute(s->scatter_grad, s->dwide, s->narrow);
}

/* s->dx(r, C) holds the gradient of x_out and becomes that of x */
static void tp_block_backward(const trainer *t, float *const *w, float *const *g, const tp_block *b,
                              const float *x) {
    tp_state *s = tp_of(t);
    const gpt_config *cfg = &t->cfg;
    const int R = s->tokens, r = s->mine, C = cfg->channels, W = s->width, F = s->hidden;
    tp_bias_backward(g[GPT_FCPROJB], s->dx, r, C);
    tp_all_tokens(t);
    tp_product_backward(s->d4, g[GPT_FCPROJW], s->dwide, b->gelu, w[GPT_FCPROJW], R, F, C);
    gpt_gelu_backward(s->d4, b->fc, (ptrdiff_t)R * F);
    tp_columns_backward(t, s->d1, g[GPT_FCW], g[GPT_FCB], s->d4, b->ln2, w[GPT_FCW], F);
    gpt_layernorm_backward(s->dx, 1, g[GPT_LN2W], g[GPT_LN2B], s->d1, b->mid, w[GPT_LN2W],
                           b->ln2_mean, b->ln2_rstd, r, C);
    tp_bias_backward(g[GPT_ATTPROJB], s->dx, r, C);
    tp_all_tokens(t);
    if (W) {
        float *datty = s->wide; // free until the sum
        tp_product_backward(datty, g[GPT_ATTPROJW], s->dwide, b->atty, w[GPT_ATTPROJW], R, W, C);
        gpt_attention_backward(s->d4, s->datt, datty, b->qkv, b->att, cfg->batch, cfg->context, W,
                               s->heads);
    }
    tp_columns_backward(t, s->d1, g[GPT_QKVW], g[GPT_QKVB], s->d4, b->ln1, w[GPT_QKVW], 3 * W);
    gpt_layernorm_backward(s->dx, 1, g[GPT_LN1W], g[GPT_LN1B], s->d1, x, w[GPT_LN1W], b->ln1_mean,
                           b->ln1_rstd, r, C);
}

/* From the logits to the gradient of the last residual stream. */
static void tp_head_backward(const trainer *t, float *const *w, float *const *g) {
    tp_state *s = tp_of(t);
    const int R = s->tokens, C = t->cfg.channels, V = s->vocab;
    (void)fsdp_loss_parallel_grad(s->logits, s->logits, FSDP_F32, R, V, s->first, s->targets,
                                  s->row_max, s->row_sums, s->dout);
    memset(s->wide, 0, (size_t)R * (size_t)C * sizeof(float));
    if (V) {
        gemm_f32(0, R, C, V, s->logits, V, w[GPT_WTE], C, s->wide, C);
        gemm_f32(GEMM_TRANS_A | GEMM_ADD, V, C, R, s->logits, V, s->lnf, C, g[GPT_WTE], C);
    }
    (void)fsdp_redistribute(s->gather_grad, s->d1, s->wide);
    gpt_layernorm_backward(s->dx, 0, g[GPT_LNFW], g[GPT_LNFB], s->d1, tp_x(t, t->cfg.layers),
                           w[GPT_LNFW], s->lnf_mean, s->lnf_rstd, s->mine, C);
}

static void tp_embed_backward(const trainer *t, float *const *g) {
    tp_state *s = tp_of(t);
    const int C = t->cfg.channels;
    for (int i = 0; i < s->mine; i++) {
        float *row = g[GPT_WPE] + (ptrdiff_t)((s->begin + i) % t->cfg.context) * C;
        for (int c = 0; c < C; c++) row[c] += s->dx[(ptrdiff_t)i * C + c];
    }
    tp_all_tokens(t);
    for (int i = 0; i < s->tokens; i++) {
        const int row = t->inputs[i] - s->first;
        for (int c = 0; c < C && row >= 0 && row < s->vocab; c++)
            g[GPT_WTE][(ptrdiff_t)row * C + c] += s->dwide[(ptrdiff_t)i * C + c];
    }
}

static fsdp_status tp_backward(trainer *t) {
    tp_state *s = tp_of(t);
    float *we[GPT_EMBED_PARAM_COUNT], *ge[GPT_EMBED_PARAM_COUNT];
    float *w[GPT_BLOCK_PARAM_COUNT], *g[GPT_BLOCK_PARAM_COUNT];
    fsdp_pre_backward(s->rest);
    fsdp_pre_backward(t->embed);
    tp_embed_pointers(t, 0, we);
    tp_embed_pointers(t, 1, ge);
    tp_head_backward(t, we, ge);
    for (int l = t->cfg.layers - 1; l >= 0; l--) {
        fsdp_pre_backward(t->blocks[l]);
        tp_block_pointers(t, l, 0, w);
        tp_block_pointers(t, l, 1, g);
        tp_block_backward(t, w, g, &s->blocks[l], tp_x(t, l));
        fsdp_post_backward(t->blocks[l]);
    }
    tp_embed_backward(t, ge);
    fsdp_post_backward(t->embed);
    fsdp_post_backward(s->rest);
    return fsdp_finalize_backward(t->model);
}

/* ---- after training -------------------------------------------------------------------------- */

/* The ways for `tokens` tokens instead of those of a batch, or back. */
static fsdp_status tp_resize(trainer *t, int tokens) {
    tp_state *s = tp_of(t);
    fsdp_redistribution *const ways[] = {s->gather, s->scatter};
    fsdp_status status = FSDP_OK;
    for (int i = 0; i < 2 && !status; i++) status = fsdp_redistribution_resize(ways[i], 0, tokens);
    s->tokens = tokens;
    s->mine = tp_share(tokens, t->tp, t->rank % t->tp, &s->begin);
    return status;
}

/* All ranks compute, since each has a part of every product; inputs are those of rank 0. */
static fsdp_status tp_next_logits(trainer *t, int length, const float **logits) {
    tp_state *s = tp_of(t);
    gpt_config cfg = t->cfg;
    int32_t shared = length;
    fsdp_status status = fsdp_broadcast(t->world, NULL, &shared, sizeof shared, 0);
    cfg.batch = 1;
    cfg.context = (int)shared;
    if (!status) status = fsdp_broadcast(t->world, NULL, t->inputs, shared, 0);
    if (!status) status = tp_resize(t, (int)shared);
    if (status) return status;
    tp_logits(t, &cfg);
    status = fsdp_redistribute(s->logits_row, s->row,
                               s->logits + (ptrdiff_t)(s->tokens - 1) * s->vocab);
    *logits = s->row;
    return status;
}

#endif // GPT_TP_H
