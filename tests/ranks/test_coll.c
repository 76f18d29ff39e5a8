/* test_coll.c - what every dp_coll_ops must do, through the public collectives.

   Worlds of one to eight ranks: CPU devices with their table; the same with optional methods hidden
   or past the end of the table; CPU devices that are dealt out as if to processes, of one machine
   or of several, whose bytes TCP carries, or pipes; toys, which the core serves through the host;
   toys that put off their work. */

#define _GNU_SOURCE /* P_tmpdir */

#include <stdlib.h>
#include "examples/custom_device.h"
#include "conform.h"
#include "decorator.h"
#include "folder.h"
#include "lazy.h"
#include "numbers.h"
#include "split_coll.h"

#if defined(TEST_CUDA)
#include "cuda_device.h"
#endif
#if defined(TEST_SIM) || defined(TEST_NCCL)
#define WORLDS_OF_NCCL
#include "dp_nccl.h"
#include "meeting.h"
#endif
#if defined(TEST_MPI)
#include "mpi/launched.h"
#endif

enum { MOST_RANKS = 8, PAD = 16, CAPACITY = (65537 * 2 + PAD) * 8 };

/* ---- worlds ---------------------------------------------------------------------------------- */

typedef struct world {
    int ranks, first, count; /* of the job; of this process */
    int process_of[MOST_RANKS];
    bool by_process; /* the ranks of each are added first */
    test_allocator counter;
    dp_ctx *ctx;
    dp_scope *scope;
    dp_tensor a[MOST_RANKS], b[MOST_RANKS]; /* CAPACITY bytes on every device */
} world;

/* For jobs of several processes that no launcher has started. */
static dp_bootstrap world_boot;

static bool is_here(const world *w, int rank)
{
    return rank >= w->first && rank < w->first + w->count;
}

/* Which ranks are this process', and which process has the others. */
static void world_learn(world *w)
{
    dp_info info;
    dp_part parts[MOST_RANKS];
    int all[MOST_RANKS][MOST_RANKS];
    CHECK_OK(dp_info_get(w->ctx, &info));
    w->ranks = info.rank_count;
    w->first = info.rank_first;
    if (info.process_count == 1 || world_boot.all_gather != NULL) {
        return; /* else sums are by process, as MPI has them */
    }
    CHECK(info.rank_count <= MOST_RANKS);
    w->by_process = true;
    for (int i = 0; i < w->count; i++) {
        all[i][w->first + i] = info.process;
        parts[i] = (dp_part){.send = &all[i][w->first + i], .recv = all[i]};
    }
    CHECK_OK(dp_all_gather(w->ctx, parts, 1, DP_I32));
    memcpy(w->process_of, all[0], sizeof(w->process_of));
}

static void world_open(world *w, const dp_device_ops *ops, const dp_coll_ops *coll, int ranks)
{
    const dp_device_ops *const backends[] = {ops, NULL};
    const dp_coll_ops *const colls[] = {coll, NULL};
    const int64_t shape[] = {CAPACITY};
    *w = (world){.ranks = ranks, .count = ranks};
    const dp_config config = {.backends = backends,
                              .colls = colls,
                              .device_count = ranks,
                              .thread_count = 4,
                              .bootstrap = world_boot,
                              .allocator = test_allocator_of(&w->counter)};
    CHECK_OK(dp_open(&config, &w->ctx));
    world_learn(w);
    w->scope = dp_scope_begin(w->ctx);
    for (int r = 0; r < w->ranks; r++) { /* those of others get memory too: what is put there */
        dp_device here = dp_local_device(w->ctx, is_here(w, r) ? r - w->first : 0);
        CHECK_OK(dp_tensor_new(w->scope, here, DP_U8, 1, shape, &w->a[r]));
        CHECK_OK(dp_tensor_new(w->scope, here, DP_U8, 1, shape, &w->b[r]));
    }
}

static void world_close(world *w)
{
    dp_scope_end(w->scope);
    dp_close(w->ctx);
    CHECK_NO_LEAKS(&w->counter);
}

static dp_tensor piece_of(const dp_tensor *buffer, size_t first, size_t bytes)
{
    dp_tensor piece;
    CHECK_OK(dp_narrow(buffer, 0, (int64_t)first, (int64_t)bytes, &piece));
    return piece;
}

static void put(world *w, const dp_tensor *buffer, size_t first, const void *data, size_t bytes)
{
    const int64_t shape[] = {(int64_t)bytes};
    dp_tensor to = piece_of(buffer, first, bytes), from = dp_wrap_const(data, DP_U8, 1, shape);
    CHECK_OK(dp_copy(w->ctx, &to, &from, NULL));
    CHECK_OK(dp_wait(w->ctx));
}

static void get(world *w, const dp_tensor *buffer, size_t first, void *data, size_t bytes)
{
    dp_tensor from = piece_of(buffer, first, bytes);
    CHECK_OK(dp_read(w->ctx, &from, data, bytes));
}

/* One test, worlds of every size. */
#if defined(TEST_MPI)
#define WORLD_TEST(name)                                                                           \
    static void name(world *w);                                                                    \
    MPI_SUITE(name)                                                                                \
    {                                                                                              \
        every_shape(name);                                                                         \
    }                                                                                              \
    static void name(world *w)
#elif defined(TEST_CONFORM)
#define ONE_PROCESS_TEST(name)                                                                     \
    static void name(world *w);                                                                    \
    TEST_OF_TABLE(name, 120)                                                                       \
    {                                                                                              \
        const dp_coll_ops *const *own = conform_colls();                                           \
        every_size(name, decorate_device(conform_device(MOST_RANKS)),                              \
                   own != NULL ? decorate_coll(own[0]) : dp_cpu_coll());                           \
    }                                                                                              \
    static void name(world *w)
#else
#define ONE_PROCESS_TEST(name)                                                                     \
    static void name(world *w);                                                                    \
    TEST_SLOW(name##_cpu, 60)                                                                      \
    {                                                                                              \
        every_size(name, dp_cpu(), decorate_coll(dp_cpu_coll()));                                  \
    }                                                                                              \
    TEST_SLOW(name##_toy, 60)                                                                      \
    {                                                                                              \
        every_size(name, toy_device(), dp_cpu_coll());                                             \
    }                                                                                              \
    TEST_SLOW(name##_lazy, 60)                                                                     \
    {                                                                                              \
        every_size(name, decorate_device(lazy_device(toy_device())), dp_cpu_coll());               \
    }                                                                                              \
    TEST_SLOW(name##_shm, 120)                                                                     \
    {                                                                                              \
        every_size(name, dp_cpu(), decorate_coll(split_coll(dp_shm_coll(), 2)));                   \
    }                                                                                              \
    TEST_SLOW(name##_tcp, 120)                                                                     \
    {                                                                                              \
        every_split(name, dp_tcp_coll());                                                          \
    }                                                                                              \
    TEST_SLOW(name##_pipes, 120)                                                                   \
    {                                                                                              \
        enter_folder();                                                                            \
        every_split(name, pipes_coll());                                                           \
    }                                                                                              \
    WORLD_TEST_CUDA(name)                                                                          \
    static void name(world *w)
#endif

#if !defined(TEST_MPI)
#define WORLD_TEST(name)                                                                           \
    static void name(world *w);                                                                    \
    WORLD_TEST_NCCL(name)                                                                          \
    ONE_PROCESS_TEST(name)
#endif

#if defined(TEST_CUDA) && !defined(TEST_CONFORM)
#define WORLD_TEST_CUDA(name)                                                                      \
    TEST_SLOW(name##_cuda, 120)                                                                    \
    {                                                                                              \
        every_size(name, cuda_device(MOST_RANKS), decorate_coll(dp_cuda_coll()));                  \
    }
#else
#define WORLD_TEST_CUDA(name)
#endif

#if defined(WORLDS_OF_NCCL)
#define WORLD_TEST_NCCL(name)                                                                      \
    TEST_SLOW(name##_nccl_cuda, 120)                                                               \
    {                                                                                              \
        every_division(name);                                                                      \
    }
#else
#define WORLD_TEST_NCCL(name)
#endif

/* Tables that lack what is optional: verbs, or what lies past the end. */
#define CUT_TABLE_TESTS(name)                                                                      \
    static void name(world *w);                                                                    \
    TEST_SLOW(name##_without_optional_verbs, 60)                                                   \
    {                                                                                              \
        decorate_coll(dp_cpu_coll());                                                              \
        deco.coll.verbs &= ~(1u << DP_REDUCE_SCATTER | 1u << DP_ALL_TO_ALL);                       \
        every_size(name, dp_cpu(), &deco.coll);                                                    \
    }                                                                                              \
    TEST_SLOW(name##_cut_short, 60)                                                                \
    {                                                                                              \
        decorate_coll(dp_cpu_coll());                                                              \
        deco.coll.head.size = offsetof(dp_coll_ops, abort);                                        \
        deco.coll.poll = forbidden_poll;                                                           \
        every_size(name, dp_cpu(), &deco.coll);                                                    \
    }

#define FALLBACK_TEST(name)                                                                        \
    CUT_TABLE_TESTS(name)                                                                          \
    WORLD_TEST(name)

/* What the core refuses before it asks a table; the parts of all ranks have to be here. */
#if defined(TEST_MPI)
#define REFUSED_TEST(name) __attribute__((unused)) static void name(world *w)
#else
#define REFUSED_TEST(name)                                                                         \
    CUT_TABLE_TESTS(name)                                                                          \
    ONE_PROCESS_TEST(name)
#endif

static dp_status forbidden_poll(dp_comm *comm)
{
    (void)comm;
    test_fail(__FILE__, __LINE__, "poll lies past the table");
}

static void every_size(void (*body)(world *w), const dp_device_ops *ops, const dp_coll_ops *coll)
{
    static const int sizes[] = {1, 2, 3, 4, 5, 8};
    static world w;
    const size_t step = test_stride() > 1 ? 3 : 1; /* where all is slow: 2 and 5 ranks */
    for (size_t i = step / 2; i < sizeof(sizes) / sizeof(sizes[0]); i += step) {
        world_open(&w, ops, coll, sizes[i]);
        body(&w);
        world_close(&w);
        CHECK_STR(deco.breach, "");
        CHECK_INT(deco.object_count, 0);
    }
}

/* Dealt out to two and three members. */
__attribute__((unused)) static void every_split(void (*body)(world *w), const dp_coll_ops *coll)
{
    static world w;
    for (int ranks = 3; ranks <= 5; ranks += 2) {
        world_open(&w, dp_cpu(), decorate_coll(split_coll(coll, 2)), ranks);
        w.by_process = true;
        for (int r = 0; r < ranks; r++) {
            w.process_of[r] = (r + 1) / 2;
        }
        body(&w);
        world_close(&w);
        CHECK_STR(deco.breach, "");
        CHECK_INT(deco.object_count, 0);
    }
}

#if defined(TEST_MPI)
/* So many devices in each process, in turns. */
static void every_shape(void (*body)(world *w))
{
    static const int shapes[][3] = {{1, 1, 1}, {2, 1, 3}};
    static world w;
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        world_open(&w, dp_cpu(), dp_mpi_coll(), shapes[i][mpi_process % 3]);
        body(&w);
        world_close(&w);
    }
}
#endif

#if defined(WORLDS_OF_NCCL)
static void (*division_body)(world *w);
static int division[3]; /* GPUs of each process */
static bool division_ordered = true;

static dp_status open_ordered(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp_comm_config own = *config;
    own.ordered = division_ordered;
    return dp_nccl_coll()->open(host, &own, out);
}

static void division_process(meeting *m)
{
    static world w;
    static dp_coll_ops ordered;
    int own = division[m->process], first = 0;
    for (int p = 0; p < m->process; p++)
        first += division[p];
    ordered = *dp_nccl_coll();
    ordered.open = open_ordered;
    cuda_device_first(first);
    world_boot = config_of(m, own).bootstrap;
    world_open(&w, cuda_device(own), decorate_coll(&ordered), own);
    division_body(&w);
    world_close(&w);
    CHECK_STR(deco.breach, "");
    CHECK_INT(deco.object_count, 0);
}

/* The real NCCL takes seconds to begin. */
#if defined(TEST_SIM)
static const int divisions[][3] = {{1, 1}, {2, 1, 3}};
#else
static const int divisions[][3] = {{2, 1}};
#endif

/* GPUs of several processes, sums in the promised order. */
static void every_division(void (*body)(world *w))
{
    char text[512];
    if (dp_nccl_version(text, sizeof text) == 0)
        SKIP(text);
    division_body = body;
    for (size_t i = 0; i < sizeof divisions / sizeof divisions[0]; i++) {
        memcpy(division, divisions[i], sizeof division);
        in_processes(division[2] > 0 ? 3 : 2, division_process);
    }
}
#endif

/* ---- the eight forms ------------------------------------------------------------------------- */

typedef enum placing { NEVER, SAME, SEND_IN_RECV, RECV_IN_SEND } placing;

typedef struct form {
    bool reduces, sends_all, receives_all; /* count_each of every rank, not just of one */
    bool sends_at_root, receives_at_root;
    placing in_place;
} form;

static const form forms[] = {
    [DP_ALL_REDUCE] = {.reduces = true, .in_place = SAME},
    [DP_BROADCAST] = {.sends_at_root = true, .in_place = SAME},
    [DP_ALL_GATHER] = {.receives_all = true, .in_place = SEND_IN_RECV},
    [DP_REDUCE_SCATTER] = {.reduces = true, .sends_all = true, .in_place = RECV_IN_SEND},
    [DP_ALL_TO_ALL] = {.sends_all = true, .receives_all = true},
    [DP_REDUCE_TO] = {.reduces = true, .receives_at_root = true, .in_place = SAME},
    [DP_GATHER_TO] = {.receives_all = true, .receives_at_root = true, .in_place = SEND_IN_RECV},
    [DP_SCATTER_FROM] = {.sends_all = true, .sends_at_root = true, .in_place = RECV_IN_SEND},
};

typedef struct call {
    dp_verb verb;
    dp_dtype dtype;
    dp_op op;
    size_t count;
    int root;
    bool in_place;
} call;

/* ---- or each rank calls for itself, under dp_run --------------------------------------------- */

static bool each_for_itself;

typedef struct asking {
    const world *w;
    const call *c;
    const dp_part *parts; /* of local ranks */
} asking;

static dp_status ask(int local_rank, dp_scope *scope, void *user)
{
    const asking *own = user;
    const call *c = own->c;
    const dp_part *part = &own->parts[local_rank];
    dp_ctx *ctx = own->w->ctx;
    (void)scope;
    switch ((int)c->verb) {
    case DP_ALL_REDUCE:
        return dp_rank_all_reduce(ctx, part->send, part->recv, c->count, c->dtype, c->op);
    case DP_BROADCAST:
        return dp_rank_broadcast(ctx, part->recv, c->count, c->dtype, c->root);
    case DP_ALL_GATHER:
        return dp_rank_all_gather(ctx, part->send, part->recv, c->count, c->dtype);
    default:
        return dp_rank_reduce_scatter(ctx, part->send, part->recv, c->count, c->dtype, c->op);
    }
}

/* Of `parts`, one a rank, this process knows its own. */
static dp_status issue(world *w, const call *c, const dp_part *parts)
{
    parts += parts != NULL ? w->first : 0;
    if (each_for_itself)
        return dp_run(w->ctx, NULL, ask, &(asking){w, c, parts});
    switch (c->verb) {
    case DP_ALL_REDUCE:
        return dp_all_reduce(w->ctx, parts, c->count, c->dtype, c->op);
    case DP_BROADCAST:
        return dp_broadcast(w->ctx, parts, c->count, c->dtype, c->root);
    case DP_ALL_GATHER:
        return dp_all_gather(w->ctx, parts, c->count, c->dtype);
    case DP_REDUCE_SCATTER:
        return dp_reduce_scatter(w->ctx, parts, c->count, c->dtype, c->op);
    case DP_ALL_TO_ALL:
        return dp_all_to_all(w->ctx, parts, c->count, c->dtype);
    case DP_REDUCE_TO:
        return dp_reduce_to(w->ctx, parts, c->count, c->dtype, c->op, c->root);
    case DP_GATHER_TO:
        return dp_gather_to(w->ctx, parts, c->count, c->dtype, c->root);
    case DP_SCATTER_FROM:
        break;
    }
    return dp_scatter_from(w->ctx, parts, c->count, c->dtype, c->root);
}

/* What every rank sends, element i of rank r being sent[r][i % CYCLE], and what they come to. */
typedef struct data {
    char sent[MOST_RANKS][CYCLE * 8], reduced[CYCLE * 8];
} data;

static void reduce_rows(const void *const *in, int count, void *out, dp_dtype dtype, dp_op op,
                        double scale, double divisor)
{
    number_kernel(&(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                    .op = op == DP_OP_MEAN ? DP_OP_SUM : op,
                                    .dtype = dtype,
                                    .count = CYCLE,
                                    .out = &out,
                                    .in = in,
                                    .out_count = 1,
                                    .in_count = (size_t)count,
                                    .alpha = scale,
                                    .beta = divisor});
}

/* The ranks of a process come first, in its order, halves as f32. */
static void reduce_by_process(const world *w, data *d, dp_dtype dtype, dp_op op, double scale)
{
    static char rows[MOST_RANKS][CYCLE * 8], sums[MOST_RANKS][CYCLE * 8], whole[CYCLE * 8];
    const void *in[MOST_RANKS];
    bool half = dtype == DP_F16 || dtype == DP_BF16;
    dp_dtype wide = half ? DP_F32 : dtype;
    int processes = 0;
    for (int r = 0, count = 0; r < w->ranks; r++) {
        for (size_t i = 0; i < CYCLE; i++) {
            number_put(wide, rows[r], i, number_get(dtype, d->sent[r], i));
        }
        in[count++] = rows[r];
        if (r + 1 == w->ranks || w->process_of[r + 1] != w->process_of[r]) {
            reduce_rows(in, count, sums[processes++], wide, op, 1, 1);
            count = 0;
        }
    }
    for (int p = 0; p < processes; p++) {
        in[p] = sums[p];
    }
    reduce_rows(in, processes, whole, wide, op, scale, op == DP_OP_MEAN ? w->ranks : 1);
    for (size_t i = 0; i < CYCLE; i++) {
        number_put(dtype, d->reduced, i, number_get(wide, whole, i));
    }
}

static void reduce_sent(const world *w, data *d, dp_dtype dtype, dp_op op, double scale)
{
    const void *in[MOST_RANKS];
    for (int r = 0; r < w->ranks; r++) {
        in[r] = d->sent[r];
    }
    if (number_is_float(dtype) && w->by_process) {
        reduce_by_process(w, d, dtype, op, scale);
    } else {
        reduce_rows(in, w->ranks, d->reduced, dtype, op, scale, op == DP_OP_MEAN ? w->ranks : 1);
    }
}

/* Small whole numbers, whose sums and products are exact in every dtype but for those that wrap. */
static void send_small(const world *w, data *d, dp_dtype dtype, dp_op op, uint64_t *state)
{
    static const number factors[] = {1, 2, -1};
    for (int r = 0; r < w->ranks; r++) {
        for (size_t i = 0; i < CYCLE; i++) {
            uint64_t u = test_random(state);
            number n = op == DP_OP_PROD ? factors[u % 3] : (number)(u % 25) - 9;
            number_put(dtype, d->sent[r], i, dtype == DP_BOOL ? (number)(u & 1) : n);
        }
    }
    reduce_sent(w, d, dtype, op, 1);
}

static void send_digits(const world *w, data *d, dp_dtype dtype, dp_op op, double scale,
                        uint64_t *state)
{
    for (int r = 0; r < w->ranks; r++) {
        for (size_t i = 0; i < CYCLE; i++) {
            number digits = (number)(int64_t)test_random(state);
            number_put(dtype, d->sent[r], i, ldexpl(digits, (int)(test_random(state) % 6) - 64));
        }
    }
    reduce_sent(w, d, dtype, op, scale);
}

static void sent_by(const call *c, const data *d, const world *w, int rank, char *out)
{
    size_t all = forms[c->verb].sends_all ? (size_t)w->ranks : 1;
    lay_cycles(out, d->sent[rank], 0, all * c->count, dp_dtype_bytes(c->dtype));
}

static void received_by(const call *c, const data *d, const world *w, int rank, char *out)
{
    size_t size = dp_dtype_bytes(c->dtype), own = (size_t)rank * c->count, block = c->count * size;
    if (c->verb == DP_ALL_REDUCE || c->verb == DP_REDUCE_TO) {
        lay_cycles(out, d->reduced, 0, c->count, size);
    } else if (c->verb == DP_REDUCE_SCATTER) {
        lay_cycles(out, d->reduced, own, c->count, size);
    } else if (c->verb == DP_BROADCAST) {
        lay_cycles(out, d->sent[c->root], 0, c->count, size);
    } else if (c->verb == DP_SCATTER_FROM) {
        lay_cycles(out, d->sent[c->root], own, c->count, size);
    } else {
        for (int r = 0; r < w->ranks; r++) {
            size_t first = c->verb == DP_ALL_TO_ALL ? own : 0;
            lay_cycles(out + (size_t)r * block, d->sent[r], first, c->count, size);
        }
    }
}

/* ---- one call, checked byte by byte ---------------------------------------------------------- */

typedef struct slot { /* where a rank's buffers are */
    const dp_tensor *send, *recv;
    size_t send_first, recv_first;
} slot;

static slot slot_of(const world *w, const call *c, int rank)
{
    const form *f = &forms[c->verb];
    size_t own = (size_t)rank * c->count * dp_dtype_bytes(c->dtype);
    bool rooted = f->sends_at_root || f->receives_at_root;
    slot s = {.send = &w->a[rank], .recv = &w->b[rank]};
    if (c->in_place && (!rooted || rank == c->root)) {
        s.recv = f->in_place == RECV_IN_SEND ? s.send : s.recv;
        s.send = s.recv;
        s.send_first = f->in_place == SEND_IN_RECV ? own : 0;
        s.recv_first = f->in_place == RECV_IN_SEND ? own : 0;
    }
    return s;
}

/* CAPACITY bytes, of whoever needs them just now. */
static char *room(int i)
{
    static char *rooms[2];
    rooms[i] = rooms[i] != NULL ? rooms[i] : test_room(CAPACITY);
    return rooms[i];
}

static dp_part part_of(world *w, const call *c, const data *d, int rank)
{
    char *bytes = room(0);
    const form *f = &forms[c->verb];
    size_t all = (size_t)w->ranks, block = c->count * dp_dtype_bytes(c->dtype);
    slot s = slot_of(w, c, rank);
    dp_part part = {0};
    if (!f->receives_at_root || rank == c->root) {
        memset(bytes, 0x5a, (f->receives_all ? all : 1) * block + PAD);
        put(w, s.recv, s.recv_first, bytes, (f->receives_all ? all : 1) * block + PAD);
        part.recv = (char *)s.recv->data + s.recv_first;
    }
    if (!f->sends_at_root || rank == c->root) {
        sent_by(c, d, w, rank, bytes);
        put(w, s.send, s.send_first, bytes, (f->sends_all ? all : 1) * block);
        part.send = (char *)s.send->data + s.send_first;
    }
    return part;
}

static void check_bytes(const call *c, const char *what, int rank, const char *got,
                        const char *want, size_t bytes)
{
    size_t i = 0;
    if (memcmp(got, want, bytes) == 0) {
        return;
    }
    while (got[i] == want[i]) {
        i++;
    }
    i /= dp_dtype_bytes(c->dtype);
    test_fail(__FILE__, __LINE__,
              "form %d, %s, op %d, count %zu, root %d, in place %d: %s of rank %d, element %zu is "
              "%.18Lg, wanted %.18Lg",
              (int)c->verb, dp_dtype_name(c->dtype), (int)c->op, c->count, c->root, c->in_place,
              what, rank, i, number_get(c->dtype, got, i), number_get(c->dtype, want, i));
}

static void check_rank(world *w, const call *c, const data *d, int rank)
{
    char *got = room(0), *want = room(1);
    const form *f = &forms[c->verb];
    size_t all = (size_t)w->ranks, block = c->count * dp_dtype_bytes(c->dtype);
    size_t send_bytes = (f->sends_all ? all : 1) * block;
    size_t recv_bytes = (f->receives_all ? all : 1) * block;
    slot s = slot_of(w, c, rank);
    if (!is_here(w, rank)) {
        return;
    }
    if (!f->receives_at_root || rank == c->root) {
        size_t pad = s.recv_first == 0 && s.send != s.recv ? PAD : 0;
        get(w, s.recv, s.recv_first, got, recv_bytes + pad);
        memset(want, 0x5a, recv_bytes + PAD);
        received_by(c, d, w, rank, want);
        check_bytes(c, "recv", rank, got, want, recv_bytes + pad);
    }
    if ((!f->sends_at_root || rank == c->root) && s.send != s.recv) {
        get(w, s.send, s.send_first, got, send_bytes);
        sent_by(c, d, w, rank, want);
        check_bytes(c, "send", rank, got, want, send_bytes);
    }
}

static void check_call(world *w, const call *c, const data *d)
{
    dp_part parts[MOST_RANKS];
    for (int r = 0; r < w->ranks; r++) {
        parts[r] = part_of(w, c, d, r);
    }
    CHECK_OK(issue(w, c, parts));
    for (int r = 0; r < w->ranks; r++) {
        check_rank(w, c, d, r);
    }
}

static const size_t counts[] = {1, 2, 3, 17, 64, 1000, 65537};
enum { COUNTS = sizeof(counts) / sizeof(counts[0]) };

/* A count of counts[], made smaller if all ranks' blocks would not fit. */
static size_t count_for(const world *w, dp_verb v, int i)
{
    bool blocks = forms[v].sends_all || forms[v].receives_all;
    return blocks && w->ranks > 2 && counts[i] > 5000 ? 5003 : counts[i];
}

/* Every count, root (small counts), out of place and in place. Where all is slow, large counts take
   turns: another dtype and place each time, and all of them without sanitizers. */
static void check_form(world *w, dp_verb v, dp_dtype dtype, dp_op op, const data *d)
{
    static int turn;
    const form *f = &forms[v];
    bool rooted = f->sends_at_root || f->receives_at_root;
    for (int i = 0; i < COUNTS * 2; i++) {
        call c = {v, dtype, op, count_for(w, v, i / 2), 0, i % 2 == 1};
        int roots = !rooted ? 1 : c.count > 1000 ? 2 : w->ranks;
        if (c.in_place && f->in_place == NEVER) {
            continue;
        }
        if (counts[i / 2] > 1000 && turn++ % test_stride() != 0) {
            continue;
        }
        for (int root = 0; root < roots && root < w->ranks; root++) {
            c.root = w->ranks - 1 - root;
            check_call(w, &c, d);
        }
    }
}

static void check_moves(world *w, dp_verb v)
{
    static data d;
    uint64_t state = test_seed();
    for (dp_dtype dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        send_small(w, &d, dtype, DP_OP_SUM, &state);
        check_form(w, v, dtype, DP_OP_SUM, &d);
    }
}

static void check_reductions(world *w, dp_verb v)
{
    static data d;
    uint64_t state = test_seed();
    for (dp_dtype dtype = 0; dtype < DP_DTYPE_COUNT; dtype++) {
        for (int i = (int)dtype % test_stride(); i <= DP_OP_MAX; i += test_stride()) {
            dp_op op = (dp_op)i;
            if (dtype != DP_BOOL || op != DP_OP_MEAN) {
                send_small(w, &d, dtype, op, &state);
                check_form(w, v, dtype, op, &d);
            }
        }
    }
}

WORLD_TEST(all_reduce)
{
    check_reductions(w, DP_ALL_REDUCE);
}

FALLBACK_TEST(reduce_scatter)
{
    check_reductions(w, DP_REDUCE_SCATTER);
}

/* A broadcast has one buffer, so it is in place. */
static void check_broadcasts_in_place(world *w, dp_dtype dtype, const data *d)
{
    for (int i = 0; i < COUNTS; i++) {
        for (int root = 0; root<w->ranks; root += counts[i]> 1000 ? w->ranks : 1) {
            check_call(w, &(call){DP_BROADCAST, dtype, DP_OP_SUM, counts[i], root, true}, d);
        }
    }
}

static dp_status meet_at_a_barrier(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank, (void)scope;
    for (int i = 0; i < 10; i++) {
        DP_TRY(dp_rank_barrier(user));
    }
    return DP_OK;
}

WORLD_TEST(each_rank_calls_for_itself)
{
    static data d;
    uint64_t state = test_seed();
    each_for_itself = true;
    for (int i = 0; i < DP_DTYPE_COUNT * (DP_OP_MAX + 1); i += 3 * test_stride()) {
        dp_dtype dtype = (dp_dtype)(i % DP_DTYPE_COUNT);
        dp_op op = (dp_op)(i / DP_DTYPE_COUNT);
        op = dtype == DP_BOOL && op == DP_OP_MEAN ? DP_OP_MAX : op;
        send_small(w, &d, dtype, op, &state);
        check_form(w, DP_ALL_REDUCE, dtype, op, &d);
        check_form(w, DP_REDUCE_SCATTER, dtype, op, &d);
        if (op == DP_OP_SUM) {
            check_form(w, DP_ALL_GATHER, dtype, op, &d);
            check_broadcasts_in_place(w, dtype, &d);
        }
    }
    each_for_itself = false;
    CHECK_OK(dp_run(w->ctx, NULL, meet_at_a_barrier, w->ctx));
}

WORLD_TEST(reduce_to)
{
    check_reductions(w, DP_REDUCE_TO);
}

WORLD_TEST(broadcast)
{
    check_moves(w, DP_BROADCAST);
}

WORLD_TEST(all_gather)
{
    check_moves(w, DP_ALL_GATHER);
}

FALLBACK_TEST(all_to_all)
{
    check_moves(w, DP_ALL_TO_ALL);
}

WORLD_TEST(gather_to)
{
    check_moves(w, DP_GATHER_TO);
}

WORLD_TEST(scatter_from)
{
    check_moves(w, DP_SCATTER_FROM);
}

/* ---- one owner ------------------------------------------------------------------------------- */

static bool on_host(const world *w)
{
    dp_device_info info;
    CHECK_OK(dp_device_info_get(w->ctx, 0, &info));
    return info.host_memory;
}

/* Local ranks have an owner in pairs, but for the first: as in worlds that are dealt out to
   processes of one machine. */
static int owner_of(const world *w, int rank)
{
    int pair = (rank - w->first + 1) / 2;
    return w->first + (pair > 0 ? 2 * pair - 1 : 0);
}

/* Local ranks send from their owner's recv, which is for all that it has. */
static void check_gather_to_owners(world *w, const call *c, const data *d)
{
    dp_part parts[MOST_RANKS];
    char *got = room(0), *want = room(1);
    size_t block = c->count * dp_dtype_bytes(c->dtype), all = (size_t)w->ranks * block;
    for (int r = w->first; r < w->first + w->count; r++) {
        int owner = owner_of(w, r);
        char *whole = w->b[owner].data;
        if (r == owner) {
            memset(got, 0x5a, all + PAD);
            put(w, &w->b[r], 0, got, all + PAD);
        }
        sent_by(c, d, w, r, got);
        put(w, &w->b[owner], (size_t)r * block, got, block);
        parts[r] = (dp_part){.send = whole + (size_t)r * block, .recv = r == owner ? whole : NULL};
    }
    CHECK_OK(issue(w, c, parts));
    for (int r = w->first; r < w->first + w->count; r++) {
        if (r != owner_of(w, r)) {
            continue;
        }
        get(w, &w->b[r], 0, got, all + PAD);
        memset(want, 0x5a, all + PAD);
        received_by(c, d, w, r, want);
        check_bytes(c, "recv", r, got, want, all + PAD);
    }
}

/* What local ranks receive lies where their owner sends; some want nothing. */
static void check_scatter_to_owners(world *w, const call *c, const data *d, int left_out)
{
    dp_part parts[MOST_RANKS];
    char *got = room(0), *want = room(1);
    size_t block = c->count * dp_dtype_bytes(c->dtype), all = (size_t)w->ranks * block;
    for (int r = 0; r < w->ranks; r++) {
        parts[r] = part_of(w, c, d, r);
    }
    for (int r = w->first; r < w->first + w->count; r++) {
        char *whole = w->a[owner_of(w, r)].data;
        parts[r].recv = r % 3 == left_out ? NULL : whole + (size_t)r * block;
    }
    CHECK_OK(issue(w, c, parts));
    for (int r = w->first; r < w->first + w->count; r++) {
        sent_by(c, d, w, r, want);
        for (int k = w->first; k < w->first + w->count; k++) {
            if (owner_of(w, k) == r && k % 3 != left_out) {
                received_by(c, d, w, k, want + (size_t)k * block);
            }
        }
        get(w, &w->a[r], 0, got, all);
        check_bytes(c, "send", r, got, want, all);
    }
}

FALLBACK_TEST(owners_receive_for_all_of_theirs)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F16, DP_I64, DP_U8};
    static data d;
    uint64_t state = test_seed();
    for (int i = 0; i < COUNTS * 4 && on_host(w); i += test_stride()) {
        call c = {DP_ALL_GATHER, dtypes[i % 4], DP_OP_SUM, 0, 0, false};
        send_small(w, &d, c.dtype, c.op, &state);
        c.count = count_for(w, c.verb, i / 4);
        check_gather_to_owners(w, &c, &d);
        c.verb = DP_REDUCE_SCATTER;
        for (int left_out = 0; left_out < 4; left_out++)
            check_scatter_to_owners(w, &c, &d, left_out);
    }
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

static const dp_dtype floats[] = {DP_F32, DP_F64, DP_F16, DP_BF16};

/* Digits that do not fit: the bits of adding rank after rank, halves in f32, rounded at the end. */
WORLD_TEST(rank_r_is_added_rth)
{
    static data d;
    uint64_t state = test_seed();
    for (int i = 0; i < 4 * 3; i += test_stride()) {
        static const dp_op ops[] = {DP_OP_SUM, DP_OP_MEAN, DP_OP_PROD};
        send_digits(w, &d, floats[i % 4], ops[i / 4], 1, &state);
        check_form(w, DP_ALL_REDUCE, floats[i % 4], ops[i / 4], &d);
        check_form(w, DP_REDUCE_SCATTER, floats[i % 4], ops[i / 4], &d);
        check_form(w, DP_REDUCE_TO, floats[i % 4], ops[i / 4], &d);
    }
}

/* What is promised of every table, in whatever order it adds. */
WORLD_TEST(sums_are_close)
{
    static const number epsilon[] = {0x1p-24L, 0x1p-53L, 0x1p-11L, 0x1p-8L};
    static data d;
    char got[CYCLE * 8];
    uint64_t state = test_seed();
    for (int i = 0; i < 4 * 2; i++) {
        dp_dtype dtype = floats[i % 4];
        call c = {DP_ALL_REDUCE, dtype, i / 4 ? DP_OP_MEAN : DP_OP_SUM, CYCLE, 0, false};
        dp_part parts[MOST_RANKS];
        send_digits(w, &d, dtype, c.op, 1, &state);
        for (int r = 0; r < w->ranks; r++) {
            parts[r] = part_of(w, &c, &d, r);
        }
        CHECK_OK(issue(w, &c, parts));
        get(w, &w->b[w->first + w->count - 1], 0, got, CYCLE * dp_dtype_bytes(dtype));
        for (size_t k = 0; k < CYCLE; k++) {
            number sum = 0, size = 0;
            for (int r = 0; r < w->ranks; r++) {
                sum += number_get(dtype, d.sent[r], k);
                size += fabsl(number_get(dtype, d.sent[r], k));
            }
            number parts_of = c.op == DP_OP_MEAN ? w->ranks : 1;
            number least = dtype == DP_F16 ? 0x1p-25L : 0;
            CHECK_F64(number_get(dtype, got, k), sum / parts_of,
                      epsilon[i % 4] * (w->ranks + 1) * size / parts_of + least);
        }
    }
}

/* 2048 + 1 is 2048 in f16, and 256 + 1 is 256 in bf16; but not before all is added. */
TEST(halves_are_added_in_f32)
{
    const dp_device_ops *const tables[] = {dp_cpu(), toy_device()};
    static world w;
    for (int i = 0; i < 4; i++) {
        dp_dtype dtype = i % 2 ? DP_F16 : DP_BF16;
        number great = i % 2 ? 2048 : 256, got;
        char bytes[2];
        dp_part parts[3];
        world_open(&w, tables[i / 2], dp_cpu_coll(), 3);
        for (int r = 0; r < 3; r++) {
            number_put(dtype, bytes, 0, r == 0 ? great : 1);
            put(&w, &w.a[r], 0, bytes, 2);
            parts[r] = (dp_part){.send = w.a[r].data, .recv = w.b[r].data};
        }
        CHECK_OK(dp_all_reduce(w.ctx, parts, 1, dtype, DP_OP_SUM));
        get(&w, &w.b[2], 0, bytes, 2);
        got = number_get(dtype, bytes, 0);
        CHECK_F64(got, great + 2, 0);
        world_close(&w);
    }
}

WORLD_TEST(scale)
{
    static data d;
    uint64_t state = test_seed();
    static const double scales[] = {1, 0.25, 1.0 / 3, 0, -2};
    for (int i = 0; i < 4 * 5; i++) {
        call c = {DP_ALL_REDUCE, floats[i % 4], DP_OP_SUM, CYCLE, 0, i % 3 == 0};
        dp_part parts[MOST_RANKS];
        send_digits(w, &d, c.dtype, DP_OP_SUM, scales[i / 4], &state);
        for (int r = 0; r < w->ranks; r++) {
            parts[r] = part_of(w, &c, &d, r);
        }
        CHECK_OK(dp_all_reduce_scaled(w->ctx, parts + w->first, CYCLE, c.dtype, DP_OP_SUM,
                                      scales[i / 4]));
        for (int r = 0; r < w->ranks; r++) {
            check_rank(w, &c, &d, r);
        }
        CHECK_ERROR(dp_all_reduce_scaled(w->ctx, parts, 1, DP_I32, DP_OP_SUM, 0.5), DP_ERR_INVALID,
                    "i32");
    }
}

/* NaN is a factor too. */
TEST(scale_that_is_no_number)
{
    const dp_device_ops *const backends[] = {dp_cpu(), NULL};
    for (int ranks = 1; ranks <= 3; ranks++) {
        float numbers[3] = {1, 2, 3};
        dp_part parts[3];
        dp_ctx *ctx = NULL;
        CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = ranks}, &ctx));
        for (int r = 0; r < ranks; r++) {
            parts[r] = (dp_part){&numbers[r], &numbers[r], NULL};
        }
        CHECK_OK(dp_all_reduce_scaled(ctx, parts, 1, DP_F32, DP_OP_SUM, (double)NAN));
        for (int r = 0; r < ranks; r++) {
            CHECK(isnan(numbers[r]));
        }
        dp_close(ctx);
    }
}

/* Rank r wants the result where bit r of `wanted` is set; the others' buffers stay as they were. */
static void check_wanted(world *w, const call *c, const data *d, unsigned wanted, size_t off)
{
    char *got = room(0), *want = room(1);
    size_t bytes = c->count * dp_dtype_bytes(c->dtype);
    dp_part parts[MOST_RANKS];
    memset(got, 0x5a, bytes + PAD);
    for (int r = 0; r < w->ranks; r++) {
        put(w, &w->b[r], 0, got, bytes + PAD);
        sent_by(c, d, w, r, want);
        put(w, &w->a[r], off, want, bytes);
        parts[r] = (dp_part){.send = (char *)w->a[r].data + off};
        if (wanted >> r & 1) {
            parts[r].recv = (char *)w->b[r].data + off;
        }
    }
    CHECK_OK(issue(w, c, parts));
    for (int r = w->first; r < w->first + w->count; r++) {
        memset(want, 0x5a, bytes + PAD);
        if (wanted >> r & 1) {
            lay_cycles(want + off, d->reduced, 0, c->count, dp_dtype_bytes(c->dtype));
        }
        get(w, &w->b[r], 0, got, bytes + PAD);
        check_bytes(c, "recv", r, got, want, bytes + PAD);
    }
}

WORLD_TEST(rank_without_recv_gets_no_result)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_BF16, DP_I8};
    static data d;
    uint64_t state = test_seed();
    unsigned all = (1u << w->ranks) - 1;
    const unsigned wanted[] = {1, 1u << (w->ranks - 1), 0x5a5a5a & all, 0, all};
    for (int i = 0; i < 3 * 3 * 5; i++) {
        call c = {DP_ALL_REDUCE, dtypes[i % 3], DP_OP_MEAN, counts[i / 3 % 3 * 3], 0, false};
        send_small(w, &d, c.dtype, c.op, &state);
        check_wanted(w, &c, &d, wanted[i / 9], 0);
        check_wanted(w, &c, &d, wanted[i / 9], 1);
    }
}

/* A mean by weights goes through every rank's recv. */
REFUSED_TEST(a_weighted_mean_needs_every_recv)
{
    const double weights[MOST_RANKS] = {1, 1, 1, 1, 1, 1, 1, 1};
    dp_part parts[MOST_RANKS];
    for (int r = 0; r < w->ranks; r++) {
        parts[r] = (dp_part){.send = w->a[r].data, .recv = w->b[r].data};
    }
    parts[w->ranks - 1].recv = NULL;
    CHECK_ERROR(dp_all_reduce_weighted(w->ctx, parts, weights, 4, DP_F32), DP_ERR_INVALID,
                "recv of local rank");
    CHECK_OK(dp_all_reduce_weighted(w->ctx, parts, weights, 0, DP_F32));
}

/* A sum that overflows wraps; a mean is cut towards zero. */
WORLD_TEST(whole_numbers)
{
    static data d;
    uint64_t state = test_seed();
    for (dp_dtype dtype = DP_I64; dtype <= DP_U8; dtype++) {
        for (int r = 0; r < w->ranks; r++) {
            for (size_t i = 0; i < CYCLE * dp_dtype_bytes(dtype); i++) {
                d.sent[r][i] = (char)test_random(&state);
            }
        }
        reduce_sent(w, &d, dtype, DP_OP_SUM, 1);
        check_call(w, &(call){DP_ALL_REDUCE, dtype, DP_OP_SUM, 1000, 0, false}, &d);
        reduce_sent(w, &d, dtype, DP_OP_PROD, 1);
        check_call(w, &(call){DP_ALL_REDUCE, dtype, DP_OP_PROD, 1000, 0, true}, &d);
        for (int r = 0; r < w->ranks; r++) {
            for (size_t i = 0; i < CYCLE; i++) {
                number_put(dtype, d.sent[r], i, dtype == DP_U8 ? r % 2 : -(number)(r % 2));
            }
        }
        reduce_sent(w, &d, dtype, DP_OP_MEAN, 1);
        check_call(w, &(call){DP_ALL_REDUCE, dtype, DP_OP_MEAN, 100, 0, false}, &d);
        CHECK_INT(number_get(dtype, d.reduced, 0), 0);
    }
}

/* The same bits every time, however many threads there are. */
TEST_SLOW(same_call_same_bits, 60)
{
    enum { COUNT = 100003 };
    const size_t size = COUNT * 4;
    char *first = test_room(size), *again = test_room(size), *bytes = test_room(size);
    static world w;
    for (int round = 0; round < 6; round++) {
        const dp_config config = {.device_count = 5, .thread_count = 1 + round % 3};
        dp_ctx *ctx;
        dp_part parts[5];
        uint64_t state = test_seed();
        CHECK_OK(dp_open(&config, &ctx));
        w.ctx = ctx;
        w.scope = dp_scope_begin(ctx);
        for (int r = 0; r < 5; r++) {
            const int64_t shape[] = {COUNT};
            dp_tensor t;
            for (size_t i = 0; i < COUNT; i++) {
                number_put(DP_F32, bytes, i, (number)(int64_t)test_random(&state));
            }
            CHECK_OK(dp_tensor_new(w.scope, dp_local_device(ctx, r), DP_F32, 1, shape, &t));
            dp_tensor host = dp_wrap_const(bytes, DP_F32, 1, shape);
            CHECK_OK(dp_copy(ctx, &t, &host, NULL));
            CHECK_OK(dp_wait(ctx));
            parts[r] = (dp_part){.send = t.data, .recv = t.data};
            w.a[r] = t;
        }
        CHECK_OK(dp_all_reduce(ctx, parts, COUNT, DP_F32, DP_OP_SUM));
        CHECK_OK(dp_read(ctx, &w.a[round % 5], round == 0 ? first : again, size));
        CHECK(round == 0 || memcmp(first, again, size) == 0);
        dp_scope_end(w.scope);
        dp_close(ctx);
    }
}

/* ---- the bits of the CPU --------------------------------------------------------------------- */

#if defined(TEST_CUDA)

typedef struct layout { /* of the bits of a floating dtype: how many digits, the last exponent */
    unsigned digits;
    uint64_t last;
} layout;

static const layout layouts[] = {
    [DP_F32] = {23, 0xff}, [DP_F64] = {52, 0x7ff}, [DP_F16] = {10, 0x1f}, [DP_BF16] = {7, 0xff}};

/* Zeros of both signs, the least and the greatest number, infinities, NaN that is quiet or not. */
static uint64_t special_bits(layout own, uint64_t u)
{
    const uint64_t infinity = own.last << own.digits, quiet = UINT64_C(1) << (own.digits - 1);
    const uint64_t bits[] = {0, 1, infinity - 1, infinity, infinity | quiet | 1, infinity | 1};
    const uint64_t sign = (own.last + 1) << own.digits;
    return bits[u % 8 < 6 ? u % 8 : 0] | (u >> 3 & 1 ? sign : 0);
}

/* The magnitude differs from element to element, and little from rank to rank, so that the order of
   additions shows. Every 16th element is special; some are zeros, the first of them all of -0. */
static void send_bits(const world *w, data *d, dp_dtype dtype, uint64_t *state)
{
    const layout own = layouts[dtype];
    const uint64_t sign = (own.last + 1) << own.digits;
    for (size_t i = 0; i < CYCLE; i++) {
        const uint64_t least = test_random(state) % own.last;
        for (int r = 0; r < w->ranks; r++) {
            uint64_t u = test_random(state), exponent = least + (u >> 60) % 4;
            exponent = exponent < own.last ? exponent : own.last - 1;
            u = (u & (sign | ((UINT64_C(1) << own.digits) - 1))) | exponent << own.digits;
            u = i % 16 == 0 ? special_bits(own, test_random(state)) : u;
            u = i % 64 == 1 ? (i == 1 || r % 2 ? sign : 0) : u;
            memcpy(d->sent[r] + i * dp_dtype_bytes(dtype), &u, dp_dtype_bytes(dtype));
        }
    }
}

/* Which NaN a sum is, GPUs and CPUs do not agree upon. */
static void make_one_nan(dp_dtype dtype, char *bytes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (isnan(number_get(dtype, bytes, i))) {
            number_put(dtype, bytes, i, NUMBER_NAN);
        }
    }
}

static void issue_bits(world *w, const call *c, const data *d)
{
    dp_part parts[MOST_RANKS];
    for (int r = 0; r < w->ranks; r++) {
        parts[r] = part_of(w, c, d, r);
    }
    if (c->op == DP_OP_MEAN && c->verb == DP_ALL_REDUCE) {
        CHECK_OK(dp_all_reduce_scaled(w->ctx, parts, c->count, c->dtype, c->op, 0.3));
    } else {
        CHECK_OK(issue(w, c, parts));
    }
}

static void check_bits(world *gpus, world *cpus, const call *c, const data *d)
{
    const form *f = &forms[c->verb];
    size_t blocks = f->receives_all ? (size_t)gpus->ranks : 1, size = dp_dtype_bytes(c->dtype);
    size_t bytes = blocks * c->count * size, pad = c->in_place ? 0 : PAD;
    issue_bits(gpus, c, d);
    issue_bits(cpus, c, d);
    for (int r = 0; r < gpus->ranks; r++) {
        slot s = slot_of(gpus, c, r), same = slot_of(cpus, c, r);
        get(gpus, s.recv, s.recv_first, room(0), bytes + pad);
        get(cpus, same.recv, same.recv_first, room(1), bytes + pad);
        for (int k = 0; k < 2 && f->reduces; k++) {
            make_one_nan(c->dtype, room(k), blocks * c->count);
        }
        check_bytes(c, "recv", r, room(0), room(1), bytes + pad);
    }
}

static void check_bits_of(world *gpus, world *cpus)
{
    static const struct {
        dp_verb verb;
        dp_op op;
    } calls[] = {{DP_ALL_REDUCE, DP_OP_SUM},     {DP_ALL_REDUCE, DP_OP_MEAN},
                 {DP_REDUCE_SCATTER, DP_OP_SUM}, {DP_REDUCE_SCATTER, DP_OP_MEAN},
                 {DP_BROADCAST, DP_OP_SUM},      {DP_ALL_GATHER, DP_OP_SUM}};
    static const size_t odd[] = {0, 1, 7, 5003, 65537};
    static data d;
    uint64_t state = test_seed();
    for (int i = 0; i < 4 * 6 * 5; i++) {
        call c = {calls[i / 4 % 6].verb,  floats[i % 4], calls[i / 4 % 6].op, odd[i / 24], 0,
                  i / 4 % 2 == i / 24 % 2};
        const form *f = &forms[c.verb];
        if (c.count * 8 <= CAPACITY / 2 / (size_t)gpus->ranks ||
            !(f->sends_all || f->receives_all)) {
            c.root = i % gpus->ranks;
            send_bits(gpus, &d, c.dtype, &state);
            check_bits(gpus, cpus, &c, &d);
        }
    }
}

/* Numbers of any magnitude: none of them, few, and so many that each GPU gets a slice to add up. */
TEST_SLOW(gpus_have_the_bits_of_cpus_cuda, 60)
{
    static const int sizes[] = {3, 5, 8};
    static world gpus, cpus;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        world_open(&gpus, cuda_device(MOST_RANKS), dp_cuda_coll(), sizes[i]);
        world_open(&cpus, dp_cpu(), dp_cpu_coll(), sizes[i]);
        check_bits_of(&gpus, &cpus);
        world_close(&cpus);
        world_close(&gpus);
    }
    cuda_check_leaks();
}

#endif

/* ---- what is done with the arguments --------------------------------------------------------- */

static const dp_status invalid = DP_ERR_INVALID;

static void parts_of(const world *w, dp_part *parts)
{
    for (int r = 0; r < w->ranks; r++) {
        parts[r] = (dp_part){.send = w->a[r].data, .recv = w->b[r].data};
    }
}

static void check_all_verbs(world *w, call c, const dp_part *parts, dp_status want)
{
    for (c.verb = DP_ALL_REDUCE; c.verb <= DP_SCATTER_FROM; c.verb++) {
        dp_status status = issue(w, &c, parts);
        if (status != want || (want != DP_OK && dp_last_error()[0] == '\0')) {
            test_fail(__FILE__, __LINE__, "form %d: %s, wanted %s: %s", (int)c.verb,
                      dp_status_name(status), dp_status_name(want), dp_last_error());
        }
    }
}

FALLBACK_TEST(nothing_to_do)
{
    const dp_part none[MOST_RANKS] = {{0}};
    char before[PAD], after[PAD];
    dp_part parts[MOST_RANKS];
    memset(before, 7, PAD);
    for (int r = 0; r < w->ranks; r++) {
        put(w, &w->b[r], 0, before, PAD);
    }
    parts_of(w, parts);
    check_all_verbs(w, (call){.dtype = DP_F64}, parts, DP_OK);
    check_all_verbs(w, (call){.dtype = DP_F64}, none, DP_OK);
    CHECK_OK(dp_all_reduce_scaled(w->ctx, none, 0, DP_F64, DP_OP_SUM, 2));
    for (int r = 0; r < w->ranks; r++) {
        get(w, &w->b[r], 0, after, PAD);
        CHECK_BYTES(after, before, PAD);
    }
}

REFUSED_TEST(wrong_arguments)
{
    dp_part parts[MOST_RANKS];
    call c = {.dtype = DP_F32, .count = 4};
    parts_of(w, parts);
    check_all_verbs(w, (call){.dtype = DP_DTYPE_COUNT, .count = 4}, parts, invalid);
    check_all_verbs(w, (call){.dtype = DP_DTYPE_ANY, .count = 4}, parts, invalid);
    check_all_verbs(w, (call){.dtype = DP_F32, .count = SIZE_MAX / 2}, parts, invalid);
    check_all_verbs(w, c, NULL, invalid);
    for (c.verb = DP_ALL_REDUCE; c.verb <= DP_SCATTER_FROM; c.verb++) {
        const form *f = &forms[c.verb];
        c.root = 0;
        for (int op = -1; op <= DP_OP_MAX + 1 && f->reduces; op += DP_OP_MAX + 2) {
            c.op = (dp_op)op;
            CHECK_STATUS(issue(w, &c, parts), invalid);
        }
        c.op = DP_OP_SUM;
        parts[0].send = NULL;
        CHECK_ERROR(issue(w, &c, parts), invalid, "send");
        parts_of(w, parts);
        parts[0].recv = NULL;
        bool optional = on_host(w) && (c.verb == DP_ALL_GATHER || c.verb == DP_REDUCE_SCATTER);
        if (c.verb != DP_ALL_REDUCE && !optional) {
            CHECK_ERROR(issue(w, &c, parts), invalid, "recv");
        }
        parts_of(w, parts);
        if (f->sends_at_root || f->receives_at_root) {
            c.root = -1;
            CHECK_ERROR(issue(w, &c, parts), invalid, "root");
            c.root = w->ranks;
            CHECK_ERROR(issue(w, &c, parts), invalid, "root");
        }
    }
    check_all_verbs(w, (call){.dtype = DP_F32, .count = 4}, parts, DP_OK);
}

/* Rank 0's recv on a buffer of rank 0's or of its neighbour's, where a form does not allow it. */
REFUSED_TEST(overlapping_buffers)
{
    for (dp_verb v = DP_ALL_REDUCE; v <= DP_SCATTER_FROM; v++) {
        call c = {.verb = v, .dtype = DP_I16, .count = 10};
        dp_part parts[MOST_RANKS];
        parts_of(w, parts);
        parts[0].recv = (char *)w->a[0].data + 2;
        CHECK_ERROR(issue(w, &c, parts), invalid, "overlap");
        parts[0].recv = (char *)w->a[0].data + 19;
        CHECK_ERROR(issue(w, &c, parts), invalid, "overlap");
        parts_of(w, parts);
        parts[0].send = (char *)w->b[0].data + 1;
        CHECK_ERROR(issue(w, &c, parts), invalid, "overlap");
        if (w->ranks == 1 || !on_host(w)) {
            continue;
        }
        parts_of(w, parts);
        parts[0].recv = (char *)w->a[1].data + (v == DP_REDUCE_SCATTER ? 2 : 0);
        if (!forms[v].sends_at_root) {
            CHECK_ERROR(issue(w, &c, parts), invalid, "overlap");
        }
        parts_of(w, parts);
        parts[1].recv = (char *)w->b[0].data + 4;
        if (!forms[v].receives_at_root) {
            CHECK_ERROR(issue(w, &c, parts), invalid, "overlap");
        }
    }
    if (w->ranks > 1) {
        call c = {.verb = DP_ALL_TO_ALL, .dtype = DP_I16, .count = 10};
        dp_part parts[MOST_RANKS];
        parts_of(w, parts);
        parts[0].recv = w->a[0].data;
        CHECK_ERROR(issue(w, &c, parts), invalid, "overlap");
    }
}

/* Streams are named or not; those of other devices are refused. */
REFUSED_TEST(streams)
{
    static data d;
    dp_part parts[MOST_RANKS];
    uint64_t state = test_seed();
    call c = {.verb = DP_ALL_REDUCE, .dtype = DP_I32, .count = 100};
    send_small(w, &d, DP_I32, DP_OP_SUM, &state);
    for (int r = 0; r < w->ranks; r++) {
        parts[r] = part_of(w, &c, &d, r);
        parts[r].stream = dp_local_stream(w->ctx, r);
    }
    CHECK_OK(issue(w, &c, parts));
    for (int r = 0; r < w->ranks; r++) {
        check_rank(w, &c, &d, r);
    }
    if (w->ranks > 1) {
        parts[0].stream = parts[1].stream;
        CHECK_ERROR(issue(w, &c, parts), invalid, "stream");
    }
}

WORLD_TEST(barrier)
{
    dp_info info;
    CHECK_OK(dp_info_get(w->ctx, &info));
    CHECK_INT(info.rank_count, w->ranks);
    CHECK_INT(info.rank_first, w->first);
    CHECK((strcmp(info.coll_backend, "none") == 0) == (w->ranks == 1));
    for (int i = 0; i < 10; i++) {
        CHECK_OK(dp_barrier(w->ctx));
    }
}

/* Nobody waits between two calls: what the first has not read or written yet is left alone. */
WORLD_TEST(two_in_a_row)
{
    enum { COUNT = 64, ROOM = MOST_RANKS * COUNT };
    static const dp_verb verbs[] = {DP_ALL_REDUCE, DP_BROADCAST, DP_ALL_GATHER};
    unsigned char bytes[ROOM];
    for (int v = 0; v < 3; v++) {
        for (int r = w->first; r < w->first + w->count; r++) {
            for (int k = 0; k < 2; k++) {
                memset(bytes, 1 + r + 20 * k, COUNT);
                put(w, &w->a[r], (size_t)k * COUNT, bytes, COUNT);
            }
        }
        for (int k = 0; k < 2; k++) {
            const call c = {verbs[v], DP_U8, DP_OP_MAX, COUNT, w->ranks - 1, false};
            dp_part parts[MOST_RANKS];
            for (int r = 0; r < w->ranks; r++) {
                parts[r] = (dp_part){.send = (char *)w->a[r].data + k * COUNT,
                                     .recv = (char *)w->b[r].data + k * ROOM};
            }
            CHECK_OK(issue(w, &c, parts));
        }
        for (int r = w->first; r < w->first + w->count; r++) {
            for (int k = 0; k < 2; k++) {
                bool all = verbs[v] == DP_ALL_GATHER;
                for (int from = all ? 0 : w->ranks - 1; from < w->ranks; from++) {
                    get(w, &w->b[r], (size_t)(k * ROOM + all * from * COUNT), bytes, COUNT);
                    CHECK_INT(bytes[0], 1 + from + 20 * k);
                    CHECK_INT(bytes[COUNT - 1], 1 + from + 20 * k);
                }
            }
        }
    }
}

#if defined(TEST_SIM)
/* Numbers whose sums are exact, and moves: all that NCCL does itself. */
static void (*const exact_bodies[])(world *w) = {
    all_reduce,    reduce_scatter, reduce_to,
    broadcast,     all_gather,     all_to_all,
    whole_numbers, sums_are_close, rank_without_recv_gets_no_result};

TEST_SLOW(nccl_in_its_own_order_cuda, 120)
{
    static world w;
    setenv("DP_NCCL", "0", 1);
    division_ordered = false;
    for (size_t i = 0; i < sizeof exact_bodies / sizeof exact_bodies[0]; i++) {
        memcpy(division, (int[]){2, 1, 1}, sizeof division);
        division_body = exact_bodies[i];
        in_processes(3, division_process);
    }
    for (int ranks = 2; ranks <= 4; ranks += 2)
        for (size_t i = 0; i < sizeof exact_bodies / sizeof exact_bodies[0]; i++) {
            world_open(&w, cuda_device(ranks), decorate_coll(dp_nccl_coll()), ranks);
            exact_bodies[i](&w);
            world_close(&w);
            CHECK_STR(deco.breach, "");
        }
    CHECK(cuda_device_gpus == 1 || sim_nccl_count().reduce_scatter > 0);
}
#endif

/* CPU devices take memory of anybody's, at any address that suits the dtype. */
TEST(memory_of_the_users)
{
    enum { COUNT = 777 };
    static int16_t in[3][COUNT + 1], out[3][3 * COUNT + 1];
    dp_part parts[3];
    dp_ctx *ctx;
    CHECK_OK(dp_open(&(dp_config){.device_count = 3}, &ctx));
    for (int r = 0; r < 3; r++) {
        for (int i = 0; i < COUNT; i++) {
            in[r][i + 1] = (int16_t)(1000 * r + i);
        }
        parts[r] = (dp_part){.send = in[r] + 1, .recv = out[r] + 1};
    }
    CHECK_OK(dp_all_gather(ctx, parts, COUNT, DP_I16));
    for (int r = 0; r < 3; r++) {
        for (int i = 0; i < 3 * COUNT; i++) {
            CHECK_INT(out[r][i + 1], 1000 * (i / COUNT) + i % COUNT);
        }
    }
    dp_close(ctx);
}

/* ---- every call of the table fails once ------------------------------------------------------ */

static dp_status all_verbs(dp_ctx *ctx)
{
    static int32_t send[3][9], recv[3][9];
    dp_part parts[3];
    world w = {.ranks = 3, .ctx = ctx};
    for (int i = 0; i < 27; i++) {
        send[i / 9][i % 9] = i;
    }
    for (int r = 0; r < 3; r++) {
        parts[r] = (dp_part){.send = send[r], .recv = recv[r]};
    }
    for (dp_verb v = DP_ALL_REDUCE; v <= DP_SCATTER_FROM; v++) {
        call c = {.verb = v, .dtype = DP_I32, .count = 3, .root = 1};
        dp_status status = issue(&w, &c, parts);
        if (status != DP_OK) {
            return status;
        }
    }
    CHECK_INT(recv[2][0], 9 + 6);
    dp_status status = dp_barrier(ctx);
    return status == DP_OK ? dp_wait(ctx) : status;
}

static bool verbs_with_fault(const dp_coll_ops *coll, long n, dp_status fault)
{
    const dp_coll_ops *const colls[] = {coll, NULL};
    test_allocator counter = {0};
    const dp_config config = {
        .colls = colls, .device_count = 3, .allocator = test_allocator_of(&counter)};
    dp_ctx *ctx = NULL;
    deco_reset(n, fault);
    dp_status status = dp_open(&config, &ctx);
    bool opened = status == DP_OK;
    if (opened) {
        status = all_verbs(ctx);
    }
    CHECK_INT(status, deco.fired ? fault : DP_OK);
    CHECK(status == DP_OK || strstr(dp_last_error(), "decorator") != NULL);
    if (opened && dp_status_class(fault) == DP_CLASS_JOB && deco.fired) {
        dp_failure_info failure;
        CHECK(dp_failure(ctx, &failure));
        CHECK_INT(failure.status, fault);
        CHECK_INT(failure.rank, 0);
        CHECK_STATUS(all_verbs(ctx), fault);
        CHECK_STATUS(dp_wait(ctx), fault);
    } else if (opened && deco.fired) {
        CHECK_OK(all_verbs(ctx));
    }
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
    CHECK_DECORATOR();
    return deco.fired;
}

/* With a table that has everything, and with one that has only what is required. */
TEST(every_call_of_the_table_fails)
{
    static const dp_status faults[] = {DP_ERR_NO_MEMORY, DP_ERR_UNSUPPORTED, DP_ERR_DEVICE,
                                       DP_ERR_REMOTE,    DP_ERR_TIMEOUT,     DP_ERR_ABORTED};
    for (size_t i = 0; i < 2 * sizeof(faults) / sizeof(faults[0]); i++) {
        const dp_coll_ops *coll = decorate_coll(dp_cpu_coll());
        long n = 1;
        if (i % 2 == 1) {
            deco.coll.head.size = offsetof(dp_coll_ops, abort);
            deco.coll.verbs &= ~(1u << DP_REDUCE_SCATTER | 1u << DP_ALL_TO_ALL);
        }
        while (verbs_with_fault(coll, n, faults[i / 2])) {
            n++;
        }
        CHECK(n >= 10);
    }
}

/* A table that fits nothing is passed over; in a world of one none is asked. */
static bool fits_nothing(const dp_comm_config *config)
{
    CHECK(config->local_count > 0 && config->rank_count >= config->local_count);
    CHECK(config->bootstrap == NULL && config->timeout_ms > 0);
    return false;
}

static void forbidden_abort(dp_comm *comm)
{
    (void)comm;
    test_fail(__FILE__, __LINE__, "abort lies past the table");
}

TEST(abort_past_the_end_of_a_table_is_not_called)
{
    static world w;
    decorate_coll(dp_cpu_coll());
    deco.coll.head.size = offsetof(dp_coll_ops, abort);
    deco.coll.abort = forbidden_abort;
    world_open(&w, dp_cpu(), &deco.coll, 2);
    dp_abort(w.ctx, DP_ERR_ABORTED, "enough");
    CHECK_STATUS(dp_barrier(w.ctx), DP_ERR_ABORTED);
    world_close(&w);
}

TEST(the_table_that_fits_is_opened)
{
    dp_coll_ops picky = *dp_cpu_coll();
    const dp_coll_ops *const colls[] = {&picky, decorate_coll(dp_cpu_coll()), NULL};
    picky.fits = fits_nothing;
    for (int ranks = 1; ranks <= 2; ranks++) {
        dp_ctx *ctx;
        deco_reset(0, DP_OK);
        CHECK_OK(dp_open(&(dp_config){.colls = colls, .device_count = ranks}, &ctx));
        CHECK_INT(deco_calls(DECO_coll_open), ranks - 1);
        CHECK_INT(deco_calls(DECO_coll_fits), ranks - 1);
        dp_close(ctx);
        CHECK_INT(deco_calls(DECO_coll_close), ranks - 1);
    }
}
