/* dtensor/route.h - the cheapest way from one spec to another, and PyTorch's greedy one

   Callers: programs, propagate.h (fsdpi_dt_sums), redistribute.h (fsdpi_dt_ceil) and mesh.h
     (fsdpi_dt_read_links).

   A part of fsdp_dtensor.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_DTENSOR_H
#include "../../fsdp_dtensor.h"
#endif
#ifndef FSDPI_DTENSOR_ROUTE_H
#define FSDPI_DTENSOR_ROUTE_H

#include "spec.h"

#include <string.h>

// A state has a byte for each mesh dim of more than one rank. A move leads from one state to
// another: the last cut of a tensor dim is undone, or becomes the last cut of another dim, or
// partial values are reduced. Dijkstra's algorithm finds the cheapest sequence. Costs are integers
// in 10^-6 us, so that sums do not depend on the order of addition, and ties are exact. Source:
// torch/distributed/tensor/_redistribute.py.

enum { FSDPI_DT_R = 0, FSDPI_DT_P = 1, FSDPI_DT_S = 2 }; // SHARD: S + 8 * dim + order
#define FSDPI_DT_PS_MOST ((int64_t)1 << 56)              // most of one step: 32 can be added

typedef struct fsdpi_dt_node {
    uint64_t state;
    int64_t ps;              // cost so far, in 10^-6 us
    int32_t parent, heap_at; // heap_at -1: settled
    uint8_t collectives, steps;
    uint16_t move; // the last move: see fsdpi_dt_code
} fsdpi_dt_node;

typedef struct fsdpi_dt_search {
    const fsdp_spec *spec;                          // shape and dtype
    int dims;                                       // mesh dims of more than one rank
    int mesh_dim[FSDP_MAX_DIMS], op[FSDP_MAX_DIMS]; // op: reduces its partial values
    int64_t ranks[FSDP_MAX_DIMS];
    fsdp_links links; // zeros replaced by defaults
    uint64_t start, goal;
    fsdpi_dt_node *nodes;
    int32_t *heap, *table; // table: 1 + index of a node, 0: none
    int32_t num, room, heap_num, is_full;
    uint32_t mask;
} fsdpi_dt_search;

static int fsdpi_dt_get(uint64_t state, int i) { return (int)(state >> 8 * i & 255); }
static uint64_t fsdpi_dt_set(uint64_t state, int i, int place) {
    return (state & ~((uint64_t)255 << 8 * i)) | (uint64_t)place << 8 * i;
}
static int fsdpi_dt_dim_of(int place) { return (place - FSDPI_DT_S) / FSDP_MAX_DIMS; }
static int fsdpi_dt_order_of(int place) { return (place - FSDPI_DT_S) % FSDP_MAX_DIMS; }

// Returns the number of cuts of a tensor dim in a state, which is the order of the next cut.
static int fsdpi_dt_count(const fsdpi_dt_search *f, uint64_t state, int dim) {
    int count = 0;
    for (int i = 0; i < f->dims; i++) {
        int place = fsdpi_dt_get(state, i);
        count += place >= FSDPI_DT_S && fsdpi_dt_dim_of(place) == dim;
    }
    return count;
}
static int fsdpi_dt_append(const fsdpi_dt_search *f, uint64_t state, int dim) {
    return FSDPI_DT_S + FSDP_MAX_DIMS * dim + fsdpi_dt_count(f, state, dim);
}

static uint64_t fsdpi_dt_state_of(const fsdpi_dt_search *f, const fsdp_spec *s) {
    uint64_t state = 0;
    for (int i = 0; i < f->dims; i++) {
        const fsdp_placement *p = &s->place[f->mesh_dim[i]];
        int place = p->kind == FSDP_PARTIAL ? FSDPI_DT_P : FSDPI_DT_R;
        if (p->kind == FSDP_SHARD) place = FSDPI_DT_S + FSDP_MAX_DIMS * p->dim;
        for (int k = 0; k < f->dims && p->kind == FSDP_SHARD; k++) {
            const fsdp_placement *q = &s->place[f->mesh_dim[k]];
            place += fsdpi_dt_cuts(q, p->dim) && q->order < p->order;
        }
        state = fsdpi_dt_set(state, i, place);
    }
    return state;
}

static fsdp_placement fsdpi_dt_place_of(const fsdpi_dt_search *f, int i, int place) {
    fsdp_placement p = {FSDP_REPLICATE, 0, 0, 0};
    if (place == FSDPI_DT_P) p.kind = FSDP_PARTIAL, p.op = (int8_t)f->op[i];
    if (place >= FSDPI_DT_S) {
        p.kind = FSDP_SHARD;
        p.dim = (int8_t)fsdpi_dt_dim_of(place), p.order = (int8_t)fsdpi_dt_order_of(place);
    }
    return p;
}

/* -------------------------------------------------------------------------------------------- */
// Costs of steps.

static int64_t fsdpi_dt_ceil(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// Returns the rows of the largest part along a dim, without mesh dim `without` (-1: with all).
static int64_t fsdpi_dt_length(const fsdpi_dt_search *f, uint64_t state, int dim, int without) {
    int64_t pieces = 1, size = f->spec->shape[dim];
    for (int i = 0; i < f->dims; i++) {
        int place = fsdpi_dt_get(state, i);
        if (i != without && place >= FSDPI_DT_S && fsdpi_dt_dim_of(place) == dim)
            pieces *= f->ranks[i];
    }
    return fsdpi_dt_ceil(size, pieces);
}

// Returns the bytes of the largest part, with dim `padded` (-1: none) cut once more into equal
// pieces.
static int64_t fsdpi_dt_bytes(const fsdpi_dt_search *f, uint64_t state, int padded, int64_t pieces,
                              int without) {
    int64_t bytes = (int64_t)fsdp_dtype_size(f->spec->dtype), length[FSDP_MAX_DIMS];
    for (int d = 0; d < f->spec->ndim; d++) {
        length[d] = fsdpi_dt_length(f, state, d, without);
        if (d == padded) length[d] = fsdpi_dt_ceil(length[d], pieces);
    }
    return fsdpi_dt_mul(bytes, fsdpi_dt_numel(f->spec->ndim, length), FSDPI_DT_MOST);
}

static int fsdpi_dt_is_collective(int kind) { return kind >= FSDP_STEP_ALL_GATHER; }

static int fsdpi_dt_kind(int from, int to) {
    if (from == FSDPI_DT_R) return to == FSDPI_DT_P ? FSDP_STEP_OWN : FSDP_STEP_SLICE;
    if (from == FSDPI_DT_P)
        return to == FSDPI_DT_R ? FSDP_STEP_ALL_REDUCE : FSDP_STEP_REDUCE_SCATTER;
    if (to == FSDPI_DT_P) return FSDP_STEP_PAD;
    return to == FSDPI_DT_R ? FSDP_STEP_ALL_GATHER : FSDP_STEP_ALL_TO_ALL;
}

typedef struct fsdpi_dt_cost {
    int kind;
    int64_t ps, wire, most;
} fsdpi_dt_cost;

// Returns the cost if mesh dim i becomes `to`.
static fsdpi_dt_cost fsdpi_dt_price(const fsdpi_dt_search *f, uint64_t state, int i, int to) {
    fsdpi_dt_cost c;
    const fsdp_links *l = &f->links;
    int m = f->mesh_dim[i];
    int64_t n = f->ranks[i], bytes = fsdpi_dt_bytes(f, state, -1, 1, -1);
    c.kind = fsdpi_dt_kind(fsdpi_dt_get(state, i), to);
    c.ps = c.wire = 0, c.most = bytes;
    if (c.kind == FSDP_STEP_PAD) c.most = fsdpi_dt_bytes(f, state, -1, 1, i);
    if (!fsdpi_dt_is_collective(c.kind)) return c;
    if (c.kind == FSDP_STEP_REDUCE_SCATTER || c.kind == FSDP_STEP_ALL_TO_ALL)
        bytes = fsdpi_dt_bytes(f, state, fsdpi_dt_dim_of(to), n, -1); // one of n pieces
    double hops = (double)(n - 1), moved = hops * (double)bytes, extra = 0;
    c.wire = fsdpi_dt_mul(n - 1, bytes, FSDPI_DT_MOST);
    c.most = fsdpi_dt_mul(n, bytes, FSDPI_DT_MOST);
    if (c.kind == FSDP_STEP_ALL_REDUCE) {
        hops *= 2, moved = hops * (double)bytes / (double)n;
        c.wire = 2 * (n - 1) * (bytes / n) + fsdpi_dt_ceil(2 * (n - 1) * (bytes % n), n);
        c.most = bytes;
    }
    if (c.kind == FSDP_STEP_ALL_TO_ALL) extra = 1;
    double us = l->base_us + hops * l->hop_us[m] +
                moved / (l->gbytes_per_s[m] * 1073741824.0) * 1e6 + extra;
    c.ps = us * 1e6 < (double)FSDPI_DT_PS_MOST ? (int64_t)(us * 1e6 + 0.5) : FSDPI_DT_PS_MOST;
    return c;
}

/* -------------------------------------------------------------------------------------------- */
// Dijkstra's algorithm in the caller's memory.

// Encodes a move as a number: mesh dim, kind, tensor dim. Ties between routes go to smaller
// numbers.
static uint16_t fsdpi_dt_code(int i, int kind, int to) {
    return (uint16_t)(i << 11 | kind << 8 | to);
}
static int fsdpi_dt_code_dim(uint16_t code) { return code >> 11; }
static int fsdpi_dt_code_to(uint16_t code) { return code & 255; }

// Compares cost, then collectives, then steps.
static int fsdpi_dt_compare(const fsdpi_dt_node *a, const fsdpi_dt_node *b) {
    if (a->ps != b->ps) return a->ps < b->ps ? -1 : 1;
    if (a->collectives != b->collectives) return a->collectives - b->collectives;
    return a->steps - b->steps;
}

static void fsdpi_dt_path(const fsdpi_dt_search *f, const fsdpi_dt_node *node, uint16_t *moves) {
    for (int i = node->steps; i > 0; node = &f->nodes[node->parent]) moves[--i] = node->move;
}

static int fsdpi_dt_is_better(const fsdpi_dt_search *f, const fsdpi_dt_node *a,
                              const fsdpi_dt_node *b) {
    uint16_t ours[FSDP_ROUTE_STEPS], theirs[FSDP_ROUTE_STEPS];
    int order = fsdpi_dt_compare(a, b), i = 0;
    if (order) return order < 0;
    fsdpi_dt_path(f, a, ours), fsdpi_dt_path(f, b, theirs);
    while (i < a->steps && ours[i] == theirs[i]) i++;
    return i < a->steps && ours[i] < theirs[i];
}

static void fsdpi_dt_heap_put(fsdpi_dt_search *f, int at, int32_t node) {
    f->heap[at] = node;
    f->nodes[node].heap_at = at;
}

static void fsdpi_dt_heap_up(fsdpi_dt_search *f, int at) {
    int32_t node = f->heap[at];
    for (int up; at > 0; at = up) {
        up = (at - 1) / 2;
        if (fsdpi_dt_compare(&f->nodes[node], &f->nodes[f->heap[up]]) >= 0) break;
        fsdpi_dt_heap_put(f, at, f->heap[up]);
    }
    fsdpi_dt_heap_put(f, at, node);
}

static int32_t fsdpi_dt_heap_pop(fsdpi_dt_search *f) {
    int32_t top = f->heap[0], node = f->heap[--f->heap_num];
    int at = 0, next;
    f->nodes[top].heap_at = -1;
    for (; (next = 2 * at + 1) < f->heap_num; at = next) {
        const fsdpi_dt_node *a = &f->nodes[f->heap[next]];
        if (next + 1 < f->heap_num && fsdpi_dt_compare(&f->nodes[f->heap[next + 1]], a) < 0) next++;
        if (fsdpi_dt_compare(&f->nodes[node], &f->nodes[f->heap[next]]) <= 0) break;
        fsdpi_dt_heap_put(f, at, f->heap[next]);
    }
    if (f->heap_num) fsdpi_dt_heap_put(f, at, node);
    return top;
}

// Returns a state's position in the table: that of its node, or the free one for it.
static int32_t *fsdpi_dt_find(const fsdpi_dt_search *f, uint64_t state) {
    uint32_t at = (uint32_t)((state * 0x9E3779B97F4A7C15u) >> 32);
    for (;; at++) {
        int32_t *entry = &f->table[at & f->mask];
        if (!*entry || f->nodes[*entry - 1].state == state) return entry;
    }
}

// Records a way to a state if it is the first, or better than the known one.
static void fsdpi_dt_reach(fsdpi_dt_search *f, const fsdpi_dt_node *way) {
    int32_t *entry = fsdpi_dt_find(f, way->state), node = *entry - 1;
    if (node < 0) {
        if (f->num == f->room) {
            f->is_full = 1;
            return;
        }
        node = f->num++, *entry = f->num;
        f->nodes[node] = *way;
        fsdpi_dt_heap_put(f, f->heap_num++, node);
    } else {
        fsdpi_dt_node *known = &f->nodes[node];
        if (known->heap_at < 0 || !fsdpi_dt_is_better(f, way, known)) return;
        int32_t at = known->heap_at;
        *known = *way, known->heap_at = at;
    }
    fsdpi_dt_heap_up(f, f->nodes[node].heap_at);
}

static void fsdpi_dt_move(fsdpi_dt_search *f, int32_t parent, int i, int to) {
    const fsdpi_dt_node *from = &f->nodes[parent];
    if (from->steps == FSDP_ROUTE_STEPS) return;
    fsdpi_dt_cost cost = fsdpi_dt_price(f, from->state, i, to);
    fsdpi_dt_node way = *from;
    way.state = fsdpi_dt_set(from->state, i, to);
    way.ps += cost.ps;
    way.parent = parent;
    way.collectives = (uint8_t)(way.collectives + fsdpi_dt_is_collective(cost.kind));
    way.steps++;
    way.move = fsdpi_dt_code(i, cost.kind, to);
    fsdpi_dt_reach(f, &way);
}

static int fsdpi_dt_sums(int op) { return op == FSDP_SUM || op == FSDP_AVG; }

// Returns 1 if mesh dim i may become partial: it must be partial in the goal, and its op must
// commute with those of other mesh dims.
static int fsdpi_dt_may_add(const fsdpi_dt_search *f, uint64_t state, int i) {
    for (int k = 0; k < f->dims; k++)
        if (k != i && fsdpi_dt_get(state, k) == FSDPI_DT_P &&
            !fsdpi_dt_ops_commute(f->op[k], f->op[i]))
            return 0;
    return fsdpi_dt_get(f->goal, i) == FSDPI_DT_P;
}

// Makes all moves of mesh dim i.
static void fsdpi_dt_moves(fsdpi_dt_search *f, int32_t node, int i) {
    uint64_t state = f->nodes[node].state;
    int place = fsdpi_dt_get(state, i), cut = place >= FSDPI_DT_S;
    int dim = cut ? fsdpi_dt_dim_of(place) : -1;
    if (cut && fsdpi_dt_order_of(place) + 1 < fsdpi_dt_count(f, state, dim)) return; // not last
    if (place != FSDPI_DT_R) fsdpi_dt_move(f, node, i, FSDPI_DT_R);
    if (place == FSDPI_DT_R || (cut && f->op[i] == FSDP_SUM))
        if (fsdpi_dt_may_add(f, state, i)) fsdpi_dt_move(f, node, i, FSDPI_DT_P);
    if ((place == FSDPI_DT_P && !fsdpi_dt_sums(f->op[i])) || (cut && f->links.no_all_to_all))
        return;
    for (int d = 0; d < f->spec->ndim; d++)
        if (d != dim) fsdpi_dt_move(f, node, i, fsdpi_dt_append(f, state, d));
}

// Returns the number of states: j of the mesh dims cut, in some order; the others R or P.
static int64_t fsdpi_dt_states(int dims, int ndim) {
    int64_t sum = 0, ways = 1; // ways: to choose j mesh dims and to arrange them in ndim lists
    for (int j = 0; j <= dims; j++) {
        sum += ways << (dims - j);
        ways = ways * (dims - j) / (j + 1) * (ndim + j);
    }
    return sum;
}

// Returns the bytes for `nodes` nodes, their heap and their table. Sets *table to its number of
// entries.
static int64_t fsdpi_dt_scratch(int64_t nodes, int64_t *table) {
    for (*table = 16; *table < 2 * nodes;) *table *= 2;
    return nodes * (int64_t)(sizeof(fsdpi_dt_node) + sizeof(int32_t)) +
           *table * (int64_t)sizeof(int32_t);
}

// Finds the moves of the cheapest way. Returns their number, or -1 if the memory is too small for
// the states.
static int fsdpi_dt_cheapest(fsdpi_dt_search *f, void *scratch, int64_t bytes, uint16_t *moves) {
    int64_t room = fsdpi_dt_states(f->dims, f->spec->ndim), table;
    while (fsdpi_dt_scratch(room, &table) > bytes)
        if ((room /= 2) < 2) return -1;
    f->nodes = (fsdpi_dt_node *)scratch;
    f->heap = (int32_t *)(void *)(f->nodes + room);
    f->table = f->heap + room;
    f->room = (int32_t)room, f->mask = (uint32_t)table - 1;
    memset(f->table, 0, (size_t)table * sizeof *f->table);
    fsdpi_dt_node start;
    memset(&start, 0, sizeof start);
    start.state = f->start;
    fsdpi_dt_reach(f, &start);
    while (f->heap_num && !f->is_full) {
        int32_t node = fsdpi_dt_heap_pop(f);
        if (f->nodes[node].state == f->goal) {
            fsdpi_dt_path(f, &f->nodes[node], moves);
            return f->nodes[node].steps;
        }
        for (int i = 0; i < f->dims; i++) fsdpi_dt_moves(f, node, i);
    }
    return -1;
}

/* -------------------------------------------------------------------------------------------- */
// PyTorch's greedy steps. From the inner mesh dims to the outer ones, it undoes unwanted cuts and
// makes changes that are possible at once. Then it makes the others, from the outer dims to the
// inner ones.

// Returns a mask of the mesh dims to the left of i that cut a tensor dim.
static int fsdpi_dt_outer(uint64_t state, int i, int dim) {
    int mask = 0;
    for (int k = 0; k < i; k++) {
        int place = fsdpi_dt_get(state, k);
        mask |= (place >= FSDPI_DT_S && fsdpi_dt_dim_of(place) == dim) << k;
    }
    return mask;
}

typedef struct fsdpi_dt_way {
    uint64_t state;
    uint16_t moves[FSDP_ROUTE_STEPS];
    int num;
} fsdpi_dt_way;

// Changes mesh dim i to R, P or the last cut of `dim`: in two steps if no collective does so.
static void fsdpi_dt_go(const fsdpi_dt_search *f, fsdpi_dt_way *w, int i, int goal) {
    int from = fsdpi_dt_get(w->state, i), dim = goal < FSDPI_DT_S ? -1 : fsdpi_dt_dim_of(goal);
    int same = from >= FSDPI_DT_S && dim >= 0 ? fsdpi_dt_dim_of(from) == dim : from == goal;
    if (same) return;
    int by_two = (from >= FSDPI_DT_S && f->links.no_all_to_all) ||
                 (from == FSDPI_DT_P && !fsdpi_dt_sums(f->op[i]));
    for (int step = dim >= 0 && by_two ? 0 : 1; step < 2; step++) {
        int to = step == 0 ? FSDPI_DT_R : dim < 0 ? goal : fsdpi_dt_append(f, w->state, dim);
        int kind = fsdpi_dt_kind(fsdpi_dt_get(w->state, i), to);
        w->moves[w->num++] = fsdpi_dt_code(i, kind, to);
        w->state = fsdpi_dt_set(w->state, i, to);
    }
}

static int fsdpi_dt_greedy(const fsdpi_dt_search *f, uint16_t *moves) {
    fsdpi_dt_way w;
    int cut = 0;
    memset(&w, 0, sizeof w);
    w.state = f->start;
    for (int i = 0; i < f->dims; i++) cut |= fsdpi_dt_get(f->start, i) >= FSDPI_DT_S;
    for (int i = f->dims - 1; i >= 0 && cut; i--) {
        int goal = fsdpi_dt_get(f->goal, i), dim = fsdpi_dt_dim_of(goal);
        if (goal >= FSDPI_DT_S &&
            fsdpi_dt_outer(w.state, i, dim) != fsdpi_dt_outer(f->goal, i, dim))
            goal = FSDPI_DT_R;
        fsdpi_dt_go(f, &w, i, goal);
    }
    for (int i = 0; i < f->dims; i++) fsdpi_dt_go(f, &w, i, fsdpi_dt_get(f->goal, i));
    memcpy(moves, w.moves, sizeof w.moves);
    return w.num;
}

// Returns 1 if all cuts are made from left to right.
static int fsdpi_dt_is_plain(const fsdpi_dt_search *f, uint64_t state) {
    for (int i = 0; i < f->dims; i++) {
        int place = fsdpi_dt_get(state, i), before = 0;
        if (place < FSDPI_DT_S) continue;
        for (int mask = fsdpi_dt_outer(state, i, fsdpi_dt_dim_of(place)); mask; mask >>= 1)
            before += mask & 1;
        if (before != fsdpi_dt_order_of(place)) return 0;
    }
    return 1;
}

/* -------------------------------------------------------------------------------------------- */
// The complete search.

static int64_t fsdpi_dt_more(int64_t a, int64_t b) { // a + b, at most FSDPI_DT_MOST
    return a > FSDPI_DT_MOST - b ? FSDPI_DT_MOST : a + b;
}

// Writes the steps of a list of moves. Returns the cost.
static int64_t fsdpi_dt_write(const fsdpi_dt_search *f, const uint16_t *moves, int num,
                              fsdp_route *r) {
    uint64_t state = f->start;
    int64_t ps = 0;
    memset(r, 0, sizeof *r);
    r->most_bytes = fsdpi_dt_bytes(f, f->goal, -1, 1, -1);
    int64_t first = fsdpi_dt_bytes(f, f->start, -1, 1, -1);
    if (first > r->most_bytes) r->most_bytes = first;
    for (int k = 0; k < num; k++) {
        fsdp_step *s = &r->steps[r->num_steps++];
        int i = fsdpi_dt_code_dim(moves[k]), to = fsdpi_dt_code_to(moves[k]);
        fsdpi_dt_cost cost = fsdpi_dt_price(f, state, i, to);
        s->kind = cost.kind, s->mesh_dim = f->mesh_dim[i];
        s->from = fsdpi_dt_place_of(f, i, fsdpi_dt_get(state, i));
        s->to = fsdpi_dt_place_of(f, i, to);
        s->cost_us = (double)cost.ps / 1e6, s->wire_bytes = cost.wire;
        ps += cost.ps;
        r->num_collectives += fsdpi_dt_is_collective(cost.kind);
        r->wire_bytes = fsdpi_dt_more(r->wire_bytes, cost.wire);
        if (cost.most > r->most_bytes) r->most_bytes = cost.most;
        state = fsdpi_dt_set(state, i, to);
    }
    r->cost_us = (double)ps / 1e6;
    return ps;
}

// Returns the first mesh dim that would have to become partial on the way, and cannot; -1: none.
static int fsdpi_dt_no_way(const fsdp_spec *from, const fsdp_spec *to) {
    for (int m = 0; m < to->mesh_ndim; m++) {
        const fsdp_placement *a = &from->place[m], *b = &to->place[m];
        if (b->kind != FSDP_PARTIAL) continue;
        if (a->kind == FSDP_PARTIAL ? a->op != b->op : b->op != FSDP_SUM) return m;
    }
    return -1;
}

static int fsdpi_dt_cost_is_bad(double x) { return !(x >= 0 && x <= 1e15); }

static fsdp_status fsdpi_dt_read_links(const char *call, const fsdp_links *given, fsdp_links *l) {
    memset(l, 0, sizeof *l);
    if (given) *l = *given;
    int bad = fsdpi_dt_cost_is_bad(l->base_us);
    if (l->base_us == 0) l->base_us = 6.6;
    for (int m = 0; m < FSDP_MAX_DIMS; m++) {
        bad |= fsdpi_dt_cost_is_bad(l->hop_us[m]) || fsdpi_dt_cost_is_bad(l->gbytes_per_s[m]);
        if (l->hop_us[m] == 0) l->hop_us[m] = 0.6;
        if (l->gbytes_per_s[m] == 0) l->gbytes_per_s[m] = 87.7;
    }
    if (!bad) return FSDP_OK;
    return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                         "[E175] %s: a number of fsdp_links is negative or not finite: pass 0 for "
                         "the default",
                         call);
}

// Finds the route between two specs on one mesh. Requires a way between them. links: already read.
static fsdp_status fsdpi_dt_route(const fsdp_spec *from, const fsdp_spec *to,
                                  const fsdp_links *links, void *scratch, int64_t bytes,
                                  fsdp_route *route, int64_t *ps) {
    fsdpi_dt_search f;
    uint16_t moves[FSDP_ROUTE_STEPS];
    memset(&f, 0, sizeof f);
    f.spec = from, f.links = *links;
    for (int m = 0; m < from->mesh_ndim; m++) {
        if (from->mesh_shape[m] == 1) continue;
        const fsdp_placement *p = &from->place[m];
        f.mesh_dim[f.dims] = m, f.ranks[f.dims] = from->mesh_shape[m];
        f.op[f.dims++] = p->kind == FSDP_PARTIAL ? p->op : to->place[m].op;
    }
    f.start = fsdpi_dt_state_of(&f, from), f.goal = fsdpi_dt_state_of(&f, to);
    int greedy = links->greedy && fsdpi_dt_is_plain(&f, f.start) && fsdpi_dt_is_plain(&f, f.goal);
    int num = greedy              ? fsdpi_dt_greedy(&f, moves)
              : f.start == f.goal ? 0
                                  : fsdpi_dt_cheapest(&f, scratch, bytes, moves);
    if (num < 0) {
        int64_t table, need = fsdpi_dt_scratch(fsdpi_dt_states(f.dims, from->ndim), &table);
        return fsdpi_dt_fail(
            FSDP_ERR_OUT_OF_MEMORY,
            "[E176] route_find: %lld bytes of scratch are too few for %d mesh dims "
            "and a tensor of %d dims: pass more; %lld are always enough",
            (long long)bytes, f.dims, from->ndim, (long long)need);
    }
    *ps = fsdpi_dt_write(&f, moves, num, route);
    return FSDP_OK;
}

FSDP_API fsdp_status fsdp_route_find(const fsdp_spec *from, const fsdp_spec *to,
                                     const fsdp_links *links, void *scratch, int64_t scratch_bytes,
                                     fsdp_route *route) {
    fsdp_links l;
    int64_t ps;
    fsdp_status status = fsdpi_dt_known("route_find", from);
    if (!status) status = fsdpi_dt_known("route_find", to);
    if (!status) status = fsdpi_dt_read_links("route_find", links, &l);
    if (status) return status;
    if (!scratch || ((uintptr_t)scratch & 7) || !route)
        return fsdpi_dt_fail(
            FSDP_ERR_INVALID_ARG,
            "[E177] route_find: scratch or route is NULL, or scratch is not aligned "
            "to 8 bytes: pass both");
    if (from->mesh_ndim != to->mesh_ndim || from->ndim != to->ndim || from->dtype != to->dtype ||
        memcmp(from->mesh_shape, to->mesh_shape, sizeof from->mesh_shape) != 0 ||
        memcmp(from->shape, to->shape, sizeof from->shape) != 0)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E178] route_find: the specs differ in mesh, shape or dtype: only "
                             "placements can change");
    int m = fsdpi_dt_no_way(from, to);
    if (m >= 0)
        return fsdpi_dt_fail(FSDP_ERR_INVALID_ARG,
                             "[E179] route_find: the target is PARTIAL in mesh dim %d, and the "
                             "source is neither the same nor, for SUM, SHARD or REPLICATE: "
                             "redistribute to REPLICATE or SHARD instead",
                             m);
    return fsdpi_dt_route(from, to, &l, scratch, scratch_bytes, route, &ps);
}

#endif // FSDPI_DTENSOR_ROUTE_H
