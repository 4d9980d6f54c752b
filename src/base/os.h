/* base/os.h - the calls of the operating system (Linux), a lock, the environment

   The few calls of the operating system that the library needs. Strict C99 hides some of them. The
   library declares these under private names of the same symbols, and needs no feature macros.
   Callers: backends/fsdp_nccl.h (fsdpi_unlock), backends/fsdp_store.h (fsdpi_unlock),
     backends/fsdp_shm_world.h (fsdpi_futex_wake_all) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_BASE_OS_H
#define FSDPI_BASE_OS_H

#include "hash.h"
#include "macros.h"
#include "text.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <errno.h>       // errno
#include <fcntl.h>       // fcntl, open
#include <sys/mman.h>    // mmap
#include <sys/stat.h>    // stat
#include <sys/syscall.h> // SYS_futex and others
#include <unistd.h>      // close

enum { FSDPI_ANON = 0x20, FSDPI_CLOEXEC = 02000000 }; // MAP_ANONYMOUS, O_CLOEXEC

struct fsdpi_timespec {
    long tv_sec, tv_nsec;
};

extern long fsdpi_syscall(long number, ...) __asm__("syscall");
extern int fsdpi_clock_gettime(int clock, struct fsdpi_timespec *out) __asm__("clock_gettime");
extern int fsdpi_kill(int pid, int sig) __asm__("kill");
extern int fsdpi_madvise(void *at, size_t bytes, int advice) __asm__("madvise");
extern int fsdpi_nanosleep(const struct fsdpi_timespec *wanted,
                           struct fsdpi_timespec *left) __asm__("nanosleep");

static int64_t fsdpi_monotonic_ns(void *user) {
    struct fsdpi_timespec t;
    (void)user;
    (void)fsdpi_clock_gettime(1 /* CLOCK_MONOTONIC */, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

// Returns a clock of the system in ns. It does not go through the C library, where a preloaded one
// may shift times.
static int64_t fsdpi_system_ns(int clock) {
    struct fsdpi_timespec t = {0, 0};
    (void)fsdpi_syscall(SYS_clock_gettime, clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static FSDPI_UNUSED void fsdpi_sleep_ns(int64_t ns) {
    struct fsdpi_timespec t;
    t.tv_sec = (long)(ns / 1000000000);
    t.tv_nsec = (long)(ns % 1000000000);
    (void)fsdpi_nanosleep(&t, NULL);
}

// Sleeps while *word == expected, at most timeout_ns, and may return early without a reason.
// shared: several processes have the word in their memory.
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

// Other threads and processes see earlier writes before later ones.
static inline void fsdpi_release_fence(void) {
#ifndef __SANITIZE_THREAD__ // gcc warns that it does not know fences
    __atomic_thread_fence(__ATOMIC_RELEASE);
#endif
}

// AddressSanitizer stops a program that touches poisoned memory.
#if defined(__SANITIZE_ADDRESS__)
#define FSDPI_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FSDPI_ASAN 1
#endif
#endif
#ifdef FSDPI_ASAN
extern void fsdpi_poison(const void *at, size_t bytes) __asm__("__asan_poison_memory_region");
extern void fsdpi_unpoison(const void *at, size_t bytes) __asm__("__asan_unpoison_memory_region");
#else
#define FSDPI_ASAN 0
static inline void fsdpi_poison(const void *at, size_t bytes) { (void)at, (void)bytes; }
static inline void fsdpi_unpoison(const void *at, size_t bytes) { (void)at, (void)bytes; }
#endif

// Takes a lock if it is free, and returns 1 if so. The lock guards a few instructions, such as
// those that set an error text. 0: free, 1: taken, 2: taken, and another thread may sleep until it
// is free.
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

// Moves a new descriptor of the library to 3 or above: if a program has closed 0, 1 or 2, it may
// still print there. -1: there is no descriptor.
static int fsdpi_fd(int fd) {
    if (fd < 0 || fd > 2) return fd;
    int moved = fcntl(fd, 1030 /* F_DUPFD_CLOEXEC */, 3), error = errno;
    (void)close(fd);
    errno = error;
    return moved;
}

// Opens the null device on closed descriptors 0 to 2, so that other code gets none of these.
static void fsdpi_fill_std_fds(void) {
    int fd = 0;
    while (fd >= 0 && fd < 3) fd = open("/dev/null", O_RDWR);
    if (fd >= 3) (void)close(fd);
}

extern int fsdpi_at_thread_end(void (*call)(void *), void *arg,
                               const void *in_library) __asm__("__cxa_thread_atexit_impl")
    __attribute__((weak)); // glibc's

// Keeps dlclose from unloading the library that has this code, until this thread ends.
static void fsdpi_pin_library(void) {
    if (fsdpi_at_thread_end) (void)fsdpi_at_thread_end(free, NULL, "here");
}

#define FSDPI_FORK_ASKS 0x80000000u

// Returns two words; NULL: no memory. The first one is `value` in this process, and 0 in every
// child that it forks. If the kernel does not clear it there, it has FSDPI_FORK_ASKS in addition,
// and the second word is the owner's process.
static uint32_t *fsdpi_fork_word(uint32_t value) {
    const size_t bytes = 2 * sizeof value;
    void *at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | FSDPI_ANON, -1, 0);
    if (at == MAP_FAILED) return NULL;
    uint32_t *word = (uint32_t *)at;
    word[0] = value;
    if (fsdpi_madvise(at, bytes, 18 /* MADV_WIPEONFORK */))
        word[0] |= FSDPI_FORK_ASKS, word[1] = (uint32_t)getpid();
    return word;
}
// Returns the value of the word: 0 in a child.
static FSDPI_NOINLINE uint32_t fsdpi_fork_value(const uint32_t *word) {
    const uint32_t value = FSDPI_LOAD(word);
    if (!(value & FSDPI_FORK_ASKS)) return value;
    return word[1] == (uint32_t)getpid() ? value & ~FSDPI_FORK_ASKS : 0;
}
static void fsdpi_fork_set(uint32_t *word, uint32_t value) {
    FSDPI_STORE(word, value | (FSDPI_LOAD(word) & FSDPI_FORK_ASKS));
}

// Returns 0 if the system has no random bits yet, soon after its start; it does not wait.
static int fsdpi_random(void *out, size_t bytes) {
    return fsdpi_syscall(SYS_getrandom, out, bytes, 1 /* GRND_NONBLOCK */) == (long)bytes;
}

extern int fsdpi_gethostname(char *name, size_t size) __asm__("gethostname");

// Returns the number of a namespace of this process, "pid" or "time"; 0: the system has none.
static uint64_t fsdpi_namespace(const char *kind) {
    char path[40];
    struct stat st;
    snprintf(path, sizeof path, "/proc/self/ns/%s", kind);
    return stat(path, &st) ? 0 : (uint64_t)st.st_ino;
}

// Returns a number that processes of one host have in common, until it starts again.
static uint64_t fsdpi_boot_id(void) {
    char text[80] = "";
    int fd = fsdpi_fd(open("/proc/sys/kernel/random/boot_id", O_RDONLY | FSDPI_CLOEXEC));
    const ssize_t got = fd < 0 ? 0 : read(fd, text, sizeof text - 1);
    if (fd >= 0) (void)close(fd);
    if (got <= 0) (void)fsdpi_gethostname(text, sizeof text - 1);
    return fsdpi_hash_text(text);
}

// Returns a number that processes with the same CLOCK_MONOTONIC have in common.
static uint64_t fsdpi_system_clock_id(void) {
    return fsdpi_hash(fsdpi_boot_id(), fsdpi_namespace("time"));
}

/* -------------------------------------------------------------------------------------------- */
// The one reader of environment variables. An empty variable counts as not set. If a variable has a
// wrong value, fsdp_init fails and names it.

// Returns the value of a variable; NULL if it is not set, or is empty.
static const char *fsdpi_env(const char *name) {
    const char *text = name ? getenv(name) : NULL;
    return text && *text ? text : NULL;
}

// Reads an integer from least to most; a flag is 0 or 1. If the variable is not set, *out stays as
// it is. Writes the text of a failure to *error.
static fsdp_status fsdpi_env_int(const char *name, int least, int most, int *out,
                                 fsdpi_text *error) {
    const char *text = fsdpi_env(name);
    if (!text) return FSDP_OK;
    char *end;
    long value = strtol(text, &end, 10);
    if (!*end && value >= least && value <= most) {
        *out = (int)value;
        return FSDP_OK;
    }
    fsdpi_text_add(error, "[E509] variable %s is '%s', expected an integer from %d to %d", name,
                   text, least, most);
    return FSDP_ERR_INVALID_ARG;
}

#endif // FSDPI_BASE_OS_H
