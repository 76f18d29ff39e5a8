/* hosts.h - hosts on this machine, each with a network of its own, which a switch joins. The switch
   is a thread of the test: any link can be cut without a word in either direction, be slow, or be
   looked at, and it all needs no module of the kernel but tun. A test file defines _GNU_SOURCE
   before anything else. */

#ifndef HOSTS_H
#define HOSTS_H

#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <pthread.h>
#include <sched.h>
#include <sys/ioctl.h>
#include "mortal.h"

enum { HOSTS = 8, FRAME_BYTES = 2048 };

static struct {
    atomic_bool cut[HOSTS][HOSTS]; /* from, to */
    atomic_int late_ms[HOSTS][HOSTS];
} * wires; /* all processes see them */

/* Called by the switch before it looks at what is cut; NULL: nobody looks at frames. */
static void (*on_frame)(int from, int to, const unsigned char *data, size_t bytes);

typedef struct frame { /* that is under way */
    struct frame *next;
    double due_ms;
    int to;
    size_t bytes;
    unsigned char data[FRAME_BYTES];
} frame;

static int host_count, taps[HOSTS], networks[HOSTS];

static inline void cut_link(int a, int b, bool cut)
{
    atomic_store(&wires->cut[a][b], cut);
    atomic_store(&wires->cut[b][a], cut);
}

static inline void cut_host(int host)
{
    for (int other = 0; other < host_count; other++)
        if (other != host)
            cut_link(host, other, true);
}

static inline void slow_link(int a, int b, int ms)
{
    atomic_store(&wires->late_ms[a][b], ms);
    atomic_store(&wires->late_ms[b][a], ms);
}

/* Gives a device of the network that this thread is in an address, unless that is 0, and starts
   it. */
static inline bool start_device(const char *name, uint32_t address)
{
    struct ifreq what = {.ifr_flags = 0};
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr = {htonl(address)}};
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    snprintf(what.ifr_name, sizeof what.ifr_name, "%s", name);
    memcpy(&what.ifr_addr, &at, sizeof at);
    bool well = address == 0 || ioctl(fd, SIOCSIFADDR, &what) == 0;
    at.sin_addr.s_addr = htonl(0xffffff00);
    memcpy(&what.ifr_netmask, &at, sizeof at);
    well = well && (address == 0 || ioctl(fd, SIOCSIFNETMASK, &what) == 0);
    what.ifr_flags = IFF_UP | IFF_RUNNING;
    well = well && ioctl(fd, SIOCSIFFLAGS, &what) == 0;
    close(fd);
    return well;
}

/* Makes 10.79.0.host+1; false: this is not allowed here. */
static inline bool make_host(int host)
{
    struct ifreq what = {.ifr_flags = IFF_TUN | IFF_NO_PI};
    snprintf(what.ifr_name, sizeof what.ifr_name, "wire");
    if (unshare(CLONE_NEWNET) != 0)
        return false;
    networks[host] = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
    taps[host] = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
    return networks[host] >= 0 && taps[host] >= 0 && ioctl(taps[host], TUNSETIFF, &what) == 0 &&
           start_device("lo", 0) && start_device("wire", 0x0a4f0001 + (uint32_t)host);
}

/* Puts a frame among those under way, behind those that are due as soon. */
static inline void send_later(frame **first, frame *one)
{
    while (*first != NULL && (*first)->due_ms <= one->due_ms)
        first = &(*first)->next;
    one->next = *first;
    *first = one;
}

/* Takes what a host sends, all of it. Only IPv4 goes further. */
static inline void take_frames(int from, frame **first)
{
    frame one = {.next = NULL};
    for (ssize_t got; (got = read(taps[from], one.data, sizeof one.data)) > 0;) {
        int to = got > 20 && one.data[0] >> 4 == 4 ? one.data[19] - 1 : -1;
        if (to < 0 || to >= host_count || to == from)
            continue;
        if (on_frame != NULL)
            on_frame(from, to, one.data, (size_t)got);
        if (atomic_load(&wires->cut[from][to]))
            continue;
        frame *kept = malloc(sizeof *kept);
        CHECK(kept != NULL);
        memcpy(kept->data, one.data, (size_t)got);
        kept->bytes = (size_t)got;
        kept->to = to;
        kept->due_ms = now_ms() + atomic_load(&wires->late_ms[from][to]);
        send_later(first, kept);
    }
}

static inline void *run_switch(void *unused)
{
    struct pollfd watch[HOSTS];
    frame *first = NULL;
    (void)unused;
    for (;;) {
        double now = now_ms();
        for (; first != NULL && first->due_ms <= now;) {
            frame *one = first;
            first = one->next;
            if (write(taps[one->to], one->data, one->bytes) < 0) {
                /* it is lost */
            }
            free(one);
        }
        for (int h = 0; h < host_count; h++)
            watch[h] = (struct pollfd){.fd = taps[h], .events = POLLIN};
        (void)poll(watch, (nfds_t)host_count,
                   first != NULL ? 1 + (int)(first->due_ms - now) : 1000);
        for (int h = 0; h < host_count; h++)
            take_frames(h, &first);
    }
    return NULL;
}

/* Starts a process for each letter: that of its host. */
static inline void start_on_hosts(const char *hosts, void (*body)(void))
{
    pthread_t thread;
    host_count = 0;
    for (const char *host = hosts; *host != '\0'; host++)
        host_count = *host - 'a' >= host_count ? *host - 'a' + 1 : host_count;
    wires = memory_of_all(sizeof *wires);
    met = memory_of_all(sizeof *met);
    for (int h = 0; h < host_count; h++)
        if (!make_host(h))
            SKIP("only root may have networks of its own, and only where there is /dev/net/tun");
    nobody_launched_us();
    world = (int)strlen(hosts);
    for (int p = 0; p < world; p++) {
        CHECK_INT(setns(networks[hosts[p] - 'a'], CLONE_NEWNET), 0);
        set("DP_MACHINE", (char[]){hosts[p], '\0'});
        pids[p] = start(p, body);
    }
    CHECK_INT(pthread_create(&thread, NULL, run_switch, NULL), 0);
}

/* At the address of the first host. */
static inline void use_hosts(void)
{
    without_gpus();
    launched_by(&launchers[0], me, world);
    set("DP_ADDR", "10.79.0.1:7000");
    set("DP_SECRET", "of this test");
}

#endif /* HOSTS_H */
