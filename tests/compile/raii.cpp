// raii.cpp - the library as a C++17 program would use it: a context and scopes that end by
// themselves, errors as exceptions, lambdas on every device and in a module.

#include <array>
#include <cstdio>
#include <memory>
#include <numeric>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>
#include "dp.h"

static void must(dp_status status)
{
    if (status != DP_OK)
        throw std::runtime_error(dp_last_error());
}

struct closer {
    void operator()(dp_ctx *ctx) const
    {
        dp_close(ctx);
    }
    void operator()(dp_scope *scope) const
    {
        dp_scope_end(scope);
    }
};
using context = std::unique_ptr<dp_ctx, closer>;
using scope = std::unique_ptr<dp_scope, closer>;

static context open(int devices)
{
    dp_ctx *ctx = nullptr;
    dp_config config = {};
    config.device_count = devices;
    must(dp_open(&config, &ctx));
    return context(ctx);
}

// Any callable of (rank, scope) on every device. An exception must not leave a worker's thread.
template <class F> static void run(const context &ctx, F &&fn)
{
    using callable = std::remove_reference_t<F>;
    auto trampoline = [](int rank, dp_scope *own, void *user) -> dp_status {
        try {
            (*static_cast<callable *>(user))(rank, own);
            return DP_OK;
        } catch (const std::exception &e) {
            return dp_error(DP_ERR_USER, "%s", e.what());
        }
    };
    must(dp_run(ctx.get(), nullptr, trampoline, &fn));
}

static int sums_of_shares(const context &ctx)
{
    std::vector<int> numbers(101);
    std::array<long, 3> sums = {};
    std::iota(numbers.begin(), numbers.end(), 0);
    run(ctx, [&](int rank, dp_scope *) {
        int64_t first = 0, count = dp_local_share(ctx.get(), rank, int64_t(numbers.size()), &first);
        auto from = numbers.begin() + first;
        sums[size_t(rank)] = std::accumulate(from, from + count, 0L);
    });
    return std::accumulate(sums.begin(), sums.end(), 0L) == 5050 ? 0 : 1;
}

static int exceptions_arrive()
{
    try {
        context ctx = open(2);
        run(ctx, [](int rank, dp_scope *) {
            if (rank == 1)
                throw std::runtime_error("the second device has had enough");
        });
    } catch (const std::runtime_error &e) {
        return std::string(e.what()).find("had enough") != std::string::npos ? 0 : 1;
    }
    return 1;
}

// A module of two lambdas without captures: rows doubled, and back.
static int a_module(const context &ctx)
{
    auto twice = [](dp_call *call, const dp_tensor *from, dp_value *out) {
        dp_tensor to;
        DP_TRY(dp_tensor_new(call->scope, call->device, DP_F32, from->ndim, from->shape, &to));
        *out = dp_of(call->scope, &to);
        return dp_axpby(call->ctx, 2, from, 0, nullptr, &to);
    };
    static decltype(twice) apply = twice;
    const dp_method methods[] = {{"forward",
                                  [](dp_call *call) {
                                      const dp_tensor *x;
                                      DP_TRY(dp_call_arg(call, 0, DP_F32, 1, &x));
                                      return apply(call, x, &call->out);
                                  }},
                                 {"backward", [](dp_call *call) {
                                      dp_tensor grad;
                                      dp_value out;
                                      DP_TRY(dp_call_out_grad(call, nullptr, &grad));
                                      DP_TRY(apply(call, &grad, &out));
                                      call->args_grad = DP_TUPLE_OF(call->scope, out);
                                      return DP_OK;
                                  }}};
    dp_module_config config = {};
    config.methods = methods;
    config.method_count = 2;
    dp_module *net = nullptr, *par = nullptr;
    must(dp_module_create(ctx.get(), &config, &net));
    must(dp_data_parallel(net, nullptr, &par));
    scope step(dp_scope_begin(ctx.get()));
    std::array<float, 5> x = {1, 2, 3, 4, 5}, got = {};
    dp_value out,
        args = DP_TUPLE_OF(step.get(), dp_array(step.get(), x.data(), DP_F32, DP_SHAPE(5)));
    dp_pass *pass = nullptr;
    dp_input_grad grad;
    const dp_tensor *y;
    must(dp_invoke(par, step.get(), "forward", args, dp_none(), nullptr, &out, &pass));
    must(dp_backward(pass, out, &grad));
    must(dp_as_tensor(dp_at(grad.args, 0), "the gradient", DP_F32, 1, &y));
    must(dp_read(ctx.get(), y, got.data(), sizeof got));
    return got == std::array<float, 5>{4, 8, 12, 16, 20} ? 0 : 1;
}

int main()
try {
    context ctx = open(3);
    return sums_of_shares(ctx) + 2 * a_module(ctx) + 4 * exceptions_arrive();
} catch (const std::exception &e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 64;
}
