/* modules.cpp - fsdp_torch.h: modules of LibTorch as units (make torch)
   The expected results are those of plain LibTorch in the same process, with the batches of all
   ranks. Ranks are processes, forked before they use torch.

   SPDX-License-Identifier: MIT */
#include <ATen/autocast_mode.h>
#include <torch/torch.h>
#undef CHECK // of c10
#undef CHECK_EQ
#undef CHECK_NE
#undef CHECK_LT
#undef CHECK_LE
#undef CHECK_GT
#undef CHECK_GE
#define TAGS SECONDS(300)
#include "harness.h"

#include "fsdp_torch.h"
extern "C" {
#include "library.h"
}
#include "lab.h"

namespace nn = torch::nn;
using torch::Tensor;

/* ---- modules --------------------------------------------------------------------------------- */

struct BlockImpl : nn::Module { // 13 rows and 17: uneven on several ranks; a scalar
    nn::Linear a{nullptr}, b{nullptr};
    Tensor scale;
    BlockImpl() {
        a = register_module("a", nn::Linear(13, 17)), b = register_module("b", nn::Linear(17, 13));
        scale = register_parameter("scale", torch::tensor(0.5f));
    }
    Tensor forward(Tensor x) { return x + scale * b->forward(torch::tanh(a->forward(x))); }
};
TORCH_MODULE(Block);

struct UnusedImpl : BlockImpl {
    nn::Linear unused{nullptr};
    UnusedImpl() { unused = register_module("unused", nn::Linear(5, 3)); }
};
TORCH_MODULE(Unused);

enum { L = 2, C = 32, T = 8, V = 64 };
struct LayerImpl : nn::Module { // of a GPT
    nn::LayerNorm ln1{nullptr}, ln2{nullptr};
    nn::Linear qkv{nullptr}, proj{nullptr}, fc{nullptr}, out{nullptr};
    LayerImpl() {
        ln1 = register_module("ln1", nn::LayerNorm(nn::LayerNormOptions({C})));
        ln2 = register_module("ln2", nn::LayerNorm(nn::LayerNormOptions({C})));
        qkv = register_module("qkv", nn::Linear(C, 3 * C));
        proj = register_module("proj", nn::Linear(C, C));
        fc = register_module("fc", nn::Linear(C, 4 * C));
        out = register_module("out", nn::Linear(4 * C, C));
    }
    Tensor forward(Tensor x) {
        auto a = qkv(ln1(x)).view({x.size(0), T, 3, 4, C / 4}).permute({2, 0, 3, 1, 4});
        auto y = at::scaled_dot_product_attention(a[0], a[1], a[2], {}, 0.0, true);
        x = x + proj(y.transpose(1, 2).reshape({x.size(0), T, C}));
        return x + out(torch::gelu(fc(ln2(x)), "tanh"));
    }
};
TORCH_MODULE(Layer);
struct GptImpl : nn::Module {
    nn::Embedding wte{nullptr}, wpe{nullptr};
    nn::LayerNorm lnf{nullptr};
    nn::Linear head{nullptr};
    nn::ModuleList h;
    GptImpl() {
        wte = register_module("wte", nn::Embedding(V, C));
        wpe = register_module("wpe", nn::Embedding(T, C));
        h = register_module("h", nn::ModuleList());
        for (int l = 0; l < L; l++) h->push_back(Layer());
        lnf = register_module("lnf", nn::LayerNorm(nn::LayerNormOptions({C})));
        head = register_module("head", nn::Linear(nn::LinearOptions(C, V).bias(false)));
    }
    Tensor loss(Tensor tokens, std::function<Tensor(size_t, Tensor)> layer) {
        Tensor x = wte(tokens.slice(1, 0, T)) + wpe(torch::arange(T));
        for (size_t l = 0; l < h->size(); l++) x = layer(l, x);
        return nn::functional::cross_entropy(head(lnf(x)).view({-1, V}),
                                             tokens.slice(1, 1, T + 1).reshape({-1}));
    }
};
TORCH_MODULE(Gpt);

/* ---- what tests share ------------------------------------------------------------------------ */

// Two modules with the same values.
template <class M> static std::pair<M, M> twins(int seed = 1) {
    torch::manual_seed(seed);
    M a;
    torch::manual_seed(seed);
    return {a, M()};
}
template <class M> static std::vector<std::pair<M, M>> twins_of(int n) {
    std::vector<std::pair<M, M>> list;
    for (int i = 0; i < n; i++) list.push_back(twins<M>(1 + i));
    return list;
}
static Tensor batch(int rank, int micro = 0) {
    torch::manual_seed(100 + 10 * rank + micro);
    return torch::randn({5, 13});
}
static fsdp_model *make_model(lab_rank *r, const fsdp_model_desc *desc = NULL) {
    torch::set_num_threads(1);
    fsdp_model *m;
    CALL(r->w, fsdp_model_create(r->w, desc, &m));
    return m;
}

// Compares the gradients of a unit with those of the plain module, relative to the largest one.
static void same_grads(lab_rank *r, fsdp_unit *unit, const nn::Module &plain, double most = 3e-7) {
    fsdp_param_view v;
    std::set<c10::TensorImpl *> seen;
    for (auto &p : plain.named_parameters()) {
        int i = 0;
        if (!seen.insert(p.value().unsafeGetTensorImpl()).second) continue; // a second name
        for (;; i++) {
            CALL(r->w, fsdp_param_view_get(unit, i, &v));
            if (p.key() == v.name) break;
        }
        snprintf(w_case, sizeof w_case, "%s of %s", v.name, v.unit_name);
        const Tensor want = p.value().grad();
        W_CHECK(!v.shard_grad == !want.defined(), "a gradient: %d, expected %d",
                v.shard_grad != NULL, want.defined());
        if (!want.defined()) continue;
        Tensor got = torch::empty(want.sizes(), fsdp_torch::detail::type_of(v.grad_dtype));
        CALL(r->w, fsdp_param_full_grad(unit, i, got.data_ptr()));
        const double scale = want.abs().max().item<double>() + 1e-30;
        const double off =
            (got.to(torch::kDouble) - want.to(torch::kDouble)).abs().max().item<double>();
        W_CHECK(off <= most * scale, "gradients differ by %g (relative)", off / scale);
    }
}
// Calls f, which must throw a text with all these words.
template <class F> static void throws(const F &f, std::initializer_list<const char *> words) {
    std::string text;
    try {
        f();
    } catch (const std::exception &e) {
        text = e.what();
        if (text.empty()) text = "an exception without text";
    }
    for (const char *word : words)
        CHECK_MSG(text.find(word) != std::string::npos, "the text '%s' does not say '%s'",
                  text.c_str(), word);
}

typedef struct how {
    const char *name;
    int world, recompute;
} how;
static const how hows[] = {{"W=1", 1, 0},
                           {"W=2", 2, 0},
                           {"W=3", 3, 0},
                           {"W=4", 4, 0},
                           {"W=1 checkpoint", 1, 1},
                           {"W=2 checkpoint", 2, 1},
                           {"W=3 checkpoint", 3, 1},
                           {"W=4 checkpoint", 4, 1}};
static const how few[] = {
    {"W=1", 1, 0}, {"W=3", 3, 0}, {"W=1 checkpoint", 1, 1}, {"W=3 checkpoint", 3, 1}};
static const lab_how processes = {NULL, 1, 0, 0, 0, NULL, NULL};
static void run(const how *row, void (*body)(lab_rank *)) {
    lab_run(row->world, &processes, body, (void *)(uintptr_t)row);
}
static int recompute_of(const lab_rank *r) { return ((const how *)r->arg)->recompute; }

// Runs a layer in the way of this row.
template <class F, class... In>
static auto run_layer(const lab_rank *r, const fsdp_torch::Unit &u, F f, In... in) {
    return recompute_of(r) ? fsdp_torch::checkpoint(u, f, in...) : fsdp_torch::forward(u, f, in...);
}

/* ---- training -------------------------------------------------------------------------------- */

static void train_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto [plain, gpt] = twins<Gpt>();
    fsdp_unit_desc never = FSDP_ZERO;
    never.reshard_after_forward = FSDP_RESHARD_NEVER;
    std::vector<fsdp_torch::Unit> h;
    for (size_t l = 0; l < L; l++)
        h.push_back(fsdp_torch::fully_shard(m, *gpt->h[l], "h." + std::to_string(l)));
    const auto root = fsdp_torch::fully_shard(m, *gpt, "", never);
    fsdp_adamw *opt;
    CALL(r->w, fsdp_adamw_create(m, NULL, &opt));
    torch::optim::AdamW plain_opt(plain->parameters(), torch::optim::AdamWOptions(1e-3));
    const int all = 12, mine = all / r->size;
    for (int step = 0; step < 30; step++) {
        torch::manual_seed(step);
        const Tensor tokens = torch::randint(V, {all, T + 1});
        plain_opt.zero_grad();
        auto &p = plain;
        const Tensor want = plain->loss(
            tokens, [&](size_t l, Tensor x) { return p->h[l]->as<Layer>()->forward(x); });
        want.backward();
        plain_opt.step();
        auto &g = gpt;
        const Tensor loss = fsdp_torch::forward(
            root,
            [&](Tensor t) {
                return g->loss(t, [&](size_t l, Tensor x) {
                    auto layer = [&g, l](Tensor y) { return g->h[l]->as<Layer>()->forward(y); };
                    return run_layer(r, h[l], layer, x);
                });
            },
            tokens.slice(0, r->rank * mine, (r->rank + 1) * mine));
        fsdp_torch::backward(m, loss);
        CALL(r->w, fsdp_adamw_step(opt, 1e-3));
        CALL(r->w, fsdp_zero_grad(m));
        double sum = loss.item<double>();
        CALL(r->w, fsdp_all_reduce(r->w, NULL, &sum, 1, FSDP_F64, FSDP_SUM));
        CHECK_MSG(fabs(sum / r->size / want.item<double>() - 1) < 1e-6,
                  "step %d: loss %.9g, plain %.9g", step, sum / r->size, want.item<double>());
    }
}
TEST_P(torch, losses, hows) { run(row, train_body); }

// Runs one step of three units, the first of which has parameters that no layer uses, and one that
// is used twice. The gradients must be those of plain LibTorch with all batches.
typedef struct nets {
    std::pair<Unused, Unused> first = twins<Unused>(1);
    std::vector<std::pair<Block, Block>> blocks = twins_of<Block>(2);
    std::vector<fsdp_torch::Unit> units;
    explicit nets(fsdp_model *m, fsdp_unit_desc desc = FSDP_ZERO) {
        units.push_back(fsdp_torch::fully_shard(m, *first.second, "first", desc));
        for (size_t i = 0; i < 2; i++)
            units.push_back(
                fsdp_torch::fully_shard(m, *blocks[i].second, "h." + std::to_string(i), desc));
    }
    Tensor plain(Tensor x) {
        return blocks[0].first(blocks[1].first(blocks[0].first(first.first(x)))).pow(2).mean();
    }
    Tensor sharded(const lab_rank *r, Tensor x) {
        x = run_layer(r, units[0], first.second, x);
        x = run_layer(r, units[1], blocks[0].second, x);
        x = run_layer(r, units[2], blocks[1].second, x);
        return run_layer(r, units[1], blocks[0].second, x).pow(2).mean();
    }
    void same(lab_rank *r, double most = 3e-7) {
        same_grads(r, units[0], *first.first, most);
        for (size_t i = 0; i < 2; i++) same_grads(r, units[i + 1], *blocks[i].first, most);
    }
    void zero_plain() {
        first.first->zero_grad(), blocks[0].first->zero_grad(), blocks[1].first->zero_grad();
    }
} nets;

static void microbatches_body(lab_rank *r) {
    for (int late = 0; late < 2; late++) { // 1: gradients are reduced after the last microbatch
        fsdp_model *m = make_model(r);
        nets n(m);
        for (int step = 0; step < 3; step++) {
            n.zero_plain();
            for (int micro = 0; micro < 2; micro++) {
                Tensor all = torch::zeros({});
                for (int k = 0; k < r->size; k++) all = all + n.plain(batch(k, micro)) / r->size;
                all.backward();
                CALL(r->w, fsdp_set_requires_gradient_sync(m, NULL, !late || micro == 1));
                // Without a gradient of the input finalize ends the first unit's backward.
                fsdp_torch::backward(
                    m, n.sharded(r, batch(r->rank, micro).requires_grad_(micro == 1)));
            }
            n.same(r);
            CALL(r->w, fsdp_zero_grad(m));
        }
        fsdp_model_destroy(m);
    }
}
TEST_P(torch, microbatches, few) { run(row, microbatches_body); }

// Every way to keep gathered parameters, with worker threads, and with a plan.
static const struct {
    const char *name;
    int reshard, keep, lanes, plan;
} ways[] = {{"never", FSDP_RESHARD_NEVER, 0, 0, 0},
            {"n=2", 2, 0, 0, 0},
            {"after backward", 0, 1, 0, 0},
            {"threads", 0, 0, 2, 0},
            {"plan", 0, 0, 0, 1},
            {"plan never", FSDP_RESHARD_NEVER, 0, 0, 1}};
static void ways_body(lab_rank *r) {
    const int w = *(int *)r->arg;
    how there = {"", 2, 0};
    r->arg = &there;
    fsdp_unit_desc desc = FSDP_ZERO;
    desc.reshard_after_forward = ways[w].reshard;
    fsdp_model *m = make_model(r);
    nets n(m, desc);
    fsdp_plan *plan = NULL;
    if (ways[w].plan) CALL(r->w, fsdp_plan_create(m, NULL, &plan));
    if (ways[w].keep) CALL(r->w, fsdp_set_reshard_after_backward(m, NULL, 0));
    for (int step = 0; step < 5; step++) {
        n.zero_plain();
        Tensor all = torch::zeros({});
        for (int k = 0; k < r->size; k++) all = all + n.plain(batch(k, step)) / r->size;
        all.backward();
        fsdp_torch::backward(m, n.sharded(r, batch(r->rank, step).requires_grad_(true)));
        n.same(r);
        throws([&] { (void)n.first.second->a->weight.grad().sum(); },
               {"E556", "the gradient of parameter 'a.weight'"});
        CALL(r->w, fsdp_zero_grad(m));
    }
    if (plan) CHECK_MSG(fsdp_plan_state(plan) == FSDP_PLAN_REPLAYING, "%s", fsdp_plan_why(plan));
}
TEST_P(torch, ways_to_gather, ways) {
    int w = (int)(row - ways);
    const lab_how with = {NULL, 1, row->lanes, 0, 0, NULL, NULL};
    lab_run(2, &with, ways_body, &w);
}

static void evaluation_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    nets n(m);
    for (int step = 0; step < 2; step++) {
        {
            torch::NoGradGuard off;
            const Tensor want = n.plain(batch(0)), got = n.sharded(r, batch(0));
            CHECK(want.equal(got));
            CHECK(!got.requires_grad());
        }
        CHECK(fsdp_is_grad_enabled(m));
        CHECK(fsdp_pre_backward(n.units[0]) == FSDP_ERR_INVALID_STATE); // no forward waits for it
        CHECK(fsdp_finalize_backward(m) == FSDP_ERR_INVALID_STATE);
        n.zero_plain();
        n.plain(batch(0)).backward();
        fsdp_torch::backward(m, n.sharded(r, batch(0)));
        n.same(r, r->size == 1 ? 0 : 3e-7);
        CALL(r->w, fsdp_zero_grad(m));
    }
}
TEST_P(torch, evaluation_then_gradients, few) { run(row, evaluation_body); }

// torch::optim over the shards, next to plain LibTorch with all parameters.
static void optim_body(lab_rank *r) {
    for (int adam = 0; adam < 2; adam++) {
        fsdp_model *m = make_model(r);
        auto plain = twins<Block>(1), wide = twins<Block>(2);
        const auto a = fsdp_torch::fully_shard(m, *plain.second, "a"),
                   b = fsdp_torch::fully_shard(m, *wide.second, "b");
        std::vector<Tensor> all = plain.first->parameters(), mine = fsdp_torch::shards(m);
        for (auto &p : wide.first->parameters()) all.push_back(p);
        CHECK_EQ_INT((int)mine.size(), (int)all.size());
        std::unique_ptr<torch::optim::Optimizer> ours, theirs;
        if (adam) {
            ours = std::make_unique<torch::optim::AdamW>(mine, torch::optim::AdamWOptions(1e-2));
            theirs = std::make_unique<torch::optim::AdamW>(all, torch::optim::AdamWOptions(1e-2));
        } else {
            const auto options = torch::optim::SGDOptions(1e-2).momentum(0.9);
            ours = std::make_unique<torch::optim::SGD>(mine, options);
            theirs = std::make_unique<torch::optim::SGD>(all, options);
        }
        for (int step = 0; step < 6; step++) {
            theirs->zero_grad();
            Tensor sum = torch::zeros({});
            for (int k = 0; k < r->size; k++)
                sum = sum + wide.first(plain.first(batch(k, step))).pow(2).mean() / r->size;
            sum.backward();
            theirs->step();
            Tensor x = run_layer(r, b, wide.second,
                                 run_layer(r, a, plain.second, batch(r->rank, step)));
            fsdp_torch::backward(m, x.pow(2).mean());
            const auto again = fsdp_torch::shards(m);
            for (size_t i = 0; i < mine.size(); i++) {
                CHECK(again[i].unsafeGetTensorImpl() == mine[i].unsafeGetTensorImpl());
                CHECK(again[i].is_leaf() && again[i].grad().defined());
            }
            ours->step();
            CALL(r->w, fsdp_params_changed(m));
            if (step % 2) ours->zero_grad(); /* leaves gradients undefined */
            else CALL(r->w, fsdp_zero_grad(m));
        }
        for (int i = 0; i < (int)all.size(); i++) {
            fsdp_param_view v;
            CALL(r->w, fsdp_param_at(m, i, &v));
            Tensor got = torch::empty_like(all[(size_t)i]);
            CALL(r->w, fsdp_param_full(v.unit, v.index, got.data_ptr()));
            CHECK_MSG(torch::allclose(got, all[(size_t)i], 1e-5, 1e-6), "%s", v.name);
        }
        fsdp_model_destroy(m);
    }
}
TEST_P(torch, optim_over_shards, few) { run(row, optim_body); }

/* ---- modules --------------------------------------------------------------------------------- */

struct TiedImpl : nn::Module { // a module under two names
    nn::Linear a{nullptr}, b{nullptr};
    TiedImpl() {
        a = register_module("a", nn::Linear(13, 13));
        b = register_module("b", a);
    }
    Tensor forward(Tensor x) { return b(torch::tanh(a(x))); }
};
TORCH_MODULE(Tied);

// A unit with a module, next to the plain module, in one step: gradients as in plain LibTorch.
template <class M> static void one_step(lab_rank *r, std::pair<M, M> twin, double most = 3e-7) {
    fsdp_model *m = make_model(r);
    const auto u = fsdp_torch::fully_shard(m, *twin.second, "u");
    Tensor all = torch::zeros({});
    for (int k = 0; k < r->size; k++) all = all + twin.first(batch(k)).pow(2).mean() / r->size;
    all.backward();
    fsdp_torch::backward(m, run_layer(r, u, twin.second, batch(r->rank)).pow(2).mean());
    same_grads(r, u, *twin.first, most);
}
static void tied_body(lab_rank *r) {
    one_step(r, twins<Tied>());
    fsdp_model *m = make_model(r);
    Tied tied;
    const auto a = fsdp_torch::fully_shard(m, *tied->a, "a");
    throws([&] { fsdp_torch::fully_shard(m, *tied, "all"); },
           {"E555", "in other units", "inner modules first"});
    Block block;
    tied->register_module("block", block);
    const auto rest = fsdp_torch::fully_shard(m, *tied, "rest"); // without those of a
    CHECK_EQ_INT(fsdp_num_params(m), 2 + 5);
}
TEST_P(torch, shared_parameters, few) { run(row, tied_body); }

struct LoraImpl : nn::Module { // a frozen base in bf16, adapters in f32
    nn::Linear base{nullptr}, down{nullptr}, up{nullptr};
    LoraImpl() {
        base = register_module("base", nn::Linear(13, 13));
        down = register_module("down", nn::Linear(13, 3)),
        up = register_module("up", nn::Linear(3, 13));
        base->to(torch::kBFloat16);
        for (auto &p : base->parameters()) p.set_requires_grad(false);
    }
    Tensor forward(Tensor x) {
        return base(x.to(torch::kBFloat16)).to(torch::kFloat) + up(torch::relu(down(x)));
    }
};
TORCH_MODULE(Lora);
static void lora_body(lab_rank *r) {
    one_step(r, twins<Lora>());
    fsdp_model *m = make_model(r); // and two of them, so that a gradient passes through a base
    auto two = twins_of<Lora>(2);
    const auto a = fsdp_torch::fully_shard(m, *two[0].second, "a"),
               b = fsdp_torch::fully_shard(m, *two[1].second, "b");
    // Means are taken after bf16 has rounded what passes through the base.
    for (int k = 0; k < r->size; k++) two[1].first(two[0].first(batch(k))).pow(2).mean().backward();
    for (auto &n : two)
        for (auto &p : n.first->parameters())
            if (p.grad().defined()) p.mutable_grad() = p.grad() / r->size;
    Tensor x = run_layer(r, a, two[0].second, batch(r->rank));
    fsdp_torch::backward(m, run_layer(r, b, two[1].second, x).pow(2).mean());
    for (size_t i = 0; i < 2; i++) same_grads(r, i ? b : a, *two[i].first, 1e-6);
    for (auto &t : fsdp_torch::shards(m))
        CHECK(t.requires_grad() == (t.scalar_type() == torch::kFloat));
}
TEST_P(torch, frozen_base_with_adapters, few) { run(row, lora_body); }

struct NormedImpl : nn::Module {
    nn::BatchNorm1d bn{nullptr};
    nn::Linear a{nullptr};
    NormedImpl() {
        a = register_module("a", nn::Linear(nn::LinearOptions(13, 13).bias(false)));
        bn = register_module("bn", nn::BatchNorm1d(13));
    }
    Tensor forward(Tensor x) { return torch::tanh(bn(a(x)) + 0.5 * x); }
};
TORCH_MODULE(Normed);
static void norm_body(lab_rank *r) {
    auto net = twins<Normed>();
    one_step(r, net, 2e-6);
    // Buffers stay the caller's: each rank has those of its batch, until it averages them.
    auto &bn = net.second->bn;
    auto mine = twins<Normed>().first;
    mine->forward(batch(r->rank));
    CHECK(mine->bn->running_mean.equal(bn->running_mean));
    CALL(r->w, fsdp_all_reduce(r->w, NULL, bn->running_mean.data_ptr(), 13, FSDP_F32, FSDP_SUM));
    bn->running_mean /= r->size;
    CHECK_EQ_INT((int)bn->num_batches_tracked.item<int64_t>(), 1);
    Tensor mean = torch::zeros({13});
    for (int k = 0; k < r->size; k++) {
        auto one = twins<Normed>().first;
        one->forward(batch(k));
        mean += one->bn->running_mean / r->size;
    }
    CHECK(torch::allclose(bn->running_mean, mean));
}
static const how no_recompute[] = {{"W=1", 1, 0}, {"W=3", 3, 0}};
TEST_P(torch, batch_norm, no_recompute) { run(row, norm_body); }

typedef std::tuple<Tensor, std::vector<Tensor>> pieces;
static pieces split(Block &a, Block &b, Tensor x, std::tuple<Tensor, Tensor> rest, int times) {
    return {a(x) * times + std::get<0>(rest),
            {b(x), b(std::get<1>(rest)), std::get<0>(rest).argmax(1)}};
}
static Tensor join(const pieces &p) { // one output stays unused
    return (std::get<0>(p) * std::get<1>(p)[1]).pow(2).mean();
}
static void many_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto a = twins<Block>(1), b = twins<Block>(2);
    nn::Module both;
    both.register_module("a", a.second), both.register_module("b", b.second);
    const auto u = fsdp_torch::fully_shard(m, both, "both");
    Tensor all = torch::zeros({});
    std::vector<Tensor> leaves;
    const auto input = [&](int k) {
        leaves.push_back(batch(k, 0).requires_grad_(true)), leaves.push_back(batch(k, 1));
        leaves.push_back(batch(k, 2).requires_grad_(true));
        return std::make_tuple(leaves[leaves.size() - 2], leaves.back());
    };
    for (int k = 0; k < r->size; k++) {
        auto in = input(k);
        all = all + join(split(a.first, b.first, leaves[leaves.size() - 3], in, 3)) / r->size;
    }
    all.backward();
    const std::vector<Tensor> want(leaves.begin() + 3 * r->rank, leaves.begin() + 3 * r->rank + 3);
    auto in = input(r->rank);
    const std::vector<Tensor> mine(leaves.end() - 3, leaves.end());
    const auto layer = [&](Tensor x, std::tuple<Tensor, Tensor> rest, int times) {
        return split(a.second, b.second, x, rest, times);
    };
    const pieces out = run_layer(r, u, layer, mine[0], in, 3);
    CHECK(std::get<1>(out)[2].scalar_type() == torch::kLong);
    fsdp_torch::backward(m, join(out));
    nn::Module plain;
    plain.register_module("a", a.first), plain.register_module("b", b.first);
    same_grads(r, u, plain);
    for (size_t i = 0; i < 3; i++) {
        CHECK(want[i].grad().defined() == mine[i].grad().defined());
        if (want[i].grad().defined())
            CHECK(torch::allclose(want[i].grad() * r->size, mine[i].grad(), 1e-5, 1e-7));
    }
}
TEST_P(torch, several_inputs_and_outputs, few) { run(row, many_body); }

// Units inside of a layer that runs again: one by forward and one by checkpoint, which runs a third.
static void nested_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto n = twins_of<Block>(4);
    std::vector<fsdp_torch::Unit> u;
    for (size_t i = 0; i < 4; i++)
        u.push_back(fsdp_torch::fully_shard(m, *n[i].second, "h." + std::to_string(i)));
    for (int step = 0; step < 2; step++) {
        Tensor all = torch::zeros({});
        for (int k = 0; k < r->size; k++) {
            Tensor x = batch(k, step);
            for (size_t i : {0, 1, 2, 3, 1}) x = n[i].first(x);
            all = all + x.pow(2).mean() / r->size;
        }
        for (auto &p : n) p.first->zero_grad();
        all.backward();
        const auto inner = [&](Tensor x) {
            return fsdp_torch::forward(u[3], n[3].second, n[2].second(x));
        };
        const auto outer = [&](Tensor x) {
            x = fsdp_torch::forward(u[1], n[1].second, n[0].second(x));
            return fsdp_torch::checkpoint(u[2], inner, x);
        };
        Tensor x = run_layer(r, u[0], outer, batch(r->rank, step));
        fsdp_torch::backward(m, fsdp_torch::forward(u[1], n[1].second, x).pow(2).mean());
        for (size_t i = 0; i < 4; i++) same_grads(r, u[i], *n[i].first);
        CALL(r->w, fsdp_zero_grad(m));
    }
}
TEST_P(torch, nested_units, few) { run(row, nested_body); }

struct DroppedImpl : BlockImpl {
    Tensor forward(Tensor x) {
        return BlockImpl::forward(torch::dropout(BlockImpl::forward(x), 0.4, true));
    }
};
TORCH_MODULE(Dropped);
static void random_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto net = twins<Dropped>();
    const auto u = fsdp_torch::fully_shard(m, *net.second, "u");
    const Tensor x = batch(0);
    Tensor next[2];
    for (int ours = 0; ours < 2; ours++) { // a number is taken between forward and backward
        torch::manual_seed(7);
        Tensor loss = (ours ? run_layer(r, u, net.second, x) : net.first(x)).pow(2).mean();
        (void)torch::rand({3});
        if (ours) fsdp_torch::backward(m, loss);
        else loss.backward();
        next[ours] = torch::rand({3});
    }
    same_grads(r, u, *net.first);
    CHECK(next[0].equal(next[1])); // the backward has taken no numbers
}
TEST_P(torch, random_numbers, few) { run(row, random_body); }

// A first layer that writes to its input, and an activation that the next layer overwrites.
static void in_place_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto n = twins_of<Block>(2);
    const auto a = fsdp_torch::fully_shard(m, *n[0].second, "a"),
               b = fsdp_torch::fully_shard(m, *n[1].second, "b");
    const auto layer = [](Block &f) { return [&f](Tensor x) { return f(x.mul_(2)); }; };
    layer(n[1].first)(layer(n[0].first)(batch(0))).pow(2).mean().backward();
    Tensor x = fsdp_torch::forward(a, layer(n[0].second), batch(0));
    fsdp_torch::backward(m, fsdp_torch::forward(b, layer(n[1].second), x).pow(2).mean());
    same_grads(r, a, *n[0].first), same_grads(r, b, *n[1].first);
    CALL(r->w, fsdp_zero_grad(m));
    x = torch::tanh(fsdp_torch::forward(a, n[0].second, batch(0))); // tanh keeps its result
    x = fsdp_torch::forward(b, layer(n[1].second), x);
    throws([&] { fsdp_torch::backward(m, x.sum()); }, {"modified by an inplace operation"});
}
TEST_P(torch, writes_to_an_input, no_recompute) { run(row, in_place_body); }

/* ---- dtypes ---------------------------------------------------------------------------------- */

static void dtypes_body(lab_rank *r) {
    fsdp_model_desc desc = FSDP_ZERO;
    desc.param_dtype = FSDP_BF16, desc.reduce_dtype = FSDP_F32, desc.output_dtype = FSDP_F32;
    fsdp_model *m = make_model(r, &desc);
    auto n = twins<Block>();
    const auto u = fsdp_torch::fully_shard(m, *n.second, "u");
    n.first->to(torch::kBFloat16);
    Tensor all = torch::zeros({});
    for (int k = 0; k < r->size; k++)
        all = all +
              n.first(batch(k).to(torch::kBFloat16)).to(torch::kFloat).pow(2).mean() / r->size;
    all.backward();
    const Tensor out = run_layer(r, u, n.second, batch(r->rank)); // casts input and output
    CHECK(out.scalar_type() == torch::kFloat &&
          n.second->a->weight.scalar_type() == torch::kBFloat16);
    fsdp_torch::backward(m, out.pow(2).mean());
    same_grads(r, u, *n.first, r->size == 1 ? 0 : 0.02);
}
TEST_P(torch, gathered_as_bf16, few) { run(row, dtypes_body); }

// Autocast that nobody ends, over two steps; the backward is outside of it.
static void autocast_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto n = twins<Block>();
    const auto u = fsdp_torch::fully_shard(m, *n.second, "u");
    torch::optim::SGD theirs(n.first->parameters(), torch::optim::SGDOptions(0.1)),
        ours(fsdp_torch::shards(m), torch::optim::SGDOptions(0.1));
    const auto autocast = [](bool on) { at::autocast::set_autocast_enabled(at::kCPU, on); };
    for (int step = 0; step < 2; step++) {
        for (int k = 0; k < r->size; k++) {
            autocast(true);
            Tensor loss = n.first(batch(k, step)).to(torch::kFloat).pow(2).mean();
            autocast(false);
            loss.backward();
            at::autocast::clear_cache();
        }
        for (auto &p : n.first->parameters()) p.mutable_grad() = p.grad() / r->size;
        autocast(true);
        Tensor loss =
            run_layer(r, u, n.second, batch(r->rank, step)).to(torch::kFloat).pow(2).mean();
        autocast(false);
        fsdp_torch::backward(m, loss);
        same_grads(r, u, *n.first, r->size == 1 ? 0 : 1e-5);
        fsdp_torch::shards(m);
        ours.step(), theirs.step(), theirs.zero_grad();
        CALL(r->w, fsdp_params_changed(m));
        CALL(r->w, fsdp_zero_grad(m));
    }
}
TEST_P(torch, autocast, few) { run(row, autocast_body); }

static void cast_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto n = twins<Block>();
    const auto u = fsdp_torch::fully_shard(m, *n.second, "u");
    throws([&] { n.second->to(torch::kFloat64); },
           {"E556", "'a.weight'", "'u'", "fsdp_model_cast"});
    fsdp_torch::backward(m, run_layer(r, u, n.second, batch(r->rank)).pow(2).mean());
    CALL(r->w, fsdp_zero_grad(m));
    CALL(r->w, fsdp_model_cast(m, FSDP_F64));
    n.first->to(torch::kFloat64);
    Tensor all = torch::zeros({}, torch::kFloat64);
    for (int k = 0; k < r->size; k++)
        all = all + n.first(batch(k).to(torch::kFloat64)).pow(2).mean() / r->size;
    all.backward();
    fsdp_torch::backward(
        m, run_layer(r, u, n.second, batch(r->rank).to(torch::kFloat64)).pow(2).mean());
    same_grads(r, u, *n.first, 1e-14);
    // A move while the unit is open leaves it with memory of its own.
    throws(
        [&] {
            fsdp_torch::forward(
                u,
                [&](Tensor x) {
                    n.second->to(torch::kFloat);
                    return x;
                },
                batch(0));
            fsdp_torch::forward(u, n.second, batch(0));
        },
        {"E555", "'u'", "'scale'", "other memory"});
}
TEST_P(torch, another_dtype_after_sharding, few) { run(row, cast_body); }

/* ---- wrong use ------------------------------------------------------------------------------- */

static void outside_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto n = twins_of<Block>(2);
    auto u = fsdp_torch::fully_shard(m, *n[0].second, "h.0"),
         v = fsdp_torch::fully_shard(m, *n[1].second, "");
    torch::optim::SGD own(n[0].second->parameters(), torch::optim::SGDOptions(1e-2));
    const auto all = {"E556", "parameter '", "of unit 'h.0'", "fsdp_torch::shards"};
    for (int after = 0; after < 3; after++) { // before the first step, after it, after evaluation
        throws([&] { n[0].second->forward(batch(0)); }, all);
        throws([&] { n[1].second->forward(batch(0)); }, {"unit '(root)'"});
        std::ostringstream file;
        throws([&] { torch::save(n[0].second, file); }, {"E556", "fsdp_checkpoint_save"});
        throws([&] { (void)n[0].second->a->weight.sum().item<float>(); }, {"'a.weight'"});
        if (after == 1) { // an optimizer over the module's own parameters
            throws([&] { own.step(); }, {"E556", "fsdp_torch::shards"});
            throws([&] { nn::utils::clip_grad_norm_(n[0].second->parameters(), 1); },
                   {"E556", "the gradient of"});
            n[0].second->zero_grad();
        }
        if (after < 2) {
            const torch::AutoGradMode mode(after == 0);
            Tensor x = fsdp_torch::forward(v, n[1].second, run_layer(r, u, n[0].second, batch(0)));
            if (after == 0) fsdp_torch::backward(m, x.sum());
        }
    }
    CALL(r->w, fsdp_zero_grad(m));
    throws(
        [&] { // one layer's parameters in another one: also a failure of all ranks
            fsdp_torch::forward(
                v, [&](Tensor x) { return n[0].second(x); }, batch(0));
        },
        {"unit 'h.0'"});
    throws([&] { fsdp_torch::forward(u, n[0].second, batch(0)); }, {"unit 'h.0'", "E401"});
}
TEST_P(torch, used_outside_of_its_unit, few) { run(row, outside_body); }

static void twice_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    nets n(m);
    const auto plain = [&](bool retain) {
        Tensor all = torch::zeros({});
        for (int k = 0; k < r->size; k++) all = all + n.plain(batch(k)) / r->size;
        all.backward({}, retain);
        if (retain) all.backward();
    };
    // retain_graph: the second backward adds the same gradients.
    plain(true);
    Tensor loss = n.sharded(r, batch(r->rank));
    fsdp_torch::backward(m, loss, {}, true);
    fsdp_torch::backward(m, loss);
    n.same(r, 2e-6);
    // Twice without it: refused by the last unit, before anything has run.
    const auto sum = [&] {
        return run_layer(r, n.units[2], n.blocks[1].second, batch(0).requires_grad_(true)).sum();
    };
    loss = sum();
    loss.backward();
    throws([&] { loss.backward(); }, {"E206", "unit 'h.1' has run its backward"});
    CHECK(fsdp_finalize_backward(m) == FSDP_ERR_INVALID_STATE); // it reports the failure again
    throws([&] { fsdp_torch::backward(m, loss); }, {"E206", "no forward of it waits"});
    CHECK(fsdp_finalize_backward(m) == FSDP_ERR_INVALID_STATE);
    CALL(r->w, fsdp_zero_grad(m));
    // A backward through gradients.
    loss = sum();
    throws([&] { loss.backward({}, c10::nullopt, true); }, {"E555", "create_graph"});
    CALL(r->w, fsdp_model_reset(m));
    // The next step is a step as any other.
    n.zero_plain();
    plain(false);
    fsdp_torch::backward(m, n.sharded(r, batch(r->rank)));
    n.same(r, 2e-6);
}
TEST_P(torch, backward_twice, few) { run(row, twice_body); }

struct Bomb : torch::autograd::Function<Bomb> {
    static Tensor forward(torch::autograd::AutogradContext *, Tensor x) { return x.clone(); }
    static torch::autograd::variable_list backward(torch::autograd::AutogradContext *,
                                                   torch::autograd::variable_list) {
        throw std::runtime_error("a bomb in backward");
    }
};
enum { IN_FORWARD, IN_BACKWARD, IN_RECOMPUTE, IN_C10 };
static const struct {
    const char *name;
    int where;
} bombs[] = {{"forward", IN_FORWARD},
             {"backward", IN_BACKWARD},
             {"recompute", IN_RECOMPUTE},
             {"c10", IN_C10}};
static void bomb_body(lab_rank *r) {
    const int where = *(int *)r->arg;
    fsdp_model *m = make_model(r);
    auto n = twins_of<Block>(4);
    std::vector<fsdp_torch::Unit> u;
    for (size_t i = 0; i < 4; i++)
        u.push_back(fsdp_torch::fully_shard(m, *n[i].second, "h." + std::to_string(i)));
    std::vector<Tensor> values;
    for (auto &t : fsdp_torch::shards(m)) values.push_back(t.detach().clone());
    const auto pass = [&](bool armed) {
        Tensor x = batch(r->rank);
        for (size_t i = 0; i < 4; i++) {
            int runs = 0;
            auto layer = [&, i, runs](Tensor y) mutable {
                const bool now = armed && i == 3 && r->rank == 1;
                if (now && where == IN_FORWARD) throw std::runtime_error("a bomb in forward");
                if (now && where == IN_RECOMPUTE && runs++)
                    throw std::runtime_error("a bomb in recompute");
                if (now && where == IN_C10) y.view({7, 7});
                y = n[i].second(y);
                return now && where == IN_BACKWARD ? Bomb::apply(y) : y;
            };
            x = where == IN_RECOMPUTE ? fsdp_torch::checkpoint(u[i], layer, x)
                                      : fsdp_torch::forward(u[i], layer, x);
        }
        fsdp_torch::backward(m, x.sum());
    };
    pass(false);
    CALL(r->w, fsdp_zero_grad(m));
    const char *text = where == IN_FORWARD    ? "a bomb in forward"
                       : where == IN_BACKWARD ? "a bomb in backward"
                       : where == IN_C10      ? "shape '[7, 7]' is invalid"
                                              : "a bomb in recompute";
    throws([&] { pass(true); }, {text});
    CHECK(fsdp_world_status(r->w) == FSDP_ERR_ABORTED);
    CHECK_MSG(strstr(fsdp_last_error(r->w), text) && strstr(fsdp_last_error(r->w), "rank 1"), "%s",
              fsdp_last_error(r->w));
    CHECK_MSG(!strstr(fsdp_last_error(r->w), "frame #"), "%s", fsdp_last_error(r->w));
}
TEST_P(torch, exception_on_one_rank, bombs) {
    int where = row->where;
    lab_run(3, &processes, bomb_body, &where);
}

static void bad_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto n = twins<Block>();
    const auto refused = [&](const char *name, Tensor bad, const char *why, bool grad = true) {
        nn::Module module;
        module.register_module("good", n.second);
        module.register_parameter(name, bad, grad);
        throws([&] { fsdp_torch::fully_shard(m, module, "u"); }, {"E555", "unit 'u'", name, why});
    };
    nn::Module empty;
    throws([&] { fsdp_torch::fully_shard(m, empty, "u"); }, {"E555", "unit 'u'", "no parameters"});
    refused("steps", torch::zeros({3}, torch::kLong), "dtype", false);
    refused("mask", torch::zeros({3}, torch::kBool), "dtype", false);
    refused("wave", torch::zeros({3}, torch::kComplexFloat), "dtype");
    refused("turned", torch::randn({3, 5}).t(), "not contiguous");
    refused("holes", torch::randn({4, 4}).to_sparse(), "sparse");
    refused("meta", torch::zeros({3}, torch::kMeta), "another device");
    refused("deep", torch::zeros({1, 1, 1, 1, 1, 1, 1, 1, 1, 1}), "dims");
    refused("bias", n.second->a->bias.detach().view({17, 1}), "shares its memory");
    Block mixed;
    mixed->b->to(torch::kDouble); // the library refuses it: one dtype for a unit
    throws([&] { fsdp_torch::fully_shard(m, *mixed, "u"); }, {"unit 'u'", "dtype"});
    CHECK_EQ_INT(fsdp_num_units(m), 0);
    // Nothing is lost: the module has its values, and becomes a unit.
    for (size_t i = 0; i < 5; i++) CHECK(n.second->parameters()[i].equal(n.first->parameters()[i]));
    CHECK(n.second(batch(0)).equal(n.first(batch(0))));
    const auto u = fsdp_torch::fully_shard(m, *n.second, "u");
    throws([&] { fsdp_torch::fully_shard(m, *n.second, "again"); }, {"E555", "in other units"});
    CHECK(torch::allclose(fsdp_torch::forward(u, n.second, batch(0)), n.first(batch(0))));
}
TEST_P(torch, bad_input, no_recompute) { run(row, bad_body); }

/* ---- lifetime -------------------------------------------------------------------------------- */

static void life_body(lab_rank *r) {
    auto n = twins_of<Block>(2);
    Tensor loss;
    {
        fsdp_model *m = make_model(r);
        const auto kept = fsdp_torch::fully_shard(m, *n[0].second, "kept");
        const auto layer = [&](Tensor x) { return n[1].second(x); };
        {
            const auto dropped = fsdp_torch::fully_shard(m, *n[1].second, "dropped");
            loss = fsdp_torch::checkpoint(dropped, layer, batch(0)).sum();
        }
        fsdp_torch::backward(m, loss);
        fsdp_torch::forward(
            kept,
            [&](Tensor x) { // destroyed while it is open
                fsdp_model_destroy(m);
                throws([&] { n[0].second(x); }, {"E556", "'kept'"});
                throws([&] { fsdp_torch::forward(kept, n[0].second, x); },
                       {"E555", "'kept'", "model has ended"});
                return x.detach();
            },
            batch(0));
    }
}
static void life_caught(lab_rank *r) { // post_forward of a model that has ended
    throws([&] { life_body(r); }, {"E555", "'kept'", "model has ended"});
}
TEST_P(torch, model_ends_before_its_modules, no_recompute) { run(row, life_caught); }

static void thaw_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto n = twins<Block>();
    n.second(batch(0)).sum().backward();
    const auto u = fsdp_torch::fully_shard(m, *n.second, "u");
    CHECK(!n.second->scale.grad().defined()); // an earlier gradient is dropped
    n.second->scale.set_requires_grad(false);
    throws([&] { fsdp_torch::forward(u, n.second, batch(0)); },
           {"E555", "'scale'", "requires_grad"});
    n.second->scale.set_requires_grad(true);
    fsdp_torch::backward(m, fsdp_torch::forward(u, n.second, batch(0)).sum());
}
TEST_P(torch, frozen_after_sharding, no_recompute) { run(row, thaw_body); }

// A checkpoint of layers without trainable parameters and inputs needs no backward; one with a
// trainable unit inside does.
static void frozen_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    auto n = twins_of<Block>(2);
    for (auto &p : n[0].second->parameters()) p.set_requires_grad(false);
    const auto a = fsdp_torch::fully_shard(m, *n[0].second, "a"),
               b = fsdp_torch::fully_shard(m, *n[1].second, "b");
    CHECK(!fsdp_torch::checkpoint(a, n[0].second, batch(0)).requires_grad());
    CHECK(!fsdp_torch::forward(a, n[0].second, batch(0)).requires_grad());
    const auto both = [&](Tensor x) { return fsdp_torch::forward(b, n[1].second, n[0].second(x)); };
    Tensor all = torch::zeros({});
    for (int k = 0; k < r->size; k++)
        all = all + n[1].first(n[0].first(batch(k))).pow(2).mean() / r->size;
    all.backward();
    fsdp_torch::backward(m, fsdp_torch::checkpoint(a, both, batch(r->rank)).pow(2).mean());
    same_grads(r, b, *n[1].first);
}
TEST_P(torch, frozen_layers, no_recompute) { run(row, frozen_body); }

// zero_grad between forward and backward: only what this backward adds counts.
static void zero_between_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    nets n(m);
    for (int step = 0; step < 3; step++) {
        n.zero_plain();
        Tensor all = torch::zeros({});
        for (int k = 0; k < r->size; k++) all = all + n.plain(batch(k, step)) / r->size;
        all.backward();
        const Tensor loss = n.sharded(r, batch(r->rank, step).requires_grad_());
        CALL(r->w, fsdp_zero_grad(m)); // the gradients of the last step are still there
        fsdp_torch::backward(m, loss);
        n.same(r); // the last step's gradients are another batch's, and of this one's size
    }
}
TEST_P(torch, zero_grad_after_forward, few) { run(row, zero_between_body); }

// A model is built layer by layer: each unit's values are in its shards before the next one exists.
// Loading a layer allocates its shards alone, and the commit needs at most one unit more than stays.
static void build_body(lab_rank *r) {
    fsdp_model *m = make_model(r);
    std::vector<fsdp_torch::Unit> units;
    std::vector<Block> layers;
    int64_t live[3];
    for (int i = 0; i < 3; i++) {
        torch::manual_seed(1 + i);
        layers.push_back(Block());
        r->heap->peak_bytes = r->heap->live_bytes;
        units.push_back(fsdp_torch::fully_shard(m, *layers.back(), "h." + std::to_string(i)));
        CHECK_MSG(r->heap->peak_bytes <= r->heap->live_bytes, "%lld bytes at most, %lld now",
                  (long long)r->heap->peak_bytes, (long long)r->heap->live_bytes);
        for (auto &p : layers.back()->parameters()) {
            throws([&] { (void)p.data_ptr(); }, {"E556"});
            CHECK(p.storage().use_count() > 0 &&
                  !p.storage().unsafeGetStorageImpl()->_mutable_data_ptr_no_checks().get());
        }
        live[i] = r->heap->live_bytes;
    }
    CHECK(live[2] > live[1] && live[1] > live[0]);
    r->heap->peak_bytes = 0;
    CALL(r->w, fsdp_model_commit(m));
    CHECK_MSG(r->heap->peak_bytes - r->heap->live_bytes <= live[2] - live[1],
              "the commit needs %lld bytes at most, and %lld after it; a unit has %lld",
              (long long)r->heap->peak_bytes, (long long)r->heap->live_bytes,
              (long long)(live[2] - live[1]));
    Tensor x = batch(0), want = batch(0);
    for (size_t i = 0; i < 3; i++) {
        torch::manual_seed(1 + (int)i);
        want = Block()(want), x = fsdp_torch::forward(units[i], layers[i], x);
    }
    CHECK(want.equal(x));
}
TEST_P(torch, built_layer_by_layer, no_recompute) { run(row, build_body); }
