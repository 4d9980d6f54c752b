/* llama_lora.h - low-rank adapters over a frozen model: which there are, and adapter_config.json of
   PEFT

   Each target matrix W(rows, columns) gets A(rank, columns) and B(rows, rank), and acts as
   W + (alpha / rank) B A. Only A and B are trained. B begins as zero, A as PEFT begins it.

   SPDX-License-Identifier: MIT */
#ifndef LLAMA_LORA_H
#define LLAMA_LORA_H

#include "examples/common/program.h"     // mix_bits
#include "examples/llama/llama_config.h" // llama_file
#include "examples/llama/llama_quant.h"  // llama_dtype

#define LLAMA_PEFT "base_model.model." // begins the names of PEFT's tensors

enum { LLAMA_ALL_TARGETS = (1 << LLAMA_MATRICES) - 1 };

// A frozen model. With rank 0 there are no adapters.
typedef struct llama_lora {
    int rank;
    double alpha;
    unsigned targets; // bits LLAMA_Q to LLAMA_DOWN
    int base;         // llama_dtype of frozen parameters
    uint64_t seed;    // of A
} llama_lora;

static const char *const llama_modules[LLAMA_MATRICES] = {
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj",    "mlp.up_proj",      "mlp.down_proj"};

/* Returns the name that PEFT's target_modules has: q_proj. */
static inline const char *llama_target(int matrix) {
    return strchr(llama_modules[matrix], '.') + 1;
}

static inline int llama_has_adapter(const llama_lora *lora, int matrix) {
    return lora && lora->rank && (lora->targets >> matrix & 1);
}

/* Reads "q,k,v": the names of matrices without _proj. Returns 0; -1: one has another name, or there
   is none. */
static inline int llama_targets_read(const char *text, unsigned *targets) {
    *targets = 0;
    for (const char *at = text;; at++) {
        const size_t n = strcspn(at, ",");
        int matrix = 0;
        for (; matrix < LLAMA_MATRICES; matrix++) {
            const char *name = llama_target(matrix);
            if (n && !strncmp(name, at, n) && !strcmp(name + n, "_proj")) break;
        }
        if (matrix == LLAMA_MATRICES) return -1;
        *targets |= 1u << matrix;
        at += n;
        if (!*at) return 0;
    }
}

enum { LLAMA_LORA_TEXT = 160 };

/* Writes "rank 8, alpha 16, q,k,v over f32", or "none". Returns out. */
static inline const char *llama_lora_text(const llama_lora *lora, char out[LLAMA_LORA_TEXT]) {
    char *at = out +
               sprintf(out, lora->rank ? "rank %d, alpha %.9g, " : "none", lora->rank, lora->alpha);
    for (int i = 0, n = 0; i < LLAMA_MATRICES && lora->rank; i++) {
        const char *name = llama_target(i);
        if (!llama_has_adapter(lora, i)) continue;
        at += sprintf(at, "%s%.*s", n++ ? "," : "", (int)strlen(name) - 5, name); // without _proj
    }
    const char *base = lora->base ? llama_dtypes[lora->base].name : "the dtype of the files";
    if (lora->rank) sprintf(at, " over %s", base);
    return out;
}

/* Checks adapters against the model. Returns 0; -1: `why` has a line. */
static inline int llama_lora_check(const llama_config *c, const llama_lora *lora, char *why,
                                   size_t cap) {
    const int block = llama_dtypes[lora->base].block_bytes ? LLAMA_BLOCK : 1;
    int fits = 0;
    why[0] = 0;
    for (int i = 0; i < LLAMA_MATRICES && !why[0]; i++) {
        int columns;
        const int rows = llama_matrix_size(c, i, &columns);
        fits += columns % block == 0;
        if (llama_has_adapter(lora, i) && (lora->rank > rows || lora->rank > columns)) {
            snprintf(why, cap, "%s: expected a rank of at most %d (its shape is [%d, %d]), got %d",
                     llama_modules[i], rows < columns ? rows : columns, rows, columns, lora->rank);
        }
    }
    if (!why[0] && !fits) {
        int columns;
        (void)llama_matrix_size(c, 0, &columns);
        snprintf(why, cap,
                 "%s: expected a matrix with columns in multiples of 32, got %d in %s, and none",
                 llama_dtypes[lora->base].name, columns, llama_modules[0]);
    }
    return why[0] ? -1 : 0;
}

/* ---- adapter_config.json --------------------------------------------------------------------- */

/* Refuses what may change what an adapter computes: each key that is set and is not known to change
   nothing, because new methods of PEFT have new keys. */
static inline void llama_adapter_others(llama_file *f) {
    static const char *const known[] = {"auto_mapping",
                                        "base_model_name_or_path",
                                        "bias",
                                        "ensure_weight_tying",
                                        "eva_config",
                                        "inference_mode",
                                        "init_lora_weights",
                                        "lora_alpha",
                                        "lora_dropout",
                                        "megatron_core",
                                        "peft_type",
                                        "peft_version",
                                        "qalora_group_size",
                                        "r",
                                        "revision",
                                        "runtime_config",
                                        "target_modules",
                                        "task_type"};
    enum { KNOWN = sizeof known / sizeof *known };
    fsdp_json v, key, member, at;
    char name[48];
    for (memset(&v, 0, sizeof v); fsdp_json_next(&f->root, &key, &v);) {
        size_t i = 0;
        while (i < KNOWN && !llama_is(&key, known[i])) i++;
        if (i < KNOWN || v.kind == FSDP_JSON_NULL || v.kind == FSDP_JSON_FALSE) continue;
        memset(&at, 0, sizeof at);
        const int holds = v.kind == FSDP_JSON_OBJECT || v.kind == FSDP_JSON_LIST;
        if (holds && !fsdp_json_next(&v, v.kind == FSDP_JSON_OBJECT ? &member : NULL, &at))
            continue;
        llama_shown(&key, name), name[1 + strcspn(name + 1, "\"")] = 0; // without quotes
        llama_refuse(f, name + 1, "none: it is not supported", &v);
    }
    if (llama_find(&f->root, "bias", &v) && !llama_is(&v, "none")) {
        llama_refuse(f, "bias", "\"none\"", &v);
    }
    if (llama_find(&f->root, "init_lora_weights", &v) && v.kind == FSDP_JSON_STRING &&
        !llama_is(&v, "gaussian") && !llama_is(&v, "eva") && !llama_is(&v, "orthogonal")) {
        llama_refuse(f, "init_lora_weights", // others change the matrices of the model, too
                     "true, false, \"gaussian\", \"eva\" or \"orthogonal\"", &v);
    }
}

/* Reads target_modules: a list, with or without the name of the module around: mlp.up_proj. */
static inline void llama_adapter_targets(llama_file *f, llama_lora *lora) {
    fsdp_json list, at;
    lora->targets = 0;
    if (!llama_find(&f->root, "target_modules", &list) || list.kind != FSDP_JSON_LIST) {
        llama_refuse(f, "target_modules", "a list of names", &list);
        return;
    }
    for (memset(&at, 0, sizeof at); fsdp_json_next(&list, NULL, &at);) {
        int i = 0;
        while (i < LLAMA_MATRICES && !llama_is(&at, llama_target(i)) &&
               !llama_is(&at, llama_modules[i])) {
            i++;
        }
        if (i < LLAMA_MATRICES) lora->targets |= 1u << i;
        else llama_refuse(f, "target_modules", "names from q_proj to down_proj", &at);
    }
    if (!lora->targets) llama_fail(f, "target_modules: expected a name, got none");
}

/* Reads adapter_config.json: rank, alpha and targets. Returns 0; -1: `why` has a line. */
static inline int llama_adapter_read(const char *dir, llama_lora *lora, char *why, size_t cap) {
    llama_file f;
    fsdp_json v;
    float alpha;
    why[0] = 0;
    f.why = why, f.cap = cap;
    if (llama_file_read(&f, dir, "adapter_config.json") > 0) {
        return llama_fail(&f, "expected an adapter of PEFT, as --lora --export DIR writes it, got "
                              "no such file");
    }
    if (why[0]) return -1;
    if (!llama_find(&f.root, "peft_type", &v) || !llama_is(&v, "LORA")) {
        llama_refuse(&f, "peft_type", "\"LORA\"", &v);
    }
    llama_adapter_others(&f);
    llama_size(&f, "r", 0, &lora->rank);
    llama_positive(&f, &f.root, "", "lora_alpha", 0.0f, &alpha);
    llama_adapter_targets(&f, lora);
    lora->alpha = (double)alpha;
    return why[0] ? -1 : 0;
}

/* Appends a string of JSON. `to` has room for six times its bytes. Returns the new end. */
static inline char *llama_json_string(char *to, const char *text) {
    *to++ = '"';
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c < ' ') to += sprintf(to, "\\u%04x", c);
        else if (c == '"' || c == '\\') *to++ = '\\', *to++ = *text;
        else *to++ = *text;
    }
    *to++ = '"';
    return to;
}

enum { LLAMA_ADAPTER_TEXT = 6 * LLAMA_PATH + 1024 };

/* Writes adapter_config.json for a base of that path. Returns its bytes, without a closing 0. */
static inline int64_t llama_adapter_text(const llama_lora *lora, const char *base,
                                         char to[LLAMA_ADAPTER_TEXT]) {
    char *at = to + sprintf(to, "{\n  \"base_model_name_or_path\": ");
    at = llama_json_string(at, base);
    at += sprintf(at,
                  ",\n  \"bias\": \"none\",\n  \"fan_in_fan_out\": false,\n"
                  "  \"inference_mode\": true,\n  \"lora_alpha\": %.9g,\n"
                  "  \"lora_dropout\": 0.0,\n  \"peft_type\": \"LORA\",\n  \"r\": %d,\n"
                  "  \"target_modules\": [",
                  lora->alpha, lora->rank);
    for (int i = 0, n = 0; i < LLAMA_MATRICES; i++) {
        if (!llama_has_adapter(lora, i)) continue;
        at += sprintf(at, "%s\n    \"%s\"", n++ ? "," : "", llama_target(i));
    }
    at += sprintf(at, "\n  ],\n  \"task_type\": \"CAUSAL_LM\"\n}\n");
    return at - to;
}

/* ---- first values ---------------------------------------------------------------------------- */

/* Sets elements of A to what PEFT's kaiming_uniform_ draws from: even between -1 and 1, over the
   root of the columns. An element follows from seed, name and index alone. */
static inline void llama_adapter_init(const llama_lora *lora, const fsdp_param_view *rows) {
    float *data = fsdp_view_data_f32(rows);
    const float bound = 1.0f / sqrtf((float)rows->shape[1]);
    uint64_t key = mix_bits(lora->seed);
    for (const char *c = rows->unit_name; *c; c++) key = mix_bits(key ^ (unsigned char)*c);
    for (const char *c = rows->name; *c; c++) key = mix_bits(key ^ (unsigned char)*c);
    for (int64_t i = 0; i < rows->numel; i++) {
        const uint64_t bits = mix_bits(key + (uint64_t)fsdp_view_index(rows, i) *
                                                 UINT64_C(0x9E3779B97F4A7C15));
        data[i] = bound * ((float)(bits >> 40) * (1.0f / 8388608.0f) - 1.0f);
    }
}

#endif // LLAMA_LORA_H
