/* fsdprun.c - start a program once per rank and look after all of them: on this host, or, one
   fsdprun on each, on several.

       cc -O2 -o fsdprun tools/fsdprun.c -pthread -lm
       ./fsdprun -n 4 ./trainer --steps 100
       ./fsdprun -n 4 --nnodes 2 --node-rank 0 --master node-a ./trainer    on node-a; 1 on another

   The environment of each rank is what torchrun gives: RANK, WORLD_SIZE, LOCAL_RANK,
   LOCAL_WORLD_SIZE, GROUP_RANK, MASTER_ADDR, MASTER_PORT; and FSDP_JOB_ID and FSDP_STORE: where
   ranks meet. The fsdprun of node 0 serves there, so that all ranks learn of a rank that dies;
   FSDP_STORE_SERVED says so. FSDP_TOKEN keeps others out. See usage() for the rest. Linux.

   It is two processes. The launcher is what the user has started; its child, the keeper, starts
   the ranks and looks after them. Each adopts the orphans below it: whichever of the two is killed,
   the other one finds all that is left, children of wrappers too, and ends it. Both and all ranks
   are in the process group in which the user has started them, so that a terminal treats them as
   any job: Ctrl-C, Ctrl-Z, reading.

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
#include <dirent.h>     // opendir: processes
#include <errno.h>      // errno
#include <fcntl.h>      // open, fcntl
#include <limits.h>     // LONG_MAX
#include <netinet/in.h> // sockaddr_in
#include <sched.h>      // sched_getaffinity
#include <signal.h>     // kill, sigtimedwait
#include <stdio.h>      // fprintf
#include <stdlib.h>     // setenv, strtol
#include <string.h>     // strerror, strsignal
#include <sys/prctl.h>  // prctl: ranks end with this program, orphans come to it
#include <sys/random.h> // getrandom
#include <sys/socket.h> // socket: a free port
#include <sys/wait.h>   // waitpid
#include <time.h>       // clock_gettime
#include <unistd.h>     // fork, execvp

enum { RANKS_MAX = 4096, NODES_MAX = 4096, PORT = 29500, COUNT_BYTES = 12 };
enum { MOMENT_MS = 100, LOOK_MS = 1000, GRACE_MS = 1000, ASKED_MS = 30000, HUNG_MS = 10000 };
enum { NODES_MS = 2000 };
#define KEEPER "rank-keeper" // what the keeper is called
enum { EXIT_USAGE = 2, EXIT_NO_PROGRAM = 127 };

// A job: what to start, and the state of its ranks.
typedef struct job {
    int ranks, nodes, node;  // ranks: of this node
    int max_restarts, count; // count: how often the job was started again
    char host[256];          // address of node 0; "": there is one node
    int port;
    const char *name;
    char **argv, base[128], id[128], store[300]; // base: the job's name, without the count
    char first[700];                             // text of the first failure of all starts
    int first_status;                            // its exit status
    fsdpi_store *nodes_store; // where the fsdpruns of all nodes meet; NULL: not joined
    fsdpi_store *joined;      // by a thread; look_at_nodes moves it to nodes_store
    uint32_t is_joining;      // the thread runs
    uint32_t jumps;           // jumps of its clock past all deadlines, to give up
    int timeout_ms;           // FSDP_TIMEOUT_MS: how long it waits for the fsdpruns of others
    int is_final;             // 1: another node says that a restart cannot help
    pid_t launcher;           // process id of the launcher
    pid_t pids[RANKS_MAX];    // 0: has ended
    int left;                 // ranks that run
    int status, quiet;        // status of the first failure, 0: none; quiet: the user asked to end
    int asked;                // the last signal that asked to end, or 0
    int done, first_done;     // ranks that ended with 0, and the first of them
    int failed, failed_how;   // the local rank that failed first, -1: none; its wait status
    long looked_at;           // when look_for_stopped looked last
    int is_shown;             // 1: the other nodes know that only stopped ranks are left here
    long stopped_ms;          // how long it has found that only stopped ranks are left
    pid_t failed_pid;         // its process id
    long failed_at;           // when a rank failed first
    int grace;                // seconds from TERM to KILL, -1: not said
    long term_at, kill_at;    // when these are due, NEVER: not yet or no more
    long killed_at;           // 0: KILL was not sent
    long oom_kills;           // OOM kills of the system before the ranks started
    fsdpi_store_server *server;
} job;
#define NEVER      LONG_MAX
#define FOREVER_NS 1000000000000000LL // more than a week

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
        "  -n RANKS         how many, 1 to %d; default: one per core. Also -np RANKS, as mpirun,\n"
        "                   and --nproc-per-node RANKS, as torchrun\n"
        "  --grace SECONDS  from TERM to KILL; default: %d after a failure, %d when the user sends "
        "TERM\n"
        "  --max-restarts N when a rank fails: start all ranks of the job again, on all nodes, at\n"
        "                   most N times (default: 0). FSDP_RESTART_COUNT says how often that was\n"
        "                   done. Give all nodes the same N\n"
        "  -h, --help       this text\n"
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
        "Rank 0 keeps the standard input; the others read nothing. When a rank fails it is named;\n"
        "0.1 s after the failure all other processes of the job get TERM, and KILL when the grace\n"
        "is over.\n"
        "Processes that ranks have left behind end with the job in the same way.\n"
        "\n"
        "INT, TERM, HUP and QUIT are passed on to all processes of the job, USR1 and USR2 to the\n"
        "ranks themselves. TERM is followed by KILL when the grace is over. When fsdprun itself "
        "is\n"
        "killed, all of them are killed.\n"
        "\n"
        "Exit status: 0 when every rank ended with 0; else that of the first rank that failed, or\n"
        "128 + N when signal N killed it (130 after Ctrl-C, 137: killed, 143: terminated);\n"
        "%d: PROGRAM could not be started; %d: wrong usage; 1: the system refused something\n",
        RANKS_MAX, GRACE_MS / 1000, ASKED_MS / 1000, PORT, EXIT_NO_PROGRAM, EXIT_USAGE);
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
    char text[1200]; // one write, because ranks write at the same time
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

// Reads HOST, HOST:PORT, [IPV6]:PORT or an IPv6 address without a port.
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

// Returns the value of the option `name`: the rest of argv[*i], or the next word. Returns NULL if
// argv[*i] is another option.
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
        if ((v = option("--nproc-per-node", argv, &i)) || (v = option("-np", argv, &i)) ||
            (v = option("-n", argv, &i)))
            bad = number("-n", v, 1, RANKS_MAX, &j->ranks);
        else if ((v = option("--grace", argv, &i))) bad = number("--grace", v, 0, 86400, &j->grace);
        else if ((v = option("--max-restarts", argv, &i)))
            bad = number("--max-restarts", v, 0, 1000000, &j->max_restarts);
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
        bad = complain("[E535] no program was given: name it after the options");
        usage(stderr);
    }
    if (!j->ranks) j->ranks = cores();
    return bad ? -bad : i;
}

/* ---- what ranks get -------------------------------------------------------------------------- */

// Returns a TCP port that nobody uses now; programs that need MASTER_PORT open it soon.
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

// Makes the job's name, equal on all nodes, and the place where its ranks meet: on one host a
// socket that has the job's name, which takes no port.
static int name_job(job *j) {
    struct timespec t;
    fsdpi_text name = {j->base, sizeof j->base, 0};
    clock_gettime(CLOCK_REALTIME, &t);
    if (*j->host) fsdpi_text_add(&name, "fsdprun-%s:%d", j->host, j->port);
    else
        fsdpi_text_add(&name, "fsdprun-%ld-%lld.%09ld", (long)getpid(), (long long)t.tv_sec,
                       t.tv_nsec);
    if (j->name) fsdpi_text_add(&name, "-%s", j->name);
    fsdpi_add_restarts(&name); // restarts of an enclosing launcher
    const char *v6 = strchr(j->host, ':');
    if (*j->host)
        snprintf(j->store, sizeof j->store, "tcp://%s%s%s:%d", v6 ? "[" : "", j->host,
                 v6 ? "]" : "", j->port);
    else snprintf(j->store, sizeof j->store, "host:");
    const size_t room = sizeof j->base - (j->max_restarts ? COUNT_BYTES : 0);
    if (name.used < room) return 0;
    return complain("[E536] the names of --master and --job are together longer than %d bytes",
                    (int)room - 1);
}

// Sets the environment of the ranks. The name of this start has its count, so that ranks of an
// earlier one do not meet these.
static void set_environment(job *j) {
    memcpy(j->id, j->base, sizeof j->id);
    if (j->count) snprintf(j->id + strlen(j->id), COUNT_BYTES, ":r%d", j->count);
    setenv("FSDP_JOB_ID", j->id, 1);
    set_number("FSDP_RESTART_COUNT", j->count);
    setenv("FSDP_STORE", j->store, 1);
    setenv("MASTER_ADDR", *j->host ? j->host : "127.0.0.1", 1);
    set_number("MASTER_PORT", *j->host ? j->port : free_port());
    set_number("WORLD_SIZE", (long)j->nodes * j->ranks);
    set_number("LOCAL_WORLD_SIZE", j->ranks);
    set_number("GROUP_RANK", j->node);
    setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0); // see backends/fsdp_nccl.h
    // An enclosing launcher has set these; they would make this job a part of it
    // (fsdpi_launcher_within).
    unsetenv("TORCHELASTIC_USE_AGENT_STORE");
    unsetenv("TORCHELASTIC_RUN_ID");
    for (const fsdpi_launcher *l = fsdpi_launchers + 1; l < fsdpi_launchers_end; l++)
        if (!l->is_manager) unsetenv(l->local);
}

// Sets how long this process waits for others: as long as a rank waits. Returns 0, or the exit
// status.
static int set_timeout(job *j) {
    char error[300] = "";
    fsdpi_text t = {error, sizeof error, 0};
    j->timeout_ms = 60000;
    if (!fsdpi_env_int("FSDP_TIMEOUT_MS", 1, INT_MAX, &j->timeout_ms, &t)) return 0;
    return complain("%s", error);
}

/* Warns early if no address of --master is one of this host: ranks of other nodes may not find it.
   The job continues, because the network may forward that address to this host. */
static void check_master(const job *j) {
    fsdp_clock clock = {fsdpi_monotonic_ns, NULL};
    fsdpi_store_where where;
    fsdpi_store_place list[FSDPI_STORE_PLACES], place;
    char own[400] = "";
    fsdpi_text none = {NULL, 0, 0}, t = {own, sizeof own, 0};
    if (j->node || !*j->host || !fsdpi_store_parse(j->store, &where)) return;
    const int count = fsdpi_store_lookup(&clock, where.host, INT64_MAX, list, FSDPI_STORE_PLACES,
                                         &none);
    const int fd = fsdpi_store_claim(&where, list, count, 0, 0, &place);
    const int is_far = count && fd < 0 && fsdpi_store_not_here(errno);
    if (fd >= 0) close(fd);
    if (!is_far) return;
    fsdpi_store_say_own(&t);
    complain("[E564] --master %s is no address of this host, which is node 0 and has %s: ranks "
             "meet here, and other nodes find this host only if the network forwards that address "
             "to it. Else give all nodes an address of this one, or --node-rank 0 to the host that "
             "has it",
             j->host, own);
}

/* Sets FSDP_TOKEN, which only programs of this job know. On several hosts the user must give it:
   no fsdprun knows a token that another one has made. Without random numbers there is no token, and
   ranks warn. */
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

/* Tells the ranks by FSDP_STORE_SERVED that the fsdprun of node 0 serves, so that no rank does. On
   node 0 the port is known; on other nodes it may be a later one than PORT. */
static void say_served(const job *j) {
    char store[sizeof j->store + 8], text[sizeof j->store + sizeof j->id + 32];
    unsetenv("FSDP_STORE_SERVED"); // set by an enclosing fsdprun
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

// Serves the store of the job, on node 0. Returns 0, or the exit status if ranks could not meet.
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
    if (*j->host && fsdpi_store_port(j->server) != j->port && !j->nodes_store)
        complain("[E537] port %d is taken: ranks meet at %s:%d", j->port, j->host,
                 fsdpi_store_port(j->server));
    return 0;
}

/* ---- processes ------------------------------------------------------------------------------- */

typedef struct process {
    pid_t pid, parent;
    char state; // Z: has ended, and its parent has not looked; T: is stopped
} process;

// Reads a file of /proc/PID. The text is "" if there is none, or no such process.
static void read_proc(pid_t pid, const char *name, char *text, size_t size) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%ld/%s", (long)pid, name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t length = fd < 0 ? 0 : read(fd, text, size - 1);
    text[length > 0 ? length : 0] = 0;
    if (fd >= 0) close(fd);
}

// Reads the entry of a process in /proc. Returns 0 if there is no such process.
static int read_process(pid_t pid, process *out) {
    char text[512];
    int parent;
    read_proc(pid, "stat", text, sizeof text);
    const char *after = strrchr(text, ')'); // the name before it may hold anything
    if (!after || sscanf(after, ") %c %d", &out->state, &parent) != 2) return 0;
    out->pid = pid, out->parent = parent;
    return 1;
}

// Lists all processes that can be seen. Returns their number; the caller frees *out.
static int all_processes(process **out) {
    char self[32] = "";
    int count = 0, cap = 0;
    // In another namespace than that of /proc its numbers mean others.
    ssize_t length = readlink("/proc/self", self, sizeof self - 1);
    DIR *dir = length > 0 && atol(self) == (long)getpid() ? opendir("/proc") : NULL;
    struct dirent *entry;
    while (dir && (entry = readdir(dir)) != NULL) {
        process p;
        const pid_t pid = (pid_t)atol(entry->d_name);
        if (pid <= 0 || !read_process(pid, &p)) continue;
        if (count == cap) {
            process *more = (process *)realloc(*out, sizeof *more * (size_t)(cap += 1024));
            if (!more) break;
            *out = more;
        }
        (*out)[count++] = p;
    }
    if (dir) closedir(dir);
    return count;
}

// Finds the descendants of this process, parents before children. This process or the parents in
// between reap them, and the kernel reuses a process id last: no id is of another program.
static int descendants(process **out) {
    const int count = all_processes(out);
    int found = 0;
    for (int head = -1; head < found; head++) {
        const pid_t parent = head < 0 ? getpid() : (*out)[head].pid;
        for (int k = found; k < count; k++) {
            const process p = (*out)[k];
            if (p.parent != parent) continue;
            (*out)[k] = (*out)[found], (*out)[found++] = p;
        }
    }
    return found;
}

// Sends a signal to a process. far: only if it is not in the process group of this one.
static void signal_one(pid_t pid, int sig, int far) {
    if (!far || getpgid(pid) != getpgrp()) kill(pid, sig);
}

// Sends a signal to all descendants, to parents first, so that no wrapper starts its next command.
// Returns the process id of the first one; 0: there is none.
static pid_t signal_descendants(int sig, int far) {
    process *all = NULL;
    const int count = descendants(&all);
    for (int k = 0; k < count; k++) signal_one(all[k].pid, sig, far);
    const pid_t first = count ? all[0].pid : 0;
    free(all);
    return first;
}

static void signal_ranks(const job *j, int sig, int far) {
    for (int r = 0; r < j->ranks; r++)
        if (j->pids[r] > 0) signal_one(j->pids[r], sig, far);
}

// Sends a signal to all processes of the job, or, if /proc cannot be read, to its ranks. Returns as
// signal_descendants.
static pid_t signal_those(const job *j, int sig, int far) {
    const pid_t first = signal_descendants(sig, far);
    if (!first) signal_ranks(j, sig, far);
    if (sig == SIGTERM) signal_those(j, SIGCONT, far); // a stopped process would not see it
    return first;
}

static pid_t signal_all(const job *j, int sig) { return signal_those(j, sig, 0); }

static void complain_of_hung(pid_t pid) {
    complain("[E546] process %ld was killed, and the system has not ended it within %d s",
             (long)pid, HUNG_MS / 1000);
}

// Returns the local rank that had this process id, and forgets the id; -1: an adopted process.
static int forget(job *j, pid_t pid) {
    for (int r = 0; r < j->ranks; r++)
        if (j->pids[r] == pid) return j->pids[r] = 0, r;
    return -1;
}

// Kills all that is left below this process, and waits for its end.
static void kill_rest(job *j) {
    const long begin = now_ms();
    for (;;) {
        const struct timespec slice = {0, 5000000};
        const pid_t first = signal_all(j, SIGKILL);
        pid_t pid;
        nanosleep(&slice, NULL);
        while ((pid = waitpid(-1, NULL, WNOHANG)) > 0) forget(j, pid);
        if (pid < 0) return;
        if (now_ms() - begin < HUNG_MS) continue;
        complain_of_hung(first);
        return;
    }
}

// Returns the number of processes that the system has killed for lack of memory since it started;
// -1: unknown.
static long count_oom_kills(void) {
    char line[128];
    long count = -1;
    FILE *f = fopen("/proc/vmstat", "re");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "oom_kill %ld", &count) == 1) break;
    if (f) fclose(f);
    return count;
}

/* ---- the life of the ranks ------------------------------------------------------------------- */

// Becomes the program of a rank, in the child. Does not return. errors: a pipe that exec closes.
static void become_rank(int local, pid_t parent, int errors, char **argv) {
    sigset_t none;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != parent) _exit(1);
    int null = local > 0 ? open("/dev/null", O_RDONLY | O_CLOEXEC) : -1;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
    if (local == 0 || (null >= 0 && dup2(null, STDIN_FILENO) == STDIN_FILENO))
        execvp(argv[0], argv);
    int error = errno;
    ssize_t done = write(errors, &error, sizeof error);
    (void)done;
    _exit(EXIT_NO_PROGRAM);
}

static pid_t fork_process(const char *what) {
    pid_t pid = fork();
    if (pid < 0) complain("[E539] the system cannot fork %s: %s", what, strerror(errno));
    return pid;
}

// Starts all ranks. Returns 0, or the exit status when that is not possible.
static int start(job *j) {
    int errors[2], error = 0, failed = 0;
    char what[32];
    pid_t parent = getpid();
    if (pipe2(errors, O_CLOEXEC))
        return complain("[E538] the system cannot make a pipe: %s", strerror(errno)), 1;
    for (int r = 0; r < j->ranks && !failed; r++) {
        set_number("RANK", (long)j->node * j->ranks + r); // here: the child of threads sets nothing
        set_number("LOCAL_RANK", r);
        snprintf(what, sizeof what, "rank %d", j->node * j->ranks + r);
        j->pids[r] = fork_process(what);
        if (j->pids[r] == 0) become_rank(r, parent, errors[1], j->argv);
        failed = j->pids[r] < 0;
        j->left += !failed;
    }
    close(errors[1]);
    // Ends when every child has either called exec or said why it could not.
    if (!failed && read(errors[0], &error, sizeof error) == (ssize_t)sizeof error) {
        complain("[E540] the system cannot start '%s': %s", j->argv[0], strerror(error));
        failed = EXIT_NO_PROGRAM;
    }
    close(errors[0]);
    if (failed) kill_rest(j);
    return failed;
}

// Writes who killed a rank that was killed by KILL. fsdprun itself sends KILL only after a failure.
static const char *who_killed(const job *j, char *text, size_t size) {
    const long kills = count_oom_kills(), more = kills - j->oom_kills;
    if (kills < 0 || j->oom_kills < 0)
        snprintf(text, size, ", not by fsdprun: most often for lack of memory (dmesg tells)");
    else if (more > 0)
        snprintf(text, size,
                 ", not by fsdprun: the system has killed %ld process%s for lack of memory since "
                 "the start",
                 more, more == 1 ? "" : "es");
    else snprintf(text, size, ", not by fsdprun, and not by the system for lack of memory");
    return text;
}

// Ends this start on the other nodes. is_final: to start again is of no use.
static void tell_nodes(const job *j, int is_final, const char *text) {
    if (!j->nodes_store) return;
    fsdpi_store_abort(j->nodes_store, is_final ? FSDP_ERR_INVALID_STATE : FSDP_ERR_ABORTED, "",
                      text);
}

static void keep_first(job *j, const char *text, int status) {
    if (*j->first) return;
    snprintf(j->first, sizeof j->first, "%.*s", (int)sizeof j->first - 1, text);
    j->first_status = status;
}

// Returns a process if its state is one of `states`, else the first such process that it waits for,
// as a wrapper does: all its children are in such a state. 0: there is none.
static pid_t find_stopped(const process *all, int count, pid_t pid, const char *states) {
    pid_t first = 0;
    for (int k = 0; k < count; k++)
        if (all[k].pid == pid && strchr(states, all[k].state)) return pid;
    for (int k = 0; k < count; k++) {
        if (all[k].parent != pid || all[k].state == 'Z') continue;
        const pid_t stopped = find_stopped(all, count, all[k].pid, states);
        if (!stopped) return 0;
        if (!first) first = stopped;
    }
    return first;
}

// Returns the number of stopped ranks of this node. The first one: *rank of the job, process *pid.
static int count_stopped(const job *j, const char *states, int *rank, long *pid) {
    process *all = NULL;
    const int count = all_processes(&all);
    int found = 0;
    for (int r = 0; r < j->ranks; r++) {
        const pid_t stopped = j->pids[r] > 0 ? find_stopped(all, count, j->pids[r], states) : 0;
        if (stopped && found++ == 0) *rank = j->node * j->ranks + r, *pid = (long)stopped;
    }
    free(all);
    return found;
}

// Names a rank of this node that is stopped: the others fail, because they waited for it.
static void name_stopped(const job *j) {
    char text[64];
    int rank;
    long pid;
    const int count = count_stopped(j, "Tt", &rank, &pid);
    if (!count) return;
    snprintf(text, sizeof text, ", and so are %d more of this node", count - 1);
    complain(
        "[E565] rank %d (process %ld) is stopped%s: it may be what the others have waited for. "
        "Look who has sent it SIGSTOP or SIGTSTP, or debugs it. To continue a stopped process "
        "in time, use kill -CONT",
        rank, pid, count > 1 ? text : "");
}

// Says and keeps the failure with which this start ends.
static void say_failure(job *j, const char *text) {
    if (j->quiet) return;
    complain("%s", text);
    name_stopped(j);
    keep_first(j, text, j->status);
}

// Prints the first failure. A rank that ended with 0 too early has not failed, but the others may
// have failed because of it.
static void tell(job *j) {
    const int base = j->node * j->ranks, r = j->failed, how = j->failed_how;
    const pid_t pid = j->failed_pid;
    char before[100] = "", by[200] = "", text[700];
    if (j->quiet) {
        tell_nodes(j, 1, "the user has ended its fsdprun");
        return;
    }
    if (j->done == 1)
        snprintf(before, sizeof before, "; rank %d had ended before, with 0", base + j->first_done);
    if (j->done > 1)
        snprintf(before, sizeof before, "; %d ranks had ended before, with 0, rank %d as the first",
                 j->done, base + j->first_done);
    if (WIFSIGNALED(how))
        snprintf(text, sizeof text, "[E541] rank %d (process %ld) was killed by signal %d (%s)%s%s",
                 base + r, (long)pid, WTERMSIG(how), strsignal(WTERMSIG(how)),
                 WTERMSIG(how) == SIGKILL ? who_killed(j, by, sizeof by) : by, before);
    else
        snprintf(text, sizeof text, "[E542] rank %d (process %ld) failed with exit status %d%s",
                 base + r, (long)pid, WEXITSTATUS(how), before);
    say_failure(j, text);
    tell_nodes(j, 0, text);
}

// Returns 1 if a signal that asks to end is pending.
static int end_is_pending(void) {
    static const int ends[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};
    sigset_t pending;
    int asked = 0;
    sigpending(&pending);
    for (int k = 0; k < 4; k++) asked |= sigismember(&pending, ends[k]);
    return asked;
}

/* Reaps processes that have ended, adopted ones too. Returns 0 if none is left. An exit status may
   follow from a death that the system has not reported yet: it closes the connections of a process
   before its last thread has ended, and that process may be on another node. Therefore a death
   within a moment counts as the first failure. */
static int reap(job *j) {
    int how;
    pid_t pid;
    while ((pid = waitpid(-1, &how, WNOHANG)) > 0) {
        const int r = forget(j, pid);
        if (r < 0) continue;
        j->left--;
        if (how == 0 && j->done++ == 0) j->first_done = r;
        if (how && j->failed < 0) j->failed_at = now_ms();
        if (how && (j->failed < 0 || (WIFSIGNALED(how) && !WIFSIGNALED(j->failed_how))))
            j->failed = r, j->failed_how = how, j->failed_pid = pid;
    }
    how = j->failed_how;
    if (j->failed < 0 || j->status) return pid == 0;
    j->quiet |= end_is_pending();
    if (!WIFSIGNALED(how) && !j->quiet && (j->left || j->nodes > 1) &&
        now_ms() - j->failed_at < MOMENT_MS)
        return 1;
    j->status = WIFSIGNALED(how) ? 128 + WTERMSIG(how) : WEXITSTATUS(how);
    tell(j);
    return pid == 0;
}

/* ---- their end ------------------------------------------------------------------------------- */

static long grace_ms(const job *j) {
    return j->grace >= 0 ? j->grace * 1000L : j->quiet ? ASKED_MS : GRACE_MS;
}

// Sends the signals that are due. Returns 1 if waiting longer is useless.
static int go_on_ending(job *j) {
    const long now = now_ms();
    // Ranks that notice the failure themselves have a moment to say where they were.
    if ((j->status || !j->left) && j->term_at == NEVER && j->kill_at == NEVER)
        j->term_at = (j->failed < 0 ? now : j->failed_at) + MOMENT_MS;
    if (now >= j->term_at) {
        j->term_at = NEVER;
        j->kill_at = now + grace_ms(j);
        signal_all(j, SIGTERM);
    }
    if (now < j->kill_at) return 0;
    pid_t first = signal_all(j, SIGKILL); // and again: one may have forked meanwhile
    if (!j->killed_at && first)
        complain("[E547] a process has not ended within %ld s of TERM, and is killed, process %ld "
                 "as the first: --grace SECONDS gives more time",
                 grace_ms(j) / 1000, (long)first);
    if (!j->killed_at) j->killed_at = now;
    j->kill_at = now + MOMENT_MS;
    if (now - j->killed_at < HUNG_MS) return 0;
    return complain_of_hung(first), 1;
}

static void pass_on(job *j, int sig, const siginfo_t *info) {
    const int own = sig == SIGUSR1 || sig == SIGUSR2;
    if (sig <= 0 || sig == SIGCHLD || sig == SIGRTMIN) return;
    if (!own) j->quiet = 1;
    if (sig == SIGTERM && j->kill_at == NEVER)
        j->term_at = NEVER, j->kill_at = now_ms() + grace_ms(j);
    // A terminal, and who signals the whole group, reach all that is in it as well: each gets a
    // Ctrl-C once.
    const int far = info->si_pid != j->launcher;
    if (!own) signal_those(j, sig, far);
    else if (!far) signal_ranks(j, sig, 0); // others would die of it
}

// Waits at most `ms` milliseconds for a signal, and passes it on.
static void wait_for_signal(job *j, const sigset_t *signals, long ms) {
    const struct timespec slice = {ms / 1000, ms % 1000 * 1000000};
    siginfo_t info;
    int sig = sigtimedwait(signals, &info, &slice);
    if (getppid() != j->launcher) {
        // The store ends first and at once: other nodes learn that the launcher has died, not that
        // ranks have.
        execl("/proc/self/exe", KEEPER, (char *)NULL);
        kill_rest(j);
        _exit(128 + SIGKILL);
    }
    if (sig == SIGTERM || sig == SIGINT || sig == SIGHUP || sig == SIGQUIT) j->asked = sig;
    pass_on(j, sig, &info);
}

/* ---- several starts -------------------------------------------------------------------------- */

// Ends this start if the fsdprun of another node has ended, or one of its ranks has failed.
static void look_at_nodes(job *j) {
    fsdpi_failure v;
    char text[sizeof v.reason + 120];
    if (!j->nodes_store) j->nodes_store = FSDPI_LOAD(&j->joined);
    if (!j->nodes_store || j->status || !fsdpi_store_failure(j->nodes_store, &v)) return;
    j->status = 1;
    j->is_final = v.status == FSDP_ERR_INVALID_STATE;
    if (v.lost >= 0)
        snprintf(text, sizeof text,
                 "[E557] the fsdprun of node %d has ended or is cut off: look at its output",
                 v.lost);
    else snprintf(text, sizeof text, "[E558] on node %d: %s", v.rank, v.reason);
    say_failure(j, text);
    // Ranks that learn of it themselves have time to say where they were.
    if (j->term_at == NEVER && j->kill_at == NEVER) j->term_at = now_ms() + GRACE_MS;
}

/* Ends this start if the fsdprun of a node that is waited for gives no sign of life: it is stopped,
   or its host is dead, which closes no connection. *heard_ms: when the store, which node 0 serves,
   last gave an answer. */
static void look_for_silence(job *j, int node, long *heard_ms) {
    char text[400];
    fsdpi_peer peer;
    long silent_ms;
    if (!fsdpi_store_ask(j->nodes_store, node, &peer, MOMENT_MS * 1000000LL)) {
        *heard_ms = now_ms();
        silent_ms = (long)(peer.silent_ns / 1000000);
    } else node = 0, silent_ms = now_ms() - *heard_ms;
    if (silent_ms <= j->timeout_ms) return;
    snprintf(text, sizeof text,
             "[E562] the fsdprun of node %d has given no sign of life for %.1f s (FSDP_TIMEOUT_MS "
             "allows %.1f s), and node %d waits for the end of its ranks: it is stopped, or its "
             "host or the network to it is down. Look there for the process, and continue it (kill "
             "-CONT), or start the same command again",
             node, (double)silent_ms / 1000, j->timeout_ms / 1000.0, j->node);
    j->status = 1;
    // Others first: a process that continues when it reads the message meets the failure.
    tell_nodes(j, 0, text);
    say_failure(j, text);
}

// Returns the time of the nodes' store.
static int64_t nodes_ns(void *user) {
    return fsdpi_monotonic_ns(NULL) + FSDPI_LOAD(&((job *)user)->jumps) * 2 * FOREVER_NS;
}

// Joins the store in which each node is a rank. Node 0 serves it.
static int join_nodes(job *j, fsdpi_store **out, int64_t timeout_ns, char *error, size_t cap) {
    fsdpi_store_desc d;
    char name[sizeof j->base + 8];
    memset(&d, 0, sizeof d);
    snprintf(name, sizeof name, "%s:nodes", j->base);
    d.boot.rank = j->node, d.boot.size = j->nodes;
    d.boot.job = name, d.boot.store = j->store;
    d.boot.timeout_ns = timeout_ns;
    d.boot.allocator.alloc = fsdpi_libc_alloc;
    d.boot.allocator.free = fsdpi_libc_free;
    d.boot.clock.now_ns = nodes_ns, d.boot.clock.user = j;
    return fsdpi_store_open(&d, out, error, cap) == FSDP_OK;
}

// Joins while the ranks run: without --max-restarts these do not wait for other nodes.
static void *join_nodes_later(void *arg) {
    job *j = (job *)arg;
    char error[FSDPI_REASON + 200];
    fsdpi_store *store = NULL;
    while (!join_nodes(j, &store, FOREVER_NS, error, sizeof error) && !FSDPI_LOAD(&j->jumps))
        fsdpi_sleep_ns(MOMENT_MS * 1000000LL);
    FSDPI_STORE(&j->joined, store);
    FSDPI_STORE(&j->is_joining, 0u);
    return NULL;
}

static void begin_join(job *j) {
    pthread_t thread;
    if (j->nodes == 1 || j->nodes_store) return;
    j->is_joining = 1;
    if (fsdpi_store_thread(&thread, join_nodes_later, j, 0)) j->is_joining = 0; // as if cut off
    else pthread_detach(thread);
}

// Waits for the thread, which may set new deadlines until it sees that its clock has jumped.
static void end_join(job *j) {
    while (FSDPI_LOAD(&j->is_joining)) {
        __atomic_add_fetch(&j->jumps, 1u, __ATOMIC_RELEASE);
        fsdpi_sleep_ns(MOMENT_MS * 100000LL);
    }
    if (!j->nodes_store) j->nodes_store = FSDPI_LOAD(&j->joined);
}

// Shows a text of this node to the others, under the name `what`.
static fsdp_status show_node(const job *j, const char *what, const char *text) {
    char key[32];
    snprintf(key, sizeof key, "%s.%d", what, j->node);
    return fsdpi_store_set(j->nodes_store, key, text, strlen(text));
}

// Waits for such a text of a node, for at most `ms`. It is "" after a failure.
static fsdp_status hear_node(const job *j, const char *what, int node, char *text, size_t cap,
                             long ms) {
    char key[32];
    size_t bytes;
    snprintf(key, sizeof key, "%s.%d", what, node);
    const fsdp_status status = fsdpi_store_get(j->nodes_store, key, text, cap - 1, &bytes,
                                               ms * 1000000LL);
    text[status ? 0 : bytes] = 0;
    return status;
}

// Agrees on the largest count that a node knows. A new fsdprun knows neither the count nor the
// first failure. No ranks begin before all nodes know them: so the count outlives the loss of any
// node that has begun. Returns 0 after a failure.
static int agree_on_count(job *j, char *error, size_t cap) {
    char text[COUNT_BYTES + sizeof j->first];
    fsdpi_failure v;
    snprintf(text, sizeof text, "%d %s", j->count, j->first);
    fsdp_status status = show_node(j, "count", text);
    for (int node = 0; node < j->nodes && !status; node++) {
        status = hear_node(j, "count", node, text, sizeof text, NODES_MS);
        const char *first = strchr(text, ' ');
        if (!first) continue;
        if (atoi(text) > j->count) j->count = atoi(text);
        if (first[1]) keep_first(j, first + 1, 1);
    }
    const int is_known = !status;
    if (!status) status = show_node(j, "agreed", "");
    for (int node = 0; node < j->nodes && !status; node++)
        status = hear_node(j, "agreed", node, text, sizeof text, NODES_MS);
    // A node that has begun may have failed already: look_at_nodes reports it.
    if (!status ||
        (is_known && fsdpi_store_failure(j->nodes_store, &v) && v.status != FSDP_ERR_TIMEOUT))
        return 1;
    snprintf(error, cap, "%s", fsdp_status_name(status));
    fsdpi_store_abort(j->nodes_store, FSDP_ERR_TIMEOUT, "", "its fsdprun lacks the counts");
    return 0;
}

// Shows the other nodes whether only stopped ranks are left here. Without an answer of the store
// the next look shows it again.
static void show_stopped(job *j, int is_so) {
    char key[32];
    if (!j->nodes_store || is_so == j->is_shown) return;
    snprintf(key, sizeof key, "stopped.%d", j->node);
    if (!fsdpi_store_set_within(j->nodes_store, key, is_so ? "1" : "0", 1, MOMENT_MS * 1000000LL))
        j->is_shown = is_so;
}

// Returns 1 if the ranks of a node have ended well, or only stopped ones are left of them.
static int node_stands(const job *j, int node) {
    char text[8];
    return fsdpi_store_has_left(j->nodes_store, node) ||
           (j->max_restarts && !hear_node(j, "done", node, text, sizeof text, MOMENT_MS)) ||
           (!hear_node(j, "stopped", node, text, sizeof text, MOMENT_MS) && *text == '1');
}

// Returns 1 if no rank of another node runs. After the ranks of node 0 have ended well, its store
// is closed, and nothing is heard of the others.
static int others_stand(const job *j) {
    if (j->nodes == 1) return j->done > 0;
    if (!j->nodes_store) return 0;
    for (int node = 0; node < j->nodes && !fsdpi_store_ended(j->nodes_store); node++)
        if (node != j->node && !node_stands(j, node))
            return fsdpi_store_ended(j->nodes_store) == FSDP_ERR_PEER_LOST;
    return !fsdpi_store_failure(j->nodes_store, NULL);
}

/* Ends this start if only stopped ranks are left of the job, for FSDP_TIMEOUT_MS: no other rank
   fails by waiting for them. While this process was stopped, too, the time does not count. A rank
   that is debugged is not stopped. */
static void look_for_stopped(job *j) {
    const long now = now_ms(), passed = now - j->looked_at, before = j->stopped_ms;
    char text[300];
    int rank;
    long pid;
    if (passed < LOOK_MS / 2) return;
    j->looked_at = now;
    j->stopped_ms = 0;
    if (!j->left || j->failed >= 0 || j->status || j->quiet ||
        (j->nodes == 1 && !others_stand(j))) // costs less than to list processes
        return;
    const int is_so = count_stopped(j, "T", &rank, &pid) == j->left;
    show_stopped(j, is_so);
    if (!is_so || !others_stand(j)) return;
    j->stopped_ms = before + (!before ? 1 : passed < 2 * LOOK_MS ? passed : 2 * LOOK_MS);
    if (!before)
        complain("[E495] rank %d (process %ld) is stopped, and all other ranks of the job have "
                 "ended or are stopped: continue it (kill -CONT %ld). The job is ended in %.1f s "
                 "(FSDP_TIMEOUT_MS)",
                 rank, pid, pid, j->timeout_ms / 1000.0);
    if (j->stopped_ms <= j->timeout_ms) return;
    snprintf(text, sizeof text,
             "[E497] rank %d (process %ld) has been stopped for %.1f s (FSDP_TIMEOUT_MS), and no "
             "other rank of the job runs: it is ended. Look who has sent it SIGSTOP or SIGTSTP",
             rank, pid, j->timeout_ms / 1000.0);
    j->status = 1;
    complain("%s", text);
    keep_first(j, text, j->status);
    tell_nodes(j, 0, text);
}

static void leave_nodes(job *j) {
    fsdpi_store_close(j->nodes_store);
    j->nodes_store = NULL;
}

// Waits until the fsdpruns of all nodes have met, before each start. A node whose fsdprun was
// killed may come back: the others wait for it. Returns 0, or the exit status.
static int meet_nodes(job *j, const sigset_t *signals) {
    const long begin = now_ms();
    char error[FSDPI_REASON + 200] = "";
    if (j->nodes == 1 || !j->max_restarts) return 0;
    while (now_ms() - begin < j->timeout_ms) {
        const int is_met = join_nodes(j, &j->nodes_store, NODES_MS * 1000000LL, error,
                                      sizeof error) &&
                           agree_on_count(j, error, sizeof error);
        wait_for_signal(j, signals, is_met ? 0 : MOMENT_MS);
        if (j->quiet) return tell_nodes(j, 1, "the user has ended its fsdprun"), 128 + j->asked;
        if (is_met) return 0;
        leave_nodes(j);
    }
    complain("[E559] the fsdpruns of the %d nodes have not met within %.1f s: is one running on "
             "each node, with the same --nnodes, --master, --job and FSDP_TOKEN? The last attempt, "
             "where rank K is node K: %s",
             j->nodes, j->timeout_ms / 1000.0, error);
    return 1;
}

// Waits until the ranks of all nodes have succeeded. If one fails, this start has failed here, too.
static void wait_for_nodes(job *j, const sigset_t *signals) {
    char text[8];
    long heard_ms = now_ms();
    fsdp_status status = FSDP_OK;
    if (!j->nodes_store || !j->max_restarts || j->status) return;
    (void)show_node(j, "done", "");
    // When node 0 has seen all, its store ends: no failure.
    for (int node = 0;
         node < j->nodes && !j->quiet && !j->status && (!status || status == FSDP_ERR_TIMEOUT);) {
        status = hear_node(j, "done", node, text, sizeof text, MOMENT_MS);
        if (status == FSDP_ERR_TIMEOUT) look_for_silence(j, node, &heard_ms);
        node += !status;
        wait_for_signal(j, signals, 0);
    }
    look_at_nodes(j);
    // Node 0 serves until the others have seen it.
    const long begin = now_ms();
    for (int node = 1;
         j->node == 0 && node < j->nodes && now_ms() - begin < NODES_MS && !j->status;)
        if (fsdpi_store_has_left(j->nodes_store, node)) node++;
        else wait_for_signal(j, signals, MOMENT_MS / 10), look_at_nodes(j);
}

static void look_after(job *j, const sigset_t *signals) {
    // Own ranks first: the failures of other nodes may be the answer to theirs.
    while (reap(j) && (look_at_nodes(j), look_for_stopped(j), !go_on_ending(j))) {
        const int ending = j->failed >= 0 || j->term_at != NEVER || j->kill_at != NEVER;
        wait_for_signal(j, signals, ending ? MOMENT_MS / 10 : j->nodes > 1 ? MOMENT_MS : LOOK_MS);
    }
}

// Blocks signals, so that none is lost between two looks; the ranks get them unblocked. fsdprun and
// its ranks ignore a signal that the parent ignores (nohup).
static void block_signals(sigset_t *signals) {
    static const int forwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2, SIGCHLD};
    sigset_t blocked;
    signal(SIGCHLD, SIG_DFL); // if it were ignored, waitpid would find no child
    sigemptyset(signals);
    for (size_t s = 0; s < sizeof forwarded / sizeof forwarded[0]; s++) {
        struct sigaction action;
        if (!sigaction(forwarded[s], NULL, &action) && action.sa_handler != SIG_IGN)
            sigaddset(signals, forwarded[s]);
    }
    blocked = *signals;
    sigaddset(&blocked, SIGRTMIN); // the launcher's end, for the keeper
    sigaddset(&blocked, SIGPIPE);  // whoever read what we say is gone: no reason to end
    sigprocmask(SIG_BLOCK, &blocked, NULL);
}

/* Renames the keeper, so that a user who kills all processes called fsdprun leaves it to clean up.
   The words of a command are adjacent in memory. */
static void take_own_name(const job *j, char **argv) {
    char **last = argv;
    while (last[1]) last++;
    const size_t room = (size_t)(*last - *argv) + strlen(*last);
    char *words = *argv;
    prctl(PR_SET_NAME, KEEPER);
    memset(words, 0, room);
    snprintf(words, room, KEEPER " of %ld", (long)j->launcher);
}

// Gives the program's words memory of their own: take_own_name writes over the old one. Returns 0
// when there is none.
static int copy_words(job *j) {
    int count = 0;
    while (j->argv[count]) count++;
    char **copy = (char **)calloc((size_t)count + 1, sizeof *copy);
    for (int i = 0; copy && i < count; i++)
        if (!(copy[i] = strdup(j->argv[i]))) return 0;
    if (copy) j->argv = copy;
    return copy != NULL;
}

// Starts all ranks once, and looks after them. Returns 0 if they were started.
static int start_once(job *j, const sigset_t *signals, char **argv) {
    j->server = NULL;
    j->status = j->done = j->first_done = j->left = 0;
    j->stopped_ms = j->is_shown = 0;
    j->failed = -1;
    j->term_at = j->kill_at = NEVER, j->killed_at = 0;
    j->oom_kills = count_oom_kills();
    int failed = meet_nodes(j, signals);
    if (failed || (look_at_nodes(j), j->status)) return failed;
    set_environment(j);
    failed = serve(j);
    say_served(j);
    if (!failed) failed = start(j);
    if (argv) take_own_name(j, argv);
    if (failed) tell_nodes(j, 1, "its fsdprun could not start the ranks");
    else begin_join(j), look_after(j, signals), wait_for_nodes(j, signals), end_join(j);
    fsdpi_store_stop(j->server);
    return failed;
}

/* Starts the ranks, and again as long as that is allowed and may be of use: not where the user has
   ended the job, or a rank that was killed is still there. Returns the exit status of both
   processes. */
static int keep(job *j, sigset_t *signals, char **argv) {
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    prctl(PR_SET_PDEATHSIG, SIGRTMIN);
    sigaddset(signals, SIGRTMIN);
    if (getppid() != j->launcher) return 1;
    set_token(j);
    check_master(j);
    if (!copy_words(j)) argv = NULL; // without memory the keeper has no name of its own
    for (;; argv = NULL) {
        const int failed = start_once(j, signals, argv);
        const int status = failed ? failed : j->status;
        leave_nodes(j);
        if (!status || j->quiet || !j->max_restarts) return status;
        if (failed || j->is_final || j->left) {
            if (*j->first && j->count)
                complain("[E563] the job has ended after %d restarts. The first failure: %s",
                         j->count, j->first);
            return status;
        }
        if (j->count >= j->max_restarts) break;
        complain("[E560] all ranks are started again: restart %d of %d", ++j->count,
                 j->max_restarts);
    }
    complain("[E561] the job has failed after %d restarts: --max-restarts %d allows no more. The "
             "first failure: %s",
             j->count, j->max_restarts, j->first);
    return j->first_status;
}

// Reports a keeper that is stopped after its ranks have ended, since no other process would end the
// job, and kills it after FSDP_TIMEOUT_MS. *since: the first time of that, or NEVER.
static void look_at_keeper(const job *j, pid_t keeper, long *since) {
    process p, *all = NULL;
    int live = !read_process(keeper, &p) || p.state != 'T';
    for (int count = live ? 0 : all_processes(&all), k = 0; k < count; k++)
        live += all[k].parent == keeper && all[k].state != 'Z';
    free(all);
    if (live) *since = NEVER;
    else if (*since == NEVER) {
        *since = now_ms();
        complain("[E566] process %ld, which looks after the ranks, is stopped, and no rank of this "
                 "node runs: continue it (kill -CONT %ld). It is killed in %.1f s "
                 "(FSDP_TIMEOUT_MS)",
                 (long)keeper, (long)keeper, j->timeout_ms / 1000.0);
    } else if (now_ms() - *since >= j->timeout_ms) kill(keeper, SIGKILL);
}

// Waits for the keeper, in the launcher. Processes that a shell has started before it became this
// program do not belong to the job.
static int watch(job *j, pid_t keeper, const sigset_t *signals, int has_others) {
    const struct timespec slice = {1, 0};
    int how = 0, sig;
    long since = NEVER;
    while (waitpid(keeper, &how, WNOHANG) == 0) {
        siginfo_t info;
        look_at_keeper(j, keeper, &since);
        sig = sigtimedwait(signals, &info, &slice);
        if (sig <= 0 || sig == SIGCHLD) continue;
        // A terminal signals the whole group, the keeper too. When it is gone, the kernel tells
        // only the leader of the session.
        const int alone = info.si_code <= 0 || (sig == SIGHUP && getsid(0) == getpid());
        if (alone) kill(keeper, sig);
    }
    if (WIFEXITED(how)) return WEXITSTATUS(how);
    complain("[E548] process %ld, which looks after the ranks, was killed by signal %d (%s): all "
             "of them are killed",
             (long)keeper, WTERMSIG(how), strsignal(WTERMSIG(how)));
    if (!has_others) kill_rest(j);
    return 128 + WTERMSIG(how);
}

// Descriptors 0 to 2 are open from here on, so that none of ours is taken for them, by us or by a
// rank. Returns 0, or the exit status.
static int plug_descriptors(void) {
    for (int fd = 0; fd <= 2; fd++)
        if (fcntl(fd, F_GETFD) < 0 && open("/dev/null", O_RDWR) != fd)
            return complain("[E549] descriptor %d is closed, and the system cannot open /dev/null "
                            "there: %s",
                            fd, strerror(errno)),
                   1;
    return 0;
}

int main(int argc, char **argv) {
    static job j;
    int help = 0;
    sigset_t signals;
    siginfo_t other;
    int failed = plug_descriptors();
    if (failed) return failed;
    if (argc == 1 && !strcmp(argv[0], KEEPER)) return kill_rest(&j), 128 + SIGKILL;
    j.nodes = 1, j.port = PORT, j.grace = -1, j.term_at = j.kill_at = NEVER;
    int program = read_options(&j, argc, argv, &help);
    if (help) return usage(stdout), 0;
    if (program < 0) return -program;
    j.argv = argv + program;
    failed = name_job(&j);
    if (!failed) failed = set_timeout(&j);
    if (failed) return failed;
    block_signals(&signals);
    j.launcher = getpid();
    const int has_others = !waitid(P_ALL, 0, &other, WEXITED | WNOHANG | WNOWAIT);
    prctl(PR_SET_CHILD_SUBREAPER, !has_others);
    pid_t keeper = fork_process("the keeper of the ranks");
    if (keeper < 0) return 1;
    return keeper ? watch(&j, keeper, &signals, has_others) : keep(&j, &signals, argv);
}
