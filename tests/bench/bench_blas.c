/* bench_blas.c - C18: a net that uses OpenMP and OpenBLAS, in a process of its own
   (peers/blas.c). */

#include "bench.h"

enum { BLAS_STEPS = 2 }; /* a measurement */

void rows_c18(void)
{
    question naive = {"blas", "naive", 0, BLAS_STEPS}, tuned = {"blas", "tuned", 0, BLAS_STEPS},
             alone = {"blas", "alone", 0, BLAS_STEPS};
    entrant e[] = {{.once = peer_once, .user = &naive},
                   {.once = peer_once, .user = &tuned},
                   {.once = peer_once, .user = &alone}};
    take_turns(e, sizeof(e) / sizeof(e[0]));
    report_speed("C18 CNN by OpenBLAS, over tuned by hand", &e[0].times, &e[1].times, NULL, 0.95);
    report_speed("C18 the same, over 1 device, 1 thread", &e[0].times, &e[2].times, NULL, 1.8);
}
