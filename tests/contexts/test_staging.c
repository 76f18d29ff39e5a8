/* test_staging.c - collectives of several processes whose devices have memory of their own: a table
   for the host carries copies. Bits, statuses and sentences are those of CPU devices. */

#include <stdlib.h>
#include "examples/custom_device.h"
#include "decorator.h"
#include "lazy.h"
#include "reluctant.h"
#include "unified.h"
#include "meeting.h"

/* ---- the same bits --------------------------------------------------------------------------- */

enum { LOCALS = 2, PIECE = 1 << 20, ROOM = 16 * PIECE };

/* dp_all_reduce_scaled and dp_all_reduce_weighted, behind the verbs. */
enum { SCALED = DP_SCATTER_FROM + 1, WEIGHTED, VERBS };

typedef struct trial {
    dp_ctx *ctx;
    dp_scope *scope;
    dp_info info;
    dp_tensor send[LOCALS], recv[LOCALS]; /* ROOM bytes */
    dp_part parts[LOCALS];
    uint64_t hash;
} trial;

static unsigned char *bytes_here; /* ROOM */

/* Finite numbers, other ones on each rank. */
static void numbers_of(dp_dtype dtype, int rank, void *out, size_t count)
{
    unsigned seed = 77u + (unsigned)rank;
    for (size_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        unsigned n = seed >> 12;
        if (dtype == DP_F32)
            ((float *)out)[i] = (float)((int)(n % 2001) - 1000) / 7;
        else if (dtype == DP_F64)
            ((double *)out)[i] = (double)((int)(n % 2001) - 1000) / 7;
        else if (dtype == DP_F16)
            ((uint16_t *)out)[i] = (uint16_t)((n & 0x83ff) | (10 + n % 8) << 10);
        else if (dtype == DP_BF16)
            ((uint16_t *)out)[i] = (uint16_t)((n & 0x807f) | (120 + n % 8) << 7);
        else if (dtype == DP_BOOL)
            ((unsigned char *)out)[i] = n & 1;
        else
            memcpy((char *)out + i * dp_dtype_bytes(dtype), &(uint64_t){n}, dp_dtype_bytes(dtype));
    }
}

static dp_tensor front_of(const dp_tensor *buffer, size_t bytes)
{
    dp_tensor front;
    CHECK_OK(dp_narrow(buffer, 0, 0, (int64_t)bytes, &front));
    return front;
}

static void fill(trial *t, dp_dtype dtype, const dp_tensor *on, size_t bytes, int rank)
{
    const int64_t shape[] = {(int64_t)bytes};
    numbers_of(dtype, rank, bytes_here, bytes / dp_dtype_bytes(dtype));
    dp_tensor host = dp_wrap_const(bytes_here, DP_U8, 1, shape), to = front_of(on, bytes);
    CHECK_OK(dp_copy(t->ctx, &to, &host, NULL));
    CHECK_OK(dp_wait(t->ctx));
}

static void hash_in(trial *t, const dp_tensor *on, size_t bytes)
{
    dp_tensor from = front_of(on, bytes);
    CHECK_OK(dp_read(t->ctx, &from, bytes_here, bytes));
    for (size_t at = 0, run = 0; at < bytes; at += run) {
        uint64_t word = 0;
        run = bytes - at < sizeof word ? bytes - at : sizeof word;
        memcpy(&word, bytes_here + at, run);
        t->hash = (t->hash ^ word ^ t->hash >> 32) * 0x100000001b3u;
    }
}

static dp_status call(trial *t, int v, dp_dtype dtype, size_t count, dp_op op, int root)
{
    static const double weights[] = {0.75, 2.5};
    switch (v) {
    case DP_ALL_REDUCE:
        return dp_all_reduce(t->ctx, t->parts, count, dtype, op);
    case DP_BROADCAST:
        return dp_broadcast(t->ctx, t->parts, count, dtype, root);
    case DP_ALL_GATHER:
        return dp_all_gather(t->ctx, t->parts, count, dtype);
    case DP_REDUCE_SCATTER:
        return dp_reduce_scatter(t->ctx, t->parts, count, dtype, op);
    case DP_ALL_TO_ALL:
        return dp_all_to_all(t->ctx, t->parts, count, dtype);
    case DP_REDUCE_TO:
        return dp_reduce_to(t->ctx, t->parts, count, dtype, op, root);
    case DP_GATHER_TO:
        return dp_gather_to(t->ctx, t->parts, count, dtype, root);
    case DP_SCATTER_FROM:
        return dp_scatter_from(t->ctx, t->parts, count, dtype, root);
    case SCALED:
        return dp_all_reduce_scaled(t->ctx, t->parts, count, dtype, op, 0.3);
    default:
        return dp_all_reduce_weighted(t->ctx, t->parts, weights, count, dtype);
    }
}

/* One call, and all bytes that it may have touched. */
static void collect(trial *t, int v, dp_dtype dtype, size_t count, dp_op op, bool in_place)
{
    int root = (int)(count + (size_t)v) % t->info.rank_count;
    size_t block = count * dp_dtype_bytes(dtype);
    size_t span = block * (size_t)t->info.rank_count + 64;
    CHECK(span <= ROOM);
    for (int i = 0; i < t->info.local_count; i++) {
        size_t own = (size_t)(t->info.rank_first + i) * block;
        fill(t, dtype, &t->send[i], span, t->info.rank_first + i);
        fill(t, dtype, &t->recv[i], span, 100);
        t->parts[i] = (dp_part){.send = t->send[i].data, .recv = t->recv[i].data};
        if (in_place) {
            bool all = v == DP_ALL_GATHER || v == DP_GATHER_TO;
            bool from_all = v == DP_REDUCE_SCATTER || v == DP_SCATTER_FROM;
            t->parts[i].recv = (char *)t->send[i].data + (from_all ? own : 0);
            t->parts[i].send = (char *)t->send[i].data + (all ? own : 0);
        }
        if (v == DP_ALL_REDUCE && count % 2 == 1 && t->info.rank_first + i == 1)
            t->parts[i].recv = NULL; /* gives, and wants nothing */
    }
    CHECK_OK(call(t, v, dtype, count, op, root));
    for (int i = 0; i < t->info.local_count; i++) {
        hash_in(t, &t->send[i], span);
        hash_in(t, &t->recv[i], span);
    }
}

static bool may_be_in_place(int v)
{
    return v != DP_ALL_TO_ALL;
}

static void small_calls(trial *t, uint64_t *hashes, size_t *made)
{
    static const size_t counts[] = {0, 1, 7, 1003};
    for (int v = 0; v < VERBS; v++)
        for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++)
            for (int op = 0; op <= DP_OP_MAX; op++) {
                bool real = dtype <= DP_BF16, reduces = v != DP_BROADCAST && v != DP_ALL_GATHER &&
                                                        v != DP_ALL_TO_ALL && v != DP_GATHER_TO &&
                                                        v != DP_SCATTER_FROM;
                if ((v >= SCALED && !real) || (op > 0 && (!reduces || v == WEIGHTED)))
                    continue;
                size_t count = counts[(v + dtype + op) % 4];
                t->hash = 0xcbf29ce484222325u;
                collect(t, v, (dp_dtype)dtype, count, (dp_op)op, false);
                if (may_be_in_place(v))
                    collect(t, v, (dp_dtype)dtype, count, (dp_op)op, true);
                hashes[(*made)++] = t->hash;
            }
}

/* Of four cases all, or where that is slow the first and the last. */
static int sparse(void)
{
    return test_stride() > 1 ? 3 : 1;
}

/* About a piece, and several of them, for verbs with a block and with one for each rank. */
static void large_calls(trial *t, uint64_t *hashes, size_t *made)
{
    size_t ranks = (size_t)t->info.rank_count, most = PIECE / 4, each = most / ranks;
    const size_t ones[] = {most - 1, most, most + 1, 3 * most + 5};
    const size_t all[] = {each - 1, each, each + 1, 3 * each + 5};
    for (int v = 0; v < DP_REDUCE_TO; v++) {
        bool one = v == DP_ALL_REDUCE || v == DP_BROADCAST;
        for (int i = 0; i < 4; i += sparse()) {
            t->hash = 0xcbf29ce484222325u;
            collect(t, v, DP_F32, one ? ones[i] : all[i], DP_OP_SUM,
                    i % 2 == 1 && may_be_in_place(v));
            hashes[(*made)++] = t->hash;
        }
    }
    t->hash = 0xcbf29ce484222325u;
    collect(t, DP_ALL_REDUCE, DP_BF16, 2 * (PIECE / 2) + 3, DP_OP_MEAN, true);
    collect(t, DP_ALL_TO_ALL, DP_U8, PIECE / 2 / ranks + 1, DP_OP_SUM, false);
    hashes[(*made)++] = t->hash;
}

enum { MOST_CASES = 1000 };

typedef void calls(trial *t, uint64_t *hashes, size_t *made);

static size_t run_on(meeting *m, const dp_device_ops *ops, calls *all, uint64_t *hashes)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    dp_config config = config_of(m, m->process % 2 + 1);
    test_allocator counter = {0};
    size_t made = 0;
    trial t = {0};
    config.backends = backends;
    config.colls = NULL;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(dp_open(&config, &t.ctx));
    CHECK_OK(dp_info_get(t.ctx, &t.info));
    CHECK_STR(t.info.coll_backend,
              ops == dp_cpu() ? "shared memory" : "shared memory, through the host");
    t.scope = dp_scope_begin(t.ctx);
    for (int i = 0; i < t.info.local_count; i++) {
        const int64_t shape[] = {ROOM};
        dp_device here = dp_local_device(t.ctx, i);
        CHECK_OK(dp_tensor_new(t.scope, here, DP_U8, 1, shape, &t.send[i]));
        CHECK_OK(dp_tensor_new(t.scope, here, DP_U8, 1, shape, &t.recv[i]));
    }
    all(&t, hashes, &made);
    CHECK(made <= MOST_CASES);
    CHECK_OK(dp_barrier(t.ctx));
    dp_scope_end(t.scope);
    dp_close(t.ctx);
    CHECK_NO_LEAKS(&counter);
    return made;
}

static calls *calls_made;

static void as_on_the_cpu(meeting *m)
{
    static uint64_t want[MOST_CASES], got[MOST_CASES];
    bytes_here = malloc(ROOM);
    CHECK(bytes_here != NULL);
    size_t made = run_on(m, dp_cpu(), calls_made, want);
    for (int i = 0; i < 4; i += sparse()) {
        const dp_device_ops *table = i == 0   ? toy_device()
                                     : i == 1 ? lazy_device(toy_device())
                                     : i == 2 ? lazy_device(reluctant_device(HAS_ALL, ALL_KERNELS))
                                              : lazy_device(unified_device());
        table = decorate_device(table);
        CHECK_INT(run_on(m, table, calls_made, got), made);
        for (size_t k = 0; k < made; k++)
            if (got[k] != want[k])
                test_fail(__FILE__, __LINE__, "call %zu of %s has other bits", k, table->name);
        CHECK_DECORATOR();
    }
    free(bytes_here);
}

TEST_SLOW(bits_are_those_of_the_cpu, 120)
{
    calls_made = small_calls;
    in_processes(2, as_on_the_cpu);
    in_processes(3, as_on_the_cpu);
}

TEST_SLOW(bits_of_several_pieces_are_those_of_the_cpu, 120)
{
    calls_made = large_calls;
    in_processes(2, as_on_the_cpu);
}

/* ---- what fails ------------------------------------------------------------------------------ */

enum { SEVERAL = 3 * (PIECE / 4) + 5 }; /* f32: four pieces */

typedef struct sum {
    dp_ctx *ctx;
    dp_scope *scope;
    dp_tensor data;
    dp_part part;
} sum;

static dp_status sum_open(const dp_device_ops *ops, dp_config config, sum *out)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    const int64_t shape[] = {SEVERAL};
    *out = (sum){0};
    config.backends = backends;
    config.colls = NULL;
    DP_TRY(dp_open(&config, &out->ctx));
    out->scope = dp_scope_begin(out->ctx);
    CHECK_OK(dp_tensor_new(out->scope, dp_local_device(out->ctx, 0), DP_F32, 1, shape, &out->data));
    CHECK_OK(dp_fill(out->ctx, &out->data, dp_int(1)));
    out->part = (dp_part){.send = out->data.data, .recv = out->data.data};
    return DP_OK;
}

static dp_status sum_of(sum *s)
{
    return dp_all_reduce(s->ctx, &s->part, SEVERAL, DP_F32, DP_OP_SUM);
}

static void sum_close(sum *s)
{
    dp_scope_end(s->scope);
    dp_close(s->ctx);
}

/* Each call of process 1's table fails once: copies, events, waits. Both processes know. */
static void one_table_fails(meeting *m)
{
    char fired[2] = {0, 1}, own;
    for (long n = 1; fired[1] != 0; n++) {
        sum s;
        const dp_device_ops *ops = lazy_device(toy_device());
        CHECK_OK(sum_open(decorate_device(ops), config_of(m, 1), &s));
        deco.fail_with = DP_ERR_NO_MEMORY;
        deco.fail_at = m->process == 1 ? deco.call_count + n : 0;
        dp_status status = sum_of(&s);
        if (m->process == 1 && deco.fired) {
            bool waited = deco.fired_in == DECO_stream_sync || deco.fired_in == DECO_event_sync;
            CHECK_INT(status, waited ? DP_ERR_DEVICE : DP_ERR_INTERNAL);
            CHECK_SAYS(dp_last_error(), waited ? "the device cannot be waited for: decorator: "
                                               : "dp_all_reduce: decorator: ");
        }
        own = deco.fired;
        CHECK_OK(meeting_all_gather(&own, fired, 1, m));
        if (m->process == 0 && fired[1] != 0) {
            if (status == DP_OK) /* all that it needs was there before */
                status = dp_barrier(s.ctx);
            CHECK(status == DP_ERR_DEVICE || status == DP_ERR_INTERNAL);
            CHECK_SAYS(dp_last_error(), "rank 1 (process 1, pid ");
            CHECK_SAYS(dp_last_error(), " failed: ");
            CHECK_SAYS(dp_last_error(), "decorator: ");
        }
        if (fired[1] == 0)
            CHECK_OK(status);
        sum_close(&s);
        CHECK_DECORATOR();
    }
}

TEST_SLOW(the_nth_call_fails_in_one_process, 120)
{
    in_processes(2, one_table_fails);
}

/* A stream that is captured cannot be waited for. Who was refused comes again. */
static void one_is_refused_once(meeting *m)
{
    sum s;
    CHECK_OK(sum_open(decorate_device(lazy_device(toy_device())), config_of(m, 1), &s));
    if (m->process == 0) {
        deco.fail_with = DP_ERR_STATE;
        deco.fail_at = deco.call_count + 1;
        CHECK_STATUS(sum_of(&s), DP_ERR_STATE);
        CHECK(deco.fired_in == DECO_stream_sync);
    }
    for (int turn = 0; turn < 3; turn++)
        CHECK_OK(sum_of(&s));
    sum_close(&s);
    CHECK_DECORATOR();
}

TEST(a_refused_call_is_made_again)
{
    in_processes(2, one_is_refused_once);
}

static int copies_left; /* until this process ends */
static dp_device_ops dying_ops;

static dp_status dying_copy_in(dp_stream *stream, void *dst, const void *host, size_t bytes)
{
    if (bytes == PIECE && --copies_left == 0)
        _exit(EXIT_SUCCESS);
    return toy_device()->copy_in(stream, dst, host, bytes);
}

static dp_status dying_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = toy_device()->open(host, index, out);
    if (status == DP_OK)
        (*out)->ops = &dying_ops;
    return status;
}

static int die_at;

/* The sentence is about the whole, in whichever piece it was. */
static void one_dies_between(meeting *m)
{
    char want[200];
    sum s;
    dying_ops = *toy_device();
    dying_ops.open = dying_open;
    dying_ops.copy_in = dying_copy_in;
    CHECK_OK(sum_open(m->process == 1 ? &dying_ops : toy_device(), config_of(m, 1), &s));
    CHECK_OK(dp_barrier(s.ctx));
    CHECK_OK(sum_of(&s));
    copies_left = die_at;
    CHECK_ERROR(sum_of(&s), DP_ERR_REMOTE, "dp_all_reduce: ");
    snprintf(want, sizeof want, "collective 3, all_reduce of %d f32 (sum): rank 1 (process 1, pid ",
             SEVERAL);
    CHECK_SAYS(dp_last_error(), want);
    CHECK_SAYS(dp_last_error(), ") has died; it is in that one");
    CHECK_ERROR(dp_barrier(s.ctx), DP_ERR_REMOTE, "dp_barrier: the job failed: ");
    sum_close(&s);
}

TEST_SLOW(death_between_pieces_is_known, 60)
{
    for (die_at = 1; die_at <= 3; die_at++)
        in_processes_but(2, 1, one_dies_between);
}

/* Other sizes in other processes, of which some are pieces of the same size. */
static void one_has_another_size(meeting *m)
{
    sum s;
    CHECK_OK(sum_open(toy_device(), config_of(m, 1), &s));
    size_t own = m->process == 1 ? SEVERAL - 1 : SEVERAL;
    char want[200];
    snprintf(want, sizeof want, "collective 1: rank 1 (process 1, pid ");
    CHECK_ERROR(dp_all_reduce(s.ctx, &s.part, own, DP_F32, DP_OP_SUM), DP_ERR_REMOTE, want);
    snprintf(want, sizeof want, ") has issued all_reduce of %d f32 (sum), and rank 0 (process 0, ",
             SEVERAL - 1);
    CHECK_SAYS(dp_last_error(), want);
    snprintf(want, sizeof want, ") all_reduce of %d f32 (sum): all must make the same calls",
             SEVERAL);
    CHECK_SAYS(dp_last_error(), want);
    sum_close(&s);
}

TEST(sizes_that_differ_are_told_of_the_whole)
{
    in_processes(3, one_has_another_size);
}

/* One process has no memory for pieces, or for what they need: nobody waits. */
static void one_has_no_memory(meeting *m)
{
    const dp_device_ops *const backends[] = {toy_device(), NULL};
    char failed[2] = {0, 1}, own;
    for (size_t n = 3; failed[1] != 0; n++) { /* before that it cannot tell the others */
        test_allocator counter = {.fail_at = m->process == 1 ? n : 0};
        dp_config config = config_of(m, 1);
        dp_ctx *ctx = NULL;
        config.backends = backends;
        config.colls = NULL;
        config.allocator = test_allocator_of(&counter);
        dp_status status = dp_open(&config, &ctx);
        own = status != DP_OK;
        CHECK_OK(meeting_all_gather(&own, failed, 1, m));
        if (m->process == 1 && own)
            CHECK_INT(status, DP_ERR_NO_MEMORY);
        if (m->process == 0)
            CHECK_INT(status, failed[1] ? DP_ERR_REMOTE : DP_OK);
        if (status == DP_OK)
            dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
}

TEST_SLOW(no_memory_in_one_process, 120)
{
    in_processes(2, one_has_no_memory);
}

/* ---- what it costs --------------------------------------------------------------------------- */

/* All that it needs was there when it opened; a piece is one copy out and one in. */
static void count_calls(meeting *m)
{
    test_allocator counter = {0};
    dp_config config = config_of(m, 1);
    sum s;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(sum_open(decorate_device(lazy_device(toy_device())), config, &s));
    for (int turn = 0; turn < 3; turn++) {
        size_t allocated = counter.call_count;
        int out = deco_calls(DECO_copy_out), in = deco_calls(DECO_copy_in);
        CHECK_OK(sum_of(&s));
        CHECK_INT(deco_calls(DECO_copy_out) - out, 4);
        CHECK_INT(deco_calls(DECO_copy_in) - in, 4);
        CHECK_INT(counter.call_count, allocated);
    }
    sum_close(&s);
    CHECK_DECORATOR();
    CHECK_NO_LEAKS(&counter);
}

/* Nothing is copied where the host reaches the memory, and nothing is kept for copies. */
static void count_views(meeting *m)
{
    test_allocator counter = {0};
    dp_config config = config_of(m, 1);
    sum s;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(sum_open(decorate_device(lazy_device(unified_device())), config, &s));
    CHECK(counter.live_bytes < 5 * PIECE); /* the data has three, and what they are rounded to */
    int waits = deco_calls(DECO_stream_sync);
    CHECK_OK(sum_of(&s));
    CHECK_INT(deco_calls(DECO_stream_sync) - waits, 1);
    CHECK_INT(deco_calls(DECO_copy_out) + deco_calls(DECO_copy_in), 0);
    sum_close(&s);
    CHECK_DECORATOR();
    CHECK_NO_LEAKS(&counter);
}

TEST(a_piece_is_a_copy_out_and_one_in)
{
    in_processes(2, count_calls);
}

TEST(unified_memory_is_not_copied)
{
    in_processes(2, count_views);
}
