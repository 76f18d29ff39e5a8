/* The devices of custom_device.h at work: a sum over two of them, a batch out and back.

   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          cc -std=c11 examples/custom_device.c dp.o -o custom_device -pthread -lm
   Prints:
   all_reduce: 11 22 33 44 on rank 0
   all_reduce: 11 22 33 44 on rank 1
   scatter: 3 rows on rank 0
   scatter: 2 rows on rank 1
   gather: rows in order */

#include "custom_device.h"
#include <stdlib.h>

static void check(dp_status status)
{
    if (status != DP_OK) {
        fprintf(stderr, "%s\n", dp_last_error());
        exit(1);
    }
}

int main(void)
{
    const dp_device_ops *const backends[] = {toy_device(), NULL};
    const double in[2][4] = {{1, 2, 3, 4}, {10, 20, 30, 40}};
    const int32_t rows[5][2] = {{0, 1}, {2, 3}, {4, 5}, {6, 7}, {8, 9}};
    double sum[4];
    int32_t back[5][2];
    dp_tensor on[2], batch = dp_wrap_const(rows, DP_I32, DP_SHAPE(5, 2));
    dp_part parts[2] = {{0}};
    dp_value list, joined;
    dp_ctx *ctx;
    check(dp_open(&(dp_config){.backends = backends, .device_count = 2}, &ctx));
    dp_scope *scope = dp_scope_begin(ctx);

    for (int r = 0; r < 2; r++) {
        dp_tensor host = dp_wrap_const(in[r], DP_F64, DP_SHAPE(4));
        check(dp_tensor_new(scope, dp_local_device(ctx, r), DP_F64, DP_SHAPE(4), &on[r]));
        check(dp_copy(ctx, &on[r], &host, NULL));
        parts[r].send = parts[r].recv = on[r].data;
    }
    check(dp_all_reduce(ctx, parts, 4, DP_F64, DP_OP_SUM));
    for (int r = 0; r < 2; r++) {
        check(dp_read(ctx, &on[r], sum, sizeof(sum)));
        printf("all_reduce: %g %g %g %g on rank %d\n", sum[0], sum[1], sum[2], sum[3], r);
    }
    check(dp_scatter(ctx, scope, dp_of(scope, &batch), NULL, &list));
    for (uint32_t r = 0; r < list.count; r++)
        printf("scatter: %d rows on rank %u\n", (int)list.as.items[r].as.t->shape[0], r);
    check(dp_gather(ctx, scope, list, NULL, &joined));
    check(dp_read(ctx, joined.as.t, back, sizeof(back)));
    printf("gather: rows %s\n", memcmp(back, rows, sizeof(rows)) == 0 ? "in order" : "lost");
    dp_scope_end(scope);
    dp_close(ctx);
    return 0;
}
