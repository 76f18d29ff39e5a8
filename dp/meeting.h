/* dp/meeting.h - v0.2.0 - dp_open of a job, step by step - MIT licence

   Part of dp.h, which includes it. A context is opened by dp/open.h. Here its process finds the
   others, agrees with them on every step, and leaves them in the end. In order: dp__open_joined
   reads the launch, and meets the others in a tree (dp/rendezvous.h); all gather which of them are
   near; with config.recovers each gets a port and a voter (dp/voting.h); then come the board, a
   communicator for each lane, and a port for messages, if neither memory nor MPI carries them. Each
   step is one gathering, and fails for all or for none.

   CONTENTS (search for the tag)
     >>meeting with the other processes, which agree on every step
     >>trees   of processes that a bootstrap of the user's has brought together; the voter
     >>joining the job that a launcher has started
     >>leaving it
*/

#ifndef DP__ROOMS
#error "dp/meeting.h is a part of dp.h: include dp.h"
#else

/* ==== >>meeting ================================================================================
   With other processes every step is agreed upon, so that all get a context or none.            */

typedef struct dp__open_report { /* for dp__agree: what every process tells the others */
    uint64_t machine, epoch;     /* epoch: see dp__open_attempt */
    int32_t version, status;
    int32_t local_count, process_id;
    int32_t coll;   /* place of the table that it chose; -1: none yet */
    int32_t staged; /* that carries copies in host memory */
    int32_t shards, recovers;
} dp__open_report;

typedef struct dp__meeting { /* the processes of a job */
    dp__open_attempt opening;
    const dp_bootstrap *boot;
    dp__open_report own, *all; /* all: NULL in one process */
    const dp__launch *launch;
    dp__voter *voter; /* of a process that joins a job that runs; else NULL */
} dp__meeting;

/* Every process takes part each time, even one that failed: so all fail together, and nobody
   waits. */
static dp_status dp__agree(dp__meeting *meeting, dp_status own)
{
    const dp_bootstrap *boot = meeting->boot;
    char said[DP__TEXT_BYTES]; /* this process' own reason must survive the others' failure */
    memcpy(said, dp_last_error(), sizeof said);
    meeting->own.status = (int32_t)own;
    dp_status status = dp__boot_gather(boot, &meeting->own, meeting->all, sizeof meeting->own);
    if (own != DP_OK)
        return dp_error(own, "%s", said);
    DP_TRY(status);
    for (int i = 0; i < boot->process_count; i++) {
        const dp__open_report *other = &meeting->all[i];
        if (other->version != DP_VERSION)
            return dp_error(DP_ERR_MISMATCH, "dp_open: process %d has dp.h %d, process %d has %d",
                            boot->process, DP_VERSION, i, (int)other->version);
        if (other->shards != meeting->own.shards)
            return dp_error(DP_ERR_MISMATCH, "dp_open: process %d has %d shards, process %d has %d",
                            boot->process, (int)meeting->own.shards, i, (int)other->shards);
        if (other->recovers != meeting->own.recovers)
            return dp_error(
                DP_ERR_MISMATCH, "dp_open: process %d has config.recovers, process %d has not",
                other->recovers ? i : boot->process, other->recovers ? boot->process : i);
        if (other->status != DP_OK)
            return dp_error(DP_ERR_REMOTE, "dp_open: process %d of %d failed: %s", i,
                            boot->process_count, dp_status_text((dp_status)other->status));
        if (other->staged != meeting->own.staged)
            return dp_error(DP_ERR_MISMATCH,
                            "dp_open: process %d has devices whose memory the host does not reach, "
                            "process %d has others: no table of collectives serves both",
                            other->staged ? i : boot->process, other->staged ? boot->process : i);
        if (other->coll != meeting->own.coll)
            return dp_error(DP_ERR_MISMATCH,
                            "dp_open: process %d has its table of collectives in "
                            "place %d, process %d in place %d",
                            boot->process, (int)meeting->own.coll, i, (int)other->coll);
    }
    return DP_OK;
}

static bool dp__one_machine(const dp__meeting *meeting)
{
    bool one = true;
    for (int i = 0; i < meeting->boot->process_count; i++)
        one = one && meeting->all[i].machine == meeting->own.machine;
    return one;
}

static dp_status dp__meeting_job(dp_ctx *ctx, const dp__meeting *meeting, dp__job **out)
{
    size_t bytes = (size_t)meeting->boot->process_count * sizeof(dp__system_process);
    dp__system_process *bodies = dp__os_alloc(bytes, _Alignof(dp__system_process), NULL);
    dp_status status = bodies == NULL
                           ? dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for a job")
                           : dp__job_make(ctx, &ctx->config.bootstrap, dp__boot_gather, out);
    for (int i = 0; i < meeting->boot->process_count && status == DP_OK; i++) {
        (*out)->firsts[i + 1] = (*out)->firsts[i] + meeting->all[i].local_count;
        bodies[i] = (dp__system_process){meeting->all[i].machine, meeting->all[i].process_id, i};
    }
    if (status == DP_OK)
        dp__job_twins(*out, bodies);
    dp__os_free(bodies, bytes, NULL);
    return status;
}

/* Opens the ranks of the whole job, and the communicator. Each step is agreed upon before the next.
   */
static dp_status dp__job_open(dp_ctx *ctx, dp__meeting *meeting)
{
    dp__choice choice = {.place = 0};
    dp__job *job = NULL;
    bool one_machine = dp__one_machine(meeting);
    for (int i = 0; i < meeting->boot->process_count; i++) {
        ctx->info.rank_first += i < meeting->boot->process ? meeting->all[i].local_count : 0;
        ctx->info.rank_count += i != meeting->boot->process ? meeting->all[i].local_count : 0;
    }
    dp_status status = dp__comm_config(ctx, &ctx->config.bootstrap, one_machine, &choice.config);
    if (status == DP_OK)
        status = dp__meeting_job(ctx, meeting, &job);
    if (status == DP_OK)
        job->epoch = meeting->all[0].epoch;
    if (status == DP_OK)
        status = dp__comm_choose(ctx, &choice);
    meeting->own.coll = choice.place;
    meeting->own.staged = choice.staged;
    DP_TRY(dp__agree(meeting, status));
    const dp__outbox_sizes lines = dp__outbox_sizes_of(ctx->info.process_count);
    status = dp__job_board_open(job, one_machine, &lines, &dp__job_carrier);
    if (status == DP_OK)
        status = dp__caller_open(ctx, &choice);
    if (status == DP_OK)
        status = dp__wires_open(ctx);
    DP_TRY(dp__agree(meeting, status));
    status = dp__lane_open(&ctx->lanes[DP__COURIER], &choice);
    if (status == DP_OK)
        status = dp__watchdog_begin(ctx, dp__boot_is_mpi(meeting->boot));
    DP_TRY(dp__agree(meeting, status));
    bool by_others = job->shared.data != NULL || dp__boot_is_mpi(meeting->boot);
    if (!by_others)
        DP_TRY(dp__port_share(ctx, !one_machine));
    dp__metrics_begin(job);
    return DP_OK;
}

/* Shows those outside what a process does that is alone, if a launcher has started it, or
   $DP_METRICS is set: a program that nobody watches pays nothing for it. */
static dp_status dp__alone_show(dp_ctx *ctx, const dp__meeting *meeting)
{
    static const dp_bootstrap alone = {.process_count = 1};
    dp__job *job = NULL;
    bool launched = strcmp(ctx->info.launcher, "none") != 0;
    if (ctx->config.local_only || (!launched && dp__os_env("DP_METRICS") == NULL))
        return DP_OK;
    DP_TRY(dp__job_make(ctx, &alone, NULL, &job));
    job->epoch = meeting->own.epoch;
    job->introductions[0] = job->introduction;
    job->ids[0] = (int)meeting->own.process_id;
    job->firsts[1] = ctx->info.local_count;
    job->board = dp__own_board(job);
    if (job->board == NULL)
        return dp__full("dp_open");
    atomic_store(&dp__progress_of(job, 0)->presence, DP__INSIDE);
    dp__job_show(job);
    ctx->world.shown = job;
    dp__metrics_begin(job);
    return DP_OK;
}

/* Opens the ranks of a process that is alone. */
static dp_status dp__alone_open(dp_ctx *ctx, const dp__meeting *meeting)
{
    DP_TRY(dp__ranks_open(ctx));
    return dp__alone_show(ctx, meeting);
}

/* ==== >>trees ====================================================================================
   How failures are heard of where a bootstrap of the user's has brought processes together, and
   what a failure will need.                                                                     */

/* Opens the tree that processes of a launcher have. Process 0 is found at its port for messages. */
DP__APART static dp_status dp__own_tree_open(dp__port *port, int timeout_ms, dp__tree **out)
{
    const char *host = dp__seat_address(port->seats, port->job->process_count, 0);
    dp__launch launch = {.name = "bootstrap",
                         .process = port->job->process,
                         .process_count = port->job->process_count,
                         .port = (int)port->seats[0].port,
                         .port_count = 1,
                         .listener = port->listener,
                         .key = port->launch.key,
                         .numbered = true,
                         .agreed = true};
    snprintf(launch.host, sizeof launch.host, "%s",
             host[0] != '\0' ? host : dp__port_host(port, 0));
    snprintf(launch.where, sizeof launch.where, "at %.60s:%d", launch.host, launch.port);
    DP_TRY(dp__launch_ports(&launch));
    DP_TRY(dp__launch_interface(&launch));
    return dp__tree_open(&launch, timeout_ms, out);
}

/* Connects machines that a bootstrap of the user's has brought together: their processes hear of
   each other as those of a launcher do. Without that they have no messages, unless they could do
   nothing. */
static dp_status dp__own_tree(dp_ctx *ctx, dp__meeting *meeting)
{
    dp__port *port = ctx->world.port;
    dp__tree *tree = NULL;
    if (port == NULL || port->why[0] != '\0' || dp__boot_is_ours(meeting->boot))
        return DP_OK;
    dp_status status = dp__agree(meeting, dp__own_tree_open(port, ctx->config.timeout_ms, &tree));
    if (status == DP_OK)
        dp__far_begin(ctx, tree, NULL);
    else
        dp__tree_close(tree, true);
    if (status == DP_OK || dp__tcp_carries(ctx))
        return status;
    DP_TRY(dp__agree(meeting, DP_OK)); /* the bootstrap has not failed */
    strcpy(port->why, "the processes do not reach each other over TCP");
    dp__port_refuse(ctx);
    return DP_OK;
}

/* Makes what a failure of the job will need; a process that joins a job that runs has it. */
static dp_status dp__open_voter(dp_ctx *ctx, dp__meeting *meeting)
{
    const dp_bootstrap *boot = meeting->boot;
    ctx->world.voter = meeting->voter;
    meeting->voter = NULL;
    if (ctx->world.voter != NULL)
        return DP_OK;
    bool far = !dp__one_machine(meeting) || meeting->launch->own[0] != '\0';
    DP_TRY(dp__agree(meeting, dp__voter_open(boot, meeting->launch, meeting->opening.near.machine,
                                             far, ctx->config.shards > 0, &ctx->world.voter)));
    return dp__agree(meeting, dp__voter_meet(boot, ctx->world.voter));
}

/* Makes it for a process that is alone, where others come later. */
static dp_status dp__open_voter_alone(dp_ctx *ctx, const dp__launch *launch)
{
    const dp_bootstrap alone = {.process_count = 1};
    DP_TRY(dp__voter_open(&alone, launch, (dp__share){0, 1}, launch->own[0] != '\0',
                          ctx->config.shards > 0, &ctx->world.voter));
    dp__voter_own(ctx->world.voter)->memory = dp__decision_id(&ctx->world.voter->decision);
    dp__voter_begin(ctx->world.voter, 1);
    return DP_OK;
}

static dp_status dp__open_with_others(dp__open_attempt *opening, dp_ctx *ctx, dp_status status)
{
    dp__meeting *meeting = opening->meeting;
    bool recovers = ctx != NULL && ctx->config.recovers;
    if (meeting->all == NULL) {
        if (status == DP_OK)
            status = dp__alone_open(ctx, meeting);
        bool later = status == DP_OK && recovers && meeting->launch->place[0] != '\0';
        return later ? dp__open_voter_alone(ctx, meeting->launch) : status;
    }
    meeting->own.local_count = ctx != NULL ? ctx->info.local_count : 0;
    DP_TRY(dp__agree(meeting, status));
    opening->epoch = meeting->all[0].epoch;
    if (recovers)
        DP_TRY(dp__open_voter(ctx, meeting));
    DP_TRY(dp__job_open(ctx, meeting));
    DP_TRY(dp__own_tree(ctx, meeting));
    dp__asking_begin(ctx);
    return DP_OK;
}

/* ==== >>joining ==================================================================================
   From the environment to the processes of a job, and a context with them.                      */

/* Find out which of the other processes are near. Its `all` is to be freed. */
static dp_status dp__meeting_make(const dp_config *config, const dp__launch *launch,
                                  dp__meeting *out)
{
    const dp_bootstrap *boot = &config->bootstrap;
    *out = (dp__meeting){.boot = boot,
                         .own = {.machine = dp__os_machine(),
                                 .process_id = dp__os_process_id(),
                                 .epoch = dp__os_wall_ns(),
                                 .version = DP_VERSION,
                                 .coll = -1,
                                 .shards = config->shards,
                                 .recovers = config->recovers},
                         .launch = launch};
    out->opening = (dp__open_attempt){.launcher = launch->name,
                                      .near = dp__no_neighbours,
                                      .epoch = out->own.epoch,
                                      .meeting = out};
    if (boot->all_gather == NULL || boot->process_count == 1)
        return DP_OK;
    /* not by the allocator's hooks: a process without memory still has to say so */
    out->all = dp__os_alloc((size_t)boot->process_count * sizeof *out->all,
                            _Alignof(dp__open_report), NULL);
    if (out->all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d processes",
                        boot->process_count);
    return dp__find_neighbours(boot, launch, &out->opening.near);
}

/* If something goes wrong before all have met, the others notice that this process is missing; if
   later, they are told. The context takes the voter, if there is one, or leaves it. */
static dp_status dp__open_job(const dp_config *config, const dp__launch *launch, dp__voter **voter,
                              dp_ctx **out)
{
    dp__meeting meeting;
    dp_status status = dp__meeting_make(config, launch, &meeting);
    meeting.voter = *voter;
    if (status == DP_OK)
        status = dp__open_ctx(config, &meeting.opening, out);
    *voter = meeting.voter;
    dp__os_free(meeting.all, 0, NULL);
    return status;
}

/* With the processes that this one has met, which become the context's. */
static dp_status dp__open_met(const dp_config *joined, const dp__launch *launch, dp__tree *tree,
                              dp__mpi_links *links, dp_ctx **out)
{
    dp__voter *none = NULL;
    dp_status status = dp__open_job(joined, launch, &none, out);
    if (status != DP_OK) {
        dp__tree_close(tree, true);
        dp__mpi_links_close(links, true, false);
    }
    DP_TRY(status);
    if (tree != NULL || links != NULL)
        dp__far_begin(*out, tree, links);
    return DP_OK;
}

/* With the processes that have let this one in. The context takes the voter. */
static dp_status dp__open_guest_met(dp_config *config, dp__voter **voter, int timeout_ms,
                                    dp_ctx **out)
{
    dp__launch launch;
    dp__tree *tree = NULL;
    dp__voter_hurry(*voter, timeout_ms);
    DP_TRY(dp__voter_launch(*voter, &launch));
    DP_TRY(dp__join_tree(config, &launch, timeout_ms, &tree));
    dp_status status = dp__open_job(config, &launch, voter, out);
    if (status != DP_OK)
        dp__tree_close(tree, true);
    DP_TRY(status);
    dp__voter *own = (*out)->world.voter;
    tree->timeout_ms = (*out)->config.timeout_ms;
    dp__far_begin(*out, tree, NULL);
    own->whole = config->shards > 0;
    own->members->whole = own->whole;
    (*out)->info.recoveries = dp__voter_met(own);
    dp__figure_set(*out, DP__RECOVERIES, (uint64_t)(*out)->info.recoveries);
    return DP_OK;
}

static atomic_bool dp__guest_came; /* contexts that this process opens later are met by all */

/* Until the others let this process in, and all have met. */
static dp_status dp__open_guest_once(const dp_config *config, const dp__launch *launch,
                                     int timeout_ms, uint64_t until_ns, bool *out_again,
                                     dp_ctx **out)
{
    dp_config own = *config;
    dp__voter *voter = NULL;
    bool apart = launch->host[0] != '\0' && !dp__is_loopback(launch->host);
    bool far = apart || launch->own[0] != '\0';
    dp_status status = dp__rejoin(launch, far, timeout_ms, until_ns, &voter);
    *out_again = false;
    if (status != DP_OK)
        return dp_error(status, "dp_open: %s", dp__open_error());
    status = dp__open_guest_met(&own, &voter, DP__MEET_MOST_MS, out);
    *out_again = dp_status_class(status) == DP_CLASS_JOB;
    if (status != DP_OK)
        dp__voter_close(voter, true);
    return status;
}

/* $DP_REJOIN: the others run already. If one of them dies while they meet with this one, they begin
   anew. */
static dp_status dp__open_guest(dp_config *config, dp_ctx **out)
{
    int timeout_ms;
    bool again;
    dp__launch launch;
    dp_status status;
    DP_TRY(dp__join_timeout(config, &timeout_ms));
    DP_TRY(dp__launch_read(config->job, &launch));
    if (!config->recovers || launch.place[0] == '\0')
        return dp_error(DP_ERR_UNSUPPORTED, "dp_open: DP_REJOIN is set, but %s",
                        !config->recovers ? "config.recovers is not"
                                          : "no launcher has started this process");
    uint64_t until_ns = dp__os_after_ms(timeout_ms);
    do {
        status = dp__open_guest_once(config, &launch, timeout_ms, until_ns, &again, out);
    } while (again && dp__os_ms_until(until_ns) > 0);
    if (status == DP_OK)
        atomic_store(&dp__guest_came, true);
    return status;
}

static dp_status dp__open_joined(const dp_config *config, dp_ctx **out)
{
    dp_config joined = *config;
    dp__launch launch;
    dp__tree *tree;
    dp__mpi_links *links;
    if (dp__comes_later() && !atomic_load(&dp__guest_came) && !config->local_only &&
        config->bootstrap.all_gather == NULL)
        return dp__open_guest(&joined, out);
    DP_TRY(dp__join(&joined, &launch, &tree, &links));
    return dp__open_met(&joined, &launch, tree, links, out);
}

static bool dp__catches_up(const dp_ctx *ctx)
{
    return dp__voter_catches_up(ctx->world.voter);
}

static int dp__carriers(const dp_coll_ops **out)
{
    int count = 0;
    out[count++] = dp_shm_coll();
    if (dp__backend_mpi != NULL)
        out[count++] = dp__backend_mpi->coll();
    out[count++] = dp_tcp_coll();
    return count;
}

/* ==== >>leaving ==================================================================================
   In the order in which dp_close asks for it.                                                   */

static void dp__world_let_go(const dp_ctx *ctx)
{
    dp__tree_let_go(ctx->world.tree);
    dp__voter_unlisten(ctx->world.voter);
    dp__mailbox_let_go(ctx->world.mailbox);
    dp__port_forked(ctx->world.port);
    dp__port_unlisten(ctx);
}

static void dp__world_close(dp_ctx *ctx, bool own)
{
    if (own) {
        dp__metrics_end(ctx->world.job);
        dp__metrics_end(ctx->world.shown);
    }
    dp__port_end(ctx);
    dp__tree_close(ctx->world.tree, own);
    dp__mpi_links_close(ctx->world.mpi_links, own, ctx->failed != DP_OK);
}

static void dp__world_free(dp_ctx *ctx, bool own)
{
    dp__job_close(ctx->world.job);
    dp__job_close(ctx->world.shown);
    for (dp__job *job = ctx->world.voter != NULL ? ctx->world.voter->before : NULL; job != NULL;
         job = job->before)
        dp__job_close(job);
    dp__voter_close(ctx->world.voter, own);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
