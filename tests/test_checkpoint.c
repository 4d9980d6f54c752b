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
