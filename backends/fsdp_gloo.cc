/* fsdp_gloo.cc - the Gloo library behind the C functions of fsdp_gloo_shim.h

       g++ -O2 -c fsdp_gloo.cc          and link with -lgloo -lstdc++ -pthread

   C++11 or later, with exceptions. Compiles with the library as Debian 12 has it (0.5.0, May 2022)
   and as upstream has it (April 2026): of what changed between them nothing is used.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#include "fsdp_gloo_shim.h"

#include <gloo/common/error.h>      // IoException, EnforceNotMet
#include <gloo/transport/context.h> // pairs
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/device.h> // CreateDevice
#include <gloo/transport/unbound_buffer.h>

#include <errno.h>       // EMFILE
#include <signal.h>      // SIGPIPE
#include <sys/epoll.h>   // EPOLLIN
#include <sys/eventfd.h> // wakes the device's thread
#include <sys/timerfd.h> // wakes it at a deadline
#include <unistd.h>      // read, write, close

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <thread>
#include <vector>

namespace {

typedef std::chrono::steady_clock Clock;

// A send or receive to be posted.
struct Post {
    fsdp_gloo_buffer *buffer;
    bool is_send;
    int peer;
    uint64_t slot;
    size_t offset, bytes;
};

// Somebody waits for a buffer.
struct Wait {
    fsdp_gloo_buffer *buffer;
    bool is_send;
    Clock::time_point deadline;
    bool late; // it has been ended
};

/* What runs in the device's own thread: all sends and receives are posted there, and waits that are
   late are ended there. Gloo's thread only tries the lock of a connection. While another thread
   holds it, Gloo's spins; where cores are few it so keeps that other thread from running, for
   milliseconds. Therefore no other thread takes these locks while messages are under way.
   A thread that closes a connection holds its lock until Gloo's has looked: before, no post that
   would wait for the lock may be left. */
class Agent : public gloo::transport::tcp::Handler {
  public:
    explicit Agent(const std::shared_ptr<gloo::transport::Device> &device);
    ~Agent();

    void post(const Post &post);
    // What was posted for the context has run, or never will.
    void forget(const fsdp_gloo_context *context);

    void begin(Wait *wait);
    void end(Wait *wait);

    // Gloo's thread looks again every 10 ms, and who opens or closes a connection waits for that.
    // In between it looks much more often.
    void hurry(int begins);

    // Of the library as it was, and as it is.
    void handleEvents(int) { work(); }
    void handleEvents(gloo::transport::tcp::Loop &, int) { work(); }

  private:
    void work();
    void end_late_waits();
    void arm(Clock::time_point at);

    const std::shared_ptr<gloo::transport::tcp::Device> device_;
    const int wake_, timer_;
    std::mutex mutex_;            // of all that follows
    std::condition_variable ran_; // running_ is empty again
    std::vector<Post> posts_, running_;
    std::vector<Wait *> waits_;
    Clock::time_point armed_; // of the timer; max(): not
    int hurries_;
};

class Hurry {
  public:
    explicit Hurry(Agent *agent) : agent_(agent) { agent_->hurry(1); }
    ~Hurry() { agent_->hurry(-1); }
    Hurry(const Hurry &) = delete;
    Hurry &operator=(const Hurry &) = delete;

  private:
    Agent *const agent_;
};

} // namespace

struct fsdp_gloo_device {
    std::shared_ptr<gloo::transport::Device> device;
    std::unique_ptr<Agent> agent;
};

struct fsdp_gloo_context {
    std::shared_ptr<gloo::transport::Context> context;
    Agent *agent;
    std::atomic<bool> closed;
};

struct fsdp_gloo_buffer {
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
    fsdp_gloo_context *context;
    std::mutex mutex;
    std::exception_ptr error; // why a post has failed
};

namespace {

thread_local char last_error[256] = "";

int failed(int status, const char *text) noexcept {
    std::snprintf(last_error, sizeof last_error, "%s", text);
    return status;
}

// The status of the exception that is being handled.
int caught() noexcept {
    try {
        throw;
    } catch (const gloo::IoException &e) {
        const char *what = e.what();
        bool late = std::strstr(what, "Timed out waiting") || std::strstr(what, "Wait timeout") ||
                    std::strstr(what, "Connect timeout") || std::strstr(what, "Read timeout");
        return failed(late ? FSDP_GLOO_TIMEOUT : FSDP_GLOO_LOST, what);
    } catch (const gloo::InvalidOperationException &e) {
        return failed(FSDP_GLOO_INVALID, e.what());
    } catch (const gloo::EnforceNotMet &e) {
        return failed(FSDP_GLOO_INVALID, e.what());
    } catch (const std::bad_alloc &) {
        return failed(FSDP_GLOO_NO_MEMORY, "out of memory");
    } catch (const std::exception &e) {
        return failed(FSDP_GLOO_INTERNAL, e.what());
    } catch (...) {
        return failed(FSDP_GLOO_INTERNAL, "unknown exception");
    }
}

// Runs a function that may throw.
template <typename F> int guarded(F f) noexcept {
    try {
        return f();
    } catch (...) {
        return caught();
    }
}

// 0 ms would mean "late already", and much more than ten years overflows in the library.
const std::chrono::milliseconds TEN_YEARS(315360000000);

std::chrono::milliseconds clamped(int64_t timeout_ms) {
    const int64_t most = TEN_YEARS.count();
    return std::chrono::milliseconds(timeout_ms < 1 ? 1 : timeout_ms > most ? most : timeout_ms);
}

// In the device's thread. What fails ends the waits of its buffer, which then tell.
void run(const Post &post) noexcept {
    try {
        if (post.buffer->context->closed) throw std::runtime_error("the connections are closed");
        if (post.is_send) post.buffer->buffer->send(post.peer, post.slot, post.offset, post.bytes);
        else post.buffer->buffer->recv(post.peer, post.slot, post.offset, post.bytes);
    } catch (...) {
        {
            std::lock_guard<std::mutex> lock(post.buffer->mutex);
            post.buffer->error = std::current_exception();
        }
        post.buffer->buffer->abortWaitRecv();
        post.buffer->buffer->abortWaitSend();
    }
}

Agent::Agent(const std::shared_ptr<gloo::transport::Device> &device)
    : device_(std::static_pointer_cast<gloo::transport::tcp::Device>(device)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      armed_(Clock::time_point::max()), hurries_(0) {
    if (wake_ >= 0 && timer_ >= 0) {
        device_->registerDescriptor(wake_, EPOLLIN, this);
        device_->registerDescriptor(timer_, EPOLLIN, this);
        return;
    }
    if (wake_ >= 0) (void)close(wake_);
    if (timer_ >= 0) (void)close(timer_);
    throw std::runtime_error(std::strerror(EMFILE));
}

Agent::~Agent() {
    hurry(1);
    device_->unregisterDescriptor(timer_, this);
    device_->unregisterDescriptor(wake_, this);
    std::lock_guard<std::mutex> lock(mutex_); // behind work's last use of them
    (void)close(wake_);
    (void)close(timer_);
}

void Agent::post(const Post &post) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t one = 1;
    posts_.push_back(post);
    if (posts_.size() == 1) (void)!write(wake_, &one, sizeof one); // it cannot be full
}

void Agent::forget(const fsdp_gloo_context *context) {
    std::unique_lock<std::mutex> lock(mutex_);
    posts_.erase(std::remove_if(posts_.begin(), posts_.end(),
                                [=](const Post &p) { return p.buffer->context == context; }),
                 posts_.end());
    ran_.wait(lock, [&] { return running_.empty(); });
}

void Agent::arm(Clock::time_point at) {
    struct itimerspec when = {};
    armed_ = at;
    if (at != Clock::time_point::max()) {
        const int64_t left = std::max<int64_t>(
            std::chrono::duration_cast<std::chrono::nanoseconds>(at - Clock::now()).count(), 1);
        when.it_value.tv_sec = static_cast<time_t>(left / 1000000000);
        when.it_value.tv_nsec = static_cast<long>(left % 1000000000);
    }
    (void)timerfd_settime(timer_, 0, &when, nullptr);
}

void Agent::end_late_waits() {
    Clock::time_point next = Clock::time_point::max();
    const Clock::time_point now = Clock::now();
    for (Wait *wait : waits_) {
        if (wait->late) continue;
        if (wait->deadline > now) {
            next = std::min(next, wait->deadline);
            continue;
        }
        wait->late = true;
        if (wait->is_send) wait->buffer->buffer->abortWaitSend();
        else wait->buffer->buffer->abortWaitRecv();
    }
    arm(next);
}

void Agent::work() {
    uint64_t count;
    std::unique_lock<std::mutex> lock(mutex_);
    if (hurries_ == 0) (void)!read(wake_, &count, sizeof count); // else it is called again at once
    if (Clock::now() >= armed_ && read(timer_, &count, sizeof count) > 0) end_late_waits();
    while (!posts_.empty()) {
        running_.swap(posts_);
        lock.unlock();
        for (const Post &post : running_) run(post);
        lock.lock();
        running_.clear();
    }
    ran_.notify_all();
    const bool hurries = hurries_ > 0;
    lock.unlock();
    if (hurries) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Agent::hurry(int begins) {
    std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t one = 1;
    hurries_ += begins;
    (void)!write(wake_, &one, sizeof one);
}

// The timer stays at the earliest deadline that was asked for, though that wait may be over: most
// waits end long before, and cost no call of the system.
void Agent::begin(Wait *wait) {
    std::lock_guard<std::mutex> lock(mutex_);
    waits_.push_back(wait);
    if (wait->deadline < armed_) arm(wait->deadline);
}

void Agent::end(Wait *wait) {
    std::lock_guard<std::mutex> lock(mutex_);
    waits_.erase(std::find(waits_.begin(), waits_.end(), wait));
}

int post(const Post &post) noexcept {
    return guarded([&] {
        post.buffer->context->agent->post(post);
        return FSDP_GLOO_OK;
    });
}

/* Gloo must not see that a wait is late: it would close all connections from this thread, which
   would wait for Gloo's thread while it holds locks that a post needs. */
int await(fsdp_gloo_buffer *buffer, bool is_send, int64_t timeout_ms) noexcept {
    return guarded([&] {
        gloo::transport::UnboundBuffer *b = buffer->buffer.get();
        Wait wait = {buffer, is_send, Clock::now() + clamped(timeout_ms), false};
        bool done = false;
        std::exception_ptr error;
        buffer->context->agent->begin(&wait);
        try {
            done = is_send ? b->waitSend(TEN_YEARS) : b->waitRecv(TEN_YEARS);
        } catch (...) {
            error = std::current_exception();
        }
        buffer->context->agent->end(&wait);
        if (error) std::rethrow_exception(error);
        // It has ended and was late at the same time: the end of a wait is not to be kept.
        if (done && wait.late) (void)(is_send ? b->waitSend(TEN_YEARS) : b->waitRecv(TEN_YEARS));
        if (done) return int(FSDP_GLOO_OK);
        std::lock_guard<std::mutex> lock(buffer->mutex);
        if (buffer->error) std::rethrow_exception(buffer->error);
        return wait.late ? failed(FSDP_GLOO_TIMEOUT, "timed out") : int(FSDP_GLOO_ABORTED);
    });
}

void ignore_sigpipe() {
    struct sigaction now;
    if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
        (void)signal(SIGPIPE, SIG_IGN);
}

} // namespace

extern "C" {

const char *fsdp_gloo_error(void) { return last_error; }

int fsdp_gloo_device_create(const char *address, fsdp_gloo_device **out) {
    return guarded([&] {
        std::unique_ptr<fsdp_gloo_device> made(new fsdp_gloo_device);
        gloo::transport::tcp::attr attr;
        ignore_sigpipe();
        attr.hostname = address;
        made->device = gloo::transport::tcp::CreateDevice(attr);
        made->agent.reset(new Agent(made->device));
        *out = made.release();
        return FSDP_GLOO_OK;
    });
}

void fsdp_gloo_device_destroy(fsdp_gloo_device *device) { delete device; }

int fsdp_gloo_context_create(fsdp_gloo_device *device, int index, int size, int64_t timeout_ms,
                             fsdp_gloo_context **out) {
    return guarded([&] {
        std::unique_ptr<fsdp_gloo_context> made(new fsdp_gloo_context);
        made->context = device->device->createContext(index, size);
        made->agent = device->agent.get();
        made->closed = false;
        // Waiting for a connection takes five times this.
        made->context->setTimeout(clamped(timeout_ms / 5));
        for (int peer = 0; peer < size; peer++)
            if (peer != index) made->context->createPair(peer);
        *out = made.release();
        return FSDP_GLOO_OK;
    });
}

int fsdp_gloo_context_address(fsdp_gloo_context *context, int peer, void *address, size_t cap,
                              size_t *bytes) {
    return guarded([&] {
        std::vector<char> data = context->context->getPair(peer)->address().bytes();
        if (data.size() > cap) return failed(FSDP_GLOO_INTERNAL, "an address is too long");
        std::memcpy(address, data.data(), data.size());
        *bytes = data.size();
        return int(FSDP_GLOO_OK);
    });
}

int fsdp_gloo_context_connect(fsdp_gloo_context *context, int peer, const void *address,
                              size_t bytes) {
    return guarded([&] {
        const char *data = static_cast<const char *>(address);
        Hurry hurry(context->agent);
        context->context->getPair(peer)->connect(std::vector<char>(data, data + bytes));
        return FSDP_GLOO_OK;
    });
}

void fsdp_gloo_context_interrupt(fsdp_gloo_context *context, int peer) {
    (void)guarded([&] {
        context->context->getPair(peer)->close();
        return FSDP_GLOO_OK;
    });
}

void fsdp_gloo_context_close(fsdp_gloo_context *context) {
    Hurry hurry(context->agent);
    context->closed = true;
    context->agent->forget(context);
    for (int peer = 0; peer < context->context->size; peer++)
        (void)guarded([&] {
            if (peer != context->context->rank) context->context->getPair(peer)->close();
            return FSDP_GLOO_OK;
        });
}

void fsdp_gloo_context_destroy(fsdp_gloo_context *context) {
    Hurry hurry(context->agent);
    context->agent->forget(context);
    for (int peer = 0; peer < context->context->size; peer++) // buffers keep the context itself
        (void)guarded([&] {
            if (peer != context->context->rank) context->context->getPair(peer).reset();
            return FSDP_GLOO_OK;
        });
    delete context;
}

int fsdp_gloo_buffer_create(fsdp_gloo_context *context, void *memory, size_t bytes,
                            fsdp_gloo_buffer **out) {
    return guarded([&] {
        std::unique_ptr<fsdp_gloo_buffer> made(new fsdp_gloo_buffer);
        made->buffer = context->context->createUnboundBuffer(memory, bytes);
        made->context = context;
        *out = made.release();
        return FSDP_GLOO_OK;
    });
}

void fsdp_gloo_buffer_destroy(fsdp_gloo_buffer *buffer) { delete buffer; }

int fsdp_gloo_send(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes) {
    return post(Post{buffer, true, peer, slot, offset, bytes});
}

int fsdp_gloo_recv(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes) {
    return post(Post{buffer, false, peer, slot, offset, bytes});
}

int fsdp_gloo_wait_send(fsdp_gloo_buffer *buffer, int64_t timeout_ms) {
    return await(buffer, true, timeout_ms);
}

int fsdp_gloo_wait_recv(fsdp_gloo_buffer *buffer, int64_t timeout_ms) {
    return await(buffer, false, timeout_ms);
}

void fsdp_gloo_abort(fsdp_gloo_buffer *buffer) {
    (void)guarded([&] {
        buffer->buffer->abortWaitRecv();
        buffer->buffer->abortWaitSend();
        return FSDP_GLOO_OK;
    });
}

} // extern "C"
