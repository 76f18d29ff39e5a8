/* test_nodes.c - machines with several nodes (NUMA): which thread keeps to which cores, as it reads
   them back; and when all are left alone. */

#define _GNU_SOURCE 1 /* affinity masks */
#include <pthread.h>
#include <stdatomic.h>
#include "test.h"

#if defined(__linux__)
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include "examples/custom_device.h"
#include "nodes.h"

enum { DEVICES_MAX = 16 };

static void need_two_cores(void)
{
    cpu_set_t own = own_mask();
    if (CPU_COUNT(&own) < 2) {
        SKIP("one core is no two nodes");
    }
}

static dp_ctx *open_with(const dp_config *config)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(config, &ctx));
    return ctx;
}

static dp_info info_of(const dp_ctx *ctx)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    return info;
}

static dp_status note_mask(int local_rank, dp_scope *scope, void *user)
{
    cpu_set_t *masks = user;
    (void)scope;
    masks[local_rank] = own_mask();
    return DP_OK;
}

static void check_mask(const cpu_set_t *got, const cpu_set_t *want)
{
    CHECK(CPU_EQUAL(got, want));
}

/* Nothing is bound, for this reason. */
static void check_free(dp_ctx *ctx, const char *why)
{
    cpu_set_t masks[DEVICES_MAX], own = own_mask();
    dp_info info = info_of(ctx);
    CHECK_STR(info.binding, why);
    CHECK_INT(info.node_count, 0);
    CHECK_OK(dp_run(ctx, NULL, note_mask, masks));
    for (int i = 0; i < info.local_count; i++) {
        check_mask(&masks[i], &own);
    }
}

static void open_free(const dp_config *config, const char *why)
{
    cpu_set_t before = own_mask(), after;
    dp_ctx *ctx = open_with(config);
    check_free(ctx, why);
    dp_close(ctx);
    after = own_mask();
    check_mask(&after, &before);
}

static const dp_config two = {.device_count = 2};

/* ---- one process ----------------------------------------------------------------------------- */

static void check_devices(const machine *m, int devices)
{
    cpu_set_t masks[DEVICES_MAX];
    dp_ctx *ctx = open_with(&(dp_config){.device_count = devices});
    dp_info info = info_of(ctx);
    CHECK_STR(info.binding, "nodes");
    CHECK_INT(info.node_count, m->node_count);
    CHECK_OK(dp_run(ctx, NULL, note_mask, masks));
    check_mask(&masks[0], &m->all);
    for (int i = 1; i < devices; i++) {
        int first = 0, count = m->core_count;
        cpu_set_t want = machine_part(m, &first, &count, i, devices);
        check_mask(&masks[i], &want);
    }
    dp_close(ctx);
}

static void check_nodes(int nodes)
{
    cpu_set_t after;
    need_two_cores();
    machine *m = machine_of(nodes);
    for (int devices = 2; devices <= DEVICES_MAX; devices += devices < 9 ? 1 : 7) {
        check_devices(m, devices);
        after = own_mask();
        check_mask(&after, &m->all);
    }
    open_free(&(dp_config){.device_count = 1}, "one device");
    topology_remove();
}

TEST(devices_keep_to_two_nodes)
{
    check_nodes(2);
}

TEST(devices_keep_to_four_nodes)
{
    check_nodes(4);
}

TEST(devices_keep_to_eight_nodes)
{
    check_nodes(8);
}

/* Of two nodes with a core each, by what their lists say. */
TEST(the_second_device_keeps_to_the_second_node)
{
    cpu_set_t masks[2], want;
    need_two_cores();
    machine *m = machine_of(2);
    dp_ctx *ctx = open_with(&two);
    CHECK_INT(info_of(ctx).node_count, 2);
    CHECK_OK(dp_run(ctx, NULL, note_mask, masks));
    want = m->of[1];
    check_mask(&masks[1], &want);
    CHECK(CPU_COUNT(&want) < CPU_COUNT(&m->all));
    dp_close(ctx);
    topology_remove();
}

TEST(one_node_is_left_alone)
{
    machine_of(1);
    open_free(&two, "one node");
    topology_remove();
}

TEST(nothing_is_bound_where_the_config_says_so)
{
    need_two_cores();
    machine_of(2);
    open_free(&(dp_config){.device_count = 2, .unbound = true}, "config.unbound");
    dp_config resolved;
    dp_ctx *ctx = open_with(&(dp_config){.unbound = true});
    CHECK_OK(dp_config_get(ctx, &resolved));
    CHECK(resolved.unbound);
    dp_close(ctx);
    topology_remove();
}

/* A launcher, say. */
TEST(who_is_bound_before_stays_so)
{
    need_two_cores();
    machine *m = machine_of(2);
    give_mask(&m->of[0]);
    open_free(&two, "bound before");
    give_mask(&m->of[1]);
    open_free(&two, "bound before");
    give_mask(&m->all);
    dp_ctx *ctx = open_with(&two);
    CHECK_STR(info_of(ctx).binding, "nodes");
    dp_close(ctx);
    topology_remove();
}

TEST(a_node_that_may_not_be_used_is_a_binding_too)
{
    need_two_cores();
    machine_of(2);
    topology_put("node2", "cpulist", "1022-1023\n");
    open_free(&two, "bound before");
    topology_remove();
}

/* ---- folders that say nothing ---------------------------------------------------------------- */

static void rename_node(const char *from, const char *to)
{
    char old[128], new[128];
    snprintf(old, sizeof old, "%s/%s", topology(), from);
    snprintf(new, sizeof new, "%s/%s", topology(), to);
    CHECK_INT(rename(old, new), 0);
}

TEST(nodes_of_memory_alone_and_gaps_are_no_nodes)
{
    need_two_cores();
    machine_of(2);
    rename_node("node1", "node9");
    topology_put("node4", "cpulist", "\n");
    dp_ctx *ctx = open_with(&two);
    CHECK_INT(info_of(ctx).node_count, 2);
    CHECK_STR(info_of(ctx).binding, "nodes");
    dp_close(ctx);
    topology_put("node9", "cpulist", "\n"); /* offline: its cores are nobody's */
    open_free(&two, "one node");
    topology_remove();
}

TEST(a_broken_folder_is_one_node)
{
    static const char *const texts[] = {"",
                                        "none\n",
                                        "0-\n",
                                        "5-1\n",
                                        "0,\n",
                                        "1024\n",
                                        "99999999999999999999999\n",
                                        "0-99999999999999999999\n",
                                        "\xff\xfe\n",
                                        "-\n"};
    need_two_cores();
    machine_of(2);
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; i++) {
        topology_put("node2", "cpulist", texts[i]);
        open_free(&two, "one node");
    }
    topology_put("node2", "cpulist", "\n");
    dp_ctx *ctx = open_with(&two);
    CHECK_STR(info_of(ctx).binding, "nodes");
    dp_close(ctx);
    topology_put("node3", "cpulist", NULL); /* no list */
    open_free(&two, "one node");
    topology_remove();
    open_free(&two, "one node"); /* no folder */
}

TEST(cores_of_no_node_make_it_one)
{
    cpu_set_t own = own_mask();
    need_two_cores();
    machine *m = machine_of(2);
    for (int node = 0; node < 2; node++) {
        char name[16], list[16];
        snprintf(name, sizeof name, "node%d", node);
        snprintf(list, sizeof list, "%d\n", m->cores[0]);
        topology_put(name, "cpulist", list);
    }
    CHECK(CPU_COUNT(&own) > 1);
    open_free(&two, "one node");
    topology_remove();
}

/* ---- what is said ---------------------------------------------------------------------------- */

static char said[1024];

static void hear(const dp_log_record *record, void *user)
{
    (void)user;
    CHECK_INT(record->level, DP_LOG_INFO);
    strncat(said, record->text, sizeof said - strlen(said) - 1);
}

TEST(the_log_says_what_was_done)
{
    const dp_config config = {.device_count = 2, .log = {.fn = hear, .level = DP_LOG_INFO}};
    need_two_cores();
    machine_of(2);
    dp_close(open_with(&config));
    CHECK_SAYS(said, "nodes that threads are bound to: 2 (nodes)");
    topology_put("node1", "cpulist", "no list");
    said[0] = '\0';
    dp_close(open_with(&config));
    CHECK_SAYS(said, "nodes that threads are bound to: 0 (one node)");
    topology_remove();
}

/* ---- several processes ----------------------------------------------------------------------- */

typedef struct job { /* in each process of several */
    const machine *m;
    int devices;
} job;

/* The caller keeps to all nodes of its process, or has all; the others to their own. */
static dp_status be_one_of_several(void *user)
{
    const job *j = user;
    cpu_set_t masks[DEVICES_MAX], before = own_mask(), after, want;
    dp_ctx *ctx = open_with(&(dp_config){.device_count = j->devices});
    dp_info info = info_of(ctx);
    int first = 0, count = j->m->core_count;
    cpu_set_t own =
        machine_part(j->m, &first, &count, info.machine_process, info.machine_process_count);
    int nodes = machine_nodes(j->m, first, count);
    bool free = nodes == j->m->node_count && j->devices == 1;
    CHECK_STR(info.binding, free ? "one device" : "nodes");
    CHECK_INT(info.node_count, free ? 0 : nodes);
    CHECK_OK(dp_run(ctx, NULL, note_mask, masks));
    check_mask(&masks[0], &own);
    for (int i = 1; i < j->devices; i++) {
        int at = first, some = count;
        want = machine_part(j->m, &at, &some, i, j->devices);
        check_mask(&masks[i], &want);
    }
    dp_close(ctx);
    after = own_mask();
    check_mask(&after, &before);
    return DP_OK;
}

static void check_jobs(int nodes, int most_processes)
{
    need_two_cores();
    job j = {.m = machine_of(nodes)};
    for (int processes = 2; processes <= most_processes; processes++) {
        for (j.devices = 1; j.devices <= 3; j.devices++) {
            CHECK_OK(dp_spawn(processes, be_one_of_several, &j));
        }
    }
    topology_remove();
}

TEST_SLOW(processes_divide_two_nodes, 40)
{
    check_jobs(2, 4);
}

TEST_SLOW(processes_divide_eight_nodes, 40)
{
    check_jobs(8, 3);
}

/* The first one has a core of its own; the others, which have all, say why nobody is bound. */
static dp_status be_bound_first(void *user)
{
    const machine *m = user;
    bool first = strcmp(getenv("DP_PROCESS"), "0") == 0;
    if (first) {
        give_mask(&m->of[0]);
    }
    open_free(&two, first ? "bound before" : "masks differ");
    return DP_OK;
}

TEST_SLOW(where_only_some_processes_were_bound_none_is, 20)
{
    need_two_cores();
    machine *m = machine_of(2);
    CHECK_OK(dp_spawn(3, be_bound_first, m));
    topology_remove();
}

static dp_status be_unbound(void *user)
{
    (void)user;
    open_free(&(dp_config){.device_count = 2, .unbound = true}, "config.unbound");
    open_free(&(dp_config){.device_count = 1, .local_only = true}, "one device");
    return DP_OK;
}

TEST_SLOW(a_process_of_several_is_left_alone_where_it_wants_that, 20)
{
    need_two_cores();
    machine_of(2);
    CHECK_OK(dp_spawn(2, be_unbound, NULL));
    topology_remove();
}

/* ---- the caller's thread --------------------------------------------------------------------- */

/* A second process, which does as this one does. */
typedef struct echo {
    int calls, fail_at;
    cpu_set_t mask; /* in the last call */
} echo;

static dp_status gather_echo(const void *in, void *out, size_t bytes_each, void *user)
{
    echo *e = user;
    e->mask = own_mask();
    if (++e->calls == e->fail_at) {
        return dp_error(DP_ERR_USER, "gone");
    }
    memcpy(out, in, bytes_each);
    memcpy((char *)out + bytes_each, in, bytes_each);
    return DP_OK;
}

TEST(a_failed_open_leaves_the_thread_as_it_was)
{
    int bound = 0;
    need_two_cores();
    machine *m = machine_of(2);
    dp_status status = DP_ERR_USER;
    for (int fail_at = 1; status != DP_OK; fail_at++) {
        echo e = {.fail_at = fail_at};
        dp_ctx *ctx = NULL;
        dp_config config = {.device_count = 2};
        config.bootstrap = (dp_bootstrap){gather_echo, &e, 0, 2};
        status = dp_open(&config, &ctx);
        bound += status != DP_OK && CPU_EQUAL(&e.mask, &m->of[0]);
        dp_close(ctx);
        cpu_set_t after = own_mask();
        check_mask(&after, &m->all);
    }
    CHECK(bound > 0);
    topology_remove();
}

/* One allocation after the other: some fail when the thread is bound already. */
static dp_status be_out_of_memory(void *user)
{
    const machine *m = user;
    cpu_set_t after;
    for (size_t fail_at = 1, fails = 1; fails > 0; fail_at++) {
        test_allocator counter = {.fail_at = fail_at};
        dp_ctx *ctx = NULL;
        dp_config config = {.device_count = 2, .allocator = test_allocator_of(&counter)};
        dp_status status = dp_open(&config, &ctx);
        fails = counter.fail_count;
        CHECK(fails > 0 || status == DP_OK);
        dp_close(status == DP_OK ? ctx : NULL);
        CHECK_NO_LEAKS(&counter);
        after = own_mask();
        check_mask(&after, &m->all);
    }
    return DP_OK;
}

TEST_SLOW(without_memory_the_thread_is_as_it_was, 60)
{
    need_two_cores();
    machine *m = machine_of(2);
    CHECK_OK(dp_spawn(2, be_out_of_memory, m));
    topology_remove();
}

static void *close_it(void *user)
{
    dp_close(user);
    return NULL;
}

static void *open_it(void *user)
{
    dp_ctx **ctx = user;
    *ctx = open_with(&two);
    return NULL;
}

static void in_a_thread(void *(*fn)(void *user), void *user)
{
    pthread_t thread;
    CHECK_INT(pthread_create(&thread, NULL, fn, user), 0);
    CHECK_INT(pthread_join(thread, NULL), 0);
}

static cpu_set_t own_part(const machine *m)
{
    int first = 0, count = m->core_count;
    return machine_part(m, &first, &count, atoi(getenv("DP_PROCESS")), 2);
}

/* Whoever closes; and a thread that has gone, or has been given other cores, is not touched. */
static dp_status be_closed_by_another_thread(void *user)
{
    const machine *m = user;
    cpu_set_t own = own_part(m), now, other = m->of[CPU_EQUAL(&own, &m->of[0])];
    dp_ctx *ctx = open_with(&two);
    now = own_mask();
    check_mask(&now, &own);
    in_a_thread(close_it, ctx);
    now = own_mask();
    check_mask(&now, &m->all);
    in_a_thread(open_it, &ctx);
    now = own_mask();
    check_mask(&now, &m->all);
    dp_close(ctx);
    ctx = open_with(&two);
    give_mask(&other);
    dp_close(ctx);
    now = own_mask();
    check_mask(&now, &other);
    return DP_OK;
}

TEST_SLOW(another_thread_closes, 20)
{
    need_two_cores();
    machine *m = machine_of(2);
    CHECK_OK(dp_spawn(2, be_closed_by_another_thread, m));
    topology_remove();
}

/* A second context finds the machine as it was for the first, and the thread is bound until both
   are closed, whichever is the first. */
static dp_status be_in_two_contexts(void *user)
{
    const machine *m = user;
    cpu_set_t own = own_part(m), now, masks[2][2];
    for (int order = 0; order < 2; order++) {
        dp_ctx *contexts[2];
        for (int i = 0; i < 2; i++) {
            contexts[i] = open_with(&two);
            CHECK_STR(info_of(contexts[i]).binding, "nodes");
            CHECK_INT(info_of(contexts[i]).node_count, 1);
            CHECK_OK(dp_run(contexts[i], NULL, note_mask, masks[i]));
        }
        CHECK_INT(info_of(contexts[0]).core_count, info_of(contexts[1]).core_count);
        check_mask(&masks[0][0], &own);
        check_mask(&masks[1][0], &own);
        check_mask(&masks[1][1], &masks[0][1]);
        dp_close(contexts[order]);
        now = own_mask();
        check_mask(&now, &own);
        dp_close(contexts[!order]);
        now = own_mask();
        check_mask(&now, &m->all);
    }
    return DP_OK;
}

TEST_SLOW(a_thread_is_bound_until_its_last_context_closes, 30)
{
    need_two_cores();
    machine *m = machine_of(2);
    CHECK_OK(dp_spawn(2, be_in_two_contexts, m));
    topology_remove();
}

/* A context that binds nothing, or cannot be opened, leaves the thread to the first. */
static dp_status be_beside_an_unbound_one(void *user)
{
    const machine *m = user;
    cpu_set_t own = own_part(m), now;
    dp_ctx *first = open_with(&two), *ctx = NULL;
    dp_config config = {.device_count = 2, .unbound = true};
    dp_ctx *second = open_with(&config);
    now = own_mask();
    check_mask(&now, &own);
    dp_close(second);
    config.local_only = true;
    config.device_count = -1;
    CHECK_STATUS(dp_open(&config, &ctx), DP_ERR_INVALID);
    now = own_mask();
    check_mask(&now, &own);
    dp_close(first);
    now = own_mask();
    check_mask(&now, &m->all);
    return DP_OK;
}

TEST_SLOW(a_context_that_binds_nothing_leaves_the_thread_bound, 20)
{
    need_two_cores();
    machine *m = machine_of(2);
    CHECK_OK(dp_spawn(2, be_beside_an_unbound_one, m));
    topology_remove();
}

/* As the first of two processes: on the first node. */
static dp_ctx *open_as_first(void)
{
    static echo e;
    dp_config config = {.device_count = 1};
    config.bootstrap = (dp_bootstrap){gather_echo, &e, 0, 2};
    return open_with(&config);
}

/* What a context knows of the machine it knows from before its thread was bound. */
TEST(cores_are_counted_before_a_thread_is_bound)
{
    dp_device_info before, after;
    need_two_cores();
    machine *m = machine_of(2);
    dp_ctx *ctx = open_with(&(dp_config){.device_count = 1});
    CHECK_OK(dp_device_info_get(ctx, 0, &before));
    dp_close(ctx);
    ctx = open_as_first();
    cpu_set_t now = own_mask();
    check_mask(&now, &m->of[0]);
    CHECK_OK(dp_device_info_get(ctx, 0, &after));
    CHECK_INT(after.compute_units, before.compute_units);
    dp_close(ctx);
    topology_remove();
}

/* Whether the thread has all cores, also for a context of its own, and after that has closed. It is
   of one thread: a sanitizer lets no child of fork start others. */
static bool is_free_child(dp_ctx *of_parent, const machine *m)
{
    dp_ctx *own = NULL;
    dp_info info;
    cpu_set_t at_first = own_mask(), at_last;
    const dp_config config = {.device_count = 1, .local_only = true};
    if (dp_open(&config, &own) != DP_OK || dp_info_get(own, &info) != DP_OK) {
        return false;
    }
    dp_close(of_parent);
    dp_close(own);
    at_last = own_mask();
    return strcmp(info.binding, "one device") == 0 && CPU_EQUAL(&at_first, &m->all) &&
           CPU_EQUAL(&at_last, &m->all);
}

/* A child of fork has the cores of before, and its parent keeps to its own. */
static dp_status have_a_child(void *user)
{
    const machine *m = user;
    int status = 0;
    cpu_set_t own = own_part(m), now;
    dp_ctx *ctx = open_with(&two);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        _exit(is_free_child(ctx, m) ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    now = own_mask();
    check_mask(&now, &own);
    dp_close(ctx);
    return DP_OK;
}

TEST_SLOW(a_child_of_fork_is_not_bound, 20)
{
    need_two_cores();
    machine *m = machine_of(2);
    CHECK_OK(dp_spawn(2, have_a_child, m));
    topology_remove();
}

/* Whoever has given a thread other cores since is right, in a child too. */
TEST(a_child_keeps_the_cores_that_somebody_else_has_given)
{
    int status = 0;
    need_two_cores();
    machine *m = machine_of(2);
    dp_ctx *ctx = open_as_first();
    give_mask(&m->of[1]);
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        cpu_set_t now = own_mask();
        _exit(CPU_EQUAL(&now, &m->of[1]) ? EXIT_SUCCESS : EXIT_FAILURE);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    dp_close(ctx);
    topology_remove();
}

/* ---- memory ---------------------------------------------------------------------------------- */

enum { LARGE = 1 << 18 }; /* numbers */

typedef struct large_blocks {
    atomic_int count, near; /* near: asked for by a thread that keeps to the last node */
    cpu_set_t last;
} large_blocks;

static void *note_alloc(size_t bytes, size_t align, void *user)
{
    large_blocks *blocks = user;
    void *data = NULL;
    cpu_set_t own = own_mask();
    atomic_fetch_add(&blocks->count, bytes >= LARGE * sizeof(float));
    atomic_fetch_add(&blocks->near,
                     bytes >= LARGE * sizeof(float) && CPU_EQUAL(&own, &blocks->last));
    return posix_memalign(&data, align < sizeof data ? sizeof data : align, bytes) == 0 ? data
                                                                                        : NULL;
}

static void note_free(void *data, size_t bytes, void *user)
{
    (void)bytes;
    (void)user;
    free(data);
}

static void create_large(dp_ctx *ctx, int local_rank, bool packed)
{
    const dp_param_config param = {.name = "w", .ndim = 1, .shape = {LARGE}};
    const dp_module_config config = {.name = "large",
                                     .params = &param,
                                     .param_count = 1,
                                     .packed = packed,
                                     .local_rank = local_rank};
    dp_module *module = NULL;
    dp_param_info info;
    dp_tensor grad;
    float ends[2] = {1, 1};
    CHECK_OK(dp_module_create(ctx, &config, &module));
    CHECK_OK(dp_module_param(module, 0, &info));
    CHECK_OK(dp_owner_grad(module, 0, 0, &grad));
    const float *const data[] = {info.data.data, grad.data};
    for (int i = 0; i < 2; i++) {
        CHECK(data[i] != NULL);
        ends[0] = data[i][0];
        ends[1] = data[i][LARGE - 1];
        CHECK_F64(ends[0] + ends[1], 0, 0);
    }
}

/* Parameters and gradients, each a block, whether they are packed or not. */
TEST(memory_is_made_by_the_thread_of_its_device)
{
    need_two_cores();
    machine *m = machine_of(2);
    large_blocks blocks = {.last = m->of[1]};
    dp_ctx *ctx =
        open_with(&(dp_config){.device_count = 2, .allocator = {note_alloc, note_free, &blocks}});
    create_large(ctx, 0, true);
    create_large(ctx, 0, false);
    CHECK_INT(atomic_load(&blocks.count), 4);
    CHECK_INT(atomic_load(&blocks.near), 0);
    create_large(ctx, 1, true);
    CHECK_INT(atomic_load(&blocks.near), 2);
    create_large(ctx, 1, false);
    CHECK_INT(atomic_load(&blocks.count), 8);
    CHECK_INT(atomic_load(&blocks.near), 4);
    dp_close(ctx);
    topology_remove();
}

/* What goes wrong there is said here. */
TEST(a_device_without_memory_says_so)
{
    need_two_cores();
    machine_of(2);
    for (size_t fail_at = 1, fails = 1; fails > 0; fail_at++) {
        test_allocator counter = {0};
        const dp_param_config param = {.name = "w", .ndim = 1, .shape = {LARGE}};
        const dp_module_config config = {
            .params = &param, .param_count = 1, .packed = true, .local_rank = 1};
        dp_ctx *ctx =
            open_with(&(dp_config){.device_count = 2, .allocator = test_allocator_of(&counter)});
        dp_module *module = NULL;
        counter.fail_at = counter.call_count + fail_at;
        dp_status status = dp_module_create(ctx, &config, &module);
        fails = counter.fail_count;
        CHECK_INT(status, fails > 0 ? DP_ERR_NO_MEMORY : DP_OK);
        CHECK_SAYS(fails > 0 ? dp_last_error() : "memory", "memory");
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
    topology_remove();
}

/* ---- devices with memory of their own -------------------------------------------------------- */

static struct {
    dp_device_ops ops;
    dp_dev *devs[2];
    char bus_ids[2][32];
} cards;

static dp_status card_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = toy_device()->open(host, index, out);
    if (status == DP_OK) {
        (*out)->ops = &cards.ops;
        cards.devs[index] = *out;
    }
    return status;
}

static dp_status card_info(dp_dev *dev, dp_device_info *out)
{
    *out = (dp_device_info){.compute_units = 1};
    memcpy(out->bus_id, cards.bus_ids[dev == cards.devs[1]], sizeof out->bus_id);
    return DP_OK;
}

/* Cards on a bus, whose nodes two files name. */
static dp_ctx *open_cards(const char *first, const char *second)
{
    static const dp_device_ops *const backends[] = {&cards.ops, NULL};
    const char *nodes[] = {first, second};
    for (int i = 0; i < 2; i++) {
        char path[64];
        snprintf(path, sizeof path, "%s/dpn%d-%d", P_tmpdir, i, (int)getpid());
        snprintf(cards.bus_ids[i], sizeof cards.bus_ids[i], "../../../..%.20s", path);
        mkdir(path, 0700);
        strcat(path, "/numa_node");
        FILE *out = fopen(path, "w");
        CHECK(out != NULL);
        CHECK(fputs(nodes[i], out) >= 0);
        CHECK_INT(fclose(out), 0);
    }
    cards.ops = *toy_device();
    cards.ops.open = card_open;
    cards.ops.info = card_info;
    return open_with(&(dp_config){.backends = backends, .device_count = 2});
}

static void cards_remove(void)
{
    for (int i = 0; i < 2; i++) {
        char path[64];
        snprintf(path, sizeof path, "%s/dpn%d-%d/numa_node", P_tmpdir, i, (int)getpid());
        CHECK_INT(unlink(path), 0);
        *strrchr(path, '/') = '\0';
        CHECK_INT(rmdir(path), 0);
    }
}

static void need_bus(void)
{
    if (access("/sys/bus/pci/devices", F_OK) != 0) {
        SKIP("there is no bus");
    }
}

TEST(devices_with_their_own_memory_are_driven_near_to_them)
{
    cpu_set_t masks[2], after;
    need_two_cores();
    need_bus();
    machine *m = machine_of(2);
    dp_ctx *ctx = open_cards("1\n", "1\n");
    CHECK_INT(info_of(ctx).node_count, 1);
    CHECK_OK(dp_run(ctx, NULL, note_mask, masks));
    check_mask(&masks[0], &m->of[1]);
    check_mask(&masks[1], &m->of[1]);
    dp_close(ctx);
    after = own_mask();
    check_mask(&after, &m->all);
    ctx = open_cards("1\n", "0\n");
    CHECK_INT(info_of(ctx).node_count, 2);
    CHECK_OK(dp_run(ctx, NULL, note_mask, masks));
    check_mask(&masks[0], &m->all);
    check_mask(&masks[1], &m->of[0]);
    dp_close(ctx);
    cards_remove();
    topology_remove();
}

TEST(nothing_is_bound_where_a_device_is_near_to_no_node)
{
    static const char *const nodes[] = {"-1\n", "2\n", "none"};
    need_two_cores();
    machine_of(2);
    for (size_t i = 0; i < sizeof nodes / sizeof nodes[0]; i++) {
        dp_ctx *ctx = open_cards("1\n", nodes[i]);
        check_free(ctx, "unknown nodes");
        dp_close(ctx);
    }
    cards_remove();
    topology_remove();
}

/* The first and the third are on the first node, the second is on the other one. */
static void close_in_order(const machine *m, const int *order)
{
    static const int nodes[] = {0, 1, 0};
    dp_ctx *contexts[3];
    cpu_set_t now = m->all, after;
    for (int i = 0; i < 3; i++) {
        contexts[i] = open_cards(nodes[i] == 0 ? "0\n" : "1\n", nodes[i] == 0 ? "0\n" : "1\n");
        CHECK_INT(info_of(contexts[i]).node_count, 1);
        now = own_mask();
        check_mask(&now, &m->of[nodes[i]]);
    }
    for (int i = 0; i < 3; i++) {
        int left[2] = {0, 0};
        for (int j = i + 1; j < 3; j++) {
            left[nodes[order[j]]]++;
        }
        dp_close(contexts[order[i]]);
        after = own_mask();
        if (i == 2) {
            check_mask(&after, &m->all);
        } else if (left[CPU_EQUAL(&now, &m->of[1])] > 0) { /* whose cores it has is still open */
            check_mask(&after, &now);
        } else {
            check_mask(&after, &m->of[left[1] > 0]);
        }
        now = after;
    }
}

TEST(contexts_on_several_nodes_close_in_any_order)
{
    static const int orders[][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                    {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    need_two_cores();
    need_bus();
    machine *m = machine_of(2);
    for (size_t i = 0; i < sizeof orders / sizeof orders[0]; i++) {
        close_in_order(m, orders[i]);
    }
    cards_remove();
    topology_remove();
}

/* ---- where the system says no ---------------------------------------------------------------- */

/* As some containers do it. */
static bool forbid_binding(void)
{
    struct sock_filter lines[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_sched_setaffinity, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog program = {sizeof lines / sizeof lines[0], lines};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
           prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0;
}

static dp_status be_refused(void *user)
{
    (void)user;
    if (!forbid_binding()) {
        return DP_ERR_UNSUPPORTED;
    }
    open_free(&(dp_config){.device_count = 1}, "refused"); /* to the caller */
    open_free(&two, "refused");
    open_free(&(dp_config){.device_count = 2, .local_only = true}, "refused");
    return DP_OK;
}

/* In place of the C library's: one call is refused. */
static atomic_int bindings, refused;

int sched_setaffinity(pid_t thread, size_t bytes, const cpu_set_t *mask)
{
    if (atomic_fetch_add(&bindings, 1) + 1 == atomic_load(&refused)) {
        errno = EPERM;
        return -1;
    }
    return (int)syscall(SYS_sched_setaffinity, thread, bytes, mask);
}

static const dp_config three = {.device_count = 3};

/* A context before has its cores back, and workers have all. */
static void refuse_second(const machine *m, int call)
{
    cpu_set_t own = own_part(m), now, masks[3];
    dp_ctx *first = open_with(&three);
    CHECK_STR(info_of(first).binding, "nodes");
    atomic_store(&bindings, 0);
    atomic_store(&refused, call);
    dp_ctx *second = open_with(&three);
    CHECK_STR(info_of(second).binding, "refused");
    CHECK_OK(dp_run(second, NULL, note_mask, masks));
    check_mask(&masks[0], &own);
    check_mask(&masks[1], &m->all);
    check_mask(&masks[2], &m->all);
    dp_close(second);
    now = own_mask();
    check_mask(&now, &own);
    dp_close(first);
    now = own_mask();
    check_mask(&now, &m->all);
}

/* All threads are bound or none is, whichever the system refuses: the caller's, or a worker's. */
static dp_status be_refused_once(void *user)
{
    const machine *m = user;
    for (int call = 1; call <= 3; call++) {
        atomic_store(&bindings, 0);
        atomic_store(&refused, call);
        open_free(&three, "refused");
        CHECK(atomic_load(&bindings) >= call);
        refuse_second(m, call + 1); /* after the one that gives the thread all cores */
    }
    return DP_OK;
}

TEST_SLOW(all_threads_are_bound_or_none, 20)
{
    need_two_cores();
    machine *m = machine_of(2);
    CHECK_OK(dp_spawn(2, be_refused_once, m));
    topology_remove();
}

TEST_SLOW(a_refusal_of_the_system_is_no_error, 20)
{
    need_two_cores();
    machine_of(2);
    dp_status status = dp_spawn(2, be_refused, NULL);
    topology_remove();
    if (status == DP_ERR_UNSUPPORTED) {
        SKIP("this process may not filter its system calls");
    }
    CHECK_OK(status);
}
#endif
