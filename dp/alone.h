/* dp/alone.h - v0.2.0 - a program that has one process - MIT licence

   Part of dp.h, which includes it if DP_ONE_PROCESS is defined, in place of the rooms between
   processes. It keeps the promises of dp/processes.h for a job of one, and refuses what takes
   another process. What it says where it does not refuse is what those rooms say with one process.

   CONTENTS (search for the tag)
     >>refusing what takes another process
     >>lonely   what dp.h needs of the other processes, where there are none
     >>edges    the public functions
*/

#ifndef DP__ROOMS
#error "dp/alone.h is a part of dp.h: include dp.h"
#else

/* ==== >>refusing =================================================================================
   A program that a launcher has started several times must not train as many models, each of which
   overwrites the files of the others.                                                           */

static const char dp__one_process[] =
    "this program was compiled with DP_ONE_PROCESS: it has one process";

static dp_status dp__refuse_others(const char *fn)
{
    return dp_error(DP_ERR_UNSUPPORTED, "%s: %s", fn, dp__one_process);
}

/* Checks that no launcher has started others. `out`: its name. */
static dp_status dp__check_launched_alone(const char **out)
{
    const dp__launcher *launcher;
    int process, count;
    *out = "none";
    DP_TRY(dp__launcher_find(&launcher));
    if (launcher == NULL)
        return DP_OK;
    *out = launcher->name;
    DP_TRY(dp__launcher_place(launcher, &process, &count));
    if (count == 1)
        return DP_OK;
    return dp_error(DP_ERR_UNSUPPORTED,
                    "dp_open: %s is %d: a launcher has started several processes, and %s. "
                    "DP_LAUNCH=none says that there is no launcher",
                    launcher->count, count, dp__one_process);
}

/* Checks that nobody asks for other processes. `out`: what is known of the launcher. */
static dp_status dp__check_alone_in_job(const dp_config *config, const char **out)
{
    bool own = config->bootstrap.all_gather != NULL;
    *out = own ? "bootstrap" : "none";
    if (config->bootstrap.process_count > 1)
        return dp_error(DP_ERR_UNSUPPORTED, "dp_open: bootstrap.process_count is %d, and %s",
                        config->bootstrap.process_count, dp__one_process);
    if (own || config->local_only)
        return DP_OK;
    if (dp__comes_later())
        return dp_error(DP_ERR_UNSUPPORTED, "dp_open: DP_REJOIN is set, and %s", dp__one_process);
    return dp__check_launched_alone(out);
}

/* ==== >>lonely ===================================================================================
   What dp.h needs of the other processes, where there are none.                                 */

static dp__purpose dp__journal_for(const dp__lane *lane, dp__purpose purpose)
{
    (void)lane, (void)purpose;
    return dp__no_purpose;
}

static dp_status dp__journal_begin(const dp__lane *lane, const char *by, const dp_coll_call *call)
{
    (void)lane, (void)by, (void)call;
    return DP_OK;
}

static dp_status dp__journal_end(const dp__lane *lane, dp_status status)
{
    (void)lane;
    return status;
}

static dp_status dp__journal_heard(const dp__lane *lane)
{
    (void)lane;
    return DP_OK;
}

static uint64_t dp__journal_waited_ns(const dp__lane *lane)
{
    (void)lane;
    return 0;
}

static void dp__job_late(const dp_ctx *ctx, dp_late_info *out)
{
    (void)ctx, (void)out;
}

static int dp__carriers(const dp_coll_ops **out)
{
    (void)out;
    return 0;
}

static dp_status dp__open_alone(const dp_config *config, const char *launcher, dp_ctx **out)
{
    dp__open_attempt opening = {
        .launcher = launcher, .near = dp__no_neighbours, .epoch = dp__os_wall_ns()};
    return dp__open_ctx(config, &opening, out);
}

static dp_status dp__open_joined(const dp_config *config, dp_ctx **out)
{
    dp_config own = *config;
    const char *launcher;
    int timeout_ms;
    DP_TRY(dp__join_timeout(&own, &timeout_ms));
    DP_TRY(dp__check_alone_in_job(&own, &launcher));
    return dp__open_alone(&own, launcher, out);
}

static dp_status dp__open_with_others(dp__open_attempt *opening, dp_ctx *ctx, dp_status status)
{
    (void)opening;
    return status == DP_OK ? dp__ranks_open(ctx) : status;
}

static bool dp__catches_up(const dp_ctx *ctx)
{
    (void)ctx;
    return false;
}

static dp_status dp__params_share(const char *fn, dp_scope *temp, dp_module *wrapper)
{
    (void)fn, (void)temp, (void)wrapper;
    return DP_OK;
}

static void dp__nothing_here(const dp_ctx *ctx, char *text, size_t bytes)
{
    (void)ctx, (void)bytes;
    text[0] = '\0';
}

static void dp__nothing_logged(const dp_ctx *ctx)
{
    (void)ctx;
}

static void dp__nobody_told(dp_ctx *ctx)
{
    (void)ctx;
}

static void dp__nobody_hears(dp_ctx *ctx, const char *text)
{
    (void)ctx, (void)text;
}

static const dp__failing dp__failing_job = {dp__nothing_here, dp__nothing_logged, dp__nobody_hears,
                                            dp__nobody_told};

static void dp__watchdog_end(dp_ctx *ctx)
{
    (void)ctx;
}

static void dp__job_leave(const dp_ctx *ctx)
{
    (void)ctx;
}

static void dp__mailbox_close(dp_ctx *ctx)
{
    (void)ctx;
}

static void dp__world_close(dp_ctx *ctx, bool own)
{
    (void)ctx, (void)own;
}

static void dp__world_free(dp_ctx *ctx, bool own)
{
    (void)ctx, (void)own;
}

static void dp__world_let_go(const dp_ctx *ctx)
{
    (void)ctx;
}

/* ==== >>edges ====================================================================================
   The public functions of the rooms that are left out.                                          */

DP_API void dp_tag(dp_ctx *ctx, const char *text)
{
    (void)text;
    (void)dp__check_open(__func__, ctx);
}

DP_API size_t dp_recent_collectives(const dp_ctx *ctx, char *text, size_t bytes)
{
    if (text != NULL && bytes > 0)
        text[0] = '\0';
    (void)dp__check_open(__func__, ctx);
    return 0;
}

DP_API dp_status dp_spawn(int count, dp_status (*fn)(void *user), void *user)
{
    (void)user;
    DP_TRY(dp__spawn_check(count, fn));
    return dp__refuse_others(__func__);
}

static bool dp__fits_nobody(const dp_comm_config *config)
{
    (void)config;
    return false;
}

static dp_status dp__opens_nothing(const dp_host *host, const dp_comm_config *config, dp_comm **out)
{
    (void)host, (void)config, (void)out;
    return dp__refuse_others("dp_open");
}

static void dp__closes_nothing(dp_comm *comm)
{
    (void)comm;
}

static dp_status dp__runs_nothing(dp_comm *comm, const dp_coll_call *call)
{
    (void)comm, (void)call;
    return dp__refuse_others("dp_open");
}

/* A table may be in a list of the user's, where it serves nobody. */
DP_API const dp_coll_ops *dp_shm_coll(void)
{
    static const dp_coll_ops ops = {.head = DP_TABLE(dp_coll_ops),
                                    .name = "none",
                                    .fits = dp__fits_nobody,
                                    .open = dp__opens_nothing,
                                    .close = dp__closes_nothing,
                                    .verbs = DP_COLL_VERBS,
                                    .run = dp__runs_nothing};
    return &ops;
}

DP_API const dp_coll_ops *dp_tcp_coll(void)
{
    return dp_shm_coll();
}

DP_API dp_status dp_messages_begin(dp_ctx *ctx, dp_message *messages, size_t count)
{
    (void)messages, (void)count;
    DP_TRY(dp__check_ctx(__func__, ctx));
    return dp__refuse_others(__func__);
}

DP_API dp_status dp_messages_end(dp_ctx *ctx, dp_message *messages, size_t count)
{
    (void)messages, (void)count;
    DP_TRY(dp__check_ctx(__func__, ctx));
    return dp__refuse_others(__func__);
}

DP_API dp_status dp_messages_test(dp_ctx *ctx, dp_message *messages, size_t count)
{
    (void)messages, (void)count;
    DP_TRY(dp__check_ctx(__func__, ctx));
    return dp__refuse_others(__func__);
}

DP_API dp_status dp_send(dp_ctx *ctx, const dp_tensor *tensor, int to, int tag)
{
    (void)tensor, (void)to, (void)tag;
    DP_TRY(dp__check_ctx(__func__, ctx));
    return dp__refuse_others(__func__);
}

DP_API dp_status dp_recv(dp_ctx *ctx, const dp_tensor *tensor, int from, int tag)
{
    (void)tensor, (void)from, (void)tag;
    DP_TRY(dp__check_ctx(__func__, ctx));
    return dp__refuse_others(__func__);
}

/* No parameters are shared. */
DP_API dp_status dp_edit_begin(dp_module *module, dp_status status)
{
    DP_TRY(dp__check_unshared(__func__, module));
    return status;
}

DP_API dp_status dp_edit_shares(dp_module *module)
{
    return dp__check_unshared(__func__, module);
}

DP_API dp_status dp_edit_end(dp_module *module, dp_status status)
{
    DP_TRY(dp__check_unshared(__func__, module));
    return status;
}

DP_API dp_status dp__open_group(dp_ctx *ctx, int number, const dp_config *config,
                                size_t config_bytes, int version, dp_ctx **out)
{
    static const char fn[] = "dp_open_group";
    dp_config own = {.local_only = false};
    dp_ctx *made = NULL;
    DP_TRY(dp__check_ctx(fn, ctx));
    DP_TRY(dp__check_pointer(fn, "out", out));
    DP_TRY(dp__check_caller(fn, config_bytes, version));
    if (config != NULL)
        own = *config;
    DP_TRY(dp__check_group(fn, number, &own));
    dp__group_resolve(ctx, 1, &own);
    dp_status status = number >= 0 ? dp__open_alone(&own, "group", &made) : DP_OK;
    if (status != DP_OK)
        return dp_error(status, "%s: %s", fn, dp__unnamed("dp_open", dp_last_error()));
    if (made != NULL)
        dp__log_opened(made);
    *out = made;
    return DP_OK;
}

static dp_status dp__check_recovers(const char *fn)
{
    return dp_error(DP_ERR_STATE, "%s: config.recovers was not set, or there was one process: %s",
                    fn, dp__one_process);
}

DP_API dp_status dp_recover(dp_ctx *ctx)
{
    DP_TRY(dp__check_open(__func__, ctx));
    return dp__check_recovers(__func__);
}

DP_API dp_status dp_admit(dp_ctx *ctx, bool *out_came)
{
    DP_TRY(dp__check_ctx(__func__, ctx));
    DP_TRY(dp__check_pointer(__func__, "out_came", out_came));
    DP_TRY(dp__check_between_steps(__func__, ctx));
    if (!ctx->config.recovers)
        return dp__check_recovers(__func__);
    *out_came = false;
    return DP_OK;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
