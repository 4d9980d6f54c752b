/* fsdp_gloo_shim.h - what fsdp_gloo.h (C) and fsdp_gloo.cc (C++) say to each other

   The Gloo library as a transport and no more: a device, full meshes of connections, and buffers
   that are sent from and received into. No exception leaves these functions, none prints.

   A message is matched by (pair of ranks, slot), in the order in which it was posted. Its receiver
   must have posted at least as many bytes: else all waits of the device fail from then on.

   SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_GLOO_SHIM_H
#define FSDP_GLOO_SHIM_H

#include <stddef.h> // size_t
#include <stdint.h> // int64_t, uint64_t

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fsdp_gloo_device fsdp_gloo_device;   // sockets, and a thread that can serve them
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

#define FSDP_GLOO_SLOT_LAST ((uint64_t)0x7E << 56) // the only slot that callers may not use

// Gloo's words for the last failure of the calling thread. Never NULL.
const char *fsdp_gloo_error(void);

// The process ignores SIGPIPE from the first one on, unless it has a handler: a peer that ends
// while Gloo writes to it would end this process too.
int fsdp_gloo_device_create(fsdp_gloo_device **out);
void fsdp_gloo_device_destroy(fsdp_gloo_device *device);

/* A context is connected member by member: to each goes a socket, of TCP and connected to that
   member, who does the same with its end. Whatever is under way on the socket is taken for Gloo's
   messages. The socket is the context's, or closed. connect does not wait for the peer. */
int fsdp_gloo_context_create(fsdp_gloo_device *device, int index, int size,
                             fsdp_gloo_context **out);
int fsdp_gloo_context_connect(fsdp_gloo_context *context, int peer, int socket);
// The first member whose connection has ended; -1: none. Any thread.
int fsdp_gloo_context_first_lost(const fsdp_gloo_context *context);
// Resets all connections: peers see it at once. Any thread, when all members are connected. What is
// posted never completes.
void fsdp_gloo_context_close(fsdp_gloo_context *context);
/* Messages move while somebody waits for one, in his thread, and else in the device's own. Between
   these two calls they move in the device's own thread, beside what the others do, as soon as who
   drives has ended its turn. */
void fsdp_gloo_context_overlap(fsdp_gloo_context *context, int begins);
// What has been written is still delivered, unless closed. Before the buffers that have posted
// operations.
void fsdp_gloo_context_destroy(fsdp_gloo_context *context);

// A buffer with posted operations may be destroyed only after its context was closed or destroyed.
int fsdp_gloo_buffer_create(fsdp_gloo_context *context, void *memory, size_t bytes,
                            fsdp_gloo_buffer **out);
void fsdp_gloo_buffer_destroy(fsdp_gloo_buffer *buffer);

// Posts. Neither blocks. A buffer is for one peer.
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
