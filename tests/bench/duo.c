/* duo.c - two processes of this machine with a context over both. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench.h"

static bool transfer(int fd, void *data, size_t bytes, bool out)
{
    for (size_t done = 0; done < bytes;) {
        char *at = (char *)data + done;
        ssize_t moved = out ? write(fd, at, bytes - done) : read(fd, at, bytes - done);
        if (moved == 0 || (moved < 0 && errno != EINTR))
            return false;
        done += moved > 0 ? (size_t)moved : 0;
    }
    return true;
}

bool duo_send(const duo *p, void *data, size_t bytes)
{
    return transfer(p->end, data, bytes, true);
}

bool duo_receive(const duo *p, void *data, size_t bytes)
{
    return transfer(p->end, data, bytes, false);
}

static dp_status swap(const void *in, void *out, size_t bytes_each, void *user)
{
    const duo *p = user;
    char *all = out, *own = all + (size_t)p->process * bytes_each;
    memcpy(own, in, bytes_each);
    bool good = duo_send(p, own, bytes_each) &&
                duo_receive(p, all + (size_t)!p->process * bytes_each, bytes_each);
    return good ? DP_OK : dp_error(DP_ERR_REMOTE, "the other process has gone");
}

/* Variables make each process believe to be on a machine of its own. */
static void open_apart(duo *p, const dp_config *config)
{
    setenv("DP_MACHINE", p->process == 0 ? "one" : "another", 1);
    setenv("DP_INTERFACE", "lo", 1);
    must(dp_open(config, &p->ctx));
    unsetenv("DP_MACHINE"); /* of contexts that come later */
    unsetenv("DP_INTERFACE");
}

static void open_duo(duo *p, bool apart)
{
    int ends[2];
    *p = (duo){0};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        abort();
    fflush(NULL);
    p->other = fork();
    p->process = p->other == 0;
    p->end = ends[p->process];
    close(ends[!p->process]);
    const dp_config config = {
        .device_count = 1,
        .bootstrap = {.all_gather = swap, .user = p, .process = p->process, .process_count = 2}};
    if (apart)
        open_apart(p, &config);
    else
        must(dp_open(&config, &p->ctx));
}

void duo_open(duo *p)
{
    open_duo(p, false);
}

void duo_open_apart(duo *p)
{
    open_duo(p, true);
}

void duo_close(duo *p)
{
    close(p->end);
    waitpid(p->other, NULL, 0);
    dp_close(p->ctx);
}
