/* train_gpt.cpp - a small GPT in LibTorch, plain or sharded over all ranks

       train_gpt [--plain] [--checkpoint] [--steps N] [--batch N] [--layers N] [--width N]
                 [--save DIR] [--every N] FILE

   It learns the bytes of FILE. --plain: one process, LibTorch alone. Otherwise each rank takes its
   part of the batch, and losses are the same. --checkpoint: backward runs each layer again.
   README.md has the commands.

   SPDX-License-Identifier: MIT */
#include "fsdp_checkpoint.h"
#include "fsdp_optim.h"
#include "fsdp_torch.h"

#include <torch/torch.h>

#include <fstream>
#include <iterator>
#include <malloc.h>
#include <sys/resource.h>
#include <time.h>
namespace nn = torch::nn;
using torch::Tensor;

struct Options {
    bool plain = false, checkpoint = false;
    int64_t steps = 100, batch = 12, layers = 4, width = 64, every = 10;
    const char *save = nullptr, *file = nullptr;
} static opt;
enum { HEADS = 4, CONTEXT = 64, BYTES = 256 };

struct BlockImpl : nn::Module {
    nn::LayerNorm ln1{nullptr}, ln2{nullptr};
    nn::Linear qkv{nullptr}, proj{nullptr}, fc{nullptr}, out{nullptr};
    BlockImpl() {
        const int64_t C = opt.width;
        ln1 = register_module("ln1", nn::LayerNorm(nn::LayerNormOptions({C})));
        qkv = register_module("qkv", nn::Linear(C, 3 * C));
        proj = register_module("proj", nn::Linear(C, C));
        ln2 = register_module("ln2", nn::LayerNorm(nn::LayerNormOptions({C})));
        fc = register_module("fc", nn::Linear(C, 4 * C));
        out = register_module("out", nn::Linear(4 * C, C));
    }
    Tensor forward(Tensor x) {
        const int64_t B = x.size(0), C = x.size(2);
        auto a = qkv(ln1(x)).view({B, CONTEXT, 3, HEADS, C / HEADS}).permute({2, 0, 3, 1, 4});
        auto y = at::scaled_dot_product_attention(a[0], a[1], a[2], {}, 0.0, true);
        x = x + proj(y.transpose(1, 2).reshape({B, CONTEXT, C}));
        return x + out(torch::gelu(fc(ln2(x)), "tanh"));
    }
};
TORCH_MODULE(Block);

struct GptImpl : nn::Module {
    nn::Embedding wte{nullptr}, wpe{nullptr};
    nn::LayerNorm lnf{nullptr};
    nn::Linear head{nullptr};
    nn::ModuleList h;
    // `built` may shard a block: then only one is in memory as a whole.
    explicit GptImpl(const std::function<void(Block &, int64_t)> &built) {
        const int64_t C = opt.width;
        wte = register_module("wte", nn::Embedding(BYTES, C));
        wpe = register_module("wpe", nn::Embedding(CONTEXT, C));
        lnf = register_module("lnf", nn::LayerNorm(nn::LayerNormOptions({C})));
        head = register_module("head", nn::Linear(nn::LinearOptions(C, BYTES).bias(false)));
        h = register_module("h", nn::ModuleList());
        for (int64_t l = 0; l < opt.layers; l++) {
            Block block;
            h->push_back(block);
            built(block, l);
        }
    }
    // `run` calls block l with x.
    Tensor loss(Tensor tokens, const std::function<Tensor(size_t, Tensor)> &run) {
        Tensor x = wte(tokens.slice(1, 0, CONTEXT)) + wpe(torch::arange(CONTEXT));
        for (size_t l = 0; l < h->size(); l++) x = run(l, x);
        return nn::functional::cross_entropy(head(lnf(x)).view({-1, BYTES}),
                                             tokens.slice(1, 1, CONTEXT + 1).reshape({-1}));
    }
};
TORCH_MODULE(Gpt);

// Sequences of a step for one rank: together the ranks have the same ones, however many they are.
static Tensor batch(const std::string &text, int64_t step, int rank, int64_t mine) {
    std::vector<int64_t> v;
    for (int64_t b = 0; b < mine; b++) {
        const auto at = size_t((step * opt.batch + rank * mine + b) * 977) %
                        (text.size() - CONTEXT - 1);
        for (size_t t = 0; t <= CONTEXT; t++) v.push_back(static_cast<unsigned char>(text[at + t]));
    }
    return torch::tensor(v).view({mine, CONTEXT + 1});
}

static double cpu_ms() {
    timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return 1e3 * double(t.tv_sec) + 1e-6 * double(t.tv_nsec);
}
static void parse(int argc, char **argv) {
    const auto number = [&](int &i) { return i + 1 < argc ? atoll(argv[++i]) : 0; };
    for (int i = 1; i < argc; i++) {
        const std::string a = argv[i];
        if (a == "--plain") opt.plain = true;
        else if (a == "--checkpoint") opt.checkpoint = true;
        else if (a == "--steps") opt.steps = number(i);
        else if (a == "--batch") opt.batch = number(i);
        else if (a == "--layers") opt.layers = number(i);
        else if (a == "--width") opt.width = number(i);
        else if (a == "--every") opt.every = number(i);
        else if (a == "--save" && i + 1 < argc) opt.save = argv[++i];
        else opt.file = argv[i];
    }
}

static void train(fsdp_world *world, fsdp_model *model, const std::string &text) {
    const int rank = fsdp_rank(world), ranks = fsdp_world_size(world);
    TORCH_CHECK(opt.batch % ranks == 0, "--batch must be a multiple of the number of ranks");
    TORCH_CHECK(!opt.plain || ranks == 1, "--plain runs in one process");
    const auto check = [&](fsdp_status s) { TORCH_CHECK(!s, fsdp_last_error(world)); };

    torch::manual_seed(1); // the same values on each rank
    std::vector<fsdp_torch::Unit> units;
    Gpt gpt([&](Block &block, int64_t l) {
        if (!opt.plain)
            units.push_back(fsdp_torch::fully_shard(model, *block, "h." + std::to_string(l)));
    });
    std::unique_ptr<torch::optim::AdamW> plain;
    fsdp_adamw *adamw = nullptr;
    if (opt.plain) plain = std::make_unique<torch::optim::AdamW>(gpt->parameters(), 1e-3);
    else {
        fsdp_unit_desc stays_open =
            FSDP_ZERO; // its parameters are used before and after the blocks
        stays_open.reshard_after_forward = FSDP_RESHARD_NEVER;
        units.push_back(fsdp_torch::fully_shard(model, *gpt, "", stays_open));
        check(fsdp_adamw_create(model, nullptr, &adamw));
        malloc_trim(0); // what the blocks had as a whole goes back to the system
    }

    std::vector<double> times;
    for (int64_t step = 0; step < opt.steps; step++) {
        const double begin = cpu_ms();
        const Tensor tokens = batch(text, step, rank, opt.batch / ranks);
        Tensor loss;
        if (opt.plain) {
            plain->zero_grad();
            loss = gpt->loss(
                tokens, [&](size_t l, Tensor x) { return gpt->h[l]->as<Block>()->forward(x); });
            loss.backward();
            plain->step();
        } else {
            loss = fsdp_torch::forward(
                units.back(),
                [&](Tensor t) {
                    return gpt->loss(t, [&](size_t l, Tensor x) {
                        const auto block = [&, l](Tensor y) {
                            return gpt->h[l]->as<Block>()->forward(y);
                        };
                        return opt.checkpoint ? fsdp_torch::checkpoint(units[l], block, x)
                                              : fsdp_torch::forward(units[l], block, x);
                    });
                },
                tokens);
            fsdp_torch::backward(model, loss);
            check(fsdp_adamw_step(adamw, 1e-3));
            check(fsdp_zero_grad(model));
        }
        times.push_back(cpu_ms() - begin);
        double mean = loss.item<double>();
        check(fsdp_all_reduce(world, nullptr, &mean, 1, FSDP_F64, FSDP_SUM));
        if (rank == 0 && (step % opt.every == 0 || step == opt.steps - 1))
            printf("step %lld loss %.7f\n", static_cast<long long>(step), mean / ranks);
    }
    if (opt.save && !opt.plain) {
        fsdp_checkpoint *ck;
        check(fsdp_checkpoint_create(model, nullptr, &ck));
        check(fsdp_checkpoint_save(ck, opt.save, opt.steps));
    }
    rusage used;
    getrusage(RUSAGE_SELF, &used);
    std::sort(times.begin(), times.end());
    if (rank == 0 && !times.empty())
        printf("rank 0: %.1f ms of CPU a step (median), at most %ld MB of memory\n",
               times[times.size() / 2], used.ru_maxrss / 1024);
}

int main(int argc, char **argv) {
    parse(argc, argv);
    std::ifstream in(opt.file ? opt.file : "", std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(in)), {});
    if (text.size() < 2 * CONTEXT) return fprintf(stderr, "train_gpt: no FILE with text\n"), 2;
    torch::set_num_threads(1); // a rank for each core
    fsdp_world *world;
    fsdp_model *model;
    if (fsdp_init(nullptr, &world) || fsdp_model_create(world, nullptr, &model)) return 1;
    int failed = 0;
    try {
        train(world, model, text);
    } catch (const std::exception &e) {
        failed = fprintf(stderr, "rank %d: %s\n", fsdp_rank(world), e.what());
        fsdp_abort(world, e.what());
    }
    return fsdp_shutdown(world) != FSDP_OK || failed;
}
