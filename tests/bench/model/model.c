/* model.c - growth on paper: what a job of P processes costs, from constants that are measured here
   with 4 to 64 of them, beside what is measured with 2 to 512; what it costs it to go on without a
   process that has died, with 4 to 32 of them, beside 2 to 128; and what that comes to on a cluster
   that is not here, with up to 16,384.

     model [MOST]     measures up to MOST processes, prints all

   A job opens, does some barriers, all-reduces and all_gathers of its bootstrap, and loses a
   process. Here all share the cores, so that what is measured is the work of all, over the cores: a
   part of each process' own and a part for each pair. On the cluster each process has a core. What
   no single machine can measure, the network, is assumed: see LINK_US, LINK_GB. */

#define DP_IMPLEMENTATION
#include "../../../dp_save.h"

enum {
    MOST = 512,
    TIMES = 15,
    RUNS = 3,
    FLOATS = 256,
    CALLS = 3,
    SIZES = 9,
    FIRST = 1,
    LAST = 5,
    MORTAL = 7, /* sizes with which it is tried to go on without one */
    SHARED_BYTES = 8 << 20
};

#define LINK_US   25.0 /* from one process to another one, through a switch, over TCP */
#define LINK_GB   1.25 /* a second: 10 Gbit */
#define GRADIENTS 1e8  /* bytes */

enum figure {
    OPEN_MS,
    PRIVATE_KIB,
    BARRIER_US,
    REDUCE_US,
    GATHER_US,
    HEARD_MS,
    RECOVER_MS, /* from here on of a job that goes on */
    SHARE_MS,
    ALIKE_MS,
    ADMIT_MS,
    AGAIN_MS,
    FIGURES,
    FITTED = AGAIN_MS /* that one is the sum of others */
};

static const char *const names[FIGURES] = {"open, ms",
                                           "own memory of each, KiB",
                                           "barrier, us",
                                           "all_reduce of 1 KiB, us",
                                           "all_gather of 8 B, us",
                                           "death heard by all, ms",
                                           "dp_recover, ms",
                                           "8 MiB of one shared, ms",
                                           "all have the same, ms",
                                           "dp_admit, ms",
                                           "death to next call, ms"};

typedef struct found { /* in memory of all processes */
    atomic_uint go;
    uint64_t go_ns, death_ns;
    uint64_t open_ns[MOST], death_heard_ns[MOST];
    double private_kib[MOST], call_us[CALLS];
    int files, rounds; /* of process 0, once it is open; all_gathers that it took */
    atomic_uint again; /* who was killed may come back */
    uint64_t recovered_ns[MOST], shared_ns[MOST], alike_ns[MOST], admit_ns[MOST], stepped_ns[MOST];
} found;

static found *all;
static int rounds;      /* all_gathers in which a job has opened */
static bool comes_back; /* a process that takes the place of a dead one */

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

/* ---- going on without one -------------------------------------------------------------------- */

/* As far as all, or furthest. */
static void share(dp_ctx *ctx, int64_t progress)
{
    static char state[SHARED_BYTES];
    dp_value kept;
    dp_scope *scope = dp_scope_begin(ctx);
    if (state[0] == 0)
        memset(state, 1, sizeof state); /* memory of its own */
    dp_value own = DP_DICT(scope, {"state", dp_array(scope, state, DP_U8, DP_SHAPE(SHARED_BYTES))});
    must(dp_checkpoint_share(ctx, scope, progress, own, &kept));
    dp_scope_end(scope);
}

static void go_on(dp_ctx *ctx, int process)
{
    bool came = false;
    uint64_t start = 0;
    all->death_heard_ns[process] = dp__os_now_ns();
    must(dp_recover(ctx));
    all->recovered_ns[process] = dp__os_now_ns();
    share(ctx, process == 0);
    all->shared_ns[process] = dp__os_now_ns();
    must(dp_barrier(ctx));
    all->stepped_ns[process] = dp__os_now_ns();
    share(ctx, 0);
    all->alike_ns[process] = dp__os_now_ns();
    must(dp_barrier(ctx));
    atomic_store(&all->again, 1);
    dp__os_word_wake(&all->again);
    while (!came) {
        start = dp__os_now_ns();
        must(dp_admit(ctx, &came));
    }
    all->admit_ns[process] = dp__os_now_ns() - start;
    must(dp_barrier(ctx));
    dp_close(ctx);
}

static void be_mortal(int process, int count)
{
    dp_ctx *ctx;
    atomic_uint *word = comes_back ? &all->again : &all->go;
    if (comes_back)
        setenv("DP_REJOIN", "1", 1);
    while (atomic_load(word) == 0)
        dp__os_word_wait(word, 0, 60000000000u);
    must(dp_open(&(dp_config){.device_count = 1, .recovers = true}, &ctx));
    must(dp_barrier(ctx));
    if (comes_back) {
        dp_close(ctx);
        return;
    }
    share(ctx, 0); /* memory is there */
    must(dp_barrier(ctx));
    if (process == count - 1) {
        dp__os_sleep_ms(50); /* all others wait */
        all->death_ns = dp__os_now_ns();
        raise(SIGKILL);
    }
    (void)freopen("/dev/null", "w", stderr);
    if (dp_barrier(ctx) != DP_OK)
        go_on(ctx, process);
}

static pid_t start(void (*body)(int process, int count), int process, int count)
{
    char number[16], address[40];
    pid_t pid = fork();
    if (pid != 0)
        return pid;
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
    body(process, count);
    _exit(EXIT_SUCCESS);
}

static uint64_t last_of(const uint64_t *ns, int count)
{
    uint64_t last = 0;
    for (int p = 0; p < count; p++)
        last = ns[p] > last ? ns[p] : last;
    return last;
}

static double ms_between(uint64_t from_ns, uint64_t to_ns)
{
    return (double)(to_ns - from_ns) * 1e-6;
}

/* The process of the last one. */
static pid_t start_all(void (*body)(int process, int count), int count)
{
    pid_t pid = 0;
    memset(all, 0, sizeof *all);
    for (int p = 0; p < count; p++)
        pid = start(body, p, count);
    dp__os_sleep_ms(100 + count); /* all sleep until then */
    all->go_ns = dp__os_now_ns();
    atomic_store(&all->go, 1);
    dp__os_word_wake(&all->go);
    return pid;
}

static void measure_once(int count, double out[FIGURES])
{
    (void)start_all(be_process, count);
    while (wait(NULL) > 0) {
    }
    rounds = all->rounds;
    out[PRIVATE_KIB] = 0;
    for (int p = 0; p < count; p++)
        out[PRIVATE_KIB] += all->private_kib[p] / count;
    out[OPEN_MS] = ms_between(all->go_ns, last_of(all->open_ns, count));
    out[HEARD_MS] = ms_between(all->death_ns, last_of(all->death_heard_ns, count));
    for (int i = 0; i < CALLS; i++)
        out[BARRIER_US + i] = all->call_us[i];
}

/* The last one dies, and is started again. */
static void measure_going_on(int count, double out[FIGURES])
{
    pid_t dead = start_all(be_mortal, count);
    (void)waitpid(dead, NULL, 0);
    comes_back = true;
    (void)start(be_mortal, count - 1, count);
    comes_back = false;
    while (wait(NULL) > 0) {
    }
    uint64_t heard = last_of(all->death_heard_ns, count);
    uint64_t recovered = last_of(all->recovered_ns, count);
    uint64_t shared = last_of(all->shared_ns, count), stepped = last_of(all->stepped_ns, count);
    out[RECOVER_MS] = ms_between(heard, recovered);
    out[SHARE_MS] = ms_between(recovered, shared);
    out[ALIKE_MS] = ms_between(stepped, last_of(all->alike_ns, count));
    out[ADMIT_MS] = ms_between(0, last_of(all->admit_ns, count));
    out[AGAIN_MS] = ms_between(all->death_ns, stepped);
}

/* The least of some runs: what other programs take away is not the job's. */
static void measure(int count, int figures, double out[FIGURES])
{
    double once[FIGURES] = {0};
    for (int run = 0; run < RUNS; run++) {
        measure_once(count, once);
        if (figures == FIGURES)
            measure_going_on(count, once);
        for (int f = 0; f < FIGURES; f++)
            out[f] = run == 0 || once[f] < out[f] ? once[f] : out[f];
    }
}

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct curve { /* of the number of processes: a * P^x + b * P^y */
    int x, y;
    double a, b;
} curve;

/* What each figure is made of: a part that is always there (0), one of each process (1) and one of
   each pair (2). All that wait wake up in turn, and each that wakes up looks at some. */
static const int powers[FITTED][2] = {{0, 1}, {0, 1}, {1, 2}, {1, 2}, {0, 1},
                                      {0, 1}, {0, 1}, {0, 1}, {0, 1}, {0, 1}};

static double power(double p, int x)
{
    return x == 0 ? 1 : p * power(p, x - 1);
}

static double at(const curve *c, double p)
{
    return c->a * power(p, c->x) + c->b * power(p, c->y);
}

/* Least squares of the relative errors with 4 to 64 processes, or 4 to 32; no part is negative. */
static curve through(const double measured[SIZES], int figure)
{
    curve c = {.x = powers[figure][0], .y = powers[figure][1]};
    double uu = 0, uv = 0, vv = 0, u1 = 0, v1 = 0;
    for (int i = FIRST; i <= (figure < RECOVER_MS ? LAST : LAST - 1); i++) {
        double u = power(2 << i, c.x) / measured[i];
        double v = power(2 << i, c.y) / measured[i];
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
static int short_of(const char *name, const double measured[SIZES], const double model[SIZES],
                    int sizes)
{
    int missed = 0;
    printf("\n%-24s", name);
    for (int i = 0; i < sizes; i++)
        printf(" %9.4g", measured[i]);
    printf("\n%-24s", "  model");
    for (int i = 0; i < sizes; i++)
        printf(" %9.4g", model[i]);
    printf("\n%-24s", "  measured / model");
    for (int i = 0; i < sizes; i++) {
        double ratio = measured[i] / model[i];
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

/* ---- a death each minute --------------------------------------------------------------------- */

enum { MEMBERS = 1024, ADAM_BYTES = 12, EVERY_S = 60 }; /* of a parameter, and of what Adam keeps */

typedef struct pace {    /* of one process, with a core of its own */
    double share, alike; /* seconds for a byte */
    double own_ms, one_us;
    int rounds;
} pace;

typedef struct loss { /* seconds that a death takes away, in parts */
    double step, heard, recover, share, alike;
} loss;

/* The first process that is left has nine messages with each other one, and sends it the seats of
   all. Then they meet as they did at first. */
static double recover_s(double p, double link_gb, const pace *own)
{
    paper on = on_cluster(p, own->own_ms, own->one_us, own->rounds);
    double seats = p * p * (double)(sizeof(dp__seat) + 1) / (link_gb * 1e9);
    return 9 * p * own->one_us * 1e-6 + seats + on.open_s;
}

static loss loss_of(double parameters, double link_gb, const pace *own)
{
    double state = ADAM_BYTES * parameters, travel = 2 * 4 * parameters / (link_gb * 1e9);
    paper on = on_cluster(MEMBERS, own->own_ms, own->one_us, own->rounds);
    return (loss){.step = travel > 0.5 ? travel : 0.5,
                  .heard = on.heard_ms * 1e-3,
                  .recover = recover_s(MEMBERS, link_gb, own),
                  .share = state * (own->share + 1 / (link_gb * 1e9)),
                  .alike = state * own->alike};
}

static double trains(double lost_s)
{
    return lost_s < EVERY_S ? 1 - lost_s / EVERY_S : 0;
}

static void growth_of_recovery(const pace *own)
{
    printf("\ndp_recover with 10 Gbit/s:");
    for (double p = 64; p <= 16384; p *= 4)
        printf("  %.0f: %.3g s", p, recover_s(p, LINK_GB, own));
}

static void minutes(const pace *own)
{
    printf(
        "\n\nOn paper: %d members, one dies each minute. Adam's state: %d bytes for a parameter; "
        "to share it costs each process\n%.3g ns for a byte, %.3g if all have it, and the link "
        "once. A step takes as long as its gradients in a ring, but half a\nsecond at least; the "
        "one under way is lost. Which part of the time trains, if all have the same state, if it "
        "has to be\nshared, and if the dead one comes back, too:\n\n"
        "parameters  Gbit/s  step, s  heard, s  recover, s  share, s  alike, s    alike  shared  "
        "comes back\n",
        MEMBERS, ADAM_BYTES, own->share * 1e9, own->alike * 1e9);
    for (double parameters = 1e7; parameters < 2e9; parameters *= 10)
        for (double link_gb = LINK_GB; link_gb < 20; link_gb *= 10) {
            loss l = loss_of(parameters, link_gb, own);
            double least = l.step + l.heard + l.recover;
            printf("%10.0e %7.0f %8.2f %9.3f %11.3f %9.2f %9.2f %8.3f %7.3f %11.3f\n", parameters,
                   8 * link_gb, l.step, l.heard, l.recover, l.share, l.alike,
                   trains(least + l.alike), trains(least + l.share),
                   trains(least + 2 * l.share + l.recover));
        }
    growth_of_recovery(own);
    printf("\n");
}

/* ---- all of it ------------------------------------------------------------------------------- */

static double modelled(const curve curves[FITTED], int figure, double p)
{
    if (figure < FITTED)
        return at(&curves[figure], p);
    return at(&curves[HEARD_MS], p) + at(&curves[RECOVER_MS], p) + at(&curves[SHARE_MS], p) +
           at(&curves[BARRIER_US], p) * 1e-3;
}

static void compare(const double measured[FIGURES][SIZES], const curve curves[FITTED], int sizes)
{
    int missed = 0, compared = 0;
    printf("%d cores; the least of %d runs; *: not within 25 %%\n\n%-24s", dp__os_core_count(),
           RUNS, "processes");
    for (int i = 0; i < sizes; i++)
        printf(" %9d", 2 << i);
    for (int f = 0; f < FIGURES; f++) {
        double model[SIZES];
        int some = f >= RECOVER_MS && sizes > MORTAL ? MORTAL : sizes;
        for (int i = 0; i < some; i++)
            model[i] = modelled(curves, f, 2 << i);
        missed += short_of(names[f], measured[f], model, some);
        compared += some - 1;
    }
    printf("\n\n%d of %d figures are not within 25 %%", missed, compared);
}

int main(int count, char **args)
{
    double measured[FIGURES][SIZES], once[FIGURES];
    int sizes = 0, most = count > 1 ? atoi(args[1]) : MOST;
    curve curves[FITTED];
    all = mmap(NULL, sizeof *all, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    most = most < 64 ? 64 : most;
    for (int p = 2; p <= most && sizes < SIZES; p *= 2, sizes++) {
        measure(p, sizes < MORTAL ? FIGURES : RECOVER_MS, once);
        for (int f = 0; f < FIGURES; f++)
            measured[f][sizes] = once[f];
    }
    for (int f = 0; f < FITTED; f++)
        curves[f] = through(measured[f], f);
    compare((const double(*)[SIZES])measured, curves, sizes);
    double cores = dp__os_core_count(), own_ms = measured[OPEN_MS][0];
    double one_us = curves[GATHER_US].b * cores / 2;
    table(own_ms, one_us, rounds);
    minutes(&(pace){.share = curves[SHARE_MS].b * 1e-3 * cores / SHARED_BYTES,
                    .alike = curves[ALIKE_MS].b * 1e-3 * cores / SHARED_BYTES,
                    .own_ms = own_ms,
                    .one_us = one_us,
                    .rounds = rounds});
    return EXIT_SUCCESS;
}
