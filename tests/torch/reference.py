#!/usr/bin/env python3
"""What torch's own DistributedDataParallel makes of the cases in test_torch.cpp, on two processes
over gloo: after 20 steps, each parameter and rank 0's buffers, a line each.
    python3 tests/torch/reference.py >tests/torch/expected.txt
    python3 tests/torch/reference.py bench        milliseconds a step, as test_torch bench has them
"""
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, ROWS = 20, 6


def numbers(shape, seed, scale):
    count = torch.Size(shape).numel()
    at = torch.arange(count, dtype=torch.int64)
    values = ((at * 7919 + seed * 104729) % 1009).double() / 1009 - 0.5
    return (values * scale).float().view(shape)


def fill(model):
    with torch.no_grad():
        for i, param in enumerate(model.parameters()):
            param.copy_(numbers(param.shape, i + 1, 0.8))
    return model


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.b = nn.Linear(8, 3)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


class Cnn(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Conv2d(1, 2, 3)
        self.norm = nn.BatchNorm2d(2)
        self.b = nn.Linear(2, 3)

    def forward(self, x):
        x = torch.relu(self.norm(self.a(x.view(-1, 1, 2, 3).repeat(1, 1, 2, 2))))
        return self.b(x.mean([2, 3]))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 6)
        self.again = self.a
        self.frozen = nn.Linear(6, 6)
        self.b = nn.Linear(6, 3)
        for param in self.frozen.parameters():
            param.requires_grad = False

    def forward(self, x):
        return self.b(self.again(torch.tanh(self.frozen(self.a(x)))))


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.some = nn.Linear(8, 8)
        self.none = nn.Linear(8, 8)
        self.b = nn.Linear(8, 3)
        self.takes = False

    def forward(self, x):
        x = torch.relu(self.a(x))
        return self.b(self.some(x) if self.takes else x)


def batch(step, part):
    x = numbers((ROWS, 6), 1000 + step * 10 + part, 4.0)
    return x, torch.arange(ROWS) % 3


def loss_of(ddp, step, part):
    x, y = batch(step, part)
    return nn.functional.cross_entropy(ddp(x), y)


def train(name, model, parts=1, **options):
    ddp = DistributedDataParallel(fill(model), **options)
    rank = dist.get_rank()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for step in range(STEPS):
        if isinstance(model, Branch): # on one process, on the other, on both, on none
            model.takes = rank == 0 if options.get("static_graph") else bool((step % 4) & (rank + 1))
        sgd.zero_grad(set_to_none=True)
        for part in range(parts - 1):
            with ddp.no_sync():
                loss_of(ddp, step, rank * parts + part).backward()
        loss_of(ddp, step, rank * parts + parts - 1).backward()
        sgd.step()
    if rank == 0:
        for key, value in list(model.named_parameters()) + list(model.named_buffers()):
            print(name, key, *(f"{x:.9g}" for x in value.flatten().tolist()))


def bench(sizes, rank):
    torch.manual_seed(0)
    layers = []
    for wide, narrow in zip(sizes, sizes[1:]):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    model = nn.Sequential(*layers[:-1])
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    sgd = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y, times = torch.randn(128, sizes[0]), torch.arange(128) % sizes[-1], []
    for _ in range(60):
        begin = time.perf_counter()
        sgd.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(ddp(x), y).backward()
        sgd.step()
        times.append(time.perf_counter() - begin)
    if rank == 0:
        print("-".join(map(str, sizes)), f"{sorted(times)[len(times) // 2] * 1e3:.2f} ms")


def main(rank, what):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    if what == ["bench"]:
        bench([784, 256, 256, 10], rank)
        bench([784, 1024, 1024, 10], rank)
        return
    train("mlp", Mlp())
    train("cnn", Cnn())
    train("cnn_sums", Cnn(), parts=2)
    train("tied", Tied())
    train("branch", Branch(), find_unused_parameters=True)
    train("static", Branch(), static_graph=True)
    train("sums", Mlp(), parts=2)


if __name__ == "__main__":
    mp.spawn(main, (sys.argv[1:],), nprocs=2)
