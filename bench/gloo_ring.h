/* gloo_ring.h - Gloo's own collectives, for bench_comm.c to compare with; in C (gloo_ring.cc)

   Every function returns 0, or -1 after it has written the reason to stderr.

   SPDX-License-Identifier: MIT */
#ifndef GLOO_RING_H
#define GLOO_RING_H
#include <stddef.h> // size_t

#ifdef __cplusplus
extern "C" {
#endif

typedef struct gloo_ring gloo_ring;

/* Ranks meet in `dir`, an empty directory that all see; blocks until all have come. */
int gloo_ring_open(const char *dir, int rank, int size, gloo_ring **out);
void gloo_ring_close(gloo_ring *ring);
/* In place: my part of `bytes` bytes is at data + rank*bytes already. */
int gloo_ring_all_gather(gloo_ring *ring, void *data, size_t bytes);
/* In place, sums. */
int gloo_ring_all_reduce(gloo_ring *ring, float *data, size_t count);
/* Messages alone: `part` bytes at from + k*part to each other rank k, as many from it to to + k*part.
   Both are `bytes` long, and the same in all calls. */
int gloo_ring_exchange(gloo_ring *ring, char *from, char *to, size_t bytes, size_t part);

#ifdef __cplusplus
}
#endif
#endif
