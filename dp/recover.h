/* dp/recover.h - v0.2.0 - a job goes on without those that have died - MIT licence

   Part of dp.h, which includes it. A context leaves the job that has failed, votes (dp/voting.h),
   and meets the others of the new roster, by the functions with which it was opened. Devices,
   memory and modules stay.

   CONTENTS (search for the tag)
     >>leaving     the job as it was
     >>returning   the job as it is
     >>recovering  dp_recover
*/

#ifndef DP__ROOMS
#error "dp/recover.h is a part of dp.h: include dp.h"
#else

/* ==== >>leaving ================================================================================
   What belongs to the processes as they were. Nothing of it runs any more: the job has failed, and
   the devices have been waited for.                                                             */

/* Returns what outlives the ways to the others: memory is in use, and the failure can be asked. */
static dp__world dp__world_rest(const dp__world *world)
{
    return (dp__world){
        .job = world->job, .heap = world->heap, .near = world->near, .voter = world->voter};
}

/* Ends the world that there is, also one that an attempt has made which failed, and begins an empty
   one with the voter of `before`. The job and the heaps of `before` stay. */
static void dp__world_leave(dp_ctx *ctx, const dp__world *before)
{
    dp__watchdog_end(ctx);
    dp__metrics_end(ctx->world.job);
    dp__metrics_end(ctx->world.shown);
    dp__mailbox_forget(ctx);
    dp__port_end(ctx);
    for (int i = DP__LANES - 1; i >= 0; i--) {
        dp_part *parts = ctx->lanes[i].parts;
        dp__lane_end(&ctx->lanes[i]);
        dp__host_free(&ctx->host, ctx->lanes[i].ranks);
        ctx->lanes[i] = (dp__lane){.ctx = ctx, .parts = parts};
    }
    dp__host_free(&ctx->host, ctx->commed);
    ctx->commed = NULL;
    if (ctx->world.wires_scope != NULL)
        ctx->world.wires_scope->lost = true;
    dp__tree *tree = ctx->world.tree;
    dp__far_begin(ctx, NULL, NULL);
    dp__tree_close(tree, true);
    if (ctx->world.job != before->job)
        dp__job_free(ctx->world.job);
    dp__job_free(ctx->world.shown);
    ctx->world = (dp__world){.voter = before->voter};
}

/* No pass goes on that was begun with others. */
static void dp__passes_void(const dp_scope *scopes)
{
    for (const dp_scope *scope = scopes; scope != NULL; scope = scope->next) {
        dp__passes_end(scope, DP__PASS_ANY);
        dp__passes_void(scope->first_child);
    }
}

/* Frees the job of a world that is over. What lies in its heap stays where it is, as memory of this
   process. */
static void dp__world_retire(const dp__world *before)
{
    dp__job *old = before->job;
    const dp__heap *heap = &before->heap;
    if (old == NULL)
        return;
    if (heap->used > 0) {
        const char *part = dp__heap_part(heap, heap->process);
        size_t first = (size_t)(part - (char *)old->shared.data);
        size_t bytes = dp__align_up(heap->used, DP__SHARED_PAGE);
        dp__unpoison(part, bytes); /* it is copied, with what nobody may use */
        dp__os_shared_trim(&old->shared, first, bytes);
        dp__os_shared_close(&old->near);
        old->before = before->voter->before;
        before->voter->before = old;
    } else {
        dp__job_free(old);
    }
}

/* ==== >>returning ==============================================================================
   Those that are left meet as they did at first. Who has the lowest seat is process 0.          */

static dp_status dp__world_open(dp_ctx *ctx, const dp__launch *launch)
{
    dp__meeting meeting;
    dp_status status = dp__meeting_make(&ctx->config, launch, &meeting);
    dp__meeting *others = meeting.all != NULL ? &meeting : NULL;
    dp__place_set(ctx, &meeting.opening);
    ctx->info.process_count = launch->process_count;
    ctx->info.rank_first = 0;
    ctx->info.rank_count = meeting.own.local_count = ctx->info.local_count;
    if (status == DP_OK) {
        status = dp__threads_find(ctx);
        status = others != NULL ? dp__agree(others, status) : status;
    }
    if (status == DP_OK)
        status = others != NULL ? dp__job_open(ctx, others) : dp__alone_open(ctx, &meeting);
    if (status == DP_OK)
        dp__asking_begin(ctx);
    dp__os_free(meeting.all, 0, NULL);
    return status;
}

static dp_status dp__world_meet(dp_ctx *ctx, int timeout_ms)
{
    dp__launch launch;
    dp__tree *tree = NULL;
    DP_TRY(dp__voter_launch(ctx->world.voter, &launch));
    ctx->config.bootstrap = (dp_bootstrap){NULL, NULL, 0, 1};
    if (launch.process_count > 1)
        DP_TRY(dp__join_tree(&ctx->config, &launch, timeout_ms, &tree));
    dp_status status = dp__world_open(ctx, &launch);
    if (tree != NULL)
        tree->timeout_ms = ctx->config.timeout_ms;
    dp__far_begin(ctx, tree, NULL);
    return status;
}

/* Meets the others of the roster. If not all come, this one has failed for those that did. */
static dp_status dp__world_return(dp_ctx *ctx, int timeout_ms)
{
    dp_status status = dp__world_meet(ctx, timeout_ms);
    if (status != DP_OK)
        (void)dp__job_failed(ctx, status, dp_last_error());
    return status;
}

/* ==== >>recovering ===============================================================================
   From a failure to a job, however often it takes.                                               */

static dp_status dp__devices_drain(dp_ctx *ctx)
{
    for (int i = 0; i < ctx->info.local_count; i++)
        DP_TRY(dp__sync(ctx->devices[i].stream));
    return DP_OK;
}

enum { DP__RECOVER_TRIES = 4 }; /* beside one for each seat, whose holder may die in it */

typedef struct dp__recovery {
    const char *fn;
    dp_ctx *ctx;
    dp__world before; /* the rest of the one that has failed, */
    dp_info info;     /* and who was who in it */
    uint64_t until_ns;
    int tries;
    bool over; /* it has been found out that there is no way */
} dp__recovery;

/* All devices are done with what a job that failed has left, and it has not failed any more. */
static void dp__scopes_find(dp_ctx *ctx)
{
    dp_scope *next, *ended = ctx->lost;
    ctx->lost = NULL;
    for (dp_scope *scope = ended; scope != NULL; scope = scope->next)
        dp__scope_wipe(scope);
    dp__lock_enter(&ctx->lock);
    dp__scopes_give(ctx, ended);
    dp__lock_leave(&ctx->lock);
    for (dp_scope *scope = ctx->scopes; scope != NULL; scope = next) {
        next = scope->next;
        if (scope->lost)
            dp__scope_end(scope);
    }
}

/* Forgets the failure; nothing runs, and what was lost is found. */
static void dp__failure_clear(dp_ctx *ctx)
{
    dp__lock_enter(&ctx->lock);
    atomic_store(&ctx->told, false);
    atomic_store_explicit(&ctx->failed, DP_OK, memory_order_release);
    dp__lock_leave(&ctx->lock);
    dp__scopes_find(ctx);
}

/* Returns how long to wait for the others. One that has died since the vote does not come, and only
   this time-out shows it: it is short at first, and longer with each try. A meeting that begins
   late gets what is left, but enough to be of use: see >>recovery in dp.h. */
static int dp__meet_again_ms(dp__recovery *own)
{
    int ms = DP__MEET_LEAST_MS << (own->tries < 3 ? own->tries : 3);
    int left = dp__os_ms_until(own->until_ns);
    own->tries++;
    ms = ms < DP__MEET_MOST_MS ? ms : DP__MEET_MOST_MS;
    ms = ms < left ? ms : left;
    return ms > DP__MEET_LEAST_MS ? ms : DP__MEET_LEAST_MS;
}

static void dp__recovery_of(dp__recovery *own)
{
    own->before = dp__world_rest(&own->ctx->world);
    own->info = own->ctx->info;
}

/* Every wrapper, in the order in which they were made. */
static dp_status dp__wrappers_return(const char *fn, dp_ctx *ctx)
{
    ctx->reducers = 0;
    for (dp_module *module = ctx->over_ranks; module != NULL; module = module->next_over_ranks)
        DP_TRY(dp__distributed_return(fn, module));
    return DP_OK;
}

/* Agrees with the others who is left. If a device is lost, they go on without this process. */
static dp_status dp__members_agree(dp__recovery *own)
{
    dp_status status = dp__devices_drain(own->ctx);
    if (status != DP_OK)
        dp__voter_unlisten(own->ctx->world.voter);
    else
        status = dp__voter_vote(own->ctx->world.voter, own->until_ns);
    own->over = status != DP_OK;
    return status;
}

/* The steps of a recovery, in order. Whichever fails, all of them are tried again. */
static dp_status dp__recover_once(dp__recovery *own)
{
    dp_ctx *ctx = own->ctx;
    dp__world_leave(ctx, &own->before);
    DP_TRY(dp__members_agree(own));
    dp__failure_clear(ctx);
    DP_TRY(dp__world_return(ctx, dp__meet_again_ms(own)));
    ctx->info.recoveries = dp__voter_met(ctx->world.voter);
    dp__figure_set(ctx, DP__RECOVERIES, (uint64_t)ctx->info.recoveries);
    dp__world_retire(&own->before);
    dp__recovery_of(own);
    return dp__leave(own->fn, ctx, dp__wrappers_return(own->fn, ctx));
}

static dp_status dp__recover(dp__recovery *own)
{
    dp_ctx *ctx = own->ctx;
    dp_status status;
    int most = ctx->world.voter->count + DP__RECOVER_TRIES;
    do {
        status = dp__recover_once(own);
    } while (status != DP_OK && !own->over && own->tries < most &&
             dp__os_ms_until(own->until_ns) > 0);
    if (status != DP_OK) { /* the context has the job that failed */
        dp__world_leave(ctx, &own->before);
        ctx->world = own->before;
        ctx->info = own->info;
    }
    return status;
}

static uint32_t dp__wrappers_count(const dp_ctx *ctx)
{
    uint32_t count = 0;
    for (const dp_module *module = ctx->over_ranks; module != NULL;
         module = module->next_over_ranks)
        count++;
    return count;
}

/* Checks that this context can recover. */
static dp_status dp__check_recovers(const char *fn, const dp_ctx *ctx)
{
    if (ctx->world.voter == NULL)
        return dp_error(DP_ERR_STATE, "%s: config.recovers was not set, or there was one process",
                        fn);
    if (ctx->world.voter->listener.fd < 0)
        return dp_error(DP_ERR_STATE, "%s: a device of this process is lost", fn);
    if (ctx->world.sharings > 0)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "%s: processes share parameters (share_params): one that has died may have "
                        "left them half written",
                        fn);
    return DP_OK;
}

/* The job as it was ends. */
static dp_status dp__job_again(const char *fn, dp_ctx *ctx)
{
    dp__recovery own = {.fn = fn, .ctx = ctx};
    DP_TRY(dp__check_idle(fn, ctx));
    dp__passes_void(ctx->scopes);
    dp__recovery_of(&own);
    own.until_ns = dp__os_after_ms(ctx->config.timeout_ms);
    ctx->world.voter->wrappers = dp__wrappers_count(ctx);
    (void)dp__devices_drain(ctx); /* a communicator has failed there, and still is */
    dp_status status = dp__recover(&own);
    atomic_store_explicit(&ctx->entered, false, memory_order_release);
    if (status != DP_OK && !dp__has_failed(ctx))
        (void)dp__job_failed(ctx, DP_ERR_REMOTE, dp_last_error());
    if (status == DP_OK)
        dp__log(ctx, DP_LOG_WARN, "the job goes on: process %d of %d", ctx->info.process,
                ctx->info.process_count);
    return dp__named(fn, status);
}

DP_API dp_status dp_recover(dp_ctx *ctx)
{
    DP_TRY(dp__check_open(__func__, ctx));
    DP_TRY(dp__check_recovers(__func__, ctx));
    if (!dp__has_failed(ctx))
        return dp_error(DP_ERR_STATE, "%s: the job has not failed", __func__);
    return dp__job_again(__func__, ctx);
}

/* Logs why the join port is shut, the second time that dp_admit finds it so: the first time, the
   process that was process 0 before may be about to leave it. */
static void dp__join_port_warn(dp_ctx *ctx)
{
    dp__join_port *port = &ctx->world.voter->port;
    char why[DP__JOIN_PORT_BYTES];
    bool shut = ctx->info.process == 0 && dp__join_port_is_shut(port);
    port->tries = !shut ? 0 : port->tries < 3 ? port->tries + 1 : 3;
    if (port->tries == 2)
        dp__log(ctx, DP_LOG_WARN, "no process can come later: %s",
                dp__join_port_text(port, why, sizeof why));
}

DP_API dp_status dp_admit(dp_ctx *ctx, bool *out_came)
{
    bool waits;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out_came", out_came));
    DP_TRY(dp__check_between_steps(__func__, ctx));
    if (dp__mailbox_has_messages(ctx->world.mailbox))
        return dp_error(DP_ERR_STATE, "%s: messages have begun, and were not ended", __func__);
    if (ctx->world.voter == NULL &&
        ctx->config.recovers) { /* alone: nobody has a place to come back to */
        *out_came = false;
        return DP_OK;
    }
    DP_TRY(dp__check_recovers(__func__, ctx));
    dp__join_port_keep(ctx->world.voter);
    dp__join_port_warn(ctx);
    DP_TRY(dp__named(__func__, dp_any(ctx, dp__join_port_look(ctx->world.voter), &waits)));
    if (waits)
        DP_TRY(dp__job_again(__func__, ctx));
    *out_came = waits;
    return DP_OK;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
