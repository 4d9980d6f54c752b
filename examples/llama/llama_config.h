/* llama_config.h - config.json and generation_config.json of Hugging Face as a llama_config

   llama_config_read fills the struct, or writes one line that says why not: the file, the key, what
   is expected and what is there. It reads the spellings of transformers 4 and 5, and takes the
   values that transformers takes for keys that are missing, unless a file without them is more
   likely to be wrong. What llama.h does not compute (other rope types, sliding windows, experts,
   quantised files) is refused. It allocates nothing.

   SPDX-License-Identifier: MIT */
#ifndef LLAMA_CONFIG_H
#define LLAMA_CONFIG_H

#include "examples/llama/llama.h" // llama_config
#include "fsdp_safetensors.h"     // fsdp_json_*

#include <errno.h>
#include <fcntl.h>    // open
#include <stdarg.h>   // va_list
#include <stdio.h>    // snprintf, vsnprintf
#include <sys/stat.h> // fstat, S_ISREG, S_ISDIR
#include <unistd.h>   // read, close

enum { LLAMA_CONFIG_BYTES = 1 << 17, LLAMA_PATH = 4096, LLAMA_WHY = LLAMA_PATH + 512 };

// A JSON file that is being read, and the line that is written at the first failure.
typedef struct llama_file {
    char path[LLAMA_PATH];
    char text[LLAMA_CONFIG_BYTES];
    size_t nbytes;
    fsdp_json root;
    char *why; // "": no failure yet
    size_t cap;
} llama_file;

/* Writes "FILE: " and the rest of the line, unless a failure was found before. Returns -1. */
static inline int llama_fail(llama_file *f, const char *form, ...)
    __attribute__((format(printf, 2, 3)));
static inline int llama_fail(llama_file *f, const char *form, ...) {
    va_list args;
    if (f->why[0]) return -1;
    const int n = snprintf(f->why, f->cap, "%s: ", f->path);
    va_start(args, form);
    if (n > 0 && (size_t)n < f->cap) vsnprintf(f->why + n, f->cap - (size_t)n, form, args);
    va_end(args);
    return -1;
}

/* Copies the beginning of a value as it stands in the file, without line breaks. Returns out. */
static inline const char *llama_shown(const fsdp_json *v, char out[48]) {
    int n = 0;
    int64_t i = v->begin;
    for (; i < v->end && n < 44; i++) {
        const char c = v->text[i];
        if ((unsigned char)c > ' ' && c != 0x7F) out[n++] = c;
        else if (n && out[n - 1] != ' ') out[n++] = ' ';
    }
    strcpy(out + n, !v->kind ? "none" : i < v->end ? "..." : "");
    return out;
}

/* Refuses the value of a key. Returns -1. */
static inline int llama_refuse(llama_file *f, const char *key, const char *expected,
                               const fsdp_json *got) {
    char shown[48];
    return llama_fail(f, "%s: expected %s, got %s", key, expected, llama_shown(got, shown));
}

/* Reads a file into f->text and checks that it is JSON with an object. Returns 0; 1 if there is no
   such file; -1 after a failure. */
static inline int llama_file_read(llama_file *f, const char *dir, const char *name) {
    struct stat st;
    char why[200];
    size_t n = 0;
    if (snprintf(f->path, sizeof f->path, "%s/%s", dir, name) >= (int)sizeof f->path) {
        strcpy(f->path, name);
        return llama_fail(f, "its path has more than %d bytes", LLAMA_PATH - 1);
    }
    const int fd = open(f->path, O_RDONLY | O_NONBLOCK); // a pipe without a writer must not block
    if (fd < 0 && errno == ENOENT) return 1;
    if (fd < 0) return llama_fail(f, "cannot be opened: %s", strerror(errno));
    ssize_t got = fstat(fd, &st) || !S_ISREG(st.st_mode) ? -2 : 1;
    while (got > 0 && n < sizeof f->text) {
        got = read(fd, f->text + n, sizeof f->text - n);
        if (got > 0) n += (size_t)got;
    }
    const int error = errno;
    close(fd);
    if (got == -2) return llama_fail(f, "expected a regular file");
    if (got < 0) return llama_fail(f, "cannot be read: %s", strerror(error));
    f->nbytes = n;
    if (n == sizeof f->text) return llama_fail(f, "expected less than %d bytes", (int)n);
    if (fsdp_json_parse(f->text, (int64_t)n, &f->root, why, sizeof why)) {
        return llama_fail(f, "expected JSON: %s", why);
    }
    if (f->root.kind != FSDP_JSON_OBJECT) return llama_fail(f, "expected a JSON object");
    return 0;
}

/* ---- values of keys -------------------------------------------------------------------------- */
/* Each returns 1 if the key has a value, which it checks; null counts as missing. */

static inline int llama_find(const fsdp_json *in, const char *key, fsdp_json *v) {
    if (fsdp_json_find(in, key, v) && v->kind == FSDP_JSON_NULL) memset(v, 0, sizeof *v);
    return v->kind != FSDP_JSON_NONE;
}

/* A size. missing: the value then; 0: the key is required. */
static inline int llama_size(llama_file *f, const char *key, int missing, int *out) {
    fsdp_json v;
    int64_t n = 0;
    const int there = llama_find(&f->root, key, &v);
    *out = missing;
    if (!there && missing) return 0;
    if (!there || !fsdp_json_int(&v, &n) || n < 1 || n > 2147483647) {
        llama_refuse(f, key, "an integer from 1 to 2147483647", &v);
        return 0;
    }
    *out = (int)n;
    return 1;
}

static inline int llama_bool(llama_file *f, const char *key, int *out) {
    fsdp_json v;
    *out = 0;
    if (!llama_find(&f->root, key, &v)) return 0;
    if (v.kind != FSDP_JSON_TRUE && v.kind != FSDP_JSON_FALSE) {
        llama_refuse(f, key, "true or false", &v);
    }
    *out = v.kind == FSDP_JSON_TRUE;
    return 1;
}

/* A number above 0 that a float can hold, of `in`, whose own key is `of` or "". missing 0:
   required. */
static inline int llama_positive(llama_file *f, const fsdp_json *in, const char *of,
                                 const char *key, float missing, float *out) {
    char name[80];
    fsdp_json v;
    double x = 0.0;
    const int there = llama_find(in, key, &v);
    *out = missing;
    if (!there && missing > 0.0f) return 0;
    snprintf(name, sizeof name, "%s%s%s", of, *of ? "." : "", key);
    if (!there || !fsdp_json_double(&v, &x) || !(x >= 1e-37 && x <= 3e38)) {
        llama_refuse(f, name, "a number above 0", &v);
        return 0;
    }
    *out = (float)x;
    return 1;
}

/* Refuses a key that has another number than `only`. */
static inline void llama_only(llama_file *f, const fsdp_json *in, const char *of, const char *key,
                              double only) {
    char name[80], expected[64];
    fsdp_json v;
    double x = 0.0;
    if (!llama_find(in, key, &v)) return;
    if (fsdp_json_double(&v, &x) && !(x < only) && !(x > only)) return;
    snprintf(name, sizeof name, "%s%s%s", of, *of ? "." : "", key);
    snprintf(expected, sizeof expected, "%g: another value is not supported", only);
    llama_refuse(f, name, expected, &v);
}

static inline int llama_is(const fsdp_json *v, const char *text) {
    char s[40];
    const int64_t n = fsdp_json_string(v, s, sizeof s);
    return n == (int64_t)strlen(text) && !memcmp(s, text, (size_t)n);
}

/* ---- what llama.h does not compute ----------------------------------------------------------- */

static const struct {
    const char *model_type, *architecture;
} llama_types[] = {
    {"llama", "LlamaForCausalLM"}, {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"}};
enum { LLAMA_TYPE_LLAMA, LLAMA_TYPE_QWEN2, LLAMA_TYPE_QWEN3, LLAMA_TYPES };

/* Returns the index of model_type, or LLAMA_TYPES after a failure. */
static inline int llama_type(llama_file *f) {
    fsdp_json v, list, at;
    int type = 0;
    llama_find(&f->root, "model_type", &v);
    while (type < LLAMA_TYPES && !llama_is(&v, llama_types[type].model_type)) type++;
    if (type == LLAMA_TYPES) {
        llama_refuse(f, "model_type", "llama, qwen2 or qwen3", &v);
        return type;
    }
    memset(&at, 0, sizeof at);
    if (llama_find(&f->root, "architectures", &list) && list.kind != FSDP_JSON_LIST) {
        llama_refuse(f, "architectures", "a list", &list);
    }
    while (fsdp_json_next(&list, NULL, &at)) {
        if (llama_is(&at, llama_types[type].architecture)) continue;
        llama_refuse(f, "architectures", llama_types[type].architecture, &at);
    }
    return type;
}

static inline void llama_check_layers(llama_file *f, int layers) {
    fsdp_json list, at;
    char key[40];
    int window = 0, i = 0;
    llama_bool(f, "use_sliding_window", &window);
    if (window) llama_fail(f, "use_sliding_window: expected false, got true");
    if (!llama_find(&f->root, "layer_types", &list)) return;
    if (list.kind != FSDP_JSON_LIST) llama_refuse(f, "layer_types", "a list", &list);
    for (memset(&at, 0, sizeof at); fsdp_json_next(&list, NULL, &at); i++) {
        if (llama_is(&at, "full_attention")) continue;
        snprintf(key, sizeof key, "layer_types[%d]", i);
        llama_refuse(f, key, "\"full_attention\"", &at);
    }
    if (i != layers) {
        llama_fail(f, "layer_types: expected %d entries (num_hidden_layers), got %d", layers, i);
    }
}

static inline void llama_check_others(llama_file *f) {
    static const char *const experts[] = {"num_experts", "num_local_experts"};
    fsdp_json v;
    for (int i = 0; i < 2; i++) {
        if (llama_find(&f->root, experts[i], &v)) {
            llama_refuse(f, experts[i], "none: experts are not supported", &v);
        }
    }
    if (llama_find(&f->root, "quantization_config", &v)) {
        llama_refuse(f, "quantization_config",
                     "none: load the model with transformers, dequantise it, and save it", &v);
    }
    if (llama_find(&f->root, "hidden_act", &v) && !llama_is(&v, "silu")) {
        llama_refuse(f, "hidden_act", "\"silu\"", &v);
    }
    llama_only(f, &f->root, "", "attention_dropout", 0.0);
    llama_only(f, &f->root, "", "pretraining_tp", 1.0);
    llama_only(f, &f->root, "", "partial_rotary_factor", 1.0);
}

/* ---- rotary positions ------------------------------------------------------------------------ */

static inline void llama_read_rope(llama_file *f, llama_config *c) {
    fsdp_json rope, old, type, key, at;
    const char *of = "rope_parameters";
    char name[80], shown[48];
    const int both = llama_find(&f->root, "rope_scaling", &old);
    if (!llama_find(&f->root, of, &rope)) {
        of = "rope_scaling", rope = old;
    } else if (both) {
        llama_refuse(f, "rope_scaling", "none next to rope_parameters", &old);
    }
    llama_positive(f, &f->root, "", "rope_theta", 10000.0f, &c->theta);
    if (!rope.kind) return;
    if (rope.kind != FSDP_JSON_OBJECT) {
        llama_refuse(f, of, "an object", &rope);
        return;
    }
    for (memset(&at, 0, sizeof at); fsdp_json_next(&rope, &key, &at);) {
        if (at.kind != FSDP_JSON_OBJECT) continue;
        snprintf(name, sizeof name, "%s.%s", of, llama_shown(&key, shown));
        llama_refuse(f, name, "no object: rope parameters for each layer type are not supported",
                     &at);
    }
    llama_positive(f, &rope, of, "rope_theta", c->theta, &c->theta);
    llama_only(f, &rope, of, "partial_rotary_factor", 1.0);
    const char *spelling = llama_find(&rope, "rope_type", &type) ? "rope_type" : "type";
    if (!type.kind) llama_find(&rope, "type", &type);
    c->llama3 = llama_is(&type, "llama3");
    if (!c->llama3) {
        if (type.kind ? llama_is(&type, "default") : !llama_find(&rope, "factor", &at)) return;
        snprintf(name, sizeof name, "%s.%s", of, type.kind ? spelling : "rope_type");
        llama_refuse(f, name, "\"default\" or \"llama3\"", &type);
        return;
    }
    llama_positive(f, &rope, of, "factor", 0.0f, &c->factor);
    llama_positive(f, &rope, of, "low_freq_factor", 0.0f, &c->low_freq);
    llama_positive(f, &rope, of, "high_freq_factor", 0.0f, &c->high_freq);
    llama_positive(f, &rope, of, "original_max_position_embeddings", 0.0f, &c->original_context);
    if (c->high_freq <= c->low_freq) {
        llama_fail(f, "%s.high_freq_factor: expected more than low_freq_factor (%g), got %g", of,
                   (double)c->low_freq, (double)c->high_freq);
    }
}

/* ---- the struct ------------------------------------------------------------------------------ */

static inline void llama_read_heads(llama_file *f, llama_config *c, int type) {
    const int llama = type == LLAMA_TYPE_LLAMA;
    llama_size(f, "num_attention_heads", 0, &c->heads);
    llama_size(f, "num_key_value_heads", llama ? c->heads : 0, &c->kv_heads);
    if (f->why[0]) return;
    if (c->heads % c->kv_heads) {
        llama_fail(f, "num_key_value_heads: expected a divisor of num_attention_heads (%d), got %d",
                   c->heads, c->kv_heads);
    }
    const int width = type == LLAMA_TYPE_QWEN3 ? 0 : c->hidden / c->heads;
    if (!llama_size(f, "head_dim", width, &c->head_dim) && !f->why[0] && c->hidden % c->heads) {
        llama_fail(f, "hidden_size: expected a multiple of num_attention_heads (%d), got %d",
                   c->heads, c->hidden);
    }
    if (f->why[0]) return;
    if (c->head_dim % 2) llama_fail(f, "head_dim: expected an even number, got %d", c->head_dim);
    if (c->head_dim > 2147483647 / c->heads) {
        llama_fail(f, "head_dim: expected at most 2147483647 with num_attention_heads (%d), got %d",
                   c->heads, c->head_dim);
    }
}

/* Reads eos_token_id: a number or a list. Returns 1 if the file has one. */
static inline int llama_read_eos(llama_file *f, llama_config *c) {
    fsdp_json v, at;
    int64_t n = -1;
    if (!llama_find(&f->root, "eos_token_id", &v)) return 0;
    memset(&at, 0, sizeof at);
    while (v.kind == FSDP_JSON_LIST ? fsdp_json_next(&v, NULL, &at) : !at.kind) {
        if (v.kind != FSDP_JSON_LIST) at = v;
        if (!fsdp_json_int(&at, &n) || n < 0 || n > 2147483647 || c->num_eos == LLAMA_MAX_EOS) {
            llama_refuse(f, "eos_token_id", "a token or a list of at most 16 tokens", &v);
            return 1;
        }
        c->eos[c->num_eos++] = (int)n;
    }
    return 1;
}

/* Fills *c from the files of a directory. Returns 0; -1: `why`, with room for `cap` bytes, has a
   line without "\n". Uses 140 KB of stack. */
static inline int llama_config_read(const char *dir, llama_config *c, char *why, size_t cap) {
    llama_file f;
    struct stat st;
    int type, bias = 0;
    memset(c, 0, sizeof *c);
    why[0] = 0;
    f.why = why, f.cap = cap;
    snprintf(f.path, sizeof f.path, "%s", dir);
    if (stat(dir, &st)) return llama_fail(&f, "expected a directory: %s", strerror(errno));
    if (!S_ISDIR(st.st_mode)) {
        return llama_fail(&f, "expected a directory with config.json and model.safetensors, got a "
                              "file; load other formats with transformers, and save them");
    }
    type = llama_file_read(&f, dir, "config.json");
    if (type) return llama_fail(&f, "cannot be opened: %s", strerror(ENOENT));
    type = llama_type(&f);
    llama_check_others(&f);
    llama_size(&f, "hidden_size", 0, &c->hidden);
    llama_size(&f, "intermediate_size", 0, &c->inner);
    llama_size(&f, "num_hidden_layers", 0, &c->layers);
    llama_size(&f, "vocab_size", 0, &c->vocab);
    llama_size(&f, "max_position_embeddings", 2147483647, &c->context);
    llama_positive(&f, &f.root, "", "rms_norm_eps", 0.0f, &c->eps);
    llama_read_heads(&f, c, type);
    llama_check_layers(&f, c->layers);
    llama_read_rope(&f, c);
    llama_bool(&f, "tie_word_embeddings", &c->tied);
    llama_bool(&f, "attention_bias", &bias);
    llama_bool(&f, "mlp_bias", &c->mlp_bias);
    c->qk_norm = type == LLAMA_TYPE_QWEN3;
    c->qkv_bias = type == LLAMA_TYPE_QWEN2 || bias;
    c->o_bias = type != LLAMA_TYPE_QWEN2 && bias;
    if (type != LLAMA_TYPE_LLAMA) c->mlp_bias = 0; // transformers reads it for llama only
    llama_read_eos(&f, c);
    if (why[0]) return -1;
    const int num_eos = c->num_eos;
    c->num_eos = 0;
    type = llama_file_read(&f, dir, "generation_config.json");
    if (type < 0) return -1;
    if (type > 0 || !llama_read_eos(&f, c)) c->num_eos = num_eos; // eos still has them
    return why[0] ? -1 : 0;
}

#endif // LLAMA_CONFIG_H
