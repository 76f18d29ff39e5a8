/* launched.h - tests of dp_mpi.h: those that mpirun starts, each process of the job being one of
   this program, and the suites that they run. */

#ifndef LAUNCHED_H
#define LAUNCHED_H

#include "../test.h"
#include "../../dp_mpi.h"

extern int mpi_process, mpi_process_count; /* as the launcher says */

typedef struct mpi_suite {
    const char *name;
    void (*run)(void);
    struct mpi_suite *next;
} mpi_suite;

void mpi_suite_register(mpi_suite *suite);

/* What runs in every process of one job, one after the other. */
#define MPI_SUITE(name)                                                                            \
    static void mpi_run_##name(void);                                                              \
    static mpi_suite mpi_suite_##name = {#name, mpi_run_##name, NULL};                             \
    __attribute__((constructor)) static void mpi_register_##name(void)                             \
    {                                                                                              \
        mpi_suite_register(&mpi_suite_##name);                                                     \
    }                                                                                              \
    static void mpi_run_##name(void)

#endif /* LAUNCHED_H */
