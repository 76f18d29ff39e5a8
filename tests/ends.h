/* ends.h - what ends a job of three processes with one rank each, and what the others then say: the
   same status, within the same time, with the same sentence, whatever carries their collectives.
   The table is the same in all binaries; each has carriers of its own. */

#ifndef ENDS_H
#define ENDS_H

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "test.h"

enum { END_PROCESSES = 3, END_TIMEOUT_MS = 2000, END_SOON_MS = 1500, END_LATE_MS = 5000 };

static inline void end_rest(int ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

static inline double end_now_ms(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

/* Where a GPU does it later, this waits for it. */
static inline dp_status end_sum(dp_ctx *ctx, int64_t count)
{
    dp_tensor numbers;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &numbers);
    const dp_part part = {.send = numbers.data, .recv = numbers.data};
    status = status == DP_OK ? dp_all_reduce(ctx, &part, (size_t)count, DP_F32, DP_OP_SUM) : status;
    status = status == DP_OK ? dp_wait(ctx) : status;
    dp_scope_end(scope);
    return status;
}

/* ---- what process 1 does, where the others add up 25 numbers --------------------------------- */

static inline void end_die(dp_ctx *ctx)
{
    (void)ctx;
    raise(SIGKILL);
}

/* If somebody wakes it up it hears of it. */
static inline void end_stop(dp_ctx *ctx)
{
    raise(SIGSTOP);
    CHECK_STATUS(end_sum(ctx, 25), DP_ERR_TIMEOUT);
    dp_close(ctx);
}

static inline void end_close(dp_ctx *ctx)
{
    dp_close(ctx);
}

static inline void end_differ(dp_ctx *ctx)
{
    CHECK_STATUS(end_sum(ctx, 26), DP_ERR_REMOTE);
    dp_close(ctx);
}

static inline void end_give_up(dp_ctx *ctx)
{
    dp_abort(ctx, DP_ERR_ABORTED, "the disk is full");
    end_rest(500);
    dp_close(ctx);
}

/* It hears of it when it comes. */
static inline void end_skip(dp_ctx *ctx)
{
    end_rest(END_TIMEOUT_MS + 1500 + (int)(200 * test_timeout_scale()));
    CHECK_STATUS(end_sum(ctx, 25), DP_ERR_TIMEOUT);
    dp_close(ctx);
}

static inline void end_lack(dp_ctx *ctx)
{
    const int64_t much = (int64_t)1 << 46;
    dp_tensor numbers;
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_STATUS(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &much, &numbers),
                 DP_ERR_NO_MEMORY);
    dp_scope_end(scope);
    end_skip(ctx);
}

/* ---- the table ------------------------------------------------------------------------------- */

typedef struct end_case {
    const char *name;
    void (*cause)(dp_ctx *ctx);
    dp_status status;
    int most_ms;
    const char *says; /* what it begins with; # is a number of the system's */
} end_case;

#define END_WHERE "collective 3, all_reduce of 25 f32 (sum): rank 1 (process 1, pid #) "
#define END_LAST  "; its last one was 2, all_reduce of 7 f32 (sum)"

static const end_case end_cases[] = {
    {"dies", end_die, DP_ERR_REMOTE, END_SOON_MS, END_WHERE "has died" END_LAST},
    {"stops", end_stop, DP_ERR_TIMEOUT, END_LATE_MS,
     END_WHERE "did not come within 2000 ms" END_LAST},
    {"closes", end_close, DP_ERR_REMOTE, END_SOON_MS, END_WHERE "has closed its context" END_LAST},
    {"differs", end_differ, DP_ERR_REMOTE, END_SOON_MS,
     "collective 3: rank 1 (process 1, pid #) has issued all_reduce of 26 f32 (sum), and rank 0 "
     "(process 0, pid #) all_reduce of 25 f32 (sum): all must make the same calls in the same "
     "order"},
    {"gives up", end_give_up, DP_ERR_ABORTED, END_SOON_MS,
     "rank 1 (process 1, pid #) failed: the disk is full"},
    {"skips one", end_skip, DP_ERR_TIMEOUT, END_LATE_MS,
     END_WHERE "did not come within 2000 ms" END_LAST},
    {"has no memory", end_lack, DP_ERR_TIMEOUT, END_LATE_MS,
     END_WHERE "did not come within 2000 ms" END_LAST ", and then a call failed: dp_tensor_new: "},
};

enum { END_CASES = sizeof end_cases / sizeof end_cases[0] };

/* A sentence without the function that it begins with, and without numbers of processes; *out_pid:
   the first of them. */
static inline void end_words(const char *text, char *out, size_t room, long *out_pid)
{
    size_t used = 0;
    const char *at = strchr(text, ':');
    at = at != NULL && strncmp(text, "dp_", 3) == 0 ? at + 2 : text;
    *out_pid = 0;
    while (*at != '\0' && used + 2 < room) {
        bool pid = at - text >= 4 && strncmp(at - 4, "pid ", 4) == 0;
        char *end = NULL;
        long id = pid ? strtol(at, &end, 10) : 0;
        *out_pid = pid && *out_pid == 0 ? id : *out_pid;
        out[used++] = pid ? '#' : *at;
        at = pid ? end : at + 1;
    }
    out[used] = '\0';
}

/* A cell of the table, in processes 0 and 2: what they say of process 1. Returns its number. */
static inline long check_end(dp_ctx *ctx, const end_case *want)
{
    char words[600];
    dp_failure_info failure;
    long pid;
    double start = end_now_ms();
    dp_status status = end_sum(ctx, 25);
    double spent = end_now_ms() - start;
    end_words(dp_last_error(), words, sizeof words, &pid);
    if (status != want->status || strncmp(words, want->says, strlen(want->says)) != 0)
        test_fail(__FILE__, __LINE__, "one %s: %s: %s\n  wanted %s: %s", want->name,
                  dp_status_name(status), words, dp_status_name(want->status), want->says);
    if (spent > want->most_ms * test_timeout_scale())
        test_fail(__FILE__, __LINE__, "one %s: %.0f ms", want->name, spent);
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.status, want->status);
    CHECK_INT(failure.rank, 1);
    CHECK_STATUS(dp_barrier(ctx), want->status);
    return pid;
}

/* In each process of a job that is open; then all meet, outside of it, and run_end follows. */
static inline dp_ctx *end_begin(dp_ctx *ctx)
{
    for (int i = 0; i < 2; i++)
        CHECK_OK(end_sum(ctx, 7));
    return ctx;
}

static inline long run_end(dp_ctx *ctx, int process, const end_case *want)
{
    long pid = 0;
    if (process == 1) {
        end_rest(200); /* the others wait already */
        want->cause(ctx);
        return 0;
    }
    pid = check_end(ctx, want);
    dp_close(ctx);
    return pid;
}

#endif /* ENDS_H */
