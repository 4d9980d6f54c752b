/* netns.h - simulated hosts for tests: network namespaces of one test, each with an eth0 at
   10.77.HOST.2. They reach each other through a router (the test's process, over veth pairs) or
   through a wire (a process between tun devices that can delay, drop and cut). Namespaces have no
   names: they end with the processes inside them, however those end. Needs root and iproute2.
   Include it after harness.h.

   SPDX-License-Identifier: MIT */
#ifndef NETNS_H
#define NETNS_H
#include <linux/if_tun.h> /* TUNSETIFF */
#include <net/if.h>       /* ifreq */
#include <poll.h>         /* ppoll */
#include <sched.h>        /* setns, unshare */
#include <sys/ioctl.h>    /* ioctl */
#include <sys/prctl.h>    /* prctl: the wire ends with the test */

enum { N_HOSTS = 4, N_MTU = 1500, N_QUEUE = 8192 };

static int n_router = -1, n_host[N_HOSTS]; /* descriptors of the namespaces */

/* Runs a command in this process's namespace. Returns 0 on success. */
H_FN H_PRINTF(1, 2) int n_run(const char *format, ...) {
    char command[400];
    va_list args;
    va_start(args, format);
    vsnprintf(command, sizeof command, format, args);
    va_end(args);
    return system(command);
}

H_FN void n_enter(int space) { CHECK_EQ_INT(setns(space, CLONE_NEWNET), 0); }

H_FN int n_make(void) {
    int fd = -1;
    if (!unshare(CLONE_NEWNET)) fd = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    if (fd >= 0 && n_run("ip link set lo up")) fd = -1;
    return fd;
}

/* Creates the router and `count` empty hosts, and enters the router's namespace. Returns NULL, or
   the reason why it cannot. */
H_FN const char *n_begin(int count) {
    if (geteuid()) return "network namespaces need root";
    if (n_run("ip -V >/dev/null 2>&1")) return "iproute2 is not installed";
    for (int h = 0; h < count; h++)
        if ((n_host[h] = n_make()) < 0) return "network namespaces are not permitted here";
    return (n_router = n_make()) < 0 ? "network namespaces are not permitted here" : NULL;
}

/* A link passes nothing until the kernel has seen that both ends are up. Waits for that. */
H_FN void n_await_link(int host, const char *device) {
    int64_t end = h_now_ms() + 10000;
    if (host >= 0) n_enter(n_host[host]);
    while (n_run("ip link show dev %s | grep -q 'state UP'", device) && h_now_ms() < end)
        usleep(5000);
    if (host >= 0) n_enter(n_router);
}

/* Creates hosts on veth pairs: v0, v1, ... are the router's ends. Returns NULL, or the reason why
   it cannot. */
H_FN const char *n_hosts(int count) {
    const char *why = n_begin(count);
    if (why) return why;
    if (n_run("echo 1 >/proc/sys/net/ipv4/ip_forward")) return "/proc/sys cannot be written";
    for (int h = 0; h < count; h++) {
        if (n_run("ip link add v%d type veth peer name eth0 netns /proc/%d/fd/%d 2>/dev/null &&"
                  "ip addr add 10.77.%d.1/24 dev v%d && ip link set v%d up",
                  h, (int)getpid(), n_host[h], h, h, h))
            return "the kernel has no veth devices";
        n_enter(n_host[h]);
        CHECK_EQ_INT(n_run("ip addr add 10.77.%d.2/24 dev eth0 && ip link set eth0 up &&"
                           "ip route add default via 10.77.%d.1",
                           h, h),
                     0);
        n_enter(n_router);
    }
    for (int h = 0; h < count; h++) {
        char device[16];
        snprintf(device, sizeof device, "v%d", h);
        n_await_link(-1, device);
        n_await_link(h, "eth0");
    }
    return NULL;
}

/* ---- a wire that is not perfect -------------------------------------------------------------- */

typedef struct {
    int delay_us, jitter_us, loss; /* loss: packets per 10,000. Order is kept */
    int cut[N_HOSTS];              /* bits: 1: drop packets from this host, 2: drop packets to it */
    int64_t carried, lost;
    int tun[N_HOSTS], count;
    pid_t pid;
} n_wire;

typedef struct {
    int64_t due_ns;
    int to, length;
    unsigned char bytes[N_MTU];
} n_packet;

H_FN int64_t n_now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Reads one packet from a host into *p. Returns 0 if there was none. */
H_FN int n_wire_take(n_wire *w, int from, n_packet *p, uint64_t *random, int64_t *last_due) {
    ssize_t length = read(w->tun[from], p->bytes, sizeof p->bytes);
    int cut_from = __atomic_load_n(&w->cut[from], __ATOMIC_RELAXED) & 1;
    if (length < 20) return 0;
    p->to = p->bytes[18]; /* the host in 10.77.HOST.2, from an IPv4 header */
    p->length = (int)length;
    int lost = p->bytes[0] >> 4 != 4 || p->to >= w->count || cut_from ||
               __atomic_load_n(&w->cut[p->to], __ATOMIC_RELAXED) & 2 ||
               (int)(h_rand64(random) % 10000) < w->loss;
    int64_t delay = w->delay_us;
    if (w->jitter_us) delay += (int64_t)(h_rand64(random) % (uint64_t)w->jitter_us);
    p->due_ns = n_now_ns() + delay * 1000;
    if (p->due_ns < *last_due) p->due_ns = *last_due;
    if (lost) w->lost++, p->length = 0;
    else w->carried++, *last_due = p->due_ns;
    return 1;
}

H_FN __attribute__((noreturn)) void n_wire_main(n_wire *w) {
    n_packet *queue = (n_packet *)calloc(N_QUEUE, sizeof *queue);
    struct pollfd polls[N_HOSTS];
    uint64_t random = h_seed(), head = 0, tail = 0;
    int64_t last_due = 0;
    for (int h = 0; h < w->count; h++) polls[h].fd = w->tun[h], polls[h].events = POLLIN;
    for (;;) {
        struct timespec nap = {0, 50000000};
        for (; head < tail && queue[head % N_QUEUE].due_ns <= n_now_ns(); head++) {
            const n_packet *p = &queue[head % N_QUEUE];
            if (write(w->tun[p->to], p->bytes, (size_t)p->length) < 0) w->lost++;
        }
        if (head < tail) nap.tv_nsec = (long)(queue[head % N_QUEUE].due_ns - n_now_ns());
        if (nap.tv_nsec > 50000000) nap.tv_nsec = 50000000;
        if (nap.tv_nsec > 0) (void)ppoll(polls, (nfds_t)w->count, &nap, NULL);
        for (int h = 0; h < w->count; h++)
            while (tail - head < N_QUEUE &&
                   n_wire_take(w, h, &queue[tail % N_QUEUE], &random, &last_due))
                tail += queue[tail % N_QUEUE].length > 0;
    }
}

/* Creates hosts on a wire; this process may change *w while it runs. Returns NULL, or the reason
   why it cannot. */
H_FN const char *n_wires(int count, n_wire *w) {
    const char *why = n_begin(count);
    if (why) return why;
    w->count = count;
    for (int h = 0; h < count; h++) {
        struct ifreq request;
        memset(&request, 0, sizeof request);
        snprintf(request.ifr_name, sizeof request.ifr_name, "eth0");
        request.ifr_flags = IFF_TUN | IFF_NO_PI;
        n_enter(n_host[h]);
        w->tun[h] = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
        if (w->tun[h] < 0 || ioctl(w->tun[h], TUNSETIFF, &request)) return "no /dev/net/tun here";
        CHECK_EQ_INT(n_run("ip addr add 10.77.%d.2/24 dev eth0 && ip link set eth0 up &&"
                           "ip route add default dev eth0",
                           h),
                     0);
    }
    n_enter(n_router);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (!pid) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        n_wire_main(w);
    }
    w->pid = pid;
    for (int h = 0; h < count; h++) close(w->tun[h]);
    return NULL;
}

H_FN void n_wire_end(n_wire *w) {
    kill(w->pid, SIGKILL);
    waitpid(w->pid, NULL, 0);
}
#endif
