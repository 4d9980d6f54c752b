/* fsdp_gloo_shim.h - what fsdp_gloo.h (C) and fsdp_gloo.cc (C++) say to each other

   The Gloo library as a transport and no more: a device, full meshes of connections, and buffers
   that are sent from and received into. No exception leaves these functions, none prints.

   A message is matched by (pair of ranks, slot), in the order in which it was posted. Its receiver
   must have posted at least as many bytes: Gloo ends a process that gets more than it expected.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_GLOO_SHIM_H
#define FSDP_GLOO_SHIM_H

#include <stddef.h> // size_t
#include <stdint.h> // int64_t, uint64_t

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_gloo_device fsdp_gloo_device;   // sockets, and one thread that serves them
typedef struct fsdp_gloo_context fsdp_gloo_context; // a connection to every other member
typedef struct fsdp_gloo_buffer fsdp_gloo_buffer;   // memory that is sent from or received into

// How a call has ended. ABORTED: another thread has called fsdp_gloo_abort.
enum {
    FSDP_GLOO_OK,
    FSDP_GLOO_ABORTED,
    FSDP_GLOO_TIMEOUT,
    FSDP_GLOO_LOST,
    FSDP_GLOO_INVALID,
    FSDP_GLOO_NO_MEMORY,
    FSDP_GLOO_INTERNAL
};

// Gloo's words for the last failure of the calling thread. Never NULL.
const char *fsdp_gloo_error(void);

// address: a numeric IP of this host. The process ignores SIGPIPE from the first one on, unless it
// has a handler: a peer that ends while Gloo writes to it would end this process too.
int fsdp_gloo_device_create(const char *address, fsdp_gloo_device **out);
void fsdp_gloo_device_destroy(fsdp_gloo_device *device);

/* Makes an end of a connection for each other member; then each rank asks for the addresses of its
   ends, shows them to the peers, and connects each with what the peer has shown. connect blocks
   until the peer has connected, at most timeout_ms, or until it is interrupted. */
int fsdp_gloo_context_create(fsdp_gloo_device *device, int index, int size, int64_t timeout_ms,
                             fsdp_gloo_context **out);
int fsdp_gloo_context_address(fsdp_gloo_context *context, int peer, void *address, size_t cap,
                              size_t *bytes);
int fsdp_gloo_context_connect(fsdp_gloo_context *context, int peer, const void *address,
                              size_t bytes);
// Ends a connect to a peer. Any thread. Other connections stay: a peer that has not yet looked at
// one would be ended by Gloo if it were reset.
void fsdp_gloo_context_interrupt(fsdp_gloo_context *context, int peer);
// Resets all connections: peers see it at once. Any thread, when all members have met. What is
// posted never completes.
void fsdp_gloo_context_close(fsdp_gloo_context *context);
// What has been written is still delivered, unless closed. Before the buffers that have posted
// operations.
void fsdp_gloo_context_destroy(fsdp_gloo_context *context);

// A buffer with posted operations may be destroyed only after its context was closed or destroyed.
int fsdp_gloo_buffer_create(fsdp_gloo_context *context, void *memory, size_t bytes,
                            fsdp_gloo_buffer **out);
void fsdp_gloo_buffer_destroy(fsdp_gloo_buffer *buffer);

// Posts. Neither blocks.
int fsdp_gloo_send(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes);
int fsdp_gloo_recv(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes);

// Wait until one more posted operation of the buffer has completed; a send: its memory is free
// again. After TIMEOUT the operation is still posted.
int fsdp_gloo_wait_send(fsdp_gloo_buffer *buffer, int64_t timeout_ms);
int fsdp_gloo_wait_recv(fsdp_gloo_buffer *buffer, int64_t timeout_ms);
// Ends the waits of a buffer, now or when they begin. Any thread.
void fsdp_gloo_abort(fsdp_gloo_buffer *buffer);

#ifdef __cplusplus
}
#endif
#endif
