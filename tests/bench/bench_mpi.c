/* bench_mpi.c - C11: what two processes need for their gradients over MPI, against MPI itself. */

#include "bench.h"

typedef struct question {
    peer_process *peer;
    const char *how;
} question;

enum { BYTES = 25 << 20 };

static double ask(void *user)
{
    const question *q = user;
    return peer_ask(q->peer, q->how, BYTES, 1);
}

void rows_c11(void)
{
    peer_process *dp = peer_of("dp_mpi", bench.directory), *mpi = peer_of("mpi", bench.directory);
    question questions[] = {
        {dp, "sum"}, {dp, "mean"}, {dp, "exposed"}, {mpi, "in_place"}, {mpi, "apart"}};
    entrant e[5];
    for (int i = 0; i < 5; i++)
        e[i] = (entrant){.once = ask, .user = &questions[i]};
    take_turns(e, 5);
    report_share("C11 over MPI, 25 MiB, against MPI_Allreduce", &e[0].times,
                 faster_of(&e[3].times, &e[4].times), NULL, 1.1);
    report_share("C11 the same, the mean of it", &e[1].times, faster_of(&e[3].times, &e[4].times),
                 NULL, 1.1);
    report_share("C11 what backward does not hide, of the reduction", &e[2].times, &e[1].times,
                 NULL, 0.2);
}
