/* test_cuda_several.c - several GPUs: collectives among them, copies from one to another, captures
   over all of them; on simulated ones also what it costs, and what is left when one is lost. Each
   rank has numbers of its own, and writes to its memory right before and right after whatever is on
   trial. */

#include "test.h"

#if defined(TEST_CUDA)
#include <pthread.h>
#include <stdatomic.h>
#include "cuda_device.h"
#include "nets.h"

enum { MOST = 8, LONG_COUNT = 140001, FILLED = -7 };

typedef struct team {
    dp_ctx *ctx;
    dp_scope *scope;
    int count;
    size_t room; /* elements of every tensor */
    dp_tensor source[MOST], send[MOST], recv[MOST], kept[MOST];
    dp_stream *streams[MOST]; /* NULL: the compute stream */
} team;

static float *host; /* `room` numbers */

/* Small whole numbers, so that every sum is exact. */
static float number_of(int rank, size_t i)
{
    return (float)((i * 7 + (size_t)rank * 131) % 1009);
}

static void open_on(dp_ctx **out, int gpus, const int *devices, int count)
{
    cuda_gpus(gpus);
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    const dp_coll_ops *const colls[] = {dp_cuda_coll(), NULL};
    CHECK_OK(dp_open(
        &(dp_config){
            .backends = backends, .colls = colls, .device_count = count, .devices = devices},
        out));
}

static void team_open(team *t, int gpus, const int *devices, int count, size_t room)
{
    *t = (team){.count = count, .room = room};
    const int64_t shape[] = {(int64_t)room};
    host = realloc(host, room * sizeof *host);
    CHECK(host != NULL);
    open_on(&t->ctx, gpus, devices, count);
    t->scope = dp_scope_begin(t->ctx);
    for (int r = 0; r < count; r++) {
        dp_device device = dp_local_device(t->ctx, r);
        for (size_t i = 0; i < room; i++)
            host[i] = number_of(r, i);
        CHECK_OK(dp_tensor_from(t->scope, device, host, DP_F32, 1, shape, &t->source[r]));
        CHECK_OK(dp_tensor_new(t->scope, device, DP_F32, 1, shape, &t->send[r]));
        CHECK_OK(dp_tensor_new(t->scope, device, DP_F32, 1, shape, &t->recv[r]));
        CHECK_OK(dp_tensor_new(t->scope, device, DP_F32, 1, shape, &t->kept[r]));
    }
}

static void team_close(team *t)
{
    dp_scope_end(t->scope);
    dp_close(t->ctx);
    cuda_check_leaks();
    cuda_check_findings();
}

static dp_tensor first_of(const dp_tensor *tensor, size_t count)
{
    dp_tensor part;
    CHECK_OK(dp_narrow(tensor, 0, 0, (int64_t)count, &part));
    return part;
}

/* ---- collectives ----------------------------------------------------------------------------- */

typedef enum verb {
    SUM,
    SUM_IN_PLACE,
    SUM_FOR_SOME,
    BROADCAST,
    BROADCAST_IN_PLACE,
    GATHER,
    SCATTER_SUM,
    ALL_TO_ALL,
    SUM_TO,
    GATHER_TO,
    SCATTER_FROM,
    VERBS
} verb;

static bool wants(verb v, int rank)
{
    return v != SUM_FOR_SOME || rank % 3 != 0;
}

/* Ranks send `each` elements, or that many to each. */
static dp_status run_verb(team *t, verb v, size_t each, int root)
{
    dp_part parts[MOST];
    for (int r = 0; r < t->count; r++) {
        bool in_place = v == SUM_IN_PLACE || (v == BROADCAST_IN_PLACE && r == root);
        parts[r] =
            (dp_part){t->send[r].data, in_place ? t->send[r].data : t->recv[r].data, t->streams[r]};
        if (!wants(v, r))
            parts[r].recv = NULL;
    }
    switch (v) {
    case SUM:
    case SUM_IN_PLACE:
    case SUM_FOR_SOME:
        return dp_all_reduce(t->ctx, parts, each, DP_F32, DP_OP_SUM);
    case BROADCAST:
    case BROADCAST_IN_PLACE:
        return dp_broadcast(t->ctx, parts, each, DP_F32, root);
    case GATHER:
        return dp_all_gather(t->ctx, parts, each, DP_F32);
    case SCATTER_SUM:
        return dp_reduce_scatter(t->ctx, parts, each, DP_F32, DP_OP_SUM);
    case ALL_TO_ALL:
        return dp_all_to_all(t->ctx, parts, each, DP_F32);
    case SUM_TO:
        return dp_reduce_to(t->ctx, parts, each, DP_F32, DP_OP_SUM, root);
    case GATHER_TO:
        return dp_gather_to(t->ctx, parts, each, DP_F32, root);
    default:
        return dp_scatter_from(t->ctx, parts, each, DP_F32, root);
    }
}

static float sum_of(const team *t, size_t i)
{
    float sum = 0;
    for (int r = 0; r < t->count; r++)
        sum += number_of(r, i);
    return sum;
}

/* What a rank has in place i afterwards. */
static float result_of(const team *t, verb v, size_t each, int root, int rank, size_t i)
{
    int block = (int)(i / each);
    size_t at = i % each, own = (size_t)rank * each;
    switch (v) {
    case SUM:
    case SUM_IN_PLACE:
    case SUM_FOR_SOME:
    case SUM_TO:
        return sum_of(t, i);
    case BROADCAST:
    case BROADCAST_IN_PLACE:
        return number_of(root, i);
    case GATHER:
    case GATHER_TO:
        return number_of(block, at);
    case SCATTER_SUM:
        return sum_of(t, own + i);
    case ALL_TO_ALL:
        return number_of(block, own + at);
    default:
        return number_of(root, own + i);
    }
}

static void check_results(team *t, verb v, size_t each, int root)
{
    bool all = v == GATHER || v == ALL_TO_ALL || v == GATHER_TO;
    bool rooted = v == SUM_TO || v == GATHER_TO;
    size_t count = all ? each * (size_t)t->count : each, step = count > 5000 ? 617 : 1;
    for (int r = 0; r < t->count; r++) {
        if (!wants(v, r) || (rooted && r != root))
            continue;
        dp_tensor kept = first_of(&t->kept[r], count);
        CHECK_OK(dp_read(t->ctx, &kept, host, count * sizeof *host));
        for (size_t i = 0; i < count; i = i + step < count || i + 1 == count ? i + step : count - 1)
            CHECK_F64(host[i], result_of(t, v, each, root, r, i), 0);
    }
}

/* Each rank's stream writes what it sends and where it receives, and again right after. */
static void write_around(team *t, verb v, size_t each, int root)
{
    for (int r = 0; r < t->count; r++) {
        CHECK_OK(dp_copy(t->ctx, &t->send[r], &t->source[r], t->streams[r]));
        CHECK_OK(dp_copy(t->ctx, &t->recv[r], &t->source[(r + 1) % t->count], t->streams[r]));
    }
    CHECK_OK(run_verb(t, v, each, root));
    for (int r = 0; r < t->count; r++) {
        bool in_place = v == SUM_IN_PLACE || (v == BROADCAST_IN_PLACE && r == root);
        const dp_tensor *got = in_place ? &t->send[r] : &t->recv[r];
        CHECK_OK(dp_copy(t->ctx, &t->kept[r], got, t->streams[r]));
        CHECK_OK(dp_copy(t->ctx, &t->recv[r], &t->source[r], t->streams[r]));
        CHECK_OK(dp_copy(t->ctx, &t->send[r], &t->recv[r], t->streams[r]));
    }
    CHECK_OK(dp_wait(t->ctx));
    check_results(t, v, each, root);
}

static void every_verb(team *t)
{
    size_t most = t->room / (size_t)t->count;
    for (int v = 0; v < VERBS; v++) {
        bool blocks = v >= GATHER && v != SUM_TO;
        int roots = v == BROADCAST || v == BROADCAST_IN_PLACE || v >= SUM_TO ? t->count : 1;
        for (int root = 0; root < roots; root += (roots + 1) / 2) {
            write_around(t, (verb)v, 1, root);
            write_around(t, (verb)v, 50, root);
            write_around(t, (verb)v, blocks ? most : t->room, root);
        }
        cuda_check_findings();
    }
}

static void every_verb_on(int gpus, const int *devices, int count, size_t room)
{
    team t;
    team_open(&t, gpus, devices, count, room);
    every_verb(&t);
    team_close(&t);
}

#define VERBS_TEST(name, gpus, count, direct, room, ...)                                           \
    TEST_SLOW(name, 60)                                                                            \
    {                                                                                              \
        cuda_pairs(gpus, direct);                                                                  \
        every_verb_on(gpus, (const int[]){__VA_ARGS__}, count, room);                              \
    }

VERBS_TEST(ranks_on_one_gpu, 1, 4, true, LONG_COUNT, 0, 0, 0, 0)
VERBS_TEST(ranks_on_three_gpus, 3, 3, true, LONG_COUNT, 0, 1, 2)
VERBS_TEST(ranks_on_four_gpus, 4, 4, true, LONG_COUNT, 0, 1, 2, 3)
VERBS_TEST(ranks_on_five_gpus, 5, 5, true, LONG_COUNT, 0, 1, 2, 3, 4)
VERBS_TEST(ranks_on_eight_gpus, 8, 8, true, LONG_COUNT, 0, 1, 2, 3, 4, 5, 6, 7)
VERBS_TEST(two_ranks_on_each_gpu, 3, 6, true, LONG_COUNT, 0, 0, 1, 1, 2, 2)
VERBS_TEST(ranks_dealt_out_in_turns, 3, 8, true, LONG_COUNT, 2, 1, 0, 2, 1, 0, 2, 1)
VERBS_TEST(ranks_without_access, 3, 4, false, LONG_COUNT, 0, 1, 1, 2)

/* Slices of more than a receive buffer. */
TEST_SLOW(long_sums_on_two_gpus, 60)
{
    team t;
    cuda_pairs(2, true);
    team_open(&t, 2, (const int[]){0, 1, 1}, 3, 2500001);
    write_around(&t, SUM, t.room, 0);
    write_around(&t, SUM_IN_PLACE, t.room, 0);
    team_close(&t);
}

/* Streams of the users' do the collectives. */
static void streams_open(team *t)
{
    for (int r = 0; r < t->count; r++)
        CHECK_OK(dp_cuda()->stream_create(dp_local_stream(t->ctx, r)->dev, 0, &t->streams[r]));
    CHECK_OK(dp_wait(t->ctx));
}

static void streams_close(team *t)
{
    for (int r = 0; r < t->count; r++)
        dp_cuda()->stream_destroy(t->streams[r]);
}

static void streams_wait(const team *t)
{
    for (int r = 0; r < t->count; r++)
        CHECK_OK(dp_cuda()->stream_sync(t->streams[r]));
}

/* Compute streams write to memory that a call may take, and then to what it has given back. */
static void write_to_spare_memory(team *t)
{
    dp_scope *scope = dp_scope_begin(t->ctx);
    for (int64_t count = 1000; count <= 3000; count += 2000)
        for (int r = 0; r < t->count; r++) {
            dp_tensor spare;
            CHECK_OK(dp_tensor_new(scope, dp_local_device(t->ctx, r), DP_F32, 1, &count, &spare));
            CHECK_OK(dp_fill(t->ctx, &spare, dp_float(FILLED)));
        }
    dp_scope_end(scope);
}

static dp_status run_misaligned(team *t)
{
    dp_part parts[MOST];
    for (int r = 0; r < t->count; r++)
        parts[r] =
            (dp_part){(char *)t->send[r].data + 1, (char *)t->recv[r].data + 1, t->streams[r]};
    return dp_all_reduce(t->ctx, parts, 1000, DP_F32, DP_OP_SUM);
}

/* The parts say which streams: the library's own ones go on with something else. */
TEST_SLOW(collectives_on_streams_of_the_users, 60)
{
    team t;
    cuda_pairs(3, true);
    team_open(&t, 3, (const int[]){0, 1, 2}, 3, LONG_COUNT);
    streams_open(&t);
    for (int v = 0; v <= VERBS; v++) {
        for (int r = 0; r < t.count; r++)
            CHECK_OK(dp_copy(t.ctx, &t.send[r], &t.source[r], t.streams[r]));
        write_to_spare_memory(&t);
        CHECK_OK(v < VERBS ? run_verb(&t, (verb)v, 1000, 1) : run_misaligned(&t));
        write_to_spare_memory(&t);
        streams_wait(&t);
    }
    streams_close(&t);
    team_close(&t);
}

/* Two calls on streams that know nothing of each other: what the second one fetches does not come
   where the first one still adds up. */
static void sums_beside_sums(int gpus, bool scatters)
{
    team t;
    dp_stream *streams[2][MOST];
    dp_part parts[2][MOST];
    team_open(&t, gpus, NULL, gpus, LONG_COUNT / 3 * 3);
    size_t count = scatters ? t.room / (size_t)gpus : t.room;
    for (int k = 0; k < 2; k++) {
        streams_open(&t);
        memcpy(streams[k], t.streams, sizeof t.streams);
        for (int r = 0; r < gpus; r++) {
            const dp_tensor *send = k == 0 ? &t.source[r] : &t.send[r];
            const dp_tensor *recv = k == 0 ? &t.recv[r] : &t.kept[r];
            CHECK_OK(dp_fill(t.ctx, &t.send[r], dp_float(r)));
            parts[k][r] = (dp_part){send->data, recv->data, streams[k][r]};
        }
    }
    CHECK_OK(dp_wait(t.ctx));
    for (int k = 0; k < 2; k++)
        CHECK_OK(scatters ? dp_reduce_scatter(t.ctx, parts[k], count, DP_F32, DP_OP_SUM)
                          : dp_all_reduce(t.ctx, parts[k], count, DP_F32, DP_OP_SUM));
    for (int k = 0; k < 2; k++) {
        memcpy(t.streams, streams[k], sizeof t.streams);
        streams_wait(&t);
        streams_close(&t);
    }
    for (int r = 0; r < gpus; r++)
        for (int k = 0; k < 2; k++) {
            const dp_tensor got = first_of(k == 0 ? &t.recv[r] : &t.kept[r], count);
            size_t first = scatters ? (size_t)r * count : 0;
            CHECK_OK(dp_read(t.ctx, &got, host, count * sizeof *host));
            for (size_t i = 0; i < count; i += 101)
                CHECK_F64(host[i], k == 0 ? sum_of(&t, first + i) : (float)(gpus * (gpus - 1) / 2),
                          0);
        }
    team_close(&t);
}

TEST_SLOW(sums_on_several_streams, 60)
{
    cuda_pairs(3, true);
    for (unsigned order = 0; order < CUDA_ORDERS; order++) {
        cuda_order(order);
        sums_beside_sums(3, order % 2 == 0);
        sums_beside_sums(3, order % 2 != 0);
    }
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* From GPU 0 to GPU 1: on no stream, on one of the writer, on one of the reader; the source is
   written on that stream right before and right after. */
static void copy_over(team *t, dp_stream *stream, dp_stream *writes)
{
    CHECK_OK(dp_copy(t->ctx, &t->send[0], &t->source[0], writes));
    if (stream != NULL && stream != writes) {
        CHECK_OK(dp_wait(t->ctx));
        if (writes != NULL)
            CHECK_OK(dp_cuda()->stream_sync(writes));
    }
    CHECK_OK(dp_fill(t->ctx, &t->recv[1], dp_float(FILLED)));
    CHECK_OK(dp_copy(t->ctx, &t->recv[1], &t->send[0], stream));
    if (stream == writes) /* work of the user's, which only the stream orders */
        CHECK_OK(dp_cuda()->copy(writes != NULL ? writes : dp_local_stream(t->ctx, 0),
                                 t->send[0].data, t->recv[0].data, t->room * sizeof *host));
    if (stream != NULL)
        CHECK_OK(dp_cuda()->stream_sync(stream));
    CHECK_OK(dp_read(t->ctx, &t->recv[1], host, t->room * sizeof *host));
    for (size_t i = 0; i < t->room; i += 101)
        CHECK_F64(host[i], number_of(0, i), 0);
}

static void copies_over(bool direct)
{
    team t;
    dp_stream *of_reader = NULL, *of_writer = NULL;
    cuda_pairs(2, direct);
    team_open(&t, 2, NULL, 2, 20011);
    CHECK_OK(dp_cuda()->stream_create(dp_local_stream(t.ctx, 0)->dev, 0, &of_reader));
    CHECK_OK(dp_cuda()->stream_create(dp_local_stream(t.ctx, 1)->dev, 0, &of_writer));
    for (int i = 0; i < 3; i++) {
        copy_over(&t, NULL, NULL);
        copy_over(&t, of_reader, of_reader);
        copy_over(&t, of_writer, NULL);
        copy_over(&t, dp_local_stream(t.ctx, 0), NULL);
    }
    CHECK_OK(dp_wait(t.ctx));
    dp_cuda()->stream_destroy(of_reader);
    dp_cuda()->stream_destroy(of_writer);
    team_close(&t);
}

TEST(copies_on_streams_of_either_gpu)
{
    copies_over(true);
}

TEST(copies_through_the_host_on_streams_of_either_gpu)
{
    copies_over(false);
}

enum { READERS = 6, READ_BYTES = (9 << 20) + 4 };

typedef struct reader {
    dp_stream *stream;
    dp_dev *from;
    const dp_tensor *source, *to;
    atomic_int *begun;
} reader;

static void *read_thrice(void *user)
{
    const reader *own = user;
    atomic_fetch_add(own->begun, 1);
    while (atomic_load(own->begun) < READERS)
        continue;
    for (int i = 0; i < 3; i++)
        CHECK_OK(dp_cuda()->peer_copy(own->stream, own->to->data, own->from, own->source->data,
                                      READ_BYTES));
    return NULL;
}

/* Two threads for each of three GPUs read the next one, at the same time. */
static void read_in_threads(team *t)
{
    atomic_int begun = 0;
    pthread_t threads[READERS];
    reader readers[READERS];
    for (int i = 0; i < READERS; i++) {
        int rank = i % 3, next = (rank + 1) % 3;
        dp_dev *dev = dp_local_stream(t->ctx, rank)->dev;
        readers[i] = (reader){.from = dp_local_stream(t->ctx, next)->dev,
                              .source = &t->source[next],
                              .to = i < 3 ? &t->recv[rank] : &t->kept[rank],
                              .begun = &begun};
        CHECK_OK(dev->ops->stream_create(dev, i % 2, &readers[i].stream));
    }
    for (int i = 0; i < READERS; i++)
        CHECK_INT(pthread_create(&threads[i], NULL, read_thrice, &readers[i]), 0);
    for (int i = 0; i < READERS; i++) {
        CHECK_INT(pthread_join(threads[i], NULL), 0);
        dp_cuda()->stream_destroy(readers[i].stream);
        CHECK_OK(dp_read(t->ctx, readers[i].to, host, READ_BYTES));
        for (size_t k = 0; k < t->room; k += 101)
            CHECK_F64(host[k], number_of((i + 1) % 3, k), 0);
    }
}

TEST_SLOW(threads_copy_through_the_host, 60)
{
    for (unsigned order = 0; order < CUDA_ORDERS; order++) {
        team t;
        cuda_pairs(3, false);
        cuda_order(order);
        team_open(&t, 3, NULL, 3, READ_BYTES / sizeof(float));
        CHECK_OK(dp_wait(t.ctx));
        read_in_threads(&t);
        team_close(&t);
    }
}

/* Rows of a wide tensor have to be packed on both sides, in memory that is used again. */
static void copy_rows_over(team *t, int rank)
{
    dp_stream *side = NULL;
    dp_tensor from, to;
    CHECK_OK(dp_cuda()->stream_create(dp_local_stream(t->ctx, rank)->dev, 0, &side));
    CHECK_OK(dp_reshape(&t->source[0], 2, (const int64_t[]){100, 60}, &from));
    CHECK_OK(dp_reshape(&t->recv[1], 2, (const int64_t[]){100, 60}, &to));
    CHECK_OK(dp_fill(t->ctx, &t->recv[1], dp_float(FILLED)));
    CHECK_OK(dp_narrow(&from, 1, 3, 10, &from));
    CHECK_OK(dp_narrow(&to, 1, 20, 10, &to));
    CHECK_OK(dp_copy(t->ctx, &to, &from, side));
    write_to_spare_memory(t);
    CHECK_OK(dp_cuda()->stream_sync(side));
    CHECK_OK(dp_read(t->ctx, &t->recv[1], host, 6000 * sizeof *host));
    for (size_t i = 0; i < 6000; i++) {
        bool inside = i % 60 >= 20 && i % 60 < 30;
        CHECK_F64(host[i], inside ? number_of(0, i - 17) : FILLED, 0);
    }
    dp_cuda()->stream_destroy(side);
}

TEST(strided_copies_on_streams_of_either_gpu)
{
    team t;
    cuda_pairs(2, true);
    team_open(&t, 2, NULL, 2, 6000);
    copy_rows_over(&t, 0);
    copy_rows_over(&t, 1);
    team_close(&t);
}

/* What was enqueued on the stream before comes before what follows on the other one. */
TEST(another_stream_behind_pending_work)
{
    team t;
    dp_stream *side[2] = {NULL, NULL};
    cuda_pairs(2, true);
    team_open(&t, 2, NULL, 2, 20011);
    for (int r = 0; r < 2; r++)
        CHECK_OK(dp_cuda()->stream_create(dp_local_stream(t.ctx, r)->dev, 0, &side[r]));
    for (int i = 0; i < 4; i++) {
        for (int r = 0; r < 2; r++) {
            CHECK_OK(dp_copy(t.ctx, &t.send[r], &t.source[r], NULL));
            CHECK_OK(dp_use_stream(t.ctx, r, i % 2 == 0 ? side[r] : NULL));
        }
        CHECK_OK(run_verb(&t, SUM, t.room, 0));
        for (int r = 0; r < 2; r++)
            CHECK_OK(dp_copy(t.ctx, &t.kept[r], &t.recv[r], NULL));
        check_results(&t, SUM, t.room, 0);
    }
    for (int r = 0; r < 2; r++) {
        CHECK_OK(dp_use_stream(t.ctx, r, NULL));
        dp_cuda()->stream_destroy(side[r]);
    }
    team_close(&t);
}

/* From one to all others, in pieces, with writes to all of them before and after. */
static void replicate_among(int gpus, bool direct)
{
    team t;
    cuda_pairs(gpus, direct);
    team_open(&t, gpus, NULL, gpus, LONG_COUNT);
    for (int times = 0; times < 2; times++) {
        for (int r = 0; r < gpus; r++)
            CHECK_OK(dp_copy(t.ctx, &t.recv[r], &t.source[r], NULL));
        CHECK_OK(dp_copy(t.ctx, &t.send[0], &t.source[0], NULL));
        CHECK_OK(dp_replicate_into(t.ctx, &t.send[0], &t.recv[1], (size_t)gpus - 1));
        CHECK_OK(dp_fill(t.ctx, &t.send[0], dp_float(FILLED)));
        for (int r = 1; r < gpus; r++) {
            CHECK_OK(dp_copy(t.ctx, &t.kept[r], &t.recv[r], NULL));
            CHECK_OK(dp_fill(t.ctx, &t.recv[r], dp_float(FILLED)));
        }
        for (int r = 1; r < gpus; r++) {
            CHECK_OK(dp_read(t.ctx, &t.kept[r], host, t.room * sizeof *host));
            for (size_t i = 0; i < t.room; i += 977)
                CHECK_F64(host[i], number_of(0, i), 0);
            CHECK_F64(host[t.room - 1], number_of(0, t.room - 1), 0);
        }
    }
    team_close(&t);
}

TEST_SLOW(replicas_are_sent_from_gpu_to_gpu, 60)
{
    replicate_among(2, true);
    replicate_among(2, false);
    replicate_among(3, false);
    replicate_among(5, true);
}

/* Parts on one GPU are added where they lie: their own streams write them before and behind. */
TEST(parts_are_added_where_they_lie)
{
    team t;
    team_open(&t, 1, (const int[]){0, 0, 0}, 3, 20011);
    for (int i = 1; i < 4; i++) {
        for (int r = 0; r < t.count; r++)
            CHECK_OK(dp_fill(t.ctx, &t.send[r], dp_float(i + r)));
        CHECK_OK(dp_reduce_add_into(t.ctx, t.send, 3, &t.recv[0]));
        for (int r = 0; r < t.count; r++)
            CHECK_OK(dp_fill(t.ctx, &t.send[r], dp_float(FILLED)));
        CHECK_OK(dp_read(t.ctx, &t.recv[0], host, t.room * sizeof *host));
        CHECK_F64(host[0] + host[t.room - 1], 6 * (i + 1), 0);
    }
    team_close(&t);
}

/* Wrong memory in a collective is refused, and changes nothing. */
TEST(memory_that_is_not_of_this_gpu)
{
    team t;
    dp_part parts[3];
    cuda_pairs(3, true);
    team_open(&t, 3, NULL, 3, 1000);
    for (int r = 0; r < 3; r++) {
        CHECK_OK(dp_copy(t.ctx, &t.recv[r], &t.source[r], NULL));
        parts[r] = (dp_part){t.source[r].data, t.recv[r].data, NULL};
    }
    parts[1].send = t.source[2].data;
    CHECK_ERROR(dp_all_reduce(t.ctx, parts, 1000, DP_F32, DP_OP_SUM), DP_ERR_INVALID,
                "which is not memory of that device");
    parts[1].send = host;
    CHECK_ERROR(dp_broadcast(t.ctx, parts, 1000, DP_F32, 1), DP_ERR_INVALID,
                "which is not memory of that device");
    for (int r = 0; r < 3; r++) {
        CHECK_OK(dp_read(t.ctx, &t.recv[r], host, 1000 * sizeof *host));
        CHECK_F64(host[999], number_of(r, 999), 0);
    }
    team_close(&t);
}

/* Memory of another context on the same GPU is as good as our own. */
TEST(memory_of_another_context_on_the_gpu)
{
    team t, other;
    cuda_pairs(2, true);
    team_open(&t, 2, NULL, 2, 1000);
    team_open(&other, 2, NULL, 2, 1000);
    CHECK_OK(dp_wait(other.ctx));
    for (int r = 0; r < 2; r++) {
        CHECK_OK(dp_copy(t.ctx, &t.send[r], &t.source[r], NULL));
        t.recv[r].data = other.recv[r].data;
    }
    CHECK_OK(run_verb(&t, SUM, 1000, 0));
    CHECK_OK(dp_wait(t.ctx));
    for (int r = 0; r < 2; r++) {
        CHECK_OK(dp_read(other.ctx, &other.recv[r], host, 1000 * sizeof *host));
        CHECK_F64(host[999], sum_of(&t, 999), 0);
    }
    dp_close(other.ctx);
    team_close(&t);
}

/* ---- captures -------------------------------------------------------------------------------- */

/* Until `capture_end`. */
static cudaStream_t capture_begin(team *t, int origin)
{
    cudaStream_t native = dp_cuda_stream(dp_local_stream(t->ctx, origin));
    CHECK_OK(dp_wait(t->ctx));
    CHECK_INT(cudaStreamBeginCapture(native, cudaStreamCaptureModeThreadLocal), cudaSuccess);
    return native;
}

static void capture_drop(cudaStream_t native)
{
    cudaGraph_t graph = NULL;
    CHECK_INT(cudaStreamEndCapture(native, &graph), cudaSuccess);
    CHECK_INT(cudaGraphDestroy(graph), cudaSuccess);
    cuda_check_findings();
}

static void fill_again(team *t)
{
    for (int r = 0; r < t->count; r++) {
        CHECK_OK(dp_copy(t->ctx, &t->send[r], &t->source[r], NULL));
        CHECK_OK(dp_fill(t->ctx, &t->recv[r], dp_float(FILLED)));
    }
    CHECK_OK(dp_wait(t->ctx));
}

static void run_twice(team *t, verb v)
{
    CHECK_OK(run_verb(t, v, 500, 1));
    CHECK_OK(run_verb(t, v, v < GATHER ? t->room : 7, 2));
}

/* All that the ranks have sent from and received. */
static void read_all(team *t, float *out)
{
    CHECK_OK(dp_wait(t->ctx));
    for (int r = 0; r < t->count; r++) {
        CHECK_OK(
            dp_read(t->ctx, &t->send[r], out + 2 * (size_t)r * t->room, t->room * sizeof *host));
        CHECK_OK(dp_read(t->ctx, &t->recv[r], out + (2 * (size_t)r + 1) * t->room,
                         t->room * sizeof *host));
    }
}

/* Each time it is launched, a graph leaves what the calls leave that are in it. */
static void capture_from(int origin, int gpus, const int *devices, int count)
{
    team t;
    cuda_pairs_directly(gpus);
    team_open(&t, gpus, devices, count, LONG_COUNT);
    size_t bytes = 2 * (size_t)count * t.room * sizeof *host;
    float *want = test_room(bytes), *got = test_room(bytes);
    for (int v = 0; v < SUM_TO; v++) {
        fill_again(&t);
        run_twice(&t, (verb)v); /* pairs are checked */
        read_all(&t, want);
        cudaStream_t native = capture_begin(&t, origin);
        run_twice(&t, (verb)v);
        cudaGraphExec_t graph = capture_end(native);
        for (int times = 0; times < 2; times++) {
            fill_again(&t);
            CHECK_INT(cudaGraphLaunch(graph, native), cudaSuccess);
            read_all(&t, got);
            CHECK_BYTES(got, want, bytes);
        }
        CHECK_INT(cudaGraphExecDestroy(graph), cudaSuccess);
    }
    team_close(&t);
}

TEST_SLOW(collectives_are_captured_from_any_rank, 60)
{
    capture_from(0, 3, (const int[]){0, 1, 2, 1}, 4);
    capture_from(2, 3, (const int[]){0, 1, 2, 1}, 4);
}

TEST_SLOW(collectives_of_two_gpus_are_captured, 60)
{
    capture_from(1, 2, (const int[]){0, 1, 0}, 3);
}

TEST_SLOW(collectives_on_one_gpu_are_captured, 60)
{
    capture_from(0, 1, (const int[]){0, 0, 0}, 3);
    capture_from(2, 1, (const int[]){0, 0, 0}, 3);
}

/* What would wait is refused, and neither the capture nor the context minds. */
TEST(uncapturable_calls_are_refused)
{
    team t;
    float number = 1;
    const int64_t one[] = {1};
    dp_tensor pageable = dp_wrap(&number, DP_F32, 1, one), first;
    team_open(&t, 1, NULL, 1, 1000);
    cudaStream_t native = capture_begin(&t, 0);
    first = first_of(&t.recv[0], 1);
    CHECK_ERROR(dp_copy(t.ctx, &first, &pageable, NULL), DP_ERR_STATE,
                " 0: a copy between a GPU and memory that is not pinned cannot be captured");
    CHECK_ERROR(dp_copy(t.ctx, &pageable, &first, NULL), DP_ERR_STATE,
                "memory that is not pinned cannot be captured");
    CHECK_ERROR(dp_wait(t.ctx), DP_ERR_STATE, " 0: a wait cannot be captured");
    CHECK_ERROR(dp_read(t.ctx, &first, &number, sizeof number), DP_ERR_STATE, "be captured");
    capture_drop(native);
    CHECK_OK(dp_copy(t.ctx, &first, &pageable, NULL));
    CHECK_OK(dp_read(t.ctx, &first, &number, sizeof number));
    CHECK_F64(number, 1, 0);
    team_close(&t);
}

static void refused_in_capture(bool direct, const char *sentence)
{
    team t;
    cuda_pairs(2, direct);
    team_open(&t, 2, NULL, 2, 1000);
    if (!direct)
        CHECK_OK(run_verb(&t, SUM, t.room, 0));
    cudaStream_t native = capture_begin(&t, 0);
    CHECK_ERROR(run_verb(&t, SUM, 1000, 0), DP_ERR_STATE, sentence);
    capture_drop(native);
    write_around(&t, SUM, 1000, 0);
    team_close(&t);
}

TEST(copies_that_pass_the_host_cannot_be_captured)
{
    refused_in_capture(false, "a copy from another GPU through the host cannot be");
    refused_in_capture(true, "the first copy from another GPU, which is checked, cannot");
}

/* ---- gradients ------------------------------------------------------------------------------- */

enum { GRADS = 1000 };

/* Gradients are the first of what is received. */
static dp_status reducer_make(team *t, dp_dtype wire, dp_reducer **out)
{
    static const dp_range ranges[] = {{.unit = 0, .count = GRADS / 3},
                                      {.unit = 1, .first = GRADS / 3, .count = GRADS - GRADS / 3}};
    static void *local[MOST];
    for (int r = 0; r < t->count; r++)
        local[r] = t->recv[r].data;
    return dp_reducer_create(t->ctx,
                             &(dp_reducer_config){.blocks = &(dp_block){DP_F32, GRADS, local},
                                                  .block_count = 1,
                                                  .ranges = ranges,
                                                  .range_count = 2,
                                                  .reduction = DP_SUM_RANKS,
                                                  .buckets.wire = wire},
                             out);
}

static dp_status reduce_gradients(team *t, dp_reducer *reducer)
{
    DP_TRY(dp_reducer_begin(reducer, NULL));
    for (int r = 0; r < t->count; r++) {
        DP_TRY(dp_reducer_ready(reducer, r, 1, NULL));
        DP_TRY(dp_reducer_ready(reducer, r, 0, t->streams[r]));
    }
    return dp_reducer_finish(reducer);
}

/* They are made on streams of the users', which the reduction comes after. */
TEST(gradients_on_streams_of_the_users)
{
    team t;
    dp_reducer *reducer = NULL;
    cuda_pairs(3, true);
    team_open(&t, 3, NULL, 3, GRADS);
    streams_open(&t);
    CHECK_OK(reducer_make(&t, 0, &reducer));
    for (int pass = 0; pass < 3; pass++) {
        for (int r = 0; r < t.count; r++)
            CHECK_OK(dp_copy(t.ctx, &t.recv[r], &t.source[r], t.streams[r]));
        CHECK_OK(reduce_gradients(&t, reducer));
        for (int r = 0; r < t.count; r++) {
            CHECK_OK(dp_read(t.ctx, &t.recv[r], host, GRADS * sizeof *host));
            for (size_t i = 0; i < GRADS; i++)
                CHECK_F64(host[i], sum_of(&t, i), 0);
        }
    }
    streams_close(&t);
    team_close(&t);
}

/* ---- models ---------------------------------------------------------------------------------- */

/* Parameters that replicas read are written right after a forward, while it may still run. */
static void write_after_forward(int gpus, const int *devices, int count, bool over_ranks)
{
    static const net_shape rows = {0};
    dp_ctx *ctx = NULL;
    dp_module *par = NULL;
    cuda_pairs(gpus, true);
    open_on(&ctx, gpus, devices, count);
    dp_module *net = net_create(ctx, &rows, 0);
    CHECK_OK(over_ranks ? dp_distributed(net, NULL, &par) : dp_data_parallel(net, NULL, &par));
    for (int i = 1; i < 4; i++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_tensor data, grad;
        dp_value y;
        float before[NET_IN * NET_OUT];
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[7,3],)"), dp_none(), NULL,
                           &y, NULL));
        for (size_t owner = dp_owner_count(par); owner-- > 0;) {
            CHECK_OK(dp_owner_edit(par, owner, NET_W, &data, &grad));
            CHECK_OK(dp_fill(ctx, &data, dp_float(i)));
            CHECK_OK(dp_read(ctx, &data, before, sizeof before));
            CHECK_F64(before[0], i, 0);
        }
        dp_scope_end(scope);
    }
    dp_close(ctx);
    cuda_check_leaks();
    cuda_check_findings();
}

TEST(a_shared_parameter_is_written_after_a_forward)
{
    for (int over_ranks = 0; over_ranks < 2; over_ranks++) {
        write_after_forward(1, (const int[]){0, 0, 0}, 3, over_ranks != 0);
        write_after_forward(2, (const int[]){0, 1, 0, 1}, 4, over_ranks != 0);
        write_after_forward(2, (const int[]){0, 1, 1, 1}, 4, over_ranks != 0);
        write_after_forward(3, NULL, 3, over_ranks != 0);
    }
}

static dp_tensor copied; /* of the second replica's device */

/* Nothing of what replica 1 does is gathered. */
static dp_status copy_param(dp_call *call)
{
    dp_tensor param = dp_param_tensor(call, 0);
    call->out = dp_none();
    return call->replica == 1 ? dp_copy(call->ctx, &copied, &param, NULL) : DP_OK;
}

TEST(a_shared_parameter_is_written_after_a_replica_read_it)
{
    static const dp_method methods[] = {{"forward", copy_param}};
    static const dp_param_config params[] = {{.name = "w", .ndim = 1, .shape = {4}}};
    dp_ctx *ctx = NULL;
    dp_module *net = NULL, *par = NULL;
    open_on(&ctx, 1, (const int[]){0, 0}, 2);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_module_create(ctx,
                              &(dp_module_config){.name = "net",
                                                  .methods = methods,
                                                  .method_count = 1,
                                                  .params = params,
                                                  .param_count = 1},
                              &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_F32, DP_SHAPE(4), &copied));
    for (int i = 1; i < 4; i++) {
        dp_tensor param;
        dp_value out;
        float number = 0;
        CHECK_OK(dp_params_edit(net, 0, &param, NULL));
        CHECK_OK(dp_fill(ctx, &param, dp_float(i)));
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, "(f32[2],)"), dp_none(), NULL,
                           &out, NULL));
        CHECK_OK(dp_fill(ctx, &param, dp_float(FILLED)));
        dp_tensor first = first_of(&copied, 1);
        CHECK_OK(dp_read(ctx, &first, &number, sizeof number));
        CHECK_F64(number, i, 0);
    }
    dp_scope_end(scope);
    dp_close(ctx);
    cuda_check_leaks();
    cuda_check_findings();
}

/* On all ranks, of which some have no row in the second step. */
static void train_on_all_ranks(int gpus, const int *devices, int count)
{
    static const net_shape rows = {0};
    static const float w[NET_PARAMS] = {1, -1, 2, -2, 3, -3, 1, 2};
    static const char *const batches[] = {"(f32[13,3],)", "(f32[2,3],)"};
    static const float sums[][2] = {{234, 13}, {3, 2}}; /* 0 + 3 + ... + 36, rows */
    dp_ctx *ctx = NULL;
    dp_module *par = NULL;
    cuda_pairs(gpus, true);
    open_on(&ctx, gpus, devices, count);
    dp_module *net = net_create(ctx, &rows, 0);
    CHECK_OK(dp_distributed(net, &(dp_distributed_config){.reduction = DP_SUM_RANKS}, &par));
    CHECK_INT(dp_owner_count(par), gpus);
    for (int step = 0; step < 2; step++) {
        dp_scope *scope = dp_scope_begin(ctx);
        dp_value y;
        dp_pass *pass = NULL;
        float grads[NET_PARAMS];
        CHECK_OK(dp_zero_grad(par));
        CHECK_OK(dp_invoke(par, scope, "forward", tree_of(scope, batches[step]), dp_none(), NULL,
                           &y, &pass));
        CHECK_OK(dp_backward(pass, dp_float(1), NULL));
        net_numbers(ctx, net, true, grads);
        CHECK_F64(grads[0], sums[step][0], 0);
        CHECK_F64(grads[NET_PARAMS - 1], sums[step][1], 0);
        for (size_t owner = 0; owner < dp_owner_count(par) && step == 0; owner++) {
            dp_tensor data; /* which all of its ranks may still read */
            CHECK_OK(dp_owner_edit(par, owner, NET_W, &data, NULL));
            CHECK_OK(dp_fill(ctx, &data, dp_float(2)));
        }
        if (step == 0) /* and not of one owner alone, which is sent to the others */
            CHECK_OK(dp_params_compare(par));
        CHECK_OK(dp_params_write(net, NET_W, w, NET_IN * NET_OUT * sizeof *w));
        dp_scope_end(scope);
    }
    dp_close(ctx);
    cuda_check_leaks();
    cuda_check_findings();
}

TEST(training_on_all_ranks)
{
    train_on_all_ranks(1, (const int[]){0, 0, 0}, 3);
    train_on_all_ranks(2, (const int[]){0, 0, 1, 1}, 4);
    train_on_all_ranks(2, (const int[]){0, 1, 0, 1, 0, 1, 0, 1}, 8);
    train_on_all_ranks(3, (const int[]){0, 2, 2, 1, 1}, 5);
    train_on_all_ranks(3, NULL, 3);
}

#if defined(TEST_SIM)
/* ---- what it costs --------------------------------------------------------------------------- */

enum { TRACE_BYTES = 16 << 20 };

static double traced(team *t, verb v, int root)
{
    CHECK_OK(run_verb(t, v, 1 << 18, root)); /* pairs are checked */
    CHECK_OK(dp_wait(t->ctx));
    sim_trace_begin();
    CHECK_OK(run_verb(t, v, t->room, root));
    return sim_trace_end();
}

/* The model in dp_cuda.h, in microseconds: copies and kernels one after another on each GPU. */
static double model_sum(double gpus, double bytes)
{
    double slice = bytes / gpus, piece = slice < 4 << 20 ? slice : 4 << 20;
    double copy = 2 + piece / 350e3, kernel = 2 + (gpus + 1) * piece / 2400e3;
    double sums = slice / piece * ((gpus - 1) * copy + kernel);
    return sums + (gpus - 1) * (2 + slice / 350e3);
}

static double model_broadcast(double gpus, double bytes)
{
    double piece = bytes / 32, copy = 2 + piece / 350e3;
    return gpus > 2 ? (32 + gpus - 2) * copy : 2 + bytes / 350e3;
}

/* $TEST_LINK_MIB says for how many MiB. */
TEST_SLOW(links_carry_what_the_model_says, 60)
{
    static const int sizes[] = {2, 4, 8};
    const char *mib = getenv("TEST_LINK_MIB");
    size_t bytes = mib != NULL ? (size_t)atoi(mib) << 20 : TRACE_BYTES;
    for (int i = 0; i < 3; i++) {
        team t;
        int gpus = sizes[i];
        cuda_pairs(gpus, true);
        team_open(&t, gpus, NULL, gpus, bytes / sizeof(float));
        double sum = traced(&t, SUM_IN_PLACE, 0), want = model_sum(gpus, (double)bytes);
        size_t each = 2 * (bytes / (size_t)gpus) * ((size_t)gpus - 1);
        fprintf(stderr, "# %d GPUs: all-reduce %.0f us, model %.0f;", gpus, sum, want);
        CHECK(sum < 1.05 * want && sum > 0.95 * want);
        for (int d = 0; d < gpus; d++) {
            CHECK_INT(sim_trace_bytes(d, true), each);
            CHECK_INT(sim_trace_bytes(d, false), each);
        }
        double spread = traced(&t, BROADCAST, 1);
        want = model_broadcast(gpus, (double)bytes);
        fprintf(stderr, " broadcast %.0f us, model %.0f\n", spread, want);
        CHECK(spread < 1.10 * want && spread > 0.90 * want);
        for (int d = 0; d < gpus; d++)
            CHECK(sim_trace_bytes(d, true) <= bytes);
        team_close(&t);
    }
}

/* From GPU to GPU: 32 pieces and what is left, none of less than 512 KiB, all but the last of whole
   blocks of 512 bytes. What is small goes to each at once. */
TEST(a_broadcast_goes_in_pieces)
{
    static const struct {
        size_t bytes;
        long pieces;
    } cases[] = {{4, 1},         {512 << 10, 1},       {(512 << 10) + 4, 2},    {1 << 20, 2},
                 {16 << 20, 32}, {(16 << 20) + 4, 33}, {(20 << 20) + 20000, 33}};
    team t;
    cuda_pairs(4, true);
    team_open(&t, 4, NULL, 4, ((20 << 20) + 20000) / sizeof(float));
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        size_t count = cases[i].bytes / sizeof(float);
        CHECK_OK(run_verb(&t, BROADCAST, count, 1)); /* pairs are checked */
        CHECK_OK(dp_wait(t.ctx));
        long before = sim_peer_copies();
        sim_trace_begin();
        CHECK_OK(run_verb(&t, BROADCAST, count, 1));
        (void)sim_trace_end();
        CHECK_INT(sim_peer_copies() - before, 3 * cases[i].pieces);
    }
    team_close(&t);
}

/* Replicas get a model's parameters along the same chain. */
TEST_SLOW(replication_uses_each_link_once, 60)
{
    team t;
    cuda_pairs(4, true);
    team_open(&t, 4, NULL, 4, (8 << 20) / sizeof(float));
    CHECK_OK(dp_replicate_into(t.ctx, &t.send[0], &t.recv[1], 3));
    CHECK_OK(dp_wait(t.ctx));
    sim_trace_begin();
    CHECK_OK(dp_replicate_into(t.ctx, &t.send[0], &t.recv[1], 3));
    double took = sim_trace_end(), piece = 2 + (512 << 10) / 350e3;
    CHECK(took < 1.2 * 18 * piece);
    for (int d = 0; d < 4; d++)
        CHECK_INT(sim_trace_bytes(d, true), d < 3 ? 8 << 20 : 0);
    team_close(&t);
}

/* `count` GPUs that do not reach each other each read the next one: two of them one another. */
static double traced_over_host(team *t, int count)
{
    sim_trace_begin();
    for (int r = 0; r < count; r++)
        CHECK_OK(dp_cuda()->peer_copy(dp_local_stream(t->ctx, r), t->recv[r].data,
                                      dp_local_stream(t->ctx, (r + 1) % t->count)->dev,
                                      t->send[(r + 1) % t->count].data, t->room * sizeof *host));
    return sim_trace_end();
}

/* The host only enqueues them. So those of both directions, and of any number of GPUs, take no
   longer than one; which takes as long as a link, and one piece of 2 MiB more. */
TEST_SLOW(copies_over_the_host_overlap, 60)
{
    static const size_t sizes[] = {1, (2 << 20) + 4, 16 << 20, (50 << 20) + 12};
    for (int gpus = 2; gpus <= 4; gpus++)
        for (int i = 0; i < 4; i++) {
            team t;
            cuda_pairs(gpus, false);
            team_open(&t, gpus, NULL, gpus, (sizes[i] + 3) / sizeof(float));
            (void)traced_over_host(&t, gpus); /* pairs are asked for */
            long waits = sim_wait_count();
            double one = traced_over_host(&t, 1), all = traced_over_host(&t, gpus);
            double bytes = (double)(t.room * sizeof(float)), pieces = ceil(bytes / (2 << 20));
            double piece = bytes < 2 << 20 ? bytes : 2 << 20;
            double want = bytes / 55e3 + 2 * pieces + 2 + piece / 55e3;
            fprintf(stderr, "# %d GPUs, %.0f bytes: one %.1f us, all %.1f us, model %.1f us\n",
                    gpus, bytes, one, all, want);
            CHECK(one < 1.05 * want && one > 0.95 * want);
            CHECK(all < 1.05 * want);
            CHECK_INT(sim_wait_count(), waits);
            team_close(&t);
        }
}

TEST_SLOW(one_context_a_gpu_and_call, 60)
{
    team t;
    cuda_pairs(8, true);
    team_open(&t, 8, NULL, 8, (16 << 20) / sizeof(float));
    (void)traced(&t, SUM_IN_PLACE, 0);
    long calls = sim_call_count(), pushes = sim_push_count();
    sim_trace_begin();
    CHECK_OK(run_verb(&t, SUM_IN_PLACE, t.room, 0));
    (void)sim_trace_end();
    CHECK(sim_push_count() - pushes <= 2 * 8);
    /* begin: 8; two meetings: 2 * (14 + 8); sums: 8 * (7 + 1 + 1); fetches: 8 * 7 * 2; marks: 8;
       behind the sums before: 2 */
    CHECK(sim_call_count() - calls <= 8 + 44 + 72 + 112 + 8 + 2);
    team_close(&t);
}

/* MiB of each GPU that were allocated since `before`. */
static void check_taken(team *t, const uint64_t *before, const int *want)
{
    for (int r = 0; r < t->count; r++) {
        dp_device_info info;
        CHECK_OK(dp_device_info_get(t->ctx, r, &info));
        CHECK_INT(before[r] - info.bytes_free, (uint64_t)want[r] << 20);
    }
}

/* 4 MiB for each rank, of who adds up what lies on another GPU, from then on: here too much for
   what is left of the first slab. */
TEST(only_who_adds_up_takes_memory_for_it)
{
    team t;
    uint64_t before[MOST];
    cuda_pairs(3, true);
    team_open(&t, 3, (const int[]){0, 1, 2, 1, 1, 1, 1, 2}, MOST, LONG_COUNT);
    CHECK_OK(run_verb(&t, GATHER, 10, 0)); /* pairs are checked */
    for (int r = 0; r < MOST; r++) {
        dp_device_info info;
        CHECK_OK(dp_device_info_get(t.ctx, r, &info));
        before[r] = info.bytes_free;
    }
    CHECK_OK(run_verb(&t, BROADCAST, LONG_COUNT, 2));
    CHECK_OK(run_verb(&t, ALL_TO_ALL, 10, 0));
    check_taken(&t, before, (const int[MOST]){0});
    for (int i = 0; i < 2; i++) { /* so little that one GPU does it */
        CHECK_OK(run_verb(&t, SUM, 10, 0));
        check_taken(&t, before, (const int[]){32, 0, 0, 0, 0, 0, 0, 0});
    }
    for (int i = 0; i < 2; i++) { /* a slice for each GPU */
        CHECK_OK(run_verb(&t, SUM, LONG_COUNT, 0));
        check_taken(&t, before, (const int[]){32, 32, 32, 32, 32, 32, 32, 32});
    }
    CHECK_OK(run_verb(&t, SCATTER_SUM, 10, 0)); /* a block for each rank */
    check_taken(&t, before, (const int[]){32, 160, 64, 160, 160, 160, 160, 64});
    team_close(&t);
}

/* ---- what is lost ---------------------------------------------------------------------------- */

/* A pair that hangs costs both GPUs. Nothing is asked of them any more; the third goes on. */
TEST_SLOW(a_pair_that_hangs_is_lost, 30)
{
    team t;
    dp_ctx *again = NULL;
    cuda_pairs(3, true);
    sim_set_peer(0, 1, SIM_PEER_HANGS);
    team_open(&t, 3, NULL, 3, 1000);
    CHECK_ERROR(run_verb(&t, SUM, 1000, 0), DP_ERR_DEVICE, "GPU 0 does not finish reading GPU 1");
    dp_scope_end(t.scope);
    dp_close(t.ctx);
    CHECK_INT(sim_finding_count(NULL), 0);
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    CHECK_ERROR(dp_open(&(dp_config){.backends = backends, .device_count = 3}, &again),
                DP_ERR_NO_DEVICE, "GPU 0 is lost to this process, since it faulted or hung");
    team_open(&t, 3, (const int[]){2, 2}, 2, 1000);
    write_around(&t, SUM, 1000, 0);
    dp_scope_end(t.scope);
    dp_close(t.ctx);
    CHECK_INT(sim_finding_count(NULL), 0);
}

/* A check has its time, however the wall clock is set meanwhile. */
TEST_SLOW(a_pair_is_checked_by_a_clock_that_is_never_set, 30)
{
    team t;
    cuda_pairs(3, true);
    sim_set_peer(0, 1, SIM_PEER_HANGS);
    sim_jump_wall_clock(true);
    team_open(&t, 3, NULL, 3, 1000);
    long before = sim_peer_copies();
    CHECK_OK(dp_copy(t.ctx, &t.recv[2], &t.source[1], NULL));
    CHECK(sim_peer_copies() > before);
    double start = now_ms();
    CHECK_ERROR(dp_copy(t.ctx, &t.recv[0], &t.source[1], NULL), DP_ERR_DEVICE,
                "GPU 0 does not finish reading GPU 1");
    double took = now_ms() - start;
    CHECK(took > 4900 && took < 5000 + 3000 * test_timeout_scale());
    dp_scope_end(t.scope);
    dp_close(t.ctx);
}

/* From a fault on, the calls to the GPU that had it are those of the moment: closing makes none. */
TEST(a_gpu_that_faulted_is_left_alone)
{
    team t;
    team_open(&t, 1, NULL, 1, 1000);
    CHECK_OK(dp_wait(t.ctx));
    sim_fail_at(1, cudaErrorIllegalAddress, true);
    CHECK_ERROR(dp_fill(t.ctx, &t.recv[0], dp_float(1)), DP_ERR_DEVICE, "simulated error (700)");
    long calls = sim_call_count();
    dp_scope_end(t.scope);
    dp_close(t.ctx);
    CHECK(sim_call_count() - calls <= 1);
    sim_fail_at(0, 0, false);
}

/* A GPU that is lost while it opens leaves nothing that another one of its kind would find, which
   opens all the same, and has kernels. */
TEST_SLOW(a_gpu_that_is_lost_while_it_opens, 60)
{
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    long loads = sim_library_loads();
    for (int n = 1; n <= 40; n++) {
        team t;
        dp_ctx *ctx = NULL;
        cuda_gpus(n + 1);
        sim_fail_at(n, cudaErrorIllegalAddress, false);
        if (dp_open(&(dp_config){.backends = backends,
                                 .devices = (const int[]){n - 1},
                                 .device_count = 1},
                    &ctx) == DP_OK)
            dp_close(ctx); /* not every failure matters */
        CHECK(sim_fault_fired());
        sim_fail_at(0, 0, false);
        team_open(&t, n + 1, (const int[]){n}, 1, 1000);
        CHECK_OK(dp_fill(t.ctx, &t.recv[0], dp_float(1)));
        CHECK_OK(dp_wait(t.ctx));
        dp_scope_end(t.scope);
        dp_close(t.ctx);
        CHECK_INT(sim_finding_count(NULL), 0);
    }
    CHECK(sim_library_loads() > loads + 40); /* of some that were lost, too */
}

/* A call fails in the middle of a collective among three: an error, no hang, nothing left. */
TEST_SLOW(every_call_of_a_collective_fails, 60)
{
    bool fired = true;
    for (long n = 1; fired; n += 5 * test_step()) {
        team t;
        cuda_pairs(3, true);
        team_open(&t, 3, NULL, 3, 1000);
        if (n % 2 == 1) /* pairs are checked before, or in it */
            CHECK_OK(run_verb(&t, SUM, 1000, 0));
        sim_fail_at(n, cudaErrorMemoryAllocation, false);
        (void)run_verb(&t, SUM, 1000, 0);
        fired = sim_fault_fired();
        sim_fail_at(0, 0, false);
        dp_scope_end(t.scope);
        dp_close(t.ctx);
        CHECK_INT(sim_finding_count(NULL), 0);
    }
}

static void trio_open(team *t, int gpus, size_t room)
{
    team_open(t, gpus, (const int[]){0, 1 % gpus, 2 % gpus}, 3, room);
    CHECK_OK(run_verb(t, SUM, t->room, 0)); /* pairs are checked */
    streams_open(t);
}

static void trio_close(team *t)
{
    streams_close(t);
    team_close(t);
}

/* The memory of a call that failed may be written to at once, on any stream. */
static void write_after(team *t, dp_status status)
{
    for (int r = 0; r < t->count && status != DP_OK; r++) {
        CHECK_OK(dp_fill(t->ctx, &t->send[r], dp_float(FILLED)));
        CHECK_OK(dp_cuda()->copy(t->streams[r], t->recv[r].data, t->source[r].data,
                                 t->room * sizeof *host));
    }
    if (status != DP_OK)
        write_to_spare_memory(t);
    streams_wait(t);
    CHECK_OK(dp_wait(t->ctx));
    CHECK_INT(sim_finding_count(NULL), 0);
}

static dp_status run_weighted(team *t)
{
    const double weights[] = {1, 2, 3};
    dp_part parts[MOST];
    for (int r = 0; r < t->count; r++)
        parts[r] = (dp_part){t->send[r].data, t->recv[r].data, t->streams[r]};
    return dp_all_reduce_weighted(t->ctx, parts, weights, 1000, DP_F32);
}

static dp_status run_replicate(team *t)
{
    return dp_replicate_into(t->ctx, &t->send[0], &t->recv[1], (size_t)t->count - 1);
}

static dp_status run_sum(team *t)
{
    return run_verb(t, SUM, 1000, 0);
}

static dp_status run_sum_to(team *t)
{
    return run_verb(t, SUM_TO, 1000, 0);
}

static dp_status run_add(team *t)
{
    return dp_reduce_add_into(t->ctx, t->send, (size_t)t->count, &t->recv[0]);
}

/* Halves travel, and are cast on the way. */
static dp_status run_gradients(team *t)
{
    dp_reducer *reducer = NULL;
    dp_status status = reducer_make(t, DP_BF16, &reducer);
    if (status == DP_OK)
        status = reduce_gradients(t, reducer);
    dp_reducer_destroy(reducer);
    return status;
}

/* Each call of it fails, one after another; with 801 the driver "cannot do this". */
static void fail_everywhere_by(int code, dp_status (*run)(team *t), int gpus, size_t room)
{
    team t;
    bool fired = true;
    trio_open(&t, gpus, room);
    for (long n = 1; fired; n++) {
        sim_fail_at(n, code, false);
        dp_status status = run(&t);
        fired = sim_fault_fired();
        sim_fail_at(0, 0, false);
        if (dp_status_class(status) == DP_CLASS_JOB) { /* it was a wait that failed */
            trio_close(&t);
            trio_open(&t, gpus, room);
        } else {
            write_after(&t, status);
        }
    }
    trio_close(&t);
}

static void fail_everywhere(dp_status (*run)(team *t), int gpus, size_t room)
{
    fail_everywhere_by(cudaErrorMemoryAllocation, run, gpus, room);
    fail_everywhere_by(801, run, gpus, room);
}

TEST_SLOW(failed_collectives_write_nothing_later, 60)
{
    cuda_pairs(3, true);
    fail_everywhere(run_sum, 3, 1000);
    fail_everywhere(run_sum_to, 1, 1000);
    fail_everywhere(run_weighted, 1, 1000);
    fail_everywhere(run_misaligned, 1, 1001);
    fail_everywhere(run_add, 1, 1000);
    fail_everywhere(run_gradients, 1, GRADS);
    fail_everywhere(run_replicate, 3, LONG_COUNT);
}

/* A sum on streams of the user's fails at any call, and the next one is on the compute streams:
   what it fetches does not come where the failed one still adds up. */
static void sum_after_a_failed_one(int code)
{
    team t;
    bool fired = true;
    dp_stream *others[MOST];
    trio_open(&t, 3, LONG_COUNT);
    memcpy(others, t.streams, sizeof others);
    for (long n = 1; fired; n += test_step()) {
        CHECK_OK(run_verb(&t, SUM, t.room, 0));
        streams_wait(&t);
        sim_fail_at(n, code, false);
        dp_status status = run_verb(&t, SUM, t.room, 0);
        fired = sim_fault_fired();
        sim_fail_at(0, 0, false);
        if (status == DP_OK)
            streams_wait(&t);
        memset(t.streams, 0, sizeof t.streams);
        write_around(&t, SUM, t.room, 0);
        memcpy(t.streams, others, sizeof others);
        streams_wait(&t);
        CHECK_INT(sim_finding_count(NULL), 0);
    }
    trio_close(&t);
}

TEST_SLOW(sums_after_a_failed_one_are_right, 60)
{
    cuda_pairs(3, true);
    sum_after_a_failed_one(cudaErrorMemoryAllocation);
    sum_after_a_failed_one(801);
}

/* A call fails in the middle of a pair's check: what it had begun is over before its memory goes,
   and the copy is made through the host. */
TEST_SLOW(every_call_of_a_check_fails, 60)
{
    bool fired = true;
    for (long n = 1; fired; n += test_step()) {
        team t;
        cuda_pairs(2, true);
        team_open(&t, 2, NULL, 2, 1000);
        CHECK_OK(dp_wait(t.ctx));
        sim_fail_at(n, cudaErrorMemoryAllocation, false);
        dp_status status = dp_copy(t.ctx, &t.recv[1], &t.source[0], NULL);
        fired = sim_fault_fired();
        sim_fail_at(0, 0, false);
        if (status == DP_OK) {
            CHECK_OK(dp_read(t.ctx, &t.recv[1], host, 1000 * sizeof *host));
            CHECK_F64(host[999], number_of(0, 999), 0);
        }
        dp_scope_end(t.scope);
        dp_close(t.ctx);
        CHECK_INT(sim_finding_count(NULL), 0);
    }
}
#endif /* TEST_SIM */
#endif /* TEST_CUDA */
