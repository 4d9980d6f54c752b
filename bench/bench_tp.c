/* bench_tp.c - what redistributions cost: nanoseconds of the host on a device and a comm that do
   nothing, the search for routes, and over shared memory the time beside the bare collective.

       build/bench/bench_tp            all
       build/bench/bench_tp --host     without ranks

   Goals: 100 ns for one step in place, 150 ns with two copies, 200 ns for begin and wait; 1 us for
   all redistributions of an MLP with sequence parallel, forward and backward, 0.3 us for those of a
   loss; 5 us for a route on two mesh dims, 100 us in the mean of pairs on three; 1.1 times the bare
   collective from 64 KiB on. Writes $FSDP_BUILD/bench_tp.csv.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"
#include "tests/library.c" /* what it measures */
#include "tests/sim.h"

enum { LOOPS = 2000, ROWS = 64, COLS = 32 };

static FILE *csv;

static void show(const char *what, bench_stats s, const char *unit, double goal) {
    printf("%-44s %10.1f %10.1f %10.1f %s%s\n", what, s.min, s.median, s.p95, unit,
           goal <= 0          ? ""
           : s.median <= goal ? "  goal met"
                              : "  above the goal");
    fprintf(csv, "%s,%s,%.1f,%.1f,%.1f\n", what, unit, s.min, s.median, s.p95);
    fflush(stdout);
}

/* ---- specs ----------------------------------------------------------------------------------- */

static fsdp_placement place_of(char c, int dim) {
    fsdp_placement p = {0, 0, 0, 0};
    if (c == 'S') p.kind = FSDP_SHARD, p.dim = (int8_t)dim;
    if (c == 'P') p.kind = FSDP_PARTIAL;
    return p;
}

/* On (dp, tp), alike on dp; over tp "R", "P", "S0" or "S1". */
static fsdp_spec spec_of(int dp, int tp, const char *over_tp, int64_t rows, int64_t cols) {
    const int32_t mesh[2] = {dp, tp};
    const int64_t shape[2] = {rows, cols};
    const fsdp_placement place[2] = {place_of('R', 0), place_of(over_tp[0], over_tp[1] - '0')};
    fsdp_spec s;
    if (fsdp_spec_init(&s, 2, mesh, place, FSDP_F32, 2, shape)) exit(1);
    return s;
}

static fsdp_redistribution *way(fsdp_dmesh *dm, int dp, int tp, const char *from, const char *to,
                                int64_t rows) {
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *r;
    d.from = spec_of(dp, tp, from, rows, COLS);
    d.to = spec_of(dp, tp, to, rows, COLS);
    if (fsdp_redistribution_create(dm, &d, &r)) exit(1);
    return r;
}

/* ---- the host -------------------------------------------------------------------------------- */

typedef struct {
    fsdp_redistribution *r;
    void *dst;
    const void *src;
    int beside;
} call;

static double ns_of(void *arg) {
    const call *c = (const call *)arg;
    int64_t begin = bench_now_ns();
    for (int i = 0; i < LOOPS; i++)
        if (c->beside) {
            (void)fsdp_redistribute_begin(c->r, c->dst, c->src);
            (void)fsdp_redistribute_wait(c->r);
        } else (void)fsdp_redistribute(c->r, c->dst, c->src);
    return (double)(bench_now_ns() - begin) / LOOPS;
}

/* What a layer calls, one after the other. */
typedef struct {
    call calls[4];
    int count;
} layer;
static double ns_of_layer(void *arg) {
    const layer *l = (const layer *)arg;
    int64_t begin = bench_now_ns();
    for (int i = 0; i < LOOPS; i++)
        for (int k = 0; k < l->count; k++)
            (void)fsdp_redistribute(l->calls[k].r, l->calls[k].dst, l->calls[k].src);
    return (double)(bench_now_ns() - begin) / LOOPS;
}

/* A number for each row: addends, or their sum. */
static fsdp_redistribution *sum_of_rows(fsdp_dmesh *dm, int op, int64_t rows) {
    const int32_t mesh[2] = {2, 2};
    fsdp_placement from[2] = {place_of('R', 0), place_of('P', 0)}, to[2];
    fsdp_redistribution_desc d = FSDP_ZERO;
    fsdp_redistribution *r;
    from[1].op = (int8_t)op;
    to[0] = to[1] = from[0];
    if (fsdp_spec_init(&d.from, 2, mesh, from, FSDP_F32, 1, &rows)) exit(1);
    if (fsdp_spec_init(&d.to, 2, mesh, to, FSDP_F32, 1, &rows)) exit(1);
    if (fsdp_redistribution_create(dm, &d, &r)) exit(1);
    return r;
}

/* What tensor parallelism adds to a pass: all in place, in memory that peers read. */
static void layers(fsdp_dmesh *dm, void *const *at, int async) {
    const char *how = async ? "streams" : "inline";
    fsdp_redistribution *gather = way(dm, 2, 2, "S0", "R", ROWS), *gather_back, *scatter_back;
    fsdp_redistribution *scatter = way(dm, 2, 2, "P", "S0", ROWS),
                        *sum = way(dm, 2, 2, "P", "R", ROWS);
    const fsdp_spec adds = spec_of(2, 2, "P", ROWS, COLS);
    char name[80];
    if (fsdp_redistribution_create_backward(gather, &adds, &gather_back)) exit(1);
    if (fsdp_redistribution_create_backward(scatter, NULL, &scatter_back)) exit(1);
    layer tokens = {{{gather, at[1], at[0], 0},
                     {scatter, at[0], at[1], 0},
                     {scatter_back, at[1], at[0], 0},
                     {gather_back, at[0], at[1], 0}},
                    4};
    layer plain = {{{sum, at[1], at[1], 0}, {sum, at[1], at[1], 0}}, 2};
    layer loss = {{{sum_of_rows(dm, FSDP_MAX, ROWS), at[0], at[0], 0},
                   {sum_of_rows(dm, FSDP_SUM, 2 * ROWS), at[1], at[1], 0}},
                  2};
    snprintf(name, sizeof name, "%s, MLP, sequence parallel: 4 steps", how);
    show(name, bench_run(ns_of_layer, &tokens, 3, 0.3, 300), "ns", 1000);
    snprintf(name, sizeof name, "%s, MLP, plain: 2 sums", how);
    show(name, bench_run(ns_of_layer, &plain, 3, 0.3, 300), "ns", 1000);
    snprintf(name, sizeof name, "%s, loss: 2 sums", how);
    show(name, bench_run(ns_of_layer, &loss, 3, 0.3, 300), "ns", 300);
}

static int host(int async) {
    static float mine[2][ROWS * COLS];
    static const struct {
        const char *name, *from, *to;
        int private_memory, beside;
        double goal;
    } cases[] = {{"S0 -> R in place", "S0", "R", 0, 0, 100},
                 {"P -> S0 in place", "P", "S0", 0, 0, 100},
                 {"P -> R in place", "P", "R", 0, 0, 100},
                 {"P -> R with two copies", "P", "R", 1, 0, 150},
                 {"S1 -> S0 with two copies", "S1", "S0", 1, 0, 150},
                 {"S0 -> R, begin and wait", "S0", "R", 0, 1, 200}};
    static const char *const names[2] = {"dp", "tp"};
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_mesh_desc mesh = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_model *model;
    fsdp_mesh *m;
    void *at[2];
    sim s;
    sim_init(&s, 4, 0);
    s.async = async, s.null = 1;
    mesh.ndim = 2, mesh.shape[0] = mesh.shape[1] = 2;
    mesh.names[0] = names[0], mesh.names[1] = names[1];
    if (!sim_open(&s) || fsdp_mesh_create(s.world, &mesh, &m)) return 1;
    if (fsdp_mesh_info_init(m, FSDP_MESH_INFO_HSDP, 0, 1, &info)) return 1;
    md.mesh_info = &info, dd.mesh = m, dd.overlap = 1;
    fsdp_dmesh *dm;
    if (fsdp_model_create(s.world, &md, &model) || fsdp_dmesh_create(model, &dd, &dm)) return 1;
    for (int i = 0; i < 2; i++)
        if (fsdp_dmesh_alloc(dm, ROWS * COLS * 4, &at[i])) return 1;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char name[80];
        call c = {way(dm, 2, 2, cases[i].from, cases[i].to, ROWS), at[1], at[0], cases[i].beside};
        if (cases[i].private_memory) c.dst = mine[1], c.src = mine[0];
        if (c.r && !cases[i].private_memory && cases[i].from[0] == 'P' && cases[i].to[0] == 'R')
            c.src = c.dst;
        snprintf(name, sizeof name, "%s, %s", async ? "streams" : "inline", cases[i].name);
        show(name, bench_run(ns_of, &c, 3, 0.3, 300), "ns", cases[i].goal);
    }
    layers(dm, at, async);
    return sim_close(&s) != FSDP_OK;
}

static double route_us(void *arg) {
    static int64_t scratch[FSDP_ROUTE_SCRATCH / 8];
    const fsdp_spec *s = (const fsdp_spec *)arg;
    fsdp_route r;
    int64_t begin = bench_now_ns();
    for (int i = 0; i < 200; i++)
        if (fsdp_route_find(&s[0], &s[1], NULL, scratch, sizeof scratch, &r)) exit(1);
    return (double)(bench_now_ns() - begin) / 200 / 1000;
}

/* Pairs of all placements without orders on 2 x 2 x 2: by number, as good as at random. */
enum { PAIRS = 400, PLACES = 5 };
static int pick_spec(fsdp_spec *s, int number) {
    static const char kinds[PLACES] = {'R', 'P', 'S', 'S', 'S'};
    const int32_t mesh[3] = {2, 2, 2};
    const int64_t shape[3] = {8192, 512, 64};
    fsdp_placement place[3];
    for (int m = 0; m < 3; m++, number /= PLACES)
        place[m] = place_of(kinds[number % PLACES], number % PLACES - 2);
    return fsdp_spec_init(s, 3, mesh, place, FSDP_F32, 3, shape) == FSDP_OK;
}
static double routes_us(void *arg) {
    static int64_t scratch[FSDP_ROUTE_SCRATCH / 8];
    int64_t begin, ns = 0;
    int found = 0;
    for (unsigned i = 1; found < PAIRS; i++) {
        fsdp_spec s[2];
        fsdp_route r;
        if (!pick_spec(&s[0], (int)(i * 7919 % 125)) ||
            !pick_spec(&s[1], (int)(i * 104729 / 125 % 125)))
            continue;
        begin = bench_now_ns();
        if (fsdp_route_find(&s[0], &s[1], NULL, scratch, sizeof scratch, &r)) continue;
        ns += bench_now_ns() - begin;
        found++;
    }
    (void)arg;
    return (double)ns / found / 1000;
}

static void routes(void) {
    const int32_t mesh[2] = {4, 2};
    const int64_t shape[2] = {8192, 8192};
    const fsdp_placement from[2] = {{FSDP_SHARD, 0, 0, 0}, {FSDP_SHARD, 0, 0, 0}};
    const fsdp_placement to[2] = {{0, 0, 0, 0}, {FSDP_SHARD, 0, 0, 0}};
    fsdp_spec s[2];
    if (fsdp_spec_init(&s[0], 2, mesh, from, FSDP_F32, 2, shape)) exit(1);
    if (fsdp_spec_init(&s[1], 2, mesh, to, FSDP_F32, 2, shape)) exit(1);
    show("route [S0, S0] -> [R, S0] on 4 x 2", bench_run(route_us, s, 3, 0.3, 300), "us", 5);
    show("route, mean of 400 pairs on 2 x 2 x 2", bench_run(routes_us, NULL, 1, 1, 50), "us", 100);
}

/* ---- ranks over shared memory ---------------------------------------------------------------- */

typedef struct {
    const fsdp_comm_ops *ops;
    fsdp_comm *comm;
    fsdp_coll coll;
    fsdp_seg seg;
    call c;
    int loops;
} pair;

static double us_of_bare(pair *p) {
    int64_t begin = bench_now_ns();
    for (int i = 0; i < p->loops; i++)
        if (p->ops->run(p->comm, &p->coll)) exit(1);
    return (double)(bench_now_ns() - begin) / p->loops / 1000;
}
static double us_of_run(pair *p) {
    int64_t begin = bench_now_ns();
    for (int i = 0; i < p->loops; i++)
        if (fsdp_redistribute(p->c.r, p->c.dst, p->c.src)) exit(1);
    return (double)(bench_now_ns() - begin) / p->loops / 1000;
}

/* The gather of tokens in place, and the collective by itself, in turn. */
static int rank_main(fsdp_world *w, void *arg) {
    fsdp_mesh_desc mesh = FSDP_ZERO;
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_model *model;
    fsdp_mesh *m;
    fsdp_dmesh *dm;
    (void)arg;
    mesh.ndim = 2, mesh.shape[0] = 1, mesh.shape[1] = 2, mesh.names[1] = "tp";
    if (fsdp_mesh_create(w, &mesh, &m) || fsdp_model_create(w, NULL, &model)) return 1;
    dd.mesh = m;
    if (fsdp_dmesh_create(model, &dd, &dm)) return 1;
    for (int64_t rows = 512; rows <= 131072; rows *= 16) { // 64 KiB to 16 MiB
        enum { ROUNDS = 31 };
        double bare[ROUNDS], run[ROUNDS], ratio[ROUNDS];
        void *src, *dst;
        char name[80];
        pair p;
        memset(&p, 0, sizeof p);
        int64_t bytes = rows * COLS * 4;
        if (fsdp_dmesh_alloc(dm, bytes / 2, &src) || fsdp_dmesh_alloc(dm, bytes, &dst)) return 1;
        p.c.r = way(dm, 1, 2, "S0", "R", rows), p.c.dst = dst, p.c.src = src;
        p.ops = fsdp_shm_comm_ops();
        if (fsdp_mesh_comm(m, 1, FSDP_STREAM_COMPUTE, &p.comm)) return 1;
        p.seg.count = bytes / 8;
        p.coll.kind = FSDP_OP_ALL_GATHER, p.coll.dtype = p.coll.out_dtype = FSDP_F32;
        p.coll.scale = 1, p.coll.num_segs = 1, p.coll.segs = &p.seg;
        p.coll.count = (uint64_t)p.seg.count, p.coll.src = src, p.coll.dst = dst;
        p.coll.what = "bare", p.loops = (int)(1 + (1 << 22) / bytes);
        for (int i = 0; i < ROUNDS; i++) {
            bare[i] = us_of_bare(&p);
            run[i] = us_of_run(&p);
            ratio[i] = run[i] / bare[i];
        }
        if (fsdp_rank(w)) continue;
        snprintf(name, sizeof name, "shm W=2, gather of %lld KiB, bare", (long long)bytes / 1024);
        show(name, bench_summarize(bare, ROUNDS), "us", 0);
        snprintf(name, sizeof name, "shm W=2, gather of %lld KiB, ratio", (long long)bytes / 1024);
        show(name, bench_summarize(ratio, ROUNDS), "times", 1.1);
    }
    return 0;
}

int main(int argc, char **argv) {
    int alone = argc > 1 && !strcmp(argv[1], "--host");
    fsdp_spawn_desc d = FSDP_ZERO;
    if (argc > 1 && !alone) {
        fprintf(stderr, "usage: %s [--host]\n", argv[0]);
        return 2;
    }
    csv = bench_csv("bench_tp", "what,unit,min,median,p95");
    printf("%-44s %10s %10s %10s\n", "", "min", "median", "p95");
    int failed = host(0) || host(1);
    routes();
    d.num_ranks = 2, d.threads = 1;
    if (!alone && !failed) failed = fsdp_spawn(&d, rank_main, NULL) != FSDP_OK;
    fclose(csv);
    return failed;
}
