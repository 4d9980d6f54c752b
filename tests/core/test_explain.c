/* test_explain.c - errors of allocation say what the model needs and holds, and end with the command
   line of fsdpfit; test_fsdpfit.c runs that command.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"
#include "backends/fsdp_fake.h"
#include "fsdp_optim.h"

enum { UNITS = 16, ROWS = 4096, COLS = 256, SLOT = ROWS * COLS * 4 };

/* Worlds without peers, whose memory is addresses; the device has `budget` bytes. */
static int64_t budget;
static const char *reason = "there is no more";

static fsdp_status world_alloc(fsdp_comm *world, size_t size, void **ptr) {
    if ((int64_t)size > budget) return FSDP_ERR_OUT_OF_MEMORY;
    budget -= (int64_t)size;
    return fsdp_fake_comm_ops()->alloc(world, size, ptr);
}
static const char *world_text(fsdp_comm *comm) { return (void)comm, reason; }
static fsdp_status device_alloc(fsdp_device *d, int kind, size_t size, void **ptr) {
    if (kind == FSDP_MEMORY_DEVICE && (int64_t)size > budget) return FSDP_ERR_OUT_OF_MEMORY;
    budget -= kind == FSDP_MEMORY_DEVICE ? (int64_t)size : 0;
    return fsdp_fake_device_ops(1)->alloc(d, kind, size, ptr);
}
static const char *device_text(fsdp_device *device) { return (void)device, reason; }

typedef struct setting {
    int ranks, replicas, streams, num_never, offload; /* num_never: first units kept unsharded */
    const char *first;                                /* name of the first unit */
} setting;

typedef struct bed {
    fsdp_fake fake;
    fsdp_comm_ops comm;
    fsdp_device_ops device;
    fsdp_world *w;
    fsdp_model *m;
    fsdp_unit *units[UNITS];
} bed;

static void bed_open(bed *b, const setting *s) {
    fsdp_world_desc d = w_desc(0, s->ranks, NULL, "explain", 0);
    fsdp_model_desc md = FSDP_ZERO;
    memset(b, 0, sizeof *b);
    budget = INT64_MAX;
    b->fake.addresses = 1, b->fake.plain = s->streams;
    b->comm = *fsdp_fake_comm_ops(), b->comm.alloc = world_alloc, b->comm.error_text = world_text;
    b->device = *fsdp_fake_device_ops(s->streams);
    b->device.alloc = device_alloc, b->device.error_text = device_text;
    d.user = &b->fake, d.device_ops = &b->device, d.comm_ops = &b->comm;
    CALL(NULL, fsdp_init(&d, &b->w));
    if (s->replicas > 1) md.mesh = lab_hsdp(b->w, s->replicas, s->ranks / s->replicas);
    md.cpu_offload = s->offload;
    b->m = lab_model(b->w, &md);
    for (int u = 0; u < UNITS; u++) {
        char name[16];
        fsdp_param_desc p = fsdp_mat("w", ROWS, COLS);
        fsdp_unit_desc ud = FSDP_ZERO;
        snprintf(name, sizeof name, "h.%d", u);
        ud.name = u || !s->first ? name : s->first;
        if (u < s->num_never) ud.reshard_after_forward = FSDP_RESHARD_NEVER;
        b->units[u] = lab_unit(b->w, b->m, &ud, &p, 1);
    }
}

/* Returns the text for a model that has `holds` when a request of `more` bytes fails. `what` is its
   first part. */
static const char *expected(const setting *s, const char *what, const fsdp_memory *holds,
                            int64_t more) {
    static char text[1200];
    static const char *const names[] = {"bytes", "KiB", "MiB", "GiB"};
    const double need = (double)(holds->total_bytes + more);
    double one = 1;
    int k = 0;
    for (; k < 3 && need >= 1024 * one; k++) one *= 1024;
    int used = snprintf(text, sizeof text,
                        "rank 0: %s: %s; the model needs at least %.4g %s and holds %.4g", what,
                        reason, need / one, names[k], (double)holds->total_bytes / one);
    const char *comma = " (";
    for (int p = 0; p < FSDP_POOL_SCRATCH; p++) {
        if (!holds->pool_bytes[p]) continue;
        used += sprintf(text + used, "%s%s %.4g", comma, fsdp_pool_name(p),
                        (double)holds->pool_bytes[p] / one);
        comma = ", ";
    }
    used += sprintf(text + used, "%s. For all that a step needs: ", *comma == ',' ? ")" : "");
    if (s->num_never > 1) { /* the tool has one option for all units, and one unit `root` */
        strcpy(text + used, "give tools/fsdpfit the shapes, the mesh and the dtypes of the units");
        return text;
    }
    used += sprintf(text + used, "fsdpfit SHAPES --ranks %d", s->ranks);
    if (s->replicas > 1)
        used += sprintf(text + used, " --mesh %dx%d", s->replicas, s->ranks / s->replicas);
    if (s->streams) used += sprintf(text + used, " --streams");
    if (s->offload) sprintf(text + used, " --cpu-offload");
    return text;
}
/* Trains until memory is short. Returns what the model holds then. */
static fsdp_memory run_short(bed *b) {
    fsdp_memory holds;
    fsdp_status status = fsdp_model_commit(b->m);
    for (int u = 0; u < UNITS && !status; u++) {
        status = fsdp_pre_forward(b->units[u]);
        if (!status) status = fsdp_post_forward(b->units[u]);
    }
    for (int u = UNITS - 1; u >= 0 && !status; u--) {
        status = fsdp_pre_backward(b->units[u]);
        if (!status && fsdp_grad(b->units[u], 0)) status = fsdp_post_backward(b->units[u]);
    }
    CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
    CHECK_OK(fsdp_model_memory(b->m, &holds));
    return holds;
}

static const struct {
    const char *name;
    setting s;
    int64_t slots; /* that there is memory for, after shards and their gradients; -1: not for these */
    const char *pool;
} shortages[] = {{"nothing", {8, 1, 0, 0, 0, NULL}, -1, "shards"},
                 {"shards", {8, 1, 0, 0, 0, NULL}, 1, "full gradients"},
                 {"replicas", {8, 2, 0, 0, 0, NULL}, 1, "full gradients"},
                 {"never", {8, 1, 0, UNITS, 0, NULL}, 3, "gathered parameters"},
                 {"one never", {8, 1, 0, 1, 0, "embed"}, 1, "gathered parameters"},
                 {"streams", {8, 1, 1, 0, 0, NULL}, 2, "full gradients"},
                 {"offload", {8, 1, 1, 0, 1, NULL}, 2, "full gradients"},
                 {"one rank", {1, 1, 1, 0, 0, NULL}, -1, "shards"}};
TEST_P(explain, what_the_model_needs, shortages) {
    const setting *s = &row->s;
    fsdp_memory all;
    char what[100];
    bed b;
    bed_open(&b, s);
    CALL(b.w, fsdp_model_predict(b.m, &all));
    const int64_t shards = all.pool_bytes[FSDP_POOL_SHARD],
                  kept = s->offload ? 0 : shards + all.pool_bytes[FSDP_POOL_SHARD_GRAD],
                  wanted = row->slots < 0 ? shards : SLOT;
    budget = row->slots < 0 ? kept / 2 - 1 : kept + 4096 + row->slots * (int64_t)SLOT;
    const fsdp_memory holds = run_short(&b);
    snprintf(what, sizeof what, "[E305] %lld bytes for %s cannot be allocated", (long long)wanted,
             row->pool);
    CHECK_EQ_STR(fsdp_last_error(b.w), expected(s, what, &holds, wanted));
    (void)fsdp_shutdown(b.w);
}

/* An optimizer's states. */
TEST(explain, what_an_optimizer_wants) {
    const setting s = {8, 1, 1, 2, 0, NULL};
    fsdp_adamw *adamw;
    fsdp_memory holds;
    char what[120], text[1200];
    bed b;
    bed_open(&b, &s);
    CALL(b.w, fsdp_model_reserve(b.m));
    CALL(b.w, fsdp_model_memory(b.m, &holds));
    const int64_t states = 2 * (int64_t)UNITS * SLOT / 8;
    budget = states - 1;
    CHECK_STATUS(fsdp_adamw_create(b.m, NULL, &adamw), FSDP_ERR_OUT_OF_MEMORY);
    snprintf(text, sizeof text, "%s", fsdp_last_error(b.w));
    budget = states;
    CALL(b.w, fsdp_adamw_create(b.m, NULL, &adamw));
    CALL(NULL, fsdp_shutdown(b.w));
    snprintf(what, sizeof what,
             "[E304] adamw_create: no memory for a state of %lld bytes on device addresses",
             (long long)states);
    CHECK_EQ_STR(text, expected(&s, what, &holds, states));
}

/* A long reason is cut, so that the command is whole. */
TEST(explain, long_reasons) {
    static char why[900];
    const setting s = {8, 1, 1, 1, 0, NULL};
    static const char end[] = " fsdpfit SHAPES --ranks 8 --streams";
    bed b;
    memset(why, 'w', sizeof why - 1);
    reason = why;
    bed_open(&b, &s);
    budget = 0;
    (void)run_short(&b);
    const char *text = fsdp_last_error(b.w);
    CHECK_MSG(strlen(text) > sizeof end && !strcmp(text + strlen(text) + 1 - sizeof end, end) &&
                  strlen(text) < 600 && strspn(strstr(text, "www"), "w") == 300,
              "%s", text);
    (void)fsdp_shutdown(b.w);
    reason = "there is no more";
}

/* A failed host allocation: the text gives the host memory of the world's models. It is not
   retried. */
TEST(explain, tables_of_the_host) {
    fsdp_world_desc d = w_desc(0, 1, NULL, "explain", 0);
    fsdp_param_desc p = fsdp_mat("w", ROWS, COLS);
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_unit *unit = NULL;
    fsdp_memory has;
    fsdp_world *w;
    w_heap heap;
    char text[300];
    w_heap_use(&heap, &d);
    CALL(NULL, fsdp_init(&d, &w));
    fsdp_model *trained = lab_model(w, NULL), *m = lab_model(w, NULL);
    lab_unit(w, trained, NULL, &p, 1);
    CALL(w, fsdp_model_commit(trained));
    ud.params = &p, ud.num_params = 1, ud.name = "h.0";
    CALL(w, fsdp_model_memory(trained, &has));
    int64_t tables = has.host_bytes;
    CALL(w, fsdp_model_memory(m, &has));
    tables += has.host_bytes;
    CALL(w, fsdp_model_memory(trained, &has));
    heap.persistent = 1;
    w_fail(&heap, 0);
    CHECK_STATUS(fsdp_fully_shard(m, &ud, &unit), FSDP_ERR_OUT_OF_MEMORY);
    CHECK_EQ_INT(heap.failures, 1);
    snprintf(
        text, sizeof text,
        " bytes of memory; it has given %lld bytes for tables of models, %lld for their buffers",
        (long long)tables, (long long)has.total_bytes);
    CHECK_MSG(strstr(fsdp_last_error(w), "[E301] fully_shard of unit 'h.0': ") &&
                  strstr(fsdp_last_error(w), text),
              "%s, not %s", fsdp_last_error(w), text);
    w_fail(&heap, -1);
    lab_unit(w, m, NULL, &p, 1);
    CALL(NULL, fsdp_shutdown(w));
}

/* The text allocates nothing, and is logged once. */
static int lines_logged;
static void count_lines(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)text, (void)user;
    lines_logged++;
}
TEST(explain, allocates_nothing) {
    fsdp_world_desc d = w_desc(0, 8, NULL, "explain", 0);
    fsdp_param_desc p = fsdp_mat("w", ROWS, COLS);
    fsdp_comm_ops comm = *fsdp_fake_comm_ops();
    fsdp_fake fake = FSDP_ZERO;
    fsdp_world *w;
    w_heap heap;
    fake.addresses = 1;
    comm.alloc = world_alloc, comm.error_text = world_text;
    w_heap_use(&heap, &d);
    d.comm_ops = &comm, d.user = &fake, d.device_ops = fsdp_fake_device_ops(0);
    d.logger.log = count_lines, d.log_level = FSDP_LOG_INFO;
    budget = INT64_MAX;
    CALL(NULL, fsdp_init(&d, &w));
    fsdp_model *m = lab_model(w, NULL);
    fsdp_unit *unit = lab_unit(w, m, NULL, &p, 1);
    CALL(w, fsdp_model_commit(m));
    lines_logged = 0, budget = 0, heap.persistent = 1;
    w_fail(&heap, 2); /* after the list of slots and the slot */
    CHECK_STATUS(fsdp_pre_forward(unit), FSDP_ERR_OUT_OF_MEMORY);
    CHECK_EQ_INT(lines_logged, 1); /* the world has failed with this text */
    CHECK_EQ_INT(heap.failures, 0);
    const char *text = fsdp_last_error(w);
    CHECK_MSG(strstr(text, "[E305]") && strstr(text, "fsdpfit SHAPES --ranks 8"), "%s", text);
    (void)fsdp_shutdown(w);
    CHECK_EQ_INT(heap.live, 0);
}
