/* dp/buckets.h - v0.2.0 - gradients in buckets, and how a bucket travels - MIT licence

   Part of dp.h, which includes it.

   CONTENTS (search for the tag)
     >>layout     what a config says, checked; ranges, units, and pieces
     >>buckets    which units travel together, and in which order
     >>travel     how a bucket travels: as it lies, or flat
     >>hooks      what a function of the user's does in place of an all-reduce
     >>times      when buckets left, how long passes took
*/

#ifndef DP__ROOMS
#error "dp/buckets.h is a part of dp.h: include dp.h"
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

/* Returns true if the unit after the one at `place` has to travel with it. */
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

/* Returns true if nobody uses any unit of a stretch: else all of it travels, as it is cut the same
   in each pass. */
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

/* Returns the part of a range that the spans have. */
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

/* Returns true if a part goes on where the span ends. */
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

/* Makes buckets of units in reducer->order. */
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

/* Returns true if any bucket may have to be flat. Inside one process a collective costs less than a
   copy, and for devices with memory of their own copying a run costs as much as reducing it. */
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

/* Returns true if so many runs are copied together rather than sent one by one. */
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

/* Reduces the elements that ranks do not share out; short runs are flat, as those of a bucket. */
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

/* Fails if not all ranks do the same next. */
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

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
