/* kernels.c - the kernels of dp_cuda.h, compiled as C, and which bytes each of them touches. */

#define DP_CUDA_TEXT_AS_C
#include "../../dp_cuda.h"
#include <string.h>
#include "sim.h"

typedef struct dp__cuda_params params;

typedef void params_fn(const params p);
#define ENTRY(name) {"dp_cuda_" #name, dp_cuda_##name},
static const struct kernel {
    const char *name;
    params_fn *fn;
} kernels[] = {DP__CUDA_NAMES(ENTRY)};

static int number_of(const char *name)
{
    for (int i = 0; i < DP__CUDA_KERNEL_COUNT; i++)
        if (strcmp(kernels[i].name, name) == 0)
            return i;
    return -1;
}

int sim_kernel_find(const char *name)
{
    return number_of(name);
}

const char *sim_kernel_name(int kernel)
{
    return kernels[kernel].name;
}

/* ---- what a kernel touches ------------------------------------------------------------------- */

static size_t element_bytes(int kernel, const params *p, bool input)
{
    static const size_t of_dtype[] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1};
    int dtype = input && kernel == DP__CUDA_cast ? p->in_dtype : p->dtype;
    if (kernel >= DP__CUDA_fill_1 && kernel <= DP__CUDA_pad_8)
        return (size_t)1 << (kernel - DP__CUDA_fill_1) % 4;
    return of_dtype[dtype];
}

static size_t strided_bytes(const params *p, const long long *shape, const long long *stride,
                            size_t each)
{
    long long last = 0;
    for (int d = 0; d < p->ndim; d++)
        last += (shape[d] - 1) * stride[d];
    return ((size_t)last + 1) * each;
}

static size_t operand_bytes(int kernel, const params *p, bool input)
{
    size_t each = element_bytes(kernel, p, input);
    bool copies = kernel >= DP__CUDA_copy_1 && kernel <= DP__CUDA_copy_8;
    bool pads = kernel >= DP__CUDA_pad_1 && kernel <= DP__CUDA_pad_8;
    if (copies)
        return strided_bytes(p, p->shape, input ? p->in_stride : p->out_stride, each);
    if (pads && input)
        return strided_bytes(p, p->in_shape, p->in_stride, each);
    return (size_t)p->count * each;
}

static size_t range(sim_range *out, size_t count, void *pointer, size_t bytes, bool write)
{
    out[count] = (sim_range){pointer, bytes, write};
    return count + 1;
}

/* The ranges in a fixed order: inputs, outputs, scratch. */
size_t sim_kernel_ranges(int kernel, const void *arguments, sim_range *out)
{
    const params *p = arguments;
    bool sums = (kernel >= DP__CUDA_stats_f32 && kernel <= DP__CUDA_stats_bf16) ||
                kernel == DP__CUDA_total || kernel == DP__CUDA_differ;
    bool end = kernel == DP__CUDA_sums_end;
    size_t count = 0;
    for (unsigned k = 0; k < p->in_count && !end; k++)
        count =
            range(out, count, (void *)(uintptr_t)p->in[k], operand_bytes(kernel, p, true), false);
    if (end)
        count = range(out, count, p->out[0], p->out_count * sizeof(double), true);
    for (unsigned k = 0; k < p->out_count && !sums && !end; k++)
        count = range(out, count, p->out[k], operand_bytes(kernel, p, false), true);
    if (sums || end)
        count = range(out, count, p->scratch, (size_t)p->chunk_count * 2 * sizeof(double), sums);
    return count;
}

/* Run it on other memory: each range at `at`, in the order of sim_kernel_ranges. */
void sim_kernel_run(int kernel, const void *arguments, char *const *at)
{
    params p = *(const params *)arguments;
    bool sums = (kernel >= DP__CUDA_stats_f32 && kernel <= DP__CUDA_stats_bf16) ||
                kernel == DP__CUDA_total || kernel == DP__CUDA_differ;
    bool end = kernel == DP__CUDA_sums_end;
    for (unsigned k = 0; k < p.in_count && !end; k++)
        p.in[k] = *at++;
    if (end)
        p.out[0] = *at++;
    for (unsigned k = 0; k < p.out_count && !sums && !end; k++)
        p.out[k] = *at++;
    if (sums || end)
        p.scratch = (double *)(void *)*at;
    kernels[kernel].fn(p);
}

void sim_fill_params(void *out, void *dst, size_t count)
{
    const params p = {.out = {dst}, .out_count = 1, .count = count};
    _Static_assert(sizeof p <= SIM_PARAM_BYTES, "room for the arguments");
    memcpy(out, &p, sizeof p);
}
