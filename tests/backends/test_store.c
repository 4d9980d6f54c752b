/* test_store.c - the store where ranks meet (backends/fsdp_store.h): addresses, keys and values,
   ranks that are late, lost, wrong or hostile, failures, and the server's core under random input.
   Bad clients use real sockets and a real server; only the fuzz tests have none.

   SPDX-License-Identifier: MIT */
#define TAGS TSAN | AT_NIGHT(ASAN)
#include "harness.h"
#include <poll.h>         /* poll */
#include <sys/resource.h> /* setrlimit */
#include <sys/time.h>     /* setitimer */
#include "library.c"
#include "lab_store.h"

/* ---- hashes ---------------------------------------------------------------------------------- */

static void is_hex(const uint8_t *got, const char *hex) {
    char text[65] = "";
    for (int i = 0; i < (int)strlen(hex) / 2; i++) snprintf(text + 2 * i, 3, "%02x", got[i]);
    CHECK_EQ_STR(text, hex);
}

/* Examples of FIPS 180-4 (NIST, "Cryptographic Standards and Guidelines: examples with intermediate
   values"), and lengths around the edges of the padding. */
TEST(store_hash, sha256) {
    static const struct {
        const char *text, *hex;
        int repeat;
    } rows[] = {
        {"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855", 1},
        {"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad", 1},
        {"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
         "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1", 1},
        {"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqr"
         "lmnopqrsmnopqrstnopqrstu",
         "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1", 1},
        {"a", "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0", 1000000},
        {"b", "a93b1af920e2005653023f1d9e56aae5d096f5c6856752d2197daaf926ff92bd", 54},
        {"b", "eb2c86e932179f4ba13fe8715a26124b77d6bad290b9b4c1cc140cf633300c19", 55},
        {"b", "a5fc6e203a4c2b657d0d153885932414b2ffc6a93f0f8bf8b3183315e5a7212c", 56},
        {"b", "2dd0a6d14520f410e18bd2f443f0ff2e7389dfaf9242bb9257730fc190e8085d", 57},
        {"b", "94e419fabac7f930810f9636354042f8c1426d2f834d4ab65c93dc1e69326b13", 63},
        {"b", "a0fab1377f49a759b57f63318262ebe89fabfc990e8e93ceac2984561482b9d4", 64},
        {"b", "74b128f30cf83de43ddf4aafc40c7b50a7443d3c73a89a7cfca17e15e43d51ab", 65},
        {"b", "68297a9eb141ce16bbc0847da1c0c48e2858704feaa13993bde29f87a198a6e1", 119},
        {"b", "392add47fbaa8197a874ebe770a947a26dd6f2becce5f64688cc4d18c9da93bd", 120},
        {"b", "b3d4aa37fc3d26185655a12717758fe46929684c0c11f18f9ee36186ba323284", 121},
        {"b", "7bdbefa63b6989e6a15abad9d52c0770bce07182a535b9a1b3d4c0e38c8b0856", 127},
        {"b", "70ae1c5307f5250d5cb9e40742ba9613fcdf9b8d9eb6dd393330443b2d5effbd", 128},
        {"b", "75c76be2aed2772327536dc2fa8759d16cbe7dc9c535954d7d1e05a11bdd3fc6", 129},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (size_t step = 1; step < (rows[i].repeat > 1000 ? 2 : 200);
             step += 66) { /* in pieces */
            fsdpi_sha256 hash;
            uint8_t out[32];
            size_t length = strlen(rows[i].text);
            fsdpi_sha256_begin(&hash);
            for (int k = 0; k < rows[i].repeat; k++)
                for (size_t at = 0; at < length; at += step)
                    fsdpi_sha256_add(&hash, rows[i].text + at,
                                     length - at < step ? length - at : step);
            fsdpi_sha256_end(&hash, out);
            is_hex(out, rows[i].hex);
        }
}

/* RFC 4231, cases 1 to 5: keys of at most one block; a token is never longer. Case 5 has 128 bits,
   as a tag does. */
TEST(store_hash, hmac) {
    static const struct {
        int key_byte, key_size, data_byte, data_size;
        const char *text, *hex;
    } rows[] = {
        {0x0b, 20, 0, 0, "Hi There",
         "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7"},
        {-1, 4, 0, 0, "what do ya want for nothing?",
         "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
        {0xaa, 20, 0xdd, 50, NULL,
         "773ea91e36800e46854db8ebd09181a72959098b3ef8c122d9635514ced565fe"},
        {-2, 25, 0xcd, 50, NULL,
         "82558a389a443c0ea4cc819899f2083a85f0faa3e578f8077a2e3ff46729665b"},
        {0x0c, 20, 0, 0, "Test With Truncation", "a3b6167473100ee06e0c796c2955552b"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        uint8_t key[64] = "Jefe", data[64], out[32];
        size_t size = rows[i].text ? strlen(rows[i].text) : (size_t)rows[i].data_size;
        if (rows[i].key_byte >= 0) memset(key, rows[i].key_byte, sizeof key);
        for (int k = 0; k < 25 && rows[i].key_byte == -2; k++) key[k] = (uint8_t)(k + 1);
        memset(data, rows[i].data_byte, sizeof data);
        if (rows[i].text) memcpy(data, rows[i].text, size);
        fsdpi_hmac_sha256(key, (size_t)rows[i].key_size, data, size, out);
        is_hex(out, rows[i].hex);
        fsdpi_hmac_sha256(key, (size_t)rows[i].key_size, data, size, key); /* writes over the key */
        is_hex(key, rows[i].hex);
    }
}

/* ---- meeting --------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    int at, world, threads;
} place;
static const place places[] = {
    {"host/W=1", AT_HOST, 1, 0},          {"host/W=2", AT_HOST, 2, 0},
    {"host/W=4", AT_HOST, 4, 0},          {"host/W=32/threads", AT_HOST, 32, 1},
    {"tcp/W=1", AT_IPV4, 1, 0},           {"tcp/W=2", AT_IPV4, 2, 0},
    {"tcp/W=4", AT_IPV4, 4, 0},           {"tcp/W=8", AT_IPV4, 8, 0},
    {"tcp/W=32/threads", AT_IPV4, 32, 1}, {"ipv6/W=3", AT_IPV6, 3, 0},
    {"ipv6/W=3/threads", AT_IPV6, 3, 1},  {"name/W=3", AT_NAME, 3, 0},
    {"own/W=3", AT_OWN4, 3, 0},           {"own_ipv6/W=3", AT_OWN6, 3, 0},
    {"file/W=1", AT_FILE, 1, 0},          {"file/W=4", AT_FILE, 4, 0},
    {"file/W=4/threads", AT_FILE, 4, 1},
};

static void is_numeric(const char *address) {
    struct in6_addr a;
    CHECK_MSG(address &&
                  (inet_pton(AF_INET, address, &a) == 1 || inet_pton(AF_INET6, address, &a) == 1),
              "'%s' is no numeric address", address ? address : "(null)");
}

static void meets(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    enter(&c, s, rank);
    no_failure(&c);
    exchange(&c, world, "a");
    is_numeric(fsdpi_store_address(c.store));
    if (s->port) CHECK(strchr(fsdpi_store_address(c.store), s->address[6] == '[' ? ':' : '.'));
    if (s->own[0]) CHECK_EQ_STR(fsdpi_store_address(c.store), s->own);
    exchange(&c, world, "b");
    no_failure(&c);
    leave(&c, s, world);
}
TEST_P(store_open, meets, places, row->world == 4 ? MANY_RANKS : 0) {
    run(make_setup(row->at, row->world, row->threads, 20000), meets);
}
TEST(long_store, meets_128, NIGHT) {
    run(make_setup(AT_IPV4, 128, 1, 60000), meets);
    run(make_setup(AT_HOST, 128, 1, 60000), meets);
}

/* JOINED is a barrier: no rank passes before the last one has arrived. */
static void barrier(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    if (rank == world - 1) usleep(50000), raise_flag(&s->flags[0]);
    enter(&c, s, rank);
    CHECK_EQ_INT(__atomic_load_n(&s->flags[0], __ATOMIC_SEQ_CST), 1);
    fsdpi_store_close(c.store);
}
static const place meetings[] = {
    {"host/processes", AT_HOST, 3, 0}, {"host/threads", AT_HOST, 3, 1},
    {"tcp/processes", AT_IPV4, 3, 0},  {"tcp/threads", AT_IPV4, 3, 1},
    {"file/processes", AT_FILE, 3, 0}, {"file/threads", AT_FILE, 3, 1}};
TEST_P(store_open, barrier, meetings) {
    run(make_setup(row->at, row->world, row->threads, 20000), barrier);
}

/* The server starts last. */
static void late_server(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    int64_t start = h_calm_ms();
    if (rank == 0) usleep(80000);
    enter(&c, s, rank);
    within(start, 1500); /* the others' backoff has not grown too long */
    exchange(&c, world, "a");
    leave(&c, s, world);
}
static const place late_servers[] = {
    {"host", AT_HOST, 3, 1}, {"tcp", AT_IPV4, 3, 0}, {"file", AT_FILE, 3, 0}};
TEST_P(store_open, late_server, late_servers) {
    run(make_setup(row->at, row->world, row->threads, 20000), late_server);
}

typedef struct {
    const char *name;
    int at, threads, absent[2];
} absence;
static const absence absences[] = {
    {"host/ranks=1,3", AT_HOST, 1, {1, 3}},
    {"tcp/rank=2", AT_IPV4, 0, {2, 2}},
    {"tcp/rank=0", AT_IPV4, 0, {0, 0}},
    {"file/rank=1", AT_FILE, 0, {1, 1}},
};
static const absence more_absences[] = {
    {"host/rank=0", AT_HOST, 0, {0, 0}},
    {"ipv6/rank=3", AT_IPV6, 0, {3, 3}},
    {"file/rank=0/threads", AT_FILE, 1, {0, 0}},
    {"ipv6/rank=0", AT_IPV6, 0, {0, 0}},
};

static void absent(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    const absence *a = (const absence *)s->extra;
    int64_t start = h_now_ms(), calm = h_calm_ms();
    char who[40];
    client c;
    if (rank == a->absent[0] || rank == a->absent[1]) return;
    CHECK_STATUS(open_as(&c, s, rank, world), FSDP_ERR_TIMEOUT);
    int64_t took = h_now_ms() - start, took_calm = h_calm_ms() - calm;
    if (strstr(c.error, "the store does not answer")) {
        raise_flag(&s->flags[4]); /* this machine is so busy that the server did not run in time */
        return;
    }
    CHECK_MSG(took >= s->timeout_ms - 250 && took_calm <= s->timeout_ms + slack(200), "%lld ms: %s",
              (long long)took, c.error);
    int late = (int)took - s->timeout_ms, *latest = &s->flags[3];
    if (late > __atomic_load_n(latest, __ATOMIC_SEQ_CST))
        __atomic_store_n(latest, late, __ATOMIC_SEQ_CST);
    if (a->absent[0] == a->absent[1]) snprintf(who, sizeof who, "rank %d", a->absent[0]);
    else snprintf(who, sizeof who, "ranks %d, %d", a->absent[0], a->absent[1]);
    says(c.error, who);
    says(c.error, "0.2 s");
    says(c.error, "FSDP_STORE");
    if (s->port) says(c.error, strchr(s->address, ':') + 3); /* the address that it tried */
}
static void rank_missing(const absence *row) {
    setup *s = make_setup(row->at, 4, row->threads, 200);
    s->extra = row;
    run(s, absent);
    for (int again = 0; again < 3 && s->flags[4]; again++) {
        h_message("again: the server did not run in time");
        run(s, absent);
    }
    CHECK_EQ_INT(s->flags[4], 0);
    h_message("all have given up %d ms after the deadline", s->flags[3]);
}
TEST_P(store_open, rank_missing, absences) { rank_missing(row); }
TEST_P(long_store, rank_missing, more_absences, NIGHT) { rank_missing(row); }

/* A rank with a long deadline that arrives before the others give up gets the error as well. */
static void comes_late(int rank, int world, void *arg) {
    setup *s = (setup *)arg, mine = *s;
    int64_t start = h_calm_ms();
    client c;
    if (rank == 2) return;
    if (rank == 1) await_flag(s->joined, 1), mine.timeout_ms = 20000;
    CHECK_STATUS(open_as(&c, &mine, rank, world), FSDP_ERR_TIMEOUT);
    says(c.error, "rank 2");
    within(start, 1500);
}
TEST(store_open, latecomer_gets_the_failure) { run(make_setup(AT_IPV4, 3, 0, 1000), comes_late); }

/* The file already contains the address of an earlier job, or no address. */
static const struct {
    const char *name, *text;
} old_files[] = {{"empty", ""},
                 {"no_address", "hello, world\n"},
                 {"nobody", "tcp://127.0.0.1:1\n"},
                 {"not_tcp", "host:\n"}};
TEST_P(store_open, file_is_there_already, old_files) {
    setup *s = make_setup(AT_FILE, 3, 0, 10000);
    FILE *file = fopen(s->address + 7, "w");
    CHECK(file && fputs(row->text, file) >= 0 && !fclose(file));
    run(s, meets);
    CHECK(access(s->address + 7, F_OK)); /* the server has removed it */
}

/* An address that is not this host's, as with NAT: rank 0 serves at all addresses, and warns
   once. Rank 1 has the address of this host. */
static const struct {
    const char *name, *host;
    int world, times;
} hosts[] = {{"elsewhere", "198.51.100.7", 2, 1},
             {"elsewhere/W=1", "198.51.100.7", 1, 0},
             {"own", "127.0.0.1", 2, 0}};
static setup *warned;
static void hears_of_elsewhere(int level, fsdp_status code, int rank, const char *text,
                               void *user) {
    char own[100];
    (void)code, (void)user;
    if (!strstr(text, "[E567] the store's address ")) return;
    CHECK(level == FSDP_LOG_WARN && rank == 0);
    if (own_address(AF_INET, own, sizeof own)) says(text, own);
    raise_flag(&warned->flags[0]);
}
static void meets_from_elsewhere(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    char error[1024], elsewhere[64];
    fsdpi_store_desc d = make_desc(s, rank, world);
    fsdpi_store *store;
    snprintf(elsewhere, sizeof elsewhere, "tcp://%s:%d", (const char *)s->extra, s->port);
    if (rank == 0) d.boot.store = elsewhere;
    d.boot.log_level = FSDP_LOG_WARN, d.boot.logger.log = hears_of_elsewhere;
    CHECK_MSG(!fsdpi_store_open(&d, &store, error, sizeof error), "%s", error);
    fsdpi_store_close(store);
}
TEST_P(store_open, address_of_another_host, hosts) {
    setup *s = warned = make_setup(AT_IPV4, row->world, 0, 20000);
    s->extra = row->host;
    run(s, meets_from_elsewhere);
    CHECK_EQ_INT(s->flags[0], row->times);
}

static const struct {
    const char *name, *address;
} wrong_addresses[] = {
    {"no_scheme", "127.0.0.1:4000"},
    {"other_scheme", "udp://127.0.0.1:4000"},
    {"no_port", "tcp://127.0.0.1"},
    {"empty_port", "tcp://127.0.0.1:"},
    {"port_0", "tcp://127.0.0.1:0"},
    {"port_65536", "tcp://127.0.0.1:65536"},
    {"port_negative", "tcp://127.0.0.1:-5"},
    {"port_2_to_32", "tcp://127.0.0.1:4294967376"},
    {"port_text", "tcp://127.0.0.1:http"},
    {"port_tail", "tcp://127.0.0.1:4000x"},
    {"no_host", "tcp://:4000"},
    {"open_bracket", "tcp://[::1:4000"},
    {"bracket_no_port", "tcp://[::1]"},
    {"bracket_tail", "tcp://[::1]x:4000"},
    {"no_file", "file://"},
    {"relative_file", "file://meet"},
    {"long",
     "tcp://aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
     "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
     "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
     "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
     ":4000"},
};
TEST(store_open, short_buffer_for_the_text) {
    setup *s = make_setup(AT_HOST, 2, 0, 1000);
    snprintf(s->address, sizeof s->address, "nowhere");
    for (size_t cap = 1; cap < 100; cap += 7) {
        fsdpi_store_desc d = make_desc(s, 1, 2);
        fsdpi_store *store;
        char error[128];
        memset(error, 'e', sizeof error);
        CHECK_STATUS(fsdpi_store_open(&d, &store, error, cap), FSDP_ERR_INVALID_ARG);
        CHECK(memchr(error, 0, cap) && error[cap] == 'e');
    }
}
TEST_P(store_open, wrong_address, wrong_addresses) {
    setup *s = make_setup(AT_HOST, 2, 0, 2000);
    snprintf(s->address, sizeof s->address, "%s", row->address);
    for (int rank = 0; rank < 2; rank++) {
        int64_t start = h_calm_ms();
        client c;
        CHECK_STATUS(open_as(&c, s, rank, 2), FSDP_ERR_INVALID_ARG);
        says(c.error, "FSDP_STORE, or MASTER_ADDR and MASTER_PORT");
        says(c.error, "a port from 1 to 65535");
        within(start, 500);
    }
}

/* Addresses that cannot work: a directory that does not exist, an unknown name. */
static void unreachable(const char *address, const char *part, int timeout_ms) {
    for (int rank = 0; rank < 2; rank++) {
        setup *s = make_setup(AT_HOST, 2, 0, timeout_ms);
        client c;
        snprintf(s->address, sizeof s->address, "%s", address);
        CHECK(open_as(&c, s, rank, 2) != FSDP_OK);
        says(c.error, "FSDP_STORE");
        says(c.error, part);
    }
}
TEST(store_open, unreachable_file) {
    int64_t start = h_calm_ms();
    unreachable("file:///nonexistent-directory/meet", "/nonexistent-directory", 150);
    within(start, 700);
}
TEST(long_store, unknown_host, NIGHT) { /* resolvers may take long */
    unreachable("tcp://no-such-host.invalid:4000", "no-such-host.invalid", 400);
}

/* ---- keys and values ------------------------------------------------------------------------- */

static void fill(unsigned char *p, size_t size, uint64_t seed) {
    for (size_t i = 0; i < size && i < 4099; i++) p[i] = (unsigned char)h_rand64(&seed);
    for (size_t at = 4099; at < size; at *= 2) memcpy(p + at, p, size - at < at ? size - at : at);
}

static const size_t sizes[] = {0,    1,    2,     7,     23,    24,      25,       4095,
                               4096, 4097, 65535, 65536, 65537, MIB - 1, MIB + 13, 16 * MIB};
enum { NUM_SIZES = sizeof sizes / sizeof *sizes };

static void values(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    char key[40];
    unsigned char *out = (unsigned char *)malloc(16 * MIB + 1),
                  *in = (unsigned char *)malloc(16 * MIB + 1);
    CHECK(out && in);
    enter(&c, s, rank);
    for (int i = 0; i < NUM_SIZES; i++) {
        size_t size = 77;
        if ((s->threads || W_SLOW) && sizes[i] > 2 * MIB) continue; /* once is enough */
        snprintf(key, sizeof key, "v%d", i);
        fill(out, sizes[i], (uint64_t)i);
        if (rank == i % world) put(&c, key, sizes[i] ? out : NULL, sizes[i]);
        if (rank == world - 1 && i % world == rank) continue;
        memset(in, 0xee, sizes[i] + 1);
        CHECK_STATUS(try_get(&c, key, in, sizes[i] + 1, &size, 20000), FSDP_OK);
        CHECK_EQ_INT(size, sizes[i]);
        CHECK_EQ_MEM(in, out, size);
        CHECK_EQ_INT(in[size], 0xee);
    }
    CHECK_STATUS(fsdpi_store_set(c.store, "big", out, 16 * MIB + 1), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdpi_store_set(c.store, "big", out, SIZE_MAX), FSDP_ERR_INVALID_ARG);
    no_failure(&c); /* a refused call does no harm */
    exchange(&c, world, "after");
    leave(&c, s, world);
    free(in), free(out);
}
TEST(store_keys, values_of_every_size) {
    run(make_setup(AT_HOST, 2, 0, 20000), values);
    run(make_setup(AT_IPV4, 3, 1, 20000), values);
}

TEST(store_keys, keys) {
    setup *s = make_setup(AT_HOST, 1, 0, 5000);
    client c;
    char key[300], text[8];
    size_t size = 0;
    enter(&c, s, 0);
    for (int length = 1; length <= 258; length += length < 250 ? 31 : 1) {
        memset(key, 'k', sizeof key);
        key[length] = 0;
        int fits = length <= 256;
        CHECK_STATUS(fsdpi_store_set(c.store, key, "x", 1), fits ? FSDP_OK : FSDP_ERR_INVALID_ARG);
        CHECK_STATUS(try_get(&c, key, text, 8, &size, 1000), fits ? FSDP_OK : FSDP_ERR_INVALID_ARG);
        CHECK_STATUS(fsdpi_store_delete(c.store, key), fits ? FSDP_OK : FSDP_ERR_INVALID_ARG);
    }
    put(&c, "a/b c\xc3\xa9%s\n", "odd", 3);
    get_text(&c, "a/b c\xc3\xa9%s\n", "odd");
    put(&c, "a", "1", 1), put(&c, "ab", "2", 1), put(&c, "", "0", 1);
    get_text(&c, "a", "1"), get_text(&c, "ab", "2"), get_text(&c, "", "0");
    put(&c, "a", "new", 3); /* the last value counts */
    get_text(&c, "a", "new");
    put(&c, "a", "", 0);
    get_text(&c, "a", "");
    no_failure(&c);
    fsdpi_store_close(c.store);
}

TEST(store_keys, deleted_and_never_set) {
    setup *s = make_setup(AT_HOST, 1, 0, 5000);
    client c;
    char text[8];
    size_t size = 0;
    enter(&c, s, 0);
    put(&c, "a", "1", 1);
    CHECK_OK(fsdpi_store_delete(c.store, "a"));
    static const int waits[] = {0, 1, 20, 60};
    for (int i = 0; i < 8; i++) {
        int64_t start = h_now_ms(), calm = h_calm_ms();
        CHECK_STATUS(try_get(&c, i & 1 ? "a" : "never", text, 8, &size, waits[i / 2]),
                     FSDP_ERR_TIMEOUT);
        CHECK(h_now_ms() - start >= waits[i / 2] - 1);
        within(calm, waits[i / 2] + 200);
    }
    int64_t start = h_calm_ms();
    CHECK_STATUS(fsdpi_store_get(c.store, "a", text, 8, &size, -5 * MS), FSDP_ERR_TIMEOUT);
    within(start, 200);
    CHECK_OK(fsdpi_store_delete(c.store, "never"));
    for (int i = 0; i < 100; i++) /* the server forgets them too: it serves 64 at a time */
        CHECK_STATUS(try_get(&c, "never", text, 8, &size, 1), FSDP_ERR_TIMEOUT);
    no_failure(&c); /* a get that times out is no failure of the job */
    put(&c, "a", "2", 1);
    get_text(&c, "a", "2");
    CHECK_OK(fsdpi_store_get(c.store, "a", text, 8, &size, INT64_MAX));
    fsdpi_store_close(c.store);
}

TEST(store_keys, value_larger_than_the_buffer) {
    setup *s = make_setup(AT_HOST, 1, 0, 5000);
    client c;
    char text[16];
    size_t size = 0;
    enter(&c, s, 0);
    put(&c, "a", "0123456789", 10);
    memset(text, 0x77, sizeof text);
    CHECK(try_get(&c, "a", text, 4, &size, 1000) != FSDP_OK);
    for (int i = 4; i < 16; i++) CHECK_EQ_INT(text[i], 0x77);
    CHECK(try_get(&c, "a", NULL, 0, &size, 1000) != FSDP_OK);
    get_text(&c, "a", "0123456789");
    no_failure(&c);
    fsdpi_store_close(c.store);
}

/* A value that was set twice and deleted is gone, and so is the first value. */
TEST(store_keys, set_again_and_deleted) {
    setup *s = make_setup(AT_HOST, 1, 0, 5000);
    client c;
    char text[16];
    size_t size = 0;
    enter(&c, s, 0);
    put(&c, "a", "first", 5);
    put(&c, "a", "second", 6);
    get_text(&c, "a", "second");
    CHECK_OK(fsdpi_store_delete(c.store, "a"));
    CHECK_STATUS(try_get(&c, "a", text, 16, &size, 20), FSDP_ERR_TIMEOUT);
    put(&c, "a", "third", 5);
    get_text(&c, "a", "third");
    fsdpi_store_close(c.store);
}

/* All wait before it is set. A rank whose deadline has passed is not served any more. */
static void waits_for_key(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    char text[16];
    size_t size = 0;
    enter(&c, s, rank);
    if (rank == 0) {
        usleep(20000); /* most wait already */
        await_flag(&s->flags[0], 1);
        put(&c, "late", "here", 4);
    }
    if (rank == 1) {
        CHECK_STATUS(try_get(&c, "late", text, 16, &size, 40), FSDP_ERR_TIMEOUT);
        raise_flag(&s->flags[0]);
        exchange(&c, 0, "still"); /* the late answer reaches no request */
    }
    get_text(&c, "late", "here");
    leave(&c, s, world);
}
TEST(store_keys, get_before_set) {
    run(make_setup(AT_HOST, 4, 0, 20000), waits_for_key);
    run(make_setup(AT_IPV4, 32, 1, 20000), waits_for_key);
}

/* Several threads of one rank: their requests do not wait for each other. */
typedef struct {
    client *c;
    int index, world;
} lane;

static void *lane_main(void *arg) {
    lane *l = (lane *)arg;
    char key[40], value[40];
    for (int i = 0; i < 50; i++) {
        int peer = (l->c->rank + 1) % l->world;
        snprintf(key, sizeof key, "%d/%d/%d", l->c->rank, l->index, i);
        snprintf(value, sizeof value, "value %d %d", l->index, i);
        put(l->c, key, value, strlen(value));
        snprintf(key, sizeof key, "%d/%d/%d", peer, l->index, i);
        get_text(l->c, key, value);
        if (i % 10 == 9) CHECK_OK(fsdpi_store_delete(l->c->store, key));
    }
    return NULL;
}

static void many_threads(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    pthread_t thread[6];
    lane lanes[6];
    enter(&c, s, rank);
    for (int i = 0; i < 6; i++) {
        lanes[i].c = &c, lanes[i].index = i, lanes[i].world = world;
        CHECK_EQ_INT(pthread_create(&thread[i], NULL, lane_main, &lanes[i]), 0);
    }
    for (int i = 0; i < 6; i++) pthread_join(thread[i], NULL);
    no_failure(&c);
    leave(&c, s, world);
}
TEST(store_keys, several_threads_of_a_rank) {
    run(make_setup(AT_HOST, 2, 0, 20000), many_threads);
    run(make_setup(AT_IPV4, 3, 1, 20000), many_threads);
}

TEST(store_keys, thousands_of_keys) {
    setup *s = make_setup(AT_HOST, 1, 0, 20000);
    client c;
    char key[40];
    int count = W_SLOW ? 1000 : 4000;
    int64_t start = h_calm_ms();
    enter(&c, s, 0);
    for (int i = 0; i < count; i++)
        snprintf(key, sizeof key, "key-%d", i), put(&c, key, key, strlen(key));
    for (int i = 0; i < count; i += 7)
        snprintf(key, sizeof key, "key-%d", i), get_text(&c, key, key);
    for (int i = 0; i < count; i++) {
        snprintf(key, sizeof key, "key-%d", i);
        CHECK_OK(fsdpi_store_delete(c.store, key));
    }
    h_message("%d keys set, read and deleted in %lld ms", count, (long long)(h_calm_ms() - start));
    within(start, 4000);
    fsdpi_store_close(c.store);
}

/* 1 GiB in all is allowed, and not one byte more; deleted values free their space. */
TEST(long_store, total_is_bounded, SECONDS(120) | NIGHT) {
    setup *s = make_setup(AT_HOST, 1, 0, 60000);
    client c;
    char key[40];
    unsigned char *value = (unsigned char *)lab_zeros(1, 16 * MIB);
    fsdp_status status = FSDP_OK;
    int count = 0;
    if (sysconf(_SC_AVPHYS_PAGES) * (sysconf(_SC_PAGESIZE) >> 10) < 2 << 20) SKIP("needs 2 GiB");
    enter(&c, s, 0);
    for (; count < 80 && !status; count++) {
        snprintf(key, sizeof key, "big-%d", count);
        status = fsdpi_store_set(c.store, key, value, 16 * MIB);
    }
    CHECK_STATUS(status, FSDP_ERR_OUT_OF_MEMORY);
    CHECK_MSG(count >= 60 && count <= 65, "refused after %d values of 16 MiB", count);
    no_failure(&c);
    put(&c, "big-1", value, 16 * MIB); /* replaces the old one */
    CHECK_OK(fsdpi_store_delete(c.store, "big-0"));
    put(&c, "again", value, 15 * MIB);
    fsdpi_store_close(c.store);
    free(value);
}

/* ---- ranks that are refused ------------------------------------------------------------------ */

typedef struct {
    const char *name;
    int at, threads;
} where;
static const where wheres[] = {
    {"host", AT_HOST, 0}, {"tcp", AT_IPV4, 0}, {"file", AT_FILE, 0}, {"tcp/threads", AT_IPV4, 1}};

/* Rank 2 claims a world of 5. All ranks that have arrived get the error, as it is not known which
   one is right; so does rank 3, which arrives right after. */
static void other_size(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    int64_t start = h_calm_ms();
    if (rank == 2) await_flag(s->joined, 2);
    if (rank == 3) await_flag(&s->flags[0], 1), start = h_calm_ms();
    int64_t behind = h_now_ms() - s->when;
    fsdp_status status = open_as(&c, s, rank, rank == 2 ? 5 : world);
    if (rank == 2) s->when = h_now_ms(), raise_flag(&s->flags[0]);
    if (rank == 3 && behind > 300) { /* the store may be gone by now */
        h_message("rank 3 came %lld ms late", (long long)behind);
        return;
    }
    CHECK_STATUS(status, FSDP_ERR_MISMATCH);
    says(c.error, "rank 2");
    says(c.error, "5");
    says(c.error, "4");
    says(c.error, "world size");
    within(start, 1000);
}
TEST_P(store_refused, other_world_size, wheres) {
    run(make_setup(row->at, 4, row->threads, 5000), other_size);
}

/* Process 3 claims a world of 4 when the three are at work: it is refused, and they continue. */
static void wrong_size(int process, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    (void)world;
    if (process == 3) {
        await_flag(&s->flags[0], 3);
        CHECK_STATUS(open_as(&c, s, 2, 4), FSDP_ERR_MISMATCH);
        says(c.error, "world size");
        raise_flag(&s->flags[1]);
        return;
    }
    CHECK_STATUS(open_as(&c, s, process, 3), FSDP_OK);
    raise_flag(&s->flags[0]);
    await_flag(&s->flags[1], 1);
    exchange(&c, 3, "a");
    CHECK(!fsdpi_store_failure(c.store, NULL));
    leave(&c, s, 3);
}
TEST_P(store_refused, other_world_size_of_another_job, wheres) {
    run(make_setup(row->at, 4, row->threads, 5000), wrong_size);
}

/* Processes 1 and 2 both claim to be rank 1: the second one is refused. Then rank 2 arrives. */
static void twice(int process, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    (void)world;
    if (process == 3) await_flag(&s->flags[0], 1);
    fsdp_status status = open_as(&c, s, process == 0 ? 0 : process == 3 ? 2 : 1, 3);
    if (status) {
        CHECK_STATUS(status, FSDP_ERR_INVALID_ARG);
        says(c.error, "rank 1 has joined already");
        raise_flag(&s->flags[0]);
        return;
    }
    exchange(&c, 3, "a");
    leave(&c, s, 3);
}
TEST_P(store_refused, rank_twice, wheres) {
    setup *s = make_setup(row->at, 4, row->threads, 5000);
    run(s, twice);
    CHECK_EQ_INT(s->flags[0], 1);
}

/* The last process has another token: it finds no server of its job, and disturbs no rank. */
static void other_token(int process, int world, void *arg) {
    setup *s = (setup *)arg, mine = *s;
    client c;
    int wrong = process == world - 1, fewer = world - 1;
    if (!s->extra) setenv("FSDP_TOKEN", wrong ? "wrong" : "right", 1);
    else if (wrong) snprintf(mine.job, sizeof mine.job, "another");
    if (wrong) await_flag(&s->flags[0], fewer), mine.timeout_ms = 120;
    fsdp_status status = open_as(&c, &mine, wrong ? 1 : process, fewer);
    if (wrong) {
        CHECK_MSG(status, "a wrong token was let in");
        says(c.error, "token");
        raise_flag(&s->flags[1]);
        return;
    }
    CHECK_MSG(!status, "%s", c.error);
    exchange(&c, fewer, "a");
    raise_flag(&s->flags[0]);
    await_flag(&s->flags[1], 1);
    exchange(&c, fewer, "b");
    no_failure(&c);
    leave(&c, s, fewer);
}
TEST(store_refused, wrong_token) { run(make_setup(AT_IPV4, 4, 0, 20000), other_token); }
TEST(store_refused, wrong_job) {
    setup *s = make_setup(AT_IPV4, 4, 0, 20000);
    s->extra = s;
    run(s, other_token);
}

/* ---- ports that are taken -------------------------------------------------------------------- */

/* Two jobs of two ranks with one address: each rank finds its own job. */
static void two_jobs(int process, int world, void *arg) {
    setup *s = (setup *)arg, mine = *s;
    client c;
    (void)world;
    snprintf(mine.job, sizeof mine.job, "%.50s-%c", s->job, process & 1 ? 'b' : 'a');
    if (s->extra) usleep((useconds_t)(process * 30000)); /* otherwise all at once */
    enter(&c, &mine, process / 2);
    exchange(&c, mine.world, process & 1 ? "b" : "a");
    no_failure(&c);
    leave(&c, s, 4);
}
static const where jobs[] = {{"tcp/at_once", AT_IPV4, 0},
                             {"tcp/one_by_one", AT_IPV4, 1},
                             {"ipv6/one_by_one", AT_IPV6, 1},
                             {"host/at_once", AT_HOST, 0}};
TEST_P(store_ports, two_jobs, jobs) {
    setup *s = make_setup(row->at, 4, 0, 15000);
    s->world = 2;
    s->extra = row->threads ? s : NULL;
    h_ranks_proc(4, two_jobs, s);
}

/* Kinds of programs that already use the port. */
enum { SILENT, GARBAGE, ECHO, CLOSES, RESETS, HTTP, FULL, KINDS };
typedef struct {
    int kind, fd;
} squatter;

static void squat_once(squatter *q, int *fds, int *count, uint64_t *seed) {
    static const char http[] = "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n";
    char text[512];
    struct pollfd p = {q->fd, POLLIN, 0};
    if (poll(&p, 1, 5) > 0 && *count < 64) {
        int fd = accept4(q->fd, NULL, NULL, SOCK_CLOEXEC | SOCK_NONBLOCK);
        if (fd >= 0) fds[(*count)++] = fd;
    }
    for (int i = 0; i < *count; i++) {
        ssize_t done = 0, got = recv(fds[i], text, sizeof text, 0);
        if (q->kind == ECHO && got > 0) done = send(fds[i], text, (size_t)got, MSG_NOSIGNAL);
        if (q->kind == HTTP && got > 0) done = send(fds[i], http, sizeof http - 1, MSG_NOSIGNAL);
        for (size_t k = 0; q->kind == GARBAGE && k < sizeof text; k++)
            text[k] = (char)h_rand64(seed);
        if (q->kind == GARBAGE) done = send(fds[i], text, sizeof text, MSG_NOSIGNAL);
        (void)done;
        if (q->kind == RESETS) reset_close(fds[i]);
        if (q->kind == CLOSES) close(fds[i]);
        if (q->kind == RESETS || q->kind == CLOSES) fds[i--] = fds[--*count];
    }
}

static void squat(setup *s) {
    squatter q;
    int fds[64], count = 0;
    uint64_t seed = h_seed();
    q.kind = s->squatter, q.fd = listen_at(s->port);
    CHECK(!listen(q.fd, q.kind == FULL ? 0 : 64));
    for (int i = 0; i < 3 && q.kind == FULL; i++) { /* so that no other connection gets through */
        struct sockaddr_in a;
        socklen_t size = sizeof a;
        int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
        CHECK(!getsockname(q.fd, (struct sockaddr *)&a, &size));
        (void)connect(fd, (struct sockaddr *)&a, sizeof a);
    }
    raise_flag(&s->up);
    while (!__atomic_load_n(&s->down, __ATOMIC_SEQ_CST)) {
        if (q.kind == FULL) usleep(1000);
        else squat_once(&q, fds, &count, &seed);
    }
}

static void meets_in_time(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    int64_t start = h_calm_ms();
    client c;
    enter(&c, s, rank);
    if (rank == 0) h_message("rank 0 was in after %lld ms", (long long)(h_calm_ms() - start));
    within(start, 4000);
    exchange(&c, world, "a");
    no_failure(&c);
    leave(&c, s, world);
}

static const struct {
    const char *name;
    int kind;
} squatters[] = {{"garbage", GARBAGE}, {"closes", CLOSES}, {"resets", RESETS}},
  more_squatters[] = {{"silent", SILENT}, {"echo", ECHO}, {"http", HTTP}, {"full", FULL}};
static void port_is_taken(int kind) {
    setup *s = make_setup(AT_IPV4, 3, 0, 15000);
    s->squatter = kind;
    pid_t pid = aside(squat, s);
    run(s, meets_in_time);
    aside_ends(s, pid);
}
TEST_P(store_ports, port_is_taken, squatters) { port_is_taken(row->kind); }
TEST_P(long_store, port_is_taken, more_squatters, NIGHT) { port_is_taken(row->kind); }

/* torchrun's own store uses the port and says so: no rank tries it. */
TEST(store_ports, port_of_torchrun) {
    char port[16];
    setup *s = make_setup(AT_IPV4, 3, 0, 15000);
    setenv("TORCHELASTIC_USE_AGENT_STORE", "True", 1);
    setenv("MASTER_PORT", (snprintf(port, sizeof port, "%d", s->port), port), 1);
    s->squatter = SILENT;
    pid_t pid = aside(squat, s);
    run(s, meets_in_time);
    aside_ends(s, pid);
    run(s, meets_in_time); /* whether the port is free or not */
}

/* ---- a launcher serves ----------------------------------------------------------------------- */

static const where serves[] = {{"host", AT_HOST, 0},
                               {"tcp", AT_IPV4, 0},
                               {"ipv6", AT_IPV6, 0},
                               {"file", AT_FILE, 0},
                               {"tcp/threads", AT_IPV4, 1}};
TEST_P(store_launcher, serves, serves) {
    setup *s = make_setup(row->at, 3, row->threads, 10000);
    for (int round = 0; round < 3; round++) { /* incarnations of one job, one after the other */
        pid_t pid = aside(serves_aside, s);
        if (s->port) CHECK_EQ_INT(s->served_at, s->port);
        run(s, meets);
        aside_ends(s, pid);
    }
}

TEST(long_store, launcher_finds_port_taken, NIGHT) {
    setup *s = make_setup(AT_IPV4, 3, 0, 10000);
    setup *q = make_setup(AT_IPV4, 0, 0, 0);
    q->port = s->port, q->squatter = SILENT;
    pid_t squatter_pid = aside(squat, q), pid = aside(serves_aside, s);
    CHECK(s->served_at > s->port && s->served_at <= s->port + 16);
    run(s, meets_in_time);
    aside_ends(s, pid);
    aside_ends(q, squatter_pid);
}

/* A rank that arrives when the others have given up gets an error at once from a launcher's store,
   which still exists; the next world starts from scratch. */
static void late_at_launcher(int rank, int world, void *arg) {
    setup *s = (setup *)arg, mine = *s;
    client c;
    if (rank == 2) await_flag(&s->flags[0], 2), mine.timeout_ms = 20000;
    if (rank == 1) mine.timeout_ms = 20000; /* it has joined when rank 0 gives up */
    if (rank == 0) await_flag(s->joined, 1);
    int64_t start = h_calm_ms();
    CHECK_STATUS(open_as(&c, &mine, rank, world), FSDP_ERR_TIMEOUT);
    says(c.error, "rank 2 has not joined");
    if (rank == 2) within(start, 500);
    raise_flag(&s->flags[0]);
    await_flag(&s->flags[0], world);
    mine.timeout_ms = 10000;
    CHECK_OK(open_as(&c, &mine, rank, world));
    exchange(&c, world, "a");
    fsdpi_store_close(c.store);
}
TEST(store_launcher, latecomer_gets_the_failure, SLOW) {
    setup *s = make_setup(AT_IPV4, 3, 0, 3000);
    pid_t pid = aside(serves_aside, s);
    run(s, late_at_launcher);
    aside_ends(s, pid);
}

/* ---- ranks that are lost --------------------------------------------------------------------- */

enum { KILLED, EXITED };
typedef struct {
    const char *name;
    int at, victim, how, launcher;
} death;
static const death deaths[] = {
    {"host/kill/rank=2", AT_HOST, 2, KILLED, 0},     {"tcp/kill/rank=1", AT_IPV4, 1, KILLED, 0},
    {"tcp/exit/rank=3", AT_IPV4, 3, EXITED, 0},      {"tcp/kill/rank=0", AT_IPV4, 0, KILLED, 0},
    {"launcher/kill/rank=0", AT_IPV4, 0, KILLED, 1},
};
static const death more_deaths[] = {
    {"host/kill/rank=0", AT_HOST, 0, KILLED, 0},     {"file/kill/rank=3", AT_FILE, 3, KILLED, 0},
    {"ipv6/kill/rank=1", AT_IPV6, 1, KILLED, 0},     {"host/exit/rank=1", AT_HOST, 1, EXITED, 0},
    {"file/kill/rank=0", AT_FILE, 0, KILLED, 0},     {"tcp/exit/rank=0", AT_IPV4, 0, EXITED, 0},
    {"launcher/kill/rank=2", AT_HOST, 2, KILLED, 1},
};

static const char *const OPERATION = "all_gather of 'h.3' (forward, op 17)";

/* Waits until the store knows the victim's state. */
static void await_beat(client *c, int rank, const char *text) {
    fsdpi_peer p;
    int64_t start = h_calm_ms();
    do {
        memset(&p, 0, sizeof p);
        CHECK_OK(fsdpi_store_ask(c->store, rank, &p, 2000 * MS));
        within(start, 1500);
        usleep(2000);
    } while (strcmp(p.text, text) != 0);
    CHECK_EQ_INT(p.state, FSDPI_PEER_JOINED);
}

static void same_failures(const setup *s, int but) {
    const fsdpi_failure *first = NULL;
    for (int r = 0; r < s->world; r++) {
        const fsdpi_failure *v = &s->failures[r];
        if (r == but) continue;
        if (!first) first = v;
        CHECK_MSG(v->status && v->status == first->status && v->rank == first->rank &&
                      !strcmp(v->subject, first->subject) && !strcmp(v->reason, first->reason),
                  "rank %d has status %d, '%s', '%s'; another one has %d, '%s', '%s'", r,
                  (int)v->status, v->subject, v->reason, (int)first->status, first->subject,
                  first->reason);
    }
}

/* After a failure every call returns its status, at once. */
static void all_calls_fail(client *c, fsdp_status status) {
    char text[8];
    size_t size;
    fsdpi_peer p;
    int64_t start = h_calm_ms();
    CHECK_STATUS(fsdpi_store_set(c->store, "k", "v", 1), status);
    CHECK_STATUS(try_get(c, "k", text, 8, &size, 5000), status);
    CHECK_STATUS(fsdpi_store_delete(c->store, "k"), status);
    CHECK_STATUS(fsdpi_store_ask(c->store, 0, &p, 5000 * MS), status);
    fsdpi_store_abort(c->store, FSDP_ERR_INTERNAL, "later", "too late");
    within(start, 150);
    CHECK_EQ_INT(await_failure(c, 0).status, status); /* the first failure counts */
    CHECK(__atomic_load_n(&c->events, __ATOMIC_SEQ_CST) > 0);
}

static void *blocked_get(void *arg) {
    client *c = (client *)arg;
    char text[8];
    size_t size;
    fsdp_status status = try_get(c, "never", text, 8, &size, 30000);
    CHECK_STATUS(status, await_failure(c, 0).status);
    return NULL;
}

static void loses_one(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    const death *d = (const death *)s->extra;
    pthread_t waiter;
    client c;
    enter(&c, s, rank);
    does(&c, 1, OPERATION);
    exchange(&c, world, "a");
    if (d->victim != 0 || d->launcher) await_beat(&c, d->victim, OPERATION);
    CHECK_EQ_INT(pthread_create(&waiter, NULL, blocked_get, &c), 0);
    gather_at(s, 0);
    if (rank == d->victim) {
        usleep(20000);
        s->when = h_calm_ms();
        h_shared->state[rank + 1] = H_DIES;
        if (d->how == KILLED) h_die(SIGKILL);
        _exit(0);
    }
    s->failures[rank] = await_failure(&c, 30000);
    within(s->when, 1000);
    pthread_join(waiter, NULL);
    within(s->when, 1000);
    all_calls_fail(&c, FSDP_ERR_PEER_LOST);
    fsdpi_store_close(c.store);
    within(s->when, 1500);
}
static void one_dies(const death *row) {
    setup *s = make_setup(row->at, 4, 0, 20000);
    pid_t pid = row->launcher ? aside(serves_aside, s) : 0;
    char who[16];
    s->extra = row;
    run(s, loses_one);
    same_failures(s, row->victim);
    const fsdpi_failure *v = &s->failures[row->victim ? 0 : 1];
    snprintf(who, sizeof who, "rank %d", row->victim);
    CHECK_EQ_INT(v->status, FSDP_ERR_PEER_LOST);
    CHECK_EQ_INT(v->rank, -1);
    says(v->reason, who);
    if (row->victim || pid) says(v->reason, OPERATION), says(v->reason, "it was in");
    else says(v->reason, "store");
    if (pid) aside_ends(s, pid);
}

TEST_P(store_lost, one_dies, deaths) { one_dies(row); }
TEST_P(long_store, one_dies, more_deaths, NIGHT) { one_dies(row); }

/* The process that serves for the ranks dies. */
static void loses_launcher(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    if (rank == world - 1) {
        fsdpi_store_server *server = serve(s, world - 1);
        raise_flag(&s->flags[0]);
        await_flag(&s->flags[1], world - 1);
        s->when = h_calm_ms();
        CHECK(server != NULL);
        h_die(SIGKILL);
    }
    await_flag(&s->flags[0], 1);
    CHECK_OK(open_as(&c, s, rank, world - 1));
    raise_flag(&s->flags[1]);
    s->failures[rank] = await_failure(&c, 2000);
    within(s->when, 1000);
    says(s->failures[rank].reason, "launcher");
    CHECK_EQ_INT(s->failures[rank].status, FSDP_ERR_PEER_LOST);
    all_calls_fail(&c, FSDP_ERR_PEER_LOST);
    fsdpi_store_close(c.store);
}
TEST(store_lost, launcher_dies) {
    setup *s = make_setup(AT_IPV4, 4, 0, 20000);
    run(s, loses_launcher);
    same_failures(s, 3);
}

/* Two ranks die at once: there is one failure, about one of them. */
static void loses_two(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    enter(&c, s, rank);
    exchange(&c, world, "a");
    gather_at(s, 0);
    if (rank >= world - 2) h_die(SIGKILL);
    s->failures[rank] = await_failure(&c, 1500);
    fsdpi_store_close(c.store);
}
TEST(store_lost, two_die_at_once) {
    for (int i = 0; i < 3; i++) {
        setup *s = make_setup(i & 1 ? AT_IPV4 : AT_HOST, 6, 0, 20000);
        run(s, loses_two);
        s->world = 4;
        same_failures(s, -1);
        CHECK(strstr(s->failures[0].reason, "rank 4") || strstr(s->failures[0].reason, "rank 5"));
    }
}

/* Ranks end in order, one after the other: no failure, and the store knows who has left. */
static void leaves(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    int leaver = *(const int *)s->extra;
    client c;
    int64_t start;
    enter(&c, s, rank);
    exchange(&c, world, "a");
    for (int r = 0; r < world; r++) CHECK(!fsdpi_store_has_left(c.store, r));
    gather_at(s, 0);
    if (rank == leaver) {
        fsdpi_store_close(c.store);
        raise_flag(&s->flags[1]);
        return;
    }
    await_flag(&s->flags[1], 1);
    start = h_calm_ms();
    while (!fsdpi_store_has_left(c.store, leaver)) within(start, 500), usleep(300);
    CHECK(__atomic_load_n(&c.events, __ATOMIC_SEQ_CST) > 0);
    for (int r = 0; r < world; r++) CHECK_EQ_INT(fsdpi_store_has_left(c.store, r), r == leaver);
    if (leaver) {
        fsdpi_peer p;
        CHECK_OK(fsdpi_store_ask(c.store, leaver, &p, 1000 * MS));
        CHECK_EQ_INT(p.state, FSDPI_PEER_LEFT);
        put(&c, "after", "x", 1), get_text(&c, "after", "x");
    } else { /* the server is gone: no store any more, but no failure either */
        char text[8];
        size_t size;
        start = h_calm_ms();
        CHECK(try_get(&c, "a/0", text, 8, &size, 5000) != FSDP_OK);
        CHECK(fsdpi_store_set(c.store, "x", "y", 1) != FSDP_OK);
        within(start, 300);
    }
    usleep(100000);
    no_failure(&c);
    fsdpi_store_close(c.store);
}
static const struct {
    const char *name;
    int at, threads, leaver;
} leavers[] = {{"host/rank=1", AT_HOST, 0, 1},        {"host/rank=0", AT_HOST, 0, 0},
               {"tcp/rank=2", AT_IPV4, 0, 2},         {"tcp/rank=0", AT_IPV4, 0, 0},
               {"tcp/rank=0/threads", AT_IPV4, 1, 0}, {"host/rank=2/threads", AT_HOST, 1, 2},
               {"file/rank=0/threads", AT_FILE, 1, 0}};
TEST_P(store_lost, one_leaves, leavers) {
    setup *s = make_setup(row->at, 4, row->threads, 20000);
    s->extra = &row->leaver;
    run(s, leaves);
}

/* After the server has gone, an abort takes effect at least on this rank, and no call waits. */
static void abort_without_server(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    enter(&c, s, rank);
    exchange(&c, world, "a");
    gather_at(s, 0);
    if (rank == 0) {
        fsdpi_store_close(c.store);
        raise_flag(&s->flags[1]);
        return;
    }
    await_flag(&s->flags[1], 1);
    usleep(20000);
    int64_t start = h_calm_ms();
    fsdpi_store_abort(c.store, FSDP_ERR_ABORTED, "step 3", "enough");
    within(start, 300);
    fsdpi_failure v = await_failure(&c, 0);
    CHECK_EQ_INT(v.status, FSDP_ERR_ABORTED);
    CHECK_EQ_INT(v.rank, rank);
    CHECK_EQ_STR(v.reason, "enough");
    CHECK_EQ_STR(v.subject, "step 3");
    fsdpi_store_close(c.store);
}
TEST(store_abort, server_has_left) {
    run(make_setup(AT_HOST, 3, 0, 20000), abort_without_server);
    run(make_setup(AT_IPV4, 3, 1, 20000), abort_without_server);
}

/* SIGSTOP of the server: no rank gets news, but no call waits long. */
static void stopped_server(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    char text[8];
    size_t size;
    fsdpi_peer p;
    enter(&c, s, rank);
    exchange(&c, world, "a");
    gather_at(s, 0);
    if (rank == 0) { /* rank 1 stops this rank, which gets the failure afterwards */
        s->failures[0] = await_failure(&c, 2000);
        fsdpi_store_close(c.store);
        return;
    }
    if (rank == 1) kill(s->pids[0], SIGSTOP), raise_flag(&s->flags[1]);
    await_flag(&s->flags[1], 1);
    usleep(10000);
    int64_t start = h_calm_ms();
    CHECK_STATUS(try_get(&c, "never", text, 8, &size, 100), FSDP_ERR_TIMEOUT);
    within(start, 500);
    start = h_calm_ms();
    CHECK_STATUS(fsdpi_store_ask(c.store, 0, &p, 100 * MS), FSDP_ERR_TIMEOUT);
    within(start, 300);
    raise_flag(&s->flags[2]);
    await_flag(&s->flags[2], world - 1);
    start = h_calm_ms();
    fsdpi_store_abort(c.store, FSDP_ERR_TIMEOUT, "all_gather", "rank 0 has not come");
    within(start, 300);
    s->failures[rank] = await_failure(&c, 0);
    CHECK_EQ_INT(s->failures[rank].status, FSDP_ERR_TIMEOUT);
    CHECK_EQ_STR(s->failures[rank].reason, "rank 0 has not come");
    start = h_calm_ms();
    fsdpi_store_close(c.store);
    within(start, 600);
    raise_flag(&s->flags[3]);
    if (rank == 1) await_flag(&s->flags[3], world - 1), kill(s->pids[0], SIGCONT);
}
TEST(store_abort, server_is_stopped) {
    setup *s = make_setup(AT_IPV4, 3, 0, 20000);
    run(s, stopped_server);
    CHECK(s->failures[0].status);
}

/* ---- failures -------------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    int at, world, threads, aborts;
} abortion;
static const abortion abortions[] = {
    {"host/one", AT_HOST, 4, 0, 1},          {"host/two", AT_HOST, 4, 0, 2},
    {"host/all", AT_HOST, 4, 0, 4},          {"tcp/two", AT_IPV4, 4, 0, 2},
    {"tcp/all/threads", AT_IPV4, 16, 1, 16}, {"host/two/threads", AT_HOST, 8, 1, 2},
    {"file/all", AT_FILE, 3, 0, 3},
};

static void aborts(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    const abortion *a = (const abortion *)s->extra;
    pthread_t waiter;
    client c;
    enter(&c, s, rank);
    exchange(&c, world, "a");
    CHECK_EQ_INT(pthread_create(&waiter, NULL, blocked_get, &c), 0);
    gather_at(s, 0);
    if (rank >= world - a->aborts) {
        char subject[400], reason[1200];
        snprintf(subject, sizeof subject, "step of rank %d", rank);
        snprintf(reason, sizeof reason, "rank %d: out of data", rank);
        if (rank == world - 2) memset(subject, 's', 399), subject[399] = 0; /* too long */
        if (rank == world - 2) memset(reason, 'r', 1199), reason[1199] = 0;
        int64_t start = h_now_ms(), calm = h_calm_ms();
        fsdpi_store_abort(c.store, FSDP_ERR_ABORTED, subject, reason);
        within(calm, 250);
        if (h_now_ms() - start >= 90) raise_flag(&s->flags[4]);  /* decided without the server */
        CHECK(fsdpi_store_failure(c.store, &s->failures[rank])); /* a failure is known on return */
    }
    s->failures[rank] = await_failure(&c, 500);
    pthread_join(waiter, NULL);
    all_calls_fail(&c, FSDP_ERR_ABORTED);
    fsdpi_store_close(c.store);
}
TEST_P(store_abort, reaches_all, abortions) {
    for (int round = 0; round < (row->aborts > 1 ? 2 : 1); round++) {
        setup *s = make_setup(row->at, row->world, row->threads, 20000);
        s->extra = row;
        run(s, aborts);
        if (s->flags[4]) h_message("the server did not run in time: no comparison");
        else same_failures(s, -1);
        int who = s->failures[0].rank;
        CHECK(who >= row->world - row->aborts && who < row->world);
        CHECK(strlen(s->failures[0].reason) > 10 && strlen(s->failures[0].subject) > 10);
    }
}

static void aborts_without_words(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    (void)world;
    enter(&c, s, rank);
    gather_at(s, 0);
    if (rank) fsdpi_store_abort(c.store, FSDP_ERR_BACKEND, "", "");
    s->failures[rank] = await_failure(&c, 1000);
    CHECK_EQ_INT(s->failures[rank].status, FSDP_ERR_BACKEND);
    CHECK_EQ_STR(s->failures[rank].subject, "");
    CHECK_EQ_STR(s->failures[rank].reason, "");
    CHECK_EQ_INT(s->failures[rank].rank, 1);
    fsdpi_store_close(c.store);
}
TEST(store_abort, empty_texts) { run(make_setup(AT_HOST, 2, 0, 20000), aborts_without_words); }

/* Ranks abort and then close at once: the others get that failure, not a lost rank. */
static void aborts_and_goes(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    enter(&c, s, rank);
    exchange(&c, world, "a");
    gather_at(s, 0);
    if (rank == *(const int *)s->extra) {
        fsdpi_store_abort(c.store, FSDP_ERR_ABORTED, "step 3", "enough");
        s->failures[rank] = await_failure(&c, 0);
        fsdpi_store_close(c.store);
        h_shared->state[rank + 1] = H_DIES;
        _exit(0);
    }
    s->failures[rank] = await_failure(&c, 1000);
    usleep(50000);
    fsdpi_store_close(c.store);
}
TEST(store_abort, then_exits) {
    static const int who[] = {0, 1, 2};
    for (int i = 0; i < 3; i++) {
        setup *s = make_setup(i ? AT_HOST : AT_IPV4, 3, 0, 20000);
        s->extra = &who[i];
        run(s, aborts_and_goes);
        same_failures(s, -1);
        CHECK_EQ_STR(s->failures[0].reason, "enough");
        CHECK_EQ_INT(s->failures[0].rank, i);
    }
}

/* ---- asking ---------------------------------------------------------------------------------- */

static void asks(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    fsdpi_peer p;
    client c;
    char text[40], mine[40];
    enter(&c, s, rank);
    snprintf(mine, sizeof mine, "broadcast of 'u.%d'", rank);
    does(&c, rank & 1, mine);
    exchange(&c, world, "a");
    for (int r = 0; r < world; r++) {
        snprintf(text, sizeof text, "broadcast of 'u.%d'", r);
        await_beat(&c, r, text);
        CHECK_OK(fsdpi_store_ask(c.store, r, &p, 1000 * MS));
        CHECK_EQ_INT(p.busy, r & 1);
        CHECK_MSG(p.since_ns >= 4 * MS && p.since_ns < slack(800) * MS, "%lld",
                  (long long)p.since_ns);
        CHECK_MSG(p.silent_ns >= 0 && p.silent_ns < slack(600) * MS, "%lld",
                  (long long)p.silent_ns);
    }
    CHECK_STATUS(fsdpi_store_ask(c.store, world, &p, 1000 * MS), FSDP_ERR_INVALID_ARG);
    CHECK_STATUS(fsdpi_store_ask(c.store, -1, &p, 1000 * MS), FSDP_ERR_INVALID_ARG);
    no_failure(&c);
    gather_at(s, 0);
    fsdpi_store_close(c.store);
}
TEST(store_ask, what_others_do) { run(make_setup(AT_IPV4, 8, 1, 20000), asks); }

/* A stopped rank falls silent, and its silence is measured. */
static void asks_about_stopped(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    fsdpi_peer p;
    client c;
    enter(&c, s, rank);
    does(&c, 1, OPERATION);
    exchange(&c, world, "a");
    if (rank == 0) {
        await_beat(&c, 1, OPERATION);
        kill(s->pids[1], SIGSTOP);
        usleep(250000);
        CHECK_OK(fsdpi_store_ask(c.store, 1, &p, 1000 * MS));
        CHECK_MSG(p.silent_ns >= 100 * MS && p.silent_ns < slack(1200) * MS, "%lld",
                  (long long)p.silent_ns);
        CHECK_MSG(p.since_ns >= 100 * MS, "%lld", (long long)p.since_ns);
        CHECK_EQ_INT(p.state, FSDPI_PEER_JOINED); /* silence by itself is no failure */
        no_failure(&c);
        kill(s->pids[1], SIGCONT);
    }
    exchange(&c, world, "b");
    leave(&c, s, world);
}
TEST(store_ask, silent_rank) { run(make_setup(AT_HOST, 2, 0, 20000), asks_about_stopped); }

/* A desc without callbacks. */
TEST(store_ask, no_callbacks_no_deadline) {
    setup *s = make_setup(AT_HOST, 1, 0, 5000);
    fsdpi_store_desc d = make_desc(s, 0, 1);
    fsdpi_store *store = NULL;
    fsdpi_peer p;
    char error[256];
    d.boot.timeout_ns = INT64_MAX;
    CHECK_OK(fsdpi_store_open(&d, &store, error, sizeof error));
    usleep(300000);
    CHECK_OK(fsdpi_store_ask(store, 0, &p, 1000 * MS));
    CHECK_EQ_INT(p.state, FSDPI_PEER_JOINED);
    fsdpi_store_abort(store, FSDP_ERR_ABORTED, "a", "b");
    fsdpi_store_close(store);
    fsdpi_store_close(NULL), fsdpi_store_stop(NULL);
}

/* ---- interfaces ------------------------------------------------------------------------------ */

TEST(store_interface, chosen_by_name) {
    static const struct {
        const char *variable, *value, *address;
    } rows[] = {{"FSDP_SOCKET_IFNAME", "lo", "127.0.0.1"},
                {"GLOO_SOCKET_IFNAME", "lo", "127.0.0.1"},
                {"FSDP_SOCKET_IFNAME", "nosuch0,lo", "127.0.0.1"},
                {"FSDP_SOCKET_IFNAME", "^nosuch0", ""},
                {"FSDP_SOCKET_IFNAME", "nosuch0", NULL},
                {"GLOO_SOCKET_IFNAME", "nosuch0,nosuch1", NULL}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        setup *s = make_setup(AT_IPV4, 1, 0, 3000);
        client c;
        setenv(rows[i].variable, rows[i].value, 1);
        fsdp_status status = open_as(&c, s, 0, 1);
        unsetenv(rows[i].variable);
        CHECK_MSG(status == (rows[i].address ? FSDP_OK : FSDP_ERR_INVALID_ARG), "%s=%s: %s (%s)",
                  rows[i].variable, rows[i].value, fsdp_status_name(status), c.error);
        if (status) {
            says(c.error, rows[i].variable);
            says(c.error, "nosuch0");
            says(c.error, "lo"); /* the interfaces that exist */
            continue;
        }
        is_numeric(fsdpi_store_address(c.store));
        if (rows[i].address[0]) CHECK_EQ_STR(fsdpi_store_address(c.store), rows[i].address);
        fsdpi_store_close(c.store);
    }
}

/* ---- untrusted peers ------------------------------------------------------------------------- */
enum {
    A_GARBAGE,
    A_HALF,
    A_SLOW,
    A_LENGTHS,
    A_MANY,
    A_RESETS,
    A_FLOOD,
    A_HTTP,
    A_WRONG,
    A_BARRAGE
};
enum { A_CONNS = 1000 };
typedef struct {
    const char *name;
    int kind, late; /* late: rank 2 joins during the attack */
} attack;
static const attack attacks[] = {
    {"garbage/late", A_GARBAGE, 1},   {"half_a_frame/late", A_HALF, 1},
    {"slow_bytes/late", A_SLOW, 1},   {"thousand_connections/late", A_MANY, 1},
    {"wrong_token/late", A_WRONG, 1}, {"barrage/late", A_BARRAGE, 1},
    {"huge_lengths", A_LENGTHS, 0},   {"flood", A_FLOOD, 0},
};
static const attack more_attacks[] = {
    {"garbage", A_GARBAGE, 0},           {"half_a_frame", A_HALF, 0}, {"slow_bytes", A_SLOW, 0},
    {"thousand_connections", A_MANY, 0}, {"resets", A_RESETS, 0},     {"http", A_HTTP, 0},
    {"wrong_token", A_WRONG, 0},
};

typedef struct {
    int fd[A_CONNS], count, at[A_CONNS];
    uint64_t seed;
} raid;

static void raid_drop(raid *r, int i) {
    close(r->fd[i]);
    r->fd[i] = r->fd[--r->count], r->at[i] = r->at[r->count];
}

static void raid_once(const setup *s, int kind, raid *r) {
    static unsigned char block[65536];
    unsigned char zeros[NONCE] = {0}, whole[HEADER + PROVE_BYTES];
    wire other;
    size_t size = prove(&other, whole, zeros, zeros, zeros);
    int held = kind == A_MANY ? A_CONNS : kind == A_SLOW ? 16 : kind == A_FLOOD ? 2 : 100;
    int fd = r->count < held ? raw_connect(s->port) : -1;
    if (fd >= 0) r->at[r->count] = 0, r->fd[r->count++] = fd;
    for (int k = 0; k < HEADER && kind == A_GARBAGE; k += 8)
        number(block + k, h_rand64(&r->seed), 8);
    if (fd >= 0) switch (kind) {
        case A_GARBAGE: raw_send(fd, block, 1 + h_rand64(&r->seed) % 4096); break;
        case A_HALF: raw_send(fd, whole, size / 2); break;
        case A_HTTP: raw_send(fd, "GET / HTTP/1.1\r\nHost: a\r\n\r\n", 28); break;
        case A_WRONG: raw_send(fd, whole, size); break;
        case A_LENGTHS: {
            static const uint64_t lengths[] = {UINT64_MAX, (uint64_t)1 << 63, 16 * MIB,
                                               16 * MIB + 1, 4096};
            uint64_t pick = h_rand64(&r->seed);
            size = header(whole, (int)(pick % 16), 1,
                          pick & 16   ? 0xffffffff
                          : pick & 32 ? 256
                                      : 0,
                          lengths[(pick >> 8) % 5]);
            raw_send(fd, whole, size), raw_send(fd, block, 30);
            break;
        }
        default: break;
        }
    for (int i = 0; i < r->count; i++) {
        if (kind == A_SLOW && r->at[i] < (int)size) raw_send(r->fd[i], whole + r->at[i]++, 1);
        if (kind == A_FLOOD) {
            for (int k = 0; k < 65536; k += HEADER)
                header(block + (k < 65512 ? k : 65512), OP_SET, 1, 0, 0);
            if (send(r->fd[i], block, sizeof block, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 &&
                errno != EAGAIN)
                raid_drop(r, i--);
        }
        if (kind == A_RESETS) reset_close(r->fd[i]), r->fd[i] = r->fd[--r->count], i--;
        if (kind == A_BARRAGE) raid_drop(r, i--);
    }
    if ((kind == A_GARBAGE || kind == A_LENGTHS || kind == A_HTTP || kind == A_WRONG ||
         kind == A_HALF) &&
        r->count == held)
        raid_drop(r, (int)(h_rand64(&r->seed) % (unsigned)held));
    if (kind == A_SLOW || (kind == A_MANY && r->count == held)) usleep(1000);
}

static void raids(setup *s, int kind) {
    static raid r;
    struct rlimit files;
    CHECK(!getrlimit(RLIMIT_NOFILE, &files));
    files.rlim_cur = files.rlim_max;
    (void)setrlimit(RLIMIT_NOFILE, &files);
    r.seed = h_seed();
    while (__atomic_load_n(&s->flags[1], __ATOMIC_SEQ_CST) < 3) {
        raid_once(s, kind, &r);
        raise_flag(&s->flags[5]);
    }
    while (r.count) raid_drop(&r, 0);
}

/* An allocator that knows its maximum. */
typedef struct {
    w_heap heap;
    int64_t peak;
} tide;
static void *tide_alloc(size_t size, size_t align, void *user) {
    tide *t = (tide *)user;
    void *ptr = w_heap_alloc(size, align, &t->heap);
    int64_t live = __atomic_load_n(&t->heap.live_bytes, __ATOMIC_SEQ_CST);
    if (live > __atomic_load_n(&t->peak, __ATOMIC_SEQ_CST))
        __atomic_store_n(&t->peak, live, __ATOMIC_SEQ_CST);
    return ptr;
}
static void tide_free(void *ptr, size_t size, void *user) {
    w_heap_free(ptr, size, &((tide *)user)->heap);
}

static void tide_use(tide *t, setup *s) {
    memset(t, 0, sizeof *t);
    t->heap.fail_at = -1;
    s->allocator.alloc = tide_alloc, s->allocator.free = tide_free, s->allocator.user = t;
}

static void works_under_attack(client *c, setup *s, int rounds) {
    char what[24];
    for (int i = 0; i < rounds; i++) {
        int64_t start = h_calm_ms();
        snprintf(what, sizeof what, "round %d", i);
        exchange(c, 3, what);
        int took = (int)(h_calm_ms() - start), *worst = &s->flags[4];
        if (took > __atomic_load_n(worst, __ATOMIC_SEQ_CST))
            __atomic_store_n(worst, took, __ATOMIC_SEQ_CST);
        usleep(1000);
    }
}

static void attacked(int process, int world, void *arg) {
    setup *s = (setup *)arg, mine;
    const attack *a = (const attack *)s->extra;
    client c;
    tide t;
    if (process == world - 1) {
        await_flag(&s->flags[0], a->late ? 1 : 3);
        raids(s, a->kind);
        return;
    }
    if (process == 0) raise_flag(&s->flags[0]);
    if (a->late && process == 2) await_flag(&s->flags[5], 50);
    mine = *s, mine.world = 3;
    tide_use(&t, &mine);
    int64_t start = h_calm_ms();
    enter(&c, &mine, process);
    if (a->late && process == 2) within(start, 2500);
    if (process) raise_flag(&s->flags[0]);
    works_under_attack(&c, s, 40);
    no_failure(&c);
    raise_flag(&s->flags[1]);
    await_flag(&s->flags[1], 3);
    if (process == 0) {
        int fds = count_fds();
        long long peak = (long long)__atomic_load_n(&t.peak, __ATOMIC_SEQ_CST);
        h_message("%d rounds of the attack; slowest exchange %d ms; %lld bytes at most, %d "
                  "descriptors",
                  __atomic_load_n(&s->flags[5], __ATOMIC_SEQ_CST), s->flags[4], peak, fds);
        CHECK_MSG(peak < 1 * MIB, "%lld bytes", peak);
        CHECK_MSG(fds < 160, "%d descriptors", fds);
    }
    raise_flag(&s->flags[2]);
    await_flag(&s->flags[2], 3);
    fsdpi_store_close(c.store);
    CHECK_EQ_INT(t.heap.live, 0);
}
static void job_goes_on(const attack *row) {
    setup *s = make_setup(AT_IPV4, 4, 0, 20000);
    s->extra = row;
    run(s, attacked);
    CHECK_MSG(s->flags[4] < slack(1500), "an exchange took %d ms", s->flags[4]);
}
TEST_P(store_untrusted, job_goes_on, attacks, SLOW) { job_goes_on(row); }
TEST_P(long_store, job_goes_on, more_attacks, NIGHT) { job_goes_on(row); }

/* A connection that sends nothing is closed after 5 s. */
TEST(long_store, silent_peers_are_closed, SECONDS(60) | NIGHT) {
    setup *s = make_setup(AT_IPV4, 1, 0, 20000);
    client c;
    int fd[30], fds;
    enter(&c, s, 0);
    fds = count_fds();
    for (int i = 0; i < 30; i++) CHECK((fd[i] = raw_connect(s->port)) >= 0);
    usleep(100000);
    CHECK(count_fds() >= fds + 60); /* both ends are in this process */
    sleep(6);
    CHECK_EQ_INT(count_fds(), fds + 30);
    for (int i = 0; i < 30; i++) close(fd[i]);
    get_text(&c, (put(&c, "a", "1", 1), "a"), "1");
    fsdpi_store_close(c.store);
}

/* Replies to wrong first messages have no tag, as there is no key yet. */
TEST(store_refused, texts_on_the_wire) {
    setup *s = make_setup(AT_IPV4, 1, 0, 5000);
    unsigned char out[HEADER + 60] = {0};
    client c;
    wire w;
    char text[600];
    int flags;
    enter(&c, s, 0);
    CHECK_EQ_INT(raw_prove(&w, s, "another job"), OP_REFUSED);
    CHECK_EQ_INT(wire_frame(&w, text, sizeof text, &flags), 0); /* and closed */
    close(w.fd);
    w.fd = raw_connect(s->port), w.sealed = 0;
    CHECK_EQ_INT(wire_frame(&w, text, sizeof text, &flags), OP_CHALLENGE);
    header(out, OP_HELLO, 0, 0, 60); /* as in version 1 */
    raw_send(w.fd, out, sizeof out);
    CHECK_EQ_INT(wire_frame(&w, text, sizeof text, &flags), OP_REFUSED);
    says(text, "speaks version 2 of the store's protocol, and this program version 1");
    CHECK_EQ_INT(flags, 0);
    CHECK_EQ_INT(wire_frame(&w, text, sizeof text, &flags), 0);
    close(w.fd);
    raw_member(&w, s, 0, 1);
    CHECK_EQ_INT(wire_frame(&w, text, sizeof text, &flags), OP_REFUSED);
    says(text, "joined already");
    CHECK_EQ_INT(flags, FSDP_ERR_INVALID_ARG);
    CHECK_EQ_INT(wire_frame(&w, text, sizeof text, &flags), 0);
    close(w.fd);
    no_failure(&c);
    put(&c, "a", "1", 1), get_text(&c, "a", "1");
    fsdpi_store_close(c.store);
}

/* Rank 1 has joined, and dies before all have: no rank waits until its deadline. */
static void dies_while_others_wait(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    if (rank == 2) return;
    if (rank == 1) {
        wire w;
        raw_member(&w, s, 1, world);
        CHECK_EQ_INT(wire_frame(&w, NULL, 0, NULL), OP_REPLY);
        usleep(20000);
        s->when = h_calm_ms();
        h_die(SIGKILL);
    }
    CHECK_STATUS(open_as(&c, s, rank, world), FSDP_ERR_PEER_LOST);
    says(c.error, "rank 1 has died");
    within(s->when, 1000);
}
TEST(store_lost, before_all_have_come) {
    run(make_setup(AT_IPV4, 3, 0, 20000), dies_while_others_wait);
}

/* Rank 1 leaves before rank 2 has arrived: both other ranks get an error. */
static void leaves_while_others_wait(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    if (rank == 1) {
        wire w;
        raw_member(&w, s, 1, world);
        CHECK_EQ_INT(wire_frame(&w, NULL, 0, NULL), OP_REPLY);
        wire_send(&w, OP_BYE, NULL, NULL, 0);
        while (wire_frame(&w, NULL, 0, NULL)) continue; /* until the server hangs up */
        raise_flag(&s->flags[0]);
        close(w.fd);
        return;
    }
    if (rank == 2) await_flag(&s->flags[0], 1);
    int64_t start = h_calm_ms();
    fsdp_status status = open_as(&c, s, rank, world);
    if (rank == 0 || status != FSDP_ERR_TIMEOUT) {
        CHECK_STATUS(status, FSDP_ERR_PEER_LOST);
        says(c.error, "rank 1 has left before all ranks had joined");
        if (rank) within(start, 1000);
    } else { /* rank 0, and so its store, has already given up */
        says(c.error, "rank 0");
    }
}
TEST(store_lost, leaves_before_all_have_come) {
    run(make_setup(AT_IPV4, 3, 0, 150), leaves_while_others_wait);
}

/* The world ends at the moment in which all have joined: rank 0 is between two looks, in the clock
   of its desc, until its thread has handled both. It has joined, and finds the end afterwards. */
enum { ABORTS, LEAVES, STORE_CLOSES, CUT };
static const struct {
    const char *name;
    int end;
    fsdp_status status; /* of rank 0's calls */
} ends_at_once[] = {{"abort", ABORTS, FSDP_ERR_ABORTED},
                    {"leaves", LEAVES, FSDP_ERR_TIMEOUT},
                    {"store_closes", STORE_CLOSES, FSDP_ERR_PEER_LOST},
                    {"cut", CUT, FSDP_ERR_PEER_LOST}};
static struct {
    setup *s;
    pthread_t opener;
    fsdpi_store *store; /* rank 0's, before open returns it */
    fsdpi_store_server *server;
    client peer;            /* rank 1 */
    int end, has_ended, fd; /* fd: rank 0's connection */
} at_once;
static void *alloc_at_once(size_t size, size_t align, void *user) {
    char *p = (char *)fsdpi_libc_alloc(size, align, user);
    if (!at_once.store) at_once.store = (fsdpi_store *)(void *)(p + FSDPI_ALIGN); /* the first */
    return p;
}
static int64_t clock_at_once(void *user) {
    fsdpi_store *store = at_once.store;
    const int is_opener = pthread_equal(pthread_self(), at_once.opener);
    if (is_opener && !store->running) at_once.fd = store->fd; /* later only its thread uses it */
    if (is_opener && store->running && !at_once.has_ended) {
        at_once.has_ended = 1;
        enter(&at_once.peer, at_once.s, 1);
        while (!FSDPI_LOAD(&store->joined)) usleep(300);
        if (at_once.end == ABORTS)
            fsdpi_store_abort(at_once.peer.store, FSDP_ERR_ABORTED, "", "of the test");
        if (at_once.end == LEAVES) fsdpi_store_close(at_once.peer.store);
        if (at_once.end == STORE_CLOSES) fsdpi_store_stop(at_once.server);
        if (at_once.end == CUT) shutdown(at_once.fd, SHUT_RDWR);
        while (!FSDPI_LOAD(&store->judged) && !FSDPI_LOAD(&store->gone) &&
               !fsdpi_store_has_left(store, 1))
            usleep(300);
    }
    return fsdpi_monotonic_ns(user);
}
TEST_P(store_open, the_end_follows_at_once, ends_at_once) {
    setup *s = at_once.s = make_setup(AT_IPV4, 2, 1, 20000);
    fsdpi_store_desc d = make_desc(s, 0, 2);
    fsdpi_store *store;
    fsdpi_failure v;
    char error[1024] = "", text[8];
    size_t bytes;
    at_once.end = row->end;
    at_once.server = serve(s, 2);
    at_once.opener = pthread_self();
    d.boot.allocator.alloc = alloc_at_once, d.boot.clock.now_ns = clock_at_once;
    CHECK_MSG(!fsdpi_store_open(&d, &store, error, sizeof error), "%s", error);
    CHECK(at_once.has_ended && store == at_once.store);
    CHECK_EQ_INT(fsdpi_store_failure(store, &v), row->end == ABORTS || row->end == CUT);
    if (row->end == ABORTS) CHECK_EQ_STR(v.reason, "of the test");
    CHECK_STATUS(fsdpi_store_get(store, "never", text, sizeof text, &bytes, 0), row->status);
    fsdpi_store_close(store);
    if (row->end != LEAVES) fsdpi_store_close(at_once.peer.store);
    if (row->end != STORE_CLOSES) fsdpi_store_stop(at_once.server);
}

/* ---- members that behave badly --------------------------------------------------------------- */

enum {
    B_GARBAGE,
    B_OPS,
    B_LENGTH,
    B_KEY,
    B_HALF,
    B_DEAF,
    B_GREEDY,
    B_SHORT,
    B_SLOW,
    B_AGAIN,
    B_TAG
};
typedef struct {
    const char *name;
    int kind;
    const char *says;
} badness;
static const badness bad_members[] = {
    {"garbage", B_GARBAGE, "rank 2 is cut off: its messages"},
    {"unknown_op", B_OPS, "rank 2 has sent"},
    {"value_too_long", B_LENGTH, "rank 2 is cut off: its messages"},
    {"key_too_long", B_KEY, "rank 2 is cut off: its messages"},
    {"half_a_frame_then_end", B_HALF, "rank 2 has died"},
    {"does_not_read", B_DEAF, NULL},
    {"asks_without_reading", B_GREEDY, "rank 2 does not read"},
    {"value_too_short", B_SHORT, "rank 2 has sent"},
    {"slow", B_SLOW, NULL},
    {"frame_repeated", B_AGAIN, "rank 2 is cut off: its messages"},
    {"tag_wrong", B_TAG, "rank 2 is cut off: its messages"},
};

static void misbehave(setup *s, int kind) {
    static unsigned char out[HEADER + 300 + MIB];
    unsigned char number_8[8] = {255, 255, 255, 255, 0, 0, 0, 0};
    char text[16], text_159[12 + 159];
    size_t size;
    wire w;
    int op;
    raw_member(&w, s, 2, 3);
    while ((op = wire_frame(&w, text, sizeof text, NULL)) != OP_JOINED) CHECK(op);
    await_flag(&s->flags[0], 2);
    for (size_t i = 0; i < 64; i++) out[i] = (unsigned char)(i * 37);
    switch (kind) {
    case B_GARBAGE: raw_send(w.fd, out, 64); break;
    case B_OPS: wire_send(&w, OP_CLOSING, NULL, NULL, 0); break;
    case B_LENGTH: raw_send(w.fd, out, header(out, OP_SET, 1, 1, 16 * MIB + TAG + 1)); break;
    case B_KEY: raw_send(w.fd, out, header(out, OP_SET, 1, 257, 1)); break;
    case B_HALF:
        size = seal(&w, out, frame(out, OP_SET, 1, "key", "value", 5));
        raw_send(w.fd, out, size - 2), reset_close(w.fd);
        break;
    case B_SHORT: wire_send(&w, OP_GET, "key", "\1\2\3", 3); break;
    case B_DEAF: /* asks 200 times for a value of 1 MiB */
        raw_send(w.fd, out, seal(&w, out, frame(out, OP_SET, 1, "big", out + HEADER + 3, MIB)));
        for (uint32_t i = 0; i < 200; i++) wire_send(&w, OP_GET, "big", number_8, 8);
        break;
    case B_GREEDY:
        memset(text_159, 't', sizeof text_159); /* requests have long answers */
        memset(text_159, 0, 12);
        wire_send(&w, OP_BEAT, NULL, text_159, sizeof text_159);
        for (size_t i = 0, at = 0; i<400000; i++, at = at> MIB - 100 ? 0 : at) {
            at += seal(&w, out + at, frame(out + at, OP_ASK, 1, NULL, "\2\0\0", 4));
            if (at > MIB - 100) raw_send(w.fd, out, at);
        }
        break;
    case B_SLOW:
        size = seal(&w, out, frame(out, OP_SET, 1, "slow", "x", 1));
        for (size_t i = 0; i < size; i++) raw_send(w.fd, out + i, 1), usleep(2000);
        break;
    case B_AGAIN: /* as an attacker in between could do */
        size = seal(&w, out, frame(out, OP_SET, 1, "key", "value", 5));
        raw_send(w.fd, out, size), raw_send(w.fd, out, size);
        break;
    case B_TAG:
        size = seal(&w, out, frame(out, OP_SET, 1, "key", "value", 5));
        out[size - 1] ^= 1;
        raw_send(w.fd, out, size);
        break;
    default: break;
    }
    await_flag(&s->flags[1], 2);
    if (kind != B_HALF) close(w.fd);
}

static void with_bad_member(int rank, int world, void *arg) {
    setup *s = (setup *)arg, mine = *s;
    const badness *b = (const badness *)s->extra;
    client c;
    tide t;
    (void)world;
    if (rank == 2) {
        misbehave(s, b->kind);
        return;
    }
    tide_use(&t, &mine);
    enter(&c, &mine, rank);
    raise_flag(&s->flags[0]);
    int64_t start = h_calm_ms();
    if (b->says) {
        s->failures[rank] = await_failure(&c, 20000);
        CHECK_EQ_INT(s->failures[rank].status,
                     strstr(b->says, "cut off") ? FSDP_ERR_IO : FSDP_ERR_PEER_LOST);
        says(s->failures[rank].reason, b->says);
    } else {
        for (int i = 0; i < 50; i++) {
            start = h_calm_ms();
            put(&c, rank ? "a" : "b", "1", 1), get_text(&c, rank ? "b" : "a", "1");
            within(start, 1500);
        }
        if (b->kind == B_SLOW) get_text(&c, "slow", "x");
        no_failure(&c);
    }
    long long peak = (long long)__atomic_load_n(&t.peak, __ATOMIC_SEQ_CST);
    CHECK_MSG(peak < 150 * (long long)MIB, "%lld bytes", peak);
    raise_flag(&s->flags[1]);
    await_flag(&s->flags[1], 2);
    fsdpi_store_close(c.store);
    CHECK_EQ_INT(t.heap.live, 0);
}
TEST_P(store_untrusted, bad_member, bad_members, SLOW) {
    setup *s = make_setup(AT_IPV4, 3, 0, 20000);
    if (W_SLOW && row->kind == B_GREEDY) SKIP("half a minute with a sanitizer");
    s->extra = row;
    run(s, with_bad_member);
}

/* Several threads of a rank ask for much data at a time, which is allowed. Less with a sanitizer.
   */
enum { MUCH = (W_SLOW ? 2 : 16) * MIB };
static void *get_much(void *arg) {
    client *c = (client *)arg;
    size_t size = 0;
    void *to = malloc(MUCH);
    CHECK(to != NULL);
    fsdp_status status = try_get(c, "much", to, MUCH, &size, 100000);
    CHECK_MSG(!status, "%s", fsdp_status_name(status));
    CHECK_EQ_INT(size, MUCH);
    free(to);
    return NULL;
}
TEST(store_keys, large_values_at_the_same_time, SECONDS(120) | SLOW) {
    setup *s = make_setup(AT_HOST, 1, 0, 100000);
    pthread_t thread[5];
    client c;
    void *value = calloc(1, MUCH);
    CHECK(value != NULL);
    enter(&c, s, 0);
    put(&c, "much", value, MUCH);
    for (int i = 0; i < 5; i++) CHECK_EQ_INT(pthread_create(&thread[i], NULL, get_much, &c), 0);
    for (int i = 0; i < 5; i++) pthread_join(thread[i], NULL);
    no_failure(&c);
    fsdpi_store_close(c.store);
    free(value);
}

/* ---- nothing is left ------------------------------------------------------------------------- */

static void cycle(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    enter(&c, s, rank);
    exchange(&c, world, "a");
    leave(&c, s, world);
}
static const where cycles[] = {{"host", AT_HOST, 0}, {"tcp", AT_IPV4, 0}};
static const where more_cycles[] = {{"file", AT_FILE, 0}};
static void hundred_times(int at) {
    int cycles_now = W_SLOW ? 20 : 100;
    setup *s = make_setup(at, 3, 1, 20000);
    int fds = 0;
    tide t;
    tide_use(&t, s);
    for (int i = 0; i <= cycles_now; i++) {
        run(s, cycle);
        if (i == 0) fds = count_fds();
        CHECK_EQ_INT(t.heap.live, 0);
        CHECK_EQ_INT(t.heap.live_bytes, 0);
    }
    CHECK_EQ_INT(count_fds(), fds);
    no_threads();
}

TEST_P(store_leaks, hundred_times_open_and_close, cycles) { hundred_times(row->at); }
TEST_P(long_store, hundred_times_open_and_close, more_cycles, NIGHT) { hundred_times(row->at); }

/* One allocation after the other fails, once or from then on: calls end without leaks. */
static fsdp_status life(setup *s) {
    client c;
    char text[8];
    size_t size;
    fsdpi_peer p;
    fsdp_status status = open_as(&c, s, 0, 1), seen;
    if (status) return status;
    status = fsdpi_store_set(c.store, "a", "1", 1);
    seen = try_get(&c, "a", text, 8, &size, 100);
    if (!status) status = seen;
    seen = fsdpi_store_ask(c.store, 0, &p, 100 * MS);
    if (!status) status = seen;
    fsdpi_store_abort(c.store, FSDP_ERR_ABORTED, "a", "b");
    if (!fsdpi_store_failure(c.store, &s->failures[0])) status = FSDP_ERR_INTERNAL;
    fsdpi_store_close(c.store);
    return status;
}
static const struct {
    const char *name;
    int at, persistent;
} failing[] = {{"host", AT_HOST, 0}, {"tcp", AT_IPV4, 0}, {"file", AT_FILE, 0}},
  failing_for_good[] = {{"host", AT_HOST, 1}, {"tcp", AT_IPV4, 1}};
static void every_allocation_fails(int at, int persistent) {
    int fds = 0, n = 0;
    for (int injected = 1; injected; n++) {
        setup *s = make_setup(at, 1, 1, 1000);
        tide t;
        tide_use(&t, s);
        t.heap.fail_at = n, t.heap.persistent = persistent;
        int64_t start = h_calm_ms();
        fsdp_status status = life(s);
        injected = t.heap.failures > 0;
        within(start, 1600);
        CHECK_EQ_INT(t.heap.live, 0);
        CHECK_MSG(injected || !status, "%s", fsdp_status_name(status));
        CHECK_MSG(status == FSDP_OK || status == FSDP_ERR_OUT_OF_MEMORY ||
                      status == FSDP_ERR_PEER_LOST || status == FSDP_ERR_TIMEOUT,
                  "allocation %d: %s", n, fsdp_status_name(status));
        if (n == 0) fds = count_fds();
        CHECK_EQ_INT(count_fds(), fds);
        no_threads();
        munmap(s, sizeof *s);
        CHECK(n < 300);
    }
    h_message("%d allocations", n - 1);
}
TEST_P(store_leaks, every_allocation_fails, failing) {
    every_allocation_fails(row->at, row->persistent);
}
TEST_P(long_store, every_allocation_fails_for_good, failing_for_good, NIGHT) {
    every_allocation_fails(row->at, row->persistent);
}

/* ---- the machine ----------------------------------------------------------------------------- */

/* Signals interrupt every call in the caller's thread; the store's threads get none. */
static pthread_t signals_for;
static int stray_signals;
static void on_alarm(int sig) {
    (void)sig;
    if (!pthread_equal(pthread_self(), signals_for))
        __atomic_add_fetch(&stray_signals, 1, __ATOMIC_SEQ_CST);
}

static void interrupted(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    struct sigaction action;
    struct itimerval t = {{0, 500}, {0, 500}};
    client c;
    memset(&action, 0, sizeof action);
    action.sa_handler = on_alarm; /* without SA_RESTART */
    signals_for = pthread_self();
    CHECK(!sigaction(SIGALRM, &action, NULL) && !setitimer(ITIMER_REAL, &t, NULL));
    if (rank == world - 1)
        for (int64_t start = h_now_ms(); h_now_ms() - start < 60;) usleep(1000);
    enter(&c, s, rank);
    for (int i = 0; i < 30; i++) {
        char what[16];
        snprintf(what, sizeof what, "%d", i);
        exchange(&c, world, what);
    }
    no_failure(&c);
    leave(&c, s, world);
    memset(&t, 0, sizeof t);
    CHECK(!setitimer(ITIMER_REAL, &t, NULL));
    CHECK_EQ_INT(stray_signals, 0);
}
TEST(store_machine, signals) {
    run(make_setup(AT_HOST, 3, 0, 20000), interrupted);
    run(make_setup(AT_IPV4, 3, 0, 20000), interrupted);
}

/* An attacker takes all descriptors of the server's process. Ranks that have joined continue, and a
   late rank joins as soon as a descriptor is free. */
static void few_descriptors(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    client c;
    if (rank == 2) await_flag(&s->flags[0], 1);
    if (rank == world - 1) { /* the attacker */
        int fd[60];
        await_flag(s->joined, 2); /* ranks 0 and 1 */
        for (int i = 0; i < 60; i++) fd[i] = raw_connect(s->port);
        raise_flag(&s->flags[0]);
        await_flag(&s->flags[1], 1);
        for (int i = 0; i < 60; i++) close(fd[i]);
        return;
    }
    if (rank == 0) {
        struct rlimit files;
        CHECK(!getrlimit(RLIMIT_NOFILE, &files));
        files.rlim_cur = (rlim_t)count_fds() + 12; /* two for a rank itself, one for each rank */
        CHECK(!setrlimit(RLIMIT_NOFILE, &files));
        raise_flag(&s->flags[0]);
    }
    if (rank == 2) await_flag(&s->flags[0], 2);
    setup mine = *s;
    mine.world = 3;
    int64_t start = h_calm_ms();
    enter(&c, &mine, rank);
    if (rank == 2)
        h_message("in after %lld ms", (long long)(h_calm_ms() - start)), within(start, 4000);
    exchange(&c, 3, "a");
    no_failure(&c);
    if (rank == 2) raise_flag(&s->flags[1]);
    leave(&c, s, 3);
}
TEST(store_machine, few_descriptors) { run(make_setup(AT_IPV4, 4, 0, 8000), few_descriptors); }

/* Deadlines use the clock of the desc. */
static int64_t jump_ns;
static int64_t jumping_clock(void *user) {
    return fsdpi_monotonic_ns(user) + __atomic_load_n(&jump_ns, __ATOMIC_SEQ_CST);
}
static void *open_by_clock(void *arg) {
    setup *s = (setup *)arg;
    fsdpi_store_desc d = make_desc(s, 0, 2);
    fsdpi_store *store;
    char error[600];
    client c;
    memset(&c, 0, sizeof c);
    c.joined = s->joined;
    d.boot.clock.now_ns = jumping_clock;
    d.beat = on_beat, d.user = &c;
    CHECK_STATUS(fsdpi_store_open(&d, &store, error, sizeof error), FSDP_ERR_TIMEOUT);
    return NULL;
}
TEST(store_machine, clock_of_the_desc) {
    setup *s = make_setup(AT_HOST, 2, 1, 3600 * 1000);
    pthread_t thread;
    CHECK_EQ_INT(pthread_create(&thread, NULL, open_by_clock, s), 0);
    await_flag(s->joined, 1); /* its deadline is running */
    int64_t start = h_calm_ms();
    __atomic_store_n(&jump_ns, 7200 * 1000 * MS, __ATOMIC_SEQ_CST); /* two hours later */
    pthread_join(thread, NULL);
    within(start, 1500);
}

/* A program opens one world after another at a launcher's store: ranks are not in step. */
static void worlds_in_a_row(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    for (int i = 0; i < 10; i++) {
        char what[16];
        client c;
        if (rank == i % world) usleep(3000);
        enter(&c, s, rank);
        snprintf(what, sizeof what, "%d", i);
        exchange(&c, world, what);
        size_t size;
        char text[8]; /* nothing is left of earlier worlds */
        snprintf(what, sizeof what, "%d/%d", i - 1, rank);
        CHECK_STATUS(try_get(&c, what, text, 8, &size, 1), FSDP_ERR_TIMEOUT);
        fsdpi_store_close(c.store);
    }
}
TEST(store_launcher, worlds_in_a_row) {
    setup *s = make_setup(AT_IPV4, 3, 0, 10000);
    pid_t pid = aside(serves_aside, s);
    run(s, worlds_in_a_row);
    aside_ends(s, pid);
}
/* Rank 0 serves a new store for each world, on one port. */
static void worlds_of_rank_0(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    for (int i = 0; i < 8; i++) {
        char what[16];
        client c;
        enter(&c, s, rank);
        snprintf(what, sizeof what, "%d", i);
        exchange(&c, world, what);
        raise_flag(&s->flags[i]);
        await_flag(&s->flags[i], world);
        if (rank == i % world) usleep(3000);
        fsdpi_store_close(c.store);
    }
}
static const where rows_of_worlds[] = {
    {"host/threads", AT_HOST, 1}, {"tcp", AT_IPV4, 0}, {"file", AT_FILE, 0}};
TEST_P(store_open, worlds_in_a_row, rows_of_worlds) {
    run(make_setup(row->at, 3, row->threads, 10000), worlds_of_rank_0);
}

/* A rank is killed while it sends or receives a large value. */
static void *move_much(void *arg) {
    client *c = (client *)arg;
    size_t size;
    void *value = calloc(1, 16 * MIB);
    CHECK(value != NULL);
    for (;;) {
        if (fsdpi_store_set(c->store, "much", value, 16 * MIB)) return NULL;
        if (try_get(c, "much", value, 16 * MIB, &size, 20000)) return NULL;
    }
}
static void dies_inside(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    pthread_t thread;
    client c;
    enter(&c, s, rank);
    exchange(&c, world, "a");
    gather_at(s, 0);
    if (rank == 1) {
        CHECK_EQ_INT(pthread_create(&thread, NULL, move_much, &c), 0);
        usleep((useconds_t) * (const int *)s->extra);
        s->when = h_calm_ms();
        h_die(SIGKILL);
    }
    s->failures[rank] = await_failure(&c, 20000);
    within(s->when, 1000);
    CHECK_EQ_INT(s->failures[rank].status, FSDP_ERR_PEER_LOST);
    says(s->failures[rank].reason, "rank 1 has died");
    usleep(10000);
    fsdpi_store_close(c.store);
}
TEST(store_lost, in_the_middle_of_a_value) {
    for (int i = 0; i < 3; i++) {
        setup *s = make_setup(i & 1 ? AT_HOST : AT_IPV4, 3, 0, 20000);
        int us = 1000 + 11000 * i;
        s->extra = &us;
        run(s, dies_inside);
        same_failures(s, 1);
    }
}

/* Returns 1 if a text lists the rank as missing. */
static int names_rank(const char *text, int rank) {
    const char *list = strstr(text, "ranks ");
    char one[16], each[2][16];
    snprintf(one, sizeof one, "rank %d", rank);
    snprintf(each[0], sizeof each[0], " %d,", rank);
    snprintf(each[1], sizeof each[1], " %d have", rank);
    return strcasestr(text, one) || (list && (strstr(list, each[0]) || strstr(list, each[1])));
}

/* Kills any rank at any moment from the start of open on. Every rank that had joined gets the
   failure within a second; a rank that had not says which rank it waits for. */
static void dies_any_time(int rank, int world, void *arg) {
    setup *s = (setup *)arg;
    const int *when = (const int *)s->extra; /* delay in us, victim */
    client c;
    if (rank == when[1]) {
        struct itimerval t;
        memset(&t, 0, sizeof t);
        t.it_value.tv_usec = when[0];
        h_shared->state[rank + 1] = H_DIES;
        signal(SIGALRM, SIG_DFL);
        setitimer(ITIMER_REAL, &t, NULL);
    }
    fsdp_status status = open_as(&c, s, rank, world);
    if (status) {
        CHECK_MSG(status == FSDP_ERR_PEER_LOST || status == FSDP_ERR_TIMEOUT, "%s",
                  fsdp_status_name(status));
        if (!strcasestr(c.error, "rank 0 has to run")) /* rank 0 has already given up */
            CHECK_MSG(names_rank(c.error, when[1]), "\"%s\", killed: %d", c.error, when[1]);
        s->flags[2 + (status == FSDP_ERR_TIMEOUT)]++;
        return;
    }
    for (;;) { /* until a call fails */
        char key[16], text[16];
        size_t size;
        snprintf(key, sizeof key, "%d", rank);
        status = fsdpi_store_set(c.store, key, "12345678", 8);
        snprintf(key, sizeof key, "%d", (rank + 1) % world);
        if (!status) status = try_get(&c, key, text, 16, &size, 20000);
        if (status) break;
    }
    CHECK_STATUS(status, FSDP_ERR_PEER_LOST);
    s->failures[rank] = await_failure(&c, 0);
    CHECK_EQ_INT(s->failures[rank].lost, when[1]);
    s->flags[1]++;
    usleep(20000);
    fsdpi_store_close(c.store);
}
static void kill_points(int count, uint64_t seed) {
    int inside = 0, lost = 0, late = 0;
    for (int i = 0; i < count; i++) {
        setup *s = make_setup(i % 3 ? AT_IPV4 : AT_HOST, 4, 0, 600);
        int when[2];
        when[0] = 300 + (int)(h_rand64(&seed) % 30000), when[1] = (int)(h_rand64(&seed) % 4);
        s->extra = when;
        int64_t start = h_calm_ms();
        run(s, dies_any_time);
        within(start, 600 + 1000);
        inside += s->flags[1], lost += s->flags[2], late += s->flags[3];
        munmap(s, sizeof *s);
    }
    h_message("%d kills: %d ranks heard of it at work, %d while they waited for others, %d waited "
              "to the end; 0 hangs, 0 without a name",
              count, inside, lost, late);
}
TEST(store_lost, kill_points, SECONDS(60)) { kill_points(6, h_seed()); }
TEST(long_store, kill_points, SECONDS(900) | NIGHT) {
    kill_points(W_SLOW ? 75 : 150, h_seed() + 4711);
}

/* ---- the server's core, without sockets ------------------------------------------------------ */
/* Connections open and close in any order. They send random bytes, or valid frames that are then
   damaged, in pieces of any size. One good client, rank 0, stays connected: its answers must be
   right. The core may write only frames that a server may send. */

enum { F_CONNS = 12, F_SIZE = 4, F_KEYS = 6, F_PENDING = 1 << 17 };

typedef struct {
    fsdpi_conn *conn;
    unsigned char nonce[32];
    wire w; /* keys, once PROVE is sent */
    int hello_sent, proven, joined, failures, closing, ended;
    size_t in_at, in_size, out_size;
    /* in: frames to feed in pieces; out: an unfinished frame of the core */
    unsigned char *in, *out;
} fuzz_conn;

typedef struct {
    fsdpi_store_core core;
    w_heap heap;
    uint64_t seed;
    int64_t now;
    uint8_t token[32];
    fuzz_conn conns[F_CONNS]; /* [0] is the good client */
    char model[F_KEYS][40];   /* values that it has set; "": none */
    int asked;                /* key of its outstanding GET, or -1 */
    uint32_t asked_id, next_id;
    int64_t fed, frames, joins, failures, answers;
} fuzz;

static uint64_t dice(fuzz *f, uint64_t sides) { return h_rand64(&f->seed) % sides; }

static void fuzz_connect(fuzz *f, fuzz_conn *c) {
    unsigned char *in = c->in, *out = c->out;
    memset(c, 0, sizeof *c);
    c->in = in, c->out = out;
    for (int i = 0; i < 32; i += 8) number(c->nonce + i, h_rand64(&f->seed), 8);
    c->conn = fsdpi_store_core_connect(&f->core, c->nonce, f->now);
    CHECK(c->conn || f->heap.failures);
}

static void fuzz_queue(fuzz_conn *c, const unsigned char *bytes, size_t size) {
    if (c->in_at == c->in_size) c->in_at = c->in_size = 0;
    if (c->in_size + size > F_PENDING) return;
    memcpy(c->in + c->in_size, bytes, size);
    c->in_size += size;
}

/* Sends the first message, with the right token or a wrong one. */
static void fuzz_prove(fuzz *f, fuzz_conn *c, const uint8_t token[32]) {
    unsigned char mine[NONCE], bytes[HEADER + PROVE_BYTES];
    for (int i = 0; i < NONCE; i += 8) number(mine + i, h_rand64(&f->seed), 8);
    size_t size = prove(&c->w, bytes, token, c->nonce, mine);
    fuzz_queue(c, bytes, size);
}

/* Checks a reply to the good client. */
static void fuzz_answer(fuzz *f, int flags, uint32_t id, const unsigned char *value, size_t size) {
    if (f->asked < 0 || id != f->asked_id) return; /* reply to another request */
    const char *expected = f->model[f->asked];
    CHECK_EQ_INT(flags, FSDP_OK);
    CHECK_EQ_INT(size, strlen(expected));
    CHECK_EQ_MEM(value, expected, size);
    f->asked = -1;
    f->answers++;
}

/* Checks one whole frame of the core. */
static void fuzz_frame(fuzz *f, fuzz_conn *c, const unsigned char *at, size_t size) {
    int op = (int)number_at(at + 4, 2), flags = (int)number_at(at + 6, 2);
    uint32_t id = (uint32_t)number_at(at + 8, 4);
    const unsigned char *value = at + HEADER;
    unsigned char *whole = (unsigned char *)malloc(HEADER + size);
    uint8_t tag[32];
    CHECK(whole != NULL);
    if (op != OP_CHALLENGE && !(op == OP_REFUSED && !c->proven)) { /* all others have a tag */
        CHECK(size >= TAG && c->w.sealed);
        size -= TAG;
        memcpy(whole, at, HEADER + size), number(whole + 16, size, 8);
        tag_of(c->w.key_in, c->w.in++, whole, HEADER + size, tag);
        CHECK_EQ_MEM(tag, value + size, TAG);
    }
    free(whole);
    f->frames++;
    CHECK(!c->ended); /* nothing follows a frame that ends a connection */
    CHECK_EQ_INT(number_at(at + 12, 4), 0);
    switch (op) {
    case OP_CHALLENGE:
        CHECK_EQ_INT(id, 2);
        CHECK_EQ_INT(size, 32), CHECK_EQ_MEM(value, c->nonce, 32);
        break;
    case OP_PROVEN: CHECK(!c->proven++ && !c->joined && size == 0); break;
    case OP_REPLY:
        CHECK(c->hello_sent && flags <= FSDP_ERR_INTERNAL);
        if (!c->joined) CHECK_EQ_INT(size, 4), f->joins++;
        c->joined = 1;
        if (c == &f->conns[0] && id) fuzz_answer(f, flags, id, value, size);
        break;
    case OP_REFUSED:
        CHECK_MSG(!c->joined && (c->hello_sent || c->w.sealed) && size,
                  "joined %d, hello %d, flags %d, %zu bytes", c->joined, c->hello_sent, flags,
                  size);
        c->ended = 1;
        break;
    case OP_JOINED: CHECK(c->joined); break;
    case OP_LEFT: CHECK(c->joined && size == 4 && number_at(value, 4) < F_SIZE); break;
    case OP_FAILURE: {
        int32_t status = (int32_t)number_at(value, 4), rank = (int32_t)number_at(value + 4, 4);
        CHECK(size >= 13 && size <= 12 + 192 + 800 && memchr(value + 12, 0, size - 12));
        CHECK(status > 0 && status <= FSDP_ERR_INTERNAL && rank >= -1 && rank < F_SIZE);
        CHECK(c->hello_sent && !c->failures++);
        if (!c->joined) c->ended = 1;
        f->failures++;
        break;
    }
    case OP_CLOSING: c->closing = c->ended = 1; break;
    default: CHECK_MSG(0, "the server has sent op %d", op);
    }
}

/* Takes some of the core's output, and cuts it into frames. */
static void fuzz_drain(fuzz *f, fuzz_conn *c, size_t most) {
    __typeof__(c->conn->out) *out = &c->conn->out;
    while (out->begin < out->end && most) {
        size_t take = out->end - out->begin, room = F_PENDING - c->out_size;
        if (take > most) take = most;
        if (take > room) take = room;
        memcpy(c->out + c->out_size, out->block + out->begin, take);
        fsdpi_queue_drop(&f->core.allocator, out, take);
        c->out_size += take, most -= take;
        size_t at = 0;
        while (c->out_size - at >= HEADER) {
            CHECK(!memcmp(c->out + at, "FKV1", 4));
            uint64_t size = number_at(c->out + at + 16, 8);
            CHECK_MSG(size <= F_PENDING - HEADER, "a frame of %llu bytes",
                      (unsigned long long)size);
            if (c->out_size - at < HEADER + size) break;
            fuzz_frame(f, c, c->out + at, (size_t)size);
            at += HEADER + (size_t)size;
        }
        memmove(c->out, c->out + at, c->out_size - at);
        c->out_size -= at;
    }
}

static void fuzz_part(fuzz *f, fuzz_conn *c) {
    fsdpi_store_core_disconnect(&f->core, c->conn, f->now);
    c->conn = NULL;
}

/* Removes broken connections, as the server does. The good client is never among them. */
static void fuzz_sweep(fuzz *f) {
    for (int i = 0; i < F_CONNS; i++) {
        fuzz_conn *c = &f->conns[i];
        if (!c->conn || c->conn->state != FSDPI_CONN_BROKEN) continue;
        CHECK_MSG(i, "the good client was dropped: %s", c->conn->why ? c->conn->why : "?");
        fuzz_part(f, c);
    }
}

static const char *const fuzz_keys[] = {"a",   "b",      "",
                                        "k/1", "rank_0", "zzzzzzzzzzzzzzzzzzzzzzzzzzz"};

/* Writes a valid frame of a client, of any op. */
static size_t fuzz_valid(fuzz *f, unsigned char *to) {
    static unsigned char value[70000];
    static const size_t least[] = {0, 0, 0, 0, 0, 0, 8, 0, 12, 4, 12, 0};
    static const int ops[] = {OP_SET, OP_SET, OP_GET, OP_GET, OP_DELETE, OP_BEAT, OP_ASK};
    int op = dice(f, 30) ? ops[dice(f, 7)] : dice(f, 2) ? OP_ABORT : OP_BYE; /* BYE is rare */
    size_t size = least[op] + dice(f, dice(f, 60) ? 60 : 60000);
    int keyed = op == OP_SET || op == OP_GET || op == OP_DELETE;
    for (size_t i = 0; i < size && i < 400; i++)
        value[i] = (unsigned char)dice(f, dice(f, 2) ? 256 : 5);
    if (op == OP_GET)
        size = 8, number(value, dice(f, 2) ? dice(f, 1000) * (uint64_t)MS : h_rand64(&f->seed), 8);
    if (op == OP_ASK && dice(f, 4)) number(value, dice(f, F_SIZE), 4);
    return frame(to, op, (uint32_t)dice(f, 1000), keyed ? fuzz_keys[dice(f, 6)] : NULL, value,
                 size);
}

static size_t fuzz_hello(fuzz *f, unsigned char *to) {
    int rank = (int)(dice(f, 30) ? 1 + dice(f, F_SIZE - 1) : h_rand64(&f->seed));
    int size = (int)(dice(f, 200) ? F_SIZE : h_rand64(&f->seed));
    uint64_t timeout = dice(f, 20) ? 3000 * (uint64_t)MS : h_rand64(&f->seed);
    uint64_t left = dice(f, 20) ? 2000 * (uint64_t)MS : h_rand64(&f->seed);
    return hello(to, rank, size, timeout, left);
}

/* Damages a frame as a client that knows the token could: any content, but the right size. */
static void fuzz_bend(fuzz *f, unsigned char *bytes, size_t size) {
    for (uint64_t k = 1 + dice(f, 4); k--;) {
        size_t at = dice(f, dice(f, 2) && size > HEADER ? HEADER : size);
        if (at >= 12 && at < HEADER && size > HEADER) at = HEADER + dice(f, size - HEADER);
        if (at < 4 || (at >= 12 && at < HEADER)) continue;
        bytes[at] = (unsigned char)(dice(f, 2) ? h_rand64(&f->seed) : dice(f, 2) ? 255 : 0);
    }
}

static void fuzz_damage(fuzz *f, unsigned char *bytes, size_t *size) {
    for (uint64_t k = 1 + dice(f, 4); k--;) {
        size_t at = dice(f, dice(f, 2) && *size > HEADER ? HEADER : *size);
        switch (dice(f, 5)) {
        case 0: bytes[at] ^= (unsigned char)(1 << dice(f, 8)); break;
        case 1: bytes[at] = (unsigned char)h_rand64(&f->seed); break;
        case 2: bytes[at] = dice(f, 2) ? 255 : 0; break;
        case 3: *size = at + 1; break;
        default: memmove(bytes + at, bytes + at + 1, --*size - at), *size += !*size; break;
        }
    }
}

static void fuzz_hostile_input(fuzz *f, fuzz_conn *c) {
    static unsigned char bytes[HEADER + 256 + 70000 + TAG];
    size_t size = 0;
    if (!c->w.sealed && dice(f, 8)) {
        uint8_t wrong[32] = {1};
        fuzz_prove(f, c, dice(f, 12) ? f->token : wrong);
        return;
    }
    if (!dice(f, 40)) { /* random bytes */
        size = 1 + dice(f, 200);
        for (size_t i = 0; i < size; i++) bytes[i] = (unsigned char)h_rand64(&f->seed);
        c->hello_sent = 1;
    } else {
        size = !c->hello_sent && dice(f, 8) ? fuzz_hello(f, bytes) : fuzz_valid(f, bytes);
        c->hello_sent = 1; /* a damaged frame may be a HELLO */
        if (!dice(f, 12)) fuzz_bend(f, bytes, size);
        size = seal(&c->w, bytes, size);
        if (!dice(f, 25)) fuzz_damage(f, bytes, &size);
    }
    fuzz_queue(c, bytes, size);
}

/* Sets, deletes or gets one of the good client's keys, which no other client uses. */
static void fuzz_good_input(fuzz *f, fuzz_conn *c) {
    unsigned char bytes[HEADER + 256 + 64 + TAG], timeout[8];
    size_t size = 0;
    char key[16];
    int k = (int)dice(f, F_KEYS);
    uint32_t id = ++f->next_id;
    snprintf(key, sizeof key, "good/%d", k);
    number(timeout, 1000 * (uint64_t)MS, 8);
    if (f->asked >= 0) return;
    if (dice(f, 2) && f->model[k][0]) {
        f->asked = k, f->asked_id = id;
        size = frame(bytes, OP_GET, id, key, timeout, 8);
    } else if (dice(f, 4)) {
        snprintf(f->model[k], sizeof f->model[k], "%016llx",
                 (unsigned long long)h_rand64(&f->seed));
        size = frame(bytes, OP_SET, id, key, f->model[k], strlen(f->model[k]));
    } else {
        f->model[k][0] = 0;
        size = frame(bytes, OP_DELETE, id, key, NULL, 0);
    }
    fuzz_queue(c, bytes, seal(&c->w, bytes, size));
}

static void fuzz_feed(fuzz *f, fuzz_conn *c) {
    size_t size = c->in_size - c->in_at,
           piece = dice(f, 3) ? size : 1 + dice(f, dice(f, 2) ? 8 : 64);
    if (piece > size) piece = size;
    if (piece > FSDPI_STORE_READ) piece = FSDPI_STORE_READ;
    if (!piece) return;
    /* A separate block, so that a read after its end is detected. */
    char *block = (char *)malloc(piece);
    CHECK(block != NULL);
    memcpy(block, c->in + c->in_at, piece);
    fsdpi_store_core_feed(&f->core, c->conn, block, piece, f->now);
    free(block);
    c->in_at += piece;
    f->fed++;
}

/* Checks the invariants. */
static void fuzz_check(const fuzz *f) {
    const fsdpi_store_core *core = &f->core;
    size_t total = 0, most = 0;
    int waits = 0, counted = 0, conns = 0, joined = 0;
    for (int i = 0; i < FSDPI_STORE_BUCKETS; i++)
        for (const fsdpi_store_entry *e = core->entries[i]; e; e = e->next) {
            CHECK_EQ_INT(e->bytes, sizeof *e + strlen(e->key) + 1 + e->value_size);
            total += e->bytes;
        }
    CHECK_EQ_INT(total, core->total);
    for (const fsdpi_store_wait *w = core->waits; w; w = w->next) waits++;
    for (const fsdpi_conn *c = core->conns; c; c = c->next) {
        conns++, counted += c->waits, joined += c->state == FSDPI_CONN_RANK;
        CHECK(c->waits >= 0 && c->waits <= FSDPI_STORE_WAITS_MAX);
        CHECK((c->rank >= 0) <= (c->state == FSDPI_CONN_RANK || c->state == FSDPI_CONN_BROKEN));
        if (c->state < FSDPI_CONN_RANK) CHECK(c->in.cap <= 512 && c->out.cap <= 512 && !c->waits);
        most += c->in.cap + c->out.cap + 1024 + (size_t)c->waits * 512;
    }
    CHECK_EQ_INT(waits, counted);
    CHECK_EQ_INT(conns, core->num_conns);
    CHECK(joined <= F_SIZE);
    CHECK_MSG((size_t)f->heap.live_bytes < most + total + 64 * 1024, "%lld bytes for %zu and %zu",
              (long long)f->heap.live_bytes, most, total);
}

static void fuzz_begin(fuzz *f, uint64_t seed) {
    fsdp_allocator a;
    unsigned char bytes[HEADER + HELLO_BYTES + TAG];
    static unsigned char pending[2 * F_CONNS][F_PENDING];
    memset(f, 0, sizeof *f);
    for (int i = 0; i < F_CONNS; i++)
        f->conns[i].in = pending[2 * i], f->conns[i].out = pending[2 * i + 1];
    f->seed = seed, f->asked = -1, f->now = 1000 * MS, f->heap.fail_at = -1;
    a.alloc = w_heap_alloc, a.free = w_heap_free, a.user = &f->heap;
    for (int i = 0; i < 32; i++) f->token[i] = (uint8_t)h_rand64(&f->seed);
    CHECK(fsdpi_store_core_open(&f->core, &a, F_SIZE, 0, f->token));
    fuzz_connect(f, &f->conns[0]);
    fuzz_prove(f, &f->conns[0], f->token);
    while (f->conns[0].in_at < f->conns[0].in_size) fuzz_feed(f, &f->conns[0]);
    fuzz_queue(&f->conns[0], bytes,
               seal(&f->conns[0].w, bytes, hello(bytes, 0, F_SIZE, 2000 * MS, 2000 * MS)));
    f->conns[0].hello_sent = 1;
    while (f->conns[0].in_at < f->conns[0].in_size) fuzz_feed(f, &f->conns[0]);
    CHECK_EQ_INT(f->conns[0].conn->state, FSDPI_CONN_RANK);
}

static void fuzz_step(fuzz *f) {
    int i = (int)dice(f, F_CONNS);
    fuzz_conn *c = &f->conns[i];
    f->now += (int64_t)dice(f, 20) * MS;
    if (!dice(f, 10)) (void)fsdpi_store_core_expire(&f->core, f->now);
    if (!dice(f, 200)) fsdpi_store_core_evict(&f->core);
    if (!c->conn) {
        fuzz_connect(f, c);
    } else if (i && !dice(f, 60)) {
        fuzz_part(f, c);
    } else {
        if (c->in_at == c->in_size && i) fuzz_hostile_input(f, c);
        if (c->in_at == c->in_size && !i) fuzz_good_input(f, c);
        fuzz_feed(f, c);
        if (i == 0 || dice(f, 3)) fuzz_drain(f, c, i == 0 || dice(f, 2) ? SIZE_MAX : dice(f, 40));
    }
    fuzz_sweep(f);
}

/* Runs one world after another until `inputs` inputs were fed. */
static void fuzz_inputs(int64_t inputs, uint64_t seed) {
    fuzz *f = (fuzz *)malloc(sizeof *f);
    int64_t fed = 0, frames = 0, joins = 0, failures = 0, answers = 0, worlds = 0;
    CHECK(f != NULL);
    for (; fed < inputs; worlds++) {
        fuzz_begin(f, seed + (uint64_t)worlds * 77);
        snprintf(w_case, sizeof w_case, "world %lld", (long long)worlds);
        while (f->fed < 250) {
            fuzz_step(f);
            if (!dice(f, 50)) fuzz_check(f);
        }
        if (dice(f, 2)) {
            fsdpi_store_core_say_closing(&f->core, f->now);
            for (int i = 0; i < F_CONNS; i++)
                if (f->conns[i].conn && f->conns[i].conn->state != FSDPI_CONN_BROKEN)
                    fuzz_drain(f, &f->conns[i], SIZE_MAX);
            CHECK(f->conns[0].closing);
        }
        fsdpi_store_core_close(&f->core);
        CHECK_EQ_INT(f->heap.live, 0);
        fed += f->fed, frames += f->frames, joins += f->joins, failures += f->failures,
            answers += f->answers;
    }
    h_message(
        "%lld inputs in %lld worlds: %lld frames came back, %lld joins, %lld failures, %lld values",
        (long long)fed, (long long)worlds, (long long)frames, (long long)joins, (long long)failures,
        (long long)answers);
    /* all parts of the core are reached */
    CHECK(joins > worlds && failures > worlds && answers > worlds);
    free(f);
}
TEST(store_fuzz, core, SLOW) { fuzz_inputs(W_SLOW ? 30000 : 200000, h_seed()); }
TEST(long_store, fuzz_core, SECONDS(600) | NIGHT) {
    fuzz_inputs(W_SLOW ? 1000000 : 5000000, h_seed() + 1000000);
}

/* ---- the client's reader --------------------------------------------------------------------- */
/* A faulty server: the client reads valid and damaged frames of a server. */

enum { E_REQUESTS = 5, E_SIZE = 4 };
typedef struct {
    fsdpi_store *s;
    int fd; /* the server's end */
    fsdpi_store_request requests[E_REQUESTS];
    size_t caps[E_REQUESTS];
    int64_t events;
} ear;

static void ear_event(void *user) { ((ear *)user)->events++; }

static void ear_open(ear *e, fuzz *f, const setup *s) {
    int fds[2];
    memset(e, 0, sizeof *e);
    CHECK(!socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, fds));
    fsdpi_store_desc d = make_desc(s, 1, E_SIZE);
    d.event = ear_event, d.user = e;
    d.boot.allocator.alloc = w_heap_alloc, d.boot.allocator.free = w_heap_free;
    d.boot.allocator.user = &f->heap;
    e->s = (fsdpi_store *)fsdpi_alloc(&d.boot.allocator, sizeof *e->s);
    CHECK(e->s != NULL);
    e->s->desc = d;
    e->s->fd = fds[0], e->fd = fds[1], e->s->wake = -1;
    e->s->left = (uint8_t *)fsdpi_alloc(&d.boot.allocator, E_SIZE);
    for (int i = 0; i < E_REQUESTS; i++) { /* requests of waiting callers */
        fsdpi_store_request *r = &e->requests[i];
        e->caps[i] = (size_t)dice(f, 3) * 40;
        r->cap = e->caps[i];
        r->value = malloc(r->cap + 1); /* a write after its end is detected */
        ((char *)r->value)[r->cap] = 0x55;
        r->id = (uint32_t)i + 1;
        r->next = e->s->requests;
        e->s->requests = r;
    }
    e->s->next_id = E_REQUESTS;
}

static size_t ear_frame(fuzz *f, unsigned char *to) {
    static unsigned char value[70000];
    static const int ops[] = {OP_REPLY, OP_REPLY, OP_REPLY, OP_LEFT, OP_JOINED};
    int op = dice(f, 30) ? ops[dice(f, 5)] : dice(f, 2) ? OP_FAILURE : 1 + (int)dice(f, 16);
    size_t size = op == OP_LEFT ? 4
                                : (op == OP_FAILURE ? 12 : 0) + dice(f, dice(f, 40) ? 90 : 60000);
    for (size_t i = 0; i < size && i < 1500; i++)
        value[i] = (unsigned char)dice(f, dice(f, 3) ? 256 : 6);
    if (op == OP_LEFT) number(value, dice(f, 8) ? dice(f, E_SIZE) : h_rand64(&f->seed), 4);
    size = frame(to, op, 1 + (uint32_t)dice(f, E_REQUESTS + 2), NULL, value, size);
    if (!dice(f, 3)) number(to + 6, dice(f, 16), 2); /* flags */
    if (!dice(f, 30)) fuzz_damage(f, to, &size);
    return size;
}

static void ear_check(const ear *e) {
    const fsdpi_store *s = e->s;
    CHECK(memchr(s->address, 0, sizeof s->address) != NULL);
    for (int r = 0; r < E_SIZE; r++) CHECK(s->left[r] <= 1);
    for (int i = 0; i < E_REQUESTS; i++) {
        const fsdpi_store_request *r = &e->requests[i];
        CHECK_EQ_INT(((const char *)r->value)[e->caps[i]], 0x55);
        if (r->done && !r->status) CHECK(r->bytes <= r->cap);
    }
    if (s->judged) {
        CHECK(s->failure.status > 0 && s->failure.status <= FSDP_ERR_INTERNAL && !s->requests);
        CHECK(memchr(s->failure.subject, 0, sizeof s->failure.subject) != NULL);
        CHECK(memchr(s->failure.reason, 0, sizeof s->failure.reason) != NULL);
    }
    if (s->gone) CHECK(s->fd == -1 && !s->requests);
}

static void ear_inputs(int64_t inputs, uint64_t seed) {
    static unsigned char bytes[HEADER + 70000];
    setup *s = make_setup(AT_HOST, E_SIZE, 0, 1000);
    fuzz *f = (fuzz *)lab_zeros(1, sizeof *f);
    int64_t fed = 0, worlds = 0, done = 0, judged = 0, left = 0;
    ear e;
    f->seed = seed, f->heap.fail_at = -1;
    for (; fed < inputs; worlds++) {
        ear_open(&e, f, s);
        for (int i = 0; i < 60 && !e.s->gone; i++) {
            size_t size = ear_frame(f, bytes), at = 0;
            while (at < size && !e.s->gone) {
                size_t piece = dice(f, 3) ? size - at : 1 + dice(f, 30);
                if (piece > size - at) piece = size - at;
                ssize_t sent = send(e.fd, bytes + at, piece, MSG_NOSIGNAL);
                if (sent > 0) at += (size_t)sent;
                fsdpi_store_receive(e.s);
                fed++;
            }
            ear_check(&e);
        }
        close(e.fd);
        while (!e.s->gone) fsdpi_store_receive(e.s);
        ear_check(&e);
        CHECK(e.s->judged || e.s->gone);
        for (int i = 0; i < E_REQUESTS; i++) done += e.requests[i].done && !e.requests[i].status;
        for (int r = 0; r < E_SIZE; r++) left += e.s->left[r];
        judged += e.s->judged != 0;
        fsdpi_store_close(e.s);
        for (int i = 0; i < E_REQUESTS; i++) {
            CHECK(e.requests[i].done);
            free(e.requests[i].value);
        }
        CHECK_EQ_INT(f->heap.live, 0);
    }
    h_message("%lld inputs of %lld servers: %lld answers taken, %lld ranks left, %lld failures",
              (long long)fed, (long long)worlds, (long long)done, (long long)left,
              (long long)judged);
    CHECK(done > worlds / 2 && left > worlds && judged > worlds / 2);
    free(f);
}
TEST(store_fuzz, client, SLOW) { ear_inputs(W_SLOW ? 20000 : 50000, h_seed()); }
TEST(long_store, fuzz_client, SECONDS(600) | NIGHT) {
    ear_inputs(W_SLOW ? 200000 : 1000000, h_seed() + 1000000);
}
