/* dp/lanes.h - v0.2.0 - the lane beside the caller, on which buckets travel - MIT licence

   Part of dp.h, which includes it.

   CONTENTS (search for the tag)
     >>courier    buckets travel while the caller computes
*/

#ifndef DP__ROOMS
#error "dp/lanes.h is a part of dp.h: include dp.h"
#else

/* ==== >>courier ================================================================================
   A separate thread reduces the buckets of one pass at a time, strictly in order, each as soon as
   all local ranks have reported its units. It has its own communicator and streams, and leaves the
   workers to the caller. Its streams are ordered after those on which units were reported, and it
   waits for them, one bucket after another. So no other thread has to wait, and a failure is known
   where it happens. In dp_reducer_finish, where the caller would do nothing but wait for it, the
   caller carries what it has not begun: that takes no hand-over.

   Only begin and finish decide which pass the courier works on, because every process calls these
   in the same order: the oldest open pass until it has finished, then the next. If a pass finishes
   while an older one is open, the caller reduces it over the caller's communicator: nothing may
   wait for what the same thread does later. So no order depends on timing.                     */

/* Under the lock. What a local rank has reported by now, its lane's stream comes after. */
static dp_status dp__reported_mark(const dp__lane *lane, int local_rank, dp_stream *stream)
{
    dp__lane_rank *rank = lane->ranks != NULL ? &lane->ranks[local_rank] : NULL;
    const dp__device *device = &lane->ctx->devices[local_rank];
    const dp_device_ops *ops = device->dev->ops;
    if (rank == NULL || rank->reported == NULL)
        return DP_OK;
    stream = stream != NULL ? stream : device->stream;
    if (rank->last != NULL && rank->last != stream)
        DP_TRY(ops->event_wait(stream, rank->reported));
    rank->last = stream;
    return ops->event_record(rank->reported, stream);
}

/* The lane's streams come after what was reported; or are waited for. */
static dp_status dp__lane_order(const dp__lane *lane, bool wait)
{
    for (int i = 0; i < lane->ctx->info.local_count; i++) {
        const dp__lane_rank *rank = &lane->ranks[i];
        if (rank->reported != NULL)
            DP_TRY(wait ? dp__sync(rank->stream)
                        : rank->stream->dev->ops->event_wait(rank->stream, rank->reported));
    }
    return DP_OK;
}

typedef struct dp__transfer {
    dp_reducer *reducer;
    size_t bucket;
    bool released;
} dp__transfer;

/* The next bucket to carry, if any. The pass cannot end before a bucket taken here has arrived. */
static bool dp__transfer_take(const dp__lane *lane, dp__transfer *out)
{
    dp_ctx *ctx = lane->ctx;
    dp__lock_enter(&ctx->lock);
    dp_reducer *reducer = lane->riding;
    bool some = reducer != NULL && reducer->next < reducer->bucket_count &&
                (reducer->released || reducer->buckets[reducer->next].owed == 0);
    if (some)
        *out = (dp__transfer){reducer, reducer->next++, reducer->released};
    dp__lock_leave(&ctx->lock);
    return some && !dp__has_failed(ctx);
}

/* A bucket that travels before finish is complete, so all of it is used. In those that travel later
   it is known what nobody uses, and that is left out. */
static dp_status dp__transfer_run(const dp__transfer *transfer)
{
    dp_reducer *reducer = transfer->reducer;
    DP_TRY(dp__lane_order(reducer->lane, false));
    DP_TRY(dp__bucket_travel(reducer, transfer->bucket, reducer->lane,
                             transfer->released || reducer->fixed));
    DP_TRY(dp__lane_order(reducer->lane, true));
    return dp__poll(reducer->lane);
}

/* The rest of a trip after dp_reducer_finish was called is not hidden. A trip starts when all have
   come for it: in finish they have, as ranks have just told each other about the pass. */
static void dp__transfer_done(const dp__transfer *transfer, uint64_t start)
{
    dp_reducer *reducer = transfer->reducer;
    uint64_t end = dp__os_now_ns();
    dp__clock *clock = &reducer->clock;
    dp__lock_enter(&reducer->ctx->lock);
    reducer->done++;
    dp__bucket_timed(reducer, transfer->bucket, start, end);
    clock->travel += end - start;
    clock->bytes = reducer->carried;
    end = clock->finished > 0 && clock->finished < end ? clock->finished : end;
    clock->hidden += end > start ? end - start : 0;
    dp__lock_leave(&reducer->ctx->lock);
}

static dp_status dp__transfer_carry(const dp__lane *lane, const dp__transfer *transfer)
{
    uint64_t start = dp__os_now_ns(), waited = dp__journal_waited_ns(lane);
    dp__of_thread.fresh = false;
    dp__of_thread.culprit = 0;
    dp_status status = dp__shared_failure(lane->ctx, dp__transfer_run(transfer));
    if (status != DP_OK)
        dp__job_end(lane->ctx, status, dp__of_thread.text);
    else
        dp__transfer_done(transfer, start + dp__journal_waited_ns(lane) - waited);
    return status;
}

/* Unless another thread does, which has to be woken to look again. */
static void dp__lane_carry(dp__lane *lane)
{
    dp__transfer transfer;
    if (atomic_exchange_explicit(&lane->carrying, true, memory_order_acquire))
        return;
    dp__of_thread.lane = lane;
    while (dp__transfer_take(lane, &transfer) && dp__transfer_carry(lane, &transfer) == DP_OK)
        dp__courier_report(lane->courier);
    dp__of_thread.lane = NULL;
    atomic_store_explicit(&lane->carrying, false, memory_order_release);
}

static void dp__courier_carry(void *user)
{
    dp__trace_who(DP__TRACE_THREADS - 1, "courier");
    dp__of_thread.beside = true;
    dp__lane_carry(user);
}

/* Streams, for the first reducer; if something fails, what was made stays. */
static dp_status dp__lane_equip(const char *fn, dp__lane *lane)
{
    dp_ctx *ctx = lane->ctx;
    size_t count = (size_t)ctx->info.local_count, bytes = count * sizeof *lane->ranks;
    if (lane->ranks == NULL) {
        lane->ranks = dp__host_alloc(&ctx->host, bytes, 64);
        if (lane->ranks == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu streams", fn, count);
        memset(lane->ranks, 0, bytes);
    }
    for (size_t i = 0; i < count; i++) {
        dp__lane_rank *rank = &lane->ranks[i];
        dp_dev *dev = ctx->devices[i].dev;
        if (rank->stream == NULL)
            DP_TRY(dev->ops->stream_create(dev, 0, &rank->stream));
        if (rank->reported == NULL && !dp__is_host(&ctx->devices[i]))
            DP_TRY(dev->ops->event_create(dev, &rank->reported));
    }
    return DP_OK;
}

/* dp__courier.lookout: shows other processes what the courier is in that the caller waits for, and
   logs it. */
DP__COLD static void dp__courier_look(void *user, uint64_t waited_ns, bool warns)
{
    const dp__lane *lane = user;
    char text[DP__ACTIVITY_BYTES];
    dp__activity_relay(lane->ctx, 0, waited_ns > 0 ? &lane->activity : NULL);
    if (!warns || dp__activity_text(&lane->activity, waited_ns / 2, "", text)[0] == '\0')
        return;
    dp__log(lane->ctx, DP_LOG_WARN, "the courier is waited for: it is in %s", text);
    dp__activity_ask(&lane->activity, dp__os_process_id());
}

/* For the first reducer; does nothing where no pass can ride. */
static dp_status dp__lane_begin(const char *fn, dp__lane *lane)
{
    dp_ctx *ctx = lane->ctx;
    dp__courier *courier = NULL;
    if (lane->comm == NULL || lane->courier != NULL)
        return DP_OK;
    DP_TRY(dp__lane_equip(fn, lane));
    bool spin = ctx->config.thread_count > ctx->info.local_count;
    const dp__lookout lookout = dp__lookout_of(ctx, dp__courier_look, lane);
    DP_TRY(dp__courier_open(&ctx->host, spin, dp__courier_carry, lane, &lookout, &courier));
    dp__lock_enter(&ctx->lock);
    lane->courier = courier;
    dp__lock_leave(&ctx->lock);
    return DP_OK;
}

/* When a context closes, before others see it leave. A pass that is still open will not be
   finished: the collective that the courier is in must not wait for others, nor they for it. */
static void dp__lane_give_up(dp__lane *lane)
{
    if (lane->riding == NULL)
        return;
    dp__of_thread.culprit = 0;
    if (dp__job_failed(lane->ctx, DP_ERR_ABORTED, "dp_close: in an open pass"))
        lane->ctx->failing->tell(lane->ctx);
    dp__comm_abort(lane->comm);
}

static void dp__lane_end(dp__lane *lane)
{
    dp_ctx *ctx = lane->ctx;
    if (lane->courier != NULL)
        dp__courier_close(&ctx->host, lane->courier);
    lane->courier = NULL;
    for (int i = 0; lane->ranks != NULL && i < ctx->info.local_count; i++) {
        const dp__lane_rank *rank = &lane->ranks[i];
        if (rank->stream != NULL)
            rank->stream->dev->ops->stream_destroy(rank->stream);
        if (rank->reported != NULL)
            rank->reported->dev->ops->event_destroy(rank->reported);
    }
    if (lane->comm != NULL)
        lane->comm->ops->close(lane->comm);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
