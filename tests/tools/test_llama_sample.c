/* test_llama_sample.c - examples/llama/llama_sample.h: greedy tokens of transformers on 1 to 4 ranks,
   logits of the cache compared with a whole forward, and a model that is as before afterwards.

   SPDX-License-Identifier: MIT */
#include "lab_llama.h"
#include "examples/llama/llama_sample.h"

enum { NEW = 12 };

typedef struct sampled {
    expected e;
    llama_model m;
    int32_t *prompt, *tokens; /* of transformers */
    int n;
} sampled;

/* Makes a golden model whose activations have one row of `context` positions. */
static sampled open_model(fsdp_world *w, const char *name, int context) {
    sampled s;
    fsdp_checkpoint_tensor t;
    llama_acts_desc desc;
    char dir[600];
    s.e = open_expected(name);
    s.tokens = (int32_t *)get(&s.e, "greedy.tokens", FSDP_I32, &t);
    CHECK_EQ_INT(t.shape[0], NEW);
    s.prompt = (int32_t *)get(&s.e, "greedy.prompt", FSDP_I32, &t);
    s.n = (int)t.shape[0];
    memset(&desc, 0, sizeof desc);
    desc.rows = 1, desc.context = context, desc.loss_rows = 5;
    model_dir(name, dir);
    load_model(w, dir, &desc, &s.m);
    return s;
}
static void close_model(sampled *s) {
    llama_model_destroy(&s->m);
    fsdp_checkpoint_close(s->e.files);
    free(s->prompt), free(s->tokens);
}

static uint64_t gathers(const sampled *s) {
    fsdp_counters n;
    CALL(s->m.world, fsdp_model_counters(s->m.model, &n));
    return n.calls[FSDP_OP_ALL_GATHER];
}

/* ---- tokens ---------------------------------------------------------------------------------- */

/* The tokens of transformers, at positions that the activations do not have. Each unit is gathered
   once. */
static void golden_rank(lab_rank *r) {
    for (int i = 0; i < CASES; i++) {
        sampled s = open_model(r->w, models[i], 3);
        int32_t out[NEW + 1];
        char why[LLAMA_WHY];
        const uint64_t before = gathers(&s);
        out[NEW] = -7;
        const int made = llama_sample(&s.m, s.prompt, s.n, out, NEW, why, sizeof why);
        CHECK_MSG(made == NEW, "%s: %d: %s", models[i], made, why);
        CHECK_EQ_STR(why, "");
        CHECK_EQ_MEM(out, s.tokens, sizeof out - sizeof *out);
        CHECK_EQ_INT(out[NEW], -7);
        if (r->size > 1) CHECK_EQ_INT(gathers(&s) - before, llama_num_units(&s.m.c));
        close_model(&s);
    }
}

static const struct {
    const char *name;
    int size;
} sizes[] = {{"1", 1}, {"2", 2}, {"3", 3}, {"4", 4}};

TEST_P(llama_sample, golden, sizes, GLOO | SECONDS(60) | (row->size > 3 ? MANY_RANKS : 0)) {
    golden_needs("llama");
    lab_run(row->size, NULL, golden_rank, NULL);
}

/* Stops after an end token, which is written; without one after `most` tokens. */
static void end_rank(lab_rank *r) {
    sampled s = open_model(r->w, "llama_tied", 3);
    char why[LLAMA_WHY];
    int32_t out[NEW];
    s.m.c.num_eos = 2, s.m.c.eos[0] = s.m.c.vocab;
    for (int i = 0; i < NEW; i++) {
        int first = 0;
        while (s.tokens[first] != s.tokens[i]) first++;
        s.m.c.eos[1] = s.tokens[i];
        memset(out, 0xFF, sizeof out);
        CHECK_EQ_INT(llama_sample(&s.m, s.prompt, s.n, out, NEW, why, sizeof why), first + 1);
        CHECK_EQ_MEM(out, s.tokens, (size_t)(first + 1) * sizeof *out);
        CHECK(first + 1 == NEW || out[first + 1] == -1);
    }
    s.m.c.num_eos = 1;
    for (int most = 0; most <= NEW; most += 4) {
        memset(out, 0xFF, sizeof out);
        CHECK_EQ_INT(llama_sample(&s.m, s.prompt, s.n, out, most, why, sizeof why), most);
        CHECK_EQ_MEM(out, s.tokens, (size_t)most * sizeof *out);
        CHECK(most == NEW || out[most] == -1);
    }
    close_model(&s);
}
TEST(llama_sample, stops_after_end_token) {
    golden_needs("llama");
    lab_run(2, NULL, end_rank, NULL);
}

/* Equal logits: the first one counts. */
TEST(llama_sample, first_of_largest) {
    const float logits[] = {-2.0f, -1.0f, -3.0f, -1.0f, -1.0f};
    CHECK_EQ_INT(llama_sample_greedy(logits, 5), 1);
    CHECK_EQ_INT(llama_sample_greedy(logits + 2, 3), 1);
    CHECK_EQ_INT(llama_sample_greedy(logits + 3, 2), 0);
}

/* ---- logits ---------------------------------------------------------------------------------- */

enum { LENGTH = 110 };

/* Each position after the prompt has the logits that a forward of the whole sequence has. Prompts end
   around the ends of the groups of 48 positions. */
static void logits_rank(lab_rank *r) {
    static const int prompts[] = {1, 2, 47, 48, 49, 96, 97, LENGTH};
    const int which = *(const int *)r->arg;
    sampled s = open_model(r->w, models[which], LENGTH);
    const int V = s.m.c.vocab, units = llama_num_units(&s.m.c);
    int32_t tokens[LENGTH], labels[LENGTH];
    int32_t *modes = (int32_t *)lab_zeros((size_t)units, sizeof *modes);
    float *want = (float *)lab_zeros((size_t)LENGTH * (size_t)V, sizeof *want);
    uint64_t state = 77;
    double worst = 0.0;
    int failed;
    for (int i = 0; i < LENGTH; i++) tokens[i] = lab_pick(&state, V), labels[i] = -1;
    CALL(r->w, fsdp_set_grad_enabled(s.m.model, 0));
    (void)llama_model_pass(&s.m, tokens, labels, 1, 0.0, want, &failed);
    CHECK(!failed);
    CALL(r->w, llama_sample_open(&s.m, modes));
    for (size_t k = 0; k < sizeof prompts / sizeof *prompts; k++) {
        const int n = prompts[k], end = n + 9 < LENGTH ? n + 9 : LENGTH;
        char why[LLAMA_WHY];
        llama_acts a;
        CHECK_MSG(!llama_sample_acts(&s.m, n, end - n, &a, why, sizeof why), "%s", why);
        while (a.past < end) {
            const int made = a.past < n ? 0 : a.past + 1 - n;
            CALL(r->w, llama_sample_positions(&s.m, &a, tokens, n, tokens + n, made));
            CALL(r->w, llama_sample_logits(&s.m, &a));
            const double d = difference(a.logits, want + (ptrdiff_t)(a.past - 1) * V, V);
            CHECK_MSG(d <= 1e-5, "%s, prompt of %d, position %d: %.2g", models[which], n,
                      a.past - 1, d);
            worst = d > worst ? d : worst;
        }
        CHECK_EQ_INT(a.past, end);
        llama_acts_destroy(&a);
    }
    CALL(r->w, llama_sample_close(&s.m, modes, 1));
    if (r->rank == 0) h_message("%s: %.2g", models[which], worst);
    free(want), free(modes);
    close_model(&s);
}
TEST(llama_sample, logits_equal_whole_forward, SECONDS(60)) {
    golden_needs("llama");
    for (int i = 0; i < CASES; i++) lab_run(2, NULL, logits_rank, &i);
}

/* The tokens are the largest logits of a forward of the whole sequence, without golden values. */
static void argmax_rank(lab_rank *r) {
    sampled s = open_model(r->w, "qwen3_tied", LENGTH);
    const int V = s.m.c.vocab, n = 60;
    int32_t tokens[LENGTH], labels[LENGTH];
    float *logits = (float *)lab_zeros((size_t)LENGTH * (size_t)V, sizeof *logits);
    uint64_t state = 5;
    char why[LLAMA_WHY];
    int failed;
    s.m.c.context = LENGTH, s.m.c.num_eos = 0;
    for (int i = 0; i < LENGTH; i++) tokens[i] = lab_pick(&state, V), labels[i] = -1;
    const int made = llama_sample(&s.m, tokens, n, tokens + n, LENGTH - n, why, sizeof why);
    CHECK_MSG(made == LENGTH - n, "%s", why);
    CALL(r->w, fsdp_set_grad_enabled(s.m.model, 0));
    (void)llama_model_pass(&s.m, tokens, labels, 1, 0.0, logits, &failed);
    CHECK(!failed);
    for (int i = n; i < LENGTH; i++) {
        const float *p = logits + (ptrdiff_t)(i - 1) * V;
        CHECK(p[tokens[i]] >= gemm_max(p, V) - 1e-5f);
    }
    free(logits);
    close_model(&s);
}
TEST(llama_sample, tokens_are_largest_logits) {
    golden_needs("llama");
    lab_run(2, NULL, argmax_rank, NULL);
}

/* ---- as before ------------------------------------------------------------------------------- */

static double train(const sampled *s, llama_model *m, int rank) {
    int32_t tokens[6], labels[6];
    uint64_t state = 3 + (uint64_t)rank;
    int failed;
    for (int i = 0; i < 6; i++) {
        tokens[i] = lab_pick(&state, s->m.c.vocab), labels[i] = lab_pick(&state, s->m.c.vocab);
    }
    const double loss = llama_model_pass(m, tokens, labels, 1, 0.25, NULL, &failed);
    CHECK(!failed);
    return loss;
}

static void check_same_gradients(fsdp_world *w, fsdp_model *a, fsdp_model *b) {
    fsdp_param_view v = FSDP_ZERO, u = FSDP_ZERO;
    while (fsdp_next_param(a, &v)) {
        const size_t numel = (size_t)lab_full_numel(&v);
        float *x = (float *)lab_zeros(numel, sizeof *x), *y = (float *)lab_zeros(numel, sizeof *y);
        CHECK(fsdp_next_param(b, &u));
        CALL(w, fsdp_param_full_grad(v.unit, v.index, x));
        CALL(w, fsdp_param_full_grad(u.unit, u.index, y));
        CHECK_EQ_MEM(x, y, numel * sizeof *x);
        CHECK(gemm_dot(x, x, (int)numel) > 0.0f);
        free(x), free(y);
    }
}

/* Checks that both models have equal memory, pool by pool. */
static void check_same_memory(const sampled *a, const sampled *b) {
    fsdp_memory x, y;
    CALL(a->m.world, fsdp_model_memory(a->m.model, &x));
    CALL(b->m.world, fsdp_model_memory(b->m.model, &y));
    CHECK_EQ_MEM(x.pool_bytes, y.pool_bytes, sizeof x.pool_bytes);
    CHECK_EQ_MEM(x.pool_slots, y.pool_slots, sizeof x.pool_slots);
    CHECK_EQ_INT(x.total_bytes, y.total_bytes);
}

/* Two models take the same two training steps, and one samples between them: losses, gradients that add
   up, memory, modes and the switch of gradients are equal. */
static void as_before_rank(lab_rank *r) {
    sampled plain = open_model(r->w, (const char *)r->arg, 6);
    sampled samples = open_model(r->w, (const char *)r->arg, 6);
    const int units = llama_num_units(&samples.m.c);
    int32_t out[NEW];
    char why[LLAMA_WHY];
    fsdp_memory before, after;
    int64_t host_bytes = 0;
    for (int i = 0; i < units; i++) { /* modes that the model was not made with */
        for (int k = 0; k < 2; k++) {
            llama_model *m = k ? &samples.m : &plain.m;
            const int stays = i == 1 || (i == 0 && m->c.tied);
            CALL(r->w,
                 fsdp_set_reshard_after_forward(m->model, *llama_unit_at(m, i),
                                                stays ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS));
        }
    }
    CHECK(lab_same(train(&plain, &plain.m, r->rank), train(&samples, &samples.m, r->rank)));
    check_same_memory(&plain, &samples);
    CALL(r->w, fsdp_model_memory(samples.m.model, &before));
    for (int grads = 0; grads < 2; grads++) {
        CALL(r->w, fsdp_set_grad_enabled(samples.m.model, grads));
        CHECK_EQ_INT(llama_sample(&samples.m, samples.prompt, samples.n, out, NEW, why, sizeof why),
                     NEW);
        CHECK_EQ_INT(fsdp_is_grad_enabled(samples.m.model), grads);
        CALL(r->w, fsdp_model_memory(samples.m.model, &after));
        if (!grads) host_bytes = after.host_bytes;
    }
    for (int i = 0; i < units; i++) {
        fsdp_unit_desc desc;
        fsdp_unit *unit = *llama_unit_at(&samples.m, i);
        CALL(r->w, fsdp_unit_desc_get(unit, &desc));
        const int stays = i == 1 || (i == 0 && samples.m.c.tied);
        CHECK_EQ_INT(desc.reshard_after_forward, stays ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS);
        if (r->size > 1) CHECK_EQ_INT(fsdp_unit_storage(unit), FSDP_STORAGE_SHARDED);
    }
    CHECK(after.total_bytes <= before.total_bytes);
    CHECK_EQ_INT(after.host_bytes, host_bytes); /* tables have grown once */
    CALL(r->w, fsdp_pools_trim(plain.m.model));
    check_same_memory(&plain, &samples);
    CHECK(lab_same(train(&plain, &plain.m, r->rank), train(&samples, &samples.m, r->rank)));
    check_same_memory(&plain, &samples);
    check_same_gradients(r->w, plain.m.model, samples.m.model);
    close_model(&plain), close_model(&samples);
}

static const struct {
    const char *name, *model;
    int size;
} befores[] = {{"tied_1", "llama_tied", 1},
               {"tied_2", "llama_tied", 2},
               {"untied_2", "qwen2_untied", 2},
               {"untied_3", "qwen2_untied", 3}};
TEST_P(llama_sample, model_is_as_before, befores, GLOO) {
    golden_needs("llama");
    lab_run(row->size, NULL, as_before_rank, (void *)(uintptr_t)row->model);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static const struct {
    const char *name;
    int n, most, at, token; /* token: at that place of the prompt */
    const char *line;
} refused[] = {
    {"empty", 0, 4, 0, 1, "prompt: expected at least 1 token, got 0"},
    {"fewer", -3, 4, 0, 1, "prompt: expected at least 1 token, got -3"},
    {"most", 5, -1, 0, 1, "new tokens: expected at least 0, got -1"},
    {"vocab", 5, 4, 3, 97, "token 3 of the prompt: expected 0 to 96 (vocab_size - 1), got 97"},
    {"negative", 5, 4, 4, -1, "token 4 of the prompt: expected 0 to 96 (vocab_size - 1), got -1"},
    {"context", 5, 20, 0, 1,
     "prompt of 5 tokens and 20 new ones: expected at most 24 (max_position_embeddings), got 25"},
    {"overflow", 5, 2147483647, 0, 1,
     "prompt of 5 tokens and 2147483647 new ones: expected at most 24 (max_position_embeddings), "
     "got 2147483652"},
    {"fits", 5, 19, 0, 96, NULL},
};

/* A whole line, and nothing has happened: the same model samples afterwards. */
static void refused_rank(lab_rank *r) {
    const int i = *(const int *)r->arg;
    sampled s = open_model(r->w, "llama_tied", 3);
    int32_t prompt[5] = {1, 2, 3, 4, 5}, out[NEW + 9];
    char why[LLAMA_WHY];
    const uint64_t before = gathers(&s);
    prompt[refused[i].at] = refused[i].token;
    s.m.c.num_eos = 0, s.m.c.context = 24;
    out[0] = -7;
    const int made = llama_sample(&s.m, prompt, refused[i].n, out, refused[i].most, why,
                                  sizeof why);
    CHECK_EQ_INT(made, refused[i].line ? -1 : refused[i].most);
    CHECK_EQ_STR(why, refused[i].line ? refused[i].line : "");
    if (refused[i].line) {
        CHECK(out[0] == -7 && gathers(&s) == before);
        CHECK(fsdp_is_grad_enabled(s.m.model));
    }
    CHECK_EQ_INT(llama_sample(&s.m, s.prompt, s.n, out, NEW, why, sizeof why), NEW);
    CHECK_EQ_MEM(out, s.tokens, NEW * sizeof *out);
    close_model(&s);
}
TEST_P(llama_sample, refusals, refused, 0) {
    int i = (int)(row - refused);
    golden_needs("llama");
    lab_run(2, NULL, refused_rank, &i);
}

/* Rank 1 has no memory, or another prompt: no rank samples, each has a line, and the world goes on. */
static void one_rank_fails_rank(lab_rank *r) {
    sampled s = open_model(r->w, "llama_tied", 3);
    int32_t out[NEW];
    char why[LLAMA_WHY];
    llama_model broken = s.m; /* a cache of more bytes than memory can have */
    broken.c.context = 2147483647, broken.c.kv_heads = 1 << 30;
    CHECK_EQ_INT(llama_sample(r->rank ? &broken : &s.m, s.prompt, s.n, out,
                              r->rank ? 2000000000 : 4, why, sizeof why),
                 -1);
    CHECK_EQ_STR(why, r->rank ? "no memory for a cache of 2000000005 positions: sample fewer tokens"
                              : "another rank has failed");
    CHECK_EQ_INT(llama_sample(&s.m, s.prompt, r->rank ? 0 : s.n, out, 4, why, sizeof why), -1);
    CHECK_EQ_STR(why,
                 r->rank ? "prompt: expected at least 1 token, got 0" : "another rank has failed");
    CHECK_EQ_INT(llama_sample(&s.m, s.prompt, s.n, out, NEW, why, sizeof why), NEW);
    CHECK_EQ_MEM(out, s.tokens, sizeof out);
    close_model(&s);
}
TEST(llama_sample, one_rank_fails) {
    golden_needs("llama");
    lab_run(2, NULL, one_rank_fails_rank, NULL);
}

/* A unit that is between its hooks: the library's line, and the model is as before. */
static void not_idle_rank(lab_rank *r) {
    sampled s = open_model(r->w, "llama_tied", 3);
    int32_t out[NEW];
    char why[LLAMA_WHY];
    CALL(r->w, fsdp_pre_forward(s.m.layers[1]));
    CHECK_EQ_INT(llama_sample(&s.m, s.prompt, s.n, out, NEW, why, sizeof why), -1);
    CHECK_MSG(strstr(why, "model.layers.1") && !strchr(why, '\n'), "%s", why);
    CHECK(fsdp_is_grad_enabled(s.m.model));
    close_model(&s);
}
TEST(llama_sample, needs_idle_units) {
    golden_needs("llama");
    lab_run(2, NULL, not_idle_rank, NULL);
}

/* All allocations of the library fail on rank 1 from the k-th one on, or that one alone: both ranks
   fail, with a line and without a token, or both have the tokens. Nothing leaks: lab_run checks the
   heap. */
typedef struct failing {
    int k, made[2], failures;
} failing;
static void no_memory_rank(lab_rank *r) {
    failing *f = (failing *)r->arg;
    sampled s = open_model(r->w, "qwen2_untied", 3);
    int32_t out[NEW] = {-7};
    char why[LLAMA_WHY];
    r->heap->persistent = f->k % 2;
    if (r->rank == 1) w_fail(r->heap, f->k / 2);
    f->made[r->rank] = llama_sample(&s.m, s.prompt, s.n, out, NEW, why, sizeof why);
    w_fail(r->heap, -1);
    if (r->rank == 1) f->failures = r->heap->failures;
    CHECK_MSG(!*why == (f->made[r->rank] == NEW) && !strchr(why, '\n'), "%s", why);
    if (*why) CHECK_EQ_INT(out[0], -7);
    else CHECK_EQ_MEM(out, s.tokens, sizeof out);
    CHECK(fsdp_is_grad_enabled(s.m.model));
    close_model(&s);
}
TEST(llama_sample, no_memory, SECONDS(60)) {
    failing f = {0, {0, 0}, 1};
    golden_needs("llama");
    for (; f.failures; f.k++) {
        lab_run(2, NULL, no_memory_rank, &f);
        CHECK_EQ_INT(f.made[0], f.made[1]);
    }
    CHECK(f.k > 10 && f.made[0] == NEW);
}

/* One rank fails after its last gather, when the other one needs nothing from it any more. */
static void late_failure_rank(lab_rank *r) {
    int *closes = (int *)r->arg;
    sampled s = open_model(r->w, "qwen2_untied", 3);
    int32_t modes[8];
    char why[LLAMA_WHY];
    llama_acts a;
    CHECK_MSG(!llama_sample_acts(&s.m, s.n, 1, &a, why, sizeof why), "%s", why);
    CALL(r->w, llama_sample_open(&s.m, modes));
    CALL(r->w, llama_sample_positions(&s.m, &a, s.prompt, s.n, NULL, 0));
    CALL(r->w, llama_sample_logits(&s.m, &a));
    if (r->rank == 0) __atomic_store_n(closes, 1, __ATOMIC_SEQ_CST);
    while (!__atomic_load_n(closes, __ATOMIC_SEQ_CST)) sched_yield();
    if (r->rank == 1) fsdp_abort(r->w, "the test ends the world");
    CHECK(llama_sample_close(&s.m, modes, 1) != FSDP_OK);
    llama_acts_destroy(&a);
    close_model(&s);
}
TEST(llama_sample, late_failure_of_one_rank) {
    int closes = 0;
    golden_needs("llama");
    lab_run(2, NULL, late_failure_rank, &closes);
}
