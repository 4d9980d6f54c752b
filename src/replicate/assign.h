/* replicate/assign.h - the assignment of tensors to buckets

   Callers: programs.

   A part of fsdp_replicate.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_REPLICATE_H
#include "../../fsdp_replicate.h"
#endif
#ifndef FSDPI_REPLICATE_ASSIGN_H
#define FSDPI_REPLICATE_ASSIGN_H

#include <string.h>

enum { FSDPI_REP_KEYS = 64 };

typedef struct fsdpi_assign {
    const int32_t *key, *order;
    const int64_t *caps;
    int32_t *bucket;
    int64_t *cap;
    int num_caps, buckets;
    struct { // the bucket of a key that is still open
        int64_t bytes;
        int first, members, cap, number; // first: position in the order; cap: index of its cap
    } open[FSDPI_REP_KEYS];
} fsdpi_assign;

static int fsdpi_assign_at(const fsdpi_assign *a, int i) { return a->order ? a->order[i] : i; }
static int fsdpi_assign_key(const fsdpi_assign *a, int t) { return a->key ? a->key[t] : 0; }

// Closes a bucket: the tensors of a key from its bucket's first position to `last`. Without an
// order the number is known: a bucket is opened by its smallest index.
static void fsdpi_assign_close(fsdpi_assign *a, int key, int last) {
    int number = a->order ? a->buckets++ : a->open[key].number, cap = a->open[key].cap;
    for (int i = a->open[key].first; i <= last; i++)
        if (fsdpi_assign_key(a, fsdpi_assign_at(a, i)) == key)
            a->bucket[fsdpi_assign_at(a, i)] = number;
    if (a->cap) a->cap[number] = a->caps[cap];
    a->open[key].cap += cap + 1 < a->num_caps;
    a->open[key].members = 0;
    a->open[key].bytes = 0;
}

FSDP_API int fsdp_replicate_assign(const int64_t *nbytes, const int32_t *key, const int32_t *order,
                                   int count, const int64_t *caps, int num_caps, int32_t *bucket,
                                   int32_t *place, int64_t *cap) {
    fsdpi_assign a;
    memset(&a, 0, sizeof a);
    if (!nbytes || !caps || !bucket || num_caps < 1 || count < 0) return -1;
    a.key = key, a.order = order, a.caps = caps, a.num_caps = num_caps;
    a.bucket = bucket, a.cap = cap;
    for (int i = 0; i < num_caps; i++)
        if (caps[i] < 0) return -1;
    for (int i = 0; i < count; i++) bucket[i] = -1;
    for (int i = 0; i < count; i++) { // bucket marks the tensors that were met
        int t = fsdpi_assign_at(&a, i), known = t >= 0 && t < count && bucket[t] < 0;
        int k = known ? fsdpi_assign_key(&a, t) : -1;
        if (k < 0 || k >= FSDPI_REP_KEYS || nbytes[t] < 0) return -1;
        bucket[t] = 0;
    }
    for (int i = 0; i < count; i++) {
        int t = fsdpi_assign_at(&a, i), k = fsdpi_assign_key(&a, t);
        if (a.open[k].members == 0) {
            a.open[k].first = i;
            a.open[k].number = order ? 0 : a.buckets++;
        }
        if (place) place[t] = a.open[k].members;
        a.open[k].members++;
        int64_t room = INT64_MAX - a.open[k].bytes;
        a.open[k].bytes += nbytes[t] < room ? nbytes[t] : room;
        if (a.open[k].bytes >= caps[a.open[k].cap]) fsdpi_assign_close(&a, k, i);
    }
    for (int oldest = 0; oldest >= 0;) { // the open buckets, in the order in which they were opened
        oldest = -1;
        for (int k = 0; k < FSDPI_REP_KEYS; k++)
            if (a.open[k].members && (oldest < 0 || a.open[k].first < a.open[oldest].first))
                oldest = k;
        if (oldest >= 0) fsdpi_assign_close(&a, oldest, count - 1);
    }
    return a.buckets;
}

#endif // FSDPI_REPLICATE_ASSIGN_H
