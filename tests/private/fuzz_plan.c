/* fuzz_plan.c - a libFuzzer target: texts of plans, edited

       clang -std=c99 -g -O1 -I. -Itests -fsanitize=fuzzer,address,undefined \
           tests/private/fuzz_plan.c tests/library.c -o build/fuzz_plan -pthread -lm
       build/fuzz_plan -max_len=256 -max_total_time=600 -close_fd_mask=3

   An input is a text as it is, if it begins with "fsdp"; else which of some texts that the library
   printed (1 byte), with or without its ops (1), and edits of it, each of four bytes: what, at which
   line (2), and how much. A text is refused; or it is loaded on the simulated device, where it
   replays without a race, with the bits of steps by calls. A text with ops that is proven alone has
   nothing that the checker of tests/plan_texts.h finds.

   SPDX-License-Identifier: MIT */
#define main unused_main /* libFuzzer has its own */
int main(int argc, char **argv);
#include "plan_texts.h"
#undef main

enum { CASES = 12, STEPS = 4, EDITS = 12 };

typedef struct {
    plan_net net;
    fsdp_plan_desc desc;
    int async, size;
    char *text[2];        /* by FSDP_PLAN_TEXT_* */
    uint64_t hash[STEPS]; /* by calls */
} example;
static example examples[CASES];

#define must(condition)                                                                            \
    do {                                                                                           \
        if (condition) break;                                                                      \
        fprintf(stderr, "%s:%d: %s\n%s\n", __FILE__, __LINE__, #condition, tried ? tried : "");    \
        abort();                                                                                   \
    } while (0)
static const char *tried; /* the text that is looked at */

/* A world of its own; text NULL: steps by calls, or recorded if `text` is to be got. */
static int train(const example *e, const char *text, int plans, plan_result *out, char **got) {
    sim s;
    plan_bed b;
    int loaded = 1;
    memset(out, 0, sizeof *out);
    sim_init(&s, e->size, 0);
    s.async = e->async;
    s.checks = 1;
    fsdp_world *w = sim_open(&s);
    must(w != NULL);
    plan_open(&b, &e->net, w);
    if (plans) must(fsdp_plan_create(b.model, &e->desc, &b.plan) == FSDP_OK);
    if (text) {
        fsdp_status status = fsdp_plan_load(b.plan, text, strlen(text));
        must(status == FSDP_OK || status == FSDP_ERR_INVALID_ARG || status == FSDP_ERR_MISMATCH ||
             status == FSDP_ERR_CORRUPT || status == FSDP_ERR_OUT_OF_MEMORY);
        must(lib_failed(w) == FSDP_OK);
        loaded = status == FSDP_OK;
        must(loaded == fsdp_plan_count(b.plan));
    }
    for (int i = 0; i < STEPS && loaded; i++) texts_sim_step(&s, &b, out);
    if (loaded && plans) must(out->mode[STEPS - 1] == FSDP_PLAN_REPLAYING);
    for (int what = 0; what < 2 && got; what++) got[what] = texts_of(b.plan, 0, what);
    must(s.races == 0);
    fsdp_model_destroy(b.model);
    long long left = (long long)sim_close(&s);
    if (left)
        fprintf(stderr, "blocks %lld events %lld streams %lld groups %lld bad %d\n",
                (long long)s.live_blocks, (long long)s.live_events, (long long)s.live_streams,
                (long long)s.live_groups, s.bad_frees);
    must(left == 0);
    return loaded;
}
static void prepare(void) {
    for (int i = 0; i < CASES; i++) {
        example *e = &examples[i];
        plan_result out;
        e->net = texts_net(i % 3);
        e->size = 2;
        e->async = i / 3 % 2;
        if (i >= 6) e->desc.bucket_bytes = -1, e->desc.without = 1u << FSDP_PASS_KEEP;
        (void)train(e, NULL, 0, &out, NULL);
        memcpy(e->hash, out.hash, sizeof e->hash);
        (void)train(e, NULL, 1, &out, e->text);
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
    plan_result out;
    if (!examples[0].text[0]) prepare();
    if (size >= 4 && memcmp(data, "fsdp", 4) == 0) {
        char *text = (char *)lab_zeros(size + 1, 1);
        fsdp_plan_proof p;
        memcpy(text, data, size);
        (void)!fsdp_plan_prove_texts((const char *const *)&text, 1, &p);
        (void)train(&examples[0], text, 1, &out, NULL);
        free(text);
        return 0;
    }
    if (size < 6) return 0;
    const example *e = &examples[data[0] % CASES];
    int what = data[1] % 2;
    char *text = edit(e, what, data + 2, size - 2);
    tried = text;
    if (what == FSDP_PLAN_TEXT_OPS) look(text);
    if (train(e, text, 1, &out, NULL) && (!strstr(text, "  collect") || e->net.num_units > 3))
        must(memcmp(out.hash, e->hash, sizeof e->hash) == 0);
    tried = NULL;
    free(text);
    return 0;
}
