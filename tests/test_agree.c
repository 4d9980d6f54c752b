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

static void agree_rank(lab_rank *r) {
    const difference *d = (const difference *)r->arg;
    difference mine = *d;
    if (r->rank == 0) memset(&mine, 0, sizeof mine);
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_param_desc p[2] = {fsdp_mat(mine.swap_names ? "b" : "a", 6, 2),
                            fsdp_mat(mine.swap_names ? "a" : "b", 6, 2)};
    p[0].shard_dim = mine.shard_dim;
    p[mine.swap_frozen].frozen = 1;
    if (mine.transpose) p[0].shape[0] = 2, p[0].shape[1] = 6;
    md.grads_overwrite = mine.overwrite;
    md.direct_min = mine.direct ? 1 : 0;
    ud.name = "pair";
    fsdp_status status = fsdp_pre_forward(lab_unit(r->w, lab_model(r->w, &md), &ud, p, 2));
    if (strcmp(d->name, "none") == 0) {
        CHECK_OK(status);
    } else {
        CHECK_STATUS(status, FSDP_ERR_MISMATCH);
        CHECK(strstr(fsdp_last_error(r->w), "pair") != NULL);
    }
    CHECK_STATUS(fsdp_shutdown(r->w), status);
    r->w = NULL;
}

TEST_P(agree, units, differences) { lab_run(2, NULL, agree_rank, (void *)(uintptr_t)row); }
