/* llama_sample.h - greedy continuation of a prompt, with a cache of keys and values, on N ranks

   Every rank computes the same tokens. Each unit is gathered once and stays open until the last
   token: otherwise each token would gather the whole model. llama_sample then closes the units and
   sets their modes as they were, so that a training step may follow.

   The prompt passes in groups of at most 48 positions, then each new token alone. A layer is
   llama_layer_forward, as in training; llama_acts_desc.cache makes it keep keys and values.

   SPDX-License-Identifier: MIT */
#ifndef LLAMA_SAMPLE_H
#define LLAMA_SAMPLE_H

#include "examples/llama/llama_model.h" // llama_model, llama_model_layers

/* Checks the arguments of llama_sample. Returns 0; -1: `why` has a line. */
static inline int llama_sample_check(const llama_config *c, const int32_t *prompt, int n, int most,
                                     char *why, size_t cap) {
    if (n < 1) {
        snprintf(why, cap, "prompt: expected at least 1 token, got %d", n);
        return -1;
    }
    if (most < 0) {
        snprintf(why, cap, "new tokens: expected at least 0, got %d", most);
        return -1;
    }
    if ((int64_t)n + most > c->context) {
        snprintf(why, cap,
                 "prompt of %d tokens and %d new ones: expected at most %d "
                 "(max_position_embeddings), got %lld",
                 n, most, c->context, (long long)n + most);
        return -1;
    }
    for (int i = 0; i < n; i++) {
        if (prompt[i] >= 0 && prompt[i] < c->vocab) continue;
        snprintf(why, cap, "token %d of the prompt: expected 0 to %d (vocab_size - 1), got %d", i,
                 c->vocab - 1, (int)prompt[i]);
        return -1;
    }
    return 0;
}

/* Allocates activations for a group of positions, and the cache. Returns 0, or -1: `why` has a
   line. */
static inline int llama_sample_acts(const llama_model *m, int n, int most, llama_acts *a, char *why,
                                    size_t cap) {
    llama_acts_desc desc = m->acts.desc;
    desc.rows = desc.loss_rows = desc.recompute = 1;
    desc.context = gemm_min(n, LLAMA_ATT_ROWS), desc.cache = n + most;
    if (llama_acts_create(&m->c, &desc, a)) {
        snprintf(why, cap, "no memory for a cache of %d positions: sample fewer tokens",
                 desc.cache);
        return -1;
    }
    return 0;
}

/* Turns gradients off and makes every unit stay open. Writes the modes of the units to modes. */
static inline fsdp_status llama_sample_open(llama_model *m, int32_t *modes) {
    for (int i = 0; i < llama_num_units(&m->c); i++) {
        fsdp_unit_desc desc;
        const fsdp_status status = fsdp_unit_desc_get(*llama_unit_at(m, i), &desc);
        if (status) return status;
        modes[i] = desc.reshard_after_forward;
    }
    const fsdp_status status = fsdp_set_reshard_after_forward(m->model, NULL, FSDP_RESHARD_NEVER);
    return status ? status : fsdp_set_grad_enabled(m->model, 0);
}

/* Closes every unit, sets what llama_sample_open has changed, and frees the memory of the open
   units. Returns the first failure, and goes on after it. */
static inline fsdp_status llama_sample_close(llama_model *m, const int32_t *modes, int grads) {
    fsdp_status first = FSDP_OK, status;
    for (int i = 0; i < llama_num_units(&m->c); i++) {
        fsdp_unit *unit = *llama_unit_at(m, i);
        if ((status = fsdp_reshard(unit)) && !first) first = status;
        status = fsdp_set_reshard_after_forward(m->model, unit, modes[i]);
        if (status && !first) first = status;
    }
    if ((status = fsdp_set_grad_enabled(m->model, grads)) && !first) first = status;
    if ((status = fsdp_pools_trim(m->model)) && !first) first = status;
    if ((status = fsdp_barrier(m->world)) && !first) first = status;
    return first;
}

/* Sets a->logits of the last of the positions whose residual stream a has. */
static inline fsdp_status llama_sample_logits(llama_model *m, llama_acts *a) {
    const llama_config *c = &m->c;
    const float *x = llama_x(c, a, c->layers) + (ptrdiff_t)(a->desc.context - 1) * c->hidden;
    fsdp_status status = fsdp_pre_forward(m->norm);
    if (!status && !c->tied) status = fsdp_pre_forward(m->head);
    if (status) return status;
    const llama_param norm = llama_norm_of(m, 0), head = llama_head_of(m, 0);
    llama_norm_forward(a->n, x, llama_floats(a, &norm, 0, c->hidden), 1, c->hidden, c->eps);
    llama_head_products(c, a, &head, 0, a->n, NULL, 1);
    status = fsdp_post_forward(m->norm);
    return status ? status : fsdp_post_forward(m->head);
}

/* Computes the next positions of the prompt, or the newest of `made` tokens in out, and adds them
   to the cache. */
static inline fsdp_status llama_sample_positions(llama_model *m, llama_acts *a,
                                                 const int32_t *prompt, int n, const int32_t *out,
                                                 int made) {
    const int32_t *tokens = a->past < n ? prompt + a->past : out + (a->past - n);
    a->desc.context = gemm_min(n + made - a->past, LLAMA_ATT_ROWS);
    const fsdp_status status = llama_model_layers(m, a, tokens, 1);
    a->past += a->desc.context;
    return status;
}

/* Returns the index of the first of the largest logits. */
static inline int llama_sample_greedy(const float *logits, int V) {
    int best = 0;
    for (int v = 1; v < V; v++) {
        if (logits[v] > logits[best]) best = v;
    }
    return best;
}

static inline int llama_is_eos(const llama_config *c, int token) {
    for (int i = 0; i < c->num_eos; i++) {
        if (c->eos[i] == token) return 1;
    }
    return 0;
}

/* Continues n tokens greedily by up to `most`: by the first of the largest logits. Stops after an
   end token, which is written. Writes the new tokens to out and returns their number; -1 on every
   rank: `why` has a line. Requires idle units. Collective; every rank computes the same. While it
   runs, gradients are off and every unit stays open. Afterwards the units are closed, and their
   modes are as before. Allocates the cache (2 x layers x (n + most) x kv_heads x head_dim floats)
   and frees it. */
static inline int llama_sample(llama_model *m, const int32_t *prompt, int n, int32_t *out, int most,
                               char *why, size_t cap) {
    const llama_config *c = &m->c;
    const int grads = fsdp_is_grad_enabled(m->model);
    int32_t *modes = (int32_t *)calloc((size_t)llama_num_units(c), sizeof *modes), failed;
    int made = 0, ended = 0;
    llama_acts a;
    memset(&a, 0, sizeof a);
    why[0] = 0;
    failed = llama_sample_check(c, prompt, n, most, why, cap) ||
             llama_sample_acts(m, n, most, &a, why, cap);
    if (!failed && !modes) failed = 1, snprintf(why, cap, "no memory to sample");
    // a rank that fails alone must not leave the others in a collective
    fsdp_status status = fsdp_all_reduce(m->world, NULL, &failed, 1, FSDP_I32, FSDP_MAX);
    if (!status && !failed && !(status = llama_sample_open(m, modes))) {
        while (!status && made < most && !ended) {
            status = llama_sample_positions(m, &a, prompt, n, out, made);
            if (!status && a.past < n) continue;
            if (!status) status = llama_sample_logits(m, &a);
            if (status) break;
            out[made] = llama_sample_greedy(a.logits, c->vocab);
            ended = llama_is_eos(c, out[made++]);
        }
        const fsdp_status closed = llama_sample_close(m, modes, grads);
        if (!status) status = closed;
    }
    llama_acts_destroy(&a);
    free(modes);
    if (!status && !failed) return made;
    if (!why[0])
        snprintf(why, cap, "%s", status ? fsdp_last_error(m->world) : "another rank has failed");
    return -1;
}

#endif // LLAMA_SAMPLE_H
