/* environment.h - what stands in the environment when a context opens: variables of launchers,
   addresses, lists of machines and devices, and whatever a user has mistyped. It is refused with a
   sentence, or it means what a reader would take it for. For who has included dp.h with its
   implementation: nobody is met. */

#ifndef ENVIRONMENT_H
#define ENVIRONMENT_H

#include "fuzz.h"

enum { MOST_OPEN = 4 };

static const char *const variables[] = {"DP_LAUNCH",
                                        "DP_ADDR",
                                        "DP_SECRET",
                                        "DP_DEVICES",
                                        "DP_SIMD",
                                        "DP_TRACE",
                                        "DP_DEBUG",
                                        "DP_PROCESS",
                                        "DP_PROCESS_COUNT",
                                        "DP_LOCAL_PROCESS",
                                        "DP_LOCAL_PROCESS_COUNT",
                                        "RANK",
                                        "WORLD_SIZE",
                                        "LOCAL_RANK",
                                        "LOCAL_WORLD_SIZE",
                                        "MASTER_ADDR",
                                        "MASTER_PORT",
                                        "OMPI_COMM_WORLD_RANK",
                                        "OMPI_COMM_WORLD_SIZE",
                                        "OMPI_COMM_WORLD_LOCAL_RANK",
                                        "OMPI_COMM_WORLD_LOCAL_SIZE",
                                        "PMI_RANK",
                                        "PMI_SIZE",
                                        "MPI_LOCALRANKID",
                                        "MPI_LOCALNRANKS",
                                        "PMI_FD",
                                        "PMI_JOBID",
                                        "SLURM_PROCID",
                                        "SLURM_NTASKS",
                                        "SLURM_LOCALID",
                                        "SLURM_STEP_ID",
                                        "SLURM_STEP_NODELIST",
                                        "SLURM_STEP_NUM_NODES",
                                        "DP_PORTS",
                                        "DP_INTERFACE",
                                        "DP_TIMEOUT",
                                        "DP_CONNECTIONS",
                                        "DP_PROCESS_LIMIT"};
enum { VARIABLES = sizeof variables / sizeof variables[0] };

static int opened; /* devices of a context */

/* As many of the CPU's devices as can be waited for. */
static dp_status open_few(const dp_host *host, int index, dp_dev **out)
{
    if (++opened > MOST_OPEN)
        return dp_error(DP_ERR_NO_DEVICE, "device %d is one too many", index);
    return dp_cpu()->open(host, index, out);
}

/* A variable is a byte that says which, and all up to the end of a line. setenv would keep every
   value for ever. */
static void set_variable(fuzz *in, char *entry, size_t room)
{
    size_t count = strlen(entry);
    if (strcmp(entry, "DP_TRACE=") == 0) /* to a place where nothing can be written */
        count += (size_t)snprintf(entry + count, room - count, "/proc/self/none/");
    while (in->at < in->bytes && in->data[in->at] != '\n' && count + 1 < room)
        entry[count++] = (char)in->data[in->at++];
    in->at += in->at < in->bytes;
    entry[count] = '\0';
}

static void set_environment(fuzz *in)
{
    static char texts[VARIABLES][512], *list[VARIABLES + 1];
    list[0] = NULL;
    memset(texts, 0, sizeof texts);
    for (size_t count = 0; in->at < in->bytes;) {
        int which = fuzz_next(in, VARIABLES);
        if (texts[which][0] == '\0')
            list[count++] = texts[which];
        list[count] = NULL;
        snprintf(texts[which], sizeof texts[which], "%s=", variables[which]);
        set_variable(in, texts[which], sizeof texts[which]);
    }
    environ = list;
}

/* An empty one is none. */
static const char *text_of(const char *name)
{
    const char *text = name != NULL ? getenv(name) : NULL;
    return text != NULL && text[0] != '\0' ? text : NULL;
}

static void check_number(const char *name, int got)
{
    const char *text = text_of(name);
    FUZZ_CHECK(text == NULL || atoll(text) == got);
}

static void check_where(const dp__launch *launch)
{
    FUZZ_CHECK(memchr(launch->host, '\0', sizeof launch->host) != NULL);
    FUZZ_CHECK(memchr(launch->place, '\0', sizeof launch->place) != NULL);
    FUZZ_CHECK(launch->process_count == 1 || launch->place[0] != '\0');
    FUZZ_CHECK(launch->host[0] == '\0' || launch->process_count == 1 ||
               (launch->port > 0 && launch->port_count > 0 &&
                launch->port + launch->port_count - 1 <= DP__PORT_MAX));
}

static void try_launch(void)
{
    dp__launch launch;
    dp_status status = dp__launch_read("", &launch);
    FUZZ_CHECK(status == DP_OK || status == DP_ERR_INVALID || status == DP_ERR_UNSUPPORTED);
    FUZZ_CHECK(status == DP_OK || strncmp(dp_last_error(), "dp_open: ", 9) == 0);
    if (status != DP_OK)
        return;
    FUZZ_CHECK(launch.process >= 0 && launch.process < launch.process_count);
    FUZZ_CHECK(launch.local >= 0 && launch.local_count >= 0 &&
               launch.local_count <= launch.process_count);
    FUZZ_CHECK(launch.local_count == 0 || launch.local < launch.local_count);
    check_where(&launch);
    for (int i = 0; i < DP__LAUNCHERS; i++)
        if (strcmp(launch.name, dp__launchers[i].name) == 0) {
            check_number(dp__launchers[i].process, launch.process);
            check_number(dp__launchers[i].count, launch.process_count);
            check_number(dp__launchers[i].local, launch.local);
        }
}

/* "4" is four devices, "0,1" are two. */
static int devices_meant(const char *text)
{
    int count = 1;
    for (const char *at = text; *at != '\0'; at++)
        count += *at == ',' && at[1] != '\0';
    return strchr(text, ',') != NULL ? count : atoi(text);
}

static void try_open(void)
{
    static dp_device_ops table;
    const dp_device_ops *const backends[] = {&table, NULL};
    const dp_config config = {.backends = backends, .local_only = true, .thread_count = 1};
    const char *devices = text_of("DP_DEVICES");
    dp_ctx *ctx = NULL;
    dp_info info;
    table = *dp_cpu();
    table.open = open_few;
    opened = 0;
    dp_status status = dp_open(&config, &ctx);
    FUZZ_CHECK((status == DP_OK) == (ctx != NULL) && dp_status_class(status) != DP_CLASS_JOB);
    FUZZ_CHECK(status == DP_OK || dp_last_error()[0] != '\0');
    if (status != DP_OK)
        return;
    FUZZ_CHECK(dp_info_get(ctx, &info) == DP_OK && info.process_count == 1);
    FUZZ_CHECK(devices == NULL || info.local_count == devices_meant(devices));
    dp_close(ctx);
}

static void try_environment(fuzz *in)
{
    char **before = environ;
    set_environment(in);
    try_launch();
    try_open();
    environ = before;
}

#endif /* ENVIRONMENT_H */
