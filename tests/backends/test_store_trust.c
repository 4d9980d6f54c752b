/* test_store_trust.c - security of the store (docs/cluster.md, Trust): foreign stores, programs in
   between, a silent launcher, tokens, and things that would block.

   SPDX-License-Identifier: MIT */
#define TAGS TSAN | AT_NIGHT(ASAN)
#include "harness.h"
#include <dlfcn.h> /* dlsym */
#include <poll.h>  /* poll */
#include "library.c"
#include "lab_store.h"

/* Sets FSDP_STORE_SERVED of a rank; `behind` follows the address: NULL, or text like "-29516". */
static void say_served(const setup *s, const char *behind) {
    char text[600];
    snprintf(text, sizeof text, "%s%s %s", s->address, behind ? behind : "", s->job);
    setenv("FSDP_STORE_SERVED", text, 1);
}

/* ---- foreign stores -------------------------------------------------------------------------- */

/* The foreign store's reaction to a message. */
enum { SILENT, OLD, TAKES, NO_TAG, WRONG_TAG, REFLECTS, REFUSES, JUDGES };
typedef struct {
    const char *name;
    int kind;
    const char *says; /* the text of a rank that finds no other store */
} rogue;
static const rogue rogues[] = {
    {"only_a_challenge", SILENT, "does not answer what is said to it"},
    {"version_1", OLD, "speaks version 1 of the store's protocol"},
    {"lets_all_in", TAKES, "does not know this job's token"},
    {"proof_without_tag", NO_TAG, "does not know this job's token"},
    {"proof_with_wrong_tag", WRONG_TAG, "does not know this job's token"},
    {"reflects", REFLECTS, "does not know this job's token"},
    {"refuses_for_good", REFUSES, "serves another job"},
    {"failure", JUDGES, "does not know this job's token"},
};

static const char forged[12 + 40] = "\x08\0\0\0\0\0\0\0\xff\xff\xff\xff" /* ABORTED */
                                    "forged\0this is forged";

static void rogue_answers(int fd, int kind, unsigned char *got, size_t size) {
    unsigned char out[600];
    switch (kind) {
    case TAKES: /* as the stores of version 1 did */
    case OLD:
        raw_send(fd, out, frame(out, OP_REPLY, 0, NULL, "\0\0\0\0", 4));
        raw_send(fd, out, frame(out, OP_JOINED, 0, NULL, NULL, 0));
        raw_send(fd, out, frame(out, OP_FAILURE, 0, NULL, forged, sizeof forged));
        break;
    case NO_TAG: raw_send(fd, out, frame(out, OP_PROVEN, 0, NULL, NULL, 0)); break;
    case WRONG_TAG: raw_send(fd, out, frame(out, OP_PROVEN, 0, NULL, forged, TAG)); break;
    case REFLECTS: /* returns the client's own proof as the store's */
        number(got + 4, OP_PROVEN, 2);
        raw_send(fd, got, size);
        break;
    case REFUSES:
        size = frame(out, OP_REFUSED, 0, NULL, "forged", 6);
        number(out + 6, FSDP_ERR_MISMATCH, 2);
        raw_send(fd, out, size);
        break;
    case JUDGES: raw_send(fd, out, frame(out, OP_FAILURE, 0, NULL, forged, sizeof forged)); break;
    default: break;
    }
}

static void rogue_store(setup *s) {
    unsigned char out[HEADER + NONCE], got[600], nonce[NONCE] = {5};
    int listener = listen_at(s->port), fds[64], count = 0;
    CHECK(!listen(listener, 64));
    raise_flag(&s->up);
    while (!__atomic_load_n(&s->down, __ATOMIC_SEQ_CST)) {
        struct pollfd p = {listener, POLLIN, 0};
        if (poll(&p, 1, 2) > 0 && count < 64) {
            fds[count] = accept4(listener, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
            CHECK(fds[count] >= 0);
            size_t size = frame(out, OP_CHALLENGE, s->squatter == OLD ? 0 : 2, NULL, nonce, NONCE);
            raw_send(fds[count++], out, size);
        }
        for (int i = 0; i < count; i++) {
            ssize_t size = recv(fds[i], got, sizeof got, 0);
            if (size > 0) rogue_answers(fds[i], s->squatter, got, (size_t)size);
            if (size == 0) close(fds[i]), fds[i--] = fds[--count];
        }
    }
}

/* A foreign store has the port of the job: ranks skip it, soon, and ignore its messages. */
static void meets_elsewhere(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    int64_t start = h_calm_ms();
    client c;
    enter(&c, s, rank);
    within(start, 6000);
    exchange(&c, world, "a");
    no_failure(&c);
    leave(&c, s, world);
}
TEST_P(trust, rogue_store, rogues, SLOW) {
    setup *s = make_setup(AT_IPV4, 3, 0, 20000);
    client c;
    s->squatter = row->kind;
    pid_t pid = aside(rogue_store, s);
    run(s, meets_elsewhere);
    s->timeout_ms = 300;
    CHECK_STATUS(open_as(&c, s, 1, 3), FSDP_ERR_TIMEOUT);
    says(c.error, row->says);
    CHECK(!strstr(c.error, "forged"));
    aside_ends(s, pid);
}

/* ---- a program in between -------------------------------------------------------------------- */

enum { FORWARDS, RANK, SIZE, PROOF, BIT, MAGIC, AGAIN, LEAVES_OUT, INSERTS, ANSWER };
typedef struct {
    const char *name;
    int kind;
    const char *says; /* text of both ranks */
} relay;
static const relay relays[] = {
    {"forwards", FORWARDS, NULL},
    {"another_rank", RANK, NULL},
    {"another_size", SIZE, NULL},
    {"bit_of_the_stores_proof", PROOF, NULL},
    {"bit_of_a_set", BIT, "[E792] rank 1 is cut off"},
    {"bit_of_the_magic_number", MAGIC, "[E792] rank 1 is cut off"},
    {"set_repeated", AGAIN, "[E792] rank 1 is cut off"},
    {"set_left_out", LEAVES_OUT, "[E792] rank 1 is cut off"},
    {"failure_inserted", INSERTS, "[E790] rank 1: messages of the store were changed"},
    {"bit_of_an_answer", ANSWER, "[E790] rank 1: messages of the store were changed"},
};

typedef struct {
    int fd[2]; /* client, store */
    unsigned char bytes[2][4096];
    size_t size[2];
    int hellos, answers;
} pair;

/* Forwards one whole frame of `size` bytes to fd[!from]. */
static void relay_frame(const setup *s, pair *p, int from, unsigned char *at, size_t size) {
    unsigned char out[600];
    int op = (int)number_at(at + 4, 2), kind = s->squatter, to = p->fd[!from];
    if (op == OP_HELLO && kind == RANK) {
        /* the rank's place in version 1, and now */
        at[size == HEADER + 60 ? HEADER + 36 : HEADER] = 2;
    }
    if (op == OP_HELLO && kind == SIZE) at[HEADER + 4] = 2;
    if (op == OP_PROVEN && kind == PROOF) at[size - 1] ^= 1;
    if (op == OP_SET && kind == MAGIC) at[0] ^= 1;
    if (op == OP_SET && kind == BIT) at[HEADER + number_at(at + 12, 4)] ^= 1;
    if (op == OP_SET && kind == AGAIN) raw_send(to, at, size);
    if (op == OP_SET && kind == LEAVES_OUT) return;
    if (from && op == OP_REPLY && kind == ANSWER && p->answers++ == 1) at[HEADER] ^= 1;
    raw_send(to, at, size);
    if (op == OP_JOINED && kind == INSERTS)
        raw_send(to, out, frame(out, OP_FAILURE, 0, NULL, forged, sizeof forged));
}

/* Returns 0 if one side has closed. */
static int relay_moves(const setup *s, pair *p, int from) {
    ssize_t got = recv(p->fd[from], p->bytes[from] + p->size[from],
                       sizeof p->bytes[from] - p->size[from], MSG_DONTWAIT);
    if (got < 0 && errno == EAGAIN) return 1;
    if (got <= 0) return 0;
    p->size[from] += (size_t)got;
    for (size_t size; p->size[from] >= HEADER; p->size[from] -= size) {
        unsigned char *at = p->bytes[from];
        size = HEADER + (size_t)number_at(at + 12, 4) + (size_t)number_at(at + 16, 8);
        CHECK(size <= sizeof p->bytes[from]);
        if (p->size[from] < size) break;
        relay_frame(s, p, from, at, size);
        memmove(at, at + size, p->size[from] - size);
    }
    return 1;
}

static void relay_runs(setup *s) {
    static pair pairs[64];
    int listener = listen_at(s->served_at), count = 0;
    CHECK(!listen(listener, 64));
    raise_flag(&s->up);
    while (!__atomic_load_n(&s->down, __ATOMIC_SEQ_CST)) {
        struct pollfd p = {listener, POLLIN, 0};
        if (poll(&p, 1, 1) > 0 && count < 64) {
            memset(&pairs[count], 0, sizeof *pairs);
            pairs[count].fd[0] = accept4(listener, NULL, NULL, SOCK_CLOEXEC);
            pairs[count].fd[1] = raw_connect(s->port);
            CHECK(pairs[count].fd[0] >= 0);
            count++;
        }
        for (int i = 0; i < count; i++) {
            if (pairs[i].fd[1] >= 0 && relay_moves(s, &pairs[i], 0) && relay_moves(s, &pairs[i], 1))
                continue;
            close(pairs[i].fd[0]), close(pairs[i].fd[1]);
            pairs[i--] = pairs[--count];
        }
    }
}

/* Returns 1 if the change invalidates the proof of rank 1 or of the store. */
static int is_kept_out(const relay *r) {
    return r->kind == RANK || r->kind == SIZE || r->kind == PROOF;
}

/* Rank 1 connects to the store of rank 0 through the relay. */
static void through_relay(int rank, int world, void *arg) {
    setup *s = (setup *)arg, mine = *s;
    const relay *r = (const relay *)s->extra;
    client c;
    char text[16];
    size_t size = 0;
    if (rank == 2) return;
    if (rank == 1) {
        snprintf(mine.address, sizeof mine.address, "tcp://127.0.0.1:%d", s->served_at);
        say_served(&mine, NULL);
    }
    if (is_kept_out(r)) { /* nor does the store let it in as rank 2 */
        CHECK_STATUS(open_as(&c, &mine, rank, world), FSDP_ERR_TIMEOUT);
        if (rank == 0) says(c.error, "ranks 1, 2 have not joined");
        return;
    }
    fsdp_status status = open_as(&c, &mine, rank, world);
    if (status) { /* it failed at once */
        CHECK(r->says != NULL);
        says(c.error, r->says);
        raise_flag(&s->flags[1]);
        return;
    }
    if (rank == 0) (void)fsdpi_store_set(c.store, "zero", "0", 1);
    if (rank == 1) (void)fsdpi_store_set(c.store, "one", "1", 1);
    status = try_get(&c, rank ? "zero" : "one", text, sizeof text, &size, 20000);
    if (!r->says) {
        CHECK_OK(status);
        no_failure(&c);
        leave(&c, s, world);
        return;
    }
    fsdpi_failure v = await_failure(&c, 5000);
    says(v.reason, r->says);
    CHECK_EQ_INT(v.status, FSDP_ERR_IO);
    gather_at(s, 1);
    fsdpi_store_close(c.store);
}
TEST_P(trust, relay, relays, SLOW) {
    const int lost = is_kept_out(row);
    setup *s = make_setup(AT_IPV4, 2 + lost, 0, lost ? 1500 : 10000);
    s->extra = row, s->squatter = row->kind;
    do s->served_at = h_free_port();
    while (s->served_at >= s->port && s->served_at < s->port + 17);
    pid_t pid = aside(relay_runs, s);
    run(s, through_relay);
    aside_ends(s, pid);
}

/* Bytes recorded from one connection are useless on another one. */
TEST(trust, replay) {
    setup *s = make_setup(AT_IPV4, 1, 0, 5000);
    unsigned char nonce[NONCE + 1], mine[NONCE] = {7}, out[HEADER + PROVE_BYTES], token[32];
    client c;
    wire w[2];
    enter(&c, s, 0);
    memset(w, 0, sizeof w);
    fsdpi_store_token(s->job, token);
    for (int i = 0; i < 2; i++) {
        w[i].fd = raw_connect(s->port);
        CHECK_EQ_INT(wire_frame(&w[i], (char *)nonce, sizeof nonce, NULL), OP_CHALLENGE);
        if (i == 0) CHECK_EQ_INT(prove(&w[0], out, token, nonce, mine), sizeof out);
        raw_send(w[i].fd, out, sizeof out);
        CHECK_EQ_INT(wire_frame(&w[i], NULL, 0, NULL), i ? OP_REFUSED : OP_PROVEN);
    }
    CHECK_EQ_INT(wire_frame(&w[1], NULL, 0, NULL), 0);
    no_failure(&c);
    fsdpi_store_close(c.store);
}

/* Ranks of version 1 get an error that says so, and so do the ranks that wait for them. */
static void waits_for_old(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    unsigned char out[HEADER + 60] = {0};
    client c;
    wire w;
    if (rank == 0) {
        CHECK_STATUS(open_as(&c, s, 0, world), FSDP_ERR_TIMEOUT);
        says(c.error, "rank 1 has not joined");
        says(c.error, "others have called that speak version 1 of the store's protocol");
        return;
    }
    await_flag(s->joined, 1);
    memset(&w, 0, sizeof w);
    w.fd = raw_connect(s->port);
    CHECK_EQ_INT(wire_frame(&w, NULL, 0, NULL), OP_CHALLENGE);
    header(out, OP_HELLO, 0, 0, 60);
    raw_send(w.fd, out, sizeof out);
    CHECK_EQ_INT(wire_frame(&w, NULL, 0, NULL), OP_REFUSED);
}
TEST(trust, old_ranks_are_counted) { run(make_setup(AT_IPV4, 2, 0, 700), waits_for_old); }

/* Only a rank with a proof, not an untrusted peer, can show at which address others reach the host.
   */
TEST(trust, untrusted_peers_choose_no_address) {
    setup *s = make_setup(AT_HOST, 2, 0, 1000);
    fsdpi_store_core core;
    unsigned char nonce[NONCE] = {1}, out[HEADER + PROVE_BYTES], token[32] = {2};
    wire w;
    memset(&w, 0, sizeof w);
    CHECK(fsdpi_store_core_open(&core, &s->allocator, 2, -1, token));
    fsdpi_conn *untrusted = fsdpi_store_core_connect(&core, nonce, 0);
    fsdpi_conn *rank = fsdpi_store_core_connect(&core, nonce, 0);
    CHECK_EQ_STR(untrusted->reached, "");
    snprintf(untrusted->reached, sizeof untrusted->reached, "192.0.2.66");
    snprintf(rank->reached, sizeof rank->reached, "192.0.2.1");
    fsdpi_store_core_feed(&core, untrusted, "x", 1, 0);
    fsdpi_store_core_feed(&core, rank, out, prove(&w, out, token, nonce, nonce), 0);
    CHECK_EQ_STR(core.reached, "");
    fsdpi_store_core_feed(&core, rank, out, seal(&w, out, hello(out, 1, 2, 1000, 1000)), 0);
    CHECK_EQ_INT(rank->state, FSDPI_CONN_RANK);
    CHECK_EQ_STR(core.reached, "192.0.2.1");
    fsdpi_store_core_close(&core);
}

/* If there are too many connections, untrusted peers are closed first: a proven one stays. */
TEST(trust, untrusted_peers_are_evicted_first) {
    setup *s = make_setup(AT_HOST, 2, 0, 1000);
    fsdpi_store_core core;
    unsigned char nonce[NONCE] = {1}, out[HEADER + PROVE_BYTES], token[32] = {2};
    wire w;
    CHECK(fsdpi_store_core_open(&core, &s->allocator, 2, -1, token));
    fsdpi_conn *first = fsdpi_store_core_connect(&core, nonce, 0);
    size_t size = prove(&w, out, token, nonce, nonce);
    fsdpi_store_core_feed(&core, first, out, size, 0);
    CHECK_EQ_INT(first->state, FSDPI_CONN_PROVEN);
    fsdpi_conn *second = fsdpi_store_core_connect(&core, nonce, 0);
    fsdpi_conn *third = fsdpi_store_core_connect(&core, nonce, 0);
    CHECK(fsdpi_store_core_evict(&core));
    CHECK_EQ_INT(second->state, FSDPI_CONN_BROKEN);
    fsdpi_store_core_disconnect(&core, second, 0);
    CHECK(fsdpi_store_core_evict(&core));
    CHECK_EQ_INT(third->state, FSDPI_CONN_BROKEN);
    fsdpi_store_core_disconnect(&core, third, 0);
    CHECK_EQ_INT(first->state, FSDPI_CONN_PROVEN);
    CHECK(fsdpi_store_core_evict(&core));
    CHECK_EQ_INT(first->state, FSDPI_CONN_BROKEN);
    fsdpi_store_core_disconnect(&core, first, 0);

    /* Connections with a wrong token, which are being closed, go before one that has just arrived.
       */
    fsdpi_conn *newcomer = fsdpi_store_core_connect(&core, nonce, 0), *refused[2];
    for (int i = 0; i < 2; i++) {
        refused[i] = fsdpi_store_core_connect(&core, nonce, 0);
        size = prove(&w, out, nonce, nonce, nonce);
        fsdpi_store_core_feed(&core, refused[i], out, size, 0);
        CHECK_EQ_INT(refused[i]->state, FSDPI_CONN_ENDING);
    }
    for (int i = 0; i < 2; i++) {
        CHECK(fsdpi_store_core_evict(&core));
        CHECK_EQ_INT(refused[i]->state, FSDPI_CONN_BROKEN);
        fsdpi_store_core_disconnect(&core, refused[i], 0);
    }
    CHECK_EQ_INT(newcomer->state, FSDPI_CONN_UNTRUSTED);
    fsdpi_store_core_close(&core);
}

/* ---- a launcher that serves ------------------------------------------------------------------ */

typedef struct {
    const char *name;
    int at;
    const char *behind;
} served;
static const served serveds[] = {
    {"port", AT_IPV4, NULL}, {"ports", AT_IPV4, "-65535"}, {"host", AT_HOST, NULL}};

/* The launcher is stopped when ranks 0 and 1 arrive, and continues after they have tried for a
   while. */
static void finds_stopped(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    const served *how = (const served *)s->extra;
    client c;
    if (rank == world) { /* not one of the ranks */
        await_flag(&s->flags[1], 2);
        usleep((useconds_t)s->squatter * 1000);
        raise_flag(&s->flags[0]);
        CHECK(!kill(s->pids[RANKS - 1], SIGCONT));
        return;
    }
    say_served(s, how->behind);
    if (rank == 2) await_flag(&s->flags[0], 1);
    raise_flag(&s->flags[1]);
    enter(&c, s, rank);
    CHECK_EQ_INT(__atomic_load_n(&s->flags[0], __ATOMIC_SEQ_CST), 1);
    CHECK_EQ_INT(c.store->server_rank, -1); /* the launcher */
    exchange(&c, world, "a");
    leave(&c, s, world);
}
static void of_three(int process, int world, void *arg) { finds_stopped(process, world - 1, arg); }
static void stopped_launcher(const served *row, int stop_ms) {
    setup *s = make_setup(row->at, 3, 0, 20000);
    s->extra = row, s->squatter = stop_ms;
    pid_t pid = aside(serves_aside, s);
    s->pids[RANKS - 1] = (int)pid;
    CHECK(!kill(pid, SIGSTOP));
    h_ranks_proc(4, of_three, s);
    aside_ends(s, pid);
}
TEST_P(trust, stopped_launcher, serveds, SLOW) { stopped_launcher(row, 1300); }
TEST_P(long_trust, stopped_launcher, serveds, NIGHT) { stopped_launcher(row, 2500); }

/* The launcher has ended: no rank takes its place, and the text says who is missing. */
TEST(trust, launcher_is_gone) {
    setup *s = make_setup(AT_IPV4, 2, 0, 300);
    client c;
    say_served(s, NULL);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_STATUS(open_as(&c, s, rank, 2), FSDP_ERR_TIMEOUT);
        says(c.error, "[E791] the launcher serves the store of job");
        says(c.error, "Connection refused");
    }
}

/* The address of another job, or another address, does not count: rank 0 serves. */
static const struct {
    const char *name, *job, *address;
} others[] = {{"job", "x", ""}, {"address", "", "0"}, {"job_with_a_tail", "", ""}};
TEST_P(trust, served_is_of_one_job_at_one_place, others) {
    setup *s = make_setup(AT_IPV4, 1, 0, 5000);
    client c;
    char text[600];
    const char *tail = *row->job || *row->address ? "" : "tail";
    snprintf(text, sizeof text, "%s%s %s%s%s", s->address, row->address, row->job, s->job, tail);
    setenv("FSDP_STORE_SERVED", text, 1);
    enter(&c, s, 0);
    CHECK_EQ_INT(c.store->server_rank, 0);
    fsdpi_store_close(c.store);
}

/* ---- tokens ---------------------------------------------------------------------------------- */

#define MPI_KEY "OMPI_MCA_orte_precondition_transports"
enum { TOKENS = 4 };
static const struct {
    const char *name;
    const char *variables[TOKENS]; /* name, value */
    int secret, same;              /* same: as without any variable */
} tokens[] = {
    {"none", {NULL}, 0, 1},
    {"given", {"FSDP_TOKEN", "a"}, 1, 0},
    {"empty", {"FSDP_TOKEN", ""}, 0, 1},
    {"mpirun", {MPI_KEY, "5ede60bee89a5b47-e7426c82d961a131", "OMPI_COMM_WORLD_RANK", "0"}, 1, 0},
    {"mpirun_of_a_shell", {MPI_KEY, "5ede60bee89a5b47-e7426c82d961a131"}, 0, 1},
    {"srun", {MPI_KEY, "012cc14200000000-012cc14200000000", "OMPI_COMM_WORLD_RANK", "0"}, 0, 1},
    {"mpirun_of_another_kind", {MPI_KEY, "1", "OMPI_COMM_WORLD_RANK", "0"}, 0, 1},
    {"torchrun", {"TORCHELASTIC_RUN_ID", "0d5c8b1e-7c1c-4f0e-9a55-a54f9a3b8a11"}, 0, 1},
};
TEST_P(trust, token, tokens) {
    uint8_t plain[32], token[32], again[32], other[32];
    (void)make_setup(AT_HOST, 1, 0, 0); /* unsets all variables */
    unsetenv(MPI_KEY), unsetenv("OMPI_COMM_WORLD_RANK"), unsetenv("TORCHELASTIC_RUN_ID");
    CHECK_EQ_INT(fsdpi_store_token("job", plain), 0);
    for (int i = 0; i < TOKENS && row->variables[i]; i += 2)
        setenv(row->variables[i], row->variables[i + 1], 1);
    CHECK_EQ_INT(fsdpi_store_token("job", token), row->secret);
    CHECK_EQ_INT(fsdpi_store_token("job", again), row->secret);
    CHECK_EQ_INT(fsdpi_store_token("job2", other), row->secret);
    CHECK_EQ_INT(!memcmp(token, plain, 32), row->same);
    CHECK_EQ_MEM(token, again, 32);
    CHECK(memcmp(token, other, 32) != 0); /* jobs with one secret do not meet */
}

/* Secrets of equal length, and a secret that begins with another one. */
TEST(trust, tokens_differ) {
    static const char *const secrets[] = {"a", "b", "ab", "user 0", "A"};
    uint8_t token[5][32];
    for (int i = 0; i < 5; i++) {
        setenv("FSDP_TOKEN", secrets[i], 1);
        CHECK_EQ_INT(fsdpi_store_token("job", token[i]), 1);
        for (int k = 0; k < i; k++) CHECK(memcmp(token[i], token[k], 32) != 0);
    }
}

/* A job without a secret gets one warning, from rank 0, if other hosts could reach it. */
static setup *warned;
static void count_warning(int level, fsdp_status code, int rank, const char *text, void *user) {
    (void)code, (void)user;
    if (level != FSDP_LOG_WARN || !strstr(text, "FSDP_TOKEN")) return;
    raise_flag(&warned->flags[5]);
    if (rank == 0) raise_flag(&warned->flags[6]);
}
static void opens_with_logger(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    fsdpi_store_desc d = make_desc(s, rank, world);
    fsdpi_store *store;
    char error[800];
    d.boot.logger.log = count_warning;
    d.boot.log_level = s->squatter;
    CHECK_MSG(!fsdpi_store_open(&d, &store, error, sizeof error), "%s", error);
    fsdpi_store_close(store);
}
static const struct {
    const char *name;
    int at, world, level;
    const char *token;
    int times;
} warnings[] = {
    {"tcp", AT_IPV4, 3, FSDP_LOG_WARN, "", 1},      {"file", AT_FILE, 3, FSDP_LOG_WARN, "", 1},
    {"token", AT_IPV4, 3, FSDP_LOG_WARN, "x", 0},   {"one_host", AT_HOST, 3, FSDP_LOG_WARN, "", 0},
    {"one_rank", AT_IPV4, 1, FSDP_LOG_WARN, "", 0}, {"level", AT_IPV4, 3, FSDP_LOG_ERROR, "", 0},
};
TEST_P(trust, warning, warnings) {
    setup *s = warned = make_setup(row->at, row->world, 0, 10000);
    s->squatter = row->level;
    setenv("FSDP_TOKEN", row->token, 1);
    run(s, opens_with_logger);
    CHECK_EQ_INT(s->flags[5], row->times);
    CHECK_EQ_INT(s->flags[6], row->times);
}

/* ---- things that would block ----------------------------------------------------------------- */

/* A pipe in place of the file, or of its temporary file: no process waits for the pipe's other end.
   */
TEST(trust, pipe_in_place_of_the_file) {
    setup *s = make_setup(AT_FILE, 2, 0, 300);
    int64_t start = h_calm_ms();
    client c;
    CHECK(!mkfifo(s->address + 7, 0600));
    CHECK_STATUS(open_as(&c, s, 1, 2), FSDP_ERR_TIMEOUT);
    says(c.error, "does not contain a store's address");
    within(start, 1000);
}
static const struct {
    const char *name;
    int is_link;
} in_the_way[] = {{"pipe", 0}, {"link", 1}};
TEST_P(trust, place_of_the_new_file_is_taken, in_the_way) {
    setup *s = make_setup(AT_FILE, 1, 0, 5000);
    char path[450], victim[400], text[16] = "";
    client c;
    snprintf(path, sizeof path, "%s.new", s->address + 7);
    snprintf(victim, sizeof victim, "%s/victim", h_tmpdir());
    FILE *file = fopen(victim, "w");
    CHECK(file && fputs("mine", file) >= 0 && !fclose(file));
    CHECK(!(row->is_link ? symlink(victim, path) : mkfifo(path, 0600)));
    enter(&c, s, 0);
    fsdpi_store_close(c.store);
    file = fopen(victim, "r");
    CHECK(file && fgets(text, sizeof text, file) && !fclose(file));
    CHECK_EQ_STR(text, "mine");
}

/* Replaces libc's getaddrinfo by a resolver that does not answer before the test has ended, and that
   has a host of eight addresses. */
static int *resolver_waits, *resolver_asked;
int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints,
                struct addrinfo **out) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **);
    if (resolver_waits && !strcmp(host, "slow.test") && hints->ai_flags == 0) {
        raise_flag(resolver_asked);
        await_flag(resolver_waits, 1);
        return EAI_AGAIN;
    }
    if (!strcmp(host, "nobody.test")) return EAI_NONAME;
    *(void **)&real = dlsym(RTLD_NEXT, "getaddrinfo");
    int failed = 0;
    for (int k = 1; k <= 8 && !strcmp(host, "many.test") && !failed; k++, out = &(*out)->ai_next) {
        char address[16];
        snprintf(address, sizeof address, "127.0.0.%d", k);
        failed = real(address, service, hints, out);
        if (failed || k == 8) return failed;
    }
    return real(host, service, hints, out);
}
TEST(trust, resolver_does_not_answer) {
    setup *s = make_setup(AT_IPV4, 2, 0, 300);
    int64_t start = h_calm_ms();
    client c;
    resolver_waits = &s->flags[7], resolver_asked = &s->flags[8];
    snprintf(s->address, sizeof s->address, "tcp://slow.test:%d", s->port);
    for (int rank = 0; rank < 2; rank++) {
        CHECK_STATUS(open_as(&c, s, rank, 2), FSDP_ERR_TIMEOUT);
        says(c.error, "the resolver has not answered in time");
    }
    within(start, 1500);
    await_flag(&s->flags[8], 2);
    raise_flag(&s->flags[7]); /* the resolver answers now, too late: nothing may be left */
    no_threads();
}

/* An address with several hosts: rank 0 serves on its own, wherever that is in the list. */
static void meets_on_any_host(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    enter(&c, s, rank);
    exchange(&c, world, "a");
    leave(&c, s, world);
}
TEST(trust, several_hosts) {
    setup *s = make_setup(AT_IPV4, 3, 0, 10000);
    snprintf(s->address, sizeof s->address, "tcp://nobody.test,127.0.0.1:%d", s->port);
    run(s, meets_on_any_host);
}

/* The hosts share the array of places; a host without an address takes none. */
static const struct {
    const char *name, *hosts;
    int max, last[8]; /* last: last byte of each address found; 0: the end */
} lists[] = {{"one", "127.0.0.7", 8, {7}},
             {"three", "127.0.0.3,127.0.0.1,127.0.0.2", 8, {3, 1, 2}},
             {"unknown_first", "nobody.test,127.0.0.2", 8, {2}},
             {"unknown_last", "127.0.0.2,nobody.test", 8, {2}},
             {"as_many_as_fit", "127.0.0.1,127.0.0.2,127.0.0.3", 3, {1, 2, 3}},
             {"too_many", "127.0.0.1,127.0.0.2,127.0.0.3", 2, {1, 2}},
             {"all_of_one", "many.test", 8, {1, 2, 3, 4, 5, 6, 7, 8}},
             {"many_first", "many.test,127.0.0.9", 8, {1, 2, 3, 4, 9}},
             {"many_last", "127.0.0.9,many.test", 8, {9, 1, 2, 3, 4}},
             {"many_twice", "many.test,127.0.0.9,many.test", 7, {1, 2, 9, 1, 2}}};
TEST_P(trust, hosts_of_an_address, lists) {
    fsdp_clock clock = FSDP_ZERO;
    fsdpi_store_place found[8];
    char said[400] = "";
    fsdpi_text why = {said, sizeof said, 0};
    clock.now_ns = fsdpi_monotonic_ns;
    const int count = fsdpi_store_lookup(&clock, row->hosts, INT64_MAX, found, row->max, &why);
    int expected = 0;
    for (; expected < 8 && row->last[expected]; expected++)
        if (expected < count)
            CHECK_EQ_INT(ntohl(found[expected].at.v4.sin_addr.s_addr) & 255, row->last[expected]);
    CHECK_EQ_INT(count, expected);
    CHECK(!strstr(row->hosts, "nobody") || strstr(said, "[E728] host 'nobody.test'"));
}

/* A program that has closed descriptors 0 to 2 does not print into a connection. */
static void without_stdio(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    struct stat info;
    client c;
    int saved[3];
    for (int fd = 0; fd < 3; fd++) saved[fd] = fcntl(fd, F_DUPFD_CLOEXEC, 100), close(fd);
    enter(&c, s, rank);
    exchange(&c, world, "a");
    for (int fd = 0; fd < 3; fd++) CHECK(fstat(fd, &info) && errno == EBADF);
    leave(&c, s, world);
    for (int fd = 0; fd < 3; fd++) dup2(saved[fd], fd);
}
static const struct {
    const char *name;
    int at;
} places[] = {{"tcp", AT_IPV4}, {"host", AT_HOST}, {"file", AT_FILE}};
TEST_P(trust, without_stdio, places) { run(make_setup(row->at, 2, 0, 10000), without_stdio); }
