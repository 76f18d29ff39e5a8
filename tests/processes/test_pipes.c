/* test_pipes.c - a carrier that is not the library's (pipes.h) passes what those of the library
   pass: the cases of collectives and of messages, and who is named when something goes wrong. */

#define _GNU_SOURCE /* P_tmpdir */

#include "folder.h"
#include "meeting.h"
#include "mesh_cases.h"

const dp_coll_ops *pipes_coll(void); /* see pipes.h */

static void (*pipes_body)(void);

static void enter(meeting *m)
{
    static const dp_coll_ops *colls[2];
    colls[0] = pipes_coll();
    mesh_process = m->process;
    mesh_process_count = m->process_count;
    mesh_config = config_of(m, 1);
    mesh_config.colls = colls;
    pipes_body();
}

/* Runs `body` in a process for each letter of `machines`. */
static void on_pipes(const char *machines, void (*body)(void))
{
    if (own_folder[0] == '\0')
        enter_folder();
    pipes_body = body;
    on_machines(machines, enter);
}

static void all_cases(void)
{
    for (size_t i = 0; i < MESH_CASES; i++)
        mesh_cases[i].run();
}

TEST_SLOW(two_processes_add_up_through_pipes, 60)
{
    mesh_many = 600011 / (size_t)test_stride();
    on_pipes("ab", all_cases);
}

TEST_SLOW(three_processes_add_up_through_pipes, 60)
{
    mesh_many = 100003 / (size_t)test_stride();
    on_pipes("abc", all_cases);
}

static void shares_of_four(void)
{
    check_shared("aabb", 2);
    CHECK_INT(setenv("DP_MACHINE", machine_of("aabb"), 1), 0);
    sums_of_several_pieces();
    moves_of_several_pieces();
    ranks_are_added_in_one_tree();
}

TEST_SLOW(machines_that_share_memory_add_up_through_pipes, 60)
{
    mesh_many = 100003 / (size_t)test_stride();
    on_pipes("aabb", shares_of_four);
}

TEST_SLOW(messages_through_pipes, 60)
{
    on_pipes("ab", check_messages);
    on_pipes("abc", check_messages);
}

/* Longer ones than a pipe holds go both ways at once, and beside a collective. */
static void large_messages(void)
{
    enum { LARGE = 3000001 };
    static int32_t out[LARGE], in[LARGE];
    int other = 1 - mesh_process;
    dp_ctx *ctx = mesh_open(1, 0);
    dp_message both[] = {
        {.tensor = dp_wrap(out, DP_I32, 1, (int64_t[]){LARGE}), .peer = other},
        {.tensor = dp_wrap(in, DP_I32, 1, (int64_t[]){LARGE}), .peer = other, .receives = true}};
    for (int i = 0; i < LARGE; i++)
        out[i] = i * 7 + mesh_process;
    CHECK_OK(dp_messages_begin(ctx, both, 2));
    CHECK_INT(ones_of(ctx), 2);
    CHECK_OK(dp_messages_end(ctx, both, 2));
    for (int i = 0; i < LARGE; i++)
        CHECK_INT(in[i], i * 7 + other);
    dp_close(ctx);
}

TEST(messages_longer_than_a_pipe)
{
    on_pipes("ab", large_messages);
}

static void strays(void)
{
    for (int kind = 0; kind < OTHER_CALLS; kind += 3)
        check_strays(kind, false);
    check_strays(8, true);
}

TEST_SLOW(process_that_calls_something_else_is_named_through_pipes, 60)
{
    on_pipes("abc", strays);
}

/* Process 1 leaves in the middle of what the others do. */
static void one_is_gone(void)
{
    dp_failure_info failure;
    dp_ctx *ctx = mesh_open(1, 20000);
    CHECK_OK(add_up(ctx, 25));
    if (mesh_process == 1)
        _exit(EXIT_SUCCESS);
    time_t start = time(NULL);
    dp_status status = DP_OK;
    for (int i = 0; i < 3 && status == DP_OK; i++)
        status = add_up(ctx, 1 << 20);
    CHECK_INT(status, DP_ERR_REMOTE);
    CHECK_SAYS(dp_last_error(), "rank 1 (process 1, pid ");
    CHECK(time(NULL) - start < 10);
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.rank, 1);
    dp_close(ctx);
}

TEST_SLOW(process_that_is_gone_is_named_through_pipes, 60)
{
    on_pipes("ab", one_is_gone);
}

static void nothing_is_sent(void)
{
    float data[100] = {0};
    dp_tensor tensor = dp_wrap(data, DP_F32, 1, (int64_t[]){100});
    dp_ctx *ctx = mesh_open(1, 1000);
    if (mesh_process == 0)
        CHECK_ERROR(dp_recv(ctx, &tensor, 1, 3), DP_ERR_TIMEOUT,
                    "dp_recv: 100 f32 from rank 1 to rank 0 with tag 3: rank 1 (process 1, pid ");
    else
        rest_too_long();
    dp_close(ctx);
}

TEST_SLOW(message_that_does_not_come_through_pipes, 60)
{
    on_pipes("ab", nothing_is_sent);
}
