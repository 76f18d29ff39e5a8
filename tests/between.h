/* between.h - tests of inner parts of the rooms between processes. In dp.c, after the
   implementation, where it has these rooms. */

#include "test.h"

/* ---- pieces that grow ------------------------------------------------------------------------ */

/* So that each process has 16 KiB of one, as long as that is not too much. */
TEST(pieces_grow_with_processes)
{
    CHECK_INT(dp__mesh_piece_bytes(2 << 20, 2), 2 << 20);
    CHECK_INT(dp__mesh_piece_bytes(2 << 20, 128), 2 << 20);
    CHECK_INT(dp__mesh_piece_bytes(2 << 20, 129), (2 << 20) + DP__SHARED_PAGE);
    CHECK_INT(dp__mesh_piece_bytes(1 << 20, 64), 1 << 20);
    CHECK_INT(dp__mesh_piece_bytes(1 << 20, 512), 8 << 20);
    CHECK_INT(dp__mesh_piece_bytes(1 << 20, 513), 8 << 20);
    CHECK_INT(dp__mesh_piece_bytes(1 << 20, 100000), 8 << 20);
}

/* ---- packets --------------------------------------------------------------------------------- */

static dp__packet *packet_posted;

static dp_status post_packet(dp__endpoint *endpoint, int process, dp__packet *packet)
{
    (void)endpoint;
    CHECK_INT(process, 1);
    packet_posted = packet;
    return DP_OK;
}

static dp_status read_packet(dp__mailbox *mailbox, dp__header_kind kind)
{
    dp__packet in = {.header = {.kind = (int32_t)kind, .is = {.reply = 7}}};
    return dp__header_read(mailbox, 1, &in);
}

/* The answer to a message may overtake what says that a carrier is done with its memory. */
TEST(what_a_carrier_still_has_is_not_done)
{
    static const dp__carrier carrier = {.send = post_packet};
    static char data[100];
    dp__mailbox mailbox = {.endpoint = {.carrier = &carrier, .mailbox = &mailbox}};
    dp__request send = {
        .number = 7, .process = 1, .data = data, .bytes = sizeof data, .status = DP_PENDING};
    dp__packet *packet = NULL;
    int moves = 1;
    CHECK_OK(dp__packet_new(&mailbox, &packet));
    send.wire = packet;
    dp__request_add(&mailbox.offered, &send);
    CHECK_OK(read_packet(&mailbox, DP__HEADER_WANTED));
    CHECK(packet_posted == packet);
    CHECK_ERROR(read_packet(&mailbox, DP__HEADER_WANTED), DP_ERR_INTERNAL, "wants data twice");
    CHECK_OK(read_packet(&mailbox, DP__HEADER_DONE));
    for (; !dp__packet_sent(&mailbox.endpoint, packet, 4); moves++)
        CHECK_INT(send.status, DP_PENDING);
    CHECK_INT(4 * (size_t)moves, sizeof packet->header + sizeof data);
    CHECK_INT(send.status, DP_OK);
    CHECK(mailbox.offered.first == NULL && mailbox.packets == packet);
    dp__os_free(packet, 0, NULL);
}

static bool close_answer;

static bool close_as_asked(dp__endpoint *endpoint)
{
    dp__packet *packet = NULL;
    CHECK_OK(dp__packet_take(endpoint, &packet));
    dp__packet_end(endpoint, packet);
    return close_answer;
}

/* A carrier may say that it still uses memory when it is closed: copies of what has not ended stay
   where they are. */
TEST(what_a_closed_carrier_still_uses_stays)
{
    static const dp__carrier carrier = {.close = close_as_asked};
    static dp__request requests[DP__REQUESTS_AT_ONCE];
    dp_ctx *ctx;
    CHECK_OK(dp_open(NULL, &ctx));
    dp__mailbox mailbox = {
        .ctx = ctx, .endpoint = {.carrier = &carrier, .mailbox = &mailbox}, .block_count = 1};
    mailbox.blocks[0] = requests;
    for (int closed = 0; closed < 2; closed++) {
        dp__packet *packet = NULL;
        dp_scope *stage;
        CHECK_OK(dp__temp_begin(ctx, &stage));
        CHECK(dp__scope_bytes(stage, 1 << 20, 64) != NULL);
        CHECK_OK(dp__packet_new(&mailbox, &packet));
        requests[0].stage = stage;
        requests[0].wire = packet;
        ctx->world.mailbox = &mailbox;
        close_answer = closed == 1;
        dp__mailbox_close(ctx);
        CHECK(stage->blocks != NULL && stage->blocks->kept == (closed == 0));
        CHECK(requests[0].wire == NULL && mailbox.packets == NULL);
        ctx->world.mailbox = NULL;
        stage->blocks->kept = false;
        dp__scope_end(stage);
    }
    dp_close(ctx);
}

/* ---- loads over TCP -------------------------------------------------------------------------- */

/* Two connections to each of three processes; a load waits for those before it, too. */
TEST(load_lacks_who_sends_nothing_and_then_who_takes_nothing)
{
    dp__load loads[2] = {{.number = 6}, {.number = 7}};
    dp__tcp_progress out[6] = {{0}}, in[6] = {{0}};
    dp__tcp tcp = {.connections = {.each = 2, .count = 6}, .out = out, .in = in};
    const dp__endpoint endpoint = {.own = &tcp, .process = 1, .process_count = 3};
    CHECK_INT(dp__tcp_lacks(&endpoint, &loads[1]), 0);
    out[5].at = &loads[0];
    CHECK_INT(dp__tcp_lacks(&endpoint, &loads[0]), 3);
    CHECK_INT(dp__tcp_lacks(&endpoint, &loads[1]), 3);
    in[0].at = &loads[1];
    CHECK_INT(dp__tcp_lacks(&endpoint, &loads[0]), 3);
    CHECK_INT(dp__tcp_lacks(&endpoint, &loads[1]), 1);
}

/* ---- cores of all ---------------------------------------------------------------------------- */

#if defined(__linux__)

/* A wait that spins counts the cores of all; a quota, which all share, counts before a thread is
   bound. */
TEST(a_quota_leaves_fewer_cores_than_masks)
{
    static dp_ctx ctx;
    static dp__introduction introductions[2];
    const dp__job job = {.ctx = &ctx, .introductions = introductions, .process_count = 2};
    for (int core = 0; core < 4; core++) {
        dp__cores_add(&introductions[core / 2].cores, core);
    }
    ctx.cores = 3; /* of other processes the masks may be more than of this one */
    CHECK(dp__job_has_cores(&job, 4));
    CHECK(!dp__job_has_cores(&job, 5));
    ctx.limited = true;
    CHECK(dp__job_has_cores(&job, 3));
    CHECK(!dp__job_has_cores(&job, 4));
    dp_ctx *here;
    CHECK_OK(dp_open(NULL, &here));
    CHECK_INT(here->limited, dp__os_core_count() < dp__os_affinity_count());
    dp_close(here);
}

#endif
