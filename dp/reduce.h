/* dp/reduce.h - v0.2.0 - gradients equal on all ranks: the reducer - MIT licence

   Part of dp.h, which includes it.

   CONTENTS (search for the tag)
     >>alike      ranks compare what they have, and name the first difference
     >>reducer    made, compared, destroyed; what ranks tell each other
     >>passes     begin, ready
     >>finishing  what was not reported; what is left to reduce
*/

#ifndef DP__ROOMS
#error "dp/reduce.h is a part of dp.h: include dp.h"
#else

/* ==== >>alike ==================================================================================
   Each process writes one line for each thing that it has. All compare a hash of their lines. Only
   if the hashes differ, they search for the first line that differs, by halving.               */

typedef struct dp__lines {
    const char *fn;
    dp_ctx *ctx;
    dp_scope *scope; /* of the lines, temporary */
    const char **text;
    uint64_t *hashes; /* [i] of the first i lines, so one more than there are lines */
    size_t count, room;
} dp__lines;

static dp_status dp__lines_begin(dp__lines *lines, size_t room)
{
    lines->room = room;
    lines->text = dp__scope_bytes(lines->scope, room * sizeof *lines->text, 8);
    lines->hashes = dp__scope_bytes(lines->scope, (room + 1) * sizeof *lines->hashes, 8);
    if (lines->text == NULL || lines->hashes == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory to compare %zu things", lines->fn, room);
    lines->hashes[0] = dp__hash_first;
    return DP_OK;
}

static dp_status dp__lines_add(dp__lines *lines, const char *text)
{
    const char *copy = dp__copy_text(lines->scope, text);
    if (copy == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory to compare %zu things", lines->fn,
                        lines->room);
    uint64_t hash = dp__hash(lines->hashes[lines->count], text, strlen(text) + 1);
    lines->text[lines->count++] = copy;
    lines->hashes[lines->count] = hash;
    return DP_OK;
}

/* The first rank whose number is not that of rank 0; INT64_MAX: all are. */
static dp_status dp__other_number(const dp__lines *lines, uint64_t own, int64_t *out_rank)
{
    uint64_t first = own;
    const dp_coll_call call = {.verb = DP_BROADCAST, .count = 1, .dtype = DP_I64};
    DP_TRY(dp__tell(lines->fn, lines->ctx, call, &first));
    *out_rank = own != first ? lines->ctx->info.rank_first : INT64_MAX;
    return dp__lowest(lines->fn, lines->ctx, out_rank);
}

/* The first rank whose first `count` lines are not those of rank 0; INT64_MAX: all are. */
static dp_status dp__lines_differ(const dp__lines *lines, size_t count, int64_t *out_rank)
{
    return dp__other_number(lines, lines->hashes[count], out_rank);
}

static dp_status dp__pipe_of(const dp__lines *lines, size_t line, int rank, char *out)
{
    memset(out, 0, DP__LINE_BYTES);
    snprintf(out, DP__LINE_BYTES, "%.*s", DP__LINE_BYTES - 1,
             line < lines->count ? lines->text[line] : "nothing more");
    return dp__words_of(lines->fn, lines->ctx, rank, out, DP__LINE_BYTES);
}

/* Some line, or the number of lines, differs. All have at least `least` lines. */
static dp_status dp__lines_error(const dp__lines *lines, size_t least)
{
    char here[DP__LINE_BYTES], there[DP__LINE_BYTES];
    const int64_t none = INT64_MAX;
    size_t alike = 0, differ = least + 1; /* so many lines are known to be alike, or to differ */
    int64_t culprit = none, rank = none;
    while (differ - alike > 1) {
        size_t half = alike + (differ - alike) / 2;
        DP_TRY(dp__lines_differ(lines, half, &rank));
        culprit = rank != none ? rank : culprit;
        *(rank != none ? &differ : &alike) = half;
    }
    if (culprit == none) /* only the numbers of lines differ */
        DP_TRY(dp__other_number(lines, lines->count, &culprit));
    DP_TRY(dp__pipe_of(lines, alike, (int)culprit, there));
    DP_TRY(dp__pipe_of(lines, alike, 0, here));
    return dp_error(DP_ERR_MISMATCH, "%s: rank %d has %s, rank 0 has %s", lines->fn, (int)culprit,
                    there, here);
}

/* Compares the lines of all processes. `status`: whether this one could write its own; if one could
   not, all fail. */
static dp_status dp__lines_compare(const dp__lines *lines, dp_status status)
{
    int64_t least = (int64_t)lines->count, rank = INT64_MAX;
    DP_TRY(dp__all_or_none(lines->fn, lines->ctx, status));
    DP_TRY(dp__lines_differ(lines, lines->count, &rank));
    if (rank == INT64_MAX)
        return DP_OK;
    DP_TRY(dp__lowest(lines->fn, lines->ctx, &least));
    return dp__lines_error(lines, (size_t)least);
}

/* With the defaults put in. */
static dp_buckets dp__buckets_rules(const dp_reducer_config *config)
{
    dp_buckets rules = config->buckets;
    rules.first_bytes = rules.first_bytes > 0 ? rules.first_bytes : DP__FIRST_BUCKET_BYTES;
    rules.bytes = rules.bytes > 0 ? rules.bytes : DP__BUCKET_BYTES;
    return rules;
}

enum { DP__RULES = 6 }; /* lines of dp__rules_lines */

/* `wrapped`: the config is a wrapper's, whose field has another name. */
static dp_status dp__rules_lines(dp__lines *lines, const dp_reducer_config *config, bool wrapped)
{
    char text[DP__LINE_BYTES];
    const dp_buckets rules = dp__buckets_rules(config);
    snprintf(text, sizeof text, "reduction %s", dp__reduction_names[config->reduction]);
    DP_TRY(dp__lines_add(lines, text));
    snprintf(text, sizeof text, "%s %s", dp__unused_field(wrapped),
             dp__unused_names[config->unused_units]);
    DP_TRY(dp__lines_add(lines, text));
    snprintf(text, sizeof text, "buckets.first_bytes %zu", rules.first_bytes);
    DP_TRY(dp__lines_add(lines, text));
    snprintf(text, sizeof text, "buckets.bytes %zu", rules.bytes);
    DP_TRY(dp__lines_add(lines, text));
    snprintf(text, sizeof text, "wire %s", dp__dtype_names[rules.wire]);
    DP_TRY(dp__lines_add(lines, text));
    return dp__lines_add(lines, rules.hook != NULL ? "a hook" : "no hook");
}

/* Blocks, and ranges in the order of memory. */
static dp_status dp__layout_lines(dp__lines *lines, const dp_reducer *reducer)
{
    char text[DP__LINE_BYTES], unit[160];
    for (size_t i = 0; i < reducer->block_count; i++) {
        const dp_block *block = &reducer->blocks[i];
        snprintf(text, sizeof text, "block %zu of %zu %s", i, block->count,
                 dp__dtype_names[block->dtype]);
        DP_TRY(dp__lines_add(lines, text));
    }
    for (size_t i = 0; i < reducer->range_count; i++) {
        const dp_range *range = &reducer->ranges[i];
        snprintf(text, sizeof text, "%zu elements from %zu on of block %u for %s", range->count,
                 range->first, (unsigned)range->block,
                 dp__unit_text(reducer, range->unit, unit, sizeof unit));
        DP_TRY(dp__lines_add(lines, text));
    }
    return DP_OK;
}

/* ==== >>reducer ================================================================================
   Reducers are made, compared with those of other ranks, queried and destroyed. What ranks tell
   each other for this goes over the caller's communicator, on the caller's thread.             */

static dp_status dp__reducer_enter(const char *fn, const dp_reducer *reducer)
{
    DP_TRY(dp__check_reducer(fn, reducer));
    return dp__enter(fn, reducer->ctx);
}

/* Returns a purpose for the caller's collectives. */
static dp__purpose dp__reducer_journal(const dp_reducer *reducer)
{
    return dp__journal_for(&reducer->ctx->lanes[DP__CALLER],
                           (dp__purpose){reducer->label, reducer->number, 0});
}

static dp_status dp__reducer_fill(const char *fn, dp_reducer *reducer,
                                  const dp_reducer_config *config, const dp__wrapped *wrapped)
{
    reducer->reduction = config->reduction;
    reducer->unused_units = config->unused_units;
    reducer->to_first = config->to_first;
    reducer->rules = dp__buckets_rules(config);
    reducer->wrapped = wrapped != NULL;
    reducer->gaps = wrapped != NULL ? wrapped->gaps : 0;
    dp__blocks_copy(reducer, config);
    DP_TRY(dp__ranges_make(fn, reducer, config));
    DP_TRY(dp__stretches_make(fn, reducer, wrapped));
    DP_TRY(dp__pieces_make(fn, reducer));
    DP_TRY(dp__names_copy(fn, reducer, config));
    DP_TRY(dp__pass_room(fn, reducer));
    snprintf(reducer->label, sizeof reducer->label, "gradients of '%.40s'", reducer->name);
    DP_TRY(dp__travel_room(fn, reducer));
    for (size_t i = 0; i < reducer->unit_count; i++)
        reducer->order[i] = (uint32_t)i;
    dp__buckets_make(reducer);
    return dp__lane_begin(fn, reducer->lane);
}

static dp_status dp__reducer_make(const char *fn, dp_ctx *ctx, const dp_reducer_config *config,
                                  const dp__wrapped *wrapped, dp_scope *scope, dp_reducer **out)
{
    DP_TRY(dp__check_pointer(fn, "out", out));
    DP_TRY(dp__check_reducer_config(fn, ctx, config));
    dp_reducer *reducer = dp__scope_bytes(scope, sizeof *reducer, _Alignof(dp_reducer));
    if (reducer == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for a reducer", fn);
    *reducer = (dp_reducer){.ctx = ctx,
                            .lane = &ctx->lanes[DP__COURIER],
                            .scope = scope,
                            .recoveries = ctx->info.recoveries};
    DP_TRY(dp__reducer_fill(fn, reducer, config, wrapped));
    *out = reducer;
    return DP_OK;
}

/* Tell all processes whether every rank made the same reducer. */
static dp_status dp__reducer_alike(const char *fn, dp_ctx *ctx, dp_scope *temp,
                                   const dp_reducer_config *config, const dp_reducer *made,
                                   dp_status status)
{
    dp__lines lines = {.fn = fn, .ctx = ctx, .scope = temp};
    size_t things = made != NULL ? made->block_count + made->range_count : 0;
    if (status == DP_OK)
        status = dp__lines_begin(&lines, DP__RULES + things);
    if (status == DP_OK)
        status = dp__rules_lines(&lines, config, made->wrapped);
    if (status == DP_OK)
        status = dp__layout_lines(&lines, made);
    return dp__lines_compare(&lines, status);
}

static dp_status dp__reducer_create(const char *fn, dp_ctx *ctx, const dp_reducer_config *config,
                                    const dp__wrapped *wrapped, dp_scope *scope, dp_reducer **out)
{
    dp_reducer *made = NULL;
    dp_scope *temp = NULL;
    dp_status status =
        dp__reducer_make(fn, ctx, config, wrapped, scope, out != NULL ? &made : NULL);
    if (ctx->info.process_count > 1) {
        dp_status begun = dp__temp_begin(ctx, &temp);
        status = begun == DP_OK ? dp__reducer_alike(fn, ctx, temp, config, made, status)
                                : dp__all_or_none(fn, ctx, begun);
        status = dp__temp_end(temp, NULL, status);
    }
    DP_TRY(status);
    made->magic = DP__REDUCER_LIVE;
    made->number = ++ctx->reducers;
    *out = made;
    return DP_OK;
}

/* True once the user has made a reducer, in whichever context: it may travel seldom. */
static atomic_bool dp__reduces_itself;

DP_API dp_status dp_reducer_create(dp_ctx *ctx, const dp_reducer_config *config, dp_reducer **out)
{
    dp_scope *scope = NULL;
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__enter(__func__, ctx));
    dp_status status = dp__temp_begin(ctx, &scope);
    if (status != DP_OK)
        return dp__exit(__func__, ctx, dp__all_or_none(__func__, ctx, status));
    status = dp__reducer_create(__func__, ctx, config, NULL, scope, out);
    if (status != DP_OK)
        status = dp__temp_end(scope, NULL, status);
    else
        atomic_store_explicit(&dp__reduces_itself, true, memory_order_relaxed);
    return dp__exit(__func__, ctx, status);
}

DP_API dp_status dp_reducer_destroy(dp_reducer *reducer)
{
    if (reducer == NULL)
        return DP_OK;
    DP_TRY(dp__check_reducer_open(__func__, reducer));
    dp_ctx *ctx = reducer->ctx;
    DP_TRY(dp__check_alone(__func__, ctx));
    if (reducer->open && !dp__has_failed(ctx) && dp__is_of_job(reducer))
        return dp_error(DP_ERR_STATE, "%s: a pass of '%s' is open: call dp_reducer_finish first",
                        __func__, reducer->name);
    reducer->magic = 0;
    if (!dp__has_failed(ctx)) /* else the courier may still use it, and dp_close frees it */
        dp__scope_end(reducer->scope);
    return DP_OK;
}

/* Why its ranks cannot get their shares alone, or NULL. What is cast, or flat for a hook, is
   reduced for all; a table without the verb would take memory of the caller's thread. */
static const char *dp__unscattered_for(const dp_reducer *reducer)
{
    const dp__lane *lanes = reducer->ctx->lanes;
    if (reducer->rules.hook != NULL)
        return "a hook";
    if (reducer->rules.wire != DP_F32)
        return "a wire dtype";
    for (int i = 0; i < DP__LANES; i++)
        if (lanes[i].comm != NULL && !dp__table_has(lanes[i].comm->ops, DP_REDUCE_SCATTER))
            return "collectives without a reduce_scatter";
    return NULL;
}

static size_t dp__reducer_bytes(const dp_reducer *reducer)
{
    size_t bytes = 0;
    for (size_t b = 0; b < reducer->bucket_count; b++)
        bytes += reducer->buckets[b].info.bytes;
    return bytes;
}

DP_API dp_status dp_reducer_info_get(const dp_reducer *reducer, dp_reducer_info *out)
{
    DP_TRY(dp__check_reducer_open(__func__, reducer));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    dp__lock_enter(&reducer->ctx->lock);
    bool travels = reducer->open && reducer->sync;
    *out = (dp_reducer_info){.name = reducer->name,
                             .unit_count = reducer->unit_count,
                             .bucket_count = reducer->bucket_count,
                             .early_count = travels ? reducer->done : reducer->early,
                             .regrouped = reducer->regrouped,
                             .scatters = reducer->scatters,
                             .last = reducer->last,
                             .mean = dp__times_mean(&reducer->total, reducer->pass_count),
                             .pass_count = reducer->pass_count,
                             .bytes = dp__reducer_bytes(reducer) - reducer->gaps,
                             .reduction = reducer->reduction,
                             .unused_units = reducer->unused_units,
                             .buckets = reducer->rules};
    dp__lock_leave(&reducer->ctx->lock);
    return DP_OK;
}

DP_API dp_status dp_reducer_bucket_get(const dp_reducer *reducer, size_t bucket,
                                       dp_bucket_info *out)
{
    DP_TRY(dp__check_reducer_open(__func__, reducer));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (bucket >= reducer->bucket_count)
        return dp_error(DP_ERR_INVALID, "%s: bucket %zu, '%s' has %zu", __func__, bucket,
                        reducer->name, reducer->bucket_count);
    dp__lock_enter(&reducer->ctx->lock); /* the courier may be writing down how long it took */
    *out = reducer->buckets[bucket].info;
    dp__lock_leave(&reducer->ctx->lock);
    return DP_OK;
}

DP_API bool dp_reducer_used(const dp_reducer *reducer, uint32_t unit)
{
    if (dp__check_reducer_open(__func__, reducer) != DP_OK ||
        dp__check_unit(__func__, reducer, unit) != DP_OK)
        return false;
    return !reducer->unused[unit];
}

/* Between all processes, on the caller's thread. */
static dp_status dp__pass_tell(const char *fn, const dp_reducer *reducer, dp_coll_call call,
                               void *data, size_t stride)
{
    call.local = reducer->wires;
    return dp__exchange((dp__coll){fn, &reducer->ctx->lanes[DP__CALLER], call}, data, stride);
}

/* `rank` has excused itself: its words, on all ranks. */
static dp_status dp__excused(const char *fn, dp_reducer *reducer, int rank)
{
    dp__excuse excuse = reducer->excuse;
    const dp_coll_call call = {
        .verb = DP_BROADCAST, .count = sizeof excuse, .dtype = DP_U8, .root = rank};
    DP_TRY(dp__pass_tell(fn, reducer, call, &excuse, 0));
    return dp_error((dp_status)excuse.status, "%s: rank %d: %.*s: gradients of '%s' are void", fn,
                    rank, DP__TEXT_BYTES - 160, dp__unnamed(fn, excuse.text), reducer->name);
}

/* ==== >>passes =================================================================================
   A pass is opened, and units are reported from any thread. Ranks tell each other their samples
   when a pass begins.                                                                           */

/* Adds the pass' samples to those of passes without sync. */
static dp_status dp__samples_add(const char *fn, dp_reducer *reducer, const dp_reduce_pass *pass)
{
    DP_TRY(dp__check_pointer(fn, "samples", pass->samples));
    for (int i = 0; i < reducer->ctx->info.local_count; i++) {
        double samples = pass->samples[i];
        if (!(samples >= 0) || !isfinite(samples))
            return dp_error(DP_ERR_INVALID, "%s: local rank %d has %g samples", fn, i, samples);
        reducer->totals[i] = reducer->samples[i] + samples;
    }
    return DP_OK;
}

/* Gradients were zeroed: what passes without sync had added to them no longer counts. What
   DP_UNUSED_FIXED expects, it expects of the whole time between two reductions. */
static void dp__reducer_forget(dp_reducer *reducer)
{
    size_t locals = (size_t)reducer->ctx->info.local_count;
    memset(reducer->samples, 0, locals * sizeof *reducer->samples);
    dp__lock_enter(&reducer->ctx->lock);
    for (size_t i = 0; i < reducer->unit_count * locals && !reducer->fixed; i++)
        reducer->marks[i] &= (uint8_t)~DP__USED;
    dp__lock_leave(&reducer->ctx->lock);
}

/* The samples of all ranks. A rank that passed in wrong numbers takes part too, so that nobody
   waits for it. */
static dp_status dp__samples_all(const char *fn, dp_reducer *reducer, dp_status own, double *out)
{
    dp_ctx *ctx = reducer->ctx;
    for (int i = 1; i < ctx->info.local_count; i++) {
        reducer->totals[0] += reducer->totals[i];
        reducer->totals[i] = 0;
    }
    if (ctx->info.process_count > 1) {
        const dp_coll_call call = {.count = 1, .dtype = DP_F64, .op = DP_OP_SUM};
        char text[DP__TEXT_BYTES];
        memcpy(text, dp__of_thread.text, sizeof text);
        reducer->totals[0] = own == DP_OK ? reducer->totals[0] : (double)NAN;
        DP_TRY(dp__pass_tell(fn, reducer, call, reducer->totals, sizeof(double)));
        if (own != DP_OK)
            return dp_error(own, "%s", text);
    }
    DP_TRY(own);
    *out = reducer->totals[0];
    if (isnan(*out))
        return dp_error(DP_ERR_MISMATCH, "%s: another rank's samples are wrong", fn);
    if (!(*out > 0) || !isfinite(*out))
        return dp_error(DP_ERR_INVALID, "%s: all ranks together have %g samples", fn, *out);
    return DP_OK;
}

static dp_status dp__samples_begin(const char *fn, dp_reducer *reducer, const dp_reduce_pass *pass)
{
    size_t bytes = (size_t)reducer->ctx->info.local_count * sizeof(double);
    double all = 0;
    dp_status status = dp__samples_add(fn, reducer, pass);
    if (pass->no_sync) {
        DP_TRY(status);
        memcpy(reducer->samples, reducer->totals, bytes);
        return DP_OK;
    }
    dp__purpose before = dp__reducer_journal(reducer);
    status = dp__samples_all(fn, reducer, status, &all);
    dp__journal_for(&reducer->ctx->lanes[DP__CALLER], before);
    DP_TRY(status);
    memset(reducer->samples, 0, bytes);
    reducer->scale = 1 / all;
    return DP_OK;
}

/* Under the context's lock: where in the queue a pass is, or the end of it. */
static dp_reducer **dp__pass_place(dp__lane *lane, const dp_reducer *reducer)
{
    dp_reducer **place = &lane->riding;
    while (*place != NULL && *place != reducer)
        place = &(*place)->behind;
    return place;
}

/* Under the context's lock. */
static void dp__pass_leave(dp_reducer *reducer)
{
    dp_reducer **place = dp__pass_place(reducer->lane, reducer);
    if (*place != NULL)
        *place = reducer->behind;
    reducer->behind = NULL;
}

/* Under the context's lock: count what has to be reported before buckets are complete. */
static void dp__pass_owe(dp_reducer *reducer)
{
    size_t units = reducer->unit_count, locals = (size_t)reducer->ctx->info.local_count;
    memset(reducer->owed, 0, units * sizeof *reducer->owed);
    for (size_t i = 0; i < locals; i++)
        for (size_t unit = 0; unit < units; unit++)
            reducer->owed[unit] += (reducer->marks[i * units + unit] & DP__EXPECTED) != 0;
    for (size_t b = 0; b < reducer->bucket_count; b++)
        reducer->buckets[b].owed = 0;
    for (size_t p = 0; p < reducer->piece_count; p++)
        reducer->buckets[reducer->pieces[p].bucket].owed += reducer->owed[reducer->pieces[p].unit] >
                                                            0;
}

/* Returns true if the courier may carry a pass: what a hook does on a device is on the compute
   stream, and that is the caller's. */
static bool dp__may_ride(const dp_reducer *reducer)
{
    if (reducer->rules.hook == NULL)
        return true;
    for (int i = 0; i < reducer->ctx->info.local_count; i++)
        if (!dp__is_host(&reducer->ctx->devices[i]))
            return false;
    return true;
}

/* Opens a pass. What is not expected may travel at once, after what compute streams have by now. */
static dp_status dp__pass_open(dp_reducer *reducer, bool sync)
{
    dp_ctx *ctx = reducer->ctx;
    dp_status status = DP_OK;
    dp__lock_enter(&ctx->lock);
    for (int i = 0; i < ctx->info.local_count && reducer->fixed && status == DP_OK; i++)
        status = dp__reported_mark(reducer->lane, i, NULL);
    for (size_t i = 0; i < reducer->unit_count * (size_t)ctx->info.local_count; i++) {
        reducer->marks[i] &= DP__USED | DP__EXPECTED;
        reducer->streams[i] = NULL;
    }
    dp__pass_owe(reducer);
    reducer->lost = DP_OK;
    reducer->excuse.status = DP_OK;
    reducer->idle = false;
    reducer->carried = 0;
    reducer->clock = (dp__clock){.begun = dp__os_now_ns(),
                                 .waited = dp__journal_waited_ns(&ctx->lanes[DP__CALLER])};
    reducer->open = true;
    reducer->sync = sync;
    reducer->released = false;
    reducer->arrived = reducer->next = reducer->done = 0;
    if (sync && reducer->lane->courier != NULL && dp__may_ride(reducer))
        *dp__pass_place(reducer->lane, NULL) = reducer;
    dp__lock_leave(&ctx->lock);
    return status;
}

static dp_status dp__pass_begin(const char *fn, dp_reducer *reducer, const dp_reduce_pass *pass)
{
    static const dp_reduce_pass zero;
    pass = pass != NULL ? pass : &zero;
    if (reducer->open)
        return dp_error(DP_ERR_STATE, "%s: a pass of '%s' is open: call dp_reducer_finish first",
                        fn, reducer->name);
    reducer->scale = 1;
    if (reducer->reduction == DP_MEAN_SAMPLES)
        DP_TRY(dp__samples_begin(fn, reducer, pass));
    if (reducer->scatters != reducer->scatters_next) {
        reducer->scatters = reducer->scatters_next;
        dp__buckets_make(reducer);
    }
    return dp__shared_failure(reducer->ctx, dp__pass_open(reducer, !pass->no_sync));
}

DP_API dp_status dp_reducer_begin(dp_reducer *reducer, const dp_reduce_pass *pass)
{
    DP_TRY(dp__reducer_enter(__func__, reducer));
    return dp__exit(__func__, reducer->ctx, dp__pass_begin(__func__, reducer, pass));
}

/* Returns true if a unit's bucket waits for this rank, before dp_reducer_finish. */
static bool dp__is_expected(const dp_reducer *reducer, size_t local_rank, size_t unit)
{
    return (reducer->marks[local_rank * reducer->unit_count + unit] & DP__EXPECTED) != 0;
}

static bool dp__is_used_here(const dp_reducer *reducer, size_t unit)
{
    bool used = false;
    for (size_t i = 0; i < (size_t)reducer->ctx->info.local_count && !used; i++)
        used = (reducer->marks[i * reducer->unit_count + unit] & DP__USED) != 0;
    return used;
}

/* Under the context's lock. out_full: some bucket has all that goes into it. A unit that nobody
   here uses may be one that nobody uses: its bucket waits until ranks have told each other. */
static void dp__unit_arrived(dp_reducer *reducer, int local_rank, uint32_t unit, bool *out_full)
{
    uint8_t *mark = &reducer->marks[(size_t)local_rank * reducer->unit_count + unit];
    *mark |= DP__REPORTED;
    if ((*mark & DP__EXPECTED) == 0 || --reducer->owed[unit] > 0 ||
        !dp__is_used_here(reducer, unit))
        return;
    for (uint32_t p = reducer->unit_pieces[unit]; p < reducer->unit_pieces[unit + 1]; p++)
        *out_full = --reducer->buckets[reducer->pieces[p].bucket].owed == 0 || *out_full;
}

static dp_status dp__check_pass_open(const char *fn, const dp_reducer *reducer)
{
    if (!reducer->open)
        return dp_error(DP_ERR_STATE, "%s: no pass of '%s' is open: call dp_reducer_begin first",
                        fn, reducer->name);
    return DP_OK;
}

static dp_status dp__absent_error(const char *fn, const dp_reducer *reducer, int local_rank)
{
    return dp_error(DP_ERR_STATE, "%s: local rank %d is absent from this pass of '%s' already", fn,
                    local_rank, reducer->name);
}

static dp_status dp__unit_mark(const char *fn, dp_reducer *reducer, int local_rank, uint32_t unit,
                               dp_stream *stream, bool *out_full)
{
    size_t at = (size_t)local_rank * reducer->unit_count + unit;
    char text[160];
    DP_TRY(dp__check_pass_open(fn, reducer));
    if ((reducer->marks[at] & DP__ABSENT) != 0)
        return dp__absent_error(fn, reducer, local_rank);
    if ((reducer->marks[at] & DP__REPORTED) != 0)
        return dp_error(DP_ERR_STATE, "%s: local rank %d reported %s twice in this pass", fn,
                        local_rank, dp__unit_text(reducer, unit, text, sizeof text));
    reducer->marks[at] |= DP__USED;
    reducer->streams[at] = stream;
    if (reducer->sync && reducer->ctx->info.rank_first + local_rank == 0)
        reducer->arrival[reducer->arrived++] = unit;
    dp__unit_arrived(reducer, local_rank, unit, out_full);
    return DP_OK;
}

/* Returns true if units travel that a rank does not use, whatever others use. */
static bool dp__unused_is_known(const dp_reducer *reducer)
{
    return reducer->unused_units == DP_UNUSED_ERROR || reducer->fixed;
}

/* Under the context's lock. */
static dp_status dp__check_absent(const char *fn, const dp_reducer *reducer, int local_rank)
{
    const uint8_t *marks = &reducer->marks[(size_t)local_rank * reducer->unit_count];
    char text[160];
    DP_TRY(dp__check_pass_open(fn, reducer));
    for (uint32_t unit = 0; unit < reducer->unit_count; unit++)
        if ((marks[unit] & DP__ABSENT) != 0)
            return dp__absent_error(fn, reducer, local_rank);
        else if ((marks[unit] & DP__REPORTED) != 0)
            return dp_error(DP_ERR_STATE, "%s: local rank %d has reported %s in this pass", fn,
                            local_rank, dp__unit_text(reducer, unit, text, sizeof text));
    return DP_OK;
}

/* A local rank that has nothing to do in the open pass. It keeps no other one here waiting, and
   makes no unit count as used, unless it is known which ones travel. */
static dp_status dp__reducer_absent(const char *fn, dp_reducer *reducer, int local_rank)
{
    dp_ctx *ctx = reducer->ctx;
    bool full = false;
    dp__lock_enter(&ctx->lock);
    dp_status status = dp__check_absent(fn, reducer, local_rank);
    if (status == DP_OK && reducer->sync)
        status = dp__reported_mark(reducer->lane, local_rank, NULL);
    for (size_t unit = 0; unit < reducer->unit_count && status == DP_OK; unit++) {
        uint8_t *mark = &reducer->marks[(size_t)local_rank * reducer->unit_count + unit];
        *mark |= DP__ABSENT;
        if ((*mark & DP__EXPECTED) == 0)
            continue;
        *mark |= reducer->sync && dp__unused_is_known(reducer) ? DP__USED : 0;
        dp__unit_arrived(reducer, local_rank, (uint32_t)unit, &full);
    }
    reducer->idle = reducer->idle || status == DP_OK;
    reducer->clock.reported = status == DP_OK ? dp__os_now_ns() : reducer->clock.reported;
    full = full && reducer->lane->riding == reducer;
    dp__lock_leave(&ctx->lock);
    if (full)
        dp__courier_wake(reducer->lane->courier);
    return status;
}

DP_API dp_status dp_reducer_absent(dp_reducer *reducer, int local_rank)
{
    DP_TRY(dp__check_reducer(__func__, reducer));
    DP_TRY(dp__check_rank(__func__, reducer->ctx, "local_rank", local_rank));
    return dp__reducer_absent(__func__, reducer, local_rank);
}

/* Several units of a local rank at once, in this order. The courier takes a bucket as soon as it is
   full, so its streams have to know before what it comes after. */
static dp_status dp__units_ready(const char *fn, dp_reducer *reducer, int local_rank,
                                 const uint32_t *units, size_t count, dp_stream *stream)
{
    dp_ctx *ctx = reducer->ctx;
    bool full = false;
    dp_status status = DP_OK;
    uint64_t now = dp__os_now_ns();
    dp__lock_enter(&ctx->lock);
    if (reducer->open && reducer->sync)
        status = dp__reported_mark(reducer->lane, local_rank, stream);
    for (size_t i = 0; i < count && status == DP_OK; i++)
        status = dp__unit_mark(fn, reducer, local_rank, units[i], stream, &full);
    if (status == DP_OK)
        reducer->clock.reported = now;
    full = full && reducer->lane->riding == reducer;
    dp__lock_leave(&ctx->lock);
    if (full)
        dp__courier_wake(reducer->lane->courier);
    return status;
}

DP_API dp_status dp_reducer_ready(dp_reducer *reducer, int local_rank, uint32_t unit,
                                  dp_stream *stream)
{
    DP_TRY(dp__check_reducer(__func__, reducer));
    dp_ctx *ctx = reducer->ctx;
    DP_TRY(dp__check_rank(__func__, ctx, "local_rank", local_rank));
    const dp__device *device = &ctx->devices[local_rank];
    DP_TRY(dp__check_unit(__func__, reducer, unit));
    if (stream != NULL && stream->dev != device->dev)
        return dp_error(DP_ERR_INVALID,
                        "%s: the stream is not of local rank %d: make it for that rank", __func__,
                        local_rank);
    return dp__units_ready(__func__, reducer, local_rank, &unit, 1, stream);
}

/* ==== >>finishing ==============================================================================
   Finish makes sure that everything is reduced. Ranks tell each other which units were not reported
   and, once, the order of units.                                                               */

/* The first of this process' ranks' units that was expected and did not come, or came without being
   expected, in one number; INT64_MAX: none; less than 0: a process excuses itself. */
static int64_t dp__surprise_here(const dp_reducer *reducer)
{
    const dp_info *info = &reducer->ctx->info;
    uint8_t bit = reducer->fixed ? DP__USED : DP__REPORTED;
    if (reducer->excuse.status != DP_OK)
        return info->rank_first - info->rank_count;
    for (size_t unit = 0; unit < reducer->unit_count; unit++)
        for (int i = 0; i < info->local_count; i++) {
            uint8_t marks = reducer->marks[(size_t)i * reducer->unit_count + unit];
            bool came = (marks & bit) != 0, expected = (marks & DP__EXPECTED) != 0;
            if (came != expected)
                return ((int64_t)unit * info->rank_count + info->rank_first + i) * 2 + came;
        }
    return INT64_MAX;
}

/* The least of all ranks. */
static dp_status dp__surprise_anywhere(const char *fn, const dp_reducer *reducer, int64_t *out)
{
    *out = dp__surprise_here(reducer);
    return dp__pass_tell(fn, reducer, (dp_coll_call){.count = 1, .dtype = DP_I64, .op = DP_OP_MIN},
                         out, 0);
}

static dp_status dp__surprise_error(const char *fn, const dp_reducer *reducer, int64_t surprise)
{
    char text[160], hint[64];
    bool came = surprise % 2 != 0;
    int ranks = reducer->ctx->info.rank_count, rank = (int)(surprise / 2 % ranks);
    dp__unit_text(reducer, (uint32_t)(surprise / 2 / ranks), text, sizeof text);
    snprintf(hint, sizeof hint, " (see dp_%s_config.%s)",
             reducer->wrapped ? "distributed" : "reducer", dp__unused_field(reducer->wrapped));
    return dp_error(DP_ERR_MISMATCH, "%s: rank %d %s %s of '%s' in this pass%s: gradients are void",
                    fn, rank, came ? "reported" : "did not report", text, reducer->name,
                    !reducer->fixed ? hint
                    : came          ? ", but not in the first one"
                                    : ", but in the first one");
}

/* reducer->unused: units that no rank has reported since the last reduction. Where a process
   excuses itself, out_surprise says which, as above. */
static dp_status dp__unused_find(const char *fn, dp_reducer *reducer, int64_t *out_surprise)
{
    size_t units = reducer->unit_count;
    uint8_t *beside = reducer->unused + units;
    const dp_coll_call call = {.count = units + DP__BESIDE, .dtype = DP_U8, .op = DP_OP_MAX};
    for (size_t unit = 0; unit < units; unit++)
        reducer->unused[unit] = dp__is_used_here(reducer, unit);
    beside[DP__EXCUSED] = reducer->excuse.status != DP_OK;
    beside[DP__IDLE] = reducer->idle;
    dp_status status = dp__pass_tell(fn, reducer, call, reducer->unused, 0);
    for (size_t i = 0; i < units; i++)
        reducer->unused[i] = !reducer->unused[i];
    DP_TRY(status);
    return beside[DP__EXCUSED] ? dp__surprise_anywhere(fn, reducer, out_surprise) : DP_OK;
}

/* Compute streams come after the streams on which units were reported. */
static dp_status dp__streams_join(const dp_reducer *reducer)
{
    for (int i = 0; i < reducer->ctx->info.local_count; i++) {
        const dp__device *device = &reducer->ctx->devices[i];
        const dp_device_ops *ops = device->dev->ops;
        dp_stream *joined = device->stream;
        for (size_t unit = 0; unit < reducer->unit_count; unit++) {
            dp_stream *stream = reducer->streams[(size_t)i * reducer->unit_count + unit];
            if (stream == NULL || stream == joined || stream == device->stream)
                continue;
            DP_TRY(ops->event_record(device->done, stream));
            DP_TRY(ops->event_wait(device->stream, device->done));
            joined = stream;
        }
    }
    return DP_OK;
}

/* By the caller: if no bucket has to be flat, all at once, in as few spans as possible. */
static dp_status dp__reduce_all(dp_reducer *reducer)
{
    dp__lane *caller = &reducer->ctx->lanes[DP__CALLER];
    bool skips = reducer->unused_units != DP_UNUSED_ERROR;
    dp__spans spans = {.reducer = reducer,
                       .ranges = reducer->ranges,
                       .count = reducer->range_count,
                       .skips = skips};
    DP_TRY(dp__streams_join(reducer));
    if (reducer->flats == NULL && caller->comm == NULL && reducer->reduction != DP_MEAN_SAMPLES)
        return DP_OK;
    if (reducer->flats == NULL)
        return dp__spans_travel(reducer, 0, spans, caller);
    for (size_t b = 0; b < reducer->bucket_count; b++)
        DP_TRY(dp__bucket_carry(reducer, b, skips));
    return DP_OK;
}

/* By the courier, or here: everything may travel now. Then it is the next pass' turn.
   What was put on compute streams and not reported has been done: ranks have just told each other
   about this pass, over the same streams, and the host has waited for that. */
static dp_status dp__ride_out(const char *fn, dp_reducer *reducer)
{
    dp_ctx *ctx = reducer->ctx;
    dp__courier *courier = reducer->lane->courier;
    dp__lock_enter(&ctx->lock);
    reducer->released = true;
    dp__lock_leave(&ctx->lock);
    for (;;) {
        unsigned seen = dp__courier_ticket(courier);
        dp__lane_carry(reducer->lane);
        dp__lock_enter(&ctx->lock);
        bool all = reducer->done == reducer->bucket_count;
        dp__lock_leave(&ctx->lock);
        DP_TRY(dp__check_ctx(fn, ctx));
        if (all)
            break;
        dp__courier_wake(courier); /* which may have looked before the pass was released */
        dp__courier_await(courier, seen);
    }
    dp__lock_enter(&ctx->lock);
    dp__pass_leave(reducer);
    bool more = reducer->lane->riding != NULL;
    dp__lock_leave(&ctx->lock);
    if (more)
        dp__courier_wake(courier);
    return DP_OK;
}

/* By the caller, while an older pass rides, or where no pass can ride. */
static dp_status dp__reduce_now(dp_reducer *reducer)
{
    dp_ctx *ctx = reducer->ctx;
    bool alone = ctx->info.rank_count == 1; /* no exchange since finish was called: it is now */
    uint64_t start = alone ? reducer->clock.finished : dp__os_now_ns(), end = start;
    DP_TRY(dp__shared_failure(ctx, dp__reduce_all(reducer)));
    if (reducer->carried > 0)
        end = dp__os_now_ns();
    bool together = reducer->flats == NULL && reducer->carried > 0;
    dp__lock_enter(&ctx->lock);
    for (size_t b = 0; b < reducer->bucket_count && together; b++)
        dp__bucket_timed(reducer, b, start, end);
    reducer->clock.travel = end - start;
    reducer->clock.bytes = reducer->carried;
    dp__pass_leave(reducer);
    dp__lock_leave(&ctx->lock);
    return DP_OK;
}

/* Once: form buckets in the order in which rank 0 reported units; those it did not report come
   last. If it has reported none, it was idle, and a later pass says more. */
static dp_status dp__regroup(const char *fn, dp_reducer *reducer)
{
    const uint32_t none = UINT32_MAX;
    size_t count = reducer->arrived, units = reducer->unit_count;
    const dp_coll_call call = {.verb = DP_BROADCAST, .count = units, .dtype = DP_I32};
    if (reducer->regrouped || units == 0)
        return DP_OK;
    for (size_t unit = 0; count < units; unit++)
        if ((reducer->marks[unit] & DP__REPORTED) == 0 || reducer->arrived == 0)
            reducer->arrival[count++] = reducer->arrived == 0 ? none : (uint32_t)unit;
    DP_TRY(dp__pass_tell(fn, reducer, call, reducer->arrival, 0));
    if (reducer->arrival[0] == none)
        return DP_OK;
    memcpy(reducer->order, reducer->arrival, units * sizeof *reducer->order);
    dp__buckets_make(reducer);
    reducer->regrouped = true;
    return DP_OK;
}

/* DP_UNUSED_FIXED, once: each rank has reported what it will report from now on. Who was idle has
   not. */
static void dp__expect(dp_reducer *reducer)
{
    if (reducer->unused_units != DP_UNUSED_FIXED || reducer->fixed ||
        reducer->unused[reducer->unit_count + DP__IDLE])
        return;
    reducer->fixed = true;
    for (size_t i = 0; i < reducer->unit_count * (size_t)reducer->ctx->info.local_count; i++)
        if ((reducer->marks[i] & DP__USED) == 0)
            reducer->marks[i] &= (uint8_t)~DP__EXPECTED;
}

static dp_status dp__pass_reduce(const char *fn, dp_reducer *reducer)
{
    int64_t surprise = INT64_MAX;
    dp_ctx *ctx = reducer->ctx;
    dp__lock_enter(&ctx->lock);
    bool rides = reducer->lane->riding == reducer;
    dp__lock_leave(&ctx->lock);
    if (dp__unused_is_known(reducer))
        DP_TRY(dp__surprise_anywhere(fn, reducer, &surprise));
    else
        DP_TRY(dp__unused_find(fn, reducer, &surprise));
    DP_TRY(rides ? dp__ride_out(fn, reducer) : dp__reduce_now(reducer));
    if (surprise < 0)
        return dp__excused(fn, reducer, (int)surprise + ctx->info.rank_count);
    if (reducer->lost != DP_OK)
        return dp_error(reducer->lost, "%s: %s: gradients are void", fn, reducer->lost_text);
    if (surprise != INT64_MAX)
        return dp__surprise_error(fn, reducer, surprise);
    DP_TRY(dp__regroup(fn, reducer));
    dp__expect(reducer);
    return DP_OK;
}

static dp_status dp__pass_finish(const char *fn, dp_reducer *reducer)
{
    dp_ctx *ctx = reducer->ctx;
    uint64_t start = dp__os_now_ns();
    dp__lock_enter(&ctx->lock);
    dp_status status = dp__check_pass_open(fn, reducer);
    bool sync = reducer->sync;
    reducer->open = false;
    reducer->early = status == DP_OK && sync ? reducer->done : reducer->early;
    reducer->clock.finished = start;
    reducer->clock.waited = dp__journal_waited_ns(&ctx->lanes[DP__CALLER]) - reducer->clock.waited;
    dp__lock_leave(&ctx->lock);
    if (status != DP_OK || !sync)
        return status;
    dp__purpose before = dp__reducer_journal(reducer);
    status = dp__pass_reduce(fn, reducer);
    dp__journal_for(&ctx->lanes[DP__CALLER], before);
    for (size_t i = 0; i < reducer->unit_count * (size_t)ctx->info.local_count; i++)
        reducer->marks[i] &= DP__EXPECTED;
    dp__lock_enter(&ctx->lock);
    if (status == DP_OK)
        dp__pass_timed(reducer, dp__os_now_ns());
    dp__lock_leave(&ctx->lock);
    return dp__drain(ctx, NULL, status);
}

DP_API dp_status dp_reducer_finish(dp_reducer *reducer)
{
    DP_TRY(dp__reducer_enter(__func__, reducer));
    return dp__exit(__func__, reducer->ctx, dp__pass_finish(__func__, reducer));
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
