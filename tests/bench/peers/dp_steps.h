/* dp_steps.h - what mpi.c does with dp.h over MPI, though both processes are of one machine:

       sum       an all-reduce in place
       mean      the same, divided
       exposed   how much longer a step takes for being reduced: backward sleeps unit by unit, as if
                 an accelerator computed, three times as long as the reduction alone */

enum { UNITS = 25 };

static dp_ctx *ctx;

static void must(dp_status status)
{
    if (status == DP_OK)
        return;
    fprintf(stderr, "%s\n", dp_last_error());
    MPI_Abort(MPI_COMM_WORLD, 4);
}

static void begin(void)
{
    const dp_coll_ops *colls[] = {dp_mpi_coll(), NULL};
    must(dp_open(&(dp_config){.colls = colls, .device_count = 1}, &ctx));
}

static void finish(void)
{
    dp_close(ctx);
}

static void all_reduce(const buffers *b, size_t bytes, dp_op op)
{
    const dp_part part = {.send = b->recv, .recv = b->recv};
    must(dp_all_reduce(ctx, &part, bytes / sizeof(float), DP_F32, op));
}

static double reduce_alone(const buffers *b, const request *r, dp_op op)
{
    all_reduce(b, r->bytes, op);
    double start = now();
    for (int i = 0; i < r->calls; i++)
        all_reduce(b, r->bytes, op);
    return (now() - start) / r->calls;
}

static double step(dp_reducer *reducer, double unit_ns, bool local)
{
    const struct timespec backward = {(time_t)(unit_ns / 1e9), (long)unit_ns % 1000000000};
    const dp_reduce_pass pass = {.no_sync = local};
    MPI_Barrier(MPI_COMM_WORLD);
    double start = now();
    must(dp_reducer_begin(reducer, &pass));
    for (uint32_t u = UNITS; u-- > 0;) {
        nanosleep(&backward, NULL);
        must(dp_reducer_ready(reducer, 0, u, NULL));
    }
    must(dp_reducer_finish(reducer));
    return now() - start;
}

static double exposed(const buffers *b, const request *r)
{
    void *local[] = {b->recv};
    size_t each = r->bytes / sizeof(float) / UNITS;
    const dp_block block = {DP_F32, each * UNITS, local};
    dp_range ranges[UNITS];
    dp_reducer *reducer;
    double alone = reduce_alone(b, r, DP_OP_MEAN), extra = 0;
    for (uint32_t u = 0; u < UNITS; u++)
        ranges[u] = (dp_range){0, u, u * each, each};
    must(dp_reducer_create(ctx,
                           &(dp_reducer_config){.blocks = &block,
                                                .block_count = 1,
                                                .ranges = ranges,
                                                .range_count = UNITS,
                                                .reduction = DP_MEAN_RANKS,
                                                .buckets.bytes = 2 << 20},
                           &reducer));
    MPI_Allreduce(MPI_IN_PLACE, &alone, 1, MPI_DOUBLE, MPI_MAX, MPI_COMM_WORLD);
    step(reducer, 3 * alone / UNITS, false);
    for (int i = 0; i < r->calls; i++) {
        extra -= step(reducer, 3 * alone / UNITS, true);
        extra += step(reducer, 3 * alone / UNITS, false);
    }
    must(dp_reducer_destroy(reducer));
    return extra > r->calls ? extra / r->calls : 1;
}

static double serve(buffers *b, const request *r)
{
    fill(b, r->bytes);
    if (strcmp(r->how, "exposed") == 0)
        return exposed(b, r);
    return reduce_alone(b, r, strcmp(r->how, "mean") == 0 ? DP_OP_MEAN : DP_OP_SUM);
}
