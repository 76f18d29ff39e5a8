/* dp/open.h - v0.2.0 - from a config to a context, and back - MIT licence

   Part of dp.h, which includes it. Here everything before comes together: the processes of the job
   meet, devices and their threads are opened, and what carries collectives between them.

   CONTENTS (search for the tag)
     >>places   devices and their threads
     >>meeting  with the other processes, which agree on every step
     >>opening  dp_open
     >>closing  in reverse order
*/

#ifndef DP__ROOMS
#error "dp/open.h is a part of dp.h: include dp.h"
#else

/* ==== >>places =================================================================================
   Where work is done: devices, with a stream each, and the threads that drive them.             */

/* `backend` 0 is the host. */
static dp_status dp__device_open(dp_ctx *ctx, const dp_device_ops *ops, dp__device *device,
                                 dp_device id, int index)
{
    *device = (dp__device){.id = id, .local_rank = id.backend != 0 ? id.index : -1};
    dp_status status = ops->open(&ctx->host, index, &device->dev);
    if (status != DP_OK)
        device->dev = NULL; /* whatever the table has left there */
    DP_TRY(status);
    if (device->dev == NULL || device->dev->ops == NULL)
        return dp_error(DP_ERR_INTERNAL, "dp_open: '%s' opened a device without ops", ops->name);
    ops = device->dev->ops;
    device->pool.device = device;
    device->pool.source = DP__FROM_DEVICE;
    DP_TRY(ops->info(device->dev, &device->info));
    DP_TRY(ops->stream_create(device->dev, 0, &device->own_stream));
    device->stream = device->own_stream;
    DP_TRY(ops->event_create(device->dev, &device->done));
    DP_TRY(ops->event_create(device->dev, &device->reads[0].done));
    return ops->event_create(device->dev, &device->reads[1].done);
}

static bool dp__device_is_open(const dp__device *device)
{
    return device->dev != NULL && device->dev->ops != NULL;
}

static void dp__streams_close(dp__device *device)
{
    if (!dp__device_is_open(device))
        return;
    const dp_device_ops *ops = device->dev->ops;
    for (int i = 0; i < 2; i++)
        if (device->reads[i].done != NULL)
            ops->event_destroy(device->reads[i].done);
    if (device->done != NULL)
        ops->event_destroy(device->done);
    if (device->own_stream != NULL)
        ops->stream_destroy(device->own_stream);
}

static void dp__device_close(dp__device *device)
{
    if (dp__device_is_open(device))
        device->dev->ops->close(device->dev);
}

static dp_status dp__devices_open(dp_ctx *ctx, int place)
{
    const dp_device_ops *ops = ctx->config.backends[place];
    int count = ctx->config.device_count;
    DP_TRY(dp__device_open(ctx, dp_cpu(), &ctx->host_device, (dp_device){0, 0}, 0));
    if (!dp__devices_reserve(ctx, count))
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d devices", count);
    for (int i = 0; i < count; i++)
        DP_TRY(dp__device_open(ctx, ops, dp__devices_add(ctx), (dp_device){place + 1, i},
                               ctx->config.devices[i]));
    ctx->info.local_count = ctx->info.rank_count = count;
    ctx->info.device_backend = ops->name;
    ctx->shared_pool.source = DP__FROM_HEAP;
    ctx->page_pool.source = DP__FROM_PAGES;
    ctx->pinned_pool.device = &ctx->devices[0];
    if (DP_HAS(dp_device_ops, ctx->devices[0].dev->ops, host_alloc) &&
        DP_HAS(dp_device_ops, ctx->devices[0].dev->ops, host_free))
        ctx->pinned_pool.source = DP__FROM_HOST_ALLOC;
    return DP_OK;
}

static dp_status dp__threads_open(dp_ctx *ctx, const dp__neighbours *near)
{
    int count = ctx->info.local_count, cores = ctx->config.thread_count;
    size_t slots = (size_t)count * sizeof *ctx->slots, parts = (size_t)count * sizeof(dp_part);
    ctx->info.core_count = cores;
    int share = cores > count ? cores / count : 1, *each = &ctx->config.threads_per_device;
    *each = *each != 0 ? *each : share;
    ctx->info.threads_per_device = *each > 0 ? *each : share;
    ctx->slots = dp__host_alloc(&ctx->host, slots, 64);
    dp_part *all = dp__host_alloc(&ctx->host, DP__LANES * parts, 64);
    for (int i = 0; i < DP__LANES && all != NULL; i++)
        ctx->lanes[i] = (dp__lane){.ctx = ctx, .parts = &all[i * count]};
    if (ctx->slots == NULL || all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d devices", count);
    memset(ctx->slots, 0, slots);
    DP_TRY(dp__meet_open(ctx));
    if (cores == 1 && count > 1)
        dp__log(ctx, DP_LOG_WARN,
                "%d devices and one core: they take turns. If a launcher bound this process to a "
                "core, ask it for more (mpirun --bind-to none)",
                count);
    DP_TRY(dp__threads_start(ctx, near));
    return dp__threads_find(ctx);
}

/* ==== >>meeting ================================================================================
   With other processes every step is agreed upon, so that all get a context or none.            */

typedef struct dp__hello {   /* what every process tells the others while it opens */
    uint64_t machine, epoch; /* epoch: when it opened, by the clock on the wall */
    int32_t version, status;
    int32_t local_count, process_id;
    int32_t coll;   /* place of the table that it chose; -1: none yet */
    int32_t staged; /* that carries copies in host memory */
    int32_t shards, recovers;
} dp__hello;

typedef struct dp__meeting { /* the processes of a job */
    const dp_bootstrap *boot;
    dp__hello own, *all;
    const dp__launch *launch;
    dp__voter *voter; /* of a process that joins a job that runs; else NULL */
    dp__neighbours near;
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
        const dp__hello *other = &meeting->all[i];
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
    for (int i = 0; meeting != NULL && i < meeting->boot->process_count; i++)
        one = one && meeting->all[i].machine == meeting->own.machine;
    return one;
}

static dp_status dp__comm_config(dp_ctx *ctx, const dp__meeting *meeting, dp_comm_config *out)
{
    int count = ctx->info.local_count;
    dp_dev **local = dp__host_alloc(&ctx->host, 2 * (size_t)count * sizeof *local, sizeof *local);
    if (local == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d devices", count);
    ctx->commed = local;
    *out =
        (dp_comm_config){.local = local,
                         .local_count = count,
                         .rank_first = ctx->info.rank_first,
                         .rank_count = ctx->info.rank_count,
                         .timeout_ms = ctx->config.timeout_ms,
                         .host_memory = true,
                         .bootstrap = ctx->info.process_count > 1 ? &ctx->config.bootstrap : NULL,
                         .one_machine = dp__one_machine(meeting),
                         .ordered = ctx->config.shards > 0};
    for (int i = 0; i < count; i++) {
        local[i] = ctx->devices[i].dev;
        local[count + i] = ctx->host_device.dev; /* see dp__comm_choose */
        out->host_memory = out->host_memory && dp__is_host(&ctx->devices[i]);
    }
    return DP_OK;
}

static dp_status dp__members_make(dp_ctx *ctx, const dp__meeting *meeting, dp__job **out)
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

/* Ranks of the whole job and the communicator, unless this rank is the only one. With other
   processes each step is agreed upon before the next. */
static dp_status dp__job_open(dp_ctx *ctx, dp__meeting *meeting)
{
    dp__choice choice = {.place = 0};
    dp__job *job = NULL;
    for (int i = 0; meeting != NULL && i < meeting->boot->process_count; i++) {
        ctx->info.rank_first += i < meeting->boot->process ? meeting->all[i].local_count : 0;
        ctx->info.rank_count += i != meeting->boot->process ? meeting->all[i].local_count : 0;
    }
    if (ctx->info.rank_count == 1)
        return DP_OK;
    dp_status status = dp__comm_config(ctx, meeting, &choice.config);
    if (status == DP_OK && meeting != NULL)
        status = dp__members_make(ctx, meeting, &job);
    if (status == DP_OK)
        status = dp__comm_choose(ctx, &choice);
    if (meeting != NULL) {
        meeting->own.coll = choice.place;
        meeting->own.staged = choice.staged;
        DP_TRY(dp__agree(meeting, status));
        const dp__outbox_sizes lines = dp__outbox_sizes_of(ctx->info.process_count);
        status = dp__job_seat(job, choice.config.one_machine, &lines, &dp__voter_mail);
    }
    if (status == DP_OK)
        status = dp__lane_open(&ctx->lanes[DP__CALLER], &choice);
    if (status == DP_OK)
        ctx->info.coll_backend = choice.staged ? ctx->lanes[DP__CALLER].comm->ops->name
                                               : choice.ops->name;
    if (meeting == NULL)
        return status;
    if (status == DP_OK)
        status = dp__wires_open(ctx);
    DP_TRY(dp__agree(meeting, status));
    DP_TRY(dp__agree(meeting, dp__lane_open(&ctx->lanes[DP__COURIER], &choice)));
    bool by_others = job->shared.data != NULL || dp__boot_is_mpi(meeting->boot);
    return by_others ? DP_OK : dp__port_share(ctx, !choice.config.one_machine);
}

/* ==== >>opening ================================================================================
   From a config to a context.                                                                   */

/* Where this process is among all. */
static void dp__place_set(dp_ctx *ctx, const dp__meeting *meeting)
{
    ctx->info.coll_backend = "none";
    ctx->info.launcher = meeting->launch->name;
    ctx->info.machine_process = meeting->near.machine.place;
    ctx->info.machine_process_count = meeting->near.machine.count;
    ctx->info.machine = meeting->near.machines.place;
    ctx->info.machine_count = meeting->near.machines.count;
    ctx->info.process = ctx->config.bootstrap.process;
}

static dp_status dp__open_local(dp_ctx *ctx, const dp__meeting *meeting)
{
    int place = 0, available = 0;
    dp__place_set(ctx, meeting);
    if (ctx->info.machine_process == 0)
        DP_TRY(dp__trace_make(ctx->info.process));
    DP_TRY(dp__resolve_numbers(ctx, meeting->near.cores));
    ctx->info.process_count = ctx->config.bootstrap.process_count;
    DP_TRY(dp__resolve_tables(ctx));
    DP_TRY(dp__choose_backend(ctx, &place, &available));
    DP_TRY(dp__resolve_devices(ctx, place, available));
    DP_TRY(dp__devices_open(ctx, place));
    return dp__threads_open(ctx, &meeting->near);
}

/* As the processes of a launcher have one. Process 0 is found where messages to it come. */
DP__APART static dp_status dp__own_tree_open(const dp__port *port, int timeout_ms, dp__tree **out)
{
    const char *host = dp__seat_address(port->seats, port->job->process_count, 0);
    dp__launch launch = {.name = "bootstrap",
                         .process = port->job->process,
                         .process_count = port->job->process_count,
                         .port = (int)port->seats[0].port,
                         .port_count = 1,
                         .listener = &port->server.listener,
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

/* Where a bootstrap of the user's has brought machines together, the processes hear of each other
   as those of a launcher do. Without that they have no messages, unless they could do nothing. */
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

static void dp__release(dp_ctx *ctx, bool ask_devices);

/* The only thread of a child has the cores of the one that forked. */
static void dp__unbind_child(dp_ctx *ctx)
{
    if (ctx->bound.thread == 0)
        return;
    ctx->bound.thread = dp__os_thread();
    (void)dp__os_rebind(&ctx->bound, &ctx->bound.before);
    ctx->bound.thread = 0;
}

/* In a child, whose contexts are its parent's. */
static void dp__in_child(void)
{
    for (int i = 0; i < DP__LIVE_MAX; i++) {
        dp_ctx *ctx = atomic_load(&dp__live[i]);
        if (ctx == NULL)
            continue;
        dp__tree_let_go(ctx->world.tree);
        dp__voter_unlisten(ctx->world.voter);
        dp__mailbox_let_go(ctx->world.mailbox);
        dp__port_unlisten(ctx);
        dp__unbind_child(ctx);
    }
}

/* A context with its hooks and nothing else; NULL when there is no memory. */
static dp_ctx *dp__ctx_new(const dp_config *config)
{
    static const dp__failing failing = {dp__journal_here, dp__journal_log, dp__job_say,
                                        dp__job_tell};
    dp_allocator allocator = config->allocator;
    if (allocator.alloc == NULL)
        allocator = (dp_allocator){dp__os_alloc, dp__os_free, NULL};
    dp_ctx *ctx = allocator.alloc(sizeof *ctx, 64, allocator.user);
    if (ctx == NULL) {
        dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for a context");
        return NULL;
    }
    dp__os_init(dp__before_fork, dp__after_fork, dp__in_child);
    *ctx = (dp_ctx){.host = dp__host_make(),
                    .failing = &failing,
                    .config = *config,
                    .lock = DP__LOCK_INITIALIZER,
                    .world_lock = DP__LOCK_INITIALIZER};
    ctx->config.allocator = allocator;
    ctx->fork_count = dp__os_fork_count();
    dp__resolve_log(ctx);
    return ctx;
}

/* Makes what a failure of the job will need. */
static dp_status dp__open_voter(dp_ctx *ctx, dp__meeting *meeting)
{
    const dp_bootstrap *boot = meeting->boot;
    bool far = !dp__one_machine(meeting) || meeting->launch->own[0] != '\0';
    DP_TRY(dp__agree(meeting, dp__voter_open(boot, meeting->launch, meeting->near.machine, far,
                                             ctx->config.shards > 0, &ctx->world.voter)));
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

static dp_status dp__open_ctx(const dp_config *config, dp__meeting *meeting, dp_ctx **out)
{
    dp_ctx *ctx = dp__ctx_new(config);
    dp__meeting *others = meeting->all != NULL ? meeting : NULL;
    dp_status status = ctx != NULL ? dp__open_local(ctx, meeting) : DP_ERR_NO_MEMORY;
    if (others != NULL) {
        meeting->own.local_count = ctx != NULL ? ctx->info.local_count : 0;
        status = dp__agree(meeting, status);
    }
    if (status == DP_OK)
        status = dp__job_open(ctx, others);
    if (status == DP_OK && others != NULL)
        status = dp__own_tree(ctx, others);
    if (status == DP_OK && others != NULL && config->recovers && meeting->voter == NULL)
        status = dp__open_voter(ctx, others);
    if (status == DP_OK && others == NULL && config->recovers && meeting->launch->place[0] != '\0')
        status = dp__open_voter_alone(ctx, meeting->launch);
    if (status == DP_OK && !dp__live_swap(NULL, ctx))
        status =
            dp_error(DP_ERR_UNSUPPORTED, "dp_open: more than %d contexts at once", DP__LIVE_MAX);
    if (status != DP_OK && ctx != NULL) {
        status = dp__leave("dp_open", ctx, status);
        dp__release(ctx, true);
    }
    if (status == DP_OK)
        dp__trace_join(ctx, others != NULL ? others->all[0].epoch : meeting->own.epoch);
    *out = ctx;
    return status;
}

static dp_status dp__check_config(const dp_config *config)
{
    const dp_bootstrap *boot = &config->bootstrap;
    if ((config->allocator.alloc == NULL) != (config->allocator.free == NULL))
        return dp_error(DP_ERR_INVALID, "dp_open: allocator needs both functions or none");
    if (boot->all_gather != NULL &&
        (boot->process_count < 1 || boot->process < 0 || boot->process >= boot->process_count))
        return dp_error(DP_ERR_INVALID, "dp_open: bootstrap is process %d of process_count %d",
                        boot->process, boot->process_count);
    if (boot->all_gather == NULL && (boot->process_count > 1 || boot->process_count < 0))
        return dp_error(DP_ERR_INVALID,
                        "dp_open: bootstrap.process_count is %d and "
                        "bootstrap.all_gather is NULL",
                        boot->process_count);
    if (boot->all_gather != NULL && config->local_only)
        return dp_error(DP_ERR_INVALID, "dp_open: local_only is set, and bootstrap is given");
    return DP_OK;
}

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
                         .launch = launch,
                         .near = {{0, 1}, {0, 1}, {0, 1}}};
    if (boot->all_gather == NULL || boot->process_count == 1)
        return DP_OK;
    /* not by the allocator's hooks: a process without memory still has to say so */
    out->all =
        dp__os_alloc((size_t)boot->process_count * sizeof *out->all, _Alignof(dp__hello), NULL);
    if (out->all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d processes",
                        boot->process_count);
    return dp__find_neighbours(boot, launch, &out->near);
}

/* If something goes wrong before all have met, the others notice that this process is missing; if
   later, they are told. */
static dp_status dp__open_job(const dp_config *config, const dp__launch *launch, dp__voter *voter,
                              dp_ctx **out)
{
    dp__meeting meeting;
    dp_status status = dp__meeting_make(config, launch, &meeting);
    meeting.voter = voter;
    if (status == DP_OK)
        status = dp__open_ctx(config, &meeting, out);
    dp__os_free(meeting.all, 0, NULL);
    return status;
}

/* With the processes that this one has met, which become the context's. */
static dp_status dp__open_met(const dp_config *joined, const dp__launch *launch, dp__tree *tree,
                              dp__mpi_links *links, dp_ctx **out)
{
    dp_status status = dp__open_job(joined, launch, NULL, out);
    if (status != DP_OK) {
        dp__tree_close(tree, true);
        dp__mpi_links_close(links, true, false);
    }
    DP_TRY(status);
    if (tree != NULL || links != NULL)
        dp__far_begin(*out, tree, links);
    return DP_OK;
}

/* With the processes that have let this one in. */
static dp_status dp__open_guest_met(dp_config *config, dp__voter *voter, int timeout_ms,
                                    dp_ctx **out)
{
    dp__launch launch;
    dp__tree *tree = NULL;
    DP_TRY(dp__voter_launch(voter, &launch));
    DP_TRY(dp__join_tree(config, &launch, timeout_ms, &tree));
    dp_status status = dp__open_job(config, &launch, voter, out);
    if (status != DP_OK)
        dp__tree_close(tree, true);
    DP_TRY(status);
    tree->timeout_ms = (*out)->config.timeout_ms;
    dp__far_begin(*out, tree, NULL);
    voter->whole = config->shards > 0;
    voter->members->whole = voter->whole;
    (*out)->info.recoveries = dp__voter_met(voter);
    (*out)->world.voter = voter;
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
    bool far = launch->host[0] != '\0' && !dp__is_loopback(launch->host);
    dp_status status = dp__rejoin(launch, far, timeout_ms, until_ns, &voter);
    *out_again = false;
    if (status != DP_OK)
        return dp_error(status, "dp_open: %s", dp__open_error());
    status = dp__open_guest_met(&own, voter, DP__MEET_MOST_MS, out);
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

/* Join the job that a launcher has started, if there is one. */
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

static dp_status dp__check_caller(const char *fn, size_t config_bytes, int version)
{
    if (config_bytes == sizeof(dp_config) && version >= 0 && version / 100 == DP_VERSION / 100)
        return DP_OK;
    return dp_error(DP_ERR_INVALID,
                    "%s: the caller was compiled with another dp.h (version %d, config of %zu "
                    "bytes) than the implementation (%d, %zu)",
                    fn, version, config_bytes, DP_VERSION, sizeof(dp_config));
}

static void dp__log_opened(const dp_ctx *ctx)
{
    const dp_info *info = &ctx->info;
    dp__log(ctx, DP_LOG_INFO, "launcher: %s, process %d of %d, %d of %d on this machine",
            info->launcher, info->process, info->process_count, info->machine_process,
            info->machine_process_count);
    dp__log(ctx, DP_LOG_INFO, "%d x %s on %d cores, %d threads a device, %d ranks, collectives: %s",
            info->local_count, info->device_backend, info->core_count, info->threads_per_device,
            info->rank_count, info->coll_backend);
    dp__log(ctx, DP_LOG_INFO, "nodes that threads are bound to: %d (%s)", info->node_count,
            info->binding);
}

DP_API dp_status dp__open(const dp_config *config, size_t config_bytes, int version, dp_ctx **out)
{
    static const dp_config zero;
    dp_ctx *ctx = NULL;
    DP_TRY(dp__check_pointer("dp_open", "out", out));
    DP_TRY(dp__check_caller("dp_open", config_bytes, version));
    config = config != NULL ? config : &zero;
    DP_TRY(dp__check_config(config));
    dp__os_bound others;
    bool freed = dp__bound_by_others(dp__os_thread(), &others) &&
                 dp__os_rebind(&others, &others.before);
    dp_status status = dp__open_joined(config, &ctx);
    if (freed && (status != DP_OK || ctx->bound.thread == 0))
        (void)dp__os_bind(&others.now, &others);
    DP_TRY(status);
    dp__log_opened(ctx);
    *out = ctx;
    return DP_OK;
}

/* ==== >>closing ================================================================================
   What was opened is closed in reverse order, however far opening came.                         */

/* In a child of fork (ask_devices false) locks and devices are left as the parent had them. */
static void dp__release(dp_ctx *ctx, bool ask_devices)
{
    if (ask_devices) {
        dp__lane_give_up(&ctx->lanes[DP__COURIER]);
        dp__job_leave(ctx); /* what follows may take a while */
        dp__lane_end(&ctx->lanes[DP__COURIER]);
        dp__mailbox_close(ctx);
    }
    while (ask_devices && ctx->scopes != NULL)
        dp__scope_end(ctx->scopes);
    for (int i = 0; ask_devices && i < ctx->info.local_count; i++) /* before memory is freed */
        (void)ctx->devices[i].dev->ops->stream_sync(ctx->devices[i].stream);
    if (ask_devices && ctx->lanes[DP__CALLER].comm != NULL)
        ctx->lanes[DP__CALLER].comm->ops->close(ctx->lanes[DP__CALLER].comm);
    dp__port_end(ctx);
    dp__tree_close(ctx->world.tree, ask_devices);
    dp__mpi_links_close(ctx->world.mpi_links, ask_devices, ctx->failed != DP_OK);
    if (ask_devices && ctx->team != NULL)
        dp__team_close(ctx->team);
    for (ptrdiff_t i = 0; ask_devices && i < dp__devices_count(ctx); i++)
        dp__streams_close(&ctx->devices[i]); /* what could not be waited for still has its memory */
    dp__blocks_free(ctx, ask_devices);
    for (ptrdiff_t i = 0; ask_devices && i < dp__devices_count(ctx); i++)
        dp__device_close(&ctx->devices[i]);
    if (ask_devices) {
        dp__streams_close(&ctx->host_device);
        dp__device_close(&ctx->host_device);
    }
    while (ctx->all_scopes != NULL) {
        dp_scope *scope = ctx->all_scopes;
        ctx->all_scopes = scope->made_before;
        dp__raw_free(ctx, scope, sizeof *scope);
    }
    if (ask_devices)
        dp__trace_leave(ctx);
    dp__unbind(ctx);
    dp_allocator allocator = ctx->config.allocator;
    dp__job_close(ctx->world.job);
    for (dp__job *job = ctx->world.voter != NULL ? ctx->world.voter->before : NULL; job != NULL;
         job = job->before)
        dp__job_close(job);
    dp__voter_close(ctx->world.voter, ask_devices);
    while (ctx->tracked != NULL)
        dp__tracked_free(ctx, ctx->tracked);
    allocator.free(ctx, sizeof *ctx, allocator.user);
}

static dp_status dp__check_uncalled(const char *fn, const dp_ctx *ctx)
{
    char text[160];
    const dp__frame *frame = dp__frame_of(ctx, false);
    return frame == NULL
               ? DP_OK
               : dp_error(DP_ERR_STATE, "%s: the context is in use by %s, which called this", fn,
                          dp__frame_text(frame, text, sizeof text));
}

/* OK if nothing of the context runs, here or in another thread; then it is entered, for good. */
static dp_status dp__check_idle(const char *fn, dp_ctx *ctx)
{
    DP_TRY(dp__check_uncalled(fn, ctx));
    DP_TRY(dp__enter(fn, ctx));
    int count = atomic_load_explicit(&ctx->inside, memory_order_relaxed);
    if (count == 0)
        return DP_OK;
    atomic_store_explicit(&ctx->entered, false, memory_order_release);
    return dp_error(DP_ERR_STATE,
                    "%s: the context is in use: threads in methods, deferred functions and the "
                    "like: %d",
                    fn, count);
}

DP_API void dp_close(dp_ctx *ctx)
{
    if (ctx == NULL)
        return;
    if (!dp__is_live(ctx)) {
        dp_error(DP_ERR_STATE, "dp_close: the context is closed already");
        return;
    }
    bool forked = ctx->fork_count != dp__os_fork_count();
    if (!forked && dp__check_idle("dp_close", ctx) != DP_OK)
        return;
    char text[DP__TEXT_BYTES]; /* who tidies up after an error still wants to read it */
    bool fresh = dp__of_thread.fresh;
    memcpy(text, dp__of_thread.text, sizeof text);
    dp__live_swap(ctx, NULL);
    dp__release(ctx, !forked);
    memcpy(dp__of_thread.text, text, sizeof text);
    dp__of_thread.fresh = fresh;
    dp__of_thread.scope_status = DP_OK; /* it says nothing about scopes of other contexts */
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
