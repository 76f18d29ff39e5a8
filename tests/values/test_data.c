/* test_data.c - dp_data.h: samplers, the loader, collating, preparing. */

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "tree.h"
/* clang-format off */
#include "dp_data.h"
/* clang-format on */

/* ---- samplers -------------------------------------------------------------------------------- */

/* All positions of a rank, with blanks between. */
static const char *dealt(const dp_sampler *sampler, int64_t epoch, int64_t most)
{
    static char text[512];
    size_t at = 0;
    int64_t count = dp_sampler_count(sampler);
    CHECK(count >= 0);
    text[0] = '\0';
    for (int64_t i = 0; i < count && i < most; i++) {
        int64_t index = dp_sampler_index(sampler, epoch, i);
        CHECK(index >= 0);
        at += (size_t)snprintf(text + at, sizeof text - at, "%s%lld", i > 0 ? " " : "",
                               (long long)index);
    }
    return text;
}

typedef struct deal_row {
    dp_sampler sampler; /* of rank 0 */
    const char *want[5];
} deal_row;

/* clang-format off */
static const deal_row deals[] = {
    {{.count = 10, .world = 4}, {"0 4 8", "1 5 9", "2 6 0", "3 7 1"}},
    {{.count = 10, .world = 4, .sampling = DP_SAMPLE_DROP}, {"0 4", "1 5", "2 6", "3 7"}},
    {{.count = 10, .world = 4, .sampling = DP_SAMPLE_EXACT}, {"0 4 8", "1 5 9", "2 6", "3 7"}},
    {{.count = 8, .world = 4}, {"0 4", "1 5", "2 6", "3 7"}},
    {{.count = 2, .world = 5}, {"0", "1", "0", "1", "0"}},
    {{.count = 2, .world = 5, .sampling = DP_SAMPLE_DROP}, {"", "", "", "", ""}},
    {{.count = 2, .world = 5, .sampling = DP_SAMPLE_EXACT}, {"0", "1", "", "", ""}},
    {{.count = 0, .world = 2}, {"", ""}},
    {{.count = 0, .world = 2, .sampling = DP_SAMPLE_DROP}, {"", ""}},
    {{.count = 0, .world = 2, .sampling = DP_SAMPLE_EXACT}, {"", ""}},
    {{.count = 1}, {"0"}},
    {{.count = 3}, {"0 1 2"}},
    {{.count = 14, .world = 2, .block = 3}, {"0 1 2 6 7 8 12", "3 4 5 9 10 11 13"}},
    {{.count = 15, .world = 2, .block = 3}, {"0 1 2 6 7 8 12 13", "3 4 5 9 10 11 14 0"}},
    {{.count = 15, .world = 2, .block = 3, .sampling = DP_SAMPLE_EXACT},
     {"0 1 2 6 7 8 12 13", "3 4 5 9 10 11 14"}},
    {{.count = 15, .world = 2, .block = 3, .sampling = DP_SAMPLE_DROP},
     {"0 1 2 6 7 8 12", "3 4 5 9 10 11 13"}},
    {{.count = 5, .world = 3, .block = 4, .sampling = DP_SAMPLE_EXACT}, {"0 1", "2 3", "4"}},
    {{.count = 3, .world = 2, .sampling = DP_SAMPLE_ENDLESS}, {"0 2 1 0 2 1 0", "1 0 2 1 0 2 1"}},
    {{.count = 3, .world = 2, .sampling = DP_SAMPLE_ENDLESS, .block = 2},
     {"0 1 1 2 2 0 0", "2 0 0 1 1 2 2"}},
    {{.count = 1, .world = 2, .sampling = DP_SAMPLE_ENDLESS}, {"0 0 0 0 0 0 0", "0 0 0 0 0 0 0"}},
};
/* clang-format on */

TEST(samples_are_dealt_as_torch_does)
{
    for (size_t i = 0; i < sizeof deals / sizeof deals[0]; i++)
        for (int rank = 0; rank < 5 && deals[i].want[rank] != NULL; rank++) {
            dp_sampler sampler = deals[i].sampler;
            sampler.rank = rank;
            sampler.in_order = true;
            CHECK_STR(dealt(&sampler, 0, 7 + 2 * (sampler.sampling != DP_SAMPLE_ENDLESS)),
                      deals[i].want[rank]);
        }
}

/* What the ranks have together. */
static void count_epoch(dp_sampler sampler, int64_t epoch, int *times)
{
    int world = sampler.world > 0 ? sampler.world : 1;
    for (sampler.rank = 0; sampler.rank < world; sampler.rank++)
        for (int64_t i = 0; i < dp_sampler_count(&sampler); i++)
            times[dp_sampler_index(&sampler, epoch, i)]++;
}

TEST(every_sample_is_counted_once)
{
    enum { MOST = 300 };
    for (int count = 1; count <= MOST; count += count < 70 ? 1 : 115)
        for (int world = 1; world <= 7; world += 3) {
            int times[MOST] = {0};
            count_epoch((dp_sampler){.count = count,
                                     .world = world,
                                     .sampling = DP_SAMPLE_EXACT,
                                     .seed = (uint64_t)count,
                                     .block = count % 4},
                        world, times);
            for (int i = 0; i < count; i++)
                CHECK_INT(times[i], 1);
        }
}

/* Padded: all at least once, and equally many each; dropped: none twice. */
TEST(ranks_have_equally_many)
{
    for (int64_t count = 1; count < 40; count++)
        for (int drop = 0; drop < 2; drop++) {
            int times[40] = {0};
            dp_sampler sampler = {
                .count = count, .world = 6, .sampling = drop ? DP_SAMPLE_DROP : DP_SAMPLE_PADDED};
            count_epoch(sampler, 3, times);
            for (int i = 0; i < count; i++)
                CHECK(drop ? times[i] <= 1 : times[i] >= 1);
            for (sampler.rank = 0; sampler.rank < 6; sampler.rank++)
                CHECK_INT(dp_sampler_count(&sampler), drop ? count / 6 : (count + 5) / 6);
        }
}

/* The same on every machine: what is in a checkpoint means the same order there. */
TEST(orders_are_the_same_everywhere)
{
    CHECK_STR(dealt(&(dp_sampler){.count = 10}, 0, 10), "0 4 3 9 5 6 1 8 7 2");
    CHECK_STR(dealt(&(dp_sampler){.count = 10}, 1, 10), "9 2 6 0 5 3 8 1 7 4");
    CHECK_STR(dealt(&(dp_sampler){.count = 10, .seed = 1}, 0, 10), "5 3 9 0 4 8 6 1 7 2");
    CHECK_STR(dealt(&(dp_sampler){.count = INT64_C(1) << 62, .seed = 7}, 5, 3),
              "1013519631979369322 1473532953250305112 358173965035808569");
    CHECK_STR(dealt(&(dp_sampler){.count = 3, .sampling = DP_SAMPLE_ENDLESS}, 0, 9),
              "2 0 1 1 2 0 0 2 1");
}

/* An endless order is that of one epoch after another. */
TEST(an_endless_sampler_goes_on)
{
    dp_sampler endless = {.count = 5, .sampling = DP_SAMPLE_ENDLESS, .seed = 3}, one = endless;
    one.sampling = DP_SAMPLE_EXACT;
    for (int64_t i = 0; i < 25; i++)
        CHECK_INT(dp_sampler_index(&endless, 0, i), dp_sampler_index(&one, i / 5, i % 5));
    CHECK_INT(dp_sampler_count(&endless), INT64_MAX);
    CHECK_INT(dp_sampler_index(&endless, 1, 0), -1);
    CHECK_SAYS(dp_last_error(), "dp_sampler_index: epoch is 1, and an endless sampler has only");
}

/* Each of the n! orders comes about as often as the others. */
TEST(no_order_is_favoured)
{
    enum { MOST = 5, SEEDS = 12000 };
    for (int count = 2, orders = 2; count <= MOST; orders *= ++count) {
        int times[120] = {0};
        for (uint64_t seed = 0; seed < SEEDS; seed++) {
            const dp_sampler sampler = {.count = count, .seed = seed};
            int64_t order[MOST], number = 0;
            for (int i = 0; i < count; i++)
                order[i] = dp_sampler_index(&sampler, 1, i);
            for (int i = 0; i < count; i++) {
                int smaller = 0;
                for (int k = i + 1; k < count; k++)
                    smaller += order[k] < order[i];
                number = number * (count - i) + smaller;
            }
            times[number]++;
        }
        double square = 0, want = (double)SEEDS / orders;
        for (int i = 0; i < orders; i++)
            square += ((double)times[i] - want) * ((double)times[i] - want) / want;
        CHECK(square < orders - 1 + 5 * sqrt(2.0 * (orders - 1))); /* five sigmas */
    }
}

TEST(samplers_that_make_no_sense)
{
    static const struct {
        const char *text;
        dp_sampler sampler;
    } rows[] = {{"sampler.count is -1", {.count = -1}},
                {"sampler.count is 46", {.count = (INT64_C(1) << 62) + 1}},
                {"sampler.rank is 1 of 1", {.count = 1, .rank = 1, .world = 1}},
                {"sampler.rank is 1 of 0", {.count = 1, .rank = 1}},
                {"sampler.rank is -1 of 2", {.count = 1, .rank = -1, .world = 2}},
                {"sampler.rank is 0 of -2", {.count = 1, .world = -2}},
                {"sampler.sampling is 4", {.count = 1, .sampling = (dp_sampling)4}},
                {"sampler.block is -1", {.count = 1, .block = -1}},
                {"sampler.block is 2147483648", {.count = 1, .block = INT64_C(1) << 31}},
                {"sampler.shards is -2", {.count = 1, .shards = -2}},
                {"sampler.shards is 6, no multiple of 4 ranks",
                 {.count = 1, .world = 4, .block = 3, .shards = 6}},
                {"sampler.block, or a loader's batch, is 6: no multiple of a rank's 4 shards",
                 {.count = 1, .world = 2, .block = 6, .shards = 8}},
                {"sampler.block, or a loader's batch, is 1: no multiple of a rank's 8 shards",
                 {.count = 1, .shards = 8}},
                {"sampler.count is 0", {.sampling = DP_SAMPLE_ENDLESS}}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        CHECK_INT(dp_sampler_count(&rows[i].sampler), -1);
        CHECK_SAYS(dp_last_error(), rows[i].text);
        CHECK_INT(dp_sampler_index(&rows[i].sampler, 0, 0), -1);
        CHECK_SAYS(dp_last_error(), rows[i].text);
        CHECK_SAYS(dp_last_error(), "dp_sampler_index: ");
    }
    CHECK_INT(dp_sampler_count(NULL), -1);
    CHECK_SAYS(dp_last_error(), "dp_sampler_count: sampler is NULL");
    const dp_sampler three = {.count = 3}, endless = {.count = 3, .sampling = DP_SAMPLE_ENDLESS};
    CHECK_INT(dp_sampler_index(&three, -1, 0), -1);
    CHECK_SAYS(dp_last_error(), "epoch is -1");
    CHECK_INT(dp_sampler_index(&three, 0, 3), -1);
    CHECK_SAYS(dp_last_error(), "position is 3 of 3");
    CHECK_INT(dp_sampler_index(&three, 0, -1), -1);
    CHECK_SAYS(dp_last_error(), "position is -1 of 3");
    CHECK_INT(dp_sampler_index(&endless, 0, INT64_C(1) << 62), -1);
    CHECK(dp_sampler_index(&endless, 0, (INT64_C(1) << 62) - 2) >= 0);
}

/* ---- samplers that deal by shards ------------------------------------------------------------ */

enum { SHARDS = 8, SHARE = 80 };

typedef struct shares { /* what each shard gets of an epoch, batch after batch */
    int64_t of[SHARDS][SHARE];
    int count[SHARDS];
} shares;

static void share_add(shares *all, int shard, int64_t index)
{
    CHECK(all->count[shard] < SHARE);
    all->of[shard][all->count[shard]++] = index;
}

/* By the manual: of each batch for all, its rows as dp_split_rows divides them. */
static void share_rows(shares *all, const dp_sampler *sampler, int64_t batch, int64_t positions)
{
    dp_sampler whole = {.count = sampler->count,
                        .seed = sampler->seed,
                        .sampling = sampler->sampling == DP_SAMPLE_ENDLESS ? DP_SAMPLE_ENDLESS
                                                                           : DP_SAMPLE_EXACT};
    for (int64_t first = 0; first < positions; first += batch) {
        int64_t left = positions - first, rows[SHARDS], at = first;
        size_t parts = 0;
        CHECK_OK(dp_split_rows(left < batch ? left : batch, (size_t)sampler->shards, NULL, rows,
                               &parts));
        for (int shard = 0; shard < sampler->shards; shard++)
            for (int64_t i = 0; i < rows[shard]; i++, at++)
                share_add(
                    all, shard,
                    dp_sampler_index(&whole, 0,
                                     whole.sampling == DP_SAMPLE_ENDLESS ? at : at % whole.count));
    }
}

/* Each process cuts its own batches for its shards. */
static void share_processes(shares *all, dp_sampler sampler, int64_t positions)
{
    int each = sampler.shards / sampler.world;
    for (sampler.rank = 0; sampler.rank < sampler.world; sampler.rank++) {
        int64_t count = dp_sampler_count(&sampler), rows[SHARDS];
        CHECK(count >= 0);
        count = count == INT64_MAX ? positions / sampler.world : count;
        for (int64_t at = 0; at < count;) {
            int64_t left = count - at;
            size_t parts = 0;
            CHECK_OK(dp_split_rows(left < sampler.block ? left : sampler.block, (size_t)each, NULL,
                                   rows, &parts));
            for (int i = 0; i < each; i++)
                for (int64_t row = 0; row < rows[i]; row++)
                    share_add(all, sampler.rank * each + i, dp_sampler_index(&sampler, 0, at++));
        }
        if (sampler.sampling != DP_SAMPLE_ENDLESS)
            CHECK_INT(dp_sampler_index(&sampler, 0, count), -1);
    }
}

/* Whatever remains after a full batch of all. */
TEST(shards_have_the_same_samples_in_any_number_of_processes)
{
    shares *want = test_room(sizeof *want), *got = test_room(sizeof *got);
    for (int shards = 1; shards <= SHARDS; shards *= 2)
        for (int64_t count = 1; count <= 8 * shards; count++)
            for (int i = 0; i < 4 * 4; i++) {
                int world = 1 << i / 4;
                int64_t batch = 6 * shards, rest = count % shards, positions = count;
                dp_sampler sampler = {.count = count,
                                      .sampling = (dp_sampling)(i % 4),
                                      .seed = 3,
                                      .world = world,
                                      .shards = shards,
                                      .block = batch / world};
                if (world > shards)
                    continue;
                if (sampler.sampling == DP_SAMPLE_PADDED && rest > 0)
                    positions += shards - rest;
                if (sampler.sampling == DP_SAMPLE_DROP)
                    positions -= rest;
                if (sampler.sampling == DP_SAMPLE_ENDLESS)
                    positions = 2 * batch;
                memset(want, 0, sizeof *want);
                memset(got, 0, sizeof *got);
                share_rows(want, &sampler, batch, positions);
                share_processes(got, sampler, positions);
                CHECK_BYTES(got->count, want->count, sizeof want->count);
                CHECK_BYTES(got->of, want->of, sizeof want->of);
            }
}

/* ---- a set of samples ------------------------------------------------------------------------ */

enum { PIXELS = 3 };

typedef struct own_set {
    int64_t fails[4]; /* samples that fail; 0: none, as sample 0 never does */
    dp_status how;
    int sleep_us;
    bool words;     /* samples have values too */
    bool silent;    /* fails without a sentence */
    dp_value wrong; /* what every sample's value is */
    dp_loader *loader;
    atomic_int calls, inside, most, done;
    atomic_int seen[512];
} own_set;

static void nap(int us)
{
    nanosleep(&(struct timespec){.tv_nsec = us * 1000L}, NULL);
}

static float pixel(int64_t index, int i)
{
    return (float)index + (float)i / 4;
}

static dp_status read_values(dp_sample *sample, const own_set *set)
{
    char name[32];
    snprintf(name, sizeof name, "s%lld", (long long)sample->index);
    sample->value = set->wrong.kind != DP_NONE
                        ? set->wrong
                        : DP_DICT(sample->scope, {"name", dp_string(sample->scope, name)},
                                  {"half", dp_float((double)sample->index / 2)});
    return DP_OK;
}

static dp_status read_sample(dp_sample *sample, void *user)
{
    own_set *set = user;
    atomic_fetch_add(&set->calls, 1);
    int inside = atomic_fetch_add(&set->inside, 1) + 1, most = atomic_load(&set->most);
    while (inside > most && !atomic_compare_exchange_weak(&set->most, &most, inside))
        continue;
    atomic_fetch_add(&set->seen[sample->index], 1);
    if (set->sleep_us > 0)
        nap(set->sleep_us * (1 + (int)(sample->index % 3)));
    for (int i = 0; i < PIXELS; i++)
        ((float *)sample->rows[0])[i] = pixel(sample->index, i);
    *(int64_t *)sample->rows[1] = sample->index;
    dp_status status = DP_OK;
    for (int i = 0; i < 4; i++)
        if (set->fails[i] == sample->index && sample->index > 0)
            status = set->silent
                         ? set->how
                         : dp_error(set->how, "file %lld is torn", (long long)sample->index);
    if (status == DP_OK && set->words)
        status = read_values(sample, set);
    atomic_fetch_sub(&set->inside, 1);
    atomic_fetch_add(&set->done, 1);
    return status;
}

static const dp_field both[] = {{"x", DP_F32, 1, {PIXELS}}, {"y", DP_I64, 0, {0}}};

static dp_loader *loader_of(dp_ctx *ctx, own_set *set, dp_loader_config config)
{
    dp_loader *loader = NULL;
    config.read = read_sample;
    config.user = set;
    config.fields = both;
    config.field_count = 2;
    CHECK_OK(dp_loader_create(ctx, &config, &loader));
    set->loader = loader;
    return loader;
}

static own_set *new_set(void)
{
    own_set *set = test_room(sizeof *set);
    set->how = DP_ERR_USER;
    return set;
}

/* A batch is what its indices say. */
static void check_batch(const dp_batch *batch, const dp_loader_config *config)
{
    const dp_tensor *x, *y;
    CHECK_OK(dp_as_tensor(dp_get(batch->value, "x"), "x", DP_F32, 2, &x));
    CHECK_OK(dp_as_tensor(dp_get(batch->value, "y"), "y", DP_I64, 1, &y));
    CHECK_INT(x->shape[0], batch->count);
    CHECK_INT(y->shape[0], batch->count);
    for (int64_t i = 0; i < batch->count; i++) {
        int64_t index =
            dp_sampler_index(&config->sampler, batch->epoch, batch->number * config->batch + i);
        CHECK_INT(batch->indices[i], index);
        CHECK_INT(((const int64_t *)y->data)[i], index);
        for (int k = 0; k < PIXELS; k++)
            CHECK_F64(((const float *)x->data)[i * PIXELS + k], pixel(index, k), 0);
    }
}

/* All of an epoch; returns how many batches there were. */
static int check_epoch(dp_ctx *ctx, dp_loader *loader, const dp_loader_config *config,
                       int64_t epoch)
{
    for (int number = 0;; number++) {
        dp_scope *step = dp_scope_begin(ctx);
        dp_batch batch;
        CHECK_OK(dp_loader_next(loader, step, &batch));
        CHECK_INT(batch.epoch, epoch);
        CHECK_INT(batch.number, number);
        if (batch.count > 0)
            check_batch(&batch, config);
        else
            CHECK_INT(batch.value.kind, DP_NONE);
        bool ended = batch.count == 0;
        dp_scope_end(step);
        if (ended)
            return number;
    }
}

/* ---- batches --------------------------------------------------------------------------------- */

TEST_BACKENDS(batches_are_those_of_the_sampler)
{
    static const int workers[] = {0, 1, 3, 8};
    for (size_t w = 0; w < 4; w++)
        for (int drop = 0; drop < 2; drop++) {
            own_set *set = new_set();
            dp_loader_config config = {.sampler = {.count = 23, .world = 2, .rank = 1, .seed = 5},
                                       .batch = 4,
                                       .drop_last = drop == 1,
                                       .worker_count = workers[w],
                                       .ahead = 3};
            dp_loader *loader = loader_of(ctx, set, config);
            for (int64_t epoch = 0; epoch < 3; epoch++)
                CHECK_INT(check_epoch(ctx, loader, &config, epoch), 3);
            CHECK_INT(atomic_load(&set->calls), 3 * 12);
            dp_loader_destroy(loader);
        }
}

TEST_BACKENDS(a_last_batch_is_short_or_dropped)
{
    for (int drop = 0; drop < 2; drop++)
        for (int workers = 0; workers < 3; workers++) {
            own_set *set = new_set();
            dp_loader_config config = {.sampler = {.count = 7},
                                       .batch = 3,
                                       .drop_last = drop == 1,
                                       .worker_count = workers};
            dp_loader *loader = loader_of(ctx, set, config);
            dp_loader_info info;
            CHECK_OK(dp_loader_info_get(loader, &info));
            CHECK_INT(info.batch_count, drop ? 2 : 3);
            CHECK_INT(info.sample_count, 7);
            CHECK_INT(check_epoch(ctx, loader, &config, 0), drop ? 2 : 3);
            CHECK_INT(check_epoch(ctx, loader, &config, 1), drop ? 2 : 3);
            dp_loader_destroy(loader);
        }
}

/* Their memory is used again, but not before devices have read it. */
TEST_BACKENDS(batches_end_when_devices_have_them)
{
    enum { BATCHES = 24, ROWS = 4 };
    own_set *set = new_set();
    dp_loader_config config = {
        .sampler = {.count = BATCHES * ROWS, .seed = 4}, .batch = ROWS, .worker_count = 3};
    dp_loader *loader = loader_of(ctx, set, config);
    dp_tensor there[BATCHES];
    for (int i = 0; i < BATCHES; i++) {
        dp_scope *step = dp_scope_begin(ctx);
        dp_batch batch;
        const dp_tensor *x;
        CHECK_OK(dp_loader_next(loader, step, &batch));
        CHECK_OK(dp_as_tensor(dp_get(batch.value, "x"), "x", DP_F32, 2, &x));
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, i % TREE_DEVICES), DP_F32, 2, x->shape,
                               &there[i]));
        CHECK_OK(dp_copy(ctx, &there[i], x, NULL));
        dp_scope_end(step);
    }
    for (int i = 0; i < BATCHES; i++) {
        float got[ROWS * PIXELS];
        CHECK_OK(dp_read(ctx, &there[i], got, sizeof got));
        for (int k = 0; k < ROWS * PIXELS; k++)
            CHECK_F64(
                got[k],
                pixel(dp_sampler_index(&config.sampler, 0, i * ROWS + k / PIXELS), k % PIXELS), 0);
    }
    dp_loader_destroy(loader);
}

typedef struct size_row {
    int64_t count, batch;
    int workers, world, want;
    bool drop;
} size_row;

TEST(sizes_at_their_limits)
{
    static const size_row rows[] = {{0, 4, 0, 1, 0, false},  {0, 4, 3, 1, 0, false},
                                    {1, 1, 0, 1, 1, false},  {1, 1, 8, 1, 1, false},
                                    {1, 0, 2, 1, 1, false},  {3, 100, 8, 1, 1, false},
                                    {3, 100, 8, 1, 0, true}, {6, 3, 8, 1, 2, false},
                                    {2, 4, 2, 8, 1, false},  {100, 1, 3, 1, 100, false}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        const size_row *row = &rows[i];
        own_set *set = new_set();
        dp_ctx *ctx = open_cpus(2);
        dp_loader_config config = {
            .sampler = {.count = row->count, .world = row->world, .rank = row->world - 1},
            .batch = row->batch,
            .drop_last = row->drop,
            .worker_count = row->workers,
            .epoch_count = 2};
        dp_loader *loader = loader_of(ctx, set, config);
        config.batch = row->batch > 0 ? row->batch : 1;
        CHECK_INT(check_epoch(ctx, loader, &config, 0), row->want);
        CHECK_INT(check_epoch(ctx, loader, &config, 1), row->want);
        dp_close(ctx);
    }
}

/* Exactly: some ranks have one more, some have none. */
TEST(more_ranks_than_samples)
{
    int total = 0;
    for (int rank = 0; rank < 5; rank++) {
        own_set *set = new_set();
        dp_ctx *ctx = open_cpus(1);
        dp_loader_config config = {
            .sampler = {.count = 3, .rank = rank, .world = 5, .sampling = DP_SAMPLE_EXACT},
            .batch = 2,
            .worker_count = 2};
        dp_loader *loader = loader_of(ctx, set, config);
        int batches = check_epoch(ctx, loader, &config, 0);
        CHECK_INT(batches, rank < 3);
        total += atomic_load(&set->calls);
        dp_close(ctx);
    }
    CHECK_INT(total, 3);
}

/* Those that the sampler repeats are told apart. */
TEST(repeated_samples_are_not_real)
{
    static const int64_t want[4][2] = {{2, 1}, {2, 1}, {2, 0}, {2, 0}};
    for (int rank = 0; rank < 4; rank++) {
        own_set *set = new_set();
        dp_ctx *ctx = open_cpus(1);
        dp_scope *scope = dp_scope_begin(ctx);
        dp_loader *loader = loader_of(
            ctx, set,
            (dp_loader_config){.sampler = {.count = 10, .rank = rank, .world = 4}, .batch = 2});
        for (int i = 0; i < 2; i++) {
            dp_batch batch;
            CHECK_OK(dp_loader_next(loader, scope, &batch));
            CHECK_INT(batch.real_count, want[rank][i]);
            CHECK_INT(batch.count, 2 - i);
        }
        dp_close(ctx);
    }
}

TEST(an_endless_loader_has_full_batches)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_loader_config config = {
        .sampler = {.count = 3, .sampling = DP_SAMPLE_ENDLESS}, .batch = 4, .worker_count = 2};
    dp_loader *loader = loader_of(ctx, set, config);
    dp_loader_info info;
    for (int i = 0; i < 20; i++) {
        dp_scope *step = dp_scope_begin(ctx);
        dp_batch batch;
        CHECK_OK(dp_loader_next(loader, step, &batch));
        CHECK_INT(batch.count, 4);
        CHECK_INT(batch.real_count, 4);
        CHECK_INT(batch.number, i);
        check_batch(&batch, &config);
        dp_scope_end(step);
    }
    CHECK_OK(dp_loader_info_get(loader, &info));
    CHECK_INT(info.batch_count, INT64_MAX);
    CHECK_INT(info.sample_count, INT64_MAX);
    CHECK_INT(info.number, 20);
    dp_close(ctx);
}

/* Batches of all ranks together are those of one rank. */
TEST(blocks_keep_batches_whole)
{
    dp_ctx *ctx = open_cpus(1);
    own_set *set = new_set();
    for (int number = 0; number < 3; number++) {
        dp_scope *step = dp_scope_begin(ctx);
        int64_t together[12];
        for (int rank = 0; rank < 3; rank++) {
            dp_batch batch;
            dp_loader *loader = loader_of(
                ctx, set,
                (dp_loader_config){
                    .sampler = {.count = 40, .rank = rank, .world = 3, .block = 4, .seed = 2},
                    .batch = 4});
            CHECK_OK(dp_loader_seek(loader, 1, number));
            CHECK_OK(dp_loader_next(loader, step, &batch));
            memcpy(together + rank * 4, batch.indices, 4 * sizeof *together);
            dp_loader_destroy(loader);
        }
        for (int i = 0; i < 12; i++)
            CHECK_INT(together[i],
                      dp_sampler_index(&(dp_sampler){.count = 40, .seed = 2}, 1, number * 12 + i));
        dp_scope_end(step);
    }
    dp_close(ctx);
}

/* ---- loaders that deal by shards ------------------------------------------------------------- */

static dp_status read_for_shard(dp_sample *sample, void *user)
{
    (void)user;
    *(int64_t *)sample->rows[0] = sample->index;
    *(uint64_t *)sample->rows[1] = sample->seed;
    sample->value =
        DP_DICT(sample->scope, {"group", dp_cpu_only(sample->scope, dp_int(sample->index))});
    return DP_OK;
}

/* What the devices of a process get of a batch: the number of the sample, and its seed. */
static void share_batch(shares *all, dp_ctx *ctx, dp_scope *scope, int first, dp_value batch)
{
    dp_value parts;
    CHECK_OK(dp_scatter(ctx, scope, batch, NULL, &parts));
    for (size_t i = 0; i < dp_count(parts); i++) {
        dp_value part = dp_at(parts, i), group = dp_get(part, "group");
        const dp_tensor *index, *seed;
        CHECK_OK(dp_as_tensor(dp_get(part, "index"), "index", DP_I64, 1, &index));
        CHECK_OK(dp_as_tensor(dp_get(part, "seed"), "seed", DP_I64, 1, &seed));
        CHECK_INT(dp_count(group), index->shape[0]);
        for (int64_t row = 0; row < index->shape[0]; row++) {
            int64_t number = ((const int64_t *)index->data)[row];
            CHECK_INT(dp_at(group, (size_t)row).as.i, number);
            share_add(all, first + (int)i, number);
            share_add(all, first + (int)i, ((const int64_t *)seed->data)[row]);
        }
    }
}

/* An epoch, and with `after` what is left of it. Returns the batches of each process. */
static int64_t share_epoch(shares *all, dp_loader_config config, int world, int64_t after)
{
    static const dp_field fields[] = {{"index", DP_I64, 0, {0}}, {"seed", DP_I64, 0, {0}}};
    int each = SHARDS / world;
    dp_ctx *ctx = open_cpus(each);
    dp_loader_info first, own;
    config.batch /= world;
    config.read = read_for_shard;
    config.fields = fields;
    config.field_count = 2;
    config.sampler.world = world;
    config.sampler.shards = SHARDS;
    int64_t real = 0, left = config.sampler.count - after;
    memset(all, 0, sizeof *all);
    for (int rank = 0; rank < world; rank++) {
        dp_loader *loader;
        dp_batch batch;
        config.sampler.rank = rank;
        CHECK_OK(dp_loader_create(ctx, &config, &loader));
        CHECK_OK(after > 0 ? dp_loader_resume(loader, 0, after) : DP_OK);
        CHECK_OK(dp_loader_info_get(loader, rank == 0 ? &first : &own));
        CHECK(rank == 0 || own.batch_count == first.batch_count);
        do {
            dp_scope *scope = dp_scope_begin(ctx);
            CHECK_OK(dp_loader_next(loader, scope, &batch));
            if (batch.count > 0)
                share_batch(all, ctx, scope, rank * each, batch.value);
            real += batch.real_count;
            dp_scope_end(scope);
        } while (!batch.ended);
    }
    CHECK(real == left || config.drop_last ||
          (config.sampler.sampling == DP_SAMPLE_DROP && real == left - left % SHARDS));
    dp_close(ctx);
    return first.batch_count;
}

TEST_SLOW(loaders_give_shards_the_same_samples_in_any_number_of_processes, 60)
{
    shares *want = test_room(sizeof *want), *got = test_room(sizeof *got);
    for (int64_t rest = 0; rest < 24; rest += test_stride())
        for (int i = 0; i < 12; i++) {
            int64_t after = i % 2 == 1 ? 5 : 0, batches;
            dp_loader_config config = {
                .sampler = {.count = 24 + rest, .sampling = (dp_sampling)(i / 4), .seed = 7},
                .batch = 24,
                .drop_last = i / 2 % 2 == 1,
                .together = true,
                .worker_count = (int)rest % 3};
            batches = share_epoch(want, config, 1, after);
            for (int world = 2; world <= SHARDS; world *= 2) {
                CHECK_INT(share_epoch(got, config, world, after), batches);
                CHECK_BYTES(got->count, want->count, sizeof want->count);
                CHECK_BYTES(got->of, want->of, sizeof want->of);
            }
        }
}

static dp_status one_of_two(void *user)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_info info;
    dp_loader_info own;
    (void)user;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process_count, 2);
    dp_loader_config config = {.sampler = {.count = 5, .sampling = DP_SAMPLE_EXACT}, .batch = 2};
    dp_loader *loader = loader_of(ctx, set, config);
    config.sampler.rank = info.process;
    config.sampler.world = 2;
    CHECK_OK(dp_loader_info_get(loader, &own));
    CHECK_INT(own.sample_count, 3 - info.process);
    CHECK_INT(check_epoch(ctx, loader, &config, 0), 2 - info.process);
    dp_close(ctx);
    return DP_OK;
}

TEST(each_process_has_its_samples)
{
    test_needs_processes(2);
    CHECK_OK(dp_spawn(2, one_of_two, NULL));
}

/* ---- ahead ----------------------------------------------------------------------------------- */

/* Waits until no more is read. */
static int settled(own_set *set)
{
    int calls = -1;
    for (int quiet = 0; quiet < 20; nap(1000)) {
        int now = atomic_load(&set->done);
        quiet = now == calls && atomic_load(&set->inside) == 0 ? quiet + 1 : 0;
        calls = now;
    }
    return calls;
}

static void take(dp_loader *loader, dp_scope *scope, int count)
{
    for (int i = 0; i < count; i++) {
        dp_batch batch;
        CHECK_OK(dp_loader_next(loader, scope, &batch));
    }
}

TEST(so_many_batches_are_read_ahead)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_loader *loader = loader_of(
        ctx, set,
        (dp_loader_config){.sampler = {.count = 40}, .batch = 4, .worker_count = 3, .ahead = 5});
    CHECK_INT(settled(set), 0); /* nothing has been asked for */
    take(loader, scope, 1);
    CHECK_INT(settled(set), 24);
    take(loader, scope, 1);
    CHECK_INT(settled(set), 28);
    CHECK(atomic_load(&set->most) <= 3);
    take(loader, scope, 9);      /* the end as well */
    CHECK_INT(settled(set), 40); /* another epoch is not known to come */
    take(loader, scope, 1);
    CHECK_INT(settled(set), 64);
    dp_loader_destroy(loader);
    dp_close(ctx);
}

TEST(the_next_epoch_is_begun_if_there_is_one)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_batch batch;
    dp_loader *loader = loader_of(
        ctx, set,
        (dp_loader_config){
            .sampler = {.count = 8}, .batch = 4, .worker_count = 2, .ahead = 3, .epoch_count = 2});
    take(loader, scope, 2);
    CHECK_INT(settled(set), 16); /* two of this epoch, two of the next: that is all there are */
    for (int i = 0; i < 4; i++) {
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK_INT(batch.count, i == 0 || i == 3 ? 0 : 4);
        CHECK_INT(batch.epoch, i > 0);
    }
    CHECK_OK(dp_loader_next(loader, scope, &batch)); /* the end stays the end */
    CHECK_INT(batch.count, 0);
    CHECK_INT(batch.epoch, 1);
    CHECK_INT(settled(set), 16);
    dp_close(ctx);
}

/* Without workers, only what is asked for. */
TEST(no_workers_read_on_demand)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_loader *loader =
        loader_of(ctx, set, (dp_loader_config){.sampler = {.count = 8}, .batch = 4, .ahead = 7});
    take(loader, scope, 1);
    CHECK_INT(atomic_load(&set->calls), 4);
    dp_close(ctx);
}

/* In a loop that repeats itself. */
TEST(a_loop_allocates_nothing)
{
    test_allocator counter = {0};
    dp_ctx *ctx = NULL;
    own_set *set = new_set();
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 2, .allocator = test_allocator_of(&counter)}, &ctx));
    set->words = true;
    dp_loader_config config = {.sampler = {.count = 64}, .batch = 16, .worker_count = 3};
    dp_loader *loader = loader_of(ctx, set, config);
    int quiet =
        0; /* epochs: which worker reads how much differs at first, and so do their scopes */
    for (int epoch = 0; quiet < 10; epoch++) {
        size_t before = counter.call_count;
        check_epoch(ctx, loader, &config, epoch);
        while (atomic_load(&set->done) < 64 * (epoch + 1))
            nap(10);
        quiet = counter.call_count == before ? quiet + 1 : 0;
        CHECK(epoch < 1000);
    }
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* What is forgotten is used again. */
TEST(seeking_allocates_nothing)
{
    test_allocator counter = {0};
    dp_ctx *ctx = NULL;
    own_set *set = new_set();
    CHECK_OK(
        dp_open(&(dp_config){.device_count = 1, .allocator = test_allocator_of(&counter)}, &ctx));
    dp_loader *loader = loader_of(
        ctx, set, (dp_loader_config){.sampler = {.count = 64}, .batch = 4, .worker_count = 1});
    for (int i = 0, quiet = 0; quiet < 20; i++) {
        size_t before = counter.call_count;
        dp_scope *step = dp_scope_begin(ctx);
        CHECK_OK(dp_loader_seek(loader, i, i % 8));
        take(loader, step, 1);
        dp_scope_end(step);
        quiet = counter.call_count == before ? quiet + 1 : 0;
        CHECK(i < 200);
    }
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

/* ---- values ---------------------------------------------------------------------------------- */

TEST_BACKENDS(values_are_collated_beside_fields)
{
    for (int workers = 0; workers < 4; workers += 3) {
        own_set *set = new_set();
        dp_batch batch;
        set->words = true;
        dp_loader *loader = loader_of(ctx, set,
                                      (dp_loader_config){.sampler = {.count = 5, .in_order = true},
                                                         .batch = 2,
                                                         .worker_count = workers});
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK_TREE(ctx, batch.value,
                   "{'x': f32[2,3]=0 0.25 0.5 1 1.25 1.5, 'y': i64[2]=0 1, 'name': ['s0', 's1'], "
                   "'half': f64[2]=0 0.5}");
        dp_loader_destroy(loader);
        CHECK_STR(dp_text(dp_at(dp_get(batch.value, "name"), 1)), "s1"); /* it stays */
    }
}

typedef struct own_collate {
    dp_collate_fn fn;
    const char *in[3], *want;
} own_collate;

static dp_status read_text(dp_sample *sample, void *user)
{
    const own_collate *own = user;
    CHECK(sample->scope != NULL);
    sample->value = tree_of(sample->scope, own->in[sample->index]);
    return DP_OK;
}

static dp_status collate_count(dp_scope *scope, const dp_value *samples, size_t count,
                               dp_value *out, void *user)
{
    CHECK(samples != NULL && scope != NULL && user != NULL);
    *out = dp_int((int64_t)count);
    return DP_OK;
}

/* mmcv's by default, in groups for 8 devices. */
TEST_BACKENDS(any_collate_will_do)
{
    static const own_collate rows[] = {
        {NULL,
         {"<stack dims=1: f32[1,1]=1>", "<stack dims=1: f32[1,2]=2 3>",
          "<stack dims=1: f32[1,1]=4>"},
         "<stack pad=0 dims=1: [f32[1,1,1]=1, f32[1,1,2]=2 3, f32[1,1,1]=4]>"},
        {NULL, {"1", "2", "3"}, "i64[3]=1 2 3"},
        {dp_pseudo_collate,
         {"[1, f32[1]=1]", "[2, None]", "[3, 'a']"},
         "[[1, 2, 3], [f32[1]=1, None, 'a']]"},
        {dp_default_collate,
         {"(1, 'a')", "(2, 'b')", "(3, 'c')"},
         "[i64[3]=1 2 3, ['a', 'b', 'c']]"},
        {collate_count, {"None", "1", "'x'"}, "3"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int workers = 0; workers < 3; workers += 2) {
            own_collate own = rows[i];
            dp_loader *loader = NULL;
            dp_batch batch;
            CHECK_OK(dp_loader_create(ctx,
                                      &(dp_loader_config){.sampler = {.count = 3, .in_order = true},
                                                          .batch = 3,
                                                          .read = read_text,
                                                          .user = &own,
                                                          .collate = own.fn,
                                                          .worker_count = workers},
                                      &loader));
            CHECK_OK(dp_loader_next(loader, scope, &batch));
            CHECK_TREE(ctx, batch.value, own.want);
            dp_loader_destroy(loader);
        }
}

/* 16 samples for 8 devices are groups of two; a last batch has fewer groups. */
TEST_BACKENDS(groups_are_for_the_devices)
{
    own_collate own = {NULL, {"<cpu: 1>", "<cpu: 2>", "<cpu: 3>"}, NULL};
    dp_loader *loader = NULL;
    dp_batch batch;
    CHECK_OK(dp_loader_create(ctx,
                              &(dp_loader_config){.sampler = {.count = 3, .in_order = true},
                                                  .batch = 16,
                                                  .read = read_text,
                                                  .user = &own},
                              &loader));
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    CHECK_TREE(ctx, batch.value, "<cpu pad=0 dims=2: [[1, 2], [3]]>");
    dp_loader_destroy(loader);
}

static void check_spoilt(dp_value wrong, const char *says, dp_status status)
{
    for (int workers = 0; workers < 3; workers += 2) {
        own_set *set = new_set();
        dp_ctx *ctx = open_cpus(1);
        dp_scope *scope = dp_scope_begin(ctx);
        dp_batch batch;
        set->words = true;
        set->wrong = wrong;
        dp_loader *loader = loader_of(
            ctx, set,
            (dp_loader_config){.sampler = {.count = 4}, .batch = 2, .worker_count = workers});
        for (int i = 0; i < 2; i++) {
            CHECK_ERROR(dp_loader_next(loader, scope, &batch), status, says);
            CHECK_SAYS(dp_last_error(), i == 0 ? "dp_loader_next: epoch 0, batch 0: "
                                               : "dp_loader_next: epoch 0, batch 1: ");
        }
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK_INT(batch.count, 0);
        dp_close(ctx);
    }
}

TEST(values_that_do_not_fit)
{
    check_spoilt(dp_int(3), "beside fields, what is collated has to be a dict", DP_ERR_INVALID);
    check_spoilt(dp_opaque(NULL), "dp_collate: ", DP_ERR_INVALID);
    check_spoilt(dp_string(NULL, "x"), ": dp_string: no scope, or no memory", DP_ERR_INVALID);
    dp_value pair = {
        .as = {.pairs = &(dp_pair){"x", dp_int(1)}}, .count = 1, .kind = DP_DICT, .depth = 1};
    check_spoilt(pair, "'x'", DP_ERR_INVALID); /* which is a field */
}

static dp_status read_nothing(dp_sample *sample, void *user)
{
    (void)sample;
    (void)user;
    return DP_OK;
}

TEST(nothing_at_all_is_no_batch)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_loader *loader = NULL;
    dp_batch batch;
    CHECK_OK(dp_loader_create(
        ctx, &(dp_loader_config){.sampler = {.count = 1}, .read = read_nothing}, &loader));
    CHECK_ERROR(dp_loader_next(loader, scope, &batch), DP_ERR_INVALID,
                "dp_loader_next: epoch 0, batch 0: dp_collate: ");
    dp_close(ctx);
}

/* ---- waiting --------------------------------------------------------------------------------- */

static char told[200];
static int told_count;

static void hear_of_loaders(const dp_log_record *record, void *user)
{
    (void)user;
    if (strstr(record->text, "a loader is waited for") == NULL)
        return;
    CHECK_INT(record->level, DP_LOG_WARN);
    CHECK_SAYS(record->text, "its `read` is in sample 5 since "); /* not one that was read */
    snprintf(told, sizeof told, "%s", record->text);
    told_count++;
}

static dp_status read_slowly(dp_sample *sample, void *user)
{
    for (int i = 0; i < 4 && sample->index == *(int64_t *)user; i++)
        nap(300000);
    sample->value = dp_int(sample->index);
    return DP_OK;
}

/* After a quarter of the time-out, and then when it was twice as long. */
TEST(sample_that_all_wait_for_is_named)
{
    const dp_config config = {
        .device_count = 1, .timeout_ms = 2000, .local_only = true, .log = {.fn = hear_of_loaders}};
    dp_ctx *ctx;
    CHECK_OK(dp_open(&config, &ctx));
    for (int64_t slow = 5; slow < 7; slow++) { /* of 6: then there is none */
        dp_scope *scope = dp_scope_begin(ctx);
        dp_loader *loader;
        dp_batch batch;
        told_count = 0;
        CHECK_OK(dp_loader_create(ctx,
                                  &(dp_loader_config){.sampler = {.count = 6, .in_order = true},
                                                      .batch = 2,
                                                      .worker_count = 2,
                                                      .read = read_slowly,
                                                      .user = &slow},
                                  &loader));
        for (int i = 0; i < 3; i++)
            CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK(slow == 5 ? told_count > 0 && told_count <= 3 : told_count == 0);
        dp_loader_destroy(loader);
        dp_scope_end(scope);
    }
    CHECK_SAYS(told, " s (thread ");
    CHECK(strstr(told, "(thread 0)") == NULL);
    dp_close(ctx);
}

/* ---- failures -------------------------------------------------------------------------------- */

/* Batch 1 holds samples 4 to 7: the first of those that fail is named, whoever fails first. */
static void check_failing(int workers, bool silent, dp_status how, dp_status want)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_batch batch = {.count = 77};
    const int64_t fails[] = {7, 5, 9, 0};
    memcpy(set->fails, fails, sizeof fails);
    set->silent = silent;
    set->how = how;
    set->sleep_us = workers > 0 ? 300 : 0;
    dp_loader_config config = {.sampler = {.count = 14, .in_order = true},
                               .batch = 4,
                               .worker_count = workers,
                               .ahead = 4};
    dp_loader *loader = loader_of(ctx, set, config);
    dp_scope *scope = dp_scope_begin(ctx);
    (void)dp_error(DP_OK, "before");
    for (int i = 0; i < 4; i++) {
        dp_status status = dp_loader_next(loader, scope, &batch);
        CHECK_STATUS(status, i == 1 || i == 2 ? want : DP_OK);
        if (i == 0)
            CHECK_STR(dp_last_error(), "before"); /* success leaves it alone */
        if (i == 0 || i == 3)
            check_batch(&batch, &config);
        if (i == 1) {
            CHECK_INT(batch.number, 0);
            CHECK_SAYS(dp_last_error(), "dp_loader_next: epoch 0, batch 1: sample 5: ");
            CHECK_SAYS(dp_last_error(), silent ? dp_status_text(want) : "file 5 is torn");
        }
        if (i == 2)
            CHECK_SAYS(dp_last_error(), "batch 2: sample 9: ");
    }
    CHECK_INT(batch.number, 3);
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    CHECK_INT(batch.count, 0);
    CHECK(!dp_failure(ctx, &(dp_failure_info){0}));
    dp_close(ctx);
}

TEST(a_sample_that_fails_is_named)
{
    for (int workers = 0; workers < 5; workers += 4)
        for (int silent = 0; silent < 2; silent++) {
            check_failing(workers, silent == 1, DP_ERR_USER, DP_ERR_USER);
            check_failing(workers, silent == 1, DP_ERR_NO_MEMORY, DP_ERR_NO_MEMORY);
            check_failing(workers, silent == 1, DP_ERR_MISMATCH, DP_ERR_MISMATCH);
            check_failing(workers, silent == 1, DP_ERR_DEVICE, DP_ERR_USER);
            check_failing(workers, silent == 1, DP_PENDING, DP_ERR_USER);
            check_failing(workers, silent == 1, (dp_status)-99, DP_ERR_USER);
        }
}

static dp_status collate_fails(dp_scope *scope, const dp_value *samples, size_t count,
                               dp_value *out, void *user)
{
    const own_set *set = user;
    dp_loader_info info;
    dp_batch batch;
    (void)samples;
    (void)count;
    (void)out;
    CHECK_OK(dp_loader_info_get(set->loader, &info));
    CHECK_ERROR(dp_loader_next(set->loader, scope, &batch), DP_ERR_STATE,
                "dp_loader_next: a function that the loader has called called this");
    return dp_error(set->how, "no batch from me");
}

/* What only the library itself may report is a failure of the user's. */
TEST(a_collate_that_fails_spoils_its_batch)
{
    static const dp_status rows[][2] = {
        {DP_ERR_USER, DP_ERR_USER},   {DP_ERR_MISMATCH, DP_ERR_MISMATCH},
        {DP_ERR_DEVICE, DP_ERR_USER}, {DP_ERR_INTERNAL, DP_ERR_USER},
        {DP_PENDING, DP_ERR_USER},    {(dp_status)77, DP_ERR_USER}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        own_set *set = new_set();
        dp_ctx *ctx = open_cpus(1);
        dp_scope *scope = dp_scope_begin(ctx);
        dp_batch batch;
        set->words = true;
        set->how = rows[i][0];
        dp_loader *loader = loader_of(
            ctx, set, (dp_loader_config){.sampler = {.count = 2}, .collate = collate_fails});
        CHECK_ERROR(dp_loader_next(loader, scope, &batch), rows[i][1],
                    "dp_loader_next: epoch 0, batch 0: no batch from me");
        CHECK_ERROR(dp_loader_next(loader, scope, &batch), rows[i][1], "batch 1: no batch from me");
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        dp_close(ctx);
    }
}

static dp_status collate_nothing(dp_scope *scope, const dp_value *samples, size_t count,
                                 dp_value *out, void *user)
{
    (void)scope;
    (void)samples;
    (void)count;
    (void)user;
    *out = dp_string(NULL, "");
    return DP_OK;
}

TEST(a_collate_that_makes_an_error_value)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_loader *loader = NULL;
    dp_batch batch;
    CHECK_OK(dp_loader_create(ctx,
                              &(dp_loader_config){.sampler = {.count = 1},
                                                  .read = read_nothing,
                                                  .collate = collate_nothing},
                              &loader));
    CHECK_ERROR(dp_loader_next(loader, scope, &batch), DP_ERR_INVALID,
                "dp_loader_next: epoch 0, batch 0: dp_string: no scope");
    dp_close(ctx);
}

static dp_status read_calls(dp_sample *sample, void *user)
{
    own_set *set = user;
    dp_batch batch;
    dp_value saved;
    CHECK_ERROR(dp_loader_next(set->loader, sample->scope, &batch), DP_ERR_STATE, "called this");
    CHECK_ERROR(dp_loader_seek(set->loader, 0, 0), DP_ERR_STATE, "dp_loader_seek: a function");
    CHECK_ERROR(dp_loader_load(set->loader, dp_none()), DP_ERR_STATE, "dp_loader_load: a function");
    CHECK_ERROR(dp_loader_resume(set->loader, 0, 0), DP_ERR_STATE, "dp_loader_resume: a function");
    CHECK_OK(dp_loader_save(set->loader, sample->scope, &saved));
    dp_loader_destroy(set->loader);
    CHECK_SAYS(dp_last_error(), "dp_loader_destroy: a function");
    sample->value = dp_int(sample->index);
    return DP_OK;
}

TEST(a_loader_is_not_called_from_inside_itself)
{
    for (int workers = 0; workers < 2; workers++) {
        own_set *set = new_set();
        dp_ctx *ctx = open_cpus(1);
        dp_scope *scope = dp_scope_begin(ctx);
        dp_batch batch;
        CHECK_OK(dp_loader_create(
            ctx,
            &(dp_loader_config){
                .sampler = {.count = 1}, .read = read_calls, .user = set, .worker_count = workers},
            &set->loader));
        CHECK_OK(dp_loader_next(set->loader, scope, &batch));
        CHECK_TREE(ctx, batch.value, "i64[1]=0");
        dp_close(ctx);
    }
}

static dp_status read_another(dp_sample *sample, void *user)
{
    own_set *set = user;
    dp_batch batch;
    dp_scope *inner = dp_scope_child(sample->scope);
    dp_status status = dp_loader_next(set->loader, inner, &batch);
    sample->value = dp_int(batch.indices[0] + 100);
    dp_scope_end(inner);
    return status;
}

/* What a loader reads without workers may come from another one. */
TEST(a_loader_may_read_another)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_batch batch;
    dp_loader *outer = NULL;
    loader_of(ctx, set,
              (dp_loader_config){.sampler = {.count = 3, .in_order = true}, .worker_count = 2});
    CHECK_OK(dp_loader_create(
        ctx,
        &(dp_loader_config){.sampler = {.count = 3}, .batch = 3, .read = read_another, .user = set},
        &outer));
    CHECK_OK(dp_loader_next(outer, scope, &batch));
    CHECK_TREE(ctx, batch.value, "i64[3]=100 101 102");
    dp_close(ctx);
}

/* ---- ends ------------------------------------------------------------------------------------ */

/* Workers are in the middle of samples, and use their scopes; unless this thread came so late that
   all that is read ahead has been read. */
TEST(busy_workers_are_waited_for)
{
    for (int how = 0; how < 3; how++)
        for (int ahead = 1; ahead < 6; ahead += 2) {
            test_allocator counter = {0};
            own_set *set = new_set();
            dp_ctx *ctx = NULL;
            dp_batch batch;
            CHECK_OK(dp_open(&(dp_config){.device_count = 1,
                                          .poison = true,
                                          .allocator = test_allocator_of(&counter)},
                             &ctx));
            set->sleep_us = 500;
            set->words = true;
            dp_loader_config config = {
                .sampler = {.count = 500}, .batch = 20, .worker_count = 4, .ahead = ahead};
            dp_loader *loader = loader_of(ctx, set, config);
            dp_scope *scope = dp_scope_begin(ctx);
            CHECK_OK(dp_loader_next(loader, scope, &batch));
            for (int i = 0; i < 200 && atomic_load(&set->inside) == 0; i++)
                nap(50);
            if (how == 1) {
                dp_loader_destroy(loader);
                CHECK_INT(atomic_load(&set->inside), 0);
                check_batch(&batch, &config); /* which stays */
            } else if (how == 2) {
                CHECK_OK(dp_loader_seek(loader, 2, 3));
                CHECK_INT(atomic_load(&set->inside), 0);
                CHECK_OK(dp_loader_next(loader, scope, &batch));
                CHECK_INT(batch.epoch, 2);
                CHECK_INT(batch.number, 3);
                check_batch(&batch, &config);
            }
            dp_close(ctx);
            CHECK_INT(atomic_load(&set->inside), 0);
            CHECK_NO_LEAKS(&counter);
        }
}

TEST(loaders_that_were_never_used)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_loader_destroy(NULL);
    for (int workers = 0; workers < 3; workers++) {
        dp_loader_config config = {.sampler = {.count = 5}, .worker_count = workers};
        dp_loader_destroy(loader_of(ctx, set, config));
        CHECK_OK(dp_loader_seek(loader_of(ctx, set, config), 4, 5));
    }
    dp_close(ctx);
    CHECK_INT(atomic_load(&set->calls), 0);
}

static void try_to_end(dp_ctx *ctx, dp_scope *scope)
{
    dp_close(ctx);
    CHECK_SAYS(dp_last_error(),
               "dp_close: the context is in use by a function of a loader, which called this");
    dp_scope_end(scope);
    CHECK_SAYS(dp_last_error(),
               "dp_scope_end: the scope is in use by a function of a loader, which called this");
}

static dp_status read_and_end(dp_sample *sample, void *ctx)
{
    try_to_end(ctx, sample->scope);
    sample->value = dp_int(sample->index);
    return DP_OK;
}

static void *close_beside(void *ctx)
{
    dp_close(ctx);
    CHECK_SAYS(dp_last_error(), "dp_close: the context is in use: threads in methods");
    return NULL;
}

static dp_status collate_and_end(dp_scope *scope, const dp_value *samples, size_t count,
                                 dp_value *out, void *ctx)
{
    pthread_t thread;
    try_to_end(ctx, scope);
    CHECK_INT(pthread_create(&thread, NULL, close_beside, ctx), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
    return dp_pseudo_collate(scope, samples, count, out, NULL);
}

/* A thread of the user's that closes the context while another one has a batch made. */
static dp_status read_while_closed(dp_sample *sample, void *ctx)
{
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, close_beside, ctx), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
    sample->value = dp_int(sample->index);
    CHECK(dp_string(sample->scope, "it is still there").kind == DP_STRING);
    return DP_OK;
}

TEST(a_context_is_not_closed_while_a_batch_is_waited_for)
{
    for (int workers = 0; workers < 3; workers++) {
        test_allocator counter = {0};
        dp_ctx *ctx = NULL;
        dp_loader *loader = NULL;
        dp_batch batch;
        CHECK_OK(dp_open(&(dp_config){.device_count = 1,
                                      .poison = true,
                                      .allocator = test_allocator_of(&counter)},
                         &ctx));
        CHECK_OK(dp_loader_create(ctx,
                                  &(dp_loader_config){.sampler = {.count = 3, .in_order = true},
                                                      .batch = 3,
                                                      .read = read_while_closed,
                                                      .user = ctx,
                                                      .worker_count = workers},
                                  &loader));
        CHECK_OK(dp_loader_next(loader, dp_scope_begin(ctx), &batch));
        CHECK_TREE(ctx, batch.value, "i64[3]=0 1 2");
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

/* Nothing is lost by it. */
TEST(functions_of_a_loader_cannot_end_what_they_work_with)
{
    for (int workers = 0; workers < 3; workers += 2) {
        dp_ctx *ctx = open_cpus(1);
        dp_loader *loader = NULL;
        dp_batch batch;
        CHECK_OK(dp_loader_create(ctx,
                                  &(dp_loader_config){.sampler = {.count = 4, .in_order = true},
                                                      .batch = 2,
                                                      .read = read_and_end,
                                                      .collate = collate_and_end,
                                                      .user = ctx,
                                                      .worker_count = workers},
                                  &loader));
        for (int i = 0; i < 2; i++) {
            CHECK_OK(dp_loader_next(loader, dp_scope_begin(ctx), &batch));
            CHECK_TREE(ctx, batch.value, i == 0 ? "[0, 1]" : "[2, 3]");
        }
        dp_close(ctx);
    }
}

/* The batch belongs to the scope that it was given to, and to no other. */
TEST(a_scope_that_cannot_have_it_loses_nothing)
{
    for (int workers = 0; workers < 2; workers++) {
        own_set *set = new_set();
        dp_ctx *ctx = open_cpus(1), *other = open_cpus(1);
        dp_batch batch;
        dp_loader_config config = {.sampler = {.count = 4}, .batch = 2, .worker_count = workers};
        dp_loader *loader = loader_of(ctx, set, config);
        dp_scope *elsewhere = dp_scope_begin(other), *scope = dp_scope_begin(ctx);
        CHECK_ERROR(dp_loader_next(loader, elsewhere, &batch), DP_ERR_INVALID,
                    "dp_loader_next: the scope is of another context");
        CHECK_ERROR(dp_loader_next(loader, NULL, &batch), DP_ERR_INVALID,
                    "dp_loader_next: scope is NULL");
        CHECK_ERROR(dp_loader_next(loader, scope, NULL), DP_ERR_INVALID,
                    "dp_loader_next: out is NULL");
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK_INT(batch.number, 0);
        check_batch(&batch, &config);
        dp_close(ctx);
        dp_close(other);
    }
}

TEST(a_child_of_fork_has_no_loader)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_batch batch;
    dp_loader_config config = {.sampler = {.count = 8}, .batch = 2, .worker_count = 2};
    dp_loader *loader = loader_of(ctx, set, config);
    dp_scope *scope = dp_scope_begin(ctx);
    take(loader, scope, 1);
    pid_t child = fork();
    if (child == 0) {
        CHECK_ERROR(dp_loader_next(loader, scope, &batch), DP_ERR_STATE,
                    "dp_loader_next: the loader belongs to the parent process");
        CHECK_STATUS(dp_loader_seek(loader, 0, 0), DP_ERR_STATE);
        CHECK_STATUS(dp_loader_resume(loader, 0, 0), DP_ERR_STATE);
        dp_loader_destroy(loader);
        dp_close(ctx);
        _exit(EXIT_SUCCESS);
    }
    int status = 1;
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    take(loader, scope, 3);
    dp_close(ctx);
}

TEST(a_job_that_failed_reads_no_more)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_batch batch;
    dp_loader *loader =
        loader_of(ctx, set, (dp_loader_config){.sampler = {.count = 8}, .worker_count = 2});
    dp_scope *scope = dp_scope_begin(ctx);
    take(loader, scope, 1);
    dp_abort(ctx, DP_ERR_ABORTED, "enough");
    CHECK_ERROR(dp_loader_next(loader, scope, &batch), DP_ERR_ABORTED,
                "dp_loader_next: the job failed: enough");
    CHECK_STATUS(dp_loader_seek(loader, 0, 0), DP_ERR_ABORTED);
    CHECK_STATUS(dp_loader_resume(loader, 0, 0), DP_ERR_ABORTED);
    dp_close(ctx);
}

/* ---- places ---------------------------------------------------------------------------------- */

TEST(a_loader_goes_on_where_another_stopped)
{
    for (int workers = 0; workers < 3; workers += 2)
        for (int after = 0; after < 7; after++) {
            own_set *set = new_set();
            dp_ctx *ctx = open_cpus(1);
            dp_scope *scope = dp_scope_begin(ctx);
            dp_value saved;
            dp_batch want, got;
            dp_loader_config config = {
                .sampler = {.count = 10, .seed = 9}, .batch = 4, .worker_count = workers};
            dp_loader *loader = loader_of(ctx, set, config);
            take(loader, scope, after);
            CHECK_OK(dp_loader_save(loader, scope, &saved));
            dp_loader *again = loader_of(ctx, set, config);
            take(again, scope, 2); /* which it forgets */
            CHECK_OK(dp_loader_load(again, saved));
            for (int i = 0; i < 6; i++) {
                CHECK_OK(dp_loader_next(loader, scope, &want));
                CHECK_OK(dp_loader_next(again, scope, &got));
                CHECK_INT(got.epoch, want.epoch);
                CHECK_INT(got.number, want.number);
                CHECK_INT(got.count, want.count);
                if (got.count > 0)
                    CHECK_BYTES(got.indices, want.indices, (size_t)got.count * sizeof *got.indices);
            }
            dp_close(ctx);
        }
}

/* Another number of ranks, another batch: the samples that are left are the same. */
TEST(a_place_means_the_same_to_any_world)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value saved, ended;
    dp_batch batch;
    int times[48] = {0};
    dp_loader *loader =
        loader_of(ctx, set, (dp_loader_config){.sampler = {.count = 48, .seed = 1}, .batch = 8});
    for (int i = 0; i < 3; i++) {
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        for (int k = 0; k < 8; k++)
            times[batch.indices[k]]++;
    }
    CHECK_OK(dp_loader_save(loader, scope, &saved));
    for (int rank = 0; rank < 3; rank++) {
        dp_loader *part = loader_of(
            ctx, set,
            (dp_loader_config){.sampler = {.count = 48, .seed = 1, .rank = rank, .world = 3},
                               .batch = 4});
        CHECK_OK(dp_loader_load(part, saved));
        for (;;) {
            CHECK_OK(dp_loader_next(part, scope, &batch));
            if (batch.count == 0)
                break;
            for (int k = 0; k < batch.count; k++)
                times[batch.indices[k]]++;
        }
    }
    for (int i = 0; i < 48; i++)
        CHECK_INT(times[i], 1);
    dp_loader *odd =
        loader_of(ctx, set, (dp_loader_config){.sampler = {.count = 48, .seed = 1}, .batch = 5});
    take(loader, scope, 3);
    CHECK_OK(dp_loader_save(loader, scope, &ended));
    CHECK_OK(dp_loader_load(odd, ended)); /* an end is an end */
    CHECK_OK(dp_loader_next(odd, scope, &batch));
    CHECK_INT(batch.count, 0);
    CHECK_OK(dp_loader_next(odd, scope, &batch));
    CHECK_INT(batch.epoch, 1);
    dp_close(ctx);
}

/* At most so many batches of the first epoch, from batch `first` on. */
static void count_batches(dp_loader *loader, dp_scope *scope, int first, int most, int *times)
{
    dp_batch batch;
    dp_loader_info info;
    CHECK_OK(dp_loader_info_get(loader, &info));
    CHECK_INT(info.number, first);
    for (int i = 0; i < most; i++) {
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK_INT(batch.epoch, 0);
        if (batch.count == 0)
            break;
        CHECK_INT(batch.number, first + i);
        for (int64_t k = 0; k < batch.real_count; k++)
            times[batch.indices[k]]++;
    }
}

static void check_whole_epoch(dp_loader *loader, dp_scope *scope, const dp_sampler *sampler)
{
    dp_batch batch;
    dp_loader_info info;
    CHECK_OK(dp_loader_info_get(loader, &info));
    CHECK_INT(info.epoch, 1);
    CHECK_INT(info.batch_count, 17);
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    CHECK_INT(batch.epoch, 1);
    CHECK_INT(batch.indices[0], dp_sampler_index(sampler, 1, 0));
}

/* Four ranks take some batches of 3, then there are three, then two; where they begin, no batch of
   all ranks does, but for the last of these places. Each sample of the epoch counts once, and the
   next epoch is a whole one. */
static void deal_again_and_again(dp_sampling sampling, int workers)
{
    enum { COUNT = 101 };
    const int worlds[] = {4, 3, 2}, firsts[] = {0, 0, 13}, batches[] = {5, 2, 100};
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value place = dp_none(), next = dp_none();
    int times[COUNT] = {0}, all = 0;
    for (int w = 0; w < 3; w++) {
        for (int rank = 0; rank < worlds[w]; rank++) {
            const dp_sampler sampler = {
                .count = COUNT, .seed = 4, .rank = rank, .world = worlds[w], .sampling = sampling};
            dp_loader *loader = loader_of(
                ctx, set,
                (dp_loader_config){
                    .sampler = sampler, .batch = 3, .worker_count = workers, .epoch_count = 2});
            CHECK_OK(w > 0 ? dp_loader_load(loader, place) : DP_OK);
            count_batches(loader, scope, firsts[w], batches[w], times);
            CHECK_OK(dp_loader_save(loader, scope, &next));
            if (w == 2)
                check_whole_epoch(loader, scope, &sampler);
            dp_loader_destroy(loader);
        }
        place = next;
    }
    for (int i = 0; i < COUNT; i++) {
        CHECK(times[i] == 1 || (sampling == DP_SAMPLE_DROP && times[i] == 0));
        all += times[i];
    }
    CHECK_INT(all, sampling == DP_SAMPLE_DROP ? 100 : COUNT);
    dp_close(ctx);
}

static bool same_place(dp_value a, dp_value b)
{
    return dp_get(a, "epoch").as.i == dp_get(b, "epoch").as.i &&
           dp_get(a, "samples").as.i == dp_get(b, "samples").as.i &&
           dp_get(a, "ended").as.b == dp_get(b, "ended").as.b;
}

/* Two epochs of all ranks, a batch of each at a time. */
static void go_together(dp_loader **loaders, int world, dp_scope *scope, int count, bool drops)
{
    for (int64_t epoch = 0; epoch < 2; epoch++) {
        int times[16] = {0};
        bool ended = false;
        for (int number = 0; !ended; number++) {
            dp_value places[4];
            for (int rank = 0; rank < world; rank++) {
                dp_batch batch;
                CHECK_OK(dp_loader_next(loaders[rank], scope, &batch));
                CHECK(rank == 0 || batch.ended == ended);
                ended = batch.ended;
                CHECK_INT(batch.epoch, epoch);
                CHECK_INT(batch.number, number);
                CHECK((batch.count == 0) == (batch.value.kind == DP_NONE));
                for (int64_t k = 0; k < batch.count; k++)
                    times[batch.indices[k]]++;
                CHECK_OK(dp_loader_save(loaders[rank], scope, &places[rank]));
                CHECK(same_place(places[rank], places[0]));
            }
        }
        for (int i = 0; i < count; i++)
            CHECK(times[i] == 1 || (drops && times[i] == 0));
    }
}

TEST(an_epoch_ends_for_all_ranks_at_once)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    for (int count = 0; count < 14; count++)
        for (int i = 0; i < 48; i++) {
            int world = 1 + i % 4, batch = 1 + i / 4 % 3, workers = i < 24 ? 0 : 2;
            bool drops = i / 12 % 2 == 1;
            dp_scope *scope = dp_scope_begin(ctx);
            dp_loader *loaders[4];
            dp_loader_info first, own;
            for (int rank = 0; rank < world; rank++) {
                loaders[rank] =
                    loader_of(ctx, set,
                              (dp_loader_config){.sampler = {.count = count,
                                                             .rank = rank,
                                                             .world = world,
                                                             .sampling = DP_SAMPLE_EXACT},
                                                 .batch = batch,
                                                 .drop_last = drops,
                                                 .together = true,
                                                 .worker_count = workers,
                                                 .epoch_count = 3});
                CHECK_OK(dp_loader_info_get(loaders[rank], rank == 0 ? &first : &own));
                CHECK(rank == 0 || own.batch_count == first.batch_count);
            }
            go_together(loaders, world, scope, count, drops);
            CHECK_OK(dp_loader_seek(loaders[world - 1], 0, first.batch_count));
            CHECK_ERROR(dp_loader_seek(loaders[world - 1], 0, first.batch_count + 1),
                        DP_ERR_INVALID, "batch ");
            for (int rank = 0; rank < world; rank++)
                dp_loader_destroy(loaders[rank]);
            dp_scope_end(scope);
        }
    dp_close(ctx);
}

/* The first of four ranks has enough for one whole batch more: nobody gets it, so that what they
   have had is the beginning of the epoch, and what is left goes to whoever goes on. */
TEST(the_last_batch_is_left_out_for_all_ranks)
{
    enum { COUNT = 13 };
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    int times[COUNT] = {0};
    dp_loader_config config = {
        .sampler = {.count = COUNT, .seed = 4, .world = 4, .sampling = DP_SAMPLE_EXACT},
        .batch = 2,
        .drop_last = true,
        .together = true,
        .worker_count = 1,
        .epoch_count = 2};
    for (config.sampler.rank = 0; config.sampler.rank < 4; config.sampler.rank++) {
        dp_loader *loader = loader_of(ctx, set, config);
        dp_loader_info info;
        CHECK_OK(dp_loader_info_get(loader, &info));
        CHECK_INT(info.batch_count, 1);
        count_batches(loader, scope, 0, 1, times);
        dp_batch batch;
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK(batch.ended);
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK_INT(batch.epoch, 1);
        CHECK_INT(batch.number, 0);
        CHECK_INT(batch.count, 2);
    }
    config.sampler.world = 1;
    config.sampler.rank = 0;
    dp_loader *rest = loader_of(ctx, set, config);
    CHECK_OK(dp_loader_resume(rest, 0, 8));
    count_batches(rest, scope, 4, 2, times);
    for (int i = 0; i < COUNT; i++)
        CHECK_INT(times[i], i != (int)dp_sampler_index(&config.sampler, 0, 12));
    dp_close(ctx);
}

/* The only rank with one more is gone, and with it the batch that it had. */
TEST(a_rank_without_samples_knows_that_there_was_one_more)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value place;
    dp_batch batch;
    dp_loader_config config = {
        .sampler = {.count = 10, .rank = 2, .world = 3, .sampling = DP_SAMPLE_EXACT},
        .batch = 3,
        .together = true};
    dp_loader *loader = loader_of(ctx, set, config);
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    CHECK_OK(dp_loader_save(loader, scope, &place));
    config.sampler.world = 1;
    config.sampler.rank = 0;
    dp_loader *rest = loader_of(ctx, set, config);
    CHECK_OK(dp_loader_load(rest, place));
    CHECK_OK(dp_loader_next(rest, scope, &batch));
    CHECK_INT(batch.count, 1);
    CHECK_INT(batch.indices[0], dp_sampler_index(&config.sampler, 0, 9));
    CHECK_OK(dp_loader_next(rest, scope, &batch));
    CHECK(batch.ended);
    dp_close(ctx);
}

TEST(what_is_left_of_an_epoch_is_dealt_anew)
{
    for (int workers = 0; workers < 3; workers += 2) {
        deal_again_and_again(DP_SAMPLE_PADDED, workers);
        deal_again_and_again(DP_SAMPLE_EXACT, workers);
        deal_again_and_again(DP_SAMPLE_DROP, workers);
    }
}

/* The first of three ranks has a batch more than the others. Two go on before it has had that: they
   have it, though their own loaders are at the end. */
TEST(what_is_left_is_what_all_have_not_had)
{
    enum { COUNT = 10 };
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_loader *loader = NULL;
    dp_batch batch;
    int times[COUNT] = {0};
    dp_loader_config config = {
        .sampler = {.count = COUNT, .seed = 4, .world = 3, .sampling = DP_SAMPLE_EXACT},
        .batch = 3};
    for (config.sampler.rank = 0; config.sampler.rank < 3; config.sampler.rank++)
        count_batches(loader_of(ctx, set, config), scope, 0, 1, times);
    config.sampler.world = 2;
    for (config.sampler.rank = 0; config.sampler.rank < 2; config.sampler.rank++) {
        loader = loader_of(ctx, set, config);
        take(loader, scope, 4); /* which it forgets */
        CHECK_OK(dp_loader_resume(loader, 0, 9));
        count_batches(loader, scope, 0, 2, times);
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK_INT(batch.epoch, 1);
        CHECK_INT(batch.count, 3);
    }
    for (int i = 0; i < COUNT; i++)
        CHECK_INT(times[i], 1);
    CHECK_OK(dp_loader_resume(loader, 2, COUNT));
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    CHECK_INT(batch.count, 0);
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    CHECK_INT(batch.epoch, 3);
    CHECK_ERROR(dp_loader_resume(loader, 0, -1), DP_ERR_INVALID,
                "dp_loader_resume: samples is -1, of 10");
    CHECK_ERROR(dp_loader_resume(loader, 0, 11), DP_ERR_INVALID,
                "dp_loader_resume: samples is 11, of 10");
    CHECK_ERROR(dp_loader_resume(loader, -1, 0), DP_ERR_INVALID, "there is no epoch -1");
    CHECK_STATUS(dp_loader_resume(NULL, 0, 0), DP_ERR_INVALID);
    config.sampler.rank = 0;
    config.sampler.sampling = DP_SAMPLE_ENDLESS;
    loader = loader_of(ctx, set, config);
    CHECK_OK(dp_loader_resume(loader, 0, 6 * COUNT));
    CHECK_OK(dp_loader_next(loader, scope, &batch));
    CHECK_INT(batch.number, 10);
    dp_close(ctx);
}

/* Back to an epoch before one of which nothing is left for this rank: reading ahead skips it. */
TEST(what_is_read_ahead_skips_an_epoch_without_samples)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    const int64_t counts[] = {4, 1, 0, 0, 4, 1, 0}, epochs[] = {0, 0, 0, 1, 2, 2, 2};
    dp_loader *loader =
        loader_of(ctx, set,
                  (dp_loader_config){
                      .sampler = {.count = 10, .rank = 1, .world = 2, .sampling = DP_SAMPLE_EXACT},
                      .batch = 4,
                      .worker_count = 1,
                      .epoch_count = 3});
    CHECK_OK(dp_loader_resume(loader, 1, 9));
    CHECK_OK(dp_loader_seek(loader, 0, 0));
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        dp_batch batch;
        CHECK_OK(dp_loader_next(loader, scope, &batch));
        CHECK_INT(batch.count, counts[i]);
        CHECK_INT(batch.epoch, epochs[i]);
        CHECK(batch.ended == (counts[i] == 0));
    }
    dp_close(ctx);
}

TEST(a_place_that_does_not_fit_is_refused)
{
    own_set *set = new_set();
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value saved;
    dp_loader_info info;
    dp_loader *loader = loader_of(
        ctx, set,
        (dp_loader_config){.sampler = {.count = 8, .seed = 3}, .batch = 2, .epoch_count = 4});
    take(loader, scope, 7);
    CHECK_OK(dp_loader_save(loader, scope, &saved));
    CHECK_TREE(ctx, saved,
               "{'epoch': 1, 'samples': 4, 'ended': False, 'count': 8, 'seed': 3, "
               "'in_order': False, 'endless': False}");
    const struct {
        const char *key;
        dp_value value;
        const char *says;
    } rows[] = {{"count", dp_int(9), "'count' is 8, saved 9"},
                {"seed", dp_int(4), "'seed' is 3, saved 4"},
                {"seed", dp_none(), "'seed' is missing, or no number"},
                {"in_order", dp_bool(true), "'in_order' is 0, saved 1"},
                {"in_order", dp_int(0), "'in_order' is missing, or no bool"},
                {"endless", dp_bool(true), "'endless' is 0, saved 1"},
                {"epoch", dp_float(1), "'epoch' is missing, or no number"},
                {"epoch", dp_int(-1), "there is no epoch -1"},
                {"epoch", dp_int(4), "there is no epoch 4"},
                {"samples", dp_int(-2), "'samples' is -2, of 8"},
                {"samples", dp_int(9), "'samples' is 9, of 8"},
                {"samples", dp_int(10), "batch 5 of 4"},
                {"samples", dp_string(scope, "4"), "'samples' is missing"},
                {"ended", dp_none(), "'ended' is missing, or no bool"}};
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        dp_status status =
            dp_loader_load(loader, tree_replaced(scope, saved, rows[i].key, rows[i].value));
        CHECK(status == DP_ERR_MISMATCH || status == DP_ERR_INVALID);
        CHECK_SAYS(dp_last_error(), rows[i].says);
        CHECK_SAYS(dp_last_error(), "dp_loader_load: ");
    }
    CHECK_STATUS(dp_loader_load(loader, dp_none()), DP_ERR_MISMATCH);
    CHECK_OK(dp_loader_info_get(loader, &info));
    CHECK_INT(info.epoch, 1);
    CHECK_INT(info.number, 2);
    CHECK_ERROR(dp_loader_seek(loader, 0, 5), DP_ERR_INVALID, "dp_loader_seek: batch 5 of 4");
    CHECK_ERROR(dp_loader_seek(loader, 4, 0), DP_ERR_INVALID, "there is no epoch 4");
    dp_loader *endless = loader_of(
        ctx, set,
        (dp_loader_config){.sampler = {.count = 8, .sampling = DP_SAMPLE_ENDLESS}, .batch = 2});
    CHECK_ERROR(dp_loader_seek(endless, 1, 0), DP_ERR_INVALID, "there is no epoch 1");
    dp_loader *lasting = loader_of(ctx, set, (dp_loader_config){.sampler = {.count = 8}});
    CHECK_ERROR(dp_loader_seek(lasting, INT64_MAX, 8), DP_ERR_INVALID, "there is no epoch");
    CHECK_ERROR(dp_loader_seek(endless, 0, INT64_MAX), DP_ERR_INVALID, "batch 9223372036854775807");
    CHECK_OK(dp_loader_seek(endless, 0, INT64_C(1) << 59));
    take(endless, scope, 2);
    dp_close(ctx);
}

/* The same for a sample in every run, another for the next; whoever reads it. */
static atomic_ullong seeds[64];

static dp_status read_seed(dp_sample *sample, void *user)
{
    const int *round = user;
    size_t at = (size_t)(sample->epoch * 16 + sample->index);
    if (*round == 0)
        atomic_store(&seeds[at], sample->seed);
    else
        CHECK(atomic_load(&seeds[at]) == sample->seed);
    sample->value = dp_int(0);
    return DP_OK;
}

TEST(each_sample_has_its_seed)
{
    dp_ctx *ctx = open_cpus(1);
    for (int round = 0; round < 3; round++) {
        dp_loader *loader = NULL;
        CHECK_OK(dp_loader_create(ctx,
                                  &(dp_loader_config){.sampler = {.count = 16},
                                                      .batch = round + 2,
                                                      .read = read_seed,
                                                      .user = &round,
                                                      .worker_count = round},
                                  &loader));
        for (int ends = 0; ends < 4;) {
            dp_scope *step = dp_scope_begin(ctx);
            dp_batch batch;
            CHECK_OK(dp_loader_next(loader, step, &batch));
            ends += batch.count == 0;
            dp_scope_end(step);
        }
        dp_loader_destroy(loader);
    }
    for (int i = 0; i < 64; i++)
        for (int k = 0; k < i; k++)
            CHECK(atomic_load(&seeds[i]) != atomic_load(&seeds[k]));
    dp_close(ctx);
}

/* ---- bad input ------------------------------------------------------------------------------- */

static const dp_field nameless = {NULL, DP_F32, 0, {0}},
                      twice[] = {{"a", DP_F32, 0, {0}}, {"a", DP_F32, 0, {0}}};
static const dp_field deep = {"d", DP_F32, DP_MAX_DIMS, {1}}, flat = {"f", DP_F32, -1, {0}};
static const dp_field negative = {"n", DP_F32, 1, {-1}}, odd = {"o", (dp_dtype)77, 0, {0}};

TEST(loaders_that_make_no_sense)
{
    static const struct {
        const char *says;
        dp_loader_config config;
    } rows[] = {
        {"dp_loader_create: read is NULL", {.sampler = {.count = 1}}},
        {"sampler.count is -1", {.sampler = {.count = -1}, .read = read_nothing}},
        {"sampler.rank is 1 of 0", {.sampler = {.rank = 1}, .read = read_nothing}},
        {"batch is -1", {.read = read_nothing, .batch = -1}},
        {"batch is 2147483648", {.read = read_nothing, .batch = INT64_C(1) << 31}},
        {"batch is 3, no multiple of sampler.block, 2",
         {.sampler = {.block = 2}, .read = read_nothing, .batch = 3}},
        {"batch is 0, no multiple of sampler.block, 2",
         {.sampler = {.block = 2}, .read = read_nothing}},
        {"batch, is 6: no multiple of a rank's 4 shards",
         {.sampler = {.world = 2, .shards = 8}, .read = read_nothing, .batch = 6}},
        {"batch, is 1: no multiple of a rank's 4 shards",
         {.sampler = {.shards = 4}, .read = read_nothing}},
        {"sampler.block is 4 and batch 8: with shards they have to be equal",
         {.sampler = {.world = 2, .shards = 8, .block = 4}, .read = read_nothing, .batch = 8}},
        {"sampler.shards is 6, no multiple of 4 ranks",
         {.sampler = {.world = 4, .shards = 6}, .read = read_nothing}},
        {"sampler.shards is -4", {.sampler = {.shards = -4}, .read = read_nothing}},
        {"worker_count is -1", {.read = read_nothing, .worker_count = -1}},
        {"worker_count is 1025, of at most 1024", {.read = read_nothing, .worker_count = 1025}},
        {"ahead is -1", {.read = read_nothing, .ahead = -1}},
        {"ahead is 65537", {.read = read_nothing, .ahead = 65537}},
        {"epoch_count is -1", {.read = read_nothing, .epoch_count = -1}},
        {"fields is NULL", {.read = read_nothing, .field_count = 1}},
        {"field 0 has no name", {.read = read_nothing, .fields = &nameless, .field_count = 1}},
        {"fields 0 and 1 are both 'a'", {.read = read_nothing, .fields = twice, .field_count = 2}},
        {"field 'd' has", {.read = read_nothing, .fields = &deep, .field_count = 1}},
        {"field 'f' has", {.read = read_nothing, .fields = &flat, .field_count = 1}},
        {"field 'n' has", {.read = read_nothing, .fields = &negative, .field_count = 1}},
        {"field 'o' has", {.read = read_nothing, .fields = &odd, .field_count = 1}},
    };
    dp_ctx *ctx = open_cpus(1);
    dp_loader *loader = NULL;
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        CHECK_ERROR(dp_loader_create(ctx, &rows[i].config, &loader), DP_ERR_INVALID, rows[i].says);
    const dp_loader_config fine = {.read = read_nothing};
    CHECK_ERROR(dp_loader_create(ctx, NULL, &loader), DP_ERR_INVALID, "config is NULL");
    CHECK_ERROR(dp_loader_create(ctx, &fine, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_STATUS(dp_loader_create(NULL, &fine, &loader), DP_ERR_INVALID);
    CHECK(loader == NULL);
    CHECK_ERROR(dp_loader_next(NULL, NULL, NULL), DP_ERR_INVALID, "loader is NULL");
    CHECK_ERROR(dp_loader_info_get(NULL, NULL), DP_ERR_INVALID, "loader is NULL");
    CHECK_ERROR(dp_loader_save(NULL, NULL, NULL), DP_ERR_INVALID, "loader is NULL");
    CHECK_OK(dp_loader_create(ctx, &fine, &loader));
    CHECK_ERROR(dp_loader_info_get(loader, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_ERROR(dp_loader_save(loader, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_STATUS(dp_loader_save(loader, NULL, &(dp_value){0}), DP_ERR_INVALID);
    dp_close(ctx);
}

/* A batch that no memory would hold. */
TEST(a_batch_that_is_too_large)
{
    static const dp_field huge = {"huge", DP_F32, 2, {INT64_C(1) << 28, INT64_C(1) << 20}};
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_loader *loader = NULL;
    dp_batch batch;
    CHECK_OK(dp_loader_create(ctx,
                              &(dp_loader_config){.sampler = {.count = 1 << 20},
                                                  .batch = 1 << 20,
                                                  .read = read_nothing,
                                                  .fields = &huge,
                                                  .field_count = 1},
                              &loader));
    CHECK(dp_loader_next(loader, scope, &batch) != DP_OK);
    CHECK_SAYS(dp_last_error(), "dp_tensor_new: ");
    dp_close(ctx);
}

/* ---- no memory ------------------------------------------------------------------------------- */

/* Each allocation of two epochs fails once: it is an error, or it is done without; nothing is lost
   but what a function of ours could not make. */
static bool memory_runs_out(size_t at, int workers)
{
    test_allocator counter = {0};
    own_set *set = new_set();
    dp_ctx *ctx = NULL;
    dp_loader *loader = NULL;
    dp_loader_config config = {.sampler = {.count = 6, .in_order = true},
                               .batch = 2,
                               .read = read_sample,
                               .user = set,
                               .fields = both,
                               .field_count = 2,
                               .worker_count = workers,
                               .epoch_count = 2};
    CHECK_OK(dp_open(
        &(dp_config){.device_count = 1, .poison = true, .allocator = test_allocator_of(&counter)},
        &ctx));
    counter.fail_at = counter.call_count + at;
    if (dp_loader_create(ctx, &config, &loader) != DP_OK) {
        CHECK_SAYS(dp_last_error(), "no memory");
        CHECK_OK(dp_loader_create(ctx, &config, &loader));
    }
    for (int ends = 0, errors = 0; ends < 2;) {
        dp_batch batch = {0};
        dp_scope *step = dp_scope_begin(ctx);
        (void)dp_error(DP_OK, "before");
        dp_status status = step != NULL ? dp_loader_next(loader, step, &batch) : DP_ERR_NO_MEMORY;
        CHECK(status == DP_OK || (status == DP_ERR_NO_MEMORY && ++errors == 1));
        if (status == DP_OK && batch.count > 0)
            check_batch(&batch, &config);
        if (status == DP_OK) /* what could not be read ahead yet is nobody's error */
            CHECK_STR(dp_last_error(), "before");
        ends += status == DP_OK && batch.count == 0;
        dp_scope_end(step);
    }
    CHECK_INT(atomic_load(&set->calls), 12);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
    return counter.fail_count > 0;
}

TEST(every_allocation_of_a_loader_fails_once)
{
    for (int workers = 0; workers < 3; workers += 2) {
        size_t at = 1;
        while (memory_runs_out(at, workers))
            at += (size_t)test_step();
        CHECK(at > 20);
    }
}

/* ---- collating ------------------------------------------------------------------------------- */

typedef struct collate_row {
    const char *in, *want;
    dp_status status;
} collate_row;

static void check_collate(dp_ctx *ctx, dp_scope *scope, dp_collate_fn fn, const collate_row *rows,
                          size_t count)
{
    for (size_t i = 0; i < count; i++) {
        dp_value samples = tree_of(scope, rows[i].in), out = dp_none();
        dp_status got = fn(scope, samples.as.items, samples.count, &out, NULL);
        tree_check_row(ctx, rows[i].in, got, out, rows[i].status, rows[i].want);
    }
}

TEST_BACKENDS(pseudo_collate_stacks_nothing)
{
    static const collate_row rows[] = {
        {"[1, 2]", "[1, 2]", DP_OK},
        {"['a', 'bc']", "['a', 'bc']", DP_OK},
        {"[f32[2]=1 2, f32[1]=3]", "[f32[2]=1 2, f32[1]=3]", DP_OK},
        {"[None, None]", "[None, None]", DP_OK},
        {"[1, 'a']", "[1, 'a']", DP_OK},
        {"[[1, 'a'], [2, 'b'], [3, 'c']]", "[[1, 2, 3], ['a', 'b', 'c']]", DP_OK},
        {"[(1, 2), (3, 4)]", "[[1, 3], [2, 4]]", DP_OK},
        {"[(1, 2), [3, 4]]", "[[1, 3], [2, 4]]", DP_OK},
        {"[{'a': 1, 'b': [2]}, {'b': [4], 'a': 3}]", "{'a': [1, 3], 'b': [[2, 4]]}", DP_OK},
        {"[{'inputs': f32[1]=1, 'data_samples': &}, {'inputs': f32[2]=2 3, 'data_samples': &}]",
         "{'inputs': [f32[1]=1, f32[2]=2 3], 'data_samples': [&, &]}", DP_OK},
        {"[<cpu: 1>, <cpu: 2>]", "[<cpu pad=0 dims=2: 1>, <cpu pad=0 dims=2: 2>]", DP_OK},
        {"[[], []]", "[]", DP_OK},
        {"[{}, {}]", "{}", DP_OK},
        {"[7]", "[7]", DP_OK},
        {"[1, [2]]", "[1, [2]]", DP_OK}, /* the first one says what they are */
        {"[[1, 2], [3]]",
         "dp_pseudo_collate: the value has 2 entries in sample 0 and 1 in sample 1",
         DP_ERR_MISMATCH},
        {"[{'a': [(1, 2)]}, {'a': [(1)]}, {'a': [(1, 2)]}]",
         "['a'][0] has 2 entries in sample 0 and 1 in sample 1", DP_ERR_MISMATCH},
        {"[{'a': [1]}, {'a': 1}]", "['a'] is a list in sample 0 and an int in sample 1",
         DP_ERR_MISMATCH},
        {"[{'a': 1}, 2]", "the value is a dict in sample 0 and an int in sample 1",
         DP_ERR_MISMATCH},
        {"[{'a': 1}, {'b': 1}]", "the value has key 'b' in sample 1, not in sample 0",
         DP_ERR_MISMATCH},
        {"[{'a': 1, 'b': 1}, {'a': 1}]", "['b'] is missing in sample 1", DP_ERR_MISMATCH},
        {"[{'a': 1}, {'a': 1}, {'a': 1, 'b': 1}]",
         "the value has key 'b' in sample 2, not in sample 0", DP_ERR_MISMATCH},
    };
    check_collate(ctx, scope, dp_pseudo_collate, rows, sizeof rows / sizeof rows[0]);
}

TEST_BACKENDS(default_collate_stacks_tensors)
{
    static const collate_row rows[] = {
        {"[1, 2]", "i64[2]=1 2", DP_OK},
        {"[1.5, 2.5]", "f64[2]=1.5 2.5", DP_OK},
        {"[True, False]", "bool[2]=1 0", DP_OK},
        {"['a', 'bc']", "['a', 'bc']", DP_OK},
        {"[&, &]", "[&, &]", DP_OK},
        {"[f32[2]=1 2, f32[2]=3 4]", "f32[2,2]=1 2 3 4", DP_OK},
        {"[(f32[1]=1, 2), (f32[1]=3, 4)]", "[f32[2,1]=1 3, i64[2]=2 4]", DP_OK},
        {"[{'inputs': u8[1]=1, 'data_samples': &, 'name': 'x'}, {'inputs': u8[1]=2, "
         "'data_samples': &, 'name': 'y'}]",
         "{'inputs': u8[2,1]=1 2, 'data_samples': [&, &], 'name': ['x', 'y']}", DP_OK},
        {"[{'a': [f32[1]=1]}, {'a': [f32[2]=1 2]}]",
         "dp_default_collate: ['a'][0] of sample 1 is f32 (2), which does not stack "
         "with f32 (1)",
         DP_ERR_MISMATCH},
        {"[None, None]", "dp_default_collate: the value is none: put it in", DP_ERR_INVALID},
        {"[(1, 'a'), [2, 'b']]", "[i64[2]=1 2, ['a', 'b']]", DP_OK},
        {"[1, [2]]", "is an int in sample 0 and a list in sample 1", DP_ERR_MISMATCH},
        {"[1, 'a']", "is an int in sample 0 and a string in sample 1", DP_ERR_MISMATCH},
        {"[[1], [2, 3]]", "1 entries in sample 0 and 2 in sample 1", DP_ERR_MISMATCH},
    };
    check_collate(ctx, scope, dp_default_collate, rows, sizeof rows / sizeof rows[0]);
}

TEST(samples_that_make_no_sense)
{
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    const dp_value one = dp_int(1), torn = {.kind = DP_LIST, .count = 3, .depth = 1};
    dp_value out = dp_none(), deep_list = dp_int(1);
    for (int i = 0; i < 2; i++) {
        dp_collate_fn fn = i == 0 ? dp_pseudo_collate : dp_default_collate;
        CHECK_ERROR(fn(scope, &one, 0, &out, NULL), DP_ERR_INVALID, ": 0 samples");
        CHECK_ERROR(fn(scope, NULL, 1, &out, NULL), DP_ERR_INVALID, "samples is NULL");
        CHECK_ERROR(fn(scope, &one, 1, NULL, NULL), DP_ERR_INVALID, "out is NULL");
        CHECK_STATUS(fn(NULL, &one, 1, &out, NULL), DP_ERR_INVALID);
        CHECK_STATUS(fn(scope, &torn, 1, &out, NULL), DP_ERR_INVALID);
        const dp_value error = dp_string(NULL, "");
        CHECK_STATUS(fn(scope, &error, 1, &out, NULL), DP_ERR_INVALID);
    }
    CHECK_INT(out.kind, DP_NONE);
    for (int i = 0; i < DP_MAX_DEPTH - 1; i++)
        deep_list = dp_list_make(scope, DP_LIST, &deep_list, 1);
    CHECK_OK(dp_pseudo_collate(scope, &deep_list, 1, &out, NULL));
    CHECK_INT(out.depth, DP_MAX_DEPTH);
    deep_list = dp_list_make(scope, DP_LIST, &deep_list, 1);
    CHECK_STATUS(dp_pseudo_collate(scope, &deep_list, 1, &out, NULL), DP_ERR_INVALID);
    dp_close(ctx);
}

static dp_status collate_both(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    dp_value pseudo;
    (void)ctx;
    DP_TRY(dp_pseudo_collate(scope, in.as.items, in.count, &pseudo, NULL));
    return dp_default_collate(scope, in.as.items, in.count, out, NULL);
}

TEST(collate_out_of_memory)
{
    tree_out_of_memory(collate_both, 40, "[{'a': 1, 'b': ['x', &]}, {'a': 3, 'b': ['y', &]}]",
                       "{'a': i64[2]=1 3, 'b': [['x', 'y'], [&, &]]}");
}

/* ---- preparing ------------------------------------------------------------------------------- */

static bool lies_on(dp_value value, dp_device device)
{
    return value.kind == DP_TENSOR && value.as.t->device.backend == device.backend &&
           value.as.t->device.index == device.index;
}

TEST(what_is_prepared_lies_in_a_scope_of_its_context)
{
    dp_ctx *ctx = open_cpus(1), *other = open_cpus(1);
    dp_scope *scope = dp_scope_begin(other);
    dp_value in = tree_of(dp_scope_begin(ctx), "[u8[1,1,1]=5]"), out;
    CHECK_ERROR(dp_to_device(ctx, scope, in, (dp_device){0, 0}, &out), DP_ERR_INVALID,
                "dp_to_device: the scope is of another context");
    CHECK_ERROR(dp_stack_batch(ctx, scope, in, 1, 0, &out), DP_ERR_INVALID,
                "dp_stack_batch: the scope is of another context");
    CHECK_ERROR(dp_image_batch(ctx, scope, in, NULL, &out), DP_ERR_INVALID,
                "dp_image_batch: the scope is of another context");
    dp_close(ctx), dp_close(other);
}

TEST_BACKENDS(structures_go_to_a_device)
{
    static const char text[] =
        "{'a': f32[2]=1 2, 'b': [(1, u8[1]=3), 'x', None], 'c': &, 'd': "
        "<stack pad=0 dims=2: [i64[1]=4]>, 'e': <cpu pad=0 dims=2: f32[1]=5>}";
    dp_value in = tree_of(scope, text), out, back;
    for (int rank = 0; rank < 2; rank++) {
        dp_device device = dp_local_device(ctx, rank);
        CHECK_OK(dp_to_device(ctx, scope, in, device, &out));
        CHECK_TREE(ctx, out, text);
        CHECK(lies_on(dp_get(out, "a"), device));
        CHECK(lies_on(dp_at(dp_at(dp_get(out, "b"), 0), 1), device));
        CHECK(lies_on(dp_at(dp_get(out, "d").as.c->data, 0), device));
        CHECK(lies_on(dp_get(out, "e").as.c->data, (dp_device){0, 0}));
        CHECK_INT(dp_at(dp_get(out, "b"), 0).kind, DP_TUPLE);
        CHECK_OK(dp_to_device(ctx, scope, out, device, &back)); /* it is there */
        CHECK(dp_get(back, "a").as.t->data == dp_get(out, "a").as.t->data);
        CHECK_OK(dp_to_device(ctx, scope, out, (dp_device){0, 0}, &back));
        CHECK_TREE(ctx, back, text);
        CHECK(lies_on(dp_get(back, "a"), (dp_device){0, 0}));
    }
    CHECK_OK(dp_wait(ctx));
    CHECK_STATUS(dp_to_device(ctx, scope, in, (dp_device){1, 99}, &out), DP_ERR_INVALID);
    CHECK_ERROR(dp_to_device(NULL, scope, in, (dp_device){0, 0}, &out), DP_ERR_INVALID,
                "dp_to_device: ctx is NULL");
    CHECK_ERROR(dp_to_device(ctx, scope, in, (dp_device){0, 0}, NULL), DP_ERR_INVALID,
                "dp_to_device: out is NULL");
    CHECK_STATUS(dp_to_device(ctx, scope, dp_string(NULL, ""), (dp_device){0, 0}, &out),
                 DP_ERR_INVALID);
}

typedef struct stack_row {
    const char *in;
    int64_t divisor;
    double value;
    const char *want;
    dp_status status;
} stack_row;

TEST_BACKENDS(batches_are_stacked_as_mmengine_does)
{
    static const stack_row rows[] = {
        {"[f32[1,1,2]=1 2, f32[1,3,1]=3 4 5]", 2, 0, "f32[2,1,4,2]=1 2 0 0 0 0 0 0 3 0 4 0 5 0 0 0",
         DP_OK},
        {"[f32[1,1,2]=1 2, f32[1,3,1]=3 4 5]", 0, 9, "f32[2,1,3,2]=1 2 9 9 9 9 3 9 4 9 5 9", DP_OK},
        {"[u8[2]=1 2, u8[2]=3 4]", 5, 7, "u8[2,2]=1 2 3 4", DP_OK}, /* dim 0 is not padded */
        {"(i64[1,2]=1 2)", 1, 0, "i64[1,1,2]=1 2", DP_OK},
        {"[f32[1,2]=1 2]", 3, -1, "f32[1,1,3]=1 2 -1", DP_OK},
        {"[f32[1,0], f32[1,0]]", 4, 5, "f32[2,1,0]=", DP_OK},
        {"[f32[1,0], f32[1,1]=3]", 2, 5, "f32[2,1,2]=5 5 3 5", DP_OK},
        {"[f32[2,1], f32[1,1]]", 1, 0,
         "dp_stack_batch: dim 0 is 1 in tensor 1 and 2 in tensor 0, and is not padded",
         DP_ERR_MISMATCH},
        {"[f32[1], f32[1,1]]", 1, 0, "tensor 1 has 2 dims of f32, tensor 0 1 of f32",
         DP_ERR_MISMATCH},
        {"[f32[1], f64[1]]", 1, 0, "tensor 1 has 1 dims of f64, tensor 0 1 of f32",
         DP_ERR_MISMATCH},
        {"[]", 1, 0, "dp_stack_batch: not a list of tensors, or an empty one", DP_ERR_INVALID},
        {"f32[2]", 1, 0, "not a list of tensors", DP_ERR_INVALID},
        {"[1]", 1, 0, "dp_stack_batch: dp_as_tensor: tensor 0 is an int, not a tensor",
         DP_ERR_INVALID},
        {"[f32[1], 'b']", 1, 0, "tensor 1 is a string, not a tensor", DP_ERR_INVALID},
        {"[f32[]=1]", 1, 0, "tensors of 0 dims cannot be stacked", DP_ERR_INVALID},
        {"[f32[1,1,1,1,1,1,1,1]=1]", 1, 0, "tensors of 8 dims cannot be stacked", DP_ERR_INVALID},
        {"[f32[1]=1]", -1, 0, "pad_divisor is -1", DP_ERR_INVALID},
        {"[f32[1,3]]", INT64_MAX - 1, 0, "pad_divisor is 9223372036854775806", DP_ERR_INVALID},
        {"[u8[1,1]=1]", 2, 0.5, "0.5", DP_ERR_INVALID},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
        for (int far = 0; far < 2; far++) {
            dp_value in = tree_of(scope, rows[i].in), out = dp_none();
            if (far == 1)
                in = tree_on(ctx, scope, in, dp_local_device(ctx, 1));
            dp_status got = dp_stack_batch(ctx, scope, in, rows[i].divisor, rows[i].value, &out);
            tree_check_row(ctx, rows[i].in, got, out, rows[i].status, rows[i].want);
            if (got == DP_OK)
                CHECK(lies_on(out, far ? dp_local_device(ctx, 1) : (dp_device){0, 0}));
        }
    dp_value mixed[] = {tree_of(scope, "f32[1]=1"), dp_none()}, out;
    mixed[1] = tree_on(ctx, scope, mixed[0], dp_local_device(ctx, 1));
    CHECK_ERROR(dp_stack_batch(ctx, scope, dp_list_make(scope, DP_LIST, mixed, 2), 1, 0, &out),
                DP_ERR_MISMATCH, "tensor 1 is on another device than tensor 0");
    CHECK_ERROR(dp_stack_batch(ctx, scope, mixed[0], 1, 0, NULL), DP_ERR_INVALID, "out is NULL");
    mixed[0] = dp_string(NULL, "");
    CHECK_ERROR(dp_stack_batch(ctx, scope, mixed[0], 1, 0, &out), DP_ERR_INVALID,
                "dp_string: no scope");
    CHECK_ERROR(dp_image_batch(ctx, scope, mixed[0], NULL, &out), DP_ERR_INVALID,
                "dp_string: no scope");
}

static const double three_means[] = {1, 2, 3}, three_stds[] = {2, 4, 0.5};
static const double one_mean[] = {1}, one_std[] = {-4};

typedef struct image_row {
    const char *in;
    dp_image_config config;
    const char *want;
    dp_status status;
} image_row;

/* clang-format off */
#define NORMED .mean = three_means, .std = three_stds, .channel_count = 3
static const image_row image_rows[] = {
    {"[u8[1,1,2]=1 2, u8[1,2,1]=3 4]", {0}, "f32[2,1,2,2]=1 2 0 0 3 0 4 0", DP_OK},
    {"[u8[3,1,1]=5 10 4]", {NORMED}, "f32[1,3,1,1]=2 2 2", DP_OK},
    {"[u8[3,1,1]=4 10 5]", {NORMED, .swap_channels = true}, "f32[1,3,1,1]=2 2 2", DP_OK},
    {"[f32[3,1,1]=4 10 5]", {.swap_channels = true}, "f32[1,3,1,1]=5 10 4", DP_OK},
    {"[f64[3,1,1]=4 10 5, f64[3,1,1]=1 2 3]", {NORMED},
     "f32[2,3,1,1]=1.5 2 4 0 0 0", DP_OK},
    {"[i16[2,1,1]=-3 5]", {.mean = one_mean, .std = one_std, .channel_count = 1},
     "f32[1,2,1,1]=1 -1", DP_OK},
    {"[u8[1,1,1]=9]", {.mean = one_mean, .std = one_std, .channel_count = 1, .pad_divisor = 2,
     .pad_value = 7}, "f32[1,1,2,2]=-2 7 7 7", DP_OK},
    {"u8[2,1,1,2]=1 2 3 4", {0}, "f32[2,1,1,2]=1 2 3 4", DP_OK},
    {"u8[1,3,1,1]=4 10 5", {NORMED, .swap_channels = true, .pad_divisor = 2},
     "f32[1,3,2,2]=2 0 0 0 2 0 0 0 2 0 0 0", DP_OK},
    {"u8[0,3,5,2]=", {NORMED, .pad_divisor = 4, .pad_value = 1}, "f32[0,3,8,4]=", DP_OK},
    {"i16[0,1,5,0]=", {0}, "f32[0,1,5,0]=", DP_OK},
    {"u8[0,1,2,2]=", {NORMED}, "image 0 has 1 channels: mean and std are for 3", DP_ERR_INVALID},
    {"u8[0,1,2,2]=", {.pad_divisor = -2}, "pad_divisor is -2", DP_ERR_INVALID},
    {"u8[0,1,2,3]=", {.pad_divisor = INT64_MAX - 1}, "dp_image_batch: ", DP_ERR_INVALID},
    {"u8[0,2,2]=", {0}, "a tensor of images has 4 dims, this one has 3", DP_ERR_INVALID},
    {"u8[1152921504606846976,1,0,0]=", {0}, "more elements than can be counted", DP_ERR_INVALID},
    {"u8[1000000000000,1,0,5]=", {.mean = one_mean, .std = one_std, .channel_count = 1},
     "f32[1000000000000,1,0,5]=", DP_OK},
    {"u8[2,1,0,5]=", {.pad_divisor = 4}, "f32[2,1,0,8]=", DP_OK},
    {"[u8[3,1000000000000,0]]", {NORMED}, "f32[1,3,1000000000000,0]=", DP_OK},
    {"[f32[1000000000000,0,2]]", {0}, "f32[1,1000000000000,0,2]=", DP_OK},
    {"(u8[1,0,3])", {.pad_divisor = 2, .pad_value = 1}, "f32[1,1,0,4]=", DP_OK},
    {"[u8[1,0,1], u8[1,1,1]=1]", {.mean = one_mean, .std = one_std, .channel_count = 1},
     "f32[2,1,1,1]=0 -0", DP_OK},
    {"[u8[1,1,1]=1]", {NORMED}, "dp_image_batch: image 0 has 1 channels: mean and std are for 3",
     DP_ERR_INVALID},
    {"u8[2,1,1,1]=1 2", {NORMED}, "image 0 has 1 channels: mean and std are for 3", DP_ERR_INVALID},
    {"u8[1,4,1,1]=1 2 3 4", {.swap_channels = true},
     "image 0 has 4 channels: swapping them takes 3", DP_ERR_INVALID},
    {"[u8[4,1,1]]", {.swap_channels = true}, "image 0 has 4 channels: swapping them takes 3",
     DP_ERR_INVALID},
    {"[u8[1,1]=1]", {0}, "image 0 has 2 dims, not channels, height and width", DP_ERR_INVALID},
    {"u8[1,1,1]=1", {0}, "a tensor of images has 4 dims, this one has 3", DP_ERR_INVALID},
    {"[u8[1,1,1]=1, u8[3,1,1]]", {0}, "dim 0 is 3 in tensor 1", DP_ERR_MISMATCH},
    {"[]", {0}, "dp_image_batch: not a list", DP_ERR_INVALID},
    {"7", {0}, "dp_image_batch: not a list", DP_ERR_INVALID},
    {"['a']", {0}, "tensor 0 is a string", DP_ERR_INVALID},
    {"[u8[1,1,1]=1]", {.mean = one_mean}, "mean is given without std", DP_ERR_INVALID},
    {"[u8[1,1,1]=1]", {.std = one_mean}, "mean is given without std", DP_ERR_INVALID},
    {"[u8[1,1,1]=1]", {.mean = one_mean, .std = one_std}, "for 1 or 3 channels, not 0",
     DP_ERR_INVALID},
    {"[u8[1,1,1]=1]", {.mean = one_mean, .std = one_std, .channel_count = 2},
     "for 1 or 3 channels, not 2", DP_ERR_INVALID},
    {"[u8[1,1,1]=1]", {.mean = one_mean, .std = (const double[]){0}, .channel_count = 1},
     "std of channel 0 is 0", DP_ERR_INVALID},
    {"[u8[1,1,1]=1]", {.mean = one_mean, .std = (const double[]){1e-60}, .channel_count = 1},
     "std of channel 0 is 1e-60, in f32 0", DP_ERR_INVALID},
    {"[u8[1,1,1]=1]", {.pad_divisor = -2}, "pad_divisor is -2", DP_ERR_INVALID},
};
/* clang-format on */

TEST_BACKENDS(images_are_made_as_mmengine_does)
{
    for (size_t i = 0; i < sizeof image_rows / sizeof image_rows[0]; i++)
        for (int far = 0; far < 2; far++) {
            const image_row *row = &image_rows[i];
            dp_value in = tree_of(scope, row->in), out = dp_none();
            if (far == 1)
                in = tree_on(ctx, scope, in, dp_local_device(ctx, 1));
            dp_status got = dp_image_batch(ctx, scope, in, &row->config, &out);
            tree_check_row(ctx, row->in, got, out, row->status, row->want);
            if (got == DP_OK)
                CHECK(lies_on(out, far ? dp_local_device(ctx, 1) : (dp_device){0, 0}));
        }
}

/* One byte as so many images that the memory for their list cannot be counted. */
TEST(more_images_than_can_be_counted)
{
    uint8_t byte = 7;
    dp_ctx *ctx = open_cpus(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor images = dp_wrap(&byte, DP_U8, DP_SHAPE(1, 1, 1, 1));
    dp_value out;
    images.shape[0] = INT64_MAX / (int64_t)sizeof(dp_value) * 2 + 2;
    images.stride[0] = 0;
    CHECK_ERROR(dp_image_batch(ctx, scope, dp_of(scope, &images), NULL, &out), DP_ERR_NO_MEMORY,
                "dp_image_batch: ");
    dp_close(ctx);
}

/* Pictures come with their channels last; numbers are torch's, which subtracts and divides. */
TEST_BACKENDS(images_of_any_strides)
{
    enum { H = 5, W = 7 };
    const double mean[] = {123.675, 116.28, 103.53}, std[] = {58.395, 57.12, 57.375};
    uint8_t bytes[H * W * 3];
    dp_tensor image, turned;
    const dp_tensor *got;
    dp_value out;
    for (int i = 0; i < H * W * 3; i++)
        bytes[i] = (uint8_t)(i * 37 % 256);
    for (int far = 0; far < 2; far++) {
        float numbers[3 * 6 * 8];
        CHECK_OK(dp_tensor_from(scope, far ? dp_local_device(ctx, 1) : (dp_device){0, 0}, bytes,
                                DP_U8, DP_SHAPE(H, W, 3), &image));
        CHECK_OK(dp_transpose(&image, 1, 2, &turned));
        CHECK_OK(dp_transpose(&turned, 0, 1, &turned));
        dp_value list = DP_LIST_OF(scope, dp_of(scope, &turned));
        const dp_image_config config = {
            .mean = mean, .std = std, .channel_count = 3, .swap_channels = true, .pad_divisor = 2};
        CHECK_OK(dp_image_batch(ctx, scope, list, &config, &out));
        CHECK_OK(dp_as_tensor(out, "out", DP_F32, 4, &got));
        CHECK_INT(got->shape[2], H + 1);
        CHECK_INT(got->shape[3], W + 1);
        CHECK_OK(dp_read(ctx, got, numbers, sizeof numbers));
        for (int c = 0; c < 3; c++)
            for (int y = 0; y <= H; y++)
                for (int x = 0; x <= W; x++) {
                    float byte = y < H && x < W ? (float)bytes[(y * W + x) * 3 + 2 - c] : 0;
                    float want = y < H && x < W ? (byte - (float)mean[c]) / (float)std[c] : 0;
                    CHECK_F64(numbers[(c * (H + 1) + y) * (W + 1) + x], want, 0);
                }
    }
}

TEST_BACKENDS(a_dict_of_images_is_preprocessed)
{
    dp_device device = dp_local_device(ctx, 1);
    const dp_image_config config = {NORMED};
    dp_value in = tree_of(scope, "{'id': i64[1]=3, 'inputs': [u8[3,1,1]=5 10 4]}"), out;
    CHECK_OK(dp_image_preprocess(ctx, scope, in, device, &config, &out));
    CHECK_TREE(ctx, out, "{'id': i64[1]=3, 'inputs': f32[1,3,1,1]=2 2 2, 'data_samples': None}");
    CHECK(lies_on(dp_get(out, "inputs"), device));
    CHECK(lies_on(dp_get(out, "id"), device));
    in = tree_of(scope, "{'data_samples': [1], 'inputs': [u8[1,1,1]=5]}");
    CHECK_OK(dp_image_preprocess(ctx, scope, in, device, NULL, &out));
    CHECK_TREE(ctx, out, "{'data_samples': [1], 'inputs': f32[1,1,1,1]=5}");
    CHECK_ERROR(dp_image_preprocess(ctx, scope, tree_of(scope, "{'a': 1}"), device, NULL, &out),
                DP_ERR_INVALID, "dp_image_preprocess: not a dict with an entry 'inputs'");
    CHECK_ERROR(dp_image_preprocess(ctx, scope, tree_of(scope, "[1]"), device, NULL, &out),
                DP_ERR_INVALID, "not a dict");
    CHECK_ERROR(dp_image_preprocess(ctx, scope, in, device, NULL, NULL), DP_ERR_INVALID,
                "out is NULL");
    CHECK_ERROR(dp_image_batch(ctx, scope, in, NULL, NULL), DP_ERR_INVALID, "out is NULL");
    CHECK_OK(dp_image_batch(ctx, scope, tree_of(scope, "[u8[1,1,1]=5]"), NULL, &out));
    CHECK_TREE(ctx, out, "f32[1,1,1,1]=5");
}

static dp_status prepare(dp_ctx *ctx, dp_scope *scope, dp_value in, dp_value *out)
{
    const dp_image_config config = {NORMED, .pad_divisor = 2};
    dp_value stacked;
    DP_TRY(dp_stack_batch(ctx, scope, dp_get(dp_at(in, 0), "inputs"), 2, 1, &stacked));
    DP_TRY(dp_image_batch(ctx, scope, dp_get(dp_at(in, 0), "x"), NULL, &stacked));
    return dp_image_preprocess(ctx, scope, dp_at(in, 0), dp_local_device(ctx, 0), &config, out);
}

TEST(preparing_out_of_memory)
{
    tree_out_of_memory(
        prepare, 90, "[{'x': u8[2,1,1,1]=1 2, 'y': (1), 'inputs': [f64[3,1,1]=5 10 4]}]",
        "{'x': u8[2,1,1,1]=1 2, 'y': (1), 'inputs': f32[1,3,2,2]=2 0 0 0 2 0 0 0 2 0 0 0, "
        "'data_samples': None}");
}
