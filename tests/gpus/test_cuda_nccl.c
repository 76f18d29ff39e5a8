/* test_cuda_nccl.c - collectives over the simulated NCCL: which table serves, who adds up, what a
   process hears of others that fail. The suites of test_coll.c run over it too. */

#include "test.h"

#if defined(TEST_SIM)
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include "cuda_device.h"
#include "dp_nccl.h"
#include "grads.h"
#include "nets.h"

enum { COUNT = 25, LARGE = 600000, GPUS = 8 };

/* GPUs of each process, if they are not one each. */
static int shares[BOOT_PROCESSES];

static int gpus_of(int process)
{
    return shares[process] > 0 ? shares[process] : 1;
}

/* A process of the job; what `config` leaves out is the default. */
static dp_status try_open(meeting *m, dp_config config, dp_ctx **out)
{
    static const dp_device_ops *backends[2];
    int first = 0, own = gpus_of(m->process);
    for (int p = 0; p < m->process; p++)
        first += gpus_of(p);
    sim_set_device_count(own);
    sim_set_first_device(first);
    backends[0] = dp_cuda();
    config.backends = backends;
    if (getenv("DP_ADDR") == NULL)
        config.bootstrap = config_of(m, own).bootstrap;
    config.device_count = own;
    return dp_open(&config, out);
}

static dp_ctx *open_with(meeting *m, dp_config config)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(try_open(m, config, &ctx));
    return ctx;
}

static dp_ctx *open_for(meeting *m, int timeout_ms)
{
    return open_with(m, (dp_config){.timeout_ms = timeout_ms});
}

static dp_ctx *open_alone(int gpus)
{
    dp_ctx *ctx = NULL;
    sim_set_device_count(gpus);
    CHECK_OK(dp_open(NULL, &ctx));
    return ctx;
}

static const char *carrier(dp_ctx *ctx)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    return info.coll_backend;
}

/* Rank r has r + 1 everywhere. */
typedef struct vectors {
    dp_scope *scope;
    dp_tensor data[GPUS];
    dp_part parts[GPUS];
    int count, ranks;
} vectors;

static dp_status vectors_try(dp_ctx *ctx, vectors *v, dp_dtype dtype, int64_t count)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    v->count = info.local_count;
    v->ranks = info.rank_count;
    v->scope = dp_scope_begin(ctx);
    for (int i = 0; i < v->count; i++) {
        DP_TRY(dp_tensor_new(v->scope, dp_local_device(ctx, i), dtype, 1, &count, &v->data[i]));
        DP_TRY(dp_fill(ctx, &v->data[i], dp_int(info.rank_first + i + 1)));
        v->parts[i] = (dp_part){.send = v->data[i].data, .recv = v->data[i].data};
    }
    return DP_OK;
}

static void vectors_make(dp_ctx *ctx, vectors *v, dp_dtype dtype, int64_t count)
{
    CHECK_OK(vectors_try(ctx, v, dtype, count));
}

static dp_status all_are(dp_ctx *ctx, const vectors *v, float want)
{
    size_t count = (size_t)dp_tensor_count(&v->data[0]);
    float *got = test_room(count * sizeof *got);
    for (int i = 0; i < v->count; i++) {
        DP_TRY(dp_read(ctx, &v->data[i], got, count * sizeof *got));
        for (size_t k = 0; k < count; k++)
            CHECK_F64(got[k], want, 0);
    }
    return DP_OK;
}

static dp_status sum_of(dp_ctx *ctx, int64_t count)
{
    vectors v;
    dp_status status = vectors_try(ctx, &v, DP_F32, count);
    if (status == DP_OK)
        status = dp_all_reduce(ctx, v.parts, (size_t)count, DP_F32, DP_OP_SUM);
    if (status == DP_OK)
        status = dp_wait(ctx);
    if (status == DP_OK)
        status = all_are(ctx, &v, (float)(v.ranks * (v.ranks + 1) / 2));
    dp_scope_end(v.scope);
    return status;
}

/* ---- which table serves ---------------------------------------------------------------------- */

TEST(several_gpus_of_one_process_have_nccl)
{
    dp_ctx *ctx = open_alone(4);
    CHECK_STR(carrier(ctx), dp_nccl_coll()->name);
    CHECK_OK(sum_of(ctx, LARGE));
    CHECK_INT(sim_nccl_count().all_reduce, 4);
    CHECK_OK(sum_of(ctx, COUNT)); /* small: by the GPUs themselves */
    CHECK_INT(sim_nccl_count().all_reduce, 4);
    dp_close(ctx);
}

TEST(nothing_stays_of_one_process)
{
    test_allocator counter = {0};
    dp_config config = {.allocator = test_allocator_of(&counter)};
    for (int i = 0; i < 2; i++) {
        dp_ctx *ctx = NULL;
        sim_set_device_count(3);
        CHECK_OK(dp_open(&config, &ctx));
        CHECK_STR(carrier(ctx), dp_nccl_coll()->name);
        CHECK_OK(sum_of(ctx, LARGE));
        CHECK_OK(sum_of(ctx, COUNT));
        dp_close(ctx);
        CHECK_NO_LEAKS(&counter);
    }
    sim_check_leaks();
    CHECK_INT(sim_finding_count("leak"), 0);
}

/* Who closes waits for the keeper, and is woken up when that is done. One that is not would sleep
   for 100 ms each time; one that is may be late at times, where others have the cores. */
TEST(closing_takes_no_longer_than_it_has_to)
{
    double took = 100;
    for (int i = 0; i < 30 && took > 80; i++) {
        dp_ctx *ctx = open_alone(2);
        double start = now_ms();
        dp_close(ctx);
        took = now_ms() - start;
    }
    CHECK(took <= 80);
}

TEST(one_gpu_has_none)
{
    dp_ctx *ctx = open_alone(1);
    CHECK_STR(carrier(ctx), "none");
    dp_close(ctx);
    sim_set_device_count(1);
    CHECK_OK(dp_open(&(dp_config){.devices = (const int[]){0, 0, 0}, .device_count = 3}, &ctx));
    CHECK_STR(carrier(ctx), dp_cuda()->name);
    dp_close(ctx);
}

TEST(sums_in_a_fixed_order_are_the_gpus_own)
{
    dp_ctx *ctx = NULL;
    sim_set_device_count(4);
    CHECK_OK(dp_open(&(dp_config){.shards = 8}, &ctx));
    CHECK_STR(carrier(ctx), dp_cuda()->name);
    dp_close(ctx);
}

TEST(without_the_library_gpus_do_it_themselves)
{
    char text[300];
    sim_set_nccl(0);
    CHECK_INT(dp_nccl_version(text, sizeof text), 0);
    dp_ctx *ctx = open_alone(4);
    CHECK_STR(carrier(ctx), dp_cuda()->name);
    CHECK_OK(sum_of(ctx, LARGE));
    dp_close(ctx);
    sim_set_nccl(21705);
    CHECK_INT(dp_nccl_version(text, sizeof text), 0);
    CHECK_SAYS(text, "CCL 2.17.5");
    ctx = open_alone(4);
    CHECK_STR(carrier(ctx), dp_cuda()->name);
    dp_close(ctx);
    sim_set_nccl(21799);
    CHECK_INT(dp_nccl_version(text, sizeof text), 0);
    sim_set_nccl(21800);
    CHECK_INT(dp_nccl_version(text, sizeof text), 21800);
    sim_set_nccl(22809);
    CHECK_INT(dp_nccl_version(text, sizeof text), 22809);
    CHECK_INT(dp_nccl_version(NULL, 0), 22809);
}

/* Where the library is found; "" if it is not. */
static const char *found_at(sim_nccl_file *files, int count)
{
    static char text[512];
    sim_set_nccl_files(files, count);
    return dp_nccl_version(text, sizeof text) == 22809 ? text : "";
}

TEST(the_library_has_two_names)
{
    sim_nccl_file files[] = {{.path = "libnccl.so", .is_at = "/opt/libnccl.so.2.28.9"},
                             {.path = "libnccl.so.1"}};
    CHECK_STR(found_at(files, 2), "/opt/libnccl.so.2.28.9");
    CHECK_INT(files[0].loads, 1);
    CHECK_INT(files[1].loads, 0);
    CHECK_STR(found_at(NULL, 0), "/opt/libnccl.so.2.28.9"); /* once and for all */
}

static void *ask_too(void *unused)
{
    (void)unused;
    CHECK_INT(dp_nccl_version(NULL, 0), 22809);
    return NULL;
}

TEST(two_threads_load_it_once)
{
    pthread_t thread;
    sim_nccl_file files[] = {{.path = "libnccl.so.2", .takes_ms = 50}};
    sim_set_nccl_files(files, 1);
    CHECK_INT(pthread_create(&thread, NULL, ask_too, NULL), 0);
    ask_too(NULL);
    CHECK_INT(pthread_join(thread, NULL), 0);
    CHECK_INT(files[0].loads, 1);
}

TEST(who_does_not_know_where_it_is_says_its_name)
{
    sim_nccl_file files[] = {{.path = "libnccl.so.2"}, {.path = "libnccl.so", .is_at = "/opt/no"}};
    cuda_alone();
    CHECK_STR(found_at(files, 2), "libnccl.so.2");
    CHECK_INT(files[1].loads, 0);
}

TEST(a_library_without_a_function_is_let_go_of)
{
    static const char *const lacking[] = {"ncclAllGather", "ncclSend", "ncclGetVersion"};
    for (int i = 0; i < 3; i++) {
        sim_nccl_file files[] = {{.path = "libnccl.so.2", .lacks = lacking[i]}};
        CHECK_STR(found_at(files, 1), "");
        CHECK_SAYS(dp_last_error(), "CCL 2.18 or newer was not found: lib");
        CHECK_INT(files[0].loads, 0);
    }
    sim_nccl_file files[] = {{.path = "libnccl.so.2", .lacks = "ncclRecv"},
                             {.path = "libnccl.so", .is_at = "/opt/good"}};
    CHECK_STR(found_at(files, 2), "/opt/good");
    CHECK_INT(files[0].loads, 0);
}

/* One that is too old is often found first: the system's, or the one that the process has. */
TEST(an_old_library_does_not_hide_a_newer_one)
{
    sim_nccl_file files[] = {
        {.path = "libnccl.so.2", .is_at = "/opt/old/libnccl.so.2.17.1", .version = 21701},
        {.path = "libnccl.so", .is_at = "/opt/older/libnccl.so.2.17.0", .version = 21799},
        {.path = "libnccl.so.1", .is_at = "/opt/new/libnccl.so.2"}};
    cuda_alone();
    CHECK_STR(found_at(files, 3), "");
    CHECK_SAYS(dp_last_error(), "CCL 2.18 or newer was not found: /opt/old/libnccl.so.2.17.1 is ");
    CHECK_SAYS(dp_last_error(), "CCL 2.17.1; /opt/older/libnccl.so.2.17.0 is ");
    CHECK_SAYS(dp_last_error(), "CCL 2.17.99");
    for (int i = 0; i < 3; i++)
        CHECK_INT(files[i].loads, 0);
    files[1].version = 0;
    CHECK_STR(found_at(files, 3), files[1].is_at);
    CHECK_INT(files[0].loads, 0);
    CHECK_INT(files[1].loads, 1);
}

/* An empty file where Python's package has the library. */
static const char *package_in(const char *root, const char *python)
{
    static char path[400];
    char command[500];
    snprintf(path, sizeof path, "%s/lib/%s/nvidia/nccl/lib/libnccl.so.2", root, python);
    snprintf(command, sizeof command, "mkdir -p %s && rmdir %s && : > %s", path, path, path);
    CHECK_INT(system(command), 0);
    return path;
}

/* From the root, as the variables say it. */
static const char *new_folder(void)
{
    static char path[300];
    CHECK(getcwd(path, sizeof path - 32) != NULL);
    strcat(path, "/build/nccl-XXXXXX");
    CHECK(mkdtemp(path) != NULL);
    return path;
}

static void drop_folder(const char *path)
{
    char command[320];
    snprintf(command, sizeof command, "rm -r %s", path);
    CHECK_INT(system(command), 0);
}

TEST(pythons_package_has_it)
{
    static const char *const roots[] = {"VIRTUAL_ENV", "CONDA_PREFIX", "HOME"};
    cuda_alone();
    const char *here = new_folder();
    char paths[4][400], root[340];
    sim_nccl_file files[4] = {{.path = NULL}};
    for (int i = 0; i < 3; i++) {
        snprintf(root, sizeof root, "%s/%d", here, i);
        setenv(roots[i], root, 1);
        snprintf(root, sizeof root, "%s/%d%s", here, i, i == 2 ? "/.local" : "");
        snprintf(paths[i], sizeof paths[i], "%s", package_in(root, "python3.12/site-packages"));
        files[i].path = paths[i];
    }
    files[0].lacks = files[1].lacks = "ncclSend"; /* one after the other is tried */
    CHECK_STR(found_at(files, 3), paths[2]);
    for (int i = 0; i < 3; i++)
        CHECK_INT(files[i].loads, i == 2);
    drop_folder(here);
}

TEST(a_package_may_be_there_twice)
{
    cuda_alone();
    const char *here = new_folder();
    char first[400];
    CHECK_INT(chdir(here), 0);
    setenv("VIRTUAL_ENV", "there", 1); /* no path from the root: nobody's */
    setenv("CONDA_PREFIX", here, 1);
    unsetenv("HOME");
    const char *nobodys = package_in("there", "python3.9/site-packages");
    sim_nccl_file files[2] = {{.path = nobodys}};
    CHECK_STR(found_at(files, 1), "");
    snprintf(first, sizeof first, "%s", package_in(here, "python3.10/dist-packages"));
    files[0] = (sim_nccl_file){.path = first, .lacks = "ncclSend"};
    files[1] = (sim_nccl_file){.path = package_in(here, "python3.11/dist-packages")};
    CHECK_STR(found_at(files, 2), files[1].path);
    CHECK_INT(files[0].loads, 0);
    drop_folder(here);
}

TEST(devices_of_the_host_are_not_for_nccl)
{
    const dp_device_ops *const backends[] = {dp_cpu(), NULL};
    const dp_coll_ops *const colls[] = {dp_nccl_coll(), dp_cpu_coll(), NULL};
    dp_ctx *ctx = NULL;
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .colls = colls, .device_count = 2}, &ctx));
    CHECK_STR(carrier(ctx), "cpu");
    dp_close(ctx);
}

TEST(a_switch_says_how_much_is_large)
{
    setenv("DP_NCCL", "100", 1);
    dp_ctx *ctx = open_alone(2);
    CHECK_OK(sum_of(ctx, COUNT)); /* 100 bytes */
    CHECK_INT(sim_nccl_count().all_reduce, 2);
    CHECK_OK(sum_of(ctx, COUNT - 1));
    CHECK_INT(sim_nccl_count().all_reduce, 2);
    dp_close(ctx);
    setenv("DP_NCCL", "off", 1);
    ctx = open_alone(2);
    CHECK_STR(carrier(ctx), dp_cuda()->name);
    dp_close(ctx);
}

TEST(a_switch_that_makes_no_sense)
{
    static const char *const words[] = {"on", "-1", "1k", " 3", "12 "};
    const dp_coll_ops *const colls[] = {dp_nccl_coll(), NULL};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) {
        dp_ctx *ctx = NULL;
        setenv("DP_NCCL", words[i], 1);
        sim_set_device_count(2);
        CHECK_OK(dp_open(NULL, &ctx));
        CHECK_STR(carrier(ctx), dp_cuda()->name);
        dp_close(ctx);
        CHECK_OK(dp_open(&(dp_config){.colls = colls}, &ctx));
        CHECK_STR(carrier(ctx), "through the host");
        dp_close(ctx);
    }
}

static void hear_of_p2p(const dp_log_record *record, void *user)
{
    if (strstr(record->text, "NCCL_P2P_DISABLE") != NULL)
        snprintf(user, 300, "%s", record->text);
}

static dp_status open_pair(sim_peer peer, char *said, dp_ctx **out)
{
    said[0] = '\0';
    sim_set_device_count(2);
    sim_set_peer(0, 1, SIM_PEER_GOOD);
    sim_set_peer(1, 0, peer);
    return dp_open(&(dp_config){.log = {hear_of_p2p, said, DP_LOG_WARN}}, out);
}

/* NCCL is not to read over a pair that brings wrong bytes. */
TEST(a_pair_that_flips_bytes_is_not_for_nccl)
{
    char said[300];
    dp_ctx *ctx = NULL;
    CHECK_OK(open_pair(SIM_PEER_FLIPS, said, &ctx));
    CHECK_STR(getenv("NCCL_P2P_DISABLE"), "1");
    CHECK_STR(said, "nccl: NCCL_P2P_DISABLE is set to 1, as GPU 1 does not read GPU 0 directly");
    CHECK_OK(sum_of(ctx, LARGE));
    dp_close(ctx);
}

/* NCCL has read its environment: if it reads over that pair, no context opens. */
TEST(nccl_may_have_been_used_before)
{
    char said[300];
    dp_ctx *ctx = NULL;
    CHECK_OK(open_pair(SIM_PEER_GOOD, said, &ctx));
    dp_close(ctx);
    CHECK_OK(open_pair(SIM_PEER_NONE, said, &ctx));
    dp_close(ctx);
    CHECK_STR(said, "");
    CHECK(getenv("NCCL_P2P_DISABLE") == NULL);
    CHECK_ERROR(open_pair(SIM_PEER_FLIPS, said, &ctx), DP_ERR_DEVICE,
                "nccl: 1 of 129 words from rank 0 arrive wrong at rank 1: start all");
    CHECK_SAYS(said, "as GPU 1 does not read GPU 0 directly: too late, NCCL has been used in this "
                     "process; set it before the process starts");
    CHECK_ERROR(open_pair(SIM_PEER_FLIPS, said, &ctx), DP_ERR_DEVICE, "arrive wrong at rank 1");
    sim_check_leaks();
}

/* Whoever set the variable keeps it. */
TEST(a_wish_to_go_directly_is_checked)
{
    char said[300];
    dp_ctx *ctx = NULL;
    setenv("NCCL_P2P_DISABLE", "0", 1);
    CHECK_ERROR(open_pair(SIM_PEER_FLIPS, said, &ctx), DP_ERR_DEVICE, "arrive wrong at rank 1");
    CHECK_STR(said, "");
    CHECK_STR(getenv("NCCL_P2P_DISABLE"), "0");
    setenv("DP_NCCL", "off", 1);
    CHECK_OK(open_pair(SIM_PEER_FLIPS, said, &ctx));
    CHECK_STR(carrier(ctx), dp_cuda()->name);
    CHECK_OK(sum_of(ctx, LARGE));
    dp_close(ctx);
}

TEST(gpus_that_are_kept_apart_are_not_for_nccl)
{
    setenv("DP_PEERS", "off", 1);
    dp_ctx *ctx = open_alone(2);
    CHECK_STR(getenv("NCCL_P2P_DISABLE"), "1");
    CHECK_OK(sum_of(ctx, LARGE));
    CHECK_INT(sim_peer_copies(), 0);
    dp_close(ctx);
}

/* ---- several processes ----------------------------------------------------------------------- */

/* Rank 2 has something wrong in what it has from another one: of 129 words of each. */
static void arrives_wrong(meeting *m, int from, sim_peer peer, int shards, const char *said)
{
    dp_ctx *ctx = NULL;
    sim_nccl_pair(from, 2, peer);
    dp_status status = try_open(m, (dp_config){.shards = shards}, &ctx);
    CHECK(status == DP_ERR_DEVICE || (status == DP_ERR_REMOTE && m->process != 2));
    CHECK_SAYS(dp_last_error(), said);
    CHECK_SAYS(dp_last_error(), ": start all processes with NCCL_P2P_DISABLE=1");
    sim_check_leaks();
    CHECK_INT(sim_finding_count("leak"), 0);
}

static void bits_are_wrong(meeting *m)
{
    arrives_wrong(m, 0, SIM_PEER_FLIPS, 0,
                  "nccl: 1 of 129 words from rank 0 arrive wrong at rank 2");
}

static void bits_are_wrong_for_slices(meeting *m)
{
    arrives_wrong(m, 0, SIM_PEER_FLIPS, 4,
                  "nccl: 1 of 129 words from rank 0 arrive wrong at rank 2");
}

/* The right words of another communicator. */
static void words_are_stale(meeting *m)
{
    for (int shards = 0; shards <= 4; shards += 4) {
        dp_ctx *ctx = NULL;
        sim_nccl_pair(0, 2, SIM_PEER_GOOD);
        CHECK_OK(try_open(m, (dp_config){.shards = shards}, &ctx));
        dp_close(ctx);
        arrives_wrong(m, 0, SIM_PEER_STALE, shards,
                      "nccl: 129 of 129 words from rank 0 arrive wrong at rank 2");
    }
}

/* The right words of another rank. */
static void words_are_crossed(meeting *m)
{
    arrives_wrong(m, 1, SIM_PEER_CROSSED, 0,
                  "nccl: 129 of 129 words from rank 1 arrive wrong at rank 2");
}

/* They are right when it is asked who gave them. */
static void bits_are_late(meeting *m)
{
    arrives_wrong(m, 0, SIM_PEER_LATE, 0,
                  "nccl: 1 of 516 words arrive at rank 2 later than NCCL says");
    arrives_wrong(m, 0, SIM_PEER_LATE, 4,
                  "nccl: 1 of 516 words arrive at rank 2 later than NCCL says");
}

static void bits_go_through_the_host(meeting *m)
{
    dp_ctx *ctx = NULL;
    sim_nccl_pair(0, 1, SIM_PEER_FLIPS);
    setenv("NCCL_P2P_DISABLE", "1", 1);
    CHECK_OK(try_open(m, (dp_config){0}, &ctx));
    CHECK_OK(sum_of(ctx, LARGE));
    dp_close(ctx);
}

TEST_SLOW(wrong_bytes_are_found_when_a_job_opens, 60)
{
    in_processes(4, bits_are_wrong);
    in_processes(4, bits_are_wrong_for_slices);
    in_processes(4, words_are_stale);
    in_processes(4, words_are_crossed);
    in_processes(4, bits_are_late);
    in_processes(2, bits_go_through_the_host);
}

static void bits_do_not_come(meeting *m)
{
    dp_ctx *ctx = NULL;
    sim_nccl_pair(1, 0, SIM_PEER_HANGS);
    CHECK_ERROR(try_open(m, (dp_config){.timeout_ms = 700}, &ctx), DP_ERR_TIMEOUT,
                "nccl: nothing arrives at GPU 0 within 700 ms");
}

/* One gives up sooner: what the other still waited for is aborted, and is not taken for numbers. */
static void bits_do_not_come_in_time(meeting *m)
{
    dp_ctx *ctx = NULL;
    sim_nccl_pair(1, 0, SIM_PEER_HANGS);
    CHECK_ERROR(try_open(m, (dp_config){.timeout_ms = m->process == 0 ? 20000 : 700}, &ctx),
                DP_ERR_TIMEOUT, "nccl: nothing arrives at GPU 0 within 700 ms");
}

TEST_SLOW(a_pair_that_hangs_does_not_open, 60)
{
    in_processes(2, bits_do_not_come);
    in_processes(2, bits_do_not_come_in_time);
}

static void sums(meeting *m)
{
    dp_ctx *ctx = open_for(m, 0);
    CHECK_STR(carrier(ctx), dp_nccl_coll()->name);
    CHECK_OK(sum_of(ctx, COUNT));
    CHECK_OK(sum_of(ctx, LARGE));
    CHECK_INT(sim_nccl_count().all_reduce, 2 * gpus_of(m->process));
    CHECK_INT(sim_nccl_count().send, 0);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

TEST_SLOW(gpus_of_several_processes, 60)
{
    in_processes(2, sums);
    memcpy(shares, (int[]){2, 1, 3}, 3 * sizeof(int));
    in_processes(3, sums);
    memcpy(shares, (int[]){2, 2, 2, 2}, 4 * sizeof(int));
    in_processes(4, sums);
}

TEST_SLOW(eight_processes, 60)
{
    in_processes(8, sums);
}

static void again_and_again(meeting *m)
{
    int before = 0;
    for (int i = 0; i < 3; i++) {
        dp_ctx *ctx = open_for(m, 0);
        CHECK_OK(sum_of(ctx, COUNT));
        dp_close(ctx);
        before = i == 0 ? open_files() : before;
    }
    CHECK_INT(open_files(), before);
    sim_check_leaks();
    CHECK_INT(sim_finding_count("leak"), 0);
}

TEST_SLOW(nothing_stays_open, 60)
{
    in_processes(2, again_and_again);
}

/* The interface that dp.h is to use: NCCL takes "=" for "not one that only begins so". */
static void own_interface(meeting *m)
{
    unsetenv("NCCL_SOCKET_IFNAME");
    setenv("DP_INTERFACE", "127.", 1);
    dp_ctx *ctx = open_for(m, 0);
    const char *set = getenv("NCCL_SOCKET_IFNAME");
    CHECK(set != NULL && strncmp(set, "=lo", 3) == 0);
    dp_close(ctx);
    setenv("NCCL_SOCKET_IFNAME", "eth", 1); /* whoever has set it keeps it */
    ctx = open_for(m, 0);
    CHECK_STR(getenv("NCCL_SOCKET_IFNAME"), "eth");
    dp_close(ctx);
}

TEST_SLOW(nccl_takes_the_interface_that_dp_does, 30)
{
    dp_ctx *ctx;
    in_processes(2, own_interface);
    unsetenv("NCCL_SOCKET_IFNAME");
    setenv("DP_INTERFACE", "127.", 1);
    ctx = open_alone(2); /* which needs none */
    CHECK(getenv("NCCL_SOCKET_IFNAME") == NULL);
    dp_close(ctx);
}

/* Both have the GPU that CUDA calls 0000:01:00.0. */
static void same_gpu(meeting *m)
{
    static const dp_device_ops *backends[2];
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    sim_set_device_count(1);
    backends[0] = dp_cuda();
    config.backends = backends;
    config.colls = NULL;
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_UNSUPPORTED, "processes 0 and 1 drive the same GPU");
}

TEST_SLOW(a_gpu_is_of_one_process, 30)
{
    in_processes(2, same_gpu);
}

/* Each has a slice of the one GPU of this machine. */
static void slices(meeting *m)
{
    sim_set_slices(4);
    sim_set_nccl(23000);
    dp_ctx *ctx = open_for(m, 0);
    CHECK_STR(carrier(ctx), dp_nccl_coll()->name);
    CHECK_STR(getenv("NCCL_MULTI_RANK_GPU_ENABLE"), "1");
    CHECK_OK(sum_of(ctx, COUNT));
    dp_close(ctx);
}

TEST_SLOW(slices_of_a_gpu_are_told_apart, 60)
{
    cuda_alone();
    in_processes(2, slices);
    memcpy(shares, (int[]){1, 2, 1}, 3 * sizeof(int));
    in_processes(3, slices);
}

/* Rank 0 is on another machine. */
static void slices_are_too_new(meeting *m)
{
    dp_ctx *ctx = NULL;
    setenv("NCCL_HOSTID", m->process == 0 ? "here" : "there", 1);
    sim_set_slices(4);
    sim_set_nccl(22999);
    CHECK_ERROR(
        try_open(m, (dp_config){0}, &ctx), DP_ERR_UNSUPPORTED,
        "nccl: ranks 1 and 2 are on slices (MIG) of one GPU, 0000:00:00.0, which NCCL takes "
        "from 2.30 on, and this one is 2.29");
    CHECK(getenv("NCCL_MULTI_RANK_GPU_ENABLE") == NULL);
}

TEST_SLOW(an_older_nccl_takes_no_slices, 30)
{
    cuda_alone();
    in_processes(3, slices_are_too_new);
}

/* Whoever has said no is not overruled: NCCL refuses. */
static void slices_are_not_wanted(meeting *m)
{
    dp_ctx *ctx = NULL;
    setenv("NCCL_MULTI_RANK_GPU_ENABLE", "0", 1);
    sim_set_slices(2);
    sim_set_nccl(23000);
    CHECK_ERROR(try_open(m, (dp_config){0}, &ctx), DP_ERR_INTERNAL, "two ranks have the same GPU");
    CHECK_STR(getenv("NCCL_MULTI_RANK_GPU_ENABLE"), "0");
}

TEST_SLOW(a_wish_for_no_slices_stays, 30)
{
    cuda_alone();
    in_processes(2, slices_are_not_wanted);
}

/* Two devices on one slice, or on two whole GPUs, need no permission. */
static void no_slices(meeting *m)
{
    sim_set_nccl(23000);
    dp_ctx *ctx = open_with(m, (dp_config){.devices = (const int[]){0, 0}});
    CHECK(getenv("NCCL_MULTI_RANK_GPU_ENABLE") == NULL);
    CHECK_OK(sum_of(ctx, COUNT));
    dp_close(ctx);
}

TEST_SLOW(devices_on_a_whole_gpu_are_no_slices, 30)
{
    memcpy(shares, (int[]){2, 2}, 2 * sizeof(int));
    in_processes(2, no_slices);
}

TEST(slices_in_one_process_do_without_nccl)
{
    sim_set_slices(2);
    dp_ctx *ctx = open_alone(4);
    CHECK_STR(carrier(ctx), dp_cuda()->name);
    CHECK_OK(sum_of(ctx, LARGE));
    dp_close(ctx);
    sim_set_slices(1);
    ctx = open_alone(4);
    CHECK_STR(carrier(ctx), dp_nccl_coll()->name);
    dp_close(ctx);
}

static void hosts_of_their_own(meeting *m)
{
    setenv("NCCL_HOSTID", m->process == 0 ? "here" : "there", 1);
    dp_ctx *ctx = NULL;
    static const dp_device_ops *backends[2];
    dp_config config = config_of(m, 1);
    sim_set_device_count(1);
    backends[0] = dp_cuda();
    config.backends = backends;
    config.colls = NULL;
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(sum_of(ctx, COUNT));
    dp_close(ctx);
}

TEST_SLOW(nccl_may_be_told_that_hosts_are_two, 30)
{
    in_processes(2, hosts_of_their_own);
}

static void no_library(meeting *m)
{
    static const dp_device_ops *backends[2];
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    sim_set_device_count(1);
    sim_set_first_device(m->process);
    sim_set_nccl(m->process == 1 ? 0 : 22809);
    backends[0] = dp_cuda();
    config.backends = backends;
    config.colls = NULL;
    CHECK_ERROR(dp_open(&config, &ctx), m->process == 1 ? DP_ERR_UNSUPPORTED : DP_ERR_REMOTE,
                "CCL 2.18 or newer was not found: ");
}

TEST_SLOW(one_process_has_no_library, 30)
{
    in_processes(2, no_library);
}

static void switched_off(meeting *m)
{
    static const dp_device_ops *backends[2];
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    setenv("DP_NCCL", "off", 1);
    sim_set_device_count(1);
    sim_set_first_device(m->process);
    backends[0] = dp_cuda();
    config.backends = backends;
    config.colls = NULL;
    CHECK_ERROR(dp_open(&config, &ctx), DP_ERR_UNSUPPORTED, "NCCL is off, as DP_NCCL says");
}

TEST_SLOW(off_is_off, 30)
{
    in_processes(2, switched_off);
}

static void too_many(meeting *m)
{
    enum { MOST = 64 };
    static const dp_device_ops *backends[2];
    const int zeros[MOST + 1] = {0};
    bool here = m->process == 1;
    dp_config config = config_of(m, here ? MOST + 1 : 1);
    dp_ctx *ctx = NULL;
    sim_set_device_count(1);
    sim_set_first_device(m->process);
    backends[0] = dp_cuda();
    config.backends = backends;
    config.devices = zeros;
    config.colls = NULL;
    CHECK_ERROR(dp_open(&config, &ctx), here ? DP_ERR_UNSUPPORTED : DP_ERR_REMOTE,
                "nccl: 65 devices in a process, at most 64");
}

TEST_SLOW(one_process_has_too_many_devices, 30)
{
    in_processes(2, too_many);
}

/* Sums in the promised order, where nobody asked for shards; and processes that seem to be on two
   machines. */
static dp_coll_ops in_order;

static dp_status open_in_order(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    dp_comm_config own = *config;
    own.ordered = true;
    return dp_nccl_coll()->open(host, &own, out);
}

static void set_number(const char *name, int number)
{
    char text[16];
    snprintf(text, sizeof text, "%d", number);
    setenv(name, text, 1);
}

static dp_ctx *open_far(meeting *m, int timeout_ms)
{
    set_number("DP_MACHINE", m->process);
    return open_with(m, (dp_config){.timeout_ms = timeout_ms});
}

/* The same, as a launcher starts them: there are connections among them. */
static dp_ctx *open_launched(meeting *m, int timeout_ms)
{
    char address[40];
    snprintf(address, sizeof address, "@test-nccl-%d", (int)getppid());
    setenv("DP_LAUNCH", "dp", 1);
    setenv("DP_ADDR", address, 1);
    set_number("DP_PROCESS", m->process);
    set_number("DP_PROCESS_COUNT", m->process_count);
    set_number("DP_LOCAL_PROCESS", m->process);
    set_number("DP_LOCAL_PROCESS_COUNT", m->process_count);
    return open_far(m, timeout_ms);
}

/* ---- who adds up ----------------------------------------------------------------------------- */

static void factors(meeting *m)
{
    static const double scales[] = {0.5, 0.5, 3, (double)NAN, 1, (double)NAN, 0.25};
    dp_ctx *ctx = open_for(m, 0);
    vectors v;
    for (int i = 0; i < 7; i++) {
        long before = sim_nccl_count().all_reduce;
        vectors_make(ctx, &v, DP_F32, COUNT);
        CHECK_OK(dp_all_reduce_scaled(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM, scales[i]));
        CHECK_OK(all_are(ctx, &v, (float)(3 * scales[i])));
        CHECK_INT(sim_nccl_count().all_reduce, before + 1);
        dp_scope_end(v.scope);
    }
    dp_close(ctx);
}

TEST_SLOW(factors_go_with_the_sum, 30)
{
    in_processes(2, factors);
}

static float half(uint16_t bits)
{
    return (float)number_get(DP_F16, (const char *)&bits, 0);
}

/* A third is no number of f16: NCCL would multiply by what is near it. */
static void halves(meeting *m)
{
    dp_ctx *ctx = open_for(m, 0);
    vectors v;
    uint16_t got;
    for (int i = 0; i < 2; i++) {
        long before = sim_nccl_count().all_reduce;
        vectors_make(ctx, &v, DP_F16, 1);
        CHECK_OK(dp_all_reduce_scaled(ctx, v.parts, 1, DP_F16, DP_OP_SUM, i == 0 ? 0.5 : 1.0 / 3));
        CHECK_OK(dp_read(ctx, &v.data[0], &got, sizeof got));
        CHECK_F64(half(got), i == 0 ? 1.5 : 1, 0);
        CHECK_INT(sim_nccl_count().all_reduce, before + (i == 0));
        dp_scope_end(v.scope);
    }
    dp_close(ctx);
}

TEST_SLOW(factors_of_halves_are_powers_of_two, 30)
{
    in_processes(2, halves);
}

/* NCCL may make of a NaN what it likes, so it is not asked. */
static void check_taken(dp_ctx *ctx, int mib)
{
    dp_device_info info;
    CHECK_OK(dp_device_info_get(ctx, 0, &info));
    CHECK_INT(info.bytes_total - info.bytes_free, (uint64_t)mib << 20);
}

/* Two processes with four GPUs each; in place. */
static dp_status scatter_sums(dp_ctx *ctx, vectors *v, dp_dtype dtype, int process)
{
    for (int i = 0; i < 4; i++)
        v->parts[i].recv = (char *)v->data[i].data +
                           (size_t)(4 * process + i) * COUNT * dp_dtype_bytes(dtype);
    return dp_reduce_scatter(ctx, v->parts, COUNT, dtype, DP_OP_SUM);
}

/* 4 MiB for each rank, where sums are made of slices, from then on; before there is a slab, which
   has no room for them. */
static void slots_are_taken(meeting *m)
{
    dp_ctx *ctx = open_for(m, 0);
    vectors v, whole;
    vectors_make(ctx, &v, DP_F32, 8 * COUNT);
    vectors_make(ctx, &whole, DP_I16, COUNT);
    CHECK_OK(dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM));
    CHECK_OK(dp_broadcast(ctx, v.parts, COUNT, DP_F32, 0));
    CHECK_OK(scatter_sums(ctx, &v, DP_F32, m->process));
    check_taken(ctx, 32);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(dp_all_reduce(ctx, whole.parts, COUNT, DP_I16, DP_OP_SUM));
        check_taken(ctx, 64);
    }
    dp_scope_end(v.scope);
    dp_scope_end(whole.scope);
    dp_close(ctx);
}

static void slots_are_taken_to_scatter(meeting *m)
{
    dp_ctx *ctx = open_for(m, 0);
    vectors v;
    vectors_make(ctx, &v, DP_I16, 8 * COUNT);
    check_taken(ctx, 32);
    CHECK_OK(scatter_sums(ctx, &v, DP_I16, m->process));
    check_taken(ctx, 64);
    dp_scope_end(v.scope);
    dp_close(ctx);
}

/* Where all sums are, there are slots from the start, of both communicators. */
static void slots_are_there(meeting *m)
{
    dp_ctx *ctx = open_with(m, (dp_config){.shards = 8});
    vectors v;
    check_taken(ctx, 96);
    vectors_make(ctx, &v, DP_F32, COUNT);
    CHECK_OK(dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM));
    check_taken(ctx, 96);
    dp_scope_end(v.scope);
    dp_close(ctx);
}

TEST_SLOW(only_who_adds_slices_takes_memory_for_it, 60)
{
    memcpy(shares, (int[]){4, 4}, 2 * sizeof(int));
    in_processes(2, slots_are_taken);
    in_processes(2, slots_are_taken_to_scatter);
    in_processes(2, slots_are_there);
}

static void the_largest(meeting *m)
{
    dp_ctx *ctx = open_for(m, 0);
    vectors v;
    vectors_make(ctx, &v, DP_F32, COUNT);
    CHECK_OK(dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_MAX));
    CHECK_OK(all_are(ctx, &v, 2));
    CHECK_INT(sim_nccl_count().all_reduce, 0);
    CHECK(sim_nccl_count().send > 0);
    dp_scope_end(v.scope);
    dp_close(ctx);
}

TEST_SLOW(the_largest_of_floats_is_found_in_slices, 30)
{
    in_processes(2, the_largest);
}

/* The context of the other process is told nothing: its calls have to be the same. */
static void nobody_here_wants_it(meeting *m)
{
    dp_ctx *ctx = open_for(m, 0);
    for (int i = 0; i < 3; i++) {
        vectors v;
        vectors_make(ctx, &v, DP_F32, i == 0 ? COUNT : 8 * LARGE); /* has a slab of its own */
        size_t count = (size_t)dp_tensor_count(&v.data[0]);
        long allocs = sim_alloc_count();
        if (m->process == 1)
            v.parts[0].recv = NULL;
        CHECK_OK(dp_all_reduce(ctx, v.parts, count, DP_F32, DP_OP_SUM));
        CHECK_INT(sim_alloc_count() - allocs, i == 1 && m->process == 1);
        CHECK_OK(all_are(ctx, &v, m->process == 1 ? 2 : 3));
        dp_scope_end(v.scope);
    }
    dp_close(ctx);
}

TEST_SLOW(a_gpu_on_which_nobody_wants_the_sum, 30)
{
    in_processes(2, nobody_here_wants_it);
}

/* More ranks than a kernel takes: the same tree, of any dtype. */
enum { MANY = 90, HERE = 45 };

static dp_dtype many_dtype;

static void many_ranks(meeting *m)
{
    static const dp_device_ops *backends[2];
    const int zeros[HERE] = {0};
    const int64_t count = COUNT;
    const void *rows[MANY];
    char want[COUNT * 8], got[COUNT * 8];
    void *out = want;
    dp_config config = config_of(m, HERE);
    dp_ctx *ctx = NULL;
    dp_part parts[HERE];
    uint64_t state = 7;
    size_t bytes = COUNT * dp_dtype_bytes(many_dtype);
    for (int r = 0; r < MANY; r++) {
        char *row = test_room(bytes);
        for (size_t i = 0; i < COUNT; i++)
            number_put(many_dtype, row, i, (number)ldexp((double)(test_random(&state) >> 40), -14));
        rows[r] = row;
    }
    number_kernel(&(dp_kernel_args){.kernel = DP_KERNEL_REDUCE,
                                    .op = DP_OP_SUM,
                                    .dtype = many_dtype,
                                    .count = COUNT,
                                    .out = &out,
                                    .in = rows,
                                    .out_count = 1,
                                    .in_count = MANY,
                                    .alpha = 1.0 / 3,
                                    .beta = MANY});
    sim_set_device_count(1);
    sim_set_first_device(m->process);
    backends[0] = dp_cuda();
    config.backends = backends;
    config.devices = zeros;
    config.colls = (const dp_coll_ops *const[]){&in_order, NULL};
    CHECK_OK(dp_open(&config, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);
    for (int i = 0; i < HERE; i++) {
        dp_tensor own;
        CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, i), rows[m->process * HERE + i],
                                many_dtype, 1, &count, &own));
        parts[i] = (dp_part){own.data, i % 2 == m->process ? own.data : NULL, NULL};
    }
    CHECK_OK(dp_all_reduce_scaled(ctx, parts, COUNT, many_dtype, DP_OP_MEAN, 1.0 / 3));
    for (int i = m->process; i < HERE; i += 2) {
        dp_tensor own = dp_wrap(parts[i].recv, many_dtype, 1, &count);
        own.device = dp_local_device(ctx, i);
        CHECK_OK(dp_read(ctx, &own, got, bytes));
        CHECK_BYTES(got, want, bytes);
    }
    dp_close(ctx);
}

TEST_SLOW(more_ranks_than_a_kernel_takes, 60)
{
    static const dp_dtype dtypes[] = {DP_F32, DP_F64, DP_F16, DP_BF16};
    in_order = *dp_nccl_coll();
    in_order.open = open_in_order;
    for (int i = 0; i < 4; i++) {
        many_dtype = dtypes[i];
        in_processes(2, many_ranks);
    }
}

/* ---- who is named ---------------------------------------------------------------------------- */

static dp_status once(dp_ctx *ctx)
{
    return sum_of(ctx, COUNT);
}

static dp_status go_on(dp_ctx *ctx)
{
    dp_status status = DP_OK;
    for (int i = 0; i < 10000 && status == DP_OK; i++)
        status = sum_of(ctx, i % 20 == 19 ? LARGE : COUNT);
    return status;
}

/* Rank 1 is named for what comes of this, which is the last of the job. */
static void check_ends(dp_ctx *ctx, dp_status (*work)(dp_ctx *ctx), const char *what, int most_ms)
{
    double start = now_ms();
    check_named(ctx, work(ctx), start, most_ms, 1, what);
    dp_close(ctx);
    CHECK(now_ms() - start < (most_ms + 1000) * test_timeout_scale());
}

static void one_is_killed(meeting *m)
{
    dp_ctx *ctx = open_for(m, 30000);
    signal_soon(m, SIGKILL);
    check_ends(ctx, go_on, "has died", SOON_MS);
}

TEST_SLOW(a_process_that_is_killed_is_named, 60)
{
    uint64_t state = test_seed();
    for (int i = 0; i < 3; i++) {
        moment = (int)(test_random(&state) % 200000);
        in_processes_but(2 + i, 1, one_is_killed);
    }
}

static void one_is_stopped(meeting *m)
{
    dp_ctx *ctx = open_for(m, TIMEOUT_MS);
    for (int i = 0; i < 3; i++)
        CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    if (m->process == 1)
        raise(SIGSTOP);
    check_ends(ctx, once, "did not come within 2000 ms", LATE_MS);
}

TEST_SLOW(a_process_that_is_stopped_is_named, 60)
{
    in_processes_but(2, 1, one_is_stopped);
}

static void one_closes(meeting *m)
{
    dp_ctx *ctx = open_for(m, 30000);
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    if (m->process == 1)
        dp_close(ctx);
    else
        check_ends(ctx, once, "has closed its context", SOON_MS);
}

TEST_SLOW(a_process_that_closes_is_named, 30)
{
    in_processes(3, one_closes);
}

/* NCCL connects GPUs in their first collective, and waits for all of them. */
static bool is_killed;

static void one_never_comes(meeting *m)
{
    dp_ctx *ctx = open_for(m, 30000);
    sim_nccl_connects_late(true);
    wait_for_all(m);
    if (m->process == 1 && is_killed)
        raise(SIGKILL);
    else if (m->process == 1)
        dp_close(ctx);
    else
        check_ends(ctx, once, is_killed ? "has died; it has begun none" : "has closed its context",
                   SOON_MS);
}

TEST_SLOW(connections_to_nobody_are_not_waited_for, 60)
{
    for (int i = 0; i < 2; i++) {
        is_killed = i == 1;
        in_processes_but(3, is_killed ? 1 : -1, one_never_comes);
    }
}

/* What nobody has added up is not read, by whatever wait. */
static void one_reads_what_was_given_up(meeting *m)
{
    dp_ctx *ctx = open_for(m, 30000);
    vectors v;
    float got[COUNT];
    CHECK_OK(sum_of(ctx, COUNT));
    vectors_make(ctx, &v, DP_F32, COUNT);
    dp_dev *dev = dp_local_stream(ctx, 0)->dev;
    dp_event *event = NULL;
    CHECK_OK(dev->ops->event_create(dev, &event));
    wait_for_all(m);
    if (m->process == 1) {
        rest(500);
        raise(SIGKILL);
    }
    dp_status status = dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM);
    CHECK_OK(dev->ops->event_record(event, dp_local_stream(ctx, 0)));
    if (status == DP_OK) { /* nobody has noticed yet */
        CHECK_ERROR(dev->ops->event_sync(event), DP_ERR_REMOTE, "has died");
        CHECK_ERROR(dev->ops->stream_sync(dp_local_stream(ctx, 0)), DP_ERR_REMOTE, "has died");
        CHECK_ERROR(dp_read(ctx, &v.data[0], got, sizeof got), DP_ERR_REMOTE, "has died");
    }
    dev->ops->event_destroy(event);
    dp_close(ctx);
}

TEST_SLOW(abandoned_buffers_are_not_read, 60)
{
    in_processes_but(2, 1, one_reads_what_was_given_up);
}

/* All ranks of the process are there, and the collective does not end. */
static void one_hangs(meeting *m)
{
    dp_ctx *ctx = open_for(m, TIMEOUT_MS);
    CHECK_OK(sum_of(ctx, COUNT));
    if (m->process == 1)
        sim_nccl_never_arrives(true);
    double start = now_ms();
    CHECK_ERROR(sum_of(ctx, COUNT), DP_ERR_TIMEOUT,
                "collective 2, all_reduce of 25 f32 (sum): all processes have begun it, and it did "
                "not end within 2000 ms");
    CHECK(now_ms() - start < LATE_MS * test_timeout_scale());
    dp_close(ctx);
}

TEST_SLOW(a_collective_that_does_not_end, 60)
{
    in_processes(2, one_hangs);
}

/* Who does not wait for its collectives is not let further ahead of the GPUs than the keeper can
   look at: 128 of them. */
static void one_runs_ahead(meeting *m)
{
    dp_ctx *ctx = open_for(m, TIMEOUT_MS);
    vectors v;
    dp_status status = DP_OK;
    int count = 0;
    CHECK_OK(sum_of(ctx, COUNT));
    vectors_make(ctx, &v, DP_F32, COUNT);
    sim_nccl_never_arrives(m->process == 1);
    while (status == DP_OK && count < 2000) {
        status = dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM);
        count += status == DP_OK;
    }
    CHECK(dp_status_class(status) == DP_CLASS_JOB);
    CHECK(count >= 100 && count <= 128);
    dp_close(ctx);
}

TEST_SLOW(fast_rank_is_held_back, 60)
{
    in_processes(2, one_runs_ahead);
}

/* What NCCL finds out on its own. */
static void one_hears_of_an_error(meeting *m)
{
    dp_ctx *ctx = open_for(m, 30000);
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    if (m->process == 1) {
        rest(300);
        sim_nccl_fail(6, 0);
    }
    double start = now_ms();
    check_named(ctx, go_on(ctx), start, SOON_MS, 1, "remote error");
    dp_close(ctx);
}

TEST_SLOW(an_error_that_nccl_reports_later, 30)
{
    in_processes(3, one_hears_of_an_error);
}

/* Nobody waits for what a GPU that faulted was to give, in its process or in another. */
static int lost_gpu;

static void one_is_lost(meeting *m)
{
    dp_ctx *ctx = open_for(m, 30000);
    vectors v;
    CHECK_OK(sum_of(ctx, COUNT));
    vectors_make(ctx, &v, DP_F32, COUNT);
    CHECK_OK(dp_wait(ctx));
    wait_for_all(m);
    if (m->process == 1)
        rest(700);
    double start = now_ms();
    dp_status status = dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM);
    if (m->process == 0) {
        rest(250);
        sim_lose_device(lost_gpu, cudaErrorIllegalAddress);
    }
    status = status == DP_OK ? dp_wait(ctx) : status;
    CHECK(status != DP_OK);
    CHECK_INT(dp_status_class(dp_barrier(ctx)), DP_CLASS_JOB);
    CHECK(now_ms() - start < SOON_MS * test_timeout_scale());
    sim_hush(true); /* the context of the lost one stays */
    dp_close(ctx);
    sim_forget_findings();
}

TEST_SLOW(one_gpu_of_a_process_is_lost, 60)
{
    memcpy(shares, (int[]){2, 1}, 2 * sizeof(int));
    for (lost_gpu = 0; lost_gpu < 2; lost_gpu++)
        in_processes(2, one_is_lost);
}

/* ---- from when on others are waited for ------------------------------------------------------ */

enum { BRIEF_MS = 1200 }; /* the time-out */

static void keep_busy(dp_ctx *ctx, int local_rank, int ms)
{
    sim_keep_busy(dp_cuda_stream(dp_local_stream(ctx, local_rank)), ms);
}

static void begin_sum(dp_ctx *ctx, const vectors *v, int64_t count)
{
    CHECK_OK(dp_all_reduce(ctx, v->parts, (size_t)count, DP_F32, DP_OP_SUM));
}

/* Connections are made. */
static dp_ctx *open_and_meet(meeting *m, vectors *v)
{
    dp_ctx *ctx = open_for(m, BRIEF_MS);
    CHECK_OK(sum_of(ctx, COUNT));
    vectors_make(ctx, v, DP_F32, COUNT);
    CHECK_OK(dp_wait(ctx));
    wait_for_all(m);
    return ctx;
}

/* Each GPU computes for longer than the time-out, and then waits for the other for less than it. */
static void both_compute_first(meeting *m)
{
    vectors v;
    dp_ctx *ctx = open_and_meet(m, &v);
    keep_busy(ctx, 0, BRIEF_MS * (3 + m->process) / 2);
    begin_sum(ctx, &v, COUNT);
    CHECK_OK(all_are(ctx, &v, 3));
    dp_close(ctx);
}

TEST_SLOW(work_before_a_collective_is_not_timed, 30)
{
    in_processes(2, both_compute_first);
}

/* Two collectives together take longer than the time-out. */
static void one_comes_late_twice(meeting *m)
{
    vectors v;
    dp_ctx *ctx = open_and_meet(m, &v);
    for (int i = 1; i <= 2; i++) {
        if (m->process == 1)
            keep_busy(ctx, 0, i * BRIEF_MS * 2 / 3);
        begin_sum(ctx, &v, COUNT);
    }
    CHECK_OK(all_are(ctx, &v, 6));
    dp_close(ctx);
}

TEST_SLOW(each_collective_has_a_time_of_its_own, 30)
{
    in_processes(2, one_comes_late_twice);
}

/* NCCL's work is on the stream of the GPU's first rank, and waits for that of the second. */
static void second_ranks_compute_first(meeting *m)
{
    static const dp_device_ops *backends[2];
    static const int zeros[2];
    dp_config config = {.backends = backends,
                        .device_count = 2,
                        .devices = zeros,
                        .bootstrap = config_of(m, 2).bootstrap,
                        .timeout_ms = BRIEF_MS};
    dp_ctx *ctx = NULL;
    vectors v;
    sim_set_device_count(1);
    sim_set_first_device(m->process);
    backends[0] = dp_cuda();
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_STR(carrier(ctx), dp_nccl_coll()->name);
    CHECK_OK(sum_of(ctx, COUNT));
    vectors_make(ctx, &v, DP_F32, COUNT);
    CHECK_OK(dp_wait(ctx));
    wait_for_all(m);
    keep_busy(ctx, 1, BRIEF_MS * (3 + m->process) / 2);
    begin_sum(ctx, &v, COUNT);
    CHECK_OK(all_are(ctx, &v, 10));
    dp_close(ctx);
}

TEST_SLOW(work_of_any_rank_of_a_gpu_is_not_timed, 30)
{
    in_processes(2, second_ranks_compute_first);
}

static dp_ctx *open_two(vectors *v)
{
    dp_ctx *ctx = NULL;
    sim_set_device_count(2);
    CHECK_OK(dp_open(&(dp_config){.timeout_ms = BRIEF_MS}, &ctx));
    vectors_make(ctx, v, DP_F32, LARGE);
    CHECK_OK(dp_wait(ctx));
    return ctx;
}

/* The other GPU of the process waits for it. */
TEST_SLOW(work_of_any_gpu_of_a_process_is_not_timed, 30)
{
    vectors v;
    dp_ctx *ctx = open_two(&v);
    for (int busy = 0; busy < 2; busy++) {
        keep_busy(ctx, busy, BRIEF_MS * 3 / 2);
        begin_sum(ctx, &v, LARGE);
        CHECK_OK(all_are(ctx, &v, busy == 0 ? 3 : 6));
    }
    dp_close(ctx);
}

/* From the moment on when the last one has come to the collective. */
TEST_SLOW(gpus_of_one_process_that_hang_are_timed, 30)
{
    vectors v;
    for (int busy = 0; busy < 2; busy++) {
        dp_ctx *ctx = open_two(&v);
        sim_nccl_never_arrives(true);
        double start = now_ms();
        keep_busy(ctx, busy, BRIEF_MS / 2);
        begin_sum(ctx, &v, LARGE);
        CHECK_ERROR(dp_wait(ctx), DP_ERR_TIMEOUT,
                    "nccl: what was begun did not end within 1200 ms");
        CHECK(now_ms() - start >= BRIEF_MS * 3 / 2);
        CHECK(now_ms() - start < LATE_MS * test_timeout_scale());
        sim_nccl_never_arrives(false);
        dp_close(ctx);
    }
}

/* There is no collective yet. */
static void one_does_not_connect(meeting *m)
{
    dp_ctx *ctx = NULL;
    double start = now_ms();
    sim_nccl_never_arrives(m->process == 1);
    CHECK_ERROR(try_open(m, (dp_config){.timeout_ms = BRIEF_MS}, &ctx), DP_ERR_TIMEOUT,
                "nccl: connections were not made within 1200 ms");
    CHECK(now_ms() - start >= BRIEF_MS);
    CHECK(now_ms() - start < LATE_MS * test_timeout_scale());
}

TEST_SLOW(connections_that_are_not_made_are_timed, 30)
{
    in_processes(2, one_does_not_connect);
}

/* ---- what waits for GPUs --------------------------------------------------------------------- */

/* A job on the first GPU of the process, and another context on two of the three, of which the last
   is of another kind. */
typedef struct beside {
    dp_ctx *job, *local, *third;
    vectors v, of_local;
    void *large, *pinned;
    dp_comm *comm;
} beside;

static void beside_open(meeting *m, beside *b)
{
    static const dp_device_ops *backends[2];
    const dp_coll_ops *const colls[] = {dp_cuda_coll(), NULL};
    backends[0] = dp_cuda();
    sim_set_device_count(3);
    sim_set_arch_of(2, 75);
    sim_set_first_device(3 * m->process);
    CHECK_OK(dp_open(&(dp_config){.backends = backends,
                                  .device_count = 1,
                                  .bootstrap = config_of(m, 1).bootstrap,
                                  .timeout_ms = 30000},
                     &b->job));
    CHECK_OK(dp_open(
        &(dp_config){.backends = backends, .colls = colls, .device_count = 2, .local_only = true},
        &b->local));
    CHECK_OK(sum_of(b->job, COUNT));
    vectors_make(b->job, &b->v, DP_F32, COUNT);
    vectors_make(b->local, &b->of_local, DP_F32, COUNT);
}

enum { LARGE_BYTES = 64 << 20, ACTIONS = 9 };

/* As dp_recover does, for which devices stay open. */
static void open_communicator(dp_ctx *ctx, dp_comm **out)
{
    dp_dev *const local[] = {dp_local_stream(ctx, 0)->dev, dp_local_stream(ctx, 1)->dev};
    CHECK_OK(dp_nccl_coll()->open(
        local[0]->host,
        &(dp_comm_config){.local = local, .local_count = 2, .rank_count = 2, .timeout_ms = 30000},
        out));
}

/* Each makes CUDA wait for all that a GPU has to do. */
static void act(beside *b, int action)
{
    static const int last = 2;
    const dp_tensor *data = b->of_local.data;
    dp_dev *dev = dp_local_stream(b->job, 0)->dev;
    switch (action) {
    case 0:
        CHECK_OK(dev->ops->alloc(dev, LARGE_BYTES, &b->large));
        break;
    case 1:
        dev->ops->free(dev, b->large, LARGE_BYTES);
        break;
    case 2:
        CHECK_OK(dev->ops->host_alloc(dev, LARGE_BYTES, &b->pinned));
        break;
    case 3:
        dev->ops->host_free(dev, b->pinned, LARGE_BYTES);
        break;
    case 4:
    case 5: /* checks the pair */
        CHECK_OK(dp_copy(b->local, &data[action == 4], &data[action == 5], NULL));
        break;
    case 6: /* loads kernels */
        CHECK_OK(dp_open(&(dp_config){.device_count = 1, .devices = &last, .local_only = true},
                         &b->third));
        dp_close(b->third);
        break;
    case 7:
        open_communicator(b->local, &b->comm);
        break;
    default:
        b->comm->ops->close(b->comm);
    }
}

/* The other process could not go on if this one waited in CUDA before it begins the next one. */
static void acts_beside_sums(meeting *m)
{
    beside b;
    beside_open(m, &b);
    for (int action = 0; action < ACTIONS; action++) {
        CHECK_OK(dp_wait(b.job));
        CHECK_OK(dp_wait(b.local));
        wait_for_all(m);
        keep_busy(b.job, 0, 300);
        begin_sum(b.job, &b.v, COUNT);
        act(&b, action);
        if (sim_finding_count(NULL) != 0)
            test_fail(__FILE__, __LINE__, "action %d", action);
    }
    dp_close(b.local);
    dp_close(b.job);
}

TEST_SLOW(what_waits_for_gpus_waits_for_collectives_before, 30)
{
    in_processes(2, acts_beside_sums);
}

/* ---- what is aborted is void ----------------------------------------------------------------- */

static atomic_bool someone_waits, has_waited;

/* Whoever waits for the stream is through with it before ncclCommAbort has returned. */
static void let_waiters_go(void)
{
    double start = now_ms();
    while (atomic_load(&someone_waits) && !atomic_load(&has_waited) &&
           now_ms() - start < LATE_MS * test_timeout_scale())
        rest(1);
}

static void one_waits_for_what_is_aborted(meeting *m)
{
    vectors v;
    dp_ctx *ctx = open_and_meet(m, &v);
    dp_stream *stream = dp_local_stream(ctx, 0);
    if (m->process == 1)
        sim_nccl_never_arrives(true);
    sim_nccl_in_abort(let_waiters_go);
    begin_sum(ctx, &v, COUNT);
    atomic_store(&someone_waits, true);
    dp_status status = stream->dev->ops->stream_sync(stream);
    atomic_store(&has_waited, true);
    CHECK_STATUS(status, DP_ERR_TIMEOUT);
    dp_close(ctx);
}

TEST_SLOW(streams_that_an_abort_lets_go_of_have_failed, 30)
{
    in_processes(2, one_waits_for_what_is_aborted);
}

/* ---- on two machines ------------------------------------------------------------------------- */

static void one_is_far_and_late(meeting *m)
{
    dp_ctx *ctx = open_far(m, TIMEOUT_MS);
    CHECK_OK(sum_of(ctx, COUNT));
    double start = now_ms();
    if (m->process == 1)
        rest(2 * TIMEOUT_MS);
    else
        CHECK_ERROR(sum_of(ctx, COUNT), DP_ERR_TIMEOUT,
                    "did not come within 2000 ms; its last one was 1, all_reduce of 25 f32 (sum)");
    CHECK(now_ms() - start < LATE_MS * test_timeout_scale());
    dp_close(ctx);
}

static void *abort_soon(void *ctx)
{
    rest(200);
    dp_abort(ctx, DP_ERR_USER, "the disk is full");
    return NULL;
}

/* There are no others that could tell its keeper. */
TEST(aborting_ends_what_one_process_waits_for)
{
    pthread_t thread;
    dp_ctx *ctx = NULL;
    sim_set_device_count(2);
    CHECK_OK(dp_open(&(dp_config){.timeout_ms = 60000}, &ctx));
    CHECK_OK(sum_of(ctx, LARGE));
    sim_nccl_never_arrives(true);
    double start = now_ms();
    CHECK_INT(pthread_create(&thread, NULL, abort_soon, ctx), 0);
    if (sum_of(ctx, LARGE) == DP_OK)
        CHECK_ERROR(dp_wait(ctx), DP_ERR_ABORTED, "the disk is full");
    CHECK_INT(pthread_join(thread, NULL), 0);
    dp_close(ctx);
    CHECK(now_ms() - start < 20000);
    sim_check_leaks();
}

static void one_is_far_and_aborts(meeting *m)
{
    pthread_t thread;
    dp_ctx *ctx = open_far(m, 30000);
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    double start = now_ms();
    if (m->process == 0) {
        CHECK_INT(pthread_create(&thread, NULL, abort_soon, ctx), 0);
        CHECK_INT(dp_status_class(sum_of(ctx, COUNT)), DP_CLASS_JOB);
        CHECK_INT(pthread_join(thread, NULL), 0);
        CHECK_ERROR(dp_wait(ctx), DP_ERR_ABORTED, "the disk is full");
        CHECK(now_ms() - start < SOON_MS * test_timeout_scale());
    } else {
        rest(600);
    }
    dp_close(ctx);
}

TEST_SLOW(processes_of_two_machines, 60)
{
    in_processes(2, one_is_far_and_late);
    in_processes(2, one_is_far_and_aborts);
}

/* Process 1 is named, whose first rank is 2 of 4. */
static void check_far(dp_ctx *ctx, const char *what)
{
    dp_failure_info failure;
    double start = now_ms();
    CHECK_INT(dp_status_class(go_on(ctx)), DP_CLASS_JOB);
    CHECK(now_ms() - start < SOON_MS * test_timeout_scale());
    CHECK_SAYS(dp_last_error(), what);
    CHECK(dp_failure(ctx, &failure));
    CHECK_INT(failure.rank, 2);
    CHECK_SAYS(failure.text, what);
    dp_close(ctx);
}

static bool on_purpose;

static void one_is_far_and_ends(meeting *m)
{
    dp_ctx *ctx = open_launched(m, 30000);
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    if (m->process == 1) {
        rest(300);
        if (!on_purpose)
            raise(SIGKILL);
        dp_abort(ctx, DP_ERR_USER, "the disk is full");
        dp_close(ctx);
        return;
    }
    check_far(ctx, on_purpose ? ") failed: the disk is full" : ": rank 2 (process 1, pid ");
}

TEST_SLOW(far_processes_tell_each_other, 60)
{
    memcpy(shares, (int[]){2, 1, 1}, 3 * sizeof(int));
    for (int i = 0; i < 2; i++) {
        on_purpose = i == 1;
        in_processes_but(3, on_purpose ? -1 : 1, one_is_far_and_ends);
    }
}

static dp_ctx *open_near_for_an_end(meeting *m)
{
    return open_for(m, END_TIMEOUT_MS);
}

static dp_ctx *open_far_for_an_end(meeting *m)
{
    return open_launched(m, END_TIMEOUT_MS);
}

TEST_SLOW(ends_are_the_same_on_one_machine, 60)
{
    check_ends_over(open_near_for_an_end);
}

TEST_SLOW(ends_are_the_same_on_several_machines, 60)
{
    check_ends_over(open_far_for_an_end);
}

static void one_stays_away_while_clocks_are_set(meeting *m)
{
    enum { MOST_MS = 1500 };
    sim_jump_wall_clock(true);
    dp_ctx *ctx = open_for(m, MOST_MS);
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    double start = now_ms();
    if (m->process == 0)
        CHECK_ERROR(sum_of(ctx, COUNT), DP_ERR_TIMEOUT, "rank 1 (process 1, pid ");
    double took = now_ms() - start;
    CHECK(m->process == 1 || (took > MOST_MS - 100 && took < MOST_MS + LATE_MS));
    wait_for_all(m);
    dp_close(ctx);
}

TEST_SLOW(a_time_out_goes_by_a_clock_that_is_never_set, 30)
{
    in_processes(2, one_stays_away_while_clocks_are_set);
}

/* NCCL may see that somebody has gone, and not who. */
static bool far_away;

static void *remote_error_soon(void *unused)
{
    (void)unused;
    rest(390);
    sim_nccl_fail(6, 0);
    return NULL;
}

static void one_dies_and_nccl_says_so(meeting *m)
{
    pthread_t thread;
    dp_ctx *ctx = far_away ? open_launched(m, 30000) : open_for(m, 30000);
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    if (m->process == 1) {
        rest(400);
        raise(SIGKILL);
    }
    if (m->process == 0)
        CHECK_INT(pthread_create(&thread, NULL, remote_error_soon, NULL), 0);
    if (far_away)
        check_far(ctx, ": rank 2 (process 1, pid ");
    else
        check_ends(ctx, once, "has died", SOON_MS);
}

TEST_SLOW(dead_process_is_named_even_if_nccl_notices_first, 60)
{
    in_processes_but(2, 1, one_dies_and_nccl_says_so);
    far_away = true;
    memcpy(shares, (int[]){2, 1, 1}, 3 * sizeof(int));
    in_processes_but(3, 1, one_dies_and_nccl_says_so);
}

static void aborting_hangs(meeting *m)
{
    const dp_device_ops *const gpus_only[] = {dp_cuda(), NULL};
    dp_ctx *ctx = open_for(m, 30000);
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    if (m->process == 1) {
        rest(300); /* the other waits already */
        sim_nccl_hangs("ncclCommAbort");
        dp_abort(ctx, DP_ERR_USER, "enough");
    } else {
        CHECK_STATUS(sum_of(ctx, COUNT), DP_ERR_ABORTED);
    }
    double start = now_ms();
    dp_close(ctx);
    CHECK(now_ms() - start < 15000 * test_timeout_scale());
    if (m->process == 1)
        CHECK_ERROR(dp_open(&(dp_config){.local_only = true, .backends = gpus_only}, &ctx),
                    DP_ERR_NO_DEVICE, "GPU 0 is lost to this process");
    sim_hush(true); /* what was left behind */
    sim_nccl_hangs(NULL);
    rest(200); /* the keeper goes on, without the context */
    sim_forget_findings();
    _exit(0);
}

TEST_SLOW(aborting_hangs_and_closing_does_not, 60)
{
    in_processes(2, aborting_hangs);
}

/* What hung goes on while dp_close tidies up behind it. */
static void let_it_go_on(const dp_log_record *record, void *unused)
{
    (void)unused;
    if (strstr(record->text, "hangs while it ends") == NULL)
        return;
    sim_nccl_hangs(NULL);
    rest(200);
}

static void aborting_hangs_until_then(meeting *m)
{
    dp_ctx *ctx = open_with(m, (dp_config){.timeout_ms = 30000, .log = {.fn = let_it_go_on}});
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    sim_nccl_hangs("ncclCommAbort");
    sim_hush(true);
    dp_abort(ctx, DP_ERR_USER, "enough");
    dp_close(ctx);
    rest(200);
    sim_forget_findings();
    _exit(0);
}

TEST_SLOW(aborting_ends_while_a_context_closes, 60)
{
    in_processes(2, aborting_hangs_until_then);
}

/* Nobody can touch what was freed. */
static void *mortal_alloc(size_t bytes, size_t align, void *unused)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    void *data = NULL;
    (void)unused;
    align = align > page ? align : page;
    return posix_memalign(&data, align, (bytes + page - 1) / page * page) == 0 ? data : NULL;
}

static void mortal_free(void *data, size_t bytes, void *unused)
{
    (void)unused;
    if (data != NULL)
        CHECK_INT(mprotect(data, bytes, PROT_NONE), 0);
}

static const char *where_it_hangs;

static void keeper_hangs(meeting *m)
{
    dp_ctx *ctx =
        open_with(m, (dp_config){.timeout_ms = 30000,
                                 .allocator = {.alloc = mortal_alloc, .free = mortal_free}});
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    sim_hush(true); /* what is left behind */
    sim_nccl_hangs(where_it_hangs);
    double start = now_ms();
    dp_close(ctx);
    CHECK(now_ms() - start > 3000);
    sim_nccl_hangs(NULL);
    rest(300);
    sim_forget_findings();
    _exit(0);
}

/* A keeper that comes back from NCCL after dp_close has gone on without it. */
static void check_late_keeper(const char *function)
{
    static const int gpus[] = {2, 1, 1};
    where_it_hangs = function;
    memcpy(shares, gpus, sizeof gpus);
    in_processes(1, keeper_hangs);
    in_processes(2, keeper_hangs);
}

TEST_SLOW(finalizing_hangs_and_goes_on_without_the_context, 60)
{
    check_late_keeper("ncclCommFinalize");
}

TEST_SLOW(watching_hangs_and_goes_on_without_the_context, 60)
{
    check_late_keeper("ncclCommGetAsyncError");
}

/* Process 0 has a sum of one context under way when it needs memory for the other one, and process
   1 the other way round. The job whose time is up first fails, the other one goes on. */
static void each_waits_for_the_other(meeting *m)
{
    vectors small, large;
    dp_ctx *hasty = far_away ? open_launched(m, 1500) : open_for(m, 1500);
    unsetenv("DP_ADDR");
    unsetenv("DP_LAUNCH");
    dp_ctx *patient = open_for(m->second, 60000);
    dp_ctx *first = m->process == 0 ? hasty : patient, *second = m->process == 0 ? patient : hasty;
    CHECK_OK(sum_of(hasty, COUNT));
    CHECK_OK(sum_of(patient, COUNT));
    wait_for_all(m);
    vectors_make(first, &small, DP_F32, COUNT);
    CHECK_OK(dp_all_reduce(first, small.parts, COUNT, DP_F32, DP_OP_SUM));
    (void)dp_error(DP_ERR_USER, "before");
    vectors_make(second, &large, DP_F32, 20 * LARGE);
    if (m->process == 0) /* where the hasty one fails meanwhile */
        CHECK_STR(dp_last_error(), "before");
    dp_status late = dp_all_reduce(second, large.parts, COUNT, DP_F32, DP_OP_SUM);
    CHECK(late == DP_OK || second == hasty);
    CHECK_ERROR(dp_wait(hasty), DP_ERR_TIMEOUT, "rank 1 (process 1, pid ");
    CHECK_SAYS(dp_last_error(), " did not come within 1500 ms; its last one was 1, all_reduce");
    CHECK_SAYS(dp_last_error(), "it waits to take memory until another context's collectives");
    CHECK_OK(dp_wait(patient));
    wait_for_all(m);
    dp_close(hasty);
    dp_close(patient);
}

TEST_SLOW(contexts_that_wait_for_one_another_are_named, 60)
{
    for (int far = 0; far < 2; far++) {
        far_away = far != 0;
        in_processes(2, each_waits_for_the_other);
    }
}

/* After a failure those who are left can begin again, as fewer. */
static void some_go_on(meeting *m)
{
    static meeting fewer;
    dp_ctx *ctx = open_for(m, 30000);
    CHECK_OK(sum_of(ctx, COUNT));
    wait_for_all(m);
    if (m->process == 2) {
        rest(300);
        raise(SIGKILL);
    }
    CHECK_INT(dp_status_class(sum_of(ctx, COUNT)), DP_CLASS_JOB);
    dp_close(ctx);
    fewer = *m;
    fewer.process_count = 2;
    ctx = open_for(&fewer, 30000);
    CHECK_OK(sum_of(ctx, COUNT));
    dp_close(ctx);
}

TEST_SLOW(those_who_are_left_begin_again, 60)
{
    in_processes_but(3, 2, some_go_on);
}

/* ---- streams of the users' ------------------------------------------------------------------- */

/* What the second call sends comes where the first one's sums are made, which its streams know
   nothing of. */
static void sums_beside_sums(meeting *m)
{
    dp_ctx *ctx = open_for(m, 0);
    vectors v[2];
    dp_stream *streams[2];
    dp_dev *dev = dp_local_stream(ctx, 0)->dev;
    for (int k = 0; k < 2; k++) {
        vectors_make(ctx, &v[k], DP_I16, 2 * LARGE);
        CHECK_OK(dp_fill(ctx, &v[k].data[0], dp_int(k + 1)));
        v[k].parts[0].recv = (int16_t *)v[k].data[0].data + m->process * LARGE;
        CHECK_OK(dev->ops->stream_create(dev, 0, &streams[k]));
        v[k].parts[0].stream = streams[k];
    }
    CHECK_OK(dp_wait(ctx));
    for (int k = 0; k < 2; k++)
        CHECK_OK(dp_reduce_scatter(ctx, v[k].parts, LARGE, DP_I16, DP_OP_SUM));
    for (int k = 0; k < 2; k++) {
        static int16_t got[2 * LARGE];
        CHECK_OK(dev->ops->stream_sync(streams[k]));
        CHECK_OK(dp_read(ctx, &v[k].data[0], got, sizeof got));
        for (int i = 0; i < LARGE; i++)
            CHECK_INT(got[m->process * LARGE + i], 2 * (k + 1));
        dev->ops->stream_destroy(streams[k]);
        dp_scope_end(v[k].scope);
    }
    dp_close(ctx);
    CHECK_INT(sim_finding_count(NULL), 0);
}

TEST_SLOW(sums_of_slices_on_several_streams, 60)
{
    in_processes(2, sums_beside_sums);
}

/* ---- captures -------------------------------------------------------------------------------- */

enum { VERBS = 5 };

/* Of a few elements, so that all ranks' blocks fit. */
static dp_status verb_of(dp_ctx *ctx, vectors *v, int verb)
{
    dp_part parts[GPUS];
    size_t some = 2;
    memcpy(parts, v->parts, sizeof parts);
    for (int i = 0; i < v->count && (verb == 3 || verb == 4); i++) /* not in place */
        parts[i].recv = (float *)parts[i].recv + COUNT / 2;
    switch (verb) {
    case 0:
        return dp_all_reduce(ctx, parts, some, DP_F32, DP_OP_SUM);
    case 1:
        return dp_broadcast(ctx, parts, some, DP_F32, 1);
    case 2:
        for (int i = 0; i < v->count; i++)
            parts[i].send = (float *)parts[i].recv + COUNT / 2;
        return dp_all_gather(ctx, parts, some, DP_F32);
    case 3:
        return dp_reduce_scatter(ctx, parts, some, DP_F32, DP_OP_SUM);
    default:
        return dp_all_to_all(ctx, parts, some, DP_F32);
    }
}

static void captured(meeting *m)
{
    dp_ctx *ctx = open_for(m, 0);
    vectors v;
    cudaGraph_t graph = NULL;
    bool alone = gpus_of(0) == 1;
    vectors_make(ctx, &v, DP_F32, COUNT);
    cudaStream_t stream = dp_cuda_stream(dp_local_stream(ctx, 0));
    CHECK_OK(dp_wait(ctx));
    CHECK_INT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    for (int verb = 0; verb < VERBS; verb++)
        if (alone)
            CHECK_OK(verb_of(ctx, &v, verb));
        else
            CHECK_ERROR(verb_of(ctx, &v, verb), DP_ERR_UNSUPPORTED,
                        "can be captured where a process drives one GPU, this one drives 2");
    CHECK_INT(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_OK(sum_of(ctx, COUNT));
    dp_scope_end(v.scope);
    dp_close(ctx);
}

TEST_SLOW(one_gpu_a_process_can_be_captured, 30)
{
    in_processes(2, captured);
    memcpy(shares, (int[]){2, 2}, 2 * sizeof(int));
    in_processes(2, captured);
}

/* Where nobody wants a sum it is made all the same: where a graph makes it, nothing else comes. */
static void unwanted_sums_are_captured(meeting *m)
{
    enum { MIB = 1 << 20 }; /* more than 8 of them have a slab of their own */
    static const size_t counts[] = {3 * MIB, 4 * MIB, 5 * MIB};
    dp_ctx *ctx = open_for(m, 0);
    cudaGraph_t graph = NULL;
    vectors v;
    uint64_t taken[3];
    vectors_make(ctx, &v, DP_F32, 5 * MIB);
    cudaStream_t stream = dp_cuda_stream(dp_local_stream(ctx, 0));
    v.parts[0].recv = m->process == 0 ? v.parts[0].recv : NULL;
    CHECK_OK(dp_wait(ctx));
    for (int i = 0; i < 3; i++) {
        dp_device_info info;
        if (i == 0)
            CHECK_INT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
        CHECK_OK(dp_all_reduce(ctx, v.parts, counts[i], DP_F32, DP_OP_SUM));
        if (i == 0)
            CHECK_INT(cudaStreamEndCapture(stream, &graph), cudaSuccess);
        CHECK_OK(dp_wait(ctx));
        CHECK_OK(dp_device_info_get(ctx, 0, &info));
        taken[i] = info.bytes_total - info.bytes_free;
    }
    CHECK_INT(taken[1] - taken[0], m->process == 0 ? 0 : 16 * MIB);
    CHECK_INT(taken[2] - taken[1], m->process == 0 ? 0 : 4 * MIB);
    dp_scope_end(v.scope);
    dp_close(ctx);
}

TEST_SLOW(unwanted_sums_of_graphs_have_their_memory, 30)
{
    in_processes(2, unwanted_sums_are_captured);
}

/* Within one process GPUs do by themselves what is captured. */
TEST(several_gpus_are_captured_without_nccl)
{
    dp_ctx *ctx = open_alone(2);
    vectors v;
    cudaGraph_t graph = NULL;
    long groups = sim_nccl_count().groups;
    for (int reader = 0; reader < 2; reader++)
        sim_set_peer(reader, 1 - reader, SIM_PEER_GOOD);
    vectors_make(ctx, &v, DP_F32, LARGE);
    CHECK_OK(dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM)); /* the pair is checked */
    CHECK_OK(dp_wait(ctx));
    cudaStream_t stream = dp_cuda_stream(dp_local_stream(ctx, 0));
    CHECK_INT(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    CHECK_OK(dp_all_reduce(ctx, v.parts, LARGE, DP_F32, DP_OP_SUM));
    for (int verb = 1; verb < VERBS; verb++)
        CHECK_OK(verb_of(ctx, &v, verb));
    CHECK_INT(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    CHECK_INT(sim_nccl_count().groups, groups);
    dp_scope_end(v.scope);
    dp_close(ctx);
}

/* ---- gradients that travel early ------------------------------------------------------------- */

enum { UNIT_0 = 333, UNITS = 1000 };

typedef struct early {
    dp_ctx *ctx;
    dp_reducer *reducer;
    int count, first;
    dp_tensor grads[GPUS], fresh[GPUS];
    dp_stream *sides[GPUS];
} early;

static dp_status (*hook)(const dp_bucket *bucket, void *user);
static void *hook_user;

static dp_unused unused_units;

static void early_begin(early *e, meeting *m)
{
    static const dp_range ranges[] = {{.unit = 0, .count = UNIT_0},
                                      {.unit = 1, .first = UNIT_0, .count = UNITS - UNIT_0}};
    const int64_t count = UNITS;
    void *local[GPUS];
    dp_info info;
    e->ctx = open_for(m, 0);
    CHECK_OK(dp_info_get(e->ctx, &info));
    e->count = info.local_count;
    e->first = info.rank_first;
    dp_scope *scope = dp_scope_begin(e->ctx);
    for (int i = 0; i < e->count; i++) {
        dp_device device = dp_local_device(e->ctx, i);
        dp_dev *dev = dp_local_stream(e->ctx, i)->dev;
        CHECK_OK(dp_tensor_new(scope, device, DP_F32, 1, &count, &e->grads[i]));
        CHECK_OK(dp_tensor_new(scope, device, DP_F32, 1, &count, &e->fresh[i]));
        CHECK_OK(dev->ops->stream_create(dev, 0, &e->sides[i]));
        local[i] = e->grads[i].data;
    }
    CHECK_OK(dp_reducer_create(
        e->ctx,
        &(dp_reducer_config){
            .blocks = &(dp_block){DP_F32, UNITS, local},
            .block_count = 1,
            .ranges = ranges,
            .range_count = 2,
            .buckets = {.first_bytes = 1, .bytes = 1, .hook = hook, .hook_user = hook_user},
            .unused_units = unused_units,
            .reduction = DP_SUM_RANKS},
        &e->reducer));
}

static void early_end(early *e)
{
    CHECK_OK(dp_wait(e->ctx));
    for (int i = 0; i < e->count; i++) {
        CHECK_OK(e->sides[i]->dev->ops->stream_sync(e->sides[i]));
        e->sides[i]->dev->ops->stream_destroy(e->sides[i]);
    }
    dp_close(e->ctx);
}

/* Elements of a unit on all local ranks, on their side streams; then it is ready. */
static void give_unit(early *e, uint32_t unit, int pass)
{
    int64_t first = unit == 0 ? 0 : UNIT_0, count = unit == 0 ? UNIT_0 : UNITS - UNIT_0;
    for (int i = 0; i < e->count; i++) {
        dp_tensor to, from;
        CHECK_OK(dp_narrow(&e->grads[i], 0, first, count, &to));
        CHECK_OK(dp_narrow(&e->fresh[i], 0, first, count, &from));
        CHECK_OK(dp_fill(e->ctx, &from, dp_float(e->first + i + 1 + pass)));
        CHECK_OK(dp_copy(e->ctx, &to, &from, e->sides[i]));
        CHECK_OK(dp_reducer_ready(e->reducer, i, unit, e->sides[i]));
    }
}

/* What comes right after is ordered too: memory is overwritten at once. */
static void one_bucket_is_early(meeting *m)
{
    static float got[UNITS];
    early e;
    early_begin(&e, m);
    int ranks = e.count;
    for (int p = 0, all = m->process_count; p < all; p++)
        ranks += p != m->process ? gpus_of(p) : 0;
    for (int pass = 0; pass < 4; pass++) {
        CHECK_OK(dp_reducer_begin(e.reducer, NULL));
        give_unit(&e, 1, pass);
        if (pass > 1)
            await_early(e.reducer, 1);
        give_unit(&e, 0, pass);
        CHECK_OK(dp_reducer_finish(e.reducer));
        for (int i = 0; i < e.count; i++) {
            CHECK_OK(dp_copy(e.ctx, &e.fresh[i], &e.grads[i], NULL));
            CHECK_OK(dp_fill(e.ctx, &e.grads[i], dp_float(-7)));
            CHECK_OK(dp_read(e.ctx, &e.fresh[i], got, sizeof got));
            for (int k = 0; k < UNITS; k++)
                CHECK_F64(got[k], ranks * (ranks + 1) / 2 + pass * ranks, 0);
        }
    }
    early_end(&e);
}

TEST_SLOW(buckets_travel_while_gpus_compute, 60)
{
    in_processes(2, one_bucket_is_early);
    memcpy(shares, (int[]){2, 1, 1}, 3 * sizeof(int));
    in_processes(3, one_bucket_is_early);
}

/* A copy to memory that is not pinned waits for the GPU, here for the sum of all: process 1 comes
   to it only when a bucket has travelled, to which process 0 comes while it waits. */
static void *report_meanwhile(void *user)
{
    early *e = user;
    rest(200);
    CHECK_OK(dp_reducer_ready(e->reducer, 0, 1, e->sides[0]));
    return NULL;
}

static void one_waits_for_a_copy(meeting *m)
{
    float got[COUNT];
    pthread_t thread;
    vectors v;
    early e;
    early_begin(&e, m);
    vectors_make(e.ctx, &v, DP_F32, COUNT);
    CHECK_OK(dp_wait(e.ctx));
    for (int pass = 0; pass < 4; pass++) {
        CHECK_OK(dp_reducer_begin(e.reducer, NULL));
        CHECK_INT(pthread_create(&thread, NULL, report_meanwhile, &e), 0);
        if (pass > 1 && m->process == 1)
            await_early(e.reducer, 1);
        CHECK_OK(dp_all_reduce(e.ctx, v.parts, COUNT, DP_F32, DP_OP_SUM));
        CHECK_OK(dp_read(e.ctx, &v.data[0], got, sizeof got));
        CHECK_F64(got[0], 3 << pass, 0);
        CHECK_INT(pthread_join(thread, NULL), 0);
        CHECK_OK(dp_reducer_ready(e.reducer, 0, 0, NULL));
        CHECK_OK(dp_reducer_finish(e.reducer));
    }
    early_end(&e);
}

TEST_SLOW(buckets_travel_while_the_caller_waits_for_a_copy, 60)
{
    in_processes(2, one_waits_for_a_copy);
}

/* What a rank has put on its compute stream and does not report goes with what others report. */
static void one_is_silent(meeting *m)
{
    static float got[UNITS];
    const int64_t count = UNITS;
    early e;
    unused_units = DP_UNUSED_FOUND;
    early_begin(&e, m);
    for (int pass = 0; pass < 3; pass++) {
        CHECK_OK(dp_reducer_begin(e.reducer, NULL));
        for (int i = 0; i < e.count; i++) {
            dp_tensor from = dp_wrap(e.fresh[i].data, DP_F32, 1, &count);
            from.device = e.fresh[i].device;
            CHECK_OK(dp_fill(e.ctx, &from, dp_float(e.first + i + 1 + pass)));
            CHECK_OK(dp_copy(e.ctx, &e.grads[i], &from, NULL));
            for (uint32_t unit = 0; unit < 2 && e.first + i == 0; unit++)
                CHECK_OK(dp_reducer_ready(e.reducer, i, unit, NULL));
        }
        CHECK_OK(dp_reducer_finish(e.reducer));
        CHECK_OK(dp_read(e.ctx, &e.grads[0], got, sizeof got));
        for (int k = 0; k < UNITS; k++)
            CHECK_F64(got[k], 6 + 3 * pass, 0);
    }
    early_end(&e);
}

TEST_SLOW(unreported_units_travel_last, 60)
{
    memcpy(shares, (int[]){1, 2}, 2 * sizeof(int));
    in_processes(2, one_is_silent);
}

/* A hook works on the compute streams, so its buckets do not travel early. */
static dp_status doubled(const dp_bucket *bucket, void *user)
{
    const int64_t count = (int64_t)bucket->count;
    for (int i = 0; i < *(const int *)user; i++) {
        dp_tensor own = dp_wrap(bucket->local[i].recv, bucket->dtype, 1, &count);
        own.device = dp_local_device(bucket->ctx, i);
        CHECK(bucket->local[i].stream == dp_local_stream(bucket->ctx, i));
        DP_TRY(dp_axpby(bucket->ctx, 2, &own, 0, NULL, &own));
    }
    return dp_bucket_all_reduce(bucket, bucket->local, bucket->count, bucket->dtype, DP_OP_SUM, 1);
}

static void a_hook_on_gpus(meeting *m)
{
    static float got[UNITS];
    static int local;
    early e;
    local = gpus_of(m->process);
    hook = doubled;
    hook_user = &local;
    early_begin(&e, m);
    for (int pass = 0; pass < 2; pass++) {
        CHECK_OK(dp_reducer_begin(e.reducer, NULL));
        give_unit(&e, 1, pass);
        give_unit(&e, 0, pass);
        CHECK_OK(dp_reducer_finish(e.reducer));
        CHECK_OK(dp_read(e.ctx, &e.grads[0], got, sizeof got));
        CHECK_F64(got[0], 2 * (6 + pass * 3), 0);
        CHECK_F64(got[UNITS - 1], 2 * (6 + pass * 3), 0);
    }
    early_end(&e);
}

TEST_SLOW(hooks_of_gpus_are_the_callers, 60)
{
    memcpy(shares, (int[]){2, 1}, 2 * sizeof(int));
    in_processes(2, a_hook_on_gpus);
}

/* ---- what has been carried by what ----------------------------------------------------------- */

static void check_report(dp_ctx *ctx, const char *all, const char *early)
{
    static const net_shape shape = {0};
    char text[4000];
    dp_module *net = net_create(ctx, &shape, 0), *par;
    CHECK_OK(dp_distributed(net, NULL, &par));
    CHECK_OK(net_step(net, par, 0));
    CHECK(dp_report_text(par, text, sizeof text) < sizeof text);
    CHECK_SAYS(text, all);
    CHECK((strstr(text, "buckets that travelled early: ") != NULL) == (early != NULL));
    if (early != NULL)
        CHECK_SAYS(text, early);
    dp_close(ctx);
}

TEST(a_report_says_what_carried_what)
{
    dp_ctx *ctx = open_alone(2);
    CHECK_OK(sum_of(ctx, LARGE));
    CHECK_OK(sum_of(ctx, COUNT));
    check_report(ctx, "collectives: 1 by NCCL, 2400000 bytes of each rank; 2 by the GPUs", NULL);
    setenv("DP_NCCL", "1", 1);
    check_report(open_alone(2), "; 0 by the GPUs themselves\n", NULL);
}

static void remember(const dp_log_record *record, void *said)
{
    if (strncmp(record->text, "nccl: ", 6) == 0)
        snprintf(said, 200, "%s", record->text);
}

TEST(closing_logs_what_carried_what)
{
    char said[200] = "";
    dp_ctx *ctx = NULL;
    sim_set_device_count(2);
    CHECK_OK(dp_open(&(dp_config){.log = {remember, said, DP_LOG_INFO}}, &ctx));
    CHECK_OK(sum_of(ctx, LARGE));
    CHECK_OK(sum_of(ctx, COUNT));
    dp_close(ctx);
    CHECK_STR(said, "nccl: collectives: 1 by NCCL, 2400000 bytes of each rank; 1 by the GPUs "
                    "themselves");
}

static void report_of_two(meeting *m)
{
    check_report(open_for(m, 0), " bytes of each rank\n",
                 "buckets that travelled early: 1 by NCCL, 88 bytes of each rank\n");
}

TEST_SLOW(a_report_of_several_processes, 30)
{
    in_processes(2, report_of_two);
}

static void warned(const dp_log_record *record, void *said)
{
    if (record->level == DP_LOG_WARN)
        snprintf(said, 200, "%s", record->text);
}

/* A table that knows host memory alone carries for GPUs, and it is said that another would not have
   to. */
static void sums_without_nccl(meeting *m)
{
    const dp_coll_ops *const colls[] = {dp_shm_coll(), NULL};
    char said[200] = "";
    dp_ctx *ctx = open_with(m, (dp_config){.colls = colls, .log = {warned, said, DP_LOG_WARN}});
    CHECK_STR(carrier(ctx), "shared memory, through the host");
    CHECK_SAYS(said, "collectives go through the host: between GPUs of several processes NCCL");
    CHECK_OK(sum_of(ctx, COUNT));
    CHECK_OK(sum_of(ctx, LARGE));
    CHECK_INT(sim_nccl_count().all_reduce, 0);
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

TEST_SLOW(without_nccl_gpus_go_through_the_host, 60)
{
    in_processes(2, sums_without_nccl);
    memcpy(shares, (int[]){2, 1, 3}, 3 * sizeof(int));
    in_processes(3, sums_without_nccl);
}

/* ---- every call fails once ------------------------------------------------------------------- */

typedef struct outcome { /* of all processes */
    bool fired;
    int refused; /* calls that failed, and not the job */
} outcome;

static outcome *shared;
static long fail_at;
static int fail_code;

static void a_call_fails(meeting *m)
{
    static const dp_device_ops *backends[2];
    test_allocator counter = {0};
    dp_config config = config_of(m, 1);
    dp_ctx *ctx = NULL;
    sim_set_device_count(1);
    sim_set_first_device(m->process);
    backends[0] = dp_cuda();
    config.backends = backends;
    config.colls = NULL;
    config.timeout_ms = 20000;
    config.allocator = test_allocator_of(&counter);
    if (m->process == 1)
        sim_fail_at(fail_at, fail_code, false);
    dp_status status = dp_open(&config, &ctx);
    if (status == DP_OK) {
        status = sum_of(ctx, COUNT);
        dp_close(ctx);
    }
    if (m->process == 1)
        shared->fired = sim_fault_fired();
    CHECK_INT(cudaGetLastError(), cudaSuccess);
    if (status == DP_ERR_TIMEOUT)
        test_fail(__FILE__, __LINE__, "call %ld fails with %d: %s", fail_at, fail_code,
                  dp_last_error());
    CHECK_NO_LEAKS(&counter);
}

/* With this code; the others hear of it, also where it is no failure of the job to this one. */
static void every_call_fails(int code)
{
    fail_code = code;
    shared = shared_memory(sizeof *shared);
    for (fail_at = 1; fail_at == 1 || shared->fired; fail_at += test_step())
        in_processes(2, a_call_fails);
    CHECK(fail_at > 100);
}

TEST_SLOW(every_call_of_one_process_fails, 120)
{
    every_call_fails(cudaErrorUnknown);
    every_call_fails(cudaErrorMemoryAllocation);
    every_call_fails(cudaErrorStreamCaptureInvalidated);
}

/* What is refused before anything has begun may be called again: when CUDA is asked whether the
   stream is captured. From then on it is the job's failure, also with a code that would not be: the
   other process is in it. */
static void a_call_of_a_collective_fails(meeting *m)
{
    dp_ctx *ctx = open_for(m, 20000);
    vectors v;
    vectors_make(ctx, &v, DP_F32, COUNT);
    CHECK_OK(dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM)); /* connections are made */
    CHECK_OK(dp_wait(ctx));
    wait_for_all(m);
    if (m->process == 1)
        sim_fail_at(fail_at, fail_code, false);
    dp_status status = dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM);
    if (m->process == 1)
        shared->fired = sim_fault_fired();
    sim_fail_at(0, 0, false);
    if (status != DP_OK && dp_status_class(status) != DP_CLASS_JOB) {
        shared->refused++;
        status = dp_all_reduce(ctx, v.parts, COUNT, DP_F32, DP_OP_SUM);
    }
    if (status == DP_OK)
        status = dp_wait(ctx);
    CHECK(status == DP_OK || dp_status_class(status) == DP_CLASS_JOB);
    CHECK(status != DP_ERR_TIMEOUT);
    dp_scope_end(v.scope);
    dp_close(ctx);
}

TEST_SLOW(every_call_of_a_collective_of_processes_fails, 60)
{
    static const int codes[] = {cudaErrorMemoryAllocation, cudaErrorStreamCaptureInvalidated};
    shared = shared_memory(sizeof *shared);
    for (int i = 0; i < 2; i++) {
        fail_code = codes[i];
        for (fail_at = 1; fail_at == 1 || shared->fired; fail_at++)
            in_processes(2, a_call_of_a_collective_fails);
        CHECK(fail_at > 5);
        CHECK_INT(shared->refused, i); /* only with the second code is that a refusal */
    }
}

/* What one process cannot have to join keeps all from opening, and all hear of it at once. */
static atomic_int *opened; /* how many have */
static sim_thing scarce;
static long scarce_at;

static void one_is_refused(meeting *m)
{
    test_allocator counter = {0};
    dp_ctx *ctx = NULL;
    bool here = m->process == 1;
    double start = now_ms();
    if (here)
        sim_refuse(scarce, scarce_at);
    dp_status status = try_open(m, (dp_config){.allocator = test_allocator_of(&counter)}, &ctx);
    if (status == DP_OK) {
        atomic_fetch_add(opened, 1);
        CHECK_OK(sum_of(ctx, COUNT));
        dp_close(ctx);
    } else {
        CHECK_STATUS(status, here ? DP_ERR_NO_MEMORY : DP_ERR_REMOTE);
        CHECK(now_ms() - start < SOON_MS * test_timeout_scale());
    }
    CHECK(!here || sim_refused() == (status != DP_OK));
    CHECK_NO_LEAKS(&counter);
}

/* Up to the first time that nothing is refused. */
static long refusals(sim_thing what)
{
    scarce = what;
    *opened = 0;
    for (scarce_at = 1; *opened == 0; scarce_at++)
        in_processes(2, one_is_refused);
    CHECK_INT(*opened, 2);
    return scarce_at - 2;
}

TEST_SLOW(refused_system_call_fails_in_all_processes, 60)
{
    opened = shared_memory(sizeof *opened);
    CHECK(refusals(SIM_MEMORY) > 10);
    CHECK_INT(refusals(SIM_THREADS), 2); /* each of two communicators has a keeper */
}

#elif defined(TEST_NCCL)
#include "grads.h"
#include "one_gpu.h"

static dp_ctx *open_for_an_end(meeting *m)
{
    return one_gpu_open(m, END_TIMEOUT_MS);
}

static void sums_on_one_gpu(meeting *m)
{
    const int64_t count = 300000;
    dp_ctx *ctx = one_gpu_open(m, END_TIMEOUT_MS);
    dp_tensor data;
    float got[3];
    if (ctx == NULL)
        return;
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &data));
    for (int i = 0; i < 3; i++) {
        const dp_part part = {data.data, data.data, NULL};
        CHECK_OK(dp_fill(ctx, &data, dp_float(m->process + 1 + i)));
        CHECK_OK(dp_all_reduce(ctx, &part, (size_t)count, DP_F32, DP_OP_SUM));
        CHECK_OK(dp_narrow(&data, 0, count - 3, 3, &data));
        CHECK_OK(dp_read(ctx, &data, got, sizeof got));
        CHECK_F64(got[2], 3 + 2 * i, 0);
        data.data = (char *)data.data - (count - 3) * (int64_t)sizeof(float);
        data.shape[0] = count;
    }
    CHECK_OK(dp_barrier(ctx));
    dp_close(ctx);
}

TEST_SLOW(two_processes_on_one_gpu, 120)
{
    on_one_gpu(2, sums_on_one_gpu);
}

/* Buckets of gradients are reduced while others are still to come. */
static void gradients_on_one_gpu(meeting *m)
{
    enum { UNITS = 8, EACH = 100003 };
    static grads g;
    static dp_range ranges[UNITS];
    dp_ctx *ctx = one_gpu_open(m, END_TIMEOUT_MS);
    if (ctx == NULL)
        return;
    grads_begin(&g, ctx, UNITS * EACH);
    for (uint32_t i = 0; i < UNITS; i++)
        ranges[i] = (dp_range){.unit = i, .first = i * (size_t)EACH, .count = EACH};
    grads_create(&g, (dp_reducer_config){.ranges = ranges,
                                         .range_count = UNITS,
                                         .buckets.bytes = 3 * EACH * sizeof(float),
                                         .reduction = DP_MEAN_RANKS});
    for (int pass = 1; pass <= 6; pass++) {
        grads_fill(&g, 0);
        grads_add(&g, (float)pass);
        CHECK_OK(dp_reducer_begin(g.reducer, NULL));
        for (uint32_t i = 0; i < UNITS; i++)
            report(&g, UNITS - 1 - i);
        CHECK_OK(dp_reducer_finish(g.reducer));
        check_all(&g, 2.0 * pass); /* of 1, 2, 3 times that */
    }
    CHECK(info_of(g.reducer).bucket_count > 2);
    grads_end(&g);
}

TEST_SLOW(gradients_of_processes_on_one_gpu, 120)
{
    on_one_gpu(3, gradients_on_one_gpu);
}

TEST_SLOW(ends_are_the_same_on_one_gpu, 240)
{
    on_one_gpu(2, sums_on_one_gpu);
    check_ends_over(open_for_an_end);
}
#endif
