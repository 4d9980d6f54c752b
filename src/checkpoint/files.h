/* checkpoint/files.h - the file calls of the operating system, and one file call as data

   The default fsdp_file_ops, and calls that retry and report failures. Strict C99 hides three
   functions of unistd.h, which are declared here under private names of the same symbols.
   Callers: export.h (fsdpi_ck_forget), save.h (fsdpi_ck_write), open.h (fsdpi_ck_forget) and
     others.

   A part of fsdp_checkpoint.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_CHECKPOINT_H
#include "../../fsdp_checkpoint.h"
#endif
#ifndef FSDPI_CHECKPOINT_FILES_H
#define FSDPI_CHECKPOINT_FILES_H

#include "../base/os.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

extern ssize_t fsdpi_ck_pread(int fd, void *buf, size_t count, int64_t at) __asm__("pread");
extern ssize_t fsdpi_ck_pwrite(int fd, const void *buf, size_t count,
                               int64_t at) __asm__("pwrite");
extern int fsdpi_ck_fsync(int fd) __asm__("fsync");

enum {
    FSDPI_CK_PIECE = 4 << 20,      // bytes in one file call, or in a copy through memory
    FSDPI_CK_BLOCK = 1 << 20,      // bytes of data that share a checksum
    FSDPI_CK_LEAF = 96,            // bytes of a name that the library chooses, with its terminator
    FSDPI_CK_MOST_HEADER = 100000000,
    FSDPI_CK_MOST_TEXT = 64 << 20, // bytes in a manifest or an index
    FSDPI_CK_MOST_FILES = 1000000
};

static int64_t fsdpi_ck_less(int64_t a, int64_t b) { return a < b ? a : b; }

static int fsdpi_ck_fd(void *file) { return (int)(intptr_t)file - 1; }

static int fsdpi_ck_open_fd(const char *path, int flags) {
    return fsdpi_fd(open(path, flags | FSDPI_CLOEXEC, 0666));
}

static int fsdpi_ck_os_open(void *user, const char *path, int create, void **file,
                            int64_t *nbytes) {
    struct stat st;
    (void)user;
    int fd = fsdpi_ck_open_fd(path, create ? O_WRONLY | O_CREAT | O_EXCL : O_RDONLY | O_NONBLOCK);
    if (fd < 0) return errno;
    int error = fstat(fd, &st) ? errno : !S_ISREG(st.st_mode) ? EINVAL : 0;
    if (error) {
        (void)close(fd);
        return error;
    }
    *nbytes = (int64_t)st.st_size;
    *file = (void *)(intptr_t)(fd + 1);
    return 0;
}
static int fsdpi_ck_os_read(void *user, void *file, void *data, int64_t nbytes, int64_t at,
                            int64_t *done) {
    (void)user;
    ssize_t n = fsdpi_ck_pread(fsdpi_ck_fd(file), data, (size_t)nbytes, at);
    *done = n < 0 ? 0 : (int64_t)n;
    return n < 0 ? errno : 0;
}
static int fsdpi_ck_os_write(void *user, void *file, const void *data, int64_t nbytes, int64_t at,
                             int64_t *done) {
    (void)user;
    ssize_t n = fsdpi_ck_pwrite(fsdpi_ck_fd(file), data, (size_t)nbytes, at);
    *done = n < 0 ? 0 : (int64_t)n;
    return n < 0 ? errno : 0;
}
static int fsdpi_ck_os_sync(void *user, void *file) {
    (void)user;
    return fsdpi_ck_fsync(fsdpi_ck_fd(file)) ? errno : 0;
}
static int fsdpi_ck_os_close(void *user, void *file) {
    (void)user;
    return close(fsdpi_ck_fd(file)) ? errno : 0;
}
static int fsdpi_ck_os_make_dir(void *user, const char *path) {
    (void)user;
    return mkdir(path, 0777) ? errno : 0;
}
static int fsdpi_ck_os_sync_dir(void *user, const char *path) {
    (void)user;
    int fd = fsdpi_ck_open_fd(path, O_RDONLY);
    if (fd < 0) return errno;
    int error = fsdpi_ck_fsync(fd) ? errno : 0;
    (void)close(fd);
    return error;
}
// Fails with EEXIST if `to` exists: rename(2) would replace an empty directory. One job saves a
// step.
static int fsdpi_ck_os_rename(void *user, const char *from, const char *to) {
    struct stat st;
    (void)user;
    if (!stat(to, &st)) return EEXIST;
    return rename(from, to) ? errno : 0;
}
static int fsdpi_ck_os_remove(void *user, const char *path, int is_dir) {
    (void)user;
    return (is_dir ? rmdir(path) : unlink(path)) ? errno : 0;
}
static int fsdpi_ck_os_list(void *user, const char *path, int (*each)(void *arg, const char *name),
                            void *arg) {
    const struct dirent *entry;
    (void)user;
    DIR *dir = opendir(path);
    if (!dir) return errno;
    int stop = 0;
    errno = 0;
    while (!stop && (entry = readdir(dir)) != NULL) {
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            stop = each(arg, entry->d_name);
        errno = 0;
    }
    int error = stop ? 0 : errno;
    (void)closedir(dir);
    return error;
}

static const fsdp_file_ops fsdpi_ck_os_files = {
    1,
    sizeof(fsdp_file_ops),
    fsdpi_ck_os_open,
    fsdpi_ck_os_read,
    fsdpi_ck_os_write,
    fsdpi_ck_os_sync,
    fsdpi_ck_os_close,
    fsdpi_ck_os_make_dir,
    fsdpi_ck_os_sync_dir,
    fsdpi_ck_os_rename,
    fsdpi_ck_os_remove,
    fsdpi_ck_os_list,
};

// The file functions of an object, and its first failure.
typedef struct fsdpi_ck_disk {
    const fsdp_file_ops *ops;
    void *user;
    uint32_t moves;    // file calls that have ended; unchanged while the worker hangs
    const char *doing; // the current file call and its path, for the text of a stall
    const char *path;
    uint32_t left;      // 1: the caller no longer waits for the worker
    fsdp_status status; // the first failure
    int error;          // the errno value of that failure; 0: none
    char text[FSDP_CHECKPOINT_PATH + 256];
} fsdpi_ck_disk;

static void fsdpi_ck_disk_init(fsdpi_ck_disk *d, const fsdp_file_ops *ops, void *user) {
    memset(d, 0, sizeof *d);
    d->ops = ops ? ops : &fsdpi_ck_os_files;
    d->user = user;
}
static void fsdpi_ck_forget(fsdpi_ck_disk *d) {
    d->status = FSDP_OK;
    d->error = 0;
    d->text[0] = 0;
}

// Notes a failure unless there is an earlier one. Returns the status of the first.
FSDP_PRINTF(3, 4)
static fsdp_status fsdpi_ck_fault(fsdpi_ck_disk *d, fsdp_status status, const char *format, ...) {
    va_list args;
    if (d->status) return d->status;
    va_start(args, format);
    vsnprintf(d->text, sizeof d->text, format, args);
    va_end(args);
    return d->status = status;
}

// Counts a file call that has ended. Returns 0 if the caller no longer waits: no further call is
// made.
static int fsdpi_ck_moved(fsdpi_ck_disk *d) {
    __atomic_add_fetch(&d->moves, 1, __ATOMIC_RELEASE);
    if (!__atomic_load_n(&d->left, __ATOMIC_ACQUIRE)) return 1;
    (void)fsdpi_ck_fault(d, FSDP_ERR_IO, "nobody waits any more");
    return 0;
}
static fsdp_status fsdpi_ck_begin(fsdpi_ck_disk *d, const char *doing, const char *path) {
    if (__atomic_load_n(&d->left, __ATOMIC_ACQUIRE))
        return fsdpi_ck_fault(d, FSDP_ERR_IO, "nobody waits any more");
    __atomic_store_n(&d->path, path, __ATOMIC_RELAXED);
    __atomic_store_n(&d->doing, doing, __ATOMIC_RELAXED);
    return d->status;
}
// Ends a file call that returned `error`: notes the call, its path and the reason.
static fsdp_status fsdpi_ck_end(fsdpi_ck_disk *d, int error, const char *path) {
    if (!fsdpi_ck_moved(d)) return d->status;
    if (!error) return FSDP_OK;
    if (!d->status) d->error = error;
    return fsdpi_ck_fault(d, FSDP_ERR_IO, "%s of %s: %s (%d)", d->doing, path, strerror(error),
                          error);
}

static fsdp_status fsdpi_ck_open(fsdpi_ck_disk *d, const char *path, int create, void **file,
                                 int64_t *nbytes) {
    *file = NULL, *nbytes = 0;
    int error = EINTR;
    if (fsdpi_ck_begin(d, create ? "create" : "open", path)) return d->status;
    while (error == EINTR) error = d->ops->open(d->user, path, create, file, nbytes);
    return fsdpi_ck_end(d, error, path);
}
static fsdp_status fsdpi_ck_sync(fsdpi_ck_disk *d, void *file, const char *path) {
    int error = EINTR;
    if (fsdpi_ck_begin(d, "fsync", path)) return d->status;
    while (error == EINTR) error = d->ops->sync(d->user, file);
    return fsdpi_ck_end(d, error, path);
}
// Closes a file, even after a failure.
static fsdp_status fsdpi_ck_close(fsdpi_ck_disk *d, void *file, const char *path) {
    (void)fsdpi_ck_begin(d, "close", path);
    if (!file) return d->status;
    int error = d->ops->close(d->user, file);
    return d->status ? d->status : fsdpi_ck_end(d, error, path);
}
static fsdp_status fsdpi_ck_sync_dir(fsdpi_ck_disk *d, const char *path) {
    int error = EINTR;
    if (fsdpi_ck_begin(d, "fsync of the directory", path)) return d->status;
    while (error == EINTR) error = d->ops->sync_dir(d->user, path);
    return fsdpi_ck_end(d, error, path);
}
static fsdp_status fsdpi_ck_rename(fsdpi_ck_disk *d, const char *from, const char *to) {
    if (fsdpi_ck_begin(d, "rename", to)) return d->status;
    return fsdpi_ck_end(d, d->ops->rename(d->user, from, to), to);
}

// Writes nbytes in pieces. Continues if a call was interrupted or wrote fewer bytes.
static fsdp_status fsdpi_ck_write(fsdpi_ck_disk *d, void *file, const char *path, const void *data,
                                  int64_t nbytes, int64_t at) {
    const char *from = (const char *)data;
    while (nbytes > 0 && !fsdpi_ck_begin(d, "write", path)) {
        int64_t done = 0, piece = fsdpi_ck_less(nbytes, FSDPI_CK_PIECE);
        int error = d->ops->write(d->user, file, from, piece, at, &done);
        if (!fsdpi_ck_moved(d)) return d->status;
        if (error == EINTR) continue;
        if (!error && done <= 0) error = ENOSPC;
        if (error) {
            if (!d->status) d->error = error;
            return fsdpi_ck_fault(d, FSDP_ERR_IO, "write of %lld bytes at %lld of %s: %s (%d)",
                                  (long long)piece, (long long)at, path, strerror(error), error);
        }
        from += done, at += done, nbytes -= done;
    }
    return d->status;
}
static fsdp_status fsdpi_ck_read(fsdpi_ck_disk *d, void *file, const char *path, void *data,
                                 int64_t nbytes, int64_t at) {
    char *to = (char *)data;
    while (nbytes > 0 && !fsdpi_ck_begin(d, "read", path)) {
        int64_t done = 0, piece = fsdpi_ck_less(nbytes, FSDPI_CK_PIECE);
        int error = d->ops->read(d->user, file, to, piece, at, &done);
        if (!fsdpi_ck_moved(d)) return d->status;
        if (error == EINTR) continue;
        if (error) {
            if (!d->status) d->error = error;
            return fsdpi_ck_fault(d, FSDP_ERR_IO, "read of %lld bytes at %lld of %s: %s (%d)",
                                  (long long)piece, (long long)at, path, strerror(error), error);
        }
        if (done <= 0)
            return fsdpi_ck_fault(d, FSDP_ERR_CORRUPT, "%s is cut off at byte %lld", path,
                                  (long long)at);
        to += done, at += done, nbytes -= done;
    }
    return d->status;
}

// Sets `out` to DIR/LEAF. Returns 0 if that is too long.
static int fsdpi_ck_join(char out[FSDP_CHECKPOINT_PATH], const char *dir, const char *leaf) {
    size_t a = strlen(dir), b = strlen(leaf);
    out[0] = 0;
    if (a + b + 2 > FSDP_CHECKPOINT_PATH) return 0;
    memcpy(out, dir, a);
    out[a] = '/';
    memcpy(out + a + 1, leaf, b + 1);
    return 1;
}

#endif // FSDPI_CHECKPOINT_FILES_H
