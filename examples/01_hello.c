/* 01_hello.c - the smallest trainer: each layer is sharded, gathered when used, and freed after it
   cc -O2 -I. examples/01_hello.c -o 01_hello -pthread -lm
   ./01_hello                         one rank
   tools/fsdprun -n 4 ./01_hello      four ranks, each with a quarter of every matrix

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp.h"
#include "fsdp_optim.h"
#include <math.h>  // sin
#include <stdio.h> // printf

enum { L = 3, C = 64 };

static void layer_forward(float *y, const float *x, const float *w, const float *b) {
    for (int i = 0; i < C; i++) { // y = x + W x + b
        y[i] = x[i] + b[i];
        for (int j = 0; j < C; j++) y[i] += w[i * C + j] * x[j];
    }
}
static void layer_backward(float *dx, const float *dy, const float *x, const float *w, float *dw,
                           float *db) {
    for (int i = 0; i < C; i++) dx[i] = dy[i];
    for (int i = 0; i < C; i++) { // gradients of parameters are added
        db[i] += dy[i];
        for (int j = 0; j < C; j++) dw[i * C + j] += dy[i] * x[j], dx[j] += w[i * C + j] * dy[i];
    }
}
static void my_init(void *user, const fsdp_param_view *rows) { // each rank fills only its own rows
    (void)user;
    for (int64_t k = 0; k < rows->numel; k++)
        fsdp_view_data_f32(rows)[k] = 0.02f * (float)sin(37.0 * (double)fsdp_view_index(rows, k));
}

int main(void) {
    fsdp_world *world; // rank, size, address: from the environment of fsdprun, torchrun, ...
    if (fsdp_init(NULL, &world)) return 1; // the message has been logged

    fsdp_model *model;
    if (fsdp_model_create(world, NULL, &model)) return 1;
    fsdp_unit *h[L];
    for (int l = 0; l < L; l++) {
        fsdp_param_desc p[2] = {fsdp_mat("w", C, C), fsdp_vec("b", C)};
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.params = p, ud.num_params = 2;
        if (fsdp_fully_shard(model, &ud, &h[l])) return 1;
    }
    fsdp_adamw *opt;
    if (fsdp_init_params(model, my_init, NULL) || fsdp_adamw_create(model, NULL, &opt)) return 1;

    if (fsdp_rank(world) == 0) // so that more ranks have another loss
        printf("ranks: %d, each learns 4 inputs of its own\n", fsdp_world_size(world));
    for (int step = 0; step <= 200; step++) {
        float x[L + 1][C], dx[L + 1][C], loss = 0;
        for (int i = 0; i < C; i++) // this rank's input of this step
            x[0][i] = (float)sin(0.7 * (i + 1) * (i + 1) * (1 + step % 4 + 4 * fsdp_rank(world)));
        for (int l = 0; l < L; l++) {
            fsdp_pre_forward(h[l]); // gathered here
            layer_forward(x[l + 1], x[l], fsdp_data_f32(h[l], 0), fsdp_data_f32(h[l], 1));
            fsdp_post_forward(h[l]); // freed here
        }
        for (int i = 0; i < C; i++) { // the task: the input in reverse order
            dx[L][i] = x[L][i] - x[0][C - 1 - i];
            loss += 0.5f * dx[L][i] * dx[L][i];
        }
        for (int l = L - 1; l >= 0; l--) {
            fsdp_pre_backward(h[l]); // gathered again
            layer_backward(dx[l], dx[l + 1], x[l], fsdp_data_f32(h[l], 0), fsdp_grad_f32(h[l], 0),
                           fsdp_grad_f32(h[l], 1));
            fsdp_post_backward(h[l]); // gradients are averaged into their owners' shards
        }
        if (fsdp_finalize_backward(model)) break; // failure of any hook shows here
        fsdp_all_reduce(world, NULL, &loss, 1, FSDP_F32, FSDP_SUM);
        if (fsdp_adamw_step(opt, 0.001) || fsdp_zero_grad(model)) break;
        if (step % 40 == 0 && fsdp_rank(world) == 0)
            printf("step %3d  loss %.5f\n", step, (double)loss / fsdp_world_size(world));
    }
    return fsdp_shutdown(world) != FSDP_OK; // frees all of it; not 0 if something failed
}
