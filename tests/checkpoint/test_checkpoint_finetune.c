/* test_checkpoint_finetune.c - checkpoints of base models: adapters next to a strict base, tied
   weights, tensors that `partial` leaves out, rows of sources, and which rank writes small tensors.

   SPDX-License-Identifier: MIT */
#include "lab_ckmodel.h"

typedef struct rank_count {
    const char *name;
    int ranks;
} rank_count;
static const rank_count ranks_1_to_3[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}};

static fsdp_unit *named_unit(fsdp_world *w, fsdp_model *m, const char *name,
                             const fsdp_param_desc *params, int count) {
    fsdp_unit_desc like = FSDP_ZERO;
    like.name = name;
    return lab_unit(w, m, &like, params, count);
}

/* Writes a file like other programs': tensors with `rows` rows and `cols` columns; element k of
   tensor n is 100 (n + 1) + k. */
static void write_file(const char *path, const char *const *names, int num, int rows, int cols) {
    fsdp_safetensors_entry e[4];
    float data[256];
    char room[4096];
    CHECK(num <= 4 && num * rows * cols <= 256);
    memset(e, 0, sizeof e);
    memset(room, 0, sizeof room);
    for (int n = 0; n < num; n++) {
        e[n].name = names[n];
        e[n].dtype = FSDP_F32, e[n].ndim = 2;
        e[n].shape[0] = rows, e[n].shape[1] = cols;
    }
    int64_t size = fsdp_safetensors_print(e, num, 0, NULL, NULL, 0, room + 8, 2000);
    CHECK(size > 0);
    memcpy(room, &size, 8);
    for (int n = 0; n < num; n++)
        for (int k = 0; k < rows * cols; k++) data[e[n].begin / 4 + k] = (float)(100 * (n + 1) + k);
    memcpy(room + 8 + size, data, (size_t)(num * rows * cols) * 4);
    ck_spit(path, room, 8 + size + (int64_t)num * rows * cols * 4);
}

/* ---- adapters -------------------------------------------------------------------------------- */

enum { LAYERS = 2, WIDTH = 4, RANK = 2 };
typedef struct lora {
    lab_rank *r;
    fsdp_model *model;
    fsdp_unit *unit[LAYERS];
    fsdp_adamw *opt;
    fsdp_checkpoint *base, *adapters;
} lora;

static void only_base(void *user, const fsdp_param_view *param, fsdp_checkpoint_place *place) {
    (void)user;
    if (param->requires_grad) *place->name = 0; /* adapters are not in the base's files */
}
static void fill_lora(void *user, const fsdp_param_view *block) {
    for (int64_t k = 0; k < block->numel; k++)
        fsdp_view_data_f32(block)[k] = *(const float *)user + (float)fsdp_view_index(block, k);
}
static void lora_open(lora *m, lab_rank *r, float begin) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    memset(m, 0, sizeof *m);
    m->r = r;
    m->model = lab_model(r->w, NULL);
    for (int l = 0; l < LAYERS; l++) {
        fsdp_param_desc p[3] = {fsdp_mat("w", WIDTH, WIDTH), fsdp_mat("down", RANK, WIDTH),
                                fsdp_mat("up", WIDTH, RANK)};
        char name[16];
        p[0].frozen = 1;
        snprintf(name, sizeof name, "h.%d", l);
        m->unit[l] = named_unit(r->w, m->model, name, p, 3);
    }
    CALL(r->w, fsdp_adamw_create(m->model, NULL, &m->opt));
    CALL(r->w, fsdp_init_params(m->model, fill_lora, &begin));
    d.place = only_base;
    CALL(r->w, fsdp_checkpoint_create(m->model, &d, &m->base));
    d = (fsdp_checkpoint_desc)FSDP_ZERO;
    d.skip_frozen = d.no_sync = 1;
    CALL(r->w, fsdp_checkpoint_create(m->model, &d, &m->adapters));
}
static void lora_step(lora *m) {
    for (int l = 0; l < LAYERS; l++) lab_forward(m->r->w, m->unit[l]);
    for (int l = LAYERS - 1; l >= 0; l--) {
        CALL(m->r->w, fsdp_pre_backward(m->unit[l]));
        for (int p = 1; p < 3; p++)
            for (int k = 0; k < WIDTH * RANK; k++) fsdp_grad_f32(m->unit[l], p)[k] = (float)(k + p);
        CALL(m->r->w, fsdp_post_backward(m->unit[l]));
    }
    CALL(m->r->w, fsdp_finalize_backward(m->model));
    CALL(m->r->w, fsdp_adamw_step(m->opt, 0.5));
    CALL(m->r->w, fsdp_zero_grad(m->model));
}
/* Reads all values, in the order of the model. */
static void lora_values(lora *m, float *out) {
    for (int l = 0; l < LAYERS; l++)
        for (int p = 0; p < 3; p++) {
            CALL(m->r->w, fsdp_param_full(m->unit[l], p, out));
            out += p ? WIDTH * RANK : WIDTH * WIDTH;
        }
}
enum { LORA_VALUES = LAYERS * (WIDTH * WIDTH + 2 * WIDTH * RANK) };

static void adapters(lab_rank *r) {
    static const char *const names[] = {"h.0.w", "h.1.w"}, *const wrong[] = {"h.0.w", "h.1.weight"};
    char base[600], bad[600], dir[512], text[256];
    float at_first[LORA_VALUES], v[LORA_VALUES], later[LORA_VALUES], again[LORA_VALUES];
    lora m;
    ck_dir(base, "base.safetensors"), ck_dir(bad, "bad.safetensors"), ck_dir(dir, "adapters");
    if (r->rank == 0) {
        write_file(base, names, 2, WIDTH, WIDTH);
        write_file(bad, wrong, 2, WIDTH, WIDTH);
    }
    CALL(r->w, fsdp_barrier(r->w));
    lora_open(&m, r, 7);
    lora_values(&m, at_first);
    REFUSED(r->w, fsdp_checkpoint_load(m.base, bad, NULL),
            "lacks 1 of 2 tensors: 'h.1.w'; it has 1 that nobody asks for: 'h.1.weight': if one of "
            "these is a wrong name, correct it; else set partial");
    lora_values(&m, v);
    CHECK_EQ_MEM(v, at_first, sizeof v);
    CALL(r->w, fsdp_checkpoint_load(m.base, base, NULL)); /* without adapters */
    lora_values(&m, v);
    for (int l = 0, at = 0; l < LAYERS; l++)
        for (int k = 0; k < WIDTH * WIDTH + 2 * WIDTH * RANK; k++, at++)
            CHECK_MSG(v[at] == (k < WIDTH * WIDTH ? (float)(100 * (l + 1) + k) : at_first[at]),
                      "layer %d, element %d: %g", l, k, (double)v[at]);
    lora_step(&m);
    CALL(r->w, fsdp_checkpoint_save(m.adapters, dir, 1));
    if (r->rank == 0) { /* adapters and their states only */
        fsdp_checkpoint_reader *reader;
        fsdp_checkpoint_contents c;
        fsdp_checkpoint_tensor t;
        CHECK_OK(fsdp_checkpoint_open(ck_step_path(dir, 1), NULL, NULL, &reader, text, 256));
        CHECK_OK(fsdp_checkpoint_contents_of(reader, &c));
        CHECK_EQ_INT(c.num_tensors, LAYERS * 2 * 4); /* two moments and a step for each */
        for (int i = 0; i < c.num_tensors; i++) {
            CHECK_OK(fsdp_checkpoint_tensor_at(reader, i, &t));
            CHECK_MSG(strstr(t.name, ".up") || strstr(t.name, ".down"), "%s", t.name);
        }
        fsdp_checkpoint_close(reader);
    }
    CALL(r->w, fsdp_barrier(r->w));
    lora_values(&m, v);
    lora_step(&m);
    lora_values(&m, later);
    fsdp_model_destroy(m.model);
    lora_open(&m, r, -3);
    CALL(r->w, fsdp_checkpoint_load(m.base, base, NULL));
    CALL(r->w, fsdp_checkpoint_load(m.adapters, ck_step_path(dir, 1), NULL));
    lora_values(&m, again);
    CHECK_EQ_MEM(again, v, sizeof v);
    lora_step(&m); /* uses the optimizer's states */
    lora_values(&m, again);
    CHECK_EQ_MEM(again, later, sizeof later);
    REFUSED(r->w, fsdp_checkpoint_load(m.adapters, base, NULL), "'h.0.down'");
}
TEST_P(checkpoint, adapters, ranks_1_to_3) { lab_run(row->ranks, NULL, adapters, NULL); }

/* Tensors that `partial` leaves out are logged once, by one rank, with their names. */
static int lines_of_partial;
static void count_partial(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)user;
    if (strstr(text, "[E483] checkpoint_load: ") &&
        strstr(text, "lacks 5 of 6 tensors, and partial leaves what they are for as it was: "
                     "'h.0.down', 'h.0.up', 'h.1.w', ...; nobody asks for: "
                     "'h.1.weight'"))
        __atomic_add_fetch(&lines_of_partial, 1, __ATOMIC_SEQ_CST);
}
static int lacks_one(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    (void)user;
    snprintf(out->name, sizeof out->name, "%s.w", fsdp_unit_name(v->unit));
    return 1;
}
static void partial(lab_rank *r) {
    static const char *const wrong[] = {"h.0.w", "h.1.weight"};
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    fsdp_checkpoint *all;
    char bad[600];
    lora m;
    ck_dir(bad, "bad.safetensors");
    if (r->rank == 0) write_file(bad, wrong, 2, WIDTH, WIDTH);
    CALL(r->w, fsdp_barrier(r->w));
    lora_open(&m, r, 7);
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &all));
    ld.partial = ld.params_only = 1;
    CALL(r->w, fsdp_checkpoint_load(all, bad, &ld));
    CALL(r->w, fsdp_barrier(r->w));
    CHECK_EQ_INT(__atomic_load_n(&lines_of_partial, __ATOMIC_SEQ_CST), 1);
    CALL(r->w, fsdp_barrier(r->w));
    CALL(r->w, fsdp_checkpoint_load(m.base, bad, &ld)); /* another text: h.1.w only */
    if (r->rank == 0) CHECK(strstr(fsdp_last_error(r->w), "lacks 1 of 2 tensors"));
    ld.source = lacks_one; /* with sources, other names in the file are no mistake */
    CALL(r->w, fsdp_checkpoint_load(m.base, bad, &ld));
    if (r->rank == 0)
        CHECK_MSG(strstr(fsdp_last_error(r->w), "lacks 1 of 2 tensors") &&
                      !strstr(fsdp_last_error(r->w), "nobody asks for"),
                  "%s", fsdp_last_error(r->w));
}
TEST_P(checkpoint, partial_is_logged_once, ranks_1_to_3) {
    w_log = count_partial;
    lab_run(row->ranks, NULL, partial, NULL);
    w_log = w_quiet;
}

/* ---- tied weights ---------------------------------------------------------------------------- */

enum { VOCAB = 6, DIM = 4, TIED_STEPS = 3 };
/* Adds the gradient of one token to d: loss = |W W[token] - onehot|^2 / 2. */
static void tied_gradient(const double *w, int token, double *d) {
    double x[DIM], y[VOCAB];
    for (int j = 0; j < DIM; j++) x[j] = w[token * DIM + j];
    for (int o = 0; o < VOCAB; o++) {
        y[o] = -(o == (token + 1) % VOCAB);
        for (int j = 0; j < DIM; j++) y[o] += w[o * DIM + j] * x[j];
    }
    for (int o = 0; o < VOCAB; o++)
        for (int j = 0; j < DIM; j++) {
            d[o * DIM + j] += y[o] * x[j];               /* as the head */
            d[token * DIM + j] += w[o * DIM + j] * y[o]; /* as the embedding */
        }
}
static void tied_step(lab_rank *r, fsdp_unit *u, int step) {
    const int token = (2 * r->rank + step) % VOCAB;
    float x[DIM], y[VOCAB], dx[DIM] = {0};
    CALL(r->w, fsdp_pre_forward(u)); /* the embedding */
    memcpy(x, fsdp_data_f32(u, 0) + token * DIM, sizeof x);
    CALL(r->w, fsdp_post_forward(u));
    CALL(r->w, fsdp_pre_forward(u)); /* the head */
    for (int o = 0; o < VOCAB; o++) {
        y[o] = -(float)(o == (token + 1) % VOCAB);
        for (int j = 0; j < DIM; j++) y[o] += fsdp_data_f32(u, 0)[o * DIM + j] * x[j];
    }
    CALL(r->w, fsdp_post_forward(u));
    CALL(r->w, fsdp_pre_backward(u));
    for (int o = 0; o < VOCAB; o++)
        for (int j = 0; j < DIM; j++) {
            fsdp_grad_f32(u, 0)[o * DIM + j] += y[o] * x[j];
            dx[j] += fsdp_data_f32(u, 0)[o * DIM + j] * y[o];
        }
    CALL(r->w, fsdp_post_backward(u));
    CALL(r->w, fsdp_pre_backward(u));
    for (int j = 0; j < DIM; j++) fsdp_grad_f32(u, 0)[token * DIM + j] += dx[j];
    CALL(r->w, fsdp_post_backward(u));
}
static void tied(lab_rank *r) {
    static const char *const names[] = {"wte.weight"};
    fsdp_param_desc p = fsdp_mat("weight", VOCAB, DIM), two[1] = {p};
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    double w[VOCAB * DIM], d[VOCAB * DIM];
    float got[VOCAB * DIM], scaled[VOCAB * DIM], file[VOCAB * DIM];
    char path[600], dir[512], out[512], text[512];
    fsdp_checkpoint *ck, *untied;
    fsdp_sgd *opt;
    ck_dir(path, "tied.safetensors"), ck_dir(dir, "run"), ck_dir(out, "exported");
    if (r->rank == 0) write_file(path, names, 1, VOCAB, DIM);
    CALL(r->w, fsdp_barrier(r->w));
    fsdp_model *wrong = lab_model(r->w, NULL); /* two parameters: refused, with advice */
    named_unit(r->w, wrong, "wte", &p, 1);
    named_unit(r->w, wrong, "lm_head", two, 1);
    CALL(r->w, fsdp_checkpoint_create(wrong, NULL, &untied));
    REFUSED(r->w, fsdp_checkpoint_load(untied, path, NULL), "[E440]");
    CHECK_MSG(strstr(fsdp_last_error(r->w),
                     "if 'lm_head.weight' is tied to 'wte.weight', declare one "
                     "parameter, and open its unit for both uses "
                     "(docs/checkpoints.md, Tied weights)"),
              "%s", fsdp_last_error(r->w));
    for (int dim = 0; dim < 2; dim++) { /* with another shape it is not tied */
        two[0] = fsdp_mat("weight", VOCAB + !dim, DIM + dim);
        wrong = lab_model(r->w, NULL);
        named_unit(r->w, wrong, "wte", &p, 1);
        named_unit(r->w, wrong, "lm_head", two, 1);
        CALL(r->w, fsdp_checkpoint_create(wrong, NULL, &untied));
        REFUSED(r->w, fsdp_checkpoint_load(untied, path, NULL), "[E440]");
        CHECK_MSG(!strstr(fsdp_last_error(r->w), "is tied to"), "%s", fsdp_last_error(r->w));
    }
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = named_unit(r->w, m, "wte", &p, 1);
    CALL(r->w, fsdp_sgd_create(m, NULL, &opt));
    CALL(r->w, fsdp_checkpoint_create(m, NULL, &ck));
    ld.params_only = 1;
    CALL(r->w, fsdp_checkpoint_load(ck, path, &ld));
    CALL(r->w, fsdp_param_full(u, 0, got));
    for (int k = 0; k < VOCAB * DIM; k++) CHECK(got[k] == (float)(100 + k));
    for (int k = 0; k < VOCAB * DIM; k++) scaled[k] = (got[k] - 111) / 30, w[k] = (double)scaled[k];
    CALL(r->w, fsdp_param_load(u, 0, scaled));
    for (int step = 0; step < TIED_STEPS; step++) {
        memset(d, 0, sizeof d);
        for (int k = 0; k < r->size; k++) tied_gradient(w, (2 * k + step) % VOCAB, d);
        for (int k = 0; k < VOCAB * DIM; k++) w[k] -= 0.1 * d[k] / r->size;
        tied_step(r, u, step);
        CALL(r->w, fsdp_finalize_backward(m));
        CALL(r->w, fsdp_sgd_step(opt, 0.1));
        CALL(r->w, fsdp_zero_grad(m));
        CALL(r->w, fsdp_param_full(u, 0, got));
        for (int k = 0; k < VOCAB * DIM; k++)
            W_CHECK((double)got[k] - w[k] < 1e-5 && w[k] - (double)got[k] < 1e-5,
                    "step %d, element %d: %g, expected %g", step, k, (double)got[k], w[k]);
    }
    CALL(r->w, fsdp_checkpoint_save(ck, dir, 1));
    if (r->rank == 0) { /* saved and exported as one tensor */
        fsdp_checkpoint_reader *reader;
        fsdp_checkpoint_contents c;
        fsdp_checkpoint_tensor t;
        CHECK_OK(fsdp_checkpoint_export(ck_step_path(dir, 1), out, NULL, text, sizeof text));
        CHECK_OK(fsdp_checkpoint_open(out, NULL, NULL, &reader, text, sizeof text));
        CHECK_OK(fsdp_checkpoint_contents_of(reader, &c));
        CHECK_EQ_INT(c.num_tensors, 1);
        CHECK_OK(fsdp_checkpoint_tensor_at(reader, 0, &t));
        CHECK_EQ_STR(t.name, "wte.weight");
        CHECK_OK(fsdp_checkpoint_read(reader, 0, NULL, NULL, FSDP_DTYPE_KEEP, file, text, 512));
        CHECK_EQ_MEM(file, got, sizeof file);
        fsdp_checkpoint_close(reader);
    }
    CALL(r->w, fsdp_barrier(r->w));
}
TEST_P(checkpoint, tied_weights, ranks_1_to_3) { lab_run(row->ranks, NULL, tied, NULL); }

/* ---- to the layout of others ----------------------------------------------------------------- */

/* A model of GPT-2's kind, with fewer heads for k and v, and a gate and its values in one. Its
   dims are such that no number of ranks from 2 to 4 divides them all. */
enum { IN = 6, KV = 4, FF = 5, WORDS = 7 };
static const struct {
    const char *name;
    int ndim;
    int64_t shape[2];
} theirs[] = {{"transformer.wte.weight", 2, {WORDS, IN}},
              {"transformer.h.0.attn.c_attn.weight", 2, {IN, IN + 2 * KV}},
              {"transformer.h.0.attn.c_attn.bias", 1, {IN + 2 * KV, 0}},
              {"transformer.h.0.mlp.c_fc.weight", 2, {IN, 9}},
              {"transformer.h.0.mlp.gate.weight", 2, {FF, IN}},
              {"transformer.h.0.mlp.up.weight", 2, {FF - 1, IN}},
              {"transformer.ln_f.weight", 1, {IN, 0}},
              {"lm_head.weight", 2, {WORDS, IN}}}; /* a copy of the first */
static const struct {
    const char *ours, *theirs[2];
    int transpose;
    int64_t first, rows;
} gpt_map[] = {{"h.0.q", {"attn.c_attn.weight", NULL}, 1, 0, IN},
               {"h.0.k", {"attn.c_attn.weight", NULL}, 1, IN, KV},
               {"h.0.v", {"attn.c_attn.weight", NULL}, 1, IN + KV, 0},
               {"h.0.qb", {"attn.c_attn.bias", NULL}, 0, 0, IN},
               {"h.0.kvb", {"attn.c_attn.bias", NULL}, 0, IN, 2 * KV},
               {"h.0.fc", {"mlp.c_fc.weight", NULL}, 1, 0, 0},
               {"h.0.gate_up", {"mlp.gate.weight", "mlp.up.weight"}, 0, 0, 0}};
/* Serves a load and its export: it uses only what both give. */
static int gpt_source(void *user, const fsdp_param_view *param, fsdp_checkpoint_source *out) {
    char name[FSDP_CHECKPOINT_NAME];
    int num = 0;
    (void)user;
    memcpy(name, out[0].name, sizeof name);
    for (size_t i = 0; i < sizeof gpt_map / sizeof *gpt_map; i++)
        for (; strcmp(gpt_map[i].ours, name) == 0 && num < 2 && gpt_map[i].theirs[num]; num++) {
            CHECK_EQ_INT(param->ndim, strstr(name, "b") ? 1 : 2);
            snprintf(out[num].name, sizeof out->name, "transformer.h.0.%s", gpt_map[i].theirs[num]);
            out[num].transpose = gpt_map[i].transpose;
            out[num].first = gpt_map[i].first, out[num].rows = gpt_map[i].rows;
        }
    if (!num) snprintf(out[0].name, sizeof out->name, "transformer.%.400s", name);
    return num ? num : 1;
}
/* Element k of a tensor. Two names have equal elements: they are tied. */
static float their_element(const char *name, int64_t k) {
    uint64_t seed = 7;
    if (strstr(name, "lm_head")) name = "transformer.wte.weight";
    for (const char *c = name; *c; c++) seed = seed * 31 + (uint64_t)*c;
    return (float)((seed + (uint64_t)k * 7919) % 100003) / 1024;
}
/* Writes the directory as other programs do: one canonical file, and a configuration. */
static void write_theirs(const char *raw, const char *dir, fsdp_dtype dtype) {
    enum { TENSORS = sizeof theirs / sizeof *theirs };
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    fsdp_safetensors_entry e[TENSORS];
    float data[400];
    char room[8192], path[700], text[512];
    memset(e, 0, sizeof e);
    memset(room, 0, sizeof room);
    for (int n = 0; n < TENSORS; n++) {
        e[n].name = theirs[n].name, e[n].dtype = FSDP_F32, e[n].ndim = theirs[n].ndim;
        memcpy(e[n].shape, theirs[n].shape, sizeof theirs[n].shape);
    }
    int64_t size = fsdp_safetensors_print(e, TENSORS, 0, NULL, NULL, 0, room + 8, 4000);
    CHECK(size > 0 && e[TENSORS - 1].end <= (int64_t)sizeof data);
    memcpy(room, &size, 8);
    for (int n = 0; n < TENSORS; n++)
        for (int64_t k = 0; k < (e[n].end - e[n].begin) / 4; k++)
            data[e[n].begin / 4 + k] = their_element(e[n].name, k);
    memcpy(room + 8 + size, data, (size_t)e[TENSORS - 1].end);
    ck_spit(raw, room, 8 + size + e[TENSORS - 1].end);
    d.dtype = dtype;
    CHECK_OK(fsdp_checkpoint_export(raw, dir, &d, text, sizeof text));
    snprintf(path, sizeof path, "%s/config.json", dir);
    ck_spit(path, "{}", 2);
}
static void same_contents(const char *a, const char *b, const char *leaf) {
    char path[700];
    int64_t n, k;
    snprintf(path, sizeof path, "%s/%s", a, leaf);
    char *x = ck_slurp(path, &n);
    snprintf(path, sizeof path, "%s/%s", b, leaf);
    char *y = ck_slurp(path, &k);
    CHECK_MSG(x && y && n == k && memcmp(x, y, (size_t)n) == 0, "%s differs", leaf);
    free(x);
    free(y);
}
typedef struct layout_row {
    const char *name;
    int ranks;
    fsdp_dtype dtype; /* of the directory */
} layout_row;
static const layout_row layout_rows[] = {{"W=1", 1, FSDP_F32},
                                         {"W=2", 2, FSDP_F32},
                                         {"W=3", 3, FSDP_F32},
                                         {"W=4", 4, FSDP_F32},
                                         {"bf16", 3, FSDP_BF16}};
static void to_their_layout(lab_rank *r) {
    const layout_row *row = (const layout_row *)r->arg;
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    char raw[512], dir[512], run[512], out[512], text[1024];
    fsdp_param_desc h[] = {fsdp_mat("q", IN, IN),
                           fsdp_mat("k", KV, IN),
                           fsdp_mat("v", KV, IN),
                           fsdp_vec("qb", IN),
                           fsdp_vec("kvb", 2 * KV),
                           fsdp_mat("fc", 9, IN),
                           fsdp_mat("gate_up", 2 * FF - 1, IN)};
    fsdp_param_desc wte = fsdp_mat("weight", WORDS, IN), ln = fsdp_vec("weight", IN);
    fsdp_checkpoint *ck;
    ck_dir(raw, "raw.safetensors"), ck_dir(dir, "theirs"), ck_dir(run, "run"), ck_dir(out, "out");
    if (r->rank == 0) write_theirs(raw, dir, row->dtype);
    CALL(r->w, fsdp_barrier(r->w));
    fsdp_model *m = lab_model(r->w, NULL);
    named_unit(r->w, m, "wte", &wte, 1);
    fsdp_unit *u = named_unit(r->w, m, "h.0", h, 7);
    named_unit(r->w, m, "ln_f", &ln, 1);
    CALL(r->w, fsdp_checkpoint_create(m, NULL, &ck));
    ld.source = gpt_source, ld.convert = 1;
    CALL(r->w, fsdp_checkpoint_load(ck, dir, &ld));
    CALL(r->w, fsdp_checkpoint_save(ck, run, 1));
    if (r->rank == 0) {
        d.source = gpt_source, d.like = dir;
        CHECK_OK(fsdp_checkpoint_export(ck_step_path(run, 1), out, &d, text, sizeof text));
        CHECK((row->dtype != FSDP_F32) == (strstr(text, "[E493]") != NULL));
        if (row->dtype != FSDP_F32) {
            d.dtype = row->dtype;
            strcat(out, "2");
            CHECK_OK(fsdp_checkpoint_export(ck_step_path(run, 1), out, &d, text, sizeof text));
            CHECK_EQ_STR(text, "");
        }
        same_contents(out, dir, "model.safetensors"); /* also the tied copy */
        same_contents(out, dir, "config.json");
        CHECK_EQ_INT(ck_num_names(out), 2);
    }
    CALL(r->w, fsdp_barrier(r->w));
    float full[IN * IN];
    CALL(r->w, fsdp_param_full(u, 1, full)); /* k is not what it would be without transposing */
    for (int k = 0; k < KV * IN; k++) {
        const int64_t at = (k % IN) * (IN + 2 * KV) + IN + k / IN;
        W_CHECK((double)full[k] == lab_round(row->dtype, (double)their_element(theirs[1].name, at)),
                "element %d", k);
    }
}
TEST_P(checkpoint, to_their_layout, layout_rows, row->ranks > 3 ? MANY_RANKS : 0) {
    lab_run(row->ranks, NULL, to_their_layout, (void *)(uintptr_t)row);
}

/* ---- rows of sources ------------------------------------------------------------------------- */

/* Two sources for a parameter of four rows: the files lack the first, whose rows are not given, and
   have `rows` rows of the second. More than four are refused, and change nothing. */
static int first_is_missing(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    (void)user, (void)v;
    snprintf(out[0].name, sizeof out[0].name, "missing");
    snprintf(out[1].name, sizeof out[1].name, "A");
    return 2;
}
static void rows_of_sources(lab_rank *r) {
    static const char *const names[] = {"A"};
    fsdp_param_desc p = fsdp_mat("w", 4, 2);
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    fsdp_checkpoint *ck;
    float begin[8], got[8];
    char path[600], text[128];
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = named_unit(r->w, m, "u", &p, 1);
    CALL(r->w, fsdp_checkpoint_create(m, NULL, &ck));
    ld.source = first_is_missing, ld.partial = 1;
    for (int rows = 1; rows <= 7; rows++) {
        ck_dir(path, "x.safetensors");
        if (r->rank == 0) write_file(path, names, 1, rows, 2);
        for (int k = 0; k < 8; k++) begin[k] = (float)-k - 1;
        CALL(r->w, fsdp_param_load(u, 0, begin));
        CALL(r->w, fsdp_barrier(r->w));
        snprintf(text, sizeof text, "[E439] checkpoint_load: the sources of 'u.w' have %d rows",
                 rows > 5 ? 5 : rows); /* more are not counted */
        if (rows > 4) REFUSED(r->w, fsdp_checkpoint_load(ck, path, &ld), text);
        else CALL(r->w, fsdp_checkpoint_load(ck, path, &ld));
        CALL(r->w, fsdp_param_full(u, 0, got));
        for (int k = 0; k < 8; k++) {
            const int row = k / 2 - (4 - rows); /* row of A */
            float want = rows > 4 || row < 0 ? begin[k] : (float)(100 + 2 * row + k % 2);
            W_CHECK(got[k] == want, "%d rows: element %d is %g, expected %g", rows, k,
                    (double)got[k], (double)want);
        }
        CALL(r->w, fsdp_barrier(r->w));
    }
}
TEST_P(checkpoint, rows_of_sources, ranks_1_to_3) {
    lab_run(row->ranks, NULL, rows_of_sources, NULL);
}

/* ---- scalars --------------------------------------------------------------------------------- */

/* A parameter without dimensions takes a tensor of shape [], as PyTorch writes it, or [1]. A vector
   of two elements takes neither. */
static void scalars(lab_rank *r) {
    fsdp_param_desc p = FSDP_ZERO;
    fsdp_checkpoint *ck;
    fsdp_safetensors_entry e;
    p.name = "scale";
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_unit *u = named_unit(r->w, m, "u", &p, 1);
    CALL(r->w, fsdp_checkpoint_create(m, NULL, &ck));
    for (int ndim = 0; ndim < 3; ndim++) {
        char path[600], room[512];
        float got = 0, data[2] = {(float)ndim + 5, 0};
        ck_dir(path, "x.safetensors");
        memset(&e, 0, sizeof e);
        e.name = "u.scale";
        e.dtype = FSDP_F32, e.ndim = ndim > 0;
        e.shape[0] = ndim; /* [], [1] and [2] */
        int64_t size = fsdp_safetensors_print(&e, 1, 0, NULL, NULL, 0, room + 8, 400);
        memcpy(room, &size, 8);
        memcpy(room + 8 + size, data, sizeof data);
        if (r->rank == 0) ck_spit(path, room, 8 + size + (ndim == 2 ? 8 : 4));
        CALL(r->w, fsdp_barrier(r->w));
        if (ndim == 2) REFUSED(r->w, fsdp_checkpoint_load(ck, path, NULL), "[E436]");
        else CALL(r->w, fsdp_checkpoint_load(ck, path, NULL));
        CALL(r->w, fsdp_param_full(u, 0, &got));
        W_CHECK(got == (ndim == 2 ? 6.f : data[0]), "ndim %d: %g", ndim, (double)got);
        CALL(r->w, fsdp_barrier(r->w));
    }
}
TEST_P(checkpoint, scalars, ranks_1_to_3) { lab_run(row->ranks, NULL, scalars, NULL); }

/* ---- which rank writes ----------------------------------------------------------------------- */

/* Replicas share the rows of a tensor with 64 KiB or more for each of them, and otherwise take
   turns. */
static void small_tensors(lab_rank *r) {
    static const int64_t floats[] = {64 * 128 * 2, 64 * 256 * 2 - 64, 64 * 256 * 2, 64 * 300 * 2};
    static const int boxes[] = {1, 1, 2, 2};
    char dir[512], text[256];
    fsdp_mesh_info info = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_checkpoint *ck;
    fsdp_mesh *mesh;
    CALL(r->w, fsdp_mesh_1d(r->w, "r", &mesh));
    CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
    md.mesh_info = &info;
    fsdp_model *m = lab_model(r->w, &md);
    for (int i = 0; i < (int)(sizeof floats / sizeof *floats); i++) {
        char name[16];
        fsdp_param_desc p = fsdp_mat("w", 64, floats[i] / 64);
        snprintf(name, sizeof name, "u%d", i);
        named_unit(r->w, m, name, &p, 1);
    }
    CALL(r->w, fsdp_checkpoint_create(m, NULL, &ck));
    CALL(r->w, fsdp_checkpoint_save(ck, ck_dir(dir, "run"), 1));
    if (r->rank == 0) {
        fsdp_checkpoint_reader *reader;
        fsdp_checkpoint_tensor t;
        CHECK_OK(fsdp_checkpoint_open(ck_step_path(dir, 1), NULL, NULL, &reader, text, 256));
        for (int i = 0; i < (int)(sizeof floats / sizeof *floats); i++) {
            CHECK_OK(fsdp_checkpoint_tensor_at(reader, i, &t));
            CHECK_MSG(t.nbytes == 4 * floats[i] && t.num_boxes == boxes[i],
                      "%s: %lld bytes in %d boxes", t.name, (long long)t.nbytes, t.num_boxes);
        }
        fsdp_checkpoint_close(reader);
    }
    CALL(r->w, fsdp_barrier(r->w));
}
TEST(checkpoint, small_tensors_have_one_writer) { lab_run(2, NULL, small_tensors, NULL); }

/* Directories that someone has put into a checkpoint are removed to a depth of 16, including the
   top, and no deeper: so a link or a mount that loops cannot block the worker. */
static void deep(lab_rank *r) {
    const int levels = *(const int *)r->arg;
    fsdp_param_desc p = fsdp_vec("w", 8);
    fsdp_checkpoint_desc d = FSDP_ZERO;
    fsdp_checkpoint *ck;
    char dir[512], path[900];
    fsdp_model *m = lab_model(r->w, NULL);
    named_unit(r->w, m, "u", &p, 1);
    d.keep = d.no_sync = 1;
    CALL(r->w, fsdp_checkpoint_create(m, &d, &ck));
    CALL(r->w, fsdp_checkpoint_save(ck, ck_dir(dir, "run"), 1));
    snprintf(path, sizeof path, "%s", ck_step_path(dir, 1));
    for (int i = 0; i < levels; i++) {
        strcat(path, "/d");
        CHECK(!mkdir(path, 0755));
    }
    CALL(r->w, fsdp_checkpoint_save(ck, dir, 2));
    CHECK_EQ_INT(ck_num_names(dir), levels < 16 ? 1 : 2);
    CHECK((strstr(fsdp_last_error(r->w), "[E433]") != NULL) == (levels >= 16));
}
TEST(checkpoint, removes_directories_16_deep) {
    static int levels[] = {1, 14, 15, 16, 17};
    for (int i = 0; i < (int)(sizeof levels / sizeof *levels); i++) {
        lab_run(1, NULL, deep, &levels[i]);
        char command[700], dir[512];
        snprintf(command, sizeof command, "rm -rf '%s'", ck_dir(dir, "run"));
        CHECK(!system(command));
    }
}
