/* dp_torch_save.hpp - what a libtorch model has learned, in files: its parameters and buffers, with
   the names of Python's state_dict, as safetensors. All processes of the job make the calls. */

#ifndef DP_TORCH_SAVE_HPP
#define DP_TORCH_SAVE_HPP

#include "../../dp_save.h"
#include "dp_torch.hpp"

namespace dp
{

inline auto state_of(const torch::nn::Module &module) /* tensors with their names */
{
    auto state = module.named_parameters().pairs();
    for (const auto &buffer : module.named_buffers().pairs())
        state.push_back(buffer);
    return state;
}

/* Process 0 writes. */
inline void save(dp_ctx *ctx, const torch::nn::Module &module, const std::string &path)
{
    std::unique_ptr<dp_scope, decltype(&dp_scope_end)> scope(dp_scope_begin(ctx), dp_scope_end);
    const auto state = state_of(module);
    std::vector<torch::Tensor> host;
    std::vector<dp_pair> pairs;
    for (const auto &[name, tensor] : state) {
        const auto &whole = host.emplace_back(tensor.detach().cpu().contiguous());
        pairs.push_back(
            {name.c_str(), dp_array(scope.get(), whole.data_ptr(), dtype_of(whole),
                                    static_cast<int>(whole.dim()), whole.sizes().data())});
    }
    const dp_value all = dp_dict_make(scope.get(), pairs.data(), pairs.size());
    must(dp_checkpoint_save(ctx, path.c_str(), all));
}

/* Each process reads the file. Nothing changes unless names, dtypes and shapes are the module's. */
inline void load(dp_ctx *ctx, const torch::nn::Module &module, const std::string &path)
{
    std::unique_ptr<dp_scope, decltype(&dp_scope_end)> scope(dp_scope_begin(ctx), dp_scope_end);
    const auto state = state_of(module);
    std::vector<torch::Tensor> saved;
    dp_value all;
    must(dp_checkpoint_load(ctx, scope.get(), path.c_str(), &all));
    for (const auto &[name, tensor] : state) {
        const char *const key = name.c_str();
        const dp_tensor *from;
        must(dp_as_tensor(dp_get(all, key), key, dtype_of(tensor), -1, &from));
        const torch::IntArrayRef shape(from->shape, from->ndim);
        TORCH_CHECK(shape == tensor.sizes() && dp_count(all) == state.size(), path,
                    " is of another model: see ", name);
        saved.push_back(torch::from_blob(from->data, shape, tensor.dtype()));
    }
    for (size_t i = 0; i < state.size(); i++)
        state[i].second.detach().copy_(saved[i]);
}

} // namespace dp

#endif /* DP_TORCH_SAVE_HPP */
