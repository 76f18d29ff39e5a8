/* hip.c - the real libraries of HIP, on a machine that may have no GPU: the kernels compile for
   GPUs of the kinds that HIP 5.2 knows, and a context opens, on the CPU if nothing else is there.
   With "one", for one of the kinds alone. With the name of a file: write the kernels' text there,
   for a compiler that knows newer ones. */

#define DP_IMPLEMENTATION
#include "../../dp_hip.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void *host_alloc(const dp_host *host, size_t bytes, size_t align)
{
    (void)host, (void)align;
    return malloc(bytes);
}

static void host_free(const dp_host *host, void *data)
{
    (void)host;
    free(data);
}

static int write_text(const dp_host *host, const char *name)
{
    FILE *file = fopen(name, "w");
    char *source = dp__cuda_source(host);
    if (file == NULL || source == NULL || fputs(source, file) < 0)
        return 1;
    free(source);
    return fclose(file);
}

int main(int count, char **words)
{
    static const int archs[] = {0x906, 0x90a, 0x1030};
    const dp_host host = {.size = sizeof host, .alloc = host_alloc, .free = host_free};
    dp_ctx *ctx = NULL;
    dp_info info;
    dp__cuda_image image = {.data = NULL};
    dp__cuda_target target;
    bool one = count > 1 && strcmp(words[1], "one") == 0;
    if (count > 1 && !one)
        return write_text(&host, words[1]);
    if (dp__cuda_ready() != DP_OK) {
        fprintf(stderr, "%s\n", dp_last_error());
        return 1;
    }
    for (size_t i = 0; i < (one ? 1 : sizeof archs / sizeof *archs); i++) {
        if (dp__cuda_target_of(&host, archs[i], &target) != DP_OK ||
            dp__cuda_compile(&host, &target, &image) != DP_OK) {
            fprintf(stderr, "gfx%x: %s\n", (unsigned)archs[i], dp_last_error());
            return 1;
        }
        printf("gfx%x: %zu bytes\n", (unsigned)archs[i], image.bytes);
        free(image.data);
    }
    if (dp_open(NULL, &ctx) != DP_OK || dp_info_get(ctx, &info) != DP_OK) {
        fprintf(stderr, "%s\n", dp_last_error());
        return 1;
    }
    printf("%d devices of %s\n", info.local_count, info.device_backend);
    dp_close(ctx);
    return 0;
}
