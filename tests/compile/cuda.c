/* cuda.c - the real libraries, on a machine that may have no GPU: the kernels compile for all sorts
   of architectures, and a context opens, on the CPU if nothing else is there. With "one", for one
   architecture. With "sm_90", say, and the name of a file: for sass.sh, the kernels go there, and
   what the assembler says of them to stdout. */

#define DP_IMPLEMENTATION
#include "../../dp_cuda.h"
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

static int write_kernels(const dp_host *host, const char *arch, const char *name)
{
    char option[64];
    const char *const options[] = {option, "--fmad=false", "--ptxas-options=-v"};
    nvrtcProgram program = NULL;
    size_t bytes = 0, log_bytes = 0;
    snprintf(option, sizeof option, "--gpu-architecture=%s", arch);
    if (dp__cuda_bind() != DP_OK)
        return 1;
    char *source = dp__cuda_source(host);
    FILE *file = fopen(name, "wb");
    if (file == NULL || source == NULL ||
        dp__cuda.nvrtcCreateProgram(&program, source, "dp_cuda.h", 0, NULL, NULL) != 0 ||
        dp__cuda.nvrtcCompileProgram(program, 3, options) != 0 ||
        dp__cuda.nvrtcGetCUBINSize(program, &bytes) != 0 ||
        dp__cuda.nvrtcGetProgramLogSize(program, &log_bytes) != 0)
        return 1;
    char *image = malloc(bytes), *log = malloc(log_bytes);
    if (image == NULL || log == NULL || dp__cuda.nvrtcGetCUBIN(program, image) != 0 ||
        dp__cuda.nvrtcGetProgramLog(program, log) != 0 || fwrite(image, 1, bytes, file) != bytes ||
        puts(log) < 0)
        return 1;
    free(image);
    free(log);
    free(source);
    return fclose(file);
}

int main(int count, char **words)
{
    /* The last ones become text: NVRTC may leave them out, or they are newer than any. */
    static const int archs[] = {75, 90, 105, 999};
    const dp_host host = {.size = sizeof host, .alloc = host_alloc, .free = host_free};
    dp_ctx *ctx = NULL;
    dp_info info;
    bool one = count > 1 && strcmp(words[1], "one") == 0;
    if (count > 2)
        return write_kernels(&host, words[1], words[2]);
    for (size_t i = 0; i < (one ? 1 : sizeof archs / sizeof *archs); i++) {
        dp__cuda_image image = {.data = NULL};
        dp__cuda_target target;
        if (dp__cuda_bind() != DP_OK || dp__cuda_target_of(&host, archs[i], &target) != DP_OK ||
            dp__cuda_compile(&host, &target, &image) != DP_OK) {
            fprintf(stderr, "sm_%d: %s\n", archs[i], dp_last_error());
            return 1;
        }
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
