/* bench_processes.c - collectives and messages between two processes of this machine. C11b: over
   shared memory. C11c: over TCP, as between machines. */

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "bench.h"

enum {
    WARM_CALLS = 6,
    MAX_BYTES = 25 << 20,
    MAX_BYTES_APART = 100 << 20,
    SMALL_CALLS = 4000,
    LARGE_CALLS = 4
};

typedef enum verb { ALL_REDUCE, BROADCAST, ALL_GATHER, BARRIER, MESSAGE } verb;

typedef struct order { /* what the other process is to do; it sleeps in between */
    verb verb;
    size_t bytes;
    int calls;   /* 0: to end */
    bool shared; /* in memory of dp_shared_alloc */
} order;

typedef struct job {
    duo duo;
    float *data[2]; /* own, shared */
    order now;
} job;

static void there_and_back(const job *j, float *data, size_t count)
{
    dp_ctx *ctx = j->duo.ctx;
    const dp_tensor tensor = dp_wrap(data, DP_F32, 1, (const int64_t[]){(int64_t)count});
    if (j->duo.process == 0)
        must(dp_send(ctx, &tensor, 1, 0));
    must(dp_recv(ctx, &tensor, 1 - j->duo.process, 0));
    if (j->duo.process == 1)
        must(dp_send(ctx, &tensor, 0, 0));
}

static void call(const job *j)
{
    dp_ctx *ctx = j->duo.ctx;
    float *data = j->data[j->now.shared];
    size_t count = j->now.bytes / sizeof(float);
    const dp_part part = {.send = data, .recv = data}, apart = {.send = data, .recv = data + count};
    switch (j->now.verb) {
    case ALL_REDUCE:
        must(dp_all_reduce(ctx, &part, count, DP_F32, DP_OP_SUM));
        break;
    case BROADCAST:
        must(dp_broadcast(ctx, &part, count, DP_F32, 0));
        break;
    case ALL_GATHER:
        must(dp_all_gather(ctx, &apart, count, DP_F32));
        break;
    case BARRIER:
        must(dp_barrier(ctx));
        break;
    case MESSAGE:
        there_and_back(j, data, count);
        break;
    }
}

static double serve(const job *j)
{
    for (int i = 0; i < WARM_CALLS; i++)
        call(j);
    double start = now_ns();
    for (int i = 0; i < j->now.calls; i++)
        call(j);
    return (now_ns() - start) / j->now.calls;
}

static void follow(job *j)
{
    while (duo_receive(&j->duo, &j->now, sizeof(j->now)) && j->now.calls > 0)
        serve(j);
    _exit(EXIT_SUCCESS);
}

static void open_job(job *j)
{
    duo_open(&j->duo);
    j->data[0] = new_floats(MAX_BYTES);
    j->data[1] = dp_shared_alloc(dp_scope_begin(j->duo.ctx), MAX_BYTES);
    memcpy(j->data[1], j->data[0], MAX_BYTES);
    if (j->duo.process == 1)
        follow(j);
}

static void open_job_apart(job *j)
{
    duo_open_apart(&j->duo);
    j->data[0] = new_floats(MAX_BYTES_APART);
    j->data[1] = NULL;
    if (j->duo.process == 1)
        follow(j);
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

static void large_rows(job *j, const char *what, bool shared, double mpi_times, double gloo_times)
{
    char name[80];
    limit l = {.team = team_new(2), .calls = 1};
    l.sum = (sum_job){.buffer_count = 2, .count = MAX_BYTES / sizeof(float)};
    l.sum.data[0] = new_floats(MAX_BYTES);
    l.sum.data[1] = new_floats(MAX_BYTES);
    j->now = (order){ALL_REDUCE, MAX_BYTES, 1, shared};
    question gloo = {"gloo", "in_place", MAX_BYTES, 1};
    question mpi = {"mpi", "in_place", MAX_BYTES, 1};
    question mpi_apart = {"mpi", "apart", MAX_BYTES, 1};
    entrant e[] = {{.once = dp_once, .user = j},
                   {.once = limit_once, .user = &l},
                   {.once = peer_once, .user = &gloo},
                   {.once = peer_once, .user = &mpi},
                   {.once = peer_once, .user = &mpi_apart}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    snprintf(name, sizeof(name), "C11b %s, against Open MPI", what);
    report_speed(name, &e[0].times, faster_of(&e[3].times, &e[4].times), &e[1].times, mpi_times);
    snprintf(name, sizeof(name), "C11b %s, against gloo", what);
    report_speed(name, &e[0].times, &e[2].times, &e[1].times, gloo_times);
    if (shared)
        report_speed("C11b 25 MiB in shared memory, of the limit", &e[0].times, NULL, &e[1].times,
                     0.9);
    free(l.sum.data[0]);
    free(l.sum.data[1]);
    team_free(l.team);
}

static void small_row(job *j, const char *what, verb of, size_t bytes)
{
    static const char *const hows[] = {"in_place", "broadcast", "all_gather", "barrier", "message"};
    char name[80];
    int calls = bytes < MAX_BYTES ? SMALL_CALLS : LARGE_CALLS;
    j->now = (order){of, bytes, calls, false};
    question mpi = {"mpi", hows[of], bytes, calls};
    question mpi_apart = {"mpi", "apart", bytes, calls};
    entrant e[] = {{.once = dp_once, .user = j},
                   {.once = peer_once, .user = &mpi},
                   {.once = peer_once, .user = &mpi_apart}};
    take_turns(e, of == ALL_REDUCE ? 3 : 2);
    snprintf(name, sizeof(name), "C11b %s, against Open MPI", what);
    report_speed(name, &e[0].times,
                 of == ALL_REDUCE ? faster_of(&e[1].times, &e[2].times) : &e[1].times, NULL, 1);
}

void rows_c11b(void)
{
    job j;
    open_job(&j);
    large_rows(&j, "25 MiB in shared memory", true, 4, 6);
    large_rows(&j, "25 MiB", false, 2, 6);
    small_row(&j, "8 B", ALL_REDUCE, 8);
    small_row(&j, "1 KiB", ALL_REDUCE, 1 << 10);
    small_row(&j, "16 KiB", ALL_REDUCE, 16 << 10);
    small_row(&j, "64 KiB", ALL_REDUCE, 64 << 10);
    small_row(&j, "broadcast of 1 KiB", BROADCAST, 1 << 10);
    small_row(&j, "all_gather of 1 KiB each", ALL_GATHER, 1 << 10);
    small_row(&j, "barrier", BARRIER, 4);
    small_row(&j, "a message of 8 B there and back", MESSAGE, 8);
    small_row(&j, "a message of 16 KiB there and back", MESSAGE, 16 << 10);
    small_row(&j, "a message of 25 MiB there and back", MESSAGE, MAX_BYTES);
    close_job(&j);
}

/* ---- C11c ------------------------------------------------------------------------------------ */

/* What the loopback device has carried so far. */
static double loopback_bytes(void)
{
    char line[256];
    double bytes = 0;
    FILE *devices = fopen("/proc/net/dev", "r");
    while (devices != NULL && fgets(line, sizeof(line), devices) != NULL && bytes == 0)
        sscanf(line, " lo: %lf", &bytes);
    if (devices != NULL)
        fclose(devices);
    return bytes;
}

typedef struct carried {
    double (*once)(void *user);
    void *user;
    const char *name;
    double bytes; /* what crosses the network at least */
} carried;

/* No answer if it went another way. */
static double carried_once(void *user)
{
    const carried *c = user;
    double before = loopback_bytes(), ns = c->once(c->user);
    if (ns < 0 || loopback_bytes() - before >= c->bytes)
        return ns;
    fprintf(stderr, "bench: %s was to use TCP, and the loopback device did not see it\n", c->name);
    return -1;
}

static void row_apart(job *j, const char *what, size_t bytes, int calls, double mpi_times)
{
    char name[80];
    double least = (double)bytes * calls;
    j->now = (order){ALL_REDUCE, bytes, calls, false};
    question gloo = {"gloo", "in_place", bytes, calls}, mpi = {"mpi_tcp", "in_place", bytes, calls},
             mpi_apart = {"mpi_tcp", "apart", bytes, calls},
             torch = {"torch_other", "all_reduce", bytes, calls};
    carried ways[] = {{dp_once, j, "dp.h", least},
                      {peer_once, &gloo, "gloo", least},
                      {peer_once, &mpi, "Open MPI", least},
                      {peer_once, &mpi_apart, "Open MPI", least},
                      {peer_once, &torch, "the other torch", least}};
    entrant e[5];
    for (int i = 0; i < 5; i++)
        e[i] = (entrant){.once = carried_once, .user = &ways[i]};
    take_turns(e, bench.torch != NULL ? 5 : 4);
    snprintf(name, sizeof(name), "C11c %s over TCP, against Open MPI", what);
    report_speed(name, &e[0].times, faster_of(&e[2].times, &e[3].times), NULL, mpi_times);
    snprintf(name, sizeof(name), "C11c %s over TCP, against gloo", what);
    report_speed(name, &e[0].times, &e[1].times, NULL, 2);
    if (bench.torch == NULL)
        return;
    snprintf(name, sizeof(name), "C11c %s, gloo of %.20s", what, peer_library(torch.peer));
    report_speed(name, &e[0].times, &e[4].times, NULL, 2);
}

void rows_c11c(void)
{
    job j;
    open_job_apart(&j);
    row_apart(&j, "8 B", 8, 1000, 1);
    row_apart(&j, "64 KiB", 64 << 10, 200, 1.2);
    row_apart(&j, "25 MiB", 25 << 20, 1, 1.2);
    row_apart(&j, "100 MiB", MAX_BYTES_APART, 1, 1.2);
    close_job(&j);
}
