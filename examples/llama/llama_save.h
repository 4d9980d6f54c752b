/* llama_save.h - what a training leaves: checkpoints, from which it resumes, and a directory that
   transformers loads

   A checkpoint has the parameters, what AdamW keeps, and a llama_run. Which rows a step has follows
   from the seed and the number of the step, so that this number is the place in the data, too. A
   run that resumes needs the same tokens, model directory, seed, batch, context and adapters; the
   number of ranks may differ. A frozen model is not in it: its directory is read again.

   An export has the names of the directory that the model was loaded from, and all its other
   files. Adapters are exported as PEFT writes them, or merged into the model.

   SPDX-License-Identifier: MIT */
#ifndef LLAMA_SAVE_H
#define LLAMA_SAVE_H

#include "examples/llama/llama_model.h" // llama_model, llama_file_read

/* Gives rank 0's line to all ranks. Returns 0 if it is empty, -1 if not or after a failure: `why`
   has it. Collective. */
static inline int llama_agree(fsdp_world *world, char line[LLAMA_WHY], char *why, size_t cap) {
    if (fsdp_broadcast(world, NULL, line, LLAMA_WHY, 0)) {
        snprintf(line, LLAMA_WHY, "%s", fsdp_last_error(world));
    }
    snprintf(why, cap, "%s", line);
    return line[0] ? -1 : 0;
}

/* Returns 0; -1 if a call failed: `why` has its text. */
static inline int llama_result(const fsdp_world *world, fsdp_status status, char *why, size_t cap) {
    snprintf(why, cap, "%s", status ? fsdp_last_error(world) : "");
    return status ? -1 : 0;
}

/* ---- export ---------------------------------------------------------------------------------- */

/* Checks, before ranks start, that a directory `out` can be made: there is nothing with that name,
   and its parent is there. Returns 0; -1: `why` has a line. */
static inline int llama_export_check(const char *out, char *why, size_t cap) {
    char path[LLAMA_PATH], parent[LLAMA_PATH];
    struct stat st;
    int begin, up, end = (int)strlen(out);
    const int fits = end > 0 && end < LLAMA_PATH - 64; // the temporary directory has a longer name
    why[0] = 0;
    if (!fits) {
        snprintf(why, cap, "expected a path of 1 to %d bytes, got %d", LLAMA_PATH - 65, end);
        return -1;
    }
    while (end > 1 && out[end - 1] == '/') end--;
    for (begin = end; begin > 0 && out[begin - 1] != '/';) begin--;
    for (up = begin; up > 1 && out[up - 1] == '/';) up--;
    snprintf(path, sizeof path, "%.*s", end, out);
    snprintf(parent, sizeof parent, "%.*s", begin ? up : 1, begin ? out : ".");
    DIR *d = opendir(parent);
    if (!d) {
        snprintf(why, cap, "%s: expected its parent %s to be a directory: %s", out, parent,
                 strerror(errno));
        return -1;
    }
    closedir(d);
    if (!lstat(path, &st)) snprintf(why, cap, "%s: expected a new name, got one that exists", out);
    return why[0] ? -1 : 0;
}

/* Writes config.json to `to` with `dtype` as the value of its keys dtype and torch_dtype. `to` has
   room for twice the bytes. Returns how many there are. */
static inline int64_t llama_config_as(const llama_file *f, const char *dtype, char *to) {
    fsdp_json key, v;
    int64_t from = 0, n = 0;
    for (memset(&v, 0, sizeof v); fsdp_json_next(&f->root, &key, &v);) {
        if (!llama_is(&key, "dtype") && !llama_is(&key, "torch_dtype")) continue;
        memcpy(to + n, f->text + from, (size_t)(v.begin - from));
        n += v.begin - from;
        n += sprintf(to + n, "\"%s\"", dtype);
        from = v.end;
    }
    memcpy(to + n, f->text + from, f->nbytes - (size_t)from);
    return n + (int64_t)f->nbytes - from;
}

/* Makes the config.json of an export: t->data, which you free. Returns 0; -1: `why` has a line. */
static inline int llama_config_text(const char *from, const char *dtype, fsdp_checkpoint_text *t,
                                    char *why, size_t cap) {
    llama_file f;
    char *text = (char *)malloc(2 * (size_t)LLAMA_CONFIG_BYTES);
    why[0] = 0;
    f.why = why, f.cap = cap;
    if (!text) {
        snprintf(why, cap, "%s: no memory for config.json", from);
    } else if (llama_file_read(&f, from, "config.json") > 0) {
        llama_fail(&f, "cannot be opened: %s", strerror(ENOENT));
    }
    t->name = "config.json", t->data = text;
    if (!why[0]) t->nbytes = llama_config_as(&f, dtype, text);
    return why[0] ? -1 : 0;
}

/* A tensor that the model does not have is left out: an ignored one, or lm_head next to a tied
   embedding. */
static inline int llama_may_lack(void *user, const char *name) {
    (void)user, (void)name;
    return 1;
}

/* Writes a directory that transformers loads: model.safetensors, or shards and an index, with the
   names of `from`; config.json, in which only the value of dtype or torch_dtype may differ; and
   the other files of `from` that are no weights. `out` gets its name when it is complete. ck's
   file functions are used. Returns 0; -1 on every rank: `why` has a line; there is no `out`, unless
   only the last sync of its parent has failed. dtype: FILE, F32, BF16 or F16. Collective. */
static inline int llama_export(llama_model *m, fsdp_checkpoint *ck, const char *from,
                               const char *out, int dtype, char *why, size_t cap) {
    fsdp_checkpoint_export_desc desc = FSDP_ZERO;
    fsdp_checkpoint_text config = FSDP_ZERO;
    char line[LLAMA_WHY];
    line[0] = 0;
    desc.dtype = llama_dtypes[dtype].dtype;
    desc.like = from, desc.may_lack = llama_may_lack;
    desc.like_dtypes = dtype == LLAMA_DTYPE_FILE;
    if (dtype != LLAMA_DTYPE_FILE && fsdp_rank(m->world) == 0) {
        desc.texts = &config, desc.num_texts = 1;
        llama_config_text(from, llama_dtypes[dtype].word, &config, line, sizeof line);
    }
    int result = llama_agree(m->world, line, why, cap);
    if (!result) {
        result = llama_result(m->world, fsdp_checkpoint_export_model(ck, out, &desc), why, cap);
    }
    free((void *)(uintptr_t)config.data);
    return result;
}

/* ---- adapters -------------------------------------------------------------------------------- */

/* Renames a parameter as PEFT does, and leaves out those that are none of an adapter. */
static inline int llama_adapter_name(void *user, const char *name, char *out) {
    (void)user;
    if (!strstr(name, ".lora_")) return 0;
    snprintf(out, FSDP_CHECKPOINT_NAME, "%s%s", LLAMA_PEFT, name);
    return 1;
}

/* Writes a directory that PEFT loads: adapter_model.safetensors, as f32, and adapter_config.json,
   which names `base` as the model, from the root, so that PEFT finds it from any directory.
   Otherwise as llama_export. Collective. */
static inline int llama_export_adapter(llama_model *m, fsdp_checkpoint *ck, const char *base,
                                       const char *out, char *why, size_t cap) {
    fsdp_checkpoint_export_desc desc = FSDP_ZERO;
    fsdp_checkpoint_text config = FSDP_ZERO;
    char text[LLAMA_ADAPTER_TEXT], *whole = realpath(base, NULL);
    config.name = "adapter_config.json", config.data = text;
    config.nbytes = llama_adapter_text(&m->lora, whole && strlen(whole) < LLAMA_PATH ? whole : base,
                                       text);
    free(whole);
    desc.dtype = FSDP_F32, desc.rename = llama_adapter_name;
    desc.file_name = "adapter_model.safetensors", desc.max_file_bytes = INT64_MAX; // one file
    desc.texts = &config, desc.num_texts = 1;
    return llama_result(m->world, fsdp_checkpoint_export_model(ck, out, &desc), why, cap);
}

// A frozen model whose matrices get the adapters of another one.
typedef struct llama_merge {
    llama_model out;
    int rank; // of the adapters
    float *memory;
    const float **adapters; // [layers][LLAMA_PARAMS], whole, in memory; B times alpha / rank
} llama_merge;

/* Returns the bytes of all adapters, whole. */
static inline int64_t llama_adapters_nbytes(const llama_model *m) {
    int64_t numel = 0;
    llama_unit u;
    llama_unit_of(&m->c, &m->lora, 1, &u);
    for (int p = 0; p < u.num; p++) {
        if (llama_is_adapter((int)(uintptr_t)u.p[p].user))
            numel += u.p[p].shape[0] * u.p[p].shape[1];
    }
    return m->c.layers * numel * (int64_t)sizeof(float);
}

/* Gathers the adapters of m on each rank: as many bytes as their file has. Returns 0; -1 on every
   rank: `why` has a line. Collective. */
static inline int llama_merge_gather(llama_merge *g, llama_model *m, char *why, size_t cap) {
    const int L = m->c.layers;
    char line[LLAMA_WHY];
    llama_unit u;
    llama_unit_of(&m->c, &m->lora, 1, &u);
    g->rank = m->lora.rank;
    g->memory = (float *)malloc((size_t)llama_adapters_nbytes(m));
    g->adapters = (const float **)calloc((size_t)L * LLAMA_PARAMS, sizeof(float *));
    int32_t failed = !g->memory || !g->adapters;
    snprintf(line, sizeof line, "%s", failed ? "no memory for whole adapters" : "");
    // a rank that fails alone must not leave the others in a collective
    if (fsdp_all_reduce(m->world, NULL, &failed, 1, FSDP_I32, FSDP_MAX) || failed) {
        snprintf(why, cap, "%s", line[0] ? line : "another rank has failed");
        return -1;
    }
    float *to = g->memory;
    for (int i = 0; i < L * u.num; i++) {
        const fsdp_param_desc *p = &u.p[i % u.num];
        const int l = i / u.num, param = (int)(uintptr_t)p->user;
        const int64_t count = p->shape[0] * p->shape[1];
        if (!llama_is_adapter(param)) continue;
        if (fsdp_param_full(m->layers[l], i % u.num, to)) {
            return llama_result(m->world, FSDP_ERR_ABORTED, why, cap);
        }
        for (int64_t k = 0; param >= LLAMA_B && k < count; k++) to[k] *= m->acts.desc.lora_scale;
        g->adapters[(ptrdiff_t)l * LLAMA_PARAMS + param] = to;
        to += count;
    }
    return 0;
}

/* Fills rows of W with W + (alpha / rank) B A, added as f32 and then rounded. */
static inline void llama_merge_fill(void *user, const fsdp_param_view *rows) {
    llama_merge *g = (llama_merge *)user;
    const int param = (int)(uintptr_t)rows->user, layer = (int)(uintptr_t)rows->unit_user - 1;
    const int is_matrix = layer >= 0 && layer < g->out.c.layers && param < LLAMA_BIAS;
    const float *const *of = g->adapters + (ptrdiff_t)(is_matrix ? layer : 0) * LLAMA_PARAMS;
    if (!is_matrix || !of[LLAMA_A + param]) {
        llama_fill(&g->out, rows);
        return;
    }
    const int in = (int)rows->local_shape[1];
    float *to = g->out.acts.room;
    llama_read(&g->out, rows, to);
    gemm_f32(GEMM_ADD, (int)rows->local_shape[0], in, g->rank,
             of[LLAMA_B + param] + rows->start[0] * g->rank, g->rank, of[LLAMA_A + param], in, to,
             in);
    fsdp_convert(rows->data, rows->dtype, to, FSDP_F32, rows->numel);
}

/* Makes the units of the model that gets the adapters of m: frozen, in the dtype of the export.
   Returns as llama_model_create. Collective. */
static inline int llama_merge_create(llama_model *out, const llama_model *m,
                                     const fsdp_checkpoint_reader *files, int dtype, char *why,
                                     size_t cap) {
    const llama_lora frozen = {0, 0.0, 0, dtype, 0};
    llama_acts_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = desc.context = desc.loss_rows = 1;
    return llama_model_create(out, m->world, &m->c, &frozen, files, &desc, why, cap);
}

/* Predicts the bytes of a rank that llama_export_merged allocates next to m: the shards of the
   second model, the whole adapters, and activations of one token with room for a matrix. Not
   counted, as by fsdp_model_predict: scratch of fsdp_param_full, by which an export on several
   ranks gathers. Returns 0; -1 on every rank: `why` has a line. Collective. */
static inline int llama_merge_predict(llama_model *m, const fsdp_checkpoint_reader *files,
                                      int dtype, int64_t *nbytes, char *why, size_t cap) {
    fsdp_memory predicted;
    llama_model out;
    if (llama_merge_create(&out, m, files, dtype, why, cap)) return -1;
    const fsdp_status status = fsdp_model_predict(out.model, &predicted);
    *nbytes = llama_adapters_nbytes(m) + (int64_t)out.acts.nbytes;
    if (!status) *nbytes += predicted.pool_bytes[FSDP_POOL_SHARD];
    llama_model_destroy(&out);
    return llama_result(m->world, status, why, cap);
}

/* Writes the model of `from` with the adapters of m in its matrices, as llama_export does. It
   makes a second model, frozen in the dtype of the export, and destroys it. Collective. */
static inline int llama_export_merged(llama_model *m, const char *from, const char *out, int dtype,
                                      char *why, size_t cap) {
    llama_merge g;
    fsdp_checkpoint_reader *files = NULL;
    fsdp_checkpoint *ck;
    char line[LLAMA_WHY], extra[LLAMA_WHY];
    memset(&g, 0, sizeof g);
    line[0] = 0;
    int result = llama_merge_gather(&g, m, why, cap);
    if (!result) {
        const int32_t opened = !llama_files_open(from, &m->c, &files, line, extra, sizeof line);
        int32_t all = opened;
        if (fsdp_all_reduce(m->world, NULL, &all, 1, FSDP_I32, FSDP_MIN)) all = 0;
        if (!all) {
            snprintf(why, cap, "%s", opened ? "another rank has failed" : line);
            result = -1;
        }
    }
    result = result || llama_merge_create(&g.out, m, files, dtype, why, cap);
    g.out.files = files;
    result = result || llama_model_fill(&g.out, llama_merge_fill, &g, why, cap) ||
             llama_result(m->world, fsdp_checkpoint_create(g.out.model, NULL, &ck), why, cap) ||
             llama_export(&g.out, ck, from, out, dtype, why, cap);
    fsdp_checkpoint_close(files);
    llama_model_destroy(&g.out);
    free(g.memory), free(g.adapters);
    return result ? -1 : 0;
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

#define LLAMA_BLOB "llama"

// What a run that resumes must agree on, and how far it is. A blob of each checkpoint.
typedef struct llama_run {
    int64_t step; // how many are done
    uint64_t seed;
    uint64_t data; // hash of the tokens
    uint64_t base; // llama_dir_hash of the model's directory
    int32_t batch, context;
    llama_lora lora; // rank 0: all parameters are trained
} llama_run;

/* Returns a hash of the names and sizes of a directory's files, without hidden ones. */
static inline uint64_t llama_dir_hash(const char *dir) {
    char path[LLAMA_PATH];
    uint64_t sum = 0;
    struct stat st;
    DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));) {
        const int n = snprintf(path, sizeof path, "%s/%s", dir, e->d_name);
        if (e->d_name[0] == '.' || n >= (int)sizeof path || stat(path, &st)) continue;
        if (!S_ISREG(st.st_mode)) continue;
        uint64_t h = UINT64_C(14695981039346656037); // FNV-1a of the size, then of the name
        for (int i = 0; i < 8; i++) {
            h = (h ^ (((uint64_t)st.st_size >> 8 * i) & 255)) * UINT64_C(1099511628211);
        }
        for (const char *c = e->d_name; *c; c++) {
            h = (h ^ (unsigned char)*c) * UINT64_C(1099511628211);
        }
        sum += h; // in any order
    }
    if (d) closedir(d);
    return sum;
}

/* Makes the checkpoints' object: call it after the optimizer is there. *run is saved with each
   checkpoint and lives as long as *ck, which the model owns. keep: how many stay; 0: all. Returns
   0; -1 on every rank: `why` has a line. Collective. */
static inline int llama_checkpoint_create(llama_model *m, llama_run *run, int keep,
                                          fsdp_checkpoint **ck, char *why, size_t cap) {
    fsdp_checkpoint_desc desc = FSDP_ZERO;
    fsdp_checkpoint_blob blob = FSDP_ZERO;
    blob.name = LLAMA_BLOB, blob.data = run, blob.nbytes = (int64_t)sizeof *run;
    desc.blobs = &blob, desc.num_blobs = 1, desc.keep = keep;
    desc.skip_frozen = m->frozen; // the directory of the model has them
    return llama_result(m->world, fsdp_checkpoint_create(m->model, &desc, ck), why, cap);
}

/* Saves dir/step-NNNNNNNN, NNNNNNNN being run->step, and returns when it is complete, as train_gpt
   does without --async. After a failure the training can go on. *run is that of
   llama_checkpoint_create. Returns 0; -1 on every rank: `why` has a line. Collective. */
static inline int llama_checkpoint_save(llama_model *m, fsdp_checkpoint *ck, const char *dir,
                                        const llama_run *run, char *why, size_t cap) {
    return llama_result(m->world, fsdp_checkpoint_save(ck, dir, run->step), why, cap);
}

/* Compares a checkpoint's run with this one. Returns 0; -1: `why` has a line. */
static inline int llama_run_check(const char *path, const llama_run *saved, const llama_run *run,
                                  char *why, size_t cap) {
    const struct {
        const char *key;
        unsigned long long expected, got;
        int is_hash;
    } rows[] = {{"seed", saved->seed, run->seed, 0},
                {"data: hash of the tokens", saved->data, run->data, 1},
                {"model: hash of names and sizes of the files", saved->base, run->base, 1},
                {"batch", (uint32_t)saved->batch, (uint32_t)run->batch, 0},
                {"context", (uint32_t)saved->context, (uint32_t)run->context, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        if (rows[i].expected == rows[i].got) continue;
        snprintf(why, cap,
                 rows[i].is_hash ? "%s: %s: expected %016llx, got %016llx"
                                 : "%s: %s: expected %llu, got %llu",
                 path, rows[i].key, rows[i].expected, rows[i].got);
        return -1;
    }
    char saves[LLAMA_LORA_TEXT], asks[LLAMA_LORA_TEXT];
    if (!strcmp(llama_lora_text(&saved->lora, saves), llama_lora_text(&run->lora, asks))) return 0;
    snprintf(why, cap, "%s: adapters: expected %s, got %s", path, saves, asks);
    return -1;
}

/* Reads the run of a checkpoint. Returns 0; -1: `why` has a line. */
static inline int llama_run_read(const char *path, llama_run *out, char *why, size_t cap) {
    fsdp_checkpoint_reader *reader;
    fsdp_checkpoint_tensor t;
    int result = fsdp_checkpoint_open(path, NULL, NULL, &reader, why, cap) ? -1 : 0;
    if (result) return result;
    const int64_t at = fsdp_checkpoint_tensor_find(reader, "fsdp.blob." LLAMA_BLOB);
    if (fsdp_checkpoint_tensor_at(reader, at, &t) || t.nbytes != (int64_t)sizeof *out) {
        snprintf(why, cap, "%s: expected a checkpoint of this program, got another one", path);
        result = -1;
    } else if (fsdp_checkpoint_read(reader, at, NULL, NULL, FSDP_DTYPE_KEEP, out, why, cap)) {
        result = -1;
    }
    fsdp_checkpoint_close(reader);
    return result;
}

/* Checks the newest complete checkpoint of `dir`, before ranks start. With resume it must be one of
   *run; without, there must be none, as the new run would end at a step that is there. `dir` or its
   parent must be a directory. Returns 0; -1: `why` has a line. */
static inline int llama_save_check(const char *dir, const llama_run *run, int resume, char *why,
                                   size_t cap) {
    char path[LLAMA_PATH];
    fsdp_checkpoint_reader *reader;
    llama_run saved;
    long long below = INT64_MAX;
    struct stat st;
    if (stat(dir, &st)) return llama_export_check(dir, why, cap);
    why[0] = 0;
    if (!S_ISDIR(st.st_mode)) snprintf(why, cap, "%s: expected a directory, got a file", dir);
    while (!why[0]) { // the newest one below `below`
        long long newest = -1, step;
        DIR *d = opendir(dir);
        int used;
        for (struct dirent *e; d && (e = readdir(d));) {
            if (sscanf(e->d_name, "step-%18lld%n", &step, &used) != 1 || e->d_name[used]) continue;
            if (step > newest && step < below) newest = step;
        }
        if (d) closedir(d);
        if (newest < 0) return 0;
        below = newest;
        if (snprintf(path, sizeof path, "%s/step-%08lld", dir, newest) >= (int)sizeof path)
            return 0;
        if (fsdp_checkpoint_open(path, NULL, NULL, &reader, why, cap)) {
            why[0] = 0; // incomplete: an older one counts
            continue;
        }
        fsdp_checkpoint_close(reader);
        if (llama_run_read(path, &saved, why, cap)) break;
        if (resume) llama_run_check(path, &saved, run, why, cap);
        else
            snprintf(why, cap, "%s: expected no checkpoint: add --resume, or another --save", path);
        break;
    }
    return why[0] ? -1 : 0;
}

/* Loads the newest complete checkpoint of `dir` and sets run->step to its step; 0: there is none,
   and nothing is loaded. A checkpoint of another seed, data, base, batch, context or adapters
   than in rank 0's *run is refused, and then no parameter has changed. *run is that of
   llama_checkpoint_create. Returns 0; -1 on every rank: `why` has a line. Collective. */
static inline int llama_checkpoint_resume(llama_model *m, fsdp_checkpoint *ck, const char *dir,
                                          llama_run *run, char *why, size_t cap) {
    char path[LLAMA_PATH], line[LLAMA_WHY];
    llama_run saved;
    int64_t step;
    fsdp_status status = fsdp_checkpoint_find(ck, dir, -1, path, sizeof path, &step);
    if (status) return llama_result(m->world, status, why, cap);
    why[0] = line[0] = 0, run->step = 0;
    if (step < 0) return 0;
    if (fsdp_rank(m->world) == 0 && !llama_run_read(path, &saved, line, sizeof line)) {
        llama_run_check(path, &saved, run, line, sizeof line);
    }
    if (llama_agree(m->world, line, why, cap)) return -1;
    return llama_result(m->world, fsdp_checkpoint_load(ck, path, NULL), why, cap);
}

#endif // LLAMA_SAVE_H
