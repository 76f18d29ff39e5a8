/* hello.cpp - the library from C++: what is opened ends by itself, errors are exceptions, a model's
   methods are lambdas. The library itself is C, compiled once: by make install, or as here.
   Build: cc -std=c11 -O2 -c examples/dp.c   once, for all examples
          c++ -std=c++17 examples/hello.cpp dp.o -o hello_cpp -lpthread -lm
   Prints:
   step 0: loss 5.625
   step 1: loss 0.000 */

#include "../dp_train.h"
#include <cstdio>
#include <memory>
#include <stdexcept>

using context = std::unique_ptr<dp_ctx, decltype(&dp_close)>;
using scope = std::unique_ptr<dp_scope, decltype(&dp_scope_end)>;

static void must(dp_status status) // methods have DP_TRY: no exception may pass through the library
{
    if (status != DP_OK)
        throw std::runtime_error(dp_last_error());
}

template <class F> static dp_status points(dp_call *call, F visit) // visit(i, x, a x - y) for each
{
    const dp_tensor *x, *y;
    DP_TRY(dp_call_tensor(call, "x", DP_F32, 1, &x));
    DP_TRY(dp_call_tensor(call, "y", DP_F32, 1, &y));
    auto xs = static_cast<float *>(x->data), ys = static_cast<float *>(y->data);
    float a = *static_cast<const float *>(dp_param(call, 0));
    for (int64_t i = 0; i < call->row_count; i++)
        visit(i, xs[i], a * xs[i] - ys[i]);
    return DP_OK;
}

static dp_module *slope(dp_ctx *ctx) // the loss of a point is (a x - y)^2
{
    auto forward = [](dp_call *call) {
        dp_tensor loss;
        DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, DP_SHAPE(call->row_count), &loss));
        call->out = dp_of(call->scope, &loss);
        auto to = static_cast<float *>(loss.data);
        return points(call, [=](int64_t i, float, float off) { to[i] = off * off; });
    };
    auto backward = [](dp_call *call) {
        dp_tensor grad;
        DP_TRY(dp_call_out_grad(call, nullptr, &grad));
        auto to = static_cast<float *>(dp_grad(call, 0)), from = static_cast<float *>(grad.data);
        return points(call, [=](int64_t i, float x, float off) { *to += from[i] * 2 * off * x; });
    };
    const dp_method methods[] = {{"forward", forward}, {"backward", backward}};
    const dp_param_config a = {"slope", DP_F32, 1, {1}, false, false, nullptr, nullptr, nullptr};
    dp_module_config config = {};
    config.methods = methods, config.method_count = 2, config.params = &a, config.param_count = 1;
    dp_module *net, *par;
    must(dp_module_create(ctx, &config, &net));
    must(dp_data_parallel(net, nullptr, &par));
    return par;
}

int main() // what is not caught ends the program with its sentence
{
    float x[] = {-1, -0.5F, 0.5F, 1}, y[] = {-3, -1.5F, 1.5F, 3};
    double loss;
    dp_ctx *opened;
    dp_optim_config sgd = {};
    sgd.rule = dp_sgd(), sgd.hyper.lr = 0.8;
    must(dp_open(nullptr, &opened)); // one device per core
    context ctx(opened, dp_close);
    dp_module *net = slope(opened);
    dp_optim *optim;
    must(dp_optim_create(net, &sgd, &optim));
    for (int i = 0; i < 2; i++) {
        scope step(dp_scope_begin(opened), dp_scope_end);
        auto field = [&](float *of) { return dp_array(step.get(), of, DP_F32, DP_SHAPE(4)); };
        dp_value log, batch = DP_DICT(step.get(), {"x", field(x)}, {"y", field(y)});
        must(dp_train_step(net, step.get(), batch, optim, &log));
        must(dp_item(opened, dp_get(log, "loss"), &loss));
        std::printf("step %d: loss %.3f\n", i, loss);
    }
}
