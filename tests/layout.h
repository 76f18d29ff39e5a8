/* layout.h - where DP_LAYOUT 1 has the members of tables of functions, and of what is passed to
   them, with pointers of eight bytes. Whoever moves one of these raises DP_LAYOUT, and writes down
   the new places; whoever appends a method adds it here. */

#ifndef LAYOUT_H
#define LAYOUT_H

#include "../dp.h"
#include "../dp_train.h"

typedef struct layout_place {
    const char *name;
    size_t is, was;
} layout_place;

/* clang-format off */
#define AT(type, member, place) {#type "." #member, offsetof(type, member), place}

static const layout_place layout_places[] = {
    AT(dp_table_head, size, 0), AT(dp_table_head, layout, 4),
    AT(dp_device_ops, head, 0), AT(dp_device_ops, name, 8), AT(dp_device_ops, count, 16),
    AT(dp_device_ops, open, 24), AT(dp_device_ops, close, 32), AT(dp_device_ops, info, 40),
    AT(dp_device_ops, alloc, 48), AT(dp_device_ops, free, 56),
    AT(dp_device_ops, stream_create, 64), AT(dp_device_ops, stream_destroy, 72),
    AT(dp_device_ops, stream_sync, 80), AT(dp_device_ops, event_create, 88),
    AT(dp_device_ops, event_destroy, 96), AT(dp_device_ops, event_record, 104),
    AT(dp_device_ops, event_wait, 112), AT(dp_device_ops, event_sync, 120),
    AT(dp_device_ops, copy_in, 128), AT(dp_device_ops, copy_out, 136),
    AT(dp_device_ops, copy, 144), AT(dp_device_ops, host_alloc, 152),
    AT(dp_device_ops, host_free, 160), AT(dp_device_ops, copy_2d, 168),
    AT(dp_device_ops, peer_copy, 176), AT(dp_device_ops, kernel, 184),
    AT(dp_device_ops, owns, 192), AT(dp_device_ops, host_call, 200),
    AT(dp_device_ops, survives_fork, 208), AT(dp_device_ops, takes_sets, 209),
    AT(dp_device_ops, kernel_flags, 216),
    AT(dp_coll_ops, head, 0), AT(dp_coll_ops, name, 8), AT(dp_coll_ops, fits, 16),
    AT(dp_coll_ops, open, 24), AT(dp_coll_ops, close, 32), AT(dp_coll_ops, verbs, 40),
    AT(dp_coll_ops, run, 48), AT(dp_coll_ops, abort, 56), AT(dp_coll_ops, poll, 64),
    AT(dp_coll_ops, describe, 72),
    AT(dp_optim_ops, head, 0), AT(dp_optim_ops, begin, 8), AT(dp_optim_ops, loss_factor, 16),
    AT(dp_optim_ops, update, 24),
    AT(dp_dev, ops, 0), AT(dp_dev, host, 8), AT(dp_dev, index, 16),
    AT(dp_part, send, 0), AT(dp_part, recv, 8), AT(dp_part, stream, 16),
    AT(dp_host, size, 0), AT(dp_host, alloc, 8), AT(dp_host, free, 16), AT(dp_host, log, 24),
    AT(dp_host, parallel, 32), AT(dp_host, thread_count, 40), AT(dp_host, aborted, 48),
    AT(dp_kernel_args, kernel, 0), AT(dp_kernel_args, op, 4), AT(dp_kernel_args, dtype, 8),
    AT(dp_kernel_args, in_dtype, 12), AT(dp_kernel_args, count, 16), AT(dp_kernel_args, out, 24),
    AT(dp_kernel_args, in, 32), AT(dp_kernel_args, out_count, 40),
    AT(dp_kernel_args, in_count, 48), AT(dp_kernel_args, alpha, 56), AT(dp_kernel_args, beta, 64),
    AT(dp_kernel_args, fill_bits, 72), AT(dp_kernel_args, ndim, 80), AT(dp_kernel_args, shape, 88),
    AT(dp_kernel_args, out_stride, 96), AT(dp_kernel_args, in_shape, 104),
    AT(dp_kernel_args, in_stride, 112), AT(dp_kernel_args, flags, 120),
    AT(dp_kernel_args, numbers, 128), AT(dp_kernel_args, heads, 192),
    AT(dp_kernel_args, set_count, 200), AT(dp_kernel_args, counts, 208),
    AT(dp_comm_config, local, 0), AT(dp_comm_config, local_count, 8),
    AT(dp_comm_config, rank_first, 12), AT(dp_comm_config, rank_count, 16),
    AT(dp_comm_config, timeout_ms, 20), AT(dp_comm_config, host_memory, 24),
    AT(dp_comm_config, bootstrap, 32), AT(dp_comm_config, one_machine, 40),
    AT(dp_comm_config, ordered, 41),
    AT(dp_coll_call, verb, 0), AT(dp_coll_call, local, 8), AT(dp_coll_call, count, 16),
    AT(dp_coll_call, dtype, 24), AT(dp_coll_call, op, 28), AT(dp_coll_call, scale, 32),
    AT(dp_coll_call, root, 40),
    AT(dp_device_info, name, 0), AT(dp_device_info, bus_id, 64),
    AT(dp_device_info, bytes_total, 96), AT(dp_device_info, bytes_free, 104),
    AT(dp_device_info, compute_units, 112), AT(dp_device_info, host_memory, 116),
    AT(dp_device_info, unified, 117), AT(dp_device_info, memory, 120),
    AT(dp_pass_config, no_grad, 0), AT(dp_pass_config, no_sync, 1),
    AT(dp_pass_config, compute_dtype, 4),
    AT(dp_rule, head, 0), AT(dp_rule, name, 8), AT(dp_rule, check, 16),
    AT(dp_rule, state_count, 24), AT(dp_rule, step, 32), AT(dp_rule, whole, 40),
    AT(dp_rule, steps, 48),
    AT(dp_rule_args, ctx, 0), AT(dp_rule_args, local_rank, 8), AT(dp_rule_args, dtype, 12),
    AT(dp_rule_args, count, 16), AT(dp_rule_args, param, 24), AT(dp_rule_args, grad, 32),
    AT(dp_rule_args, state, 40), AT(dp_rule_args, gate, 72), AT(dp_rule_args, step, 80),
    AT(dp_rule_args, hyper, 88), AT(dp_rule_args, name, 160), AT(dp_rule_args, ndim, 168),
    AT(dp_rule_args, zero_grad, 172),
    AT(dp_rule_args, shape, 176),
    AT(dp_hyper, lr, 0), AT(dp_hyper, weight_decay, 8), AT(dp_hyper, momentum, 16),
    AT(dp_hyper, dampening, 24), AT(dp_hyper, nesterov, 32), AT(dp_hyper, beta1, 40),
    AT(dp_hyper, beta2, 48), AT(dp_hyper, eps, 56), AT(dp_hyper, maximize, 64)
};

static const layout_place layout_numbers[] = {
    {"DP_BOOL", DP_BOOL, 9}, {"DP_OP_MEAN", DP_OP_MEAN, 1}, {"DP_SCATTER_FROM", DP_SCATTER_FROM, 7},
    {"DP_KERNEL_CHANNELS", DP_KERNEL_CHANNELS, 10}
};
/* clang-format on */

#endif /* LAYOUT_H */
