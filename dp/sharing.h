/* dp/sharing.h - v0.2.0 - parameters that the processes of a machine have once - MIT licence

   Part of dp.h, which includes it. It maps parameters into memory that the processes share, and
   sends what was written on one machine to the others.

   CONTENTS (search for the tag)
     >>machines what is written on one machine, on the others
     >>sharing  parameters that the processes of a machine have once
     >>edits    when they are written, and by whom
*/

#ifndef DP__ROOMS
#error "dp/sharing.h is a part of dp.h: include dp.h"
#else

/* ==== >>machines ================================================================================
   Where the processes that share parameters are on several machines, each machine has one copy, and
   what was written on one travels to the others in strips. For each strip there is one process that
   sends it, and one of each other machine that receives it: the one with the same place there, if
   there are as many. So every link carries it once a machine. Messages carry strips; if nothing
   carries messages, each strip is a broadcast, which reaches all processes.                     */

enum { DP__STRIPS_AT_ONCE = 64, DP__STRIP_ASIDE = 1 << 18 };

typedef struct dp__cluster { /* which processes are on which machine */
    int machine_count, own;  /* own: this process' machine */
    int *machine, *place;    /* by process: its machine, and its place there */
    int *first;              /* by machine: where its processes begin in `members` */
    int *members;            /* process after process, machine after machine */
    bool by_messages;
} dp__cluster;

typedef struct dp__strip {
    char *data;
    size_t bytes;
    int from;       /* the process that sends it */
    const bool *on; /* by machine: where it is already; NULL: on that of the sender alone */
} dp__strip;

typedef struct dp__sending {
    const char *fn;
    dp_ctx *ctx;
    const dp__cluster *all;
    dp_message *messages; /* so many at once, of which `count` are begun together */
    size_t count;
    dp_part *parts; /* by local rank, of a broadcast */
    char *aside;    /* of each local rank, where a broadcast is not wanted */
} dp__sending;

static int dp__machine_size(const dp__cluster *all, int machine)
{
    return all->first[machine + 1] - all->first[machine];
}

/* A process of a machine, by its place there; places count on from the first after the last. */
static int dp__machine_member(const dp__cluster *all, int machine, int place)
{
    return all->members[all->first[machine] + place % dp__machine_size(all, machine)];
}

static void dp__cluster_fill(dp__cluster *all, const dp__job *job)
{
    int count = job->process_count, placed = 0;
    for (int p = 0; p < count; p++) {
        int same = 0;
        while (job->introductions[same].machine != job->introductions[p].machine)
            same++;
        all->machine[p] = same < p ? all->machine[same] : all->machine_count++;
    }
    for (int m = 0; m < all->machine_count; m++) {
        all->first[m] = placed;
        for (int p = 0; p < count; p++) {
            if (all->machine[p] != m)
                continue;
            all->place[p] = placed - all->first[m];
            all->members[placed++] = p;
        }
    }
    all->first[all->machine_count] = placed;
    all->own = all->machine[job->process];
}

static dp_status dp__cluster_make(const dp_ctx *ctx, dp_scope *scope, dp__cluster **out)
{
    size_t count = (size_t)ctx->info.process_count;
    dp__cluster *all = dp__array(scope, 1, sizeof *all);
    int *numbers = dp__array(scope, 4 * count + 1, sizeof *numbers);
    if (all == NULL || numbers == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu processes", count);
    *all = (dp__cluster){.machine = numbers,
                         .place = numbers + count,
                         .members = numbers + 2 * count,
                         .first = numbers + 3 * count};
    dp__cluster_fill(all, ctx->world.job);
    *out = all;
    return DP_OK;
}

static dp_status dp__sending_make(const char *fn, dp_ctx *ctx, const dp__cluster *all,
                                  dp_scope *temp, dp__sending *out)
{
    size_t locals = (size_t)ctx->info.local_count;
    *out = (dp__sending){.fn = fn, .ctx = ctx, .all = all};
    if (all->by_messages) {
        out->messages = dp__array(temp, DP__STRIPS_AT_ONCE, sizeof *out->messages);
    } else {
        out->parts = dp__array(temp, locals, sizeof *out->parts);
        out->aside = dp__array(temp, locals, DP__STRIP_ASIDE);
    }
    if (all->by_messages ? out->messages == NULL : out->parts == NULL || out->aside == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory to send parameters", fn);
    return DP_OK;
}

/* All that was begun so far. */
static dp_status dp__sending_end(dp__sending *sending)
{
    size_t count = sending->count;
    sending->count = 0;
    DP_TRY(dp__messages_begin(sending->fn, sending->ctx, sending->messages, count, true));
    return dp__messages_end(sending->fn, sending->ctx, sending->messages, count);
}

/* Returns the process that receives a strip on a machine; -1: none has to. */
static int dp__strip_to(const dp__cluster *all, const dp__strip *strip, int machine)
{
    bool there = strip->on != NULL ? strip->on[machine] : machine == all->machine[strip->from];
    return there ? -1 : dp__machine_member(all, machine, all->place[strip->from]);
}

/* All processes take the strips in one order, so nobody waits for a strip while another process
   waits for a later one in its place. */
static dp_status dp__strip_messages(dp__sending *sending, const dp__strip *strip)
{
    const dp__cluster *all = sending->all;
    const dp_ctx *ctx = sending->ctx;
    const int64_t bytes = (int64_t)strip->bytes;
    int own = ctx->info.process;
    for (int m = 0; m < all->machine_count; m++) {
        int to = dp__strip_to(all, strip, m), peer = own == to ? strip->from : to;
        if (to < 0 || (own != to && own != strip->from))
            continue;
        sending->messages[sending->count++] =
            (dp_message){.tensor = dp_wrap(strip->data, DP_U8, 1, &bytes),
                         .peer = ctx->world.job->firsts[peer],
                         .receives = own == to};
        if (sending->count == DP__STRIPS_AT_ONCE)
            DP_TRY(dp__sending_end(sending));
    }
    return DP_OK;
}

static dp_status dp__strip_broadcast(const dp__sending *sending, const dp__strip *strip)
{
    dp_ctx *ctx = sending->ctx;
    int own = ctx->info.process;
    bool wants = own == strip->from || own == dp__strip_to(sending->all, strip, sending->all->own);
    for (size_t at = 0, count; at < strip->bytes; at += count) {
        count = strip->bytes - at < DP__STRIP_ASIDE ? strip->bytes - at : DP__STRIP_ASIDE;
        for (int r = 0; r < ctx->info.local_count; r++) {
            char *aside = sending->aside + (size_t)r * DP__STRIP_ASIDE;
            char *data = r == 0 && wants ? strip->data + at : aside;
            sending->parts[r] = (dp_part){.send = data, .recv = data};
        }
        const dp__coll coll = {.fn = sending->fn,
                               .lane = &ctx->lanes[DP__CALLER],
                               .call = {.verb = DP_BROADCAST,
                                        .local = sending->parts,
                                        .count = count,
                                        .dtype = DP_U8,
                                        .scale = 1,
                                        .root = ctx->world.job->firsts[strip->from]}};
        DP_TRY(dp__collective_run(&coll));
    }
    return DP_OK;
}

static dp_status dp__strip_send(dp__sending *sending, const dp__strip *strip)
{
    if (strip->bytes == 0)
        return DP_OK;
    return sending->all->by_messages ? dp__strip_messages(sending, strip)
                                     : dp__strip_broadcast(sending, strip);
}

/* Each process has written the shares of its ranks, and the first one the rest. */
static dp_status dp__shares_send(dp__sending *sending, const dp_module *wrapper)
{
    const dp__job *job = sending->ctx->world.job;
    for (size_t s = 0; s < wrapper->stretch_count; s++) {
        const dp_stretch *stretch = &wrapper->stretches[s];
        const dp__param *root = dp__param_at(wrapper, stretch->params[0]);
        size_t size = dp__dtype_sizes[stretch->dtype], each = stretch->share * size;
        size_t cut = each * (size_t)sending->ctx->info.rank_count;
        for (int p = 0; p < job->process_count; p++) {
            const dp__strip strip = {.data = (char *)root->data.data +
                                             each * (size_t)job->firsts[p],
                                     .bytes = each * (size_t)dp__rank_count_of(job, p),
                                     .from = p};
            DP_TRY(dp__strip_send(sending, &strip));
        }
        const dp__strip rest = {.data = (char *)root->data.data + cut,
                                .bytes = stretch->count * size - cut};
        DP_TRY(dp__strip_send(sending, &rest));
    }
    return dp__sending_end(sending);
}

/* `on`: on which machines it was written. It is cut among the processes of the first of these. */
static dp_status dp__param_send(dp__sending *sending, const dp_tensor *data, const bool *on)
{
    size_t bytes = dp__bytes(data);
    int first = 0;
    while (!on[first])
        first++;
    size_t count = (size_t)dp__machine_size(sending->all, first);
    size_t each = dp__align_up((bytes + count - 1) / count, 64);
    for (size_t at = 0, place = 0; at < bytes; at += each, place++) {
        const dp__strip strip = {.data = (char *)data->data + at,
                                 .bytes = bytes - at < each ? bytes - at : each,
                                 .from = dp__machine_member(sending->all, first, (int)place),
                                 .on = on};
        DP_TRY(dp__strip_send(sending, &strip));
    }
    return DP_OK;
}

/* ==== >>sharing ==================================================================================
   Parameters that the processes of a machine have once. Their blocks are pages of each process, in
   whose place it maps a part of the shared memory, which the first process has in its heap; so
   addresses stay. That one is a room: it has the numbers of rank 0, and before its first page how
   many processes use it. When the wrapper ends each process takes pages of its own, with a copy of
   the numbers, and leaves the room; after the last one has left it is used again.                */

/* The block that begins there. */
static dp__block *dp__block_at(dp_ctx *ctx, const void *data)
{
    dp__lock_enter(&ctx->lock);
    dp__block *block = ctx->all_blocks;
    while (block != NULL && (block->data != data || block->pool != &ctx->page_pool))
        block = block->made_before;
    dp__lock_leave(&ctx->lock);
    return block;
}

/* One that nobody uses any more, or a new one, for so many processes. *out_at: where its pages
   begin. */
static dp_status dp__room_take(dp_ctx *ctx, dp__heap *heap, size_t bytes, int users, size_t *out_at)
{
    dp__heap_room *room = heap->rooms;
    void *data = NULL;
    while (room != NULL &&
           (atomic_load(&room->head->users) > 0 || room->bytes < bytes || room->bytes / 2 > bytes))
        room = room->next;
    if (room == NULL) {
        room = dp__host_alloc(&ctx->host, sizeof *room, _Alignof(dp__heap_room));
        if (room == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu bytes", sizeof *room);
        *room = (dp__heap_room){.next = heap->rooms, .bytes = bytes};
        DP_TRY(dp__heap_take(ctx, heap, DP__SHARED_PAGE + bytes, DP__SHARED_PAGE, &data));
        room->head = data;
        room->at = (size_t)((char *)data - (char *)heap->shared->data) + DP__SHARED_PAGE;
        heap->rooms = room;
    }
    atomic_store(&room->head->users, users);
    *out_at = room->at;
    return DP_OK;
}

/* A block for each range: what lies together there is all of its parameters. */
static dp_status dp__sharing_make(const dp__face *face, const dp__cluster *all, dp__sharing **out)
{
    dp_ctx *ctx = face->ctx;
    const dp__layout *layout = &face->layouts[DP__PARAMS];
    dp__sharing *sharing = dp__array(face->scope, 1, sizeof *sharing);
    dp__once *blocks = dp__array(face->scope, layout->range_count, sizeof *blocks);
    if (sharing == NULL || blocks == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu blocks", layout->range_count);
    *sharing = (dp__sharing){.ctx = ctx,
                             .heap = all != NULL ? &ctx->world.near : &ctx->world.heap,
                             .cluster = all,
                             .count = layout->range_count,
                             .blocks = blocks};
    for (size_t i = 0; i < layout->range_count; i++) {
        dp_tensor range = dp__range_of(face, DP__PARAMS, i, 0);
        blocks[i].bytes = dp__bytes(&range);
        blocks[i].pages = dp__align_up(blocks[i].bytes, DP__SHARED_PAGE);
        blocks[i].block = dp__block_at(ctx, range.data);
        if (blocks[i].block == NULL)
            return dp_error(DP_ERR_INTERNAL, "parameters of '%s' are in no block of their own",
                            face->inner->name);
    }
    *out = sharing;
    return DP_OK;
}

/* places: where in the shared memory they are to be, of the machine's first process alone. */
static dp_status dp__sharing_rooms(const dp__sharing *sharing, uint64_t *places)
{
    const dp__cluster *all = sharing->cluster;
    int users = all != NULL ? dp__machine_size(all, all->own) : sharing->ctx->info.process_count;
    dp__heap *heap = sharing->heap;
    for (size_t i = 0; i < sharing->count; i++) {
        const dp__once *once = &sharing->blocks[i];
        size_t at = 0;
        DP_TRY(dp__room_take(sharing->ctx, heap, once->pages, users, &at));
        places[i] = at;
        memcpy((char *)heap->shared->data + at, once->block->data, once->bytes);
    }
    return DP_OK;
}

/* They were taken for nothing. */
static void dp__rooms_leave(const dp__heap *heap, const uint64_t *places, size_t count)
{
    for (dp__heap_room *room = heap->rooms; room != NULL && places != NULL; room = room->next)
        for (size_t i = 0; i < count; i++)
            if (room->at == places[i])
                atomic_store(&room->head->users, 0);
}

/* The process' own pages go. */
static dp_status dp__sharing_map(dp__sharing *sharing, const uint64_t *places)
{
    const dp__shared *shared = sharing->heap->shared;
    for (size_t i = 0; i < sharing->count; i++) {
        dp__once *once = &sharing->blocks[i];
        DP_TRY(dp__os_pages_share(once->block->data, once->pages, shared, places[i]));
        once->block->everybodys = true;
        once->head = (void *)((char *)shared->data + places[i] - DP__SHARED_PAGE);
    }
    return DP_OK;
}

/* Gives all processes of this machine the words of its first one. */
static dp_status dp__words_here(const char *fn, dp_ctx *ctx, dp_scope *temp, const dp__cluster *all,
                                void *words, size_t bytes)
{
    if (all == NULL)
        return dp__words_of(fn, ctx, 0, words, bytes);
    void *others = dp__array(temp, 1, bytes);
    DP_TRY(dp__all_or_none(fn, ctx, others != NULL ? DP_OK : dp__no_memory()));
    for (int m = 0; m < all->machine_count; m++) {
        int rank = ctx->world.job->firsts[all->members[all->first[m]]];
        void *to = m == all->own ? words : others;
        DP_TRY(dp__words_of(fn, ctx, rank, to, bytes));
    }
    return DP_OK;
}

/* With several machines, the processes of each get a heap when they first need it. The first of
   them makes it, and is the only one that gives out from it. */
static dp_status dp__heap_near(const char *fn, dp_scope *temp, const dp_module *module,
                               const dp__cluster *all)
{
    dp_ctx *ctx = module->ctx;
    dp__job *job = ctx->world.job;
    bool first = all->place[job->process] == 0;
    const dp__heap heap = dp__heap_behind(&job->near, 0, 1, 0);
    dp__shared_name name = {.fd = -1};
    char why[200];
    dp_status status = first ? dp__os_shared_make(false, heap.each, &job->near, &name) : DP_OK;
    DP_TRY(dp__words_here(fn, ctx, temp, all, &name, sizeof name));
    if (!first)
        status = dp__os_shared_find(&name, heap.each, &job->near);
    if (status != DP_OK) {
        snprintf(why, sizeof why, "%s (%.120s)", dp__unseen, dp_last_error());
        status = dp__unshareable(fn, module, why);
    }
    status = dp__all_or_none(fn, ctx, status);
    if (status != DP_OK)
        dp__os_shared_close(&job->near);
    DP_TRY(status);
    dp__os_shared_dump(&job->near, 0, heap.each, false);
    ctx->world.near = heap;
    return DP_OK;
}

/* Finds out who is on which machine, and what carries parameters from one to another. */
static dp_status dp__params_cluster(const char *fn, dp_scope *temp, const dp_module *wrapper,
                                    dp__cluster **out)
{
    dp_ctx *ctx = wrapper->ctx;
    dp__cluster *all = NULL;
    dp_status status = dp__cluster_make(ctx, wrapper->face->scope, &all);
    if (status == DP_OK)
        status = dp__mailbox_open(ctx);
    DP_TRY(dp__all_or_none(fn, ctx, status));
    int64_t carried = dp__mailbox_reaches(ctx->world.mailbox);
    DP_TRY(dp__lowest(fn, ctx, &carried));
    all->by_messages = carried != 0;
    *out = all;
    return ctx->world.near.shared == NULL ? dp__heap_near(fn, temp, wrapper->face->inner, all)
                                          : DP_OK;
}

/* From now on parameters are the wrapper's. */
static dp_status dp__sharing_begin(const char *fn, dp_module *wrapper, dp__sharing *sharing)
{
    const dp_module *inner = wrapper->face->inner;
    for (size_t home = 0; home < inner->listed_count; home++) {
        dp__param *root = dp__param_at(inner, home);
        if (dp__is_of_sort(root, DP__PARAMS))
            root->sharing = sharing;
    }
    sharing->seen = dp__writes_of(sharing);
    sharing->wrapper = wrapper;
    wrapper->sharing = sharing;
    wrapper->ctx->world.sharings++;
    return dp__all_or_none(fn, wrapper->ctx, DP_OK); /* nobody writes before all are here */
}

/* Once they have agreed upon rooms, what fails, fails the job. */
static dp_status dp__params_share(const char *fn, dp_scope *temp, dp_module *wrapper)
{
    const dp__face *face = wrapper->face;
    dp_ctx *ctx = face->ctx;
    dp__sharing *sharing = NULL;
    dp__cluster *all = NULL;
    if (ctx->info.machine_count > 1)
        DP_TRY(dp__params_cluster(fn, temp, wrapper, &all));
    size_t ranges = face->layouts[DP__PARAMS].range_count;
    uint64_t *places = dp__array(temp, ranges, sizeof *places);
    dp_status status = places != NULL
                           ? dp__sharing_make(face, all, &sharing)
                           : dp_error(DP_ERR_NO_MEMORY, "no memory for %zu places", ranges);
    if (status == DP_OK && (all != NULL ? all->place[ctx->info.process] : ctx->info.process) == 0)
        status = dp__sharing_rooms(sharing, places);
    status = dp__all_or_none(fn, ctx, status);
    if (status != DP_OK)
        dp__rooms_leave(all != NULL ? &ctx->world.near : &ctx->world.heap, places, ranges);
    DP_TRY(status);
    DP_TRY(dp__words_here(fn, ctx, temp, all, places, ranges * sizeof *places));
    DP_TRY(dp__shared_failure(ctx, dp__sharing_map(sharing, places)));
    return dp__sharing_begin(fn, wrapper, sharing);
}

/* ==== >>edits ==================================================================================
   When all processes have come to begin one, none is in a pass; when all have come to its end, all
   have written. Where they are on several machines, each machine then gets what was written on
   others: shares, if processes say so, else whole parameters. What several machines have written
   has to be the same, which hashes tell: then it does not travel.                               */

/* Notes that all have what some process may have written: passes of before know other numbers. */
static void dp__edits_note(dp_module *module)
{
    for (size_t i = 0; i < module->listed_count; i++) {
        const dp__sharing *sharing = dp__param_at(module, i)->sharing;
        if (sharing != NULL && dp__writes_of(sharing) != sharing->seen)
            dp__param_changed(module, i);
    }
    for (size_t i = 0; i < module->listed_count; i++) {
        dp__param *root = dp__param_at(module, i);
        if (root->sharing == NULL)
            continue;
        root->sharing->seen = dp__writes_of(root->sharing);
        root->sharing->writes = root->sharing->shares = root->asked = false;
    }
}

/* ---- between machines ------------------------------------------------------------------------ */

typedef struct dp__edit_report { /* what all have written since they last met */
    const char *fn;
    dp_module *module;
    const dp__cluster *all;
    int64_t shares, params; /* whether there are some */
    bool *on;               /* parameter after parameter, by machine: whether one of its processes
                               has asked for it */
    size_t differs; /* a parameter that machines have written in several ways; or SIZE_MAX */
} dp__edit_report;

static dp__edit_report dp__edited_here(const char *fn, dp_module *module)
{
    dp__edit_report edited = {.fn = fn, .module = module, .differs = SIZE_MAX};
    for (size_t i = 0; i < module->listed_count; i++) {
        const dp__param *root = dp__param_at(module, i);
        if (root->sharing == NULL)
            continue;
        edited.all = root->sharing->cluster;
        edited.shares |= root->sharing->shares;
        edited.params |= root->asked;
    }
    return edited;
}

static dp__sharing *dp__edited_sharing(const dp__edit_report *edited, size_t param)
{
    return dp__param_at(edited->module, param)->sharing;
}

static bool *dp__edited_on(const dp__edit_report *edited, size_t param)
{
    return edited->on + param * (size_t)edited->all->machine_count;
}

static int dp__edited_count(const dp__edit_report *edited, size_t param)
{
    int count = 0;
    for (int m = 0; m < edited->all->machine_count; m++)
        count += dp__edited_on(edited, param)[m];
    return count;
}

static bool dp__has_bit(const uint64_t *words, size_t i)
{
    return words[i / 64] >> i % 64 & 1;
}

/* Every process says what it has asked for, and of which parameters it has written shares, a bit
   each. */
static dp_status dp__edited_find(dp__edit_report *edited, dp_scope *temp)
{
    const dp_module *module = edited->module;
    dp_ctx *ctx = module->ctx;
    size_t count = module->listed_count, words = (2 * count + 63) / 64;
    const dp_coll_call call = {.verb = DP_ALL_GATHER, .count = words, .dtype = DP_I64};
    uint64_t *own = dp__array(temp, words, sizeof *own);
    uint64_t *all = dp__array(temp, words * (size_t)ctx->info.rank_count, sizeof *all);
    edited->on = dp__array(temp, count * (size_t)edited->all->machine_count, sizeof(bool));
    if (own == NULL || all == NULL || edited->on == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu parameters", edited->fn, count);
    for (size_t i = 0; i < count; i++) {
        const dp__sharing *sharing = dp__edited_sharing(edited, i);
        size_t behind = count + i;
        bool asked = dp__param_at(module, i)->asked;
        own[i / 64] |= (uint64_t)asked << i % 64;
        own[behind / 64] |= (uint64_t)(sharing != NULL && sharing->shares) << behind % 64;
    }
    DP_TRY(dp__numbers(edited->fn, ctx, call, own, all));
    for (int p = 0; p < ctx->info.process_count; p++) {
        const uint64_t *other = all + (size_t)ctx->world.job->firsts[p] * words;
        for (size_t i = 0; i < count; i++) {
            if (dp__has_bit(other, i))
                dp__edited_on(edited, i)[edited->all->machine[p]] = true;
            if (dp__has_bit(other, count + i))
                dp__edited_sharing(edited, i)->shares = true;
        }
    }
    return DP_OK;
}

/* Eight bytes at a time; never negative. */
static int64_t dp__edited_hash(const dp_tensor *data)
{
    const char *from = data->data;
    uint64_t hash = dp__hash_first, word;
    size_t bytes = dp__bytes(data), at = 0;
    for (; at + sizeof word <= bytes; at += sizeof word) {
        memcpy(&word, from + at, sizeof word);
        hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
        hash ^= hash >> 32;
    }
    return (int64_t)(dp__hash(hash, from + at, bytes - at) >> 1);
}

/* If several machines have written a parameter, one process of each gives its hash, and the
   negative of that: the least of these are each other's negatives only if there is one hash. Else
   the first machine's numbers are for all. */
static dp_status dp__edited_compare(dp__edit_report *edited, dp_scope *temp)
{
    const dp_module *module = edited->module;
    const dp__cluster *all = edited->all;
    dp_ctx *ctx = module->ctx;
    size_t size = (size_t)dp__machine_size(all, all->own), count = module->listed_count;
    const dp_coll_call call = {.count = 2 * count, .dtype = DP_I64, .op = DP_OP_MIN};
    int64_t(*hashes)[2] = dp__array(temp, count, sizeof *hashes);
    if (hashes == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu hashes", edited->fn, count);
    for (size_t i = 0; i < count; i++) {
        bool tells = dp__edited_count(edited, i) > 1 && dp__edited_on(edited, i)[all->own] &&
                     i % size == (size_t)all->place[ctx->info.process];
        hashes[i][0] = hashes[i][1] = INT64_MAX;
        if (!tells)
            continue;
        hashes[i][0] = dp__edited_hash(&dp__param_at(module, i)->data);
        hashes[i][1] = -hashes[i][0];
    }
    DP_TRY(dp__numbers(edited->fn, ctx, call, hashes, hashes));
    for (size_t i = 0; i < count; i++) {
        bool *on = dp__edited_on(edited, i), found = false;
        if (dp__edited_count(edited, i) < 2 || hashes[i][0] == -hashes[i][1])
            continue;
        edited->differs = edited->differs != SIZE_MAX ? edited->differs : i;
        for (int m = 0; m < all->machine_count; m++) {
            on[m] = on[m] && !found;
            found = found || on[m];
        }
    }
    return DP_OK;
}

static dp_status dp__params_send(dp__sending *sending, const dp__edit_report *edited)
{
    const dp_module *module = edited->module;
    for (size_t i = 0; i < module->listed_count; i++)
        if (dp__edited_count(edited, i) > 0)
            DP_TRY(
                dp__param_send(sending, &dp__param_at(module, i)->data, dp__edited_on(edited, i)));
    return dp__sending_end(sending);
}

/* Adds the shares of each wrapper once. */
static dp_status dp__edited_shares(const dp__edit_report *edited, dp__sending *sending)
{
    const dp_stretch *stretches;
    size_t count;
    for (size_t i = 0; i < edited->module->listed_count; i++) {
        dp__sharing *sharing = dp__edited_sharing(edited, i);
        if (sharing == NULL || !sharing->shares)
            continue;
        sharing->shares = false;
        DP_TRY(dp_module_stretches(sharing->wrapper, &stretches, &count));
        DP_TRY(dp__enter(edited->fn, sending->ctx));
        DP_TRY(dp__exit(edited->fn, sending->ctx, dp__shares_send(sending, sharing->wrapper)));
    }
    return DP_OK;
}

/* A process that has failed may have asked for parameters of which others have written shares.
   These have come everywhere before anybody sends the whole. */
static dp_status dp__edited_params(dp__edit_report *edited, dp_scope *temp, dp__sending *sending)
{
    if (edited->shares)
        DP_TRY(dp__all_or_none(edited->fn, sending->ctx, DP_OK));
    DP_TRY(dp__edited_compare(edited, temp));
    DP_TRY(dp__enter(edited->fn, sending->ctx));
    return dp__exit(edited->fn, sending->ctx, dp__params_send(sending, edited));
}

/* Shares that nobody has written do not matter, unless somebody has written the whole. */
static dp_status dp__edited_send(dp__edit_report *edited, dp_scope *temp)
{
    dp_module *module = edited->module;
    dp__sending sending;
    DP_TRY(dp__sending_make(edited->fn, module->ctx, edited->all, temp, &sending));
    for (size_t i = 0; i < module->listed_count && !edited->params; i++)
        if (dp__edited_sharing(edited, i) != NULL)
            dp__edited_sharing(edited, i)->shares = edited->shares;
    if (edited->params)
        DP_TRY(dp__edited_find(edited, temp));
    DP_TRY(dp__edited_shares(edited, &sending));
    return edited->params ? dp__edited_params(edited, temp, &sending) : DP_OK;
}

/* Fails as the job does. */
static dp_status dp__edited_spread(dp__edit_report *edited)
{
    const dp_coll_call call = {.count = 2, .dtype = DP_I64, .op = DP_OP_MAX};
    dp_module *module = edited->module;
    dp_ctx *ctx = module->ctx;
    dp_scope *temp = NULL;
    int64_t some[2] = {edited->shares, edited->params};
    DP_TRY(dp__numbers(edited->fn, ctx, call, some, some)); /* now all have written */
    edited->shares = some[0];
    edited->params = some[1];
    if (!edited->shares && !edited->params)
        return DP_OK;
    dp_status status = dp__temp_begin(ctx, &temp);
    if (status == DP_OK)
        status = dp__edited_send(edited, temp);
    status = dp__temp_end(temp, NULL, status);
    for (size_t i = 0; i < module->listed_count; i++) { /* it may have got something */
        dp__sharing *sharing = dp__edited_sharing(edited, i);
        if (sharing != NULL)
            dp__write_count(sharing);
    }
    return dp__leave(edited->fn, ctx, dp__shared_failure(ctx, status));
}

/* All get the first failure of a process, and know what all have written. */
static dp_status dp__edits_meet(const char *fn, dp_module *module, dp_status status)
{
    char text[DP__TEXT_BYTES];
    dp__edit_report edited = dp__edited_here(fn, module);
    memcpy(text, dp__of_thread.text, sizeof text);
    if (edited.all != NULL)
        DP_TRY(dp__edited_spread(&edited));
    if (status != DP_OK)
        dp_error(status, "%s", text);
    status = dp_agree(module->ctx, status);
    dp__edits_note(module);
    if (status == DP_OK && edited.differs != SIZE_MAX)
        return dp_error(DP_ERR_MISMATCH,
                        "%s: machines have written different numbers to '%s', and those of the "
                        "first of them are everybody's: parts of a parameter are written on one "
                        "machine",
                        fn, dp__name_at(module, edited.differs));
    return status;
}

/* ---- the public edge ------------------------------------------------------------------------- */

/* An edit of as many parameters as the module has, or more. */
static dp_status dp__check_editing(const char *fn, const dp_module *module)
{
    bool open = true;
    dp__edits_count(module, -1);
    for (size_t i = 0; i < module->listed_count; i++) {
        const dp__sharing *sharing = dp__param_at(module, i)->sharing;
        open = open && (sharing == NULL || sharing->edits >= 0);
    }
    dp__edits_count(module, 1);
    if (open)
        return DP_OK;
    return dp_error(DP_ERR_STATE, "%s: no edit of '%s' is open: dp_edit_begin first", fn,
                    module->name);
}

/* Stretches of what a wrapper wraps are not cut as those of the wrapper are. */
static dp_status dp__check_stretched(const char *fn, const dp_module *module)
{
    const dp__sharing *last = NULL;
    for (size_t i = 0; i < module->listed_count; i++) {
        const dp__sharing *sharing = dp__param_at(module, i)->sharing;
        if (sharing != NULL && sharing != last && !dp__tree_holds(module, sharing->wrapper))
            return dp_error(DP_ERR_INVALID,
                            "%s: '%s' is in a wrapper that shares its parameters, '%s': give that "
                            "one",
                            fn, module->name, sharing->wrapper->name);
        last = sharing;
    }
    return DP_OK;
}

/* Tells all what was written in an edit that is open already, before one in it begins. */
DP_API dp_status dp_edit_begin(dp_module *module, dp_status status)
{
    DP_TRY(dp__check_unshared(__func__, module));
    if (!dp__shares(module))
        return status;
    DP_TRY(dp__is_edited(module) ? dp__edits_meet(__func__, module, status)
                                 : dp_agree(module->ctx, status));
    dp__edits_count(module, 1);
    return DP_OK;
}

DP_API dp_status dp_edit_shares(dp_module *module)
{
    DP_TRY(dp__check_unshared(__func__, module));
    if (!dp__shares(module))
        return DP_OK;
    DP_TRY(dp__check_editing(__func__, module));
    DP_TRY(dp__check_stretched(__func__, module));
    for (size_t i = 0; i < module->listed_count; i++) {
        dp__param *root = dp__param_at(module, i);
        root->asked = false;
        if (root->sharing != NULL)
            root->sharing->shares = true;
    }
    return DP_OK;
}

DP_API dp_status dp_edit_end(dp_module *module, dp_status status)
{
    DP_TRY(dp__check_unshared(__func__, module));
    if (!dp__shares(module))
        return status;
    DP_TRY(dp__check_editing(__func__, module));
    status = dp__edits_meet(__func__, module, status);
    dp__edits_count(module, -1);
    return status;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
