/* dp/ranks.h - v0.2.0 - collectives of the ranks of a job - MIT licence

   Part of dp.h, which includes it. It holds what comes between a collective that a user asks for
   and the table of functions that carries it out: checks, what a table may lack, and the way
   through the host.

   CONTENTS (search for the tag)
     >>verbs      what each collective sends and receives, and whether a call keeps to it
     >>reducing   the public edge of the collectives
     >>telling    small things that ranks tell each other
     >>agreement  how it went on all ranks, and numbers of their processes
     >>fallbacks  collectives that a table may lack, memory that is not aligned
     >>staging    collectives through the host
*/

#ifndef DP__ROOMS
#error "dp/ranks.h is a part of dp.h: include dp.h"
#else

/* ==== >>verbs ==================================================================================
   What each verb sends and receives is in one table, by which arguments are checked. Calls come
   from the caller and, at the same time, from the courier: each has a communicator and streams. */

typedef struct dp__coll { /* one call */
    const char *fn;
    dp__lane *lane;
    dp_coll_call call; /* its parts may lack streams */
} dp__coll;

static dp_stream *dp__lane_stream(const dp__lane *lane, int local_rank)
{
    return lane->ranks != NULL ? lane->ranks[local_rank].stream
                               : lane->ctx->devices[local_rank].stream;
}

static bool dp__sends(const dp__coll *coll, int local_rank)
{
    return !dp__rules[coll->call.verb].send_at_root ||
           coll->lane->ctx->info.rank_first + local_rank == coll->call.root;
}

/* Whether local ranks may have one owner, who receives for all of them. */
static bool dp__may_have_one_owner(const dp__coll *coll)
{
    return dp__rules[coll->call.verb].one_owner && dp__all_are_host(coll->lane->ctx);
}

static bool dp__receives(const dp__coll *coll, int local_rank)
{
    const dp__rule *rule = &dp__rules[coll->call.verb];
    if (coll->call.local[local_rank].recv == NULL &&
        (rule->recv_optional || dp__may_have_one_owner(coll)))
        return false;
    return !rule->recv_at_root || coll->lane->ctx->info.rank_first + local_rank == coll->call.root;
}

/* Bytes of all blocks, or of one. */
static size_t dp__blocks_bytes(const dp__coll *coll, bool all)
{
    size_t blocks = all ? (size_t)coll->lane->ctx->info.rank_count : 1;
    return coll->call.count * dp__dtype_sizes[coll->call.dtype] * blocks;
}

/* Whether what rank i receives lies where rank k sends the same. */
static bool dp__is_in_place(const dp__coll *coll, int i, int k)
{
    const dp__rule *rule = &dp__rules[coll->call.verb];
    size_t block = dp__blocks_bytes(coll, false), first = (size_t)coll->lane->ctx->info.rank_first;
    size_t to_i = rule->send_all ? (first + (size_t)i) * block : 0;
    size_t from_k = rule->recv_all ? (first + (size_t)k) * block : 0;
    return rule->in_place && (i == k || dp__may_have_one_owner(coll)) &&
           (const char *)coll->call.local[k].send + to_i ==
               (const char *)coll->call.local[i].recv + from_k;
}

static bool dp__share_memory(const dp_ctx *ctx, int a, int b)
{
    return dp__reaches(&ctx->devices[a], &ctx->devices[b]) ||
           ctx->config.devices[a] == ctx->config.devices[b];
}

/* Whether what rank i writes does not overlap what rank k reads or writes. */
static bool dp__parts_apart(const dp__coll *coll, int i, int k)
{
    const void *recv = coll->call.local[i].recv;
    size_t recv_bytes = dp__blocks_bytes(coll, dp__rules[coll->call.verb].recv_all);
    size_t send_bytes = dp__blocks_bytes(coll, dp__rules[coll->call.verb].send_all);
    if (!dp__receives(coll, i) || !dp__share_memory(coll->lane->ctx, i, k))
        return true;
    if (i != k && dp__receives(coll, k) &&
        dp__ranges_overlap(recv, recv_bytes, coll->call.local[k].recv, recv_bytes))
        return false;
    return !dp__sends(coll, k) ||
           !dp__ranges_overlap(recv, recv_bytes, coll->call.local[k].send, send_bytes) ||
           dp__is_in_place(coll, i, k);
}

static dp_status dp__check_part(const dp__coll *coll, int local_rank)
{
    const dp_part *part = &coll->call.local[local_rank];
    const dp__device *device = &coll->lane->ctx->devices[local_rank];
    if (coll->call.count > 0 && part->send == NULL && dp__sends(coll, local_rank))
        return dp_error(DP_ERR_INVALID, "%s: send of local rank %d is NULL", coll->fn, local_rank);
    if (coll->call.count > 0 && part->recv == NULL && dp__receives(coll, local_rank))
        return dp_error(DP_ERR_INVALID, "%s: recv of local rank %d is NULL", coll->fn, local_rank);
    if (coll->call.count > 0 && dp__sends(coll, local_rank))
        DP_TRY(dp__check_owned(coll->fn, "send", device, part->send));
    if (coll->call.count > 0 && dp__receives(coll, local_rank))
        DP_TRY(dp__check_owned(coll->fn, "recv", device, part->recv));
    if (part->stream != NULL && part->stream->dev != device->dev)
        return dp_error(DP_ERR_INVALID, "%s: the stream of local rank %d is of another device",
                        coll->fn, local_rank);
    return DP_OK;
}

/* Checks what a call asks for, whatever memory it brings. */
static dp_status dp__check_asked(const char *fn, const dp_ctx *ctx, const dp_coll_call *call)
{
    size_t bytes = 0;
    DP_TRY(dp__check_dtype(fn, call->dtype));
    if (dp__rules[call->verb].reduces && (unsigned)call->op > DP_OP_MAX)
        return dp_error(DP_ERR_INVALID, "%s: %d is not a dp_op", fn, (int)call->op);
    if (call->root < 0 || call->root >= ctx->info.rank_count)
        return dp_error(DP_ERR_INVALID, "%s: root %d, there are %d ranks", fn, call->root,
                        ctx->info.rank_count);
    if (!dp__mul(call->count, dp__dtype_sizes[call->dtype], &bytes) ||
        !dp__mul(bytes, (size_t)ctx->info.rank_count, &bytes) || bytes > INT64_MAX / 2)
        return dp_error(DP_ERR_INVALID, "%s: more elements than can be counted", fn);
    return DP_OK;
}

static dp_status dp__check_coll(const dp__coll *coll)
{
    const dp_ctx *ctx = coll->lane->ctx;
    DP_TRY(dp__check_pointer(coll->fn, "local", coll->call.local));
    DP_TRY(dp__check_asked(coll->fn, ctx, &coll->call));
    for (int i = 0; i < ctx->info.local_count; i++)
        DP_TRY(dp__check_part(coll, i));
    for (int i = 0; i < ctx->info.local_count; i++)
        for (int k = 0; k < ctx->info.local_count; k++)
            if (!dp__parts_apart(coll, i, k))
                return dp_error(DP_ERR_INVALID,
                                "%s: recv of local rank %d overlaps a buffer of "
                                "local rank %d",
                                coll->fn, i, k);
    return DP_OK;
}

/* ==== >>reducing ===============================================================================
   Collectives at the public edge. Arguments are checked. Then a job of one rank is served at once,
   any other by the table of functions, or by >>fallbacks for what the table lacks.             */

static dp_status dp__scale_alone(const dp__coll *coll, const dp_part *part)
{
    dp_ctx *ctx = coll->lane->ctx;
    const dp_kernel_args args = dp__sum_args(coll->call.dtype, coll->call.count, &part->send, 1,
                                             coll->call.scale, 1, &part->recv);
    return dp__kernel(ctx, &ctx->devices[0], part->stream, &args);
}

/* In a world of one every collective is a copy, which may be scaled. */
static dp_status dp__copy_alone(const dp__coll *coll)
{
    const dp_part *part = &coll->lane->parts[0];
    if (!dp__receives(coll, 0))
        return DP_OK;
    if (!(coll->call.scale >= 1 && coll->call.scale <= 1)) /* NaN is not 1 */
        return dp__scale_alone(coll, part);
    if (part->send == part->recv)
        return DP_OK;
    return part->stream->dev->ops->copy(part->stream, part->recv, part->send,
                                        dp__blocks_bytes(coll, false));
}

static dp_status dp__detour(const dp__coll *coll);

/* In this thread's row of the timeline, and in those of the streams. */
static void dp__coll_trace(const dp__coll *coll, const dp_coll_call *call, char phase)
{
    char name[DP__WORDS_BYTES];
    if (!dp__trace_is_on())
        return;
    name[0] = '\0';
    if (phase == 'B') {
        const dp__signature is = dp__sign(call, dp__no_purpose);
        (void)dp__signature_text(&is, name, sizeof name);
        dp_trace_begin(name);
    } else {
        dp_trace_end();
    }
    for (int i = 0; i < coll->lane->ctx->info.local_count; i++)
        dp__trace_stream(coll->lane->parts[i].stream, dp__lane_row(coll->lane, i), phase, name);
}

/* A failure here while other processes take part is the job's failure, whatever its class: they
   cannot know about it. */
static dp_status dp__shared_failure(const dp_ctx *ctx, dp_status status)
{
    if (status != DP_OK && !dp__of_thread.fresh)
        dp_error(status, "%s", dp_status_text(status));
    if (status == DP_OK || ctx->info.process_count == 1 || dp_status_class(status) == DP_CLASS_JOB)
        return status;
    return dp_error(DP_ERR_INTERNAL, "%s (%s)", dp__of_thread.text, dp_status_name(status));
}

/* `verb` of a table: what was asked for, or what takes its place. */
static dp_status dp__table_run(const dp__coll *coll, dp_verb verb, size_t count, double scale)
{
    const dp__lane *lane = coll->lane;
    dp_coll_call call = coll->call;
    DP_TRY(dp__check_replays(coll->fn));
    call.verb = verb;
    call.local = lane->parts;
    call.count = count;
    call.scale = scale;
    DP_TRY(dp__journal_begin(lane, coll->fn, &call));
    dp__coll_trace(coll, &call, 'B');
    dp_status status = lane->comm->ops->run(lane->comm, &call);
    if (dp_status_class(status) == DP_CLASS_PASS) /* and not, as it should be, JOB */
        status = dp__shared_failure(lane->ctx, status);
    dp__coll_trace(coll, &call, 'E');
    return dp__journal_end(lane, status);
}

static bool dp__table_has(const dp_coll_ops *ops, dp_verb verb)
{
    return (ops->verbs >> verb & 1) != 0;
}

static dp_status dp__collective_served(const dp__coll *coll)
{
    if (!dp__table_has(coll->lane->comm->ops, coll->call.verb))
        return dp__detour(coll);
    return dp__table_run(coll, coll->call.verb, coll->call.count,
                         dp__rules[coll->call.verb].reduces ? coll->call.scale : 1);
}

/* Whether the table can reduce the parts: only the host can if they are not aligned to their
   elements, see dp__kernel. */
static bool dp__parts_reduce(const dp__coll *coll)
{
    uintptr_t off = 0;
    bool host = true;
    for (int i = 0; i < coll->lane->ctx->info.local_count; i++) {
        off |= dp__sends(coll, i) ? (uintptr_t)coll->call.local[i].send : 0;
        off |= dp__receives(coll, i) ? (uintptr_t)coll->call.local[i].recv : 0;
        host = host && dp__is_host(&coll->lane->ctx->devices[i]);
    }
    return host || !dp__rules[coll->call.verb].reduces ||
           off % dp__dtype_sizes[coll->call.dtype] == 0;
}

static dp_status dp__aligned(const dp__coll *coll);

static dp_status dp__issue(const dp__coll *coll)
{
    if (coll->lane->comm == NULL)
        return dp__copy_alone(coll);
    return dp__parts_reduce(coll) ? dp__collective_served(coll) : dp__aligned(coll);
}

/* When a collective has failed, nothing of it still reads or writes; also of one that a driver has
   refused in the middle. */
static dp_status dp__parts_drain(const dp__coll *coll, const dp_part *parts, dp_status status)
{
    for (int i = 0; i < coll->lane->ctx->info.local_count && status != DP_OK; i++)
        status = dp__drain(coll->lane->ctx, parts[i].stream, status);
    return status;
}

/* For the library's own, too: nothing of it is checked. */
static dp_status dp__collective_run(const dp__coll *coll)
{
    dp_part *parts = coll->lane->parts;
    for (int i = 0; i < coll->lane->ctx->info.local_count; i++) {
        parts[i] = coll->call.local[i];
        if (parts[i].stream == NULL)
            parts[i].stream = dp__lane_stream(coll->lane, i);
    }
    return dp__parts_drain(coll, parts, coll->call.count > 0 ? dp__issue(coll) : DP_OK);
}

/* Counts, over all contexts of the process, what has taken the user's memory to other ranks: it may
   have been gradients. A group's collectives may be for modules of another context. */
static atomic_ullong dp__exchanges;

static void dp__exchanged(void)
{
    atomic_fetch_add_explicit(&dp__exchanges, 1, memory_order_relaxed);
}

/* Its lane is the caller's, if there is a context. */
static dp_status dp__collective(dp_ctx *ctx, dp__coll *coll)
{
    dp__exchanged();
    DP_TRY(dp__check_ctx(coll->fn, ctx));
    DP_TRY(dp__enter(coll->fn, ctx));
    coll->lane = &ctx->lanes[DP__CALLER];
    dp_status status = dp__check_coll(coll);
    return dp__exit(coll->fn, ctx, status == DP_OK ? dp__collective_run(coll) : status);
}

DP_API dp_status dp_all_reduce(dp_ctx *ctx, const dp_part *local, size_t count, dp_dtype dtype,
                               dp_op op)
{
    return dp__collective(
        ctx, &(dp__coll){__func__, NULL, {DP_ALL_REDUCE, local, count, dtype, op, 1, 0}});
}

static dp_status dp__check_float(const char *fn, dp_dtype dtype)
{
    DP_TRY(dp__check_dtype(fn, dtype));
    if (!dp__is_float(dtype))
        return dp_error(DP_ERR_INVALID, "%s: %s would be cut to whole numbers", fn,
                        dp__dtype_names[dtype]);
    return DP_OK;
}

DP_API dp_status dp_all_reduce_scaled(dp_ctx *ctx, const dp_part *local, size_t count,
                                      dp_dtype dtype, dp_op op, double scale)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_float(__func__, dtype));
    return dp__collective(
        ctx, &(dp__coll){__func__, NULL, {DP_ALL_REDUCE, local, count, dtype, op, scale, 0}});
}

static dp_status dp__check_local_weights(const char *fn, const dp_ctx *ctx, const double *weights)
{
    DP_TRY(dp__check_pointer(fn, "weights", weights));
    for (int i = 0; i < ctx->info.local_count; i++)
        if (!(weights[i] >= 0) || !isfinite(weights[i]))
            return dp_error(DP_ERR_INVALID, "%s: weight %d is %g", fn, i, weights[i]);
    return DP_OK;
}

/* The sum of all ranks' weights. */
static dp_status dp__weights_total(dp_ctx *ctx, dp_scope *temp, const double *weights, double *out)
{
    dp_tensor sum, host;
    dp_part *parts = dp__scope_bytes(temp, (size_t)ctx->info.local_count * sizeof *parts, 8);
    if (parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d weights", ctx->info.local_count);
    DP_TRY(dp__tensor_make(temp, &ctx->host_device, DP_F64, 0, NULL, &host));
    for (int i = 0; i < ctx->info.local_count; i++) {
        dp_tensor own = dp_wrap_const(&weights[i], DP_F64, 0, NULL);
        DP_TRY(dp__tensor_from(temp, &ctx->devices[i], &own, &sum));
        parts[i] = (dp_part){.send = sum.data, .recv = sum.data};
    }
    DP_TRY(dp__collective_run(&(dp__coll){"dp_all_reduce_weighted",
                                          &ctx->lanes[DP__CALLER],
                                          {DP_ALL_REDUCE, parts, 1, DP_F64, DP_OP_SUM, 1, 0}}));
    DP_TRY(dp__shared_failure(ctx, dp__copy_tensor(ctx, &host, &sum, NULL)));
    *out = *(const double *)host.data;
    return DP_OK;
}

/* recv = send * share. A part with no weight is left out, whatever is in it. */
static dp_status dp__weigh_part(const dp__coll *coll, int local_rank, double share)
{
    const dp__device *device = &coll->lane->ctx->devices[local_rank];
    const dp_part *part = &coll->call.local[local_rank];
    bool counts = share > 0;
    dp_kernel_args args = dp__kernel_args(counts ? DP_KERNEL_AXPBY : DP_KERNEL_FILL,
                                          coll->call.dtype, coll->call.count, &part->recv,
                                          counts ? &part->send : NULL);
    args.alpha = share;
    return dp__kernel(coll->lane->ctx, device, part->stream != NULL ? part->stream : device->stream,
                      &args);
}

/* Every part times its share of the whole, in the memory where it is received; then their sum. */
static dp_status dp__weighted(const dp__coll *coll, dp_scope *temp, const double *weights)
{
    dp_ctx *ctx = coll->lane->ctx;
    double total = 0;
    dp__coll sum = *coll;
    dp_status status = DP_OK;
    dp_part *parts = dp__scope_bytes(temp, (size_t)ctx->info.local_count * sizeof *parts, 8);
    if (parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d parts", ctx->info.local_count);
    DP_TRY(dp__weights_total(ctx, temp, weights, &total));
    if (!(total > 0) || !isfinite(total))
        return dp_error(DP_ERR_INVALID, "%s: the weights of all ranks add up to %g", coll->fn,
                        total);
    for (int i = 0; i < ctx->info.local_count && status == DP_OK; i++) {
        status = dp__weigh_part(coll, i, weights[i] / total);
        parts[i] = coll->call.local[i];
        parts[i].send = parts[i].recv;
    }
    DP_TRY(dp__shared_failure(ctx, dp__parts_drain(coll, coll->call.local, status)));
    sum.call.local = parts;
    return dp__shared_failure(ctx, dp__collective_run(&sum));
}

DP_API dp_status dp_all_reduce_weighted(dp_ctx *ctx, const dp_part *local, const double *weights,
                                        size_t count, dp_dtype dtype)
{
    dp_scope *temp = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_float(__func__, dtype));
    DP_TRY(dp__check_local_weights(__func__, ctx, weights));
    DP_TRY(dp__enter(__func__, ctx));
    dp__exchanged();
    const dp__coll coll = {
        __func__, &ctx->lanes[DP__CALLER], {DP_ALL_REDUCE, local, count, dtype, DP_OP_SUM, 1, 0}};
    dp_status status = dp__check_coll(&coll);
    for (int i = 0; i < ctx->info.local_count && count > 0 && status == DP_OK; i++)
        if (local[i].recv == NULL)
            status = dp_error(DP_ERR_INVALID, "%s: recv of local rank %d is NULL", __func__, i);
    if (status == DP_OK)
        status = dp__temp_begin(ctx, &temp);
    if (status == DP_OK)
        status = dp__weighted(&coll, temp, weights);
    return dp__exit(__func__, ctx, dp__temp_end(temp, NULL, status));
}

DP_API dp_status dp_broadcast(dp_ctx *ctx, const dp_part *local, size_t count, dp_dtype dtype,
                              int root)
{
    return dp__collective(
        ctx, &(dp__coll){__func__, NULL, {DP_BROADCAST, local, count, dtype, DP_OP_SUM, 1, root}});
}

DP_API dp_status dp_all_gather(dp_ctx *ctx, const dp_part *local, size_t count_each, dp_dtype dtype)
{
    return dp__collective(
        ctx,
        &(dp__coll){__func__, NULL, {DP_ALL_GATHER, local, count_each, dtype, DP_OP_SUM, 1, 0}});
}

DP_API dp_status dp_reduce_scatter(dp_ctx *ctx, const dp_part *local, size_t count_each,
                                   dp_dtype dtype, dp_op op)
{
    return dp__collective(
        ctx, &(dp__coll){__func__, NULL, {DP_REDUCE_SCATTER, local, count_each, dtype, op, 1, 0}});
}

DP_API dp_status dp_all_to_all(dp_ctx *ctx, const dp_part *local, size_t count_each, dp_dtype dtype)
{
    return dp__collective(
        ctx,
        &(dp__coll){__func__, NULL, {DP_ALL_TO_ALL, local, count_each, dtype, DP_OP_SUM, 1, 0}});
}

DP_API dp_status dp_reduce_to(dp_ctx *ctx, const dp_part *local, size_t count, dp_dtype dtype,
                              dp_op op, int root)
{
    return dp__collective(
        ctx, &(dp__coll){__func__, NULL, {DP_REDUCE_TO, local, count, dtype, op, 1, root}});
}

DP_API dp_status dp_gather_to(dp_ctx *ctx, const dp_part *local, size_t count_each, dp_dtype dtype,
                              int root)
{
    return dp__collective(
        ctx,
        &(dp__coll){__func__, NULL, {DP_GATHER_TO, local, count_each, dtype, DP_OP_SUM, 1, root}});
}

DP_API dp_status dp_scatter_from(dp_ctx *ctx, const dp_part *local, size_t count_each,
                                 dp_dtype dtype, int root)
{
    return dp__collective(
        ctx, &(dp__coll){
                 __func__, NULL, {DP_SCATTER_FROM, local, count_each, dtype, DP_OP_SUM, 1, root}});
}

/* Whether other processes, or the table, say that something has failed. */
static dp_status dp__poll(const dp__lane *lane)
{
    dp_comm *comm = lane->comm;
    DP_TRY(dp__journal_heard(lane));
    return comm != NULL && DP_HAS(dp_coll_ops, comm->ops, poll) ? comm->ops->poll(comm) : DP_OK;
}

static dp_status dp__sync_all(dp_ctx *ctx)
{
    for (int i = 0; i < ctx->info.local_count; i++)
        DP_TRY(dp__sync(ctx->devices[i].stream));
    return dp__poll(&ctx->lanes[DP__CALLER]);
}

/* ==== >>telling ================================================================================
   Ranks tell each other something small by a collective on memory that was made for it.         */

enum {
    DP__LINE_BYTES = 256, /* of words, as they travel */
    DP__WIRE_BYTES = 4096 /* at least, of a context's */
};

typedef struct dp__excuse { /* as it travels */
    int32_t status;
    char text[DP__TEXT_BYTES];
} dp__excuse;
_Static_assert(sizeof(dp__excuse) <= DP__WIRE_BYTES, "there is room for an excuse");

/* Make parts of this many bytes on each local rank, in place. */
static dp_status dp__wires_make(const char *fn, dp_ctx *ctx, dp_scope *scope, size_t bytes,
                                dp_part **out)
{
    int64_t count = (int64_t)bytes;
    size_t locals = (size_t)ctx->info.local_count;
    dp_part *wires = dp__scope_bytes(scope, locals * sizeof *wires, _Alignof(dp_part));
    if (wires == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for what ranks tell each other", fn);
    for (size_t i = 0; i < locals; i++) {
        dp_tensor tensor;
        DP_TRY(dp__tensor_make(scope, &ctx->devices[i], DP_U8, 1, &count, &tensor));
        wires[i] = (dp_part){.send = tensor.data, .recv = tensor.data};
    }
    *out = wires;
    return DP_OK;
}

/* Copy between host memory and the wire of a local rank. */
static dp_status dp__exchange_move(const dp__coll *coll, int local_rank, void *data, bool out)
{
    dp_ctx *ctx = coll->lane->ctx;
    const dp__device *device = &ctx->devices[local_rank];
    int64_t count = (int64_t)coll->call.count;
    void *wire = coll->call.local[local_rank].recv;
    if (dp__is_host(device)) { /* whose stream may be another thread's: a hook runs on any */
        memcpy(out ? wire : data, out ? data : wire, dp__blocks_bytes(coll, false));
        return DP_OK;
    }
    dp_tensor own = dp_wrap(data, coll->call.dtype, 1, &count), sent = own;
    sent.device = device->id;
    sent.data = wire;
    return dp__copy_tensor(ctx, out ? &sent : &own, out ? &own : &sent, NULL);
}

static dp_status dp__exchange_run(const dp__coll *coll, void *data, size_t stride)
{
    for (int i = 0; i < coll->lane->ctx->info.local_count; i++)
        DP_TRY(dp__exchange_move(coll, i, (char *)data + (size_t)i * stride, true));
    DP_TRY(dp__collective_run(coll));
    return dp__exchange_move(coll, 0, data, false);
}

/* All processes tell each other something small with a collective on wires: `data` has that of
   local rank i at i * stride bytes, and gets what the first of them received. */
static dp_status dp__exchange(dp__coll coll, void *data, size_t stride)
{
    const dp_ctx *ctx = coll.lane->ctx;
    coll.call.scale = 1;
    if (ctx->info.process_count == 1)
        return DP_OK;
    return dp__shared_failure(ctx, dp__exchange_run(&coll, data, stride));
}

/* ==== >>agreement ==============================================================================
   What processes tell each other at the public edge: numbers in host memory, and how it went. It
   travels on memory that a context has from the start, so that a process that is out of memory can
   still say so. */

/* Last as long as the job. */
static dp_status dp__wires_open(dp_ctx *ctx)
{
    size_t one_each = (size_t)ctx->info.rank_count * sizeof(int64_t);
    ctx->world.wire_bytes = one_each > DP__WIRE_BYTES ? one_each : DP__WIRE_BYTES;
    DP_TRY(dp__temp_begin(ctx, &ctx->world.wires_scope));
    return dp__wires_make("dp_open", ctx, ctx->world.wires_scope, ctx->world.wire_bytes,
                          &ctx->world.wires);
}

/* A reduction of any byte of each rank: nobody leaves before everybody has given theirs. */
static dp_status dp__barrier(const char *fn, dp_ctx *ctx, dp_part *bytes)
{
    const dp__coll coll = {
        fn, &ctx->lanes[DP__CALLER], {DP_ALL_REDUCE, bytes, 1, DP_BOOL, DP_OP_MAX, 1, 0}};
    DP_TRY(dp__collective_run(&coll));
    return dp__sync_all(ctx);
}

/* In one process there are no wires. */
static dp_status dp__barrier_here(dp_ctx *ctx)
{
    dp_scope *temp = NULL;
    dp_part *bytes = NULL;
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = dp__wires_make("dp_barrier", ctx, temp, 1, &bytes);
    return dp__temp_end(temp, NULL,
                        status == DP_OK ? dp__barrier("dp_barrier", ctx, bytes) : status);
}

static dp_status dp__barrier_alone(const char *fn, dp_ctx *ctx)
{
    DP_TRY(dp__enter(fn, ctx));
    if (ctx->lanes[DP__CALLER].comm == NULL)
        return dp__exit(fn, ctx, dp__sync_all(ctx));
    return dp__exit(fn, ctx,
                    ctx->world.wires != NULL ? dp__barrier(fn, ctx, ctx->world.wires)
                                             : dp__barrier_here(ctx));
}

DP_API dp_status dp_barrier(dp_ctx *ctx)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    return dp__barrier_alone(__func__, ctx);
}

/* What a process says in words, or in one number, becomes what all get. */
static dp_status dp__tell(const char *fn, dp_ctx *ctx, dp_coll_call call, void *data)
{
    call.local = ctx->world.wires;
    return dp__exchange((dp__coll){fn, &ctx->lanes[DP__CALLER], call}, data, 0);
}

/* Returns the bits of what changes no number of a reduction: -0.0 is that for -0.0, too. */
static uint64_t dp__neutral_bits(dp_op op, dp_dtype dtype)
{
    static const uint64_t ones[] = {[DP_F32] = 0x3f800000u,
                                    [DP_F64] = 0x3ff0000000000000u,
                                    [DP_F16] = 0x3c00u,
                                    [DP_BF16] = 0x3f80u};
    static const uint64_t infinite[] = {[DP_F32] = 0x7f800000u,
                                        [DP_F64] = 0x7ff0000000000000u,
                                        [DP_F16] = 0x7c00u,
                                        [DP_BF16] = 0x7f80u};
    const bool real = dp__is_float(dtype), positive = dtype == DP_U8 || dtype == DP_BOOL;
    const uint64_t top = (uint64_t)1 << (8 * dp__dtype_sizes[dtype] - 1);
    switch (op) {
    case DP_OP_SUM:
    case DP_OP_MEAN:
        return real ? top : 0;
    case DP_OP_PROD:
        return real ? ones[dtype] : 1;
    case DP_OP_MIN:
        return real ? infinite[dtype] : dtype == DP_BOOL ? 1 : dtype == DP_U8 ? UINT8_MAX : top - 1;
    case DP_OP_MAX:
        break;
    }
    return real ? infinite[dtype] | top : positive ? 0 : top;
}

/* The numbers of a process count once: its other local ranks send what changes nothing, or the
   same. */
static dp_status dp__numbers_send(const dp__coll *coll, int local_rank, const void *own)
{
    dp_ctx *ctx = coll->lane->ctx;
    const dp__device *device = &ctx->devices[local_rank];
    const int64_t count = (int64_t)coll->call.count;
    size_t rank = (size_t)(ctx->info.rank_first + local_rank);
    dp_part *wire = &ctx->world.wires[local_rank];
    bool places = coll->call.verb == DP_ALL_GATHER;
    wire->send = (char *)wire->recv + (places ? rank * dp__blocks_bytes(coll, false) : 0);
    dp_tensor from = dp_wrap_const(own, coll->call.dtype, 1, &count), to = from;
    to.data = (void *)(uintptr_t)wire->send;
    to.device = device->id;
    to.read_only = false;
    if (local_rank == 0 || coll->call.verb != DP_ALL_REDUCE || coll->call.op > DP_OP_PROD)
        return dp__copy_tensor(ctx, &to, &from, NULL);
    return dp__fill_tensor(ctx, device, &to, dp__neutral_bits(coll->call.op, coll->call.dtype));
}

/* Of each of `block_count` blocks a part, whose places are `count` numbers apart. */
static dp_status dp__numbers_get(const dp__coll *coll, size_t block_count, size_t count, void *out)
{
    const int64_t shape[] = {(int64_t)block_count, (int64_t)coll->call.count};
    dp_tensor to = dp_wrap(out, coll->call.dtype, 2, shape), from = to;
    to.stride[0] = (int64_t)count;
    from.data = coll->call.local[0].recv;
    from.device = coll->lane->ctx->devices[0].id;
    return dp__copy_tensor(coll->lane->ctx, &to, &from, NULL);
}

/* As many at a time as there is room for. */
static dp_status dp__numbers_run(dp__coll coll, const char *own, char *out)
{
    dp_ctx *ctx = coll.lane->ctx;
    size_t blocks = coll.call.verb == DP_ALL_GATHER ? (size_t)ctx->info.rank_count : 1;
    size_t count = coll.call.count, most = ctx->world.wire_bytes / (blocks * sizeof(int64_t));
    for (size_t done = 0; done < count; done += coll.call.count) {
        coll.call.count = count - done < most ? count - done : most;
        for (int i = 0; i < ctx->info.local_count; i++)
            DP_TRY(dp__numbers_send(&coll, i, own + done * sizeof(int64_t)));
        DP_TRY(dp__collective_run(&coll));
        for (int i = 0; i < ctx->info.local_count; i++) /* where all else sends from */
            ctx->world.wires[i].send = ctx->world.wires[i].recv;
        DP_TRY(dp__numbers_get(&coll, blocks, count, out + done * sizeof(int64_t)));
    }
    return DP_OK;
}

/* With no other process. */
static void dp__numbers_alone(const dp__coll *coll, const void *own, char *out)
{
    size_t bytes = coll->call.count * sizeof(int64_t);
    int ranks = coll->lane->ctx->info.rank_count;
    for (int r = 0; r < ranks && coll->call.verb == DP_ALL_GATHER && bytes > 0; r++)
        memcpy(out + (size_t)r * bytes, own, bytes);
}

static dp_status dp__check_numbers(const char *fn, const dp_ctx *ctx, const dp_coll_call *call,
                                   const void *own, const void *out)
{
    size_t bytes;
    DP_TRY(dp__check_ctx(fn, ctx));
    const dp_info *info = &ctx->info;
    if (call->count > 0)
        DP_TRY(dp__check_pointer(fn, "numbers", own));
    if (call->count > 0)
        DP_TRY(dp__check_pointer(fn, "out", out));
    if ((unsigned)call->op > DP_OP_MAX)
        return dp_error(DP_ERR_INVALID, "%s: %d is not a dp_op", fn, (int)call->op);
    if (call->root < 0 || call->root >= info->rank_count)
        return dp_error(DP_ERR_INVALID, "%s: root %d, there are %d ranks", fn, call->root,
                        info->rank_count);
    if (!dp__mul(call->count, (size_t)info->rank_count * sizeof(int64_t), &bytes) ||
        bytes > INT64_MAX)
        return dp_error(DP_ERR_INVALID, "%s: more numbers than can be counted", fn);
    if (call->verb == DP_ALL_GATHER &&
        dp__ranges_overlap(own, call->count * sizeof(int64_t), out, bytes))
        return dp_error(DP_ERR_INVALID, "%s: numbers and out overlap", fn);
    return DP_OK;
}

/* Numbers of 8 bytes. `out` may be `own`, unless they are gathered. */
static dp_status dp__numbers(const char *fn, dp_ctx *ctx, dp_coll_call call, const void *own,
                             void *out)
{
    DP_TRY(dp__check_numbers(fn, ctx, &call, own, out));
    call.local = ctx->world.wires;
    call.scale = 1;
    call.op = call.op == DP_OP_MEAN ? DP_OP_SUM : call.op; /* whose divisor is not that of ranks */
    const dp__coll coll = {fn, &ctx->lanes[DP__CALLER], call};
    DP_TRY(dp__enter(fn, ctx));
    dp_status status = DP_OK;
    if (ctx->world.wires != NULL)
        status = dp__shared_failure(ctx, dp__numbers_run(coll, own, out));
    else
        dp__numbers_alone(&coll, own, out);
    return dp__exit(fn, ctx, status);
}

DP_API dp_status dp_all_reduce_i64(dp_ctx *ctx, int64_t *numbers, size_t count, dp_op op)
{
    const dp_coll_call call = {.count = count, .dtype = DP_I64, .op = op};
    DP_TRY(dp__numbers(__func__, ctx, call, numbers, numbers));
    for (size_t i = 0; i < count && op == DP_OP_MEAN; i++)
        numbers[i] /= ctx->info.process_count;
    return DP_OK;
}

DP_API dp_status dp_all_reduce_f64(dp_ctx *ctx, double *numbers, size_t count, dp_op op)
{
    const dp_coll_call call = {.count = count, .dtype = DP_F64, .op = op};
    DP_TRY(dp__numbers(__func__, ctx, call, numbers, numbers));
    for (size_t i = 0; i < count && op == DP_OP_MEAN; i++)
        numbers[i] /= ctx->info.process_count;
    return DP_OK;
}

DP_API dp_status dp_all_gather_i64(dp_ctx *ctx, const int64_t *numbers, size_t count_each,
                                   int64_t *out)
{
    const dp_coll_call call = {.verb = DP_ALL_GATHER, .count = count_each, .dtype = DP_I64};
    return dp__numbers(__func__, ctx, call, numbers, out);
}

DP_API dp_status dp_all_gather_f64(dp_ctx *ctx, const double *numbers, size_t count_each,
                                   double *out)
{
    const dp_coll_call call = {.verb = DP_ALL_GATHER, .count = count_each, .dtype = DP_F64};
    return dp__numbers(__func__, ctx, call, numbers, out);
}

DP_API dp_status dp_broadcast_i64(dp_ctx *ctx, int64_t *numbers, size_t count, int root)
{
    const dp_coll_call call = {.verb = DP_BROADCAST, .count = count, .dtype = DP_I64, .root = root};
    return dp__numbers(__func__, ctx, call, numbers, numbers);
}

DP_API dp_status dp_broadcast_f64(dp_ctx *ctx, double *numbers, size_t count, int root)
{
    const dp_coll_call call = {.verb = DP_BROADCAST, .count = count, .dtype = DP_F64, .root = root};
    return dp__numbers(__func__, ctx, call, numbers, numbers);
}

DP_API dp_status dp_any(dp_ctx *ctx, bool mine, bool *out)
{
    const dp_coll_call call = {.count = 1, .dtype = DP_I64, .op = DP_OP_MAX};
    int64_t any = mine;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__numbers(__func__, ctx, call, &any, &any));
    *out = any != 0;
    return DP_OK;
}

DP_API int dp_rank(const dp_ctx *ctx)
{
    return dp__check_open(__func__, ctx) == DP_OK ? ctx->info.rank_first : -1;
}

DP_API int dp_rank_count(const dp_ctx *ctx)
{
    return dp__check_open(__func__, ctx) == DP_OK ? ctx->info.rank_count : -1;
}

/* `status`, with this thread's sentence. What is none of the list is a function's of the user's. */
static dp__excuse dp__excuse_of(dp_status status)
{
    dp__excuse excuse = {.status = status == DP_OK || dp__is_failure(status) ? status
                                                                             : DP_ERR_USER};
    const char *text = dp__of_thread.text[0] != '\0' ? dp__of_thread.text : dp_status_text(status);
    if (status != DP_OK)
        snprintf(excuse.text, sizeof excuse.text, "%s", text);
    return excuse;
}

/* The lowest of all processes' numbers. */
static dp_status dp__lowest(const char *fn, dp_ctx *ctx, int64_t *number)
{
    return dp__tell(fn, ctx, (dp_coll_call){.count = 1, .dtype = DP_I64, .op = DP_OP_MIN}, number);
}

/* What one rank says, on all. */
static dp_status dp__words_of(const char *fn, dp_ctx *ctx, int rank, void *words, size_t bytes)
{
    const dp_coll_call call = {.verb = DP_BROADCAST, .count = bytes, .dtype = DP_U8, .root = rank};
    return dp__tell(fn, ctx, call, words);
}

/* The first rank whose process has an excuse, and that; INT64_MAX: none has. */
static dp_status dp__first_excuse(const char *fn, dp_ctx *ctx, dp__excuse *excuse,
                                  int64_t *out_rank)
{
    *out_rank = excuse->status != DP_OK ? ctx->info.rank_first : INT64_MAX;
    DP_TRY(dp__lowest(fn, ctx, out_rank));
    if (*out_rank == INT64_MAX)
        return DP_OK;
    return dp__words_of(fn, ctx, (int)*out_rank, excuse, sizeof *excuse);
}

/* `status`: whether this process could do its part of fn. If one could not, all fail as the first
   of them has. */
static dp_status dp__all_or_none(const char *fn, dp_ctx *ctx, dp_status status)
{
    dp__excuse excuse = dp__excuse_of(status);
    int64_t rank;
    DP_TRY(dp__first_excuse(fn, ctx, &excuse, &rank));
    if (excuse.status == DP_OK)
        return DP_OK;
    const char *text = dp__unnamed(fn, excuse.text);
    if (ctx->info.process_count == 1)
        return dp_error((dp_status)excuse.status, "%s: %s", fn, text);
    return dp_error((dp_status)excuse.status, "%s: rank %d: %s", fn, (int)rank, text);
}

DP_API dp_status dp_agree(dp_ctx *ctx, dp_status status)
{
    dp__excuse excuse = dp__excuse_of(status);
    int64_t rank;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__enter(__func__, ctx));
    DP_TRY(dp__exit(__func__, ctx, dp__first_excuse(__func__, ctx, &excuse, &rank)));
    status = (dp_status)excuse.status;
    if (status == DP_OK)
        return DP_OK;
    if (ctx->info.process_count == 1)
        return dp_error(status, "%s", excuse.text);
    return dp_error(status, "rank %d: %s", (int)rank, excuse.text);
}

/* ==== >>fallbacks ==============================================================================
   Optional verbs are made of required ones if a table lacks them. Memory that is not aligned, which
   a table cannot reduce, is copied to memory that is. Both take device memory for a moment, and
   wait until it is free again.                                                                 */

/* Elements that a rank receives in temporary memory; 0: it receives where the caller wants them. */
static size_t dp__detour_count(const dp__coll *coll, int local_rank)
{
    size_t ranks = (size_t)coll->lane->ctx->info.rank_count;
    switch (coll->call.verb) {
    case DP_REDUCE_SCATTER:
    case DP_SCATTER_FROM:
        return coll->call.count * ranks;
    case DP_ALL_TO_ALL:
        return coll->call.count * ranks * ranks;
    case DP_REDUCE_TO:
        return dp__receives(coll, local_rank) ? 0 : coll->call.count;
    case DP_GATHER_TO:
        return dp__receives(coll, local_rank) ? 0 : coll->call.count * ranks;
    case DP_ALL_REDUCE:
    case DP_BROADCAST:
    case DP_ALL_GATHER:
        break;
    }
    return 0;
}

static dp_status dp__detour_verb(const dp__coll *coll)
{
    size_t all = coll->call.count * (size_t)coll->lane->ctx->info.rank_count;
    if (coll->call.verb == DP_REDUCE_SCATTER)
        return dp__table_run(coll, DP_ALL_REDUCE, all, coll->call.scale);
    if (coll->call.verb == DP_REDUCE_TO)
        return dp__table_run(coll, DP_ALL_REDUCE, coll->call.count, coll->call.scale);
    if (coll->call.verb == DP_SCATTER_FROM)
        return dp__table_run(coll, DP_BROADCAST, all, 1);
    return dp__table_run(coll, DP_ALL_GATHER,
                         coll->call.verb == DP_ALL_TO_ALL ? all : coll->call.count, 1);
}

/* Take from what a rank received what it wants: its own block, or its own block of every rank. */
static dp_status dp__detour_take(const dp__coll *coll, const dp_part *part, int local_rank)
{
    size_t bytes = dp__blocks_bytes(coll, false), all = dp__blocks_bytes(coll, true);
    size_t own = (size_t)(coll->lane->ctx->info.rank_first + local_rank) * bytes;
    size_t from_count = coll->call.verb == DP_ALL_TO_ALL ? (size_t)coll->lane->ctx->info.rank_count
                                                         : 1;
    if (coll->call.verb == DP_REDUCE_TO || coll->call.verb == DP_GATHER_TO ||
        !dp__receives(coll, local_rank))
        return DP_OK;
    for (size_t from = 0; from < from_count; from++)
        DP_TRY(part->stream->dev->ops->copy(
            part->stream, (char *)coll->call.local[local_rank].recv + from * bytes,
            (const char *)part->recv + from * all + own, bytes));
    return DP_OK;
}

static dp_status dp__detour_run(const dp__coll *coll, dp_scope *temp)
{
    dp_ctx *ctx = coll->lane->ctx;
    for (int i = 0; i < ctx->info.local_count; i++) {
        int64_t count = (int64_t)dp__detour_count(coll, i);
        dp_tensor own;
        if (count == 0)
            continue;
        DP_TRY(dp__tensor_make(temp, &ctx->devices[i], coll->call.dtype, 1, &count, &own));
        DP_TRY(dp__order_after(&ctx->devices[i], coll->lane->parts[i].stream));
        coll->lane->parts[i].recv = own.data;
    }
    DP_TRY(dp__detour_verb(coll));
    for (int i = 0; i < ctx->info.local_count; i++)
        DP_TRY(dp__detour_take(coll, &coll->lane->parts[i], i));
    return DP_OK;
}

static dp_status dp__with_temp(const dp__coll *coll,
                               dp_status (*run)(const dp__coll *coll, dp_scope *temp))
{
    dp_ctx *ctx = coll->lane->ctx;
    dp_scope *temp = NULL;
    DP_TRY(dp__temp_begin(ctx, &temp));
    dp_status status = run(coll, temp);
    for (int i = 0; i < ctx->info.local_count && status == DP_OK; i++)
        status = dp__sync(coll->lane->parts[i].stream);
    return dp__temp_end(temp, NULL, status);
}

static dp_status dp__detour(const dp__coll *coll)
{
    return dp__with_temp(coll, dp__detour_run);
}

/* A local rank's part in memory that is aligned, with a copy of what it sends. */
static dp_status dp__aligned_part(const dp__coll *coll, dp_scope *temp, int local_rank)
{
    const dp__rule *rule = &dp__rules[coll->call.verb];
    const dp__device *device = &coll->lane->ctx->devices[local_rank];
    dp_part *part = &coll->lane->parts[local_rank];
    int64_t send_bytes = (int64_t)dp__blocks_bytes(coll, rule->send_all);
    int64_t recv_bytes = (int64_t)dp__blocks_bytes(coll, rule->recv_all);
    dp_tensor send, recv;
    bool wants = rule->recv_at_root || dp__receives(coll, local_rank);
    DP_TRY(dp__tensor_make(temp, device, DP_U8, 1, &send_bytes, &send));
    DP_TRY(dp__tensor_make(temp, device, DP_U8, 1, &recv_bytes, &recv));
    DP_TRY(dp__order_after(device, part->stream)); /* earlier work may still use this memory */
    if (dp__sends(coll, local_rank))
        DP_TRY(device->dev->ops->copy(part->stream, send.data, part->send, (size_t)send_bytes));
    part->send = send.data;
    part->recv = wants ? recv.data : NULL;
    return DP_OK;
}

static dp_status dp__aligned_run(const dp__coll *coll, dp_scope *temp)
{
    dp_ctx *ctx = coll->lane->ctx;
    size_t count = (size_t)ctx->info.local_count;
    size_t bytes = dp__blocks_bytes(coll, dp__rules[coll->call.verb].recv_all);
    dp_part *aligned = dp__scope_bytes(temp, count * sizeof *aligned, _Alignof(dp_part));
    dp__coll again = *coll;
    if (aligned == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for aligned parts");
    for (size_t i = 0; i < count; i++)
        DP_TRY(dp__aligned_part(coll, temp, (int)i));
    memcpy(aligned, coll->lane->parts, count * sizeof *aligned);
    again.call.local = aligned;
    DP_TRY(dp__collective_served(&again));
    for (size_t i = 0; i < count; i++) {
        dp_stream *stream = aligned[i].stream;
        if (dp__receives(coll, (int)i))
            DP_TRY(
                stream->dev->ops->copy(stream, coll->call.local[i].recv, aligned[i].recv, bytes));
    }
    return DP_OK;
}

static dp_status dp__aligned(const dp__coll *coll)
{
    return dp__with_temp(coll, dp__aligned_run);
}

/* ==== >>staging ================================================================================
   Devices that have memory of their own, and no table of collectives that serves them: here is one.
   The table that serves the host, the carrier, works on copies in host memory. They are pieces of
   bounded size, two for each local rank: while the carrier has one, the devices copy the next one
   out and the last one in. Where the host reaches the memory after a wait there are no copies.

   The limit: each byte crosses to the host once and back once, 2 N bytes a rank. With two pieces
   that and the carrier overlap, so that the slower of the two counts. Measured with two processes,
   on a stream that copies 4 GB/s beside the cores: 4 MiB take 3.0 ms, without overlap 4.1 ms;
   copies alone take 2.1 ms. Pieces of 256 KiB to 2 MiB made no difference. */

enum { DP__STAGE_PIECES = 2 };

typedef struct dp__staging {
    dp_comm base;
    dp_coll_ops ops; /* what the carrier has */
    char name[64];
    dp__lane *lane;
    dp_comm *carrier;
    int count; /* local ranks */
    bool reached;
    size_t room;        /* bytes of a piece */
    dp__block **pieces; /* DP__STAGE_PIECES times `count`; where the memory is reached: none */
    dp_event **copied;  /* the same */
    dp_part *parts;     /* the carrier's */
    bool broken_off;    /* by a failure: streams use the pieces until they get to `copied` */
} dp__staging;
_Static_assert(offsetof(dp__staging, base) == 0, "a dp_comm is the head of its communicator");

typedef struct dp__carried { /* elements first .. first + count - 1 of each block */
    const dp__staging *by;
    const dp__coll *coll;
    size_t first, count;
    int turn; /* which of the two pieces */
} dp__carried;

static size_t dp__carried_slot(const dp__carried *piece, int local_rank)
{
    return (size_t)(piece->turn * piece->by->count + local_rank);
}

static size_t dp__carried_bytes(const dp__carried *piece)
{
    return piece->count * dp__dtype_sizes[piece->coll->call.dtype];
}

/* Where in its piece a rank has what it sends, or receives. What may be in place is. */
static char *dp__carried_at(const dp__carried *piece, int local_rank, bool sends)
{
    const dp__rule *rule = &dp__rules[piece->coll->call.verb];
    const dp_info *info = &piece->coll->lane->ctx->info;
    size_t blocks = 0;
    if (rule->in_place && (sends ? rule->recv_all : rule->send_all))
        blocks = (size_t)(info->rank_first + local_rank);
    else if (!rule->in_place && !sends)
        blocks = (size_t)info->rank_count;
    return (char *)piece->by->pieces[dp__carried_slot(piece, local_rank)]->data +
           blocks * dp__carried_bytes(piece);
}

/* Enqueue the copies between a rank's piece and what it sends, or receives. */
static dp_status dp__carried_copy(const dp__carried *piece, int local_rank, bool sends)
{
    const dp__coll *coll = piece->coll;
    const dp__rule *rule = &dp__rules[coll->call.verb];
    const dp_part *part = &coll->call.local[local_rank];
    const dp_device_ops *ops = part->stream->dev->ops;
    size_t blocks =
        (sends ? rule->send_all : rule->recv_all) ? (size_t)coll->lane->ctx->info.rank_count : 1;
    size_t bytes = dp__carried_bytes(piece), stride = dp__blocks_bytes(coll, false);
    size_t at = piece->first * dp__dtype_sizes[coll->call.dtype];
    char *near = dp__carried_at(piece, local_rank, sends);
    if (bytes == stride) { /* all of it lies together */
        bytes *= blocks;
        blocks = 1;
    }
    for (size_t i = 0; i < blocks; i++, at += stride, near += bytes)
        DP_TRY(sends ? ops->copy_out(part->stream, near, (const char *)part->send + at, bytes)
                     : ops->copy_in(part->stream, (char *)part->recv + at, near, bytes));
    return DP_OK;
}

static dp_status dp__carried_out(const dp__carried *piece)
{
    for (int i = 0; i < piece->by->count; i++) {
        dp_stream *stream = piece->coll->call.local[i].stream;
        dp_event *copied = piece->by->copied[dp__carried_slot(piece, i)];
        if (dp__sends(piece->coll, i))
            DP_TRY(dp__carried_copy(piece, i, true));
        DP_TRY(stream->dev->ops->event_record(copied, stream));
    }
    return DP_OK;
}

/* A piece is used by the stream of its rank alone: so that its next copy out is behind this one. */
static dp_status dp__carried_in(const dp__carried *piece)
{
    for (int i = 0; i < piece->by->count; i++)
        if (dp__receives(piece->coll, i))
            DP_TRY(dp__carried_copy(piece, i, false));
    return DP_OK;
}

/* The carrier's call, of parts in host memory. */
static dp_status dp__carried_call(const dp__carried *piece)
{
    dp_comm *carrier = piece->by->carrier;
    dp_coll_call call = piece->coll->call;
    call.local = piece->by->parts;
    call.count = piece->count;
    return carrier->ops->run(carrier, &call);
}

static dp_status dp__carried_carry(const dp__carried *piece)
{
    const dp__coll *coll = piece->coll;
    for (int i = 0; i < piece->by->count; i++) {
        dp_event *copied = piece->by->copied[dp__carried_slot(piece, i)];
        DP_TRY(dp__waited(copied->dev->ops->event_sync(copied)));
        piece->by->parts[i] =
            (dp_part){.send = dp__carried_at(piece, i, true),
                      .recv = dp__receives(coll, i) ? dp__carried_at(piece, i, false) : NULL,
                      .stream = coll->lane->ctx->host_device.stream};
    }
    return dp__carried_call(piece);
}

static dp_status dp__staging_wait(const dp__staging *by, const dp__coll *coll)
{
    for (int i = 0; i < by->count; i++)
        DP_TRY(dp__sync(coll->call.local[i].stream));
    return DP_OK;
}

/* All in pieces: one is copied out before the one in front of it is carried. */
static dp_status dp__staging_pieces(const dp__staging *by, const dp__coll *coll)
{
    const dp__rule *rule = &dp__rules[coll->call.verb];
    size_t blocks = rule->send_all || rule->recv_all ? (size_t)coll->lane->ctx->info.rank_count : 1;
    size_t most = by->room / dp__dtype_sizes[coll->call.dtype] /
                  (rule->in_place ? blocks : 2 * blocks);
    size_t steps = (coll->call.count + most - 1) / most;
    dp__carried pair[DP__STAGE_PIECES];
    for (size_t k = 0; k <= steps; k++) {
        dp__carried *piece = &pair[k % DP__STAGE_PIECES];
        const dp__carried *before = &pair[(k + 1) % DP__STAGE_PIECES];
        size_t first = k * most, left = coll->call.count > first ? coll->call.count - first : 0;
        *piece = (dp__carried){by, coll, first, left < most ? left : most, k % DP__STAGE_PIECES};
        if (k < steps)
            DP_TRY(dp__carried_out(piece));
        if (k == 0)
            continue;
        DP_TRY(dp__carried_carry(before));
        DP_TRY(dp__carried_in(before));
    }
    return dp__staging_wait(by, coll);
}

/* All at once, where it is. */
static dp_status dp__staging_views(const dp__staging *by, const dp__coll *coll)
{
    const dp__carried all = {.by = by, .coll = coll, .count = coll->call.count};
    for (int i = 0; i < by->count; i++) {
        by->parts[i] = coll->call.local[i];
        by->parts[i].stream = coll->lane->ctx->host_device.stream;
    }
    return dp__carried_call(&all);
}

static size_t dp__staging_slots(const dp__staging *by)
{
    return (size_t)(DP__STAGE_PIECES * by->count);
}

/* Marks in each stream, which may be the user's, where it is done with the pieces. */
static void dp__staging_break_off(dp__staging *by, const dp_coll_call *call)
{
    by->broken_off = true;
    for (size_t i = 0; i < dp__staging_slots(by); i++) {
        dp_event *copied = by->copied[i];
        dp_stream *stream = call->local[i % (size_t)by->count].stream;
        if (copied->dev->ops->event_record(copied, stream) != DP_OK)
            by->pieces[i] = NULL; /* nobody knows when: it stays as it is */
    }
}

/* A stream that cannot be waited for, since it is captured, is refused before anything is
   enqueued. What was enqueued when something fails still uses the pieces. */
static dp_status dp__staging_run(dp_comm *comm, const dp_coll_call *call)
{
    dp__staging *by = (dp__staging *)comm;
    dp_ctx *ctx = by->lane->ctx;
    const dp__coll coll = {.lane = by->lane, .call = *call};
    DP_TRY(dp__staging_wait(by, &coll));
    dp_status status = by->reached ? dp__staging_views(by, &coll) : dp__staging_pieces(by, &coll);
    if (dp_status_class(status) == DP_CLASS_JOB && !by->reached)
        dp__staging_break_off(by, call);
    return dp__shared_failure(ctx, status);
}

static void dp__staging_abort(dp_comm *comm)
{
    dp__comm_abort(((dp__staging *)comm)->carrier);
}

static dp_status dp__staging_poll(dp_comm *comm)
{
    dp_comm *carrier = ((dp__staging *)comm)->carrier;
    return carrier->ops->poll(carrier);
}

static void dp__staging_describe(dp_comm *comm, char *text, size_t bytes)
{
    dp_comm *carrier = ((dp__staging *)comm)->carrier;
    carrier->ops->describe(carrier, text, bytes);
}

/* The pieces are there for the next communicator, once no stream uses them. Others go with the
   context, after the devices: one that failed may still write there. */
static void dp__staging_give_back(dp__staging *staging)
{
    dp_ctx *ctx = staging->lane->ctx;
    for (size_t i = 0; i < dp__staging_slots(staging); i++) {
        dp__block *piece = staging->pieces[i];
        dp_event *copied = staging->copied[i];
        bool idle = piece != NULL &&
                    (!staging->broken_off || copied->dev->ops->event_sync(copied) == DP_OK);
        if (idle) {
            dp__blocks_wipe(ctx, piece);
            dp__lock_enter(&ctx->lock);
            dp__blocks_give(ctx, piece);
            dp__lock_leave(&ctx->lock);
        }
        if (copied != NULL)
            copied->dev->ops->event_destroy(copied);
    }
}

static void dp__staging_close(dp_comm *comm)
{
    dp__staging *staging = (dp__staging *)comm;
    const dp_host *host = comm->host;
    staging->carrier->ops->close(staging->carrier);
    if (staging->pieces != NULL && staging->copied != NULL)
        dp__staging_give_back(staging);
    host->free(host, staging->copied);
    host->free(host, staging->pieces);
    host->free(host, staging->parts);
    host->free(host, staging);
}

/* What the carrier lacks is as if this table lacked it. */
static dp_coll_ops dp__staging_ops(const dp_coll_ops *carrier)
{
    return (dp_coll_ops){.head = DP_TABLE(dp_coll_ops),
                         .close = dp__staging_close,
                         .verbs = carrier->verbs,
                         .run = dp__staging_run,
                         .abort = DP_HAS(dp_coll_ops, carrier, abort) ? dp__staging_abort : NULL,
                         .poll = DP_HAS(dp_coll_ops, carrier, poll) ? dp__staging_poll : NULL,
                         .describe = DP_HAS(dp_coll_ops, carrier, describe) ? dp__staging_describe
                                                                            : NULL};
}

/* A piece has at least one element of every block. */
static dp_status dp__staging_make_room(dp__staging *staging)
{
    dp_ctx *ctx = staging->lane->ctx;
    const dp_host *host = &ctx->host;
    size_t slots = dp__staging_slots(staging);
    size_t least = 2 * (size_t)ctx->info.rank_count * sizeof(double);
    staging->room = least > DP__STAGE_BYTES ? least : DP__STAGE_BYTES;
    staging->pieces = host->alloc(host, slots * sizeof *staging->pieces, _Alignof(dp__block *));
    staging->copied = host->alloc(host, slots * sizeof *staging->copied, _Alignof(dp_event *));
    if (staging->pieces == NULL || staging->copied == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory to stage collectives");
    memset(staging->pieces, 0, slots * sizeof *staging->pieces);
    memset(staging->copied, 0, slots * sizeof *staging->copied);
    for (size_t i = 0; i < slots; i++) {
        dp_dev *dev = ctx->devices[i % (size_t)staging->count].dev;
        DP_TRY(dp__block_take(ctx, &ctx->pinned_pool, staging->room, &staging->pieces[i]));
        dp__unpoison(staging->pieces[i]->data, staging->room);
        DP_TRY(dev->ops->event_create(dev, &staging->copied[i]));
    }
    return DP_OK;
}

static dp_status dp__staging_make(dp__lane *lane, dp_comm *carrier, dp__staging **out)
{
    const dp_ctx *ctx = lane->ctx;
    const dp_host *host = &ctx->host;
    int count = ctx->info.local_count;
    dp__staging *staging = host->alloc(host, sizeof *staging, _Alignof(dp__staging));
    if (staging == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory to stage collectives");
    *staging = (dp__staging){.base = {&staging->ops, host},
                             .ops = dp__staging_ops(carrier->ops),
                             .lane = lane,
                             .carrier = carrier,
                             .count = count,
                             .reached = true};
    *out = staging;
    staging->parts = host->alloc(host, (size_t)count * sizeof *staging->parts, _Alignof(dp_part));
    if (staging->parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory to stage collectives");
    for (int i = 0; i < count; i++)
        staging->reached = staging->reached && dp__is_reached(&ctx->devices[i]);
    return staging->reached ? DP_OK : dp__staging_make_room(staging);
}

/* The carrier is open. It is closed with what is made of it, also where that fails. */
static dp_status dp__staging_open(dp__lane *lane, dp_comm *carrier)
{
    const dp_ctx *ctx = lane->ctx;
    dp__staging *staging = NULL;
    dp_status status = dp__staging_make(lane, carrier, &staging);
    if (status == DP_OK) {
        snprintf(staging->name, sizeof staging->name, "%s%sthrough the host",
                 ctx->info.process_count > 1 ? carrier->ops->name : "",
                 ctx->info.process_count > 1 ? ", " : "");
        staging->ops.name = staging->name;
        lane->comm = &staging->base;
    } else if (staging != NULL) {
        dp__staging_close(&staging->base);
    } else {
        carrier->ops->close(carrier);
    }
    return status;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
