/* fuzz_plan.c - a libFuzzer target: texts of plans, edited

       printf 'src:*\nfun:fsdpi_plan_*\n' > build/functions
       clang -std=c99 -g -O2 -I. -Itests -fsanitize=fuzzer,address,undefined \
           -fno-sanitize-coverage=trace-cmp -fsanitize-coverage-allowlist=build/functions \
           tests/plan/fuzz_plan.c tests/library.c -o build/fuzz_plan -pthread -lm
       mkdir seeds && FUZZ_PLAN_SEEDS=seeds build/fuzz_plan -runs=1
       ASAN_OPTIONS=quarantine_size_mb=4 build/fuzz_plan -entropic=0 -max_len=1600 \
           -max_total_time=600 -close_fd_mask=3 seeds

   An input that begins with "fsdp" is a text without its last line, of a model of one small unit;
   FUZZ_PLAN_SEEDS is where such texts are written. Else an input is which of some texts that the
   library printed (1 byte), with or without its ops (1), and edits of it, each of four bytes: what,
   at which line (2), and how much. A text is refused; or it is loaded on the simulated device, where
   it replays without a race, with the bits of steps by calls. A text with ops that is proven alone
   has nothing that the checker of tests/plan/plan_texts.h finds. Worlds stay from input to input.

   SPDX-License-Identifier: MIT */
#define main unused_main /* libFuzzer has its own */
int main(int argc, char **argv);
#include "plan_texts.h"
#undef main

enum { CASES = 12, TINY = CASES, STEPS = 4, EDITS = 12 };

typedef struct {
    plan_net net;
    fsdp_plan_desc desc;
    int async, size, visits_again; /* units are visited, and reduced, more than once */
    char *text[2];                 /* by FSDP_PLAN_TEXT_* */
    uint64_t hash[STEPS];          /* by calls */
    sim s;                         /* a world that stays, with a plan that nothing is loaded to */
    plan_bed b;
} example;
static example examples[CASES + 1];

#define must(condition)                                                                            \
    do {                                                                                           \
        if (condition) break;                                                                      \
        fprintf(stderr, "%s:%d: %s\n%s\n", __FILE__, __LINE__, #condition, tried ? tried : "");    \
        abort();                                                                                   \
    } while (0)
static const char *tried; /* the text that is looked at */

static fsdp_world *open_world(const example *e, sim *s, plan_bed *b) {
    sim_init(s, e->size, 0);
    s->async = e->async;
    s->checks = 1;
    fsdp_world *w = sim_open(s);
    must(w != NULL);
    plan_open(b, &e->net, w);
    return w;
}
/* In a world of its own: steps by calls, or recorded, whose texts are got. */
static void train(const example *e, int plans, plan_result *out, char **got) {
    sim s;
    plan_bed b;
    memset(out, 0, sizeof *out);
    (void)open_world(e, &s, &b);
    if (plans) must(fsdp_plan_create(b.model, &e->desc, &b.plan) == FSDP_OK);
    for (int i = 0; i < STEPS; i++) texts_sim_step(&s, &b, out);
    if (plans) must(out->mode[STEPS - 1] == FSDP_PLAN_REPLAYING);
    for (int what = 0; what < 2 && got; what++) got[what] = texts_of(b.plan, 0, what);
    must(s.races == 0);
    fsdp_model_destroy(b.model);
    must(sim_close(&s) == 0);
}
/* A text is loaded, and its steps have the bits of calls; or it is refused: 0. */
static int try_text(example *e, const char *text, int raw, plan_result *out) {
    plan_bed *b = &e->b;
    fsdp_status status = fsdp_plan_load(b->plan, text, strlen(text));
    must(status == FSDP_OK || status == FSDP_ERR_INVALID_ARG || status == FSDP_ERR_MISMATCH ||
         status == FSDP_ERR_CORRUPT || status == FSDP_ERR_OUT_OF_MEMORY);
    must(lib_failed(b->w) == FSDP_OK);
    must((status == FSDP_OK) == fsdp_plan_count(b->plan));
    if (status) return 0;
    must(fsdp_init_params(b->model, plan_fill, NULL) == FSDP_OK);
    b->hash = 0, b->step = 0;
    for (int i = 0; i < STEPS; i++) texts_sim_step(&e->s, b, out);
    must(raw || out->mode[STEPS - 1] == FSDP_PLAN_REPLAYING); /* raw: it may have other calls */
    must(e->s.races == 0);
    must(fsdp_plan_forget(b->plan) == FSDP_OK);
    return 1;
}
static void write_seed(const char *dir, const char *name, const char *text) {
    char path[512];
    const char *end = strstr(text, "\nend ");
    snprintf(path, sizeof path, "%s/%s", dir, name);
    FILE *f = fopen(path, "w");
    must(f && end && fwrite(text, 1, (size_t)(end - text) + 1, f) && !fclose(f));
}
/* 0: layers used more than once, 1: a chain, 2: with casts, 3: one unit. */
static plan_net small_net(int which) {
    static const int again[3] = {0, 1, 0};
    plan_net n = plan_chain(which == 3 ? 1 : which ? 3 : 2, 2, 4);
    if (which == 0) n.num_calls = 0, plan_visit(&n, again, 3);
    if (which == 2) n.model.param_dtype = FSDP_BF16, n.model.reduce_dtype = FSDP_F32;
    return n;
}
static void prepare(void) {
    static plan_result out;
    for (int i = 0; i <= CASES; i++) {
        example *e = &examples[i];
        e->net = small_net(i == TINY ? 3 : i % 3);
        e->visits_again = i < TINY && i % 3 == 0;
        e->size = 2;
        e->async = i / 3 % 2;
        if (i >= 6) e->desc.bucket_bytes = -1, e->desc.without = 1u << FSDP_PASS_KEEP;
        train(e, 0, &out, NULL);
        memcpy(e->hash, out.hash, sizeof e->hash);
        train(e, 1, &out, e->text);
        (void)open_world(e, &e->s, &e->b);
        must(fsdp_plan_create(e->b.model, &e->desc, &e->b.plan) == FSDP_OK);
    }
    const char *dir = getenv("FUZZ_PLAN_SEEDS");
    if (!dir) return;
    write_seed(dir, "decisions", examples[TINY].text[0]);
    write_seed(dir, "ops", examples[TINY].text[1]);
}

/* A number in a line, the `which`-th one, becomes another. */
static void renumber(char *line, int which, int value) {
    char *at = line, *end;
    for (; which >= 0; which--) {
        while (*at && !(*at >= '0' && *at <= '9')) at++;
        if (!*at) return;
        end = at;
        while (*end >= '0' && *end <= '9') end++;
        if (which > 0) at = end;
    }
    char rest[TEXTS_LINE];
    snprintf(rest, sizeof rest, "%s", end);
    snprintf(at, TEXTS_LINE - (size_t)(at - line), "%d%s", value, rest);
}
static char *edit(const example *e, int what, const uint8_t *data, size_t size) {
    static char lines[EDITS][TEXTS_LINE];
    texts_lines *t = texts_split(e->text[what]);
    int mends = size % 2 == 0;
    for (int n = 0; n < EDITS && size >= 4; n++, data += 4, size -= 4) {
        int at = (data[1] | data[2] << 8) % t->num, by = data[3];
        snprintf(lines[n], TEXTS_LINE, "%s", t->at[at]);
        switch (data[0] % 7) {
        case 0: texts_move(t, at, -1); break;
        case 1: texts_insert(t, at, t->at[at]); break;
        case 2: texts_move(t, at, (at + 1 + by) % t->num); break;
        case 3: texts_insert(t, (at + 1 + by) % t->num, t->at[at]); break; /* also elsewhere */
        case 4: t->at[at] = lines[n], renumber(lines[n], by % 8, by / 8); break;
        case 5:
            t->at[at] = lines[n],
            lines[n][(size_t)by % strlen(lines[n])] = (char)(32 + data[0] / 7 % 95);
            break;
        default: /* another unit, another decision */
            for (char *name = lines[n]; (name = strstr(name, "'h.")) != NULL; name += 3)
                name[3] = (char)('0' + by % 4);
            if (by > 127 && texts_is(lines[n], "  keep")) memcpy(lines[n], "  free", 6);
            t->at[at] = lines[n];
        }
    }
    char *text = texts_join(t, mends);
    texts_free(t);
    return text;
}
static void look(const char *text) {
    fsdp_plan_proof p;
    char why[200];
    fsdp_status status = fsdp_plan_prove_texts(&text, 1, &p);
    must(status == FSDP_OK || status == FSDP_ERR_INVALID_ARG || status == FSDP_ERR_CORRUPT);
    if (status || p.refuted || strlen(text) > 100000) return;
    must(brute_judge(text, why, sizeof why) != 0 || !fprintf(stderr, "%s\n", why));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static plan_result out;
    static const char end[] = "end 0000000000000000\n";
    if (!examples[0].text[0]) prepare();
    const int raw = size >= 4 && memcmp(data, "fsdp", 4) == 0;
    if (size < 6) return 0;
    example *e = &examples[raw ? TINY : data[0] % CASES];
    const int what = raw ? FSDP_PLAN_TEXT_OPS : data[1] % 2;
    char *text = raw ? (char *)lab_zeros(size + sizeof end, 1) : edit(e, what, data + 2, size - 2);
    if (raw) memcpy(text, data, size), memcpy(text + size, end, sizeof end);
    tried = text;
    if (what == FSDP_PLAN_TEXT_OPS) look(text);
    if (try_text(e, text, raw, &out) && (!e->visits_again || !strstr(text, "  collect")))
        must(memcmp(out.hash, e->hash, sizeof e->hash) == 0);
    tried = NULL;
    free(text);
    return 0;
}
