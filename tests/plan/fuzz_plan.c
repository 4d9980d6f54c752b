/* fuzz_plan.c - a libFuzzer target: texts of plans, edited, and what the proof finds in them

       printf 'src:*\nfun:fsdpi_plan_*\n' > build/functions
       clang -std=c99 -g -O2 -I. -Itests -fsanitize=fuzzer,address,undefined \
           -fno-sanitize-coverage=trace-cmp -fsanitize-coverage-allowlist=build/functions \
           tests/plan/fuzz_plan.c tests/library.c -o build/fuzz_plan -pthread -lm
       ASAN_OPTIONS=quarantine_size_mb=4 build/fuzz_plan -entropic=0 -max_len=64 \
           -max_total_time=600 -close_fd_mask=3

   The first byte of an input chooses a text that the library has printed, with ops. The others are
   edits of it, each of four bytes: what, at which line (2), and how much. If the proof accepts the
   edited text, the checker of tests/plan/plan_texts.h must find nothing in it.

   SPDX-License-Identifier: MIT */
#define main unused_main /* libFuzzer has its own */
int main(int argc, char **argv);
#include "plan_texts.h"
#undef main

enum { CASES = 12, STEPS = 3, EDITS = 12 };

static char *texts[CASES];

#define must(condition)                                                                            \
    do {                                                                                           \
        if (condition) break;                                                                      \
        fprintf(stderr, "%s:%d: %s\n%s\n", __FILE__, __LINE__, #condition, tried ? tried : "");    \
        abort();                                                                                   \
    } while (0)
static const char *tried; /* the text that is looked at */

/* 0: layers used more than once, 1: a chain, 2: with casts. */
static plan_net small_net(int which) {
    static const int again[3] = {0, 1, 0};
    plan_net n = plan_chain(which ? 3 : 2, 2, 4);
    if (which == 0) n.num_calls = 0, plan_visit(&n, again, 3);
    if (which == 2) n.model.param_dtype = FSDP_BF16, n.model.reduce_dtype = FSDP_F32;
    return n;
}
static void prepare(void) {
    for (int i = 0; i < CASES; i++) {
        static plan_result out;
        const plan_net net = small_net(i % 3);
        fsdp_plan_desc desc = FSDP_ZERO;
        sim s;
        plan_bed b;
        if (i >= 6) desc.bucket_bytes = -1, desc.without = 1u << FSDP_PASS_KEEP;
        sim_init(&s, 2, 0);
        s.async = i / 3 % 2;
        fsdp_world *w = sim_open(&s);
        must(w != NULL);
        plan_open(&b, &net, w);
        must(fsdp_plan_create(b.model, &desc, &b.plan) == FSDP_OK);
        for (int k = 0; k < STEPS; k++) texts_sim_step(&s, &b, &out);
        must(out.mode[STEPS - 1] == FSDP_PLAN_REPLAYING);
        texts[i] = texts_of(b.plan, 0, FSDP_PLAN_TEXT_OPS);
        fsdp_model_destroy(b.model);
        must(sim_close(&s) == 0);
    }
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
static char *edit(const char *of, const uint8_t *data, size_t size) {
    static char lines[EDITS][TEXTS_LINE];
    texts_lines *t = texts_split(of);
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

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    fsdp_plan_proof p;
    char why[200];
    if (!texts[0]) prepare();
    if (size < 5) return 0;
    char *text = edit(texts[data[0] % CASES], data + 1, size - 1);
    tried = text;
    if (lib_plan_prove(text, &p) && !p.refuted)
        must(brute_judge(text, why, sizeof why) != 0 || !fprintf(stderr, "%s\n", why));
    tried = NULL;
    free(text);
    return 0;
}
