/* bench_shm.c - C11b: all-reduce between two processes of this machine, over shared memory. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "bench.h"

enum { WARM_CALLS = 6, MAX_BYTES = 25 << 20 };

typedef struct order { /* what the other process is to do; it sleeps in between */
    size_t bytes;
    int calls;   /* 0: to end */
    bool shared; /* in memory of dp_shared_alloc */
} order;

typedef struct job {
    duo duo;
    float *data[2]; /* own, shared */
    order now;
} job;

static void all_reduce(const job *j)
{
    float *data = j->data[j->now.shared];
    const dp_part part = {.send = data, .recv = data};
    must(dp_all_reduce(j->duo.ctx, &part, j->now.bytes / sizeof(float), DP_F32, DP_OP_SUM));
}

static double serve(const job *j)
{
    for (int i = 0; i < WARM_CALLS; i++)
        all_reduce(j);
    double start = now_ns();
    for (int i = 0; i < j->now.calls; i++)
        all_reduce(j);
    return (now_ns() - start) / j->now.calls;
}

static void open_job(job *j)
{
    duo_open(&j->duo);
    j->data[0] = new_floats(MAX_BYTES);
    j->data[1] = dp_shared_alloc(dp_scope_begin(j->duo.ctx), MAX_BYTES);
    memcpy(j->data[1], j->data[0], MAX_BYTES);
    if (j->duo.process == 0)
        return;
    while (duo_receive(&j->duo, &j->now, sizeof(j->now)) && j->now.calls > 0)
        serve(j);
    _exit(EXIT_SUCCESS);
}

static void close_job(job *j)
{
    order end = {0}; /* peers may hold the socket open */
    duo_send(&j->duo, &end, sizeof(end));
    duo_close(&j->duo);
    free(j->data[0]);
}

static double dp_once(void *user)
{
    job *j = user;
    return duo_send(&j->duo, &j->now, sizeof(j->now)) ? serve(j) : -1;
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

static void rows_of(job *j, const char *size, size_t bytes, int calls, bool shared)
{
    char what[80];
    const char *how = shared ? "shared memory, in place" : "shared memory";
    limit l = {.team = team_new(2), .calls = calls};
    l.sum = (sum_job){.buffer_count = 2, .count = bytes / sizeof(float)};
    l.sum.data[0] = new_floats(bytes);
    l.sum.data[1] = new_floats(bytes);
    j->now = (order){bytes, calls, shared};
    question gloo = {peer_of("gloo", bench.directory), "in_place", bytes, calls};
    question mpi = {peer_of("mpi", bench.directory), "in_place", bytes, calls};
    question mpi_apart = {mpi.peer, "apart", bytes, calls};
    entrant e[] = {{.once = dp_once, .user = j},
                   {.once = limit_once, .user = &l},
                   {.once = peer_once, .user = &gloo},
                   {.once = peer_once, .user = &mpi},
                   {.once = peer_once, .user = &mpi_apart}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    snprintf(what, sizeof(what), "C11b %s, %s, against Open MPI", how, size);
    report_speed(what, &e[0].times, faster_of(&e[3].times, &e[4].times), &e[1].times, 2);
    snprintf(what, sizeof(what), "C11b %s, %s, against gloo", how, size);
    report_speed(what, &e[0].times, &e[2].times, &e[1].times, 12);
    free(l.sum.data[0]);
    free(l.sum.data[1]);
    team_free(l.team);
}

void rows_c11b(void)
{
    job j;
    open_job(&j);
    rows_of(&j, "25 MiB", (size_t)25 << 20, 1, true);
    rows_of(&j, "25 MiB", (size_t)25 << 20, 1, false);
    rows_of(&j, "1 KiB", (size_t)1 << 10, 4000, false);
    close_job(&j);
}
