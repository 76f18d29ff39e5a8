/* openmp.c - dp_spawn after OpenMP: threads of its runtime are not in new processes, which would
   wait for them for ever. Compiled with -fopenmp, it runs by itself. */

#define DP_IMPLEMENTATION
#include "../../dp.h"

#include <omp.h>

static int in_threads(void)
{
    int count = 0;
#pragma omp parallel num_threads(3) reduction(+ : count)
    count++;
    return count;
}

static dp_status work(void *user)
{
    alarm(20); /* a hang ends the process, and dp_spawn says so */
    return in_threads() == *(int *)user ? DP_OK : dp_error(DP_ERR_USER, "threads are missing");
}

static dp_status spawn_in_a_region(void)
{
    dp_status status = DP_OK;
    int three = 3;
#pragma omp parallel num_threads(2) reduction(min : status)
    if (omp_get_thread_num() == 0)
        status = dp_spawn(2, work, &three);
    return status;
}

int main(void)
{
    int three = in_threads();
    setenv("DP_LAUNCH", "none", 1); /* whatever has started this */
    for (int i = 0; i < 2; i++)
        DP_CHECK(dp_spawn(2, work, &three));
    DP_CHECK(in_threads() == 3 ? DP_OK : dp_error(DP_ERR_USER, "no threads are left here"));
    DP_CHECK(dp_spawn(2, work, &three));
    omp_set_dynamic(0);
    return spawn_in_a_region() == DP_ERR_STATE ? EXIT_SUCCESS : EXIT_FAILURE;
}
