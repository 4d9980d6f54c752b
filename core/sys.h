/* core/sys.h - the few calls of the operating system (Linux), a lock, a hash and a text

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */

#define FSDPI_TEXT_OF(name, text) text, // an entry of a list of names

// Owns: the few calls of the operating system that the library needs. Strict C99 hides some of
// them; a private name for the C library's symbol reaches them without feature macros.

#include <sys/socket.h>  // getsockopt
#include <asm/socket.h>  // SO_PEERCRED, which the line above hides in strict C99
#include <sys/syscall.h> // SYS_futex and others
#include <sys/wait.h>    // waitpid
#include <unistd.h>      // fork, getpid, _exit

struct fsdpi_timespec {
    long tv_sec, tv_nsec;
};

extern long fsdpi_syscall(long number, ...) __asm__("syscall");
extern int fsdpi_clock_gettime(int clock, struct fsdpi_timespec *out) __asm__("clock_gettime");
extern int fsdpi_nanosleep(const struct fsdpi_timespec *wanted,
                           struct fsdpi_timespec *left) __asm__("nanosleep");
extern int fsdpi_kill(int pid, int sig) __asm__("kill");

static int64_t fsdpi_monotonic_ns(void *user) {
    struct fsdpi_timespec t;
    (void)user;
    (void)fsdpi_clock_gettime(1 /* CLOCK_MONOTONIC */, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static FSDPI_UNUSED void fsdpi_sleep_ns(int64_t ns) {
    struct fsdpi_timespec t;
    t.tv_sec = (long)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    (void)fsdpi_nanosleep(&t, NULL);
}

// Sleep while *word == expected, at most timeout_ns. May return early for no reason. shared: the
// word is in memory of several processes.
static void fsdpi_futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns, int shared) {
    struct fsdpi_timespec t;
    t.tv_sec = (long)(timeout_ns / 1000000000);
    t.tv_nsec = (long)(timeout_ns % 1000000000);
    (void)fsdpi_syscall(SYS_futex, word, shared ? 0 : 128 /* FUTEX_PRIVATE_FLAG */, expected, &t,
                        NULL, 0);
}

static void fsdpi_futex_wake_all(uint32_t *word, int shared) {
    (void)fsdpi_syscall(SYS_futex, word, shared ? 1 : 129, 0x7FFFFFFF, NULL, NULL, 0);
}

static inline void fsdpi_pause(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define FSDPI_LOAD(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define FSDPI_STORE(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)

// A lock for a few instructions: error texts, lists of ranks as threads.
// 0 free, 1 taken, 2 taken and somebody may sleep on it.
static int fsdpi_try_lock(uint32_t *lock) {
    uint32_t none = 0;
    return __atomic_compare_exchange_n(lock, &none, 1u, 0, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED);
}
static void fsdpi_lock(uint32_t *lock) {
    if (fsdpi_try_lock(lock)) return;
    while (__atomic_exchange_n(lock, 2u, __ATOMIC_ACQUIRE)) fsdpi_futex_wait(lock, 2, 1000000, 0);
}
static FSDPI_NOINLINE void fsdpi_unlock(uint32_t *lock) {
    if (__atomic_exchange_n(lock, 0u, __ATOMIC_RELEASE) == 2) fsdpi_futex_wake_all(lock, 0);
}

// Whether the other end of a unix socket is a process of this user.
static FSDPI_UNUSED int fsdpi_same_user(int fd) {
    int32_t pid_uid_gid[3] = {-1, -1, -1}; // struct ucred, which strict C99 hides, too
    socklen_t size = sizeof pid_uid_gid;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, pid_uid_gid, &size) &&
           (uint32_t)pid_uid_gid[1] == (uint32_t)getuid();
}

static uint64_t fsdpi_hash(uint64_t h, uint64_t x) { // splitmix64 of a running value
    h += x + 0x9E3779B97F4A7C15ull;
    h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;
    h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
    return h ^ (h >> 31);
}

static uint64_t fsdpi_hash_text(const char *text) {
    uint64_t h = 0;
    for (; *text; text++) h = fsdpi_hash(h, (uint64_t)(unsigned char)*text);
    return h;
}

// A text that grows like snprintf's: what does not fit is only counted.
typedef struct fsdpi_text {
    char *buf;
    size_t cap, used;
} fsdpi_text;

static FSDP_PRINTF(2, 3) void fsdpi_say(fsdpi_text *t, const char *format, ...) {
    size_t room = t->used < t->cap ? t->cap - t->used : 0;
    va_list args;
    va_start(args, format);
    int wanted = vsnprintf(room ? t->buf + t->used : NULL, room, format, args);
    va_end(args);
    if (wanted > 0) t->used += (size_t)wanted;
}
