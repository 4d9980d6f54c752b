/* fsdp_gloo_shim.h - the functions of fsdp_gloo.cc (C++) that fsdp_gloo.h (C) calls

   The Gloo library as a transport and no more: a device, full meshes of connections, and buffers
   for sends and receives. No exception leaves these functions, and none of them prints.

   A message is matched by (pair of ranks, slot), in the order in which it was posted. If its
   receiver has posted fewer bytes, all waits of the device fail from then on.

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

// Results of calls. ABORTED: another thread has called fsdp_gloo_abort.
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

// Returns Gloo's text for the last failure of the calling thread. Never NULL.
const char *fsdp_gloo_error(void);

// From the first device on the process ignores SIGPIPE, unless it has a handler: a peer that ends
// while Gloo writes to it would otherwise end this process, too.
int fsdp_gloo_device_create(fsdp_gloo_device **out);
void fsdp_gloo_device_destroy(fsdp_gloo_device *device);

/* A context is connected member by member, by a TCP socket that is connected to that member. The
   member does the same with its end. Later bytes on the socket must be Gloo's messages. The context
   takes over the socket, and closes it after a failure. connect does not wait for the peer. */
int fsdp_gloo_context_create(fsdp_gloo_device *device, int index, int size,
                             fsdp_gloo_context **out);
int fsdp_gloo_context_connect(fsdp_gloo_context *context, int peer, int socket);
// Returns the first member whose connection has ended; -1: none. Any thread may call it.
int fsdp_gloo_context_first_lost(const fsdp_gloo_context *context);
// Resets all connections: peers see it at once. Any thread may call it, once all members are
// connected. Posted operations never complete.
void fsdp_gloo_context_close(fsdp_gloo_context *context);
/* A thread that waits for a message moves all messages; if none waits, the device's thread does.
   Between these two calls the device's thread moves them while other threads work, from the end of
   the present turn on. */
void fsdp_gloo_context_overlap(fsdp_gloo_context *context, int begins);
// Bytes that have been written are still delivered, unless the context was closed. Call it before
// the buffers with posted operations are destroyed.
void fsdp_gloo_context_destroy(fsdp_gloo_context *context);

// A buffer with posted operations may be destroyed only after its context was closed or destroyed.
int fsdp_gloo_buffer_create(fsdp_gloo_context *context, void *memory, size_t bytes,
                            fsdp_gloo_buffer **out);
void fsdp_gloo_buffer_destroy(fsdp_gloo_buffer *buffer);

// Posts an operation, and does not block. A buffer is for one peer.
int fsdp_gloo_send(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes);
int fsdp_gloo_recv(fsdp_gloo_buffer *buffer, int peer, uint64_t slot, size_t offset, size_t bytes);

// Waits until one more posted operation of the buffer has completed. After a send its memory may be
// written. After TIMEOUT the operation is still posted.
int fsdp_gloo_wait_send(fsdp_gloo_buffer *buffer, int64_t timeout_ms);
int fsdp_gloo_wait_recv(fsdp_gloo_buffer *buffer, int64_t timeout_ms);
// Ends the waits of a buffer, also later ones. Any thread may call it.
void fsdp_gloo_abort(fsdp_gloo_buffer *buffer);

#ifdef __cplusplus
}
#endif
#endif
