/* test_export_model.c - the export of a live model has the bytes of a save and an export of its
   checkpoint. test_checkpoint_faults.c has its file calls fail, wait and hang.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO
#include "harness.h"
#include <sys/stat.h>
#include "lab_ckmodel.h"

enum { ROWS = 5, COLS = 3, MOST = 3 };
typedef struct {
    fsdp_model *m;
    fsdp_unit *unit[2];
    fsdp_checkpoint *ck;
    char run[512], from_disk[512], live[512], like[512];
} rig;
typedef struct {
    const char *name;
    int ranks;
} rank_count;
static const rank_count ranks_1_to_4[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}, {"W=4", 4}};

static void rig_open(rig *x, const lab_rank *r) {
    fsdp_param_desc p[4] = {fsdp_mat("weight", ROWS, COLS), fsdp_vec("bias", 70), FSDP_ZERO,
                            fsdp_mat("empty", 0, COLS)};
    fsdp_param_desc q = fsdp_mat("columns", ROWS, COLS);
    fsdp_unit_desc like = FSDP_ZERO;
    memset(x, 0, sizeof *x);
    p[2].name = "scale";
    q.shard_dim = 1, q.dtype = FSDP_BF16, q.frozen = 1;
    x->m = lab_model(r->w, NULL);
    like.name = "a";
    x->unit[0] = lab_unit(r->w, x->m, &like, p, 4);
    like.name = "b";
    x->unit[1] = lab_unit(r->w, x->m, &like, &q, 1);
    for (int u = 0; u < 2; u++) {
        for (int i = 0; i < (u ? 1 : 3); i++) {
            float full[70];
            for (int k = 0; k < 70; k++) full[k] = (float)(100 * u + 10 * i) + (float)k / 8;
            if (u) CHECK_OK(fsdp_convert(full, FSDP_BF16, full, FSDP_F32, ROWS * COLS));
            CALL(r->w, fsdp_param_load(x->unit[u], i, full));
        }
    }
    CALL(r->w, fsdp_checkpoint_create(x->m, NULL, &x->ck));
    ck_dir(x->run, "run"), ck_dir(x->from_disk, "disk"), ck_dir(x->live, "live");
    ck_dir(x->like, "like");
}

/* Compares two directories, file by file. */
static void same_files(const char *a, const char *b, int count) {
    static const char *const names[] = {"model.safetensors",
                                        "adapter.safetensors",
                                        "model-00001-of-00002.safetensors",
                                        "model-00002-of-00002.safetensors",
                                        "model.safetensors.index.json",
                                        "config.json"};
    int found = 0;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char path[2][640];
        int64_t n[2];
        snprintf(path[0], sizeof path[0], "%s/%s", a, names[i]);
        snprintf(path[1], sizeof path[1], "%s/%s", b, names[i]);
        char *x = ck_slurp(path[0], &n[0]), *y = ck_slurp(path[1], &n[1]);
        CHECK_MSG(!x == !y, "%s is in one only", names[i]);
        CHECK_EQ_INT(n[0], n[1]);
        if (x) CHECK_MSG(!memcmp(x, y, (size_t)n[0]), "%s differs", names[i]);
        found += x != NULL;
        free(x), free(y);
    }
    CHECK_EQ_INT(ck_num_names(a), count);
    CHECK_EQ_INT(found, count);
    CHECK_EQ_INT(ck_num_names(a), count);
    CHECK_EQ_INT(ck_num_names(b), count);
}

static int renames(void *user, const char *name, char *out) {
    (void)user;
    if (!strcmp(name, "a.bias")) return 0;
    snprintf(out, FSDP_CHECKPOINT_NAME, "base_model.%s", name);
    return 1;
}
static int transposes(void *user, const fsdp_param_view *v, fsdp_checkpoint_source *out) {
    (void)user;
    snprintf(out->name, sizeof out->name, "%s.t", v->name);
    out->transpose = v->ndim == 2;
    return 1;
}

static void same_bytes(lab_rank *r) {
    rig x;
    char text[600];
    rig_open(&x, r);
    CALL(r->w, fsdp_checkpoint_save(x.ck, x.run, 1));
    for (int i = 0; i < 7; i++) {
        static const fsdp_checkpoint_text other = {"config.json", "{ }", 3};
        fsdp_checkpoint_export_desc d = FSDP_ZERO;
        if (i == 1) d.dtype = FSDP_BF16, d.file_name = "adapter.safetensors";
        if (i == 2) d.rename = renames;
        if (i == 3) d.max_file_bytes = 100;
        if (i == 4) d.source = transposes;
        if (i >= 5) d.like = x.like; /* written by i 0 */
        if (i == 6) d.texts = &other, d.num_texts = 1, d.like_dtypes = 1, d.dtype = FSDP_F16;
        ck_dir(x.from_disk, "disk"), ck_dir(x.live, "live");
        snprintf(x.from_disk + strlen(x.from_disk), 8, "%d", i);
        snprintf(x.live + strlen(x.live), 8, "%d", i);
        CALL(r->w, fsdp_barrier(r->w));
        if (r->rank == 0) {
            fsdp_status status = fsdp_checkpoint_export(ck_step_path(x.run, 1), x.from_disk, &d,
                                                        text, sizeof text);
            CHECK_MSG(!status, "%s", text);
        }
        CALL(r->w, fsdp_checkpoint_export_model(x.ck, x.live, i ? &d : NULL));
        if (r->rank == 0) same_files(x.from_disk, x.live, i == 3 ? 3 : i >= 5 ? 2 : 1);
        if (r->rank == 0 && i == 0) {
            char config[600];
            CALL(r->w, fsdp_checkpoint_export(x.live, x.like, NULL, text, sizeof text));
            snprintf(config, sizeof config, "%s/config.json", x.like);
            ck_spit(config, "{}", 2);
        }
    }
}
TEST_P(export_model, same_bytes, ranks_1_to_4) { lab_run(row->ranks, NULL, same_bytes, NULL); }

/* What is refused is refused on all ranks, and the next call works. */
static void refused(lab_rank *r) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    rig x;
    rig_open(&x, r);
    CALL(r->w, fsdp_checkpoint_export_model(x.ck, x.live, NULL));
    REFUSED(r->w, fsdp_checkpoint_export_model(x.ck, x.live, NULL), "is there already");
    d.num_ranks = 1;
    REFUSED(r->w, fsdp_checkpoint_export_model(x.ck, x.from_disk, &d), "[E570]");
    d.num_ranks = 0, d.ema = 1;
    REFUSED(r->w, fsdp_checkpoint_export_model(x.ck, x.from_disk, &d), "fsdp_ema_swap");
    d.ema = 0, d.file_name = "weights";
    REFUSED(r->w, fsdp_checkpoint_export_model(x.ck, x.from_disk, &d), "NAME.safetensors");
    REFUSED(NULL, fsdp_checkpoint_export_model(NULL, x.from_disk, NULL), "ck is NULL");
    CALL(r->w, fsdp_pre_forward(x.unit[0]));
    CHECK_STATUS(fsdp_checkpoint_export_model(x.ck, x.from_disk, NULL), FSDP_ERR_INVALID_STATE);
    CALL(r->w, fsdp_model_reset(x.m));
    CHECK(!ck_exists(x.from_disk));
    CALL(r->w, fsdp_checkpoint_export_model(x.ck, x.from_disk, NULL));
    if (r->rank == 0) same_files(x.from_disk, x.live, 1);
}
TEST(export_model, refused) { lab_run(2, NULL, refused, NULL); }

/* Another rank than rank 0 refuses: rank 0 has begun nothing that could use freed memory. */
static void one_refuses(lab_rank *r) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    rig x;
    rig_open(&x, r);
    for (int i = 0; i < 5; i++) {
        d.ema = r->rank == 1;
        CHECK_STATUS(fsdp_checkpoint_export_model(x.ck, x.live, &d), FSDP_ERR_INVALID_ARG);
    }
    CHECK(!ck_exists(x.live));
    CALL(r->w, fsdp_checkpoint_export_model(x.ck, x.live, NULL));
    CALL(r->w, fsdp_barrier(r->w));
    CHECK_EQ_INT(ck_num_names(h_tmpdir()), 1); /* no temporary directory */
}
TEST(export_model, one_refuses) { lab_run(3, NULL, one_refuses, NULL); }

/* The world fails while rank 0 writes: it removes what it has begun, and leaves no file open. */
static int aborts(void *user, const char *name, char *out) {
    fsdp_abort((fsdp_world *)user, "of the test");
    snprintf(out, FSDP_CHECKPOINT_NAME, "%s", name);
    return 1;
}
static void world_fails(lab_rank *r) {
    fsdp_checkpoint_export_desc d = FSDP_ZERO;
    rig x;
    rig_open(&x, r);
    d.rename = aborts, d.user = r->w;
    CHECK(fsdp_checkpoint_export_model(x.ck, x.live, &d) != FSDP_OK);
    if (r->rank == 0) CHECK_EQ_INT(ck_num_names(h_tmpdir()), 0);
}
TEST(export_model, world_fails) {
    int descriptors[2]; /* the first run also opens what the process keeps */
    for (int run = 0; run < 2; run++) {
        lab_run(2, NULL, world_fails, NULL);
        descriptors[run] = h_entries("/proc/self/fd");
    }
    CHECK_EQ_INT(descriptors[1], descriptors[0]);
}

/* A rank's part of a tensor, as with tensor parallelism, cannot be exported alone. */
static void halves(void *user, const fsdp_param_view *v, fsdp_checkpoint_place *place) {
    (void)user;
    if (v->ndim == 2) place->shape[0] = 2 * v->shape[0];
}
static void parts(lab_rank *r) {
    fsdp_checkpoint_desc d = FSDP_ZERO;
    rig x;
    rig_open(&x, r);
    fsdp_checkpoint_destroy(x.ck);
    d.place = halves;
    CALL(r->w, fsdp_checkpoint_create(x.m, &d, &x.ck));
    REFUSED_AS(FSDP_ERR_UNSUPPORTED, r->w, fsdp_checkpoint_export_model(x.ck, x.live, NULL),
               "tensor parallelism");
    CHECK(!ck_exists(x.live));
}
TEST(export_model, parts) { lab_run(2, NULL, parts, NULL); }

/* Each allocation fails once: all ranks fail, nothing is there, and nothing leaks. */
static void no_memory(lab_rank *r) {
    rig x;
    rig_open(&x, r);
    CALL(r->w, fsdp_param_full(x.unit[0], 0, NULL)); /* its scratch memory fails the world */
    fsdp_status status = FSDP_ERR_OUT_OF_MEMORY;
    for (int n = 0; n < 50 && status; n++) {
        if (r->rank == 0) w_fail(r->heap, n);
        status = fsdp_checkpoint_export_model(x.ck, x.live, NULL);
        if (r->rank == 0) w_fail(r->heap, -1);
        CHECK(status == FSDP_OK || status == FSDP_ERR_OUT_OF_MEMORY);
        CHECK_EQ_INT(ck_exists(x.live), status == FSDP_OK);
        CALL(r->w, fsdp_barrier(r->w));
    }
    CHECK_OK(status);
}
TEST(export_model, no_memory) { lab_run(2, NULL, no_memory, NULL); }
