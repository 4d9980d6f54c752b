/* test_blame.c - which ranks are named as missing: every state of three other ranks

   A table stands in for what is known about a rank. SPDX-License-Identifier: MIT */
#include "harness.h"
#define FSDP_IMPLEMENTATION
#define FSDP_STATIC
#define FSDP_NO_BACKEND
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* the rest of it */
#include "fsdp.h"
#include "backends/fsdp_comm.h"
#pragma GCC diagnostic pop

enum { W = 4, WAITS = 2 }; /* busy: 0: in no operation, 1: in one, WAITS + r: waits for r */
enum { STATES = 2 * (W + 1) + 2 };
#define LONG 9000000000 /* silence in ns: almost the deadline of 10 s */

static fsdpi_peer known[W];
static int counts_signs; /* whether the backend counts signs of life */

/* Sets rank r to state s: each value of busy, both silent and not; absent; lost. */
static void set_state(int r, int s) {
    fsdpi_peer *p = &known[r];
    int busy = s % (W + 1);
    memset(p, 0, sizeof *p);
    p->state = s == STATES - 2   ? FSDPI_PEER_ABSENT
               : s == STATES - 1 ? FSDPI_PEER_LOST
                                 : FSDPI_PEER_JOINED;
    p->busy = busy < WAITS ? busy : busy < WAITS + r ? busy : busy + 1; /* never for itself */
    p->silent_ns = counts_signs ? 1000000 * r : -1;
    if (counts_signs && s >= W + 1 && s < STATES - 2) p->silent_ns = LONG + 1000000 * r;
    p->since_ns = 1000000000 + r;
    snprintf(p->text, sizeof p->text, "round of rank %d", r);
}

static int ask(fsdpi_comm *c, int rank, fsdpi_peer *out) {
    (void)c;
    *out = known[rank];
    return 1;
}

static int is_silent(int r) { return known[r].silent_ns >= LONG; }
static int waits_for(int r) {
    return known[r].state == FSDPI_PEER_JOINED ? known[r].busy - WAITS : -1;
}

/* Returns 1 if a chain of waits leads from `from` to `to`. Rank 0 waits for the missing ranks. */
static int leads(int from, int to, unsigned missing) {
    unsigned seen = 1u << from;
    for (int turn = 0; turn < W; turn++)
        for (int r = 0; r < W; r++)
            if (seen >> r & 1)
                seen |= r == 0 ? missing : waits_for(r) >= 0 ? 1u << waits_for(r) : 0;
    return (int)(seen >> to & 1);
}

static void check(const fsdpi_blame *b, unsigned missing) {
    int total = 0, silent = 0;
    for (int r = 0; r < W; r++) {
        int waits = known[r].state == FSDPI_PEER_JOINED && known[r].busy;
        total += b->named[r];
        silent += is_silent(r) && missing >> r & 1;
        if (!b->named[r]) continue;
        CHECK(r != 0 && leads(0, r, missing)); /* not itself; delays rank 0 */
        CHECK(!waits || is_silent(r) || !counts_signs);
    }
    CHECK_EQ_INT(total, b->total);
    for (int r = 1; r < W; r++) {
        int is_idle = known[r].state != FSDPI_PEER_JOINED || (!known[r].busy && !is_silent(r));
        if (missing >> r & 1 && (is_idle || is_silent(r))) CHECK(b->named[r]);
    }
    if (silent) CHECK(b->ring.begin < 0 || total > 0);
    if (b->ring.begin < 0) {
        int unknown = 0; /* none is named: each chain ends at a rank whose wait is unknown */
        for (int r = 1; r < W; r++)
            unknown |= known[r].state == FSDPI_PEER_JOINED && known[r].busy == 1 &&
                       leads(0, r, missing);
        CHECK(total || unknown);
        return;
    }
    CHECK(counts_signs);
    for (int i = b->ring.begin; i < b->ring.count; i++) { /* each waits for the next */
        int r = b->ring.ranks[i],
            next = b->ring.ranks[i + 1 < b->ring.count ? i + 1 : b->ring.begin];
        CHECK(!is_silent(r) && (r ? waits_for(r) == next : (int)(missing >> next & 1)));
    }
}

static fsdpi_comm comm_of(fsdpi_comm_world *w, fsdpi_transport *table) {
    static int32_t ids[W] = {0, 1, 2, 3};
    fsdpi_comm c;
    memset(&c, 0, sizeof c), memset(w, 0, sizeof *w), memset(table, 0, sizeof *table);
    table->ask = ask;
    w->boot.size = W, w->boot.timeout_ns = 10000000000;
    w->transport = table;
    c.world = w, c.boot = &w->boot, c.size = W, c.ranks = ids;
    return c;
}

TEST(blame, every_state) {
    fsdpi_comm_world w;
    fsdpi_transport table;
    fsdpi_comm c = comm_of(&w, &table);
    static fsdpi_blame b;
    int cases = 0, rings = 0, named = 0;
    for (counts_signs = 0; counts_signs < 2; counts_signs++)
        for (int s = 0; s < STATES * STATES * STATES; s++) {
            set_state(1, s % STATES), set_state(2, s / STATES % STATES),
                set_state(3, s / STATES / STATES);
            for (unsigned missing = 2; missing < 1u << W; missing += 2) {
                uint8_t marked[W];
                for (int k = 0; k < W; k++) marked[k] = (uint8_t)(missing >> k & 1);
                fsdpi_find_blame(&c, marked, &b);
                check(&b, missing);
                cases++, rings += b.ring.begin >= 0, named += b.total > 0;
            }
        }
    h_message("%d cases: in %d somebody is named, %d have a ring", cases, named, rings);
    CHECK(rings > 1000 && named > 10000);
}

TEST(blame, texts) {
    fsdpi_comm_world w;
    fsdpi_transport table;
    fsdpi_comm c = comm_of(&w, &table);
    const uint8_t missing[W] = {0, 1, 0, 0};
    const char *ring =
        "[E487] rank 1 waits for rank 2 (10.0.0.2), which waits for rank 1, for 10.0 s";
    char text[FSDPI_REASON];
    fsdpi_text t = {text, sizeof text, 0};
    counts_signs = 1;
    for (int r = 0; r < W; r++) set_state(r, 0);
    /* rank 1 waits for rank 2, which is silent */
    known[1].busy = WAITS + 2, known[2].silent_ns = LONG;
    snprintf(known[2].host, sizeof known[2].host, "10.0.0.2");
    CHECK_EQ_INT(fsdpi_say_late(&t, &c, missing, "come"), 1);
    CHECK_EQ_STR(
        text,
        "[E403] rank 2 has not come within 10.0 s; its last operation was round of rank 2, 1.0 s "
        "ago; last heard of 9.0 s ago: it is stopped, or its host (10.0.0.2) is cut off; rank 1 "
        "waits for rank 2");
    t.used = 0;
    known[2].silent_ns = 0, known[2].busy = WAITS + 1;
    CHECK_EQ_INT(fsdpi_say_late(&t, &c, missing, "come"), 1);
    CHECK_MSG(!strncmp(text, ring, strlen(ring)) && !strstr(text, "rank 0") &&
                  strstr(text, "Look at the link between their hosts (a firewall or a route that "
                               "drops one direction; an MTU: large frames are lost, try ping -M do "
                               "-s 1472)"),
              "%s", text);
    t.used = 0;
    known[1].busy = 1; /* it does not say for whom it waits: there is no other rank to name */
    CHECK_EQ_INT(fsdpi_say_late(&t, &c, missing, "come"), 1);
    CHECK_MSG(!strncmp(text, "[E403] rank 1 has not come", 26), "%s", text);
}

/* If a rank waits for a silent rank and is silent too, it is named once it has been silent half as
   long. */
TEST(blame, half_as_long_silent) {
    fsdpi_comm_world w;
    fsdpi_transport table;
    fsdpi_comm c = comm_of(&w, &table);
    const uint8_t missing[W] = {0, 1, 0, 0};
    static fsdpi_blame b;
    counts_signs = 1;
    for (int tenths = 0; tenths <= 10; tenths++) {
        for (int r = 0; r < W; r++) set_state(r, 0);
        known[1].busy = WAITS + 2, known[1].silent_ns = LONG / 10 * tenths,
        known[2].silent_ns = LONG;
        fsdpi_find_blame(&c, missing, &b);
        CHECK_EQ_INT(b.named[1], tenths > 5);
        CHECK_EQ_INT(b.named[2], tenths <= 5);
        CHECK_EQ_INT(b.total, 1);
        CHECK_EQ_INT(b.excused, tenths > 5 ? -1 : 1);
    }
}

/* Ranks wait for each other and no signs of life are counted: the rank that has been in its
   operation for the longest time is named, wherever it is in the ring. This rank never is. */
TEST(blame, longest_in_a_ring) {
    fsdpi_comm_world w;
    fsdpi_transport table;
    fsdpi_comm c = comm_of(&w, &table);
    const uint8_t missing[W] = {0, 1, 0, 0};
    static fsdpi_blame b;
    counts_signs = 0;
    for (int with_this = 0; with_this < 2; with_this++)
        for (int longest = 1; longest < W; longest++) {
            for (int r = 0; r < W; r++) {
                set_state(r, 0);
                known[r].busy = WAITS + (r + 1 < W ? r + 1 : !with_this);
                known[r].since_ns = 1000000000 + (r == longest) * 1000000000;
            }
            known[0].since_ns = LONG;
            fsdpi_find_blame(&c, missing, &b);
            CHECK(b.total == 1 && b.named[longest]);
        }
}
