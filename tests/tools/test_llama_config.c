/* test_llama_config.c - examples/llama/llama_config.h: what it reads from config.json of the golden
   models, and the line for each thing that it refuses; it allocates nothing.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"
#include "golden.h"
#include "examples/llama/llama_config.h"

/* ---- counts allocations ---------------------------------------------------------------------- */

static int64_t allocations; /* while `watched` */
static int watched;
#if defined(__GLIBC__) && !defined(W_SANITIZED)
extern void *libc_malloc(size_t size) __asm__("__libc_malloc");
extern void *libc_calloc(size_t count, size_t size) __asm__("__libc_calloc");
extern void *libc_realloc(void *ptr, size_t size) __asm__("__libc_realloc");
void *malloc(size_t size) { return allocations += watched, libc_malloc(size); }
void *calloc(size_t n, size_t size) { return allocations += watched, libc_calloc(n, size); }
void *realloc(void *ptr, size_t size) { return allocations += watched, libc_realloc(ptr, size); }
#endif

static int read_config(const char *dir, llama_config *c, char *why, size_t cap) {
    allocations = 0, watched = 1;
    const int result = llama_config_read(dir, c, why, cap);
    watched = 0;
    CHECK_EQ_INT(allocations, 0);
    CHECK_EQ_INT(result, why[0] ? -1 : 0);
    CHECK(!strchr(why, '\n') && !strchr(why, '\t'));
    return result;
}

/* ---- files ----------------------------------------------------------------------------------- */

static const char *dir_of(const char *name) {
    static char dir[600];
    golden_needs("llama");
    snprintf(dir, sizeof dir, "%s/llama/%s/model", golden_dir(), name);
    return dir;
}

static size_t slurp(const char *dir, const char *file, char *text, size_t cap) {
    char path[700];
    snprintf(path, sizeof path, "%s/%s", dir, file);
    FILE *f = fopen(path, "rb");
    CHECK_MSG(f != NULL, "%s", path);
    const size_t n = fread(text, 1, cap - 1, f);
    text[n] = 0;
    fclose(f);
    return n;
}

static void put(const char *file, const void *text, size_t n) {
    char path[700];
    snprintf(path, sizeof path, "%s/%s", h_tmpdir(), file);
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL && fwrite(text, 1, n, f) == n);
    fclose(f);
}

/* Writes config.json of a golden model with more members: the last one of a name counts. */
static void put_config(const char *name, const char *members) {
    char text[8192];
    size_t n = slurp(dir_of(name), "config.json", text, 4096);
    while (text[n - 1] != '}') n--;
    n = (size_t)snprintf(text + n - 1, 4096, "%s%s}", *members ? ", " : "", members) + n - 1;
    put("config.json", text, n);
}

/* ---- what is read ---------------------------------------------------------------------------- */

static const struct {
    const char *name;
    llama_config c; /* without eos, which is {2} in all */
} models[] = {{"llama_tied",
               {32, 88, 2, 4, 2, 8, 97, 128, 1, 0, 0, 0, 0, 1e-5f, 1e4f, 0, 0, 0, 0, 0, 1, {2}}},
              {"llama_untied_bias",
               {40, 56, 2, 4, 1, 10, 101, 128, 0, 1, 1, 1, 0, 1e-6f, 5e5f, 0, 0, 0, 0, 0, 1, {2}}},
              {"llama3_rope_shards",
               {36, 88, 2, 4, 2, 16, 103, 128, 1, 0, 0, 0, 0, 1e-5f, 1e4f, 1, 8, 1, 4, 32, 1, {2}}},
              {"llama3_rope_old",
               {32, 72, 2, 4, 4, 8, 109, 128, 0, 0, 0, 0, 0, 1e-5f, 5e4f, 1, 4, 1, 4, 24, 1, {2}}},
              {"qwen2_tied",
               {36, 88, 2, 6, 2, 6, 113, 128, 1, 1, 0, 0, 0, 1e-6f, 1e6f, 0, 0, 0, 0, 0, 1, {2}}},
              {"qwen2_untied",
               {32, 80, 2, 4, 1, 8, 96, 128, 0, 1, 0, 0, 0, 1e-6f, 1e4f, 0, 0, 0, 0, 0, 1, {2}}},
              {"qwen3_tied",
               {32, 88, 2, 4, 2, 12, 160, 128, 1, 0, 0, 0, 1, 1e-6f, 1e6f, 0, 0, 0, 0, 0, 1, {2}}},
              {"llama_quant",
               {32, 96, 2, 4, 2, 8, 128, 128, 1, 0, 0, 0, 0, 1e-5f, 1e4f, 0, 0, 0, 0, 0, 1, {2}}}};

TEST_P(llama_config, golden, models, 0) {
    llama_config c;
    char why[LLAMA_WHY];
    CHECK_EQ_INT(read_config(dir_of(row->name), &c, why, sizeof why), 0);
    CHECK_EQ_MEM(&c, &row->c, sizeof c);
}

/* Keys that are missing, or are there in another spelling. */
static const struct {
    const char *name, *model, *members;
    size_t field;
    int is_float;
    double want;
} given[] = {
#define INT(field)   offsetof(llama_config, field), 0
#define FLOAT(field) offsetof(llama_config, field), 1
    {"kv_heads_of_llama", "llama_tied", "\"num_key_value_heads\": null, \"head_dim\": 8",
     INT(kv_heads), 4},
    {"head_dim", "llama_tied", "\"head_dim\": null", INT(head_dim), 8},
    {"theta", "llama_tied", "\"rope_parameters\": null", FLOAT(theta), 10000},
    {"theta_outside", "qwen2_tied", "\"rope_parameters\": null, \"rope_theta\": 7e5", FLOAT(theta),
     7e5},
    {"theta_inside", "qwen2_tied", "\"rope_parameters\": {\"rope_theta\": 5}", FLOAT(theta), 5},
    {"old_type", "llama3_rope_old",
     "\"rope_scaling\": {\"type\": \"llama3\", \"factor\": 2, \"low_freq_factor\": 1, "
     "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 9}",
     FLOAT(original_context), 9},
    {"default_type", "llama3_rope_old", "\"rope_scaling\": {\"type\": \"default\"}", INT(llama3),
     0},
    {"no_tie", "llama_tied", "\"tie_word_embeddings\": null", INT(tied), 0},
    {"bias_of_qwen3", "qwen3_tied", "\"attention_bias\": true", INT(o_bias), 1},
    {"bias_of_qwen2", "qwen2_tied", "\"attention_bias\": true", INT(o_bias), 0},
    {"mlp_bias_of_qwen2", "qwen2_tied", "\"mlp_bias\": true", INT(mlp_bias), 0},
    {"no_architectures", "llama_tied", "\"architectures\": null, \"hidden_act\": null", INT(hidden),
     32},
    {"no_context", "llama_tied", "\"max_position_embeddings\": null", INT(context), 2147483647},
    {"window_of_qwen2", "qwen2_tied", "\"sliding_window\": 4096", INT(hidden), 36},
    {"one", "llama_tied", "\"partial_rotary_factor\": 1, \"pretraining_tp\": 1", INT(hidden), 32},
    {"escaped", "llama_tied", "\"\\u0068idden_size\": 64, \"head_dim\": 8", INT(hidden), 64}};

TEST_P(llama_config, given, given, 0) {
    llama_config c;
    char why[LLAMA_WHY];
    put_config(row->model, row->members);
    CHECK_MSG(!read_config(h_tmpdir(), &c, why, sizeof why), "%s", why);
    const char *at = (const char *)&c + row->field;
    if (row->is_float) CHECK_NEAR(*(const float *)(const void *)at, row->want, 0.0);
    else CHECK_EQ_INT(*(const int *)(const void *)at, (int)row->want);
}

/* End tokens: generation_config.json comes first, then config.json; a number or a list. */
TEST(llama_config, end_tokens) {
    static const char *const files[] = {NULL, "{\"eos_token_id\": [7, 9]}", "{}",
                                        "{\"eos_token_id\": null}", "{\"eos_token_id\": 0}"};
    static const int counts[] = {3, 2, 3, 3, 1}, firsts[] = {4, 7, 4, 4, 0};
    llama_config c;
    char why[LLAMA_WHY];
    put_config("llama_tied", "\"eos_token_id\": [4, 5, 6]");
    for (int i = 0; i < 5; i++) {
        if (files[i]) put("generation_config.json", files[i], strlen(files[i]));
        CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), 0);
        CHECK_EQ_INT(c.num_eos, counts[i]);
        CHECK_EQ_INT(c.eos[0], firsts[i]);
    }
    put_config("llama_tied", "\"eos_token_id\": null");
    put("generation_config.json", "{}", 2);
    CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), 0);
    CHECK_EQ_INT(c.num_eos, 0);
}

/* ---- what is refused ------------------------------------------------------------------------- */

#define SIZE_KEY "expected an integer from 1 to 2147483647, got "
static const struct {
    const char *name, *model, *members, *line;
} refused[] = {
    {"type", "llama_tied", "\"model_type\": \"mistral\"",
     "model_type: expected llama, qwen2 or qwen3, got \"mistral\""},
    {"no_type", "llama_tied", "\"model_type\": null",
     "model_type: expected llama, qwen2 or qwen3, got none"},
    {"type_in_line", "llama_tied", "\"model_type\": {\n\t\"a\":\n 1}",
     "model_type: expected llama, qwen2 or qwen3, got { \"a\": 1}"},
    {"architecture", "llama_tied", "\"architectures\": [\"LlamaForSequenceClassification\"]",
     "architectures: expected LlamaForCausalLM, got \"LlamaForSequenceClassification\""},
    {"architecture_of_other", "qwen3_tied", "\"architectures\": [\"Qwen2ForCausalLM\"]",
     "architectures: expected Qwen3ForCausalLM, got \"Qwen2ForCausalLM\""},
    {"architectures", "llama_tied", "\"architectures\": 1",
     "architectures: expected a list, got 1"},
    {"no_hidden", "llama_tied", "\"hidden_size\": null", "hidden_size: " SIZE_KEY "none"},
    {"hidden_text", "llama_tied", "\"hidden_size\": \"32\"", "hidden_size: " SIZE_KEY "\"32\""},
    {"hidden_fraction", "llama_tied", "\"hidden_size\": 32.0", "hidden_size: " SIZE_KEY "32.0"},
    {"no_inner", "llama_tied", "\"intermediate_size\": 0", "intermediate_size: " SIZE_KEY "0"},
    {"layers", "llama_tied", "\"num_hidden_layers\": -1", "num_hidden_layers: " SIZE_KEY "-1"},
    {"vocab", "llama_tied", "\"vocab_size\": 2147483648", "vocab_size: " SIZE_KEY "2147483648"},
    {"heads", "llama_tied", "\"num_attention_heads\": []", "num_attention_heads: " SIZE_KEY "[]"},
    {"context", "llama_tied", "\"max_position_embeddings\": true",
     "max_position_embeddings: " SIZE_KEY "true"},
    {"eps", "llama_tied", "\"rms_norm_eps\": null",
     "rms_norm_eps: expected a number above 0, got none"},
    {"eps_zero", "llama_tied", "\"rms_norm_eps\": 0",
     "rms_norm_eps: expected a number above 0, got 0"},
    {"eps_small", "llama_tied", "\"rms_norm_eps\": 1e-60",
     "rms_norm_eps: expected a number above 0, got 1e-60"},
    {"kv_heads_of_qwen2", "qwen2_tied", "\"num_key_value_heads\": null",
     "num_key_value_heads: " SIZE_KEY "none"},
    {"kv_heads_of_qwen3", "qwen3_tied", "\"num_key_value_heads\": null",
     "num_key_value_heads: " SIZE_KEY "none"},
    {"head_dim_of_qwen3", "qwen3_tied", "\"head_dim\": null", "head_dim: " SIZE_KEY "none"},
    {"head_dim_zero", "llama_tied", "\"head_dim\": 0", "head_dim: " SIZE_KEY "0"},
    {"hidden_of_heads", "llama_tied", "\"head_dim\": null, \"hidden_size\": 34",
     "hidden_size: expected a multiple of num_attention_heads (4), got 34"},
    {"kv_divisor", "llama_tied", "\"num_key_value_heads\": 3",
     "num_key_value_heads: expected a divisor of num_attention_heads (4), got 3"},
    {"kv_more", "llama_tied", "\"num_key_value_heads\": 8",
     "num_key_value_heads: expected a divisor of num_attention_heads (4), got 8"},
    {"odd_head", "llama_tied", "\"head_dim\": 7", "head_dim: expected an even number, got 7"},
    {"wide_heads", "llama_tied", "\"head_dim\": 1000000000",
     "head_dim: expected at most 2147483647 with num_attention_heads (4), got 1000000000"},
    {"act", "llama_tied", "\"hidden_act\": \"gelu\"",
     "hidden_act: expected \"silu\", got \"gelu\""},
    {"tied", "llama_tied", "\"tie_word_embeddings\": 1",
     "tie_word_embeddings: expected true or false, got 1"},
    {"bias", "llama_tied", "\"attention_bias\": \"no\"",
     "attention_bias: expected true or false, got \"no\""},
    {"mlp_bias", "llama_tied", "\"mlp_bias\": 0", "mlp_bias: expected true or false, got 0"},
    {"experts", "qwen3_tied", "\"num_experts\": 128",
     "num_experts: expected none: experts are not supported, got 128"},
    {"local_experts", "llama_tied", "\"num_local_experts\": 8",
     "num_local_experts: expected none: experts are not supported, got 8"},
    {"rope_linear", "llama_tied", "\"rope_parameters\": {\"rope_type\": \"linear\", \"factor\": 2}",
     "rope_parameters.rope_type: expected \"default\" or \"llama3\", got \"linear\""},
    {"rope_dynamic", "qwen2_untied", "\"rope_scaling\": {\"type\": \"dynamic\", \"factor\": 2}",
     "rope_scaling.type: expected \"default\" or \"llama3\", got \"dynamic\""},
    {"rope_yarn", "qwen2_untied",
     "\"rope_scaling\": {\"rope_type\": \"yarn\", \"type\": \"default\"}",
     "rope_scaling.rope_type: expected \"default\" or \"llama3\", got \"yarn\""},
    {"rope_no_type", "qwen2_untied", "\"rope_scaling\": {\"factor\": 2}",
     "rope_scaling.rope_type: expected \"default\" or \"llama3\", got none"},
    {"rope_text", "qwen2_untied", "\"rope_scaling\": \"linear\"",
     "rope_scaling: expected an object, got \"linear\""},
    {"rope_twice", "llama_tied", "\"rope_scaling\": {\"type\": \"default\"}",
     "rope_scaling: expected none next to rope_parameters, got {\"type\": \"default\"}"},
    {"rope_nested", "llama_tied",
     "\"rope_parameters\": {\"full_attention\": {\"rope_type\": \"default\"}}",
     "rope_parameters.\"full_attention\": expected no object: rope parameters for each layer type "
     "are not supported, "
     "got {\"rope_type\": \"default\"}"},
    {"rope_partial", "llama_tied", "\"partial_rotary_factor\": 0.5",
     "partial_rotary_factor: expected 1: another value is not supported, got 0.5"},
    {"rope_partial_inside", "llama_tied", "\"rope_parameters\": {\"partial_rotary_factor\": 0.25}",
     "rope_parameters.partial_rotary_factor: expected 1: another value is not supported, got 0.25"},
    {"theta", "qwen2_untied", "\"rope_theta\": -1",
     "rope_theta: expected a number above 0, got -1"},
    {"theta_text", "llama_tied", "\"rope_parameters\": {\"rope_theta\": \"1e4\"}",
     "rope_parameters.rope_theta: expected a number above 0, got \"1e4\""},
    {"no_factor", "llama_tied", "\"rope_parameters\": {\"rope_type\": \"llama3\"}",
     "rope_parameters.factor: expected a number above 0, got none"},
    {"no_low", "llama_tied", "\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8}",
     "rope_parameters.low_freq_factor: expected a number above 0, got none"},
    {"no_high", "llama_tied",
     "\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1}",
     "rope_parameters.high_freq_factor: expected a number above 0, got none"},
    {"no_original", "llama_tied",
     "\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 1, "
     "\"high_freq_factor\": 4}",
     "rope_parameters.original_max_position_embeddings: expected a number above 0, got none"},
    {"high_low", "llama_tied",
     "\"rope_parameters\": {\"rope_type\": \"llama3\", \"factor\": 8, \"low_freq_factor\": 4, "
     "\"high_freq_factor\": 4, \"original_max_position_embeddings\": 32}",
     "rope_parameters.high_freq_factor: expected more than low_freq_factor (4), got 4"},
    {"window", "qwen2_tied", "\"use_sliding_window\": true",
     "use_sliding_window: expected false, got true"},
    {"layer_type", "qwen2_tied", "\"layer_types\": [\"full_attention\", \"sliding_attention\"]",
     "layer_types[1]: expected \"full_attention\", got \"sliding_attention\""},
    {"layer_types", "qwen2_tied", "\"layer_types\": \"full_attention\"",
     "layer_types: expected a list, got \"full_attention\""},
    {"layer_count", "qwen2_tied", "\"layer_types\": [\"full_attention\"]",
     "layer_types: expected 2 entries (num_hidden_layers), got 1"},
    {"quantised", "llama_tied", "\"quantization_config\": {\"bits\": 4}",
     "quantization_config: expected none: load the model with transformers, dequantise it, and "
     "save it, got {\"bits\": 4}"},
    {"dropout", "llama_tied", "\"attention_dropout\": 0.1",
     "attention_dropout: expected 0: another value is not supported, got 0.1"},
    {"tp", "llama_tied", "\"pretraining_tp\": 2",
     "pretraining_tp: expected 1: another value is not supported, got 2"},
    {"tp_text", "llama_tied", "\"pretraining_tp\": \"1\"",
     "pretraining_tp: expected 1: another value is not supported, got \"1\""},
    {"eos", "llama_tied", "\"eos_token_id\": \"</s>\"",
     "eos_token_id: expected a token or a list of at most 16 tokens, got \"</s>\""},
    {"eos_negative", "llama_tied", "\"eos_token_id\": [1, -1]",
     "eos_token_id: expected a token or a list of at most 16 tokens, got [1, -1]"},
    {"eos_many", "llama_tied", "\"eos_token_id\": [1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18]",
     "eos_token_id: expected a token or a list of at most 16 tokens, got "
     "[1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,1..."},
};

TEST_P(llama_config, refused, refused, 0) {
    llama_config c;
    char why[LLAMA_WHY], line[900];
    put_config(row->model, row->members);
    CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), -1);
    snprintf(line, sizeof line, "%s/config.json: %s", h_tmpdir(), row->line);
    CHECK_EQ_STR(why, line);
}

/* Directories and files that are not there, are none, or are no JSON. */
TEST(llama_config, files) {
    llama_config c;
    char why[LLAMA_WHY], line[900], path[700], few[20];
    snprintf(path, sizeof path, "%s/none", h_tmpdir());
    CHECK_EQ_INT(read_config(path, &c, why, sizeof why), -1);
    snprintf(line, sizeof line, "%s: expected a directory: No such file or directory", path);
    CHECK_EQ_STR(why, line);
    CHECK_EQ_INT(read_config(path, &c, few, sizeof few), -1);
    CHECK_EQ_MEM(few, line, sizeof few - 1);
    CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), -1);
    snprintf(line, sizeof line, "%s/config.json: cannot be opened: No such file or directory",
             h_tmpdir());
    CHECK_EQ_STR(why, line);
    put("model.gguf", "GGUF", 4);
    snprintf(path, sizeof path, "%s/model.gguf", h_tmpdir());
    CHECK_EQ_INT(read_config(path, &c, why, sizeof why), -1);
    CHECK(strstr(
        why,
        "model.gguf: expected a directory with config.json and model.safetensors, got a file"));
    CHECK(strstr(why, "transformers"));
    snprintf(path, sizeof path, "%s/config.json", h_tmpdir());
    CHECK_EQ_INT(mkfifo(path, 0600), 0); // no writer: it must not block
    CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), -1);
    CHECK(strstr(why, "config.json: expected a regular file"));
    CHECK_EQ_INT(remove(path), 0);
    put("config.json", "{\"model_type\": llama}", 21);
    CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), -1);
    CHECK(strstr(why, "config.json: expected JSON: at byte 15: expected a value, got 'l'"));
    put("config.json", "[1]", 3);
    CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), -1);
    CHECK(strstr(why, "config.json: expected a JSON object"));
    char *large = (char *)malloc(LLAMA_CONFIG_BYTES);
    CHECK(large != NULL);
    memset(large, ' ', LLAMA_CONFIG_BYTES);
    put("config.json", large, LLAMA_CONFIG_BYTES);
    CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), -1);
    CHECK(strstr(why, "config.json: expected less than 131072 bytes"));
    memset(large, 'd', LLAMA_CONFIG_BYTES), large[LLAMA_PATH - 5] = 0;
    CHECK_EQ_INT(read_config(large, &c, why, sizeof why), -1);
    CHECK(strstr(why, ": expected a directory: "));
    free(large);
    put_config("llama_tied", "");
    put("generation_config.json", "{\"eos_token_id\": 2.5}", 21);
    CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), -1);
    CHECK(strstr(why, "/generation_config.json: eos_token_id: expected a token"));
    put("generation_config.json", "{", 1);
    CHECK_EQ_INT(read_config(h_tmpdir(), &c, why, sizeof why), -1);
    CHECK(strstr(why, "/generation_config.json: expected JSON: at byte 1: "));
}

/* Random changes of a file: it is read, or refused with one line; sizes are in their range. */
TEST(llama_config, hostile) {
    char text[4096], copy[4096], why[LLAMA_WHY];
    llama_config c;
    uint64_t state = h_seed();
    int read = 0;
    const size_t size = slurp(dir_of("llama3_rope_old"), "config.json", text, sizeof text);
    for (int i = 0; i < (W_SLOW ? 300 : 2000); i++) {
        memcpy(copy, text, size);
        for (int k = lab_pick(&state, 3); k >= 0; k--) {
            const int at = lab_pick(&state, (int)size), n = lab_pick(&state, 12),
                      from = lab_pick(&state, (int)size - 12);
            if (!lab_pick(&state, 3)) copy[at] = (char)lab_pick(&state, 256);
            else if (at + n <= (int)size) memmove(copy + at, text + from, (size_t)n);
        }
        put("config.json", copy, lab_pick(&state, 9) ? size : (size_t)lab_pick(&state, (int)size));
        if (read_config(h_tmpdir(), &c, why, sizeof why)) continue;
        read++;
        CHECK(c.hidden > 0 && c.heads > 0 && c.heads % c.kv_heads == 0 && c.head_dim % 2 == 0 &&
              c.eps > 0.0f);
        CHECK((int64_t)c.heads * c.head_dim <= 2147483647 && c.layers > 0 && c.vocab > 0 &&
              c.inner > 0);
    }
    h_message("%d were read", read);
    CHECK(read > 0);
}
