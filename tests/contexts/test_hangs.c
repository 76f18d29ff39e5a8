/* test_hangs.c - devices that all wait for: what they are in is logged long before the time is up,
   and stands in the error. */

#define _GNU_SOURCE

#include <fcntl.h>
#include <signal.h>
#include "folder.h"
#include "process.h"
#include "ranked.h"

enum { HANG_MS = 2000, LONG_MS = 1200 }; /* more than a quarter of the time-out, twice */

static char said[400];
static int said_count;
static const char *awaited = " is waited for: ";

static void hear_of_devices(const dp_log_record *record, void *user)
{
    (void)user;
    if (strstr(record->text, awaited) == NULL)
        return;
    CHECK_INT(record->level, DP_LOG_WARN);
    snprintf(said, sizeof said, "%s", record->text);
    said_count++;
}

static dp_ctx *open_watched(int devices)
{
    dp_ctx *ctx;
    const dp_config config = {.device_count = devices,
                              .timeout_ms = HANG_MS,
                              .local_only = true,
                              .log = {.fn = hear_of_devices}};
    CHECK_OK(dp_open(&config, &ctx));
    said_count = 0;
    said[0] = '\0';
    return ctx;
}

static dp_status rest_on_last(int local_rank, dp_scope *scope, void *user)
{
    (void)scope;
    if (local_rank == *(int *)user)
        rest(LONG_MS);
    return DP_OK;
}

TEST(device_that_all_wait_for_is_named)
{
    for (int devices = 2; devices <= 3; devices++) {
        dp_ctx *ctx = open_watched(devices);
        int last = devices - 1, none = -1;
        CHECK_OK(dp_run(ctx, NULL, rest_on_last, &none));
        CHECK_INT(said_count, 0);
        CHECK_OK(dp_run(ctx, NULL, rest_on_last, &last));
        CHECK(said_count > 0);
        CHECK(said_count <= 3); /* each time that it was twice as long */
        char name[40];
        snprintf(name, sizeof name, "device %d (cpu) is waited for: it is in ", last);
        CHECK_SAYS(said, name);
        CHECK_SAYS(said, "a function under dp_run since ");
        dp_close(ctx);
    }
}

/* The calling thread has a device, too: nobody waits for that one but itself. */
TEST(device_of_the_caller_is_not_waited_for)
{
    dp_ctx *ctx = open_watched(2);
    int first = 0;
    CHECK_OK(dp_run(ctx, NULL, rest_on_last, &first));
    CHECK_INT(said_count, 0);
    dp_close(ctx);
}

static dp_status rest_in_forward(dp_call *call)
{
    if (call->local_rank == 1)
        rest(LONG_MS);
    call->out = dp_at(call->args, 0);
    return DP_OK;
}

TEST(method_that_all_wait_for_is_named)
{
    static const dp_method methods[] = {{"forward", rest_in_forward}};
    dp_ctx *ctx = open_watched(2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_module *net, *par;
    dp_value out, batch, args;
    float x[4] = {1, 2, 3, 4};
    const int64_t shape = 4;
    const dp_module_config config = {.name = "net", .methods = methods, .method_count = 1};
    CHECK_OK(dp_module_create(ctx, &config, &net));
    CHECK_OK(dp_data_parallel(net, NULL, &par));
    const dp_tensor tensor = dp_wrap(x, DP_F32, 1, &shape);
    batch = dp_of(scope, &tensor);
    args = dp_list_make(scope, DP_LIST, &batch, 1);
    CHECK_OK(dp_invoke(par, scope, "forward", args, dp_none(), NULL, &out, NULL));
    CHECK(said_count > 0);
    CHECK_SAYS(said, "device 1 (cpu) is waited for: it is in net.forward since ");
    dp_scope_end(scope);
    dp_close(ctx);
}

static dp_status one_does_not_come(int local_rank, dp_scope *scope, void *user)
{
    dp_ctx *ctx = user;
    float one = 1;
    (void)scope;
    if (local_rank == 1) {
        rest(2 * HANG_MS);
        return DP_OK;
    }
    dp_status status = dp_rank_all_reduce(ctx, &one, &one, 1, DP_F32, DP_OP_SUM);
    CHECK(status == DP_ERR_TIMEOUT);
    CHECK_SAYS(dp_last_error(),
               "did not come within 2000 ms; it is in a function under dp_run since ");
    return DP_OK;
}

TEST(error_of_a_meeting_says_what_a_device_is_in)
{
    dp_ctx *ctx = open_watched(2);
    CHECK(dp_run(ctx, NULL, one_does_not_come, ctx) != DP_OK);
    CHECK_SAYS(dp_last_error(),
               "did not come within 2000 ms; it is in a function under dp_run since ");
    dp_close(ctx);
}

#if defined(__GLIBC__)
/* Runs on a device that is waited for, and returns all that went to stderr. */
static char *hang_with_stderr(dp_ctx *ctx)
{
    static char empty[] = "";
    size_t bytes = 0;
    int last = 1, before = dup(2), file = open("stderr.txt", O_CREAT | O_TRUNC | O_WRONLY, 0600);
    CHECK(before >= 0 && file >= 0 && dup2(file, 2) == 2);
    CHECK_OK(dp_run(ctx, NULL, rest_on_last, &last));
    CHECK(dup2(before, 2) == 2);
    close(before);
    close(file);
    char *text = get_file("stderr.txt", &bytes);
    if (bytes == 0)
        return empty;
    text[bytes - 1] = '\0';
    return text;
}

/* The signal comes while the thread sleeps: it sleeps on afterwards. */
TEST(thread_that_is_waited_for_prints_its_stack)
{
    enter_folder();
    dp_ctx *ctx = open_watched(2);
    CHECK(strstr(hang_with_stderr(ctx), "is here") == NULL);
    CHECK(said_count > 0);
    CHECK(strstr(said, " (thread ") != NULL);
    dp_close(ctx);
    CHECK_INT(setenv("DP_STUCK", "stack", 1), 0);
    for (int i = 0; i < 2; i++) {
        ctx = open_watched(2);
        const char *text = hang_with_stderr(ctx);
        CHECK(strstr(text, "a thread that is waited for is here:\n") != NULL);
        CHECK(strstr(text, "tests") != NULL); /* the program, in some of the frames */
        dp_close(ctx);
    }
}
#endif

static void leave_it(int signal_number)
{
    (void)signal_number;
}

TEST(stack_that_cannot_be_printed_is_told)
{
    dp_ctx *ctx;
    const dp_config config = {.device_count = 2, .log = {.fn = hear_of_devices}};
    awaited = "DP_STUCK";
    CHECK_INT(setenv("DP_STUCK", "stacks", 1), 0);
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_STR(said, "DP_STUCK is 'stacks', not stack");
    dp_close(ctx);
    CHECK_INT(setenv("DP_STUCK", "stack", 1), 0);
    signal(SIGURG, leave_it);
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_SAYS(said, "DP_STUCK: no stack can be printed here");
    signal(SIGURG, SIG_DFL);
    dp_close(ctx);
}
