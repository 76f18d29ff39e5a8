/* test_signal.c - writing where nobody reads, or where a file may not grow: errors, no signals, and
   the program's own handlers, masks and pending signals are as they were. */

#define _GNU_SOURCE /* P_tmpdir */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "test.h"
/* clang-format off */
#include "dp_save.h"
#include "dp_train.h"
/* clang-format on */

static volatile sig_atomic_t handled;

static void handle(int signal)
{
    (void)signal;
    handled = handled + 1;
}

static bool is_blocked(int signal)
{
    sigset_t mask;
    CHECK_INT(pthread_sigmask(SIG_SETMASK, NULL, &mask), 0);
    return sigismember(&mask, signal) == 1;
}

static bool is_pending(int signal)
{
    sigset_t pending;
    CHECK_INT(sigpending(&pending), 0);
    return sigismember(&pending, signal) == 1;
}

/* What a program does with a signal: nothing, handle it, hold it back, or hold back one that is
   there already. In all four it finds things as they were. */
enum { ENDS, HANDLES, HOLDS, HAS_ONE, WAYS };

static void set_way(int way, int number)
{
    sigset_t one;
    CHECK(signal(number, way == HANDLES ? handle : SIG_DFL) != SIG_ERR);
    sigemptyset(&one);
    sigaddset(&one, number);
    CHECK_INT(pthread_sigmask(way >= HOLDS ? SIG_BLOCK : SIG_UNBLOCK, &one, NULL), 0);
    if (way == HAS_ONE)
        CHECK_INT(raise(number), 0);
}

static void check_way(int way, int number)
{
    struct sigaction now;
    CHECK_INT(sigaction(number, NULL, &now), 0);
    CHECK(now.sa_handler == (way == HANDLES ? handle : SIG_DFL));
    CHECK_INT(handled, 0);
    CHECK_INT(is_blocked(number), way >= HOLDS);
    CHECK_INT(is_pending(number), way == HAS_ONE);
}

/* stderr becomes a pipe that nobody reads; returns what it was. */
static int close_stderr(void)
{
    int ends[2], kept = dup(2);
    CHECK_INT(pipe(ends), 0);
    CHECK_INT(dup2(ends[1], 2), 2);
    close(ends[0]);
    close(ends[1]);
    return kept;
}

static void limit_files(rlim_t bytes)
{
    struct rlimit limit;
    CHECK_INT(getrlimit(RLIMIT_FSIZE, &limit), 0);
    limit.rlim_cur = bytes;
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
}

TEST(a_closed_pipe_does_not_end_the_program_that_logs)
{
    CHECK_INT(setenv("DP_DEBUG", "trace", 1), 0);
    CHECK_INT(setenv("DP_PROGRESS", "on", 1), 0);
    for (int way = 0; way < WAYS; way++) {
        dp_ctx *ctx = NULL;
        dp_progress progress = {.step_count = 2, .every_s = DP_ZERO};
        set_way(way, SIGPIPE);
        int kept = close_stderr();
        dp_status status = dp_open(&(dp_config){.device_count = 2}, &ctx);
        dp_progress_step(&progress, ctx, 0, 1, 8, dp_none());
        dp_progress_end(&progress);
        dp_close(ctx);
        CHECK_INT(dup2(kept, 2), 2);
        CHECK_OK(status);
        check_way(way, SIGPIPE);
    }
}

TEST(a_log_that_may_not_grow_does_not_end_the_program)
{
    char path[64] = "";
    struct stat is;
    snprintf(path, sizeof path, "%s/dp-log-%ld", P_tmpdir, (long)getpid());
    CHECK_INT(setenv("DP_DEBUG", "trace", 1), 0);
    int kept = dup(2), file = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    CHECK(file >= 0 && dup2(file, 2) == 2);
    limit_files(20);
    dp_ctx *ctx = NULL;
    dp_status status = dp_open(&(dp_config){.device_count = 2}, &ctx);
    dp_close(ctx);
    CHECK_INT(dup2(kept, 2), 2);
    CHECK_INT(stat(path, &is), 0);
    CHECK_INT(unlink(path), 0);
    CHECK_OK(status);
    CHECK_INT(is.st_size, 20);
    check_way(ENDS, SIGXFSZ);
}

TEST(a_file_that_may_not_grow_is_an_error)
{
    char path[64] = "";
    static const float zeros[1000];
    snprintf(path, sizeof path, "%s/dp-file-%ld", P_tmpdir, (long)getpid());
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.device_count = 1}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value value = DP_DICT(scope, {"x", dp_array(scope, zeros, DP_F32, DP_SHAPE(1000))}), got;
    limit_files(3000);
    for (int way = 0; way < WAYS; way++) {
        CHECK_OK(dp_file_write(ctx, path, DP_DICT(scope, {"way", dp_int(way)})));
        set_way(way, SIGXFSZ);
        CHECK_ERROR(dp_file_write(ctx, path, value), DP_ERR_FILE, "part': File too large");
        check_way(way, SIGXFSZ);
        CHECK_OK(dp_file_read(ctx, scope, path, &got));
        CHECK_INT(dp_get(got, "way").as.i, way);
    }
    CHECK_INT(unlink(path), 0);
    dp_close(ctx);
}

static dp_status open_small(void *user)
{
    dp_ctx *ctx = NULL;
    (void)user;
    limit_files(4096);
    dp_status status = dp_open(&(dp_config){.device_count = 1, .timeout_ms = 5000}, &ctx);
    dp_close(ctx);
    check_way(ENDS, SIGXFSZ);
    return status;
}

TEST(shared_memory_that_may_not_grow_is_an_error)
{
    test_needs_processes(2);
    CHECK_ERROR(dp_spawn(2, open_small, NULL), DP_ERR_NO_MEMORY, "File too large");
}
