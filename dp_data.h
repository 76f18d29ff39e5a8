/* dp_data.h - v0.2.0 - what brings data to the wrappers of dp.h in a training program - MIT licence

   Include it after dp.h, or instead. It works with every device and any number of processes. It
   stands on the public API, and on dp.h's system for threads and files (dp/os.h, dp/team.h): dp.h
   runs devices in parallel, but a loader's threads wait for disks.

       static dp_status read_sample(dp_sample *sample, void *user)   on several threads at once
       {
           my_set *set = user;
           decode(set->files[sample->index], sample->rows[0]);       straight into the batch
           *(int64_t *)sample->rows[1] = set->labels[sample->index];
           return DP_OK;
       }

       const dp_field fields[] = {{"image", DP_F32, 3, {3, 224, 224}}, {"label", DP_I64, 0, {0}}};
       dp_loader *loader;
       dp_loader_create(ctx, &(dp_loader_config){.sampler = {.count = set.count, .seed = 1},
                                                 .batch = 64,
                                                 .read = read_sample, .user = &set,
                                                 .fields = fields, .field_count = 2,
                                                 .worker_count = 8}, &loader);
       for (int epoch = 0; epoch < 10; epoch++)
           for (;;) {
               dp_scope *step = dp_scope_begin(ctx);
               dp_batch batch;
               DP_CHECK(dp_loader_next(loader, step, &batch));
               if (!batch.ended)                                     the epoch goes on
                   DP_CHECK(dp_train_step(par, step, batch.value, optim, &log));
               dp_scope_end(step);                                   the batch ends with it
               if (batch.ended)
                   break;
           }

   CONTENTS (search for the tag)
     >>samplers    which samples, in which order
     >>loader      batches that are read before they are asked for
     >>preparing   to a device, images as a net wants them
     >>idx         files of MNIST and its kin
   and of the implementation
     >>order       a permutation that is computed, not stored
     >>dealing     what is whose
     >>stacking    tensors of several sizes
     >>images      numbers of pixels
     >>slots       batches on their way
     >>reading     what workers do
     >>making      a loader, and its end
     >>giving      the next batch
     >>keeping     where a loader stands
     >>rows        what an IDX file says it has
*/

#include "dp.h" /* outside the guard, so that DP_IMPLEMENTATION is carried through */

#if !defined(DP_DATA_H) && defined(DP_H)
#define DP_DATA_H

#ifdef __cplusplus
extern "C" {
#endif

/* ==== >>samplers ===============================================================================
   A sampler says which sample is at which position of an epoch. It computes the permutation instead
   of storing it: it takes no memory, starts anywhere at once, and is the same on every machine.

   As with torch's DistributedSampler, rank r gets positions r, r + world, and so on; with blocks,
   `block` of them in a row. A loader's ranks are processes, not devices. If a block is a rank's
   batch, all ranks' batches together are one batch for all, in its order.

   SHARDS
   For training with the same bits on any number of processes (dp.h, THE SAME BITS) each shard needs
   the same samples on any number. Where dp_config.shards is set, a loader that takes its world from
   its job deals them so. Its block is then its batch, a multiple of local_count: set it to the
   batch of all processes / process_count. What remains after the last full batch of all is padded,
   left out and dealt by shards instead of processes, as dp_split_rows divides rows: "rank" below
   means a shard. A process may get up to local_count samples more than another one, which may get
   none (see `together`). Groups of containers are cut as rows are.

   A sampler that has a world of its own needs its own `shards` for that.                        */

typedef enum dp_sampling {
    DP_SAMPLE_PADDED, /* DistributedSampler: equally many for each rank; the first samples are
                         repeated at the end */
    DP_SAMPLE_DROP,   /* with drop_last: equally many for each rank; the rest is left out */
    DP_SAMPLE_EXACT,  /* for evaluation: each sample once; ranks differ by one at most */
    DP_SAMPLE_ENDLESS /* mmengine's InfiniteSampler: one order after another, in one epoch */
} dp_sampling;

typedef struct dp_sampler {
    int64_t count;   /* samples */
    int rank, world; /* world 0: one rank; for a loader: this process among those of the job */
    dp_sampling sampling;
    bool in_order; /* not shuffled */
    uint64_t seed; /* each pair of seed and epoch has its own order */
    int64_t block; /* 0 = 1. A multiple of the shards of a rank */
    int shards;    /* of all ranks together, a multiple of world; 0: ranks are not divided */
} dp_sampler;

/* Positions of the rank in an epoch; INT64_MAX: endless. -1: dp_last_error. [any] */
DP_API int64_t dp_sampler_count(const dp_sampler *sampler);
/* The sample at a position of the rank. -1: dp_last_error. [any] */
DP_API int64_t dp_sampler_index(const dp_sampler *sampler, int64_t epoch, int64_t position);

/* ==== >>loader =================================================================================
   A loader calls a function of yours for each sample and gives batches in the order of its sampler,
   whatever the number of reading threads. Samples of fixed size are written straight into the
   batch, in memory from which devices copy fast (pinned, for GPUs).

   Up to `ahead` batches are read while earlier ones are computed. Each batch belongs to the scope
   that it is given to, and its memory is reused after that: a steady loop allocates nothing. Eight
   threads that need 1 ms for a sample deliver batches as fast as they would without a loader.

   If the function fails, its batch is lost: when it is due, dp_loader_next returns the function's
   error with the number of the first sample that failed. The next call gives the batch after it.

   One thread at a time uses a loader.                                                          */

typedef struct dp_loader dp_loader;

typedef struct dp_sample { /* to be read */
    int64_t index;         /* from the sampler */
    int64_t epoch;
    uint64_t seed;     /* for augmentation: the same in every run with the sampler's seed */
    void *const *rows; /* where to write its fields, in the config's order; not cleared */
    dp_scope *scope;   /* ends with the batch */
    dp_value value;    /* none; set it to have it collated */
} dp_sample;

/* Called on several of the loader's threads at once, or, without workers, in dp_loader_next. It may
   make values, views and tensors of the host in sample->scope, and use nothing else of the
   context. In it, and in a collate function, the loader, the context and that scope cannot be
   ended: STATE (dp_last_error), and the batch comes all the same. */
typedef dp_status (*dp_read_fn)(dp_sample *sample, void *user);

typedef dp_status (*dp_collate_fn)(dp_scope *scope, const dp_value *samples, size_t count,
                                   dp_value *out, void *user);

typedef struct dp_field { /* a tensor of each sample, of one size */
    const char *name;
    dp_dtype dtype;
    int ndim;
    int64_t shape[DP_MAX_DIMS - 1];
} dp_field;

typedef struct dp_loader_config {
    dp_sampler sampler;
    int64_t batch;  /* samples; 0 = 1. A multiple of the sampler's block; with shards, equal */
    bool drop_last; /* leave out a shorter last batch */
    /* For training with DP_SAMPLE_EXACT: an epoch has equally many batches for each rank. A rank
       that has no samples left gets an empty one, for dp_train_step or a pass without data. With
       drop_last the epoch ends before the first batch that is short for any rank. */
    bool together;
    dp_read_fn read;
    void *user; /* for both functions */
    const dp_field *fields;
    size_t field_count;
    /* Collates the values of samples; NULL: dp_collate, in groups for the local devices. Called in
       dp_loader_next, where all cores may help. dp.h has dp_pseudo_collate, dp_default_collate. */
    dp_collate_fn collate;
    int worker_count; /* threads; 0: none, and nothing is read ahead */
    int ahead;        /* batches; 0 = 2 */
    /* If known, reading ahead goes on into the next epoch. 0: not known; an epoch is read only once
       it is asked for. */
    int64_t epoch_count;
} dp_loader_config;

typedef struct dp_batch {
    dp_value value; /* a dict of the fields and of what collate made; without fields only that */
    int64_t count;  /* samples; 0: an empty batch, or none at all, and value is none */
    bool ended;     /* there is no batch: the epoch has ended */
    int64_t real_count;     /* without padding, which comes last */
    const int64_t *indices; /* of its samples; lives as long as the batch */
    int64_t epoch, number;  /* the batch's number in its epoch, from 0 on */
} dp_batch;

/* Strings and arrays are copied; `user` must outlive the loader, which ends with the context, or
   earlier. What `read` uses of the context, such as a dp_idx or the scope of a file that is mapped,
   must have been made before the loader, or the loader be destroyed before it: dp_close ends what
   is newest first. Nothing is read before the first dp_loader_next. */
DP_MUST_USE DP_API dp_status dp_loader_create(dp_ctx *ctx, const dp_loader_config *config,
                                              dp_loader **out);
/* Waits until the samples that are being read are done, and drops them. Batches that were given
   stay. NULL is fine. dp_close does so with each loader; meanwhile what `read` calls of dp.h fails
   with STATE: destroy the loader before, if that matters. dp_close is refused while another thread
   is in dp_loader_next. */
DP_API void dp_loader_destroy(dp_loader *loader);

/* The next batch, for `scope`; waits until it has been read. The log tells of a worker that does
   not come back from `read`, from a quarter of the time-out on. After the last batch of an epoch it
   says once that it has ended, then gives the first batch of the next epoch; after the last of
   epoch_count it says so each time. If the scope is wrong or there is no memory, nothing is lost:
   call again. */
DP_MUST_USE DP_API dp_status dp_loader_next(dp_loader *loader, dp_scope *scope, dp_batch *out);

typedef struct dp_loader_info {
    int64_t epoch, number; /* of the batch that comes next; number batch_count: the epoch's end */
    int64_t batch_count;   /* in an epoch, for this rank; INT64_MAX: endless */
    int64_t sample_count;
} dp_loader_info;
DP_MUST_USE DP_API dp_status dp_loader_info_get(const dp_loader *loader, dp_loader_info *out);

/* Goes on from there; batches read ahead are dropped. */
DP_MUST_USE DP_API dp_status dp_loader_seek(dp_loader *loader, int64_t epoch, int64_t number);

/* The loader's place, for a checkpoint: a dict of numbers. A loader of the same samples in the same
   order can load it, with any world and batch; else an error names what differs, and nothing
   changes. If no batch of all ranks together begins at that sample, what is left of the epoch is
   dealt anew, and the batches of this epoch are counted from there. A loader whose sampler has no
   world takes that of its job as it is now, as after dp_recover. With DP_SAMPLE_EXACT all ranks
   save the same place if their loaders are `together`; else one whose batches have ended does not
   know that another one has a last batch. */
DP_MUST_USE DP_API dp_status dp_loader_save(const dp_loader *loader, dp_scope *scope,
                                            dp_value *out);
DP_MUST_USE DP_API dp_status dp_loader_load(dp_loader *loader, dp_value saved);

/* Goes on after the first `samples` samples of an epoch: the sum of real_count over all batches of
   all ranks. What is left is dealt anew, as by dp_loader_load. For programs that go on without
   processes that have died, and count the samples of each step that all have done: the loader has
   given the batch of the step that failed, and stands behind it. */
DP_MUST_USE DP_API dp_status dp_loader_resume(dp_loader *loader, int64_t epoch, int64_t samples);

/* ==== >>preparing ==============================================================================
   What mmengine's data preprocessors do, before a batch goes to a model.                        */

/* The same structure with all tensors on `device` ({0}: the host). Tensors that are there already,
   and everything else, are shared with `value`. Containers that are cpu_only stay as they are. */
DP_MUST_USE DP_API dp_status dp_to_device(dp_ctx *ctx, dp_scope *scope, dp_value value,
                                          dp_device device, dp_value *out);

/* Stacks a list of tensors. Dim 0 (the channels) must agree; all others are padded at their end, to
   the largest, and to a multiple of the divisor (0 = 1). */
DP_MUST_USE DP_API dp_status dp_stack_batch(dp_ctx *ctx, dp_scope *scope, dp_value tensors,
                                            int64_t pad_divisor, double pad_value, dp_value *out);

typedef struct dp_image_config {
    const double *mean, *std; /* for each channel, or one for all; both or neither */
    size_t channel_count;     /* numbers in each: 1 or 3 */
    bool swap_channels;       /* BGR becomes RGB, or RGB BGR */
    int64_t pad_divisor;      /* 0 = 1 */
    double pad_value;
} dp_image_config;

/* Images {C, H, W} of any size and dtype in a list, or a tensor {N, C, H, W}, become an f32 tensor
   {N, C, H, W} on the same device: channels swapped, (x - mean) / std, padded right and below. A
   tensor may have N = 0. config NULL: only the conversion. */
DP_MUST_USE DP_API dp_status dp_image_batch(dp_ctx *ctx, dp_scope *scope, dp_value images,
                                            const dp_image_config *config, dp_value *out);

/* ImgDataPreprocessor: a dict goes to the device; its entry "inputs" goes through dp_image_batch,
   and "data_samples" is none if it is missing. */
DP_MUST_USE DP_API dp_status dp_image_preprocess(dp_ctx *ctx, dp_scope *scope, dp_value data,
                                                 dp_device device, const dp_image_config *config,
                                                 dp_value *out);

/* ==== >>idx ====================================================================================
   The format of MNIST: a type, a shape, and elements, big-endian. A row is what the file has at one
   index of dim 0: a picture, a label. Rows are read where they go, by any number of threads:

       dp_idx_open(ctx, "train-images-idx3-ubyte", &set.images);
       ...
       DP_TRY(dp_idx_row(set->images, sample->index, sample->rows[0]));        in dp_read_fn

   A file that says more than it holds, or less, is refused when it is opened. dp_array.h reads
   numpy's files.                                                                               */

typedef struct dp_idx dp_idx;

/* Stays open until dp_idx_close, or dp_close. DP_ERR_NO_FILE: there is no file of this name. */
DP_MUST_USE DP_API dp_status dp_idx_open(dp_ctx *ctx, const char *path, dp_idx **out);
DP_API void dp_idx_close(dp_idx *idx); /* NULL is fine */

typedef struct dp_idx_info {
    dp_dtype dtype; /* u8, i8, i16, i32, f32 or f64 */
    int ndim;
    int64_t shape[DP_MAX_DIMS]; /* shape[0] rows */
    size_t row_bytes;
} dp_idx_info;
DP_MUST_USE DP_API dp_status dp_idx_info_get(const dp_idx *idx, dp_idx_info *out);

/* row_bytes bytes, as this machine has numbers. [any] */
DP_MUST_USE DP_API dp_status dp_idx_row(const dp_idx *idx, int64_t row, void *out);

#ifdef __cplusplus
}
#endif
#endif /* DP_DATA_H */

#if defined(DP_IMPLEMENTATION) && !defined(DP_DATA_IMPLEMENTED)
#define DP_DATA_IMPLEMENTED

#include <stdio.h>
#include <string.h>

/* ==== >>order ==================================================================================
   A Feistel network permutes the numbers of 2 * half bits, the fewest that hold `count`. A number
   not below count is sent through again until it is, which keeps it a permutation. Seed and epoch
   are mixed before they are added: with torch's plain sum, epoch 1 of seed 0 would be epoch 0 of
   seed 1.                                                                                       */

enum { DP__DATA_ROUNDS = 8 };

static uint64_t dp__data_mix(uint64_t x)
{
    x ^= x >> 30;
    x *= 0xbf58476d1ce4e5b9u;
    x ^= x >> 27;
    x *= 0x94d049bb133111ebu;
    return x ^ x >> 31;
}

static uint64_t dp__data_key(uint64_t seed, int64_t epoch)
{
    return dp__data_mix(dp__data_mix(seed + 0x9e3779b97f4a7c15u) +
                        dp__data_mix((uint64_t)epoch + 0xd1b54a32d192ed03u) * 3);
}

static int64_t dp__data_permuted(uint64_t key, int64_t count, int64_t position)
{
    uint64_t keys[DP__DATA_ROUNDS], x = (uint64_t)position;
    int half = 1;
    while (((uint64_t)count - 1) >> 2 * half != 0)
        half++;
    uint64_t mask = ((uint64_t)1 << half) - 1;
    for (int i = 0; i < DP__DATA_ROUNDS; i++)
        keys[i] = dp__data_mix(key + (uint64_t)(i + 1) * 0x9e3779b97f4a7c15u);
    do {
        uint64_t left = x >> half, right = x & mask;
        for (int i = 0; i < DP__DATA_ROUNDS; i++) {
            uint64_t next = left ^ (dp__data_mix(right ^ keys[i]) & mask);
            left = right;
            right = next;
        }
        x = left << half | right;
    } while (x >= (uint64_t)count);
    return (int64_t)x;
}

/* ==== >>dealing ================================================================================
   Positions of an epoch are those of the whole world; a rank has some of them.                  */

#define DP__DATA_COUNT_MAX ((int64_t)1 << 62)

typedef struct dp__data_deal { /* a sampler with its defaults put in */
    dp_sampler of;
    int64_t first;      /* positions before it have been dealt otherwise */
    int64_t count;      /* positions that the rank has */
    int64_t full;       /* of these, in full blocks */
    int64_t each, more; /* of the rest: what every shard has; shards that have one more */
} dp__data_deal;

static dp_status dp__data_shards_check(const dp_sampler *sampler)
{
    int world = sampler->world > 0 ? sampler->world : 1, each = sampler->shards / world;
    int64_t block = sampler->block > 0 ? sampler->block : 1;
    if (sampler->shards < 0 || sampler->shards % world != 0)
        return dp_error(DP_ERR_INVALID, "sampler.shards is %d, no multiple of %d ranks",
                        sampler->shards, world);
    if (each > 0 && block % each != 0)
        return dp_error(DP_ERR_INVALID,
                        "sampler.block, or a loader's batch, is %lld: no multiple of a rank's %d "
                        "shards",
                        (long long)block, each);
    return DP_OK;
}

static dp_status dp__data_sampler_check(const dp_sampler *sampler)
{
    if (sampler->count < 0 || sampler->count > DP__DATA_COUNT_MAX)
        return dp_error(DP_ERR_INVALID, "sampler.count is %lld", (long long)sampler->count);
    if (sampler->world < 0 || sampler->rank < 0 ||
        sampler->rank >= (sampler->world > 0 ? sampler->world : 1))
        return dp_error(DP_ERR_INVALID, "sampler.rank is %d of %d", sampler->rank, sampler->world);
    if ((unsigned)sampler->sampling > DP_SAMPLE_ENDLESS)
        return dp_error(DP_ERR_INVALID, "sampler.sampling is %d", (int)sampler->sampling);
    if (sampler->block < 0 || sampler->block > INT32_MAX)
        return dp_error(DP_ERR_INVALID, "sampler.block is %lld", (long long)sampler->block);
    DP_TRY(dp__data_shards_check(sampler));
    if (sampler->sampling == DP_SAMPLE_ENDLESS && sampler->count == 0)
        return dp_error(DP_ERR_INVALID, "sampler.count is 0, and there is no end to it");
    return DP_OK;
}

/* Positions of the rest that ranks before this one have. */
static int64_t dp__data_before(const dp__data_deal *deal, int64_t rank)
{
    int64_t shards = rank * (deal->of.shards / deal->of.world);
    return shards * deal->each + (shards < deal->more ? shards : deal->more);
}

/* Positions that a rank has; the first rank has the most, the last one the fewest. */
static int64_t dp__data_count_of(const dp__data_deal *deal, int64_t rank)
{
    return deal->full + dp__data_before(deal, rank + 1) - dp__data_before(deal, rank);
}

static dp_status dp__data_deal_of(const dp_sampler *sampler, int64_t first, dp__data_deal *out)
{
    if (sampler == NULL)
        return dp_error(DP_ERR_INVALID, "sampler is NULL");
    DP_TRY(dp__data_sampler_check(sampler));
    *out = (dp__data_deal){.of = *sampler, .first = first, .count = INT64_MAX, .full = INT64_MAX};
    out->of.world = sampler->world > 0 ? sampler->world : 1;
    out->of.block = sampler->block > 0 ? sampler->block : 1;
    out->of.shards = sampler->shards > 0 ? sampler->shards : out->of.world;
    if (sampler->sampling == DP_SAMPLE_ENDLESS)
        return DP_OK;
    int64_t shards = out->of.shards, all = sampler->count - first, rest = all % shards;
    if (sampler->sampling == DP_SAMPLE_PADDED && rest > 0)
        all += shards - rest;
    else if (sampler->sampling == DP_SAMPLE_DROP)
        all -= rest;
    int64_t round = out->of.world * out->of.block, left = all % round;
    out->full = all / round * out->of.block;
    out->each = left / shards;
    out->more = left % shards;
    out->count = dp__data_count_of(out, out->of.rank);
    return DP_OK;
}

/* A position of the rank, among those of all ranks. */
static int64_t dp__data_position(const dp__data_deal *deal, int64_t position)
{
    int64_t rank = deal->of.rank, world = deal->of.world, block = deal->of.block;
    if (position < deal->full)
        return deal->first + position / block * world * block + rank * block + position % block;
    return deal->first + deal->full * world + dp__data_before(deal, rank) + position - deal->full;
}

static int64_t dp__data_index(const dp__data_deal *deal, int64_t epoch, int64_t position)
{
    int64_t count = deal->of.count, at = dp__data_position(deal, position), index = at % count;
    if (deal->of.sampling == DP_SAMPLE_ENDLESS)
        epoch += at / count;
    return deal->of.in_order ? index
                             : dp__data_permuted(dp__data_key(deal->of.seed, epoch), count, index);
}

static dp_status dp__data_position_check(const dp__data_deal *deal, int64_t epoch, int64_t position)
{
    int64_t most = deal->of.sampling == DP_SAMPLE_ENDLESS
                       ? DP__DATA_COUNT_MAX / deal->of.world - deal->of.block
                       : deal->count;
    if (epoch < 0 || (deal->of.sampling == DP_SAMPLE_ENDLESS && epoch > 0))
        return dp_error(DP_ERR_INVALID, "epoch is %lld%s", (long long)epoch,
                        epoch > 0 ? ", and an endless sampler has only epoch 0" : "");
    if (position < 0 || position >= most)
        return dp_error(DP_ERR_INVALID, "position is %lld of %lld", (long long)position,
                        (long long)most);
    return DP_OK;
}

DP_API int64_t dp_sampler_count(const dp_sampler *sampler)
{
    dp__data_deal deal;
    if (dp_error_in(__func__, dp__data_deal_of(sampler, 0, &deal)) != DP_OK)
        return -1;
    return deal.count;
}

DP_API int64_t dp_sampler_index(const dp_sampler *sampler, int64_t epoch, int64_t position)
{
    dp__data_deal deal;
    dp_status status = dp__data_deal_of(sampler, 0, &deal);
    if (status == DP_OK)
        status = dp__data_position_check(&deal, epoch, position);
    if (dp_error_in(__func__, status) != DP_OK)
        return -1;
    return dp__data_index(&deal, epoch, position);
}

/* ==== >>stacking ===============================================================================
   Tensors go to other devices, and become one.                                                  */

static dp_status dp__data_wants(const char *fn, const dp_ctx *ctx, const dp_scope *scope,
                                const dp_value *out)
{
    DP_TRY(dp_check_ctx(fn, ctx));
    DP_TRY(dp_check_scope(fn, scope, ctx));
    return dp_check_pointer(fn, "out", out);
}

static bool dp__data_same_device(dp_device a, dp_device b)
{
    return a.backend == b.backend && a.index == b.index;
}

/* Moves a tensor, or those in a container, to the device that `user` points to. */
static dp_status dp__data_move(dp_scope *scope, dp_value value, dp_value *out, void *user)
{
    const dp_device *device = user;
    *out = value;
    if (value.kind == DP_TENSOR && !dp__data_same_device(value.as.t->device, *device)) {
        const dp_tensor *from = value.as.t;
        dp_tensor own;
        DP_TRY(dp_tensor_to(scope, *device, (dp_dtype)from->dtype, from, &own));
        return dp_made(dp_of(scope, &own), out);
    }
    if (value.kind == DP_CONTAINER && !value.as.c->cpu_only) {
        dp_container own = *value.as.c;
        DP_TRY(dp_map(scope, value.as.c->data, dp__data_move, user, &own.data));
        return dp_made(dp_contain(scope, &own), out);
    }
    return DP_OK;
}

DP_API dp_status dp_to_device(dp_ctx *ctx, dp_scope *scope, dp_value value, dp_device device,
                              dp_value *out)
{
    DP_TRY(dp__data_wants(__func__, ctx, scope, out));
    DP_TRY(dp_check_value(__func__, "value", value));
    return dp_error_in(__func__, dp_map(scope, value, dp__data_move, &device, out));
}

typedef struct dp__data_stacker { /* tensors that become one */
    dp_ctx *ctx;
    dp_scope *scope;
    const dp_tensor **of;
    size_t count;
    int ndim; /* of each */
    int64_t shape[DP_MAX_DIMS];
    bool even; /* none needs to be padded */
} dp__data_stacker;

static dp_status dp__data_stacker_fit(dp__data_stacker *stacker, size_t i)
{
    const dp_tensor *own = stacker->of[i], *first = stacker->of[0];
    if (own->ndim != first->ndim || own->dtype != first->dtype)
        return dp_error(DP_ERR_MISMATCH, "tensor %zu has %d dims of %s, tensor 0 %d of %s", i,
                        own->ndim, dp_dtype_name((dp_dtype)own->dtype), first->ndim,
                        dp_dtype_name((dp_dtype)first->dtype));
    if (!dp__data_same_device(own->device, first->device))
        return dp_error(DP_ERR_MISMATCH, "tensor %zu is on another device than tensor 0", i);
    if (own->shape[0] != first->shape[0])
        return dp_error(DP_ERR_MISMATCH,
                        "dim 0 is %lld in tensor %zu and %lld in tensor 0, and is not padded",
                        (long long)own->shape[0], i, (long long)first->shape[0]);
    for (int d = 1; d < own->ndim; d++)
        if (own->shape[d] > stacker->shape[d])
            stacker->shape[d] = own->shape[d];
    return DP_OK;
}

static dp_status dp__data_stacker_round(dp__data_stacker *stacker, int64_t divisor)
{
    if (divisor < 0)
        return dp_error(DP_ERR_INVALID, "pad_divisor is %lld", (long long)divisor);
    divisor = divisor > 0 ? divisor : 1;
    for (int d = 1; d < stacker->ndim; d++) {
        int64_t over = stacker->shape[d] % divisor;
        if (over > 0 && stacker->shape[d] > INT64_MAX - divisor)
            return dp_error(DP_ERR_INVALID, "pad_divisor is %lld", (long long)divisor);
        stacker->shape[d] += over > 0 ? divisor - over : 0;
    }
    stacker->even = true;
    for (size_t i = 0; i < stacker->count; i++)
        for (int d = 1; d < stacker->ndim; d++)
            stacker->even = stacker->even && stacker->of[i]->shape[d] == stacker->shape[d];
    return DP_OK;
}

/* The number of tensors in a list, and the shape that holds each. */
static dp_status dp__data_stacker_of(dp_ctx *ctx, dp_scope *scope, dp_value list, int64_t divisor,
                                     dp__data_stacker *out)
{
    char what[32];
    *out = (dp__data_stacker){.ctx = ctx, .scope = scope, .count = dp_count(list)};
    if ((list.kind != DP_LIST && list.kind != DP_TUPLE) || out->count == 0)
        return dp_error(DP_ERR_INVALID, "not a list of tensors, or an empty one");
    out->of = dp_scope_alloc(scope, out->count * sizeof *out->of);
    if (out->of == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < out->count; i++) {
        snprintf(what, sizeof what, "tensor %zu", i);
        DP_TRY(dp_as_tensor(dp_at(list, i), what, DP_DTYPE_ANY, -1, &out->of[i]));
    }
    out->ndim = out->of[0]->ndim;
    if (out->ndim < 1 || out->ndim == DP_MAX_DIMS)
        return dp_error(DP_ERR_INVALID, "tensors of %d dims cannot be stacked", out->ndim);
    memcpy(out->shape, out->of[0]->shape, sizeof out->shape);
    for (size_t i = 1; i < out->count; i++)
        DP_TRY(dp__data_stacker_fit(out, i));
    return dp__data_stacker_round(out, divisor);
}

/* The tensor for all of them, filled where they do not reach. */
static dp_status dp__data_stacker_make(const dp__data_stacker *stacker, dp_dtype dtype,
                                       double pad_value, dp_tensor *out)
{
    int64_t shape[DP_MAX_DIMS] = {(int64_t)stacker->count};
    memcpy(shape + 1, stacker->shape, (size_t)stacker->ndim * sizeof *shape);
    DP_TRY(dp_tensor_new(stacker->scope, stacker->of[0]->device, dtype, stacker->ndim + 1, shape,
                         out));
    return stacker->even ? DP_OK : dp_fill(stacker->ctx, out, dp_float(pad_value));
}

/* The part of it that a tensor covers. */
static dp_status dp__data_stacker_place(const dp__data_stacker *stacker, const dp_tensor *stack,
                                        size_t i, dp_tensor *out)
{
    DP_TRY(dp_select(stack, 0, (int64_t)i, out));
    for (int d = 1; d < stacker->ndim; d++)
        DP_TRY(dp_narrow(out, d, 0, stacker->of[i]->shape[d], out));
    return DP_OK;
}

static dp_status dp__data_stack(const dp__data_stacker *stacker, double pad_value, dp_value *out)
{
    dp_tensor stack, place;
    DP_TRY(dp__data_stacker_make(stacker, (dp_dtype)stacker->of[0]->dtype, pad_value, &stack));
    for (size_t i = 0; i < stacker->count; i++) {
        DP_TRY(dp__data_stacker_place(stacker, &stack, i, &place));
        DP_TRY(dp_copy(stacker->ctx, &place, stacker->of[i], NULL));
    }
    return dp_made(dp_of(stacker->scope, &stack), out);
}

DP_API dp_status dp_stack_batch(dp_ctx *ctx, dp_scope *scope, dp_value tensors, int64_t pad_divisor,
                                double pad_value, dp_value *out)
{
    dp__data_stacker stacker;
    dp_value made;
    DP_TRY(dp__data_wants(__func__, ctx, scope, out));
    DP_TRY(dp_check_value(__func__, "tensors", tensors));
    DP_TRY(dp_error_in(__func__, dp__data_stacker_of(ctx, scope, tensors, pad_divisor, &stacker)));
    DP_TRY(dp_error_in(__func__, dp__data_stack(&stacker, pad_value, &made)));
    *out = made;
    return DP_OK;
}

/* ==== >>images =================================================================================
   On the host an image is normalised in one pass, from where it is to where it goes; there are only
   256 bytes, so what becomes of each is worked out once. A device does it with kernels of the
   contract, channel by channel. All subtract and divide in f32, as torch does.                  */

typedef struct dp__data_normalizer {
    dp_ctx *ctx;
    dp_scope *scope;
    const dp_image_config *config;
    bool host;
    float (*bytes)[256]; /* on the host: what becomes of a byte, for each mean and std */
} dp__data_normalizer;

static dp_status dp__data_image_check(const dp_image_config *config)
{
    size_t count = config->channel_count;
    if ((config->mean == NULL) != (config->std == NULL))
        return dp_error(DP_ERR_INVALID, "mean is given without std, or std without mean");
    if (config->mean != NULL && count != 1 && count != 3)
        return dp_error(DP_ERR_INVALID, "mean and std are for 1 or 3 channels, not %zu", count);
    for (size_t i = 0; config->mean != NULL && i < count; i++) {
        float std = (float)config->std[i]; /* what will divide */
        if (!(std > 0 || std < 0))
            return dp_error(DP_ERR_INVALID, "std of channel %zu is %g, in f32 %g", i,
                            config->std[i], (double)std);
    }
    return DP_OK;
}

static dp_status dp__data_channels_check(const dp_image_config *config, const dp_tensor *image,
                                         size_t i)
{
    bool three = config->swap_channels || (config->mean != NULL && config->channel_count == 3);
    if (image->ndim != 3)
        return dp_error(DP_ERR_INVALID, "image %zu has %d dims, not channels, height and width", i,
                        image->ndim);
    if (three && image->shape[0] != 3)
        return dp_error(DP_ERR_INVALID, "image %zu has %lld channels: %s 3", i,
                        (long long)image->shape[0],
                        config->swap_channels ? "swapping them takes" : "mean and std are for");
    return DP_OK;
}

/* Which mean and std a channel has. */
static size_t dp__data_norm_of(const dp_image_config *config, int64_t channel)
{
    return config->mean != NULL && config->channel_count == 3 ? (size_t)channel : 0;
}

static void dp__data_norms(const dp_image_config *config, size_t at, float *out_mean,
                           float *out_std)
{
    *out_mean = config->mean != NULL ? (float)config->mean[at] : 0;
    *out_std = config->std != NULL ? (float)config->std[at] : 1;
}

static dp_status dp__data_bytes_make(dp__data_normalizer *normalizer)
{
    size_t count = normalizer->config->mean != NULL ? normalizer->config->channel_count : 1;
    float mean, std;
    normalizer->bytes = dp_scope_alloc(normalizer->scope, count * sizeof *normalizer->bytes);
    if (normalizer->bytes == NULL)
        return dp_no_memory();
    for (size_t at = 0; at < count; at++) {
        dp__data_norms(normalizer->config, at, &mean, &std);
        for (int byte = 0; byte < 256; byte++)
            normalizer->bytes[at][byte] = ((float)byte - mean) / std;
    }
    return DP_OK;
}

static void dp__data_row_u8(float *to, const uint8_t *from, int64_t count, int64_t stride,
                            const float *bytes)
{
    for (int64_t x = 0; x < count; x++)
        to[x] = bytes[from[x * stride]];
}

static void dp__data_row_f32(float *to, const float *from, int64_t count, int64_t stride,
                             float mean, float std)
{
    for (int64_t x = 0; x < count; x++)
        to[x] = (from[x * stride] - mean) / std;
}

/* Any strides: images often have their channels last. */
static void dp__data_normalize_host(const dp__data_normalizer *normalizer, const dp_tensor *image,
                                    const dp_tensor *place)
{
    int64_t channels = image->shape[0], width = image->shape[2], stride = image->stride[2];
    int64_t size = (int64_t)dp_dtype_bytes((dp_dtype)image->dtype);
    float mean, std;
    for (int64_t c = 0; c < channels; c++) {
        int64_t from = normalizer->config->swap_channels ? channels - 1 - c : c;
        size_t at = dp__data_norm_of(normalizer->config, c);
        dp__data_norms(normalizer->config, at, &mean, &std);
        for (int64_t y = 0; y < image->shape[1]; y++) {
            float *to = (float *)place->data + c * place->stride[0] + y * place->stride[1];
            const void *row = (const char *)image->data +
                              (from * image->stride[0] + y * image->stride[1]) * size;
            if (image->dtype == DP_U8)
                dp__data_row_u8(to, row, width, stride, normalizer->bytes[at]);
            else
                dp__data_row_f32(to, row, width, stride, mean, std);
        }
    }
}

static dp_status dp__data_as_f32(const dp__data_normalizer *normalizer, const dp_tensor *image,
                                 dp_tensor *out)
{
    return dp_tensor_to(normalizer->scope, image->device, DP_F32, image, out);
}

/* (channel - mean) / std, in place: a sum of two, divided. */
static dp_status dp__data_norm_device(const dp__data_normalizer *normalizer,
                                      const dp_tensor *channel, const dp_tensor *means, float mean,
                                      float std)
{
    void *data = channel->data;
    const void *in[] = {data, means->data};
    DP_TRY(dp_fill(normalizer->ctx, means, dp_float((double)-mean)));
    return dp_kernel_run(normalizer->ctx, channel->device.index,
                         &(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                           .op = DP_OP_SUM,
                                           .dtype = DP_F32,
                                           .count = (size_t)dp_tensor_count(channel),
                                           .out = &data,
                                           .in = in,
                                           .out_count = 1,
                                           .in_count = 2,
                                           .alpha = 1,
                                           .beta = (double)std});
}

static dp_status dp__data_normalize_device(const dp__data_normalizer *normalizer,
                                           const dp_tensor *image, const dp_tensor *place)
{
    dp_tensor wide, means, channel, to;
    float mean, std;
    DP_TRY(dp__data_as_f32(normalizer, image, &wide));
    DP_TRY(dp_tensor_new(normalizer->scope, image->device, DP_F32, 2, image->shape + 1, &means));
    for (int64_t c = 0; c < image->shape[0]; c++) {
        bool swap = normalizer->config->swap_channels;
        dp__data_norms(normalizer->config, dp__data_norm_of(normalizer->config, c), &mean, &std);
        DP_TRY(dp_select(&wide, 0, swap ? image->shape[0] - 1 - c : c, &channel));
        DP_TRY(dp_select(place, 0, c, &to));
        if (normalizer->config->mean != NULL && dp_tensor_count(&channel) > 0)
            DP_TRY(dp__data_norm_device(normalizer, &channel, &means, mean, std));
        DP_TRY(dp_copy(normalizer->ctx, &to, &channel, NULL));
    }
    return DP_OK;
}

static dp_status dp__data_normalize(const dp__data_normalizer *normalizer, const dp_tensor *image,
                                    const dp_tensor *place)
{
    dp_tensor wide;
    if (dp_tensor_count(image) == 0) /* which may have any number of rows */
        return DP_OK;
    if (!normalizer->host)
        return dp__data_normalize_device(normalizer, image, place);
    if (image->dtype == DP_U8 || image->dtype == DP_F32) {
        dp__data_normalize_host(normalizer, image, place);
        return DP_OK;
    }
    DP_TRY(dp__data_as_f32(normalizer, image, &wide));
    dp__data_normalize_host(normalizer, &wide, place);
    return DP_OK;
}

/* A tensor {N, C, H, W} as the list of its images. */
static dp_status dp__data_images_of(dp_scope *scope, dp_value images, dp_value *out)
{
    *out = images;
    if (images.kind != DP_TENSOR)
        return DP_OK;
    const dp_tensor *all = images.as.t;
    if (all->ndim != 4)
        return dp_error(DP_ERR_INVALID, "a tensor of images has 4 dims, this one has %d",
                        all->ndim);
    bool counts = (uint64_t)all->shape[0] <= SIZE_MAX / sizeof(dp_value);
    dp_value *items = counts ? dp_scope_alloc(scope, (size_t)all->shape[0] * sizeof *items) : NULL;
    if (items == NULL)
        return dp_no_memory();
    for (int64_t i = 0; i < all->shape[0]; i++) {
        dp_tensor one;
        DP_TRY(dp_select(all, 0, i, &one));
        items[i] = dp_of(scope, &one);
    }
    return dp_made(dp_list_make(scope, DP_LIST, items, (size_t)all->shape[0]), out);
}

/* Images without pixels, however many; or the empty batch of a process without data, in the shape
   of the others'. */
static dp_status dp__data_no_images(dp_ctx *ctx, dp_scope *scope, const dp_image_config *config,
                                    const dp_tensor *images, dp_value *out)
{
    dp_tensor image, none;
    dp__data_stacker stacker = {.ctx = ctx, .scope = scope, .of = (const dp_tensor *[]){&image}};
    image.ndim = 3;
    image.device = images->device;
    memcpy(image.shape, images->shape + 1, image.ndim * sizeof *image.shape);
    stacker.ndim = image.ndim;
    memcpy(stacker.shape, image.shape, image.ndim * sizeof *image.shape);
    DP_TRY(dp__data_channels_check(config, &image, 0));
    DP_TRY(dp__data_stacker_round(&stacker, config->pad_divisor));
    stacker.count = (size_t)images->shape[0]; /* each as the one that is there */
    DP_TRY(dp__data_stacker_make(&stacker, DP_F32, 0, &none));
    return dp_made(dp_of(scope, &none), out);
}

static dp_status dp__data_image_batch(dp_ctx *ctx, dp_scope *scope, const dp_image_config *config,
                                      dp_value images, dp_value *out)
{
    static const dp_image_config zero;
    config = config != NULL ? config : &zero;
    dp__data_normalizer normalizer = {ctx, scope, config, true, NULL};
    dp__data_stacker stacker;
    dp_value list;
    dp_tensor stack, place;
    DP_TRY(dp__data_image_check(config));
    if (images.kind == DP_TENSOR && images.as.t->ndim == 4 && dp_tensor_count(images.as.t) == 0)
        return dp__data_no_images(ctx, scope, config, images.as.t, out);
    DP_TRY(dp__data_images_of(scope, images, &list));
    DP_TRY(dp__data_stacker_of(ctx, scope, list, config->pad_divisor, &stacker));
    for (size_t i = 0; i < stacker.count; i++)
        DP_TRY(dp__data_channels_check(config, stacker.of[i], i));
    dp_device device = stacker.of[0]->device;
    if (device.backend != 0) {
        dp_device_info info;
        DP_TRY(dp_device_info_get(ctx, device.index, &info));
        normalizer.host = info.host_memory;
    }
    if (normalizer.host)
        DP_TRY(dp__data_bytes_make(&normalizer));
    DP_TRY(dp__data_stacker_make(&stacker, DP_F32, config->pad_value, &stack));
    for (size_t i = 0; i < stacker.count; i++) {
        DP_TRY(dp__data_stacker_place(&stacker, &stack, i, &place));
        DP_TRY(dp__data_normalize(&normalizer, stacker.of[i], &place));
    }
    return dp_made(dp_of(scope, &stack), out);
}

DP_API dp_status dp_image_batch(dp_ctx *ctx, dp_scope *scope, dp_value images,
                                const dp_image_config *config, dp_value *out)
{
    dp_value made;
    DP_TRY(dp__data_wants(__func__, ctx, scope, out));
    DP_TRY(dp_check_value(__func__, "images", images));
    DP_TRY(dp_error_in(__func__, dp__data_image_batch(ctx, scope, config, images, &made)));
    *out = made;
    return DP_OK;
}

/* The dict with its images made, and "data_samples" in it. */
static dp_status dp__data_image_dict(dp_ctx *ctx, dp_scope *scope, const dp_image_config *config,
                                     dp_value data, dp_value *out)
{
    size_t count = dp_count(data), used = 0;
    bool inputs = false, samples = false;
    if (data.kind != DP_DICT)
        return dp_error(DP_ERR_INVALID, "not a dict with an entry 'inputs'");
    dp_pair *pairs = dp_scope_alloc(scope, (count + 1) * sizeof *pairs);
    if (pairs == NULL)
        return dp_no_memory();
    for (; used < count; used++) {
        pairs[used] = (dp_pair){dp_key_at(data, used), dp_at(data, used)};
        samples = samples || strcmp(pairs[used].key, "data_samples") == 0;
        if (strcmp(pairs[used].key, "inputs") != 0)
            continue;
        inputs = true;
        DP_TRY(dp__data_image_batch(ctx, scope, config, pairs[used].value, &pairs[used].value));
    }
    if (!inputs)
        return dp_error(DP_ERR_INVALID, "not a dict with an entry 'inputs'");
    if (!samples)
        pairs[used++] = (dp_pair){"data_samples", dp_none()};
    return dp_made(dp_dict_make(scope, pairs, used), out);
}

DP_API dp_status dp_image_preprocess(dp_ctx *ctx, dp_scope *scope, dp_value data, dp_device device,
                                     const dp_image_config *config, dp_value *out)
{
    dp_value moved, made;
    DP_TRY(dp_check_pointer(__func__, "out", out));
    DP_TRY(dp_error_in(__func__, dp_to_device(ctx, scope, data, device, &moved)));
    DP_TRY(dp_error_in(__func__, dp__data_image_dict(ctx, scope, config, moved, &made)));
    *out = made;
    return DP_OK;
}

/* ==== >>slots ==================================================================================
   A slot is a batch that is being read: a scope, with one inside it for each reader, as only one
   thread at a time may use a scope. The caller puts slots into a ring; workers take samples from
   the oldest that has some left. When the batch is given, its scope moves into the caller's. The
   loader's lock guards what changes while workers run: begun, done, failed_at to forgotten, the
   ring, closing.                                                                                */

enum {
    DP__DATA_WORKERS_MAX = 1024,
    DP__DATA_AHEAD_MAX = 1 << 16,
    DP__DATA_TEXT = 512 /* of a sentence */
};

typedef struct dp__data_slot {
    dp_scope *scope, **scopes; /* one for each reader */
    dp_tensor *tensors;        /* one for each field */
    dp_value *values;          /* one for each sample */
    int64_t *indices;
    int64_t epoch, number, count, real_count;
    int64_t begun, done; /* samples */
    int64_t failed_at;   /* the first that has failed; or its status is DP_OK */
    dp_status status;
    char text[DP__DATA_TEXT];
    bool forgotten;
} dp__data_slot;

typedef struct dp__data_reader {
    dp_loader *loader;
    int index;
    void **rows;
    dp__gate gate; /* it waits for slots */
    dp__thread thread;
    _Atomic int64_t sample; /* that it reads, */
    _Atomic uint64_t since; /* by dp__os_coarse_ns; 0: none, */
    atomic_int number;      /* on this thread, as the system calls it */
} dp__data_reader;

struct dp_loader {
    dp_ctx *ctx;
    dp_scope *scope, *guard; /* the guard ends first of all that is in the scope */
    dp_loader_config config;
    bool of_job;               /* its world is the job's */
    dp__data_deal whole, rest; /* of an epoch; of what is left of one, rest_epoch */
    int64_t rest_epoch;        /* -1: there is none */
    size_t *row_bytes;
    size_t local_count;                /* devices */
    int64_t epoch, number;             /* of the batch that comes next */
    int64_t ahead_epoch, ahead_number; /* of the slot that is made next */
    dp__lock lock;
    dp__gate news; /* the caller waits for slots to be done */
    dp__lookout lookout;
    dp__data_slot **ring;
    int depth, first, slot_count;
    bool closing;
    dp__data_reader *readers; /* without workers there is one, who is the caller */
    int reader_count, started;
    unsigned fork_count;
};

typedef struct dp__data_visit { /* a loader calls functions of the user's */
    const dp_loader *loader;
    dp__data_reader *reader; /* of so many samples of a slot; NULL: a slot is collated */
    dp__data_slot *slot;
    int64_t first, count;
    const dp__data_slot *collated;
    dp_value *out;
    const struct dp__data_visit *outer; /* in whose function it is called */
} dp__data_visit;

static _Thread_local const dp__data_visit *dp__data_visits;

/* Returns true if this thread is in a function that works in one of the loader's slots. */
static bool dp__data_is_inside(const dp_loader *loader)
{
    const dp__data_visit *visit = dp__data_visits;
    while (visit != NULL && visit->loader != loader)
        visit = visit->outer;
    return visit != NULL;
}

static const dp__data_deal *dp__data_deal_in(const dp_loader *loader, int64_t epoch)
{
    return epoch == loader->rest_epoch ? &loader->rest : &loader->whole;
}

/* INT64_MAX: endless. Together: as many as the rank with the most samples has, or, as none is to be
   short, the one with the fewest. */
static int64_t dp__data_batches_of(const dp_loader *loader, const dp__data_deal *deal)
{
    int64_t samples = deal->count, batch = loader->config.batch;
    bool drops = loader->config.drop_last;
    if (samples == INT64_MAX)
        return samples;
    if (loader->config.together)
        samples = dp__data_count_of(deal, drops ? deal->of.world - 1 : 0);
    return samples / batch + (!drops && samples % batch > 0);
}

static int64_t dp__data_batches(const dp_loader *loader, int64_t epoch)
{
    return dp__data_batches_of(loader, dp__data_deal_in(loader, epoch));
}

static int64_t dp__data_batch_size(const dp_loader *loader, int64_t epoch, int64_t number)
{
    int64_t batch = loader->config.batch;
    int64_t left = dp__data_deal_in(loader, epoch)->count - number * batch;
    return left < 0 ? 0 : left < batch ? left : batch;
}

static dp_status dp__data_slot_tensors(const dp_loader *loader, dp__data_slot *slot)
{
    const dp_field *fields = loader->config.fields;
    for (size_t i = 0; i < loader->config.field_count; i++) {
        int64_t shape[DP_MAX_DIMS] = {slot->count};
        memcpy(shape + 1, fields[i].shape, (size_t)fields[i].ndim * sizeof *shape);
        DP_TRY(dp_tensor_new(slot->scope, (dp_device){0, 0}, fields[i].dtype, fields[i].ndim + 1,
                             shape, &slot->tensors[i]));
    }
    return DP_OK;
}

static void dp__data_slot_samples(const dp_loader *loader, dp__data_slot *slot)
{
    const dp__data_deal *deal = dp__data_deal_in(loader, slot->epoch);
    int64_t first = slot->number * loader->config.batch;
    for (int64_t i = 0; i < slot->count; i++) {
        bool repeated = deal->of.sampling == DP_SAMPLE_PADDED &&
                        dp__data_position(deal, first + i) >= deal->of.count;
        slot->indices[i] = dp__data_index(deal, slot->epoch, first + i);
        slot->values[i] = dp_none();
        slot->real_count += !repeated;
    }
}

static dp_status dp__data_slot_fill(dp_loader *loader, dp_scope *scope, dp__data_slot **out)
{
    size_t count = (size_t)dp__data_batch_size(loader, loader->ahead_epoch, loader->ahead_number);
    size_t readers = (size_t)loader->reader_count;
    dp__data_slot *slot = dp_scope_alloc(scope, sizeof *slot);
    if (slot == NULL)
        return dp_no_memory();
    *slot = (dp__data_slot){.scope = scope,
                            .epoch = loader->ahead_epoch,
                            .number = loader->ahead_number,
                            .count = (int64_t)count};
    slot->scopes = dp_scope_alloc(scope, readers * sizeof *slot->scopes);
    slot->tensors = dp_scope_alloc(scope, loader->config.field_count * sizeof *slot->tensors);
    slot->values = dp_scope_alloc(scope, count * sizeof *slot->values);
    slot->indices = dp_scope_alloc(scope, count * sizeof *slot->indices);
    if (slot->scopes == NULL || slot->tensors == NULL || slot->values == NULL ||
        slot->indices == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < readers; i++) {
        slot->scopes[i] = dp_scope_child(scope);
        if (slot->scopes[i] == NULL)
            return dp_no_memory();
    }
    DP_TRY(dp__data_slot_tensors(loader, slot));
    dp__data_slot_samples(loader, slot);
    *out = slot;
    return DP_OK;
}

static void dp__data_wake_readers(dp_loader *loader)
{
    for (int i = 0; i < loader->started; i++)
        dp__gate_open(&loader->readers[i].gate);
}

/* Inner scopes end newest first, so the guard becomes the newest again. */
static dp_status dp__data_slot_make(dp_loader *loader)
{
    dp__data_slot *slot = NULL;
    dp_scope *scope = dp_scope_child(loader->scope);
    dp_status status = scope != NULL ? dp__data_slot_fill(loader, scope, &slot) : dp_no_memory();
    if (status == DP_OK)
        status = dp_scope_attach(loader->scope, loader->guard);
    if (status != DP_OK) {
        dp_scope_end(scope);
        return status;
    }
    dp__lock_enter(&loader->lock);
    loader->ring[(loader->first + loader->slot_count) % loader->depth] = slot;
    loader->slot_count++;
    dp__lock_leave(&loader->lock);
    loader->ahead_number++;
    dp__data_wake_readers(loader);
    return DP_OK;
}

/* Slots, until the ring is full or nothing more is known to be wanted. */
static dp_status dp__data_fill(dp_loader *loader)
{
    if (loader->slot_count == 0) {
        loader->ahead_epoch = loader->epoch;
        loader->ahead_number = loader->number;
    }
    while (loader->slot_count < loader->depth) {
        if (loader->ahead_number < dp__data_batches(loader, loader->ahead_epoch)) {
            DP_TRY(dp__data_slot_make(loader));
        } else if (loader->ahead_epoch + 1 < loader->config.epoch_count) {
            loader->ahead_epoch++;
            loader->ahead_number = 0;
        } else {
            return DP_OK;
        }
    }
    return DP_OK;
}

static void dp__data_pop(dp_loader *loader)
{
    dp__lock_enter(&loader->lock);
    loader->first = (loader->first + 1) % loader->depth;
    loader->slot_count--;
    dp__lock_leave(&loader->lock);
}

/* ==== >>reading ================================================================================
   Workers take few samples at a time, so that all of them work on the batch that is due next.   */

/* Whether no reader is in the slot, or will be. Under the lock. */
static bool dp__data_is_done(const dp__data_slot *slot)
{
    return slot->done == slot->begun && (slot->begun == slot->count || slot->forgotten);
}

/* Under the lock. */
static dp__data_slot *dp__data_take(dp_loader *loader, int64_t *out_first, int64_t *out_count)
{
    if (loader->closing)
        return NULL;
    for (int i = 0; i < loader->slot_count; i++) {
        dp__data_slot *slot = loader->ring[(loader->first + i) % loader->depth];
        int64_t left = slot->count - slot->begun;
        if (left == 0 || slot->forgotten)
            continue;
        int64_t some = loader->config.batch / (4 * loader->reader_count);
        *out_first = slot->begun;
        *out_count = some < 1 ? 1 : some > left ? left : some;
        slot->begun += *out_count;
        return slot;
    }
    return NULL;
}

/* A function of the user's cannot report a failure of the job. */
static dp_status dp__data_by_user(dp_status status)
{
    dp_class class_ = dp_status_class(status);
    bool own = status == DP_OK || class_ == DP_CLASS_CALL || class_ == DP_CLASS_PASS;
    return own ? status : DP_ERR_USER;
}

/* The sentence of the first sample that failed is kept. */
static void dp__data_failed(dp_loader *loader, dp__data_slot *slot, int64_t at, dp_status status)
{
    const char *text = dp_last_error();
    dp__lock_enter(&loader->lock);
    if (slot->status == DP_OK || at < slot->failed_at) {
        slot->failed_at = at;
        slot->status = dp__data_by_user(status);
        snprintf(slot->text, sizeof slot->text, "%s",
                 text[0] != '\0' ? text : dp_status_text(slot->status));
    }
    dp__lock_leave(&loader->lock);
}

static void dp__data_read(dp__data_reader *reader, dp__data_slot *slot, int64_t at)
{
    dp_loader *loader = reader->loader;
    const dp__data_deal *deal = dp__data_deal_in(loader, slot->epoch);
    int64_t position = dp__data_position(deal, slot->number * loader->config.batch + at);
    uint64_t key = dp__data_key(deal->of.seed, slot->epoch);
    dp_sample sample = {.index = slot->indices[at],
                        .epoch = slot->epoch,
                        .seed = dp__data_mix(key ^ dp__data_mix((uint64_t)position)),
                        .rows = reader->rows,
                        .scope = slot->scopes[reader->index],
                        .value = dp_none()};
    for (size_t i = 0; i < loader->config.field_count; i++)
        reader->rows[i] = (char *)slot->tensors[i].data + (size_t)at * loader->row_bytes[i];
    (void)dp_error(DP_OK, "%s", ""); /* what is there afterwards is about this sample */
    atomic_store_explicit(&reader->sample, sample.index, memory_order_relaxed);
    atomic_store_explicit(&reader->since, dp__os_coarse_ns(), memory_order_release);
    dp_status status = loader->config.read(&sample, loader->config.user);
    atomic_store_explicit(&reader->since, 0, memory_order_relaxed);
    if (status == DP_OK && sample.value.kind == DP_ERROR)
        status = dp_error((dp_status)sample.value.status, "%s", sample.value.as.s);
    slot->values[at] = sample.value;
    if (status != DP_OK)
        dp__data_failed(loader, slot, at, status);
}

static dp_status dp__data_visit_in(void *user)
{
    const dp__data_visit *visit = user;
    const dp_loader_config *config = &visit->loader->config;
    if (visit->reader == NULL)
        return config->collate(visit->collated->scope, visit->collated->values,
                               (size_t)visit->collated->count, visit->out, config->user);
    for (int64_t i = 0; i < visit->count; i++)
        dp__data_read(visit->reader, visit->slot, visit->first + i);
    return DP_OK;
}

/* Calls functions of the user's, which cannot end what they work with. */
static dp_status dp__data_visit_make(dp__data_visit *visit, dp_scope *scope)
{
    visit->outer = dp__data_visits;
    dp__data_visits = visit;
    dp_status status = dp_scope_guard(scope, "a function of a loader", dp__data_visit_in, visit);
    dp__data_visits = visit->outer;
    return status;
}

/* False: there is nothing to read. */
static bool dp__data_work(dp__data_reader *reader)
{
    dp_loader *loader = reader->loader;
    int64_t first = 0, count = 0;
    dp__lock_enter(&loader->lock);
    dp__data_slot *slot = dp__data_take(loader, &first, &count);
    dp__lock_leave(&loader->lock);
    if (slot == NULL)
        return false;
    dp__data_visit visit = {
        .loader = loader, .reader = reader, .slot = slot, .first = first, .count = count};
    dp_status status = dp__data_visit_make(&visit, slot->scopes[reader->index]);
    if (status != DP_OK) /* the context is closing */
        dp__data_failed(loader, slot, first, status);
    dp__lock_enter(&loader->lock);
    slot->done += count;
    bool done = dp__data_is_done(slot);
    dp__lock_leave(&loader->lock);
    if (done)
        dp__gate_open(&loader->news);
    return true;
}

static void *dp__data_reader_main(void *user)
{
    dp__data_reader *reader = user;
    dp_loader *loader = reader->loader;
    atomic_store(&reader->number, dp__os_thread());
    for (;;) {
        unsigned seen = dp__gate_word(&reader->gate);
        dp__lock_enter(&loader->lock);
        bool closing = loader->closing;
        dp__lock_leave(&loader->lock);
        if (closing)
            return NULL;
        if (!dp__data_work(reader))
            dp__gate_wait(&reader->gate, seen, false);
    }
}

/* Logs which sample a reader has been in for so long, if it is still there. */
static void dp__data_tell(const dp_loader *loader, dp__data_reader *reader, uint64_t ns)
{
    dp_config config;
    char text[160];
    uint64_t since = atomic_load_explicit(&reader->since, memory_order_acquire);
    uint64_t now = dp__os_now_ns();
    int thread = atomic_load(&reader->number);
    if (since == 0 || now < since + ns || dp_config_get(loader->ctx, &config) != DP_OK)
        return;
    snprintf(text, sizeof text,
             "a loader is waited for: its `read` is in sample %lld since %.1f s (thread %d)",
             (long long)atomic_load(&reader->sample), (double)(now - since) * 1e-9, thread);
    if (config.log.fn != NULL && config.log.level >= DP_LOG_WARN)
        config.log.fn(&(dp_log_record){DP_LOG_WARN, dp_rank(loader->ctx), text}, config.log.user);
    dp__os_stack_ask(dp__os_process_id(), thread);
}

/* dp_loader.lookout: tells of those that all wait for. */
static void dp__data_look(void *user, uint64_t waited_ns, bool warns)
{
    const dp_loader *loader = user;
    for (int i = 0; i < loader->started && warns; i++)
        dp__data_tell(loader, &loader->readers[i], waited_ns / 2);
}

static void dp__data_await(dp_loader *loader, const dp__data_slot *slot)
{
    for (;;) {
        unsigned seen = dp__gate_word(&loader->news);
        dp__lock_enter(&loader->lock);
        bool done = dp__data_is_done(slot);
        dp__lock_leave(&loader->lock);
        if (done)
            return;
        dp__gate_watch(&loader->news, seen, false, &loader->lookout);
    }
}

/* Drops all slots, each once no reader is in it. */
static void dp__data_forget(dp_loader *loader)
{
    dp__lock_enter(&loader->lock);
    for (int i = 0; i < loader->slot_count; i++)
        loader->ring[(loader->first + i) % loader->depth]->forgotten = true;
    dp__lock_leave(&loader->lock);
    while (loader->slot_count > 0) {
        dp__data_slot *slot = loader->ring[loader->first];
        dp__data_await(loader, slot);
        dp__data_pop(loader);
        dp_scope_end(slot->scope);
    }
}

/* ==== >>making =================================================================================
   A loader lies in a scope of its own, with its slots. When that ends, in dp_close too, workers
   have to be gone before their slots are: the guard, a scope inside, ends first and sees to it. */

static void dp__data_stop(void *user)
{
    dp_loader *loader = user;
    dp__lock_enter(&loader->lock);
    loader->closing = true;
    dp__lock_leave(&loader->lock);
    dp__data_wake_readers(loader);
    for (int i = 0; i < loader->started; i++) {
        dp__thread_join(loader->readers[i].thread);
        dp__gate_fini(&loader->readers[i].gate);
    }
    dp__gate_fini(&loader->news);
}

static dp_status dp__data_fields_check(const dp_loader_config *config)
{
    for (size_t i = 0; i < config->field_count; i++) {
        const dp_field *field = &config->fields[i];
        bool fits = field->ndim >= 0 && field->ndim < DP_MAX_DIMS;
        dp_tensor row = fits ? dp_wrap(&row, field->dtype, field->ndim, field->shape)
                             : (dp_tensor){0};
        if (field->name == NULL)
            return dp_error(DP_ERR_INVALID, "field %zu has no name", i);
        if (!fits || dp_tensor_count(&row) < 0)
            return dp_error(DP_ERR_INVALID, "field '%s' has an invalid dtype or shape",
                            field->name);
        for (size_t k = 0; k < i; k++)
            if (strcmp(config->fields[k].name, field->name) == 0)
                return dp_error(DP_ERR_INVALID, "fields %zu and %zu are both '%s'", k, i,
                                field->name);
    }
    return DP_OK;
}

static dp_status dp__data_numbers_check(const dp_loader_config *config)
{
    int64_t block = config->sampler.block > 0 ? config->sampler.block : 1;
    if (config->read == NULL)
        return dp_error(DP_ERR_INVALID, "read is NULL");
    if (config->fields == NULL && config->field_count > 0)
        return dp_error(DP_ERR_INVALID, "fields is NULL");
    if (config->batch < 0 || config->batch > INT32_MAX)
        return dp_error(DP_ERR_INVALID, "batch is %lld", (long long)config->batch);
    if ((config->batch > 0 ? config->batch : 1) % block != 0)
        return dp_error(DP_ERR_INVALID, "batch is %lld, no multiple of sampler.block, %lld",
                        (long long)config->batch, (long long)block);
    if (config->worker_count < 0 || config->worker_count > DP__DATA_WORKERS_MAX)
        return dp_error(DP_ERR_INVALID, "worker_count is %d, of at most %d", config->worker_count,
                        DP__DATA_WORKERS_MAX);
    if (config->ahead < 0 || config->ahead > DP__DATA_AHEAD_MAX)
        return dp_error(DP_ERR_INVALID, "ahead is %d, of at most %d", config->ahead,
                        DP__DATA_AHEAD_MAX);
    if (config->epoch_count < 0)
        return dp_error(DP_ERR_INVALID, "epoch_count is %lld", (long long)config->epoch_count);
    return DP_OK;
}

static dp_status dp__data_fields_copy(dp_loader *loader)
{
    size_t count = loader->config.field_count;
    dp_field *fields = dp_scope_alloc(loader->scope, count * sizeof *fields);
    loader->row_bytes = dp_scope_alloc(loader->scope, count * sizeof *loader->row_bytes);
    if (fields == NULL || loader->row_bytes == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < count; i++) {
        fields[i] = loader->config.fields[i];
        fields[i].name = dp_text(dp_string(loader->scope, fields[i].name));
        if (fields[i].name == NULL)
            return dp_no_memory();
        dp_tensor row = dp_wrap(&row, fields[i].dtype, fields[i].ndim, fields[i].shape);
        loader->row_bytes[i] = (size_t)dp_tensor_count(&row) * dp_dtype_bytes(fields[i].dtype);
    }
    loader->config.fields = fields;
    return DP_OK;
}

/* The job's as it is now, if the user has not said another. */
static dp_status dp__data_world(const dp_loader *loader, dp_sampler *sampler)
{
    dp_info info;
    dp_config config;
    if (!loader->of_job)
        return DP_OK;
    DP_TRY(dp_info_get(loader->ctx, &info));
    DP_TRY(dp_config_get(loader->ctx, &config));
    sampler->rank = info.process;
    sampler->world = info.process_count;
    sampler->shards = sampler->shards != 0 ? sampler->shards : config.shards;
    return DP_OK;
}

/* Sets the block so that shards get the same samples on any number of processes. */
static dp_status dp__data_block(dp_loader_config *config)
{
    dp_sampler *sampler = &config->sampler;
    if (sampler->shards <= 0)
        return DP_OK;
    if (sampler->block > 0 && sampler->block != config->batch)
        return dp_error(DP_ERR_INVALID,
                        "sampler.block is %lld and batch %lld: with shards they have to be equal",
                        (long long)sampler->block, (long long)config->batch);
    sampler->block = config->batch;
    return DP_OK;
}

static dp_status dp__data_numbers(dp_loader *loader)
{
    dp_loader_config *config = &loader->config;
    dp_info info;
    DP_TRY(dp_info_get(loader->ctx, &info));
    loader->of_job = config->sampler.world == 0 && config->sampler.rank == 0;
    loader->rest_epoch = -1;
    config->batch = config->batch > 0 ? config->batch : 1;
    DP_TRY(dp__data_world(loader, &config->sampler));
    DP_TRY(dp__data_block(config));
    DP_TRY(dp__data_deal_of(&config->sampler, 0, &loader->whole));
    loader->local_count = (size_t)info.local_count;
    loader->depth = config->worker_count == 0 ? 1 : config->ahead > 0 ? config->ahead : 2;
    loader->reader_count = config->worker_count > 0 ? config->worker_count : 1;
    return DP_OK;
}

static dp_status dp__data_readers_make(dp_loader *loader)
{
    size_t count = (size_t)loader->reader_count, fields = loader->config.field_count;
    void **rows = dp_scope_alloc(loader->scope, count * fields * sizeof *rows);
    loader->ring = dp_scope_alloc(loader->scope, (size_t)loader->depth * sizeof *loader->ring);
    loader->readers = dp_scope_alloc(loader->scope, count * sizeof *loader->readers);
    if (rows == NULL || loader->ring == NULL || loader->readers == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < count; i++)
        loader->readers[i] =
            (dp__data_reader){.loader = loader, .index = (int)i, .rows = rows + i * fields};
    return DP_OK;
}

static dp_status dp__data_readers_start(dp_loader *loader)
{
    for (int i = 0; i < loader->config.worker_count; i++) {
        dp__data_reader *reader = &loader->readers[i];
        dp__gate_init(&reader->gate);
        int failed = dp__thread_start(&reader->thread, dp__data_reader_main, reader);
        if (failed != 0) {
            dp__gate_fini(&reader->gate);
            return dp_error(DP_ERR_NO_MEMORY, "cannot start worker %d of %d: %s", i,
                            loader->config.worker_count, dp__os_why_text(failed));
        }
        loader->started++;
    }
    return DP_OK;
}

static dp_status dp__data_loader_make(dp_ctx *ctx, const dp_loader_config *config, dp_scope *scope,
                                      dp_loader **out)
{
    dp_config of_ctx;
    dp_loader *loader = dp_scope_alloc(scope, sizeof *loader);
    if (loader == NULL)
        return dp_no_memory();
    DP_TRY(dp_config_get(ctx, &of_ctx));
    uint64_t warn_ns = (uint64_t)of_ctx.timeout_ms * 250000;
    *loader = (dp_loader){.ctx = ctx,
                          .scope = scope,
                          .config = *config,
                          .lock = DP__LOCK_INITIALIZER,
                          .lookout = {dp__data_look, loader, warn_ns},
                          .fork_count = dp__os_fork_count()};
    DP_TRY(dp__data_numbers(loader));
    DP_TRY(dp__data_fields_copy(loader));
    DP_TRY(dp__data_readers_make(loader));
    loader->guard = dp_scope_child(scope);
    if (loader->guard == NULL)
        return dp_no_memory();
    DP_TRY(dp_scope_defer(loader->guard, dp__data_stop, loader));
    dp__gate_init(&loader->news);
    *out = loader;
    return dp__data_readers_start(loader);
}

DP_API dp_status dp_loader_create(dp_ctx *ctx, const dp_loader_config *config, dp_loader **out)
{
    dp_info info;
    dp_loader *loader = NULL;
    DP_TRY(dp_check_pointer(__func__, "config", config));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    DP_TRY(dp_info_get(ctx, &info));
    DP_TRY(dp_error_in(__func__, dp__data_numbers_check(config)));
    DP_TRY(dp_error_in(__func__, dp__data_fields_check(config)));
    dp_scope *scope = dp_scope_begin(ctx);
    DP_TRY(dp_scope_check(scope));
    dp_status status = dp__data_loader_make(ctx, config, scope, &loader);
    if (status == DP_OK)
        *out = loader;
    else
        dp_scope_end(scope);
    return dp_error_in(__func__, status);
}

static dp_status dp__data_usable(const char *fn, const dp_loader *loader)
{
    DP_TRY(dp_check_pointer(fn, "loader", loader));
    if (dp__data_is_inside(loader))
        return dp_error(DP_ERR_STATE, "%s: a function that the loader has called called this", fn);
    return DP_OK;
}

DP_API void dp_loader_destroy(dp_loader *loader)
{
    if (loader != NULL && dp__data_usable(__func__, loader) == DP_OK)
        dp_scope_end(loader->scope);
}

/* ==== >>giving =================================================================================
   The first slot of the ring is given next.                                                     */

/* Without workers. The thread's sentence is kept; those of samples are in the slot. */
static void dp__data_read_here(dp_loader *loader)
{
    char text[DP__DATA_TEXT];
    snprintf(text, sizeof text, "%s", dp_last_error());
    while (dp__data_work(&loader->readers[0]))
        continue;
    (void)dp_error(DP_OK, "%s", text);
}

static bool dp__data_has_values(const dp__data_slot *slot)
{
    for (int64_t i = 0; i < slot->count; i++)
        if (slot->values[i].kind != DP_NONE)
            return true;
    return false;
}

/* In groups for the local devices; with shards each group has as many samples as a device gets of a
   tensor's rows, in a short batch too. */
static dp_status dp__data_collate(const dp_loader *loader, const dp__data_slot *slot, dp_value *out)
{
    size_t count = (size_t)slot->count, devices = loader->local_count;
    size_t full = ((size_t)loader->config.batch - 1) / devices + 1;
    bool shards = loader->config.sampler.shards > 0;
    return shards ? dp_collate_parts(slot->scope, slot->values, count, devices, out)
                  : dp_collate(slot->scope, slot->values, count, full, out);
}

static dp_status dp__data_collate_slot(const dp_loader *loader, const dp__data_slot *slot,
                                       dp_value *out)
{
    dp__data_visit visit = {.loader = loader, .collated = slot, .out = out};
    if (loader->config.collate == NULL)
        return dp__data_collate(loader, slot, out);
    dp_status status = dp__data_visit_make(&visit, slot->scope);
    return dp__data_by_user(status == DP_OK ? dp_made(*out, out) : status);
}

/* The value of a batch: the fields, then what collate made. An empty one has none. */
static dp_status dp__data_compose(const dp_loader *loader, const dp__data_slot *slot, dp_value *out)
{
    size_t fields = loader->config.field_count, more = 0;
    dp_value made = dp_none();
    *out = made;
    if (slot->count == 0)
        return DP_OK;
    if (fields == 0 || dp__data_has_values(slot)) {
        DP_TRY(dp__data_collate_slot(loader, slot, &made));
        *out = made;
        if (fields == 0)
            return DP_OK;
        if (made.kind != DP_DICT)
            return dp_error(DP_ERR_INVALID, "beside fields, what is collated has to be a dict");
        more = dp_count(made);
    }
    dp_pair *pairs = dp_scope_alloc(slot->scope, (fields + more) * sizeof *pairs);
    if (pairs == NULL)
        return dp_no_memory();
    for (size_t i = 0; i < fields; i++)
        pairs[i] = (dp_pair){loader->config.fields[i].name, dp_of(slot->scope, &slot->tensors[i])};
    for (size_t i = 0; i < more; i++)
        pairs[fields + i] = (dp_pair){dp_key_at(made, i), dp_at(made, i)};
    return dp_made(dp_dict_make(slot->scope, pairs, fields + more), out);
}

/* The batch is lost, and the next one comes next. */
static dp_status dp__data_spoilt(dp_loader *loader, dp__data_slot *slot, dp_status status)
{
    char text[DP__DATA_TEXT + 40];
    if (slot->status != DP_OK)
        snprintf(text, sizeof text, "sample %lld: %s", (long long)slot->indices[slot->failed_at],
                 slot->text);
    else
        snprintf(text, sizeof text, "%s", dp_last_error());
    long long epoch = (long long)slot->epoch, number = (long long)slot->number;
    dp__data_pop(loader);
    dp_scope_end(slot->scope);
    loader->number++;
    return dp_error(status, "epoch %lld, batch %lld: %s", epoch, number, text);
}

/* Begins a batch in place of the one that was given. Without memory it is tried again later. */
static void dp__data_go_on(dp_loader *loader)
{
    char text[DP__DATA_TEXT];
    snprintf(text, sizeof text, "%s", dp_last_error());
    if (loader->config.worker_count > 0 && dp__data_fill(loader) != DP_OK)
        (void)dp_error(DP_OK, "%s", text);
}

static dp_status dp__data_next(dp_loader *loader, dp_scope *scope, dp_batch *out)
{
    dp_value value;
    DP_TRY(dp__data_fill(loader));
    dp__data_slot *slot = loader->ring[loader->first];
    if (loader->config.worker_count == 0)
        dp__data_read_here(loader);
    dp__data_await(loader, slot);
    dp_status status = slot->status;
    if (status == DP_OK)
        status = dp__data_compose(loader, slot, &value);
    if (status != DP_OK && (slot->status != DP_OK || status != DP_ERR_NO_MEMORY))
        return dp__data_spoilt(loader, slot, status);
    DP_TRY(status);
    DP_TRY(dp_scope_attach(scope, slot->scope));
    *out = (dp_batch){.value = value,
                      .count = slot->count,
                      .real_count = slot->real_count,
                      .indices = slot->indices,
                      .epoch = slot->epoch,
                      .number = slot->number};
    dp__data_pop(loader);
    loader->number++;
    dp__data_go_on(loader);
    return DP_OK;
}

static void dp__data_end(dp_loader *loader, dp_batch *out)
{
    *out = (dp_batch){
        .value = dp_none(), .ended = true, .epoch = loader->epoch, .number = loader->number};
    if (loader->config.epoch_count > 0 && loader->epoch + 1 >= loader->config.epoch_count)
        return;
    loader->epoch++;
    loader->number = 0;
}

static dp_status dp__data_alive(const char *fn, const dp_loader *loader)
{
    dp_failure_info failure;
    DP_TRY(dp__data_usable(fn, loader));
    if (loader->fork_count != dp__os_fork_count())
        return dp_error(DP_ERR_STATE, "%s: the loader belongs to the parent process", fn);
    if (dp_failure(loader->ctx, &failure))
        return dp_error(failure.status, "%s: the job failed: %s", fn, failure.text);
    return DP_OK;
}

DP_API dp_status dp_loader_next(dp_loader *loader, dp_scope *scope, dp_batch *out)
{
    DP_TRY(dp__data_alive(__func__, loader));
    DP_TRY(dp_check_scope(__func__, scope, loader->ctx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    if (loader->number >= dp__data_batches(loader, loader->epoch)) {
        dp__data_end(loader, out);
        return DP_OK;
    }
    dp_trace_begin(__func__);
    atomic_int *inside = &loader->ctx->inside; /* dp_close waits for workers, but for no caller */
    atomic_fetch_add_explicit(inside, 1, memory_order_relaxed);
    dp_doing(loader->ctx, __func__);
    dp_status status = dp__data_next(loader, scope, out);
    dp_doing(loader->ctx, NULL);
    atomic_fetch_sub_explicit(inside, 1, memory_order_relaxed);
    dp_trace_end();
    return dp_error_in(__func__, status);
}

/* ==== >>keeping ================================================================================
   A place is counted in samples of all ranks, so that it fits any number of them.               */

DP_API dp_status dp_loader_info_get(const dp_loader *loader, dp_loader_info *out)
{
    DP_TRY(dp_check_pointer(__func__, "loader", loader));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    *out = (dp_loader_info){.epoch = loader->epoch,
                            .number = loader->number,
                            .batch_count = dp__data_batches(loader, loader->epoch),
                            .sample_count = dp__data_deal_in(loader, loader->epoch)->count};
    return DP_OK;
}

static dp_status dp__data_place_check(const dp_loader *loader, const dp__data_deal *deal,
                                      int64_t epoch, int64_t number)
{
    int64_t epochs = loader->config.epoch_count, most = dp__data_batches_of(loader, deal);
    if (most == INT64_MAX) /* endless: as many as can be counted */
        most = DP__DATA_COUNT_MAX / deal->of.world / loader->config.batch / 2;
    if (epoch < 0 || epoch > DP__DATA_COUNT_MAX || (epochs > 0 && epoch >= epochs) ||
        (epoch > 0 && deal->of.sampling == DP_SAMPLE_ENDLESS))
        return dp_error(DP_ERR_INVALID, "there is no epoch %lld", (long long)epoch);
    if (number < 0 || number > most)
        return dp_error(DP_ERR_INVALID, "batch %lld of %lld", (long long)number, (long long)most);
    return DP_OK;
}

static dp_status dp__data_seek(dp_loader *loader, int64_t epoch, int64_t number)
{
    DP_TRY(dp__data_place_check(loader, dp__data_deal_in(loader, epoch), epoch, number));
    dp__data_forget(loader);
    loader->epoch = epoch;
    loader->number = number;
    return DP_OK;
}

DP_API dp_status dp_loader_seek(dp_loader *loader, int64_t epoch, int64_t number)
{
    DP_TRY(dp__data_alive(__func__, loader));
    return dp_error_in(__func__, dp__data_seek(loader, epoch, number));
}

DP_API dp_status dp_loader_save(const dp_loader *loader, dp_scope *scope, dp_value *out)
{
    DP_TRY(dp_check_pointer(__func__, "loader", loader));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    const dp__data_deal *deal = dp__data_deal_in(loader, loader->epoch);
    const dp_sampler *sampler = &deal->of;
    int64_t done = loader->number * loader->config.batch * sampler->world;
    const dp_pair pairs[] = {
        {"epoch", dp_int(loader->epoch)},
        {"samples", dp_int(deal->first + done)},
        {"ended", dp_bool(loader->number == dp__data_batches(loader, loader->epoch))},
        {"count", dp_int(sampler->count)},
        {"seed", dp_int((int64_t)sampler->seed)},
        {"in_order", dp_bool(sampler->in_order)},
        {"endless", dp_bool(sampler->sampling == DP_SAMPLE_ENDLESS)}};
    return dp_error_in(__func__,
                       dp_made(dp_dict_make(scope, pairs, sizeof pairs / sizeof pairs[0]), out));
}

static dp_status dp__data_saved(dp_value saved, const char *key, dp_kind kind, int64_t *out)
{
    dp_value value = dp_get(saved, key);
    if (value.kind != kind)
        return dp_error(DP_ERR_MISMATCH, "'%s' is missing, or no %s", key,
                        kind == DP_INT ? "number" : "bool");
    *out = kind == DP_INT ? value.as.i : value.as.b;
    return DP_OK;
}

static dp_status dp__data_load_check(const dp_loader *loader, dp_value saved)
{
    const dp_sampler *sampler = &loader->whole.of;
    const struct {
        const char *key;
        dp_kind kind;
        int64_t own;
    } same[] = {{"count", DP_INT, sampler->count},
                {"seed", DP_INT, (int64_t)sampler->seed},
                {"in_order", DP_BOOLEAN, sampler->in_order},
                {"endless", DP_BOOLEAN, sampler->sampling == DP_SAMPLE_ENDLESS}};
    int64_t there = 0;
    for (size_t i = 0; i < sizeof same / sizeof same[0]; i++) {
        DP_TRY(dp__data_saved(saved, same[i].key, same[i].kind, &there));
        if (there != same[i].own)
            return dp_error(DP_ERR_MISMATCH, "'%s' is %lld, saved %lld", same[i].key,
                            (long long)same[i].own, (long long)there);
    }
    return DP_OK;
}

/* By the world as it is now. What is left after so many samples begins with a batch of all ranks,
   or is dealt by itself. */
static dp_status dp__data_deal_again(dp_loader *loader, int64_t epoch, int64_t samples, bool ended)
{
    dp_sampler sampler = loader->config.sampler;
    dp__data_deal whole, rest;
    DP_TRY(dp__data_world(loader, &sampler));
    DP_TRY(dp__data_deal_of(&sampler, 0, &whole));
    int64_t all = loader->config.batch * whole.of.world;
    bool endless = sampler.sampling == DP_SAMPLE_ENDLESS, begins = ended || samples % all == 0;
    if (samples < 0 || samples > DP__DATA_COUNT_MAX / 2 ||
        (!begins && !endless && samples > sampler.count))
        return dp_error(DP_ERR_MISMATCH, "'samples' is %lld, of %lld", (long long)samples,
                        (long long)sampler.count);
    DP_TRY(dp__data_deal_of(&sampler, begins ? 0 : samples, &rest));
    int64_t number = ended ? dp__data_batches_of(loader, &whole) : begins ? samples / all : 0;
    DP_TRY(dp__data_place_check(loader, &rest, epoch, number));
    dp__data_forget(loader);
    loader->config.sampler = sampler;
    loader->whole = whole;
    loader->rest = rest;
    loader->rest_epoch = begins ? -1 : epoch;
    loader->epoch = epoch;
    loader->number = number;
    return DP_OK;
}

static dp_status dp__data_load(dp_loader *loader, dp_value saved)
{
    int64_t epoch = 0, samples = 0, ended = 0;
    DP_TRY(dp__data_load_check(loader, saved));
    DP_TRY(dp__data_saved(saved, "epoch", DP_INT, &epoch));
    DP_TRY(dp__data_saved(saved, "samples", DP_INT, &samples));
    DP_TRY(dp__data_saved(saved, "ended", DP_BOOLEAN, &ended));
    return dp__data_deal_again(loader, epoch, samples, ended != 0);
}

DP_API dp_status dp_loader_load(dp_loader *loader, dp_value saved)
{
    DP_TRY(dp__data_alive(__func__, loader));
    return dp_error_in(__func__, dp__data_load(loader, saved));
}

DP_API dp_status dp_loader_resume(dp_loader *loader, int64_t epoch, int64_t samples)
{
    DP_TRY(dp__data_alive(__func__, loader));
    const dp_sampler *sampler = &loader->whole.of;
    bool ends = sampler->sampling != DP_SAMPLE_ENDLESS && samples >= sampler->count;
    if (samples < 0 || (ends && samples > sampler->count))
        return dp_error(DP_ERR_INVALID, "%s: samples is %lld, of %lld", __func__,
                        (long long)samples, (long long)sampler->count);
    return dp_error_in(__func__, dp__data_deal_again(loader, epoch, samples, ends));
}

/* ==== >>rows ===================================================================================
   The header is read when a file is opened, rows when they are asked for.                       */

enum { DP__DATA_IDX_NAME = 64, DP__DATA_IDX_HEAD = 4 };

struct dp_idx {
    dp_scope *scope;
    int file;
    uint64_t data_at;
    dp_idx_info info;
    char name[DP__DATA_IDX_NAME]; /* the end of its path; for sentences */
};

static void dp__data_idx_end(void *user)
{
    const dp_idx *idx = user;
    dp__os_close(idx->file);
}

static uint32_t dp__data_big_endian(const unsigned char *bytes)
{
    return (uint32_t)bytes[0] << 24 | (uint32_t)bytes[1] << 16 | (uint32_t)bytes[2] << 8 | bytes[3];
}

static dp_status dp__data_idx_form(dp_idx *idx, const unsigned char *head, uint64_t count)
{
    static const struct {
        unsigned char code;
        dp_dtype dtype;
    } codes[] = {{0x08, DP_U8},  {0x09, DP_I8},  {0x0b, DP_I16},
                 {0x0c, DP_I32}, {0x0d, DP_F32}, {0x0e, DP_F64}};
    dp_idx_info *info = &idx->info;
    info->dtype = DP_DTYPE_ANY;
    for (size_t i = 0; i < sizeof codes / sizeof codes[0]; i++)
        if (codes[i].code == head[2])
            info->dtype = codes[i].dtype;
    info->ndim = head[3];
    idx->data_at = DP__DATA_IDX_HEAD * (1 + (uint64_t)info->ndim);
    if (head[0] == 0x1f && head[1] == 0x8b)
        return dp_error(DP_ERR_UNSUPPORTED, "it is compressed: gunzip it");
    if (head[0] != 0 || head[1] != 0)
        return dp_error(DP_ERR_FILE, "it is not an IDX file");
    if (info->dtype == DP_DTYPE_ANY || info->ndim == 0 || info->ndim > DP_MAX_DIMS ||
        idx->data_at > count)
        return dp_error(DP_ERR_FILE, "type %d in %d dims is not what IDX files have", head[2],
                        head[3]);
    for (int d = 0; d < info->ndim; d++)
        info->shape[d] = dp__data_big_endian(head + DP__DATA_IDX_HEAD * (size_t)(1 + d));
    return DP_OK;
}

/* The file has exactly what its header says. */
static dp_status dp__data_idx_fits(dp_idx *idx, uint64_t left)
{
    dp_idx_info *info = &idx->info;
    uint64_t bytes = dp_dtype_bytes(info->dtype), rows = (uint64_t)info->shape[0];
    for (int d = 1; d < info->ndim; d++) {
        if (info->shape[d] > 0 && bytes > INT64_MAX / (uint64_t)info->shape[d])
            return dp_error(DP_ERR_FILE, "a row is larger than any file");
        bytes *= (uint64_t)info->shape[d];
    }
    info->row_bytes = (size_t)bytes;
    if (bytes == 0 ? left != 0 : left % bytes != 0 || left / bytes != rows)
        return dp_error(
            DP_ERR_FILE, "its header says %llu rows of %llu bytes, there are %llu bytes",
            (unsigned long long)rows, (unsigned long long)bytes, (unsigned long long)left);
    return DP_OK;
}

static dp_status dp__data_idx_read(dp_idx *idx, uint64_t bytes)
{
    unsigned char head[DP__DATA_IDX_HEAD * (1 + DP_MAX_DIMS)] = {0};
    uint64_t count = bytes < sizeof head ? bytes : sizeof head;
    if (!dp__os_file_get_at(idx->file, head, (size_t)count, 0))
        return dp_error(DP_ERR_FILE, "it cannot be read");
    if (bytes < DP__DATA_IDX_HEAD)
        return dp_error(DP_ERR_FILE, "%llu bytes are not an IDX file", (unsigned long long)bytes);
    DP_TRY(dp__data_idx_form(idx, head, count));
    return dp__data_idx_fits(idx, bytes - idx->data_at);
}

static dp_status dp__data_idx_make(dp_scope *scope, const char *path, dp_idx **out)
{
    uint64_t bytes = 0;
    dp_idx *idx = dp_scope_alloc(scope, sizeof *idx);
    if (idx == NULL)
        return dp_no_memory();
    const char *slash = strrchr(path, '/');
    *idx = (dp_idx){.scope = scope};
    snprintf(idx->name, sizeof idx->name, "%s", slash != NULL ? slash + 1 : path);
    DP_TRY(dp__os_file_open(path, &idx->file, &bytes));
    dp_status status = dp__data_idx_read(idx, bytes);
    if (status == DP_OK)
        status = dp_scope_defer(scope, dp__data_idx_end, idx);
    if (status == DP_OK)
        *out = idx;
    else
        dp__os_close(idx->file);
    return status;
}

DP_API dp_status dp_idx_open(dp_ctx *ctx, const char *path, dp_idx **out)
{
    dp_idx *idx = NULL;
    DP_TRY(dp_check_ctx(__func__, ctx));
    DP_TRY(dp__os_check_path(__func__, path));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    dp_scope *scope = dp_scope_begin(ctx);
    DP_TRY(dp_scope_check(scope));
    dp_status status = dp__data_idx_make(scope, path, &idx);
    if (status == DP_OK)
        *out = idx;
    else
        dp_scope_end(scope);
    return dp__os_named(__func__, path, status);
}

DP_API void dp_idx_close(dp_idx *idx)
{
    if (idx != NULL)
        dp_scope_end(idx->scope);
}

DP_API dp_status dp_idx_info_get(const dp_idx *idx, dp_idx_info *out)
{
    DP_TRY(dp_check_pointer(__func__, "idx", idx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    *out = idx->info;
    return DP_OK;
}

static void dp__data_turn(unsigned char *bytes, size_t each, size_t count)
{
    const uint16_t one = 1;
    bool little = *(const unsigned char *)&one == 1;
    for (; little && count > 0; count--, bytes += each)
        for (size_t i = 0; i < each / 2; i++) {
            unsigned char byte = bytes[i];
            bytes[i] = bytes[each - 1 - i];
            bytes[each - 1 - i] = byte;
        }
}

DP_API dp_status dp_idx_row(const dp_idx *idx, int64_t row, void *out)
{
    DP_TRY(dp_check_pointer(__func__, "idx", idx));
    DP_TRY(dp_check_pointer(__func__, "out", out));
    const dp_idx_info *info = &idx->info;
    size_t bytes = info->row_bytes, each = dp_dtype_bytes(info->dtype);
    if (row < 0 || row >= info->shape[0])
        return dp_error(DP_ERR_INVALID, "%s: '%s': row %lld of %lld", __func__, idx->name,
                        (long long)row, (long long)info->shape[0]);
    if (!dp__os_file_get_at(idx->file, out, bytes, idx->data_at + (uint64_t)row * bytes))
        return dp_error(DP_ERR_FILE, "%s: '%s': row %lld cannot be read", __func__, idx->name,
                        (long long)row);
    dp__data_turn(out, each, bytes / each);
    return DP_OK;
}
#endif /* DP_IMPLEMENTATION && !DP_DATA_IMPLEMENTED */
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
