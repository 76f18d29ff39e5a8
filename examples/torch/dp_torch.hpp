/* dp_torch.hpp - data parallelism for libtorch: DistributedDataParallel as in Python, for C++17 and
   libtorch 1.13 or newer. The library itself is C: link libdp (make install).

       auto job = dp::open();                             one device of this process
       dp::DistributedDataParallel ddp(job, model);       model: a holder (Net), or a shared_ptr
       auto loss = criterion(ddp.forward(x), y);          x: this process' part of the batch
       ddp.zero_grad();
       loss.backward();                                   gradients are equal now
       optimizer.step();

   Parameters and buffers begin as those of rank 0. Gradients lie in one flat block of memory that
   all processes of the machine see. A hook of autograd reports each one, so buckets travel while
   backward goes on. What fails throws std::runtime_error with the library's sentence. Parameters
   that are not frozen have one dtype. Each forward has one backward. When the wrapper goes, the
   model stays, without gradients.

   GPUs: compile with DP_USE_CUDA, link libdp made with "cuda nccl", and move the model to
   dp::device_of(job.get()) first. Gradients are taken from the current stream and are ready on it.
   For a model on the CPU where there are GPUs, backends in open's config are dp_cpu() alone. Tried
   with torch 1.13 and 2.15 on CPUs, and with 2.11 on an H200 that processes share. */

#ifndef DP_TORCH_HPP
#define DP_TORCH_HPP

#include "../../dp_save.h"
#include <algorithm>
#include <memory>
#include <stdexcept>
#include <string>
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
    dp_reduction reduction = DP_MEAN_RANKS; /* DP_MEAN_SAMPLES: a loss is the sum over the rows of a
                                               part, and parts may differ in size */
    bool find_unused_parameters = false;    /* walk the graph of each output */
    bool static_graph = false;              /* of the first output: it is that of all others */
    bool broadcast_buffers = true;          /* of rank 0, before a forward */
    dp_buckets buckets = {};                /* wire = DP_BF16: half as many bytes */
};

template <class Model> struct DistributedDataParallel {
  private:
    using Scope = std::unique_ptr<dp_scope, decltype(&dp_scope_end)>;
    using Nodes = std::vector<torch::autograd::Node *>;
    struct Unit {
        torch::Tensor param, grad; /* its part of a block */
        decltype(torch::autograd::impl::grad_accumulator(param)) accumulator;
        uintptr_t hook;
        bool unused;  /* here, says the last walk */
        int64_t used; /* here, since the last reduction; then by any process */
    };
    const std::shared_ptr<dp_ctx> job_;
    const DDPOptions options_;
    std::vector<std::pair<std::string, torch::Tensor>> state_; /* parameters, then buffers */
    std::vector<Unit> units_;
    torch::Tensor block_; /* of gradients */
    Scope scope_;
    int root_ = 0;
    bool sync_ = true, sync_buffers_ = true, open_ = false, walks_;

  public:
    Model module;
    dp_reducer *reducer = nullptr;
    double samples = 1; /* for DP_MEAN_SAMPLES: rows of the last forward, or what you say then */

    DistributedDataParallel(std::shared_ptr<dp_ctx> job, Model model,
                            const DDPOptions &options = {})
        : job_(job), options_(options), state_(model->named_parameters().pairs()),
          scope_(dp_scope_begin(job.get()), dp_scope_end),
          walks_(options.find_unused_parameters || options.static_graph), module(model)
    {
        std::unordered_set<void *> seen; /* one that is tied has several names */
        std::vector<const char *> names;
        for (const auto &[name, param] : state_)
            if (param.requires_grad() && seen.insert(param.unsafeGetTensorImpl()).second) {
                units_.push_back(
                    {param, {}, torch::autograd::impl::grad_accumulator(param), 0, 0, 0});
                names.push_back(name.c_str());
            }
        create_reducer(names.data());
        for (const auto &buffer : module->named_buffers().pairs())
            state_.push_back(buffer);
        for (const auto &[name, tensor] : state_)
            broadcast(tensor);
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
        auto out = module->forward(std::forward<First>(first), std::forward<Rest>(rest)...);
        if (walks_ && torch::GradMode::is_enabled())
            find_unused(out);
        return out;
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
       pass of the others here, gets the same gradients, and steps as they do:
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
    /* Parameters and buffers, as a safetensors file with the names of state_dict. */
    void save(const std::string &path) const
    {
        Scope step(dp_scope_begin(job_.get()), dp_scope_end);
        std::vector<torch::Tensor> host;
        std::vector<dp_pair> pairs;
        for (const auto &[name, tensor] : state_) {
            const auto &whole = host.emplace_back(tensor.detach().cpu().contiguous());
            const int ndim = static_cast<int>(whole.dim());
            pairs.push_back({name.c_str(), dp_array(step.get(), whole.data_ptr(), dtype_of(whole),
                                                    ndim, whole.sizes().data())});
        }
        dp_value all = dp_dict_make(step.get(), pairs.data(), pairs.size());
        must(dp_checkpoint_save(job_.get(), path.c_str(), all));
    }
    /* Changes nothing unless names, dtypes and shapes are those of the model. */
    void load(const std::string &path)
    {
        Scope step(dp_scope_begin(job_.get()), dp_scope_end);
        dp_value all;
        must(dp_checkpoint_load(job_.get(), step.get(), path.c_str(), &all));
        std::vector<torch::Tensor> saved;
        for (const auto &[name, tensor] : state_) {
            const dp_tensor *from;
            must(
                dp_as_tensor(dp_get(all, name.c_str()), name.c_str(), dtype_of(tensor), -1, &from));
            torch::IntArrayRef shape(from->shape, from->ndim);
            TORCH_CHECK(shape == tensor.sizes() && dp_count(all) == state_.size(), path,
                        " is of another model: see ", name);
            saved.push_back(torch::from_blob(from->data, shape, tensor.dtype()));
        }
        for (size_t i = 0; i < state_.size(); i++)
            state_[i].second.detach().copy_(saved[i]);
    }

  private:
    void create_reducer(const char *const *names)
    {
        std::vector<dp_range> ranges;
        size_t count = 0;
        for (const Unit &unit : units_) {
            const auto elements = static_cast<size_t>(unit.param.numel());
            ranges.push_back({0, static_cast<uint32_t>(ranges.size()), count, elements});
            count += elements;
        }
        TORCH_CHECK(count > 0, "dp: the model has no parameters that are not frozen");
        const dp_dtype dtype = dtype_of(units_[0].param);
        const auto kind = units_[0].param.options().requires_grad(false);
        TORCH_CHECK(kind.device() == device_of(job_.get()), "dp: the model is on another device");
        const size_t bytes = count * dp_dtype_bytes(dtype);
        void *memory;
        if (kind.device().is_cpu())
            memory = dp_shared_alloc(scope_.get(), bytes);
        else
            memory = (block_ = torch::empty(static_cast<int64_t>(count), kind)).data_ptr();
        for (size_t i = 0; i < units_.size(); i++) {
            const torch::Tensor &param = units_[i].param;
            TORCH_CHECK(dtype_of(param) == dtype, "dp: ", names[i], " has another dtype");
            char *at = static_cast<char *>(memory) + ranges[i].first * dp_dtype_bytes(dtype);
            units_[i].grad = torch::from_blob(at, param.sizes(), kind);
        }
        void *const local[] = {memory};
        const dp_block block = {dtype, count, local};
        dp_reducer_config config = {};
        config.name = "DistributedDataParallel", config.unit_names = names;
        config.blocks = &block, config.block_count = 1;
        config.ranges = ranges.data(), config.range_count = ranges.size();
        config.reduction = options_.reduction, config.buckets = options_.buckets;
        config.unused_units = DP_UNUSED_ERROR; /* those that are unused are reported here */
        must(dp_reducer_create(job_.get(), &config, &reducer));
    }

    void begin()
    {
        const dp_reduce_pass pass = {!sync_, &samples};
        must(dp_reducer_begin(reducer, &pass));
        open_ = true;
        for (Unit &unit : units_)
            if (unit.unused) /* nobody waits for it */
                report(unit);
    }
    void report(Unit &unit)
    {
        torch::Tensor &grad = unit.param.mutable_grad();
        if (!grad.defined())
            unit.grad.zero_();
        else if (grad.data_ptr() != unit.grad.data_ptr())
            unit.grad.copy_(grad), grad = unit.grad;
        order(job_.get(), true);
        must(dp_reducer_ready(reducer, 0, static_cast<uint32_t>(&unit - units_.data()), nullptr));
    }
    void arrived(Unit &unit) /* autograd has put its gradient there, or added it */
    {
        torch::NoGradGuard no_grad;
        if (!open_) {
            begin();
            torch::autograd::Engine::get_default_engine().queue_callback([this] { finish(); });
        }
        report(unit);
        unit.used = 1;
    }
    void finish()
    {
        open_ = false;
        must(dp_reducer_finish(reducer));
        order(job_.get(), false);
        if (sync_)
            hand_out();
    }
    void hand_out() /* what no process has used stays undefined: optimizers leave it alone */
    {
        const bool all = !options_.find_unused_parameters && !options_.static_graph;
        std::vector<int64_t> used;
        for (Unit &unit : units_)
            used.push_back(std::exchange(unit.used, 0) || all);
        if (!all)
            must(dp_all_reduce_i64(job_.get(), used.data(), used.size(), DP_OP_MAX));
        for (size_t i = 0; i < used.size(); i++)
            if (used[i] != 0)
                units_[i].param.mutable_grad() = units_[i].grad;
    }
    void stand_in()
    {
        torch::NoGradGuard no_grad;
        share_buffers();
        sync_buffers_ = sync_;
        samples = 0;
        for (Unit &unit : units_) {
            unit.unused = true;
            if (unit.used == 0) /* what is left of the last step */
                unit.param.mutable_grad() = torch::Tensor();
        }
        begin();
        finish();
        for (Unit &unit : units_)
            unit.unused = false;
        walks_ = options_.find_unused_parameters || options_.static_graph;
    }
    void share_buffers() /* as in Python: not after a forward that was not to be reduced */
    {
        if (sync_buffers_ && options_.broadcast_buffers)
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

    template <class Output> static void add_roots(const Output &out, Nodes &nodes)
    {
        if constexpr (!std::is_same_v<Output, torch::Tensor>)
            std::apply([&](auto &...each) { (add_roots(each, nodes), ...); }, out);
        else if (out.defined() && out.requires_grad())
            nodes.push_back(torch::autograd::impl::gradient_edge(out).function.get());
    }
    template <class Each> static void add_roots(const std::vector<Each> &outs, Nodes &nodes)
    {
        for (const Each &out : outs)
            add_roots(out, nodes);
    }
    template <class Output> void find_unused(const Output &out)
    {
        Nodes open;
        std::unordered_set<torch::autograd::Node *> seen;
        add_roots(out, open);
        while (!open.empty()) {
            const auto node = open.back();
            open.pop_back();
            if (node != nullptr && seen.insert(node).second)
                for (const auto &edge : node->next_edges())
                    open.push_back(edge.function.get());
        }
        for (Unit &unit : units_)
            unit.unused = seen.count(unit.accumulator.get()) == 0;
        walks_ = !options_.static_graph;
    }
};

} // namespace dp

#endif /* DP_TORCH_HPP */
