/* main.c - a program that uses the library from a file of its own; also compiled as C++. */

#include "dp.h"

int main(void)
{
    dp_ctx *ctx;
    if (dp_version() != DP_VERSION || dp_open(NULL, &ctx) != DP_OK) {
        return 1;
    }
    dp_close(ctx);
    return 0;
}
