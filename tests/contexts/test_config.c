/* test_config.c - defaults, what becomes of a config, every rejection, the environment, the log. */

#define _GNU_SOURCE 1 /* sched_setaffinity */
#include <limits.h>
#include <math.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "layout.h"
#include "process.h"

static void clean_environment(void)
{
    CHECK_INT(unsetenv("DP_DEVICES"), 0);
    CHECK_INT(unsetenv("DP_TIMEOUT"), 0);
    CHECK_INT(unsetenv("DP_DEBUG"), 0);
}

static void set_environment(const char *name, const char *value)
{
    clean_environment();
    CHECK_INT(setenv(name, value, 1), 0);
}

static int core_count(void)
{
    cpu_set_t cores;
    CHECK_INT(sched_getaffinity(0, sizeof cores, &cores), 0);
    return CPU_COUNT(&cores);
}

static dp_ctx *open_ctx(const dp_config *config)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(config, &ctx));
    CHECK(ctx != NULL);
    return ctx;
}

static int local_count(const dp_config *config)
{
    dp_ctx *ctx = open_ctx(config);
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    dp_close(ctx);
    return info.local_count;
}

/* ---- defaults -------------------------------------------------------------------------------- */

static void check_defaults(dp_ctx *ctx)
{
    int cores = core_count(), devices = cores < 8 ? cores : 8;
    dp_config config;
    CHECK_OK(dp_config_get(ctx, &config));
    CHECK_INT(config.device_count, devices);
    CHECK(config.devices != NULL);
    for (int i = 0; i < devices; i++) {
        CHECK_INT(config.devices[i], i);
    }
    CHECK_INT(config.thread_count, cores);
    CHECK_INT(config.timeout_ms, 60000);
    CHECK(!config.poison);
    CHECK(config.allocator.alloc != NULL && config.allocator.free != NULL);
    CHECK(config.log.fn == NULL);
    CHECK_INT(config.bootstrap.process, 0);
    CHECK_INT(config.bootstrap.process_count, 1);
    CHECK(config.backends != NULL && config.backends[0] != NULL);
    CHECK(config.colls != NULL && config.colls[0] != NULL);

    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.process, 0);
    CHECK_INT(info.process_count, 1);
    CHECK_INT(info.rank_first, 0);
    CHECK_INT(info.rank_count, devices);
    CHECK_INT(info.local_count, devices);
    CHECK_INT(info.core_count, cores);
    CHECK_INT(info.threads_per_device, cores / devices);
    CHECK_STR(info.device_backend, config.backends[0]->name);
}

TEST(null_is_the_zero_config)
{
    clean_environment();
    dp_ctx *ctx = open_ctx(NULL);
    check_defaults(ctx);
    dp_close(ctx);
}

TEST(zero_config_is_the_default)
{
    clean_environment();
    dp_ctx *ctx = open_ctx(&(dp_config){0});
    check_defaults(ctx);
    dp_close(ctx);
}

TEST(no_more_devices_than_threads_by_default)
{
    clean_environment();
    for (int threads = 1; threads <= 9; threads++) {
        int devices = core_count() < 8 ? core_count() : 8;
        devices = threads < devices ? threads : devices;
        CHECK_INT(local_count(&(dp_config){.thread_count = threads}), devices);
    }
}

TEST(default_allocator_gives_aligned_memory)
{
    dp_ctx *ctx = open_ctx(NULL);
    dp_config config;
    CHECK_OK(dp_config_get(ctx, &config));
    for (size_t align = 1; align <= 4096; align *= 2) {
        unsigned char *data = config.allocator.alloc(100, align, config.allocator.user);
        CHECK(data != NULL && (uintptr_t)data % align == 0);
        memset(data, 1, 100);
        config.allocator.free(data, 100, config.allocator.user);
    }
    dp_close(ctx);
}

TEST(world_of_one_has_no_communicator)
{
    dp_ctx *ctx = open_ctx(&(dp_config){.device_count = 1});
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, "none");
    CHECK_INT(info.rank_count, 1);
    dp_close(ctx);
}

/* ---- what is given is what is used ----------------------------------------------------------- */

static void ignore_record(const dp_log_record *record, void *user)
{
    (void)record;
    (void)user;
}

TEST(given_values_are_read_back)
{
    test_allocator counter = {0};
    int devices[] = {0, 1, 0}, user = 0;
    dp_config config = {
        .device_count = 3,
        .devices = devices,
        .thread_count = 5,
        .timeout_ms = 1234,
        .poison = true,
        .allocator = test_allocator_of(&counter),
        .log = {.fn = ignore_record, .user = &user, .level = DP_LOG_WARN},
    };
    dp_ctx *ctx = open_ctx(&config);
    memset(&config, 0x5a, sizeof config); /* copied: may die after the call */
    memset(devices, 0x5a, sizeof devices);

    dp_config got;
    CHECK_OK(dp_config_get(ctx, &got));
    CHECK_INT(got.device_count, 3);
    CHECK(got.devices[0] == 0 && got.devices[1] == 1 && got.devices[2] == 0);
    CHECK_INT(got.thread_count, 5);
    CHECK_INT(got.timeout_ms, 1234);
    CHECK(got.poison);
    CHECK(got.allocator.alloc == test_allocator_of(&counter).alloc);
    CHECK(got.allocator.user == &counter);
    CHECK(got.log.fn == ignore_record && got.log.user == &user);
    CHECK_INT(got.log.level, DP_LOG_WARN);
    dp_close(ctx);
    CHECK_NO_LEAKS(&counter);
}

TEST(a_zero_that_is_meant_is_told_from_one_that_is_not)
{
    CHECK_F64(dp_or(0, 3), 3, 0);
    CHECK_F64(dp_or(-0.0, 3), 3, 0);
    CHECK_F64(dp_or(DP_ZERO, 3), 0, 0);
    CHECK(!signbit(dp_or(DP_ZERO, 3)));
    CHECK_F64(dp_or(0.5, 3), 0.5, 0);
    CHECK_F64(dp_or(5e-324, 3), 5e-324, 0);
    CHECK_F64(dp_or(-1e-299, 3), -1e-299, 0);
    CHECK_F64(dp_or(-HUGE_VAL, 3), -HUGE_VAL, 0);
    CHECK_F64(dp_or((double)NAN, 3), (double)NAN, 0);
    CHECK(isnan(dp_or(0, (double)NAN)));
}

TEST(log_level_zero_is_info)
{
    dp_ctx *ctx = open_ctx(&(dp_config){.log = {.fn = ignore_record}});
    dp_config got;
    CHECK_OK(dp_config_get(ctx, &got));
    CHECK_INT(got.log.level, DP_LOG_INFO);
    dp_close(ctx);
}

TEST(a_config_can_be_opened_again)
{
    dp_ctx *first = open_ctx(&(dp_config){.device_count = 3, .thread_count = 2});
    dp_config config;
    CHECK_OK(dp_config_get(first, &config));
    dp_ctx *second = open_ctx(&config);
    dp_config got;
    CHECK_OK(dp_config_get(second, &got));
    CHECK_INT(got.device_count, 3);
    CHECK_INT(got.thread_count, 2);
    dp_close(second);
    dp_close(first);
}

TEST(repeated_devices_are_devices_of_their_own)
{
    dp_ctx *ctx = open_ctx(&(dp_config){.device_count = 3, .devices = (int[]){0, 0, 0}});
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_INT(info.local_count, 3);
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i < 3; i++) {
        dp_device_info device;
        dp_tensor tensor;
        CHECK_OK(dp_device_info_get(ctx, i, &device));
        CHECK(device.name[0] != '\0' && device.host_memory);
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, i), DP_F32, 1, (int64_t[]){4}, &tensor));
        CHECK_OK(dp_fill(ctx, &tensor, dp_int(i)));
        for (int k = 0; k < i; k++) {
            CHECK(dp_local_stream(ctx, i) != dp_local_stream(ctx, k));
            CHECK(dp_local_device(ctx, i).index != dp_local_device(ctx, k).index);
        }
    }
    CHECK_ERROR(dp_device_info_get(ctx, 3, &(dp_device_info){.name = ""}), DP_ERR_INVALID,
                "dp_device_info_get: ");
    dp_scope_end(scope);
    dp_close(ctx);
}

/* ---- rejections ------------------------------------------------------------------------------ */

static void *no_alloc(size_t bytes, size_t align, void *user)
{
    (void)bytes;
    (void)align;
    (void)user;
    return NULL;
}

static void no_free(void *data, size_t bytes, void *user)
{
    (void)data;
    (void)bytes;
    (void)user;
}

static dp_status no_gather(const void *in, void *out, size_t bytes_each, void *user)
{
    (void)in;
    (void)out;
    (void)bytes_each;
    (void)user;
    return DP_ERR_USER;
}

static void check_rejected(const dp_config *config, dp_status want, const char *part)
{
    dp_ctx *ctx = NULL;
    CHECK_INT(dp_error(DP_ERR_USER, "stale"), DP_ERR_USER);
    dp_status status = dp_open(config, &ctx);
    if (status != want || strstr(dp_last_error(), part) == NULL) {
        test_fail(__FILE__, __LINE__, "dp_open gives %s, \"%s\", wanted %s and \"%s\"",
                  dp_status_name(status), dp_last_error(), dp_status_name(want), part);
    }
    CHECK(ctx == NULL);
    CHECK(strncmp(dp_last_error(), "dp_open: ", 9) == 0);
}

TEST(wrong_values_are_rejected_by_name)
{
    clean_environment();
    const struct {
        dp_config config;
        const char *part;
    } wrong[] = {
        {{.device_count = -1}, "device_count"},
        {{.device_count = INT_MIN}, "device_count"},
        {{.device_count = INT_MAX}, "device_count"},
        {{.thread_count = -1}, "thread_count"},
        {{.threads_per_device = -2}, "threads_per_device"},
        {{.thread_count = INT_MIN}, "thread_count"},
        {{.timeout_ms = -1}, "timeout_ms"},
        {{.devices = (int[]){0}}, "device_count"},
        {{.allocator = {.alloc = no_alloc}}, "allocator"},
        {{.allocator = {.free = no_free}}, "allocator"},
        {{.log = {.fn = ignore_record, .level = (dp_level)77}}, "level"},
        {{.log = {.fn = ignore_record, .level = (dp_level)-1}}, "level"},
        {{.bootstrap = {.process_count = -1}}, "process_count"},
        {{.bootstrap = {.process = -1, .all_gather = no_gather}}, "process"},
        {{.bootstrap = {.process = 1, .all_gather = no_gather}}, "process"},
        {{.bootstrap = {.process = 2, .process_count = 2, .all_gather = no_gather}}, "process"},
        {{.bootstrap = {.process_count = 1, .all_gather = no_gather}, .local_only = true},
         "local_only is set, and bootstrap is given"},
        {{.bootstrap = {.process_count = 2}}, "all_gather"},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        check_rejected(&wrong[i].config, DP_ERR_INVALID, wrong[i].part);
    }
    dp_close(open_ctx(NULL));
}

TEST(an_index_without_a_device_is_rejected)
{
    check_rejected(&(dp_config){.device_count = 1, .devices = (int[]){-1}}, DP_ERR_NO_DEVICE, "-1");
    check_rejected(&(dp_config){.device_count = 3, .devices = (int[]){0, 0, INT_MIN}},
                   DP_ERR_NO_DEVICE, "-2147483648");
}

TEST(a_null_context_pointer_is_rejected)
{
    CHECK_ERROR(dp_open(NULL, NULL), DP_ERR_INVALID, "dp_open: ");
    CHECK_ERROR(dp_open(&(dp_config){.device_count = 2}, NULL), DP_ERR_INVALID, "dp_open: ");
}

static void check_other_header(const dp_config *config, size_t bytes, int version)
{
    dp_ctx *ctx = NULL;
    char number[32]; /* the sentence says what differs */
    if (version != DP_VERSION) {
        snprintf(number, sizeof number, "%d", version);
    } else {
        snprintf(number, sizeof number, "%zu", bytes);
    }
    CHECK_INT(dp_status_class(dp__open(config, bytes, version, &ctx)), DP_CLASS_CALL);
    CHECK(strstr(dp_last_error(), "dp_open: ") != NULL && strstr(dp_last_error(), number) != NULL);
    CHECK(ctx == NULL);
}

TEST(another_header_than_the_implementations_is_rejected)
{
    dp_config config = {0};
    const int versions[] = {0, -1, DP_VERSION - 100, DP_VERSION + 100, INT_MAX, INT_MIN};
    for (size_t i = 0; i < sizeof versions / sizeof versions[0]; i++) {
        check_other_header(&config, sizeof config, versions[i]);
        check_other_header(NULL, sizeof config, versions[i]);
    }
    const size_t sizes[] = {0, 1, sizeof config - 8, sizeof config + 8, SIZE_MAX};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        check_other_header(&config, sizes[i], DP_VERSION);
        check_other_header(NULL, sizes[i], DP_VERSION);
    }
}

TEST(a_program_runs_with_another_patch_of_its_release)
{
    dp_ctx *ctx;
    const dp_config config = {.device_count = 1};
    CHECK_OK(dp__open(&config, sizeof config, DP_VERSION / 100 * 100 + 99, &ctx));
    dp_close(ctx);
}

/* An allocator that never gives anything: nothing is made behind its back, nothing is kept. */
TEST(an_allocator_that_gives_nothing)
{
    check_rejected(&(dp_config){.allocator = {.alloc = no_alloc, .free = no_free}},
                   DP_ERR_NO_MEMORY, "dp_open: ");
}

/* ---- tables ---------------------------------------------------------------------------------- */

typedef struct method {
    const char *name;
    size_t offset;
} method;

#define DEVICE_METHOD(name)                                                                        \
    {                                                                                              \
#name, offsetof(dp_device_ops, name)                                                       \
    }
static const method device_methods[] = {
    DEVICE_METHOD(count),         DEVICE_METHOD(open),           DEVICE_METHOD(close),
    DEVICE_METHOD(info),          DEVICE_METHOD(alloc),          DEVICE_METHOD(free),
    DEVICE_METHOD(stream_create), DEVICE_METHOD(stream_destroy), DEVICE_METHOD(stream_sync),
    DEVICE_METHOD(event_create),  DEVICE_METHOD(event_destroy),  DEVICE_METHOD(event_record),
    DEVICE_METHOD(event_wait),    DEVICE_METHOD(event_sync),     DEVICE_METHOD(copy_in),
    DEVICE_METHOD(copy_out),      DEVICE_METHOD(copy),
};

#define COLL_METHOD(name)                                                                          \
    {                                                                                              \
#name, offsetof(dp_coll_ops, name)                                                         \
    }
static const method coll_methods[] = {
    COLL_METHOD(fits),
    COLL_METHOD(open),
    COLL_METHOD(close),
    COLL_METHOD(run),
};

static void (*const no_method)(void) = NULL;

/* Copies of the tables that are compiled in, to be spoilt. */
static void copy_tables(dp_device_ops *out_device, dp_coll_ops *out_coll)
{
    dp_ctx *ctx = open_ctx(&(dp_config){.device_count = 2});
    dp_config config;
    CHECK_OK(dp_config_get(ctx, &config));
    *out_device = *config.backends[0];
    *out_coll = *config.colls[0];
    dp_close(ctx);
}

static void check_device_table_rejected(const dp_device_ops *ops, const char *part)
{
    const dp_device_ops *list[] = {ops, NULL};
    check_rejected(&(dp_config){.backends = list, .device_count = 2}, DP_ERR_INVALID, part);
}

static void check_coll_table_rejected(const dp_coll_ops *ops, const char *part)
{
    const dp_coll_ops *list[] = {ops, NULL};
    check_rejected(&(dp_config){.colls = list, .device_count = 2}, DP_ERR_INVALID, part);
}

TEST(device_tables_without_what_is_required_are_rejected)
{
    dp_device_ops good, bad;
    dp_coll_ops coll;
    copy_tables(&good, &coll);
    const size_t count = sizeof device_methods / sizeof device_methods[0];
    for (size_t i = 0; i < count; i++) {
        bad = good;
        bad.name = "spoilt";
        memcpy((char *)&bad + device_methods[i].offset, &no_method, sizeof no_method);
        check_device_table_rejected(&bad, device_methods[i].name);
        CHECK(strstr(dp_last_error(), "spoilt") != NULL);

        bad = good;
        bad.head.size = (uint32_t)device_methods[i].offset;
        check_device_table_rejected(&bad, device_methods[i].name);
    }
    bad = good;
    bad.head.size = 0;
    check_device_table_rejected(&bad, "size");
    bad = good;
    bad.name = NULL;
    check_device_table_rejected(&bad, "name");
}

TEST(coll_tables_without_what_is_required_are_rejected)
{
    dp_device_ops device;
    dp_coll_ops good, bad;
    copy_tables(&device, &good);
    const size_t count = sizeof coll_methods / sizeof coll_methods[0];
    for (size_t i = 0; i < count; i++) {
        bad = good;
        bad.name = "spoilt";
        memcpy((char *)&bad + coll_methods[i].offset, &no_method, sizeof no_method);
        check_coll_table_rejected(&bad, coll_methods[i].name);
        CHECK(strstr(dp_last_error(), "spoilt") != NULL);

        bad = good;
        bad.head.size = (uint32_t)coll_methods[i].offset;
        check_coll_table_rejected(&bad, coll_methods[i].name);
    }
    for (int verb = DP_ALL_REDUCE; verb <= DP_SCATTER_FROM; verb++) {
        bool needed = verb <= DP_ALL_GATHER, known = verb <= DP_ALL_TO_ALL;
        bad = good;
        bad.name = "spoilt";
        bad.verbs ^= 1u << verb;
        if (needed || !known)
            check_coll_table_rejected(&bad, "table 'spoilt' has verbs 0x");
    }
    bad = good;
    bad.head.size = 0;
    check_coll_table_rejected(&bad, "size");
    bad = good;
    bad.name = NULL;
    check_coll_table_rejected(&bad, "name");
}

/* Compiled before a change, or after one, or with a method that is not known here. */
TEST(tables_of_another_header_are_rejected)
{
    static const dp_table_head heads[] = {
        {0, DP_LAYOUT - 1}, {0, DP_LAYOUT + 1}, {0, UINT32_MAX}, {1, DP_LAYOUT}, {8, DP_LAYOUT}};
    dp_device_ops device, bad_device;
    dp_coll_ops coll, bad_coll;
    char text[160];
    copy_tables(&device, &coll);
    for (size_t i = 0; i < sizeof heads / sizeof heads[0]; i++) {
        bad_device = device;
        bad_device.head.size += heads[i].size;
        bad_device.head.layout = heads[i].layout;
        bad_device.count = NULL;
        snprintf(text, sizeof text,
                 "dp_open: backends[0] is a table of layout %u and size %u, the implementation's "
                 "have layout %d and size %zu",
                 heads[i].layout, bad_device.head.size, DP_LAYOUT, sizeof device);
        check_device_table_rejected(&bad_device, text);
        bad_coll = coll;
        bad_coll.head.size += heads[i].size;
        bad_coll.head.layout = heads[i].layout;
        const dp_coll_ops *list[] = {&coll, &bad_coll, NULL};
        snprintf(text, sizeof text, "dp_open: colls[1] is a table of layout %u and size %u, ",
                 heads[i].layout, bad_coll.head.size);
        check_rejected(&(dp_config){.colls = list, .device_count = 2}, DP_ERR_INVALID, text);
    }
}

/* Before there were layouts the first member was a size_t, and some methods were others. */
TEST(tables_without_a_layout_are_rejected)
{
    struct {
        size_t size;
        const char *name;
        void (*methods[12])(void);
    } old = {sizeof old, "old", {NULL}};
    dp_coll_ops read;
    memcpy(&read, &old, sizeof read);
    check_coll_table_rejected(&read, "it was compiled with another dp.h, or its head is not "
                                     "DP_TABLE");
}

static void check_places(const layout_place *places, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (places[i].is != places[i].was)
            test_fail(__FILE__, __LINE__, "%s was %zu and is %zu: this is another DP_LAYOUT",
                      places[i].name, places[i].was, places[i].is);
}

TEST(a_layout_stays_what_it_is)
{
    CHECK_INT(DP_LAYOUT, 1);
    check_places(layout_numbers, sizeof layout_numbers / sizeof layout_numbers[0]);
    if (sizeof(void *) == 8)
        check_places(layout_places, sizeof layout_places / sizeof layout_places[0]);
}

static dp_status open_nothing(const dp_host *host, int index, dp_dev **out)
{
    static dp_dev hollow;
    (void)host;
    host->log(host, DP_LOG_WARN, "a hollow device");
    *out = index < 0 ? NULL : &hollow;
    return DP_OK;
}

static void keep_record(const dp_log_record *record, void *user)
{
    snprintf(user, 64, "%s", record->text);
}

TEST(a_device_needs_a_table)
{
    dp_device_ops hollow;
    dp_coll_ops coll;
    char said[64] = "";
    copy_tables(&hollow, &coll);
    hollow.name = "hollow";
    hollow.open = open_nothing;
    const dp_device_ops *list[] = {&hollow, NULL};
    check_rejected(
        &(dp_config){.backends = list, .device_count = 2, .log = {.fn = keep_record, .user = said}},
        DP_ERR_INTERNAL, "'hollow' opened a device without ops");
    CHECK(strstr(said, "a hollow device") != NULL);
}

static int aborted;

static void note_abort(dp_comm *comm)
{
    CHECK(comm != NULL);
    aborted++;
}

static dp_status poll_says(dp_comm *comm)
{
    CHECK(comm != NULL);
    return aborted == 0 ? DP_OK : dp_error(DP_ERR_REMOTE, "a link is down");
}

static dp_coll_ops watched;

static dp_status open_watched(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp_status status = dp_cpu_coll()->open(host, config, out);
    if (status == DP_OK)
        (*out)->ops = &watched;
    return status;
}

TEST(a_table_is_told_of_an_abort_and_asked_what_went_wrong)
{
    const dp_coll_ops *list[] = {&watched, NULL};
    watched = *dp_cpu_coll();
    watched.open = open_watched;
    watched.abort = note_abort;
    watched.poll = poll_says;
    aborted = 0;
    dp_ctx *ctx = open_ctx(&(dp_config){.colls = list, .device_count = 2});
    CHECK_OK(dp_wait(ctx));
    dp_abort(ctx, DP_ERR_ABORTED, "enough");
    CHECK_INT(aborted, 1);
    dp_close(ctx);
    ctx = open_ctx(&(dp_config){.colls = list, .device_count = 2});
    CHECK_ERROR(dp_wait(ctx), DP_ERR_REMOTE, "a link is down");
    CHECK(dp_failure(ctx, NULL));
    dp_close(ctx);
}

static dp_status count_none(const dp_host *host, int *out)
{
    (void)host;
    *out = 0;
    return DP_OK;
}

static dp_status count_fails(const dp_host *host, int *out)
{
    (void)host;
    (void)out;
    return dp_error(DP_ERR_NO_DEVICE, "no driver here");
}

static bool fits_never(const dp_comm_config *config)
{
    (void)config;
    return false;
}

TEST(the_first_table_with_a_device_serves)
{
    dp_device_ops cpu, none, broken;
    dp_coll_ops coll;
    clean_environment();
    copy_tables(&cpu, &coll);
    none = broken = cpu;
    cpu.name = "third"; /* not the host's own table, then */
    none.name = "none here";
    none.count = count_none;
    broken.name = "broken";
    broken.count = count_fails;

    dp_ctx *ctx =
        open_ctx(&(dp_config){.backends = (const dp_device_ops *[]){&none, &broken, &cpu, NULL}});
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.device_backend, "third");
    CHECK_INT(dp_local_device(ctx, 0).backend, 3);
    dp_close(ctx);

    check_rejected(&(dp_config){.backends = (const dp_device_ops *[]){&none, &broken, NULL}},
                   DP_ERR_NO_DEVICE, "no driver here");
    check_rejected(&(dp_config){.backends = (const dp_device_ops *[]){NULL}}, DP_ERR_NO_DEVICE, "");
}

TEST(the_first_coll_table_that_fits_serves)
{
    dp_device_ops cpu;
    dp_coll_ops fitting, other;
    copy_tables(&cpu, &fitting);
    other = fitting;
    other.name = "other";
    other.fits = fits_never;
    fitting.name = "fitting";

    dp_ctx *ctx = open_ctx(
        &(dp_config){.colls = (const dp_coll_ops *[]){&other, &fitting, NULL}, .device_count = 2});
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, "fitting");
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);

    ctx = open_ctx(&(dp_config){.colls = (const dp_coll_ops *[]){&other, NULL}, .device_count = 2});
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.coll_backend, "cpu");
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

/* ---- DP_DEVICES ------------------------------------------------------------------------------ */

TEST(dp_devices_sets_the_count)
{
    set_environment("DP_DEVICES", "3");
    CHECK_INT(local_count(NULL), 3);
    CHECK_INT(local_count(&(dp_config){0}), 3);
    set_environment("DP_DEVICES", "1");
    CHECK_INT(local_count(NULL), 1);
    set_environment("DP_DEVICES", "20");
    CHECK_INT(local_count(NULL), 20);
}

static void check_devices(const char *text, const int *want, int count)
{
    dp_ctx *ctx;
    dp_config config;
    set_environment("DP_DEVICES", text);
    CHECK_OK(dp_open(NULL, &ctx));
    CHECK_OK(dp_config_get(ctx, &config));
    CHECK_INT(config.device_count, count);
    CHECK_BYTES(config.devices, want, (size_t)count * sizeof *want);
    dp_close(ctx);
}

TEST(dp_devices_names_the_devices)
{
    check_devices("0,0", (const int[]){0, 0}, 2);
    check_devices("2,0,13", (const int[]){2, 0, 13}, 3);
    check_devices("1,2,", (const int[]){1, 2}, 2);
    check_devices("2,", (const int[]){2}, 1);
    check_devices("2", (const int[]){0, 1}, 2);
}

TEST(the_config_wins_over_dp_devices)
{
    set_environment("DP_DEVICES", "3");
    CHECK_INT(local_count(&(dp_config){.device_count = 2}), 2);
    set_environment("DP_DEVICES", "nonsense");
    CHECK_INT(local_count(&(dp_config){.device_count = 2}), 2);
}

TEST(garbage_in_dp_devices_is_rejected)
{
    const char *const garbage[] = {
        "nonsense", "-1",  "0",    "3x",   "3 devices", "1.5",   "0x",
        "+",        "1e3", "2,x",  " 2",   "4097",      "40969", "99999999999999999999999",
        ",",        ",1",  "1,,2", "1, 2", "5000,1"};
    for (size_t i = 0; i < sizeof garbage / sizeof garbage[0]; i++) {
        set_environment("DP_DEVICES", garbage[i]);
        check_rejected(NULL, DP_ERR_INVALID, "DP_DEVICES");
        CHECK(strstr(dp_last_error(), garbage[i]) != NULL);
    }
}

/* ---- DP_TIMEOUT ------------------------------------------------------------------------------ */

static int timeout_of(dp_config *config)
{
    dp_ctx *ctx;
    dp_config got;
    CHECK_OK(dp_open(config, &ctx));
    CHECK_OK(dp_config_get(ctx, &got));
    dp_close(ctx);
    return got.timeout_ms;
}

TEST(dp_timeout_is_in_seconds_and_the_config_wins)
{
    set_environment("DP_TIMEOUT", "7");
    CHECK_INT(timeout_of(NULL), 7000);
    CHECK_INT(timeout_of(&(dp_config){.local_only = true}), 7000);
    CHECK_INT(timeout_of(&(dp_config){.timeout_ms = 1234}), 1234);
    set_environment("DP_TIMEOUT", "2147483");
    CHECK_INT(timeout_of(NULL), 2147483000);
    set_environment("DP_TIMEOUT", "nonsense");
    CHECK_INT(timeout_of(&(dp_config){.timeout_ms = 1234}), 1234);
    set_environment("DP_TIMEOUT", "");
    CHECK_INT(timeout_of(NULL), 60000);
}

TEST(garbage_in_dp_timeout_is_rejected)
{
    const char *const garbage[] = {"0", "-1", "1.5", "x", "60s", " 60", "2147484", "99999999999"};
    for (size_t i = 0; i < sizeof garbage / sizeof garbage[0]; i++) {
        set_environment("DP_TIMEOUT", garbage[i]);
        check_rejected(NULL, DP_ERR_INVALID, "dp_open: DP_TIMEOUT is '");
        CHECK(strstr(dp_last_error(), garbage[i]) != NULL);
        check_rejected(&(dp_config){.local_only = true}, DP_ERR_INVALID, "DP_TIMEOUT");
    }
}

/* ---- the log --------------------------------------------------------------------------------- */

typedef struct log_book {
    atomic_int count[DP_LOG_TRACE + 1];
} log_book;

static void note_record(const dp_log_record *record, void *user)
{
    log_book *book = user;
    CHECK(record->level >= DP_LOG_ERROR && record->level <= DP_LOG_TRACE);
    CHECK(record->text != NULL && record->text[0] != '\0');
    CHECK(strchr(record->text, '\n') == NULL);
    CHECK(record->rank >= -1 && record->rank < 3);
    atomic_fetch_add(&book->count[record->level], 1);
}

static void log_of_open(log_book *book, dp_level level, int device_count)
{
    clean_environment();
    memset(book, 0, sizeof *book);
    dp_ctx *ctx = open_ctx(&(dp_config){
        .device_count = device_count,
        .log = {.fn = note_record, .user = book, .level = level},
    });
    dp_close(ctx);
}

TEST(log_levels_filter)
{
    log_book book;
    use_one_core(); /* with several devices: something to warn about */
    for (dp_level level = DP_LOG_ERROR; level <= DP_LOG_TRACE; level++) {
        log_of_open(&book, level, 3);
        CHECK_INT(book.count[DP_LOG_ERROR], 0);
        CHECK((book.count[DP_LOG_WARN] > 0) == (level >= DP_LOG_WARN));
        CHECK(level >= DP_LOG_INFO || book.count[DP_LOG_INFO] == 0);
        CHECK(level >= DP_LOG_TRACE || book.count[DP_LOG_TRACE] == 0);
    }
}

TEST(the_default_count_is_logged)
{
    log_book book;
    log_of_open(&book, DP_LOG_DEFAULT, 0);
    CHECK(book.count[DP_LOG_INFO] > 0);
    CHECK_INT(book.count[DP_LOG_ERROR] + book.count[DP_LOG_WARN] + book.count[DP_LOG_TRACE], 0);
}

/* What dp_open and dp_close print to stderr; the status of dp_open. */
static dp_status capture_open(const dp_config *config, char *out, size_t bytes)
{
    FILE *file = tmpfile();
    CHECK(file != NULL);
    fflush(stderr);
    int saved = dup(STDERR_FILENO);
    CHECK(saved >= 0 && dup2(fileno(file), STDERR_FILENO) == STDERR_FILENO);
    dp_ctx *ctx = NULL;
    dp_status status = dp_open(config, &ctx);
    dp_close(ctx);
    fflush(stderr);
    CHECK(dup2(saved, STDERR_FILENO) == STDERR_FILENO);
    close(saved);
    rewind(file);
    out[fread(out, 1, bytes - 1, file)] = '\0';
    fclose(file);
    return status;
}

TEST(silent_by_default)
{
    char text[2048];
    clean_environment();
    use_one_core();
    CHECK_OK(capture_open(&(dp_config){.device_count = 3}, text, sizeof text));
    CHECK_STR(text, "");
}

TEST(dp_debug_prints_up_to_its_level)
{
    static const char *const names[] = {"error", "warn", "info", "trace"};
    static char text[4][16384];
    use_one_core();
    for (int i = 0; i < 4; i++) {
        set_environment("DP_DEBUG", names[i]);
        CHECK_OK(capture_open(&(dp_config){.device_count = 3}, text[i], sizeof text[i]));
    }
    CHECK_STR(text[0], "");
    CHECK(text[1][0] != '\0' && strchr(text[1], '\n') != NULL);
    CHECK(strlen(text[1]) <= strlen(text[2]));
    CHECK(strlen(text[2]) <= strlen(text[3]));
    CHECK(strstr(text[1], "dp") != NULL);
}

TEST(dp_debug_info_names_the_devices)
{
    char text[2048];
    set_environment("DP_DEBUG", "info");
    CHECK_OK(capture_open(NULL, text, sizeof text));
    CHECK(text[0] != '\0');
    CHECK(text[strlen(text) - 1] == '\n');
}

TEST(the_configs_log_wins_over_dp_debug)
{
    char text[2048];
    log_book book = {0};
    set_environment("DP_DEBUG", "trace");
    use_one_core();
    CHECK_OK(
        capture_open(&(dp_config){.device_count = 3,
                                  .log = {.fn = note_record, .user = &book, .level = DP_LOG_WARN}},
                     text, sizeof text));
    CHECK_STR(text, "");
    CHECK(book.count[DP_LOG_WARN] > 0);
    CHECK_INT(book.count[DP_LOG_TRACE], 0);
}

/* Either the open fails or a line says so: a wrong word is not taken for silence. */
TEST(garbage_in_dp_debug_is_noticed)
{
    char text[2048];
    set_environment("DP_DEBUG", "loudly");
    dp_status status = capture_open(&(dp_config){.device_count = 1}, text, sizeof text);
    if (status != DP_OK) {
        CHECK_INT(status, DP_ERR_INVALID);
        CHECK(strstr(dp_last_error(), "DP_DEBUG") != NULL);
    } else {
        CHECK(strstr(text, "DP_DEBUG") != NULL);
    }
}

TEST(log_stderr_prints_one_line)
{
    char text[256];
    FILE *file = tmpfile();
    CHECK(file != NULL);
    int saved = dup(STDERR_FILENO);
    CHECK(saved >= 0 && dup2(fileno(file), STDERR_FILENO) == STDERR_FILENO);
    dp_log_stderr(&(dp_log_record){.level = DP_LOG_WARN, .rank = 5, .text = "100%s sure"}, NULL);
    dp_log_stderr(&(dp_log_record){.level = DP_LOG_ERROR, .rank = -1, .text = "two"}, NULL);
    fflush(stderr);
    CHECK(dup2(saved, STDERR_FILENO) == STDERR_FILENO);
    close(saved);
    rewind(file);
    CHECK(fgets(text, sizeof text, file) != NULL);
    CHECK(strstr(text, "100%s sure") != NULL && strchr(text, '5') != NULL);
    CHECK(strchr(text, '\n') != NULL);
    CHECK(fgets(text, sizeof text, file) != NULL && strstr(text, "two") != NULL);
    CHECK(fgets(text, sizeof text, file) == NULL);
    fclose(file);
}

/* ---- which steps are checked ----------------------------------------------------------------- */

static dp_config config_checked(const char *debug, const dp_config *config)
{
    static char text[2048];
    dp_config got = {.check = -2};
    dp_ctx *ctx = NULL;
    if (debug != NULL)
        set_environment("DP_DEBUG", debug);
    CHECK_OK(dp_open(config, &ctx));
    CHECK_OK(dp_config_get(ctx, &got));
    dp_close(ctx);
    if (debug == NULL)
        return got;
    CHECK_OK(capture_open(config, text, sizeof text));
    got.job = text;
    return got;
}

TEST(dp_debug_has_several_words)
{
    static const struct {
        const char *words;
        int check;
        bool warns;
        dp_level level;
    } cases[] = {{"check", 100, false, DP_LOG_WARN},
                 {"check=7", 7, false, DP_LOG_WARN},
                 {"check=warn", 100, true, DP_LOG_WARN},
                 {"error,check", 100, false, DP_LOG_ERROR},
                 {"check=10,error", 10, false, DP_LOG_ERROR},
                 {"check=10,check=warn", 10, true, DP_LOG_WARN},
                 {"check=warn,error,check=10", 10, true, DP_LOG_ERROR},
                 {"warn,error", 0, false, DP_LOG_ERROR},
                 {"error", 0, false, DP_LOG_ERROR}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dp_config got = config_checked(cases[i].words, &(dp_config){.device_count = 1});
        CHECK_INT(got.check, cases[i].check);
        CHECK_INT(got.check_warns, cases[i].warns);
        CHECK_INT(got.log.level, cases[i].level);
        CHECK_INT(got.poison, cases[i].check > 0);
        CHECK_STR(got.job, "");
    }
}

/* The words beside it count. */
TEST(dp_debug_says_which_word_is_wrong)
{
    static const char *const cases[][2] = {
        {"check=0", "'check=0'"},
        {"check=", "'check='"},
        {"check=-3", "'check=-3'"},
        {"check=1x", "'check=1x'"},
        {"warn,", "''"},
        {",warn", "''"},
        {"check,chek", "'chek'"},
        {"checkwarn", "'checkwarn'"},
        {"check=warning", "warning'"},
        {"warn, check", "' check'"},
        {"warn,checkcheckcheckcheckcheckcheckcheck", "'checkcheck"},
        {"check=99999999999", "'check=99999999999'"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        dp_config got = config_checked(cases[i][0], &(dp_config){.device_count = 1});
        CHECK_SAYS(got.job, cases[i][1]);
        CHECK_SAYS(got.job, "is not error, warn, info, trace, check, check=N");
        CHECK_INT(got.check, strcmp(cases[i][0], "check,chek") == 0 ? 100 : 0);
        CHECK_INT(got.log.level, DP_LOG_WARN);
    }
}

TEST(the_configs_check_wins_over_dp_debug)
{
    dp_ctx *ctx = NULL;
    set_environment("DP_DEBUG", "check=10");
    CHECK_INT(config_checked(NULL, &(dp_config){.check = 3}).check, 3);
    CHECK_INT(config_checked(NULL, &(dp_config){.check = -1}).check, -1);
    CHECK(!config_checked(NULL, &(dp_config){.check = -1}).poison);
    /* a log of the program's is not the place for its words, which count all the same */
    dp_config got = config_checked(NULL, &(dp_config){.log = {.fn = ignore_record}});
    CHECK_INT(got.check, 10);
    CHECK_INT(got.log.level, DP_LOG_INFO);
    CHECK_ERROR(dp_open(&(dp_config){.check = -2}, &ctx), DP_ERR_INVALID,
                "dp_open: check is -2: give it n, for each n-th step, or -1 for none");
}
