/* steps.h - the steps of a plan that ask for more: large collectives, many messages, jobs inside
   the job, gradients. A part of process.c. What a step does follows from its size and its salt.  */

enum {
    LARGE = 400000,       /* bytes of a rank; */
    LARGE_NEAR = 1500000, /* inside a machine; */
    LARGE_SLOW = 2500000, /* where there is time for it */
    TURN = 11,    /* numbers repeat after so many elements; all sums of them are bf16's, too */
    NEAR = 3,     /* ranks that each sends to */
    LETTERS = 4,  /* to each of these */
    WORDS = 60000 /* of the longest letter */
};

/* ---- large collectives ----------------------------------------------------------------------- */

typedef struct large {
    dp_verb verb;
    dp_dtype dtype;
    size_t each, blocks_in, blocks_out; /* elements of a block; blocks that are sent, received */
    int root;
    dp_part parts[2];
} large;

static unsigned small_part(const task *t, int rank, size_t i)
{
    size_t salt = t->plan->steps[t->step].salt + (size_t)t->info.recoveries + (size_t)t->step * 5;
    return (unsigned)((salt + (size_t)rank * 3 + i) % TURN);
}

static void put(dp_dtype dtype, void *data, size_t i, unsigned number)
{
    float f = (float)number;
    uint32_t bits;
    memcpy(&bits, &f, sizeof bits);
    if (dtype == DP_F32)
        ((float *)data)[i] = f;
    else if (dtype == DP_BF16)
        ((uint16_t *)data)[i] = (uint16_t)(bits >> 16);
    else
        ((int64_t *)data)[i] = number;
}

static double get(dp_dtype dtype, const void *data, size_t i)
{
    uint32_t bits = dtype == DP_BF16 ? (uint32_t)((const uint16_t *)data)[i] << 16 : 0;
    float f;
    memcpy(&f, &bits, sizeof f);
    return dtype == DP_F32    ? (double)((const float *)data)[i]
           : dtype == DP_BF16 ? (double)f
                              : (double)((const int64_t *)data)[i];
}

/* Returns the right number at place i of a rank's part. */
static double large_right(const task *t, const large *large, int rank, size_t i)
{
    size_t block = i / large->each, at = i % large->each;
    double sum = 0;
    if (large->verb == DP_BROADCAST)
        return small_part(t, large->root, i);
    if (large->verb == DP_ALL_GATHER)
        return small_part(t, (int)block, at);
    if (large->verb == DP_ALL_TO_ALL)
        return small_part(t, (int)block, (size_t)rank * large->each + at);
    if (large->verb == DP_REDUCE_SCATTER)
        i += (size_t)rank * large->each;
    for (int r = 0; r < t->info.rank_count; r++)
        sum += small_part(t, r, i);
    return sum;
}

static void large_check(task *t, const large *large, int d)
{
    double right[TURN];
    for (size_t b = 0; b < large->blocks_out; b++)
        for (size_t i = 0; i < large->each; i++) {
            size_t at = b * large->each + i;
            if (i < TURN)
                right[i] = large_right(t, large, t->info.rank_first + d, at);
            double is = get(large->dtype, large->parts[d].recv, at);
            if (is != right[i % TURN])
                wrong(t, "step %d: %s of %zu %s is %g at %zu, not %g", t->step,
                      dp__verb_names[large->verb], large->each, dp_dtype_name(large->dtype), is, at,
                      right[i % TURN]);
        }
}

/* In memory that the processes share, or not. */
static dp_status large_fill(task *t, large *large, dp_scope *scope, bool shared)
{
    size_t bytes = dp_dtype_bytes(large->dtype) * large->each;
    bool apart = large->verb != DP_ALL_REDUCE && large->verb != DP_BROADCAST;
    for (int d = 0; d < t->info.local_count; d++) {
        size_t in = bytes * large->blocks_in, out = bytes * large->blocks_out;
        void *send = shared ? dp_shared_alloc(scope, in) : dp_scope_alloc(scope, in);
        void *recv = apart ? dp_scope_alloc(scope, out) : send;
        if (send == NULL || recv == NULL)
            return DP_ERR_NO_MEMORY;
        for (size_t i = 0; i < large->each * large->blocks_in; i++)
            put(large->dtype, send, i, small_part(t, t->info.rank_first + d, i));
        large->parts[d] = (dp_part){.send = send, .recv = recv};
    }
    return DP_OK;
}

static dp_status large_call(const task *t, const large *large)
{
    switch (large->verb) {
    case DP_ALL_REDUCE:
        return dp_all_reduce(t->ctx, large->parts, large->each, large->dtype, DP_OP_SUM);
    case DP_BROADCAST:
        return dp_broadcast(t->ctx, large->parts, large->each, large->dtype, large->root);
    case DP_ALL_GATHER:
        return dp_all_gather(t->ctx, large->parts, large->each, large->dtype);
    case DP_REDUCE_SCATTER:
        return dp_reduce_scatter(t->ctx, large->parts, large->each, large->dtype, DP_OP_SUM);
    default:
        return dp_all_to_all(t->ctx, large->parts, large->each, large->dtype);
    }
}

static dp_status large_run(task *t, dp_scope *scope)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_BF16, DP_I64, DP_F32};
    size_t salt = t->plan->steps[t->step].salt, ranks = (size_t)t->info.rank_count;
    size_t most = t->plan->machine_count == 1    ? LARGE_NEAR
                  : t->plan->timeout_ms >= 10000 ? LARGE_SLOW
                                                 : LARGE;
    size_t bytes = 1 + t->plan->steps[t->step].size * 1000u % most;
    large large = {.verb = (dp_verb)(salt % 5), .dtype = dtypes[salt / 5 % 4]};
    large.blocks_in = large.verb == DP_REDUCE_SCATTER || large.verb == DP_ALL_TO_ALL ? ranks : 1;
    large.blocks_out = large.verb == DP_ALL_GATHER || large.verb == DP_ALL_TO_ALL ? ranks : 1;
    large.root = (int)(salt % ranks);
    large.each = 1 + bytes / dp_dtype_bytes(large.dtype) /
                         (large.blocks_in > large.blocks_out ? large.blocks_in : large.blocks_out);
    DP_TRY(large_fill(t, &large, scope, salt / 20 % 2 == 0));
    DP_TRY(CALL_ALL(large_call(t, &large)));
    for (int d = 0; d < t->info.local_count; d++)
        large_check(t, &large, d);
    return DP_OK;
}

static dp_status do_large(task *t)
{
    dp_scope *scope = dp_scope_begin(t->ctx);
    dp_status status = scope != NULL ? large_run(t, scope) : DP_ERR_NO_MEMORY;
    dp_scope_end(scope);
    return status;
}

/* ---- many messages --------------------------------------------------------------------------- */

static int mail_near(const task *t)
{
    int near = 1 + (int)(t->plan->steps[t->step].salt % NEAR);
    return near < t->info.rank_count ? near : t->info.rank_count - 1;
}

/* Letters of a step: the first two are short. Two have each tag, and are of one length, as a
   receive may be from any rank. */
static size_t mail_words(const task *t, int number)
{
    uint32_t size = t->plan->steps[t->step].size;
    uint32_t most = mail_near(t) == 1 ? WORDS : WORDS / 4;
    return 1 + (number / 2 % 2 == 0 ? size % 10 : size * 50 % (most - 1));
}

/* Who is ahead begins letters of a later step, which are none that are awaited from any rank. */
static int mail_tag(const task *t)
{
    return 100 + LETTERS * t->step;
}

static int64_t mail_in[2][NEAR][LETTERS][WORDS], mail_out[2][NEAR][LETTERS][WORDS];

/* Returns letter `number` of local rank d to or from the rank `far` further on. */
static dp_message mail_of(const task *t, int d, int far, int number, bool receives)
{
    int own = t->info.rank_first + d, count = t->info.rank_count;
    bool any = t->plan->steps[t->step].salt / NEAR % 3 == 0;
    int peer = (own + (receives ? count - far : far)) % count;
    int64_t words = (int64_t)mail_words(t, number);
    int64_t *data = receives ? mail_in[d][far - 1][number] : mail_out[d][far - 1][number];
    if (receives)
        memset(data, 0xee, (size_t)words * sizeof *data);
    else
        letter(t, data, (size_t)words, own, peer, number);
    return (dp_message){.tensor = dp_wrap(data, DP_I64, 1, &words),
                        .local_rank = d,
                        .peer = receives && any ? DP_ANY_RANK : peer,
                        .tag = mail_tag(t) + number / 2,
                        .receives = receives};
}

static int mail_make(const task *t, dp_message *list)
{
    int count = 0, letters = 2 + 2 * (int)(t->plan->steps[t->step].salt / 9 % 2);
    for (int number = 0; number < letters; number++)
        for (int d = 0; d < t->info.local_count; d++)
            for (int far = 1; far <= mail_near(t); far++)
                for (int receives = 0; receives < 2; receives++)
                    list[count++] = mail_of(t, d, far, number, receives != 0);
    return count;
}

/* From one rank those with one tag come in the order in which they were sent. */
static void mail_check(task *t, const dp_message *list, int count)
{
    static int64_t right[WORDS];
    int came[2][RANKS][2] = {{{0}}};
    for (int i = 0; i < count; i++) {
        const dp_message *one = &list[i];
        int own = t->info.rank_first + one->local_rank;
        if (!one->receives)
            continue;
        if (one->peer < 0 || one->peer >= t->info.rank_count) {
            wrong(t, "step %d: a letter comes from rank %d", t->step, one->peer);
            continue;
        }
        int tag = one->tag - mail_tag(t);
        int number = 2 * tag + came[one->local_rank][one->peer][tag]++;
        size_t words = (size_t)one->tensor.shape[0];
        letter(t, right, words, one->peer, own, number);
        if (memcmp(right, one->tensor.data, words * sizeof right[0]) != 0)
            wrong(t, "step %d: letter %d from %d to %d is wrong: %llx, not %llx", t->step, number,
                  one->peer, own, (unsigned long long)*(int64_t *)one->tensor.data,
                  (unsigned long long)right[0]);
    }
}

/* Looks a few times whether they are done, and then waits. */
static dp_status mail_await(task *t, dp_message *list, int count)
{
    bool polls = t->plan->steps[t->step].salt / 18 % 2 == 0;
    dp_status status = DP_PENDING;
    for (int i = 0; polls && i < 30 && status == DP_PENDING; i++) {
        status = CALL(dp_messages_test(t->ctx, list, (size_t)count));
        if (status == DP_PENDING)
            sim_pass(100000);
    }
    return status == DP_PENDING ? CALL(dp_messages_end(t->ctx, list, (size_t)count)) : status;
}

static dp_status do_mail(task *t)
{
    dp_message list[2 * 2 * NEAR * LETTERS];
    bool any = false, between = t->plan->steps[t->step].salt / 36 % 2 == 0;
    int count = mail_make(t, list);
    if (count == 0)
        return DP_OK;
    DP_TRY(CALL(dp_messages_begin(t->ctx, list, (size_t)count)));
    if (between)
        DP_TRY(CALL_ALL(dp_any(t->ctx, true, &any)));
    DP_TRY(mail_await(t, list, count));
    mail_check(t, list, count);
    return DP_OK;
}

/* ---- what may fail, and the job goes on ------------------------------------------------------ */

/* All know it, or it is that of another job. */
static dp_status hurt(task *t, dp_status status)
{
    if (status == DP_OK || dp_failure(t->ctx, NULL))
        return status;
    if (t->story->hurt[0] != '\0')
        return DP_OK;
    t->story->hurt_ns = sim_time();
    snprintf(t->story->hurt, sizeof t->story->hurt, "%s: %s", t->story->where, dp_last_error());
    return DP_OK;
}

static dp_status group_run(task *t, dp_ctx *group)
{
    dp_info info = {.process = 0};
    int64_t numbers[2] = {1, sim_process()};
    DP_TRY(dp_info_get(group, &info));
    DP_TRY(CALL(dp_all_reduce_i64(group, numbers, 2, DP_OP_MAX)));
    DP_TRY(CALL(dp_barrier(group)));
    numbers[0] = 1;
    DP_TRY(CALL(dp_all_reduce_i64(group, numbers, 1, DP_OP_SUM)));
    if (numbers[0] != info.process_count || numbers[1] < sim_process())
        wrong(t, "step %d: %lld of %d processes are in a group", t->step, (long long)numbers[0],
              info.process_count);
    return DP_OK;
}

/* Some of the processes are a job of their own for a while. */
static dp_status do_group(task *t)
{
    dp_ctx *group = NULL;
    unsigned salt = t->plan->steps[t->step].salt;
    uint64_t begun_ns = sim_time();
    int number = salt % 3 == 0   ? t->info.process % 2
                 : salt % 3 == 1 ? t->info.machine
                                 : (t->info.process == 0 ? -1 : 7);
    before(t, "dp_open_group"); /* which meets, and then agrees: each takes its time */
    dp_status status = dp_open_group(t->ctx, number, NULL, &group);
    if (status == DP_OK && group != NULL) {
        status = group_run(t, group);
        (void)CALL((dp_close(group), DP_OK));
    }
    uint64_t apart_ns = sim_time() - begun_ns;
    t->story->apart_ns = apart_ns > t->story->apart_ns ? apart_ns : t->story->apart_ns;
    return hurt(t, status);
}

/* ---- gradients ------------------------------------------------------------------------------- */

enum { UNITS = 4, UNIT = 3000 };

static float gradients[2][UNITS][UNIT];

static size_t unit_count(const task *t, int unit)
{
    return 1 + (t->plan->steps[t->step].size * (size_t)(unit + 1)) % UNIT;
}

static dp_status reduce_pass(task *t, dp_reducer *reducer)
{
    DP_TRY(CALL(dp_reducer_begin(reducer, NULL)));
    for (int unit = UNITS - 1; unit >= 0; unit--)
        for (int d = 0; d < t->info.local_count; d++) {
            for (size_t i = 0; i < unit_count(t, unit); i++)
                gradients[d][unit][i] =
                    (float)small_part(t, t->info.rank_first + d, i + (size_t)unit);
            sim_pass(20000);
            DP_TRY(dp_reducer_ready(reducer, d, (uint32_t)unit, NULL));
        }
    DP_TRY(CALL_ALL(dp_reducer_finish(reducer)));
    for (int unit = 0; unit < UNITS; unit++)
        for (int d = 0; d < t->info.local_count; d++)
            for (size_t i = 0; i < unit_count(t, unit); i++) {
                double sum = 0;
                for (int r = 0; r < t->info.rank_count && i < TURN; r++)
                    sum += small_part(t, r, i + (size_t)unit);
                if ((double)gradients[d][unit][i] !=
                    (i < TURN ? sum : (double)gradients[d][unit][i % TURN]))
                    wrong(t, "step %d: gradient %zu of unit %d is %g", t->step, i, unit,
                          (double)gradients[d][unit][i]);
            }
    return DP_OK;
}

/* If the job fails, the reducer goes with the context. */
static dp_status do_reduce(task *t)
{
    dp_reducer *reducer = NULL;
    dp_block blocks[UNITS];
    void *local[UNITS][2];
    for (int unit = 0; unit < UNITS; unit++) {
        for (int d = 0; d < 2; d++)
            local[unit][d] = gradients[d][unit];
        blocks[unit] = (dp_block){DP_F32, unit_count(t, unit), local[unit]};
    }
    const dp_reducer_config config = {
        .name = "steps",
        .blocks = blocks,
        .block_count = UNITS,
        .reduction = DP_SUM_RANKS,
        .unused_units = DP_UNUSED_ERROR,
        .buckets = {.first_bytes = 1000,
                    .bytes = 9000,
                    .wire = t->plan->steps[t->step].salt % 3 == 0 ? DP_BF16 : (dp_dtype)0}};
    dp_status status = CALL(dp_reducer_create(t->ctx, &config, &reducer));
    for (int pass = 0; pass < 2 && status == DP_OK; pass++)
        status = reduce_pass(t, reducer);
    if (status == DP_OK)
        status = dp_reducer_destroy(reducer);
    return hurt(t, status);
}
