/* model.c - growth on paper: what a job of P processes costs, from constants that are measured here
   with few, beside what is measured with many; and what that comes to on machines that are not here.

     model measure MOST   a line for each P = 2, 4, ... MOST: see columns
     model                reads such lines; prints them beside the model, and a table to 16,384

   Everything in one: a job opens, does a few barriers, all-reduces and all_gathers of its bootstrap,
   and loses a process. All processes share the cores of this machine, so that what is measured is
   their work together, over the cores; on a cluster each machine has its own part of that. */

#define DP_IMPLEMENTATION
#include "../../../dp.h"

enum { MOST = 512, TIMES = 15, FLOATS = 256, CALLS = 3, KNOWN = 64 };

typedef struct found { /* in memory of all processes */
    uint64_t go_ns, death_ns;
    uint64_t open_ns[MOST], death_heard_ns[MOST];
    double private_kib[MOST], call_us[CALLS], files;
    atomic_int ready;
} found;

static found *all;

static void must(dp_status status)
{
    if (status == DP_OK)
        return;
    fprintf(stderr, "%s\n", dp_last_error());
    _exit(EXIT_FAILURE);
}

/* Of /proc/self/smaps_rollup: memory that is this process' own. */
static double private_kib(void)
{
    char line[128];
    double sum = 0, kib;
    FILE *file = fopen("/proc/self/smaps_rollup", "r");
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "Private_Clean: %lf", &kib) == 1 ||
            sscanf(line, "Private_Dirty: %lf", &kib) == 1)
            sum += kib;
    if (file != NULL)
        fclose(file);
    return sum;
}

static int open_files(void)
{
    int count = 0;
    for (int fd = 0; fd < 4096; fd++)
        count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static dp_status call(dp_ctx *ctx, const dp_bootstrap *boot, int which, void *room)
{
    static float data[FLOATS];
    dp_part part = {.send = data, .recv = data};
    uint64_t own = 0;
    return which == 0   ? dp_barrier(ctx)
           : which == 1 ? dp_all_reduce(ctx, &part, 1, DP_F32, DP_OP_SUM)
                        : boot->all_gather(&own, room, sizeof own, boot->user);
}

static double median_us(dp_ctx *ctx, const dp_bootstrap *boot, int which, void *room)
{
    double us[TIMES];
    must(call(ctx, boot, which, room));
    for (int i = 0; i < TIMES; i++) {
        uint64_t start = dp__os_now_ns();
        must(call(ctx, boot, which, room));
        us[i] = (double)(dp__os_now_ns() - start) * 1e-3;
    }
    qsort(us, TIMES, sizeof *us, by_size);
    return us[TIMES / 2];
}

static void be_process(int process, int count)
{
    static uint64_t room[MOST];
    dp_ctx *ctx;
    dp_config config;
    double before = private_kib();
    while (all->go_ns == 0 || dp__os_now_ns() < all->go_ns)
        dp__os_sleep_ms(1);
    must(dp_open(&(dp_config){.device_count = 1}, &ctx));
    all->open_ns[process] = dp__os_now_ns();
    must(dp_config_get(ctx, &config));
    must(dp_barrier(ctx));
    all->private_kib[process] = private_kib() - before;
    for (int i = 0; i < CALLS; i++) {
        double us = median_us(ctx, &config.bootstrap, i, room);
        all->call_us[i] = process == 0 ? us : all->call_us[i];
    }
    if (process == 0)
        all->files = open_files();
    must(dp_barrier(ctx));
    if (process == count - 1) {
        dp__os_sleep_ms(50); /* all others wait */
        all->death_ns = dp__os_now_ns();
        raise(SIGKILL);
    }
    if (dp_barrier(ctx) != DP_OK)
        all->death_heard_ns[process] = dp__os_now_ns();
    dp_close(ctx);
}

static void start(int process, int count)
{
    char number[16], address[40];
    snprintf(address, sizeof address, "@model-%d-%d", (int)getppid(), count);
    setenv("DP_LAUNCH", "dp", 1);
    setenv("DP_ADDR", address, 1);
    setenv("DP_SECRET", "of this model", 1);
    snprintf(number, sizeof number, "%d", count);
    setenv("DP_PROCESS_COUNT", number, 1);
    setenv("DP_LOCAL_PROCESS_COUNT", number, 1);
    snprintf(number, sizeof number, "%d", process);
    setenv("DP_PROCESS", number, 1);
    setenv("DP_LOCAL_PROCESS", number, 1);
    be_process(process, count);
    _exit(EXIT_SUCCESS);
}

/* P, cores, open ms, CPU ms of all, private KiB, barrier us, all_reduce us, all_gather us, heard ms,
   files of process 0 after. */
static void measure(int count)
{
    struct rusage before, after;
    uint64_t opened = 0, heard = 0;
    double kib = 0;
    memset(all, 0, sizeof *all);
    getrusage(RUSAGE_CHILDREN, &before);
    for (int p = 0; p < count; p++)
        if (fork() == 0)
            start(p, count);
    dp__os_sleep_ms(100 + count);
    all->go_ns = dp__os_now_ns() + 20000000;
    while (wait(NULL) > 0) {
    }
    getrusage(RUSAGE_CHILDREN, &after);
    for (int p = 0; p < count; p++) {
        opened = all->open_ns[p] > opened ? all->open_ns[p] : opened;
        heard = all->death_heard_ns[p] > heard ? all->death_heard_ns[p] : heard;
        kib += all->private_kib[p] / count;
    }
    double cpu = 0;
    cpu += (double)(after.ru_utime.tv_sec + after.ru_stime.tv_sec - before.ru_utime.tv_sec -
                    before.ru_stime.tv_sec) *
           1e3;
    printf("%d %d %.3f %.0f %.0f %.2f %.2f %.2f %.2f %.0f\n", count, dp__os_core_count(),
           (double)(opened - all->go_ns) * 1e-6, cpu, kib, all->call_us[0], all->call_us[1],
           all->call_us[2], (double)(heard - all->death_ns) * 1e-6, all->files);
    fflush(stdout);
}

int main(int count, char **args)
{
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    int most = count > 2 ? atoi(args[2]) : 64;
    for (int p = 2; p <= most && p <= MOST; p *= 2)
        measure(p);
    return EXIT_SUCCESS;
}
