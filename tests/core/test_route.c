/* test_route.c - how a unit gathers and reduces, for every combination of facts: each route is
   followed step by step on a model of what gradients are (where, in which dtype, summed over whom,
   divided by what), which knows the rules of each step and nothing of how routes are chosen.
   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(ASAN)
#include "harness.h"
#define FSDP_NO_BACKEND
#define FSDP_IMPLEMENTATION
#include "fsdp.h"

enum { SLOT, INPUT, SUMS, SHARD }; /* where gradients are */

typedef struct {
    const fsdpi_facts *f;
    const fsdpi_route *r;
    int adds;                         /* the shard gradient holds a reduced gradient */
    int at;                           /* SLOT, ... */
    fsdp_dtype dtype;                 /* that they are in */
    double divided;                   /* by what they have been divided */
    int over_shards, over_replicas;   /* summed over them */
    int flags, hooked, wrote;         /* flags ride along; the hook has seen them; ... */
    int folded, done, rounded;        /* rounded: to something narrower than the reduce dtype */
} story;

static int is_wide(fsdp_dtype d) { return d == FSDP_F32 || d == FSDP_F64; }

/* What reads narrower gradients than the reduction's dtype, and loses nothing. */
static int widens(const story *s) {
    return s->dtype == s->f->reduce || (fsdp_dtype_size(s->dtype) == 2 && s->f->reduce == FSDP_F32);
}

static const char *told(const story *s, const char *what) {
    static char text[600];
    const fsdpi_facts *f = s->f;
    int used = snprintf(
        text, sizeof text,
        "%s: W %d R %d one_part %d one_train %d ext %d %s>%s grad %s reduce %s off %d "
        "fuses %d sync %d ar %d hook %d div %g adds %d:",
        what, f->shards, f->replicas, f->one_part, f->one_train, f->extended,
        fsdp_dtype_name(f->stored), fsdp_dtype_name(f->gathered), fsdp_dtype_name(f->grad),
        fsdp_dtype_name(f->reduce), f->offload, f->fuses, f->sync, f->all_reduce,
        f->hook, f->divide_factor, s->adds);
    for (int i = 0; s->r->collect[i]; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, " %d", s->r->collect[i]);
    for (int i = 0; s->r->reduce[i]; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, " %d", s->r->reduce[i]);
    return text;
}

#define RULE(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) CHECK_MSG(0, "%s", told(s, #condition));                                 \
    } while (0)

/* A reduce_scatter: of a reduce input, once, in one dtype unless the backend converts as it reads. */
static void scatters(story *s, int fused) {
    RULE(s->f->shards > 1 && !s->over_shards && s->flags);
    RULE(s->at == INPUT || (s->at == SLOT && s->folded));
    RULE(fused ? s->f->fuses && widens(s) && is_wide(s->f->reduce) : 1);
    RULE(s->dtype == s->f->reduce || (s->f->fuses && widens(s)));
    s->over_shards = 1;
    s->dtype = s->f->reduce;
}

/* Only sums that nothing else is to be done with may go into the shard gradient: peers can write
   there, nobody else wants to see them, and there is one dtype. */
static void ends(story *s) {
    RULE(s->f->replicas == 1 && s->f->one_train && !s->f->hook && !s->f->offload);
    s->at = SHARD;
}

/* A backend stores sums. A fused one divides f16 before it does so: no more than a mean is stored, and
   what goes on to the replicas has lost nothing. */
static void stores(story *s) {
    const fsdpi_facts *f = s->f;
    const int goes_on = f->replicas > 1 && !s->over_replicas;
    int bits;
    s->divided *= s->over_replicas ? 1 / s->r->sums : s->r->sums;
    if (s->r->divides == (s->over_replicas ? FSDPI_STEP_REPLICAS : FSDPI_STEP_PARTIAL)) s->divided *= s->r->factor;
    if (!f->fuses || f->custom || f->reduce != FSDP_F16) {
        RULE(s->divided == s->r->before);
        return;
    }
    if (goes_on) RULE(s->divided >= f->shards || f->divide_factor != 0);
    if (goes_on) RULE(frexp(s->divided, &bits) == 0.5 && s->divided <= fmax(s->r->factor, 1));
    else RULE(s->divided == s->r->factor);
}

static void step(story *s, int what) {
    const fsdpi_facts *f = s->f;
    switch (what) {
    case FSDPI_STEP_WROTE:
        RULE(!s->wrote);
        s->wrote = 1;
        break;
    case FSDPI_STEP_KEEP: RULE(s->wrote && f->one_train); break;
    case FSDPI_STEP_SUM:
        RULE(s->wrote && s->at == SLOT);
        s->at = INPUT;
        s->dtype = f->reduce;
        s->divided = s->r->before;
        break;
    case FSDPI_STEP_FOLD:
        RULE(!s->folded && !s->flags && !s->over_shards);
        if (s->at == SLOT) s->divided = s->r->before;
        s->folded = 1;
        break;
    case FSDPI_STEP_USERS:
        RULE(s->folded && !s->flags && !s->over_shards && f->shards * f->replicas > 1);
        s->flags = 1;
        break;
    case FSDPI_STEP_SCATTER_FUSED:
        scatters(s, 1);
        ends(s);
        s->dtype = f->grad;
        s->divided = s->r->factor;
        break;
    case FSDPI_STEP_SCATTER: /* into what it finds: it can neither cast nor add */
        scatters(s, 0);
        ends(s);
        RULE(f->grad == f->reduce && !s->adds);
        break;
    case FSDPI_STEP_RESCALE:
        RULE(s->at == SHARD && s->divided != 0);
        s->divided = s->r->factor;
        break;
    case FSDPI_STEP_PARTIAL_FUSED:
    case FSDPI_STEP_PARTIAL:
        scatters(s, what == FSDPI_STEP_PARTIAL_FUSED);
        s->at = SUMS;
        stores(s);
        break;
    case FSDPI_STEP_REPLICAS:
        RULE(f->replicas > 1 && f->all_reduce && !s->over_replicas && s->flags && !s->hooked);
        RULE(f->shards > 1 ? s->at == SUMS : s->r->from_input);
        RULE(s->dtype == f->reduce);
        s->over_replicas = 1;
        stores(s);
        break;
    case FSDPI_STEP_HOOK: /* sees sums in the reduce dtype, before the rest of the division */
        RULE(f->hook && !s->hooked && s->at != SHARD && s->dtype == f->reduce);
        RULE(s->over_shards == (f->shards > 1) && s->over_replicas == (f->replicas > 1));
        s->hooked = 1;
        break;
    case FSDPI_STEP_OUT:
        RULE(s->at == SUMS ||
             (s->r->from_input && (s->at == INPUT || (s->at == SLOT && s->folded))));
        RULE(widens(s));
        s->at = SHARD;
        s->dtype = f->grad;
        s->divided = s->r->factor;
        break;
    case FSDPI_STEP_DONE:
        RULE(!s->done && s->at == SHARD && s->dtype == f->grad && s->divided == s->r->factor);
        RULE(s->over_shards == (f->shards > 1) && s->over_replicas == (f->replicas > 1));
        RULE(s->hooked == f->hook && s->flags == (f->shards * f->replicas > 1));
        s->done = 1;
        break;
    default: CHECK_MSG(0, "%s", told(s, "a step that is none"));
    }
}

/* One rank whose caller may write the shard gradient itself: then it has to, and else it must not. */
static int writes_shard(const story *s) {
    const fsdpi_facts *f = s->f;
    int same = f->stored == f->gathered && f->gathered == f->reduce && f->reduce == f->grad;
    int alone = f->shards * f->replicas == 1 && f->one_part && !f->extended && !f->offload;
    int as_it_is = f->sync && !f->hook && (f->divide_factor == 0 || f->divide_factor == 1);
    return same && alone && as_it_is;
}

static double expected_before(const fsdpi_facts *f, double factor) {
    double p = 1;
    if (f->reduce != FSDP_F16 || f->shards * f->replicas == 1) return 1;
    if (f->fuses && !f->custom) return 1;
    while (factor / p == floor(factor / p) && p * p < factor) p += p;
    return p;
}

static void follow(const fsdpi_facts *f, const fsdpi_route *r, int adds) {
    story now = {f, r, adds, SLOT, f->gathered, 0, 0, 0, 0, 0, 0, 0, 0, 0}, *s = &now;
    int ranks = f->shards * f->replicas, staged = !f->one_part || f->extended || f->offload;
    int kept = 0;
    staged |= f->stored != f->gathered;
    RULE(r->gather == (staged          ? FSDPI_GATHER_STAGED
                       : f->shards > 1 ? FSDPI_GATHER_SHARDS
                                       : FSDPI_GATHER_ALIAS));
    RULE(r->factor == (f->divide_factor != 0 ? f->divide_factor : ranks));
    RULE(r->before == expected_before(f, r->factor));
    RULE(r->write_shard == writes_shard(s));
    RULE(r->from_input == (f->shards == 1));
    for (int i = 0; r->collect[i]; i++) {
        RULE(i < FSDPI_COLLECT_STEPS - 1);
        step(s, r->collect[i]);
        kept |= r->collect[i] == FSDPI_STEP_KEEP;
    }
    RULE(s->wrote && kept == (s->at == SLOT));
    if (f->sync && !f->hook) RULE(r->grads_ahead == kept || (f->replicas > 1 && !f->all_reduce));
    if (!r->reduce[0]) { /* kept on this rank: nothing is lost */
        RULE(!f->sync || (f->shards == 1 && f->replicas > 1 && !f->all_reduce));
        RULE(s->dtype == f->reduce);
        return;
    }
    RULE(f->sync);
    for (int i = 0; r->reduce[i]; i++) {
        RULE(i < FSDPI_REDUCE_STEPS - 1);
        RULE(!s->done);
        step(s, r->reduce[i]);
    }
    if (f->replicas > 1 && !f->all_reduce) RULE(!s->done && s->at == SUMS && s->over_shards);
    else RULE(s->done);
    /* No copy that can be done without: what a backend can do in the reduction is done there. */
    if (f->shards > 1 && f->fuses && is_wide(f->reduce) && f->replicas == 1 && f->one_train &&
        !f->hook && !f->offload)
        RULE(r->reduce[2] == FSDPI_STEP_SCATTER_FUSED);
    if (f->gathered == f->reduce && f->one_train) RULE(kept);
}

static const fsdp_dtype floats[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16};
static const double factors[] = {0, 1, 3, 8};

/* All bits of `bits` as flags of the facts. */
static void flags_of(fsdpi_facts *f, int bits) {
    f->offload = bits & 1, f->fuses = bits >> 1 & 1, f->sync = bits >> 2 & 1;
    f->all_reduce = bits >> 3 & 1, f->hook = bits >> 4 & 1, f->extended = bits >> 5 & 1;
    f->custom = bits >> 6 & 1;
}

/* parts: 0: one part; 1: several, of which one has trainables; 2: several of them. */
TEST(route, every_combination, SECONDS(60)) {
    long combinations = 0;
    for (int w = 1; w <= 4; w++)
        for (int replicas = 1; replicas <= 2; replicas++)
            for (int parts = 0; parts < 3; parts++)
                for (int dtypes = 0; dtypes < 256; dtypes++)
                    for (int bits = 0; bits < 128; bits++)
                        for (int k = 0; k < 4; k++) {
                            fsdpi_facts f;
                            memset(&f, 0, sizeof f);
                            f.shards = w;
                            f.replicas = replicas;
                            f.one_part = parts == 0;
                            f.one_train = parts < 2;
                            f.stored = floats[dtypes & 3];
                            f.gathered = floats[dtypes >> 2 & 3];
                            f.grad = floats[dtypes >> 4 & 3];
                            f.reduce = floats[dtypes >> 6];
                            flags_of(&f, bits);
                            f.divide_factor = factors[k];
                            for (int adds = 0; adds < 2; adds++, combinations++) {
                                const fsdpi_route r = fsdpi_route_of(&f, adds);
                                follow(&f, &r, adds);
                            }
                        }
    h_message("%ld combinations", combinations);
}
