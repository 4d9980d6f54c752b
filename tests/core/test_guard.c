/* test_guard.c - under AddressSanitizer a trainer that accesses memory which it must not access
   stops at that line. Each mistake runs in its own process, whose report is read.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"

enum { UNITS = 3, N = 64, ODD = 5 }; /* parameters of each unit: N elements, and ODD elements */

typedef struct {
    fsdp_model *m;
    fsdp_unit *u[UNITS];
    int rank;
} rig;

typedef struct {
    const char *name;
    void (*make)(rig *x);
    fsdp_dtype dtype; /* param_dtype */
    int shards_only;  /* not on one rank, whose gradients are the shard gradients */
} mistake;

typedef struct {
    const mistake *what;
    int lanes;
    int *line; /* line of the mistake, in shared memory */
} order;

static order now;
#define WRONG_READ(at)  (*now.line = __LINE__, (void)*(const volatile char *)(at))
#define WRONG_WRITE(at) (*now.line = __LINE__, (void)(*(volatile char *)(at) = 1))

static char *open_forward(rig *x, int u) {
    (void)fsdp_pre_forward(x->u[u]);
    return (char *)fsdp_data(x->u[u], 0);
}
static void forward(rig *x) {
    for (int u = 0; u < UNITS; u++) {
        (void)open_forward(x, u);
        (void)fsdp_post_forward(x->u[u]);
    }
}
static char *open_backward(rig *x, int u) {
    (void)fsdp_pre_backward(x->u[u]);
    return (char *)fsdp_grad(x->u[u], 0);
}

/* -- the mistakes -- */

static void after_post_forward(rig *x) {
    char *w = open_forward(x, 0);
    (void)fsdp_post_forward(x->u[0]);
    WRONG_READ(w + 12);
}
static void in_the_next_unit(rig *x) {
    char *w = open_forward(x, 0);
    (void)fsdp_post_forward(x->u[0]);
    (void)open_forward(x, 1);
    WRONG_READ(w);
}
static void in_the_unit_after_that(rig *x) {
    char *w = open_forward(x, 0);
    (void)fsdp_post_forward(x->u[0]);
    (void)open_forward(x, 1);
    (void)fsdp_post_forward(x->u[1]);
    (void)open_forward(x, 2);
    WRONG_READ(w);
}
static void of_forward_in_backward(rig *x) {
    char *w = open_forward(x, UNITS - 1);
    (void)fsdp_post_forward(x->u[UNITS - 1]);
    (void)open_backward(x, UNITS - 1);
    WRONG_READ(w);
}
static void after_the_step(rig *x) {
    forward(x);
    (void)fsdp_pre_backward(x->u[0]);
    char *w = (char *)fsdp_data(x->u[0], 0);
    (void)fsdp_post_backward(x->u[0]);
    if (fsdp_finalize_backward(x->m)) return;
    WRONG_READ(w);
}
static void by_a_wider_type(rig *x) { /* reads bf16 parameters as f32 */
    (void)open_forward(x, 0);
    WRONG_READ((char *)fsdp_data(x->u[0], 1) + 4 * (ODD - 2));
}
static void after_a_parameter(rig *x) {
    (void)open_forward(x, 0);
    WRONG_READ((char *)fsdp_data(x->u[0], 1) + 4 * ODD);
}
static void before_a_parameter(rig *x) {
    char *w = open_forward(x, 0);
    WRONG_READ(w - 1);
}
static void after_a_gradient(rig *x) {
    forward(x);
    (void)open_backward(x, 0);
    WRONG_WRITE((char *)fsdp_grad(x->u[0], 1) + 4 * ODD);
}
static void far_after_a_gradient(rig *x) {
    forward(x);
    WRONG_WRITE(open_backward(x, UNITS - 1) + 4 * N + 1024);
}
static void gradient_after_post_backward(rig *x) {
    forward(x);
    char *g = open_backward(x, UNITS - 1);
    (void)fsdp_post_backward(x->u[UNITS - 1]);
    if (fsdp_finalize_backward(x->m)) return;
    WRONG_WRITE(g);
}
/* With worker threads, rank 0's post_backward returns before the reduction, which needs rank 1,
   ends. */
static void gradient_once_it_is_reduced(rig *x) {
    volatile int *line = now.line;
    forward(x);
    char *g = open_backward(x, UNITS - 1);
    while (now.lanes > 0 && x->rank && !*line) sched_yield();
    (void)fsdp_post_backward(x->u[UNITS - 1]);
    if (!x->rank) *line = __LINE__;
    if (fsdp_wait_stream(x->m, -1)) return;
    (void)open_backward(x, UNITS - 2);
    if (!x->rank) WRONG_WRITE(g);
}
static void gradient_between_microbatches(rig *x) {
    (void)fsdp_set_requires_gradient_sync(x->m, NULL, 0);
    forward(x);
    char *g = open_backward(x, 0);
    (void)fsdp_post_backward(x->u[0]);
    WRONG_WRITE(g);
}

static const mistake mistakes[] = {
    {"after_post_forward", after_post_forward, FSDP_DTYPE_KEEP, 0},
    {"in_the_next_unit", in_the_next_unit, FSDP_DTYPE_KEEP, 0},
    {"in_the_unit_after_that", in_the_unit_after_that, FSDP_DTYPE_KEEP, 0},
    {"of_forward_in_backward", of_forward_in_backward, FSDP_DTYPE_KEEP, 0},
    {"after_the_step", after_the_step, FSDP_DTYPE_KEEP, 0},
    {"by_a_wider_type", by_a_wider_type, FSDP_BF16, 0},
    {"after_a_parameter", after_a_parameter, FSDP_DTYPE_KEEP, 0},
    {"before_a_parameter", before_a_parameter, FSDP_DTYPE_KEEP, 0},
    {"after_a_gradient", after_a_gradient, FSDP_DTYPE_KEEP, 1},
    {"far_after_a_gradient", far_after_a_gradient, FSDP_DTYPE_KEEP, 0},
    {"gradient_after_post_backward", gradient_after_post_backward, FSDP_DTYPE_KEEP, 1},
    {"gradient_once_it_is_reduced", gradient_once_it_is_reduced, FSDP_DTYPE_KEEP, 1},
    {"gradient_between_microbatches", gradient_between_microbatches, FSDP_DTYPE_KEEP, 0},
};

static int trainer(fsdp_world *w, void *arg) {
    const order *o = (const order *)arg;
    fsdp_param_desc p[2] = {fsdp_vec("w", N), fsdp_vec("odd", ODD)};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    rig x;
    x.rank = fsdp_rank(w);
    md.param_dtype = o->what->dtype;
    ud.params = p, ud.num_params = 2;
    if (fsdp_model_create(w, &md, &x.m)) return 1;
    for (int u = 0; u < UNITS; u++)
        if (fsdp_fully_shard(x.m, &ud, &x.u[u])) return 1;
    o->what->make(&x);
    return 0; /* the mistake was not found */
}

/* Runs a mistake in a child, whose output goes to the file. */
static void run_mistake(const char *file, int ranks) {
    fsdp_world_desc wd = FSDP_ZERO;
    fsdp_spawn_desc d = FSDP_ZERO;
    int fd = open(file, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || dup2(fd, 2) < 0) _exit(2);
    wd.comm_threads = now.lanes;
    d.num_ranks = ranks;
    d.world = &wd;
    d.threads = now.lanes < 0;
    _exit(fsdp_spawn(&d, trainer, &now) == FSDP_OK ? 0 : 1);
}

static void read_text(const char *file, char *text, size_t cap) {
    FILE *f = fopen(file, "r");
    CHECK(f != NULL);
    text[fread(text, 1, cap - 1, f)] = 0;
    fclose(f);
}

/* Checks that the process stops at the mistake. Returns whether the report names lines. */
static int stops(const mistake *what, int ranks, int lanes) {
    static char text[1 << 16];
    char file[400], place[64];
    int status = 0;
    snprintf(file, sizeof file, "%s/report", h_tmpdir());
    now.what = what;
    now.lanes = lanes;
    now.line = (int *)lab_shared(sizeof *now.line);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) run_mistake(file, ranks);
    CHECK(waitpid(child, &status, 0) == child);
    read_text(file, text, sizeof text);
    CHECK_MSG(status, "%s of %d ranks, lanes %d: it has not stopped at line %d", what->name, ranks,
              lanes, *now.line);
    char *frame = strstr(text, "    #0 "); /* the access */
    CHECK_MSG(strstr(text, "ERROR: AddressSanitizer: use-after-poison") && frame,
              "%s of %d ranks, lanes %d: %s", what->name, ranks, lanes, text);
    frame[strcspn(frame, "\n")] = 0;
    if (!strstr(frame, " in ")) return 0;
    snprintf(place, sizeof place, "test_guard.c:%d", *now.line);
    CHECK_MSG(strstr(frame, place), "%s of %d ranks, lanes %d: expected %s in %s", what->name,
              ranks, lanes, place, frame);
    return 1;
}

TEST_P(guard, stops_at, mistakes) {
    if (!W_ASAN) SKIP("it is not built with AddressSanitizer");
    int named = row->shards_only || stops(row, 1, -1);
    named &= stops(row, 2, -1);
    named &= stops(row, 2, 1);
    if (!named) SKIP("it has stopped, but AddressSanitizer finds no symbolizer to name the line");
}
