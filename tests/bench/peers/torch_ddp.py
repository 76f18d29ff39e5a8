"""torch_ddp.py - training steps of torch's DistributedDataParallel over gloo, in two processes of one
thread each, for the driver in bench.c.

    torch_ddp.py

Says "ready" and torch's version; then, for each line "together WIDTH STEPS" or "alone WIDTH STEPS"
on the standard input, trains an MLP 784-WIDTH-WIDTH-10 with 128 rows a process, one step that does
not count and STEPS that do, and answers with the nanoseconds that one took. "alone": both processes
at the same time, without a word to each other. "all_reduce BYTES CALLS" asks for calls of
all_reduce over this torch's gloo. Rank 1 is a child that hears of it through a pipe."""

import os
import sys
import tempfile
import time

ROWS = 128

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
to_child = os.pipe()
store = tempfile.mktemp()
rank = 0 if os.fork() else 1  # before torch has threads

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

torch.set_num_threads(1)
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)


def make(width, together):
    layers = [nn.Linear(784, width, bias=False), nn.ReLU(),
              nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, 10, bias=False)]
    net = nn.Sequential(*layers)
    model = nn.parallel.DistributedDataParallel(net) if together else net
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


models = {}


def reduce(size, calls):
    data = torch.ones(size // 4)
    dist.all_reduce(data)
    start = time.monotonic_ns()
    for _ in range(calls):
        dist.all_reduce(data)
    return (time.monotonic_ns() - start) / calls


def train(how, width, steps):
    key = how, width
    if key not in models:
        models[key] = make(width, how == "together")
    model, optimizer = models[key]
    x, y = torch.ones(ROWS, 784), torch.zeros(ROWS, 10)
    dist.barrier()
    for step in range(steps + 1):
        if step == 1:
            dist.barrier()
            start = time.monotonic_ns()
        optimizer.zero_grad()
        ((model(x) - y) ** 2).mean().backward()
        optimizer.step()
    return (time.monotonic_ns() - start) / steps


def lines():
    """The driver's, which the child gets from its parent."""
    if rank == 0:
        os.close(to_child[0])
        print(f"ready torch {torch.__version__}", flush=True)
        for line in sys.stdin:
            os.write(to_child[1], line.encode())
            yield line
        os.close(to_child[1])
        os.wait()
    else:
        os.close(to_child[1])
        yield from os.fdopen(to_child[0])


for request in lines():
    how, size, count = request.split()
    if how == "all_reduce":
        spent = reduce(int(size), int(count))
    else:
        spent = train(how, int(size), int(count))
    if rank == 0:
        print(f"{spent:.1f}", flush=True)
if rank == 0 and os.path.exists(store):
    os.unlink(store)
