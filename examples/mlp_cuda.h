/* mlp_cuda.h - the model of mlp.h for GPUs, as its user would write it: matrices by cuBLAS, a few
   kernels of its own. They run on the stream that the call names, so nothing has to wait. If the
   context has no GPU, mlp.h is used. */

#ifndef MLP_CUDA_H
#define MLP_CUDA_H

#include "mlp.h" /* first: it includes dp.h */
/* clang-format off */
#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <nvrtc.h>
#include <stdio.h>
#include <stdlib.h>
/* clang-format on */

#define TRY_CUDA(call)                                                                             \
    do {                                                                                           \
        int code_ = (int)(call);                                                                   \
        if (code_ != 0)                                                                            \
            return dp_error(DP_ERR_USER, "%s: code %d", #call, code_);                             \
    } while (0)

enum { MLP_BIAS, MLP_RELU, MLP_SOFTMAX, MLP_LOSS_GRAD, MLP_RELU_GRAD, MLP_COLUMNS, MLP_KERNELS };

static const char *const mlp_kernel_names[MLP_KERNELS] = {"bias",      "relu",      "softmax",
                                                          "loss_grad", "relu_grad", "columns"};
static const char mlp_kernels[] =
    "#define AT (blockIdx.x * (long long)blockDim.x + threadIdx.x)\n"
    "extern \"C\" __global__ void bias(float *out, const float *b, long long rows, int n) {\n"
    "    if (AT < rows * n) out[AT] = b[AT % n];\n"
    "}\n"
    "extern \"C\" __global__ void relu(float *x, const float *unused, long long rows, int n) {\n"
    "    if (AT < rows * n && x[AT] < 0) x[AT] = 0;\n"
    "}\n"
    "extern \"C\" __global__ void softmax(float *p, const long long *label, long long rows,\n"
    "                                   int n, float *loss, float *right) {\n"
    "    if (AT >= rows) return;\n"
    "    float *own = p + AT * n, top = own[0], sum = 0;\n"
    "    for (int c = 1; c < n; c++) top = fmaxf(top, own[c]);\n"
    "    right[AT] = !(own[label[AT]] < top);\n"
    "    for (int c = 0; c < n; c++) sum += own[c] = expf(own[c] - top);\n"
    "    for (int c = 0; c < n; c++) own[c] /= sum;\n"
    "    loss[AT] = -logf(own[label[AT]] + 1e-30f);\n"
    "}\n"
    "extern \"C\" __global__ void loss_grad(float *p, const long long *label, long long rows,\n"
    "                                     int n, float each) {\n"
    "    if (AT < rows * n) p[AT] = each * (p[AT] - (AT % n == label[AT / n]));\n"
    "}\n"
    "extern \"C\" __global__ void relu_grad(float *d, const float *h, long long rows, int n) {\n"
    "    if (AT < rows * n && !(h[AT] > 0)) d[AT] = 0;\n"
    "}\n"
    "extern \"C\" __global__ void columns(float *sum, const float *x, long long rows, int n) {\n"
    "    if (AT >= n) return;\n"
    "    for (long long i = 0; i < rows; i++) sum[AT] += x[i * n + AT];\n"
    "}\n";

typedef struct mlp_gpu { /* one per replica */
    int ordinal;
    cublasHandle_t blas;
    cudaLibrary_t library;
    cudaKernel_t kernels[MLP_KERNELS];
} mlp_gpu;

static void mlp_gpu_destroy(void *own)
{
    mlp_gpu *gpu = own;
    if (gpu != NULL && cudaSetDevice(gpu->ordinal) == cudaSuccess) {
        (void)cublasDestroy(gpu->blas);
        (void)cudaLibraryUnload(gpu->library);
    }
    free(gpu);
}

static dp_status mlp_compile(mlp_gpu *gpu)
{
    int major, minor;
    char arch[32], *image;
    size_t bytes;
    nvrtcProgram program;
    const char *const options[] = {arch};
    TRY_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, gpu->ordinal));
    TRY_CUDA(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, gpu->ordinal));
    snprintf(arch, sizeof arch, "--gpu-architecture=sm_%d%d", major, minor);
    TRY_CUDA(nvrtcCreateProgram(&program, mlp_kernels, "mlp_cuda.h", 0, NULL, NULL));
    TRY_CUDA(nvrtcCompileProgram(program, 1, options));
    TRY_CUDA(nvrtcGetCUBINSize(program, &bytes));
    if ((image = malloc(bytes)) == NULL)
        return DP_ERR_NO_MEMORY;
    TRY_CUDA(nvrtcGetCUBIN(program, image));
    TRY_CUDA(cudaLibraryLoadData(&gpu->library, image, NULL, NULL, 0, NULL, NULL, 0));
    for (int k = 0; k < MLP_KERNELS; k++)
        TRY_CUDA(cudaLibraryGetKernel(&gpu->kernels[k], gpu->library, mlp_kernel_names[k]));
    free(image);
    TRY_CUDA(nvrtcDestroyProgram(&program));
    return DP_OK;
}

static dp_status mlp_gpu_create(const dp_replica_info *info, void **out)
{
    mlp_gpu *gpu = calloc(1, sizeof *gpu);
    if (gpu == NULL)
        return DP_ERR_NO_MEMORY;
    *out = gpu;
    gpu->ordinal = dp_cuda_ordinal(dp_local_stream(info->ctx, info->device.index));
    TRY_CUDA(cudaSetDevice(gpu->ordinal));
    TRY_CUDA(cublasCreate(&gpu->blas));
    return mlp_compile(gpu);
}

/* One thread per element. */
static dp_status mlp_launch(const dp_call *call, int kernel, int64_t threads, void **arguments)
{
    const mlp_gpu *gpu = call->own;
    dim3 grid = {(unsigned)((threads + 255) / 256), 1, 1}, block = {256, 1, 1};
    TRY_CUDA(cudaLaunchKernel((const void *)gpu->kernels[kernel], grid, block, arguments, 0,
                              dp_cuda_stream(call->stream)));
    return DP_OK;
}

/* out[a, b] = beta * out + x[a, k] * y[k, b], by rows; cuBLAS goes by columns: they swap. */
static dp_status mlp_multiply(const dp_call *call, float *out, const float *x, bool x_turned,
                              const float *y, bool y_turned, int64_t a, int64_t k, int64_t b,
                              float beta)
{
    const mlp_gpu *gpu = call->own;
    const float one = 1;
    TRY_CUDA(cublasSgemm(gpu->blas, y_turned ? CUBLAS_OP_T : CUBLAS_OP_N,
                         x_turned ? CUBLAS_OP_T : CUBLAS_OP_N, (int)b, (int)a, (int)k, &one, y,
                         (int)(y_turned ? k : b), x, (int)(x_turned ? a : k), &beta, out, (int)b));
    return DP_OK;
}

/* This thread's device, and the stream of the call for cuBLAS. */
static dp_status mlp_enter(const dp_call *call)
{
    const mlp_gpu *gpu = call->own;
    TRY_CUDA(cudaSetDevice(gpu->ordinal));
    TRY_CUDA(cublasSetStream(gpu->blas, dp_cuda_stream(call->stream)));
    return DP_OK;
}

static dp_status mlp_dense(const dp_call *call, float *out, const float *x, int weight,
                           int64_t rows, int m, int n)
{
    const float *bias = dp_param(call, (size_t)weight + 1);
    DP_TRY(mlp_launch(call, MLP_BIAS, rows * n, (void *[]){&out, (void *)&bias, &rows, &n}));
    return mlp_multiply(call, out, x, false, dp_param(call, (size_t)weight), false, rows, m, n, 1);
}

static dp_status mlp_dense_grad(const dp_call *call, int weight, const float *x, const float *d,
                                int64_t rows, int m, int n)
{
    float *bias = dp_grad(call, (size_t)weight + 1);
    DP_TRY(mlp_launch(call, MLP_COLUMNS, n, (void *[]){&bias, (void *)&d, &rows, &n}));
    return mlp_multiply(call, dp_grad(call, (size_t)weight), x, true, d, false, m, rows, n, 1);
}

/* As mlp_forward. */
static dp_status mlp_cuda_forward(dp_call *call)
{
    const mlp *net = call->state;
    const dp_tensor *x, *label;
    dp_tensor h, p, loss, right;
    DP_TRY(dp_call_tensor(call, "image", DP_F32, 2, &x));
    DP_TRY(dp_call_tensor(call, "label", DP_I64, 1, &label));
    int64_t rows = x->shape[0];
    int hidden = net->hidden, classes = net->classes;
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows, hidden), &h));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows, classes), &p));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows), &loss));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(rows), &right));
    mlp_tape *tape = dp_scope_alloc(call->scope, sizeof *tape);
    if (tape == NULL)
        return DP_ERR_NO_MEMORY;
    *tape = (mlp_tape){x->data, label->data, h.data, p.data, rows};
    DP_TRY(mlp_enter(call));
    DP_TRY(mlp_dense(call, tape->h, tape->x, MLP_W1, rows, net->inputs, hidden));
    DP_TRY(mlp_launch(call, MLP_RELU, rows * hidden, (void *[]){&h.data, &h.data, &rows, &hidden}));
    DP_TRY(mlp_dense(call, tape->p, tape->h, MLP_W2, rows, hidden, classes));
    DP_TRY(mlp_launch(
        call, MLP_SOFTMAX, rows,
        (void *[]){&p.data, (void *)&tape->label, &rows, &classes, &loss.data, &right.data}));
    call->saved = tape;
    call->out = DP_DICT(call->scope, {"loss", dp_of(call->scope, &loss)},
                        {"right", dp_of(call->scope, &right)});
    return DP_OK;
}

/* As mlp_backward. */
static dp_status mlp_cuda_backward(dp_call *call)
{
    const mlp *net = call->state;
    mlp_tape *tape = call->saved;
    dp_tensor dh;
    double number = 0;
    int hidden = net->hidden, classes = net->classes;
    DP_TRY(dp_item(call->ctx, dp_get(call->grad, "loss"), &number));
    DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(tape->rows, hidden), &dh));
    float each = (float)number;
    DP_TRY(mlp_enter(call));
    DP_TRY(mlp_launch(call, MLP_LOSS_GRAD, tape->rows * classes,
                      (void *[]){&tape->p, (void *)&tape->label, &tape->rows, &classes, &each}));
    DP_TRY(mlp_multiply(call, dh.data, tape->p, false, dp_param(call, MLP_W2), true, tape->rows,
                        classes, hidden, 0));
    DP_TRY(mlp_launch(call, MLP_RELU_GRAD, tape->rows * hidden,
                      (void *[]){&dh.data, &tape->h, &tape->rows, &hidden}));
    DP_TRY(mlp_dense_grad(call, MLP_W2, tape->h, tape->p, tape->rows, hidden, classes));
    return mlp_dense_grad(call, MLP_W1, tape->x, dh.data, tape->rows, net->inputs, hidden);
}

static dp_status mlp_cuda_create(dp_ctx *ctx, const mlp *net, dp_module **out)
{
    static const dp_method methods[] = {{"forward", mlp_cuda_forward},
                                        {"backward", mlp_cuda_backward}};
    const dp_param_config params[] = {
        [MLP_W1] = {.name = "fc1.weight", .ndim = 2, .shape = {net->inputs, net->hidden}},
        [MLP_B1] = {.name = "fc1.bias", .ndim = 1, .shape = {net->hidden}},
        [MLP_W2] = {.name = "fc2.weight", .ndim = 2, .shape = {net->hidden, net->classes}},
        [MLP_B2] = {.name = "fc2.bias", .ndim = 1, .shape = {net->classes}}};
    const dp_module_config config = {.name = "mlp",
                                     .methods = methods,
                                     .method_count = 2,
                                     .params = params,
                                     .param_count = 4,
                                     .state = net,
                                     .replica_create = mlp_gpu_create,
                                     .replica_destroy = mlp_gpu_destroy};
    if (dp_cuda_ordinal(dp_local_stream(ctx, 0)) < 0)
        return mlp_create(ctx, net, out);
    DP_TRY(dp_module_create(ctx, &config, out));
    return mlp_randomize(*out);
}

#endif /* MLP_CUDA_H */
