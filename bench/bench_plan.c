/* bench_plan.c - what a plan saves: host time for each op, time of a step, and what making one takes

       build/bench/bench_plan [--host] [--callgrind] [--steps] [--making] [--prove] [--ranks 2,4]
                              [--comm-threads 0]
       FSDP_BACKEND=gloo build/gloo/bench/bench_plan --steps

   --host      forward and backward of 16 units of 12 parameters, with a device and a comm that do
               nothing: eager, replayed without a pass, and with all passes;
               --callgrind: with instructions, which valgrind counts
   --steps     64 units of 16 x 16, where collectives cost their latency, and 6 of 1,024 x 1,024:
               eager, in buckets of 4, 8 and 16 units whose parameters are freed as in the eager
               step, and with the defaults. The caller only adds to gradients
   --making    what finalize of the recorded step takes more than that of others, by number of units
   --prove     what the proof takes, which is a part of that
   Without any of them: all. All ways of a table take turns, step by step, in one order and its
   reverse, so that other work of the machine affects all equally; times are medians. The steps of
   all ways must leave the same bits.
   Writes $FSDP_BUILD/bench_plan_host.csv, bench_plan.csv, bench_plan_making.csv and
   bench_plan_prove.csv.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"
#include "tests/library.c" /* what it measures */
#include "tests/sim.h"
#include "bench/host_cost.h"

/* ---- the host -------------------------------------------------------------------------------- */

enum { HOST_WARM_UP = 40, HOST_STEPS = 400, HOST_WIDTH = 64 };
static const char *const way_names[HOST_WAYS] = {"calls", "replayed", "planned"};

static int host_table(FILE *csv, int world, int async, int callgrind) {
    static host_model h[HOST_WAYS];
    static double samples[HOST_WAYS][3][HOST_STEPS];
    static const char *const what[3] = {"forward", "backward", "finalize"};
    host_case c = {world, async, FSDP_F32, HOST_WIDTH, 0, HOST_CALLS};
    int ops[HOST_WAYS];
    for (c.way = 0; c.way < HOST_WAYS; c.way++)
        if (host_open(&h[c.way], &c)) {
            fprintf(stderr, "bench_plan: %s\n", fsdp_last_error(h[c.way].s.world));
            return 1;
        }
    for (int step = -HOST_WARM_UP; step < HOST_STEPS; step++)
        for (int way = 0; way < HOST_WAYS; way++) {
            int64_t at[4] = {bench_now_ns(), 0, 0, 0};
            host_forward(&h[way]);
            at[1] = bench_now_ns();
            host_backward(&h[way]);
            at[2] = bench_now_ns();
            host_finalize(&h[way]);
            at[3] = bench_now_ns();
            for (int i = 0; i < 3 && step >= 0; i++)
                samples[way][i][step] = (double)(at[i + 1] - at[i]) / HOST_UNITS;
        }
    for (int way = 1; way < HOST_WAYS; way++) {
        fsdp_plan_report r;
        const fsdp_plan *plan = h[way].plan;
        if (fsdp_plan_state(plan) != FSDP_PLAN_REPLAYING || fsdp_plan_report_get(plan, 0, &r)) {
            fprintf(stderr, "bench_plan: no plan: %s\n", fsdp_plan_why(plan));
            return 1;
        }
        ops[0] = r.ops[0], ops[way] = r.ops[1];
    }
    for (int way = 0; way < HOST_WAYS; way++) {
        double median[3], instructions = -1;
        char count[32] = "";
        for (int i = 0; i < 3; i++) median[i] = bench_summarize(samples[way][i], HOST_STEPS).median;
        double per_op = (median[0] + median[1]) * HOST_UNITS / ops[way];
        if (callgrind) {
            double loops[HOST_LOOPS];
            c.way = way;
            if (!host_instructions(&c, loops))
                instructions = (loops[0] + loops[1]) * HOST_UNITS / ops[way];
            if (instructions < 0) fprintf(stderr, "bench_plan: valgrind cannot be used here\n");
            else snprintf(count, sizeof count, "%.0f", instructions);
        }
        printf("%-8s %5d  %-9s %6d %8.1f %8s ", async ? "streams" : "inline", world, way_names[way],
               ops[way], per_op, count);
        for (int i = 0; i < 3; i++) printf("  %s %.0f", what[i], median[i]);
        printf("\n");
        fprintf(csv, "%s,%d,%s,%d,%.1f,%s,%.1f,%.1f,%.1f\n", async ? "streams" : "inline", world,
                way_names[way], ops[way], per_op, count, median[0], median[1], median[2]);
        (void)sim_close(&h[way].s);
    }
    fflush(NULL);
    return 0;
}

static int host_tables(int callgrind) {
    static const int worlds[] = {2, 1024};
    int failed = 0;
    FILE *csv = bench_csv("bench_plan_host", "mode,world,way,ops,ns_per_op,instructions_per_op,"
                                             "forward_ns,backward_ns,finalize_ns");
    printf("%-8s %5s  %-9s %6s %8s %8s   ns of a unit's hooks\n", "mode", "W", "way", "ops",
           "ns/op", "instr/op");
    for (int async = 0; async < 2; async++)
        for (int i = 0; i < 2; i++) failed |= host_table(csv, worlds[i], async, callgrind);
    fclose(csv);
    return failed;
}

/* ---- steps ----------------------------------------------------------------------------------- */

enum { STEP_WARM_UP = 5, STEPS_MOST = 200, UNITS_MOST = 64 };
enum { BY_CALLS = 0, BUCKET_4, BUCKET_8, BUCKET_16, DEFAULTS, STEP_WAYS };
static const char *const step_ways[STEP_WAYS] = {"calls", "4 units", "8 units", "16 units",
                                                 "defaults"};
static const struct { int units, width, steps; } shapes[] = {{64, 16, 100}, {6, 1024, 15}};

typedef struct { // one way of a step
    bench_stats us;
    int gathers, reductions, replays, same_bits;
    uint64_t bytes; // read from other ranks in a step
    int64_t slots;  // bytes
} step_result;

typedef struct {
    int shape, world, threads;
    step_result *out; // [STEP_WAYS], common memory of the ranks
} step_job;

typedef struct {
    fsdp_model *model;
    fsdp_unit *units[UNITS_MOST];
    fsdp_plan *plan;
    fsdp_counters last;
    double us[STEPS_MOST];
    uint64_t hash;
} stepper;

static void step_init(void *user, const fsdp_param_view *v) {
    (void)user;
    for (int64_t k = 0; k < v->numel; k++)
        ((float *)v->data)[k] = (float)((fsdp_view_index(v, k) * 7 + v->ordinal) % 23) / 64;
}

static fsdp_status step_open(fsdp_world *world, const step_job *j, int way, stepper *s) {
    static const int units_of[STEP_WAYS] = {0, 4, 8, 16, 0};
    const int width = shapes[j->shape].width;
    fsdp_plan_desc pd = FSDP_ZERO;
    fsdp_status status = fsdp_model_create(world, NULL, &s->model);
    for (int u = 0; u < shapes[j->shape].units && !status; u++) {
        fsdp_param_desc p = fsdp_mat("w", width, width);
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = &p, ud.num_params = 1;
        status = fsdp_fully_shard(s->model, &ud, &s->units[u]);
    }
    if (!status) status = fsdp_init_params(s->model, step_init, NULL);
    if (status || way == BY_CALLS) return status;
    if (units_of[way]) { // room for the buckets, and nothing else that saves gathers
        pd.without = 1u << FSDP_PASS_KEEP;
        pd.bucket_bytes = (int64_t)units_of[way] * width * width * 4;
        pd.most_bytes = (int64_t)1 << 30;
    }
    return fsdp_plan_create(s->model, &pd, &s->plan);
}

static fsdp_status step_once(const step_job *j, int rank, int step, stepper *s) {
    const int units = shapes[j->shape].units, width = shapes[j->shape].width;
    float seen = 0;
    for (int u = 0; u < units; u++) {
        fsdp_pre_forward(s->units[u]);
        seen += ((const float *)fsdp_data(s->units[u], 0))[u];
        fsdp_post_forward(s->units[u]);
    }
    for (int u = units - 1; u >= 0; u--) {
        fsdp_pre_backward(s->units[u]);
        const float *w = (const float *)fsdp_data(s->units[u], 0);
        float *g = (float *)fsdp_grad(s->units[u], 0), scale = seen + (float)(rank + step % 8);
        for (int k = 0; k < width * width; k++) g[k] += scale * w[k];
        fsdp_post_backward(s->units[u]);
    }
    return fsdp_finalize_backward(s->model);
}

static fsdp_status step_measure(fsdp_world *world, const step_job *j, int step, stepper *s) {
    fsdp_param_view v = FSDP_ZERO;
    fsdp_status status = fsdp_model_counters(s->model, &s->last);
    if (!status) status = fsdp_barrier(world);
    int64_t begin = bench_now_ns();
    if (!status) status = step_once(j, fsdp_rank(world), step, s);
    if (step >= 0) s->us[step] = (double)(bench_now_ns() - begin) * 1e-3;
    while (!status && fsdp_next_param(s->model, &v)) // FNV-1a of the gradients' bits
        for (int64_t k = 0; k < v.numel; k++) {
            uint32_t bits;
            memcpy(&bits, (const float *)v.shard_grad + k, sizeof bits);
            s->hash = (s->hash ^ bits) * 0x100000001B3u;
        }
    return status ? status : fsdp_zero_grad(s->model);
}

static fsdp_status step_tell(fsdp_world *world, stepper *s, const stepper *calls, int steps,
                             step_result *out) {
    fsdp_counters c = FSDP_ZERO;
    fsdp_memory m = FSDP_ZERO;
    fsdp_plan_report r = FSDP_ZERO;
    int64_t same = s->hash == calls->hash;
    fsdp_status status = fsdp_model_counters(s->model, &c);
    if (!status) status = fsdp_model_memory(s->model, &m);
    if (!status && fsdp_plan_count(s->plan)) status = fsdp_plan_report_get(s->plan, 0, &r);
    if (!status) status = fsdp_all_reduce(world, NULL, &same, 1, FSDP_I64, FSDP_MIN);
    if (status || fsdp_rank(world)) return status;
    out->us = bench_summarize(s->us, steps);
    out->gathers = (int)(c.calls[FSDP_OP_ALL_GATHER] - s->last.calls[FSDP_OP_ALL_GATHER]);
    out->reductions = (int)(c.calls[FSDP_OP_REDUCE_SCATTER] -
                            s->last.calls[FSDP_OP_REDUCE_SCATTER]);
    for (int kind = 0; kind < FSDP_OP_COUNT; kind++)
        out->bytes += c.bytes[kind] - s->last.bytes[kind];
    for (int pool = FSDP_POOL_GATHER; pool < FSDP_POOL_MAX; pool++)
        out->slots += pool == FSDP_POOL_SCRATCH ? 0 : m.pool_bytes[pool];
    out->replays = (int)r.replayed;
    out->same_bits = (int)same;
    return FSDP_OK;
}

static int step_rank(fsdp_world *world, void *arg) {
    const step_job *j = (const step_job *)arg;
    const int steps = shapes[j->shape].steps;
    stepper *s = (stepper *)calloc(STEP_WAYS, sizeof *s);
    fsdp_status status = s ? FSDP_OK : FSDP_ERR_OUT_OF_MEMORY;
    for (int way = 0; way < STEP_WAYS && !status; way++) status = step_open(world, j, way, &s[way]);
    for (int step = -STEP_WARM_UP; step < steps; step++)
        for (int way = 0; way < STEP_WAYS && !status; way++) // there and back: none has the
            status = step_measure(world, j, step,            // same one before it in all rounds
                                  &s[step % 2 ? STEP_WAYS - 1 - way : way]);
    for (int way = 0; way < STEP_WAYS && !status; way++)
        status = step_tell(world, &s[way], s, steps, &j->out[way]);
    free(s);
    return (int)status;
}

static int step_table(FILE *csv, step_job *j) {
    const char *backend = getenv("FSDP_BACKEND");
    fsdp_world_desc world = FSDP_ZERO;
    fsdp_spawn_desc desc = FSDP_ZERO;
    int failed = 0;
    world.comm_threads = j->threads ? j->threads : -1;
    desc.world = &world;
    desc.num_ranks = j->world;
    memset(j->out, 0, STEP_WAYS * sizeof *j->out);
    if (fsdp_spawn(&desc, step_rank, j)) return 1; // the reason has been logged
    if (!backend || !*backend) backend = "default";
    for (int way = 0; way < STEP_WAYS; way++) {
        const step_result *r = &j->out[way];
        int units = shapes[j->shape].units, width = shapes[j->shape].width;
        int wrong = !r->same_bits || (way && r->replays < shapes[j->shape].steps);
        printf("%-8s %5d %6d %3d %5d  %-9s %9.1f %9.1f %6.2f %5d %5d %12llu %12lld  %s\n", backend,
               units, width, j->world, j->threads, step_ways[way], r->us.median, r->us.min,
               j->out->us.median / r->us.median, r->gathers, r->reductions,
               (unsigned long long)r->bytes, (long long)r->slots,
               !r->same_bits ? "OTHER BITS"
               : wrong       ? "NOT REPLAYED"
                             : "same bits");
        fprintf(csv, "%s,%d,%d,%d,%d,%s,%.1f,%.1f,%.1f,%d,%d,%llu,%lld\n", backend, units, width,
                j->world, j->threads, step_ways[way], r->us.median, r->us.min, r->us.p95,
                r->gathers, r->reductions, (unsigned long long)r->bytes, (long long)r->slots);
        failed |= wrong;
    }
    fflush(NULL);
    return failed;
}

static int step_tables(const int *worlds, int num_worlds, const int *threads, int num_threads) {
    step_job j;
    int failed = 0;
    j.out = (step_result *)mmap(NULL, STEP_WAYS * sizeof *j.out, PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (j.out == MAP_FAILED) return 1;
    FILE *csv = bench_csv("bench_plan", "backend,units,width,world,threads,way,median_us,min_us,"
                                        "p95_us,gathers,reductions,bytes_read,slots");
    printf("%-8s %5s %6s %3s %5s  %-9s %9s %9s %6s %5s %5s %12s %12s\n", "backend", "units",
           "width", "W", "threads", "way", "median us", "min", "faster", "AG", "RS", "bytes read",
           "slots");
    for (j.shape = 0; j.shape < (int)(sizeof shapes / sizeof *shapes); j.shape++)
        for (int w = 0; w < num_worlds; w++)
            for (int l = 0; l < num_threads; l++) {
                j.world = worlds[w], j.threads = threads[l];
                failed |= step_table(csv, &j);
            }
    fclose(csv);
    return failed;
}

/* ---- making ---------------------------------------------------------------------------------- */

enum { MAKINGS = 15, MAKING_UNITS = 130, MAKING_PARAMS = 12 };

typedef struct {
    sim s;
    fsdp_model *model;
    fsdp_plan *plan;
    fsdp_unit *units[MAKING_UNITS];
    int num;
} maker;

// One rank of 8, whose device and comm do nothing.
static int maker_open(maker *m, int units, int async) {
    fsdp_param_desc p[MAKING_PARAMS];
    for (int i = 0; i < MAKING_PARAMS; i++)
        p[i] = i % 2 ? fsdp_vec(NULL, 16) : fsdp_mat(NULL, 16, 16);
    sim_init(&m->s, 8, 0);
    m->s.async = async;
    m->s.null = 1;
    m->num = units;
    if (!sim_open(&m->s) || fsdp_model_create(m->s.world, NULL, &m->model)) return 1;
    for (int i = 0; i < units; i++) {
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = p, ud.num_params = MAKING_PARAMS;
        if (fsdp_fully_shard(m->model, &ud, &m->units[i])) return 1;
    }
    return fsdp_plan_create(m->model, NULL, &m->plan) != FSDP_OK;
}
static void maker_calls(maker *m) {
    for (int i = 0; i < m->num; i++) fsdp_pre_forward(m->units[i]), fsdp_post_forward(m->units[i]);
    for (int i = m->num; i-- > 0;) fsdp_pre_backward(m->units[i]), fsdp_post_backward(m->units[i]);
}

static int making_of(FILE *csv, int units, int async) {
    static maker m;
    fsdp_plan_report r;
    double made[MAKINGS], others[MAKINGS];
    if (maker_open(&m, units, async)) return 1;
    for (int step = 0; step < 2 * MAKINGS + 1; step++) { // the first one is a warm-up
        maker_calls(&m);
        int64_t begin = bench_now_ns();
        if (fsdp_finalize_backward(m.model)) return 1;
        double us = (double)(bench_now_ns() - begin) * 1e-3;
        if (step % 2) made[step / 2] = us;
        else if (step) others[step / 2 - 1] = us;
        if (fsdp_zero_grad(m.model)) return 1;
        if (step % 2 && fsdp_plan_report_get(m.plan, 0, &r)) return 1;
        if (step && step % 2 == 0 && fsdp_plan_forget(m.plan)) return 1; // record the next one
    }
    double us = bench_summarize(made, MAKINGS).median - bench_summarize(others, MAKINGS).median;
    printf("%-8s %5d %7d %9.2f %10lld %8.0f  %s\n", async ? "streams" : "inline", units, r.ops[1],
           us * 1e-3, (long long)r.host_bytes, (double)r.host_bytes / r.ops[1],
           units < 130       ? ""
           : us <= 20 * 1000 ? "goal met"
                             : "above the goal of 20 ms");
    fprintf(csv, "%s,%d,%d,%.1f,%lld\n", async ? "streams" : "inline", units, r.ops[1], us,
            (long long)r.host_bytes);
    fflush(NULL);
    (void)sim_close(&m.s);
    return 0;
}

static int making_table(void) {
    static const int units[] = {10, 30, 130};
    int failed = 0;
    FILE *csv = bench_csv("bench_plan_making", "mode,units,ops,making_us,table_bytes");
    printf("%-8s %5s %7s %9s %10s %8s\n", "mode", "units", "ops", "making ms", "tables",
           "bytes/op");
    for (int async = 0; async < 2; async++)
        for (int i = 0; i < 3; i++) failed |= making_of(csv, units[i], async);
    fclose(csv);
    return failed;
}

/* ---- proving --------------------------------------------------------------------------------- */

static int prove_of(FILE *csv, int units, int async) {
    static maker m;
    fsdp_plan_proof p;
    double us[MAKINGS];
    if (maker_open(&m, units, async)) return 1;
    for (int step = 0; step < 2; step++) { // a warm-up, and one that is recorded
        maker_calls(&m);
        if (fsdp_finalize_backward(m.model) || fsdp_zero_grad(m.model)) return 1;
    }
    for (int i = 0; i < MAKINGS; i++) {
        int64_t begin = bench_now_ns();
        if (fsdp_plan_prove(m.plan, 0, &p) || p.refuted) return 1;
        us[i] = (double)(bench_now_ns() - begin) * 1e-3;
    }
    const bench_stats took = bench_summarize(us, MAKINGS);
    printf("%-8s %5d %7lld %9lld %9.3f %9.3f  %s\n", async ? "streams" : "inline", units,
           (long long)p.ops, (long long)p.accesses, took.median * 1e-3, took.min * 1e-3,
           units != 100            ? ""
           : took.median <= 1000.0 ? "goal met"
                                   : "above the goal of 1 ms");
    fprintf(csv, "%s,%d,%lld,%lld,%.1f,%.1f\n", async ? "streams" : "inline", units,
            (long long)p.ops, (long long)p.accesses, took.median, took.min);
    fflush(NULL);
    (void)sim_close(&m.s);
    return 0;
}

static int prove_table(void) {
    static const int units[] = {10, 30, 100};
    int failed = 0;
    FILE *csv = bench_csv("bench_plan_prove", "mode,units,ops,accesses,median_us,min_us");
    printf("%-8s %5s %7s %9s %9s %9s\n", "mode", "units", "ops", "accesses", "proof ms", "min");
    for (int async = 0; async < 2; async++)
        for (int i = 0; i < 3; i++) failed |= prove_of(csv, units[i], async);
    fclose(csv);
    return failed;
}

int main(int argc, char **argv) {
    int host = 0, callgrind = 0, steps = 0, making = 0, prove = 0, failed = 0;
    int worlds[8] = {2, 4}, threads[8] = {0}, num_worlds = 2, num_threads = 1;
    for (int i = 1; i < argc; i++) {
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (!strcmp(argv[i], "--host")) host = 1;
        else if (!strcmp(argv[i], "--callgrind")) callgrind = host = 1;
        else if (!strcmp(argv[i], "--steps")) steps = 1;
        else if (!strcmp(argv[i], "--making")) making = 1;
        else if (!strcmp(argv[i], "--prove")) prove = 1;
        else if (!strcmp(argv[i], "--ranks")) num_worlds = bench_parse_list(value, 1, 64, worlds);
        else if (!strcmp(argv[i], "--comm-threads"))
            num_threads = bench_parse_list(value, 0, 2, threads);
        else num_worlds = 0;
        i += !strcmp(argv[i], "--ranks") || !strcmp(argv[i], "--comm-threads");
    }
    if (!num_worlds || !num_threads) {
        fprintf(stderr,
                "usage: %s [--host] [--callgrind] [--steps] [--making] [--prove] [--ranks 2,4] "
                "[--comm-threads 0,2]\n",
                argv[0]);
        return 2;
    }
    if (!host && !steps && !making && !prove) host = steps = making = prove = 1;
    if (host) failed |= host_tables(callgrind);
    if (steps) failed |= step_tables(worlds, num_worlds, threads, num_threads);
    if (making) failed |= making_table();
    if (prove) failed |= prove_table();
    return failed;
}
