/* test_agree.c - ranks that describe a unit differently are told at its first collective.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"

typedef struct {
    const char *name;
    int32_t shard_dim, swap_frozen, transpose, swap_names, overwrite, direct;
} difference;

static const difference differences[] = {
    {"none", 0, 0, 0, 0, 0, 0},       {"shard_dim", 1, 0, 0, 0, 0, 0},
    {"frozen", 0, 1, 0, 0, 0, 0},     {"shape", 0, 0, 1, 0, 0, 0},
    {"names", 0, 0, 0, 1, 0, 0},      {"grads_overwrite", 0, 0, 0, 0, 1, 0},
    {"direct_min", 0, 0, 0, 0, 0, 1},
};

typedef struct {
    const difference *d;
    struct fsdp_threads threads;
} agree_job;

static void agree_rank(int rank, int world, void *arg) {
    agree_job *job = (agree_job *)arg;
    difference mine = *job->d;
    if (rank == 0) memset(&mine, 0, sizeof mine);
    fsdp_world_desc wd = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_param_desc p[2] = {fsdp_mat(mine.swap_names ? "b" : "a", 6, 2),
                            fsdp_mat(mine.swap_names ? "a" : "b", 6, 2)};
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *u;
    wd.rank = rank, wd.world_size = world, wd.job = "agree", wd.threads = &job->threads;
    wd.timeout_ms = 5000, wd.log_level = FSDP_LOG_NONE;
    p[0].shard_dim = mine.shard_dim;
    p[mine.swap_frozen].frozen = 1;
    if (mine.transpose) p[0].shape[0] = 2, p[0].shape[1] = 6;
    md.grads_overwrite = mine.overwrite;
    md.direct_min = mine.direct ? 1 : 0;
    ud.name = "pair", ud.params = p, ud.num_params = 2;
    CHECK_OK(fsdp_init(&wd, &w));
    CHECK_OK(fsdp_model_create(w, &md, &m));
    CHECK_OK(fsdp_fully_shard(m, &ud, &u));
    fsdp_status status = fsdp_pre_forward(u);
    if (strcmp(job->d->name, "none") == 0) {
        CHECK_OK(status);
    } else {
        CHECK_STATUS(status, FSDP_ERR_MISMATCH);
        CHECK(strstr(fsdp_last_error(w), "pair") != NULL);
    }
    CHECK_STATUS(fsdp_shutdown(w), status);
}

TEST_P(agree, units, differences) {
    agree_job job;
    memset(&job, 0, sizeof job);
    job.d = row;
    job.threads.size = 2;
    h_ranks_thread(2, agree_rank, &job);
}
