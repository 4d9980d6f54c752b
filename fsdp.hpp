/* fsdp.hpp - fsdp.h for C++17: failures are exceptions, objects own what they make, and scopes
   stand for the pairs pre_* and post_*

   It adds no function to the library: it calls those of fsdp.h, fsdp_optim.h, fsdp_muon.h,
   fsdp_checkpoint.h and fsdp_plan.h, whose comments hold. It has no virtual function, and a step
   allocates nothing here either. The implementation is in the file that defines
   FSDP_IMPLEMENTATION, as in C, or in libfsdp.

       #define FSDP_IMPLEMENTATION          // in one .cc or .c file of the program
       #include "fsdp.hpp"
       c++ -std=c++17 -O2 trainer.cc -pthread -lm && tools/fsdprun -n 4 ./a.out

   SPDX-License-Identifier: MIT (full text in fsdp.h)

A PROGRAM

    #define FSDP_IMPLEMENTATION
    #include "fsdp.hpp"
    #include <cstdio>

    int main() try {
        constexpr int N = 64;
        fsdp::world world; // rank and size from the launcher's environment, or a world of one
        fsdp::model model(world);
        fsdp::unit unit = model.shard("linear", {fsdp::mat("w", N, N), fsdp::vec("b", N)});
        model.init([](const fsdp::param_view &rows) { // only my own rows
            auto w = rows.data_as<float>();
            for (int64_t k = 0; k < rows.numel; k++)
                w[k] = 0.01f * float(fsdp_view_index(&rows, k) % 7 - 3);
        });
        fsdp::adamw adamw(model);
        for (int step = 0; step < 20; step++) {
            float x[N], dy[N], loss = 0;
            for (int i = 0; i < N; i++) x[i] = float((i + world.rank()) % 5) / 5;
            {
                auto f = unit.forward(); // gathers; the end of the block frees
                auto w = f.data<float>(0), b = f.data<float>(1);
                for (int o = 0; o < N; o++) { // y = w x + b shall become x
                    float y = b[o];
                    for (int i = 0; i < N; i++) y += w[o * N + i] * x[i];
                    dy[o] = y - x[o];
                    loss += dy[o] * dy[o] / 2;
                }
            }
            {
                auto b = unit.backward(); // gathers again; the end of the block averages
                auto dw = b.grad<float>(0), db = b.grad<float>(1);
                for (int o = 0; o < N; o++) {
                    db[o] += dy[o];
                    for (int i = 0; i < N; i++) dw[o * N + i] += dy[o] * x[i];
                }
            }
            model.finalize_backward(); // throws if a scope above failed
            adamw.step(0.03);
            model.zero_grad();
            loss = world.all_reduce(loss);
            if (world.rank() == 0) std::printf("step %d loss %g\n", step, double(loss));
        }
        return world.close();
    } catch (const std::exception &e) {
        std::fprintf(stderr, "%s\n", e.what());
        return 1;
    }

RULES
    Failures    A function that calls one of C which returns a status throws fsdp::error if that is
                not FSDP_OK. No destructor throws. Comments name other exceptions.
    Collective  as the function of C with the same name. A constructor is as fsdp_..._create, the
                destructors of model, muon and plan are as fsdp_..._destroy.
    Owners      world, model, adamw, sgd, muon, ema, grad_scaler, checkpoint and plan own what they
                make: they can be moved, and not copied. A unit is a value that you may copy; its
                model owns what it stands for. The order in which they end does not matter: if a
                world or a model ends first, what was made from it holds nothing from then on. A
                call on an object that holds nothing, as after a move, throws INVALID_ARG.
    Scopes      unit.forward() and unit.backward() call pre_*. The end of the scope calls post_*,
                and so does close(), which throws if that fails. A failure in a destructor is not
                lost: the next scope of the model throws it, or model.finalize_backward(), once.
    Exceptions  If an exception leaves a scope, gradients may be half written. So the scope aborts
                the world, as fsdp_abort does: the other ranks get ABORTED, with this rank and the
                unit in the text, and no shard changes. The text of an fsdp::error follows. C++
                hides the text of other exceptions from destructors: unit.forward(body) and
                unit.backward(body), which call body(scope), pass it on.
    Lambdas     An object keeps the function that you give it as long as the library may call it.
                What the function refers to has to live as long. If it throws, the call of yours
                that led to it throws the same exception; a hook aborts the world with its text.
    Descs       A desc begins with the defaults: fsdp::model_desc d; d.param_dtype = FSDP_BF16; In
                C++20 you may write fsdp::model model(world, {.param_dtype = FSDP_BF16}).
    Threads     One thread at a time uses a world and what is made from it, also copies of units.
    Other calls get() gives the handle for every function of C: world.check(status) throws.
*/
// The library in C has casts as C has them.
#if defined(__GNUC__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wold-style-cast"
#endif
#include "fsdp.h"
#include "fsdp_checkpoint.h"
#include "fsdp_muon.h"
#include "fsdp_optim.h"
#include "fsdp_plan.h"
#if defined(__GNUC__)
#pragma GCC diagnostic pop
#endif

#ifndef FSDP_HPP
#define FSDP_HPP
#if __cplusplus < 201703L
#error "fsdp.hpp needs C++17: compile with -std=c++17, or include fsdp.h"
#else

#include <climits>          // INT_MAX
#include <cstdarg>          // va_list
#include <cstdio>           // snprintf, vsnprintf
#include <exception>        // exception_ptr, uncaught_exceptions
#include <forward_list>     // forward_list
#include <initializer_list> // initializer_list
#include <iterator>         // data, size
#include <memory>           // unique_ptr
#include <optional>         // optional
#include <stdexcept>        // runtime_error
#include <string>           // string
#include <type_traits>      // decay_t
#include <utility>          // exchange, forward, move
#include <vector>           // vector

namespace fsdp {

// A failure of the library: what() is the text of fsdp_last_error.
class error : public std::runtime_error {
  public:
    error(fsdp_status code, const std::string &text) : std::runtime_error(text), status(code) {}
    fsdp_status status;
};

// Elements in memory that something else owns. It converts to a pointer, so that s[i] is element i,
// and functions of C take it.
template <class T> class span {
    T *data_ = nullptr;
    int64_t size_ = 0;

  public:
    using value_type = std::remove_cv_t<T>;
    span() = default;
    span(T *data, int64_t size) : data_(data), size_(size) {}
    operator T *() const { return data_; }
    T *data() const { return data_; }
    int64_t size() const { return size_; }
    T *begin() const { return data_; }
    T *end() const { return data_ + size_; }
};

/* bf16, f16 - 16 bits. Conversions are explicit, and those of fsdp_convert; convert() converts
   arrays */
template <int Dtype> class half {
    uint16_t bits_;

  public:
    half() = default;
    explicit half(float x) { (void)fsdp_convert(&bits_, Dtype, &x, FSDP_F32, 1); }
    explicit operator float() const {
        float x = 0;
        (void)fsdp_convert(&x, FSDP_F32, &bits_, Dtype, 1);
        return x;
    }
};
using bf16 = half<FSDP_BF16>;
using f16 = half<FSDP_F16>;

} // namespace fsdp
template <int Dtype> struct fsdp_dtype_of<fsdp::half<Dtype>> : fsdp_dtype_is<Dtype> {};
namespace fsdp {

template <class T> inline constexpr fsdp_dtype dtype_of = fsdp_dtype_of<std::remove_cv_t<T>>::value;

// convert - converts `count` elements, as fsdp_convert
template <class To, class From> void convert(To *to, const From *from, int64_t count) {
    const fsdp_status status = fsdp_convert(to, dtype_of<To>, from, dtype_of<From>, count);
    if (status) throw error(status, "fsdp::convert: dtypes, or a NULL pointer");
}

// Descs that begin with the defaults.
template <class Desc> struct zeroed : Desc {
    zeroed() : Desc() {}
};
template <class Desc, Desc (*Defaults)()> struct with_defaults : Desc {
    with_defaults() : Desc(Defaults()) {}
};
using world_desc = zeroed<fsdp_world_desc>;
using model_desc = zeroed<fsdp_model_desc>;
using unit_desc = zeroed<fsdp_unit_desc>;
using spawn_desc = zeroed<fsdp_spawn_desc>;
using clip_desc = zeroed<fsdp_clip_desc>;
using plan_desc = zeroed<fsdp_plan_desc>;
using grad_scaler_desc = zeroed<fsdp_grad_scaler_desc>;
using checkpoint_desc = zeroed<fsdp_checkpoint_desc>;
using checkpoint_load_desc = zeroed<fsdp_checkpoint_load_desc>;
using checkpoint_export_desc = zeroed<fsdp_checkpoint_export_desc>;
using adamw_desc = with_defaults<fsdp_adamw_desc, fsdp_adamw_defaults>;
using sgd_desc = with_defaults<fsdp_sgd_desc, fsdp_sgd_defaults>;
using muon_desc = with_defaults<fsdp_muon_desc, fsdp_muon_defaults>;
using ema_desc = with_defaults<fsdp_ema_desc, fsdp_ema_defaults>;

/* ---- what the classes below share ------------------------------------------------------------ */

namespace detail {

// A function of the caller that C calls by its address, and the exception that it threw.
struct function {
    std::exception_ptr thrown;
    fsdp_world *world = nullptr;
    void rethrow() {
        if (thrown) std::rethrow_exception(std::exchange(thrown, nullptr));
    }
};
template <class F> struct function_of : function {
    F call;
    explicit function_of(F f) : call(std::forward<F>(f)) {} // F may be a reference
};
// The function whose address, that of its base, C has as `user`.
template <class F> function_of<F> *of(void *user) {
    return static_cast<function_of<F> *>(static_cast<function *>(user));
}
// Calls it with the arguments of C. If it throws, keeps the exception. Returns `failed` then, and
// if it returns nothing.
template <class F, class R, class... A> R guard(void *user, R failed, A &&...arguments) noexcept {
    try {
        if constexpr (std::is_void_v<std::invoke_result_t<F &, A...>>)
            return of<F>(user)->call(std::forward<A>(arguments)...), failed;
        else
            return of<F>(user)->call(std::forward<A>(arguments)...);
    } catch (...) {
        of<F>(user)->thrown = std::current_exception();
        return failed;
    }
}

// Owns such a function.
using kept = std::unique_ptr<function, void (*)(function *)>;
inline kept none() { return kept(nullptr, [](function *) {}); }
template <class F> kept keep(F f, fsdp_world *world) {
    kept made(new function_of<F>(std::move(f)),
              [](function *p) { delete static_cast<function_of<F> *>(p); });
    made->world = world;
    return made;
}

// What a handle and all that is made from it share. Not atomic: one thread at a time uses a world.
template <class T> class ref {
    T *at_ = nullptr;

  public:
    ref() = default;
    explicit ref(T *at) : at_(at) {}
    ref(const ref &o) noexcept : at_(o.at_) {
        if (at_) at_->count++;
    }
    ref(ref &&o) noexcept : at_(std::exchange(o.at_, nullptr)) {}
    ref &operator=(ref o) noexcept { return std::swap(at_, o.at_), *this; }
    ~ref() {
        if (at_ && --at_->count == 0) delete at_;
    }
    T *operator->() const { return at_; }
    explicit operator bool() const { return at_ != nullptr; }
};

struct world_state {
    int count = 1;
    int failures = 0;             // exceptions that check has thrown
    fsdp_world *handle = nullptr; // NULL: it has ended
    kept log = none();
};
struct unit_state {
    fsdp_unit *handle;
    std::vector<int64_t> numel; // of each parameter: elements of the whole
};
struct hook {
    const unit_state *unit;
    int kind, index;
    kept function = none();
    hook(const unit_state *u, int k, int i) : unit(u), kind(k), index(i) {}
};
struct model_state {
    int count = 1;
    ref<world_state> world;
    fsdp_model *handle = nullptr; // NULL: it has ended, or never began
    std::forward_list<unit_state> units;
    std::vector<hook> hooks;
    fsdp_status lost = FSDP_OK; // the first failure of a destructor that nothing has thrown
    char lost_text[512] = "";
    int64_t lost_failure = 0; // its fsdp_model_failure; 0: C keeps an earlier one
    int64_t thrown = 0; // fsdp_model_failure of the last one that C keeps and a scope has thrown
};

inline fsdp_world *handle(const ref<world_state> &world) {
    return world ? world->handle : nullptr;
}
inline fsdp_world *world_of(const ref<model_state> &model) {
    return model ? handle(model->world) : nullptr;
}
inline fsdp_model *handle(const ref<model_state> &model) {
    return world_of(model) ? model->handle : nullptr;
}

// Throws an error of this header, whose text has an id.
[[noreturn]] FSDP_PRINTF(2, 3) inline void throw_error(fsdp_status status, const char *format,
                                                       ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    (void)std::vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    throw error(status, text);
}
inline void check(fsdp_status status, const ref<world_state> &world, bool alive) {
    if (status == FSDP_OK) return;
    if (!alive)
        throw error(status, std::string(fsdp_last_error(nullptr)) + " (the fsdp:: object was moved "
                            "from or closed, or its model or world has ended)");
    world->failures++;
    throw error(status, fsdp_last_error(world->handle));
}
inline void check(fsdp_status status, const ref<world_state> &world) {
    check(status, world, handle(world) != nullptr);
}
inline void check(fsdp_status status, const ref<model_state> &model) {
    if (status != FSDP_OK)
        check(status, model ? model->world : ref<world_state>(), handle(model) != nullptr);
}

// Aborts the world, unless it has failed.
inline void abort(const ref<world_state> &world, const char *why) noexcept {
    if (fsdp_world_status(world->handle) == FSDP_OK) fsdp_abort(world->handle, why);
}
template <class Describe, class... A> std::string text_of(Describe describe, A... arguments) {
    std::string text(describe(arguments..., nullptr, 0), '\0');
    (void)describe(arguments..., text.data(), text.size() + 1);
    return text;
}

template <class Handle, void (*Destroy)(Handle *)> class made;

} // namespace detail

/* ---- views ----------------------------------------------------------------------------------- */

// A parameter, or a block of its rows, on this rank.
class param_view : public fsdp_param_view {
    fsdp_world *world_ = nullptr;

    template <class T> span<T> as(void *memory, fsdp_dtype has) const {
        if (memory && has != dtype_of<T>)
            throw error(FSDP_ERR_INVALID_ARG, fsdp_last_error(world_));
        return memory ? span<T>(static_cast<T *>(memory), numel) : span<T>();
    }

  public:
    explicit param_view(fsdp_world *world) : fsdp_param_view(), world_(world) {}
    param_view(const fsdp_param_view &view, fsdp_world *world)
        : fsdp_param_view(view), world_(world) {}

    /* data_as, shard_as, grad_as - as fsdp_view_data_as and its siblings: this rank's elements,
       without padding; empty if the field is NULL
       Throws      error: the field has another dtype */
    template <class T> span<T> data_as() const {
        return as<T>(fsdp_view_data_as(this, dtype_of<T>), dtype);
    }
    template <class T> span<T> shard_as() const {
        return as<T>(fsdp_view_shard_as(this, dtype_of<T>), dtype);
    }
    template <class T> span<T> grad_as() const {
        return as<T>(fsdp_view_grad_as(this, dtype_of<T>), grad_dtype);
    }
};

/* ---- world ----------------------------------------------------------------------------------- */

class world {
    detail::ref<detail::world_state> state_;
    bool owns_ = true;
    friend class model;

    void begin(const fsdp_world_desc &desc) {
        const fsdp_status status = fsdp_init(&desc, &state_->handle);
        if (status) throw error(status, fsdp_last_error(nullptr));
    }

  public:
    /* world - joins the job, as fsdp_init: collective
       log         log(level, status, rank, text) gets the library's lines, also from its threads
       handle      a world that its owner ends, as in a function of fsdp_spawn
       Throws      error, std::bad_alloc */
    explicit world(const fsdp_world_desc &desc = world_desc()) : state_(new detail::world_state) {
        begin(desc);
    }
    template <class Log>
    world(fsdp_world_desc desc, Log log) : state_(new detail::world_state) {
        state_->log = detail::keep(std::move(log), nullptr);
        desc.logger.user = state_->log.get();
        desc.logger.log = [](int level, fsdp_status code, int rank, const char *text, void *user) {
            try {
                detail::of<Log>(user)->call(level, code, rank, text);
            } catch (...) { // without this line of the log
            }
        };
        begin(desc);
    }
    explicit world(fsdp_world *handle) : state_(new detail::world_state), owns_(false) {
        state_->handle = handle;
    }
    world(world &&) noexcept = default;
    world &operator=(world &&o) noexcept {
        world old(std::move(*this));
        state_ = std::move(o.state_), owns_ = o.owns_;
        return *this;
    }
    ~world() { (void)close(); }

    /* close - ends the world, as fsdp_shutdown. What was made from it holds nothing from then on
       Result      that of fsdp_shutdown, for main; FSDP_OK if it has ended */
    fsdp_status close() noexcept {
        if (!state_ || !state_->handle) return FSDP_OK;
        // Callbacks that the end makes may still use what was made from it.
        const fsdp_status status = owns_ ? fsdp_shutdown(state_->handle) : FSDP_OK;
        state_->handle = nullptr;
        state_->log.reset();
        return status;
    }
    // abort - as fsdp_abort: collectives of all ranks end with ABORTED and this text
    void abort(const char *why) noexcept { fsdp_abort(get(), why); }

    fsdp_world *get() const { return detail::handle(state_); }
    void check(fsdp_status status) const { detail::check(status, state_); }
    int rank() const { return fsdp_rank(get()); }
    int size() const { return fsdp_world_size(get()); }
    int local_rank() const { return fsdp_local_rank(get()); }

    /* all_reduce, broadcast, barrier - as in C, of a number or of an array in host memory:
       collective. broadcast takes every type that memcpy copies
       Throws      error */
    template <class T, class = std::enable_if_t<!std::is_pointer_v<T>>>
    T all_reduce(T value, fsdp_redop op = FSDP_SUM) const {
        all_reduce(&value, 1, op);
        return value;
    }
    template <class T> void all_reduce(T *data, int64_t count, fsdp_redop op = FSDP_SUM) const {
        check(fsdp_all_reduce(get(), nullptr, data, count, dtype_of<T>, op));
    }
    template <class T> void broadcast(T *data, int64_t count, int root = 0) const {
        static_assert(std::is_trivially_copyable_v<T>, "only types that memcpy copies");
        check(fsdp_broadcast(get(), nullptr, data, count * int64_t{sizeof(T)}, root));
    }
    void barrier() const { check(fsdp_barrier(get())); }
};

/* ---- units and their scopes ------------------------------------------------------------------ */

class forward_scope;
class backward_scope;

inline fsdp_param_desc vec(const char *name, int64_t n) { return fsdp_vec(name, n); }
inline fsdp_param_desc mat(const char *name, int64_t rows, int64_t cols) {
    return fsdp_mat(name, rows, cols);
}

// The setters of one unit, or of all units of a model, as in C. They throw error.
template <class Self> class setters {
    template <class Value>
    void set(fsdp_status (*setter)(fsdp_model *, fsdp_unit *, Value), Value value) const {
        const Self &self = static_cast<const Self &>(*this);
        self.check(setter(self.whole(), self.part(), value));
    }

  public:
    void set_requires_gradient_sync(bool sync) const {
        set<int>(fsdp_set_requires_gradient_sync, sync);
    }
    void set_requires_all_reduce(bool required) const {
        set<int>(fsdp_set_requires_all_reduce, required);
    }
    void set_reshard_after_forward(int mode) const { set(fsdp_set_reshard_after_forward, mode); }
    void set_reshard_after_backward(bool reshard) const {
        set<int>(fsdp_set_reshard_after_backward, reshard);
    }
    void set_unshard_in_backward(bool unshard) const {
        set<int>(fsdp_set_unshard_in_backward, unshard);
    }
    void set_gradient_divide_factor(double factor) const {
        set(fsdp_set_gradient_divide_factor, factor);
    }
    void set_reduce_scatter_unused_params(bool reduce) const {
        set<int>(fsdp_set_reduce_scatter_unused_params, reduce);
    }
};

// A unit of a model, as a value; a default one holds nothing.
class unit : public setters<unit> {
    detail::ref<detail::model_state> model_;
    detail::unit_state *state_ = nullptr;
    friend class model;
    friend class scope;
    friend class setters<unit>;

    unit(const detail::ref<detail::model_state> &model, detail::unit_state *state)
        : model_(model), state_(state) {}
    void check(fsdp_status status) const { detail::check(status, model_); }

    fsdp_model *whole() const { return detail::handle(model_); }
    fsdp_unit *part() const { return get(); }
    static std::vector<fsdp_unit *> handles(const std::vector<unit> &units) {
        std::vector<fsdp_unit *> all;
        for (const unit &u : units) all.push_back(u.get());
        return all;
    }

    // Returns the number of elements of a full tensor. Throws if T is not its dtype, or *size is
    // not this number.
    template <class T>
    int64_t numel_of(const char *call, int index, bool grad, const int64_t *size) const {
        fsdp_param_desc v{};
        check(fsdp_param_desc_get(get(), index, &v)); // without a commit
        const int64_t numel = state_->numel[static_cast<std::size_t>(index)];
        const fsdp_dtype has = grad ? view(index).grad_dtype : v.dtype;
        if (has != dtype_of<T> || (size && *size != numel))
            detail::throw_error(
                FSDP_ERR_INVALID_ARG,
                "[E554] %s: parameter '%s' of unit '%s' has %lld elements of %s, and your tensor "
                "%lld of %s: it has to be the whole parameter in its own dtype",
                call, v.name, fsdp_unit_label(get()), static_cast<long long>(numel),
                fsdp_dtype_name(has),
                static_cast<long long>(size ? *size : numel), fsdp_dtype_name(dtype_of<T>));
        return numel;
    }

    // Gives C a function by give(user), and keeps it until the model ends or C has another one.
    template <class F, class Give> void hook(int kind, int index, F f, Give give) const {
        detail::kept function = detail::keep(std::move(f), detail::world_of(model_));
        detail::hook *place = nullptr;
        if (model_) {
            for (detail::hook &h : model_->hooks)
                if (h.unit == state_ && h.kind == kind && h.index == index) place = &h;
            if (!place) place = &model_->hooks.emplace_back(state_, kind, index);
        }
        check(give(function.get()));
        place->function = std::move(function);
    }
    // Calls a hook. An exception aborts the world with its text.
    template <class F, class... A> static fsdp_status call(void *user, A &&...arguments) noexcept {
        auto *const self = detail::of<F>(user);
        try {
            if constexpr (std::is_void_v<std::invoke_result_t<F &, A...>>)
                return self->call(std::forward<A>(arguments)...), FSDP_OK;
            else
                return self->call(std::forward<A>(arguments)...);
        } catch (const std::exception &e) {
            fsdp_abort(self->world, e.what());
        } catch (...) {
            fsdp_abort(self->world, "a hook threw what is no std::exception");
        }
        return FSDP_ERR_ABORTED;
    }
    template <class F, class Setter> void comm_hook(int kind, F f, Setter setter) const {
        fsdp_custom_comm thunk = nullptr;
        if constexpr (!std::is_null_pointer_v<F>)
            thunk = [](void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                       const fsdp_coll *coll) { return call<F>(user, ops, comm, coll); };
        hook(kind, -1, std::move(f), [&](void *user) { return setter(get(), thunk, user); });
    }

  public:
    unit() = default;
    fsdp_unit *get() const { return detail::handle(model_) ? state_->handle : nullptr; }
    std::string name() const { return fsdp_unit_name(get()); }

    /* forward, backward - a scope that begins with fsdp_pre_forward, or fsdp_pre_backward, and ends
       with post_*: collective
       body        body(scope) is called, then close(). Result: that of body
       Throws      error; what body throws, after the world is aborted with its text */
    forward_scope forward() const;
    backward_scope backward() const;
    template <class Body> auto forward(Body &&body) const;
    template <class Body> auto backward(Body &&body) const;

    /* unshard, wait, reshard, and the setters - as in C. Throw error */
    void unshard() const { check(fsdp_unshard(get())); }
    void wait() const { check(fsdp_wait(get())); }
    void reshard() const { check(fsdp_reshard(get())); }
    void set_requires_grad(int index, bool requires_grad) const {
        check(fsdp_set_requires_grad(get(), index, requires_grad));
    }
    void set_grad_none(int index) const { check(fsdp_set_grad_none(get(), index)); }
    void set_modules_to_forward_prefetch(const std::vector<unit> &targets) const {
        check(fsdp_set_modules_to_forward_prefetch(get(), handles(targets).data(),
                                                   static_cast<int>(targets.size())));
    }
    void set_modules_to_backward_prefetch(const std::vector<unit> &targets) const {
        check(fsdp_set_modules_to_backward_prefetch(get(), handles(targets).data(),
                                                    static_cast<int>(targets.size())));
    }

    /* view - as fsdp_param_view_get, which commits a new model: a collective then. Throws error */
    param_view view(int index) const {
        param_view v(detail::world_of(model_));
        return check(fsdp_param_view_get(get(), index, &v)), v;
    }

    /* load - copies this rank's rows from the full tensor in host memory, as fsdp_param_load
       full        a vector, an array or a span: dtype and number of elements have to be right
       full, full_grad - gather a parameter, or its gradient, as fsdp_param_full: collective. In its
                   own dtype, which T has to be
       Throws      error; full also std::bad_alloc */
    template <class Full> void load(int index, const Full &full) const {
        const auto *const data = std::data(full);
        using T = std::remove_cv_t<std::remove_pointer_t<decltype(data)>>;
        const int64_t size = static_cast<int64_t>(std::size(full));
        (void)numel_of<T>("load", index, false, &size);
        check(fsdp_param_load(get(), index, data));
    }
    template <class T> std::vector<T> full(int index) const {
        const int64_t numel = numel_of<T>("full", index, false, nullptr);
        std::vector<T> all(static_cast<std::size_t>(numel));
        return check(fsdp_param_full(get(), index, all.data())), all;
    }
    template <class T> std::vector<T> full_grad(int index) const {
        const int64_t numel = numel_of<T>("full_grad", index, true, nullptr);
        std::vector<T> all(static_cast<std::size_t>(numel));
        return check(fsdp_param_full_grad(get(), index, all.data())), all;
    }

    /* Hooks - lambdas; nullptr: none. They return fsdp_status or nothing. If one throws, the world
               is aborted with the text of the exception
       set_all_reduce_hook       f(void *data, int64_t numel, fsdp_dtype dtype, void *stream)
       set_post_accumulate_hook  f(const param_view &view, void *stream)
       set_custom_...            f(const fsdp_comm_ops *, fsdp_comm *, const fsdp_coll *)
       set_unit_callback         f(bool readable), on the calling thread; returns nothing, and must
                                 not set another callback of its unit
       Throws      error, std::bad_alloc */
    template <class F> void set_all_reduce_hook(F f) const {
        fsdp_all_reduce_hook thunk = nullptr;
        if constexpr (!std::is_null_pointer_v<F>)
            thunk = [](void *user, fsdp_unit *, void *data, int64_t numel, fsdp_dtype dtype,
                       void *stream) { return call<F>(user, data, numel, dtype, stream); };
        hook(0, -1, std::move(f),
             [&](void *user) { return fsdp_set_all_reduce_hook(get(), thunk, user); });
    }
    template <class F> void set_post_accumulate_hook(int index, F f) const {
        fsdp_grad_hook thunk = nullptr;
        if constexpr (!std::is_null_pointer_v<F>)
            thunk = [](void *user, const fsdp_param_view *view, void *stream) {
                return call<F>(user, param_view(*view, detail::of<F>(user)->world), stream);
            };
        hook(1, index, std::move(f), [&](void *user) {
            return fsdp_set_post_accumulate_hook(get(), index, thunk, user);
        });
    }
    template <class F> void set_unit_callback(F f) const {
        fsdp_unit_callback thunk = nullptr;
        if constexpr (!std::is_null_pointer_v<F>)
            thunk = [](fsdp_unit *, int readable, void *user) {
                (void)call<F>(user, readable != 0);
            };
        hook(5, -1, std::move(f),
             [&](void *user) { return fsdp_set_unit_callback(get(), thunk, user); });
    }
    template <class F> void set_custom_all_gather(F f) const {
        comm_hook(2, std::move(f), fsdp_set_custom_all_gather);
    }
    template <class F> void set_custom_reduce_scatter(F f) const {
        comm_hook(3, std::move(f), fsdp_set_custom_reduce_scatter);
    }
    template <class F> void set_custom_all_reduce(F f) const {
        comm_hook(4, std::move(f), fsdp_set_custom_all_reduce);
    }
};

// A scope of a unit. If an exception leaves it, the world is aborted; see RULES, Exceptions.
class [[nodiscard]] scope {
    unit unit_;
    const char *name_;
    fsdp_status (*post_)(fsdp_unit *);
    int exceptions_ = std::uncaught_exceptions(); // at the beginning
    int failures_ = 0;

    // Aborts the world. Without a text, one of this world that was thrown in the scope follows.
    void abort(const char *why) noexcept {
        const unit u = std::move(unit_);
        const detail::ref<detail::world_state> &world = u.model_->world;
        char text[1024];
        if (!why && world->failures != failures_) why = fsdp_last_error(world->handle);
        (void)std::snprintf(text, sizeof text, "an exception left the %s of unit '%s'%s%s", name_,
                            fsdp_unit_label(u.get()), why ? ": " : "", why ? why : "");
        detail::abort(world, text);
    }

    // Keeps a failure of the destructor for the next scope. `earlier`: that of fsdp_model_failure
    // before it.
    void keep(fsdp_status status, int64_t earlier) noexcept {
        const auto &m = unit_.model_;
        if (m->lost) return;
        m->lost = status;
        m->lost_failure = earlier ? 0 : fsdp_model_failure(m->handle);
        (void)std::snprintf(m->lost_text, sizeof m->lost_text, "%s",
                            fsdp_last_error(m->world->handle));
    }

  protected:
    scope(const unit &u, const char *name, fsdp_status (*pre)(fsdp_unit *),
          fsdp_status (*post)(fsdp_unit *))
        : unit_(u), name_(name), post_(post) {
        if (u.get() && u.model_->lost) {
            detail::model_state &m = *u.model_.operator->();
            if (m.lost_failure) m.thrown = m.lost_failure;
            throw error(std::exchange(m.lost, FSDP_OK), m.lost_text);
        }
        u.check(pre(u.get()));
        failures_ = u.model_->world->failures;
    }
    scope(scope &&) noexcept = default;
    ~scope() {
        if (!unit_.get()) return;
        if (std::uncaught_exceptions() > exceptions_) {
            abort(nullptr);
        } else {
            const int64_t earlier = fsdp_model_failure(unit_.model_->handle);
            if (const fsdp_status status = post_(unit_.get())) keep(status, earlier);
        }
    }

    // Returns what fsdp_data_as, or fsdp_grad_as, gives. Throws if that is the memory of a failure.
    template <class T> span<T> get(int index, bool grad) const {
        fsdp_unit *const u = unit_.get();
        const fsdp_status failed = u ? fsdp_world_status(unit_.model_->world->handle) : FSDP_OK;
        const std::size_t i = static_cast<std::size_t>(index); // negative: too large
        const int64_t numel = u && i < unit_.state_->numel.size() ? unit_.state_->numel[i] : -1;
        const bool fits = numel >= 0 && fsdp_data_dtype(u, index) == dtype_of<T>;
        const bool open = grad ? fsdp_unit_state(u) == FSDP_STATE_PRE_BACKWARD
                               : fsdp_unit_storage(u) == FSDP_STORAGE_UNSHARDED;
        void *const memory = grad ? fsdp_grad_as(u, index, dtype_of<T>)
                                  : fsdp_data_as(u, index, dtype_of<T>);
        if (!memory && grad && numel >= 0) return span<T>(); // frozen
        if (failed || ((!fits || !open) && (!memory || memory == fsdp_fallback_ptr(
                                                                     unit_.whole(), FSDP_OK))))
            unit_.check(failed ? failed : fits ? FSDP_ERR_INVALID_STATE : FSDP_ERR_INVALID_ARG);
        return span<T>(static_cast<T *>(memory), numel);
    }

  public:
    /* data - the whole parameter `index`, as fsdp_data_as: on a device its memory. Valid to the end
       of the scope
       Throws      error: it is gathered in another dtype, or is not gathered any more */
    template <class T> span<const T> data(int index) const & {
        const span<T> all = get<T>(index, false);
        return span<const T>(all.data(), all.size());
    }
    template <class T> void data(int index) const && = delete; // the scope would have ended

    /* close - ends the scope now: calls post_*, which destructors do without its status
       Throws      error */
    void close() {
        const unit u = std::move(unit_);
        u.check(post_(u.get()));
    }

    // Calls body(self), then close. An exception of body aborts the world with its text.
    template <class Self, class Body> static auto run(Self self, Body &body) {
        scope &base = self;
        try {
            if constexpr (std::is_void_v<decltype(body(self))>) {
                body(self);
                if (base.unit_.get()) base.close();
            } else {
                auto result = body(self);
                if (base.unit_.get()) base.close();
                return result;
            }
        } catch (const std::exception &e) {
            if (base.unit_.get()) base.abort(e.what());
            throw;
        }
    }
};
class [[nodiscard]] forward_scope : public scope {
  public:
    explicit forward_scope(const unit &u)
        : scope(u, "forward", fsdp_pre_forward, fsdp_post_forward) {}
};
class [[nodiscard]] backward_scope : public scope {
  public:
    explicit backward_scope(const unit &u)
        : scope(u, "backward", fsdp_pre_backward, fsdp_post_backward) {}

    /* grad - where you add the gradient of parameter `index`, as fsdp_grad_as; empty if the
       parameter is frozen
       Throws      as data */
    template <class T> span<T> grad(int index) const & { return get<T>(index, true); }
    template <class T> void grad(int index) const && = delete;
};
inline forward_scope unit::forward() const { return forward_scope(*this); }
inline backward_scope unit::backward() const { return backward_scope(*this); }
template <class Body> auto unit::forward(Body &&body) const {
    return scope::run(forward_scope(*this), body);
}
template <class Body> auto unit::backward(Body &&body) const {
    return scope::run(backward_scope(*this), body);
}

/* ---- model ----------------------------------------------------------------------------------- */

class model : public setters<model> {
    detail::ref<detail::model_state> state_;
    friend class setters<model>;
    template <class Handle, void (*Destroy)(Handle *)> friend class detail::made;

    fsdp_model *whole() const { return get(); }
    static fsdp_unit *part() { return nullptr; }
    unit unit_of(const fsdp_unit *handle) {
        for (detail::unit_state &u : state_->units)
            if (u.handle == handle) return unit(state_, &u);
        return unit();
    }
    unit shard(const std::string &name, const fsdp_param_desc *params, std::size_t count,
               fsdp_unit_desc desc) {
        desc.name = name.c_str(), desc.params = params, desc.num_params = static_cast<int>(count);
        if (!get()) check(fsdp_fully_shard(nullptr, &desc, nullptr));
        detail::unit_state made = {nullptr, std::vector<int64_t>(count, 1)};
        std::forward_list<detail::unit_state> place;
        place.push_front(std::move(made));
        check(fsdp_fully_shard(get(), &desc, &place.front().handle));
        for (std::size_t i = 0; i < count; i++)
            for (int d = 0; d < params[i].ndim; d++) place.front().numel[i] *= params[i].shape[d];
        state_->units.splice_after(state_->units.before_begin(), place);
        return unit(state_, &state_->units.front());
    }
    // Forgets the failure of a destructor, which C has kept, too, for finalize or until reset.
    void forget() noexcept {
        if (state_) state_->lost = FSDP_OK, state_->thrown = 0;
    }
    void end() noexcept {
        if (!state_) return;
        if (fsdp_model *const handle = get()) fsdp_model_destroy(handle);
        state_->handle = nullptr;
        state_->hooks.clear(); // they may hold units, which hold the model
    }

  public:
    /* model - an empty model, as fsdp_model_create: collective. The destructor is as
               fsdp_model_destroy, unless the world has ended
       Throws      error, std::bad_alloc */
    explicit model(const world &w, const fsdp_model_desc &desc = model_desc())
        : state_(new detail::model_state) {
        state_->world = w.state_;
        w.check(fsdp_model_create(w.get(), &desc, &state_->handle));
    }
    model(model &&) noexcept = default;
    model &operator=(model &&o) noexcept {
        model old(std::move(*this));
        state_ = std::move(o.state_);
        return *this;
    }
    ~model() { end(); }

    fsdp_model *get() const { return detail::handle(state_); }
    void check(fsdp_status status) const { detail::check(status, state_); }

    /* shard - adds a unit, as fsdp_fully_shard: collective
       desc        other options of the unit; its name and params are ignored
       Throws      error, std::bad_alloc */
    unit shard(const std::string &name, std::initializer_list<fsdp_param_desc> params,
               const fsdp_unit_desc &desc = unit_desc()) {
        return shard(name, params.begin(), params.size(), desc);
    }
    unit shard(const std::string &name, const std::vector<fsdp_param_desc> &params,
               const fsdp_unit_desc &desc = unit_desc()) {
        return shard(name, params.data(), params.size(), desc);
    }

    /* init - fills parameters, as fsdp_init_params: f(const param_view &rows), block by block
       load - copies parameters from full tensors, as unit::load: f(const param_view &) returns the
              tensor as a vector, an array or a span; an empty one leaves the parameter as it is
       Throws      error; what f throws: then some parameters have their values, others not */
    template <class F> void init(F &&f) {
        detail::function_of<F &> function(f);
        function.world = detail::world_of(state_);
        const fsdp_init_fn fill = [](void *user, const fsdp_param_view *v) {
            auto *const self = detail::of<F &>(user);
            if (!self->thrown) (void)detail::guard<F &>(user, 0, param_view(*v, self->world));
        };
        detail::function *const user = &function;
        const fsdp_status status = fsdp_init_params(get(), fill, user);
        function.rethrow();
        check(status);
    }
    template <class F> void load(F &&f) {
        for (const param_view &v : params()) {
            const auto &full = f(v);
            if (std::size(full)) unit_of(v.unit).load(v.index, full);
        }
    }

    /* params - for (auto &p : model.params()): all parameters, as fsdp_next_param. Commits first
       Throws      error */
    class param_range {
        fsdp_model *model_;
        fsdp_world *world_;

      public:
        param_range(fsdp_model *m, fsdp_world *w) : model_(m), world_(w) {}
        struct sentinel {};
        class iterator {
            fsdp_model *model_;
            param_view view_;
            bool more_;

          public:
            iterator(fsdp_model *m, fsdp_world *w)
                : model_(m), view_(w), more_(fsdp_next_param(m, &view_) != 0) {}
            param_view &operator*() { return view_; }
            iterator &operator++() { return more_ = fsdp_next_param(model_, &view_) != 0, *this; }
            bool operator!=(sentinel) const { return more_; }
        };
        iterator begin() const { return iterator(model_, world_); }
        sentinel end() const { return {}; }
    };
    param_range params() const {
        check(fsdp_model_commit(get()));
        return param_range(get(), detail::world_of(state_));
    }

    /* The calls of a step, and between steps - as in C. clip_grad_norm returns the norm before
               clipping; clip_grads leaves it to grad_norm, so that the host does not wait
       Throws      error: finalize_backward also the first failure of a scope or getter, unless a
                   scope has thrown it for a destructor */
    void commit() { check(fsdp_model_commit(get())); }
    void reserve() { check(fsdp_model_reserve(get())); }
    void finalize_backward() {
        const int64_t kept = fsdp_model_failure(get());
        const fsdp_status status = fsdp_finalize_backward(get());
        if (kept && fsdp_model_failure(get()) == kept) return check(status); // its own failure
        const bool again = kept && kept == state_->thrown; // a scope has thrown it
        const fsdp_status lost = again ? state_->lost : status;
        forget();
        if (again && lost) throw error(lost, state_->lost_text);
        check(lost);
    }
    double clip_grad_norm(double max_norm) {
        double norm = 0;
        return check(fsdp_clip_grad_norm(get(), max_norm, &norm)), norm;
    }
    void clip_grads(const fsdp_clip_desc &desc) { check(fsdp_clip_grads(get(), &desc, nullptr)); }
    double grad_norm() {
        double norm = 0;
        return check(fsdp_grad_norm(get(), &norm)), norm;
    }
    void zero_grad() { check(fsdp_zero_grad(get())); }
    void params_writable() { check(fsdp_params_writable(get())); }
    void params_changed() { check(fsdp_params_changed(get())); }
    void reset() {
        forget();
        check(fsdp_model_reset(get()));
    }
    void broadcast(int root = 0) { check(fsdp_model_broadcast(get(), nullptr, root)); }
    void cast(fsdp_dtype dtype) { check(fsdp_model_cast(get(), dtype)); }
    fsdp_flat flat(fsdp_dtype dtype) {
        fsdp_flat out{};
        return check(fsdp_model_flat(get(), dtype, &out)), out;
    }

    /* Setters without a unit - as in C; the others are those of setters. Throw error */
    void set_grad_enabled(bool enabled) { check(fsdp_set_grad_enabled(get(), enabled)); }
    void set_is_last_backward(bool is_last) { check(fsdp_set_is_last_backward(get(), is_last)); }

    /* memory, predict, describe - as fsdp_model_memory and its siblings. Throw error */
    fsdp_memory memory() const {
        fsdp_memory out{};
        return check(fsdp_model_memory(get(), &out)), out;
    }
    fsdp_memory predict() const {
        fsdp_memory out{};
        return check(fsdp_model_predict(get(), &out)), out;
    }
    std::string describe() const { return detail::text_of(fsdp_model_describe, get()); }
};

/* ---- what a model owns in C ------------------------------------------------------------------ */

namespace detail {

// Owns what a model owns in C, too: ends it, unless the model or the world has ended before.
template <class Handle, void (*Destroy)(Handle *)> class made {
    Handle *handle_ = nullptr;
    kept function_ = none(); // that C calls while the handle lives

  protected:
    ref<model_state> model_;

    explicit made(const model &m) : model_(m.state_) {}
    made(made &&o) noexcept
        : handle_(std::exchange(o.handle_, nullptr)), function_(std::move(o.function_)),
          model_(std::move(o.model_)) {}
    made &operator=(made &&o) noexcept {
        made old(std::move(*this));
        model_ = std::move(o.model_), handle_ = std::exchange(o.handle_, nullptr);
        function_ = std::move(o.function_);
        return *this;
    }
    ~made() {
        if (get()) Destroy(handle_);
    }

    // Calls fsdp_..._create.
    template <class Desc>
    void create(fsdp_status (*make)(fsdp_model *, const Desc *, Handle **), const Desc &desc) {
        check(make(handle(model_), &desc, &handle_));
    }
    // Keeps a function that C calls. Returns C's argument `user` of it.
    template <class F> void *keep(F f) {
        function_ = detail::keep(std::move(f), world_of(model_));
        return function_.get();
    }
    // Throws what the function threw, or the failure.
    void check(fsdp_status status) const {
        if (function_) function_->rethrow();
        detail::check(status, model_);
    }

  public:
    Handle *get() const { return handle(model_) ? handle_ : nullptr; }
};

// The group of a parameter by a lambda. If it throws, no group has this number.
template <class F> int group_of(void *user, const fsdp_param_view *view) {
    return guard<F>(user, INT_MAX, param_view(*view, of<F>(user)->world));
}

class optimizer : public made<fsdp_optim, fsdp_optim_destroy> {
  protected:
    using made::made;

  public:
    /* step, set_group, state - as fsdp_optim_step and its siblings; collective as there
       Throws      error; what the lambda of the groups throws */
    void step(double lr) { check(fsdp_optim_step(get(), lr)); }
    void set_group(int k, const fsdp_optim_group &group) {
        check(fsdp_optim_set_group(get(), k, &group));
    }
    fsdp_optim_state state(int ordinal) {
        fsdp_optim_state out{};
        return check(fsdp_optim_state_get(get(), ordinal, &out)), out;
    }
    int64_t nbytes() const { return fsdp_optim_nbytes(get()); }
};

// An optimizer whose parameters are in groups.
template <class Desc, class Defaults,
          fsdp_status (*Create)(fsdp_model *, const Desc *, fsdp_optim **)>
class grouped : public optimizer {
  public:
    explicit grouped(const model &m, const Desc &desc = Defaults()) : optimizer(m) {
        create(Create, desc);
    }
    template <class Group> grouped(const model &m, Desc desc, Group group) : optimizer(m) {
        desc.user = keep(std::move(group)), desc.group = group_of<Group>;
        create(Create, desc);
    }
};

} // namespace detail

/* adamw, sgd - as fsdp_adamw_create and fsdp_sgd_create: collective as a commit
   group       group(const param_view &) returns the group of a parameter; negative: leave it out
   Throws      error, std::bad_alloc; what group throws */
using adamw = detail::grouped<fsdp_adamw_desc, adamw_desc, fsdp_adamw_create>;
using sgd = detail::grouped<fsdp_sgd_desc, sgd_desc, fsdp_sgd_create>;

/* muon - as fsdp_muon_create: collective
   take        take(const param_view &) returns what fsdp_muon_desc.take does. desc.group is NULL
               then, since C calls both with one argument `user`
   Throws      error, std::bad_alloc; what take throws */
class muon : public detail::optimizer {
  public:
    explicit muon(const model &m, const fsdp_muon_desc &desc = muon_desc()) : optimizer(m) {
        create(fsdp_muon_create, desc);
    }
    template <class Take> muon(const model &m, fsdp_muon_desc desc, Take take) : optimizer(m) {
        desc.user = keep(std::move(take)), desc.group = nullptr;
        desc.take = [](void *user, const fsdp_param_view *view) {
            return detail::guard<Take>(user, 0, param_view(*view, detail::of<Take>(user)->world));
        };
        create(fsdp_muon_create, desc);
    }
    bool takes(const fsdp_param_view &view) const { return fsdp_muon_takes(get(), &view) != 0; }
    std::string describe() const { return detail::text_of(fsdp_muon_describe, get()); }
};

/* ema - as fsdp_ema_create: collective as a commit
   decay_at    decay_at(int64_t step) returns the decay of that call of update
   Throws      error, std::bad_alloc; what decay_at throws, then update has changed nothing */
class ema : public detail::made<fsdp_ema, fsdp_ema_destroy> {
  public:
    explicit ema(const model &m, const fsdp_ema_desc &desc = ema_desc()) : made(m) {
        create(fsdp_ema_create, desc);
    }
    template <class Decay> ema(const model &m, fsdp_ema_desc desc, Decay decay_at) : made(m) {
        desc.user = keep(std::move(decay_at));
        desc.decay_at = [](void *user, int64_t step) {
            return detail::guard<Decay>(user, -1.0, step);
        };
        create(fsdp_ema_create, desc);
    }
    void update() { check(fsdp_ema_update(get())); }
    void swap() { check(fsdp_ema_swap(get())); }
    int64_t nbytes() const { return fsdp_ema_nbytes(get()); }
};

/* grad_scaler - as fsdp_grad_scaler_create: collective as a commit. unscale is collective
   Throws      error, std::bad_alloc */
class grad_scaler : public detail::made<fsdp_grad_scaler, fsdp_grad_scaler_destroy> {
  public:
    explicit grad_scaler(const model &m, const fsdp_grad_scaler_desc &desc = grad_scaler_desc())
        : made(m) {
        create(fsdp_grad_scaler_create, desc);
    }
    double scale() const { return fsdp_grad_scaler_scale(get()); }
    void unscale() { check(fsdp_grad_scaler_unscale(get())); }
    bool found_inf() const { return fsdp_grad_scaler_found_inf(get()) == 1; }
    void update() { check(fsdp_grad_scaler_update(get())); }
};

// Memory of yours that belongs to a checkpoint; value has to live as long as the checkpoint.
template <class T> fsdp_checkpoint_blob blob(const char *name, T &value) {
    static_assert(std::is_trivially_copyable_v<T>, "only types that memcpy copies");
    return {name, &value, sizeof value, 0, 0};
}

/* checkpoint - as fsdp_checkpoint_create: collective, after the optimizers
   blobs       for example {fsdp::blob("place", place)}; desc.blobs is ignored
   place       place(const param_view &, fsdp_checkpoint_place &) changes the place in files
   Throws      error, std::bad_alloc; what place throws */
class checkpoint : public detail::made<fsdp_checkpoint, fsdp_checkpoint_destroy> {
    void create_with(std::initializer_list<fsdp_checkpoint_blob> all, fsdp_checkpoint_desc desc) {
        desc.blobs = all.begin(), desc.num_blobs = static_cast<int>(all.size());
        create(fsdp_checkpoint_create, desc);
    }

  public:
    using blobs = std::initializer_list<fsdp_checkpoint_blob>;
    struct found {
        std::string path;
        int64_t step;
    };

    explicit checkpoint(const model &m, blobs all = {},
                        const fsdp_checkpoint_desc &desc = checkpoint_desc())
        : made(m) {
        create_with(all, desc);
    }
    template <class Place>
    checkpoint(const model &m, blobs all, fsdp_checkpoint_desc desc, Place place) : made(m) {
        desc.user = keep(std::move(place));
        desc.place = [](void *user, const fsdp_param_view *view, fsdp_checkpoint_place *to) {
            fsdp_world *const of = detail::of<Place>(user)->world;
            (void)detail::guard<Place>(user, 0, param_view(*view, of), *to);
        };
        create_with(all, desc);
    }

    /* save, save_async, poll, wait, find, load - as in C: collective
       poll        Result: a save is under way
       find        Result: the newest complete checkpoint in dir up to max_step; none: nullopt
       source      source(const param_view &, fsdp_checkpoint_source *) returns their number
       Throws      error; find also std::bad_alloc; what source throws */
    void save(const std::string &dir, int64_t step) {
        check(fsdp_checkpoint_save(get(), dir.c_str(), step));
    }
    void save_async(const std::string &dir, int64_t step) {
        check(fsdp_checkpoint_save_async(get(), dir.c_str(), step));
    }
    bool poll() {
        int busy = 0;
        return check(fsdp_checkpoint_poll(get(), &busy)), busy != 0;
    }
    void wait() { check(fsdp_checkpoint_wait(get())); }
    std::optional<found> find(const std::string &dir, int64_t max_step = -1) {
        char path[FSDP_CHECKPOINT_PATH];
        int64_t step = -1;
        check(fsdp_checkpoint_find(get(), dir.c_str(), max_step, path, sizeof path, &step));
        if (step < 0) return std::nullopt;
        return found{path, step};
    }
    void load(const std::string &path,
              const fsdp_checkpoint_load_desc &desc = checkpoint_load_desc()) {
        check(fsdp_checkpoint_load(get(), path.c_str(), &desc));
    }
    template <class Source>
    void load(const std::string &path, fsdp_checkpoint_load_desc desc, Source &&source) {
        detail::function_of<Source &> function(source);
        desc.user = static_cast<detail::function *>(&function);
        desc.source = [](void *user, const fsdp_param_view *view, fsdp_checkpoint_source *out) {
            return detail::guard<Source &>(user, -1, param_view(*view, nullptr), out);
        };
        const fsdp_status status = fsdp_checkpoint_load(get(), path.c_str(), &desc);
        function.rethrow();
        check(status);
    }
    // export_model - as fsdp_checkpoint_export_model: collective. Throws error
    void export_model(const std::string &out,
                      const fsdp_checkpoint_export_desc &desc = checkpoint_export_desc()) {
        check(fsdp_checkpoint_export_model(get(), out.c_str(), &desc));
    }
    fsdp_checkpoint_report last_report() const {
        fsdp_checkpoint_report out{};
        return check(fsdp_checkpoint_last_report(get(), &out)), out;
    }
    int64_t nbytes() const { return fsdp_checkpoint_nbytes(get()); }
};

/* plan - as fsdp_plan_create; the functions, and the destructor, are collective as in C. If an
   exception ends a plan in the middle of a backward, the world is aborted, as by a scope
   Throws      error, std::bad_alloc */
class plan : public detail::made<fsdp_plan, fsdp_plan_destroy> {
    int exceptions_ = std::uncaught_exceptions();

  public:
    plan(plan &&) noexcept = default;
    plan &operator=(plan &&) noexcept = default;
    ~plan() {
        bool open = false; // then this rank would reduce alone what the plan has deferred
        if (get() && std::uncaught_exceptions() > exceptions_)
            for (const detail::unit_state &u : model_->units)
                open |= fsdp_unit_state(u.handle) != FSDP_STATE_IDLE;
        if (open) detail::abort(model_->world, "an exception left a planned backward");
    }
    explicit plan(const model &m, const fsdp_plan_desc &desc = plan_desc()) : made(m) {
        create(fsdp_plan_create, desc);
    }
    fsdp_plan_mode state() const { return fsdp_plan_state(get()); }
    std::string why() const { return get() ? fsdp_plan_why(get()) : ""; }
    void pause(bool paused) { check(fsdp_plan_pause(get(), paused)); }
    void forget() { check(fsdp_plan_forget(get())); }
    int count() const { return fsdp_plan_count(get()); }
    std::string text(int index, int what = FSDP_PLAN_TEXT_DECISIONS) const {
        return detail::text_of(fsdp_plan_text, get(), index, what);
    }
    fsdp_plan_report report(int index) const {
        fsdp_plan_report out{};
        return check(fsdp_plan_report_get(get(), index, &out)), out;
    }
};

/* spawn - starts ranks without a launcher, as fsdp_spawn, and waits until all have ended
   body        body(world &) on each rank. If it throws on a rank, the other ranks get ABORTED with
               the text of the exception
   Throws      error, with the text of the first rank that failed */
template <class Body> void spawn(const fsdp_spawn_desc &desc, Body &&body) {
    auto *call = &body;
    const auto rank = [](fsdp_world *handle, void *user) -> int {
        world w(handle);
        try {
            (**static_cast<decltype(call) *>(user))(w);
            return FSDP_OK;
        } catch (const error &e) {
            return e.status;
        } catch (const std::exception &e) {
            w.abort(e.what());
            return FSDP_ERR_ABORTED;
        }
    };
    const fsdp_status status = fsdp_spawn(&desc, rank, &call);
    if (status) throw error(status, fsdp_last_error(nullptr));
}

} // namespace fsdp
#endif // C++17
#endif // FSDP_HPP
