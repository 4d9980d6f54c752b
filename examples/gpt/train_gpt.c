/* train_gpt.c - trains a small GPT on bytes of text, every rank holding one part of each parameter

   Each transformer block is one unit of fsdp.h: gathered before its forward, freed after it,
   gathered again for its backward, its gradient averaged and scattered back. Embeddings and final
   norm are one unit that stays open around the blocks. The arithmetic is in gpt.h, options and text
   in gpt_host.h; train_gpt.cu is the same program on GPUs.

   Build (in the repository's root; `make run` does it and starts 4 ranks):
       cc -O3 -march=native -ffp-contract=fast -I. examples/gpt/train_gpt.c -o train_gpt -pthread -lm
   With OpenBLAS: add -DGEMM_BLAS $(pkg-config --cflags --libs openblas). On a processor with
   AVX2 or AVX-512 it is not faster.
   Run:
       ./train_gpt --ranks 4                   processes of this host, no launcher needed
       tools/fsdprun -n 4 ./train_gpt          or torchrun --no-python: the environment tells
       ./train_gpt --ranks 4 --save run --save-every 500
       ./train_gpt --ranks 3 --save run --save-every 500 --resume
       ./train_gpt --help                      all options

   Parameters, batches and text depend on --seed and not on the number of ranks, so that runs on 1,
   2, 3 or 4 ranks show the same losses, rounding apart.
   Exit status: 0 done, 1 something failed on the way, 2 the request is impossible.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // getopt_long, scandir under -std=c99 too
#endif

#include "examples/gpt/gpt.h" // gpt_*

#ifndef TRAINER_LIBRARY_APART // the Makefile compiles both at the same time
#define FSDP_IMPLEMENTATION
#endif
#include "fsdp.h"            // fsdp_*
#include "fsdp_muon.h"       // fsdp_muon_*, fsdp_adamw_*
#include "fsdp_plan.h"       // fsdp_plan_*
#include "fsdp_dtensor.h"    // fsdp_tp_*, fsdp_redistribute
#include "fsdp_checkpoint.h" // fsdp_checkpoint_*
#include "fsdp_trace.h"      // fsdp_trace_*

#define PROGRAM "train_gpt"
#include "examples/gpt/gpt_host.h" // options, text, what is shown; it calls some of these
#include "examples/gpt/gpt_tp.h"   // the same with --tp: tp_*

static fsdp_status open_math(trainer *t) {
    if (t->tp > 1 ? !tp_open_math(t) : !gpt_acts_create(&t->cfg, &t->acts)) return FSDP_OK;
    fprintf(stderr, PROGRAM ": rank %d: no memory for the activations\n", t->rank);
    return FSDP_ERR_OUT_OF_MEMORY;
}

static void close_math(trainer *t) {
    if (t->tp > 1) tp_close_math(t);
    else gpt_acts_destroy(&t->acts);
}

/* ---- the model, sharded ---------------------------------------------------------------------- */

static fsdp_status build_model(trainer *t) {
    const options *opt = &t->j->opt;
    const int reshard = opt->reshard ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER;
    if (t->tp > 1) return tp_build_model(t);
    fsdp_status status = fsdp_model_create(t->world, NULL, &t->model);
    if (status) return status;
    status = add_unit(t, "embed", t->embed_specs, GPT_EMBED_PARAM_COUNT, FSDP_RESHARD_NEVER,
                      &t->embed);
    for (int l = 0; l < t->cfg.layers && !status; l++) {
        char name[16];
        snprintf(name, sizeof name, "h.%d", l);
        status = add_unit(t, name, t->block_specs, GPT_BLOCK_PARAM_COUNT, reshard, &t->blocks[l]);
    }
    if (!status) status = fsdp_model_predict(t->model, &t->predicted);
    if (!status) status = fsdp_init_params(t->model, init_rows, t);
    if (!status) status = fsdp_model_reserve(t->model); // too little memory shows now
    if (!status) status = create_optimizer(t, NULL, NULL);
    if (!status && t->j->opt.plan) status = fsdp_plan_create(t->model, NULL, &t->plan);
    return status;
}

static void unit_data(fsdp_unit *unit, int count, float **w) {
    for (int i = 0; i < count; i++) w[i] = fsdp_data_f32(unit, i);
}

static void unit_grad(fsdp_unit *unit, int count, float **g) {
    for (int i = 0; i < count; i++) g[i] = fsdp_grad_f32(unit, i);
}

/* ---- one step: forward, backward, update ----------------------------------------------------- */

// The hooks are not checked one by one: after a failure they return at once, fsdp_data still gives
// memory to work on, and fsdp_finalize_backward tells.

/* This rank's sequences of a step: those from rank*B on of the global batch; ranks of tp share.
   t->counted: the targets that count, over all ranks. */
static fsdp_status fill_batch(trainer *t, int step) {
    const job *j = t->j;
    const int context = t->cfg.context;
    t->counted = 0;
    for (int b = 0; b < t->cfg.batch; b++) {
        const uint8_t *from = j->text + sequence_start(j->opt.seed, step,
                                                       t->rank / t->tp * t->cfg.batch + b,
                                                       j->text_nbytes, context);
        int16_t *targets = t->targets + (ptrdiff_t)b * context;
        memcpy(t->inputs + (ptrdiff_t)b * context, from, (size_t)context);
        for (int i = 0, counts = 1; i < context; i++) {
            targets[i] = counts ? from[i + 1] : GPT_IGNORED;
            t->counted += counts;
            if (j->opt.lines && from[i + 1] == '\n') counts = 0;
        }
    }
    t->counted /= t->tp; // ranks of tp have the same
    return fsdp_all_reduce(t->world, NULL, &t->counted, 1, FSDP_F64, FSDP_SUM);
}

/* From a rank's summed loss to the mean over the tokens of all ranks. */
static fsdp_status mean_loss(trainer *t, double *loss) {
    *loss /= t->counted * t->tp;
    return fsdp_all_reduce(t->world, NULL, loss, 1, FSDP_F64, FSDP_SUM);
}

static double forward(trainer *t) {
    const gpt_config *cfg = &t->cfg;
    gpt_acts *acts = &t->acts;
    float *we[GPT_EMBED_PARAM_COUNT], *w[GPT_BLOCK_PARAM_COUNT];
    fsdp_pre_forward(t->embed);
    unit_data(t->embed, GPT_EMBED_PARAM_COUNT, we);
    gpt_embed_forward(cfg, we, t->inputs, gpt_x(cfg, acts, 0));
    for (int l = 0; l < cfg->layers; l++) {
        fsdp_pre_forward(t->blocks[l]);
        unit_data(t->blocks[l], GPT_BLOCK_PARAM_COUNT, w);
        gpt_block_forward(cfg, w, &acts->blocks[l], acts->tmp, gpt_x(cfg, acts, l),
                          gpt_x(cfg, acts, l + 1));
        fsdp_post_forward(t->blocks[l]);
    }
    gpt_head_forward(cfg, we, acts, gpt_x(cfg, acts, cfg->layers));
    fsdp_post_forward(t->embed);
    return gpt_loss_forward(cfg, acts, t->targets);
}

static fsdp_status backward(trainer *t) {
    const gpt_config *cfg = &t->cfg;
    gpt_acts *acts = &t->acts;
    float *we[GPT_EMBED_PARAM_COUNT], *ge[GPT_EMBED_PARAM_COUNT];
    float *w[GPT_BLOCK_PARAM_COUNT], *g[GPT_BLOCK_PARAM_COUNT];
    gpt_loss_backward(cfg, acts, t->targets, t->num_ranks > 1 ? 1.0f : (float)(1 / t->counted));
    fsdp_pre_backward(t->embed);
    unit_data(t->embed, GPT_EMBED_PARAM_COUNT, we);
    unit_grad(t->embed, GPT_EMBED_PARAM_COUNT, ge);
    gpt_head_backward(cfg, we, ge, acts, gpt_x(cfg, acts, cfg->layers));
    for (int l = cfg->layers - 1; l >= 0; l--) {
        fsdp_pre_backward(t->blocks[l]);
        unit_data(t->blocks[l], GPT_BLOCK_PARAM_COUNT, w);
        unit_grad(t->blocks[l], GPT_BLOCK_PARAM_COUNT, g);
        gpt_block_backward(cfg, w, g, &acts->blocks[l], acts, gpt_x(cfg, acts, l));
        fsdp_post_backward(t->blocks[l]);
    }
    gpt_embed_backward(cfg, ge, t->inputs, acts->dx);
    fsdp_post_backward(t->embed);
    return fsdp_finalize_backward(t->model);
}

static fsdp_status train_step(trainer *t, int step, int look, double *loss, double *norm) {
    (void)look; // the numbers are at hand
    fsdp_status status = fill_batch(t, step);
    // Ranks count different numbers of tokens: gradients of sums, divided by the tokens of all. One
    // rank divides its loss: a factor would take memory for full gradients.
    if (!status && t->num_ranks > 1)
        status = fsdp_set_gradient_divide_factor(t->model, NULL, t->counted);
    if (status) return status;
    *loss = t->tp > 1 ? tp_forward(t) : forward(t);
    status = t->tp > 1 ? tp_backward(t) : backward(t);
    if (!status) status = mean_loss(t, loss);
    if (!status) status = fsdp_clip_grad_norm(t->model, MAX_GRAD_NORM, norm);
    if (!status) status = optimizer_step(t, step);
    if (!status) status = fsdp_zero_grad(t->model);
    return status;
}

/* ---- after training -------------------------------------------------------------------------- */

static fsdp_status batch_loss(trainer *t, int step, double *loss) {
    const fsdp_status status = fill_batch(t, step);
    if (status) return status;
    *loss = t->tp > 1 ? tp_forward(t) : forward(t);
    return mean_loss(t, loss);
}

/* Every rank opens every unit, because parameters are gathered from all; only rank 0 computes. */
static fsdp_status next_logits(trainer *t, int length, const float **logits) {
    gpt_config cfg = t->cfg;
    gpt_acts *acts = &t->acts;
    float *we[GPT_EMBED_PARAM_COUNT], *w[GPT_BLOCK_PARAM_COUNT];
    if (t->tp > 1) return tp_next_logits(t, length, logits);
    cfg.batch = 1;
    cfg.context = length;
    fsdp_status status = fsdp_pre_forward(t->embed);
    unit_data(t->embed, GPT_EMBED_PARAM_COUNT, we);
    if (t->rank == 0) gpt_embed_forward(&cfg, we, t->inputs, gpt_x(&cfg, acts, 0));
    for (int l = 0; l < cfg.layers && !status; l++) {
        status = fsdp_pre_forward(t->blocks[l]);
        unit_data(t->blocks[l], GPT_BLOCK_PARAM_COUNT, w);
        if (t->rank == 0) {
            gpt_block_forward(&cfg, w, &acts->blocks[l], acts->tmp, gpt_x(&cfg, acts, l),
                              gpt_x(&cfg, acts, l + 1));
        }
        fsdp_post_forward(t->blocks[l]);
    }
    if (t->rank == 0) gpt_head_forward(&cfg, we, acts, gpt_x(&cfg, acts, cfg.layers));
    fsdp_post_forward(t->embed);
    *logits = acts->logits + (ptrdiff_t)(length - 1) * cfg.vocab;
    return status;
}

int main(int argc, char **argv) { return gpt_main(argc, argv); }
