/* far.h - to be included where the implementation is: what processes tell each other over MPI while
   something else carries their collectives. */

dp_status test_far_hear(dp_ctx *ctx, int *out_process);
void test_far_tell(dp_ctx *ctx, dp_status status, int process, const char *text);

dp_status test_far_hear(dp_ctx *ctx, int *out_process)
{
    return dp__far_hear(ctx, out_process);
}

void test_far_tell(dp_ctx *ctx, dp_status status, int process, const char *text)
{
    dp__far_tell(ctx, status, process, text);
}
