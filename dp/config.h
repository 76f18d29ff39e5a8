/* dp/config.h - v0.2.0 - what a config means - MIT licence

   Part of dp.h, which includes it: from what a program has set, or has not, to what is opened.

   CONTENTS (search for the tag)
     >>resolve  what a config means
     >>debug    the words of $DP_DEBUG
     >>nodes    which thread keeps to the cores of which nodes
     >>devices  a context's, an array of stb_ds
     >>carrier  which table of collectives serves its devices
*/

#ifndef DP__ROOMS
#error "dp/config.h is a part of dp.h: include dp.h"
#else

/* ==== >>resolve ==================================================================================
   What a config means: tables are complete, zero becomes the default, lists are copied.         */

enum { DP__DEVICES_MAX = 4096 };

DP_API double dp_or(double number, double usual)
{
    if (number < 0 && number >= DP_ZERO)
        return 0;
    return number > 0 || number < 0 || isnan(number) ? number : usual;
}

typedef struct dp__method {
    const char *name;
    size_t offset;
} dp__method;

#define DP__DEVICE_METHOD(name) {#name, offsetof(dp_device_ops, name)},
#define DP__COLL_METHOD(name)   {#name, offsetof(dp_coll_ops, name)},
/* clang-format off */
static const dp__method dp__device_methods[] = {
    DP__DEVICE_METHOD(count) DP__DEVICE_METHOD(open) DP__DEVICE_METHOD(close)
    DP__DEVICE_METHOD(info) DP__DEVICE_METHOD(alloc) DP__DEVICE_METHOD(free)
    DP__DEVICE_METHOD(stream_create) DP__DEVICE_METHOD(stream_destroy)
    DP__DEVICE_METHOD(stream_sync) DP__DEVICE_METHOD(event_create)
    DP__DEVICE_METHOD(event_destroy) DP__DEVICE_METHOD(event_record)
    DP__DEVICE_METHOD(event_wait) DP__DEVICE_METHOD(event_sync)
    DP__DEVICE_METHOD(copy_in) DP__DEVICE_METHOD(copy_out) DP__DEVICE_METHOD(copy)};
static const dp__method dp__coll_methods[] = {
    DP__COLL_METHOD(fits) DP__COLL_METHOD(open) DP__COLL_METHOD(close)
    DP__COLL_METHOD(run)};
/* clang-format on */

/* Checks that a table is long enough for its required methods, and has them. */
static dp_status dp__check_table(const void *table, size_t size, const char *name,
                                 const dp__method *methods, size_t count)
{
    void (*method)(void) = NULL;
    if (name == NULL)
        return dp_error(DP_ERR_INVALID, "dp_open: a table of functions has no name");
    for (size_t i = 0; i < count; i++) {
        if (size >= methods[i].offset + sizeof method)
            memcpy(&method, (const char *)table + methods[i].offset, sizeof method);
        if (size < methods[i].offset + sizeof method || method == NULL)
            return dp_error(DP_ERR_INVALID, "dp_open: table '%s' (size %zu) has no method '%s'",
                            name, size, methods[i].name);
    }
    return DP_OK;
}

/* Refuses a table of another dp.h: see >>contract. */
static dp_status dp__refuse_table(const char *list, size_t place, const dp_table_head *head,
                                  size_t own_size)
{
    return dp_error(DP_ERR_INVALID,
                    "dp_open: %s[%zu] is a table of layout %u and size %u, the implementation's "
                    "have layout %d and size %zu: it was compiled with another dp.h, or its head "
                    "is not DP_TABLE",
                    list, place, head->layout, head->size, DP_LAYOUT, own_size);
}

static dp_status dp__check_device_table(const dp_device_ops *ops, size_t place)
{
    if (!DP_FITS(dp_device_ops, ops) || ops->head.size < offsetof(dp_device_ops, count))
        return dp__refuse_table("backends", place, &ops->head, sizeof *ops);
    return dp__check_table(ops, ops->head.size, ops->name, dp__device_methods,
                           sizeof dp__device_methods / sizeof dp__device_methods[0]);
}

static dp_status dp__check_coll_table(const dp_coll_ops *ops, size_t place)
{
    if (!DP_FITS(dp_coll_ops, ops) || ops->head.size < offsetof(dp_coll_ops, fits))
        return dp__refuse_table("colls", place, &ops->head, sizeof *ops);
    DP_TRY(dp__check_table(ops, ops->head.size, ops->name, dp__coll_methods,
                           sizeof dp__coll_methods / sizeof dp__coll_methods[0]));
    unsigned least = 1u << DP_ALL_REDUCE | 1u << DP_BROADCAST | 1u << DP_ALL_GATHER;
    if ((ops->verbs & least) == least && (ops->verbs & ~DP_COLL_VERBS) == 0)
        return DP_OK;
    return dp_error(
        DP_ERR_INVALID,
        "dp_open: table '%s' has verbs %#x: it needs all_reduce, broadcast and all_gather "
        "(%#x), and may have no others than %#x",
        ops->name, ops->verbs, least, DP_COLL_VERBS);
}

/* A copy of a NULL-terminated list, so that the caller's may go. */
static dp_status dp__copy_list(dp_ctx *ctx, const void *const *list, const void *const **out)
{
    size_t count = 0;
    while (list[count] != NULL)
        count++;
    const void **copy = dp__host_alloc(&ctx->host, (count + 1) * sizeof *copy, sizeof *copy);
    if (copy == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for the config");
    memcpy(copy, list, (count + 1) * sizeof *copy);
    *out = copy;
    return DP_OK;
}

static dp_status dp__copy_job(dp_ctx *ctx, const char *text, const char **out)
{
    size_t bytes = text != NULL ? strlen(text) + 1 : 0;
    char *copy = bytes != 0 ? dp__host_alloc(&ctx->host, bytes, 1) : NULL;
    if (bytes != 0 && copy == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for the config");
    if (bytes != 0)
        memcpy(copy, text, bytes);
    *out = copy;
    return DP_OK;
}

static const dp_device_ops *(*dp__backend_cuda)(void); /* dp_cuda.h defines them */
static const dp_coll_ops *(*dp__backend_cuda_coll)(void);
static const dp_coll_ops *(*dp__backend_nccl_coll)(void); /* dp_nccl.h defines it */

static dp_status dp__resolve_tables(dp_ctx *ctx)
{
    bool cuda = dp__backend_cuda != NULL;
    const dp_device_ops *const devices[] = {cuda ? dp__backend_cuda() : dp_cpu(),
                                            cuda ? dp_cpu() : NULL, NULL};
    const dp_coll_ops *colls[DP__CARRIERS + 4] = {dp_cpu_coll()};
    int count = 1 + dp__carriers(&colls[1]);
    dp_config *config = &ctx->config;
    if (dp__backend_nccl_coll != NULL)
        colls[count++] = dp__backend_nccl_coll();
    if (cuda)
        colls[count++] = dp__backend_cuda_coll();
    if (config->backends == NULL)
        config->backends = devices;
    if (config->colls == NULL)
        config->colls = colls;
    for (size_t i = 0; config->backends[i] != NULL; i++)
        DP_TRY(dp__check_device_table(config->backends[i], i));
    for (size_t i = 0; config->colls[i] != NULL; i++)
        DP_TRY(dp__check_coll_table(config->colls[i], i));
    DP_TRY(dp__copy_list(ctx, (const void *const *)config->backends,
                         (const void *const **)&config->backends));
    return dp__copy_list(ctx, (const void *const *)config->colls,
                         (const void *const **)&config->colls);
}

/* Devices that are there and cannot be used: a job on others would be slow without a word. */
static void dp__warn_of_unused(const dp_ctx *ctx, const char *unused, const char *serves)
{
    static atomic_bool said;
    char text[DP__TEXT_BYTES];
    snprintf(text, sizeof text, "%s is used, because there are devices that cannot be used: %s",
             serves, unused);
    dp__warn_all(ctx, &said, text);
}

/* Tables that have found a device, here or in a process that this one was forked from; by name, as
   tables can be decorated. Under dp__live_lock, which nobody holds while a process forks. */
enum { DP__FOUND_MAX = 16, DP__FOUND_BYTES = 32 };
static struct {
    char name[DP__FOUND_BYTES]; /* "": this place is free, and so are those behind it */
    unsigned fork_count;
} dp__found[DP__FOUND_MAX];

/* Notes that a table has found a device, unless that was noted before; returns at which fork. Where
   the list is full, nothing is known. */
static unsigned dp__found_at(const char *name, bool note)
{
    unsigned at = dp__os_fork_count();
    int place = 0;
    dp__lock_enter(&dp__live_lock);
    while (place < DP__FOUND_MAX && dp__found[place].name[0] != '\0' &&
           strncmp(dp__found[place].name, name, DP__FOUND_BYTES - 1) != 0)
        place++;
    if (place < DP__FOUND_MAX && dp__found[place].name[0] != '\0') {
        at = dp__found[place].fork_count;
    } else if (place < DP__FOUND_MAX && note) {
        snprintf(dp__found[place].name, DP__FOUND_BYTES, "%s", name);
        dp__found[place].fork_count = at;
    }
    dp__lock_leave(&dp__live_lock);
    return at;
}

/* How many devices a table has. One with a driver is not asked where that may not survive. */
static dp_status dp__table_count(const dp_ctx *ctx, const dp_device_ops *ops, int *out)
{
    bool survives = DP_HAS(dp_device_ops, ops, survives_fork);
    if (!survives && dp__found_at(ops->name, false) != dp__os_fork_count())
        return dp_error(DP_ERR_STATE,
                        "used before this process was forked, which its driver does not survive: "
                        "fork before the first use");
    DP_TRY(ops->count(&ctx->host, out));
    if (!survives && *out > 0)
        (void)dp__found_at(ops->name, true);
    return DP_OK;
}

/* The first table that has a device serves; what the others said is kept for the sentence. */
static dp_status dp__choose_backend(dp_ctx *ctx, int *out_place, int *out_count)
{
    char said[DP__TEXT_BYTES / 2] = "", unused[DP__TEXT_BYTES / 2] = "";
    const dp_device_ops *const *backends = ctx->config.backends;
    for (int place = 0; backends[place] != NULL; place++) {
        int count = 0;
        dp_status status = dp__table_count(ctx, backends[place], &count);
        if (status == DP_OK && count > 0) {
            if (unused[0] != '\0')
                dp__warn_of_unused(ctx, unused, backends[place]->name);
            else if (place > 0)
                dp__log(ctx, DP_LOG_WARN, "%s is used, because there are no other devices (%s)",
                        backends[place]->name, said);
            *out_place = place;
            *out_count = count;
            return DP_OK;
        }
        const char *why = status == DP_OK ? "no device" : dp_last_error();
        if (status != DP_OK && status != DP_ERR_NO_DEVICE && unused[0] == '\0')
            snprintf(unused, sizeof unused, "%.30s: %.220s", backends[place]->name, why);
        (void)dp__append(said, sizeof said, strlen(said), "%s%s: %.100s", place > 0 ? "; " : "",
                         backends[place]->name, why);
        dp__log(ctx, DP_LOG_INFO, "%s: %s", backends[place]->name, why);
    }
    return dp_error(DP_ERR_NO_DEVICE, "dp_open: no table has a device (%s)", said);
}

/* $DP_DEVICES: "4" is a number of devices, "0,2" are their indices, and "2," is one of them. */
static dp_status dp__env_devices(dp_ctx *ctx)
{
    const char *text = dp__os_env("DP_DEVICES"), *at = text;
    if (text == NULL)
        return DP_OK;
    int count = dp__number_below(&at, DP__DEVICES_MAX + 1);
    if (*at == '\0' && count > 0) {
        ctx->config.device_count = count;
        return DP_OK;
    }
    int *list = dp__host_alloc(&ctx->host, (strlen(text) + 1) * sizeof *list, sizeof *list);
    if (list == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for the config");
    bool good = true;
    for (at = text, count = 0; good && *at != '\0'; at += *at == ',') {
        list[count] = dp__number_below(&at, DP__DEVICES_MAX + 1);
        good = list[count++] >= 0 && (*at == ',' || (*at == '\0' && count > 1));
    }
    if (!good)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: DP_DEVICES is '%s', neither a number of devices from 1 to %d "
                        "nor a list of their indices, such as 0,1 (one alone: 0,)",
                        text, DP__DEVICES_MAX);
    ctx->config.devices = list;
    ctx->config.device_count = count;
    return DP_OK;
}

/* This process' share of the devices that there are; if there are more processes than devices,
   several have the same one. There can be any number of CPU devices, but more than its cores are of
   no use. */
static int dp__device_share(const dp_ctx *ctx, const dp_device_ops *ops, int available,
                            int *out_first)
{
    int64_t place = ctx->info.machine_process, count = ctx->info.machine_process_count;
    int first = (int)(place * available / count), last = (int)((place + 1) * available / count);
    if (ops == dp_cpu())
        return ctx->config.thread_count < available ? ctx->config.thread_count : available;
    *out_first = first;
    return last > first ? last - first : 1;
}

enum { DP__COPIERS = 8 }; /* they keep a link of 64 GB/s busy */

/* One for each device. Devices with memory of their own have some more, which share long copies. */
static int dp__threads_wanted(const dp_ctx *ctx)
{
    int count = ctx->info.local_count, cores = ctx->config.thread_count;
    int copiers = cores < DP__COPIERS ? cores : DP__COPIERS;
    return count > copiers || ctx->devices[0].info.host_memory ? count : copiers;
}

/* Of devices that nobody has asked for by number, as many as can share `ranks` evenly. */
static int dp__shard_devices(dp_ctx *ctx, int ranks, int count)
{
    int most = ranks;
    while (most > count)
        most /= 2;
    if (most < count && most < ranks)
        dp__log(ctx, DP_LOG_WARN, "%d shards are computed on %d of %d devices", ranks, most, count);
    return most;
}

/* What is in config.devices, each as often as it has ranks. */
static dp_status dp__resolve_ranks(dp_ctx *ctx, int ranks, int first)
{
    dp_config *config = &ctx->config;
    int count = config->device_count;
    if (ranks % count != 0)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: device_count is %d, and this process has %d of %d shards: give "
                        "it a power of two, at most as many",
                        count, ranks, config->shards);
    int *devices = dp__host_alloc(&ctx->host, (size_t)ranks * sizeof *devices, sizeof *devices);
    if (devices == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "dp_open: no memory for the config");
    for (int i = 0; i < ranks; i++) {
        int device = i / (ranks / count);
        devices[i] = config->devices != NULL ? config->devices[device] : first + device;
    }
    config->devices = devices;
    config->device_count = ranks;
    return DP_OK;
}

static dp_status dp__resolve_devices(dp_ctx *ctx, int place, int available)
{
    dp_config *config = &ctx->config;
    int first = 0, ranks = config->shards / ctx->info.process_count;
    if (config->device_count == 0 && config->devices == NULL)
        DP_TRY(dp__env_devices(ctx));
    if (config->device_count == 0 && config->devices == NULL) {
        config->device_count = dp__device_share(ctx, config->backends[place], available, &first);
        if (ranks > 0)
            config->device_count = dp__shard_devices(ctx, ranks, config->device_count);
    }
    if (config->device_count < 1 || config->device_count > DP__DEVICES_MAX)
        return dp_error(DP_ERR_INVALID, "dp_open: device_count is %d, not 1 to %d%s",
                        config->device_count, DP__DEVICES_MAX,
                        config->devices != NULL ? ", and devices is given" : "");
    return dp__resolve_ranks(ctx, ranks > 0 ? ranks : config->device_count, first);
}

/* Cores that processes with one affinity mask may use, divided among them. */
static int dp__core_share(int cores, dp__share among)
{
    int each = cores / among.count + (among.place < cores % among.count);
    return each > 0 ? each : 1;
}

static dp_status dp__check_shards(const dp_config *config)
{
    int shards = config->shards, processes = config->bootstrap.process_count;
    if (shards < 0 || shards > DP__DEVICES_MAX || (shards & (shards - 1)) != 0)
        return dp_error(DP_ERR_INVALID, "dp_open: shards is %d, not a power of two from 1 to %d",
                        shards, DP__DEVICES_MAX);
    if (shards > 0 && processes > 1 && shards % processes != 0)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: %d shards cannot be dealt out evenly to %d processes", shards,
                        processes);
    return DP_OK;
}

static dp_status dp__resolve_numbers(dp_ctx *ctx, dp__share cores)
{
    dp_config *config = &ctx->config;
    dp__cores mask;
    dp__os_cores_of(0, &mask);
    ctx->cores = dp__os_core_count();
    ctx->limited = ctx->cores < dp__cores_count(&mask);
    if (config->thread_count < 0 || config->timeout_ms < 0 || config->grace_ms < 0 ||
        config->device_count < 0)
        return dp_error(DP_ERR_INVALID, "dp_open: %s is negative",
                        config->thread_count < 0 ? "thread_count"
                        : config->timeout_ms < 0 ? "timeout_ms"
                        : config->grace_ms < 0   ? "grace_ms"
                                                 : "device_count");
    if (config->threads_per_device < -1)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: threads_per_device is %d: give a number of threads, or -1",
                        config->threads_per_device);
    if (config->check < -1)
        return dp_error(DP_ERR_INVALID,
                        "dp_open: check is %d: give it n, for each n-th step, or -1 for none",
                        config->check);
    if (config->log.level < DP_LOG_DEFAULT || config->log.level > DP_LOG_TRACE)
        return dp_error(DP_ERR_INVALID, "dp_open: log.level is %d", (int)config->log.level);
    DP_TRY(dp__check_shards(config));
    if (config->thread_count == 0)
        config->thread_count = dp__core_share(ctx->cores, cores);
    config->bootstrap.process_count =
        config->bootstrap.all_gather != NULL ? config->bootstrap.process_count : 1;
    return dp__copy_job(ctx, config->job, &config->job);
}

/* ==== >>debug ==================================================================================
   The words of $DP_DEBUG.                                                                       */

enum { DP__CHECK_EVERY = 100, DP__CHECK_EVERY_MAX = 100000000 };

/* Reads "check", "check=20" or "check=warn"; false: it is none of these. */
static bool dp__check_word(const char *word, dp_config *asked)
{
    static const char check[] = "check=";
    const char *at = word + sizeof check - 1;
    bool warns = strcmp(word, "check=warn") == 0;
    if (warns || strcmp(word, "check") == 0) {
        asked->check = asked->check != 0 ? asked->check : DP__CHECK_EVERY;
        asked->check_warns = asked->check_warns || warns;
        return true;
    }
    if (strncmp(word, check, sizeof check - 1) != 0)
        return false;
    asked->check = dp__number_below(&at, DP__CHECK_EVERY_MAX);
    return *at == '\0' && asked->check > 0;
}

/* Reads one word of $DP_DEBUG; false: it is none. */
static bool dp__debug_word(const char *word, dp_config *asked)
{
    dp_level level = dp__level_of(word);
    if (level == DP_LOG_DEFAULT)
        return dp__check_word(word, asked);
    asked->log.level = level;
    return true;
}

enum { DP__WORD_BYTES = 32 };

/* Reads words between commas. False: one is none; `wrong` is the first of these. */
static bool dp__debug_words(const char *text, dp_config *asked, char wrong[DP__WORD_BYTES])
{
    char word[DP__WORD_BYTES];
    bool good = true;
    for (bool more = text != NULL; more;) {
        int length = (int)strcspn(text, ",");
        dp_config before = *asked;
        snprintf(word, sizeof word, "%.*s", length, text);
        if (length >= DP__WORD_BYTES || !dp__debug_word(word, asked)) {
            *asked = before;
            if (good)
                memcpy(wrong, word, sizeof word);
            good = false;
        }
        more = text[length] == ',';
        text += length + 1;
    }
    return good;
}

/* $DP_DEBUG says what is logged if no log was asked for, and which steps are checked if the config
   does not; a word in it that is unknown is reported. */
static void dp__resolve_debug(dp_ctx *ctx)
{
    dp_config *config = &ctx->config, asked = {.check = 0};
    char wrong[DP__WORD_BYTES];
    const char *debug = dp__os_env("DP_DEBUG");
    bool silent = config->log.fn == NULL && debug != NULL;
    bool good = dp__debug_words(debug, &asked, wrong);
    if (config->check == 0) {
        config->check = asked.check;
        config->check_warns = config->check_warns || asked.check_warns;
    }
    ctx->checks.every = config->check > 0 ? (unsigned)config->check : 0;
    ctx->checks.warns = config->check_warns;
    config->poison = config->poison || ctx->checks.every > 0;
    if (silent)
        config->log = (dp_log){dp_log_stderr, NULL,
                               asked.log.level != DP_LOG_DEFAULT ? asked.log.level : DP_LOG_WARN};
    if (config->log.level == DP_LOG_DEFAULT)
        config->log.level = DP_LOG_INFO;
    if (!good)
        dp__log(ctx, DP_LOG_WARN,
                "DP_DEBUG is '%s', and '%s' is not error, warn, info, trace, check, check=N (each "
                "N-th step) or check=warn",
                debug, wrong);
}

/* ==== >>nodes ==================================================================================
   Where a machine has several nodes (NUMA), threads keep to them, so that memory lies near who uses
   it: see >>os's. All cores are one row, node by node. The processes of the machine divide it, and
   then the devices of each process its part. A thread keeps to whole nodes, those that its part has
   cores of: among their cores the system chooses, as it knows what else runs.

   The caller's thread is the first device's and everything else's: it keeps to all nodes of its
   process, and so do threads that it starts later. With all nodes of the machine it is left alone.

   Who has bound this process, or only some processes of the machine, has divided it already.     */

typedef struct dp__seats { /* of a row */
    int first, count;
} dp__seats;

/* The part of one of several. What they get is as in dp__core_share; where there are fewer cores
   than them, neighbours have the same one. */
static dp__seats dp__seats_of(dp__seats all, dp__share among)
{
    int each = all.count / among.count, more = all.count % among.count;
    int before = among.place * each + (among.place < more ? among.place : more);
    if (each == 0)
        before = (int)((int64_t)among.place * all.count / among.count);
    return (dp__seats){all.first + before, dp__core_share(all.count, among)};
}

/* Adds nodes, one bit each. */
static void dp__add_nodes_of(const dp__row *row, dp__seats seats, dp__cores *nodes)
{
    for (int i = seats.first; i < seats.first + seats.count; i++)
        dp__cores_add(nodes, row->node[i]);
}

static void dp__cores_of_nodes(const dp__row *row, const dp__cores *nodes, dp__cores *out)
{
    *out = (dp__cores){{0}};
    for (int i = 0; i < row->count; i++)
        if (dp__cores_have(nodes, row->node[i]))
            dp__cores_add(out, row->core[i]);
}

typedef struct dp__binding { /* of the threads of a context */
    dp_ctx *ctx;
    const dp__row *row;
    dp__share among; /* processes of the machine */
} dp__binding;

/* Adds a device's. Those of a device with memory of its own are what its bus is near to; false:
   unknown, or without a core. */
static bool dp__add_nodes(const dp__binding *binding, int local_rank, dp__cores *nodes)
{
    const dp_ctx *ctx = binding->ctx;
    const dp__row *row = binding->row;
    const dp_device_info *info = &ctx->devices[local_rank].info;
    dp__seats own = dp__seats_of((dp__seats){0, row->count}, binding->among);
    dp__seats seats = dp__seats_of(own, (dp__share){local_rank, ctx->info.local_count});
    if (!info->host_memory) {
        int node = dp__os_node_of(info->bus_id);
        seats.first = 0;
        while (seats.first < row->count && row->node[seats.first] != node)
            seats.first++;
        seats.count = seats.first < row->count;
    }
    dp__add_nodes_of(row, seats, nodes);
    return seats.count > 0;
}

/* Why threads are left alone; NULL: they are not. */
static const char *dp__unbound_by(const dp_ctx *ctx, const dp__neighbours *near, dp__row *row)
{
    dp__cores mask, all, nodes;
    if (ctx->config.unbound)
        return "config.unbound";
    if (!dp__os_row(row) || row->node_count < 2)
        return "one node";
    dp__os_cores_of(0, &mask);
    memset(&nodes, 0xff, sizeof nodes);
    dp__cores_of_nodes(row, &nodes, &all);
    if (!dp__cores_within(&mask, &all)) /* nobody says where the others are */
        return "one node";
    if (!dp__cores_equal(&mask, &all))
        return "bound before";
    return near->cores.count == near->machine.count ? NULL : "masks differ";
}

/* The thread of the first device, before there are others. NULL, or why all are left alone. */
static const char *dp__bind_caller(const dp__binding *binding)
{
    dp_ctx *ctx = binding->ctx;
    dp__cores nodes = {{0}}, cores;
    bool known = true;
    for (int i = 0; i < ctx->info.local_count; i++)
        known = dp__add_nodes(binding, i, &nodes) && known;
    int count = dp__cores_count(&nodes);
    bool all = count == binding->row->node_count;
    if (!known)
        return "unknown nodes";
    if (all && ctx->info.local_count == 1)
        return "one device";
    dp__cores_of_nodes(binding->row, &nodes, &cores);
    if (!all && !dp__os_bind(&cores, &ctx->bound))
        return "refused";
    ctx->info.node_count = count;
    return NULL;
}

static void dp__bind_worker(int local_rank, void *user)
{
    const dp__binding *binding = user;
    dp__cores nodes = {{0}}, cores;
    dp__os_bound bound; /* as long as the thread lives */
    if (local_rank == 0)
        return;
    dp__add_nodes(binding, local_rank, &nodes);
    dp__cores_of_nodes(binding->row, &nodes, &cores);
    bool done = dp__os_bind(&cores, &bound);
    binding->ctx->slots[local_rank].status = done ? DP_OK : DP_ERR_UNSUPPORTED;
}

static void dp__bind_to_all(int part, void *user)
{
    const dp__binding *binding = user;
    dp__cores nodes, cores;
    dp__os_bound bound;
    (void)part;
    memset(&nodes, 0xff, sizeof nodes);
    dp__cores_of_nodes(binding->row, &nodes, &cores);
    (void)dp__os_bind(&cores, &bound);
}

/* NULL, or why all are left alone: also the caller, and threads that have his cores from him. */
static const char *dp__bind_workers(dp__binding *binding)
{
    dp_ctx *ctx = binding->ctx;
    bool done = true;
    if (ctx->info.local_count == 1 || !dp__team_enter(ctx->team))
        return NULL;
    dp__team_run(ctx->team, ctx->info.local_count, dp__bind_worker, binding);
    for (int i = 1; i < ctx->info.local_count; i++)
        done = done && ctx->slots[i].status == DP_OK;
    if (!done) {
        dp__team_run(ctx->team, ctx->team->thread_count, dp__bind_to_all, binding);
        ctx->bound.thread = 0;
    }
    dp__team_exit(ctx->team);
    return done ? NULL : "refused";
}

/* The threads of a context: devices, and others that share long copies. */
static void dp__devices_tell(const dp_ctx *ctx, int device, const char *activity)
{
    dp__log(ctx, DP_LOG_WARN, "device %d (%s) is waited for: it is in %s", device,
            ctx->info.device_backend, activity);
    dp__activity_ask(dp__activity_of(ctx, device), dp__os_process_id());
}

/* dp__team.lookout: shows other processes the first device that the caller waits for, and logs in
   which functions all are. */
DP__COLD static void dp__devices_look(void *user, uint64_t waited_ns, bool warns)
{
    dp_ctx *ctx = user;
    int first = 0;
    char text[DP__ACTIVITY_BYTES];
    for (int i = 1; i < ctx->info.local_count && waited_ns > 0; i++) { /* the caller has device 0 */
        dp__activity_text(dp__activity_of(ctx, i), waited_ns / 2, "", text);
        if (text[0] == '\0')
            continue;
        first = first != 0 ? first : i;
        if (warns)
            dp__devices_tell(ctx, i, text);
    }
    dp__activity_relay(ctx, first, first != 0 ? dp__activity_of(ctx, first) : NULL);
}

/* Reads $DP_STUCK: threads that are waited for print where they are. */
static void dp__stuck_open(const dp_ctx *ctx)
{
    const char *wanted = dp__os_env("DP_STUCK");
    if (wanted == NULL)
        return;
    if (strcmp(wanted, "stack") != 0)
        dp__log(ctx, DP_LOG_WARN, "DP_STUCK is '%s', not stack", wanted);
    else if (!dp__os_stack_open())
        dp__log(ctx, DP_LOG_WARN,
                "DP_STUCK: no stack can be printed here, as it takes glibc on Linux, and SIGURG");
}

DP__APART static dp_status dp__threads_start(dp_ctx *ctx, const dp__neighbours *near)
{
    dp__row row;
    dp__binding binding = {ctx, &row, near->machine};
    int threads = dp__threads_wanted(ctx);
    const char *why = dp__unbound_by(ctx, near, &row);
    if (why == NULL)
        why = dp__bind_caller(&binding);
    if (threads > 1)
        DP_TRY(dp__team_open(&ctx->host, threads, ctx->info.core_count, &ctx->team));
    if (threads > 1)
        ctx->team->lookout = dp__lookout_of(ctx, dp__devices_look, ctx);
    if (why == NULL)
        why = dp__bind_workers(&binding);
    ctx->info.node_count = why == NULL ? ctx->info.node_count : 0;
    ctx->info.binding = why == NULL ? "nodes" : why;
    return DP_OK;
}

/* What an open context has done to a thread; of several the one whose cores it has. False: none has
   bound it. */
static bool dp__bound_by_others(int thread, dp__os_bound *out)
{
    dp__cores cores;
    bool found = false, has = false;
    dp__os_cores_of(thread, &cores);
    dp__lock_enter(&dp__live_lock);
    for (int i = 0; i < DP__LIVE_MAX && thread != 0 && !has; i++) {
        const dp_ctx *ctx = atomic_load_explicit(&dp__live[i], memory_order_relaxed);
        if (ctx == NULL || ctx->bound.thread != thread)
            continue;
        found = true;
        has = dp__cores_equal(&ctx->bound.now, &cores);
        *out = ctx->bound;
    }
    dp__lock_leave(&dp__live_lock);
    return found;
}

/* A thread has the cores of another context that has bound it; when the last one closes, it is as
   it was before the first. In a child of fork there is no such thread. */
static void dp__unbind(const dp_ctx *ctx)
{
    dp__os_bound others;
    bool more = dp__bound_by_others(ctx->bound.thread, &others);
    (void)dp__os_rebind(&ctx->bound, more ? &others.now : &ctx->bound.before);
}

/* ==== >>devices ================================================================================
   A context's devices are an array of stb_ds, in memory of the context. Only macros are used: the
   functions are global, and do not check what realloc returns. The header is read under other names
   and then forgotten, so that a user's own stb_ds can come before it, after it or not at all.    */

#ifndef INCLUDE_STB_DS_H
#define DP__STB_DS_PRIVATE
#pragma push_macro("STBDS_REALLOC")
#pragma push_macro("STBDS_FREE")
#pragma push_macro("STBDS_NO_SHORT_NAMES")
#pragma push_macro("STB_DS_IMPLEMENTATION")
#undef STBDS_REALLOC
#undef STBDS_FREE
#undef STBDS_NO_SHORT_NAMES
#undef STB_DS_IMPLEMENTATION
#define STBDS_NO_SHORT_NAMES
#define stbds_array_header dp__stbds_array_header
#define stbds_string_arena dp__stbds_string_arena
#define stbds_string_block dp__stbds_string_block
#define stbds_stralloc     dp__stbds_stralloc
#define stbds_strreset     dp__stbds_strreset
#define STBDS_SH_NONE      DP__STBDS_SH_NONE
#define STBDS_SH_DEFAULT   DP__STBDS_SH_DEFAULT
#define STBDS_SH_STRDUP    DP__STBDS_SH_STRDUP
#define STBDS_SH_ARENA     DP__STBDS_SH_ARENA
#if __has_include("stb_ds.h")
#include "stb_ds.h"
#else
#include <stb/stb_ds.h>
#endif
#endif

#define stbds_arrgrowf(array, item_bytes, more, count) (array) /* what is reserved is enough */

/* Pools point to their device, so the array must not move: it is reserved once. */
static bool dp__devices_reserve(dp_ctx *ctx, int count)
{
    size_t bytes = (size_t)count * sizeof *ctx->devices;
    stbds_array_header *head = dp__host_alloc(&ctx->host, sizeof *head + bytes, 64);
    if (head == NULL)
        return false;
    *head = (stbds_array_header){.capacity = (size_t)count};
    ctx->devices = (void *)(head + 1);
    return true;
}

static dp__device *dp__devices_add(dp_ctx *ctx)
{
    stbds_arrput(ctx->devices, (dp__device){0});
    return &stbds_arrlast(ctx->devices);
}

static ptrdiff_t dp__devices_count(const dp_ctx *ctx)
{
    return stbds_arrlen(ctx->devices);
}

#undef stbds_arrgrowf
#ifdef DP__STB_DS_PRIVATE
#undef DP__STB_DS_PRIVATE
#undef INCLUDE_STB_DS_H
#undef stbds_array_header
#undef stbds_string_arena
#undef stbds_string_block
#undef stbds_stralloc
#undef stbds_strreset
#undef STBDS_SH_NONE
#undef STBDS_SH_DEFAULT
#undef STBDS_SH_STRDUP
#undef STBDS_SH_ARENA
#pragma pop_macro("STBDS_REALLOC")
#pragma pop_macro("STBDS_FREE")
#pragma pop_macro("STBDS_NO_SHORT_NAMES")
#pragma pop_macro("STB_DS_IMPLEMENTATION")
#endif

/* ==== >>carrier ==================================================================================
   Which table of collectives serves the devices, and what it makes.                             */

typedef struct dp__choice { /* how collectives are carried */
    dp_comm_config config;
    const dp_coll_ops *ops;
    int place;   /* of that table, in the config */
    bool staged; /* it carries copies in host memory */
} dp__choice;

static bool dp__drives_gpus(const dp_ctx *ctx)
{
    return dp__backend_cuda != NULL &&
           strcmp(ctx->info.device_backend, dp__backend_cuda()->name) == 0;
}

static const char *const dp__nccl_advice =
    ": between GPUs of several processes NCCL carries the bytes, where dp_nccl.h is compiled in "
    "(DP_USE_NCCL, on AMD's DP_USE_RCCL)";

static dp_status dp__comm_lacks(const dp_ctx *ctx, const dp_comm_config *config)
{
    return dp_error(DP_ERR_UNSUPPORTED,
                    "dp_open: no table of collectives serves '%s' devices of %d processes%s",
                    ctx->info.device_backend, ctx->info.process_count,
                    dp__drives_gpus(ctx)   ? dp__nccl_advice
                    : !config->one_machine ? " on several machines"
                                           : "");
}

static void dp__comm_fit(const dp_ctx *ctx, dp__choice *choice)
{
    const dp_coll_ops *const *colls = ctx->config.colls;
    for (choice->place = 0; colls[choice->place] != NULL; choice->place++)
        if (colls[choice->place]->fits(&choice->config))
            break;
    choice->ops = colls[choice->place];
}

/* The first table that fits. If there is none for devices with memory of their own, it is the first
   that fits the host: see >>staging. A process that is alone needs none: a table that connects
   processes serves also the groups and the recoveries that leave one by itself. */
static dp_status dp__comm_choose(const dp_ctx *ctx, dp__choice *choice)
{
    dp_comm_config *config = &choice->config;
    bool own_memory = !config->host_memory;
    dp__comm_fit(ctx, choice);
    if (choice->ops == NULL && own_memory) {
        choice->staged = true;
        config->host_memory = true;
        config->local += config->local_count;
        dp__comm_fit(ctx, choice);
    }
    if (choice->ops == NULL && config->bootstrap == NULL)
        choice->ops = dp_cpu_coll();
    if (choice->ops == NULL)
        return dp__comm_lacks(ctx, config);
    if (choice->staged && config->bootstrap != NULL && dp__drives_gpus(ctx))
        dp__log(ctx, DP_LOG_WARN, "collectives go through the host%s", dp__nccl_advice);
    return DP_OK;
}

static dp_status dp__lane_open(dp__lane *lane, const dp__choice *choice)
{
    dp_comm *comm = NULL;
    DP_TRY(choice->ops->open(&lane->ctx->host, &choice->config, &comm));
    if (choice->staged)
        DP_TRY(dp__staging_open(lane, comm));
    else
        lane->comm = comm;
    lane->carrier = comm;
    return DP_OK;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
