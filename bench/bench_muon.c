/* bench_muon.c - steps of Muon: half of the matrices are 768 x 768, half 768 x 3072

       build/bench/bench_muon [--ranks 2] [--matrices 48] [--steps 5] [--bf16 0]
       FSDP_BACKEND=gloo build/gloo/bench/bench_muon      beside PyTorch: bench/compare_muon.py

   --bf16 1 multiplies by oneDNN (libdnnl-dev) in place of fsdp_host_gemm; compile it in by
       CPPFLAGS=-DBENCH_ONEDNN LDLIBS=-ldnnl make GLOO=yes BUILD=build/gloo build/gloo/bench/bench_muon

   Ranks are processes of this host with one thread each. A time is a fsdp_muon_step of rank 0 after
   a barrier: median over steps after the first. Bytes are what rank 0 receives in a step.

   SPDX-License-Identifier: MIT */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE 1 /* the POSIX calls under -std=c99 too */
#endif
#include "bench/bench.h"

#define FSDP_IMPLEMENTATION
#include "fsdp_muon.h"
#ifdef BENCH_ONEDNN
#include "bench/gemm_onednn.h"
static const fsdp_gemm_fn gemm_bf16 = gemm_onednn;
#else
static const fsdp_gemm_fn gemm_bf16 = NULL;
#endif
#include <string.h> // strcmp

typedef struct {
    int ranks, matrices, steps, bf16;
} job;

static void first_value(void *user, const fsdp_param_view *rows) {
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        ((float *)rows->data)[k] = (float)(fsdp_view_index(rows, k) * 7919 % 1001 - 500) / 25000;
}

static int64_t received(const fsdp_model *model) {
    fsdp_counters c;
    fsdp_model_counters(model, &c);
    return (int64_t)c.bytes[FSDP_OP_ALL_TO_ALL];
}

static int rank_main(fsdp_world *world, void *arg) {
    const job *j = (const job *)arg;
    double samples[BENCH_SAMPLES_MAX];
    fsdp_model *model;
    fsdp_muon *muon;
    fsdp_muon_desc md = fsdp_muon_defaults();
    fsdp_unit *units[256];
    int64_t before = 0;
    if (fsdp_model_create(world, NULL, &model)) return 1;
    for (int i = 0; i < j->matrices; i++) {
        fsdp_param_desc p = fsdp_mat("w", 768, i % 2 ? 3072 : 768);
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = &p, ud.num_params = 1;
        if (fsdp_fully_shard(model, &ud, &units[i])) return 1;
    }
    if (j->bf16) md.dtype = FSDP_BF16, md.gemm = gemm_bf16;
    if (fsdp_init_params(model, first_value, NULL) || fsdp_muon_create(model, &md, &muon))
        return 1;
    for (int i = 0; i < j->matrices; i++) fsdp_pre_forward(units[i]), fsdp_post_forward(units[i]);
    for (int i = j->matrices - 1; i >= 0; i--) {
        fsdp_pre_backward(units[i]);
        float *grad = (float *)fsdp_grad(units[i], 0);
        for (int64_t k = 0; k < 768 * (i % 2 ? 3072 : 768); k++)
            grad[k] = (float)((k + i) * 104729 % 2003 - 1001) / 1000;
        fsdp_post_backward(units[i]);
    }
    if (fsdp_finalize_backward(model)) return 1;
    for (int step = 0; step <= j->steps; step++) { // the gradients stay
        if (fsdp_barrier(world)) return 1;
        before = received(model);
        const int64_t begin = bench_now_ns();
        if (fsdp_muon_step(muon, 0.02)) return 1;
        if (step) samples[step - 1] = (double)(bench_now_ns() - begin) / 1e6;
    }
    if (fsdp_rank(world) == 0)
        printf("%d,%d,%.1f,%lld,%lld\n", j->ranks, j->matrices,
               bench_summarize(samples, j->steps).median, (long long)(received(model) - before),
               (long long)fsdp_muon_nbytes(muon));
    return 0;
}

int main(int argc, char **argv) {
    job j = {2, 48, 5, 0};
    fsdp_spawn_desc d = FSDP_ZERO;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--ranks")) j.ranks = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--matrices")) j.matrices = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--steps")) j.steps = atoi(argv[i + 1]);
        if (!strcmp(argv[i], "--bf16")) j.bf16 = atoi(argv[i + 1]);
    }
    if (j.ranks < 1 || j.matrices < 1 || j.matrices > 256 || j.steps < 1 || j.steps > 1000)
        return 2;
    if (j.bf16 && !gemm_bf16) {
        fprintf(stderr, "bench_muon: compiled without oneDNN: see its first comment\n");
        return 2;
    }
    printf("ranks,matrices,step_ms,bytes_received,optimizer_bytes\n");
    fflush(stdout);
    d.num_ranks = j.ranks;
    return fsdp_spawn(&d, rank_main, &j) != FSDP_OK;
}
