/* test_null.c - calls public functions of the core and of all extensions with one argument that is
   NULL or wrong, and others that belong to a world: the failure is one line in this world's log
   with the function's name, and the text of fsdp_last_error.

   SPDX-License-Identifier: MIT */
#define TAGS ASAN
#include "harness.h"
#include "fsdp_checkpoint.h"
#include "fsdp_compress.h"
#include "fsdp_dtensor.h"
#include "fsdp_muon.h"
#include "fsdp_optim.h"
#include "fsdp_plan.h"
#include "fsdp_replicate.h"
#include "fsdp_trace.h"
#include "lab.h"

typedef struct lines {
    int count, level;
    char text[1024];
} lines;
static lines heard;

static void hear(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)code, (void)rank, (void)user;
    heard.count++;
    heard.level = level;
    snprintf(heard.text, sizeof heard.text, "%s", text);
}

/* `call`: the text of a call of fsdp_NAME, or the name that the library reports instead. */
static void told(int line, fsdp_world *w, fsdp_status status, const char *call) {
    char name[64], last[1024];
    const char *at = strncmp(call, "fsdp_", 5) ? call : call + 5;
    snprintf(name, sizeof name, "%.*s:", (int)strcspn(at, "("), at);
    snprintf(last, sizeof last, "%s", fsdp_last_error(w));
    if (status != FSDP_ERR_INVALID_ARG || heard.count != 1 || heard.level != FSDP_LOG_ERROR ||
        strcmp(heard.text, last) || !strstr(last, name) || !strstr(last, "rank 0: [E"))
        h_fail(__FILE__, line, call, "%s, %d lines, the last one '%s'; fsdp_last_error '%s'",
               fsdp_status_name(status), heard.count, heard.text, last);
}
#define TOLD_AS(name, call)                                                                        \
    do {                                                                                           \
        memset(&heard, 0, sizeof heard);                                                           \
        told(__LINE__, w, (call), (name));                                                         \
    } while (0)
#define TOLD(call) TOLD_AS(#call, call)

typedef struct bed {
    fsdp_mesh *mesh;
    fsdp_model *model;
    fsdp_unit *unit;
} bed;

static void build(fsdp_world *w, bed *b) {
    const fsdp_param_desc params[2] = {fsdp_mat("w", 6, 4), fsdp_vec("b", 5)};
    fsdp_unit_desc d = FSDP_ZERO;
    d.name = "a", d.params = params, d.num_params = 2;
    CALL(w, fsdp_mesh_1d(w, "dp", &b->mesh));
    CALL(w, fsdp_model_create(w, NULL, &b->model));
    CALL(w, fsdp_fully_shard(b->model, &d, &b->unit));
}

static void core(fsdp_world *w) {
    bed b;
    fsdp_mesh *mesh;
    fsdp_param_view view;
    fsdp_mesh_info info;
    fsdp_flat flat;
    fsdp_extension extension = FSDP_ZERO;
    fsdp_unit_desc unit_desc = FSDP_ZERO;
    void *ptr;
    double norm;
    float x[24];
    int place;
    build(w, &b);
    TOLD(fsdp_all_reduce(w, NULL, NULL, 1, FSDP_F32, FSDP_SUM));
    TOLD(fsdp_all_reduce(NULL, b.mesh, x, 1, FSDP_F32, FSDP_SUM));
    TOLD(fsdp_broadcast(w, b.mesh, NULL, 1, 0));
    TOLD(fsdp_broadcast(NULL, b.mesh, x, 1, 0));
    TOLD(fsdp_mesh_create(w, NULL, &mesh));
    TOLD_AS("mesh_create", fsdp_mesh_1d(w, "dp", NULL));
    TOLD(fsdp_mesh_slice(b.mesh, NULL, 0, NULL));
    TOLD(fsdp_mesh_flatten(b.mesh, "dp", NULL));
    TOLD(fsdp_mesh_unflatten(b.mesh, 0, 1, NULL, NULL));
    TOLD(fsdp_mesh_info_init(b.mesh, FSDP_MESH_INFO_FSDP, 0, -1, NULL));
    TOLD(fsdp_mesh_info_init(b.mesh, 7, 0, -1, &info));
    TOLD(fsdp_mesh_comm(b.mesh, 0, FSDP_STREAM_COMPUTE, NULL));
    TOLD(fsdp_model_create(w, NULL, NULL));
    TOLD(fsdp_fully_shard(b.model, &unit_desc, NULL));
    TOLD(fsdp_fully_shard(b.model, NULL, &b.unit));
    TOLD(fsdp_unit_mesh_info(b.unit, NULL));
    TOLD(fsdp_model_mesh_info(b.model, NULL));
    TOLD(fsdp_init_params(b.model, NULL, NULL));
    TOLD(fsdp_param_view_get(b.unit, 0, NULL));
    TOLD(fsdp_param_view_get(b.unit, 2, &view));
    TOLD(fsdp_param_at(b.model, 0, NULL));
    TOLD(fsdp_param_at(b.model, 2, &view));
    TOLD(fsdp_model_flat(b.model, FSDP_F32, NULL));
    TOLD(fsdp_model_flat(b.model, (fsdp_dtype)99, &flat));
    TOLD(fsdp_param_load(b.unit, 0, NULL));
    TOLD(fsdp_param_load(b.unit, 2, x));
    TOLD(fsdp_model_broadcast(NULL, b.unit, 0));
    TOLD(fsdp_model_broadcast(b.model, b.unit, 1));
    TOLD(fsdp_set_requires_gradient_sync(NULL, b.unit, 1));
    TOLD(fsdp_set_requires_all_reduce(NULL, b.unit, 1));
    TOLD(fsdp_set_reshard_after_forward(NULL, b.unit, 1));
    TOLD(fsdp_set_reshard_after_backward(NULL, b.unit, 1));
    TOLD(fsdp_set_unshard_in_backward(NULL, b.unit, 1));
    TOLD(fsdp_set_gradient_divide_factor(NULL, b.unit, 2));
    TOLD(fsdp_set_reduce_scatter_unused_params(NULL, b.unit, 1));
    TOLD(fsdp_set_modules_to_forward_prefetch(b.unit, NULL, -1));
    TOLD(fsdp_set_requires_grad(b.unit, 2, 1));
    TOLD(fsdp_model_cast(b.model, FSDP_I32));
    TOLD(fsdp_clip_grads(b.model, NULL, &norm));
    TOLD(fsdp_grad_norm(b.model, NULL));
    TOLD(fsdp_model_memory(b.model, NULL));
    TOLD(fsdp_unit_memory(b.unit, NULL));
    TOLD(fsdp_model_predict(b.model, NULL));
    TOLD(fsdp_model_desc_get(b.model, NULL));
    TOLD(fsdp_unit_desc_get(b.unit, NULL));
    TOLD(fsdp_param_desc_get(b.unit, 0, NULL));
    TOLD(fsdp_model_counters(b.model, NULL));
    TOLD(fsdp_attach(b.model, NULL));
    TOLD(fsdp_detach(b.model, &extension));
    TOLD(fsdp_emit(b.model, NULL));
    TOLD(fsdp_buf_create(b.model, 0, FSDP_MEMORY_HOST, -1, NULL));
    TOLD(fsdp_update_place(b.model, NULL, &place));
    TOLD(fsdp_alloc(b.model, FSDP_MEMORY_HOST, 8, NULL, &ptr));
    TOLD(fsdp_transfer(b.model, x, NULL, 4));
    TOLD(fsdp_agree(b.model, NULL, 8));
    TOLD(fsdp_wait_stream(b.model, 99));
}

static void optimizers(fsdp_world *w) {
    bed b, other;
    fsdp_adamw *adamw;
    fsdp_sgd *sgd;
    fsdp_muon *muon;
    fsdp_ema *ema;
    fsdp_grad_scaler *scaler;
    fsdp_optim_state state;
    const fsdp_optim_group group = FSDP_ZERO;
    build(w, &b);
    build(w, &other);
    TOLD(fsdp_adamw_create(b.model, NULL, NULL));
    TOLD(fsdp_sgd_create(b.model, NULL, NULL));
    TOLD(fsdp_muon_create(b.model, NULL, NULL));
    TOLD(fsdp_ema_create(b.model, NULL, NULL));
    TOLD(fsdp_grad_scaler_create(b.model, NULL, NULL));
    CALL(w, fsdp_adamw_create(b.model, NULL, &adamw));
    CALL(w, fsdp_sgd_create(b.model, NULL, &sgd));
    CALL(w, fsdp_muon_create(other.model, NULL, &muon));
    CALL(w, fsdp_ema_create(b.model, NULL, &ema));
    CALL(w, fsdp_grad_scaler_create(b.model, NULL, &scaler));
    TOLD(fsdp_adamw_step(adamw, -1));
    TOLD(fsdp_adamw_set_group(adamw, 0, NULL));
    TOLD(fsdp_adamw_set_group(adamw, 1, &group));
    TOLD(fsdp_adamw_state(adamw, 0, NULL));
    TOLD(fsdp_adamw_state(adamw, 2, &state));
    TOLD(fsdp_sgd_step(sgd, -1));
    TOLD(fsdp_sgd_set_group(sgd, 0, NULL));
    TOLD(fsdp_sgd_state(sgd, 0, NULL));
    TOLD(fsdp_muon_step(muon, -1));
    TOLD(fsdp_muon_set_group(muon, 0, NULL));
    TOLD_AS("muon_state", fsdp_optim_state_get(muon, 2, &state));
    CHECK_STATUS(fsdp_optim_step(NULL, 1), FSDP_ERR_INVALID_ARG);
    TOLD(fsdp_grad_scaler_get_state(scaler, NULL));
    TOLD(fsdp_grad_scaler_set_state(scaler, NULL));
}

static void others(fsdp_world *w) {
    const fsdp_param_desc params[1] = {fsdp_vec("v", 4)};
    bed b;
    fsdp_replicate *rep;
    fsdp_replicate_desc rd = FSDP_ZERO;
    fsdp_plan *plan;
    fsdp_plan_cost cost = FSDP_ZERO;
    fsdp_plan_times times;
    fsdp_plan_report report;
    fsdp_plan_proof proof;
    fsdp_checkpoint *ck;
    char path[64];
    fsdp_unit *unit;
    int index;
    build(w, &b);
    rd.params = params, rd.num_params = 1;
    TOLD(fsdp_replicate_create(b.model, &rd, NULL));
    TOLD(fsdp_replicate_create(b.model, NULL, &rep));
    CALL(w, fsdp_replicate_create(b.model, &rd, &rep));
    TOLD(fsdp_replicate_ready(rep, 1, 1));
    TOLD(fsdp_replicate_unit(rep, 1, &unit, &index));
    TOLD(fsdp_replicate_order(rep, NULL));
    TOLD(fsdp_replicate_join(rep, 1, 0, NULL));
    TOLD(fsdp_plan_create(b.model, NULL, NULL));
    CALL(w, fsdp_plan_create(b.model, NULL, &plan));
    TOLD(fsdp_plan_report_get(plan, 0, NULL));
    TOLD(fsdp_plan_report_get(plan, 0, &report));
    TOLD(fsdp_plan_prove(plan, 0, NULL));
    TOLD(fsdp_plan_prove(plan, 0, &proof));
    TOLD(fsdp_plan_simulate(plan, 0, 0, NULL, &times));
    TOLD(fsdp_plan_simulate(plan, 0, 0, &cost, NULL));
    TOLD(fsdp_checkpoint_create(b.model, NULL, NULL));
    CALL(w, fsdp_checkpoint_create(b.model, NULL, &ck));
    TOLD(fsdp_checkpoint_save(ck, NULL, 1));
    TOLD(fsdp_checkpoint_save_async(ck, NULL, 1));
    TOLD(fsdp_checkpoint_find(ck, NULL, -1, path, sizeof path, NULL));
    TOLD(fsdp_checkpoint_load(ck, NULL, NULL));
    TOLD(fsdp_checkpoint_last_report(ck, NULL));
}

static void tensors(fsdp_world *w) {
    const int64_t shape[1] = {8};
    const int32_t ranks[1] = {1};
    const fsdp_placement whole[1] = {FSDP_ZERO};
    bed b;
    fsdp_dmesh *dm;
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_redistribution *r, *back;
    fsdp_redistribution_desc rd = FSDP_ZERO;
    fsdp_tp_unit_desc td = FSDP_ZERO;
    fsdp_param_view view = FSDP_ZERO;
    fsdp_unit *unit;
    fsdp_trace *trace;
    fsdp_trace_desc trace_desc = FSDP_ZERO;
    void *ptr;
    float x[8];
    build(w, &b);
    dd.mesh = b.mesh;
    TOLD(fsdp_dmesh_create(b.model, &dd, NULL));
    CALL(w, fsdp_dmesh_create(b.model, &dd, &dm));
    TOLD(fsdp_dmesh_alloc(dm, 8, NULL));
    TOLD(fsdp_dmesh_alloc(dm, -1, &ptr));
    TOLD(fsdp_redistribution_create(dm, NULL, &r));
    TOLD(fsdp_redistribution_create(dm, &rd, NULL));
    TOLD(fsdp_redistribution_create(dm, &rd, &r));
    CHECK_OK(fsdp_spec_init(&rd.from, 1, ranks, whole, FSDP_F32, 1, shape));
    rd.to = rd.from;
    CALL(w, fsdp_redistribution_create(dm, &rd, &r));
    TOLD(fsdp_redistribution_create_backward(r, NULL, NULL));
    memset(&rd.to, 0, sizeof rd.to);
    TOLD(fsdp_redistribution_create_backward(r, &rd.to, &back));
    TOLD(fsdp_redistribution_resize(r, 1, 1));
    TOLD(fsdp_redistribution_get(r, NULL));
    TOLD(fsdp_redistribute(r, NULL, x));
    TOLD(fsdp_dtensor_check(dm, NULL, x, "x"));
    TOLD(fsdp_dtensor_check(dm, &rd.from, x, NULL));
    TOLD(fsdp_tp_fully_shard(dm, &td, NULL));
    TOLD(fsdp_tp_fully_shard(dm, NULL, &unit));
    TOLD(fsdp_tp_fully_shard(dm, &td, &unit));
    TOLD(fsdp_tp_view(dm, &view, NULL));
    TOLD_AS("tp_param_load", fsdp_tp_param_load(dm, NULL, 0, x));
    TOLD_AS("tp_param_full", fsdp_tp_param_full(dm, NULL, 0, 0, x));
    trace_desc.first_step = 2, trace_desc.last_step = 1, trace_desc.dir = "t";
    TOLD(fsdp_trace_start(b.model, &trace_desc, &trace));
}

static void in_world(void (*body)(fsdp_world *w)) {
    fsdp_threads threads = FSDP_ZERO;
    fsdp_world_desc d;
    fsdp_world *w;
    threads.size = 1;
    d = w_desc(0, 1, &threads, w_job("null"), 0);
    d.logger.log = hear;
    CALL(NULL, fsdp_init(&d, &w));
    body(w);
    CHECK_OK(fsdp_shutdown(w));
}

TEST(null, core) { in_world(core); }
TEST(null, optimizers) { in_world(optimizers); }
TEST(null, others) { in_world(others); }
TEST(null, tensors) { in_world(tensors); }
