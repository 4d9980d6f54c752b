/* test_llama_save.c - examples/llama/llama_save.h: exports of golden models after a step, and runs
   that are saved and resumed.

   SPDX-License-Identifier: MIT */
#include "lab_llama.h"
#include "checkpoint/lab_ckmodel.h"
#include "examples/llama/llama_save.h"
#include <sys/stat.h>

enum { BATCHES = 6 };

/* ---- a training ------------------------------------------------------------------------------ */

typedef struct training {
    lab_rank *r;
    llama_model m;
    fsdp_adamw *adamw;
    fsdp_checkpoint *ck;
    llama_run run;
    int32_t *tokens, *labels, *counted, *mine; /* BATCHES of `rows` rows of T */
    int rows, T;
} training;

/* Makes a model for `rows` rows of T. */
static void load_rows(lab_rank *r, const char *dir, int rows, int T, llama_model *m) {
    llama_acts_desc desc;
    memset(&desc, 0, sizeof desc);
    desc.rows = rows, desc.context = T, desc.loss_rows = 16;
    load_model(r->w, dir, &desc, m);
}

static void begin(training *t, lab_rank *r, const char *name) {
    expected e = open_expected(name);
    fsdp_checkpoint_tensor shape, other;
    fsdp_adamw_desc adamw = fsdp_adamw_defaults();
    char dir[600];
    memset(t, 0, sizeof *t);
    t->r = r;
    t->counted = (int32_t *)get(&e, "counted", FSDP_I32, &other);
    t->labels = (int32_t *)get(&e, "labels", FSDP_I32, &other);
    t->tokens = (int32_t *)get(&e, "tokens", FSDP_I32, &shape);
    fsdp_checkpoint_close(e.files);
    t->rows = (int)shape.shape[2], t->T = (int)shape.shape[3];
    CHECK_EQ_INT(shape.shape[0] * shape.shape[1], BATCHES);
    t->mine = (int32_t *)lab_zeros((size_t)(2 * t->rows * t->T), sizeof(int32_t));
    model_dir(name, dir);
    load_rows(r, dir, t->rows, t->T, &t->m);
    adamw.beta2 = 0.95, adamw.weight_decay = 0.1;
    CALL(r->w, fsdp_adamw_create(t->m.model, &adamw, &t->adamw));
    t->run.seed = 7, t->run.data = UINT64_C(0xDA7A), t->run.base = llama_dir_hash(dir);
    t->run.batch = t->rows, t->run.context = t->T;
}
static void begin_saved(training *t, lab_rank *r, const char *name, int keep) {
    char why[LLAMA_WHY];
    begin(t, r, name);
    CHECK_MSG(!llama_checkpoint_create(&t->m, &t->run, keep, &t->ck, why, sizeof why), "%s", why);
}
static void end(training *t) {
    llama_model_destroy(&t->m);
    free(t->tokens), free(t->labels), free(t->counted), free(t->mine);
}

/* One step of AdamW on a batch; returns its loss. */
static double train(training *t) {
    const int T = t->T, at = (int)(t->run.step++ % BATCHES);
    const ptrdiff_t from = (ptrdiff_t)at * t->rows * T;
    int32_t *next = t->mine + t->rows * T;
    llama_step_result result;
    const int B = my_rows(t->r, t->tokens + from, t->labels + from, t->rows, T, t->mine, next);
    const llama_batch batch = {t->mine, next, &B, 1};
    CALL(t->r->w, llama_step(&t->m, t->adamw, &batch, 0, 1e-2, 1.0, &result));
    CHECK_EQ_INT(result.counted, t->counted[at]);
    CHECK(result.norm > 0.0);
    return result.loss;
}

/* Returns all parameters, one after another, and their number. The caller frees them. */
static float *full_params(fsdp_world *w, const llama_model *m, int64_t *num) {
    fsdp_param_view v = FSDP_ZERO;
    *num = 0;
    while (fsdp_next_param(m->model, &v)) *num += lab_numel(v.ndim, v.shape);
    float *all = (float *)lab_zeros((size_t)*num, sizeof *all), *to = all;
    memset(&v, 0, sizeof v);
    while (fsdp_next_param(m->model, &v)) {
        CALL(w, fsdp_param_full(v.unit, v.index, to));
        to += lab_numel(v.ndim, v.shape);
    }
    return all;
}

/* ---- export ---------------------------------------------------------------------------------- */

static char *slurp(const char *dir, const char *name, int64_t *nbytes) {
    char path[1400];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    char *text = ck_slurp(path, nbytes);
    CHECK_MSG(text != NULL, "%s", path);
    return text;
}

/* Compares config.json with the input's, in which the value of a key becomes `dtype`; NULL: none. */
static void check_config(const char *from, const char *out, const char *dtype) {
    int64_t n, m;
    char *old = slurp(from, "config.json", &n), *got = slurp(out, "config.json", &m);
    char *want = (char *)lab_zeros((size_t)n + 100, 1), *at = strstr(old, "dtype\": \"");
    CHECK(at != NULL);
    const int begins = (int)(at - old) + 9;
    const char *rest = strchr(old + begins, '"');
    CHECK(rest != NULL);
    if (dtype) sprintf(want, "%.*s%s%s", begins, old, dtype, rest);
    else strcpy(want, old);
    CHECK_EQ_STR(got, want);
    CHECK_EQ_INT(m, strlen(want));
    free(old), free(got), free(want);
}

/* The other files are those of the input, byte by byte, and the only other name is
   model.safetensors. */
static void check_files(const char *from, const char *out) {
    int copied = 0;
    DIR *d = opendir(from);
    CHECK(d != NULL);
    for (struct dirent *e; (e = readdir(d));) {
        int64_t n, m;
        if (e->d_name[0] == '.' || strstr(e->d_name, "safetensors")) continue;
        copied++;
        if (!strcmp(e->d_name, "config.json")) continue;
        char *a = slurp(from, e->d_name, &n), *b = slurp(out, e->d_name, &m);
        CHECK_MSG(n == m && !memcmp(a, b, (size_t)n), "%s", e->d_name);
        free(a), free(b);
    }
    closedir(d);
    CHECK_EQ_INT(ck_num_names(out), copied + 1);
}

/* The tensors are the model's, each in the dtype asked for; KEEP: that of the input. */
static void check_tensors(const llama_model *m, const char *from, const char *out,
                          fsdp_dtype dtype) {
    fsdp_checkpoint_reader *a, *b;
    fsdp_checkpoint_contents all;
    fsdp_checkpoint_tensor x, y;
    fsdp_param_view v = FSDP_ZERO;
    char why[800], name[256];
    int num = 0;
    CHECK_MSG(!fsdp_checkpoint_open(from, NULL, NULL, &a, why, sizeof why), "%s", why);
    CHECK_MSG(!fsdp_checkpoint_open(out, NULL, NULL, &b, why, sizeof why), "%s", why);
    for (; fsdp_next_param(m->model, &v); num++) {
        snprintf(name, sizeof name, "%s.%s", v.unit_name, v.name);
        CHECK_OK(fsdp_checkpoint_tensor_at(a, fsdp_checkpoint_tensor_find(a, name), &x));
        CHECK_OK(fsdp_checkpoint_tensor_at(b, fsdp_checkpoint_tensor_find(b, name), &y));
        CHECK_EQ_INT(y.dtype, dtype == FSDP_DTYPE_KEEP ? x.dtype : dtype);
    }
    CHECK_OK(fsdp_checkpoint_contents_of(b, &all));
    CHECK_EQ_INT(all.num_tensors, num); /* no lm_head.weight next to a tied embedding */
    fsdp_checkpoint_close(a), fsdp_checkpoint_close(b);
}

/* Returns the dtype of all tensors of a golden case. */
static fsdp_dtype case_dtype(const char *name) {
    return !strcmp(name, "llama3_rope_old") ? FSDP_BF16
           : !strcmp(name, "qwen2_untied")  ? FSDP_F16
                                            : FSDP_F32;
}

static void export_rank(lab_rank *r) {
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_KEEP, FSDP_F32, FSDP_BF16, FSDP_F16};
    static const char *const spelled[] = {NULL, "float32", "bfloat16", "float16"};
    const char *name = *(const char *const *)r->arg;
    char from[600], out[600], why[LLAMA_WHY];
    training t;
    int64_t num, n;
    begin(&t, r, name);
    CALL(r->w, fsdp_checkpoint_create(t.m.model, NULL, &t.ck));
    float *before = full_params(r->w, &t.m, &num);
    train(&t);
    float *after = full_params(r->w, &t.m, &num);
    CHECK(memcmp(before, after, (size_t)num * sizeof *after));
    model_dir(name, from);
    for (int i = LLAMA_DTYPE_FILE; i < LLAMA_DTYPE_FILES; i++) {
        snprintf(out, sizeof out, "%s/%s-%d-%d", h_tmpdir(), name, r->size, i);
        if (r->rank == 0) CHECK_MSG(!llama_export_check(out, why, sizeof why), "%s", why);
        CHECK_MSG(!llama_export(&t.m, t.ck, from, out, i, why, sizeof why), "%s", why);
        CHECK_EQ_STR(why, "");
        if (r->rank == 0) check_config(from, out, spelled[i]), check_files(from, out);
        if (r->rank == 0) check_tensors(&t.m, from, out, dtypes[i]);
        llama_model again;
        load_rows(r, out, 1, 2, &again);
        float *loaded = full_params(r->w, &again, &n);
        CHECK_EQ_INT(n, num);
        const fsdp_dtype dtype = i ? dtypes[i] : case_dtype(name);
        for (int64_t k = 0; k < num; k++) {
            const float want = (float)lab_round(dtype, (double)after[k]);
            CHECK_MSG(lab_bits32(want) == lab_bits32(loaded[k]), "%s %d: element %lld", name, i,
                      (long long)k);
        }
        free(loaded);
        llama_model_destroy(&again);
    }
    free(before), free(after);
    end(&t);
}
static const struct {
    const char *name;
    int size;
} sizes[] = {{"1", 1}, {"2", 2}, {"3", 3}};
TEST_P(llama_save, export, sizes, GLOO | SECONDS(120)) {
    golden_needs("llama");
    for (int i = 0; i < CASES; i++)
        lab_run(row->size, NULL, export_rank, (void *)(uintptr_t)&models[i]);
}

/* Tensors that the model ignores, as lm_head.weight next to a tied embedding, are left out. */
static void tied_rank(lab_rank *r) {
    char from[600], dir[600], out[600], name[700], path[1400], why[LLAMA_WHY];
    fsdp_checkpoint *ck;
    llama_model m;
    int64_t n;
    model_dir("llama_untied_bias", from);
    ck_dir(dir, "from"), ck_dir(out, "out");
    if (r->rank == 0) {
        char *text = slurp(from, "config.json", &n), *at;
        CHECK(!mkdir(dir, 0700) && (at = strstr(text, "\"tie_word_embeddings\": false")));
        memcpy(strchr(at, ':') + 2, " true", 5);
        snprintf(path, sizeof path, "%s/config.json", dir);
        ck_spit(path, text, n);
        free(text);
        snprintf(path, sizeof path, "%s/model.safetensors", dir);
        snprintf(name, sizeof name, "%s/model.safetensors", from);
        char *weights = ck_slurp(name, &n);
        ck_spit(path, weights, n);
        free(weights);
    }
    CALL(r->w, fsdp_barrier(r->w));
    load_rows(r, dir, 1, 2, &m);
    CHECK(m.c.tied);
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
    CHECK_MSG(!llama_export(&m, ck, dir, out, LLAMA_DTYPE_FILE, why, sizeof why), "%s", why);
    if (r->rank == 0) check_tensors(&m, dir, out, FSDP_DTYPE_KEEP), check_files(dir, out);
    llama_model_destroy(&m);
}
TEST(llama_save, export_ignored) {
    golden_needs("llama");
    lab_run(2, NULL, tied_rank, NULL);
}

/* config.json: which values are replaced. */
static const struct {
    const char *name, *text, *want;
} configs[] = {
    {"dtype", "{\"dtype\": \"float32\"}", "{\"dtype\": \"bfloat16\"}"},
    {"torch_dtype", "{ \"torch_dtype\":\"float16\", \"a\": 1}\n",
     "{ \"torch_dtype\":\"bfloat16\", \"a\": 1}\n"},
    {"both", "{\"dtype\": null,\"a\":[ ],\"torch_dtype\": \"float32\"} \n\n",
     "{\"dtype\": \"bfloat16\",\"a\":[ ],\"torch_dtype\": \"bfloat16\"} \n\n"},
    {"nested", "{\"a\": {\"dtype\": \"float32\"}, \"d\": \"dtype\"}",
     "{\"a\": {\"dtype\": \"float32\"}, \"d\": \"dtype\"}"},
    {"escaped", "{\"\\u0064type\": \"float32\"}", "{\"\\u0064type\": \"bfloat16\"}"},
    {"similar", "{\"dtypes\": 1, \"dtyp\": 2}", "{\"dtypes\": 1, \"dtyp\": 2}"},
    {"shortest", "{\"dtype\":0,\"dtype\":0}", "{\"dtype\":\"bfloat16\",\"dtype\":\"bfloat16\"}"},
    {"empty", "{}", "{}"}};
TEST_P(llama_save, config, configs, 0) {
    char path[700], why[LLAMA_WHY];
    fsdp_checkpoint_text t = FSDP_ZERO;
    snprintf(path, sizeof path, "%s/config.json", h_tmpdir());
    ck_spit(path, row->text, (int64_t)strlen(row->text));
    CHECK_MSG(!llama_config_text(h_tmpdir(), "bfloat16", &t, why, sizeof why), "%s", why);
    CHECK_EQ_INT(t.nbytes, strlen(row->want));
    CHECK(!memcmp(t.data, row->want, strlen(row->want)));
    free((void *)(uintptr_t)t.data);
}

/* ---- exports that cannot be ------------------------------------------------------------------ */

static void check_out(const char *out, const char *line) {
    char why[LLAMA_WHY];
    CHECK_EQ_INT(llama_export_check(out, why, sizeof why), *line ? -1 : 0);
    CHECK_EQ_STR(why, line);
}
TEST(llama_save, export_check) {
    const char *d = h_tmpdir();
    char out[6000], line[8000];
    snprintf(out, sizeof out, "%s/file", d);
    ck_spit(out, "x", 1);
    snprintf(line, sizeof line, "%s: expected a new name, got one that exists", out);
    check_out(out, line);
    snprintf(out, sizeof out, "%s/file/out", d);
    snprintf(line, sizeof line,
             "%s: expected its parent %s/file to be a directory: Not a directory", out, d);
    check_out(out, line);
    snprintf(out, sizeof out, "%s/none/out", d);
    snprintf(line, sizeof line,
             "%s: expected its parent %s/none to be a directory: No such file or directory", out,
             d);
    check_out(out, line);
    snprintf(out, sizeof out, "%s/link", d); /* points at nothing */
    CHECK(!symlink("nothing", out));
    snprintf(line, sizeof line, "%s: expected a new name, got one that exists", out);
    check_out(out, line);
    snprintf(out, sizeof out, "%s/dir//", d);
    check_out(out, "");
    CHECK(!mkdir(out, 0700));
    snprintf(line, sizeof line, "%s: expected a new name, got one that exists", out);
    check_out(out, line);
    snprintf(out, sizeof out, "%s/dir/new", d);
    check_out(out, "");
    check_out("no_such_name", "");
    check_out("/", "/: expected a new name, got one that exists");
    check_out(".", ".: expected a new name, got one that exists");
    check_out("", "expected a path of 1 to 4031 bytes, got 0");
    memset(out, 'x', 4032), out[4032] = 0;
    check_out(out, "expected a path of 1 to 4031 bytes, got 4032");
}

/* Each rank has the line, and the next export works. */
static void export_refused(lab_rank *r) {
    char from[600], dir[600], out[600], path[700], why[LLAMA_WHY], line[LLAMA_WHY];
    training t;
    begin(&t, r, "llama_tied");
    CALL(r->w, fsdp_checkpoint_create(t.m.model, NULL, &t.ck));
    model_dir("llama_tied", from);
    ck_dir(dir, "from"), ck_dir(out, "out");
    if (r->rank == 0) CHECK(!mkdir(dir, 0700));
    CHECK_EQ_INT(llama_export(&t.m, t.ck, dir, out, LLAMA_DTYPE_F16, why, sizeof why), -1);
    snprintf(line, sizeof line, "%s/config.json: cannot be opened: No such file or directory", dir);
    CHECK_EQ_STR(why, line);
    snprintf(path, sizeof path, "%s/config.json", dir);
    if (r->rank == 0) ck_spit(path, "[]", 2);
    CHECK_EQ_INT(llama_export(&t.m, t.ck, dir, out, LLAMA_DTYPE_F16, why, sizeof why), -1);
    snprintf(line, sizeof line, "%s/config.json: expected a JSON object", dir);
    CHECK_EQ_STR(why, line);
    CHECK(!ck_exists(out));
    CHECK_MSG(!llama_export(&t.m, t.ck, from, out, LLAMA_DTYPE_F16, why, sizeof why), "%s", why);
    CHECK_EQ_INT(llama_export(&t.m, t.ck, from, out, LLAMA_DTYPE_F16, why, sizeof why), -1);
    CHECK_MSG(strstr(why, out) && strstr(why, "is there already"), "%s", why);
    end(&t);
}
TEST(llama_save, export_refused) {
    golden_needs("llama");
    lab_run(2, NULL, export_refused, NULL);
}

/* The disk is full at one write after another. */
static int full_at(ck_files *f, const char *call, const char *path) {
    (void)path;
    return !strcmp(call, "write") && (*(int *)f->user)-- == 0 ? ENOSPC : 0;
}
static void full_disk(lab_rank *r) {
    fsdp_checkpoint_desc desc = FSDP_ZERO;
    ck_files files;
    char from[600], out[600], why[LLAMA_WHY];
    int left = 0, failures = 0, result = -1;
    training t;
    begin(&t, r, "llama_tied");
    memset(&files, 0, sizeof files);
    files.before = full_at, files.user = &left;
    desc.files = &ck_file_ops, desc.files_user = &files;
    CALL(r->w, fsdp_checkpoint_create(t.m.model, &desc, &t.ck));
    model_dir("llama_tied", from), ck_dir(out, "out");
    for (; result; failures++) {
        left = r->rank ? -1 : failures;
        result = llama_export(&t.m, t.ck, from, out, LLAMA_DTYPE_BF16, why, sizeof why);
        CALL(r->w, fsdp_barrier(r->w));
        CHECK_EQ_INT(ck_num_names(h_tmpdir()), !result);
        if (result) CHECK_MSG(strstr(why, "No space left") && strstr(why, "rank 0"), "%s", why);
        CALL(r->w, fsdp_barrier(r->w));
    }
    CHECK_EQ_INT(failures, 7); /* header, data, config.json, three other files; none */
    if (r->rank == 0) check_config(from, out, "bfloat16"), check_files(from, out);
    end(&t);
}
TEST(llama_save, full_disk) {
    golden_needs("llama");
    lab_run(2, NULL, full_disk, NULL);
}

/* ---- resume ---------------------------------------------------------------------------------- */

enum { STEPS = 4, HALF = 2, MOST_PARAMS = 1 << 17 };
typedef struct results {
    const char *name, *dir; /* of the model; of checkpoints */
    int first, last;        /* steps */
    double loss[STEPS];
    int64_t num;
    float params[MOST_PARAMS];
} results;

static void resume_rank(lab_rank *r) {
    results *to = (results *)r->arg;
    char why[LLAMA_WHY];
    training t;
    int64_t num;
    begin_saved(&t, r, to->name, 0);
    if (to->dir) {
        t.run.step = 99;
        CHECK_MSG(!llama_checkpoint_resume(&t.m, t.ck, to->dir, &t.run, why, sizeof why), "%s",
                  why);
        CHECK_EQ_INT(t.run.step, to->first);
    }
    for (int s = to->first; s < to->last; s++) {
        const double loss = train(&t);
        if (r->rank == 0) to->loss[s] = loss;
    }
    if (to->last < STEPS)
        CHECK_MSG(!llama_checkpoint_save(&t.m, t.ck, to->dir, &t.run, why, sizeof why), "%s", why);
    float *all = full_params(r->w, &t.m, &num);
    CHECK(num <= MOST_PARAMS);
    if (r->rank == 0) memcpy(to->params, all, (size_t)num * sizeof *all), to->num = num;
    free(all);
    end(&t);
}
static results *train_on(int size, const char *name, const char *dir, int first, int last) {
    results *to = (results *)lab_shared(sizeof *to);
    to->name = name, to->dir = dir, to->first = first, to->last = last;
    lab_run(size, NULL, resume_rank, to);
    return to;
}

TEST(llama_save, resume, GLOO | SECONDS(60)) {
    static const char *const names[] = {"llama_tied", "qwen2_untied"};
    golden_needs("llama");
    for (int i = 0; i < 2; i++) {
        char dir[512];
        double mean = 0.0, worst = 0.0;
        ck_dir(dir, names[i]);
        const results *whole = train_on(2, names[i], NULL, 0, STEPS);
        const results *half = train_on(2, names[i], dir, 0, HALF);
        const results *same = train_on(2, names[i], dir, HALF, STEPS);
        const results *other = train_on(3, names[i], dir, HALF, STEPS);
        CHECK(!memcmp(half->loss, whole->loss, HALF * sizeof(double)));
        CHECK(!memcmp(same->loss + HALF, whole->loss + HALF, (STEPS - HALF) * sizeof(double)));
        CHECK(same->num == whole->num && other->num == whole->num);
        CHECK(!memcmp(same->params, whole->params, (size_t)whole->num * sizeof(float)));
        for (int s = HALF; s < STEPS; s++) CHECK_NEAR(other->loss[s] / whole->loss[s], 1.0, 1e-5);
        for (int64_t k = 0; k < whole->num; k++) {
            const double d = fabs((double)other->params[k] - (double)whole->params[k]);
            mean += d / (double)whole->num;
            if (!(d <= worst)) worst = d;
        }
        CHECK_MSG(mean <= 5e-6 && worst <= 3e-3, "mean %.2g, worst %.2g", mean, worst);
        h_message("%s on 3 ranks: mean difference %.2g, worst %.2g", names[i], mean, worst);
    }
}

/* A run of other numbers is refused by a whole line, and its parameters stay. */
static const struct {
    const char *name, *line; /* after the path; with %s: the hash of the model's directory */
} others[] = {
    {"seed", "seed: expected 7, got 8"},
    {"data", "data: hash of the tokens: expected 000000000000da7a, got 000000000000da7b"},
    {"base", "model: hash of names and sizes of the files: expected %s, got 0000000000000001"},
    {"batch", "batch: expected 3, got 4"},
    {"context", "context: expected 24, got 25"},
    {"program", "expected a checkpoint of this program, got another one"},
    {"size", "expected a checkpoint of this program, got another one"}};
typedef struct refusal {
    const char *name, *line;
} refusal;
static void resume_refused(lab_rank *r) {
    const refusal *row = (const refusal *)r->arg;
    fsdp_checkpoint_desc desc = FSDP_ZERO;
    fsdp_checkpoint_blob blob = FSDP_ZERO;
    char dir[512], why[LLAMA_WHY], line[LLAMA_WHY], base[20];
    int64_t num;
    training t;
    ck_dir(dir, "run");
    begin(&t, r, "llama_tied");
    blob.name = "llama", blob.data = &t.run, blob.nbytes = (int64_t)sizeof t.run;
    if (!strcmp(row->name, "program")) blob.name = "progress";
    if (!strcmp(row->name, "size")) blob.nbytes -= 8;
    desc.blobs = &blob, desc.num_blobs = 1;
    CALL(r->w, fsdp_checkpoint_create(t.m.model, &desc, &t.ck));
    train(&t);
    CHECK_MSG(!llama_checkpoint_save(&t.m, t.ck, dir, &t.run, why, sizeof why), "%s", why);
    end(&t);
    begin_saved(&t, r, "llama_tied", 0);
    snprintf(base, sizeof base, "%016llx", (unsigned long long)t.run.base);
    if (!strcmp(row->name, "seed")) t.run.seed++;
    if (!strcmp(row->name, "data")) t.run.data++;
    if (!strcmp(row->name, "base")) t.run.base = 1;
    if (!strcmp(row->name, "batch")) t.run.batch++;
    if (!strcmp(row->name, "context")) t.run.context++;
    float *before = full_params(r->w, &t.m, &num);
    CHECK_EQ_INT(llama_checkpoint_resume(&t.m, t.ck, dir, &t.run, why, sizeof why), -1);
    int n = snprintf(line, sizeof line, "%s: ", ck_step_path(dir, 1));
    const char *hash = strstr(row->line, "%s");
    if (hash)
        snprintf(line + n, sizeof line - (size_t)n, "%.*s%s%s", (int)(hash - row->line), row->line,
                 base, hash + 2);
    else strcpy(line + n, row->line);
    CHECK_EQ_STR(why, line);
    CHECK_EQ_INT(t.run.step, 0);
    /* before ranks start, too; a file with a higher number is no checkpoint */
    char broken[FSDP_CHECKPOINT_PATH + 20];
    snprintf(broken, sizeof broken, "%s", ck_step_path(dir, 7));
    if (r->rank == 0) ck_spit(broken, "x", 1);
    CALL(r->w, fsdp_barrier(r->w));
    CHECK_EQ_INT(llama_save_check(dir, &t.run, 1, why, sizeof why), -1);
    CHECK_EQ_STR(why, line);
    const int is_ours = strcmp(row->name, "program") && strcmp(row->name, "size");
    CHECK_EQ_INT(llama_save_check(dir, &t.run, 0, why, sizeof why), -1);
    if (!is_ours) CHECK_EQ_STR(why, line);
    else CHECK_MSG(strstr(why, "/step-00000001: expected no checkpoint: add --resume"), "%s", why);
    ck_dir(broken, "new");
    CHECK_MSG(!llama_save_check(broken, &t.run, 1, why, sizeof why), "%s", why);
    float *after = full_params(r->w, &t.m, &num);
    CHECK(!memcmp(before, after, (size_t)num * sizeof *after));
    CALL(r->w, fsdp_barrier(r->w)); /* the world goes on */
    free(before), free(after);
    end(&t);
}
TEST_P(llama_save, resume_refused, others, 0) {
    refusal what = {row->name, row->line};
    golden_needs("llama");
    lab_run(2, NULL, resume_refused, &what);
}

/* An unfinished checkpoint is passed over, and the newest ones are kept. */
static void unfinished_rank(lab_rank *r) {
    char dir[512], none[512], path[FSDP_CHECKPOINT_PATH + 20], why[LLAMA_WHY];
    training t;
    ck_dir(dir, "run"), ck_dir(none, "none/run");
    begin_saved(&t, r, "llama_tied", 2);
    CHECK_MSG(!llama_checkpoint_resume(&t.m, t.ck, dir, &t.run, why, sizeof why), "%s", why);
    CHECK_EQ_INT(t.run.step, 0);
    CHECK(!ck_exists(dir));
    CHECK_EQ_INT(llama_checkpoint_resume(&t.m, t.ck, none, &t.run, why, sizeof why), -1);
    CHECK_MSG(strstr(why, none), "%s", why);
    CHECK_EQ_INT(llama_checkpoint_save(&t.m, t.ck, none, &t.run, why, sizeof why), -1);
    CHECK_MSG(strstr(why, none), "%s", why);
    for (int s = 1; s <= 4; s++) {
        train(&t);
        CHECK_MSG(!llama_checkpoint_save(&t.m, t.ck, dir, &t.run, why, sizeof why), "%s", why);
        CALL(r->w, fsdp_barrier(r->w));
        for (int k = 1; k <= 4; k++)
            CHECK_EQ_INT(ck_exists(ck_step_path(dir, k)), k <= s && k > s - 2);
        CALL(r->w, fsdp_barrier(r->w));
    }
    snprintf(path, sizeof path, "%s/manifest.json", ck_step_path(dir, 4));
    if (r->rank == 0) CHECK(!unlink(path));
    CALL(r->w, fsdp_barrier(r->w));
    CHECK_MSG(!llama_checkpoint_resume(&t.m, t.ck, dir, &t.run, why, sizeof why), "%s", why);
    CHECK_EQ_INT(t.run.step, 3);
    end(&t);
}
TEST(llama_save, unfinished_and_keep) {
    golden_needs("llama");
    lab_run(2, NULL, unfinished_rank, NULL);
}

/* ---- the hash of a directory ----------------------------------------------------------------- */

static void put(const char *dir, const char *name, const char *text) {
    char path[700];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    ck_spit(path, text, (int64_t)strlen(text));
}
TEST(llama_save, dir_hash) {
    char a[512], b[512], sub[600];
    ck_dir(a, "a"), ck_dir(b, "b");
    CHECK(!mkdir(a, 0700) && !mkdir(b, 0700));
    const uint64_t empty = llama_dir_hash(a);
    put(a, "config.json", "{}"), put(a, "model.safetensors", "12345");
    put(b, "model.safetensors", "54321"), put(b, "config.json", "[]");
    const uint64_t h = llama_dir_hash(a);
    CHECK(h != empty && h == llama_dir_hash(b)); /* names and sizes, in any order */
    snprintf(sub, sizeof sub, "%s/sub", b);
    CHECK(!mkdir(sub, 0700));
    put(b, ".hidden", "x");
    CHECK(h == llama_dir_hash(b));
    put(b, "config.json", "[ ]");
    CHECK(h != llama_dir_hash(b)); /* another size */
    put(b, "config.json", "[]"), put(b, "more", "");
    const uint64_t more = llama_dir_hash(b);
    CHECK(h != more); /* another file */
    snprintf(sub, sizeof sub, "%s/more", b);
    CHECK(!unlink(sub));
    put(b, "mora", "");
    CHECK(more != llama_dir_hash(b)); /* another name */
    put(a, "config.json", "12345"), put(a, "model.safetensors", "[]");
    CHECK(h != llama_dir_hash(a)); /* the sizes are those of the other names */
}
