/* test_cuda_host.c - the host's side of dp_cuda.h: copies that share the ring, streams that are
   asked for from anywhere, channels; on the simulator also GPUs that cannot be used, architectures
   that the compiler does not know, kernels kept on disk, memory that is pinned in part. */

#define _GNU_SOURCE
#include "test.h"

#if defined(TEST_CUDA)
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#include "cuda_device.h"

static dp_ctx *open_with(int gpus)
{
    dp_ctx *ctx = NULL;
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    cuda_gpus(gpus);
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = gpus}, &ctx));
    return ctx;
}

static dp_tensor host_view(float *data, int64_t count)
{
    return dp_wrap(data, DP_F32, 1, &count);
}

#if defined(TEST_SIM)
/* ---- what a context says when it opens ------------------------------------------------------- */

static char warned[2048], informed[8192];

static void listen(const dp_log_record *record, void *user)
{
    char *to = record->level == DP_LOG_WARN ? warned : informed;
    size_t room = record->level == DP_LOG_WARN ? sizeof warned : sizeof informed;
    (void)user;
    snprintf(to + strlen(to), room - strlen(to), "%s\n", record->text);
}

/* With GPUs before the CPU, as where no table is named. */
static const char *backend_of(dp_log log)
{
    dp_ctx *ctx = NULL;
    dp_info info;
    warned[0] = informed[0] = '\0';
    CHECK_OK(dp_open(&(dp_config){.log = log, .device_count = 1}, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    dp_close(ctx);
    return info.device_backend;
}

static dp_status open_gpu(dp_ctx **out)
{
    static const dp_device_ops *backends[2];
    backends[0] = dp_cuda();
    return dp_open(
        &(dp_config){.backends = backends, .device_count = 1, .log = {listen, NULL, DP_LOG_INFO}},
        out);
}

static void open_and_close(void)
{
    dp_ctx *ctx = NULL;
    CHECK_OK(open_gpu(&ctx));
    dp_close(ctx);
}

/* ---- GPUs that cannot be used ---------------------------------------------------------------- */

static void warns_once(const char *sentence)
{
    CHECK_STR(backend_of((dp_log){listen, NULL, 0}), "cpu");
    CHECK_SAYS(warned, "cpu is used, because there are devices that cannot be used: cuda: ");
    CHECK_SAYS(warned, sentence);
    CHECK_SAYS(informed, sentence);
    CHECK_STR(backend_of((dp_log){listen, NULL, 0}), "cpu");
    CHECK_STR(warned, "");
    CHECK_SAYS(informed, sentence);
    sim_check_leaks();
}

#define TEST_WARNS(name, sentence, ...)                                                            \
    TEST(name)                                                                                     \
    {                                                                                              \
        cuda_alone();                                                                              \
        sim_set_device_count(2);                                                                   \
        __VA_ARGS__;                                                                               \
        warns_once(sentence);                                                                      \
    }

TEST_WARNS(the_fabric_manager_is_not_running,
           "(802): the fabric manager may not be running; the driver is for CUDA 13.0",
           sim_set_count_error(cudaErrorSystemNotReady))
TEST_WARNS(a_driver_of_two_versions, "(803): the driver's library and its module in the kernel",
           sim_set_count_error(cudaErrorSystemDriverMismatch))
TEST_WARNS(a_compatibility_package_of_others, "(804): the driver's compatibility package",
           sim_set_count_error(cudaErrorCompatNotSupportedOnDevice))
TEST_WARNS(cuda_before_a_fork, "(3): CUDA may have been used before a fork",
           sim_set_count_error(cudaErrorInitializationError))
TEST_WARNS(a_driver_that_its_runtime_refuses, "(35): the driver is older than the libraries",
           sim_set_count_error(cudaErrorInsufficientDriver))
TEST_WARNS(a_driver_that_fails, "cudaGetDeviceCount: a simulated error (999);",
           sim_set_count_error(999))
TEST_WARNS(a_driver_of_an_older_major_version,
           "the driver is for CUDA 12.9, libcudart is of CUDA 13.0", sim_set_driver(12090))
TEST_WARNS(a_driver_that_is_too_old, "the driver is for CUDA 12.4, 12.8 is needed",
           sim_set_driver(12040), sim_set_versions(12080, 12080))
TEST_WARNS(libraries_of_two_major_versions, "libcudart is of CUDA 13.0 and libnvrtc of CUDA 12.9",
           sim_set_versions(13000, 12090))
TEST_WARNS(libraries_of_two_major_versions_the_other_way,
           "libcudart is of CUDA 12.8 and libnvrtc of CUDA 13.0", sim_set_versions(12080, 13000))
TEST_WARNS(a_runtime_that_is_too_old, "libcudart is of CUDA 12.6, 12.8 is needed",
           sim_set_versions(12060, 12060))
TEST_WARNS(a_compiler_that_is_too_old, "libnvrtc is of CUDA 12.6, 12.8 is needed",
           sim_set_versions(12080, 12060))

TEST(versions_that_work_together)
{
    static const int good[][3] = {
        {13000, 13000, 13000}, {13010, 13000, 13000}, {13000, 13010, 13000}, {14000, 13000, 13010},
        {13000, 12080, 12090}, {12080, 12090, 12080}, {12090, 12080, 12080},
    };
    cuda_alone();
    sim_set_device_count(1);
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        sim_set_driver(good[i][0]);
        sim_set_versions(good[i][1], good[i][2]);
        CHECK_STR(backend_of((dp_log){listen, NULL, 0}), "cuda");
        CHECK_STR(warned, "");
    }
    sim_check_leaks();
}

TEST(cpu_in_place_of_gpus_is_told_without_a_gpu)
{
    sim_set_device_count(0);
    CHECK_STR(backend_of((dp_log){listen, NULL, 0}), "cpu");
    CHECK_SAYS(warned, "cpu is used, because there are no other devices (");
    CHECK_SAYS(warned, dp_cuda()->name);
    CHECK_SAYS(warned, "GetDeviceCount: a simulated error (100)");
}

TEST(cpu_in_place_of_gpus_is_told_without_a_driver)
{
    cuda_alone();
    sim_set_device_count(2);
    sim_set_driver(0);
    CHECK_STR(backend_of((dp_log){listen, NULL, 0}), "cpu");
    CHECK_SAYS(warned, "cpu is used, because there are no other devices (cuda: ");
    CHECK_SAYS(informed, "there is no driver for NVIDIA GPUs");
}

TEST(cpu_in_place_of_gpus_is_told_for_a_stub)
{
    cuda_alone();
    sim_set_device_count(2);
    sim_set_count_error(cudaErrorStubLibrary);
    CHECK_STR(backend_of((dp_log){listen, NULL, 0}), "cpu");
    CHECK_SAYS(warned, "cpu is used, because there are no other devices (cuda: ");
}

TEST(where_only_gpus_will_do_it_is_an_error)
{
    dp_ctx *ctx = NULL;
    warned[0] = '\0';
    sim_set_device_count(2);
    sim_set_count_error(cudaErrorSystemNotReady);
    CHECK_ERROR(open_gpu(&ctx), DP_ERR_NO_DEVICE, "GetDeviceCount");
    CHECK_STR(warned, "");
    sim_set_count_error(cudaSuccess); /* it is running now */
    CHECK_OK(open_gpu(&ctx));
    dp_close(ctx);
    sim_check_leaks();
}

/* What goes to stderr while a context opens twice. */
static void check_stderr(const char *debug, dp_log log, int lines)
{
    char text[2048] = "";
    FILE *file = tmpfile();
    int kept = dup(2), found = 0;
    CHECK(file != NULL && kept >= 0);
    if (debug != NULL)
        setenv("DP_DEBUG", debug, 1);
    dup2(fileno(file), 2);
    (void)backend_of(log);
    (void)backend_of(log);
    dup2(kept, 2);
    close(kept);
    rewind(file);
    while (fgets(text, sizeof text, file) != NULL)
        found += strstr(text, " warn] cpu is used, because") != NULL;
    CHECK_INT(found, lines);
    CHECK(debug != NULL || lines == 0 || ftell(file) == (long)strlen(text));
    fclose(file);
}

static void break_gpus(void)
{
    unsetenv("DP_DEBUG");
    sim_set_device_count(2);
    sim_set_count_error(cudaErrorSystemNotReady);
}

TEST(without_a_log_stderr_gets_the_warning)
{
    break_gpus();
    check_stderr(NULL, (dp_log){NULL, NULL, 0}, 1);
}

TEST(the_log_on_stderr_gets_the_warning_once)
{
    break_gpus();
    check_stderr("info", (dp_log){NULL, NULL, 0}, 1);
}

TEST(error_level_hides_warnings)
{
    break_gpus();
    check_stderr("error", (dp_log){NULL, NULL, 0}, 0);
    check_stderr(NULL, (dp_log){listen, NULL, DP_LOG_ERROR}, 0);
    CHECK_STR(warned, "");
}

/* ---- architectures --------------------------------------------------------------------------- */

TEST(each_architecture_gets_what_the_compiler_can_do)
{
    static const int archs[] = {120, 75, 100, 90};
    static const struct {
        int arch;
        const char *compiled;
    } cases[] = {{75, "sm_75"},        {80, "compute_75"},   {90, "sm_90"},   {100, "sm_100"},
                 {101, "compute_100"}, {103, "compute_100"}, {120, "sm_120"}, {121, "compute_120"},
                 {130, "compute_120"}, {89, "compute_75"}};
    cuda_alone();
    sim_set_device_count(1);
    sim_set_archs(archs, 4);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        sim_set_arch(cases[i].arch);
        open_and_close();
        CHECK_STR(sim_compiled(), cases[i].compiled);
    }
    sim_check_leaks();
}

/* What the `index`th GPU is filled with arrives. */
static void use_gpu(dp_ctx *ctx, int index)
{
    float got[3];
    dp_tensor x;
    dp_scope *scope = dp_scope_begin(ctx);
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, index), DP_F32, DP_SHAPE(3), &x));
    CHECK_OK(dp_fill(ctx, &x, dp_float(index + 2)));
    CHECK_OK(dp_read(ctx, &x, got, sizeof got));
    CHECK_F64(got[0] + got[1] + got[2], 3 * (index + 2), 0);
    dp_scope_end(scope);
}

static void use_gpus_of(int first, int second, int third, const char *last, int compiles)
{
    const int archs[] = {first, second, third};
    int before = sim_compile_count();
    for (int i = 0; i < 3; i++)
        sim_set_arch_of(i, archs[i]);
    dp_ctx *ctx = open_with(3);
    CHECK_STR(sim_compiled(), last);
    CHECK_INT(sim_compile_count() - before, compiles);
    for (int i = 0; i < 3; i++)
        use_gpu(ctx, i);
    dp_close(ctx);
}

TEST(gpus_of_several_architectures)
{
    cuda_alone(); /* HIP has code on each GPU, in any case */
    static const int archs[] = {75, 80, 90};
    sim_set_archs(archs, 3);
    use_gpus_of(90, 80, 90, "sm_80", 2);
    use_gpus_of(90, 80, 86, "compute_80", 3);
    setenv("CUDA_MODULE_LOADING", "LAZY", 1);
    use_gpus_of(80, 75, 90, "sm_90", 3);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1); /* all have the same */
    use_gpus_of(90, 80, 90, "compute_80", 1);
    use_gpus_of(80, 90, 75, "compute_75", 1);
    use_gpus_of(75, 86, 80, "compute_75", 1);
    use_gpus_of(86, 90, 86, "compute_80", 1);
    use_gpus_of(90, 90, 90, "sm_90", 1);
    use_gpus_of(100, 100, 100, "compute_90", 1);
    sim_check_leaks();
}

/* A GPU that nobody has opened yet counts, and one that is too old does not. */
TEST(a_gpu_that_is_loaded_eagerly_may_be_opened_later)
{
    dp_ctx *first = NULL, *later = NULL;
    static const int archs[] = {75, 80, 90};
    const dp_device_ops *const backends[] = {dp_cuda(), NULL};
    cuda_alone();
    sim_set_archs(archs, 3);
    sim_set_device_count(3);
    sim_set_arch_of(1, 80);
    sim_set_arch_of(2, 70);
    setenv("CUDA_MODULE_LOADING", "EAGER", 1);
    long loads = sim_library_loads();
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 1}, &first));
    CHECK_STR(sim_compiled(), "compute_80");
    CHECK_OK(dp_open(&(dp_config){.backends = backends, .device_count = 1, .devices = (int[]){1}},
                     &later));
    CHECK_INT(sim_library_loads(), loads + 1);
    use_gpu(first, 0);
    use_gpu(later, 0);
    CHECK_ERROR(
        dp_open(&(dp_config){.backends = backends, .devices = (int[]){2}, .device_count = 1},
                &(dp_ctx *){NULL}),
        DP_ERR_UNSUPPORTED, "cuda 2: architecture 7.0, 7.5 is needed");
    dp_close(first);
    dp_close(later);
    sim_check_leaks();
}

TEST(no_architecture_that_would_do)
{
    dp_ctx *ctx = NULL;
    cuda_alone();
    sim_set_device_count(1);
    sim_set_arch(80);
    sim_set_archs((const int[]){90, 100}, 2);
    CHECK_ERROR(open_gpu(&ctx), DP_ERR_UNSUPPORTED,
                "NVRTC compiles for none of the architectures up to 8.0");
    sim_set_archs(NULL, 0);
    CHECK_ERROR(open_gpu(&ctx), DP_ERR_UNSUPPORTED, "none of the architectures up to 8.0");
    sim_check_leaks();
}

/* ---- kernels on disk ------------------------------------------------------------------------- */

static char cache[256]; /* the folder of this test */

static void make_cache(void)
{
    const char *top = getenv("TMPDIR");
    snprintf(cache, sizeof cache, "%s/dp-cache-XXXXXX", top != NULL ? top : P_tmpdir);
    CHECK(mkdtemp(cache) != NULL);
    CHECK_INT(setenv("XDG_CACHE_HOME", cache, 1), 0);
    CHECK_INT(unsetenv("DP_CACHE"), 0);
    sim_set_device_count(1);
    informed[0] = warned[0] = '\0';
}

static void remove_all(const char *path)
{
    char inner[512];
    const struct dirent *entry;
    DIR *folder = opendir(path);
    while (folder != NULL && (entry = readdir(folder)) != NULL) {
        snprintf(inner, sizeof inner, "%.240s/%.240s", path, entry->d_name);
        if (strcmp(entry->d_name, ".") != 0 && strcmp(entry->d_name, "..") != 0)
            remove_all(inner);
    }
    if (folder != NULL)
        closedir(folder);
    remove(path);
}

/* How many files are kept, and the name of one. */
static int kept_files(const char *folder, char *out_path)
{
    int count = 0;
    const struct dirent *entry;
    DIR *at = opendir(folder);
    while (at != NULL && (entry = readdir(at)) != NULL)
        if (entry->d_name[0] != '.') {
            snprintf(out_path, 512, "%.240s/%.240s", folder, entry->d_name);
            count++;
        }
    if (at != NULL)
        closedir(at);
    return count;
}

static int own_files(char *out_path)
{
    char folder[300];
    snprintf(folder, sizeof folder, "%s/dp.h", cache);
    return kept_files(folder, out_path);
}

static int compiles(void)
{
    int before = sim_compile_count();
    open_and_close();
    return sim_compile_count() - before;
}

TEST(kernels_are_compiled_once)
{
    char path[512], folder[300];
    struct stat at;
    make_cache();
    CHECK_INT(compiles(), 1);
    CHECK_INT(compiles(), 0);
    CHECK_INT(own_files(path), 1);
    CHECK_SAYS(path, dp_cuda()->name[0] == 'c' ? "sm_90-cuda13.0-" : "gfx90-hip603.4711-");
    CHECK_INT(stat(path, &at), 0);
    CHECK_INT(at.st_mode & 0777, 0600);
    snprintf(folder, sizeof folder, "%s/dp.h", cache);
    CHECK_INT(stat(folder, &at), 0);
    CHECK_INT(at.st_mode & 0777, 0700);
    CHECK(strstr(informed, "kernels") == NULL);
    remove_all(cache);
    sim_check_leaks();
}

TEST(each_target_and_compiler_has_its_file)
{
    char path[512];
    cuda_alone();
    make_cache();
    CHECK_INT(compiles(), 1);
    sim_set_arch(100); /* text for compute_90 */
    CHECK_INT(compiles(), 1);
    CHECK_INT(compiles(), 0);
    sim_set_versions(13000, 13010);
    CHECK_INT(compiles(), 1);
    sim_set_versions(13000, 13000);
    CHECK_INT(compiles(), 0);
    sim_set_arch(90);
    CHECK_INT(compiles(), 0);
    CHECK_INT(own_files(path), 3);
    remove_all(cache);
}

TEST(kernels_are_not_kept_if_told_so)
{
    char path[512];
    make_cache();
    setenv("DP_CACHE", "off", 1);
    CHECK_INT(compiles(), 1);
    CHECK_INT(compiles(), 1);
    CHECK_INT(own_files(path), 0);
    CHECK_STR(warned, "");
    setenv("DP_CACHE", "no", 1);
    CHECK_INT(compiles(), 1);
    CHECK_SAYS(warned, "DP_CACHE is 'no', not off");
    CHECK_INT(own_files(path), 1);
    remove_all(cache);
}

TEST(without_xdg_they_are_in_the_home)
{
    char path[512], folder[300];
    make_cache();
    setenv("HOME", cache, 1);
    setenv("XDG_CACHE_HOME", "relative/paths/do/not/count", 1);
    CHECK_INT(compiles(), 1);
    unsetenv("XDG_CACHE_HOME");
    CHECK_INT(compiles(), 0);
    snprintf(folder, sizeof folder, "%s/.cache/dp.h", cache);
    CHECK_INT(kept_files(folder, path), 1);
    remove_all(cache);
}

static void is_not_kept(const char *home)
{
    setenv("XDG_CACHE_HOME", home, 1);
    informed[0] = '\0';
    CHECK_INT(compiles(), 1);
    CHECK_INT(compiles(), 1);
    CHECK_SAYS(informed, ": compiled kernels are not kept: ");
    CHECK_STR(warned, "");
}

TEST(folders_that_do_not_serve)
{
    char path[512];
    static char deep[5000];
    make_cache();
    snprintf(path, sizeof path, "%s/one/two", cache); /* only the last one is made */
    is_not_kept(path);
    is_not_kept("/proc");
    is_not_kept("/dev/null");
    snprintf(path, sizeof path, "%s/dp.h", cache);
    FILE *file = fopen(path, "w"); /* in its place */
    CHECK(file != NULL && fclose(file) == 0);
    is_not_kept(cache);
    memset(deep, 'd', sizeof deep - 1);
    deep[0] = '/';
    is_not_kept(deep);
    unsetenv("HOME");
    is_not_kept("relative");
    is_not_kept("");
    remove_all(cache);
    sim_check_leaks();
}

TEST(a_folder_that_is_read_only)
{
    char folder[300];
    if (geteuid() == 0)
        SKIP("root may write everywhere");
    make_cache();
    snprintf(folder, sizeof folder, "%s/dp.h", cache);
    CHECK_INT(mkdir(folder, 0500), 0);
    is_not_kept(cache);
    remove_all(cache);
}

static size_t size_of(const char *path)
{
    struct stat at;
    CHECK_INT(stat(path, &at), 0);
    return (size_t)at.st_size;
}

/* It was spoilt: it is noticed, said, and made anew. */
static void is_made_anew(void)
{
    informed[0] = '\0';
    CHECK_INT(compiles(), 1);
    CHECK_SAYS(informed, "a damaged file of compiled kernels is made anew");
    informed[0] = '\0';
    CHECK_INT(compiles(), 0);
    CHECK(strstr(informed, "kernels") == NULL);
}

TEST(damaged_files_are_made_anew)
{
    char path[512];
    make_cache();
    CHECK_INT(compiles(), 1);
    CHECK_INT(own_files(path), 1);
    size_t bytes = size_of(path);
    for (size_t i = 0; i < bytes; i++) { /* one bit */
        FILE *file = fopen(path, "r+");
        CHECK(file != NULL && fseek(file, (long)i, SEEK_SET) == 0);
        int c = fgetc(file);
        CHECK(fseek(file, (long)i, SEEK_SET) == 0 && fputc(c ^ 1 << i % 8, file) != EOF);
        CHECK_INT(fclose(file), 0);
        is_made_anew();
    }
    for (size_t i = 0; i < bytes; i++) {
        CHECK_INT(truncate(path, (off_t)i), 0);
        is_made_anew();
    }
    CHECK_INT(truncate(path, (off_t)bytes + 1), 0);
    is_made_anew();
    CHECK_INT(size_of(path), bytes);
    remove_all(cache);
    sim_check_leaks();
}

/* What has come from elsewhere, even if it is whole. */
TEST(files_of_others_are_made_anew)
{
    char path[512], other[512], aside[300];
    make_cache();
    CHECK_INT(compiles(), 1);
    CHECK_INT(own_files(path), 1);
    CHECK_INT(chmod(path, 0620), 0); /* somebody may have written to it */
    is_made_anew();
    snprintf(aside, sizeof aside, "%s/aside", cache);
    CHECK_INT(rename(path, aside), 0);
    CHECK_INT(symlink(aside, path), 0);
    CHECK_INT(compiles(), 1); /* as if it were not there */
    CHECK_INT(compiles(), 0);
    CHECK_INT(unlink(path), 0);
    CHECK_INT(mkfifo(path, 0600), 0);
    is_made_anew();
    CHECK_INT(rename(path, aside), 0);
    sim_set_archs((const int[]){75, 90, 100}, 3);
    sim_set_arch(100);
    CHECK_INT(compiles(), 1);
    CHECK_INT(own_files(other), 1);
    CHECK_INT(rename(other, path), 0); /* that of another target */
    sim_set_arch(90);
    is_made_anew();
    if (geteuid() == 0) {
        CHECK_INT(chown(path, 12345, 12345), 0);
        is_made_anew();
    }
    remove_all(cache);
}

TEST(a_folder_in_the_place_of_the_file)
{
    char path[512];
    make_cache();
    CHECK_INT(compiles(), 1);
    CHECK_INT(own_files(path), 1);
    CHECK_INT(unlink(path), 0);
    CHECK_INT(mkdir(path, 0700), 0);
    is_not_kept(cache);
    CHECK_INT(own_files(path), 1); /* and nothing else is left there */
    remove_all(cache);
}

/* `count` processes open a context at the same time; how often they compile in all. */
static int compiles_of(int count)
{
    int sum = 0, status = 0;
    pid_t pids[16];
    for (int i = 0; i < count; i++) {
        pids[i] = fork();
        if (pids[i] == 0)
            _exit(compiles());
    }
    for (int i = 0; i < count; i++) {
        CHECK(pids[i] > 0 && waitpid(pids[i], &status, 0) == pids[i]);
        CHECK(WIFEXITED(status));
        sum += WEXITSTATUS(status);
    }
    return sum;
}

TEST_SLOW(eight_processes_compile_once, 30)
{
    char path[512];
    make_cache();
    sim_set_compile_ms(300);
    CHECK_INT(compiles_of(8), 1);
    CHECK_INT(compiles_of(8), 0);
    CHECK_INT(own_files(path), 1);
    remove_all(cache);
}

/* Without a folder to lock each compiles for itself. */
TEST_SLOW(processes_without_a_folder, 30)
{
    make_cache();
    setenv("XDG_CACHE_HOME", "/proc", 1);
    CHECK_INT(compiles_of(3), 3);
    remove_all(cache);
}

/* One that compiles dies: its lock goes with it. */
TEST(a_lock_goes_with_its_process)
{
    char folder[300];
    int ready[2];
    make_cache();
    snprintf(folder, sizeof folder, "%s/dp.h", cache);
    CHECK_INT(mkdir(folder, 0700), 0);
    CHECK_INT(pipe(ready), 0);
    pid_t pid = fork();
    if (pid == 0) {
        int lock = open(folder, O_RDONLY | O_DIRECTORY);
        _exit(flock(lock, LOCK_EX) == 0 && write(ready[1], "", 1) == 1 && usleep(300000) == 0);
    }
    char c;
    CHECK_INT(read(ready[0], &c, 1), 1);
    CHECK_INT(compiles(), 1);
    CHECK_INT(waitpid(pid, NULL, WNOHANG), pid); /* it was waited for */
    CHECK_INT(compiles(), 0);
    remove_all(cache);
}

/* While this process may write a part of the file only. */
static void compile_within_limits(void)
{
    struct rlimit usual, small;
    dp_ctx *ctx = NULL;
    CHECK_INT(getrlimit(RLIMIT_FSIZE, &usual), 0);
    small = (struct rlimit){50, usual.rlim_max};
    (void)signal(SIGXFSZ, SIG_IGN); /* which the simulator's pinned memory raises, as a file */
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &small), 0);
    (void)open_gpu(&ctx);
    dp_close(ctx);
    CHECK_INT(setrlimit(RLIMIT_FSIZE, &usual), 0);
}

/* A process is killed while it writes: what it leaves does not add up, and goes in the end. */
TEST(the_next_who_writes_tidies_up)
{
    char path[512], part[520];
    make_cache();
    for (int i = 0; i < 3; i++) {
        CHECK_INT(compiles(), 1);
        CHECK_INT(own_files(path), 1);
        snprintf(part, sizeof part, "%s.new", path);
        CHECK_INT(rename(path, part), 0);
        CHECK_INT(truncate(part, 50), 0);
    }
    compile_within_limits(); /* the limit is an error */
    CHECK_INT(own_files(path), 0);
    CHECK_INT(compiles(), 1);
    CHECK_INT(own_files(path), 1);
    CHECK_INT(compiles(), 0);
    remove_all(cache);
}

/* What fails inside CUDA leaves no file that would be taken for good. */
TEST_SLOW(nothing_bad_is_kept, 60)
{
    char path[512];
    bool fired = true;
    make_cache();
    for (long n = 1; fired && n < 200; n++) {
        dp_ctx *ctx = NULL;
        if (own_files(path) == 1)
            CHECK_INT(unlink(path), 0);
        sim_fail_at(n, cudaErrorMemoryAllocation, false);
        if (open_gpu(&ctx) == DP_OK)
            dp_close(ctx);
        fired = sim_fault_fired();
        sim_fail_at(0, 0, false);
        int kept = own_files(path);
        CHECK(kept <= 1);
        CHECK_INT(compiles(), 1 - kept);
    }
    CHECK(!fired);
    remove_all(cache);
}

/* ---- pinned memory --------------------------------------------------------------------------- */

enum { FLOATS = 30000 };

/* In from `from`, out to `to`; how often the host waited for a piece of the ring. */
static long forth_and_back(dp_ctx *ctx, float *from, float *to, int64_t count)
{
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor device, in = host_view(from, count), out = host_view(to, count);
    for (int64_t i = 0; i < count; i++) {
        from[i] = (float)(i * 7 % 1000);
        to[i] = -1;
    }
    long waits = sim_wait_count();
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &count, &device));
    CHECK_OK(dp_copy(ctx, &device, &in, NULL));
    CHECK_OK(dp_copy(ctx, &out, &device, NULL));
    CHECK_OK(dp_wait(ctx));
    waits = sim_wait_count() - waits;
    for (int64_t i = 0; i < count; i++)
        CHECK_F64(to[i], i * 7 % 1000, 0);
    dp_scope_end(scope);
    return waits;
}

TEST(a_buffer_is_pinned_if_all_of_it_is)
{
    static const struct {
        size_t first[3], count[3]; /* what is pinned */
        bool whole;
    } cases[] = {
        {{0}, {0}, false},
        {{0}, {FLOATS}, true},
        {{0}, {FLOATS / 2}, false},
        {{FLOATS / 2}, {FLOATS / 2}, false},
        {{0}, {FLOATS - 1}, false},
        {{1}, {FLOATS - 1}, false},
        {{0, FLOATS / 2}, {FLOATS / 2, FLOATS / 2}, false}, /* in two pieces */
        {{0, FLOATS - 1}, {1, 1}, false},                   /* both ends */
        {{0, 100, FLOATS - 50}, {100, FLOATS - 200, 50}, false},
        {{0, 100, FLOATS - 100}, {100, FLOATS - 200, 100}, false},
    };
    dp_ctx *ctx = open_with(1);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        float *from = malloc(FLOATS * sizeof *from), *to = malloc(FLOATS * sizeof *to);
        CHECK(from != NULL && to != NULL);
        for (int k = 0; k < 3; k++)
            if (cases[i].count[k] > 0) {
                sim_pin(from + cases[i].first[k], cases[i].count[k] * sizeof *from);
                sim_pin(to + cases[i].first[k], cases[i].count[k] * sizeof *to);
            }
        CHECK_INT(forth_and_back(ctx, from, to, FLOATS), !cases[i].whole);
        for (int k = 0; k < 3; k++) {
            sim_unpin(from + cases[i].first[k]);
            sim_unpin(to + cases[i].first[k]);
        }
        free(from);
        free(to);
    }
    dp_close(ctx);
    sim_check_leaks();
}

/* Copies begin and end somewhere in it; managed memory is as good as pinned. */
TEST(a_part_of_a_pinned_buffer)
{
    float *from = malloc(3 * FLOATS * sizeof *from), *to = malloc(3 * FLOATS * sizeof *to);
    CHECK(from != NULL && to != NULL);
    dp_ctx *ctx = open_with(1);
    for (int managed = 0; managed < 2; managed++) {
        sim_manage(managed);
        sim_pin(from, 2 * FLOATS * sizeof *from);
        sim_pin(to, 2 * FLOATS * sizeof *to);
        CHECK_INT(forth_and_back(ctx, from + 1, to + 1, FLOATS), 0);
        CHECK_INT(forth_and_back(ctx, from + FLOATS, to + FLOATS, FLOATS), 0);
        CHECK_INT(forth_and_back(ctx, from + FLOATS + 1, to + FLOATS + 1, FLOATS), 1);
        sim_unpin(from);
        sim_unpin(to);
    }
    free(from);
    free(to);
    dp_close(ctx);
    sim_check_leaks();
}
#endif /* TEST_SIM */

/* ---- the ring -------------------------------------------------------------------------------- */

enum { ORDERS = CUDA_ORDERS < 3 ? CUDA_ORDERS : 3 };

/* `count` copies of `each` floats from pageable memory, the i-th of which begins with i. Streams
   know nothing of each other; the first one has every `rarely`-th copy, the others the rest. */
static void copy_small(dp_ctx *ctx, int count, int64_t each, int stream_count, int rarely)
{
    enum { STREAMS = 7 };
    dp_scope *scope = dp_scope_begin(ctx);
    dp_dev *dev = dp_local_stream(ctx, 0)->dev;
    dp_stream *streams[STREAMS];
    dp_tensor *tensors = malloc((size_t)count * sizeof *tensors);
    size_t bytes = (size_t)each * sizeof(float);
    float *numbers = malloc(bytes), *got = malloc(bytes);
    CHECK(tensors != NULL && numbers != NULL && got != NULL);
    for (int i = 0; i < count; i++)
        CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, 1, &each, &tensors[i]));
    CHECK_OK(dp_wait(ctx));
    for (int i = 0; i < stream_count; i++)
        CHECK_OK(dev->ops->stream_create(dev, i % 2, &streams[i]));
    for (int i = 0; i < count; i++) {
        dp_stream *stream = streams[i % rarely == 0 ? 0 : i % stream_count];
        for (int64_t k = 0; k < each; k++)
            numbers[k] = (float)(i + k);
        CHECK_OK(dev->ops->copy_in(stream, tensors[i].data, numbers, bytes));
        memset(numbers, 0xff, bytes);
    }
    for (int i = 0; i < stream_count; i++)
        dev->ops->stream_destroy(streams[i]);
    for (int i = 0; i < count; i++) {
        CHECK_OK(dp_read(ctx, &tensors[i], got, bytes));
        for (int64_t k = 0; k < each; k++)
            CHECK_F64(got[k], i + k, 0);
    }
    free(tensors);
    free(numbers);
    free(got);
    dp_scope_end(scope);
}

TEST(small_copies_share_the_ring)
{
    static const int counts[] = {1, 5, 100, 500};
    for (unsigned order = 0; order < ORDERS; order++) {
        cuda_order(order);
        for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
            dp_ctx *ctx = open_with(1);
            dp_scope *scope = dp_scope_begin(ctx);
            dp_tensor tensors[500];
            long waits = 0;
            for (int k = 0; k < counts[i]; k++) {
                float numbers[101] = {(float)k};
                numbers[100] = (float)(2 * k);
                dp_tensor in = host_view(numbers, 101);
                CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(101),
                                       &tensors[k]));
                waits -= cuda_waits();
                CHECK_OK(dp_copy(ctx, &tensors[k], &in, NULL));
                waits += cuda_waits();
            }
            CHECK_INT(waits, 0);
            for (int k = 0; k < counts[i]; k++) {
                float got[101];
                CHECK_OK(dp_read(ctx, &tensors[k], got, sizeof got));
                CHECK_F64(got[0], k, 0);
                CHECK_F64(got[100], 2 * k, 0);
            }
            dp_close(ctx);
        }
    }
    cuda_check_leaks();
}

/* The ring goes round several times; lengths are odd, and long ones come between. */
TEST_SLOW(the_ring_goes_round, 60)
{
    for (unsigned order = 0; order < ORDERS; order++) {
        cuda_order(order);
        dp_ctx *ctx = open_with(1);
        copy_small(ctx, 700, 5003, 1, 1); /* a hundred to a slot */
        copy_small(ctx, 11, (1 << 18) + 1, 1, 1);
        copy_small(ctx, 3, (5 << 18) + 77, 1, 1);
        copy_small(ctx, 3, 1 << 19, 1, 1); /* a slot */
        dp_close(ctx);
    }
    cuda_check_leaks();
}

/* Up to more streams than a slot has events. */
TEST_SLOW(streams_share_the_ring, 60)
{
    static const struct {
        int streams, rarely;
    } cases[] = {{2, 1000}, {2, 3}, {4, 5}, {5, 7}, {7, 2}};
    for (unsigned order = 0; order < ORDERS; order++) {
        cuda_order(order);
        dp_ctx *ctx = open_with(1);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            copy_small(ctx, 60, 50003, cases[i].streams, cases[i].rarely); /* ten to a slot */
            copy_small(ctx, 50, 9, cases[i].streams, cases[i].rarely);
        }
        dp_close(ctx);
    }
    cuda_check_leaks();
}

#if defined(TEST_SIM)
/* Whatever call fails, the copy is over before others come round to its slot. */
TEST(a_copy_through_the_ring_fails_anywhere)
{
    enum { SLOT = 1 << 19 };
    static float from[SLOT], to[SLOT];
    dp_ctx *ctx = open_with(1);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_dev *dev = dp_local_stream(ctx, 0)->dev;
    dp_stream *streams[2];
    dp_tensor one, other;
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(SLOT), &one));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(SLOT), &other));
    CHECK_OK(dp_fill(ctx, &one, dp_float(3)));
    CHECK_OK(dp_wait(ctx));
    for (int i = 0; i < 2; i++)
        CHECK_OK(dev->ops->stream_create(dev, 0, &streams[i]));
    for (int out = 0; out < 2; out++) {
        bool fired = true;
        for (long n = 1; fired; n++) {
            sim_fail_at(n, cudaErrorMemoryAllocation, false);
            dp_status status = out ? dev->ops->copy_out(streams[0], to, one.data, sizeof to)
                                   : dev->ops->copy_in(streams[0], one.data, from, sizeof from);
            fired = sim_fault_fired();
            sim_fail_at(0, 0, false);
            CHECK(status == DP_OK || (fired && status == DP_ERR_NO_MEMORY));
            for (int i = 0; i < 5; i++) {
                from[SLOT - 1] = (float)(n + i);
                CHECK_OK(dev->ops->copy_in(streams[1], other.data, from, sizeof from));
            }
            CHECK_OK(dev->ops->copy_out(streams[1], to, other.data, sizeof to));
            CHECK_F64(to[SLOT - 1], n + 4, 0);
        }
    }
    for (int i = 0; i < 2; i++)
        dev->ops->stream_destroy(streams[i]);
    dp_scope_end(scope);
    dp_close(ctx);
    CHECK_INT(sim_finding_count(NULL), 0);
    cuda_check_leaks();
}
#endif

/* A stream of another context, whose copies are under way when the ring is given back. */
TEST(a_ring_that_closes_waits_for_its_copies)
{
    for (unsigned order = 0; order < ORDERS; order++) {
        dp_ctx *ctx = open_with(1), *lender = open_with(1);
        dp_scope *scope = dp_scope_begin(lender);
        dp_tensor tensor;
        dp_stream *stream = NULL;
        float numbers[] = {1, 2, 3}, got[3];
        cuda_order(order);
        CHECK_OK(dp_tensor_new(scope, dp_local_device(lender, 0), DP_F32, DP_SHAPE(3), &tensor));
        CHECK_OK(dp_cuda_adopt(ctx, 0, dp_cuda_stream(dp_local_stream(lender, 0)), &stream));
        CHECK_OK(stream->dev->ops->copy_in(stream, tensor.data, numbers, sizeof numbers));
        dp_cuda_release(stream);
        dp_close(ctx);
        CHECK_OK(dp_read(lender, &tensor, got, sizeof got));
        CHECK_BYTES(got, numbers, sizeof numbers);
        dp_close(lender);
    }
    cuda_check_leaks();
}

/* ---- children -------------------------------------------------------------------------------- */

enum { PLACE = 8192, PLACES = 4096 };

static void *places[PLACES];
static int place_count;

/* What was given back last is had first, whatever it is for. */
static void *place_take(size_t bytes, size_t align, void *unused)
{
    (void)unused;
    if (bytes > PLACE || align > PLACE)
        return aligned_alloc(align, (bytes + align - 1) / align * align);
    return place_count > 0 ? places[--place_count] : aligned_alloc(PLACE, PLACE);
}

static void place_give(void *data, size_t bytes, void *unused)
{
    (void)unused;
    if (bytes <= PLACE && place_count < PLACES)
        places[place_count++] = data;
    else
        free(data);
}

static const char *carrier_of(dp_ctx *ctx)
{
    dp_info info;
    CHECK_OK(dp_info_get(ctx, &info));
    return info.coll_backend;
}

/* A child of fork that has closed what its parent opened has no device of CUDA, and gets memory for
   others where those were: their collectives are not among GPUs. */
TEST(a_child_has_none_of_its_parents_devices)
{
    const dp_device_ops *const gpus[] = {dp_cuda(), NULL}, *const cpus[] = {dp_cpu(), NULL};
    const dp_coll_ops *const colls[] = {dp_cuda_coll(), dp_cpu_coll(), NULL};
    dp_config config = {.backends = gpus, .device_count = 8, .allocator = {place_take, place_give}};
    dp_dev *devs[8];
    const dp_comm_config of_parent = {.local = devs, .local_count = 8, .rank_count = 8};
    dp_ctx *ctx = NULL, *own = NULL;
    int status = 0;
    cuda_gpus(8);
    CHECK_OK(dp_open(&config, &ctx));
    for (int r = 0; r < 8; r++)
        devs[r] = dp_local_stream(ctx, r)->dev;
    CHECK(dp_cuda_coll()->fits(&of_parent));
    pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        CHECK(!dp_cuda_coll()->fits(&of_parent));
        dp_close(ctx);
        config.backends = cpus;
        config.colls = colls;
        for (config.device_count = 8; config.device_count <= 64; config.device_count *= 2) {
            CHECK_OK(dp_open(&config, &own));
            for (int r = 0; r < config.device_count; r++)
                CHECK(dp_cuda_stream(dp_local_stream(own, r)) == NULL);
            CHECK_STR(carrier_of(own), "cpu");
            dp_close(own);
        }
        _exit(0);
    }
    CHECK_INT(waitpid(child, &status, 0), child);
    CHECK_INT(status, 0);
    dp_close(ctx);
}

/* ---- streams without the lock ---------------------------------------------------------------- */

typedef struct asker {
    const dp_stream *stream;
    cudaStream_t native;
    atomic_bool end;
    long wrong;
} asker;

static void *ask(void *user)
{
    asker *own = user;
    while (!atomic_load(&own->end))
        own->wrong += dp_cuda_stream(own->stream) != own->native ||
                      dp_cuda_ordinal(own->stream) != 0;
    return NULL;
}

TEST(streams_are_known_while_contexts_come_and_go)
{
    dp_ctx *ctx = open_with(2);
    pthread_t thread;
    asker own = {.stream = dp_local_stream(ctx, 0)};
    own.native = dp_cuda_stream(own.stream);
    CHECK(own.native != NULL);
    CHECK_INT(pthread_create(&thread, NULL, ask, &own), 0);
    for (int i = 0; i < 20; i++) {
        dp_ctx *other = open_with(2);
        CHECK_INT(dp_cuda_ordinal(dp_local_stream(other, 1)), 1);
        dp_close(other);
    }
    atomic_store(&own.end, true);
    pthread_join(thread, NULL);
    CHECK_INT(own.wrong, 0);
    dp_close(ctx);
    cuda_check_leaks();
}

#if defined(TEST_SIM)
/* More of them than the library notes at the same time, good ones and others. */
TEST_SLOW(devices_may_be_opened_any_number_of_times, 60)
{
    dp_dev *dev = NULL;
    dp_ctx *ctx = open_with(1);
    const dp_host *host = dp_local_stream(ctx, 0)->dev->host;
    for (int i = 0; i < 1100; i++) {
        CHECK_ERROR(dp_cuda()->open(host, 1, &dev), DP_ERR_NO_DEVICE, "no GPU 1, there are 1");
        CHECK_OK(dp_cuda()->open(host, 0, &dev));
        dp_cuda()->close(dev);
    }
    CHECK_INT(dp_cuda_ordinal(dp_local_stream(ctx, 0)), 0);
    dp_close(ctx);
    sim_check_leaks();
}
#endif

/* ---- channels -------------------------------------------------------------------------------- */

/* Element i of a channel c is c % 13 - 6 + i % 3. */
static void sum_channels(dp_ctx *ctx, int64_t outer, int64_t channels, int64_t inner)
{
    dp_scope *scope = dp_scope_begin(ctx);
    const int64_t shape[] = {outer, channels, inner}, sums_shape[] = {2, channels};
    size_t count = (size_t)(outer * channels * inner);
    dp_tensor in, sums;
    float *numbers = malloc(count * sizeof *numbers);
    double *got = malloc(2 * (size_t)channels * sizeof *got);
    CHECK(numbers != NULL && got != NULL);
    for (int64_t o = 0; o < outer; o++)
        for (int64_t c = 0; c < channels; c++)
            for (int64_t i = 0; i < inner; i++)
                numbers[(o * channels + c) * inner + i] = (float)(c % 13 - 6 + (o * inner + i) % 3);
    CHECK_OK(dp_tensor_from(scope, dp_local_device(ctx, 0), numbers, DP_F32, 3, shape, &in));
    CHECK_OK(dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F64, 2, sums_shape, &sums));
    CHECK_OK(dp_kernel_run(ctx, 0,
                           &(dp_kernel_args){.kernel = DP_KERNEL_CHANNELS,
                                             .dtype = DP_F32,
                                             .count = count,
                                             .in = (const void *const[]){in.data},
                                             .out = (void *const[]){sums.data},
                                             .in_count = 1,
                                             .out_count = 1,
                                             .ndim = 3,
                                             .shape = shape}));
    CHECK_OK(dp_read(ctx, &sums, got, 2 * (size_t)channels * sizeof *got));
    for (int64_t c = 0; c < channels; c++) {
        double sum = 0, squares = 0;
        for (int64_t i = 0; i < outer * inner; i++) {
            double x = (double)(c % 13 - 6 + i % 3);
            sum += x;
            squares += x * x;
        }
        CHECK_F64(got[c], sum, 0);
        CHECK_F64(got[channels + c], squares, 0);
    }
    free(numbers);
    free(got);
    dp_scope_end(scope);
}

TEST_SLOW(any_number_of_channels, 60)
{
    static const int64_t shapes[][3] = {{3, 1, 5},    {1, 2, 1},    {1, 4096, 1},
                                        {3, 4097, 5}, {1, 8193, 1}, {70001, 2, 1}}; /* chunks */
    dp_ctx *ctx = open_with(1);
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        sum_channels(ctx, shapes[i][0], shapes[i][1], shapes[i][2]);
    dp_close(ctx);
    cuda_check_leaks();
}

/* A lane goes from row to row of its channel in steps of 256 elements. */
TEST(channels_with_rows_of_any_length)
{
    static const int64_t lengths[] = {2, 3, 16, 100, 128, 255, 256, 257, 511, 512, 1000, 2500};
    dp_ctx *ctx = open_with(1);
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++)
        sum_channels(ctx, 5000 / lengths[i] + 1, 2, lengths[i]);
    dp_close(ctx);
    cuda_check_leaks();
}
#endif /* TEST_CUDA */
