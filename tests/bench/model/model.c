/* model.c - growth on paper: what a job of P processes costs, from constants that are measured here
   with few of them, beside what is measured with more.

     model [MOST]     measures up to MOST processes, prints all

   A job opens, does some barriers, all-reduces and all_gathers of its bootstrap, and loses a
   process: measured with 2 to 512, and the model fitted with 4 to 64. It goes on without a process
   that has died: with 2 to 128, and 4 to 32. Each process is on a machine of its own, which is only
   said, so that all goes over TCP: with 2 to 64, and 4 to 16.

   Here all share the cores, so that what is measured is the work of all, over the cores: see
   `term`. On the cluster of the tables, with up to 16,384, each process has a core. What no single
   machine can measure, the network, is assumed: see LINK_US, LINK_GB. */

#define DP_IMPLEMENTATION
#include "../../../dp_save.h"

enum {
    MOST = 512,
    TIMES = 15,
    RUNS = 5,
    FLOATS = 256,
    MANY_FLOATS = 1 << 20,
    SIZES = 9,  /* 2, 4, 8, ... MOST processes */
    FIRST = 1,  /* of those that the model is fitted to; a process of two has a core of its own */
    MORTAL = 7, /* sizes with which it is tried to go on without one */
    APART = 6,  /* and with which each process is on a machine of its own */
    SHARED_BYTES = 8 << 20
};

#define LINK_US   25.0 /* from one process to another one, through a switch, over TCP */
#define LINK_GB   1.25 /* a second: 10 Gbit */
#define GRADIENTS 1e8  /* bytes */

/* What is done over and over again. */
enum call { BARRIER, REDUCE, GATHER, REDUCE_MANY, CALLS };

/* What a figure is made of: a part for each process, for each one and the times that it wakes up,
   for each pair. A process waits for the others in turn, so it wakes up once for each that comes
   later than all those before it: in any order of P that happens about log P times. */
enum term { PROCESSES, WAKES, PAIRS, ALWAYS };

enum figure {
    OPEN_MS,
    PRIVATE_KIB,
    BARRIER_US,
    REDUCE_US,
    GATHER_US,
    HEARD_MS,
    TCP_OPEN_MS, /* of processes that share no memory */
    TCP_BARRIER_US,
    TCP_REDUCE_US,
    TCP_MANY_MS,
    TCP_HEARD_MS,
    RECOVER_MS, /* of a job that goes on */
    SHARE_MS,
    ALIKE_MS,
    ADMIT_MS,
    AGAIN_MS,
    FIGURES,
    FITTED = AGAIN_MS /* that one is the sum of others */
};

static const struct {
    const char *name;
    enum term first, second;
    int last, sizes; /* that the model is fitted to, and how many there are */
} figures[FIGURES] = {[OPEN_MS] = {"open, ms", ALWAYS, PROCESSES, 5, SIZES},
                      [PRIVATE_KIB] = {"own memory of each, KiB", ALWAYS, PROCESSES, 5, SIZES},
                      [BARRIER_US] = {"barrier, us", PROCESSES, WAKES, 5, SIZES},
                      [REDUCE_US] = {"all_reduce of 1 KiB, us", PROCESSES, WAKES, 5, SIZES},
                      [GATHER_US] = {"all_gather of 8 B, us", ALWAYS, PROCESSES, 5, SIZES},
                      [HEARD_MS] = {"death heard by all, ms", ALWAYS, PROCESSES, 5, SIZES},
                      [TCP_OPEN_MS] = {"TCP: open, ms", PROCESSES, PAIRS, 3, APART},
                      [TCP_BARRIER_US] = {"TCP: barrier, us", PROCESSES, PAIRS, 3, APART},
                      [TCP_REDUCE_US] = {"TCP: reduce 1 KiB, us", PROCESSES, PAIRS, 3, APART},
                      [TCP_MANY_MS] = {"TCP: reduce 4 MiB, ms", PROCESSES, PAIRS, 3, APART},
                      [TCP_HEARD_MS] = {"TCP: death heard, ms", ALWAYS, PROCESSES, 3, APART},
                      [RECOVER_MS] = {"dp_recover, ms", ALWAYS, PROCESSES, 4, MORTAL},
                      [SHARE_MS] = {"8 MiB of one shared, ms", ALWAYS, PROCESSES, 4, MORTAL},
                      [ALIKE_MS] = {"all have the same, ms", ALWAYS, PROCESSES, 4, MORTAL},
                      [ADMIT_MS] = {"dp_admit, ms", ALWAYS, PROCESSES, 4, MORTAL},
                      [AGAIN_MS] = {.name = "death to next call, ms", .sizes = MORTAL}};

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
static bool apart;      /* each process on a machine of its own */
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

static dp_status call(dp_ctx *ctx, const dp_bootstrap *boot, enum call which, void *room)
{
    static float data[MANY_FLOATS];
    dp_part part = {.send = data, .recv = data};
    uint64_t own = 0;
    size_t count = which == REDUCE ? FLOATS : MANY_FLOATS;
    return which == BARRIER  ? dp_barrier(ctx)
           : which == GATHER ? boot->all_gather(&own, room, sizeof own, boot->user)
                             : dp_all_reduce(ctx, &part, count, DP_F32, DP_OP_SUM);
}

static double median_us(dp_ctx *ctx, const dp_bootstrap *boot, enum call which, void *room)
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
    all->rounds = ctx->world.tree->calls;
    must(dp_config_get(ctx, &config));
    must(dp_barrier(ctx));
    all->private_kib[process] = private_kib();
    for (int i = BARRIER; i < CALLS; i++) {
        double us = i == (apart ? GATHER : REDUCE_MANY) /* which is measured the other way */
                        ? 0
                        : median_us(ctx, &config.bootstrap, (enum call)i, room);
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

enum { FIRST_PORT = 24000, PORTS = 900 };

static int port = FIRST_PORT; /* another one for each job that needs one */

static pid_t start(void (*body)(int process, int count), int process, int count)
{
    char number[16], address[40];
    pid_t pid = fork();
    if (pid != 0)
        return pid;
    snprintf(number, sizeof number, "%d", process);
    if (apart) {
        snprintf(address, sizeof address, "127.0.0.1:%d", port);
        setenv("DP_MACHINE", number, 1);
        setenv("DP_INTERFACE", "lo", 1);
    } else {
        snprintf(address, sizeof address, "@model-%d-%d", (int)getppid(), count);
    }
    setenv("DP_LAUNCH", "dp", 1);
    setenv("DP_ADDR", address, 1);
    setenv("DP_SECRET", "of this model", 1);
    setenv("DP_PROCESS", number, 1);
    setenv("DP_LOCAL_PROCESS", apart ? "0" : number, 1);
    snprintf(number, sizeof number, "%d", count);
    setenv("DP_PROCESS_COUNT", number, 1);
    setenv("DP_LOCAL_PROCESS_COUNT", apart ? "1" : number, 1);
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
    port = port < FIRST_PORT + PORTS ? port + 1 : FIRST_PORT;
    for (int p = 0; p < count; p++)
        pid = start(body, p, count);
    dp__os_sleep_ms(100 + count); /* all sleep until then */
    all->go_ns = dp__os_now_ns();
    atomic_store(&all->go, 1);
    dp__os_word_wake(&all->go);
    return pid;
}

static void wait_for_all(void)
{
    int status;
    while (wait(&status) > 0)
        if (WIFEXITED(status) && WEXITSTATUS(status) != EXIT_SUCCESS)
            exit(EXIT_FAILURE); /* it has said why */
}

static void measure_once(int count, double out[FIGURES])
{
    (void)start_all(be_process, count);
    wait_for_all();
    rounds = all->rounds;
    out[PRIVATE_KIB] = 0;
    for (int p = 0; p < count; p++)
        out[PRIVATE_KIB] += all->private_kib[p] / count;
    out[OPEN_MS] = ms_between(all->go_ns, last_of(all->open_ns, count));
    out[HEARD_MS] = ms_between(all->death_ns, last_of(all->death_heard_ns, count));
    out[BARRIER_US] = all->call_us[BARRIER];
    out[REDUCE_US] = all->call_us[REDUCE];
    out[GATHER_US] = all->call_us[GATHER];
}

static void measure_apart(int count, double out[FIGURES])
{
    apart = true;
    (void)start_all(be_process, count);
    wait_for_all();
    apart = false;
    out[TCP_OPEN_MS] = ms_between(all->go_ns, last_of(all->open_ns, count));
    out[TCP_BARRIER_US] = all->call_us[BARRIER];
    out[TCP_REDUCE_US] = all->call_us[REDUCE];
    out[TCP_MANY_MS] = all->call_us[REDUCE_MANY] * 1e-3;
    out[TCP_HEARD_MS] = ms_between(all->death_ns, last_of(all->death_heard_ns, count));
}

/* The last one dies, and is started again. */
static void measure_going_on(int count, double out[FIGURES])
{
    pid_t dead = start_all(be_mortal, count);
    (void)waitpid(dead, NULL, 0);
    comes_back = true;
    (void)start(be_mortal, count - 1, count);
    comes_back = false;
    wait_for_all();
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
static void measure(int size, double out[FIGURES])
{
    double once[FIGURES] = {0};
    int count = 2 << size;
    for (int run = 0; run < RUNS; run++) {
        measure_once(count, once);
        if (size < MORTAL)
            measure_going_on(count, once);
        if (size < APART)
            measure_apart(count, once);
        for (int f = 0; f < FIGURES; f++)
            out[f] = run == 0 || once[f] < out[f] ? once[f] : out[f];
    }
}

/* ---- the model ------------------------------------------------------------------------------- */

typedef struct curve { /* of the number of processes */
    enum term x, y;
    double a, b; /* how much there is of each */
} curve;

static double log_2(double p)
{
    return p > 1 ? 1 + log_2(p / 2) : 0;
}

static double of_term(enum term term, double p)
{
    return term == PROCESSES ? p : term == WAKES ? p * log_2(p) : term == PAIRS ? p * p : 1;
}

static double at(const curve *c, double p)
{
    return c->a * of_term(c->x, p) + c->b * of_term(c->y, p);
}

/* Least squares of the relative errors; no part is negative. */
static curve through(const double measured[SIZES], int figure)
{
    curve c = {.x = figures[figure].first, .y = figures[figure].second};
    double uu = 0, uv = 0, vv = 0, u1 = 0, v1 = 0;
    for (int i = FIRST; i <= figures[figure].last; i++) {
        double u = of_term(c.x, 2 << i) / measured[i];
        double v = of_term(c.y, 2 << i) / measured[i];
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

/* Of a process without a board, as on several machines. */
static double far_kib(double p)
{
    double entries = DP__LANES * (DP__KEPT + p) * (double)sizeof(dp__entry);
    double each =
        (double)(sizeof(dp__progress) + sizeof(dp__introduction) + sizeof(dp__system_process)) + 12;
    return (entries + each * p) / 1024;
}

/* Up the tree and down: process 0 sends all to each of its children. */
static double gather_s(double p, double bytes, double own_us)
{
    return log_2(p) * 2 * (LINK_US + own_us) * 1e-6 + (1 + log_2(p)) * p * bytes / (LINK_GB * 1e9);
}

typedef struct pace {      /* of one process, with a core of its own */
    double own_ms, one_us; /* to open; for a message of the bootstrap, at both of its ends */
    double tcp_us;         /* for a message of a collective over TCP, at both ends */
    double share, alike;   /* seconds for a byte */
    int rounds;            /* all_gathers in which a job opens */
} pace;

typedef struct paper { /* what a job on a cluster costs */
    double open_s, memory_kib, files, letters_s, heard_ms, ring, tcp;
} paper;

/* The part of the time in which the link is in use: in a ring, as NCCL has it, and over TCP, where
   the processes of a machine share memory, and for each piece each sends two messages to one
   process of each other machine. Here nothing travels while a core sends; in fact much does. */
static void sums_on_cluster(double p, double machines, const pace *own, paper *out)
{
    double others = machines - 1, limit = 2 * others / machines * GRADIENTS / (LINK_GB * 1e9);
    double pieces = GRADIENTS / (double)dp__mesh_piece_bytes(DP__MESH_INPUT_BYTES, (size_t)p);
    out->ring = limit / (limit + 2 * others * LINK_US * 1e-6);
    out->tcp = limit / (limit + pieces * 2 * others * own->tcp_us * 1e-6);
}

/* 8 processes a machine, a core for each. */
static paper on_cluster(double p, const pace *own)
{
    double machines = p / 8 > 1 ? p / 8 : 1;
    double meeting = 4 * p * own->one_us * 1e-6; /* process 0: comes, proves, has met, may go */
    double most = 1 + log_2(p);                  /* links of process 0 */
    paper out = {.open_s = own->own_ms * 1e-3 + meeting +
                           own->rounds * gather_s(p, sizeof(dp__introduction), own->one_us),
                 .memory_kib = far_kib(p),
                 .files = p + 2 + DP__PENDING_MAX,
                 .letters_s = p * most * own->one_us * 1e-6 +
                              p * (double)sizeof(dp__tree_progress) * most / (LINK_GB * 1e9),
                 .heard_ms = 4 + 2 * log_2(p) * (4 + LINK_US * 1e-3),
                 .ring = 1,
                 .tcp = 1};
    if (machines > 1)
        sums_on_cluster(p, machines, own, &out);
    return out;
}

static void table(const pace *own)
{
    printf(
        "\n\nOn paper: 8 processes a machine, a core each; %g us and %g GB/s between machines.\n"
        "Here a message costs %.3g us, one of a collective over TCP %.3g; to open takes %.3g\n"
        "ms of each process and %d all_gathers of %zu bytes. Over TCP each process has %d files\n"
        "more for each other one. Gradients: %g MB.\n\n",
        LINK_US, LINK_GB, own->one_us, own->tcp_us, own->own_ms, own->rounds,
        sizeof(dp__introduction), DP__LANES, GRADIENTS * 1e-6);
    printf("     P   open, s  memory, KiB  files of 0  letters round, s  death, ms  ring, of the "
           "link  TCP, of the link\n");
    for (double p = 2; p <= 16384; p *= 2) {
        paper on = on_cluster(p, own);
        printf("%6.0f %9.3f %12.0f %11.0f %17.4f %10.1f %18.3f %16.3f%s%s\n", p, on.open_s,
               on.memory_kib, on.files, on.letters_s, on.heard_ms, on.ring, on.tcp,
               on.files > 1024 ? "  limit of files raised" : "",
               on.letters_s > 1 ? ", letters are late" : "");
    }
}

/* ---- a death each minute --------------------------------------------------------------------- */

enum { MEMBERS = 1024, ADAM_BYTES = 12, EVERY_S = 60 }; /* of a parameter, and of what Adam keeps */

typedef struct loss { /* seconds that a death takes away, in parts */
    double step, heard, recover, share, alike;
} loss;

/* The first process that is left has nine messages with each other one, and sends it the seats of
   all. Then they meet as they did at first. */
static double recover_s(double p, double link_gb, const pace *own)
{
    paper on = on_cluster(p, own);
    double seats = p * p * (double)(sizeof(dp__seat) + 1) / (link_gb * 1e9);
    return 9 * p * own->one_us * 1e-6 + seats + on.open_s;
}

static loss loss_of(double parameters, double link_gb, const pace *own)
{
    double state = ADAM_BYTES * parameters, travel = 2 * 4 * parameters / (link_gb * 1e9);
    paper on = on_cluster(MEMBERS, own);
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
        int some = sizes < figures[f].sizes ? sizes : figures[f].sizes;
        for (int i = 0; i < some; i++)
            model[i] = modelled(curves, f, 2 << i);
        missed += short_of(figures[f].name, measured[f], model, some);
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
        measure(sizes, once);
        for (int f = 0; f < FIGURES; f++)
            measured[f][sizes] = once[f];
    }
    for (int f = 0; f < FITTED; f++)
        curves[f] = through(measured[f], f);
    compare((const double(*)[SIZES])measured, curves, sizes);
    double cores = dp__os_core_count();
    const pace own = {.own_ms = measured[OPEN_MS][0],
                      .one_us = curves[GATHER_US].b * cores / 2,
                      .tcp_us = curves[TCP_BARRIER_US].b * cores,
                      .share = curves[SHARE_MS].b * 1e-3 * cores / SHARED_BYTES,
                      .alike = curves[ALIKE_MS].b * 1e-3 * cores / SHARED_BYTES,
                      .rounds = rounds};
    table(&own);
    minutes(&own);
    return EXIT_SUCCESS;
}
