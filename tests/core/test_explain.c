/* test_explain.c - texts of failed allocations say what holds memory and which changes would need
   less: the numbers equal those of models with these changes. Texts have at most 400 characters,
   and memory that was just refused is not requested again.

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

/* Returns the device memory that a model of this setting needs, and each pool in *m. */
static int64_t needs(const setting *s, fsdp_memory *m) {
    fsdp_memory memory;
    bed b;
    bed_open(&b, s);
    CALL(b.w, fsdp_model_predict(b.m, &memory));
    CALL(NULL, fsdp_shutdown(b.w));
    if (m) *m = memory;
    if (!s->offload) return memory.total_bytes;
    return memory.total_bytes - memory.pool_bytes[FSDP_POOL_SHARD] -
           memory.pool_bytes[FSDP_POOL_SHARD_GRAD];
}

/* Sets `one` to the unit of a text, which suits the model's need. Returns the unit's name. */
static double one;
static const char *unit_for(int64_t need) {
    static const char *const names[] = {"bytes", "KiB", "MiB", "GiB"};
    int k = 0;
    for (one = 1; k < 3 && (double)need >= 1024 * one; k++) one *= 1024;
    return names[k];
}
static double in_units(int64_t bytes) { return (double)bytes / one; }

/* Returns the text for a model that has `has` bytes when a request of `extra` more bytes fails.
   `what` is its first part. */
static const char *expected(const setting *s, const char *what, int64_t has, int64_t extra) {
    static char text[1200];
    char advice[3][100];
    int64_t less[3] = {0, 0, 0};
    fsdp_memory pools;
    const int64_t need = needs(s, &pools), missing = need - has + extra;
    setting other[3] = {*s, *s, *s};
    other[0].num_never = 0, other[1].offload = 1;
    if (s->num_never) less[0] = need - needs(&other[0], NULL);
    snprintf(advice[0], sizeof advice[0], "with reshard_after_forward");
    if (s->num_never == 1)
        snprintf(advice[0], sizeof advice[0], "with reshard_after_forward on '%.32s'",
                 s->first ? s->first : "h.0");
    less[1] = need - needs(&other[1], NULL);
    snprintf(advice[1], sizeof advice[1], "with cpu_offload");
    do other[2].ranks += s->replicas; /* the smallest number that needs at most what there was */
    while (other[2].ranks < 2 * s->ranks && needs(&other[2], NULL) > has - extra);
    if (s->ranks > 1) less[2] = need - needs(&other[2], NULL);
    snprintf(advice[2], sizeof advice[2], "with %d ranks in place of %d", other[2].ranks, s->ranks);
    const char *unit_name = unit_for(need);
    int used = snprintf(text, sizeof text, "rank 0: %s: the model needs %.4g %s", what,
                        in_units(need), unit_name);
    const char *comma = " (";
    for (int p = 0; p < FSDP_POOL_SCRATCH; p++) {
        if (!pools.pool_bytes[p]) continue;
        used += sprintf(text + used, "%s%s %.4g", comma, fsdp_pool_name(p),
                        in_units(pools.pool_bytes[p]));
        comma = ", ";
    }
    used += sprintf(text + used, ") and has %.4g", in_units(has));
    for (int fits = 1; fits >= 0; fits--) {
        comma = fits ? ". It would fit " : ". It needs less ";
        for (int k = 0; k < 3; k++) {
            if (less[k] <= 0 || (less[k] >= missing) != fits) continue;
            used += sprintf(text + used, "%s%s (-%.4g)", comma, advice[k], in_units(less[k]));
            comma = ", ";
        }
    }
    snprintf(text + used, sizeof text - (size_t)used, "; %s", reason);
    return text;
}
/* Trains until memory is short. Returns the bytes that the model has then. */
static int64_t run_short(bed *b) {
    fsdp_memory has;
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
    CHECK_OK(fsdp_model_memory(b->m, &has));
    return has.total_bytes;
}

static const struct {
    const char *name;
    setting s;
    int64_t
        slots; /* that there is memory for besides shards and shard gradients; -1: not even these */
    const char *pool, *says;
} shortages[] = {
    {"nothing", {8, 1, 0, 0, 0, NULL}, -1, "shards", ". It needs less with "},
    {"more ranks",
     {8, 1, 0, 0, 0, NULL},
     1,
     "full gradients",
     ", with 11 ranks in place of 8 (-4.33); "},
    {"more shards of replicas", {8, 2, 0, 0, 0, NULL}, 1, "full gradients", ". It would fit with "},
    {"never",
     {8, 1, 0, UNITS, 0, NULL},
     3,
     "gathered parameters",
     ". It would fit with reshard_after_forward (-"},
    {"one never",
     {8, 1, 0, 1, 0, "embed"},
     1,
     "gathered parameters",
     "with reshard_after_forward on 'embed' (-"},
    {"streams", {8, 1, 1, 0, 0, NULL}, 2, "full gradients", "with cpu_offload (-"},
    {"one rank", {1, 1, 1, 0, 0, NULL}, -1, "shards", ". It needs less with cpu_offload (-"}};
TEST_P(explain, what_the_model_needs, shortages) {
    const setting *s = &row->s;
    fsdp_memory all;
    char what[100];
    bed b;
    (void)needs(s, &all);
    const int64_t kept = all.pool_bytes[FSDP_POOL_SHARD] + all.pool_bytes[FSDP_POOL_SHARD_GRAD];
    bed_open(&b, s);
    budget = row->slots < 0 ? kept / 2 - 1 : kept + 4096 + row->slots * (int64_t)SLOT;
    const int64_t has = run_short(&b);
    snprintf(what, sizeof what, "[E305] %lld bytes for %s cannot be allocated",
             (long long)(row->slots < 0 ? all.pool_bytes[FSDP_POOL_SHARD] : SLOT), row->pool);
    char text[1200];
    snprintf(text, sizeof text, "%s", fsdp_last_error(b.w));
    (void)fsdp_shutdown(b.w);
    CHECK_EQ_STR(text, expected(s, what, has, 0));
    CHECK_MSG(strlen(text) <= 400 && strstr(text, row->says), "%s", text);
}

/* An optimizer's states: the model has all that it needs, and memory it saves could hold the
   states. */
TEST(explain, what_an_optimizer_wants) {
    const setting s = {8, 1, 1, 2, 0, NULL};
    fsdp_adamw *adamw;
    fsdp_memory has;
    char what[120];
    bed b;
    bed_open(&b, &s);
    CALL(b.w, fsdp_model_reserve(b.m));
    CALL(b.w, fsdp_model_memory(b.m, &has));
    CHECK_EQ_INT(has.total_bytes, needs(&s, NULL));
    const int64_t states = 2 * (int64_t)UNITS * SLOT / 8;
    budget = states - 1;
    CHECK_STATUS(fsdp_adamw_create(b.m, NULL, &adamw), FSDP_ERR_OUT_OF_MEMORY);
    char text[1200];
    snprintf(text, sizeof text, "%s", fsdp_last_error(b.w));
    budget = states;
    CALL(b.w, fsdp_adamw_create(b.m, NULL, &adamw));
    CALL(NULL, fsdp_shutdown(b.w));
    snprintf(what, sizeof what,
             "[E304] adamw_create: no memory for a state of %lld bytes on device addresses",
             (long long)states);
    CHECK_EQ_STR(text, expected(&s, what, has.total_bytes, states));
    CHECK_MSG(strstr(text, ". It needs less with reshard_after_forward (-"), "%s", text);
}

/* Names and reasons of any length: the explanation ends at 400 characters, and the reason is
   complete. */
TEST(explain, texts_are_short) {
    static char name[600], why[900];
    setting s = {8, 1, 1, 1, 0, name};
    bed b;
    memset(name, 'n', sizeof name - 1), memset(why, 'w', sizeof why - 6);
    memcpy(why + sizeof why - 6, " left", 5);
    reason = why;
    bed_open(&b, &s);
    budget = 0;
    (void)run_short(&b);
    const char *text = fsdp_last_error(b.w);
    const char *whole = strstr(text, "; www");
    CHECK_MSG(whole && whole - text <= 400 && strstr(text, "the model needs ") &&
                  strstr(text, "on 'nnnnnnnnnnnnnnnnnnnnnnnnnnnnnnnn' (-"),
              "%d: %s", (int)strlen(text), text);
    CHECK_MSG(strlen(whole) > 500 && !strncmp(whole + 2, why, strlen(whole) - 3),
              "%d: %s", (int)strlen(text), text);
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

/* The tables of a prediction are allocated only if they are smaller than the block that was
   refused. */
static size_t largest;
static int refusals;
static void *small_alloc(size_t size, size_t align, void *user) {
    (void)user;
    if (size <= largest) return w_alloc(size, align, NULL);
    refusals++;
    return NULL;
}
TEST(explain, memory_that_failed_is_not_asked_for) {
    for (int has_tables = 0; has_tables < 2; has_tables++) {
        fsdp_world_desc d = w_desc(0, 1, NULL, "explain", 0);
        fsdp_param_desc p = fsdp_mat("w", has_tables ? ROWS : 8, has_tables ? COLS : 8);
        fsdp_world *w;
        d.allocator.alloc = small_alloc, d.allocator.free = w_free;
        largest = (size_t)-1, refusals = 0;
        CALL(NULL, fsdp_init(&d, &w));
        fsdp_model *m = lab_model(w, NULL);
        fsdp_unit *unit = lab_unit(w, m, NULL, &p, 1);
        CALL(w, fsdp_model_commit(m));
        fsdp_adamw *adamw = NULL;
        largest = has_tables ? SLOT : 500; /* states take two slots; or 512 bytes */
        CHECK_STATUS(fsdp_adamw_create(m, NULL, &adamw), FSDP_ERR_OUT_OF_MEMORY);
        CHECK_EQ_INT(refusals, 1);
        const char *text = fsdp_last_error(w);
        CHECK_MSG(strstr(text, "[E304] ") && !strstr(text, "the model needs ") == !has_tables, "%s",
                  text);
        largest = (size_t)-1;
        (void)unit;
        CALL(NULL, fsdp_shutdown(w));
    }
}

/* Without memory for a prediction the text omits it, and nothing else is logged. */
static int lines_logged;
static void count_lines(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)level, (void)code, (void)rank, (void)text, (void)user;
    lines_logged++;
}
TEST(explain, without_a_prediction) {
    int with = 0, n = 1;
    for (; !with; n++) { /* after the failure all allocations from the n-th on fail */
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
        w_fail(&heap, 2 + n); /* after the list of slots and the slot */
        CHECK_STATUS(fsdp_pre_forward(unit), FSDP_ERR_OUT_OF_MEMORY);
        CHECK_EQ_INT(lines_logged, 1); /* the world has failed with the same text */
        const char *text = fsdp_last_error(w);
        CHECK_MSG(strstr(text, "[E305]") && strstr(text, reason), "%s", text);
        with = heap.failures == 0;
        CHECK_MSG(!with || strstr(text, ". It needs less with "), "%s", text);
        (void)fsdp_shutdown(w);
        CHECK_EQ_INT(heap.live, 0);
    }
    CHECK(n > 10);
}
