/* host_cost.h - the work of bench_host, bench_plan and tests/core/test_budget.c: hooks of units of 12
   parameters on a device and a comm that do nothing, and the instructions that they take by
   valgrind's callgrind. Include it after fsdp_plan.h with FSDP_IMPLEMENTATION and after sim.h.

   SPDX-License-Identifier: MIT */
#ifndef HOST_COST_H
#define HOST_COST_H
#include <stdio.h>  /* fopen, snprintf */
#include <stdlib.h> /* exit, getenv, mkstemp, system */
#include <string.h> /* memset, strcmp */
#include <unistd.h> /* close, readlink */

enum { HOST_UNITS = 16, HOST_PARAMS = 12 };

/* Eager steps; replays of the eager ops, without passes; replays after all passes. */
enum { HOST_CALLS, HOST_REPLAYED, HOST_PLANNED, HOST_WAYS };

/* The parameters are those of a transformer block of `width` channels; `dim` 1: matrices are sharded
   by columns, W pieces each. */
typedef struct {
    int world, async;
    fsdp_dtype dtype;
    int width, dim, way;
} host_case;

typedef struct {
    sim s;
    fsdp_model *model;
    fsdp_plan *plan;                  /* or NULL */
    fsdp_unit *units[HOST_UNITS + 1]; /* the last one is for the getters alone */
} host_model;

/* Returns 0 on success. */
SIM_FN int host_open(host_model *h, const host_case *c) {
    const int64_t width = c->width;
    fsdp_param_desc block[HOST_PARAMS] = {fsdp_vec("ln1.w", width),
                                          fsdp_vec("ln1.b", width),
                                          fsdp_mat("qkv.w", 3 * width, width),
                                          fsdp_vec("qkv.b", 3 * width),
                                          fsdp_mat("out.w", width, width),
                                          fsdp_vec("out.b", width),
                                          fsdp_vec("ln2.w", width),
                                          fsdp_vec("ln2.b", width),
                                          fsdp_mat("up.w", 4 * width, width),
                                          fsdp_vec("up.b", 4 * width),
                                          fsdp_mat("down.w", width, 4 * width),
                                          fsdp_vec("down.b", width)};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_plan_desc pd = FSDP_ZERO;
    if (c->way == HOST_REPLAYED) pd.without = (1u << FSDP_PASS_COUNT) - 1;
    for (int i = 0; i < HOST_PARAMS; i++)
        if (block[i].ndim == 2) block[i].shard_dim = c->dim;
    memset(h, 0, sizeof *h);
    sim_init(&h->s, c->world, 0);
    h->s.async = c->async;
    h->s.null = 1;
    md.param_dtype = c->dtype;
    if (!sim_open(&h->s) || fsdp_model_create(h->s.world, &md, &h->model)) return 1;
    for (int i = 0; i <= HOST_UNITS; i++) {
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = block;
        ud.num_params = HOST_PARAMS;
        if (fsdp_fully_shard(h->model, &ud, &h->units[i])) return 1;
    }
    /* The loops ask for no gradients: without this there would be none to reduce. */
    if (fsdp_set_reduce_scatter_unused_params(h->model, NULL, 1)) return 1;
    if (fsdp_model_reserve(h->model)) return 1;
    return c->way != HOST_CALLS && fsdp_plan_create(h->model, &pd, &h->plan) != FSDP_OK;
}

/* Loops that callgrind counts by name: not static, never inlined. */
void host_forward(host_model *h);
void host_backward(host_model *h);
void host_finalize(host_model *h);
void host_data(host_model *h);
void host_grad(host_model *h);
void host_counted(host_model *h, int steps);

__attribute__((noinline)) void host_forward(host_model *h) {
    for (int i = 0; i < HOST_UNITS; i++) {
        (void)fsdp_pre_forward(h->units[i]);
        (void)fsdp_post_forward(h->units[i]);
    }
}
__attribute__((noinline)) void host_backward(host_model *h) {
    for (int i = HOST_UNITS - 1; i >= 0; i--) {
        (void)fsdp_pre_backward(h->units[i]);
        (void)fsdp_post_backward(h->units[i]);
    }
}
__attribute__((noinline)) void host_finalize(host_model *h) {
    if (fsdp_finalize_backward(h->model)) exit(1);
    (void)fsdp_params_changed(h->model);
    (void)fsdp_zero_grad(h->model);
}
/* All parameters of the last unit, HOST_UNITS times; it is open. */
__attribute__((noinline)) void host_data(host_model *h) {
    for (int i = 0; i < HOST_UNITS * HOST_PARAMS; i++)
        if (!fsdp_data(h->units[HOST_UNITS], i % HOST_PARAMS)) exit(1);
}
__attribute__((noinline)) void host_grad(host_model *h) {
    for (int i = 0; i < HOST_UNITS * HOST_PARAMS; i++)
        if (!fsdp_grad(h->units[HOST_UNITS], i % HOST_PARAMS)) exit(1);
}

static const struct {
    const char *name, *function;
    void (*run)(host_model *);
    int calls; /* in one run: the calls that `name` names */
} host_loops[] = {
    {"forward", "host_forward", host_forward, HOST_UNITS},    /* pre_forward + post_forward */
    {"backward", "host_backward", host_backward, HOST_UNITS}, /* pre_backward + post_backward */
    {"finalize", "host_finalize", host_finalize,
     HOST_UNITS}, /* per unit, with params_changed and zero_grad */
    {"data", "host_data", host_data, HOST_UNITS *HOST_PARAMS},
    {"grad", "host_grad", host_grad, HOST_UNITS *HOST_PARAMS},
};
enum { HOST_LOOPS = sizeof host_loops / sizeof *host_loops };

/* One step; before and after each loop `mark` is called with its number. */
SIM_FN void host_step(host_model *h, void (*mark)(void *user, int loop, int end), void *user) {
    static const int order[HOST_LOOPS] = {0, 3, 4, 1, 2};
    fsdp_unit *u = h->units[HOST_UNITS];
    for (int i = 0; i < HOST_LOOPS; i++) {
        int loop = order[i];
        if (loop == 3) (void)fsdp_pre_forward(u);
        if (loop == 4) (void)fsdp_pre_backward(u);
        if (mark) mark(user, loop, 0);
        host_loops[loop].run(h);
        if (mark) mark(user, loop, 1);
        if (loop == 3) (void)fsdp_post_forward(u);
        if (loop == 4) (void)fsdp_post_backward(u);
    }
}

/* Callgrind counts nothing outside. */
__attribute__((noinline)) void host_counted(host_model *h, int steps) {
    for (int i = 0; i < steps; i++) host_step(h, NULL, NULL);
}

/* In the process that callgrind runs: HOST_COST holds the case and the number of steps. */
__attribute__((constructor)) SIM_FN void host_cost_child(void) {
    enum { WARM_UP = 6 }; /* steps before all later steps are equal */
    const char *text = getenv("HOST_COST");
    host_case c;
    int dtype, steps;
    host_model h;
    if (!text || sscanf(text, "%d,%d,%d,%d,%d,%d,%d", &c.world, &c.async, &dtype, &c.width, &c.dim,
                        &c.way, &steps) != 7)
        return;
    c.dtype = (fsdp_dtype)dtype;
    if (host_open(&h, &c)) exit(1);
    for (int i = 0; i < WARM_UP; i++) host_step(&h, NULL, NULL);
    if (h.plan && fsdp_plan_state(h.plan) != FSDP_PLAN_REPLAYING) exit(1);
    host_counted(&h, steps);
    (void)sim_close(&h.s);
    exit(0);
}

/* Instructions of one call of each loop's kind, by one run of callgrind. Returns 0; 1: valgrind
   cannot be used. */
SIM_FN int host_instructions(const host_case *c, double out[HOST_LOOPS]) {
    enum { STEPS = 8 };
    const char *tmp = getenv("TMPDIR");
    char self[512], path[512], command[2048], line[1024];
    double cost;
    int current = -1, found = 0;
    ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length <= 0) return 1;
    self[length] = 0;
    snprintf(path, sizeof path, "%s/callgrind-XXXXXX", tmp && *tmp ? tmp : "/tmp");
    int fd = mkstemp(path);
    if (fd < 0) return 1;
    close(fd);
    snprintf(command, sizeof command,
             "HOST_COST=%d,%d,%d,%d,%d,%d,%d valgrind -q --tool=callgrind --compress-strings=no "
             "--compress-pos=no --toggle-collect=host_counted --callgrind-out-file='%s' '%s' "
             ">/dev/null 2>&1",
             c->world, c->async, (int)c->dtype, c->width, c->dim, c->way, STEPS, path, self);
    FILE *file = system(command) == 0 ? fopen(path, "r") : NULL;
    memset(out, 0, HOST_LOOPS * sizeof *out);
    /* After fn=NAME: "line cost" of its own, and after calls= that of a callee, all it calls
       included. */
    while (file && fgets(line, sizeof line, file)) {
        if (!strncmp(line, "fn=", 3)) {
            line[strcspn(line, "\n")] = 0;
            for (current = HOST_LOOPS - 1; current >= 0; current--)
                if (!strcmp(line + 3, host_loops[current].function)) break;
            found += current >= 0;
        } else if (current >= 0 && sscanf(line, "%*d %lf", &cost) == 1) {
            out[current] += cost / ((double)STEPS * host_loops[current].calls);
        }
    }
    if (file) fclose(file);
    remove(path);
    return found < HOST_LOOPS;
}
#endif /* HOST_COST_H */
