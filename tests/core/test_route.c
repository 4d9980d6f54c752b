/* test_route.c - a unit's gather and gradient path for every combination of facts and of gradients
   that it holds. Each path is followed step by step on a model of the places and their contents
   (dtype, summed over which groups, divided by which factor, from which gradients). The model knows
   the rules of each step, but not how paths are chosen.
   SPDX-License-Identifier: MIT */
#define TAGS AT_NIGHT(ASAN)
#include "harness.h"
#define FSDP_NO_BACKEND
#define FSDP_IMPLEMENTATION
#include "fsdp.h"

typedef struct { /* contents of a place */
    int has;     /* ZEROS: the place is taken, and only its padding counts */
    fsdp_dtype dtype;
    double divided;                 /* product of the divisions so far */
    int over_shards, over_replicas; /* summed over them */
    int sources;                    /* FSDPI_HELD_* that it contains */
    int folded, hooked;
} content;
enum { NOTHING, GRADIENTS, ZEROS };

typedef struct {
    const fsdpi_facts *f;
    const fsdpi_grad_path *r;
    int held;
    content at[FSDPI_PLACES];
    double factor, before; /* expected */
} story;

static int is_wide(fsdp_dtype d) { return d == FSDP_F32 || d == FSDP_F64; }

/* Returns 1 if a reduction can read these gradients without loss: they have its dtype, or a
   narrower one. */
static int widens(const story *s, const content *c) {
    return c->dtype == s->f->reduce || (fsdp_dtype_size(c->dtype) == 2 && s->f->reduce == FSDP_F32);
}

static const char *told(const story *s, const char *what) {
    static char text[900];
    const fsdpi_facts *f = s->f;
    int used = snprintf(
        text, sizeof text,
        "%s: W %d R %d one_part %d one_train %d ext %d %s>%s grad %s reduce %s off %d "
        "fuses %d sync %d ar %d hook %d custom %d div %g held %d:",
        what, f->shards, f->replicas, f->one_part, f->one_train, f->extended,
        fsdp_dtype_name(f->stored), fsdp_dtype_name(f->gathered), fsdp_dtype_name(f->grad),
        fsdp_dtype_name(f->reduce), f->offload, f->fuses, f->sync, f->all_reduce, f->hook,
        f->custom_all_reduce, f->divide_factor, s->held);
    for (int i = 0; i < s->r->num; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, " %d(%d>%d %g how %d)",
                         s->r->steps[i].kind, s->r->steps[i].from, s->r->steps[i].to,
                         s->r->steps[i].scale, s->r->steps[i].how);
    return text;
}

#define RULE(condition)                                                                            \
    do {                                                                                           \
        if (!(condition)) CHECK_MSG(0, "%s", told(s, #condition));                                 \
    } while (0)

static int about(double a, double b) { return fabs(a / b - 1) < 1e-12; }

/* Multiplies by a step's scale; one of the steps divides by the factor. */
static content scaled(const story *s, const fsdpi_step *e, content c) {
    c.divided /= e->how & FSDPI_DIVIDES ? e->scale / s->factor : e->scale;
    if (about(c.divided, s->factor)) c.divided = s->factor;
    return c;
}

/* Writes a step's result to a place: replaces its contents or, if the step ADDS, adds to equal
   ones. */
static void arrives(story *s, const fsdpi_step *e, content made) {
    content *to = &s->at[e->to];
    if (e->how & FSDPI_ADDS) {
        RULE(to->has == GRADIENTS && to->dtype == made.dtype && to->divided == made.divided);
        RULE(to->over_shards == made.over_shards && to->over_replicas == made.over_replicas);
        RULE(!(to->sources & made.sources));
        made.sources |= to->sources;
    } else if (e->from != e->to) { /* nothing may be lost */
        RULE(to->has != GRADIENTS);
    }
    *to = made;
}

/* Follows a reduce_scatter: it reads a reduce input, once, in one dtype unless the backend
   converts. Only final sums may go into the shard gradient: peers can write there, nothing else
   needs them, and the dtypes are equal. */
static content scatters(story *s, const fsdpi_step *e, content c) {
    const fsdpi_facts *f = s->f;
    int ends = e->to == FSDP_POOL_SHARD_GRAD;
    RULE(f->shards > 1 && !c.over_shards && (e->how & FSDPI_RELEASES));
    RULE(e->from == FSDP_POOL_REDUCE_IN || (e->from == FSDP_POOL_GRAD && c.folded));
    RULE(c.dtype == f->reduce || (f->fuses && widens(s, &c)));
    RULE((e->scale == 1 && !(e->how & FSDPI_DIVIDES)) || f->fuses);
    RULE(!(e->how & FSDPI_ADDS) || (f->fuses && is_wide(f->reduce)));
    if (ends) RULE(f->replicas == 1 && f->one_train && !f->hook && !f->offload);
    if (ends) RULE(f->grad == f->reduce || (f->fuses && is_wide(f->reduce)));
    c.over_shards = 1;
    c.dtype = ends ? f->grad : f->reduce;
    return scaled(s, e, c);
}

/* Checks the division of sums that a backend stores. A fused one divides f16 first: final values
   are means, and sums for the replicas are divided by a power of two, which loses nothing. */
static void stores(story *s, const content *c) {
    const fsdpi_facts *f = s->f;
    int bits, goes_on = f->replicas > 1 && !c->over_replicas;
    if (!f->fuses || f->custom_all_reduce || f->reduce != FSDP_F16) RULE(c->divided == s->before);
    else if (goes_on) RULE(frexp(c->divided, &bits) == 0.5 && c->divided >= f->shards);
    else RULE(c->divided == s->factor);
}

static void step(story *s, const fsdpi_step *e) {
    const fsdpi_facts *f = s->f;
    const content none = {NOTHING, 0, 0, 0, 0, 0, 0, 0};
    content c = e->from < FSDPI_PLACES ? s->at[e->from] : none;
    if (e->from < FSDPI_PLACES) RULE(c.has == GRADIENTS);
    if (e->how & FSDPI_ACQUIRES) RULE(!s->at[e->to].has);
    else if (e->to != FSDP_POOL_SHARD_GRAD) RULE(s->at[e->to].has);
    switch (e->kind) {
    case FSDPI_STEP_ZERO_IN:
        RULE(e->from == FSDPI_NOWHERE && e->to == FSDP_POOL_REDUCE_IN && e->how == FSDPI_ACQUIRES);
        s->at[e->to].has = ZEROS;
        return;
    case FSDPI_STEP_TO_IN:
        RULE(e->from == FSDP_POOL_GRAD && e->to == FSDP_POOL_REDUCE_IN && (e->how & FSDPI_RELEASES));
        c = scaled(s, e, c);
        c.dtype = f->reduce;
        break;
    case FSDPI_STEP_FOLD:
    case FSDPI_STEP_DIVIDE:
        RULE(!c.folded && e->from == FSDP_POOL_GRAD && f->one_train);
        RULE(e->kind == FSDPI_STEP_DIVIDE || e->scale == 1);
        c = scaled(s, e, c);
        c.folded = 1;
        break;
    case FSDPI_STEP_SCATTER:
        RULE(e->to == FSDP_POOL_SHARD_GRAD);
        c = scatters(s, e, c);
        break;
    case FSDPI_STEP_RESCALE:
        RULE(e->from == FSDP_POOL_SHARD_GRAD && !(s->held & FSDPI_HELD_SHARD));
        c = scaled(s, e, c);
        break;
    case FSDPI_STEP_TO_OUT:
        RULE(e->to == FSDP_POOL_REDUCE_OUT || e->to == FSDPI_FRESH);
        c = scatters(s, e, c);
        stores(s, &c);
        break;
    case FSDPI_STEP_ADD:
        RULE(e->from == FSDPI_FRESH && e->to == FSDP_POOL_REDUCE_OUT && (e->how & FSDPI_ADDS));
        break;
    case FSDPI_STEP_REPLICAS:
        RULE(f->replicas > 1 && f->all_reduce && !c.over_replicas && !c.hooked);
        RULE(c.over_shards == (f->shards > 1) && c.dtype == f->reduce && e->from == e->to);
        c.over_replicas = 1;
        c = scaled(s, e, c);
        stores(s, &c);
        break;
    case FSDPI_STEP_HOOK: /* sees sums in the reduce dtype, before the rest of the division */
        RULE(f->hook && !c.hooked && e->from == e->to && c.dtype == f->reduce && e->scale == 1);
        RULE(c.over_shards == (f->shards > 1) && c.over_replicas == (f->replicas > 1));
        c.hooked = 1;
        break;
    case FSDPI_STEP_TO_SHARD:
        RULE(e->to == FSDP_POOL_SHARD_GRAD && widens(s, &c) && (e->how & FSDPI_RELEASES));
        RULE(f->shards > 1 ? e->from == FSDP_POOL_REDUCE_OUT
                           : (c.folded || e->from == FSDP_POOL_REDUCE_IN));
        RULE(c.hooked == f->hook);
        c = scaled(s, e, c);
        c.dtype = f->grad;
        break;
    default: CHECK_MSG(0, "%s", told(s, "a step that is none of a reduction"));
    }
    arrives(s, e, c);
    if (e->how & FSDPI_RELEASES) s->at[e->from].has = NOTHING;
}

/* Returns 1 for a single rank whose caller may write the shard gradient itself: then it must,
   otherwise it must not. */
static int writes_shard(const story *s) {
    const fsdpi_facts *f = s->f;
    int same = f->stored == f->gathered && f->gathered == f->reduce && f->reduce == f->grad;
    int alone = f->shards * f->replicas == 1 && f->one_part && !f->extended && !f->offload;
    int as_it_is = f->sync && !f->hook && f->divide_factor == 1;
    return same && alone && as_it_is && !(s->held & ~FSDPI_HELD_SHARD);
}

/* Returns the divisor before the sum. It must not depend on the divide factor, which may change
   while gradients wait. */
static double expected_before(const fsdpi_facts *f) {
    double p = 1, ranks = f->shards * f->replicas;
    if (f->reduce != FSDP_F16 || ranks < 2 || (f->fuses && !f->custom_all_reduce)) return 1;
    while (ranks / p == floor(ranks / p) && p * p < ranks) p += p;
    return p;
}

/* Returns the divisor of the shard group's sums that wait. */
static double expected_sums(const fsdpi_facts *f) {
    double p = 1;
    if (f->reduce != FSDP_F16 || !f->fuses || f->custom_all_reduce) return expected_before(f);
    while (p < f->shards) p += p;
    return p;
}

static void follow(const fsdpi_facts *f, int held) {
    const fsdpi_grad_path route = fsdpi_grad_path_of(f, held);
    story now, *s = &now;
    memset(s, 0, sizeof *s);
    s->f = f, s->r = &route, s->held = held, s->before = expected_before(f);
    s->factor = f->divide_factor;
    int W = f->shards > 1, R = f->replicas > 1, at = 0, places = 0, input = held & 3;
    int staged = !f->one_part || f->extended || f->offload || f->stored != f->gathered;
    RULE(fsdpi_facts_gather(f) == (staged || (f->debug && !W) ? FSDPI_GATHER_STAGED
                                   : W                        ? FSDPI_GATHER_SHARDS
                                                              : FSDPI_GATHER_ALIAS));
    RULE(fsdpi_facts_write_shard(f, held) == writes_shard(s));
    const content written = {GRADIENTS, f->gathered, 1, 0, 0, FSDPI_HELD_GRAD, 0, 0};
    const content in = {GRADIENTS, f->reduce, s->before, 0, 0, FSDPI_HELD_IN, 0, 0};
    const content out = {GRADIENTS, f->reduce, expected_sums(f), 1, 0, FSDPI_HELD_OUT, 0, 0};
    const content shard = {GRADIENTS, f->grad, s->factor, W, R, FSDPI_HELD_SHARD, 0, 0};
    if (held & FSDPI_HELD_GRAD) s->at[FSDP_POOL_GRAD] = written;
    if (held & FSDPI_HELD_IN) s->at[FSDP_POOL_REDUCE_IN] = in;
    if (held & FSDPI_HELD_OUT) s->at[FSDP_POOL_REDUCE_OUT] = out;
    if (held & FSDPI_HELD_SHARD) s->at[FSDP_POOL_SHARD_GRAD] = shard;
    s->at[FSDP_POOL_SHARD_GRAD].hooked = f->hook;
    RULE(route.num <= FSDPI_GRAD_PATH_STEPS && route.held == held);
    if (!(held & FSDPI_HELD_SLOTS)) { /* written straight into the shard gradient */
        RULE(route.done && route.num == 0);
        return;
    }
    for (int i = 0; i < route.num; i++) step(s, &route.steps[i]);
    for (int i = FSDP_POOL_GRAD; i < FSDPI_PLACES; i++)
        if (s->at[i].has) at = i, places++;
    if (route.done) { /* each gradient has arrived, once */
        RULE(f->sync && (!R || f->all_reduce) && places == 0);
        RULE(s->at[FSDP_POOL_SHARD_GRAD].sources == held &&
             s->at[FSDP_POOL_SHARD_GRAD].dtype == f->grad);
        RULE(s->at[FSDP_POOL_SHARD_GRAD].divided == s->factor);
    } else if (f->sync && W) { /* sums wait */
        RULE(R && !f->all_reduce && places == 1 && at == FSDP_POOL_REDUCE_OUT);
        RULE(s->at[at].sources == (held & ~FSDPI_HELD_SHARD) && s->at[at].over_shards);
        RULE(s->at[at].divided == expected_sums(f));
    } else { /* kept on this rank: in one place, in the reduction's dtype */
        int waits = (held & FSDPI_HELD_OUT) != 0;
        RULE(!f->sync || (!W && R && !f->all_reduce));
        RULE(places == (input != 0) + waits && s->at[FSDP_POOL_REDUCE_OUT].has == waits);
        at = s->at[FSDP_POOL_GRAD].has ? FSDP_POOL_GRAD : FSDP_POOL_REDUCE_IN;
        if (input) RULE(s->at[at].sources == input && s->at[at].dtype == f->reduce);
        /* and not copied without need */
        if (input == FSDPI_HELD_GRAD && f->gathered == f->reduce && f->one_train)
            RULE(at == FSDP_POOL_GRAD && route.num == 0);
    }
    /* No unnecessary copy: the reduction itself does all that the backend can do. */
    if (route.done && input == FSDPI_HELD_GRAD && f->gathered == f->reduce && W && f->fuses &&
        is_wide(f->reduce) && !R && f->one_train && !f->hook && !f->offload)
        RULE(route.num == 2 && route.steps[1].kind == FSDPI_STEP_SCATTER);
    /* There are two gradient slots if a reduction reads the written one, while the next unit's
       gradients are written. */
    if (route.done && input == FSDPI_HELD_GRAD && !f->hook)
        RULE(!fsdpi_facts_copy_first(f, 0) == (route.steps[0].kind != FSDPI_STEP_ZERO_IN));
}

static const fsdp_dtype floats[] = {FSDP_F32, FSDP_F64, FSDP_F16, FSDP_BF16};
static const double factors[] = {0, 3, 1}; /* 1: for one rank */

/* Sets the facts' flags from `bits`. */
static void flags_of(fsdpi_facts *f, int bits) {
    f->offload = bits & 1, f->debug = bits >> 1 & 1, f->fuses = bits >> 2 & 1;
    f->sync = bits >> 3 & 1, f->all_reduce = bits >> 4 & 1, f->hook = bits >> 5 & 1;
    f->extended = bits >> 6 & 1, f->custom_all_reduce = bits >> 7 & 1;
}

/* parts: 0: one dtype group; 1: several, one with trainable parameters; 2: several with these. */
TEST(route, every_combination, SECONDS(120)) {
    long combinations = 0;
    for (int w = 1; w <= 4; w++)
        for (int replicas = 1; replicas <= 2; replicas++)
            for (int parts = 0; parts < 3; parts++)
                for (int dtypes = 0; dtypes < 256; dtypes++)
                    for (int bits = 0; bits < 256; bits++)
                        for (int k = 0; k < (w * replicas == 1 ? 3 : 2); k++) {
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
                            f.divide_factor = factors[k] > 0 ? factors[k] : w * replicas;
                            for (int held = 0; held < 16; held++) {
                                if ((held & FSDPI_HELD_OUT) && (w == 1 || replicas == 1)) continue;
                                /* no slot to reduce: only if backward writes the shard gradient */
                                if (!(held & FSDPI_HELD_SLOTS) &&
                                    !fsdpi_facts_write_shard(&f, held))
                                    continue;
                                follow(&f, held);
                                combinations++;
                            }
                        }
    h_message("%ld combinations", combinations);
}
