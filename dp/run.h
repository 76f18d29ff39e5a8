/* dp/run.h - v0.2.0 - asking a context, and running on its devices - MIT licence

   Part of dp.h, which includes it.

   CONTENTS (search for the tag)
     >>asking    dp_info_get and the like
     >>lateness  which device comes last
     >>running   functions on the devices' threads
*/

#ifndef DP__ROOMS
#error "dp/run.h is a part of dp.h: include dp.h"
#else

/* ==== >>asking ===================================================================================
   What can be asked of a context, and which stream of a device it uses.                         */

DP_API dp_status dp_info_get(const dp_ctx *ctx, dp_info *out)
{
    DP_TRY(dp__check_open(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    *out = ctx->info;
    return DP_OK;
}

DP_API dp_status dp_config_get(const dp_ctx *ctx, dp_config *out)
{
    DP_TRY(dp__check_open(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    *out = ctx->config;
    return DP_OK;
}

DP_API dp_status dp_device_info_get(dp_ctx *ctx, int local_rank, dp_device_info *out)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_rank(__func__, ctx, "local_rank", local_rank));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    dp_dev *dev = ctx->devices[local_rank].dev;
    dp_status status = dev->ops->info(dev, out);
    out->compute_units = ctx->devices[local_rank].info.compute_units; /* not of a bound thread */
    return dp__leave(__func__, ctx, status);
}

DP_API dp_device dp_local_device(const dp_ctx *ctx, int local_rank)
{
    if (dp__check_open(__func__, ctx) != DP_OK ||
        dp__check_rank(__func__, ctx, "local_rank", local_rank) != DP_OK)
        return (dp_device){-1, -1};
    return ctx->devices[local_rank].id;
}

DP_API dp_stream *dp_local_stream(const dp_ctx *ctx, int local_rank)
{
    if (dp__check_open(__func__, ctx) != DP_OK ||
        dp__check_rank(__func__, ctx, "local_rank", local_rank) != DP_OK)
        return NULL;
    return ctx->devices[local_rank].stream;
}

DP_API dp_status dp_use_stream(dp_ctx *ctx, int local_rank, dp_stream *stream)
{
    DP_TRY(stream != NULL ? dp__check_ctx(__func__, ctx) : dp__check_open(__func__, ctx));
    DP_TRY(dp__check_rank(__func__, ctx, "local_rank", local_rank));
    DP_TRY(dp__check_alone(__func__, ctx));
    dp__device *device = &ctx->devices[local_rank];
    if (dp__has_failed(ctx)) { /* the user has to destroy theirs before dp_close */
        device->stream = device->own_stream;
        return DP_OK;
    }
    stream = stream != NULL ? stream : device->own_stream;
    if (stream->dev != device->dev)
        return dp_error(DP_ERR_INVALID,
                        "%s: the stream is not of local rank %d: make it for that rank", __func__,
                        local_rank);
    DP_TRY(dp__leave(__func__, ctx, dp__order_after(device, stream)));
    device->stream = stream;
    return DP_OK;
}

DP_API dp_status dp_wait(dp_ctx *ctx)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    return dp__leave(__func__, ctx, dp__sync_all(ctx));
}

/* ==== >>lateness =================================================================================
   Of processes dp/job.h knows it; of devices dp/meet.h does.                                    */

/* Tells which device comes last, where there is one process. */
static void dp__late_devices_info(dp_ctx *ctx, dp_late_info *out)
{
    dp__lock_enter(&ctx->lock);
    const dp__late *late = &ctx->late->is;
    if (late->verdict.process >= 0)
        dp__late_info(&late->verdict, out);
    out->rank = late->verdict.process;
    out->longest_rank = atomic_load_explicit(&late->longest, memory_order_relaxed);
    out->longest_s = (double)atomic_load_explicit(&late->longest_ns, memory_order_relaxed) * 1e-9;
    dp__lock_leave(&ctx->lock);
}

DP_API dp_status dp_late(const dp_ctx *ctx, dp_late_info *out)
{
    DP_TRY(dp__check_open(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    *out = (dp_late_info){.rank = -1, .longest_rank = -1};
    if (ctx->late != NULL && ctx->info.process_count == 1)
        dp__late_devices_info((dp_ctx *)(uintptr_t)ctx, out);
    else
        dp__job_late(ctx, out);
    return DP_OK;
}

/* ==== >>running ==================================================================================
   A function of the user's on every device, each on the thread of its own.                      */

typedef struct dp__run {
    dp_ctx *ctx;
    dp_scope *scope, **replicas;
    dp_run_fn fn;
    void *user;
    const dp__telling *telling;
} dp__run;
_Static_assert(sizeof(dp__run) <= DP__JOB_BYTES, "a run fits into the team");

static void dp__run_part(int local_rank, void *user)
{
    const dp__run *run = user;
    dp__slot *slot = &run->ctx->slots[local_rank];
    static const char what[DP__ACTIVITY_NAME] = "a function under dp_run";
    dp__frame frame = {.what = what,
                       .padded = true,
                       .ctx = run->ctx,
                       .scope = run->scope,
                       .local_rank = local_rank,
                       .together = true,
                       .owns_device = true};
    if (local_rank > 0 && run->telling != NULL)
        dp__telling_worker(run->telling);
    dp__frame_enter(&frame);
    dp_status status =
        dp__frame_leave(&frame, run->fn(local_rank, run->replicas[local_rank], run->user));
    bool behind = dp__meet_leave(run->ctx, (size_t)local_rank, status);
    if (slot->status != status) /* a store takes the line from the other thread */
        slot->status = status;
    if (status == DP_OK)
        return;
    slot->behind = behind;
    memcpy(slot->text, dp__of_thread.text, sizeof slot->text);
}

static dp_status dp__run_scopes(dp_scope *scope)
{
    size_t count = (size_t)scope->ctx->info.local_count;
    if (scope->replicas == NULL) {
        dp_scope **replicas = dp__scope_bytes(scope, count * sizeof *replicas, sizeof *replicas);
        if (replicas == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu scopes", count);
        for (size_t i = 0; i < count; i++)
            replicas[i] = NULL;
        scope->replicas = replicas;
    }
    size_t missing = 0;
    for (size_t i = 0; i < count; i++)
        missing += scope->replicas[i] == NULL;
    if (missing > 0)
        dp__scopes_reuse(scope->ctx, scope, scope->replicas, count);
    for (size_t i = 0; i < count && missing > 0; i++) {
        if (scope->replicas[i] == NULL)
            scope->replicas[i] = dp__scope_make(scope->ctx, scope);
        if (scope->replicas[i] == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu scopes", count);
    }
    return DP_OK;
}

/* Returns the first failure in rank order; one that only waited for another that failed comes
   last. */
static dp_status dp__run_result(const dp_ctx *ctx)
{
    const dp__slot *worst = NULL;
    for (int i = 0; i < ctx->info.local_count; i++) {
        const dp__slot *slot = &ctx->slots[i];
        if (slot->status != DP_OK && (worst == NULL || (worst->behind && !slot->behind)))
            worst = slot;
    }
    if (worst == NULL)
        return DP_OK;
    return dp_error(worst->status, "dp_run: local rank %d: %s", (int)(worst - ctx->slots),
                    worst->text[0] != '\0' ? worst->text : dp_status_text(worst->status));
}

static dp_status dp__run_all(dp__run *run)
{
    dp__telling telling;
    dp_ctx *ctx = run->ctx;
    DP_TRY(dp__run_scopes(run->scope));
    run->replicas = run->scope->replicas;
    if (ctx->info.local_count == 1) {
        dp__meet_begin_run(ctx);
        run->telling = dp__telling_begin(ctx, &telling);
        dp__run_part(0, run);
        dp__telling_end(run->telling);
        return dp__run_result(ctx);
    }
    if (!dp__team_enter(ctx->team)) /* the workers are busy with another thread's copy just now */
        return dp_error(DP_ERR_STATE, "dp_run: another thread is inside this context");
    dp__meet_begin_run(ctx);
    run->telling = dp__telling_begin(ctx, &telling);
    dp__team_run(ctx->team, ctx->info.local_count, dp__run_part,
                 dp__team_job(ctx->team, run, sizeof *run));
    dp__telling_end(run->telling);
    dp__team_exit(ctx->team);
    return dp__run_result(ctx);
}

DP_API dp_status dp_run(dp_ctx *ctx, dp_scope *scope, dp_run_fn fn, void *user)
{
    dp_scope *own = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    if (scope != NULL)
        DP_TRY(dp__check_scope_of(__func__, scope, ctx));
    if (fn == NULL)
        return dp_error(DP_ERR_INVALID, "%s: fn is NULL", __func__);
    DP_TRY(dp__enter(__func__, ctx));
    dp_status status = scope == NULL ? dp__temp_begin(ctx, &own) : DP_OK;
    dp__run run = {.ctx = ctx, .scope = scope != NULL ? scope : own, .fn = fn, .user = user};
    if (status == DP_OK)
        status = dp__run_all(&run);
    status = dp__exit(__func__, ctx, status);
    dp__scope_end(own); /* deferred functions run alone */
    return status;
}

/* Rows of the ranks before this one, where the first total % rank_count have one more. */
static int64_t dp__rows_before(int64_t total, int rank, int rank_count)
{
    int64_t more = total % rank_count;
    return total / rank_count * rank + (rank < more ? rank : more);
}

DP_API int64_t dp_local_share(const dp_ctx *ctx, int local_rank, int64_t count, int64_t *out_first)
{
    if (dp__check_open(__func__, ctx) != DP_OK ||
        dp__check_rank(__func__, ctx, "local_rank", local_rank) != DP_OK ||
        dp__check_pointer(__func__, "out_first", out_first) != DP_OK)
        return -1;
    if (count < 0) {
        dp_error(DP_ERR_INVALID, "%s: count is %lld", __func__, (long long)count);
        return -1;
    }
    *out_first = dp__rows_before(count, local_rank, ctx->info.local_count);
    return dp__rows_before(count, local_rank + 1, ctx->info.local_count) - *out_first;
}

DP_API dp_status dp_my_rows(const dp_ctx *ctx, int64_t total, int64_t *out_first,
                            int64_t *out_count)
{
    DP_TRY(dp__check_open(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out_first", out_first));
    DP_TRY(dp__check_pointer(__func__, "out_count", out_count));
    if (total < 0)
        return dp_error(DP_ERR_INVALID, "%s: total is %lld", __func__, (long long)total);
    const dp_info *info = &ctx->info;
    *out_first = dp__rows_before(total, info->rank_first, info->rank_count);
    *out_count = dp__rows_before(total, info->rank_first + info->local_count, info->rank_count) -
                 *out_first;
    return DP_OK;
}

DP_API dp_value dp_part_of(const dp_ctx *ctx, dp_value out, int local_rank)
{
    if (dp__check_open(__func__, ctx) != DP_OK ||
        dp__check_rank(__func__, ctx, "local_rank", local_rank) != DP_OK)
        return dp__error_value(NULL, DP_ERR_INVALID, "dp_part_of: ctx or local_rank is wrong");
    return ctx->info.local_count > 1 ? dp_at(out, (size_t)local_rank) : out;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
