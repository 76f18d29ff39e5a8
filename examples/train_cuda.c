/* train_cuda.c - the program of train_data_parallel.c, on GPUs. Only the model is another one,
   since its kernels are (mlp_cuda.h); the program is not: it is included, word for word. Without a
   GPU it trains on the CPU.

   Build: cc -std=c11 -O2 -I/usr/local/cuda/include examples/train_cuda.c -o train_cuda
          -L/usr/local/cuda/lib64 -lcublas -lcudart -lnvrtc -lpthread -lm
   Run:   ./train_cuda 0 0      two devices, both on GPU 0; with two GPUs: ./train_cuda 0 1
   Prints:
   4096 pictures of 28 x 28 (...), batches of 128
   1 device:  loss ... -> ..., ... of 100 right, ... ms a step
   2 devices: loss ... -> ..., ... of 100 right, ... ms a step
   largest difference of a parameter: ... */

#define DP_IMPLEMENTATION
#define DP_USE_CUDA
#include "mlp_cuda.h"
#define mlp_create mlp_cuda_create
#include "train_data_parallel.c"
