/* fsdprun.c - start a program once per rank on this host and look after all of them.

       cc -O2 -o fsdprun fsdprun.c && ./fsdprun -n 4 ./trainer --steps 100

   The environment of each rank is what torchrun gives: RANK, WORLD_SIZE, LOCAL_RANK,
   LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT; and FSDP_JOB_ID. See usage() for the rest. Linux. */
#define _GNU_SOURCE
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
#include <sys/socket.h> // socket: a free port
#include <sys/wait.h>   // waitpid
#include <time.h>       // clock_gettime
#include <unistd.h>     // fork, execvp

enum { RANKS_MAX = 4096, GRACE_MS = 100, KILL_MS = 1000, EXIT_USAGE = 2, EXIT_NO_PROGRAM = 127 };

static void usage(FILE *to) {
    fprintf(
        to,
        "usage: fsdprun [-n RANKS] [--] PROGRAM [ARGUMENT...]\n"
        "\n"
        "Starts PROGRAM once per rank on this host, with RANK, WORLD_SIZE, LOCAL_RANK,\n"
        "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and FSDP_JOB_ID in its environment.\n"
        "\n"
        "  -n RANKS   how many, 1 to %d; default: one per core\n"
        "  -h, --help this text\n"
        "\n"
        "Rank 0 keeps the standard input; the others read nothing. INT, TERM, HUP, QUIT, USR1 and\n"
        "USR2 are passed on to all ranks. When a rank fails it is named, the others get TERM and,\n"
        "after a second, KILL.\n"
        "\n"
        "Exit status: 0 when every rank ended with 0; else that of the first rank that failed, or\n"
        "128 + N when signal N killed it; %d: PROGRAM could not be started; %d: wrong usage\n",
        RANKS_MAX, EXIT_NO_PROGRAM, EXIT_USAGE);
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

// A TCP port that nobody uses now; programs that need MASTER_PORT open it soon.
static int free_port(void) {
    struct sockaddr_in a;
    socklen_t size = sizeof a;
    int port = 0, fd = socket(AF_INET, SOCK_STREAM, 0);
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

// In the child; does not return. errors: a pipe that exec closes.
static void become_rank(int rank, int ranks, pid_t parent, int errors, char **argv) {
    sigset_t none;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    if (rank > 0) {
        int null = open("/dev/null", O_RDONLY);
        dup2(null, STDIN_FILENO);
        close(null);
    }
    set_number("RANK", rank);
    set_number("WORLD_SIZE", ranks);
    set_number("LOCAL_RANK", rank);
    set_number("LOCAL_WORLD_SIZE", ranks);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    execvp(argv[0], argv);
    int error = errno;
    ssize_t done = write(errors, &error, sizeof error);
    (void)done;
    _exit(EXIT_NO_PROGRAM);
}

static void signal_all(const pid_t *pids, int ranks, int sig) {
    for (int r = 0; r < ranks; r++)
        if (pids[r] > 0) kill(pids[r], sig);
}

// Starts all ranks. Returns 0, or the exit status when that is not possible.
static int start(pid_t *pids, int ranks, char **argv) {
    int errors[2], error = 0, failed = 0;
    pid_t parent = getpid();
    struct timespec t;
    char id[64];
    clock_gettime(CLOCK_REALTIME, &t);
    snprintf(id, sizeof id, "fsdprun-%ld-%lld.%09ld", (long)parent, (long long)t.tv_sec, t.tv_nsec);
    setenv("FSDP_JOB_ID", id, 1);
    setenv("MASTER_ADDR", "127.0.0.1", 1);
    set_number("MASTER_PORT", free_port());
    if (pipe2(errors, O_CLOEXEC)) {
        fprintf(stderr, "fsdprun: pipe: %s\n", strerror(errno));
        return 1;
    }
    for (int r = 0; r < ranks && !failed; r++) {
        pids[r] = fork();
        if (pids[r] == 0) become_rank(r, ranks, parent, errors[1], argv);
        if (pids[r] < 0) {
            fprintf(stderr, "fsdprun: rank %d could not be forked: %s\n", r, strerror(errno));
            failed = 1;
        }
    }
    close(errors[1]);
    // Ends when every child has either called exec or said why it could not.
    if (!failed && read(errors[0], &error, sizeof error) == (ssize_t)sizeof error) {
        fprintf(stderr, "fsdprun: cannot start '%s': %s\n", argv[0], strerror(error));
        failed = EXIT_NO_PROGRAM;
    }
    close(errors[0]);
    if (!failed) return 0;
    signal_all(pids, ranks, SIGKILL);
    for (int r = 0; r < ranks; r++)
        if (pids[r] > 0) waitpid(pids[r], NULL, 0);
    return failed;
}

// Reaps who has ended; the first failure is named, unless the user has asked for the end.
static int reap(pid_t *pids, int ranks, int stopping, int *failed) {
    int left = 0, how;
    for (int r = 0; r < ranks; r++) {
        if (pids[r] <= 0) continue;
        if (waitpid(pids[r], &how, WNOHANG) != pids[r]) {
            left++;
            continue;
        }
        int code = WIFSIGNALED(how) ? 128 + WTERMSIG(how) : WEXITSTATUS(how);
        if (code && !*failed) {
            *failed = code;
            if (WIFSIGNALED(how) && !stopping)
                fprintf(stderr, "fsdprun: rank %d (process %ld) was killed by signal %d (%s)\n", r,
                        (long)pids[r], WTERMSIG(how), strsignal(WTERMSIG(how)));
            else if (!stopping)
                fprintf(stderr, "fsdprun: rank %d (process %ld) failed with exit status %d\n", r,
                        (long)pids[r], code);
        }
        pids[r] = 0;
    }
    return left;
}

static int look_after(pid_t *pids, int ranks, const sigset_t *signals) {
    int failed = 0, stopping = 0, step = 0;
    long since = 0;
    while (reap(pids, ranks, stopping, &failed)) {
        struct timespec slice = {1, 0};
        siginfo_t info;
        if (failed && !since) since = now_ms();
        long age = failed ? now_ms() - since : -1;
        // Ranks that notice the failure themselves have a moment to say where they were.
        if (step == 0 && age >= GRACE_MS) step = 1, signal_all(pids, ranks, SIGTERM);
        if (step == 1 && age >= GRACE_MS + KILL_MS) step = 2, signal_all(pids, ranks, SIGKILL);
        if (failed) slice.tv_sec = 0, slice.tv_nsec = 10000000;
        int sig = sigtimedwait(signals, &info, &slice);
        if (sig <= 0 || sig == SIGCHLD) continue;
        if (sig != SIGUSR1 && sig != SIGUSR2) stopping = 1;
        // What a terminal sends goes to the ranks as well; who uses kill means only this program.
        if (info.si_code <= 0) signal_all(pids, ranks, sig);
    }
    return failed;
}

int main(int argc, char **argv) {
    static pid_t pids[RANKS_MAX];
    static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD};
    long ranks = 0;
    int i = 1;
    for (; i < argc && argv[i][0] == '-'; i++) {
        const char *value = argv[i] + 2;
        char *end;
        if (!strcmp(argv[i], "--")) {
            i++;
            break;
        }
        if (!strcmp(argv[i], "-h") || !strcmp(argv[i], "--help")) {
            usage(stdout);
            return 0;
        }
        if (strncmp(argv[i], "-n", 2)) {
            fprintf(stderr, "fsdprun: unknown option '%s'; --help explains\n", argv[i]);
            return EXIT_USAGE;
        }
        if (!*value) value = i + 1 < argc ? argv[++i] : "";
        ranks = strtol(value, &end, 10);
        if (!*value || *end || ranks < 1 || ranks > RANKS_MAX) {
            fprintf(stderr, "fsdprun: -n '%s': expected a number from 1 to %d\n", value, RANKS_MAX);
            return EXIT_USAGE;
        }
    }
    if (i >= argc) {
        fprintf(stderr, "fsdprun: which program?\n");
        usage(stderr);
        return EXIT_USAGE;
    }
    if (!ranks) ranks = cores();

    // Blocked, so that none is lost between two looks; the ranks get them unblocked.
    sigset_t signals;
    sigemptyset(&signals);
    for (size_t s = 0; s < sizeof forwarded / sizeof forwarded[0]; s++)
        sigaddset(&signals, forwarded[s]);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    signal(SIGCHLD, SIG_DFL); // a parent may have ignored it, and then nobody could be waited for
    int failed = start(pids, (int)ranks, argv + i);
    return failed ? failed : look_after(pids, (int)ranks, &signals);
}
