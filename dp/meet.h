/* dp/meet.h - v0.2.0 - where the threads of a process wait for each other - MIT licence

   Part of dp.h, which includes it. Functions under dp_run, and the replicas of a pass, run on
   threads of their own. In a meeting each brings its part of a collective. The last to arrive does
   it for all, and all get the same status. If one returns, fails, asks for something else or does
   not come in time, the others fail too: nobody waits for ever.

   A context has one meeting, as one dp_run or pass of several replicas at a time has entered it.

   CONTENTS (search for the tag)
     >>partners  who may come, and who has returned
     >>lateness  which device comes last
     >>parts     one collective of what all have brought
     >>rounds    to arrive, to wait, to give up
*/

#ifndef DP__ROOMS
#error "dp/meet.h is a part of dp.h: include dp.h"
#else

/* ==== >>partners ===============================================================================
   Partners are those that have to come. Each has a line of a cache, which its thread alone writes
   to while it runs. A run that meets nobody costs a store to that line, and reads one that nobody
   writes.                                                                                       */

typedef struct dp__partner {
    _Alignas(64) atomic_uint returned; /* how often what ran here has: of all partners the same
                                          between two runs */
    unsigned came;                     /* 1 + the last round that it has come to; under the lock */
    uint64_t came_ns;                  /* and when, if it is watched who comes last */
    int local_rank, thread;
    bool idle;    /* it counts for nothing: see dp__record.leaves_nothing */
    bool behind;  /* it has failed because another one did */
    dp_part part; /* what it brings; under the lock */
} dp__partner;

typedef enum dp__partners { DP__NOBODY, DP__LOCAL_RANKS, DP__REPLICAS } dp__partners;

static const char *const dp__partner_names[] = {"nobody", "local rank", "replica"};

typedef struct dp__meet {
    /* Written before anybody can come. */
    dp__partners who;
    const struct dp_pass *pass; /* of replicas */
    size_t count;               /* all of these have to come */
    bool open;                  /* each has a thread of its own */
    bool over_ranks;            /* they meet those of all processes */
    int64_t *takers;    /* how many ranks of all processes count, once that is known, else 0; NULL:
                        all do */
    atomic_size_t here; /* who has come to this round; written under the lock */
    dp__lock lock;      /* for what follows */
    unsigned round;
    size_t first;             /* who came first, */
    dp__coll want;            /* and for what; without parts it is a barrier */
    dp_status result, status; /* of the last round, for all who were in it; why nobody can meet here
                                 any more */
    int result_culprit;       /* as dp__of_thread has it */
    char result_text[DP__TEXT_BYTES], status_text[DP__TEXT_BYTES];
    dp_part *parts;         /* room for those of all local ranks */
    dp__partner partners[]; /* as many as local ranks */
} dp__meet;

static dp_status dp__meet_open(dp_ctx *ctx)
{
    size_t count = (size_t)ctx->info.local_count;
    size_t bytes = sizeof(dp__meet) + count * sizeof(dp__partner);
    dp__meet *meet = dp__host_alloc(&ctx->host, bytes, 64);
    dp_part *parts = dp__host_alloc(&ctx->host, count * sizeof *parts, 64);
    if (meet == NULL || parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %zu devices", count);
    memset(meet, 0, bytes);
    meet->lock = (dp__lock)DP__LOCK_INITIALIZER;
    meet->parts = parts;
    ctx->meet = meet;
    return DP_OK;
}

/* Says who is a partner, for this run and those that follow. */
static void dp__meet_partner(dp__meet *meet, size_t i, int local_rank, int thread, bool idle)
{
    dp__partner *partner = &meet->partners[i];
    partner->local_rank = local_rank;
    partner->thread = thread;
    partner->idle = idle;
}

/* Begins a run with a meeting that is as if nobody had come yet. */
static void dp__meet_begin(dp__meet *meet)
{
    if (meet->status == DP_OK && atomic_load_explicit(&meet->here, memory_order_relaxed) == 0)
        return;
    meet->status = DP_OK;
    meet->round++;
    atomic_store(&meet->here, 0);
}

/* Begins a run of functions under dp_run: the local ranks are partners. */
static void dp__meet_begin_run(dp_ctx *ctx)
{
    dp__meet *meet = ctx->meet;
    if (meet->who != DP__LOCAL_RANKS) {
        meet->who = DP__LOCAL_RANKS;
        meet->count = (size_t)ctx->info.local_count;
        meet->open = meet->over_ranks = true;
        meet->takers = NULL;
        for (int i = 0; i < ctx->info.local_count; i++)
            dp__meet_partner(meet, (size_t)i, i, i, false);
    }
    dp__meet_begin(meet);
}

/* Ends a run of replicas. Local ranks without one have returned as often. */
static void dp__meet_end_pass(dp_ctx *ctx)
{
    dp__meet *meet = ctx->meet;
    for (size_t i = meet->count; meet->open && i < (size_t)ctx->info.local_count; i++)
        atomic_fetch_add(&meet->partners[i].returned, 1);
    meet->pass = NULL;
}

static void dp__meet_wake(const dp_ctx *ctx)
{
    const dp__meet *meet = ctx->meet;
    for (size_t i = 0; i < meet->count && meet->count > 1; i++)
        dp__team_wake(ctx->team, meet->partners[i].thread);
}

/* Says why nobody can meet here any more; under the lock. */
DP_PRINTF(3, 4)
static void dp__meet_close(dp__meet *meet, dp_status status, const char *format, ...)
{
    va_list args;
    if (meet->status != DP_OK)
        return;
    meet->status = status;
    va_start(args, format);
    vsnprintf(meet->status_text, sizeof meet->status_text, format, args);
    va_end(args);
}

static void dp__meet_close_without(dp__meet *meet, size_t i)
{
    dp__meet_close(meet, DP_ERR_MISMATCH, "%s %zu returned without calling it",
                   dp__partner_names[meet->who], i);
}

/* Notes that what ran for a partner has returned: whoever waits for it would wait for ever. If
   nobody has come yet, no lock is needed: who comes first sees who has returned. Returns true if it
   has failed because another one did. */
static bool dp__meet_leave(const dp_ctx *ctx, size_t i, dp_status status)
{
    dp__meet *meet = ctx->meet;
    if (!meet->open)
        return false;
    dp__partner *partner = &meet->partners[i];
    bool behind = partner->behind;
    partner->behind = false;
    atomic_store(&partner->returned,
                 atomic_load_explicit(&partner->returned, memory_order_relaxed) + 1);
    if (status == DP_OK && atomic_load(&meet->here) == 0)
        return behind;
    dp__lock_enter(&meet->lock);
    bool waited_for = atomic_load(&meet->here) > 0;
    if (status != DP_OK)
        dp__meet_close(meet, status, "%s %zu failed", dp__partner_names[meet->who], i);
    else if (waited_for)
        dp__meet_close_without(meet, i);
    dp__lock_leave(&meet->lock);
    if (waited_for)
        dp__meet_wake(ctx);
    return behind;
}

/* ==== >>lateness ===============================================================================
   Under dp_run devices wait for each other in each collective; in a pass at its end, which
   dp/parallel.h counts.                                                                         */

/* Logs which device comes last, once, and again when it is another one. */
DP__COLD static void dp__late_devices_judge(dp_ctx *ctx)
{
    char text[DP__LATE_TEXT];
    dp__late_verdict verdict;
    dp__late_devices *late = ctx->late;
    if (!dp__late_judge(&late->is, dp__os_now_ns(), &verdict))
        return;
    dp__lock_enter(&ctx->lock);
    late->is.verdict = verdict;
    dp__lock_leave(&ctx->lock);
    if (verdict.process < 0 || verdict.process == late->named)
        return;
    late->named = verdict.process;
    dp__log(ctx, DP_LOG_WARN, "rank %d (%s %d of this process)%s",
            ctx->info.rank_first + verdict.process, ctx->info.device_backend, verdict.process,
            dp__late_say(&verdict, text));
}

/* Counts which of the devices has come last to a round: the one that calls this. What they do
   meanwhile is no part of a pass. */
static void dp__meet_late(dp_ctx *ctx)
{
    const dp__meet *meet = ctx->meet;
    dp__late_devices *late = ctx->late;
    late->last_ns = dp__os_now_ns();
    for (size_t i = 0; i < meet->count; i++)
        dp__late_device(late, meet->partners[i].local_rank, DP__LATE_FORWARD,
                        meet->partners[i].came_ns, meet->partners[i].came_ns);
    if (dp__late_count(&late->is))
        dp__late_devices_judge(ctx);
}

/* ==== >>parts ==================================================================================
   What all have brought becomes one collective over all ranks, or, where the replicas of a pass are
   all that there are, one sum. A rank that nobody has come for counts for nothing.              */

/* Returns a block, or so many blocks as there are ranks. */
static size_t dp__meet_blocks(const dp_ctx *ctx, bool all, size_t block)
{
    return all ? (size_t)ctx->info.rank_count * block : block;
}

/* Checks that what one receives does not overlap what the others send and receive. */
static dp_status dp__meet_check(const dp_ctx *ctx)
{
    const dp__meet *meet = ctx->meet;
    const dp_coll_call *call = &meet->want.call;
    const dp__rule *rule = &dp__rules[call->verb];
    size_t block = call->count * dp__dtype_sizes[call->dtype];
    size_t recv_bytes = dp__meet_blocks(ctx, rule->recv_all, block);
    size_t send_bytes = dp__meet_blocks(ctx, rule->send_all, block);
    for (size_t r = 0; r < meet->count; r++) {
        const dp__partner *to = &meet->partners[r];
        for (size_t k = 0; k < meet->count; k++) {
            const dp__partner *from = &meet->partners[k];
            if (k != r && dp__share_memory(ctx, to->local_rank, from->local_rank) &&
                (dp__ranges_overlap(to->part.recv, recv_bytes, from->part.recv, recv_bytes) ||
                 dp__ranges_overlap(to->part.recv, recv_bytes, from->part.send, send_bytes)))
                return dp_error(DP_ERR_INVALID, "recv of %s %zu overlaps a buffer of %s %zu",
                                dp__partner_names[meet->who], r, dp__partner_names[meet->who], k);
        }
    }
    return DP_OK;
}

/* Reduces what replicas have sent on the first one's device, and copies it to all. */
static dp_status dp__meet_reduce(dp_ctx *ctx, dp_scope *temp)
{
    const dp__meet *meet = ctx->meet;
    const dp_coll_call *want = &meet->want.call;
    const int64_t count = (int64_t)want->count;
    dp__device *first = &ctx->devices[meet->partners[0].local_rank];
    const void **in = dp__array(temp, meet->count, sizeof *in);
    void **out = dp__array(temp, meet->count, sizeof *out);
    bool near = true;
    dp_tensor sum;
    if (in == NULL || out == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu replicas", meet->count);
    for (size_t r = 0; r < meet->count; r++) {
        const dp__partner *partner = &meet->partners[r];
        dp__device *device = &ctx->devices[partner->local_rank];
        dp_tensor part =
            dp__flat((void *)(uintptr_t)partner->part.send, device->id, want->dtype, count);
        DP_TRY(dp__bring(temp, &part, first, &in[r]));
        out[r] = partner->part.recv;
        near = near && dp__reaches(first, device);
    }
    if (!near) {
        DP_TRY(dp__tensor_make(temp, first, want->dtype, 1, &count, &sum));
        out[0] = sum.data;
    }
    dp_kernel_args args = dp__reduction(want, want->dtype, want->count, (int)meet->count, true);
    args.out = out;
    args.in = in;
    args.out_count = near ? meet->count : 1;
    args.in_count = meet->count;
    DP_TRY(dp__kernel(ctx, first, first->stream, &args));
    for (size_t r = 0; r < meet->count; r++) {
        const dp__partner *partner = &meet->partners[r];
        dp_tensor part =
            dp__flat(partner->part.recv, ctx->devices[partner->local_rank].id, want->dtype, count);
        DP_TRY(near ? dp__give_back(ctx, &part, first) : dp__copy_tensor(ctx, &part, &sum, NULL));
    }
    return DP_OK;
}

/* Lets a local rank that counts for nothing send what changes nothing, or zeros; one that nobody
   has come for receives there, too. */
static dp_status dp__meet_fill(dp_ctx *ctx, const dp_coll_call *want, dp_scope *temp,
                               int local_rank, dp_part *part)
{
    const dp__rule *rule = &dp__rules[want->verb];
    const dp__device *device = &ctx->devices[local_rank];
    size_t block = want->count * dp__dtype_sizes[want->dtype];
    size_t own = (size_t)(ctx->info.rank_first + local_rank) * block;
    const int64_t count =
        (int64_t)dp__meet_blocks(ctx, rule->send_all || rule->recv_all, want->count);
    bool alone = part->recv == NULL;
    dp_tensor fill;
    DP_TRY(dp__tensor_make(temp, device, want->dtype, 1, &count, &fill));
    DP_TRY(dp__fill_tensor(ctx, device, &fill,
                           rule->reduces ? dp__neutral_bits(want->op, want->dtype) : 0));
    part->send = (char *)fill.data + (alone && rule->recv_all ? own : 0);
    if (alone)
        part->recv = (char *)fill.data + (rule->send_all ? own : 0);
    return DP_OK;
}

/* Counts the ranks that take part, those of all processes. */
static dp_status dp__meet_count(dp_ctx *ctx, dp_scope *temp, int64_t *out)
{
    const dp__meet *meet = ctx->meet;
    const dp_coll_call call = {
        .local = ctx->world.wires, .count = 1, .dtype = DP_I64, .op = DP_OP_SUM};
    int64_t *takes = dp__array(temp, (size_t)ctx->info.local_count, sizeof *takes), here = 0;
    if (takes == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %d ranks", ctx->info.local_count);
    for (size_t i = 0; i < meet->count; i++) {
        takes[meet->partners[i].local_rank] = !meet->partners[i].idle;
        here += !meet->partners[i].idle;
    }
    DP_TRY(dp__exchange((dp__coll){meet->want.fn, meet->want.lane, call}, takes, sizeof *takes));
    *out = ctx->info.process_count > 1 ? takes[0] : here;
    return DP_OK;
}

/* Divides what a partner has received. */
static dp_status dp__meet_divide(dp_ctx *ctx, const dp__partner *partner, int64_t by)
{
    const dp_coll_call *want = &ctx->meet->want.call;
    const dp__device *device = &ctx->devices[partner->local_rank];
    const void *in = partner->part.recv;
    const dp_kernel_args args =
        dp__sum_args(want->dtype, want->count, &in, 1, 1, (double)by, &partner->part.recv);
    return dp__kernel(ctx, device, device->stream, &args);
}

/* Takes the mean over the ranks that take part. What has sixteen bits is rounded once, so it is
   divided before that. */
static dp_status dp__meet_mean(dp_ctx *ctx, dp__coll *all, dp_scope *temp)
{
    const dp__meet *meet = ctx->meet;
    bool half = dp__is_float(all->call.dtype) && dp__dtype_sizes[all->call.dtype] == 2;
    if (*meet->takers == 0)
        DP_TRY(dp__meet_count(ctx, temp, meet->takers));
    int64_t takers = *meet->takers > 0 ? *meet->takers : 1;
    if (takers == ctx->info.rank_count)
        return dp__collective_run(all);
    all->call.op = DP_OP_SUM;
    all->call.scale = half ? 1 / (double)takers : 1;
    DP_TRY(dp__collective_run(all));
    for (size_t i = 0; i < meet->count && !half; i++)
        DP_TRY(dp__meet_divide(ctx, &meet->partners[i], takers));
    return DP_OK;
}

static dp_status dp__meet_some(dp_ctx *ctx, dp__coll *all, dp_scope *temp)
{
    for (int i = 0; i < ctx->info.local_count; i++)
        if (ctx->meet->parts[i].send == NULL)
            DP_TRY(dp__meet_fill(ctx, &all->call, temp, i, &ctx->meet->parts[i]));
    return all->call.op == DP_OP_MEAN ? dp__meet_mean(ctx, all, temp) : dp__collective_run(all);
}

/* Makes one collective of what those of this process have brought. */
static dp_status dp__meet_ranks(dp_ctx *ctx)
{
    dp__meet *meet = ctx->meet;
    dp__coll all = meet->want;
    dp_scope *temp = NULL;
    all.call.local = meet->parts;
    memset(meet->parts, 0, (size_t)ctx->info.local_count * sizeof *meet->parts);
    for (size_t i = 0; i < meet->count; i++) {
        const dp__partner *partner = &meet->partners[i];
        meet->parts[partner->local_rank] = partner->part;
        if (partner->idle)
            meet->parts[partner->local_rank].send = NULL;
    }
    if (meet->takers == NULL)
        return dp__collective_run(&all);
    DP_TRY(dp__temp_begin(ctx, &temp));
    return dp__temp_end(temp, NULL, dp__meet_some(ctx, &all, temp));
}

/* Does what all have come for. */
static dp_status dp__meet_do(dp_ctx *ctx)
{
    const dp__meet *meet = ctx->meet;
    const dp__coll *want = &meet->want;
    dp_scope *temp = NULL;
    if (want->call.local == NULL)
        return ctx->world.wires != NULL ? dp__barrier(want->fn, ctx, ctx->world.wires)
                                        : dp__sync_all(ctx);
    DP_TRY(dp__meet_check(ctx));
    if (meet->over_ranks)
        return dp__meet_ranks(ctx);
    DP_TRY(dp__temp_begin(ctx, &temp));
    return dp__temp_end(temp, NULL, dp__meet_reduce(ctx, temp));
}

/* ==== >>rounds =================================================================================
   A round ends when all have come and the last of them has done what they came for.             */

/* "all_reduce of 4 f32 (sum)" */
static const char *dp__meet_text(const dp__coll *want, char *text)
{
    const dp__signature is = dp__sign(&want->call, dp__no_purpose);
    if (want->call.local == NULL)
        return "a barrier";
    (void)dp__signature_text(&is, text, DP__WORDS_BYTES);
    return text;
}

static bool dp__meet_is_same(const dp__coll *a, const dp__coll *b)
{
    const dp__signature one = dp__sign(&a->call, dp__no_purpose),
                        other = dp__sign(&b->call, dp__no_purpose);
    return (a->call.local == NULL) == (b->call.local == NULL) &&
           memcmp(&one, &other, sizeof one) == 0;
}

/* Closes the meeting if one of those that have to come has returned. */
static void dp__meet_look(dp__meet *meet, size_t own)
{
    unsigned runs = atomic_load(&meet->partners[own].returned);
    for (size_t i = 0; i < meet->count; i++)
        if (atomic_load(&meet->partners[i].returned) != runs)
            dp__meet_close_without(meet, i);
}

/* Brings a partner's part, under the lock. The first to come says what is to be done. */
static dp_status dp__meet_join(const dp_ctx *ctx, size_t i, const dp__coll *want)
{
    dp__meet *meet = ctx->meet;
    char first[DP__WORDS_BYTES], own[DP__WORDS_BYTES];
    const char *who = dp__partner_names[meet->who];
    dp__partner *partner = &meet->partners[i];
    if (meet->status != DP_OK)
        return DP_OK;
    if (partner->came == meet->round + 1)
        return dp_error(DP_ERR_STATE, "%s %zu is in a collective, and calls this from inside it",
                        who, i);
    bool comes_first = atomic_load(&meet->here) == 0;
    if (comes_first) {
        meet->want = *want;
        meet->first = i;
    } else if (!dp__meet_is_same(&meet->want, want)) {
        dp__meet_close(meet, DP_ERR_MISMATCH, "%s %zu asks for %s, %s %zu for %s", who, meet->first,
                       dp__meet_text(&meet->want, first), who, i, dp__meet_text(want, own));
        return DP_OK;
    }
    if (want->call.local != NULL)
        partner->part = want->call.local[0];
    partner->came = meet->round + 1;
    partner->came_ns = ctx->late != NULL ? dp__os_now_ns() : 0;
    atomic_fetch_add(&meet->here, 1); /* before it looks who has returned: see dp__meet_leave */
    if (comes_first)
        dp__meet_look(meet, i);
    return DP_OK;
}

/* Returns why this one has to give up, under the lock. */
static dp_status dp__meet_error(dp__meet *meet, size_t i)
{
    meet->partners[i].behind = true;
    return dp_error(meet->status, "%s", meet->status_text);
}

/* Returns what the work came to, and because of whom, under the lock. */
static dp_status dp__meet_result(const dp__meet *meet)
{
    dp__of_thread.culprit = meet->result_culprit;
    return dp_error(meet->result, "%s", meet->result_text);
}

/* Does the work of the last to come; nobody else touches the meeting meanwhile. */
static dp_status dp__meet_work(dp_ctx *ctx)
{
    dp__meet *meet = ctx->meet;
    if (ctx->late != NULL && meet->who == DP__LOCAL_RANKS)
        dp__meet_late(ctx);
    dp_status status = dp__meet_do(ctx);
    dp__lock_enter(&meet->lock);
    meet->result = status;
    if (status != DP_OK)
        memcpy(meet->result_text, dp__of_thread.text, sizeof meet->result_text);
    meet->result_culprit = dp__of_thread.culprit;
    atomic_store(&meet->here, 0);
    meet->round++;
    dp__lock_leave(&meet->lock);
    dp__meet_wake(ctx);
    return status;
}

/* Names who has not come in time, under the lock. */
static void dp__meet_miss(const dp_ctx *ctx)
{
    dp__meet *meet = ctx->meet;
    size_t missing = 0, first = 0;
    char others[32] = "", activity[DP__ACTIVITY_BYTES];
    for (size_t i = meet->count; i-- > 0;)
        if (meet->partners[i].came != meet->round + 1) {
            missing++;
            first = i;
        }
    if (missing > 1)
        snprintf(others, sizeof others, " and %zu more", missing - 1);
    dp__activity_text(dp__activity_of(ctx, meet->partners[first].local_rank), DP__ACTIVITY_LEAST_NS,
                      missing > 1 ? "; the first is in " : "; it is in ", activity);
    dp__meet_close(meet, DP_ERR_TIMEOUT, "%s %zu%s did not come within %d ms%s",
                   dp__partner_names[meet->who], first, others, ctx->config.timeout_ms, activity);
}

/* Looks, under the lock, whether a round is over, or will never be. While not all have come, their
   time runs, and a failure of the job ends it. Returns for how long to wait; 0: no longer. */
static uint64_t dp__meet_see(const dp_ctx *ctx, unsigned round, uint64_t left_ns)
{
    dp__meet *meet = ctx->meet;
    if (meet->round != round)
        return 0;
    if (atomic_load(&meet->here) == meet->count)
        return UINT64_MAX;
    if (dp__has_failed(ctx))
        dp__meet_close(meet, (dp_status)atomic_load(&ctx->failed), "the job failed: %s",
                       ctx->failed_text);
    else if (left_ns == 0)
        dp__meet_miss(ctx);
    return meet->status != DP_OK ? 0 : left_ns;
}

/* Sleeps for so long at most, but not for longer than that. Returns how much of it is
   left: time for which the whole process was stopped does not count, as the others were, too. */
static uint64_t dp__meet_sleep(const dp_ctx *ctx, int thread, unsigned seen, uint64_t ns)
{
    uint64_t begun = dp__os_now_ns(), slice = ns < DP__LOOKOUT_NS ? ns : DP__LOOKOUT_NS;
    dp__team_sleep(ctx->team, thread, seen, begun + slice);
    uint64_t slept = dp__os_now_ns() - begun;
    return ns - (slept < slice ? slept : slice);
}

/* Shows other processes what the first of those is in that have not come; by the first device. */
DP__COLD static void dp__meet_relay(dp_ctx *ctx, unsigned round)
{
    dp__meet *meet = ctx->meet;
    int awaited = 0;
    dp__lock_enter(&meet->lock);
    for (size_t i = meet->count; i-- > 0 && meet->round == round;)
        if (meet->partners[i].came != round + 1)
            awaited = meet->partners[i].local_rank;
    dp__lock_leave(&meet->lock);
    dp__activity_relay(ctx, awaited, awaited != 0 ? dp__activity_of(ctx, awaited) : NULL);
}

/* Waits until a round is over. The others are woken by the one that closes the meeting, or by the
   failure of the job that this returns. */
static dp_status dp__meet_wait(dp_ctx *ctx, size_t i, unsigned round)
{
    dp__meet *meet = ctx->meet;
    int thread = meet->partners[i].thread;
    uint64_t left_ns = (uint64_t)ctx->config.timeout_ms * 1000000, sleep_ns;
    bool first = meet->partners[i].local_rank == 0, relayed = false;
    dp_status status = DP_OK;
    for (;;) {
        unsigned seen = dp__team_ticket(ctx->team, thread);
        dp__lock_enter(&meet->lock);
        sleep_ns = dp__meet_see(ctx, round, left_ns);
        if (meet->round == round && sleep_ns == 0)
            status = dp__meet_error(meet, i);
        else if (meet->round != round && meet->result != DP_OK)
            status = dp__meet_result(meet);
        dp__lock_leave(&meet->lock);
        if (sleep_ns == 0)
            break;
        left_ns = dp__meet_sleep(ctx, thread, seen, sleep_ns);
        relayed = relayed || (first && sleep_ns - left_ns >= DP__LOOKOUT_NS);
        if (relayed)
            dp__meet_relay(ctx, round);
    }
    if (relayed)
        dp__activity_relay(ctx, 0, NULL);
    return status;
}

/* Brings a partner's part to a collective, and returns when that is done. */
static dp_status dp__meet_enter(dp_ctx *ctx, size_t i, const dp__coll *want)
{
    DP_TRY(dp__check_replays(want->fn));
    dp__meet *meet = ctx->meet;
    if (!meet->open)
        return dp_error(DP_ERR_UNSUPPORTED, "several replicas share a thread: a device is in the "
                                            "list twice, and cannot wait for itself");
    dp__lock_enter(&meet->lock);
    dp_status status = dp__meet_join(ctx, i, want);
    bool closed = meet->status != DP_OK;
    unsigned round = meet->round;
    bool last = !closed && atomic_load(&meet->here) == meet->count;
    dp__lock_leave(&meet->lock);
    if (closed)
        dp__meet_wake(ctx);
    if (status != DP_OK)
        return status;
    return last ? dp__meet_work(ctx) : dp__meet_wait(ctx, i, round);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
