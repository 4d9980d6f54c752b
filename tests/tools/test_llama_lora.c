/* test_llama_lora.c - examples/llama/llama_lora.h and llama_quant.h: adapters of PEFT in and out,
   merged, new; what of them is refused; blocks of bytes.

   SPDX-License-Identifier: MIT */
#include "lab_llama.h"
#include "checkpoint/lab_ckmodel.h"
#include "examples/llama/llama_save.h"

/* ---- adapter_config.json --------------------------------------------------------------------- */

static void put_config(const char *text) {
    char path[700];
    snprintf(path, sizeof path, "%s/adapter_config.json", h_tmpdir());
    ck_spit(path, text, (int64_t)strlen(text));
}

static int read_config(const char *text, llama_lora *lora, char why[LLAMA_WHY]) {
    memset(lora, 0, sizeof *lora);
    if (text) put_config(text);
    const int result = llama_adapter_read(h_tmpdir(), lora, why, LLAMA_WHY);
    CHECK_EQ_INT(result, why[0] ? -1 : 0);
    CHECK(!strchr(why, '\n'));
    return result;
}

#define QV   "\"peft_type\": \"LORA\", \"target_modules\": [\"q_proj\", \"v_proj\"]"
#define GOOD QV ", \"r\": 2, \"lora_alpha\": 3"

/* What changes the values of an adapter is refused by name. */
static const struct {
    const char *name, *members, *line;
} refused[] = {
    {"type", "\"peft_type\": \"IA3\"", "peft_type: expected \"LORA\", got \"IA3\""},
    {"no_type", "\"r\": 2", "peft_type: expected \"LORA\", got none"},
    {"no_r", QV ", \"lora_alpha\": 3", "r: expected an integer from 1 to 2147483647, got none"},
    {"r_zero", QV ", \"lora_alpha\": 3, \"r\": 0", "r: expected an integer from 1"},
    {"no_alpha", QV ", \"r\": 2", "lora_alpha: expected a number above 0, got none"},
    {"alpha", QV ", \"r\": 2, \"lora_alpha\": -1", "lora_alpha: expected a number above 0, got -1"},
    {"no_targets", "\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 3",
     "target_modules: expected a list of names, got none"},
    {"pattern",
     "\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 3, \"target_modules\": \".*q_proj\"",
     "target_modules: expected a list of names, got \".*q_proj\""},
    {"empty", "\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 3, \"target_modules\": []",
     "target_modules: expected a name, got none"},
    {"head",
     "\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 3, \"target_modules\": [\"lm_head\"]",
     "target_modules: expected names from q_proj to down_proj, got \"lm_head\""},
    {"dora", GOOD ", \"use_dora\": true", "use_dora: expected none: it is not supported, got true"},
    {"rslora", GOOD ", \"use_rslora\": true", "use_rslora: expected none"},
    {"fan", GOOD ", \"fan_in_fan_out\": true", "fan_in_fan_out: expected none"},
    {"lora_bias", GOOD ", \"lora_bias\": true", "lora_bias: expected none"},
    {"bias", GOOD ", \"bias\": \"all\"", "bias: expected \"none\", got \"all\""},
    {"modules", GOOD ", \"modules_to_save\": [\"lm_head\"]", "modules_to_save: expected none"},
    {"ranks", GOOD ", \"rank_pattern\": {\"q_proj\": 3}", "rank_pattern: expected none"},
    {"alphas", GOOD ", \"alpha_pattern\": {\"q_proj\": 3}", "alpha_pattern: expected none"},
    {"layers", GOOD ", \"layers_to_transform\": [1]", "layers_to_transform: expected none"},
    {"layer", GOOD ", \"layers_to_transform\": 1", "layers_to_transform: expected none"},
    {"exclude", GOOD ", \"exclude_modules\": \"1.*\"", "exclude_modules: expected none"},
    {"tokens", GOOD ", \"trainable_token_indices\": [1]", "trainable_token_indices: expected none"},
    {"new_method", GOOD ", \"new_config\": {\"a\": 1}",
     "new_config: expected none: it is not supported, got {\"a\": 1}"},
    {"other_layer",
     "\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 3, \"target_modules\": "
     "[\"layers.0.mlp.up_proj\"]",
     "target_modules: expected names from q_proj to down_proj, got \"layers.0.mlp.up_proj\""},
    {"pissa", GOOD ", \"init_lora_weights\": \"pissa_niter_4\"",
     "init_lora_weights: expected true, false, \"gaussian\", \"eva\" or \"orthogonal\", got "
     "\"pissa_niter_4\""}};
TEST_P(llama_lora, refused, refused, 0) {
    char text[500], why[LLAMA_WHY];
    llama_lora lora;
    snprintf(text, sizeof text, "{%s}", row->members);
    CHECK_EQ_INT(read_config(text, &lora, why), -1);
    CHECK_MSG(strstr(why, "/adapter_config.json: ") && strstr(why, row->line), "%s", why);
}

/* Files of PEFT, and keys that say what is so anyway. */
TEST(llama_lora, given) {
    char why[LLAMA_WHY];
    llama_lora lora;
    CHECK_EQ_INT(read_config(NULL, &lora, why), -1);
    CHECK_MSG(strstr(why, "expected an adapter of PEFT, as --lora"), "%s", why);
    CHECK_EQ_INT(read_config("[]", &lora, why), -1);
    CHECK_MSG(
        !read_config("{" GOOD ", \"use_dora\": false, \"rank_pattern\": {}, "
                     "\"modules_to_save\": null, \"exclude_modules\": [], \"bias\": \"none\"}",
                     &lora, why),
        "%s", why);
    CHECK_EQ_INT(lora.rank, 2);
    CHECK_EQ_INT(lora.targets, 1 << LLAMA_Q | 1 << LLAMA_V);
    CHECK_NEAR(lora.alpha, 3.0, 0.0);
    CHECK_MSG(!read_config("{\"peft_type\": \"LORA\", \"r\": 2, \"lora_alpha\": 3, "
                           "\"init_lora_weights\": \"gaussian\", \"peft_version\": \"1\", "
                           "\"target_modules\": [\"mlp.up_proj\", \"o_proj\"]}",
                           &lora, why),
              "%s", why);
    CHECK_EQ_INT(lora.targets, 1 << LLAMA_UP | 1 << LLAMA_O);
}

/* What is written can be read, whatever the path of the base is. */
TEST(llama_lora, written) {
    static const char *const bases[] = {"../model", "a \"b\"\\c\n\x01\xC3\xBC", ""};
    static char text[LLAMA_ADAPTER_TEXT];
    char why[LLAMA_WHY], base[100], whole[LLAMA_PATH];
    llama_lora lora, again;
    fsdp_json root, v;
    memset(&lora, 0, sizeof lora);
    lora.rank = 5, lora.alpha = 0.1, lora.targets = 1 << LLAMA_DOWN | 1 << LLAMA_O;
    for (int i = 0; i < 3; i++) {
        int64_t n = llama_adapter_text(&lora, bases[i], text);
        CHECK_EQ_INT(n, strlen(text));
        CHECK_MSG(!read_config(text, &again, why), "%s", why);
        CHECK_EQ_INT(again.rank, 5);
        CHECK_EQ_INT(again.targets, lora.targets);
        CHECK_NEAR(again.alpha, 0.1, 1e-8);
        CHECK(!fsdp_json_parse(text, n, &root, why, sizeof why));
        CHECK(fsdp_json_find(&root, "base_model_name_or_path", &v));
        n = fsdp_json_string(&v, base, sizeof base);
        CHECK_EQ_INT(n, strlen(bases[i]));
        CHECK(!memcmp(base, bases[i], (size_t)n));
    }
    memset(whole, 1, sizeof whole - 1), whole[sizeof whole - 1] = 0; /* six bytes for each */
    CHECK(llama_adapter_text(&lora, whole, text) < LLAMA_ADAPTER_TEXT);
}

TEST(llama_lora, targets) {
    static const char *const wrong[] = {"", "q,", ",q", "q_proj", "x", "q,,k", "q k", "qk"};
    unsigned bits;
    for (int i = 0; i < 8; i++) CHECK_MSG(llama_targets_read(wrong[i], &bits), "%s", wrong[i]);
    CHECK(!llama_targets_read("q,k,v,o,gate,up,down", &bits) && bits == LLAMA_ALL_TARGETS);
    CHECK(!llama_targets_read("up,up", &bits) && bits == 1u << LLAMA_UP);
}

/* ---- files of adapters ----------------------------------------------------------------------- */

static void adapter_dir(const char *name, char dir[700]) {
    char model[600];
    model_dir(name, model);
    snprintf(dir, 700, "%s/../adapter", model);
}

/* An adapter fits its target_modules, or a line says why not. */
TEST(llama_lora, files) {
    fsdp_checkpoint_reader *files;
    llama_config c;
    llama_lora lora;
    char dir[700], model[600], path[700], why[LLAMA_WHY];
    golden_needs("llama");
    model_dir("llama_tied", model), adapter_dir("llama_tied", dir);
    CHECK_MSG(!llama_config_read(model, &c, why, sizeof why), "%s", why);
    CHECK_MSG(!llama_adapter_read(dir, &lora, why, sizeof why), "%s", why);
    CHECK_MSG(!llama_adapter_open(dir, &c, &lora, &files, why, sizeof why), "%s", why);
    fsdp_checkpoint_close(files);
    lora.targets &= ~(1u << LLAMA_UP);
    CHECK_EQ_INT(llama_adapter_open(dir, &c, &lora, &files, why, sizeof why), -1);
    CHECK_MSG(strstr(why, "expected the 24 tensors of target_modules, got 28"), "%s", why);
    lora.targets = LLAMA_ALL_TARGETS, lora.rank = 5;
    CHECK_EQ_INT(llama_adapter_open(dir, &c, &lora, &files, why, sizeof why), -1);
    CHECK_MSG(strstr(why, "model.layers.0.self_attn.q_proj.lora_A.weight: expected shape [5, 32], "
                          "got [4, 32]"),
              "%s", why);
    lora.rank = 4, c.layers = 3;
    CHECK_EQ_INT(llama_adapter_open(dir, &c, &lora, &files, why, sizeof why), -1);
    CHECK_MSG(strstr(why, "model.layers.2.self_attn.q_proj.lora_A.weight: expected a tensor [4, 32]"
                          ", got none (14 tensors are missing)"),
              "%s", why);
    snprintf(path, sizeof path, "%s", h_tmpdir());
    CHECK_EQ_INT(llama_adapter_open(path, &c, &lora, &files, why, sizeof why), -1);
    CHECK_MSG(strstr(why, "/adapter_model.safetensors"), "%s", why);
    CHECK(files == NULL);
}

/* Returns all floats of a tensor. The caller frees them. */
static float *floats_of(fsdp_checkpoint_reader *files, const char *name,
                        fsdp_checkpoint_tensor *t) {
    char why[800];
    const int64_t i = fsdp_checkpoint_tensor_find(files, name);
    CHECK_MSG(!fsdp_checkpoint_tensor_at(files, i, t), "%s", name);
    float *to = (float *)lab_zeros((size_t)lab_numel(t->ndim, t->shape), sizeof *to);
    CHECK_MSG(!fsdp_checkpoint_read(files, i, NULL, NULL, FSDP_F32, to, why, sizeof why), "%s",
              why);
    return to;
}
static fsdp_checkpoint_reader *open_file(const char *path) {
    fsdp_checkpoint_reader *files;
    char why[LLAMA_WHY];
    CHECK_MSG(!fsdp_checkpoint_open(path, NULL, NULL, &files, why, sizeof why), "%s", why);
    return files;
}

static void load_tiny(lab_rank *r, const char *name, const form *of, llama_model *m) {
    llama_acts_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = 1, desc.context = 8, desc.loss_rows = 4;
    load_form(r->w, name, of, &desc, m);
}

/* An adapter goes out with the names, shapes and values with which it came in, and nothing else. */
static void out_rank(lab_rank *r) {
    const char *name = *(const char *const *)r->arg;
    char dir[700], out[600], path[1400], why[LLAMA_WHY];
    fsdp_checkpoint_desc desc = FSDP_ZERO;
    fsdp_checkpoint_contents all, same;
    fsdp_checkpoint_tensor t, u;
    fsdp_checkpoint *ck;
    llama_model m;
    load_tiny(r, name, &adapted, &m);
    desc.skip_frozen = 1;
    CALL(r->w, fsdp_checkpoint_create(m.model, &desc, &ck));
    snprintf(out, sizeof out, "%s/%s-%d", h_tmpdir(), name, r->size);
    CHECK_MSG(!llama_export_adapter(&m, ck, "base", out, why, sizeof why), "%s", why);
    if (r->rank == 0) {
        llama_lora lora;
        adapter_dir(name, dir);
        snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
        fsdp_checkpoint_reader *a = open_file(path);
        snprintf(path, sizeof path, "%s/adapter_model.safetensors", out);
        fsdp_checkpoint_reader *b = open_file(path);
        CHECK_OK(fsdp_checkpoint_contents_of(a, &all));
        CHECK_OK(fsdp_checkpoint_contents_of(b, &same));
        CHECK_EQ_INT(all.num_tensors, same.num_tensors);
        for (int64_t i = 0; i < all.num_tensors; i++) {
            CHECK_OK(fsdp_checkpoint_tensor_at(a, i, &t));
            float *x = floats_of(a, t.name, &t), *y = floats_of(b, t.name, &u);
            CHECK(u.dtype == FSDP_F32 && t.shape[0] == u.shape[0] && t.shape[1] == u.shape[1]);
            CHECK(!memcmp(x, y, (size_t)lab_numel(t.ndim, t.shape) * sizeof *x));
            free(x), free(y);
        }
        CHECK_EQ_INT(ck_num_names(out), 2);
        CHECK_MSG(!llama_adapter_read(out, &lora, why, sizeof why), "%s", why);
        CHECK(lora.rank == 4 && lora.targets == LLAMA_ALL_TARGETS);
        CHECK_NEAR(lora.alpha, 8.0, 0.0);
        fsdp_checkpoint_close(a), fsdp_checkpoint_close(b);
    }
    llama_model_destroy(&m);
}
TEST(llama_lora, out, SECONDS(60)) {
    golden_needs("llama");
    for (int i = 0; i < CASES; i++)
        for (int size = 1; size <= 3; size += 2)
            lab_run(size, NULL, out_rank, (void *)(uintptr_t)&models[i]);
}

/* Compares a tensor of a merged model with W + 2 B A, added in double. A base in fewer bits than the
   export counts as the files have it. */
static void check_merged(fsdp_checkpoint_reader *base, fsdp_checkpoint_reader *adapter,
                         fsdp_checkpoint_reader *out, const char *name, fsdp_dtype dtype) {
    fsdp_checkpoint_tensor t, u;
    float *w = floats_of(base, name, &t), *got = floats_of(out, name, &u);
    const int64_t n = lab_numel(t.ndim, t.shape), columns = t.shape[t.ndim - 1];
    const int is_matrix = strstr(name, "_proj.weight") != NULL;
    const int part = (int)strlen(name) - (int)strlen("weight");
    float *A = NULL, *B = NULL;
    double moved = 0.0;
    CHECK_EQ_INT(u.dtype, dtype == FSDP_DTYPE_KEEP ? t.dtype : dtype);
    for (int k = 0; k < 2 && is_matrix; k++) {
        char of[300];
        fsdp_checkpoint_tensor v;
        snprintf(of, sizeof of, "%s%.*slora_%c.weight", LLAMA_PEFT, part, name, "AB"[k]);
        *(k ? &B : &A) = floats_of(adapter, of, &v);
    }
    for (int64_t i = 0; i < n; i++) {
        double sum = 0.0, large = fabs((double)w[i]);
        for (int k = 0; k < 4 && is_matrix; k++) {
            const double term = 2.0 * (double)B[i / columns * 4 + k] *
                                (double)A[k * columns + i % columns];
            sum += term, large += fabs(term);
        }
        const double want = (double)w[i] + sum;
        /* one rounding: the error of an f32 sum, and half a unit of the dtype */
        const double half = u.dtype == FSDP_F32    ? 0.0
                            : u.dtype == FSDP_BF16 ? 1.0 / 256
                                                   : 1.0 / 2048;
        const double slack = 2e-7 * large + (u.dtype == FSDP_F16 ? 3e-8 : 0.0);
        CHECK_MSG(fabs((double)got[i] - want) <= slack + half * 1.001 * fabs(want), "%s[%lld]",
                  name, (long long)i);
        moved += fabs(sum);
    }
    CHECK((moved > 0.0) == is_matrix);
    free(w), free(got), free(A), free(B);
}

/* The second model of a merge takes what llama_merge_predict says, also after its export, and
   scratch. */
static void merge_takes(lab_rank *r, llama_model *m, const char *model, const char *out,
                        int dtype) {
    char why[LLAMA_WHY], extra[LLAMA_WHY];
    fsdp_checkpoint_reader *files;
    fsdp_checkpoint *ck;
    fsdp_memory measured;
    llama_merge g;
    int64_t predicted;
    CHECK_MSG(!llama_files_open(model, &m->c, &files, why, extra, sizeof why), "%s", why);
    CHECK_MSG(!llama_merge_predict(m, files, dtype, &predicted, why, sizeof why), "%s", why);
    memset(&g, 0, sizeof g);
    CHECK_MSG(!llama_merge_gather(&g, m, why, sizeof why), "%s", why);
    CHECK_MSG(!llama_merge_create(&g.out, m, files, dtype, why, sizeof why), "%s", why);
    g.out.files = files;
    CHECK_MSG(!llama_model_fill(&g.out, llama_merge_fill, &g, why, sizeof why), "%s", why);
    CALL(r->w, fsdp_checkpoint_create(g.out.model, NULL, &ck));
    CHECK_MSG(!llama_export(&g.out, ck, model, out, dtype, why, sizeof why), "%s", why);
    CALL(r->w, fsdp_model_memory(g.out.model, &measured));
    const int64_t counted = measured.total_bytes - measured.pool_bytes[FSDP_POOL_SCRATCH];
    CHECK_EQ_INT(predicted, counted + (int64_t)g.out.acts.nbytes + llama_adapters_nbytes(m));
    fsdp_checkpoint_close(files);
    llama_model_destroy(&g.out);
    free(g.memory), free(g.adapters);
}

static void merged_rank(lab_rank *r) {
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_KEEP, FSDP_F32, FSDP_BF16, FSDP_F16};
    const char *name = *(const char *const *)r->arg;
    char model[600], dir[700], out[600], path[1400], why[LLAMA_WHY];
    fsdp_checkpoint_contents all, same;
    fsdp_checkpoint_tensor t;
    llama_model m;
    load_tiny(r, name, &adapted, &m);
    model_dir(name, model), adapter_dir(name, dir);
    for (int d = LLAMA_DTYPE_FILE; d < LLAMA_DTYPE_FILES; d++) {
        snprintf(out, sizeof out, "%s/%s-%d-%d", h_tmpdir(), name, r->size, d);
        CHECK_MSG(!llama_export_merged(&m, model, out, d, why, sizeof why), "%s", why);
        strcat(out, "-takes");
        merge_takes(r, &m, model, out, d);
        out[strlen(out) - 6] = 0;
        if (r->rank) continue;
        snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
        fsdp_checkpoint_reader *a = open_file(model), *b = open_file(path), *c = open_file(out);
        CHECK_OK(fsdp_checkpoint_contents_of(a, &all));
        CHECK_OK(fsdp_checkpoint_contents_of(c, &same));
        CHECK_EQ_INT(all.num_tensors, same.num_tensors);
        for (int64_t i = 0; i < all.num_tensors; i++) {
            CHECK_OK(fsdp_checkpoint_tensor_at(a, i, &t));
            check_merged(a, b, c, t.name, dtypes[d]);
        }
        fsdp_checkpoint_close(a), fsdp_checkpoint_close(b), fsdp_checkpoint_close(c);
    }
    /* the name is taken: refused on every rank; the model is as before */
    CHECK_EQ_INT(llama_export_merged(&m, model, out, 0, why, sizeof why), -1);
    CHECK_MSG(strstr(why, "is there already"), "%s", why);
    CHECK_EQ_INT(llama_export_merged(&m, h_tmpdir(), out, 0, why, sizeof why), -1);
    CHECK(why[0] && !strchr(why, '\n'));
    /* one rank cannot read the model */
    snprintf(out, sizeof out, "%s/%s-%d-x", h_tmpdir(), name, r->size);
    if (r->size > 1) {
        const char *from = r->rank ? model : h_tmpdir();
        CHECK_EQ_INT(llama_export_merged(&m, from, out, 0, why, sizeof why), -1);
        CHECK_MSG(strstr(why, r->rank ? "another rank has failed" : "got no weights"), "%s", why);
        CALL(r->w, fsdp_barrier(r->w));
    }
    llama_model_destroy(&m);
}
TEST(llama_lora, merged, SECONDS(60)) {
    golden_needs("llama");
    for (int i = 0; i < CASES; i++)
        for (int size = 1; size <= 3; size += 2)
            lab_run(size, NULL, merged_rank, (void *)(uintptr_t)&models[i]);
}

/* ---- new adapters ---------------------------------------------------------------------------- */

/* A is even between the bounds of PEFT and the same on any number of ranks; B is zero, so that the
   model is that of the files. Another seed has other values. */
typedef struct fresh {
    float values[2][1 << 14]; /* of A, by one and by several ranks */
    double loss[2];
} fresh;
static void new_rank(lab_rank *r) {
    fresh *f = (fresh *)r->arg;
    const int many = r->size > 1;
    static const int32_t tokens[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    float *to = f->values[many], *other = (float *)lab_zeros(1 << 14, sizeof *other);
    llama_lora lora = {3, 6.0, 1u << LLAMA_K | 1u << LLAMA_DOWN, LLAMA_DTYPE_FILE, 7};
    llama_acts_desc desc;
    llama_model m;
    char dir[600];
    int failed;
    int64_t n = 0;
    memset(&desc, 0, sizeof desc);
    desc.rows = 1, desc.context = 8, desc.loss_rows = 4;
    model_dir("llama_tied", dir);
    for (int again = 0; again < 2; again++) {
        fsdp_param_view v = FSDP_ZERO;
        double largest = 0.0, sum = 0.0;
        load_adapted(r->w, dir, &lora, NULL, &desc, &m);
        for (n = 0; fsdp_next_param(m.model, &v);) {
            const int64_t numel = lab_numel(v.ndim, v.shape);
            const double bound = 1.0 / sqrt((double)v.shape[1]);
            if (!v.requires_grad) continue;
            CALL(r->w, fsdp_param_full(v.unit, v.index, other));
            for (int64_t i = 0; i < numel && strstr(v.name, "lora_B"); i++) CHECK(other[i] == 0.0f);
            if (strstr(v.name, "lora_B")) continue;
            for (int64_t i = 0; i < numel; i++) {
                const double x = (double)other[i] / bound;
                CHECK(x >= -1.0 && x < 1.0);
                largest = fabs(x) > largest ? fabs(x) : largest, sum += x;
            }
            CHECK(n + numel <= 1 << 14);
            if (again) CHECK(memcmp(to + n, other, (size_t)numel * sizeof *to));
            else memcpy(to + n, other, (size_t)numel * sizeof *to);
            n += numel;
        }
        CHECK_EQ_INT(n, 2 * 3 * (32 + 88));
        CHECK(largest > 0.98 && fabs(sum / (double)n) < 0.1);
        CALL(r->w, fsdp_set_grad_enabled(m.model, 0));
        f->loss[many] = llama_model_pass(&m, tokens, tokens, 1, 0.0, NULL, &failed);
        CHECK(!failed);
        llama_model_destroy(&m);
        lora.seed++;
    }
    load_model(r->w, dir, &desc, &m);
    CALL(r->w, fsdp_set_grad_enabled(m.model, 0));
    CHECK(llama_model_pass(&m, tokens, tokens, 1, 0.0, NULL, &failed) == f->loss[many]);
    llama_model_destroy(&m);
    free(other);
}
TEST(llama_lora, begins) {
    golden_needs("llama");
    fresh *f = (fresh *)lab_shared(sizeof *f);
    lab_run(1, NULL, new_rank, f);
    lab_run(3, NULL, new_rank, f);
    CHECK(!memcmp(f->values[0], f->values[1], sizeof f->values[0]));
    /* other values for each matrix, and for each layer */
    CHECK(memcmp(f->values[0], f->values[0] + 3 * 32, 3 * 32 * sizeof(float)));
    CHECK(memcmp(f->values[0], f->values[0] + 3 * (32 + 88), 3 * 32 * sizeof(float)));
}

/* ---- blocks ---------------------------------------------------------------------------------- */

enum { ELEMENTS = 32 * 150 };

/* An element is off by half a step at most; a second time the bytes are the same. */
TEST(llama_lora, blocks) {
    static float x[ELEMENTS], y[ELEMENTS], z[ELEMENTS];
    static uint8_t bytes[2][34 * ELEMENTS / 32];
    uint64_t state = 5;
    for (int kind = LLAMA_DTYPE_Q8_0; kind <= LLAMA_DTYPE_Q4_1; kind++) {
        const int nbytes = llama_dtypes[kind].block_bytes;
        for (int i = 0; i < ELEMENTS; i++) {
            const int b = i / 32;
            x[i] = (float)(ldexp(lab_uniform(&state) - 0.3, b % 24 - 14));
            if (b == 3) x[i] = 0.0f;
            if (b == 4) x[i] = 1.5f;
        }
        llama_store(bytes[0], x, kind, ELEMENTS);
        llama_convert(y, bytes[0], kind, 0, ELEMENTS);
        for (int b = 0; b < ELEMENTS / 32; b++) {
            double low = (double)x[32 * b], high = low, most = 0.0;
            for (int i = 32 * b; i < 32 * b + 32; i++) {
                low = fmin(low, (double)x[i]), high = fmax(high, (double)x[i]);
                most = fmax(most, fabs((double)x[i]));
            }
            const double step = kind == LLAMA_DTYPE_Q8_0 ? most / 127.0 : (high - low) / 15.0;
            for (int i = 32 * b; i < 32 * b + 32; i++)
                CHECK(fabs((double)y[i] - (double)x[i]) <= 0.5 * step + most / 500.0 + 1e-5);
            if (b == 3 || b == 4) CHECK_NEAR(y[32 * b + 7], x[32 * b], most / 1000.0);
        }
        llama_store(bytes[1], y, kind, ELEMENTS);
        llama_convert(z, bytes[1], kind, 0, ELEMENTS);
        CHECK(kind == LLAMA_DTYPE_Q8_0 || !memcmp(y, z, sizeof y));
        /* a part begins at a block */
        llama_convert(z, bytes[0], kind, 32 * 70, 64);
        CHECK(!memcmp(z, y + 32 * 70, 64 * sizeof *z));
        CHECK(nbytes == (kind == LLAMA_DTYPE_Q8_0 ? 34 : 20));
    }
}

/* What is no number stays none, and spoils its own block only. */
TEST(llama_lora, no_numbers) {
    static const float odd[] = {NAN, INFINITY, -INFINITY, 1e30f};
    for (int kind = LLAMA_DTYPE_Q8_0; kind <= LLAMA_DTYPE_Q4_1; kind++) {
        for (int i = 0; i < 4; i++) {
            float x[64] = {0}, y[64];
            uint8_t bytes[68];
            for (int j = 0; j < 64; j++) x[j] = (float)j;
            x[40] = odd[i];
            llama_store(bytes, x, kind, 64);
            llama_convert(y, bytes, kind, 0, 64);
            for (int j = 0; j < 32; j++) CHECK_NEAR(y[j], x[j], 1.04);
        }
    }
}
