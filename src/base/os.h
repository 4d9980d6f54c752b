/* base/os.h - the calls of the operating system (Linux), a lock, the environment

   What only Linux has stands here and in os_net.h: a port to another system writes these two files.
   Strict C99 hides some of the calls. The library declares these under private names of the same
   symbols, and needs no feature macros.
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
    const struct fsdpi_timespec t = {(long)(ns / 1000000000), (long)(ns % 1000000000)};
    (void)fsdpi_nanosleep(&t, NULL);
}

// A sleep of a wait that polls: `first` ns long, each next one an eighth longer, at most `most`. A
// wait ends soon after what it waits for, and a long one takes little time of a processor. *ns is 0
// before the first.
static FSDPI_UNUSED void fsdpi_nap(int64_t *ns, int64_t first, int64_t most) {
    const int64_t next = *ns ? *ns + *ns / 8 : first;
    *ns = next < most ? next : most;
    fsdpi_sleep_ns(*ns);
}

// Sleeps while *word == expected, at most timeout_ns, and may return early without a reason.
// shared: several processes have the word in their memory.
static void fsdpi_futex_wait(uint32_t *word, uint32_t expected, int64_t timeout_ns, int shared) {
    struct fsdpi_timespec t = {(long)(timeout_ns / 1000000000), (long)(timeout_ns % 1000000000)};
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

// Reads the beginning of a file of the system as text; "" if that fails.
static void fsdpi_read_text(const char *path, char *out, size_t cap) {
    const int fd = fsdpi_fd(open(path, O_RDONLY | FSDPI_CLOEXEC));
    const ssize_t got = fd < 0 ? 0 : read(fd, out, cap - 1);
    if (fd >= 0) (void)close(fd);
    out[got > 0 ? got : 0] = 0;
}

// Writes a text that processes of one host have in common, until it starts again. Returns 0 if the
// system has none.
static int fsdpi_boot_text(char *out, size_t cap) {
    fsdpi_read_text("/proc/sys/kernel/random/boot_id", out, cap);
    out[strcspn(out, "\n")] = 0;
    return *out != 0;
}
// Returns a number for it; without such a text that of the host's name.
static uint64_t fsdpi_boot_id(void) {
    char text[80] = "";
    if (!fsdpi_boot_text(text, sizeof text)) (void)fsdpi_gethostname(text, sizeof text - 1);
    return fsdpi_hash_text(text);
}

// Returns a number that processes with the same CLOCK_MONOTONIC have in common.
static uint64_t fsdpi_system_clock_id(void) {
    return fsdpi_hash(fsdpi_boot_id(), fsdpi_namespace("time"));
}

/* -------------------------------------------------------------------------------------------- */
// Processes, threads, cores.

// Blocks more signals in this thread, and returns those that it blocked before.
static FSDPI_UNUSED uint64_t fsdpi_block_signals(uint64_t more) {
    uint64_t before = 0;
    (void)fsdpi_syscall(SYS_rt_sigprocmask, 0 /* SIG_BLOCK */, &more, &before, sizeof before);
    return before;
}
static FSDPI_UNUSED void fsdpi_set_blocked_signals(uint64_t blocked) {
    (void)fsdpi_syscall(SYS_rt_sigprocmask, 2 /* SIG_SETMASK */, &blocked, NULL, sizeof blocked);
}

// Makes the system kill this process when its parent ends.
static FSDPI_UNUSED void fsdpi_end_with_parent(void) {
    (void)fsdpi_syscall(SYS_prctl, 1L /* PR_SET_PDEATHSIG */, 9L /* SIGKILL */, 0L, 0L, 0L);
}

// Makes a pipe that an exec closes. Returns 0, or -1: see errno.
static FSDPI_UNUSED int fsdpi_pipe(int ends[2]) {
    if (fsdpi_syscall(SYS_pipe2, ends, (long)FSDPI_CLOEXEC)) return -1;
    for (int k = 0; k < 2; k++) ends[k] = fsdpi_fd(ends[k]);
    return ends[0] < 3 || ends[1] < 3 ? -1 : 0;
}

// Returns when a process of this host began, in ticks after the host, and sets *state to a letter
// of /proc/PID/stat. Returns -1 if there is no such process.
static FSDPI_UNUSED int64_t fsdpi_process_began(int pid, char *state) {
    char path[40], text[640], letter = 0;
    unsigned long long began = 0;
    snprintf(path, sizeof path, "/proc/%d/stat", pid);
    fsdpi_read_text(path, text, sizeof text);
    const char *at = strrchr(text, ')'); // the end of the program's name
    if (!at || sscanf(at + 1,
                      " %c %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s "
                      "%*s %llu",
                      &letter, &began) != 2)
        return -1;
    if (state) *state = letter;
    return (int64_t)began;
}

// Returns 1 if the process has no other thread.
static FSDPI_UNUSED int fsdpi_is_only_thread(void) {
    struct stat tasks;
    return !stat("/proc/self/task", &tasks) && tasks.st_nlink == 3; // ".", ".." and this thread
}

// Returns the number of cores on which this process may run.
static FSDPI_UNUSED int fsdpi_cores(void) {
    uint8_t mask[1024];
    int cores = 0;
    long bytes = fsdpi_syscall(SYS_sched_getaffinity, 0L, (long)sizeof mask, mask);
    for (long i = 0; i < bytes; i++)
        for (int bits = mask[i]; bits; bits &= bits - 1) cores++;
    return cores;
}

// Lets another thread have the core.
static FSDPI_UNUSED void fsdpi_yield(void) { (void)fsdpi_syscall(SYS_sched_yield); }

/* -------------------------------------------------------------------------------------------- */
// Files without a name, which processes share as memory. Functions return 0, or -1: see errno.

extern int fsdpi_fallocate_mode(int fd, int mode, off_t at, off_t bytes) __asm__("fallocate");
extern int fsdpi_fallocate(int fd, long at, long bytes) __asm__("posix_fallocate");

// Returns a descriptor of a new file; -1: see errno.
static FSDPI_UNUSED int fsdpi_shared_file(void) {
    return fsdpi_fd((int)fsdpi_syscall(SYS_memfd_create, "fsdp", 1L /* CLOEXEC */));
}

// Gives a range of the file real memory, which is zero if it is new.
static FSDPI_UNUSED int fsdpi_file_reserve(int fd, uint64_t at, size_t bytes) {
    return fsdpi_fallocate_mode(fd, 0, (off_t)at, (off_t)bytes);
}
static FSDPI_UNUSED void fsdpi_file_give_back(int fd, uint64_t at, size_t bytes) {
    (void)fsdpi_fallocate_mode(fd, 3 /* KEEP_SIZE | PUNCH_HOLE */, (off_t)at, (off_t)bytes);
}

// Locks bytes of a file for this process. The lock belongs to a separate open file, which only the
// mapping that it returns keeps open. So it does not end if the program closes descriptors, and
// children that live longer do not keep it. NULL: the system cannot, as without /proc.
static FSDPI_UNUSED void *fsdpi_lock_by_mapping(int file, size_t page, struct flock *lock) {
    char path[40];
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", file);
    int fd = fsdpi_fd(open(path, O_RDWR | FSDPI_CLOEXEC));
    void *at = fd < 0 ? MAP_FAILED : mmap(NULL, page, PROT_NONE, MAP_SHARED, fd, 0);
    int kept = at != MAP_FAILED && !fsdpi_madvise(at, page, 10 /* MADV_DONTFORK */) &&
               !fcntl(fd, 37 /* F_OFD_SETLK */, lock);
    if (!kept && at != MAP_FAILED) (void)munmap(at, page);
    if (fd >= 0) (void)close(fd);
    return kept ? at : NULL;
}

// Returns 1 if the process has a limit on the size of files, beyond which it would be killed.
static FSDPI_UNUSED int fsdpi_files_are_limited(void) {
    uint64_t limit[2] = {UINT64_MAX, 0}; // struct rlimit64
    (void)fsdpi_syscall(SYS_prlimit64, 0L, 1L /* RLIMIT_FSIZE */, NULL, limit);
    return limit[0] != UINT64_MAX;
}

/* -------------------------------------------------------------------------------------------- */
// Memory that is left.

// Returns the number after `key` at the start of a line of a small text file, or -1. key "": the
// first line.
static FSDPI_UNUSED int64_t fsdpi_read_number(const char *path, const char *key) {
    char line[256];
    int64_t value = -1;
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    while (value < 0 && fgets(line, sizeof line, file)) {
        char *end = line + strlen(key);
        if (!strncmp(line, key, strlen(key)) && strspn(end, " \t0123456789") > 0)
            value = (int64_t)strtoull(end, NULL, 10);
        else if (!*key) break;
    }
    (void)fclose(file);
    return value;
}

// Lowers *least to the bytes that a control group and its parents still allow. Page cache counts as
// free.
static FSDPI_UNUSED void fsdpi_group_limit(const char *root, const char *path,
                                           const char *limit_name, const char *usage_name,
                                           int64_t *least) {
    char dir[400], name[480];
    if (snprintf(dir, sizeof dir, "%s%s", root, path) >= (int)sizeof dir) return;
    for (;;) {
        (void)snprintf(name, sizeof name, "%s/%s", dir, limit_name);
        int64_t limit = fsdpi_read_number(name, "");
        (void)snprintf(name, sizeof name, "%s/%s", dir, usage_name);
        int64_t used = fsdpi_read_number(name, "");
        (void)snprintf(name, sizeof name, "%s/memory.stat", dir);
        int64_t cache = fsdpi_read_number(name, "inactive_file ") +
                        fsdpi_read_number(name, "active_file ");
        int64_t left = limit - used + (cache > 0 ? cache : 0);
        if (limit >= 0 && used >= 0 && left < *least) *least = left > 0 ? left : 0;
        char *slash = strrchr(dir, '/');
        if (!slash || slash < dir + strlen(root)) return;
        *slash = 0;
    }
}

// Returns the bytes that processes can still take before the kernel kills some. *whose: the name of
// that limit.
static FSDPI_UNUSED int64_t fsdpi_memory_left(const char **whose) {
    char line[400];
    int64_t machine = fsdpi_read_number("/proc/meminfo", "MemAvailable:"), least;
    if (machine < 0) machine = INT64_MAX / 1024;
    least = machine *= 1024;
    FILE *file = fopen("/proc/self/cgroup", "r");
    while (file && fgets(line, sizeof line, file)) {
        char *path = strchr(line, '/');
        line[strcspn(line, "\n")] = 0;
        if (!path) continue;
        if (!strncmp(line, "0::", 3))
            fsdpi_group_limit("/sys/fs/cgroup", path, "memory.max", "memory.current", &least);
        else if (strstr(line, ":memory:"))
            fsdpi_group_limit("/sys/fs/cgroup/memory", path, "memory.limit_in_bytes",
                              "memory.usage_in_bytes", &least);
    }
    if (file) (void)fclose(file);
    *whose = least < machine ? "its control group" : "the machine";
    return least;
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
