/* test_fsdprun.c - the launcher: what ranks get, how failures, signals and wrong usage end. The
   program under test is $FSDPRUN, or tools/fsdprun. */
#include "harness.h"

static char output[16384]; /* of the last command, both streams */

static const char *launcher(void) {
    const char *path = getenv("FSDPRUN");
    if (!path || !*path) path = "tools/fsdprun";
    if (access(path, X_OK)) SKIP("no tools/fsdprun here: make tools/fsdprun");
    return path;
}

/* Starts fsdprun with the arguments up to NULL, its output in a file. */
static pid_t start_words(const char *word, va_list more) {
    char path[400];
    char *argv[32];
    int n = 0;
    snprintf(path, sizeof path, "%s/out", h_tmpdir());
    argv[n++] = (char *)(uintptr_t)launcher();
    for (; word && n < 31; word = va_arg(more, const char *)) argv[n++] = (char *)(uintptr_t)word;
    argv[n] = NULL;
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid) return pid;
    int file = open(path, O_CREAT | O_TRUNC | O_RDWR, 0600);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    close(file);
    execv(argv[0], argv);
    _exit(99);
}

static pid_t start(const char *word, ...) {
    va_list more;
    va_start(more, word);
    pid_t pid = start_words(word, more);
    va_end(more);
    return pid;
}

static void read_output(void) {
    char path[400];
    snprintf(path, sizeof path, "%s/out", h_tmpdir());
    FILE *f = fopen(path, "r");
    size_t length = f ? fread(output, 1, sizeof output - 1, f) : 0;
    output[length] = 0;
    if (f) fclose(f);
}

/* Its exit status; the output is read too. */
static int finish(pid_t pid) {
    int status = 0;
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    read_output();
    CHECK_MSG(WIFEXITED(status), "fsdprun died of signal %d: %s", WTERMSIG(status), output);
    return WEXITSTATUS(status);
}

#define RUN(...) finish(start(__VA_ARGS__, (const char *)NULL))

static void says(const char *part) {
    CHECK_MSG(strstr(output, part), "\"%s\" does not say \"%s\"", output, part);
}

static int count(const char *part) {
    int n = 0;
    for (const char *p = output; (p = strstr(p, part)) != NULL; p++) n++;
    return n;
}

TEST(fsdprun, environment) {
    CHECK_EQ_INT(
        RUN("-n", "3", "sh", "-c",
            "echo $RANK:$WORLD_SIZE:$LOCAL_RANK:$LOCAL_WORLD_SIZE:$MASTER_ADDR: port$MASTER_PORT "
            "id$FSDP_JOB_ID"),
        0);
    says("0:3:0:3:127.0.0.1:");
    says("1:3:1:3:127.0.0.1:");
    says("2:3:2:3:127.0.0.1:");
    int port = atoi(strstr(output, "port") + 4);
    CHECK(port > 1023);
    char same[64];
    snprintf(same, sizeof same, "port%d ", port);
    CHECK_EQ_INT(count(same), 3);
    snprintf(same, sizeof same, "%.*s\n", (int)strcspn(strstr(output, "idfsdprun"), "\n"),
             strstr(output, "idfsdprun"));
    CHECK_EQ_INT(count(same), 3);
    CHECK_EQ_INT(RUN("-n", "1", "sh", "-c", "echo id$FSDP_JOB_ID"), 0);
    CHECK(strcmp(output, same)); /* another job, another id */
}

TEST(fsdprun, arguments_are_passed_unchanged) {
    CHECK_EQ_INT(RUN("-n1", "--", "printf", "[%s]", "a b", "-n", "", "--help", "*"), 0);
    CHECK_EQ_STR(output, "[a b][-n][][--help][*]");
}

TEST(fsdprun, one_rank_per_core_by_default) {
    cpu_set_t set;
    CHECK_EQ_INT(sched_getaffinity(0, sizeof set, &set), 0);
    CHECK_EQ_INT(RUN("sh", "-c", "echo rank $RANK"), 0);
    CHECK_EQ_INT(count("rank "), CPU_COUNT(&set));
}

TEST(fsdprun, rank_0_has_the_standard_input) {
    int fd[2];
    CHECK_EQ_INT(pipe(fd), 0);
    CHECK_EQ_INT(write(fd[1], "hello\n", 6), 6);
    close(fd[1]);
    dup2(fd[0], STDIN_FILENO);
    CHECK_EQ_INT(RUN("-n", "3", "sh", "-c", "while read x; do echo $RANK-$x; done"), 0);
    CHECK_EQ_STR(output, "0-hello\n");
}

TEST(fsdprun, a_failure_ends_the_others_and_is_named) {
    int64_t begin = h_now_ms();
    CHECK_EQ_INT(RUN("-n", "3", "sh", "-c", "test $RANK = 1 && exit 5; sleep 20"), 5);
    CHECK(h_now_ms() - begin < 5000);
    says("rank 1 (process ");
    says("failed with exit status 5");
    CHECK_EQ_INT(count("fsdprun:"), 1); /* those that were ended are not failures */
}

TEST(fsdprun, a_killed_rank_is_named) {
    CHECK_EQ_INT(RUN("-n", "3", "sh", "-c", "test $RANK = 2 && kill -9 $$; exec sleep 20"),
                 128 + SIGKILL);
    says("rank 2 (process ");
    says("was killed by signal 9");
}

TEST(fsdprun, who_ignores_term_is_killed) {
    int64_t begin = h_now_ms();
    CHECK_EQ_INT(RUN("-n", "2", "sh", "-c",
                     "test $RANK = 1 && exit 3; trap '' TERM; while :; do sleep 0.05; done"),
                 3);
    CHECK(h_now_ms() - begin >= 1000 && h_now_ms() - begin < 6000);
}

TEST(fsdprun, others_may_speak_before_they_are_ended) {
    CHECK_EQ_INT(RUN("-n", "2", "sh", "-c",
                     "test $RANK = 1 && exit 3; sleep 0.01; echo it was rank 1; sleep 9"),
                 3);
    says("it was rank 1");
}

typedef struct {
    const char *name;
    int sig;
} signal_row;
static const signal_row forwarded[] = {{"INT", SIGINT},   {"TERM", SIGTERM}, {"HUP", SIGHUP},
                                       {"QUIT", SIGQUIT}, {"USR1", SIGUSR1}, {"USR2", SIGUSR2}};
TEST_P(fsdprun, signals_are_passed_on, forwarded) {
    char script[200];
    snprintf(script, sizeof script,
             "trap 'echo got it; exit 0' %s; echo ready; while :; do sleep 0.02; done", row->name);
    signal(row->sig, SIG_DFL); /* a shell cannot trap what a background job was told to ignore */
    pid_t pid = start("-n", "2", "sh", "-c", script, (const char *)NULL);
    while (read_output(), count("ready") < 2) usleep(1000);
    kill(pid, row->sig);
    CHECK_EQ_INT(finish(pid), 0);
    CHECK_EQ_INT(count("got it"), 2);
}

TEST(fsdprun, status_after_a_signal_that_kills) {
    pid_t pid = start("-n", "2", "sh", "-c", "echo ready; exec sleep 20", (const char *)NULL);
    while (read_output(), count("ready") < 2) usleep(1000);
    kill(pid, SIGTERM);
    CHECK_EQ_INT(finish(pid), 128 + SIGTERM);
    CHECK_EQ_INT(count("fsdprun:"), 0); /* it was asked for */
}

TEST(fsdprun, ranks_die_with_it) {
    pid_t pid = start("-n", "2", "sh", "-c", "echo pid $$; exec sleep 20", (const char *)NULL);
    while (read_output(), count("pid ") < 2) usleep(1000);
    int first = atoi(strstr(output, "pid ") + 4);
    kill(pid, SIGKILL);
    CHECK_EQ_INT(waitpid(pid, NULL, 0), pid);
    for (int i = 0; i < 2000; i++, usleep(1000)) {
        char path[64], state = 'X';
        snprintf(path, sizeof path, "/proc/%d/stat", first);
        FILE *f = fopen(path, "r");
        if (f && fscanf(f, "%*d (%*[^)]) %c", &state) != 1) state = 'X';
        if (f) fclose(f);
        if (state == 'X' || state == 'Z') return;
    }
    CHECK_MSG(0, "process %d is alive", first);
}

TEST(fsdprun, wrong_usage) {
    CHECK_EQ_INT(RUN("--help"), 0);
    says("usage: fsdprun [-n RANKS]");
    CHECK_EQ_INT(RUN("-n", "0", "true"), 2);
    says("-n '0': expected a number from 1 to 4096");
    CHECK_EQ_INT(RUN("-n", "two", "true"), 2);
    CHECK_EQ_INT(RUN("-n"), 2);
    CHECK_EQ_INT(RUN("-n", "2"), 2);
    says("which program?");
    CHECK_EQ_INT(RUN("--frob", "true"), 2);
    says("unknown option '--frob'");
    CHECK_EQ_INT(RUN("-n", "2", "/nonexistent/program"), 127);
    says("cannot start '/nonexistent/program': No such file");
    CHECK_EQ_INT(RUN("-n", "2", "/dev/null"), 127);
    says("cannot start '/dev/null': Permission denied");
}
