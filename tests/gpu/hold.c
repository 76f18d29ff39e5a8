/* hold.c - keeps a context on every GPU, so that the driver stays awake while tests come and go,
   each of them a process with a context of its own. Says what the driver took for it, and ends with
   the process that has started it. */

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static struct driver {
    int (*init)(unsigned flags);
    int (*count)(int *out);
    int (*retain)(void **out, int device);
} driver;

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

static int find(void *library, const char *name, void *out_fn)
{
    void *found = dlsym(library, name);
    memcpy(out_fn, &found, sizeof found);
    if (found == NULL)
        printf("the driver has no %s\n", name);
    return found != NULL;
}

static int load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL)
        printf("no driver: %s\n", dlerror());
    return library != NULL && find(library, "cuInit", &driver.init) &&
           find(library, "cuDeviceGetCount", &driver.count) &&
           find(library, "cuDevicePrimaryCtxRetain", &driver.retain);
}

/* 0: it works. The codes are CUresults. */
static int open_all(int *out_count)
{
    double start = seconds();
    int code = driver.init(0);
    if (code == 0)
        code = driver.count(out_count);
    printf("cuInit: code %d, %.2f s\n", code, seconds() - start);
    for (int i = 0; code == 0 && i < *out_count; i++) {
        void *context;
        start = seconds();
        code = driver.retain(&context, i);
        printf("context of GPU %d: code %d, %.2f s\n", i, code, seconds() - start);
    }
    return code;
}

int main(void)
{
    int count = 0;
    pid_t parent = getppid();
    setvbuf(stdout, NULL, _IOLBF, BUFSIZ);
    if (!load() || open_all(&count) != 0)
        return 1;
    printf("GPUs held open: %d\n", count);
    while (getppid() == parent)
        sleep(1);
    return 0;
}
