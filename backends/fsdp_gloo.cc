/* fsdp_gloo.cc - the C functions of fsdp_gloo_shim.h, which call the Gloo library

       g++ -O2 -c fsdp_gloo.cc          and link with -lgloo -lstdc++ -pthread

   Requires C++11 or later, with exceptions. Compiles with the library of Debian 12 (0.5.0, May
   2022) and with upstream's (April 2026): it uses no interface that changed between them, except
   where this file checks for a header.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#include "fsdp_gloo_shim.h"

#include <gloo/common/error.h>      // IoException, EnforceNotMet
#include <gloo/transport/context.h> // pairs
#include <gloo/transport/device.h>
#include <gloo/transport/tcp/address.h>
#include <gloo/transport/tcp/device.h> // CreateDevice
#if __has_include(<gloo/common/memory.h>)
#include <gloo/transport/tcp/unbound_buffer.h>
#else
#include <gloo/transport/unbound_buffer.h>
#endif

#include <arpa/inet.h>    // inet_addr
#include <dirent.h>       // /proc/self/fd
#include <errno.h>        // errno
#include <fcntl.h>        // O_CLOEXEC, O_NONBLOCK
#include <linux/filter.h> // sock_filter
#include <netinet/in.h>   // sockaddr_in
#include <netinet/tcp.h>  // TCP_NODELAY
#include <poll.h>         // poll
#include <sched.h>        // sched_yield
#include <signal.h>       // SIGPIPE
#include <sys/epoll.h>    // EPOLLIN; watches connections
#include <sys/eventfd.h>  // wakes the driver
#include <sys/resource.h> // RLIMIT_NOFILE
#include <sys/socket.h>   // socket and others
#include <sys/stat.h>     // fstat
#include <sys/timerfd.h>  // wakes the driver at a deadline
#include <unistd.h>       // read, write, close, dup3

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#if !__has_include(<gloo/common/memory.h>)
/* Debian's package lacks headers that this class's header includes. The declaration repeats the
   class of that version, up to the last member that this file reads. */
namespace gloo {
namespace transport {
namespace tcp {
class Context;
class UnboundBuffer : public ::gloo::transport::UnboundBuffer {
  protected:
    std::shared_ptr<Context> context_;
    std::mutex m_;
    std::condition_variable recvCv_, sendCv_;
    bool abortWaitRecv_, abortWaitSend_;
    int recvCompletions_, recvRank_, sendCompletions_, sendRank_;
    std::exception_ptr ex_;
};
} // namespace tcp
} // namespace transport
} // namespace gloo
#endif

namespace {

namespace tcp = gloo::transport::tcp;
typedef std::chrono::steady_clock Clock;

// Gives this file access to private members of Gloo, which explicit instantiations may name.
template <typename Tag, typename Tag::type member> struct Reveal {
    friend typename Tag::type reveal(Tag) { return member; }
};
#define REVEAL(tag, owner, kind, member)                                                           \
    struct tag {                                                                                   \
        typedef kind owner::*type;                                                                 \
        friend type reveal(tag);                                                                   \
    };                                                                                             \
    template struct Reveal<tag, &owner::member>
REVEAL(LoopOf, tcp::Device, std::shared_ptr<tcp::Loop>, loop_);
REVEAL(EventsOf, tcp::Loop, int, fd_); // epoll's descriptor
REVEAL(TickOf, tcp::Loop, std::condition_variable, cv_);
REVEAL(LockOf, tcp::UnboundBuffer, std::mutex, m_);
REVEAL(ReceivedOf, tcp::UnboundBuffer, int, recvCompletions_);
REVEAL(SentOf, tcp::UnboundBuffer, int, sendCompletions_);
REVEAL(RecvAbortOf, tcp::UnboundBuffer, bool, abortWaitRecv_);
REVEAL(SendAbortOf, tcp::UnboundBuffer, bool, abortWaitSend_);
REVEAL(ErrorOf, tcp::UnboundBuffer, std::exception_ptr, ex_);

// Calls a handler, with or without its loop as an argument, which depends on the library's version.
template <typename Handler>
auto tell(Handler *handler, tcp::Loop *loop, int events, int)
    -> decltype(handler->handleEvents(*loop, events)) {
    handler->handleEvents(*loop, events);
}
template <typename Handler>
auto tell(Handler *handler, tcp::Loop *, int events, long)
    -> decltype(handler->handleEvents(events)) {
    handler->handleEvents(events);
}

// A send or receive to be posted.
struct Post {
    fsdp_gloo_buffer *buffer;
    bool is_send;
    int peer;
    uint64_t slot;
    size_t offset, bytes;
};

// A thread's wait for a buffer.
struct Wait {
    fsdp_gloo_buffer *buffer;
    bool is_send;
    Clock::time_point deadline;
    bool ended;               // true: the agent has ended the wait
    bool sleeps;              // true: the thread sleeps, and Gloo's thread must drive
    std::exception_ptr error; // reason for which it is or will be ended; NULL: the deadline
};

// The connection to one member.
struct Peer {
    fsdp_gloo_context *context;
    int index, fd;
    ino_t socket; // identifies the socket of the descriptor
    uint64_t id;  // for epoll, whose events may be older than the peer
    bool closed;  // true: this process has closed the connection
    bool ending;  // true: the peer sends no more; some bytes may not be read yet
    bool lost;    // true: the connection has ended, and all bytes are read
    char byte;
    std::unique_ptr<gloo::transport::UnboundBuffer> last; // a receive that is never sent
    std::exception_ptr error;                             // reason of the loss
};

// A function f that the driver runs.
struct Call {
    std::function<void()> f;
    bool done;
    std::exception_ptr error;
};

const int TRIES = 64; // most turns of a wait before it sleeps

/* The agent of a device. One thread at a time, the driver, runs the device: it posts all sends and
   receives, takes over and watches connections, and ends waits at their deadlines. The driver is
   Gloo's own thread, or a thread that waits: then Gloo's thread is parked, and a message wakes only
   the thread that waits for it. The driver only tries the lock of a connection, again and again;
   with few cores this keeps a thread that holds the lock from running, for milliseconds. Therefore
   only the driver takes these locks while messages are outstanding. A thread that closes a
   connection holds its lock until Gloo's thread has polled: before, all posts that would wait for
   the lock must have run.

   An exception in Gloo's own thread ends the process, and Gloo's loop never stops. Therefore the
   first event of the agent does not return: it does the work of Gloo's loop, and catches. After an
   exception all waits fail.

   When a connection ends, Gloo notifies the operations that have not begun, but not an outstanding
   one. Therefore one receive of each connection never begins; once it has failed, waits for the
   peer are ended. */
class Agent : public tcp::Handler {
  public:
    explicit Agent(const std::shared_ptr<gloo::transport::Device> &device);
    ~Agent();

    void post(const Post &post);
    // Forgets a context: its posts have run or never will, and its peers are no longer watched.
    void forget(const fsdp_gloo_context *context);

    // Runs f in the device's thread, and throws what it throws.
    void call(const std::function<void()> &f);

    void begin(Wait *wait);
    // Drives until the wait is over, or Gloo's thread must drive.
    void drive(Wait *wait);
    void end(Wait *wait);
    // Wakes the driver after another thread has ended a wait.
    void stir();

    // Driver only: replaces a socket of Gloo by one without events.
    void plug(int fd, tcp::Handler *handler);
    // Driver only: replaces a socket of Gloo by another one.
    void swap(int fd, int socket, tcp::Handler *handler, Peer *peer);
    // Throws if the program has closed Gloo's descriptors.
    void look();
    // Returns true if Gloo can close the connection. Gloo would end the process if the program has
    // closed its descriptors.
    bool can_close(const Peer *peer);
    // Fails all waits after an exception of the driver.
    void fail(const std::exception_ptr &error);

    // Gloo's thread polls every 10 ms, and the opening or closing of a connection waits for that.
    // Between hurry(1) and hurry(-1) it polls much more often.
    void hurry(int begins);
    // Makes Gloo's thread drive while other threads work.
    void overlap(int begins);

    void handleEvents(int) { handle(); }
    void handleEvents(tcp::Loop &, int) { handle(); }

  private:
    // Handles events of the descriptor that watches all connections.
    class Watch : public tcp::Handler {
      public:
        explicit Watch(Agent *agent) : agent_(agent) {}
        void handleEvents(int) { agent_->hear(); }
        void handleEvents(tcp::Loop &, int) { agent_->hear(); }

      private:
        Agent *const agent_;
    };

    void handle();
    void hear();
    void work();
    void serve();
    int listen(struct epoll_event *events, int most, bool waits);
    void turn(bool waits) noexcept;
    void park(std::unique_lock<std::mutex> &lock);
    bool can_park() const { return needs_ == 0 && sleepers_ == 0 && !broken_; }
    bool take(std::unique_lock<std::mutex> &lock);
    void release();
    void call_back();
    void wake();
    void end_wait(Wait *wait, const std::exception_ptr &error);
    void end_late_waits();
    void look_for_ends();
    void arm(Clock::time_point at);
    void end() noexcept;

    const std::shared_ptr<tcp::Device> device_;
    tcp::Loop *const loop_;
    Watch watch_;
    bool serves_;             // for Gloo's thread only
    std::atomic<bool> tells_; // true: the driver is in one of Gloo's handlers
    int tries_;               // turns of a wait before it sleeps
    uint32_t turns_;          // number of turns with a wait so far
    const int wake_, timer_, ends_, inert_;
    std::mutex mutex_;               // guards the following members
    std::condition_variable ran_;    // running_ is empty again, a call is done, the driver changes
    std::condition_variable parked_; // for Gloo's thread
    bool is_parked_, is_driven_;     // Gloo's thread is parked; another thread drives
    bool quits_, has_quit_;
    int needs_;    // reasons for which Gloo's thread must drive
    int sleepers_; // waits that do not drive
    int asks_;     // threads that request to drive
    std::vector<Post> posts_, running_;
    std::vector<Call *> calls_;
    std::vector<Wait *> waits_;
    std::vector<Peer *> peers_; // watched peers
    uint64_t ids_;              // number of ids so far
    std::exception_ptr broken_; // the driver's first exception
    Clock::time_point armed_;   // time of the timer; max(): not armed
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
    std::vector<Peer> peers;
    std::atomic<int> first_lost; // -1: none
    std::atomic<bool> closed;
};

struct fsdp_gloo_buffer {
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
    fsdp_gloo_context *context;
    int peer; // the last post's; guarded by the agent's mutex
    std::mutex mutex;
    std::exception_ptr error; // reason for which a post has failed
};

namespace {

thread_local char last_error[256] = "";

// Keeps a text without its position in Gloo and without addresses, which are not those of peers.
int failed(int status, const char *text) noexcept {
    const char *end = *text == '[' ? std::strstr(text, "] ") : nullptr;
    if (end) text = end + 2;
    const char *from = std::strstr(text, " ["), *to = from ? std::strchr(from, ']') : nullptr;
    if (!to) from = to = text + std::strlen(text);
    else to += 1 + std::strspn(to + 1, ":0123456789") - (to[1] == ':' && to[2] == ' ');
    std::snprintf(last_error, sizeof last_error, "%.*s%s", int(from - text), text, to);
    return status;
}

// Returns the status of the exception that is being handled.
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

// The longest timeout: much more than ten years overflows in the library. The shortest is 1 ms, as
// 0 would mean that the deadline has passed.
const std::chrono::milliseconds TEN_YEARS(315360000000);
const std::chrono::milliseconds TICK(50); // period of checks of awaited peers

std::chrono::milliseconds clamped(int64_t timeout_ms) {
    const int64_t most = TEN_YEARS.count();
    return std::chrono::milliseconds(timeout_ms < 1 ? 1 : timeout_ms > most ? most : timeout_ms);
}

// Runs a post, in the driver. A failure ends the waits of its buffer, which report it.
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

[[noreturn]] void throw_errno(const char *what) {
    throw std::runtime_error(std::string(what) + ": " + std::strerror(errno));
}

// Keeps descriptors 0 to 2 in use, so that Gloo's next descriptor cannot replace a closed stdin,
// stdout or stderr.
class Floor {
  public:
    Floor() : opened_(0) {
        for (int fd; (fd = open("/dev/null", O_RDWR | O_CLOEXEC)) >= 0; opened_ |= 1 << fd)
            if (fd > 2) {
                (void)close(fd);
                break;
            }
    }
    ~Floor() {
        for (int fd = 0; fd < 3; fd++)
            if (opened_ >> fd & 1) (void)close(fd);
    }
    Floor(const Floor &) = delete;
    Floor &operator=(const Floor &) = delete;

  private:
    int opened_;
};

class Descriptor {
  public:
    explicit Descriptor(int number) : fd(number) {}
    ~Descriptor() {
        if (fd >= 0) (void)close(fd);
    }
    Descriptor(const Descriptor &) = delete;
    Descriptor &operator=(const Descriptor &) = delete;

    const int fd;
};

// The device's own sockets: only connections within this process go there.
const char LOOPBACK[] = "127.127.127.127";

/* Returns a replacement for a socket of Gloo that must accept no callers. In upstream's library an
   event of the old socket may be outstanding: accept must return EAGAIN. */
int open_inert() {
#if __has_include(<gloo/transport/tcp/listener.h>)
    struct sock_filter drop_all = BPF_STMT(BPF_RET | BPF_K, 0);
    const struct sock_fprog filter = {1, &drop_all};
    struct sockaddr_in at = {};
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = inet_addr(LOOPBACK);
    if (fd < 0 ||
        (!setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof filter) &&
         !bind(fd, reinterpret_cast<struct sockaddr *>(&at), sizeof at) && !listen(fd, 1)))
        return fd;
    (void)close(fd);
    return -1;
#else
    return eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
#endif
}

Agent::Agent(const std::shared_ptr<gloo::transport::Device> &device)
    : device_(std::static_pointer_cast<tcp::Device>(device)),
      loop_((device_.get()->*reveal(LoopOf())).get()), watch_(this), serves_(false), tells_(false),
      tries_(TRIES), turns_(0), wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      timer_(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK)),
      ends_(epoll_create1(EPOLL_CLOEXEC)), inert_(open_inert()), is_parked_(false),
      is_driven_(false), quits_(false), has_quit_(false), needs_(0), sleepers_(0), asks_(0),
      ids_(0), armed_(Clock::time_point::max()), hurries_(0) {
    try {
        if (wake_ < 0 || timer_ < 0 || ends_ < 0 || inert_ < 0) throw_errno("eventfd");
        device_->registerDescriptor(wake_, EPOLLIN, this); // the only one, when serve begins
        call([] {});
        device_->registerDescriptor(timer_, EPOLLIN, this);
        device_->registerDescriptor(ends_, EPOLLIN, &watch_);
    } catch (...) {
        end();
        throw;
    }
}

Agent::~Agent() { end(); }

// Makes Gloo's thread leave, which may not yet have begun to serve.
void Agent::end() noexcept {
    hurry(1);
    for (int fd : {ends_, timer_, wake_}) // the last one wakes those before
        (void)guarded([&] {
            device_->unregisterDescriptor(fd, this);
            return 0;
        });
    std::unique_lock<std::mutex> lock(mutex_);
    quits_ = true;
    ran_.wait(lock, [&] { return has_quit_ || !serves_; });
    for (int fd : {wake_, timer_, ends_, inert_})
        if (fd >= 0) (void)close(fd);
}

void Agent::handle() {
    if (serves_) return work();
    serves_ = true;
    tcp::Loop *const loop = loop_;
    serve();
    for (;;) // this object may be gone; the loop returns when the device ends
        try {
            return loop->run();
        } catch (...) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
}

// Reads events of epoll. A thread that waits polls for about the time of waking a core, and then
// sleeps. If no event arrives before it sleeps, the next calls poll for less.
int Agent::listen(struct epoll_event *events, int most, bool waits) {
    const int all = loop_->*reveal(EventsOf());
    const int tries = !waits ? 0 : ++turns_ % 64 ? tries_ : TRIES;
    for (int i = 0; i < tries; i++) {
        const int count = epoll_wait(all, events, most, 0);
        tries_ = TRIES;
        if (count != 0) return count;
        (void)sched_yield();
    }
    if (waits) tries_ = tries / 4;
    return epoll_wait(all, events, most, 10);
}

/* Runs one turn of Gloo's loop, in the driver. Notes the connection that has ended first before
   Gloo closes any. */
void Agent::turn(bool waits) noexcept {
    struct epoll_event events[64];
    tcp::Handler *const first = &watch_;
    try {
        const int count = listen(events, 64, waits);
        if (count < 0 && errno != EINTR) throw_errno("epoll_wait");
        for (int i = 0; i < count; i++)
            if (events[i].data.ptr == first) hear();
        tells_ = true;
        for (int i = 0; i < count; i++)
            tell(static_cast<tcp::Handler *>(events[i].data.ptr), loop_, int(events[i].events), 0);
    } catch (...) {
        fail(std::current_exception());
        std::this_thread::sleep_for(std::chrono::milliseconds(1)); // the next turn may throw, too
    }
    tells_ = false;
}

// Runs Gloo's loop in Gloo's thread, until the agent ends.
void Agent::serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!quits_) {
        if (asks_ > 0 && can_park()) park(lock);
        lock.unlock();
        turn(false);
        (loop_->*reveal(TickOf())).notify_all();
        lock.lock();
    }
    has_quit_ = true;
    ran_.notify_all();
}

/* Parks Gloo's thread until it must drive. If another driver finds the end of a connection, Gloo
   waits for the next poll of Gloo's thread: so the parked thread signals polls, often while the
   driver is in a handler. */
void Agent::park(std::unique_lock<std::mutex> &lock) {
    is_parked_ = true;
    ran_.notify_all();
    while (is_driven_ || can_park()) {
        parked_.wait_for(lock, std::chrono::microseconds(is_driven_ && tells_ ? 100 : 10000));
        if (is_driven_) (loop_->*reveal(TickOf())).notify_all();
    }
    is_parked_ = false;
}

bool Agent::take(std::unique_lock<std::mutex> &lock) {
    if (!is_parked_ && can_park()) {
        asks_++;
        wake();
        ran_.wait(lock, [&] { return is_parked_ || !can_park(); });
        asks_--;
    }
    if (!is_parked_ || is_driven_ || !can_park()) return false;
    return is_driven_ = true;
}

void Agent::release() {
    is_driven_ = false;
    if (!can_park()) parked_.notify_one();
    ran_.notify_all();
}

// Makes Gloo's thread drive as soon as no other thread does.
void Agent::call_back() {
    if (needs_ && is_driven_) wake();
    parked_.notify_one();
    ran_.notify_all();
}

// Makes the present or next driver poll again.
void Agent::wake() {
    const uint64_t one = 1;
    (void)!write(wake_, &one, sizeof one); // its counter cannot be full
}

void Agent::fail(const std::exception_ptr &error) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!broken_) broken_ = error;
    call_back();
    for (Wait *wait : waits_) end_wait(wait, error);
}

void Agent::post(const Post &post) {
    std::unique_lock<std::mutex> lock(mutex_);
    post.buffer->peer = post.peer;
    if (is_parked_ && !is_driven_ && can_park() && posts_.empty()) {
        is_driven_ = true;
        lock.unlock();
        try {
            look(); // Gloo would end the process if a descriptor is closed
            run(post);
        } catch (...) {
            fail(std::current_exception());
        }
        lock.lock();
        return release();
    }
    posts_.push_back(post);
    if (posts_.size() == 1) wake();
}

void Agent::call(const std::function<void()> &f) {
    Call call = {f, false, nullptr};
    overlap(1);
    std::unique_lock<std::mutex> lock(mutex_);
    calls_.push_back(&call);
    wake();
    ran_.wait(lock, [&] { return call.done; });
    needs_--;
    if (call.error) std::rethrow_exception(call.error);
}

void Agent::forget(const fsdp_gloo_context *context) {
    std::unique_lock<std::mutex> lock(mutex_);
    posts_.erase(std::remove_if(posts_.begin(), posts_.end(),
                                [=](const Post &p) { return p.buffer->context == context; }),
                 posts_.end());
    peers_.erase(std::remove_if(peers_.begin(), peers_.end(),
                                [=](const Peer *p) { return p->context == context; }),
                 peers_.end());
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

void Agent::end_wait(Wait *wait, const std::exception_ptr &error) {
    if (wait->ended) return;
    wait->ended = true;
    if (error) wait->error = error;
    if (wait->is_send) wait->buffer->buffer->abortWaitSend();
    else wait->buffer->buffer->abortWaitRecv();
}

void Agent::end_late_waits() {
    Clock::time_point next = Clock::time_point::max();
    const Clock::time_point now = Clock::now();
    for (Wait *wait : waits_) {
        if (wait->deadline <= now) end_wait(wait, nullptr);
        else if (!wait->ended) next = std::min(next, std::min(wait->deadline, now + TICK));
    }
    arm(next);
}

void Agent::hear() {
    struct epoll_event events[16];
    std::lock_guard<std::mutex> lock(mutex_);
    const int count = epoll_wait(ends_, events, 16, 0);
    for (int i = 0; i < count; i++)
        for (Peer *peer : peers_)
            if (peer->id == events[i].data.u64) {
                int none = -1;
                peer->ending = true;
                peer->context->first_lost.compare_exchange_strong(none, peer->index);
            }
    look_for_ends();
}

// Returns the error of the receive that never begins; NULL: it has not failed.
std::exception_ptr end_of(gloo::transport::UnboundBuffer *last) {
    try {
        last->abortWaitRecv();
        (void)last->waitRecv(nullptr, TEN_YEARS); // aborted already
    } catch (...) {
        return std::current_exception();
    }
    return nullptr;
}

bool is_for(const Wait *wait, const Peer *peer) {
    return wait->buffer->context == peer->context && wait->buffer->peer == peer->index;
}

/* Finds peers whose connections Gloo has ended, after it has read all their bytes, and ends the
   waits for them. Polls again soon for a peer that is ending. If Gloo has closed a connection
   before its event, there is no event: so awaited peers are always checked. */
void Agent::look_for_ends() {
    bool is_near = false;
    for (Peer *peer : peers_) {
        const bool is_awaited = std::any_of(waits_.begin(), waits_.end(),
                                            [=](const Wait *wait) { return is_for(wait, peer); });
        if (peer->lost || (!peer->ending && !is_awaited)) continue;
        peer->error = end_of(peer->last.get());
        peer->lost = peer->error != nullptr;
        is_near |= peer->ending && !peer->lost;
        if (!peer->lost) continue;
        int none = -1;
        peer->context->first_lost.compare_exchange_strong(none, peer->index);
        for (Wait *wait : waits_)
            if (is_for(wait, peer)) end_wait(wait, peer->error);
    }
    const Clock::time_point soon = Clock::now() + std::chrono::milliseconds(1);
    if (is_near && soon < armed_) arm(soon);
}

void Agent::work() {
    uint64_t count;
    std::unique_lock<std::mutex> lock(mutex_);
    if (hurries_ == 0) (void)!read(wake_, &count, sizeof count); // unread: the loop calls it again
    if (Clock::now() >= armed_ && read(timer_, &count, sizeof count) > 0) {
        end_late_waits();
        look_for_ends();
    }
    while (!posts_.empty() || !calls_.empty()) {
        std::vector<Call *> calls;
        calls.swap(calls_);
        running_.swap(posts_);
        lock.unlock();
        for (const Post &post : running_) run(post);
        for (Call *call : calls) try {
                call->f();
            } catch (...) {
                call->error = std::current_exception();
            }
        lock.lock();
        for (Call *call : calls) call->done = true;
        running_.clear();
    }
    ran_.notify_all();
    const bool hurries = hurries_ > 0;
    lock.unlock();
    if (hurries) std::this_thread::sleep_for(std::chrono::microseconds(100));
}

void Agent::hurry(int begins) {
    overlap(begins);
    std::unique_lock<std::mutex> lock(mutex_);
    hurries_ += begins;
    wake();
    ran_.wait(lock, [&] { return !is_driven_ || begins < 0; });
}

void Agent::overlap(int begins) {
    std::lock_guard<std::mutex> lock(mutex_);
    needs_ += begins;
    if (begins > 0) call_back();
}

void Agent::look() {
    struct epoll_event as_it_is = epoll_event();
    as_it_is.events = EPOLLIN;
    as_it_is.data.ptr = static_cast<tcp::Handler *>(this);
    if (epoll_ctl(loop_->*reveal(EventsOf()), EPOLL_CTL_MOD, wake_, &as_it_is))
        throw_errno("epoll_ctl");
}

void Agent::stir() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (is_driven_) wake();
}

// Returns true if a wait for the buffer would return without a sleep.
bool is_over(gloo::transport::UnboundBuffer *buffer, bool is_send) {
    tcp::UnboundBuffer *b = static_cast<tcp::UnboundBuffer *>(buffer);
    std::lock_guard<std::mutex> lock(b->*reveal(LockOf()));
    if (b->*reveal(ErrorOf())) return true;
    return is_send ? b->*reveal(SentOf()) > 0 || b->*reveal(SendAbortOf())
                   : b->*reveal(ReceivedOf()) > 0 || b->*reveal(RecvAbortOf());
}

// Returns true if is_over sees an abort. In an unknown version of the library it may not; then only
// Gloo's thread drives.
bool can_look(gloo::transport::UnboundBuffer *fresh) {
    if (is_over(fresh, false) || is_over(fresh, true)) return false;
    fresh->abortWaitRecv();
    return is_over(fresh, false) && !is_over(fresh, true) && !fresh->waitRecv(TEN_YEARS) &&
           !is_over(fresh, false);
}

/* Begins a wait. The timer stays at the earliest requested time, at most a TICK after the start of
   a wait, even if that wait is over: most waits end long before, and need no system call. */
void Agent::begin(Wait *wait) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int peer = wait->buffer->peer;
    waits_.push_back(wait);
    if (broken_) return end_wait(wait, broken_);
    if (peer >= 0) wait->error = wait->buffer->context->peers[size_t(peer)].error;
    if (wait->error) // if its messages have arrived, the wait is already over
        wait->deadline = std::min(wait->deadline, Clock::now() + std::chrono::milliseconds(50));
    const Clock::time_point look = std::min(wait->deadline, Clock::now() + TICK);
    if (look < armed_) arm(look);
}

void Agent::drive(Wait *wait) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (take(lock)) {
        bool over;
        do {
            lock.unlock();
            over = is_over(wait->buffer->buffer.get(), wait->is_send);
            if (!over) turn(true);
            lock.lock();
        } while (!over && needs_ == 0);
        release();
        if (over) return;
    }
    wait->sleeps = true;
    sleepers_++;
    call_back();
}

void Agent::end(Wait *wait) {
    std::lock_guard<std::mutex> lock(mutex_);
    sleepers_ -= wait->sleeps;
    waits_.erase(std::find(waits_.begin(), waits_.end(), wait));
}

void Agent::plug(int fd, tcp::Handler *handler) {
    if (dup3(inert_, fd, O_CLOEXEC) < 0) throw_errno("dup3");
    device_->registerDescriptor(fd, EPOLLIN, handler); // the old socket's registration has ended
}

void Agent::swap(int fd, int socket, tcp::Handler *handler, Peer *peer) {
    struct epoll_event event = {};
    int one = 1;
    if (fcntl(socket, F_SETFL, O_NONBLOCK) ||
        setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one) ||
        dup3(socket, fd, O_CLOEXEC) < 0)
        throw_errno("dup3");
    device_->registerDescriptor(fd, EPOLLIN, handler);
    struct stat status;
    std::lock_guard<std::mutex> lock(mutex_);
    peer->id = ++ids_;
    peer->fd = fd;
    if (!fstat(fd, &status)) peer->socket = status.st_ino;
    event.events = EPOLLRDHUP | EPOLLET;
    event.data.u64 = peer->id;
    if (epoll_ctl(ends_, EPOLL_CTL_ADD, fd, &event)) throw_errno("epoll_ctl");
    peers_.push_back(peer);
}

bool Agent::can_close(const Peer *peer) {
    struct stat status;
    for (int turn = 0; turn < 50; turn++) {
        if (peer->closed || !peer->last || end_of(peer->last.get())) return true; // it is
        if (!fstat(peer->fd, &status) && status.st_ino == peer->socket)
            return guarded([&] {
                       look();
                       return 0;
                   }) == 0;
        // Gloo closes the descriptor a moment before it tells the receive.
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
}

int post(const Post &post) noexcept {
    return guarded([&] {
        post.buffer->context->agent->post(post);
        return FSDP_GLOO_OK;
    });
}

/* Waits for a buffer. Gloo must not find that a deadline has passed: it would close all connections
   from this thread, which would wait for Gloo's thread while it holds locks that a post needs. */
int await(fsdp_gloo_buffer *buffer, bool is_send, int64_t timeout_ms) noexcept {
    return guarded([&] {
        gloo::transport::UnboundBuffer *b = buffer->buffer.get();
        Wait wait = {buffer, is_send, Clock::now() + clamped(timeout_ms), false, false, nullptr};
        bool done = false;
        std::exception_ptr error;
        const auto ask = [&] { return is_send ? b->waitSend(TEN_YEARS) : b->waitRecv(TEN_YEARS); };
        const bool begins = !is_over(b, is_send);
        if (begins) buffer->context->agent->begin(&wait);
        if (begins) buffer->context->agent->drive(&wait);
        try {
            done = ask();
        } catch (...) {
            error = std::current_exception();
        }
        if (begins) buffer->context->agent->end(&wait);
        if (error) std::rethrow_exception(error);
        // If the operation has completed and was ended at the same time, Gloo reports both, in any
        // order.
        if (done && wait.ended) (void)ask();
        else if (wait.ended && is_over(b, is_send)) done = ask();
        if (done) return int(FSDP_GLOO_OK);
        std::lock_guard<std::mutex> lock(buffer->mutex);
        if (buffer->error) std::rethrow_exception(buffer->error);
        if (!wait.ended) return int(FSDP_GLOO_ABORTED);
        if (wait.error) std::rethrow_exception(wait.error);
        return failed(FSDP_GLOO_TIMEOUT, "timed out");
    });
}

void ignore_sigpipe() {
    struct sigaction now;
    if (sigaction(SIGPIPE, nullptr, &now) == 0 && now.sa_handler == SIG_DFL)
        (void)signal(SIGPIPE, SIG_IGN);
}

struct sockaddr_in ipv4(const gloo::transport::Address &address) {
    const std::vector<char> bytes = address.bytes();
    struct sockaddr_in out = {};
    if (bytes.size() < sizeof out) throw std::runtime_error("Gloo has an unknown kind of address");
    std::memcpy(&out, bytes.data(), sizeof out);
    return out;
}

bool is_same(const struct sockaddr_in &a, const struct sockaddr_in &b) {
    return a.sin_family == AF_INET && b.sin_family == AF_INET && a.sin_port == b.sin_port &&
           a.sin_addr.s_addr == b.sin_addr.s_addr;
}

// Returns true if fd is the TCP socket at `local` that is connected to `peer`; NULL: that listens.
bool is_socket(int fd, const struct sockaddr_in &local, const struct sockaddr_in *peer) {
    struct sockaddr_in at = {};
    socklen_t size = sizeof at;
    int listens = 0;
    if (getsockname(fd, reinterpret_cast<struct sockaddr *>(&at), &size) || !is_same(at, local))
        return false;
    size = sizeof listens;
    if (!peer) return !getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &size) && listens;
    size = sizeof at;
    return !getpeername(fd, reinterpret_cast<struct sockaddr *>(&at), &size) && is_same(at, *peer);
}

// Finds the descriptor of a socket of Gloo, which does not publish it.
int descriptor_of(const struct sockaddr_in &local, const struct sockaddr_in *peer) {
    struct rlimit limit = {};
    int found = -1;
    DIR *all = opendir("/proc/self/fd");
    if (!all) (void)getrlimit(RLIMIT_NOFILE, &limit);
    // A new descriptor is the lowest that is free: the socket's is probably just below that of
    // `all`. To look at each one takes long in a process with many.
    const int next = all ? dirfd(all) : 0;
    for (int fd = next - 1; fd >= 0 && fd > next - 16 && found < 0; fd--)
        if (is_socket(fd, local, peer)) found = fd;
    for (int fd = 0; rlim_t(fd) < limit.rlim_cur && found < 0; fd++)
        if (is_socket(fd, local, peer)) found = fd;
    for (struct dirent *entry; all && found < 0 && (entry = readdir(all));)
        if (is_socket(std::atoi(entry->d_name), local, peer)) found = std::atoi(entry->d_name);
    if (all) (void)closedir(all);
    if (found < 0) throw std::runtime_error("a socket of Gloo's cannot be found");
    return found;
}

/* Replaces Gloo's listening socket. Other processes of this host could find it; Gloo would take
   them for peers, or end the process. Gloo need not listen: it calls in all its connections. */
void stop_listening(Agent *agent, gloo::transport::Pair *pair) {
    agent->plug(descriptor_of(ipv4(pair->address()), nullptr), dynamic_cast<tcp::Handler *>(pair));
}

// Listens on an address below LOOPBACK: Gloo is the caller if the peer's address is lower.
int listen_below(struct sockaddr_in *at) {
    socklen_t size = sizeof *at;
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    *at = sockaddr_in();
    at->sin_family = AF_INET;
    at->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd < 0 || bind(fd, reinterpret_cast<struct sockaddr *>(at), size) ||
        listen(fd, SOMAXCONN) || getsockname(fd, reinterpret_cast<struct sockaddr *>(at), &size)) {
        const int why = errno;
        if (fd >= 0) (void)close(fd);
        errno = why;
        throw_errno("listen");
    }
    return fd;
}

// Accepts the call of a pair at `listener`, which other processes may call, too.
int accept_from(int listener, const struct sockaddr_in &pair) {
    for (int tries = 0; tries < 100000; tries++) {
        struct sockaddr_in from = {};
        socklen_t size = sizeof from;
        struct pollfd p = {listener, POLLIN, 0};
        (void)poll(&p, 1, 1000);
        const int fd = accept4(listener, reinterpret_cast<struct sockaddr *>(&from), &size,
                               SOCK_CLOEXEC);
        if (fd >= 0 && is_same(from, pair)) return fd;
        if (fd >= 0) (void)close(fd);
        else if (errno != EINTR && errno != ECONNABORTED) throw_errno("accept");
    }
    throw std::runtime_error("accept: too many untrusted peers");
}

/* Connects a pair with the peer's socket. Gloo makes its connections itself, and accepts any caller
   as the peer. So the pair connects to this process, and then its descriptor gets the socket. */
void connect(fsdp_gloo_context *c, int index, int socket) {
    gloo::transport::Pair *pair = nullptr;
    Floor floor;
    c->agent->call([&] {
        pair = c->context->createPair(index).get();
#if !__has_include(<gloo/transport/tcp/listener.h>)
        stop_listening(c->agent, pair); // each pair has a listening socket
#endif
    });
    struct sockaddr_in at;
    const Descriptor listener(listen_below(&at));
    {
        Hurry hurry(c->agent);
        pair->connect(tcp::Address(reinterpret_cast<struct sockaddr *>(&at), sizeof at).bytes());
    }
    const struct sockaddr_in own = ipv4(pair->address());
    const Descriptor accepted(accept_from(listener.fd, own));
    const int fd = descriptor_of(own, &at);
    Peer *peer = &c->peers[size_t(index)];
    peer->context = c;
    peer->index = index;
    c->agent->call([&] {
        peer->last = c->context->createUnboundBuffer(&peer->byte, 1);
        c->agent->swap(fd, socket, dynamic_cast<tcp::Handler *>(pair), peer);
        try {
            peer->last->recv(index, FSDP_GLOO_SLOT_LAST, 0, 1);
        } catch (const gloo::EnforceNotMet &) { // the pair is closed
            throw gloo::IoException("the peer has closed the connection");
        }
    });
}

// Stops the listener that upstream's Gloo has for all contexts.
void make_silent(fsdp_gloo_device *made) {
#if __has_include(<gloo/transport/tcp/listener.h>)
    made->agent->call([&] {
        std::shared_ptr<gloo::transport::Context> context = made->device->createContext(0, 2);
        context->setTimeout(clamped(1));
        stop_listening(made->agent.get(), context->createPair(1).get());
    });
#else
    (void)made;
#endif
}

} // namespace

extern "C" {

const char *fsdp_gloo_error(void) { return last_error; }

int fsdp_gloo_device_create(fsdp_gloo_device **out) {
    return guarded([&] {
        std::unique_ptr<fsdp_gloo_device> made(new fsdp_gloo_device);
        tcp::attr attr;
        Floor floor;
        ignore_sigpipe();
        attr.hostname = LOOPBACK;
        made->device = tcp::CreateDevice(attr);
        made->agent.reset(new Agent(made->device));
        make_silent(made.get());
        *out = made.release();
        return FSDP_GLOO_OK;
    });
}

void fsdp_gloo_device_destroy(fsdp_gloo_device *device) { delete device; }

int fsdp_gloo_context_create(fsdp_gloo_device *device, int index, int size,
                             fsdp_gloo_context **out) {
    return guarded([&] {
        std::unique_ptr<fsdp_gloo_context> made(new fsdp_gloo_context);
        made->context = device->device->createContext(index, size);
        made->context->setTimeout(std::chrono::seconds(30)); // for connections within this process
        made->agent = device->agent.get();
        char byte;
        if (!can_look(made->context->createUnboundBuffer(&byte, 1).get())) made->agent->overlap(1);
        made->peers.resize(size_t(size));
        made->first_lost = -1;
        made->closed = false;
        *out = made.release();
        return FSDP_GLOO_OK;
    });
}

int fsdp_gloo_context_connect(fsdp_gloo_context *context, int peer, int socket) {
    const Descriptor given(socket);
    return guarded([&] {
        connect(context, peer, given.fd);
        return FSDP_GLOO_OK;
    });
}

int fsdp_gloo_context_first_lost(const fsdp_gloo_context *context) { return context->first_lost; }

void fsdp_gloo_context_close(fsdp_gloo_context *context) {
    Hurry hurry(context->agent);
    context->closed = true;
    context->agent->forget(context);
    for (int peer = 0; peer < context->context->size; peer++)
        (void)guarded([&] {
            Peer *p = &context->peers[size_t(peer)];
            if (!p->last || !context->agent->can_close(p)) return FSDP_GLOO_OK;
            context->context->getPair(peer)->close();
            p->closed = true;
            return FSDP_GLOO_OK;
        });
}

void fsdp_gloo_context_overlap(fsdp_gloo_context *context, int begins) {
    context->agent->overlap(begins ? 1 : -1);
}

void fsdp_gloo_context_destroy(fsdp_gloo_context *context) {
    Hurry hurry(context->agent);
    context->agent->forget(context);
    for (int peer = 0; peer < context->context->size; peer++) // buffers keep the context alive
        (void)guarded([&] {
            std::unique_ptr<gloo::transport::Pair> &pair = context->context->getPair(peer);
            if (context->agent->can_close(&context->peers[size_t(peer)])) pair.reset();
            else (void)pair.release(); // leaks the pair, as its end would end the process
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
        made->peer = -1;
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
        buffer->context->agent->stir();
        return FSDP_GLOO_OK;
    });
}

} // extern "C"
