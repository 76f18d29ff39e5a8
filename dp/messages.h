/* dp/messages.h - v0.2.0 - messages from one rank to another - MIT licence

   Part of dp.h, which includes it. It holds what a user calls; what becomes of a message is in
   dp/mailbox.h.

   CONTENTS (search for the tag)
     >>beginning checks, and what a message needs
     >>ending    the public edge
*/

#ifndef DP__ROOMS
#error "dp/messages.h is a part of dp.h: include dp.h"
#else

/* ==== >>beginning ==============================================================================
   Checks, and what a message needs, before anybody hears of it.                                 */

/* Returns what carries messages: MPI, if that has brought the processes together, else what carries
   collectives, if it can, else TCP. NULL: nothing does. */
static const dp__carrier *dp__mailbox_carrier(const dp_ctx *ctx)
{
    const dp__carrier *sums = dp__mesh_carrier(ctx);
    if (ctx->world.mpi_links != NULL && dp__backend_mpi != NULL)
        return dp__backend_mpi->carrier;
    if (sums != NULL && sums->send != NULL)
        return sums;
    return ctx->world.port != NULL ? &dp__tcp_carrier : NULL;
}

static dp_status dp__mailbox_carry(dp__mailbox *mailbox, const dp__carrier *carrier)
{
    dp__endpoint *endpoint = &mailbox->endpoint;
    *endpoint = (dp__endpoint){.carrier = carrier,
                               .job = mailbox->job,
                               .mailbox = mailbox,
                               .process = mailbox->process,
                               .process_count = mailbox->process_count};
    dp_status status = carrier != NULL ? carrier->open(endpoint) : DP_OK;
    if (status != DP_OK)
        (void)carrier->close(endpoint);
    if (endpoint->why != NULL)
        endpoint->carrier = NULL;
    return status;
}

static dp_status dp__mailbox_fill(dp_ctx *ctx, dp_scope *scope)
{
    dp__mailbox *mailbox = dp__scope_bytes(scope, sizeof *mailbox, 64);
    if (mailbox == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for messages");
    *mailbox = (dp__mailbox){.ctx = ctx,
                             .job = ctx->world.job,
                             .scope = scope,
                             .process = ctx->info.process,
                             .process_count = ctx->info.process_count};
    if (ctx->world.job != NULL && ctx->world.job->shared.data != NULL)
        DP_TRY(dp__outbox_open(mailbox));
    else if (ctx->world.job != NULL)
        DP_TRY(dp__mailbox_carry(mailbox, dp__mailbox_carrier(ctx)));
    ctx->world.mailbox = mailbox;
    return DP_OK;
}

/* Made by the first message. */
static dp_status dp__mailbox_open(dp_ctx *ctx)
{
    dp_scope *scope;
    if (ctx->world.mailbox != NULL)
        return DP_OK;
    DP_TRY(dp__temp_begin(ctx, &scope));
    dp_status status = dp__mailbox_fill(ctx, scope);
    if (status != DP_OK)
        dp__scope_end(scope);
    return status;
}

/* Keeps what lies in a scope where it is until the process ends. */
static void dp__scope_keep(const dp_scope *scope)
{
    if (scope->home != NULL)
        scope->home->kept = true;
    for (dp__block *block = scope->blocks; block != NULL; block = block->next)
        block->kept = true;
}

/* Ends what a carrier has of a mailbox. What it may still use stays until the process ends. */
static void dp__mailbox_uncarry(dp__mailbox *mailbox)
{
    bool closed = mailbox->endpoint.carrier->close(&mailbox->endpoint);
    for (int i = 0; i < mailbox->block_count; i++)
        for (size_t k = 0; k < dp__requests_in(i); k++) {
            dp__request *request = &mailbox->blocks[i][k];
            dp__header_discard(mailbox, request);
            if (!closed && request->stage != NULL)
                dp__scope_keep(request->stage);
        }
    while (mailbox->packets != NULL) {
        dp__packet *packet = mailbox->packets;
        mailbox->packets = packet->next;
        dp__os_free(packet, 0, NULL);
    }
}

static void dp__mailbox_close(dp_ctx *ctx)
{
    dp__mailbox *mailbox = ctx->world.mailbox;
    if (mailbox != NULL && mailbox->endpoint.carrier != NULL)
        dp__mailbox_uncarry(mailbox);
}

static void dp__mailbox_let_go(dp__mailbox *mailbox)
{
    const dp__carrier *carrier = mailbox != NULL ? mailbox->endpoint.carrier : NULL;
    if (carrier != NULL && carrier->let_go != NULL)
        carrier->let_go(&mailbox->endpoint);
}

/* Returns true if messages have begun that the user has not ended. */
static bool dp__mailbox_has_messages(const dp__mailbox *mailbox)
{
    bool some = false;
    for (int i = 0; mailbox != NULL && i < mailbox->block_count; i++)
        for (size_t k = 0; k < dp__requests_in(i); k++)
            some = some || mailbox->blocks[i][k].number != 0;
    return some;
}

/* The job has failed, and is made anew: no message of it goes on, and nobody is told of one that is
   done. */
static void dp__mailbox_forget(dp_ctx *ctx)
{
    dp__mailbox *mailbox = ctx->world.mailbox;
    if (mailbox == NULL)
        return;
    dp__mailbox_close(ctx);
    for (int i = 0; i < mailbox->block_count; i++)
        for (size_t k = 0; k < dp__requests_in(i); k++)
            if (mailbox->blocks[i][k].stage != NULL)
                mailbox->blocks[i][k].stage->lost = true;
    mailbox->scope->lost = true;
    ctx->world.mailbox = NULL;
}

static dp_status dp__message_check(const char *fn, dp_ctx *ctx, const dp_message *message)
{
    dp__device *device;
    bool any = message->receives && message->peer == DP_ANY_RANK;
    DP_TRY(dp__check_placed(fn, ctx, "tensor", &message->tensor, &device));
    if (message->receives)
        DP_TRY(dp__check_writable(fn, "tensor", &message->tensor));
    DP_TRY(dp__check_rank(fn, ctx, "local_rank", message->local_rank));
    if (!any && (message->peer < 0 || message->peer >= ctx->info.rank_count))
        return dp_error(DP_ERR_INVALID, "%s: peer is %d, there are %d ranks", fn, message->peer,
                        ctx->info.rank_count);
    return DP_OK;
}

/* Row-major memory that the host reaches: the tensor's own, or as much that others see, too. */
static dp_status dp__request_stage(dp__mailbox *mailbox, dp__request *request,
                                   const dp_tensor *tensor)
{
    dp_ctx *ctx = mailbox->ctx;
    bool own = dp__is_host(dp__device_of(ctx, tensor->device)) && dp__is_dense(tensor);
    void *data = tensor->data;
    if (!own && request->bytes > 0) {
        DP_TRY(dp__temp_begin(ctx, &request->stage));
        if (ctx->world.heap.shared != NULL)
            DP_TRY(dp__scope_block(request->stage, &ctx->shared_pool, request->bytes, &data));
        else
            data = dp__scope_bytes(request->stage, request->bytes, 64);
        if (data == NULL)
            return dp_error(DP_ERR_NO_MEMORY, "no memory for a copy of a message");
    }
    request->data = data;
    if (request->stage == NULL)
        return DP_OK;
    request->tensor = *tensor;
    if (request->receives)
        return DP_OK;
    const dp_tensor stage = dp__tensor_like(data, (dp_device){0, 0}, (dp_dtype)tensor->dtype,
                                            tensor->ndim, tensor->shape);
    return dp__copy_tensor(ctx, &stage, tensor, NULL);
}

static dp_status dp__request_fill(dp__mailbox *mailbox, dp__request *request,
                                  const dp_message *message, bool ours)
{
    const dp_ctx *ctx = mailbox->ctx;
    int own = ctx->info.rank_first + message->local_rank,
        to = message->receives ? own : message->peer;
    request->receives = message->receives;
    request->is = (dp__offer){.count = (uint64_t)dp__count(&message->tensor),
                              .from = message->receives ? message->peer : own,
                              .to = ours ? ~to : to,
                              .tag = message->tag,
                              .dtype = message->tensor.dtype};
    request->bytes = dp__bytes(&message->tensor);
    if (message->peer != DP_ANY_RANK || mailbox->job == NULL)
        request->process = mailbox->job != NULL ? dp__process_of(mailbox->job, message->peer) : 0;
    if (request->process != mailbox->process && !dp__mailbox_reaches(mailbox))
        return dp_error(DP_ERR_UNSUPPORTED, "nothing carries messages between these processes: %s",
                        mailbox->endpoint.why != NULL ? mailbox->endpoint.why
                                                      : "they have no port");
    DP_TRY(dp__request_stage(mailbox, request, &message->tensor));
    if (request->receives || request->process == mailbox->process)
        return DP_OK;
    return dp__mailbox_prepare(mailbox, request);
}

/* It is as if it had never been begun, or is done. */
static dp_status dp__request_drop(dp__mailbox *mailbox, dp__request *request, dp_status status)
{
    dp__request_remove(request);
    dp__mailbox_discard(mailbox, request);
    status = dp__temp_end(request->stage, NULL, status);
    dp__request_free(mailbox, request);
    return status;
}

static dp_status dp__message_make(dp__mailbox *mailbox, dp_message *message, bool ours)
{
    dp__request *request = dp__request_new(mailbox);
    if (request == NULL)
        return dp_error(DP_ERR_NO_MEMORY, "no memory for a message");
    dp_status status = dp__request_fill(mailbox, request, message, ours);
    if (status != DP_OK)
        return dp__request_drop(mailbox, request, status);
    if (mailbox->numbers % DP__NUMBERS_AT_ONCE == 0)
        mailbox->numbers = atomic_fetch_add(&dp__message_numbers, DP__NUMBERS_AT_ONCE);
    request->number = ++mailbox->numbers;
    message->state = request;
    message->number = request->number;
    message->status = DP_PENDING;
    return DP_OK;
}

static dp_status dp__message_start(dp__mailbox *mailbox, const dp_message *message)
{
    dp__request *request = message->state;
    bool here = request->receives || request->process == mailbox->process;
    return here ? dp__request_match(mailbox, request) : dp__mailbox_offer(mailbox, request);
}

/* `ours`: not the user's, and no receive of his, from whatever rank, is for them. */
static dp_status dp__messages_begin(const char *fn, dp_ctx *ctx, dp_message *messages, size_t count,
                                    bool ours)
{
    dp_status status = DP_OK;
    size_t made = 0;
    for (size_t i = 0; i < count; i++) {
        DP_TRY(dp__message_check(fn, ctx, &messages[i]));
        if (dp__request_of(ctx->world.mailbox, &messages[i]) != NULL)
            return dp_error(DP_ERR_STATE, "%s: message %zu has begun, and was not ended", fn, i);
    }
    DP_TRY(dp__mailbox_open(ctx));
    while (made < count && status == DP_OK) {
        status = dp__message_make(ctx->world.mailbox, &messages[made], ours);
        made += status == DP_OK;
    }
    for (size_t i = 0; i < made && status != DP_OK; i++) {
        status = dp__request_drop(ctx->world.mailbox, messages[i].state, status);
        messages[i].state = NULL;
        messages[i].number = 0;
        messages[i].status = status;
    }
    for (size_t i = 0; i < count && status == DP_OK; i++)
        status = dp__message_start(ctx->world.mailbox, &messages[i]);
    return status;
}

/* ==== >>ending =================================================================================
   The public edge.                                                                              */

static dp_status dp__messages_check(const char *fn, dp_ctx *ctx, const dp_message *messages,
                                    size_t count)
{
    DP_TRY(dp__check_ctx(fn, ctx));
    return count > 0 ? dp__check_pointer(fn, "messages", messages) : DP_OK;
}

DP_API dp_status dp_messages_begin(dp_ctx *ctx, dp_message *messages, size_t count)
{
    DP_TRY(dp__messages_check(__func__, ctx, messages, count));
    DP_TRY(dp__enter(__func__, ctx));
    return dp__exit(__func__, ctx, dp__messages_begin(__func__, ctx, messages, count, false));
}

/* How a message went, once: DP_PENDING, or the user has it now. */
static dp_status dp__message_collect(dp__mailbox *mailbox, dp_message *message)
{
    dp__request *request = dp__request_of(mailbox, message);
    if (request == NULL && message->status == DP_PENDING)
        return dp_error(DP_ERR_STATE, "two of these are copies of one message");
    if (request == NULL)
        return message->status == DP_OK
                   ? DP_OK
                   : dp_error(message->status, "%s", dp_status_text(message->status));
    if (request->status == DP_PENDING)
        return DP_PENDING;
    message->status = request->status;
    message->state = NULL;
    if (request->receives && request->status == DP_OK)
        message->peer = (int)request->is.from;
    if (request->status == DP_ERR_MISMATCH)
        (void)dp__request_mismatch(request);
    else if (request->status != DP_OK)
        (void)dp_error(request->status, "%s", dp_status_text(request->status));
    return dp__request_drop(mailbox, request, message->status);
}

/* The first failure, once all are done. */
static dp_status dp__messages_collect(dp__mailbox *mailbox, dp_message *messages, size_t count)
{
    dp_status first = DP_OK;
    char said[DP__TEXT_BYTES];
    for (size_t i = 0; i < count; i++) {
        const dp__request *request = dp__request_of(mailbox, &messages[i]);
        if (request != NULL && request->status == DP_PENDING)
            return DP_PENDING;
    }
    for (size_t i = 0; i < count; i++) {
        dp_status status = dp__message_collect(mailbox, &messages[i]);
        if (first != DP_OK || status == DP_OK)
            continue;
        first = status;
        memcpy(said, dp_last_error(), sizeof said);
    }
    return first == DP_OK ? DP_OK : dp_error(first, "%s", said);
}

static dp_status dp__messages_begun(const char *fn, const dp__mailbox *mailbox,
                                    const dp_message *messages, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        bool lost = messages[i].status == DP_PENDING &&
                    dp__request_of(mailbox, &messages[i]) == NULL;
        if (mailbox == NULL || messages[i].number == 0 || lost)
            return dp_error(DP_ERR_STATE, "%s: message %zu was not begun in this context", fn, i);
    }
    return DP_OK;
}

/* Nobody but this process could end it, which is about to wait. */
static dp_status dp__messages_alone(const char *fn, const dp__mailbox *mailbox,
                                    const dp_message *messages, size_t count)
{
    char text[DP__REQUEST_TEXT];
    for (size_t i = 0; i < count; i++) {
        const dp__request *request = dp__request_of(mailbox, &messages[i]);
        if (request != NULL && request->status == DP_PENDING &&
            request->process == mailbox->process)
            return dp_error(DP_ERR_STATE,
                            "%s: %s: the other end is of this process, too, and has "
                            "not been begun",
                            fn, dp__request_text(request, text));
    }
    return DP_OK;
}

static dp_status dp__mailbox_advance(dp__mailbox *mailbox)
{
    mailbox->moved = false;
    if (!dp__mailbox_reaches(mailbox))
        return DP_OK;
    if (mailbox->job != NULL && dp__job_is_lost(mailbox->job))
        return dp__job_heard(mailbox->job);
    return mailbox->outboxes != NULL ? dp__outbox_advance(mailbox)
                                     : mailbox->endpoint.carrier->progress(&mailbox->endpoint, 0);
}

static dp_status dp__messages_wait(dp__mailbox *mailbox, dp_message *messages, size_t count)
{
    dp_status status = dp__mailbox_advance(mailbox);
    mailbox->awaited = messages;
    mailbox->awaited_count = count;
    for (size_t i = 0; i < count; i++) {
        dp__request *request = dp__request_of(mailbox, &messages[i]);
        if (request != NULL)
            request->awaited = true;
    }
    while (status == DP_OK) {
        status = dp__messages_collect(mailbox, messages, count);
        if (status != DP_PENDING)
            break;
        mailbox->moved = false;
        status = mailbox->outboxes != NULL ? dp__outbox_wait(mailbox) : dp__mailbox_wait(mailbox);
    }
    mailbox->awaited = NULL;
    mailbox->awaited_count = 0;
    if (mailbox->job != NULL)
        dp__mailbox_awaits(mailbox, -1);
    return status;
}

/* In this thread's row of the timeline. */
static void dp__messages_trace(const dp__mailbox *mailbox, const dp_message *messages, size_t count)
{
    char text[DP__REQUEST_TEXT], name[DP__REQUEST_TEXT + 32];
    const dp__request *request = count > 0 ? dp__request_of(mailbox, &messages[0]) : NULL;
    if (!dp__trace_is_on())
        return;
    size_t used = dp__append(name, sizeof name, 0, "%s",
                             request != NULL ? dp__request_text(request, text) : "messages");
    if (count > 1)
        (void)dp__append(name, sizeof name, used, " and %zu more", count - 1);
    dp_trace_begin(name);
}

static dp_status dp__messages_end(const char *fn, dp_ctx *ctx, dp_message *messages, size_t count)
{
    dp__mailbox *mailbox = ctx->world.mailbox;
    DP_TRY(dp__messages_begun(fn, mailbox, messages, count));
    if (count == 0)
        return DP_OK;
    DP_TRY(dp__messages_alone(fn, mailbox, messages, count));
    dp__messages_trace(mailbox, messages, count);
    dp_status status = dp__messages_wait(mailbox, messages, count);
    dp_trace_end();
    return status;
}

DP_API dp_status dp_messages_end(dp_ctx *ctx, dp_message *messages, size_t count)
{
    DP_TRY(dp__messages_check(__func__, ctx, messages, count));
    DP_TRY(dp__enter(__func__, ctx));
    return dp__exit(__func__, ctx, dp__messages_end(__func__, ctx, messages, count));
}

static dp_status dp__messages_test(const char *fn, dp_ctx *ctx, dp_message *messages, size_t count)
{
    dp__mailbox *mailbox = ctx->world.mailbox;
    uint64_t waited_ns;
    DP_TRY(dp__messages_begun(fn, mailbox, messages, count));
    if (mailbox == NULL)
        return DP_OK;
    DP_TRY(dp__mailbox_advance(mailbox));
    dp_status status = dp__messages_collect(mailbox, messages, count);
    if (status != DP_PENDING && mailbox->job != NULL)
        dp__mailbox_awaits(mailbox, -1);
    if (status != DP_PENDING || mailbox->job == NULL ||
        !dp__wait_looks(&mailbox->wait, mailbox->job->look_ns, &waited_ns))
        return status;
    mailbox->awaited = messages;
    mailbox->awaited_count = count;
    dp_status look = dp__mailbox_look(mailbox);
    mailbox->awaited = NULL;
    mailbox->awaited_count = 0;
    return look != DP_OK ? look : status;
}

DP_API dp_status dp_messages_test(dp_ctx *ctx, dp_message *messages, size_t count)
{
    DP_TRY(dp__messages_check(__func__, ctx, messages, count));
    DP_TRY(dp__enter(__func__, ctx));
    dp_status status = dp__messages_test(__func__, ctx, messages, count);
    bool pending = status == DP_PENDING;
    status = dp__exit(__func__, ctx, pending ? DP_OK : status);
    return pending && status == DP_OK ? DP_PENDING : status;
}

static dp_status dp__message_whole(const char *fn, dp_ctx *ctx, dp_message *message)
{
    DP_TRY(dp__messages_begin(fn, ctx, message, 1, false));
    dp_status status = dp__messages_end(fn, ctx, message, 1);
    if (status == DP_ERR_STATE && message->state != NULL) /* nothing has happened */
        return dp__request_drop(ctx->world.mailbox, message->state, status);
    return status;
}

static dp_status dp__message_one(const char *fn, dp_ctx *ctx, const dp_tensor *tensor, int peer,
                                 int tag, bool receives)
{
    DP_TRY(dp__check_ctx(fn, ctx));
    DP_TRY(dp__check_pointer(fn, "tensor", tensor));
    dp_message message = {.tensor = *tensor,
                          .local_rank = tensor->device.backend != 0 ? tensor->device.index : 0,
                          .peer = peer,
                          .tag = tag,
                          .receives = receives};
    DP_TRY(dp__enter(fn, ctx));
    return dp__exit(fn, ctx, dp__message_whole(fn, ctx, &message));
}

DP_API dp_status dp_send(dp_ctx *ctx, const dp_tensor *tensor, int to, int tag)
{
    return dp__message_one(__func__, ctx, tensor, to, tag, false);
}

DP_API dp_status dp_recv(dp_ctx *ctx, const dp_tensor *tensor, int from, int tag)
{
    return dp__message_one(__func__, ctx, tensor, from, tag, true);
}

#endif /* DP__ROOMS */

/* The licence is at the end of dp.h. */
