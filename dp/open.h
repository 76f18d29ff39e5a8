/* dp/open.h - v0.2.0 - from a config to a context, and back - MIT licence

   Part of dp.h, which includes it. Here everything before comes together: devices and their threads
   are opened, and what carries collectives between them. How the processes of a job do that
   together is in dp/meeting.h.

   CONTENTS (search for the tag)
     >>places   devices and their threads
     >>ranks    what carries collectives between them
     >>opening  dp_open
     >>groups   what a group takes from the context of all
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

/* Devices that compute on the host need a core each. Shards are as many as they are. */
static void dp__warn_crowded(const dp_ctx *ctx)
{
    int count = ctx->info.local_count, cores = ctx->config.thread_count;
    if (cores == 1 && count > 1)
        dp__log(ctx, DP_LOG_WARN,
                "%d devices and one core: they take turns. If a launcher bound this process to a "
                "core, ask it for more (mpirun --bind-to none)",
                count);
    else if (cores < count && ctx->config.shards == 0 && ctx->devices[0].info.host_memory)
        dp__log(ctx, DP_LOG_WARN,
                "%d devices and %d cores: they take turns, so %d devices would be as fast; see "
                "device_count, thread_count, and $DP_DEVICES",
                count, cores, cores);
}

/* Lets it be seen which device comes last, unless they wait for cores. */
static dp_status dp__late_watch(dp_ctx *ctx)
{
    int count = ctx->info.local_count;
    bool crowded = ctx->config.thread_count < count && ctx->devices[0].info.host_memory;
    if (count < 2 || crowded)
        return DP_OK;
    ctx->late = dp__host_alloc(&ctx->host, dp__late_devices_bytes((size_t)count), 64);
    if (ctx->late == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d devices", count);
    dp__late_devices_open(ctx->late, count);
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
    dp__stuck_open(ctx);
    dp__warn_crowded(ctx);
    DP_TRY(dp__late_watch(ctx));
    DP_TRY(dp__threads_start(ctx, near));
    return dp__threads_find(ctx);
}

/* ==== >>ranks ====================================================================================
   What carries collectives between ranks.                                                       */

/* `boot`: NULL for one process. */
static dp_status dp__comm_config(dp_ctx *ctx, const dp_bootstrap *boot, bool one_machine,
                                 dp_comm_config *out)
{
    int count = ctx->info.local_count;
    dp_dev **local = dp__host_alloc(&ctx->host, 2 * (size_t)count * sizeof *local, sizeof *local);
    if (local == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for %d devices", count);
    ctx->commed = local;
    *out = (dp_comm_config){.local = local,
                            .local_count = count,
                            .rank_first = ctx->info.rank_first,
                            .rank_count = ctx->info.rank_count,
                            .timeout_ms = ctx->config.timeout_ms,
                            .host_memory = true,
                            .bootstrap = boot,
                            .one_machine = one_machine,
                            .ordered = ctx->config.shards > 0};
    for (int i = 0; i < count; i++) {
        local[i] = ctx->devices[i].dev;
        local[count + i] = ctx->host_device.dev; /* see dp__comm_choose */
        out->host_memory = out->host_memory && dp__is_host(&ctx->devices[i]);
    }
    return DP_OK;
}

static dp_status dp__caller_open(dp_ctx *ctx, const dp__choice *choice)
{
    dp__lane *lane = &ctx->lanes[DP__CALLER];
    DP_TRY(dp__lane_open(lane, choice));
    ctx->info.coll_backend = choice->staged ? lane->comm->ops->name : choice->ops->name;
    return DP_OK;
}

/* Opens the communicator of one process, unless its rank is the only one. */
static dp_status dp__ranks_open(dp_ctx *ctx)
{
    dp__choice choice = {.place = 0};
    if (ctx->info.rank_count == 1)
        return DP_OK;
    DP_TRY(dp__comm_config(ctx, NULL, true, &choice.config));
    DP_TRY(dp__comm_choose(ctx, &choice));
    return dp__caller_open(ctx, &choice);
}

/* ==== >>opening ================================================================================
   From a config to a context.                                                                   */

/* Where this process is among all. */
static void dp__place_set(dp_ctx *ctx, const dp__open_attempt *opening)
{
    ctx->info.coll_backend = "none";
    ctx->info.launcher = opening->launcher;
    ctx->info.machine_process = opening->near.machine.place;
    ctx->info.machine_process_count = opening->near.machine.count;
    ctx->info.machine = opening->near.machines.place;
    ctx->info.machine_count = opening->near.machines.count;
    ctx->info.process = ctx->config.bootstrap.process;
}

static dp_status dp__open_local(dp_ctx *ctx, const dp__open_attempt *opening)
{
    int place = 0, available = 0;
    dp__place_set(ctx, opening);
    if (ctx->info.machine_process == 0)
        DP_TRY(dp__trace_make(ctx->info.process));
    DP_TRY(dp__resolve_numbers(ctx, opening->near.cores));
    ctx->info.process_count = ctx->config.bootstrap.process_count;
    DP_TRY(dp__resolve_tables(ctx));
    DP_TRY(dp__choose_backend(ctx, &place, &available));
    DP_TRY(dp__resolve_devices(ctx, place, available));
    DP_TRY(dp__devices_open(ctx, place));
    return dp__threads_open(ctx, &opening->near);
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
        dp__world_let_go(ctx);
        dp__unbind_child(ctx);
    }
}

/* A context with its hooks and nothing else; NULL when there is no memory. */
static dp_ctx *dp__ctx_new(const dp_config *config)
{
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
                    .failing = &dp__failing_job,
                    .config = *config,
                    .lock = DP__LOCK_INITIALIZER,
                    .world_lock = DP__LOCK_INITIALIZER};
    ctx->config.allocator = allocator;
    ctx->fork_count = dp__os_fork_count();
    dp__resolve_debug(ctx);
    return ctx;
}

static dp_status dp__open_ctx(const dp_config *config, dp__open_attempt *opening, dp_ctx **out)
{
    dp_ctx *ctx = dp__ctx_new(config);
    dp_status status = ctx != NULL ? dp__open_local(ctx, opening) : DP_ERR_NO_MEMORY;
    status = dp__open_with_others(opening, ctx, status);
    if (status == DP_OK && !dp__live_swap(NULL, ctx))
        status =
            dp_error(DP_ERR_UNSUPPORTED, "dp_open: more than %d contexts at once", DP__LIVE_MAX);
    if (status != DP_OK && ctx != NULL) {
        status = dp__leave("dp_open", ctx, status);
        dp__release(ctx, true);
    }
    if (status == DP_OK)
        dp__trace_join(ctx, opening->epoch);
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

/* ==== >>groups ===================================================================================
   How a group is opened, whose processes are known: see dp/group.h.                             */

static dp_status dp__check_group(const char *fn, int number, const dp_config *config)
{
    const char *field = config->bootstrap.all_gather != NULL || config->bootstrap.process_count != 0
                            ? "bootstrap"
                        : config->local_only  ? "local_only"
                        : config->job != NULL ? "job"
                                              : NULL;
    if (number < -1)
        return dp_error(DP_ERR_INVALID, "%s: group is %d: -1 is none, others count from 0", fn,
                        number);
    if (field != NULL)
        return dp_error(DP_ERR_INVALID,
                        "%s: config.%s is set, but who is in a group is known without it", fn,
                        field);
    return DP_OK;
}

/* Takes for a group of so many processes, from the context of all, what is not set. */
static void dp__group_resolve(const dp_ctx *ctx, int process_count, dp_config *config)
{
    const dp_config *all = &ctx->config;
    int ranks = process_count * ctx->info.local_count;
    if (config->backends == NULL && config->devices == NULL && config->device_count == 0) {
        config->devices = all->devices;
        config->device_count = all->device_count;
        if (config->shards == 0 && all->shards > 0 && (ranks & (ranks - 1)) == 0)
            config->shards = ranks;
        if (config->threads_per_device == 0)
            config->threads_per_device = all->threads_per_device;
    }
    config->backends = config->backends != NULL ? config->backends : all->backends;
    config->colls = config->colls != NULL ? config->colls : all->colls;
    config->thread_count = config->thread_count != 0 ? config->thread_count : all->thread_count;
    config->timeout_ms = config->timeout_ms != 0 ? config->timeout_ms : all->timeout_ms;
    if (config->allocator.alloc == NULL && config->allocator.free == NULL)
        config->allocator = all->allocator;
    dp_level level = config->log.level;
    if (config->log.fn == NULL)
        config->log = all->log;
    config->log.level = level != DP_LOG_DEFAULT ? level : all->log.level;
    config->poison = config->poison || all->poison;
    if (config->check == 0) {
        config->check = all->check > 0 ? all->check : -1;
        config->check_warns = all->check_warns;
    }
    config->unbound = true;
}

/* ==== >>closing ================================================================================
   What was opened is closed in reverse order, however far opening came.                         */

/* In a child of fork (ask_devices false) locks and devices are left as the parent had them. */
static void dp__release(dp_ctx *ctx, bool ask_devices)
{
    if (ask_devices) {
        dp__watchdog_end(ctx);
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
    dp__world_close(ctx, ask_devices);
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
    dp__world_free(ctx, ask_devices);
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

/* Refuses while something is under way, which a newcomer would make void in a job that has not
   failed. */
static dp_status dp__check_between_steps(const char *fn, const dp_ctx *ctx)
{
    DP_TRY(dp__check_uncalled(fn, ctx));
    DP_TRY(dp__check_alone(fn, ctx));
    if (ctx->lanes[DP__COURIER].riding != NULL)
        return dp_error(DP_ERR_STATE, "%s: a pass is open", fn);
    return DP_OK;
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
