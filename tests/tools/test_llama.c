/* test_llama.c - examples/llama/llama_model.h: golden models of transformers on 1 to 4 ranks, and files
   that do not fit their config.json.

   SPDX-License-Identifier: MIT */
#include "lab_llama.h"

/* ---- a pass ---------------------------------------------------------------------------------- */

typedef struct run {
    const char *name;
    int recompute;
    const form *of;
} run;

static void *get_of(const expected *e, const form *of, const char *name, fsdp_dtype dtype,
                    fsdp_checkpoint_tensor *t) {
    char whole[300];
    snprintf(whole, sizeof whole, "%s%s", of->prefix, name);
    return get(e, whole, dtype, t);
}

static double check_gradients(fsdp_world *w, const llama_model *m, const expected *e,
                              const form *of) {
    const char *peft = of->is_lora ? LLAMA_PEFT : "";
    fsdp_param_view v = FSDP_ZERO;
    fsdp_checkpoint_tensor t;
    int64_t compared = 0, wanted = 0;
    double worst = 0.0;
    while (fsdp_next_param(m->model, &v)) {
        char name[256];
        const int64_t numel = lab_numel(v.ndim, v.shape);
        CHECK_EQ_INT(v.requires_grad, !of->is_lora || strstr(v.name, "lora_") != NULL);
        if (!v.requires_grad) continue;
        float *got = (float *)lab_zeros((size_t)numel, sizeof *got);
        CALL(w, fsdp_param_full_grad(v.unit, v.index, got));
        snprintf(name, sizeof name, "%sgrad.%s%s.%s", of->prefix, peft, v.unit_name, v.name);
        float *want = (float *)get(e, name, FSDP_F32, &t);
        CHECK_EQ_INT(lab_numel(t.ndim, t.shape), numel);
        const double d = difference(got, want, numel);
        CHECK_MSG(d <= (of->is_lora ? 1e-4 : 2e-5), "%s: %.2g", name, d);
        worst = d > worst ? d : worst;
        free(want), free(got);
        compared++;
    }
    for (int64_t i = 0; i < e->all.num_tensors; i++) {
        CHECK_OK(fsdp_checkpoint_tensor_at(e->files, i, &t));
        const size_t n = strlen(of->prefix);
        wanted += !strncmp(t.name, of->prefix, n) && !strncmp(t.name + n, "grad.", 5);
    }
    CHECK_EQ_INT(compared, wanted);
    return worst;
}

/* A frozen parameter has the dtype of the files, unless another one was asked for. */
static void check_frozen(const llama_model *m, const run *what) {
    fsdp_param_view v = FSDP_ZERO;
    const fsdp_dtype dtype = !strcmp(what->name, "llama3_rope_old") ? FSDP_BF16
                             : !strcmp(what->name, "qwen2_untied")  ? FSDP_F16
                                                                    : FSDP_F32;
    while (what->of->base < LLAMA_DTYPE_FILES && fsdp_next_param(m->model, &v)) {
        const int as_it_is = what->of == &adapted && !v.requires_grad;
        CHECK_EQ_INT(v.dtype, as_it_is ? dtype : FSDP_F32);
    }
}

/* After a pass no unit is open, and each was gathered as often as it has to be: layers once for each
   direction, an untied embedding twice if it is trained, everything else once. Returns the number
   of gathers so far. */
static uint64_t check_units(const lab_rank *r, const llama_model *m, int train, uint64_t before) {
    fsdp_counters n;
    const int L = m->c.layers, untied = !m->c.tied;
    CALL(r->w, fsdp_model_counters(m->model, &n));
    const uint64_t calls = n.calls[FSDP_OP_ALL_GATHER];
    if (r->size == 1) return calls;
    CHECK_EQ_INT(calls - before, train ? 2 * L + 2 + (2 - m->frozen) * untied : L + 2 + untied);
    CHECK_EQ_INT(fsdp_unit_storage(m->embed), FSDP_STORAGE_SHARDED);
    CHECK_EQ_INT(fsdp_unit_storage(m->norm), FSDP_STORAGE_SHARDED);
    CHECK_EQ_INT(fsdp_unit_storage(m->head), FSDP_STORAGE_SHARDED);
    for (int l = 0; l < L; l++) CHECK_EQ_INT(fsdp_unit_storage(m->layers[l]), FSDP_STORAGE_SHARDED);
    return calls;
}

/* The order in which units are closed. */
typedef struct closings {
    const fsdp_unit *head;
    int count, head_at, other_at;
} closings;
static void note_closing(fsdp_unit *unit, int readable, void *user) {
    closings *c = (closings *)user;
    if (readable) return;
    *(unit == c->head ? &c->head_at : &c->other_at) = ++c->count;
}

static void golden_rank(lab_rank *r) {
    const run *what = (const run *)r->arg;
    expected e = open_expected(what->name);
    fsdp_checkpoint_tensor shape, t;
    llama_model m;
    llama_acts_desc desc;
    int32_t *tokens = (int32_t *)get(&e, "tokens", FSDP_I32, &shape);
    int32_t *labels = (int32_t *)get(&e, "labels", FSDP_I32, &t);
    int32_t *counted = (int32_t *)get(&e, "counted", FSDP_I32, &t);
    float *want = (float *)get(&e, "logits", FSDP_F32, &t);
    double *loss = (double *)get_of(&e, what->of, "loss", FSDP_F64, &t);
    const int rows = (int)shape.shape[2], T = (int)shape.shape[3];
    int failed;
    uint64_t gathers = 0;
    closings closed;
    memset(&desc, 0, sizeof desc);
    desc.rows = (rows + r->size - 1) / r->size, desc.context = T, desc.loss_rows = 7;
    desc.recompute = what->recompute;
    load_form(r->w, what->name, what->of, &desc, &m);
    check_frozen(&m, what);
    const int64_t V = m.c.vocab, most = (int64_t)desc.rows * T;
    int32_t *mine = (int32_t *)lab_zeros((size_t)(2 * most), sizeof *mine);
    float *logits = (float *)lab_zeros((size_t)(most * V), sizeof *logits);
    const int B = my_rows(r, tokens, labels, rows, T, mine, mine + most);
    memset(&closed, 0, sizeof closed);
    closed.head = m.head;
    CALL(r->w, fsdp_set_unit_callback(m.head, note_closing, &closed));
    CALL(r->w, fsdp_set_unit_callback(m.layers[m.c.layers - 1], note_closing, &closed));
    /* evaluation, then training: logits, loss */
    for (int train = 0; train < 2; train++) {
        CALL(r->w, fsdp_set_grad_enabled(m.model, train));
        double sum = llama_model_pass(&m, mine, mine + most, B, train ? 1.0 / counted[0] : 0.0,
                                      logits, &failed);
        CHECK(!failed);
        gathers = check_units(r, &m, train, gathers);
        CALL(r->w, fsdp_all_reduce(r->w, NULL, &sum, 1, FSDP_F64, FSDP_SUM));
        CHECK_NEAR(sum / counted[0] / loss[0], 1.0, 1e-6);
        for (int b = 0; b < B && !what->of->is_lora; b++) {
            const int64_t at = (int64_t)(r->rank + b * r->size) * T * V;
            CHECK(difference(logits + (int64_t)b * T * V, want + at, T * V) <= 1e-5);
        }
        if (train && r->rank == 0)
            h_message("%s%s, %d ranks: loss %.2g", what->of->prefix, what->name, r->size,
                      sum / counted[0] / loss[0] - 1.0);
    }
    /* a head that waits for no other gradient is open around the loss only */
    CHECK((closed.head_at < closed.other_at) == (!m.c.tied || m.frozen));
    const double worst = check_gradients(r->w, &m, &e, what->of);
    /* gradients are added */
    (void)llama_model_pass(&m, mine, mine + most, B, 1.0 / counted[0], NULL, &failed);
    (void)llama_model_pass(&m, mine, mine + most, B, -1.0 / counted[0], NULL, &failed);
    CHECK_NEAR(check_gradients(r->w, &m, &e, what->of), worst, what->of->is_lora ? 1e-4 : 2e-5);
    llama_model_destroy(&m);
    free(logits), free(mine), free(loss), free(want), free(counted), free(labels), free(tokens);
    fsdp_checkpoint_close(e.files);
}

static const struct {
    const char *name;
    int size, recompute;
} passes[] = {{"1", 1, 0}, {"2", 2, 0},           {"3", 3, 0},
              {"4", 4, 0}, {"1_recompute", 1, 1}, {"3_recompute", 3, 1}};

/* Logits, loss and gradients of all golden models. Rows are uneven on two ranks, and one of four ranks
   has none. */
TEST_P(llama, golden, passes,
       GLOO | SECONDS(120) | (row->size > 3 ? MANY_RANKS : 0) |
           (row->recompute ? AT_NIGHT(ASAN) : 0)) {
    golden_needs("llama");
    for (int i = 0; i < CASES; i++) {
        run what = {models[i], row->recompute, &trained};
        lab_run(row->size, NULL, golden_rank, &what);
    }
}

/* The same by an adapter: its loss and gradients, over the dtype of the files, f32, and blocks. */
TEST_P(llama, golden_lora, passes,
       GLOO | SECONDS(120) | (row->size > 3 ? MANY_RANKS : 0) |
           (row->recompute ? AT_NIGHT(ASAN) : 0)) {
    static const form *const blocks[] = {&q8_0, &q4_1};
    golden_needs("llama");
    for (int i = 0; i < CASES; i++) {
        run what = {models[i], row->recompute, row->size == 3 ? &as_f32 : &adapted};
        lab_run(row->size, NULL, golden_rank, &what);
    }
    for (int i = 0; i < 2; i++) {
        run what = {"llama_quant", row->recompute, blocks[i]};
        lab_run(row->size, NULL, golden_rank, &what);
    }
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Frozen matrices have the bytes that ggml writes, on any number of ranks. */
static void bytes_rank(lab_rank *r) {
    expected e = open_expected("llama_quant");
    fsdp_checkpoint_tensor t;
    llama_acts_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = desc.context = desc.loss_rows = 1;
    for (int i = 0; i < 2; i++) {
        const form *of = i ? &q4_1 : &q8_0;
        fsdp_param_view v = FSDP_ZERO;
        llama_model m;
        int compared = 0;
        load_form(r->w, "llama_quant", of, &desc, &m);
        while (fsdp_next_param(m.model, &v)) {
            char name[256];
            const int is_matrix = strstr(v.unit_name, "layers.") && v.ndim == 2 && !v.requires_grad;
            CHECK_EQ_INT(v.dtype, is_matrix ? FSDP_U8 : FSDP_F32);
            if (!is_matrix || strncmp(v.unit_name, "model.layers.0", 14)) continue;
            snprintf(name, sizeof name, "bytes.%s.%s", v.unit_name, v.name);
            uint8_t *want = (uint8_t *)get_of(&e, of, name, FSDP_U8, &t);
            CHECK(t.ndim == 2 && t.shape[0] == v.shape[0] && t.shape[1] == v.shape[1]);
            uint8_t *got = (uint8_t *)lab_zeros((size_t)t.nbytes, 1);
            CALL(r->w, fsdp_param_full(v.unit, v.index, got));
            CHECK_MSG(!memcmp(got, want, (size_t)t.nbytes), "%s", name);
            free(got), free(want);
            compared++;
        }
        CHECK_EQ_INT(compared, LLAMA_MATRICES);
        llama_model_destroy(&m);
    }
    fsdp_checkpoint_close(e.files);
}
TEST(llama, bytes) {
    golden_needs("llama");
    for (int size = 1; size <= 3; size++) lab_run(size, NULL, bytes_rank, NULL);
}

/* ---- steps of training ----------------------------------------------------------------------- */

/* Reads this rank's rows of the two microbatches of a step. */
static void read_step(const lab_rank *r, const int32_t *tokens, const int32_t *labels, int rows,
                      int T, int per_rank, int32_t *t, int32_t *l, int *used) {
    for (int b = 0; b < 2; b++) {
        const ptrdiff_t from = (ptrdiff_t)b * rows * T, to = (ptrdiff_t)b * per_rank * T;
        used[b] = my_rows(r, tokens + from, labels + from, rows, T, t + to, l + to);
    }
}

/* Compares all parameters with those after the steps. */
static void check_params(fsdp_world *w, const llama_model *m, const expected *e, const form *of) {
    const char *peft = of->is_lora ? LLAMA_PEFT : "";
    fsdp_param_view v = FSDP_ZERO;
    fsdp_checkpoint_tensor t;
    while (fsdp_next_param(m->model, &v)) {
        char name[256];
        const int64_t numel = lab_numel(v.ndim, v.shape);
        double sum = 0.0, worst = 0.0;
        if (!v.requires_grad) continue;
        snprintf(name, sizeof name, "%safter.%s%s.%s", of->prefix, peft, v.unit_name, v.name);
        float *want = (float *)get(e, name, FSDP_F32, &t);
        CHECK_EQ_INT(lab_numel(t.ndim, t.shape), numel);
        float *got = (float *)lab_zeros((size_t)numel, sizeof *got);
        CALL(w, fsdp_param_full(v.unit, v.index, got));
        for (int64_t i = 0; i < numel; i++) {
            const double d = fabs((double)got[i] - (double)want[i]);
            if (!(d <= worst)) worst = d;
            sum += d;
        }
        CHECK_MSG(sum / (double)numel <= 5e-6, "%s: mean %.2g", name, sum / (double)numel);
        CHECK_MSG(worst <= 3e-3, "%s: %.2g", name, worst);
        free(want), free(got);
    }
}

typedef struct steps_run {
    const char *name;
    int accumulate;
    const form *of;
} steps_run;

static void steps_rank(lab_rank *r) {
    const steps_run *what = (const steps_run *)r->arg;
    expected e = open_expected(what->name);
    fsdp_checkpoint_tensor shape, t;
    fsdp_adamw_desc adamw_desc = fsdp_adamw_defaults();
    fsdp_adamw *adamw;
    fsdp_memory predicted, measured;
    llama_model m;
    llama_acts_desc desc;
    int32_t *tokens = (int32_t *)get(&e, "tokens", FSDP_I32, &shape);
    int32_t *labels = (int32_t *)get(&e, "labels", FSDP_I32, &t);
    int32_t *counted = (int32_t *)get(&e, "counted", FSDP_I32, &t);
    double *loss = (double *)get_of(&e, what->of, "step.loss", FSDP_F64, &t);
    double *norm = (double *)get_of(&e, what->of, "step.norm", FSDP_F64, &t);
    const int rows = (int)shape.shape[2], T = (int)shape.shape[3];
    int used[2];
    memset(&desc, 0, sizeof desc);
    desc.rows = (rows + r->size - 1) / r->size, desc.context = T, desc.loss_rows = 16;
    load_form(r->w, what->name, what->of, &desc, &m);
    adamw_desc.beta2 = 0.95, adamw_desc.weight_decay = 0.1;
    CALL(r->w, llama_model_predict(&m, 2, what->accumulate, &predicted));
    CALL(r->w, fsdp_adamw_create(m.model, &adamw_desc, &adamw));
    int32_t *mine = (int32_t *)lab_zeros((size_t)(4 * desc.rows * T), sizeof *mine);
    const llama_batch batch = {mine, mine + (ptrdiff_t)2 * desc.rows * T, used, 2};
    int64_t allocations = 0; /* after two steps */
    for (int step = 0; step < 3; step++) {
        const ptrdiff_t at = (ptrdiff_t)step * 2 * rows * T;
        llama_step_result result;
        if (step == 2) allocations = w_allocations(r->heap);
        read_step(r, tokens + at, labels + at, rows, T, desc.rows, mine,
                  mine + (ptrdiff_t)2 * desc.rows * T, used);
        CALL(r->w, llama_step(&m, adamw, &batch, what->accumulate, 1e-2, 1.0, &result));
        CHECK_EQ_INT(result.counted, counted[2 * step] + counted[2 * step + 1]);
        CHECK_NEAR(result.loss / loss[step], 1.0, 1e-5);
        CHECK_NEAR(result.norm / norm[step], 1.0, 1e-4);
    }
    CHECK_EQ_INT(w_allocations(r->heap), allocations);
    CALL(r->w, fsdp_model_memory(m.model, &measured));
    for (int p = 0; p < FSDP_POOL_COUNT; p++) {
        CHECK_EQ_INT(measured.pool_bytes[p], predicted.pool_bytes[p]);
        CHECK_EQ_INT(measured.pool_slots[p], predicted.pool_slots[p]);
    }
    CHECK_EQ_INT(measured.total_bytes, predicted.total_bytes);
    const int has_after = what->of != &q8_0 && what->of != &q4_1;
    if (has_after) check_params(r->w, &m, &e, what->of);
    /* a step without a label is refused on every rank, and changes nothing */
    llama_step_result result;
    for (int i = 0; i < 2 * desc.rows * T; i++) mine[2 * desc.rows * T + i] = -1;
    CHECK_STATUS(llama_step(&m, adamw, &batch, what->accumulate, 1e-2, 1.0, &result),
                 FSDP_ERR_INVALID_ARG);
    CHECK_EQ_INT(result.counted, 0);
    if (has_after) check_params(r->w, &m, &e, what->of);
    llama_model_destroy(&m);
    free(mine), free(norm), free(loss), free(counted), free(labels), free(tokens);
    fsdp_checkpoint_close(e.files);
}

static const struct {
    const char *name;
    int size, accumulate;
} trainings[] = {{"1", 1, 0}, {"2", 2, 0}, {"3", 3, 0}, {"4", 4, 0}, {"2_accumulate", 2, 1}};

/* Three steps of two microbatches: losses, norms and parameters of transformers and
   torch, in exactly the memory that was predicted. */
TEST_P(llama, steps, trainings,
       SECONDS(120) | (row->size > 3 ? MANY_RANKS : 0) | (row->accumulate ? AT_NIGHT(ASAN) : 0)) {
    golden_needs("llama");
    for (int i = 0; i < CASES; i++) {
        steps_run what = {models[i], row->accumulate, &trained};
        lab_run(row->size, NULL, steps_rank, &what);
    }
}

TEST_P(llama, steps_lora, trainings,
       SECONDS(120) | (row->size > 3 ? MANY_RANKS : 0) | (row->accumulate ? AT_NIGHT(ASAN) : 0)) {
    static const form *const blocks[] = {&q8_0, &q4_1};
    golden_needs("llama");
    for (int i = 0; i < CASES; i++) {
        steps_run what = {models[i], row->accumulate, row->size == 3 ? &as_f32 : &adapted};
        lab_run(row->size, NULL, steps_rank, &what);
    }
    for (int i = 0; i < 2; i++) {
        steps_run what = {"llama_quant", row->accumulate, blocks[i]};
        lab_run(row->size, NULL, steps_rank, &what);
    }
}

/* ---- files that do not fit ------------------------------------------------------------------- */

static size_t slurp(const char *dir, const char *file, char **text) {
    char path[700];
    snprintf(path, sizeof path, "%s/%s", dir, file);
    FILE *f = fopen(path, "rb");
    CHECK_MSG(f != NULL, "%s", path);
    *text = (char *)lab_zeros(1 << 18, 1);
    const size_t n = fread(*text, 1, (1 << 18) - 1, f);
    fclose(f);
    return n;
}

static void put(const char *dir, const char *file, const void *text, size_t n) {
    char path[700];
    snprintf(path, sizeof path, "%s/%s", dir, file);
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL && fwrite(text, 1, n, f) == n && fclose(f) == 0);
}

/* Copies the files of a golden model that begin with `begin`, without the last `cut` bytes; in the
   header `from` becomes `to`, which has as many bytes. */
static void copy_files(const char *name, const char *to_dir, const char *begin, size_t cut,
                       const char *from, const char *to) {
    char dir[600];
    model_dir(name, dir);
    DIR *d = opendir(dir);
    CHECK(d != NULL);
    for (struct dirent *e; (e = readdir(d));) {
        char *text;
        if (strncmp(e->d_name, begin, strlen(begin)) || e->d_name[0] == '.') continue;
        size_t n = slurp(dir, e->d_name, &text);
        for (size_t i = 8; from && i + strlen(from) < n; i++) {
            if (memcmp(text + i, from, strlen(from))) continue;
            memcpy(text + i, to, strlen(to));
            break;
        }
        put(to_dir, e->d_name, text, n - cut);
        free(text);
    }
    closedir(d);
}

static const struct {
    const char *name, *model, *members, *begin;
    size_t cut;
    const char *from, *to, *line, *extra; /* NULL: it is read */
} files[] = {
    {"fits", "llama_tied", "", "model", 0, NULL, NULL, NULL, ""},
    {"shape", "llama_tied", "\"intermediate_size\": 80", "model", 0, NULL, NULL,
     "model.layers.0.mlp.gate_proj.weight: expected shape [80, 32], got [88, 32]", ""},
    {"vector", "qwen3_tied",
     "\"head_dim\": 6, \"num_attention_heads\": 8, \"num_key_value_heads\": 4", "model", 0, NULL,
     NULL, "model.layers.0.self_attn.q_norm.weight: expected shape [6], got [12]", ""},
    {"layers", "llama_tied", "\"num_hidden_layers\": 4", "model", 0, NULL, NULL,
     "model.layers.2.self_attn.q_proj.weight: expected a tensor [32, 32], got none (18 tensors are "
     "missing)",
     ""},
    {"head", "llama_tied", "\"tie_word_embeddings\": false", "model", 0, NULL, NULL,
     "lm_head.weight: expected a tensor [97, 32], got none", ""},
    {"no_bias", "llama_tied", "\"attention_bias\": true", "model", 0, NULL, NULL,
     "model.layers.0.self_attn.q_proj.bias: expected a tensor [32], got none (8 tensors are "
     "missing)",
     ""},
    {"dtype", "llama_tied", "", "model", 0, "\"F32\"", "\"I32\"",
     "expected F32, BF16, F16 or F64, got I32", ""},
    {"renamed", "llama_tied", "", "model", 0, "model.norm.weight", "model.norm.weigh_",
     "model.norm.weight: expected a tensor [32], got none", ""},
    {"cut", "llama_tied", "", "model", 1, NULL, NULL, "/model.safetensors: is cut off", ""},
    {"shard", "llama3_rope_shards", "", "model-00001", 0, NULL, NULL, "model-0000", ""},
    {"index", "llama3_rope_shards", "", "model.safetensors.index", 0, NULL, NULL, "model-0000", ""},
    {"bin", "llama_tied", "", "generation_config", 0, NULL, NULL,
     "pytorch_model.bin: expected model.safetensors, got another format: load the model with "
     "transformers",
     ""},
    {"cut_bin", "llama_tied", "", "model", 1, NULL, NULL, "/model.safetensors: is cut off", ""},
    {"other_bin", "llama_tied", "", "model", 0, NULL, NULL, NULL, ""},
    {"extra", "llama_tied", "\"num_hidden_layers\": 1", "model", 0, NULL, NULL, NULL,
     "model.layers.1.input_layernorm.weight: the model has no such parameter; it and all others "
     "that the "
     "model does not have (9 tensors) are ignored"},
    {"extra_bias", "llama_untied_bias", "\"mlp_bias\": false", "model", 0, NULL, NULL, NULL,
     "model.layers.0.mlp.down_proj.bias: the model has no such parameter; it and all others that "
     "the model "
     "does not have (6 tensors) are ignored"},
    {"untied_head", "llama_untied_bias", "\"tie_word_embeddings\": true", "model", 0, NULL, NULL,
     NULL, ""}};

/* One line with the tensor, what is expected and what is there. A .bin next to safetensors is nothing. */
TEST_P(llama, files, files, 0) {
    llama_config c;
    fsdp_checkpoint_reader *reader = NULL;
    char why[LLAMA_WHY], extra[LLAMA_WHY], dir[600], *text;
    golden_needs("llama");
    copy_files(row->model, h_tmpdir(), row->begin, row->cut, row->from, row->to);
    if (strstr(row->name, "bin")) put(h_tmpdir(), "pytorch_model.bin", "PK", 2);
    model_dir(row->model, dir);
    size_t n = slurp(dir, "config.json", &text);
    while (text[n - 1] != '}') n--;
    n += (size_t)snprintf(text + n - 1, 4096, "%s%s}", *row->members ? ", " : "", row->members) - 1;
    put(h_tmpdir(), "config.json", text, n);
    free(text);
    CHECK_MSG(!llama_config_read(h_tmpdir(), &c, why, sizeof why), "%s", why);
    const int result = llama_files_open(h_tmpdir(), &c, &reader, why, extra, sizeof why);
    CHECK_MSG(result == (row->line ? -1 : 0), "%s", why);
    CHECK_MSG(strstr(why, row->line ? row->line : "") && !strchr(why, '\n'), "%s", why);
    CHECK(!*why == !row->line && (reader != NULL) == !row->line);
    CHECK_MSG(strstr(extra, row->extra) && !*extra == !*row->extra, "%s", extra);
    CHECK(!row->line || strstr(why, h_tmpdir()));
    if (row->line) h_message("%s", why);
    fsdp_checkpoint_close(reader);
}

/* ---- failures of one rank -------------------------------------------------------------------- */

enum { SHORT_FILE = 1, NO_MEMORY };

/* Rank 1 cannot read a file that was there before, or has no memory: no rank has a model, and each has
   a line. The world goes on. */
static void failing_rank(lab_rank *r) {
    const int how = *(const int *)r->arg;
    fsdp_checkpoint_reader *reader;
    llama_config c;
    llama_model m;
    llama_acts_desc desc;
    char why[LLAMA_WHY], extra[LLAMA_WHY], dir[600];
    snprintf(dir, sizeof dir, "%s/%d", h_tmpdir(), r->rank + 2 * how);
    CHECK(!mkdir(dir, 0700));
    copy_files("llama_tied", dir, "model", 0, NULL, NULL);
    copy_files("llama_tied", dir, "config", 0, NULL, NULL);
    CHECK_MSG(!llama_config_read(dir, &c, why, sizeof why), "%s", why);
    CHECK_MSG(!llama_files_open(dir, &c, &reader, why, extra, sizeof why), "%s", why);
    memset(&desc, 0, sizeof desc);
    desc.rows = 1, desc.context = 4, desc.loss_rows = 4;
    if (r->rank == 1 && how == SHORT_FILE)
        copy_files("llama_tied", dir, "model", 50000, NULL, NULL);
    if (r->rank == 1 && how == NO_MEMORY) desc.rows = desc.context = 2147483647;
    CHECK(llama_model_create(&m, r->w, &c, NULL, reader, &desc, why, sizeof why) ||
          llama_model_load(&m, reader, NULL, why, sizeof why));
    CHECK_MSG(!strchr(why, '\n') && *why, "%s", why);
    if (r->rank == 1)
        CHECK_MSG(strstr(why, how == SHORT_FILE ? "model.safetensors" : "memory"), "%s", why);
    CHECK(m.model == NULL && m.layers == NULL && m.acts.memory == NULL);
    CALL(r->w, fsdp_barrier(r->w));
    fsdp_checkpoint_close(reader);
}

TEST(llama, one_rank_fails) {
    golden_needs("llama");
    for (int how = SHORT_FILE; how <= NO_MEMORY; how++) lab_run(2, NULL, failing_rank, &how);
}

/* All allocations of the library fail on rank 1 from the k-th one on, or that one alone: a pass, to
   evaluate or to train, fails on both ranks. It reads no parameter that is not there. */
typedef struct failing {
    int train, k, failed[2], failures;
} failing;
static void no_memory_rank(lab_rank *r) {
    failing *f = (failing *)r->arg;
    const int32_t tokens[4] = {1, 2, 3, 4};
    llama_model m;
    llama_acts_desc desc;
    char dir[600];
    memset(&desc, 0, sizeof desc);
    desc.rows = 1, desc.context = 4, desc.loss_rows = 4;
    model_dir("qwen2_untied", dir);
    load_model(r->w, dir, &desc, &m);
    CALL(r->w, fsdp_set_grad_enabled(m.model, f->train));
    r->heap->persistent = f->k % 2;
    if (r->rank == 1) w_fail(r->heap, f->k / 2);
    (void)llama_model_pass(&m, tokens, tokens, 1, f->train ? 0.25 : 0.0, NULL, &f->failed[r->rank]);
    w_fail(r->heap, -1);
    if (r->rank == 1) f->failures = r->heap->failures;
    llama_model_destroy(&m);
}
TEST(llama, no_memory, SECONDS(60)) {
    golden_needs("llama");
    for (int train = 0; train < 2; train++) {
        failing f = {train, 0, {0, 0}, 1};
        for (; f.failures; f.k++) {
            lab_run(2, NULL, no_memory_rank, &f);
            CHECK_EQ_INT(f.failed[0], f.failed[1]);
            CHECK_EQ_INT(f.failed[0], f.failures != 0);
        }
        CHECK(f.k > 10);
    }
}
