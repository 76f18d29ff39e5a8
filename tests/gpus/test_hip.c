/* test_hip.c - what dp_hip.h has otherwise than dp_cuda.h, on the simulator; what both have is in
   the tests of dp_cuda.h, which are linked to either. */

#include "test.h"

#if defined(TEST_HIP)
#define DP_USE_RCCL
#include "dp_hip.h"
#include <hip/hip_runtime_api.h>
#include <stdio.h>
#include <string.h>
#include "sim/sim.h"

static char warned[1024], informed[2048];

static void listen(const dp_log_record *record, void *user)
{
    (void)user;
    if (record->level == DP_LOG_WARN)
        snprintf(warned, sizeof warned, "%s", record->text);
    else if (strlen(informed) + strlen(record->text) < sizeof informed)
        strcat(informed, record->text);
}

/* The table that serves where nobody wants a certain one; what is warned of is in `warned`. */
static const char *serves(void)
{
    static dp_info info;
    dp_ctx *ctx = NULL;
    warned[0] = informed[0] = '\0';
    CHECK_OK(dp_open(&(dp_config){.device_count = 1, .log = {listen, NULL, DP_LOG_INFO}}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    dp_close(ctx);
    return info.device_backend;
}

static dp_status open_gpus(int count, dp_ctx **out)
{
    static const dp_device_ops *backends[2];
    backends[0] = dp_hip();
    return dp_open(&(dp_config){.backends = backends, .device_count = count}, out);
}

/* ---- what there is --------------------------------------------------------------------------- */

TEST(names_are_its_own)
{
    CHECK_STR(dp_hip()->name, "hip");
    CHECK_STR(dp_hip_coll()->name, "hip");
    CHECK_STR(dp_rccl_coll()->name, "rccl");
    sim_set_device_count(1);
    CHECK_STR(serves(), "hip");
    CHECK_STR(warned, "");
    CHECK_INT(sim_loads(), 2);
    sim_check_leaks();
}

TEST(without_its_library_the_cpu_serves)
{
    sim_set_device_count(1);
    sim_lack("libamdhip64.so.6");
    CHECK_STR(serves(), "cpu");
    CHECK_SAYS(warned, "cpu is used, because there are no other devices (hip: libamdhip64.so.6 was "
                       "not found)");
    CHECK_INT(sim_loads(), 0);
}

TEST(the_compiler_may_be_in_the_same_library)
{
    sim_set_device_count(1);
    sim_lack("libhiprtc.so.6");
    CHECK_STR(serves(), "hip");
    CHECK_INT(sim_loads(), 1);
}

/* The name is that of the headers' version, where functions have several. */
TEST(libraries_that_are_too_old)
{
    static const char *const lacking[] = {"hipModuleLoadData", "hipGetDevicePropertiesR0600",
                                          "hiprtcGetCode"};
    sim_set_device_count(1);
    for (int i = 0; i < 3; i++) {
        sim_lack(lacking[i]);
        CHECK_STR(serves(), "cpu");
        CHECK_SAYS(i == 0 ? warned : informed, "hip: the libraries are older than HIP 5.2");
        CHECK_INT(sim_loads(), 0);
    }
    sim_lack("");
    CHECK_STR(serves(), "hip");
}

TEST(cpu_in_place_of_gpus_is_told)
{
    sim_set_device_count(0);
    CHECK_STR(serves(), "cpu");
    CHECK_SAYS(warned, "cpu is used, because there are no other devices (hip: ");
}

TEST(gpus_that_cannot_be_used)
{
    sim_set_device_count(1);
    sim_set_count_error(999);
    CHECK_STR(serves(), "cpu");
    CHECK_SAYS(warned,
               "hip: hipGetDeviceCount: a simulated error (999); the runtime is of HIP 6.3");
    sim_set_count_error(0);
    CHECK_STR(serves(), "hip");
    sim_check_leaks();
}

/* ---- what kernels are compiled for ----------------------------------------------------------- */

TEST(code_is_for_the_gpu_whatever_is_switched_on)
{
    static const char *const names[] = {"gfx90a:sramecc+:xnack-", "gfx90a:xnack+", "gfx90a"};
    dp_ctx *ctx = NULL;
    sim_set_device_count(1);
    for (int i = 0; i < 3; i++) {
        sim_set_hip_arch(names[i]);
        CHECK_OK(open_gpus(1, &ctx));
        dp_close(ctx);
        CHECK_STR(sim_compiled(), "sm_90a");
    }
    sim_check_leaks();
}

TEST(gpus_that_no_compiler_knows)
{
    static const char *const names[] = {"", "sm_90", "gfx", "gfx0", "gfx90q", "gfx90 "};
    dp_ctx *ctx = NULL;
    char sentence[64];
    sim_set_device_count(1);
    for (int i = 0; i < 6; i++) {
        sim_set_hip_arch(names[i]);
        snprintf(sentence, sizeof sentence, "hip 0: no compiler is known for '%s'", names[i]);
        CHECK_ERROR(open_gpus(1, &ctx), DP_ERR_UNSUPPORTED, sentence);
    }
    sim_check_leaks();
}

TEST(each_gpu_has_code_of_its_own)
{
    dp_ctx *ctx = NULL;
    sim_set_device_count(3);
    CHECK_OK(open_gpus(3, &ctx));
    CHECK_INT(sim_library_loads(), 3);
    dp_ctx *again = NULL;
    CHECK_OK(open_gpus(2, &again));
    CHECK_INT(sim_library_loads(), 3);
    dp_close(ctx);
    dp_close(again);
    sim_check_leaks();
}

/* The log has no 0 at its end. */
TEST(compiler_errors_are_quoted)
{
    dp_ctx *ctx = NULL;
    bool quoted = false;
    sim_set_device_count(1);
    for (long n = 1; n < 40 && !quoted; n++) {
        sim_fail_at(n, 999, false);
        if (open_gpus(1, &ctx) == DP_OK)
            dp_close(ctx);
        quoted = strstr(dp_last_error(), "it does not compile") != NULL;
    }
    sim_fail_at(0, 0, false);
    CHECK_SAYS(dp_last_error(), "hip: nvrtcCompileProgram: it does not compile simulated");
    CHECK(strchr(dp_last_error(), '!') == NULL);
}

/* ---- the thread, streams --------------------------------------------------------------------- */

TEST(a_thread_uses_the_device_that_it_used)
{
    dp_ctx *ctx = NULL;
    int device = -1;
    float numbers[4] = {1, 2, 3, 4};
    sim_set_device_count(3);
    CHECK_INT(hipGetDevice(&device), 0);
    CHECK_INT(hipSetDevice(2), 0);
    CHECK_OK(open_gpus(2, &ctx));
    CHECK_INT(hipGetDevice(&device), 0);
    CHECK_INT(device, 2);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor on_host = dp_wrap(numbers, DP_F32, DP_SHAPE(4)), there;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 1), DP_F32, DP_SHAPE(4), &there));
    CHECK_OK(dp_copy(ctx, &there, &on_host, NULL));
    CHECK_OK(dp_wait(ctx));
    CHECK_INT(hipGetDevice(&device), 0);
    CHECK_INT(device, 2);
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_INT(hipGetDevice(&device), 0);
    CHECK_INT(device, 2);
}

/* What two GPUs do together, and one with the host. */
static dp_status work(dp_ctx *ctx)
{
    float numbers[1000] = {7}, got[1000] = {0};
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor on_host = dp_wrap(numbers, DP_F32, DP_SHAPE(1000)), x[2];
    dp_part parts[2];
    dp_status status = DP_OK;
    for (int r = 0; r < 2 && status == DP_OK; r++) {
        status = dp_tensor_new(scope, dp_local_device(ctx, r), DP_F32, DP_SHAPE(1000), &x[r]);
        if (status == DP_OK)
            status = dp_copy(ctx, &x[r], &on_host, NULL);
        parts[r] = (dp_part){x[r].data, x[r].data, NULL};
    }
    if (status == DP_OK)
        status = dp_all_reduce(ctx, parts, 1000, DP_F32, DP_OP_SUM);
    if (status == DP_OK)
        status = dp_copy(ctx, &x[1], &x[0], NULL);
    if (status == DP_OK)
        status = dp_read(ctx, &x[1], got, sizeof got);
    if (status == DP_OK)
        CHECK_F64(got[0], 14, 0);
    dp_scope_end(scope);
    return status;
}

/* An error, of that call: the thread gets back its device, and nothing is done on another one. */
TEST_SLOW(each_time_a_device_cannot_be_set, 30)
{
    bool fired = true;
    int device = -1;
    long count = 0;
    sim_set_device_count(3);
    CHECK_INT(hipGetDevice(&device), 0);
    CHECK_INT(hipSetDevice(2), 0);
    for (long n = 1; fired; n++) {
        dp_ctx *ctx = NULL;
        sim_fail_set_device(n, 999);
        dp_status status = open_gpus(2, &ctx), worked = status == DP_OK ? work(ctx) : status;
        fired = sim_set_device_failed();
        sim_fail_set_device(0, 0);
        if (worked != DP_OK) {
            CHECK_ERROR(worked, DP_ERR_DEVICE, "hipSetDevice: a simulated error (999)");
            count++;
        }
        CHECK_INT(hipGetDevice(&device), 0);
        CHECK_INT(device, 2);
        CHECK_INT(hipSetDevice(2), 0);
        if (status == DP_OK)
            dp_close(ctx);
        CHECK_INT(hipSetDevice(2), 0);
    }
    CHECK(count > 20);
    CHECK_INT(sim_finding_count(NULL), 0);
}

TEST(a_stream_of_the_users)
{
    dp_ctx *ctx = NULL;
    dp_stream *own = NULL;
    sim_set_device_count(2);
    CHECK_OK(open_gpus(2, &ctx));
    struct ihipStream_t *native = dp_hip_stream(dp_local_stream(ctx, 1));
    CHECK(native != NULL && dp_hip_stream(NULL) == NULL);
    CHECK_INT(dp_hip_ordinal(dp_local_stream(ctx, 1)), 1);
    CHECK_INT(dp_hip_ordinal(NULL), -1);
    CHECK_ERROR(dp_hip_adopt(ctx, 0, native, &own), DP_ERR_INVALID,
                "dp_hip_adopt: the stream is of GPU 1, local rank 0 is GPU 0");
    CHECK_ERROR(dp_hip_adopt(ctx, 2, native, &own), DP_ERR_INVALID,
                "local rank 2 is not a device of hip");
    sim_fail_at(1, 400, false);
    CHECK_ERROR(dp_hip_adopt(ctx, 1, native, &own), DP_ERR_DEVICE, "hipStreamGetDevice");
    CHECK_OK(dp_hip_adopt(ctx, 1, native, &own));
    dp_hip_release(own);
    CHECK_OK(dp_hip_adopt(ctx, 0, dp_hip_stream(dp_local_stream(ctx, 0)), &own));
    dp_hip_release(own);
    dp_close(ctx);
    sim_check_leaks();
}

TEST(memory_of_the_users)
{
    dp_ctx *ctx = NULL;
    void *data = NULL, *pinned = NULL;
    int before = -1;
    sim_set_device_count(2);
    CHECK_OK(open_gpus(2, &ctx));
    dp_dev *devs[] = {dp_local_stream(ctx, 0)->dev, dp_local_stream(ctx, 1)->dev};
    CHECK_INT(hipGetDevice(&before), 0);
    CHECK_INT(hipSetDevice(1), 0);
    CHECK_INT(hipMalloc(&data, 64), 0);
    CHECK_INT(hipHostMalloc(&pinned, 64, 0), 0);
    CHECK(dp_hip()->owns(devs[1], data) && !dp_hip()->owns(devs[0], data));
    CHECK(!dp_hip()->owns(devs[1], pinned) && !dp_hip()->owns(devs[1], &before));
    CHECK_INT(hipFree(data), 0);
    CHECK_INT(hipHostFree(pinned), 0);
    CHECK_INT(hipSetDevice(before), 0);
    dp_close(ctx);
    sim_check_leaks();
}

TEST(rccl_is_found_by_its_own_name)
{
    sim_nccl_file files[] = {{.path = "libnccl.so.2"}};
    char text[64];
    sim_set_nccl_files(files, 1);
    CHECK_INT(dp_rccl_version(text, sizeof text), 22809);
    CHECK_STR(text, "librccl.so.1");
    sim_lack("librccl.so.1");
    CHECK_INT(dp_rccl_version(text, sizeof text), 22809);
}

#endif /* TEST_HIP */
