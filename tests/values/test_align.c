/* test_align.c - memory that is not aligned to its elements gives the numbers that aligned memory
   gives, and nothing beside it changes.

   An operation runs on operands at offset 0, then at other offsets from a multiple of 64; what it
   leaves in them, and what it says, must be the same bytes. On CPU devices; on devices that keep
   their memory to themselves and fault as GPUs do, where a kernel or a reduction gets what is not
   aligned; on GPUs, where there are any. */

#include <stdio.h>
#include <stdlib.h>
#include "examples/custom_device.h"
#include "numbers.h"

enum {
    MOST_DEVICES = 3,
    SLOTS = 6,
    GUARD = 64,
    ROOM = 2600 << 10, /* of a slot */
    LARGE = 264 << 10, /* bytes of an operand that is shared out among threads */
    SAID = 2 * 8 + 1   /* what stats and item say */
};

/* ---- a bed: memory with guards on every device, and on the host behind them ------------------ */

typedef struct spot {     /* where an operand lies */
    size_t offset, bytes; /* 0 bytes: not used in this run */
} spot;

typedef struct bed {
    dp_ctx *ctx;
    dp_scope *scope;
    int devices;
    int offset, shifts; /* of operands; how it differs from one to the next */
    dp_tensor slots[MOST_DEVICES + 1][SLOTS];
    spot spots[MOST_DEVICES + 1][SLOTS];
    char *seen[MOST_DEVICES + 1][SLOTS]; /* what the aligned run left */
    char said[SAID], said_before[SAID];
} bed;

/* An operation on `count` elements; a variant of it; false where there is none for the dtype. */
typedef bool operation(bed *b, dp_dtype dtype, size_t count, int variant);

static char *image, *got; /* ROOM bytes each */

static size_t offset_of(const bed *b, int place, int slot)
{
    if (b->shifts == 0)
        return place == 0 && slot == 1 ? (size_t)b->offset : 0; /* one alone */
    return (size_t)(b->offset * (2 * (place + slot) + 1) % 8);
}

/* Numbers that every dtype holds, and that differ from slot to slot. */
static void fill_image(dp_dtype dtype, size_t offset, size_t bytes, int start)
{
    enum { PERIOD = 251 };
    static char period[PERIOD * 8];
    size_t each = dp_dtype_bytes(dtype);
    char *data = image + GUARD + offset;
    for (int i = 0; i < PERIOD; i++) {
        number n = dtype == DP_BOOL ? i % 3 == 0 : 1 + (start + i * 7) % 11;
        number_put(dtype, period, (size_t)i, n);
    }
    memset(image, 0xa5, bytes + offset + (size_t)2 * GUARD);
    for (size_t at = 0; at < bytes; at += PERIOD * each)
        memcpy(data + at, period, bytes - at < PERIOD * each ? bytes - at : PERIOD * each);
}

static dp_tensor bytes_of(const bed *b, int place, int slot, size_t bytes)
{
    dp_tensor view;
    CHECK_OK(dp_narrow(&b->slots[place][slot], 0, 0, (int64_t)bytes, &view));
    return view;
}

/* An operand of `count` elements; place `devices` is the host. */
static void *at(bed *b, int place, int slot, dp_dtype dtype, size_t count)
{
    spot *s = &b->spots[place][slot];
    size_t bytes = count * dp_dtype_bytes(dtype);
    *s = (spot){offset_of(b, place, slot), bytes};
    CHECK(bytes > 0 && bytes + s->offset + (size_t)2 * GUARD <= ROOM);
    dp_tensor to = bytes_of(b, place, slot, bytes + s->offset + (size_t)2 * GUARD), from = to;
    fill_image(dtype, s->offset, bytes, place * 3 + slot * 5);
    from.data = image;
    from.device = (dp_device){0, 0};
    CHECK_OK(dp_copy(b->ctx, &to, &from, NULL));
    CHECK_OK(dp_wait(b->ctx));
    return (char *)b->slots[place][slot].data + GUARD + s->offset;
}

static dp_tensor tensor(bed *b, int place, int slot, dp_dtype dtype, int ndim, const int64_t *shape)
{
    dp_tensor t = dp_wrap(image, dtype, ndim, shape);
    t.data = at(b, place, slot, dtype, (size_t)dp_tensor_count(&t));
    t.device = b->slots[place][slot].device;
    return t;
}

static dp_tensor vector(bed *b, int place, int slot, dp_dtype dtype, size_t count)
{
    return tensor(b, place, slot, dtype, DP_SHAPE((int64_t)count));
}

/* Bytes first .. end - 1 lie beside an operand. */
static void check_guard(const bed *b, const char *what, int place, int slot, size_t first,
                        size_t end)
{
    for (size_t i = first; i < end; i++)
        if ((unsigned char)got[i] != 0xa5)
            test_fail(__FILE__, __LINE__, "%s, offset %d: byte %zu beside place %d, slot %d", what,
                      b->offset, i, place, slot);
}

/* What a run left: kept, or compared with what is kept. */
static void check_spot(bed *b, const char *what, int place, int slot, bool keep)
{
    spot *s = &b->spots[place][slot];
    size_t all = s->bytes + s->offset + (size_t)2 * GUARD;
    dp_tensor from = bytes_of(b, place, slot, all);
    CHECK_OK(dp_read(b->ctx, &from, got, all));
    check_guard(b, what, place, slot, 0, GUARD + s->offset);
    check_guard(b, what, place, slot, GUARD + s->offset + s->bytes, all);
    if (keep)
        memcpy(b->seen[place][slot], got + GUARD, s->bytes);
    else if (memcmp(b->seen[place][slot], got + GUARD + s->offset, s->bytes) != 0)
        test_fail(__FILE__, __LINE__, "%s, offset %d, %d devices: place %d, slot %d is different",
                  what, b->offset, b->devices, place, slot);
}

static bool run_once(bed *b, const char *what, operation *op, dp_dtype dtype, size_t count,
                     int variant, bool keep)
{
    memset(b->spots, 0, sizeof b->spots);
    memset(b->said, 0, sizeof b->said);
    b->scope = dp_scope_begin(b->ctx);
    bool is = op(b, dtype, count, variant);
    for (int place = 0; place <= b->devices && is; place++)
        for (int slot = 0; slot < SLOTS; slot++)
            if (b->spots[place][slot].bytes > 0)
                check_spot(b, what, place, slot, keep);
    dp_scope_end(b->scope);
    if (is && keep)
        memcpy(b->said_before, b->said, sizeof b->said);
    CHECK(memcmp(b->said_before, b->said, sizeof b->said) == 0 || !is);
    return is;
}

/* All offsets of a few elements; of many, one offset, another one each time. */
static void sweep(bed *b, const char *name, operation *op, dp_dtype dtype, int variant)
{
    static int turn;
    char what[96];
    size_t large = LARGE / dp_dtype_bytes(dtype) + 7;
    snprintf(what, sizeof what, "%s of %s, variant %d", name, dp_dtype_name(dtype), variant);
    b->offset = 0;
    if (!run_once(b, what, op, dtype, 37, variant, true))
        return;
    for (b->shifts = 0; b->shifts < 2; b->shifts++)
        for (b->offset = 1; b->offset < 8; b->offset++)
            (void)run_once(b, what, op, dtype, 37, variant, false);
    b->offset = 0;
    (void)run_once(b, what, op, dtype, large, variant, true);
    turn += 1;
    b->offset = 1 + turn % 7;
    b->shifts = turn % 4 != 0;
    (void)run_once(b, what, op, dtype, large, variant, false);
}

static void bed_open(bed *b, const dp_device_ops *ops, const dp_coll_ops *coll, int devices)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    const dp_coll_ops *const colls[] = {coll, NULL};
    static char *host;
    memset(b, 0, sizeof *b); /* a literal of this size would stand on the stack */
    b->devices = devices;
    CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                  .colls = coll != NULL ? colls : NULL,
                                  .device_count = devices,
                                  .thread_count = 4},
                     &b->ctx));
    if (host == NULL)
        host = aligned_alloc(64, (size_t)ROOM * (SLOTS + 2));
    CHECK(host != NULL);
    image = host + (size_t)SLOTS * ROOM;
    got = image + ROOM;
    b->scope = dp_scope_begin(b->ctx);
    for (int place = 0; place <= devices; place++)
        for (int slot = 0; slot < SLOTS; slot++) {
            dp_tensor *t = &b->slots[place][slot];
            *t = dp_wrap(host + (size_t)slot * ROOM, DP_U8, DP_SHAPE(ROOM));
            if (place < devices)
                CHECK_OK(dp_tensor_new(b->scope, dp_local_device(b->ctx, place), DP_U8,
                                       DP_SHAPE(ROOM), t));
            CHECK_INT((uintptr_t)t->data % 64, 0);
            b->seen[place][slot] = malloc(ROOM);
            CHECK(b->seen[place][slot] != NULL);
        }
}

static void bed_close(bed *b)
{
    for (int place = 0; place <= b->devices; place++)
        for (int slot = 0; slot < SLOTS; slot++)
            free(b->seen[place][slot]);
    dp_close(b->ctx); /* ends all scopes */
}

static void run_beds(const char *name, operation *op, int variants, const dp_device_ops *ops,
                     const dp_coll_ops *coll)
{
    static bed b;
    for (int devices = 1; devices <= MOST_DEVICES; devices++) {
        bed_open(&b, ops, coll, devices);
        for (int i = 0; i < variants * DP_DTYPE_COUNT; i += test_stride())
            sweep(&b, name, op, (dp_dtype)(i % DP_DTYPE_COUNT), i / DP_DTYPE_COUNT);
        bed_close(&b);
    }
}

/* ---- devices that fault where a GPU does ----------------------------------------------------- */

static dp_device_ops strict_ops;

static dp_status strict_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = toy_device()->open(host, index, out);
    if (status == DP_OK)
        (*out)->ops = &strict_ops;
    return status;
}

static size_t strict_size(const dp_kernel_args *args, bool input, size_t place)
{
    bool steps = args->kernel == DP_KERNEL_SGD || args->kernel == DP_KERNEL_ADAMW;
    bool sums = args->kernel == DP_KERNEL_STATS || args->kernel == DP_KERNEL_TOTAL ||
                args->kernel == DP_KERNEL_CHANNELS;
    if (steps && place > 0)
        return input || args->dtype == DP_F64 ? 8 : 4;
    return sums && !input                            ? 8
           : input && args->kernel == DP_KERNEL_CAST ? dp_dtype_bytes(args->in_dtype)
                                                     : dp_dtype_bytes(args->dtype);
}

/* It leaves the work to the host, but not before it looked at what it got. */
static dp_status strict_kernel(dp_stream *stream, const dp_kernel_args *args)
{
    for (size_t i = 0; i < args->in_count; i++)
        CHECK_INT((uintptr_t)args->in[i] % strict_size(args, true, i), 0);
    for (size_t i = 0; i < args->out_count; i++)
        CHECK_INT((uintptr_t)args->out[i] % strict_size(args, false, i), 0);
    return dp_error(DP_ERR_UNSUPPORTED, "strict %d: no kernel", (int)stream->dev->index);
}

static const dp_device_ops *strict_device(void)
{
    strict_ops = *toy_device();
    strict_ops.open = strict_open;
    strict_ops.kernel = strict_kernel;
    return &strict_ops;
}

/* Its collectives: dp_cpu_coll on copies in host memory. */
static dp_coll_ops strict_coll_ops;
static int strict_ranks;

static bool strict_fits(const dp_comm_config *config)
{
    return config->bootstrap == NULL;
}

static dp_status strict_coll_open(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp_status status = dp_cpu_coll()->open(host, config, out);
    strict_ranks = config->local_count;
    if (status == DP_OK)
        (*out)->ops = &strict_coll_ops;
    return status;
}

typedef struct strict_call {
    dp_comm *comm;
    const dp_part *local;
    dp_part host[MOST_DEVICES];
    size_t send_bytes, recv_bytes;
} strict_call;

static const dp_part *strict_enter(strict_call *call, dp_dtype dtype, bool reduces)
{
    for (int i = 0; i < strict_ranks; i++) {
        const dp_part *part = &call->local[i];
        const dp_device_ops *ops = part->stream->dev->ops;
        uintptr_t off = (uintptr_t)part->send | (uintptr_t)part->recv;
        CHECK(!reduces || off % dp_dtype_bytes(dtype) == 0);
        void *send = malloc(call->send_bytes), *recv = malloc(call->recv_bytes);
        CHECK(send != NULL && recv != NULL);
        CHECK_OK(ops->copy_out(part->stream, send, part->send, call->send_bytes));
        call->host[i] = (dp_part){send, recv, part->stream};
    }
    return call->host;
}

static dp_status strict_leave(strict_call *call, dp_status status)
{
    for (int i = 0; i < strict_ranks; i++) {
        const dp_part *part = &call->local[i];
        const dp_device_ops *ops = part->stream->dev->ops;
        CHECK_OK(ops->copy_in(part->stream, part->recv, call->host[i].recv, call->recv_bytes));
        free((void *)(uintptr_t)call->host[i].send);
        free(call->host[i].recv);
    }
    return status;
}

/* A row of blocks for every rank, or one. */
static dp_status strict_by_host(dp_comm *comm, const dp_coll_call *call)
{
    bool reduces = call->verb != DP_ALL_GATHER;
    size_t bytes = call->count * dp_dtype_bytes(call->dtype), all = bytes * (size_t)strict_ranks;
    strict_call c = {comm,
                     call->local,
                     {{0}},
                     call->verb == DP_REDUCE_SCATTER ? all : bytes,
                     reduces ? bytes : all};
    dp_coll_call host = *call;
    host.local = strict_enter(&c, call->dtype, reduces);
    return strict_leave(&c, dp_cpu_coll()->run(comm, &host));
}

static dp_status strict_broadcast(const dp_coll_call *call)
{
    size_t bytes = call->count * dp_dtype_bytes(call->dtype);
    const dp_part *local = call->local, *from = &local[call->root];
    void *host = malloc(bytes);
    CHECK(host != NULL);
    CHECK_OK(from->stream->dev->ops->copy_out(from->stream, host, from->send, bytes));
    for (int i = 0; i < strict_ranks; i++)
        CHECK_OK(local[i].stream->dev->ops->copy_in(local[i].stream, local[i].recv, host, bytes));
    free(host);
    return DP_OK;
}

static dp_status strict_run(dp_comm *comm, const dp_coll_call *call)
{
    return call->verb == DP_BROADCAST ? strict_broadcast(call) : strict_by_host(comm, call);
}

static void run_strict(const char *name, operation *op, int variants)
{
    strict_coll_ops = (dp_coll_ops){.head = DP_TABLE(dp_coll_ops),
                                    .name = "strict",
                                    .fits = strict_fits,
                                    .open = strict_coll_open,
                                    .close = dp_cpu_coll()->close,
                                    .verbs = DP_COLL_VERBS & ~(1u << DP_ALL_TO_ALL),
                                    .run = strict_run};
    run_beds(name, op, variants, strict_device(), &strict_coll_ops);
}

#if defined(TEST_CUDA)
#include "cuda_device.h"
#define ALIGN_TEST_CUDA(name, variants)                                                            \
    TEST_SLOW(name##_cuda, 60)                                                                     \
    {                                                                                              \
        run_beds(#name, name, variants, cuda_device(MOST_DEVICES), NULL);                          \
        cuda_check_leaks();                                                                        \
    }
#else
#define ALIGN_TEST_CUDA(name, variants)
#endif

#define ALIGN_TEST(name, variants)                                                                 \
    static operation name;                                                                         \
    TEST_SLOW(name##_cpu, 60)                                                                      \
    {                                                                                              \
        run_beds(#name, name, variants, dp_cpu(), NULL);                                           \
    }                                                                                              \
    TEST_SLOW(name##_strict, 60)                                                                   \
    {                                                                                              \
        run_strict(#name, name, variants);                                                         \
    }                                                                                              \
    ALIGN_TEST_CUDA(name, variants)                                                                \
    static bool name(bed *b, dp_dtype dtype, size_t count, int variant)

/* ---- tensors --------------------------------------------------------------------------------- */

enum { DENSE, TURNED, GAPS, LAYOUTS };

/* Two dims of about `count` elements; of GAPS, the memory holds one column more than is seen. */
static dp_tensor matrix(bed *b, int place, int slot, dp_dtype dtype, size_t count, int layout)
{
    int64_t columns = count < 100 ? 6 : 251, rows = (int64_t)count / columns;
    if (layout == GAPS) { /* long rows, that are cut among threads */
        rows = 3;
        columns = (int64_t)count / rows - 1;
    }
    int64_t all = columns + (layout == GAPS);
    dp_tensor t = layout == TURNED ? tensor(b, place, slot, dtype, DP_SHAPE(columns, rows))
                                   : tensor(b, place, slot, dtype, DP_SHAPE(rows, all));
    if (layout == TURNED)
        CHECK_OK(dp_transpose(&t, 0, 1, &t));
    CHECK_OK(dp_narrow(&t, 1, 0, columns, &t));
    return t;
}

ALIGN_TEST(fill, LAYOUTS)
{
    dp_tensor t = matrix(b, 0, 1, dtype, count, variant);
    CHECK_OK(dp_fill(b->ctx, &t, dp_int(1)));
    return true;
}

ALIGN_TEST(cast, DP_DTYPE_COUNT)
{
    size_t most = count < 100 ? count : LARGE / 4;
    dp_tensor in = vector(b, 0, 0, (dp_dtype)variant, most), out = vector(b, 0, 1, dtype, most);
    CHECK_OK(dp_cast(b->ctx, &out, &in));
    return true;
}

ALIGN_TEST(axpby, 4) /* two products, in place of each, one product */
{
    if (!number_is_float(dtype))
        return false;
    dp_tensor x = vector(b, 0, 0, dtype, count), y = vector(b, 0, 2, dtype, count);
    dp_tensor out = variant == 1 ? x : variant == 2 ? y : vector(b, 0, 1, dtype, count);
    CHECK_OK(dp_axpby(b->ctx, 0.3, &x, 1.7, variant < 3 ? &y : NULL, &out));
    return true;
}

ALIGN_TEST(copy, 5 * LAYOUTS) /* within a device, in, out, to the last one, on the host */
{
    int host = b->devices;
    const int from[] = {0, host, 0, 0, host}, to[] = {0, 0, host, b->devices - 1, host};
    int pair = variant / LAYOUTS, layout = variant % LAYOUTS;
    dp_tensor in = matrix(b, from[pair], 0, dtype, count, layout);
    dp_tensor out = matrix(b, to[pair], 1, dtype, count, layout == GAPS ? GAPS : DENSE);
    CHECK_OK(dp_copy(b->ctx, &out, &in, NULL));
    return true;
}

ALIGN_TEST(read_and_contiguous, 2 * LAYOUTS)
{
    dp_tensor in = matrix(b, 0, 1, dtype, count, variant % LAYOUTS);
    if (variant >= LAYOUTS)
        CHECK_OK(dp_contiguous(b->scope, &in, &in));
    size_t all = (size_t)dp_tensor_count(&in);
    CHECK_OK(dp_read(b->ctx, &in, at(b, b->devices, 3, dtype, all), all * dp_dtype_bytes(dtype)));
    return true;
}

ALIGN_TEST(stats_and_item, 1)
{
    dp_tensor in = vector(b, 0, 1, dtype, count), last;
    dp_stats stats;
    (void)variant;
    double item = 0;
    CHECK_OK(dp_tensor_stats(b->ctx, &in, &stats));
    CHECK_OK(dp_select(&in, 0, (int64_t)count - 1, &last));
    CHECK_OK(dp_item(b->ctx, dp_of(b->scope, &last), &item));
    memcpy(b->said, &stats.sum_squares, sizeof(double));
    memcpy(b->said + sizeof(double), &item, sizeof item);
    b->said[2 * sizeof(double)] = stats.all_finite;
    return true;
}

/* ---- values ---------------------------------------------------------------------------------- */

static const dp_tensor *first_tensor(dp_value value)
{
    while (value.kind == DP_CONTAINER || value.kind == DP_LIST)
        value = value.kind == DP_CONTAINER ? value.as.c->data : dp_at(value, 0);
    CHECK_INT(value.kind, DP_TENSOR);
    return value.as.t;
}

ALIGN_TEST(collate, 2) /* stacked as they are, and padded */
{
    dp_value samples[3], batch;
    for (int i = 0; i < 3; i++) {
        int64_t own = (int64_t)count - i * variant;
        dp_tensor t = tensor(b, b->devices, i, dtype, DP_SHAPE(1, own));
        dp_container field = {
            .data = dp_of(b->scope, &t), .padding_value = 1, .pad_dims = 1, .stack = true};
        samples[i] = variant == 0 ? field.data : dp_contain(b->scope, &field);
    }
    CHECK_OK(dp_collate(b->scope, samples, 3, 3, &batch));
    const dp_tensor *t = first_tensor(batch);
    CHECK_INT(dp_tensor_count(t), 3 * count);
    CHECK_OK(dp_read(b->ctx, t, at(b, b->devices, 3, dtype, 3 * count),
                     3 * count * dp_dtype_bytes(dtype)));
    return true;
}

ALIGN_TEST(scatter_and_gather_into, 2) /* along each dim */
{
    dp_tensor whole = matrix(b, 0, 0, dtype, count, DENSE), joined, parts[MOST_DEVICES];
    int64_t from = 0, all = whole.shape[variant];
    for (int i = 0; i < b->devices; i++) {
        dp_tensor cut;
        int64_t own = all / b->devices + (i < all % b->devices);
        CHECK_OK(dp_narrow(&whole, variant, from, own, &cut));
        parts[i] = tensor(b, i, 1, dtype, 2, cut.shape);
        from += own;
    }
    joined = tensor(b, b->devices - 1, 2, dtype, 2, whole.shape);
    CHECK_OK(dp_scatter_into(b->ctx, &whole, variant, parts, (size_t)b->devices));
    CHECK_OK(dp_gather_into(b->ctx, parts, (size_t)b->devices, variant, &joined));
    return true;
}

ALIGN_TEST(replicate_and_reduce_add_into, 1)
{
    dp_tensor src = vector(b, 0, 0, dtype, count), parts[MOST_DEVICES];
    dp_tensor sum = vector(b, b->devices - 1, 2, dtype, count);
    (void)variant;
    for (int i = 0; i < b->devices; i++)
        parts[i] = vector(b, i, 1, dtype, count);
    CHECK_OK(dp_reduce_add_into(b->ctx, parts, (size_t)b->devices, &sum));
    CHECK_OK(dp_replicate_into(b->ctx, &src, parts, (size_t)b->devices));
    return true;
}

/* ---- collectives ----------------------------------------------------------------------------- */

static void part_of(bed *b, dp_part *out, int rank, dp_dtype dtype, size_t send_count,
                    size_t recv_count, bool in_place)
{
    size_t own = (size_t)rank * dp_dtype_bytes(dtype);
    *out = (dp_part){.recv = at(b, rank, 1, dtype,
                                send_count > recv_count && in_place ? send_count : recv_count)};
    if (!in_place) {
        out->send = at(b, rank, 0, dtype, send_count);
    } else if (send_count > recv_count) { /* the own block of what is sent is received */
        out->send = out->recv;
        out->recv = (char *)out->recv + own * recv_count;
    } else {
        out->send = (char *)out->recv + (recv_count > send_count ? own * send_count : 0);
    }
}

ALIGN_TEST(reductions, 2 * 6)
{
    static const dp_op ops[] = {DP_OP_SUM, DP_OP_MEAN, DP_OP_MAX};
    dp_part parts[MOST_DEVICES];
    int verb = variant / 2, root = b->devices - 1;
    size_t each = count / (size_t)b->devices, all = each * (size_t)b->devices;
    if (verb == 5 && !number_is_float(dtype))
        return false;
    for (int i = 0; i < b->devices; i++)
        part_of(b, &parts[i], i, dtype, all, verb == 3 ? each : all, variant % 2 == 1);
    CHECK_OK(verb < 3    ? dp_all_reduce(b->ctx, parts, all, dtype, ops[verb])
             : verb == 3 ? dp_reduce_scatter(b->ctx, parts, each, dtype, DP_OP_SUM)
             : verb == 4 ? dp_reduce_to(b->ctx, parts, all, dtype, DP_OP_SUM, root)
                         : dp_all_reduce_scaled(b->ctx, parts, all, dtype, DP_OP_SUM, 0.3));
    return true;
}

ALIGN_TEST(moves, 2 * 5)
{
    dp_part parts[MOST_DEVICES];
    int verb = variant / 2, root = b->devices - 1;
    size_t each = count / (size_t)b->devices, all = each * (size_t)b->devices;
    size_t send = verb == 1 || verb == 3 ? each : all, recv = verb == 4 ? each : all;
    if (verb == 2 && variant % 2 == 1)
        return false;
    for (int i = 0; i < b->devices; i++)
        part_of(b, &parts[i], i, dtype, send, recv, variant % 2 == 1 && (verb < 3 || i == root));
    CHECK_OK(verb == 0   ? dp_broadcast(b->ctx, parts, all, dtype, root)
             : verb == 1 ? dp_all_gather(b->ctx, parts, each, dtype)
             : verb == 2 ? dp_all_to_all(b->ctx, parts, each, dtype)
             : verb == 3 ? dp_gather_to(b->ctx, parts, each, dtype, root)
                         : dp_scatter_from(b->ctx, parts, each, dtype, root));
    return true;
}

/* ---- kernels --------------------------------------------------------------------------------- */

/* A kernel on the first device: inputs in slots 0, 2 and 4, outputs in slots 1, 3 and 5. */
static bool kernel(bed *b, dp_kernel_args *args)
{
    void *out[3] = {NULL};
    const void *in[3] = {NULL};
    for (size_t i = 0; i < args->in_count; i++)
        in[i] = at(b, 0, (int)(2 * i), args->in_dtype, args->count);
    for (size_t i = 0; i < args->out_count; i++)
        out[i] = at(b, 0, (int)(2 * i + 1), args->dtype, args->count);
    args->in = in;
    args->out = out;
    CHECK_OK(dp_kernel_run(b->ctx, 0, args));
    return true;
}

ALIGN_TEST(kernel_fill_cast_axpby, 3)
{
    static const dp_kernel kernels[] = {DP_KERNEL_FILL, DP_KERNEL_CAST, DP_KERNEL_AXPBY};
    dp_kernel_args args = {.kernel = kernels[variant],
                           .dtype = dtype,
                           .in_dtype = variant == 1 ? DP_F32 : dtype,
                           .count = variant == 1 && count > 100 ? LARGE / 4 : count,
                           .in_count = (size_t)variant,
                           .out_count = 1,
                           .alpha = 0.3,
                           .beta = 1.7};
    number_put(dtype, &args.fill_bits, 0, 1);
    return (variant < 2 || number_is_float(dtype)) && kernel(b, &args);
}

ALIGN_TEST(kernel_reduce, 2) /* added, and divided too */
{
    dp_kernel_args args = {.kernel = DP_KERNEL_REDUCE,
                           .op = DP_OP_SUM,
                           .dtype = dtype,
                           .in_dtype = dtype,
                           .count = count,
                           .in_count = 3,
                           .out_count = 2,
                           .alpha = 1,
                           .beta = variant == 1 ? 3 : 1};
    return kernel(b, &args);
}

ALIGN_TEST(kernel_copy_and_pad, 2)
{
    int64_t columns = count < 100 ? 6 : 251, rows = (int64_t)count / columns;
    const int64_t shape[] = {rows, columns}, turned[] = {1, rows}, dense[] = {columns, 1};
    const int64_t padded[] = {rows + 1, columns + 3};
    dp_kernel_args args = {.kernel = variant == 0 ? DP_KERNEL_COPY : DP_KERNEL_PAD,
                           .dtype = dtype,
                           .in_dtype = dtype,
                           .count = (size_t)(rows * columns),
                           .in_count = 1,
                           .out_count = 1,
                           .ndim = 2,
                           .shape = shape,
                           .out_stride = dense,
                           .in_shape = shape,
                           .in_stride = turned};
    if (variant == 1) {
        args.count = (size_t)(padded[0] * padded[1]);
        args.shape = padded;
        args.out_stride = NULL;
        args.in_stride = dense;
    }
    number_put(dtype, &args.fill_bits, 0, 1);
    return kernel(b, &args);
}

ALIGN_TEST(kernel_sums, 3)
{
    static const dp_kernel kernels[] = {DP_KERNEL_STATS, DP_KERNEL_TOTAL, DP_KERNEL_CHANNELS};
    const int64_t inner = count < 100 ? 6 : 251, shape[] = {(int64_t)count / (2 * inner), 2, inner};
    size_t all = variant == 2 ? (size_t)(shape[0] * 2 * inner) : count;
    const void *in = at(b, 0, 0, dtype, all);
    void *out = at(b, 0, 1, DP_F64, variant == 0 ? 2 : variant == 1 ? 1 : 4);
    if (variant == 1 ? dtype != DP_F64 : !number_is_float(dtype))
        return false;
    CHECK_OK(dp_kernel_run(b->ctx, 0,
                           &(dp_kernel_args){.kernel = kernels[variant],
                                             .dtype = dtype,
                                             .in_dtype = dtype,
                                             .count = all,
                                             .in = &in,
                                             .out = &out,
                                             .in_count = 1,
                                             .out_count = 1,
                                             .alpha = 0.5,
                                             .ndim = 3,
                                             .shape = shape}));
    return true;
}

ALIGN_TEST(kernel_updates, 4) /* SGD, with momentum, AdamW, which then zeroes; each with a gate */
{
    static const dp_kernel kernels[] = {DP_KERNEL_SGD, DP_KERNEL_SGD, DP_KERNEL_ADAMW,
                                        DP_KERNEL_ADAMW};
    static const size_t outs[] = {1, 2, 3, 3};
    static const double factor[2] = {0.5, 0};
    dp_dtype state = dtype == DP_F64 ? DP_F64 : DP_F32;
    dp_tensor host = dp_wrap_const(factor, DP_F64, DP_SHAPE(2)), gate = vector(b, 0, 2, DP_F64, 2);
    if (!number_is_float(dtype))
        return false;
    const void *in[] = {at(b, 0, 0, dtype, count), gate.data};
    void *out[] = {at(b, 0, 1, dtype, count), at(b, 0, 3, state, count), at(b, 0, 5, state, count)};
    CHECK_OK(dp_copy(b->ctx, &gate, &host, NULL));
    CHECK_OK(dp_kernel_run(b->ctx, 0,
                           &(dp_kernel_args){.kernel = kernels[variant],
                                             .dtype = dtype,
                                             .in_dtype = dtype,
                                             .count = count,
                                             .in = in,
                                             .out = out,
                                             .in_count = 2,
                                             .out_count = outs[variant],
                                             .flags = variant == 3 ? DP_KERNEL_ZERO_GRAD : 0u,
                                             .numbers = {0.1, 0.9, 0.1, 0.9, 0.1, 0.7, 1e-8}}));
    return true;
}
