/* bench_tp_step.c - what tensor parallelism adds to a pass of an MLP, forward and backward:

       y = tanh(x w1^T + b1) w2^T,  loss = the mean of y * y
       w1 (4 width, width) and b1 are cut by rows, w2 (width, 4 width) by columns

       build/bench/bench_tp_step --ranks 2 --width 64 --tokens 128 --sequence 1 --steps 200

   pass    of tensor parallelism: with --sequence each rank has its part of the tokens outside
   plain   the same products of the same sizes, without redistributions
   extra   what is left: pass - plain, of two passes one behind the other
   Medians over steps, of rank 0, in us, and the least pass and plain. bench/tp_step.py runs the same in PyTorch, and compares times
   and losses; values are functions of a place, see noise(). Writes $FSDP_BUILD/bench_tp_step.csv.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"
#include "examples/gpt/gpt.h"
#include "tests/library.c" /* what it measures */
#include <math.h>

typedef struct {
    int ranks, width, tokens, sequence, steps;
} setup;

typedef struct {
    fsdp_world *world;
    const setup *s;
    fsdp_redistribution *gather, *gather_back, *scatter, *scatter_back;
    int rows, wide, first;                  // of the tokens and of the hidden channels, mine
    float *x, *y, *dy, *full, *sum, *dfull; // what peers read
    float *w1, *b1, *w2, *dw1, *db1, *dw2, *h, *dh; // private
} mlp;

static double noise(uint64_t x) { // in [-1, 1), a function of x alone
    x = (x + 1) * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (double)((x ^ (x >> 31)) >> 11) * 0x1p-52 - 1.0;
}
static float weight(const mlp *m, int which, int64_t place) {
    return (float)(noise((uint64_t)which << 32 | (uint64_t)place) / sqrt((double)m->s->width));
}

#define TRY(call)                                                                                  \
    do {                                                                                           \
        if (call) {                                                                                \
            fprintf(stderr, "%s\n", fsdp_last_error(NULL));                                        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)

static fsdp_spec spec_of(const mlp *m, int kind) {
    const int32_t mesh[2] = {1, m->s->ranks};
    const int64_t shape[2] = {m->s->tokens, m->s->width};
    fsdp_placement place[2];
    fsdp_spec s;
    memset(place, 0, sizeof place);
    place[1].kind = (int8_t)kind;
    TRY(fsdp_spec_init(&s, 2, mesh, place, FSDP_F32, 2, shape));
    return s;
}

static void make_ways(mlp *m, fsdp_dmesh *dm) {
    const fsdp_spec all = spec_of(m, FSDP_REPLICATE), adds = spec_of(m, FSDP_PARTIAL);
    const fsdp_spec mine = m->s->sequence ? spec_of(m, FSDP_SHARD) : all;
    fsdp_redistribution_desc d = FSDP_ZERO;
    d.name = "in", d.from = mine, d.to = all;
    TRY(fsdp_redistribution_create(dm, &d, &m->gather));
    d.name = "out", d.from = adds, d.to = mine;
    TRY(fsdp_redistribution_create(dm, &d, &m->scatter));
    TRY(fsdp_redistribution_create_backward(m->gather, &adds, &m->gather_back));
    TRY(fsdp_redistribution_create_backward(m->scatter, NULL, &m->scatter_back));
    float **const shared[] = {&m->x, &m->y, &m->dy, &m->full, &m->sum, &m->dfull};
    for (size_t i = 0; i < sizeof shared / sizeof *shared; i++)
        TRY(fsdp_dmesh_alloc(dm, ((int64_t)m->s->tokens + m->s->ranks) * m->s->width * 4,
                             (void **)shared[i]));
}

static void make_values(mlp *m) {
    const int64_t width = m->s->width, all = 4 * width, wide = m->wide;
    const size_t size = (size_t)(wide * width), act = (size_t)(wide * m->s->tokens);
    float **const own[] = {&m->w1, &m->w2, &m->dw1, &m->dw2, &m->h, &m->dh, &m->b1, &m->db1};
    const size_t count[] = {size, size, size, size, act, act, (size_t)wide, (size_t)wide};
    for (size_t i = 0; i < sizeof own / sizeof *own; i++) {
        *own[i] = (float *)calloc(count[i] + 1, sizeof(float));
        if (!*own[i]) exit(1);
    }
    for (int64_t o = 0; o < wide; o++) {
        m->b1[o] = weight(m, 2, m->first + o);
        for (int64_t i = 0; i < width; i++) {
            m->w1[o * width + i] = weight(m, 0, (m->first + o) * width + i);
            m->w2[i * wide + o] = weight(m, 1, i * all + m->first + o);
        }
    }
}

static void feed(mlp *m) {
    const fsdp_spec mine = spec_of(m, m->s->sequence ? FSDP_SHARD : FSDP_REPLICATE);
    const int32_t coord[2] = {0, fsdp_rank(m->world)};
    fsdp_local l;
    TRY(fsdp_spec_local(&mine, coord, &l));
    m->rows = (int)l.shape[0];
    for (int64_t i = 0; i < l.numel; i++)
        m->x[i] = (float)noise((uint64_t)3 << 32 | (uint64_t)(l.start[0] * m->s->width + i));
}

static void move(fsdp_redistribution *way, float *to, const float *from) {
    if (way) TRY(fsdp_redistribute(way, to, from));
}

/* One pass. tp 0: the same products of all tokens, without communication. Returns this rank's part of the loss. */
static double pass(mlp *m, int tp) {
    const int D = m->s->width, R = m->s->tokens, F = m->wide, sequence = tp && m->s->sequence;
    const double all = (double)R * D;
    float *in = m->s->sequence ? m->full : m->x, *out = sequence ? m->y : m->sum;
    float *dout = sequence ? m->dfull : m->dy, *dx = sequence ? m->y : m->sum;
    double loss = 0;
    if (sequence) move(m->gather, m->full, m->x);
    gpt_linear_forward(m->h, in, m->w1, m->b1, R, D, F);
    for (int64_t i = 0; i < (int64_t)R * F; i++) m->h[i] = tanhf(m->h[i]);
    gemm_f32(GEMM_TRANS_B, R, D, F, m->h, F, m->w2, F, m->sum, D);
    move(tp ? m->scatter : NULL, out, m->sum);
    for (int64_t i = 0; i < (int64_t)(sequence ? m->rows : R) * D; i++) {
        loss += (double)out[i] * (double)out[i] / all;
        m->dy[i] = (float)(2 * (double)out[i] / all);
    }
    if (sequence) move(m->scatter_back, m->dfull, m->dy);
    gemm_f32(GEMM_TRANS_A | GEMM_ADD, D, F, R, dout, D, m->h, F, m->dw2, F);
    gemm_f32(0, R, F, D, dout, D, m->w2, F, m->dh, F);
    for (int64_t i = 0; i < (int64_t)R * F; i++) m->dh[i] *= 1 - m->h[i] * m->h[i];
    gpt_linear_backward(m->sum, m->dw1, m->db1, m->dh, in, m->w1, R, D, F);
    move(tp ? m->gather_back : NULL, dx, m->sum);
    return loss;
}

static int rank_main(fsdp_world *w, void *arg) {
    static double samples[2][BENCH_SAMPLES_MAX], extra[BENCH_SAMPLES_MAX];
    const setup *s = (const setup *)arg;
    fsdp_mesh_desc mesh = FSDP_ZERO;
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_dmesh_desc dd = FSDP_ZERO;
    fsdp_mesh_info info;
    fsdp_range mine;
    fsdp_model *model;
    fsdp_mesh *on;
    fsdp_dmesh *dm;
    mlp m;
    memset(&m, 0, sizeof m);
    m.world = w, m.s = s;
    mesh.ndim = 2, mesh.shape[0] = 1, mesh.shape[1] = s->ranks;
    mesh.names[0] = "dp", mesh.names[1] = "tp";
    TRY(fsdp_mesh_create(w, &mesh, &on));
    TRY(fsdp_mesh_info_init(on, FSDP_MESH_INFO_HSDP, 0, 1, &info));
    md.mesh_info = &info, dd.mesh = on;
    TRY(fsdp_model_create(w, &md, &model));
    TRY(fsdp_dmesh_create(model, &dd, &dm));
    TRY(fsdp_shard_range(4 * (int64_t)s->width, s->ranks, fsdp_rank(w), &mine));
    m.wide = (int)mine.count, m.first = (int)mine.start;
    make_ways(&m, dm), make_values(&m);
    feed(&m);
    double loss = pass(&m, 1);
    if (s->sequence) TRY(fsdp_all_reduce(w, NULL, &loss, 1, FSDP_F64, FSDP_SUM));
    for (int step = -3; step < s->steps; step++)
        for (int tp = 0; tp < 2; tp++) {
            TRY(fsdp_barrier(w));
            int64_t begin = bench_now_ns();
            (void)pass(&m, tp);
            if (step >= 0) samples[tp][step] = (double)(bench_now_ns() - begin) / 1000;
        }
    if (fsdp_rank(w)) return 0;
    for (int i = 0; i < s->steps; i++) extra[i] = samples[1][i] - samples[0][i];
    const bench_stats plain = bench_summarize(samples[0], s->steps);
    const bench_stats tp = bench_summarize(samples[1], s->steps);
    const bench_stats more = bench_summarize(extra, s->steps);
    FILE *csv = bench_csv("bench_tp_step", "width,tokens,ranks,sequence,steps,pass_us,plain_us,"
                                           "extra_us,pass_min_us,plain_min_us,loss");
    FILE *const both[2] = {stdout, csv};
    for (int i = 0; i < 2; i++)
        fprintf(both[i], "%d,%d,%d,%d,%d,%.2f,%.2f,%.2f,%.2f,%.2f,%.9g\n", s->width, s->tokens,
                s->ranks, s->sequence, s->steps, tp.median, plain.median, more.median, tp.min,
                plain.min, loss);
    fclose(csv);
    return 0;
}

int main(int argc, char **argv) {
    setup s = {2, 64, 128, 1, 200};
    static const char *const names[] = {"--ranks", "--width", "--tokens", "--sequence", "--steps"};
    int *const values[] = {&s.ranks, &s.width, &s.tokens, &s.sequence, &s.steps};
    fsdp_spawn_desc d = FSDP_ZERO;
    for (int i = 1; i + 1 < argc; i += 2) {
        size_t k = 0;
        while (k < 5 && strcmp(argv[i], names[k])) k++;
        if (k == 5) argc = 0;
        else *values[k] = atoi(argv[i + 1]);
    }
    if (argc % 2 == 0 || s.ranks < 1 || s.width < 1 || s.tokens < 1 || s.steps < 1 ||
        s.steps > BENCH_SAMPLES_MAX) {
        fprintf(stderr,
                "usage: bench_tp_step [--ranks N] [--width N] [--tokens N] [--sequence 0|1] "
                "[--steps N]\n");
        return 2;
    }
#ifdef GEMM_BLAS
    openblas_set_num_threads(1); // the ranks are the parallelism
#endif
    d.num_ranks = s.ranks;
    return fsdp_spawn(&d, rank_main, &s) != FSDP_OK;
}
