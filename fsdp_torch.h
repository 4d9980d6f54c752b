/* fsdp_torch.h - modules of LibTorch (torch::nn::Module in C++) as units of fsdp.h

   The header is C++17, or what your LibTorch asks for, and needs LibTorch 2.6 or newer; on GPUs
   2.11. Link the program with the library in C (fsdp::lib, or a file with FSDP_IMPLEMENTATION).

       auto block = fsdp_torch::fully_shard(model, *layer, "h.0"); // any torch::nn::Module
       x = fsdp_torch::forward(block, layer, x);    // or a lambda; several inputs and outputs
       x = fsdp_torch::checkpoint(block, layer, x); // as forward; backward runs the layer again
       fsdp_torch::backward(model, loss);           // instead of loss.backward()
       for (torch::Tensor &p : fsdp_torch::shards(model)) ... // this rank's rows, and p.grad()

   docs/from-libtorch.md has a program before and after.

HOW IT WORKS
   Parameters stay leaves of autograd, but their storage owns no memory. While the unit is gathered,
   it points at fsdp_data, otherwise at nothing, and then a use of the parameter throws. Tensors
   that autograd has saved share this storage: after the gather of the backward they are valid
   again, wherever the slot is then. Identity functions before and after a layer call
   fsdp_post_backward and fsdp_pre_backward. A hook of each parameter gives it the memory of
   fsdp_grad just before autograd adds a gradient: a parameter is used if autograd reaches it.

   Autograd runs the nodes of a backward in the reverse order of their creation, one at a time for
   each device: so all gradients of a layer are there when the function before it runs. On GPUs it
   calls from a thread of its own.

ERRORS
   Functions throw fsdp_torch::error with the text of fsdp_last_error. If another exception leaves a
   layer or a backward, the world is aborted: all ranks get its text at once, and no half of a
   gradient enters an average.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_TORCH_H
#define FSDP_TORCH_H
#ifndef __cplusplus
#error "fsdp_torch.h is for C++"
#endif
#include "fsdp.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>
#include <torch/version.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_set>
#include <utility>
#include <vector>

#define FSDPI_TORCH (TORCH_VERSION_MAJOR * 100 + TORCH_VERSION_MINOR)
#if FSDPI_TORCH < 206
#error "fsdp_torch.h needs LibTorch 2.6 or newer"
#endif

namespace fsdp_torch {
using at::Tensor;

// A failure that is equal on all ranks, or of the world. It aborts nothing.
struct error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

namespace detail {
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline const char *label_of(const std::string &unit) {
    return unit.empty() ? "(root)" : unit.c_str();
}
[[noreturn]] FSDP_PRINTF(2, 3) inline void refuse(const std::string &unit, const char *format,
                                                  ...) {
    char why[512], text[1024];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    snprintf(text, sizeof text, "[E555] unit '%s': %s", label_of(unit), why);
    throw error(text);
}
inline void check(const fsdp_world *world, fsdp_status status) {
    if (status == FSDP_OK) return;
    const char *text = fsdp_last_error(world);
    throw error(*text ? text : fsdp_status_text(status));
}

// Aborts the world with the text of the exception that is being handled, unless it is an `error`,
// and throws it again.
[[noreturn]] inline void abandon(fsdp_world *world, const std::string &where) {
    try {
        throw;
    } catch (const error &) {
        throw;
    } catch (const c10::Error &e) {
        fsdp_abort(world, (where + ": " + e.what_without_backtrace()).c_str());
        throw;
    } catch (const std::exception &e) {
        fsdp_abort(world, (where + ": " + e.what()).c_str());
        throw;
    } catch (...) {
        fsdp_abort(world, (where + ": an exception").c_str());
        throw;
    }
}

inline fsdp_dtype dtype_of(at::ScalarType type) { // KEEP: a unit cannot have it
    switch (type) {
    case at::kFloat: return FSDP_F32;
    case at::kDouble: return FSDP_F64;
    case at::kHalf: return FSDP_F16;
    case at::kBFloat16: return FSDP_BF16;
    default: return FSDP_DTYPE_KEEP;
    }
}
inline at::ScalarType type_of(fsdp_dtype dtype) {
    return dtype == FSDP_F64    ? at::kDouble
           : dtype == FSDP_F16  ? at::kHalf
           : dtype == FSDP_BF16 ? at::kBFloat16
                                : at::kFloat;
}

#if FSDPI_TORCH < 212
// Gives access to the private flag of a storage that its use throws: before 2.12 LibTorch can set
// it, and not clear it.
struct ThrowFlag {
    using type = bool c10::StorageImpl::*;
    friend type pointer_to(ThrowFlag);
};
template <class Tag, typename Tag::type Member> struct Access {
    friend typename Tag::type pointer_to(Tag) { return Member; }
};
template struct Access<ThrowFlag, &c10::StorageImpl::throw_on_immutable_data_ptr_>;
#endif

// A tensor whose storage owns no memory, and what its use says while it points at nothing.
struct Window {
    at::Storage storage;
    std::string text;
    Tensor open(at::IntArrayRef sizes, const at::TensorOptions &options) {
        const auto nbytes = size_t(c10::multiply_integers(sizes)) * options.dtype().itemsize();
        storage = at::Storage(at::Storage::use_byte_size_t(), nbytes,
                              at::DataPtr(nullptr, options.device()), nullptr, false);
        Tensor t = at::empty({0}, options).set_(storage, 0, sizes);
        at(nullptr);
        return t;
    }
    void at(void *data) {
        c10::StorageImpl *s = storage.unsafeGetStorageImpl();
#if FSDPI_TORCH < 212
        s->*pointer_to(ThrowFlag()) = false;
#else
        s->clear_data_ptr_access_error_msg_();
#endif
        s->set_data_ptr_noswap(at::DataPtr(data, storage.device()));
        if (!data) s->release_data_and_set_meta_custom_data_ptr_error_msg_(text);
    }
};

struct Param {
    std::string name;
    Tensor value, grad; // value: the module's
    Window memory, grad_memory;
    bool trainable;
    bool reached; // this backward has given it the memory of its gradient
};

// > 0 in a forward without gradients whose backward runs it again: it is no evaluation.
inline thread_local int recomputed = 0;
struct Recomputed {
    Recomputed() { recomputed++; }
    ~Recomputed() { recomputed--; }
    Recomputed(const Recomputed &) = delete;
};

// Whether a forward has used a trainable parameter, or inputs that need a gradient; of the
// innermost scope, and then of those around it.
inline thread_local bool used_trainable = false;
struct Trainable {
    const bool before;
    explicit Trainable(const variable_list &x)
        : before(std::exchange(used_trainable, torch::autograd::any_variable_requires_grad(x))) {}
    ~Trainable() { used_trainable |= before; }
    Trainable(const Trainable &) = delete;
    bool any() const { return used_trainable; }
};

struct Modules;

// A unit and the parameters of its module. `unit` is NULL after the model has ended.
struct State : torch::CustomClassHolder {
    fsdp_model *const model;
    fsdp_world *const world;
    const std::string name;
    Modules *const modules; // those of the model, which ends them
    fsdp_unit *unit = nullptr;
    std::vector<Param> params;
    void *stream = nullptr; // the last one that the library got from here

    State(fsdp_model *m, std::string n, Modules &all)
        : model(m), world(fsdp_model_world(m)), name(std::move(n)), modules(&all) {}

    void call(fsdp_status (*hook)(fsdp_unit *)) {
        if (!unit) refuse(name, "its model has ended");
        check(world, hook(unit));
    }
    // Gives the tensors of parameter i memory of the library instead of their own.
    void bind(size_t i) {
        Param &p = params[i];
        const auto type = type_of(fsdp_data_dtype(unit, int(i)));
        const auto options = p.value.options().dtype(type).requires_grad(false);
        p.grad = p.grad_memory.open(p.value.sizes(), options);
        p.value.mutable_grad() = Tensor();
        p.value.set_data(p.memory.open(p.value.sizes(), options));
    }
    void pre_forward();
    void check_params() {
        for (size_t i = 0; unit && i < params.size(); i++) {
            Param &p = params[i];
            if (p.value.storage().unsafeGetStorageImpl() != p.memory.storage.unsafeGetStorageImpl())
                refuse(name,
                       "parameter '%s' has got other memory: do not move a module "
                       "or give a parameter other data while its unit is open",
                       p.name.c_str());
            if (p.value.requires_grad() != p.trainable)
                refuse(name,
                       "requires_grad of parameter '%s' has changed: set it before "
                       "fully_shard",
                       p.name.c_str());
            if (type_of(fsdp_data_dtype(unit, int(i))) != p.value.scalar_type()) bind(i); // cast
            used_trainable |= p.trainable;
        }
    }
    void pre_backward() {
        if (at::GradMode::is_enabled())
            refuse(name, "backward with create_graph needs gradients of gradients, which "
                         "the library does not have");
        follow_stream();
        close_grads();
        call(fsdp_pre_backward);
    }
    void post_backward() {
        close_grads();
        call(fsdp_post_backward);
    }
    void reach(size_t i) {
        Param &p = params[i];
        if (!unit || p.reached) return;
        p.grad_memory.at(fsdp_grad(unit, int(i)));
        p.value.mutable_grad() = p.grad;
        p.reached = true;
    }
    // The gradients stay defined, so that torch::optim over the module's own parameters throws
    // instead of leaving all of them out.
    void close_grads() {
        for (Param &p : params)
            if (std::exchange(p.reached, false)) p.grad_memory.at(nullptr);
    }
    static void readable(fsdp_unit *unit, int on, void *user) {
        State &s = *static_cast<State *>(user);
        for (size_t i = 0; i < s.params.size(); i++)
            s.params[i].memory.at(on ? fsdp_data(unit, int(i)) : nullptr);
        if (!on) s.close_grads();
    }
    // On a GPU the library follows the current stream of PyTorch.
    void follow_stream() {
        const at::Device device = params[0].value.device();
        if (device.is_cpu()) return;
#if FSDPI_TORCH >= 211 // fully_shard refuses GPUs with older ones
        const c10::impl::VirtualGuardImpl guard(device.type());
        void *now = guard.getStream(device).native_handle();
        if (now == stream) return;
        check(world, fsdp_set_stream(world, now));
        stream = now;
#endif
    }
};
using Ref = c10::intrusive_ptr<State>;

// What a model knows of its modules: an extension of it.
struct Modules {
    std::vector<Ref> units;
    std::unordered_set<c10::TensorImpl *> taken; // the parameters of all units
    std::vector<Tensor> shards;                  // by ordinal
    Tensor lent;                                 // the first of them that has got a gradient

    static Modules &of(fsdp_model *model) {
        static const char *const name = "fsdp_torch";
        if (void *there = fsdp_find_extension(model, name)) return *static_cast<Modules *>(there);
        auto made = std::make_unique<Modules>();
        fsdp_extension e = FSDP_ZERO;
        e.name = name;
        e.user = made.get();
        e.destroy = [](void *user) { delete static_cast<Modules *>(user); };
        check(fsdp_model_world(model), fsdp_attach(model, &e));
        return *made.release();
    }
    // zero_grad of an optimizer over shards() leaves their gradients undefined: the library forgets
    // them, too, before it adds the next ones.
    void forget_dropped(fsdp_model *model) {
        if (!lent.defined() || lent.grad().defined()) return;
        lent = Tensor();
        fsdp_param_view v = FSDP_ZERO;
        while (fsdp_next_param(model, &v))
            if (!shards[size_t(v.ordinal)].grad().defined())
                check(fsdp_model_world(model), fsdp_set_grad_none(v.unit, v.index));
    }
    ~Modules() { // the model ends
        for (const Ref &s : units) {
            if (fsdp_world_status(s->world)) (void)fsdp_model_reset(s->model); // ends readability
            (void)fsdp_set_unit_callback(s->unit, nullptr, nullptr);
            s->unit = nullptr;
        }
    }
};

inline void State::pre_forward() {
    if (unit) modules->forget_dropped(model);
    follow_stream();
    check_params();
    call(fsdp_pre_forward);
}

// Calls v with each tensor of x: a tensor, or a tuple, pair, array, vector or optional of such.
template <class T, class = void> struct is_tuple : std::false_type {};
template <class T>
struct is_tuple<T, std::void_t<decltype(std::tuple_size<T>::value)>> : std::true_type {};
template <class T> struct is_list : std::false_type {};
template <class T> struct is_list<std::vector<T>> : std::true_type {};
template <class T> struct is_list<std::optional<T>> : std::true_type {};
template <class T>
constexpr bool has_tensors = std::is_same_v<T, Tensor> || is_tuple<T>::value || is_list<T>::value;
template <class V> void visit(Tensor &x, const V &v) { v(x); }
template <class T, class V> void visit(std::optional<T> &x, const V &v) {
    if (x) visit(*x, v);
}
template <class T, class V> void visit(T &x, const V &v) {
    if constexpr (is_tuple<T>::value) std::apply([&](auto &...e) { (visit(e, v), ...); }, x);
    if constexpr (is_list<T>::value)
        for (auto &e : x) visit(e, v);
}

using Tensors = std::vector<Tensor *>;
template <class T> void collect(Tensors &list, T &x) {
    visit(x, [&](Tensor &t) {
        if (t.defined()) list.push_back(&t);
    });
}
inline variable_list values(const Tensors &list) {
    variable_list out;
    for (const Tensor *t : list) out.push_back(*t);
    return out;
}
inline void assign(const Tensors &list, const variable_list &from) {
    for (size_t i = 0; i < list.size(); i++) *list[i] = from[i];
}

// Identity functions. Detached tensors share their version, so that autograd still finds writes to
// what it has saved.
inline variable_list detached(at::TensorList list) {
    variable_list out;
    for (const Tensor &t : list) out.push_back(t.detach());
    return out;
}
inline void keep(AutogradContext *c, const Ref &s) {
    c->set_materialize_grads(false);
    c->saved_data["unit"] = c10::IValue::make_capsule(s);
}
inline State &kept(AutogradContext *c) {
    return *static_cast<State *>(c->saved_data["unit"].toCapsule().get());
}
template <void (State::*Call)()> struct Hook : torch::autograd::Function<Hook<Call>> {
    static variable_list forward(AutogradContext *c, at::TensorList list, const Ref &s) {
        return keep(c, s), detached(list);
    }
    static variable_list backward(AutogradContext *c, variable_list grads) {
        (kept(c).*Call)();
        grads.emplace_back(); // of s
        return grads;
    }
};
// Puts the identity function `Call` in front of those of the tensors that need a gradient.
template <void (State::*Call)()> void hook(const Ref &s, Tensors list) {
    const auto end = std::remove_if(list.begin(), list.end(),
                                    [](const Tensor *t) { return !t->requires_grad(); });
    list.erase(end, list.end());
    if (list.empty() || !at::GradMode::is_enabled()) return;
    const variable_list from = values(list);
    assign(list, Hook<Call>::apply(at::TensorList(from), s));
}

// Casts floating tensors as the unit's desc says.
using Cast = const void *(*)(const fsdp_unit *, void *, const void *, fsdp_dtype *, int64_t);
inline void cast(const State &s, const Tensors &list, Cast rule) {
    for (Tensor *t : list) {
        fsdp_dtype dtype = dtype_of(t->scalar_type());
        if (dtype == FSDP_DTYPE_KEEP) continue;
        rule(s.unit, nullptr, nullptr, &dtype, 0); // no elements: only the dtype
        *t = t->to(type_of(dtype));
    }
}

// A forward under NoGradGuard is evaluation, with all that it contains.
struct Evaluation {
    fsdp_model *const model;
    const bool begun;
    explicit Evaluation(const State &s)
        : model(s.model), begun(s.unit && !at::GradMode::is_enabled() && !recomputed &&
                                fsdp_is_grad_enabled(s.model)) {
        if (begun) check(s.world, fsdp_set_grad_enabled(model, 0));
    }
    ~Evaluation() {
        if (begun) (void)fsdp_set_grad_enabled(model, 1);
    }
    Evaluation(const Evaluation &) = delete;
};

// Autocast must not keep the casts of parameters: they would be whole parameters outside of a unit,
// and after a forward without gradients have no graph.
struct NoCasts {
    const bool before = at::autocast::is_autocast_cache_enabled();
    NoCasts() { at::autocast::set_autocast_cache_enabled(false); }
    ~NoCasts() { at::autocast::set_autocast_cache_enabled(before); }
    NoCasts(const NoCasts &) = delete;
};

// The states of the random number generators of the CPU and of a GPU.
struct Random {
    std::vector<std::pair<at::Generator, Tensor>> states;
    explicit Random(at::Device device) {
        add(at::Device(at::kCPU));
        if (!device.is_cpu()) add(device);
    }
    void add(at::Device device) {
        at::Generator g = at::globalContext().defaultGenerator(device);
        const std::lock_guard<std::mutex> lock(g.mutex());
        states.emplace_back(g, g.get_state());
    }
    void set() {
        for (auto &[g, state] : states) {
            const std::lock_guard<std::mutex> lock(g.mutex());
            g.set_state(state);
        }
    }
};
// Sets them for a scope.
struct Replay {
    Random before;
    Replay(Random &then, at::Device device) : before(device) { then.set(); }
    ~Replay() { before.set(); }
    Replay(const Replay &) = delete;
};

using Layer = std::function<variable_list(const variable_list &)>;
struct Again : torch::CustomClassHolder { // what backward needs to run a layer again
    Ref unit;
    Layer layer;
    Random random;
    at::ThreadLocalState context; // autocast, ...
    at::Device device;
    Again(Ref s, Layer f, at::Device d)
        : unit(std::move(s)), layer(std::move(f)), random(d), device(d) {}
};
struct Recompute : torch::autograd::Function<Recompute> {
    // The last of the inputs needs a gradient, and is no input of the layer.
    static variable_list forward(AutogradContext *c, at::TensorList in,
                                 const c10::intrusive_ptr<Again> &a) {
        c->set_materialize_grads(false);
        c->saved_data["again"] = c10::IValue::make_capsule(a);
        variable_list x(in.begin(), in.end() - 1);
        c->save_for_backward(x);
        const Recomputed scope;
        return a->layer(x);
    }
    static variable_list backward(AutogradContext *c, variable_list grads) {
        Again &a = *static_cast<Again *>(c->saved_data["again"].toCapsule().get());
        variable_list in, out;
        a.unit->pre_backward();
        try {
            const variable_list saved = c->get_saved_variables();
            in = detached(saved);
            variable_list y, roots, roots_grad;
            {
                const at::ThreadLocalStateGuard context(a.context);
                const NoCasts casts;
                const at::AutoGradMode on(true);
                const Replay random(a.random, a.device);
                for (size_t i = 0; i < in.size(); i++)
                    if (saved[i].requires_grad()) in[i].requires_grad_(true);
                y = a.layer(in);
            }
            for (size_t i = 0; i < y.size(); i++)
                if (grads[i].defined() && y[i].requires_grad())
                    roots.push_back(y[i]), roots_grad.push_back(grads[i]);
            if (!roots.empty()) torch::autograd::backward(roots, roots_grad);
        } catch (...) {
            abandon(a.unit->world, "unit '" + a.unit->name + "', backward");
        }
        a.unit->post_backward();
        for (const Tensor &x : in) out.push_back(x.grad());
        out.resize(in.size() + 2);
        return out;
    }
};
} // namespace detail

// A module's unit. It converts to the unit in C, for fsdp_unit_memory, setters and so on.
class Unit {
  public:
    explicit Unit(detail::Ref s) : state_(std::move(s)) {}
    operator fsdp_unit *() const { return state_->unit; }
    const detail::Ref &state() const { return state_; }

  private:
    detail::Ref state_;
};

/* fully_shard - make a module's parameters a unit; from here on the library keeps their values
   module      the unit has those of its parameters (named_parameters) that no unit has yet: shard
               inner modules first. A parameter that is used under two names is listed once
   name        prefix of the names in a checkpoint; "" for the outermost module
   desc        options, for example reshard_after_forward; its name and params are not read
   Throws      error: no parameters; one that is not floating, not contiguous, sparse or on another
               device than the model, or that shares its memory with another one; failures of
               fsdp_fully_shard and fsdp_param_load. The module is as before
   Collective  yes      Source torch: fully_shard */
inline Unit fully_shard(fsdp_model *model, const torch::nn::Module &module, const std::string &name,
                        fsdp_unit_desc desc = FSDP_ZERO) {
    using namespace detail;
    Modules &modules = Modules::of(model);
    auto s = c10::make_intrusive<State>(model, name, modules);
    const bool gpu = fsdp_model_run_mode(model) == FSDP_RUN_STREAMS;
    if (gpu && FSDPI_TORCH < 211)
        refuse(name, "on GPUs the library needs LibTorch 2.11 or newer, to follow its stream");
    std::unordered_set<c10::TensorImpl *> seen;
    std::unordered_set<c10::StorageImpl *> memory;
    for (const auto &named : module.named_parameters()) {
        const Tensor &p = named.value();
        c10::TensorImpl *impl = p.unsafeGetTensorImpl();
        if (modules.taken.count(impl) || !seen.insert(impl).second) continue;
        const char *why =
            p.layout() != at::kStrided ? "is sparse"
            : p.is_cuda() != gpu || p.is_meta() || !(p.is_cpu() || p.is_cuda())
                ? "is on another device than the model"
            : dtype_of(p.scalar_type()) == FSDP_DTYPE_KEEP ? "has a dtype that is none of "
                                                             "float, double, half and bfloat16"
            : !p.is_contiguous() ? "is not contiguous: give it p.contiguous() by set_data"
            : p.numel() && !memory.insert(p.storage().unsafeGetStorageImpl()).second
                ? "shares its memory with another parameter: register one tensor twice"
            : p.dim() > FSDP_MAX_DIMS ? "has too many dims"
                                      : nullptr;
        if (why) refuse(name, "parameter '%s' %s", named.key().c_str(), why);
        s->params.push_back({named.key(), p, {}, {}, {}, p.requires_grad(), false});
    }
    if (s->params.empty())
        refuse(name, "its module has no parameters, or all of them are in other units: "
                     "shard inner modules first");
    std::vector<fsdp_param_desc> params;
    for (Param &p : s->params) {
        fsdp_param_desc d = FSDP_ZERO;
        d.name = p.name.c_str();
        d.dtype = dtype_of(p.value.scalar_type());
        d.frozen = !p.trainable;
        d.ndim = int(p.value.dim());
        for (int k = 0; k < d.ndim; k++) d.shape[k] = p.value.size(k);
        params.push_back(d);
        for (Window *w : {&p.memory, &p.grad_memory}) {
            char text[1024];
            snprintf(
                text, sizeof text,
                "[E556] %sparameter '%s' of unit '%s' has memory only inside forward, "
                "checkpoint and backward of its unit: run the module by fsdp_torch::forward(unit, "
                "...). fsdp_torch::shards has this rank's rows, "
                "also for optimizers; fsdp_param_full gathers it; fsdp_checkpoint_save saves "
                "it; fsdp_model_cast changes its dtype",
                w == &p.memory ? "" : "the gradient of ", p.name.c_str(), label_of(name));
            w->text = text;
        }
    }
    desc.name = name.c_str();
    desc.params = params.data();
    desc.num_params = int(params.size());
    fsdp_unit *unit;
    check(s->world, fsdp_fully_shard(model, &desc, &unit));
    for (size_t i = 0; i < s->params.size(); i++) {
        const Tensor host = s->params[i].value.detach().cpu();
        check(s->world, fsdp_param_load(unit, int(i), host.data_ptr()));
    }
    check(s->world, fsdp_set_unit_callback(unit, State::readable, s.get()));
    modules.units.push_back(s);
    s->unit = unit;
    for (size_t i = 0; i < s->params.size(); i++) {
        const Tensor &p = s->params[i].value;
        modules.taken.insert(p.unsafeGetTensorImpl());
        s->bind(i);
        if (!s->params[i].trainable) continue;
        p.register_hook([weak = c10::weak_intrusive_ptr<State>(s), i](const Tensor &) {
            if (const Ref there = weak.lock()) there->reach(i);
        });
    }
    return Unit(s);
}

/* forward - run f, a layer of the unit's module, with gathered parameters
   f           callable with the inputs: a module's holder, or a lambda. It returns a tensor, or a
               tuple, vector, ... of tensors
   in          tensors, tuples and so on of tensors, and whatever else f takes
   Note        if no input needs a gradient, fsdp_finalize_backward ends the unit's backward.
               Floating tensors are cast as param_dtype and output_dtype say
   Throws      what f throws; then the world is aborted. error: failures of the hooks
   Collective  yes      Source torch: FSDPModule.forward */
template <class F, class... In> auto forward(const Unit &unit, F &&f, In... in) {
    using namespace detail;
    const Ref s = unit.state();
    using Out = std::decay_t<decltype(f(std::move(in)...))>;
    static_assert(has_tensors<Out>, "f has to return a tensor, or a tuple or vector of tensors");
    const Evaluation evaluation(*s);
    const NoCasts casts;
    s->pre_forward();
    try {
        Tensors inputs, outputs;
        (collect(inputs, in), ...);
        cast(*s, inputs, fsdp_cast_forward_input);
        hook<&State::post_backward>(s, inputs);
        Out out = f(std::move(in)...);
        s->call(fsdp_post_forward);
        collect(outputs, out);
        hook<&State::pre_backward>(s, outputs);
        cast(*s, outputs, fsdp_cast_forward_output);
        return out;
    } catch (...) {
        abandon(s->world, "unit '" + std::string(label_of(s->name)) + "', forward");
    }
}

/* checkpoint - as forward, but autograd keeps only the inputs; backward runs f again, with the same
   random numbers and autocast
   f           copied. It may run other units: forward and checkpoint
   Collective  yes      Source torch: torch.utils.checkpoint.checkpoint, use_reentrant=True */
template <class F, class... In> auto checkpoint(const Unit &unit, F f, In... in) {
    using namespace detail;
    const Ref s = unit.state();
    using Out = std::decay_t<decltype(f(std::move(in)...))>;
    static_assert(has_tensors<Out>, "f has to return a tensor, or a tuple or vector of tensors");
    if (!at::GradMode::is_enabled()) return forward(unit, std::move(f), std::move(in)...);
    std::tuple<In...> rest(std::move(in)...);
    Tensors list;
    collect(list, rest);
    cast(*s, list, fsdp_cast_forward_input);
    variable_list x = values(list);
    std::vector<bool> defined;
    visit(rest, [&](Tensor &t) { // autograd keeps the tensors
        defined.push_back(t.defined());
        t = Tensor();
    });
    const auto first = std::make_shared<Out>();
    Layer layer = [f = std::move(f), rest = std::move(rest), defined = std::move(defined),
                   weak = std::weak_ptr<Out>(first)](const variable_list &from) mutable {
        auto args = rest;
        size_t k = 0, next = 0;
        visit(args, [&](Tensor &t) {
            if (defined[k++]) t = from[next++];
        });
        Out out = std::apply(f, std::move(args));
        Tensors outputs;
        collect(outputs, out);
        variable_list y = values(outputs);
        if (const auto there = weak.lock()) *there = std::move(out);
        return y;
    };
    const Trainable trainable(x);
    const NoCasts casts;
    s->pre_forward();
    try {
        const at::Device device = s->params[0].value.device();
        const auto again = c10::make_intrusive<Again>(s, std::move(layer), device);
        x.push_back(at::empty({0}).requires_grad_(true)); // so that autograd calls it in any case
        variable_list y = Recompute::apply(at::TensorList(x), again);
        s->call(fsdp_post_forward);
        if (!trainable.any()) y = detached(y);
        Tensors outputs;
        collect(outputs, *first);
        assign(outputs, y);
        cast(*s, outputs, fsdp_cast_forward_output);
        return std::move(*first);
    } catch (...) {
        abandon(s->world, "unit '" + std::string(label_of(s->name)) + "', forward");
    }
}

/* backward - loss.backward, then fsdp_finalize_backward
   retain_graph  another backward over the same forward follows
   Throws      what autograd throws; then the world is aborted, so that no other rank waits for its
               deadline. error: failures of the hooks and of finalize
   Collective  yes */
inline void backward(fsdp_model *model, const Tensor &loss, const Tensor &gradient = {},
                     bool retain_graph = false) {
    fsdp_world *const world = fsdp_model_world(model);
    detail::Modules::of(model).forget_dropped(model);
    detail::check(world, fsdp_set_is_last_backward(model, !retain_graph));
    try {
        loss.backward(gradient, retain_graph);
    } catch (...) {
        detail::abandon(world, "backward");
    }
    detail::check(world, fsdp_finalize_backward(model));
}

/* shards - this rank's rows of each parameter, in the order of fsdp_next_param, as leaves; grad()
   is the gradient of the last fsdp_finalize_backward, undefined if there is none
   Note        the same tensors in each call, so that torch::optim may keep them. Call it before
               each step of an optimizer: it waits until nothing reads the shards, and renews
               grad(). After the step call fsdp_params_changed, and fsdp_zero_grad or the
               optimizer's zero_grad. Frozen ones are included, without requires_grad
   Throws      error: failures of fsdp_model_commit and fsdp_params_writable
   Collective  as fsdp_params_writable      Source torch: FSDPModule.parameters */
inline std::vector<Tensor> shards(fsdp_model *model) {
    using namespace detail;
    fsdp_world *const world = fsdp_model_world(model);
    Modules &modules = Modules::of(model);
    check(world, fsdp_model_commit(model));
    check(world, fsdp_params_writable(model));
    int memory;
    check(world, fsdp_update_place(model, "shards", &memory));
    const auto device = memory == FSDP_MEMORY_HOST
                            ? at::Device(at::kCPU)
                            : modules.units.at(0)->params[0].value.device();
    std::vector<Tensor> &list = modules.shards;
    modules.lent = Tensor();
    list.resize(size_t(fsdp_num_params(model)));
    fsdp_param_view v = FSDP_ZERO;
    while (fsdp_next_param(model, &v)) {
        const at::IntArrayRef sizes(v.local_shape, size_t(v.ndim));
        const auto view = [&](void *data, fsdp_dtype dtype) {
            return at::from_blob(data, sizes, at::device(device).dtype(type_of(dtype)));
        };
        Tensor &t = list[size_t(v.ordinal)];
        if (!t.defined()) t = view(v.shard, v.dtype);
        else if (t.data_ptr() != v.shard || t.scalar_type() != type_of(v.dtype)) {
            t.mutable_grad() = Tensor();
            t.set_data(view(v.shard, v.dtype));
        }
        t.set_requires_grad(v.requires_grad);
        t.mutable_grad() = v.shard_grad ? view(v.shard_grad, v.grad_dtype) : Tensor();
        if (v.shard_grad && !modules.lent.defined()) modules.lent = t;
    }
    return list;
}
} // namespace fsdp_torch
#endif // FSDP_TORCH_H
