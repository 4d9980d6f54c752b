/* train_gpt.cu - train_gpt.c on GPUs: the same model, the same text, the same losses

   What fsdp.h is asked for is what train_gpt.c asks for; compare build_model, forward, backward and
   train_step of the two. Five things changed:
   1  the build: nvcc, -DFSDP_BACKEND_NCCL and two libraries
   2  the arithmetic: gpt_cuda.h for gpt.h. fsdp_data and fsdp_grad are device pointers, ready in
      the order of the default stream, on which it runs
   3  memory of activations and of batches: cudaMalloc; the text is on the device, too
   4  the loss stays on the device, and is looked at only every --log-every steps
   5  --bf16: param_dtype, a field of fsdp_model_desc
   Loss and norm are brought to the host where they are shown: no other step waits for the GPU.
   With --graph, on one rank, the GPU gets all but the update as one CUDA graph (see capture).

   Build (in the repository's root):
       nvcc -O3 -I. -DFSDP_BACKEND_NCCL examples/gpt/train_gpt.cu -o train_gpt_cuda -lnccl -lcublas
   Run: one rank per GPU
       ./train_gpt_cuda                        one GPU
       tools/fsdprun -n 4 ./train_gpt_cuda     or torchrun --no-python: the environment tells
       ./train_gpt_cuda --help                 all options
   On a machine without GPU it is compiled as C++ with the stand-in headers of tests/stubs.

   --plain is the same trainer without the library, on one GPU: parameters, gradients and moments in
   plain memory. The difference in time is what the library costs.
   Exit status: 0 done, 1 something failed on the way, 2 the request is impossible.

   SPDX-License-Identifier: MIT */
#include "examples/gpt/gpt_cuda.h" // gpt_cuda_*

#define FSDP_IMPLEMENTATION
#include "fsdp.h"       // fsdp_*
#include "fsdp_muon.h"  // fsdp_muon_*, fsdp_adamw_*
#include "fsdp_trace.h" // fsdp_trace_*

#include "backends/fsdp_cuda_gemm.h"    // fsdp_cuda_gemm
#include "backends/fsdp_cuda_kernels.h" // fsdp_cuda_update, for --plain

#define PROGRAM "train_gpt_cuda"
#define GPT_ON_GPU
#include "examples/gpt/gpt_host.h" // options, text, what is shown; it calls some of these

enum { EAGER_STEPS = 2 }; // steps of --graph before the capture

// State of a rank in addition to its trainer.
typedef struct {
    gpt_cuda gpu;
    uint8_t *text; // all of it, on the device
    float *logits; // (V), on the host
    // --graph
    cudaStream_t stream;   // the caller's own: the default stream cannot be captured
    cudaGraphExec_t graph; // forward and backward; NULL: not captured yet
    // --plain: flat, matrices first, in the order of the model otherwise
    int64_t numel, decayed; // elements of all, of the matrices
    float *params, *grads, *m, *v;
    uint16_t *half_params, *half_grads; // --bf16: what is computed with
    double *norm, *partials;
    void **w, **g; // [parameters], in the order of the model
} gpu_rank;

static gpu_rank *gpu_rank_of(const trainer *t) { return (gpu_rank *)t->own; }
static gpt_cuda *gpu_of(const trainer *t) { return &gpu_rank_of(t)->gpu; }

/* Returns the status of the first failure on the GPU, and prints its text. */
static fsdp_status gpu_status(const trainer *t) {
    const gpt_cuda *gpu = gpu_of(t);
    if (!gpu->error) return FSDP_OK;
    fprintf(stderr, PROGRAM ": rank %d: %s: %s\n", t->rank, gpu->failed, gpu->error);
    return FSDP_ERR_BACKEND;
}

// The default stream is where fsdp.h expects the caller's work; fsdp_set_stream names another one.
static fsdp_status open_stream(trainer *t) {
    gpu_rank *rank = gpu_rank_of(t);
    if (t->num_ranks > 1) {
        fprintf(stderr, PROGRAM ": --graph is for one rank, this world has %d\n", t->num_ranks);
        return FSDP_ERR_INVALID_ARG;
    }
    gpu_check(&rank->gpu, cudaStreamCreateWithFlags(&rank->stream, cudaStreamNonBlocking),
              "a stream");
    const fsdp_status status = gpu_status(t);
    return status ? status : fsdp_set_stream(t->world, rank->stream);
}

static fsdp_status open_math(trainer *t) {
    const job *j = t->j;
    gpu_rank *rank = (gpu_rank *)calloc(1, sizeof *rank);
    float *logits = (float *)malloc((size_t)t->cfg.vocab * sizeof *logits);
    if (!rank || !logits) {
        fprintf(stderr, PROGRAM ": rank %d: no memory\n", t->rank);
        free(logits);
        free(rank);
        return FSDP_ERR_OUT_OF_MEMORY;
    }
    t->own = rank;
    rank->logits = logits;
    const fsdp_status status = j->opt.graph ? open_stream(t) : FSDP_OK;
    if (status) return status;
    const cudaStream_t stream = rank->stream ? rank->stream : cudaStreamLegacy;
    if (gpt_cuda_create(&t->cfg, j->opt.bf16, j->opt.tf32, stream, &rank->gpu) == 0) {
        t->acts.nbytes = rank->gpu.nbytes;
        rank->text = (uint8_t *)gpu_alloc(&rank->gpu, j->text_nbytes, "the text");
    }
    if (rank->text) {
        gpu_check(&rank->gpu,
                  cudaMemcpyAsync(rank->text, j->text, j->text_nbytes, cudaMemcpyHostToDevice,
                                  rank->gpu.stream),
                  "the text");
    }
    return gpu_status(t);
}

static void close_math(trainer *t) {
    gpu_rank *rank = gpu_rank_of(t);
    if (!rank) return;
    (void)cudaStreamSynchronize(rank->gpu.stream); // kernels may still use what is freed
    if (rank->graph) (void)cudaGraphExecDestroy(rank->graph);
    void *const buffers[] = {rank->text,       rank->params, rank->grads,
                             rank->m,          rank->v,      rank->half_params,
                             rank->half_grads, rank->norm,   rank->partials};
    for (size_t i = 0; i < sizeof buffers / sizeof *buffers; i++) (void)cudaFree(buffers[i]);
    gpt_cuda_destroy(&rank->gpu);
    // The library gets its own one back first; where it cannot, it may still use this one.
    if (rank->stream && !fsdp_set_stream(t->world, NULL)) (void)cudaStreamDestroy(rank->stream);
    free(rank->w);
    free(rank->logits);
    free(rank);
}

/* ---- the model, sharded ---------------------------------------------------------------------- */

static fsdp_status plain_build(trainer *t);

static fsdp_status build_model(trainer *t) {
    const options *opt = &t->j->opt;
    const int reshard = opt->reshard ? FSDP_RESHARD_ALWAYS : FSDP_RESHARD_NEVER;
    fsdp_model_desc desc = FSDP_ZERO;
    if (opt->plain) return plain_build(t);
    if (opt->bf16) desc.param_dtype = FSDP_BF16; // dtype of gathered parameters; shards stay f32
    fsdp_status status = fsdp_model_create(t->world, &desc, &t->model);
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
    if (!status) status = create_optimizer(t, fsdp_cuda_gemm, gpu_of(t)->blas);
    return status;
}

static void unit_data(fsdp_unit *unit, int count, void **w) {
    for (int i = 0; i < count; i++) w[i] = fsdp_data(unit, i);
}

static void unit_grad(fsdp_unit *unit, int count, void **g) {
    for (int i = 0; i < count; i++) g[i] = fsdp_grad(unit, i);
}

/* ---- one step: forward, backward, update ----------------------------------------------------- */

// The hooks are not checked one by one: after a failure they return at once, fsdp_data still gives
// memory to work on, and fsdp_finalize_backward tells.

struct take_batch {
    const uint8_t *text;
    uint8_t *inputs, *targets;
    size_t text_nbytes;
    uint64_t seed;
    int step, first, context;
    GPU_RUN void run(int64_t b) const {
        const uint8_t *from = text +
                              sequence_start(seed, step, first + (int)b, text_nbytes, context);
        const int64_t to = b * context;
        for (int i = gpu_lane(); i < context; i += GPU_LANES) {
            inputs[to + i] = from[i];
            targets[to + i] = from[i + 1];
        }
    }
};

/* This rank's sequences of a step: those from rank*B on of the global batch. */
static void fill_batch(const trainer *t, int step) {
    const job *j = t->j;
    gpt_cuda *gpu = gpu_of(t);
    const take_batch kernel = {gpu_rank_of(t)->text,   gpu->inputs,   gpu->targets,
                               j->text_nbytes,         j->opt.seed,   step,
                               t->rank * t->cfg.batch, t->cfg.context};
    gpu_launch(gpu, t->cfg.batch, kernel);
}

static void forward(trainer *t) {
    gpt_cuda *gpu = gpu_of(t);
    const gpt_config *cfg = &t->cfg;
    void *we[GPT_EMBED_PARAM_COUNT], *w[GPT_BLOCK_PARAM_COUNT];
    fsdp_pre_forward(t->embed);
    unit_data(t->embed, GPT_EMBED_PARAM_COUNT, we);
    gpt_cuda_embed_forward(gpu, cfg, we);
    for (int l = 0; l < cfg->layers; l++) {
        fsdp_pre_forward(t->blocks[l]);
        unit_data(t->blocks[l], GPT_BLOCK_PARAM_COUNT, w);
        gpt_cuda_block_forward(gpu, cfg, w, l);
        fsdp_post_forward(t->blocks[l]);
    }
    gpt_cuda_head_forward(gpu, cfg, we);
    fsdp_post_forward(t->embed);
    gpt_cuda_loss(gpu, cfg);
}

static fsdp_status backward(trainer *t) {
    gpt_cuda *gpu = gpu_of(t);
    const gpt_config *cfg = &t->cfg;
    void *we[GPT_EMBED_PARAM_COUNT], *ge[GPT_EMBED_PARAM_COUNT];
    void *w[GPT_BLOCK_PARAM_COUNT], *g[GPT_BLOCK_PARAM_COUNT];
    fsdp_pre_backward(t->embed);
    unit_data(t->embed, GPT_EMBED_PARAM_COUNT, we);
    unit_grad(t->embed, GPT_EMBED_PARAM_COUNT, ge);
    gpt_cuda_head_backward(gpu, cfg, we, ge);
    for (int l = cfg->layers - 1; l >= 0; l--) {
        fsdp_pre_backward(t->blocks[l]);
        unit_data(t->blocks[l], GPT_BLOCK_PARAM_COUNT, w);
        unit_grad(t->blocks[l], GPT_BLOCK_PARAM_COUNT, g);
        gpt_cuda_block_backward(gpu, cfg, w, g, l);
        fsdp_post_backward(t->blocks[l]);
    }
    gpt_cuda_embed_backward(gpu, cfg, ge);
    fsdp_post_backward(t->embed);
    return fsdp_finalize_backward(t->model);
}

/* The loss of all ranks; waits for it. */
static fsdp_status mean_loss(trainer *t, double *loss) {
    gpu_read(gpu_of(t), loss, gpu_of(t)->loss, sizeof *loss);
    *loss /= t->num_ranks;
    return fsdp_all_reduce(t->world, NULL, loss, 1, FSDP_F64, FSDP_SUM);
}

static fsdp_status clipped_gradients(trainer *t) {
    forward(t);
    const fsdp_status status = backward(t);
    return status ? status : fsdp_clip_grad_norm(t->model, MAX_GRAD_NORM, NULL);
}

/* --graph: makes one of clipped_gradients. Nothing runs: the stream keeps what it is given. The
   steps before have called every hook and, by fsdp_zero_grad, left no gradients that the backward
   of the graph would have to add to. */
static fsdp_status capture(trainer *t) {
    gpu_rank *rank = gpu_rank_of(t);
    gpt_cuda *gpu = &rank->gpu;
    cudaGraph_t graph = NULL;
    gpu_check(gpu, cudaStreamBeginCapture(gpu->stream, cudaStreamCaptureModeThreadLocal),
              "a capture");
    if (gpu->error) return gpu_status(t);
    const fsdp_status status = clipped_gradients(t);
    gpu_check(gpu, cudaStreamEndCapture(gpu->stream, &graph), "a capture");
    if (!graph) return status ? status : gpu_status(t);
    gpu_check(gpu, cudaGraphInstantiate(&rank->graph, graph, 0), "a graph");
    (void)cudaGraphDestroy(graph);
    return status ? status : gpu_status(t);
}

static fsdp_status all_but_update(trainer *t, int step) {
    gpu_rank *rank = gpu_rank_of(t);
    if (!t->j->opt.graph || step < EAGER_STEPS) return clipped_gradients(t);
    const fsdp_status status = rank->graph ? FSDP_OK : capture(t);
    if (status) return status;
    gpu_check(&rank->gpu, cudaGraphLaunch(rank->graph, rank->gpu.stream), "a graph");
    return gpu_status(t);
}

static fsdp_status plain_step(trainer *t, int step, int look, double *loss, double *norm);

static fsdp_status train_step(trainer *t, int step, int look, double *loss, double *norm) {
    if (t->j->opt.plain) return plain_step(t, step, look, loss, norm);
    fill_batch(t, step);
    fsdp_status status = all_but_update(t, step);
    if (!status && look) status = mean_loss(t, loss);
    if (!status && look) status = fsdp_grad_norm(t->model, norm);
    if (!status) status = optimizer_step(t, step);
    // No hook runs in a launch: the library still records, as after the capture, that there are
    // gradients, and the graph itself stores new ones.
    if (!status && !gpu_rank_of(t)->graph) status = fsdp_zero_grad(t->model);
    return status ? status : gpu_status(t);
}

/* ---- the same without the library: --plain --------------------------------------------------- */

/* Fills w and g, and on the host the first values. */
static void plain_place(const trainer *t, float *values) {
    gpu_rank *rank = gpu_rank_of(t);
    int64_t matrix = 0, vector = rank->decayed;
    const int count = GPT_EMBED_PARAM_COUNT + t->cfg.layers * GPT_BLOCK_PARAM_COUNT;
    for (int i = 0; i < count; i++) {
        const int in_block = i - GPT_EMBED_PARAM_COUNT;
        const gpt_param_spec *spec = in_block < 0
                                         ? &t->embed_specs[i]
                                         : &t->block_specs[in_block % GPT_BLOCK_PARAM_COUNT];
        const int64_t numel = gpt_spec_numel(spec), at = spec->cols ? matrix : vector;
        for (int64_t k = 0; k < numel; k++) values[at + k] = first_value(t->j, spec, i, k);
        rank->w[i] = rank->half_params ? (void *)(rank->half_params + at) : rank->params + at;
        rank->g[i] = rank->half_grads ? (void *)(rank->half_grads + at) : rank->grads + at;
        if (spec->cols) matrix += numel;
        else vector += numel;
    }
}

/* The whole model as one row, for the launchers. */
static fsdp_block plain_block(const gpu_rank *rank) {
    fsdp_block block = FSDP_ZERO;
    block.width = block.src_pitch = block.dst_pitch = rank->numel;
    block.height = 1;
    return block;
}

static void plain_alloc(const trainer *t, gpu_rank *rank) {
    gpt_cuda *gpu = &rank->gpu;
    const fsdp_block block = plain_block(rank);
    const size_t numel = (size_t)rank->numel, f32 = numel * sizeof(float);
    rank->params = (float *)gpu_alloc(gpu, f32, "parameters");
    rank->grads = (float *)gpu_alloc(gpu, f32, "gradients");
    rank->m = (float *)gpu_alloc(gpu, f32, "moments");
    rank->v = (float *)gpu_alloc(gpu, f32, "moments");
    rank->norm = (double *)gpu_alloc(gpu, sizeof(double), "the norm");
    rank->partials = (double *)gpu_alloc(gpu, fsdp_cuda_norm_partials(&block, 1) * sizeof(double),
                                         "the norm");
    if (!t->j->opt.bf16) return;
    rank->half_params = (uint16_t *)gpu_alloc(gpu, numel * sizeof(uint16_t), "parameters");
    rank->half_grads = (uint16_t *)gpu_alloc(gpu, numel * sizeof(uint16_t), "gradients");
}

/* bf16 parameters from the f32 ones */
static void plain_narrow(gpu_rank *rank) {
    const fsdp_block block = plain_block(rank);
    if (!rank->half_params || rank->gpu.error) return;
    gpu_check(&rank->gpu,
              (cudaError_t)fsdp_cuda_copy(rank->gpu.stream, rank->half_params, FSDP_BF16,
                                          rank->params, FSDP_F32, &block, 1, 1.0, 0),
              "bf16 parameters");
}

static fsdp_status plain_build(trainer *t) {
    gpu_rank *rank = gpu_rank_of(t);
    const int layers = t->cfg.layers;
    const size_t count = (size_t)(GPT_EMBED_PARAM_COUNT + layers * GPT_BLOCK_PARAM_COUNT);
    for (int i = 0; i < (int)GPT_EMBED_PARAM_COUNT + (int)GPT_BLOCK_PARAM_COUNT; i++) {
        const int in_block = i - GPT_EMBED_PARAM_COUNT;
        const gpt_param_spec *spec = in_block < 0 ? &t->embed_specs[i] : &t->block_specs[in_block];
        const int64_t numel = gpt_spec_numel(spec) * (in_block < 0 ? 1 : layers);
        rank->numel += numel;
        if (spec->cols) rank->decayed += numel;
    }
    float *values = (float *)malloc((size_t)rank->numel * sizeof *values);
    rank->w = (void **)calloc(2 * count, sizeof *rank->w);
    if (!values || !rank->w) {
        fprintf(stderr, PROGRAM ": no memory\n");
        free(values);
        return FSDP_ERR_OUT_OF_MEMORY;
    }
    rank->g = rank->w + count;
    plain_alloc(t, rank);
    if (!rank->gpu.error) {
        plain_place(t, values);
        gpu_check(&rank->gpu,
                  cudaMemcpyAsync(rank->params, values, (size_t)rank->numel * sizeof *values,
                                  cudaMemcpyHostToDevice, rank->gpu.stream),
                  "parameters");
        plain_narrow(rank);
        gpu_check(&rank->gpu, cudaStreamSynchronize(rank->gpu.stream), "parameters");
    }
    free(values);
    return gpu_status(t);
}

static void plain_forward_backward(trainer *t) {
    gpu_rank *rank = gpu_rank_of(t);
    gpt_cuda *gpu = &rank->gpu;
    const gpt_config *cfg = &t->cfg;
    void **w = rank->w + GPT_EMBED_PARAM_COUNT, **g = rank->g + GPT_EMBED_PARAM_COUNT; // blocks
    gpt_cuda_embed_forward(gpu, cfg, rank->w);
    for (int l = 0; l < cfg->layers; l++) {
        gpt_cuda_block_forward(gpu, cfg, w + l * GPT_BLOCK_PARAM_COUNT, l);
    }
    gpt_cuda_head_forward(gpu, cfg, rank->w);
    gpt_cuda_loss(gpu, cfg);
    gpt_cuda_head_backward(gpu, cfg, rank->w, rank->g);
    for (int l = cfg->layers - 1; l >= 0; l--) {
        gpt_cuda_block_backward(gpu, cfg, w + l * GPT_BLOCK_PARAM_COUNT,
                                g + l * GPT_BLOCK_PARAM_COUNT, l);
    }
    gpt_cuda_embed_backward(gpu, cfg, rank->g);
}

/* Gradients of all, f32, scaled to a norm of at most MAX_GRAD_NORM. */
static void plain_clip(gpu_rank *rank) {
    gpt_cuda *gpu = &rank->gpu;
    const fsdp_block block = plain_block(rank);
    int error = 0;
    if (gpu->error) return;
    if (rank->half_grads) {
        error = fsdp_cuda_copy(gpu->stream, rank->grads, FSDP_F32, rank->half_grads, FSDP_BF16,
                               &block, 1, 1.0, 0);
    }
    if (!error) {
        error = fsdp_cuda_norm(gpu->stream, rank->norm, rank->grads, FSDP_F32, &block, 1, 2.0, 0, 0,
                               rank->partials);
    }
    if (!error) {
        error = fsdp_cuda_clip(gpu->stream, rank->grads, FSDP_F32, &block, 1, MAX_GRAD_NORM, 2.0,
                               rank->norm);
    }
    gpu_check(gpu, (cudaError_t)error, "clipping");
}

/* AdamW as in create_optimizer, of `count` elements from `at` on; update: 1 is the first. */
static void plain_update(gpu_rank *rank, int64_t at, int64_t count, double lr, double decay,
                         int update) {
    const double beta1 = 0.9, beta2 = 0.95, eps = 1e-8;
    fsdp_update u;
    memset(&u, 0, sizeof u);
    u.kind = FSDP_UPDATE_ADAMW;
    u.dtype = u.grad_dtype = FSDP_F32;
    u.count = count;
    u.param = rank->params + at;
    u.grad = rank->grads + at;
    u.first = rank->m + at;
    u.second = rank->v + at;
    u.scalars[0] = 1.0 - lr * decay;
    u.scalars[1] = 1.0 - beta1;
    u.scalars[2] = beta2;
    u.scalars[3] = 1.0 - beta2;
    u.scalars[4] = sqrt(1.0 - pow(beta2, update));
    u.scalars[5] = eps;
    u.scalars[6] = -(lr / (1.0 - pow(beta1, update)));
    if (rank->gpu.error) return;
    gpu_check(&rank->gpu, (cudaError_t)fsdp_cuda_update(rank->gpu.stream, &u, 1), "AdamW");
}

static fsdp_status plain_step(trainer *t, int step, int look, double *loss, double *norm) {
    gpu_rank *rank = gpu_rank_of(t);
    gpt_cuda *gpu = &rank->gpu;
    const double lr = learning_rate(&t->j->opt, step);
    const int64_t rest = rank->numel - rank->decayed;
    fill_batch(t, step);
    plain_forward_backward(t);
    if (look) gpu_read(gpu, loss, gpu->loss, sizeof *loss);
    plain_clip(rank);
    if (look) {
        gpu_read(gpu, norm, rank->norm, sizeof *norm);
        *norm = sqrt(*norm);
    }
    plain_update(rank, 0, rank->decayed, lr, 0.1, step + 1);
    plain_update(rank, rank->decayed, rest, lr, 0.0, step + 1);
    plain_narrow(rank);
    return gpu_status(t);
}

/* ---- after training -------------------------------------------------------------------------- */

static fsdp_status batch_loss(trainer *t, int step, double *loss) {
    fill_batch(t, step);
    forward(t);
    return mean_loss(t, loss);
}

/* Every rank opens every unit, because parameters are gathered from all; only rank 0 computes. */
static fsdp_status next_logits(trainer *t, int length, const float **logits) {
    gpt_cuda *gpu = gpu_of(t);
    gpt_config cfg = t->cfg;
    void *we[GPT_EMBED_PARAM_COUNT], *w[GPT_BLOCK_PARAM_COUNT];
    cfg.batch = 1;
    cfg.context = length;
    gpu_check(gpu,
              cudaMemcpyAsync(gpu->inputs, t->inputs, (size_t)length, cudaMemcpyHostToDevice,
                              gpu->stream),
              "the text");
    fsdp_status status = fsdp_pre_forward(t->embed);
    unit_data(t->embed, GPT_EMBED_PARAM_COUNT, we);
    if (t->rank == 0) gpt_cuda_embed_forward(gpu, &cfg, we);
    for (int l = 0; l < cfg.layers && !status; l++) {
        status = fsdp_pre_forward(t->blocks[l]);
        unit_data(t->blocks[l], GPT_BLOCK_PARAM_COUNT, w);
        if (t->rank == 0) gpt_cuda_block_forward(gpu, &cfg, w, l);
        fsdp_post_forward(t->blocks[l]);
    }
    if (t->rank == 0) gpt_cuda_head_forward(gpu, &cfg, we);
    fsdp_post_forward(t->embed);
    *logits = gpu_rank_of(t)->logits;
    if (t->rank != 0 || status) return status;
    gpu_read(gpu, gpu_rank_of(t)->logits, gpt_cuda_last_logits(gpu, &cfg),
             (size_t)cfg.vocab * sizeof(float));
    return gpu_status(t);
}

int main(int argc, char **argv) { return gpt_main(argc, argv); }
