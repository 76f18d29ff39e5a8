/* torch_dp.cpp - what torch_ddp.py does, with libtorch and examples/torch/dp_torch.hpp.

       torch_dp

   Says "ready" and libtorch's version; then, for each line "together WIDTH STEPS" on the standard
   input, trains as said there, and answers with the nanoseconds that a step took. */

#include "../../../examples/torch/dp_torch.hpp"
#include <chrono>
#include <cstdio>
#include <map>

namespace nn = torch::nn;

enum { PROCESSES = 2, ROWS = 128 };

static nn::Linear linear(int64_t from, int64_t to)
{
    return nn::Linear(nn::LinearOptions(from, to).bias(false));
}

static nn::Sequential net_of(int64_t width)
{
    return nn::Sequential(linear(784, width), nn::ReLU(), linear(width, width), nn::ReLU(),
                          linear(width, 10));
}

struct Trainer {
    dp::DistributedDataParallel<nn::Sequential> model;
    torch::optim::SGD sgd;
    const torch::Tensor x = torch::ones({ROWS, 784}), y = torch::zeros({ROWS, 10});

    Trainer(const std::shared_ptr<dp_ctx> &job, int64_t width)
        : model(job, net_of(width)), sgd(model.module->parameters(), 1e-3)
    {
    }
    void step()
    {
        model.zero_grad();
        (model.forward(x) - y).square().mean().backward();
        sgd.step();
    }
};

struct Request {
    int64_t width, steps;
};

/* Of no steps: there is no more. */
static Request next_of_all(dp_ctx *job)
{
    long long width = 0, steps = 0;
    if (dp_rank(job) == 0 && std::scanf(" together %lld %lld", &width, &steps) != 2)
        steps = 0;
    int64_t said[] = {width, steps};
    dp::must(dp_broadcast_i64(job, said, 2, 0));
    return {said[0], said[1]};
}

static double once(dp_ctx *job, Trainer &trainer, int64_t steps)
{
    using clock = std::chrono::steady_clock;
    trainer.step();
    dp::must(dp_agree(job, DP_OK));
    const auto start = clock::now();
    for (int64_t i = 0; i < steps; i++)
        trainer.step();
    return std::chrono::duration<double, std::nano>(clock::now() - start).count() /
           static_cast<double>(steps);
}

static dp_status serve(void *)
{
    dp_config config = {};
    config.threads_per_device = 1;
    const auto job = dp::open(config);
    const bool speaks = dp_rank(job.get()) == 0;
    std::map<int64_t, Trainer> trainers;
    if (speaks)
        std::puts("ready libtorch " TORCH_VERSION);
    for (;;) {
        std::fflush(stdout);
        const Request now = next_of_all(job.get());
        if (now.steps <= 0)
            return DP_OK;
        auto &trainer = trainers.try_emplace(now.width, job, now.width).first->second;
        const double spent = once(job.get(), trainer, now.steps);
        if (speaks)
            std::printf("%.1f\n", spent);
    }
}

int main()
{
    dp::must(dp_spawn(PROCESSES, serve, nullptr));
}
