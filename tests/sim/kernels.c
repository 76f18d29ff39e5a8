/* kernels.c - the kernels of dp_cuda.h, compiled as C, and which bytes each of them touches. Where
   PTX is linked in (tests/ptx), it runs in their place. */

#include "../../dp.h" /* before dp_device is a word of the kernels */
#define SIM_GRID_IMPLEMENTATION
#include "grid.h"
#define DP_CUDA_TEXT_AS_C
#include "../../dp_cuda.h"
#include <string.h>
#include "../ptx/ptx.h"
#include "parts.h"
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

int sim_kernel_count(void)
{
    return DP__CUDA_KERNEL_COUNT;
}

const char *sim_kernel_name(int kernel)
{
    return kernels[kernel].name;
}

/* ---- what a kernel touches ------------------------------------------------------------------- */

static const size_t dtype_bytes[] = {4, 8, 2, 2, 8, 4, 2, 1, 1, 1};

static bool is_between(int kernel, int first, int last)
{
    return kernel >= first && kernel <= last;
}

static bool makes_sums(int kernel) /* chunk by chunk, into the scratch */
{
    return is_between(kernel, DP__CUDA_stats_f32, DP__CUDA_stats_half) ||
           is_between(kernel, DP__CUDA_channels_f32, DP__CUDA_channels_half) ||
           kernel == DP__CUDA_total || kernel == DP__CUDA_differ;
}

static bool ends_sums(int kernel) /* what is in the scratch */
{
    return kernel == DP__CUDA_sums_end || kernel == DP__CUDA_channels_end;
}

static bool steps(int kernel) /* parameter and gradient; a gate; state */
{
    return is_between(kernel, DP__CUDA_sgd_f32, DP__CUDA_adamw_f64);
}

static size_t strided_count(const params *p, const long long *shape, const long long *stride)
{
    long long last = 0;
    for (int d = 0; d < p->ndim; d++) {
        if (shape[d] == 0)
            return 0;
        last += (shape[d] - 1) * stride[d];
    }
    return (size_t)last + 1;
}

static size_t element_count(int kernel, const params *p, bool input, unsigned place)
{
    if (kernel == DP__CUDA_sums_end)
        return p->out_count;
    if (kernel == DP__CUDA_channels_end) /* sums, and squares as far behind as there are channels */
        return (size_t)p->shape[1] + (size_t)p->count;
    if (steps(kernel) && input && place > 0)
        return 2;
    if (kernel == DP__CUDA_copy && input)
        return strided_count(p, p->in_shape, p->in_stride);
    if (kernel == DP__CUDA_copy)
        return strided_count(p, p->shape, p->out_stride);
    return (size_t)p->count;
}

static size_t element_bytes(int kernel, const params *p, bool input, unsigned place)
{
    if (ends_sums(kernel) || (steps(kernel) && input && place > 0))
        return sizeof(double);
    if (steps(kernel) && place > 0)
        return p->dtype == 1 ? sizeof(double) : sizeof(float);
    if (kernel == DP__CUDA_fill || kernel == DP__CUDA_copy)
        return p->width;
    return dtype_bytes[input && kernel == DP__CUDA_cast ? p->in_dtype : p->dtype];
}

static sim_range operand_range(int kernel, const params *p, bool input, unsigned place)
{
    size_t each = element_bytes(kernel, p, input, place);
    bool gate = steps(kernel) && input && place > 0;
    return (sim_range){.pointer = input ? (void *)(uintptr_t)p->in[place] : p->out[place],
                       .bytes = element_count(kernel, p, input, place) * each,
                       .align = p->packs > 0 && !ends_sums(kernel) && !gate ? 16 : each,
                       .write = !input};
}

static unsigned in_count(int kernel, const params *p)
{
    return ends_sums(kernel) ? 0 : p->in_count;
}

static unsigned out_count(int kernel, const params *p)
{
    return makes_sums(kernel) ? 0 : kernel == DP__CUDA_sums_end ? 1 : p->out_count;
}

/* The ranges in a fixed order: inputs, outputs, scratch. */
size_t sim_kernel_ranges(int kernel, const void *arguments, sim_range *out)
{
    const params *p = arguments;
    size_t count = 0;
    for (unsigned k = 0; k < in_count(kernel, p); k++)
        out[count++] = operand_range(kernel, p, true, k);
    for (unsigned k = 0; k < out_count(kernel, p); k++)
        out[count++] = operand_range(kernel, p, false, k);
    if (makes_sums(kernel) || ends_sums(kernel))
        out[count++] = (sim_range){.pointer = p->scratch,
                                   .bytes = (size_t)p->chunk_count * 2 * sizeof(double),
                                   .align = sizeof(double),
                                   .write = makes_sums(kernel)};
    return count;
}

/* ---- PTX ------------------------------------------------------------------------------------- */

static const ptx_kernel *ptx_of(int kernel)
{
    const ptx_kernel *own = ptx_kernels;
    while (own != NULL && own->name != NULL && strcmp(own->name, kernels[kernel].name) != 0)
        own++;
    return own != NULL && own->name != NULL ? own : NULL;
}

bool sim_kernel_is_ptx(int kernel)
{
    return ptx_of(kernel) != NULL;
}

static int running; /* the kernel */
static const ptx_kernel *running_ptx;

void ptx_find(const char *name, int line)
{
    sim_find(name, "%s, in line %d of its PTX", kernels[running].name, line);
}

/* Floats that a kernel computes; what it moves has all its bits. */
static size_t computed_bytes(int kernel, const params *p, size_t bytes, size_t range)
{
    if (makes_sums(kernel) || ends_sums(kernel))
        return sizeof(double);
    if (is_between(kernel, DP__CUDA_fill, DP__CUDA_pattern) || p->dtype > DP_BF16)
        return 0;
    if (steps(kernel) && range > in_count(kernel, p)) /* state */
        return p->dtype == DP_F64 ? sizeof(double) : sizeof(float);
    return bytes % dtype_bytes[p->dtype] == 0 ? dtype_bytes[p->dtype] : 0;
}

static bool is_nan(const char *at, size_t bytes, bool is_bf16)
{
    uint64_t bits = 0;
    memcpy(&bits, at, bytes); /* the machine is little-endian */
    const uint64_t infinite = bytes == 8   ? 0x7ff0000000000000u
                              : bytes == 4 ? 0x7f800000u
                              : is_bf16    ? 0x7f80u
                                           : 0x7c00u;
    return (bits & (UINT64_MAX >> (65 - 8 * bytes))) > infinite;
}

bool sim_kernel_agrees(int kernel, const void *arguments, size_t range, const char *text,
                       const char *ptx)
{
    sim_range ranges[SIM_RANGES];
    const params *p = arguments;
    sim_kernel_ranges(kernel, arguments, ranges);
    const size_t bytes = ranges[range].bytes, each = computed_bytes(kernel, p, bytes, range);
    bool agrees = each > 0 || memcmp(text, ptx, bytes) == 0;
    for (size_t at = 0; each > 0 && at < bytes; at += each)
        agrees = agrees && (memcmp(text + at, ptx + at, each) == 0 ||
                            (is_nan(text + at, each, p->dtype == DP_BF16) &&
                             is_nan(ptx + at, each, p->dtype == DP_BF16)));
    return agrees;
}

static void lane(const void *arguments)
{
    kernels[running].fn(*(const params *)arguments);
}

static void ptx_lane(const void *arguments)
{
    running_ptx->run(arguments);
}

/* Run it on other memory: each range at `at`, in the order of sim_kernel_ranges. */
bool sim_kernel_run(int kernel, const void *arguments, char *const *at, const sim_launch *launch)
{
    params p = *(const params *)arguments;
    for (unsigned k = 0; k < in_count(kernel, &p); k++)
        p.in[k] = *at++;
    for (unsigned k = 0; k < out_count(kernel, &p); k++)
        p.out[k] = *at++;
    if (makes_sums(kernel) || ends_sums(kernel))
        p.scratch = (double *)(void *)*at;
    running = kernel;
    running_ptx = launch->as_text ? NULL : ptx_of(kernel);
    return sim_grid_run(running_ptx != NULL ? ptx_lane : lane, &p, launch->blocks, launch->lanes,
                        launch->order);
}

size_t sim_param_bytes(void)
{
    return sizeof(params);
}

void sim_fill_params(void *out, void *dst, size_t count)
{
    const params p = {.out = {dst}, .out_count = 1, .count = count, .width = sizeof(float)};
    _Static_assert(sizeof p <= SIM_PARAM_BYTES, "room for the arguments");
    memcpy(out, &p, sizeof p);
}
