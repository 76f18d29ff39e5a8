#!/usr/bin/env python3
"""What PyTorch makes of the rows G4, G6 and G7 of gpu-bench, on GPU 0: medians of 15 rounds."""

import os
import statistics
import sys
import time

try:
    import torch
except ImportError:
    print("SKIP PyTorch: absent")
    sys.exit()
if not torch.cuda.is_available():
    sys.exit("PyTorch has no GPU")
MIB = int(sys.argv[1]) if len(sys.argv) > 1 else 256
ROUNDS = 15


def median(run, repeats=8):
    times = []
    for i in range(ROUNDS + 2):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(repeats):
            run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / repeats)
    return statistics.median(times[2:])


def copy_rate():
    a = torch.zeros(MIB << 18, device="cuda")
    b = torch.zeros_like(a)
    return 2 * (MIB << 20) / median(lambda: b.copy_(a))


def optimizer(kind, counts, **options):
    params = [torch.zeros(n, device="cuda", requires_grad=True) for n in counts]
    for p in params:
        p.grad = torch.full_like(p, 0.5)
    steps = kind(params, lr=1e-3, weight_decay=1e-2, fused=True, **options)
    return median(steps.step)


def wrappers():
    """Host and GPU time of a forward, more than of the module alone."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29511")
    torch.distributed.init_process_group("nccl", rank=0, world_size=1)
    net, x = torch.nn.Linear(64, 64).cuda(), torch.zeros(64, 64, device="cuda")
    bare = median(lambda: net(x), 1000)
    for kind in (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel):
        wrapped = kind(net, [0])
        more = median(lambda: wrapped(x), 1000) - bare
        print(f"G4   torch {kind.__name__}: {1e6 * more:.2f} us more")
    torch.distributed.destroy_process_group()


def main():
    print(f"PyTorch {torch.__version__}, CUDA {torch.version.cuda}")
    rate, one = copy_rate(), [MIB << 18]
    scale = max(1, (MIB << 20) >> 18)
    mixed = [(1 + (i * 7919) % 400) * scale for i in range(400)]
    for name, kind, blocks, counts, options in (
        ("SGD with momentum", torch.optim.SGD, 5, one, {"momentum": 0.9}),
        ("AdamW", torch.optim.AdamW, 7, one, {}),
        ("AdamW, 400 tensors", torch.optim.AdamW, 7, mixed, {}),
    ):
        taken = optimizer(kind, counts, **options)
        bound = blocks * 4 * sum(counts) / rate
        print(f"G6   torch fused {name}: {1e6 * taken:.1f} us, {bound / taken:.3f} of the limit")
    p = torch.zeros(MIB << 18, device="cuda", requires_grad=True)
    p.grad = torch.full_like(p, 0.5)
    taken = median(lambda: torch.nn.utils.get_total_norm([p.grad]).item())
    print(f"G7   torch norm: {1e6 * taken:.1f} us, {(MIB << 20) / rate / taken:.3f} of the limit")
    wrappers()


main()
