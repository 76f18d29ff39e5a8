/* test_cuda_load.c - which libraries of CUDA are loaded at run time. The implementation is in this
   file once more, static, with a loader that finds what a test says is installed; what it finds is
   the simulator's. */

#define _GNU_SOURCE
#if defined(TEST_SIM)
#include <dlfcn.h>

static void *fake_dlopen(const char *name, int flags);
void *fake_dlsym(void *library, const char *name); /* dp/os_posix.h declares it weak */
static int fake_dlclose(void *library);
static int fake_dladdr(const void *address, Dl_info *out);

#define DP_STATIC
#define DP_IMPLEMENTATION
#define DP_DYNAMIC_LOAD
#define dlopen  fake_dlopen
#define dlsym   fake_dlsym
#define dlclose fake_dlclose
#define dladdr  fake_dladdr
#include "dp_cuda.h"
#undef dlopen
#undef dlsym
#undef dlclose
#undef dladdr
#endif

#include "test.h"

#if defined(TEST_SIM)
#include "sim/sim.h"

/* ---- what is installed ----------------------------------------------------------------------- */

typedef struct library {
    const char *name;
    int version;
    bool lacks_some; /* functions of 12.8 */
    int loads;
    char place[40];
} library;

enum { LIBRARIES = 8 };
static library installed[LIBRARIES]; /* up to the first without a name */
static int driver_answer;            /* of cuInit */

static void *fake_dlopen(const char *name, int flags)
{
    CHECK_INT(flags, RTLD_NOW | RTLD_LOCAL);
    for (int i = 0; i < LIBRARIES && installed[i].name != NULL; i++)
        if (strcmp(installed[i].name, name) == 0) {
            installed[i].loads++;
            return &installed[i];
        }
    return NULL;
}

static int fake_dlclose(void *handle)
{
    library *own = handle;
    CHECK(own->loads > 0);
    own->loads--;
    return 0;
}

static library *asked; /* for a function, last */

static int fake_dladdr(const void *address, Dl_info *out)
{
    snprintf(asked->place, sizeof asked->place, "/opt/%s.1", asked->name);
    *out = (Dl_info){.dli_fname = asked->place};
    return address != NULL;
}

static cudaError_t runtime_12(int *out)
{
    *out = 12080;
    return cudaSuccess;
}

static cudaError_t runtime_13(int *out)
{
    *out = 13000;
    return cudaSuccess;
}

static nvrtcResult nvrtc_12(int *major, int *minor)
{
    *major = 12;
    *minor = 9;
    return NVRTC_SUCCESS;
}

static nvrtcResult nvrtc_13(int *major, int *minor)
{
    *major = 13;
    *minor = 0;
    return NVRTC_SUCCESS;
}

static CUresult fake_init(unsigned flags)
{
    CHECK_INT(flags, 0);
    return (CUresult)driver_answer;
}

#define ENTRY(name) {#name, (void (*)(void))name},
static const struct entry {
    const char *name;
    void (*fn)(void);
} entries[] = {DP__CUDA_RUNTIME(ENTRY) DP__CUDA_NVRTC(ENTRY){"cuInit", (void (*)(void))fake_init}};

void *fake_dlsym(void *handle, const char *name)
{
    library *own = handle;
    void (*fn)(void) = NULL;
    void *found;
    if (handle == RTLD_DEFAULT) /* in the program itself there are none */
        return NULL;
    asked = own;
    if (own->lacks_some && strcmp(name, "cudaLibraryLoadData") == 0)
        return NULL;
    for (size_t i = 0; i < sizeof entries / sizeof *entries; i++)
        if (strcmp(entries[i].name, name) == 0)
            fn = entries[i].fn;
    if (strcmp(name, "cudaRuntimeGetVersion") == 0)
        fn = (void (*)(void))(own->version < 13000 ? runtime_12 : runtime_13);
    if (strcmp(name, "nvrtcVersion") == 0)
        fn = (void (*)(void))(own->version < 13000 ? nvrtc_12 : nvrtc_13);
    memcpy(&found, &fn, sizeof found);
    return found;
}

/* ---- which are chosen ------------------------------------------------------------------------ */

#define RUNTIME_13                                                                                 \
    {                                                                                              \
        .name = "libcudart.so.13", .version = 13000                                                \
    }
#define RUNTIME_12                                                                                 \
    {                                                                                              \
        .name = "libcudart.so.12", .version = 12080                                                \
    }
#define NVRTC_13                                                                                   \
    {                                                                                              \
        .name = "libnvrtc.so.13", .version = 13000                                                 \
    }
#define NVRTC_12                                                                                   \
    {                                                                                              \
        .name = "libnvrtc.so.12", .version = 12090                                                 \
    }
#define DRIVER                                                                                     \
    {                                                                                              \
        .name = "libcuda.so.1"                                                                     \
    }

/* `loaded`: the names of the two that stay; NULL: none does, and a context gets this status. */
typedef struct choice {
    library libraries[LIBRARIES];
    int driver;
    const char *loaded[2];
    dp_status status;
    const char *sentence;
} choice;

static const choice choices[] = {
    {.libraries = {RUNTIME_13, NVRTC_13, RUNTIME_12, NVRTC_12},
     .driver = 13000,
     .loaded = {"libcudart.so.13", "libnvrtc.so.13"}},
    {.libraries = {RUNTIME_13, NVRTC_13, RUNTIME_12, NVRTC_12},
     .driver = 12090,
     .loaded = {"libcudart.so.12", "libnvrtc.so.12"}},
    {.libraries = {RUNTIME_13, NVRTC_13, RUNTIME_12, NVRTC_12},
     .driver = 14000,
     .loaded = {"libcudart.so.13", "libnvrtc.so.13"}},
    {.libraries = {RUNTIME_12, NVRTC_12},
     .driver = 13000,
     .loaded = {"libcudart.so.12", "libnvrtc.so.12"}},
    {.libraries = {RUNTIME_13, RUNTIME_12, NVRTC_12},
     .driver = 13000,
     .loaded = {"libcudart.so.12", "libnvrtc.so.12"}},
    {.libraries = {NVRTC_13, RUNTIME_12, NVRTC_12},
     .driver = 13000,
     .loaded = {"libcudart.so.12", "libnvrtc.so.12"}},
    {.libraries = {{.name = "libcudart.so", .version = 13000},
                   {.name = "libnvrtc.so", .version = 13000}},
     .driver = 13000,
     .loaded = {"libcudart.so", "libnvrtc.so"}},
    {.libraries = {DRIVER, RUNTIME_13, NVRTC_13},
     .driver = 12090,
     .loaded = {NULL},
     .status = DP_ERR_UNSUPPORTED,
     .sentence = "(the driver is for CUDA 12.9, libcudart is of CUDA 13.0 (/opt/libcudart.so.13.1, "
                 "/opt/libnvrtc.so.13.1); libcudart.so.12 was not found; libcudart.so was not "
                 "found)"},
    {.libraries = {DRIVER, RUNTIME_13, NVRTC_12},
     .driver = 13000,
     .loaded = {NULL},
     .status = DP_ERR_UNSUPPORTED,
     .sentence = "(libnvrtc.so.13 was not found; libcudart.so.12 was not found; libcudart.so was "
                 "not found)"},
    {.libraries = {DRIVER,
                   {.name = "libcudart.so", .version = 13000},
                   {.name = "libnvrtc.so", .version = 12090}},
     .driver = 13000,
     .loaded = {NULL},
     .status = DP_ERR_UNSUPPORTED,
     .sentence = "libcudart is of CUDA 13.0 and libnvrtc of CUDA 12.9: both have to be of one "
                 "major version"},
    {.libraries = {DRIVER,
                   {.name = "libcudart.so.12", .version = 12080, .lacks_some = true},
                   NVRTC_12},
     .driver = 13000,
     .loaded = {NULL},
     .status = DP_ERR_UNSUPPORTED,
     .sentence = "libcudart or libnvrtc is older than 12.8 (/opt/libcudart.so.12.1, "
                 "/opt/libnvrtc.so.12.1)"},
    {.libraries = {DRIVER},
     .driver = 13000,
     .loaded = {NULL},
     .status = DP_ERR_UNSUPPORTED,
     .sentence = "(libcudart.so.13 was not found; "},
    {.libraries = {{.name = NULL}},
     .driver = 13000,
     .loaded = {NULL},
     .status = DP_ERR_NO_DEVICE,
     .sentence = "libcudart.so.13 was not found"},
};

static void check_choice(const choice *own)
{
    int count = -1;
    memcpy(installed, own->libraries, sizeof installed);
    dp__cuda = (struct dp__cuda){.bound = false};
    sim_set_driver(own->driver);
    sim_set_device_count(2);
    dp_status status = dp_cuda()->count(NULL, &count);
    for (int i = 0; i < LIBRARIES && installed[i].name != NULL; i++) {
        const char *name = installed[i].name;
        bool stays = own->loaded[0] != NULL &&
                     (strcmp(name, own->loaded[0]) == 0 || strcmp(name, own->loaded[1]) == 0);
        stays = stays || (own->loaded[0] == NULL && strcmp(name, "libcuda.so.1") == 0);
        CHECK_INT(installed[i].loads, stays);
    }
    CHECK_STATUS(status, own->status);
    if (status == DP_OK)
        CHECK_INT(count, 2);
    else
        CHECK_SAYS(dp_last_error(), own->sentence);
}

TEST(the_newest_pair_that_the_driver_carries)
{
    for (size_t i = 0; i < sizeof choices / sizeof *choices; i++)
        check_choice(&choices[i]);
}

/* Without libraries the driver alone says whether there are GPUs. */
TEST(a_driver_without_libraries)
{
    static const struct {
        int answer;
        dp_status status;
    } cases[] = {{CUDA_SUCCESS, DP_ERR_UNSUPPORTED},
                 {802, DP_ERR_UNSUPPORTED},
                 {CUDA_ERROR_NO_DEVICE, DP_ERR_NO_DEVICE},
                 {CUDA_ERROR_STUB_LIBRARY, DP_ERR_NO_DEVICE}};
    int count = 0;
    installed[0] = (library)DRIVER;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        driver_answer = cases[i].answer;
        CHECK_ERROR(dp_cuda()->count(NULL, &count), cases[i].status,
                    "the libraries of CUDA cannot be used");
    }
}

/* Both libraries are there, and no driver: nothing is wrong, and nothing is loaded twice. */
TEST(libraries_without_a_driver)
{
    int count = 0;
    installed[0] = (library)RUNTIME_13;
    installed[1] = (library)NVRTC_13;
    sim_set_driver(0);
    for (int i = 0; i < 3; i++) {
        CHECK_ERROR(dp_cuda()->count(NULL, &count), DP_ERR_NO_DEVICE,
                    "there is no driver for NVIDIA GPUs");
        CHECK_INT(installed[0].loads, 1);
        CHECK_INT(installed[1].loads, 1);
    }
}

TEST(a_context_with_loaded_libraries)
{
    dp_ctx *ctx = NULL;
    dp_info info;
    installed[0] = (library)RUNTIME_12;
    installed[1] = (library)NVRTC_12;
    sim_set_device_count(2);
    CHECK_OK(dp_open(NULL, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    CHECK_STR(info.device_backend, "cuda");
    CHECK_INT(info.local_count, 2);
    dp_close(ctx);
    sim_check_leaks();
}
#endif
