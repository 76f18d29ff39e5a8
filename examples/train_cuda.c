/* train_cuda.c - the program of train.c, on GPUs. Only the model is different, since it has GPU
   kernels (mlp_cuda.h); the program is the same, and is simply included. Without a GPU it trains on
   the CPU.

   Build: cc -std=c11 -O2 -DDP_USE_CUDA -I/usr/local/cuda/include -c examples/dp.c -o dp_cuda.o
          cc -std=c11 -O2 -DDP_USE_CUDA -I/usr/local/cuda/include examples/train_cuda.c dp_cuda.o
          -o train_cuda -L/usr/local/cuda/lib64 -lcublas -lcudart -lnvrtc -lpthread -lm
   Run:   ./train_cuda          on all GPUs
          DP_DEVICES=0,0 ./train_cuda      two devices, both on GPU 0
   Prints:
   step 0: loss 2.3..., ... % right
   step 32: loss ..., ... % right
   step 64: loss ..., ... % right
   step 96: loss ..., ... % right
   step 127: loss ..., ... % right */

#include "mlp_cuda.h"
#define mlp_create mlp_cuda_create
#include "train.c"
