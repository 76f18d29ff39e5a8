/* fuzz_npy.c - a .npy or .npz file that anybody may have written. Whatever is in it, reading it
   gives a sentence or tensors; these can be printed, and written and read again as the same. The
   implementation is in this file once more, static: the bytes are read where they are, so that a
   look beyond them is seen. */

#define DP_STATIC
#define DP_IMPLEMENTATION
#include "../../dp_array.h"

#include "fuzz.h"

/* NaN is equal to none, itself included. */
static bool tensor_has_nan(const dp_tensor *tensor)
{
    const char *at = tensor->data;
    size_t size = dp_dtype_bytes((dp_dtype)tensor->dtype);
    for (int64_t i = 0; dp__is_float((dp_dtype)tensor->dtype) && i < FUZZ_ELEMENTS; i++)
        if (i < dp_tensor_count(tensor) &&
            isnan(dp__array_float((dp_dtype)tensor->dtype, at + (size_t)i * size)))
            return true;
    return false;
}

/* As a file would have it. */
static void write_and_read_tensor(dp_ctx *ctx, dp_scope *scope, dp_value value)
{
    static char bytes[(1 << 16) + DP__ARRAY_HEADER];
    const dp_tensor *tensor = value.as.t;
    dp_tensor again;
    int64_t count = dp_tensor_count(tensor);
    FUZZ_CHECK(count >= 0);
    if (count > FUZZ_ELEMENTS)
        return;
    size_t header = dp__array_header_make(tensor, bytes), size = dp__bytes(tensor);
    FUZZ_CHECK(header % DP__ARRAY_ALIGN == 0);
    FUZZ_CHECK(dp_read(ctx, tensor, bytes + header, size) == DP_OK);
    FUZZ_CHECK(dp__array_parse(scope, bytes, header + size, &again) == DP_OK);
    FUZZ_CHECK(tensor_has_nan(tensor) || fuzz_same(ctx, value, dp_of(scope, &again)));
}

static void use(dp_ctx *ctx, dp_scope *scope, dp_value value)
{
    const char *text;
    if (value.kind != DP_DICT)
        write_and_read_tensor(ctx, scope, value);
    for (uint32_t i = 0; value.kind == DP_DICT && i < dp_count(value); i++)
        write_and_read_tensor(ctx, scope, dp_at(value, i));
    FUZZ_CHECK(dp_print_text(ctx, scope, value, &text) == DP_OK);
    FUZZ_CHECK(text[0] != '\0');
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t bytes)
{
    dp_ctx *ctx = fuzz_ctx(false);
    dp_scope *scope = dp_scope_begin(ctx);
    dp_tensor tensor;
    dp_value value = dp_none();
    bool zip = bytes > 0 && data[0] == 'P';
    dp_status status = zip ? dp__npz_read(scope, scope, (const char *)data, bytes, &value)
                           : dp__array_parse(scope, (const char *)data, bytes, &tensor);
    FUZZ_CHECK(status == DP_OK || status == DP_ERR_FILE || status == DP_ERR_UNSUPPORTED ||
               status == DP_ERR_INVALID);
    if (status == DP_OK)
        use(ctx, scope, zip ? value : dp_of(scope, &tensor));
    else
        FUZZ_CHECK(dp_last_error()[0] != '\0');
    dp_scope_end(scope);
    return 0;
}
