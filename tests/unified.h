/* unified.h - a table whose memory the host reaches once nothing that is enqueued uses it. */

#ifndef UNIFIED_H
#define UNIFIED_H

#include "test.h"

static dp_device_ops unified_ops;

static inline dp_status unified_open(const dp_host *host, int index, dp_dev **out)
{
    dp_status status = dp_cpu()->open(host, index, out);
    if (status == DP_OK)
        (*out)->ops = &unified_ops;
    return status;
}

static inline dp_status unified_info(dp_dev *dev, dp_device_info *out)
{
    DP_TRY(dp_cpu()->info(dev, out));
    out->host_memory = false;
    out->unified = true;
    return DP_OK;
}

/* It has no kernels: what is computed is computed by the host, where the operands are. */
static inline const dp_device_ops *unified_device(void)
{
    unified_ops = *dp_cpu();
    unified_ops.name = "unified";
    unified_ops.open = unified_open;
    unified_ops.info = unified_info;
    unified_ops.kernel = NULL;
    return &unified_ops;
}

#endif /* UNIFIED_H */
