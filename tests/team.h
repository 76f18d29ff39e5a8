/* team.h - tests of inner parts that no public function shows: waits that learn, who takes which
   part of the work, and how many cores there are. In dp.c, after the implementation. */

#include <sys/resource.h>
#include <sys/stat.h>
#include "test.h"

/* ---- waits that learn ------------------------------------------------------------------------ */

TEST(patience_shrinks_to_a_rest_and_is_tried_again)
{
    CHECK_INT(dp__gate_patience(0), DP__SPIN_NS);
    CHECK_INT(dp__gate_patience(1), DP__SPIN_NS / 4);
    CHECK_INT(dp__gate_patience(2), DP__SPIN_NS / 16);
    for (unsigned missed = 3; missed < DP__SPIN_RETRY; missed++) {
        CHECK_INT(dp__gate_patience(missed), DP__SPIN_NS / 64);
    }
    CHECK_INT(dp__gate_patience(DP__SPIN_RETRY), DP__SPIN_NS);
    CHECK_INT(dp__gate_patience(DP__SPIN_RETRY + 1), DP__SPIN_NS / 4);
    CHECK_INT(dp__gate_patience(UINT_MAX), DP__SPIN_NS / 64);
}

TEST(spins_that_run_out_are_counted_and_one_that_pays_ends_the_count)
{
    dp__gate gate;
    dp__gate_init(&gate);
    unsigned seen = dp__gate_word(&gate);
    for (unsigned missed = 0; missed < DP__SPIN_RETRY + 2; missed++) {
        CHECK_INT(gate.missed, missed);
        uint64_t start = dp__os_now_ns(), patience = dp__gate_patience(missed);
        CHECK(!dp__gate_spin(&gate, seen));
        CHECK(dp__os_now_ns() - start >= patience);
    }
    dp__gate_open(&gate);
    CHECK(dp__gate_spin(&gate, seen));
    CHECK_INT(gate.missed, 0);
    dp__gate_fini(&gate);
}

TEST(a_gate_begins_closed_whatever_was_there)
{
    dp__gate gate;
    memset(&gate, 1, sizeof gate); /* of no other byte is it said how it reads as a bool */
    dp__gate_init(&gate);
    CHECK_INT(dp__gate_word(&gate), 0);
    CHECK(!atomic_load(&gate.asleep));
    CHECK_INT(gate.missed, 0);
    dp__gate_fini(&gate);
}

/* A gate that was opened before is no wait, so it teaches nothing. */
TEST(an_open_gate_is_not_waited_for)
{
    dp__gate gate;
    dp__gate_init(&gate);
    unsigned seen = dp__gate_word(&gate);
    CHECK(!dp__gate_spin(&gate, seen));
    dp__gate_open(&gate);
    dp__gate_wait(&gate, seen, true);
    CHECK_INT(gate.missed, 1);
    dp__gate_fini(&gate);
}

typedef struct sleeper {
    dp__gate gate;
    bool spin;
} sleeper;

static void *sleep_at(void *user)
{
    sleeper *s = user;
    dp__gate_wait(&s->gate, 0, s->spin);
    return NULL;
}

/* Opened when the other thread sleeps, so that none of its spins can have paid. */
static unsigned missed_by_a_sleeper(bool spin)
{
    static sleeper s;
    pthread_t thread;
    s.spin = spin;
    dp__gate_init(&s.gate);
    CHECK_INT(pthread_create(&thread, NULL, sleep_at, &s), 0);
    while (!atomic_load(&s.gate.asleep)) {
        sched_yield();
    }
    dp__gate_open(&s.gate);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK(!atomic_load(&s.gate.asleep));
    dp__gate_fini(&s.gate);
    return s.gate.missed;
}

TEST(a_sleeper_is_woken_with_and_without_a_spin)
{
    CHECK_INT(missed_by_a_sleeper(false), 0);
    CHECK_INT(missed_by_a_sleeper(true), 1);
}

/* ---- memory for inner parts ------------------------------------------------------------------ */

static int blocks_of_tests, fail_of_tests; /* how many there are; the next this often fails */

/* Of memory before anybody writes there: words that say a thread owes and a lock is taken, or bytes
   that are all `true`. */
static const int fills_of_tests[] = {1, 0x01010101};
static int fill_of_tests = 1;

static void *alloc_for_tests(const dp_host *host, size_t bytes, size_t align)
{
    (void)host;
    if (fail_of_tests > 0 && --fail_of_tests == 0) {
        return NULL;
    }
    int *data = dp__os_alloc(bytes, align, NULL);
    CHECK(data != NULL);
    for (size_t i = 0; i < bytes / sizeof *data; i++) {
        data[i] = fill_of_tests;
    }
    blocks_of_tests++;
    return data;
}

static void free_for_tests(const dp_host *host, void *data)
{
    (void)host;
    blocks_of_tests -= data != NULL;
    free(data);
}

/* ---- who takes what -------------------------------------------------------------------------- */

/* Whose threads have done nothing yet, not even bound themselves to a node. */
static dp_ctx *open_team(int devices, int threads)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(
        &(dp_config){.device_count = devices, .thread_count = threads, .unbound = true}, &ctx));
    return ctx;
}

TEST(waits_spin_only_where_every_thread_has_a_core)
{
    for (int threads = 1; threads <= 5; threads++) {
        dp_ctx *ctx = open_team(4, threads);
        CHECK_INT(ctx->team->spin, threads >= 4);
        CHECK_INT(ctx->team->share_count, threads < 4 ? threads : 4);
        dp_close(ctx);
    }
}

enum { PARTS = 9 };

typedef struct work {
    atomic_int begun[PARTS], done;
    pthread_t by[PARTS];
    int first[3]; /* of every thread */
    int threads;
} work;

static int begun_of_firsts(work *w)
{
    int sum = 0;
    for (int i = 0; i < w->threads; i++) {
        sum += atomic_load(&w->begun[w->first[i]]);
    }
    return sum;
}

/* No thread goes on before each has begun its first part, and the last one's own first part lasts
   until all others are done. */
static void do_part(int part, void *user)
{
    work *w = user;
    w->by[part] = pthread_self();
    CHECK_INT(atomic_fetch_add(&w->begun[part], 1), 0);
    while (begun_of_firsts(w) < w->threads) {
        sched_yield();
    }
    while (part == w->first[w->threads - 1] && atomic_load(&w->done) < PARTS - 1) {
        sched_yield();
    }
    atomic_fetch_add(&w->done, 1);
}

static void check_parts(int threads, int second, int third)
{
    work w = {.first = {0, second, third}, .threads = threads};
    dp_ctx *ctx = open_team(threads, threads);
    ctx->host.parallel(&ctx->host, PARTS, do_part, &w);
    CHECK_INT(atomic_load(&w.done), PARTS);
    CHECK(pthread_equal(w.by[0], pthread_self()));
    for (int i = 1; i < threads; i++) {
        CHECK(pthread_equal(w.by[w.first[i]], ctx->team->workers[i].thread.id));
    }
    for (int i = w.first[threads - 1] + 1; i < PARTS; i++) {
        CHECK(!pthread_equal(w.by[i], ctx->team->workers[threads - 1].thread.id));
    }
    dp_close(ctx);
}

TEST(a_thread_begins_with_its_own_parts_and_takes_what_others_leave)
{
    check_parts(2, 4, 0);
    check_parts(3, 3, 6);
}

static void wait_for_a_sleeping_caller(int part, void *user)
{
    const dp_ctx *ctx = user;
    while (part == 1 && !atomic_load(&ctx->team->inside.asleep)) {
        sched_yield();
    }
}

TEST(a_caller_with_nothing_left_to_do_sleeps)
{
    dp_ctx *ctx = open_team(2, 2);
    CHECK(dp__team_enter(ctx->team));
    dp__team_run(ctx->team, 2, wait_for_a_sleeping_caller, ctx);
    dp__team_exit(ctx->team);
    CHECK_INT(ctx->team->inside.missed, 1);
    dp_close(ctx);
}

TEST(a_worker_with_nothing_to_do_sleeps)
{
    dp_ctx *ctx = open_team(2, 2);
    while (!atomic_load(&ctx->team->workers[1].gate.asleep)) {
        sched_yield();
    }
    dp_close(ctx);
}

/* Part 0 sleeps until part 1 has seen that it does, and more. */
typedef struct nap {
    dp__team *team;
    atomic_bool over;
} nap;

static void take_a_nap(int part, void *user)
{
    nap *n = user;
    unsigned seen = dp__team_ticket(n->team, 0);
    if (part == 0) {
        dp__team_sleep(n->team, 0, seen, UINT64_MAX);
        CHECK(atomic_load(&n->over));
        return;
    }
    while (!atomic_load(&n->team->workers[0].gate.asleep)) {
        sched_yield();
    }
    atomic_store(&n->over, true);
    dp__team_wake(n->team, 0);
}

TEST(a_part_sleeps_until_another_one_wakes_it)
{
    dp_ctx *ctx = open_team(2, 2);
    nap n = {.team = ctx->team};
    CHECK(dp__team_enter(ctx->team));
    dp__team_run(ctx->team, 2, take_a_nap, &n);
    dp__team_exit(ctx->team);
    dp_close(ctx);
}

/* Nobody wakes part 0: by the clock it sleeps no shorter than it has said, and not much longer. */
static void sleep_until(int part, void *user)
{
    dp__team *team = user;
    uint64_t until_ns = dp__os_after_ms(30);
    if (part != 0)
        return;
    dp__team_sleep(team, 0, dp__team_ticket(team, 0), until_ns);
    uint64_t late_ns = dp__os_now_ns() - until_ns;
    CHECK((double)late_ns < 2e9 * test_timeout_scale());
    dp__team_sleep(team, 0, dp__team_ticket(team, 0) - 1, UINT64_MAX); /* it was woken before */
}

TEST(a_part_sleeps_until_a_time)
{
    dp_ctx *ctx = open_team(2, 2);
    CHECK(dp__team_enter(ctx->team));
    dp__team_run(ctx->team, 2, sleep_until, ctx->team);
    dp__team_exit(ctx->team);
    dp_close(ctx);
}

static void count_part(int part, void *user)
{
    atomic_int *counts = user;
    atomic_fetch_add(&counts[part], 1);
}

TEST(a_team_counts_on_nothing_that_its_memory_holds)
{
    const dp_host host = {.size = sizeof host, .alloc = alloc_for_tests, .free = free_for_tests};
    atomic_int counts[9] = {0};
    for (int i = 0; i < 2 * 3; i++) {
        int threads = 1 + i / 2;
        dp__team *team = NULL;
        fill_of_tests = fills_of_tests[i % 2];
        CHECK_OK(dp__team_open(&host, threads, 2, &team));
        CHECK(dp__team_enter(team));
        CHECK(!dp__team_enter(team));
        dp__team_run(team, threads, count_part, counts);
        dp__team_share(team, 9, count_part, counts);
        dp__team_exit(team);
        dp__team_close(team);
        free_for_tests(&host, team);
    }
    for (int i = 0; i < 9; i++) {
        CHECK_INT(atomic_load(&counts[i]), 2 * (3 + (i < 3 ? 3 - i : 0)));
    }
    CHECK_INT(blocks_of_tests, 0);
}

/* These have no thread at all, as if they slept through it. */
TEST(a_worker_that_comes_too_late_is_not_waited_for)
{
    atomic_int counts[9] = {0};
    dp__team *team = dp__os_alloc(dp__team_bytes(3), 64, NULL);
    CHECK(team != NULL);
    memset(team, 0, dp__team_bytes(3));
    team->thread_count = team->share_count = 3;
    dp__gate_init(&team->inside);
    for (int i = 0; i < 3; i++) {
        dp__gate_init(&team->workers[i].gate);
    }
    dp__team_share(team, 9, count_part, counts);
    for (int i = 0; i < 9; i++) {
        CHECK_INT(atomic_load(&counts[i]), 1);
    }
    for (int i = 1; i < 3; i++) {
        CHECK(!dp__team_claim(&team->workers[i], DP__OWES_A_SHARE));
    }
    free(team);
}

TEST(every_part_is_done_once_whatever_their_number)
{
    static atomic_int counts[40];
    dp_ctx *ctx = open_team(4, 3);
    for (int parts = 1; parts <= 40; parts++) {
        for (int i = 0; i < 40; i++) {
            atomic_store(&counts[i], 0);
        }
        ctx->host.parallel(&ctx->host, parts, count_part, counts);
        for (int i = 0; i < 40; i++) {
            CHECK_INT(atomic_load(&counts[i]), i < parts);
        }
    }
    dp_close(ctx);
}

/* Each part of the bytes begins at a cache line, where lines begin at elements; none is left out,
   and no two parts differ by more than a line, but for what lies before the first one and behind
   the last. */
static void check_cuts(uintptr_t base, size_t element, size_t bytes, size_t parts)
{
    bool at_lines = base % element == 0;
    size_t least = bytes, most = 0, last = 0;
    CHECK_INT(dp__cpu_cut((const void *)base, element, bytes, 0, parts), 0);
    for (size_t part = 1; part <= parts; part++) {
        size_t cut = dp__cpu_cut((const void *)base, element, bytes, part, parts);
        CHECK(cut >= last && cut <= bytes && cut % element == 0);
        CHECK(cut == bytes || cut == 0 || ((at_lines ? base : 0) + cut) % 64 == 0);
        least = cut - last < least ? cut - last : least;
        most = cut - last > most ? cut - last : most;
        last = cut;
    }
    CHECK_INT(last, bytes);
    CHECK(most - least <= 64 + 64 + 64 || bytes < 64 * parts);
}

TEST(parts_of_memory_begin_at_lines)
{
    static const size_t elements[] = {1, 2, 4, 8}, counts[] = {0, 1, 7, 63, 64, 65, 1000, 12345};
    for (uintptr_t base = 4096; base < 4096 + 64; base++) {
        for (size_t i = 0; i < 4 * 8; i++) {
            for (size_t parts = 1; parts <= 9; parts++) {
                check_cuts(base, elements[i % 4], elements[i % 4] * counts[i / 4], parts);
            }
        }
    }
}

/* Many rows are cut between rows, few long ones between columns. */
static void check_copy_in_parts(int64_t rows, int64_t cols)
{
    enum { MOST = 400 };
    static _Alignas(64) float from[2 * MOST], to[MOST];
    int writes[MOST] = {0};
    const int64_t shape[] = {rows, cols}, out[] = {cols, 1}, in[] = {2 * cols, 1};
    const dp_kernel_args args = {.kernel = DP_KERNEL_COPY,
                                 .dtype = DP_F32,
                                 .count = (size_t)(rows * cols),
                                 .out = (void *const[]){to},
                                 .in = (const void *const[]){from},
                                 .ndim = 2,
                                 .shape = shape,
                                 .out_stride = out,
                                 .in_stride = in};
    for (int i = 0; i < 2 * MOST; i++) {
        from[i] = 1;
    }
    for (size_t part = 0; part < 3; part++) {
        memset(to, 0, sizeof to);
        dp__cpu_copy(&args, part, 3);
        for (int i = 0; i < MOST; i++) {
            writes[i] += to[i] > 0;
        }
    }
    for (int i = 0; i < MOST; i++) {
        CHECK_INT(writes[i], i < rows * cols);
    }
}

TEST(every_element_is_copied_in_one_part)
{
    check_copy_in_parts(40, 7);
    check_copy_in_parts(2, 100);
    check_copy_in_parts(23, 17);
    check_copy_in_parts(1, 1);
}

/* Small work is not shared out, and no piece is smaller than what a hand-over is worth. */
static int threads_of_tests;

static int threads_wanted(const dp_host *host)
{
    (void)host;
    return threads_of_tests;
}

TEST(work_is_cut_into_slices_that_are_worth_it)
{
    const dp_host host = {.size = sizeof host, .thread_count = threads_wanted};
    const size_t slice = DP__CPU_SLICE_BYTES;
    for (threads_of_tests = 1; threads_of_tests <= 5; threads_of_tests++) {
        int most = threads_of_tests == 1 ? 1 : threads_of_tests * DP__CPU_SLICES_A_THREAD;
        CHECK_INT(dp__cpu_count_slices(&host, 0), 1);
        CHECK_INT(dp__cpu_count_slices(&host, slice), 1);
        CHECK_INT(dp__cpu_count_slices(&host, 2 * slice - 1), 1);
        CHECK_INT(dp__cpu_count_slices(&host, 2 * slice), most < 2 ? most : 2);
        CHECK_INT(dp__cpu_count_slices(&host, 4 * slice - 1), most < 3 ? most : 3);
        CHECK_INT(dp__cpu_count_slices(&host, 1000 * slice), most);
    }
}

/* Collectives that move bytes are shared out by all that they move: every rank's to every rank. */
static int slices_of_tests;

static void count_slices(const dp_host *host, int part_count, void (*fn)(int part, void *user),
                         void *user)
{
    (void)host;
    slices_of_tests = part_count;
    for (int part = 0; part < part_count; part++) {
        fn(part, user);
    }
}

static dp_status run_verb(dp_comm *comm, dp_verb verb, const dp_part *parts, size_t count, int root)
{
    return comm->ops->run(
        comm, &(dp_coll_call){
                  .verb = verb, .local = parts, .count = count, .dtype = DP_U8, .root = root});
}

TEST(moves_are_shared_out_by_what_they_move)
{
    enum { RANKS = 3, EACH = DP__CPU_SLICE_BYTES / 4 };
    char(*send)[RANKS * EACH] = test_room(RANKS * sizeof *send);
    char(*recv)[RANKS * EACH] = test_room(RANKS * sizeof *recv);
    const dp_host host = {.size = sizeof host,
                          .alloc = alloc_for_tests,
                          .free = free_for_tests,
                          .parallel = count_slices,
                          .thread_count = threads_wanted};
    const dp_comm_config config = {
        .local_count = RANKS, .rank_count = RANKS, .host_memory = true, .timeout_ms = 1000};
    dp_part parts[RANKS];
    dp_comm *comm = NULL;
    threads_of_tests = 2;
    CHECK_OK(dp_cpu_coll()->open(&host, &config, &comm));
    for (int r = 0; r < RANKS; r++) {
        memset(send[r], r + 1, sizeof send[r]);
        parts[r] = (dp_part){send[r], recv[r], NULL};
    }
    slices_of_tests = 1;
    CHECK_OK(run_verb(comm, DP_BROADCAST, parts, EACH, 1)); /* 3 / 4 of a slice */
    CHECK_INT(slices_of_tests, 1);
    CHECK_INT(recv[2][EACH - 1], 2);
    CHECK_OK(run_verb(comm, DP_ALL_GATHER, parts, EACH, 0)); /* 9 / 4 */
    CHECK_INT(slices_of_tests, 2);
    CHECK_INT(recv[1][3 * EACH - 1], 3);
    slices_of_tests = 1;
    CHECK_OK(run_verb(comm, DP_ALL_TO_ALL, parts, EACH, 0));
    CHECK_INT(slices_of_tests, 2);
    CHECK_INT(recv[1][EACH - 1], 1);
    CHECK_OK(run_verb(comm, DP_BROADCAST, parts, 3 * EACH, 0)); /* 9 / 4 again */
    CHECK_INT(slices_of_tests, 2);
    CHECK_INT(recv[2][3 * EACH - 1], 1);
    comm->ops->close(comm);
}

/* Whichever block is refused, those before it are given back; and all are at the end. */
TEST(a_communicator_gives_back_what_it_took)
{
    const dp_host host = {.size = sizeof host, .alloc = alloc_for_tests, .free = free_for_tests};
    const dp_comm_config config = {.local_count = 2, .rank_count = 2, .host_memory = true};
    dp_comm *comm = NULL;
    for (int block = 1; block <= 3; block++) {
        fail_of_tests = block;
        CHECK_ERROR(dp_cpu_coll()->open(&host, &config, &comm), DP_ERR_NO_MEMORY,
                    "cpu: no memory for a communicator");
        CHECK(comm == NULL);
        CHECK_INT(blocks_of_tests, 0);
    }
    CHECK_INT(fail_of_tests, 0);
    CHECK_OK(dp_cpu_coll()->open(&host, &config, &comm));
    CHECK_INT(blocks_of_tests, 3);
    comm->ops->close(comm);
    CHECK_INT(blocks_of_tests, 0);
}

TEST(a_device_gives_back_what_it_took)
{
    const dp_host host = {.size = sizeof host, .alloc = alloc_for_tests, .free = free_for_tests};
    dp_dev *dev = NULL;
    dp_stream *stream = NULL;
    dp_event *event = NULL;
    void *data = NULL;
    CHECK_OK(dp_cpu()->open(&host, 0, &dev));
    CHECK_OK(dp_cpu()->stream_create(dev, 0, &stream));
    CHECK_OK(dp_cpu()->event_create(dev, &event));
    CHECK_OK(dp_cpu()->alloc(dev, 100, &data));
    CHECK(stream->dev == dev && event->dev == dev);
    CHECK_INT(blocks_of_tests, 4);
    dp_cpu()->free(dev, data, 100);
    CHECK_INT(blocks_of_tests, 3);
    dp_cpu()->event_destroy(event);
    CHECK_INT(blocks_of_tests, 2);
    dp_cpu()->stream_destroy(stream);
    CHECK_INT(blocks_of_tests, 1);
    dp_cpu()->close(dev);
    CHECK_INT(blocks_of_tests, 0);
}

/* ---- what makes it fast: the same numbers come without it ------------------------------------ */

/* Whatever the strides of dims of one are, and in whatever order the others come. */
TEST(a_dense_block_is_copied_in_one_row)
{
    const int64_t shape[] = {1, 4, 1, 3, 5, 1}, out[] = {7, 15, 999, 1, 3, 0},
                  in[] = {0, 15, 2, 1, 3, 99};
    const dp_kernel_args args = {.kernel = DP_KERNEL_COPY,
                                 .dtype = DP_F32,
                                 .count = 60,
                                 .ndim = 6,
                                 .shape = shape,
                                 .out_stride = out,
                                 .in_stride = in};
    dp__cpu_plan plan;
    dp__cpu_plan_make(&args, &plan);
    CHECK_INT(plan.ndim, 2);
    CHECK_INT(plan.dims[0].count, 1);
    CHECK_INT(plan.dims[1].count, 60);
    CHECK_INT(plan.dims[1].out, 4);
    CHECK_INT(plan.dims[1].in, 4);
}

/* Columns that lie together in the input are turned in squares. */
TEST(rows_are_along_what_is_dense_in_the_input)
{
    const int64_t shape[] = {2, 3, 4}, out[] = {12, 4, 1}, in[] = {1, 2, 6};
    const dp_kernel_args args = {.kernel = DP_KERNEL_COPY,
                                 .dtype = DP_F32,
                                 .count = 24,
                                 .ndim = 3,
                                 .shape = shape,
                                 .out_stride = out,
                                 .in_stride = in};
    dp__cpu_plan plan;
    dp__cpu_plan_make(&args, &plan);
    dp__cpu_plan_turn(&plan);
    CHECK_INT(plan.ndim, 4);
    CHECK_INT(plan.dims[2].count, 2);
    CHECK_INT(plan.dims[2].in, 4);
    CHECK_INT(plan.dims[3].count, 4);
    CHECK_INT(plan.dims[3].out, 4);
}

/* A set that ends where it began leaves all to the others. */
static const float added[2][3] = {{1, 5, 3}, {4, 2, 6}};
static int calls_of_tests;

static size_t leave_range(const dp_kernel_args *args, dp_op op, size_t at, size_t end)
{
    (void)op;
    calls_of_tests += args->in[0] == added[0] && at == 0 && end == sizeof added[0];
    return at;
}

static size_t leave_elements(void *out, const void *in, size_t at, size_t end)
{
    (void)out;
    calls_of_tests += in == added[0] && at == 0 && end == 3;
    return at;
}

TEST(the_widest_set_of_instructions_comes_first)
{
    const dp__simd set = {.reduce = {[DP_F32] = leave_range},
                          .axpby = {[DP_F32] = leave_range},
                          .convert = {[DP_F64] = {[DP_F32] = leave_elements}}};
    const void *const in[] = {added[0], added[1]};
    float got[3];
    double wide[3];
    void *const out[] = {got};
    const dp_kernel_args args = {.dtype = DP_F32,
                                 .in_dtype = DP_F32,
                                 .count = 3,
                                 .out = out,
                                 .in = in,
                                 .out_count = 1,
                                 .in_count = 2,
                                 .alpha = 1,
                                 .beta = 1};
    dp__cpu_reduce_range(&set, &args, DP_OP_MAX, 0, sizeof got);
    CHECK_INT(calls_of_tests, 1);
    CHECK_BYTES(got, ((float[]){4, 5, 6}), sizeof got);
    dp__cpu_axpby(&set, &args, 0, sizeof got);
    CHECK_INT(calls_of_tests, 2);
    CHECK_BYTES(got, ((float[]){5, 7, 9}), sizeof got);
    dp__cpu_cast(&set, DP_F64, wide, DP_F32, added[0], 3);
    CHECK_INT(calls_of_tests, 3);
    CHECK_BYTES(wide, ((double[]){1, 5, 3}), sizeof wide);
}

/* ---- the courier ----------------------------------------------------------------------------- */

static atomic_int tasks;

static void run_task(void *user)
{
    dp__courier **courier = user;
    atomic_fetch_add(&tasks, 1);
    if (atomic_load(&tasks) > 1) {
        dp__courier_report(*courier);
    }
}

static void *alloc_nothing(const dp_host *host, size_t bytes, size_t align)
{
    (void)host, (void)bytes, (void)align;
    return NULL;
}

static const dp__lookout no_lookout;

/* It goes once by itself, and once after each call; it tells who waits. */
static void call_courier(bool spin)
{
    const dp_host host = {.size = sizeof host, .alloc = alloc_for_tests, .free = free_for_tests};
    static dp__courier *courier;
    atomic_store(&tasks, 0);
    CHECK_OK(dp__courier_open(&host, spin, run_task, &courier, &no_lookout, &courier));
    CHECK_INT(courier->spin, spin);
    while (atomic_load(&tasks) < 1) {
        sched_yield();
    }
    for (int calls = 1; calls <= 20; calls++) {
        unsigned seen = dp__courier_ticket(courier);
        dp__courier_wake(courier);
        dp__courier_await(courier, seen);
        CHECK_INT(atomic_load(&tasks), calls + 1);
    }
    dp__courier_close(&host, courier);
}

TEST(a_courier_comes_when_called)
{
    for (int i = 0; i < 2 * 2; i++) {
        fill_of_tests = fills_of_tests[i / 2];
        call_courier(i % 2);
    }
    CHECK_INT(blocks_of_tests, 0);
}

TEST(a_courier_needs_memory)
{
    const dp_host host = {.size = sizeof host, .alloc = alloc_nothing, .free = free_for_tests};
    dp__courier *courier = NULL;
    CHECK_ERROR(dp__courier_open(&host, false, run_task, NULL, &no_lookout, &courier),
                DP_ERR_NO_MEMORY, "no memory for a courier");
    CHECK(courier == NULL);
}

/* Nobody but root may always start one more. The number of threads is allowed to grow until all
   three find room, so that each of them is once the first without. */
TEST(threads_that_cannot_be_started)
{
    const dp_host host = {.size = sizeof host, .alloc = alloc_for_tests, .free = free_for_tests};
    struct rlimit some, limit;
    dp__team *team = NULL;
    dp__courier *courier = NULL;
    int refused = 0;
    CHECK(geteuid() != 0 || setuid(65534) == 0);
    CHECK_INT(getrlimit(RLIMIT_NPROC, &limit), 0);
    some = limit;
    some.rlim_cur = 0;
    CHECK_INT(setrlimit(RLIMIT_NPROC, &some), 0);
    dp_status opened = dp__courier_open(&host, false, run_task, &courier, &no_lookout, &courier);
    dp_status status = dp__team_open(&host, 4, 4, &team);
    if (opened == DP_OK && status == DP_OK) {
        SKIP("the number of threads cannot be limited here");
    }
    CHECK_INT(opened, DP_ERR_NO_MEMORY);
    CHECK(courier == NULL);
    while (status != DP_OK && some.rlim_cur < limit.rlim_cur) {
        CHECK_ERROR(status, DP_ERR_NO_MEMORY, "dp_open: cannot start worker ");
        CHECK_INT(blocks_of_tests, 0);
        refused++;
        some.rlim_cur++;
        CHECK_INT(setrlimit(RLIMIT_NPROC, &some), 0);
        status = dp__team_open(&host, 4, 4, &team);
    }
    CHECK(refused >= 3);
    CHECK_OK(status);
    dp__team_close(team);
    free_for_tests(&host, team);
    CHECK_INT(setrlimit(RLIMIT_NPROC, &limit), 0); /* a sanitizer looks back with one more */
}

/* ---- how many cores there are ---------------------------------------------------------------- */

/* Whatever cores this machine has: no two processes differ by more than one, the first have more,
   nobody goes without. */
TEST(cores_are_divided_among_processes)
{
    for (int cores = 1; cores <= 9; cores++) {
        for (int count = 1; count <= 9; count++) {
            int sum = 0;
            for (int place = 0; place < count; place++) {
                int own = dp__core_share(cores, (dp__share){place, count});
                CHECK(own == cores / count || own == cores / count + 1);
                CHECK(place == 0 || own <= dp__core_share(cores, (dp__share){place - 1, count}));
                sum += own;
            }
            CHECK_INT(sum, cores > count ? cores : count);
        }
    }
}

#if defined(__linux__)
TEST(a_quota_is_rounded_up_to_cores)
{
    CHECK_INT(dp__quota_cores("200000 100000"), 2);
    CHECK_INT(dp__quota_cores("150000 100000\n"), 2);
    CHECK_INT(dp__quota_cores("100001 100000"), 2);
    CHECK_INT(dp__quota_cores("1000 100000"), 1);
    CHECK_INT(dp__quota_cores("400000\n50000\n"), 8);
}

TEST(malformed_quotas_limit_nothing)
{
    static const char *const texts[] = {"",
                                        "max 100000",
                                        "max",
                                        "-1\n100000\n",
                                        "100000",
                                        "100000 ",
                                        "100000 x",
                                        "0 100000",
                                        "100000 0",
                                        "100000 -5",
                                        "12x 100000",
                                        "\xff\xfe 1",
                                        "2147483647 1", /* more than an int counts */
                                        "9223372036854775807 1",
                                        "99999999999999999999999999 1"};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        CHECK_INT(dp__quota_cores(texts[i]), 0);
    }
    CHECK_INT(dp__quota_cores("1 99999999999999999999999999"), 1);
    CHECK_INT(dp__quota_cores("2147483646 1"), INT_MAX - 1);
}

static void check_group(const char *lines, const char *controller, const char *want)
{
    int bytes = 0;
    char path[64] = "";
    const char *got = dp__quota_group(lines, controller, &bytes);
    CHECK_INT(got != NULL, want != NULL);
    if (want != NULL) {
        snprintf(path, sizeof path, "%.*s", bytes, got);
        CHECK_STR(path, want);
    }
}

TEST(groups_are_found_by_their_controller)
{
    const char *both = "12:cpuset:/a\n4:cpuacct,cpu,x:/b/c\n1:name=systemd:/:d\n0::/e\n";
    check_group(both, "cpu", "/b/c");
    check_group(both, "cpuset", "/a");
    check_group(both, "name=systemd", "/:d");
    check_group(both, "", "/e");
    check_group(both, "cp", NULL);
    check_group("0::/", "cpu", NULL);
    check_group("0::/", "", "/");
    check_group("3:cpu:/last", "cpu", "/last");
    check_group("3:cpu:/", "", NULL);
    check_group("", "", NULL);
    check_group("\n\n::\n", "", "");
    check_group("cpu\n7\n7:cpu\n:", "cpu", NULL);
}

static void put(const char *root, const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    for (char *at = path + strlen(root) + 1; (at = strchr(at, '/')) != NULL; *at++ = '/') {
        *at = '\0';
        mkdir(path, 0700);
    }
    FILE *file = fopen(path, "w");
    CHECK(file != NULL);
    CHECK(fputs(text, file) >= 0);
    CHECK_INT(fclose(file), 0);
}

/* A directory that stands for /proc/self and for the mount, both. */
TEST(the_least_quota_of_a_group_and_those_around_it_counts)
{
    char root[] = P_tmpdir "/dp-quota-XXXXXX", remove[sizeof root + 8];
    CHECK(mkdtemp(root) != NULL);
    CHECK_INT(dp__quota_count(root, root), 0);
    put(root, "cgroup", "2:cpu,cpuacct:/out/in\n0::/out/in/none\n");
    CHECK_INT(dp__quota_count(root, root), 0);
    put(root, "cpu/cpu.cfs_quota_us", "-1\n");
    put(root, "cpu/cpu.cfs_period_us", "100000\n");
    CHECK_INT(dp__quota_count(root, root), 0);
    put(root, "cpu/out/cpu.cfs_quota_us", "800000\n");
    put(root, "cpu/out/cpu.cfs_period_us", "100000\n");
    CHECK_INT(dp__quota_count(root, root), 8);
    put(root, "out/in/cpu.max", "max 100000\n");
    CHECK_INT(dp__quota_count(root, root), 8);
    put(root, "out/in/cpu.max", "650000 100000\n");
    CHECK_INT(dp__quota_count(root, root), 7);
    put(root, "out/cpu.max", "900000 100000\n");
    CHECK_INT(dp__quota_count(root, root), 7);
    put(root, "cpu/out/in/cpu.cfs_quota_us", "250000\n");
    put(root, "cpu/out/in/cpu.cfs_period_us", "100000\n");
    CHECK_INT(dp__quota_count(root, root), 3);
    put(root, "cpu.max", "100000 100000\n");
    CHECK_INT(dp__quota_count(root, root), 1);
    put(root, "cgroup", "2:memory:/out/in\n"); /* in no group that has a quota */
    CHECK_INT(dp__quota_count(root, root), 0);
    snprintf(remove, sizeof remove, "rm -r %s", root);
    CHECK_INT(system(remove), 0);
}

TEST(a_file_that_is_not_there_reads_as_empty)
{
    char text[8] = "1 1";
    CHECK(!dp__quota_read("/proc/self", "no such file", text, sizeof text));
    CHECK_STR(text, "");
}

TEST(a_path_that_is_too_long_limits_nothing)
{
    static char lines[3000];
    memset(lines, 'x', sizeof lines - 1);
    memcpy(lines, "0::/", 4);
    CHECK_INT(dp__quota_least(lines, "", "/sys/fs/cgroup"), 0);
}
#endif
