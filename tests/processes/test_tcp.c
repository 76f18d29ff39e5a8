/* test_tcp.c - collectives and messages of processes that have nothing but connections over TCP:
   what they compute, on one machine and on machines that are only said to be several, and who is
   named when something goes wrong. */

#include <arpa/inet.h>
#include <poll.h>
#include <stdatomic.h>
#include <sys/resource.h>
#include "meeting.h"
#include "mesh_cases.h"
#include "process.h"

/* ---- worlds ---------------------------------------------------------------------------------- */

static void (*mesh_body)(void);

static const dp_coll_ops *const *tcp_colls(void)
{
    static const dp_coll_ops *colls[2];
    colls[0] = dp_tcp_coll();
    return colls;
}

static bool launched;   /* as by dprun: there are connections among them already */
static int connections; /* to each process; 0: as many as the library has */

static void set(const char *name, const char *text)
{
    CHECK_INT(setenv(name, text, 1), 0);
}

static void set_number(const char *name, int n)
{
    char text[16];
    snprintf(text, sizeof text, "%d", n);
    set(name, text);
}

static void be_launched(const meeting *m)
{
    char address[40];
    snprintf(address, sizeof address, "@test-tcp-%d", (int)getppid());
    set("DP_LAUNCH", "dp");
    set("DP_ADDR", address);
    set("DP_SECRET", "of this test");
    set_number("DP_PROCESS", m->process);
    set_number("DP_PROCESS_COUNT", m->process_count);
    set_number("DP_LOCAL_PROCESS", m->process);
    set_number("DP_LOCAL_PROCESS_COUNT", m->process_count);
}

/* What all processes of a test are opened with. Machines find each other inside this one. */
static void enter(meeting *m)
{
    mesh_process = m->process;
    mesh_process_count = m->process_count;
    mesh_config = config_of(m, 1);
    mesh_config.colls = tcp_colls();
    if (meeting_machines != NULL)
        set("DP_INTERFACE", "lo");
    if (connections > 0)
        set_number("DP_CONNECTIONS", connections);
    if (launched) {
        mesh_config.bootstrap = (dp_bootstrap){0};
        be_launched(m);
    }
}

static void run_mesh_body(meeting *m)
{
    enter(m);
    mesh_body();
}

/* Run `body` in a process for each letter of `machines`. */
static void on_mesh(const char *machines, void (*body)(void))
{
    mesh_body = body;
    on_machines(machines, run_mesh_body);
}

static void all_cases(void)
{
    for (size_t i = 0; i < MESH_CASES; i++)
        mesh_cases[i].run();
}

TEST_SLOW(two_machines_add_up, 60)
{
    mesh_many = 1200011 / (size_t)test_stride();
    on_mesh("ab", all_cases);
}

TEST_SLOW(three_machines_add_up, 60)
{
    mesh_many = 300007 / (size_t)test_stride();
    on_mesh("abc", all_cases);
}

static void shares_of_four(void)
{
    check_shared("aabb", 2);
    check_shared("abab", 1);
    check_shared("abbb", 1);
    CHECK_INT(setenv("DP_MACHINE", machine_of("aabb"), 1), 0);
    all_cases();
}

TEST_SLOW(machines_of_two_processes_share_memory, 60)
{
    mesh_many = 300007 / (size_t)test_stride();
    on_mesh("aabb", shares_of_four);
}

/* The last group has one process. */
static void shares_of_seven(void)
{
    check_shared("aaaabbb", 4);
    check_shared("aabbbbc", 2);
    halves_of_several_pieces();
    ranks_are_added_in_one_tree();
}

TEST_SLOW(machines_of_several_groups_share_memory, 60)
{
    mesh_many = 100003 / (size_t)test_stride();
    on_mesh("aabbbbc", shares_of_seven);
}

/* Pieces are larger than those of few processes, in groups of 64 and 8. */
enum { PROCESSES = 72, FLOATS = 300007 };

static void hear_of_groups(const dp_log_record *record, void *user)
{
    bool *shared = user;
    *shared = *shared || strstr(record->text, "in groups of 64") != NULL;
}

static dp_status one_large_sum(void *user)
{
    static float data[FLOATS];
    bool shared = false;
    dp_config config = {.device_count = 1,
                        .timeout_ms = (int)(20000 * test_timeout_scale()),
                        .log = {hear_of_groups, &shared, DP_LOG_INFO}};
    dp_part part = {.send = data, .recv = data};
    dp_ctx *ctx;
    const char *name = getenv("DP_PROCESS");
    int process = name != NULL ? atoi(name) : -1;
    (void)user;
    CHECK_INT(setenv("DP_MACHINE", process < 64 ? "a" : "b", 1), 0);
    CHECK_INT(setenv("DP_INTERFACE", "lo", 1), 0);
    CHECK_OK(dp_open(&config, &ctx));
    for (int i = 0; i < FLOATS; i++)
        data[i] = (float)(process + i % 7);
    CHECK_OK(dp_all_reduce(ctx, &part, FLOATS, DP_F32, DP_OP_SUM));
    for (int i = 0; i < FLOATS; i++)
        CHECK((int)data[i] == PROCESSES * (PROCESSES - 1) / 2 + PROCESSES * (i % 7));
    for (int i = 0; i < FLOATS; i++)
        data[i] = (float)(process + i % 11);
    CHECK_OK(dp_broadcast(ctx, &part, FLOATS, DP_F32, PROCESSES - 1));
    for (int i = 0; i < FLOATS; i++)
        CHECK((int)data[i] == PROCESSES - 1 + i % 11);
    CHECK(shared);
    dp_close(ctx);
    return DP_OK;
}

TEST_SLOW(many_and_large_pieces_add_up, 120)
{
    CHECK_OK(dp_spawn(PROCESSES, one_large_sum, NULL));
}

/* By name, on one machine. */
TEST_SLOW(processes_of_one_machine_add_up, 60)
{
    mesh_many = 300007 / (size_t)test_stride();
    on_mesh("aaa", all_cases);
}

/* ---- several connections to each process ----------------------------------------------------- */

enum { STRIPE = 16 << 10, MOST_CONNECTIONS = 64 };

TEST_SLOW(several_connections_add_up, 120)
{
    static const int counts[] = {2, 3, MOST_CONNECTIONS};
    mesh_many = 300007 / (size_t)test_stride();
    for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
        connections = counts[i];
        on_mesh("ab", all_cases);
        on_mesh("abb", all_cases);
    }
}

static unsigned char byte_of_block(int from, int to, size_t i)
{
    return (unsigned char)((size_t)(from * 31 + to * 7) + i * 13 + i / STRIPE);
}

/* A block of so many bytes goes from each process to each, through one load and nothing else. */
static void exchange_blocks(dp_ctx *ctx, size_t bytes)
{
    size_t all = bytes * (size_t)mesh_process_count;
    unsigned char *send = malloc(all + 1), *recv = calloc(all + 1, 1);
    const dp_part part = {.send = send, .recv = recv};
    CHECK(send != NULL && recv != NULL);
    for (size_t i = 0; i < all; i++)
        send[i] = byte_of_block(mesh_process, (int)(i / bytes), i % bytes);
    recv[all] = 77;
    CHECK_OK(dp_all_to_all(ctx, &part, bytes, DP_U8));
    for (size_t i = 0; i < all; i++)
        CHECK_INT(recv[i], byte_of_block((int)(i / bytes), mesh_process, i % bytes));
    CHECK_INT(recv[all], 77);
    free(send);
    free(recv);
}

/* Some stripes are empty, some have a byte, and the last one may be short. */
static void blocks_of_all_sizes(void)
{
    static const size_t around[] = {0, 1, STRIPE, 2 * STRIPE, 3 * STRIPE, 4 * STRIPE, 9 * STRIPE};
    dp_ctx *ctx = mesh_open(1, 0), *group = NULL;
    CHECK_OK(dp_open_group(ctx, 0, NULL, &group));
    for (size_t i = 0; i < sizeof around / sizeof around[0]; i++)
        for (size_t more = 0; more < 3; more++)
            exchange_blocks(i % 2 == 0 ? ctx : group, around[i] + more);
    dp_close(group);
    dp_close(ctx);
}

TEST_SLOW(stripes_of_all_sizes_arrive, 60)
{
    for (connections = 1; connections <= 5; connections++)
        on_mesh("abc", blocks_of_all_sizes);
}

/* Holds what a process says of the connections that it has. */
typedef struct said_of_connections {
    char many[80], differ[160];
} said_of_connections;

static void hear_of_connections(const dp_log_record *record, void *user)
{
    said_of_connections *spoken = user;
    if (strstr(record->text, "connections to each process") != NULL)
        snprintf(spoken->many, sizeof spoken->many, "%.79s", record->text);
    if (strstr(record->text, "DP_CONNECTIONS") != NULL && record->level == DP_LOG_WARN)
        snprintf(spoken->differ, sizeof spoken->differ, "%.159s", record->text);
}

static const char *wanted[3]; /* by each process; NULL: it does not say */

static void enter_with_wishes(meeting *m, said_of_connections *spoken)
{
    *spoken = (said_of_connections){"", ""};
    enter(m);
    unsetenv("DP_CONNECTIONS");
    if (wanted[m->process] != NULL)
        set("DP_CONNECTIONS", wanted[m->process]);
    mesh_config.log = (dp_log){hear_of_connections, spoken, DP_LOG_INFO};
}

/* Returns how many files a context has opened, which are two lanes' connections and the rest. */
static int files_of_a_context(meeting *m, said_of_connections *spoken)
{
    enter_with_wishes(m, spoken);
    int before = open_files();
    dp_ctx *ctx = mesh_open(1, 0);
    int files = open_files() - before;
    CHECK_INT(ones_of(ctx), m->process_count);
    exchange_blocks(ctx, 5 * STRIPE);
    dp_close(ctx);
    CHECK_INT(open_files(), before);
    return files;
}

static void first_one_counts(meeting *m)
{
    static const char *const wishes[][3] = {
        {NULL, NULL, NULL}, {"3", "3", "3"}, {"3", "2", NULL}, {NULL, NULL, "4"}};
    said_of_connections spoken[4];
    int files[4], more = 2 * 2 * (m->process_count - 1);
    for (int i = 0; i < 4; i++) {
        memcpy(wanted, wishes[i], sizeof wanted);
        files[i] = files_of_a_context(m, &spoken[i]);
    }
    CHECK_INT(files[1] - files[0], more);
    CHECK_INT(files[2] - files[0], more);
    CHECK_INT(files[3] - files[0], 0);
    CHECK_STR(spoken[0].many, "");
    CHECK_SAYS(spoken[1].many, "3 connections to each process");
    CHECK_STR(spoken[0].differ, "");
    CHECK_STR(spoken[1].differ, "");
    if (m->process == 1)
        CHECK_SAYS(spoken[2].differ, "DP_CONNECTIONS is 2 in process 1 and 3 in process 0: the job "
                                     "has 3");
    else
        CHECK_STR(spoken[2].differ, "");
    if (m->process == 2)
        CHECK_SAYS(spoken[3].differ,
                   "DP_CONNECTIONS is 4 in process 2 and 1 in process 0, which has "
                   "not set it: the job has 1");
}

TEST_SLOW(process_0_says_how_many_connections_there_are, 60)
{
    for (int way = 0; way < 2; way++) {
        launched = way == 1;
        on_machines("abc", first_one_counts);
    }
}

static void number_is_refused(meeting *m)
{
    said_of_connections spoken;
    dp_ctx *ctx = NULL;
    const char *bad = wanted[m->process] != NULL ? wanted[m->process] : wanted[1];
    char quoted[120];
    enter_with_wishes(m, &spoken);
    snprintf(quoted, sizeof quoted, "DP_CONNECTIONS is '%s', not a whole number from 1 to 64", bad);
    CHECK_ERROR(dp_open(&mesh_config, &ctx), wanted[m->process] ? DP_ERR_INVALID : DP_ERR_REMOTE,
                quoted);
    CHECK(ctx == NULL);
}

TEST(numbers_of_connections_that_are_none)
{
    static const char *const bad[] = {"0",  "-1", "65",  "many",
                                      "2x", " 2", "1.5", "18446744073709551617"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        launched = i % 2 == 1;
        wanted[1] = bad[i];
        meeting_machines = "abc";
        in_processes(3, number_is_refused);
    }
}

/* ---- messages -------------------------------------------------------------------------------- */

TEST_SLOW(messages_between_machines, 60)
{
    on_mesh("abc", check_messages);
    on_mesh("aba", check_messages);
}

/* ---- what goes wrong ------------------------------------------------------------------------- */

static dp_ctx *open_for_an_end(meeting *m)
{
    enter(m);
    return mesh_open(1, END_TIMEOUT_MS);
}

TEST_SLOW(ends_are_the_same_over_tcp, 60)
{
    check_ends_over(open_for_an_end);
}

TEST_SLOW(ends_are_the_same_between_machines, 60)
{
    launched = true;
    meeting_machines = "abc";
    check_ends_over(open_for_an_end);
}

/* ---- who dies, or stops ---------------------------------------------------------------------- */

enum { MUCH = 300000 };

static dp_status (*act)(dp_ctx *ctx); /* in all processes, again and again, until it fails */
static int sent_signal;
static const char *says;

static dp_part part_of_much(void)
{
    static float data[MUCH];
    return (dp_part){.send = data, .recv = data};
}

static dp_status sum_much(dp_ctx *ctx)
{
    const dp_part part = part_of_much();
    return dp_all_reduce(ctx, &part, MUCH, DP_F32, DP_OP_MAX);
}

static dp_status give_much(dp_ctx *ctx)
{
    const dp_part part = part_of_much();
    return dp_broadcast(ctx, &part, MUCH, DP_F32, 1);
}

static dp_tensor tensor_of_much(void)
{
    return dp_wrap(part_of_much().recv, DP_F32, DP_SHAPE(MUCH));
}

/* Process 1 sends to the others. */
static dp_status send_much(dp_ctx *ctx)
{
    const dp_tensor tensor = tensor_of_much();
    dp_status status = DP_OK;
    for (int p = 0; p < mesh_process_count && status == DP_OK; p++)
        if (p != 1 && mesh_process == 1)
            status = dp_send(ctx, &tensor, p, 0);
    return mesh_process == 1 ? status : dp_recv(ctx, &tensor, 1, 0);
}

/* One that has nothing to do with the job, and is there for longer than its parent. */
static void leave_a_child(void)
{
    pid_t child = fork();
    CHECK(child >= 0);
    if (child > 0)
        return;
    rest(2 * END_TIMEOUT_MS);
    _exit(EXIT_SUCCESS);
}

static bool has_a_child;

static atomic_int *through; /* with what they have to say: all see it */

/* Who ends sooner would be another reason for the others. Until then letters are passed on. */
static void leave_with_the_others(dp_ctx *ctx)
{
    atomic_fetch_add(through, 1);
    for (int i = 0; i < 2000 && atomic_load(through) < 2; i++) {
        (void)!dp_wait(ctx);
        rest(10);
    }
    dp_close(ctx);
}

static void one_gets_a_signal(meeting *m)
{
    double start = now_ms();
    dp_status status = DP_OK;
    dp_ctx *ctx = open_for_an_end(m);
    if (has_a_child && m->process == 1)
        leave_a_child();
    wait_for_all(m);
    signal_soon(m, sent_signal);
    while (status == DP_OK) {
        start = now_ms();
        status = act(ctx);
    }
    check_named(ctx, status, start, LATE_MS, 1, says);
    leave_with_the_others(ctx);
}

/* On one machine; on several, as a launcher starts them, or by a bootstrap of the program's. */
static void each_way_of_meeting(int signal, dp_status (*what)(dp_ctx *ctx))
{
    uint64_t state = test_seed();
    sent_signal = signal;
    says = signal == SIGSTOP ? "did not come within 2000 ms" : "has died";
    act = what;
    through = shared_memory(sizeof *through);
    for (int way = 0; way < 3; way++) {
        atomic_store(through, 0);
        launched = way == 1;
        meeting_machines = way == 0 ? NULL : "abc";
        moment = 1 + (int)(test_random(&state) % 30000);
        in_processes_but(3, 1, one_gets_a_signal);
    }
}

TEST_SLOW(who_dies_in_a_large_sum_is_named, 60)
{
    each_way_of_meeting(SIGKILL, sum_much);
}

TEST_SLOW(who_dies_and_has_several_connections_is_named, 60)
{
    connections = 3;
    each_way_of_meeting(SIGKILL, sum_much);
}

TEST_SLOW(who_stops_and_has_several_connections_is_named, 60)
{
    connections = 3;
    each_way_of_meeting(SIGSTOP, sum_much);
}

TEST_SLOW(who_dies_and_has_a_child_is_named, 60)
{
    has_a_child = true;
    each_way_of_meeting(SIGKILL, sum_much);
}

TEST_SLOW(who_dies_in_a_broadcast_is_named, 60)
{
    each_way_of_meeting(SIGKILL, give_much);
}

TEST_SLOW(who_dies_while_others_wait_for_its_message_is_named, 60)
{
    each_way_of_meeting(SIGKILL, send_much);
}

TEST_SLOW(who_stops_is_named, 60)
{
    each_way_of_meeting(SIGSTOP, sum_much);
}

static void one_between_stops(meeting *m)
{
    double start = now_ms();
    dp_status status = DP_OK;
    dp_ctx *ctx = open_for_an_end(m);
    float data[100] = {0};
    const dp_part part = {.send = data, .recv = data};
    wait_for_all(m);
    for (int i = 0; status == DP_OK; i++) {
        if (m->process == 2 && i == 5)
            raise(SIGSTOP);
        start = now_ms();
        status = dp_all_reduce(ctx, &part, 100, DP_F32, DP_OP_SUM);
    }
    check_named(ctx, status, start, LATE_MS, 2, "did not come within 2000 ms");
    leave_with_the_others(ctx);
}

/* Process 3 has news of 0 and 1 only through 2. */
TEST_SLOW(who_stops_between_others_is_named, 60)
{
    through = shared_memory(sizeof *through);
    meeting_machines = "abcd";
    launched = true;
    in_processes_but(4, 2, one_between_stops);
}

/* Process 2 stops for a little longer than the others wait for it. */
static void one_wakes_too_late(meeting *m)
{
    double start = now_ms();
    dp_status status = DP_OK;
    dp_ctx *ctx = open_for_an_end(m);
    float data[100] = {0};
    const dp_part part = {.send = data, .recv = data};
    wait_for_all(m);
    for (int i = 0; status == DP_OK; i++) {
        if (m->process == 2 && i == 5 && fork() == 0) {
            rest(END_TIMEOUT_MS + 500);
            kill(getppid(), SIGCONT);
            _exit(EXIT_SUCCESS);
        }
        if (m->process == 2 && i == 5)
            raise(SIGSTOP);
        start = now_ms();
        status = dp_all_reduce(ctx, &part, 100, DP_F32, DP_OP_SUM);
    }
    check_named(ctx, status, start, LATE_MS, 2, "did not answer for ");
    leave_with_the_others(ctx);
}

TEST_SLOW(who_wakes_up_too_late_is_named, 60)
{
    through = shared_memory(sizeof *through);
    meeting_machines = "abc";
    launched = true;
    in_processes(3, one_wakes_too_late);
}

/* Process 0 waits for a message of 1, which waits for one of 2, which takes part in nothing. */
static void wait_in_a_row(meeting *m)
{
    dp_ctx *ctx = open_for_an_end(m);
    int32_t word = 7;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    wait_for_all(m);
    if (m->process == 1)
        rest(500);
    double start = now_ms();
    if (m->process < 2) {
        dp_status status = dp_recv(ctx, &tensor, m->process + 1, 0);
        check_named(ctx, status, start, LATE_MS, 2, " did not come within 2000 ms, as rank 2 (");
        CHECK_SAYS(dp_last_error(), ") does not answer");
        atomic_fetch_add(through, 1);
    }
    while (atomic_load(through) < 2)
        rest(10);
    dp_close(ctx);
}

TEST_SLOW(who_is_waited_for_in_the_end_is_named, 60)
{
    through = shared_memory(sizeof *through);
    meeting_machines = "abc";
    launched = true;
    in_processes(3, wait_in_a_row);
}

/* ---- who does something else ----------------------------------------------------------------- */

static void each_other_call(meeting *m)
{
    enter(m);
    for (int kind = 0; kind < OTHER_CALLS; kind++)
        check_strays(kind, kind % 3 == 0);
    other_root();
}

TEST_SLOW(who_is_in_another_collective_is_named, 60)
{
    for (int way = 0; way < 3; way++) {
        launched = way == 1;
        meeting_machines = way == 0 ? NULL : "abb";
        in_processes(3, each_other_call);
    }
}

/* ---- messages and collectives ---------------------------------------------------------------- */

/* Both at once, and nothing is mixed up. */
enum { LARGEST = 10 << 20, KINDS = 5, ROUNDS = 2 };

static const size_t kind_bytes[KINDS] = {0, 1, 64, 65, LARGEST}; /* 64 travel with the offer */

static unsigned char byte_of(int from, int to, int kind, size_t i)
{
    return (unsigned char)((size_t)(from * 31 + to * 7 + kind) + i * 13);
}

/* Which bytes are looked at. */
static size_t stride_of(int kind)
{
    return kind_bytes[kind] > 1000 ? 997 : 1;
}

static dp_message message_of_kind(dp_scope *scope, int from, int to, int kind, bool receives)
{
    size_t bytes = kind_bytes[kind];
    unsigned char *data = dp_scope_alloc(scope, bytes + 1);
    CHECK(data != NULL);
    memset(data, 0, bytes);
    for (size_t i = 0; i < bytes && !receives; i += stride_of(kind))
        data[i] = byte_of(from, to, kind, i);
    data[bytes] = 77;
    return (dp_message){.tensor = dp_wrap(data, DP_U8, DP_SHAPE((int64_t)bytes)),
                        .peer = receives ? from : to,
                        .tag = kind,
                        .receives = receives};
}

static void check_message_of_kind(const dp_message *message, int from, int to, int kind)
{
    size_t bytes = kind_bytes[kind];
    const unsigned char *data = message->tensor.data;
    CHECK_INT(message->status, DP_OK);
    CHECK_INT(message->peer, from);
    for (size_t i = 0; i < bytes; i += stride_of(kind))
        CHECK_INT(data[i], byte_of(from, to, kind, i));
    CHECK_INT(data[bytes], 77);
}

static void collectives_meanwhile(dp_ctx *ctx, int rounds)
{
    const dp_part part = part_of_much();
    float *data = part.recv;
    for (int i = 0; i < rounds; i++) {
        for (size_t k = 0; k < MUCH; k++)
            data[k] = (float)(k % 1000) + (float)mesh_process;
        CHECK_OK(dp_all_reduce(ctx, &part, MUCH, DP_F32, DP_OP_MAX));
        for (size_t k = 0; k < MUCH; k += 11)
            CHECK_F64(data[k], (double)(k % 1000) + mesh_process_count - 1, 0);
        CHECK_INT(ones_of(ctx), mesh_process_count);
    }
}

static void messages_beside_collectives(void)
{
    dp_ctx *ctx = mesh_open(1, 0);
    int own = mesh_process, count = 0;
    for (int round = 0; round < ROUNDS; round++) {
        dp_scope *scope = dp_scope_begin(ctx);
        static dp_message all[2 * KINDS * 4];
        for (int p = count = 0; p < mesh_process_count; p++)
            for (int kind = KINDS; kind-- > 0 && p != own;) {
                all[count++] = message_of_kind(scope, own, p, kind, false);
                all[count++] = message_of_kind(scope, p, own, kind, true);
            }
        CHECK_OK(dp_messages_begin(ctx, all, (size_t)count / 2));
        collectives_meanwhile(ctx, 2);
        CHECK_OK(dp_messages_begin(ctx, all + count / 2, (size_t)(count - count / 2)));
        collectives_meanwhile(ctx, 1);
        CHECK_OK(dp_messages_end(ctx, all, (size_t)count));
        for (int i = 1; i < count; i += 2)
            check_message_of_kind(&all[i], all[i].peer, own, all[i].tag);
        dp_scope_end(scope);
    }
    check_server(ctx, mesh_process_count);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

TEST_SLOW(messages_travel_beside_collectives, 60)
{
    on_mesh("ab", messages_beside_collectives);
    on_mesh("aba", messages_beside_collectives);
}

/* Process 1 closes while large messages to it, and from it, are under way. */
static void one_closes_meanwhile(meeting *m)
{
    dp_ctx *ctx = open_for_an_end(m);
    dp_scope *scope = dp_scope_begin(ctx);
    int peer = m->process == 1 ? 0 : 1;
    dp_message both[] = {message_of_kind(scope, m->process, peer, 4, false),
                         message_of_kind(scope, peer, m->process, 4, true)};
    CHECK_OK(dp_messages_begin(ctx, both, 2));
    CHECK_OK(dp_barrier(ctx));
    wait_for_all(m); /* whoever is still in the barrier would hear of the end */
    for (int i = 0; i < 3; i++) {
        dp_status status = dp_messages_test(ctx, both, 2);
        CHECK(status == DP_OK || status == DP_PENDING || m->process != 1); /* it may have closed */
    }
    if (m->process == 1) {
        dp_close(ctx);
        return;
    }
    double start = now_ms();
    dp_status status = dp_messages_end(ctx, both, 2);
    if (m->process != 0 || status != DP_OK) /* all of it may have come already */
        check_named(ctx, status, start, LATE_MS, 1, says);
    leave_with_the_others(ctx);
}

TEST_SLOW(who_closes_while_messages_travel_is_named, 60)
{
    through = shared_memory(sizeof *through);
    for (int way = 0; way < 3; way++) {
        atomic_store(through, 0);
        launched = way == 1;
        meeting_machines = way == 0 ? NULL : "abc";
        says = "has closed its context";
        in_processes(3, one_closes_meanwhile);
    }
}

/* Process 1 takes a part of what comes now and then: the message moves all the time, and needs more
   than the time-out, which is for one that does not move. */
static void move_for_a_long_time(void)
{
    enum { HUGE = 256 << 20 };
    dp_ctx *ctx = mesh_open(1, END_TIMEOUT_MS);
    unsigned char *data = calloc(HUGE, 1);
    dp_message one = {.tensor = dp_wrap(data, DP_U8, DP_SHAPE(HUGE)),
                      .peer = 1 - mesh_process,
                      .receives = mesh_process == 1};
    double start = now_ms();
    dp_status status = DP_PENDING;
    CHECK(data != NULL);
    data[HUGE - 1] = mesh_process == 0;
    CHECK_OK(dp_messages_begin(ctx, &one, 1));
    while (mesh_process == 1 && status == DP_PENDING && now_ms() - start < 1.5 * END_TIMEOUT_MS) {
        rest(300);
        status = dp_messages_test(ctx, &one, 1);
    }
    CHECK_OK(dp_messages_end(ctx, &one, 1));
    CHECK(now_ms() - start > END_TIMEOUT_MS);
    CHECK_INT(data[HUGE - 1], 1);
    dp_close(ctx);
    free(data);
}

TEST_SLOW(what_moves_is_not_late, 60)
{
    on_mesh("ab", move_for_a_long_time);
}

/* How process 1 ends while process 0, through which 1 and 2 hear of each other, computes; and what
   2 does then, after one of the two has sent the other one a message. */
enum { DIES, LEAVES_A_CHILD, CLOSES, GIVES_UP, GIVES_UP_AT_LENGTH, ENDS };
enum { RECEIVES, RECEIVES_FROM_ANY, SENDS, WAITS };

static const char *const says_of_end[] = {
    "the connection to it has ended", "the connection to it has ended", "has closed its context",
    "failed: the disk is full", "is to blame"};
static int way_to_end, way_to_wait, first_to_send;

static void end_in_a_way(dp_ctx *ctx)
{
    if (way_to_end == LEAVES_A_CHILD)
        leave_a_child();
    if (way_to_end <= LEAVES_A_CHILD)
        raise(SIGKILL);
    if (way_to_end == GIVES_UP)
        dp_abort(ctx, DP_ERR_ABORTED, "the disk is full");
    if (way_to_end == GIVES_UP_AT_LENGTH)
        dp_abort(ctx, DP_ERR_ABORTED, "what it was told to add up is none of it a number");
    dp_close(ctx);
}

static void end_while_nobody_passes_it_on(meeting *m)
{
    int32_t word = 7;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    dp_ctx *ctx = open_for_an_end(m);
    if (m->process == first_to_send)
        CHECK_OK(dp_send(ctx, &tensor, 3 - first_to_send, 0));
    else if (m->process > 0)
        CHECK_OK(dp_recv(ctx, &tensor, first_to_send, 0));
    wait_for_all(m);
    if (m->process == 1) {
        end_in_a_way(ctx);
        return;
    }
    if (m->process == 2) {
        double start = now_ms();
        dp_status status =
            way_to_wait == SENDS
                ? dp_send(ctx, &tensor, 1, 0)
                : dp_recv(ctx, &tensor, way_to_wait == RECEIVES ? 1 : DP_ANY_RANK, 0);
        check_named(ctx, status, start, END_SOON_MS, 1, says_of_end[way_to_end]);
        atomic_store(through, 1);
    }
    for (int i = 0; i < 2000 && atomic_load(through) == 0; i++)
        rest(10);
    dp_close(ctx);
}

/* That one of those who may send has left is no reason to give up. */
TEST_SLOW(who_ends_behind_one_that_computes_is_named, 60)
{
    through = shared_memory(sizeof *through);
    meeting_machines = "abc";
    for (way_to_end = 0; way_to_end < ENDS; way_to_end++)
        for (way_to_wait = 0; way_to_wait < WAITS; way_to_wait++)
            if (way_to_end != CLOSES || way_to_wait != RECEIVES_FROM_ANY) {
                first_to_send = 1 + (way_to_end + way_to_wait) % 2;
                atomic_store(through, 0);
                in_processes_but(3, way_to_end <= LEAVES_A_CHILD ? 1 : -1,
                                 end_while_nobody_passes_it_on);
            }
}

/* Until all others have left somebody may send. */
static void wait_for_anybody(meeting *m)
{
    int32_t word = 7;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    dp_ctx *ctx = open_for_an_end(m);
    if (m->process > 0) {
        rest(100 * (m->process - 1));
        CHECK_OK(dp_send(ctx, &tensor, 0, 0));
    }
    for (int i = 1; m->process == 0 && i < m->process_count; i++)
        CHECK_OK(dp_recv(ctx, &tensor, DP_ANY_RANK, 0));
    double start = now_ms();
    if (m->process == 0) {
        CHECK_ERROR(dp_recv(ctx, &tensor, DP_ANY_RANK, 0), DP_ERR_REMOTE, "rank 1 (process 1, ");
        CHECK_SAYS(dp_last_error(), "has closed its context, and so have all others");
        dp_failure_info failure;
        CHECK(dp_failure(ctx, &failure));
        CHECK_INT(failure.rank, 1);
    }
    CHECK(now_ms() - start < END_SOON_MS * test_timeout_scale());
    dp_close(ctx);
}

TEST(when_all_have_left_nobody_is_waited_for)
{
    for (int i = 0; i < 2; i++) {
        meeting_machines = i == 0 ? NULL : "abc";
        in_processes(3, wait_for_anybody);
    }
}

/* Process 1 gives up, at length, and goes. Process 0 is told twice, and quotes all of it. */
static void give_up_at_length(meeting *m)
{
    static const char why[] = "what it was told to add up is none of it a number";
    int32_t word = 7;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    dp_ctx *ctx = open_for_an_end(m);
    if (m->process == 1) {
        CHECK_OK(dp_send(ctx, &tensor, 0, 0));
        rest(30);
        dp_abort(ctx, DP_ERR_ABORTED, "%s", why);
    } else {
        CHECK_OK(dp_recv(ctx, &tensor, 1, 0));
        CHECK_ERROR(dp_recv(ctx, &tensor, 1, 0), DP_ERR_ABORTED, why);
    }
    dp_close(ctx);
}

TEST(who_gives_up_at_length_is_quoted)
{
    meeting_machines = "ab";
    for (int i = 0; i < 5; i++)
        in_processes(2, give_up_at_length);
}

/* Process 2 gives up while data flows between the others all the time. */
static void give_up_beside(void)
{
    enum { LARGE = 32 << 20 };
    dp_ctx *ctx = mesh_open(1, END_TIMEOUT_MS);
    unsigned char *data = calloc(LARGE, 1);
    const dp_tensor tensor = dp_wrap(data, DP_U8, DP_SHAPE(LARGE));
    dp_status status = DP_OK;
    CHECK(data != NULL);
    CHECK_OK(dp_barrier(ctx));
    double start = now_ms();
    if (mesh_process == 2) {
        rest(100);
        dp_abort(ctx, DP_ERR_ABORTED, "the disk is full");
        rest(1000);
    }
    while (mesh_process < 2 && status == DP_OK && now_ms() - start < 10 * END_SOON_MS)
        status = mesh_process == 1 ? dp_send(ctx, &tensor, 0, 0) : dp_recv(ctx, &tensor, 1, 0);
    if (mesh_process < 2)
        check_named(ctx, status, start, END_SOON_MS, 2, "the disk is full");
    dp_close(ctx);
    free(data);
}

TEST_SLOW(a_failure_is_heard_while_data_flows, 60)
{
    on_mesh("abc", give_up_beside);
    on_mesh("aaa", give_up_beside);
}

/* Process 0 waits for process 2, and is sent something else by 1 that it does not wait for. */
static void move_something_else(meeting *m)
{
    enum { HUGE = 256 << 20 };
    dp_ctx *ctx = open_for_an_end(m);
    unsigned char *data = m->process < 2 ? calloc(HUGE, 1) : NULL;
    int32_t word = 7;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    dp_message one = {.tensor = dp_wrap(data, DP_U8, DP_SHAPE(HUGE)),
                      .peer = 1 - m->process,
                      .receives = m->process == 0};
    if (m->process < 2)
        CHECK_OK(dp_messages_begin(ctx, &one, 1));
    wait_for_all(m);
    double start = now_ms();
    if (m->process == 0) {
        dp_status status = dp_recv(ctx, &tensor, 2, 0);
        check_named(ctx, status, start, END_LATE_MS, 2, "did not come within 2000 ms");
        atomic_store(through, 1);
    }
    while (atomic_load(through) == 0) {
        rest(200);
        (void)!(m->process == 1 ? dp_messages_test(ctx, &one, 1) : DP_OK);
    }
    dp_close(ctx);
    free(data);
}

TEST_SLOW(what_is_not_awaited_does_not_count, 60)
{
    through = shared_memory(sizeof *through);
    meeting_machines = "abc";
    in_processes(3, move_something_else);
}

/* Of a message that was begun, wanted, and given up. */
static void memory_goes_before_the_context(void)
{
    dp_ctx *ctx = mesh_open(1, 0);
    bool sends = mesh_process == 0;
    unsigned char *data = calloc(LARGEST, 1);
    dp_message one = {.tensor = dp_wrap(data, DP_U8, DP_SHAPE(LARGEST)),
                      .peer = 1 - mesh_process,
                      .receives = !sends};
    CHECK(data != NULL);
    CHECK_OK(dp_messages_begin(ctx, &one, 1));
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dp_barrier(ctx));
        dp_status status = i == 0 || sends ? dp_messages_test(ctx, &one, 1) : DP_PENDING;
        CHECK_INT(status, DP_PENDING);
    }
    CHECK_OK(dp_barrier(ctx));
    if (sends)
        free(data);
    else
        CHECK_STATUS(dp_messages_end(ctx, &one, 1), DP_ERR_REMOTE);
    dp_close(ctx);
    if (!sends)
        free(data);
}

TEST(data_does_not_go_when_a_context_is_closed)
{
    on_mesh("ab", memory_goes_before_the_context);
}

/* Process 1 has received, says so, and closes. Process 0, which has not looked yet, finds that out
   when it sends more. */
static void an_answer_is_older_than_the_end(meeting *m)
{
    static int32_t numbers[3];
    dp_ctx *ctx = open_for_an_end(m);
    dp_message all[3];
    for (int i = 0; i < 3; i++)
        all[i] = (dp_message){.tensor = dp_wrap(&numbers[i], DP_I32, DP_SHAPE(1)),
                              .peer = 1 - m->process,
                              .tag = i,
                              .receives = m->process == 1};
    CHECK_OK(dp_messages_begin(ctx, all, 1));
    if (m->process == 1) {
        CHECK_OK(dp_messages_end(ctx, all, 1));
        dp_close(ctx);
    }
    wait_for_all(m);
    if (m->process == 1)
        return;
    for (int i = 1; i < 3; i++) {
        CHECK_OK(dp_messages_begin(ctx, &all[i], 1));
        rest(100);
    }
    CHECK_OK(dp_messages_end(ctx, all, 1));
    CHECK_STATUS(dp_messages_end(ctx, all + 1, 2), DP_ERR_REMOTE);
    dp_close(ctx);
}

TEST(answers_are_heard_after_their_process_has_closed)
{
    meeting_machines = "ab";
    in_processes(2, an_answer_is_older_than_the_end);
}

/* To itself; nobody has ended anything, however long it takes. */
static void send_to_oneself(meeting *m)
{
    int32_t numbers[2] = {7, 0};
    dp_ctx *ctx = open_for_an_end(m);
    dp_message both[] = {{.tensor = dp_wrap(&numbers[0], DP_I32, DP_SHAPE(1)), .peer = m->process},
                         {.tensor = dp_wrap(&numbers[1], DP_I32, DP_SHAPE(1)), .peer = m->process}};
    both[1].receives = true;
    CHECK_OK(dp_messages_begin(ctx, both + 1, 1));
    for (int i = 0; i < 4; i++) {
        CHECK_STATUS(dp_messages_test(ctx, both + 1, 1), DP_PENDING);
        rest(400);
    }
    CHECK_OK(dp_messages_begin(ctx, both, 1));
    CHECK_OK(dp_messages_end(ctx, both, 2));
    CHECK_INT(numbers[1], 7);
    dp_close(ctx);
}

TEST(a_message_to_oneself_is_waited_for)
{
    on_machines("ab", send_to_oneself);
}

/* Who has all that it needs does not mind that others have gone. */
static void all_close(meeting *m)
{
    enter(m);
    for (int i = 0; i < 10; i++) {
        dp_ctx *ctx = mesh_open(1, 0);
        if (i % 3 == 0)
            CHECK_OK(sum_much(ctx));
        CHECK_INT(ones_of(ctx), m->process_count);
        dp_close(ctx);
    }
}

TEST_SLOW(all_close_at_their_own_time, 60)
{
    for (int way = 0; way < 3; way++) {
        launched = way == 1;
        meeting_machines = way == 0 ? NULL : "abab";
        in_processes(way == 0 ? 2 : 4, all_close);
    }
}

/* ---- while a context opens ------------------------------------------------------------------- */

/* At any point of it; perhaps before anybody has heard of it. */
static void one_dies_while_it_opens(meeting *m)
{
    dp_ctx *ctx = NULL;
    enter(m);
    mesh_config.device_count = 1;
    mesh_config.timeout_ms = TIMEOUT_MS;
    wait_for_all(m);
    signal_soon(m, SIGKILL);
    double start = now_ms();
    dp_status status = dp_open(&mesh_config, &ctx);
    while (status == DP_OK)
        status = sum_much(ctx);
    while (m->process == 1)
        rest(1000);
    CHECK_SAYS(dp_last_error(), "process 1");
    CHECK(now_ms() - start < LATE_MS * test_timeout_scale());
    dp_close(ctx);
}

TEST_SLOW(who_dies_while_others_open_is_named, 120)
{
    uint64_t state = test_seed();
    launched = true;
    meeting_machines = "abc";
    for (int i = 0; i < 10; i++) {
        moment = (int)(test_random(&state) % 8000);
        connections = 1 + i % 3;
        in_processes_but(3, 1, one_dies_while_it_opens);
    }
}

/* ---- ports, and who comes there -------------------------------------------------------------- */

static int first_port, port_count;

static void give_ports(void)
{
    char text[32];
    snprintf(text, sizeof text, "%d-%d", first_port, first_port + port_count - 1);
    set("DP_PORTS", text);
}

static int listen_at(int port)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    int fd = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    CHECK(fd >= 0);
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    if (bind(fd, (struct sockaddr *)&at, sizeof at) == 0 && listen(fd, 1) == 0)
        return fd;
    close(fd);
    return -1;
}

/* So many that nobody has, in a row. */
static void find_ports(int count)
{
    uint64_t state = (uint64_t)getpid();
    int found = 0;
    while (found < count) {
        first_port = 12000 + (int)(test_random(&state) % 8000);
        for (found = 0; found < count; found++) {
            int fd = listen_at(first_port + found);
            if (fd < 0)
                break;
            close(fd);
        }
    }
    port_count = count;
}

static void open_often(meeting *m)
{
    enter(m);
    give_ports();
    for (int i = 0; i < 10; i++) {
        dp_ctx *ctx = mesh_open(1, 0);
        for (int p = 0; p < port_count; p++)
            CHECK_INT(ones_of(ctx), m->process_count);
        dp_close(ctx);
    }
}

/* One stays open, for messages, and one is needed while they connect. */
TEST(a_process_needs_two_ports)
{
    for (int way = 0; way < 2; way++) {
        launched = way == 1;
        find_ports(6);
        on_machines("abb", open_often);
    }
}

static void open_with_few_ports(meeting *m)
{
    dp_ctx *ctx = NULL;
    enter(m);
    give_ports();
    CHECK(dp_open(&mesh_config, &ctx) != DP_OK);
    CHECK_SAYS(dp_last_error(), "cannot listen: the ports of DP_PORTS, ");
    CHECK_SAYS(dp_last_error(), "are taken. See DP_PORTS in dp.h");
}

TEST(too_few_ports_are_an_error_of_all)
{
    for (int way = 0; way < 2; way++) {
        launched = way == 1;
        find_ports(2);
        on_machines("abc", open_with_few_ports);
    }
}

/* Where a job can recover each process keeps one port more. */
static void one_dies_and_others_go_on(meeting *m)
{
    dp_status status = DP_OK;
    enter(m);
    give_ports();
    mesh_config.recovers = true;
    dp_ctx *ctx = mesh_open(1, 8000);
    CHECK_INT(ones_of(ctx), 3);
    wait_for_all(m);
    if (m->process == 1)
        raise(SIGKILL);
    while (status == DP_OK)
        status = sum_much(ctx);
    CHECK_SAYS(dp_last_error(), "rank 1 (process 1, pid ");
    CHECK_OK(dp_recover(ctx));
    CHECK_INT(ones_of(ctx), 2);
    CHECK_OK(sum_much(ctx));
    dp_close(ctx);
}

TEST_SLOW(who_is_left_connects_anew, 60)
{
    launched = true;
    meeting_machines = "abb";
    find_ports(9);
    for (connections = 1; connections <= 3; connections += 2)
        in_processes_but(3, 1, one_dies_and_others_go_on);
}

/* ---- one process alone, which no table of connections serves --------------------------------- */

static void check_alone(dp_ctx *ctx)
{
    dp_info info;
    int32_t own[3] = {1, 20, 300}, sums[3] = {0};
    dp_part parts[3];
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process_count, 1);
    CHECK_INT(info.rank_count, 3);
    CHECK_STR(info.coll_backend, "cpu");
    for (int i = 0; i < 3; i++)
        parts[i] = (dp_part){.send = &own[i], .recv = &sums[i]};
    CHECK_OK(dp_all_reduce(ctx, parts, 1, DP_I32, DP_OP_SUM));
    for (int i = 0; i < 3; i++)
        CHECK_INT(sums[i], 321);
    CHECK_INT(ones_of(ctx), 1);
}

static void groups_of_one(meeting *m)
{
    dp_ctx *group = NULL;
    enter(m);
    dp_ctx *ctx = mesh_open(3, 0);
    CHECK_OK(dp_open_group(ctx, m->process, NULL, &group));
    check_alone(group);
    CHECK_INT(ones_of(ctx), 2);
    dp_close(group);
    dp_close(ctx);
}

TEST_SLOW(a_group_of_one_adds_up_by_itself, 60)
{
    in_processes(2, groups_of_one);
}

static void one_goes_on_alone(meeting *m)
{
    enter(m);
    mesh_config.recovers = true;
    dp_ctx *ctx = mesh_open(3, 8000);
    CHECK_INT(ones_of(ctx), 2);
    wait_for_all(m);
    if (m->process == 1)
        raise(SIGKILL);
    while (dp_barrier(ctx) == DP_OK)
        ;
    CHECK_OK(dp_recover(ctx));
    check_alone(ctx);
    dp_close(ctx);
}

TEST_SLOW(who_is_left_alone_adds_up_by_itself, 60)
{
    launched = true;
    in_processes_but(2, 1, one_goes_on_alone);
}

/* Where the connections that a launcher has made are of IPv6. */
static void meet_by_ipv6(meeting *m)
{
    char address[40];
    enter(m);
    snprintf(address, sizeof address, "[::1]:%d", first_port);
    set("DP_ADDR", address);
    set("DP_INTERFACE", "::1");
    dp_ctx *ctx = mesh_open(1, 0);
    CHECK_INT(ones_of(ctx), m->process_count);
    check_server(ctx, m->process_count);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

static void have_no_address(meeting *m)
{
    dp_ctx *ctx = NULL;
    enter(m);
    CHECK_INT(unsetenv("DP_INTERFACE"), 0);
    CHECK_ERROR(dp_open(&mesh_config, &ctx), DP_ERR_UNSUPPORTED, "set DP_INTERFACE");
}

TEST(machines_need_an_address)
{
    launched = true;
    on_machines("abb", have_no_address);
}

TEST(machines_are_found_by_ipv6)
{
    const struct sockaddr_in6 at = {.sin6_family = AF_INET6, .sin6_addr = IN6ADDR_LOOPBACK_INIT};
    int fd = socket(AF_INET6, SOCK_STREAM, 0);
    if (fd < 0 || bind(fd, (const struct sockaddr *)&at, sizeof at) != 0)
        SKIP("there is no IPv6");
    close(fd);
    launched = true;
    find_ports(8);
    on_machines("abb", meet_by_ipv6);
}

/* ---- strangers ------------------------------------------------------------------------------- */

/* They know the ports, and come again and again: with nothing, with noise, with a request that has
   no proof, and so many at once that there is no place for all. */
static void bother(void)
{
    static const char noise[] = "GET / HTTP/1.1\r\nHost: this is no job, and longer than what it "
                                "reads of it at once, so that something is left behind\r\n\r\n";
    enum { CALLERS = 300 };
    int fds[CALLERS];
    for (int i = 0; i < CALLERS; i++)
        fds[i] = -1;
    for (int i = 0;; i++) {
        struct sockaddr_in at = {.sin_family = AF_INET};
        int place = i % CALLERS, fd = socket(AF_INET, SOCK_STREAM, 0);
        at.sin_port = htons((uint16_t)(first_port + i % port_count));
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        close(fds[place]);
        fds[place] = fd;
        if (connect(fd, (struct sockaddr *)&at, sizeof at) == 0 && i % 3 > 0)
            (void)!send(fd, noise, i % 3 == 1 ? sizeof noise : 5, MSG_NOSIGNAL);
    }
}

TEST_SLOW(strangers_keep_nobody_out, 60)
{
    find_ports(6);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        bother();
    on_machines("abc", open_often);
    connections = 8;
    on_machines("abc", open_often);
    CHECK_INT(kill(pid, SIGKILL), 0);
    CHECK_INT(waitpid(pid, NULL, 0), pid);
}

/* ---- who calls when it has something to say -------------------------------------------------- */

/* By a table that knows nothing of messages. */
static void send_beside_other_collectives(meeting *m)
{
    static const dp_coll_ops *own[2];
    enter(m);
    own[0] = meeting_coll();
    mesh_config.colls = own;
    check_messages();
}

TEST(messages_do_not_ask_what_carries_collectives)
{
    meeting_machines = "abca";
    in_processes(4, send_beside_other_collectives);
}

static atomic_int *arrived;

/* Who has begun a message is not needed for it to arrive, not even for the first one. */
static void compute_meanwhile(meeting *m)
{
    int32_t word = m->process == 0 ? 42 : 0;
    dp_message one = {.tensor = dp_wrap(&word, DP_I32, 0, NULL),
                      .peer = 1 - m->process,
                      .receives = m->process == 1};
    dp_ctx *ctx = open_for_an_end(m);
    CHECK_OK(dp_messages_begin(ctx, &one, 1));
    if (m->process == 1) {
        CHECK_OK(dp_messages_end(ctx, &one, 1));
        atomic_store(arrived, 1);
    }
    for (int i = 0; i < 2000 && atomic_load(arrived) == 0; i++)
        rest(1);
    CHECK_INT(atomic_load(arrived), 1);
    if (m->process == 0)
        CHECK_OK(dp_messages_end(ctx, &one, 1));
    CHECK_INT(word, 42);
    dp_close(ctx);
}

TEST(the_first_message_arrives_while_its_sender_computes)
{
    arrived = shared_memory(sizeof *arrived);
    meeting_machines = "ab";
    in_processes(2, compute_meanwhile);
}

enum { HELLO = 112, ANSWER = 24, DONE = 2 };

/* What one of the job answers who is meant to have been called, if one does. */
static void ask_the_others(const char *hello, char *answer)
{
    struct timeval patience = {.tv_usec = 200000};
    for (int p = 0; p < port_count; p++) {
        struct sockaddr_in at = {.sin_family = AF_INET,
                                 .sin_port = htons((uint16_t)(first_port + p))};
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        CHECK_INT(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience), 0);
        if (connect(fd, (struct sockaddr *)&at, sizeof at) == 0 &&
            send(fd, hello, HELLO, MSG_NOSIGNAL) == HELLO &&
            recv(fd, answer, ANSWER, MSG_WAITALL) == ANSWER)
            p = port_count;
        close(fd);
    }
}

static enum { NOBODY, A_STRANGER, A_RELAY } who_is_there;

/* What somebody says who is none of the job, and listens where process 1 did: that the message has
   arrived, which is what process 0 would like to hear. */
static void pretend(int fd)
{
    char words[1024], answer[ANSWER + sizeof words] = {0};
    struct timeval patience = {.tv_usec = 200000};
    ssize_t got = 0, more = 1;
    CHECK_INT(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience), 0);
    for (; more > 0; got += more > 0 ? more : 0)
        more = recv(fd, words + got, sizeof words - (size_t)got, 0);
    CHECK(got > HELLO + 4);
    if (who_is_there == A_RELAY)
        ask_the_others(words, answer);
    memcpy(answer + ANSWER, words + HELLO, (size_t)got - HELLO);
    memcpy(answer + ANSWER, &(int32_t){DONE}, sizeof(int32_t));
    CHECK(send(fd, answer, (size_t)(ANSWER + got - HELLO), MSG_NOSIGNAL) > 0);
}

enum { PORTS = 6 };

/* Process 1 has closed its context, and it is the stranger. */
static void listen_as_a_stranger(meeting *m)
{
    struct pollfd listeners[PORTS];
    bool listens = who_is_there != NOBODY;
    for (int p = 0; p < PORTS; p++)
        listeners[p] =
            (struct pollfd){.fd = listens ? listen_at(first_port + p) : -1, .events = POLLIN};
    wait_for_all(m);
    CHECK_INT(poll(listeners, PORTS, 1000), listens);
    for (int p = 0; p < PORTS; p++) {
        int fd = listeners[p].fd;
        listeners[p].fd = -1;
        if (listeners[p].revents != 0) {
            int call = accept(fd, NULL, NULL);
            close(fd);
            pretend(call);
        } else {
            close(fd);
        }
    }
    wait_for_all(m);
}

static void somebody_else_is_there(meeting *m)
{
    int32_t word = 7;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    enter(m);
    give_ports();
    dp_ctx *ctx = mesh_open(1, END_TIMEOUT_MS);
    wait_for_all(m);
    if (m->process == 1) {
        dp_close(ctx);
        listen_as_a_stranger(m);
        return;
    }
    dp_message one = {.tensor = tensor, .tag = 5, .receives = true};
    wait_for_all(m);
    if (m->process == 0)
        CHECK_ERROR(dp_send(ctx, &tensor, 1, 0), DP_ERR_REMOTE, "has closed its context");
    else
        CHECK_OK(dp_messages_begin(ctx, &one, 1));
    for (int i = 0; i < 1500 && m->process == 2 && dp_failure(ctx, NULL) == 0; i++) {
        (void)!dp_messages_test(ctx, &one, 1);
        rest(1);
    }
    wait_for_all(m);
    dp_close(ctx);
}

TEST(who_has_taken_the_port_of_a_process_is_not_believed)
{
    meeting_machines = "abc";
    for (who_is_there = NOBODY; who_is_there <= A_RELAY; who_is_there++) {
        find_ports(PORTS);
        in_processes(3, somebody_else_is_there);
    }
}

/* As a network may: before this process has looked. */
static void cut_off_who_calls(void)
{
    int count = 0;
    for (int fd = 3; fd < 200; fd++) {
        int listens = 0;
        socklen_t bytes = sizeof listens;
        if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0 || listens == 0)
            continue;
        for (int call = accept(fd, NULL, NULL); call >= 0; call = accept(fd, NULL, NULL)) {
            close(call);
            count++;
        }
    }
    CHECK_INT(count, 1);
}

/* The same messages arrive, in their order, and each once. */
static void call_again(meeting *m)
{
    enum { COUNT = 5, LARGE = 1000 };
    static int32_t words[COUNT][LARGE];
    dp_message all[COUNT];
    dp_ctx *ctx = open_for_an_end(m);
    for (int i = 0; i < COUNT; i++) {
        int64_t size = i % 2 == 0 ? 1 : LARGE;
        words[i][0] = m->process == 0 ? 42 + i : 0;
        all[i] = (dp_message){.tensor = dp_wrap(words[i], DP_I32, 1, &size),
                              .peer = 1 - m->process,
                              .receives = m->process == 1};
    }
    CHECK_OK(dp_messages_begin(ctx, all, m->process == 0 ? 2 : 1));
    wait_for_all(m);
    if (m->process == 1)
        cut_off_who_calls();
    wait_for_all(m);
    CHECK_OK(m->process == 0 ? dp_messages_begin(ctx, all + 2, COUNT - 2)
                             : dp_messages_begin(ctx, all + 1, COUNT - 1));
    CHECK_OK(dp_messages_end(ctx, all, COUNT));
    for (int i = 0; i < COUNT; i++)
        CHECK_INT(words[i][0], 42 + i);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

TEST(who_was_not_heard_calls_again)
{
    meeting_machines = "ab";
    in_processes(2, call_again);
}

static void is_not_answered(meeting *m)
{
    int32_t word = 7;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    dp_ctx *ctx = open_for_an_end(m);
    if (m->process == 0)
        CHECK_ERROR(dp_send(ctx, &tensor, 1, 0), DP_ERR_TIMEOUT,
                    "did not come within 2000 ms; nobody has answered at 127.0.0.1, port ");
    wait_for_all(m);
    dp_close(ctx);
}

TEST(who_is_not_answered_says_where)
{
    meeting_machines = "ab";
    in_processes(2, is_not_answered);
}

/* By the address from which this machine would leave it. */
static void meet_without_an_interface(meeting *m)
{
    enter(m);
    unsetenv("DP_INTERFACE");
    check_messages();
}

static bool has_an_address(void)
{
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons(9)};
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    CHECK_INT(inet_pton(AF_INET, "198.51.100.1", &at.sin_addr), 1);
    bool has = connect(fd, (struct sockaddr *)&at, sizeof at) == 0;
    close(fd);
    return has;
}

TEST(machines_of_a_bootstrap_find_each_other)
{
    if (!has_an_address())
        SKIP("this machine has no network");
    meeting_machines = "aaabbb"; /* in the tree process 3 is behind process 2 */
    in_processes(6, meet_without_an_interface);
    meeting_machines = "abab";
    in_processes(4, meet_without_an_interface);
}

static void send_often(meeting *m)
{
    enter(m);
    give_ports();
    for (int i = 0; i < 10; i++)
        check_messages();
}

TEST_SLOW(strangers_keep_no_message_out, 60)
{
    find_ports(6);
    meeting_machines = "abc";
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0)
        bother();
    in_processes(3, send_often);
    CHECK_INT(kill(pid, SIGKILL), 0);
    CHECK_INT(waitpid(pid, NULL, 0), pid);
}

/* A child that lives on holds no port. */
static void have_a_child(meeting *m)
{
    enter(m);
    give_ports();
    dp_ctx *ctx = mesh_open(1, 0);
    pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
        atomic_fetch_add(arrived, 1);
        rest(20000);
        _exit(0);
    }
    while (atomic_load(arrived) < m->process_count)
        rest(1);
    dp_close(ctx);
    wait_for_all(m);
    for (int p = 0; p < port_count; p++) {
        int fd = m->process == 0 ? listen_at(first_port + p) : -1;
        CHECK(m->process > 0 || fd >= 0);
        close(fd);
    }
    wait_for_all(m);
    CHECK_INT(kill(pid, SIGKILL), 0);
    CHECK_INT(waitpid(pid, NULL, 0), pid);
}

TEST(ports_are_not_inherited)
{
    find_ports(6);
    arrived = shared_memory(sizeof *arrived);
    meeting_machines = "abc";
    in_processes(3, have_a_child);
}

static bool comes_too_late;

/* Who cannot call has an error, and may try again. */
static void have_no_file_to_call(meeting *m)
{
    int32_t word = 7 + m->process;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    dp_ctx *ctx = open_for_an_end(m);
    if (m->process == 0) {
        int spent = spend_all_files();
        CHECK_ERROR(dp_send(ctx, &tensor, 1, 0), DP_ERR_NO_MEMORY,
                    "dp_send: process 0 has no room for a connection: it may open no more files");
        close(spent);
        CHECK_OK(dp_send(ctx, &tensor, 1, 0));
    } else {
        CHECK_OK(dp_recv(ctx, &tensor, 0, 0));
        CHECK_INT(word, 7);
    }
    dp_close(ctx);
}

/* Who cannot be called is called later; if it is too late, it knows why. */
static void have_no_file_to_be_called(meeting *m)
{
    int32_t word = 7 * m->process;
    dp_ctx *ctx = open_for_an_end(m);
    dp_message one = {.tensor = dp_wrap(&word, DP_I32, 0, NULL),
                      .peer = 1 - m->process,
                      .receives = m->process == 0};
    CHECK_OK(dp_messages_begin(ctx, &one, 1));
    if (m->process == 0) {
        int spent = spend_all_files();
        wait_for_all(m);
        for (int i = 0; i < 100; i++) {
            CHECK_STATUS(dp_messages_test(ctx, &one, 1), DP_PENDING);
            rest(1);
        }
        if (comes_too_late)
            CHECK_ERROR(dp_messages_end(ctx, &one, 1), DP_ERR_TIMEOUT,
                        "did not come within 2000 ms; rank 0 (process 0, pid ");
        close(spent);
    } else {
        wait_for_all(m);
    }
    while (comes_too_late && !dp_failure(ctx, NULL))
        (void)!dp_messages_test(ctx, &one, 1);
    if (!comes_too_late)
        CHECK_OK(dp_messages_end(ctx, &one, 1));
    CHECK(comes_too_late || word == 7);
    dp_close(ctx);
}

TEST(messages_without_files)
{
    meeting_machines = "ab";
    in_processes(2, have_no_file_to_call);
    for (int i = 0; i < 2; i++) {
        comes_too_late = i == 1;
        in_processes(2, have_no_file_to_be_called);
    }
}

static int rounds_left; /* of the bootstrap, after which process 1 has no file to spare */
static int all_spent;   /* its last file: who looks for leaks needs one */

static dp_status gather_and_spend(const void *in, void *out, size_t bytes, void *user)
{
    dp_status status = meeting_all_gather(in, out, bytes, user);
    if (--rounds_left == 0 && mesh_process == 1)
        all_spent = spend_all_files();
    return status;
}

enum { NO_PORT, NO_TREE, NO_FILE, LACKS };

/* What needs no connection goes on without messages, and says so. */
static void note_what_is_missing(meeting *m, dp_ctx *ctx)
{
    int32_t word = 7;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    CHECK_INT(ones_of(ctx), m->process_count);
    dp_status status = m->process == 0 ? dp_send(ctx, &tensor, 1, 0) : dp_recv(ctx, &tensor, 0, 0);
    bool port = strstr(dp_last_error(), "process 1 has opened no port") == NULL;
    int missing = status == DP_ERR_TIMEOUT ? NO_FILE : port ? NO_TREE : NO_PORT;
    if (missing != NO_FILE)
        CHECK_STATUS(status, DP_ERR_UNSUPPORTED);
    if (missing == NO_TREE)
        CHECK_SAYS(dp_last_error(), "the processes do not reach each other over TCP");
    atomic_fetch_add(&arrived[missing], 1);
}

static void meet_without_connections(meeting *m)
{
    static const dp_coll_ops *own[2];
    dp_ctx *ctx = NULL;
    enter(m);
    own[0] = meeting_coll();
    mesh_config.colls = own;
    mesh_config.bootstrap.all_gather = gather_and_spend;
    mesh_config.timeout_ms = END_TIMEOUT_MS;
    mesh_config.device_count = 1;
    all_spent = -1;
    if (dp_open(&mesh_config, &ctx) == DP_OK) {
        note_what_is_missing(m, ctx);
        dp_close(ctx);
    }
    close(all_spent);
}

TEST(collectives_of_others_need_no_connections)
{
    arrived = shared_memory(LACKS * sizeof *arrived);
    meeting_machines = "ab";
    for (int i = 1; atomic_load(&arrived[NO_FILE]) == 0; i++) {
        rounds_left = i;
        in_processes(2, meet_without_connections);
    }
    for (int missing = 0; missing < LACKS; missing++) { /* of both processes, or of none */
        CHECK(atomic_load(&arrived[missing]) > 0);
        CHECK_INT(atomic_load(&arrived[missing]) % 2, 0);
    }
}

/* Process 1 rests behind the round that follows the one in which all tell where they listen. */
static dp_status gather_and_rest(const void *in, void *out, size_t bytes, void *user)
{
    static int told;
    dp_status status = meeting_all_gather(in, out, bytes, user);
    if (told == 1 && mesh_process == 1)
        rest(900);
    told += told > 0 || bytes == 128;
    return status;
}

static void come_when_it_is_over(meeting *m)
{
    dp_ctx *ctx = NULL;
    enter(m);
    mesh_config.bootstrap.all_gather = gather_and_rest;
    mesh_config.timeout_ms = m->process == 0 ? 300 : 60000;
    CHECK(dp_open(&mesh_config, &ctx) != DP_OK);
    CHECK_SAYS(dp_last_error(), "process 1 of 2 did not come within 0.3 s");
}

/* Nothing but its port tells that a process has given up, where a bootstrap of the user's has
   brought them together: else the other one would wait for a minute. */
TEST(who_comes_when_the_others_have_given_up_is_refused)
{
    meeting_machines = "ab";
    in_processes(2, come_when_it_is_over);
}

/* Processes before and behind it have waited for each of its connections, and name it. */
static void one_of_three_comes_late(meeting *m)
{
    dp_ctx *ctx = NULL;
    enter(m);
    mesh_config.bootstrap.all_gather = gather_and_rest;
    mesh_config.timeout_ms = m->process == 1 ? 60000 : 300;
    CHECK(dp_open(&mesh_config, &ctx) != DP_OK);
    CHECK_SAYS(dp_last_error(), "process 1");
    CHECK(strstr(dp_last_error(), "process 3") == NULL);
}

TEST(who_is_awaited_by_several_connections_is_named)
{
    meeting_machines = "abc";
    connections = 3;
    in_processes(3, one_of_three_comes_late);
}

/* ---- few files ------------------------------------------------------------------------------- */

static int files_more;  /* that process 1 may open, from when it opens the table */
static bool files_hard; /* and it cannot raise the limit */
static rlim_t files_allowed;

static dp_status open_with_few_files(const dp_host *host, const dp_comm_config *config,
                                     dp_comm **out)
{
    struct rlimit limit;
    if (mesh_process == 1 && files_allowed == 0) {
        int next = dup(STDIN_FILENO);
        CHECK(next >= 0 && close(next) == 0);
        CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
        limit.rlim_cur = (rlim_t)(next + files_more);
        limit.rlim_max = files_hard ? limit.rlim_cur : limit.rlim_max;
        CHECK_INT(setrlimit(RLIMIT_NOFILE, &limit), 0);
        files_allowed = limit.rlim_cur;
    }
    return dp_tcp_coll()->open(host, config, out);
}

/* From process 1 to process 0. */
static dp_status send_a_word(dp_ctx *ctx)
{
    int32_t word = 7;
    const dp_tensor tensor = dp_wrap(&word, DP_I32, 0, NULL);
    return mesh_process == 0   ? dp_recv(ctx, &tensor, 1, 0)
           : mesh_process == 1 ? dp_send(ctx, &tensor, 0, 0)
                               : DP_OK;
}

/* All are there, or none is, and all know why. */
static void have_few_files(meeting *m)
{
    dp_coll_ops table = *dp_tcp_coll();
    const dp_coll_ops *const colls[] = {&table, NULL};
    char all[BOOT_PROCESSES], good;
    struct rlimit limit;
    dp_ctx *ctx = NULL;
    enter(m);
    table.open = open_with_few_files;
    mesh_config.colls = colls;
    dp_status status = dp_open(&mesh_config, &ctx);
    good = status == DP_OK;
    CHECK(good || files_hard);
    CHECK(!good || ones_of(ctx) == m->process_count);
    if (!files_hard) /* there is room for messages, too */
        CHECK_OK(send_a_word(ctx));
    if (!good) {
        CHECK(status != DP_ERR_TIMEOUT);
        CHECK(m->process == 1 || strstr(dp_last_error(), "process 1") != NULL);
        CHECK_SAYS(dp_last_error(), "more files");
    }
    CHECK_OK(meeting_all_gather(&good, all, 1, m));
    for (int p = 0; p < m->process_count; p++)
        CHECK_INT(all[p], good);
    dp_close(ctx);
    CHECK_INT(getrlimit(RLIMIT_NOFILE, &limit), 0);
    CHECK(m->process != 1 || limit.rlim_cur == files_allowed);
}

/* Connections, ports and threads go with their context. */
static void open_and_close(meeting *m)
{
    int before = 0;
    for (int i = 0; i < 3; i++) {
        enter(m);
        dp_ctx *ctx = mesh_open(1, 0);
        char byte = 0;
        const dp_tensor tensor = dp_wrap(&byte, DP_U8, DP_SHAPE(1));
        CHECK_INT(ones_of(ctx), m->process_count);
        CHECK_OK(m->process == 0   ? dp_send(ctx, &tensor, 1, 0)
                 : m->process == 1 ? dp_recv(ctx, &tensor, 0, 0)
                                   : DP_OK);
        dp_close(ctx);
        before = i == 0 ? open_files() : before;
        CHECK_INT(open_files(), before);
    }
}

TEST(nothing_stays_open)
{
    for (int way = 0; way < 4; way++) {
        launched = way % 2 == 1;
        connections = way < 2 ? 0 : 3;
        on_machines("aabb", open_and_close);
    }
}

TEST_SLOW(a_process_with_few_files, 60)
{
    launched = true;
    for (files_more = 0; files_more < 12; files_more++) {
        files_hard = true;
        on_machines("abc", have_few_files);
    }
    files_hard = false;
    files_more = 1;
    on_machines("abc", have_few_files);
}

/* Some of the connections to a process can be made, and others cannot. */
TEST_SLOW(a_process_with_few_files_for_many_connections, 60)
{
    launched = true;
    connections = 4;
    files_hard = true;
    for (files_more = 1; files_more < 26; files_more += 3)
        on_machines("abc", have_few_files);
    files_hard = false;
    files_more = 20; /* enough for one connection to each */
    connections = 8;
    on_machines("abc", have_few_files);
}
