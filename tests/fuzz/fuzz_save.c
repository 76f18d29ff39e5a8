/* fuzz_save.c - a file that anybody may have written. Whatever is in it, reading it gives a
   sentence or a value; what it gives can be written, and read again as the same. The implementation
   is in this file once more, static: the bytes are read where they are, so that a look beyond them
   is seen. */

#define DP_STATIC
#define DP_IMPLEMENTATION
#include "../../dp_save.h"

#include "fuzz.h"

/* NaN is equal to none, itself included; a file keeps that it is one, and not which. */
static bool has_nan(dp_value value)
{
    bool has = value.kind == DP_FLOAT && isnan(value.as.f);
    for (uint32_t i = 0; i < dp_count(value) && !has; i++)
        has = has_nan(fuzz_child(value, i));
    return has;
}

/* Elements that only their shape says there are would be many to compare. */
static bool is_small(dp_value value)
{
    bool small = value.kind != DP_TENSOR || dp_tensor_count(value.as.t) <= FUZZ_ELEMENTS;
    for (uint32_t i = 0; i < dp_count(value) && small; i++)
        small = is_small(fuzz_child(value, i));
    return small;
}

/* Through a file without a name. */
static void write_and_read(dp_ctx *ctx, dp_scope *scope, dp_value value)
{
    dp_value again;
    static char bytes[1 << 16];
    dp__save_writer writer = {.ctx = ctx, .value = value, .temp = scope};
    FUZZ_CHECK(dp__save_leaves(&writer) == DP_OK);
    FUZZ_CHECK(dp__save_header_make(&writer) == DP_OK);
    size_t count = writer.header_bytes + (size_t)writer.data_bytes;
    if (count > sizeof bytes)
        return;
    memcpy(bytes, writer.header, writer.header_bytes);
    for (size_t i = 0; i < writer.leaf_count; i++) {
        const dp__save_leaf *leaf = &writer.leaves[i];
        char *to = bytes + writer.header_bytes + leaf->first;
        FUZZ_CHECK(dp_read(ctx, leaf->tensor, to, (size_t)leaf->bytes) == DP_OK);
    }
    FUZZ_CHECK(dp__save_parse(scope, scope, bytes, count, &again) == DP_OK);
    FUZZ_CHECK(has_nan(value) || !is_small(value) || fuzz_same(ctx, value, again));
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    dp_ctx *ctx = fuzz_ctx(false);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_value value;
    dp_status status = dp__save_parse(scope, scope, (const char *)data, bytes, &value);
    FUZZ_CHECK(status == DP_OK || status == DP_ERR_FILE || status == DP_ERR_UNSUPPORTED);
    if (status == DP_OK)
        write_and_read(ctx, scope, value);
    else
        FUZZ_CHECK(dp_last_error()[0] != '\0');
    dp_scope_end(scope);
    return 0;
}
