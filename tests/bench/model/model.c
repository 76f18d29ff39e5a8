/* model.c - growth on paper: what a job of P processes costs, from constants that are measured here
   with 4 to 64 of them, beside what is measured with 2 to 512; and what that comes to on a
   cluster that is not here, with up to 16,384.

     model [MOST]     measures up to MOST processes, prints all

   A job opens, does some barriers, all-reduces and all_gathers of its bootstrap, and loses a
   process. Here all share the cores, so that what is measured is the work of all, over the cores: a
   part of each process' own and a part for each pair. On the cluster each process has a core. What
   no single machine can measure, the network, is assumed: see LINK_US, LINK_GB. */

#define DP_IMPLEMENTATION
#include "../../../dp.h"

enum { MOST = 512, TIMES = 15, RUNS = 3, FLOATS = 256, CALLS = 3, SIZES = 9, FIRST = 1, LAST = 5 };

#define LINK_US   25.0 /* from one process to another one, through a switch, over TCP */
#define LINK_GB   1.25 /* a second: 10 Gbit */
#define GRADIENTS 1e8  /* bytes */

enum figure { OPEN_MS, PRIVATE_KIB, BARRIER_US, REDUCE_US, GATHER_US, HEARD_MS, FIGURES };

static const char *const names[FIGURES] = {"open, ms",
                                           "own memory of each, KiB",
                                           "barrier, us",
                                           "all_reduce of 1 KiB, us",
                                           "all_gather of 8 B, us",
                                           "death heard by all, ms"};

typedef struct found { /* in memory of all processes */
    atomic_uint go;
    uint64_t go_ns, death_ns;
    uint64_t open_ns[MOST], death_heard_ns[MOST];
    double private_kib[MOST], call_us[CALLS];
    int files, rounds; /* of process 0, once it is open; all_gathers that it took */
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
    while (atomic_load(&all->go) == 0)
        dp__os_word_wait(&all->go, 0, 60000000000u);
    must(dp_open(&(dp_config){.device_count = 1}, &ctx));
    all->open_ns[process] = dp__os_now_ns();
    all->rounds = ctx->tree->calls;
    must(dp_config_get(ctx, &config));
    must(dp_barrier(ctx));
    all->private_kib[process] = private_kib();
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
    (void)freopen("/dev/null", "w", stderr); /* what dies is meant to */
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

static void measure_once(int count, double out[FIGURES])
{
    uint64_t opened = 0, heard = 0;
    memset(all, 0, sizeof *all);
    for (int p = 0; p < count; p++)
        if (fork() == 0)
            start(p, count);
    dp__os_sleep_ms(100 + count); /* all sleep until then */
    all->go_ns = dp__os_now_ns();
    atomic_store(&all->go, 1);
    dp__os_word_wake(&all->go);
    while (wait(NULL) > 0) {
    }
    out[PRIVATE_KIB] = 0;
    for (int p = 0; p < count; p++) {
        opened = all->open_ns[p] > opened ? all->open_ns[p] : opened;
        heard = all->death_heard_ns[p] > heard ? all->death_heard_ns[p] : heard;
        out[PRIVATE_KIB] += all->private_kib[p] / count;
    }
    out[OPEN_MS] = (double)(opened - all->go_ns) * 1e-6;
    out[HEARD_MS] = (double)(heard - all->death_ns) * 1e-6;
    for (int i = 0; i < CALLS; i++)
        out[BARRIER_US + i] = all->call_us[i];
}

/* The least of some runs: what other programs take away is not the job's. */
static void measure(int count, double out[FIGURES])
{
    double once[FIGURES];
    measure_once(count, out);
    for (int run = 1; run < RUNS; run++) {
        measure_once(count, once);
        for (int f = 0; f < FIGURES; f++)
            out[f] = once[f] < out[f] ? once[f] : out[f];
    }
}

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct curve { /* of the number of processes: a * P^x + b * P^y */
    int x, y;
    double a, b;
} curve;

/* What each figure is made of: a part that is always there (0), one of each process (1) and one of
   each pair (2). All that wait wake up in turn, and each that wakes up looks at some. */
static const int powers[FIGURES][2] = {{0, 1}, {0, 1}, {1, 2}, {1, 2}, {0, 1}, {0, 1}};

static double power(double p, int x)
{
    return x == 0 ? 1 : p * power(p, x - 1);
}

static double at(const curve *c, double p)
{
    return c->a * power(p, c->x) + c->b * power(p, c->y);
}

/* Least squares of the relative errors with 4 to 64 processes; no part is negative. */
static curve through(const double measured[SIZES][FIGURES], int figure)
{
    curve c = {.x = powers[figure][0], .y = powers[figure][1]};
    double uu = 0, uv = 0, vv = 0, u1 = 0, v1 = 0;
    for (int i = FIRST; i <= LAST; i++) {
        double u = power(2 << i, c.x) / measured[i][figure];
        double v = power(2 << i, c.y) / measured[i][figure];
        uu += u * u, uv += u * v, vv += v * v, u1 += u, v1 += v;
    }
    double whole = uu * vv - uv * uv;
    c.a = (u1 * vv - v1 * uv) / whole;
    c.b = (v1 * uu - u1 * uv) / whole;
    if (c.a < 0)
        c.a = 0, c.b = v1 / vv;
    if (c.b < 0)
        c.b = 0, c.a = u1 / uu;
    return c;
}

/* Two processes have a core each, and wait without falling asleep: they are shown, not compared. */
static int short_of(const curve *c, const double measured[SIZES][FIGURES], int figure, int sizes)
{
    int missed = 0;
    printf("\n%-24s", names[figure]);
    for (int i = 0; i < sizes; i++)
        printf(" %9.4g", measured[i][figure]);
    printf("\n%-24s", "  model");
    for (int i = 0; i < sizes; i++)
        printf(" %9.4g", at(c, 2 << i));
    printf("\n%-24s", "  measured / model");
    for (int i = 0; i < sizes; i++) {
        double ratio = measured[i][figure] / at(c, 2 << i);
        bool meets = i == 0 || (ratio > 0.75 && ratio < 1.25);
        missed += !meets;
        printf(" %8.2f%c", ratio, meets ? ' ' : '*');
    }
    return missed;
}

static double log_2(double p)
{
    return p > 1 ? 1 + log_2(p / 2) : 0;
}

/* Of a process without a board, as on several machines. */
static double far_kib(double p)
{
    double entries = DP__LANES * (DP__KEPT + p) * (double)sizeof(dp__entry);
    double each = (double)(sizeof(dp__progress) + sizeof(dp__card) + sizeof(dp__body)) + 12;
    return (entries + each * p) / 1024;
}

/* Up the tree and down: process 0 sends all to each of its children. */
static double gather_s(double p, double bytes, double own_us)
{
    return log_2(p) * 2 * (LINK_US + own_us) * 1e-6 + (1 + log_2(p)) * p * bytes / (LINK_GB * 1e9);
}

typedef struct paper { /* what a job on a cluster costs */
    double open_s, memory_kib, files, letters_s, heard_ms, reduce;
} paper;

/* 8 processes a machine, a core for each. `one_us`: of one message, for both of its ends. */
static paper on_cluster(double p, double own_ms, double one_us, int rounds)
{
    double machines = p / 8 > 1 ? p / 8 : 1, ring = 2 * (machines - 1);
    double limit = 2 * (machines - 1) / machines * GRADIENTS / (LINK_GB * 1e9);
    double meeting = 4 * p * one_us * 1e-6; /* process 0: comes, proves, has met, may go */
    double most = 1 + log_2(p);             /* links of process 0 */
    return (paper){.open_s = own_ms * 1e-3 + meeting +
                             rounds * gather_s(p, sizeof(dp__card), one_us),
                   .memory_kib = far_kib(p),
                   .files = p + 2 + DP__PENDING_MAX,
                   .letters_s = p * most * one_us * 1e-6 +
                                p * (double)sizeof(dp__envelope) * most / (LINK_GB * 1e9),
                   .heard_ms = 4 + 2 * log_2(p) * (4 + LINK_US * 1e-3),
                   .reduce = machines > 1 ? limit / (limit + ring * LINK_US * 1e-6) : 1};
}

static void table(double own_ms, double one_us, int rounds)
{
    printf(
        "\n\nOn paper: 8 processes a machine, a core each; %g us and %g GB/s between machines; a "
        "message costs %.3g us here;\nto open takes %.3g ms of each process and %d all_gathers "
        "of %zu bytes. Gradients: %g MB, a ring.\n\n",
        LINK_US, LINK_GB, one_us, own_ms, rounds, sizeof(dp__card), GRADIENTS * 1e-6);
    printf("     P   open, s  memory, KiB  files of 0  letters round, s  death, ms  of the link\n");
    for (double p = 2; p <= 16384; p *= 2) {
        paper on = on_cluster(p, own_ms, one_us, rounds);
        printf("%6.0f %9.3f %12.0f %11.0f %17.4f %10.1f %12.3f%s%s\n", p, on.open_s, on.memory_kib,
               on.files, on.letters_s, on.heard_ms, on.reduce,
               on.files > 1024 ? "  limit of files raised" : "",
               on.letters_s > 1 ? ", letters are late" : "");
    }
}

int main(int count, char **args)
{
    double measured[SIZES][FIGURES];
    int sizes = 0, missed = 0, most = count > 1 ? atoi(args[1]) : MOST;
    curve gather = {0};
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    most = most < 64 ? 64 : most;
    for (int p = 2; p <= most && sizes < SIZES; p *= 2)
        measure(p, measured[sizes++]);
    printf("%d cores; the least of %d runs; *: not within 25 %%\n\n%-24s", dp__os_core_count(),
           RUNS, "processes");
    for (int i = 0; i < sizes; i++)
        printf(" %9d", 2 << i);
    for (int f = 0; f < FIGURES; f++) {
        curve c = through((const double(*)[FIGURES])measured, f);
        missed += short_of(&c, (const double(*)[FIGURES])measured, f, sizes);
        gather = f == GATHER_US ? c : gather;
    }
    printf("\n\n%d of %d figures are not within 25 %%", missed, FIGURES * (sizes - 1));
    table(measured[0][OPEN_MS], gather.b * dp__os_core_count() / 2, all->rounds);
    return EXIT_SUCCESS;
}
