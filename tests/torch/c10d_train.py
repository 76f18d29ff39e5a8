"""The same training over gloo and over dp, in turn: whether it is equal, and how long it takes.

    PYTHONPATH=build/torch python3 tests/torch/c10d_train.py          in 2 processes, three rounds
    PYTHONPATH=build/torch python3 tests/torch/c10d_train.py check    only whether it is equal

The exit status is 0 if losses and parameters differ by at most 1e-6. Times are medians of rank 0,
in microseconds; cpu is the time of all threads of its process.
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


class Training:
    def __init__(self, rank, group, width, view):
        torch.manual_seed(1)
        layers = [torch.nn.Linear(784, width), torch.nn.ReLU(), torch.nn.Linear(width, width),
                  torch.nn.ReLU(), torch.nn.Linear(width, 10)]
        self.net = torch.nn.Sequential(*layers)
        self.view = view
        self.ddp = DistributedDataParallel(self.net, process_group=group,
                                           gradient_as_bucket_view=view)
        self.sgd = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        torch.manual_seed(100 + rank)
        self.x, self.y = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
        self.losses = []

    def step(self):
        self.sgd.zero_grad(set_to_none=not self.view)
        loss = torch.nn.functional.cross_entropy(self.ddp(self.x), self.y)
        loss.backward()
        self.sgd.step()
        self.losses.append(loss.item())

    def state(self):
        numbers = [p.detach().flatten() for p in self.net.parameters()]
        return torch.cat(numbers + [torch.tensor(self.losses)])


def timed(fn, times):
    """The median of the wall, and the mean of the processor."""
    seconds, cpu = [], time.process_time()
    for _ in range(times):
        start = time.perf_counter()
        fn()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds) * 1e6, (time.process_time() - cpu) / times * 1e6


def report(what, rounds):
    """rounds: of each round, what gloo and dp took."""
    (gloo, gloo_cpu), (dp, dp_cpu) = (
        [statistics.median(each[i][k] for each in rounds) for k in (0, 1)] for i in (0, 1))
    each = " ".join(f"{a[0]:.0f}/{b[0]:.0f}" for a, b in rounds)
    print(f"{what:28} gloo {gloo:8.0f}  dp {dp:8.0f}  {gloo / dp:5.2f} x   "
          f"cpu {gloo_cpu:7.0f} {dp_cpu:7.0f}  {gloo_cpu / dp_cpu:5.2f} x   rounds {each}",
          flush=True)


def measure_training(rank, groups, width, view):
    trainings = [Training(rank, group, width, view) for group in groups]
    rounds = []
    for _ in range(ROUNDS):
        took = [[], []]
        for _ in range(8):
            for i, training in enumerate(trainings):
                training.step()
                took[i].append(timed(training.step, 12 if width == 256 else 4))
        rounds.append([[statistics.median(t[k] for t in took[i]) for k in (0, 1)] for i in (0, 1)])
    if rank == 0:
        report(f"step 784-{width}-{width}-10" + (" views" if view else ""), rounds)


def measure_all_reduce(rank, groups, bytes):
    x = torch.ones(bytes // 4)
    rounds = []
    for _ in range(ROUNDS):
        rounds.append([])
        for group in groups:
            dist.barrier(group=group)
            times = 2000 if bytes == 1 << 10 else 100 if bytes == 1 << 20 else 8
            rounds[-1].append(timed(lambda: dist.all_reduce(x.zero_(), group=group), times))
    if rank == 0:
        report(f"all_reduce of {bytes} bytes", rounds)


def process(rank, file, check):
    import dp_c10d  # noqa: F401
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method="file://" + file, rank=rank, world_size=RANKS)
    groups = [dist.group.WORLD, dist.new_group(backend="dp")]
    worst = 0.0
    for width in (256, 1024):
        for view in (False, True):
            states = []
            for group in groups:
                training = Training(rank, group, width, view)
                for _ in range(20):
                    training.step()
                states.append(training.state())
            worst = max(worst, (states[0] - states[1]).abs().max().item())
            if not check:
                measure_training(rank, groups, width, view)
    for bytes in () if check else (1 << 10, 1 << 20, 25 << 20):
        measure_all_reduce(rank, groups, bytes)
    print(f"rank {rank}: losses and parameters differ by at most {worst:.2g}", flush=True)
    dist.destroy_process_group()
    if not worst <= 1e-6:
        sys.exit(1)


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (os.path.join(folder, "store"), sys.argv[1:] == ["check"]), RANKS)
