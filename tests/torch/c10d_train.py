"""The same training with gloo and with dp: losses and parameters are equal, and how long a step takes.

    PYTHONPATH=build/torch python3 tests/torch/c10d_train.py          2 processes, three rounds
    PYTHONPATH=build/torch python3 tests/torch/c10d_train.py check    only whether they are equal
"""

import os
import statistics
import sys
import tempfile
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

BATCH, RANKS, ROUNDS = 256, 2, 3


def model(width):
    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(),
        torch.nn.Linear(width, 10))


def train(rank, width, steps, view):
    """Returns losses, parameters, and the seconds of each step."""
    net = model(width)
    ddp = DistributedDataParallel(net, gradient_as_bucket_view=view)
    sgd = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(100 + rank)
    x, y = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    losses, seconds = [], []
    for _ in range(steps):
        start = time.perf_counter()
        sgd.zero_grad(set_to_none=not view)
        loss = torch.nn.functional.cross_entropy(ddp(x), y)
        loss.backward()
        sgd.step()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in net.parameters()], seconds


def reduce_times(count, times):
    x = torch.ones(count)
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(x)
        seconds.append(time.perf_counter() - start)
        x.fill_(1)
    return seconds


def process(rank, backend, file, check, out):
    torch.set_num_threads(1)
    if backend == "dp":
        import dp_c10d  # noqa: F401
    dist.init_process_group(backend, init_method="file://" + file, rank=rank, world_size=RANKS)
    result = {}
    for width in (256, 1024):
        for view in (False, True):
            losses, params, _ = train(rank, width, 20, view)
            result["train", width, view] = losses, params
            if not check:
                seconds = train(rank, width, 200 if width == 256 else 60, view)[2]
                result["step", width, view] = seconds[10:]
    for count, times in () if check else ((256, 2000), (1 << 18, 200), (25 << 18, 20)):
        result["all_reduce", count * 4] = reduce_times(count, times)
    dist.destroy_process_group()
    torch.save(result, f"{out}.{rank}")


def run(backend, check, folder):
    file = tempfile.mktemp(dir=folder)
    mp.spawn(process, (backend, file, check, file + ".out"), RANKS)
    return [torch.load(f"{file}.out.{rank}") for rank in range(RANKS)]


def main():
    check = sys.argv[1:] == ["check"]
    os.environ["OMP_NUM_THREADS"] = "1"
    times = {}
    worst = 0.0
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(1 if check else ROUNDS):
            results = {backend: run(backend, check, folder) for backend in ("gloo", "dp")}
            for rank in range(RANKS):
                for key, value in results["gloo"][rank].items():
                    other = results["dp"][rank][key]
                    if key[0] == "train":
                        for a, b in zip(value[1] + [torch.tensor(value[0])], other[1] + [torch.tensor(other[0])]):
                            worst = max(worst, (a - b).abs().max().item())
                    elif rank == 0:
                        times.setdefault(key, []).append([statistics.median(value), statistics.median(other)])
    print(f"losses and parameters differ by at most {worst:.2g}")
    for key, pairs in times.items():
        gloo, dp = (statistics.median(p[i] for p in pairs) * 1e6 for i in (0, 1))
        print(f"{key!s:32} gloo {gloo:9.1f} us   dp {dp:9.1f} us   {gloo / dp:.2f} x   "
              + " ".join(f"{a * 1e6:.0f}/{b * 1e6:.0f}" for a, b in pairs))
    sys.exit(worst > 1e-6)


if __name__ == "__main__":
    main()
