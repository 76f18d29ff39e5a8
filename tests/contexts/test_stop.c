/* test_stop.c - all processes stop after the same step, whichever of them was asked, and how. */

#include <signal.h>
#include <sys/time.h>
#include "dp_train.h"
#include "ranked.h"
#include "world.h"

static bool asked(dp_ctx *ctx)
{
    bool stop = false;
    CHECK_OK(dp_stop_requested(ctx, &stop));
    return stop;
}

static dp_ctx *alone(void)
{
    dp_ctx *ctx = NULL;
    nobody_launched_us();
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    return ctx;
}

/* ---- one process ----------------------------------------------------------------------------- */

TEST(a_signal_asks)
{
    dp_ctx *ctx = alone();
    CHECK_OK(dp_stop_on_signal(SIGUSR1));
    CHECK_OK(dp_stop_on_signal(SIGTERM));
    CHECK(!asked(ctx));
    raise(SIGUSR1);
    CHECK(asked(ctx));
    CHECK(asked(ctx)); /* it lasts */
    raise(SIGTERM);
    dp_close(ctx);
    ctx = alone();
    CHECK(asked(ctx));
    dp_close(ctx);
}

static void signalled_twice(void)
{
    CHECK_OK(dp_stop_on_signal(SIGTERM));
    CHECK_OK(dp_stop_on_signal(SIGTERM));
    raise(SIGTERM);
    raise(SIGTERM);
    _exit(0);
}

TEST(the_second_one_ends_the_program)
{
    int status = 0;
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        signalled_twice();
    CHECK_INT(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGTERM);
}

static volatile sig_atomic_t heard_by_program;

static void hear_signal(int which)
{
    heard_by_program = heard_by_program + which;
}

TEST(a_handler_of_before_gets_the_second_one)
{
    dp_ctx *ctx = alone();
    struct sigaction own = {.sa_handler = hear_signal};
    sigaction(SIGUSR2, &own, NULL);
    CHECK_OK(dp_stop_on_signal(SIGUSR2));
    raise(SIGUSR2);
    CHECK_INT(heard_by_program, 0);
    raise(SIGUSR2);
    CHECK_INT(heard_by_program, SIGUSR2);
    CHECK_OK(dp_stop_on_signal(SIGUSR2)); /* again */
    raise(SIGUSR2);
    CHECK_INT(heard_by_program, SIGUSR2);
    CHECK(asked(ctx));
    dp_close(ctx);
}

TEST(signals_that_nobody_can_wait_for)
{
    static const int bad[] = {0, -1, SIGKILL, SIGSTOP, 10000};
    for (int i = 0; i < 5; i++)
        CHECK_ERROR(dp_stop_on_signal(bad[i]), DP_ERR_INVALID, "dp_stop_on_signal: signal");
}

TEST(a_time_asks)
{
    dp_ctx *ctx = alone();
    CHECK_OK(dp_stop_after(1e9));
    CHECK(!asked(ctx));
    CHECK_OK(dp_stop_after(0.05));
    CHECK_OK(dp_stop_after(1000)); /* the earliest counts */
    for (int i = 0; i < 2000 && !asked(ctx); i++)
        nanosleep(&(struct timespec){.tv_nsec = 10000000}, NULL);
    CHECK(asked(ctx));
    CHECK_ERROR(dp_stop_after(-1), DP_ERR_INVALID, "dp_stop_after: -1 seconds");
    CHECK_STATUS(dp_stop_after((double)NAN), DP_ERR_INVALID);
    CHECK_STATUS(dp_stop_after(HUGE_VAL), DP_ERR_INVALID);
    dp_close(ctx);
}

TEST(the_program_asks)
{
    dp_ctx *ctx = alone();
    bool stop;
    CHECK(!asked(ctx));
    CHECK_ERROR(dp_stop_requested(ctx, NULL), DP_ERR_INVALID, "dp_stop_requested: out");
    CHECK_ERROR(dp_stop_requested(NULL, &stop), DP_ERR_INVALID, "dp_stop_requested: ctx");
    dp_stop_request();
    CHECK(asked(ctx));
    dp_close(ctx);
    CHECK_STATUS(dp_stop_requested(ctx, &stop), DP_ERR_STATE);
}

/* ---- several --------------------------------------------------------------------------------- */

/* The signal comes at some moment, from outside. */
static void one_is_told(meeting *m)
{
    dp_ctx *ctx = open_over_shm(m, 2, 0);
    int step = 0, steps[BOOT_PROCESSES];
    CHECK_OK(dp_stop_on_signal(SIGALRM));
    if (m->process == 1)
        setitimer(ITIMER_REAL, &(struct itimerval){.it_value.tv_usec = 20000}, NULL);
    while (!asked(ctx))
        step++;
    CHECK(asked(ctx));
    CHECK_OK(meeting_all_gather(&step, steps, sizeof step, m));
    for (int p = 0; p < m->process_count; p++)
        CHECK_INT(steps[p], step);
    dp_close(ctx);
}

TEST(all_stop_after_the_same_step)
{
    in_processes(2, one_is_told);
    in_processes(3, one_is_told);
}
