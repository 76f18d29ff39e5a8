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

/* A test that starts itself by mpirun, in so many processes: what follows is what each does. */
#define MPI_TEST(name, processes) MPI_TEST_UNDER(name, processes, mpi_launch)
#define MPI_TEST_UNDER(name, processes, launch)                                                    \
    static void mpi_run_##name(void);                                                              \
    TEST_OF_TABLE(name, 60)                                                                        \
    {                                                                                              \
        if (mpi_is_inside())                                                                       \
            mpi_run_##name();                                                                      \
        else                                                                                       \
            launch(#name, processes);                                                              \
    }                                                                                              \
    static void mpi_run_##name(void)

bool mpi_is_inside(void);

/* All processes come to the end of the test, and so does mpirun. */
void mpi_launch(const char *name, int processes);

/* The same, but for mpirun, which complains of processes that end without MPI_Finalize. */
void mpi_launch_broken(const char *name, int processes);

#endif /* LAUNCHED_H */
