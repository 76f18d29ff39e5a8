/* dp_torch.hpp - data parallelism for libtorch: DistributedDataParallel as in Python, for C++17 and
   libtorch 1.13 or newer. The library itself is C: link libdp (make install).

       auto job = dp::open();                             one device of this process
       dp::DistributedDataParallel ddp(job, model);       model: a holder (Net), or a shared_ptr
       auto loss = criterion(ddp.forward(x), y);          x: this process' part of the batch
       ddp.zero_grad();
       loss.backward();                                   gradients are equal now
       optimizer.step();

   Parameters and buffers begin as those of rank 0. Gradients lie in one block of memory that all
   processes of the machine see; they travel while backward goes on. Each forward has one backward.
   Parameters that are not frozen have one dtype. Failures throw std::runtime_error, or torch's
   c10::Error. When the wrapper goes, the model stays, without gradients. Files: dp_torch_save.hpp.

   GPUs: compile with DP_USE_CUDA, link libdp made with "cuda nccl", and move the model to
   dp::device_of(job.get()) first. Gradients are taken from the current stream and are ready on it.
   For a model on the CPU where there are GPUs, backends in open's config are dp_cpu() alone. */

#ifndef DP_TORCH_HPP
#define DP_TORCH_HPP

#include "../../dp.h"
#include <algorithm>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/torch.h>
#include <unordered_set>
#ifdef DP_USE_CUDA
#include <c10/core/Event.h>
#include <c10/cuda/CUDAStream.h>
#endif

namespace dp
{
inline void must(dp_status status)
{
    if (status != DP_OK)
        throw std::runtime_error(dp_last_error());
}

inline dp_dtype dtype_of(const torch::Tensor &tensor)
{
    const torch::Dtype in_order[DP_DTYPE_COUNT] = {
        torch::kFloat32, torch::kFloat64, torch::kFloat16, torch::kBFloat16, torch::kInt64,
        torch::kInt32,   torch::kInt16,   torch::kInt8,    torch::kUInt8,    torch::kBool};
    const auto at = std::find(in_order, in_order + DP_DTYPE_COUNT, tensor.scalar_type());
    TORCH_CHECK(at < in_order + DP_DTYPE_COUNT, "dp: tensors of this dtype do not travel");
    return static_cast<dp_dtype>(at - in_order);
}

/* order: the library goes on after what is on the current stream, or that after the library. */
#ifdef DP_USE_CUDA
inline torch::Device device_of(dp_ctx *ctx)
{
    const int ordinal = dp_cuda_ordinal(dp_local_stream(ctx, 0));
    return {ordinal < 0 ? torch::kCPU : torch::kCUDA, static_cast<c10::DeviceIndex>(ordinal)};
}
inline void order(dp_ctx *ctx, bool library_after)
{
    const torch::Device device = device_of(ctx);
    if (device.is_cpu())
        return;
    auto native = dp_cuda_stream(dp_local_stream(ctx, 0));
    c10::Stream own = c10::cuda::getStreamFromExternal(native, device.index());
    c10::Stream current = c10::cuda::getCurrentCUDAStream(device.index());
    c10::Event event(device.type());
    event.record(library_after ? current : own);
    event.block(library_after ? own : current);
}
#else
inline torch::Device device_of(dp_ctx *)
{
    return torch::kCPU;
}
inline void order(dp_ctx *, bool)
{
}
#endif

/* One device of this process'; torch and what it calls get as many threads as are its share. */
inline std::shared_ptr<dp_ctx> open(dp_config config = {})
{
    dp_ctx *ctx;
    dp_info info;
    config.device_count = 1;
    must(dp_open(&config, &ctx));
    std::shared_ptr<dp_ctx> job(ctx, dp_close);
    must(dp_info_get(ctx, &info));
    torch::set_num_threads(info.threads_per_device);
    must(dp_threads_limit(ctx)); /* torch does not tell OpenBLAS */
    return job;
}

struct DDPOptions {
    dp_reduction reduction = DP_MEAN_RANKS; /* DP_MEAN_SAMPLES: each loss is a sum over its rows */
    dp_unused unused = DP_UNUSED_ERROR;     /* DP_UNUSED_FOUND, or FIXED for a static graph */
    bool broadcast_buffers = true;          /* of rank 0, before a forward */
    dp_buckets buckets = {};                /* wire = DP_BF16: half as many bytes */
};

template <class Model> struct DistributedDataParallel {
  private:
    struct Unit {
        torch::Tensor param, grad; /* its part of the block */
        decltype(torch::autograd::impl::grad_accumulator(param)) accumulator;
        uintptr_t hook = 0;
        bool used = false, was_used = false; /* since the last reduction; before it */
    };
    const std::shared_ptr<dp_ctx> job_;
    const bool broadcasts_buffers_;
    std::vector<Unit> units_;
    torch::Tensor block_; /* of gradients */
    std::unique_ptr<dp_scope, decltype(&dp_scope_end)> scope_;
    int root_ = 0;
    bool sync_ = true, sync_buffers_ = true, open_ = false;

  public:
    Model module;
    dp_reducer *reducer = nullptr;
    double samples = 1; /* for DP_MEAN_SAMPLES: rows of the last forward, or what you say then */

    DistributedDataParallel(std::shared_ptr<dp_ctx> job, Model model,
                            const DDPOptions &options = {})
        : job_(job), broadcasts_buffers_(options.broadcast_buffers),
          scope_(dp_scope_begin(job.get()), dp_scope_end), module(model)
    {
        const auto params = module->named_parameters().pairs();
        std::unordered_set<void *> seen; /* one that is tied has several names */
        std::vector<const char *> names;
        for (const auto &[name, param] : params)
            if (param.requires_grad() && seen.insert(param.unsafeGetTensorImpl()).second) {
                units_.push_back({param, {}, torch::autograd::impl::grad_accumulator(param)});
                names.push_back(name.c_str());
            }
        create_reducer(options, names.data());
        for (const auto &[name, param] : params)
            broadcast(param);
        for (const auto &buffer : module->buffers())
            broadcast(buffer);
        for (auto &unit : units_)
            unit.hook = unit.accumulator->add_post_hook(
                std::make_unique<torch::autograd::utils::LambdaPostHook>(
                    [this, &unit](auto &outputs, auto &) { return arrived(unit), outputs; }));
    }
    ~DistributedDataParallel()
    {
        for (auto &unit : units_)
            unit.accumulator->del_post_hook(unit.hook);
        zero_grad();
        if (dp_reducer_destroy(reducer) != DP_OK) /* a pass is open, as long as the job */
            scope_.release();
    }
    template <class First, class... Rest> auto forward(First &&first, Rest &&...rest)
    {
        if constexpr (std::is_same_v<std::decay_t<First>, torch::Tensor>)
            samples = first.dim() > 0 ? static_cast<double>(first.size(0)) : 1;
        share_buffers();
        return module->forward(std::forward<First>(first), std::forward<Rest>(rest)...);
    }
    void zero_grad() /* quicker than with zeros, to which backward would have to add */
    {
        for (auto &unit : units_)
            unit.param.mutable_grad() = torch::Tensor();
    }
    /* While what it returns lives, gradients add up here; the first backward after reduces. */
    [[nodiscard]] std::shared_ptr<void> no_sync()
    {
        sync_ = false;
        return {this, [this](void *) { sync_ = true; }};
    }
    /* Whether any process has a batch; `mine`: this one has. One that has none takes part in the
       pass of the others with zeros, gets the same gradients, and steps as they do:
           while (ddp.join(batch != end)) { if (batch != end) { forward, backward } step }   */
    bool join(bool mine)
    {
        int64_t first = mine ? dp_rank(job_.get()) : INT64_MAX;
        must(dp_all_reduce_i64(job_.get(), &first, 1, DP_OP_MIN));
        if (first == INT64_MAX)
            return false;
        root_ = static_cast<int>(first); /* whose buffers all get */
        if (!mine)
            stand_in();
        return true;
    }

  private:
    void create_reducer(const DDPOptions &options, const char *const *names)
    {
        TORCH_CHECK(!units_.empty(), "dp: the model has no parameters that are not frozen");
        const dp_dtype dtype = dtype_of(units_[0].param);
        const auto kind = units_[0].param.options().requires_grad(false);
        TORCH_CHECK(kind.device() == device_of(job_.get()), "dp: the model is on another device");
        std::vector<dp_range> ranges;
        size_t count = 0;
        for (const Unit &unit : units_) {
            const auto i = static_cast<uint32_t>(ranges.size());
            TORCH_CHECK(dtype_of(unit.param) == dtype, "dp: ", names[i], " has another dtype");
            ranges.push_back({0, i, count, static_cast<size_t>(unit.param.numel())});
            count += ranges[i].count;
        }
        if (kind.device().is_cuda())
            block_ = torch::empty(static_cast<int64_t>(count), kind);
        const size_t bytes = count * dp_dtype_bytes(dtype);
        void *memory = block_.defined() ? block_.data_ptr() : dp_shared_alloc(scope_.get(), bytes);
        for (size_t i = 0; i < units_.size(); i++) {
            char *at = static_cast<char *>(memory) + ranges[i].first * dp_dtype_bytes(dtype);
            units_[i].grad = torch::from_blob(at, units_[i].param.sizes(), kind);
        }
        const dp_block block = {dtype, count, &memory};
        dp_reducer_config config = {};
        config.name = "DistributedDataParallel", config.unit_names = names;
        config.blocks = &block, config.block_count = 1;
        config.ranges = ranges.data(), config.range_count = ranges.size();
        config.reduction = options.reduction, config.buckets = options.buckets;
        config.unused_units = options.unused;
        must(dp_reducer_create(job_.get(), &config, &reducer));
    }
    void begin() /* what the last step did not use may travel at once */
    {
        for (Unit &unit : units_)
            if (unit.used || !unit.was_used)
                settle(unit);
        order(job_.get(), true);
        const dp_reduce_pass pass = {!sync_, &samples};
        must(dp_reducer_begin(reducer, &pass));
        open_ = true;
    }
    /* Its gradient lies in the block now: zeros, if it has none. */
    void settle(Unit &unit)
    {
        torch::NoGradGuard no_grad;
        torch::Tensor &grad = unit.param.mutable_grad();
        if (!grad.defined())
            unit.grad.zero_();
        else if (grad.data_ptr() != unit.grad.data_ptr())
            unit.grad.copy_(grad), grad = unit.grad;
    }
    void arrived(Unit &unit) /* autograd has put its gradient there, or added it */
    {
        if (!open_) {
            begin();
            torch::autograd::Engine::get_default_engine().queue_callback([this] { finish(); });
        }
        settle(unit);
        unit.used = true;
        order(job_.get(), true);
        must(dp_reducer_ready(reducer, 0, static_cast<uint32_t>(&unit - units_.data()), nullptr));
    }
    void finish() /* what no process has used stays undefined: optimizers leave it alone */
    {
        open_ = false;
        for (Unit &unit : units_)
            if (unit.was_used && !unit.used)
                settle(unit);
        order(job_.get(), true);
        const dp_status status = dp_reducer_finish(reducer);
        for (uint32_t i = 0; sync_ && i < units_.size(); i++) {
            units_[i].was_used = std::exchange(units_[i].used, false) && status == DP_OK;
            if (status == DP_OK && dp_reducer_used(reducer, i))
                units_[i].param.mutable_grad() = units_[i].grad;
        }
        must(status);
        order(job_.get(), false);
    }
    void stand_in()
    {
        share_buffers();
        sync_buffers_ = sync_;
        samples = 0;
        for (Unit &unit : units_)
            if (!unit.used) /* what is left of the last step */
                unit.param.mutable_grad() = torch::Tensor(), unit.was_used = false;
        begin();
        must(dp_reducer_absent(reducer, 0));
        finish();
    }
    void share_buffers() /* as in Python: not after a forward that was not to be reduced */
    {
        if (sync_buffers_ && broadcasts_buffers_)
            for (const auto &buffer : module->buffers())
                broadcast(buffer);
        sync_buffers_ = sync_ && torch::GradMode::is_enabled();
    }
    void broadcast(const torch::Tensor &tensor) const
    {
        const torch::Tensor whole = tensor.detach().contiguous();
        const dp_part part = {whole.data_ptr(), whole.data_ptr(), nullptr};
        order(job_.get(), true);
        must(dp_broadcast(job_.get(), &part, static_cast<size_t>(whole.numel()), dtype_of(whole),
                          root_));
        order(job_.get(), false);
        if (whole.data_ptr() != tensor.data_ptr())
            tensor.detach().copy_(whole);
    }
};

} // namespace dp

#endif /* DP_TORCH_HPP */
