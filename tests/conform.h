/* conform.h - one table on trial: every suite that is for all tables runs on this one and no other.

   Built with TEST_CONFORM, by `make conform`. conform.c knows the table. */

#ifndef CONFORM_H
#define CONFORM_H

#include <string.h>
#include "test.h"

#if defined(TEST_CONFORM)

const dp_device_ops *conform_table(void);
const dp_coll_ops *conform_coll(void); /* NULL: whatever serves such devices */

static dp_device_ops conform_several; /* the table, but for the two functions below */
static int conform_wanted, conform_found;

static inline dp_status conform_count(const dp_host *host, int *out)
{
    (void)host;
    *out = conform_wanted;
    return DP_OK;
}

static inline dp_status conform_open(const dp_host *host, int index, dp_dev **out)
{
    index = index < 0 || index >= conform_wanted ? index : index % conform_found;
    dp_status status = conform_table()->open(host, index, out);
    if (status == DP_OK)
        (*out)->ops = &conform_several;
    return status;
}

/* A table of `count` devices; if there are fewer, some of them several times. */
static inline const dp_device_ops *conform_device(int count)
{
    const dp_device_ops *table = conform_table();
    test_allocator counter = {0};
    dp_ctx *ctx = NULL;
    dp_info info;
    const dp_config config = {.backends = (const dp_device_ops *const[]){table, NULL},
                              .allocator = test_allocator_of(&counter)};
    CHECK_OK(dp_open(&config, &ctx));
    CHECK_OK(dp_info_get(ctx, &info));
    dp_close(ctx);
    conform_wanted = count;
    conform_found = info.local_count;
    memcpy(&conform_several, table,
           table->head.size < sizeof *table ? table->head.size : sizeof *table);
    conform_several.count = conform_count;
    conform_several.open = conform_open;
    return &conform_several;
}

/* For dp_config.colls. */
static inline const dp_coll_ops *const *conform_colls(void)
{
    static const dp_coll_ops *colls[2];
    colls[0] = conform_coll();
    return colls[0] != NULL ? colls : NULL;
}

#else

static inline const dp_coll_ops *const *conform_colls(void)
{
    return NULL;
}

#endif
#endif /* CONFORM_H */
