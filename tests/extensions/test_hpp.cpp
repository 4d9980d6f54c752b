/* test_hpp.cpp - fsdp.hpp: errors, owners, scopes and the exceptions that leave them, lambdas,
   16-bit types, allocations; the bits of a trainer in C.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "lab.h"

#include "fsdp.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <sys/stat.h>
#include <vector>

/* ---- operator new, which counts, and fails on demand ------------------------------------------ */

static std::atomic<long> news{0};        /* calls so far */
static std::atomic<long> new_fails{-1};  /* this call fails; -1: none */

/* Not inline: gcc would take malloc and free for functions that do not belong together. */
#define APART __attribute__((noinline))
APART void *operator new(std::size_t size) {
    if (news++ == new_fails) throw std::bad_alloc();
    if (void *ptr = malloc(size ? size : 1)) return ptr;
    throw std::bad_alloc();
}
APART void operator delete(void *ptr) noexcept { free(ptr); }
APART void operator delete(void *ptr, std::size_t) noexcept { free(ptr); }

/* ---- helpers ---------------------------------------------------------------------------------- */

enum { N = 8 }; /* a unit has w, [N][N], and b, [N] */

/* Calls f, which has to throw a fsdp::error. Returns its text. */
template <class F> static std::string refusal(fsdp_status expected, F f) {
    try {
        f();
    } catch (const fsdp::error &e) {
        CHECK_MSG(e.status == expected, "%s, expected %s: %s", fsdp_status_name(e.status),
                  fsdp_status_name(expected), e.what());
        return e.what();
    }
    CHECK_MSG(false, "no fsdp::error, expected %s", fsdp_status_name(expected));
    return "";
}
static void check_says(const std::string &text, const std::string &word) {
    CHECK_MSG(text.find(word) != std::string::npos, "'%s' does not say '%s'", text.c_str(),
              word.c_str());
}

/* Returns the desc of a world of one, which logs nothing and allocates from `heap`. */
static fsdp_world_desc desc_of_one(w_heap *heap) {
    fsdp_world_desc d = w_desc(0, 1, nullptr, w_job("hpp"), 0);
    w_heap_use(heap, &d);
    return d;
}
static void check_empty(const w_heap &heap) {
    CHECK_MSG(!heap.live, "%lld blocks are left", (long long)heap.live);
}

static float value_at(const fsdp_param_view &v, int64_t k) {
    return 0.01f * (float)(fsdp_view_index(&v, k) % 11 - 5 + v.ordinal);
}
static void fill(fsdp::model &model) {
    model.init([](const fsdp::param_view &v) {
        for (int64_t k = 0; k < v.numel; k++) v.data_as<float>()[k] = value_at(v, k);
    });
}

/* A model of L units "h.0", "h.1", ... of w and b in f32. */
enum { L = 3 };
struct net {
    fsdp::model model;
    std::vector<fsdp::unit> h;

    explicit net(const fsdp::world &world, const fsdp_model_desc &desc = fsdp::model_desc())
        : model(world, desc) {
        for (int l = 0; l < L; l++)
            h.push_back(model.shard("h." + std::to_string(l),
                                    {fsdp::mat("w", N, N), fsdp::vec("b", N)}));
        fill(model);
    }
    void forward() {
        for (const fsdp::unit &u : h) {
            auto f = u.forward();
            CHECK(f.data<float>(0).size() == N * N && f.data<float>(1).size() == N);
        }
    }
    /* Adds `x` to all gradients. */
    void backward(float x) {
        for (std::size_t l = h.size(); l-- > 0;) {
            auto b = h[l].backward();
            for (int i = 0; i < 2; i++)
                for (float &g : b.grad<float>(i)) g += x;
        }
    }
    std::vector<float> shards() {
        std::vector<float> all;
        for (auto &p : model.params()) {
            const auto s = p.shard_as<float>();
            all.insert(all.end(), s.begin(), s.end());
        }
        return all;
    }
};

/* ---- errors ------------------------------------------------------------------------------------ */

TEST(hpp, error_has_status_and_text) {
    static_assert(std::is_base_of_v<std::runtime_error, fsdp::error>, "a runtime_error");
    w_heap heap;
    fsdp_world_desc bad = desc_of_one(&heap);
    bad.backend = "none";
    const std::string text = refusal(FSDP_ERR_UNSUPPORTED, [&] { fsdp::world w(bad); });
    CHECK_EQ_STR(text.c_str(), fsdp_last_error(nullptr));
    fsdp::world world(desc_of_one(&heap));
    fsdp::model model(world);
    const std::string own = refusal(FSDP_ERR_INVALID_STATE, [&] { model.commit(); });
    CHECK_EQ_STR(own.c_str(), fsdp_last_error(world.get()));
    check_says(own, "[E");
    world.check(FSDP_OK);
    refusal(FSDP_ERR_INVALID_ARG, [&] { model.shard("u", {fsdp::mat("w", -1, 2)}); });
    CHECK_EQ_INT(fsdp_num_units(model.get()), 0); /* a failure leaves the model as it was */
    model.shard("u", {fsdp::mat("w", 2, 2)});
    CHECK_OK(world.close());
    check_empty(heap);
}

/* ---- owners ------------------------------------------------------------------------------------ */

/* All orders in which the owners of C objects may end: each ends once, nothing is left. */
TEST(hpp, owners_end_in_any_order, SLOW | SECONDS(300)) {
    enum { OWNERS = 7 };
    std::array<int, OWNERS> order;
    std::iota(order.begin(), order.end(), 0);
    int count = 0;
    uint64_t number = 0;
    do {
        if (W_SLOW && lab_hash(1, number++, 0, 0) % 16) continue; /* a sample */
        w_heap heap;
        std::optional<fsdp::world> world(std::in_place, desc_of_one(&heap));
        std::optional<net> n(std::in_place, *world);
        std::optional<fsdp::muon> muon(std::in_place, n->model);
        std::optional<fsdp::adamw> adamw(
            std::in_place, n->model, fsdp::adamw_desc(),
            [&](const fsdp::param_view &p) { return muon && muon->takes(p) ? -1 : 0; });
        std::optional<fsdp::ema> ema(std::in_place, n->model);
        std::optional<fsdp::checkpoint> ck(std::in_place, n->model);
        std::optional<fsdp::plan> plan(std::in_place, n->model);
        const fsdp::unit unit = n->h[1];
        n->forward(), n->backward(1);
        n->model.finalize_backward();
        const std::function<void()> end[OWNERS] = {
            [&] { world.reset(); }, [&] { n.reset(); },  [&] { muon.reset(); },
            [&] { adamw.reset(); }, [&] { ema.reset(); }, [&] { ck.reset(); },
            [&] { plan.reset(); }};
        for (int which : order) end[which]();
        check_empty(heap);
        CHECK(!unit.get());
        count++;
    } while (std::next_permutation(order.begin(), order.end()));
    h_message("note: %d orders", count);
    CHECK(count > 200);
}

template <class T> static void check_moves_only() {
    static_assert(!std::is_copy_constructible_v<T> && !std::is_copy_assignable_v<T>, "no copy");
    static_assert(std::is_nothrow_move_constructible_v<T>, "moves");
    static_assert(std::is_nothrow_move_assignable_v<T>, "moves");
    static_assert(std::is_nothrow_destructible_v<T> && !std::is_polymorphic_v<T>, "not virtual");
}
/* Moves an owner and back. In between the first one holds nothing, and get() gives the same. */
template <class T> static void check_moved(T &first) {
    auto *const handle = first.get();
    CHECK(handle != nullptr);
    T second(std::move(first));
    CHECK(!first.get() && second.get() == handle);
    first = std::move(second);
    CHECK(!second.get() && first.get() == handle);
}

TEST(hpp, moves_only) {
    check_moves_only<fsdp::world>(), check_moves_only<fsdp::model>();
    check_moves_only<fsdp::adamw>(), check_moves_only<fsdp::sgd>(), check_moves_only<fsdp::muon>();
    check_moves_only<fsdp::ema>(), check_moves_only<fsdp::grad_scaler>();
    check_moves_only<fsdp::checkpoint>(), check_moves_only<fsdp::plan>();
    static_assert(std::is_copy_constructible_v<fsdp::unit>, "a value");
    static_assert(!std::is_copy_constructible_v<fsdp::forward_scope>, "a scope");
    w_heap heap, other;
    fsdp::world world(desc_of_one(&heap));
    net n(world);
    fsdp::adamw adamw(n.model);
    fsdp::ema ema(n.model);
    fsdp::grad_scaler scaler(n.model);
    fsdp::checkpoint ck(n.model);
    fsdp::plan plan(n.model);
    check_moved(world), check_moved(n.model), check_moved(adamw), check_moved(ema);
    check_moved(scaler), check_moved(ck), check_moved(plan);
    n.forward(), n.backward(1); /* all still works */
    n.model.finalize_backward();
    adamw.step(0.1), ema.update();
    /* an assignment ends what was there before */
    const int64_t bytes = n.model.memory().host_bytes;
    adamw = fsdp::adamw(n.model), adamw.step(0.1);
    CHECK_EQ_INT(n.model.memory().host_bytes, bytes);
    fsdp::world second(desc_of_one(&other));
    net m(second);
    n.model = std::move(m.model);
    CHECK(!adamw.get() && !n.h[0].get());
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { adamw.step(0.1); }), "has ended");
    world = std::move(second);
    check_empty(heap);
    CHECK(n.model.get() != nullptr && m.h[0].get() != nullptr);
    CHECK_OK(world.close());
    check_empty(other);
}

/* Every call on an object that holds nothing throws. */
TEST(hpp, nothing_is_refused) {
    w_heap heap;
    fsdp::world world(desc_of_one(&heap));
    std::optional<net> n(std::in_place, world);
    fsdp::adamw adamw(n->model);
    fsdp::ema ema(n->model);
    fsdp::checkpoint ck(n->model);
    fsdp::plan plan(n->model);
    const fsdp::unit unit = n->h[0], none;
    const auto full = unit.full<float>(0);
    fsdp::model moved(std::move(n->model));
    CHECK_OK(world.close());
    CHECK_OK(world.close());
    CHECK_EQ_INT(world.rank(), -1);
    const std::function<void()> calls[] = {
        [&] { world.barrier(); },
        [&] { (void)world.all_reduce(1.0f); },
        [&] { fsdp::model m(world); },
        [&] { moved.shard("u", {fsdp::vec("b", 2)}); },
        [&] { n->model.shard("u", {fsdp::vec("b", 2)}); },
        [&] { fill(moved); },
        [&] { moved.load([&](const fsdp::param_view &) { return full; }); },
        [&] { moved.params(); },
        [&] { moved.finalize_backward(); },
        [&] { (void)moved.clip_grad_norm(1); },
        [&] { moved.set_requires_gradient_sync(true); },
        [&] { auto f = unit.forward(); },
        [&] { auto b = none.backward(); },
        [&] { none.set_all_reduce_hook([](void *, int64_t, fsdp_dtype, void *) {}); },
        [&] { unit.set_post_accumulate_hook(0, nullptr); },
        [&] { unit.set_requires_gradient_sync(true); },
        [&] { unit.load(0, full); },
        [&] { (void)none.full<float>(0); },
        [&] { fsdp::adamw a(moved); },
        [&] { adamw.step(0.1); },
        [&] { ema.update(); },
        [&] { ck.save("x", 1); },
        [&] { (void)ck.find("x"); },
        [&] { plan.pause(true); },
    };
    for (const auto &call : calls)
        check_says(refusal(FSDP_ERR_INVALID_ARG, call), "moved from or closed");
    CHECK(moved.describe().empty() && plan.why().empty() && unit.name().empty());
    check_empty(heap);
}

/* A world that somebody else ends. */
static void borrowed(lab_rank *r) {
    std::optional<fsdp::world> world(std::in_place, r->w);
    net n(*world);
    CHECK_EQ_INT(world->rank(), r->rank);
    CHECK_EQ_INT(world->size(), r->size);
    float sums[2] = {1, (float)r->rank};
    world->all_reduce(sums, 2);
    CHECK(sums[0] == (float)r->size && sums[1] == (float)(r->size * (r->size - 1) / 2));
    CHECK(world->all_reduce(int64_t{r->rank}, FSDP_MAX) == r->size - 1);
    struct { int a; double b; } sent = {r->rank, 0.5 * r->rank};
    world->broadcast(&sent, 1, r->size - 1);
    CHECK(sent.a == r->size - 1 && sent.b == 0.5 * (r->size - 1));
    world.reset();
    CHECK(!n.model.get());
    CALL(r->w, fsdp_barrier(r->w));
}
TEST(hpp, world_of_others, GLOO) { lab_run(3, nullptr, borrowed, nullptr); }

/* ---- scopes ------------------------------------------------------------------------------------ */

template <class Scope, class = void> struct gives_data : std::false_type {};
template <class Scope>
struct gives_data<Scope, std::void_t<decltype(std::declval<Scope>().template data<float>(0).size())>>
    : std::true_type {};
template <class Scope, class = void> struct gives_grad : std::false_type {};
template <class Scope>
struct gives_grad<Scope, std::void_t<decltype(std::declval<Scope>().template grad<float>(0).size())>>
    : std::true_type {};

/* Getters have the size and the memory of those of C, and refuse what is wrong. A scope that ends
   with its expression has none. */
static void getters(lab_rank *r) {
    static_assert(gives_data<fsdp::backward_scope &>() && !gives_data<fsdp::backward_scope>(), "");
    static_assert(gives_grad<fsdp::backward_scope &>() && !gives_grad<fsdp::backward_scope>(), "");
    static_assert(gives_data<fsdp::forward_scope &>() && !gives_grad<fsdp::forward_scope &>(), "");
    fsdp::world world(r->w);
    fsdp::model_desc desc;
    desc.param_dtype = FSDP_BF16;
    fsdp::model model(world, desc);
    fsdp_param_desc frozen = fsdp::vec("f", 5), exact = fsdp::mat("x", 4, 3);
    frozen.frozen = 1, exact.keep_dtype = 1;
    const fsdp::unit u = model.shard("u", {fsdp::mat("w", 7, 3), frozen, exact});
    fill(model);
    {
        auto f = u.forward();
        CHECK(f.data<fsdp::bf16>(0) == fsdp_data(u.get(), 0));
        CHECK_EQ_INT(f.data<fsdp::bf16>(0).size(), 21);
        CHECK_EQ_INT(f.data<fsdp::bf16>(1).size(), 5);
        CHECK_EQ_INT(f.data<float>(2).size(), 12);
    }
    {
        auto b = u.backward();
        CHECK_EQ_INT(b.data<fsdp::bf16>(0).size(), 21);
        CHECK(b.grad<fsdp::bf16>(0) == fsdp_grad(u.get(), 0));
        CHECK_EQ_INT(b.grad<fsdp::bf16>(0).size(), 21);
        CHECK(!b.grad<fsdp::bf16>(1).data() && b.grad<fsdp::bf16>(1).size() == 0); /* frozen */
        for (float &g : b.grad<float>(2)) g = 1;
        b.close();
        check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { b.close(); }), "closed");
    }
    model.finalize_backward();
    auto f = u.forward();
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { (void)f.data<float>(0); }), "bf16");
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { (void)f.data<float>(3); }), "0..2");
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { (void)f.data<float>(-1); }), "-1");
    CALL(r->w, fsdp_post_forward(u.get())); /* a call of C that ends the scope early */
    refusal(FSDP_ERR_INVALID_STATE, [&] { (void)f.data<float>(2); });
    refusal(FSDP_ERR_INVALID_STATE, [&] { f.close(); });
    /* C has kept the first failure for finalize */
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { model.finalize_backward(); }), "bf16");
    u.forward([](auto &) {});
    auto b = u.backward();
    model.finalize_backward(); /* closes the unit, as in C */
    refusal(FSDP_ERR_INVALID_STATE, [&] { (void)b.grad<fsdp::bf16>(0); });
    refusal(FSDP_ERR_INVALID_STATE, [&] { model.finalize_backward(); });
    world.barrier();
    auto last = u.forward();
    h_mark(0), h_await_marks(0, r->size); /* all have gathered */
    world.abort("the test's reason");
    check_says(refusal(FSDP_ERR_ABORTED, [&] { (void)last.data<float>(2); }), "the test's reason");
}
TEST(hpp, getters_are_checked, GLOO) {
    lab_run(3, nullptr, getters, nullptr);
}

/* A post_* that fails in a destructor is thrown once: by the next scope, or by finalize. */
static void lost(lab_rank *r) {
    fsdp::world world(r->w);
    net n(world);
    n.forward();
    {
        auto b = n.h[0].backward();
        CALL(r->w, fsdp_post_backward(n.h[0].get()));
    } /* here it fails */
    check_says(refusal(FSDP_ERR_INVALID_STATE, [&] { n.model.finalize_backward(); }), "h.0");
    n.forward();
    {
        auto f = n.h[1].forward();
        CALL(r->w, fsdp_post_forward(n.h[1].get()));
    }
    check_says(refusal(FSDP_ERR_INVALID_STATE, [&] { auto b = n.h[2].backward(); }),
               "post_forward: unit 'h.1'");
    n.backward(1); /* the world goes on */
    n.model.finalize_backward();
    n.forward();
    for (std::size_t unit : {0u, 1u}) { /* a scope throws the first failure, finalize the other */
        if (unit)
            check_says(refusal(FSDP_ERR_INVALID_STATE, [&] { auto b = n.h[2].backward(); }),
                       "'h.0'");
        auto f = n.h[unit].forward();
        CALL(r->w, fsdp_post_forward(n.h[unit].get()));
    }
    check_says(refusal(FSDP_ERR_INVALID_STATE, [&] { n.model.finalize_backward(); }), "'h.1'");
    n.model.finalize_backward();
    { /* a getter's failure comes first in C: finalize throws it, as always */
        auto f = n.h[0].forward();
        (void)fsdp_data(n.h[0].get(), 99);
        CALL(r->w, fsdp_post_forward(n.h[0].get()));
    }
    refusal(FSDP_ERR_INVALID_STATE, [&] { auto f = n.h[1].forward(); });
    n.forward(), n.backward(1);
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { n.model.finalize_backward(); }), "99");
    /* Failures with equal texts: one that a call of C has returned, another that a scope has lost
       and thrown. C keeps the first, and finalize throws it. */
    refusal(FSDP_ERR_INVALID_STATE, [&] { n.model.check(fsdp_post_forward(n.h[1].get())); });
    {
        auto f = n.h[1].forward();
        CALL(r->w, fsdp_post_forward(n.h[1].get()));
    }
    check_says(refusal(FSDP_ERR_INVALID_STATE, [&] { auto f = n.h[0].forward(); }), "'h.1'");
    check_says(refusal(FSDP_ERR_INVALID_STATE, [&] { n.model.finalize_backward(); }), "'h.1'");
    n.model.reset();
    { /* one that a scope has thrown, and reset in C forgets: the next one is another */
        auto f = n.h[1].forward();
        CALL(r->w, fsdp_post_forward(n.h[1].get()));
    }
    refusal(FSDP_ERR_INVALID_STATE, [&] { auto f = n.h[0].forward(); });
    CHECK(fsdp_model_failure(n.model.get()) > 0);
    CALL(r->w, fsdp_model_reset(n.model.get()));
    CHECK_EQ_INT(fsdp_model_failure(n.model.get()), 0);
    refusal(FSDP_ERR_INVALID_STATE, [&] { n.model.check(fsdp_post_forward(n.h[1].get())); });
    check_says(refusal(FSDP_ERR_INVALID_STATE, [&] { n.model.finalize_backward(); }), "'h.1'");
    { /* finalize fails itself: what C keeps is thrown once, by a scope */
        auto f = n.h[1].forward();
        CALL(r->w, fsdp_post_forward(n.h[1].get()));
    }
    refusal(FSDP_ERR_INVALID_STATE, [&] { auto f = n.h[0].forward(); });
    {
        auto f = n.h[2].forward();
        check_says(refusal(FSDP_ERR_INVALID_STATE, [&] { n.model.finalize_backward(); }), "'h.2'");
    }
    n.model.finalize_backward();
    {
        auto f = n.h[1].forward();
        CALL(r->w, fsdp_post_forward(n.h[1].get()));
    }
    n.model.reset(), n.forward(), n.backward(1); /* all is forgotten */
    n.model.finalize_backward();
    refusal(FSDP_ERR_INVALID_STATE, [&] { auto b = n.h[0].backward(); }); /* pre_*: at once */
}
TEST(hpp, failure_in_a_destructor_is_kept) { lab_run(2, nullptr, lost, nullptr); }

/* Exceptions that stay inside a scope, and scopes that live in a destructor while an exception
   passes, end as usual. */
static void stays(lab_rank *r) {
    fsdp::world world(r->w);
    net n(world);
    struct at_end {
        net &of;
        ~at_end() { of.forward(), of.backward(2); }
    };
    try {
        const at_end now = {n};
        throw 1;
    } catch (int) {
    }
    n.model.finalize_backward();
    n.model.zero_grad();
    for (const fsdp::unit &u : n.h) {
        auto f = u.forward();
        try {
            (void)f.data<double>(0);
        } catch (const fsdp::error &) {
        }
    }
    for (auto u = n.h.rbegin(); u != n.h.rend(); ++u) {
        fsdp::backward_scope b = u->backward();
        fsdp::backward_scope moved(std::move(b)); /* one of them closes */
        for (int i = 0; i < 2; i++)
            for (float &g : moved.grad<float>(i)) g = 3;
        try {
            throw std::runtime_error("inside");
        } catch (const std::exception &) {
        }
    }
    CHECK_OK(fsdp_world_status(r->w));
    refusal(FSDP_ERR_INVALID_ARG, [&] { n.model.finalize_backward(); }); /* data<double> */
    n.model.finalize_backward();
    for (auto &p : n.model.params())
        for (float g : p.grad_as<float>()) CHECK(g == 3);
    CHECK_EQ_INT(n.h[0].forward([](auto &f) { return f.template data<float>(1).size(); }), N);
    n.model.reset();
}
TEST(hpp, exception_inside_a_scope, GLOO) { lab_run(2, nullptr, stays, nullptr); }

/* An exception on one of three ranks leaves a scope. */
static const struct thrown {
    const char *name;
    const char *says; /* also in the text of the other ranks */
    void (*step)(net &n);
} throws[] = {
    {"forward", "the forward of unit 'h.1'",
     [](net &n) {
         n.h[0].forward([](auto &) {});
         auto f = n.h[1].forward();
         throw std::runtime_error("bad data");
     }},
    {"backward", "the backward of unit 'h.2'",
     [](net &n) {
         n.forward();
         auto b = n.h[2].backward();
         for (float &g : b.grad<float>(0)) g = 1e30f; /* the rest is not written */
         throw 1;
     }},
    {"forward_body", "the forward of unit 'h.0': bad data",
     [](net &n) { n.h[0].forward([](auto &) { throw std::runtime_error("bad data"); }); }},
    {"backward_body", "the backward of unit 'h.2': bad gradients",
     [](net &n) {
         n.forward();
         n.h[2].backward([](auto &b) -> int {
             b.template grad<float>(1)[0] = 1e30f;
             throw std::runtime_error("bad gradients");
         });
     }},
    {"inner", "the forward of unit 'h.1'",
     [](net &n) {
         auto outer = n.h[0].forward();
         auto inner = n.h[1].forward();
         throw std::bad_alloc();
     }},
    {"recompute", "the forward of unit 'h.2'",
     [](net &n) {
         n.forward();
         auto b = n.h[2].backward();
         for (float &g : b.grad<float>(0)) g = 1e30f;
         auto again = n.h[2].forward();
         throw 1;
     }},
    {"dtype", "the forward of unit 'h.0': rank 1: [E230]",
     [](net &n) {
         auto f = n.h[0].forward();
         (void)f.data<fsdp::bf16>(0);
     }},
    {"refused_call", "the backward of unit 'h.2': ",
     [](net &n) {
         n.forward();
         auto b = n.h[2].backward();
         n.model.zero_grad(); /* a unit is not idle */
     }},
    {"moved", "the forward of unit 'h.0'",
     [](net &n) {
         std::vector<fsdp::forward_scope> open;
         open.reserve(1);
         open.push_back(n.h[0].forward());
         throw 1;
     }},
};
static void leaves(lab_rank *r) {
    const thrown *how = (const thrown *)r->arg;
    fsdp::world world(r->w);
    net n(world);
    fsdp::adamw adamw(n.model);
    const std::vector<float> before = n.shards();
    std::string text;
    bool left = false;
    try {
        if (r->rank == 1) how->step(n);
        n.forward(), n.backward(1);
        n.model.finalize_backward();
        adamw.step(0.1);
        world.barrier();
    } catch (const fsdp::error &e) {
        left = true;
        if (r->rank != 1) CHECK_EQ_INT(e.status, FSDP_ERR_ABORTED);
        text = e.what();
    } catch (...) {
        left = true;
    }
    CHECK(left);
    CHECK_EQ_INT(fsdp_world_status(r->w), FSDP_ERR_ABORTED);
    text = r->rank == 1 ? fsdp_last_error(r->w) : text;
    check_says(text, "rank 1: ");
    check_says(text, std::string("an exception left ") + how->says);
    const std::vector<float> after = [&] { /* views ask for no collective */
        std::vector<float> all;
        fsdp_param_view v = FSDP_ZERO;
        for (const fsdp::unit &u : n.h)
            for (int i = 0; i < 2; i++) {
                (void)fsdp_param_view_get(u.get(), i, &v);
                all.insert(all.end(), (float *)v.shard, (float *)v.shard + v.numel);
            }
        return all;
    }();
    CHECK(after == before);
}
TEST_P(hpp, exception_leaves, throws, GLOO) {
    lab_how processes = {}, threads = {};
    processes.processes = 1, threads.lanes = 1;
    lab_run(3, nullptr, leaves, (void *)(uintptr_t)row);
    lab_run(3, &processes, leaves, (void *)(uintptr_t)row);
    lab_run(3, &threads, leaves, (void *)(uintptr_t)row);
}

/* ---- loops and lambdas ------------------------------------------------------------------------- */

static void loops(lab_rank *r) {
    fsdp::world world(r->w);
    net n(world);
    fsdp_param_view v = FSDP_ZERO;
    for (auto &p : n.model.params()) {
        CHECK(fsdp_next_param(n.model.get(), &v));
        CHECK(p.unit == v.unit && p.index == v.index && p.ordinal == v.ordinal);
        CHECK(p.shard_as<float>() == v.shard && p.shard_as<float>().size() == v.numel);
        CHECK(!p.grad_as<float>().data());
        for (int64_t k = 0; k < p.numel; k++) CHECK(p.shard_as<float>()[k] == value_at(p, k));
        check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { (void)p.shard_as<double>(); }), "f32");
    }
    CHECK(!fsdp_next_param(n.model.get(), &v));
    refusal(FSDP_ERR_INVALID_ARG, [&] { n.model.finalize_backward(); }); /* shard_as<double> */

    /* load by unit, and by a lambda, which may leave parameters out */
    std::vector<float> w(N * N);
    std::iota(w.begin(), w.end(), 1.0f);
    n.h[1].load(0, w);
    CHECK(n.h[1].full<float>(0) == w);
    const float b[N] = {9, 8, 7, 6, 5, 4, 3, 2};
    n.model.load([&](const fsdp::param_view &p) {
        return p.index ? std::vector<float>(b, b + N) : std::vector<float>();
    });
    CHECK(n.h[0].full<float>(1) == std::vector<float>(b, b + N) && n.h[1].full<float>(0) == w);
    n.h[2].load(1, b);
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { n.h[0].load(1, w); }), "[E554]");
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { n.h[0].load(1, std::vector<double>(N)); }),
               "f64");
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { (void)n.h[0].full<double>(0); }), "[E554]");
    refusal(FSDP_ERR_INVALID_ARG, [&] { n.h[0].load(2, w); });
    n.forward(), n.backward((float)r->rank);
    n.model.finalize_backward();
    const float mean = 0.5f * (float)(r->size - 1);
    CHECK(n.h[0].full_grad<float>(1) == std::vector<float>(N, mean));

    /* what a lambda throws comes out of the call */
    int calls = 0;
    const auto init = [&](const fsdp::param_view &) {
        calls++;
        throw std::out_of_range("of the lambda");
    };
    try {
        n.model.init(init);
        CHECK_MSG(false, "no exception of init");
    } catch (const std::out_of_range &e) {
        CHECK_EQ_STR(e.what(), "of the lambda");
    }
    CHECK_EQ_INT(calls, 1); /* not called again after it */
}
TEST(hpp, loops_init_and_load, GLOO) { lab_run(2, nullptr, loops, nullptr); }

/* Units are loaded while the model is built, and a lambda knows when they are readable. */
static void layer_by_layer(lab_rank *r) {
    fsdp::world world(r->w);
    fsdp::model model(world);
    std::string seen;
    std::vector<fsdp::unit> layers;
    for (std::size_t k = 0; k < 3; k++) {
        const std::vector<float> w(N * N, (float)k);
        layers.push_back(model.shard("h." + std::to_string(k), {fsdp::mat("w", N, N)}));
        layers[k].load(0, w); /* no commit: the next unit can be added */
        layers[k].set_unit_callback([&seen, k](bool readable) {
            seen += readable ? "+" : "-";
            seen += std::to_string(k);
        });
    }
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { layers[0].load(0, std::vector<double>(N * N)); }),
               "[E554]");
    for (std::size_t k = 0; k < 3; k++) {
        const auto f = layers[k].forward();
        CHECK(f.data<float>(0)[N] == (float)k);
    }
    CHECK_EQ_STR(seen.c_str(), "+0-0+1-1+2-2");
    layers[1].set_unit_callback(nullptr);
    (void)layers[1].forward();
    CHECK_EQ_STR(seen.c_str(), "+0-0+1-1+2-2");
    /* the end of the world closes a unit that is readable: its callback may use it */
    const fsdp::unit last = layers[2];
    bool named = false;
    layers[2].set_reshard_after_forward(FSDP_RESHARD_NEVER);
    layers[2].set_unit_callback([last, &named](bool) { named = last.name() == "h.2"; });
    (void)layers[2].forward();
    named = false;
    fsdp::checkpoint checkpoint(model);
    const std::string out = std::string(h_tmpdir()) + "/out";
    layers[2].reshard();
    checkpoint.export_model(out);
    world.barrier();
    struct stat st;
    CHECK(!stat((out + "/model.safetensors").c_str(), &st));
    CHECK(named);
}
/* The end of a world ends a unit that is readable: the lambda may still ask the unit. */
TEST(hpp, callback_at_the_end_of_a_world) {
    fsdp::world world;
    fsdp::model model(world);
    fsdp::unit unit = model.shard("h", {fsdp::mat("w", N, N)});
    std::string seen;
    unit.set_reshard_after_forward(FSDP_RESHARD_NEVER);
    unit.set_unit_callback([unit, &seen](bool readable) { seen += unit.name() + "+-"[!readable]; });
    (void)unit.forward();
    CHECK_EQ_INT(world.close(), FSDP_OK);
    CHECK_EQ_STR(seen.c_str(), "h+h-");
    CHECK(!unit.get());
}
TEST(hpp, layer_by_layer, GLOO) { lab_run(2, nullptr, layer_by_layer, nullptr); }

/* The objects own their lambdas: as long as C may call them, and no longer. */
static void lambdas(lab_rank *r) {
    auto token = std::make_shared<int>(0);
    const auto uses = [&] { return token.use_count() - 1; };
    fsdp::world world(r->w);
    {
        net n(world);
        int reductions = 0;
        for (int k = 0; k < 3; k++) /* a new one takes the place of the last one */
            n.h[0].set_all_reduce_hook([token, &reductions](void *, int64_t, fsdp_dtype dtype,
                                                            void *) {
                CHECK_EQ_INT(dtype, FSDP_F32);
                reductions++;
            });
        CHECK_EQ_INT(uses(), 1);
        float seen = 0;
        n.h[0].set_post_accumulate_hook(1, [token, &seen](const fsdp::param_view &v, void *) {
            seen = v.numel ? v.grad_as<float>()[0] : 4;
        });
        n.h[2].set_custom_reduce_scatter(
            [token](const fsdp_comm_ops *ops, fsdp_comm *comm, const fsdp_coll *coll) {
                return ops->run(comm, coll);
            });
        const fsdp::unit in_a_circle = n.h[0];
        n.h[0].set_custom_all_gather(
            [token, in_a_circle](const fsdp_comm_ops *ops, fsdp_comm *comm, const fsdp_coll *coll) {
                return ops->run(comm, coll);
            });
        CHECK_EQ_INT(uses(), 4);
        n.forward(), n.backward(4);
        n.model.finalize_backward();
        CHECK(reductions == 1 && seen == 4);
        n.h[0].set_all_reduce_hook(nullptr);
        n.h[2].set_custom_reduce_scatter(nullptr);
        CHECK_EQ_INT(uses(), 2);
        fsdp::ema ema(n.model, fsdp::ema_desc(), [token](int64_t step) {
            if (step == 2) throw std::runtime_error("no decay");
            return 0.5;
        });
        ema.update();
        try {
            ema.update();
            CHECK_MSG(false, "no exception of decay_at");
        } catch (const std::runtime_error &e) {
            CHECK_EQ_STR(e.what(), "no decay");
        }
        int asked = 0;
        fsdp::sgd_desc desc;
        desc.num_groups = 2;
        fsdp::sgd sgd(n.model, desc, [token, &asked](const fsdp::param_view &p) {
            asked++;
            return p.ndim == 2 ? 0 : -1;
        });
        CHECK_EQ_INT(asked, 2 * L);
        CHECK(sgd.state(0).group == 0 && sgd.state(1).group < 0);
        CHECK_EQ_INT(uses(), 4);
        fsdp::sgd moved(std::move(sgd));
        moved.step(0.1);
        CHECK_EQ_INT(uses(), 4);
        try {
            fsdp::adamw adamw(n.model, fsdp::adamw_desc(), [token](const fsdp::param_view &) -> int {
                throw std::runtime_error("no group");
            });
            CHECK_MSG(false, "no exception of group");
        } catch (const std::runtime_error &e) {
            CHECK_EQ_STR(e.what(), "no group");
        }
        try {
            fsdp::muon muon(n.model, fsdp::muon_desc(), [token](const fsdp::param_view &) -> int {
                throw std::runtime_error("no take");
            });
            CHECK_MSG(false, "no exception of take");
        } catch (const std::runtime_error &e) {
            CHECK_EQ_STR(e.what(), "no take");
        }
        CHECK_EQ_INT(uses(), 4);
    }
    CHECK_EQ_INT(uses(), 0); /* also that which holds its own unit */
}
TEST(hpp, lambdas_live_as_long_as_needed) {
    lab_run(2, nullptr, lambdas, nullptr); /* with one rank nothing is reduced */
}

/* A hook that throws on one rank aborts the world with its text; also in a comm thread. */
static void hooks_throw(lab_rank *r) {
    fsdp::world world(r->w);
    net n(world);
    if (r->rank == 1)
        n.h[1].set_all_reduce_hook([](void *, int64_t, fsdp_dtype, void *) {
            throw std::runtime_error("the hook's reason");
        });
    try {
        n.forward(), n.backward(1);
        n.model.finalize_backward();
        world.barrier();
        CHECK_MSG(false, "no failure");
    } catch (const fsdp::error &e) {
        CHECK_EQ_INT(e.status, FSDP_ERR_ABORTED);
        check_says(e.what(), "the hook's reason");
    }
}
TEST(hpp, hook_throws, GLOO) {
    lab_how threads = {};
    threads.lanes = 1;
    lab_run(3, nullptr, hooks_throw, nullptr);
    lab_run(3, &threads, hooks_throw, nullptr);
}

TEST(hpp, log_goes_to_a_lambda) {
    auto token = std::make_shared<std::string>();
    w_heap heap;
    fsdp_world_desc desc = desc_of_one(&heap);
    {
        fsdp::world world(desc, [token](int level, fsdp_status, int rank, const char *text) {
            CHECK(level == FSDP_LOG_ERROR && rank == 0);
            *token = text;
            throw 1; /* is lost, as the library cannot handle it */
        });
        fsdp::world moved(std::move(world));
        refusal(FSDP_ERR_INVALID_ARG, [&] { (void)moved.all_reduce(1, 77); });
        CHECK_EQ_STR(token->c_str(), fsdp_last_error(moved.get()));
        CHECK_EQ_INT(token.use_count(), 2);
    }
    CHECK_EQ_INT(token.use_count(), 1);
    check_empty(heap);
}

/* ---- bf16, f16 --------------------------------------------------------------------------------- */

template <class T> static void check_half(fsdp_dtype dtype) {
    static_assert(sizeof(T) == 2 && std::is_trivially_copyable_v<T>, "16 bits");
    static_assert(!std::is_convertible_v<float, T> && !std::is_convertible_v<T, float>, "explicit");
    static_assert(std::is_constructible_v<T, float> && std::is_constructible_v<float, T>, "both");
    CHECK_EQ_INT(fsdp::dtype_of<T>, dtype);
    uint64_t seed = h_seed();
    for (uint32_t bits = 0; bits < 0x10000; bits++) {
        const uint16_t u = (uint16_t)bits;
        T x;
        memcpy((void *)&x, &u, 2);
        float expected, got = float(x);
        CHECK_OK(fsdp_convert(&expected, FSDP_F32, &u, dtype, 1));
        CHECK_EQ_MEM(&got, &expected, 4);
        const T back(got);
        uint16_t again;
        CHECK_OK(fsdp_convert(&again, dtype, &got, FSDP_F32, 1));
        CHECK_EQ_MEM(&back, &again, 2);
        const float any = lab_from_bits32((uint32_t)h_rand64(&seed));
        const T rounded(any);
        CHECK_OK(fsdp_convert(&again, dtype, &any, FSDP_F32, 1));
        CHECK_EQ_MEM(&rounded, &again, 2);
    }
    const float from[3] = {1.5f, -2, 3};
    T to[3];
    double last[3];
    fsdp::convert(to, from, 3), fsdp::convert(last, to, 3);
    CHECK(last[0] == 1.5 && last[1] == -2 && last[2] == 3);
    refusal(FSDP_ERR_INVALID_ARG, [&] { fsdp::convert(to, (const float *)nullptr, 3); });
}
TEST(hpp, types_of_16_bits) {
    check_half<fsdp::bf16>(FSDP_BF16);
    check_half<fsdp::f16>(FSDP_F16);
}

/* ---- allocations ------------------------------------------------------------------------------- */

/* From the third step on, neither C++ nor the library allocates. */
static void steady(lab_rank *r) {
    fsdp::world world(r->w);
    net n(world);
    fsdp::muon muon(n.model);
    fsdp::adamw adamw(n.model, fsdp::adamw_desc(),
                      [&](const fsdp::param_view &p) { return muon.takes(p) ? -1 : 0; });
    fsdp::ema ema(n.model, fsdp::ema_desc(), [](int64_t) { return 0.9; });
    n.h[0].set_all_reduce_hook([](void *, int64_t, fsdp_dtype, void *) {});
    std::optional<fsdp::plan> plan;
    if (r->arg) plan.emplace(n.model);
    long before = 0;
    int64_t heap = 0;
    for (int step = 0; step < 8; step++) {
        world.barrier(); /* operator new counts the calls of both ranks */
        if (step == 4) before = news, heap = w_allocations(r->heap);
        world.barrier();
        for (int micro = 0; micro < 2; micro++) {
            n.model.set_requires_gradient_sync(micro == 1);
            n.h[1].forward([](auto &f) { (void)f.template data<float>(0); });
            n.forward(), n.backward(1);
            n.model.finalize_backward();
        }
        (void)n.model.clip_grad_norm(1);
        muon.step(0.1), adamw.step(0.1), ema.update();
        for (auto &p : n.model.params()) CHECK(p.numel == p.shard_as<float>().size());
        n.model.zero_grad();
        (void)world.all_reduce(1.0);
    }
    world.barrier();
    CHECK_EQ_INT(news - before, 0);
    CHECK_EQ_INT(w_allocations(r->heap) - heap, 0);
    world.barrier();
}
TEST(hpp, steady_step_allocates_nothing) {
    static int planned;
    lab_run(2, nullptr, steady, nullptr);
    lab_run(2, nullptr, steady, &planned);
}

/* Each allocation of C++, and of the library, fails in turn: an exception, and nothing is left. */
static bool set_up(w_heap *heap) {
    try {
        fsdp_world_desc desc = w_desc(0, 1, nullptr, w_job("hpp"), 0);
        desc.allocator = w_heap_allocator(heap);
        fsdp::world world(desc, [](int, fsdp_status, int, const char *) {});
        net n(world);
        n.h[0].set_all_reduce_hook([](void *, int64_t, fsdp_dtype, void *) {});
        n.h[1].set_post_accumulate_hook(0, [](const fsdp::param_view &, void *) {});
        fsdp::adamw adamw(n.model, fsdp::adamw_desc(), [](const fsdp::param_view &) { return 0; });
        fsdp::ema ema(n.model);
        int64_t place = 0;
        fsdp::checkpoint ck(n.model, {fsdp::blob("place", place)});
        n.forward(), n.backward(1);
        n.model.finalize_backward();
        adamw.step(0.1);
        return n.h[0].full<float>(0).size() == N * N && world.close() == FSDP_OK;
    } catch (const std::bad_alloc &) {
    } catch (const fsdp::error &e) {
        CHECK_MSG(e.status == FSDP_ERR_OUT_OF_MEMORY, "%s", e.what());
    }
    return false;
}
TEST(hpp, every_allocation_may_fail, SLOW) {
    int count[2] = {0, 0};
    for (int of_library = 0; of_library < 2; of_library++)
        for (bool done = false; !done; count[of_library]++) {
            w_heap heap;
            memset(&heap, 0, sizeof heap);
            heap.fail_at = -1;
            if (of_library) w_fail(&heap, count[1]);
            else new_fails = news + count[0];
            done = set_up(&heap);
            new_fails = -1;
            check_empty(heap);
        }
    h_message("note: %d allocations of C++, %d of the library", count[0], count[1]);
    CHECK(count[0] >= 20 && count[1] >= 20);
}

/* ---- other owners ------------------------------------------------------------------------------ */

static void checkpoints(lab_rank *r) {
    const std::string dir = h_tmpdir();
    fsdp::world world(r->w);
    int64_t place = 17;
    {
        net n(world);
        fsdp::checkpoint ck(n.model, {fsdp::blob("place", place)}, fsdp::checkpoint_desc(),
                            [](const fsdp::param_view &p, fsdp_checkpoint_place &to) {
                                if (p.ordinal == 1) to.name[0] = 0; /* is left out */
                            });
        CHECK(!ck.find(dir));
        ck.save(dir, 3), ck.save_async(dir, 5);
        while (ck.poll()) {}
        ck.wait();
        CHECK_EQ_INT(ck.last_report().step, 5);
    }
    net n(world);
    const std::vector<float> zeros(N * N), half(N, 0.5f);
    for (const fsdp::unit &u : n.h) u.load(0, zeros), u.load(1, half);
    place = 0;
    fsdp::checkpoint ck(n.model, {fsdp::blob("place", place)});
    const auto found = ck.find(dir, 4);
    CHECK(found && found->step == 3);
    check_says(refusal(FSDP_ERR_INVALID_ARG, [&] { ck.load(found->path); }), "h.0.b");
    fsdp::checkpoint_load_desc partial;
    partial.partial = 1;
    ck.load(ck.find(dir)->path, partial);
    CHECK_EQ_INT(place, 17);
    for (auto &p : n.model.params())
        for (int64_t k = 0; k < p.numel; k++)
            CHECK(p.shard_as<float>()[k] == (p.ordinal == 1 ? 0.5f : value_at(p, k)));
    ck.load(found->path, fsdp::checkpoint_load_desc(),
            [](const fsdp::param_view &p, fsdp_checkpoint_source *from) {
                if (p.ordinal != 1) return 0;
                snprintf(from->name, sizeof from->name, "h.2.b"); /* of another layer */
                return 1;
            });
    CHECK(n.h[0].full<float>(1) == n.h[2].full<float>(1));
    try {
        ck.load(found->path, fsdp::checkpoint_load_desc(),
                [](const fsdp::param_view &, fsdp_checkpoint_source *) -> int {
                    throw std::runtime_error("no source");
                });
        CHECK_MSG(false, "no exception of source");
    } catch (const std::runtime_error &e) {
        CHECK_EQ_STR(e.what(), "no source");
    }
}
TEST(hpp, checkpoints_with_lambdas, GLOO) {
    lab_how how = {};
    how.processes = 1;
    lab_run(2, &how, checkpoints, nullptr);
}

TEST(hpp, spawn_passes_exceptions_on) {
    fsdp_world_desc quiet = FSDP_ZERO;
    quiet.logger.log = w_quiet;
    for (int threads = 0; threads < 2; threads++) {
        fsdp::spawn_desc desc;
        desc.num_ranks = 3, desc.threads = threads, desc.world = &quiet;
        int *sum = (int *)lab_shared(sizeof *sum);
        const auto adds = [sum](fsdp::world &w) {
            __atomic_add_fetch(sum, 1 + w.rank(), __ATOMIC_SEQ_CST);
        };
        fsdp::spawn(desc, adds);
        CHECK_EQ_INT(*sum, 6);
        const auto throws_on_1 = [](fsdp::world &w) {
            if (w.rank() == 1) throw std::runtime_error("no data on this rank");
            w.barrier();
        };
        std::string text = refusal(FSDP_ERR_ABORTED, [&] { fsdp::spawn(desc, throws_on_1); });
        check_says(text, "rank 1: "), check_says(text, "no data on this rank");
        text = refusal(FSDP_ERR_INVALID_ARG, [&] {
            fsdp::spawn(desc, [](fsdp::world &w) {
                if (w.rank() == 2) w.all_reduce(1, 77);
                w.barrier();
            });
        });
        check_says(text, "rank 2: ");
    }
}

TEST(hpp, grad_scaler_as_in_c) {
    w_heap heap;
    fsdp::world world(desc_of_one(&heap));
    net n(world);
    fsdp::grad_scaler_desc desc;
    desc.init_scale = 4;
    fsdp::grad_scaler scaler(n.model, desc);
    CHECK(scaler.scale() == 4);
    n.forward(), n.backward(8);
    n.model.finalize_backward();
    scaler.unscale();
    CHECK(!scaler.found_inf() && n.h[0].full_grad<float>(1)[0] == 2);
    scaler.update();
    n.model.zero_grad(), n.forward(), n.backward((float)LAB_INF);
    n.model.finalize_backward();
    scaler.unscale();
    CHECK(scaler.found_inf());
    scaler.update();
    CHECK(scaler.scale() == 2);
}

/* An exception in the middle of a step, outside of scopes or inside one, also of a plan: its owners
   end while it passes, and the other ranks get an error that names the rank. */
enum { IN_FORWARD, IN_BACKWARD, IN_SCOPE };
static const struct {
    const char *name;
    int planned, where, threads;
    const char *says;
} steps[] = {{"forward", 0, IN_FORWARD, 1, "between"},
             {"backward", 0, IN_BACKWARD, 1, "between"},
             {"backward_of_processes", 0, IN_BACKWARD, 0, "between"},
             {"planned_forward", 1, IN_FORWARD, 1, "between"},
             {"planned_backward", 1, IN_BACKWARD, 1, "an exception left a planned backward"},
             {"planned_backward_of_processes", 1, IN_BACKWARD, 0, "left a planned backward"},
             {"planned_scope", 1, IN_SCOPE, 1, "left the backward of unit 'h.1'"}};
TEST_P(hpp, exception_in_a_step, steps) {
    fsdp_world_desc quiet = FSDP_ZERO;
    quiet.logger.log = w_quiet;
    fsdp::spawn_desc desc;
    desc.num_ranks = 3, desc.threads = row->threads, desc.world = &quiet;
    int *failed = (int *)lab_shared(sizeof *failed);
    const std::string text = refusal(FSDP_ERR_ABORTED, [&] {
        fsdp::spawn(desc, [&](fsdp::world &world) {
            try {
                net n(world);
                fsdp::adamw adamw(n.model);
                std::optional<fsdp::plan> plan;
                if (row->planned) plan.emplace(n.model);
                for (int step = 0; step < 6; step++) {
                    const auto stop = [&](int where) {
                        if (step == 4 && world.rank() == 1 && row->where == where)
                            throw std::runtime_error("between");
                    };
                    for (const fsdp::unit &u : n.h) u.forward([](auto &) {}), stop(IN_FORWARD);
                    for (std::size_t l = L; l-- > 0;) {
                        auto b = n.h[l].backward();
                        for (float &g : b.grad<float>(0)) g = 1;
                        if (l == 1) stop(IN_SCOPE);
                        b.close();
                        if (l == 1) stop(IN_BACKWARD);
                    }
                    n.model.finalize_backward();
                    CHECK(!plan || step < 2 || plan->state() == FSDP_PLAN_REPLAYING);
                    adamw.step(0.1), n.model.zero_grad();
                }
            } catch (const std::exception &e) {
                if (world.rank() != 1) check_says(e.what(), "rank 1");
                __atomic_add_fetch(failed, 1, __ATOMIC_SEQ_CST);
                throw;
            }
        });
    });
    check_says(text, row->says);
    CHECK_EQ_INT(*failed, 3);
}
