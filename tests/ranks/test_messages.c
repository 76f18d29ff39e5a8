/* test_messages.c - messages from one rank to another: every number arrives where it should, in
   order, whatever else goes on; and who waits in vain hears why. */

#define _GNU_SOURCE /* P_tmpdir */

#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include "examples/custom_device.h"
#include "folder.h"
#include "ranked.h"

/* ---- bytes that say which message they are of ------------------------------------------------ */

static uint64_t mix(uint64_t which)
{
    which = (which ^ which >> 31) * 0x9e3779b97f4a7c15u;
    return (which ^ which >> 29) * 0xbf58476d1ce4e5b9u;
}

/* Eight at a time, as a sanitizer looks at each access; the last ones may be fewer. */
static size_t word_of(size_t bytes, size_t i, uint64_t seed, uint64_t *out)
{
    *out = mix(seed * 1000003 + i / 8);
    return bytes - i < sizeof *out ? bytes - i : sizeof *out;
}

static void fill(void *data, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word;
        size_t width = word_of(bytes, i, seed, &word);
        memcpy((char *)data + i, &word, width);
    }
}

static void check_filled(const void *data, size_t bytes, uint64_t seed)
{
    for (size_t i = 0; i < bytes; i += 8) {
        uint64_t word, got;
        size_t width = word_of(bytes, i, seed, &word);
        got = word;
        memcpy(&got, (const char *)data + i, width);
        if (got != word)
            test_fail(__FILE__, __LINE__, "bytes %zu to %zu of %zu are %llx, of %llu they are %llx",
                      i, i + width, bytes, (unsigned long long)got, (unsigned long long)seed,
                      (unsigned long long)word);
    }
}

static dp_tensor bytes_at(void *data, size_t bytes)
{
    return dp_wrap(data, DP_U8, 1, (int64_t[]){(int64_t)bytes});
}

static dp_message message(dp_tensor tensor, int local_rank, int peer, int tag, bool receives)
{
    return (dp_message){
        .tensor = tensor, .local_rank = local_rank, .peer = peer, .tag = tag, .receives = receives};
}

/* ---- two processes --------------------------------------------------------------------------- */

static bool no_heap; /* files may not be as large as that */

static dp_ctx *open_near(meeting *m, int devices, int timeout_ms)
{
    struct rlimit usual;
    CHECK_INT(getrlimit(RLIMIT_FSIZE, &usual), 0);
    if (no_heap)
        CHECK_INT(setrlimit(RLIMIT_FSIZE, &(struct rlimit){64 << 20, usual.rlim_max}), 0);
    dp_ctx *ctx = open_over_shm(m, devices, timeout_ms);
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &usual), 0);
    return ctx;
}

/* Memory that the other process sees, or does not. */
static void *memory_of(dp_scope *scope, bool seen, size_t bytes)
{
    void *data = seen ? dp_shared_alloc(scope, bytes) : dp_scope_alloc(scope, bytes);
    CHECK(data != NULL);
    return data;
}

static void send_and_receive(dp_ctx *ctx, dp_scope *scope, int process, size_t bytes, int how)
{
    char *data = memory_of(scope, how >> process & 1, bytes + 2);
    dp_tensor tensor = bytes_at(data + 1, bytes);
    memset(data, 0x55, bytes + 2);
    if (process == 0) {
        fill(data + 1, bytes, bytes);
        CHECK_OK(dp_send(ctx, &tensor, 1, how));
        CHECK_OK(dp_recv(ctx, &tensor, 1, how));
        check_filled(data + 1, bytes, bytes + 1);
    } else {
        CHECK_OK(dp_recv(ctx, &tensor, 0, how));
        check_filled(data + 1, bytes, bytes);
        fill(data + 1, bytes, bytes + 1);
        CHECK_OK(dp_send(ctx, &tensor, 0, how));
    }
    CHECK_INT(data[0], 0x55);
    CHECK_INT(data[bytes + 1], 0x55);
}

static void sizes_both_ways(meeting *m)
{
    static const size_t sizes[] = {
        0, 1, 8, 63, 64, 65, 1000, 4095, 65535, 65536, 65537, 4 * 65536, 4 * 65536 + 1, 1000003};
    dp_ctx *ctx = open_near(m, 1, 0);
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        for (int how = 0; how < 4; how++) {
            dp_scope *scope = dp_scope_begin(ctx);
            send_and_receive(ctx, scope, m->process, sizes[i], how);
            dp_scope_end(scope);
        }
    dp_close(ctx);
}

TEST(messages_of_any_size)
{
    in_processes(2, sizes_both_ways);
    no_heap = true;
    in_processes(2, sizes_both_ways);
    no_heap = false;
}

/* Of each dtype, from any strides to any other, of other shapes. */
static void dtypes_and_strides(meeting *m)
{
    dp_ctx *ctx = open_near(m, 2, 0);
    for (int dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        enum { ROWS = 7, COLUMNS = 33, WHOLE = ROWS * COLUMNS };
        size_t bytes = dp_dtype_bytes((dp_dtype)dtype);
        static char whole[WHOLE * 8], got[WHOLE * 8];
        dp_tensor rows, turned, flat;
        dp_scope *scope = dp_scope_begin(ctx);
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), (dp_dtype)dtype, 2,
                               (int64_t[]){ROWS, COLUMNS}, &rows));
        CHECK_OK(dp_transpose(&rows, 0, 1, &turned));
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), (dp_dtype)dtype, 1,
                               (int64_t[]){WHOLE}, &flat));
        fill(whole, WHOLE * bytes, (uint64_t)dtype);
        dp_tensor host = dp_wrap(whole, (dp_dtype)dtype, 2, (int64_t[]){COLUMNS, ROWS});
        if (m->process == 0) {
            CHECK_OK(dp_copy(ctx, &turned, &host, NULL));
            CHECK_OK(dp_send(ctx, &turned, 3, 1));
            CHECK_OK(dp_send(ctx, &host, 3, 2));
        } else {
            CHECK_OK(dp_recv(ctx, &flat, 1, 1));
            CHECK_OK(dp_read(ctx, &flat, got, WHOLE * bytes));
            CHECK_BYTES(got, whole, WHOLE * bytes);
            CHECK_OK(dp_recv(ctx, &turned, 0, 2));
            CHECK_OK(dp_read(ctx, &turned, got, WHOLE * bytes));
            CHECK_BYTES(got, whole, WHOLE * bytes);
        }
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

TEST(messages_of_any_dtype_and_strides)
{
    in_processes(2, dtypes_and_strides);
}

TEST(messages_of_devices_with_memory_of_their_own)
{
    in_processes_on(toy_device(), 2, dtypes_and_strides);
}

#if defined(TEST_CUDA)
TEST(messages_of_gpus)
{
    on_gpus("22", dtypes_and_strides);
}
#endif

/* ---- order ----------------------------------------------------------------------------------- */

enum { TAGS = 300 };

/* The last one first: none is in the way of another. */
static void tags_backwards_once(dp_ctx *ctx, bool sends)
{
    static int32_t numbers[TAGS];
    static dp_message all[TAGS];
    int count = no_heap ? 200 : TAGS;
    for (int i = 0; i < count; i++)
        numbers[i] = sends ? 7 * i : -1;
    for (int i = 0; i < count; i++)
        all[i] = message(dp_wrap(&numbers[i], DP_I32, 0, NULL), 0, 1, i - 5, false);
    if (sends) {
        CHECK_OK(dp_messages_begin(ctx, all, (size_t)count));
        CHECK_OK(dp_messages_end(ctx, all, (size_t)count));
        CHECK_OK(dp_messages_end(ctx, all, (size_t)count));
    }
    for (int i = count - 1; i >= 0 && !sends; i--) {
        dp_tensor which = dp_wrap(&numbers[i], DP_I32, 0, NULL);
        CHECK_OK(dp_recv(ctx, &which, i % 2 == 0 ? 0 : DP_ANY_RANK, i - 5));
        CHECK_INT(numbers[i], 7 * i);
    }
}

/* Again and again: what a message needs is used again, of which there is little without a heap. */
static void tags_backwards(meeting *m)
{
    dp_ctx *ctx = open_near(m, 1, 0);
    for (int i = 0; i < 3; i++)
        tags_backwards_once(ctx, m->process == 0);
    dp_close(ctx);
}

TEST(messages_with_other_tags_overtake)
{
    in_processes(2, tags_backwards);
    no_heap = true;
    in_processes(2, tags_backwards);
    no_heap = false;
}

static void one_tag_in_order(meeting *m)
{
    enum { MOST = 100000 };
    dp_ctx *ctx = open_near(m, 1, 0);
    dp_scope *scope = dp_scope_begin(ctx);
    static dp_message all[40];
    for (int i = 0; i < 40; i++) {
        size_t bytes = (size_t)(mix((uint64_t)i) % MOST) >> i % 17;
        char *data = memory_of(scope, i % 3 == 0, bytes + 1);
        fill(data, m->process == 0 ? bytes : 0, (uint64_t)i);
        all[i] = message(bytes_at(data, bytes), 0, 1 - m->process, 3, m->process == 1);
    }
    CHECK_OK(dp_messages_begin(ctx, all, 17));
    CHECK_OK(dp_messages_begin(ctx, all + 17, 23));
    CHECK_OK(dp_messages_end(ctx, all, 40));
    for (int i = 0; i < 40; i++)
        check_filled(all[i].tensor.data, (size_t)all[i].tensor.shape[0], (uint64_t)i);
    dp_close(ctx);
}

TEST(messages_with_one_tag_keep_their_order)
{
    in_processes(2, one_tag_in_order);
}

/* Large ones that all want the same room, in another order than they were sent in. */
static void large_ones_backwards(meeting *m)
{
    enum { LARGE = 400000, COUNT = 5 };
    static char data[COUNT][LARGE];
    static dp_message all[COUNT + 1];
    dp_ctx *ctx = open_near(m, 1, 0);
    bool sends = m->process == 0;
    for (int i = 0; i <= COUNT; i++) {
        int tag = sends ? i : COUNT - i;
        size_t bytes = tag == COUNT ? 0 : LARGE - (size_t)tag;
        all[i] = message(bytes_at(data[tag % COUNT], bytes), 0, 1 - m->process, tag, !sends);
        if (sends)
            fill(data[tag % COUNT], tag == COUNT ? LARGE : bytes, (uint64_t)(tag % COUNT));
    }
    CHECK_OK(dp_messages_begin(ctx, all, sends ? COUNT + 1 : 1));
    CHECK_OK(dp_messages_end(ctx, all, sends ? COUNT + 1 : 1));
    if (!sends) { /* all have been offered */
        CHECK_OK(dp_messages_begin(ctx, all + 1, COUNT));
        CHECK_OK(dp_messages_end(ctx, all + 1, COUNT));
        for (int i = 0; i < COUNT; i++)
            check_filled(data[i], (size_t)(LARGE - i), (uint64_t)i);
    }
    dp_close(ctx);
}

TEST(large_messages_take_turns)
{
    in_processes(2, large_ones_backwards);
    no_heap = true;
    in_processes(2, large_ones_backwards);
    no_heap = false;
}

/* ---- many at once ---------------------------------------------------------------------------- */

static size_t ring_bytes;

static void ring(meeting *m)
{
    dp_ctx *ctx = open_near(m, 1, 0);
    int count = m->process_count, next = (m->process + 1) % count;
    for (int how = 0; how < 2; how++) {
        dp_scope *scope = dp_scope_begin(ctx);
        char *out = memory_of(scope, how == 0, ring_bytes), *in = memory_of(scope, 0, ring_bytes);
        int from = m->process;
        fill(out, ring_bytes, (uint64_t)m->process);
        for (int step = 0; step < count; step++) {
            dp_message both[] = {
                message(bytes_at(out, ring_bytes), 0, next, 0, false),
                message(bytes_at(in, ring_bytes), 0, (m->process + count - 1) % count, 0, true)};
            CHECK_OK(dp_messages_begin(ctx, both, 2));
            CHECK_OK(dp_messages_end(ctx, both, 2));
            from = (from + count - 1) % count;
            check_filled(in, ring_bytes, (uint64_t)from);
            memcpy(out, in, ring_bytes);
        }
        dp_scope_end(scope);
    }
    dp_close(ctx);
}

TEST(messages_around_a_ring)
{
    for (int processes = 1; processes <= 4; processes++) {
        ring_bytes = processes < 4 ? 700001 : 3000017;
        in_processes(processes, ring);
    }
    no_heap = true;
    in_processes(3, ring);
    no_heap = false;
}

enum { EACH_WAY = 100 };

/* Message i of rank `from` to rank `to`. */
static uint64_t seed_of(int from, int to, int i)
{
    return mix((uint64_t)((from * 64 + to) * 1000 + i));
}

static size_t size_of_message(uint64_t seed)
{
    return (size_t)(mix(seed) % 200000) >> mix(seed + 1) % 18;
}

static int tag_of_message(uint64_t seed)
{
    return (int)(mix(seed + 2) % 5) - 2;
}

static dp_message *all_of_rank(dp_ctx *ctx, dp_scope *scope, int local_rank, size_t *out_count)
{
    int ranks = dp_rank_count(ctx), own = dp_rank(ctx) + local_rank;
    size_t count = 0, most = (size_t)ranks * EACH_WAY * 2;
    dp_message *all = dp_scope_alloc(scope, most * sizeof *all);
    CHECK(all != NULL);
    for (int i = 0; i < EACH_WAY; i++)
        for (int peer = 0; peer < ranks; peer++) {
            uint64_t out = seed_of(own, peer, i), in = seed_of(peer, own, i);
            char *sent = memory_of(scope, mix(out + 3) % 2, size_of_message(out) + 1);
            char *got = memory_of(scope, mix(in + 4) % 2, size_of_message(in) + 1);
            fill(sent, size_of_message(out), out);
            all[count++] = message(bytes_at(sent, size_of_message(out)), local_rank, peer,
                                   tag_of_message(out), false);
            all[count++] = message(bytes_at(got, size_of_message(in)), local_rank, peer,
                                   tag_of_message(in), true);
        }
    *out_count = count;
    return all;
}

static void check_arrived(const dp_message *all, size_t count, int rank)
{
    size_t ranks = count / 2 / EACH_WAY;
    for (size_t i = 0; i < count; i++) {
        int peer = (int)(i / 2 % ranks), which = (int)(i / 2 / ranks);
        uint64_t seed = i % 2 == 0 ? seed_of(rank, peer, which) : seed_of(peer, rank, which);
        CHECK_INT(all[i].status, DP_OK);
        CHECK_INT(all[i].peer, peer);
        check_filled(all[i].tensor.data, size_of_message(seed), seed);
    }
}

static int devices_of_all;

/* Begun in parts, with sums in between. */
static void everybody_to_everybody(meeting *m)
{
    dp_ctx *ctx = open_near(m, devices_of_all, 0);
    dp_scope *scope = dp_scope_begin(ctx);
    int64_t sum = m->process;
    dp_message *all[4];
    size_t count = 0;
    for (int i = 0; i < devices_of_all; i++) {
        all[i] = all_of_rank(ctx, scope, i, &count);
        CHECK_OK(dp_messages_begin(ctx, all[i], count / 3));
    }
    CHECK_OK(dp_all_reduce_i64(ctx, &sum, 1, DP_OP_SUM));
    CHECK_INT(sum, m->process_count * (m->process_count - 1) / 2);
    for (int i = 0; i < devices_of_all; i++)
        CHECK_OK(dp_messages_begin(ctx, all[i] + count / 3, count - count / 3));
    for (int i = 0; i < devices_of_all; i++) {
        CHECK_OK(dp_messages_end(ctx, all[i], count));
        check_arrived(all[i], count, dp_rank(ctx) + i);
    }
    dp_close(ctx);
}

TEST_SLOW(a_hundred_messages_from_everybody_to_everybody, 60)
{
    for (devices_of_all = 1; devices_of_all <= 2; devices_of_all++)
        for (int processes = 1; processes <= 4; processes++)
            in_processes(processes, everybody_to_everybody);
    devices_of_all = 1;
    no_heap = true;
    in_processes(2, everybody_to_everybody);
    no_heap = false;
}

/* ---- here ------------------------------------------------------------------------------------ */

/* A process that has both ends. */
static void check_here(dp_ctx *ctx)
{
    int first = dp_rank(ctx);
    int32_t out[] = {11, 22, 33}, in[] = {0, 0, 0};
    dp_message all[6];
    for (int i = 0; i < 3; i++) {
        all[i] = message(dp_wrap_const(&out[i], DP_I32, 0, NULL), i % 2, first + 1, 4, false);
        all[5 - i] = message(dp_wrap(&in[i], DP_I32, 0, NULL), 1,
                             i == 1 ? DP_ANY_RANK : first + i % 2, 4, true);
    }
    CHECK_OK(dp_messages_begin(ctx, all, 1));
    CHECK_INT(all[0].status, DP_PENDING);
    CHECK_STATUS(dp_messages_test(ctx, all, 1), DP_PENDING);
    CHECK_ERROR(dp_messages_begin(ctx, all, 2), DP_ERR_STATE, "message 0 has begun");
    CHECK_ERROR(dp_messages_end(ctx, all, 1), DP_ERR_STATE,
                "the other end is of this process, too, and has not been begun");
    CHECK_OK(dp_messages_begin(ctx, all + 1, 5)); /* the last receive first */
    CHECK_OK(dp_messages_end(ctx, all, 6));
    CHECK_INT(in[2], 11);
    CHECK_INT(in[1], 22);
    CHECK_INT(all[4].peer, first + 1);
    CHECK_INT(in[0], 33);
    CHECK_OK(dp_messages_test(ctx, all, 6));
    dp_tensor tensor = dp_wrap(out, DP_I32, 0, NULL);
    CHECK_ERROR(dp_send(ctx, &tensor, first, 4), DP_ERR_STATE, "dp_send: 1 i32 from rank");
    CHECK_ERROR(dp_recv(ctx, &tensor, first, 4), DP_ERR_STATE, "has not been begun");
    CHECK_STATUS(dp_messages_begin(ctx, all, 0), DP_OK); /* and nothing is left of them */
    all[0] = message(tensor, 0, first, 4, false);
    all[1] = message(dp_wrap(in, DP_F32, 0, NULL), 0, DP_ANY_RANK, 4, true);
    CHECK_OK(dp_messages_begin(ctx, all, 2));
    CHECK_STATUS(dp_messages_end(ctx, all, 2), DP_ERR_MISMATCH);
    CHECK_SAYS(dp_last_error(), "with tag 4, which expected 1 f32");
    CHECK_INT(all[0].status, DP_ERR_MISMATCH);
    CHECK_INT(all[1].status, DP_ERR_MISMATCH);
}

static void here_in_process(meeting *m)
{
    dp_ctx *ctx = open_near(m, 2, 0);
    check_here(ctx);
    dp_close(ctx);
}

TEST(messages_inside_a_process)
{
    dp_ctx *ctx = open_here(2);
    check_here(ctx);
    dp_close(ctx);
    in_processes(3, here_in_process);
}

TEST(messages_of_a_world_of_one)
{
    dp_ctx *ctx = open_here(1);
    int64_t out = 5, in = 6;
    dp_tensor from = dp_wrap(&out, DP_I64, 0, NULL);
    dp_message both[] = {message(dp_wrap(&in, DP_I64, 0, NULL), 0, DP_ANY_RANK, -1, true),
                         message(from, 0, 0, -1, false)};
    CHECK_ERROR(dp_recv(ctx, &from, DP_ANY_RANK, 0), DP_ERR_STATE, "from any rank to rank 0");
    CHECK_OK(dp_messages_begin(ctx, both, 2));
    CHECK_OK(dp_messages_test(ctx, both, 2));
    CHECK_INT(in, 5);
    CHECK_INT(both[0].peer, 0);
    dp_close(ctx);
}

/* The other context may be open, or its memory gone. */
TEST(messages_of_another_context)
{
    static const char wrong[] = "message 0 was not begun in this context";
    dp_ctx *ctx = open_here(1), *other = open_here(1);
    int64_t out = 5, in = 6;
    dp_tensor from = dp_wrap(&out, DP_I64, 0, NULL), to = dp_wrap(&in, DP_I64, 0, NULL);
    dp_message both[] = {message(from, 0, 0, 1, false), message(to, 0, 0, 1, true)};
    dp_message receive = message(to, 0, 0, 2, true), send = message(from, 0, 0, 2, false);
    CHECK_OK(dp_messages_begin(ctx, both, 2));
    CHECK_OK(dp_messages_end(ctx, both, 2));
    CHECK_ERROR(dp_messages_end(other, both, 2), DP_ERR_STATE, wrong);
    CHECK_OK(dp_messages_begin(other, both, 2));
    CHECK_OK(dp_messages_begin(ctx, &receive, 1));
    CHECK_ERROR(dp_messages_test(other, &receive, 1), DP_ERR_STATE, wrong);
    dp_close(ctx);
    CHECK_ERROR(dp_messages_end(other, &receive, 1), DP_ERR_STATE, wrong);
    CHECK_OK(dp_messages_begin(other, &receive, 1)); /* again */
    CHECK_OK(dp_messages_begin(other, &send, 1));
    CHECK_OK(dp_messages_end(other, &receive, 1));
    CHECK_OK(dp_messages_end(other, &send, 1));
    CHECK_OK(dp_messages_end(other, both, 2));
    CHECK_INT(in, 5);
    dp_close(other);
}

TEST(copies_of_one_message)
{
    dp_ctx *ctx = open_here(1);
    int64_t out = 5, in = 6;
    dp_message all[3] = {message(dp_wrap(&out, DP_I64, 0, NULL), 0, 0, 1, false),
                         message(dp_wrap(&in, DP_I64, 0, NULL), 0, 0, 1, true)};
    CHECK_OK(dp_messages_begin(ctx, all, 2));
    all[2] = all[1];
    CHECK_ERROR(dp_messages_end(ctx, all, 3), DP_ERR_STATE,
                "dp_messages_end: two of these are copies of one message");
    CHECK_OK(dp_messages_end(ctx, all, 2));
    CHECK_ERROR(dp_messages_test(ctx, &all[2], 1), DP_ERR_STATE, "message 0 was not begun");
    CHECK_INT(in, 5);
    dp_close(ctx);
}

/* ---- wrong ----------------------------------------------------------------------------------- */

TEST(wrong_messages)
{
    dp_ctx *ctx = open_here(2);
    float data[6] = {0};
    dp_tensor good = dp_wrap(data, DP_F32, 1, (int64_t[]){6}), bad = good;
    dp_message one = message(good, 2, 0, 0, false);
    CHECK_ERROR(dp_messages_begin(ctx, NULL, 1), DP_ERR_INVALID,
                "dp_messages_begin: messages is NULL");
    CHECK_OK(dp_messages_begin(ctx, NULL, 0));
    CHECK_OK(dp_messages_end(ctx, NULL, 0));
    CHECK_OK(dp_messages_test(ctx, NULL, 0));
    CHECK_ERROR(dp_messages_end(ctx, NULL, 1), DP_ERR_INVALID, "dp_messages_end: messages is NULL");
    CHECK_ERROR(dp_messages_begin(ctx, &one, 1), DP_ERR_INVALID,
                "dp_messages_begin: local_rank is 2, the context has 2 devices");
    CHECK_ERROR(dp_messages_end(ctx, &one, 1), DP_ERR_STATE, "message 0 was not begun");
    CHECK_ERROR(dp_messages_test(ctx, &one, 1), DP_ERR_STATE, "message 0 was not begun");
    CHECK_ERROR(dp_send(ctx, NULL, 0, 0), DP_ERR_INVALID, "dp_send: tensor is NULL");
    CHECK_ERROR(dp_send(ctx, &good, 2, 0), DP_ERR_INVALID, "dp_send: peer is 2, there are 2 ranks");
    CHECK_ERROR(dp_send(ctx, &good, DP_ANY_RANK, 0), DP_ERR_INVALID, "dp_send: peer is -1");
    CHECK_ERROR(dp_recv(ctx, &good, -2, 0), DP_ERR_INVALID, "dp_recv: peer is -2");
    bad.dtype = 77;
    CHECK_STATUS(dp_send(ctx, &bad, 0, 0), DP_ERR_INVALID);
    bad = dp_wrap_const(data, DP_F32, 1, (int64_t[]){6});
    CHECK_STATUS(dp_recv(ctx, &bad, 0, 0), DP_ERR_INVALID);
    bad = good;
    bad.stride[0] = 0;
    CHECK_STATUS(dp_recv(ctx, &bad, 0, 0), DP_ERR_INVALID);
    bad = good;
    bad.device = (dp_device){7, 0};
    CHECK_STATUS(dp_send(ctx, &bad, 0, 0), DP_ERR_INVALID);
    dp_close(ctx);
    CHECK_ERROR(dp_send(ctx, &good, 0, 0), DP_ERR_STATE, "dp_send: the context is closed");
}

static dp_status send_inside(int rank, dp_scope *scope, void *user)
{
    float data = 0;
    dp_tensor tensor = dp_wrap(&data, DP_F32, 0, NULL);
    (void)scope;
    CHECK_ERROR(dp_send(user, &tensor, 1 - rank, 0), DP_ERR_STATE,
                "dp_send: a function under dp_run called it");
    CHECK_ERROR(dp_messages_test(user, NULL, 0), DP_ERR_STATE, "dp_messages_test: ");
    return DP_OK;
}

TEST(functions_that_run_together_send_nothing)
{
    dp_ctx *ctx = open_here(2);
    CHECK_OK(dp_run(ctx, NULL, send_inside, ctx));
    dp_close(ctx);
}

/* What does not fit fails on both sides, and what comes after it arrives. */
static void some_do_not_fit(meeting *m)
{
    enum { LARGE = 70000 };
    static char data[LARGE + 4];
    static const struct {
        dp_dtype dtype;
        int64_t sent, expected;
    } cases[] = {{DP_I8, 5, 4}, {DP_I8, 4, 5}, {DP_U8, 5, 5}, {DP_I8, LARGE, 4}, {DP_I8, 4, LARGE}};
    dp_ctx *ctx = open_near(m, 1, 0);
    for (int i = 0; i < 5; i++) {
        char want[200];
        bool sends = m->process == i % 2;
        dp_tensor sent = dp_wrap(data, cases[i].dtype, 1, &cases[i].sent);
        dp_tensor expected = dp_wrap(data, DP_I8, 1, &cases[i].expected);
        dp_status status = sends ? dp_send(ctx, &sent, 1 - m->process, i)
                                 : dp_recv(ctx, &expected, i % 3 ? 1 - m->process : DP_ANY_RANK, i);
        snprintf(want, sizeof want,
                 "%s: rank %d has sent %lld %s to rank %d with tag %d, which expected %lld i8",
                 sends ? "dp_send" : "dp_recv", i % 2, (long long)cases[i].sent,
                 dp_dtype_name(cases[i].dtype), 1 - i % 2, i, (long long)cases[i].expected);
        CHECK_STATUS(status, DP_ERR_MISMATCH);
        CHECK_STR(dp_last_error(), want);
        CHECK_OK(sends ? dp_send(ctx, &expected, 1 - m->process, i)
                       : dp_recv(ctx, &expected, 1 - m->process, i));
    }
    CHECK(!dp_failure(ctx, NULL));
    dp_close(ctx);
}

TEST(what_does_not_fit_fails_on_both_sides)
{
    in_processes(2, some_do_not_fit);
}

/* By the user's own table of collectives, on two machines that cannot find each other. */
static void nobody_carries(meeting *m)
{
    CHECK_INT(setenv("DP_MACHINE", m->process == 0 ? "a" : "b", 1), 0);
    if (m->process == 1)
        CHECK_INT(setenv("DP_INTERFACE", "nowhere", 1), 0);
    dp_ctx *ctx = open_job(m, 2, dp_cpu());
    dp_tensor tensor = bytes_at((char[]){1, 2}, 2);
    CHECK_ERROR(
        dp_send(ctx, &tensor, 2 - 2 * m->process, 0), DP_ERR_UNSUPPORTED,
        "dp_send: nothing carries messages between these processes: process 1 has opened no "
        "port, and has logged why");
    CHECK_ERROR(
        dp_recv(ctx, &tensor, DP_ANY_RANK, 0), DP_ERR_UNSUPPORTED,
        "dp_recv: nothing carries messages between these processes: process 1 has opened no "
        "port, and has logged why");
    dp_message both[] = {message(tensor, 0, dp_rank(ctx) + 1, 0, false),
                         message(bytes_at((char[2]){0}, 2), 1, dp_rank(ctx), 0, true)};
    CHECK_OK(dp_messages_begin(ctx, both + 1, 1));
    for (int i = 0; i < 4; i++) { /* the other end is of this process, too */
        CHECK_STATUS(dp_messages_test(ctx, both + 1, 1), DP_PENDING);
        rest(10);
    }
    CHECK_OK(dp_messages_begin(ctx, both, 1));
    CHECK_OK(dp_messages_end(ctx, both, 2));
    CHECK_BYTES(both[1].tensor.data, tensor.data, 2);
    dp_close(ctx);
}

TEST(machines_that_nothing_joins)
{
    in_processes(2, nobody_carries);
}

/* ---- without memory -------------------------------------------------------------------------- */

static void begin_without_memory(meeting *m)
{
    enum { BYTES = 3000, MANY = 40 };
    bool failed = m->process == 1;
    dp_ctx *ctx = NULL;
    static char data[2 * BYTES];
    static dp_message all[MANY];
    test_allocator counter = {0};
    dp_config config = config_of(m, 1);
    config.colls = NULL;
    config.poison = true;
    config.allocator = test_allocator_of(&counter);
    CHECK_OK(dp_open(&config, &ctx));
    take_what_is_kept(ctx, &counter);
    dp_tensor apart = dp_wrap(data, DP_U8, 1, (int64_t[]){BYTES});
    apart.stride[0] = 2;
    for (size_t fail_at = 1; failed; fail_at++) {
        counter.fail_at = counter.call_count + fail_at;
        for (int i = 0; i < MANY; i++)
            all[i] = message(apart, 0, 0, 0, i % 2 == 0);
        dp_status status = dp_messages_begin(ctx, all, MANY);
        failed = status != DP_OK;
        CHECK(!failed || status == DP_ERR_NO_MEMORY);
    }
    counter.fail_at = 0;
    for (int i = 0; i < MANY && m->process == 0; i++)
        all[i] = message(apart, 0, 1, 0, i % 2 == 1);
    if (m->process == 0)
        CHECK_OK(dp_messages_begin(ctx, all, MANY));
    CHECK_OK(dp_messages_end(ctx, all, MANY));
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST_SLOW(without_memory_no_message_begins, 30)
{
    in_processes(2, begin_without_memory);
}

/* ---- gone ------------------------------------------------------------------------------------ */

static dp_tensor some_bytes(size_t bytes)
{
    static char data[4 << 20];
    CHECK(bytes <= sizeof data);
    return bytes_at(data, bytes);
}

static bool any_rank;
static size_t bytes_of_end;
static void (*end_of_one)(dp_ctx *ctx);

/* Process 1 does what ends it; the others wait for it. Process 0 receives, others send. */
static void one_is_gone(meeting *m)
{
    dp_ctx *ctx = open_near(m, 1, 0);
    dp_tensor tensor = some_bytes(bytes_of_end);
    wait_for_all(m);
    double start = now_ms();
    if (m->process == 1) {
        end_of_one(ctx);
        return;
    }
    dp_status status = m->process == 0 ? dp_recv(ctx, &tensor, any_rank ? DP_ANY_RANK : 1, 9)
                                       : dp_send(ctx, &tensor, 1, 9);
    CHECK_INT(dp_status_class(status), DP_CLASS_JOB);
    CHECK_SAYS(dp_last_error(), "rank 1 (process 1, pid ");
    CHECK_SAYS(dp_last_error(), "with tag 9: ");
    CHECK_SAYS(dp_last_error(), end_of_one == end_die ? "has died" : "has closed its context");
    CHECK(now_ms() - start < 20000 * test_timeout_scale());
    CHECK_STATUS(dp_send(ctx, &tensor, 1, 9), status);
    dp_close(ctx);
}

TEST(who_waits_for_a_dead_rank_hears_of_it)
{
    end_of_one = end_die;
    for (bytes_of_end = 5; bytes_of_end < 4 << 20; bytes_of_end *= 3000)
        for (int any = 0; any < 2; any++) {
            any_rank = any == 1;
            in_processes_but(2, 1, one_is_gone);
            in_processes_but(4, 1, one_is_gone);
        }
}

TEST(who_waits_for_a_closed_rank_hears_of_it)
{
    end_of_one = end_close;
    any_rank = false;
    bytes_of_end = 100;
    in_processes(2, one_is_gone);
    in_processes(4, one_is_gone);
}

/* It has begun its part, and goes before it is done. */
static void begin_and_close(dp_ctx *ctx)
{
    dp_message both[] = {message(some_bytes(100000), 0, 0, 8, false),
                         message(some_bytes(100000), 0, 0, 9, true)};
    CHECK_OK(dp_messages_begin(ctx, both, 2));
    dp_close(ctx);
}

TEST(what_was_begun_goes_with_the_context)
{
    end_of_one = begin_and_close;
    any_rank = false;
    bytes_of_end = 100000;
    in_processes(2, one_is_gone);
}

/* After the first piece of a large message. */
static void dies_in_the_middle(meeting *m)
{
    dp_ctx *ctx = open_near(m, 1, 0);
    dp_message all[2] = {message(some_bytes(4 << 20), 0, 1 - m->process, 1, m->process == 0),
                         message(some_bytes(3), 0, 1 - m->process, 2, m->process == 0)};
    CHECK_OK(dp_messages_begin(ctx, all, 2));
    if (m->process == 1) {
        while (dp_messages_test(ctx, &all[1], 1) == DP_PENDING)
            continue;
        raise(SIGKILL);
    }
    CHECK_OK(dp_messages_end(ctx, &all[1], 1));
    dp_status status = dp_messages_end(ctx, all, 1);
    CHECK(status == DP_OK || dp_status_class(status) == DP_CLASS_JOB);
    if (status != DP_OK)
        CHECK_SAYS(dp_last_error(), "4194304 u8 from rank 1 to rank 0 with tag 1: rank 1 (process");
    dp_close(ctx);
}

TEST(a_rank_that_dies_in_the_middle)
{
    in_processes_but(2, 1, dies_in_the_middle);
}

static void one_aborts(meeting *m)
{
    dp_ctx *ctx = open_near(m, 1, 0);
    dp_tensor tensor = some_bytes(50);
    wait_for_all(m);
    if (m->process == 1)
        dp_abort(ctx, DP_ERR_ABORTED, "enough");
    CHECK_INT(dp_status_class(dp_recv(ctx, &tensor, (m->process + 1) % m->process_count, 0)),
              DP_CLASS_JOB);
    CHECK_SAYS(dp_last_error(), "enough");
    wait_for_all(m);
    dp_close(ctx);
}

TEST(who_waits_hears_of_an_abort)
{
    in_processes(3, one_aborts);
}

static bool late_sends;

/* Process 1 is there, and takes part in nothing. */
static void one_is_late(meeting *m)
{
    enum { SHORT_MS = 300 };
    dp_ctx *ctx = open_near(m, 1, SHORT_MS);
    dp_tensor tensor = some_bytes(50);
    if (m->process == 0) {
        dp_status status = late_sends ? dp_send(ctx, &tensor, 1, -7)
                                      : dp_recv(ctx, &tensor, any_rank ? DP_ANY_RANK : 1, -7);
        CHECK_STATUS(status, DP_ERR_TIMEOUT);
        CHECK_SAYS(dp_last_error(),
                   any_rank && !late_sends ? "dp_recv: 50 u8 from any rank to rank 0 with tag -7: "
                                             "whoever sends it did not come within 300 ms, as rank "
                                             "1 (process 1, pid "
                   : late_sends            ? "dp_send: 50 u8 from rank 0 to rank 1 with tag -7: "
                                             "rank 1 (process 1, pid "
                                           : "dp_recv: 50 u8 from rank 1 to rank 0 with tag "
                                             "-7: rank 1 (process 1, pid ");
        CHECK_SAYS(dp_last_error(), "within 300 ms");
    }
    wait_for_all(m);
    if (m->process == 1)
        CHECK_STATUS(dp_send(ctx, &tensor, 0, 0), DP_ERR_TIMEOUT); /* for the same reason */
    dp_close(ctx);
}

TEST(who_waits_too_long_fails)
{
    for (int i = 0; i < 3; i++) {
        late_sends = i == 0;
        any_rank = i == 2;
        in_processes(2, one_is_late);
    }
}

/* Process 0 waits for 1, which waits for 2, which takes part in nothing. */
static void wait_in_a_row(meeting *m)
{
    enum { ROW_MS = 1000 };
    dp_ctx *ctx = open_near(m, 1, ROW_MS);
    dp_tensor tensor = some_bytes(50);
    dp_failure_info failure;
    wait_for_all(m);
    if (m->process == 1)
        rest(ROW_MS / 2);
    if (m->process < 2) {
        CHECK_ERROR(dp_recv(ctx, &tensor, m->process + 1, 0), DP_ERR_TIMEOUT,
                    "50 u8 from rank 1 to rank 0 with tag 0: rank 1 (process 1, pid ");
        CHECK_SAYS(dp_last_error(), ") did not come within 1000 ms, as rank 2 (process 2, pid ");
        CHECK_SAYS(dp_last_error(), ") does not answer");
        CHECK(dp_failure(ctx, &failure));
        CHECK_INT(failure.rank, 2);
    }
    wait_for_all(m);
    dp_close(ctx);
}

TEST_SLOW(who_is_waited_for_in_the_end_is_named, 30)
{
    in_processes(3, wait_in_a_row);
}

/* ---- a server that takes what comes; a child of fork; the timeline --------------------------- */

static void serve(meeting *m)
{
    enum { ROUNDS = 50 };
    dp_ctx *ctx = open_near(m, 1, 0);
    int64_t numbers[2];
    dp_tensor pair = dp_wrap(numbers, DP_I64, 1, (int64_t[]){2});
    int64_t next[8] = {0};
    for (int i = 0; i < ROUNDS * (m->process_count - 1) && m->process == 0; i++) {
        dp_message one = message(pair, 0, DP_ANY_RANK, 1, true);
        dp_status status = dp_messages_begin(ctx, &one, 1);
        while (status == DP_OK && (status = dp_messages_test(ctx, &one, 1)) == DP_PENDING)
            status = DP_OK;
        CHECK_OK(status);
        CHECK(one.peer > 0 && one.peer < m->process_count);
        CHECK_INT(numbers[0], one.peer);
        CHECK_INT(numbers[1], next[one.peer]++);
        numbers[1] *= 2;
        CHECK_OK(dp_send(ctx, &pair, one.peer, 2));
    }
    for (int i = 0; i < ROUNDS && m->process > 0; i++) {
        numbers[0] = m->process;
        numbers[1] = i;
        CHECK_OK(dp_send(ctx, &pair, 0, 1));
        CHECK_OK(dp_recv(ctx, &pair, 0, 2));
        CHECK_INT(numbers[1], 2 * i);
    }
    dp_close(ctx);
}

TEST(a_server_takes_from_any_rank)
{
    in_processes(2, serve);
    in_processes(4, serve);
}

static void child_of_fork(meeting *m)
{
    dp_ctx *ctx = open_near(m, 1, 0);
    dp_message one = message(some_bytes(100000), 0, 1 - m->process, 1, m->process == 0);
    CHECK_OK(dp_messages_begin(ctx, &one, 1));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK_STATUS(dp_messages_end(ctx, &one, 1), DP_ERR_STATE);
        CHECK_STATUS(dp_messages_begin(ctx, &one, 1), DP_ERR_STATE);
        dp_close(ctx);
        _exit(EXIT_SUCCESS);
    }
    int ended = -1;
    CHECK_INT(waitpid(child, &ended, 0), child);
    CHECK_INT(ended, 0);
    CHECK_OK(dp_messages_end(ctx, &one, 1)); /* the parent's goes on */
    dp_close(ctx);
}

TEST(a_child_of_fork_has_no_messages)
{
    in_processes(2, child_of_fork);
}

static void send_traced(meeting *m)
{
    CHECK_INT(setenv("DP_TRACE", "messages.json", 1), 0);
    dp_ctx *ctx = open_near(m, 1, 0);
    dp_tensor tensor = some_bytes(25);
    CHECK_OK(m->process == 0 ? dp_send(ctx, &tensor, 1, 5) : dp_recv(ctx, &tensor, 0, 5));
    dp_close(ctx);
}

TEST(the_timeline_shows_messages)
{
    static const char name[] = "\"25 u8 from rank 0 to rank 1 with tag 5\"";
    size_t count = 0;
    enter_folder();
    in_processes(2, send_traced);
    char *text = get_file("messages.json", &count);
    text[count - 1] = '\0'; /* of the last line's end */
    const char *at = strstr(text, name);
    CHECK(at != NULL && strstr(at + 1, name) != NULL);
}

/* ---- what only tests, and what is too much --------------------------------------------------- */

static void tests_only(meeting *m)
{
    dp_ctx *ctx = open_near(m, 1, 0);
    dp_message one = message(some_bytes(5), 0, 1, 9, true);
    dp_status status = DP_PENDING;
    CHECK_OK(dp_messages_test(ctx, NULL, 0)); /* before there is any */
    CHECK_OK(dp_messages_end(ctx, NULL, 0));
    wait_for_all(m);
    if (m->process == 1)
        end_die(ctx);
    CHECK_OK(dp_messages_begin(ctx, &one, 1));
    while (status == DP_PENDING)
        status = dp_messages_test(ctx, &one, 1);
    CHECK_STATUS(status, DP_ERR_REMOTE);
    CHECK_SAYS(dp_last_error(), "5 u8 from rank 1 to rank 0 with tag 9: rank 1 (process 1, pid ");
    dp_close(ctx);
}

TEST(who_only_tests_hears_of_a_dead_rank)
{
    in_processes_but(2, 1, tests_only);
}

static void several_fail(meeting *m)
{
    dp_ctx *ctx = open_near(m, 1, 0);
    bool sends = m->process == 0;
    dp_message all[3];
    for (int i = 0; i < 3; i++)
        all[i] = message(some_bytes(sends || i == 1 ? 5 : 4), 0, 1 - m->process, i, !sends);
    CHECK_OK(dp_messages_begin(ctx, all, 3));
    CHECK_STATUS(dp_messages_end(ctx, all, 3), DP_ERR_MISMATCH);
    CHECK_SAYS(dp_last_error(), "with tag 0, ");
    CHECK_INT(all[1].status, DP_OK);
    CHECK_INT(all[2].status, DP_ERR_MISMATCH);
    dp_close(ctx);
}

TEST(the_first_of_several_failures_is_told)
{
    in_processes(2, several_fail);
}

/* Without a heap there are as many at once as can be answered; the rest has not begun. */
static void too_many(meeting *m)
{
    enum { MOST = 256 };
    static dp_message all[MOST + 1];
    dp_ctx *ctx = open_near(m, 1, 0);
    bool sends = m->process == 0;
    for (int i = 0; i <= MOST; i++)
        all[i] = message(some_bytes(5), 0, 1 - m->process, i, !sends);
    if (sends) {
        CHECK_ERROR(dp_messages_begin(ctx, all, MOST + 1), DP_ERR_NO_MEMORY,
                    "no memory for more than 256 messages at once");
        CHECK_ERROR(dp_messages_end(ctx, all, 1), DP_ERR_STATE, "was not begun");
    }
    CHECK_OK(dp_messages_begin(ctx, all, MOST));
    CHECK_OK(dp_messages_end(ctx, all, MOST));
    CHECK_OK(dp_messages_begin(ctx, all, MOST)); /* the answers are free again */
    CHECK_OK(dp_messages_end(ctx, all, MOST));
    CHECK(!dp_failure(ctx, NULL));
    dp_close(ctx);
}

TEST(more_than_can_be_answered_without_a_heap)
{
    no_heap = true;
    in_processes(2, too_many);
    no_heap = false;
}
