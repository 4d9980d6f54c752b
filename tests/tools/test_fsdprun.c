/* test_fsdprun.c - the launcher: the environment of ranks on one host and on several, the store
   that it serves, the end after failures, signals and wrong usage, and that no process is left. The
   program under test is $FSDPRUN, or tools/fsdprun.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#define FSDP_IMPLEMENTATION
#define FSDP_STATIC
#ifndef FSDP_BACKEND_GLOO
#define FSDP_NO_BACKEND
#endif
#pragma GCC diagnostic ignored "-Wunused-function" /* only the library's store is used */
#include "fsdp.h"
#include "backends/fsdp_store.h"
#include <grp.h>          /* setgroups */
#include <sys/ptrace.h>   /* ptrace */
#include <sys/resource.h> /* setrlimit */

static char output[16384]; /* both streams of the last command */

static const char *launcher(void) {
    const char *path = getenv("FSDPRUN");
    if (!path || !*path) path = "tools/fsdprun";
    if (access(path, X_OK)) SKIP("no tools/fsdprun here: make tools/fsdprun");
    return path;
}

/* Settings of the next start: words before the command (timeout 9), and a function that the
   child calls first. */
static const char *const *in_front;
static int appends; /* the output is appended to that of earlier starts */
static void (*prepare)(void);

/* One end of a pipe whose other end the launcher and all its descendants have: the pipe stays
   open while one of them lives. */
static struct {
    pid_t pid;
    int fd;
} holders[8];
static int num_holders;

static pid_t fork_holding(void) {
    int ends[2];
    CHECK_EQ_INT(pipe(ends), 0);
    fcntl(ends[0], F_SETFD, FD_CLOEXEC);
    pid_t pid = fork();
    CHECK(pid >= 0 && num_holders < 8);
    if (pid == 0) return 0;
    holders[num_holders].pid = pid, holders[num_holders++].fd = ends[0];
    close(ends[1]);
    return pid;
}

/* Waits for the end of this process and of all its descendants. Returns 1 if they have ended. */
static int is_gone(pid_t pid, int ms) {
    for (int k = 0; k < num_holders; k++) {
        struct pollfd p = {holders[k].fd, POLLIN, 0};
        if (holders[k].pid == pid) return poll(&p, 1, ms) == 1 && (p.revents & POLLHUP);
    }
    return 0;
}

/* Starts fsdprun with the arguments up to NULL, and writes its output to a file. */
static pid_t start_words(const char *word, va_list more) {
    char path[400];
    char *argv[32];
    int n = 0;
    snprintf(path, sizeof path, "%s/out", h_tmpdir());
    for (const char *const *w = in_front; w && *w; w++) argv[n++] = (char *)(uintptr_t)*w;
    argv[n++] = (char *)(uintptr_t)launcher();
    for (; word && n < 31; word = va_arg(more, const char *)) argv[n++] = (char *)(uintptr_t)word;
    argv[n] = NULL;
    fflush(NULL);
    pid_t pid = fork_holding();
    if (pid) return pid;
    int file = open(path, O_CREAT | (appends ? 0 : O_TRUNC) | O_RDWR | O_APPEND, 0600);
    dup2(file, STDOUT_FILENO);
    dup2(file, STDERR_FILENO);
    close(file);
    if (prepare) prepare();
    execvp(argv[0], argv);
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

/* Waits for fsdprun, reads the output, and returns the exit status. */
static int finish(pid_t pid) {
    int status = 0;
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    read_output();
    CHECK_MSG(WIFEXITED(status), "fsdprun died of signal %d: %s", WTERMSIG(status), output);
    CHECK_MSG(is_gone(pid, 0), "fsdprun has left processes behind: %s", output);
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

static void read_until(const char *part, int times) {
    while (read_output(), count(part) < times) usleep(1000);
}

/* Returns the number after a word of the output. */
static pid_t number_after(const char *word) {
    const char *at = strstr(output, word);
    CHECK_MSG(at != NULL, "\"%s\" does not say \"%s\"", output, word);
    return (pid_t)atoi(at + strlen(word));
}

/* Creates the file for which scripts wait. */
static void go(void) {
    char path[400];
    snprintf(path, sizeof path, "%s/go", h_tmpdir());
    close(open(path, O_CREAT | O_WRONLY, 0600));
}

/* X: there is no such process. */
static char state_of(pid_t pid) {
    char path[64], state = 'X';
    snprintf(path, sizeof path, "/proc/%ld/stat", (long)pid);
    FILE *f = fopen(path, "r");
    if (f && fscanf(f, "%*d (%*[^)]) %c", &state) != 1) state = 'X';
    if (f) fclose(f);
    return state;
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

/* The environment has all variables of a rank, and no contradicting ones. */
TEST(fsdprun, environment_of_one_host) {
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1); /* from a torchrun around it */
    setenv("TORCHELASTIC_RUN_ID", "none", 1);
    setenv("OMPI_COMM_WORLD_LOCAL_RANK", "0", 1); /* or from an mpirun */
    setenv("MPI_LOCALRANKID", "0", 1);
    setenv("SLURM_LOCALID", "5", 1);
    setenv("FSDP_STORE", "tcp://another:1", 1);
    CHECK_EQ_INT(RUN("-n2", "sh", "-c",
                     "echo $RANK:$GROUP_RANK:$FSDP_STORE:$TORCHELASTIC_USE_AGENT_STORE:; "
                     "echo around:$TORCHELASTIC_RUN_ID$OMPI_COMM_WORLD_LOCAL_RANK$MPI_LOCALRANKID"
                     "$SLURM_LOCALID:"),
                 0);
    says("0:0:host:::");
    says("1:0:host:::");
    says("around:5:");
    unsetenv("NCCL_LAUNCH_ORDER_IMPLICIT");
    CHECK_EQ_INT(RUN("-n1", "sh", "-c", "echo order:$NCCL_LAUNCH_ORDER_IMPLICIT:"), 0);
    says("order:1:");
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "0", 1); /* the user's own value stays */
    CHECK_EQ_INT(RUN("-n1", "sh", "-c", "echo order:$NCCL_LAUNCH_ORDER_IMPLICIT:"), 0);
    says("order:0:");
}

static const struct {
    const char *name, *master, *address, *port, *store;
} masters[] = {{"host", "node-a", "node-a", "29500", "tcp://node-a:29500"},
               {"host_and_port", "node-a:777", "node-a", "777", "tcp://node-a:777"},
               {"ipv4", "10.1.2.3:777", "10.1.2.3", "777", "tcp://10.1.2.3:777"},
               {"ipv6", "fd00::7", "fd00::7", "29500", "tcp://[fd00::7]:29500"},
               {"ipv6_in_brackets", "[fd00::7]", "fd00::7", "29500", "tcp://[fd00::7]:29500"},
               {"ipv6_and_port", "[fd00::7]:65535", "fd00::7", "65535", "tcp://[fd00::7]:65535"}};
TEST_P(fsdprun, environment_of_several_hosts, masters) {
    char expected[400];
    CHECK_EQ_INT(RUN("-n", "2", "--nnodes", "3", "--node-rank=1", "--master", row->master, "sh",
                     "-c",
                     "echo $RANK/$WORLD_SIZE $LOCAL_RANK/$LOCAL_WORLD_SIZE $GROUP_RANK "
                     "$MASTER_ADDR $MASTER_PORT $FSDP_STORE $FSDP_JOB_ID"),
                 0);
    for (int r = 0; r < 2; r++) {
        snprintf(expected, sizeof expected, "%d/6 %d/2 1 %s %s %s fsdprun-%s:%s\n", 2 + r, r,
                 row->address, row->port, row->store, row->address, row->port);
        says(expected);
    }
}

/* The token: random on one host unless the user sets one; on several hosts only the user's. */
static const struct {
    const char *name, *given, *nodes;
    int random;
} tokens[] = {{"one_host", NULL, "1", 1},
              {"one_host_and_empty", "", "1", 1},
              {"one_host_and_given", "mine", "1", 0},
              {"several_hosts", NULL, "2", 0},
              {"several_hosts_and_given", "mine", "2", 0}};
TEST_P(fsdprun, token, tokens) {
    char text[2][80];
    for (int i = 0; i < 2; i++) {
        unsetenv("FSDP_TOKEN");
        if (row->given) setenv("FSDP_TOKEN", row->given, 1);
        CHECK_EQ_INT(RUN("-n1", "--nnodes", row->nodes, "--node-rank",
                         *row->nodes == '1' ? "0" : "1", "--master", "127.0.0.1", "sh", "-c",
                         "echo token:$FSDP_TOKEN."),
                     0);
        CHECK(strstr(output, "token:"));
        snprintf(text[i], sizeof text[i], "%s", strstr(output, "token:") + 6);
    }
    if (!row->random) {
        CHECK_EQ_STR(text[0], row->given ? "mine.\n" : ".\n");
        return;
    }
    CHECK_EQ_INT(strspn(text[0], "0123456789abcdef"), 64);
    CHECK_EQ_STR(text[0] + 64, ".\n");
    CHECK(strcmp(text[0], text[1]) != 0);
}
TEST(fsdprun, ranks_have_one_token) {
    unsetenv("FSDP_TOKEN");
    CHECK_EQ_INT(RUN("-n3", "sh", "-c", "echo token:$FSDP_TOKEN"), 0);
    CHECK_EQ_INT(count("token:"), 3);
    char line[100];
    snprintf(line, sizeof line, "%.71s", strstr(output, "token:")); /* with the end of the line */
    CHECK_EQ_INT(count(line), 3);
}

/* FSDP_STORE_SERVED says that the launcher serves the store, and where: node 0 knows the port,
   other nodes know the possible ones. */
static const struct {
    const char *name, *nodes, *node, *served;
} serving[] = {{"one_host", NULL, NULL, "served:host: fsdprun-"},
               {"node_1", "2", "1", "served:tcp://h:9-25 fsdprun-h:9.\n"}};
TEST_P(fsdprun, says_that_it_serves, serving) {
    const char *script = "echo served:$FSDP_STORE_SERVED.";
    setenv("FSDP_STORE_SERVED", "of one around it", 1);
    if (!row->nodes) CHECK_EQ_INT(RUN("-n1", "sh", "-c", script), 0);
    else
        CHECK_EQ_INT(RUN("-n1", "--nnodes", row->nodes, "--node-rank", row->node, "--master=h:9",
                         "sh", "-c", script),
                     0);
    says(row->served);
}

/* The options of mpirun and of torchrun for the number of ranks. */
static const struct {
    const char *name, *words[2];
} numbers[] = {{"n", {"-n", "2"}},
               {"n_joined", {"-n2", "--"}},
               {"np", {"-np", "2"}},
               {"np_and_equals", {"-np=2", "--"}},
               {"nproc_per_node", {"--nproc-per-node", "2"}},
               {"nproc_per_node_and_equals", {"--nproc-per-node=2", "--"}}};
TEST_P(fsdprun, how_many, numbers) {
    CHECK_EQ_INT(RUN(row->words[0], row->words[1], "sh", "-c", "echo of $WORLD_SIZE."), 0);
    CHECK_EQ_STR(output, "of 2.\nof 2.\n");
}

TEST(fsdprun, a_name_for_the_job) {
    CHECK_EQ_INT(RUN("--nproc-per-node=1", "--nnodes=2", "--node-rank", "1", "--master=h:9",
                     "--job", "mine", "sh", "-c", "echo id $FSDP_JOB_ID"),
                 0);
    CHECK_EQ_STR(output, "id fsdprun-h:9-mine\n");
}

/* In a requeued Slurm job the store and the ranks get the new name. */
TEST(fsdprun, a_name_for_each_start) {
    setenv("SLURM_RESTART_COUNT", "2", 1);
    CHECK_EQ_INT(RUN("-n1", "--nnodes=2", "--node-rank", "1", "--master=h:9", "sh", "-c",
                     "echo id $FSDP_JOB_ID of $FSDP_STORE_SERVED"),
                 0);
    CHECK_EQ_STR(output, "id fsdprun-h:9:S2 of tcp://h:9-25 fsdprun-h:9:S2\n");
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
    int64_t begin = h_calm_ms();
    CHECK_EQ_INT(RUN("-n", "3", "sh", "-c", "test $RANK = 1 && exit 5; sleep 20"), 5);
    CHECK(h_calm_ms() - begin < 5000);
    says("rank 1 (process ");
    says("failed with exit status 5");
    CHECK_EQ_INT(count("fsdprun:"), 1); /* ranks that the launcher ended are not failures */
}

TEST(fsdprun, a_killed_rank_is_named) {
    CHECK_EQ_INT(RUN("-n", "3", "sh", "-c", "test $RANK = 2 && kill -9 $$; exec sleep 20"),
                 128 + SIGKILL);
    says("rank 2 (process ");
    says("was killed by signal 9 (Killed), not by fsdprun");
}

/* Other ranks may fail because of a rank that ended before. */
TEST(fsdprun, who_ended_before_a_failure_is_named) {
    /* "left N" waits until the launcher has seen the end of rank N */
    static const char *const left =
        "echo $$ >pid.$RANK; left() { while ! test -s pid.$1 || kill -0 $(cat pid.$1); do "
        "sleep 0.01; done 2>/dev/null; };";
    char script[600];
    snprintf(script, sizeof script, "cd %s; %s %s", h_tmpdir(), left,
             "case $RANK in 2) exit 0;; 1) left 2; exit 11;; esac; sleep 1000");
    CHECK_EQ_INT(RUN("-n", "3", "sh", "-c", script), 11);
    says("rank 1 (process ");
    says("failed with exit status 11; rank 2 had ended before, with 0\n");
    snprintf(script, sizeof script, "cd %s; %s %s", h_tmpdir(), left,
             "case $RANK in 5) exit 0;; 7) left 5; exit 0;; 4) left 7; exit 7;; esac; sleep 1000");
    CHECK_EQ_INT(
        RUN("-n", "4", "--nnodes", "2", "--node-rank", "1", "--master", "h", "sh", "-c", script),
        7);
    says("rank 4 (process ");
    says("exit status 7; 2 ranks had ended before, with 0, rank 5 as the first\n");
}

/* A launcher that did not check for a while sees all ends at once, and names the killed rank. */
TEST(fsdprun, a_death_comes_before_what_others_say_of_it) {
    char script[600];
    snprintf(script, sizeof script,
             "echo \"rank$RANK=$$, keeper=$PPID,\"; while ! test -e %s/go; do sleep 0.02; done;"
             "test $RANK = 2 && kill -9 $$; exit 4",
             h_tmpdir());
    pid_t pid = start("-n", "4", "sh", "-c", script, (const char *)NULL);
    read_until("keeper", 4);
    const pid_t keeper = number_after("keeper=");
    CHECK_EQ_INT(kill(keeper, SIGSTOP), 0);
    while (state_of(keeper) != 'T') usleep(1000);
    go();
    for (int r = 0; r < 4; r++) {
        char word[16];
        snprintf(word, sizeof word, "rank%d=", r);
        while (state_of(number_after(word)) != 'Z') usleep(1000);
    }
    CHECK_EQ_INT(kill(keeper, SIGCONT), 0);
    CHECK_EQ_INT(finish(pid), 128 + SIGKILL);
    says("rank 2 (process ");
    says("was killed by signal 9");
    CHECK_EQ_INT(count("fsdprun:"), 1);
}

/* The system tells of a death with many threads late: others may have answered it with an exit
   status before. A machine under load may miss the moment, hence the tries. */
TEST(fsdprun, a_death_soon_after_an_exit_comes_first) {
    char script[600];
    int status = 0;
    snprintf(script, sizeof script,
             "cd %s; if test $RANK = 1; then echo $$ >new; mv new pid; exit 4; fi;"
             "while ! test -s pid || kill -0 $(cat pid) 2>/dev/null; do sleep 0.001; done;"
             "rm pid; kill -9 $$",
             h_tmpdir());
    for (int k = 0; k < 50 && status != 128 + SIGKILL; k++)
        status = RUN("-n", "2", "sh", "-c", script);
    CHECK_EQ_INT(status, 128 + SIGKILL);
    says("rank 0 (process ");
    says("was killed by signal 9");
    CHECK_EQ_INT(count("fsdprun:"), 1);
}

TEST(fsdprun, who_ignores_term_is_killed, SLOW) {
    int64_t begin = h_now_ms(), calm = h_calm_ms();
    CHECK_EQ_INT(RUN("-n", "2", "sh", "-c",
                     "test $RANK = 1 && exit 3; trap '' TERM; while :; do sleep 0.05; done"),
                 3);
    CHECK(h_now_ms() - begin >= 1000 && h_calm_ms() - calm < 6000);
}

static int64_t read_number(const char *name) {
    char path[400];
    long long value = 0;
    snprintf(path, sizeof path, "%s/%s", h_tmpdir(), name);
    FILE *f = fopen(path, "r");
    CHECK(f && fscanf(f, "%lld", &value) == 1);
    fclose(f);
    return value;
}

/* The launcher ends the other ranks a tenth of a second after a failure. */
TEST(fsdprun, others_may_speak_before_they_are_ended) {
    char script[1200];
    snprintf(script, sizeof script,
             "cd %s; test $RANK = 1 && { while ! test -e ready; do sleep 0.01; done;"
             "date +%%s%%N >failed; exit 3; };"
             "trap 'date +%%s%%N >ended; exit' TERM; >ready; while :; do sleep 0.01; done",
             h_tmpdir());
    CHECK_EQ_INT(RUN("-n", "2", "sh", "-c", script), 3);
    CHECK(read_number("ended") - read_number("failed") > 90000000);
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
    signal(row->sig, SIG_DFL); /* a shell cannot trap a signal that its parent ignores */
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
    CHECK_EQ_INT(count("fsdprun:"), 0); /* an expected end */
}

/* As under nohup: a signal that the launcher ignores is not passed on, and stays ignored. */
TEST(fsdprun, ignored_signals_stay_ignored) {
    signal(SIGHUP, SIG_IGN);
    pid_t pid = start("-n", "2", "sh", "-c", "echo ready; sleep 0.3; kill -HUP $$; exit 3",
                      (const char *)NULL);
    while (read_output(), count("ready") < 2) usleep(1000);
    kill(pid, SIGHUP);
    CHECK_EQ_INT(finish(pid), 3);
    says("failed with exit status 3"); /* without a signal from the user */
}

/* ---- no process is left ---------------------------------------------------------------------- */

/* Kinds of ranks, which run until "go" exists. Each rank prints "ready" when all its processes
   run. */
static const struct {
    const char *name, *script;
    int term; /* the status after TERM */
} shapes[] = {
    {"plain", "echo ready keeper=$PPID,; exec sleep 1000", 143},
    {"wrapper", "echo keeper=$PPID,; sh -c 'echo ready; exec sleep 1000'; true", 143},
    {"ignores_term", "trap '' TERM; echo ready keeper=$PPID,; while :; do sleep 0.05; done", 137},
    {"child_ignores_term",
     "echo keeper=$PPID,; sh -c 'trap \"\" TERM; echo ready; while :; do sleep 0.05; done'; true",
     143},
    {"own_session", "setsid sh -c 'echo ready; exec sleep 1000' & echo keeper=$PPID,; sleep 1000",
     143},
    {"orphan", "(setsid sh -c 'echo ready; exec sleep 1000' &) ; echo keeper=$PPID,; sleep 1000",
     143},
    {"stopped", "echo ready keeper=$PPID,; kill -STOP $$; true", 143},
};

/* Starts two ranks of that kind; the third rank waits for "go" and fails. */
static pid_t start_shape(int shape, const char *grace) {
    char script[1000];
    snprintf(
        script, sizeof script,
        "if test $RANK = 2; then echo ready; while ! test -e %s/go; do sleep 0.02; done; exit 7;"
        "fi; %s",
        h_tmpdir(), shapes[shape].script);
    pid_t pid = start("-n", "3", "--grace", grace, "sh", "-c", script, (const char *)NULL);
    read_until("ready", 3);
    read_until("keeper=", 2);
    return pid;
}

TEST_P(fsdprun, nothing_is_left_of_a_failure, shapes, strstr(row->script, "trap") ? SLOW : 0) {
    pid_t pid = start_shape((int)(row - shapes), "1");
    go();
    CHECK_EQ_INT(finish(pid), 7); /* checks that all are gone */
    says("rank 2 (process ");
    says("failed with exit status 7");
    CHECK_EQ_INT(count("has not ended within 1 s of TERM"),
                 strstr(row->name, "ignores_term") != NULL);
}

TEST_P(fsdprun, nothing_is_left_of_term, shapes, SLOW) {
    pid_t pid = start_shape((int)(row - shapes), "1");
    kill(pid, SIGTERM);
    CHECK_EQ_INT(finish(pid), row->term == 137 ? 143 : row->term); /* rank 2 obeys */
    CHECK_EQ_INT(count("has not ended within 1 s of TERM"),
                 strstr(row->name, "ignores_term") != NULL);
}

TEST_P(fsdprun, nothing_is_left_when_it_is_killed, shapes, strstr(row->script, "trap") ? SLOW : 0) {
    pid_t pid = start_shape((int)(row - shapes), "1");
    kill(pid, SIGKILL);
    CHECK_EQ_INT(waitpid(pid, NULL, 0), pid);
    CHECK(is_gone(pid, 20000));
}

TEST_P(fsdprun, nothing_is_left_when_the_keeper_is_killed, shapes,
       strstr(row->script, "trap") ? SLOW : 0) {
    pid_t pid = start_shape((int)(row - shapes), "1");
    kill(number_after("keeper="), SIGKILL);
    CHECK_EQ_INT(finish(pid), 128 + SIGKILL);
    says("which looks after the ranks, was killed by signal 9");
}

/* Processes that ranks leave after a success are ended, too, and are no failure. */
TEST(fsdprun, nothing_is_left_of_a_good_end) {
    CHECK_EQ_INT(RUN("-n", "2", "sh", "-c", "setsid sh -c 'exec sleep 1000' & (sleep 1000 &)"), 0);
    CHECK_EQ_STR(output, "");
    CHECK_EQ_INT(RUN("-n", "1", "--grace", "1", "sh", "-c",
                     "(trap '' TERM; while :; do sleep 0.05; done) & exit 0"),
                 0);
    says("has not ended within 1 s of TERM");
}

TEST(fsdprun, all_ignore_term, SLOW) {
    pid_t pid = start("-n", "2", "--grace=1", "sh", "-c",
                      "trap '' TERM; echo ready; while :; do sleep 0.05; done", (const char *)NULL);
    read_until("ready", 2);
    const int64_t begin = h_now_ms();
    kill(pid, SIGTERM);
    CHECK_EQ_INT(finish(pid), 128 + SIGKILL);
    CHECK(h_now_ms() - begin >= 1000);
    says("has not ended within 1 s of TERM, and is killed");
    CHECK_EQ_INT(count("fsdprun:"), 1);
}

TEST(fsdprun, term_gives_more_time_than_a_failure, SLOW) {
    pid_t pid = start("-n", "2", "sh", "-c",
                      "trap 'sleep 2.5; echo saved; exit 0' TERM; echo ready;"
                      "while :; do sleep 0.02; done",
                      (const char *)NULL);
    read_until("ready", 2);
    kill(pid, SIGTERM);
    CHECK_EQ_INT(finish(pid), 0);
    CHECK_EQ_INT(count("saved"), 2);
}

/* A wrapper that would run another command is ended before it does. */
TEST(fsdprun, a_wrapper_ends_before_what_it_waits_for) {
    pid_t pid = start("-n", "2", "sh", "-c", "sh -c 'echo ready; exec sleep 1000'; echo next",
                      (const char *)NULL);
    read_until("ready", 2);
    kill(pid, SIGTERM);
    CHECK_EQ_INT(finish(pid), 128 + SIGTERM);
    CHECK_EQ_INT(count("next"), 0);
}

/* Only ranks get USR1: it would end a wrapper's child that does not expect it. */
TEST(fsdprun, user_signals_are_for_ranks) {
    pid_t pid = start("-n", "2", "sh", "-c",
                      "trap 'echo got it' USR1; sh -c 'echo ready; exec sleep 0.5' & "
                      "wait $!; wait $!; echo status $?",
                      (const char *)NULL);
    read_until("ready", 2);
    kill(pid, SIGUSR1);
    CHECK_EQ_INT(finish(pid), 0);
    CHECK_EQ_INT(count("got it"), 2);
    CHECK_EQ_INT(count("status 0"), 2);
}

/* The process that cleans up has another name: ending all processes named fsdprun does not end
   it. */
TEST(fsdprun, the_keeper_has_a_name_of_its_own) {
    pid_t pid = start("-n", "1", "sh", "-c",
                      "cat /proc/$PPID/comm; tr '\\0' ' ' </proc/$PPID/cmdline; echo .; "
                      "while tr '\\0' ' ' </proc/$PPID/cmdline | grep -q sleep; do :; done;"
                      "cat /proc/$PPID/comm; tr '\\0' ' ' </proc/$PPID/cmdline; echo done",
                      (const char *)NULL);
    char expected[100];
    CHECK_EQ_INT(finish(pid), 0);
    snprintf(expected, sizeof expected, "rank-keeper\nrank-keeper of %ld ", (long)pid);
    says(expected);
}

/* Processes that its shell had started before are not the job's. */
TEST(fsdprun, other_processes_stay) {
    static const char *const words[] = {"sh", "-c",
                                        "sleep 1000 >/dev/null 3>&- 4>&- 5>&- 6>&- & "
                                        "echo other=$!,; exec \"$@\"",
                                        "sh", NULL};
    in_front = words;
    pid_t pid = start("-n", "1", "sh", "-c", "echo keeper=$PPID,; sleep 1000", (const char *)NULL);
    read_until("keeper=", 1);
    kill(number_after("keeper="), SIGKILL);
    int status;
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 128 + SIGKILL);
    CHECK_EQ_INT(kill(number_after("other="), SIGKILL), 0);
}

static const struct {
    const char *name, *arguments[8], *text;
    int status;
} wrong[] = {
    {"no_ranks", {"-n", "0", "true"}, "-n '0': expected a number from 1 to 4096", 2},
    {"no_number", {"-n", "two", "true"}, "-n 'two'", 2},
    {"no_number_as_mpirun", {"-np", "two", "true"}, "-n 'two'", 2},
    {"number_and_more", {"-n2x", "true"}, "-n '2x'", 2},
    {"nothing_after", {"-n"}, "-n ''", 2},
    {"no_program", {"-n", "2"}, "no program was given", 2},
    {"grace", {"--grace", "soon", "true"}, "--grace 'soon': expected a number from 0 to 86400", 2},
    {"restarts", {"--max-restarts=-1", "true"}, "--max-restarts '-1': expected a number from 0", 2},
    {"unknown", {"--frob", "true"}, "unknown option '--frob'", 2},
    {"longer_name", {"--nnodesx=2", "true"}, "unknown option '--nnodesx=2'", 2},
    {"not_there",
     {"-n", "2", "/nonexistent/program"},
     "cannot start '/nonexistent/program': No",
     127},
    {"no_file", {"-n", "2", "/dev/null"}, "cannot start '/dev/null': Permission denied", 127},
    {"no_nodes", {"--nnodes", "0", "true"}, "--nnodes '0': expected a number from 1 to 4096", 2},
    {"ranks_of_each", {"--nnodes", "2", "true"}, "--nnodes 2 needs -n RANKS (of each node)", 2},
    {"which_node", {"-n2", "--nnodes=2", "true"}, "--nnodes 2 needs --node-rank K", 2},
    {"which_master", {"-n2", "--nnodes=2", "--node-rank=0", "true"}, "2 needs --master HOST", 2},
    {"node_too_large",
     {"-n2", "--nnodes=2", "--node-rank=2", "true"},
     "'2': expected a number from 0 to 1",
     2},
    {"node_of_one", {"-n2", "--node-rank=1", "true"}, "--node-rank needs --nnodes N", 2},
    {"master_of_one", {"-n2", "--master=h", "true"}, "--master needs --nnodes N", 2},
    {"port_0",
     {"--master", "h:0", "true"},
     "--master: port '0': expected a number from 1 to 65535",
     2},
    {"port_too_large", {"--master", "h:65536", "true"}, "port '65536'", 2},
    {"no_port", {"--master", "h:", "true"}, "port ''", 2},
    {"no_host", {"--master", ":1", "true"}, "--master ':1': expected HOST or HOST:PORT", 2},
    {"empty_master", {"--master", "", "true"}, "--master ''", 2},
    {"open_bracket", {"--master", "[::1", "true"}, "--master '[::1'", 2},
    {"unknown_host", {"-n1", "--nnodes=1", "--master", "no..host", "true"}, "host 'no..host': ", 1},
};
TEST_P(fsdprun, wrong_usage, wrong) {
    const char *const *a = row->arguments;
    CHECK_EQ_INT(RUN(a[0], a[1], a[2], a[3], a[4], a[5]), row->status);
    says(row->text);
    CHECK_EQ_INT(strncmp(output, "fsdprun: ", 9), 0);
}

/* With restarts the name must leave room for their count. */
static const struct {
    const char *name, *restarts;
    int most;
} names[] = {{"of_one_start", "0", 127}, {"of_many_starts", "1000000", 115}};
TEST_P(fsdprun, names_that_are_too_long, names) {
    char name[200], text[100];
    memset(name, 'x', sizeof name);
    for (int over = 1; over >= 0; over--) {
        name[row->most - (int)strlen("fsdprun-127.0.0.1:29500-") + over] = 0;
        CHECK_EQ_INT(RUN("-n1", "--max-restarts", row->restarts, "--nnodes=1", "--master",
                         "127.0.0.1", "--job", name, "true"),
                     2 * over);
        snprintf(text, sizeof text, "are together longer than %d bytes", row->most);
        CHECK_EQ_INT(count(text), over);
    }
}

/* ---- a job that is started again ------------------------------------------------------------- */

/* The line that each start prints. */
#define STARTED "test $RANK = 0 && echo start=$FSDP_RESTART_COUNT id=$FSDP_JOB_ID.;"

/* Each start of a job has another name, so that remains of one do not meet the next one. */
static void check_starts(int starts) {
    char part[32], id[200], other[200];
    for (int k = 0; k < starts; k++) {
        snprintf(part, sizeof part, "start=%d id=", k);
        CHECK_EQ_INT(count(part), 1);
        const char *at = strstr(output, part) + strlen(part);
        snprintf(other, sizeof other, "%.*s", (int)strcspn(at, "\n"), at);
        CHECK_EQ_INT(count(other), 1);
        if (k == 0) snprintf(id, sizeof id, "%.*s:r", (int)strlen(other) - 1, other);
        else CHECK_EQ_INT(strncmp(other, id, strlen(id)), 0);
    }
    CHECK_EQ_INT(count("start="), starts);
    CHECK_EQ_INT(count("all ranks are started again: restart "), starts - 1);
}

static const struct {
    const char *name, *restarts, *script;
    int starts, status;
    const char *first; /* text of E561; NULL: none */
} comebacks[] = {{"never", "0", STARTED "exit 3", 1, 3, NULL},
                 {"fails_each_time", "2",
                  STARTED "test $RANK = 0 || exec sleep 1000; exit $((FSDP_RESTART_COUNT + 3))", 3,
                  3, "[E542] rank 0 (process "},
                 {"is_killed_each_time", "1",
                  STARTED "test $RANK = 1 && kill -9 $$; exec sleep 1000", 2, 137,
                  "[E541] rank 1 (process "},
                 {"fails_twice", "2", STARTED "test $FSDP_RESTART_COUNT = 2 || exit 3", 3, 0, NULL},
                 {"fails_once_of_many", "1000000",
                  STARTED "test $FSDP_RESTART_COUNT = 1 || kill -9 $$", 2, 0, NULL},
                 {"is_well", "2", STARTED "true", 1, 0, NULL}};
TEST_P(fsdprun, comes_back, comebacks) {
    char text[80];
    CHECK_EQ_INT(RUN("-n2", "--max-restarts", row->restarts, "sh", "-c", row->script), row->status);
    check_starts(row->starts);
    CHECK_EQ_INT(count("[E561]"), row->first != NULL);
    if (!row->first) return;
    snprintf(text, sizeof text, "[E561] the job has failed after %d restarts", row->starts - 1);
    says(text);
    snprintf(text, sizeof text, "The first failure: %s", row->first);
    says(text);
    snprintf(text, sizeof text, "status %d\n", row->status); /* the first failure's, logged twice */
    if (row->status == 3) CHECK_EQ_INT(count(text), 2);
}

TEST(fsdprun, who_cannot_be_started_does_not_come_back) {
    CHECK_EQ_INT(RUN("-n2", "--max-restarts", "2", "/no/such/program"), 127);
    CHECK_EQ_INT(count("fsdprun:"), 1);
}

/* All processes of a start have ended before the next one begins. */
TEST(fsdprun, comes_back_to_an_empty_house) {
    char script[600];
    snprintf(script, sizeof script,
             "cd %s; if test $FSDP_RESTART_COUNT = 0; then"
             " test $RANK = 0 && { while ! test -s left; do sleep 0.01; done; exit 1; };"
             " setsid sh -c 'trap \"\" TERM; echo $$ >left; while :; do sleep 0.05; done' & wait;"
             "else test -e /proc/$(cat left) && echo it is there; true; fi",
             h_tmpdir());
    CHECK_EQ_INT(RUN("-n2", "--grace=0", "--max-restarts=1", "sh", "-c", script), 0);
    says("restart 1 of 1");
    CHECK_EQ_INT(count("it is there"), 0);
}

/* A job that the user ends, or whose launcher or keeper is killed, is not started again. */
static const struct {
    const char *name;
    int sig, of_keeper, status;
} for_good[] = {{"term", SIGTERM, 0, 143},
                {"interrupt", SIGINT, 0, 130},
                {"kill", SIGKILL, 0, -1},
                {"kill_of_keeper", SIGKILL, 1, 137}};
TEST_P(fsdprun, does_not_come_back, for_good) {
    pid_t pid = start("-n2", "--max-restarts", "5", "sh", "-c",
                      STARTED "test $FSDP_RESTART_COUNT = 0 && exit 1;"
                              "trap 'trap - INT; kill -INT $$' INT; echo ready keeper=$PPID,;"
                              "while :; do sleep 0.05; done",
                      (const char *)NULL);
    read_until("ready", 2);
    kill(row->of_keeper ? number_after("keeper=") : pid, row->sig);
    if (row->status >= 0) CHECK_EQ_INT(finish(pid), row->status);
    else CHECK_EQ_INT(waitpid(pid, NULL, 0), pid);
    CHECK(is_gone(pid, 20000));
    read_output();
    check_starts(2);
}

/* ---- unusual environments -------------------------------------------------------------------- */

static int closed; /* bits of the closed descriptors 0 to 2 */
static void close_some(void) {
    for (int fd = 0; fd < 3; fd++)
        if (closed >> fd & 1) close(fd);
}

/* Whichever descriptor is missing, the output has the reason. */
static rlim_t most_files;
static void limit_files(void) {
    struct rlimit limit = {most_files, most_files};
    (void)setrlimit(RLIMIT_NOFILE, &limit);
}
TEST(fsdprun, too_few_descriptors) {
    prepare = limit_files, most_files = 6; /* smaller numbers fail earlier */
    do {
        CHECK(RUN("-n", "2", "true") != 0);
        most_files++;
    } while (!strstr(output, "[E540]"));
    says("the system cannot start 'true': Too many open files");
}

static const struct {
    const char *name;
    int closed;
} descriptors[] = {{"in", 1},     {"out", 2},     {"err", 4}, {"in_out", 3},
                   {"in_err", 5}, {"out_err", 6}, {"all", 7}};
TEST_P(fsdprun, closed_descriptors, descriptors) {
    char script[600], path[400], text[256];
    closed = row->closed, prepare = close_some;
    snprintf(script, sizeof script,
             "for p in $$ $PPID; do for f in 0 1 2; do readlink /proc/$p/fd/$f; done; done "
             ">%s/fds.$RANK",
             h_tmpdir());
    CHECK_EQ_INT(RUN("-n", "2", "sh", "-c", script), 0);
    for (int r = 0; r < 2; r++) {
        snprintf(path, sizeof path, "%s/fds.%d", h_tmpdir(), r);
        FILE *f = fopen(path, "r");
        CHECK(f != NULL);
        for (int k = 0; k < 6; k++) {
            CHECK(fgets(text, sizeof text, f) != NULL);
            const int null = row->closed >> k % 3 & 1 || (r > 0 && k == 0);
            if (k != 1) /* the script's own */
                CHECK_MSG(!null || !strcmp(text, "/dev/null\n"), "rank %d, %d: %s", r, k, text);
        }
        fclose(f);
    }
    CHECK_EQ_INT(RUN("-n", "2", "sh", "-c", "exit 3"), 3);
    CHECK_EQ_INT(RUN("-n", "2", "/nonexistent/program"), 127);
}

static void ignore_children(void) { signal(SIGCHLD, SIG_IGN); }

/* Opens all allowed descriptors except a few. */
static void open_many(void) {
    struct rlimit limit = {4096, 4096};
    CHECK_EQ_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
    for (int fd = 0; fd >= 0 && fd < 4080;) fd = dup(STDERR_FILENO);
}

static void block_term(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGCHLD);
    sigprocmask(SIG_BLOCK, &set, NULL);
}

static const struct {
    const char *name, *words[6];
    void (*prepare)(void);
} surroundings[] = {{"setsid", {"setsid", "-w"}, NULL},
                    {"nohup", {"nohup"}, NULL},
                    {"timeout", {"timeout", "60"}, NULL},
                    {"timeout_in_front", {"timeout", "--foreground", "60"}, NULL},
                    {"many_descriptors", {NULL}, open_many},
                    {"blocked_signals", {NULL}, block_term},
                    {"children_ignored", {NULL}, ignore_children}};
TEST_P(fsdprun, surroundings, surroundings) {
    in_front = row->words, prepare = row->prepare;
    CHECK_EQ_INT(RUN("-n", "3", "sh", "-c", "sh -c 'exit 0' || exit 1; sleep 0.1; exit 0"), 0);
    CHECK_EQ_STR(output, "");
    CHECK_EQ_INT(
        RUN("-n", "3", "sh", "-c", "test $RANK = 1 && exit 5; sh -c 'exec sleep 1000'; true"), 5);
    says("rank 1 (process ");
    says("failed with exit status 5");
}

static const struct {
    const char *name, *words[8];
    int status;
} timeouts[] = {{"term", {"timeout", "0.5"}, 124},
                {"kill", {"timeout", "-s", "KILL", "0.5"}, -SIGKILL},
                {"in_front", {"timeout", "--foreground", "0.5"}, 124},
                {"kill_in_front", {"timeout", "--foreground", "-s", "KILL", "0.5"}, 137}};
TEST_P(fsdprun, a_timeout_leaves_nothing, timeouts) {
    int status;
    in_front = row->words;
    pid_t pid = start("-n", "2", "sh", "-c", "sh -c 'exec sleep 1000'; true", (const char *)NULL);
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK_EQ_INT(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status), row->status);
    CHECK(is_gone(pid, 20000));
}

/* An unused user id with a limit of few processes. Only root can switch to it, and root has no
   such limit. */
enum { NOBODY = 61234, FEW_PROCESSES = 9 };
static void limit_processes(void) {
    struct rlimit limit = {FEW_PROCESSES, FEW_PROCESSES};
    CHECK(!setgroups(0, NULL) && !setgid(NOBODY) && !setuid(NOBODY));
    CHECK_EQ_INT(setrlimit(RLIMIT_NPROC, &limit), 0);
    if (access(launcher(), X_OK)) _exit(98);
}
TEST(fsdprun, a_fork_that_fails_in_the_middle) {
    if (geteuid()) SKIP("not root");
    prepare = limit_processes;
    const int status = RUN("-n", "30", "sh", "-c", "exec sleep 1000");
    if (status == 98) SKIP("other users cannot execute the launcher");
    CHECK_EQ_INT(status, 1);
    says("cannot fork rank ");
    says("Resource temporarily unavailable");
    CHECK_EQ_INT(count("fsdprun:"), 1);
}

static void allow_no_process(void) {
    struct rlimit limit = {1, 1};
    CHECK(!setgroups(0, NULL) && !setgid(NOBODY + 1) && !setuid(NOBODY + 1));
    CHECK_EQ_INT(setrlimit(RLIMIT_NPROC, &limit), 0);
    if (access(launcher(), X_OK)) _exit(98);
}
TEST(fsdprun, no_fork_at_all) {
    if (geteuid()) SKIP("not root");
    prepare = allow_no_process;
    const int status = RUN("-n", "3", "sh", "-c", "exec sleep 1000");
    if (status == 98) SKIP("other users cannot execute the launcher");
    CHECK_EQ_INT(status, 1);
    says("cannot fork the keeper of the ranks");
}

static char group[200]; /* memory control group of the test; "": none */
static int write_group(const char *name, const char *text) {
    char path[300];
    snprintf(path, sizeof path, "%s/%s", group, name);
    int fd = open(path, O_WRONLY | O_CLOEXEC);
    const int ok = fd >= 0 && write(fd, text, strlen(text)) == (ssize_t)strlen(text);
    if (fd >= 0) close(fd);
    return ok;
}
/* Makes a control group of version 1 or 2 with 32 MiB. Returns 0 if that fails. */
static int make_group(void) {
    static const char *const roots[] = {"/sys/fs/cgroup/memory", "/sys/fs/cgroup"};
    static const char *const limits[] = {"memory.limit_in_bytes", "memory.max"};
    for (int v = 0; v < 2; v++) {
        snprintf(group, sizeof group, "%s/fsdprun-test-%ld", roots[v], (long)getpid());
        if (mkdir(group, 0700)) continue;
        if (write_group(limits[v], "33554432")) {
            if (!write_group("memory.memsw.limit_in_bytes", "33554432"))
                write_group("memory.swap.max", "0");
            return 1;
        }
        rmdir(group);
    }
    return 0;
}
TEST(fsdprun, a_rank_without_memory_is_reported) {
    char script[600];
    if (!make_group()) SKIP("no group of memory can be made here");
    snprintf(script, sizeof script,
             "test $RANK = 1 || exec sleep 1000; echo $$ >%s/cgroup.procs; exec tail /dev/zero",
             group);
    const int status = RUN("-n", "2", "sh", "-c", script);
    rmdir(group);
    CHECK_EQ_INT(status, 128 + SIGKILL);
    says("rank 1 (process ");
    says("was killed by signal 9 (Killed), not by fsdprun: the system has killed ");
    says("for lack of memory since the start\n");
}

TEST(fsdprun, a_reader_that_went_away_is_no_reason_to_end) {
    int fd[2];
    CHECK_EQ_INT(pipe(fd), 0);
    close(fd[0]);
    int saved = dup(STDERR_FILENO);
    char script[600];
    snprintf(script, sizeof script, "exec 2>%s/out; test $RANK = 1 && exit 6; exec sleep 1000",
             h_tmpdir());
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        dup2(fd[1], STDERR_FILENO);
        execl(launcher(), "fsdprun", "-n", "2", "sh", "-c", script, (char *)NULL);
        _exit(99);
    }
    int status;
    close(saved);
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK_MSG(WIFEXITED(status), "signal %d", WTERMSIG(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 6);
}

/* ---- a terminal ------------------------------------------------------------------------------ */

/* A session with its own terminal, whose leader acts as a shell with one job: it obeys orders
   (letters), and reports changes of the job (statuses). */
static int keyboard, orders[2], changes[2];
static pid_t shell;

static void be_launcher(int tty, const char *script) {
    signal(SIGTTOU, SIG_DFL);
    for (int fd = 0; fd < 3; fd++) dup2(tty, fd);
    execl(launcher(), "fsdprun", "-n", "2", "sh", "-c", script, (char *)NULL);
    _exit(99);
}

static void be_shell(const char *slave, const char *script, int is_launcher) {
    char order;
    int status;
    signal(SIGHUP, SIG_DFL), signal(SIGINT, SIG_DFL), signal(SIGQUIT, SIG_DFL); /* after nohup, & */
    signal(SIGTTOU, SIG_IGN);
    setsid();
    close(keyboard);
    int tty = open(slave, O_RDWR); /* becomes the session's terminal */
    if (is_launcher) be_launcher(tty, script);
    pid_t job = fork();
    if (job == 0) {
        setpgid(0, 0);
        tcsetpgrp(tty, getpid());
        be_launcher(tty, script);
    }
    setpgid(job, job);
    for (;;) {
        if (waitpid(job, &status, WUNTRACED) != job) _exit(1);
        if (write(changes[1], &status, sizeof status) != sizeof status) _exit(1);
        if (!WIFSTOPPED(status)) break;
        if (read(orders[0], &order, 1) != 1) _exit(1);
        tcsetpgrp(tty, order == 'f' ? job : getpid()); /* fg or bg */
        kill(-job, SIGCONT);
    }
    if (read(orders[0], &order, 1) != 1) _exit(1);
    _exit(0);
}

static void start_session(const char *script, int is_launcher) {
    CHECK(!pipe2(orders, O_CLOEXEC) && !pipe2(changes, O_CLOEXEC));
    keyboard = posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
    CHECK(keyboard >= 0 && !grantpt(keyboard) && !unlockpt(keyboard));
    fcntl(keyboard, F_SETFL, O_NONBLOCK);
    const char *slave = ptsname(keyboard);
    shell = fork_holding();
    if (shell == 0) be_shell(slave, script, is_launcher);
    close(changes[1]), close(orders[0]);
}

static void start_shell(const char *script) { start_session(script, 0); }

static void type_keys(const char *keys) {
    CHECK_EQ_INT(write(keyboard, keys, strlen(keys)), strlen(keys));
}

/* Reads until the terminal has shown the text `times` times. */
static void shows(const char *part, int times) {
    static size_t length;
    while (count(part) < times) {
        ssize_t n = read(keyboard, output + length, sizeof output - 1 - length);
        if (n > 0) output[length += (size_t)n] = 0;
        else usleep(1000);
    }
}

static int next_change(void) {
    int status = 0;
    struct pollfd p = {changes[0], POLLIN, 0};
    CHECK_EQ_INT(poll(&p, 1, 20000), 1);
    CHECK_EQ_INT(read(changes[0], &status, sizeof status), sizeof status);
    return status;
}

/* The other rank does not fork: a shell in vfork() does not stop, but its child does. */
static const char reads[] = "test $RANK = 1 && { echo other=$$,; exec sleep 1000; };"
                            "echo reader=$$,; while read x; do echo got-$x; done";

TEST(fsdprun, a_terminal_rules_it, SLOW) {
    start_shell(reads);
    shows("reader=", 1), shows("other=", 1);
    const pid_t other = number_after("other=");
    type_keys("one\n");
    shows("got-one", 1);
    type_keys("\x1a"); /* Ctrl-Z stops all */
    CHECK(WIFSTOPPED(next_change()));
    while (state_of(other) != 'T') usleep(1000);
    while (state_of(number_after("reader=")) != 'T') usleep(1000);
    CHECK_EQ_INT(write(orders[1], "f", 1), 1);
    type_keys("two\n");
    shows("got-two", 1);
    type_keys("\x1a");
    CHECK(WIFSTOPPED(next_change()));
    CHECK_EQ_INT(write(orders[1], "b", 1), 1); /* bg: a reader is stopped */
    int status = next_change();
    CHECK(WIFSTOPPED(status) && WSTOPSIG(status) == SIGTTIN);
    CHECK_EQ_INT(write(orders[1], "f", 1), 1);
    type_keys("three\n");
    shows("got-three", 1);
    type_keys("\x03"); /* Ctrl-C ends all */
    status = next_change();
    CHECK(WIFEXITED(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 128 + SIGINT);
    CHECK_EQ_INT(write(orders[1], "x", 1), 1);
    CHECK(is_gone(shell, 20000));
    CHECK_EQ_INT(count("fsdprun:"), 0); /* an expected end */
}

TEST(fsdprun, a_terminal_that_is_closed_ends_it, SLOW) {
    start_shell(reads);
    shows("reader=", 1), shows("other=", 1);
    close(keyboard);
    CHECK(is_gone(shell, 20000));
}

/* As with a terminal emulator that starts a command: the kernel notifies only the session's
   leader. */
TEST(fsdprun, a_closed_terminal_ends_the_leader_of_its_session, SLOW) {
    int status;
    start_session(reads, 1);
    shows("reader=", 1), shows("other=", 1);
    close(keyboard);
    CHECK(is_gone(shell, 20000));
    CHECK_EQ_INT(waitpid(shell, &status, 0), shell);
    CHECK(WIFEXITED(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 128 + SIGHUP);
}

static const struct {
    const char *name, *keys;
    int sig;
} keys[] = {{"INT", "\x03", SIGINT}, {"QUIT", "\x1c", SIGQUIT}};
TEST_P(fsdprun, keys_reach_other_sessions, keys) {
    start_shell("ulimit -c 0; exec setsid sh -c 'echo far=$$,; while :; do sleep 0.02; done'");
    shows("far=", 2);
    type_keys(row->keys);
    int status = next_change();
    CHECK(WIFEXITED(status));
    CHECK_EQ_INT(WEXITSTATUS(status), 128 + row->sig);
    CHECK_EQ_INT(write(orders[1], "x", 1), 1);
    CHECK(is_gone(shell, 20000));
}

/* The terminal signals the processes in the group directly. */
TEST(fsdprun, a_key_is_one_signal) {
    start_shell("n=0; trap 'n=$((n+1)); echo got=$n,' INT; trap 'echo end=$n,; exit 0' QUIT;"
                "echo ready,; while :; do sleep 0.02; done");
    shows("ready,", 2);
    type_keys("\x03");
    shows("got=", 2);
    type_keys("\x1c");
    shows("end=", 2);
    CHECK_EQ_INT(count("end=1,"), 2);
    CHECK(WIFEXITED(next_change()));
    CHECK_EQ_INT(write(orders[1], "x", 1), 1);
    CHECK(is_gone(shell, 20000));
}

TEST(fsdprun, help) {
    CHECK_EQ_INT(RUN("--help"), 0);
    says("usage: fsdprun [-n RANKS]");
    says("--nnodes N ");
    says("--grace SECONDS ");
    says("--max-restarts N ");
    says("128 + N when signal N killed it");
}

/* ---- the store that node 0 serves ------------------------------------------------------------ */

enum { JOB_SIZE = 2 };
typedef struct {
    char job[64], address[64]; /* the launcher's values for its ranks */
    pid_t launcher;
    fsdpi_store *stores[JOB_SIZE];
} served;

static fsdpi_store *join(int rank, int size, const served *s) {
    char error[800];
    fsdpi_store_desc d;
    fsdpi_store *store;
    memset(&d, 0, sizeof d);
    d.boot.rank = rank;
    d.boot.size = size;
    d.boot.timeout_ns = 20000000000;
    d.boot.job = s->job;
    d.boot.store = s->address;
    d.boot.allocator.alloc = fsdpi_libc_alloc, d.boot.allocator.free = fsdpi_libc_free;
    d.boot.clock.now_ns = fsdpi_monotonic_ns;
    CHECK_MSG(!fsdpi_store_open(&d, &store, error, sizeof error), "%s", error);
    return store;
}

/* Starts node 0 of two, whose rank waits for the file "go". This process joins as both ranks of
   the job. */
static void start_node_0(served *s, int port) {
    char master[64], script[600], out[400];
    snprintf(s->job, sizeof s->job, "fsdprun-127.0.0.1:%d", port);
    snprintf(s->address, sizeof s->address, "tcp://127.0.0.1:%d", port);
    snprintf(master, sizeof master, "127.0.0.1:%d", port);
    snprintf(script, sizeof script,
             "echo at $FSDP_STORE served $FSDP_STORE_SERVED.; echo ready;"
             "while ! test -e %s/go; do sleep 0.02; done",
             h_tmpdir());
    snprintf(out, sizeof out, "%s/out", h_tmpdir());
    unlink(out); /* from an earlier launcher */
    s->launcher = start("-n", "1", "--nnodes", "2", "--node-rank", "0", "--master", master, "sh",
                        "-c", script, (const char *)NULL);
    while (read_output(), !count("ready")) usleep(1000);
}

static void end_node_0(const served *s) {
    go();
    CHECK_EQ_INT(finish(s->launcher), 0);
}

static void join_rank(int rank, int size, void *arg) {
    served *s = (served *)arg;
    char value[8] = "";
    size_t bytes = 0;
    s->stores[rank] = join(rank, size, s);
    CHECK_EQ_INT(s->stores[rank]->server_rank, -1); /* the launcher, not rank 0 */
    if (rank == 0) CHECK_OK(fsdpi_store_set(s->stores[0], "key", "value", 6));
    CHECK_OK(fsdpi_store_get(s->stores[rank], "key", value, sizeof value, &bytes, 5000000000));
    CHECK_EQ_STR(value, "value");
}

static void close_all(served *s) {
    for (int r = 0; r < JOB_SIZE; r++) fsdpi_store_close(s->stores[r]);
}

/* After the ranks of node 0 have ended well, those of other nodes continue without a store. */
TEST(fsdprun, node_0_serves_until_its_ranks_end) {
    served s;
    fsdpi_failure failure;
    start_node_0(&s, h_free_port());
    h_ranks_thread(JOB_SIZE, join_rank, &s);
    end_node_0(&s);
    for (int r = 0; r < JOB_SIZE; r++) CHECK(!fsdpi_store_failure(s.stores[r], &failure));
    close_all(&s);
}

/* The launcher is stopped while ranks look for its store: none of them serves one instead. */
static void join_stopped(int rank, int size, void *arg) {
    served *s = (served *)arg;
    if (rank < JOB_SIZE) {
        h_mark(0);
        join_rank(rank, JOB_SIZE, arg);
        return;
    }
    (void)size;
    h_await_marks(0, JOB_SIZE);
    usleep(1300000); /* longer than a rank waits for an untrusted peer */
    CHECK_EQ_INT(kill(s->launcher, SIGCONT), 0);
}
TEST(fsdprun, a_stopped_launcher_is_waited_for, SLOW) {
    served s;
    char text[200];
    const int port = h_free_port();
    start_node_0(&s, port);
    snprintf(text, sizeof text, "served %s %s.\n", s.address, s.job);
    says(text);
    snprintf(text, sizeof text, "%s-%d %s", s.address, port + 16, s.job); /* as on node 1 */
    setenv("FSDP_STORE_SERVED", text, 1);
    CHECK_EQ_INT(kill(s.launcher, SIGSTOP), 0);
    h_ranks_thread(JOB_SIZE + 1, join_stopped, &s);
    end_node_0(&s);
    close_all(&s);
}

/* Two jobs that differ only in their secret, at one HOST and PORT: each has its own store. */
TEST(fsdprun, two_jobs_on_one_port) {
    served s[2];
    const int port = h_free_port();
    char key[16], expected[100];
    for (int i = 0; i < 2; i++) {
        setenv("FSDP_TOKEN", i ? "second" : "first", 1);
        start_node_0(&s[i], port);
    }
    snprintf(expected, sizeof expected, "port %d is taken: ranks meet at 127.0.0.1:", port);
    says(expected);
    for (int i = 0; i < 2; i++) {
        setenv("FSDP_TOKEN", i ? "second" : "first", 1);
        h_ranks_thread(JOB_SIZE, join_rank, &s[i]);
        snprintf(key, sizeof key, "of job %d", i);
        CHECK_OK(fsdpi_store_set(s[i].stores[1], key, key, strlen(key) + 1));
    }
    for (int i = 0; i < 2; i++) {
        char value[16];
        size_t bytes;
        snprintf(key, sizeof key, "of job %d", i);
        CHECK_OK(fsdpi_store_get(s[i].stores[0], key, value, sizeof value, &bytes, 5000000000));
        snprintf(key, sizeof key, "of job %d", !i);
        CHECK_STATUS(fsdpi_store_get(s[i].stores[0], key, value, sizeof value, &bytes, 0),
                     FSDP_ERR_TIMEOUT);
    }
    for (int i = 0; i < 2; i++) end_node_0(&s[i]);
    for (int i = 0; i < 2; i++) close_all(&s[i]);
}

/* ---- ranks and keepers that are stopped ------------------------------------------------------- */

static void stop(pid_t pid) {
    CHECK_EQ_INT(kill(pid, SIGSTOP), 0);
    while (state_of(pid) != 'T') usleep(1000);
}

/* Ranks that are stopped when another one fails are named, and ended. */
static const struct {
    const char *name;
    int stopped; /* ranks 1 to this one */
} stopped_ranks[] = {{"none", 0}, {"one", 1}, {"two", 2}};
TEST_P(fsdprun, stopped_ranks_are_named, stopped_ranks) {
    char word[40], text[200];
    setenv("DIR", h_tmpdir(), 1);
    pid_t pid = start("-n4", "sh", "-c",
                      "echo rank$RANK=$$; while ! test -e $DIR/go; do sleep 0.02; done;"
                      "test $RANK = 3 && exit 5; exec sleep 1000",
                      (const char *)NULL);
    read_until("rank", 4);
    for (int r = 1; r <= row->stopped; r++) {
        snprintf(word, sizeof word, "rank%d=", r);
        stop(number_after(word));
    }
    go();
    CHECK_EQ_INT(finish(pid), 5);
    CHECK_EQ_INT(count("[E565]"), row->stopped > 0);
    if (!row->stopped) return;
    snprintf(
        text, sizeof text, "[E565] rank 1 (process %ld) is stopped%s: it may be what the others",
        (long)number_after("rank1="), row->stopped > 1 ? ", and so are 1 more of this node" : "");
    says(text);
}

/* A process that is stopped is named, not the shell that waits for it. */
TEST(fsdprun, a_stopped_child_of_a_rank_is_named) {
    char text[200];
    setenv("DIR", h_tmpdir(), 1);
    pid_t pid = start("-n2", "sh", "-c",
                      "if test $RANK = 0; then while ! test -e $DIR/go; do sleep 0.02; done;"
                      "exit 5; fi; sh -c 'echo inner=$$; exec sleep 1000'; true",
                      (const char *)NULL);
    read_until("inner=", 1);
    const pid_t inner = number_after("inner=");
    stop(inner);
    go();
    CHECK_EQ_INT(finish(pid), 5);
    snprintf(text, sizeof text, "[E565] rank 1 (process %ld) is stopped: ", (long)inner);
    says(text);
}

/* Returns how often a process has waited. */
static long count_waits(pid_t pid) {
    char path[64], line[128];
    long n = 0;
    snprintf(path, sizeof path, "/proc/%ld/status", (long)pid);
    FILE *f = fopen(path, "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f) && sscanf(line, "voluntary_ctxt_switches: %ld", &n) != 1)
        continue;
    fclose(f);
    return n;
}

/* Returns when a keeper has looked at its ranks and waited that often. */
static void await_waits(pid_t keeper, int times) {
    for (const long begin = count_waits(keeper); count_waits(keeper) < begin + times;)
        usleep(20000);
}

/* Ranks in `ends` end well; others are stopped, except for those in `runs`, or debugged. If only
   stopped ranks are left, and another one has ended, the job ends after its timeout, unless they
   are continued. */
enum { STOPPED, CONTINUED, DEBUGGED };
static const struct {
    const char *name, *ends, *runs, *shell, *timeout_ms;
    int how, is_named;
} last_ranks[] = {{"one", "02", "", "exec sh", "700", STOPPED, 1},
                  {"two", "1", "", "exec sh", "700", STOPPED, 1},
                  {"child", "12", "", "sh", "700", STOPPED, 1},
                  {"continued", "01", "", "exec sh", "600000", CONTINUED, 1},
                  {"all", "", "", "exec sh", "1", CONTINUED, 0},
                  {"another_runs", "0", "2", "exec sh", "1", CONTINUED, 0},
                  {"debugged", "12", "", "exec sh", "1", DEBUGGED, 0}};
TEST_P(fsdprun, only_stopped_ranks_are_left, last_ranks, row->is_named ? 0 : SLOW) {
    char script[600], word[16], text[300];
    pid_t left[3], ends[3];
    int num_left = 0, num_ends = 0, first = -1;
    setenv("FSDP_TIMEOUT_MS", row->timeout_ms, 1);
    setenv("DIR", h_tmpdir(), 1);
    snprintf(script, sizeof script,
             "echo keeper=$PPID,; %s -c 'echo rank$RANK=$$,; case -%s in *$RANK*) f=go;; *) "
             "f=end;; esac; while ! test -e $DIR/$f; do sleep 0.02; done'; exit $?",
             row->shell, row->ends);
    pid_t pid = start("-n3", "sh", "-c", script, (const char *)NULL);
    read_until("rank", 3);
    const pid_t keeper = number_after("keeper=");
    for (int r = 0; r < 3; r++) {
        snprintf(word, sizeof word, "%d", r);
        const int is_left = !strstr(row->ends, word), runs = strstr(row->runs, word) != NULL;
        snprintf(word, sizeof word, "rank%d=", r);
        const pid_t rank = number_after(word);
        if (!is_left) ends[num_ends++] = rank;
        if (!is_left || runs) continue;
        left[num_left++] = rank;
        if (first < 0) first = r;
        if (row->how != DEBUGGED) stop(rank);
        else if (ptrace(PTRACE_ATTACH, rank, NULL, NULL)) SKIP("no process can be debugged here");
        else CHECK_EQ_INT(waitpid(rank, NULL, __WALL), rank);
    }
    go();
    for (int k = 0; k < num_ends; k++)
        while (state_of(ends[k]) != 'X') usleep(1000);
    snprintf(text, sizeof text, "[E495] rank %d (process %ld) is stopped, and all other ranks",
             first, (long)left[0]);
    if (row->is_named) read_until(text, 1);
    else {
        char path[64];
        snprintf(path, sizeof path, "/proc/%ld/fd", (long)keeper);
        await_waits(keeper, 1);
        const int fds = h_entries(path);
        await_waits(keeper, 4);
        CHECK_EQ_INT(h_entries(path), fds);
    }
    close(open(strcat(strcpy(script, getenv("DIR")), "/end"), O_CREAT | O_WRONLY, 0600));
    for (int k = 0; k < num_left && row->how == CONTINUED; k++) kill(left[k], SIGCONT);
    if (row->how == DEBUGGED) CHECK_EQ_INT(ptrace(PTRACE_DETACH, left[0], NULL, NULL), 0);
    CHECK_EQ_INT(finish(pid), row->how == STOPPED);
    CHECK_EQ_INT(count("[E495]"), row->is_named);
    CHECK_EQ_INT(count("[E497]"), row->how == STOPPED);
    CHECK_EQ_INT(count("[E565]"), 0);
    snprintf(text, sizeof text, "[E497] rank %d (process %ld) has been stopped for 0.7 s", first,
             (long)left[0]);
    if (row->how == STOPPED) says(text);
}

/* Time in which the keeper is stopped, too, does not count: a suspended job continues. */
TEST(fsdprun, a_stopped_keeper_does_not_count_time, SLOW) {
    setenv("FSDP_TIMEOUT_MS", "8000", 1);
    setenv("DIR", h_tmpdir(), 1);
    pid_t pid = start("-n2", "sh", "-c",
                      "echo rank$RANK=$$, keeper=$PPID; test $RANK = 0 || "
                      "while ! test -e $DIR/go; do sleep 0.02; done",
                      (const char *)NULL);
    read_until("keeper=", 2);
    const pid_t keeper = number_after("keeper="), rank = number_after("rank1=");
    stop(rank);
    read_until("[E495]", 1);
    stop(keeper);
    for (const int64_t begin = h_now_ms(); h_now_ms() - begin < 9000;) usleep(1000);
    CHECK_EQ_INT(kill(keeper, SIGCONT), 0);
    await_waits(keeper, 1); /* it has looked */
    go();
    CHECK_EQ_INT(kill(rank, SIGCONT), 0);
    CHECK_EQ_INT(finish(pid), 0);
    CHECK_EQ_INT(count("[E497]"), 0);
}

/* Such an end is a failure as others: the ranks are started again, and at last named. */
TEST(fsdprun, a_rank_is_stopped_in_each_start, SLOW) {
    setenv("FSDP_TIMEOUT_MS", "300", 1);
    CHECK_EQ_INT(RUN("-n2", "--max-restarts=1", "sh", "-c",
                     STARTED "test $RANK = 0 || { kill -STOP $$; sleep 1000; }"),
                 1);
    check_starts(2);
    CHECK_EQ_INT(count("[E561]"), 1);
    CHECK_EQ_INT(count("The first failure: [E497] rank 1 (process "), 1);
    CHECK_EQ_INT(count("[E497]"), 3);
}

/* Has this process such a signal, which it has not taken yet? */
static int is_pending(pid_t pid, int sig) {
    char path[64], line[128];
    unsigned long long set = 0;
    snprintf(path, sizeof path, "/proc/%ld/status", (long)pid);
    FILE *f = fopen(path, "r");
    CHECK(f != NULL);
    while (fgets(line, sizeof line, f) && sscanf(line, "ShdPnd: %llx", &set) != 1) continue;
    fclose(f);
    return (int)(set >> (sig - 1) & 1);
}

/* The keeper is stopped when its ranks end: the launcher says so when none of them runs any more.
   If the keeper is continued in time, nothing has happened. */
static const struct {
    const char *name, *timeout_ms;
    int is_continued, fails;
} stopped_keepers[] = {{"and_continued", "60000", 1, 0},
                       {"for_good", "300", 0, 0},
                       {"and_continued_after_a_failure", "60000", 1, 1}};
TEST_P(fsdprun, a_stopped_keeper_is_named, stopped_keepers) {
    char text[1000], path[400];
    setenv("FSDP_TIMEOUT_MS", row->timeout_ms, 1);
    setenv("DIR", h_tmpdir(), 1);
    snprintf(text, sizeof text,
             "trap '' USR1 USR2; echo rank$RANK=$$, keeper=$PPID;"
             "while ! test -e $DIR/go$RANK; do sleep 0.02; done; exit $((RANK * %d))",
             row->fails);
    pid_t pid = start("-n2", "sh", "-c", text, (const char *)NULL);
    read_until("keeper=", 2);
    const pid_t keeper = number_after("keeper=");
    const pid_t ranks[] = {number_after("rank0="), number_after("rank1=")};
    stop(keeper);
    for (int r = 1; r >= 0; r--) {
        snprintf(path, sizeof path, "%s/go%d", h_tmpdir(), r);
        close(open(path, O_CREAT | O_WRONLY, 0600));
        while (state_of(ranks[r]) != 'Z') usleep(1000);
        for (int sig = SIGUSR1; r && sig <= SIGUSR2; sig += SIGUSR2 - SIGUSR1) {
            kill(pid, sig); /* between the two it looks at the keeper */
            while (!is_pending(keeper, sig)) usleep(1000);
        }
        if (r) CHECK_EQ_INT((read_output(), count("[E566]")), 0);
    }
    snprintf(
        text, sizeof text,
        "[E566] process %ld, which looks after the ranks, is stopped, and no rank of this node "
        "runs: continue it (kill -CONT %ld)",
        (long)keeper, (long)keeper);
    read_until(text, 1);
    if (row->is_continued) CHECK_EQ_INT(kill(keeper, SIGCONT), 0);
    CHECK_EQ_INT(finish(pid), row->is_continued ? row->fails : 137);
    CHECK_EQ_INT(count("[E566]"), 1);
    snprintf(text, sizeof text,
             "[E548] process %ld, which looks after the ranks, was killed by signal 9",
             (long)keeper);
    CHECK_EQ_INT(count(text), !row->is_continued);
}

TEST(fsdprun, the_launchers_death_is_reported) {
    served s;
    fsdpi_failure failure;
    start_node_0(&s, h_free_port());
    h_ranks_thread(JOB_SIZE, join_rank, &s);
    kill(s.launcher, SIGKILL);
    int64_t begin = h_calm_ms();
    for (int r = 0; r < JOB_SIZE; r++) {
        while (!fsdpi_store_failure(s.stores[r], &failure)) {
            CHECK(h_calm_ms() - begin < 1000);
            usleep(1000);
        }
        CHECK_STATUS(failure.status, FSDP_ERR_PEER_LOST);
        CHECK_MSG(strstr(failure.reason, "the launcher"), "%s", failure.reason);
    }
    close_all(&s);
    waitpid(s.launcher, NULL, 0);
}

TEST(fsdprun, a_port_that_is_taken) {
    served s;
    char expected[200];
    struct sockaddr_in a;
    socklen_t size = sizeof a;
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    CHECK(fd >= 0 && !bind(fd, (struct sockaddr *)&a, size) && !listen(fd, 9));
    CHECK(!getsockname(fd, (struct sockaddr *)&a, &size));
    const int port = ntohs(a.sin_port);
    start_node_0(&s, port);
    snprintf(expected, sizeof expected, "port %d is taken: ranks meet at 127.0.0.1:", port);
    says(expected);
    const int found = atoi(strstr(output, expected) + strlen(expected));
    CHECK(found > port && found <= port + 16);
    snprintf(expected, sizeof expected, "at tcp://127.0.0.1:%d served tcp://127.0.0.1:%d %s.\n",
             found, found, s.job); /* its ranks get the address */
    says(expected);
    h_ranks_thread(JOB_SIZE, join_rank, &s); /* other ranks find it among the possible ports */
    end_node_0(&s);
    close_all(&s);
}

/* If --master is no address of node 0, it logs that and its addresses before it waits. */
static const struct {
    const char *name, *master;
    int is_own;
} places[] = {{"documentation", "192.0.2.1", 0},
              {"documentation_ipv6", "2001:db8::1", 0},
              {"loopback", "127.0.0.1", 1},
              {"name_of_loopback", "localhost", 1},
              {"all", "0.0.0.0", 1}};
static void check_addresses(void) {
    struct ifaddrs *all = NULL;
    char host[64];
    int others = 0;
    CHECK_EQ_INT(getifaddrs(&all), 0);
    for (struct ifaddrs *i = all; i; i = i->ifa_next) {
        if (!i->ifa_addr || i->ifa_addr->sa_family != AF_INET) continue;
        const uint32_t v4 = ntohl(((struct sockaddr_in *)(void *)i->ifa_addr)->sin_addr.s_addr);
        snprintf(host, sizeof host, "%u.%u.%u.%u", v4 >> 24, v4 >> 16 & 255, v4 >> 8 & 255,
                 v4 & 255);
        others += v4 >> 24 != 127;
        CHECK_EQ_INT(strstr(output, host) != NULL, v4 >> 24 != 127);
    }
    freeifaddrs(all);
    if (!others) h_message("this host has only loopback addresses of IPv4");
}
TEST_P(fsdprun, a_master_that_is_elsewhere, places) {
    char text[100], address[64];
    setenv("FSDP_TIMEOUT_MS", "100", 1);
    snprintf(address, sizeof address, strchr(row->master, ':') ? "[%s]:%d" : "%s:%d", row->master,
             h_free_port());
    snprintf(text, sizeof text, "fsdprun: [E564] --master %s is no address of this host",
             row->master);
    /* no other node comes, which a later error says */
    CHECK_EQ_INT(
        RUN("-n1", "--nnodes=2", "--node-rank=0", "--master", address, "--max-restarts=1", "true"),
        1);
    says("[E559]");
    CHECK_EQ_INT(strncmp(output, text, strlen(text)) == 0, !row->is_own);
    CHECK_EQ_INT(count("[E564]"), !row->is_own);
    if (!row->is_own) check_addresses();
    /* without restarts the job runs nevertheless: the network may forward that address */
    CHECK_EQ_INT(RUN("-n1", "--nnodes=1", "--master", address, "true"), 0);
    CHECK_EQ_INT(count("[E564]"), !row->is_own);
    CHECK_EQ_INT(RUN("-n1", "--nnodes=2", "--node-rank=1", "--master", address, "true"), 0);
    CHECK_EQ_INT(count("[E564]"), 0); /* not expected from another node */
}

/* ---- a job of two nodes that is started again ------------------------------------------------ */

static int nodes_port;

static pid_t start_node_with(int node, const char *ranks, const char *restarts, const char *program,
                             const char *script) {
    char rank[8], address[64];
    appends = 1;
    snprintf(rank, sizeof rank, "%d", node);
    snprintf(address, sizeof address, "127.0.0.1:%d", nodes_port);
    return start("-n", ranks, "--nnodes=2", "--node-rank", rank, "--master", address,
                 "--max-restarts", restarts, program, "-c", script, (const char *)NULL);
}

static pid_t start_node(int node, const char *program, const char *script) {
    return start_node_with(node, "2", "2", program, script);
}

/* This process meets the fsdprun of the other node, as this one. */
static fsdpi_store *join_as_node(int node) {
    served s;
    snprintf(s.job, sizeof s.job, "fsdprun-127.0.0.1:%d:nodes", nodes_port);
    snprintf(s.address, sizeof s.address, "tcp://127.0.0.1:%d", nodes_port);
    return join(node, 2, &s);
}

/* Returns a script for ranks: prints the start, the rank and the job's id, and ends when "go"
   exists. */
static const char *until_go(void) {
    static char script[600];
    snprintf(script, sizeof script,
             "echo rank$RANK.$FSDP_RESTART_COUNT=$$, keeper$GROUP_RANK=$PPID, "
             "start=$FSDP_RESTART_COUNT id=$FSDP_JOB_ID.; while ! test -e %s/go; do sleep 0.02;"
             "done",
             h_tmpdir());
    return script;
}

/* Starts both nodes, and waits until their ranks have printed their lines. Node `patient` has more
   time than timeout_ms; -1: none. */
static void start_nodes(pid_t *nodes, const char *timeout_ms, int patient) {
    nodes_port = h_free_port();
    setenv("FSDP_TOKEN", "mine", 1);
    for (int k = 0; k < 2; k++) {
        setenv("FSDP_TIMEOUT_MS", k == patient ? "600000" : timeout_ms, 1);
        nodes[k] = start_node(k, "sh", until_go());
    }
    read_until("start=0", 4);
}

/* Checks that all ranks of all nodes have been started again, once, with a new name. */
static void end_second_start(const pid_t *nodes) {
    char id[64];
    read_until("start=1", 4);
    go();
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(finish(nodes[k]), 0);
    snprintf(id, sizeof id, "id=fsdprun-127.0.0.1:%d:r1.\n", nodes_port);
    CHECK_EQ_INT(count(id), 4);
    CHECK_EQ_INT(count("start=2"), 0);
}

static const struct {
    const char *name;
    int rank;
} of_nodes[] = {
    {"first_of_node_0", 0}, {"last_of_node_0", 1}, {"first_of_node_1", 2}, {"last_of_node_1", 3}};
TEST_P(fsdprun, nodes_come_back_when_a_rank_fails, of_nodes) {
    pid_t nodes[2];
    char text[80];
    start_nodes(nodes, "60000", -1);
    snprintf(text, sizeof text, "rank%d.0=", row->rank);
    CHECK_EQ_INT(kill(number_after(text), SIGKILL), 0);
    end_second_start(nodes);
    snprintf(text, sizeof text, "fsdprun: [E541] rank %d (process ", row->rank);
    says(text);
    snprintf(text, sizeof text, "fsdprun: [E558] on node %d: [E541] rank %d (", row->rank / 2,
             row->rank);
    says(text);
}

/* A lost node needs only the same command again. */
static const struct {
    const char *name;
    int node, of_keeper;
} lost_nodes[] = {
    {"node_0", 0, 0}, {"node_1", 1, 0}, {"keeper_of_node_0", 0, 1}, {"keeper_of_node_1", 1, 1}};
static void kill_node(int node, int of_keeper, pid_t *nodes) {
    char text[80];
    snprintf(text, sizeof text, "keeper%d=", node);
    CHECK_EQ_INT(kill(of_keeper ? number_after(text) : nodes[node], SIGKILL), 0);
    CHECK_EQ_INT(waitpid(nodes[node], NULL, 0), nodes[node]);
    CHECK(is_gone(nodes[node], 20000));
    snprintf(text, sizeof text, "[E557] the fsdprun of node %d has ended or is cut off", node);
    read_until(text, 1);
}
TEST_P(fsdprun, a_node_comes_back, lost_nodes) {
    pid_t nodes[2];
    start_nodes(nodes, "60000", -1);
    kill_node(row->node, row->of_keeper, nodes);
    nodes[row->node] = start_node(row->node, "sh", until_go());
    end_second_start(nodes);
}

TEST_P(fsdprun, a_node_does_not_come_back, lost_nodes) {
    pid_t nodes[2];
    char text[120];
    start_nodes(nodes, "700", -1);
    kill_node(row->node, row->of_keeper, nodes);
    CHECK_EQ_INT(finish(nodes[!row->node]), 1);
    says("[E559] the fsdpruns of the 2 nodes have not met within 0.7 s");
    snprintf(text, sizeof text,
             "[E563] the job has ended after 1 restarts. The first failure: [E557] the fsdprun of "
             "node %d",
             row->node);
    says(text);
    CHECK_EQ_INT(count("start=1"), 0);
}

TEST_P(fsdprun, a_node_that_comes_back_knows_the_first_failure, lost_nodes) {
    pid_t nodes[2];
    char text[100];
    start_nodes(nodes, "60000", -1);
    kill_node(row->node, row->of_keeper, nodes);
    nodes[row->node] = start_node(row->node, "sh", until_go());
    for (int start = 1; start <= 2; start++) {
        snprintf(text, sizeof text, "start=%d", start);
        read_until(text, 4);
        snprintf(text, sizeof text, "rank%d.%d=", 2 * !row->node, start); /* the other node */
        CHECK_EQ_INT(kill(number_after(text), SIGKILL), 0);
    }
    for (int k = 0; k < 2; k++) CHECK(finish(nodes[k]) != 0);
    snprintf(text, sizeof text, "The first failure: [E557] the fsdprun of node %d", row->node);
    CHECK_EQ_INT(count(text), 2);
    CHECK_EQ_INT(count("[E561] the job has failed after 2 restarts"), 2);
}

/* A node with a new restart count is lost before ranks start: all other nodes know the count by
   then, and none has started ranks. This process is node 1, twice. */
TEST(fsdprun, a_count_outlives_the_node_that_brought_it) {
    char value[64];
    size_t bytes = 0;
    nodes_port = h_free_port();
    setenv("FSDP_TOKEN", "mine", 1);
    go();
    pid_t pid = start_node(0, "sh", until_go());
    for (int time = 0; time < 2; time++) {
        fsdpi_store *store = join_as_node(1);
        const char *mine = time ? "0 " : "1 [E541] of old";
        CHECK_OK(fsdpi_store_set(store, "count.1", mine, strlen(mine)));
        CHECK_OK(fsdpi_store_get(store, "agreed.0", value, sizeof value, &bytes, 20000000000));
        CHECK_OK(fsdpi_store_get(store, "count.0", value, sizeof value - 1, &bytes, 20000000000));
        value[bytes] = 0;
        CHECK_EQ_STR(value, time ? "1 [E541] of old" : "0 ");
        if (time == 0) fsdpi_store_abort(store, FSDP_ERR_TIMEOUT, "", "of the test");
        else {
            CHECK_OK(fsdpi_store_set(store, "agreed.1", "", 0));
            CHECK_OK(fsdpi_store_set(store, "done.1", "", 0));
            CHECK_OK(fsdpi_store_get(store, "done.0", value, sizeof value, &bytes, 20000000000));
        }
        fsdpi_store_close(store);
    }
    CHECK_EQ_INT(finish(pid), 0);
    CHECK_EQ_INT(count("start=1"), 2);
    CHECK_EQ_INT(count("start="), 2);
}

/* Node 1, which this process is, has the counts of all, begins and fails, while node 0 waits for it
   still. Node 0 says so, and does not wait for its deadline. */
static const struct {
    const char *name;
    fsdp_status status;
    int comes_back;
} failed_early[] = {{"for_good", FSDP_ERR_INVALID_STATE, 0}, {"comes_back", FSDP_ERR_ABORTED, 1}};
TEST_P(fsdprun, a_node_that_fails_while_others_agree, failed_early) {
    char value[64];
    size_t bytes;
    nodes_port = h_free_port();
    setenv("FSDP_TOKEN", "mine", 1);
    go();
    pid_t pid = start_node(0, "sh", until_go());
    for (int time = 0; time <= row->comes_back; time++) {
        fsdpi_store *store = join_as_node(1);
        snprintf(value, sizeof value, "%d ", time);
        CHECK_OK(fsdpi_store_set(store, "count.1", value, 2));
        CHECK_OK(fsdpi_store_get(store, "agreed.0", value, sizeof value, &bytes, 20000000000));
        if (time == 0) fsdpi_store_abort(store, row->status, "", "[E542] of the test");
        else {
            CHECK_OK(fsdpi_store_set(store, "agreed.1", "", 0));
            CHECK_OK(fsdpi_store_set(store, "done.1", "", 0));
            CHECK_OK(fsdpi_store_get(store, "done.0", value, sizeof value, &bytes, 20000000000));
        }
        fsdpi_store_close(store);
    }
    CHECK_EQ_INT(finish(pid), !row->comes_back);
    CHECK_EQ_INT(count("fsdprun: [E558] on node 1: [E542] of the test\n"), 1);
    CHECK_EQ_INT(count("[E560]"),
                 row->comes_back); /* told by what the test said, not by a deadline */
    CHECK_EQ_INT(count("[E559]"), 0);
    CHECK_EQ_INT(count("start="), 2 * row->comes_back);
}

/* The fsdprun of one node is stopped, and the other node's ranks have ended: after a timeout a
   log line names the stopped node. When it continues, the job is started again. Its own node has
   more time: otherwise that would kill it (E566) just when it continues. */
static const struct {
    const char *name;
    int node;
} stopped_nodes[] = {{"node_0", 0}, {"node_1", 1}};
TEST_P(fsdprun, a_stopped_node_is_named, stopped_nodes, SLOW) {
    pid_t nodes[2];
    char text[100];
    start_nodes(nodes, "4000", row->node);
    snprintf(text, sizeof text, "keeper%d=", row->node);
    const pid_t keeper = number_after(text);
    stop(keeper);
    go();
    snprintf(text, sizeof text, "[E562] the fsdprun of node %d has given no sign of life",
             row->node);
    read_until(text, 1);
    snprintf(text, sizeof text, "and node %d waits for the end of its ranks", !row->node);
    says(text);
    CHECK_EQ_INT(kill(keeper, SIGCONT), 0);
    end_second_start(nodes);
}

TEST(fsdprun, a_timeout_that_is_no_number) {
    setenv("FSDP_TIMEOUT_MS", "1h", 1);
    CHECK_EQ_INT(
        RUN("-n1", "--nnodes=2", "--node-rank=0", "--master=127.0.0.1", "--max-restarts=1", "true"),
        2);
    says("[E509] variable FSDP_TIMEOUT_MS is '1h', expected an integer from 1 to ");
}

/* A node that has ended well starts again if another node fails later. */
TEST(fsdprun, a_node_that_has_ended_well_comes_back) {
    pid_t nodes[2];
    setenv("DIR", h_tmpdir(), 1);
    nodes_port = h_free_port();
    for (int k = 0; k < 2; k++)
        nodes[k] = start_node(k, "sh",
                              "echo rank$RANK=$$, start=$FSDP_RESTART_COUNT id=$FSDP_JOB_ID.;"
                              "test $GROUP_RANK.$FSDP_RESTART_COUNT = 1.0 || exit 0;"
                              "while ! test -e $DIR/go; do sleep 0.02; done; exit 5");
    read_until("start=0", 4);
    while (state_of(number_after("rank0=")) != 'X' || state_of(number_after("rank1=")) != 'X')
        usleep(1000);
    go();
    end_second_start(nodes);
}

TEST(fsdprun, nodes_fail_each_time) {
    pid_t nodes[2];
    setenv("DIR", h_tmpdir(), 1);
    nodes_port = h_free_port();
    for (int k = 0; k < 2; k++)
        nodes[k] = start_node(k, "sh",
                              "echo start=$FSDP_RESTART_COUNT; test $RANK = 3 || exec sleep 1000;"
                              "while test $(grep -c start=$FSDP_RESTART_COUNT $DIR/out) -lt 4; do "
                              "sleep 0.02; done; exit $((FSDP_RESTART_COUNT + 3))");
    CHECK_EQ_INT(finish(nodes[1]), 3);
    CHECK_EQ_INT(finish(nodes[0]), 1);
    CHECK_EQ_INT(count("start="), 12);
    CHECK_EQ_INT(count("[E561] the job has failed after 2 restarts"), 2);
    CHECK_EQ_INT(count("The first failure: [E542] rank 3 ("), 1);
    CHECK_EQ_INT(count("The first failure: [E558] on node 1: [E542] rank 3 ("), 1);
    CHECK_EQ_INT(count("exit status 3\n"), 4);
}

/* A restart would not help: the other node does not wait for this one. */
TEST(fsdprun, a_node_that_cannot_start_ends_all) {
    pid_t nodes[2];
    nodes_port = h_free_port();
    nodes[0] = start_node(0, "sh", "sleep 1000");
    nodes[1] = start_node(1, "/no/such/program", "");
    CHECK_EQ_INT(finish(nodes[1]), 127);
    CHECK_EQ_INT(finish(nodes[0]), 1);
    says("[E558] on node 1: its fsdprun could not start the ranks");
    CHECK_EQ_INT(count("started again"), 0);
}
static const struct {
    const char *name;
    int node;
} ended_nodes[] = {{"node_0", 0}, {"node_1", 1}};
TEST_P(fsdprun, who_ends_a_node_ends_all, ended_nodes) {
    pid_t nodes[2];
    char text[80];
    start_nodes(nodes, "60000", -1);
    kill(nodes[row->node], SIGTERM);
    CHECK_EQ_INT(finish(nodes[row->node]), 143);
    CHECK_EQ_INT(finish(nodes[!row->node]), 1);
    snprintf(text, sizeof text, "[E558] on node %d: the user has ended its fsdprun", row->node);
    says(text);
    CHECK_EQ_INT(count("started again"), 0);
}

/* Node 1 has not arrived. */
static const struct {
    const char *name;
    int sig;
} meeting[] = {{"term", SIGTERM}, {"interrupt", SIGINT}, {"kill", SIGKILL}};
TEST_P(fsdprun, ends_while_nodes_meet, meeting) {
    struct sockaddr_in a;
    int fd, status;
    nodes_port = h_free_port();
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    a.sin_port = htons((uint16_t)nodes_port);
    pid_t pid = start_node(0, "sh", "");
    for (int there = 0; !there; close(fd)) {
        fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        there = !connect(fd, (struct sockaddr *)&a, sizeof a);
        if (!there) usleep(1000);
    }
    kill(pid, row->sig);
    CHECK_EQ_INT(waitpid(pid, &status, 0), pid);
    CHECK_EQ_INT(WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status), 128 + row->sig);
    CHECK(is_gone(pid, 20000));
}

/* ---- two nodes whose job does not come back --------------------------------------------------- */

/* The job ends on the other node, which this process is: the rank of this one ends, too, even if it
   is stopped and alone, so that no failure of its own ends it. */
enum { FAILS, VANISHES, LEAVES };
static const struct {
    const char *name;
    int node, end, is_stopped;
} ends_of_others[] = {
    {"node_0/failure/stopped", 0, FAILS, 1},  {"node_1/failure/stopped", 1, FAILS, 1},
    {"node_0/failure/runs", 0, FAILS, 0},     {"node_1/vanishes/stopped", 1, VANISHES, 1},
    {"node_0/vanishes/runs", 0, VANISHES, 0}, {"node_1/leaves", 1, LEAVES, 0},
    {"node_0/leaves", 0, LEAVES, 0},
};
TEST_P(fsdprun, the_end_of_another_node, ends_of_others) {
    char text[200];
    nodes_port = h_free_port();
    setenv("FSDP_TOKEN", "mine", 1);
    pid_t pid = start_node_with(row->node, "1", "0", "sh", until_go());
    read_until("start=0", 1);
    snprintf(text, sizeof text, "rank%d.0=", row->node);
    const pid_t rank = number_after(text);
    if (row->is_stopped) stop(rank);
    fsdpi_store *store = join_as_node(!row->node);
    if (row->end == FAILS) fsdpi_store_abort(store, FSDP_ERR_ABORTED, "", "[E541] of the test");
    if (row->end == VANISHES) shutdown(store->fd, SHUT_RDWR);
    if (row->end != LEAVES) CHECK_EQ_INT(finish(pid), 1);
    fsdpi_store_close(store);
    if (row->end == LEAVES) {
        go();
        CHECK_EQ_INT(finish(pid), 0);
    }
    snprintf(text, sizeof text, "fsdprun: [E558] on node %d: [E541] of the test\n", !row->node);
    CHECK_EQ_INT(count(text), row->end == FAILS);
    snprintf(text, sizeof text, "fsdprun: [E557] the fsdprun of node %d has ended", !row->node);
    CHECK_EQ_INT(count(text), row->end == VANISHES);
    snprintf(text, sizeof text, "fsdprun: [E565] rank %d (process %ld) is stopped: ", row->node,
             (long)rank);
    CHECK_EQ_INT(count(text), row->is_stopped);
}

/* The ranks of the other node, which this process is, end well, and the rank of this one is stopped.
   Without restarts the other node leaves, otherwise it waits. */
static const struct {
    const char *name, *restarts;
    int node;
} left_nodes[] = {{"node_0", "0", 0},
                  {"node_1", "0", 1},
                  {"node_0/restarts", "1", 0},
                  {"node_1/restarts", "1", 1}};
TEST_P(fsdprun, only_a_stopped_rank_is_left_of_two_nodes, left_nodes,
       *row->restarts == '0' ? 0 : SLOW) {
    char text[200], key[32];
    size_t bytes;
    const int waits = *row->restarts != '0', other = !row->node;
    fsdpi_failure failure;
    fsdpi_store *store = NULL;
    nodes_port = h_free_port();
    setenv("FSDP_TOKEN", "mine", 1);
    setenv("FSDP_TIMEOUT_MS", waits ? "6000" : "700", 1); /* nodes meet within it */
    pid_t pid = start_node_with(row->node, "1", row->restarts, "sh", until_go());
    if (waits) {
        store = join_as_node(other);
        snprintf(key, sizeof key, "count.%d", other);
        CHECK_OK(fsdpi_store_set(store, key, "0 ", 2));
        snprintf(key, sizeof key, "agreed.%d", other);
        CHECK_OK(fsdpi_store_set(store, key, "", 0));
    }
    read_until("start=0", 1);
    snprintf(text, sizeof text, "rank%d.0=", row->node);
    const pid_t rank = number_after(text);
    stop(rank);
    if (!waits) store = join_as_node(other);
    snprintf(key, sizeof key, "keeper%d=", row->node);
    await_waits(number_after(key), 12);
    CHECK_EQ_INT((read_output(), count("[E495]")), 0); /* the other node runs */
    snprintf(key, sizeof key, "done.%d", other);
    if (waits) CHECK_OK(fsdpi_store_set(store, key, "", 0));
    else fsdpi_store_close(store);
    snprintf(text, sizeof text, "[E497] rank %d (process %ld) has been stopped for %s s", row->node,
             (long)rank, waits ? "6.0" : "0.7");
    if (waits) { /* the other node learns why all are started again */
        bytes = 0;
        CHECK_STATUS(fsdpi_store_get(store, "never", key, sizeof key, &bytes, 60000000000),
                     FSDP_ERR_ABORTED);
        CHECK(fsdpi_store_failure(store, &failure));
        CHECK_EQ_INT(strncmp(failure.reason, text, strlen(text)), 0);
        fsdpi_store_close(store);
    }
    CHECK_EQ_INT(finish(pid), 1);
    says(text);
    CHECK_EQ_INT(count("[E497]"), 1 + waits); /* E563 repeats it */
    CHECK_EQ_INT(count("[E560]"), waits);
}

/* Only stopped ranks are left on both nodes: none waits for the other for ever. */
static const struct {
    const char *name, *restarts;
    int first; /* the node whose rank is stopped first */
} both_nodes[] = {{"node_0_first", "0", 0}, {"node_1_first", "0", 1}, {"restarts", "1", 0}};
TEST_P(fsdprun, only_stopped_ranks_are_left_of_both_nodes, both_nodes,
       *row->restarts == '0' ? 0 : SLOW) {
    pid_t nodes[2], ranks[2];
    char text[100];
    const int restarts = *row->restarts != '0';
    nodes_port = h_free_port();
    setenv("FSDP_TOKEN", "mine", 1);
    setenv("FSDP_TIMEOUT_MS", restarts ? "6000" : "700", 1); /* nodes meet within it */
    for (int k = 0; k < 2; k++) nodes[k] = start_node_with(k, "1", row->restarts, "sh", until_go());
    read_until("start=0", 2);
    for (int k = 0; k < 2; k++) {
        snprintf(text, sizeof text, "rank%d.0=", k);
        ranks[k] = number_after(text);
    }
    stop(ranks[row->first]);
    snprintf(text, sizeof text, "keeper%d=", row->first);
    await_waits(number_after(text), 12);
    CHECK_EQ_INT((read_output(), count("[E495]")), 0); /* the other node runs */
    stop(ranks[!row->first]);
    if (restarts) {
        read_until("start=1", 2);
        go();
    }
    for (int k = 0; k < 2; k++) CHECK_EQ_INT(finish(nodes[k]), !restarts);
    says("[E497] rank ");
    CHECK(count("fsdprun: [E497]") <= 2);
    CHECK_EQ_INT(count("fsdprun: [E497]") + count("fsdprun: [E558]"), 2);
    CHECK_EQ_INT(count("[E560]"), 2 * restarts);
}

/* A node tells the other, which this process is, that only stopped ranks are left, and that one was
   continued. It heeds the same of the other node: then the time counts from the start. */
static const struct {
    const char *name;
    int node;
} telling_nodes[] = {{"node_0", 0}, {"node_1", 1}};
static void await_value(fsdpi_store *store, int node, char expected) {
    char key[32], value[8] = "";
    size_t bytes;
    snprintf(key, sizeof key, "stopped.%d", node);
    while (*value != expected) {
        CHECK_OK(fsdpi_store_get(store, key, value, sizeof value, &bytes, 60000000000));
        usleep(1000);
    }
}
TEST_P(fsdprun, nodes_tell_that_only_stopped_ranks_are_left, telling_nodes) {
    char text[100], key[32];
    nodes_port = h_free_port();
    setenv("FSDP_TOKEN", "mine", 1);
    setenv("FSDP_TIMEOUT_MS", "600000", 1);
    pid_t pid = start_node_with(row->node, "1", "0", "sh", until_go());
    fsdpi_store *store = join_as_node(!row->node);
    read_until("start=0", 1);
    snprintf(text, sizeof text, "rank%d.0=", row->node);
    const pid_t rank = number_after(text);
    snprintf(text, sizeof text, "keeper%d=", row->node);
    const pid_t keeper = number_after(text);
    snprintf(key, sizeof key, "stopped.%d", !row->node);
    for (int round = 1; round <= 2; round++) {
        stop(rank);
        await_value(store, row->node, '1');
        await_waits(keeper, 12);
        CHECK_EQ_INT((read_output(), count("[E495]")), round - 1); /* the other node runs */
        CHECK_OK(fsdpi_store_set(store, key, "1", 1));
        read_until("[E495]", round);
        if (round == 2) break;
        CHECK_OK(fsdpi_store_set(store, key, "0", 1));
        CHECK_EQ_INT(kill(rank, SIGCONT), 0);
        await_value(store, row->node, '0');
    }
    fsdpi_store_close(store);
    go();
    CHECK_EQ_INT(kill(rank, SIGCONT), 0);
    CHECK_EQ_INT(finish(pid), 0);
    CHECK_EQ_INT(count("[E497]"), 0);
}
