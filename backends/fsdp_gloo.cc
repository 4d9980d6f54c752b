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

#include <signal.h> // SIGPIPE

#include <chrono>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <new>
#include <vector>

struct fsdp_gloo_device {
    std::shared_ptr<gloo::transport::Device> device;
};

struct fsdp_gloo_context {
    std::shared_ptr<gloo::transport::Context> context;
};

struct fsdp_gloo_buffer {
    std::unique_ptr<gloo::transport::UnboundBuffer> buffer;
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

// 0 ms would mean "late already", and more than ten years overflows in the library.
std::chrono::milliseconds clamped(int64_t timeout_ms) {
    const int64_t most = 315360000000;
    return std::chrono::milliseconds(timeout_ms < 1 ? 1 : timeout_ms > most ? most : timeout_ms);
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
        context->context->getPair(peer)->connect(std::vector<char>(data, data + bytes));
        return FSDP_GLOO_OK;
    });
}

void fsdp_gloo_context_close(fsdp_gloo_context *context) {
    for (int peer = 0; peer < context->context->size; peer++)
        (void)guarded([&] {
            if (peer != context->context->rank) context->context->getPair(peer)->close();
            return FSDP_GLOO_OK;
        });
}

void fsdp_gloo_context_destroy(fsdp_gloo_context *context) { delete context; }

int fsdp_gloo_buffer_create(fsdp_gloo_context *context, void *memory, size_t bytes,
                            fsdp_gloo_buffer **out) {
    return guarded([&] {
        std::unique_ptr<fsdp_gloo_buffer> made(new fsdp_gloo_buffer);
        made->buffer = context->context->createUnboundBuffer(memory, bytes);
        *out = made.release();
        return FSDP_GLOO_OK;
    });
}

void fsdp_gloo_buffer_destroy(fsdp_gloo_buffer *buffer) { delete buffer; }

int fsdp_gloo_send(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes) {
    return guarded([&] {
        buffer->buffer->send(peer, slot, offset, bytes);
        return FSDP_GLOO_OK;
    });
}

int fsdp_gloo_recv(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes) {
    return guarded([&] {
        buffer->buffer->recv(peer, slot, offset, bytes);
        return FSDP_GLOO_OK;
    });
}

int fsdp_gloo_wait_send(fsdp_gloo_buffer *buffer, int64_t timeout_ms) {
    return guarded([&] {
        return buffer->buffer->waitSend(clamped(timeout_ms)) ? FSDP_GLOO_OK : FSDP_GLOO_ABORTED;
    });
}

int fsdp_gloo_wait_recv(fsdp_gloo_buffer *buffer, int64_t timeout_ms) {
    return guarded([&] {
        return buffer->buffer->waitRecv(clamped(timeout_ms)) ? FSDP_GLOO_OK : FSDP_GLOO_ABORTED;
    });
}

void fsdp_gloo_abort(fsdp_gloo_buffer *buffer) {
    (void)guarded([&] {
        buffer->buffer->abortWaitRecv();
        buffer->buffer->abortWaitSend();
        return FSDP_GLOO_OK;
    });
}

} // extern "C"
