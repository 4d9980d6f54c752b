/* fsdprun.c - start a program once per rank and look after all of them: on this host, or, one
   fsdprun on each, on several.

       cc -O2 -o fsdprun tools/fsdprun.c -pthread -lm
       ./fsdprun -n 4 ./trainer --steps 100
       ./fsdprun -n 4 --nnodes 2 --node-rank 0 --master node-a ./trainer    on node-a; 1 on another

   The environment of each rank is what torchrun gives: RANK, WORLD_SIZE, LOCAL_RANK,
   LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT; and FSDP_JOB_ID and FSDP_STORE: where
   ranks meet. The fsdprun of node 0 serves there, so that the death of any rank is told to the
   others; FSDP_STORE_SERVED says so. FSDP_TOKEN keeps others out. See usage() for the rest. Linux.

   SPDX-License-Identifier: MIT */
#define _GNU_SOURCE
#define FSDP_IMPLEMENTATION // the store is a part of it
#define FSDP_STATIC
#define FSDP_NO_BACKEND
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" // the rest of it
#include "../fsdp.h"
#include "../backends/fsdp_store.h"
#pragma GCC diagnostic pop
#include <arpa/inet.h>  // htonl, ntohs
#include <errno.h>      // errno
#include <fcntl.h>      // open, fcntl
#include <netinet/in.h> // sockaddr_in
#include <sched.h>      // sched_getaffinity
#include <signal.h>     // kill, sigtimedwait
#include <stdio.h>      // fprintf
#include <stdlib.h>     // setenv, strtol
#include <string.h>     // strerror, strsignal
#include <sys/prctl.h>  // prctl: ranks end with this program
#include <sys/random.h> // getrandom
#include <sys/socket.h> // socket: a free port
#include <sys/wait.h>   // waitpid
#include <time.h>       // clock_gettime
#include <unistd.h>     // fork, execvp

enum { RANKS_MAX = 4096, NODES_MAX = 4096, PORT = 29500 };
enum { GRACE_MS = 100, KILL_MS = 1000, EXIT_USAGE = 2, EXIT_NO_PROGRAM = 127 };

// What is to be started, and what became of it.
typedef struct job {
    int ranks, nodes, node; // ranks: of this node
    char host[256];         // of node 0, "": there is but this one
    int port;
    const char *name;
    char **argv, id[128], store[300];
    pid_t pids[RANKS_MAX]; // 0: has ended
    int status, quiet;     // of the first failure, 0: none; quiet: the user wants the end
    int done, first_done;  // ranks that ended with 0, and the first of them
    fsdpi_store_server *server;
} job;

static void usage(FILE *to) {
    fprintf(
        to,
        "usage: fsdprun [-n RANKS] [--] PROGRAM [ARGUMENT...]\n"
        "       fsdprun -n RANKS --nnodes N --node-rank K --master HOST[:PORT] PROGRAM...\n"
        "\n"
        "Starts PROGRAM once per rank on this host, with RANK, WORLD_SIZE, LOCAL_RANK,\n"
        "LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT, FSDP_JOB_ID and FSDP_STORE in "
        "its\n"
        "environment.\n"
        "\n"
        "  -n RANKS   how many, 1 to %d; default: one per core. Also --nproc-per-node RANKS\n"
        "  -h, --help this text\n"
        "\n"
        "Several hosts: the same command on each, but for the node's rank.\n"
        "  --nnodes N            how many; each has RANKS ranks\n"
        "  --node-rank K         which of them this one is, 0 to N-1\n"
        "  --master HOST[:PORT]  node 0, as the others reach it; default of PORT: %d. Ranks meet\n"
        "                        there, at the first free port of PORT to PORT+16\n"
        "  --job NAME            tells jobs apart that have the same HOST and PORT\n"
        "Set FSDP_TOKEN to a secret, the same on all of them: who knows it can take part in the\n"
        "job. On one host it is random if it is not set.\n"
        "\n"
        "Rank 0 keeps the standard input; the others read nothing. INT, TERM, HUP, QUIT, USR1 and\n"
        "USR2 are passed on to all ranks. When a rank fails it is named, the others get TERM and,\n"
        "after a second, KILL.\n"
        "\n"
        "Exit status: 0 when every rank ended with 0; else that of the first rank that failed, or\n"
        "128 + N when signal N killed it; %d: PROGRAM could not be started; %d: wrong usage\n",
        RANKS_MAX, PORT, EXIT_NO_PROGRAM, EXIT_USAGE);
}

static long now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (long)t.tv_sec * 1000 + t.tv_nsec / 1000000;
}

static int cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
}

/* ---- what the user wants --------------------------------------------------------------------- */

static int complain(const char *format, ...) __attribute__((format(printf, 1, 2)));
static int complain(const char *format, ...) {
    char text[1200]; // one write: ranks speak at the same time
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    fprintf(stderr, "fsdprun: %s\n", text);
    return EXIT_USAGE;
}

static int number(const char *option, const char *text, long min, long max, int *out) {
    char *end;
    long value = strtol(text, &end, 10);
    *out = (int)value;
    if (*text && !*end && value >= min && value <= max) return 0;
    return complain("[E530] %s '%s': expected a number from %ld to %ld", option, text, min, max);
}

// HOST, HOST:PORT, [IPV6]:PORT, or an IPv6 address alone.
static int master(job *j, const char *text) {
    const char *colon = strrchr(text, ':'), *end = text + strlen(text);
    int bracket = *text == '[', bare = colon && !bracket && strchr(text, ':') != colon;
    if (colon && !bare && (!bracket || colon[-1] == ']')) {
        if (number("--master: port", colon + 1, 1, 65535, &j->port)) return EXIT_USAGE;
        end = colon;
    }
    int length = (int)(end - text) - 2 * bracket;
    if (length < 1 || length >= (int)sizeof j->host || bracket != (end[-1] == ']'))
        return complain("[E531] --master '%s': expected HOST or HOST:PORT", text);
    snprintf(j->host, sizeof j->host, "%.*s", length, text + bracket);
    return 0;
}

// The value of the option `name` in argv[*i] or behind it; NULL: another option.
static const char *option(const char *name, char **argv, int *i) {
    const size_t length = strlen(name);
    const char *rest = argv[*i] + length;
    if (strncmp(argv[*i], name, length) != 0) return NULL;
    if (!*rest) return argv[*i + 1] ? argv[++*i] : "";
    if (length == 2) return rest; // -n4
    return *rest == '=' ? rest + 1 : NULL;
}

// Reads the options. Returns the index of the program's name; below 0: minus the exit status.
static int read_options(job *j, int argc, char **argv, int *help) {
    const char *v, *node = NULL, *nodes = NULL;
    int i = 1, bad = 0;
    for (; i < argc && argv[i][0] == '-' && !bad; i++) {
        if (!strcmp(argv[i], "--")) {
            i++;
            break;
        }
        *help = !strcmp(argv[i], "-h") || !strcmp(argv[i], "--help");
        if (*help) return 0;
        if ((v = option("--nproc-per-node", argv, &i)) || (v = option("-n", argv, &i)))
            bad = number("-n", v, 1, RANKS_MAX, &j->ranks);
        else if ((v = option("--nnodes", argv, &i)))
            bad = number("--nnodes", nodes = v, 1, NODES_MAX, &j->nodes);
        else if ((v = option("--node-rank", argv, &i))) node = v;
        else if ((v = option("--master", argv, &i))) bad = master(j, v);
        else if ((v = option("--job", argv, &i))) j->name = v;
        else bad = complain("[E532] unknown option '%s'; --help explains", argv[i]);
    }
    if (!bad && !nodes && (node || *j->host))
        bad = complain("[E533] %s needs --nnodes N", node ? "--node-rank" : "--master");
    if (!bad && node) bad = number("--node-rank", node, 0, j->nodes - 1, &j->node);
    if (!bad && j->nodes > 1 && (!node || !*j->host || !j->ranks))
        bad = complain(
            "[E534] --nnodes %d needs %s: run the same command on all nodes, but for --node-rank",
            j->nodes,
            !j->ranks ? "-n RANKS (of each node)"
            : !node   ? "--node-rank K (from 0; which node this is)"
                      : "--master HOST (node 0, as the others reach it)");
    if (!bad && i >= argc) {
        bad = complain("[E535] no program was given: name it behind the options");
        usage(stderr);
    }
    if (!j->ranks) j->ranks = cores();
    return bad ? -bad : i;
}

/* ---- what ranks get -------------------------------------------------------------------------- */

// A TCP port that nobody uses now; programs that need MASTER_PORT open it soon.
static int free_port(void) {
    struct sockaddr_in a;
    socklen_t size = sizeof a;
    int port = 0, fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    memset(&a, 0, sizeof a);
    a.sin_family = AF_INET;
    a.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (fd >= 0 && !bind(fd, (struct sockaddr *)&a, sizeof a) &&
        !getsockname(fd, (struct sockaddr *)&a, &size))
        port = ntohs(a.sin_port);
    if (fd >= 0) close(fd);
    return port;
}

static void set_number(const char *name, long value) {
    char text[32];
    snprintf(text, sizeof text, "%ld", value);
    setenv(name, text, 1);
}

/* The job's name, equal on all nodes, and where its ranks meet: on one host a socket that has the
   job's name, which takes no port. */
static int name_job(job *j) {
    struct timespec t;
    int used;
    clock_gettime(CLOCK_REALTIME, &t);
    if (*j->host) used = snprintf(j->id, sizeof j->id, "fsdprun-%s:%d", j->host, j->port);
    else
        used = snprintf(j->id, sizeof j->id, "fsdprun-%ld-%lld.%09ld", (long)getpid(),
                        (long long)t.tv_sec, t.tv_nsec);
    if (j->name && used < (int)sizeof j->id)
        used += snprintf(j->id + used, sizeof j->id - (size_t)used, "-%s", j->name);
    const char *v6 = strchr(j->host, ':');
    if (*j->host)
        snprintf(j->store, sizeof j->store, "tcp://%s%s%s:%d", v6 ? "[" : "", j->host,
                 v6 ? "]" : "", j->port);
    else snprintf(j->store, sizeof j->store, "host:");
    if (used < (int)sizeof j->id) return 0;
    return complain("[E536] the names of --master and --job are together longer than %d bytes",
                    (int)sizeof j->id - 1);
}

static void set_environment(const job *j) {
    setenv("FSDP_JOB_ID", j->id, 1);
    setenv("FSDP_STORE", j->store, 1);
    setenv("MASTER_ADDR", *j->host ? j->host : "127.0.0.1", 1);
    set_number("MASTER_PORT", *j->host ? j->port : free_port());
    set_number("WORLD_SIZE", (long)j->nodes * j->ranks);
    set_number("LOCAL_WORLD_SIZE", j->ranks);
    set_number("GROUP_RANK", j->node);
    unsetenv("TORCHELASTIC_USE_AGENT_STORE"); // of a torchrun around this job
}

/* What only programs of this job know. On several hosts it has to come from the user: what one
   fsdprun makes up no other one knows. Without a random number there is none, and ranks warn. */
static void set_token(const job *j) {
    const char *given = getenv("FSDP_TOKEN");
    unsigned char random[32];
    char text[2 * sizeof random + 1];
    if (j->nodes > 1 || (given && *given) ||
        getrandom(random, sizeof random, GRND_NONBLOCK) != (ssize_t)sizeof random)
        return;
    for (size_t i = 0; i < sizeof random; i++) snprintf(text + 2 * i, 3, "%02x", random[i]);
    setenv("FSDP_TOKEN", text, 1);
}

/* Says to the ranks that the fsdprun of node 0 serves, so that none of them does. There the place
   is known; on other nodes it may be behind PORT. */
static void say_served(const job *j) {
    char store[sizeof j->store + 8], text[sizeof j->store + sizeof j->id + 32];
    unsetenv("FSDP_STORE_SERVED"); // of an fsdprun around this job
    if (j->node == 0 && !j->server) return;
    snprintf(store, sizeof store, "%s", j->store);
    if (j->server && *j->host) {
        snprintf(strrchr(store, ':'), 8, ":%d", fsdpi_store_port(j->server));
        setenv("FSDP_STORE", store, 1);
    }
    if (j->server) snprintf(text, sizeof text, "%s %s", store, j->id);
    else snprintf(text, sizeof text, "%s-%d %s", store, j->port + FSDPI_STORE_PORTS - 1, j->id);
    setenv("FSDP_STORE_SERVED", text, 1);
}

// Node 0 serves for all. Returns 0, or the exit status when ranks could not meet.
static int serve(job *j) {
    fsdpi_store_desc d;
    char error[800] = "";
    memset(&d, 0, sizeof d);
    d.boot.size = j->nodes * j->ranks;
    d.boot.job = j->id;
    d.boot.store = j->store;
    d.boot.allocator.alloc = fsdpi_libc_alloc;
    d.boot.allocator.free = fsdpi_libc_free;
    d.boot.clock.now_ns = fsdpi_monotonic_ns;
    if (j->node > 0) return 0;
    // On one host many programs never ask for it, and rank 0 of those that do can serve as well.
    if (fsdpi_store_serve(&d, &j->server, error, sizeof error))
        return *j->host ? (complain("%s", error), 1) : 0;
    if (*j->host && fsdpi_store_port(j->server) != j->port)
        complain("[E537] port %d is taken: ranks meet at %s:%d", j->port, j->host,
                 fsdpi_store_port(j->server));
    return 0;
}

/* ---- their life ------------------------------------------------------------------------------ */

// In the child; does not return. errors: a pipe that exec closes.
static void become_rank(int local, pid_t parent, int errors, char **argv) {
    sigset_t none;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    if (local > 0) {
        int null = open("/dev/null", O_RDONLY);
        dup2(null, STDIN_FILENO);
        close(null);
    }
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execvp(argv[0], argv);
    int error = errno;
    ssize_t done = write(errors, &error, sizeof error);
    (void)done;
    _exit(EXIT_NO_PROGRAM);
}

static void signal_all(const job *j, int sig) {
    for (int r = 0; r < j->ranks; r++)
        if (j->pids[r] > 0) kill(j->pids[r], sig);
}

// Starts all ranks. Returns 0, or the exit status when that is not possible.
static int start(job *j) {
    int errors[2], error = 0, failed = 0;
    pid_t parent = getpid();
    if (pipe2(errors, O_CLOEXEC))
        return complain("[E538] the system cannot make a pipe: %s", strerror(errno)), 1;
    for (int r = 0; r < j->ranks && !failed; r++) {
        set_number("RANK", (long)j->node * j->ranks + r); // here: the child of threads sets nothing
        set_number("LOCAL_RANK", r);
        j->pids[r] = fork();
        if (j->pids[r] == 0) become_rank(r, parent, errors[1], j->argv);
        if (j->pids[r] < 0) {
            complain("[E539] the system cannot fork rank %d: %s", j->node * j->ranks + r,
                     strerror(errno));
            failed = 1;
        }
    }
    close(errors[1]);
    // Ends when every child has either called exec or said why it could not.
    if (!failed && read(errors[0], &error, sizeof error) == (ssize_t)sizeof error) {
        complain("[E540] the system cannot start '%s': %s", j->argv[0], strerror(error));
        failed = EXIT_NO_PROGRAM;
    }
    close(errors[0]);
    if (!failed) return 0;
    signal_all(j, SIGKILL);
    for (int r = 0; r < j->ranks; r++)
        if (j->pids[r] > 0) waitpid(j->pids[r], NULL, 0);
    return failed;
}

/* The first failure. A rank that ended with 0 too early is no failure here, but may be what the
   others failed of. */
static void tell(const job *j, int r, pid_t pid, int how) {
    const int base = j->node * j->ranks;
    char before[100] = "";
    if (j->quiet) return;
    if (j->done == 1)
        snprintf(before, sizeof before, "; rank %d had ended before, with 0", base + j->first_done);
    if (j->done > 1)
        snprintf(before, sizeof before, "; %d ranks had ended before, with 0, rank %d as the first",
                 j->done, base + j->first_done);
    if (WIFSIGNALED(how))
        complain("[E541] rank %d (process %ld) was killed by signal %d (%s)%s", base + r, (long)pid,
                 WTERMSIG(how), strsignal(WTERMSIG(how)), before);
    else
        complain("[E542] rank %d (process %ld) failed with exit status %d%s", base + r, (long)pid,
                 WEXITSTATUS(how), before);
}

// Reaps who has ended. Of failures that are seen at the same time a death is the first one: an exit
// status may be the answer to it. Returns how many ranks are left.
static int reap(job *j) {
    int left = 0, worst = -1, worst_how = 0, how;
    pid_t pid = 0;
    for (int r = 0; r < j->ranks; r++) {
        if (j->pids[r] <= 0) continue;
        if (waitpid(j->pids[r], &how, WNOHANG) != j->pids[r]) {
            left++;
            continue;
        }
        if (how == 0 && j->done++ == 0) j->first_done = r;
        if (how && (worst < 0 || (WIFSIGNALED(how) && !WIFSIGNALED(worst_how))))
            worst = r, worst_how = how, pid = j->pids[r];
        j->pids[r] = 0;
    }
    if (worst < 0 || j->status) return left;
    j->status = WIFSIGNALED(worst_how) ? 128 + WTERMSIG(worst_how) : WEXITSTATUS(worst_how);
    tell(j, worst, pid, worst_how);
    return left;
}

static void look_after(job *j, const sigset_t *signals) {
    int step = 0;
    long since = 0;
    while (reap(j)) {
        struct timespec slice = {1, 0};
        siginfo_t info;
        if (j->status && !since) since = now_ms();
        long age = j->status ? now_ms() - since : -1;
        // Ranks that notice the failure themselves have a moment to say where they were.
        if (step == 0 && age >= GRACE_MS) step = 1, signal_all(j, SIGTERM);
        if (step == 1 && age >= GRACE_MS + KILL_MS) step = 2, signal_all(j, SIGKILL);
        if (j->status) slice.tv_sec = 0, slice.tv_nsec = 10000000;
        int sig = sigtimedwait(signals, &info, &slice);
        if (sig <= 0 || sig == SIGCHLD) continue;
        if (sig != SIGUSR1 && sig != SIGUSR2) j->quiet = 1;
        // What a terminal sends goes to the ranks as well; who uses kill means only this program.
        if (info.si_code <= 0) signal_all(j, sig);
    }
}

// Blocked, so that none is lost between two looks; the ranks get them unblocked. What our parent
// has told us to ignore (nohup), we and the ranks ignore.
static void block_signals(sigset_t *signals) {
    static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD};
    signal(SIGCHLD, SIG_DFL); // else nobody could be waited for
    sigemptyset(signals);
    for (size_t s = 0; s < sizeof forwarded / sizeof forwarded[0]; s++) {
        struct sigaction action;
        if (!sigaction(forwarded[s], NULL, &action) && action.sa_handler != SIG_IGN)
            sigaddset(signals, forwarded[s]);
    }
    sigprocmask(SIG_BLOCK, signals, NULL);
}

int main(int argc, char **argv) {
    static job j;
    int help = 0;
    sigset_t signals;
    j.nodes = 1, j.port = PORT;
    int program = read_options(&j, argc, argv, &help);
    if (help) return usage(stdout), 0;
    if (program < 0) return -program;
    j.argv = argv + program;
    int failed = name_job(&j);
    if (failed) return failed;
    block_signals(&signals);
    set_environment(&j);
    set_token(&j);
    failed = serve(&j);
    say_served(&j);
    if (!failed) failed = start(&j);
    if (!failed) look_after(&j, &signals);
    fsdpi_store_stop(j.server);
    return failed ? failed : j.status;
}
