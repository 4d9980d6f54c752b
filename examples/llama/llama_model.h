/* llama_model.h - a Llama, Qwen2 or Qwen3 of Hugging Face on N ranks: units, weights, and a pass

   Units have the names of modules, so that parameters have the names of the files:
   model.embed_tokens, model.layers.N, model.norm and, if the head is not the embedding, lm_head. A
   tied embedding stays open from its forward to its last gradient, so that the gradients of both
   uses add up; a frozen one to the loss. An untied one is closed between its uses, and the head is
   open around the loss only.

   With a llama_lora the parameters of the files are frozen, in any llama_dtype, and adapters are
   trained.

   llama_files_open checks the files; llama_model_create makes the units, and llama_model_load reads
   each rank's rows from the files; llama_model_pass computes rows forward and, to train, backward.

   SPDX-License-Identifier: MIT */
#ifndef LLAMA_MODEL_H
#define LLAMA_MODEL_H

#include "examples/llama/llama_lora.h" // llama_lora
#include "fsdp_checkpoint.h"           // fsdp_checkpoint_open, _tensor_find, _read
#include "fsdp_optim.h"                // fsdp_adamw_step

#include <dirent.h> // opendir

/* ---- names and shapes ------------------------------------------------------------------------ */

static const char *const llama_names[LLAMA_PARAMS] = {"self_attn.q_proj.weight", // LLAMA_W
                                                      "self_attn.k_proj.weight",
                                                      "self_attn.v_proj.weight",
                                                      "self_attn.o_proj.weight",
                                                      "mlp.gate_proj.weight",
                                                      "mlp.up_proj.weight",
                                                      "mlp.down_proj.weight",
                                                      "self_attn.q_proj.bias", // LLAMA_BIAS
                                                      "self_attn.k_proj.bias",
                                                      "self_attn.v_proj.bias",
                                                      "self_attn.o_proj.bias",
                                                      "mlp.gate_proj.bias",
                                                      "mlp.up_proj.bias",
                                                      "mlp.down_proj.bias",
                                                      "self_attn.q_proj.lora_A.weight", // LLAMA_A
                                                      "self_attn.k_proj.lora_A.weight",
                                                      "self_attn.v_proj.lora_A.weight",
                                                      "self_attn.o_proj.lora_A.weight",
                                                      "mlp.gate_proj.lora_A.weight",
                                                      "mlp.up_proj.lora_A.weight",
                                                      "mlp.down_proj.lora_A.weight",
                                                      "self_attn.q_proj.lora_B.weight", // LLAMA_B
                                                      "self_attn.k_proj.lora_B.weight",
                                                      "self_attn.v_proj.lora_B.weight",
                                                      "self_attn.o_proj.lora_B.weight",
                                                      "mlp.gate_proj.lora_B.weight",
                                                      "mlp.up_proj.lora_B.weight",
                                                      "mlp.down_proj.lora_B.weight",
                                                      "input_layernorm.weight",
                                                      "post_attention_layernorm.weight",
                                                      "self_attn.q_norm.weight",
                                                      "self_attn.k_norm.weight"};

// A unit: 0 is the embedding, 1 .. layers the layers, then the last norm and an untied head.
typedef struct llama_unit {
    char name[40];
    fsdp_param_desc p[LLAMA_PARAMS];
    int num, at[LLAMA_PARAMS]; // index of a layer's parameter in the unit; -1: there is none
} llama_unit;

static inline int llama_num_units(const llama_config *c) { return c->layers + 3 - c->tied; }

static inline int llama_is_adapter(int param) { return param >= LLAMA_A && param < LLAMA_NORM1; }

static inline fsdp_param_desc llama_param_desc(const llama_config *c, const llama_lora *lora,
                                               int param) {
    const char *name = llama_names[param];
    int in, out = llama_matrix_size(c, param % LLAMA_MATRICES, &in);
    if (param < LLAMA_BIAS) return fsdp_mat(name, out, in);
    if (param < LLAMA_A) return fsdp_vec(name, out);
    if (param < LLAMA_B) return fsdp_mat(name, lora->rank, in);
    if (param < LLAMA_NORM1) return fsdp_mat(name, out, lora->rank);
    return fsdp_vec(name, param < LLAMA_NORM_Q ? c->hidden : c->head_dim);
}

static inline int llama_has_param(const llama_config *c, const llama_lora *lora, int param) {
    if (param >= LLAMA_NORM_Q) return c->qk_norm;
    if (llama_is_adapter(param)) return llama_has_adapter(lora, param % LLAMA_MATRICES);
    return param < LLAMA_BIAS || param >= LLAMA_NORM1 || llama_has_bias(c, param % LLAMA_MATRICES);
}

/* Fills *u. lora NULL: without adapters. desc.user of a parameter is its index in llama_names. */
static inline void llama_unit_of(const llama_config *c, const llama_lora *lora, int index,
                                 llama_unit *u) {
    memset(u, 0, sizeof *u);
    if (index >= 1 && index <= c->layers) {
        snprintf(u->name, sizeof u->name, "model.layers.%d", index - 1);
        for (int i = 0; i < LLAMA_PARAMS; i++) {
            u->at[i] = llama_has_param(c, lora, i) ? u->num++ : -1;
            if (u->at[i] < 0) continue;
            u->p[u->at[i]] = llama_param_desc(c, lora, i);
            u->p[u->at[i]].user = (void *)(uintptr_t)i;
        }
        return;
    }
    const int norm = index == c->layers + 1;
    strcpy(u->name, norm ? "model.norm" : index ? "lm_head" : "model.embed_tokens");
    u->p[0] = norm ? fsdp_vec("weight", c->hidden) : fsdp_mat("weight", c->vocab, c->hidden);
    u->num = 1;
}

/* ---- files ----------------------------------------------------------------------------------- */

static inline int llama_ends(const char *name, const char *end) {
    const size_t n = strlen(name), k = strlen(end);
    return n >= k && !strcmp(name + n - k, end);
}

/* Sets `why` if a directory has no safetensors file and no index of some: names another format. */
static inline void llama_no_weights(const char *dir, char *why, size_t cap) {
    static const char *const ends[] = {".bin", ".gguf", ".pt", ".pth", ".h5", ".msgpack"};
    int safe = 0;
    char other[256] = "";
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        safe |= strstr(e->d_name, ".safetensors") != NULL; // or its index
        for (int i = 0; i < 6; i++) {
            if (llama_ends(e->d_name, ends[i])) snprintf(other, sizeof other, "%s", e->d_name);
        }
    }
    if (d) closedir(d);
    if (!d || safe) return;
    if (other[0]) {
        snprintf(why, cap,
                 "%s: %s: expected model.safetensors, got another format: load the model with "
                 "transformers, dequantise it, and save it",
                 dir, other);
    } else {
        snprintf(why, cap, "%s: expected model.safetensors next to config.json, got no weights",
                 dir);
    }
}

static inline const char *llama_shape_text(char out[80], int ndim, const int64_t *shape) {
    int n = snprintf(out, 80, "[");
    for (int d = 0; d < ndim && d < FSDP_MAX_DIMS && n < 56; d++) {
        n += snprintf(out + n, (size_t)(80 - n), d ? ", %lld" : "%lld", (long long)shape[d]);
    }
    snprintf(out + n, (size_t)(80 - n), "]");
    return out;
}

/* Checks the tensor of a parameter. Returns 0; 1 if there is none; -1 if it is another one:
   `why` has the line without the directory. */
static inline int llama_check_tensor(const fsdp_checkpoint_reader *files, const char *name,
                                     const fsdp_param_desc *p, char *why, size_t cap) {
    fsdp_checkpoint_tensor t;
    char want[80], got[80];
    if (fsdp_checkpoint_tensor_at(files, fsdp_checkpoint_tensor_find(files, name), &t)) {
        snprintf(why, cap, "%s: expected a tensor %s, got none", name,
                 llama_shape_text(want, p->ndim, p->shape));
        return 1;
    }
    int same = t.ndim == p->ndim;
    for (int d = 0; same && d < t.ndim; d++) same = t.shape[d] == p->shape[d];
    if (!same) {
        snprintf(why, cap, "%s: expected shape %s, got %s", name,
                 llama_shape_text(want, p->ndim, p->shape), llama_shape_text(got, t.ndim, t.shape));
    } else if (t.dtype != FSDP_F32 && t.dtype != FSDP_BF16 && t.dtype != FSDP_F16 &&
               t.dtype != FSDP_F64) {
        snprintf(why, cap, "%s: expected F32, BF16, F16 or F64, got %s", name,
                 fsdp_safetensors_dtype_name(t.file_dtype));
        same = 0;
    }
    return same ? 0 : -1;
}

/* Returns 1 if a model of this config has a tensor of that name, or if nothing is said about it. */
static inline int llama_knows(const llama_config *c, const char *name) {
    char layer[48];
    int n = -1, used = 0;
    if (!strcmp(name, "model.embed_tokens.weight") || !strcmp(name, "model.norm.weight")) return 1;
    if (!strcmp(name, "lm_head.weight")) return 1; // next to a tied embedding it is ignored
    if (llama_ends(name, ".rotary_emb.inv_freq")) return 1;
    if (sscanf(name, "model.layers.%9d.%n", &n, &used) != 1 || !used || n >= c->layers) return 0;
    snprintf(layer, sizeof layer, "model.layers.%d.", n); // as it is printed: not +1, not 01
    if (n < 0 || strncmp(name, layer, (size_t)used) || (size_t)used != strlen(layer)) return 0;
    for (int i = 0; i < LLAMA_PARAMS; i++) {
        if (llama_has_param(c, NULL, i) && !strcmp(name + used, llama_names[i])) return 1;
    }
    return 0;
}

/* Returns how many tensors the model does not have, and copies the name of the first one without
   control characters. */
static inline int64_t llama_extra(const llama_config *c, const fsdp_checkpoint_reader *files,
                                  char *first, size_t cap) {
    fsdp_checkpoint_contents all;
    fsdp_checkpoint_tensor t;
    int64_t extra = 0;
    first[0] = 0;
    if (fsdp_checkpoint_contents_of(files, &all)) return 0;
    for (int64_t i = 0; i < all.num_tensors; i++) {
        if (fsdp_checkpoint_tensor_at(files, i, &t) || llama_knows(c, t.name)) continue;
        if (!extra++) snprintf(first, cap, "%s", t.name);
    }
    for (; *first; first++) {
        if ((unsigned char)*first < ' ' || *first == 0x7F) *first = '?';
    }
    return extra;
}

/* Checks that files have each parameter of the units, or of their adapters, which PEFT names.
   Returns how many are missing, or -1 after another failure: then `why` has a line, of the first.
   */
static inline int llama_check_tensors(const llama_config *c, const llama_lora *lora,
                                      const fsdp_checkpoint_reader *files, const char *dir,
                                      char *why, size_t cap) {
    char text[480], name[256];
    int missing = 0, found = 0;
    for (int i = 0; i < llama_num_units(c) && found >= 0; i++) {
        llama_unit u;
        llama_unit_of(c, lora, i, &u);
        for (int p = 0; p < u.num && found >= 0; p++) {
            if (lora && !llama_is_adapter((int)(uintptr_t)u.p[p].user)) continue;
            snprintf(name, sizeof name, "%s%s.%s", lora ? LLAMA_PEFT : "", u.name, u.p[p].name);
            found = llama_check_tensor(files, name, &u.p[p], text, sizeof text);
            missing += found > 0;
            if (found < 0 || (found > 0 && missing == 1)) {
                snprintf(why, cap, "%.*s: %s", LLAMA_PATH, dir, text);
            }
        }
    }
    if (found >= 0 && missing > 1) {
        const size_t n = strlen(why);
        snprintf(why + n, cap - n, " (%d tensors are missing)", missing);
    }
    return found < 0 ? -1 : missing;
}

/* Opens the files of a directory and checks that they have each parameter. Returns 0; -1: `why`
   has a line. extra, with room for `cap` bytes, too: a line on tensors that the model does not
   have, or "". You own *files: end it with fsdp_checkpoint_close. */
static inline int llama_files_open(const char *dir, const llama_config *c,
                                   fsdp_checkpoint_reader **files, char *why, char *extra,
                                   size_t cap) {
    char name[256];
    extra[0] = 0;
    if (fsdp_checkpoint_open(dir, NULL, NULL, files, why, cap)) {
        llama_no_weights(dir, why, cap);
        return -1;
    }
    if (llama_check_tensors(c, NULL, *files, dir, why, cap)) {
        fsdp_checkpoint_close(*files);
        *files = NULL;
        return -1;
    }
    const long long others = llama_extra(c, *files, name, sizeof name);
    if (others) {
        snprintf(extra, cap,
                 "%s: %s: the model has no such parameter; it and all others that the "
                 "model does not have (%lld tensors) are ignored",
                 dir, name, others);
    }
    return 0;
}

/* Opens the adapter of a directory of PEFT and checks that it has both matrices of each target, and
   no others. Returns 0; -1: `why` has a line. You own *files: end it with fsdp_checkpoint_close. */
static inline int llama_adapter_open(const char *dir, const llama_config *c, const llama_lora *lora,
                                     fsdp_checkpoint_reader **files, char *why, size_t cap) {
    char path[LLAMA_PATH + 32];
    fsdp_checkpoint_contents all;
    int64_t wanted = 0;
    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    if (fsdp_checkpoint_open(path, NULL, NULL, files, why, cap)) return -1;
    for (int i = LLAMA_A; i < LLAMA_NORM1; i++) wanted += c->layers * llama_has_param(c, lora, i);
    int failed = llama_check_tensors(c, lora, *files, path, why, cap);
    if (!failed && (fsdp_checkpoint_contents_of(*files, &all) || all.num_tensors != wanted)) {
        snprintf(why, cap,
                 "%s: expected the %lld tensors of target_modules, got %lld: only adapters of "
                 "matrices of layers are supported",
                 path, (long long)wanted, (long long)all.num_tensors);
        failed = 1;
    }
    if (!failed) return 0;
    fsdp_checkpoint_close(*files);
    *files = NULL;
    return -1;
}

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct llama_model {
    llama_config c;
    llama_acts acts;
    llama_lora lora;
    int frozen; // 1: all but adapters
    fsdp_world *world;
    fsdp_model *model; // the world owns it
    fsdp_unit *embed, *norm, *head, **layers;
    int at[LLAMA_PARAMS];                    // as llama_unit.at
    uint8_t (*kinds)[LLAMA_PARAMS];          // llama_param.kind in each unit
    fsdp_checkpoint_reader *files, *adapter; // while it loads; adapter may be NULL
    char why[LLAMA_WHY];                     // the first failure of a read on this rank
} llama_model;

// Another arithmetic than that of llama.h, for llama_acts_desc.engine: activations and passes.
typedef struct llama_engine {
    fsdp_dtype dtype; // of gathered parameters and gradients; KEEP: f32, as shards are
    size_t (*nbytes)(const llama_config *c, const llama_acts_desc *desc);
    int (*create)(llama_model *m); // 0; else -1 and m->why may have a line
    void (*destroy)(llama_model *m);
    double (*pass)(llama_model *m, const int32_t *tokens, const int32_t *labels, int B,
                   double scale, int *failed); // as llama_model_pass, without logits
} llama_engine;

static inline void llama_model_destroy(llama_model *m) {
    if (m->acts.own) m->acts.desc.engine->destroy(m);
    fsdp_model_destroy(m->model);
    llama_acts_destroy(&m->acts);
    free(m->layers), free(m->kinds);
    memset(m, 0, sizeof *m);
}

/* Ends a part that may have failed on some ranks: then no rank keeps the model, and `why` has a
   line on each. Returns 0 or -1. Collective. */
static inline int llama_model_agree(llama_model *m, int32_t failed, char *why, size_t cap) {
    if (fsdp_all_reduce(m->world, NULL, &failed, 1, FSDP_I32, FSDP_MAX)) failed = 1;
    why[0] = 0;
    if (!failed) return 0;
    const char *text = m->why[0] ? m->why : fsdp_last_error(m->world);
    snprintf(why, cap, "%s", text[0] ? text : "another rank has failed");
    llama_model_destroy(m);
    return -1;
}

/* Returns where unit `index` of llama_unit_of is kept. */
static inline fsdp_unit **llama_unit_at(llama_model *m, int index) {
    if (index >= 1 && index <= m->c.layers) return &m->layers[index - 1];
    return index == 0 ? &m->embed : index == m->c.layers + 1 ? &m->norm : &m->head;
}

/* Freezes a parameter of unit `index`, unless it is one of an adapter, and gives it the dtype that
   m->lora.base asks for. Only matrices of layers become blocks. */
static inline void llama_freeze(llama_model *m, const fsdp_checkpoint_reader *files, int index,
                                const llama_unit *u, fsdp_param_desc *p) {
    const int param = (int)(uintptr_t)p->user;
    const int is_matrix = index >= 1 && index <= m->c.layers && param < LLAMA_BIAS;
    int dtype = m->lora.base;
    char name[256];
    fsdp_checkpoint_tensor t;
    if (llama_is_adapter(param)) return;
    if (llama_dtypes[dtype].block_bytes && !(is_matrix && p->shape[1] % LLAMA_BLOCK == 0)) {
        dtype = LLAMA_DTYPE_FILE;
    }
    if (dtype == LLAMA_DTYPE_FILE) {
        snprintf(name, sizeof name, "%s.%s", u->name, p->name);
        dtype = LLAMA_DTYPE_F32; // also for f64
        if (!fsdp_checkpoint_tensor_at(files, fsdp_checkpoint_tensor_find(files, name), &t)) {
            if (t.dtype == FSDP_BF16) dtype = LLAMA_DTYPE_BF16;
            if (t.dtype == FSDP_F16) dtype = LLAMA_DTYPE_F16;
        }
    }
    if (llama_dtypes[dtype].block_bytes) {
        p->shape[1] = p->shape[1] / LLAMA_BLOCK * llama_dtypes[dtype].block_bytes;
    }
    p->frozen = 1, p->dtype = llama_dtypes[dtype].dtype;
    m->kinds[index][param] = dtype == LLAMA_DTYPE_F32 ? 0 : (uint8_t)dtype;
}

static inline int llama_add_units(llama_model *m, const fsdp_checkpoint_reader *files) {
    for (int i = 0; i < llama_num_units(&m->c); i++) {
        llama_unit u;
        fsdp_unit_desc desc = FSDP_ZERO;
        const int layer = i >= 1 && i <= m->c.layers;
        llama_unit_of(&m->c, &m->lora, i, &u);
        for (int p = 0; p < u.num && m->frozen; p++) llama_freeze(m, files, i, &u, &u.p[p]);
        desc.name = u.name, desc.params = u.p, desc.num_params = u.num;
        desc.user = (void *)(uintptr_t)i;
        // the last norm and the head are open around the loss only
        const int stays = i ? !layer : m->c.tied;
        desc.reshard_after_forward = stays ? FSDP_RESHARD_NEVER : FSDP_RESHARD_ALWAYS;
        if (fsdp_fully_shard(m->model, &desc, llama_unit_at(m, i))) return -1;
        if (layer) memcpy(m->at, u.at, sizeof m->at);
    }
    if (m->c.tied) m->head = m->embed;
    return 0;
}

/* Makes the units. lora NULL: all parameters are trained, as f32; else only adapters are, and
   desc's rank, lora_scale and convert are set as it says. Gradients are sums over all ranks and
   rows: scale them by llama_model_pass. Allocates little: llama_model_predict and m->acts.nbytes
   have the bytes of llama_model_load, which comes next. Returns 0; -1 on every rank: `why` has a
   line, and *m holds nothing. Collective. */
static inline int llama_model_create(llama_model *m, fsdp_world *world, const llama_config *c,
                                     const llama_lora *lora, const fsdp_checkpoint_reader *files,
                                     const llama_acts_desc *desc, char *why, size_t cap) {
    fsdp_model_desc model = FSDP_ZERO;
    memset(m, 0, sizeof *m);
    m->c = *c, m->world = world, m->acts.desc = *desc;
    if (lora) {
        m->lora = *lora, m->frozen = 1;
        m->acts.desc.rank = lora->rank, m->acts.desc.convert = llama_convert;
        m->acts.desc.lora_scale = lora->rank ? (float)(lora->alpha / lora->rank) : 0.0f;
    }
    m->acts.nbytes = desc->engine ? desc->engine->nbytes(c, desc)
                                  : llama_acts_nbytes(c, &m->acts.desc);
    if (desc->engine) model.param_dtype = desc->engine->dtype;
    m->layers = (fsdp_unit **)calloc((size_t)c->layers, sizeof(fsdp_unit *));
    m->kinds = (uint8_t(*)[LLAMA_PARAMS])calloc((size_t)llama_num_units(c), sizeof *m->kinds);
    const int failed = !m->layers || !m->kinds || !m->acts.nbytes;
    if (failed) {
        snprintf(m->why, sizeof m->why, "no memory for %d layers and %d rows of %d tokens",
                 c->layers, desc->rows, desc->context);
    }
    // a rank that fails alone must not leave the others in a collective
    if (llama_model_agree(m, failed, why, cap)) return -1;
    return llama_model_agree(m,
                             fsdp_model_create(world, &model, &m->model) ||
                                 llama_add_units(m, files) ||
                                 fsdp_set_gradient_divide_factor(m->model, NULL, 1.0),
                             why, cap);
}

/* Predicts the bytes of a rank after steps of `micros` microbatches: those of fsdp_model_memory.
   accumulate as in llama_step. The last norm and the head are created last, and opened last. */
static inline fsdp_status llama_model_predict(const llama_model *m, int micros, int accumulate,
                                              fsdp_memory *out) {
    fsdp_predict_desc desc = FSDP_ZERO;
    desc.in_order = 1, desc.without_sync = accumulate && micros > 1;
    return fsdp_model_predict_step(m->model, &desc, out);
}

/* Reads rows of a parameter by its name in files. With to NULL as the parameter is kept, else as
   f32. */
static inline void llama_read(llama_model *m, const fsdp_param_view *rows, float *to) {
    const int is_adapter = llama_is_adapter((int)(uintptr_t)rows->user);
    fsdp_checkpoint_reader *files = is_adapter ? m->adapter : m->files;
    const fsdp_dtype dtype = to ? FSDP_F32 : rows->dtype;
    char name[256], why[LLAMA_PATH];
    int64_t shape[FSDP_MAX_DIMS];
    snprintf(name, sizeof name, "%s%s.%s", is_adapter ? LLAMA_PEFT : "", rows->unit_name,
             rows->name);
    memcpy(shape, rows->local_shape, sizeof shape);
    if (rows->dtype == FSDP_U8) {
        shape[1] = shape[1] / llama_dtypes[m->lora.base].block_bytes * LLAMA_BLOCK;
    }
    if (fsdp_checkpoint_read(files, fsdp_checkpoint_tensor_find(files, name), rows->start, shape,
                             dtype, to ? (void *)to : rows->data, why, sizeof why)) {
        if (!m->why[0]) snprintf(m->why, sizeof m->why, "%s: %s", name, why);
    }
}

/* Fills rows of a parameter, as fsdp_init_params asks. B of a new adapter stays zero. */
static inline void llama_fill(void *user, const fsdp_param_view *rows) {
    llama_model *m = (llama_model *)user;
    const int param = (int)(uintptr_t)rows->user;
    if (llama_is_adapter(param) && !m->adapter) {
        if (param < LLAMA_B) llama_adapter_init(&m->lora, rows);
    } else if (rows->dtype == FSDP_U8) {
        const int kind = m->lora.base;
        const int64_t count = rows->numel / llama_dtypes[kind].block_bytes * LLAMA_BLOCK;
        llama_read(m, rows, m->acts.room); // has room for the largest matrix
        llama_store(rows->data, m->acts.room, kind, count);
    } else {
        llama_read(m, rows, NULL);
    }
}

/* Allocates activations and shards, and fills them by `fill`, which writes a failure to m->why.
   Returns as llama_model_create. Collective. */
static inline int llama_model_fill(llama_model *m, void (*fill)(void *, const fsdp_param_view *),
                                   void *user, char *why, size_t cap) {
    const llama_acts_desc desc = m->acts.desc;
    const size_t nbytes = m->acts.nbytes;
    const int failed = desc.engine ? desc.engine->create(m)
                                   : llama_acts_create(&m->c, &desc, &m->acts);
    if (failed && !m->why[0]) {
        snprintf(m->why, sizeof m->why, "no memory for activations: expected %zu bytes", nbytes);
    }
    if (llama_model_agree(m, failed, why, cap)) return -1;
    return llama_model_agree(m, fsdp_init_params(m->model, fill, user) || m->why[0], why, cap);
}

/* Reads each rank's rows. adapter NULL: a new one, whose B is zero. The readers may be closed
   afterwards. Returns as llama_model_create. Collective. */
static inline int llama_model_load(llama_model *m, fsdp_checkpoint_reader *files,
                                   fsdp_checkpoint_reader *adapter, char *why, size_t cap) {
    m->files = files, m->adapter = adapter;
    if (llama_model_fill(m, llama_fill, m, why, cap)) return -1;
    m->files = m->adapter = NULL;
    return 0;
}

/* Returns a parameter of unit `index`, of which it is number `param` of llama_names, or the only
   one and 0. With grads its gradient, too, unless it is frozen. */
static inline llama_param llama_param_of(llama_model *m, int index, int param, int grads) {
    const int at = index >= 1 && index <= m->c.layers ? m->at[param] : 0;
    fsdp_unit *unit = *llama_unit_at(m, index);
    llama_param p;
    p.kind = m->kinds[index][param];
    p.w = fsdp_data_as(unit, at, llama_dtypes[p.kind ? p.kind : LLAMA_DTYPE_F32].dtype);
    grads = grads && (!m->frozen || llama_is_adapter(param));
    p.g = grads ? fsdp_grad_f32(unit, at) : NULL;
    return p;
}

/* Sets the parameters of layer l. */
static inline void llama_layer_of(llama_model *m, int l, int grads, llama_layer *layer) {
    memset(layer, 0, sizeof *layer);
    for (int i = 0; i < LLAMA_PARAMS; i++) {
        if (m->at[i] >= 0) layer->p[i] = llama_param_of(m, l + 1, i, grads);
    }
}

static inline llama_param llama_norm_of(llama_model *m, int grads) {
    return llama_param_of(m, m->c.layers + 1, 0, grads);
}
static inline llama_param llama_head_of(llama_model *m, int grads) {
    return llama_param_of(m, m->c.tied ? 0 : m->c.layers + 2, 0, grads);
}

/* Backward of the layers and the embedding; acts.dx has the gradient of the last layer's output.
   After a failure, which fsdp_finalize_backward returns, it stops. */
static inline void llama_model_backward(llama_model *m, const int32_t *tokens, int B) {
    const llama_config *c = &m->c;
    llama_layer layer;
    for (int l = c->layers - 1; l >= 0; l--) {
        const float *x = llama_x(c, &m->acts, l);
        if (fsdp_pre_backward(m->layers[l])) return; // no memory to compute with
        llama_layer_of(m, l, 1, &layer);
        if (m->acts.desc.recompute) {
            llama_layer_forward(c, &m->acts, &layer, l, x, llama_x(c, &m->acts, l + 1), B);
        }
        llama_layer_backward(c, &m->acts, &layer, l, x, B);
        fsdp_post_backward(m->layers[l]);
    }
    if (m->frozen) return; // the embedding gets no gradient
    if (!c->tied) fsdp_pre_backward(m->embed);
    const llama_param embed = llama_param_of(m, 0, 0, 1);
    llama_embed_backward(c, &m->acts, &embed, tokens, B * m->acts.desc.context);
    fsdp_post_backward(m->embed);
}

/* The norm after the layers, the head and the loss; with scale their backward, too. After a failure
   it stops. */
static inline double llama_model_loss(llama_model *m, const int32_t *labels, int B, double scale,
                                      float *logits) {
    const llama_config *c = &m->c;
    llama_acts *a = &m->acts;
    const int N = B * a->desc.context, train = scale != 0.0;
    const float *x = llama_x(c, a, c->layers);
    if (fsdp_pre_forward(m->norm) || (!c->tied && fsdp_pre_forward(m->head))) return 0.0;
    if (train) {
        fsdp_post_forward(m->norm), fsdp_post_forward(m->head);
        if (fsdp_pre_backward(m->head) || fsdp_pre_backward(m->norm)) return 0.0;
    }
    const llama_param norm = llama_norm_of(m, train), head = llama_head_of(m, train);
    llama_norm_forward(a->n, x, llama_floats(a, &norm, 0, c->hidden), N, c->hidden, c->eps);
    const double loss = llama_loss(c, a, &head, a->n, a->d2, labels, N, scale, logits);
    if (!train) {
        fsdp_post_forward(m->norm), fsdp_post_forward(m->head);
        fsdp_reshard(m->norm), fsdp_reshard(m->head);
        return loss;
    }
    llama_norm_backward(a->dx, 0, norm.g, a->d2, x, llama_floats(a, &norm, 0, c->hidden), N,
                        c->hidden, c->eps);
    fsdp_post_backward(m->norm);
    // a tied embedding that is trained waits for the gradient of its first use
    if (!c->tied || m->frozen) fsdp_post_backward(m->head);
    return loss;
}

/* Computes the residual stream of B rows of a->desc.context tokens, which are the model's
   activations or others. A tied embedding stays open. Returns the first failure, and stops there:
   without memory there are no parameters. */
static inline fsdp_status llama_model_layers(llama_model *m, llama_acts *a, const int32_t *tokens,
                                             int B) {
    const llama_config *c = &m->c;
    llama_layer layer;
    fsdp_status status = fsdp_pre_forward(m->embed);
    if (status) return status;
    const llama_param embed = llama_param_of(m, 0, 0, 0);
    llama_embed_forward(c, a, &embed, llama_x(c, a, 0), tokens, B * a->desc.context);
    if (!c->tied) status = fsdp_post_forward(m->embed);
    for (int l = 0; l < c->layers && !status; l++) {
        status = fsdp_pre_forward(m->layers[l]);
        if (status) break;
        llama_layer_of(m, l, 0, &layer);
        llama_layer_forward(c, a, &layer, l, llama_x(c, a, l), llama_x(c, a, l + 1), B);
        status = fsdp_post_forward(m->layers[l]);
    }
    return status;
}

/* Computes B rows of acts.desc.context tokens; a rank may have none. labels: the token that
   follows, or negative: not counted. scale: 0 evaluates; call fsdp_set_grad_enabled(model, 0)
   before. Else gradients of `scale` times the sum of all ranks' losses are added, for example 1
   / counted labels of the step. logits: [B*context, vocab] or NULL. Returns the sum of this
   rank's losses, in nats; *failed, if there was an error. Collective. */
static inline double llama_model_pass(llama_model *m, const int32_t *tokens, const int32_t *labels,
                                      int B, double scale, float *logits, int *failed) {
    const llama_engine *engine = m->acts.desc.engine;
    if (engine) return engine->pass(m, tokens, labels, B, scale, failed);
    (void)llama_model_layers(m, &m->acts, tokens, B); // the end returns a failure
    const double loss = llama_model_loss(m, labels, B, scale, logits);
    *failed = 0;
    if (scale != 0.0) {
        llama_model_backward(m, tokens, B);
        *failed = fsdp_finalize_backward(m->model) != FSDP_OK;
    } else {
        *failed = fsdp_barrier(m->world) != FSDP_OK;
    }
    return loss;
}

/* ---- a step ---------------------------------------------------------------------------------- */

// Microbatches of a rank in one step. Each has acts.desc.rows * acts.desc.context tokens and labels
// in its place; rows[b] of its rows are used, and a rank may have none.
typedef struct llama_batch {
    const int32_t *tokens, *labels;
    const int *rows;
    int count;
} llama_batch;

typedef struct llama_step_result {
    int64_t counted;   // labels of all ranks and microbatches that are not negative
    double loss, norm; // the mean of those labels, in nats; of all gradients before clipping
} llama_step_result;

static inline ptrdiff_t llama_batch_at(const llama_model *m, int b) {
    return (ptrdiff_t)b * m->acts.desc.rows * m->acts.desc.context;
}

/* Returns how many labels are not negative. */
static inline int64_t llama_counted(const int32_t *labels, int count) {
    int64_t counted = 0;
    for (int i = 0; i < count; i++) counted += labels[i] >= 0;
    return counted;
}

/* Sets out->counted. Returns FSDP_OK; INVALID_ARG on every rank if no label of the step counts.
   Collective. */
static inline fsdp_status llama_count(llama_model *m, const llama_batch *in,
                                      llama_step_result *out) {
    memset(out, 0, sizeof *out);
    for (int b = 0; b < in->count; b++) {
        out->counted += llama_counted(in->labels + llama_batch_at(m, b),
                                      in->rows[b] * m->acts.desc.context);
    }
    const fsdp_status status = fsdp_all_reduce(m->world, NULL, &out->counted, 1, FSDP_I64,
                                               FSDP_SUM);
    return status || out->counted ? status : FSDP_ERR_INVALID_ARG;
}

/* Makes one step of training: gradients of the mean over the counted labels of the whole step,
   clipped to max_norm (0: not clipped), then AdamW. accumulate 1: gradients are reduced with the
   last microbatch only, and each rank keeps full ones until then. Returns FSDP_OK; INVALID_ARG on
   every rank if no label counts: then nothing has changed; else what a call has returned.
   Collective. */
static inline fsdp_status llama_step(llama_model *m, fsdp_adamw *adamw, const llama_batch *in,
                                     int accumulate, double lr, double max_norm,
                                     llama_step_result *out) {
    int failed = 0;
    fsdp_status status = llama_count(m, in, out);
    for (int b = 0; b < in->count && !status; b++) {
        const ptrdiff_t at = llama_batch_at(m, b);
        if (accumulate) {
            const int is_last = b + 1 == in->count;
            status = fsdp_set_requires_gradient_sync(m->model, NULL, is_last);
        }
        out->loss += llama_model_pass(m, in->tokens + at, in->labels + at, in->rows[b],
                                      1.0 / (double)out->counted, NULL, &failed) /
                     (double)out->counted;
        if (failed) status = FSDP_ERR_ABORTED; // the reason has been logged
    }
    if (!status) status = fsdp_all_reduce(m->world, NULL, &out->loss, 1, FSDP_F64, FSDP_SUM);
    if (!status) {
        status = fsdp_clip_grad_norm(m->model, max_norm > 0.0 ? max_norm : HUGE_VAL, &out->norm);
    }
    if (!status) status = fsdp_adamw_step(adamw, lr);
    return status ? status : fsdp_zero_grad(m->model);
}

#endif // LLAMA_MODEL_H
