/* dp/reduce.h - v0.2.0 - gradients equal on all ranks: buckets, courier, reducer - MIT licence

   Part of dp.h, which includes it.

   CONTENTS (search for the tag)
     >>layout     what a config says, checked; ranges, units, and pieces
     >>buckets    which units travel together, and in which order
     >>travel     how a bucket travels: as it lies, or flat
     >>hooks      what a function of the user's does in place of an all-reduce
     >>times      when buckets left, how long passes took
     >>courier    buckets travel while the caller computes
     >>alike      ranks compare what they have, and name the first difference
     >>reducer    made, compared, destroyed; what ranks tell each other
     >>passes     begin, ready
     >>finishing  what was not reported; what is left to reduce
*/

#ifndef DP__ROOMS
#error "dp/reduce.h is a part of dp.h: include dp.h"
#else

/* ==== >>layout =================================================================================
   Blocks are cut into ranges, and ranges belong to units. A bucket has one dtype, so a unit with
   memory of several dtypes has a piece of each. All memory of a reducer is in its own scope and is
   allocated when it is created: a pass allocates nothing.                                      */

#define DP__REDUCER_LIVE 0x4edc0de5u /* dp_reducer.magic */

enum { DP__FIRST_BUCKET_BYTES = 1 << 20, DP__BUCKET_BYTES = 25 << 20 };

enum { DP__EXCUSED, DP__IDLE, DP__BESIDE }; /* dp_reducer.unused, behind the units */

enum {                   /* dp_reducer.marks */
       DP__REPORTED = 1, /* in this pass */
       DP__USED = 2,     /* since the last reduction */
       DP__EXPECTED = 4, /* before dp_reducer_finish its bucket does not travel without it */
       DP__ABSENT = 8    /* in this pass its rank has nothing to report */
};

typedef struct dp__piece { /* a unit's memory of one dtype */
    dp_dtype dtype;
    uint32_t unit, bucket;
    size_t bytes;
} dp__piece;

/* Ranges that follow each other, which ranks share out: rank r of n has elements r * each up to
   (r + 1) * each of them, and what comes after n * each all have. */
typedef struct dp__stretch {
    size_t first_range, range_count, each;
} dp__stretch;

typedef struct dp__wrapped { /* what a wrapper knows of what it has reduced */
    const dp__stretch *stretches;
    size_t count;
    size_t gaps; /* bytes in ranges that are of no gradient */
} dp__wrapped;

#define DP__NO_STRETCH UINT32_MAX

typedef struct dp__bucket {
    dp_bucket_info info;
    size_t run_count;            /* pieces of memory that its ranges make up */
    uint32_t made, last;         /* when it was begun, when it got its last piece */
    uint32_t owed;               /* pieces that are not complete yet; under the context's lock */
    char label[DP__LABEL_BYTES]; /* for sentences */
} dp__bucket;

typedef struct dp__trip { /* the bucket that travels */
    dp_bucket bucket;
    dp__lane *lane;
    const dp__frame *frame;    /* of the hook, while it runs */
    size_t collective_count;   /* that the hook has called */
    char said[DP__LINE_BYTES]; /* why the hook has failed here */
} dp__trip;

typedef struct dp__clock {              /* of a pass: when, and for how long, in ns */
    uint64_t begun, reported, finished; /* finished: dp_reducer_finish was called */
    uint64_t travel, hidden;
    uint64_t waited; /* of the caller's lane: until the pass began, then in it until it finished */
    size_t bytes;
} dp__clock;

struct dp_reducer {
    uint32_t magic;
    bool full; /* there was no memory for something */
    dp_ctx *ctx;
    dp__lane *lane; /* where its passes ride */
    dp_scope *scope;
    char *name, **unit_names;
    char label[DP__LABEL_BYTES]; /* for sentences */
    uint32_t number;             /* among all of the context, from 1: the same on all ranks */
    int recoveries;              /* of the job that it was made for */
    dp_reduction reduction;
    dp_unused unused_units;
    bool wrapped;  /* the config is a wrapper's */
    size_t gaps;   /* dp__wrapped.gaps */
    bool to_first; /* of the local ranks, but for what a hook does */
    bool regrouped;
    bool fixed; /* DP_UNUSED_FIXED: what is unused, and what is expected, stays as it is */
    bool idle;  /* a local rank had nothing to do in this pass */
    bool scatters, scatters_next; /* ranks get their shares alone: in this pass; from the next on */
    dp_buckets rules;             /* defaults put in */
    void *hook_kept;
    dp_block *blocks;
    void **memory;            /* of block after block, by local rank */
    dp_range *ranges;         /* in the order of memory */
    uint32_t *range_pieces;   /* the piece that each of them is part of */
    dp__stretch *stretches;   /* in the order of memory; each unit of theirs has one range */
    uint32_t *unit_stretches; /* of each unit, or DP__NO_STRETCH */
    dp__piece *pieces;        /* of one unit after another */
    uint32_t *unit_pieces;    /* where those of a unit begin, and the end of the last one's */
    dp__bucket *buckets;
    size_t block_count, range_count, stretch_count, unit_count, piece_count, bucket_count;
    uint32_t *order;             /* of units */
    uint32_t *bucket_units;      /* of one bucket after another */
    dp_range *bucket_ranges;     /* likewise */
    uint32_t *places;            /* of buckets, by dp__bucket.made */
    dp_part *parts;              /* of what travels */
    dp_part *wires, *hook_wires; /* room for what ranks tell each other */
    void **flats;                /* local ranks: room for a flat bucket; NULL: there are none */
    size_t flat_bytes;           /* of each */
    dp__trip trip;
    size_t carried; /* bytes given to collectives in this pass */
    dp_status lost; /* why the pass failed on all ranks, or DP_OK */
    char lost_text[DP__TEXT_BYTES];
    dp__excuse excuse;        /* why what this process has in the pass does not count, or DP_OK; it
                                 takes part all the same, so that nobody waits for it */
    double *samples, *totals; /* local ranks: since the last reduction; now */
    double scale;             /* of this reduction */
    uint8_t *unused;          /* units that no rank uses in this reduction, and DP__BESIDE more */
    dp_stream **streams;      /* local ranks by units: where they were reported */
    /* The rest is under the context's lock. */
    dp_reducer *behind; /* the one whose pass travels after this one: see dp__lane.riding */
    bool open, sync;
    bool released;     /* finish was called: what was not reported travels too */
    uint8_t *marks;    /* local ranks by units */
    uint32_t *owed;    /* local ranks that have yet to report a unit */
    uint32_t *arrival; /* units as rank 0 reported them */
    size_t arrived;
    size_t next, done, early;    /* buckets: to travel next; arrived; so before finish */
    dp__clock clock;             /* of this pass */
    dp_reduce_times last, total; /* of the last reduced pass, of all of them */
    uint64_t pass_count;         /* that were reduced */
};

static void *dp__room(dp_reducer *reducer, size_t count, size_t bytes_each)
{
    void *data = reducer->full ? NULL : dp__scope_bytes(reducer->scope, count * bytes_each, 64);
    reducer->full = data == NULL;
    return data != NULL ? memset(data, 0, count * bytes_each) : NULL;
}

static char *dp__room_text(dp_reducer *reducer, const char *text)
{
    size_t bytes = strlen(text) + 1;
    char *copy = dp__room(reducer, bytes, 1);
    return copy != NULL ? memcpy(copy, text, bytes) : NULL;
}

static dp_status dp__check_room(const char *fn, const dp_reducer *reducer)
{
    if (reducer->full)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu units of %zu ranges", fn,
                        reducer->unit_count, reducer->range_count);
    return DP_OK;
}

/* "unit 3 'h.3'" */
static const char *dp__unit_text(const dp_reducer *reducer, uint32_t unit, char *text, size_t bytes)
{
    if (reducer->unit_names != NULL)
        snprintf(text, bytes, "unit %u '%s'", (unsigned)unit, reducer->unit_names[unit]);
    else
        snprintf(text, bytes, "unit %u", (unsigned)unit);
    return text;
}

/* The memory of a block on each local rank is on its device, and does not overlap another's. */
static dp_status dp__check_block_memory(const char *fn, const dp_ctx *ctx, const dp_block *block,
                                        size_t index)
{
    size_t bytes = block->count * dp__dtype_sizes[block->dtype];
    char what[48];
    snprintf(what, sizeof what, "block %zu", index);
    for (int i = 0; i < ctx->info.local_count; i++) {
        if (block->local[i] == NULL)
            return dp_error(DP_ERR_INVALID, "%s: block %zu of local rank %d is NULL", fn, index, i);
        DP_TRY(dp__check_owned(fn, what, &ctx->devices[i], block->local[i]));
        for (int k = 0; k < i; k++)
            if (dp__share_memory(ctx, i, k) &&
                dp__ranges_overlap(block->local[i], bytes, block->local[k], bytes))
                return dp_error(DP_ERR_INVALID,
                                "%s: block %zu of local rank %d overlaps that of local rank %d", fn,
                                index, i, k);
    }
    return DP_OK;
}

static dp_status dp__check_block(const char *fn, const dp_ctx *ctx, const dp_reducer_config *config,
                                 size_t index)
{
    const dp_block *block = &config->blocks[index];
    size_t bytes = 0;
    DP_TRY(dp__check_dtype(fn, block->dtype));
    if (config->reduction != DP_SUM_RANKS && !dp__is_float(block->dtype))
        return dp_error(DP_ERR_INVALID, "%s: block %zu is %s: a mean would be cut to whole numbers",
                        fn, index, dp__dtype_names[block->dtype]);
    if (!dp__mul(block->count, dp__dtype_sizes[block->dtype], &bytes) ||
        !dp__mul(bytes, (size_t)ctx->info.rank_count, &bytes) || bytes > INT64_MAX / 2)
        return dp_error(DP_ERR_INVALID, "%s: block %zu has more elements than can be counted", fn,
                        index);
    if (block->count == 0)
        return DP_OK;
    if (block->local == NULL)
        return dp_error(DP_ERR_INVALID, "%s: block %zu: local is NULL", fn, index);
    return dp__check_block_memory(fn, ctx, block, index);
}

static const char *const dp__reduction_names[] = {"0", "DP_SUM_RANKS", "DP_MEAN_RANKS",
                                                  "DP_MEAN_SAMPLES"};
static const char *const dp__unused_names[] = {"DP_UNUSED_ERROR", "DP_UNUSED_FOUND",
                                               "DP_UNUSED_FIXED"};

/* In which words a user has said it: in a wrapper's config, or a reducer's. */
static const char *dp__unused_field(bool wrapped)
{
    return wrapped ? "unused_params" : "unused_units";
}

static dp_status dp__check_unused(const char *fn, const char *field, dp_unused unused)
{
    if ((unsigned)unused > DP_UNUSED_FIXED)
        return dp_error(DP_ERR_INVALID, "%s: %s is %d, not DP_UNUSED_ERROR, _FOUND or _FIXED", fn,
                        field, (int)unused);
    return DP_OK;
}

static dp_status dp__check_wire(const char *fn, dp_dtype wire)
{
    if (wire != DP_F32 && wire != DP_F16 && wire != DP_BF16)
        return dp_error(DP_ERR_INVALID, "%s: wire is %d, not 0, DP_F16 or DP_BF16", fn, (int)wire);
    return DP_OK;
}

static dp_status dp__check_reducer_config(const char *fn, const dp_ctx *ctx,
                                          const dp_reducer_config *config)
{
    DP_TRY(dp__check_pointer(fn, "config", config));
    if (config->reduction != DP_SUM_RANKS && config->reduction != DP_MEAN_RANKS &&
        config->reduction != DP_MEAN_SAMPLES)
        return dp_error(DP_ERR_INVALID,
                        "%s: reduction is %d, not DP_SUM_RANKS, DP_MEAN_RANKS or DP_MEAN_SAMPLES",
                        fn, (int)config->reduction);
    DP_TRY(dp__check_unused(fn, "unused_units", config->unused_units));
    DP_TRY(dp__check_wire(fn, config->buckets.wire));
    if (config->block_count >= UINT32_MAX || config->range_count >= UINT32_MAX)
        return dp_error(DP_ERR_INVALID, "%s: more blocks or ranges than can be counted", fn);
    if (config->block_count > 0)
        DP_TRY(dp__check_pointer(fn, "blocks", config->blocks));
    if (config->range_count > 0)
        DP_TRY(dp__check_pointer(fn, "ranges", config->ranges));
    for (size_t i = 0; i < config->block_count; i++)
        DP_TRY(dp__check_block(fn, ctx, config, i));
    return DP_OK;
}

static int dp__range_order(const void *a, const void *b)
{
    const dp_range *x = a, *y = b;
    if (x->block != y->block)
        return x->block < y->block ? -1 : 1;
    if (x->first != y->first)
        return x->first < y->first ? -1 : 1;
    return (x->count > y->count) - (x->count < y->count);
}

/* In the order of memory. What has no elements overlaps nothing. */
static dp_status dp__check_ranges_apart(const char *fn, const dp_reducer *reducer)
{
    const dp_range *a = NULL;
    for (size_t i = 0; i < reducer->range_count; i++) {
        const dp_range *b = &reducer->ranges[i];
        if (b->count == 0)
            continue;
        if (a != NULL && a->block == b->block && a->first + a->count > b->first)
            return dp_error(DP_ERR_INVALID,
                            "%s: in block %u the range of unit %u at %zu overlaps that of unit %u "
                            "at %zu",
                            fn, (unsigned)a->block, (unsigned)a->unit, a->first, (unsigned)b->unit,
                            b->first);
        a = b;
    }
    return DP_OK;
}

static dp_status dp__ranges_copy(const char *fn, dp_reducer *reducer,
                                 const dp_reducer_config *config)
{
    for (size_t i = 0; i < config->range_count; i++) {
        const dp_range *range = &config->ranges[i];
        if (range->block >= config->block_count)
            return dp_error(DP_ERR_INVALID, "%s: range %zu is of block %u, there are %zu", fn, i,
                            (unsigned)range->block, config->block_count);
        size_t room = config->blocks[range->block].count;
        if (range->first > room || range->count > room - range->first)
            return dp_error(DP_ERR_INVALID,
                            "%s: range %zu, %zu elements from %zu on, goes beyond block %u, which "
                            "has %zu",
                            fn, i, range->count, range->first, (unsigned)range->block, room);
        if (range->unit >= config->range_count)
            return dp_error(
                DP_ERR_INVALID, "%s: range %zu is of unit %u: with %zu range%s some unit has none",
                fn, i, (unsigned)range->unit, config->range_count, dp__s(config->range_count));
        reducer->ranges[i] = *range;
        size_t units = (size_t)range->unit + 1;
        reducer->unit_count = units > reducer->unit_count ? units : reducer->unit_count;
    }
    return DP_OK;
}

static dp_status dp__ranges_make(const char *fn, dp_reducer *reducer,
                                 const dp_reducer_config *config)
{
    bool whole = config->ranges == NULL;
    reducer->range_count = whole ? config->block_count : config->range_count;
    reducer->ranges = dp__room(reducer, reducer->range_count, sizeof *reducer->ranges);
    DP_TRY(dp__check_room(fn, reducer));
    for (size_t i = 0; whole && i < config->block_count; i++)
        reducer->ranges[i] = (dp_range){(uint32_t)i, (uint32_t)i, 0, config->blocks[i].count};
    if (whole)
        reducer->unit_count = config->block_count;
    else
        DP_TRY(dp__ranges_copy(fn, reducer, config));
    if (reducer->range_count > 0)
        qsort(reducer->ranges, reducer->range_count, sizeof *reducer->ranges, dp__range_order);
    return dp__check_ranges_apart(fn, reducer);
}

/* `wrapped`: see dp__stretch; NULL: nothing can be shared out. */
static dp_status dp__stretches_make(const char *fn, dp_reducer *reducer, const dp__wrapped *wrapped)
{
    reducer->stretch_count = wrapped != NULL ? wrapped->count : 0;
    reducer->stretches = dp__room(reducer, reducer->stretch_count, sizeof(dp__stretch));
    reducer->unit_stretches = dp__room(reducer, reducer->unit_count, sizeof(uint32_t));
    DP_TRY(dp__check_room(fn, reducer));
    for (size_t unit = 0; unit < reducer->unit_count; unit++)
        reducer->unit_stretches[unit] = DP__NO_STRETCH;
    for (size_t s = 0; s < reducer->stretch_count; s++) {
        const dp__stretch *stretch = &wrapped->stretches[s];
        reducer->stretches[s] = *stretch;
        for (size_t i = 0; i < stretch->range_count; i++)
            reducer->unit_stretches[reducer->ranges[stretch->first_range + i].unit] = (uint32_t)s;
    }
    return DP_OK;
}

/* Which dtypes each unit has: its pieces, in the order of dtypes. */
static dp_status dp__pieces_make(const char *fn, dp_reducer *reducer)
{
    unsigned *masks = dp__room(reducer, reducer->unit_count, sizeof *masks);
    reducer->unit_pieces = dp__room(reducer, reducer->unit_count + 1, sizeof(uint32_t));
    reducer->range_pieces = dp__room(reducer, reducer->range_count, sizeof(uint32_t));
    DP_TRY(dp__check_room(fn, reducer));
    for (size_t i = 0; i < reducer->range_count; i++)
        masks[reducer->ranges[i].unit] |= 1u << reducer->blocks[reducer->ranges[i].block].dtype;
    for (size_t unit = 0; unit < reducer->unit_count; unit++) {
        if (masks[unit] == 0)
            return dp_error(DP_ERR_INVALID,
                            "%s: unit %zu has no range (units 0 to %zu must each have one)", fn,
                            unit, reducer->unit_count - 1);
        reducer->unit_pieces[unit + 1] = reducer->unit_pieces[unit] + dp__bits(masks[unit]);
    }
    reducer->piece_count = reducer->unit_pieces[reducer->unit_count];
    reducer->pieces = dp__room(reducer, reducer->piece_count, sizeof *reducer->pieces);
    DP_TRY(dp__check_room(fn, reducer));
    for (size_t i = 0; i < reducer->range_count; i++) {
        const dp_range *range = &reducer->ranges[i];
        dp_dtype dtype = reducer->blocks[range->block].dtype;
        unsigned before = masks[range->unit] & ((1u << dtype) - 1);
        reducer->range_pieces[i] = reducer->unit_pieces[range->unit] + dp__bits(before);
        dp__piece *piece = &reducer->pieces[reducer->range_pieces[i]];
        piece->dtype = dtype;
        piece->unit = range->unit;
        piece->bytes += range->count * dp__dtype_sizes[dtype];
    }
    return DP_OK;
}

static dp_status dp__names_copy(const char *fn, dp_reducer *reducer,
                                const dp_reducer_config *config)
{
    reducer->name = dp__room_text(reducer, config->name != NULL ? config->name : "");
    if (config->unit_names == NULL)
        return DP_OK;
    reducer->unit_names = dp__room(reducer, reducer->unit_count, sizeof *reducer->unit_names);
    for (size_t i = 0; i < reducer->unit_count && !reducer->full; i++) {
        if (config->unit_names[i] == NULL)
            return dp_error(DP_ERR_INVALID, "%s: unit_names[%zu] is NULL", fn, i);
        reducer->unit_names[i] = dp__room_text(reducer, config->unit_names[i]);
    }
    return DP_OK;
}

static void dp__blocks_copy(dp_reducer *reducer, const dp_reducer_config *config)
{
    size_t locals = (size_t)reducer->ctx->info.local_count;
    reducer->block_count = config->block_count;
    reducer->blocks = dp__room(reducer, config->block_count, sizeof *reducer->blocks);
    reducer->memory = dp__room(reducer, config->block_count * locals, sizeof *reducer->memory);
    for (size_t i = 0; i < config->block_count && !reducer->full; i++) {
        void **local = reducer->memory + i * locals;
        if (config->blocks[i].count > 0)
            memcpy(local, config->blocks[i].local, locals * sizeof *local);
        reducer->blocks[i] = (dp_block){config->blocks[i].dtype, config->blocks[i].count, local};
    }
}

/* Between two passes: the first local rank has a block there now. */
static void dp__block_move(dp_reducer *reducer, size_t block, void *data)
{
    reducer->memory[block * (size_t)reducer->ctx->info.local_count] = data;
}

/* Room for what a pass keeps, so that a pass needs none. */
static dp_status dp__pass_room(const char *fn, dp_reducer *reducer)
{
    size_t units = reducer->unit_count, locals = (size_t)reducer->ctx->info.local_count;
    size_t pieces = reducer->piece_count;
    reducer->buckets = dp__room(reducer, pieces, sizeof *reducer->buckets);
    reducer->places = dp__room(reducer, pieces, sizeof(uint32_t));
    reducer->bucket_units = dp__room(reducer, pieces, sizeof(uint32_t));
    reducer->bucket_ranges = dp__room(reducer, reducer->range_count, sizeof(dp_range));
    reducer->order = dp__room(reducer, units, sizeof(uint32_t));
    reducer->owed = dp__room(reducer, units, sizeof(uint32_t));
    reducer->arrival = dp__room(reducer, units, sizeof(uint32_t));
    reducer->unused = dp__room(reducer, units + DP__BESIDE, 1);
    reducer->marks = dp__room(reducer, units * locals, 1);
    reducer->streams = dp__room(reducer, units * locals, sizeof *reducer->streams);
    reducer->samples = dp__room(reducer, locals, sizeof(double));
    reducer->totals = dp__room(reducer, locals, sizeof(double));
    reducer->parts = dp__room(reducer, locals, sizeof(dp_part));
    DP_TRY(dp__check_room(fn, reducer));
    memset(reducer->marks, DP__EXPECTED, units * locals);
    size_t bytes = sizeof(int64_t) + units * sizeof(uint32_t);
    bytes = bytes > sizeof(dp__excuse) ? bytes : sizeof(dp__excuse);
    return dp__wires_make(fn, reducer->ctx, reducer->scope, bytes, &reducer->wires);
}

/* ==== >>buckets ================================================================================
   Units in a given order are cut into buckets. A bucket is full when it has as many bytes as its
   limit. Each dtype has one open bucket at a time. Buckets travel in the order in which they got
   their last piece, because they cannot travel sooner. If each rank gets only its share, a stretch
   is in one bucket, which the last of its units completes.                                     */

static int dp__bucket_order(const void *a, const void *b)
{
    const dp__bucket *x = a, *y = b;
    return (x->last > y->last) - (x->last < y->last);
}

/* Units of a stretch come together, where the last of them was. Between two passes nobody needs
   reducer->arrival, nor what is owed. */
static void dp__order_stretches(dp_reducer *reducer)
{
    size_t count = 0;
    for (size_t s = 0; s < reducer->stretch_count; s++)
        reducer->owed[s] = (uint32_t)reducer->stretches[s].range_count;
    for (size_t i = 0; i < reducer->unit_count; i++) {
        uint32_t unit = reducer->order[i], s = reducer->unit_stretches[unit];
        if (s == DP__NO_STRETCH)
            reducer->arrival[count++] = unit;
        if (s == DP__NO_STRETCH || --reducer->owed[s] > 0)
            continue;
        const dp__stretch *stretch = &reducer->stretches[s];
        for (size_t r = 0; r < stretch->range_count; r++)
            reducer->arrival[count++] = reducer->ranges[stretch->first_range + r].unit;
    }
    memcpy(reducer->order, reducer->arrival, count * sizeof *reducer->order);
}

/* Whether the unit after the one at `place` has to travel with it. */
static bool dp__goes_together(const dp_reducer *reducer, size_t place)
{
    if (!reducer->scatters || place + 1 == reducer->unit_count)
        return false;
    uint32_t stretch = reducer->unit_stretches[reducer->order[place]];
    return stretch != DP__NO_STRETCH &&
           stretch == reducer->unit_stretches[reducer->order[place + 1]];
}

/* Give each piece its bucket, by the number in dp__bucket.made. */
static void dp__pieces_deal(dp_reducer *reducer)
{
    const dp_buckets *rules = &reducer->rules;
    bool open[DP_DTYPE_COUNT] = {false}, later[DP_DTYPE_COUNT] = {false};
    uint32_t now[DP_DTYPE_COUNT] = {0}, position = 0;
    reducer->bucket_count = 0;
    for (size_t i = 0; i < reducer->unit_count; i++) {
        uint32_t unit = reducer->order[i];
        for (uint32_t p = reducer->unit_pieces[unit]; p < reducer->unit_pieces[unit + 1]; p++) {
            dp__piece *piece = &reducer->pieces[p];
            dp_dtype dtype = piece->dtype;
            if (!open[dtype]) {
                now[dtype] = (uint32_t)reducer->bucket_count++;
                reducer->buckets[now[dtype]] =
                    (dp__bucket){.info.dtype = dtype, .made = now[dtype]};
            }
            dp__bucket *bucket = &reducer->buckets[now[dtype]];
            piece->bucket = now[dtype];
            bucket->last = position++;
            bucket->info.bytes += piece->bytes;
            bucket->info.unit_count++;
            open[dtype] = bucket->info.bytes < (later[dtype] ? rules->bytes : rules->first_bytes) ||
                          dp__goes_together(reducer, i);
            later[dtype] = later[dtype] || !open[dtype];
        }
    }
}

/* The lists of each bucket: units as they come, ranges as they lie in memory. */
static void dp__buckets_fill(dp_reducer *reducer)
{
    uint32_t *units = reducer->bucket_units;
    dp_range *ranges = reducer->bucket_ranges;
    for (size_t i = 0; i < reducer->range_count; i++)
        reducer->buckets[reducer->pieces[reducer->range_pieces[i]].bucket].info.range_count++;
    for (size_t b = 0; b < reducer->bucket_count; b++) {
        dp_bucket_info *info = &reducer->buckets[b].info;
        info->units = units;
        info->ranges = ranges;
        units += info->unit_count;
        ranges += info->range_count;
        info->unit_count = info->range_count = 0;
    }
    for (size_t i = 0; i < reducer->unit_count; i++) {
        uint32_t unit = reducer->order[i];
        for (uint32_t p = reducer->unit_pieces[unit]; p < reducer->unit_pieces[unit + 1]; p++) {
            dp_bucket_info *info = &reducer->buckets[reducer->pieces[p].bucket].info;
            size_t place = (size_t)(info->units - reducer->bucket_units) + info->unit_count++;
            reducer->bucket_units[place] = unit;
        }
    }
    for (size_t i = 0; i < reducer->range_count; i++) {
        const dp__piece *piece = &reducer->pieces[reducer->range_pieces[i]];
        dp_bucket_info *info = &reducer->buckets[piece->bucket].info;
        size_t place = (size_t)(info->ranges - reducer->bucket_ranges) + info->range_count++;
        reducer->bucket_ranges[place] = reducer->ranges[i];
    }
}

typedef enum dp__of_ranges { DP__ALL_OF_THEM, DP__WHAT_IS_SHARED, DP__THE_REST } dp__of_ranges;

typedef struct dp__spans { /* ranges in as few spans as memory allows */
    dp_reducer *reducer;
    const dp_range *ranges;
    size_t count, at;
    dp__of_ranges of;      /* what is shared: a stretch is a span */
    bool skips;            /* leaves out units that nobody uses */
    size_t passed, offset; /* elements so far, of what is left out too; those before the span */
    uint32_t block, unit;  /* of the span; the first of its units */
    size_t first, length;  /* its elements */
} dp__spans;

/* Whether nobody uses any unit of a stretch: else all of it travels, as it is cut the same in each
   pass. */
static bool dp__stretch_unused(const dp_reducer *reducer, const dp__stretch *stretch)
{
    for (size_t i = 0; i < stretch->range_count; i++)
        if (!reducer->unused[reducer->ranges[stretch->first_range + i].unit])
            return false;
    return true;
}

static size_t dp__stretch_cut(const dp_reducer *reducer, const dp__stretch *stretch)
{
    return reducer->ranges[stretch->first_range].first +
           stretch->each * (size_t)reducer->ctx->info.rank_count;
}

/* What the spans have of a range. */
static dp_range dp__spans_part(const dp__spans *spans, const dp_range *range)
{
    const dp_reducer *reducer = spans->reducer;
    uint32_t s = reducer->unit_stretches[range->unit];
    dp_range part = *range;
    size_t cut = range->first, end = range->first + range->count;
    if (spans->of == DP__ALL_OF_THEM)
        return part;
    if (s != DP__NO_STRETCH)
        cut = dp__stretch_cut(reducer, &reducer->stretches[s]);
    cut = cut < range->first ? range->first : cut > end ? end : cut;
    part.first = spans->of == DP__THE_REST ? cut : range->first;
    part.count = spans->of == DP__THE_REST ? end - cut : cut - range->first;
    return part;
}

static bool dp__spans_skip(const dp__spans *spans, uint32_t unit)
{
    const dp_reducer *reducer = spans->reducer;
    uint32_t s = reducer->unit_stretches[unit];
    if (spans->skips && spans->of == DP__WHAT_IS_SHARED && s != DP__NO_STRETCH)
        return dp__stretch_unused(reducer, &reducer->stretches[s]);
    return spans->skips && reducer->unused[unit];
}

/* Whether a part goes on where the span ends. */
static bool dp__spans_go_on(const dp__spans *spans, const dp_range *part)
{
    const uint32_t *stretches = spans->reducer->unit_stretches;
    return part->block == spans->block && part->first == spans->first + spans->length &&
           (spans->of != DP__WHAT_IS_SHARED || stretches[part->unit] == stretches[spans->unit]);
}

/* The next span; false when there are no more. */
static bool dp__spans_next(dp__spans *spans)
{
    spans->length = 0;
    for (; spans->at < spans->count; spans->at++) {
        const dp_range part = dp__spans_part(spans, &spans->ranges[spans->at]);
        bool travels = part.count > 0 && !dp__spans_skip(spans, part.unit);
        if (travels && spans->length == 0) {
            spans->block = part.block;
            spans->unit = part.unit;
            spans->first = part.first;
            spans->offset = spans->passed;
        } else if (travels && !dp__spans_go_on(spans, &part)) {
            return true;
        }
        spans->length += travels ? part.count : 0;
        spans->passed += part.count;
    }
    return spans->length > 0;
}

static dp__spans dp__bucket_spans(dp_reducer *reducer, const dp__bucket *bucket, bool skips)
{
    return (dp__spans){.reducer = reducer,
                       .ranges = bucket->info.ranges,
                       .count = bucket->info.range_count,
                       .skips = skips};
}

static void dp__runs_count(dp_reducer *reducer)
{
    for (size_t b = 0; b < reducer->bucket_count; b++) {
        dp__bucket *bucket = &reducer->buckets[b];
        dp__spans spans = dp__bucket_spans(reducer, bucket, false);
        while (dp__spans_next(&spans))
            bucket->run_count++;
    }
}

/* "bucket 2 of 'net', 'h.3'": a bucket is known by the first unit that is in it. */
static void dp__buckets_label(dp_reducer *reducer)
{
    for (size_t b = 0; b < reducer->bucket_count; b++) {
        dp__bucket *bucket = &reducer->buckets[b];
        uint32_t first = bucket->info.units[0];
        size_t room = sizeof bucket->label,
               used =
                   dp__append(bucket->label, room, 0, "bucket %zu of '%.20s', ", b, reducer->name);
        if (reducer->unit_names != NULL)
            (void)dp__append(bucket->label, room, used, "'%s'", reducer->unit_names[first]);
        else
            (void)dp__append(bucket->label, room, used, "unit %u", (unsigned)first);
    }
}

/* Of units in reducer->order. */
static void dp__buckets_make(dp_reducer *reducer)
{
    if (reducer->scatters)
        dp__order_stretches(reducer);
    dp__pieces_deal(reducer);
    if (reducer->bucket_count > 0)
        qsort(reducer->buckets, reducer->bucket_count, sizeof *reducer->buckets, dp__bucket_order);
    for (size_t b = 0; b < reducer->bucket_count; b++)
        reducer->places[reducer->buckets[b].made] = (uint32_t)b;
    for (size_t p = 0; p < reducer->piece_count; p++)
        reducer->pieces[p].bucket = reducer->places[reducer->pieces[p].bucket];
    dp__buckets_fill(reducer);
    dp__runs_count(reducer);
    dp__buckets_label(reducer);
}

/* ==== >>travel =================================================================================
   How a bucket travels: in place, span by span, or flat. A flat bucket is copied into memory of the
   reducer as one run, cast to the dtype that travels, and copied back. Buckets are flat if they are
   cast, if they have many short runs, or for a hook, unless they are one run already.          */

enum { DP__SHORT_RUN_BYTES = 16 << 10 }; /* copying this much twice costs about one collective */

static dp_op dp__reduction_op(const dp_reducer *reducer)
{
    return reducer->reduction == DP_MEAN_RANKS ? DP_OP_MEAN : DP_OP_SUM;
}

static dp_dtype dp__travel_dtype(const dp_reducer *reducer, dp_dtype dtype)
{
    bool cast = reducer->rules.wire != DP_F32 && reducer->ctx->info.rank_count > 1;
    return cast && (dtype == DP_F32 || dtype == DP_F64) ? reducer->rules.wire : dtype;
}

/* The most bytes that a flat bucket can have, however units are grouped: it is full at its cap, but
   its last piece may go beyond that. A stretch may go further, and then its bucket is not flat. */
static size_t dp__flat_bytes(const dp_reducer *reducer)
{
    size_t totals[DP_DTYPE_COUNT] = {0}, largest[DP_DTYPE_COUNT] = {0}, most = 0;
    size_t first = reducer->rules.first_bytes, cap = reducer->rules.bytes;
    cap = first > cap ? first : cap;
    for (size_t p = 0; p < reducer->piece_count; p++) {
        const dp__piece *piece = &reducer->pieces[p];
        totals[piece->dtype] += piece->bytes;
        if (piece->bytes > largest[piece->dtype])
            largest[piece->dtype] = piece->bytes;
    }
    for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        dp_dtype as = dp__travel_dtype(reducer, (dp_dtype)dtype);
        size_t bytes = totals[dtype], shorts = reducer->range_count * DP__SHORT_RUN_BYTES;
        if (cap < bytes && cap + largest[dtype] < bytes)
            bytes = cap + largest[dtype];
        if (reducer->rules.hook == NULL && as == (dp_dtype)dtype && shorts < bytes)
            bytes = shorts;
        bytes = bytes / dp__dtype_sizes[dtype] * dp__dtype_sizes[as];
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* Whether any bucket may have to be flat. Inside one process a collective costs less than a copy,
   and for devices with memory of their own copying a run costs as much as reducing it. */
static bool dp__may_be_flat(const dp_reducer *reducer)
{
    bool flat = reducer->rules.hook != NULL;
    for (size_t i = 0; i < reducer->range_count && !flat; i++) {
        dp_dtype dtype = reducer->blocks[reducer->ranges[i].block].dtype;
        size_t bytes = reducer->ranges[i].count * dp__dtype_sizes[dtype];
        flat = dp__travel_dtype(reducer, dtype) != dtype ||
               (reducer->lane->comm != NULL && bytes < DP__SHORT_RUN_BYTES);
    }
    return flat;
}

static dp_status dp__travel_room(const char *fn, dp_reducer *reducer)
{
    dp_ctx *ctx = reducer->ctx;
    size_t bytes = dp__flat_bytes(reducer);
    if (!dp__may_be_flat(reducer))
        return DP_OK;
    DP_TRY(dp__wires_make(fn, ctx, reducer->scope, DP__LINE_BYTES, &reducer->hook_wires));
    reducer->flat_bytes = bytes;
    reducer->flats = dp__room(reducer, (size_t)ctx->info.local_count, sizeof *reducer->flats);
    DP_TRY(dp__check_room(fn, reducer));
    for (int i = 0; i < ctx->info.local_count; i++) {
        dp_tensor flat;
        DP_TRY(dp__shared_make(reducer->scope, &ctx->devices[i], &ctx->shared_pool, bytes, &flat));
        reducer->flats[i] = flat.data;
    }
    return DP_OK;
}

/* Whether what makes up so many runs is copied together rather than sent run by run. */
static bool dp__has_short_runs(const dp_reducer *reducer, size_t bytes, size_t run_count)
{
    return reducer->flats != NULL && run_count > 1 && bytes / run_count < DP__SHORT_RUN_BYTES &&
           bytes <= reducer->flat_bytes;
}

static bool dp__is_flat(const dp_reducer *reducer, const dp__bucket *bucket, bool whole)
{
    if (dp__travel_dtype(reducer, bucket->info.dtype) != bucket->info.dtype)
        return true;
    if (reducer->rules.hook != NULL)
        return bucket->run_count > 1 || !whole;
    return dp__has_short_runs(reducer, bucket->info.bytes, bucket->run_count);
}

/* Reduce each span where it lies, on every local rank: for all of them, or to each its share. */
static dp_status dp__spans_reduce(dp__spans *spans, dp__lane *lane)
{
    dp_reducer *reducer = spans->reducer;
    dp_ctx *ctx = reducer->ctx;
    bool shares = spans->of == DP__WHAT_IS_SHARED;
    dp__coll coll = {.fn = "dp_reducer_finish",
                     .lane = lane,
                     .call = {.verb = shares ? DP_REDUCE_SCATTER : DP_ALL_REDUCE,
                              .local = reducer->parts,
                              .op = dp__reduction_op(reducer),
                              .scale = reducer->scale}};
    while (dp__spans_next(spans)) {
        const dp_block *block = &reducer->blocks[spans->block];
        size_t size = dp__dtype_sizes[block->dtype];
        coll.call.count = shares ? spans->length / (size_t)ctx->info.rank_count : spans->length;
        coll.call.dtype = block->dtype;
        for (int i = 0; i < ctx->info.local_count; i++) {
            size_t own = shares ? (size_t)(ctx->info.rank_first + i) * coll.call.count * size : 0;
            bool wants = i == 0 || !reducer->to_first || shares;
            char *data = (char *)block->local[i] + spans->first * size;
            char *to = (char *)block->local[reducer->to_first ? 0 : i] + spans->first * size;
            reducer->parts[i] = (dp_part){.send = data, .recv = wants ? to + own : NULL};
        }
        DP_TRY(dp__collective_run(&coll));
        reducer->carried += dp__blocks_bytes(&coll, shares);
    }
    return DP_OK;
}

/* Copy a span of a local rank between its block and flat memory. */
static dp_status dp__span_move(const dp__spans *spans, int local_rank, bool in)
{
    const dp_reducer *reducer = spans->reducer;
    const dp_block *block = &reducer->blocks[spans->block];
    const dp_part *part = &reducer->parts[local_rank];
    dp_dtype as = reducer->trip.bucket.dtype, dtype = block->dtype;
    char *own = (char *)block->local[local_rank] + spans->first * dp__dtype_sizes[dtype];
    char *flat = (char *)reducer->flats[local_rank] + spans->offset * dp__dtype_sizes[as];
    if (as != dtype)
        return dp__cast_on(reducer->ctx, &reducer->ctx->devices[local_rank], part->stream,
                           in ? flat : own, in ? as : dtype, in ? own : flat, in ? dtype : as,
                           spans->length);
    return part->stream->dev->ops->copy(part->stream, in ? flat : own, in ? own : flat,
                                        spans->length * dp__dtype_sizes[dtype]);
}

static dp_status dp__flat_move(dp__spans spans, bool in)
{
    bool all = in || !spans.reducer->to_first;
    int count = all ? spans.reducer->ctx->info.local_count : 1;
    while (dp__spans_next(&spans))
        for (int i = 0; i < count; i++)
            DP_TRY(dp__span_move(&spans, i, in));
    return DP_OK;
}

/* Write zeros where units that nobody uses would be. */
static dp_status dp__flat_clear(const dp_reducer *reducer)
{
    const dp_bucket *bucket = &reducer->trip.bucket;
    for (int i = 0; i < reducer->ctx->info.local_count; i++) {
        const dp_kernel_args args =
            dp__kernel_args(DP_KERNEL_FILL, bucket->dtype, bucket->count, &reducer->flats[i], NULL);
        DP_TRY(
            dp__kernel(reducer->ctx, &reducer->ctx->devices[i], reducer->parts[i].stream, &args));
    }
    return DP_OK;
}

static void dp__trip_begin(dp_reducer *reducer, size_t index, size_t count, bool flat,
                           dp__lane *lane)
{
    dp_ctx *ctx = reducer->ctx;
    const dp_bucket_info *info = &reducer->buckets[index].info;
    size_t size = dp__dtype_sizes[info->dtype];
    dp__spans run = dp__bucket_spans(reducer, &reducer->buckets[index], false);
    dp__spans_next(&run);
    for (int i = 0; i < ctx->info.local_count; i++) {
        char *own = (char *)reducer->blocks[run.block].local[i] + run.first * size;
        void *data = flat ? reducer->flats[i] : own;
        bool wants = i == 0 || !reducer->to_first || reducer->rules.hook != NULL;
        reducer->parts[i] = (dp_part){data, wants ? data : NULL, dp__lane_stream(lane, i)};
    }
    reducer->trip = (dp__trip){.lane = lane,
                               .bucket = {.ctx = ctx,
                                          .reducer = reducer,
                                          .index = index,
                                          .is_last = index + 1 == reducer->bucket_count,
                                          .dtype = dp__travel_dtype(reducer, info->dtype),
                                          .count = count,
                                          .local = reducer->parts,
                                          .info = *info,
                                          .op = dp__reduction_op(reducer),
                                          .scale = reducer->scale,
                                          .scope = reducer->scope,
                                          .kept = &reducer->hook_kept}};
}

static dp_status dp__trip_reduce(dp_reducer *reducer)
{
    const dp_bucket *bucket = &reducer->trip.bucket;
    const dp__coll coll = {.fn = "dp_reducer_finish",
                           .lane = reducer->trip.lane,
                           .call = {.local = bucket->local,
                                    .count = bucket->count,
                                    .dtype = bucket->dtype,
                                    .op = bucket->op,
                                    .scale = bucket->scale}};
    reducer->carried += dp__blocks_bytes(&coll, false);
    return dp__collective_run(&coll);
}

static dp_status dp__hook_run(dp_reducer *reducer);

static dp_status dp__trip_run(dp_reducer *reducer, dp__spans spans, bool flat, bool whole)
{
    if (flat && !whole)
        DP_TRY(dp__flat_clear(reducer));
    if (flat)
        DP_TRY(dp__flat_move(spans, true));
    DP_TRY(reducer->rules.hook != NULL ? dp__hook_run(reducer) : dp__trip_reduce(reducer));
    return flat && reducer->lost == DP_OK ? dp__flat_move(spans, false) : DP_OK;
}

/* What ranks do not share out; its short runs are flat, as those of a bucket are. */
static dp_status dp__rest_travel(dp_reducer *reducer, size_t index, dp__spans rest, dp__lane *lane)
{
    dp__spans all = rest;
    size_t size = dp__dtype_sizes[reducer->buckets[index].info.dtype], run_count = 0, count = 0;
    for (all.skips = false; dp__spans_next(&all); count += all.length)
        run_count++;
    if (!dp__has_short_runs(reducer, count * size, run_count))
        return dp__spans_reduce(&rest, lane);
    dp__trip_begin(reducer, index, count, true, lane);
    return dp__trip_run(reducer, rest, true, !rest.skips);
}

/* Span by span, of a bucket, or of all of them where none is flat. */
static dp_status dp__spans_travel(dp_reducer *reducer, size_t index, dp__spans spans,
                                  dp__lane *lane)
{
    dp__spans rest = spans;
    if (!reducer->scatters)
        return dp__spans_reduce(&spans, lane);
    spans.of = DP__WHAT_IS_SHARED;
    rest.of = DP__THE_REST;
    DP_TRY(dp__spans_reduce(&spans, lane));
    return dp__rest_travel(reducer, index, rest, lane);
}

/* In a pass that is lost nothing travels any more. */
static dp_status dp__bucket_travel(dp_reducer *reducer, size_t index, dp__lane *lane, bool skips)
{
    const dp__bucket *bucket = &reducer->buckets[index];
    dp__spans spans = dp__bucket_spans(reducer, bucket, skips);
    size_t used = 0;
    for (size_t i = 0; i < bucket->info.unit_count; i++)
        used += !skips || !reducer->unused[bucket->info.units[i]];
    if (bucket->info.bytes == 0 || used == 0 || reducer->lost != DP_OK)
        return DP_OK;
    bool whole = used == bucket->info.unit_count, flat = dp__is_flat(reducer, bucket, whole);
    dp__purpose before =
        dp__journal_for(lane, (dp__purpose){bucket->label, reducer->number, (uint32_t)index + 1});
    dp_trace_begin(bucket->label);
    dp_status status;
    if (!flat && reducer->rules.hook == NULL) {
        status = dp__spans_travel(reducer, index, spans, lane);
    } else {
        size_t count = bucket->info.bytes / dp__dtype_sizes[bucket->info.dtype];
        dp__trip_begin(reducer, index, count, flat, lane);
        status = dp__trip_run(reducer, spans, flat, whole);
    }
    dp_trace_end();
    dp__journal_for(lane, before);
    return status;
}

/* ==== >>hooks ==================================================================================
   A hook is the user's function, so it may fail, or do different things on different ranks. Before
   each of its collectives, and when it has returned, all ranks tell each other what they do next.
   If they differ, no rank goes on, so none waits: the pass is lost, and all ranks know it.     */

DP__UNCHECKED static bool dp__is_reducer(const dp_reducer *reducer)
{
    return reducer->magic == DP__REDUCER_LIVE;
}

/* One that exists, even if its job has failed. */
static dp_status dp__check_reducer_open(const char *fn, const dp_reducer *reducer)
{
    DP_TRY(dp__check_pointer(fn, "reducer", reducer));
    if (!dp__is_reducer(reducer))
        return dp_error(DP_ERR_STATE, "%s: the reducer was destroyed already", fn);
    return dp__check_open(fn, reducer->ctx);
}

/* False: dp_recover has made another job since, and it is void. */
static bool dp__is_of_job(const dp_reducer *reducer)
{
    return reducer->recoveries == reducer->ctx->info.recoveries;
}

static dp_status dp__check_reducer(const char *fn, const dp_reducer *reducer)
{
    DP_TRY(dp__check_reducer_open(fn, reducer));
    DP_TRY(dp__check_ctx(fn, reducer->ctx));
    if (!dp__is_of_job(reducer))
        return dp_error(DP_ERR_STATE, "%s: '%s' was made before dp_recover: make it anew", fn,
                        reducer->name);
    return DP_OK;
}

static dp_status dp__check_unit(const char *fn, const dp_reducer *reducer, uint32_t unit)
{
    if (unit >= reducer->unit_count)
        return dp_error(DP_ERR_INVALID, "%s: unit %u, '%s' has %zu", fn, (unsigned)unit,
                        reducer->name, reducer->unit_count);
    return DP_OK;
}

typedef enum dp__act { DP__FAILS, DP__RETURNS, DP__REDUCES, DP__GATHERS, DP__SWAPS } dp__act;

enum { DP__ACT_WORDS = 2 }; /* what is done, and the scale; each has to be the same on all ranks */

static const uint64_t dp__act_counts = ((uint64_t)1 << 52) - 1; /* no memory holds more */

static void dp__act_words(dp__act act, const dp_coll_call *call, int64_t *out)
{
    out[0] = (int64_t)((uint64_t)act << 60 | (uint64_t)call->op << 56 |
                       (uint64_t)call->dtype << 52 | (call->count & dp__act_counts));
    memcpy(&out[1], &call->scale, sizeof *out);
}

/* "all-reduces 7 f32" */
static const char *dp__act_text(int64_t word, bool scale, char *text, size_t bytes)
{
    static const char *const verbs[] = {"fails", "returns", "all-reduces", "all-gathers",
                                        "exchanges"};
    static const char *const ops[] = {"sum", "mean", "product", "min", "max"};
    unsigned act = (unsigned)(word >> 60), op = (unsigned)(word >> 56 & 15);
    double factor = 0;
    memcpy(&factor, &word, sizeof factor);
    if (scale)
        snprintf(text, bytes, "scales by %g", factor);
    else if (act <= DP__RETURNS)
        snprintf(text, bytes, "%s", verbs[act]);
    else
        snprintf(text, bytes, "%s %lld %s%s%s", verbs[act],
                 (long long)((uint64_t)word & dp__act_counts), dp__dtype_names[word >> 52 & 15],
                 act == DP__REDUCES ? ", " : "", act == DP__REDUCES ? ops[op] : "");
    return text;
}

/* The pass is lost with the bucket that travels; all ranks come here. */
static dp_status dp__lose(dp_reducer *reducer, dp_status status, const char *what)
{
    reducer->lost = status;
    snprintf(reducer->lost_text, sizeof reducer->lost_text, "the hook of '%s', bucket %zu: %.400s",
             reducer->name, reducer->trip.bucket.index, what);
    return dp_error(status, "%s", reducer->lost_text);
}

/* Over the hook's own lane. */
static dp_status dp__hook_tell(dp_reducer *reducer, dp_coll_call call, void *data)
{
    call.local = reducer->hook_wires;
    return dp__exchange((dp__coll){"dp_reducer_finish", reducer->trip.lane, call}, data, 0);
}

/* The least of all processes' words; count 4 at most. */
static dp_status dp__hook_least(dp_reducer *reducer, int64_t *words, size_t count)
{
    return dp__hook_tell(reducer, (dp_coll_call){.count = count, .dtype = DP_I64, .op = DP_OP_MIN},
                         words);
}

/* Why the hook has failed on this rank, on all. */
static dp_status dp__hook_said(dp_reducer *reducer, int rank)
{
    const dp_coll_call call = {
        .verb = DP_BROADCAST, .count = DP__LINE_BYTES, .dtype = DP_U8, .root = rank};
    return dp__hook_tell(reducer, call, reducer->trip.said);
}

/* For the word that differs, or says that all fail: which rank has the least, and which the
   greatest. */
static dp_status dp__hook_differs(dp_reducer *reducer, int64_t own, int64_t least, int64_t most,
                                  bool scale)
{
    int64_t rank = reducer->ctx->info.rank_first;
    int64_t ranks[2] = {own == least ? rank : INT64_MAX, own == most ? rank : INT64_MAX};
    char what[DP__LINE_BYTES + 64], a[64], b[64];
    DP_TRY(dp__hook_least(reducer, ranks, 2));
    if (!scale && least >> 60 == DP__FAILS) {
        DP_TRY(dp__hook_said(reducer, (int)ranks[0]));
        snprintf(what, sizeof what, "it failed on rank %d: %s", (int)ranks[0], reducer->trip.said);
        return dp__lose(reducer, DP_ERR_USER, what);
    }
    snprintf(what, sizeof what, "rank %d %s, rank %d %s", (int)ranks[0],
             dp__act_text(least, scale, a, sizeof a), (int)ranks[1],
             dp__act_text(most, scale, b, sizeof b));
    return dp__lose(reducer, DP_ERR_MISMATCH, what);
}

/* Whether all ranks do the same next. */
static dp_status dp__hook_agree(dp_reducer *reducer, dp__act act, const dp_coll_call *call)
{
    int64_t own[DP__ACT_WORDS], all[2 * DP__ACT_WORDS];
    dp__act_words(act, call, own);
    for (int i = 0; i < DP__ACT_WORDS; i++) {
        all[2 * i] = own[i];
        all[2 * i + 1] = ~own[i];
    }
    DP_TRY(dp__hook_least(reducer, all, 2 * DP__ACT_WORDS));
    for (int i = 0; i < DP__ACT_WORDS; i++)
        if (all[2 * i] != ~all[2 * i + 1] || (i == 0 && act == DP__FAILS))
            return dp__hook_differs(reducer, own[i], all[2 * i], ~all[2 * i + 1], i > 0);
    return DP_OK;
}

/* After the hook has returned. */
static dp_status dp__hook_end(dp_reducer *reducer, dp_status status)
{
    snprintf(reducer->trip.said, sizeof reducer->trip.said, "%.*s", DP__LINE_BYTES - 1,
             dp_last_error());
    dp_status told =
        dp__hook_agree(reducer, status == DP_OK ? DP__RETURNS : DP__FAILS, &(dp_coll_call){0});
    if (dp_status_class(told) == DP_CLASS_JOB)
        return told;
    if (told == DP_OK && reducer->trip.collective_count == 0)
        dp__lose(reducer, DP_ERR_USER, "it returned without a collective");
    return DP_OK;
}

static dp_status dp__hook_run(dp_reducer *reducer)
{
    dp_ctx *ctx = reducer->ctx;
    dp__frame frame = {.what = "the hook of",
                       .name = reducer->name,
                       .ctx = ctx,
                       .scope = reducer->scope,
                       .together = true,
                       .on_all = true};
    reducer->trip.frame = &frame;
    dp__frame_enter(&frame);
    dp_status status = dp__frame_leave(
        &frame, reducer->rules.hook(&reducer->trip.bucket, reducer->rules.hook_user));
    reducer->trip.frame = NULL;
    if (dp__has_failed(ctx))
        return dp__check_ctx("dp_reducer_finish", ctx);
    return reducer->lost != DP_OK ? DP_OK : dp__hook_end(reducer, status);
}

static dp_status dp__check_in_hook(const char *fn, const dp_bucket *bucket)
{
    DP_TRY(dp__check_pointer(fn, "bucket", bucket));
    const dp_reducer *reducer = bucket->reducer;
    DP_TRY(dp__check_reducer(fn, reducer));
    const dp__frame *frame = dp__frame_of(reducer->ctx, true);
    if (frame == NULL || frame != reducer->trip.frame)
        return dp_error(DP_ERR_STATE, "%s: it is for the hook of '%s', which this is not in", fn,
                        reducer->name);
    if (reducer->lost != DP_OK)
        return dp_error(reducer->lost, "%s: %s", fn, reducer->lost_text);
    return DP_OK;
}

static dp_status dp__hook_collective(const char *fn, const dp_bucket *bucket, dp__act act,
                                     dp_coll_call call)
{
    dp_reducer *reducer = bucket->reducer;
    dp_ctx *ctx = reducer->ctx;
    const dp__coll coll = {fn, reducer->trip.lane, call};
    DP_TRY(dp__check_coll(&coll));
    DP_TRY(dp__leave(fn, ctx, dp__hook_agree(reducer, act, &call)));
    reducer->trip.collective_count++;
    reducer->carried += dp__blocks_bytes(&coll, dp__rules[call.verb].send_all);
    dp_status status = dp__shared_failure(ctx, dp__collective_run(&coll));
    if (status != DP_OK) /* even if the hook goes on after it */
        dp__lose(reducer, status, dp_last_error());
    return dp__leave(fn, ctx, status);
}

DP_API dp_status dp_bucket_all_reduce(const dp_bucket *bucket, const dp_part *local, size_t count,
                                      dp_dtype dtype, dp_op op, double scale)
{
    bool scales = scale < 1 || !(scale <= 1);
    DP_TRY(dp__check_in_hook(__func__, bucket));
    if (scales)
        DP_TRY(dp__check_float(__func__, dtype));
    return dp__hook_collective(__func__, bucket, DP__REDUCES,
                               (dp_coll_call){DP_ALL_REDUCE, local, count, dtype, op, scale, 0});
}

DP_API dp_status dp_bucket_all_gather(const dp_bucket *bucket, const dp_part *local,
                                      size_t count_each, dp_dtype dtype)
{
    DP_TRY(dp__check_in_hook(__func__, bucket));
    return dp__hook_collective(
        __func__, bucket, DP__GATHERS,
        (dp_coll_call){DP_ALL_GATHER, local, count_each, dtype, DP_OP_SUM, 1, 0});
}

DP_API dp_status dp_bucket_all_to_all(const dp_bucket *bucket, const dp_part *local,
                                      size_t count_each, dp_dtype dtype)
{
    DP_TRY(dp__check_in_hook(__func__, bucket));
    return dp__hook_collective(
        __func__, bucket, DP__SWAPS,
        (dp_coll_call){DP_ALL_TO_ALL, local, count_each, dtype, DP_OP_SUM, 1, 0});
}

/* ==== >>times ==================================================================================
   When things happened, and how long they took. All of it except the mean is under the context's
   lock, because a courier writes about one bucket while the caller reads about others.         */

static double dp__seconds(uint64_t ns)
{
    return (double)ns * 1e-9;
}

static void dp__bucket_timed(dp_reducer *reducer, size_t index, uint64_t start, uint64_t end)
{
    dp_bucket_info *info = &reducer->buckets[index].info;
    info->left_s = dp__seconds(start - reducer->clock.begun);
    info->travel_s = dp__seconds(end - start);
}

/* By the caller, who takes the lock for the times alone. */
static dp_status dp__bucket_carry(dp_reducer *reducer, size_t index, bool skips)
{
    uint64_t start = dp__os_now_ns();
    DP_TRY(dp__bucket_travel(reducer, index, &reducer->ctx->lanes[DP__CALLER], skips));
    dp__lock_enter(&reducer->ctx->lock);
    dp__bucket_timed(reducer, index, start, dp__os_now_ns());
    dp__lock_leave(&reducer->ctx->lock);
    return DP_OK;
}

/* A reduced pass has ended. */
static void dp__pass_timed(dp_reducer *reducer, uint64_t now)
{
    const dp__clock *clock = &reducer->clock;
    dp_reduce_times *total = &reducer->total;
    bool reported = clock->reported > clock->begun;
    uint64_t compute = reported ? clock->reported - clock->begun : 0;
    reducer->last = (dp_reduce_times){.compute_s = dp__seconds(compute),
                                      .travel_s = dp__seconds(clock->travel),
                                      .hidden_s = dp__seconds(clock->hidden),
                                      .finish_s = dp__seconds(now - clock->finished),
                                      .bytes = clock->bytes};
    total->compute_s += reducer->last.compute_s;
    total->travel_s += reducer->last.travel_s;
    total->hidden_s += reducer->last.hidden_s;
    total->finish_s += reducer->last.finish_s;
    total->bytes += reducer->last.bytes;
    reducer->pass_count++;
    dp__late_add(&reducer->ctx->spent_ns[DP__LATE_BACKWARD],
                 compute > clock->waited ? compute - clock->waited : 0);
}

/* `total` of so many passes. */
static dp_reduce_times dp__times_mean(const dp_reduce_times *total, uint64_t count)
{
    double share = count > 0 ? 1 / (double)count : 0;
    return (dp_reduce_times){.compute_s = total->compute_s * share,
                             .travel_s = total->travel_s * share,
                             .hidden_s = total->hidden_s * share,
                             .finish_s = total->finish_s * share,
                             .bytes = count > 0 ? total->bytes / count : 0};
}

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

/* Whether the lines of all processes are alike. `status`: whether this one could write its own; if
   one could not, all fail. */
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

/* What the caller's collectives are for. */
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

/* What a hook does on a device is on the compute stream, and that is the caller's. */
static bool dp__may_ride(const dp_reducer *reducer)
{
    if (reducer->rules.hook == NULL)
        return true;
    for (int i = 0; i < reducer->ctx->info.local_count; i++)
        if (!dp__is_host(&reducer->ctx->devices[i]))
            return false;
    return true;
}

/* What is not expected may travel at once, after what is on compute streams by now. */
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

/* Whether its bucket waits for this rank, before dp_reducer_finish. */
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

/* Whether units travel that a rank does not use, whatever others use. */
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
