/* write.c - the kernels of dp_cuda.h as PTX, as the compiler makes it of the text that the library
   gives it. It needs NVRTC, and no GPU.

     write ARCH FILE   for one architecture: 90 for sm_90
     write             the architectures that NVRTC knows

   Exit status 3: there is no NVRTC.                                                             */

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

static int list(void)
{
    int count = 0, archs[128];
    if (dp__cuda.nvrtcGetNumSupportedArchs(&count) != NVRTC_SUCCESS || count > 128 ||
        dp__cuda.nvrtcGetSupportedArchs(archs) != NVRTC_SUCCESS)
        return 1;
    for (int i = 0; i < count; i++)
        printf("%d\n", archs[i]);
    return 0;
}

/* Each of them is an entry. */
static bool has_kernels(const char *ptx)
{
    char entry[64];
    bool has = true;
    for (size_t k = 0; k < DP__CUDA_KERNEL_COUNT; k++) {
        snprintf(entry, sizeof entry, ".entry %s(", dp__cuda_names[k]);
        has = has && strstr(ptx, entry) != NULL;
    }
    return has;
}

static int write_ptx(const char *arch, const char *name)
{
    const dp_host host = {.size = sizeof host, .alloc = host_alloc, .free = host_free};
    dp__cuda_target target = {.text = true};
    dp__cuda_image image;
    snprintf(target.name, sizeof target.name, "compute_%s", arch);
    if (dp__cuda_compile(&host, &target, &image) != DP_OK) {
        fprintf(stderr, "%s\n", dp_last_error());
        return 1;
    }
    FILE *file = fopen(name, "w");
    const bool written = has_kernels(image.data) && file != NULL && fputs(image.data, file) >= 0 &&
                         fclose(file) == 0;
    free(image.data);
    return written ? 0 : 1;
}

int main(int count, char **words)
{
    if (dp__cuda_bind() != DP_OK) {
        fprintf(stderr, "%s\n", dp_last_error());
        return 3;
    }
    return count == 3 ? write_ptx(words[1], words[2]) : list();
}
