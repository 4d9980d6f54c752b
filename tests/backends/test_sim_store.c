/* test_sim_store.c - the store where ranks meet, with a launcher and its ranks in one process, on
   the virtual hosts of sim_hosts.h: the real client and server of backends/fsdp_store.h under
   random schedules and faults. Each seed is one job or two, for which must hold:

   - No rank's set-up ends later than its deadline plus SLACK.
   - Without a relevant fault all ranks are in one world, and finish it.
   - With relevant faults a rank without one either finishes, or gets an error whose text names only
     ranks, or a server, that had one.
   - When a rank or the server dies in the running phase, the others know within HEARD.
   - No rank hangs or spins, and none leaks a descriptor, a thread or memory.

   A seed that fails prints the command that repeats it; with SIM_TRACE=1 that shows the events.

   SPDX-License-Identifier: MIT */
#include "harness.h"
#define FSDP_IMPLEMENTATION /* the store is part of it */
#define FSDP_STATIC
#define FSDP_NO_BACKEND
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* the rest of it */
#include "fsdp.h"
#include "src/base/os_net.h"
#include "sim_hosts.h"
// After it:
#include "backends/fsdp_store_world.h"
#pragma GCC diagnostic pop

#define SLACK (2 * OS_S)
#define HEARD (300 * OS_MS)

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { FEWER = 1 };
#else
enum { FEWER = 0 };
#endif
enum { RANKS = 6, JOBS = 2, PORT = 29500, UNTRUSTED = 3 };

/* ---- a job ----------------------------------------------------------------------------------- */

struct job;
typedef struct {
    struct job *job;
    os_proc *proc;
    fsdpi_store *store; /* NULL unless open */
    int rank, size;     /* as the process claims */
    fsdp_status status;
    int is_open, is_absent;                            /* absent: its launcher has not started it */
    int64_t begun, opened, heard;                      /* 0: not yet */
    char text[1400], name[24], place[64], served[160]; /* place, served: from its environment */
} actor;

typedef struct job {
    int number, size, hosts, worlds, rounds, has_launcher, serves, is_over, trades;
    int64_t timeout, pause, watch; /* watch: interval at which the launcher checks its ranks */
    char name[32], store[64];
    actor ranks[RANKS], launcher;
} job;

static job jobs[JOBS];
static int num_jobs;

/* Notes when the first failure reaches a rank. */
static void hears(void *user) {
    actor *a = (actor *)user;
    if (!a->heard && a->store && fsdpi_store_failure(a->store, NULL)) a->heard = os.now;
}

static void beats(void *user, fsdpi_store_beat *out) {
    const actor *a = (const actor *)user;
    out->busy = 1;
    snprintf(out->text, sizeof out->text, "round of rank %d", a->rank);
}

static fsdpi_store_desc desc_of(actor *a) {
    fsdpi_store_desc d;
    memset(&d, 0, sizeof d);
    d.boot.rank = a->rank, d.boot.size = a->size;
    d.boot.timeout_ns = a->job->timeout;
    d.boot.job = a->job->name, d.boot.store = a->place;
    d.boot.allocator.alloc = os_alloc, d.boot.allocator.free = os_free;
    d.boot.clock.now_ns = os_clock;
    d.beat = beats, d.event = hears, d.user = a;
    return d;
}

static uint64_t value_of(const job *j, int world, int k, int rank) {
    return fsdpi_hash(os.seed, (uint64_t)(((j->number * 16 + world) * 1000 + k) * 16 + rank));
}

static const char *key_of(char *out, size_t cap, int world, int k, int rank) {
    snprintf(out, cap, "%d.%d.%d", world, k, rank);
    return out;
}

/* As a backend does if it gets no failure from the store: asks for the state of the culprit, and
   reports a failure. */
static fsdp_status give_up(actor *a, fsdp_status status, int culprit) {
    char text[80];
    fsdpi_peer peer;
    if (status == FSDP_ERR_TIMEOUT && culprit >= 0 &&
        fsdpi_store_ask(a->store, culprit, &peer, OS_S))
        culprit = -1;
    if (status != FSDP_ERR_TIMEOUT)
        snprintf(text, sizeof text, "[sim] the store says %s", fsdp_status_name(status));
    else if (culprit < 0) snprintf(text, sizeof text, "[sim] the store does not answer");
    else snprintf(text, sizeof text, "[sim] rank %d does not come", culprit);
    if (status != FSDP_ERR_PEER_LOST) fsdpi_store_abort(a->store, status, "round", text);
    fsdpi_failure v;
    fsdpi_text t = {a->text, sizeof a->text, 0};
    if (fsdpi_store_failure(a->store, &v)) fsdpi_say_failure(&t, &v);
    else fsdpi_text_add(&t, "%s", text);
    return status;
}

/* All ranks send a number to all. */
static fsdp_status round_of(actor *a, int world, int k) {
    char key[32];
    const job *j = a->job;
    uint64_t value = value_of(j, world, k, a->rank), got;
    size_t bytes;
    fsdp_status status = fsdpi_store_set(a->store, key_of(key, sizeof key, world, k, a->rank),
                                         &value, sizeof value);
    if (status) return give_up(a, status, -1);
    for (int r = 0; r < j->size; r++) {
        status = fsdpi_store_get(a->store, key_of(key, sizeof key, world, k, r), &got, sizeof got,
                                 &bytes, j->timeout);
        if (status) return give_up(a, status, r);
        if (bytes != sizeof got || got != value_of(j, world, k, r))
            os_fail("%s: rank %d, round %d: another world's value", a->name, r, k);
    }
    if (k >= 2) (void)fsdpi_store_delete(a->store, key_of(key, sizeof key, world, k - 2, a->rank));
    return FSDP_OK;
}

/* The rank that serves leaves last, after all have said that they need nothing more. */
static fsdp_status finish(actor *a, int world) {
    char key[32], one = 1;
    size_t bytes;
    fsdp_status status = fsdpi_store_set(a->store, key_of(key, sizeof key, world, 9999, a->rank),
                                         &one, 1);
    if (status) return give_up(a, status, -1);
    for (int r = 1; r < a->job->size && a->rank == 0; r++) {
        status = fsdpi_store_get(a->store, key_of(key, sizeof key, world, 9999, r), &one, 1, &bytes,
                                 a->job->timeout);
        if (status) return give_up(a, status, r);
    }
    return FSDP_OK;
}

static fsdp_status live(actor *a, int world) {
    fsdpi_store_desc d = desc_of(a);
    fsdpi_store *store = NULL;
    fsdpi_peer peer;
    a->begun = os.now;
    fsdp_status status = fsdpi_store_open(&d, &store, a->text, sizeof a->text);
    int64_t took = os.now - a->begun;
    a->opened = os.now;
    os_say("open: %s %s", fsdp_status_name(status), status ? a->text : "");
    if (took > a->job->timeout + SLACK + a->proc->stop_sum)
        os_fail("%s: set-up took %.3f s of %.3f: %s", a->name, (double)took * 1e-9,
                (double)a->job->timeout * 1e-9, a->text);
    if (status) return status;
    a->store = store, a->is_open = 1;
    for (int k = 0; k < a->job->rounds && !status; k++) {
        os_sleep((int64_t)os_rand((uint64_t)a->job->pause));
        status = round_of(a, world, k);
        if (!status && os_one_in(8))
            (void)fsdpi_store_ask(store, (int)os_rand((uint64_t)a->job->size), &peer, 80 * OS_MS);
    }
    if (!status) status = finish(a, world);
    os_say("ran: %s %s", fsdp_status_name(status), status ? a->text : "");
    a->store = NULL, a->is_open = 0;
    fsdpi_store_close(store);
    return status;
}

static void trade(actor *a);

static void *rank_main(void *arg) {
    actor *a = (actor *)arg;
    const job *j = a->job;
    if (j->trades) trade(a);
    int waits = j->has_launcher && a->proc->host == 0;
    while (waits && !j->serves && !j->launcher.proc->dead) os_sleep(OS_MS);
    a->is_absent = waits && !j->serves;
    for (int world = 0; world < j->worlds && !j->trades && !a->status && !a->is_absent; world++)
        a->status = live(a, world);
    os_exit(a->status ? 1 : 0);
    return NULL;
}

/* Sets the store's address in the environment of ranks on this host; the others know only where it
   may be. */
static void tell_place(job *j, const fsdpi_store_server *server) {
    for (int r = 0; r < j->size; r++) {
        actor *a = &j->ranks[r];
        char *colon = strncmp(a->place, "tcp:", 4) ? NULL : strrchr(a->place, ':');
        if (a->proc->host) continue;
        if (colon) snprintf(colon, 8, ":%d", fsdpi_store_port(server));
        char served[sizeof a->served]; /* gcc takes the job for one object: -Wrestrict */
        snprintf(served, sizeof served, "%s %s", a->place, j->name);
        memcpy(a->served, served, sizeof served);
        a->proc->served = a->served;
    }
}

/* Acts like tools/fsdprun: serves, starts and watches ranks; if one fails, ends the others. */
static void *launcher_main(void *arg) {
    actor *a = (actor *)arg;
    job *j = a->job;
    fsdpi_store_desc d = desc_of(a);
    fsdpi_store_server *server = NULL;
    int64_t failed = 0;
    a->status = fsdpi_store_serve(&d, &server, a->text, sizeof a->text);
    os_say("serve: %s %s", fsdp_status_name(a->status), a->text);
    if (a->status && strcmp(j->store, "host:") != 0) {
        os_exit(1);
        return NULL;
    }
    if (!a->status) tell_place(j, server);
    j->serves = 1;
    for (int left = 1; left;) {
        left = 0;
        for (int r = 0; r < j->size; r++) {
            os_proc *p = j->ranks[r].proc;
            if (p->host) continue;
            left += !p->dead;
            if (p->dead && p->exit_code && !failed) failed = os.now;
            if (failed && os.now > failed + 100 * OS_MS) os_kill(p, OS_DID_killed);
        }
        if (left) os_sleep(j->watch);
    }
    fsdpi_store_stop(server);
    os_exit(0);
    return NULL;
}

/* ---- untrusted peers ------------------------------------------------------------------------- */

static struct {
    os_proc *proc;
    int how, port, serves;
} untrusted[UNTRUSTED];
static int num_untrusted;

static void nap(int ms) { os_sleep(os_between(1, ms) * OS_MS); }

static void speak(int fd, int how) {
    char bytes[64];
    for (size_t i = 0; i < sizeof bytes; i++) bytes[i] = (char)os_rand(256);
    if (how & 1) (void)send(fd, bytes, os_rand(sizeof bytes), MSG_NOSIGNAL);
    if (how & 2) nap(3000);
    if (how & 4) (void)recv(fd, bytes, sizeof bytes, 0);
}

/* Takes a port or connects to one; is silent, sends nonsense, or leaves at once. */
static void *untrusted_main(void *arg) {
    int k = (int)(intptr_t)arg, how = untrusted[k].how;
    struct sockaddr_in v4;
    memset(&v4, 0, sizeof v4);
    v4.sin_family = AF_INET;
    v4.sin_addr.s_addr = htonl(untrusted[k].serves ? INADDR_ANY : INADDR_LOOPBACK);
    v4.sin_port = htons((uint16_t)untrusted[k].port);
    for (int turn = 0; turn < 20; turn++) {
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0), peer;
        if (!untrusted[k].serves) {
            (void)connect(fd, (struct sockaddr *)&v4, sizeof v4);
            nap(30);
            speak(fd, how);
        } else if (!bind(fd, (struct sockaddr *)&v4, sizeof v4) && !listen(fd, 8)) {
            for (int i = 0; i < 100; i++) {
                nap(40);
                peer = os_accept(fd);
                if (peer < 0) continue;
                speak(peer, how);
                close(peer);
            }
        }
        close(fd);
        nap(100);
    }
    os_exit(0);
    return NULL;
}

/* ---- a seed ---------------------------------------------------------------------------------- */

static void make_store(job *j) {
    switch (os_rand(j->hosts > 1 ? 4 : 6)) {
    case 0: snprintf(j->store, sizeof j->store, "tcp://10.0.0.1:%d", PORT); break;
    case 1: snprintf(j->store, sizeof j->store, "tcp://node-0:%d", PORT); break;
    case 2: snprintf(j->store, sizeof j->store, "tcp://self-0:%d", PORT); break;
    case 3: snprintf(j->store, sizeof j->store, "file:///shared/meet-%d", j->number); break;
    case 4: snprintf(j->store, sizeof j->store, "tcp://localhost:%d", PORT); break;
    default: snprintf(j->store, sizeof j->store, "host:"); break;
    }
}

static void make_actor(actor *a, job *j, int rank, int host, int64_t start) {
    a->job = j, a->rank = rank, a->size = j->size;
    if (rank < 0) snprintf(a->name, sizeof a->name, "%d.launcher", j->number);
    else snprintf(a->name, sizeof a->name, "%d.rank-%d", j->number, rank);
    a->proc = os_process(a->name, host, start, rank < 0 ? launcher_main : rank_main, a);
    a->proc->rank = rank;
    snprintf(a->place, sizeof a->place, "%s", j->store);
    if (j->has_launcher && rank >= 0 && host) { /* started by another launcher */
        int is_tcp = !strncmp(j->store, "tcp:", 4);
        snprintf(a->served, sizeof a->served, "%s%s %s", j->store, is_tcp ? "-29516" : "", j->name);
        a->proc->served = a->served;
    }
}

static void start_job(job *j, int64_t late) {
    if (j->has_launcher) make_actor(&j->launcher, j, -1, 0, os.now + os_between(0, late));
    for (int r = 0; r < j->size; r++)
        make_actor(&j->ranks[r], j, r, r * j->hosts / j->size, os.now + os_between(0, late));
}

static void make_job(int number) {
    job *j = &jobs[number];
    memset(j, 0, sizeof *j);
    j->number = number;
    j->size = number ? (int)os_between(1, 2) : (int)os_between(1, RANKS);
    j->hosts = (int)os_between(1, j->size < 3 ? j->size : 3);
    int may_be_short = !num_untrusted && !os.slow_names; /* a name takes 2 s at most */
    j->timeout = (may_be_short && os_one_in(3) ? 4 : os_one_in(2) ? 10 : 30) * OS_S;
    j->pause = os_one_in(2) ? OS_MS : 50 * OS_MS;
    j->rounds = (int)os_between(1, 12);
    j->watch = 10 * OS_MS;
    j->has_launcher = os_one_in(2);
    j->worlds = os_one_in(4) ? 2 : 1;
    snprintf(j->name, sizeof j->name, "job-%d", number);
    make_store(j);
    start_job(j, os_one_in(2) ? 20 * OS_MS : j->timeout / 8);
}

static os_proc *someone(job *j) {
    int r = (int)os_rand((uint64_t)(j->size + j->has_launcher));
    return r < j->size ? j->ranks[r].proc : j->launcher.proc;
}

static int64_t sometime(const job *j) { /* during set-up, or later */
    return os.now + os_between(0, os_one_in(2) ? 300 * OS_MS : j->timeout / 4);
}

/* Errors that each call can return. */
static const int errors[OS_SITES][5] = {
    [OS_SOCKET] = {EMFILE, ENFILE, ENOBUFS, EACCES},
    [OS_CONNECT] = {ETIMEDOUT, EHOSTUNREACH, ENETUNREACH, EADDRNOTAVAIL, EAGAIN},
    [OS_BIND] = {EACCES, EADDRINUSE, ENOBUFS},
    [OS_LISTEN] = {EADDRINUSE},
    [OS_ACCEPT] = {ECONNABORTED, EMFILE, ENFILE, ENOBUFS, EPERM},
    [OS_POLL] = {EINTR, ENOMEM},
    [OS_SEND] = {EINTR, EAGAIN, ENOBUFS, ECONNRESET, EPIPE},
    [OS_RECV] = {EINTR, EAGAIN, ECONNRESET, ETIMEDOUT},
    [OS_READ] = {EINTR, EAGAIN},
    [OS_WRITE] = {EINTR, EAGAIN},
    [OS_EVENTFD] = {EMFILE, ENFILE},
    [OS_GETSOCKNAME] = {ENOBUFS},
    [OS_SETSOCKOPT] = {ENOBUFS},
    [OS_GETSOCKOPT] = {ENOBUFS},
    [OS_THREAD] = {EAGAIN},
    [OS_RANDOM] = {EAGAIN, ENOSYS},
    [OS_RESOLVE] = {EAGAIN},
    [OS_OPEN] = {EACCES, EMFILE},
    [OS_RENAME] = {EACCES},
    [OS_ALLOC] = {ENOMEM}};

static int num_errors(int site) {
    int n = 1;
    while (n < 5 && errors[site][n]) n++;
    return n;
}

static void plan_call(job *j) {
    os_fault *f = os_plan(OS_CALL, someone(j));
    f->site = (int)os_rand(OS_SITES);
    f->error = errors[f->site][os_rand((uint64_t)num_errors(f->site))];
    f->nth = (int)os_between(0, os_one_in(2) ? 3 : 60);
    f->count = os_one_in(2) ? 1 : (int)os_between(1, os_one_in(2) ? 10 : 1000);
}

static void plan_wrong(job *j) { /* a rank that was started with wrong options */
    actor *a = &j->ranks[os_rand((uint64_t)j->size)];
    if (j->size == 1) return;
    os_blame(a->proc, OS_DID_wrong);
    switch (os_rand(3)) {
    case 0: a->size++; break;
    case 1: a->proc->token = "another"; break;
    default: a->rank = (a->rank + 1) % j->size, j->ranks[a->rank].proc->faulty = 1; break;
    }
}

static void plan_hard(job *j) {
    static const int kinds[] = {OS_LONG_STOP, OS_KILL, OS_KILL, OS_KILL_CALL,
                                OS_RESET,     OS_CUT,  OS_CLOSE};
    uint64_t draw = os_rand(14);
    if (draw < 5) {
        plan_call(j);
    } else if (draw == 5) {
        plan_wrong(j);
    } else if (draw == 6) { /* never arrives in time */
        actor *a = &j->ranks[os_rand((uint64_t)j->size)];
        for (int i = 0; i < OS_TASKS; i++)
            if (os.tasks[i].state == OS_BLOCKED && os.tasks[i].proc == a->proc)
                os.tasks[i].wake += j->timeout * 3 / 2;
        os_blame(a->proc, OS_DID_late);
    } else {
        os_fault *f = os_plan(kinds[draw - 7], someone(j));
        f->at = sometime(j);
        f->nth = (int)os_rand(f->kind == OS_KILL_CALL ? 3000 : 6) + 1;
        f->length = j->timeout * os_between(1, 3);
        if (f->kind == OS_CUT)
            for (int r = 0; r < j->size && j->hosts > 1; r++) j->ranks[r].proc->faulty = 1;
        if (f->kind == OS_CUT && j->has_launcher) j->launcher.proc->faulty = 1;
    }
}

/* Plans faults that must not matter. */
static void plan_soft(job *j) {
    int stops = (int)os_rand(3);
    int64_t shortest = j->timeout;
    for (int i = 0; i < num_jobs; i++)
        if (jobs[i].timeout < shortest) shortest = jobs[i].timeout;
    for (int i = 0; i < stops; i++) {
        os_fault *f = os_plan(os_one_in(4) && j->hosts > 1 ? OS_CUT : OS_STOP, someone(j));
        f->at = sometime(j);
        f->length = os_between(OS_MS, shortest / 8); /* deadline of both jobs: a cut hits a host */
        f->count = 0;                                /* must not matter */
    }
}

static void make_untrusted(void) { /* each silent one costs a rank a second in each round */
    num_untrusted = os_one_in(3) ? (int)os_between(1, UNTRUSTED) : 0;
    for (int k = 0; k < num_untrusted; k++) {
        untrusted[k].how = (int)os_rand(8);
        untrusted[k].port = PORT + (int)os_rand(2);
        untrusted[k].serves = os_one_in(2);
        untrusted[k].proc = os_process("untrusted", 0, os.now + os_between(0, 100) * OS_MS,
                                       untrusted_main, (void *)(intptr_t)k);
    }
}

/* ---- invariants ------------------------------------------------------------------------------ */

static int is_faulty(const job *j, int rank) {
    return rank >= 0 && rank < j->size && j->ranks[rank].proc->faulty;
}

/* Returns 1 if all ranks of "ranks 1, 3 and 2 more have not joined" are faulty, or have already
   failed, with an error that is checked as well. */
static int all_faulty(const job *j, const char *list) {
    char *end;
    for (list += strcspn(list, "0123456789"); *list >= '0' && *list <= '9';) {
        int rank = (int)strtol(list, &end, 10);
        if (!is_faulty(j, rank) && (rank >= j->size || !j->ranks[rank].status)) return 0;
        list = end + (*end == ',' ? 2 : 0);
    }
    return 1;
}

/* Returns 1 if the rank is gone because its deadline has passed; its error is checked as well. */
static int has_given_up(const job *j, int rank) {
    const char *text = rank >= 0 && rank < j->size ? j->ranks[rank].text : "";
    return strstr(text, "[E717]") || strstr(text, "[E721]") || strstr(text, "[E791]");
}

/* Returns 1 if the store ended in order while its host was cut off, for longer than it waits for
   the close handshake: a peer that did not receive it reports a death. */
static int leaves_unheard(const job *j, const char *text) {
    const os_proc *p = j->has_launcher ? j->launcher.proc : j->ranks[0].proc;
    return strstr(text, "[E718]") && p->ended && os.cut_until[p->host] > p->died &&
           os.cut_for[p->host] > OS_S;
}

/* Returns 1 if the store was stopped or cut off for a while. It then notices deadlines later by
   that time, and the ranks' own deadlines come first. */
static int was_away(const job *j) {
    const os_proc *p = j->has_launcher ? j->launcher.proc : j->ranks[0].proc;
    return p->stop_sum > 200 * OS_MS || os.cut_for[p->host] > 200 * OS_MS;
}

/* Returns 1 if an error names a process that has a fault. */
static int blames_rightly(const job *j, const char *text) {
    const char *at = strstr(text, "[E"), *who = strstr(text, "[sim] rank ");
    int id = at ? (int)strtol(at + 2, NULL, 10) : 0, any = 0, local = 0;
    int launched = strstr(text, "the launcher") || (j->serves && !j->launcher.status);
    int server = launched ? j->launcher.proc->faulty : j->ranks[0].proc->faulty;
    for (int r = 0; r < j->size; r++) {
        any |= j->ranks[r].proc->faulty;
        local |= j->ranks[r].proc->faulty && !j->ranks[r].proc->host;
    }
    any |= j->has_launcher && j->launcher.proc->faulty;
    if (!strncmp(text, "rank ", 5) && is_faulty(j, (int)strtol(text + 5, NULL, 10))) return 1;
    if (who) /* a store that was silent for long may answer just then */
        return server || is_faulty(j, (int)strtol(who + 11, NULL, 10));
    if (strstr(text, "[sim]")) return server;
    switch (id) {
    case 704:                 /* the client or the server */
        if (server) return 1; /* fall through */
    case 701:
    case 705:
    case 706:
    case 719:
    case 730:
        if (strstr(at, "the store has closed its connection")) return server;
        if (strstr(at, "the store has no memory")) return server;
        who = strstr(at, "rank "); /* "has left": because of an error that is checked by itself */
        return who &&
               (id == 701 ? all_faulty(j, who) : is_faulty(j, (int)strtol(who + 5, NULL, 10)) ||
                                                     has_given_up(j, (int)strtol(who + 5, NULL, 10)));
    case 707: return all_faulty(j, at + 6);
    case 718: return server;
    case 793: /* a process that dies may reset its connections */
        who = strstr(at, "rank ");
        return server || (who && is_faulty(j, (int)strtol(who + 5, NULL, 10)));
    case 721: return server || was_away(j);
    case 720: return server || (j->has_launcher && local); /* the launcher ends with its ranks */
    case 717:
    case 791: return any; /* also: the job ended before the rank arrived */
    default: return 0;
    }
}

static struct {
    int64_t seeds, failed, finished, told, own, killed, did[OS_KINDS], sites[OS_SITES], steps;
    int64_t heard; /* deaths that nothing else hid from the other ranks */
} total;

/* Checks that a death in the running phase is noticed in time, if there was no other fault. */
static void check_heard(const job *j) {
    const os_proc *dead = NULL;
    int faulty = 0;
    for (int r = -1; r < j->size; r++) {
        const actor *a = r < 0 ? &j->launcher : &j->ranks[r];
        if (!a->proc) continue;
        faulty += a->proc->faulty || a->proc->stop_sum;
        if (a->proc->faulty && a->proc->exit_code == 137) dead = a->proc;
    }
    if (!dead || faulty != 1 || os.did[OS_DID_cut]) return;
    total.heard++;
    for (int r = 0; r < j->size; r++) {
        const actor *a = &j->ranks[r];
        if (a->proc->dead && a->proc->exit_code == 137) continue;
        if (a->heard > dead->died + HEARD + 4 * (os.latency + os.jitter))
            os_fail("%s hears of a death after %.3f s", a->name,
                    (double)(a->heard - dead->died) * 1e-9);
    }
}

static void judge(const job *j) {
    int faulty = j->has_launcher && j->launcher.proc->faulty;
    for (int r = 0; r < j->size; r++) faulty |= j->ranks[r].proc->faulty;
    for (int r = 0; r < j->size; r++) {
        const actor *a = &j->ranks[r];
        if (a->proc->exit_code == 137) total.killed++;
        else if (a->status && a->proc->faulty) total.own++;
        else if (a->status) total.told++;
        else total.finished++;
        if (a->proc->exit_code == 137 || a->proc->faulty || !a->status) continue;
        if (leaves_unheard(j, a->text)) continue;
        if (!faulty) os_fail("%s fails though nobody has a fault: %s", a->name, a->text);
        else if (!blames_rightly(j, a->text)) os_fail("%s: wrong blame: %s", a->name, a->text);
    }
    if (faulty) check_heard(j);
    else if (j->has_launcher && j->launcher.status)
        os_fail("the launcher fails though nobody has a fault: %s", j->launcher.text);
}

/* Runs the simulation and checks it. `what` describes it, with the options that repeat it. */
static H_PRINTF(1, 2) void run(const char *what, ...) {
    char text[200];
    va_list args;
    va_start(args, what);
    vsnprintf(text, sizeof text, what, args);
    va_end(args);
    os_run();
    for (int i = 0; i < num_jobs && !os.failed[0]; i++) judge(&jobs[i]);
    total.seeds++;
    total.steps += os.steps;
    for (int i = 0; i < OS_KINDS; i++) total.did[i] += os.did[i];
    for (int i = 0; i < OS_SITES; i++) total.sites[i] += os.sites[i];
    if (os.failed[0]) {
        fprintf(stderr, "%s\n  again: SIM_TRACE=1 %s %s\n", os.failed, h_program, text);
        if (++total.failed > 20) CHECK_EQ_INT(total.failed, 0);
    }
    os_end();
}

static void run_seed(uint64_t seed) {
    os_begin(seed);
    num_jobs = os_one_in(4) ? 2 : 1;
    make_untrusted();
    for (int i = 0; i < num_jobs; i++) make_job(i);
    if (os_one_in(2)) plan_soft(&jobs[0]);
    int hard = os_one_in(2) ? 0 : (int)os_between(1, 3);
    while (hard-- > 0) plan_hard(&jobs[0]);
    run("--filter=sim_store.one --seed=%llu", (unsigned long long)seed);
}

static void print_totals(void) {
    char text[900];
    int used = 0;
    for (int i = 0; i < OS_KINDS; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s %s %lld", i ? "," : "",
                         os_kind_names[i], (long long)total.did[i]);
    h_message("%lld seeds, %lld steps; ranks: %lld finished, %lld told of others' faults, %lld of "
              "their own, %lld killed; %lld times all had to hear of a death at once",
              (long long)total.seeds, (long long)total.steps, (long long)total.finished,
              (long long)total.told, (long long)total.own, (long long)total.killed,
              (long long)total.heard);
    h_message("faults:%s", text);
    used = 0;
    for (int i = 0; i < OS_SITES; i++)
        used += snprintf(text + used, sizeof text - (size_t)used, "%s %s %lld", i ? "," : "",
                         os_site_names[i], (long long)total.sites[i]);
    h_message("failed calls:%s", text);
}

static void seeds(uint64_t first, int count) {
    for (int i = 0; i < count; i++) run_seed(first + (uint64_t)i);
    print_totals();
    CHECK_EQ_INT(total.failed, 0);
}

/* ---- one fault at a time --------------------------------------------------------------------- */

/* Makes three ranks on one host or several. Only the order of threads is random. */
static void make_plain(int has_launcher, int is_host, int64_t pause) {
    job *j = &jobs[0];
    os_begin(h_seed());
    os.parts = os.interrupts = os.slow_names = 0;
    os.latency = os.jitter = 100000;
    num_jobs = 1;
    num_untrusted = 0;
    memset(j, 0, sizeof *j);
    j->size = 3,
    j->hosts = is_host               ? 1
               : pause > 100 * OS_MS ? 2
                                     : 3,
    j->timeout = 10 * OS_S, j->pause = pause, j->watch = OS_MS / 5;
    j->rounds = pause > 100 * OS_MS ? 8 : 3, j->worlds = 1, j->has_launcher = has_launcher;
    snprintf(j->name, sizeof j->name, "plain");
    snprintf(j->store, sizeof j->store, is_host ? "host:" : "tcp://node-0:%d", PORT);
    start_job(j, 10 * OS_MS);
}

static os_proc *victim_of(int has_launcher, int which) { /* the process that serves, or another */
    if (which) return jobs[0].ranks[2].proc;
    return has_launcher ? jobs[0].launcher.proc : jobs[0].ranks[0].proc;
}

/* Returns 1 if the case runs: SIM_CASE=site,error,how,nth selects a single one. */
static int is_chosen(int a, int b, int c, int d) {
    const char *one = getenv("SIM_CASE");
    char text[64];
    snprintf(text, sizeof text, "%d,%d,%d,%d", a, b, c, d);
    return !one || !strcmp(one, text);
}

static void each_call(int most, int hows) {
    for (int site = 0; site < OS_SITES; site++)
        for (int e = 0; e < num_errors(site); e++)
            for (int how = 0; how < hows; how++)
                for (int nth = 0, hit = 1; hit && nth < most; nth++) {
                    if (!is_chosen(site, e, how, nth)) continue;
                    make_plain(how & 1, how & 2, 5 * OS_MS);
                    os_fault *f = os_plan(OS_CALL, victim_of(how & 1, how & 4));
                    f->site = site, f->error = errors[site][e], f->nth = nth;
                    f->count = how & 8 ? 100 : 1;
                    run("--filter=sim_store.each_call, with SIM_CASE=%d,%d,%d,%d", site, e, how,
                        nth);
                    hit = f->site == site && (os.did[OS_DID_call] || os.did[OS_DID_memory]);
                }
    print_totals();
    CHECK_EQ_INT(total.failed, 0);
}

/* A rank of three, each on its own host, dies at each of its calls. */
static void each_death(int most, int step) {
    for (int how = 0; how < 6; how++)
        for (int nth = 1, hit = 1; hit && nth < most; nth += step) {
            if (!is_chosen(0, 0, how, nth)) continue;
            make_plain(how & 1, 0, 5 * OS_MS);
            os_proc *p = jobs[0].ranks[how / 2].proc;
            os_plan(OS_KILL_CALL, p)->nth = nth;
            run("--filter=sim_store.each_death, with SIM_CASE=0,0,%d,%d", how, nth);
            hit = os.did[OS_DID_death] != 0;
        }
    print_totals();
    CHECK_EQ_INT(total.failed, 0);
}

static void each_descriptor(int times) {
    for (int time = 0; time < times; time++)
        for (int how = 0; how < 8; how++)
            for (int nth = 0, hit = 1; hit; nth++) {
                if (!is_chosen(time, 0, how, nth)) continue;
                make_plain(how & 1, how & 2, 200 * OS_MS); /* time to notice a thread that spins */
                os_fault *f = os_plan(OS_CLOSE, victim_of(how & 1, how & 4));
                f->nth = nth, f->at = os.now + time * 120 * OS_MS / times;
                run("--filter=sim_store.each_descriptor, with SIM_CASE=%d,0,%d,%d", time, how, nth);
                hit = os.did[OS_DID_closed] != 0;
            }
    print_totals();
    CHECK_EQ_INT(total.failed, 0);
}

/* The host of the store is cut off at each moment, for less than the close handshake's timeout. */
static void each_cut(int64_t step) {
    for (int how = 0; how < 2; how++)
        for (int64_t at = 0; at < 200 * OS_MS; at += step) {
            if (!is_chosen(0, 0, how, (int)(at / step))) continue;
            make_plain(how, 0, 5 * OS_MS);
            /* some get their last answer when others leave */
            os.latency = 0, os.jitter = 6 * OS_MS;
            os_fault *f = os_plan(OS_CUT, victim_of(how, 0));
            f->at = os.now + at, f->length = 700 * OS_MS, f->count = 0;
            run("--filter=sim_store.each_cut, with SIM_CASE=0,0,%d,%d", how, (int)(at / step));
        }
    print_totals();
    CHECK_EQ_INT(total.failed, 0);
}

/* ---- blame for missing data ------------------------------------------------------------------ */

/* In each round all ranks send to all, over links that the store does not use. From some round on,
   one link is cut, in one direction or both, or one rank is stopped. */
static struct {
    int from, to, both, stopped, first; /* stopped: a rank; -1: the link is cut */
    int sent[RANKS], waits[RANKS];      /* by rank: its round; the rank that it waits for */
} links;

static int has_come(int from, int to, int round) {
    int is_cut = links.stopped < 0 && round >= links.first &&
                 ((from == links.from && to == links.to) ||
                  (links.both && from == links.to && to == links.from));
    return links.sent[from] >= round && !is_cut;
}

static void says_for_whom(void *user, fsdpi_store_beat *out) {
    const actor *a = (const actor *)user;
    beats(user, out);
    out->busy = FSDPI_WAITS_FOR + links.waits[a->rank];
}

static void trade(actor *a) {
    static const int32_t ids[RANKS] = {0, 1, 2, 3, 4, 5};
    fsdpi_transport table;
    fsdpi_store_world w;
    fsdpi_comm c;
    fsdpi_store_desc d = desc_of(a);
    d.beat = says_for_whom;
    memset(&table, 0, sizeof table), memset(&w, 0, sizeof w), memset(&c, 0, sizeof c);
    if (fsdpi_store_open(&d, &w.store, a->text, sizeof a->text)) os_fail("set-up: %s", a->text);
    if (os.failed[0]) return;
    table.ask = fsdpi_store_world_ask;
    w.base.boot = d.boot, w.base.transport = &table, w.base.failed = &w.store->judged;
    c.world = &w.base, c.boot = &w.base.boot, c.index = a->rank, c.size = a->size;
    c.ranks = (int32_t *)(intptr_t)ids;
    for (int k = 1; !fsdpi_store_failure(w.store, NULL); k++) {
        int64_t until = os.now + d.boot.timeout_ns;
        uint8_t missing[RANKS] = {0};
        char reason[FSDPI_REASON];
        fsdpi_text t = {reason, sizeof reason, 0};
        int late = 0;
        links.sent[a->rank] = k;
        for (int r = 0; r < a->size; r++) {
            if (r == a->rank) continue; /* no rank waits for itself */
            if (os.now < until) links.waits[a->rank] = r; /* after the deadline it waits no more */
            while (!has_come(r, a->rank, k) && os.now < until && !fsdpi_comm_failed(&c))
                os_sleep(OS_MS);
            late += missing[r] = !has_come(r, a->rank, k);
        }
        if (!late) os_sleep(os_between(1, 20) * OS_MS);
        else if (!fsdpi_comm_failed(&c) && fsdpi_say_late(&t, &c, missing, "come"))
            fsdpi_store_abort(w.store, FSDP_ERR_TIMEOUT, "round", reason);
    }
    snprintf(a->text, sizeof a->text, "%s", w.store->failure.reason);
    a->status = FSDP_ERR_TIMEOUT;
    fsdpi_store_close(w.store);
}

/* Cut link: its ends wait for each other, and no rank is named as missing. Stopped rank: only it is
   named as missing, though other ranks are late as well. */
static void blame_seed(uint64_t seed) {
    job *j = &jobs[0];
    char want[80];
    os_begin(seed);
    num_jobs = 1, num_untrusted = 0;
    memset(j, 0, sizeof *j), memset(&links, 0, sizeof links);
    j->size = (int)os_between(2, RANKS), j->hosts = (int)os_between(1, j->size < 3 ? j->size : 3);
    j->timeout = os_between(2, 8) * OS_S;
    snprintf(j->name, sizeof j->name, "links");
    snprintf(j->store, sizeof j->store, "tcp://10.0.0.1:%d", PORT);
    links.from = (int)os_rand((uint64_t)j->size);
    j->trades = 1;
    links.to = (links.from + (int)os_between(1, j->size - 1)) % j->size;
    links.both = os_one_in(2), links.first = (int)os_between(2, 40);
    /* not rank 0: it serves, and without it no failure spreads */
    links.stopped = os_one_in(2) ? links.to : -1;
    if (!links.stopped) links.stopped = -1;
    for (int r = 0; r < j->size; r++)
        make_actor(&j->ranks[r], j, r, r * j->hosts / j->size, os.now + os_between(0, 20 * OS_MS));
    for (int r = 1; r < j->size; r++) { /* late now and then */
        os_fault *f = os_plan(OS_STOP, j->ranks[r].proc);
        f->at = os.now + OS_S + os_between(0, j->timeout), f->length = os_between(1, 300) * OS_MS;
        f->count = 0;
        if (r == links.stopped) f->at = os.now + os_between(1000, 2000) * OS_MS;
        if (r == links.stopped) f->length = 3 * j->timeout;
    }
    os_run();
    snprintf(want, sizeof want, "[E403] rank %d has not come", links.stopped);
    for (int r = 0; r < j->size && !os.failed[0]; r++) {
        const char *text = j->ranks[r].text, *rest = strstr(text, "which waits for");
        int ends = 0;
        for (int end = 0; rest && end < 2; end++) {
            char one[24];
            snprintf(one, sizeof one, "rank %d", end ? links.from : links.to);
            const char *at = strstr(text, one);
            ends += at && at < rest;
        }
        if (links.stopped < 0 ? !strstr(text, "[E487]") || ends != 2 || strstr(text, "[E403]")
                              : r != links.stopped && !strstr(text, want))
            os_fail("rank %d: wrong blame (cut %d to %d, stopped %d): %s", r, links.from, links.to,
                    links.stopped, text);
    }
    total.seeds++, total.told += links.stopped < 0, total.steps += os.steps;
    if (os.failed[0]) {
        fprintf(stderr, "%s\n  again: SIM_TRACE=1 %s --filter=sim_store.one_blame --seed=%llu\n",
                os.failed, h_program, (unsigned long long)seed);
        total.failed++;
    }
    os_end();
}

static void blames(uint64_t first, int count) {
    for (int i = 0; i < count; i++) blame_seed(first + (uint64_t)i);
    h_message("%lld seeds: %lld with a link that is cut, the others with a rank that is stopped",
              (long long)total.seeds, (long long)total.told);
    CHECK_EQ_INT(total.failed, 0);
}

/* A reset of a connection to another host is not reported as a death: a firewall may have caused
   it. On one host only the end of a process causes it. */
TEST(sim_store, reset_is_no_death) {
    int told[2] = {0, 0}; /* on several hosts, on one */
    for (int how = 0; how < 4; how++)
        for (int64_t at = 20; at < 60; at += 2) {
            const job *j = &jobs[0];
            make_plain(how & 1, how & 2, 5 * OS_MS);
            jobs[0].rounds = 12;
            os_fault *f = os_plan(OS_RESET, j->ranks[2].proc);
            f->at = os.now + at * OS_MS, f->nth = (int)(at / 2 % 6);
            os_run();
            for (int r = 0; r < j->size && !os.failed[0]; r++) {
                const char *text = strstr(j->ranks[r].text, "[E706] rank ");
                if (!text || text[12] == '0') continue; /* rank 0 is on the host of the store */
                told[how / 2]++;
                CHECK_MSG(!strstr(text, "has died") == !(how & 2), "%s", text);
                CHECK_MSG(how & 2 || strstr(text, "was reset"), "%s", text);
            }
            CHECK_MSG(!os.failed[0], "%s", os.failed);
            os_end();
        }
    CHECK_MSG(told[0] && told[1], "%d and %d texts", told[0], told[1]);
}

TEST(sim_store, one_blame) { blames(h_seed(), 1); }
TEST(sim_store, blame) { blames(1000 * h_seed(), FEWER ? 10 : 100); }
TEST(sim_store, one) { seeds(h_seed(), 1); }
TEST(sim_store, seeds) { seeds(1000 * h_seed(), FEWER ? 60 : 500); }
TEST(sim_store, each_call, SLOW) { each_call(FEWER ? 1 : 3, FEWER ? 4 : 8); }
TEST(sim_store, each_death, SLOW) { each_death(5000, FEWER ? 101 : 13); }
TEST(sim_store, each_descriptor, SLOW) { each_descriptor(FEWER ? 2 : 12); }
TEST(sim_store, each_cut, SLOW) { each_cut(FEWER ? 10 * OS_MS : OS_MS); }
TEST(long_sim, seeds, SECONDS(1800) | NIGHT) { seeds(1000000 * h_seed(), FEWER ? 5000 : 100000); }
TEST(long_sim, each_call, SECONDS(600) | NIGHT) { each_call(80, 16); }
TEST(long_sim, each_death, SECONDS(600) | NIGHT) { each_death(5000, 1); }
TEST(long_sim, each_descriptor, SECONDS(600) | NIGHT) { each_descriptor(300); }
