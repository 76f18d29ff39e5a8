/* doctor.c - what to look at when something is off: what there is, whether it works, how fast.

   A line for each finding: "ok", "note" where it is unusual or slow, "BAD" where it does not work,
   with what to do about it. The exit status is 0 unless something is BAD. Under a launcher all
   processes meet and add up; process 0 writes for all, others what is BAD with them.

   Build: cc -std=c11 -O2 examples/doctor.c examples/dp.c -o doctor -lpthread -lm
   GPUs:  add -DDP_USE_CUDA -DDP_DYNAMIC_LOAD -I/usr/local/cuda/include -ldl, and where there is an
          nccl.h -DDP_USE_NCCL; for AMD's -DDP_USE_HIP -DDP_DYNAMIC_LOAD -ldl, and -DDP_USE_RCCL
   MPI:   add -DDP_USE_MPI, and compile with mpicc
   Run:   ./doctor, and then as what is off was run: mpirun -n 4 ./doctor
   Prints:
   ok    compiled   dp.h 0.2.0 for CPUs
   ok    launcher   none: process 0 of 1, 0 of 1 on this machine
   ... nodes      threads ...
   ok    transport  ...
   ... switches   ...
   ... driver     ...
   ... /dev/shm   ... MiB...
   ... limits     open files ...
   ... cores      ... cores of ...
   ok    devices    ... x cpu, threads for each: ...
   ok    copies     GB/s to        0 (0: the host)
   ok    copies     from   0... */

#define _DEFAULT_SOURCE /* for clock_gettime, gethostname */
#include "../dp.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <time.h>
#include <unistd.h>

extern char **environ;

enum { ELEMENTS = 4 << 20, ROUNDS = 3 };

typedef enum verdict { OK, NOTE, BAD } verdict;

static struct doctor {
    int process, process_count; /* of the job */
    int bad, logged;            /* findings so far */
} self = {.process_count = 1};

DP_PRINTF(3, 4) static void say(verdict how, const char *what, const char *format, ...)
{
    static const char *const words[] = {"ok", "note", "BAD"};
    char text[1500], host[64] = "", who[100] = "";
    va_list args;
    self.bad += how == BAD;
    if (self.process != 0 && how != BAD)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    gethostname(host, sizeof host - 1);
    if (how == BAD && (self.process != 0 || self.process_count > 1))
        snprintf(who, sizeof who, "process %d on %s: ", self.process, host);
    printf("%-5s %-10s %s%s\n", words[how], what, who, text);
}

DP_PRINTF(3, 4) static void append(char *text, size_t room, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, room - used, format, args);
    va_end(args);
}

static void hear(const dp_log_record *record, void *user) /* what the library says by itself */
{
    (void)user;
    self.logged++;
    say(NOTE, "log", "%s", record->text);
}

static const dp_log ears = {.fn = hear, .level = DP_LOG_WARN};

static double seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- what was compiled in; NULL: it was not -------------------------------------------------- */

#if defined(DP_USE_CUDA)
static const dp_device_ops *(*const gpu_table)(void) = dp_cuda;
#elif defined(DP_USE_HIP)
static const dp_device_ops *(*const gpu_table)(void) = dp_hip;
#else
static const dp_device_ops *(*const gpu_table)(void) = NULL;
#endif
#if defined(DP_USE_NCCL)
static int (*const nccl_version)(char *text, size_t bytes) = dp_nccl_version;
#elif defined(DP_USE_RCCL)
static int (*const nccl_version)(char *text, size_t bytes) = dp_rccl_version;
#else
static int (*const nccl_version)(char *text, size_t bytes) = NULL;
#endif
#if defined(DP_USE_MPI)
static int (*const mpi_version)(char *text, int *length) = MPI_Get_library_version;
#else
static int (*const mpi_version)(char *text, int *length) = NULL;
#endif

/* The driver of the GPUs that were compiled in. */
#if defined(DP_USE_HIP)
static const char driver_version[] = "/sys/module/amdgpu/version", driver_device[] = "/dev/kfd";
static const char gpu_vendor[] = "AMD", gpu_flag[] = "--device /dev/kfd --device /dev/dri";
#else
static const char driver_version[] = "/proc/driver/nvidia/version";
static const char driver_device[] = "/dev/nvidiactl", gpu_vendor[] = "NVIDIA";
static const char gpu_flag[] = "--gpus all";
#endif

static void look_at_build(void)
{
    static char text[8192]; /* the most that an MPI has to say */
    int version = dp_version(), length;
    say(OK, "compiled", "dp.h %d.%d.%d for CPUs%s", version / 10000, version / 100 % 100,
        version % 100, gpu_table != NULL ? " and GPUs" : "");
    if (mpi_version != NULL && mpi_version(text, &length) == 0)
        say(OK, "mpi", "%.*s", (int)strcspn(text, ",\n"), text);
    if (nccl_version != NULL && (version = nccl_version(text, sizeof text)) != 0)
        say(OK, "nccl", "%d.%d.%d, %s", version / 10000, version / 100 % 100, version % 100, text);
    else if (gpu_table != NULL)
        say(NOTE, "nccl", "%s; GPUs of several processes need it",
            nccl_version != NULL ? text : "not compiled in (-DDP_USE_NCCL, -DDP_USE_RCCL)");
}

/* The files that libraries were loaded from; a name often has the version. */
static void look_at_libraries(void)
{
    static const char *const names[] = {"/libcuda.", "/libcudart.",   "/libnvrtc.",  "/libnccl.",
                                        "/libmpi.",  "/libamdhip64.", "/libhiprtc.", "/librccl."};
    char line[1200];
    FILE *maps = fopen("/proc/self/maps", "r");
    while (maps != NULL && fgets(line, sizeof line, maps) != NULL) {
        const char *path = strchr(line, '/'), *file = strrchr(line, '/');
        for (size_t i = 0; path != NULL && i < sizeof names / sizeof names[0]; i++)
            if (strncmp(file, names[i], strlen(names[i])) == 0 && strstr(line, " r-xp ") != NULL)
                say(OK, "loaded", "%.*s", (int)strcspn(path, "\n"), path);
    }
    if (maps != NULL)
        fclose(maps);
}

/* ---- the job --------------------------------------------------------------------------------- */

/* Until dp_open knows better: so that one process writes, even where they do not meet. */
static int presumed_process(void)
{
    static const char *const names[] = {"DP_PROCESS", "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK",
                                        "SLURM_PROCID"};
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (getenv(names[i]) != NULL)
            return atoi(getenv(names[i]));
    return 0;
}

static dp_status check(dp_ctx *ctx, const dp_tensor *tensor, double want)
{
    dp_stats stats;
    DP_TRY(dp_tensor_stats(ctx, tensor, &stats));
    double mean = stats.sum_squares / (double)dp_tensor_count(tensor);
    return mean == want * want
               ? DP_OK
               : dp_error(DP_ERR_MISMATCH, "the mean square is %g, and should be %g", mean,
                          want * want);
}

/* Each rank gives ones. */
static dp_status add_up(dp_ctx *ctx, const dp_info *info, dp_scope *scope, int64_t count,
                        double *out_best)
{
    dp_tensor in, out = {.data = NULL};
    dp_part *parts = dp_scope_alloc(scope, (size_t)info->local_count * sizeof *parts);
    if (parts == NULL)
        return DP_ERR_NO_MEMORY;
    for (int i = 0; i < info->local_count; i++) {
        dp_device device = dp_local_device(ctx, i);
        DP_TRY(dp_tensor_new(scope, device, DP_F32, DP_SHAPE(count), &in));
        DP_TRY(dp_tensor_new(scope, device, DP_F32, DP_SHAPE(count), &out));
        DP_TRY(dp_fill(ctx, &in, dp_int(1)));
        parts[i] = (dp_part){.send = in.data, .recv = out.data};
    }
    for (int round = 0; round < ROUNDS; round++) {
        DP_TRY(dp_barrier(ctx));
        double start = seconds();
        DP_TRY(dp_all_reduce(ctx, parts, (size_t)count, DP_F32, DP_OP_SUM));
        DP_TRY(dp_wait(ctx));
        double took = seconds() - start;
        *out_best = round == 0 || took < *out_best ? took : *out_best;
    }
    return check(ctx, &out, info->rank_count);
}

static void try_transport(dp_ctx *ctx, const dp_info *info)
{
    double small = 0, large = 0;
    dp_failure_info failure = {.here = ""};
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = add_up(ctx, info, scope, 1, &small);
    if (status == DP_OK)
        status = add_up(ctx, info, scope, ELEMENTS, &large);
    dp_scope_end(scope);
    (void)dp_failure(ctx, &failure);
    if (status == DP_OK)
        say(OK, "transport", "%s: %d rank%s add up 4 bytes in %.0f us, %d MiB in %.1f ms",
            info->coll_backend, info->rank_count, info->rank_count > 1 ? "s" : "", small * 1e6,
            ELEMENTS >> 18, large * 1e3);
    else
        say(BAD, "transport", "%s: %s%s%s", info->coll_backend, dp_last_error(),
            failure.here[0] != '\0' ? "; here: " : "", failure.here);
}

/* Whether threads keep to the nodes (NUMA) that their memory is on. */
static void look_at_nodes(const dp_info *info)
{
    static const char *const usual[] = {"one node", "one device", "config.unbound"};
    bool odd = info->node_count == 0;
    for (size_t i = 0; i < sizeof usual / sizeof usual[0]; i++)
        odd = odd && strcmp(info->binding, usual[i]) != 0;
    if (info->node_count > 0)
        say(OK, "nodes", "threads keep to the node of their device; %d in this process",
            info->node_count);
    else
        say(odd ? NOTE : OK, "nodes", "threads are not bound: %s%s", info->binding,
            odd ? "; a core is slower with memory of another node (numactl -H; a launcher's own "
                  "binding is as good, one node for each process)"
                : "");
}

static void try_job(void)
{
    dp_ctx *ctx;
    dp_info info;
    if (dp_open(&(dp_config){.log = ears}, &ctx) != DP_OK || dp_info_get(ctx, &info) != DP_OK) {
        say(BAD, "launcher", "%s", dp_last_error());
        return;
    }
    self.process = info.process;
    self.process_count = info.process_count;
    say(OK, "launcher", "%s: process %d of %d, %d of %d on this machine", info.launcher,
        info.process, info.process_count, info.machine_process, info.machine_process_count);
    look_at_nodes(&info);
    try_transport(ctx, &info);
    dp_close(ctx);
}

/* ---- the system ------------------------------------------------------------------------------ */

static void look_at_switches(void)
{
    static const char *const known[][2] = {
        {"DP_LAUNCH", "whose variables say which process this is; none: it is alone"},
        {"DP_ADDR", "where process 0 is"},
        {"DP_PORTS", "the ports at which processes may listen"},
        {"DP_INTERFACE", "the network between machines"},
        {"DP_TIMEOUT", "seconds that a process waits for another"},
        {"DP_CONNECTIONS", "over TCP, from each process to each"},
        {"DP_REJOIN", "this process joins others that run"},
        {"DP_PROCESS_LIMIT", "how many processes there may be, with those that join"},
        {"DP_DEVICES", "how many devices, or which"},
        {"DP_SIMD", "base: slower kernels for any CPU"},
        {"DP_NCCL", "from how many bytes NCCL carries; off: never"},
        {"DP_CACHE", "off: each start compiles the kernels for GPUs, which takes a second"},
        {"DP_PEERS", "off: GPUs copy through the host, not directly from each other"},
        {"DP_TOPOLOGY", "a folder that says which cores are near to which memory, for tests"},
        {"CUDA_VISIBLE_DEVICES", "there seem to be no other GPUs"},
        {"HIP_VISIBLE_DEVICES", "there seem to be no other GPUs"},
        {"ROCR_VISIBLE_DEVICES", "there seem to be no other GPUs"},
        {"CUDA_LAUNCH_BLOCKING", "1: nothing on a GPU runs beside anything else"},
        {"SLURM_JOB_ID", "an allocation, in which srun starts the processes"},
        {"OMP_NUM_THREADS", "threads of methods that use OpenMP"}};
    char text[1400] = "";
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (getenv(known[i][0]) != NULL)
            append(text, sizeof text, "%s='%s' (%s), ", known[i][0], getenv(known[i][0]),
                   known[i][1]);
    for (char **at = environ; *at != NULL; at++)
        if (strncmp(*at, "NCCL_", 5) == 0)
            append(text, sizeof text, "%s, ", *at);
    say(text[0] != '\0' ? NOTE : OK, "switches", "%s%s", text,
        text[0] != '\0' ? "which may be why, if you did not mean it" : "none is set");
}

static void look_at_driver(void)
{
    char line[200] = "";
    FILE *file = fopen(driver_version, "r");
    if (file != NULL && fgets(line, sizeof line, file) != NULL)
        line[strcspn(line, "\n")] = '\0';
    if (file != NULL)
        fclose(file);
    bool given = access(driver_device, F_OK) == 0;
    if (given && gpu_table == NULL)
        say(NOTE, "driver", "%s; but this program is for CPUs alone (-DDP_USE_CUDA)", line);
    else if (given && access(driver_device, R_OK | W_OK) != 0)
        say(BAD, "driver", "this user may not open %s: see its group and its mode", driver_device);
    else if (!given && line[0] != '\0')
        say(NOTE, "driver", "%s; but this container is given no GPU (docker %s)", line, gpu_flag);
    else
        say(OK, "driver", "%s%s%s", line, line[0] == '\0' ? "none for GPUs of " : "",
            line[0] == '\0' ? gpu_vendor : "");
}

static void look_at_shared_memory(void)
{
    struct statvfs room = {.f_blocks = 0};
    int failed = statvfs("/dev/shm", &room);
    unsigned long long all = (unsigned long long)room.f_blocks * room.f_frsize >> 20;
    unsigned long long left = (unsigned long long)room.f_bavail * room.f_frsize >> 20;
    bool small = failed != 0 || left < 512;
    say(small ? NOTE : OK, "/dev/shm", "%llu MiB, of which %llu are free%s", all, left,
        small ? ": dp.h needs none, but NCCL and MPI do, for several processes (docker "
                "--shm-size=1g or --ipc=host; look for what others have left there)"
              : "");
}

static void look_at_limits(void)
{
    bool fabric = access("/dev/infiniband", F_OK) == 0;
    struct rlimit files = {0}, locked = {0};
    getrlimit(RLIMIT_NOFILE, &files);
    getrlimit(RLIMIT_MEMLOCK, &locked);
    bool few = files.rlim_cur < 1024, held = fabric && locked.rlim_cur != RLIM_INFINITY;
    say(few || held ? NOTE : OK, "limits", "open files %llu%s%s",
        (unsigned long long)files.rlim_cur, few ? ": few (ulimit -n 65536)" : "",
        held ? "; InfiniBand has to lock more memory (ulimit -l unlimited)" : "");
}

static void look_at_cores(int cores)
{
    int all = (int)sysconf(_SC_NPROCESSORS_ONLN);
    say(cores < all ? NOTE : OK, "cores", "%d cores of %d%s", cores, all,
        cores < all ? ": by an affinity mask (mpirun --bind-to none, srun --cpus-per-task give "
                      "more) or a cgroup's quota (docker --cpus, Kubernetes' limits.cpu)"
                    : "");
}

/* ---- the devices of this machine ------------------------------------------------------------- */

static void look_at_gpu(dp_ctx *ctx, int index)
{
    dp_device_info gpu;
    if (dp_device_info_get(ctx, index, &gpu) != DP_OK) {
        say(BAD, "devices", "%d: %s", index, dp_last_error());
        return;
    }
    bool full = gpu.bytes_free < gpu.bytes_total / 10;
    say(full ? NOTE : OK, "devices", "%d: %s at %s, %.1f GiB, of which %.1f are free%s", index,
        gpu.name, gpu.bus_id, (double)gpu.bytes_total / (1 << 30),
        (double)gpu.bytes_free / (1 << 30), full ? " (nvidia-smi says who has the rest)" : "");
}

/* The library checks a pair of GPUs at its first copy. */
static dp_status copy(dp_ctx *ctx, dp_scope *scope, dp_device from, dp_device to, double *out_speed)
{
    dp_tensor src, dst;
    DP_TRY(dp_tensor_new(scope, from, DP_F32, DP_SHAPE(ELEMENTS), &src));
    DP_TRY(dp_tensor_new(scope, to, DP_F32, DP_SHAPE(ELEMENTS), &dst));
    DP_TRY(dp_fill(ctx, &src, dp_int(from.index + 3)));
    DP_TRY(dp_fill(ctx, &dst, dp_int(0)));
    for (int round = 0; round < ROUNDS; round++) {
        DP_TRY(dp_wait(ctx));
        double start = seconds();
        DP_TRY(dp_copy(ctx, &dst, &src, NULL));
        DP_TRY(dp_wait(ctx));
        double speed = ELEMENTS * 4e-9 / (seconds() - start);
        *out_speed = round == 0 || speed > *out_speed ? speed : *out_speed;
    }
    return check(ctx, &dst, from.index + 3);
}

/* In GB/s; 0: it fails. Behind the devices comes the host. */
static double try_copy(dp_ctx *ctx, int count, int from, int to)
{
    const dp_device host = {0, 0};
    double speed = 0;
    dp_scope *scope = dp_scope_begin(ctx);
    dp_status status = copy(ctx, scope, from < count ? dp_local_device(ctx, from) : host,
                            to < count ? dp_local_device(ctx, to) : host, &speed);
    if (status != DP_OK)
        say(BAD, "copies", "from %d to %d: %s", from, to, dp_last_error());
    dp_scope_end(scope);
    return status == DP_OK ? speed : 0;
}

static void try_copies(dp_ctx *ctx, int count)
{
    char row[1000] = "";
    int logged = self.logged;
    for (int to = 0; to <= count; to++)
        append(row, sizeof row, "%8d", to);
    say(OK, "copies", "GB/s to %s (%d: the host)", row, count);
    for (int from = 0; from <= count; from++) {
        row[0] = '\0';
        for (int to = 0; to <= count; to++)
            append(row, sizeof row, "%8.1f", try_copy(ctx, count, from, to));
        say(OK, "copies", "from %3d%s", from, row);
    }
    if (self.logged > logged)
        say(NOTE, "copies",
            "nvidia-smi topo -p2p r says which pairs the driver allows; an IOMMU, "
            "or ACS in the firmware's settings, may be what forbids others");
}

static void try_devices(void)
{
    const dp_device_ops *tables[] = {gpu_table != NULL ? gpu_table() : dp_cpu(), NULL};
    const dp_config config = {.local_only = true, .backends = tables, .log = ears};
    dp_ctx *ctx = NULL;
    dp_info info;
    dp_device_info device;
    dp_status status = dp_open(&config, &ctx);
    look_at_libraries();
    if (status != DP_OK && gpu_table != NULL) {
        say(access("/dev/nvidiactl", F_OK) == 0 ? BAD : NOTE, "gpus", "%s", dp_last_error());
        tables[0] = dp_cpu();
        status = dp_open(&config, &ctx);
    }
    if (status != DP_OK || dp_info_get(ctx, &info) != DP_OK ||
        dp_device_info_get(ctx, 0, &device) != DP_OK) {
        say(BAD, "devices", "%s", dp_last_error());
        return;
    }
    look_at_cores(info.core_count);
    if (device.host_memory)
        say(OK, "devices", "%d x cpu, threads for each: %d", info.local_count,
            info.threads_per_device);
    for (int i = 0; !device.host_memory && i < info.local_count; i++)
        look_at_gpu(ctx, i);
    try_copies(ctx, device.host_memory ? 0 : info.local_count);
    dp_close(ctx);
}

int main(void)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    self.process = presumed_process();
    look_at_build();
    try_job();
    look_at_switches();
    look_at_driver();
    look_at_shared_memory();
    look_at_limits();
    if (self.process == 0)
        try_devices();
    return self.bad > 0;
}
