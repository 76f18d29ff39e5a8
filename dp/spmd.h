/* dp/spmd.h - v0.2.0 - collectives that each rank calls for itself - MIT licence

   Part of dp.h, which includes it. Who calls is known by what runs on the thread: a function under
   dp_run, or a method of a replica. What they bring comes together in dp/meet.h.

   CONTENTS (search for the tag)
     >>bringing  what one of them brings
     >>replicas  the replicas of a pass meet
     >>ranks     local ranks do, under dp_run or in methods
*/

#ifndef DP__ROOMS
#error "dp/spmd.h is a part of dp.h: include dp.h"
#else

/* ==== >>bringing ===============================================================================
   Each checks what it brings before the others see it: a call that is wrong is its own.         */

/* Checks what a rank asks for and its memory, of which a barrier has none. That it lies on the
   rank's device is not checked: only the table could tell. */
static dp_status dp__check_brought(const char *fn, const dp_ctx *ctx, int local_rank,
                                   const dp_coll_call *want)
{
    if (want->local == NULL)
        return DP_OK;
    DP_TRY(dp__check_asked(fn, ctx, want));
    const dp__rule *rule = &dp__rules[want->verb];
    const dp__device *device = &ctx->devices[local_rank];
    const char *send = want->local[0].send, *recv = want->local[0].recv;
    size_t block = want->count * dp__dtype_sizes[want->dtype];
    size_t own = (size_t)(ctx->info.rank_first + local_rank) * block;
    size_t send_bytes = dp__meet_blocks(ctx, rule->send_all, block);
    size_t recv_bytes = dp__meet_blocks(ctx, rule->recv_all, block);
    if (want->count == 0)
        return DP_OK;
    if (send == NULL || recv == NULL)
        return dp_error(DP_ERR_INVALID, "%s: %s is NULL", fn, send == NULL ? "send" : "recv");
    DP_TRY(dp__check_owned(fn, "send", device, send));
    DP_TRY(dp__check_owned(fn, "recv", device, recv));
    bool in_place = send + (rule->send_all ? own : 0) == recv + (rule->recv_all ? own : 0);
    if (!in_place && dp__ranges_overlap(send, send_bytes, recv, recv_bytes))
        return dp_error(DP_ERR_INVALID, "%s: send and recv overlap, but are not in place", fn);
    return DP_OK;
}

/* ==== >>replicas ===============================================================================
   The replicas of a pass meet each other; where dp_distributed runs it, those of all processes. */

/* Begins a run of the replicas of a pass, which are partners. */
static void dp__meet_begin_pass(dp_pass *pass)
{
    dp__meet *meet = pass->ctx->meet;
    meet->who = DP__REPLICAS;
    meet->pass = pass;
    meet->count = pass->count;
    meet->open = pass->face->own_threads;
    meet->over_ranks = dp__ops(pass->face)->over_ranks;
    meet->takers = &pass->takers;
    for (size_t r = 0; r < pass->count && meet->open; r++)
        dp__meet_partner(meet, r, pass->records[r].call.local_rank, pass->face->threads[r],
                         pass->records[r].leaves_nothing);
    dp__meet_begin(meet);
}

/* Brings the part of a replica. The only one here meets those of other processes. */
static dp_status dp__replica_meets(dp__record *record, const dp__coll *want)
{
    dp_pass *pass = record->pass;
    dp_ctx *ctx = pass->ctx;
    size_t replica = (size_t)(record - pass->records);
    if (pass->count > 1 && ctx->meet->pass != pass)
        return dp_error(DP_ERR_STATE, "%s: the methods of this pass have returned", want->fn);
    if (pass->count > 1)
        return dp__leave(want->fn, ctx, dp__meet_enter(ctx, replica, want));
    DP_TRY(dp__enter(want->fn, ctx));
    dp__meet_begin_pass(pass);
    dp_status status = dp__meet_enter(ctx, 0, want);
    (void)dp__meet_leave(ctx, 0, status);
    dp__meet_end_pass(ctx);
    return dp__exit(want->fn, ctx, status);
}

static dp_status dp__call_reduce(const char *fn, dp_call *call, const dp_coll_call *want)
{
    dp_ctx *ctx = call->ctx;
    dp__record *record = dp__outermost_of_ranks(call->record);
    const dp_part *part = &want->local[0];
    DP_TRY(dp__check_brought(fn, ctx, call->local_rank, want));
    if (dp__has_partners(record->pass))
        return dp__replica_meets(record, &(dp__coll){fn, &ctx->lanes[DP__CALLER], *want});
    dp_tensor to = dp__flat(part->recv, call->device, want->dtype, (int64_t)want->count), from = to;
    from.data = (void *)(uintptr_t)part->send;
    return dp__leave(fn, ctx,
                     part->send != part->recv ? dp__copy_tensor(ctx, &to, &from, NULL) : DP_OK);
}

DP_API dp_status dp_call_all_reduce(dp_call *call, const void *send, void *recv, size_t count,
                                    dp_dtype dtype, dp_op op)
{
    DP_TRY(dp__check_call(__func__, call));
    const dp_part part = {send, recv, NULL};
    const dp_coll_call want = {DP_ALL_REDUCE, &part, count, dtype, op, 1, 0};
    return dp__call_reduce(__func__, call, &want);
}

/* Checks a tensor that is to stand for a buffer of a call. */
static dp_status dp__check_call_buffer(const char *fn, const dp_call *call, const char *what,
                                       const dp_tensor *tensor)
{
    dp__device *at = NULL;
    DP_TRY(dp__check_tensor(fn, what, tensor));
    DP_TRY(dp__check_device(fn, call->ctx, tensor->device, &at));
    if (!dp__reaches(dp__call_device(call), at))
        return dp_error(DP_ERR_INVALID, "%s: %s is on {%d, %d}, which local rank %d does not reach",
                        fn, what, (int)tensor->device.backend, (int)tensor->device.index,
                        call->local_rank);
    if (!dp_is_contiguous(tensor))
        return dp_error(DP_ERR_INVALID, "%s: %s has gaps, or is not row-major", fn, what);
    return DP_OK;
}

DP_API dp_status dp_call_all_reduce_tensor(dp_call *call, const dp_tensor *send,
                                           const dp_tensor *recv, dp_op op)
{
    DP_TRY(dp__check_call(__func__, call));
    DP_TRY(dp__check_call_buffer(__func__, call, "send", send));
    DP_TRY(dp__check_call_buffer(__func__, call, "recv", recv));
    DP_TRY(dp__check_writable(__func__, "recv", recv));
    if (send->dtype != recv->dtype || !dp__same_shape(send, recv))
        return dp_error(DP_ERR_MISMATCH, "%s: send and recv differ in dtype or shape", __func__);
    const dp_part part = {send->data, recv->data, NULL};
    const dp_coll_call want = {
        DP_ALL_REDUCE, &part, (size_t)dp__count(send), (dp_dtype)send->dtype, op, 1, 0};
    return dp__call_reduce(__func__, call, &want);
}

/* ==== >>ranks ==================================================================================
   The innermost function on the thread that stands for a rank says which one calls.             */

/* Does what the only local rank asks for, whoever calls. */
static dp_status dp__rank_alone(dp_ctx *ctx, const dp__coll *want)
{
    if (ctx->info.local_count > 1)
        return dp_error(DP_ERR_STATE,
                        "%s: this process has %d local ranks, and what calls this is none of them: "
                        "call it in a function under dp_run",
                        want->fn, ctx->info.local_count);
    if (want->call.local == NULL)
        return dp__barrier_alone(want->fn, ctx);
    DP_TRY(dp__check_brought(want->fn, ctx, 0, &want->call));
    DP_TRY(dp__enter(want->fn, ctx));
    return dp__exit(want->fn, ctx, dp__collective_run(want));
}

/* Brings what a method asks for. */
static dp_status dp__rank_in_method(dp__record *record, const dp__coll *want)
{
    const dp_pass *pass = record->pass;
    if (!dp__ops(pass->face)->over_ranks)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "%s: this pass of '%s' is not over all ranks, as one by dp_distributed is: "
                        "dp_call_all_reduce goes over its replicas",
                        want->fn, pass->runs->name);
    DP_TRY(dp__check_brought(want->fn, pass->ctx, record->call.local_rank, &want->call));
    return dp__replica_meets(record, want);
}

/* Brings what a function under dp_run asks for. */
static dp_status dp__rank_in_run(dp_ctx *ctx, int local_rank, const dp__coll *want)
{
    DP_TRY(dp__check_brought(want->fn, ctx, local_rank, &want->call));
    return dp__leave(want->fn, ctx, dp__meet_enter(ctx, (size_t)local_rank, want));
}

/* Returns the replica that a function stands for; NULL: it stands for none, as a method does that
   runs where its module is, and a deferred function. */
static dp__record *dp__rank_record(const dp__frame *frame)
{
    if (frame->call == NULL)
        return NULL;
    dp__record *record = dp__outermost_of_ranks(frame->call->record);
    const dp_pass *pass = record->pass;
    bool several = frame->ctx->info.local_count > 1 || dp__has_partners(pass);
    return pass->face != NULL && several ? record : NULL;
}

static dp_status dp__rank_collective(dp_ctx *ctx, dp__coll *want)
{
    DP_TRY(dp__check_ctx(want->fn, ctx));
    want->lane = &ctx->lanes[DP__CALLER];
    dp__exchanged();
    for (const dp__frame *frame = dp__of_thread.frames; frame != NULL; frame = frame->outer) {
        if (frame->ctx != ctx)
            continue;
        if (frame->on_all)
            return dp__busy(want->fn, ctx);
        if (frame->call == NULL && frame->together)
            return dp__rank_in_run(ctx, frame->local_rank, want);
        dp__record *record = dp__rank_record(frame);
        if (record != NULL)
            return dp__rank_in_method(record, want);
    }
    return dp__rank_alone(ctx, want);
}

DP_API dp_status dp_rank_all_reduce(dp_ctx *ctx, const void *send, void *recv, size_t count,
                                    dp_dtype dtype, dp_op op)
{
    const dp_part part = {send, recv, NULL};
    return dp__rank_collective(
        ctx, &(dp__coll){__func__, NULL, {DP_ALL_REDUCE, &part, count, dtype, op, 1, 0}});
}

DP_API dp_status dp_rank_broadcast(dp_ctx *ctx, void *buffer, size_t count, dp_dtype dtype,
                                   int root)
{
    const dp_part part = {buffer, buffer, NULL};
    return dp__rank_collective(
        ctx, &(dp__coll){__func__, NULL, {DP_BROADCAST, &part, count, dtype, DP_OP_SUM, 1, root}});
}

DP_API dp_status dp_rank_all_gather(dp_ctx *ctx, const void *send, void *recv, size_t count_each,
                                    dp_dtype dtype)
{
    const dp_part part = {send, recv, NULL};
    return dp__rank_collective(
        ctx,
        &(dp__coll){__func__, NULL, {DP_ALL_GATHER, &part, count_each, dtype, DP_OP_SUM, 1, 0}});
}

DP_API dp_status dp_rank_reduce_scatter(dp_ctx *ctx, const void *send, void *recv,
                                        size_t count_each, dp_dtype dtype, dp_op op)
{
    const dp_part part = {send, recv, NULL};
    return dp__rank_collective(
        ctx, &(dp__coll){__func__, NULL, {DP_REDUCE_SCATTER, &part, count_each, dtype, op, 1, 0}});
}

DP_API dp_status dp_rank_barrier(dp_ctx *ctx)
{
    return dp__rank_collective(
        ctx, &(dp__coll){__func__, NULL, {DP_ALL_REDUCE, NULL, 1, DP_BOOL, DP_OP_MAX, 1, 0}});
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
