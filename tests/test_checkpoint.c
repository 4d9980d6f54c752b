/* test_checkpoint.c - checkpoints of a model: what is saved is loaded, by any number of ranks on any
   mesh, to the bit; what the files are; what is refused, and with which text.

   SPDX-License-Identifier: MIT */
#include "lab_ckmodel.h"
#include "golden.h"

#define COUNT(table) (int)(sizeof(table) / sizeof *(table))

/* ---- roundtrip ------------------------------------------------------------------------------- */

static const ck_param every_rows[] = {
    {0, "w", FSDP_F32, 2, {7, 5}, 0, 0, 0},      {0, "b", FSDP_F32, 1, {3}, 0, 0, 0},
    {0, "side", FSDP_F32, 2, {5, 11}, 1, 0, 0},  {0, "none", FSDP_F32, 2, {0, 3}, 0, 0, 0},
    {0, "d", FSDP_F64, 2, {4, 2}, 0, 0, 0},      {0, "half", FSDP_F16, 3, {3, 4, 5}, 2, 0, 0},
    {0, "bf", FSDP_BF16, 1, {9}, 0, 0, 0},       {1, "w", FSDP_F32, 2, {64, 6}, 0, 0, 0},
    {1, "i8", FSDP_I8, 1, {5}, 0, 1, 0},         {1, "u8", FSDP_U8, 1, {11}, 0, 1, 0},
    {1, "i32", FSDP_I32, 2, {2, 2}, 1, 1, 0},    {1, "i64", FSDP_I64, 1, {3}, 0, 1, 0},
    {1, "frozen", FSDP_BF16, 1, {7}, 0, 1, 0},   {1, "one", FSDP_F32, 1, {1}, 0, 0, 0},
    {2, "deep", FSDP_F32, 3, {2, 3, 4}, 1, 0, 0}};
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
TEST_P(checkpoint, roundtrip, roundtrips) { run_bare(row, roundtrip, row); }

/* ---- reshard --------------------------------------------------------------------------------- */

static const ck_param cut_by_rows[] = {
    {0, "w", FSDP_F32, 2, {37, 19}, 0, 0, 1},      {0, "b", FSDP_F32, 1, {3}, 0, 0, 1},
    {0, "tall", FSDP_F32, 2, {400, 100}, 0, 0, 1}, {0, "bf", FSDP_BF16, 2, {6, 5}, 0, 0, 1},
    {1, "norm", FSDP_F32, 1, {19}, 0, 0, 0},       {1, "i", FSDP_I64, 1, {5}, 0, 1, 0},
    {1, "d", FSDP_F64, 2, {2, 2}, 0, 0, 0}};
static const ck_net by_rows = {cut_by_rows, COUNT(cut_by_rows)};
static const ck_param cut_by_columns[] = {
    {0, "side", FSDP_F32, 2, {5, 37}, 1, 0, 2}, {0, "c", FSDP_F32, 3, {6, 4, 10}, 2, 0, 1},
    {0, "w", FSDP_F32, 2, {8, 6}, 0, 0, 2},     {0, "wide", FSDP_F32, 2, {4, 9000}, 1, 0, 1},
    {1, "n", FSDP_BF16, 2, {4, 3}, 1, 0, 0},    {1, "deep", FSDP_F64, 3, {3, 5, 2}, 1, 0, 0}};
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
        if (r->rank) CHECK_EQ_INT(files.read, report.bytes); /* rank 0 reads headers, too */
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
TEST(checkpoint, reshard_by_rows) { reshard_all(&by_rows); }
TEST(checkpoint, reshard_by_columns) { reshard_all(&by_columns); }

/* Replicas share the rows of what is large: no file has a row more of a tensor than another. */
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
    /* Chunks of FSDP and those of replicas differ by a row; a step and the blobs are in one file. */
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

/* The library writes the bytes that tests/golden/example.py made by the rules alone. */
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
        if (i < 2) same_file(mine, other); /* the same values: the same bytes */
    }
    snprintf(other, sizeof other, "%.400s/example/step-00000017", golden_dir());
    memset(loader, 0, sizeof loader);
    memset(rng, r->rank, sizeof rng);
    CALL(r->w, fsdp_checkpoint_load(m.ck, other, NULL)); /* and it reads what Python wrote */
    CHECK_EQ_MEM(loader, "abc", 3);
    CHECK_EQ_MEM(rng, r->rank ? "\1\2" : "\0\0", 2);
    CHECK_EQ_INT(ck_report(&m).step, 17);
    CHECK_EQ_INT(ck_report(&m).per_rank_blobs, 1);
    ck_end(&m);
}
TEST(checkpoint, files_of_the_example) { lab_run(2, NULL, example, NULL); }

/* A rank that has nothing to write has no file. */
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
    d.skip_frozen = 1; /* a second object, and nothing at all to write */
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

/* ---- what PyTorch and transformers wrote ----------------------------------------------------- */

static const ck_param torch_rows[] = {
    {0, "w", FSDP_F32, 2, {37, 19}, 0, 0, 0},     {0, "b", FSDP_F32, 1, {19}, 0, 0, 0},
    {0, "side", FSDP_F32, 2, {5, 37}, 1, 0, 0},   {0, "tiny", FSDP_F32, 1, {2}, 0, 0, 0},
    {0, "frozen", FSDP_BF16, 1, {7}, 0, 1, 0},    {0, "half", FSDP_F16, 3, {3, 4, 5}, 0, 0, 0},
    {0, "none", FSDP_F32, 2, {0, 3}, 0, 0, 0},    {1, "w", FSDP_F32, 2, {37, 19}, 0, 0, 0},
    {1, "b", FSDP_F32, 1, {19}, 0, 0, 0},         {1, "side", FSDP_F32, 2, {5, 37}, 1, 0, 0},
    {1, "tiny", FSDP_F32, 1, {2}, 0, 0, 0},       {1, "frozen", FSDP_BF16, 1, {7}, 0, 1, 0},
    {1, "half", FSDP_F16, 3, {3, 4, 5}, 0, 0, 0}, {1, "none", FSDP_F32, 2, {0, 3}, 0, 0, 0}};
static const ck_net torch_net = {torch_rows, COUNT(torch_rows)};

static void place_layers(void *user, const fsdp_param_view *v, fsdp_checkpoint_place *place) {
    const ck_model *m = (const ck_model *)user;
    if (m->dm) ck_place(user, v, place);
    snprintf(place->name, sizeof place->name, "layers.%d.%s", ck_row(v)->unit, ck_row(v)->name);
}

static uint32_t fnv32(const char *name) {
    uint32_t h = 0x811C9DC5u;
    for (; *name; name++) h = (h ^ (unsigned char)*name) * 0x01000193u;
    return h;
}
/* Element k, of the whole tensor, of a golden checkpoint. */
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
        snprintf(name, sizeof name, "layers.%d.%s", ck_row(&v)->unit, ck_row(&v)->name);
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
        snprintf(name, sizeof name, "optim.state.layers.%d.%s.exp_avg", ck_row(&v)->unit,
                 ck_row(&v)->name);
        check_golden(name, s.dtype, s.first, &v);
        snprintf(name, sizeof name, "optim.state.layers.%d.%s.exp_avg_sq", ck_row(&v)->unit,
                 ck_row(&v)->name);
        check_golden(name, s.dtype, s.second, &v);
        CHECK_EQ_INT(*s.step, has_step ? steps[ck_row(&v)->unit] : 4);
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
                "lacks 8 of 50 tensors: 'optim.state.layers.0.b.step', "
                "'optim.state.layers.0.side.step', 'optim.state.layers.0.tiny.step', ...; it has 0 "
                "that nobody asks for: set partial");
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
    CHECK_EQ_INT(cases, 7);
}
static const struct {
    const char *name;
    int size;
} sizes[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}, {"W=4", 4}};
TEST_P(checkpoint, of_pytorch, sizes) { lab_run(row->size, NULL, torch_cases, NULL); }

/* GPT-2 of transformers: its linears are stored the other way round, and query, key and value are
   one matrix. */
static const ck_param gpt2_rows[] = {{0, "embeddings", FSDP_F32, 2, {19, 8}, 0, 0, 0},
                                     {0, "head", FSDP_F32, 2, {13, 8}, 1, 0, 0},
                                     {1, "q", FSDP_F32, 2, {8, 8}, 0, 0, 0},
                                     {1, "k", FSDP_F32, 2, {8, 8}, 1, 0, 0},
                                     {1, "v", FSDP_BF16, 2, {8, 8}, 0, 0, 0},
                                     {1, "fc", FSDP_F32, 2, {32, 8}, 0, 0, 0},
                                     {1, "vk", FSDP_F32, 2, {16, 8}, 0, 0, 0},
                                     {1, "bias", FSDP_F64, 1, {24}, 0, 0, 0},
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
/* The whole parameter at (row, column), from the sources as they are listed. */
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
    CHECK(!"a row of no source");
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
TEST_P(checkpoint, of_transformers, sizes) { lab_run(row->size, NULL, gpt2, NULL); }
