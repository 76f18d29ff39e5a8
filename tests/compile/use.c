/* use.c - a user's file that needs the declarations only; also compiled as C++ and by nvcc. */

#include "dp.h"
#include "dp.h"

dp_status use_every_macro(dp_ctx *ctx, dp_scope *scope, float *pixels);

dp_status use_every_macro(dp_ctx *ctx, dp_scope *scope, float *pixels)
{
    dp_tensor image = dp_wrap(pixels, DP_F32, DP_SHAPE(3, 4)), fresh, row;
    dp_status status = dp_tensor_new(scope, dp_local_device(ctx, 0), DP_F32, DP_SHAPE(2), &fresh);
    if (status == DP_OK) {
        status = dp_select(&image, 0, 1, &row);
    }
    if (status == DP_OK) {
        dp_value list = DP_LIST_OF(scope, dp_int(1), dp_float(0.5), dp_none());
        dp_value batch = DP_DICT(scope, {"image", dp_of(scope, &image)}, {"rest", list});
        double out;
        status = dp_item(ctx, dp_at(dp_get(batch, "rest"), 0), &out);
    }
    if (dp_status_class(status) == DP_CLASS_CALL) {
        return dp_error(status, "%s: %s", dp_status_name(status), dp_last_error());
    }
    return status;
}
