/* train_llama.cu - train_llama.c on GPUs: the same model, tokens, options and losses

   It trains in full, evaluates, saves, resumes and exports; it refuses --lora, --adapter and
   --sample. Two things changed: the build, and the arithmetic, which is llama_cuda.h for llama.h.
   Parameters are gathered as bf16, gradients and activations have that type, too, and shards,
   AdamW and sums are f32. With --f32 all are.

   Build (in the repository's root):
       nvcc -O3 -I. -DFSDP_BACKEND_NCCL examples/llama/train_llama.cu -o train_llama_cuda \
           -lnccl -lcublas
   Run: one rank per GPU
       tools/fsdprun -n 4 ./train_llama_cuda --model DIR --data tokens.bin --steps 100 --export out
   It was not run on a GPU. On a machine without GPU it is compiled as C++ with the stand-in headers
   of tests/stubs.
   Exit status: 0 done, 1 something failed on the way, 2 the request is impossible.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE // getopt_long under -std=c++11 too
#endif
#include "examples/llama/llama_cuda.h" // llama_cuda_*

#define FSDP_IMPLEMENTATION
#include "fsdp.h" // fsdp_*

#include "examples/llama/llama_model.h" // llama_engine

static llama_cuda *gpu_of(const llama_model *m) { return (llama_cuda *)m->acts.own; }

/* Parameter `at` of a unit, and with grads its gradient. */
static const void *unit_param(fsdp_unit *unit, int at, int grads, void **g) {
    *g = grads ? fsdp_grad(unit, at) : NULL;
    return fsdp_data(unit, at);
}

static void layer_params(llama_model *m, int l, int grads, llama_cuda_layer *p) {
    memset(p, 0, sizeof *p);
    for (int i = 0; i < LLAMA_PARAMS; i++) {
        if (m->at[i] >= 0) p->w[i] = unit_param(m->layers[l], m->at[i], grads, &p->g[i]);
    }
}

/* ---- forward and backward -------------------------------------------------------------------- */

// As in train_gpt.cu hooks are not checked one by one: the end of a pass tells. A rank without rows
// calls all of them, and computes nothing.

template <class E> static void forward(llama_model *m, const llama_arrays<E> &a, int B) {
    llama_cuda *gpu = gpu_of(m);
    llama_cuda_layer p;
    void *none;
    fsdp_pre_forward(m->embed);
    const void *embed = unit_param(m->embed, 0, 0, &none);
    if (B) llama_cuda_embed(gpu, a, embed, B * gpu->desc.context);
    if (!m->c.tied) fsdp_post_forward(m->embed);
    for (int l = 0; l < m->c.layers; l++) {
        fsdp_pre_forward(m->layers[l]);
        layer_params(m, l, 0, &p);
        if (B) llama_cuda_forward(gpu, a, p, l, B);
        fsdp_post_forward(m->layers[l]);
    }
}

/* The norm after the layers, the head and the loss; with scale their backward, too. */
template <class E>
static void head_and_loss(llama_model *m, const llama_arrays<E> &a, int B, double scale) {
    llama_cuda *gpu = gpu_of(m);
    const int train = scale != 0.0, tied = m->c.tied;
    void *norm_g, *head_g;
    fsdp_pre_forward(m->norm);
    if (!tied) fsdp_pre_forward(m->head);
    if (train) {
        fsdp_post_forward(m->norm), fsdp_post_forward(m->head);
        fsdp_pre_backward(m->head), fsdp_pre_backward(m->norm);
    }
    const void *norm = unit_param(m->norm, 0, train, &norm_g);
    const void *head = unit_param(m->head, 0, train, &head_g);
    if (B) llama_cuda_loss(gpu, a, norm, norm_g, head, head_g, B * gpu->desc.context, scale);
    if (!train) {
        fsdp_post_forward(m->norm), fsdp_post_forward(m->head);
        fsdp_reshard(m->norm), fsdp_reshard(m->head);
        return;
    }
    fsdp_post_backward(m->norm);
    if (!tied) fsdp_post_backward(m->head); // else it waits for the gradient of its first use
}

template <class E> static void backward(llama_model *m, const llama_arrays<E> &a, int B) {
    llama_cuda *gpu = gpu_of(m);
    llama_cuda_layer p;
    void *g;
    for (int l = m->c.layers - 1; l >= 0; l--) {
        fsdp_pre_backward(m->layers[l]);
        layer_params(m, l, 1, &p);
        if (B && gpu->desc.recompute) llama_cuda_forward(gpu, a, p, l, B);
        if (B) llama_cuda_backward(gpu, a, p, l, B);
        fsdp_post_backward(m->layers[l]);
    }
    if (!m->c.tied) fsdp_pre_backward(m->embed);
    (void)unit_param(m->embed, 0, 1, &g);
    if (B) llama_cuda_embed_backward(gpu, a, g, B * gpu->desc.context);
    fsdp_post_backward(m->embed);
}

template <class E>
static fsdp_status pass(llama_model *m, const llama_arrays<E> &a, int B, double scale) {
    forward(m, a, B);
    head_and_loss(m, a, B, scale);
    if (scale == 0.0) return fsdp_barrier(m->world);
    backward(m, a, B);
    return fsdp_finalize_backward(m->model);
}

/* ---- what llama_model.h calls ---------------------------------------------------------------- */

static double gpu_pass(llama_model *m, const int32_t *tokens, const int32_t *labels, int B,
                       double scale, int *failed) {
    llama_cuda *gpu = gpu_of(m);
    const size_t nbytes = (size_t)B * (size_t)gpu->desc.context * sizeof *tokens;
    double loss = 0.0;
    if (B) {
        gpu_check(gpu,
                  cudaMemcpyAsync(gpu->tokens, tokens, nbytes, cudaMemcpyHostToDevice, gpu->stream),
                  "tokens");
        gpu_check(gpu,
                  cudaMemcpyAsync(gpu->labels, labels, nbytes, cudaMemcpyHostToDevice, gpu->stream),
                  "labels");
    }
    *failed = gpu->bf16 ? pass(m, llama_arrays_of<gpu_bf16>(gpu), B, scale)
                        : pass(m, llama_arrays_of<float>(gpu), B, scale);
    if (B) gpu_read(gpu, &loss, gpu->loss, sizeof loss);
    if (!gpu->error) return loss;
    fprintf(stderr, "train_llama_cuda: rank %d: %s: %s\n", fsdp_rank(m->world), gpu->failed,
            gpu->error);
    *failed = 1;
    return 0.0;
}

template <int BF16> static size_t gpu_nbytes(const llama_config *c, const llama_acts_desc *desc) {
    return llama_cuda_nbytes(c, desc, BF16);
}

// The default stream is where fsdp.h expects the caller's work.
template <int BF16> static int gpu_create(llama_model *m) {
    llama_cuda *gpu = (llama_cuda *)calloc(1, sizeof *gpu);
    m->acts.own = gpu;
    if (!gpu) return -1;
    if (!llama_cuda_create(&m->c, &m->acts.desc, BF16, cudaStreamLegacy, gpu)) return 0;
    if (gpu->error)
        snprintf(m->why, sizeof m->why, "%s of %zu bytes: %s", gpu->failed, gpu->nbytes,
                 gpu->error);
    return -1;
}

static void gpu_destroy(llama_model *m) {
    (void)cudaStreamSynchronize(gpu_of(m)->stream); // kernels may still use what is freed
    llama_cuda_destroy(gpu_of(m));
    free(m->acts.own);
}

static const llama_engine llama_gpu_engines[] = {
    {FSDP_F32, gpu_nbytes<0>, gpu_create<0>, gpu_destroy, gpu_pass},
    {FSDP_BF16, gpu_nbytes<1>, gpu_create<1>, gpu_destroy, gpu_pass}};

#define PROGRAM "train_llama_cuda"
#define LLAMA_ON_GPU
#include "examples/llama/llama_host.h" // llama_main

int main(int argc, char **argv) { return llama_main(argc, argv); }
