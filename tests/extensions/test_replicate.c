/* test_replicate.c - buckets of fsdp_replicate.h: the parameters of each bucket, the time and order
   of their reductions, the bits of gradients, and errors.

   Most gradients are integers, so that their sum is exact in any order; lab_truth of lab_net.h then
   knows every bit.

   SPDX-License-Identifier: MIT */
#define TAGS GLOO | NCCL | AT_NIGHT(TSAN)
#include "harness.h"
#include <math.h> /* fabs */
#include "golden.h"
#include "lab_net.h"
#include "sim.h"

/* ---- which bucket a tensor belongs to -------------------------------------------------------- */

enum { TENSORS = 64, CAPS = 4 };                 /* in random lists */
enum { TENSORS_MAX = 1024, CAPS_MAX = TENSORS }; /* in a file */
#define MIB (int64_t)1048576

typedef struct list {
    int count, num_caps, has_key, has_order;
    int64_t nbytes[TENSORS_MAX], caps[CAPS_MAX];
    int32_t key[TENSORS_MAX], order[TENSORS_MAX];
} list;

typedef struct buckets {
    int count;
    int32_t bucket[TENSORS_MAX], place[TENSORS_MAX];
    int64_t cap[TENSORS_MAX], nbytes[TENSORS_MAX]; /* of each bucket */
} buckets;

static void assign(const list *l, buckets *b) {
    memset(b, 0x5a, sizeof *b);
    memset(b->nbytes, 0, sizeof b->nbytes);
    b->count = fsdp_replicate_assign(l->nbytes, l->has_key ? l->key : NULL,
                                     l->has_order ? l->order : NULL, l->count, l->caps, l->num_caps,
                                     b->bucket, b->place, b->cap);
    for (int i = 0; i < l->count && b->count > 0; i++) {
        W_CHECK(b->bucket[i] >= 0 && b->bucket[i] < b->count, "tensor %d is in %d", i,
                b->bucket[i]);
        b->nbytes[b->bucket[i]] += l->nbytes[i];
    }
}

/* Returns the tensors of each bucket in order, as "[0,1][2]". */
static const char *buckets_text(const buckets *b, int count, char *out, size_t size) {
    size_t at = 0;
    out[0] = 0;
    for (int k = 0; k < b->count; k++) {
        at += (size_t)snprintf(out + at, size - at, "[");
        for (int place = 0, found = 1; found; place++) {
            found = 0;
            for (int i = 0; i < count; i++)
                if (b->bucket[i] == k && b->place[i] == place) {
                    at += (size_t)snprintf(out + at, size - at, place ? ",%d" : "%d", i);
                    found++;
                }
            W_CHECK(found <= 1, "bucket %d has %d tensors at %d", k, found, place);
        }
        at += (size_t)snprintf(out + at, size - at, "]");
    }
    return out;
}

/* Parses numbers between spaces. Returns their count. */
static int numbers(const char *text, int64_t *out) {
    int n = 0;
    for (char *end; *text; text = end) {
        out[n] = strtoll(text, &end, 10);
        if (end == text) break;
        n++;
    }
    return n;
}
static int numbers32(const char *text, int32_t *out) {
    int64_t wide[TENSORS];
    const int n = numbers(text, wide);
    for (int i = 0; i < n; i++) out[i] = (int32_t)wide[i];
    return n;
}

/* Examples with PyTorch's answers. */
static const struct {
    const char *name, *sizes, *key, *order, *caps, *want, *want_caps, *want_bytes;
} vectors[] = {
    {"equal", "100 100 100 100 100 100", "", "", "250", "[0,1,2][3,4,5]", "250 250", "300 300"},
    {"exact_hit", "100 100 100 100 100 100", "", "", "300", "[0,1,2][3,4,5]", "300 300", "300 300"},
    {"small_first", "100 100 100 100 100 100", "", "", "100 250", "[0][1,2,3][4,5]", "100 250 250",
     "100 300 200"},
    {"oversize_first", "1000 10 10 10", "", "", "50", "[0][1,2,3]", "50 50", "1000 30"},
    {"oversize_joins", "10 10 1000 10", "", "", "50 100", "[0,1,2][3]", "50 100", "1020 10"},
    {"definition_order", "4194304 2097152 41943040 1048576 31457280", "", "", "1048576 26214400",
     "[0][1,2][3,4]", "1048576 26214400 26214400", "4194304 44040192 32505856"},
    {"ready_order", "4194304 2097152 41943040 1048576 31457280", "", "4 3 2 1 0",
     "1048576 26214400", "[4][3,2][1,0]", "1048576 26214400 26214400", "31457280 42991616 6291456"},
    {"two_dtypes", "40 40 40 40 40 40", "0 1 0 1 0 1", "", "60 100", "[0,2][1,3][4][5]",
     "60 60 100 100", "80 80 40 40"},
    {"two_dtypes_ready", "40 40 40 40 40 40", "0 1 0 1 0 1", "5 4 3 2 1 0", "60 100",
     "[5,3][4,2][1][0]", "60 60 100 100", "80 80 40 40"},
    {"no_elements", "0 0 100 0", "", "", "100 200", "[0,1,2][3]", "100 200", "100 0"},
    {"one_bucket", "16000000 8000 16000000 8000 16000000 8000 16000000 8000", "", "",
     "9223372036854775807", "[0,1,2,3,4,5,6,7]", "9223372036854775807", "64032000"},
    {"linears_ready", "16000000 8000 16000000 8000 16000000 8000 16000000 8000", "",
     "7 6 5 4 3 2 1 0", "1048576 26214400", "[7,6][5,4,3,2][1,0]", "1048576 26214400 26214400",
     "16008000 32016000 16008000"},
    {"linears_defined", "16000000 8000 16000000 8000 16000000 8000 16000000 8000", "", "",
     "1048576 26214400", "[0][1,2,3,4][5,6,7]", "1048576 26214400 26214400",
     "16000000 32016000 16016000"},
    {"two_devices", "50 50 50 50", "0 3 0 3", "", "80", "[0,2][1,3]", "80 80", "100 100"},
    {"list_of_caps", "10 10 10 10 10 10 10 10 10 10", "", "", "20 30 40",
     "[0,1][2,3,4][5,6,7,8][9]", "20 30 40 40", "20 30 40 10"},
    {"more_caps", "10 10", "", "", "5 10 20 40", "[0][1]", "5 10", "10 10"},
    {"bias_first", "8000 16000000 8000 16000000 8000 16000000 8000 16000000", "", "",
     "1048576 26214400", "[0,1][2,3,4,5][6,7]", "1048576 26214400 26214400",
     "16008000 32016000 16008000"},
    {"cap_50", "8000 16000000 8000 16000000 8000 16000000 8000 16000000", "", "",
     "1048576 52428800", "[0,1][2,3,4,5,6,7]", "1048576 52428800", "16008000 48024000"}};

TEST(replicate, buckets_beyond_all_bytes) {
    const int64_t nbytes[3] = {INT64_MAX - 1, 5, 7}, cap = INT64_MAX;
    int32_t bucket[3];
    CHECK_EQ_INT(fsdp_replicate_assign(nbytes, NULL, NULL, 3, &cap, 1, bucket, NULL, NULL), 2);
    CHECK(bucket[0] == 0 && bucket[1] == 0 && bucket[2] == 1);
}

TEST_P(replicate, buckets_vectors, vectors) {
    list l;
    buckets b;
    int64_t want[TENSORS];
    char text[500];
    memset(&l, 0, sizeof l);
    l.count = numbers(row->sizes, l.nbytes);
    l.num_caps = numbers(row->caps, l.caps);
    l.has_key = numbers32(row->key, l.key);
    l.has_order = numbers32(row->order, l.order);
    assign(&l, &b);
    CHECK_EQ_STR(buckets_text(&b, l.count, text, sizeof text), row->want);
    CHECK_EQ_INT(numbers(row->want_caps, want), b.count);
    CHECK_EQ_MEM(want, b.cap, (size_t)b.count * sizeof *want);
    CHECK_EQ_INT(numbers(row->want_bytes, want), b.count);
    CHECK_EQ_MEM(want, b.nbytes, (size_t)b.count * sizeof *want);
}

TEST(replicate, buckets_golden) {
    golden g;
    int cases = 0;
    GOLDEN_OPEN(&g, "buckets.txt", "buckets");
    for (; golden_case(&g); cases++) {
        static list l;
        static buckets b, want;
        snprintf(w_case, sizeof w_case, "%s", g.name);
        memset(&l, 0, sizeof l);
        memset(&want, 0, sizeof want);
        while (golden_line(&g)) {
            if (golden_is(&g, "sizes")) {
                l.count = (int)golden_int(&g);
                CHECK(l.count >= 0 && l.count <= TENSORS_MAX);
                golden_ints(&g, l.count, l.nbytes);
            } else if (golden_is(&g, "keys")) {
                for (int i = 0; i < l.count; i++) {
                    l.key[i] = strcmp(golden_word(&g), "H") == 0;
                    l.nbytes[i] *= l.key[i] ? 2 : 4;
                }
                l.has_key = 1;
            } else if (golden_is(&g, "caps")) {
                l.num_caps = (int)golden_int(&g);
                CHECK(l.num_caps >= 0 && l.num_caps <= CAPS_MAX);
                golden_ints(&g, l.num_caps, l.caps);
            } else if (golden_is(&g, "order")) {
                l.has_order = strcmp(golden_peek(&g), "-") != 0;
                for (int i = 0; i < l.count && l.has_order; i++) l.order[i] = (int)golden_int(&g);
            } else if (golden_is(&g, "bucket")) {
                const int k = want.count++;
                want.cap[k] = golden_int(&g);
                const int members = (int)golden_int(&g);
                for (int place = 0; place < members; place++) {
                    const int i = (int)golden_int(&g);
                    CHECK(i >= 0 && i < l.count && k < l.count);
                    want.bucket[i] = k, want.place[i] = place;
                }
            }
        }
        assign(&l, &b);
        W_CHECK(b.count == want.count, "%d buckets, expected %d", b.count, want.count);
        CHECK_EQ_MEM(b.bucket, want.bucket, (size_t)l.count * sizeof *b.bucket);
        CHECK_EQ_MEM(b.place, want.place, (size_t)l.count * sizeof *b.place);
        CHECK_EQ_MEM(b.cap, want.cap, (size_t)b.count * sizeof *b.cap);
    }
    GOLDEN_CLOSE(&g);
    CHECK(cases > 0);
}

/* A second, slow and simple implementation. Positions are indices in the order of the list. */
static int at(const list *l, int position) { return l->has_order ? l->order[position] : position; }
static int key_of(const list *l, int position) { return l->has_key ? l->key[at(l, position)] : 0; }

static void assign_slowly(const list *l, buckets *b) {
    int first[TENSORS], last[TENSORS], full[TENSORS], taken[TENSORS] = {0};
    b->count = 0;
    for (int p = 0; p < l->count; p++) { /* a tensor without a bucket starts one */
        int k = b->count, earlier = 0;
        int64_t sum = 0;
        if (taken[p]) continue;
        for (int other = 0; other < k; other++) earlier += key_of(l, first[other]) == key_of(l, p);
        b->cap[k] = l->caps[earlier < l->num_caps ? earlier : l->num_caps - 1];
        first[k] = p;
        full[k] = 0;
        for (int q = p; q < l->count && !full[k]; q++) {
            if (key_of(l, q) != key_of(l, p)) continue;
            b->place[at(l, q)] = 0;
            for (int before = p; before < q; before++)
                b->place[at(l, q)] += key_of(l, before) == key_of(l, p);
            b->bucket[at(l, q)] = k;
            taken[q] = 1;
            last[k] = q;
            sum += l->nbytes[at(l, q)];
            full[k] = sum >= b->cap[k];
        }
        b->count++;
    }
    if (!l->has_order) return; /* they are numbered by their first tensors already */
    int32_t number[TENSORS];
    int64_t cap[TENSORS];
    memcpy(cap, b->cap, sizeof cap);
    for (int k = 0; k < b->count; k++) { /* full buckets as they close, then the others */
        number[k] = 0;
        for (int other = 0; other < b->count; other++)
            number[k] += full[other] != full[k] ? full[other]
                         : full[k]              ? last[other] < last[k]
                                                : first[other] < first[k];
    }
    for (int k = 0; k < b->count; k++) b->cap[number[k]] = cap[k];
    for (int i = 0; i < l->count; i++) b->bucket[i] = number[b->bucket[i]];
}

static void shuffle(uint64_t *state, int32_t *a, int count) {
    for (int i = 0; i < count; i++) a[i] = i;
    for (int i = count - 1; i > 0; i--) {
        const int k = lab_pick(state, i + 1);
        const int32_t swap = a[i];
        a[i] = a[k], a[k] = swap;
    }
}

static void random_list(uint64_t *state, list *l) {
    static const int64_t sizes[] = {0, 0, 1, 4, 8, 60, 100, 101, 4000};
    l->count = lab_pick(state, TENSORS + 1);
    l->num_caps = 1 + lab_pick(state, CAPS);
    l->has_key = lab_pick(state, 2);
    l->has_order = lab_pick(state, 2);
    const int keys = 1 + lab_pick(state, 4);
    for (int i = 0; i < l->count; i++) {
        l->nbytes[i] = sizes[lab_pick(state, 9)];
        l->key[i] = lab_pick(state, keys) * 21; /* 0..63 */
    }
    for (int k = 0; k < CAPS; k++) l->caps[k] = sizes[lab_pick(state, 9)] + lab_pick(state, 2);
    shuffle(state, l->order, l->count);
}

static void check_list(const list *l) {
    buckets b, slow;
    int64_t members[TENSORS] = {0};
    int key[TENSORS];
    assign(l, &b);
    assign_slowly(l, &slow);
    W_CHECK(b.count == slow.count, "%d buckets, expected %d", b.count, slow.count);
    CHECK_EQ_MEM(b.bucket, slow.bucket, (size_t)l->count * sizeof *b.bucket);
    CHECK_EQ_MEM(b.place, slow.place, (size_t)l->count * sizeof *b.place);
    CHECK_EQ_MEM(b.cap, slow.cap, (size_t)(b.count > 0 ? b.count : 0) * sizeof *b.cap);
    for (int p = 0; p < l->count; p++) { /* in order, keys separate */
        const int i = at(l, p), k = b.bucket[i];
        W_CHECK(members[k] == b.place[i], "tensor %d is at %d", i, b.place[i]);
        W_CHECK(!members[k] || key[k] == key_of(l, p), "bucket %d has two keys", k);
        key[k] = key_of(l, p);
        members[k]++;
    }
    for (int k = 0; k < b.count; k++) { /* the last tensor fills it, or is the last of its key */
        int last = 0, more = 0;
        for (int p = 0; p < l->count; p++)
            if (b.bucket[at(l, p)] == k) last = p;
        for (int p = last + 1; p < l->count; p++) more += key_of(l, p) == key[k];
        W_CHECK(members[k] > 0, "bucket %d is empty", k);
        W_CHECK(members[k] == 1 || b.nbytes[k] - l->nbytes[at(l, last)] < b.cap[k],
                "bucket %d was full before its last tensor", k);
        W_CHECK(b.nbytes[k] >= b.cap[k] || !more, "bucket %d is not full", k);
    }
}

static void refuse_list(list *l, uint64_t *state) {
    buckets b;
    const int i = l->count ? lab_pick(state, l->count) : 0, which = lab_pick(state, 6);
    if (!l->count) return;
    if (which == 0) l->nbytes[i] = -1;
    if (which == 1) l->caps[lab_pick(state, l->num_caps)] = -1;
    if (which == 2) l->has_key = 1, l->key[i] = lab_pick(state, 2) ? 64 : -1;
    if (which == 3) l->has_order = 1, l->order[i] = lab_pick(state, 2) ? l->count : -1;
    if (which == 4) l->num_caps = 0;
    if (which == 5) {
        if (l->count < 2) return;
        l->has_order = 1, l->order[i] = l->order[i ? i - 1 : 1]; /* twice */
    }
    assign(l, &b);
    W_CHECK(b.count == -1, "%d buckets, expected a refusal", b.count);
}

static void random_lists(int count) {
    uint64_t state = h_seed();
    for (int n = 0; n < count; n++) {
        list l;
        snprintf(w_case, sizeof w_case, "list %d of seed %llu", n, (unsigned long long)h_seed());
        memset(&l, 0, sizeof l);
        random_list(&state, &l);
        check_list(&l);
        refuse_list(&l, &state);
    }
}
TEST(replicate, buckets_properties) {
    const int64_t one = 1;
    int32_t out;
    random_lists(2000);
    CHECK_EQ_INT(fsdp_replicate_assign(NULL, NULL, NULL, 1, &one, 1, &out, NULL, NULL), -1);
    CHECK_EQ_INT(fsdp_replicate_assign(&one, NULL, NULL, 1, NULL, 1, &out, NULL, NULL), -1);
    CHECK_EQ_INT(fsdp_replicate_assign(&one, NULL, NULL, 1, &one, 1, NULL, NULL, NULL), -1);
    CHECK_EQ_INT(fsdp_replicate_assign(&one, NULL, NULL, -1, &one, 1, &out, NULL, NULL), -1);
    CHECK_EQ_INT(fsdp_replicate_assign(&one, NULL, NULL, 0, &one, 1, &out, NULL, NULL), 0);
    CHECK_EQ_INT(fsdp_replicate_assign(&one, NULL, NULL, 1, &one, 1, &out, NULL, NULL), 1);
}
TEST(long_replicate, buckets_properties, SECONDS(600) | NIGHT) { random_lists(W_SLOW ? 10000 : 100000); }

/* ---- a net in buckets, on one rank ----------------------------------------------------------- */

/* All shapes; one parameter has no elements, one is frozen. */
enum { ALL = 9 };
static const lab_param net_rows[ALL] = {
    {0, "w0", FSDP_F32, 0, 0, 2, 0, {7, 5}},    {0, "b0", FSDP_F32, 0, 0, 1, 0, {5}},
    {0, "w1", FSDP_F32, 0, 0, 3, 0, {3, 4, 2}}, {0, "b1", FSDP_F32, 0, 0, 1, 0, {1}},
    {0, "none", FSDP_F32, 0, 0, 1, 0, {0}},     {0, "w2", FSDP_F32, 0, 0, 2, 0, {16, 16}},
    {0, "b2", FSDP_F32, 0, 0, 1, 0, {16}},      {0, "born", FSDP_F32, 0, 1, 1, 0, {9}},
    {0, "b3", FSDP_F32, 0, 0, 1, 0, {33}}};
static const lab_net net = {net_rows, ALL, 1};
static const int64_t net_caps[2] = {150, 400};
enum { NET_BUCKETS = 4 }; /* {b3, b2}, {w2}, {none, b1, w1, b0, w0}, and the frozen one */

typedef struct job job;
typedef struct conf {
    const lab_net *net;
    fsdp_replicate_desc d;
    fsdp_model_desc md;
    /* all: every rank uses every parameter; in_turn: gradients come last to first */
    int all, in_turn;
    void (*body)(job *j);
    void *arg;
} conf;

struct job {
    const conf *c;
    lab_rank *r;
    fsdp_world *w;
    lab_built m;
    lab_truth t;
    fsdp_replicate *rep;
    lab_log log;
    uint64_t seed, own;                  /* seed: of the run; own: of this rank's choices */
    int first, stride, members, divisor; /* replicas: first + k*stride; divisor of sums */
    int step, anybody[LAB_PARAMS];
};

static conf conf_of(void (*body)(job *j)) {
    conf c;
    memset(&c, 0, sizeof c);
    c.net = &net;
    c.d.caps = net_caps;
    c.d.num_caps = 2;
    c.body = body;
    return c;
}

static void job_begin(job *j, const conf *c, lab_rank *r) {
    memset(j, 0, sizeof *j);
    j->c = c;
    j->r = r;
    j->w = r->w;
    j->stride = 1;
    j->members = j->divisor = r->size;
    j->seed = h_seed();
    j->own = lab_hash(j->seed, (uint64_t)r->rank, 77, 0);
    lab_begin(&j->m, c->net, r->w);
    for (int p = 0; p < c->net->count; p++)
        for (int64_t k = 0; k < lab_numel_of(c->net, p); k++)
            j->t.weight[p][k] = (float)lab_value(p, k);
}
static fsdp_status job_try(job *j) {
    fsdp_param_desc d[LAB_PARAMS];
    fsdp_replicate_desc rd = j->c->d;
    rd.params = d;
    rd.num_params = lab_descs(&j->m, 0, d);
    return fsdp_replicate_create(j->m.model, &rd, &j->rep);
}
/* The ordinal of a view counts along the buckets; its index in the net is its row. */
static void fill(void *user, const fsdp_param_view *block) {
    const job *j = (const job *)user;
    const int p = lab_row_of(j->c->net, block);
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k, (double)j->t.weight[p][fsdp_view_index(block, k)]);
}
static void job_make(job *j) {
    j->m.model = lab_model(j->w, &j->c->md);
    CALL(j->w, job_try(j));
    CALL(j->w, fsdp_init_params(j->m.model, fill, j));
}
static void on_rank(lab_rank *r) {
    job *j = (job *)lab_zeros(1, sizeof *j);
    const conf *c = (const conf *)r->arg;
    job_begin(j, c, r);
    job_make(j);
    c->body(j);
    lab_end(r);
    free(j->log.ops);
    free(j);
}
static void run(const conf *c, int ranks, int lanes) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.lanes = lanes;
    lab_run(ranks, &how, on_rank, (void *)(uintptr_t)c);
}

static fsdp_unit *unit_of(const job *j, int p, int *index) {
    fsdp_unit *unit = NULL;
    CALL(j->w, fsdp_replicate_unit(j->rep, p, &unit, index));
    return unit;
}
static fsdp_param_view view_of(const job *j, int p) {
    int index = -1;
    fsdp_unit *unit = unit_of(j, p, &index);
    return lab_view(j->w, unit, index);
}
static void freeze(job *j, int p, int frozen) {
    int index = -1;
    fsdp_unit *unit = unit_of(j, p, &index);
    CALL(j->w, fsdp_set_requires_grad(unit, index, !frozen));
    j->m.frozen[p] = frozen;
    if (frozen) j->t.has[p] = 0;
}

/* ---- its training ---------------------------------------------------------------------------- */

static int uses(const job *j, int p, int rank) {
    const uint64_t h = lab_hash(j->seed, (uint64_t)p, (uint64_t)j->step, 5);
    if (j->c->all) return 1;
    if (h % 5 == 0) return 0; /* no rank uses it */
    return lab_hash(h, (uint64_t)rank, 1, 2) % 3 != 0;
}
static double gradient(const job *j, int p, int64_t k, int rank) {
    return (double)(lab_hash(j->seed + (uint64_t)p, (uint64_t)k, (uint64_t)rank,
                             (uint64_t)j->step) %
                    15) -
           7;
}
static fsdp_dtype computed_in(const job *j) {
    return j->c->d.param_dtype    ? j->c->d.param_dtype
           : j->c->md.param_dtype ? j->c->md.param_dtype
                                  : FSDP_F32;
}

static void check_data(const job *j, int p) {
    const void *data = fsdp_replicate_data(j->rep, p);
    const fsdp_dtype dtype = computed_in(j);
    W_CHECK(data != NULL, "no data of %d: %s", p, fsdp_last_error(j->w));
    for (int64_t k = 0; k < lab_numel_of(j->c->net, p); k += 1 + k / 8)
        W_CHECK(lab_same(lab_get(data, dtype, k), lab_round(dtype, (double)j->t.weight[p][k])),
                "parameter %d at %lld is %g", p, (long long)k, lab_get(data, dtype, k));
}
static void write_grad(const job *j, int p) {
    const fsdp_dtype dtype = computed_in(j);
    void *grad = fsdp_replicate_grad(j->rep, p);
    W_CHECK(grad != NULL, "no gradient of %d: %s", p, fsdp_last_error(j->w));
    for (int64_t k = 0; k < lab_numel_of(j->c->net, p); k++)
        lab_put(grad, dtype, k, lab_get(grad, dtype, k) + gradient(j, p, k, j->r->rank));
}

static void forward(job *j) {
    CALL(j->w, fsdp_replicate_pre_forward(j->rep));
    for (int p = 0; p < j->c->net->count; p++) check_data(j, p);
    CALL(j->w, fsdp_replicate_post_forward(j->rep));
}

/* Computes this rank's gradients in its own order. Some parameters are marked ready at once, some
   later together with others, some not at all. */
static void write_grads(job *j, int all_ready) {
    enum { TO_DO, WRITTEN, READY };
    int32_t order[LAB_PARAMS];
    int stage[LAB_PARAMS] = {0};
    const int count = j->c->net->count;
    shuffle(&j->own, order, count);
    for (int n = 0; n < 2 * count; n++) {
        const int p = j->c->in_turn ? count - 1 - n % count : order[n % count];
        if (n < count) {
            check_data(j, p);
            if (!j->m.frozen[p] && uses(j, p, j->r->rank)) write_grad(j, p);
            stage[p] = WRITTEN;
        }
        const int now = j->c->in_turn || (all_ready && n >= count) || lab_pick(&j->own, 3);
        if (stage[p] != WRITTEN || !now) continue;
        int first = p, end = p;
        while (first > 0 && stage[first - 1] == WRITTEN && lab_pick(&j->own, 2)) first--;
        while (end < count && stage[end] == WRITTEN) stage[end++] = READY;
        for (int k = first; k < p; k++) stage[k] = READY;
        CALL(j->w, fsdp_replicate_ready(j->rep, first, end - first));
    }
}

/* Models the result over all replicas. */
static void expect(job *j, int sync) {
    for (int p = 0; p < j->c->net->count; p++) {
        if (j->m.frozen[p]) continue;
        for (int r = 0; r < j->members; r++) {
            const int rank = j->first + r * j->stride;
            if (!uses(j, p, rank)) continue;
            j->t.has_kept[p] = 1;
            for (int64_t k = 0; k < lab_numel_of(j->c->net, p); k++)
                j->t.kept[p][k] += gradient(j, p, k, rank);
        }
        if (sync && j->t.has_kept[p]) lab_reduce(&j->t, j->c->net, p, j->divisor, 0);
    }
}
static void backward(job *j, int sync) {
    CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, sync));
    write_grads(j, lab_pick(&j->own, 2));
    CALL(j->w, fsdp_replicate_post_backward(j->rep));
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    expect(j, sync);
    lab_check_grads(&j->m, &j->t);
    j->step++;
}
static void step(job *j, int sync) {
    snprintf(w_case, sizeof w_case, "rank %d of %d, step %d, seed %llu", j->r->rank, j->r->size,
             j->step, (unsigned long long)j->seed);
    forward(j);
    backward(j, sync);
}
static void update(job *j) { lab_update(&j->m, &j->t, 0.0625f); }

/* ---- one conf after another ------------------------------------------------------------------ */

static const struct {
    const char *name;
    int ranks, lanes;
} worlds[] = {{"W=1", 1, 0}, {"W=2", 2, 0}, {"W=3,lanes=1", 3, 1}, {"W=2,lanes=2", 2, 2}};

static void train_twice(job *j) {
    for (int n = 0; n < 2; n++) {
        step(j, 1);
        update(j);
        lab_check_params(&j->m, &j->t);
    }
}
static void accumulates(job *j) { /* adds to reduced gradients */
    for (int n = 0; n < 3; n++) step(j, 1);
    update(j);
    step(j, 1);
}
static void no_sync(job *j) {
    lab_watch(&j->log, j->w, j->m.model);
    for (int n = 0; n < 5; n++) {
        const int sync = n == 1 || n == 4, before = j->log.num;
        step(j, sync);
        CHECK_EQ_INT(lab_count_ops(&j->log, before, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, NULL),
                     sync && j->r->size > 1 ? NET_BUCKETS - 1 : 0);
        if (n == 1) update(j); /* drops gradients that are reduced */
    }
}
static void freezes(job *j) {
    step(j, 1);
    freeze(j, 5, 1); /* its whole bucket */
    freeze(j, 0, 1);
    freeze(j, 7, 0); /* the only one in its bucket */
    step(j, 1);
    step(j, 1);
    update(j);
    freeze(j, 5, 0);
    freeze(j, 8, 1);
    step(j, 1);
    for (int p = 0; p < ALL; p++) {
        if (j->m.frozen[p] != 1) freeze(j, p, 1);
    }
    step(j, 1); /* nothing is reduced */
    for (int p = 0; p < ALL; p++) freeze(j, p, 0);
    step(j, 1);
    update(j);
    lab_check_params(&j->m, &j->t);
}
/* several forwards before one backward; then backwards with one forward each */
static void forwards(job *j) {
    for (int n = 0; n < 3; n++) forward(j);
    backward(j, 1);
    step(j, 1);
    for (int n = 0; n < 2; n++) forward(j);
    CALL(j->w, fsdp_set_is_last_backward(j->m.model, 0));
    CALL(j->w, fsdp_set_reshard_after_backward(j->m.model, NULL, 0));
    backward(j, 0);
    CALL(j->w, fsdp_set_is_last_backward(j->m.model, 1));
    CALL(j->w, fsdp_set_reshard_after_backward(j->m.model, NULL, 1));
    backward(j, 1);
    update(j);
    step(j, 1);
}
static void evaluates(job *j) {
    for (int n = 0; n < 3; n++) {
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 0));
        forward(j);
        forward(j);
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 1));
        if (n == 1) continue; /* no step in between */
        step(j, 1);
        update(j);
    }
}
static void recomputes(job *j) { /* a checkpointed forward runs again in backward, for data only */
    forward(j);
    for (int p = ALL - 1; p >= 0; p--) {
        for (int q = 0; q <= p; q++) check_data(j, q);
        if (!j->m.frozen[p] && uses(j, p, j->r->rank)) write_grad(j, p);
        CALL(j->w, fsdp_replicate_ready(j->rep, p, 1));
    }
    CALL(j->w, fsdp_replicate_post_backward(j->rep));
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    expect(j, 1);
    lab_check_grads(&j->m, &j->t);
}
/* A backward is abandoned with reductions under way; then the training continues. */
static void resets(job *j) {
    step(j, 1);
    for (int n = 0; n < 4; n++) {
        forward(j);
        for (int p = ALL - 1; p > 2 * n; p--) { /* equal buckets on all ranks */
            if (!j->m.frozen[p]) write_grad(j, p);
            if (n != 3) CALL(j->w, fsdp_replicate_ready(j->rep, p, 1));
        }
        CALL(j->w, fsdp_model_reset(j->m.model));
        memset(j->t.has, 0, sizeof j->t.has);
        lab_check_grads(&j->m, &j->t);
        step(j, 1);
        update(j);
    }
    lab_check_params(&j->m, &j->t);
}

static const struct {
    const char *name;
    void (*body)(job *j);
    fsdp_dtype param, reduce;
    int all, late, offload, debug;
} ways[] = {{"accumulate", accumulates, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 0, 0, 0},
            {"no_sync", no_sync, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 0, 0, 0},
            {"freeze_thaw", freezes, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 0, 0, 0},
            {"freeze_thaw_late", freezes, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 1, 0, 0},
            {"cpu_offload", accumulates, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 0, 1, 0},
            {"bf16", train_twice, FSDP_BF16, FSDP_F32, 0, 0, 0, 0},
            {"bf16_no_sync", no_sync, FSDP_BF16, FSDP_F32, 0, 0, 0, 0},
            {"f16", train_twice, FSDP_F16, FSDP_F32, 0, 0, 0, 1},
            {"reduced_in_bf16", accumulates, FSDP_DTYPE_KEEP, FSDP_BF16, 1, 0, 0, 0},
            {"several_forwards", forwards, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 0, 0, 0},
            {"evaluation", evaluates, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 0, 0, 0},
            {"recompute", recomputes, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 0, 0, 0},
            {"recompute_bf16", recomputes, FSDP_BF16, FSDP_F32, 1, 0, 0, 1},
            {"reset", resets, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 1, 0, 0, 0},
            {"late", accumulates, FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 0, 1, 0, 0}};

TEST_P(replicate, trained, ways) {
    for (size_t k = 0; k < sizeof worlds / sizeof *worlds; k++) {
        conf c = conf_of(row->body);
        c.all = row->all;
        c.d.param_dtype = row->param;
        c.d.reduce_dtype = row->reduce;
        c.d.late = row->late;
        c.md.cpu_offload = row->offload;
        c.md.debug = row->debug;
        run(&c, worlds[k].ranks, worlds[k].lanes);
    }
}

/* ---- which parameters are where -------------------------------------------------------------- */

static void members(job *j) {
    static const int32_t want[NET_BUCKETS][5] = {{8, 6}, {5}, {4, 3, 2, 1, 0}, {7}};
    static const int counts[NET_BUCKETS] = {2, 1, 5, 1};
    static const int64_t bytes[NET_BUCKETS] = {196, 1024, 4 * (0 + 1 + 24 + 5 + 35), 36};
    CHECK_EQ_INT(fsdp_replicate_num_buckets(j->rep), NET_BUCKETS);
    CHECK_EQ_INT(fsdp_num_units(j->m.model), NET_BUCKETS);
    CHECK_EQ_INT(fsdp_num_params(j->m.model), ALL);
    for (int k = 0; k < NET_BUCKETS; k++) {
        int32_t out[ALL];
        int64_t nbytes = -1;
        char name[20];
        CHECK_EQ_INT(fsdp_replicate_members(j->rep, k, out, &nbytes), counts[k]);
        CHECK_EQ_INT(fsdp_replicate_members(j->rep, k, NULL, NULL), counts[k]);
        CHECK_EQ_MEM(out, want[k], (size_t)counts[k] * sizeof *out);
        CHECK_EQ_INT(nbytes, bytes[k]);
        snprintf(name, sizeof name, "bucket.%d", k);
        for (int i = 0; i < counts[k]; i++) {
            const fsdp_param_view v = view_of(j, out[i]);
            fsdp_mesh_info info;
            CHECK_EQ_INT(v.index, i);
            CHECK_EQ_STR(v.unit_name, name);
            CHECK_EQ_STR(v.name, net_rows[out[i]].name);
            CHECK_EQ_INT(v.numel, lab_numel_of(&net, out[i]));
            CALL(j->w, fsdp_unit_mesh_info(v.unit, &info));
            CHECK_EQ_INT(info.kind, FSDP_MESH_INFO_DDP);
        }
    }
    CHECK_EQ_INT(fsdp_replicate_members(j->rep, NET_BUCKETS, NULL, NULL), -1);
    CHECK_EQ_INT(fsdp_replicate_members(j->rep, -1, NULL, NULL), -1);
    CALL(j->w, fsdp_replicate_unit(j->rep, 0, NULL, NULL));
}
TEST(replicate, members) {
    conf c = conf_of(members);
    run(&c, 2, 0);
}

/* Creates a model with f32 parameters of these sizes, whose buckets are never allocated. */
static fsdp_replicate *only_made(fsdp_world *w, const fsdp_replicate_desc *like,
                                 const int64_t *numel, int count) {
    fsdp_param_desc params[TENSORS];
    fsdp_replicate_desc d = *like;
    fsdp_replicate *rep = NULL;
    for (int i = 0; i < count; i++) params[i] = fsdp_vec(NULL, numel[i]);
    d.params = params;
    d.num_params = count;
    CALL(w, fsdp_replicate_create(lab_model(w, NULL), &d, &rep));
    return rep;
}
static const char *rep_text(const fsdp_replicate *rep, char *out, size_t size) {
    size_t length = 0;
    for (int k = 0; k < fsdp_replicate_num_buckets(rep); k++) {
        int32_t in[TENSORS];
        const int count = fsdp_replicate_members(rep, k, in, NULL);
        for (int i = 0; i < count; i++)
            length += (size_t)snprintf(out + length, size - length, i ? ",%d" : "[%d", in[i]);
        length += (size_t)snprintf(out + length, size - length, "]");
    }
    return out;
}
static void default_caps(lab_rank *r) {
    static const int64_t linears[8] = {4000000, 2000, 4000000, 2000, 4000000, 2000, 4000000, 2000};
    static const int32_t forwards_order[8] = {1, 0, 3, 2, 5, 4, 7, 6};
    char text[500];
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_replicate *rep = only_made(r->w, &d, linears, 8); /* 1 MiB, then 25 MiB */
    CHECK_EQ_STR(rep_text(rep, text, sizeof text), "[7,6][5,4,3,2][1,0]");
    d.order = forwards_order;
    rep = only_made(r->w, &d, linears, 8);
    CHECK_EQ_STR(rep_text(rep, text, sizeof text), "[1,0][3,2,5,4][7,6]");
    d.bucket_bytes = 40 * MIB; /* also for the first bucket */
    rep = only_made(r->w, &d, linears, 8);
    CHECK_EQ_STR(rep_text(rep, text, sizeof text), "[1,0,3,2,5,4][7,6]");
    d.first_bytes = 1;
    rep = only_made(r->w, &d, linears, 8);
    CHECK_EQ_STR(rep_text(rep, text, sizeof text), "[1][0,3,2,5,4][7,6]");
    d.bucket_bytes = 0;
    rep = only_made(r->w, &d, linears, 8);
    CHECK_EQ_STR(rep_text(rep, text, sizeof text), "[1][0,3,2][5,4,7,6]");
    const int64_t caps[3] = {8000, 16000000, INT64_MAX};
    d.caps = caps;
    d.num_caps = 3;
    rep = only_made(r->w, &d, linears, 8);
    CHECK_EQ_STR(rep_text(rep, text, sizeof text), "[1][0][3,2,5,4,7,6]");
    d.order = NULL;
    rep = only_made(r->w, &d, linears + 1, 1); /* more caps than parameters */
    CHECK_EQ_STR(rep_text(rep, text, sizeof text), "[0]");
}
TEST(replicate, default_caps) { lab_run(1, NULL, default_caps, NULL); }

/* ---- how much is sent, and what is allocated ------------------------------------------------- */

/* Returns the elements of a message: a multiple of 64 bytes, or of 256 on devices with streams. */
static int64_t padded(const job *j, int p) {
    const int64_t grain = (lib_on_streams(j->w) ? 256 : 64) / 4;
    return (lab_numel_of(&net, p) + grain - 1) / grain * grain;
}
/* Counts allocations; with streams only the model's, as the memory of NCCL's collectives varies. */
static int64_t allocated(const job *j) {
    fsdp_counters c;
    CALL(j->w, fsdp_model_counters(j->m.model, &c));
    return lib_on_streams(j->w) ? (int64_t)c.allocations : w_allocations(j->r->heap);
}
static void counts(job *j) {
    fsdp_counters c[2];
    uint64_t bytes = 0;
    int64_t allocations = 0;
    lab_watch(&j->log, j->w, j->m.model);
    for (int n = 0; n < 5; n++) {
        const int from = j->log.num;
        const int64_t heap = allocated(j);
        CALL(j->w, fsdp_model_counters(j->m.model, &c[0]));
        step(j, 1);
        update(j);
        CALL(j->w, fsdp_model_counters(j->m.model, &c[1]));
        CHECK_EQ_INT(c[1].calls[FSDP_OP_ALL_GATHER] + c[1].calls[FSDP_OP_REDUCE_SCATTER], 0);
        CHECK_EQ_INT(c[1].calls[FSDP_OP_ALL_REDUCE] - c[0].calls[FSDP_OP_ALL_REDUCE],
                     NET_BUCKETS - 1 + 1); /* the record of used parameters */
        bytes = lib_coll_bytes(FSDP_OP_ALL_REDUCE, (uint64_t)j->r->size, 4 * ALL);
        for (int k = 0, op = from; k < NET_BUCKETS - 1; k++, op++) {
            int32_t in[ALL];
            const int count = fsdp_replicate_members(j->rep, k, in, NULL);
            int64_t numel = 0;
            for (int i = 0; i < count; i++) numel += padded(j, in[i]);
            op = lab_next_op(&j->log, op, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, NULL);
            CHECK(op >= 0);
            CHECK_EQ_INT(j->log.ops[op].count, numel);
            CHECK_EQ_INT(j->log.ops[op].dtype, FSDP_F32);
            CHECK_EQ_INT(j->log.ops[op].group_size, j->r->size);
            bytes += lib_coll_bytes(FSDP_OP_ALL_REDUCE, (uint64_t)j->r->size, 4 * (uint64_t)numel);
        }
        CHECK_EQ_INT(c[1].bytes[FSDP_OP_ALL_REDUCE] - c[0].bytes[FSDP_OP_ALL_REDUCE], bytes);
        /* Gradients are not copied into the messages; each bucket is copied out once. */
        CHECK_EQ_INT(lab_count_ops(&j->log, from, FSDP_OP_COPY, FSDP_LABEL_ACC, NULL), 0);
        CHECK_EQ_INT(lab_count_ops(&j->log, from, FSDP_OP_COPY, FSDP_LABEL_RED_OUT, NULL),
                     NET_BUCKETS - 1);
        if (n < 2) continue;
        if (n == 2) allocations = heap;
        CHECK_EQ_INT(c[1].allocations, c[0].allocations);
        W_CHECK(allocated(j) == allocations, "%d more", (int)(allocated(j) - allocations));
    }
}
TEST_P(replicate, counts, worlds) {
    conf c = conf_of(counts);
    c.in_turn = 1; /* so that each step opens equally many buckets */
    if (row->ranks > 1) run(&c, row->ranks, row->lanes);
}

/* Returns the bytes for the record of used parameters, which are not predicted: two buffers with an
   i32 per parameter. */
static int64_t bytes_of_use(fsdp_world *w, fsdp_model *m, int params) {
    fsdp_memory measured;
    const int pool = fsdp_pool_register(m, "replicate");
    CALL(w, fsdp_model_memory(m, &measured));
    CHECK_EQ_INT(measured.pool_slots[pool], fsdp_world_size(w) > 1 ? 2 : 0);
    CHECK(measured.pool_bytes[pool] >= measured.pool_slots[pool] * 4 * params);
    CHECK(measured.pool_bytes[pool] <= measured.pool_slots[pool] * (4 * params + 512));
    return measured.pool_bytes[pool];
}

/* Opens buckets one after the other. */
static void in_turn(job *j) {
    fsdp_memory predicted, measured;
    CALL(j->w, fsdp_model_predict(j->m.model, &predicted));
    for (int n = 0; n < 4; n++) {
        const int64_t before = allocated(j);
        forward(j);
        for (int k = 0; k < fsdp_replicate_num_buckets(j->rep); k++) {
            int32_t in[ALL];
            const int count = fsdp_replicate_members(j->rep, k, in, NULL);
            for (int i = 0; i < count; i++) {
                if (!j->m.frozen[in[i]]) write_grad(j, in[i]);
                CALL(j->w, fsdp_replicate_ready(j->rep, in[i], 1));
            }
            CHECK_EQ_INT(fsdp_unit_state(unit_of(j, in[0], NULL)), FSDP_STATE_POST_BACKWARD);
        }
        CALL(j->w, fsdp_replicate_post_backward(j->rep));
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        CALL(j->w, fsdp_model_memory(j->m.model, &measured));
        CALL(j->w, fsdp_zero_grad(j->m.model));
        for (int pool = 0; pool < FSDP_POOL_COUNT; pool++)
            W_CHECK(measured.pool_bytes[pool] == predicted.pool_bytes[pool],
                    "%s: %lld bytes, predicted %lld", fsdp_pool_name(pool),
                    (long long)measured.pool_bytes[pool], (long long)predicted.pool_bytes[pool]);
        CHECK_EQ_INT(measured.total_bytes,
                     predicted.total_bytes + bytes_of_use(j->w, j->m.model, ALL));
        if (n >= 2) CHECK_EQ_INT(allocated(j), before);
    }
}
static const struct {
    const char *name;
    fsdp_dtype param, reduce;
    int ranks;
} memories[] = {{"f32", FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 2},
                {"f32,W=1", FSDP_DTYPE_KEEP, FSDP_DTYPE_KEEP, 1},
                {"bf16", FSDP_BF16, FSDP_F32, 2},
                {"reduced_in_bf16", FSDP_DTYPE_KEEP, FSDP_BF16, 3}};
TEST_P(replicate, memory, memories) {
    for (int same = 0; same < 2; same++) { /* same: each bucket has one parameter */
        conf c = conf_of(in_turn);
        c.d.param_dtype = row->param;
        c.d.reduce_dtype = row->reduce;
        c.all = 1;
        if (same) c.d.num_caps = 0, c.d.bucket_bytes = 1;
        run(&c, row->ranks, 0);
    }
}

/* A layer has parameters in two buckets of one size: both are open, which takes one more slot; with
   worker threads or streams there are two slots for each size anyway. */
static void straddles(lab_rank *r) {
    const int inline_runs = !r->start->how.lanes && !lib_on_streams(r->w);
    fsdp_param_desc params[4];
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_unit *unit = NULL;
    fsdp_memory predicted, measured, of_unit;
    fsdp_model *m = lab_model(r->w, NULL);
    for (int p = 0; p < 4; p++) params[p] = fsdp_vec(NULL, 128);
    d.params = params, d.num_params = 4, d.bucket_bytes = 1024;
    CALL(r->w, fsdp_replicate_create(m, &d, &rep));
    CALL(r->w, fsdp_model_predict(m, &predicted));
    CALL(r->w, fsdp_replicate_unit(rep, 0, &unit, NULL));
    for (int n = 0; n < 3; n++) {
        CALL(r->w, fsdp_replicate_pre_forward(rep));
        CALL(r->w, fsdp_replicate_post_forward(rep));
        for (int p = 3; p >= 0; p--) CHECK(fsdp_replicate_grad(rep, p));
        CALL(r->w, fsdp_replicate_ready(rep, 0, 4));
        CALL(r->w, fsdp_replicate_post_backward(rep));
        CALL(r->w, fsdp_finalize_backward(m));
        CALL(r->w, fsdp_unit_memory(unit, &of_unit));
        CALL(r->w, fsdp_model_memory(m, &measured));
        CHECK_EQ_INT(measured.total_bytes - predicted.total_bytes - bytes_of_use(r->w, m, 4),
                     inline_runs ? of_unit.pool_bytes[FSDP_POOL_GRAD] : 0);
        CALL(r->w, fsdp_zero_grad(m));
    }
}
TEST(replicate, memory_of_a_layer_in_two) {
    lab_how how;
    memset(&how, 0, sizeof how);
    for (how.lanes = 0; how.lanes < 3; how.lanes++) lab_run(2, &how, straddles, NULL);
}

/* ---- used parameters, and the order of reductions -------------------------------------------- */

static void launches(job *j) {
    lab_optim o = {0};
    const int trained = NET_BUCKETS - 1;
    CALL(j->w, lab_make_optim(&o, &lab_optim_kinds[0], &j->m));
    lab_watch(&j->log, j->w, j->m.model);
    for (int n = 0; n < 12; n++) {
        const int from = j->log.num;
        float before[LAB_PARAMS][LAB_NUMEL];
        step(j, 1);
        for (int k = 0, op = from; k < trained && j->r->size > 1; k++, op++) {
            op = lab_next_op(&j->log, op, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, NULL);
            int32_t in[ALL];
            CHECK(op >= 0);
            (void)fsdp_replicate_members(j->rep, k, in, NULL);
            CHECK_EQ_STR(fsdp_unit_name(j->log.ops[op].unit),
                         fsdp_unit_name(unit_of(j, in[0], NULL)));
            CHECK_EQ_STR(j->log.ops[op].what, fsdp_unit_name(unit_of(j, in[0], NULL)));
        }
        CHECK_EQ_INT(lab_count_ops(&j->log, from, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, NULL),
                     j->r->size > 1 ? trained : 0);
        fsdp_param_view v = FSDP_ZERO; /* AdamW decays weights: it may not change the unused ones */
        while (fsdp_next_param(j->m.model, &v))
            memcpy(before[lab_row_of(&net, &v)], v.shard, (size_t)v.numel * sizeof(float));
        CALL(j->w, lab_optim_step(&o, 0.125));
        memset(&v, 0, sizeof v);
        while (fsdp_next_param(j->m.model, &v)) {
            const int p = lab_row_of(&net, &v);
            const int moved = memcmp(before[p], v.shard, (size_t)v.numel * sizeof(float)) != 0;
            W_CHECK(moved == (j->t.has[p] && v.numel > 0), "parameter %d has %smoved", p,
                    moved ? "" : "not ");
            for (int64_t k = 0; k < v.numel; k++) j->t.weight[p][k] = ((const float *)v.shard)[k];
        }
        CALL(j->w, fsdp_zero_grad(j->m.model));
        memset(j->t.has, 0, sizeof j->t.has);
    }
    lab_optim_destroy(&o);
}
TEST_P(replicate, order_of_launches, worlds) {
    conf c = conf_of(launches);
    run(&c, row->ranks, row->lanes);
}

/* Some ranks, or all, never use whole buckets. */
static void unused(job *j) {
    for (int n = 0; n < 6; n++) {
        forward(j);
        for (int p = ALL - 1; p >= 0; p--) {
            const int mine = n < 2 ? p < 5 : n < 4 ? p == 5 && j->r->rank == 1 : 0;
            if (mine && !j->m.frozen[p]) write_grad(j, p);
            if (mine || n % 2) CALL(j->w, fsdp_replicate_ready(j->rep, p, 1));
        }
        CALL(j->w, fsdp_replicate_post_backward(j->rep));
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        for (int p = 0; p < ALL; p++) {
            const fsdp_param_view v = view_of(j, p);
            const int has = n < 2 ? p < 5 : n < 4 ? p == 5 : 0;
            CHECK_EQ_INT(v.shard_grad != NULL, has);
            for (int64_t k = 0; has && k < v.numel; k++) {
                double sum = 0;
                for (int r = 0; r < j->r->size; r++)
                    sum += n < 2 || r == 1 ? gradient(j, p, k, r) : 0;
                lab_check_float("gradient", p, k, ((const float *)v.shard_grad)[k],
                                (float)sum * (1 / (float)j->r->size));
            }
        }
        CALL(j->w, fsdp_zero_grad(j->m.model));
        j->step++;
    }
}
TEST(replicate, unused) {
    conf c = conf_of(unused);
    run(&c, 2, 0);
    run(&c, 3, 2);
}

/* One op per step exchanges the used parameters, and only a rank that left out a parameter waits
   for it. */
static void used_once(job *j) {
    enum { NO, YES, LATE }; /* LATE: set before finalize, which then reduces */
    static const struct {   /* writes: -1: all ranks, -2: none; otherwise the rank */
        /* writers of two parameters; the rank that lacks one of them */
        int sync, writes[2], sends, lacks;
    } steps[] = {{YES, {-1, -1}, 1, -2}, {YES, {0, -1}, 1, 1},  {YES, {-2, -1}, 1, -1},
                 {NO, {-1, -2}, 0, -2},  {NO, {-2, -2}, 0, -2}, {YES, {-2, -1}, 1, -2},
                 {YES, {-1, -1}, 1, -2}, {YES, {-1, 1}, 1, 0},  {LATE, {-2, -1}, 1, -1}};
    static const int chosen[2] = {0, 8}; /* one in the last bucket, one in the first */
    const int label = fsdp_label_register(j->m.model, "replicate_used");
    CHECK(label >= 0);
    lab_watch(&j->log, j->w, j->m.model);
    for (size_t n = 0; n < sizeof steps / sizeof *steps; n++) {
        const int from = j->log.num, several = j->r->size > 1;
        snprintf(w_case, sizeof w_case, "step %d of rank %d", (int)n, j->r->rank);
        CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, steps[n].sync == YES));
        CALL(j->w, fsdp_replicate_pre_forward(j->rep));
        CALL(j->w, fsdp_replicate_post_forward(j->rep));
        for (int p = 0; p < ALL; p++) {
            int who = -1;
            for (int i = 0; i < 2; i++)
                if (p == chosen[i]) who = steps[n].writes[i];
            if (!j->m.frozen[p] && (who == -1 || who == j->r->rank)) write_grad(j, p);
        }
        CALL(j->w, fsdp_replicate_post_backward(j->rep));
        CALL(j->w, fsdp_set_requires_gradient_sync(j->m.model, NULL, steps[n].sync != NO));
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        const int waits = steps[n].lacks == -1 ||
                          (steps[n].lacks >= 0 &&
                           (steps[n].lacks == j->r->rank || j->r->rank > 1)); /* of 2 only one */
        CHECK_EQ_INT(lab_count_ops(&j->log, from, FSDP_OP_ALL_REDUCE, label, NULL),
                     several && steps[n].sends);
        CHECK_EQ_INT(lab_count_ops(&j->log, from, FSDP_OP_WAIT, label, NULL), several && waits);
        for (int i = 0; i < 2 && steps[n].sync; i++) { /* the first steps left no gradient */
            const int kept = n == 5;                   /* from the earlier step without sync */
            const int has = steps[n].writes[i] == -1 || steps[n].writes[i] >= 0 || kept;
            if (several) CHECK_EQ_INT(view_of(j, chosen[i]).shard_grad != NULL, has);
        }
        if (steps[n].sync) CALL(j->w, fsdp_zero_grad(j->m.model));
        j->step++;
    }
}
TEST_P(replicate, used_once, worlds) {
    conf c = conf_of(used_once);
    run(&c, row->ranks, row->lanes);
}

/* A parameter that no rank used keeps an earlier gradient, and has none after zero_grad; later
   gradients start at zero. */
static void keeps_earlier(job *j) {
    static const struct {
        int writes, zero; /* at the start of the step */
        int sums, has;    /* number of gradients of all ranks since zero_grad */
    } steps[] = {{1, 0, 1, 1}, {0, 0, 1, 1}, {1, 0, 2, 1}, {0, 1, 0, 0},
                 {0, 0, 0, 0}, {1, 0, 1, 1}, {0, 0, 1, 1}, {0, 1, 0, 0}};
    enum { CHOSEN = 3 };
    for (size_t n = 0; n < sizeof steps / sizeof *steps; n++) {
        snprintf(w_case, sizeof w_case, "step %d of rank %d", (int)n, j->r->rank);
        if (steps[n].zero) CALL(j->w, fsdp_zero_grad(j->m.model));
        CALL(j->w, fsdp_replicate_pre_forward(j->rep));
        CALL(j->w, fsdp_replicate_post_forward(j->rep));
        for (int p = 0; p < ALL; p++) {
            float *grad = j->m.frozen[p] || (p == CHOSEN && !steps[n].writes)
                              ? NULL
                              : (float *)fsdp_replicate_grad(j->rep, p);
            for (int64_t k = 0; grad && k < lab_numel_of(&net, p); k++) grad[k] += 1;
        }
        CALL(j->w, fsdp_replicate_post_backward(j->rep));
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        const fsdp_param_view v = view_of(j, CHOSEN);
        CHECK_EQ_INT(v.shard_grad != NULL, steps[n].has);
        if (v.shard_grad) lab_check_float("gradient", CHOSEN, 0, *(const float *)v.shard_grad,
                                          (float)steps[n].sums);
    }
}
TEST_P(replicate, unused_keeps_earlier, worlds) {
    conf c = conf_of(keeps_earlier);
    run(&c, row->ranks, row->lanes);
}

/* A step without gradients keeps all gradients but the dropped one, whichever it was, and however
   it was dropped: by itself, or because its parameter was frozen. */
static void keeps_others(job *j) {
    for (int n = 0; n < 2 * ALL; n++) {
        const int dropped = n % ALL, by_freezing = n >= ALL;
        int index = -1;
        fsdp_unit *unit = unit_of(j, dropped, &index);
        if (j->m.frozen[dropped]) continue;
        for (int writes = 1; writes >= 0; writes--, j->step++) {
            forward(j);
            for (int p = 0; p < ALL && writes; p++)
                if (!j->m.frozen[p]) write_grad(j, p);
            CALL(j->w, fsdp_replicate_post_backward(j->rep));
            CALL(j->w, fsdp_finalize_backward(j->m.model));
            if (writes && by_freezing) freeze(j, dropped, 1);
            else if (writes) CALL(j->w, fsdp_set_grad_none(unit, index));
        }
        for (int p = 0; p < ALL; p++)
            W_CHECK(!view_of(j, p).shard_grad == (p == dropped || j->m.frozen[p]),
                    "parameter %d, dropped %d", p, dropped);
        if (by_freezing) freeze(j, dropped, 0);
        CALL(j->w, fsdp_zero_grad(j->m.model));
    }
}
TEST_P(replicate, dropped_gradient_keeps_others, worlds) {
    conf c = conf_of(keeps_others);
    run(&c, row->ranks, row->lanes);
}

/* Hooks of parameters run, with the mean over all ranks, if a rank used the parameter, and only
   then. */
typedef struct post_hooked {
    const job *j;
    int calls[ALL];
    float first[ALL]; /* the gradient's first element */
} post_hooked;
static fsdp_status post_hook(void *user, const fsdp_param_view *v, void *stream) {
    post_hooked *h = (post_hooked *)user;
    const int p = lab_row_of(&net, v);
    lib_wait(stream);
    h->calls[p]++;
    CHECK(v->shard_grad != NULL && v->has_hook);
    if (v->numel) h->first[p] = *(const float *)v->shard_grad;
    return FSDP_OK;
}
static void post_hooks(job *j) {
    static const int chosen[] = {8, 6, 2, 4, 5}; /* in the first bucket, the third, the second */
    const int label = fsdp_label_register(j->m.model, "replicate_used");
    post_hooked h;
    memset(&h, 0, sizeof h);
    h.j = j;
    lab_watch(&j->log, j->w, j->m.model);
    for (int n = 0; n < 40; n++) {
        const int sync = n % 4 != 1, from = j->log.num, count = n < 20 ? 4 : 5;
        int calls[ALL];
        memcpy(calls, h.calls, sizeof calls);
        if (n == 0 || n == 20)
            for (int i = 0; i < count; i++) {
                int index = -1;
                fsdp_unit *unit = unit_of(j, chosen[i], &index);
                CHECK(!view_of(j, chosen[i]).has_hook);
                CALL(j->w, fsdp_set_post_accumulate_hook(unit, index, post_hook, &h));
            }
        if (n == 16) /* for a while without hooks */
            for (int i = 0; i < 4; i++) {
                int index = -1;
                fsdp_unit *unit = unit_of(j, chosen[i], &index);
                CALL(j->w, fsdp_set_post_accumulate_hook(unit, index, NULL, NULL));
            }
        const int hooked = n < 16 || n >= 20;
        step(j, sync);
        for (int i = 0; i < count; i++) {
            const int p = chosen[i];
            const int runs = sync && hooked && j->t.has[p];
            W_CHECK(h.calls[p] == calls[p] + runs, "parameter %d: %d calls, expected %d", p,
                    h.calls[p], calls[p] + runs);
            if (runs && lab_numel_of(&net, p))
                lab_check_float("gradient of a hook", p, 0, h.first[p], j->t.grad[p][0]);
        }
        /* One op for each bucket with hooks, and one at the end if there is another bucket. */
        CHECK_EQ_INT(lab_count_ops(&j->log, from, FSDP_OP_ALL_REDUCE, label, NULL),
                     j->r->size > 1 && sync ? (hooked ? 3 : 1) : 0);
        if (sync) CALL(j->w, fsdp_zero_grad(j->m.model));
        if (sync) memset(j->t.has, 0, sizeof j->t.has);
    }
}
TEST_P(replicate, post_accumulate_hooks, worlds) {
    conf c = conf_of(post_hooks);
    run(&c, row->ranks, row->lanes);
    c.d.late = 1;
    run(&c, row->ranks, row->lanes);
}

/* A hook of a frozen parameter does not make its bucket exchange used parameters early, until it is
   thawed. */
static void post_hook_frozen(job *j) {
    enum { CHOSEN = 8 };
    const int label = fsdp_label_register(j->m.model, "replicate_used");
    int index = -1;
    fsdp_unit *unit = unit_of(j, CHOSEN, &index);
    post_hooked h;
    memset(&h, 0, sizeof h);
    h.j = j;
    CALL(j->w, fsdp_set_post_accumulate_hook(unit, index, post_hook, &h));
    lab_watch(&j->log, j->w, j->m.model);
    for (int n = 0; n < 12; n++) {
        const int frozen = n / 2 % 2, from = j->log.num, calls = h.calls[CHOSEN];
        if (j->m.frozen[CHOSEN] != frozen) freeze(j, CHOSEN, frozen);
        forward(j); /* no setter is called */
        for (int p = 0; p < ALL; p++)
            if (!j->m.frozen[p] && (p != CHOSEN || n % 2)) write_grad(j, p);
        CALL(j->w, fsdp_replicate_post_backward(j->rep));
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        CHECK_EQ_INT(h.calls[CHOSEN] - calls, !frozen && n % 2);
        CHECK_EQ_INT(lab_count_ops(&j->log, from, FSDP_OP_ALL_REDUCE, label, NULL),
                     j->r->size > 1 ? 2 - frozen : 0);
        CALL(j->w, fsdp_zero_grad(j->m.model));
        j->step++;
    }
}
TEST_P(replicate, post_accumulate_hook_of_frozen, worlds) {
    conf c = conf_of(post_hook_frozen);
    run(&c, row->ranks, row->lanes);
}

/* The order in which gradients become ready, and the buckets that follow from it. */
static void ready_order(job *j) {
    char text[200], want[200];
    int32_t order[ALL], wanted[ALL], back[ALL];
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_replicate_order(j->rep, order), "[E963]");
    for (int n = 0; n < 20; n++) {
        int seen = 0;
        fsdp_replicate_desc d = j->c->d;
        shuffle(&j->seed, wanted, ALL);
        if (n == 19) memcpy(back, order, sizeof back); /* this backward leaves out a parameter */
        forward(j);
        while (seen < ALL - (n == 19)) {
            int count = 1; /* a call's parameters count last to first */
            while (seen + count < ALL && wanted[seen + count] == wanted[seen] - count) count++;
            CALL(j->w, fsdp_replicate_ready(j->rep, wanted[seen] - count + 1, count));
            seen += count;
        }
        CALL(j->w, fsdp_replicate_post_backward(j->rep));
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        CALL(j->w, fsdp_replicate_order(j->rep, order));
        if (seen < ALL) {
            CHECK_EQ_MEM(order, back, sizeof order);
            continue;
        }
        CHECK_EQ_MEM(order, wanted, sizeof order);
        list l;
        buckets b;
        int64_t numel[ALL];
        memset(&l, 0, sizeof l);
        l.count = ALL, l.num_caps = 2, l.has_order = 1;
        memcpy(l.caps, net_caps, sizeof net_caps);
        memcpy(l.order, order, sizeof order);
        for (int p = 0; p < ALL; p++) numel[p] = lab_numel_of(&net, p), l.nbytes[p] = 4 * numel[p];
        assign(&l, &b);
        d.order = order;
        CHECK_EQ_STR(rep_text(only_made(j->w, &d, numel, ALL), text, sizeof text),
                     buckets_text(&b, ALL, want, sizeof want));
    }
}
TEST(replicate, order) {
    conf c = conf_of(ready_order);
    run(&c, 2, 0);
}

/* ---- PyTorch's DistributedDataParallel ------------------------------------------------------- */

typedef struct golden_run {
    int number, ranks; /* number and ranks of the case in the file */
    fsdp_dtype reduce;
    fsdp_param_desc *params;
    int num_params, added, kept; /* backwards since gradients were dropped, and since the reduction */
    double roundings;            /* bound of the difference from PyTorch, see golden_round */
} golden_run;

/* Bounds the difference from PyTorch's numbers after a backward, in relative errors of one rounding
   to the dtype in which PyTorch reduces. An operation with a result of at most m adds an error of
   at most m. A gradient is at most 1, hence `added` after so many backwards.
   - PyTorch divides each rank's gradient by W, exactly where W is a power of two: the errors of W
     quotients of added / W add up to `added`. Then it sums in that dtype: the partial sums are 2, 3,
     ... W times added / W. The library sums in f32 and divides once: without a hook as many
     roundings.
   - With a hook, PyTorch rounds the sum of all backwards, reduced ones too, and the library each
     backward since the last reduction: 1, 2, ... `kept`. In the first backward both round the same.
   - Without a hook, PyTorch adds each gradient to the reduced one before the division, the library
     their sum after it. */
static void golden_round(golden_run *c, int sync) {
    const double w = c->ranks, sums = (w + 2) * (w - 1) / (2 * w);
    const int divides = (c->ranks & (c->ranks - 1)) != 0, has_hook = c->reduce != FSDP_DTYPE_KEEP;
    c->added++, c->kept++;
    if (!sync) return;
    c->roundings += c->added * (sums + divides) * (has_hook ? 1 : 2);
    if (has_hook && c->added > 1) c->roundings += c->added + c->kept * (c->kept + 1) / 2.0;
    if (!has_hook && c->added > c->kept) c->roundings += 2 * c->kept * c->added;
    c->kept = 0;
}
static double golden_limit(const golden_run *c) {
    const int bits = c->reduce == FSDP_BF16 ? 8 : c->reduce == FSDP_F16 ? 11 : 24;
    const double around = bits < 24 ? ldexp(c->roundings, -22) : 0; /* f32 before and after a hook */
    return ldexp(c->roundings, -bits) + around;
}

/* The limit holds where both are computed step by step, with PyTorch's sum in any order of ranks, and
   is less than four times the largest difference. */
TEST(replicate, golden_limit) {
    enum { MOST = 6, BACKWARDS = 4 };
    static const fsdp_dtype dtypes[] = {FSDP_DTYPE_KEEP, FSDP_F16, FSDP_BF16};
    uint64_t seed = h_seed();
    for (int d = 0; d < 3; d++) {
        const fsdp_dtype in = dtypes[d] ? dtypes[d] : FSDP_F32;
        double share = 0;
        for (int n = 0; n < 200000; n++) {
            golden_run c = FSDP_ZERO;
            double theirs[MOST], kept[MOST] = {0}, ours = 0;
            c.ranks = 1 + (int)lab_pick(&seed, MOST), c.reduce = dtypes[d];
            for (int r = 0; r < MOST; r++) theirs[r] = 0;
            for (int b = 0; b < BACKWARDS; b++) {
                const int sync = (int)lab_pick(&seed, 2), first = (int)lab_pick(&seed, c.ranks);
                double sum = 0, mean = 0;
                for (int r = 0; r < c.ranks; r++) {
                    const float one = (float)golden_value(seed, (uint64_t)r, 2);
                    theirs[r] = (double)((float)theirs[r] + one);
                    kept[r] = lab_round(in, kept[r] + (double)one);
                }
                golden_round(&c, sync);
                if (!sync) continue;
                for (int k = 0; k < c.ranks; k++) {
                    const double its = lab_round(in, theirs[(first + k) % c.ranks]);
                    const double part = lab_round(in, its / c.ranks);
                    sum = k ? lab_round(in, sum + part) : part;
                    mean = (double)(float)(mean + kept[k]);
                    kept[k] = 0;
                }
                ours = (double)(float)(ours + (double)(float)(mean / c.ranks));
                for (int r = 0; r < c.ranks; r++) theirs[r] = sum;
                CHECK_MSG(fabs(ours - sum) <= golden_limit(&c), "%d ranks, backward %d: %g > %g",
                          c.ranks, b, fabs(ours - sum), golden_limit(&c));
                share = fmax(share, fabs(ours - sum) / golden_limit(&c));
            }
        }
        CHECK(share > 0.25);
        h_message("%s: up to %.2f of the limit", fsdp_dtype_name(in), share);
    }
}

/* Runs a step of the file: its gradients, then the expected results. */
static void golden_step_of(lab_rank *r, golden *g, fsdp_model *m, fsdp_replicate *rep,
                           golden_run *c) {
    int *used = (int *)lab_zeros((size_t)c->num_params, sizeof *used);
    const int n = (int)golden_int(g);
    CHECK_EQ_STR(golden_word(g), "sync");
    const int sync = (int)golden_int(g);
    CHECK_EQ_STR(golden_word(g), "clear");
    if (golden_int(g)) {
        CALL(r->w, fsdp_zero_grad(m));
        c->added = c->kept = 0, c->roundings = 0;
    }
    for (int p = 0; p < c->num_params; p++) used[p] = 1;
    for (int k = 0; k < r->size; k++) {
        CHECK(golden_line(g) && golden_is(g, "unused"));
        const int rank = (int)golden_int(g), count = (int)golden_int(g);
        for (int i = 0; i < count; i++) {
            const int p = (int)golden_int(g);
            CHECK(p >= 0 && p < c->num_params);
            if (rank == r->rank) used[p] = 0;
        }
    }
    CALL(r->w, fsdp_set_requires_gradient_sync(m, NULL, sync));
    CALL(r->w, fsdp_replicate_pre_forward(rep));
    CALL(r->w, fsdp_replicate_post_forward(rep));
    for (int p = c->num_params - 1; p >= 0; p--) {
        float *grad = used[p] ? (float *)fsdp_replicate_grad(rep, p) : NULL;
        const fsdp_param_desc *d = &c->params[p];
        const uint64_t seed = (uint64_t)(100 * (n + 1) + 10000 * (r->rank + 1) + p);
        CHECK((grad != NULL) == used[p]);
        for (int64_t k = 0; grad && k < lab_numel(d->ndim, d->shape); k++)
            grad[k] += (float)golden_value(seed, (uint64_t)k, 2);
        CALL(r->w, fsdp_replicate_ready(rep, p, 1));
    }
    CALL(r->w, fsdp_replicate_post_backward(rep));
    CALL(r->w, fsdp_finalize_backward(m));
    golden_round(c, sync);
    free(used);
}
static void golden_grad_of(lab_rank *r, golden *g, fsdp_replicate *rep, const golden_run *c) {
    const int p = (int)golden_int(g);
    fsdp_unit *unit = NULL;
    int index = 0;
    CHECK(p >= 0 && p < c->num_params);
    CALL(r->w, fsdp_replicate_unit(rep, p, &unit, &index));
    const fsdp_param_view v = lab_view(r->w, unit, index);
    const char *first = golden_peek(g);
    const int has = !first || strcmp(first, "none") != 0;
    W_CHECK((v.shard_grad != NULL) == has, "parameter %d", p);
    for (int64_t k = 0; has && k < v.numel; k++) {
        const double want = golden_num(g), got = (double)((float *)v.shard_grad)[k];
        W_CHECK(fabs(want - got) <= golden_limit(c), "%d[%lld]: %.9g, PyTorch has %.9g", p,
                (long long)k, got, want);
    }
}
static fsdp_dtype golden_hook(golden *g) {
    const char *hook = golden_word(g);
    if (!strcmp(hook, "bf16_hook")) return FSDP_BF16;
    if (!strcmp(hook, "fp16_hook")) return FSDP_F16;
    CHECK_EQ_STR(hook, "none");
    return FSDP_DTYPE_KEEP;
}
static void golden_case_of(lab_rank *r, golden *g, golden_run *c) {
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_model *m = lab_model(r->w, NULL);
    int grads = 0;
    while (golden_line(g)) {
        if (golden_is(g, "params")) {
            const int64_t count = golden_int(g);
            CHECK(!c->params && count > 0 && count <= INT16_MAX);
            c->params = (fsdp_param_desc *)lab_zeros((size_t)count, sizeof *c->params);
            c->num_params = (int)count;
        } else if (golden_is(g, "param")) {
            int64_t shape[FSDP_MAX_DIMS] = {0};
            const int ndim = (int)golden_int(g);
            CHECK(ndim >= 1 && ndim <= FSDP_MAX_DIMS && d.num_params < c->num_params);
            golden_ints(g, ndim, shape);
            c->params[d.num_params++] = lab_desc(ndim, shape, 0, FSDP_F32, 0);
        } else if (golden_is(g, "cap_bytes")) d.bucket_bytes = golden_int(g);
        else if (golden_is(g, "hook")) d.reduce_dtype = c->reduce = golden_hook(g);
        else if (golden_is(g, "step")) {
            d.params = c->params;
            CHECK_EQ_INT(d.num_params, c->num_params);
            if (!rep) CALL(r->w, fsdp_replicate_create(m, &d, &rep));
            golden_step_of(r, g, m, rep, c);
        } else if (golden_is(g, "grad")) {
            golden_grad_of(r, g, rep, c);
            grads++;
        }
    }
    W_CHECK(grads >= c->num_params, "%d gradients", grads);
    free(c->params);
}
static void golden_body(lab_rank *r) {
    golden g;
    golden_run c = *(const golden_run *)r->arg;
    GOLDEN_OPEN(&g, "replicate.txt", "replicate");
    for (int i = 0; i <= c.number; i++) CHECK(golden_case(&g));
    snprintf(w_case, sizeof w_case, "%s", g.name);
    golden_case_of(r, &g, &c);
    GOLDEN_CLOSE(&g);
}
TEST(replicate, golden) {
    golden g;
    golden_run c = FSDP_ZERO;
    GOLDEN_OPEN(&g, "replicate.txt", "replicate");
    for (; golden_case(&g); c.number++) {
        for (c.ranks = 0; golden_line(&g);)
            if (golden_is(&g, "world")) c.ranks = (int)golden_int(&g);
        CHECK_MSG(c.ranks > 0, "case %s is of no world", g.name);
        lab_run(c.ranks, NULL, golden_body, &c);
    }
    GOLDEN_CLOSE(&g);
    h_message("%d cases", c.number);
    CHECK(c.number > 0);
}

/* ---- the bits do not depend on the buckets --------------------------------------------------- */

enum { SIZED = 40, LAYOUTS = 4 };

typedef struct sized { /* parameters of random sizes */
    int count, ranks;
    int64_t numel[SIZED], caps[3];
    fsdp_dtype dtype[SIZED];
    int32_t order[SIZED];
    uint64_t seed;
    uint64_t *digest; /* hash of the results */
} sized;

static float any_float(const sized *s, int p, int64_t k, int rank) {
    return (float)(golden_value(s->seed + (uint64_t)(rank * 1000 + p), (uint64_t)k, 2) *
                   (1 + (double)(k % 7) / 3));
}

/* Computes the gradients of one backward with random buckets, one bucket, one bucket per parameter;
   or without fsdp_replicate.h, with a unit for each layer of two parameters. */
static void layout(lab_rank *r, const sized *s, int which, float *out[SIZED]) {
    fsdp_param_desc d[SIZED];
    fsdp_replicate_desc rd = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_unit *units[SIZED];
    fsdp_mesh_info info;
    const int64_t all = INT64_MAX, one = 1;
    fsdp_mesh *mesh = NULL;
    fsdp_model *m = lab_model(r->w, NULL);
    uint64_t own = s->seed + (uint64_t)r->rank;
    int32_t turns[SIZED];
    char names[SIZED][16];
    for (int p = 0; p < s->count; p++) {
        snprintf(names[p], sizeof names[p], "q%d", p);
        d[p] = fsdp_vec(names[p], s->numel[p]);
        d[p].dtype = s->dtype[p];
    }
    rd.params = d;
    rd.num_params = s->count;
    rd.order = s->order;
    rd.caps = which == 0 ? s->caps : which == 1 ? &all : &one;
    rd.num_caps = which == 0 ? 3 : 1;
    CALL(r->w, fsdp_mesh_1d(r->w, NULL, &mesh));
    CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
    if (which < 3) CALL(r->w, fsdp_replicate_create(m, &rd, &rep));
    for (int p = 0; p < s->count && which == 3; p += 2) {
        fsdp_unit_desc ud = FSDP_ZERO;
        ud.mesh_info = &info;
        units[p / 2] = lab_unit(r->w, m, &ud, d + p, p + 1 < s->count ? 2 : 1);
    }
    shuffle(&own, turns, s->count);
    if (rep) CALL(r->w, fsdp_replicate_pre_forward(rep));
    if (rep) CALL(r->w, fsdp_replicate_post_forward(rep));
    for (int u = 0; u < (s->count + 1) / 2 && !rep; u++) lab_forward(r->w, units[u]);
    for (int n = 0; n < s->count; n++) {
        const int p = rep ? turns[n] : n;
        if (!rep && p % 2 == 0) CALL(r->w, fsdp_pre_backward(units[p / 2]));
        void *grad = rep ? fsdp_replicate_grad(rep, p) : fsdp_grad(units[p / 2], p % 2);
        CHECK(grad != NULL);
        for (int64_t k = 0; k < s->numel[p]; k++)
            if (s->dtype[p] == FSDP_F32) ((float *)grad)[k] = any_float(s, p, k, r->rank);
            else lab_put(grad, s->dtype[p], k, (double)any_float(s, p, k, r->rank));
        if (rep) CALL(r->w, fsdp_replicate_ready(rep, p, 1));
        else if (p % 2 || p + 1 == s->count) CALL(r->w, fsdp_post_backward(units[p / 2]));
    }
    if (rep) CALL(r->w, fsdp_replicate_post_backward(rep));
    CALL(r->w, fsdp_finalize_backward(m));
    for (int p = 0; p < s->count; p++) {
        fsdp_unit *unit = units[p / 2];
        int index = p % 2;
        if (rep) CALL(r->w, fsdp_replicate_unit(rep, p, &unit, &index));
        const fsdp_param_view v = lab_view(r->w, unit, index);
        const size_t nbytes = (size_t)v.numel * fsdp_dtype_size(v.dtype);
        CHECK(v.shard_grad != NULL);
        W_CHECK(which == 0 || !memcmp(out[p], v.shard_grad, nbytes),
                "parameter %d of %d: layout %d has other bits", p, s->count, which);
        memcpy(out[p], v.shard_grad, nbytes);
    }
    fsdp_model_destroy(m);
}
static void same_bits(lab_rank *r) {
    const sized *s = (const sized *)r->arg;
    float *out[SIZED];
    uint64_t digest = 1;
    snprintf(w_case, sizeof w_case, "seed %llu", (unsigned long long)s->seed);
    for (int p = 0; p < s->count; p++)
        out[p] = (float *)lab_zeros((size_t)s->numel[p] + 1, sizeof(float));
    for (int which = 0; which < LAYOUTS; which++) layout(r, s, which, out);
    for (int p = 0; p < s->count; p++) {
        for (int64_t k = 0; k < s->numel[p] && s->dtype[p] == FSDP_F32 && lab_divides(); k++) {
            volatile float sum = any_float(s, p, k, 0); /* ranks in order, divided once */
            for (int rank = 1; rank < r->size; rank++) sum = sum + any_float(s, p, k, rank);
            lab_check_float("gradient", p, k, out[p][k], sum * (1 / (float)r->size));
        }
        lab_fold(&digest, out[p], (size_t)s->numel[p] * fsdp_dtype_size(s->dtype[p]));
        free(out[p]);
    }
    s->digest[r->rank] = digest;
}

static void random_sizes(sized *s, uint64_t seed, int most) {
    uint64_t state = s->seed = seed;
    s->count = 1 + lab_pick(&state, SIZED);
    const int mixed = lab_pick(&state, 2);
    for (int p = 0; p < s->count; p++) {
        s->numel[p] = lab_pick(&state, 6) ? lab_pick(&state, lab_pick(&state, 2) ? most : 40) : 0;
        if (p % 2)
            s->dtype[p] = s->dtype[p - 1]; /* a unit with two dtypes reduces in the wider one */
        else s->dtype[p] = mixed && lab_pick(&state, 2) ? FSDP_BF16 : FSDP_F32;
    }
    shuffle(&state, s->order, s->count);
    for (int k = 0; k < 3; k++) s->caps[k] = 1 + lab_pick(&state, 4 * most);
}
static void bits(int ranks, int lanes, int processes, uint64_t seed, int most, uint64_t *digest) {
    sized s;
    lab_how how;
    memset(&how, 0, sizeof how);
    memset(&s, 0, sizeof s);
    how.lanes = lanes;
    how.processes = processes;
    random_sizes(&s, seed, most);
    s.digest = (uint64_t *)mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1,
                                0); /* shared with processes */
    CHECK(s.digest != MAP_FAILED);
    lab_run(ranks, &how, same_bits, &s);
    for (int r = 1; r < ranks; r++) CHECK(s.digest[r] == s.digest[0]);
    CHECK_MSG(!*digest || *digest == s.digest[0], "other bits with %d lanes, %s", lanes,
              processes ? "processes" : "threads");
    *digest = s.digest[0];
    munmap(s.digest, 4096);
}
static const struct {
    const char *name;
    int ranks;
} bit_worlds[] = {{"W=1", 1}, {"W=2", 2}, {"W=3", 3}, {"W=4", 4}, {"W=8", 8}};
/* Runs seeds from `seed` on: processes first, since CUDA does not survive a fork. */
static void all_bits(int ranks, uint64_t seed, int seeds, int most) {
    uint64_t digests[30] = {0};
    CHECK(seeds <= 30);
    for (int how = 0; how < 6; how++)
        for (int n = 0; n < seeds; n++)
            if (how % 3 == 0 || ranks < 8)
                bits(ranks, how % 3, how < 3, seed + (uint64_t)n, most, &digests[n]);
}
TEST_P(replicate, same_bits, bit_worlds, row->ranks > 3 ? MANY_RANKS : 0) {
    all_bits(row->ranks, h_seed(), W_SLOW || row->ranks > 4 ? 1 : 3, 400);
}
TEST_P(long_replicate, same_bits, bit_worlds, SECONDS(600) | NIGHT) {
    all_bits(row->ranks, h_seed() + 100, W_SLOW ? 4 : 30, 5000);
}

/* ---- what is refused ------------------------------------------------------------------------- */

static fsdp_status any_hook(void *user, const fsdp_replicate_bucket *bucket,
                            const fsdp_comm_ops *ops, fsdp_comm *comm, const fsdp_coll *coll) {
    (void)user, (void)bucket;
    return ops->run(comm, coll);
}
static void nulls(job *j) {
    fsdp_replicate *none = NULL, *rep = NULL;
    fsdp_replicate_desc d = FSDP_ZERO;
    int active = 0, index = 0;
    int32_t order[ALL];
    fsdp_unit *unit = NULL;
    REFUSED(NULL, fsdp_replicate_create(NULL, &d, &rep), "[E101] replicate_create: model");
    REFUSED(NULL, fsdp_replicate_create(j->m.model, NULL, &rep), "[E101] replicate_create");
    REFUSED(NULL, fsdp_replicate_create(j->m.model, &d, NULL), "[E101] replicate_create");
    REFUSED(NULL, fsdp_replicate_pre_forward(none), "[E101] replicate_pre_forward: rep is NULL");
    REFUSED(NULL, fsdp_replicate_post_forward(none), "[E101] replicate_post_forward: rep is NULL");
    REFUSED(NULL, fsdp_replicate_ready(none, 0, 1), "[E101] replicate_ready: rep is NULL");
    REFUSED(NULL, fsdp_replicate_post_backward(none),
            "[E101] replicate_post_backward: rep is NULL");
    CHECK(!fsdp_replicate_data(none, 0));
    REFUSED(NULL, FSDP_ERR_INVALID_ARG, "[E101] replicate_data: rep is NULL");
    CHECK(!fsdp_replicate_grad(none, 0));
    REFUSED(NULL, FSDP_ERR_INVALID_ARG, "[E101] replicate_grad: rep is NULL");
    REFUSED(NULL, fsdp_replicate_unit(none, 0, &unit, &index),
            "[E101] replicate_unit: rep is NULL");
    REFUSED(NULL, fsdp_replicate_order(none, order),
            "[E101] replicate_order: rep or order is NULL");
    REFUSED(NULL, fsdp_replicate_order(j->rep, NULL), "[E101] replicate_order");
    REFUSED(NULL, fsdp_replicate_broadcast(none, 0), "[E101] replicate_broadcast: rep is NULL");
    REFUSED(NULL, fsdp_replicate_set_hook(none, any_hook, NULL), "[E101] replicate_set_hook: rep");
    REFUSED(NULL, fsdp_replicate_join(none, 1, 1, &active), "[E101] replicate_join: rep or active");
    REFUSED(NULL, fsdp_replicate_join(j->rep, 1, 1, NULL), "[E101] replicate_join: rep or active");
    REFUSED(NULL, fsdp_replicate_shadow(none), "[E101] replicate_");
    CHECK_EQ_INT(fsdp_replicate_num_buckets(none), 0);
    CHECK_EQ_INT(fsdp_replicate_members(none, 0, NULL, NULL), -1);
    step(j, 1);
}

/* Invalid descs add nothing to the model, and a valid one works afterwards. */
static void bad_descs(lab_rank *r) {
    const int32_t twice[3] = {2, 0, 2}, beyond[3] = {0, 3, 1}, negative[3] = {-1, 0, 1};
    const int64_t caps[2] = {10, 0}, minus[1] = {-7};
    const int32_t rows = 2;
    fsdp_mesh *mesh = lab_hsdp(r->w, rows, r->size / rows);
    fsdp_mesh_info shards, hsdp, ddp;
    fsdp_param_desc p[3], q[3];
    fsdp_replicate_desc good = FSDP_ZERO, d;
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_replicate *rep = (fsdp_replicate *)&shards;
    CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_FSDP, 1, -1, &shards));
    CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_HSDP, 1, 0, &hsdp));
    memset(&ddp, 0, sizeof ddp);
    ddp.kind = FSDP_MESH_INFO_DDP;
    for (int i = 0; i < 3; i++) p[i] = fsdp_vec(i == 0 ? "w" : i == 1 ? "v" : NULL, 3 + i);
    good.params = p, good.num_params = 3;
#define BAD(change, text)                                                                          \
    do {                                                                                           \
        d = good;                                                                                  \
        memcpy(q, p, sizeof q);                                                                    \
        change;                                                                                    \
        rep = (fsdp_replicate *)&shards;                                                           \
        REFUSED(r->w, fsdp_replicate_create(m, &d, &rep), text);                                   \
        CHECK(!rep);                                                                               \
        CHECK_EQ_INT(fsdp_num_units(m), 0);                                                        \
    } while (0)
    BAD(d.params = q;
        q[1].name = "w", "[E953] replicate_create: parameters 0 and 1 are both named 'w'");
    BAD(d.params = q;
        q[1].name = "p2", "[E953] replicate_create: parameters 1 and 2 are both named 'p2'");
    BAD(d.num_caps = 2, "[E954] replicate_create: num_caps is 2, caps is NULL");
    BAD(d.num_caps = -1; d.caps = caps, "[E954] replicate_create: num_caps is -1, caps is given");
    BAD(d.num_caps = 2; d.caps = caps, "[E955] replicate_create: caps[1] is 0, expected >= 1 byte");
    BAD(d.num_caps = 1; d.caps = minus, "[E955] replicate_create: caps[0] is -7, expected >= 1");
    BAD(d.first_bytes = -1,
        "[E955] replicate_create: first_bytes, bucket_bytes[0] is -1, expected");
    BAD(d.bucket_bytes = -2, "-2, expected >= 1 byte");
    BAD(d.order = twice, "[E956] replicate_create: order[2] is 2 for the second time, expected a "
                         "permutation of 0..2");
    BAD(d.order = beyond, "[E956] replicate_create: order[1] is 3, expected a permutation of 0..2");
    BAD(d.order = negative, "[E956] replicate_create: order[0] is -1, expected a permutation");
    BAD(d.mesh = mesh, "[E957] replicate_create: the mesh is 2-D, expected 1-D");
    BAD(d.mesh_info = &shards,
        "[E958] replicate_create: mesh_info is of kind FSDP and its mesh is given");
    BAD(d.mesh_info = &ddp,
        "[E958] replicate_create: mesh_info is of kind DDP and its mesh is NULL");
    BAD(d.params = q; q[2].dtype = (fsdp_dtype)-1, "[E144]");
    BAD(d.mesh_info = &hsdp,
        "[E958] replicate_create: mesh_info is of kind HSDP and its mesh is given");
    BAD(d.num_params = 0,
        "[E959] replicate_create: num_params is 0, params is given, expected >= 1");
    BAD(d.num_params = -3, "[E959] replicate_create: num_params is -3");
    BAD(d.params = NULL, "[E959] replicate_create: num_params is 3, params is NULL, expected");
    BAD(d.size = 3, "fsdp_replicate_desc");
    BAD(d.end_canary++, "fsdp_replicate_desc");
    BAD(d.params = q; q[2].end_canary++, "fsdp_replicate_desc.params[2]");
    BAD(d.params = q; q[1].ndim = 0, "'v'"); /* fsdp_fully_shard refuses it, for the first bucket */
    BAD(d.params = q; q[0].shape[0] = -1, "'w'");
    CALL(r->w, fsdp_replicate_create(m, &good, &rep));
    CHECK_EQ_INT(fsdp_replicate_num_buckets(rep), 1);
    char name[300]; /* cut, except for its number */
    memset(name, 'n', sizeof name);
    name[299] = 0;
    d = good;
    d.name = name, d.caps = caps, d.num_caps = 1;
    CALL(r->w, fsdp_replicate_create(m, &d, &rep));
    for (int k = 0; k < 3; k++) {
        fsdp_unit *unit;
        CALL(r->w, fsdp_replicate_unit(rep, 2 - k, &unit, NULL));
        CHECK_EQ_INT(fsdp_unit_name(unit)[strlen(fsdp_unit_name(unit)) - 1], '0' + k);
    }
}
TEST(replicate_errors, descs) { lab_run(4, NULL, bad_descs, NULL); }
/* A failure before a forward is no failure of its backward. A getter has no status: finalize
   reports its failure. */
static void fails_before(job *j) {
    REFUSED(j->w, fsdp_replicate_ready(j->rep, ALL, 1), "[E960]");
    CHECK(lab_undefined(j->m.model, fsdp_replicate_grad(j->rep, -1)));
    REFUSED(j->w, fsdp_finalize_backward(j->m.model), "[E960] replicate_grad: first is -1");
    step(j, 1);
}
TEST(replicate_errors, before_a_step) {
    conf c = conf_of(fails_before);
    run(&c, 2, 0);
}
TEST(replicate_errors, nulls) {
    conf c = conf_of(nulls);
    run(&c, 2, 0);
}

/* Invalid calls within a step are refused with their names and change nothing, and the step
   continues. post_backward reports again that a call was invalid. */
static void wrong_calls(job *j) {
    int active = 7, at_fault = 0;
    for (int n = 0; n < 4; n++) {
        forward(j);
        write_grad(j, 8);
        REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_replicate_set_hook(j->rep, any_hook, NULL),
                   "bucket.0");
        CALL(j->w, fsdp_replicate_ready(j->rep, 8, 1));
        REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_finalize_backward(j->m.model),
                   "[E952] finalize_backward: a backward of unit 'bucket.0'");
        CHECK(
            strstr(fsdp_last_error(j->w), "0 of 4 are reduced: call fsdp_replicate_post_backward"));
        REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_replicate_broadcast(j->rep, 0), "bucket.");
        REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_replicate_join(j->rep, 1, 1, &active),
                   "bucket.");
        CHECK_EQ_INT(active, 0);
        at_fault = FSDP_OK;
        if (n == 0) { /* in the open bucket, or several parameters of which one is ready */
            at_fault = FSDP_ERR_INVALID_STATE;
            REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_replicate_ready(j->rep, 5, 4),
                       "[E961] replicate_ready: parameter 'b3' (bucket.0) is ready already "
                       "in this backward");
            CHECK(lab_undefined(j->m.model, fsdp_replicate_grad(j->rep, 8)));
            REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, FSDP_ERR_INVALID_STATE,
                       "[E961] replicate_grad: parameter 'b3' (bucket.0) is ready already");
        }
        if (n == 1) {
            at_fault = FSDP_ERR_INVALID_ARG;
            REFUSED(j->w, fsdp_replicate_ready(j->rep, 7, 3),
                    "[E960] replicate_ready: first is 7, count is 3, expected parameters of 0..8");
            REFUSED(j->w, fsdp_replicate_ready(j->rep, -1, 1),
                    "first is -1, count is 1, expected parameters of 0..8");
            REFUSED(j->w, fsdp_replicate_ready(j->rep, 3, -1), "count is -1");
        }
        if (n == 2) { /* except for the getter, these are queries and not part of the backward */
            at_fault = FSDP_ERR_INVALID_ARG;
            CHECK(lab_undefined(j->m.model, fsdp_replicate_data(j->rep, ALL)));
            REFUSED(j->w, FSDP_ERR_INVALID_ARG, "[E960] replicate_data: first is 9, count is 1");
            REFUSED(j->w, fsdp_replicate_unit(j->rep, -1, NULL, NULL), "[E960] replicate_unit");
            REFUSED(j->w, fsdp_replicate_broadcast(j->rep, j->r->size),
                    "[E100] model_broadcast: root is 2, expected 0..1 of unit 'bucket.0'");
            REFUSED(j->w, fsdp_replicate_broadcast(j->rep, -1), "root is -1, expected 0..1");
        }
        CALL(j->w, fsdp_replicate_ready(j->rep, 0, 0)); /* none */
        for (int p = ALL - 2; p >= 0; p--) {
            if (!j->m.frozen[p]) write_grad(j, p);
            else CHECK(!fsdp_replicate_grad(j->rep, p));
            CALL(j->w, fsdp_replicate_ready(j->rep, p, 1));
        }
        if (n == 0) { /* its bucket is being reduced */
            CHECK(lab_undefined(j->m.model, fsdp_replicate_grad(j->rep, 6)));
            REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, FSDP_ERR_INVALID_STATE,
                       "[E961] replicate_grad: parameter 'b2' (bucket.0) is ready already");
        }
        REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_finalize_backward(j->m.model),
                   "4 of 4 are reduced: call fsdp_replicate_post_backward");
        CHECK_STATUS(fsdp_replicate_post_backward(j->rep), at_fault);
        /* reports failures of fsdp.h's calls */
        const fsdp_status again = fsdp_finalize_backward(j->m.model);
        CHECK(again == FSDP_OK || again == FSDP_ERR_INVALID_STATE ||
              (int)again == at_fault);
        expect(j, 1);
        lab_check_grads(&j->m, &j->t);
        j->step++;
    }
    step(j, 1);
}
TEST(replicate_errors, calls) {
    conf c = conf_of(wrong_calls);
    c.all = 1;
    run(&c, 2, 0);
    run(&c, 2, 2);
}

/* Hooks called at a wrong time: the texts are those of fsdp.h, and name a bucket. */
static void too_early(job *j) {
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_replicate_post_forward(j->rep), "'bucket.0'");
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_replicate_ready(j->rep, 5, 1), "'bucket.1'");
    REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w, fsdp_replicate_post_backward(j->rep), "'bucket.0'");
    CHECK(lab_undefined(j->m.model, fsdp_replicate_data(j->rep, 5)));
    CHECK(lab_undefined(j->m.model, fsdp_replicate_grad(j->rep, 5)));
    CALL(j->w, fsdp_model_reset(j->m.model)); /* clears all of it */
    step(j, 1);
}
TEST(replicate_errors, too_early) {
    conf c = conf_of(too_early);
    run(&c, 2, 0);
}

/* A getter that is called with another dtype fails, and returns no memory of a parameter. */
static void wrong_dtypes(lab_rank *r) {
    fsdp_param_desc p[2] = {fsdp_mat("w", 6, 4), fsdp_vec("b", 6)};
    fsdp_model_desc md = FSDP_ZERO;
    fsdp_replicate_desc rd = FSDP_ZERO;
    fsdp_replicate *rep;
    md.param_dtype = FSDP_BF16;
    fsdp_model *m = lab_model(r->w, &md);
    rd.params = p, rd.num_params = 2;
    CALL(r->w, fsdp_replicate_create(m, &rd, &rep));
    for (int wrong = 0; wrong < 2; wrong++) {
        CALL(r->w, fsdp_replicate_pre_forward(rep));
        CHECK(fsdp_replicate_data_as(rep, 0, FSDP_BF16) == fsdp_replicate_data(rep, 0));
        if (wrong) CHECK(lab_undefined(m, fsdp_replicate_data_f32(rep, 0)));
        CALL(r->w, fsdp_replicate_post_forward(rep));
        for (int i = 1; i >= 0; i--) {
            void *grad = fsdp_replicate_grad(rep, i);
            CHECK(fsdp_replicate_grad_as(rep, i, FSDP_BF16) == grad);
            if (wrong) CHECK(lab_undefined(m, fsdp_replicate_grad_f32(rep, i)));
            CALL(r->w, fsdp_replicate_ready(rep, i, 1));
        }
        CALL(r->w, fsdp_replicate_post_backward(rep));
        if (!wrong) CALL(r->w, fsdp_finalize_backward(m));
        else REFUSED(r->w, fsdp_finalize_backward(m), "is gathered as bf16, but you ask for f32");
    }
}
TEST(replicate_errors, dtypes) { lab_run(2, NULL, wrong_dtypes, NULL); }

/* A reset within a backward drops the due buckets: finalize reduces none. */
static void reset_in_backward(lab_rank *r) {
    const fsdp_param_desc params[2] = {fsdp_mat("a", 16, 16), fsdp_mat("b", 16, 16)};
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_replicate *rep;
    fsdp_counters before = FSDP_ZERO, after = FSDP_ZERO;
    fsdp_model *m = lab_model(r->w, NULL);
    d.params = params, d.num_params = 2;
    d.first_bytes = d.bucket_bytes = 1; /* one bucket for each */
    CALL(r->w, fsdp_replicate_create(m, &d, &rep));
    CALL(r->w, fsdp_replicate_pre_forward(rep));
    CALL(r->w, fsdp_replicate_post_forward(rep));
    (void)fsdp_replicate_grad(rep, 1);
    CALL(r->w, fsdp_replicate_ready(rep, 1, 1));
    CALL(r->w, fsdp_model_reset(m));
    CALL(r->w, fsdp_model_counters(m, &before));
    CALL(r->w, fsdp_finalize_backward(m));
    CALL(r->w, fsdp_model_counters(m, &after));
    CHECK_EQ_INT(after.calls[FSDP_OP_ALL_REDUCE] - before.calls[FSDP_OP_ALL_REDUCE], 0);
    fsdp_model_destroy(m);
}
TEST(replicate_errors, reset_in_backward) { lab_run(2, NULL, reset_in_backward, NULL); }

/* A parameter is sharded or replicated, not both. */
static void both(lab_rank *r) {
    const fsdp_param_desc in_unit = fsdp_mat("w", 4, 4);
    const fsdp_param_desc clash[2] = {fsdp_vec("other", 3), fsdp_mat("h.w", 4, 4)};
    const fsdp_param_desc fine[6] = {fsdp_vec("w", 3),     fsdp_vec("h", 3),
                                     fsdp_vec("h.w2", 3),  fsdp_vec("h2.w", 3),
                                     fsdp_vec("h.w.b", 3), fsdp_vec("a.h.w", 3)};
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_replicate_desc d = FSDP_ZERO;
    for (int first = 0; first < 3; first++) {
        fsdp_model *m = lab_model(r->w, NULL);
        fsdp_replicate *rep = NULL;
        fsdp_unit *unit = NULL;
        ud.name = "h", ud.params = &in_unit, ud.num_params = 1;
        d.params = clash, d.num_params = 2;
        if (first == 0) {
            CALL(r->w, fsdp_fully_shard(m, &ud, &unit));
            REFUSED(r->w, fsdp_replicate_create(m, &d, &rep),
                    "[E193] unit 'bucket.0', parameter 'h.w': unit 'h' shards it already, and a "
                    "parameter is sharded or replicated, not both");
            CHECK(!rep);
            CHECK_EQ_INT(fsdp_num_units(m), 1);
            d.params = fine, d.num_params = 6;
            CALL(r->w, fsdp_replicate_create(m, &d, &rep));
        } else if (first == 1) {
            CALL(r->w, fsdp_replicate_create(m, &d, &rep));
            REFUSED(r->w, fsdp_fully_shard(m, &ud, &unit),
                    "[E193] unit 'h', parameter 'w': unit 'bucket.0' replicates it already, and a "
                    "parameter is sharded or replicated, not both");
            CHECK(!unit);
            CHECK_EQ_INT(fsdp_num_units(m), 1);
            ud.name = "g"; /* an equal parameter name in another unit */
            CALL(r->w, fsdp_fully_shard(m, &ud, &unit));
        } else {
            d.params = fine, d.num_params = 6;
            CALL(r->w, fsdp_replicate_create(m, &d, &rep));
            CALL(r->w, fsdp_fully_shard(m, &ud, &unit));
        }
        CALL(r->w, fsdp_replicate_pre_forward(rep));
        lab_forward(r->w, unit);
        CALL(r->w, fsdp_replicate_post_forward(rep));
        lab_backward(r->w, unit);
        CALL(r->w, fsdp_replicate_post_backward(rep));
        CALL(r->w, fsdp_finalize_backward(m));
    }
}
TEST(replicate_errors, sharded_and_replicated) { lab_run(2, NULL, both, NULL); }

/* A reset forgets the use of a parameter in the backward that it ends: nobody uses it after. */
static void forgets_use(job *j) {
    for (int n = 0; n < 2; n++) {
        forward(j);
        for (int p = 0; p < ALL; p++)
            if (!j->m.frozen[p] && (n == 0 || p != 0)) write_grad(j, p);
        if (n == 0) CALL(j->w, fsdp_model_reset(j->m.model));
    }
    CALL(j->w, fsdp_replicate_post_backward(j->rep));
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    for (int p = 0; p < ALL; p++)
        W_CHECK(!view_of(j, p).shard_grad == (p == 0 || j->m.frozen[p]), "parameter %d", p);
}
TEST_P(replicate, reset_forgets_use, worlds) {
    conf c = conf_of(forgets_use);
    run(&c, row->ranks, row->lanes);
}

/* A finalize sends the use, then fails, since the forward of another unit is open. The backward
   after the reset sends its own use. */
static void sends_again(lab_rank *r) {
    const fsdp_param_desc params[2] = {fsdp_vec("v0", 20), fsdp_vec("v1", 30)};
    const fsdp_param_desc matrix = fsdp_mat("w", 6, 3);
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_param_view v = FSDP_ZERO;
    fsdp_model *m = lab_model(r->w, NULL);
    d.params = params, d.num_params = 2, d.late = 1;
    CALL(r->w, fsdp_replicate_create(m, &d, &rep));
    ud.name = "f";
    fsdp_unit *unit = lab_unit(r->w, m, &ud, &matrix, 1);
    for (int n = 0; n < 2; n++) { /* v0 is used first, v1 then */
        CALL(r->w, fsdp_replicate_pre_forward(rep));
        CALL(r->w, fsdp_pre_forward(unit));
        if (n) CALL(r->w, fsdp_post_forward(unit));
        CALL(r->w, fsdp_replicate_post_forward(rep));
        if (r->rank == 0) CHECK(fsdp_replicate_grad(rep, n) != NULL);
        CALL(r->w, fsdp_replicate_post_backward(rep));
        const fsdp_status status = fsdp_finalize_backward(m);
        CHECK_STATUS(status, n ? FSDP_OK : FSDP_ERR_INVALID_STATE);
        if (n == 0) CALL(r->w, fsdp_model_reset(m));
    }
    while (fsdp_next_param(m, &v))
        W_CHECK((v.shard_grad != NULL) == !strcmp(v.name, "v1"), "%s", v.name);
}
TEST(replicate, reset_sends_use_again) { lab_run(2, NULL, sends_again, NULL); }

/* ---- a unit that shards between the buckets -------------------------------------------------- */

static void between(lab_rank *r) {
    const int late = *(const int *)r->arg;
    const fsdp_param_desc params[2] = {fsdp_vec("v0", 20), fsdp_vec("v1", 30)};
    const fsdp_param_desc matrix = fsdp_mat("w", 6, 3);
    const int64_t one = 1;
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_unit_desc ud = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_model *m = lab_model(r->w, NULL);
    d.params = params, d.num_params = 2, d.caps = &one, d.num_caps = 1, d.late = late;
    CALL(r->w, fsdp_replicate_create(m, &d, &rep)); /* v1, then v0 */
    ud.name = "f";
    ud.reshard_after_forward = FSDP_RESHARD_NEVER;
    fsdp_unit *unit = lab_unit(r->w, m, &ud, &matrix, 1);
    for (int n = 0; n < (late ? 3 : 1); n++) {
        CALL(r->w, fsdp_replicate_pre_forward(rep));
        lab_forward(r->w, unit);
        CALL(r->w, fsdp_replicate_post_forward(rep));
        fsdp_status status = FSDP_OK;
        if (r->rank == 0) { /* the other rank does not use it, and does not mark it ready */
            float *grad = (float *)fsdp_replicate_grad(rep, 1);
            CHECK(grad != NULL);
            for (int k = 0; k < 30; k++) grad[k] += (float)k;
            status = fsdp_replicate_ready(rep, 1, 1);
        }
        if (!status) status = fsdp_pre_backward(unit);
        float *grad = status ? NULL : (float *)fsdp_grad(unit, 0);
        for (int k = 0; k < 18 && grad; k++) grad[k] += (float)(k * (1 + r->rank));
        if (!status) status = fsdp_post_backward(unit);
        if (!late) { /* one rank reduces a bucket, the other one a unit */
            if (!status) status = fsdp_replicate_post_backward(rep);
            if (!status) status = fsdp_finalize_backward(m);
            W_CHECK(status == FSDP_ERR_MISMATCH, "%s: %s", fsdp_status_name(status),
                    fsdp_last_error(r->w));
            W_CHECK(strstr(fsdp_last_error(r->w), "'bucket.0'") &&
                        strstr(fsdp_last_error(r->w), "'f'"),
                    "%s", fsdp_last_error(r->w));
            return;
        }
        CALL(r->w, status);
        CALL(r->w, fsdp_replicate_post_backward(rep));
        CALL(r->w, fsdp_finalize_backward(m));
        fsdp_param_view v = FSDP_ZERO;
        while (fsdp_next_param(m, &v)) {
            const float *got = (const float *)v.shard_grad;
            const int which = v.unit == unit ? 2 : v.numel == 30;
            W_CHECK((got != NULL) == (which > 0), "%s", v.name);
            for (int64_t k = 0; k < v.numel && got; k++)
                lab_check_float("gradient", which, k, got[k],
                                which == 2 ? (float)fsdp_view_index(&v, k) * 1.5f : (float)k / 2);
        }
        CALL(r->w, fsdp_zero_grad(m));
    }
}
static const struct {
    const char *name;
    int late, lanes;
} lates[] = {{"late", 1, 0}, {"late,lanes=1", 1, 1}, {"late,lanes=2", 1, 2}, {"at_once", 0, 0}};
TEST_P(replicate, between_others, lates) {
    lab_how how;
    memset(&how, 0, sizeof how);
    how.lanes = row->lanes;
    int late = row->late;
    lab_run(2, &how, between, &late);
}

/* ---- several dtypes -------------------------------------------------------------------------- */

/* Parameters that differ in dtype, in keep_dtype or in being frozen never share a bucket. */
static void dtypes(lab_rank *r) {
    enum { COUNT = 12 };
    static const fsdp_dtype stored[3] = {FSDP_F32, FSDP_BF16, FSDP_F64};
    fsdp_param_desc params[COUNT];
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_model *m = lab_model(r->w, NULL);
    for (int p = 0; p < COUNT; p++) {
        const int64_t numel = 10 + p;
        params[p] = lab_desc(1, &numel, 0, stored[p % 3], p > 9);
        params[p].keep_dtype = p % 4 == 3;
    }
    d.params = params, d.num_params = COUNT;
    d.param_dtype = FSDP_BF16, d.reduce_dtype = FSDP_F32;
    CALL(r->w, fsdp_replicate_create(m, &d, &rep));
    CHECK_EQ_INT(fsdp_replicate_num_buckets(rep), 7); /* 3 dtypes, 2 kept, 2 frozen */
    for (int k = 0; k < 7; k++) {
        int32_t in[COUNT];
        int64_t nbytes = 0, sum = 0;
        const int count = fsdp_replicate_members(rep, k, in, &nbytes);
        for (int i = 0; i < count; i++) {
            CHECK_EQ_INT(params[in[i]].dtype, params[in[0]].dtype);
            CHECK_EQ_INT(params[in[i]].keep_dtype, params[in[0]].keep_dtype);
            CHECK_EQ_INT(params[in[i]].frozen, k >= 5);
            sum += params[in[i]].shape[0] * (int64_t)fsdp_dtype_size(params[in[i]].dtype);
        }
        CHECK_EQ_INT(sum, nbytes);
    }
    for (int n = 0; n < 2; n++) {
        CALL(r->w, fsdp_replicate_pre_forward(rep));
        CALL(r->w, fsdp_replicate_post_forward(rep));
        for (int p = 0; p < COUNT; p++) {
            void *grad = params[p].frozen ? NULL : fsdp_replicate_grad(rep, p);
            CHECK(grad || params[p].frozen);
            for (int64_t k = 0; k < params[p].shape[0] && grad; k++)
                lab_put(grad, params[p].keep_dtype ? params[p].dtype : FSDP_BF16, k,
                        (double)(k + p + n + 2 * r->rank));
            CALL(r->w, fsdp_replicate_ready(rep, p, 1));
        }
        CALL(r->w, fsdp_replicate_post_backward(rep));
        CALL(r->w, fsdp_finalize_backward(m));
        for (int p = 0; p < COUNT; p++) {
            fsdp_unit *unit = NULL;
            int index = 0;
            CALL(r->w, fsdp_replicate_unit(rep, p, &unit, &index));
            const fsdp_param_view v = lab_view(r->w, unit, index);
            CHECK_EQ_INT(v.dtype, params[p].dtype);
            CHECK_EQ_INT(v.shard_grad != NULL, !params[p].frozen);
            for (int64_t k = 0; k < v.numel && v.shard_grad; k++)
                W_CHECK(lab_same(lab_get(v.shard_grad, v.grad_dtype, k), (double)(k + p + n + 1)),
                        "parameter %d at %d: %g", p, (int)k,
                        lab_get(v.shard_grad, v.grad_dtype, k));
        }
        CALL(r->w, fsdp_zero_grad(m));
    }
}
TEST(replicate, mixed_dtypes) {
    lab_how how;
    memset(&how, 0, sizeof how);
    lab_run(2, &how, dtypes, NULL);
    how.lanes = 2;
    lab_run(2, &how, dtypes, NULL);
}

/* ---- hooks ----------------------------------------------------------------------------------- */

typedef struct hooked { /* observations of a rank's hook, and its behaviour */
    job *j;
    int calls, next, in_order, split, compress, fail_at, threads;
    pthread_t main;
    int64_t last_numel;
} hooked;

static fsdp_status hook_part(const fsdp_comm_ops *ops, fsdp_comm *comm, const fsdp_coll *coll,
                             void *data, fsdp_dtype dtype, int64_t count) {
    fsdp_coll part = *coll;
    if (!count) return FSDP_OK;
    part.src = part.dst = data;
    part.dtype = part.out_dtype = (uint8_t)dtype;
    part.count = (uint64_t)count;
    part.fingerprint = coll->fingerprint + (uint64_t)count; /* equal on all ranks */
    return ops->run(comm, &part);
}
static fsdp_status hook(void *user, const fsdp_replicate_bucket *b, const fsdp_comm_ops *ops,
                        fsdp_comm *comm, const fsdp_coll *coll) {
    hooked *h = (hooked *)user;
    const job *j = h->j;
    int32_t in[ALL];
    int trained = 0;
    int64_t end = 0;
    float *data = (float *)b->data;
    h->threads |= !pthread_equal(pthread_self(), h->main);
    h->in_order &= b->index == h->next;
    h->next = b->is_last ? 0 : b->index + 1;
    if (h->calls++ == h->fail_at) return FSDP_ERR_UNSUPPORTED;
    const int count = fsdp_replicate_members(j->rep, b->index, in, NULL);
    for (int i = 0; i < count; i++) {
        if (j->m.frozen[in[i]]) continue;
        W_CHECK(trained < b->num_params && b->params[trained] == in[i], "bucket %d", b->index);
        CHECK_EQ_INT(b->numels[trained], lab_numel_of(&net, in[i]));
        CHECK_EQ_INT(b->offsets[trained], end);
        end += padded(j, in[i]);
        trained++;
    }
    CHECK_EQ_INT(b->num_params, trained);
    CHECK_EQ_INT(b->numel, end);
    CHECK_EQ_INT(b->dtype, FSDP_F32);
    CHECK_EQ_INT(coll->count, end);
    CHECK(b->data == coll->dst && coll->kind == FSDP_OP_ALL_REDUCE);
    if (h->split) { /* in two parts */
        fsdp_status status = hook_part(ops, comm, coll, data, FSDP_F32, end / 3);
        return status ? status
                      : hook_part(ops, comm, coll, data + end / 3, FSDP_F32, end - end / 3);
    }
    if (h->compress) { /* the gradients as bf16, in the same memory */
        uint16_t half[1024];
        CHECK(end <= 1024);
        lib_wait(coll->stream);
        CHECK_OK(fsdp_convert(half, FSDP_BF16, data, FSDP_F32, end));
        memcpy(data, half, (size_t)end * sizeof *half);
        fsdp_status status = hook_part(ops, comm, coll, data, FSDP_BF16, end);
        lib_wait(coll->stream);
        memcpy(half, data, (size_t)end * sizeof *half);
        CHECK_OK(fsdp_convert(data, FSDP_F32, half, FSDP_BF16, end));
        return status;
    }
    return ops->run(comm, coll);
}

/* Runs a backward with gradients that are not integers; the steps are equal for each way to reduce.
   */
static void any_backward(job *j, float *out) {
    CALL(j->w, fsdp_replicate_pre_forward(j->rep));
    CALL(j->w, fsdp_replicate_post_forward(j->rep));
    for (int p = ALL - 1; p >= 0; p--) {
        float *grad = j->m.frozen[p] || p == j->r->rank ? NULL
                                                        : (float *)fsdp_replicate_grad(j->rep, p);
        for (int64_t k = 0; grad && k < lab_numel_of(&net, p); k++)
            grad[k] += (float)golden_value((uint64_t)(p + 100 * j->r->rank), (uint64_t)k, 2);
        CALL(j->w, fsdp_replicate_ready(j->rep, p, 1));
    }
    CALL(j->w, fsdp_replicate_post_backward(j->rep));
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    for (int p = 0; p < ALL; p++) {
        const fsdp_param_view v = view_of(j, p);
        for (int64_t k = 0; k < v.numel; k++)
            *out++ = v.shard_grad ? ((const float *)v.shard_grad)[k] : -100;
    }
    CALL(j->w, fsdp_zero_grad(j->m.model));
}
static void hooks(job *j) {
    enum { NUMEL = 512 };
    float plain[NUMEL] = {0}, other[NUMEL] = {0};
    hooked h;
    memset(&h, 0, sizeof h);
    h.j = j, h.in_order = 1, h.fail_at = -1, h.main = pthread_self();
    any_backward(j, plain);
    for (int n = 0; n < 4; n++) { /* plain; in parts; with a parameter thawed; with no hook */
        h.split = n == 1 || n == 2;
        if (n == 2) freeze(j, 7, 0), freeze(j, 2, 1);
        if (n == 2) CALL(j->w, fsdp_replicate_set_hook(j->rep, NULL, NULL));
        if (n == 2) any_backward(j, plain);
        CALL(j->w, fsdp_replicate_set_hook(j->rep, n < 3 ? hook : NULL, &h));
        memset(other, 0, sizeof other);
        any_backward(j, other);
        CHECK_EQ_MEM(plain, other, sizeof plain);
        CHECK_EQ_INT(h.calls, n == 0 ? 3 : n == 1 ? 6 : 10);
    }
    CHECK(h.in_order);
    /* they run in a worker thread */
    CHECK_EQ_INT(h.threads, j->r->start->how.lanes > 0 && !lib_on_streams(j->w));
}
static const struct {
    const char *name;
    int ranks, lanes;
} several[] = {{"W=2", 2, 0}, {"W=3", 3, 0}, {"W=2,lanes=1", 2, 1}, {"W=3,lanes=2", 3, 2}};
TEST_P(replicate, hook_same_bits, several) {
    conf c = conf_of(hooks);
    run(&c, row->ranks, row->lanes);
}

/* A hook that casts has the bits of reduce_dtype. */
static void bf16_by_hook(job *j) {
    enum { NUMEL = 512 };
    float by_hook[NUMEL] = {0}, by_dtype[NUMEL] = {0}, plain[NUMEL] = {0};
    job *k = (job *)lab_zeros(1, sizeof *k);
    conf c = *j->c;
    hooked h;
    memset(&h, 0, sizeof h);
    h.j = j, h.compress = 1, h.fail_at = -1, h.main = pthread_self();
    c.d.reduce_dtype = FSDP_BF16;
    job_begin(k, &c, j->r);
    job_make(k);
    lab_watch(&k->log, k->w, k->m.model);
    any_backward(j, plain);
    any_backward(k, by_dtype);
    CALL(j->w, fsdp_replicate_set_hook(j->rep, hook, &h));
    any_backward(j, by_hook);
    CHECK_EQ_MEM(by_hook, by_dtype, sizeof by_hook);
    CHECK(memcmp(by_hook, plain, sizeof plain) != 0);
    for (int n = 0, at = 0; n < NET_BUCKETS - 1; n++, at++) {
        at = lab_next_op(&k->log, at, FSDP_OP_ALL_REDUCE, FSDP_LABEL_REPLICAS, NULL);
        CHECK(at >= 0);
        CHECK_EQ_INT(k->log.ops[at].dtype, FSDP_BF16);
    }
    free(k->log.ops);
    free(k);
}
TEST_P(replicate, bf16_by_hook, several) {
    conf c = conf_of(bf16_by_hook);
    run(&c, row->ranks, row->lanes);
}

/* A hook that fails ends the job with its status on its rank; the others get an error. */
static void failing_hook(job *j) {
    hooked h;
    fsdp_status status;
    memset(&h, 0, sizeof h);
    h.j = j, h.fail_at = j->r->rank == 0 ? 1 : -1, h.main = pthread_self();
    CALL(j->w, fsdp_replicate_set_hook(j->rep, hook, &h));
    CALL(j->w, fsdp_replicate_pre_forward(j->rep));
    CALL(j->w, fsdp_replicate_post_forward(j->rep));
    (void)fsdp_replicate_post_backward(j->rep);
    status = fsdp_finalize_backward(j->m.model);
    if (j->r->rank == 0)
        W_CHECK(status == FSDP_ERR_UNSUPPORTED, "%s: %s", fsdp_status_name(status),
                fsdp_last_error(j->w));
    else W_CHECK(status, "%s", fsdp_last_error(j->w));
    W_CHECK(strstr(fsdp_last_error(j->w), "rank 0"), "%s", fsdp_last_error(j->w));
    /* A loop that ignores statuses continues in unused memory. */
    CHECK(fsdp_replicate_pre_forward(j->rep) != FSDP_OK);
    CHECK(fsdp_replicate_post_forward(j->rep) != FSDP_OK);
    for (int p = ALL - 1; p >= 0; p--) {
        void *grad = fsdp_replicate_grad(j->rep, p);
        CHECK(fsdp_replicate_data(j->rep, p) != NULL);
        CHECK((grad != NULL) == !j->m.frozen[p]);
        if (grad) memset(grad, 1, lab_nbytes_of(&net, p));
        CHECK(fsdp_replicate_ready(j->rep, p, 1) != FSDP_OK);
    }
    CHECK(fsdp_replicate_post_backward(j->rep) != FSDP_OK);
    lib_drain(j->w); /* the hook uses this function's variables */
}
TEST_P(replicate, hook_that_fails, several) {
    conf c = conf_of(failing_hook);
    run(&c, row->ranks, row->lanes);
}

/* A hook that is refused because a later bucket is in use is set for no bucket. */
static void half_way(job *j) {
    hooked h;
    memset(&h, 0, sizeof h);
    h.j = j, h.fail_at = -1, h.main = pthread_self();
    for (int n = 0; n < 3; n++) {
        if (n == 1) CALL(j->w, fsdp_replicate_set_hook(j->rep, hook, &h));
        forward(j);
        write_grad(j, 5); /* in the second bucket */
        REFUSED_AS(FSDP_ERR_INVALID_STATE, j->w,
                   fsdp_replicate_set_hook(j->rep, n == 0 ? hook : NULL, &h), "replicate_set_hook");
        CALL(j->w, fsdp_replicate_ready(j->rep, 5, 1));
        for (int p = 0; p < ALL; p++)
            if (p != 5 && !j->m.frozen[p]) write_grad(j, p);
        CALL(j->w, fsdp_replicate_post_backward(j->rep));
        (void)!fsdp_finalize_backward(j->m.model); /* reports the setter */
        CALL(j->w, fsdp_finalize_backward(j->m.model));
        expect(j, 1);
        lab_check_grads(&j->m, &j->t);
        CHECK_EQ_INT(h.calls, 3 * n);
        j->step++;
    }
}
TEST(replicate, hook_half_way) {
    conf c = conf_of(half_way);
    c.all = 1;
    run(&c, 2, 0);
}

/* ---- uneven inputs, and equal start values --------------------------------------------------- */

static const struct join {
    const char *name;
    int divide, lanes, batches[4], planned, late;
} joins[] = {{"active", 1, 0, {5, 3, 4, 0}, 0, 0},
             {"all", 0, 0, {5, 3, 4, 0}, 0, 0},
             {"active,lanes=2", 1, 2, {5, 3, 4, 0}, 0, 0},
             {"plan", 1, 0, {5, 4, 4, 4}, 1, 0},
             {"plan,late", 1, 0, {4, 5, 4, 4}, 1, 1},
             {"plan,all,lanes=2", 0, 2, {4, 4, 5, 4}, 1, 0},
             {"plan,recorded", 1, 0, {5, 1, 5, 5}, 1, 0}};

/* Runs a step in which ranks with a batch mark gradients ready in equal order. */
static void joined_step(job *j, const int *batches, int step, int divide) {
    int active = -1, wanted = 0;
    const int has_batch = batches[j->r->rank] > step;
    snprintf(w_case, sizeof w_case, "step %d of rank %d", step, j->r->rank);
    for (int r = 0; r < j->r->size; r++) wanted += batches[r] > step;
    CALL(j->w, fsdp_replicate_join(j->rep, has_batch, divide, &active));
    CHECK_EQ_INT(active, wanted);
    CHECK_EQ_INT(fsdp_has_uneven_inputs(j->m.model), active > 0 && active < j->r->size);
    if (!active) return;
    if (has_batch) {
        forward(j);
        for (int p = 0; p < ALL; p++)
            if (!j->m.frozen[p]) write_grad(j, p);
        CALL(j->w, fsdp_replicate_ready(j->rep, 0, ALL));
        CALL(j->w, fsdp_replicate_post_backward(j->rep));
    } else CALL(j->w, fsdp_replicate_shadow(j->rep));
    CALL(j->w, fsdp_finalize_backward(j->m.model));
    for (int p = 0; p < ALL; p++) {
        for (int r = 0; r < j->r->size && !j->m.frozen[p]; r++)
            for (int64_t k = 0; k < lab_numel_of(&net, p) && batches[r] > step; k++)
                j->t.kept[p][k] += gradient(j, p, k, r);
        if (!j->m.frozen[p]) lab_reduce(&j->t, &net, p, divide ? active : j->r->size, 0);
    }
    lab_check_grads(&j->m, &j->t);
    update(j);
    lab_check_params(&j->m, &j->t);
    j->step++;
}

static void joined(job *j) {
    static const int all[4] = {99, 99, 99, 99};
    const struct join *row = (const struct join *)j->c->arg;
    fsdp_plan *plan = NULL;
    fsdp_plan_report rep;
    if (row->planned) CALL(j->w, fsdp_plan_create(j->m.model, NULL, &plan));
    for (int i = 0; i < 6; i++) { /* in the last step no rank has a batch */
        joined_step(j, row->batches, i, row->divide);
        if (i == 4 && plan) { /* on all ranks, also on those that have a batch */
            CHECK_EQ_INT(fsdp_plan_state(plan), FSDP_PLAN_EAGER);
            CHECK_MSG(strstr(fsdp_plan_why(plan), "uneven"), "%s", fsdp_plan_why(plan));
        }
    }
    /* With a batch on every rank all is as before, and plans continue. */
    for (int i = 0; i < 3; i++) joined_step(j, all, i, row->divide);
    if (!plan) step(j, 1);
    if (!plan) return;
    CALL(j->w, fsdp_plan_report_get(plan, 0, &rep));
    CHECK(rep.recorded == 1 && rep.left == 0);
    CHECK_EQ_INT(rep.replayed, row->batches[1] > 1 ? 5 : 2);
}
TEST_P(replicate, join, joins) {
    conf c = conf_of(joined);
    struct join how = *row;
    c.all = 1;
    c.arg = &how;
    c.d.late = row->late;
    run(&c, 4, row->lanes);
}

static void fill_by_rank(void *user, const fsdp_param_view *block) {
    const int rank = ((const job *)user)->r->rank;
    for (int64_t k = 0; k < block->numel; k++)
        lab_put(block->data, block->dtype, k, (double)(rank * 100 + k % 50));
}
static void broadcasts(job *j) {
    for (int root = 0; root < j->r->size; root++) {
        CALL(j->w, fsdp_init_params(j->m.model, fill_by_rank, j));
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 0)); /* casts of the old values */
        CALL(j->w, fsdp_replicate_pre_forward(j->rep));
        CALL(j->w, fsdp_replicate_post_forward(j->rep));
        CALL(j->w, fsdp_set_grad_enabled(j->m.model, 1));
        CALL(j->w, fsdp_replicate_broadcast(j->rep, root));
        for (int p = 0; p < ALL; p++)
            for (int64_t k = 0; k < lab_numel_of(&net, p); k++)
                j->t.weight[p][k] = (float)(root * 100 + k % 50);
        lab_check_params(&j->m, &j->t);
        step(j, 1); /* casts of the new values */
    }
}
TEST_P(replicate, broadcast, worlds) {
    for (int dtype = 0; dtype < 2; dtype++) {
        conf c = conf_of(broadcasts);
        if (dtype) c.d.param_dtype = FSDP_BF16, c.d.reduce_dtype = FSDP_F32;
        c.md.cpu_offload = dtype;
        run(&c, row->ranks, row->lanes);
    }
}

/* Broadcasts more than one chunk. */
static void broadcast_large(lab_rank *r) {
    const fsdp_param_desc params[2] = {fsdp_vec("small", 3), fsdp_mat("large", 5 * MIB, 1)};
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_model *m = lab_model(r->w, NULL);
    fsdp_param_view v = FSDP_ZERO;
    d.params = params, d.num_params = 2;
    CALL(r->w, fsdp_replicate_create(m, &d, &rep));
    while (fsdp_next_param(m, &v))
        for (int64_t k = 0; k < v.numel; k++) ((float *)v.shard)[k] = (float)(k % 9999 + r->rank);
    CALL(r->w, fsdp_params_changed(m));
    CALL(r->w, fsdp_replicate_broadcast(rep, 1));
    memset(&v, 0, sizeof v);
    while (fsdp_next_param(m, &v))
        for (int64_t k = 0; k < v.numel; k++)
            if (((float *)v.shard)[k] != (float)(k % 9999 + 1))
                h_fail(H_HERE("large"), "%d", (int)k);
}
TEST(replicate, broadcast_large) { lab_run(2, NULL, broadcast_large, NULL); }

/* Checks the index in desc.params of each view, whatever its bucket. */
static void params_of_views(job *j) {
    fsdp_param_view v = FSDP_ZERO;
    int seen = 0, moved = 0;
    for (; fsdp_next_param(j->m.model, &v); seen++) {
        fsdp_unit *unit = NULL;
        int index = -1, p = fsdp_replicate_param(j->rep, &v);
        CALL(j->w, fsdp_replicate_unit(j->rep, p, &unit, &index));
        CHECK(unit == v.unit && index == v.index);
        CHECK_EQ_INT(p, lab_row_of(&net, &v));
        moved += p != v.ordinal;
    }
    CHECK(seen == ALL && moved > 0);
    CHECK_EQ_INT(fsdp_replicate_param(NULL, &v), -1);
    CHECK_EQ_INT(fsdp_replicate_param(j->rep, NULL), -1);
    v.unit = NULL;
    CHECK_EQ_INT(fsdp_replicate_param(j->rep, &v), -1);
}
TEST(replicate, params_of_views) {
    conf c = conf_of(params_of_views);
    run(&c, 2, 0);
}

/* ---- which ranks are replicas ---------------------------------------------------------------- */

enum { NO_MESH, MODEL_DDP, SLICE, SLICE_OF_MODEL, INFO, FORMS };
static void on_meshes(lab_rank *r) {
    const conf *c = (const conf *)r->arg;
    fsdp_mesh *mesh = lab_mesh2(r->w, 2, 2, "dp", "tp");
    fsdp_mesh_info info, unit_info;
    CALL(r->w, fsdp_mesh_info_init(mesh, FSDP_MESH_INFO_DDP, -1, 0, &info));
    for (int form = 0; form < FORMS; form++) {
        job *j = (job *)lab_zeros(1, sizeof *j);
        conf of = *c;
        snprintf(w_case, sizeof w_case, "form %d", form);
        if (form == MODEL_DDP) of.md.mesh_info = &info;
        if (form == SLICE) of.d.mesh = lab_slice(r->w, mesh, 1);
        if (form == SLICE_OF_MODEL) of.md.mesh_info = &info, of.d.mesh = lab_slice(r->w, mesh, 1);
        if (form == INFO) of.d.mesh_info = &info;
        job_begin(j, &of, r);
        const int along_dp = form == MODEL_DDP || form == INFO;
        if (form != NO_MESH) {
            j->members = j->divisor = 2;
            j->stride = along_dp ? 2 : 1;
            j->first = along_dp ? r->rank % 2 : r->rank / 2 * 2;
        }
        job_make(j);
        CALL(r->w, fsdp_unit_mesh_info(unit_of(j, 0, NULL), &unit_info));
        CHECK_EQ_INT(unit_info.replicate_mesh_size, j->members);
        CHECK_EQ_INT(unit_info.kind, FSDP_MESH_INFO_DDP);
        for (int n = 0; n < 2; n++) {
            step(j, 1);
            update(j);
        }
        CALL(j->w, fsdp_init_params(j->m.model, fill_by_rank, j));
        CALL(j->w, fsdp_replicate_broadcast(j->rep, 1)); /* from the second rank of each group */
        for (int p = 0; p < ALL; p++)
            for (int64_t k = 0; k < lab_numel_of(&net, p); k++)
                j->t.weight[p][k] = (float)((j->first + j->stride) * 100 + k % 50);
        lab_check_params(&j->m, &j->t);
        int active = 0; /* in this rank's group only */
        CALL(j->w, fsdp_replicate_join(j->rep, r->rank == 1, 1, &active));
        int wanted = 0;
        for (int k = 0; k < j->members; k++) wanted += j->first + k * j->stride == 1;
        CHECK_EQ_INT(active, wanted);
        CHECK_STATUS(fsdp_replicate_broadcast(j->rep, j->members), FSDP_ERR_INVALID_ARG);
        free(j);
    }
}
TEST(replicate, meshes) {
    conf c = conf_of(NULL);
    lab_run(4, NULL, on_meshes, &c);
}

/* ---- lack of memory -------------------------------------------------------------------------- */

static void no_memory(lab_rank *r) {
    job *j = (job *)lab_zeros(1, sizeof *j);
    conf c = *(const conf *)r->arg;
    int failures = 0;
    fsdp_status status = FSDP_ERR_OUT_OF_MEMORY;
    const int32_t shape[1] = {r->size};
    if (c.arg) c.d.mesh = lab_mesh(r->w, 1, shape, NULL, NULL);
    /* first without a failure, so that lasting memory exists */
    for (int64_t n = -1; n <= 0 || status; n++) {
        job_begin(j, &c, r);
        const int64_t live = r->heap->live, bytes = r->heap->live_bytes;
        j->m.model = lab_model(r->w, &c.md);
        j->rep = (fsdp_replicate *)j;
        w_fail(r->heap, n);
        status = job_try(j);
        w_fail(r->heap, -1);
        snprintf(w_case, sizeof w_case, "allocation %d", (int)n);
        if (status) {
            W_CHECK(status == FSDP_ERR_OUT_OF_MEMORY, "%s", fsdp_last_error(r->w));
            W_CHECK(strstr(fsdp_last_error(r->w), "memory"), "%s", fsdp_last_error(r->w));
            CHECK(!j->rep);
            failures++;
            if (!fsdp_num_units(j->m.model)) { /* then another try must work */
                CALL(r->w, job_try(j));
                CHECK_EQ_INT(fsdp_replicate_num_buckets(j->rep), NET_BUCKETS);
            }
        } else {
            CALL(r->w, fsdp_init_params(j->m.model, fill, j));
            step(j, 1);
        }
        fsdp_model_destroy(j->m.model);
        /* NCCL keeps memory of its collectives. The thread of a store, which shared memory does not
           have, uses buffers: it may hold fewer later than at first. */
        const int compare = c.arg && (status || (n >= 0 && !lib_on_streams(r->w)));
        for (int i = 0;
             i < 5000 && compare && (r->heap->live > live || r->heap->live_bytes > bytes); i++)
            usleep(1000);
        const int64_t blocks = r->heap->live - live, more = r->heap->live_bytes - bytes;
        W_CHECK(!compare || (blocks == 0 && more == 0) ||
                    (getenv("FSDP_BACKEND") && blocks <= 0 && more <= 0),
                "%lld bytes are left", (long long)more);
    }
    CHECK(failures > 3);
    if (r->rank == 0) h_message("%d allocations failed", failures);
    free(j);
}
TEST(replicate, no_memory_to_create) {
    conf c = conf_of(NULL);
    lab_run(1, NULL, no_memory, &c);
    c.arg = &c; /* a mesh is given */
    lab_run(2, NULL, no_memory, &c);
}

/* ---- on a device with streams, whose memory the host cannot read ----------------------------- */

static void on_streams(int late, int checks) {
    static const int64_t numel[6] = {100, 7, 64, 0, 300, 33};
    const int64_t caps[2] = {300, 200};
    fsdp_param_desc params[6];
    fsdp_replicate_desc d = FSDP_ZERO;
    fsdp_replicate *rep = NULL;
    fsdp_model *m = NULL;
    sim s;
    sim_init(&s, 4, 1);
    s.opaque = 1;
    s.checks = checks;
    fsdp_world *w = sim_open(&s);
    CHECK(w != NULL);
    for (int p = 0; p < 6; p++) params[p] = fsdp_vec(NULL, numel[p]);
    d.params = params, d.num_params = 6, d.caps = caps, d.num_caps = 2, d.late = late;
    m = lab_model(w, NULL);
    CALL(w, fsdp_replicate_create(m, &d, &rep));
    const int nb = fsdp_replicate_num_buckets(rep);
    CHECK_EQ_INT(nb, 3); /* {5, 4}, {3, 2}, {1, 0} */
    CALL(w, sim_watch(&s, m));
    CALL(w, fsdp_replicate_broadcast(rep, 0));
    for (int n = 0; n < 3; n++) {
        const int from = s.num_ops;
        int before_end = 0, after = 0;
        CALL(w, fsdp_replicate_pre_forward(rep));
        for (int p = 0; p < 6; p++)
            sim_read(&s, "forward", fsdp_replicate_data(rep, p), 4 * numel[p]);
        CALL(w, fsdp_replicate_post_forward(rep));
        for (int p = 5; p >= 0; p--) {
            sim_read(&s, "backward", fsdp_replicate_data(rep, p), 4 * numel[p]);
            sim_write(&s, "backward", fsdp_replicate_grad(rep, p), 4 * numel[p]);
            CALL(w, fsdp_replicate_ready(rep, p, 1));
        }
        for (int k = from; k < s.num_ops; k++) before_end += s.ops[k].kind == FSDP_OP_ALL_REDUCE;
        CHECK_EQ_INT(before_end, late ? 0 : nb);
        CALL(w, fsdp_replicate_post_backward(rep));
        CALL(w, fsdp_finalize_backward(m));
        for (int k = from; k < s.num_ops; k++) {
            const int waits = s.ops[k].kind == FSDP_OP_WAIT && s.ops[k].label == FSDP_LABEL_FINAL;
            if (s.ops[k].kind == FSDP_OP_ALL_REDUCE) {
                CHECK_EQ_INT(after, 0); /* all are issued before anything waits */
                CHECK(s.ops[k].stream != FSDP_STREAM_COMPUTE);
            }
            after += waits;
        }
        fsdp_param_view v = FSDP_ZERO; /* an optimizer on COMPUTE */
        while (fsdp_next_param(m, &v))
            if (v.shard_grad) {
                sim_read(&s, "optimizer", v.shard_grad, 4 * v.numel);
                sim_write(&s, "optimizer", v.shard, 4 * v.numel);
            }
        CALL(w, fsdp_params_changed(m));
        CALL(w, fsdp_zero_grad(m));
    }
    CHECK_MSG(!s.races, "%d races: %s", s.races, s.race);
    CHECK_EQ_INT(sim_close(&s), 0);
}
TEST(replicate, streams) {
    on_streams(0, 1);
    on_streams(1, 1);
}

/* ---- random programs ------------------------------------------------------------------------- */

/* Draws a net, equal on all ranks; each rank does its part in its own order. */
static void random_net(uint64_t *state, lab_param *rows, lab_net *out) {
    static const char *const names[LAB_PARAMS] = {"a", "b", "c", "d", "e", "f", "g", "h",
                                                  "i", "j", "k", "l", "m", "n", "o", "p"};
    out->rows = rows;
    out->units = 1;
    out->count = 1 + lab_pick(state, lab_pick(state, 4) ? 6 : LAB_PARAMS);
    memset(rows, 0, LAB_PARAMS * sizeof *rows);
    for (int p = 0; p < out->count; p++) {
        rows[p].name = names[p];
        rows[p].dtype = FSDP_F32;
        rows[p].ndim = 1 + lab_pick(state, 2);
        rows[p].frozen = lab_pick(state, 8) == 0;
        rows[p].shape[0] = lab_pick(state, 9);
        rows[p].shape[1] = 1 + lab_pick(state, 5);
    }
}
static void random_program(lab_rank *r, uint64_t seed, job *j) {
    uint64_t state = seed;
    lab_param rows[LAB_PARAMS];
    lab_net random;
    int32_t order[LAB_PARAMS];
    int64_t caps[3];
    conf c;
    memset(&c, 0, sizeof c);
    random_net(&state, rows, &random);
    for (int k = 0; k < 3; k++) caps[k] = 1 + lab_pick(&state, 200);
    shuffle(&state, order, random.count);
    c.net = &random;
    c.d.caps = caps;
    c.d.num_caps = 1 + lab_pick(&state, 3);
    c.d.order = lab_pick(&state, 2) ? order : NULL;
    c.d.late = lab_pick(&state, 4) == 0;
    if (lab_pick(&state, 4) == 0) c.d.param_dtype = FSDP_BF16, c.d.reduce_dtype = FSDP_F32;
    job_begin(j, &c, r);
    j->seed = seed;
    j->own = lab_hash(seed, (uint64_t)r->rank, 3, 4);
    job_make(j);
    for (int n = 1 + lab_pick(&state, 4), kept = 0; n > 0; n--) {
        const int sync = lab_pick(&state, 3) != 0;
        if (lab_pick(&state, 6) == 0) forward(j);
        step(j, sync);
        kept = !sync;
        if (lab_pick(&state, 3) == 0) update(j);
        else if (lab_pick(&state, 3) == 0) {
            CALL(j->w, fsdp_zero_grad(j->m.model));
            memset(j->t.has, 0, sizeof j->t.has);
        }
        if (!kept && lab_pick(&state, 3) == 0) {
            const int p = lab_pick(&state, random.count);
            freeze(j, p, !j->m.frozen[p]);
        }
    }
    lab_check_params(&j->m, &j->t);
    fsdp_model_destroy(j->m.model);
}
typedef struct programs {
    int first, count;
} programs;
static void random_programs(lab_rank *r) {
    const programs *of = (const programs *)r->arg;
    job *j = (job *)lab_zeros(1, sizeof *j);
    for (int n = of->first; n < of->first + of->count; n++)
        random_program(r, lab_hash(h_seed(), (uint64_t)n, 0, 0), j);
    free(j);
}
static void programs_run(int count) {
    enum { SOME = 50 }; /* programs that share a world */
    for (int n = 0; n < count; n += SOME) {
        programs of = {n, n + SOME < count ? SOME : count - n};
        lab_how how;
        memset(&how, 0, sizeof how);
        how.lanes = n / SOME % 3;
        lab_run(1 + n / SOME % 4, &how, random_programs, &of);
    }
}
TEST(replicate, random) { programs_run(W_SLOW ? 100 : 600); }
TEST(long_replicate, random, SECONDS(3600) | NIGHT) { programs_run(W_SLOW ? 5000 : 100000); }
