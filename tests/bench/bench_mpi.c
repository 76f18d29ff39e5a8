/* bench_mpi.c - C11: what two processes need for their gradients over MPI, against MPI itself. */

#include "bench.h"

enum { BYTES = 25 << 20 };

void rows_c11(void)
{
    question questions[] = {{"dp_mpi", "sum", BYTES, 1},
                            {"dp_mpi", "mean", BYTES, 1},
                            {"dp_mpi", "exposed", BYTES, 1},
                            {"mpi", "in_place", BYTES, 1},
                            {"mpi", "apart", BYTES, 1}};
    entrant e[5];
    for (int i = 0; i < 5; i++)
        e[i] = (entrant){.once = peer_once, .user = &questions[i]};
    take_turns(e, 5);
    report_share("C11 over MPI, 25 MiB, against MPI_Allreduce", &e[0].times,
                 faster_of(&e[3].times, &e[4].times), NULL, 1.1);
    report_share("C11 the same, the mean of it", &e[1].times, faster_of(&e[3].times, &e[4].times),
                 NULL, 1.1);
    report_share("C11 what backward does not hide, of the reduction", &e[2].times, &e[1].times,
                 NULL, 0.2);
}
