#include "plan.h"
typedef struct { plan_net net; fsdp_plan_desc desc; char *text; size_t len; plan_result r[8]; int lanes; } tjob;
static void body(lab_rank *r) {
    tjob *j = (tjob *)r->arg;
    plan_bed b; plan_result *out = &j->r[r->rank];
    memset(out, 0, sizeof *out);
    plan_open(&b, &j->net, r->w);
    CALL(r->w, fsdp_plan_create(b.model, &j->desc, &b.plan));
    for (int i = 0; i < 4; i++) plan_step(&b, out);
    CHECK_EQ_INT(fsdp_plan_count(b.plan), 1);
    size_t n = fsdp_plan_text(b.plan, 0, FSDP_PLAN_TEXT_OPS, NULL, 0);
    if (r->rank == 0) { j->text = (char*)calloc(n + 1, 1); j->len = n; CHECK(fsdp_plan_text(b.plan, 0, FSDP_PLAN_TEXT_OPS, j->text, n + 1) == n); }
    CALL(r->w, fsdp_barrier(r->w));
    fsdp_plan_proof proof;
    CALL(r->w, fsdp_plan_prove(b.plan, 0, &proof));
    if (r->rank == 0) { h_message("%s", proof.text); const char *ts[4] = {j->text,j->text,j->text,j->text}; CALL(r->w, fsdp_plan_prove_texts(ts, 4, &proof)); h_message("texts: %d %s", proof.refuted, proof.text); }
    fsdp_model_destroy(b.model);
    plan_open(&b, &j->net, r->w);
    CALL(r->w, fsdp_plan_create(b.model, &j->desc, &b.plan));
    CALL(r->w, fsdp_plan_load(b.plan, j->text, j->len));
    plan_result again; memset(&again, 0, sizeof again);
    for (int i = 0; i < 4; i++) plan_step(&b, &again);
    for (int i = 0; i < 4; i++) CHECK(again.hash[i] == out->hash[i]);
    if (r->rank == 0) h_message("modes %d %d %d %d", again.mode[0], again.mode[1], again.mode[2], again.mode[3]);
    fsdp_model_destroy(b.model);
}
TEST(plan_text, round) {
    for (int k = 0; k < 4; k++) for (int l = 0; l < 3; l++) {
    static tjob j; memset(&j, 0, sizeof j);
    j.net = k == 0 ? plan_nested() : plan_chain(k == 1 ? 3 : 16, 16, 16);
    if (k == 3) j.net.model.param_dtype = FSDP_BF16, j.net.replicas = 2;
    lab_how how; memset(&how, 0, sizeof how); how.lanes = l;
    if (k == 1) { j.desc.most_bytes = 1; }
    j.desc.most_bytes = 0;
    lab_run(k == 3 ? 4 : 2, &how, body, &j);
    if (k == 1 && l == 0) { FILE *f = fopen("/tmp/plan1.txt", "w"); fputs(j.text, f); fclose(f); }
    if (k == 0 && l == 2) { FILE *f = fopen("/tmp/plan0.txt", "w"); fputs(j.text, f); fclose(f); }
    free(j.text);
    }
}
