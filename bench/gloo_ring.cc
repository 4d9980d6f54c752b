// gloo_ring.cc - see gloo_ring.h. Part of bench_comm only; the backend does not use these
// collectives.
// SPDX-License-Identifier: MIT
#include "bench/gloo_ring.h"

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>

#include <gloo/allgather.h>
#include <gloo/allreduce.h>
#include <gloo/math.h>
#include <gloo/rendezvous/context.h>
#include <gloo/rendezvous/file_store.h>
#include <gloo/transport/tcp/device.h>

struct gloo_ring {
    std::shared_ptr<gloo::rendezvous::Context> context;
    uint32_t tag; // the next collective's tag
    std::unique_ptr<gloo::transport::UnboundBuffer> out, in; // buffers of gloo_ring_exchange
};

namespace {

template <typename F> int guarded(F f) {
    try {
        f();
        return 0;
    } catch (const std::exception &e) {
        std::fprintf(stderr, "gloo: %s\n", e.what());
    }
    return -1;
}

void sum(void *out, const void *a, const void *b, size_t count) {
    gloo::sum<float>(out, a, b, count);
}

} // namespace

int gloo_ring_open(const char *dir, int rank, int size, gloo_ring **out) {
    return guarded([&] {
        gloo::transport::tcp::attr attr;
        attr.hostname = "127.0.0.1";
        auto device = gloo::transport::tcp::CreateDevice(attr);
        auto store = std::make_shared<gloo::rendezvous::FileStore>(dir);
        auto context = std::make_shared<gloo::rendezvous::Context>(rank, size);
        context->setTimeout(std::chrono::seconds(60));
#ifdef GLOO_SHARED_STORE
        context->connectFullMesh(store, device);
#else
        context->connectFullMesh(*store, device);
#endif
        *out = new gloo_ring{context, 0, nullptr, nullptr};
    });
}

void gloo_ring_close(gloo_ring *ring) { delete ring; }

int gloo_ring_all_gather(gloo_ring *ring, void *data, size_t bytes) {
    return guarded([&] {
        gloo::AllgatherOptions o(ring->context);
        o.setOutput(static_cast<uint8_t *>(data), bytes * static_cast<size_t>(ring->context->size));
        o.setTag(ring->tag++);
        gloo::allgather(o);
    });
}

int gloo_ring_all_reduce(gloo_ring *ring, float *data, size_t count) {
    return guarded([&] {
        gloo::AllreduceOptions o(ring->context);
        o.setOutput(data, count);
        o.setReduceFunction(sum);
        o.setTag(ring->tag++);
        gloo::allreduce(o);
    });
}

int gloo_ring_exchange(gloo_ring *ring, char *from, char *to, size_t bytes, size_t part) {
    return guarded([&] {
        const int size = ring->context->size, rank = ring->context->rank;
        const uint32_t slot = ring->tag++;
        if (!ring->out) ring->out = ring->context->createUnboundBuffer(from, bytes);
        if (!ring->in) ring->in = ring->context->createUnboundBuffer(to, bytes);
        for (int k = 0; k < size; k++)
            if (k != rank) ring->in->recv(k, slot, size_t(k) * part, part);
        for (int k = 0; k < size; k++)
            if (k != rank) ring->out->send(k, slot, size_t(k) * part, part);
        for (int k = 1; k < size; k++) ring->in->waitRecv();
        for (int k = 1; k < size; k++) ring->out->waitSend();
    });
}
