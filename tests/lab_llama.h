/* lab_llama.h - golden models of transformers for tests of examples/llama: directories, expected
   values, a rank's rows, and the models themselves.

   SPDX-License-Identifier: MIT */
#ifndef LAB_LLAMA_H
#define LAB_LLAMA_H
#include "harness.h"
#include "lab.h"
#include "golden.h"
#include "examples/llama/llama_model.h"

enum { CASES = 8 };
static const char *const models[CASES] = {
    "llama_tied", "llama_untied_bias", "llama3_rope_shards", "llama3_rope_old",
    "qwen2_tied", "qwen2_untied",      "qwen3_tied",         "llama_quant"};

typedef struct expected {
    fsdp_checkpoint_reader *files;
    fsdp_checkpoint_contents all;
} expected;

H_FN expected open_expected(const char *name) {
    expected e;
    char path[700], why[800];
    golden_needs("llama");
    snprintf(path, sizeof path, "%s/llama/%s/expect.safetensors", golden_dir(), name);
    CHECK_MSG(!fsdp_checkpoint_open(path, NULL, NULL, &e.files, why, sizeof why), "%s", why);
    CHECK_OK(fsdp_checkpoint_contents_of(e.files, &e.all));
    return e;
}

H_FN void *get(const expected *e, const char *name, fsdp_dtype dtype, fsdp_checkpoint_tensor *t) {
    char why[800];
    const int64_t i = fsdp_checkpoint_tensor_find(e->files, name);
    CHECK_MSG(!fsdp_checkpoint_tensor_at(e->files, i, t), "%s", name);
    void *to = lab_zeros((size_t)lab_numel(t->ndim, t->shape), fsdp_dtype_size(dtype));
    CHECK_MSG(!fsdp_checkpoint_read(e->files, i, NULL, NULL, dtype, to, why, sizeof why), "%s",
              why);
    return to;
}

/* Returns the largest difference, divided by the largest wanted element. */
H_FN double difference(const float *got, const float *want, int64_t numel) {
    double largest = 0.0, worst = 0.0;
    for (int64_t i = 0; i < numel; i++) {
        const double d = fabs((double)got[i] - (double)want[i]), w = fabs((double)want[i]);
        if (!(d <= worst)) worst = d; // a NaN stays
        if (w > largest) largest = w;
    }
    return largest > 0.0 ? worst / largest : worst;
}

H_FN void model_dir(const char *name, char dir[600]) {
    snprintf(dir, 600, "%s/llama/%s/model", golden_dir(), name);
}

/* Makes a model from a directory in which nothing is left over; lora and the directory of its
   adapter may be NULL. */
H_FN void load_adapted(fsdp_world *w, const char *dir, const llama_lora *lora, const char *adapter,
                       const llama_acts_desc *desc, llama_model *m) {
    fsdp_checkpoint_reader *files, *other = NULL;
    llama_config c;
    char why[LLAMA_WHY], extra[LLAMA_WHY];
    CHECK_MSG(!llama_config_read(dir, &c, why, sizeof why), "%s", why);
    CHECK_MSG(!llama_files_open(dir, &c, &files, why, extra, sizeof why), "%s", why);
    CHECK_EQ_STR(extra, "");
    if (adapter)
        CHECK_MSG(!llama_adapter_open(adapter, &c, lora, &other, why, sizeof why), "%s", why);
    CHECK_MSG(!llama_model_create(m, w, &c, lora, files, desc, why, sizeof why), "%s", why);
    CHECK_MSG(!llama_model_load(m, files, other, why, sizeof why), "%s", why);
    fsdp_checkpoint_close(files), fsdp_checkpoint_close(other);
}
H_FN void load_model(fsdp_world *w, const char *dir, const llama_acts_desc *desc, llama_model *m) {
    load_adapted(w, dir, NULL, NULL, desc, m);
}

/* A golden model, trained in full or by its adapter over a base in some dtype. */
typedef struct form {
    const char *prefix; /* of names in expect.safetensors */
    int is_lora;
    llama_dtype base;
} form;
static const form trained = {"", 0, LLAMA_DTYPE_FILE}, adapted = {"lora.", 1, LLAMA_DTYPE_FILE},
                  as_f32 = {"lora.", 1, LLAMA_DTYPE_F32}, q8_0 = {"q8_0.", 1, LLAMA_DTYPE_Q8_0},
                  q4_1 = {"q4_1.", 1, LLAMA_DTYPE_Q4_1};

/* Makes a golden model in a form. */
H_FN void load_form(fsdp_world *w, const char *name, const form *of, const llama_acts_desc *desc,
                    llama_model *m) {
    char dir[600], adapter[700], why[LLAMA_WHY];
    llama_lora lora;
    model_dir(name, dir);
    if (!of->is_lora) {
        load_model(w, dir, desc, m);
        return;
    }
    memset(&lora, 0, sizeof lora);
    snprintf(adapter, sizeof adapter, "%s/../adapter", dir);
    CHECK_MSG(!llama_adapter_read(adapter, &lora, why, sizeof why), "%s", why);
    CHECK(lora.rank == 4 && lora.targets == LLAMA_ALL_TARGETS);
    CHECK_NEAR(lora.alpha, 8.0, 0.0);
    lora.base = (int)of->base;
    load_adapted(w, dir, &lora, adapter, desc, m);
}

/* This rank's rows of a microbatch, r, r + W, ...: tokens, and the label that follows each. Returns
   their number. */
H_FN int my_rows(const lab_rank *r, const int32_t *tokens, const int32_t *labels, int rows, int T,
                 int32_t *t, int32_t *l) {
    int B = 0;
    for (int row = r->rank; row < rows; row += r->size, B++) {
        for (int i = 0; i < T; i++) {
            t[B * T + i] = tokens[row * T + i];
            l[B * T + i] = i + 1 < T ? labels[row * T + i + 1] : -100;
        }
    }
    return B;
}

#endif /* LAB_LLAMA_H */
