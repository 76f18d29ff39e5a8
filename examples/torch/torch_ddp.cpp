/* torch_ddp.cpp - a libtorch program on as many processes as a launcher starts: dp_torch.hpp is
   what DistributedDataParallel is in Python. Lines with "+" are what the program needs for it.

   Build: cc -std=c11 -O2 -c examples/dp.c
          c++ -std=c++17 -O2 -isystem /usr/include/torch/csrc/api/include
              examples/torch/torch_ddp.cpp dp.o -o torch_ddp -ltorch -ltorch_cpu -lc10 -lpthread -lm
   Run: ./torch_ddp, dprun -n 2 ./torch_ddp, mpirun -np 2 ./torch_ddp, or torchrun --no-python
   Prints:
   epoch 0: loss ...
   epoch 1: loss ...
   epoch 2: loss ...
   epoch 3: loss ...
   ... of 512 right, on ...
   saved and loaded: the same */

#include "dp_torch_save.hpp"
#include <cstdio>

enum { SAMPLES = 512, BATCH = 100, EPOCHS = 4 };

struct NetImpl : torch::nn::Module {
    torch::nn::Conv2d conv{torch::nn::Conv2dOptions(1, 8, 3).padding(1)};
    torch::nn::BatchNorm2d norm{8};
    torch::nn::Linear linear{8 * 6 * 6, 4};

    NetImpl()
    {
        register_module("conv", conv);
        register_module("norm", norm);
        register_module("linear", linear);
    }
    torch::Tensor forward(torch::Tensor x)
    {
        x = torch::max_pool2d(torch::relu(norm(conv(x))), 2);
        return linear(x.flatten(1));
    }
};
TORCH_MODULE(Net);

/* Pictures of a bright quarter; which one is what the model learns. */
static std::pair<torch::Tensor, torch::Tensor> pictures(torch::Device device)
{
    torch::manual_seed(1);
    auto labels = torch::arange(SAMPLES).remainder(4), x = torch::rand({SAMPLES, 1, 12, 12});
    for (int64_t i = 0; i < SAMPLES; i++)
        x[i].narrow(1, i % 2 * 6, 6).narrow(2, i % 4 / 2 * 6, 6).add_(0.2);
    return {x.to(device), labels.to(device)};
}

int main(int argc, char **argv)
{
    namespace F = torch::nn::functional;
    const std::string file = argc > 1 ? argv[1] : "torch_ddp.safetensors";
    const auto job = dp::open(); // +
    const int rank = dp_rank(job.get()), ranks = dp_rank_count(job.get());
    const auto device = dp::device_of(job.get()); // + the CPU, or a GPU
    const auto [x, y] = pictures(device);
    torch::manual_seed(2);
    Net net, other;
    net->to(device), other->to(device);
    dp::DDPOptions options;
    options.reduction = DP_MEAN_SAMPLES;                // + the last batch is a small one
    dp::DistributedDataParallel ddp(job, net, options); // +
    torch::optim::Adam adam(net->parameters(), 0.003);
    for (int epoch = 0; epoch < EPOCHS; epoch++) {
        double loss = 0;
        for (int64_t first = 0; first < SAMPLES; first += BATCH) {
            const int64_t rows = std::min<int64_t>(BATCH, SAMPLES - first);
            const int64_t begin = rows * rank / ranks, mine = rows * (rank + 1) / ranks - begin;
            ddp.join(mine > 0); // + more processes than rows are fine
            if (mine > 0) {
                const auto out = ddp.forward(x.narrow(0, first + begin, mine));
                const auto sum =
                    F::cross_entropy(out, y.narrow(0, first + begin, mine),
                                     F::CrossEntropyFuncOptions().reduction(torch::kSum));
                ddp.zero_grad();
                sum.backward();
                loss += sum.item<double>();
            }
            adam.step();
        }
        dp::must(dp_all_reduce_f64(job.get(), &loss, 1, DP_OP_SUM)); // +
        if (rank == 0)
            std::printf("epoch %d: loss %.3f\n", epoch, loss / double{SAMPLES});
    }
    net->eval();
    const auto right = net->forward(x).argmax(1).eq(y).sum().item<int64_t>();
    dp::save(job.get(), *net, file);   // + a file as Python's, by process 0
    dp::load(job.get(), *other, file); // +
    other->eval();
    const bool same = torch::equal(other->forward(x), net->forward(x)) || rank != 0;
    if (rank == 0) {
        std::printf("%d of %d right, on %d processes\n", static_cast<int>(right), SAMPLES, ranks);
        std::printf("saved and loaded: %s\n", same ? "the same" : "something else");
        std::remove(file.c_str());
    }
}
