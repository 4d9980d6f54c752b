/* base/os_net.h - sockets and events of the operating system (Linux)

   Callers: backends/fsdp_store_server.h and backends/fsdp_shm_world.h (fsdpi_accept),
     backends/fsdp_store.h (fsdpi_event) and others.

   A part of fsdp.h. SPDX-License-Identifier: MIT (full text at the end of fsdp.h) */
#ifndef FSDP_H
#include "../../fsdp.h"
#endif
#ifndef FSDPI_BASE_OS_NET_H
#define FSDPI_BASE_OS_NET_H

#include "hash.h"
#include "macros.h"
#include "os.h"

#include <stddef.h> // offsetof
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h> // sockaddr_un
#include <unistd.h>
#ifndef SO_PEERCRED
#include <asm/socket.h> // in strict C99 sys/socket.h of glibc hides SO_...; musl's does not
#endif

// Returns a socket that does not block and that an exec closes; -1: see errno.
static FSDPI_UNUSED int fsdpi_socket(int family, int type) {
    return fsdpi_fd(socket(family, type | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// Writes an abstract name, which needs no file and ends with its socket: that of `kind` for this
// user's job. Returns its size.
static FSDPI_UNUSED socklen_t fsdpi_unix_name(const char *kind, const char *job,
                                              struct sockaddr_un *name) {
    memset(name, 0, sizeof *name);
    name->sun_family = AF_UNIX;
    int used = snprintf(name->sun_path + 1, sizeof name->sun_path - 1, "fsdp-%s-%lu-%016llx", kind,
                        (unsigned long)getuid(), (unsigned long long)fsdpi_hash_text(job));
    return (socklen_t)(offsetof(struct sockaddr_un, sun_path) + 1 + (size_t)used);
}

// Returns a connection that does not block and that an exec closes; -1: see errno.
static FSDPI_UNUSED int fsdpi_accept(int listener) {
    return fsdpi_fd((int)fsdpi_syscall(SYS_accept4, (long)listener, NULL, NULL,
                                       (long)(SOCK_CLOEXEC | SOCK_NONBLOCK)));
}

// Returns a descriptor that poll reports as readable once another thread has written 8 bytes to it.
static FSDPI_UNUSED int fsdpi_event(void) {
    return fsdpi_fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
}

// Returns 1 if the other end of a unix socket belongs to a process of this user.
static FSDPI_UNUSED int fsdpi_same_user(int fd) {
    int32_t pid_uid_gid[3] = {-1, -1, -1}; // struct ucred: strict C99 hides it, too
    socklen_t size = sizeof pid_uid_gid;
    return !getsockopt(fd, SOL_SOCKET, SO_PEERCRED, pid_uid_gid, &size) &&
           (uint32_t)pid_uid_gid[1] == (uint32_t)getuid();
}

#endif // FSDPI_BASE_OS_NET_H
