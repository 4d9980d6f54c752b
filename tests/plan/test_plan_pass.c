/* test_plan_pass.c - the passes of plans, on random programs: properties of each pass's result.
   First single passes, on spans and uses that a test makes up; then whole plans, on the simulated
   device, for random models and for PyTorch's examples.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#include "library.c"
#include "lab.h"
#include "sim.h"

enum { LONG = 10000, ALL_PASSES = (1 << FSDP_PASS_COUNT) - 1 };
enum { MOST_UNITS = 8, MOST_SPANS = 40, MOST_CALLS = 100, MOST_USES = 40 };

/* Whole plans take longer. */
static int cases(int most) { return W_SLOW ? most / 20 : most; }

/* ---- spans ------------------------------------------------------------------------------------ */

/* Returns a model without units, whose allocator serves the tables. */
static fsdp_model *no_units(void) {
    static sim s;
    static fsdp_model *model;
    if (model) return model;
    sim_init(&s, 1, 0);
    return model = lab_model(sim_open(&s), NULL);
}

typedef struct spans { /* facts without calls */
    fsdp_plan plan;
    fsdpi_plan_variant kind;
    fsdpi_plan_facts f;
    uint8_t managed[MOST_UNITS];
    fsdpi_plan_span of_units[MOST_SPANS];
    int64_t base[MOST_CALLS], bytes[MOST_UNITS], item_bytes[MOST_UNITS];
    uint64_t gathers[MOST_UNITS];
    int32_t item[MOST_UNITS], order[MOST_UNITS];
} spans;

static void spans_begin(spans *s, int units) {
    memset(s, 0, sizeof *s);
    s->f.kind = &s->kind;
    s->f.num_units = units;
    s->plan.model = no_units(), s->plan.num_units = units;
    s->plan.desc.bucket_bytes = s->plan.desc.first_bucket_bytes = 1;
    s->f.managed = s->managed, s->f.spans = s->of_units, s->f.base = s->base;
    s->f.bytes = s->bytes, s->f.item_bytes = s->item_bytes, s->f.gathers = s->gathers;
    s->f.item = s->item, s->f.order = s->order;
    for (int u = 0; u < units; u++) s->gathers[u] = 7, s->bytes[u] = 1;
}
static void spans_add(spans *s, int unit, int begin, int end) {
    const fsdpi_plan_span span = {unit, begin, end, -1, 0, 0, 0};
    CHECK(s->f.num_spans < MOST_SPANS && end < MOST_CALLS);
    s->of_units[s->f.num_spans++] = span;
    if (end + 2 > s->f.num_calls) s->f.num_calls = end + 2; /* finalize */
}
/* Items of one unit each, or joined. */
static void spans_items(spans *s, int joined) {
    fsdpi_plan_pass_bucket_gathers(&s->plan, &s->f, joined);
    s->f.num_item_spans = 0;
    CHECK_OK(fsdpi_plan_item_spans(&s->plan, &s->f));
}
static void spans_end(spans *s) { fsdpi_plan_free(s->plan.model, s->f.item_spans); }

/* Units that are used one after the other, and sometimes one around some others. */
static void spans_random(spans *s, uint64_t *seed, int units, int demands, int nests) {
    int call = 0, outer = -1;
    spans_begin(s, units);
    for (int i = 0; i < demands; i++) {
        int u = lab_pick(seed, units);
        if (nests && outer < 0 && i + 3 < demands && lab_pick(seed, 6) == 0 && units > 1) {
            outer = s->f.num_spans;
            spans_add(s, u, call, call);
            call++;
            continue;
        }
        if (outer >= 0 && u == s->of_units[outer].owner) u = (u + 1) % units;
        spans_add(s, u, call, call + 1);
        call += 2;
        if (outer >= 0 && (i + 1 == demands || lab_pick(seed, 4) == 0)) {
            s->of_units[outer].end = call++;
            outer = -1;
        }
    }
    if (outer >= 0) s->of_units[outer].end = call++;
    s->f.num_calls = call + 1;
    CHECK(s->f.num_calls <= MOST_CALLS);
}

/* Gathers: item spans that no kept one leads to. */
static int is_gathered(const spans *s, int i) {
    for (int k = 0; k < i; k++)
        if (s->f.item_spans[k].next == i && s->f.item_spans[k].kept) return 0;
    return 1;
}
static int count_gathers(const spans *s) {
    int count = 0;
    for (int i = 0; i < s->f.num_item_spans; i++) count += is_gathered(s, i);
    return count;
}
/* Bytes of items that are there at a call: all of them; those that are open. */
static int64_t there_at(const spans *s, int call, int open) {
    int64_t bytes = 0;
    for (int i = 0; i < s->f.num_item_spans; i++) {
        const fsdpi_plan_span *span = &s->f.item_spans[i];
        int end = span->end;
        if (!open && span->kept) end = s->f.item_spans[span->next].begin - 1;
        if (span->begin <= call && call <= end) bytes += s->f.item_bytes[span->owner];
    }
    return bytes;
}

/* ---- keep --------------------------------------------------------------------------------------- */

/* Returns the least number of bytes that must be gathered, over all choices of units to keep. */
static int64_t best_choice(const int *demand, int count, const int64_t *bytes, int units,
                           int64_t most) {
    int64_t least[1 << 5], next[1 << 5];
    for (int r = 0; r < 1 << units; r++) least[r] = r ? INT64_MAX : 0;
    for (int i = 0; i < count; i++) {
        for (int r = 0; r < 1 << units; r++) next[r] = INT64_MAX;
        for (int r = 0; r < 1 << units; r++) {
            const int with = r | 1 << demand[i];
            if (least[r] == INT64_MAX) continue;
            const int64_t cost = least[r] + (with != r ? bytes[demand[i]] : 0);
            for (int kept = with;; kept = (kept - 1) & with) { /* all subsets */
                int64_t sum = 0;
                for (int u = 0; u < units; u++) sum += kept >> u & 1 ? bytes[u] : 0;
                if (kept >> demand[i] & 1 && sum <= most && cost < next[kept]) next[kept] = cost;
                if (!kept) break;
            }
        }
        memcpy(least, next, sizeof least);
    }
    int64_t best = INT64_MAX;
    for (int r = 0; r < 1 << units; r++) best = least[r] < best ? least[r] : best;
    return best;
}

enum { UNITS = 5, DEMANDS = 12 };
static int64_t keep(spans *s, const int *demand, const int64_t *bytes, int64_t most) {
    int worst = 0;
    int64_t sum = 0;
    spans_begin(s, UNITS);
    for (int u = 0; u < UNITS; u++) s->bytes[u] = bytes[u];
    for (int i = 0; i < DEMANDS; i++) spans_add(s, demand[i], 2 * i, 2 * i + 1);
    spans_items(s, 0);
    fsdpi_plan_pass_keep(&s->f, ALL_PASSES, most, &worst);
    for (int i = 0; i < s->f.num_item_spans; i++)
        sum += is_gathered(s, i) ? s->f.item_bytes[s->f.item_spans[i].owner] : 0;
    return sum;
}
/* Checks that the pass gathers as few bytes as an exhaustive search, for equal sizes. */
static void keep_is_optimal(int programs) {
    uint64_t seed = h_seed();
    for (int n = 0; n < programs; n++) {
        int demand[DEMANDS];
        int64_t bytes[UNITS] = {1, 1, 1, 1, 1};
        spans s;
        for (int i = 0; i < DEMANDS; i++) demand[i] = lab_pick(&seed, UNITS);
        const int64_t slots = 1 + lab_pick(&seed, UNITS);
        const int64_t got = keep(&s, demand, bytes, slots);
        const int64_t best = best_choice(demand, DEMANDS, bytes, UNITS, slots);
        CHECK_MSG(got == best, "program %d, %d slots: %d gathers, %d are enough", n, (int)slots,
                  (int)got, (int)best);
        CHECK_EQ_INT(got, count_gathers(&s));
        spans_end(&s);
    }
    h_message("%d programs, 0 differ from exhaustive search", programs);
}
TEST(plan_pass, keep_is_optimal) { keep_is_optimal(cases(LONG)); }

/* For other sizes the rule is not exact: how far it is off. */
TEST(plan_pass, keep_is_nearly_optimal) {
    uint64_t seed = h_seed() + 1;
    double worst = 1, sum = 0;
    const int programs = LONG; /* far more, so that no seed matters */
    int exact = 0;
    for (int n = 0; n < programs; n++) {
        int demand[DEMANDS];
        int64_t bytes[UNITS], largest = 0, all = 0;
        spans s;
        for (int i = 0; i < DEMANDS; i++) demand[i] = lab_pick(&seed, UNITS);
        for (int u = 0; u < UNITS; u++) {
            bytes[u] = 1 + lab_pick(&seed, 9);
            largest = bytes[u] > largest ? bytes[u] : largest;
            all += bytes[u];
        }
        const int64_t most = largest + lab_pick(&seed, (int)(all - largest) + 1);
        const int64_t best = best_choice(demand, DEMANDS, bytes, UNITS, most);
        const double ratio = (double)keep(&s, demand, bytes, most) / (double)best;
        CHECK(ratio >= 1);
        exact += ratio <= 1;
        sum += ratio;
        worst = ratio > worst ? ratio : worst;
        spans_end(&s);
    }
    h_message("%d programs: bytes %.3f of the least on average, at most %.2f, the least in %d%%",
              programs, sum / programs, worst, 100 * exact / programs);
    CHECK(sum / programs < 1.018 && worst < 1.75 && 100 * exact >= 80 * programs);
}

/* Never above calls; no call has more than is allowed, unless open units alone do. */
static void keep_fits(int programs) {
    uint64_t seed = h_seed() + 2;
    int less = 0;
    for (int n = 0; n < programs; n++) {
        int worst = 0;
        spans s;
        const int shares = lab_pick(&seed, 2);
        const uint32_t passes = shares ? ALL_PASSES : ALL_PASSES & ~(1u << FSDP_PASS_ARENA);
        spans_random(&s, &seed, 1 + lab_pick(&seed, MOST_UNITS), 2 + lab_pick(&seed, 20), 1);
        for (int u = 0; u < s.f.num_units; u++) s.bytes[u] = 1 + lab_pick(&seed, 5);
        int64_t most_base = 0;
        for (int k = 0; k < s.f.num_calls; k++) {
            s.base[k] = lab_pick(&seed, 4);
            if (k + 1 < s.f.num_calls && s.base[k] > most_base) most_base = s.base[k];
        }
        spans_items(&s, lab_pick(&seed, 2));
        const int64_t most = 3 + lab_pick(&seed, 20);
        fsdpi_plan_pass_keep(&s.f, passes, most, &worst);
        for (int k = 0; k + 1 < s.f.num_calls; k++) {
            const int64_t base = shares ? s.base[k] : most_base, now = base + there_at(&s, k, 0);
            const int64_t open = base + there_at(&s, k, 1);
            CHECK_MSG(now <= most || now == open, "program %d, call %d: %d bytes, at most %d", n, k,
                      (int)now, (int)most);
        }
        CHECK(count_gathers(&s) <= s.f.num_item_spans);
        less += count_gathers(&s) < s.f.num_item_spans;
        const int with = count_gathers(&s);
        fsdpi_plan_pass_keep(&s.f, passes & ~(1u << FSDP_PASS_KEEP), most, &worst);
        CHECK_EQ_INT(count_gathers(&s), s.f.num_item_spans); /* without the pass: as eagerly */
        fsdpi_plan_pass_keep(&s.f, passes, most + 1000, &worst);
        CHECK(count_gathers(&s) <= with); /* more memory, no more gathers */
        spans_end(&s);
    }
    CHECK(less > programs / 4);
}
TEST(plan_pass, keep_fits) { keep_fits(cases(LONG)); }

/* A chain of L, and back: 2L - k with k slots. */
TEST(plan_pass, keep_in_a_chain) {
    for (int units = 1; units <= MOST_UNITS; units++)
        for (int slots = 1; slots <= units; slots++) {
            int worst;
            spans s;
            spans_begin(&s, units);
            for (int i = 0; i < 2 * units; i++)
                spans_add(&s, i < units ? i : 2 * units - 1 - i, 2 * i, 2 * i + 1);
            spans_items(&s, 0);
            fsdpi_plan_pass_keep(&s.f, ALL_PASSES, slots, &worst);
            CHECK_EQ_INT(count_gathers(&s), 2 * units - slots);
            spans_end(&s);
        }
}

/* If memory is short, the pass reports the first of the calls that hold the most bytes. */
TEST(plan_pass, keep_reports_the_worst_call) {
    int worst = -1;
    spans s;
    spans_begin(&s, 3);
    s.bytes[1] = s.bytes[2] = 2;
    for (int u = 0; u < 3; u++) spans_add(&s, u, 2 * u, 2 * u + 1);
    spans_items(&s, 0);
    fsdpi_plan_pass_keep(&s.f, ALL_PASSES, 0, &worst);
    CHECK_EQ_INT(worst, 2); /* 3, 4 and 5 hold as much */
    spans_end(&s);
}

/* Slots that come and go within a call count in it; those that no pass frees in later calls, too;
   those that passes decide about in none. */
TEST(plan_pass, base_is_the_most_within_a_call) {
    enum { CALLS = 4, OPS = 6, USES = 3 };
    static const struct {
        int call, kind, use;
    } ops[OPS] = {{0, FSDP_OP_ACQUIRE, 0}, {0, FSDP_OP_RELEASE, 0}, {1, FSDP_OP_ACQUIRE, 1},
                  {1, FSDP_OP_ACQUIRE, 2}, {2, FSDP_OP_RELEASE, 1}, {2, FSDP_OP_RELEASE, 2}};
    static const int64_t expected[CALLS] = {8, 3, 3, 0};
    fsdpi_plan_use uses[USES];
    fsdpi_plan_pair pairs[OPS];
    int32_t ops_at[CALLS + 1];
    fsdpi_plan_tape t;
    spans s;
    spans_begin(&s, 1);
    memset(&t, 0, sizeof t);
    memset(uses, 0, sizeof uses);
    uses[0].pool = FSDP_POOL_GRAD, uses[0].bytes = 8;
    uses[1].pool = FSDP_POOL_GRAD, uses[1].bytes = 3;
    uses[2].pool = FSDP_POOL_GATHER, uses[2].bytes = 100, s.managed[0] = 1;
    t.ops = (fsdp_op *)lab_zeros(OPS, sizeof *t.ops);
    t.pairs = pairs, t.uses = uses, t.ops_at = ops_at, t.num_ops = OPS, t.num_uses = USES;
    for (int i = OPS; i-- > 0;) {
        const int takes = ops[i].kind == FSDP_OP_ACQUIRE;
        t.ops[i].kind = (uint8_t)ops[i].kind;
        pairs[i].src = takes ? -1 : ops[i].use;
        pairs[i].dst = takes ? ops[i].use : -1;
    }
    for (int k = 0; k <= CALLS; k++)
        for (ops_at[k] = 0; ops_at[k] < OPS && ops[ops_at[k]].call < k;) ops_at[k]++;
    s.f.num_calls = CALLS;
    fsdpi_plan_find_base(&s.f, &t);
    for (int k = 0; k < CALLS; k++) CHECK_EQ_INT(s.base[k], expected[k]);
    free(t.ops);
}

/* ---- ahead --------------------------------------------------------------------------------------- */

/* Sets issued[] as PyTorch's simple_overlap does: each gather moves up past the call before it
   until it meets a release of its own slot or another gather, or until the peak would rise. A
   gather at call k is before the work of call k. */
static void simple_overlap(const spans *s, const int *span, int num, int *issued) {
    int64_t peak = 0;
    for (int k = 0; k + 1 < s->f.num_calls; k++) {
        const int64_t now = s->base[k] + there_at(s, k, 0);
        peak = now > peak ? now : peak;
    }
    int64_t *now = (int64_t *)lab_zeros((size_t)s->f.num_calls, sizeof *now);
    for (int k = 0; k + 1 < s->f.num_calls; k++) now[k] = s->base[k] + there_at(s, k, 0);
    for (int g = 0; g < num; g++) {
        const fsdpi_plan_span *me = &s->f.item_spans[span[g]];
        const int64_t bytes = s->f.item_bytes[me->owner];
        int freed = -1;
        for (int i = 0; i < span[g]; i++)
            if (s->f.item_spans[i].owner == me->owner) freed = s->f.item_spans[i].end;
        issued[g] = me->begin;
        while (issued[g] > 0) {
            const int k = issued[g] - 1;
            if (k <= freed || (g && k < issued[g - 1]) || now[k] + bytes > peak) break;
            now[k] += bytes;
            issued[g] = k;
        }
    }
    free(now);
}

/* Runs the pass, sets the call that issues each gather, and returns the number of gathers. */
static int issue(spans *s, int ahead, int *span, int *issued, int *late) {
    fsdpi_plan_decisions c;
    int num = 0;
    memset(&c, 0, sizeof c);
    CHECK_OK(fsdpi_plan_pass_ahead(&s->plan, &s->f, ahead, &c));
    for (int i = 0, at = 0; i < s->f.num_item_spans; i++) {
        const fsdpi_plan_span *me = &s->f.item_spans[i];
        if (!is_gathered(s, i)) continue;
        for (int k = 0; k < me->num; k++, at++) { /* all members at once, in the order of use */
            CHECK(at < c.num_acts && c.acts[at].what == FSDPI_PLAN_GATHER);
            CHECK_EQ_INT(c.acts[at].unit, s->f.spans[me->first + k].owner);
            CHECK_EQ_INT(c.acts[at].call, c.acts[at - k].call);
            CHECK_EQ_INT(c.acts[at].late, c.acts[at - k].late);
            CHECK_EQ_INT(c.acts[at].group, me->num > 1 ? i : -1);
        }
        span[num] = i;
        issued[num] = c.acts[at - 1].call;
        late[num++] = c.acts[at - 1].late;
        if (i + 1 == s->f.num_item_spans) CHECK_EQ_INT(at, c.num_acts);
    }
    fsdpi_plan_free(s->plan.model, c.acts);
    return num;
}

static void ahead(int programs) {
    uint64_t seed = h_seed() + 3;
    int earlier = 0, early_enough = 0;
    for (int n = 0; n < programs; n++) {
        int worst = 0, span[MOST_SPANS], issued[MOST_SPANS], late[MOST_SPANS], theirs[MOST_SPANS];
        int demanded[MOST_SPANS], none[MOST_SPANS];
        spans s;
        spans_random(&s, &seed, 1 + lab_pick(&seed, MOST_UNITS), 2 + lab_pick(&seed, 20), 1);
        for (int u = 0; u < s.f.num_units; u++) s.bytes[u] = 1 + lab_pick(&seed, 5);
        spans_items(&s, lab_pick(&seed, 2));
        fsdpi_plan_pass_keep(&s.f, ALL_PASSES, 3 + lab_pick(&seed, 20), &worst);
        const int num = issue(&s, 0, span, demanded, none);
        CHECK_EQ_INT(num, count_gathers(&s));
        for (int g = 0; g < num; g++) {
            CHECK_EQ_INT(demanded[g], s.f.item_spans[span[g]].begin);
            CHECK(!none[g]);
        }
        for (int d = 1; d <= MOST_UNITS; d++) {
            CHECK_EQ_INT(issue(&s, d, span, issued, late), num); /* their number, and order */
            for (int g = 0; g < num; g++) {
                const fsdpi_plan_span *me = &s.f.item_spans[span[g]];
                int under_way = 0;
                CHECK(issued[g] <= demanded[g] && late[g] == (issued[g] < demanded[g]));
                CHECK(!g || issued[g - 1] <= issued[g]);
                for (int i = 0; i < span[g]; i++) /* not before its own release */
                    CHECK(s.f.item_spans[i].owner != me->owner ||
                          issued[g] >= s.f.item_spans[i].end);
                for (int h = g; h < num; h++) under_way += h > g && issued[h] < me->begin;
                CHECK_MSG(under_way <= d, "program %d: %d gathers under way, at most %d", n,
                          under_way, d);
                earlier += late[g];
            }
        }
        /* Not later than PyTorch's pass. The caller's work is between calls, so a
           gather before the own work of a call and one after it are equally early. */
        CHECK_EQ_INT(issue(&s, MOST_UNITS, span, issued, late), num);
        simple_overlap(&s, span, num, theirs);
        for (int g = 0; g < num; g++) {
            CHECK_MSG(issued[g] <= theirs[g],
                      "program %d, gather %d of call %d: issued at %d, by simple_overlap at %d", n,
                      g, demanded[g], issued[g], theirs[g]);
            early_enough += theirs[g] < demanded[g];
        }
        spans_end(&s);
    }
    CHECK(earlier > programs && early_enough > programs / 4);
}
TEST(plan_pass, ahead) { ahead(cases(LONG)); }

/* ---- bucket --------------------------------------------------------------------------------------- */

/* Items are runs of neighbours: each use of a member is next to a use of every other member, no
   other unit is used in between, and all members gather in the same way. */
static void buckets(int programs) {
    uint64_t seed = h_seed() + 4;
    int joined = 0;
    for (int n = 0; n < programs; n++) {
        spans s;
        const int units = 2 + lab_pick(&seed, MOST_UNITS - 1), half = 1 + lab_pick(&seed, 8);
        const int nests = lab_pick(&seed, 3) == 0;
        if (lab_pick(&seed, 2)) {
            spans_random(&s, &seed, units, 2 * half, nests);
        } else { /* a chain, and back */
            spans_begin(&s, units);
            for (int i = 0; i < 2 * units; i++)
                spans_add(&s, i < units ? i : 2 * units - 1 - i, 2 * i, 2 * i + 1);
        }
        for (int u = 0; u < units; u++) {
            s.bytes[u] = 1 + lab_pick(&seed, 5);
            s.gathers[u] = (uint64_t)(lab_pick(&seed, 5) == 0 ? lab_pick(&seed, 2) : 7);
        }
        s.plan.desc.first_bucket_bytes = 1 + lab_pick(&seed, 12);
        s.plan.desc.bucket_bytes = 1 + lab_pick(&seed, 20);
        spans_items(&s, 1);
        int64_t bytes[MOST_UNITS] = {0};
        int members[MOST_UNITS] = {0};
        for (int i = 0; i < s.f.num_spans; i++) {
            const int u = s.of_units[i].owner;
            CHECK(s.item[u] >= 0 && s.item[u] < s.f.num_items);
            int first = 1;
            for (int k = 0; k < i; k++) first &= s.of_units[k].owner != u;
            if (!first) continue;
            /* one is added to an item that has not reached its cap */
            const int64_t cap = s.item[u] ? s.plan.desc.bucket_bytes
                                          : s.plan.desc.first_bucket_bytes;
            CHECK(!members[s.item[u]] || bytes[s.item[u]] < cap);
            bytes[s.item[u]] += s.bytes[u];
            members[s.item[u]]++;
        }
        for (int i = 0; i < s.f.num_items; i++) {
            CHECK_EQ_INT(s.item_bytes[i], bytes[i]);
            joined += members[i] > 1;
        }
        int at = 0; /* item spans have all spans, in order */
        for (int i = 0; i < s.f.num_item_spans; i++) {
            const fsdpi_plan_span *span = &s.f.item_spans[i];
            CHECK_EQ_INT(span->first, at);
            CHECK_EQ_INT(span->num, members[span->owner]);
            CHECK_EQ_INT(span->begin, s.of_units[at].begin);
            unsigned seen = 0;
            for (int k = 0; k < span->num; k++, at++) {
                const int u = s.of_units[at].owner;
                CHECK_EQ_INT(s.item[u], span->owner);
                CHECK(!(seen >> u & 1));
                seen |= 1u << u;
                CHECK(span->num == 1 ||
                      (s.gathers[u] && s.gathers[u] == s.gathers[s.of_units[at - k].owner]));
                CHECK(k == 0 || s.of_units[at].begin > s.of_units[at - 1].end); /* not inside */
                CHECK(span->end >= s.of_units[at].end);
            }
        }
        CHECK_EQ_INT(at, s.f.num_spans);
        spans_end(&s);
    }
    CHECK(joined > programs / 4);
}
TEST(plan_pass, bucket) { buckets(cases(LONG)); }

/* ---- places --------------------------------------------------------------------------------------- */

static int64_t offset_of(const fsdpi_plan_listing *l, const fsdpi_plan_use *use) {
    return l->slots[use->slot].offset;
}
/* Also where pieces have several uses, each with a life of its own. */
static void check_apart(const fsdpi_plan_tape *t, const fsdpi_plan_listing *l, int num) {
    for (int i = 0; i < t->num_uses; i++)
        for (int k = 0; k < i; k++) {
            const fsdpi_plan_use *a = &t->uses[i], *b = &t->uses[k];
            const int64_t at = offset_of(l, a), bt = offset_of(l, b);
            if (at < 0 || bt < 0 || a->from > b->to || b->from > a->to) continue;
            CHECK_MSG(at + a->bytes <= bt || bt + b->bytes <= at, "case %d: uses %d and %d meet",
                      num, k, i);
        }
}
/* Uses that meet do not share a byte; those that lie side by side do; nothing needs less than what is
   held at once, and pools would not have less. */
static void check_places(const fsdpi_plan_tape *t, const fsdpi_plan_listing *l, int num) {
    int64_t bound = 0, lasting = 0;
    check_apart(t, l, num);
    for (int i = 0; i < t->num_uses; i++) {
        const fsdpi_plan_use *a = &t->uses[i];
        const int64_t at = offset_of(l, a);
        CHECK_EQ_INT(l->slots[a->slot].bytes, a->bytes);
        CHECK_EQ_INT(l->slots[a->slot].pool, a->pool);
        if (at < 0) lasting += a->bytes;
        CHECK((at < 0) == (a->to >= t->num_ops));
        CHECK(at % 64 == 0 || at < 0);
        if (a->next_adjacent >= 0)
            CHECK_EQ_INT(offset_of(l, &t->uses[a->next_adjacent]), at + a->bytes);
        int64_t now = 0;
        for (int k = 0; k < t->num_uses; k++) {
            const fsdpi_plan_use *b = &t->uses[k];
            const int64_t bt = offset_of(l, b);
            if (b->from <= a->from && a->from <= b->to && bt >= 0) now += b->bytes;
        }
        bound = now > bound ? now : bound;
    }
    CHECK(l->bytes >= bound + lasting && l->bytes >= l->bound && l->bound >= bound + lasting);
}
/* Returns the bytes that pools need: for each size, the most slots in use at once. */
static int64_t pools_of(const fsdpi_plan_tape *t) {
    int64_t bytes = 0;
    for (int i = 0; i < t->num_uses; i++) {
        const fsdpi_plan_use *a = &t->uses[i];
        int most = 0, first = 1;
        for (int k = 0; k < i; k++)
            first &= t->uses[k].bytes != a->bytes || t->uses[k].pool != a->pool;
        for (int k = 0; k < t->num_uses && first; k++) {
            int now = 0;
            for (int n = 0; n < t->num_uses; n++)
                now += t->uses[n].bytes == a->bytes && t->uses[n].pool == a->pool &&
                       t->uses[n].from <= t->uses[k].from && t->uses[k].from <= t->uses[n].to;
            most = now > most ? now : most;
        }
        bytes += most * a->bytes;
    }
    return bytes;
}

/* A tape of nothing but uses. */
static void random_uses(fsdpi_plan_tape *t, uint64_t *seed, int glues) {
    int ops = 0;
    memset(t, 0, sizeof *t);
    t->num_uses = t->cap_uses = 1 + lab_pick(seed, MOST_USES);
    t->uses = (fsdpi_plan_use *)lab_zeros((size_t)t->num_uses, sizeof *t->uses);
    for (int i = 0; i < t->num_uses; i++) {
        fsdpi_plan_use *use = &t->uses[i];
        use->pool = FSDP_POOL_GATHER + lab_pick(seed, 3);
        use->bytes = 64 * (1 + lab_pick(seed, 6));
        use->slot = use->next_adjacent = -1;
        use->from = ops++;
        use->to = use->from + 1 + lab_pick(seed, 12);
    }
    t->num_ops = ops + (lab_pick(seed, 3) ? 20 : 3); /* some are held at the end */
    t->ops = (fsdp_op *)lab_zeros((size_t)t->num_ops, sizeof *t->ops);
    t->pairs = (fsdpi_plan_pair *)lab_zeros((size_t)t->num_ops, sizeof *t->pairs);
    for (int i = 0; i < t->num_ops; i++) {
        t->ops[i].kind = FSDP_OP_WAIT;
        t->pairs[i].src = t->pairs[i].dst = -1;
    }
    for (int i = 0; i + 1 < t->num_uses && glues; i++)
        if (lab_pick(seed, 4) == 0 && t->uses[i].to < t->num_ops - 12)
            t->uses[i].next_adjacent = i + 1, t->uses[i + 1].is_adjacent = 1;
}
static void places(int programs) {
    uint64_t seed = h_seed() + 5;
    int64_t saved = 0, exact = 0;
    for (int n = 0; n < programs; n++) {
        fsdp_plan p;
        fsdpi_plan_tape t;
        fsdpi_plan_listing l;
        const int glues = lab_pick(&seed, 3) == 0;
        static fsdp_unit *no_unit[1];
        memset(&p, 0, sizeof p);
        p.model = no_units(), p.units = no_unit, p.num_units = 1;
        memset(&l, 0, sizeof l);
        random_uses(&t, &seed, glues);
        CHECK_OK(fsdpi_plan_place(&p, &t, &l, ALL_PASSES, 0));
        (glues ? check_apart : check_places)(&t, &l, n);
        const int64_t pools = pools_of(&t);
        int lasts = 0; /* a slot that lasts has its own memory; pools share it */
        for (int i = 0; i < t.num_uses; i++) lasts |= t.uses[i].to >= t.num_ops;
        CHECK(glues || lasts || l.bytes <= pools);
        saved += !glues && l.bytes < pools;
        exact += !glues && l.bytes == l.bound;
        if (glues) { /* adjacent uses live as long as the longest of them */
            for (int i = t.num_uses - 1; i >= 0; i--) {
                const int next = t.uses[i].next_adjacent;
                if (next < 0) continue;
                if (t.uses[next].to > t.uses[i].to) t.uses[i].to = t.uses[next].to;
            }
            for (int i = 0; i < t.num_uses; i++) {
                const int next = t.uses[i].next_adjacent;
                if (next < 0) continue;
                t.uses[next].to = t.uses[i].to;
                CHECK_EQ_INT(offset_of(&l, &t.uses[next]),
                             offset_of(&l, &t.uses[i]) + t.uses[i].bytes);
            }
        }
        CHECK_OK(fsdpi_plan_place(&p, &t, &l, ALL_PASSES & ~(1u << FSDP_PASS_ARENA), 0));
        if (!glues) check_places(&t, &l, n);
        CHECK(glues || lasts || l.bytes == pools);
        free(t.uses);
        free(t.ops);
        free(t.pairs);
        fsdpi_plan_free(p.model, l.slots);
    }
    h_message("%d tapes: less than pools in %d, the bound in %d", programs, (int)saved, (int)exact);
    CHECK(saved > programs / 4);
}
TEST(plan_pass, places) { places(cases(LONG)); }

/* The arena's places are used if they save more than 5 % of the pools' bytes. Two small uses of
   different sizes, whose lives do not overlap, and one use whose life overlaps both. */
TEST(plan_pass, places_that_are_worth_it) {
    static const struct {
        int64_t bytes[3], taken;
    } rows[] = {{{87, 7, 6}, 94}, {{89, 6, 5}, 100}, {{91, 5, 4}, 100}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fsdp_plan p;
        fsdpi_plan_tape t;
        fsdpi_plan_listing l;
        fsdpi_plan_use uses[3];
        memset(&p, 0, sizeof p);
        p.model = no_units();
        memset(&t, 0, sizeof t);
        memset(&l, 0, sizeof l);
        memset(uses, 0, sizeof uses);
        for (int u = 0; u < 3; u++) {
            uses[u].pool = FSDP_POOL_GATHER, uses[u].bytes = 64 * rows[i].bytes[u];
            uses[u].slot = uses[u].next_adjacent = -1;
            uses[u].from = u ? 2 * u - 1 : 0, uses[u].to = u ? 2 * u : 5;
        }
        t.uses = uses, t.num_uses = 3, t.num_ops = 6;
        CHECK_OK(fsdpi_plan_place(&p, &t, &l, ALL_PASSES, 0));
        CHECK_EQ_INT(l.bytes, 64 * rows[i].taken);
        check_places(&t, &l, (int)i);
        fsdpi_plan_free(p.model, l.slots);
    }
}

/* ---- whole plans ---------------------------------------------------------------------------------- */

enum { MODEL_UNITS = 6, MODEL_CALLS = 64, TEXT = 256 };

/* The property in which a unit differs from the others. */
enum {
    OWN_NOTHING,
    OWN_FACTOR,
    OWN_MESH,
    OWN_HSDP,
    OWN_SLICE,
    OWN_GATHER,
    OWN_REDUCTION,
    OWN_SUM_HOOK,
    OWN_GRAD_HOOK
};

typedef struct program { /* a model, and the calls of its step */
    int num_units, num_calls;
    int64_t rows[MODEL_UNITS];                                     /* matrices have 16 columns */
    int never[MODEL_UNITS], frozen[MODEL_UNITS], own[MODEL_UNITS]; /* OWN_* */
    fsdp_dtype dtype[MODEL_UNITS];
    struct {
        int unit, call;
    } calls[MODEL_CALLS];
    fsdp_model_desc model;
    int size, async, ddp, sliced; /* sliced: the model is on half of the ranks */
    int refused;                  /* 1 + the unit for which it stays eager */
    int watched;
} program;

static void say(program *g, int unit, int call) {
    CHECK(g->num_calls < MODEL_CALLS);
    g->calls[g->num_calls].unit = unit;
    g->calls[g->num_calls++].call = call;
}
static void visit(program *g, int unit, int backward) {
    say(g, unit, backward ? FSDP_CALL_PRE_BACKWARD : FSDP_CALL_PRE_FORWARD);
    say(g, unit, backward ? FSDP_CALL_POST_BACKWARD : FSDP_CALL_POST_FORWARD);
}
/* Units in this order, "012", and back. */
static program program_of(const char *order) {
    program g;
    const int num = (int)strlen(order);
    memset(&g, 0, sizeof g);
    g.size = 2;
    for (int u = 0; u < MODEL_UNITS; u++) g.rows[u] = 16;
    for (int i = 0; i < num; i++) {
        if (order[i] - '0' >= g.num_units) g.num_units = order[i] - '0' + 1;
        visit(&g, order[i] - '0', 0);
    }
    for (int i = num - 1; i >= 0; i--) visit(&g, order[i] - '0', 1);
    return g;
}

typedef struct planned { /* a plan of a program that has been replayed */
    sim s;
    fsdp_model *m;
    fsdp_unit *unit[MODEL_UNITS];
    fsdp_plan *plan;
    fsdp_plan_report report;
    const fsdpi_plan_variant *kind;
    lab_log log;   /* if the program is watched */
    int last_step; /* its first record */
} planned;

static fsdp_status own_comm(void *user, const fsdp_comm_ops *ops, fsdp_comm *comm,
                            const fsdp_coll *coll) {
    (void)user;
    return ops->run(comm, coll);
}
static fsdp_status own_sum(void *user, fsdp_unit *unit, void *data, int64_t numel, fsdp_dtype dtype,
                           void *stream) {
    (void)user, (void)unit, (void)data, (void)numel, (void)dtype, (void)stream;
    return FSDP_OK;
}
static fsdp_status own_grad(void *user, const fsdp_param_view *v, void *stream) {
    (void)user, (void)v, (void)stream;
    return FSDP_OK;
}
/* All ranks; replicas of two; or a slice of them in which the model is not. */
static fsdp_mesh *own_mesh(fsdp_world *w, const program *g, int u) {
    fsdp_mesh *mesh = NULL;
    if (g->own[u] == OWN_MESH) CALL(w, fsdp_mesh_1d(w, "own", &mesh));
    if (g->own[u] == OWN_HSDP) mesh = lab_hsdp(w, 2, g->size / 2);
    if (g->own[u] == OWN_SLICE) mesh = lab_slice(w, lab_hsdp(w, 2, g->size / 2), 0);
    return mesh;
}
static void set_own(const planned *x, fsdp_world *w, int u, int own) {
    fsdp_unit *unit = x->unit[u];
    if (own == OWN_FACTOR) CALL(w, fsdp_set_gradient_divide_factor(x->m, unit, 3));
    if (own == OWN_GATHER) CALL(w, fsdp_set_custom_all_gather(unit, own_comm, NULL));
    if (own == OWN_REDUCTION) CALL(w, fsdp_set_custom_reduce_scatter(unit, own_comm, NULL));
    if (own == OWN_SUM_HOOK) CALL(w, fsdp_set_all_reduce_hook(unit, own_sum, NULL));
    if (own == OWN_GRAD_HOOK) CALL(w, fsdp_set_post_accumulate_hook(unit, 0, own_grad, NULL));
}

static void plan_program(planned *x, const program *g, const fsdp_plan_desc *desc) {
    static fsdp_status (*const calls[])(fsdp_unit *) = {
        fsdp_pre_forward, fsdp_post_forward, fsdp_pre_backward, fsdp_post_backward,
        fsdp_unshard,     fsdp_wait,         fsdp_reshard};
    fsdp_model_desc md = g->model;
    fsdp_mesh_info info;
    memset(x, 0, sizeof *x);
    sim_init(&x->s, g->size, 0);
    x->s.async = g->async;
    x->s.checks = 1;
    fsdp_world *w = sim_open(&x->s);
    CHECK(w != NULL);
    if (g->ddp) {
        fsdp_mesh *mesh;
        CALL(w, fsdp_mesh_1d(w, "dp", &mesh));
        CALL(w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
        md.mesh_info = &info;
    }
    if (g->sliced) md.mesh = lab_slice(w, lab_hsdp(w, 2, g->size / 2), 1);
    x->m = lab_model(w, &md);
    for (int u = 0; u < g->num_units; u++) {
        fsdp_param_desc p = fsdp_mat(NULL, g->rows[u], 16);
        fsdp_unit_desc d = FSDP_ZERO;
        char name[16];
        snprintf(name, sizeof name, "h.%d", u);
        p.frozen = g->frozen[u], p.dtype = g->dtype[u];
        d.name = name;
        d.reshard_after_forward = g->never[u] ? FSDP_RESHARD_NEVER : 0;
        d.mesh = own_mesh(w, g, u);
        x->unit[u] = lab_unit(w, x->m, &d, &p, 1);
        set_own(x, w, u, g->own[u]);
    }
    CALL(w, fsdp_plan_create(x->m, desc, &x->plan));
    if (g->watched) lab_watch(&x->log, w, x->m);
    for (int step = 0; step < 4; step++) {
        x->last_step = x->log.num;
        for (int i = 0; i < g->num_calls; i++) {
            fsdp_unit *unit = x->unit[g->calls[i].unit];
            CALL(w, calls[g->calls[i].call](unit));
            if (g->calls[i].call != FSDP_CALL_PRE_FORWARD &&
                g->calls[i].call != FSDP_CALL_PRE_BACKWARD)
                continue;
            const int64_t numel = g->rows[g->calls[i].unit] * 16;
            const int64_t size = g->model.param_dtype == FSDP_BF16 ? 2 : 4;
            sim_read(&x->s, "the caller", fsdp_data(unit, 0), numel * size);
            if (g->calls[i].call == FSDP_CALL_PRE_FORWARD || g->frozen[g->calls[i].unit]) continue;
            void *grad = fsdp_grad(unit, 0);
            CHECK(grad != NULL);
            sim_write(&x->s, "the caller", grad, numel * size);
        }
        CALL(w, fsdp_finalize_backward(x->m));
        CALL(w, fsdp_zero_grad(x->m));
    }
    if (g->refused) {
        char unit[16];
        snprintf(unit, sizeof unit, "'h.%d'", g->refused - 1);
        CHECK_EQ_INT(fsdp_plan_state(x->plan), FSDP_PLAN_REFUSED);
        CHECK_MSG(strstr(fsdp_plan_why(x->plan), unit), "%s", fsdp_plan_why(x->plan));
        return;
    }
    CHECK_MSG(fsdp_plan_count(x->plan) == 1, "%s", fsdp_plan_why(x->plan));
    CALL(w, fsdp_plan_report_get(x->plan, 0, &x->report));
    CHECK_MSG(x->report.replayed == 2 && !x->report.left, "%s", fsdp_plan_why(x->plan));
    CHECK_MSG(!x->s.races, "%s", x->s.race);
    x->kind = x->plan->kinds[0];
}
static void planned_end(planned *x) {
    fsdp_model_destroy(x->m);
    CHECK_EQ_INT(sim_close(&x->s), 0);
    free(x->log.ops);
}

/* The collectives of a kind in their order, joined ones member by member: "+0 +1 -1". A joined one
   stands in brackets: "[+0 +1]". */
static const char *order_of(const planned *x, int kind, int brackets) {
    static char text[2][TEXT];
    static int which;
    const fsdpi_plan_listing *l = &x->kind->listing;
    char *at = text[which ^= 1];
    CHECK(l->num_units <= MODEL_UNITS);
    int last = 0;
    *at = 0;
    for (int i = 0; i < l->num_lines; i++) {
        const fsdpi_plan_line *line = &l->lines[i];
        if (line->kind != kind) continue;
        CHECK(line->call >= last);
        last = line->call;
        if (brackets && line->num_members > 1) *at++ = '[';
        for (int k = 0; k < line->num_members; k++)
            at += sprintf(at, "%d", l->members[line->members + k].unit);
        if (brackets && line->num_members > 1) *at++ = ']';
        *at = 0;
    }
    return text[which];
}

/* Checks that gradients are written before each reduction that reads them. */
static void check_producers(const planned *x) {
    const fsdpi_plan_listing *l = &x->kind->listing;
    int wrote[MODEL_UNITS], reduced[MODEL_UNITS];
    for (int u = 0; u < MODEL_UNITS; u++) wrote[u] = reduced[u] = -1;
    for (int i = 0; i < l->num_lines; i++) {
        const fsdpi_plan_line *line = &l->lines[i];
        for (int k = 0; k < line->num_members; k++) {
            const int u = l->members[line->members + k].unit;
            if (line->kind == FSDP_OP_GRADS_WRITTEN) wrote[u] = i;
            if (line->kind != FSDP_OP_REDUCE_SCATTER) continue;
            CHECK(wrote[u] > reduced[u]);
            reduced[u] = i;
        }
    }
}

static program random_program(uint64_t *seed) {
    program g;
    const int outer = lab_pick(seed, 3) == 0, visits = 1 + lab_pick(seed, 8);
    int order[8];
    memset(&g, 0, sizeof g);
    g.size = 2 + lab_pick(seed, 3);
    g.async = lab_pick(seed, 2);
    g.num_units = 2 + lab_pick(seed, MODEL_UNITS - 1);
    for (int u = 0; u < g.num_units; u++) {
        g.rows[u] = 4 << lab_pick(seed, 4);
        g.frozen[u] = lab_pick(seed, 6) == 0;
    }
    if (lab_pick(seed, 3) == 0) g.model.param_dtype = FSDP_BF16;
    g.never[0] = outer && lab_pick(seed, 2);
    if (outer) say(&g, 0, FSDP_CALL_PRE_FORWARD);
    const int chain = lab_pick(seed, 2);
    for (int i = 0; i < visits; i++) {
        order[i] = outer +
                   (chain ? i : lab_pick(seed, g.num_units - outer)) % (g.num_units - outer);
        visit(&g, order[i], 0);
    }
    if (outer) say(&g, 0, FSDP_CALL_POST_FORWARD), say(&g, 0, FSDP_CALL_PRE_BACKWARD);
    for (int i = visits - 1; i >= 0; i--) visit(&g, order[i], 1);
    if (outer) say(&g, 0, FSDP_CALL_POST_BACKWARD);
    return g;
}

/* Makes plans with no pass, all passes and one pass, and checks what each leaves as it is. */
static void whole_plans(int programs) {
    uint64_t seed = h_seed() + 6;
    int less = 0, joined = 0, smaller = 0, once = 0;
    for (int n = 0; n < programs; n++) {
        const program g = random_program(&seed);
        static planned x;
        char gathers[TEXT], reductions[TEXT];
        snprintf(w_case, sizeof w_case, "program %d, %s, %d units", n,
                 g.async ? "streams" : "inline", g.num_units);
        fsdp_plan_desc d = FSDP_ZERO;

        d.without = ALL_PASSES; /* the calls as they are */
        plan_program(&x, &g, &d);
        const fsdp_plan_report calls = x.report;
        W_CHECK(calls.ops[0] == calls.ops[1] && calls.bytes[1] <= calls.bytes[0],
                "%d ops, %lld bytes", calls.ops[1], (long long)calls.bytes[1]);
        snprintf(gathers, sizeof gathers, "%s", order_of(&x, FSDP_OP_ALL_GATHER, 0));
        snprintf(reductions, sizeof reductions, "%s", order_of(&x, FSDP_OP_REDUCE_SCATTER, 0));
        planned_end(&x);

        d.without = 0;
        d.most_bytes = calls.bytes[0]; /* which is always enough */
        plan_program(&x, &g, &d);
        W_CHECK(x.report.bytes[1] <= d.most_bytes, "%lld bytes", (long long)x.report.bytes[1]);
        W_CHECK(x.report.gathers[1] <= calls.gathers[0], "%d gathers", x.report.gathers[1]);
        planned_end(&x);

        d.most_bytes = 0;
        d.without = ALL_PASSES & ~(1u << FSDP_PASS_BUCKET);
        d.bucket_bytes = 256 << lab_pick(&seed, 8);
        plan_program(&x, &g, &d); /* bytes and order stay */
        for (int k = 0; k < 2; k++) {
            const uint64_t was = k ? calls.reduce_bytes[0] : calls.gather_bytes[0];
            const uint64_t now = k ? x.report.reduce_bytes[1] : x.report.gather_bytes[1];
            /* An unreduced gradient is kept in the dtype of the reduction. If the backend casts in
               the collective, bucketed gradients are read in f32; the eager step reads bf16. */
            const int wider = k && g.model.param_dtype == FSDP_BF16 && x.report.buckets > 0;
            W_CHECK(now == was || (wider && now > was && now <= 2 * was),
                    "%s read %llu bytes, by calls %llu; %s, by calls %s",
                    k ? "reductions" : "gathers", (unsigned long long)now, (unsigned long long)was,
                    order_of(&x, k ? FSDP_OP_REDUCE_SCATTER : FSDP_OP_ALL_GATHER, 1),
                    k ? reductions : gathers);
        }
        W_CHECK(!strcmp(order_of(&x, FSDP_OP_ALL_GATHER, 0), gathers), "%s, by calls %s",
                order_of(&x, FSDP_OP_ALL_GATHER, 0), gathers);
        W_CHECK(!strcmp(order_of(&x, FSDP_OP_REDUCE_SCATTER, 0), reductions), "%s, by calls %s",
                order_of(&x, FSDP_OP_REDUCE_SCATTER, 0), reductions);
        W_CHECK(x.report.buckets >= (x.report.gathers[1] < calls.gathers[0]), "%d buckets",
                x.report.buckets);
        joined += x.report.buckets > 0;
        check_producers(&x);
        planned_end(&x);

        d.without = ALL_PASSES & ~(1u << FSDP_PASS_ARENA);
        plan_program(&x, &g, &d); /* the same ops; never more memory */
        W_CHECK(x.report.bytes[1] <= calls.bytes[1] && x.report.bytes[1] >= x.report.bound,
                "%lld bytes", (long long)x.report.bytes[1]);
        W_CHECK(!strcmp(order_of(&x, FSDP_OP_ALL_GATHER, 0), gathers), "order");
        W_CHECK(x.report.ops[1] == calls.ops[0], "%d ops", x.report.ops[1]);
        smaller += x.report.bytes[1] < calls.bytes[1];
        planned_end(&x);

        d.without = ALL_PASSES & ~(1u << FSDP_PASS_AHEAD);
        d.ahead = 1 + lab_pick(&seed, 3);
        plan_program(&x, &g, &d); /* the same gathers in the same order */
        W_CHECK(!strcmp(order_of(&x, FSDP_OP_ALL_GATHER, 0), gathers), "%s, by calls %s",
                order_of(&x, FSDP_OP_ALL_GATHER, 0), gathers);
        planned_end(&x);

        d.without = ALL_PASSES;
        d.with = 1u << FSDP_PASS_ONCE;
        plan_program(&x, &g, &d); /* each trained unit that was used: once, and gathers stay */
        int trained = 0;
        for (int u = 0; u < g.num_units; u++) {
            int used = 0;
            for (int i = 0; i < g.num_calls; i++)
                used |= g.calls[i].unit == u && g.calls[i].call == FSDP_CALL_POST_BACKWARD;
            trained += used && !g.frozen[u];
        }
        W_CHECK(x.report.reductions[1] == trained, "%d reductions of %d units",
                x.report.reductions[1], trained);
        W_CHECK(!strcmp(order_of(&x, FSDP_OP_ALL_GATHER, 0), gathers), "order");
        once += x.report.reductions[1] < calls.reductions[0];
        planned_end(&x);

        d.with = d.without = 0; /* everything */
        plan_program(&x, &g, &d);
        check_producers(&x);
        less += x.report.gathers[1] < calls.gathers[0];
        W_CHECK(x.report.bytes[1] >= x.report.bound, "%lld", (long long)x.report.bytes[1]);
        planned_end(&x);
    }
    h_message(
        "%d programs: joined in %d, fewer gathers in %d, less memory in %d, reduced once in %d",
        programs, joined, less, smaller, once);
    CHECK(joined > programs / 4 && less > programs / 4 && smaller > programs / 20 &&
          once > programs / 10);
}
TEST(plan_pass, whole_plans, AT_NIGHT(ASAN)) { whole_plans(W_SLOW ? 30 : 100); }
TEST(long_plan_pass, whole_plans, SECONDS(600) | NIGHT) { whole_plans(2000); }

/* ---- PyTorch's examples ----------------------------------------------------------------------------- */

static planned example;
static const char *joined(const program *g, int kind) {
    fsdp_plan_desc d = FSDP_ZERO;
    d.without = ALL_PASSES & ~(1u << FSDP_PASS_BUCKET);
    plan_program(&example, g, &d);
    const char *order = order_of(&example, kind, 1);
    planned_end(&example);
    return order;
}
/* test_aten_comm_compute_reordering: what is independent, and used at once, is one collective. */
TEST(plan_pass, bucketing) {
    program g = program_of("012");
    for (g.async = 0; g.async < 2; g.async++) {
        CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_GATHER), "[012][210]"); /* 3 gathers are 1 */
        CHECK_EQ_STR(joined(&g, FSDP_OP_REDUCE_SCATTER), "[210]");
    }
    g = program_of("0102"); /* 0 is used between 1 and 2 */
    CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_GATHER), "01022010");
    g = program_of("0123"); /* caps: two of four, in order */
    fsdp_plan_desc d = FSDP_ZERO;
    d.without = ALL_PASSES & ~(1u << FSDP_PASS_BUCKET);
    d.bucket_bytes = 1024; /* a unit has 1,024 bytes: full */
    plan_program(&example, &g, &d);
    CHECK_EQ_STR(order_of(&example, FSDP_OP_REDUCE_SCATTER, 1), "3210");
    planned_end(&example);
    d.bucket_bytes = 1025; /* the second one fills it */
    plan_program(&example, &g, &d);
    CHECK_EQ_STR(order_of(&example, FSDP_OP_ALL_GATHER, 1), "[01][23][32][10]");
    CHECK_EQ_STR(order_of(&example, FSDP_OP_REDUCE_SCATTER, 1), "[32][10]");
    planned_end(&example);
    d.first_bucket_bytes = 1; /* closed at once */
    plan_program(&example, &g, &d);
    CHECK_EQ_STR(order_of(&example, FSDP_OP_ALL_GATHER, 1), "0[12]33[21]0");
    CHECK_EQ_STR(order_of(&example, FSDP_OP_REDUCE_SCATTER, 1), "3[21]0");
    planned_end(&example);
    g = program_of("012"); /* another dtype is not joined */
    g.dtype[1] = FSDP_F64;
    CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_GATHER), "012210");
    CHECK_EQ_STR(joined(&g, FSDP_OP_REDUCE_SCATTER), "210");
    g = program_of("01"); /* nor is another phase: 1 is gathered in forward, 1 in backward */
    CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_GATHER), "[01][10]");
    g = program_of("012"); /* one that trains nothing is not reduced */
    g.frozen[1] = 1;
    CHECK_EQ_STR(joined(&g, FSDP_OP_REDUCE_SCATTER), "20");
    g = program_of("012"); /* only replicas: nothing is gathered, all is reduced at once */
    g.ddp = 1;
    CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_REDUCE), "[210]");
    CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_GATHER), "");
}

/* A bucketed collective agrees only with one that has the same members: so a difference is found if
   one rank follows the plan and another one does not. */
TEST(plan_pass, joined_agree_on_all_members) {
    enum { PLANS = 3 };
    static const int64_t bucket[PLANS] = {-1, 1025, 0};
    static const char *const orders[PLANS] = {"012210", "[01]22[10]", "[012][210]"};
    uint64_t hash[PLANS] = {0};
    uint8_t agree[PLANS][FSDP_AGREE_COUNT];
    const program g = program_of("012");
    fsdp_plan_desc d = FSDP_ZERO;
    d.without = ALL_PASSES & ~(1u << FSDP_PASS_BUCKET);
    for (int i = 0; i < PLANS; i++) {
        d.bucket_bytes = bucket[i];
        plan_program(&example, &g, &d);
        CHECK_EQ_STR(order_of(&example, FSDP_OP_ALL_GATHER, 1), orders[i]);
        const fsdp_op *op = example.kind->tape.ops;
        while (op->kind != FSDP_OP_ALL_GATHER) op++;
        hash[i] = op->what_hash;
        memcpy(agree[i], op->agree, sizeof agree[i]);
        for (int k = 0; k < i; k++) {
            CHECK(hash[k] != hash[i]);
            CHECK(memcmp(agree[k], agree[i], sizeof agree[i]) != 0); /* the parts, for the text */
        }
        planned_end(&example);
    }
}

/* A unit's own settings, and the user's hooks for it, limit what is bucketed. If the planner has
   the unit's gathers, it keeps and prefetches them. */
static const struct {
    const char *name;
    int own;
    const char *gathers, *reductions, *kept;
    int ahead; /* -1: on streams the model has no plan */
} singles[] = {
    {"factor", OWN_FACTOR, "[0123][3210]", "[32]10", "0123", 1},
    {"mesh_of_the_same_ranks", OWN_MESH, "[0123][3210]", "[3210]", "0123", 1},
    {"custom_gather", OWN_GATHER, "01[23][32]10", "[3210]", "0123", 1},
    {"custom_reduction", OWN_REDUCTION, "[0123][3210]", "[32]10", "0123", 1},
    {"all_reduce_hook", OWN_SUM_HOOK, "[0123][3210]", "[32]10", "0123", 1},
    {"gradient_hook", OWN_GRAD_HOOK, "[023]1[320]1", "[32]10", "01231", -1},
};
TEST_P(plan_pass, not_joined, singles) {
    program g = program_of("0123");
    g.own[1] = row->own;
    g.size = 4;
    CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_GATHER), row->gathers);
    CHECK_EQ_STR(joined(&g, FSDP_OP_REDUCE_SCATTER), row->reductions);
    fsdp_plan_desc d = FSDP_ZERO;
    d.without = ALL_PASSES & ~(1u << FSDP_PASS_KEEP);
    plan_program(&example, &g, &d);
    CHECK_EQ_STR(order_of(&example, FSDP_OP_ALL_GATHER, 1), row->kept);
    planned_end(&example);
    if (row->ahead < 0) return;
    g.async = 1;
    d.without = ALL_PASSES & ~(1u << FSDP_PASS_AHEAD);
    d.ahead = 1;
    plan_program(&example, &g, &d);
    const fsdpi_plan_decisions *c = &example.kind->listing.choice;
    int late = 0;
    for (int i = 0; i < c->num_acts; i++)
        late += c->acts[i].what == FSDPI_PLAN_GATHER && c->acts[i].unit == 1 && c->acts[i].late;
    CHECK_EQ_INT(late, 2); /* in forward and in backward */
    planned_end(&example);
}

/* The proof knows only the groups of the model's mesh: a model with other groups stays eager. */
static const struct {
    const char *name;
    int own, sliced;
} others[] = {{"hsdp", OWN_HSDP, 0}, {"slice", OWN_SLICE, 0}, {"across", OWN_SLICE, 1}};
TEST_P(plan_pass, other_groups, others) {
    fsdp_plan_desc d = FSDP_ZERO;
    program g = program_of("012");
    g.size = 4;
    g.own[1] = row->own, g.sliced = row->sliced, g.refused = 2;
    plan_program(&example, &g, &d);
    planned_end(&example);
}

/* test_overlap_bucketing_unit: a unit that is open around others is not joined with them. */
TEST(plan_pass, bucketing_of_nested_lives) {
    program g;
    memset(&g, 0, sizeof g);
    g.size = 2, g.num_units = 3;
    for (int u = 0; u < 3; u++) g.rows[u] = 16;
    say(&g, 0, FSDP_CALL_PRE_FORWARD);
    visit(&g, 1, 0), visit(&g, 2, 0);
    say(&g, 0, FSDP_CALL_POST_FORWARD), say(&g, 0, FSDP_CALL_PRE_BACKWARD);
    visit(&g, 2, 1), visit(&g, 1, 1);
    say(&g, 0, FSDP_CALL_POST_BACKWARD);
    CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_GATHER), "0[12]0[21]");
    g.never[0] = 1;
    CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_GATHER), "0[12][21]");
    g.num_calls = 0,
    g.num_units = 2; /* nor where the pairs are in order: 0 is open over the second */
    for (const char *f = "101000"; *f; f++) visit(&g, *f - '0', 0);
    for (const char *b = "000101"; *b; b++) visit(&g, *b - '0', 1);
    CHECK_EQ_STR(joined(&g, FSDP_OP_ALL_GATHER), "10100101");
}

/* test_compute_comm_reordering: a gather is issued before the work that does not need it; not before
   another gather; not before its own slot is free. Between a gather and its use lies work on another
   unit, but for the first of forward and of backward. A reduction is waited for by whoever takes
   its slot next, and by finalize. */
static void check_overlap(const planned *x) {
    int calls = 0, first = 0, finals = 0;
    for (int i = x->last_step; i < x->log.num; i++) {
        const fsdp_op *op = &x->log.ops[i];
        int gather = i, works = 0;
        calls += op->kind == FSDP_OP_HOOK;
        if (op->kind == FSDP_OP_WAIT && op->label == FSDP_LABEL_GATHER) {
            while (x->log.ops[gather].kind != FSDP_OP_ALL_GATHER ||
                   x->log.ops[gather].unit != op->unit)
                gather--;
            CHECK(gather >= x->last_step);
            for (int k = gather; k < i; k++) { /* before a post_ call lies the unit's work */
                const fsdp_op *hook = &x->log.ops[k];
                works += hook->kind == FSDP_OP_HOOK && hook->unit != op->unit &&
                         (hook->count == FSDP_CALL_POST_FORWARD ||
                          hook->count == FSDP_CALL_POST_BACKWARD);
            }
            CHECK_MSG(works || calls == 1 || calls == 9, "call %d: no work is behind the gather",
                      calls - 1);
            first += !works;
        }
        if (op->stream != FSDP_STREAM_COMPUTE) continue;
        for (int k = 0; k < op->num_waits; k++) {
            if (op->wait[k].stream != FSDP_STREAM_REDUCE) continue;
            CHECK(op->kind == FSDP_OP_ZERO || op->label == FSDP_LABEL_FINAL);
            finals += op->label == FSDP_LABEL_FINAL;
        }
    }
    CHECK(first == 2 && finals == 1);
}
TEST(plan_pass, reordering) {
    program g = program_of("0120");
    g.watched = 1;
    fsdp_plan_desc d = FSDP_ZERO;
    d.without = ALL_PASSES & ~(1u << FSDP_PASS_AHEAD);
    g.async = 1;
    for (d.ahead = 1; d.ahead < 4; d.ahead++) {
        plan_program(&example, &g, &d);
        const fsdpi_plan_decisions *c = &example.kind->listing.choice;
        int last = 0, early = 0, call = 0;
        for (int i = 0; i < c->num_acts; i++) {
            if (c->acts[i].what != FSDPI_PLAN_GATHER) continue;
            CHECK(c->acts[i].call >= last && c->acts[i].call <= c->acts[i].at);
            last = c->acts[i].call;
            early += c->acts[i].late;
            for (call = c->acts[i].call; c->acts[i].late && call < c->acts[i].at; call++)
                CHECK(g.calls[call].unit != c->acts[i].unit || /* its own release */
                      call == c->acts[i].call);
        }
        CHECK(early >= 4);
        check_overlap(&example);
        planned_end(&example);
    }
}

/* graph_trainer's test_passes: what is unsharded twice in a row is unsharded once; gathers of a chain
   go up in forward and down in backward. */
TEST(plan_pass, duplicate_unshards) {
    program g = program_of("0011");
    fsdp_plan_desc d = FSDP_ZERO;
    d.without = ALL_PASSES & ~(1u << FSDP_PASS_KEEP);
    d.most_bytes = 0;
    d.without |= 1u << FSDP_PASS_ARENA;
    plan_program(&example, &g, &d);
    CHECK_EQ_INT(example.report.gathers[0], 8);
    CHECK_EQ_STR(order_of(&example, FSDP_OP_ALL_GATHER, 1), "01"); /* and both stay */
    const int64_t both = example.report.bytes[1];
    planned_end(&example);
    d.most_bytes = both - 1024; /* one stays */
    plan_program(&example, &g, &d);
    CHECK_EQ_STR(order_of(&example, FSDP_OP_ALL_GATHER, 1), "010");
    planned_end(&example);
    g = program_of("012345");
    d.most_bytes = 2112; /* nothing stays but the last one */
    plan_program(&example, &g, &d);
    CHECK_EQ_STR(order_of(&example, FSDP_OP_ALL_GATHER, 1), "01234543210");
    planned_end(&example);
}

/* dedup_fsdp_reduce_scatter: RS(a) + RS(b) is RS(a + b), for any number of them. */
TEST(plan_pass, once) {
    const program g = program_of("01010");
    fsdp_plan_desc d = FSDP_ZERO;
    d.without = ALL_PASSES;
    d.with = 1u << FSDP_PASS_ONCE;
    plan_program(&example, &g, &d);
    CHECK_EQ_INT(example.report.reductions[0], 5);
    CHECK_EQ_STR(order_of(&example, FSDP_OP_REDUCE_SCATTER, 1), "10");
    /* the slot where gradients wait is held from the first post_backward to the last one */
    const fsdpi_plan_listing *l = &example.kind->listing;
    int held[2] = {0, 0};
    for (int i = 0; i < l->num_lines; i++) {
        const fsdpi_plan_member *m = &l->members[l->lines[i].members];
        if (l->lines[i].kind == FSDP_OP_ACQUIRE && l->slots[m->dst].pool == FSDP_POOL_GRAD)
            held[m->unit]++;
    }
    CHECK(held[0] == 1 && held[1] == 1);
    planned_end(&example);
}

/* One sync for all microbatches: three kinds of steps, each recorded once, and one reduction for each
   unit in the last of four. The middle and the last one are recorded a second time, since gradients
   wait in other slots as soon as the first one is replayed. */
typedef struct deferral {
    int most_kinds, kinds, recorded, replayed, state;
} deferral;
static void deferred(const deferral *want) {
    enum { MICROBATCHES = 4, STEPS = 5 };
    const program g = program_of("012");
    fsdp_plan_desc d = FSDP_ZERO;
    planned *x = &example;
    uint64_t reductions = 0;
    d.bucket_bytes = -1;
    d.most_kinds = want->most_kinds;
    memset(x, 0, sizeof *x);
    sim_init(&x->s, g.size, 0);
    x->s.async = 0;
    fsdp_world *w = sim_open(&x->s);
    CHECK(w != NULL);
    x->m = lab_model(w, NULL);
    for (int u = 0; u < g.num_units; u++) {
        const fsdp_param_desc p = fsdp_mat(NULL, 16, 16);
        x->unit[u] = lab_unit(w, x->m, NULL, &p, 1);
    }
    CALL(w, fsdp_set_reduce_scatter_unused_params(x->m, NULL, 1)); /* nobody writes gradients */
    CALL(w, fsdp_plan_create(x->m, &d, &x->plan));
    for (int step = 0; step < STEPS; step++) {
        for (int micro = 0; micro < MICROBATCHES; micro++) {
            const int last = micro + 1 == MICROBATCHES;
            fsdp_counters was = FSDP_ZERO, now = FSDP_ZERO;
            CALL(w, fsdp_set_requires_gradient_sync(x->m, NULL, last));
            CALL(w, fsdp_model_counters(x->m, &was));
            for (int u = 0; u < g.num_units; u++) lab_forward(w, x->unit[u]);
            for (int u = g.num_units - 1; u >= 0; u--) lab_backward(w, x->unit[u]);
            CALL(w, fsdp_finalize_backward(x->m));
            CALL(w, fsdp_model_counters(x->m, &now));
            reductions = now.calls[FSDP_OP_REDUCE_SCATTER] - was.calls[FSDP_OP_REDUCE_SCATTER];
            CHECK_EQ_INT(reductions, last ? 3 : 0);
            if (step + 1 == STEPS && want->kinds == 3)
                CHECK_EQ_INT(fsdp_plan_state(x->plan), FSDP_PLAN_REPLAYING);
        }
        CALL(w, fsdp_zero_grad(x->m));
    }
    CHECK_EQ_INT(fsdp_plan_count(x->plan), want->kinds);
    CHECK_EQ_INT(fsdp_plan_state(x->plan), want->state);
    if (want->kinds) CALL(w, fsdp_plan_report_get(x->plan, 0, &x->report));
    CHECK_EQ_INT(x->report.recorded, want->recorded);
    CHECK_EQ_INT(x->report.replayed, want->replayed);
    CHECK_EQ_INT(x->report.left, 0);
    planned_end(x);
}
/* With room for fewer kinds than there are, each is dropped before it comes again. */
TEST(plan_pass, deferred_reductions) {
    static const deferral rows[] = {{0, 3, 6, 13, FSDP_PLAN_REPLAYING},
                                    {1, 0, 0, 0, FSDP_PLAN_RECORDING},
                                    {2, 1, 10, 9, FSDP_PLAN_RECORDING},
                                    {3, 3, 6, 13, FSDP_PLAN_REPLAYING}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) deferred(&rows[i]);
}
