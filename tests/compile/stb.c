/* stb.c - a program with a stb_ds of its own, whose memory is counted. STB_FIRST: it comes before
   dp.h; STB_DS_IMPLEMENTATION: this file emits it. */

#include <stdlib.h>

static int counted_blocks;

static inline void *counted_realloc(void *data, size_t bytes)
{
    counted_blocks += data == NULL;
    return realloc(data, bytes);
}

static inline void counted_free(void *data)
{
    counted_blocks--;
    free(data);
}

#if defined(STB_FIRST)
#include "tests/compile/stb.h"
#endif

#define DP_IMPLEMENTATION
#include "dp.h"

#if !defined(STB_FIRST)
#include "tests/compile/stb.h"
#endif

int main(void)
{
    ptrdiff_t *list = NULL;
    struct {
        char *key;
        ptrdiff_t value;
    } *table = NULL;
    char key[] = "three";
    dp_ctx *ctx;
    arrput(list, 1);
    arrput(list, 2);
    shput(table, key, 3);
    int before = counted_blocks;
    if (dp_open(NULL, &ctx) != DP_OK)
        return 1;
    dp_close(ctx);
    ptrdiff_t sum = list[0] + list[1] + shget(table, key);
    int inside = counted_blocks - before;
    arrfree(list);
    shfree(table);
    /* What the other file emits counts nothing, and so nothing before. */
    return sum == 6 && inside == 0 && (before == 0 || counted_blocks == 0) ? 0 : 1;
}
