/* bench_shm.c - C11b: all-reduce between two processes of this machine, over shared memory. */

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include "bench.h"

enum { WARM_CALLS = 6, MAX_BYTES = 25 << 20 };

typedef struct order { /* what the other process is to do; it sleeps in between */
    size_t bytes;
    int calls; /* 0: to end */
} order;

typedef struct pair {
    int end; /* of a pair of sockets */
    int process;
    pid_t other;
    dp_ctx *ctx;
    float *data;
    order now;
} pair;

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

static dp_status swap(const void *in, void *out, size_t bytes_each, void *user)
{
    const pair *p = user;
    char *all = out, *own = all + (size_t)p->process * bytes_each;
    memcpy(own, in, bytes_each);
    bool good = transfer(p->end, own, bytes_each, true) &&
                transfer(p->end, all + (size_t)!p->process * bytes_each, bytes_each, false);
    return good ? DP_OK : dp_error(DP_ERR_REMOTE, "the other process has gone");
}

static void open_half(pair *p)
{
    const dp_config config = {
        .device_count = 1,
        .bootstrap = {.all_gather = swap, .user = p, .process = p->process, .process_count = 2}};
    must(dp_open(&config, &p->ctx));
    p->data = new_floats(MAX_BYTES);
}

static void all_reduce(const pair *p)
{
    const dp_part part = {.send = p->data, .recv = p->data};
    must(dp_all_reduce(p->ctx, &part, p->now.bytes / sizeof(float), DP_F32, DP_OP_SUM));
}

static double serve(const pair *p)
{
    for (int i = 0; i < WARM_CALLS; i++)
        all_reduce(p);
    double start = now_ns();
    for (int i = 0; i < p->now.calls; i++)
        all_reduce(p);
    return (now_ns() - start) / p->now.calls;
}

static void follow(pair *p)
{
    open_half(p);
    while (transfer(p->end, &p->now, sizeof(p->now), false) && p->now.calls > 0)
        serve(p);
    _exit(EXIT_SUCCESS);
}

static void open_pair(pair *p)
{
    int ends[2];
    *p = (pair){0};
    if (socketpair(AF_UNIX, SOCK_STREAM, 0, ends) != 0)
        abort();
    fflush(NULL);
    p->other = fork();
    p->process = p->other == 0;
    p->end = ends[p->process];
    close(ends[!p->process]);
    if (p->other == 0)
        follow(p);
    open_half(p);
}

static void close_pair(pair *p)
{
    order end = {0}; /* peers may hold the socket open */
    transfer(p->end, &end, sizeof(end), true);
    close(p->end);
    waitpid(p->other, NULL, 0);
    dp_close(p->ctx);
    free(p->data);
}

static double dp_once(void *user)
{
    pair *p = user;
    order now = p->now;
    return transfer(p->end, &now, sizeof(now), true) ? serve(p) : -1;
}

typedef struct limit {
    team *team;
    sum_job sum;
    int calls;
} limit;

/* What the definition of the table says: every buffer is read once and written once. */
static double limit_once(void *user)
{
    limit *l = user;
    team_wake(l->team);
    for (int i = 0; i < WARM_CALLS; i++)
        team_run(l->team, sum_part, &l->sum);
    double start = now_ns();
    for (int i = 0; i < l->calls; i++)
        team_run(l->team, sum_part, &l->sum);
    double spent = now_ns() - start;
    team_sleep(l->team);
    return spent / l->calls;
}

typedef struct question {
    peer_process *peer;
    const char *how;
    size_t bytes;
    int calls;
} question;

static double peer_once(void *user)
{
    const question *q = user;
    return peer_ask(q->peer, q->how, q->bytes, q->calls);
}

static void rows_of(pair *p, const char *size, size_t bytes, int calls)
{
    char what[64];
    limit l = {.team = team_new(2), .calls = calls};
    l.sum = (sum_job){.buffer_count = 2, .count = bytes / sizeof(float)};
    l.sum.data[0] = new_floats(bytes);
    l.sum.data[1] = new_floats(bytes);
    p->now = (order){bytes, calls};
    question gloo = {peer_of("gloo", bench.directory), "in_place", bytes, calls};
    question mpi = {peer_of("mpi", bench.directory), "in_place", bytes, calls};
    question mpi_apart = {mpi.peer, "apart", bytes, calls};
    entrant e[] = {{.once = dp_once, .user = p},
                   {.once = limit_once, .user = &l},
                   {.once = peer_once, .user = &gloo},
                   {.once = peer_once, .user = &mpi},
                   {.once = peer_once, .user = &mpi_apart}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    snprintf(what, sizeof(what), "C11b shared memory %s, against Open MPI", size);
    report_speed(what, &e[0].times, faster_of(&e[3].times, &e[4].times), &e[1].times, 2);
    snprintf(what, sizeof(what), "C11b shared memory %s, against gloo", size);
    report_speed(what, &e[0].times, &e[2].times, &e[1].times, 12);
    free(l.sum.data[0]);
    free(l.sum.data[1]);
    team_free(l.team);
}

void rows_c11b(void)
{
    pair p;
    open_pair(&p);
    rows_of(&p, "25 MiB", (size_t)25 << 20, 1);
    rows_of(&p, "1 KiB", (size_t)1 << 10, 4000);
    close_pair(&p);
}
