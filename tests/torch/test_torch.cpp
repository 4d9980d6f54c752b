/* test_torch.cpp - fsdp_torch.h: modules of LibTorch as units (make torch)
   The expected results are those of plain LibTorch in the same process, with the batches of all
   ranks. Ranks are processes, forked before they use torch.

   SPDX-License-Identifier: MIT */
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
    for (auto &p : plain.named_parameters()) {
        int i = 0;
        for (;; i++) {
            CALL(r->w, fsdp_param_view_get(unit, i, &v));
            if (p.key() == v.name) break;
        }
        snprintf(w_case, sizeof w_case, "%s of %s", v.name, v.unit_name);
        const Tensor want = p.value().grad();
        W_CHECK(!v.shard_grad == !want.defined(), "a gradient: %d, expected %d", v.shard_grad != NULL,
                want.defined());
        if (!want.defined()) continue;
        Tensor got = torch::empty(want.sizes(), fsdp_torch::detail::type_of(v.grad_dtype));
        CALL(r->w, fsdp_param_full_grad(unit, i, got.data_ptr()));
        const double scale = want.abs().max().item<double>() + 1e-30;
        const double off = (got.to(torch::kDouble) - want.to(torch::kDouble)).abs().max().item<double>();
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
static const how hows[] = {{"W=1", 1, 0},           {"W=2", 2, 0},           {"W=3", 3, 0},
                           {"W=4", 4, 0},           {"W=1 checkpoint", 1, 1}, {"W=2 checkpoint", 2, 1},
                           {"W=3 checkpoint", 3, 1}, {"W=4 checkpoint", 4, 1}};
static const how few[] = {{"W=1", 1, 0}, {"W=3", 3, 0}, {"W=1 checkpoint", 1, 1}, {"W=3 checkpoint", 3, 1}};
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
        const Tensor want = plain->loss(tokens, [&](size_t l, Tensor x) {
            return p->h[l]->as<Layer>()->forward(x);
        });
        want.backward();
        plain_opt.step();
        auto &g = gpt;
        const Tensor loss = fsdp_torch::forward(root, [&](Tensor t) {
            return g->loss(t, [&](size_t l, Tensor x) {
                auto layer = [&g, l](Tensor y) { return g->h[l]->as<Layer>()->forward(y); };
                return run_layer(r, h[l], layer, x);
            });
        }, tokens.slice(0, r->rank * mine, (r->rank + 1) * mine));
        fsdp_torch::backward(m, loss);
        CALL(r->w, fsdp_adamw_step(opt, 1e-3));
        CALL(r->w, fsdp_zero_grad(m));
        double sum = loss.item<double>();
        CALL(r->w, fsdp_all_reduce(r->w, NULL, &sum, 1, FSDP_F64, FSDP_SUM));
        CHECK_MSG(fabs(sum / r->size / want.item<double>() - 1) < 1e-6, "step %d: loss %.9g, plain %.9g",
                  step, sum / r->size, want.item<double>());
    }
}
TEST_P(torch, losses, hows) { run(row, train_body); }

int dummy;
