/* dp/distributed.h - v0.2.0 - a module on all ranks of a job - MIT licence

   Part of dp.h, which includes it.

   CONTENTS (search for the tag)
     >>units        a face of all ranks: its parameters become units of a reducer
     >>rounds       forward and backward of all ranks
     >>checks       what they compare where steps are checked
     >>ends         how a pass over ranks ends
     >>sharable     whether processes can have parameters once
     >>distributed  dp_distributed, and what can be asked
     >>stretches    which parameters are stepped at once
     >>shares       whether gradients are scattered
     >>buffers      made equal when the user says so
     >>separate     children on all ranks, each by itself
     >>report       what is known of it, as a table
*/

#ifndef DP__ROOMS
#error "dp/distributed.h is a part of dp.h: include dp.h"
#else

/* ==== >>units ==================================================================================
   A face of all ranks has a replica on each local rank. Its ranges of gradients are the blocks of a
   reducer, its parameters the units; a gap between two parameters of a range belongs to the first
   of them, so that a bucket is one span where its memory is. Ranges are the same on all ranks. */

#define DP__NO_UNIT UINT32_MAX

/* "parameter 'h.0.w' f32 [64, 32], frozen" */
static void dp__param_line(const dp_module *module, size_t home, char *text, size_t bytes)
{
    const dp__param *param = dp__param_at(module, home);
    size_t used = dp__append(text, bytes, 0, "%s '%.100s' %s [",
                             param->buffer ? "buffer" : "parameter", dp__name_at(module, home),
                             dp__dtype_names[param->data.dtype]);
    for (int i = 0; i < param->data.ndim; i++)
        used = dp__append(text, bytes, used, "%s%lld", i > 0 ? ", " : "",
                          (long long)param->data.shape[i]);
    (void)dp__append(text, bytes, used, "]%s", param->frozen ? ", frozen" : "");
}

typedef enum dp__met { /* how far a pass has come in meeting the other ranks */
                       DP__MET_NOBODY,
                       DP__MET_FOR_BUFFERS,
                       DP__MET_FOR_GRADS
} dp__met;

typedef struct dp__unit_share {
    size_t each, at; /* see dp_stretch.share; elements before it in its stretch */
} dp__unit_share;

struct dp__distributed {
    dp_distributed_config config; /* with its reduction, but none of its pointers counts */
    dp_reducer *reducer;
    dp_scope *reducer_scope;
    size_t unit_count;
    uint32_t *units;        /* by slot */
    size_t *homes;          /* by unit */
    dp__unit_share *shares; /* likewise */
    uint32_t *names;        /* by unit: slots that share it */
    uint32_t *said;         /* local ranks by units: names that dp_grad_ready said in this pass */
    uint32_t *rest;         /* by local rank: units that backward did not say anything of */
    double *samples;        /* by local rank, of this pass */
    uint64_t zeroed;        /* dp_module.zeroed, when gradients were last looked at */
    bool reduced;           /* they hold what was reduced */
    bool owes;              /* a step without sync failed here alone */
    uint64_t owed;          /* a hash of its data */
    uint64_t batch;         /* a hash of the rows of this pass, where it is checked; 0: none */
    const dp_pass *checked; /* this pass, if it is; or NULL */
    dp_module *wrapper;
    uint32_t number;                  /* among all such wrappers of the context, from 1 */
    bool copies_void;                 /* the original's do; those of other local ranks are void */
    bool buffers_apart;               /* gradients were reduced since buffers were made equal */
    uint64_t forward_ns, forwards_ns; /* of the last reduced pass; of all that had a forward */
    uint64_t forward_count;
    dp__met met;                                  /* of the forward or backward that is under way */
    char labels[DP__SORT_COUNT][DP__LABEL_BYTES]; /* of what is spread, for the journal */
};

static dp_status dp__ranks_room(dp__face *face, size_t units)
{
    dp__distributed *ranks = face->ranks;
    size_t slots = face->inner->slot_count;
    ranks->units = dp__array(face->scope, slots, sizeof *ranks->units);
    ranks->homes = dp__array(face->scope, units, sizeof *ranks->homes);
    ranks->shares = dp__array(face->scope, units, sizeof *ranks->shares);
    ranks->names = dp__array(face->scope, units, sizeof *ranks->names);
    ranks->said = dp__array(face->scope, face->count * units, sizeof *ranks->said);
    ranks->rest = dp__array(face->scope, face->count * units, sizeof *ranks->rest);
    ranks->samples = dp__array(face->scope, face->count, sizeof *ranks->samples);
    bool full = ranks->units == NULL || ranks->homes == NULL || ranks->shares == NULL ||
                ranks->names == NULL || ranks->said == NULL || ranks->rest == NULL ||
                ranks->samples == NULL;
    for (size_t r = 0; r < face->count && !full; r++) {
        face->replicas[r].touched = dp__array(face->scope, slots, sizeof(bool));
        full = face->replicas[r].touched == NULL;
    }
    return full ? dp_error(DP_ERR_NO_MEMORY, "no memory for %zu units", units) : DP_OK;
}

static bool dp__has_unit(const dp__param *root)
{
    return dp__is_of_sort(root, DP__GRADS) && dp__count(&root->data) > 0;
}

static bool dp__is_unit(const dp__face *face, size_t home)
{
    const dp_module *inner = face->inner;
    return !dp__ignores(face, home) && dp__has_unit(dp__param_at(inner, home));
}

/* The i-th name of what is ignored. */
static dp_status dp__ignored_find(const char *fn, const dp_module *module,
                                  const dp_distributed_config *config, size_t i, size_t *out_home)
{
    DP_TRY(dp__check_pointer(fn, "ignored", config->ignored));
    if (config->ignored[i] == NULL)
        return dp_error(DP_ERR_INVALID, "%s: ignored[%zu] is NULL", fn, i);
    return dp__module_find(fn, module, config->ignored[i], out_home);
}

/* Only parameters with the same key may form a range. An ignored parameter has no key, and the next
   one after it begins a new key: a, (b), c never form one range on any rank, even if b is empty. So
   ranges are the same on all ranks, whatever the shapes of ignored parameters. */
static dp_status dp__ranks_ignore(const char *fn, dp__face *face, const void *own)
{
    const dp_distributed_config *config = own;
    const dp_module *inner = face->inner;
    const void *last = face;
    if (config->ignored_count == 0)
        return DP_OK;
    face->keys = dp__array(face->scope, inner->listed_count, sizeof *face->keys);
    if (face->keys == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu names", fn, config->ignored_count);
    for (size_t i = 0; i < config->ignored_count; i++) {
        size_t home = 0;
        DP_TRY(dp__ignored_find(fn, inner, config, i, &home));
        face->keys[home] = face;
    }
    for (size_t home = 0; home < inner->listed_count; home++) {
        bool ignored = face->keys[home] != NULL;
        last = ignored ? &face->keys[home] : last;
        face->keys[home] = ignored ? NULL : last;
    }
    return DP_OK;
}

/* Units are numbered as parameters are listed. */
static dp_status dp__units_number(dp__face *face)
{
    const dp_module *inner = face->inner;
    dp__distributed *ranks = face->ranks;
    size_t units = 0;
    for (size_t home = 0; home < inner->listed_count; home++)
        units += dp__is_unit(face, home);
    DP_TRY(dp__ranks_room(face, units));
    for (size_t slot = 0; slot < inner->slot_count; slot++)
        ranks->units[slot] = DP__NO_UNIT;
    for (size_t home = 0; home < inner->listed_count; home++) {
        size_t slot = inner->listed[home];
        if (!dp__is_unit(face, home))
            continue;
        ranks->homes[ranks->unit_count] = home;
        for (; slot != DP__NO_SLOT; slot = inner->next_tied[slot]) {
            ranks->units[slot] = (uint32_t)ranks->unit_count;
            ranks->names[ranks->unit_count]++;
        }
        ranks->unit_count++;
    }
    return DP_OK;
}

/* Ranges as blocks, with their memory on each local rank in `local`; what lies in them as ranges of
   units. *out_gaps: bytes that are of no gradient. The number of blocks. */
static size_t dp__units_place(const dp__face *face, void **local, dp_block *blocks, dp_range *out,
                              size_t *out_gaps)
{
    const dp__layout *layout = &face->layouts[DP__GRADS];
    size_t count = 0;
    for (size_t i = 0; i < layout->range_count; i++) {
        const dp__range *range = &layout->ranges[i];
        const dp__region *regions = &layout->regions[range->first];
        if (range->ignored)
            continue;
        for (size_t r = 0; r < face->count; r++)
            local[r] = dp__range_of(face, DP__GRADS, i, r).data;
        blocks[count] = (dp_block){range->dtype, range->count, local};
        for (size_t k = 0; k < range->region_count; k++) {
            size_t slot = face->inner->listed[regions[k].home], first = regions[k].first;
            size_t end = k + 1 < range->region_count ? regions[k + 1].first : range->count;
            *out++ = (dp_range){(uint32_t)count, face->ranks->units[slot], first, end - first};
            *out_gaps += (end - first) * dp__dtype_sizes[range->dtype] - regions[k].bytes;
        }
        local += face->count;
        count++;
    }
    return count;
}

/* Tells the reducer where gradients are that lie in memory of the user's: that may have moved since
   the last pass. They are the first local rank's. */
static void dp__units_move(const dp__face *face)
{
    const dp__layout *layout = &face->layouts[DP__GRADS];
    for (size_t i = 0, block = 0; i < layout->range_count; i++) {
        if (layout->ranges[i].ignored)
            continue;
        if (layout->regions[layout->ranges[i].first].foreign)
            dp__block_move(face->ranks->reducer, block, dp__range_of(face, DP__GRADS, i, 0).data);
        block++;
    }
}

/* ---- shares ---------------------------------------------------------------------------------- */

/* Fewer elements are not worth a collective of their own. */
enum { DP__SHARE_LEAST = 256, DP__SHARE_ALIGN = 16, DP__STRETCHES_PER_BUCKET = 4 };

/* Whether the parameters of a region of gradients and of the next one are neighbours too, on all
   ranks, as ranges are the same there. `places`: of parameters in their layout, by home. */
static bool dp__regions_adjoin(const dp__face *face, const size_t *places, const dp__region *region)
{
    const dp__region *params = face->layouts[DP__PARAMS].regions;
    const dp__region *own = &params[places[region->home]], *next = &params[places[region[1].home]];
    return region->range == region[1].range && own->range == next->range &&
           own->at + own->bytes == next->at;
}

/* The stretch that begins with a region: up to where memory is interrupted, or it has bytes enough.
   Buckets consist of stretches, and one that is long keeps its bucket waiting. */
static dp__stretch dp__stretch_from(const dp__face *face, const size_t *places, size_t first,
                                    size_t most)
{
    const dp__layout *layout = &face->layouts[DP__GRADS];
    const dp__region *regions = &layout->regions[first];
    size_t ranks = (size_t)face->ctx->info.rank_count, bytes = regions->bytes, count = 1;
    while (first + count < layout->region_count && bytes < most &&
           dp__regions_adjoin(face, places, &regions[count - 1]))
        bytes += regions[count++].bytes;
    size_t each = bytes / dp__dtype_sizes[regions->dtype] / ranks;
    each -= each % DP__SHARE_ALIGN;
    bool cut = ranks > 1 && each >= DP__SHARE_LEAST;
    return (dp__stretch){.range_count = count, .each = cut ? each : 0};
}

/* How ranks would share gradients out: how many stretches there are. */
static size_t dp__units_share(const dp__face *face, const size_t *places, size_t bucket_bytes,
                              dp__stretch *out)
{
    const dp__layout *layout = &face->layouts[DP__GRADS];
    const dp__distributed *ranks = face->ranks;
    size_t most = (bucket_bytes > 0 ? bucket_bytes : DP__BUCKET_BYTES) / DP__STRETCHES_PER_BUCKET;
    size_t count = 0, units = 0;
    for (size_t i = 0, end = 0; i < layout->region_count; i = end) {
        const dp__region *first = &layout->regions[i];
        dp__stretch stretch = dp__stretch_from(face, places, i, most);
        end = i + stretch.range_count;
        if (layout->ranges[first->range].ignored)
            continue;
        stretch.first_range = units;
        units += stretch.range_count;
        for (size_t k = i; k < end && stretch.each > 0; k++) {
            uint32_t unit = ranks->units[face->inner->listed[layout->regions[k].home]];
            ranks->shares[unit] =
                (dp__unit_share){stretch.each, layout->regions[k].first - first->first};
        }
        if (stretch.each > 0)
            out[count++] = stretch;
    }
    return count;
}

/* ---- the reducer ----------------------------------------------------------------------------- */

/* Its config, in temporary memory. */
static dp_status dp__units_config(const dp__face *face, dp_scope *temp, dp_reducer_config *out,
                                  dp__wrapped *out_wrapped)
{
    const dp_module *inner = face->inner;
    const dp__distributed *ranks = face->ranks;
    const dp__layout *params = &face->layouts[DP__PARAMS];
    size_t blocks = face->layouts[DP__GRADS].range_count;
    dp_range *ranges = dp__array(temp, ranks->unit_count, sizeof *ranges);
    dp_block *own = dp__array(temp, blocks, sizeof *own);
    void **local = dp__array(temp, blocks * face->count, sizeof *local);
    size_t *places = dp__array(temp, inner->listed_count, sizeof *places);
    const char **names = dp__array(temp, ranks->unit_count, sizeof *names);
    dp__stretch *stretches = dp__array(temp, ranks->unit_count, sizeof *stretches);
    if (ranges == NULL || own == NULL || local == NULL || places == NULL || names == NULL ||
        stretches == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu units", ranks->unit_count);
    for (size_t i = 0; i < params->region_count; i++)
        places[params->regions[i].home] = i;
    *out_wrapped = (dp__wrapped){.stretches = stretches};
    out->block_count = dp__units_place(face, local, own, ranges, &out_wrapped->gaps);
    out_wrapped->count = dp__units_share(face, places, out->buckets.bytes, stretches);
    for (size_t unit = 0; unit < ranks->unit_count; unit++)
        names[unit] = dp__name_at(inner, ranks->homes[unit]);
    out->name = inner->name;
    out->blocks = own;
    out->ranges = ranges;
    out->range_count = ranks->unit_count;
    out->unit_names = names;
    return DP_OK;
}

/* ---- parameters and buffers ------------------------------------------------------------------ */

/* Part of a range on all local ranks, in place. Those that share the memory of another one receive
   into `aside`, since that one has it already. */
static void dp__range_parts(const dp__face *face, dp__sort sort, size_t range, size_t first,
                            const dp_tensor *aside, dp_part *out)
{
    for (size_t r = 0; r < face->count; r++) {
        dp_tensor own = dp__range_of(face, sort, range, r);
        char *at = (char *)own.data + first * dp__dtype_sizes[own.dtype];
        if (!dp__range_is_own(face, sort, range, r))
            at = aside[r].data;
        out[r] = (dp_part){.send = at, .recv = at};
    }
}

/* A range becomes the same on all ranks, by pieces: that of rank 0, or the mean. */
static dp_status dp__range_spread(const char *fn, const dp__face *face, dp__sort sort, size_t i,
                                  const dp_tensor *aside, bool mean, dp_part *parts)
{
    const dp__range *range = &face->layouts[sort].ranges[i];
    size_t most = (size_t)DP__COALESCE_BYTES / dp__dtype_sizes[range->dtype], count = 0;
    for (size_t first = 0; first < range->count && !range->ignored; first += count) {
        count = range->count - first < most ? range->count - first : most;
        dp__range_parts(face, sort, i, first, aside, parts);
        const dp__coll coll = {
            .fn = fn,
            .lane = &face->ctx->lanes[DP__CALLER],
            .call = {.verb = mean && dp__is_float(range->dtype) ? DP_ALL_REDUCE : DP_BROADCAST,
                     .local = parts,
                     .count = count,
                     .dtype = range->dtype,
                     .op = DP_OP_MEAN,
                     .scale = 1}};
        DP_TRY(dp__collective_run(&coll));
    }
    return DP_OK;
}

/* And so does all that is of a sort. */
static dp_status dp__ranges_spread(const char *fn, const dp__face *face, dp_scope *temp,
                                   dp__sort sort, const dp_tensor *aside, bool mean)
{
    dp_status status = DP_OK;
    dp_part *parts = dp__array(temp, face->count, sizeof *parts);
    if (parts == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu parts", fn, face->count);
    const dp_reducer *reducer = face->ranks->reducer; /* NULL: it is yet to be made */
    dp__purpose before = dp__journal_for(
        &face->ctx->lanes[DP__CALLER],
        (dp__purpose){face->ranks->labels[sort], reducer != NULL ? reducer->number : 0, 0});
    for (size_t i = 0; i < face->layouts[sort].range_count && status == DP_OK; i++)
        status = dp__range_spread(fn, face, sort, i, aside, mean, parts);
    dp__journal_for(&face->ctx->lanes[DP__CALLER], before);
    return status;
}

/* Room for what ranks receive into `aside`: parameters of replicas that share them. */
static dp_status dp__aside_make(const dp__face *face, dp_scope *temp, dp_tensor **out)
{
    const dp__layout *layout = &face->layouts[DP__PARAMS];
    int64_t most = 0;
    for (size_t i = 0; i < layout->range_count; i++) {
        const dp__range *range = &layout->ranges[i];
        int64_t bytes = (int64_t)range->count * dp__dtype_sizes[range->dtype];
        most = bytes > most ? bytes : most;
    }
    most = most < DP__COALESCE_BYTES ? most : DP__COALESCE_BYTES;
    dp_tensor *aside = dp__array(temp, face->count, sizeof *aside);
    if (aside == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parts", face->count);
    for (size_t r = 1; r < face->count && most > 0; r++)
        if (dp__replica_sees(face, r))
            DP_TRY(dp__tensor_make(temp, &face->ctx->devices[r], DP_U8, 1, &most, &aside[r]));
    *out = aside;
    return DP_OK;
}

/* Logs what is the same in all processes now. */
static void dp__log_alike(const dp__face *face)
{
    size_t params = 0, buffers = 0, bytes = 0;
    for (size_t home = 0; home < face->inner->listed_count; home++) {
        const dp__param *root = dp__param_at(face->inner, home);
        bool spread = !dp__ignores(face, home);
        params += spread && !root->buffer;
        buffers += spread && root->buffer;
        bytes += spread ? dp__bytes(&root->data) : 0;
    }
    dp__log(face->ctx, DP_LOG_INFO,
            "'%s': all processes have the numbers of rank 0: %zu parameter%s and %zu buffer%s of "
            "%zu bytes",
            face->inner->name, params, dp__s(params), buffers, dp__s(buffers), bytes);
}

/* All ranks start with the numbers of rank 0. */
static dp_status dp__ranks_start(const char *fn, const dp__face *face, dp_scope *temp)
{
    dp_tensor *aside = NULL;
    DP_TRY(dp__aside_make(face, temp, &aside));
    DP_TRY(dp__ranges_spread(fn, face, temp, DP__PARAMS, aside, false));
    DP_TRY(dp__ranges_spread(fn, face, temp, DP__BUFFERS, aside, false));
    dp__log_alike(face);
    dp__changed(face->inner);
    return DP_OK;
}

static dp_reduction dp__ranks_reduces(const dp__face *face, size_t slot)
{
    bool grads = dp__is_of_sort(dp__root(face->inner->slots[slot]), DP__GRADS);
    bool reduces = grads && !dp__ignores(face, face->inner->homes[slot]);
    return reduces ? face->ranks->config.reduction : (dp_reduction)0;
}

/* Makes the ranges of a layout, which have to be the same on all ranks. Memory of the user's makes
   one in a packed module only, if nothing is ignored. What is the user's on some ranks only makes
   others; that is compared. */
static dp_status dp__lay_ranks(const dp__face *face, dp__layout *layout)
{
    const dp_module *inner = face->inner;
    const dp__region *all = layout->regions;
    layout->regions = dp__array(face->scope, layout->region_count, sizeof *all);
    if (layout->regions == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parameters", layout->region_count);
    for (size_t i = 0; i < layout->region_count; i++) {
        dp__region *own = &layout->regions[i];
        *own = all[i];
        const dp__param *root = dp__param_at(inner, own->home);
        if (own->foreign)
            own->key = root->owner->packed && face->keys == NULL ? (const void *)root->owner : root;
        else if (face->keys != NULL)
            own->key = face->keys[own->home];
    }
    DP_TRY(dp__layout_cut(face->scope, layout));
    for (size_t i = 0; i < layout->region_count; i++)
        layout->ranges[layout->regions[i].range].ignored =
            dp__ignores(face, layout->regions[i].home);
    return DP_OK;
}

/* ==== >>rounds =================================================================================
   A pass with gradients exchanges data with the other ranks twice: before its forward, for buffers,
   and from its backward on, in the reducer. If a forward is refused before the first exchange, only
   this process gets the error. If a method fails in a forward by itself, the others are already on
   their way to its backward, and only a failure of the job can tell them. A failure in a backward,
   or in a step, which ends with one, is reported to all when the gradients are reduced: this
   process takes part, and says that its gradients do not count.                                */

static double dp__ranks_share(const dp_pass *pass, size_t r)
{
    bool samples = pass->face->ranks->config.reduction == DP_MEAN_SAMPLES;
    return samples ? pass->records[r].call.weight : 1;
}

/* A forward has returned. */
static dp_status dp__ranks_ran(dp_pass *pass, const dp__invocation *invocation, dp_status status)
{
    if (!pass->synced)
        return status;
    pass->forward_ns = dp__os_now_ns() - pass->forward_ns;
    pass->forward_waited_ns = dp__journal_waited_ns(&pass->ctx->lanes[DP__CALLER]) -
                              pass->forward_waited_ns;
    return invocation->mode != NULL ? status : dp__shared_failure(pass->ctx, status);
}

/* They become equal, as the wrapper was told. */
static dp_status dp__buffers_spread(const char *fn, const dp__face *face)
{
    const dp__distributed *ranks = face->ranks;
    dp_ctx *ctx = face->ctx;
    dp_scope *temp = NULL;
    if (ranks->config.buffers == DP_BUFFERS_LOCAL || face->layouts[DP__BUFFERS].range_count == 0)
        return DP_OK;
    DP_TRY(dp__enter(fn, ctx));
    dp_status status = dp__temp_begin(ctx, &temp);
    if (status == DP_OK)
        status = dp__ranges_spread(fn, face, temp, DP__BUFFERS, NULL,
                                   ranks->config.buffers == DP_BUFFERS_MEAN);
    status = dp__temp_end(temp, NULL, status);
    return dp__exit(fn, ctx, dp__shared_failure(ctx, status));
}

/* Before a forward with gradients, of which `synced` are reduced. */
static dp_status dp__ranks_buffers(const char *fn, const dp__face *face, bool synced)
{
    dp__distributed *ranks = face->ranks;
    bool apart = ranks->buffers_apart;
    ranks->met = DP__MET_FOR_BUFFERS;
    ranks->buffers_apart = synced;
    return apart ? dp__buffers_spread(fn, face) : DP_OK;
}

static dp_status dp__ranks_forward(dp_pass *pass, const dp__invocation *invocation)
{
    bool grads = invocation->wants_pass && !invocation->config.no_grad;
    pass->synced = grads && !invocation->config.no_sync;
    if (pass->synced) {
        pass->forward_ns = dp__os_now_ns();
        pass->forward_waited_ns = dp__journal_waited_ns(&pass->ctx->lanes[DP__CALLER]);
    }
    if (grads)
        DP_TRY(dp__poll(&pass->ctx->lanes[DP__CALLER]));
    return grads ? dp__ranks_buffers(invocation->fn, pass->face, pass->synced) : DP_OK;
}

static dp__param *dp__unit_root(const dp__face *face, size_t unit)
{
    return dp__param_at(face->inner, face->ranks->homes[unit]);
}

/* What this wrapper adds to is marked as its own, on the memory, which others may wrap too. */
static dp_status dp__units_claim(const dp__face *face)
{
    const dp__distributed *ranks = face->ranks;
    for (size_t unit = 0; unit < ranks->unit_count; unit++)
        DP_TRY(dp__check_adder(dp__unit_root(face, unit), ranks->number));
    for (size_t unit = 0; unit < ranks->unit_count; unit++)
        dp__unit_root(face, unit)->adder = ranks->number;
    return DP_OK;
}

/* Gradients hold what was reduced, or shares of it. Those that another rank has used alone count as
   used here too, so that all ranks step the same parameters. */
static void dp__units_reduced(const dp__face *face)
{
    const dp_reducer *reducer = face->ranks->reducer;
    face->ranks->reduced = true;
    for (size_t unit = 0; unit < face->ranks->unit_count; unit++) {
        dp__param *root = dp__unit_root(face, unit);
        root->scattered = root->scattered || reducer->scatters;
        root->unreduced = false;
        if (!reducer->unused[unit])
            dp__use(root);
    }
}

/* A pass with no_sync has added to them, on each rank by itself. */
static void dp__units_kept(const dp__face *face)
{
    size_t count = face->ctx->info.rank_count > 1 ? face->ranks->unit_count : 0;
    for (size_t unit = 0; unit < count; unit++)
        dp__unit_root(face, unit)->unreduced = true;
}

static bool dp__units_hold_shares(const dp__face *face)
{
    bool some = false;
    for (size_t unit = 0; unit < face->ranks->unit_count && !some; unit++)
        some = dp__unit_root(face, unit)->scattered;
    return some;
}

/* The gradients of replicas are zeroed when the original's were, and not before: what is not
   reduced yet is added to. What was reduced counts as the original has it, and is rarely added
   to: shares cannot be. */
static dp_status dp__ranks_zeroed(const dp__face *face)
{
    dp__distributed *ranks = face->ranks;
    bool zeroed = face->runs->zeroed != ranks->zeroed;
    bool reduced = ranks->reduced && ranks->unit_count > 0;
    bool counted = !zeroed && reduced && ranks->config.reduction != DP_MEAN_RANKS;
    if (counted || dp__units_hold_shares(face))
        return dp_error(DP_ERR_STATE,
                        "gradients of '%s' are already reduced: call dp_zero_grad before the next "
                        "backward",
                        face->inner->name);
    DP_TRY(dp__units_claim(face));
    if (ranks->copies_void && !zeroed)
        DP_TRY(dp__replicas_send(face, DP__GRADS, face->count));
    for (size_t r = 0; r < face->count && zeroed; r++)
        face->replicas[r].pass++;
    if (zeroed)
        dp__reducer_forget(ranks->reducer);
    ranks->copies_void = false;
    ranks->reduced = ranks->reduced && !zeroed;
    ranks->zeroed = face->runs->zeroed;
    return DP_OK;
}

/* What is not expected of a replica may travel as soon as the pass is open. */
static dp_status dp__unexpected_zero(const dp__face *face)
{
    const dp__distributed *ranks = face->ranks;
    for (size_t r = 0; r < face->count; r++)
        for (size_t unit = 0; unit < ranks->unit_count; unit++) {
            const dp__memory *memory = &face->replicas[r];
            size_t slot = face->inner->listed[ranks->homes[unit]];
            dp__grad_group *group = memory->grad_groups != NULL ? memory->grad_groups[slot] : NULL;
            if (group != NULL && !dp__is_expected(ranks->reducer, r, unit))
                DP_TRY(dp__grad_group_zero(face->ctx, memory, group));
        }
    return DP_OK;
}

static dp_status dp__ranks_begin(const char *fn, const dp__face *face, bool synced)
{
    dp__distributed *ranks = face->ranks;
    const dp_reduce_pass pass = {.no_sync = !synced, .samples = ranks->samples};
    ranks->met = DP__MET_FOR_GRADS;
    dp__units_move(face);
    memset(ranks->said, 0, face->count * ranks->unit_count * sizeof *ranks->said);
    for (size_t r = 0; r < face->count; r++)
        memset(face->replicas[r].touched, 0, face->inner->slot_count * sizeof(bool));
    DP_TRY(dp__enter(fn, face->ctx));
    dp_status status = dp__shared_failure(face->ctx, dp__unexpected_zero(face));
    if (status == DP_OK)
        status = dp__pass_begin(fn, ranks->reducer, &pass);
    return dp__exit(fn, face->ctx, status);
}

/* Local ranks that had no part of the batch: all if `pass` is NULL. */
static dp_status dp__ranks_absent(const char *fn, const dp__face *face, const dp_pass *pass)
{
    for (size_t r = 0; r < face->count; r++) {
        if (pass != NULL && r < pass->count && !pass->records[r].absent)
            continue;
        DP_TRY(dp__grad_groups_zero(face->ctx, &face->replicas[r]));
        DP_TRY(dp__reducer_absent(fn, face->ranks->reducer, (int)r));
    }
    return DP_OK;
}

static bool dp__unit_touched(const dp__face *face, size_t r, size_t unit)
{
    const dp_module *inner = face->inner;
    bool touched = false;
    size_t slot = inner->listed[face->ranks->homes[unit]];
    for (; slot != DP__NO_SLOT && !touched; slot = inner->next_tied[slot])
        touched = face->replicas[r].touched[slot];
    return touched;
}

/* Backward has returned: the rest of what it asked for is ready. */
static dp_status dp__ranks_report(dp__record *record)
{
    const dp__face *face = record->pass->face;
    dp__distributed *ranks = face->ranks;
    size_t r = record->call.replica, count = 0;
    uint32_t *rest = ranks->rest + r * ranks->unit_count;
    for (size_t unit = 0; unit < ranks->unit_count; unit++) {
        bool done = ranks->said[r * ranks->unit_count + unit] == ranks->names[unit];
        if (!done && dp__unit_touched(face, r, unit))
            rest[count++] = (uint32_t)unit;
    }
    for (size_t i = 0; i < count && record->pass->checked; i++)
        DP_TRY(dp__check_grad(record, face->inner->listed[ranks->homes[rest[i]]]));
    return dp__units_ready("dp_reducer_ready", ranks->reducer, (int)r, rest, count,
                           record->call.stream);
}

static void dp__ranks_log_unused(const dp__face *face, size_t count)
{
    const dp__distributed *ranks = face->ranks;
    for (size_t unit = 0; unit < ranks->unit_count; unit++) {
        char text[DP__LINE_BYTES];
        bool touched = false;
        for (size_t r = 0; r < count && !touched; r++)
            touched = dp__unit_touched(face, r, unit);
        if (touched)
            continue;
        dp__param_line(face->inner, ranks->homes[unit], text, sizeof text);
        dp__log(face->ctx, DP_LOG_ERROR, "%s got no gradient in this backward", text);
    }
}

/* A pass that failed is closed too; what it reduces is void. */
static dp_status dp__ranks_close(const char *fn, const dp__face *face, bool synced,
                                 dp_status status)
{
    dp_ctx *ctx = face->ctx;
    char text[DP__TEXT_BYTES];
    if (dp_status_class(status) == DP_CLASS_JOB)
        return status;
    memcpy(text, dp__of_thread.text, sizeof text);
    face->ranks->copies_void = synced;
    if (status != DP_OK && ctx->info.process_count > 1)
        face->ranks->reducer->excuse = dp__excuse_of(status);
    DP_TRY(dp__enter(fn, ctx));
    dp_status finished = dp__exit(fn, ctx, dp__pass_finish(fn, face->ranks->reducer));
    if (status != DP_OK && dp_status_class(finished) != DP_CLASS_JOB)
        return dp_error(status, "%s", text);
    DP_TRY(finished);
    if (synced)
        dp__units_reduced(face);
    else
        dp__units_kept(face);
    return DP_OK;
}

/* ==== >>checks ===================================================================================
   Where steps are checked: what all ranks compare once their gradients are reduced.              */

static uint64_t dp__ranks_steps(const dp__face *face)
{
    return face->ranks->reducer->pass_count;
}

/* Checks what this process does alone, before the others know that its gradients are complete, and
   hashes its rows for later. */
static dp_status dp__check_reported(const dp_pass *pass)
{
    int64_t rows = 0;
    DP_TRY(dp__check_damage(pass->ctx));
    for (size_t r = 0; pass->rows != NULL && r < pass->count; r++)
        rows += pass->rows[r];
    pass->face->ranks->batch = 0;
    pass->face->ranks->checked = pass->checked ? pass : NULL;
    if (!pass->checked || pass->ctx->info.process_count == 1 || rows == 0)
        return DP_OK;
    return dp__batch_hash(pass, &pass->face->ranks->batch);
}

/* Checks gradients as they are after the reduction, which may be too much for the dtype in which
   they travel. */
static dp_status dp__check_sums(const dp__face *face)
{
    char where[128];
    dp__bad bad;
    for (size_t unit = 0; unit < face->ranks->unit_count; unit++) {
        const dp__param *root = dp__unit_root(face, unit);
        dp_tensor grad = root->data;
        grad.data = root->grad;
        DP_TRY(dp__bad_find(face->ctx, &grad, &bad));
        if (bad.at >= 0 && !root->scattered)
            return dp__finding(
                face->ctx, "the gradient of '%s' of '%s' has %s once it is reduced over the ranks",
                dp__name_at(face->inner, face->ranks->homes[unit]), face->inner->name,
                dp__bad_text(&grad, bad, where, sizeof where));
    }
    return DP_OK;
}

/* Compares what processes were given, where all have said so: `all` has a hash and a process for
   each rank. */
static dp_status dp__batches_differ(const dp__face *face, const int64_t *all)
{
    for (int i = 0; i < face->ctx->info.rank_count; i++)
        for (int k = 0; k < i && all[2 * i] != 0; k++)
            if (all[2 * i] == all[2 * k] && all[2 * i + 1] != all[2 * k + 1])
                return dp__finding(face->ctx,
                                   "processes %d and %d gave '%s' the same rows, so one of them is "
                                   "of no use: each needs its own (dp_my_rows, or a loader)",
                                   (int)all[2 * k + 1], (int)all[2 * i + 1], face->inner->name);
    return DP_OK;
}

static dp_status dp__check_batches(const char *fn, const dp__face *face)
{
    dp_scope *temp = NULL;
    dp_ctx *ctx = face->ctx;
    const int64_t own[] = {(int64_t)face->ranks->batch, ctx->info.process};
    const dp_coll_call call = {.verb = DP_ALL_GATHER, .count = 2, .dtype = DP_I64};
    DP_TRY(dp__temp_begin(ctx, &temp));
    int64_t *all = dp__array(temp, 2 * (size_t)ctx->info.rank_count, sizeof *all);
    dp_status status = all != NULL ? DP_OK : dp_error(DP_ERR_NO_MEMORY, "no memory for hashes");
    DP_TRY(dp__shared_failure(ctx, status));
    status = dp__numbers(fn, ctx, call, own, all);
    if (status == DP_OK)
        status = dp__batches_differ(face, all);
    return dp__temp_end(temp, NULL, status);
}

static dp_status dp__numbers_compare(const char *fn, dp_module *module, bool buffers);

static dp_status dp__check_ranks_alike(const char *fn, const dp__face *face)
{
    char text[DP__TEXT_BYTES];
    dp_status status = dp__numbers_compare(fn, face->ranks->wrapper, false);
    if (status != DP_ERR_MISMATCH)
        return status;
    snprintf(text, sizeof text, "%s", dp__unnamed(fn, dp__of_thread.text));
    return dp__finding(face->ctx,
                       "ranks train '%s' with different parameters, as each has written or stepped "
                       "them by itself: %s",
                       face->inner->name, text);
}

/* Checks, on all ranks at the same time, a reduction that has succeeded on all of them. */
static dp_status dp__ranks_check(const char *fn, const dp__face *face)
{
    dp_ctx *ctx = face->ctx;
    unsigned every = ctx->checks.every;
    if (every == 0 || (face->ranks->reducer->pass_count - 1) % every != 0)
        return DP_OK;
    dp_status status = dp__check_sums(face);
    if (status == DP_OK && face->ranks->checked != NULL)
        status = dp__pass_replay(fn, face->ranks->checked);
    face->ranks->checked = NULL;
    DP_TRY(dp__enter(fn, ctx));
    DP_TRY(dp__exit(fn, ctx, dp__all_or_none(fn, ctx, status)));
    if (ctx->info.process_count == 1)
        return DP_OK;
    DP_TRY(dp__check_batches(fn, face));
    return dp__check_ranks_alike(fn, face);
}

/* ==== >>ends =====================================================================================
   How a pass over ranks ends, also one that has failed on some, and a step without data.         */

static dp_status dp__ranks_finish(const char *fn, const dp__face *face, bool synced,
                                  dp_status status)
{
    status = dp__ranks_close(fn, face, synced, status);
    if (status == DP_OK && synced)
        status = dp__ranks_check(fn, face);
    return dp__torn_by(face->runs, status);
}

static void dp__ranks_timed(dp__distributed *ranks, const dp_pass *pass)
{
    ranks->forward_ns = pass->forward_ns;
    ranks->forwards_ns += pass->forward_ns;
    ranks->forward_count++;
    dp__late_add(&pass->ctx->spent_ns[DP__LATE_FORWARD],
                 pass->forward_ns - pass->forward_waited_ns);
}

static void dp__ranks_start_over(const dp__face *face, bool has_run)
{
    face->ranks->met = has_run ? DP__MET_FOR_BUFFERS : DP__MET_NOBODY;
}

/* If something has failed here before gradients were reduced, which the others do: so does this
   process, with nothing in it. */
static dp_status dp__ranks_void(const char *fn, const dp__face *face, bool synced, dp_status status)
{
    char text[DP__TEXT_BYTES];
    if (status == DP_OK || dp_status_class(status) == DP_CLASS_JOB || !dp__is_joint(face, synced) ||
        face->ranks->met == DP__MET_FOR_GRADS)
        return status;
    memcpy(text, dp__of_thread.text, sizeof text);
    if (face->ranks->met == DP__MET_NOBODY)
        DP_TRY(dp__ranks_buffers(fn, face, true));
    for (size_t r = 0; r < face->count; r++)
        face->ranks->samples[r] = 0;
    dp_status begun = dp__ranks_begin(fn, face, true);
    if (dp_status_class(begun) == DP_CLASS_JOB)
        return begun;
    dp_error(status, "%s", text);
    return begun == DP_OK ? dp__ranks_finish(fn, face, true, status) : status; /* over for all */
}

/* ---- a step that one process owes the others ------------------------------------------------- */

/* A step without sync has failed, here alone: the others have made it, and will wait for this
   process to have made as many. It has to make it again before it goes on. */
static void dp__ranks_owe(const dp__face *face, bool synced, dp_value data, dp_status status)
{
    char text[DP__TEXT_BYTES];
    if (!dp__is_joint(face, true))
        return;
    memcpy(text, dp__of_thread.text, sizeof text);
    face->ranks->owes = !synced && status != DP_OK &&
                        dp__data_hash(face->ctx, data, &face->ranks->owed) == DP_OK;
    memcpy(dp__of_thread.text, text, sizeof text);
}

static dp_status dp__ranks_stepped(const dp__invocation *invocation, const dp__face *face,
                                   dp_value data, dp_status status)
{
    bool synced = !invocation->config.no_sync && !invocation->config.no_grad;
    dp__ranks_owe(face, synced, data, status);
    return dp__ranks_void(invocation->fn, face, synced, status);
}

static dp_status dp__check_owed(const dp__face *face, dp_value data)
{
    uint64_t hash = 0;
    if (!face->ranks->owes || data.kind == DP_NONE)
        return DP_OK;
    DP_TRY(dp__data_hash(face->ctx, data, &hash));
    if (hash == face->ranks->owed)
        return DP_OK;
    return dp_error(DP_ERR_STATE,
                    "the last step of '%s' failed on rank %d only, and other processes have made "
                    "it: repeat it with the same data, or with dp_none()",
                    face->inner->name, face->ctx->info.rank_first);
}

static dp_status dp__ranks_backward(const char *fn, dp_pass *pass)
{
    const dp__face *face = pass->face;
    DP_TRY(dp__ranks_zeroed(face));
    for (size_t r = 0; r < face->count; r++)
        face->ranks->samples[r] = r < pass->count ? pass->records[r].call.weight : 0;
    DP_TRY(dp__ranks_begin(fn, face, pass->synced));
    dp_status status = dp__pass_run(fn, pass, dp__stage_backward);
    if (status == DP_OK && pass->ctx->checks.every > 0)
        status = dp__check_reported(pass);
    if (status == DP_OK)
        status = dp__ranks_absent(fn, face, pass);
    status = dp__ranks_finish(fn, face, pass->synced, status);
    if (status == DP_OK && pass->synced)
        dp__ranks_timed(face->ranks, pass);
    if (status == DP_OK && face->ranks->config.log_unused)
        dp__ranks_log_unused(face, pass->count);
    return status;
}

/* A step without data: everything that ranks do together, and nothing else. */
static dp_status dp__ranks_idle(const dp__invocation *invocation, const dp__face *face)
{
    bool synced = !invocation->config.no_sync, adds;
    if (invocation->config.no_grad)
        return DP_OK;
    DP_TRY(dp__ranks_buffers(invocation->fn, face, synced));
    DP_TRY(dp__grads_begin(face->runs, !synced, &adds));
    DP_TRY(dp__ranks_zeroed(face));
    for (size_t r = 0; r < face->count; r++)
        face->ranks->samples[r] = 0;
    face->ranks->batch = 0;
    face->ranks->checked = NULL;
    DP_TRY(dp__ranks_begin(invocation->fn, face, synced));
    return dp__ranks_finish(invocation->fn, face, synced,
                            dp__ranks_absent(invocation->fn, face, NULL));
}

DP_API dp_status dp_grad_ready(const dp_call *call, size_t param)
{
    size_t slot = 0;
    DP_TRY(dp__check_call(__func__, call));
    if (!dp__call_param(__func__, call, param, &slot))
        return DP_ERR_INVALID;
    const dp__record *record = dp__outermost(call->record);
    if (!call->record->in_backward)
        return dp_error(DP_ERR_STATE, "%s: gradients exist only in backward", __func__);
    const dp__face *face = record->pass->face;
    if (!dp__ops(face)->over_ranks || face->runs->mean_grads)
        return DP_OK;
    dp__distributed *ranks = face->ranks;
    uint32_t unit = ranks->units[slot];
    const char *name = call->module->params[param].name;
    if (unit == DP__NO_UNIT)
        return dp__has_unit(dp__root(&call->module->params[param]))
                   ? DP_OK
                   : dp_error(DP_ERR_INVALID, "%s: '%s' of '%s' has no gradient", __func__, name,
                              call->module->name);
    size_t r = record->call.replica;
    uint32_t *said = &ranks->said[r * ranks->unit_count + unit];
    if (*said == ranks->names[unit])
        return dp_error(DP_ERR_STATE, "%s: '%s' of '%s' was already reported as ready", __func__,
                        name, call->module->name);
    if (++*said < ranks->names[unit])
        return DP_OK;
    DP_TRY(dp__check_grad(record, face->inner->listed[ranks->homes[unit]]));
    return record->absent ? DP_OK : dp_reducer_ready(ranks->reducer, (int)r, unit, call->stream);
}

/* ==== >>sharable ===============================================================================
   Whether the processes of a machine can have parameters once: dp/sharing.h does it.             */

static bool dp__all_are_cpu(const dp_ctx *ctx)
{
    bool all = true;
    for (int r = 0; r < ctx->info.local_count && all; r++)
        all = ctx->devices[r].dev->ops == ctx->host_device.dev->ops;
    return all;
}

static const char dp__unseen[] = "the processes do not see each other's memory";

static dp_status dp__unshareable(const char *fn, const dp_module *module, const char *why)
{
    return dp_error(DP_ERR_UNSUPPORTED, "%s: parameters of '%s' cannot be shared: %s", fn,
                    module->name, why);
}

static dp_status dp__check_shareable(const char *fn, const dp_module *module,
                                     const dp_distributed_config *config)
{
    const dp_ctx *ctx = module->ctx;
    const char *why = NULL;
    if (config->ignored_count > 0)
        why = "some parameters are ignored";
    else if (!dp__all_are_cpu(ctx))
        why = "not all devices are CPU devices";
    else if (ctx->info.process_count > 1 && (!DP__PAGES_CHANGE || (ctx->world.heap.shared == NULL &&
                                                                   ctx->info.machine_count == 1)))
        why = dp__unseen;
    for (size_t home = 0; home < module->listed_count && why == NULL; home++) {
        const dp__param *root = dp__param_at(module, home);
        if (!dp__tree_holds(module, dp__top(root->owner)))
            why = "they lie beside those of a larger module: wrap that one";
        else if (root->foreign && !root->buffer)
            why = "it has memory of yours for parameters";
        else if (root->sharing != NULL)
            why = "another wrapper shares them already";
    }
    return why == NULL ? DP_OK : dp__unshareable(fn, module, why);
}

/* Two wrappers would spread parameters, or step them, each in its own way. */
static dp_status dp__check_unshared_params(const char *fn, const dp_module *module)
{
    if (!dp__shares(module))
        return DP_OK;
    return dp_error(DP_ERR_UNSUPPORTED, "%s: another wrapper shares the parameters of '%s'", fn,
                    module->name);
}

/* ==== >>distributed ============================================================================
   A wrapper is made locally, compared with the others, initialised, and given a reducer. If one of
   these fails, nothing is left of the wrapper.                                                 */

static const char *const dp__buffers_names[] = {"DP_BUFFERS_FIRST", "DP_BUFFERS_MEAN",
                                                "DP_BUFFERS_LOCAL"};

static dp_status dp__check_distributed(const char *fn, const dp_ctx *ctx,
                                       const dp_distributed_config *config)
{
    dp_split split = config->cut.split;
    if (ctx->config.shards > 0 && split == DP_SPLIT_PADDED && config->cut.part_rows == 0)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "%s: with shards, DP_SPLIT_PADDED needs part_rows: else the size of a part "
                        "would depend on the number of processes",
                        fn);
    if (ctx->config.shards > 0 && (split == DP_SPLIT_CHUNK || split == DP_SPLIT_WEIGHTS))
        return dp_error(DP_ERR_UNSUPPORTED,
                        "%s: %s cuts the batch of each process by itself, so with shards the rows "
                        "of a rank would depend on the number of processes: use "
                        "DP_SPLIT_BALANCED, _SIZES, _EQUAL or _PADDED",
                        fn, split == DP_SPLIT_CHUNK ? "DP_SPLIT_CHUNK" : "DP_SPLIT_WEIGHTS");
    DP_TRY(dp__check_unused(fn, "unused_params", config->unused_params));
    DP_TRY(dp__check_wire(fn, config->buckets.wire));
    if ((unsigned)config->reduction > DP_MEAN_SAMPLES)
        return dp_error(DP_ERR_INVALID,
                        "%s: reduction is %d, not DP_SUM_RANKS, DP_MEAN_RANKS or DP_MEAN_SAMPLES",
                        fn, (int)config->reduction);
    if ((unsigned)config->buffers > DP_BUFFERS_LOCAL)
        return dp_error(DP_ERR_INVALID, "%s: buffers is %d, not DP_BUFFERS_FIRST, _MEAN or _LOCAL",
                        fn, (int)config->buffers);
    return DP_OK;
}

/* Inside a replica a wrapper has only that replica's device, and would reduce over nobody. */
static const char dp__no_wrapper[] = "reduces over all ranks: it cannot be wrapped again";

static const dp__face_ops dp__distributed_face = {.needs_all = true,
                                                  .keeps_buffers = true,
                                                  .over_ranks = true,
                                                  .no_wrapper = dp__no_wrapper,
                                                  .cut = dp__pass_cut,
                                                  .backward = dp__ranks_backward,
                                                  .reduces = dp__ranks_reduces,
                                                  .prepare = dp__ranks_ignore,
                                                  .lay = dp__lay_ranks,
                                                  .before = dp__ranks_forward,
                                                  .after = dp__ranks_ran,
                                                  .weight = dp__ranks_share,
                                                  .ran_backward = dp__ranks_report,
                                                  .steps = dp__ranks_steps,
                                                  .begin = dp__ranks_start_over,
                                                  .end = dp__ranks_void,
                                                  .check_data = dp__check_owed,
                                                  .end_step = dp__ranks_stepped,
                                                  .idle = dp__ranks_idle};

/* Everything that this process does by itself. */
static dp_status dp__distributed_make(const char *fn, dp_module *module,
                                      const dp_distributed_config *config, dp_module **out)
{
    const dp_parallel_config parallel = {.cut = config->cut};
    const char *name = config->name != NULL ? config->name : "distributed";
    DP_TRY(dp__check_distributed(fn, module->ctx, config));
    DP_TRY(config->share_params ? dp__check_shareable(fn, module, config)
                                : dp__check_unshared_params(fn, module));
    DP_TRY(dp__wrapper_make(fn, name, module, &dp__distributed_face, &parallel, config, out));
    dp__face *face = (*out)->face;
    dp__grads_found(module);
    face->ranks = dp__array(face->scope, 1, sizeof *face->ranks);
    if (face->ranks == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for a wrapper", fn);
    *face->ranks = (dp__distributed){.config = *config,
                                     .wrapper = *out,
                                     .number = ++face->ctx->wrappers,
                                     .zeroed = UINT64_MAX,
                                     .buffers_apart = true};
    if (config->reduction == 0)
        face->ranks->config.reduction = DP_MEAN_RANKS;
    for (int sort = 0; sort < DP__SORT_COUNT; sort++)
        snprintf(face->ranks->labels[sort], DP__LABEL_BYTES, "%s of '%.40s'", dp__sort_names[sort],
                 module->name);
    return dp__units_number(face);
}

/* Whether all devices of the process use the original's parameters. */
static bool dp__has_one_owner(const dp__face *face)
{
    bool shared = true;
    for (size_t r = 1; r < face->count; r++)
        shared = shared && dp__replica_sees(face, r);
    return shared;
}

/* How it reduces. */
static dp_reducer_config dp__distributed_rules(const dp__face *face)
{
    const dp_distributed_config *config = &face->ranks->config;
    return (dp_reducer_config){.reduction = config->reduction,
                               .unused_units = config->unused_params,
                               .to_first = dp__has_one_owner(face),
                               .buckets = config->buckets};
}

/* What travels in one piece, where parameters are alike: memory of the user's is laid out otherwise
   than the library's. */
static dp_status dp__ranges_lines(dp__lines *lines, const dp__face *face)
{
    char text[DP__LINE_BYTES];
    for (int sort = 0; sort < DP__SORT_COUNT; sort++)
        for (size_t i = 0; i < face->layouts[sort].range_count; i++) {
            const dp__range *range = &face->layouts[sort].ranges[i];
            if (range->ignored)
                continue;
            snprintf(text, sizeof text, "%s in one piece of memory: %zu %s", dp__sort_names[sort],
                     range->count, dp__dtype_names[range->dtype]);
            DP_TRY(dp__lines_add(lines, text));
        }
    return DP_OK;
}

/* `wrapper`: what was made of the module here. */
static dp_status dp__distributed_lines(dp__lines *lines, const dp_module *wrapper)
{
    char text[DP__LINE_BYTES];
    const dp_module *module = wrapper->face->inner;
    const dp_distributed_config *config = &wrapper->face->ranks->config;
    const dp_reducer_config rules = dp__distributed_rules(wrapper->face);
    DP_TRY(dp__rules_lines(lines, &rules, true));
    snprintf(text, sizeof text, "buffers %s", dp__buffers_names[config->buffers]);
    DP_TRY(dp__lines_add(lines, text));
    DP_TRY(dp__lines_add(lines, config->share_params ? "share_params" : "no share_params"));
    const dp__checks *checks = &module->ctx->checks;
    snprintf(text, sizeof text, "check %u%s", checks->every, checks->warns ? ", which warns" : "");
    DP_TRY(dp__lines_add(lines, text));
    for (size_t home = 0; home < module->listed_count; home++) {
        if (dp__ignores(wrapper->face, home))
            snprintf(text, sizeof text, "'%.100s', ignored", dp__name_at(module, home));
        else
            dp__param_line(module, home, text, sizeof text);
        DP_TRY(dp__lines_add(lines, text));
    }
    return DP_OK;
}

static dp_status dp__distributed_alike(const char *fn, dp_scope *temp, const dp_module *module,
                                       const dp_module *wrapper, dp_status status)
{
    dp_ctx *ctx = module->ctx;
    dp__lines lines = {.fn = fn, .ctx = ctx, .scope = temp};
    if (ctx->info.process_count == 1)
        return status;
    dp__lines ranges = lines;
    if (status == DP_OK)
        status = dp__lines_begin(&lines, module->listed_count + DP__RULES + 3);
    if (status == DP_OK)
        status = dp__lines_begin(&ranges, DP__SORT_COUNT * module->listed_count);
    if (status == DP_OK)
        status = dp__distributed_lines(&lines, wrapper);
    DP_TRY(dp__lines_compare(&lines, status));
    return dp__lines_compare(&ranges, dp__ranges_lines(&ranges, wrapper->face));
}

/* For as long as the job lasts. */
static dp_status dp__distributed_reducer(const char *fn, const dp__face *face,
                                         const dp_reducer_config *config,
                                         const dp__wrapped *wrapped, dp_status status)
{
    dp__distributed *ranks = face->ranks;
    if (status == DP_OK && ranks->reducer_scope == NULL) {
        ranks->reducer_scope = dp__scope_try_open(fn, face->ctx, face->scope);
        status = ranks->reducer_scope != NULL ? DP_OK : DP_ERR_NO_MEMORY;
    }
    DP_TRY(dp__shared_failure(face->ctx, status));
    return dp__reducer_create(fn, face->ctx, config, wrapped, ranks->reducer_scope,
                              &ranks->reducer);
}

static dp_status dp__distributed_join(const char *fn, dp_scope *temp, dp_module *wrapper,
                                      bool spreads)
{
    dp__face *face = wrapper->face;
    dp_reducer_config reducer = dp__distributed_rules(face);
    dp__wrapped wrapped = {0};
    dp_status status = dp__units_config(face, temp, &reducer, &wrapped);
    if (status == DP_OK)
        status = dp__replicas_send(face, DP__BUFFERS, face->count);
    if (status == DP_OK && spreads && face->ctx->info.process_count > 1)
        status = dp__ranks_start(fn, face, temp);
    DP_TRY(dp__distributed_reducer(fn, face, &reducer, &wrapped, status));
    bool shares = face->ranks->config.share_params && face->ctx->info.process_count > 1 &&
                  face->layouts[DP__PARAMS].range_count > 0;
    return shares ? dp__params_share(fn, temp, wrapper) : DP_OK;
}

/* For a job that was made anew: as if it had just been made, but that each process has the numbers
   that it has. */
static dp_status dp__distributed_return(const char *fn, dp_module *wrapper)
{
    dp__face *face = wrapper->face;
    dp__distributed *ranks = face->ranks;
    dp_scope *temp = NULL;
    dp__scope_end(ranks->reducer_scope);
    ranks->reducer_scope = NULL;
    ranks->reducer = NULL;
    ranks->zeroed = UINT64_MAX;
    ranks->met = DP__MET_NOBODY;
    ranks->reduced = ranks->owes = false;
    ranks->buffers_apart = true;
    dp_status status = dp__temp_begin(face->ctx, &temp);
    if (status != DP_OK)
        return dp__all_or_none(fn, face->ctx, status);
    status = dp__distributed_alike(fn, temp, face->inner, wrapper, dp__grads_zero(wrapper));
    if (status == DP_OK)
        status = dp__distributed_join(fn, temp, wrapper, false);
    return dp__temp_end(temp, NULL, status);
}

/* `status`: whether there is a wrapper here. */
static dp_status dp__distributed_meet(const char *fn, dp_module *module, dp_module *wrapper,
                                      dp_status status)
{
    dp_ctx *ctx = module->ctx;
    dp_scope *temp = NULL;
    DP_TRY(dp__enter(fn, ctx));
    dp_status begun = dp__temp_begin(ctx, &temp);
    if (begun != DP_OK)
        return dp__exit(fn, ctx, dp__all_or_none(fn, ctx, begun));
    bool spreads = !dp__catches_up(ctx); /* else the others' numbers are better */
    status = dp__distributed_alike(fn, temp, module, wrapper, status);
    if (status == DP_OK)
        status = dp__distributed_join(fn, temp, wrapper, spreads);
    return dp__exit(fn, ctx, dp__temp_end(temp, NULL, status));
}

static dp_status dp__distribute(const char *fn, dp_module *module,
                                const dp_distributed_config *config, dp_module **out)
{
    dp_module *wrapper = NULL;
    DP_TRY(dp__check_module(fn, module));
    DP_TRY(dp__check_alone(fn, module->ctx));
    DP_TRY(dp__check_pointer(fn, "out", out));
    dp_status status = dp__distributed_make(fn, module, config, &wrapper);
    status = dp__distributed_meet(fn, module, wrapper, status);
    if (status == DP_OK) {
        dp__wrapper_list(wrapper);
        *out = wrapper;
    } else if (wrapper != NULL) {
        dp__module_end(wrapper);
    }
    return status;
}

DP_API dp_status dp_distributed(dp_module *module, const dp_distributed_config *config,
                                dp_module **out)
{
    static const dp_distributed_config zero;
    return dp__distribute(__func__, module, config != NULL ? config : &zero, out);
}

DP_API dp_status dp_everywhere(dp_module *module, dp_module **out)
{
    static const dp_distributed_config config = {.reduction = DP_MEAN_SAMPLES};
    return dp__distribute(__func__, module, &config, out);
}

/* The replica that has the memory of the owner; where there are fewer, face->count. */
static size_t dp__owner_replica(const dp__face *face, size_t owner)
{
    size_t r = 0;
    for (size_t left = owner; left > 0 && r < face->count;)
        left -= ++r < face->count && !dp__replica_sees(face, r);
    return r;
}

DP_API size_t dp_owner_count(const dp_module *module)
{
    size_t count = 1;
    if (dp__check_module(__func__, module) != DP_OK)
        return 0;
    const dp__face *face = module->face;
    while (dp__ops(face)->over_ranks && dp__owner_replica(face, count) < face->count)
        count++;
    return count;
}

/* The original's parameter as replica `r` has it. */
static void dp__owner_view(const dp__face *face, size_t r, size_t slot, dp_tensor *data,
                           dp_tensor *grad)
{
    data->device = dp__replica_device(face, r)->id;
    data->data = *face->replicas[r].data[slot];
    if (grad == NULL)
        return;
    grad->device = data->device;
    grad->data = grad->data != NULL ? *face->replicas[r].grad[slot] : NULL;
}

/* Which replica's memory an owner has, and of which face; *out_face NULL: the module's own. */
static dp_status dp__check_owner(const char *fn, dp_module *module, size_t owner,
                                 dp__face **out_face, size_t *out_replica)
{
    DP_TRY(dp__check_module(fn, module));
    dp__face *face = module->ops->over_ranks ? module->face : NULL;
    *out_replica = face != NULL ? dp__owner_replica(face, owner) : owner;
    *out_face = face;
    if (*out_replica < (face != NULL ? face->count : 1))
        return DP_OK;
    return dp_error(DP_ERR_INVALID, "%s: owner %zu, '%s' has %zu", fn, owner, module->name,
                    dp_owner_count(module));
}

/* Replicas that were up to date stay so as far as this edit goes: dp__replicas_differ sees whether
   the other owners get it too. */
DP_API dp_status dp_owner_edit(dp_module *module, size_t owner, size_t param, dp_tensor *out_data,
                               dp_tensor *out_grad)
{
    dp__face *face;
    size_t r;
    DP_TRY(dp__check_owner(__func__, module, owner, &face, &r));
    bool current = face != NULL && face->version == dp__version(face->inner) + 1;
    DP_TRY(dp__param_edit(__func__, module, param, out_data, out_grad));
    if (face == NULL)
        return DP_OK;
    face->version = current ? dp__version(face->inner) + 1 : 0;
    face->replicas[r].edits += dp__hash(dp__hash_first, &param, sizeof param);
    dp__owner_view(face, r, face->inner->listed[param], out_data, out_grad);
    return DP_OK;
}

DP_API dp_status dp_owner_param(dp_module *module, size_t owner, size_t param, dp_tensor *out)
{
    dp__face *face;
    size_t r;
    DP_TRY(dp__check_owner(__func__, module, owner, &face, &r));
    DP_TRY(dp__check_param(__func__, module, param));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    *out = dp__param_at(module, param)->data;
    if (face != NULL)
        dp__owner_view(face, r, face->inner->listed[param], out, NULL);
    out->read_only = true;
    return DP_OK;
}

DP_API dp_status dp_owner_grad(dp_module *module, size_t owner, size_t param, dp_tensor *out)
{
    dp__face *face;
    size_t r;
    dp_tensor data;
    DP_TRY(dp__check_owner(__func__, module, owner, &face, &r));
    DP_TRY(dp__check_param(__func__, module, param));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__param_grad(__func__, module, param, out));
    if (face != NULL)
        dp__owner_view(face, r, face->inner->listed[param], &data, out);
    out->read_only = true;
    return DP_OK;
}

/* The line of a parameter or buffer with a hash of its numbers, and the first other one that a
   local rank has; *out_apart: there is such a one. Replicas' parameters that follow the original's
   at the next forward are not looked at. */
static dp_status dp__numbers_line(const dp_module *module, size_t home, const dp__face *face,
                                  size_t slot, char text[DP__LINE_BYTES], bool *out_apart)
{
    const dp__param *root = dp__param_at(module, home);
    dp_tensor data = root->data;
    uint64_t first = 0, other = 0;
    DP_TRY(dp__numbers_hash(module->ctx, &data, &first));
    dp__param_line(module, home, text, DP__LINE_BYTES);
    (void)dp__append(text, DP__LINE_BYTES, strlen(text), " of hash %016llx",
                     (unsigned long long)first);
    *out_apart = false;
    bool settled = face != NULL && (root->buffer || !dp__replicas_differ(face));
    for (size_t r = 1; settled && r < face->count && !*out_apart; r++) {
        data.data = *face->replicas[r].data[slot];
        data.device = face->ctx->devices[r].id;
        if (data.data == root->data.data)
            continue;
        DP_TRY(dp__numbers_hash(module->ctx, &data, &other));
        *out_apart = other != first;
        if (other != first)
            (void)dp__append(text, DP__LINE_BYTES, strlen(text), ", %016llx on rank %d",
                             (unsigned long long)other, face->ctx->info.rank_first + (int)r);
    }
    return DP_OK;
}

/* *out_apart: the first line that says that local ranks differ, or NULL. */
static dp_status dp__numbers_lines(dp__lines *lines, const dp_module *module, bool buffers,
                                   const char **out_apart)
{
    char text[DP__LINE_BYTES];
    for (size_t home = 0; home < module->listed_count; home++) {
        size_t slot = 0;
        bool apart = false;
        const dp__face *face = dp__slot_ranks(module, module->listed[home], &slot);
        bool free = face != NULL && (dp__ignores(face, face->inner->homes[slot]) ||
                                     (buffers && face->ranks->config.buffers == DP_BUFFERS_LOCAL));
        if (free || dp__param_at(module, home)->buffer != buffers)
            continue;
        DP_TRY(dp__numbers_line(module, home, face, slot, text, &apart));
        DP_TRY(dp__lines_add(lines, text));
        if (apart && *out_apart == NULL)
            *out_apart = lines->text[lines->count - 1];
    }
    return DP_OK;
}

static dp_status dp__numbers_compare(const char *fn, dp_module *module, bool buffers)
{
    dp_scope *temp = NULL;
    const char *apart = NULL;
    DP_TRY(dp__check_module(fn, module));
    dp_ctx *ctx = module->ctx;
    DP_TRY(dp__enter(fn, ctx));
    dp_status status = dp__temp_begin(ctx, &temp);
    dp__lines lines = {.fn = fn, .ctx = ctx, .scope = temp};
    if (status == DP_OK)
        status = dp__lines_begin(&lines, module->listed_count);
    if (status == DP_OK)
        status = dp__module_ready(module);
    if (status == DP_OK)
        status = dp__numbers_lines(&lines, module, buffers, &apart);
    status = dp__lines_compare(&lines, status);
    if (status == DP_OK && apart != NULL) /* with other processes their lines would differ */
        status = dp_error(DP_ERR_MISMATCH, "%s: rank %d has %s", fn, ctx->info.rank_first, apart);
    return dp__exit(fn, ctx, dp__temp_end(temp, NULL, status));
}

DP_API dp_status dp_params_compare(dp_module *module)
{
    return dp__numbers_compare(__func__, module, false);
}

DP_API dp_status dp_buffers_compare(dp_module *module)
{
    return dp__numbers_compare(__func__, module, true);
}

/* ==== >>stretches ==============================================================================
   Gradients that lie side by side, cut where their parameters do not, or an owner's, or where ranks
   begin to share anew. They are found when somebody asks first.                               */

/* A parameter by itself, which is put into `params`; *out_at: see dp__unit_share. */
static dp_stretch dp__stretch_of(const dp_module *module, size_t home, size_t *params,
                                 size_t *out_at)
{
    size_t slot = 0;
    const dp_tensor *data = &dp__param_at(module, home)->data;
    const dp__face *face = dp__slot_reducer(module, module->listed[home], &slot);
    uint32_t unit = face != NULL ? face->ranks->units[slot] : DP__NO_UNIT;
    *params = home;
    *out_at = unit != DP__NO_UNIT ? face->ranks->shares[unit].at : 0;
    return (dp_stretch){.params = params,
                        .param_count = 1,
                        .dtype = (dp_dtype)data->dtype,
                        .count = (size_t)dp__count(data),
                        .reduced = face != NULL,
                        .share = unit != DP__NO_UNIT ? face->ranks->shares[unit].each : 0,
                        .before = SIZE_MAX,
                        .after = SIZE_MAX};
}

/* Tells whether a parameter and its gradient begin where those of a region end, and stay there, for
   each owner that ranks reduce both for; for the first one in any case. */
static bool dp__home_follows(dp_module *module, const dp__region *before, size_t home, bool owned)
{
    const dp__face *face = module->ops->over_ranks ? module->face : NULL;
    const dp__memory *memory = face != NULL ? face->replicas : &dp__runs_of(module)->memory;
    size_t count = face != NULL && owned ? face->count : 1;
    size_t last = module->listed[before->home], slot = module->listed[home];
    const dp__param *a = dp__param_at(module, before->home), *b = dp__param_at(module, home);
    bool follows = dp__param_key(a, a->foreign) == dp__param_key(b, b->foreign);
    for (size_t r = 0; r < count && follows; r++)
        follows = (r > 0 && dp__replica_sees(face, r)) ||
                  ((char *)*memory[r].data[last] + before->bytes == *memory[r].data[slot] &&
                   (char *)*memory[r].grad[last] + before->bytes == *memory[r].grad[slot]);
    return follows;
}

/* How many there are. Their numbers are so far those of their first parameters. */
static size_t dp__stretches_find(dp_module *module, size_t *params, dp_stretch *out)
{
    const dp__layout *layout = &dp__runs_of(module)->layouts[DP__GRADS];
    size_t count = 0, at = 0;
    for (size_t i = 0; i < layout->region_count; i++) {
        const dp__region *region = &layout->regions[i];
        dp_stretch own = dp__stretch_of(module, region->home, params++, &at),
                   *last = out + count - (i > 0);
        bool alike = i > 0 && own.reduced == last->reduced;
        bool follows = i > 0 && region->range == region[-1].range &&
                       dp__home_follows(module, &region[-1], region->home, own.reduced && alike);
        if (own.share > 0 ? at > 0 : follows && alike && last->share == 0) {
            last->param_count++;
            last->count += own.count;
            continue;
        }
        own.before = follows ? last->params[0] : SIZE_MAX;
        if (follows)
            last->after = region->home;
        out[count++] = own;
    }
    for (size_t home = 0; home < module->listed_count; home++) {
        const dp__param *root = dp__param_at(module, home);
        if (dp__is_of_sort(root, DP__GRADS) && dp__count(&root->data) == 0)
            out[count++] = dp__stretch_of(module, home, params++, &at);
    }
    return count;
}

static int dp__stretch_order(const void *a, const void *b)
{
    const dp_stretch *x = a, *y = b;
    return x->params[0] < y->params[0] ? -1 : x->params[0] > y->params[0];
}

/* `numbers`: room, by parameter. */
static void dp__stretches_number(dp_stretch *all, size_t count, size_t *numbers)
{
    if (count > 0)
        qsort(all, count, sizeof *all, dp__stretch_order);
    for (size_t s = 0; s < count; s++)
        numbers[all[s].params[0]] = s;
    for (size_t s = 0; s < count; s++) {
        all[s].before = all[s].before != SIZE_MAX ? numbers[all[s].before] : SIZE_MAX;
        all[s].after = all[s].after != SIZE_MAX ? numbers[all[s].after] : SIZE_MAX;
    }
}

static dp_status dp__module_stretches(dp_module *module)
{
    size_t most = module->listed_count;
    DP_TRY(dp__module_ready(dp__runs_of(module)));
    size_t *params = dp__array(module->scope, most, sizeof *params);
    size_t *numbers = dp__array(module->scope, most, sizeof *numbers);
    dp_stretch *all = dp__array(module->scope, most, sizeof *all);
    if (params == NULL || numbers == NULL || all == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for %zu parameters", most);
    module->stretch_count = dp__stretches_find(module, params, all);
    dp__stretches_number(all, module->stretch_count, numbers);
    module->stretches = all;
    module->stretched_for = module->ctx->info.recoveries;
    return DP_OK;
}

DP_API dp_status dp_module_stretches(dp_module *module, const dp_stretch **out, size_t *out_count)
{
    DP_TRY(dp__check_unshared(__func__, module));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    DP_TRY(dp__check_pointer(__func__, "out_count", out_count));
    if (module->stretches == NULL || module->stretched_for != module->ctx->info.recoveries)
        DP_TRY(dp__leave(__func__, module->ctx, dp__module_stretches(module)));
    *out = module->stretches;
    *out_count = module->stretch_count;
    return DP_OK;
}

/* ==== >>shares =================================================================================
   Whether gradients are scattered. All wrappers in a module's tree do it, or none. A wrapper with
   several parameters is asked, or told, once for each.                                         */

/* The first wrapper at a slot from *slot on, which goes to the one after it; NULL: there is no
   more. */
static dp__face *dp__next_face(const dp_module *module, size_t *slot)
{
    dp__face *face = NULL;
    size_t own = 0;
    while (*slot < module->slot_count && face == NULL)
        face = dp__slot_ranks(module, (*slot)++, &own);
    return face;
}

/* Whether each local rank has memory of its own for its share, or all of them, on the host, that of
   one owner. A process that is alone adds up in one pass for such an owner, and has nothing to
   send. */
static bool dp__shares_have_places(const dp__face *face)
{
    const dp_ctx *ctx = face->inner->ctx;
    return dp__owner_replica(face, face->count - 1) < face->count ||
           (ctx->info.process_count > 1 && dp__has_one_owner(face) && dp__all_are_host(ctx));
}

/* Why ranks cannot get shares of what a module's wrappers reduce, or NULL. */
static const char *dp__unscattered_of(const dp_module *module)
{
    const char *why = NULL;
    const dp__face *face;
    for (size_t slot = 0; why == NULL && (face = dp__next_face(module, &slot)) != NULL;)
        why = dp__shares_have_places(face) ? dp__unscattered_for(face->ranks->reducer)
                                           : "devices that share parameters";
    return why;
}

static dp_status dp__may_scatter(const char *fn, const dp_module *module)
{
    size_t slot = 0;
    if (dp__next_face(module, &slot) == NULL)
        return dp_error(DP_ERR_INVALID, "%s: '%s' has no gradients that ranks reduce", fn,
                        module->name);
    const char *why = dp__unscattered_of(module);
    dp_status own = why == NULL ? DP_OK
                                : dp_error(DP_ERR_UNSUPPORTED, "'%s' has %s", module->name, why);
    return dp__leave(fn, module->ctx, dp_agree(module->ctx, own));
}

DP_API dp_status dp_grads_scatter_set(dp_module *module, bool scatter)
{
    dp__face *face;
    DP_TRY(dp__check_module(__func__, module));
    DP_TRY(dp__check_alone(__func__, module->ctx));
    if (scatter)
        DP_TRY(dp__may_scatter(__func__, module));
    for (size_t slot = 0; (face = dp__next_face(module, &slot)) != NULL;)
        face->ranks->reducer->scatters_next = scatter;
    return DP_OK;
}

DP_API bool dp_grads_are_scattered(const dp_module *module)
{
    bool scattered = false;
    if (dp__check_module(__func__, module) != DP_OK)
        return false;
    for (size_t home = 0; home < module->listed_count && !scattered; home++)
        scattered = dp__param_at(module, home)->scattered;
    return scattered;
}

DP_API bool dp_grads_are_unseen(const dp_module *module)
{
    bool unseen = false;
    if (dp__check_module(__func__, module) != DP_OK)
        return false;
    for (size_t home = 0; home < module->listed_count && !unseen; home++) {
        size_t slot = 0;
        const dp__param *root = dp__param_at(module, home);
        const dp__face *face =
            root->scattered ? dp__slot_reducer(module, module->listed[home], &slot) : NULL;
        unseen = root->scattered && (face == NULL || root->adder != face->ranks->number);
    }
    return unseen;
}

/* ==== >>buffers ================================================================================
   Buffers are equal before a forward, and may differ after it.                                 */

/* Replicas have them already: what they have of the parameters stays current. */
static void dp__buffers_changed(dp__face *face)
{
    dp_module *inner = face->inner;
    bool current = face->version == dp__version(inner) + 1;
    for (size_t home = 0; home < inner->listed_count; home++)
        if (dp__param_at(inner, home)->buffer && !dp__ignores(face, home))
            dp__param_changed(inner, home);
    face->version = current ? dp__version(inner) + 1 : 0;
}

/* Returns true if a wrapper by dp_distributed, which may have no parameters, is in a tree. */
static bool dp__has_ranks(const dp_module *module)
{
    bool found = module->ops->over_ranks;
    for (size_t i = 0; i < module->child_count && !found; i++)
        found = dp__has_ranks(module->children[i].module);
    return found;
}

DP_API dp_status dp_buffers_sync(dp_module *module)
{
    dp__face *face, *last = NULL;
    DP_TRY(dp__check_module(__func__, module));
    DP_TRY(dp__check_alone(__func__, module->ctx));
    if (module->ctx->info.process_count > 1 && !dp__has_ranks(module))
        return dp_error(DP_ERR_INVALID, "%s: no wrapper by dp_distributed is in the tree of '%s'",
                        __func__, module->name);
    for (size_t slot = 0; (face = dp__next_face(module, &slot)) != NULL; last = face) {
        if (face == last || face->ranks->config.buffers == DP_BUFFERS_LOCAL)
            continue;
        DP_TRY(dp__buffers_spread(__func__, face));
        dp__buffers_changed(face);
        face->ranks->buffers_apart = false;
    }
    return DP_OK;
}

/* ==== >>separate ===============================================================================
   Each child that can be trained gets a wrapper of its own. The module and its children are
   unchanged: a pass through the result finds the wrappers in the children's places.            */

typedef struct dp__separating {
    const char *fn;
    dp_module *module;
    const dp_distributed_config *config;
    dp_scope *temp;
    bool *ignored; /* by slot of the module */
    bool *trained; /* by child */
} dp__separating;

static bool dp__is_trained(const dp__separating *own, const dp__child *child)
{
    bool trained = false;
    for (size_t slot = 0; slot < child->module->slot_count && !trained; slot++)
        trained = !own->ignored[child->slot_first + slot] &&
                  dp__has_unit(dp__root(child->module->slots[slot]));
    return trained;
}

/* Two wrappers would reduce the same memory one after the other. */
static dp_status dp__check_separable(const dp__separating *own, size_t home)
{
    const dp_module *module = own->module;
    size_t first = module->child_count, first_slot = 0, slot = module->listed[home];
    bool counts = dp__has_unit(dp__root(module->slots[slot])) && !own->ignored[slot];
    for (; slot != DP__NO_SLOT && counts; slot = module->next_tied[slot]) {
        size_t child = dp__child_of_slot(module, slot);
        if (first != module->child_count && child != module->child_count && child != first)
            return dp_error(DP_ERR_UNSUPPORTED,
                            "%s: '%s' and '%s' are tied, but belong to two children that are "
                            "reduced separately",
                            own->fn, module->names[first_slot], module->names[slot]);
        first_slot = first == module->child_count ? slot : first_slot;
        first = first == module->child_count ? child : first;
    }
    return DP_OK;
}

/* Which children get a wrapper, and what is ignored in them. */
static dp_status dp__separating_begin(dp__separating *own)
{
    dp_module *module = own->module;
    own->ignored = dp__array(own->temp, module->slot_count, sizeof *own->ignored);
    own->trained = dp__array(own->temp, module->child_count, sizeof *own->trained);
    if (own->ignored == NULL || own->trained == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu children", own->fn,
                        module->child_count);
    for (size_t i = 0; i < own->config->ignored_count; i++) {
        size_t home = 0;
        DP_TRY(dp__ignored_find(own->fn, module, own->config, i, &home));
        for (size_t slot = module->listed[home]; slot != DP__NO_SLOT;
             slot = module->next_tied[slot])
            own->ignored[slot] = true;
    }
    size_t count = 0;
    for (size_t i = 0; i < module->child_count; i++) {
        own->trained[i] = dp__is_trained(own, &module->children[i]);
        count += own->trained[i];
    }
    if (count == 0)
        return dp_error(DP_ERR_INVALID, "%s: '%s' has no child with a gradient to reduce", own->fn,
                        module->name);
    for (size_t home = 0; home < module->listed_count; home++)
        DP_TRY(dp__check_separable(own, home));
    return DP_OK;
}

/* All ranks wrap the same children, in the same order. */
static dp_status dp__separating_alike(const dp__separating *own, dp_status status)
{
    char text[DP__LINE_BYTES];
    const dp_module *module = own->module;
    dp__lines lines = {.fn = own->fn, .ctx = module->ctx, .scope = own->temp};
    if (module->ctx->info.process_count == 1)
        return status;
    if (status == DP_OK)
        status = dp__lines_begin(&lines, module->child_count);
    for (size_t i = 0; i < module->child_count && status == DP_OK; i++) {
        snprintf(text, sizeof text, "child '%.100s', which is %s", module->children[i].name,
                 own->trained[i] ? "trained" : "not trained");
        status = dp__lines_add(&lines, text);
    }
    return dp__lines_compare(&lines, status);
}

static dp_status dp__separating_child(const dp__separating *own, size_t index, dp_module **out)
{
    const dp__child *child = &own->module->children[index];
    const dp_module *module = child->module;
    dp_distributed_config config = *own->config;
    const char **names = dp__array(own->temp, module->slot_count, sizeof *names);
    config.name = child->name;
    config.ignored = names;
    config.ignored_count = 0;
    for (size_t slot = 0; slot < module->slot_count && names != NULL; slot++)
        if (own->ignored[child->slot_first + slot])
            names[config.ignored_count++] = module->names[slot];
    dp_status made = names != NULL ? DP_OK
                                   : dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu names",
                                              own->fn, module->slot_count);
    DP_TRY(dp__shared_failure(module->ctx, made));
    return dp__distribute(own->fn, child->module, &config, out);
}

/* `status`: whether there is a wrapper here, with room for those of the children. */
static dp_status dp__separating_run(dp__separating *own, dp_module *wrapper, dp_status status)
{
    const dp_module *module = own->module;
    DP_TRY(dp__enter(own->fn, module->ctx));
    if (status == DP_OK)
        status = dp__separating_begin(own);
    DP_TRY(dp__exit(own->fn, module->ctx, dp__separating_alike(own, status)));
    for (size_t i = 0; i < module->child_count; i++)
        if (own->trained[i])
            DP_TRY(dp__separating_child(own, i, &wrapper->separate[i]));
    return DP_OK;
}

static dp_status dp__separate_step(const dp_module *wrapper)
{
    return dp_error(DP_ERR_UNSUPPORTED,
                    "children of '%s' are trained by its own methods, which dp_invoke runs",
                    wrapper->wraps->name);
}

static const dp__face_ops dp__separate_face = {.needs_all = true,
                                               .over_ranks = true,
                                               .no_wrapper = dp__no_wrapper,
                                               .allows_step = dp__separate_step};

static dp_status dp__separate_make(const dp__separating *own, dp_module **out)
{
    dp_module *module = own->module;
    const char *name = own->config->name != NULL ? own->config->name : "separate_distributed";
    if (own->config->share_params)
        return dp_error(DP_ERR_UNSUPPORTED,
                        "%s: parameters of '%s' cannot be shared: each child has its own wrapper",
                        own->fn, module->name);
    dp_module_config config = {.name = name, .wraps = module, .local_rank = module->local_rank};
    if (module->wraps != NULL)
        return dp_error(DP_ERR_INVALID, "%s: '%s' is a wrapper: what it wraps has the children",
                        own->fn, module->name);
    DP_TRY(dp__module_make(module->ctx, &config, out));
    (*out)->ops = &dp__separate_face;
    (*out)->separate = dp__array((*out)->scope, module->child_count, sizeof(dp_module *));
    if ((*out)->separate == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "%s: no memory for %zu children", own->fn,
                        module->child_count);
    (*out)->separate_count = module->child_count;
    return DP_OK;
}

DP_API dp_status dp_separate_distributed(dp_module *module, const dp_distributed_config *config,
                                         dp_module **out)
{
    static const dp_distributed_config zero;
    dp_module *wrapper = NULL;
    DP_TRY(dp__check_module(__func__, module));
    DP_TRY(dp__check_alone(__func__, module->ctx));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    dp__separating own = {
        .fn = __func__, .module = module, .config = config != NULL ? config : &zero};
    dp_status status = dp__temp_begin(module->ctx, &own.temp);
    if (status == DP_OK)
        status = dp__separate_make(&own, &wrapper);
    status = dp__separating_run(&own, wrapper, status);
    status = dp__temp_end(own.temp, NULL, status);
    if (status == DP_OK)
        *out = wrapper;
    else if (wrapper != NULL)
        dp__module_end(wrapper);
    return dp__leave(__func__, module->ctx, status);
}

/* ==== >>report =================================================================================
   What is known of a wrapper in one struct, and as a table for people.                          */

DP_API const dp_reducer *dp_wrapper_reducer(const dp_module *wrapper)
{
    if (dp__check_module(__func__, wrapper) != DP_OK || wrapper->ops->reduces == NULL)
        return NULL;
    return wrapper->face->ranks->reducer;
}

static const dp__distributed *dp__ranks_of(const dp_module *module)
{
    return module->face != NULL ? module->face->ranks : NULL;
}

static const char *dp__transport(const dp_info *job)
{
    return job->rank_count == 1      ? "none"
           : job->process_count == 1 ? "inside the process"
                                     : job->coll_backend;
}

static dp_status dp__report(const dp__face *face, dp_report *out)
{
    const dp_ctx *ctx = face->ctx;
    const dp__distributed *ranks = face->ranks;
    double share = ranks->forward_count > 0 ? 1 / (double)ranks->forward_count : 0;
    *out = (dp_report){.job = ctx->info,
                       .transport = dp__transport(&ctx->info),
                       .buffers = ranks->config.buffers,
                       .params_shared = dp__shares(face->inner),
                       .forward_s = dp__seconds(ranks->forward_ns),
                       .mean_forward_s = dp__seconds(ranks->forwards_ns) * share};
    for (size_t home = 0; home < face->inner->listed_count; home++)
        out->ignored_count += dp__ignores(face, home);
    return dp_reducer_info_get(ranks->reducer, &out->reducer);
}

DP_API dp_status dp_report_get(const dp_module *wrapper, dp_report *out)
{
    DP_TRY(dp__check_module(__func__, wrapper));
    DP_TRY(dp__check_pointer(__func__, "out", out));
    if (dp__ranks_of(wrapper) == NULL)
        return dp_error(DP_ERR_INVALID, "%s: '%s' is not a wrapper by dp_distributed", __func__,
                        wrapper->name);
    return dp__report(wrapper->face, out);
}

typedef struct dp__page { /* a text in memory that may be too short for it */
    char *text;
    size_t bytes, used; /* used: what the whole has so far */
} dp__page;

DP_PRINTF(2, 3) static void dp__page_add(dp__page *page, const char *format, ...)
{
    bool room = page->used < page->bytes;
    va_list args;
    va_start(args, format);
    int more = vsnprintf(room ? page->text + page->used : NULL, room ? page->bytes - page->used : 0,
                         format, args);
    va_end(args);
    page->used += more > 0 ? (size_t)more : 0;
}

static void dp__page_job(dp__page *page, const dp_info *job)
{
    dp__page_add(page, "process %d of %d, %d of %d on this machine; launcher: %s\n", job->process,
                 job->process_count, job->machine_process, job->machine_process_count,
                 job->launcher);
    dp__page_add(page, "rank %d ", job->rank_first);
    if (job->local_count > 1)
        dp__page_add(page, "to %d ", job->rank_first + job->local_count - 1);
    dp__page_add(page, "of %d on %s, threads for each: %d; transport: %s\n", job->rank_count,
                 job->device_backend, job->threads_per_device, dp__transport(job));
}

/* Adds who waits for whom, with several processes. */
static void dp__page_late(dp__page *page, const dp_ctx *ctx)
{
    dp_late_info late;
    if (ctx->info.process_count == 1 || dp_late(ctx, &late) != DP_OK)
        return;
    dp__page_add(page, "waited for others: %.3f s; all others for this process: %.3f s",
                 late.for_others_s, late.by_others_s);
    if (late.rank >= 0)
        dp__page_add(page,
                     "; rank %d comes last: all others waited for it, in %d of %d times, %.3f ms "
                     "each; it spends that %s",
                     late.rank, late.last, late.waits, 1e3 * late.late_s, late.where);
    dp__page_add(page, "\n");
}

/* Of both communicators: the second one has carried buckets while backward ran. */
static void dp__page_carried(dp__page *page, const dp_ctx *ctx)
{
    static const char *const what[DP__LANES] = {"collectives", "buckets that travelled early"};
    char text[160];
    for (int i = 0; i < DP__LANES; i++) {
        dp_comm *comm = ctx->lanes[i].comm;
        if (comm == NULL || !DP_HAS(dp_coll_ops, comm->ops, describe))
            continue;
        comm->ops->describe(comm, text, sizeof text);
        dp__page_add(page, "%s: %s\n", what[i], text);
    }
}

static void dp__page_rules(dp__page *page, const dp_report *report)
{
    static const char *const reductions[] = {"", "sum", "mean over ranks", "mean over samples"};
    static const char *const buffers[] = {"those of rank 0", "their mean", "each rank's own"};
    static const char *const unused[] = {"an error", "found", "fixed"};
    const dp_reducer_info *info = &report->reducer;
    bool cast = info->buckets.wire != DP_F32;
    dp__page_add(page, "\n'%s': %zu bytes of gradients a rank; %s%s%s%s%s\n", info->name,
                 info->bytes, reductions[info->reduction], cast ? ", on the wire as " : "",
                 cast ? dp__dtype_names[info->buckets.wire] : "",
                 info->buckets.hook != NULL ? ", by a hook" : "",
                 info->scatters ? ", in shares" : "");
    dp__page_add(page, "  buffers: %s; unused parameters: %s; ignored: %zu%s\n",
                 buffers[report->buffers], unused[info->unused_units], report->ignored_count,
                 !report->params_shared          ? ""
                 : report->job.machine_count > 1 ? "; parameters: once a machine"
                                                 : "; parameters: once for all processes");
}

static dp_status dp__page_buckets(dp__page *page, const dp_reducer *reducer,
                                  const dp_reducer_info *info)
{
    dp_bucket_info bucket;
    dp__page_add(page, "  %zu unit%s in %zu bucket%s of %zu, then %zu bytes; %s\n",
                 info->unit_count, dp__s(info->unit_count), info->bucket_count,
                 dp__s(info->bucket_count), info->buckets.first_bytes, info->buckets.bytes,
                 info->regrouped ? "as rank 0 had them ready" : "as parameters are listed");
    dp__page_add(page, "  bucket  units        bytes    left ms    took ms  first parameter\n");
    for (size_t b = 0; b < info->bucket_count; b++) {
        DP_TRY(dp_reducer_bucket_get(reducer, b, &bucket));
        dp__page_add(page, "  %6zu %6zu %12zu %10.3f %10.3f  %s\n", b, bucket.unit_count,
                     bucket.bytes, 1e3 * bucket.left_s, 1e3 * bucket.travel_s,
                     reducer->unit_names[bucket.units[0]]);
    }
    return DP_OK;
}

static void dp__page_time(dp__page *page, const char *what, double last_s, double mean_s)
{
    dp__page_add(page, "  %-10s %10.3f %10.3f\n", what, 1e3 * last_s, 1e3 * mean_s);
}

static double dp__percent(double part, double whole)
{
    return whole > 0 ? 100 * part / whole : 0;
}

static void dp__page_times(dp__page *page, const dp_report *report)
{
    const dp_reduce_times *last = &report->reducer.last, *mean = &report->reducer.mean;
    dp__page_add(page, "              last ms    mean ms  of reduced passes: %llu\n",
                 (unsigned long long)report->reducer.pass_count);
    dp__page_time(page, "forward", report->forward_s, report->mean_forward_s);
    dp__page_time(page, "backward", last->compute_s, mean->compute_s);
    dp__page_time(page, "waited", last->finish_s, mean->finish_s);
    dp__page_time(page, "travelled", last->travel_s, mean->travel_s);
    dp__page_add(page, "  %-10s %8.0f %% %8.0f %%\n", "hidden",
                 dp__percent(last->hidden_s, last->travel_s),
                 dp__percent(mean->hidden_s, mean->travel_s));
}

/* Each wrapper by dp_distributed in a tree. */
static dp_status dp__page_wrappers(dp__page *page, const dp_module *module)
{
    const dp__distributed *ranks = dp__ranks_of(module);
    dp_report report;
    if (ranks != NULL) {
        DP_TRY(dp__report(module->face, &report));
        dp__page_rules(page, &report);
        DP_TRY(dp__page_buckets(page, ranks->reducer, &report.reducer));
        dp__page_times(page, &report);
    }
    for (size_t i = 0; i < module->separate_count; i++)
        if (module->separate[i] != NULL)
            DP_TRY(dp__page_wrappers(page, module->separate[i]));
    for (size_t i = 0; i < module->child_count; i++)
        DP_TRY(dp__page_wrappers(page, module->children[i].module));
    return DP_OK;
}

DP_API size_t dp_report_text(const dp_module *module, char *text, size_t bytes)
{
    dp__page page = {.text = text, .bytes = bytes};
    if (dp__check_module(__func__, module) != DP_OK ||
        (bytes > 0 && dp__check_pointer(__func__, "text", text) != DP_OK))
        return 0;
    dp__page_job(&page, &module->ctx->info);
    dp__page_carried(&page, module->ctx);
    dp__page_late(&page, module->ctx);
    return dp__page_wrappers(&page, module) == DP_OK ? page.used : 0;
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
