/* test_torch.cpp - examples/torch/dp_torch.hpp on the processes of a launcher, against what torch's
   own DistributedDataParallel has made of the same cases (reference.py, expected.txt), and against
   one process. Rank 0 prints TAP.

   test_torch tests/torch/expected.txt FOLDER     or     test_torch bench */

#include "../../examples/torch/dp_torch_save.hpp"
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <sstream>

namespace nn = torch::nn;
using torch::Tensor;

enum { STEPS = 20, ROWS = 6 };

static dp_ctx *job;
static int rank;
static torch::Device device = torch::kCPU;
static double exact = 1e-6; /* sums on a GPU have another order */

static Tensor numbers(torch::IntArrayRef shape, int seed, double scale)
{
    int64_t count = 1;
    for (int64_t size : shape)
        count *= size;
    const Tensor at = torch::arange(count, torch::kInt64);
    const Tensor mixed = (at * 7919 + seed * 104729).remainder(1009);
    const Tensor scaled = (mixed.to(torch::kFloat64) / 1009 - 0.5) * scale;
    return scaled.to(torch::kFloat32).view(shape).to(device);
}

struct Net : nn::Module {
    bool takes = false;
    virtual Tensor forward(Tensor x) = 0;
};
using Model = std::shared_ptr<Net>;

struct Mlp : Net {
    nn::Linear a{6, 8}, b{8, 3};
    Mlp()
    {
        register_module("a", a);
        register_module("b", b);
    }
    Tensor forward(Tensor x) override
    {
        return b(torch::relu(a(x)));
    }
};

struct Cnn : Net {
    nn::Conv2d a{nn::Conv2dOptions(1, 2, 3)};
    nn::BatchNorm2d norm{2};
    nn::Linear b{2, 3};
    Cnn()
    {
        register_module("a", a);
        register_module("norm", norm);
        register_module("b", b);
    }
    Tensor forward(Tensor x) override
    {
        x = torch::relu(norm(a(x.view({-1, 1, 2, 3}).repeat({1, 1, 2, 2}))));
        return b(x.mean({2, 3}));
    }
};

struct Tied : Net {
    nn::Linear a{6, 6}, frozen{6, 6}, b{6, 3};
    Tied()
    {
        register_module("a", a);
        register_module("again", a);
        register_module("frozen", frozen);
        register_module("b", b);
        for (auto &param : frozen->parameters())
            param.set_requires_grad(false);
    }
    Tensor forward(Tensor x) override
    {
        return b(a(torch::tanh(frozen(a(x)))));
    }
};

struct Branch : Net {
    nn::Linear a{6, 8}, some{8, 8}, none{8, 8}, b{8, 3};
    Branch()
    {
        register_module("a", a);
        register_module("some", some);
        register_module("none", none);
        register_module("b", b);
    }
    Tensor forward(Tensor x) override
    {
        x = torch::relu(a(x));
        return b(takes ? some(x) : x);
    }
};

/* As many values as rank 0 has, and others on other ranks, which the wrapper has to make equal. */
static Model filled(Model model, int rank)
{
    torch::NoGradGuard no_grad;
    std::unordered_set<void *> seen;
    model->to(device);
    for (auto &param : model->parameters())
        if (seen.insert(param.unsafeGetTensorImpl()).second)
            param.copy_(numbers(param.sizes(), static_cast<int>(seen.size()) + 100 * rank, 0.8));
    return model;
}

static Tensor loss_of(const Tensor &out, bool sum = false)
{
    auto options = nn::functional::CrossEntropyFuncOptions();
    const Tensor y = torch::arange(out.size(0), device).remainder(3);
    if (sum)
        options.reduction(torch::kSum);
    return nn::functional::cross_entropy(out, y, options);
}

static Tensor batch(int step, int part)
{
    return numbers({ROWS, 6}, 1000 + step * 10 + part, 4.0);
}

/* parameters() has those that are tied as often as they have names, and all would be updated. */
static torch::optim::SGD optimizer(const Model &model)
{
    std::vector<Tensor> once;
    std::unordered_set<void *> seen;
    for (const auto &param : model->parameters())
        if (seen.insert(param.unsafeGetTensorImpl()).second)
            once.push_back(param);
    return torch::optim::SGD(once, torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.01));
}

static bool torch_zeros; /* zero_grad as libtorch 1.13 does it */

/* A line of TAP, if all ranks agree. */
static void result(const char *name, bool good, double off = 0)
{
    int64_t all = good;
    dp::must(dp_all_reduce_i64(job, &all, 1, DP_OP_MIN));
    if (rank == 0)
        std::printf("%s - examples/torch: %s (%.1e)\n", all ? "ok" : "not ok", name, off);
}

/* Empty: it has not failed. */
static std::string failure_of(const std::function<void()> &call)
{
    try {
        call();
    } catch (const std::exception &failure) {
        return failure.what();
    }
    return "";
}

static bool failed(const std::function<void()> &call)
{
    return !failure_of(call).empty();
}

static double largest_difference(const Model &a, const Model &b)
{
    double most = 0;
    const auto ours = a->named_parameters(), others = b->named_parameters();
    for (const auto &item : ours)
        most = std::max(most, (item.value() - others[item.key()]).abs().max().item<double>());
    return most;
}

/* ---- as in Python ---------------------------------------------------------------------------- */

using Expected = std::map<std::string, std::vector<double>>;

static Expected read_expected(const char *path)
{
    Expected all;
    std::ifstream file(path);
    for (std::string line; std::getline(file, line);) {
        std::istringstream words(line);
        std::string name, key;
        words >> name >> key;
        for (double number; words >> number;)
            all[name + " " + key].push_back(number);
    }
    return all;
}

static double difference(const Expected &expected, const std::string &name, const Tensor &tensor)
{
    const auto found = expected.find(name);
    if (found == expected.end() || tensor.numel() != static_cast<int64_t>(found->second.size()))
        return INFINITY;
    const Tensor want = torch::tensor(found->second, torch::kFloat64);
    return (tensor.detach().cpu().flatten().to(torch::kFloat64) - want).abs().max().item<double>();
}

static void zero_grad(const Model &model)
{
    for (auto &param : model->parameters())
        if (!torch_zeros)
            param.mutable_grad() = Tensor();
        else if (param.grad().defined())
            param.mutable_grad().zero_();
}

static void as_in_python(const std::shared_ptr<dp_ctx> &ctx, const Expected &expected,
                         const char *name, Model model, int parts, const dp::DDPOptions &options)
{
    dp::DistributedDataParallel ddp(ctx, filled(model, rank), options);
    auto sgd = optimizer(model);
    for (int step = 0; step < STEPS; step++) {
        model->takes = options.unused == DP_UNUSED_FIXED ? rank == 0
                                                         : ((step % 4) & (rank + 1)) != 0;
        zero_grad(model);
        for (int part = 0; part < parts - 1; part++) {
            const auto guard = ddp.no_sync();
            loss_of(ddp.forward(batch(step, rank * parts + part))).backward();
        }
        loss_of(ddp.forward(batch(step, rank * parts + parts - 1))).backward();
        sgd.step();
    }
    double most = 0;
    for (const auto &item : model->named_parameters())
        if (item.key().rfind("again", 0) != 0)
            most = std::max(most, difference(expected, name + (" " + item.key()), item.value()));
    for (const auto &item : model->named_buffers())
        if (rank == 0)
            most = std::max(most, difference(expected, name + (" " + item.key()), item.value()));
    result(name, most <= exact, most);
}

static void all_as_in_python(const std::shared_ptr<dp_ctx> &ctx, const char *path)
{
    const Expected expected = read_expected(path);
    dp::DDPOptions find, fixed;
    find.unused = DP_UNUSED_FOUND;
    fixed.unused = DP_UNUSED_FIXED;
    for (int zeros = 0; zeros < 2; zeros++) {
        torch_zeros = zeros;
        as_in_python(ctx, expected, "mlp", std::make_shared<Mlp>(), 1, {});
        as_in_python(ctx, expected, "cnn", std::make_shared<Cnn>(), 1, {});
        as_in_python(ctx, expected, "cnn_sums", std::make_shared<Cnn>(), 2, {});
        as_in_python(ctx, expected, "tied", std::make_shared<Tied>(), 1, {});
        as_in_python(ctx, expected, "sums", std::make_shared<Mlp>(), 2, {});
    }
    torch_zeros = false; /* zeros are gradients: weight decay would go on */
    as_in_python(ctx, expected, "branch", std::make_shared<Branch>(), 1, find);
    as_in_python(ctx, expected, "static", std::make_shared<Branch>(), 1, fixed);
}

/* ---- what Python's does otherwise, or not ---------------------------------------------------- */

/* Ranks have different numbers of batches, of different sizes; the same as all rows in one. */
static void uneven(const std::shared_ptr<dp_ctx> &ctx)
{
    dp::DDPOptions options;
    options.reduction = DP_MEAN_SAMPLES;
    const Model model = filled(std::make_shared<Mlp>(), rank),
                alone = filled(std::make_shared<Mlp>(), 0);
    dp::DistributedDataParallel ddp(ctx, model, options);
    auto sgd = optimizer(model), alones = optimizer(alone);
    const int counts[] = {3, 5, 4, 5};
    for (int epoch = 0; epoch < 2; epoch++) {
        const auto part = [&](int step, int of) {
            return batch(step, of).narrow(0, 0, 2 + of % 3);
        };
        for (int step = 0; ddp.join(step < counts[rank % 4]); step++) {
            if (step < counts[rank % 4]) {
                ddp.zero_grad();
                loss_of(ddp.forward(part(step, rank)), true).backward();
            }
            sgd.step();
            double rows = 0;
            Tensor loss = torch::zeros({}, device);
            for (int of = 0; of < dp_rank_count(job); of++)
                if (step < counts[of % 4]) {
                    loss = loss + loss_of(alone->forward(part(step, of)), true);
                    rows += 2 + of % 3;
                }
            for (auto &param : alone->parameters())
                param.mutable_grad() = Tensor();
            (loss / rows).backward();
            alones.step();
        }
    }
    const double most = largest_difference(model, alone);
    result("uneven batches, and join", most <= exact, most);
}

/* Means over ranks; those with nothing left count as zeros. With a static graph, from the first
   step on that all have taken part in, they are zeros of what they used then. */
static void uneven_branch(const std::shared_ptr<dp_ctx> &ctx, bool fixed)
{
    dp::DDPOptions options;
    options.unused = fixed ? DP_UNUSED_FIXED : DP_UNUSED_FOUND;
    const Model model = filled(std::make_shared<Branch>(), rank);
    const Model alone = filled(std::make_shared<Branch>(), 0);
    dp::DistributedDataParallel ddp(ctx, model, options);
    auto sgd = optimizer(model), alones = optimizer(alone);
    const auto has = [](int step, int of) { return step % 3 != of || dp_rank_count(job) == 1; };
    const int all_took_part = dp_rank_count(job) < 3 ? 2 : STEPS;
    for (int step = 0; step < STEPS; step++) {
        model->takes = rank == 0;
        ddp.join(has(step, rank));
        if (has(step, rank)) {
            ddp.zero_grad();
            loss_of(ddp.forward(batch(step, rank))).backward();
        }
        sgd.step();
        Tensor loss = torch::zeros({}, device);
        for (int of = 0; of < dp_rank_count(job); of++) {
            alone->takes = of == 0;
            if (has(step, of) || (fixed && step > all_took_part))
                loss = loss + loss_of(alone->forward(batch(step, of))) * has(step, of);
        }
        for (auto &param : alone->parameters())
            param.mutable_grad() = Tensor();
        (loss / dp_rank_count(job)).backward();
        alones.step();
    }
    const double most = largest_difference(model, alone);
    result(fixed ? "join with a static graph" : "join with unused ones", most <= exact, most);
}

/* Gradients that zero_grad has thrown away after a backward without a reduction. */
static void thrown_away(const std::shared_ptr<dp_ctx> &ctx)
{
    dp::DDPOptions options;
    options.unused = DP_UNUSED_FOUND;
    const Model model = filled(std::make_shared<Branch>(), rank);
    const Model alone = filled(std::make_shared<Branch>(), 0);
    dp::DistributedDataParallel ddp(ctx, model, options);
    for (int step = 0; step < 2; step++) { /* then on all ranks but one, which has a batch */
        const bool has = step == 0 || rank == 0;
        model->takes = true;
        {
            const auto guard = ddp.no_sync();
            loss_of(ddp.forward(batch(0, rank))).backward();
        }
        ddp.zero_grad();
        model->takes = false;
        ddp.join(has);
        if (has)
            loss_of(ddp.forward(batch(1, 0))).backward();
    }
    loss_of(alone->forward(batch(1, 0))).backward();
    const Tensor want = alone->parameters()[0].grad() / dp_rank_count(job);
    const double off = (model->parameters()[0].grad() - want).abs().max().item<double>();
    const Tensor left = model->named_parameters()["some.weight"].grad();
    result("what zero_grad throws away", off <= exact && left.abs().max().item<double>() == 0, off);
}

static void halves(const std::shared_ptr<dp_ctx> &ctx, const Expected &expected)
{
    dp::DDPOptions options;
    options.buckets.wire = DP_BF16;
    const Model model = filled(std::make_shared<Mlp>(), rank);
    dp::DistributedDataParallel ddp(ctx, model, options);
    auto sgd = optimizer(model);
    for (int step = 0; step < STEPS; step++) {
        ddp.zero_grad();
        loss_of(ddp.forward(batch(step, rank))).backward();
        sgd.step();
    }
    double most = 0;
    for (const auto &item : model->named_parameters())
        most = std::max(most, difference(expected, "mlp " + item.key(), item.value()));
    result("a wire of bf16", most <= 0.02 && (most > 1e-6 || dp_rank_count(job) == 1), most);
}

static void files(const std::shared_ptr<dp_ctx> &ctx, const std::string &folder)
{
    const std::string path = folder + "/torch.safetensors";
    const Model model = filled(std::make_shared<Cnn>(), rank),
                other = filled(std::make_shared<Cnn>(), 7);
    const Model mlp = filled(std::make_shared<Mlp>(), 0);
    dp::DistributedDataParallel ddp(ctx, model);
    loss_of(ddp.forward(batch(0, 0))).backward(); /* the statistics of other rows on each rank */
    dp::save(job, *model, path);
    const double before = largest_difference(model, other);
    dp::load(job, *other, path);
    bool good = before > 0.01 && largest_difference(model, other) == 0 &&
                other->named_buffers()["norm.num_batches_tracked"].item<int64_t>() == 1;
    good = good && failed([&] { dp::load(job, *mlp, path); }) &&
           failed([&] { dp::load(job, *other, path + ".none"); });
    result("save and load", good && difference({}, "", model->parameters()[0]) > 0);
}

static void errors(const std::shared_ptr<dp_ctx> &ctx)
{
    const Model model = filled(std::make_shared<Branch>(), rank);
    dp::DistributedDataParallel ddp(ctx, model);
    const std::string unused = failure_of([&] { loss_of(ddp.forward(batch(0, rank))).backward(); });
    result("a parameter that is not used is named",
           dp_rank_count(job) == 1 || unused.find("some.weight") != std::string::npos);
    const auto frozen = std::make_shared<Mlp>();
    for (auto &param : frozen->parameters())
        param.set_requires_grad(false);
    result("nothing to train", failed([&] { dp::DistributedDataParallel<Model>(ctx, frozen); }));
}

/* ---- how fast -------------------------------------------------------------------------------- */

/* Of a step, in milliseconds: the median. */
static double time_of(const nn::Sequential &model, const Tensor &x,
                      const std::function<Tensor()> &forward)
{
    torch::optim::SGD sgd(model->parameters(), 0.01);
    const Tensor y = torch::arange(x.size(0), device).remainder(10);
    std::vector<double> times;
    for (int i = 0; i < 60; i++) {
        const auto start = std::chrono::steady_clock::now();
        for (auto &param : model->parameters())
            param.mutable_grad() = Tensor();
        const Tensor loss = nn::functional::cross_entropy(forward(), y);
        loss.backward();
        sgd.step();
        loss.item<float>(); /* what a GPU has been given is done */
        const auto end = std::chrono::steady_clock::now();
        times.push_back(std::chrono::duration<double>(end - start).count());
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2] * 1e3;
}

static void bench(const std::shared_ptr<dp_ctx> &ctx, int64_t width)
{
    nn::Sequential model(nn::Linear(784, width), nn::ReLU(), nn::Linear(width, width), nn::ReLU(),
                         nn::Linear(width, 10));
    model->to(device);
    const Tensor x = torch::randn({256 / dp_rank_count(job), 784}, device);
    const double alone = time_of(model, x, [&] { return model->forward(x); });
    dp::DistributedDataParallel ddp(ctx, model);
    const double both = time_of(model, x, [&] { return ddp.forward(x); });
    if (rank == 0)
        std::printf("%d wide: %.3f ms, each for itself %.3f ms\n", static_cast<int>(width), both,
                    alone);
}

int main(int argc, char **argv)
{
    const auto ctx = dp::open();
    job = ctx.get();
    rank = dp_rank(job);
    device = dp::device_of(job);
    if (!device.is_cpu()) {
        at::globalContext().setAllowTF32CuDNN(false);
        exact = 1e-5;
    }
    if (argc == 2) {
        torch::set_num_threads(1);
        bench(ctx, 256);
        bench(ctx, 1024);
        return 0;
    }
    if (dp_rank_count(job) == 2)
        all_as_in_python(ctx, argv[1]);
    uneven(ctx);
    uneven_branch(ctx, false);
    uneven_branch(ctx, true);
    thrown_away(ctx);
    if (dp_rank_count(job) == 2)
        halves(ctx, read_expected(argv[1]));
    files(ctx, argv[2]);
    errors(ctx);
}
