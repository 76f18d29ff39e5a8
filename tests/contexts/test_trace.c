/* test_trace.c - the timeline of $DP_TRACE: read back line by line. */

#define _GNU_SOURCE /* P_tmpdir */

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>
#include "process.h"
#include "tree.h"
/* clang-format off */
#include "lazy.h"
#include "nets.h"
#include "dp_data.h"
/* clang-format on */

enum { LINES = 20000, ROWS = 20100, DEPTH = 16, PROCESSES = 3 };

/* ---- a file, and what it says ---------------------------------------------------------------- */

static char folder[256], path[320];

static void no_files(void)
{
    if (folder[0] == '\0')
        return;
    (void)unlink(path);
    (void)rmdir(folder);
}

static void trace_to(const char *name)
{
    if (folder[0] == '\0') {
        const char *top = access("/dev/shm", W_OK) == 0 ? "/dev/shm" : P_tmpdir;
        snprintf(folder, sizeof folder, "%s/trace-dp-XXXXXX", top);
        CHECK(mkdtemp(folder) != NULL);
        CHECK_INT(atexit(no_files), 0);
    }
    (void)unlink(path);
    snprintf(path, sizeof path, "%s/%s", folder, name);
    CHECK_INT(setenv("DP_TRACE", path, 1), 0);
}

static void trace_nothing(void)
{
    CHECK_INT(unsetenv("DP_TRACE"), 0);
}

typedef struct event {
    char phase;
    int process, row;
    double at;
    char name[300];
} event;

static event *events;
static int event_count;

/* All lines, in the form that they have here: other JSON would do, but nobody writes it. */
static void read_events(void)
{
    static char line[1024];
    FILE *file = fopen(path, "r");
    events = events != NULL ? events : test_room(LINES * sizeof *events);
    event_count = 0;
    CHECK(file != NULL);
    while (file != NULL && fgets(line, sizeof line, file) != NULL && event_count < LINES) {
        event *e = &events[event_count++];
        *e = (event){0};
        CHECK_INT(line[0], event_count == 1 ? '[' : ',');
        const char *body = line + 1, *end = line + strlen(line);
        CHECK(end - body > 3 && strcmp(end - 2, "}\n") == 0);
        if (sscanf(body, "{\"ph\":\"M\",\"pid\":%d,\"tid\":%d,", &e->process, &e->row) == 2) {
            e->phase = 'M';
            const char *value = strstr(body, "\"args\":{\"");
            CHECK(value != NULL);
            snprintf(e->name, sizeof e->name, "%s", value != NULL ? value + 9 : "");
            continue;
        }
        int count =
            sscanf(body, "{\"ph\":\"%c\",\"pid\":%d,\"tid\":%d,\"ts\":%lf,\"name\":\"%299[^\"]\"}",
                   &e->phase, &e->process, &e->row, &e->at, e->name);
        CHECK_INT(count, e->phase == 'E' ? 4 : 5);
        CHECK(e->phase == 'B' || e->phase == 'E');
        CHECK(e->process < PROCESSES && e->row < ROWS);
    }
    CHECK(event_count < LINES);
    if (file != NULL)
        fclose(file);
}

/* How many spans of this name have begun, and what is around the last of them. */
static int spans_of(const char *name, const char **out_around)
{
    static int(*open)[ROWS][DEPTH], depth[PROCESSES][ROWS];
    int count = 0;
    open = open != NULL ? open : test_room(PROCESSES * sizeof *open);
    memset(depth, 0, sizeof depth);
    for (int i = 0; i < event_count; i++) {
        const event *e = &events[i];
        int *own = open[e->process][e->row], *top = &depth[e->process][e->row];
        if (e->phase == 'E')
            *top -= *top > 0;
        if (e->phase != 'B')
            continue;
        if (strcmp(e->name, name) == 0) {
            count++;
            if (out_around != NULL)
                *out_around = *top > 0 ? events[own[*top - 1]].name : "";
        }
        CHECK(*top < DEPTH);
        own[*top] = i;
        *top += *top < DEPTH - 1;
    }
    return count;
}

static int spans(const char *name)
{
    return spans_of(name, NULL);
}

static const char *around(const char *name)
{
    const char *out = "(none)";
    (void)spans_of(name, &out);
    return out;
}

/* Each begin has its end, in every row, and time does not go backwards in it. */
static void check_whole(void)
{
    static double last[PROCESSES][ROWS];
    static int depth[PROCESSES][ROWS];
    memset(depth, 0, sizeof depth);
    memset(last, 0, sizeof last);
    for (int i = 0; i < event_count; i++) {
        const event *e = &events[i];
        if (e->phase == 'M')
            continue;
        CHECK(e->at >= last[e->process][e->row] && e->at < 100e6); /* microseconds since dp_open */
        last[e->process][e->row] = e->at;
        depth[e->process][e->row] += e->phase == 'B' ? 1 : -1;
        CHECK(depth[e->process][e->row] >= 0);
    }
    for (int p = 0; p < PROCESSES; p++)
        for (int r = 0; r < ROWS; r++)
            CHECK_INT(depth[p][r], 0);
}

/* The row with this name; -1: there is none. */
static int row_of(int process, const char *name)
{
    char wanted[80];
    snprintf(wanted, sizeof wanted, "name\":\"%s\"}}\n", name);
    for (int i = 0; i < event_count; i++)
        if (events[i].phase == 'M' && events[i].process == process &&
            strcmp(events[i].name, wanted) == 0)
            return events[i].row;
    return -1;
}

/* Where a row is shown. */
static int place_of(int process, int row)
{
    int place = -1;
    for (int i = 0; i < event_count; i++)
        if (events[i].phase == 'M' && events[i].process == process && events[i].row == row)
            (void)sscanf(events[i].name, "sort_index\":%d}}", &place);
    return place;
}

/* Of the begins in a row. */
static int spans_in(int process, int row, const char *name)
{
    int count = 0;
    for (int i = 0; i < event_count; i++)
        count += events[i].phase == 'B' && events[i].process == process && events[i].row == row &&
                 strcmp(events[i].name, name) == 0;
    return count;
}

static void span(const char *name)
{
    dp_trace_begin(name);
    dp_trace_end();
}

/* ---- what is in it --------------------------------------------------------------------------- */

static const net_shape shape;

static void train(dp_ctx *ctx, bool all, int steps)
{
    dp_module *net = net_create(ctx, &shape, 0), *par = NULL;
    if (all)
        CHECK_OK(dp_distributed(net, NULL, &par));
    else
        CHECK_OK(dp_data_parallel(net, NULL, &par));
    for (int step = 0; step < steps; step++)
        CHECK_OK(net_step(net, par, step));
    CHECK_OK(dp_wait(ctx));
}

TEST(a_step_is_seen_from_all_sides)
{
    trace_to("step.json");
    dp_ctx *ctx = open_cpus(3);
    train(ctx, false, 2);
    dp_close(ctx);
    read_events();
    check_whole();
    int caller = row_of(0, "caller, device 0"), second = row_of(0, "device 1");
    CHECK(place_of(0, caller) == 0 && place_of(0, second) == 1);
    CHECK(caller > 0 && second > 0 && row_of(0, "device 2") > 0 && row_of(0, "device 3") < 0);
    CHECK_INT(row_of(0, "process 0"), 0);
    CHECK_INT(spans("net.forward"), 6);
    CHECK_INT(spans_in(0, caller, "net.forward"), 2);
    CHECK_INT(spans_in(0, second, "net.backward"), 2);
    CHECK_INT(spans_in(0, caller, "forward"), 2);
    CHECK_INT(spans_in(0, caller, "scatter"), 2);
    CHECK_INT(spans_in(0, caller, "gather"), 2);
    CHECK_INT(spans_in(0, caller, "backward"), 2);
    CHECK_INT(spans_in(0, second, "backward"), 0);
    CHECK_INT(spans("sum of gradients"), 2);
    CHECK_STR(around("sum of gradients"), "backward");
}

static dp_status nothing(int local_rank, dp_scope *scope, void *user)
{
    (void)local_rank;
    (void)scope;
    (void)user;
    dp_trace_begin("inner");
    dp_trace_end();
    return DP_OK;
}

static dp_status read_number(dp_sample *sample, void *user)
{
    (void)user;
    *(int64_t *)sample->rows[0] = sample->index;
    return DP_OK;
}

TEST(trace_has_every_wait_of_a_program)
{
    const dp_field field = {"x", DP_I64, 0, {0}};
    const dp_loader_config config = {.sampler = {.count = 4},
                                     .batch = 2,
                                     .read = read_number,
                                     .fields = &field,
                                     .field_count = 1};
    dp_loader *loader = NULL;
    dp_batch batch;
    trace_to("program.json");
    dp_ctx *ctx = open_cpus(2);
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_run(ctx, scope, nothing, NULL));
    CHECK_OK(dp_loader_create(ctx, &config, &loader));
    for (int i = 0; i < 3; i++) /* the last: an epoch's end, for which nobody waits */
        CHECK_OK(dp_loader_next(loader, scope, &batch));
    dp_scope_end(scope);
    dp_close(ctx);
    read_events();
    check_whole();
    CHECK_INT(spans("inner"), 2);
    CHECK_STR(around("inner"), "a function under dp_run");
    CHECK_INT(spans_in(0, row_of(0, "device 1"), "inner"), 1);
    CHECK_INT(spans("dp_loader_next"), 2);
}

static void streams(const dp_device_ops *ops)
{
    const dp_device_ops *const tables[] = {ops, NULL};
    dp_ctx *ctx = NULL;
    trace_to("streams.json");
    CHECK_OK(dp_open(&(dp_config){.backends = tables, .device_count = 2}, &ctx));
    train(ctx, true, 2);
    dp_close(ctx);
    read_events();
    check_whole();
    for (int i = 0; i < 2; i++) {
        int row = row_of(0, i == 0 ? "stream of device 0" : "stream of device 1");
        CHECK(row > 0 && place_of(0, row) > place_of(0, row_of(0, "device 1")));
        CHECK_INT(spans_in(0, row, "net.forward"), 2);
        CHECK_INT(spans_in(0, row, "net.backward"), 2);
        CHECK_INT(spans_in(0, row, "all_reduce of 22 f32 (mean)"), 2);
    }
    CHECK_INT(spans("net.forward"), 8);
    trace_nothing();
    CHECK_OK(dp_open(&(dp_config){.backends = tables, .device_count = 2}, &ctx));
    train(ctx, true, 1);
    dp_close(ctx);
}

TEST(streams_have_rows_of_their_own_lazy)
{
    streams(lazy_device(toy_device()));
}

#if defined(TEST_CUDA)
TEST(streams_have_rows_of_their_own_on_gpus_cuda)
{
    streams(cuda_device(2));
}
#endif

#if defined(TEST_SIM)
TEST(a_profiler_hears_of_the_same_spans_cuda)
{
    const dp_device_ops *const tables[] = {cuda_device(2), NULL};
    dp_ctx *ctx = NULL;
    cuda_alone();
    sim_listen();
    trace_nothing();
    CHECK_OK(dp_open(&(dp_config){.backends = tables, .device_count = 2}, &ctx));
    train(ctx, true, 3);
    CHECK_INT(sim_ranges("net.forward"), 6);
    CHECK_INT(sim_ranges("all_reduce of 22 f32 (mean)"), 3);
    CHECK_INT(sim_open_ranges(), 0);
    span("after");
    CHECK_INT(sim_ranges("after"), 1);
    dp_close(ctx);
    trace_to("both.json");
    CHECK_OK(dp_open(&(dp_config){.backends = tables, .device_count = 2}, &ctx));
    train(ctx, true, 1);
    dp_close(ctx);
    CHECK_INT(sim_ranges("net.forward"), 8);
    CHECK_INT(sim_open_ranges(), 0);
    read_events();
    check_whole();
    CHECK_INT(spans_in(0, row_of(0, "device 1"), "net.forward"), 1);
}
#endif

TEST(names_are_any_text)
{
    static char longest[1000];
    memset(longest, 'x', sizeof longest - 1);
    trace_to("names.json");
    dp_ctx *ctx = open_cpus(1);
    const char *const names[] = {"",
                                 NULL,
                                 "a\"b",
                                 "a\\b",
                                 "tab\there",
                                 "\xff\x80",
                                 "\xc3\xa9t\xc3\xa9 \xf0\x9f\x98\x80",
                                 "\xc3",
                                 longest,
                                 "\xed\xa0\x80",
                                 "\xee\x80\x80",
                                 "\x01"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++) {
        dp_trace_begin(names[i]);
        dp_trace_end();
    }
    dp_close(ctx);
    read_events();
    check_whole();
    CHECK_INT(spans("(no name)"), 2);
    CHECK_INT(spans("a\\u0022b"), 1);
    CHECK_INT(spans("a\\u005cb"), 1);
    CHECK_INT(spans("tab\\u0009here"), 1);
    CHECK_INT(spans("\\u00ff\\u0080"), 1);
    CHECK_INT(spans("\xc3\xa9t\xc3\xa9 \xf0\x9f\x98\x80"), 1);
    CHECK_INT(spans("\\u00c3"), 1);
    CHECK_INT(spans("\\u0001"), 1);
    CHECK_INT(spans("\\u00ed\\u00a0\\u0080"), 1); /* half of a pair is no character */
    CHECK_INT(spans("\xee\x80\x80"), 1);
    longest[234] = '\0'; /* as much as there is room for, with what may have to be escaped */
    CHECK_INT(spans(longest), 1);
}

TEST(without_the_variable_there_is_none)
{
    trace_to("none.json");
    trace_nothing();
    dp_ctx *ctx = open_cpus(2);
    dp_trace_begin("nobody sees it");
    train(ctx, false, 1);
    dp_trace_end();
    dp_close(ctx);
    dp_trace_end(); /* nor is anything open */
    CHECK_INT(access(path, F_OK), -1);
}

/* ---- whose it is, and when ------------------------------------------------------------------- */

TEST(contexts_share_a_file)
{
    trace_to("several.json");
    FILE *old = fopen(path, "w");
    CHECK(old != NULL && fputs("left by an earlier run\n", old) >= 0 && fclose(old) == 0);
    dp_ctx *first = open_cpus(2), *second = open_cpus(2);
    train(first, false, 1);
    train(second, false, 1);
    dp_close(first);
    span("still");
    dp_close(second);
    span("closed");
    dp_ctx *third = open_cpus(1); /* goes on in the same file */
    span("again");
    trace_nothing();
    dp_ctx *fourth = open_cpus(1); /* shares what is open */
    dp_close(third);
    span("nobody's");
    dp_close(fourth);
    read_events();
    check_whole();
    CHECK_INT(spans("net.forward"), 4);
    CHECK_INT(spans("still"), 1);
    CHECK_INT(spans("closed"), 0);
    CHECK_INT(spans("again"), 1);
    CHECK_INT(spans("nobody's"), 0);
    trace_to("other.json");
    dp_ctx *fifth = open_cpus(1);
    span("elsewhere");
    dp_close(fifth);
    read_events();
    check_whole();
    CHECK_INT(spans("elsewhere"), 1);
    CHECK_INT(spans("again"), 0);
    CHECK(row_of(0, "caller, device 0") > 0); /* who it is is said again */
}

TEST(a_file_that_cannot_be_made_is_an_error)
{
    dp_ctx *ctx = NULL;
    CHECK_INT(setenv("DP_TRACE", "/nowhere/at/all.json", 1), 0);
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 2}, &ctx), DP_ERR_FILE,
                "$DP_TRACE: '/nowhere/at/all.json': No such file or directory");
    CHECK(ctx == NULL);
    CHECK_INT(setenv("DP_TRACE", "", 1), 0); /* the same as none */
    ctx = open_cpus(2);
    span("nothing");
    dp_close(ctx);
    trace_to("fine.json");
    ctx = open_cpus(2);
    span("fine");
    dp_close(ctx);
    read_events();
    CHECK_INT(spans("fine"), 1);
}

TEST(a_full_disk_ends_the_timeline_alone)
{
    struct rlimit limit = {.rlim_cur = 3000, .rlim_max = RLIM_INFINITY};
    trace_to("full.json");
    dp_ctx *ctx = open_cpus(2);
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    for (int i = 0; i < 5000; i++)
        span("more than 64 KiB in all");
    limit.rlim_cur = RLIM_INFINITY;
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &limit), 0);
    train(ctx, false, 2); /* a hole in it would mislead */
    dp_close(ctx);
    struct stat is;
    CHECK_INT(stat(path, &is), 0);
    CHECK(is.st_size <= 3000);
}

TEST(lines_can_be_read_before_the_end)
{
    trace_to("early.json");
    dp_ctx *ctx = open_cpus(1);
    dp_trace_begin("first");
    read_events();
    CHECK_INT(spans("first"), 0); /* not every line is written at once */
    rest(300);
    dp_trace_begin("second");
    read_events();
    CHECK_INT(spans("second"), 1);
    CHECK_STR(around("second"), "first");
    dp_trace_begin("third");
    dp_abort(ctx, DP_ERR_ABORTED, "by the test");
    read_events();
    CHECK_STR(around("third"), "second"); /* what was under way when the job failed */
    dp_close(ctx);
}

static void *spans_of_a_thread(void *user)
{
    for (int i = 0; i < 1000; i++) {
        dp_trace_begin(user);
        span("inside");
        dp_trace_end();
    }
    return NULL;
}

TEST(threads_do_not_mix)
{
    enum { THREADS = 3 };
    pthread_t threads[THREADS];
    char name[] = "a thread's";
    trace_to("threads.json");
    dp_ctx *ctx = open_cpus(2);
    train(ctx, false, 1); /* the devices have the first rows */
    for (int i = 0; i < THREADS; i++)
        CHECK_INT(pthread_create(&threads[i], NULL, spans_of_a_thread, name), 0);
    train(ctx, false, 2);
    for (int i = 0; i < THREADS; i++)
        CHECK_INT(pthread_join(threads[i], NULL), 0);
    dp_close(ctx);
    read_events();
    check_whole();
    CHECK_INT(spans("inside"), 3000);
    CHECK_STR(around("inside"), name);
    CHECK(row_of(0, "thread 3") > 0 && row_of(0, "thread 2") < 0);
    CHECK(place_of(0, row_of(0, "thread 3")) > place_of(0, row_of(0, "device 1")));
    CHECK_INT(spans("net.forward"), 6);
}

/* ---- processes ------------------------------------------------------------------------------- */

/* A context of the parent's is of no use in a child; those that it opens have a timeline of their
   own, in the same file or another. */
static void child_of_fork(dp_ctx *parents)
{
    span("of nobody");
    dp_close(parents);
    dp_ctx *first = open_cpus(1), *second = open_cpus(1);
    span("of the child");
    dp_close(first);
    span("and later");
    dp_close(second);
    span("of nobody");
    exit(EXIT_SUCCESS);
}

/* A worker that begins allocates, under a lock of a sanitizer's which a child would wait for. */
static void check_child(dp_ctx *ctx, bool elsewhere)
{
    char other[320];
    snprintf(other, sizeof other, "%s/child.json", folder);
    CHECK_OK(dp_run(ctx, NULL, nothing, NULL));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        FILE *old = elsewhere ? fopen(other, "w") : NULL;
        if (elsewhere)
            CHECK(old != NULL && fputs("of an earlier run\n", old) >= 0 && fclose(old) == 0 &&
                  setenv("DP_TRACE", other, 1) == 0);
        folder[0] = '\0'; /* it stays */
        child_of_fork(ctx);
    }
    int status = 0;
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    if (!elsewhere)
        return;
    CHECK_INT(rename(other, path), 0);
    read_events();
    CHECK_INT(spans("of the child"), 1);
    CHECK_INT(spans("and later"), 1);
    CHECK_INT(spans("once"), 0);
}

TEST(a_child_of_fork_begins_anew)
{
    trace_to("fork.json");
    dp_ctx *ctx = open_cpus(2);
    span("once");
    check_child(ctx, false);
    span("twice");
    dp_close(ctx);
    read_events();
    CHECK_INT(spans("once"), 1);
    CHECK_INT(spans("twice"), 1);
    CHECK_INT(spans("of the child"), 1);
    CHECK_INT(spans("and later"), 1);
    CHECK_INT(spans("of nobody"), 0);
    ctx = open_cpus(2);
    check_child(ctx, true);
    dp_close(ctx);
}

TEST(files_are_closed)
{
    trace_to("closed.json");
    dp_close(open_cpus(2));
    int before = dup(STDIN_FILENO);
    CHECK_INT(close(before), 0);
    for (int i = 0; i < 3; i++) {
        dp_ctx *first = open_cpus(2), *second = open_cpus(1);
        span("now");
        dp_close(first);
        dp_close(second);
        trace_to(i == 1 ? "closed.json" : "another.json"); /* made by this process once before */
    }
    int after = dup(STDIN_FILENO);
    CHECK_INT(after, before);
    CHECK_INT(close(after), 0);
}

static dp_status one_of_several(void *user)
{
    dp_ctx *ctx = NULL;
    (void)user;
    if (dp_open(&(dp_config){.device_count = 2}, &ctx) != DP_OK)
        return DP_ERR_USER;
    train(ctx, true, 3);
    dp_close(ctx);
    return DP_OK;
}

TEST_SLOW(processes_share_a_file, 30)
{
    enum { COUNT = 3 };
    test_needs_processes(COUNT);
    trace_to("job.json");
    unsetenv("DP_LAUNCH");
    CHECK_OK(dp_spawn(COUNT, one_of_several, NULL));
    read_events();
    check_whole();
    for (int p = 0; p < COUNT; p++) {
        char name[32];
        snprintf(name, sizeof name, "process %d", p);
        CHECK_INT(row_of(p, name), 0);
        CHECK_INT(spans_in(p, row_of(p, "caller, device 0"), "net.forward"), 3);
        CHECK_INT(spans_in(p, row_of(p, "device 1"), "net.forward"), 3);
        int carried = spans_in(p, row_of(p, "courier"), "all_reduce of 22 f32 (mean)");
        CHECK(carried == 0 ||
              place_of(p, row_of(p, "courier")) > place_of(p, row_of(p, "device 1")));
        carried += spans_in(p, row_of(p, "caller, device 0"), "all_reduce of 22 f32 (mean)");
        CHECK_INT(carried, 3);
    }
    CHECK_STR(around("all_reduce of 22 f32 (mean)"), "bucket 0 of 'net', 'w'");
}
