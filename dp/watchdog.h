/* dp/watchdog.h - v0.2.0 - what listens while a process computes, or hangs - MIT licence

   Part of dp.h, which includes it. A process hears of others while it waits for them. While it is
   in a function of the user's no thread of it does, for as long as that takes. So a thread beside
   it looks, ten times a second, where one of these needs that:

   - Without a board that all see (dp/job.h) nobody knows what another process is in. The watchdog
     answers for a process that does not: with what it is in. For those that ask such a process is
     still one that does not answer, as its record says that the watchdog has sent it.
   - Where a job has several machines, those outside ask it what it does (dp/asking.h).
   - With dp_config.grace_ms a process ends if the job has failed and the program does not learn it
     for so long: a call has to return the failure to it, outside of functions that the context
     calls. Nobody else can tell such a process from one that computes.

   CONTENTS (search for the tag)
     >>hearing  in place of a process that does not
     >>grace    the end of one that hangs
     >>watchdog the thread
*/

#ifndef DP__ROOMS
#error "dp/watchdog.h is a part of dp.h: include dp.h"
#else

enum {
    DP__WATCHDOG_NS = 100000000, /* between two looks */
    DP__STACK_MS = 200,          /* a thread that is asked for its stack has so long to print it */
    DP__HUNG = 124               /* the exit status of a process that was ended; timeout(1)'s */
};

typedef struct dp__watchdog {
    dp_ctx *ctx;
    dp__lock lock;
    dp__wake wake;
    bool closing;           /* under the lock */
    bool heeds;             /* it looks at the tree */
    dp__listener *listener; /* where others ask from outside, or NULL; under the lock */
    dp__os_watch watch[DP__LISTENER_WATCHED];
    dp__wait wait; /* for how long the job has failed without the program knowing it */
    dp__thread thread;
} dp__watchdog;

/* ==== >>hearing ==================================================================================
   In place of a process that does not.                                                          */

/* Reads what others have sent, unless a thread that waits does. */
static void dp__watchdog_hear(const dp__watchdog *dog)
{
    int process;
    dp__job *job = dog->ctx->world.job;
    uint64_t looked_ns = atomic_load(&dp__progress_of(job, job->process)->looked_ns);
    if (dp__job_is_lost(job) || dp__os_now_ns() - looked_ns < DP__LATE_NS)
        return;
    dp_status status = dp__far_hear(dog->ctx, &process);
    if (status != DP_OK)
        dp__job_learn(job, status, process);
}

/* ==== >>grace ====================================================================================
   The end of one that hangs. Time for which the process was stopped does not count.             */

/* Returns the first device that is in a function of the user's, and does not wait for another one;
   -1: none is. */
static int dp__device_inside(const dp_ctx *ctx)
{
    for (int i = atomic_load(&ctx->relayed); i < ctx->info.local_count; i++)
        if (atomic_load(&dp__activity_of(ctx, i)->since_ns) != 0)
            return i;
    return -1;
}

/* "device 1 is in net.forward since 7.2 s (thread 4243)" */
static const char *dp__inside_text(const dp_ctx *ctx, int device, char *text, size_t room)
{
    char activity[DP__ACTIVITY_BYTES] = "";
    if (device >= 0)
        dp__activity_text(dp__activity_of(ctx, device), 0, "", activity);
    if (activity[0] == '\0')
        snprintf(text, room, "none of its devices is in a function of yours");
    else if (ctx->info.local_count == 1)
        snprintf(text, room, "it is in %s", activity);
    else
        snprintf(text, room, "device %d is in %s", device, activity);
    return text;
}

/* Logs why, to stderr if there is no log, and ends this process. */
DP__COLD static _Noreturn void dp__watchdog_bite(const dp__watchdog *dog)
{
    char who[DP__WHO_BYTES], inside[DP__ACTIVITY_BYTES + 32], text[DP__TEXT_BYTES + 384];
    const dp_ctx *ctx = dog->ctx;
    dp__job *job = ctx->world.job;
    int device = dp__device_inside(ctx);
    (void)dp__inside_text(ctx, device, inside, sizeof inside);
    if (device >= 0 && dp__os_env("DP_STUCK") != NULL) {
        dp__activity_ask(dp__activity_of(ctx, device), dp__os_process_id());
        dp__os_sleep_ms(DP__STACK_MS);
    }
    (void)dp__job_heard(job);
    snprintf(text, sizeof text,
             "%s ends, as it has not come back within %d ms: %s. The job failed: %s",
             dp__who(job, job->process, who), ctx->config.grace_ms, inside, dp_last_error());
    if (ctx->config.log.fn != NULL)
        dp__log(ctx, DP_LOG_ERROR, "%s", text);
    else
        dp_log_stderr(&(dp_log_record){DP_LOG_ERROR, ctx->info.rank_first, text}, NULL);
    dp__trace_flush();
    dp__os_quit(DP__HUNG);
}

/* Counts for how long the job has failed without the program knowing it. */
static void dp__watchdog_count(dp__watchdog *dog)
{
    const dp_ctx *ctx = dog->ctx;
    uint64_t waited_ns = 0;
    if (!dp__job_is_lost(ctx->world.job) || atomic_load(&ctx->told)) {
        dog->wait = (dp__wait){0};
        return;
    }
    if (dp__wait_looks(&dog->wait, 0, &waited_ns) &&
        waited_ns >= (uint64_t)ctx->config.grace_ms * 1000000)
        dp__watchdog_bite(dog);
}

/* ==== >>watchdog =================================================================================
   The thread.                                                                                   */

static void *dp__watchdog_main(void *user)
{
    dp__watchdog *dog = user;
    dp__of_thread.absent = true;
    dp__lock_enter(&dog->lock);
    while (!dog->closing) {
        dp__wake_wait(&dog->wake, &dog->lock, dp__os_now_ns() + DP__WATCHDOG_NS);
        if (dog->closing)
            break;
        dp__listener *listener = dog->listener;
        dp__lock_leave(&dog->lock);
        if (dog->heeds)
            dp__watchdog_hear(dog);
        if (listener != NULL)
            dp__listener_answer(listener, dog->watch);
        if (dog->ctx->config.grace_ms > 0)
            dp__watchdog_count(dog);
        dp__lock_enter(&dog->lock);
    }
    dp__lock_leave(&dog->lock);
    return NULL;
}

/* Lets it answer those that ask there from now on, until it ends. False: there is none. */
static bool dp__watchdog_listens(const dp_ctx *ctx, dp__listener *listener)
{
    dp__watchdog *dog = ctx->world.watchdog;
    if (dog == NULL)
        return false;
    dp__lock_enter(&dog->lock);
    dog->listener = listener;
    dp__lock_leave(&dog->lock);
    return true;
}

/* Starts it, if there is something to do. MPI is called by one more thread only where grace asks
   for it. */
static dp_status dp__watchdog_begin(dp_ctx *ctx, bool by_mpi)
{
    bool heeds = ctx->world.job->shared.data == NULL;
    bool ends = ctx->config.grace_ms > 0;
    if (!ends && (!heeds || by_mpi))
        return DP_OK;
    dp__watchdog *dog = dp__host_alloc(&ctx->host, sizeof *dog, _Alignof(dp__watchdog));
    if (dog == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for a watchdog");
    *dog = (dp__watchdog){.ctx = ctx, .heeds = heeds};
    dp__lock_init(&dog->lock);
    dp__wake_init(&dog->wake);
    int failed = dp__thread_start(&dog->thread, dp__watchdog_main, dog);
    if (failed == 0) {
        ctx->world.watchdog = dog;
        return DP_OK;
    }
    dp__lock_fini(&dog->lock);
    dp__wake_fini(&dog->wake);
    dp__host_free(&ctx->host, dog);
    return dp_error(DP_ERR_NO_MEMORY, "dp_open: cannot start a watchdog: %s",
                    dp__os_why_text(failed));
}

static void dp__watchdog_end(dp_ctx *ctx)
{
    dp__watchdog *dog = ctx->world.watchdog;
    if (dog == NULL)
        return;
    ctx->world.watchdog = NULL;
    dp__lock_enter(&dog->lock);
    dog->closing = true;
    dp__lock_leave(&dog->lock);
    dp__wake_signal(&dog->wake);
    dp__thread_join(dog->thread);
    dp__lock_fini(&dog->lock);
    dp__wake_fini(&dog->wake);
    dp__host_free(&ctx->host, dog);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
