/* test_plan.c - plans: recorded, replayed, left. SPDX-License-Identifier: MIT */
#include "plan.h"

typedef struct {
    plan_net net;
    fsdp_plan_desc desc;
    int show, steps;
    plan_result r[8][2];
} pjob;

static void both(lab_rank *r) {
    pjob *j = (pjob *)r->arg;
    plan_train(r->w, &j->net, NULL, 0, j->steps, &j->r[r->rank][0]);
    plan_train(r->w, &j->net, &j->desc, 1, j->steps, &j->r[r->rank][1]);
}
static void report(const pjob *j, int size) {
    const plan_result *a = &j->r[0][0], *b = &j->r[0][1];
    const fsdp_plan_report *rep = &b->report;
    h_message("%s: gathers %d -> %d, reductions %d -> %d, rep %d -> %d ops %d -> %d bytes %lld -> %lld bound %lld replayed %d left %d buckets %d crossing %d open %d mode %d %s", j->net.name, rep->gathers[0], rep->gathers[1], rep->reductions[0], rep->reductions[1], rep->replicas[0], rep->replicas[1],rep->ops[0],rep->ops[1], (long long)rep->bytes[0], (long long)rep->bytes[1], (long long)rep->bound, (int)rep->replayed, (int)rep->left, rep->buckets, rep->crossing, rep->most_open, (int)b->mode[j->steps-1], b->why[j->steps-1]);
    for (int k = 0; k < size; k++)
        for (int i = 0; i < j->steps; i++)
            if (j->r[k][0].hash[i] != j->r[k][1].hash[i] || j->r[k][0].grads[i] != j->r[k][1].grads[i]) { h_message("rank %d step %d differs %s", k, i, j->r[k][1].why[i]); return; }
    (void)a;
}
static void go(pjob *j, int size, int lanes) {
    lab_how how; memset(&how, 0, sizeof how);
    how.lanes = lanes;
    j->steps = 8;
    lab_run(size, &how, both, j);
    report(j, size);
}

TEST(plan, nested) {
    static pjob j;
    memset(&j, 0, sizeof j);
    j.net = plan_nested();
    for (int ar = 0; ar < 2; ar++)
        for (int more = 0; more < 3; more++) {
            j.desc.without = ar ? 1u << FSDP_PASS_ARENA : 0;
            j.desc.most_bytes = 4416 + more * 2176;
            go(&j, 2, 0);
        }
    j.desc.most_bytes = 0;
    for (int l = 0; l < 3; l++) for (int w = 1; w < 5; w++) go(&j, w, l);
}
TEST(plan, chain) {
    static pjob j;
    memset(&j, 0, sizeof j);
    for (int bf = 0; bf < 3; bf++) for (int raf = 0; raf < 2; raf++) for (int rep = 0; rep < 3; rep++)
    for (int l = 0; l < 3; l++) {
        j.net = plan_chain(16, 16, 16);
        if (bf) j.net.model.param_dtype = FSDP_BF16;
        if (bf == 2) j.net.model.reduce_dtype = FSDP_F32;
        if (raf && rep == 2) continue;
        if (raf) j.net.model.reshard_after_forward = 2;
        j.net.replicas = rep == 2 ? 4 : rep ? 2 : 0;
        h_message("bf %d raf %d rep %d lanes %d", bf, raf, rep, l);
        go(&j, 4, l);
    }
}
