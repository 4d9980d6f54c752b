/* test_nccl_today.c - features of NCCL 2.31 that the backend uses, on the stub with that version's
   header: launch order, a policy and a tag for each collective, bytes of communicators; and that it
   uses none of them with older libraries.

   SPDX-License-Identifier: MIT */
#define TAGS       NO(SHM) | STUB
#define FSDP_STUB_NCCL 23102
#include "harness.h"
#include "stub.h"

/* The library's requests. */
enum { NOTED = 64 };
typedef struct {
    int num, num_plain; /* collectives with and without a configuration */
    int policies[NOTED];
    uint64_t tags[NOTED];
    int comm_policy, order, num_comms;
} requests;
static requests the_requests;

static void note_coll(const ncclCollConfig_t *config) {
    CHECK(config && the_requests.num < NOTED);
    the_requests.policies[the_requests.num] = config->CTAPolicy;
    the_requests.tags[the_requests.num++] = config->userProfilerTag;
}
static void note_comm(const ncclConfig_t *config) {
    the_requests.num_comms++;
    if (config->CTAPolicy != NCCL_CONFIG_UNDEF_INT) the_requests.comm_policy = config->CTAPolicy;
    if (config->launchOrderImplicit == 1) the_requests.order++;
}
static ncclResult_t noted_gather(const void *src, void *dst, size_t count, ncclDataType_t type,
                                 ncclComm_t comm, cudaStream_t stream,
                                 const ncclCollConfig_t *config) {
    note_coll(config);
    return ncclAllGatherConfig(src, dst, count, type, comm, stream, config);
}
static ncclResult_t noted_scatter(const void *src, void *dst, size_t count, ncclDataType_t type,
                                  ncclRedOp_t op, ncclComm_t comm, cudaStream_t stream,
                                  const ncclCollConfig_t *config) {
    note_coll(config);
    return ncclReduceScatterConfig(src, dst, count, type, op, comm, stream, config);
}
static ncclResult_t noted_plain(const void *src, void *dst, size_t count, ncclDataType_t type,
                                ncclComm_t comm, cudaStream_t stream) {
    the_requests.num_plain++;
    return ncclAllGather(src, dst, count, type, comm, stream);
}
static ncclResult_t noted_init(ncclComm_t *comm, int size, ncclUniqueId id, int rank,
                               ncclConfig_t *config) {
    note_comm(config);
    return ncclCommInitRankConfig(comm, size, id, rank, config);
}
static ncclResult_t noted_split(ncclComm_t comm, int color, int key, ncclComm_t *child,
                                ncclConfig_t *config) {
    note_comm(config);
    return ncclCommSplit(comm, color, key, child, config);
}
#define ncclAllGather           noted_plain
#define ncclAllGatherConfig     noted_gather
#define ncclReduceScatterConfig noted_scatter
#define ncclCommInitRankConfig  noted_init
#define ncclCommSplit           noted_split
#define LIBRARY_WHOLE
#include "library.c"
#include "lab.h"
#undef ncclAllGather
#undef ncclAllGatherConfig
#undef ncclReduceScatterConfig
#undef ncclCommInitRankConfig
#undef ncclCommSplit

/* ---- a world, a unit, a step ----------------------------------------------------------------- */

typedef struct {
    const char *name;
    int version;             /* version of the library */
    const char *registers;   /* FSDP_NCCL_REGISTER */
    int comms;               /* FSDP_NCCL_COMMS */
    const char *order;       /* NCCL_LAUNCH_ORDER_IMPLICIT */
    int works;               /* windows are supported */
    int configures, policy;  /* collectives are configured; policy of gathers */
    int orders, comm_policy; /* communicators have an order; policy of a communicator */
    int warnings, notes;     /* about registrations, on rank 0 */
} row_of;
enum { NONE = NCCL_CONFIG_UNDEF_INT, ZERO = NCCL_CTA_POLICY_ZERO };
static const row_of rows[] = {
    {"2.31", 23102, "0", 2, NULL, 1, 1, NONE, 2, 0, 0, 0},
    {"2.31/order_of_the_user", 23102, "0", 2, "0", 1, 1, NONE, 0, 0, 0, 0},
    {"2.31/windows", 23102, "2", 1, NULL, 1, 1, ZERO, 1, 0, 0, 1},
    {"2.31/no_windows", 23102, "2", 1, NULL, 0, 1, ZERO, 1, 0, 1, 0},
    {"2.30/windows", 23003, "2", 2, NULL, 1, 0, 0, 0, ZERO, 0, 2},
    {"2.29.7", 22907, "0", 1, NULL, 1, 0, 0, 0, 0, 0, 0},
    {"2.28", 22809, "0", 2, NULL, 1, 0, 0, 0, 0, 0, 0}};

static int warnings, notes;
static void count_logs(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)user;
    warnings += strstr(text, "[E839]") != NULL;
    notes += strstr(text, "whether NCCL uses them is unknown") != NULL;
}

static void fill(void *user, const fsdp_param_view *v) { (void)user, (void)v; }

static uint64_t tag_of(int kind, const char *name) {
    uint64_t tag = (uint64_t)kind << 56;
    for (size_t n = strlen(name), i = 0; i < n; i++)
        tag |= (uint64_t)(unsigned char)name[i] << 8 * (n - 1 - i);
    return tag;
}

static int has_tag(uint64_t tag, int *policy) {
    for (int i = 0; i < the_requests.num; i++)
        if (the_requests.tags[i] == tag) return *policy = the_requests.policies[i], 1;
    return 0;
}

static void today(int rank, int world, void *arg) {
    const row_of *r = (const row_of *)arg;
    char comms[2] = {(char)('0' + r->comms), 0}, words[4096];
    fsdp_world *w;
    fsdp_model *model;
    fsdp_unit *unit;
    fsdp_memory now, predicted;
    fsdp_param_desc p = fsdp_mat("w", 1024, 1024);
    fsdp_unit_desc ud = FSDP_ZERO;
    int policy = -1;
    setenv("FSDP_NCCL_COMMS", comms, 1);
    setenv("FSDP_NCCL_REGISTER", r->registers, 1);
    if (r->order) setenv("NCCL_LAUNCH_ORDER_IMPLICIT", r->order, 1);
    else unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    stub_set(STUB_NCCL_VERSION, r->version);
    stub_set(STUB_WINDOWS_WORK, r->works);
    w_log = count_logs;
    fsdp_world_desc d = w_desc(rank, world, NULL, w_job("today"), 0);
    d.backend = "nccl", d.log_level = FSDP_LOG_INFO;
    ud.name = "layers.12", ud.params = &p, ud.num_params = 1;
    CHECK_MSG(!fsdp_init(&d, &w), "%s", fsdp_last_error(NULL));
    CHECK_EQ_INT(the_requests.num_comms, r->comms);
    CHECK_EQ_INT(the_requests.order, r->orders);
    CHECK_EQ_INT(the_requests.comm_policy, r->comm_policy);
    memset(&the_requests, 0, sizeof the_requests);
    CHECK_OK(fsdp_model_create(w, NULL, &model));
    CHECK_OK(fsdp_fully_shard(model, &ud, &unit));
    CHECK_OK(fsdp_init_params(model, fill, NULL));
    CHECK_OK(fsdp_model_predict(model, &predicted));
    CHECK_OK(fsdp_pre_forward(unit));
    CHECK_OK(fsdp_post_forward(unit));
    CHECK_OK(fsdp_pre_backward(unit));
    CHECK(fsdp_grad(unit, 0) != NULL);
    CHECK_OK(fsdp_post_backward(unit));
    CHECK_OK(fsdp_finalize_backward(model));
    CHECK_OK(fsdp_barrier(w));
    CHECK_EQ_INT(the_requests.num > 0, r->configures);
    CHECK_EQ_INT(the_requests.num_plain > 0, !r->configures);
    if (r->configures) {
        CHECK(has_tag(tag_of(FSDP_OP_ALL_GATHER, "yers.12"), &policy) && policy == r->policy);
        CHECK(has_tag(tag_of(FSDP_OP_REDUCE_SCATTER, "yers.12"), &policy) && policy == NONE);
    }
    CHECK_OK(fsdp_model_memory(model, &now));
    (void)fsdp_model_describe(model, words, sizeof words);
    const int64_t bytes = r->version >= 22907 ? (int64_t)r->comms * world << 20 : 0;
    CHECK_EQ_INT(now.comm_bytes, bytes);
    CHECK_EQ_INT(predicted.comm_bytes, bytes);
    CHECK_EQ_INT(strstr(words, "; communicators ") != NULL, bytes != 0);
    CHECK_EQ_INT(warnings, rank == 0 ? r->warnings : 0);
    CHECK_EQ_INT(notes, rank == 0 ? r->notes : 0);
    CHECK_OK(fsdp_barrier(w));
    CHECK_OK(fsdp_shutdown(w));
}

TEST_P(nccl_today, asks, rows) { h_ranks_proc(2, today, (void *)(uintptr_t)row); }
