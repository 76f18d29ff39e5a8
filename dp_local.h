/* dp_local.h - v0.2.0 - training over slow links: smaller sums, and fewer of them - MIT licence

   Include it after dp.h, or instead. It stands on the public API of dp.h, and on its system
   (dp/os.h) for a lock.

   Where a step waits for the network, send less. Gradients can travel in 8 or 4 bits, or as narrow
   matrices:

       dp_compressor *small;
       dp_compressor_create(ctx, &(dp_compressor_config){.bits = 4}, &small);
       dp_distributed(net, &(dp_distributed_config){
                               .buckets = {.hook = dp_compress, .hook_user = small}}, &par);

   Or each process trains by itself, and parameters meet every 50 steps:

       dp_local *local;
       dp_local_create(net, &(dp_local_config){.every = 50}, &local);
       for (...) {
           dp_train_step(net, step, batch, optim, &log);     nothing travels in it
           dp_local_step(local);
       }
       dp_local_sync(local);                                 parameters are equal everywhere

   Both go together, but for `rank`, as dp_local_config has `buckets`, too.

   Measured (make bench-slow): the GPT of the README (101,376 parameters, a step of 36 ms) on two
   processes of one core each, until its loss on held-out rows is 0.62, at 100 Mbit/s and a round
   trip of 20 ms. The first five mostly wait for latency:

                                            steps   seconds   ms a step   bytes a step
       all-reduce of f32                      160      22.8         142        405,504
       all-reduce of bf16 (wire)              160      21.2         133        202,752
       8 bits                                 160      18.9         118        156,816
       4 bits                                 160      18.1         113         80,784
       PowerSGD, rank 4                       224      26.6         119         26,368
       local steps, the mean every 4          160       9.5          60        101,376
       the mean every 16                      176       7.1          40         25,344
       DiLoCo every 16                        208       8.1          39         25,344
       in 4 fragments, 2 steps late           224       8.1          36         24,891
       DiLoCo every 16, 4 bits                208       8.1          39          5,049

   CONTENTS (search for the tag)
     >>smaller    sums in 8 or 4 bits, or of low rank: a hook for buckets
     >>fewer      steps of each process' own, and sums of what they changed
   and of the implementation
     >>codes      floats in 8 or 4 bits
     >>kept       what a compressor keeps of each bucket
     >>parts      each rank adds up a part
     >>factors    a matrix as the product of two narrow ones
     >>flat       all parameters in a row
     >>outer      what is done with a sum
     >>meeting    when sums leave, and when they are waited for
     >>making     what all processes have to agree on
     >>resuming   from a checkpoint
*/

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if !defined(DP_LOCAL_H) && defined(DP_H)
#define DP_LOCAL_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>smaller ================================================================================
   A block of 128 elements travels as one f32 (the scale: its largest absolute value by 127 or 7)
   and 128 whole numbers of 8 or 4 bits. Each rank sends every other its part of the gradients,
   adds up its own part in f32, in the order of ranks, and sends the sum to all. So a rank sends
   about twice bits / 8 bytes an element, and all ranks get the same bits.

   What rounding takes away is kept, on each rank, and added to the next gradients of the bucket
   (error feedback); so is what the rounding of the sum takes away. Nothing is lost in the long run:
   small gradients come later. What was kept is forgotten where a bucket gets other ranges, which
   happens after the first pass, and where the hook has failed. It ends with the reducer.

   With `rank` gradients of two and more dims travel as PowerSGD has it: M, which has rows along the
   first dim, becomes P Q', where P and Q have so many columns. P is the sum of M Q over ranks, made
   orthonormal; Q is the sum of M' P, and what the next pass begins with. What this leaves out is
   kept. Matrices that would not get half as small, and vectors, are added up as they are.

   Where a number is not finite its block of 128, or its matrix, becomes NaN, on all ranks, and of
   it nothing is kept: a loss scale sees it. Where the scale changes, what was kept has the scale of
   the pass that it comes from. With one rank nothing is changed. Gradients that are no floats are
   added up as they are. For devices whose memory the host reaches.                              */

typedef struct dp_compressor dp_compressor;

typedef struct dp_compressor_config {
    int bits; /* 8 or 4; 0: 8. Not together with rank */
    int rank;
    dp_module *module; /* with rank: whose gradients they are, as the wrapper gets it. Units of a
                          reducer are those that are trained and have elements, in their order */
    const char *const *ignored; /* with rank: as in dp_distributed_config */
    size_t ignored_count;
    int64_t start; /* with rank: so many passes before are all-reduced as they are */
} dp_compressor_config;

/* For one wrapper or reducer, and with bits for several. It ends with the context, or by
   dp_compressor_destroy, after them. All processes need the same config. */
DP_MUST_USE DP_API dp_status dp_compressor_create(dp_ctx *ctx, const dp_compressor_config *config,
                                                  dp_compressor **out);
/* NULL is fine. */
DP_API void dp_compressor_destroy(dp_compressor *compressor);

/* The hook: dp_buckets.hook, with the compressor as hook_user. bucket->kept is its own: a hook of
   yours that calls it leaves that alone. */
DP_MUST_USE DP_API dp_status dp_compress(const dp_bucket *bucket, void *compressor);

/* ==== >>fewer ==================================================================================
   Each process trains the module by itself: with an optimizer of its own, on one device or by
   dp_data_parallel. Every so many steps the differences from where all were before are averaged,
   and that mean is taken as the gradient of an outer step of SGD.

     {.every = 8}                                           the mean of parameters (post-local SGD)
     {.every = 100, .lr = 0.7, .momentum = 0.9,
      .nesterov = true}                                     DiLoCo
     {.every = 100, .fragments = 4, .delay = 10, ...}       streaming: a quarter of the parameters
                                                            each 25 steps; its sum may take 10

   After each sum without `delay` its parameters have the same bits in all processes. With a delay
   the sum travels while the process goes on, and what it has changed meanwhile stays on top of what
   the sum gives: then parameters are equal only after dp_local_sync. (CPU devices; others travel
   when the delay is over.)

   All processes call dp_local_step equally often. One that has no more data, or whose training step
   has failed, calls it as well: it counts with the parameters that it has. Each process counts the
   same. What is frozen is left alone, and so are buffers and the state of inner optimizers. Those
   with `masters` (dp_train.h) would not see what is written here. Functions that run together (see
   INSIDE YOUR FUNCTIONS in dp.h) cannot make these calls: STATE, and nothing is counted.

   If a sum fails but the job has not (a hook's failure), all processes get the error, parameters
   and the outer step stay as they were, and the next sum has those differences in it.            */

typedef struct dp_local dp_local;

typedef struct dp_local_config {
    int every;          /* steps from one sum of a parameter to its next; 1 or more */
    double lr;          /* of the outer step; 0: 1 */
    double momentum;    /* 0 up to below 1; as torch.optim.SGD has it */
    bool nesterov;      /* needs momentum */
    int fragments;      /* of the parameters, in turn, evenly spread; 0: 1. At most `every` */
    int delay;          /* steps that a sum may travel; below `every` */
    dp_buckets buckets; /* how differences travel: wire, or hook = dp_compress, with bits */
} dp_local_config;

/* All processes call it, with the same config, and begin with the parameters of the first. A
   wrapper that makes them equal on all ranks is refused: give what it wraps. Ends with the context;
   or earlier, and before its module. [host] */
DP_MUST_USE DP_API dp_status dp_local_create(dp_module *module, const dp_local_config *config,
                                             dp_local **out);
/* All processes call it, or none. Sums that are under way are dropped when they have come. NULL is
   fine. Refused (see dp_last_error) in a function that runs together with others. */
DP_API void dp_local_destroy(dp_local *local);

/* After each training step. */
DP_MUST_USE DP_API dp_status dp_local_step(dp_local *local);

/* Now: wait for what is under way, then a sum of everything. Before an evaluation or a checkpoint
   that one process makes for all, and at the end. If no step was counted since the last sum, only
   what differs is averaged, and the momentum moves nothing. All processes call it. [host] */
DP_MUST_USE DP_API dp_status dp_local_sync(dp_local *local);

typedef struct dp_local_info {
    int64_t step_count;        /* calls of dp_local_step */
    int64_t sum_count;         /* sums of fragments that have arrived */
    size_t under_way;          /* fragments */
    size_t bytes;              /* that this process has given to collectives for sums */
    double travel_s, waited_s; /* that they were under way, and that this process has waited */
    size_t memory_bytes;       /* on the device of the parameters */
    dp_local_config config;    /* zeros resolved */
} dp_local_info;
DP_MUST_USE DP_API dp_status dp_local_info_get(const dp_local *local, dp_local_info *out);

/* A dict on the host: "steps", "met" (after which of them the last sum of each fragment left),
   "anchor" (where all were after the last sum) and "momentum", which are dicts of tensors by the
   names of parameters. STATE while sums are under way. Parameters are the module's to save: where
   they differ from process to process, each saves its own. [host] */
DP_MUST_USE DP_API dp_status dp_local_save(dp_local *local, dp_scope *scope, dp_value *out);
/* Of a module with the same parameters; else an error names what differs, and nothing changes. All
   processes load what was saved after the same step. What the config says stays as it is. [host] */
DP_MUST_USE DP_API dp_status dp_local_load(dp_local *local, dp_value saved);

#ifdef __cplusplus
}
#endif
#endif /* DP_LOCAL_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_LOCAL_IMPLEMENTED)
#define DP_LOCAL_IMPLEMENTED

#include <math.h>
#include <string.h>

/* ==== >>codes ===================================================================================
   So many elements are a code: the scales of all blocks, then the numbers; of 4 bits two are in a
   byte, the first in its lower half.                                                            */

enum { DP__CODE_BLOCK = 128 };

static size_t dp__code_blocks(size_t count)
{
    return (count + DP__CODE_BLOCK - 1) / DP__CODE_BLOCK;
}

static size_t dp__code_bytes(size_t count, int bits)
{
    return dp__code_blocks(count) * sizeof(float) + (count * (size_t)bits + 7) / 8;
}

/* The largest absolute value; NaN, or infinite, if one is. As bits they are ordered so. */
static float dp__code_largest(const float *x, size_t count)
{
    uint32_t most = 0;
    float out;
    for (size_t i = 0; i < count; i++) {
        uint32_t word;
        memcpy(&word, &x[i], sizeof word);
        word &= 0x7fffffffu;
        most = word > most ? word : most;
    }
    memcpy(&out, &most, sizeof out);
    return out;
}

/* To the nearest of -most to most, of two the even one: there are no halves above 3 * 2^22. The
   quotient may be a little more than `most` where the scale is denormal. */
static int dp__code_round(float x, float scale, int most)
{
    const float whole = 3 << 22;
    int near = (int)(x / scale + whole - whole);
    return near > most ? most : near < -most ? -most : near;
}

/* One block: x becomes what its code leaves out. */
static float dp__code_block(float *x, size_t count, int most, int8_t *out)
{
    float largest = dp__code_largest(x, count), scale = largest / (float)most;
    memset(out, 0, count);
    if (isfinite(largest) && !isfinite((float)most * scale))
        scale = nextafterf(scale, 0);
    if (!isfinite(largest)) {
        memset(x, 0, count * sizeof *x);
        return NAN;
    }
    for (size_t i = 0; i < count && scale > 0; i++) {
        int whole = dp__code_round(x[i], scale, most);
        out[i] = (int8_t)whole;
        x[i] -= (float)whole * scale;
    }
    return scale;
}

static void dp__code_pack(const int8_t *whole, size_t count, int bits, uint8_t *out)
{
    if (bits == 8) {
        memcpy(out, whole, count);
        return;
    }
    for (size_t i = 0; i < count; i += 2) {
        int high = i + 1 < count ? whole[i + 1] + 8 : 0;
        out[i / 2] = (uint8_t)((whole[i] + 8) | high << 4);
    }
}

static int dp__code_at(const uint8_t *in, size_t i, int bits)
{
    if (bits == 8)
        return (int8_t)in[i];
    return (in[i / 2] >> (i % 2 * 4) & 15) - 8;
}

/* x becomes what is left out. */
static void dp__code_write(float *x, size_t count, int bits, uint8_t *out)
{
    const int most = bits == 8 ? 127 : 7;
    uint8_t *numbers = out + dp__code_blocks(count) * sizeof(float);
    for (size_t at = 0; at < count; at += DP__CODE_BLOCK) {
        int8_t whole[DP__CODE_BLOCK];
        size_t here = count - at < DP__CODE_BLOCK ? count - at : DP__CODE_BLOCK;
        float scale = dp__code_block(x + at, here, most, whole);
        memcpy(out + at / DP__CODE_BLOCK * sizeof scale, &scale, sizeof scale);
        dp__code_pack(whole, here, bits, numbers + at * (size_t)bits / 8);
    }
}

/* The first `count` elements of a code of `all`. */
static void dp__code_read(const uint8_t *in, size_t all, size_t count, int bits, bool add,
                          float *out)
{
    const uint8_t *numbers = in + dp__code_blocks(all) * sizeof(float);
    for (size_t at = 0; at < count; at += DP__CODE_BLOCK) {
        size_t here = count - at < DP__CODE_BLOCK ? count - at : DP__CODE_BLOCK;
        const uint8_t *block = numbers + at * (size_t)bits / 8;
        float scale;
        memcpy(&scale, in + at / DP__CODE_BLOCK * sizeof scale, sizeof scale);
        for (size_t i = 0; i < here; i++)
            out[at + i] = (add ? out[at + i] : 0) + (float)dp__code_at(block, i, bits) * scale;
    }
}

/* ==== >>kept ====================================================================================
   Of each bucket of a reducer, from the first time that it comes, until its ranges change. It lies
   in the reducer's scope.                                                                        */

typedef struct dp__compress_rank { /* a local rank's */
    float *own;           /* left out of its gradients: all parts, with zeros behind them */
    float *part;          /* and of its part of the sum */
    uint8_t *send, *recv; /* a code of each part */
    float *left, *right;  /* with low rank: all P and what travels as it is, all Q */
} dp__compress_rank;

/* A range as a matrix: P is `rank` runs of `rows` elements, Q of `cols`. Or as it is: rank 0. */
typedef struct dp__low_piece {
    size_t first, count; /* in the bucket */
    size_t rows, cols, rank;
    size_t left, right; /* where P begins, or what travels as it is; and where Q does */
} dp__low_piece;

typedef struct dp__compress_state {
    size_t index;
    dp_scope *scope;
    dp_range *ranges;
    size_t range_count;
    size_t count, each;    /* elements; of a part */
    float *sum;            /* of a part */
    dp__low_piece *pieces; /* with low rank: of the ranges */
    size_t left_count, right_count;
    float *start;   /* all Q, for the next pass */
    dp_tensor wide; /* f32, for gradients of another dtype */
    dp__compress_rank *ranks;
    dp_part *parts;
    struct dp__compress_state *next;
} dp__compress_state;

typedef struct dp__compress_kept { /* of a reducer */
    dp_scope *scope;
    uint64_t compressor; /* its number */
    dp__compress_state *states;
} dp__compress_kept;

struct dp_compressor {
    dp_ctx *ctx;
    dp_scope *scope;
    uint64_t number; /* no other of the process has it: another one may get the same memory */
    dp_info info;
    int bits; /* 0: low rank */
    size_t rank;
    uint64_t start;
    dp__low_piece *units; /* as they are in a bucket of their own */
    size_t unit_count;
    dp__lock lock; /* of info: hooks of two reducers may run at the same time */
};

static dp_status dp__low_is_ignored(const dp_compressor_config *config, size_t param, bool *out)
{
    *out = false;
    for (size_t i = 0; i < config->ignored_count; i++) {
        size_t found = 0;
        DP_TRY(dp_module_find(config->module, config->ignored[i], &found));
        *out = *out || found == param;
    }
    return DP_OK;
}

/* Parameters that are units of a reducer. Those of one dim have a single row. */
static dp_status dp__low_units(dp_compressor *compressor, const dp_compressor_config *config)
{
    const size_t count = dp_module_param_count(config->module);
    compressor->units = dp_scope_alloc(compressor->scope, count * sizeof *compressor->units);
    if (compressor->units == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < count; i++) {
        dp_param_info info;
        bool ignored = false;
        DP_TRY(dp__low_is_ignored(config, i, &ignored));
        DP_TRY(dp_module_param(config->module, i, &info));
        size_t all = (size_t)dp_tensor_count(&info.data);
        size_t rows = info.data.ndim > 1 ? (size_t)info.data.shape[0] : 1;
        if (!info.frozen && !info.buffer && !ignored && all > 0)
            compressor->units[compressor->unit_count++] =
                (dp__low_piece){.count = all, .rows = rows, .cols = all / rows};
    }
    return DP_OK;
}

static atomic_ullong dp__compressors; /* so far */

static dp_status dp__compressor_make(dp_scope *scope, dp_ctx *ctx,
                                     const dp_compressor_config *config, dp_compressor **out)
{
    dp_compressor *compressor = dp_scope_alloc(scope, sizeof *compressor);
    if (compressor == NULL)
        return dp_no_memory();
    *compressor = (dp_compressor){.ctx = ctx,
                                  .scope = scope,
                                  .number = atomic_fetch_add(&dp__compressors, 1) + 1,
                                  .bits = config->bits,
                                  .rank = (size_t)config->rank,
                                  .start = (uint64_t)config->start,
                                  .lock = DP__LOCK_INITIALIZER};
    DP_TRY(dp_info_get(ctx, &compressor->info));
    for (int i = 0; i < compressor->info.local_count; i++) {
        dp_device_info device;
        DP_TRY(dp_device_info_get(ctx, i, &device));
        if (!device.host_memory)
            return dp_error(DP_ERR_UNSUPPORTED, "the host does not reach the memory of '%s'",
                            device.name);
    }
    if (config->rank > 0)
        DP_TRY(dp__low_units(compressor, config));
    *out = compressor;
    return DP_OK;
}

static dp_status dp__compressor_check(const dp_ctx *ctx, dp_compressor_config *config)
{
    config->bits = config->bits == 0 && config->rank == 0 ? 8 : config->bits;
    if (config->rank < 0)
        return dp_error(DP_ERR_INVALID, "rank is %d, which is below 0", config->rank);
    if (config->rank > 0 && config->bits != 0)
        return dp_error(DP_ERR_INVALID, "bits and rank are both set");
    if (config->rank == 0 && config->bits != 8 && config->bits != 4)
        return dp_error(DP_ERR_INVALID, "bits is %d, not 8 or 4", config->bits);
    if (config->start < 0 || (config->start > 0 && config->rank == 0))
        return dp_error(DP_ERR_INVALID, "start is %lld, %s", (long long)config->start,
                        config->start < 0 ? "which is below 0" : "but there is no rank");
    if (config->rank > 0 && (ctx == NULL || dp_module_ctx(config->module) != ctx))
        return dp_error(DP_ERR_INVALID, "module is not one of this context");
    if (config->ignored_count > 0 && (config->rank == 0 || config->ignored == NULL))
        return dp_error(DP_ERR_INVALID, "ignored_count is %zu, but %s", config->ignored_count,
                        config->rank == 0 ? "there is no rank" : "ignored is NULL");
    return DP_OK;
}

DP_API dp_status dp_compressor_create(dp_ctx *ctx, const dp_compressor_config *config,
                                      dp_compressor **out)
{
    dp_compressor_config own = {0};
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    if (config != NULL)
        own = *config;
    DP_TRY(dp_error_in(__func__, dp__compressor_check(ctx, &own)));
    dp_scope *scope = dp_scope_begin(ctx);
    DP_TRY(dp_scope_check(scope));
    dp_status status = dp__compressor_make(scope, ctx, &own, out);
    if (status != DP_OK)
        dp_scope_end(scope);
    return dp_error_in(__func__, status);
}

DP_API void dp_compressor_destroy(dp_compressor *compressor)
{
    if (compressor != NULL)
        dp_scope_end(compressor->scope);
}

static float *dp__compress_zeros(dp_scope *scope, size_t count)
{
    float *zeros = dp_scope_alloc(scope, count * sizeof *zeros);
    if (zeros != NULL)
        memset(zeros, 0, count * sizeof *zeros);
    return zeros;
}

static dp_status dp__bits_make(const dp_compressor *compressor, dp__compress_state *state)
{
    const size_t ranks = (size_t)compressor->info.rank_count;
    const size_t bytes = ranks * dp__code_bytes(state->each, compressor->bits);
    state->sum = dp__compress_zeros(state->scope, state->each);
    bool full = state->sum == NULL;
    for (int i = 0; i < compressor->info.local_count; i++) {
        dp__compress_rank *rank = &state->ranks[i];
        rank->part = dp__compress_zeros(state->scope, state->each);
        rank->send = dp_scope_alloc(state->scope, bytes);
        rank->recv = dp_scope_alloc(state->scope, bytes);
        full = full || rank->part == NULL || rank->send == NULL || rank->recv == NULL;
    }
    return full ? dp_no_memory() : DP_OK;
}

static dp_status dp__low_make(const dp_compressor *compressor, dp__compress_state *state,
                              size_t bytes);

/* A part has an even number of elements, so that it ends with a byte. */
static dp_status dp__compress_state_make(const dp_compressor *compressor, const dp_bucket *bucket,
                                         dp_scope *kept, dp__compress_state *state)
{
    const size_t ranks = (size_t)compressor->info.rank_count;
    const size_t local_count = (size_t)compressor->info.local_count;
    const int64_t count = (int64_t)bucket->count;
    state->range_count = bucket->info.range_count;
    state->count = bucket->count;
    state->each = (bucket->count + 2 * ranks - 1) / (2 * ranks) * 2;
    state->scope = dp_scope_child(kept);
    DP_TRY(dp_scope_check(state->scope));
    state->ranges = dp_scope_alloc(state->scope, state->range_count * sizeof *state->ranges);
    state->ranks = dp_scope_alloc(state->scope, local_count * sizeof *state->ranks);
    state->parts = dp_scope_alloc(state->scope, local_count * sizeof *state->parts);
    if (state->ranges == NULL || state->ranks == NULL || state->parts == NULL)
        return dp_no_memory();
    memcpy(state->ranges, bucket->info.ranges, state->range_count * sizeof *state->ranges);
    for (size_t i = 0; i < local_count; i++) {
        state->ranks[i] =
            (dp__compress_rank){.own = dp__compress_zeros(state->scope, ranks * state->each)};
        if (state->ranks[i].own == NULL)
            return dp_no_memory();
    }
    if (bucket->dtype != DP_F32)
        DP_TRY(dp_tensor_new(state->scope, dp_local_device(compressor->ctx, 0), DP_F32, 1, &count,
                             &state->wide));
    return compressor->bits > 0
               ? dp__bits_make(compressor, state)
               : dp__low_make(compressor, state, dp_dtype_bytes(bucket->info.dtype));
}

static void dp__compress_state_drop(dp__compress_state *state)
{
    dp_scope_end(state->scope);
    state->scope = NULL;
}

static bool dp__compress_is_of(const dp__compress_state *state, const dp_bucket *bucket)
{
    const dp_bucket_info *info = &bucket->info;
    if (state->scope == NULL || state->range_count != info->range_count ||
        state->count != bucket->count)
        return false;
    for (size_t i = 0; i < info->range_count; i++) {
        const dp_range *a = &state->ranges[i], *b = &info->ranges[i];
        if (a->block != b->block || a->first != b->first || a->count != b->count)
            return false;
    }
    return true;
}

/* What there is of the bucket's reducer. What is another compressor's goes. */
static dp__compress_kept *dp__compress_kept_of(const dp_compressor *compressor,
                                               const dp_bucket *bucket)
{
    dp__compress_kept *kept = *bucket->kept;
    if (kept != NULL && kept->compressor == compressor->number)
        return kept;
    dp_scope_end(kept != NULL ? kept->scope : NULL);
    dp_scope *scope = dp_scope_child(bucket->scope);
    *bucket->kept = kept = dp_scope_alloc(scope, sizeof *kept);
    if (kept == NULL)
        dp_scope_end(scope);
    else
        *kept = (dp__compress_kept){scope, compressor->number, NULL};
    return kept;
}

/* The bucket's entry of the list; in a new one there is nothing yet. */
static dp__compress_state *dp__compress_entry(dp__compress_kept *kept, const dp_bucket *bucket)
{
    dp__compress_state *state = kept->states;
    while (state != NULL && state->index != bucket->index)
        state = state->next;
    if (state != NULL)
        return state;
    state = dp_scope_alloc(kept->scope, sizeof *state);
    if (state == NULL)
        return NULL;
    *state = (dp__compress_state){.index = bucket->index, .next = kept->states};
    kept->states = state;
    return state;
}

/* After dp_recover ranks have other numbers and parts, and there are other reducers. */
static dp_status dp__compressor_rejoin(dp_compressor *compressor)
{
    dp_info info;
    DP_TRY(dp_info_get(compressor->ctx, &info));
    dp__lock_enter(&compressor->lock);
    if (info.recoveries != compressor->info.recoveries)
        compressor->info = info;
    dp__lock_leave(&compressor->lock);
    return DP_OK;
}

static dp_status dp__compress_state_of(const dp_compressor *compressor, const dp_bucket *bucket,
                                       dp__compress_state **out)
{
    dp__compress_kept *kept = dp__compress_kept_of(compressor, bucket);
    dp__compress_state *state = kept != NULL ? dp__compress_entry(kept, bucket) : NULL;
    if (state == NULL)
        return dp_no_memory();
    *out = state;
    if (dp__compress_is_of(state, bucket))
        return DP_OK;
    dp__compress_state_drop(state);
    dp_status status = dp__compress_state_make(compressor, bucket, kept->scope, state);
    if (status != DP_OK)
        dp__compress_state_drop(state);
    return status;
}

/* ==== >>parts ===================================================================================
   Part r of the gradients is added up by rank r.                                                */

static dp_tensor dp__compress_view(const dp_compressor *compressor, const dp_bucket *bucket, int i)
{
    const int64_t count = (int64_t)bucket->count;
    dp_tensor view = dp_wrap(bucket->local[i].recv, bucket->dtype, 1, &count);
    view.device = dp_local_device(compressor->ctx, i);
    return view;
}

/* The gradients are added to what was left out of those before. */
static dp_status dp__compress_take(const dp_compressor *compressor, const dp_bucket *bucket,
                                   dp__compress_state *state, int i)
{
    const float *from = bucket->local[i].recv;
    float *own = state->ranks[i].own;
    if (bucket->dtype != DP_F32) {
        dp_tensor view = dp__compress_view(compressor, bucket, i);
        state->wide.device = view.device;
        DP_TRY(dp_cast(compressor->ctx, &state->wide, &view));
        from = state->wide.data;
    }
    for (size_t k = 0; k < state->count; k++)
        own[k] += from[k];
    return DP_OK;
}

/* Where the result of a local rank goes, as f32; then, from there to its gradients. */
static float *dp__compress_result(const dp_bucket *bucket, const dp__compress_state *state, int i)
{
    return bucket->dtype != DP_F32 ? state->wide.data : bucket->local[i].recv;
}

static dp_status dp__compress_give(const dp_compressor *compressor, const dp_bucket *bucket,
                                   dp__compress_state *state, int i)
{
    if (bucket->dtype == DP_F32)
        return DP_OK;
    dp_tensor view = dp__compress_view(compressor, bucket, i);
    state->wide.device = view.device;
    return dp_cast(compressor->ctx, &view, &state->wide);
}

/* Of the sum over ranks. */
static double dp__compress_factor(const dp_compressor *compressor, const dp_bucket *bucket)
{
    return bucket->op == DP_OP_MEAN ? bucket->scale / compressor->info.rank_count : bucket->scale;
}

/* What all ranks sent of this rank's part, as a code where it will be gathered. */
static void dp__bits_add(const dp_compressor *compressor, const dp_bucket *bucket,
                         dp__compress_state *state, int i)
{
    const size_t bytes = dp__code_bytes(state->each, compressor->bits);
    const float factor = (float)dp__compress_factor(compressor, bucket);
    dp__compress_rank *rank = &state->ranks[i];
    for (int r = 0; r < compressor->info.rank_count; r++)
        dp__code_read(rank->recv + (size_t)r * bytes, state->each, state->each, compressor->bits,
                      r > 0, state->sum);
    for (size_t k = 0; k < state->each; k++)
        rank->part[k] += state->sum[k] * factor;
    dp__code_write(rank->part, state->each, compressor->bits,
                   rank->send + (size_t)(compressor->info.rank_first + i) * bytes);
}

/* Code r of those that were gathered has part r. */
static void dp__bits_read(const dp_compressor *compressor, const dp__compress_state *state, int i,
                          float *out)
{
    const size_t bytes = dp__code_bytes(state->each, compressor->bits);
    for (size_t at = 0, r = 0; at < state->count; at += state->each, r++) {
        size_t here = state->count - at < state->each ? state->count - at : state->each;
        dp__code_read(state->ranks[i].send + r * bytes, state->each, here, compressor->bits, false,
                      out + at);
    }
}

static dp_status dp__bits_run(const dp_compressor *compressor, const dp_bucket *bucket,
                              dp__compress_state *state)
{
    const size_t bytes = dp__code_bytes(state->each, compressor->bits);
    const int local_count = compressor->info.local_count, ranks = compressor->info.rank_count;
    for (int i = 0; i < local_count; i++) {
        dp__compress_rank *rank = &state->ranks[i];
        DP_TRY(dp__compress_take(compressor, bucket, state, i));
        for (size_t r = 0; r < (size_t)ranks; r++)
            dp__code_write(rank->own + r * state->each, state->each, compressor->bits,
                           rank->send + r * bytes);
        state->parts[i] = (dp_part){.send = rank->send, .recv = rank->recv};
    }
    DP_TRY(dp_bucket_all_to_all(bucket, state->parts, bytes, DP_U8));
    for (int i = 0; i < local_count; i++) {
        dp__compress_rank *rank = &state->ranks[i];
        size_t own = (size_t)(compressor->info.rank_first + i) * bytes;
        dp__bits_add(compressor, bucket, state, i);
        state->parts[i] = (dp_part){.send = rank->send + own, .recv = rank->send};
    }
    return dp_bucket_all_gather(bucket, state->parts, bytes, DP_U8);
}

/* ==== >>factors =================================================================================
   What all ranks compute alike, they compute from floats that are the same everywhere, in products
   of two of them as f64, which are exact: no compiler's fused sums make ranks differ.           */

/* What Q begins with: numbers from -1 to below 1, by their place. */
static void dp__low_draw(const dp__low_piece *piece, size_t column, float *out)
{
    for (size_t j = 0; j < piece->cols; j++) {
        uint64_t word = (column * piece->cols + j + 1) * 0x9e3779b97f4a7c15u;
        word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9u;
        word = (word ^ word >> 27) * 0x94d049bb133111ebu;
        out[j] = (float)(word >> 40) / (float)(1 << 23) - 1;
    }
}

static double dp__low_dot(const float *a, const float *b, size_t count)
{
    double sum = 0;
    for (size_t i = 0; i < count; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* a -= d * b */
static void dp__low_less(float *a, float d, const float *b, size_t count)
{
    for (size_t i = 0; i < count; i++)
        a[i] = (float)((double)a[i] - (double)d * (double)b[i]);
}

/* Gram and Schmidt, twice, which is enough. A run that depends on those before it becomes zeros. */
static void dp__low_orthonormal(float *runs, size_t count, size_t rank)
{
    for (size_t k = 0; k < rank; k++) {
        float *own = runs + k * count;
        double before = sqrt(dp__low_dot(own, own, count));
        for (size_t l = 0; l < 2 * k; l++) {
            const float *other = runs + l % k * count;
            dp__low_less(own, (float)dp__low_dot(own, other, count), other, count);
        }
        double norm = sqrt(dp__low_dot(own, own, count));
        bool depends = norm <= before * 1e-5;
        for (size_t i = 0; i < count; i++)
            own[i] = depends ? 0 : (float)((double)own[i] / norm);
    }
}

enum { DP__LOW_GAP = 64 }; /* bytes: less than that may follow a parameter in its block */

static dp_status dp__low_piece_make(const dp_compressor *compressor, const dp_range *range,
                                    size_t first, size_t bytes, dp__low_piece *out)
{
    size_t count = range->unit < compressor->unit_count ? compressor->units[range->unit].count : 0;
    if (count == 0 || count > range->count || (range->count - count) * bytes >= DP__LOW_GAP)
        return dp_error(DP_ERR_INVALID,
                        "unit %u has %zu elements, which is no parameter of the module",
                        (unsigned)range->unit, range->count);
    *out = compressor->units[range->unit];
    out->first = first;
    out->rank = compressor->rank;
    if ((out->rows + out->cols) * out->rank * 2 >= out->count)
        out->rank = 0;
    return DP_OK;
}

/* bytes: of an element where gradients lie. */
static dp_status dp__low_make(const dp_compressor *compressor, dp__compress_state *state,
                              size_t bytes)
{
    state->pieces = dp_scope_alloc(state->scope, state->range_count * sizeof *state->pieces);
    if (state->pieces == NULL)
        return dp_no_memory();
    state->left_count = state->right_count = 0;
    for (size_t i = 0, first = 0; i < state->range_count; first += state->ranges[i++].count) {
        dp__low_piece *piece = &state->pieces[i];
        DP_TRY(dp__low_piece_make(compressor, &state->ranges[i], first, bytes, piece));
        piece->left = state->left_count;
        piece->right = state->right_count;
        state->left_count += piece->rank > 0 ? piece->rank * piece->rows : piece->count;
        state->right_count += piece->rank * piece->cols;
    }
    state->start = dp_scope_alloc(state->scope, state->right_count * sizeof *state->start);
    bool full = state->start == NULL;
    for (int i = 0; i < compressor->info.local_count; i++) {
        dp__compress_rank *rank = &state->ranks[i];
        rank->left = dp_scope_alloc(state->scope, state->left_count * sizeof *rank->left);
        rank->right = dp_scope_alloc(state->scope, state->right_count * sizeof *rank->right);
        full = full || rank->left == NULL || rank->right == NULL;
    }
    for (size_t i = 0; i < state->range_count && !full; i++)
        for (size_t k = 0; k < state->pieces[i].rank; k++)
            dp__low_draw(&state->pieces[i], k,
                         state->start + state->pieces[i].right + k * state->pieces[i].cols);
    return full ? dp_no_memory() : DP_OK;
}

/* P = M Q, or what travels as it is, of which nothing is kept. Q has the size of gradients, so P
   would have that of their squares, but only its directions count: with each run of Q multiplied by
   a power of 2 no element of P is larger than the largest of M. */
static void dp__low_left(const dp__compress_state *state, const dp__low_piece *piece,
                         const dp__compress_rank *rank)
{
    float *own = rank->own + piece->first, *left = rank->left + piece->left;
    if (piece->rank == 0) {
        memcpy(left, own, piece->count * sizeof *left);
        memset(own, 0, piece->count * sizeof *own);
    }
    for (size_t k = 0; k < piece->rank; k++) {
        const float *run = state->start + piece->right + k * piece->cols;
        double most = (double)dp__code_largest(run, piece->cols) * (double)piece->cols;
        double scale = ldexp(1, -ilogb(most) - 1);
        for (size_t i = 0; i < piece->rows; i++)
            left[k * piece->rows + i] =
                (float)(dp__low_dot(own + i * piece->cols, run, piece->cols) * scale);
    }
}

/* An element of P Q'. */
static double dp__low_at(const dp__low_piece *piece, const dp__compress_rank *rank, size_t i,
                         size_t j)
{
    const float *left = rank->left + piece->left, *right = rank->right + piece->right;
    double sum = 0;
    for (size_t k = 0; k < piece->rank; k++)
        sum += (double)left[k * piece->rows + i] * (double)right[k * piece->cols + j];
    return sum;
}

/* Q = M' P, with P made orthonormal. What M has beyond P Q' is kept. (PowerSGD keeps what it has
   beyond its share of everybody's product, which is the same in all; but a rank that forgets would
   take away from others' gradients.) */
static void dp__low_right(const dp__low_piece *piece, const dp__compress_rank *rank)
{
    float *own = rank->own + piece->first;
    float *left = rank->left + piece->left, *right = rank->right + piece->right;
    dp__low_orthonormal(left, piece->rows, piece->rank);
    memset(right, 0, piece->rank * piece->cols * sizeof *right);
    for (size_t k = 0; k < piece->rank; k++)
        for (size_t i = 0; i < piece->rows; i++)
            for (size_t j = 0; j < piece->cols; j++)
                right[k * piece->cols + j] += left[k * piece->rows + i] * own[i * piece->cols + j];
    for (size_t at = 0; at < piece->count && piece->rank > 0; at++)
        own[at] =
            (float)((double)own[at] - dp__low_at(piece, rank, at / piece->cols, at % piece->cols));
}

static bool dp__low_is_finite(const float *x, size_t count)
{
    return count == 0 || isfinite(dp__code_largest(x, count));
}

/* The result of one local rank. */
static void dp__low_read(const dp_compressor *compressor, const dp_bucket *bucket,
                         const dp__compress_state *state, int i, float *out)
{
    const double factor = dp__compress_factor(compressor, bucket);
    const dp__compress_rank *rank = &state->ranks[i];
    for (size_t p = 0; p < state->range_count; p++) {
        const dp__low_piece *piece = &state->pieces[p];
        float *to = out + piece->first, *own = rank->own + piece->first;
        for (size_t k = 0; k < piece->count; k++) {
            double sum = piece->rank > 0 ? dp__low_at(piece, rank, k / piece->cols, k % piece->cols)
                                         : (double)rank->left[piece->left + k];
            to[k] = (float)(sum * factor);
        }
        if (dp__low_is_finite(rank->right + piece->right, piece->rank * piece->cols))
            continue;
        memset(own, 0, piece->count * sizeof *own);
        for (size_t k = 0; k < piece->count; k++)
            to[k] = NAN;
    }
}

/* Q of this pass is what the next one begins with; a run of it from which nothing could come any
   more is drawn anew. All ranks have the same. */
static void dp__low_keep(const dp__compress_state *state)
{
    for (size_t p = 0; p < state->range_count; p++) {
        const dp__low_piece *piece = &state->pieces[p];
        for (size_t k = 0; k < piece->rank; k++) {
            size_t at = piece->right + k * piece->cols;
            float *run = state->start + at, largest;
            memcpy(run, state->ranks[0].right + at, piece->cols * sizeof *run);
            largest = dp__code_largest(run, piece->cols);
            if (!(largest > 0) || !isfinite(largest))
                dp__low_draw(piece, k, run);
        }
    }
}

static dp_status dp__low_sum(const dp_compressor *compressor, const dp_bucket *bucket,
                             dp__compress_state *state, bool right)
{
    for (int i = 0; i < compressor->info.local_count; i++) {
        float *data = right ? state->ranks[i].right : state->ranks[i].left;
        state->parts[i] = (dp_part){.send = data, .recv = data};
    }
    return dp_bucket_all_reduce(
        bucket, state->parts, right ? state->right_count : state->left_count, DP_F32, DP_OP_SUM, 1);
}

static dp_status dp__low_run(const dp_compressor *compressor, const dp_bucket *bucket,
                             dp__compress_state *state)
{
    for (int i = 0; i < compressor->info.local_count; i++) {
        DP_TRY(dp__compress_take(compressor, bucket, state, i));
        for (size_t p = 0; p < state->range_count; p++)
            dp__low_left(state, &state->pieces[p], &state->ranks[i]);
    }
    DP_TRY(dp__low_sum(compressor, bucket, state, false));
    if (state->right_count == 0)
        return DP_OK;
    for (int i = 0; i < compressor->info.local_count; i++)
        for (size_t p = 0; p < state->range_count; p++)
            dp__low_right(&state->pieces[p], &state->ranks[i]);
    DP_TRY(dp__low_sum(compressor, bucket, state, true));
    dp__low_keep(state);
    return DP_OK;
}

/* ---- the hook -------------------------------------------------------------------------------- */

/* Whether gradients are all-reduced as they are. */
static bool dp__compress_is_plain(const dp_compressor *compressor, const dp_bucket *bucket,
                                  uint64_t pass_count)
{
    return compressor->info.rank_count == 1 || bucket->dtype > DP_BF16 ||
           pass_count < compressor->start;
}

/* A rank that begins with another Q than others does no harm: P is what all have. */
DP_API dp_status dp_compress(const dp_bucket *bucket, void *user)
{
    const dp_compressor *compressor = user;
    dp__compress_state *state = NULL;
    dp_reducer_info info;
    DP_TRY(dp_check_pointer(__func__, "bucket", bucket));
    DP_TRY(dp_check_pointer(__func__, "compressor", user));
    if (bucket->ctx != compressor->ctx)
        return dp_error(DP_ERR_INVALID, "%s: the compressor is of another context", __func__);
    DP_TRY(dp_reducer_info_get(bucket->reducer, &info));
    DP_TRY(dp_error_in(__func__, dp__compressor_rejoin(user)));
    if (dp__compress_is_plain(compressor, bucket, info.pass_count))
        return dp_bucket_all_reduce(bucket, bucket->local, bucket->count, bucket->dtype, bucket->op,
                                    bucket->scale);
    DP_TRY(dp_error_in(__func__, dp__compress_state_of(compressor, bucket, &state)));
    dp_status status = compressor->bits > 0 ? dp__bits_run(compressor, bucket, state)
                                            : dp__low_run(compressor, bucket, state);
    if (status != DP_OK)
        dp__compress_state_drop(state);
    for (int i = 0; i < compressor->info.local_count && status == DP_OK; i++) {
        float *out = dp__compress_result(bucket, state, i);
        if (compressor->bits > 0)
            dp__bits_read(compressor, state, i, out);
        else
            dp__low_read(compressor, bucket, state, i, out);
        status = dp__compress_give(compressor, bucket, state, i);
    }
    return status;
}

/* ==== >>flat ====================================================================================
   All parameters that are trained, one after another as elements of one row. Fragments are cut out
   of it, wherever a parameter begins. It is f64 if one of them is, else f32.                    */

typedef struct dp__local_entry { /* of a parameter */
    const char *name;
    size_t param, first, count;
} dp__local_entry;

typedef struct dp__local_fragment {
    size_t first, count;
    dp_reducer *reducer; /* NULL: it is empty */
    bool travels;
    int64_t due; /* the step after which its sum is waited for */
    int64_t met; /* the step after which its last sum left that has come */
} dp__local_fragment;

struct dp_local {
    dp_module *module;
    dp_ctx *ctx;
    dp_scope *scope;
    dp_info job;
    dp_local_config config; /* zeros resolved */
    int rank;               /* the local rank whose device has the parameters */
    dp_dtype dtype;
    size_t param_count, entry_count, count;
    dp__local_entry *entries;
    dp__local_fragment *fragments;
    dp_tensor travel;         /* differences, and their sum; then what is worked on */
    dp_tensor anchor;         /* where all processes were after the last sum */
    dp_tensor momentum, left; /* left: parameters as they were when their sum left */
    dp_tensor *idle;          /* of each other local rank: zeros, which it adds to the sum */
    dp_local_info told;
};

/* False: dp_recover has made another one since, in which its reducers are void. */
static bool dp__local_is_of_job(const dp_local *local)
{
    dp_info job;
    return dp_info_get(local->ctx, &job) == DP_OK && job.recoveries == local->job.recoveries;
}

/* The module has the parameters it had. After a failure of the job it lists none; asking for one
   tells why. */
static dp_status dp__local_same(const dp_local *local)
{
    dp_param_info first;
    if (!dp__local_is_of_job(local))
        return dp_error(DP_ERR_STATE,
                        "'%s' began local steps before dp_recover: make a new dp_local, which can "
                        "load what this one saves",
                        dp_module_name(local->module));
    size_t count = dp_module_param_count(local->module);
    if (local->param_count > 0 && count == 0)
        DP_TRY(dp_module_param(local->module, 0, &first));
    if (count != local->param_count)
        return dp_error(DP_ERR_STATE, "'%s' has other parameters than when it began local steps",
                        dp_module_name(local->module));
    return DP_OK;
}

static dp_status dp__local_cut(const dp_tensor *row, size_t first, size_t count, dp_tensor *out)
{
    return dp_narrow(row, 0, (int64_t)first, (int64_t)count, out);
}

/* The elements of one parameter that are in a fragment: there, and in `row`. */
static dp_status dp__local_part(const dp__local_entry *entry, const dp__local_fragment *fragment,
                                const dp_tensor *data, const dp_tensor *row, dp_tensor *out_data,
                                dp_tensor *out_row)
{
    const int64_t all = -1;
    size_t end = entry->first + entry->count, stop = fragment->first + fragment->count;
    size_t from = entry->first > fragment->first ? entry->first : fragment->first;
    size_t count = (end < stop ? end : stop) - from;
    dp_tensor flat;
    DP_TRY(dp_reshape(data, 1, &all, &flat));
    DP_TRY(dp__local_cut(&flat, from - entry->first, count, out_data));
    return dp__local_cut(row, from, count, out_row);
}

static bool dp__local_meets(const dp__local_entry *entry, const dp__local_fragment *fragment)
{
    return entry->first < fragment->first + fragment->count &&
           fragment->first < entry->first + entry->count;
}

/* Parameters into a row; back: the row into parameters. */
static dp_status dp__local_move(const dp_local *local, const dp__local_fragment *fragment,
                                const dp_tensor *row, bool back)
{
    for (size_t i = 0; i < local->entry_count; i++) {
        const dp__local_entry *entry = &local->entries[i];
        dp_param_info info;
        dp_tensor own, there;
        if (!dp__local_meets(entry, fragment))
            continue;
        DP_TRY(back ? dp_params_edit(local->module, entry->param, &info.data, NULL)
                    : dp_module_param(local->module, entry->param, &info));
        DP_TRY(dp__local_part(entry, fragment, &info.data, row, &own, &there));
        DP_TRY(back ? dp_cast(local->ctx, &own, &there) : dp_cast(local->ctx, &there, &own));
    }
    return DP_OK;
}

/* ==== >>outer ===================================================================================
   torch.optim.SGD, whose first momentum is the gradient, on the mean of all differences.        */

/* out = a * x + b * y, in a fragment's part of each row. */
static dp_status dp__local_axpby(const dp_local *local, const dp__local_fragment *fragment,
                                 double a, const dp_tensor *x, double b, const dp_tensor *y,
                                 const dp_tensor *out)
{
    dp_tensor of_x, of_y, of_out;
    DP_TRY(dp__local_cut(x, fragment->first, fragment->count, &of_x));
    DP_TRY(dp__local_cut(y, fragment->first, fragment->count, &of_y));
    DP_TRY(dp__local_cut(out, fragment->first, fragment->count, &of_out));
    return dp_axpby(local->ctx, a, &of_x, b, &of_y, &of_out);
}

/* After which step the sum left. */
static int64_t dp__local_left(const dp_local *local, const dp__local_fragment *fragment)
{
    return fragment->due - local->config.delay;
}

/* The anchor's step. The gradient is 1 / processes of the sum. Without a step of training since the
   last one it is the mean. */
static dp_status dp__local_outer(const dp_local *local, const dp__local_fragment *fragment)
{
    const dp_local_config *config = &local->config;
    const dp_tensor *sum = &local->travel, *momentum = &local->momentum;
    bool trained = dp__local_left(local, fragment) > fragment->met;
    double share = 1.0 / local->job.process_count, lr = trained ? config->lr : 1;
    if (!trained || !(config->momentum > 0))
        return dp__local_axpby(local, fragment, 1, &local->anchor, -lr * share, sum,
                               &local->anchor);
    DP_TRY(dp__local_axpby(local, fragment, config->momentum, momentum, share, sum, momentum));
    if (!config->nesterov)
        return dp__local_axpby(local, fragment, 1, &local->anchor, -lr, momentum, &local->anchor);
    DP_TRY(dp__local_axpby(local, fragment, share, sum, config->momentum, momentum, sum));
    return dp__local_axpby(local, fragment, 1, &local->anchor, -lr, sum, &local->anchor);
}

/* What this process has changed since the sum left stays on top. */
static dp_status dp__local_land(const dp_local *local, const dp__local_fragment *fragment)
{
    const dp_tensor *own = &local->travel;
    DP_TRY(dp__local_outer(local, fragment));
    if (local->config.delay == 0)
        return dp__local_move(local, fragment, &local->anchor, true);
    DP_TRY(dp__local_move(local, fragment, own, false));
    DP_TRY(dp__local_axpby(local, fragment, 1, own, -1, &local->left, own));
    DP_TRY(dp__local_axpby(local, fragment, 1, &local->anchor, 1, own, own));
    return dp__local_move(local, fragment, own, true);
}

/* ==== >>meeting =================================================================================
   A fragment is a bucket of a reducer of its own, which the courier carries while the process
   computes. They are waited for in the order in which they left.                                */

/* What travels: anchor - parameters here, zeros from other devices of the process. */
static dp_status dp__local_fill(const dp_local *local, const dp__local_fragment *fragment)
{
    const dp_tensor *row = &local->travel;
    dp_tensor from, to;
    DP_TRY(dp__local_move(local, fragment, row, false));
    if (local->config.delay > 0) {
        DP_TRY(dp__local_cut(row, fragment->first, fragment->count, &from));
        DP_TRY(dp__local_cut(&local->left, fragment->first, fragment->count, &to));
        DP_TRY(dp_copy(local->ctx, &to, &from, NULL));
    }
    DP_TRY(dp__local_axpby(local, fragment, 1, &local->anchor, -1, row, row));
    for (int i = 0; i < local->job.local_count; i++) {
        if (i == local->rank)
            continue;
        DP_TRY(dp__local_cut(&local->idle[i], fragment->first, fragment->count, &to));
        DP_TRY(dp_fill(local->ctx, &to, dp_float(0)));
    }
    return DP_OK;
}

static dp_status dp__local_leave(dp_local *local, dp__local_fragment *fragment)
{
    if (fragment->reducer == NULL)
        return DP_OK;
    DP_TRY(dp__local_fill(local, fragment));
    DP_TRY(dp_reducer_begin(fragment->reducer, NULL));
    fragment->travels = true;
    fragment->due = local->told.step_count + local->config.delay;
    for (int i = 0; i < local->job.local_count; i++)
        DP_TRY(dp_reducer_ready(fragment->reducer, i, 0, NULL));
    return DP_OK;
}

static dp_status dp__local_wait(dp_local *local, dp__local_fragment *fragment)
{
    dp_reducer_info info;
    fragment->travels = false;
    dp_status status = dp_reducer_finish(fragment->reducer);
    DP_TRY(status);
    DP_TRY(dp_reducer_info_get(fragment->reducer, &info));
    local->told.bytes += info.last.bytes;
    local->told.travel_s += info.last.travel_s;
    local->told.waited_s += info.last.finish_s;
    return DP_OK;
}

static dp_status dp__local_arrive(dp_local *local, dp__local_fragment *fragment)
{
    if (!fragment->travels)
        return DP_OK;
    DP_TRY(dp__local_wait(local, fragment));
    DP_TRY(dp__local_land(local, fragment));
    fragment->met = dp__local_left(local, fragment);
    local->told.sum_count++;
    return DP_OK;
}

/* The one that left first. */
static dp__local_fragment *dp__local_first(const dp_local *local)
{
    dp__local_fragment *first = NULL;
    for (int f = 0; f < local->config.fragments; f++) {
        dp__local_fragment *fragment = &local->fragments[f];
        if (fragment->travels && (first == NULL || fragment->due < first->due))
            first = fragment;
    }
    return first;
}

/* A failure of one stops no other, as all processes know of it. */
static dp_status dp__local_first_of(dp_status before, dp_status now)
{
    return before != DP_OK ? before : now;
}

/* Step numbers are spread evenly over fragments; the last one meets at multiples of `every`. */
static bool dp__local_leaves(const dp_local *local, int f)
{
    const dp_local_config *config = &local->config;
    int64_t at = (int64_t)config->every * (f + 1) / config->fragments % config->every;
    return local->told.step_count % config->every == at;
}

static dp_status dp__local_step(dp_local *local)
{
    dp_status status = DP_OK;
    dp__local_fragment *first = dp__local_first(local);
    if (first != NULL && first->due == local->told.step_count)
        status = dp__local_arrive(local, first);
    for (int f = 0; f < local->config.fragments; f++) {
        if (!dp__local_leaves(local, f))
            continue;
        dp__local_fragment *fragment = &local->fragments[f];
        status = dp__local_first_of(status, dp__local_leave(local, fragment));
        if (local->config.delay == 0)
            status = dp__local_first_of(status, dp__local_arrive(local, fragment));
    }
    return status;
}

DP_API dp_status dp_local_step(dp_local *local)
{
    DP_TRY(dp_check_pointer(__func__, "local", local));
    DP_TRY(dp_check_alone(__func__, local->ctx));
    DP_TRY(dp_error_in(__func__, dp__local_same(local)));
    local->told.step_count++;
    return dp_error_in(__func__, dp__local_step(local));
}

static dp_status dp__local_sync(dp_local *local)
{
    dp_status status = DP_OK;
    for (dp__local_fragment *first; (first = dp__local_first(local)) != NULL;)
        status = dp__local_first_of(status, dp__local_arrive(local, first));
    for (int f = 0; f < local->config.fragments; f++) {
        dp__local_fragment *fragment = &local->fragments[f];
        status = dp__local_first_of(status, dp__local_leave(local, fragment));
        status = dp__local_first_of(status, dp__local_arrive(local, fragment));
    }
    DP_TRY(status);
    return dp_wait(local->ctx);
}

DP_API dp_status dp_local_sync(dp_local *local)
{
    DP_TRY(dp_check_pointer(__func__, "local", local));
    DP_TRY(dp_check_alone(__func__, local->ctx));
    DP_TRY(dp_error_in(__func__, dp__local_same(local)));
    return dp_error_in(__func__, dp__local_sync(local));
}

DP_API dp_status dp_local_info_get(const dp_local *local, dp_local_info *out)
{
    DP_TRY(dp_check_pointer(__func__, "local", local));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    *out = local->told;
    out->config = local->config;
    for (int f = 0; f < local->config.fragments; f++)
        out->under_way += local->fragments[f].travels;
    return DP_OK;
}

/* ==== >>making ==================================================================================
   What one process can do alone is agreed on first, so that none waits for one that could not.  */

static dp_status dp__local_check(dp_local_config *config)
{
    config->lr = dp_or(config->lr, 1);
    config->fragments = config->fragments == 0 ? 1 : config->fragments;
    if (config->every < 1)
        return dp_error(DP_ERR_INVALID, "every is %d, which is below 1", config->every);
    if (!(config->lr > 0) || !isfinite(config->lr))
        return dp_error(DP_ERR_INVALID, "lr is %g, not a finite number above 0", config->lr);
    if (!(config->momentum >= 0 && config->momentum < 1))
        return dp_error(DP_ERR_INVALID, "momentum is %g, not from 0 to below 1", config->momentum);
    if (config->nesterov && !(config->momentum > 0))
        return dp_error(DP_ERR_INVALID, "nesterov is set, but there is no momentum");
    if (config->fragments < 1 || config->fragments > config->every)
        return dp_error(DP_ERR_INVALID, "fragments is %d, not from 1 to %d, as every is",
                        config->fragments, config->every);
    if (config->delay < 0 || config->delay >= config->every)
        return dp_error(DP_ERR_INVALID, "delay is %d, not from 0 to below %d, as every is",
                        config->delay, config->every);
    return DP_OK;
}

/* Which parameters there are, and where they lie in a row. */
static dp_status dp__local_list(dp_local *local)
{
    local->entries = dp_scope_alloc(local->scope, local->param_count * sizeof *local->entries);
    if (local->entries == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < local->param_count; i++) {
        dp_param_info info;
        DP_TRY(dp_module_param(local->module, i, &info));
        if (info.reduced || info.shared)
            return dp_error(DP_ERR_INVALID,
                            "ranks have '%s' in common already: give the module that "
                            "'%s' wraps",
                            info.name, dp_module_name(local->module));
        if (info.frozen || info.buffer || info.data.dtype > DP_BF16)
            continue;
        size_t count = (size_t)dp_tensor_count(&info.data);
        const char *name = dp_text(dp_string(local->scope, info.name));
        if (name == NULL)
            return dp_no_memory();
        local->entries[local->entry_count++] = (dp__local_entry){name, i, local->count, count};
        local->count += count;
        if (info.data.dtype == DP_F64)
            local->dtype = DP_F64;
    }
    return DP_OK;
}

/* A row of zeros of a local rank; where CPU ranks can all see it, if they can. */
static dp_status dp__local_row(dp_local *local, int rank, dp_tensor *out)
{
    const int64_t count = (int64_t)local->count;
    dp_device device = dp_local_device(local->ctx, rank);
    dp_device_info info;
    DP_TRY(dp_device_info_get(local->ctx, rank, &info));
    if (info.host_memory) {
        void *data = dp_shared_alloc(local->scope, local->count * dp_dtype_bytes(local->dtype));
        if (data == NULL)
            return dp_no_memory();
        *out = dp_wrap(data, local->dtype, 1, &count);
        out->device = device;
    } else {
        DP_TRY(dp_tensor_new(local->scope, device, local->dtype, 1, &count, out));
    }
    local->told.memory_bytes += rank == local->rank ? local->count * dp_dtype_bytes(local->dtype)
                                                    : 0;
    return dp_fill(local->ctx, out, dp_float(0));
}

static dp_status dp__local_rows(dp_local *local)
{
    const int local_count = local->job.local_count;
    DP_TRY(dp__local_row(local, local->rank, &local->travel));
    DP_TRY(dp__local_row(local, local->rank, &local->anchor));
    if (local->config.momentum > 0)
        DP_TRY(dp__local_row(local, local->rank, &local->momentum));
    if (local->config.delay > 0)
        DP_TRY(dp__local_row(local, local->rank, &local->left));
    local->idle = dp_scope_alloc(local->scope, (size_t)local_count * sizeof *local->idle);
    if (local->idle == NULL)
        return dp_no_memory();
    for (int i = 0; i < local_count; i++)
        if (i != local->rank)
            DP_TRY(dp__local_row(local, i, &local->idle[i]));
    return DP_OK;
}

static dp_status dp__local_cut_all(dp_local *local)
{
    const size_t count = (size_t)local->config.fragments;
    local->fragments = dp_scope_alloc(local->scope, count * sizeof *local->fragments);
    if (local->fragments == NULL)
        return dp_no_memory();
    for (size_t f = 0; f < count; f++) {
        size_t first = local->count / count * f + local->count % count * f / count;
        size_t end = local->count / count * (f + 1) + local->count % count * (f + 1) / count;
        local->fragments[f] = (dp__local_fragment){.first = first, .count = end - first};
    }
    return DP_OK;
}

/* What this process can make by itself. */
static dp_status dp__local_alone(dp_local *local)
{
    DP_TRY(dp__local_check(&local->config));
    DP_TRY(dp__local_list(local));
    DP_TRY(dp__local_cut_all(local));
    return dp__local_rows(local);
}

enum { DP__LOCAL_WORDS = 8 };

/* Whether all processes have the same; the sentence names a rank that differs from rank 0. */
static dp_status dp__local_agree(const dp_local *local, dp_scope *temp)
{
    static const char *const names[DP__LOCAL_WORDS] = {"every",     "lr",    "momentum", "nesterov",
                                                       "fragments", "delay", "elements", "dtype"};
    const dp_local_config *config = &local->config;
    const double own[DP__LOCAL_WORDS] = {
        config->every,     config->lr,    config->momentum,     config->nesterov,
        config->fragments, config->delay, (double)local->count, (double)local->dtype};
    size_t ranks = (size_t)local->job.rank_count;
    double *all = dp_scope_alloc(temp, ranks * sizeof own);
    DP_TRY(dp_agree(local->ctx, all != NULL ? DP_OK : dp_no_memory()));
    DP_TRY(dp_all_gather_f64(local->ctx, own, DP__LOCAL_WORDS, all));
    for (size_t r = 1; r < ranks; r++)
        for (size_t i = 0; i < DP__LOCAL_WORDS; i++) {
            double its = all[r * DP__LOCAL_WORDS + i];
            if (its < all[i] || its > all[i])
                return dp_error(DP_ERR_MISMATCH, "%s is %g on rank %zu, %g on rank 0", names[i],
                                its, r, all[i]);
        }
    return DP_OK;
}

static dp_status dp__local_reducer(dp_local *local, dp__local_fragment *fragment)
{
    const size_t local_count = (size_t)local->job.local_count;
    const size_t at = fragment->first * dp_dtype_bytes(local->dtype);
    void **rows = dp_scope_alloc(local->scope, local_count * sizeof *rows);
    DP_TRY(dp_agree(local->ctx, rows != NULL ? DP_OK : dp_no_memory()));
    for (size_t i = 0; i < local_count; i++) {
        const dp_tensor *row = i == (size_t)local->rank ? &local->travel : &local->idle[i];
        rows[i] = (char *)row->data + at;
    }
    const dp_block block = {local->dtype, fragment->count, rows};
    return dp_reducer_create(local->ctx,
                             &(dp_reducer_config){.name = dp_module_name(local->module),
                                                  .blocks = &block,
                                                  .block_count = 1,
                                                  .reduction = DP_SUM_RANKS,
                                                  .buckets = local->config.buckets},
                             &fragment->reducer);
}

/* Parameters and anchor of all processes are those of the first process. */
static dp_status dp__local_begin(dp_local *local)
{
    const dp__local_fragment all = {.count = local->count};
    const size_t local_count = (size_t)local->job.local_count;
    int64_t root = local->rank;
    dp_part *parts = dp_scope_alloc(local->scope, local_count * sizeof *parts);
    DP_TRY(dp_broadcast_i64(local->ctx, &root, 1, 0));
    DP_TRY(dp_agree(local->ctx, parts != NULL ? dp__local_move(local, &all, &local->anchor, false)
                                              : dp_no_memory()));
    for (size_t i = 0; i < local_count; i++) {
        dp_tensor *row = i == (size_t)local->rank ? &local->anchor : &local->idle[i];
        parts[i] = (dp_part){.send = row->data, .recv = row->data};
    }
    DP_TRY(dp_broadcast(local->ctx, parts, local->count, local->dtype, (int)root));
    DP_TRY(dp_agree(local->ctx, dp__local_move(local, &all, &local->anchor, true)));
    for (int f = 0; f < local->config.fragments; f++)
        if (local->fragments[f].count > 0)
            DP_TRY(dp__local_reducer(local, &local->fragments[f]));
    return dp_wait(local->ctx);
}

static void dp__local_end(dp_local *local)
{
    for (int f = 0; local->fragments != NULL && f < local->config.fragments; f++)
        (void)dp_reducer_destroy(local->fragments[f].reducer);
    dp_scope_end(local->scope);
}

static dp_status dp__local_make(dp_local *local)
{
    DP_TRY(dp_agree(local->ctx, dp__local_alone(local)));
    dp_scope *temp = dp_scope_child(local->scope);
    dp_status status = dp__local_agree(local, temp);
    dp_scope_end(temp);
    DP_TRY(status);
    return dp__local_begin(local);
}

DP_API dp_status dp_local_create(dp_module *module, const dp_local_config *config, dp_local **out)
{
    static const dp_local_config zero;
    dp_ctx *ctx = dp_module_ctx(module);
    DP_TRY(dp_check_pointer(__func__, "out", out));
    if (ctx == NULL)
        return dp_error(DP_ERR_INVALID, "%s: not a module", __func__);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_local *local = dp_scope_alloc(scope, sizeof *local);
    dp_status status = dp_agree(ctx, local != NULL ? DP_OK : dp_no_memory());
    if (status != DP_OK) {
        dp_scope_end(scope);
        return dp_error_in(__func__, status);
    }
    *local = (dp_local){.module = module,
                        .ctx = ctx,
                        .scope = scope,
                        .config = config != NULL ? *config : zero,
                        .rank = dp_module_rank(module),
                        .dtype = DP_F32,
                        .param_count = dp_module_param_count(module)};
    status = dp_info_get(ctx, &local->job);
    if (status == DP_OK)
        status = dp__local_make(local);
    if (status == DP_OK)
        *out = local;
    else
        dp__local_end(local);
    return dp_error_in(__func__, status);
}

/* What a pass of a job that has failed still uses goes with the context. */
DP_API void dp_local_destroy(dp_local *local)
{
    bool used = false;
    if (local == NULL || dp_check_alone(__func__, local->ctx) != DP_OK)
        return;
    for (dp__local_fragment *first;
         dp__local_is_of_job(local) && (first = dp__local_first(local)) != NULL;)
        used = dp_status_class(dp__local_wait(local, first)) == DP_CLASS_JOB || used;
    if (!used)
        dp__local_end(local);
}

/* ==== >>resuming ================================================================================
   Rows as tensors that have the names and shapes of parameters.                                  */

static dp_status dp__local_row_save(const dp_local *local, dp_scope *scope, const dp_tensor *row,
                                    dp_value *out)
{
    dp_pair *pairs = dp_scope_alloc(scope, local->entry_count * sizeof *pairs);
    if (pairs == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < local->entry_count; i++) {
        const dp__local_entry *entry = &local->entries[i];
        dp_param_info info;
        dp_tensor own;
        DP_TRY(dp_module_param(local->module, entry->param, &info));
        DP_TRY(dp__local_cut(row, entry->first, entry->count, &own));
        DP_TRY(dp_reshape(&own, info.data.ndim, info.data.shape, &own));
        DP_TRY(dp_tensor_to(scope, (dp_device){0, 0}, local->dtype, &own, &own));
        pairs[i] = (dp_pair){entry->name, dp_of(scope, &own)};
    }
    return dp_made(dp_dict_make(scope, pairs, local->entry_count), out);
}

static dp_status dp__local_met_save(const dp_local *local, dp_scope *scope, dp_value *out)
{
    const size_t count = (size_t)local->config.fragments;
    dp_value *met = dp_scope_alloc(scope, count * sizeof *met);
    if (met == NULL)
        return dp_no_memory();
    for (size_t f = 0; f < count; f++)
        met[f] = dp_int(local->fragments[f].met);
    return dp_made(dp_list_make(scope, DP_LIST, met, count), out);
}

/* With other fragments than there were, it is as if all had met after the last step. */
static void dp__local_met_load(dp_local *local, dp_value met)
{
    const bool same = dp_count(met) == (size_t)local->config.fragments;
    for (int f = 0; f < local->config.fragments; f++) {
        dp_value last = dp_at(met, (size_t)f);
        bool has = same && last.kind == DP_INT && last.as.i <= local->told.step_count;
        local->fragments[f].met = has ? last.as.i : local->told.step_count;
    }
}

static dp_status dp__local_settled(const dp_local *local)
{
    DP_TRY(dp__local_same(local));
    if (dp__local_first(local) != NULL)
        return dp_error(DP_ERR_STATE, "sums of '%s' are under way: call dp_local_sync first",
                        dp_module_name(local->module));
    return DP_OK;
}

static dp_status dp__local_save(const dp_local *local, dp_scope *scope, dp_value *out)
{
    const bool has = local->config.momentum > 0;
    dp_pair all[4] = {{"steps", dp_int(local->told.step_count)}, {"met", dp_none()}};
    if (dp__local_is_of_job(local)) /* else nothing is under way any more */
        DP_TRY(dp__local_settled(local));
    DP_TRY(dp__local_met_save(local, scope, &all[1].value));
    all[2].key = "anchor";
    DP_TRY(dp__local_row_save(local, scope, &local->anchor, &all[2].value));
    all[3].key = "momentum";
    if (has)
        DP_TRY(dp__local_row_save(local, scope, &local->momentum, &all[3].value));
    DP_TRY(dp_wait(local->ctx));
    return dp_made(dp_dict_make(scope, all, has ? 4 : 3), out);
}

DP_API dp_status dp_local_save(dp_local *local, dp_scope *scope, dp_value *out)
{
    DP_TRY(dp_check_pointer(__func__, "local", local));
    DP_TRY(dp_check_scope(__func__, scope, local->ctx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    return dp_error_in(__func__, dp__local_save(local, scope, out));
}

static dp_status dp__local_row_check(const dp_local *local, dp_value saved, const char *what)
{
    for (size_t i = 0; i < local->entry_count; i++) {
        const char *name = local->entries[i].name;
        dp_value value = dp_get(saved, name);
        dp_param_info info;
        const dp_tensor *from;
        DP_TRY(dp_module_param(local->module, local->entries[i].param, &info));
        if (value.kind != DP_TENSOR)
            return dp_error(DP_ERR_MISMATCH, "no %s of '%s' was saved", what, name);
        DP_TRY(dp_as_tensor(value, name, local->dtype, info.data.ndim, &from));
        if (!dp_same_shape(from, &info.data))
            return dp_error(DP_ERR_MISMATCH, "%s of '%s' has another shape", what, name);
    }
    if (dp_count(saved) != local->entry_count)
        return dp_error(DP_ERR_MISMATCH, "%s of %zu parameters, saved %zu", what,
                        local->entry_count, dp_count(saved));
    return DP_OK;
}

static dp_status dp__local_row_load(const dp_local *local, dp_value saved, const dp_tensor *row)
{
    for (size_t i = 0; i < local->entry_count; i++) {
        const dp__local_entry *entry = &local->entries[i];
        const dp_tensor *from = dp_get(saved, entry->name).as.t;
        dp_tensor to;
        DP_TRY(dp__local_cut(row, entry->first, entry->count, &to));
        DP_TRY(dp_reshape(&to, from->ndim, from->shape, &to));
        DP_TRY(dp_copy(local->ctx, &to, from, NULL));
    }
    return DP_OK;
}

static dp_status dp__local_load(dp_local *local, dp_value saved)
{
    const bool has = local->config.momentum > 0;
    dp_value steps = dp_get(saved, "steps"), anchor = dp_get(saved, "anchor");
    dp_value momentum = dp_get(saved, "momentum");
    DP_TRY(dp__local_settled(local));
    if (steps.kind != DP_INT || steps.as.i < 0 || steps.as.i > INT64_MAX / 2)
        return dp_error(DP_ERR_MISMATCH, "'steps' is missing, or not a count");
    DP_TRY(dp__local_row_check(local, anchor, "anchor"));
    if (has)
        DP_TRY(dp__local_row_check(local, momentum, "momentum"));
    DP_TRY(dp__local_row_load(local, anchor, &local->anchor));
    if (has)
        DP_TRY(dp__local_row_load(local, momentum, &local->momentum));
    local->told.step_count = steps.as.i;
    dp__local_met_load(local, dp_get(saved, "met"));
    return dp_wait(local->ctx); /* what was saved may go */
}

DP_API dp_status dp_local_load(dp_local *local, dp_value saved)
{
    DP_TRY(dp_check_pointer(__func__, "local", local));
    return dp_error_in(__func__, dp__local_load(local, saved));
}
#endif /* DP_IMPLEMENTATION && !DP_LOCAL_IMPLEMENTED */
/* ------------------------------------------------------------------------------------------------
   MIT licence

   Copyright (c) 2026 the dp.h authors

   Permission is hereby granted, free of charge, to any person obtaining a copy of this software and
   associated documentation files (the "Software"), to deal in the Software without restriction,
   including without limitation the rights to use, copy, modify, merge, publish, distribute,
   sublicense, and/or sell copies of the Software, and to permit persons to whom the Software is
   furnished to do so, subject to the following conditions:

   The above copyright notice and this permission notice shall be included in all copies or
   substantial portions of the Software.

   THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR IMPLIED, INCLUDING BUT
   NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY, FITNESS FOR A PARTICULAR PURPOSE AND
   NONINFRINGEMENT. IN NO EVENT SHALL THE AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM,
   DAMAGES OR OTHER LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
   OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE SOFTWARE.
   ---------------------------------------------------------------------------------------------- */
