/* hello.c - a batch over several devices: cut it, work on the parts, add up the results.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 examples/hello.c dp.o -o hello -lpthread -lm
   Prints:
   device 0 has rows 0 to 2
   device 1 has rows 3 to 5
   device 2 has rows 6 to 7
   device 3 has rows 8 to 9
   sums of the columns: 145 155 165, the same on every device */

#include "../dp.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* [readme */
enum { DEVICES = 4, ROWS = 10, COLUMNS = 3 };

typedef struct work {
    dp_value parts;               /* of the batch, one per device */
    float sums[DEVICES][COLUMNS]; /* what each device found */
} work;

static dp_status add_rows(int rank, dp_scope *scope, void *user) /* runs on every device at once */
{
    work *w = user;
    const dp_tensor *x;
    dp_status status = dp_as_tensor(dp_at(w->parts, (size_t)rank), "part", DP_F32, 2, &x);
    (void)scope; /* where it would put what it makes */
    for (int64_t i = 0; status == DP_OK && i < x->shape[0] * COLUMNS; i++)
        w->sums[rank][i % COLUMNS] += ((const float *)x->data)[i];
    return status;
}

static void add_up(dp_ctx *ctx, const float *batch, work *w)
{
    dp_part part[DEVICES];
    dp_tensor x = dp_wrap_const(batch, DP_F32, DP_SHAPE(ROWS, COLUMNS));
    dp_scope *step = dp_scope_begin(ctx); /* holds all that follows; one call frees it */
    DP_CHECK(
        dp_scatter(ctx, step, dp_of(step, &x), NULL, &w->parts)); /* views: nothing is copied */
    DP_CHECK(dp_run(ctx, step, add_rows, w));
    for (int rank = 0; rank < DEVICES; rank++)
        part[rank] = (dp_part){.send = w->sums[rank], .recv = w->sums[rank]};
    DP_CHECK(dp_all_reduce(ctx, part, COLUMNS, DP_F32, DP_OP_SUM)); /* each has the sum of all */
    dp_scope_end(step);
}
/* readme] */

static void show_cut(void)
{
    int64_t rows[DEVICES], first = 0;
    size_t count;
    DP_CHECK(dp_split_rows(ROWS, DEVICES, NULL, rows, &count));
    for (size_t i = 0; i < count; first += rows[i++])
        printf("device %zu has rows %d to %d\n", i, (int)first, (int)(first + rows[i] - 1));
}

int main(void)
{
    float batch[ROWS * COLUMNS];
    work w = {.parts = dp_none()};
    dp_ctx *ctx;
    for (int i = 0; i < ROWS * COLUMNS; i++)
        batch[i] = (float)(i + 1);
    DP_CHECK(dp_open(&(dp_config){.device_count = DEVICES}, &ctx));
    show_cut();
    add_up(ctx, batch, &w);
    for (int rank = 1; rank < DEVICES; rank++)
        if (memcmp(w.sums[rank], w.sums[0], sizeof w.sums[0]) != 0)
            return 1;
    printf("sums of the columns: %g %g %g, the same on every device\n", (double)w.sums[0][0],
           (double)w.sums[0][1], (double)w.sums[0][2]);
    dp_close(ctx);
    return 0;
}
