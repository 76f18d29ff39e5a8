/* dp/launchers.h - v0.2.0 - which launcher has started this process - MIT licence

   Part of dp.h, which includes it. A launcher says in the environment which process this is, and
   how many there are.

   CONTENTS (search for the tag)
     >>launchers   what each of them sets
     >>environment what is set
*/

#ifndef DP__ROOMS
#error "dp/launchers.h is a part of dp.h: include dp.h"
#else

/* ==== >>launchers ==============================================================================
   One table of what launchers set; the first of them whose variables are there decides. An
   incomplete set is an error: something was lost, and every process would train by itself and
   overwrite what the others write.                                                              */

enum { DP__PROCESSES_MAX = 1 << 20 };

typedef struct dp__launcher {
    const char *name;                /* in DP_LAUNCH and dp_info */
    const char *process, *count;     /* variables: which of how many this is */
    const char *local, *local_count; /* among those of its machine; NULL: it does not say */
    const char *host, *port;         /* of process 0, if the launcher says that */
    const char *job[2];              /* what distinguishes this job from all others */
    const char *again;               /* and this run of it from earlier ones */
    const char *channel; /* a descriptor that the launcher left to each of its processes */
    const char *step, *pseudo_step[2]; /* if it is not set, or one of these, nothing was started */
} dp__launcher;

/* Slurm sets its variables for salloc and sbatch too, where one shell runs: only what srun starts
   has a step. The steps in which those shells themselves run have numbers of their own. */
static const dp__launcher dp__launchers[] = {
    {.name = "dp",
     .process = "DP_PROCESS",
     .count = "DP_PROCESS_COUNT",
     .local = "DP_LOCAL_PROCESS",
     .local_count = "DP_LOCAL_PROCESS_COUNT"},
    {.name = "torchrun",
     .process = "RANK",
     .count = "WORLD_SIZE",
     .local = "LOCAL_RANK",
     .local_count = "LOCAL_WORLD_SIZE",
     .host = "MASTER_ADDR",
     .port = "MASTER_PORT",
     .job = {"TORCHELASTIC_RUN_ID"},
     .again = "TORCHELASTIC_RESTART_COUNT"},
    {.name = "openmpi",
     .process = "OMPI_COMM_WORLD_RANK",
     .count = "OMPI_COMM_WORLD_SIZE",
     .local = "OMPI_COMM_WORLD_LOCAL_RANK",
     .local_count = "OMPI_COMM_WORLD_LOCAL_SIZE",
     .job = {"PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"}},
    {.name = "mpich",
     .process = "PMI_RANK",
     .count = "PMI_SIZE",
     .local = "MPI_LOCALRANKID",
     .local_count = "MPI_LOCALNRANKS",
     .job = {"PMI_JOBID"},
     .channel = "PMI_FD"},
    {.name = "slurm",
     .process = "SLURM_PROCID",
     .count = "SLURM_NTASKS",
     .local = "SLURM_LOCALID",
     .job = {"SLURM_JOB_ID", "SLURM_STEP_ID"},
     .again = "SLURM_RESTART_COUNT",
     .step = "SLURM_STEP_ID",
     .pseudo_step = {"4294967290", "4294967291"}},
};

enum { DP__LAUNCHERS = sizeof dp__launchers / sizeof dp__launchers[0] };

/* ==== >>environment ==============================================================================
   What is set, checked.                                                                         */

static dp_status dp__env_number(const char *variable, int least, int most, int *out)
{
    const char *set = dp__os_env(variable), *text = set != NULL ? set : "", *at = text;
    int64_t number = 0;
    for (; *at >= '0' && *at <= '9' && number <= most; at++)
        number = number * 10 + (*at - '0');
    if (at == text || *at != '\0' || number < least || number > most)
        return dp_error(DP_ERR_INVALID, "dp_open: %s is '%s', not a whole number from %d to %d",
                        variable, text, least, most);
    *out = (int)number;
    return DP_OK;
}

static dp_status dp__half_a_set(const char *there, const char *missing)
{
    return dp_error(DP_ERR_INVALID,
                    "dp_open: %s is '%s' and %s is not set: a launcher sets both. If there is "
                    "none, DP_LAUNCH=none says so",
                    there, dp__os_env(there), missing);
}

/* This process joins others that run already. */
static bool dp__comes_later(void)
{
    return dp__os_env("DP_REJOIN") != NULL;
}

/* Two variables, which are set both or not at all: which of how many. */
DP__COLD static dp_status dp__env_place(const char *place, const char *count, int *out_place,
                                        int *out_count)
{
    bool has_place = dp__os_env(place) != NULL, has_count = dp__os_env(count) != NULL;
    if (!has_place && !has_count)
        return DP_OK;
    if (has_place != has_count)
        return dp__half_a_set(has_place ? place : count, has_place ? count : place);
    DP_TRY(dp__env_number(count, 1, DP__PROCESSES_MAX, out_count));
    DP_TRY(dp__env_number(place, 0, DP__PROCESSES_MAX, out_place));
    if (*out_place >= *out_count && !dp__comes_later())
        return dp_error(DP_ERR_INVALID,
                        "dp_open: %s is %d and %s is %d: they contradict each other, as the first "
                        "one counts from 0",
                        place, *out_place, count, *out_count);
    return DP_OK;
}

static bool dp__launcher_ran(const dp__launcher *launcher)
{
    const char *step = launcher->step != NULL ? dp__os_env(launcher->step) : NULL;
    if (launcher->step == NULL)
        return dp__os_env(launcher->process) != NULL || dp__os_env(launcher->count) != NULL ||
               dp__os_env(launcher->local) != NULL || dp__os_env(launcher->local_count) != NULL;
    return step != NULL && strcmp(step, launcher->pseudo_step[0]) != 0 &&
           strcmp(step, launcher->pseudo_step[1]) != 0;
}

/* NULL when no launcher started this process, or DP_LAUNCH says so. */
DP__COLD static dp_status dp__launcher_find(const dp__launcher **out)
{
    const char *only = dp__os_env("DP_LAUNCH");
    *out = NULL;
    if (only != NULL && strcmp(only, "none") == 0)
        return DP_OK;
    for (int i = 0; i < DP__LAUNCHERS && *out == NULL; i++) {
        const dp__launcher *launcher = &dp__launchers[i];
        if (only != NULL ? strcmp(only, launcher->name) == 0 : dp__launcher_ran(launcher))
            *out = launcher;
    }
    if (only != NULL && *out == NULL)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_LAUNCH is '%s', not none, dp, torchrun, openmpi, mpich or "
                        "slurm",
                        only);
    return DP_OK;
}

/* Which process of how many this is. */
DP__COLD static dp_status dp__launcher_place(const dp__launcher *launcher, int *out_process,
                                             int *out_count)
{
    *out_count = 0;
    DP_TRY(dp__env_place(launcher->process, launcher->count, out_process, out_count));
    if (*out_count > 0)
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "dp_open: %s and %s are not set", launcher->process,
                    launcher->count);
}

/* Takes the time-out and the grace of the program, else those of its user. A wrong number is an
   error later, when the others can be told. */
static dp_status dp__join_timeout(dp_config *config, int *out_ms)
{
    int seconds = DP__TIMEOUT_MS / 1000;
    if (config->timeout_ms == 0 && dp__os_env("DP_TIMEOUT") != NULL)
        DP_TRY(dp__env_number("DP_TIMEOUT", 1, INT_MAX / 1000, &seconds));
    if (config->timeout_ms == 0)
        config->timeout_ms = seconds * 1000;
    if (config->grace_ms == 0 && dp__os_env("DP_GRACE") != NULL) {
        DP_TRY(dp__env_number("DP_GRACE", 0, INT_MAX / 1000, &seconds));
        config->grace_ms = seconds * 1000;
    }
    *out_ms = config->timeout_ms > 0 ? config->timeout_ms : DP__TIMEOUT_MS;
    return DP_OK;
}

enum { DP__SPAWN_MAX = 4096 };

/* Checks that this process may start others. */
static dp_status dp__spawn_check(int count, dp_status (*fn)(void *user))
{
    const dp__launcher *launcher;
    if (fn == NULL)
        return dp_error(DP_ERR_INVALID, "dp_spawn: fn is NULL");
    if (count < 1 || count > DP__SPAWN_MAX)
        return dp_error(DP_ERR_INVALID, "dp_spawn: count is %d, not 1 to %d", count, DP__SPAWN_MAX);
    for (int i = 0; i < DP__LIVE_MAX; i++) {
        const dp_ctx *ctx = atomic_load(&dp__live[i]);
        if (ctx != NULL && ctx->fork_count == dp__os_fork_count())
            return dp_error(DP_ERR_STATE, "dp_spawn: a context is open, and its threads would not "
                                          "be in the new processes: close it before");
    }
    if (dp__launcher_find(&launcher) == DP_OK && launcher != NULL)
        return dp_error(DP_ERR_STATE,
                        "dp_spawn: this process is one of several already: '%s' has started it",
                        launcher->name);
    const char *obstacle = dp__os_let_threads_go();
    return obstacle == NULL ? DP_OK : dp_error(DP_ERR_STATE, "dp_spawn: %s", obstacle);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
