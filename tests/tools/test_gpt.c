/* test_gpt.c - the trainer as a program: examples/gpt/train_gpt, or the one named by GPT_BIN. Equal
   numbers on any number of ranks, clear refusals, and a quick end when a rank dies.

   SPDX-License-Identifier: MIT */
#define TAGS NO(ASAN) | SLOW
#include "harness.h"
#include "backends/netns.h"

#include <math.h>      // fabs
#include <sys/prctl.h> // prctl

enum { TEXT_NBYTES = 20000, OUTPUT_NBYTES = 1 << 16, ROWS_MAX = 64 };

static char out_text[OUTPUT_NBYTES], err_text[OUTPUT_NBYTES]; // the last run's

static const char *binary(void) {
    const char *path = getenv("GPT_BIN");
    if (!path || !path[0]) path = "examples/gpt/train_gpt";
    if (access(path, X_OK) != 0) SKIP("no examples/gpt/train_gpt: make examples builds it");
    unsetenv("RANK"); // the program must see only the launcher of the test
    unsetenv("WORLD_SIZE");
    return path;
}

static void read_file(const char *path, char *text) {
    FILE *file = fopen(path, "rb");
    CHECK_MSG(file != NULL, "%s", path);
    text[fread(text, 1, OUTPUT_NBYTES - 1, file)] = 0;
    fclose(file);
}

static const char *in_tmpdir(char *path, const char *name) {
    snprintf(path, 512, "%s/%s", h_tmpdir(), name);
    return path;
}

/* Writes a file of words in a random order, so that there is something to learn. */
static const char *write_text(char *path, size_t nbytes) {
    static const char *const words[] = {"shard ", "gather ", "reduce ", "scatter ", "the ", "a\n"};
    uint64_t state = 5;
    FILE *file = fopen(in_tmpdir(path, "text"), "wb");
    CHECK(file != NULL);
    for (size_t done = 0; done < nbytes;) {
        const char *word = words[h_rand64(&state) % (sizeof words / sizeof *words)];
        size_t length = strlen(word);
        if (length > nbytes - done) length = nbytes - done;
        CHECK_EQ_INT(fwrite(word, 1, length, file), length);
        done += length;
    }
    fclose(file);
    return path;
}

/* Starts a shell command that becomes the program; its output goes to the files out and err,
   whose names end with `tag`. */
static pid_t start_tagged(const char *prefix, const char *args, const char *tag) {
    char command[4096];
    snprintf(command, sizeof command, "exec %s %s %s >%s/out%s 2>%s/err%s </dev/null", prefix,
             binary(), args, h_tmpdir(), tag, h_tmpdir(), tag);
    printf("%s\n", command);
    fflush(NULL);
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        execl("/bin/sh", "sh", "-c", command, (char *)NULL);
        _exit(127);
    }
    return pid;
}

static pid_t start(const char *prefix, const char *args) { return start_tagged(prefix, args, ""); }

/* Waits for a started program. Returns its exit status, and its output in out_text and err_text. */
static int finish_tagged(pid_t pid, const char *tag) {
    char path[512], name[64];
    int status;
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    snprintf(name, sizeof name, "out%s", tag);
    read_file(in_tmpdir(path, name), out_text);
    snprintf(name, sizeof name, "err%s", tag);
    read_file(in_tmpdir(path, name), err_text);
    printf("%s%s", out_text, err_text);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

static int finish(pid_t pid) { return finish_tagged(pid, ""); }

static int run(const char *args) { return finish(start("", args)); }

/* ---- the same numbers ------------------------------------------------------------------------ */

typedef struct {
    int count;
    double loss[ROWS_MAX], norm[ROWS_MAX], seconds[ROWS_MAX];
} curve;

static void read_csv(const char *path, curve *c) {
    char line[256];
    FILE *file = fopen(path, "r");
    CHECK(file != NULL);
    CHECK(fgets(line, sizeof line, file) != NULL);
    CHECK_EQ_STR(line, "step,loss,grad_norm,seconds\n");
    for (c->count = 0; fgets(line, sizeof line, file); c->count++) {
        const int i = c->count;
        int step, end = 0;
        CHECK(i < ROWS_MAX);
        CHECK_EQ_INT(sscanf(line, "%d,%lf,%lf,%lf\n%n", &step, &c->loss[i], &c->norm[i],
                            &c->seconds[i], &end),
                     4);
        CHECK_EQ_INT(end, strlen(line));
        CHECK_EQ_INT(step, i + 1);
        const char *point = strchr(line, '.');
        CHECK_EQ_INT(strspn(point + 1, "0123456789"), 6); // decimals of the loss
    }
    fclose(file);
}

/* 50 steps of a small model whose rows are not divided evenly by 3 or 4 ranks. */
#define SMALL                                                                                      \
    "--data %s --csv %s --steps 50 --batch 12 --context 31 --layers 2 --heads 2 --channels 38 "    \
    "--sample 20 --lr 0.01 %s"

static void train(const char *prefix, const char *options, curve *c) {
    char text[512], csv[512], args[2048];
    write_text(text, TEXT_NBYTES);
    in_tmpdir(csv, "loss.csv");
    remove(csv);
    snprintf(args, sizeof args, SMALL, text, csv, options);
    CHECK_EQ_INT(finish(start(prefix, args)), 0);
    CHECK_EQ_STR(err_text, "");
    read_csv(csv, c);
    CHECK_EQ_INT(c->count, 50);
}

/* The same on one rank, which many tests compare with: the first one trains, and keeps the file next
   to the directories of the tests. */
static void train_alone(const char *options, curve *c) {
    char kept[600], csv[512], all[200];
    snprintf(kept, sizeof kept, "%s/../alone%s.csv", h_tmpdir(), options);
    if (access(kept, R_OK) == 0) {
        read_csv(kept, c);
        return;
    }
    snprintf(all, sizeof all, "--ranks 1%s", options);
    train("", all, c);
    CHECK_EQ_INT(rename(in_tmpdir(csv, "loss.csv"), kept), 0);
}

static void check_same(const curve *a, const curve *b) {
    double loss = 0.0, norm = 0.0;
    for (int i = 0; i < a->count; i++) {
        const double dl = fabs(a->loss[i] - b->loss[i]);
        const double dn = fabs(a->norm[i] - b->norm[i]) / a->norm[i];
        if (dl > loss) loss = dl;
        if (dn > norm) norm = dn;
    }
    h_message("largest difference: loss %.2g, gradient norm %.2g relative", loss, norm);
    CHECK(loss <= 1e-4);
    CHECK(norm <= 1e-3);
}

static const struct {
    const char *name, *options;
} worlds[] = {{"launched_alone", ""},
              {"ranks=2", "--ranks 2"},
              {"ranks=3", "--ranks 3"},
              {"ranks=4", "--ranks 4"},
              {"threads=1", "--ranks 1 --threads"},
              {"threads=3", "--ranks 3 --threads"},
              {"threads=4,no_reshard", "--ranks 4 --threads --reshard 0"},
              {"ranks=3,no_reshard", "--ranks 3 --reshard 0"},
              {"ranks=2,tp=2", "--ranks 2 --tp 2"}, // 2 heads: a third and fourth rank have none
              {"ranks=3,tp=3", "--ranks 3 --tp 3"},
              {"ranks=4,tp=2", "--ranks 4 --tp 2"},
              {"ranks=4,tp=4", "--ranks 4 --tp 4"},
              {"threads=4,tp=2,no_reshard", "--ranks 4 --tp 2 --threads --reshard 0"}};

TEST_P(gpt, parity, worlds) {
    curve one, many;
    train_alone("", &one);
    train("", row->options, &many);
    check_same(&one, &many);
}

/* Lines of different length: the ranks count different numbers of targets. */
static const struct {
    const char *name, *options;
} line_worlds[] = {{"ranks=2", "--ranks 2"},
                   {"ranks=3,plan", "--ranks 3 --plan"},
                   {"ranks=4,ema", "--ranks 4 --ema 0.9"},
                   {"ranks=4,tp=2", "--ranks 4 --tp 2"}};

TEST_P(gpt, parity_of_lines, line_worlds) {
    curve all, one, many;
    char options[200];
    train_alone("", &all);
    train_alone(" --lines", &one);
    snprintf(options, sizeof options, "%s --lines", row->options);
    train("", options, &many);
    check_same(&one, &many);
    CHECK(fabs(all.loss[49] - one.loss[49]) > 1e-3); /* other targets */
}

/* Muon needs whole matrices, also if checkpoints give them other dims. */
static const struct {
    const char *name, *options;
    int saves;
} muons[] = {{"ranks=2", "--ranks 2", 0},
             {"ranks=3,saved", "--ranks 3", 1},
             {"ranks=4,plan", "--ranks 4 --plan", 0}};

TEST_P(gpt, parity_of_muon, muons) {
    curve adamw, one, many;
    char options[700];
    snprintf(options, sizeof options, "%s --optimizer muon%s%s", row->options,
             row->saves ? " --save " : "", row->saves ? h_tmpdir() : "");
    train_alone("", &adamw);
    train_alone(" --optimizer muon", &one);
    train("", options, &many);
    check_same(&one, &many);
    CHECK(fabs(adamw.loss[49] - one.loss[49]) > 1e-3); /* another optimizer */
}

TEST(gpt, parity_under_launcher) {
    curve one, many;
    if (access("tools/fsdprun", X_OK) != 0) SKIP("no tools/fsdprun");
    train("", "", &one);
    train("tools/fsdprun -n 3", "", &many);
    check_same(&one, &many);
}

/* Starts two processes that only the environment makes ranks of one job. */
static void start_pair(const char *args0, const char *args1, pid_t *pids) {
    const int port = h_free_port();
    CHECK(port > 0);
    for (int r = 0; r < 2; r++) {
        char prefix[256];
        snprintf(prefix, sizeof prefix,
                 "env RANK=%d WORLD_SIZE=2 LOCAL_RANK=%d MASTER_ADDR=127.0.0.1 MASTER_PORT=%d", r,
                 r, port);
        pids[r] = start_tagged(prefix, r ? args1 : args0, r ? "1" : "0");
    }
}

TEST(gpt, parity_by_environment) {
    char text[512], csv[512], args[2048];
    curve one, two;
    pid_t pids[2];
    train_alone("", &one);
    snprintf(args, sizeof args, SMALL, write_text(text, TEXT_NBYTES), in_tmpdir(csv, "loss.csv"),
             "");
    remove(csv);
    start_pair(args, args, pids);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ_INT(finish_tagged(pids[r], r ? "1" : "0"), 0);
        CHECK_EQ_STR(err_text, "");
        if (r == 1) CHECK_EQ_STR(out_text, ""); // only rank 0 prints
    }
    read_csv(csv, &two);
    check_same(&one, &two);
}

static int64_t number(const char **at) {
    int64_t value = 0;
    while (**at == ' ') ++*at;
    CHECK(**at >= '0' && **at <= '9');
    for (; (**at >= '0' && **at <= '9') || **at == ','; ++*at) {
        if (**at != ',') value = value * 10 + (**at - '0');
    }
    return value;
}

static const char *after(const char *label) {
    const char *at = strstr(out_text, label);
    CHECK_MSG(at != NULL, "no line '%s'", label);
    return at + strlen(label);
}

/* Checks losses and norms for equality. Norms have all digits: they depend on every bit of every
   gradient. */
static void check_bits(const curve *a, const curve *b) {
    for (int i = 0; i < a->count; i++) { // <= and >=: equal, for compilers that warn of ==
        CHECK(a->loss[i] <= b->loss[i] && a->loss[i] >= b->loss[i]);
        CHECK_MSG(a->norm[i] <= b->norm[i] && a->norm[i] >= b->norm[i], "step %d: %.17g, %.17g",
                  i + 1, a->norm[i], b->norm[i]);
    }
}

/* Blocks that tensor parallelism shards evenly have plans; for uneven ones the output has the
   reason. */
TEST(gpt, plan_of_tensor_parallelism) {
    curve calls, planned;
    int gathers[2];
    train("", "--ranks 4 --tp 2", &calls);
    train("", "--ranks 4 --tp 2 --plan", &planned);
    check_bits(&calls, &planned);
    CHECK_EQ_INT(sscanf(after("\nplan: gathers "), "%d -> %d", &gathers[0], &gathers[1]), 2);
    CHECK_EQ_INT(gathers[0], 6); /* two blocks twice, the vocabulary, the replicated parameters */
    CHECK(gathers[1] < gathers[0]);
    after("\nplan: 48 of 50 steps were replayed\n");
    char text[512], csv[512], args[2048];
    snprintf(args, sizeof args, SMALL, write_text(text, TEXT_NBYTES), in_tmpdir(csv, "loss.csv"),
             "--ranks 3 --tp 3 --plan");
    CHECK_EQ_INT(run(args), 0);
    after("\nplan: there is none: ranks have parameters of other sizes");
}

static const struct {
    const char *name, *options;
    int ranks, reshard;
} plans[] = {{"ranks=1", "--ranks 1", 1, 1},
             {"ranks=2", "--ranks 2", 2, 1},
             {"threads=3", "--ranks 3 --threads", 3, 1},
             {"ranks=4,no_reshard", "--ranks 4 --reshard 0", 4, 0}};

TEST_P(gpt, plan_same_bits, plans) {
    static char text[OUTPUT_NBYTES];
    curve calls, planned;
    char options[700], path[512], end[64];
    int gathers[2], reductions[2];
    int64_t bytes[2];
    train("", row->options, &calls);
    const char *at = after("  all_gather ");
    bytes[0] = number(&at);
    snprintf(options, sizeof options, "%s --plan-out %s", row->options, in_tmpdir(path, "plan"));
    train("", options, &planned);
    at = after("  all_gather ");
    bytes[1] = number(&at);
    check_bits(&calls, &planned);
    at = after("\nplan: gathers ");
    CHECK_EQ_INT(sscanf(at, "%d -> %d, reductions %d -> %d, slots", &gathers[0], &gathers[1],
                        &reductions[0], &reductions[1]),
                 4);
    // Two blocks, and the unit around them. The model is so small that all of it stays gathered;
    // parameters that stay gathered in the eager step, too, are gathered as before. Reductions are
    // bucketed in any case.
    CHECK_EQ_INT(gathers[0], row->ranks == 1 ? 0 : row->reshard ? 5 : 3);
    CHECK_EQ_INT(reductions[0], row->ranks == 1 ? 0 : 3);
    CHECK(gathers[1] <= gathers[0] && bytes[1] <= bytes[0]);
    CHECK((gathers[1] < gathers[0]) == (row->ranks > 1 && row->reshard));
    CHECK((bytes[1] < bytes[0]) == (row->ranks > 1 && row->reshard));
    CHECK_EQ_INT(reductions[1], row->ranks > 1);
    after("\nplan: 48 of 50 steps were replayed\n");
    read_file(path, text);
    CHECK(strncmp(text, "fsdp plan 1\n", 12) == 0);
    snprintf(end, sizeof end, "count gathers %d %d", gathers[0], gathers[1]);
    CHECK(strstr(text, end) && strstr(text, "\nend "));
}

/* Errors that only show when the ranks have met: one line in all, and both exit with 2. */
static const struct {
    const char *name, *options[2], *words;
} meetings[] = {
    {"batch_of_world", {"--batch 7", "--batch 7"}, "--batch 7"},
    {"other_seed", {"--seed 1", "--seed 2"}, "different options"},
    {"other_length", {"--steps 10", "--steps 11"}, "different options"},
};

TEST_P(gpt, refuses_after_meeting, meetings) {
    char text[512], args[2][1024];
    pid_t pids[2];
    write_text(text, TEXT_NBYTES);
    for (int r = 0; r < 2; r++) {
        snprintf(args[r], sizeof args[r], "--data %s %s", text, row->options[r]);
    }
    start_pair(args[0], args[1], pids);
    for (int r = 0; r < 2; r++) {
        CHECK_EQ_INT(finish_tagged(pids[r], r ? "1" : "0"), 2);
        CHECK_EQ_STR(out_text, "");
        CHECK((strstr(err_text, row->words) != NULL) == (r == 0));
    }
}

/* Returns the height of a column of the drawing, in eighths of a row; its rows follow a line
   character. */
static int drawn_height(int column, int rows) {
    const char *at = after("loss, nats per byte; a column is the mean of 1 steps\n");
    int height = 0;
    for (int row = 0; row < rows; row++, at = strchr(at, '\n') + 1) {
        const char *cell = strstr(at, "\xe2\x94"); /* a line, then blanks, and blocks of 3 bytes */
        CHECK(cell != NULL && cell < strchr(at, '\n'));
        cell += 3;
        for (int c = 0; c < column; c++) cell += *cell == ' ' ? 1 : 3;
        if (*cell == ' ') continue;
        CHECK_EQ_MEM(cell, "\xe2\x96", 2);
        CHECK(height == 0 || (unsigned char)cell[2] == 0x88); /* below another one: a full block */
        height += (unsigned char)cell[2] - 0x80;
    }
    return height;
}

static void extremes(const curve *c, double *lo, double *hi) {
    *lo = *hi = c->loss[0];
    for (int i = 1; i < c->count; i++) {
        if (c->loss[i] < *lo) *lo = c->loss[i];
        if (c->loss[i] > *hi) *hi = c->loss[i];
    }
}

/* Checks the drawing, in which a column is a step: the lowest has an eighth of a row, the
   highest ten rows. */
static void check_drawing(const curve *c) {
    double lo, hi;
    char label[16];
    extremes(c, &lo, &hi);
    for (int i = 0; i < c->count; i++)
        CHECK_NEAR(drawn_height(i, 10), 1 + 79 * (c->loss[i] - lo) / (hi - lo), 0.51);
    snprintf(label, sizeof label, "\n%6.2f \xe2\x94\xa4", hi);
    after(label);
    snprintf(label, sizeof label, "\n%6.2f \xe2\x94\xa4", lo);
    after(label);
}

/* Returns the mean of the losses around i: ten at each side, fewer near the ends. */
static double centred_mean(const curve *c, int i) {
    int side = i < c->count - 1 - i ? i : c->count - 1 - i;
    double sum = 0.0;
    if (side > 10) side = 10;
    for (int k = i - side; k <= i + side; k++) sum += c->loss[k];
    return sum / (2 * side + 1);
}

/* Checks two lines with a point for each step, from left to right, on one scale: the losses, and
   means around them. */
static void check_svg(const curve *c, const char *path) {
    static char svg[OUTPUT_NBYTES];
    double x, y, lo, hi;
    read_file(path, svg);
    CHECK(!strncmp(svg, "<svg xmlns='http://www.w3.org/2000/svg'", 39));
    CHECK_EQ_STR(svg + strlen(svg) - 7, "</svg>\n");
    const char *at = strstr(svg, "<polyline");
    CHECK(at && strstr(at + 1, "<polyline") && !strstr(strstr(at + 1, "<polyline") + 1, "<poly"));
    extremes(c, &lo, &hi);
    for (int line = 0, end = 0; line < 2; line++) {
        at = strstr(at, "points='") + 8;
        for (int i = 0; i < c->count; i++, at += end) {
            const double loss = line ? centred_mean(c, i) : c->loss[i];
            CHECK_EQ_INT(sscanf(at, "%lf,%lf\n%n", &x, &y, &end), 2);
            CHECK_NEAR(x, 60 + 820.0 * i / (c->count - 1), 0.06);
            CHECK_NEAR(y, 490 - 440 * (loss - lo) / (hi - lo), 0.02);
        }
        CHECK_EQ_INT(*at, '\'');
    }
    CHECK(strstr(svg, ">1</text>") && strstr(svg, ">50</text>")); // the first step, and the last
    CHECK(strstr(svg, "prefers-color-scheme: dark") && strstr(svg, "viewBox='0 0 900 540'"));
}

TEST(gpt, csv_and_learning) {
    curve c;
    char svg[512];
    remove(in_tmpdir(svg, "loss.svg"));
    train("", "--ranks 2 --seed 7", &c);
    CHECK_NEAR(c.loss[0], log(256.0), 0.3);
    CHECK(c.loss[49] < 3.2);
    CHECK(c.seconds[0] > 0.0);
    for (int i = 1; i < c.count; i++) CHECK(c.seconds[i] >= c.seconds[i - 1]);
    CHECK(strstr(out_text, svg) != NULL);
    check_drawing(&c);
    check_svg(&c, svg);
}

/* A picture that cannot be written is no failure of the training. */
TEST(gpt, no_place_for_the_picture) {
    char text[512], csv[512], args[2048];
    CHECK_EQ_INT(mkdir(in_tmpdir(csv, "loss.svg"), 0700), 0);
    snprintf(args, sizeof args, SMALL, write_text(text, TEXT_NBYTES), in_tmpdir(csv, "loss.csv"),
             "--ranks 1 --steps 1");
    CHECK_EQ_INT(run(args), 0);
    after("no picture of the losses: ");
    after("loss.svg: Is a directory\n");
    after("loss, nats per byte; a column is the mean of 1 steps\n");
}

/* Without descriptors 0 to 2 it trains as with them: no file of the library has these numbers,
   and output is lost. */
TEST(gpt, closed_descriptors) {
    curve with, without;
    train("", "--ranks 2", &with);
    train("sh -c 'exec \"$0\" \"$@\" <&- >&- 2>&-'", "--ranks 2", &without);
    CHECK_EQ_STR(out_text, "");
    for (int i = 0; i < with.count; i++) {
        CHECK(with.loss[i] == without.loss[i]);
        CHECK(with.norm[i] == without.norm[i]);
    }
}

/* Returns both losses at the end, and checks that the training is the same as without averages. */
static void ema_losses(const char *options, double *loss, curve *c) {
    train("", options, c);
    const char *line = strstr(out_text, "\nema    decay 0.8: loss ");
    CHECK_MSG(line != NULL, "no losses");
    CHECK_EQ_INT(sscanf(line,
                        "\nema decay 0.8: loss %lf of the weights, %lf of their average, over 8",
                        &loss[0], &loss[1]),
                 2);
}
TEST(gpt, ema) {
    static const char *const others[] = {"--ranks 3 --ema 0.8", "--ranks 2 --tp 2 --ema 0.8"};
    double want[2], got[2];
    curve plain, c;
    train("", "--ranks 1", &plain);
    CHECK(strstr(out_text, "ema ") == NULL);
    ema_losses("--ranks 1 --ema 0.8", want, &c);
    check_bits(&plain, &c);
    CHECK(fabs(want[0] - want[1]) > 1e-3 && want[1] < plain.loss[0] - 0.1);
    for (int i = 0; i < 2; i++) {
        ema_losses(others[i], got, &c);
        CHECK_NEAR(got[0], want[0], 1e-4);
        CHECK_NEAR(got[1], want[1], 1e-4);
    }
}

/* Runs differ by seed and repeat by seed, including the text generated at the end. */
TEST(gpt, seed) {
    curve a, b, c;
    char first[OUTPUT_NBYTES];
    const char *sample;
    train("", "--ranks 2 --seed 3", &a);
    sample = strstr(out_text, "\nsample: ");
    CHECK(sample != NULL);
    memcpy(first, sample, (size_t)(strstr(sample, "\nmemory") - sample));
    first[strstr(sample, "\nmemory") - sample] = 0;
    train("", "--ranks 4 --seed 3", &b);
    CHECK(strstr(out_text, first) != NULL);
    check_same(&a, &b);
    train("", "--ranks 2 --seed 4", &c);
    CHECK(fabs(a.loss[0] - c.loss[0]) > 1e-4);
}

/* Checks the two tables: memory as predicted, bytes as in the formula, a rank's share of the
   model. */
static const struct {
    const char *name, *options;
    int ranks;
} tables[] = {{"ranks=1", "--ranks 1", 1},
              {"ranks=3", "--ranks 3", 3},
              {"ranks=4,no_reshard", "--ranks 4 --reshard 0", 4}};

static void check_tables(int ranks, int reshard) {
    static const char *const rows[] = {"  shards ", "  shard gradients ", "  total "};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const char *at = after(rows[i]);
        const int64_t predicted = number(&at), measured = number(&at), whole = number(&at);
        // With reshard 0 the prediction takes blocks for units that stay open around others.
        if (!reshard) CHECK(predicted >= measured);
        else CHECK_EQ_INT(predicted, measured);
        if (i < 2) CHECK(measured >= whole / ranks && measured <= whole / ranks * 11 / 10);
    }
    const char *at = after("  all_gather ");
    int64_t measured = number(&at);
    CHECK_EQ_INT(measured, number(&at));
    CHECK((measured == 0) == (ranks == 1));
    at = after("  reduce_scatter ");
    measured = number(&at);
    CHECK_EQ_INT(measured, number(&at));
    CHECK((measured == 0) == (ranks == 1));
}

TEST_P(gpt, tables, tables) {
    curve c;
    train("", row->options, &c);
    check_tables(row->ranks, !strstr(row->options, "--reshard 0"));
}

/* ---- refusals -------------------------------------------------------------------------------- */

static const struct {
    const char *name, *args, *words; // words: in the message
} refusals[] = {
    {"batch_of_ranks", "--ranks 4 --batch 6", "--batch 6"},
    {"ranks_of_tp", "--ranks 3 --tp 2", "--ranks 3 is not a multiple of --tp 2"},
    {"batch_of_dp", "--ranks 4 --tp 2 --batch 7", "--batch 7"},
    {"heads_of_channels", "--heads 3 --channels 64", "--heads 3"},
    {"missing_file", "--data /nowhere/file", "/nowhere/file"},
    {"missing_file_with_ranks", "--ranks 2 --data /nowhere/file", "/nowhere/file"},
    {"directory", "--data /", "--data /"},
    {"empty_file", "--data /dev/null", "empty"},
    {"short_file", "--data SHORT --context 32", "at least 33"},
    {"no_number", "--steps ten", "--steps ten"},
    {"half_a_number", "--layers 2x", "--layers 2x"},
    {"empty_number", "--heads ''", "--heads"},
    {"zero_steps", "--steps 0", "--steps 0"},
    {"zero_ranks", "--ranks 0", "--ranks 0"},
    {"negative_batch", "--batch -4", "--batch -4"},
    {"huge_number", "--context 99999999999999999999", "--context"},
    {"too_many_tokens", "--batch 1048576 --context 65536", "tokens"},
    {"negative_seed", "--seed -1", "--seed -1"},
    {"lr_zero", "--lr 0", "--lr 0"},
    {"lr_nan", "--lr nan", "--lr nan"},
    {"reshard_two", "--reshard 2", "--reshard 2"},
    {"ema_zero", "--ema 0", "--ema 0"},
    {"ema_two", "--ema 2", "--ema 2: expected a number above 0, at most 1"},
    {"sample_negative", "--sample -1", "--sample -1"},
    {"threads_alone", "--threads", "--ranks"},
    {"unknown_option", "--shards 4", "--shards"},
    {"unknown_letter", "-x", "-x"},
    {"value_missing", "--steps", "--steps"},
    {"value_unwanted", "--threads=4", "--threads=4"},
    {"no_option", "--ranks 2 text.txt", "text.txt"},
    {"csv_unwritable", "--csv /nowhere/x.csv", "/nowhere/x.csv"},
    {"resume_of_nothing", "--resume", "--resume needs --save"},
    {"save_every_nowhere", "--save-every 5", "--save-every needs --save"},
    {"async_nowhere", "--async", "--async needs --save"},
    {"save_nowhere", "--save ''", "--save"},
    {"keep_negative", "--save run --keep -1", "--keep -1"},
    {"plan_unwritable", "--plan-out /nowhere/x", "/nowhere/x"},
};

TEST_P(gpt, refuses, refusals) {
    char text[512], args[2048];
    const char *place = strstr(row->args, "SHORT");
    write_text(text, 32);
    if (place) {
        snprintf(args, sizeof args, "%.*s%s%s", (int)(place - row->args), row->args, text,
                 place + 5);
    } else {
        snprintf(args, sizeof args, "%s", row->args);
    }
    CHECK_EQ_INT(run(args), 2);
    CHECK_EQ_STR(out_text, "");
    CHECK(strncmp(err_text, "train_gpt: ", 11) == 0);
    CHECK_EQ_INT(strchr(err_text, '\n') - err_text, (int)strlen(err_text) - 1); // one line
    CHECK_MSG(strstr(err_text, row->words) != NULL, "expected '%s' in: %s", row->words, err_text);
}

TEST(gpt, refuses_ranks_in_a_launchers_job) {
    binary();
    setenv("WORLD_SIZE", "4", 1);
    setenv("RANK", "0", 1);
    const pid_t pid = fork(); // binary() would clear them again
    CHECK(pid >= 0);
    if (pid == 0) {
        const char *path = getenv("GPT_BIN");
        if (!path || !path[0]) path = "examples/gpt/train_gpt";
        execl(path, path, "--ranks", "2", (char *)NULL);
        _exit(127);
    }
    int status;
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 2);
}

TEST(gpt, help) {
    CHECK_EQ_INT(run("--help"), 0);
    CHECK_EQ_STR(err_text, "");
    static const char *const options[] = {
        "--data",  "--ranks",    "--threads", "--steps",      "--batch", "--context", "--layers",
        "--heads", "--channels", "--lr",      "--seed",       "--csv",   "--sample",  "--reshard",
        "--plan ", "--plan-out", "--save ",   "--save-every", "--keep",  "--async",   "--resume"};
    for (size_t i = 0; i < sizeof options / sizeof *options; i++) {
        CHECK_MSG(strstr(out_text, options[i]) != NULL, "%s is not explained", options[i]);
    }
}

/* ---- death of a rank ------------------------------------------------------------------------- */

/* Sets the process ids of the children, in the order of their start. Returns their number. */
static int children(pid_t parent, pid_t *pids, int max) {
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%d/task/%d/children", (int)parent, (int)parent);
    FILE *file = fopen(path, "r");
    if (!file && kill(parent, 0)) return 0; // it has ended
    if (!file) SKIP("no /proc/PID/task/PID/children");
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    int count = 0;
    for (char *at = text, *end; count < max; at = end, count++) {
        pids[count] = (pid_t)strtol(at, &end, 10);
        if (end == at) break;
    }
    return count;
}

static const struct {
    const char *name;
    int victim;
} victims[] = {{"rank=0", 0}, {"rank=2", 2}};

TEST_P(gpt, killed_rank, victims) {
    char text[512], args[1024], path[512], name[32];
    pid_t ranks[8];
    write_text(text, TEXT_NBYTES);
    snprintf(args, sizeof args,
             "--data %s --ranks 3 --steps 1000000 --batch 3 --context 16 --layers 2 --heads 2 "
             "--channels 16",
             text);
    const pid_t pid = start("", args);
    out_text[0] = 0;
    do { // until it trains; the shell makes the file
        usleep(20000);
        if (access(in_tmpdir(path, "out"), R_OK) == 0) read_file(path, out_text);
    } while (!strstr(out_text, "step"));
    CHECK_EQ_INT(children(pid, ranks, 8), 3);
    const int64_t killed_at = h_calm_ms();
    CHECK_EQ_INT(kill(ranks[row->victim], SIGKILL), 0);
    const int status = finish(pid);
    const int64_t took = h_calm_ms() - killed_at;
    h_message("ended %d ms after the kill", (int)took);
    CHECK_EQ_INT(status, 1);
    CHECK(took < 2000);
    snprintf(name, sizeof name, "rank %d", row->victim);
    CHECK_MSG(strstr(err_text, name) != NULL, "expected '%s' in: %s", name, err_text);
    for (int r = 0; r < 3; r++) CHECK(kill(ranks[r], 0) != 0); // no rank is left
}

/* ---- --trace --------------------------------------------------------------------------------- */

typedef struct trace_row {
    const char *name, *prefix, *options;
} trace_row;
static const trace_row traces[] = {{"inline", "", "--ranks 2"},
                                   {"lanes", "env FSDP_COMM_THREADS=2", "--ranks 2"},
                                   {"plan", "", "--ranks 2 --plan"},
                                   {"short", "", "--ranks 1 --steps 5"}};

/* Returns the number after a text of the output. */
static double behind(const char *text) {
    const char *at = strstr(out_text, text);
    CHECK_MSG(at != NULL, "expected '%s' in: %s", text, out_text);
    return at ? strtod(at + strlen(text), NULL) : 0;
}

/* A training ends with the summary of its time. */
TEST_P(gpt, trace, traces) {
    char text[512], args[2048], dir[512];
    snprintf(
        args, sizeof args,
        "--data %s --steps 8 --batch 4 --context 32 --layers 2 --heads 2 --channels 32 --trace %s "
        "%s",
        write_text(text, TEXT_NBYTES), in_tmpdir(dir, "trace"), row->options);
    CHECK_EQ_INT(finish(start(row->prefix, args)), 0);
    CHECK_EQ_STR(err_text, "");
    const double step = behind("\n\nstep "), compute = behind("\n  compute "),
                 exposed = behind("\n  exposed "), host = behind("\n  host ");
    CHECK(compute > 0 && host > 0 && exposed >= 0);
    CHECK_NEAR(compute + exposed + host, step, 0.02); /* within the printed digits */
    after("\nmemory");
    const int is_inline = strcmp(row->name, "lanes") != 0;
    CHECK_EQ_INT(strstr(out_text, "inline: nothing is hidden") != NULL, is_inline);
}

/* ---- checkpoints ----------------------------------------------------------------------------- */

/* Sets the arguments of a training of 50 steps that saves after every 20 steps and at its end,
   into the directory `dir` of the test; `options` may override them. Its csv is `dir`.csv, which
   a resumed run continues. */
static void saved_args(char *args, size_t size, const char *dir, const char *options) {
    char text[512], csv[512], run_dir[512], name[64], more[1024];
    snprintf(name, sizeof name, "%s.csv", dir);
    snprintf(more, sizeof more, "--save %s --save-every 20 %s", in_tmpdir(run_dir, dir), options);
    snprintf(args, size, SMALL, write_text(text, TEXT_NBYTES), in_tmpdir(csv, name), more);
}

static void saved(const char *dir, const char *options, curve *c) {
    char args[3072], csv[512], name[64];
    saved_args(args, sizeof args, dir, options);
    CHECK_EQ_INT(run(args), 0);
    CHECK_EQ_STR(err_text, "");
    snprintf(name, sizeof name, "%s.csv", dir);
    read_csv(in_tmpdir(csv, name), c);
}

static void shell(const char *in_tmpdir_do) {
    char command[1024];
    snprintf(command, sizeof command, "cd %s && %s", h_tmpdir(), in_tmpdir_do);
    CHECK_EQ_INT(system(command), 0);
}

/* Manifests have the checksums of all bytes: parameters, states, and the progress of the
   training. */
static void check_same_checkpoint(const char *a, const char *b) {
    static char text[2][OUTPUT_NBYTES];
    char path[512];
    read_file(in_tmpdir(path, a), text[0]);
    read_file(in_tmpdir(path, b), text[1]);
    CHECK(strstr(text[0], "\"step\":50,") != NULL);
    CHECK_EQ_STR(text[0], text[1]);
}

typedef struct same_row {
    const char *name, *options, *async;
    int ranks; // for tables of memory and traffic; 0: no tables
} same_row;
static const same_row same[] = {
    {"ranks=3", "--ranks 3", "", 3},
    {"ranks=3,tp=3", "--ranks 3 --tp 3", "", 0}, // 2 heads: one rank has none
    {"ranks=4,tp=2,async", "--ranks 4 --tp 2", "--async", 0},
    {"ranks=2,plan", "--ranks 2 --plan", "", 0},
    {"ranks=2,ema", "--ranks 2 --ema 0.9", "", 0}};
static const same_row more_same[] = {{"ranks=1", "--ranks 1", "", 1},
                                     {"threads=4", "--ranks 4 --threads", "", 4},
                                     {"ranks=4,tp=2", "--ranks 4 --tp 2", "", 0},
                                     {"ranks=2,async", "--ranks 2", "--async", 2}};

/* 30 steps and 20 more in a new process equal 50: every bit of every gradient, and of the last
   checkpoint. The warm-up does not depend on --steps. */
static void resumes(const same_row *row) {
    curve whole, part, plain;
    char options[256];
    train("", row->options, &plain);
    snprintf(options, sizeof options, "%s %s", row->options, row->async);
    saved("whole", options, &whole);
    CHECK_EQ_INT(whole.count, 50);
    if (row->ranks) check_tables(row->ranks, 1);
    check_same(&plain, &whole); // q, k and v have other shapes: a norm's sum has another order
    after("/whole/step-00000020: ");
    after("/whole/step-00000040: ");
    after("/whole/step-00000050: ");
    shell("test ! -e whole/step-00000020"); // two stay
    snprintf(options, sizeof options, "%s %s --steps 30", row->options, row->async);
    saved("part", options, &part);
    CHECK_EQ_INT(part.count, 30);
    snprintf(options, sizeof options, "%s %s --resume", row->options, row->async);
    saved("part", options, &part);
    after("/part/step-00000030: ");
    CHECK(strstr(out_text, "resume ") != NULL && strstr(out_text, "checksums are right") != NULL);
    CHECK_EQ_INT(part.count, 50);
    if (row->ranks) check_tables(row->ranks, 1);
    check_bits(&whole, &part);
    check_same_checkpoint("whole/step-00000050/manifest.json", "part/step-00000050/manifest.json");
}
TEST_P(resume, same_ranks, same) { resumes(row); }
TEST_P(long_gpt, same_ranks, more_same, NIGHT) { resumes(row); }

/* All (dp, tp) of 1 to 4 ranks */
static const char *const meshes[] = {"--ranks 1",        "--ranks 2",        "--ranks 2 --tp 2",
                                     "--ranks 3",        "--ranks 3 --tp 3", "--ranks 4",
                                     "--ranks 4 --tp 2", "--ranks 4 --tp 4"};
enum { MESHES = sizeof meshes / sizeof *meshes };

/* Resumes the checkpoint after 30 steps in the directory "from" as `to`. */
static void check_resumes(const curve *whole, const char *to) {
    curve both;
    char options[256];
    shell("rm -rf to to.csv && cp -r from to && cp from.csv to.csv");
    snprintf(options, sizeof options, "%s --resume", to);
    saved("to", options, &both);
    after("/to/step-00000030: ");
    CHECK_EQ_INT(both.count, 50);
    check_same(whole, &both);
}

static void save_30(const char *mesh, curve *c) {
    char options[256];
    shell("rm -rf from from.csv");
    snprintf(options, sizeof options, "%s --steps 30", mesh);
    saved("from", options, c);
    CHECK_EQ_INT(c->count, 30);
}

static const struct {
    const char *name, *from, *to;
} pairs[] = {{"3_to_2", "--ranks 3", "--ranks 2"},
             {"1_to_4", "--ranks 1", "--ranks 4 --threads"},
             {"2_to_4,tp=2", "--ranks 2", "--ranks 4 --tp 2"},
             {"4,tp=2_to_3", "--ranks 4 --tp 2 --async", "--ranks 3"},
             {"4,tp=4_to_3,tp=3", "--ranks 4 --tp 4", "--ranks 3 --tp 3"}};

TEST_P(resume, other_ranks, pairs) {
    curve whole, part;
    train_alone("", &whole);
    save_30(row->from, &part);
    check_resumes(&whole, row->to);
}

TEST(long_gpt, resume_pairs, SECONDS(1800) | NIGHT) {
    curve whole, part;
    train_alone("", &whole);
    for (int from = 0; from < MESHES; from++) {
        save_30(meshes[from], &part);
        for (int to = 0; to < MESHES; to++) check_resumes(&whole, meshes[to]);
    }
}

/* Checkpoints that do not fit the job, and none at all. */
TEST(resume, of_others) {
    curve c;
    char args[3072];
    saved("run", "--ranks 2 --steps 10 --resume", &c);
    after("resume nothing: there is no complete checkpoint in ");
    CHECK_EQ_INT(c.count, 10);
    static const struct {
        const char *options, *words;
    } others[] = {{"--ranks 2 --steps 20 --resume --seed 2", "another --seed"},
                  {"--ranks 3 --steps 20 --resume --lr 0.02", "another --lr"},
                  {"--ranks 2 --steps 20 --resume --batch 6", "another --batch"},
                  {"--ranks 2 --steps 9 --resume", "another --steps: it has done more steps"},
                  {"--ranks 2 --steps 20 --resume --layers 3", "lacks 12 of"},
                  {"--ranks 2 --steps 20 --resume --channels 40", "[256, 38]"}};
    for (size_t i = 0; i < sizeof others / sizeof *others; i++) {
        saved_args(args, sizeof args, "run", others[i].options);
        CHECK_EQ_INT(run(args), 1);
        CHECK_MSG(strstr(err_text, others[i].words) != NULL, "no '%s'", others[i].words);
        CHECK(strstr(out_text, "step ") == NULL);
    }
    saved("run", "--ranks 2 --steps 10 --resume", &c); // no step is left; nothing is missing
    CHECK_EQ_INT(c.count, 10);
}

/* Launchers that restart ranks set a count in a variable: then --save resumes, too. */
static const struct {
    const char *name, *value;
    int resumes;
} counts[] = {{"FSDP_RESTART_COUNT", "1", 1},         {"FSDP_RESTART_COUNT", "0", 0},
              {"TORCHELASTIC_RESTART_COUNT", "2", 1}, {"TORCHELASTIC_RESTART_COUNT", "0", 0},
              {"SLURM_RESTART_COUNT", "11", 1},       {"SLURM_RESTART_COUNT", "0", 0}};
TEST(resume, who_is_started_again) {
    curve c;
    char args[3072];
    const char *options = "--ranks 2 --steps 4 --sample 0";
    saved("run", options, &c);
    saved_args(args, sizeof args, "run", options);
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        setenv(counts[i].name, counts[i].value, 1);
        CHECK_EQ_INT(run(args), !counts[i].resumes); // a new training cannot save there
        CHECK_MSG((strstr(out_text, "resume ") != NULL) == counts[i].resumes, "%s=%s",
                  counts[i].name, counts[i].value);
        unsetenv(counts[i].name);
    }
    setenv("FSDP_RESTART_COUNT", "0", 1); // an fsdprun in a job that Slurm has requeued
    setenv("SLURM_RESTART_COUNT", "1", 1);
    CHECK_EQ_INT(run(args), 0);
    after("resume ");
}

/* A failed save ends no training; but if no checkpoint exists at its end, the program fails. A
   directory that cannot be made is an error before the training. */
TEST(resume, unwritable) {
    char text[512], args[3072];
    for (int missing = 0; missing < 2; missing++) {
        snprintf(args, sizeof args,
                 "--data %s --steps 50 --batch 4 --context 16 --layers 1 --heads 2 "
                 "--channels 16 --ranks 2 --save %s --save-every 20",
                 write_text(text, TEXT_NBYTES), missing ? "/nowhere/run" : "/proc/run");
        CHECK(run(args) != 0);
        if (missing) break;
        after("\nsave   behind step 20: failed, training goes on\n");
        after("\nsave   behind step 40: failed, training goes on\n");
        after("\nstep  50/50 ");
        CHECK(strstr(err_text, "/proc/run") != NULL);
    }
    CHECK(strstr(out_text, "\nstep ") == NULL);
    CHECK(strstr(err_text, "/nowhere/run cannot be made, since there is no directory /nowhere"));
}

/* ---- kill -9 --------------------------------------------------------------------------------- */

/* Returns the newest checkpoint's step by its directory's name, or -1; *leftovers: names that
   begin with a dot. */
static int newest_step(const char *dir, int *leftovers) {
    char path[512];
    int newest = -1;
    *leftovers = 0;
    DIR *d = opendir(in_tmpdir(path, dir));
    if (!d) return -1;
    for (struct dirent *e; (e = readdir(d)) != NULL;) {
        int step, end = 0;
        if (strncmp(e->d_name, ".tmp", 4) == 0) ++*leftovers;
        if (sscanf(e->d_name, "step-%8d%n", &step, &end) == 1 && !e->d_name[end] && step > newest)
            newest = step;
    }
    closedir(d);
    return newest;
}

/* Returns the step of the last line `head` STEP in a run's output, or -1. */
static int last_step(const char *head) {
    int step = -1;
    for (const char *at = out_text; (at = strstr(at, head)) != NULL; at += strlen(head)) {
        const char *name = strstr(at, "/step-"), *end = strchr(at + 1, '\n');
        if (name && (!end || name < end)) CHECK_EQ_INT(sscanf(name, "/step-%8d:", &step), 1);
    }
    return step;
}

/* Kills the parent and its ranks, and waits until none is left: this process inherits the ranks.
   Returns 0 if the job had ended before. */
static int kill_job(pid_t pid) {
    pid_t ranks[8];
    int status, other;
    CHECK_EQ_INT(kill(pid, SIGSTOP), 0); // it starts no more
    CHECK_EQ_INT(waitpid(pid, &status, WUNTRACED), pid);
    if (WIFSTOPPED(status)) {
        const int count = children(pid, ranks, 8);
        for (int r = 0; r < count; r++) (void)kill(ranks[r], SIGKILL);
        CHECK_EQ_INT(kill(pid, SIGKILL), 0);
    } else {
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    while (waitpid(-1, &other, 0) > 0 || errno == EINTR) continue;
    return WIFSTOPPED(status);
}

typedef struct {
    int kills, found_old, found_new, leftovers; // the newest one was reported as saved, or is newer
    int jobs;
    curve whole;
    int64_t took_ms; // duration of the undisturbed training
    uint64_t random;
} campaign;

/* Starts a job that saves after every second step; every other job saves asynchronously. */
static pid_t start_job(campaign *c) {
    char args[3072], options[128];
    shell("echo >out"); // the output of a job that is killed before it starts
    snprintf(options, sizeof options, "--ranks 3 --save-every 2 --sample 0 --resume%s",
             c->jobs++ % 2 ? " --async" : "");
    saved_args(args, sizeof args, "run", options);
    return start("", args);
}

/* Checks the remains of a killed job: the newest checkpoint is not older than the last one
   reported (`told`). If the job had resumed, then from the newest one before it. */
static void look_at_remains(campaign *c, int before, int *told) {
    char path[512];
    int left;
    read_file(in_tmpdir(path, "out"), out_text);
    const int resumed = last_step("\nresume "), saves = last_step("\nsave ");
    const int newest = newest_step("run", &left);
    if (resumed >= 0) CHECK_EQ_INT(resumed, before);
    if (saves > *told) *told = saves;
    CHECK_MSG(newest >= *told, "step %d was told, and %d is the newest", *told, newest);
    *(newest > *told ? &c->found_new : &c->found_old) += 1;
    c->leftovers += left > 0;
    c->kills++;
}

/* Runs one training to its end, killed again and again. The result equals that of an undisturbed
   one. */
static void killed_training(campaign *c, int kills) {
    char path[512];
    int told = -1, left, before;
    curve part;
    shell("rm -rf run run.csv");
    for (;;) {
        before = newest_step("run", &left);
        const pid_t pid = start_job(c);
        if (c->kills >= kills) {
            CHECK_EQ_INT(finish(pid), 0);
            break;
        }
        usleep((useconds_t)(h_rand64(&c->random) % (uint64_t)(c->took_ms * 1000)));
        if (!kill_job(pid)) break;
        look_at_remains(c, before, &told);
    }
    read_file(in_tmpdir(path, "out"), out_text);
    if (last_step("\nsave ") == 50) {
        CHECK_EQ_INT(newest_step("run", &left), 50);
        CHECK_EQ_INT(left, 0); // a save removes the remains of killed ones
    }
    read_csv(in_tmpdir(path, "run.csv"), &part);
    CHECK_EQ_INT(part.count, 50);
    check_bits(&c->whole, &part);
    check_same_checkpoint("whole/step-00000050/manifest.json", "run/step-00000050/manifest.json");
}

static void run_campaign(campaign *c, int kills) {
    memset(c, 0, sizeof *c);
    c->random = h_seed();
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) SKIP("no PR_SET_CHILD_SUBREAPER");
    const int64_t begin = h_now_ms();
    saved("whole", "--ranks 3 --save-every 2 --sample 0", &c->whole);
    c->took_ms = h_now_ms() - begin;
    while (c->kills < kills) killed_training(c, kills);
    h_message("%d kills: found old %d, found new %d, wrong 0; %d left files behind, which the next "
              "save removed",
              c->kills, c->found_old, c->found_new, c->leftovers);
    CHECK_EQ_INT(c->kills, kills);
}

static int has_ended(pid_t pid) {
    siginfo_t end;
    memset(&end, 0, sizeof end);
    CHECK_EQ_INT(waitid(P_PID, (id_t)pid, &end, WEXITED | WNOHANG | WNOWAIT), 0);
    return end.si_pid != 0;
}

/* Returns one rank of an fsdprun, whose child, the keeper, has the ranks as children; waits
   until all have been started. Returns 0 if fsdprun has ended. */
static pid_t some_rank(pid_t launcher, int ranks, uint64_t *random) {
    pid_t keeper, found[8];
    while (children(launcher, &keeper, 1) != 1 || children(keeper, found, 8) != ranks) {
        if (has_ended(launcher)) return 0;
        usleep(1000);
    }
    return found[h_rand64(random) % (uint64_t)ranks];
}

/* A training under fsdprun, with 3 ranks or two nodes of 2 ranks each, that is disturbed. */
typedef struct {
    int nodes, port;
    const char *master; // two nodes; in namespaces if it is not this host
    char args[3072];
    pid_t pids[2];
    uint64_t random;
    curve whole;
} comeback;

static void start_node(comeback *c, int node) {
    char prefix[200] = "tools/fsdprun -n 3 --max-restarts 1000";
    const int is_far = c->nodes == 2 && strncmp(c->master, "127.", 4) != 0;
    if (c->nodes == 2)
        snprintf(prefix, sizeof prefix,
                 "tools/fsdprun -n 2 --nnodes 2 --node-rank %d --master %s:%d --max-restarts 1000",
                 node, c->master, c->port);
    if (is_far) n_enter(n_host[node]);
    c->pids[node] = start_tagged(prefix, c->args, node ? "1" : "0");
    if (is_far) n_enter(n_router);
}

static void start_nodes(comeback *c, const char *dir) {
    saved_args(c->args, sizeof c->args, dir, "--save-every 2 --sample 0");
    for (int k = 0; k < c->nodes; k++) start_node(c, k);
}

static void finish_nodes(comeback *c, const char *dir, curve *out) {
    char path[512], name[64];
    for (int k = 0; k < c->nodes; k++) CHECK_EQ_INT(finish_tagged(c->pids[k], k ? "1" : "0"), 0);
    snprintf(name, sizeof name, "%s.csv", dir);
    read_csv(in_tmpdir(path, name), out);
    CHECK_EQ_INT(out->count, 50);
}

/* Returns the number of restarts by this node's fsdprun. */
static int restarts(int node) {
    char path[512];
    int n = 0;
    read_file(in_tmpdir(path, node ? "err1" : "err0"), err_text);
    for (const char *p = err_text; (p = strstr(p, "started again: restart ")) != NULL; p++) n++;
    return n;
}

/* Kills a whole fsdprun, waits until its ranks have ended, too, and starts it again. Returns 0 if
   the training has nearly ended: a node that came back to one that has ended would wait for the
   other node. The keeper is stopped until that is known: a node of which it does not report the end
   keeps the job alive. */
static int replace_node(comeback *c, int node) {
    pid_t keeper;
    int left;
    if (children(c->pids[node], &keeper, 1) != 1 || kill(keeper, SIGSTOP)) return 0;
    const int in_time = newest_step("run", &left) <= 40;
    if (in_time) {
        CHECK_EQ_INT(kill(c->pids[node], SIGKILL), 0);
        CHECK_EQ_INT(waitpid(c->pids[node], NULL, 0), c->pids[node]);
    }
    CHECK_EQ_INT(kill(keeper, SIGCONT), 0);
    if (!in_time) return 0;
    CHECK_EQ_INT(waitpid(keeper, NULL, 0), keeper); // this process has adopted it
    start_node(c, node);
    return 1;
}

/* When a random step is saved, kills a rank or, of two nodes, a whole fsdprun, and starts it
   again with the same command. Returns 0 if the training was faster. */
static int disturb(comeback *c, int kind) {
    const int node = kind % c->nodes, is_node = c->nodes == 2 && kind / 2 % 2;
    const int other = is_node ? !node : node; // the node that logs the failure
    int left;
    const int until = newest_step("run", &left) + (int)(h_rand64(&c->random) % 12);
    pid_t rank;
    while ((rank = some_rank(c->pids[node], c->nodes == 2 ? 2 : 3, &c->random)) != 0 &&
           newest_step("run", &left) < until)
        usleep(1000);
    if (!rank) return 0;
    const int before = restarts(other); // not earlier: the file was the last training's
    if (is_node ? !replace_node(c, node) : kill(rank, SIGKILL)) return 0;
    while (restarts(other) == before && !has_ended(c->pids[other])) usleep(1000);
    return restarts(other) > before;
}

/* A training that is disturbed again and again ends as an undisturbed one. */
static void come_back(comeback *c, int kills) {
    curve part;
    int done = 0;
    if (access("tools/fsdprun", X_OK) != 0) SKIP("no tools/fsdprun");
    if (prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)) SKIP("no PR_SET_CHILD_SUBREAPER");
    c->random = h_seed();
    c->port = h_free_port();
    start_nodes(c, "whole");
    finish_nodes(c, "whole", &c->whole);
    while (done < kills) {
        shell("rm -rf run run.csv");
        start_nodes(c, "run");
        while (done < kills && disturb(c, done)) done++;
        finish_nodes(c, "run", &part);
        check_bits(&c->whole, &part);
        check_same_checkpoint("whole/step-00000050/manifest.json",
                              "run/step-00000050/manifest.json");
    }
    h_message("%d kills, and as often the training came back", done);
}
TEST(resume, comes_back, SECONDS(120)) {
    comeback c = {1, 0, "", "", {0, 0}, 0, {0}};
    come_back(&c, 4);
}
TEST(long_gpt, comes_back, SECONDS(1800) | NIGHT) {
    comeback c = {1, 0, "", "", {0, 0}, 0, {0}};
    come_back(&c, 50);
}

/* Over Gloo, as in test_cluster.c. */
static void come_back_on_two_nodes(const char *master, int kills) {
    comeback c = {2, 0, master, "", {0, 0}, 0, {0}};
    char path[512];
    const char *dir = getenv("FSDP_BUILD");
    snprintf(path, sizeof path, "%s/gloo/examples/train_gpt", dir && *dir ? dir : "build");
    if (access(path, X_OK)) SKIP("no examples with the Gloo backend here: make gloo");
    setenv("GPT_BIN", path, 1);
    setenv("FSDP_BACKEND", "gloo", 1);
    setenv("FSDP_TOKEN", "of the tests", 1);
    come_back(&c, kills);
}
TEST(resume, two_nodes_come_back, SECONDS(240)) { come_back_on_two_nodes("127.0.0.1", 4); }
TEST(long_gpt, two_nodes_come_back, SECONDS(3600) | NIGHT) {
    const char *why = n_hosts(2);
    if (why) SKIP(why);
    come_back_on_two_nodes("10.77.0.2", 50);
}

TEST(resume, killed, SECONDS(120)) {
    campaign c;
    run_campaign(&c, 5);
}

TEST(long_gpt, kill_campaign, SECONDS(3600) | NIGHT) {
    campaign c;
    run_campaign(&c, 300);
    CHECK(c.leftovers > 0 && c.found_new > 0); // some kills have interrupted a save
}
