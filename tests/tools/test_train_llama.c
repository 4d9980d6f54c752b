/* test_train_llama.c - examples/llama/train_llama as a program: equal losses on any number of ranks,
   resumes, exports, and one line for what is impossible.

   SPDX-License-Identifier: MIT */
#define TAGS NO(ASAN)
#include "harness.h"
#include "golden.h"

#include <math.h> // cos

enum { STEPS = 6, VOCAB = 97, TOKENS = 700, OUTPUT = 1 << 15 };

static char output[OUTPUT], errors[OUTPUT]; /* the last run's */

static void slurp(const char *name, char *text) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", h_tmpdir(), name);
    FILE *f = fopen(path, "rb");
    CHECK_MSG(f != NULL, "%s", path);
    text[fread(text, 1, OUTPUT - 1, f)] = 0;
    fclose(f);
}

static void put(const char *name, const void *bytes, size_t count) {
    char path[512];
    snprintf(path, sizeof path, "%s/%s", h_tmpdir(), name);
    FILE *f = fopen(path, "wb");
    CHECK(f != NULL && fwrite(bytes, 1, count, f) == count && fclose(f) == 0);
}

/* Writes tokens, and a mask without labels, and goes into the folder of the test. */
static void prepare(void) {
    static uint8_t bytes[1024 + 2 * TOKENS], mask[TOKENS];
    const uint32_t head[3] = {20240520, 1, TOKENS};
    golden_needs("llama");
    if (access("examples/llama/train_llama", X_OK))
        SKIP("no examples/llama/train_llama: make examples builds it");
    unsetenv("RANK"), unsetenv("WORLD_SIZE");
    for (int i = 0; i < 12; i++) bytes[i] = (uint8_t)(head[i / 4] >> 8 * (i % 4));
    for (int i = 0; i < TOKENS; i++) bytes[1024 + 2 * i] = (uint8_t)(i * i % VOCAB);
    put("t.bin", bytes, sizeof bytes);
    put("no.mask", mask, sizeof mask);
    for (int i = 0; i < TOKENS; i++) mask[i] = i % 5 != 0;
    put("some.mask", mask, sizeof mask);
}

/* Runs a shell command, in which @ is the program with the golden model, and % the folder of the
   test. Returns its exit status. */
static int run(const char *form) {
    char command[4096];
    size_t n = 0;
    for (const char *c = form; *c && n < sizeof command - 1100; c++) {
        if (*c == '@') {
            n += (size_t)snprintf(command + n, 600,
                                  "examples/llama/train_llama --model %s/llama/llama_tied/model",
                                  golden_dir());
        } else if (*c == '%') {
            n += (size_t)snprintf(command + n, 500, "%s", h_tmpdir());
        } else command[n++] = *c;
    }
    snprintf(command + n, sizeof command - n, " >%s/out 2>%s/err </dev/null", h_tmpdir(),
             h_tmpdir());
    const int status = system(command);
    slurp("out", output), slurp("err", errors);
    printf("%s\n%s%s", command, output, errors);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

typedef struct curve {
    int count, step[STEPS];
    double loss[STEPS], norm[STEPS], lr[STEPS];
    long long tokens[STEPS];
} curve;

static void read_curve(const char *name, curve *c) {
    static char text[OUTPUT];
    const char *at = text;
    int n = 0;
    slurp(name, text);
    for (c->count = 0; *at; at += n, c->count++) {
        const int i = c->count;
        double seconds;
        CHECK(i < STEPS);
        CHECK_EQ_INT(sscanf(at,
                            "{\"step\": %d, \"loss\": %lf, \"norm\": %lf, \"lr\": %lf, "
                            "\"tokens\": %lld, \"seconds\": %lf}%n",
                            &c->step[i], &c->loss[i], &c->norm[i], &c->lr[i], &c->tokens[i],
                            &seconds, &n),
                     6);
        CHECK(at[n++] == '\n' && seconds > 0.0);
    }
}

#define TRAIN "@ --data %/t.bin --steps 6 --batch 12 --context 20 --lr 1e-3 "

static const struct {
    const char *name, *how;
} ways[] = {{"2_ranks", TRAIN "--ranks 2 --json %/j"},
            {"3_ranks", TRAIN "--ranks 3 --micro 1 --json %/j"},
            {"4_ranks_accumulate", TRAIN "--ranks 4 --micro 1 --accumulate --json %/j"},
            {"1_rank_recompute", TRAIN "--recompute --micro 2 --ce-rows 7 --json %/j"},
            {"launched", "tools/fsdprun -n 2 " TRAIN "--json %/j"}};

/* The losses of one rank, however the rows are divided. The learning rate warms up for a tenth of
   the steps, which is none here, and then falls along half a cosine to a tenth. */
TEST_P(train_llama, same_losses, ways, SECONDS(120)) {
    curve one, c;
    prepare();
    CHECK_EQ_INT(run(TRAIN "--ranks 1 --json %/one"), 0);
    read_curve("one", &one);
    CHECK_EQ_INT(run(row->how), 0);
    read_curve("j", &c);
    CHECK_EQ_INT(one.count, STEPS);
    CHECK_EQ_INT(c.count, STEPS);
    for (int i = 0; i < STEPS; i++) {
        CHECK_EQ_INT(c.step[i], i + 1);
        CHECK_EQ_INT(c.tokens[i], 12 * 20);
        CHECK_NEAR(c.loss[i] / one.loss[i], 1.0, 1e-5);
        CHECK_NEAR(c.norm[i] / one.norm[i], 1.0, 1e-4);
        CHECK_NEAR(c.lr[i], 1e-4 + 9e-4 * 0.5 * (1.0 + cos(3.141592653589793 * i / STEPS)), 1e-12);
    }
    CHECK(one.loss[STEPS - 1] < one.loss[0]);
}

TEST(train_llama, warmup_and_options) {
    static const double lrs[STEPS] = {1e-3, 2e-3, 2e-3, 1.5e-3, 1e-3, 0};
    curve c;
    prepare();
    CHECK_EQ_INT(run("@ --data %/t.bin --mask %/some.mask --steps 5 --batch 2 --context 20 --lr "
                     "2e-3 --min-lr 1e-3 --warmup 2 --clip 0.5 --seed 9 --json %/j"),
                 0);
    read_curve("j", &c);
    CHECK_EQ_INT(c.count, 5);
    for (int i = 0; i < 5; i++) {
        const double done = (i - 2) / 3.0;
        const double want = i < 2 ? lrs[i] : 1e-3 + 5e-4 * (1.0 + cos(3.141592653589793 * done));
        CHECK_NEAR(c.lr[i], want, 1e-12);
        CHECK_EQ_INT(c.tokens[i], 32); /* one token in five is no label */
    }
}

/* A run that goes on from a checkpoint ends as one that was not interrupted, to the bit. */
TEST(train_llama, resumes, SECONDS(120)) {
    curve whole, rest;
    prepare();
    CHECK_EQ_INT(run(TRAIN "--ranks 2 --save %/run --save-every 3 --json %/whole --export %/a"), 0);
    CHECK_EQ_INT(run("rm -rf %/run/step-00000006 ;" TRAIN
                     "--ranks 2 --save %/run --resume --json %/rest --export %/b"),
                 0);
    CHECK(strstr(output, "run: 3 steps are done\n") != NULL);
    read_curve("whole", &whole), read_curve("rest", &rest);
    CHECK_EQ_INT(rest.count, 3);
    for (int i = 0; i < 3; i++) {
        CHECK_EQ_INT(rest.step[i], i + 4);
        CHECK(rest.loss[i] == whole.loss[i + 3] && rest.norm[i] == whole.norm[i + 3]);
    }
    CHECK_EQ_INT(run("diff -r %/a %/b"), 0);
    /* in one file, each step has one line, also if an earlier run is in it, and a line is cut off */
    CHECK_EQ_INT(
        run("rm -rf %/run/step-00000006; cp %/whole %/j; echo '{\"step\": 9, \"l\": 1}' >>%/j; "
            "cat %/whole >>%/j; printf '{\"step\": 7, \"lo' >>%/j;" TRAIN
            "--ranks 2 --save %/run --resume --json %/j"),
        0);
    CHECK_EQ_INT(run("head -7 %/j >%/old; tail -n +8 %/j >%/new; cat %/whole >%/w; echo "
                     "'{\"step\": 9, \"l\": 1}' >>%/w; test $(wc -l <%/j) = 13 && cmp %/old %/w"),
                 0);
    read_curve("new", &rest);
    CHECK_EQ_INT(rest.count, STEPS);
    for (int i = 0; i < STEPS; i++) CHECK(rest.step[i] == i + 1 && rest.loss[i] == whole.loss[i]);
    CHECK_EQ_INT(run(TRAIN "--ranks 2 --seed 2 --save %/run --resume"), 2);
    CHECK(strstr(errors, "seed: expected 1, got 2\n") != NULL);
    CHECK_EQ_STR(output, "");
    CHECK_EQ_INT(run("tools/fsdprun -n 2 " TRAIN "--seed 2 --save %/run --resume"), 2);
    CHECK(strstr(errors, "seed: expected 1, got 2\n") != NULL);
    /* a launcher that starts the job again resumes: nothing is left to do */
    CHECK_EQ_INT(run("FSDP_RESTART_COUNT=1 " TRAIN "--ranks 3 --save %/run"), 0);
    CHECK(strstr(output, "run: 6 steps are done\n        none is left: --steps 6 counts those"));
    CHECK(strstr(output, "step ") == NULL);
    CHECK_EQ_INT(run(TRAIN "--ranks 3 --save %/run"), 2);
    CHECK(strstr(errors, "/run/step-00000006: expected no checkpoint: add --resume, or another"));
    /* without a step nothing is saved */
    CHECK_EQ_INT(run(TRAIN "--ranks 3 --save %/run --predict"), 0);
    CHECK_EQ_INT(run("@ --sample 1 --save %/run"), 0);
}

/* ---- adapters -------------------------------------------------------------------------------- */

/* Returns the loss of the last evaluation. */
static double evaluated(void) {
    double loss = 0.0;
    const char *at = strstr(output, "eval ");
    CHECK(at && sscanf(strstr(at, ": loss"), ": loss %lf", &loss) == 1);
    return loss;
}

#define LORA TRAIN "--lora 4 --targets q,v,down "

/* Adapters learn the same on any number of ranks, over f32 and over blocks of bytes, whose losses
   are near. The adapter alone, and merged into the model, has the loss that it had in training. */
TEST(train_llama, adapters, SECONDS(120)) {
    static const char *const others[] = {LORA "--ranks 3 --micro 2 --base f32 --json %/j",
                                         "rm %/j; " LORA
                                         "--ranks 2 --base q8_0 --recompute --json %/j"};
    curve one, c;
    prepare();
    CHECK_EQ_INT(run(LORA "--ranks 1 --eval-data %/t.bin --json %/all --export %/adapter"), 0);
    CHECK(strstr(output, "lora    rank 4, alpha 8, q,v,down over the dtype of the files\n"));
    const double loss = evaluated();
    CHECK_EQ_INT(run("grep -q 'name_or_path\": \"/' %/adapter/adapter_config.json"), 0);
    CHECK_EQ_INT(run("grep -v eval_loss %/all >%/one; true"), 0);
    read_curve("one", &one);
    CHECK_EQ_INT(one.count, STEPS);
    CHECK_NEAR(one.lr[0], 1e-3, 1e-12);
    CHECK(one.loss[STEPS - 1] < one.loss[0]);
    for (int i = 0; i < 2; i++) {
        CHECK_EQ_INT(run(others[i]), 0);
        if (i) CHECK(strstr(output, " and 1 of 7 matrices of a layer stay as in the files\n"));
        read_curve("j", &c);
        for (int s = 0; s < STEPS; s++) CHECK_NEAR(c.loss[s] / one.loss[s], 1.0, i ? 1e-2 : 1e-5);
        CHECK((c.loss[0] == one.loss[0]) == (i == 0));
    }
    CHECK_EQ_INT(run("@ --adapter %/adapter --eval-data %/t.bin --context 20 --ranks 2"), 0);
    CHECK_NEAR(evaluated() / loss, 1.0, 1e-6);
    CHECK_EQ_INT(run("@ --adapter %/adapter --ranks 2 --export %/merged --merge"), 0);
    CHECK_EQ_INT(
        run("examples/llama/train_llama --model %/merged --eval-data %/t.bin --context 20"), 0);
    CHECK_NEAR(evaluated() / loss, 1.0, 1e-6);
    /* without a step, an adapter goes out as it came in */
    CHECK_EQ_INT(
        run("@ --adapter %/adapter --ranks 2 --export %/again && diff -r %/adapter %/again"), 0);
    /* of another learning rate, if none is given */
    CHECK_EQ_INT(run("@ --data %/t.bin --steps 1 --context 20 --lora 2 --json %/lr"), 0);
    read_curve("lr", &c);
    CHECK_NEAR(c.lr[0], 2e-4, 1e-12);
    /* the seed is that of A */
    CHECK_EQ_INT(run("for s in 3 4; do @ --lora 2 --seed $s --export %/$s || exit 9; done; "
                     "cmp -s %/3/adapter_model.safetensors %/4/adapter_model.safetensors"),
                 1);
}

/* A run of adapters goes on to the bit. Without a checkpoint it begins with --adapter. */
TEST(train_llama, adapters_resume, SECONDS(120)) {
    curve whole, rest;
    prepare();
    CHECK_EQ_INT(run(LORA "--ranks 2 --save %/run --save-every 3 --json %/whole --export %/a"), 0);
    CHECK_EQ_INT(run("rm -rf %/run/step-00000006 ;" LORA
                     "--ranks 2 --save %/run --resume --json %/rest --export %/b"),
                 0);
    read_curve("whole", &whole), read_curve("rest", &rest);
    CHECK_EQ_INT(rest.count, 3);
    for (int i = 0; i < 3; i++) CHECK(rest.loss[i] == whole.loss[i + 3]);
    CHECK_EQ_INT(run("diff -r %/a %/b"), 0);
    CHECK_EQ_INT(run("grep -q lora_B %/run/step-00000003/*"), 0);
    CHECK_EQ_INT(run("grep -q embed_tokens %/run/step-00000003/*"), 1); /* frozen: not in it */
    CHECK_EQ_INT(run(LORA "--ranks 2 --alpha 8.25 --save %/run --resume"), 2);
    CHECK(strstr(errors, "files, got rank 4, alpha 8.25, q,v,down over the dtype of the files\n"));
    CHECK_EQ_INT(run(LORA "--ranks 2 --base bf16 --save %/run --resume"), 2);
    CHECK(strstr(errors, "files, got rank 4, alpha 8, q,v,down over bf16\n"));
    CHECK_EQ_INT(run(TRAIN "--ranks 2 --lora 5 --targets q,v,down --save %/run --resume"), 2);
    CHECK(strstr(errors, ": adapters: expected rank 4, alpha 8, q,v,down over the dtype of the "
                         "files, got rank 5, alpha 10, q,v,down over the dtype of the files\n"));
    CHECK_EQ_INT(run(TRAIN "--ranks 2 --save %/run --resume"), 2);
    CHECK(strstr(errors, "files, got none\n"));
    CHECK_EQ_INT(run(TRAIN "--ranks 2 --adapter %/a --save %/new --resume --json %/j"), 0);
    CHECK(strstr(output, "resume  ") && strstr(output, ": 0 steps are done\n"));
    read_curve("j", &rest);
    CHECK(rest.loss[0] < whole.loss[0]);
}

/* The memory that a training takes, and nothing else. */
TEST(train_llama, predicts) {
    char line[300], *at;
    prepare();
    CHECK_EQ_INT(run(TRAIN "--ranks 2"), 0);
    CHECK((at = strstr(output, "memory ")) != NULL);
    snprintf(line, sizeof line, "%.*s", (int)strcspn(at, "\n"), at);
    CHECK_EQ_INT(run(TRAIN "--ranks 2 --predict --json %/j --save %/run"), 0);
    CHECK((at = strstr(output, "memory ")) != NULL);
    CHECK(!strncmp(at, line, strlen(line)) && !strcmp(at + strlen(line), "\n"));
    CHECK_EQ_INT(run("test ! -e %/run"), 0);
    long long bytes[4], told[3];
    static const char form[] = "{\"model_bytes\": %lld, \"adamw_bytes\": %lld, "
                               "\"activation_bytes\": %lld, \"merge_bytes\": %lld}\n";
    static char json[OUTPUT];
    slurp("j", json);
    CHECK_EQ_INT(sscanf(json, form, &bytes[0], &bytes[1], &bytes[2], &bytes[3]), 4);
    CHECK(strchr(json, '\n')[1] == 0 && bytes[3] == 0);
    CHECK_EQ_INT(sscanf(line, "memory  of a rank: %lld bytes of the model, %lld of AdamW, %lld of",
                        &told[0], &told[1], &told[2]),
                 3);
    for (int i = 0; i < 3; i++) CHECK_EQ_INT(bytes[i], told[i]);
    /* the second model of --merge: 26304 parameters, whole adapters, room for a token */
    CHECK_EQ_INT(run("rm %/j; @ --predict --lora 4 --merge --export %/e --json %/j"), 0);
    slurp("j", json);
    CHECK_EQ_INT(sscanf(json, form, &bytes[0], &bytes[1], &bytes[2], &bytes[3]), 4);
    CHECK(bytes[3] > 4 * (26304 + 4672) && bytes[3] < 4 * (26304 + 4672) + 40000);
    char more[80];
    snprintf(more, sizeof more, "        --merge: %lld more, of the merged model", bytes[3]);
    CHECK(strstr(output, more) != NULL);
    CHECK_EQ_INT(run("test ! -e %/e"), 0);
    /* also of more than there is */
    CHECK_EQ_INT(run("@ --predict --batch 100000000"), 0);
    CHECK_EQ_INT(run("@ --predict --lora 4"), 0);
    CHECK(strstr(output, "model   30976 parameters, 4672 trained:") != NULL);
}

/* Without --steps it evaluates, and the export of an unchanged model has the same bytes. */
TEST(train_llama, evaluates_samples_and_exports, SECONDS(120)) {
    char one[200], *line;
    prepare();
    CHECK_EQ_INT(run("@ --eval-data %/t.bin --context 24 --batch 4 --sample 1,2,3 --new 8"), 0);
    CHECK((line = strstr(output, "eval ")) != NULL);
    snprintf(one, sizeof one, "%.*s", (int)strcspn(line, "\n"), line);
    CHECK(strstr(one, " of 696 tokens") != NULL); /* 29 rows */
    CHECK_EQ_INT(run("@ --data %/t.bin --context 24 --ranks 3 --batch 3 --sample 1,2,3 --new 8 "
                     "--export %/same"),
                 0);
    CHECK_MSG(strstr(output, one) != NULL, "%s", one);
    char samples[2][200];
    for (int i = 0; i < 2; i++) {
        CHECK((line = strstr(output, "sample  ")) != NULL);
        snprintf(samples[i], sizeof samples[i], "%.*s", (int)strcspn(line, "\n"), line);
        if (i == 0) CHECK_EQ_INT(run("@ --sample 1,2,3 --new 8 --ranks 2"), 0);
    }
    CHECK_EQ_STR(samples[0], samples[1]);
    char command[700];
    snprintf(command, sizeof command, "diff -r %%/same %s/llama/llama_tied/model", golden_dir());
    CHECK_EQ_INT(run(command), 0);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static const struct {
    const char *name, *how;
    int status;
    const char *line;
} refusals[] = {
    {"no_model", "examples/llama/train_llama", 2,
     "--model: expected a directory of Hugging Face, got none"},
    {"other_folder", "examples/llama/train_llama --model docs --sample 1", 2,
     "docs/config.json: cannot be opened: No such file or directory"},
    {"nothing", "@", 2,
     "nothing to do: expected --data, --eval-data, --sample, --export or --predict"},
    {"no_data", "@ --steps 3", 2, "--steps: expected --data, too"},
    {"word", "@ more", 2, "more: expected an option: --help lists them"},
    {"unknown", "@ --modle x", 2, "--modle: expected an option: --help lists them"},
    {"letter", "@ -h", 2, "-h: expected an option: --help lists them"},
    {"no_value", "@ --steps", 2, "--steps: expected a value: --help lists them"},
    {"data", "@ --data %/none", 2, "train_llama: --data /"},
    {"eval_data", "@ --eval-data %/none", 2, "train_llama: --eval-data /"},
    {"mask_file", "@ --data %/t.bin --mask %/none", 2, "train_llama: --data and --mask: /"},
    {"few_batches", "@ --data %/t.bin --steps 1 --ranks 3 --batch 2", 2,
     "--batch 2: expected a multiple of 3 ranks, such as 3"},
    {"integer", "@ --steps 0", 2, "--steps 0: expected a whole number from 1 to 100000000"},
    {"real", "@ --beta1 1", 2, "--beta1 1: expected a number from 0, less than 1"},
    {"alpha", "@ --lora 1 --alpha 1e39", 2,
     "--alpha 1e39: expected a number from 1e-30, less than 1e+30"},
    {"save_file", "@ --data %/t.bin --steps 1 --save %/t.bin", 2,
     "/t.bin: expected a directory, got a file"},
    {"save_parent", "@ --data %/t.bin --steps 1 --save %/none/run", 2,
     "/none/run: expected its parent "},
    {"nan", "@ --lr nan", 2, "--lr nan: expected a number from 0"},
    {"seed", "@ --seed -1", 2, "--seed -1: expected a whole number that is not negative"},
    {"sample", "@ --sample 1,,2", 2,
     "--sample 1,,2: expected at most 4096 token numbers with commas, as 504,3575,282"},
    {"dtype", "@ --export-dtype f8", 2, "--export-dtype f8: expected file, f32, bf16 or f16"},
    {"base", "@ --base file", 2, "--base file: expected f32, bf16, f16, q8_0 or q4_1"},
    {"base_alone", "@ --base q8_0 --sample 1", 2, "--base: expected --lora or --adapter, too"},
    {"alpha_alone", "@ --alpha 2 --sample 1", 2, "--alpha: expected --lora or --adapter, too"},
    {"targets_alone", "@ --targets q --sample 1", 2,
     "--targets: expected --lora or --adapter, too"},
    {"merge_alone", "@ --merge --export %/e", 2, "--merge: expected --lora or --adapter, too"},
    {"targets", "@ --targets q,k, --lora 1", 2,
     "--targets q,k,: expected some of q,k,v,o,gate,up,down"},
    {"rank", "@ --lora 33 --sample 1", 2,
     "self_attn.q_proj: expected a rank of at most 32 (its shape is [32, 32]), got 33"},
    {"rank_of_k", "@ --lora 17 --targets q,k --sample 1", 2,
     "self_attn.k_proj: expected a rank of at most 16 (its shape is [16, 32]), got 17"},
    {"rank_of_gate", "@ --lora 33 --targets gate --sample 1", 2,
     "mlp.gate_proj: expected a rank of at most 32 (its shape is [88, 32]), got 33"},
    {"no_blocks", "@/../../llama_untied_bias/model --lora 1 --base q8_0 --sample 1", 2,
     "q8_0: expected a matrix with columns in multiples of 32, got 40 in self_attn.q_proj, and "
     "none"},
    {"merge", "@ --lora 1 --merge --sample 1", 2, "--merge: expected --export, too"},
    {"merge_blocks", "@ --lora 1 --base q4_1 --merge --export %/e", 2,
     "--merge over --base q4_1: the adapter belongs to rounded matrices: export it alone"},
    {"adapter_dtype", "@ --lora 1 --export %/e --export-dtype bf16", 2,
     "--export-dtype: an adapter is written as f32: leave it out, or add --merge"},
    {"no_adapter", "@ --adapter docs --sample 1", 2,
     "docs/adapter_config.json: expected an adapter of PEFT, as --lora --export DIR writes it, got "
     "no such file"},
    {"no_weights", "mkdir %/w && set -- @ && cp $3/config.json %/w && $1 --model %/w --sample 1", 2,
     "/w: expected model.safetensors next to config.json, got no weights"},
    {"two_ranks", "@ --adapter docs --lora 4 --sample 1", 2,
     "--adapter: its adapter_config.json has rank, alpha and targets: leave out --lora"},
    {"two_alphas", "@ --adapter docs --alpha 4 --sample 1", 2,
     "--adapter: its adapter_config.json has rank, alpha and targets: leave out --lora"},
    {"adapter_file",
     "echo '{\"peft_type\": \"LORA\", \"r\": 1, \"lora_alpha\": 1, \"target_modules\": "
     "[\"q_proj\"]}' >%/adapter_config.json; @ --adapter % --sample 1",
     2, "/adapter_model.safetensors: there is no such file or directory"},
    {"resume", "@ --data %/t.bin --steps 1 --resume", 2, "--resume: expected --save, too"},
    {"eval_every", "@ --data %/t.bin --steps 1 --eval-every 1", 2,
     "--eval-every: expected --eval-data, too"},
    {"batch", "@ --data %/t.bin --steps 1 --ranks 3 --batch 8", 2,
     "--batch 8: expected a multiple of 3 ranks, such as 9"},
    {"few_rows", "@ --data %/t.bin --steps 1 --ranks 4 --batch 4 --micro 2", 2,
     "--batch 4: expected a multiple of 4 ranks * --micro 2"},
    {"context", "@ --data %/t.bin --context 1000", 2,
     "--context 1000: expected at most max_position_embeddings, 128"},
    {"tokens", "@ --data %/t.bin --context 128 --ranks 6 --batch 6", 2,
     "t.bin: expected at least a row of --context 128 for each of 6 ranks, got 700 tokens"},
    {"export", "@ --export %", 2, ": expected a new name, got one that exists"},
    {"json", "@ --data %/t.bin --json %/none/j", 2, "/none/j: No such file or directory"},
    {"launched", "tools/fsdprun -n 3 @ --data %/t.bin --steps 1 --batch 4", 2,
     "--batch 4: expected a multiple of 3 ranks, such as 6"},
    {"second_host",
     "tools/fsdprun -n 2 sh -c 'F=t.bin; test $RANK = 0 || F=none; export LOCAL_RANK=0; "
     "exec @ --data %/$F --steps 1 --batch 2'",
     2, "/none: No such file or directory"},
    {"launcher", "WORLD_SIZE=2 RANK=0 @ --ranks 3 --sample 1", 2,
     "--ranks 3 inside a launcher's job of WORLD_SIZE=2: leave it out"},
    {"no_mask", "@ --data %/t.bin --mask %/no.mask --steps 2 --context 20 --ranks 2", 1,
     "step 1: expected a counted label, got none: look at --mask"},
    {"token", "@ --sample 97", 1,
     "--sample: token 0 of the prompt: expected 0 to 96 (vocab_size - 1), got 97"}};

/* Runs two ranks, of which the second one has other words of the shell before and after the
   program. It ends after the first one, so that the launcher ends none of them. */
#define TWO(before, after)                                                                         \
    "tools/fsdprun -n 2 sh -c 'test $RANK = 0 || " before "; @ --data %/t.bin --steps 1 " after    \
    "; s=$?; if test $RANK = 0; then mkdir %/ended; else until test -e %/ended; do sleep 0.01; "   \
    "done; fi; exit $s'"

/* A rank that fails alone, or has other files or options than the first one: each says so. */
TEST(train_llama, one_rank_fails) {
    prepare();
    CHECK_EQ_INT(run(TWO("ulimit -v 1000000", "--context 100 --batch 8000000")), 1);
    CHECK(strstr(errors, "rank 0: another rank has failed\n"));
    CHECK(strstr(errors, "rank 1: no memory for the tokens of a step\n"));
    CHECK_EQ_INT(run("rmdir %/ended; " TWO("A=5", "--lora 4 --alpha ${A-3} --context 20")), 1);
    CHECK(strstr(errors, "rank 0: another rank has other files or options\n"));
    CHECK(strstr(
        errors,
        "rank 1: other than rank 0: adapters: expected rank 4, alpha 3, q,k,v,o,gate,up,down "
        "over the dtype of the files, got rank 4, alpha 5, "));
}

/* One line, and nothing else: exit status 2 before a rank starts, 1 on the way. */
TEST_P(train_llama, refusals, refusals, 0) {
    prepare();
    CHECK_EQ_INT(run(row->how), row->status);
    CHECK_MSG(strstr(errors, row->line) != NULL, "%s", row->line);
    if (row->status == 2) {
        CHECK(!strncmp(errors, "train_llama: ", 13));
        if (strncmp(row->how, "tools", 5)) CHECK_EQ_STR(strchr(errors, '\n'), "\n"); /* one line */
        CHECK_EQ_STR(output, "");
    }
}

/* A save that fails is told, and the training goes on to its last step, whose save must not fail. */
TEST(train_llama, failed_saves) {
    int failures = 0;
    prepare();
    CHECK_EQ_INT(run("mkdir %/run; cd %/run; touch step-00000002 step-00000004 step-00000006"), 0);
    CHECK_EQ_INT(run(TRAIN "--ranks 2 --save %/run --save-every 2"), 1);
    for (const char *at = errors; (at = strstr(at, "train_llama: --save: ")) != NULL; at++)
        failures++;
    CHECK_EQ_INT(failures, 3); /* after steps 2, 4 and 6 */
    CHECK(strstr(output, "step    6/6") != NULL);
}

/* Tensors that the model does not have are ignored, which one line tells, whatever the ranks. */
TEST(train_llama, ignored_tensors) {
    char command[1500];
    prepare();
    snprintf(command, sizeof command,
             "cp -r %s/llama/llama_untied_bias/model %%/m && chmod -R u+w %%/m && "
             "sed -i 's/\"mlp_bias\": true/\"mlp_bias\": false/' %%/m/config.json && "
             "examples/llama/train_llama --model %%/m --ranks 2 --sample 1 --new 1",
             golden_dir());
    CHECK_EQ_INT(run(command), 0);
    CHECK(strstr(errors, "model.layers.0.mlp.down_proj.bias: the model has no such parameter; it "
                         "and all others that the model does not have (6 tensors) are ignored\n"));
    CHECK(strchr(errors, '\n')[1] == 0);
}

/* Several ranks of a host print the line once, whatever starts them. */
TEST(train_llama, one_line_for_a_host) {
    prepare();
    CHECK_EQ_INT(run("OMPI_COMM_WORLD_LOCAL_RANK=1 @"), 2);
    CHECK_EQ_STR(errors, "");
    CHECK_EQ_INT(run("SLURM_LOCALID=3 @"), 2);
    CHECK_EQ_STR(errors, "");
    CHECK_EQ_INT(run("OMPI_COMM_WORLD_LOCAL_RANK=0 @"), 2);
    CHECK(strstr(errors, "nothing to do") != NULL);
}

/* Evaluations between steps come when they should, and change no step. */
TEST(train_llama, evaluates_while_it_trains) {
    curve alone, c;
    int evaluations = 0;
    prepare();
    CHECK_EQ_INT(run(TRAIN "--ranks 2 --json %/alone"), 0);
    CHECK_EQ_INT(run(TRAIN "--ranks 2 --eval-data %/t.bin --eval-every 4 --json %/j"), 0);
    for (const char *at = output; (at = strstr(at, "eval  ")) != NULL; at++) evaluations++;
    CHECK_EQ_INT(evaluations, 2); /* after steps 4 and 6 */
    CHECK(strstr(output, "eval  ") > strstr(output, "step    4/6"));
    CHECK_EQ_INT(run("grep -v eval_loss %/j >%/steps; grep -c eval_loss %/j"), 0);
    CHECK_EQ_STR(output, "2\n");
    read_curve("alone", &alone), read_curve("steps", &c);
    CHECK_EQ_INT(c.count, STEPS);
    for (int i = 0; i < STEPS; i++) CHECK(c.loss[i] == alone.loss[i] && c.norm[i] == alone.norm[i]);
}

/* The largest seed mixes rows, too: read in the order of the file, rows would end. */
TEST(train_llama, largest_seed) {
    prepare();
    CHECK_EQ_INT(run("@ --data %/t.bin --context 20 --batch 100 --steps 20 --seed "
                     "18446744073709551615"),
                 0);
}

TEST(train_llama, help) {
    prepare();
    CHECK_EQ_INT(run("@ --help"), 0);
    CHECK(!strncmp(output, "usage: train_llama --model DIR [options]\n", 41));
    CHECK_EQ_STR(errors, "");
}
