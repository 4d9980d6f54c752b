/* 11_cpp.cpp - a trainer in C++: bf16, clipping, Muon and AdamW, checkpoints, a run that resumes
   c++ -std=c++17 -O2 -I. examples/11_cpp.cpp -o 11_cpp -pthread -lm && ./11_cpp

   4 ranks train 60 steps and save after every 20 of them. Then 4 ranks resume from step 40, and
   compute the same bits. Layers compute in bf16; shards, gradients of shards and states are f32.

   SPDX-License-Identifier: MIT */
#define FSDP_IMPLEMENTATION
#include "fsdp.hpp"
#include <algorithm>  // copy, equal, fill
#include <cmath>      // sin
#include <cstdio>     // printf
#include <filesystem> // remove_all, temp_directory_path
#include <unistd.h>   // getpid

constexpr int RANKS = 4, L = 3, C = 32, SAMPLES = 3, STEPS = 60, EVERY = 20;

// Adds to gradients in bf16 what a backward has computed in f32.
static void add(fsdp::span<fsdp::bf16> to, const float *from) {
    for (int64_t k = 0; k < to.size(); k++) to[k] = fsdp::bf16(float(to[k]) + from[k]);
}

// Layer l is y = x + W x + b; the task: the input reversed. Returns the loss.
static float forward_and_backward(const fsdp::unit (&h)[L], int64_t place) {
    float x[L + 1][SAMPLES][C], d[SAMPLES][C], next[C], w[C * C], b[C], dw[C * C], db[C], loss = 0;
    for (int s = 0; s < SAMPLES; s++)
        for (int i = 0; i < C; i++)
            x[0][s][i] = float(std::sin(0.7 * (i + 1) * (i + 1) * double(1 + (place + s) % 24)));
    for (int l = 0; l < L; l++) {
        auto f = h[l].forward(); // gathers the layer; the end of the block frees it
        fsdp::convert(w, f.data<fsdp::bf16>(0).data(), C * C);
        fsdp::convert(b, f.data<fsdp::bf16>(1).data(), C);
        for (int s = 0; s < SAMPLES; s++)
            for (int i = 0; i < C; i++) {
                x[l + 1][s][i] = x[l][s][i] + b[i];
                for (int j = 0; j < C; j++) x[l + 1][s][i] += w[i * C + j] * x[l][s][j];
            }
    }
    for (int s = 0; s < SAMPLES; s++)
        for (int i = 0; i < C; i++) {
            d[s][i] = (x[L][s][i] - x[0][s][C - 1 - i]) / SAMPLES;
            loss += d[s][i] * d[s][i] * SAMPLES / 2;
        }
    for (int l = L - 1; l >= 0; l--) {
        auto g = h[l].backward(); // gathers it again; the end of the block averages gradients
        fsdp::convert(w, g.data<fsdp::bf16>(0).data(), C * C);
        std::fill(dw, dw + C * C, 0.0f), std::fill(db, db + C, 0.0f);
        for (int s = 0; s < SAMPLES; s++) {
            std::copy(d[s], d[s] + C, next);
            for (int i = 0; i < C; i++) {
                db[i] += d[s][i];
                for (int j = 0; j < C; j++) {
                    dw[i * C + j] += d[s][i] * x[l][s][j];
                    next[j] += w[i * C + j] * d[s][i];
                }
            }
            std::copy(next, next + C, d[s]);
        }
        add(g.grad<fsdp::bf16>(0), dw), add(g.grad<fsdp::bf16>(1), db);
    }
    return loss;
}

// One rank: trains from the newest checkpoint up to step `from`, or from the beginning.
static void train(fsdp::world &world, const std::string &dir, int from, float *losses) {
    fsdp::model_desc desc;
    desc.param_dtype = FSDP_BF16, desc.reduce_dtype = FSDP_F32;
    fsdp::model model(world, desc);
    fsdp::unit h[L];
    for (int l = 0; l < L; l++)
        h[l] = model.shard("h." + std::to_string(l), {fsdp::mat("w", C, C), fsdp::vec("b", C)});
    model.init([](const fsdp::param_view &rows) { // only the rows that this rank owns
        const auto to = rows.data_as<float>();
        for (int64_t k = 0; k < rows.numel; k++) {
            const double place = double(fsdp_view_index(&rows, k));
            to[k] = rows.ndim == 2 ? 0.05f * float(std::sin(37.0 * place)) : 0;
        }
    });
    fsdp::muon_desc muon_desc;
    muon_desc.adjust = FSDP_MUON_MATCH_RMS_ADAMW; // steps of AdamW's length
    fsdp::muon muon(model, muon_desc);
    fsdp::adamw adamw(model, fsdp::adamw_desc(), [&](const fsdp::param_view &p) {
        return muon.takes(p) ? -1 : 0; // -1: AdamW leaves it out
    });
    int64_t place = 0; // in the data: samples that all ranks have seen
    fsdp::checkpoint checkpoint(model, {fsdp::blob("place", place)});
    int step = 0;
    if (const auto found = from ? checkpoint.find(dir, from) : std::nullopt)
        checkpoint.load(found->path), step = int(found->step);

    for (; step < STEPS; step++) {
        const float loss = forward_and_backward(h, place + world.rank() * SAMPLES);
        model.finalize_backward();
        (void)model.clip_grad_norm(1.0);
        const double lr = 0.02 * (1 - double(step) / STEPS);
        muon.step(lr), adamw.step(lr);
        model.zero_grad();
        losses[step] = world.all_reduce(loss) / (RANKS * SAMPLES);
        place += RANKS * SAMPLES;
        if (!from && (step + 1) % EVERY == 0) checkpoint.save_async(dir, step + 1);
        (void)checkpoint.poll();
    }
    checkpoint.wait();
}

int main() try {
    namespace files = std::filesystem;
    const files::path dir = files::temp_directory_path() / ("fsdp-cpp-" + std::to_string(getpid()));
    float whole[RANKS][STEPS], again[RANKS][STEPS]; // losses; all ranks have the same
    fsdp::spawn_desc spawn;
    spawn.num_ranks = RANKS, spawn.threads = 1;
    fsdp::spawn(spawn, [&](fsdp::world &w) { train(w, dir, 0, whole[w.rank()]); });
    fsdp::spawn(spawn, [&](fsdp::world &w) { train(w, dir, 2 * EVERY, again[w.rank()]); });
    files::remove_all(dir);
    for (int step = 0; step < STEPS; step += EVERY / 2)
        std::printf("step %2d  loss %.9g\n", step, double(whole[0][step]));
    const bool same = std::equal(again[0] + 2 * EVERY, again[0] + STEPS, whole[0] + 2 * EVERY);
    std::printf("again from step %d: %s bits\n", 2 * EVERY, same ? "the same" : "other");
    return !same || whole[0][STEPS - 1] > whole[0][0] / 4;
} catch (const std::exception &e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
}
