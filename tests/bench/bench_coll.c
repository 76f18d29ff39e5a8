/* bench_coll.c - C1, C2, C3: all-reduce between devices of a process, against two processes. */

#include <stdio.h>
#include <stdlib.h>
#include "bench.h"

/* Behind a peer, whose buffers went through the same caches, the first passes are slower than all
   that follow: whoever came first would pay for both. */
enum { WARM_CALLS = 6 };

typedef struct reduction {
    dp_ctx *ctx;
    team *team;
    dp_part parts[MAX_DEVICES];
    sum_job sum;
    size_t bytes;
    int devices, calls;
} reduction;

static void open_reduction(reduction *r, int devices, size_t bytes, int calls)
{
    dp_info info;
    *r = (reduction){.devices = devices, .bytes = bytes, .calls = calls};
    r->ctx = open_devices(devices);
    must(dp_info_get(r->ctx, &info));
    r->team = team_new(devices < info.core_count ? devices : info.core_count);
    r->sum = (sum_job){.buffer_count = devices, .count = bytes / sizeof(float)};
    for (int i = 0; i < devices; i++) {
        r->sum.data[i] = new_floats(bytes);
        r->parts[i] = (dp_part){.send = r->sum.data[i], .recv = r->sum.data[i]};
    }
}

static void close_reduction(reduction *r)
{
    for (int i = 0; i < r->devices; i++)
        free(r->sum.data[i]);
    team_free(r->team);
    dp_close(r->ctx);
}

static void all_reduce(const reduction *r)
{
    must(dp_all_reduce(r->ctx, r->parts, r->bytes / sizeof(float), DP_F32, DP_OP_SUM));
}

/* The numbers double until they are infinite, which takes no longer to add. */
static double dp_once(void *user)
{
    const reduction *r = user;
    for (int i = 0; i < WARM_CALLS; i++)
        all_reduce(r);
    double start = now_ns();
    for (int i = 0; i < r->calls; i++)
        all_reduce(r);
    return (now_ns() - start) / r->calls;
}

static double limit_once(void *user)
{
    reduction *r = user;
    team_wake(r->team);
    for (int i = 0; i < WARM_CALLS; i++)
        team_run(r->team, sum_part, &r->sum);
    double start = now_ns();
    for (int i = 0; i < r->calls; i++)
        team_run(r->team, sum_part, &r->sum);
    double spent = now_ns() - start;
    team_sleep(r->team);
    return spent / r->calls;
}

static void rows_c1_of(int mib)
{
    char what[64];
    reduction r;
    size_t bytes = (size_t)mib << 20;
    open_reduction(&r, 2, bytes, 1);
    question gloo = {"gloo", "in_place", bytes, 1};
    question mpi = {"mpi", "in_place", bytes, 1};
    question mpi_apart = {"mpi", "apart", bytes, 1};
    entrant e[] = {{.once = dp_once, .user = &r},
                   {.once = limit_once, .user = &r},
                   {.once = peer_once, .user = &gloo},
                   {.once = peer_once, .user = &mpi},
                   {.once = peer_once, .user = &mpi_apart}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    snprintf(what, sizeof(what), "C1 all-reduce %d MiB, against gloo", mib);
    report_speed(what, &e[0].times, &e[2].times, &e[1].times, 5);
    snprintf(what, sizeof(what), "C1 all-reduce %d MiB, against Open MPI", mib);
    report_speed(what, &e[0].times, faster_of(&e[3].times, &e[4].times), &e[1].times, 3);
    snprintf(what, sizeof(what), "C1 all-reduce %d MiB, of the limit", mib);
    report_speed(what, &e[0].times, NULL, &e[1].times, 0.95);
    close_reduction(&r);
}

void rows_c1(void)
{
    rows_c1_of(25);
    rows_c1_of(100);
}

static void rows_c2_of(int kib, int calls, double at_most)
{
    char what[64];
    reduction r;
    size_t bytes = (size_t)kib << 10;
    open_reduction(&r, 2, bytes, calls);
    question mpi = {"mpi", "in_place", bytes, calls};
    question mpi_apart = {"mpi", "apart", bytes, calls};
    entrant e[] = {{.once = dp_once, .user = &r},
                   {.once = limit_once, .user = &r},
                   {.once = peer_once, .user = &mpi},
                   {.once = peer_once, .user = &mpi_apart}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    snprintf(what, sizeof(what), "C2 all-reduce %d KiB, against Open MPI", kib);
    report_share(what, &e[0].times, faster_of(&e[2].times, &e[3].times), &e[1].times, at_most);
    snprintf(what, sizeof(what), "C2 all-reduce %d KiB, of the limit", kib);
    report_share(what, &e[0].times, NULL, &e[1].times, 1.3);
    close_reduction(&r);
}

void rows_c2(void)
{
    rows_c2_of(1, 4000, 0.2);
    rows_c2_of(64, 500, 0.1);
}

void rows_c3(void)
{
    for (int devices = 4; devices <= 8; devices *= 2) {
        char what[64];
        reduction r;
        open_reduction(&r, devices, (size_t)25 << 20, 1);
        entrant e[] = {{.once = dp_once, .user = &r}, {.once = limit_once, .user = &r}};
        take_turns(e, sizeof(e) / sizeof(e[0]));
        snprintf(what, sizeof(what), "C3 all-reduce 25 MiB, %d devices", devices);
        report_speed(what, &e[0].times, NULL, &e[1].times, 0.95);
        close_reduction(&r);
    }
}
