/* test_checkpoint.c - checkpoints of a model: any number of ranks on any mesh loads the saved bits;
   the contents of the files; errors and their texts.

   SPDX-License-Identifier: MIT */
#include "lab_ckmodel.h"
#include "golden.h"
#include <sys/resource.h> /* setrlimit */

#define COUNT(table) (int)(sizeof(table) / sizeof *(table))

/* ---- roundtrip ------------------------------------------------------------------------------- */

static const ck_param every_rows[] = {
    {0, "w", FSDP_F32, 2, {7, 5}, 0, 0, 0},      {0, "b", FSDP_F32, 1, {3}, 0, 0, 0},
    {0, "side", FSDP_F32, 2, {5, 11}, 1, 0, 0},  {0, "none", FSDP_F32, 2, {0, 3}, 0, 0, 0},
    {1, "d", FSDP_F64, 2, {4, 2}, 0, 0, 0},      {2, "half", FSDP_F16, 3, {3, 4, 5}, 2, 0, 0},
    {3, "bf", FSDP_BF16, 1, {9}, 0, 0, 0},       {4, "w", FSDP_F32, 2, {64, 6}, 0, 0, 0},
    {4, "i8", FSDP_I8, 1, {5}, 0, 1, 0},         {4, "u8", FSDP_U8, 1, {11}, 0, 1, 0},
    {4, "i32", FSDP_I32, 2, {2, 2}, 1, 1, 0},    {4, "i64", FSDP_I64, 1, {3}, 0, 1, 0},
    {4, "frozen", FSDP_BF16, 1, {7}, 0, 1, 0},   {4, "one", FSDP_F32, 1, {1}, 0, 0, 0},
    {5, "deep", FSDP_F32, 3, {2, 3, 4}, 1, 0, 0}};
static const ck_net every = {every_rows, COUNT(every_rows)};

static const ck_layout roundtrips[] = {
    {"adamw/W=1", 1, CK_FSDP, 0, 0, 0, CK_ADAMW, 1, 1, 0, 0, 0, 0},
    {"adamw/W=2", 2, CK_FSDP, 0, 0, 0, CK_ADAMW, 1, 1, 0, 0, 0, 0},
    {"adamw/W=3/lanes", 3, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 2, 0},
    {"adamw/W=4/processes", 4, CK_FSDP, 0, 0, 0, CK_ADAMW, 1, 1, 0, 0, 0, 1},
    {"sgd/W=2/lane", 2, CK_FSDP, 0, 0, 0, CK_SGD, 1, 0, 0, 0, 1, 0},
    {"momentum/W=3/processes", 3, CK_FSDP, 0, 0, 0, CK_MOMENTUM, 0, 1, 0, 0, 1, 1},
    {"averages/W=4", 4, CK_FSDP, 0, 0, 0, CK_NONE, 0, 1, 0, 0, 0, 0},
    {"offload/W=2", 2, CK_FSDP, 0, 0, 0, CK_ADAMW, 1, 1, 1, 0, 0, 0},
    {"gather/W=3", 3, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 1, 0, 0},
    {"nothing/W=2", 2, CK_FSDP, 0, 0, 0, CK_NONE, 0, 0, 0, 0, 0, 0},
    {"hsdp/W=4", 4, CK_HSDP, 2, 2, 0, CK_ADAMW, 1, 1, 0, 0, 0, 0},
    {"ddp/W=2", 2, CK_DDP, 0, 0, 0, CK_ADAMW, 1, 1, 0, 0, 0, 0},
};

static void run_bare(const ck_layout *at, void (*body)(lab_rank *r), const void *arg) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.bare = 1, how.lanes = at->lanes, how.processes = at->processes;
    lab_run(at->size, &how, body, (void *)(uintptr_t)arg);
}

static void roundtrip(lab_rank *r) {
    const ck_layout *at = (const ck_layout *)r->arg;
    char dir[512], path[FSDP_CHECKPOINT_PATH];
    int64_t step = 0, total = 0;
    ck_model m;
    fsdp_world *w = lab_world(r, 0, at->lanes, NULL);
    ck_begin(&m, r, w, &every, at);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 3);
    ck_check(&m, 1, 1);
    total = ck_report(&m).total_bytes;
    for (int verify = FSDP_VERIFY_READ; verify <= FSDP_VERIFY_NONE; verify++) {
        ck_fill(&m, 2);
        ck_load(&m, dir, 3, verify);
        ck_check(&m, 1, 1);
        fsdp_checkpoint_report report = ck_report(&m);
        CHECK_EQ_INT(report.step, 3);
        CHECK_EQ_INT(report.total_bytes, total);
        CHECK_EQ_INT(report.per_rank_blobs, 1);
        CHECK_EQ_INT(report.num_missing + report.num_extra, 0);
        CHECK_EQ_INT(report.verified, verify != FSDP_VERIFY_NONE);
    }
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
    w = lab_world(r, 1, at->lanes, NULL); /* another job */
    ck_begin(&m, r, w, &every, at);
    ck_fill(&m, 3);
    CALL(w, fsdp_checkpoint_find(m.ck, dir, -1, path, sizeof path, &step));
    CHECK_EQ_INT(step, 3);
    CALL(w, fsdp_checkpoint_load(m.ck, path, NULL));
    ck_check(&m, 1, 1);
    ck_end(&m);
    CHECK_OK(fsdp_shutdown(w));
}
TEST_P(checkpoint, roundtrip, roundtrips, GLOO | NCCL | (row->size > 3 ? MANY_RANKS : 0)) {
    run_bare(row, roundtrip, row);
}

/* ---- reshard --------------------------------------------------------------------------------- */

static const ck_param cut_by_rows[] = {
    {0, "w", FSDP_F32, 2, {37, 19}, 0, 0, 1},      {0, "b", FSDP_F32, 1, {3}, 0, 0, 1},
    {0, "tall", FSDP_F32, 2, {400, 100}, 0, 0, 1}, {1, "bf", FSDP_BF16, 2, {6, 5}, 0, 0, 1},
    {2, "norm", FSDP_F32, 1, {19}, 0, 0, 0},       {2, "i", FSDP_I64, 1, {5}, 0, 1, 0},
    {3, "d", FSDP_F64, 2, {2, 2}, 0, 0, 0}};
static const ck_net by_rows = {cut_by_rows, COUNT(cut_by_rows)};
static const ck_param cut_by_columns[] = {
    {0, "side", FSDP_F32, 2, {5, 37}, 1, 0, 2}, {0, "c", FSDP_F32, 3, {6, 4, 10}, 2, 0, 1},
    {0, "w", FSDP_F32, 2, {8, 6}, 0, 0, 2},     {0, "wide", FSDP_F32, 2, {4, 9000}, 1, 0, 1},
    {1, "n", FSDP_BF16, 2, {4, 3}, 1, 0, 0},    {2, "deep", FSDP_F64, 3, {3, 5, 2}, 1, 0, 0}};
static const ck_net by_columns = {cut_by_columns, COUNT(cut_by_columns)};

static const ck_layout layouts[] = {
    {"fsdp_1", 1, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"fsdp_2", 2, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"fsdp_3", 3, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"fsdp_5", 5, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"fsdp_8", 8, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"hsdp_2x2", 4, CK_HSDP, 2, 2, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"hsdp_2x1", 2, CK_HSDP, 2, 1, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"hsdp_1x2", 2, CK_HSDP, 1, 2, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"ddp_3", 3, CK_DDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"mixed_2x2", 4, CK_MIXED, 2, 2, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"tp_2x2", 4, CK_TP, 2, 2, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"buckets_2", 2, CK_BUCKETS, 0, 0, 4096, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"small_buckets_3", 3, CK_BUCKETS, 0, 0, 256, CK_ADAMW, 0, 0, 0, 0, 0, 0},
};
enum { LAYOUTS = sizeof layouts / sizeof *layouts };

typedef struct reshard_case {
    const ck_net *net;
    const ck_layout *at;
} reshard_case;

static void open_counting(ck_model *m, ck_files *files) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    memset(files, 0, sizeof *files);
    d.no_sync = 1, d.num_blobs = 2, d.files = &ck_file_ops, d.files_user = files;
    ck_open(m, &d);
}

/* A rank writes each byte of its file once. */
static void reshard_save(lab_rank *r) {
    const reshard_case *c = (const reshard_case *)r->arg;
    char dir[512];
    int64_t mine, manifest = 0;
    ck_files files;
    ck_model m;
    snprintf(w_case, sizeof w_case, "saved by %s", c->at->name);
    ck_make(&m, r, r->w, c->net, c->at);
    ck_optimizers(&m);
    open_counting(&m, &files);
    ck_fill(&m, (uint64_t)(c->at - layouts) + 100);
    ck_save(&m, ck_dir(dir, c->at->name), 5);
    CHECK_EQ_INT(ck_report(&m).total_bytes, ck_total(c->net, r->size));
    free(ck_slurp(ck_shard_path(dir, 5, r->rank), &mine));
    if (r->rank == 0) {
        char path[FSDP_CHECKPOINT_PATH + 32];
        snprintf(path, sizeof path, "%s/manifest.json", ck_step_path(dir, 5));
        free(ck_slurp(path, &manifest));
        CHECK(manifest > 0);
    }
    CHECK(mine > 0);
    CHECK_EQ_INT(files.written, mine + manifest);
    ck_end(&m);
}

static void reshard_load(lab_rank *r) {
    const reshard_case *c = (const reshard_case *)r->arg;
    char dir[512];
    ck_files files;
    ck_model m;
    ck_make(&m, r, r->w, c->net, c->at);
    ck_optimizers(&m);
    open_counting(&m, &files);
    for (int i = 0; i < LAYOUTS; i++) {
        const int same = layouts[i].size == r->size;
        snprintf(w_case, sizeof w_case, "saved by %s, loaded by %s", layouts[i].name, c->at->name);
        ck_dir(dir, layouts[i].name);
        ck_fill(&m, 7);
        files.read = 0;
        ck_load(&m, dir, 5, i % 3 ? FSDP_VERIFY_NONE : FSDP_VERIFY_READ);
        ck_check(&m, (uint64_t)i + 100, same);
        fsdp_checkpoint_report report = ck_report(&m);
        const int64_t wanted = ck_bytes(&m, same);
        CHECK_EQ_INT(report.per_rank_blobs, same);
        CHECK_EQ_INT(report.total_bytes, ck_total(c->net, layouts[i].size));
        if (r->rank) CHECK_EQ_INT(files.read, report.bytes); /* rank 0 also reads headers */
        if (i % 3 == 0) continue;
        if (c->net == &by_rows || c->at == &layouts[i])
            W_CHECK(report.bytes == wanted, "%lld bytes read, %lld wanted", (long long)report.bytes,
                    (long long)wanted);
        W_CHECK(report.bytes >= wanted && report.bytes <= 4 * wanted,
                "%lld bytes read, %lld wanted", (long long)report.bytes, (long long)wanted);
    }
    ck_end(&m);
}
static void reshard_all(const ck_net *net) {
    reshard_case c = {net, NULL};
    for (int i = 0; i < LAYOUTS; i++) {
        c.at = &layouts[i];
        lab_run(c.at->size, NULL, reshard_save, &c);
    }
    for (int i = 0; i < LAYOUTS; i++) {
        c.at = &layouts[i];
        lab_run(c.at->size, NULL, reshard_load, &c);
    }
}
TEST(checkpoint, reshard_by_rows, SLOW | AT_NIGHT(ASAN)) { reshard_all(&by_rows); }
TEST(checkpoint, reshard_by_columns, SLOW | AT_NIGHT(ASAN)) { reshard_all(&by_columns); }

/* Replicas share the rows of large tensors: files differ by at most one row of each tensor. */
static const ck_param even_rows[] = {{0, "w", FSDP_F32, 2, {801, 100}, 0, 0, 0}};
static const ck_net even = {even_rows, 1};
static const ck_layout evens[] = {
    {"ddp_3", 3, CK_DDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"hsdp_2x2", 4, CK_HSDP, 2, 2, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0},
    {"buckets_2", 2, CK_BUCKETS, 0, 0, 64, CK_ADAMW, 0, 0, 0, 0, 0, 0},
};
static void even_files(lab_rank *r) {
    const ck_layout *at = (const ck_layout *)r->arg;
    char dir[512];
    int64_t least = INT64_MAX, most = 0;
    ck_model m;
    ck_begin(&m, r, r->w, &even, at);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 0);
    for (int k = 0; k < at->size; k++) {
        int64_t nbytes, header = 0;
        char *file = ck_slurp(ck_shard_path(dir, 0, k), &nbytes);
        CHECK(file != NULL);
        memcpy(&header, file, 8);
        nbytes -= 8 + header;
        if (nbytes < least) least = nbytes;
        if (nbytes > most) most = nbytes;
        free(file);
    }
    /* Chunks of FSDP and those of replicas differ by a row; a step and the blobs are in one file.
       */
    CHECK_MSG(most - least <= 3 * 400 + 8 + 5, "files of %lld to %lld bytes", (long long)least,
              (long long)most);
    ck_load(&m, dir, 0, FSDP_VERIFY_ALL);
    ck_check(&m, 1, 1);
    ck_end(&m);
}
TEST_P(checkpoint, even_files, evens) {
    lab_run(row->size, NULL, even_files, (void *)(uintptr_t)row);
}

/* ---- files ----------------------------------------------------------------------------------- */

static const ck_param example_rows[] = {{0, "w", FSDP_F32, 2, {3, 2}, 0, 0, 0},
                                        {0, "b", FSDP_BF16, 1, {2}, 0, 1, 0}};
static const ck_net example_net = {example_rows, 2};
static const ck_layout example_at = {"example", 2, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0};

static void same_file(const char *a, const char *b) {
    int64_t a_bytes, b_bytes;
    char *x = ck_slurp(a, &a_bytes), *y = ck_slurp(b, &b_bytes);
    CHECK_MSG(x && y, "%s or %s is not there", a, b);
    CHECK_MSG(a_bytes == b_bytes && !memcmp(x, y, (size_t)a_bytes), "%s and %s differ", a, b);
    free(x);
    free(y);
}

static void example_values(ck_model *m) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_optim_state s;
    while (fsdp_next_param(m->model, &v))
        for (int64_t k = 0; k < v.numel; k++) {
            int64_t at = fsdp_view_index(&v, k);
            lab_put(v.shard, v.dtype, k, v.dtype == FSDP_F32 ? (double)at : at ? -2 : 1);
        }
    CALL(m->w, fsdp_params_changed(m->model));
    CALL(m->w, fsdp_adamw_state(m->adamw, 0, &s));
    for (int64_t k = 0; k < s.numel; k++)
        ((float *)s.first)[k] = 0.5f, ((float *)s.second)[k] = 0.25f;
    *s.step = 17;
}

/* The library writes the bytes that tests/golden/example.py has made from the rules of the format.
   */
static void example(lab_rank *r) {
    char loader[3] = {'a', 'b', 'c'}, rng[2] = {1, 2};
    static const char *const names[] = {"shard-00001-model-00001-of-00001.safetensors",
                                        "shard-00002-model-00001-of-00001.safetensors",
                                        "manifest.json"};
    fsdp_checkpoint_blob blobs[2] = {{"loader", loader, 3, 0, 0},
                                     {"rng", rng, r->rank ? 2 : 0, 1, 0}};
    fsdp_checkpoint_desc d = FSDP_ZERO;
    char dir[512], mine[1024], other[1024];
    ck_model m;
    d.blobs = blobs, d.num_blobs = 2;
    ck_make(&m, r, r->w, &example_net, &example_at);
    ck_optimizers(&m);
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &m.ck));
    example_values(&m);
    ck_save(&m, ck_dir(dir, "run"), 17);
    ck_save(&m, dir, 18);
    ck_save(&m, dir, 123456789012);
    CHECK_EQ_INT(ck_num_names(dir), 3);
    CHECK(ck_exists(ck_step_path(dir, 123456789012)));
    CHECK_EQ_INT(ck_num_names(ck_step_path(dir, 17)), 3);
    for (int i = 0; i < 3; i++) {
        snprintf(mine, sizeof mine, "%.500s/step-00000017/%s", dir, names[i]);
        snprintf(other, sizeof other, "%.400s/example/step-00000017/%s", golden_dir(), names[i]);
        same_file(mine, other);
        snprintf(other, sizeof other, "%.500s/step-00000018/%s", dir, names[i]);
        if (i < 2) same_file(mine, other); /* equal values: equal bytes */
    }
    snprintf(other, sizeof other, "%.400s/example/step-00000017", golden_dir());
    memset(loader, 0, sizeof loader);
    memset(rng, r->rank, sizeof rng);
    /* it also reads the files that Python wrote */
    CALL(r->w, fsdp_checkpoint_load(m.ck, other, NULL));
    CHECK_EQ_MEM(loader, "abc", 3);
    CHECK_EQ_MEM(rng, r->rank ? "\1\2" : "\0\0", 2);
    CHECK_EQ_INT(ck_report(&m).step, 17);
    CHECK_EQ_INT(ck_report(&m).per_rank_blobs, 1);
    ck_end(&m);
}
TEST(checkpoint, files_of_the_example) {
    golden_needs("example");
    lab_run(2, NULL, example, NULL);
}

/* A rank without anything to write has no file. */
static const ck_param tiny_rows[] = {{0, "w", FSDP_F32, 1, {1}, 0, 0, 0}};
static const ck_net tiny = {tiny_rows, 1};
static void no_file(lab_rank *r) {
    static const ck_layout at = {"tiny", 3, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0};
    fsdp_checkpoint_desc d = FSDP_ZERO;
    char dir[512];
    ck_model m;
    ck_make(&m, r, r->w, &tiny, &at);
    ck_optimizers(&m);
    CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &m.ck));
    ck_fill(&m, 4);
    ck_save(&m, ck_dir(dir, "run"), 1);
    CHECK_EQ_INT(ck_num_names(ck_step_path(dir, 1)), 2);
    CHECK(ck_exists(ck_shard_path(dir, 1, 0)));
    ck_fill(&m, 5);
    ck_load(&m, dir, 1, FSDP_VERIFY_ALL);
    ck_visit t = {CK_CHECK, 4, -1, 0, 0};
    ck_visit_params(&m, &t);
    ck_visit_states(&m, &t);
    fsdp_checkpoint_destroy(m.ck);
    fsdp_checkpoint_destroy(NULL);
    d.skip_frozen = 1; /* a second object, with nothing to write */
    m.blobs[0].name = "none";
    d.blobs = m.blobs, d.num_blobs = 1;
    ck_model n;
    ck_make(&n, r, r->w, &tiny, &at);
    CALL(r->w, fsdp_set_requires_grad(n.unit[0], 0, 0));
    CALL(r->w, fsdp_checkpoint_create(n.model, &d, &n.ck));
    ck_save(&n, dir, 2);
    CHECK_EQ_INT(ck_num_names(ck_step_path(dir, 2)), 1);
    ck_load(&n, dir, 2, FSDP_VERIFY_ALL);
    CHECK_EQ_INT(ck_report(&n).bytes, 0);
    ck_end(&n);
    ck_end(&m);
}
TEST(checkpoint, files_of_ranks_without_data) { lab_run(3, NULL, no_file, NULL); }

/* ---- files of PyTorch and transformers ------------------------------------------------------- */

/* A layer has two units: its f16 parameter has its own. */
static const ck_param torch_rows[] = {
    {0, "w", FSDP_F32, 2, {37, 19}, 0, 0, 0},     {0, "b", FSDP_F32, 1, {19}, 0, 0, 0},
    {0, "side", FSDP_F32, 2, {5, 37}, 1, 0, 0},   {0, "tiny", FSDP_F32, 1, {2}, 0, 0, 0},
    {0, "frozen", FSDP_BF16, 1, {7}, 0, 1, 0},    {0, "none", FSDP_F32, 2, {0, 3}, 0, 0, 0},
    {1, "half", FSDP_F16, 3, {3, 4, 5}, 0, 0, 0}, {2, "w", FSDP_F32, 2, {37, 19}, 0, 0, 0},
    {2, "b", FSDP_F32, 1, {19}, 0, 0, 0},         {2, "side", FSDP_F32, 2, {5, 37}, 1, 0, 0},
    {2, "tiny", FSDP_F32, 1, {2}, 0, 0, 0},       {2, "frozen", FSDP_BF16, 1, {7}, 0, 1, 0},
    {2, "none", FSDP_F32, 2, {0, 3}, 0, 0, 0},    {3, "half", FSDP_F16, 3, {3, 4, 5}, 0, 0, 0}};
static int torch_layer(const fsdp_param_view *v) { return ck_row(v)->unit / 2; }
static const ck_net torch_net = {torch_rows, COUNT(torch_rows)};

static void place_layers(void *user, const fsdp_param_view *v, fsdp_checkpoint_place *place) {
    const ck_model *m = (const ck_model *)user;
    if (m->dm) ck_place(user, v, place);
    snprintf(place->name, sizeof place->name, "layers.%d.%s", torch_layer(v), ck_row(v)->name);
}

static uint32_t fnv32(const char *name) {
    uint32_t h = 0x811C9DC5u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x01000193u;
    return h;
}
/* Returns element k of a full tensor in a golden checkpoint. */
static double golden_element(const char *name, int64_t k) {
    return golden_value(fnv32(name), (uint64_t)k, 1);
}
static void check_golden(const char *name, fsdp_dtype dtype, const void *data,
                         const fsdp_param_view *v) {
    for (int64_t k = 0; k < v->numel; k++) {
        double want = lab_round(dtype, golden_element(name, fsdp_view_index(v, k)));
        W_CHECK(lab_same(lab_get(data, dtype, k), want), "'%s' at %lld: %g, expected %g", name,
                (long long)k, lab_get(data, dtype, k), want);
    }
}
static int check_golden_params(const ck_model *m) {
    fsdp_param_view v = FSDP_ZERO;
    char name[64];
    int count = 0;
    while (fsdp_next_param(m->model, &v)) {
        snprintf(name, sizeof name, "layers.%d.%s", torch_layer(&v), ck_row(&v)->name);
        check_golden(name, v.dtype, v.shard, &v);
        count++;
    }
    return count;
}
static void check_golden_states(const ck_model *m, const int64_t steps[2]) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_optim_state s;
    char name[96];
    while (fsdp_next_param(m->model, &v)) {
        if (!v.requires_grad || !lab_full_numel(&v)) continue;
        CALL(m->w, fsdp_adamw_state(m->adamw, v.ordinal, &s));
        const int has_step = !strcmp(ck_row(&v)->name, "w");
        snprintf(name, sizeof name, "optim.state.layers.%d.%s.exp_avg", torch_layer(&v),
                 ck_row(&v)->name);
        check_golden(name, s.dtype, s.first, &v);
        snprintf(name, sizeof name, "optim.state.layers.%d.%s.exp_avg_sq", torch_layer(&v),
                 ck_row(&v)->name);
        check_golden(name, s.dtype, s.second, &v);
        CHECK_EQ_INT(*s.step, has_step ? steps[torch_layer(&v)] : 4);
    }
}

static void torch_case(lab_rank *r, golden *g) {
    ck_layout at = {"torch", r->size, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0};
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    char path[600];
    int64_t steps[2] = {-1, -1};
    int tensors = 0, states;
    ck_model m;
    snprintf(w_case, sizeof w_case, "%s", g->name);
    snprintf(path, sizeof path, "%.400s/checkpoints/%.100s", golden_dir(), g->name);
    while (golden_line(g)) {
        if (golden_is(g, "tensor")) tensors++;
        if (!golden_is(g, "step")) continue;
        int layer = strcmp(golden_word(g), "layers.1.w") == 0;
        steps[layer] = golden_int(g);
    }
    states = steps[0] >= 0;
    ck_make(&m, r, r->w, &torch_net, &at);
    ck_optimizers(&m);
    d.place = place_layers, d.user = &m;
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &m.ck));
    ck_visit t = {CK_FILL, 9, 4, 0, 0};
    ck_visit_params(&m, &t);
    ck_visit_states(&m, &t);
    if (states) { /* the script has saved the steps of two parameters */
        uint64_t before = ck_digest(&m);
        REFUSED(r->w, fsdp_checkpoint_load(m.ck, path, NULL),
                "lacks 8 of 42 tensors: 'optim.state.layers.0.b.step', "
                "'optim.state.layers.0.side.step', 'optim.state.layers.0.tiny.step', ...; it has 0 "
                "that nobody asks for: set params_only if you want no states, or set partial");
        CHECK(ck_digest(&m) == before);
    }
    ld.partial = states, ld.params_only = !states;
    CALL(r->w, fsdp_checkpoint_load(m.ck, path, &ld));
    CHECK_EQ_INT(check_golden_params(&m), COUNT(torch_rows));
    if (states) check_golden_states(&m, steps);
    fsdp_checkpoint_report report = ck_report(&m);
    CHECK_EQ_INT(report.step, -1);
    CHECK_EQ_INT(report.num_missing, states ? 8 : 0);
    CHECK_EQ_INT(report.num_extra, 0);
    CHECK_EQ_INT(report.verified, 0);
    CHECK_EQ_INT(tensors, states ? 34 : 12);
    ck_end(&m);
}
static void torch_cases(lab_rank *r) {
    golden g;
    int cases = 0;
    CHECK_MSG(golden_open(&g, "checkpoints/cases.txt", "checkpoints"), "%s", g.error);
    for (; golden_case(&g); cases++) torch_case(r, &g);
    CHECK_MSG(!g.error[0], "%s", g.error);
    golden_close(&g);
    CHECK(cases > 0);
}
static const struct {
    const char *name;
    int size;
} sizes[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}, {"W=4", 4}};
TEST_P(checkpoint, of_pytorch, sizes, row->size > 3 ? MANY_RANKS : 0) {
    golden_needs("checkpoints");
    lab_run(row->size, NULL, torch_cases, NULL);
}

/* GPT-2 of transformers: its linears are stored transposed, and query, key and value are one
   matrix. */
static const ck_param gpt2_rows[] = {{0, "embeddings", FSDP_F32, 2, {19, 8}, 0, 0, 0},
                                     {0, "head", FSDP_F32, 2, {13, 8}, 1, 0, 0},
                                     {1, "q", FSDP_F32, 2, {8, 8}, 0, 0, 0},
                                     {1, "k", FSDP_F32, 2, {8, 8}, 1, 0, 0},
                                     {1, "v", FSDP_BF16, 2, {8, 8}, 0, 1, 0},
                                     {1, "fc", FSDP_F32, 2, {32, 8}, 0, 0, 0},
                                     {1, "vk", FSDP_F32, 2, {16, 8}, 0, 0, 0},
                                     {1, "bias", FSDP_F64, 1, {24}, 0, 1, 0},
                                     {1, "mine", FSDP_F32, 1, {3}, 0, 0, 0}};
static const ck_net gpt2_net = {gpt2_rows, COUNT(gpt2_rows)};
static const struct {
    const char *param, *name;
    int transpose;
    int64_t first, rows;
} gpt2_sources[] = {
    {"embeddings", "transformer.wte.weight", 0, 0, 0},
    {"embeddings", "transformer.wpe.weight", 0, 0, 0},
    {"head", "transformer.wte.weight", 0, 0, 13},
    {"q", "transformer.h.0.attn.c_attn.weight", 1, 0, 8},
    {"k", "transformer.h.0.attn.c_attn.weight", 1, 8, 8},
    {"v", "transformer.h.0.attn.c_attn.weight", 1, 16, 0},
    {"fc", "transformer.h.1.mlp.c_fc.weight", 1, 0, 0},
    {"vk", "transformer.h.1.attn.c_attn.weight", 1, 16, 8},
    {"vk", "transformer.h.1.attn.c_attn.weight", 1, 8, 8},
    {"bias", "transformer.h.0.attn.c_attn.bias", 0, 0, 0},
};

static int gpt2_source(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    char own[32];
    int count = 0;
    (void)user;
    snprintf(own, sizeof own, "h.%d.%s", ck_row(v)->unit, ck_row(v)->name);
    CHECK_EQ_STR(out[0].name, own);
    for (int i = 0; i < COUNT(gpt2_sources); i++) {
        if (strcmp(gpt2_sources[i].param, ck_row(v)->name) != 0) continue;
        snprintf(out[count].name, sizeof out->name, "%s", gpt2_sources[i].name);
        out[count].transpose = gpt2_sources[i].transpose;
        out[count].first = gpt2_sources[i].first;
        out[count++].rows = gpt2_sources[i].rows;
    }
    return count;
}
/* Returns the full parameter's element at (row, column), from the sources as they are listed. */
static double gpt2_element(const char *param, int64_t row, int64_t column, int64_t columns) {
    for (int i = 0; i < COUNT(gpt2_sources); i++) {
        int64_t rows = gpt2_sources[i].rows, all = 24;
        if (strcmp(gpt2_sources[i].param, param) != 0) continue;
        if (strstr(gpt2_sources[i].name, "wte")) rows = 13;
        if (strstr(gpt2_sources[i].name, "wpe")) rows = 6;
        if (strstr(gpt2_sources[i].name, "c_fc")) rows = all = 32;
        if (!rows) rows = all - gpt2_sources[i].first;
        if (row >= rows) {
            row -= rows;
            continue;
        }
        row += gpt2_sources[i].first;
        return golden_element(gpt2_sources[i].name, gpt2_sources[i].transpose
                                                        ? column * all + row
                                                        : row * columns + column);
    }
    CHECK_MSG(0, "a row of no source");
    return 0;
}
static void gpt2(lab_rank *r) {
    const ck_layout at = {"gpt2", r->size, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0};
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    fsdp_param_view v = FSDP_ZERO;
    char path[600];
    ck_model m;
    ck_begin(&m, r, r->w, &gpt2_net, &at);
    ck_fill(&m, 6);
    snprintf(path, sizeof path, "%.400s/checkpoints/transformers_gpt2", golden_dir());
    ld.source = gpt2_source;
    uint64_t before = ck_digest(&m);
    REFUSED(r->w, fsdp_checkpoint_load(m.ck, path, &ld), ": set convert");
    CHECK(ck_digest(&m) == before);
    ld.convert = 1;
    CALL(r->w, fsdp_checkpoint_load(m.ck, path, &ld));
    while (fsdp_next_param(m.model, &v)) {
        const char *name = ck_row(&v)->name;
        int64_t columns = v.ndim == 2 ? v.shape[1] : 1;
        if (!strcmp(name, "mine")) { /* has no source: it stays */
            ck_visit t = {CK_CHECK, 6, -1, 0, 0};
            ck_array(&m, &t, "h.1.mine", v.dtype, FSDP_MEMORY_DEVICE, v.shard, v.numel, &v);
            continue;
        }
        for (int64_t k = 0; k < v.numel; k++) {
            int64_t e = fsdp_view_index(&v, k);
            double want = lab_round(v.dtype, gpt2_element(name, e / columns, e % columns, columns));
            W_CHECK(lab_same(lab_get(v.shard, v.dtype, k), want), "%s at %lld: %g, expected %g",
                    name, (long long)e, lab_get(v.shard, v.dtype, k), want);
        }
    }
    ck_visit t = {CK_CHECK, 6, -1, 0, 0}; /* with sources no states are loaded */
    ck_visit_states(&m, &t);
    ck_visit_blobs(&m, &t, 1);
    ck_end(&m);
}
TEST_P(checkpoint, of_transformers, sizes, row->size > 3 ? MANY_RANKS : 0) {
    golden_needs("checkpoints/transformers_gpt2");
    lab_run(row->size, NULL, gpt2, NULL);
}

/* ---- groups of ranks outside the unit's mesh ------------------------------------------------- */

/* Copies of a model whose units are independent: `place` distinguishes them. */
static const ck_param copied_rows[] = {{0, "large", FSDP_F32, 2, {512, 600}, 0, 0, 0},
                                       {0, "small", FSDP_F32, 2, {7, 5}, 0, 0, 0},
                                       {1, "i", FSDP_I64, 1, {5}, 0, 1, 0},
                                       {1, "one", FSDP_F32, 1, {1}, 0, 0, 0}};
static const ck_net copied_net = {copied_rows, COUNT(copied_rows)};
typedef struct copies_case {
    const char *name;
    int copies, replicas, shards;
} copies_case;
static const copies_case copies[] = {
    {"2 of 2", 2, 1, 2}, {"2 of 2x2", 2, 2, 2}, {"3 of 1", 3, 1, 1}, {"2 of 2x1", 2, 2, 1}};
static void place_copy(void *user, const fsdp_param_view *v, fsdp_checkpoint_place *place) {
    const ck_model *m = (const ck_model *)user;
    const copies_case *c = (const copies_case *)m->r->arg;
    (void)v;
    place->num_replicas = c->copies;
    place->replica = m->r->rank / (c->replicas * c->shards);
}
static void copies_body(lab_rank *r) {
    const copies_case *c = (const copies_case *)r->arg;
    const int32_t shape[] = {c->copies, c->replicas, c->shards};
    const ck_layout at = {"copies", r->size, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0};
    fsdp_checkpoint_desc d = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_info info;
    char dir[512];
    ck_model m;
    int kind = c->replicas == 1 ? FSDP_MESH_INFO_FSDP : FSDP_MESH_INFO_HSDP;
    memset(&m, 0, sizeof m);
    m.r = r, m.w = r->w, m.net = &copied_net, m.at = &at;
    CALL(r->w, fsdp_mesh_info_init(lab_mesh(r->w, 3, shape, NULL, NULL), kind, 2,
                                   c->replicas == 1 ? -1 : 1, &info));
    md.mesh_info = &info;
    m.model = lab_model(r->w, &md);
    ck_units(&m);
    ck_optimizers(&m);
    d.place = place_copy, d.user = &m, d.no_sync = 1, d.num_blobs = 2;
    ck_open(&m, &d);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    const int64_t total = ck_total(&copied_net, r->size), mine = ck_report(&m).bytes;
    CHECK_EQ_INT(ck_report(&m).total_bytes, total); /* each row once */
    W_CHECK(mine > total / r->size - 8000 && mine < total / r->size + 8000,
            "%lld of %lld bytes on one of %d ranks", (long long)mine, (long long)total, r->size);
    ck_fill(&m, 2);
    ck_load(&m, dir, 1, FSDP_VERIFY_ALL);
    ck_check(&m, 1, 1);
    ck_end(&m);
}
TEST_P(checkpoint, copies_outside_the_mesh, copies) {
    lab_run(row->copies * row->replicas * row->shards, NULL, copies_body, (void *)(uintptr_t)row);
}

/* ---- loads that are refused ------------------------------------------------------------------ */

static const ck_param base_rows[] = {{0, "w", FSDP_F32, 2, {6, 4}, 0, 0, 0},
                                     {0, "b", FSDP_F32, 1, {3}, 0, 0, 0},
                                     {1, "f", FSDP_BF16, 1, {5}, 0, 1, 0},
                                     {1, "i", FSDP_I32, 1, {4}, 0, 1, 0}};
static const ck_net base = {base_rows, COUNT(base_rows)};
static const ck_layout adamw_2 = {"adamw_2", 2, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0};
static const ck_layout plain_2 = {"plain_2", 2, CK_FSDP, 0, 0, 0, CK_NONE, 0, 0, 0, 0, 0, 0};

/* Checks that all ranks refuse a load with the same text, and that nothing has changed. */
static void refuse_load(ck_model *m, const char *path, const fsdp_checkpoint_load_desc *d,
                        fsdp_status status, const char *text) {
    const uint64_t before = ck_digest(m);
    REFUSED_AS(status, m->w, fsdp_checkpoint_load(m->ck, path, d), text);
    CHECK_MSG(ck_digest(m) == before, "a load that was refused has changed the model: %s", text);
}

/* Saves the base net with AdamW as step 1 of a directory. */
static const char *save_base(lab_rank *r, char dir[512]) {
    ck_model m;
    ck_begin(&m, r, r->w, &base, &adamw_2);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "base"), 1);
    ck_end(&m);
    return ck_step_path(dir, 1);
}

typedef struct other_model {
    const char *name;
    ck_param rows[6];
    int count, optim;
    const char *text; /* error of a load without a desc; NULL: it succeeds */
    int convert;      /* with this desc the load succeeds */
    int partial, params_only, missing, extra;
} other_model;
#define ROW_W                                                                                      \
    { 0, "w", FSDP_F32, 2, {6, 4}, 0, 0, 0 }
#define ROW_B                                                                                      \
    { 0, "b", FSDP_F32, 1, {3}, 0, 0, 0 }
#define ROW_F                                                                                      \
    { 1, "f", FSDP_BF16, 1, {5}, 0, 1, 0 }
#define ROW_I                                                                                      \
    { 1, "i", FSDP_I32, 1, {4}, 0, 1, 0 }
static const other_model others[] = {
    {"same", {ROW_W, ROW_B, ROW_F, ROW_I}, 4, CK_ADAMW, NULL, 0, 0, 0, 0, 0},
    {"fewer", {ROW_W, ROW_F}, 2, CK_ADAMW, NULL, 0, 0, 0, 0, 5},
    {"no_optimizer", {ROW_W, ROW_B, ROW_F, ROW_I}, 4, CK_NONE, NULL, 0, 0, 0, 0, 6},
    {"more",
     {ROW_W, ROW_B, ROW_F, ROW_I, {1, "x", FSDP_F32, 1, {2}, 0, 0, 0}},
     5,
     CK_ADAMW,
     "lacks 1 of 16 tensors: 'h.1.x'; it has 0 that nobody asks for: set partial to leave them as "
     "they are, or give desc.source",
     0,
     1,
     0,
     1,
     0},
    {"renamed",
     {ROW_W, {0, "c", FSDP_F32, 1, {3}, 0, 0, 0}, ROW_F, ROW_I},
     4,
     CK_ADAMW,
     "lacks 1 of 12 tensors: 'h.0.c'; it has 4 that nobody asks for: 'h.0.b', "
     "'optim.state.h.0.b.exp_avg', 'optim.state.h.0.b.exp_avg_sq', ...: if one of these is a wrong "
     "name, correct it; else set partial",
     0,
     1,
     0,
     1,
     4},
    {"sgd",
     {ROW_W, ROW_B, ROW_F, ROW_I},
     4,
     CK_MOMENTUM,
     "lacks 2 of 10 tensors: 'optim.state.h.0.w.momentum_buffer', "
     "'optim.state.h.0.b.momentum_buffer'; it has 4 that nobody asks for: "
     "'optim.state.h.0.b.exp_avg', 'optim.state.h.0.b.exp_avg_sq', 'optim.state.h.0.w.exp_avg', "
     "...: set params_only",
     0,
     0,
     1,
     0,
     0},
    {"longer",
     {{0, "w", FSDP_F32, 2, {7, 4}, 0, 0, 0}, ROW_B, ROW_F, ROW_I},
     4,
     CK_ADAMW,
     "[E436] checkpoint_load: 'h.0.w' is f32 [6, 4] there, and f32 [7, 4] here",
     -1,
     0,
     0,
     0,
     0},
    {"flat",
     {{0, "w", FSDP_F32, 1, {24}, 0, 0, 0}, ROW_B, ROW_F, ROW_I},
     4,
     CK_ADAMW,
     "[E436] checkpoint_load: 'h.0.w' is f32 [6, 4] there, and f32 [24] here",
     -1,
     0,
     0,
     0,
     0},
    {"bf16",
     {{0, "w", FSDP_BF16, 2, {6, 4}, 0, 0, 0}, ROW_F, ROW_I},
     3,
     CK_ADAMW,
     "[E436] checkpoint_load: 'h.0.w' is f32 [6, 4] there, and bf16 [6, 4] here: set convert",
     1,
     0,
     0,
     0,
     4},
    {"integer",
     {ROW_W, ROW_B, ROW_F, {1, "i", FSDP_F32, 1, {4}, 0, 1, 0}},
     4,
     CK_ADAMW,
     "[E436] checkpoint_load: 'h.1.i' is i32 [4] there, and f32 [4] here",
     -1,
     0,
     0,
     0,
     0},
    {"short_integer",
     {ROW_W, ROW_B, ROW_F, {1, "i", FSDP_I16, 1, {4}, 0, 1, 0}},
     4,
     CK_ADAMW,
     "[E436] checkpoint_load: 'h.1.i' is i32 [4] there, and i16 [4] here",
     -1,
     0,
     0,
     0,
     0},
};

/* Checks that the expected values were loaded, converted or not, and that the others are unchanged.
   */
static void check_other(ck_model *m) {
    fsdp_param_view v = FSDP_ZERO;
    char name[32];
    while (fsdp_next_param(m->model, &v)) {
        const ck_param *row = ck_row(&v), *saved = NULL;
        snprintf(name, sizeof name, "h.%d.%s", row->unit, row->name);
        for (int p = 0; p < base.count; p++)
            if (!strcmp(base_rows[p].name, row->name)) saved = &base_rows[p];
        for (int64_t k = 0; k < v.numel; k++) {
            uint64_t bits = lab_hash(saved ? 1 : 2, ck_name_hash(name),
                                     (uint64_t)fsdp_view_index(&v, k), 0);
            unsigned char want[8];
            size_t size = fsdp_dtype_size(v.dtype);
            if (saved && saved->dtype != v.dtype)
                CHECK_OK(fsdp_convert(want, v.dtype, &bits, saved->dtype, 1));
            else memcpy(want, &bits, size);
            W_CHECK(!memcmp(lab_at(v.shard, v.dtype, k), want, size), "'%s' at %lld", name,
                    (long long)k);
        }
    }
}
static void load_other(lab_rank *r) {
    const other_model *o = (const other_model *)r->arg;
    const ck_net net = {o->rows, o->count};
    ck_layout at = adamw_2;
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    char dir[512], path[600];
    ck_model m;
    snprintf(path, sizeof path, "%s", save_base(r, dir));
    at.optim = o->optim;
    ck_begin(&m, r, r->w, &net, &at);
    ck_fill(&m, 2);
    if (o->text) {
        refuse_load(&m, path, NULL, FSDP_ERR_INVALID_ARG, o->text);
        refuse_load(&m, path, &ld, FSDP_ERR_INVALID_ARG, o->text);
    }
    ld.partial = o->partial, ld.params_only = o->params_only, ld.convert = o->convert > 0;
    if (o->convert < 0) {
        ld.convert = ld.partial = 1;
        refuse_load(&m, path, &ld, FSDP_ERR_INVALID_ARG, o->text);
    } else {
        CALL(r->w, fsdp_checkpoint_load(m.ck, path, &ld));
        check_other(&m);
        CHECK_EQ_INT(ck_report(&m).num_missing, o->missing);
        CHECK_EQ_INT(ck_report(&m).num_extra, o->extra);
        if (ld.params_only) { /* states and blobs are unchanged */
            ck_visit t = {CK_CHECK, 2, -1, 0, 0};
            ck_visit_states(&m, &t);
            ck_visit_blobs(&m, &t, 1);
        } else {
            ck_visit t = {CK_CHECK, 1, -1, 0, 0};
            ck_visit_blobs(&m, &t, 1);
        }
    }
    ck_end(&m);
}
TEST_P(checkpoint, other_models, others) { lab_run(2, NULL, load_other, (void *)(uintptr_t)row); }

/* A checkpoint of a run without an optimizer: there are no states. */
static void of_plain(lab_rank *r) {
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, &base, &plain_2);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "plain"), 1);
    ck_end(&m);
    ck_begin(&m, r, r->w, &base, &adamw_2);
    ck_fill(&m, 2);
    refuse_load(&m, ck_step_path(dir, 1), NULL, FSDP_ERR_INVALID_ARG,
                "lacks 6 of 12 tensors: 'optim.state.h.0.w.exp_avg', "
                "'optim.state.h.0.w.exp_avg_sq', 'optim.state.h.0.w.step', ...; it has 0");
    ld.params_only = 1, ld.verify = FSDP_VERIFY_NONE;
    CALL(r->w, fsdp_checkpoint_load(m.ck, ck_step_path(dir, 1), &ld));
    ck_check_params(&m, 1);
    ck_visit t = {CK_CHECK, 2, -1, 0, 0};
    ck_visit_states(&m, &t);
    ck_visit_blobs(&m, &t, 1);
    CHECK_EQ_INT(ck_report(&m).bytes, 6 * 4 * 4 / 2 + (r->rank ? 4 : 8) + (r->rank ? 4 : 6) + 8);
    ck_end(&m);
}
TEST(checkpoint, params_only) { lab_run(2, NULL, of_plain, NULL); }

static void blobs_differ(lab_rank *r) {
    char dir[512], path[600], data[8] = "1234567";
    fsdp_checkpoint_blob blobs[3] = {
        {"loader", data, 4, 0, 0}, {"extra", data, 2, 0, 0}, {"mine", data + 4, 2, 1, 0}};
    fsdp_checkpoint_desc d = FSDP_ZERO;
    ck_model m;
    snprintf(path, sizeof path, "%s", save_base(r, dir));
    d.blobs = blobs, d.num_blobs = 1;
    ck_make(&m, r, r->w, &base, &adamw_2);
    ck_optimizers(&m);
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &m.ck));
    refuse_load(&m, path, NULL, FSDP_ERR_INVALID_ARG,
                "'fsdp.blob.loader' is u8 [5] there, and u8 [4] here");
    fsdp_checkpoint_destroy(m.ck);
    d.num_blobs = 3;
    blobs[0].name = "other";
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &m.ck));
    refuse_load(
        &m, path, NULL, FSDP_ERR_INVALID_ARG,
        "lacks 3 of 13 tensors: 'fsdp.blob.other', 'fsdp.blob.extra', 'fsdp.blob.mine.0'; it "
        "has 0 that nobody asks for: set `optional` of a blob that may be missing, or set "
        "partial to leave them as they are");
    fsdp_checkpoint_destroy(m.ck);
    for (int i = 0; i < 3; i++) blobs[i].optional = 1;
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &m.ck));
    CALL(r->w, fsdp_checkpoint_load(m.ck, path, NULL));
    CHECK_EQ_MEM(data, "1234567", 7);
    ck_end(&m);
}
TEST(checkpoint, blobs_that_differ) { lab_run(2, NULL, blobs_differ, NULL); }

/* ---- sources --------------------------------------------------------------------------------- */

typedef struct bad_sources {
    const char *name;
    int count; /* returned; if 9 or more, none is filled in */
    fsdp_checkpoint_source at[2];
    const char *text;
} bad_sources;
#define SOURCE(name, transpose, first, rows)                                                       \
    { name, transpose, 0, first, rows }
static const bad_sources bad_lists[] = {
    {"nine",
     9,
     {SOURCE("", 0, 0, 0), SOURCE("", 0, 0, 0)},
     "[E438] checkpoint_load: desc.source gives 9 sources of 'h.0.w', expected 0 to 8"},
    {"negative",
     -1,
     {SOURCE("", 0, 0, 0), SOURCE("", 0, 0, 0)},
     "[E438] checkpoint_load: desc.source gives -1 sources of 'h.0.w'"},
    {"too_few_rows",
     1,
     {SOURCE("h.0.w", 0, 1, 4), SOURCE("", 0, 0, 0)},
     "[E439] checkpoint_load: the sources of 'h.0.w' have 4 rows, expected 6"},
    {"too_many_rows",
     2,
     {SOURCE("h.0.w", 0, 0, 0), SOURCE("h.0.w", 0, 5, 1)},
     "[E436] checkpoint_load: 'h.0.w' is f32 [6, 4] there, and f32 [6, 4] here"},
    {"beyond",
     1,
     {SOURCE("h.0.w", 0, 2, 5), SOURCE("", 0, 0, 0)},
     "[E436] checkpoint_load: 'h.0.w' is f32 [6, 4] there, and f32 [6, 4] here"},
    {"begins_before",
     1,
     {SOURCE("h.0.w", 0, -1, 6), SOURCE("", 0, 0, 0)},
     "[E436] checkpoint_load: 'h.0.w' is f32 [6, 4] there"},
    {"transposed",
     1,
     {SOURCE("h.0.w", 1, 0, 0), SOURCE("", 0, 0, 0)},
     "[E436] checkpoint_load: 'h.0.w' is f32 [6, 4] there"},
    {"vector",
     1,
     {SOURCE("h.0.b", 0, 0, 0), SOURCE("", 0, 0, 0)},
     "[E436] checkpoint_load: 'h.0.b' is f32 [3] there, and f32 [6, 4] here"},
    {"unknown",
     2,
     {SOURCE("h.0.w", 0, 0, 3), SOURCE("there.is.none", 0, 0, 0)},
     "[E440] checkpoint_load: "},
    {"all_unknown",
     1,
     {SOURCE("no.such", 0, 0, 0), SOURCE("", 0, 0, 0)},
     "lacks 1 of 1 tensors: 'no.such'; it has "},
    {"two_unknown",
     2,
     {SOURCE("no.such", 0, 0, 0), SOURCE("nor.this", 0, 0, 0)},
     "lacks 2 of 2 tensors: 'no.such', 'nor.this'; it has "},
};
static int bad_source(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    const bad_sources *b = (const bad_sources *)user;
    if (strcmp(ck_row(v)->name, "w") != 0) return 0;
    for (int i = 0; i < b->count && b->count <= 2; i++) out[i] = b->at[i];
    return b->count;
}
/* The rows of a parameter are checked even if earlier parameters have missing sources. */
static int late_source(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    int is_b = !strcmp(ck_row(v)->name, "b");
    (void)user;
    if (strcmp(ck_row(v)->name, "w") == 0) snprintf(out[0].name, sizeof out[0].name, "no.such");
    else if (is_b) out[0].rows = 2;
    return is_b || !strcmp(ck_row(v)->name, "w");
}
static void sources_body(lab_rank *r) {
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    char dir[512], path[600];
    ck_model m;
    snprintf(path, sizeof path, "%s", save_base(r, dir));
    ck_begin(&m, r, r->w, &base, &adamw_2);
    ck_fill(&m, 2);
    ld.source = bad_source, ld.user = r->arg;
    refuse_load(&m, path, &ld, FSDP_ERR_INVALID_ARG, ((const bad_sources *)r->arg)->text);
    ld.source = late_source, ld.partial = 1;
    refuse_load(&m, path, &ld, FSDP_ERR_INVALID_ARG,
                "[E439] checkpoint_load: the sources of 'h.0.b' have 2 rows, expected 3");
    ck_end(&m);
}
TEST_P(checkpoint, sources, bad_lists) { lab_run(2, NULL, sources_body, (void *)(uintptr_t)row); }

/* With `partial`, sources that exist fill their rows: 'h.0.w' consists of rows of q, k and v. */
typedef struct parts_case {
    const char *name, *there; /* existing ones of q, k and v */
    int rows[3];              /* given number of rows; 0: not given */
    int turned, partial;
    const char *text; /* NULL: it succeeds */
} parts_case;
static const parts_case parts[] = {
    {"all", "qkv", {0, 0, 0}, 0, 0, NULL},
    {"no_q", "kv", {0, 0, 0}, 0, 1, NULL},
    {"no_k", "qv", {0, 0, 0}, 0, 1, NULL},
    {"no_v", "qk", {0, 0, 0}, 0, 1, NULL},
    {"no_q/turned", "kv", {0, 0, 0}, 1, 1, NULL},
    {"none", "x", {0, 0, 0}, 0, 1, NULL},
    {"none/strict", "x", {0, 0, 0}, 0, 0, "lacks 3 of 3 tensors: 'q', 'k', 'v'"},
    {"no_q/is_logged", "kv", {1, 2, 3}, 0, 1, NULL},
    {"only_k/is_logged", "k", {1, 2, 3}, 0, 1, NULL},
    {"only_v/first_is_logged", "v", {1, 0, 0}, 0, 1, NULL},
    {"only_k",
     "k",
     {0, 0, 0},
     0,
     1,
     "lacks 'q' and 'v', sources of 'h.0.w' that do not tell their rows, so nobody knows where"},
    {"no_q/strict", "kv", {0, 0, 0}, 0, 0, "lacks 1 of 3 tensors: 'q'"},
    {"only_k/strict", "k", {0, 0, 0}, 0, 0, "lacks 2 of 3 tensors: 'q', 'v'"},
    {"too_many", "kv", {2, 2, 3}, 0, 1, "[E436] checkpoint_load: 'v' is f32 [3, 4] there"},
    {"too_few", "kv", {1, 2, 2}, 0, 1, "[E439] checkpoint_load: the sources of 'h.0.w' have 5"},
    {"beyond", "k", {7, 0, 0}, 0, 1, "[E439] checkpoint_load: the sources of 'h.0.w' have 7"},
    {"negative", "kv", {-1, 0, 0}, 0, 1, "[E439] checkpoint_load: the sources of 'h.0.w' have -1"}};
enum { PART_Q = 1, PART_K = 2, PART_V = 3, PART_COLS = 4 };
static int part_sources(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    const parts_case *c = (const parts_case *)user;
    if (strcmp(ck_row(v)->name, "w") != 0) return 0;
    for (int i = 0; i < 3; i++) {
        snprintf(out[i].name, 2, "%c", "qkv"[i]);
        out[i].transpose = c->turned, out[i].rows = c->rows[i];
    }
    return 3;
}
/* Element (i, j) of q, k, v is 100, 200, 300 + 10 i + j, or the transpose. */
static void make_parts(const char *path, const parts_case *c) {
    fsdp_safetensors_entry e[3];
    float data[64];
    char *room = (char *)lab_zeros(4096, 1);
    int n = 0;
    memset(e, 0, sizeof e);
    for (const char *p = c->there; *p; p++, n++) {
        int rows = *p == 'q' ? PART_Q : *p == 'k' ? PART_K : PART_V;
        e[n].name = *p == 'q' ? "q" : *p == 'k' ? "k" : *p == 'v' ? "v" : "x";
        e[n].dtype = FSDP_F32, e[n].ndim = 2;
        e[n].shape[c->turned] = rows, e[n].shape[!c->turned] = PART_COLS;
    }
    int64_t size = fsdp_safetensors_print(e, n, 0, NULL, NULL, 0, room + 8, 4000);
    CHECK(size > 0);
    memcpy(room, &size, 8);
    for (int k = 0; k < n; k++)
        for (int64_t at = 0; at < e[k].shape[0] * e[k].shape[1]; at++) {
            int i = (int)(at / e[k].shape[1]), j = (int)(at % e[k].shape[1]);
            data[e[k].begin / 4 + at] = (float)(100 * e[k].shape[c->turned] +
                                                (c->turned ? 10 * j + i : 10 * i + j));
        }
    memcpy(room + 8 + size, data, (size_t)e[n - 1].end);
    ck_spit(path, room, 8 + size + e[n - 1].end);
    free(room);
}
static void parts_body(lab_rank *r) {
    static const int begins[] = {0, PART_Q, PART_Q + PART_K, PART_Q + PART_K + PART_V};
    const parts_case *c = (const parts_case *)r->arg;
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    fsdp_param_view v;
    char path[600];
    ck_model m;
    ck_dir(path, "parts.safetensors");
    if (r->rank == 0) make_parts(path, c);
    CALL(r->w, fsdp_barrier(r->w));
    ck_begin(&m, r, r->w, &base, &adamw_2);
    CALL(r->w, fsdp_param_at(m.model, 0, &v));
    for (int64_t k = 0; k < v.numel; k++) ((float *)v.shard)[k] = -1;
    ld.source = part_sources, ld.user = r->arg, ld.partial = c->partial;
    if (c->text) refuse_load(&m, path, &ld, FSDP_ERR_INVALID_ARG, c->text);
    else CALL(r->w, fsdp_checkpoint_load(m.ck, path, &ld));
    for (int64_t k = 0; k < v.numel && !c->text; k++) {
        int row = (int)(fsdp_view_index(&v, k) / PART_COLS), of = row < 1 ? 0 : row < 3 ? 1 : 2;
        int col = (int)(fsdp_view_index(&v, k) % PART_COLS);
        float want = (float)(100 * (of + 1) + 10 * (row - begins[of]) + col);
        if (!strchr(c->there, "qkv"[of])) want = -1;
        W_CHECK(((float *)v.shard)[k] == want, "row %d: %g, expected %g", row,
                (double)((float *)v.shard)[k], (double)want);
    }
    if (!c->text)
        CHECK_EQ_INT(ck_report(&m).num_missing, 3 - (int)strspn(c->there, "qkv"));
    ck_end(&m);
}
TEST_P(checkpoint, parts_of_a_tensor, parts) {
    lab_run(2, NULL, parts_body, (void *)(uintptr_t)row);
}

/* Two parameters come from one tensor, and some rows of it again: bytes that are read twice count
   once in the checksum of their block. Each byte that is needed once is read once. */
static int tied_source(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    (void)user;
    if (v->ndim == 2) snprintf(out[0].name, sizeof out[0].name, "h.0.w");
    return v->dtype == FSDP_F32;
}
static const ck_param tied_rows[] = {{0, "w", FSDP_F32, 2, {6, 4}, 0, 0, 0},
                                     {0, "head", FSDP_F32, 2, {6, 4}, 0, 0, 0},
                                     {1, "b", FSDP_F32, 1, {3}, 0, 0, 0},
                                     {1, "x", FSDP_F32, 2, {6, 4}, 0, 0, 0}};
static const ck_net tied_net = {tied_rows, COUNT(tied_rows)};
static void tied_body(lab_rank *r) {
    static const ck_layout at = {"tied", 1, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0};
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, &tied_net, &at);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    ck_load(&m, dir, 1, FSDP_VERIFY_READ);
    CHECK_EQ_INT(ck_report(&m).bytes, ck_report(&m).total_bytes);
    ck_fill(&m, 2);
    ld.source = tied_source;
    CALL(r->w, fsdp_checkpoint_load(m.ck, ck_step_path(dir, 1), &ld));
    CHECK(ck_report(&m).verified);
    const uint64_t h = ck_name_hash("h.0.w");
    for (int p = 0; p < 4; p++) {
        fsdp_param_view v;
        CALL(r->w, fsdp_param_at(m.model, p, &v));
        for (int64_t k = 0; k < v.numel && v.ndim == 2; k++) {
            uint64_t bits = lab_hash(1, h, (uint64_t)k, 0);
            CHECK_EQ_MEM((float *)v.shard + k, &bits, 4);
        }
    }
    ck_end(&m);
}
TEST(checkpoint, tied_sources) { lab_run(1, NULL, tied_body, NULL); }

/* ---- checksums ------------------------------------------------------------------------------- */

static const ck_param long_rows[] = {{0, "w", FSDP_F32, 2, {3000, 100}, 0, 0, 0}};
static const ck_net long_net = {long_rows, 1};
static const ck_layout long_at = {"long", 1, CK_FSDP, 0, 0, 0, CK_ADAMW, 0, 0, 0, 0, 0, 0};
enum { LONG_FLIP = (2 << 20) + 77 }; /* in block 2 of 4: exp_avg, and part of exp_avg_sq */

static void save_long(lab_rank *r) {
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, &long_net, &long_at);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "long"), 1);
    ck_end(&m);
}
static void flip(const char *path, int64_t at_data) {
    int64_t nbytes, header = 0;
    char *file = ck_slurp(path, &nbytes);
    CHECK(file != NULL);
    memcpy(&header, file, 8);
    CHECK(8 + header + at_data < nbytes);
    file[8 + header + at_data] ^= 16;
    ck_spit(path, file, nbytes);
    free(file);
}
static void load_long(lab_rank *r) {
    static const char text[] = "block 2 (bytes 2097152..3145728 of the data) has CRC ";
    ck_layout at = long_at;
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    char dir[512];
    ck_model m;
    at.size = r->size;
    ck_begin(&m, r, r->w, &long_net, &at);
    ck_fill(&m, 2);
    const char *path = ck_step_path(ck_dir(dir, "long"), 1);
    ld.verify = FSDP_VERIFY_ALL;
    refuse_load(&m, path, &ld, FSDP_ERR_CORRUPT, text); /* before anything is changed */
    ld.params_only = 1;
    refuse_load(&m, path, &ld, FSDP_ERR_CORRUPT, text);
    ld.verify = FSDP_VERIFY_READ; /* the damaged block is not read */
    CALL(r->w, fsdp_checkpoint_load(m.ck, path, &ld));
    ck_check_params(&m, 1);
    CHECK_EQ_INT(ck_report(&m).verified, 1);
    CHECK(ck_report(&m).bytes >= 1200000 / r->size && ck_report(&m).bytes <= 2 << 20);
    REFUSED_AS(FSDP_ERR_CORRUPT, r->w, fsdp_checkpoint_load(m.ck, path, NULL), text);
    ld.params_only = 0, ld.verify = FSDP_VERIFY_NONE;
    CALL(r->w, fsdp_checkpoint_load(m.ck, path, &ld)); /* without a check */
    CHECK_EQ_INT(ck_report(&m).verified, 0);
    ck_check_params(&m, 1);
    ck_end(&m);
}
TEST_P(checkpoint, verify, sizes, row->size > 3 ? MANY_RANKS : 0) {
    char dir[512];
    lab_run(1, NULL, save_long, NULL);
    flip(ck_shard_path(ck_dir(dir, "long"), 1, 0), LONG_FLIP);
    lab_run(row->size, NULL, load_long, NULL);
}

/* ---- errors of create, save, find and load --------------------------------------------------- */

typedef struct bad_place {
    const char *name, *text;
    int on_save; /* create accepts it */
} bad_place;
enum {
    P_TWICE,
    P_RESERVED,
    P_FSDP,
    P_REPLICA,
    P_REPLICAS,
    P_BEFORE,
    P_BEYOND,
    P_HOLE,
    P_OVERLAP,
    P_SHAPES,
    P_UTF8,
    P_METADATA
};
static const bad_place bad_places[] = {
    {"twice",
     "[E425] checkpoint_create: 'optim.state.same.exp_avg': two tensors have this name: give units",
     0},
    {"reserved", "[E425] checkpoint_create: 'optim.state.x': names that begin with", 0},
    {"fsdp", "[E425] checkpoint_create: 'fsdp.x': names that begin with 'optim.state.' or 'fsdp.'",
     0},
    {"replica", "[E425] checkpoint_create: 'h.0.w': place: expected 0 <= replica < num_replicas",
     0},
    {"replicas", "[E425] checkpoint_create: 'h.0.w': place: expected 0 <= replica", 0},
    {"before",
     "[E426] checkpoint_create: place of 'h.0.w': dim 0 begins at -1 and has 6 of 6 rows: start + "
     "rows must lie in the whole tensor",
     0},
    {"beyond", "[E426] checkpoint_create: place of 'h.0.w': dim 1 begins at 2 and has 4 of 5 rows",
     0},
    {"hole",
     "[E429] checkpoint_save: tensor 'h.0.w': its boxes hold 24 of 32 elements, so some rows are "
     "in no file",
     1},
    {"overlap",
     "[E429] checkpoint_save: tensor 'h.0.w': rank 0 and rank 1 both hold row 3 of dim 0: give "
     "desc.place. If tensor parallelism cuts the tensor, it says where each part begins in the "
     "whole (fsdp_tp_view); if ranks hold copies, it tells replicas apart",
     1},
    {"shapes",
     "[E429] checkpoint_save: tensor 'h.0.w' has another dtype, rank or whole shape in rank 1 than "
     "in rank 0",
     1},
    {"utf8", "[E425] checkpoint_create: 'a\xff': a name in a file is UTF-8, and not '__metadata__'",
     0},
    {"metadata", "[E425] checkpoint_create: '__metadata__': a name in a file is UTF-8, and not", 0},
};
static void place_badly(void *user, const fsdp_param_view *v, fsdp_checkpoint_place *p) {
    const int how = (int)((const bad_place *)user - bad_places);
    const int second = v->start[0] > 0; /* on rank 1 */
    if (v->ordinal > 1) return;
    if (how == P_TWICE) snprintf(p->name, sizeof p->name, "same");
    if (v->ordinal) return;
    if (how == P_RESERVED) snprintf(p->name, sizeof p->name, "optim.state.x");
    if (how == P_FSDP) snprintf(p->name, sizeof p->name, "fsdp.x");
    if (how == P_REPLICA) p->replica = 2, p->num_replicas = 2;
    if (how == P_REPLICAS) p->num_replicas = 0;
    if (how == P_BEFORE) p->start[0] = -1;
    if (how == P_BEYOND) p->start[1] = 2, p->shape[1] = 5;
    if (how == P_HOLE) p->shape[0] = 8;
    if (how == P_OVERLAP) p->shape[0] = 7, p->start[0] = second ? 0 : 1;
    if (how == P_SHAPES) p->shape[0] = second ? 7 : 6;
    if (how == P_UTF8) snprintf(p->name, sizeof p->name, "a\xff");
    if (how == P_METADATA) snprintf(p->name, sizeof p->name, "__metadata__");
}
static void bad_place_body(lab_rank *r) {
    const bad_place *b = (const bad_place *)r->arg;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    fsdp_checkpoint *ck = NULL;
    char dir[512];
    ck_model m;
    ck_make(&m, r, r->w, &base, &adamw_2);
    ck_optimizers(&m);
    d.place = place_badly, d.user = r->arg;
    if (b->on_save) {
        CALL(r->w, fsdp_checkpoint_create(m.model, &d, &ck));
        for (int again = 0; again < 2; again++)
            REFUSED(r->w, fsdp_checkpoint_save(ck, ck_dir(dir, "run"), 1), b->text);
        CHECK_EQ_INT(ck_num_names(dir), -1);
        fsdp_checkpoint_destroy(ck);
    } else {
        REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck), b->text);
        CHECK(ck == NULL);
    }
    ck_open(&m, NULL); /* the model is unchanged */
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    ck_fill(&m, 2);
    ck_load(&m, dir, 1, FSDP_VERIFY_ALL);
    ck_check(&m, 1, 1);
    ck_end(&m);
}
TEST_P(checkpoint_errors, place, bad_places) {
    lab_run(2, NULL, bad_place_body, (void *)(uintptr_t)row);
}

/* Parts of tensor parallelism that are saved as if each were the full tensor: even ones overlap,
   uneven ones have different shapes. */
static void tp_without_place(lab_rank *r) {
    static const ck_layout at = {"tp_1x2", 2, CK_TP, 1, 2, 0, CK_NONE, 0, 0, 0, 0, 0, 0};
    for (int rows = 6; rows <= 7; rows++) {
        const ck_param w[] = {{0, "w", FSDP_F32, 2, {rows, 4}, 0, 0, 1}};
        const ck_net net = {w, 1};
        fsdp_checkpoint *ck = NULL;
        char dir[512];
        ck_model m;
        ck_make(&m, r, r->w, &net, &at);
        CALL(r->w, fsdp_checkpoint_create(m.model, NULL, &ck));
        REFUSED(r->w, fsdp_checkpoint_save(ck, ck_dir(dir, "run"), 1), "[E429]");
        REFUSED(r->w, fsdp_checkpoint_save(ck, dir, 1), "desc.place");
        REFUSED(r->w, fsdp_checkpoint_save(ck, dir, 1), "tensor parallelism cuts");
        fsdp_checkpoint_destroy(ck);
        ck_end(&m);
    }
}
TEST(checkpoint_errors, tp_without_place) { lab_run(2, NULL, tp_without_place, NULL); }

static void long_name(lab_rank *r) {
    char name[600];
    fsdp_param_desc p = fsdp_vec("w", 3);
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_checkpoint *ck;
    fsdp_model *model = lab_model(r->w, NULL);
    memset(name, 'n', sizeof name);
    name[509] = 0;
    p.name = name, ud.name = "uu";
    lab_unit(r->w, model, &ud, &p, 1);
    REFUSED(r->w, fsdp_checkpoint_create(model, NULL, &ck),
            "the name is longer than 511 bytes: shorten the names of unit and parameter");
    fsdp_model_destroy(model);
    model = lab_model(r->w, NULL);
    name[508] = 0;
    lab_unit(r->w, model, &ud, &p, 1);
    CALL(r->w, fsdp_checkpoint_create(model, NULL, &ck));
    fsdp_model_destroy(model); /* also destroys ck */
}
TEST(checkpoint_errors, long_name) { lab_run(2, NULL, long_name, NULL); }

/* "" leaves a parameter out if `place` sets it; otherwise the parameter has no name. */
static void leave_out(void *user, const fsdp_param_view *v, fsdp_checkpoint_place *place) {
    (void)user, (void)v;
    place->name[0] = 0;
}
static void no_name(lab_rank *r) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    for (int named = 0; named < 2; named++) { /* its unit's name does not matter */
        fsdp_param_desc p = fsdp_vec("", 3);
        fsdp_unit_desc ud = FSDP_ZERO;
        fsdp_checkpoint *ck;
        fsdp_model *model = lab_model(r->w, NULL);
        ud.name = named ? "unit" : "";
        lab_unit(r->w, model, &ud, &p, 1);
        d.param_names = named;
        d.place = NULL;
        REFUSED(r->w, fsdp_checkpoint_create(model, &d, &ck),
                "[E425] checkpoint_create: '': a parameter has no name");
        d.place = leave_out;
        CALL(r->w, fsdp_checkpoint_create(model, &d, &ck));
        fsdp_model_destroy(model);
    }
}
TEST(checkpoint_errors, no_name) { lab_run(2, NULL, no_name, NULL); }

/* Settings that must be equal on all ranks are compared, and nothing has changed. */
static int no_source(void *user, const fsdp_param_view *param, fsdp_checkpoint_source *out) {
    (void)user, (void)param, (void)out;
    return 0;
}
static void ranks_differ(lab_rank *r) {
    static const char *const loads[] = {
        "rank 1: [E448] checkpoint_load: desc.params_only is 1 here and 0 on rank 0: pass the same",
        "rank 1: [E448] checkpoint_load: desc.source (1: there is one) is 1 here and 0 on rank 0",
        "rank 1: [E448] checkpoint_load: desc.verify is 1 here and 0 on rank 0: pass the same",
        "rank 1: [E449] checkpoint_load: the path is '"};
    char dir[512], other[512], path[600], text[1400];
    ck_model m;
    snprintf(path, sizeof path, "%s", save_base(r, dir));
    ck_begin(&m, r, r->w, &base, &adamw_2);
    ck_fill(&m, 2);
    ck_save(&m, ck_dir(other, "other"), 1);
    for (int i = 0; i < COUNT(loads); i++) {
        fsdp_checkpoint_load_desc ld = FSDP_ZERO;
        if (r->rank && i == 0) ld.params_only = 1;
        if (r->rank && i == 1) ld.source = no_source;
        if (r->rank && i == 2) ld.verify = FSDP_VERIFY_ALL;
        refuse_load(&m, r->rank && i == 3 ? ck_step_path(other, 1) : path, &ld, FSDP_ERR_MISMATCH,
                    loads[i]);
    }
    snprintf(text, sizeof text, "here and '%.300s' on rank 0: pass the same on all ranks", path);
    refuse_load(&m, r->rank ? ck_step_path(other, 1) : path, NULL, FSDP_ERR_MISMATCH, text);
    for (int is_async = 0; is_async < 2; is_async++) {
        const char *call = is_async ? "checkpoint_save_async" : "checkpoint_save";
        fsdp_status (*save)(fsdp_checkpoint *, const char *,
                            int64_t) = is_async ? fsdp_checkpoint_save_async : fsdp_checkpoint_save;
        snprintf(text, sizeof text, "rank 1: [E448] %s: step is 6 here and 5 on rank 0: pass",
                 call);
        REFUSED_AS(FSDP_ERR_MISMATCH, r->w, save(m.ck, dir, 5 + r->rank), text);
        snprintf(text, sizeof text, "rank 1: [E449] %s: the path is '%.300s' here and '%.300s' on",
                 call, other, dir);
        REFUSED_AS(FSDP_ERR_MISMATCH, r->w, save(m.ck, r->rank ? other : dir, 5), text);
    }
    CHECK_EQ_INT(ck_num_names(dir), 1);
    CHECK_EQ_INT(ck_num_names(other), 1);
    ck_save(&m, dir, 5); /* the world still works */
    CALL(r->w, fsdp_checkpoint_load(m.ck, path, NULL));
    ck_check(&m, 1, 1);
    ck_end(&m);
}
TEST(checkpoint_errors, ranks_differ) { lab_run(2, NULL, ranks_differ, NULL); }

/* A rank that has found a failure itself does not log it again as another rank's. */
static void said_once(lab_rank *r) {
    char text[64];
    ck_model m;
    ck_begin(&m, r, r->w, &base, &adamw_2);
    snprintf(text, sizeof text, "rank %d: [E432] checkpoint_save: dir is empty", r->rank);
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, "", 1), text);
    CHECK(!strstr(fsdp_last_error(r->w), "E421"));
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, "", r->rank - 1),
            /* another rank's error */
            "rank 0: [E432] checkpoint_save: dir is empty or step is -1: pass");
    ck_end(&m);
}
TEST(checkpoint_errors, said_once) { lab_run(2, NULL, said_once, NULL); }

/* Steps that do not fit a manifest are refused; the last valid one is found. */
static void late_steps(lab_rank *r) {
    const int64_t last = (int64_t)1 << 62;
    char dir[512], path[600];
    int64_t step = 0;
    ck_model m;
    ck_begin(&m, r, r->w, &base, &adamw_2);
    ck_fill(&m, 1);
    ck_dir(dir, "run");
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, dir, last + 1), "pass a directory and a step of 0 to");
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, dir, INT64_MAX), "[E432]");
    ck_save(&m, dir, last - 1);
    ck_save(&m, dir, last);
    CALL(r->w, fsdp_checkpoint_find(m.ck, dir, -1, path, sizeof path, &step));
    CHECK_EQ_INT(step, last);
    CALL(r->w, fsdp_checkpoint_find(m.ck, dir, INT64_MAX, path, sizeof path, &step));
    CHECK_EQ_INT(step, last);
    CALL(r->w, fsdp_checkpoint_find(m.ck, dir, last - 1, path, sizeof path, &step));
    CHECK_EQ_INT(step, last - 1);
    ck_load(&m, dir, last, FSDP_VERIFY_ALL);
    ck_end(&m);
}
TEST(checkpoint, late_steps) { lab_run(2, NULL, late_steps, NULL); }

/* Also without a save under way. */
TEST(checkpoint_errors, aborted) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "aborted", 0);
    fsdp_param_desc p = fsdp_vec("w", 3);
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_checkpoint *ck;
    fsdp_world *w;
    int busy = 7;
    d.log_level = 0;
    CHECK_OK(fsdp_init(&d, &w));
    fsdp_model *model = lab_model(w, NULL);
    lab_unit(w, model, &ud, &p, 1);
    CALL(w, fsdp_checkpoint_create(model, NULL, &ck));
    CALL(w, fsdp_checkpoint_poll(ck, &busy));
    CALL(w, fsdp_checkpoint_wait(ck));
    fsdp_abort(w, "out of data");
    CHECK_STATUS(fsdp_checkpoint_poll(ck, &busy), FSDP_ERR_ABORTED);
    CHECK_STATUS(fsdp_checkpoint_wait(ck), FSDP_ERR_ABORTED);
    CHECK_EQ_INT(busy, 0);
    fsdp_model_destroy(model);
    CHECK_STATUS(fsdp_shutdown(w), FSDP_ERR_ABORTED);
}

/* Two objects save one step at the same time: the second one finds that it exists. */
static void same_step(lab_rank *r) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    fsdp_checkpoint *other;
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, &base, &adamw_2);
    d.no_sync = 1;
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &other));
    ck_fill(&m, 1);
    ck_dir(dir, "run");
    CALL(r->w, fsdp_checkpoint_save_async(m.ck, dir, 1));
    CALL(r->w, fsdp_checkpoint_save_async(other, dir, 1));
    CALL(r->w, fsdp_checkpoint_wait(m.ck));
    REFUSED(r->w, fsdp_checkpoint_wait(other), "step-00000001 is there already: choose another");
    CHECK_EQ_INT(ck_num_names(dir), 1);
    ck_fill(&m, 2);
    ck_load(&m, dir, 1, FSDP_VERIFY_ALL);
    ck_check(&m, 1, 1);
    ck_end(&m);
}
TEST(checkpoint_errors, same_step) { lab_run(2, NULL, same_step, NULL); }

/* A file larger than `ulimit -f` fails like a full disk. */
static void file_limit(lab_rank *r) {
    enum { BYTES = 1 << 20 };
    static char data[2][BYTES];
    fsdp_checkpoint_blob blob = {"large", data[r->rank], BYTES, 1, 0};
    fsdp_checkpoint_desc d = FSDP_ZERO;
    struct rlimit before, limit;
    char dir[512];
    ck_model m;
    ck_make(&m, r, r->w, &base, &adamw_2);
    d.blobs = &blob, d.num_blobs = 1, d.no_sync = 1;
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &m.ck));
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    CHECK(!getrlimit(RLIMIT_FSIZE, &before));
    limit = before;
    limit.rlim_cur = BYTES / 2;
    CALL(r->w, fsdp_barrier(r->w));
    CHECK(!setrlimit(RLIMIT_FSIZE, &limit));
    CALL(r->w, fsdp_barrier(r->w));
    REFUSED_AS(FSDP_ERR_IO, r->w, fsdp_checkpoint_save(m.ck, dir, 2), "checkpoint_save: write of ");
    W_CHECK(strstr(fsdp_last_error(r->w), strerror(EFBIG)), "%s", fsdp_last_error(r->w));
    CHECK_EQ_INT(ck_num_names(dir), 1);
    CALL(r->w, fsdp_barrier(r->w));
    CHECK(!setrlimit(RLIMIT_FSIZE, &before));
    CALL(r->w, fsdp_barrier(r->w));
    ck_save(&m, dir, 2);
    ck_end(&m);
}
TEST(checkpoint_errors, file_limit) { lab_run(2, NULL, file_limit, NULL); }

static void bad_descs(lab_rank *r) {
    static const char *const names[] = {
        NULL, "", "a b", "a/b",
        "a2345678901234567890123456789012345678901234567890123456789"
        "012345"};
    const fsdp_checkpoint_desc zero = FSDP_ZERO;
    fsdp_checkpoint_desc d = zero;
    fsdp_file_ops ops = ck_file_ops;
    fsdp_checkpoint *ck = (fsdp_checkpoint *)(uintptr_t)8;
    ck_model m;
    ck_make(&m, r, r->w, &base, &adamw_2);
    REFUSED(NULL, fsdp_checkpoint_create(NULL, NULL, &ck),
            "[E101] checkpoint_create: model or ck is NULL");
    REFUSED(r->w, fsdp_checkpoint_create(m.model, NULL, NULL),
            "[E101] checkpoint_create: model or");
    int32_t *const numbers[] = {&d.keep, &d.keep_every, &d.stall_ms};
    for (int i = 0; i < 3; i++) {
        *numbers[i] = -1;
        REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck),
                "[E445] checkpoint_create: keep, keep_every, stall_ms or stage_bytes is negative");
        CHECK(ck == NULL);
        d = zero;
    }
    d.stage_bytes = -1;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck), "[E445]");
    d = zero, d.files = &ops, ops.version = 2;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck), "or files is not of version 1");
    ops = ck_file_ops, ops.size--;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck), "[E445]");
    d = zero, d.start_canary = 7;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck), "fsdp_checkpoint_desc");
    d = zero, d.num_blobs = 1;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck),
            "[E101] checkpoint_create: desc.blobs is NULL");
    d.num_blobs = -1, d.blobs = m.blobs;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck), "[E101] checkpoint_");
    d.num_blobs = 2;
    m.blobs[0].name = "x";
    for (int i = 0; i < COUNT(names); i++) {
        char text[64];
        m.blobs[1].name = names[i];
        snprintf(text, sizeof text, "[E442] checkpoint_create: blob 1: expected a name of 1 to 64");
        REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck), text);
    }
    m.blobs[1].name = "y", m.blobs[1].nbytes = 1;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck), "[E442]");
    m.blobs[1].nbytes = -1;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck), "[E442]");
    m.blobs[1].name = "x", m.blobs[1].nbytes = 0;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck),
            "[E443] checkpoint_create: blobs 0 and 1 are both called 'x': give one of them");
    /* One rank with an error is enough. */
    d = zero, d.keep = r->rank ? -1 : 0;
    REFUSED(r->w, fsdp_checkpoint_create(m.model, &d, &ck),
            "rank 1: [E445] checkpoint_create: keep, keep_every");
    d = zero;
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &ck));
    CHECK(ck != NULL);
    fsdp_model_destroy(m.model);
}
TEST(checkpoint_errors, descs) { lab_run(2, NULL, bad_descs, NULL); }

static void bad_calls(lab_rank *r) {
    static char long_path[5000];
    char dir[512], path[600];
    int busy = 7;
    int64_t step = 7;
    fsdp_checkpoint_report report;
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    ck_model m;
    ck_begin(&m, r, r->w, &base, &adamw_2);
    ck_fill(&m, 1);
    ck_dir(dir, "run");
    REFUSED(NULL, fsdp_checkpoint_save(NULL, dir, 1), "[E101] checkpoint_save: ck is NULL");
    REFUSED(NULL, fsdp_checkpoint_save_async(NULL, dir, 1), "checkpoint_save_async: ck is NULL");
    REFUSED(NULL, fsdp_checkpoint_poll(NULL, &busy), "checkpoint_poll: ck is NULL");
    REFUSED(NULL, fsdp_checkpoint_wait(NULL), "checkpoint_wait: ck is NULL");
    REFUSED(NULL, fsdp_checkpoint_load(NULL, dir, NULL), "checkpoint_load: ck is NULL");
    REFUSED(NULL, fsdp_checkpoint_find(NULL, dir, -1, path, 600, &step), "checkpoint_find: ck is");
    REFUSED(NULL, fsdp_checkpoint_last_report(NULL, &report), "checkpoint_last_report: ck or out");
    REFUSED(r->w, fsdp_checkpoint_last_report(m.ck, NULL), "checkpoint_last_report: ck or out");
    CHECK_EQ_INT(fsdp_checkpoint_nbytes(NULL), -1);
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, NULL, 1),
            "[E432] checkpoint_save: dir is empty or step");
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, "", 1), "[E432]");
    REFUSED(r->w, fsdp_checkpoint_save_async(m.ck, dir, -1),
            "step is -1: pass a directory and a step");
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, dir, r->rank - 1),
            "rank 0: [E432] checkpoint_save: dir");
    memset(long_path, '/', sizeof long_path - 1);
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, long_path, 1),
            "[E431] checkpoint_save: the path of the directory is longer than 3936 bytes");
    REFUSED(r->w, fsdp_checkpoint_load(m.ck, long_path, NULL),
            "[E447] checkpoint_load: path is empty");
    REFUSED(r->w, fsdp_checkpoint_load(m.ck, "", NULL),
            "[E447] checkpoint_load: path is empty or too");
    REFUSED(r->w, fsdp_checkpoint_load(m.ck, NULL, NULL), "[E447]");
    ld.end_canary = 9;
    REFUSED(r->w, fsdp_checkpoint_load(m.ck, dir, &ld), "fsdp_checkpoint_load_desc");
    REFUSED(r->w, fsdp_checkpoint_find(m.ck, NULL, -1, path, 600, &step),
            "[E101] checkpoint_find: dir, path or step is NULL");
    REFUSED(r->w, fsdp_checkpoint_find(m.ck, dir, -1, NULL, 600, &step), "[E101] checkpoint_");
    REFUSED(r->w, fsdp_checkpoint_find(m.ck, dir, -1, path, 600, NULL), "[E101] checkpoint_");
    snprintf(path, sizeof path,
             "[E446] checkpoint_find: a path in dir does not fit: pass room for "
             "%d bytes",
             (int)strlen(dir) + 96);
    REFUSED(r->w, fsdp_checkpoint_find(m.ck, dir, -1, path + 300, strlen(dir) + 95, &step), path);
    CHECK_EQ_INT(ck_num_names(dir), -1);
    CALL(r->w, fsdp_checkpoint_poll(m.ck, &busy)); /* no save is under way */
    CHECK_EQ_INT(busy, 0);
    CALL(r->w, fsdp_checkpoint_poll(m.ck, NULL));
    CALL(r->w, fsdp_checkpoint_wait(m.ck));
    ck_save(&m, dir, 1);
    snprintf(path, sizeof path, "%.500s is there already: choose another step or directory",
             ck_step_path(dir, 1));
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, dir, 1), path);
    REFUSED(r->w, fsdp_checkpoint_save(m.ck, dir, 1), "[E423] checkpoint_save: ");
    REFUSED(r->w, fsdp_checkpoint_save_async(m.ck, dir, 1), path);
    CHECK_EQ_INT(ck_num_names(dir), 1);
    ck_save(&m, dir, 2);
    CHECK_EQ_INT(ck_num_names(dir), 2);
    ck_end(&m);
}
TEST(checkpoint_errors, calls) { lab_run(2, NULL, bad_calls, NULL); }

/* Checks each state of a step: saves are possible exactly if all units are idle and hold no
   gradients. */
static void in_state(ck_model *m, const char *dir, int64_t *step, int possible, const char *text) {
    fsdp_world *w = m->w;
    if (possible) {
        ck_save(m, dir, ++*step);
        CALL(w, fsdp_checkpoint_save_async(m->ck, dir, ++*step));
        CALL(w, fsdp_checkpoint_wait(m->ck));
        ck_load(m, dir, *step, FSDP_VERIFY_READ);
        return;
    }
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_checkpoint_save(m->ck, dir, *step + 1), text);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_checkpoint_save_async(m->ck, dir, *step + 1), text);
    REFUSED_AS(FSDP_ERR_INVALID_STATE, w, fsdp_checkpoint_load(m->ck, ck_step_path(dir, 1), NULL),
               strstr(text, "E430") ? "[E203] checkpoint_load: unit '" : text);
}
static void use_in_backward(fsdp_world *w, fsdp_unit *u) {
    CALL(w, fsdp_pre_backward(u));
    CHECK(fsdp_grad(u, 0) != NULL);
    CALL(w, fsdp_post_backward(u));
}
static void states(lab_rank *r) {
    static const char unit_0[] = "checkpoint_", held[] = "[E430] checkpoint_save";
    fsdp_world *w = r->w;
    const ck_layout at = {
        "states", r->size, r->size > 2 ? CK_HSDP : CK_FSDP, 2, 2, 0, CK_NONE, 0, 0, 0, 0, 0, 0};
    const ck_net net = {base_rows, 2};
    char dir[512];
    int64_t step = 0;
    ck_model m;
    ck_begin(&m, r, w, &net, &at);
    ck_fill(&m, 1);
    ck_dir(dir, "run");
    in_state(&m, dir, &step, 1, "");
    fsdp_unit *u = m.unit[0];
    for (int round = 0; round < 2; round++) { /* 0: the unit is resharded after its forward */
        CALL(w, fsdp_set_reshard_after_forward(m.model, NULL, round ? FSDP_RESHARD_NEVER : 1));
        CALL(w, fsdp_pre_forward(u));
        in_state(&m, dir, &step, 0, unit_0);
        CALL(w, fsdp_post_forward(u));
        in_state(&m, dir, &step, 1, "");
        CALL(w, fsdp_pre_backward(u));
        in_state(&m, dir, &step, 0, unit_0);
        CALL(w, fsdp_post_backward(u));
        in_state(&m, dir, &step, 0, unit_0);
        CALL(w, fsdp_finalize_backward(m.model));
        in_state(&m, dir, &step, 1, "");
        CALL(w, fsdp_zero_grad(m.model));
        in_state(&m, dir, &step, 1, "");
    }
    CALL(w, fsdp_unshard(u));
    CALL(w, fsdp_wait(u));
    in_state(&m, dir, &step, 1, "");
    CALL(w, fsdp_reshard(u));
    CALL(w, fsdp_set_requires_gradient_sync(m.model, NULL, 0));
    lab_forward(w, u);
    use_in_backward(w, u);
    CALL(w, fsdp_finalize_backward(m.model));
    in_state(&m, dir, &step, 0, held);
    CALL(w, fsdp_set_requires_gradient_sync(m.model, NULL, 1));
    if (r->size > 2) CALL(w, fsdp_set_requires_all_reduce(m.model, NULL, 0));
    lab_forward(w, u);
    use_in_backward(w, u);
    CALL(w, fsdp_finalize_backward(m.model));
    in_state(&m, dir, &step, r->size == 2, held); /* HSDP: the unit holds sums of the shards */
    CALL(w, fsdp_set_requires_all_reduce(m.model, NULL, 1));
    lab_forward(w, u);
    use_in_backward(w, u);
    CALL(w, fsdp_finalize_backward(m.model));
    in_state(&m, dir, &step, 1, "");
    ck_end(&m);
}
static const struct {
    const char *name;
    int size;
} state_sizes[] = {{"fsdp_2", 2}, {"hsdp_2x2", 4}};
TEST_P(checkpoint_errors, states, state_sizes) { lab_run(row->size, NULL, states, NULL); }

/* ---- files that fail, and checkpoints that are found ----------------------------------------- */

/* Fails one kind of call on a path that contains this word, on one rank. */
typedef struct fault {
    const char *name;
    int rank;
    const char *call, *word;
    int error;
    const char *text; /* error of the save; NULL: it succeeds, with a warning */
} fault;
static const fault faults[] = {
    {"no_space", 1, "write", "shard-00002", ENOSPC, "rank 1: [E423] checkpoint_save: write of "},
    {"fsync", 1, "sync", "shard-00002", EIO, "rank 1: [E423] checkpoint_save: fsync of "},
    {"close", 0, "close", "shard-00001", EIO, "rank 0: [E423] checkpoint_save: close of "},
    {"create", 1, "create", "shard-00002", EACCES, "rank 1: [E423] checkpoint_save: create of "},
    {"mkdir", 0, "make_dir", ".tmp-step-", EROFS, "rank 0: [E423] checkpoint_save: mkdir of "},
    {"manifest", 0, "write", "manifest.json", ENOSPC, "rank 0: [E423] checkpoint_save: write of "},
    {"sync_dir", 0, "sync_dir", ".tmp-step-", EIO,
     "rank 0: [E423] checkpoint_save: fsync of the directory of "},
    {"rename", 0, "rename", "step-00000002", EIO, "rank 0: [E423] checkpoint_save: rename of "},
    {"late", 0, "sync_dir", "", EIO, NULL},
    {"remove", 0, "rename", ".tmp-delete-", EPERM, NULL},
};
static int fail_call(ck_files *f, const char *call, const char *path) {
    const fault *x = (const fault *)f->user;
    if (!x || f->rank != x->rank || strcmp(call, x->call) != 0 || !strstr(path, x->word)) return 0;
    return *x->word || !strstr(path, ".tmp-") ? x->error : 0; /* "": the directory of the run */
}
static void fault_body(lab_rank *r) {
    const fault *x = (const fault *)r->arg;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    ck_files files;
    char dir[512];
    ck_model m;
    memset(&files, 0, sizeof files);
    files.before = fail_call, files.rank = r->rank;
    d.files = &ck_file_ops, d.files_user = &files, d.keep = 1;
    ck_make(&m, r, r->w, &base, &adamw_2);
    ck_optimizers(&m);
    ck_open(&m, &d);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    files.user = r->arg;
    if (x->text) {
        REFUSED_AS(FSDP_ERR_IO, r->w, fsdp_checkpoint_save(m.ck, dir, 2), x->text);
        REFUSED_AS(FSDP_ERR_IO, r->w, fsdp_checkpoint_save(m.ck, dir, 2), strerror(x->error));
        CALL(r->w, fsdp_barrier(r->w));
        CHECK_EQ_INT(ck_num_names(dir), 1); /* no part of it is left */
        files.user = NULL;
    } else {
        ck_save(&m, dir, 2);
        if (r->rank == 0)
            W_CHECK(strstr(fsdp_last_error(r->w), "[E433] checkpoint_save: ") &&
                        strstr(fsdp_last_error(r->w), "step-00000002 is complete, but: "),
                    "%s", fsdp_last_error(r->w));
        CHECK_EQ_INT(ck_report(&m).step, 2);
        CHECK_EQ_INT(ck_num_names(dir), 2); /* the old one stays */
        files.user = NULL;
    }
    ck_save(&m, dir, 3);
    CHECK_EQ_INT(ck_num_names(dir), 1);
    ck_fill(&m, 2);
    ck_load(&m, dir, 3, FSDP_VERIFY_ALL);
    ck_visit t = {CK_CHECK, 1, -1, 0, 0};
    ck_visit_params(&m, &t);
    ck_visit_states(&m, &t);
    ck_end(&m);
}
TEST_P(checkpoint_errors, files, faults) { lab_run(2, NULL, fault_body, (void *)(uintptr_t)row); }

static void make_dir(const char *dir, const char *name) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    CHECK(!mkdir(path, 0755));
}
static void make_file(const char *dir, const char *name, const char *text) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    ck_spit(path, text, (int64_t)strlen(text));
}
/* Returns a bit for each name of the list that exists. */
static unsigned there(const char *dir, const char *const *names, int count) {
    unsigned bits = 0;
    char path[1024];
    for (int i = 0; i < count; i++) {
        snprintf(path, sizeof path, "%s/%s", dir, names[i]);
        bits |= (unsigned)ck_exists(path) << i;
    }
    return bits;
}

static void keep_body(lab_rank *r) {
    static const char *const foreign[] = {"step-5",
                                          "step-0000000x",
                                          "step-00000003.old",
                                          "notes",
                                          ".hidden",
                                          ".tmp-other",
                                          "step-00000099",
                                          "step-000000004",
                                          ".tmp-step-00000001-00ff",
                                          ".tmp-delete-00000001"};
    const int num = COUNT(foreign);
    fsdp_checkpoint_desc d = FSDP_ZERO;
    char dir[512], path[600];
    int64_t step;
    ck_model m;
    ck_make(&m, r, r->w, &base, &adamw_2);
    ck_optimizers(&m);
    d.keep = 2, d.keep_every = 3;
    ck_open(&m, &d);
    ck_fill(&m, 1);
    ck_dir(dir, "run");
    if (r->rank == 0) {
        CHECK(!mkdir(dir, 0755));
        for (int i = 0; i < num; i++)
            if (i == 3) make_file(dir, foreign[i], "a note");
            else make_dir(dir, foreign[i]);
        make_file(dir, "step-00000099/manifest.json", "is broken");
        make_file(dir, ".tmp-step-00000001-00ff/shard", "of a job that was killed");
    }
    CALL(r->w, fsdp_barrier(r->w));
    for (step = 0; step <= 7; step++) ck_save(&m, dir, step);
    for (step = 0; step <= 7; step++) /* every third, and the newest two: 6 is both */
        W_CHECK(ck_exists(ck_step_path(dir, step)) == (step % 3 == 0 || step == 7), "step %d",
                (int)step);
    ck_save(&m, dir, 8);
    CHECK_EQ_INT(there(dir, foreign, num), 0xff); /* leftovers of jobs are removed, nothing else */
    CHECK_EQ_INT(ck_num_names(dir), 5 + 8);
    CALL(r->w, fsdp_checkpoint_find(m.ck, dir, -1, path, sizeof path, &step));
    CHECK_EQ_INT(step, 8); /* not the broken one */
    ck_save(&m, dir, 2);   /* an older step: newer ones stay */
    CHECK(ck_exists(ck_step_path(dir, 7)) && ck_exists(ck_step_path(dir, 8)));
    ck_load(&m, dir, 0, FSDP_VERIFY_ALL);
    ck_end(&m);
}
TEST(checkpoint, keep) { lab_run(2, NULL, keep_body, NULL); }

static void make_link(const char *dir, const char *name, const char *to) {
    char path[1024];
    snprintf(path, sizeof path, "%s/%s", dir, name);
    CHECK(!symlink(to, path));
}
/* Removal never follows a link, but removes directories that someone has put into a checkpoint. */
static void keep_links(lab_rank *r) {
    static const char *const archive[] = {"best/shard", "best/inner/shard"};
    fsdp_checkpoint_desc d = FSDP_ZERO;
    char dir[512], arch[512];
    ck_model m;
    ck_make(&m, r, r->w, &base, &adamw_2);
    ck_optimizers(&m);
    d.keep = d.no_sync = 1;
    ck_open(&m, &d);
    ck_fill(&m, 1);
    ck_dir(dir, "run");
    ck_dir(arch, "arch");
    ck_save(&m, dir, 2);
    if (r->rank == 0) {
        CHECK(!mkdir(arch, 0755));
        make_dir(arch, "best");
        make_dir(arch, "best/inner");
        for (int i = 0; i < COUNT(archive); i++) make_file(arch, archive[i], "weights");
        make_link(dir, "step-00000001", "../arch/best");
        make_link(dir, ".tmp-step-00000003-00ff", "../arch/best");
        make_link(dir, ".tmp-delete-4", "../arch/best/");
        make_dir(dir, "step-00000002/notes");
        make_dir(dir, "step-00000002/notes/deep");
        make_file(dir, "step-00000002/notes/deep/note", "a note");
        make_link(dir, "step-00000002/notes/link", "../../../arch/best");
        make_link(dir, "step-00000002/notes/loop", "loop");
    }
    CALL(r->w, fsdp_barrier(r->w));
    ck_save(&m, dir, 5);
    W_CHECK(!strstr(fsdp_last_error(r->w), "E433"), "%s", fsdp_last_error(r->w));
    CHECK_EQ_INT(ck_num_names(dir), 1);
    CHECK(ck_exists(ck_step_path(dir, 5)));
    CHECK_EQ_INT(there(arch, archive, COUNT(archive)), 3);
    CHECK_EQ_INT(ck_num_names(arch), 1);
    ck_end(&m);
}
TEST(checkpoint, keep_links) { lab_run(2, NULL, keep_links, NULL); }

/* keep 0: nothing is ever removed. */
static void keep_all(lab_rank *r) {
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, &base, &adamw_2);
    ck_fill(&m, 1);
    ck_dir(dir, "run");
    if (r->rank == 0) {
        CHECK(!mkdir(dir, 0755));
        make_dir(dir, ".tmp-step-00000001-00ff");
    }
    CALL(r->w, fsdp_barrier(r->w));
    for (int step = 0; step < 5; step++) ck_save(&m, dir, step);
    CHECK_EQ_INT(ck_num_names(dir), 6);
    ck_end(&m);
}
TEST(checkpoint, keep_all) { lab_run(2, NULL, keep_all, NULL); }

/* There are more names than one pass examines: the newest ones count, in whatever order the file
   system lists them. Only `complete` has a manifest. */
enum { MANY = 5000, LOOKED_AT = 4096 };
typedef struct many_names {
    ck_files files;
    int order, complete;
} many_names;
static int many_before(ck_files *f, const char *call, const char *path) {
    const many_names *n = (const many_names *)f->user;
    char leaf[32];
    snprintf(leaf, sizeof leaf, "/step-%08d/", n->complete);
    return !strcmp(call, "open") && !strstr(path, leaf) ? ENOENT : 0;
}
static int many_list(void *user, const char *path, int (*each)(void *arg, const char *name),
                     void *arg) {
    const many_names *n = (const many_names *)((ck_files *)user)->user;
    if (strstr(path, "step-")) return ck_f_list(user, path, each, arg);
    for (int i = 0; i < MANY; i++) {
        char name[32];
        int step = n->order == 0 ? i : n->order == 1 ? MANY - 1 - i : i * 1777 % MANY;
        snprintf(name, sizeof name, "step-%08d", step);
        if (each(arg, name)) break;
    }
    return 0;
}
static void find_in_many(lab_rank *r) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    fsdp_file_ops ops = ck_file_ops;
    many_names n;
    char dir[512], path[700];
    int64_t step;
    ck_model m;
    memset(&n, 0, sizeof n);
    n.files.user = &n;
    ops.list = many_list;
    d.no_sync = 1, d.files = &ops, d.files_user = &n.files;
    ck_make(&m, r, r->w, &base, &adamw_2);
    ck_open(&m, &d);
    for (int newest = 0; newest < 2; newest++) { /* the oldest of them, and one of the newest */
        n.complete = newest ? MANY - 2 : MANY - LOOKED_AT;
        ck_save(&m, ck_dir(dir, "run"), n.complete);
        n.files.before = many_before;
        for (n.order = 0; n.order < 3; n.order++) {
            CALL(r->w, fsdp_checkpoint_find(m.ck, dir, -1, path, sizeof path, &step));
            W_CHECK(step == n.complete, "order %d: found %d", n.order, (int)step);
        }
        n.files.before = NULL;
    }
    ck_end(&m);
}
TEST(checkpoint, find_in_many) { lab_run(1, NULL, find_in_many, NULL); }

static void find_is(ck_model *m, const char *dir, int64_t max_step, int64_t want) {
    char path[700], text[700] = "";
    int64_t step = 77;
    memset(path, 'x', sizeof path);
    CALL(m->w, fsdp_checkpoint_find(m->ck, dir, max_step, path, sizeof path, &step));
    if (want >= 0) snprintf(text, sizeof text, "%s", ck_step_path(dir, want));
    W_CHECK(step == want && !strcmp(path, text), "found %lld in '%s', expected %lld",
            (long long)step, path, (long long)want);
}
static void change_manifest(const char *dir, int64_t step, const char *from, const char *to) {
    char path[700], *at;
    int64_t nbytes;
    snprintf(path, sizeof path, "%s/manifest.json", ck_step_path(dir, step));
    char *text = ck_slurp(path, &nbytes);
    CHECK(text && (at = strstr(text, from)) != NULL && strlen(from) == strlen(to));
    memcpy(at, to, strlen(to));
    snprintf(text + nbytes - 11, 12, "%08x\"}\n",
             (unsigned)fsdp_crc32c(0, text, nbytes - 23)); /* with a valid checksum */
    ck_spit(path, text, nbytes);
    free(text);
}
static void find_body(lab_rank *r) {
    char dir[512], path[700];
    int64_t nbytes, step;
    ck_model m;
    ck_begin(&m, r, r->w, &base, &adamw_2);
    ck_fill(&m, 1);
    ck_dir(dir, "run");
    find_is(&m, dir, -1, -1);           /* the directory does not exist yet */
    for (int way = 0; way < 2; way++) { /* no save could make this directory: find fails early */
        char none[600], into[600], text[1500];
        snprintf(none, sizeof none, "%s/none/run%s", h_tmpdir(), way ? "/" : "");
        snprintf(into, sizeof into, "%s/none", h_tmpdir());
        snprintf(text, sizeof text, "%s cannot be made, since there is no directory %s: make that",
                 none, into);
        REFUSED_AS(FSDP_ERR_IO, r->w,
                   fsdp_checkpoint_find(m.ck, none, -1, path, sizeof path, &step), text);
        REFUSED_AS(FSDP_ERR_IO, r->w, fsdp_checkpoint_save(m.ck, none, 1), text);
    }
    for (int i = 1; i <= 9; i += 2) ck_save(&m, dir, i);
    ck_save(&m, dir, 100000000);
    if (r->rank == 0) {
        make_dir(dir, "step-00000004"); /* without a manifest */
        make_dir(dir, ".tmp-step-00000200-0123456789abcdef");
        make_file(dir, "step-00000300", "is no directory");
        make_dir(dir, "step-123");
        make_link(dir, "step-00000400", "step-00000400"); /* a loop */
        make_dir(dir, "step-00000500");
        make_dir(dir, "step-00000500/manifest.json");
        make_dir(dir, "step-00000600");
        make_link(dir, "step-00000600/manifest.json", "nowhere");
    }
    CALL(r->w, fsdp_barrier(r->w));
    find_is(&m, dir, -1, 100000000);
    find_is(&m, dir, 99999999, 9);
    refuse_load(&m, dir, NULL, FSDP_ERR_INVALID_ARG,
                "run: it is no checkpoint, but has some in it: pass one of them, for example "
                "run/step-100000000 (fsdp_checkpoint_find gives the newest one of ours)");
    for (int64_t max_step = 0; max_step < 11; max_step++)
        find_is(&m, dir, max_step,
                max_step == 0  ? -1
                : max_step > 9 ? 9
                               : (max_step + 1) / 2 * 2 - 1);
    CALL(r->w, fsdp_barrier(r->w));
    if (r->rank == 0) {
        remove(ck_shard_path(dir, 100000000, 1));                 /* missing */
        char *text = ck_slurp(ck_shard_path(dir, 9, 0), &nbytes); /* truncated */
        ck_spit(ck_shard_path(dir, 9, 0), text, nbytes - 1);
        free(text);
        snprintf(path, sizeof path, "%s/manifest.json", ck_step_path(dir, 7)); /* a changed digit */
        text = ck_slurp(path, &nbytes);
        text[30] ^= 1;
        ck_spit(path, text, nbytes);
        free(text);
        change_manifest(dir, 5, "\"fsdp_checkpoint\":1", "\"fsdp_checkpoint\":2");
    }
    CALL(r->w, fsdp_barrier(r->w));
    find_is(&m, dir, -1, 3);
    find_is(&m, dir, 2, 1);
    REFUSED_AS(FSDP_ERR_CORRUPT, r->w, fsdp_checkpoint_load(m.ck, ck_step_path(dir, 9), NULL),
               "shard-00001-model-00001-of-00001.safetensors: is cut off: ");
    REFUSED_AS(FSDP_ERR_CORRUPT, r->w, fsdp_checkpoint_load(m.ck, ck_step_path(dir, 7), NULL),
               "step-00000007/manifest.json: the manifest was changed");
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, r->w, fsdp_checkpoint_load(m.ck, ck_step_path(dir, 5), NULL),
               "manifest version 2, this library reads 1");
    if (r->rank == 0) { /* another valid header of equal size */
        char *text = ck_slurp(ck_shard_path(dir, 1, 1), &nbytes), *at = text;
        while (at < text + nbytes - 5 && memcmp(at, "\"2/2\"", 5) != 0) at++;
        at[3] = '3';
        ck_spit(ck_shard_path(dir, 1, 1), text, nbytes);
        free(text);
    }
    CALL(r->w, fsdp_barrier(r->w));
    REFUSED_AS(FSDP_ERR_CORRUPT, r->w, fsdp_checkpoint_load(m.ck, ck_step_path(dir, 1), NULL),
               "shard-00002-model-00001-of-00001.safetensors: its header is not the one that the "
               "manifest was written for");
    ck_load(&m, dir, 3, FSDP_VERIFY_ALL);
    ck_check(&m, 1, 1);
    ck_end(&m);
}
TEST(checkpoint, find) { lab_run(2, NULL, find_body, NULL); }

/* ---- invalid directories and files ----------------------------------------------------------- */

static void spit_safetensors(const char *path, const char *header, int64_t data) {
    char file[1024];
    uint64_t n = strlen(header);
    memset(file, 0, sizeof file);
    memcpy(file, &n, 8);
    memcpy(file + 8, header, (size_t)n);
    ck_spit(path, file, 8 + (int64_t)n + data);
}
#define ENTRY(name, dtype, shape, begin, end)                                                      \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" begin "," end \
    "]}"
#define BOX(name, start, whole)                                                                    \
    "\\\"" name "\\\":{\\\"saved_offsets\\\":[" start "],\\\"global_shape\\\":[" whole "]}"
#define SHARDED(boxes) "\"__metadata__\":{\"DCP_SHARDING_INFO\":\"{" boxes "}\"},"

typedef struct odd {
    const char *name;
    const char *file, *header; /* in a directory; NULL: none */
    int64_t data;
    const char *second, *second_header;
    int64_t second_data;
    const char *index; /* model.safetensors.index.json, or the name of .metadata */
    fsdp_status status;
    const char *text;
} odd;
static const odd odds[] = {
    {"nothing", NULL, NULL, 0, NULL, NULL, 0, NULL, FSDP_ERR_CORRUPT,
     "/odd: it has no manifest.json and no .safetensors file: is it a checkpoint?"},
    {"pickled", NULL, NULL, 0, NULL, NULL, 0, ".metadata", FSDP_ERR_UNSUPPORTED,
     "/odd: a checkpoint of PyTorch in pickled form: save it with "
     "HuggingFaceStorageWriter(save_distributed=True)"},
    {"no_json", "a.safetensors", "[]", 0, NULL, NULL, 0, NULL, FSDP_ERR_CORRUPT,
     "/odd/a.safetensors: at byte 8"},
    {"cut_off", "a.safetensors", "{" ENTRY("v", "F32", "2", "0", "8") "}", 7, NULL, NULL, 0, NULL,
     FSDP_ERR_CORRUPT, "a.safetensors: is cut off: 7 bytes of data, the header tells 8"},
    {"boolean", "a.safetensors", "{" ENTRY("v", "BOOL", "2", "0", "2") "}", 2, NULL, NULL, 0, NULL,
     FSDP_ERR_UNSUPPORTED,
     "[E437] checkpoint_load: 'v' is BOOL with 1 dims there, which the library does not have"},
    {"nine_dims", "a.safetensors", "{" ENTRY("v", "F32", "1,1,1,1,1,1,1,1,2", "0", "8") "}", 8,
     NULL, NULL, 0, NULL, FSDP_ERR_UNSUPPORTED, "'v' is F32 with 9 dims there"},
    {"hole", "a.safetensors", "{" SHARDED(BOX("v", "0", "2")) ENTRY("v", "F32", "1", "0", "4") "}",
     4, NULL, NULL, 0, NULL, FSDP_ERR_CORRUPT,
     "/odd: tensor 'v': its boxes hold 1 of 2 elements, so some rows are in no file"},
    {"overlap", "a.safetensors",
     "{" SHARDED(BOX("v", "0", "3")) ENTRY("v", "F32", "2", "0", "8") "}", 8, "b.safetensors",
     "{" SHARDED(BOX("v", "1", "3")) ENTRY("v", "F32", "2", "0", "8") "}", 8, NULL,
     FSDP_ERR_CORRUPT, "tensor 'v': a.safetensors and b.safetensors both hold row 1 of dim 0"},
    {"dtypes", "a.safetensors",
     "{" SHARDED(BOX("v", "0", "2")) ENTRY("v", "F32", "1", "0", "4") "}", 4, "b.safetensors",
     "{" SHARDED(BOX("v", "1", "2")) ENTRY("v", "F16", "1", "0", "2") "}", 2, NULL,
     FSDP_ERR_CORRUPT,
     "tensor 'v' has another dtype, rank or whole shape in b.safetensors than in a.safetensors"},
    {"index_lies", "a.safetensors", "{" ENTRY("v", "F32", "2", "0", "8") "}", 8, NULL, NULL, 0,
     "{\"weight_map\":{\"v\":\"a.safetensors\",\"x\":\"a.safetensors\"}}", FSDP_ERR_CORRUPT,
     "model.safetensors.index.json: it names tensor 'x', which is in no file"},
    {"index_lacks", "a.safetensors",
     "{" ENTRY("v", "F32", "2", "0", "8") "," ENTRY("y", "U8", "1", "8", "9") "}", 9, NULL, NULL, 0,
     "{\"weight_map\":{\"v\":\"a.safetensors\"}}", FSDP_ERR_CORRUPT,
     "model.safetensors.index.json: tensor 'y' is in a file, and the index does not name it"},
    {"index_swaps", "a.safetensors", "{" ENTRY("v", "F32", "2", "0", "8") "}", 8, "b.safetensors",
     "{" ENTRY("y", "U8", "1", "0", "1") "}", 1,
     "{\"weight_map\":{\"v\":\"b.safetensors\",\"y\":\"a.safetensors\"}}", FSDP_ERR_CORRUPT,
     "tensor 'v' is in another file than the index says"},
    {"index_without_file", NULL, NULL, 0, NULL, NULL, 0,
     "{\"weight_map\":{\"v\":\"a.safetensors\"}}", FSDP_ERR_CORRUPT,
     "/odd: it lacks a.safetensors, which model.safetensors.index.json names"},
    {"index_of_paths", NULL, NULL, 0, NULL, NULL, 0,
     "{\"weight_map\":{\"v\":\"../a.safetensors\"}}", FSDP_ERR_CORRUPT,
     "model.safetensors.index.json: "},
    {"index_is_empty", NULL, NULL, 0, NULL, NULL, 0, "{}", FSDP_ERR_CORRUPT,
     "expected weight_map, then the end"},
};
static const ck_param vector_rows[] = {{0, "v", FSDP_F32, 1, {2}, 0, 0, 0}};
static const ck_net vector = {vector_rows, 1};
static void name_v(void *user, const fsdp_param_view *v, fsdp_checkpoint_place *p) {
    (void)user, (void)v;
    snprintf(p->name, sizeof p->name, "v");
}
static void make_odd(const odd *o, const char *dir) {
    char path[700];
    CHECK(!mkdir(dir, 0755));
    snprintf(path, sizeof path, "%s/%s", dir, o->file ? o->file : "");
    if (o->file) spit_safetensors(path, o->header, o->data);
    snprintf(path, sizeof path, "%s/%s", dir, o->second ? o->second : "");
    if (o->second) spit_safetensors(path, o->second_header, o->second_data);
    if (o->index && *o->index == '.') make_file(dir, o->index, "");
    else if (o->index) make_file(dir, "model.safetensors.index.json", o->index);
    make_file(dir, ".a.safetensors", "is hidden");
    make_file(dir, "a b.safetensors", "has another name");
}
static void odd_body(lab_rank *r) {
    const odd *o = (const odd *)r->arg;
    fsdp_checkpoint_desc d = FSDP_ZERO;
    char dir[512];
    ck_model m;
    ck_make(&m, r, r->w, &vector, &plain_2);
    d.place = name_v;
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &m.ck));
    ck_fill(&m, 1);
    ck_dir(dir, "odd");
    if (r->rank == 0) make_odd(o, dir);
    CALL(r->w, fsdp_barrier(r->w));
    refuse_load(&m, dir, NULL, o->status, o->text);
    ck_end(&m);
}
TEST_P(checkpoint_errors, directories, odds) { lab_run(2, NULL, odd_body, (void *)(uintptr_t)row); }

/* A single file; boxes that occur twice; a path that does not exist. */
static void plain_files(lab_rank *r) {
    static const char twice[] = "{" SHARDED(BOX("v", "0", "2"))
        ENTRY("v", "F32", "2", "0", "8") "}";
    const float want[2] = {1.5f, -2};
    fsdp_checkpoint_desc d = FSDP_ZERO;
    char dir[512], path[700];
    ck_model m;
    ck_make(&m, r, r->w, &vector, &plain_2);
    d.place = name_v;
    CALL(r->w, fsdp_checkpoint_create(m.model, &d, &m.ck));
    ck_fill(&m, 1);
    ck_dir(dir, "files");
    if (r->rank == 0) {
        CHECK(!mkdir(dir, 0755));
        for (int i = 0; i < 2; i++) {
            int64_t nbytes;
            snprintf(path, sizeof path, "%s/%d.safetensors", dir, i);
            spit_safetensors(path, twice, 8);
            char *file = ck_slurp(path, &nbytes);
            memcpy(file + nbytes - 8, want, 8);
            ck_spit(path, file, nbytes);
            free(file);
        }
    }
    CALL(r->w, fsdp_barrier(r->w));
    for (int way = 0; way < 2; way++) {
        fsdp_param_view v = lab_view(r->w, m.unit[0], 0);
        ck_fill(&m, 1);
        snprintf(path, sizeof path, "%s%s", dir, way ? "/1.safetensors" : "");
        CALL(r->w, fsdp_checkpoint_load(m.ck, path, NULL));
        CHECK_EQ_INT(v.numel, 1);
        CHECK_EQ_MEM(v.shard, &want[r->rank], 4);
        /* Read once, from one of the two; one rank has compared them. */
        CHECK_EQ_INT(ck_report(&m).bytes, 4 + (way || r->rank ? 0 : 2 * 8));
    }
    CALL(r->w, fsdp_barrier(r->w));
    if (r->rank == 0) {
        int64_t nbytes;
        snprintf(path, sizeof path, "%s/1.safetensors", dir);
        char *file = ck_slurp(path, &nbytes);
        file[nbytes - 1] ^= 1;
        ck_spit(path, file, nbytes);
        free(file);
    }
    CALL(r->w, fsdp_barrier(r->w));
    refuse_load(&m, dir, NULL, FSDP_ERR_CORRUPT,
                "is in 0.safetensors and in 1.safetensors with other values: keep the file that");
    snprintf(path, sizeof path, "%s/none", dir);
    refuse_load(&m, path, NULL, FSDP_ERR_IO, "none: there is no such file or directory");
    snprintf(path, sizeof path, "%s/0.safetensors/x", dir);
    refuse_load(&m, path, NULL, FSDP_ERR_IO, "x: there is no such file or directory");
    ck_end(&m);
}
TEST(checkpoint, plain_files) { lab_run(2, NULL, plain_files, NULL); }

/* ---- freeze and thaw ------------------------------------------------------------------------- */

static void check_state(const ck_model *m, int ordinal, uint64_t seed) { /* seed 0: zeros */
    fsdp_param_view v = FSDP_ZERO;
    fsdp_optim_state s;
    char name[64];
    CALL(m->w, fsdp_param_at(m->model, ordinal, &v));
    CALL(m->w, fsdp_adamw_state(m->adamw, ordinal, &s));
    CHECK_EQ_INT(s.numel, v.numel);
    ck_visit t = {CK_CHECK, seed, -1, 0, 0};
    snprintf(name, sizeof name, "h.%d.%s.exp_avg", ck_row(&v)->unit, ck_row(&v)->name);
    for (int64_t k = 0; k < s.numel && !seed; k++)
        CHECK(((float *)s.first)[k] == 0 && ((float *)s.second)[k] == 0);
    if (seed) ck_array(m, &t, name, s.dtype, FSDP_MEMORY_DEVICE, s.first, s.numel, &v);
    snprintf(name, sizeof name, "h.%d.%s.step", ck_row(&v)->unit, ck_row(&v)->name);
    if (seed) ck_number(&t, name, s.step, 0);
    else CHECK_EQ_INT(*s.step, 0);
}
static void freeze_thaw(lab_rank *r) {
    char dir[512];
    ck_model m;
    /* The object is older than the optimizer. */
    ck_make(&m, r, r->w, &base, &adamw_2);
    ck_open(&m, NULL);
    ck_fill(&m, 9);
    ck_save(&m, ck_dir(dir, "run"), 0);
    ck_optimizers(&m); /* changes the layout */
    ck_fill(&m, 1);
    ck_save(&m, dir, 1);
    CALL(r->w, fsdp_set_requires_grad(m.unit[0], 1, 0)); /* 'b' is now frozen */
    ck_fill(&m, 2);
    ck_save(&m, dir, 2);
    ck_end(&m);

    ck_begin(&m, r, r->w, &base, &adamw_2); /* saved frozen, loaded thawed */
    ck_fill(&m, 3);
    ck_load(&m, dir, 2, FSDP_VERIFY_READ);
    ck_check_params(&m, 2);
    check_state(&m, 0, 2);
    ck_load(&m, dir, 1, FSDP_VERIFY_READ);
    ck_check(&m, 1, 1);
    ck_end(&m);

    ck_make(&m, r, r->w, &base, &adamw_2); /* saved thawed, loaded frozen, then thawed */
    CALL(r->w, fsdp_set_requires_grad(m.unit[0], 1, 0));
    ck_optimizers(&m);
    ck_open(&m, NULL);
    ck_fill(&m, 3);
    ck_load(&m, dir, 1, FSDP_VERIFY_READ);
    ck_check(&m, 1, 1);
    CHECK_EQ_INT(ck_report(&m).num_extra, 0);
    check_state(&m, 1, 1); /* reserved for the thaw */
    CALL(r->w, fsdp_set_requires_grad(m.unit[0], 1, 1));
    check_state(&m, 1, 1);
    ck_load(&m, dir, 1, FSDP_VERIFY_READ);
    ck_check(&m, 1, 1);
    CHECK_EQ_INT(ck_report(&m).num_extra, 0);
    CALL(r->w, fsdp_set_requires_grad(m.unit[1], 0, 1)); /* a parameter without states so far */
    ck_fill(&m, 5);
    ck_load(&m, dir, 1, FSDP_VERIFY_READ);
    ck_check_params(&m, 1);
    check_state(&m, 2, 0);
    check_state(&m, 1, 1);
    ck_fill(&m, 6);
    ck_save(&m, dir, 3); /* the layout is new */
    ck_fill(&m, 7);
    ck_load(&m, dir, 3, FSDP_VERIFY_ALL);
    ck_check(&m, 6, 1);
    ck_end(&m);
}
TEST_P(checkpoint, freeze_thaw, sizes, NCCL | (row->size > 3 ? MANY_RANKS : 0)) {
    lab_run(row->size, NULL, freeze_thaw, NULL);
}

/* States of a frozen parameter survive loads and saves by other numbers of ranks. */
static const ck_param slow_rows[] = {{0, "w", FSDP_F64, 2, {7, 5}, 0, 0, 0},
                                     {0, "d", FSDP_F64, 2, {4, 2}, 1, 0, 0},
                                     {1, "bf", FSDP_BF16, 1, {9}, 0, 0, 0},
                                     {1, "w", FSDP_BF16, 2, {3, 2}, 0, 0, 0},
                                     {1, "late", FSDP_BF16, 1, {6}, 0, 1, 0}};
static const ck_net slow_net = {slow_rows, COUNT(slow_rows)};
typedef struct held_case {
    const char *name;
    int optim, sizes[3], step; /* step: number of loads so far */
} held_case;
static const held_case helds[] = {{"adamw/3,2,4", CK_ADAMW, {3, 2, 4}, 0},
                                  {"adamw/2,2,2", CK_ADAMW, {2, 2, 2}, 0},
                                  {"adamw/1,8,1", CK_ADAMW, {1, 8, 1}, 0},
                                  {"momentum/2,3,1", CK_MOMENTUM, {2, 3, 1}, 0},
                                  {"sgd/2,3,1", CK_SGD, {2, 3, 1}, 0}};
static void held_body(lab_rank *r) {
    const held_case *c = (const held_case *)r->arg;
    const ck_layout at = {"held", r->size, CK_FSDP, 0, 0, 0, c->optim, 0, 0, 0, 0, 0, 0};
    char dir[512];
    ck_model m;
    ck_dir(dir, "run");
    ck_make(&m, r, r->w, &slow_net, &at);
    for (int i = 0; c->step == 1 && i < 2; i++) /* the unit is frozen from the start */
        CALL(r->w, fsdp_set_requires_grad(m.unit[0], i, 0));
    ck_optimizers(&m);
    if (c->step == 0) CALL(r->w, fsdp_set_requires_grad(m.unit[1], 2, 1)); /* thawed later */
    if (c->step == 2) CALL(r->w, fsdp_set_requires_grad(m.unit[0], 0, 0));
    ck_open(&m, NULL);
    ck_fill(&m, c->step ? 7 : 1);
    if (c->step) {
        ck_load(&m, dir, c->step, FSDP_VERIFY_READ);
        CHECK_EQ_INT(ck_report(&m).num_extra, 0);
        ck_check(&m, 1, r->size == c->sizes[c->step - 1]);
    }
    ck_save(&m, dir, c->step + 1);
    for (int i = 0; i < 5; i++) /* all have states now, those of the first save */
        CALL(r->w, fsdp_set_requires_grad(m.unit[i > 1], i > 1 ? i - 2 : i, 1));
    ck_check(&m, 1, c->step == 0 || r->size == c->sizes[c->step - 1]);
    ck_end(&m);
}
TEST_P(checkpoint, frozen_states, helds) {
    held_case c = *row;
    for (; c.step < 3; c.step++) lab_run(c.sizes[c.step], NULL, held_body, &c);
}

/* States that nothing takes are reported, on one rank. */
static int nobody(void *user, const fsdp_param_view *v) {
    (void)user, (void)v;
    return -1;
}
static void tells_dropped(lab_rank *r) {
    static const char *const all = "has 6 states of parameters of this model that nothing here "
                                   "takes, and they are dropped: 'optim.state.h.0.b.exp_avg', "
                                   "'optim.state.h.0.b.exp_avg_sq', 'optim.state.h.0.b.step', ...";
    fsdp_checkpoint_load_desc ld = FSDP_ZERO;
    fsdp_checkpoint_desc cd = FSDP_ZERO;
    fsdp_adamw_desc ad = fsdp_adamw_defaults();
    char dir[512], path[600];
    ck_model m;
    ad.group = nobody;
    snprintf(path, sizeof path, "%s", save_base(r, dir));
    for (int how = 0; how < 5;
         how++) { /* no optimizer, none for it, skip_frozen; taken, params_only */
        ck_make(&m, r, r->w, &base, &adamw_2);
        if (how == 1) CALL(r->w, fsdp_adamw_create(m.model, &ad, &m.adamw));
        if (how == 2) CALL(r->w, fsdp_set_requires_grad(m.unit[0], 0, 0));
        if (how >= 2) ck_optimizers(&m);
        cd.skip_frozen = how == 2, cd.no_sync = 1, cd.num_blobs = 2;
        ck_open(&m, &cd);
        (void)fsdp_fail(r->w, FSDP_OK, "nothing");
        ld.params_only = how == 4;
        CALL(r->w, fsdp_checkpoint_load(m.ck, path, &ld));
        const char *said = fsdp_last_error(r->w);
        if (how < 2 && r->rank == 0) W_CHECK(strstr(said, all), "%d: %s", how, said);
        else if (how == 2 && r->rank == 0)
            W_CHECK(strstr(said, "[E450]") && strstr(said, "has 3 states"), "%d: %s", how, said);
        else W_CHECK(!strstr(said, "E450"), "%d: %s", how, said);
        ck_end(&m);
    }
}
TEST(checkpoint, reports_dropped_states) { lab_run(2, NULL, tells_dropped, NULL); }

/* A name that is another one plus a dot: states of 'w.0' are not those of 'w'. */
static const ck_param alike_rows[] = {{0, "w", FSDP_F32, 1, {5}, 0, 1, 0},
                                      {0, "w.0", FSDP_F32, 1, {4}, 0, 0, 0}};
static const ck_net alike_net = {alike_rows, 2};
static void alike_body(lab_rank *r) {
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, &alike_net, &adamw_2);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    ck_end(&m);
    ck_begin(&m, r, r->w, &alike_net, &adamw_2); /* 'w' has no states: none are reserved */
    ck_load(&m, dir, 1, FSDP_VERIFY_READ);
    ck_check(&m, 1, 1);
    CALL(r->w, fsdp_set_requires_grad(m.unit[0], 0, 1)); /* now they are zeros */
    ck_fill(&m, 2);
    ck_load(&m, dir, 1, FSDP_VERIFY_READ);
    check_state(&m, 0, 0);
    check_state(&m, 1, 1);
    ck_end(&m);
}
TEST(checkpoint, names_with_a_common_prefix) { lab_run(2, NULL, alike_body, NULL); }

/* Frozen parameters are left out on request; a model that was cast is saved in its current dtypes.
   */
static void skip_frozen(lab_rank *r) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    char dir[512];
    ck_model m;
    ck_make(&m, r, r->w, &base, &adamw_2);
    ck_optimizers(&m);
    d.skip_frozen = d.no_sync = 1, d.num_blobs = 2;
    ck_open(&m, &d);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    CHECK_EQ_INT(ck_report(&m).total_bytes, 3 * (24 + 3) * 4 + 2 * 8 + 5 + 3 * r->size);
    ck_fill(&m, 2);
    ck_load(&m, dir, 1, FSDP_VERIFY_READ);
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(m.model, &v)) {
        char name[16];
        ck_visit t = {CK_CHECK, v.requires_grad ? 1u : 2u, -1, 0, 0};
        snprintf(name, sizeof name, "h.%d.%s", ck_row(&v)->unit, ck_row(&v)->name);
        ck_array(&m, &t, name, v.dtype, FSDP_MEMORY_DEVICE, v.shard, v.numel, &v);
    }
    ck_end(&m);
}
TEST(checkpoint, skip_frozen) { lab_run(2, NULL, skip_frozen, NULL); }

/* A model whose only trainable parameter has no elements: it has a step, and no rank has a part. */
static const ck_param empty_rows[] = {{0, "none", FSDP_F32, 2, {0, 3}, 0, 0, 0},
                                      {0, "i", FSDP_I32, 1, {4}, 0, 1, 0}};
static const ck_net empty_net = {empty_rows, 2};
static void empty_body(lab_rank *r) {
    char dir[512];
    ck_model m;
    ck_begin(&m, r, r->w, &empty_net, &adamw_2);
    ck_fill(&m, 1);
    ck_save(&m, ck_dir(dir, "run"), 1);
    ck_fill(&m, 2);
    ck_load(&m, dir, 1, FSDP_VERIFY_READ);
    ck_check(&m, 1, 1);
    ck_end(&m);
}
TEST(checkpoint, without_elements) { lab_run(2, NULL, empty_body, NULL); }
