"""What torch.distributed does over the backend "dp".

    PYTHONPATH=build/torch python3 tests/torch/c10d_test.py [word]

Runs the cases whose names hold the word, in 2, 3 and 4 processes. Prints a line for each and, at
the end, "N passed, N failed". With MACHINES=2 in the environment the processes seem to be on so
many machines, in turn, and share no memory.
"""

import contextlib
import datetime
import functools
import os
import queue
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import ReduceOp
from torch.nn.parallel import DistributedDataParallel as DDP

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8]
OTHERS = [torch.complex64, torch.uint16, torch.float8_e4m3fn]
MACHINES = int(os.environ.get("MACHINES", "1"))
MONITORED = torch.torch_version.TorchVersion(torch.__version__) >= (2, 15)  # else gloo's alone
CASES, WORLDS = [], []  # in all sizes of the world, one after another; with a world each


def case(fn):
    CASES.append(fn)
    return fn


def world(size, seconds=60, status=()):
    """A case with processes of its own; status: the exit codes of ranks that do not end with 0."""

    def keep(fn):
        WORLDS.append((fn, size, seconds, dict(status)))
        return fn

    return keep


def data(rank, shape, dtype, seed=0):
    """What a rank gives: small numbers, so that sums and products are exact."""
    random = torch.Generator().manual_seed(1000 * seed + rank)
    numbers = torch.randint(0, 3, tuple(shape), generator=random)
    if dtype == torch.float8_e4m3fn:
        return numbers.to(torch.uint8).view(dtype)
    return numbers.to(dtype)


def same(got, want):
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, got.shape, want.shape)
    if got.dtype in (torch.uint16, torch.float8_e4m3fn):
        got, want = (x.reshape(-1).view(torch.uint8) for x in (got, want))
    assert torch.equal(got, want), (got, want)


@contextlib.contextmanager
def raises(text, kind=RuntimeError):
    try:
        yield
    except kind as error:
        assert text in str(error), str(error)
        return
    raise AssertionError(f"no {kind.__name__} with '{text}'")


def apart_it_may_be_through():
    """A call of a rank that has the numbers of the one that has failed: on one machine it fails."""
    return contextlib.suppress(dist.DistBackendError) if MACHINES > 1 else \
        raises("", dist.DistBackendError)


def reduced(op, tensors):
    """As the library says that it does: integers wrap, bool is or / and, halves in f32."""
    dtype = tensors[0].dtype
    stack = torch.stack(tensors)
    if dtype == torch.bool:
        return stack.any(0) if op in (ReduceOp.SUM, ReduceOp.MAX, ReduceOp.BOR) else \
            stack.sum(0).remainder(2).bool() if op == ReduceOp.BXOR else stack.all(0)
    wide = stack.double() if dtype.is_floating_point else stack.long()
    if op == ReduceOp.SUM:
        return wide.sum(0).to(dtype)
    if op == ReduceOp.AVG:
        mean = wide.sum(0) / len(tensors)
        return mean.to(dtype) if dtype.is_floating_point else mean.trunc().to(dtype)
    if op == ReduceOp.PRODUCT:
        return wide.prod(0).to(dtype)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        return (wide.amin(0) if op == ReduceOp.MIN else wide.amax(0)).to(dtype)
    fn = {ReduceOp.BAND: torch.bitwise_and, ReduceOp.BOR: torch.bitwise_or,
          ReduceOp.BXOR: torch.bitwise_xor}[op]
    return functools.reduce(fn, tensors)


def ops_of(dtype):
    ops = [ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX]
    if dtype != torch.bool:
        ops.append(ReduceOp.AVG)
    return ops if dtype.is_floating_point else ops + [ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR]


def close(got, want):
    torch.testing.assert_close(got, want)


def strided(tensor):
    """The same numbers in memory with gaps."""
    wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
    wide[..., 0] = tensor
    return wide[..., 0]


# ---- collectives -------------------------------------------------------------------------------


def check_all_reduce(dtype, rank, size):
    for op in ops_of(dtype):
        for shape in ((5,), (3, 7), ()):
            x = data(rank, shape, dtype)
            dist.all_reduce(x, op)
            close(x, reduced(op, [data(r, shape, dtype) for r in range(size)]))


for each in FLOATS + INTEGERS + [torch.bool]:
    case(functools.partial(check_all_reduce, each)).__name__ = f"all_reduce_{str(each)[6:]}"


@case
def all_reduce_sizes(rank, size):
    for count in (0, 1, 7, 1023, 16383, 16384, 16385, 262147, 1 << 20):
        x = torch.arange(count, dtype=torch.float32) % 1000 + rank
        dist.all_reduce(x)
        same(x, torch.arange(count, dtype=torch.float32) % 1000 * size + size * (size - 1) / 2)


@case
def all_reduce_strides(rank, size):
    want = sum(data(r, (4, 6), torch.float32) for r in range(size))
    for x in (data(rank, (4, 6), torch.float32).t().contiguous().t(),
              strided(data(rank, (4, 6), torch.float32))):
        assert not x.is_contiguous()
        dist.all_reduce(x)
        same(x, want)
    whole = torch.zeros(10, 6)
    whole[3:7] = data(rank, (4, 6), torch.float32)
    dist.all_reduce(whole[3:7])
    same(whole[3:7], want)
    assert whole[:3].eq(0).all() and whole[7:].eq(0).all()


@case
def all_reduce_complex(rank, size):
    x = torch.complex(torch.ones(3) * rank, torch.ones(3))
    dist.all_reduce(x)
    same(x, torch.complex(torch.ones(3) * size * (size - 1) / 2, torch.ones(3) * size))


@case
def all_reduce_of_parameters(rank, size):
    x = torch.nn.Parameter(torch.full((3,), 1.0))
    dist.all_reduce(x)
    dist.all_reduce(strided(x.detach()))
    same(x.detach(), torch.full((3,), float(size)))


@case
def all_reduce_keeps_special_numbers(rank, size):
    x = torch.tensor([float("inf"), float("nan"), -0.0, 1e-45, 3e38])
    dist.all_reduce(x, ReduceOp.MAX)
    assert x[0] == float("inf") and x[1].isnan() and x[3] > 0
    x = torch.tensor([float("nan") if rank == size - 1 else 1.0, float("-inf")])
    dist.all_reduce(x)
    assert x[0].isnan() and x[1] == float("-inf")


@case
def all_reduce_coalesced(rank, size):
    for dtype in (torch.float32, torch.int64):
        xs = [data(rank, shape, dtype, 1) for shape in ((3,), (0,), (2, 5), (1000,))]
        xs.append(strided(data(rank, (4,), dtype, 1)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dist.all_reduce_coalesced(xs)
        for x in xs:
            same(x, sum(data(r, x.shape, dtype, 1) for r in range(size)))


@case
def coalescing_manager(rank, size):
    from torch.distributed.distributed_c10d import _coalescing_manager
    xs = [torch.full((n,), float(rank)) for n in (1, 4, 9)]
    with _coalescing_manager(device=torch.device("cpu")):
        for x in xs:
            dist.all_reduce(x)
    assert all(x.eq(size * (size - 1) / 2).all() for x in xs)
    outs = [torch.empty(size * n) for n in (2, 3)]
    with _coalescing_manager(device=torch.device("cpu")):
        for out in outs:
            dist.all_gather_into_tensor(out, torch.full((len(out) // size,), float(rank)))
    for out in outs:
        same(out, torch.arange(float(size)).repeat_interleave(len(out) // size))


@case
def broadcast(rank, size):
    for dtype in FLOATS + INTEGERS + [torch.bool] + OTHERS:
        for root in range(size):
            for shape in ((), (0,), (3, 5), (70000,)):
                x = data(rank, shape, dtype, root)
                dist.broadcast(x, root)
                same(x, data(root, shape, dtype, root))
    x = strided(data(rank, (4, 3), torch.float32))
    dist.broadcast(x, size - 1)
    same(x, data(size - 1, (4, 3), torch.float32))


@case
def all_gather(rank, size):
    for dtype in FLOATS + INTEGERS + [torch.bool] + OTHERS:
        for shape in ((), (0,), (3, 5), (40000,)):
            outs = [torch.zeros(shape, dtype=dtype) for _ in range(size)]
            dist.all_gather(outs, data(rank, shape, dtype))
            for r in range(size):
                same(outs[r], data(r, shape, dtype))


@case
def all_gather_into_views(rank, size):
    whole = torch.zeros(size, 6)
    dist.all_gather(list(whole.unbind()), data(rank, (6,), torch.float32))
    same(whole, torch.stack([data(r, (6,), torch.float32) for r in range(size)]))
    columns = torch.zeros(6, size)
    dist.all_gather(list(columns.unbind(1)), data(rank, (6,), torch.float32))
    same(columns.t(), whole)
    outs = [torch.zeros(6) for _ in range(size)]
    outs[rank] = whole[rank]  # in place
    dist.all_gather(outs, whole[rank])
    same(torch.stack(outs), whole)


@case
def all_gather_uneven(rank, size):
    for dtype in (torch.float32, torch.uint8):
        for rows in (list(range(1, size + 1)), [0] + [5] * (size - 1), [20000] + [1] * (size - 1)):
            outs = [torch.zeros(rows[r], 3, dtype=dtype) for r in range(size)]
            dist.all_gather(outs, data(rank, (rows[rank], 3), dtype))
            for r in range(size):
                same(outs[r], data(r, (rows[r], 3), dtype))


@case
def all_gather_into_tensor(rank, size):
    for dtype in (torch.float32, torch.bfloat16, torch.int8, torch.complex64):
        for shape in ((1,), (3, 5), (0,), (30000,)):
            want = torch.cat([data(r, shape, dtype) for r in range(size)])
            out = torch.zeros_like(want)
            dist.all_gather_into_tensor(out, data(rank, shape, dtype))
            same(out, want)
            out = torch.zeros(size, *shape, dtype=dtype)
            dist.all_gather_into_tensor(out, data(rank, shape, dtype))
            same(out.flatten(0, 1), want)
    out = torch.zeros(size * 4)
    out[rank * 4:rank * 4 + 4] = rank  # in place
    dist.all_gather_into_tensor(out, out[rank * 4:rank * 4 + 4])
    same(out, torch.arange(float(size)).repeat_interleave(4))
    out = strided(torch.zeros(size * 4))
    dist.all_gather_into_tensor(out, strided(torch.full((4,), float(rank))))
    same(out, torch.arange(float(size)).repeat_interleave(4))


@case
def all_gather_coalesced(rank, size):
    outs = [[torch.zeros(2), torch.zeros(3, 3)] for _ in range(size)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ins = [torch.full((2,), float(rank)), torch.full((3, 3), -float(rank))]
        dist.all_gather_coalesced(outs, ins)
    for r in range(size):
        same(outs[r][0], torch.full((2,), float(r)))
        same(outs[r][1], torch.full((3, 3), -float(r)))


@case
def gather_and_scatter(rank, size):
    for dtype in (torch.float32, torch.int16, torch.bool, torch.complex64):
        for root in range(size):
            for shape in ((2, 3), (0,), (20000,)):
                at_root = range(size if rank == root else 0)
                outs = [torch.zeros(shape, dtype=dtype) for _ in at_root]
                dist.gather(data(rank, shape, dtype), outs or None, root)
                for r in at_root:
                    same(outs[r], data(r, shape, dtype))
                out = torch.zeros(shape, dtype=dtype)
                dist.scatter(out, [data(r, shape, dtype, 7) for r in at_root] or None, root)
                same(out, data(rank, shape, dtype, 7))
    out = strided(torch.zeros(3))
    columns = list(torch.arange(3.0 * size).view(3, size).unbind(1))
    dist.scatter(out, columns if rank == 0 else None, 0)
    same(out.contiguous(), torch.arange(3.0) * size + rank)


@case
def reduce(rank, size):
    for dtype in (torch.float32, torch.float16, torch.int32, torch.bool):
        for op in ops_of(dtype):
            root = len(str(op)) % size
            x = data(rank, (3, 5), dtype)
            dist.reduce(x, root, op)
            if rank == root:
                close(x, reduced(op, [data(r, (3, 5), dtype) for r in range(size)]))
    for root in range(size):
        x = strided(data(rank, (20000,), torch.float64))
        dist.reduce(x, root)
        if rank == root:
            same(x, sum(data(r, (20000,), torch.float64) for r in range(size)))


@case
def reduce_scatter(rank, size):
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for op in ops_of(dtype):
            for shape in ((4,), (0,), (2, 9)):
                ins = [data(rank, shape, dtype, r) for r in range(size)]
                before = [x.clone() for x in ins]
                out = torch.zeros(shape, dtype=dtype)
                dist.reduce_scatter(out, ins, op)
                close(out, reduced(op, [data(r, shape, dtype, rank) for r in range(size)]))
                for x, y in zip(ins, before):
                    same(x, y)


@case
def reduce_scatter_uneven(rank, size):
    out = torch.zeros(rank + 1, 2)
    dist.reduce_scatter(out, [data(rank, (r + 1, 2), torch.float32, r) for r in range(size)])
    same(out, sum(data(r, (rank + 1, 2), torch.float32, rank) for r in range(size)))


@case
def reduce_scatter_tensor(rank, size):
    for op in (ReduceOp.SUM, ReduceOp.AVG, ReduceOp.MAX):
        for each in (1, 5, 30000):
            x = data(rank, (size * each,), torch.float32)
            out = torch.zeros(each)
            dist.reduce_scatter_tensor(out, x, op)
            want = reduced(op, [data(r, (size * each,), torch.float32) for r in range(size)])
            close(out, want[rank * each:rank * each + each])
    x = strided(data(rank, (size * 2,), torch.int64))
    out = strided(torch.zeros(2, dtype=torch.int64))
    dist.reduce_scatter_tensor(out, x, ReduceOp.BOR)
    want = reduced(ReduceOp.BOR, [data(r, (size * 2,), torch.int64) for r in range(size)])
    same(out.contiguous(), want[rank * 2:rank * 2 + 2])


@case
def all_to_all_single(rank, size):
    for dtype in (torch.float32, torch.int8, torch.complex64):
        for rows in (1, 3, 5000):
            x = torch.cat([data(rank, (rows, 2), dtype, to) for to in range(size)])
            out = torch.zeros_like(x)
            dist.all_to_all_single(out, x)
            same(out, torch.cat([data(r, (rows, 2), dtype, rank) for r in range(size)]))
    empty = torch.zeros(0, 3)
    dist.all_to_all_single(empty, torch.zeros(0, 3))


@case
def all_to_all_split_sizes(rank, size):
    def rows(a, b):  # from a to b
        return (a * 2 + b) % 4 * 3

    for dtype in (torch.float32, torch.uint8):
        x = torch.cat([data(rank, (rows(rank, to), 2), dtype, to) for to in range(size)])
        out = torch.zeros(sum(rows(r, rank) for r in range(size)), 2, dtype=dtype)
        dist.all_to_all_single(out, x, [rows(r, rank) for r in range(size)],
                               [rows(rank, to) for to in range(size)])
        same(out, torch.cat([data(r, (rows(r, rank), 2), dtype, rank) for r in range(size)]))
    # all to rank 0
    out = torch.zeros(2 * size if rank == 0 else 0)
    dist.all_to_all_single(out, torch.full((2,), float(rank)),
                           [2 if rank == 0 else 0] * size, [2] + [0] * (size - 1))
    if rank == 0:
        same(out, torch.arange(float(size)).repeat_interleave(2))


@case
def all_to_all_lists(rank, size):
    outs = [torch.zeros(r + rank + 1) for r in range(size)]
    dist.all_to_all(outs, [torch.full((rank + to + 1,), 10.0 * rank + to) for to in range(size)])
    for r in range(size):
        same(outs[r], torch.full((r + rank + 1,), 10.0 * r + rank))
    whole = torch.zeros(3, size)
    columns = (torch.arange(float(size)) + 10 * rank).repeat(3, 1).unbind(1)
    dist.all_to_all(list(whole.unbind(1)), list(columns))
    same(whole[0], torch.arange(float(size)) * 10 + rank)


@case
def barriers(rank, size):
    dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    time.sleep(0.02 * rank)
    dist.barrier()
    if MONITORED:
        dist.monitored_barrier(timeout=datetime.timedelta(seconds=30))


@case
def objects(rank, size):
    outs = [None] * size
    dist.all_gather_object(outs, {"rank": rank, "text": "x" * 1000 * rank})
    assert outs == [{"rank": r, "text": "x" * 1000 * r} for r in range(size)]
    things = ["a", [1, 2], {3: torch.ones(2)}] if rank == 1 else [None] * 3
    dist.broadcast_object_list(things, 1)
    assert things[:2] == ["a", [1, 2]] and things[2][3].eq(1).all()
    outs = [None] * size if rank == 0 else None
    dist.gather_object(rank * 10, outs, 0)
    assert rank != 0 or outs == [r * 10 for r in range(size)]
    out = [None]
    dist.scatter_object_list(out, list(range(size)) if rank == size - 1 else None, size - 1)
    assert out == [rank]


# ---- async, groups, errors -----------------------------------------------------------------------


@case
def async_in_order(rank, size):
    xs = [torch.full((1 + 1000 * i,), float(rank + i)) for i in range(20)]
    works = [dist.all_reduce(x, async_op=True) for x in xs]
    y = torch.full((2,), float(rank))
    dist.broadcast(y, 1)  # comes after them
    for i in reversed(range(20)):
        assert works[i].wait() and works[i].wait() and works[i].is_completed()
        assert xs[i].eq(size * (size - 1) / 2 + i * size).all()
    assert y.eq(1).all()


@case
def async_futures(rank, size):
    x = torch.full((3,), float(rank))
    future = dist.all_reduce(x, async_op=True).get_future()
    chained = future.then(lambda f: f.value()[0] * 2)
    same(chained.wait(), torch.full((3,), float(size * (size - 1))))
    assert future.wait()[0].data_ptr() == x.data_ptr()
    outs = [torch.zeros(2) for _ in range(size)]
    future = dist.all_gather(outs, torch.full((2,), float(rank)), async_op=True).get_future()
    same(torch.stack(future.wait()), torch.arange(float(size)).repeat_interleave(2).view(size, 2))


@case
def async_callback_runs_collectives(rank, size):
    x = torch.ones(2)
    gate = dist.all_reduce(torch.ones(1 << 20), async_op=True)

    def more(future):
        y = future.value()[0]
        return dist.all_reduce(y, async_op=True).get_future().wait()[0]

    future = dist.all_reduce(x, async_op=True).get_future().then(more)
    gate.wait()
    same(future.wait(), torch.full((2,), float(size * size)))
    dist.barrier()


@case
def async_keeps_tensors(rank, size):
    works = [dist.all_reduce(torch.ones(5000), async_op=True) for _ in range(30)]
    outs = torch.zeros(size * 3)
    works.append(dist.all_gather_into_tensor(outs, torch.full((3,), float(rank)), async_op=True))
    for work in works:
        work.wait()
    same(outs, torch.arange(float(size)).repeat_interleave(3))


@case
def async_of_every_kind(rank, size):
    x, y, z = torch.ones(4), torch.zeros(4 * size), torch.full((4 * size,), 2.0)
    outs = [torch.zeros(4) for _ in range(size)]
    part = torch.zeros(4)
    works = [
        dist.broadcast(x, 0, async_op=True),
        dist.reduce(x.clone(), 0, async_op=True),
        dist.all_gather(outs, x, async_op=True),
        dist.all_gather_into_tensor(y, x, async_op=True),
        dist.reduce_scatter_tensor(part, z, async_op=True),
        dist.all_to_all_single(z.clone(), z, async_op=True),
        dist.gather(x, outs if rank == 0 else None, 0, async_op=True),
        dist.scatter(x, outs if rank == 0 else None, 0, async_op=True),
        dist.barrier(async_op=True),
    ]
    for work in works:
        work.wait()
    assert y.eq(1).all() and part.eq(2 * size).all()


@case
def groups(rank, size):
    pair = dist.new_group([0, size - 1])
    rest = dist.new_group(list(range(1, size)))
    if rank in (0, size - 1):
        x = torch.full((3,), float(rank))
        dist.all_reduce(x, group=pair)
        assert x.eq(size - 1).all()
        dist.broadcast(x.fill_(rank), size - 1, group=pair)  # roots are ranks of the world
        assert x.eq(size - 1).all()
        assert dist.get_backend(pair) == "dp" and dist.get_world_size(pair) == 2
    if rank > 0:
        x = torch.full((3,), float(rank))
        dist.all_reduce(x, group=rest)
        assert x.eq(sum(range(1, size))).all()
        x = [torch.zeros(2) for _ in range(size - 1)]
        dist.all_gather(x, torch.full((2,), float(rank)), group=rest)
        assert [t[0].item() for t in x] == list(range(1, size))
        dist.destroy_process_group(rest)
    dist.barrier()


@case
def groups_run_side_by_side(rank, size):
    a, b = dist.new_group(), dist.new_group()
    for i in range(10):
        x, y = torch.ones(1000), torch.ones(1000)
        works = [dist.all_reduce(t, group=g, async_op=True) for t, g in ((x, a), (y, b))]
        if rank % 2:
            works.reverse()
        for work in works:
            work.wait()
        assert x.eq(size).all() and y.eq(size).all()


@case
def groups_come_and_go(rank, size):
    for i in range(70):
        group = dist.new_group()
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        assert x.eq(size).all()
        dist.destroy_process_group(group)


@case
def many_groups(rank, size):  # as of sharded and pipelined models
    groups = [dist.new_group() for i in range(80)]
    for i, group in enumerate(groups):
        x = torch.full((2,), float(i))
        dist.all_reduce(x, group=group)
        assert x.eq(i * size).all()
    for group in groups:
        dist.destroy_process_group(group)


@case
def group_of_one(rank, size):
    groups = [dist.new_group([r]) for r in range(size)]
    x = torch.full((3,), float(rank))
    dist.all_reduce(x, group=groups[rank])
    out = [torch.zeros(3)]
    dist.all_gather(out, x, group=groups[rank])
    dist.broadcast(x, rank, group=groups[rank])
    same(out[0], torch.full((3,), float(rank)))


@case
def wrong_calls_change_nothing(rank, size):
    x = torch.full((3,), float(rank))
    with raises("does not fit"):
        dist.all_gather_into_tensor(torch.zeros(3 * size + 1), x)
    with raises("does not fit"):
        dist.all_gather([torch.zeros(4)] * size, x)
    with raises("does not fit"):
        dist.reduce_scatter_tensor(torch.zeros(2), torch.zeros(2 * size + 1))
    with raises("split sizes"):
        dist.all_to_all_single(torch.zeros(size), torch.zeros(size), [1] * size, [2] * size)
    with raises("rows"):
        dist.all_to_all_single(torch.zeros(size + 1), torch.zeros(size + 1))
    with raises("not added"):
        dist.all_reduce(torch.zeros(3, dtype=torch.uint16))
    with raises("bits of"):
        dist.all_reduce(x.clone(), ReduceOp.BXOR)
    with raises("dense tensor"):
        dist.all_reduce(torch.eye(3).to_sparse())
    with raises("tensors is needed"):
        dist.all_gather([torch.zeros(3)] * (size + 1), x)
    with raises("", Exception):
        dist.broadcast(x, size)
    dist.all_reduce(x)
    assert x.eq(size * (size - 1) / 2).all()


@case
def functional_collectives(rank, size):
    import torch.distributed._functional_collectives as fun
    group = dist.group.WORLD
    same(fun.all_reduce(torch.full((3,), float(rank)), "sum", group) + 0,
         torch.full((3,), size * (size - 1) / 2))
    same(fun.all_gather_tensor(torch.full((2,), float(rank)), 0, group) + 0,
         torch.arange(float(size)).repeat_interleave(2))
    same(fun.reduce_scatter_tensor(torch.ones(2 * size), "sum", 0, group) + 0,
         torch.full((2,), float(size)))
    same(fun.broadcast(torch.full((2,), float(rank)), 1, group) + 0, torch.ones(2))


@case
def autograd_through_collectives(rank, size):
    import torch.distributed.nn.functional as fun
    x = torch.full((3,), float(rank + 1), requires_grad=True)
    (fun.all_reduce(x * 2) * (rank + 1)).sum().backward()
    same(x.grad, torch.full((3,), 2.0 * size * (size + 1) / 2))


@case
def device_mesh_and_dtensor(rank, size):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(8.0 * size).view(2 * size, 4)
    cut = distribute_tensor(whole, mesh, [Shard(0)])
    assert cut.to_local().shape == (2, 4)
    same(cut.full_tensor(), whole)
    same(cut.redistribute(mesh, [Shard(1)]).full_tensor(), whole)
    weight = distribute_tensor(torch.eye(4), mesh, [Replicate()])
    same((cut @ weight).full_tensor(), whole)
    assert cut.sum().full_tensor() == whole.sum()


@case
def profiler_names_them(rank, size):
    from torch.profiler import ProfilerActivity, profile
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        dist.all_reduce(torch.ones(10), async_op=True).wait()
        dist.barrier()
    names = {event.name for event in seen.events()}
    assert "dp:all_reduce" in names, names


# ---- messages ----------------------------------------------------------------------------------


@case
def send_and_recv(rank, size):
    for dtype in FLOATS + INTEGERS + [torch.bool] + OTHERS:
        for count in (0, 1, 7, 100000):
            if rank == 0:
                for to in range(1, size):
                    dist.send(data(to, (count,), dtype), to)
            else:
                x = torch.zeros(count, dtype=dtype)
                assert dist.recv(x, 0) == 0
                same(x, data(rank, (count,), dtype))
    if rank == 0:
        dist.send(strided(torch.arange(6.0)), 1)
    if rank == 1:
        x = torch.zeros(3, 2).t()
        dist.recv(x, 0)
        same(x.contiguous().flatten(), torch.arange(6.0))


@case
def isend_and_irecv_in_a_ring(rank, size):
    for count in (3, 200000):
        out, x = torch.zeros(count), torch.full((count,), float(rank))
        works = [dist.isend(x, (rank + 1) % size), dist.irecv(out, (rank - 1) % size)]
        for work in works:
            assert work.wait()
        assert out.eq((rank - 1) % size).all()


@case
def messages_have_tags(rank, size):
    if rank == 0:
        for tag in (7, 5, 5):
            dist.isend(torch.tensor([float(tag)]), 1, tag=tag)
            time.sleep(0.01)
        dist.send(torch.tensor([9.0]), 1, tag=9)
    elif rank == 1:
        outs = {tag: torch.zeros(1) for tag in (9, 5, 7)}
        works = [dist.irecv(out, 0, tag=tag) for tag, out in outs.items()]
        for work in works:
            work.wait()
        assert all(out == tag for tag, out in outs.items())
        dist.recv(outs[5], 0, tag=5)


@case
def recv_from_any(rank, size):
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            x = torch.zeros(2)
            source = dist.recv(x)
            assert x.eq(source).all()
            seen.add(source)
        assert seen == set(range(1, size))
    else:
        dist.send(torch.full((2,), float(rank)), 0)


@case
def batches_of_messages(rank, size):
    outs = [torch.zeros(4) for _ in range(size)]
    others = [r for r in range(size) if r != rank]
    ops = [dist.P2POp(dist.isend, torch.full((4,), 10.0 * rank + r), r) for r in others]
    ops += [dist.P2POp(dist.irecv, outs[r], r) for r in others]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for r in range(size):
        assert r == rank or outs[r].eq(10 * r + rank).all()


@case
def messages_pass_collectives(rank, size):
    group = dist.new_group([0, 1])
    if rank < 2:
        x, y = torch.ones(2), torch.zeros(2)
        work = dist.all_reduce(x, async_op=True, group=group) if rank == 0 else None
        dist.send(x.clone(), 1, group=group) if rank == 0 else dist.recv(y, 0, group=group)
        work = work or dist.all_reduce(x, async_op=True, group=group)
        work.wait()
    dist.barrier()


@case
def messages_that_do_not_fit(rank, size):
    with raises("dp") if rank < 2 else contextlib.nullcontext():
        if rank == 0:
            dist.send(torch.zeros(3), 1)
        if rank == 1:
            dist.recv(torch.zeros(4), 0)
    x = torch.full((2,), float(rank))
    if rank == 0:
        dist.send(x, 1)
    if rank == 1:
        dist.recv(x, 0)
        assert x.eq(0).all()


@case
def objects_as_messages(rank, size):
    things = [{"a": rank}, "text"] if rank == 0 else [None, None]
    if rank == 0:
        dist.send_object_list(things, 1)
    if rank == 1:
        dist.recv_object_list(things, 0)
        assert things == [{"a": 0}, "text"]


@case
def pipeline_schedule(rank, size):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    torch.manual_seed(6)
    layers = [torch.nn.Linear(8, 8) for _ in range(size)]
    x, y = torch.randn(4, 8), torch.randn(4, 8)
    want = torch.nn.Sequential(*layers)(x)
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
    if rank == 0:
        schedule.step(x)
    elif rank == size - 1:
        close(schedule.step(target=y), want)
    else:
        schedule.step()
    assert layers[rank].weight.grad is not None


# ---- training ----------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Convolution, buffers, tied parameters, and a branch that need not be used."""

    def __init__(self, norm=True):
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(4) if norm else torch.nn.Identity()
        self.a, self.b, self.tied = (torch.nn.Linear(64, 64) for _ in range(3))
        self.tied.weight = self.a.weight
        self.head = torch.nn.Linear(64, 5)

    def forward(self, x, branch=True):
        x = torch.relu(self.norm(self.conv(x))).mean(1).flatten(1)
        x = torch.relu(self.tied(self.a(x)))
        return self.head(torch.relu(self.b(x)) if branch else x)


def batch(rank, step, rows=6):
    random = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(rows, 1, 8, 8, generator=random), torch.randint(5, (rows,), generator=random)


def loss_of(model, rank, step, branch=True):
    x, y = batch(rank, step)
    return torch.nn.functional.cross_entropy(model(x, branch), y)


def trained(size, steps, branch, every, make):
    """The same without processes: the mean of the gradients of all ranks' batches."""
    torch.manual_seed(3)
    net = Net(False)
    sgd = make(net.parameters())
    sgd.zero_grad()
    for step in range(steps):
        (sum(loss_of(net, r, step, branch(r, step)) for r in range(size)) / size).backward()
        if (step + 1) % every == 0:
            sgd.step()
            sgd.zero_grad()
    return net


def fit(rank, size, steps=4, branch=lambda rank, step: True, hook=None, every=1, tolerance=1e-5,
        make=None, optimizer=None, **how):
    torch.manual_seed(3 if rank == 0 else 4)  # all begin with those of rank 0
    net = Net(False)
    ddp = DDP(net, **how)
    if hook:
        hook(ddp)
    make = make or (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    sgd = (optimizer or make)(net.parameters())
    sgd.zero_grad()
    for step in range(steps):
        last = (step + 1) % every == 0
        with contextlib.nullcontext() if last else ddp.no_sync():
            loss_of(ddp, rank, step, branch(rank, step)).backward()
        if last:
            sgd.step()
            sgd.zero_grad()
    want = trained(size, steps, branch, every, make)
    for (name, got), other in zip(net.named_parameters(), want.parameters()):
        torch.testing.assert_close(got, other, rtol=tolerance, atol=tolerance,
                                   msg=lambda said: f"{name}: {said}")


case(functools.partial(fit)).__name__ = "ddp"
case(functools.partial(fit, gradient_as_bucket_view=True)).__name__ = "ddp_bucket_views"
case(functools.partial(fit, bucket_cap_mb=0.01, steps=6)).__name__ = "ddp_small_buckets"
case(functools.partial(fit, every=2, steps=6)).__name__ = "ddp_no_sync"
case(functools.partial(fit, every=2, steps=6, gradient_as_bucket_view=True)
     ).__name__ = "ddp_no_sync_bucket_views"
case(functools.partial(fit, static_graph=True, steps=5)).__name__ = "ddp_static_graph"
case(functools.partial(fit, find_unused_parameters=True, steps=6,
                       branch=lambda rank, step: (rank + step) % 2 == 0)
     ).__name__ = "ddp_unused_parameters"
case(functools.partial(fit, make=lambda p: torch.optim.Adam(p, 0.003))).__name__ = "ddp_adam"


def hooks():
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    return default_hooks, powerSGD_hook


def state_of(ddp):
    return hooks()[1].PowerSGDState(None, matrix_approximation_rank=64, start_powerSGD_iter=2,
                                    min_compression_rate=0.01)


case(functools.partial(fit, hook=lambda ddp: ddp.register_comm_hook(
    None, hooks()[0].allreduce_hook))).__name__ = "ddp_hook"
case(functools.partial(fit, tolerance=0.01, hook=lambda ddp: ddp.register_comm_hook(
    None, hooks()[0].fp16_compress_hook))).__name__ = "ddp_fp16_hook"
case(functools.partial(fit, tolerance=0.02, hook=lambda ddp: ddp.register_comm_hook(
    None, hooks()[0].bf16_compress_hook))).__name__ = "ddp_bf16_hook"
case(functools.partial(fit, tolerance=0.05, hook=lambda ddp: ddp.register_comm_hook(
    state_of(ddp), hooks()[1].powerSGD_hook))).__name__ = "ddp_powersgd_hook"


@case
def ddp_names_unused_parameters(rank, size):
    ddp = DDP(Net(False))
    loss_of(ddp, rank, 0, False).backward()
    with raises("find_unused_parameters"):
        loss_of(ddp, rank, 1, False).backward()


@case
def ddp_buffers(rank, size):
    ddp = DDP(Net(True))
    for step in range(3):
        loss_of(ddp, rank, step).backward()
    loss_of(ddp, rank, 3)
    mean = ddp.module.norm.running_mean.clone()
    ddp(batch(0, 9)[0])  # begins with those of rank 0
    alone = Net(True)
    alone.load_state_dict(ddp.module.state_dict())
    outs = [torch.zeros_like(mean) for _ in range(size)]
    dist.all_gather(outs, ddp.module.norm.running_mean)
    for out in outs:
        close(out, outs[0])


@case
def ddp_of_other_dtypes(rank, size):
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        torch.manual_seed(1)
        net = torch.nn.Linear(4, 3).to(dtype)
        ddp = DDP(net)
        ddp(torch.full((2, 4), rank + 1.0, dtype=dtype)).sum().backward()
        close(net.weight.grad, torch.full((3, 4), size + 1.0, dtype=dtype))
    mixed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 3).double())

    class Cast(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mixed

        def forward(self, x):
            return self.net[1](self.net[0](x).double())

    ddp = DDP(Cast())
    ddp(torch.ones(2, 4) * rank).sum().backward()
    outs = [None] * size
    dist.all_gather_object(outs, [p.grad for p in mixed.parameters()])
    for out in outs:
        for a, b in zip(out, outs[0]):
            same(a, b)


@case
def ddp_join(rank, size):
    from torch.distributed.algorithms.join import Join
    torch.manual_seed(5)
    ddp = DDP(torch.nn.Linear(3, 1, bias=False))
    sgd = torch.optim.SGD(ddp.parameters(), 0.01)
    with Join([ddp]):
        for _ in range(3 + 2 * rank):
            sgd.zero_grad()
            ddp(torch.ones(2, 3)).sum().backward()
            sgd.step()
    outs = [torch.zeros(1, 3) for _ in range(size)]
    dist.all_gather(outs, ddp.module.weight.detach())
    for out in outs:
        same(out, outs[0])


@case
def ddp_gradients_outlive_it(rank, size):
    group = dist.new_group()
    net = torch.nn.Linear(300, 300)
    ddp = DDP(net, process_group=group, gradient_as_bucket_view=True)
    ddp(torch.full((2, 300), rank * 1.0)).sum().backward()
    del ddp
    dist.destroy_process_group(group)
    assert net.weight.grad.eq(size - 1).all()


@case
def zero_redundancy_optimizer(rank, size):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    fit(rank, size, make=lambda p: torch.optim.Adam(p, 0.003),
        optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=0.003))


@case
def fully_shard(rank, size):
    from torch.distributed.fsdp import fully_shard as shard
    torch.manual_seed(3)
    net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    torch.manual_seed(3)
    want = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
    for layer in (net[0], net[2], net):
        shard(layer, mesh=dist.device_mesh.init_device_mesh("cpu", (size,)))
    sgd, other = torch.optim.SGD(net.parameters(), 0.1), torch.optim.SGD(want.parameters(), 0.1)
    for step in range(3):
        inputs = [batch(r, step)[0].flatten(1)[:, :8] for r in range(size)]
        net(inputs[rank]).square().mean().backward()
        (sum(want(x).square().mean() for x in inputs) / size).backward()
        for each in (sgd, other):
            each.step()
            each.zero_grad()
    for got, expected in zip(net.parameters(), want.parameters()):
        torch.testing.assert_close(got.full_tensor(), expected, rtol=1e-5, atol=1e-6)


@case
def distributed_checkpoint(rank, size):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(4.0 * size)
    dcp.save({"w": distribute_tensor(whole, mesh, [Shard(0)]), "step": 7}, checkpoint_id=folder[0])
    state = {"w": distribute_tensor(torch.zeros(4 * size), mesh, [Shard(0)]), "step": 0}
    dcp.load(state, checkpoint_id=folder[0])
    same(state["w"].full_tensor(), whole)
    assert state["step"] == 7


@case
def workers_of_a_loader_fork(rank, size):
    loader = torch.utils.data.DataLoader(list(range(20)), batch_size=5, num_workers=1,
                                         multiprocessing_context="fork")
    for seen in loader:
        x = seen.sum()
        dist.all_reduce(x)
        assert x == seen.sum() * size


# ---- what fails --------------------------------------------------------------------------------


@world(3, status={1: 7})
def a_dead_rank_is_named(rank, size, start):
    start()
    dist.all_reduce(torch.ones(3))
    if rank == 1:
        os._exit(7)
    with raises("rank 1", dist.DistBackendError):
        dist.all_reduce(torch.ones(3))
    with raises("rank 1", dist.DistBackendError):
        dist.broadcast(torch.ones(3), 0)


@world(3, status={2: -signal.SIGKILL})
def a_killed_rank_is_named_by_futures(rank, size, start):
    start()
    dist.barrier()
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
    with raises("rank 2", RuntimeError):
        work.get_future().wait()
    with raises("rank 2", dist.DistBackendError):
        work.wait()


@world(2)
def a_late_rank_is_a_timeout(rank, size, start):
    start()
    dist.barrier()
    hasty = dist.new_group(timeout=datetime.timedelta(seconds=5))
    if rank == 1:
        time.sleep(15)
    with raises("rank 1", dist.DistBackendError) if rank == 0 else apart_it_may_be_through():
        dist.all_reduce(torch.ones(3), group=hasty)
    dist.all_reduce(torch.ones(3))  # another group does not suffer


@world(2)
def another_number_of_elements_is_named(rank, size, start):
    start()
    with raises("rank", dist.DistBackendError):
        dist.all_reduce(torch.ones(3 + rank))


@world(3)
def another_collective_is_named(rank, size, start):
    start()
    with raises("broadcast", dist.DistBackendError):
        dist.all_reduce(torch.ones(3)) if rank else dist.broadcast(torch.ones(3), 0)


@world(3)
def monitored_barrier_names_who_is_missing(rank, size, start):
    if not MONITORED:
        return
    start()
    if rank != 1:
        with raises("missing: 1", dist.DistBackendError):
            dist.monitored_barrier(timeout=datetime.timedelta(seconds=2))
    time.sleep(4 if rank == 1 else 0)
    x = torch.ones(2)
    dist.all_reduce(x)  # it harms no other call
    assert x.eq(3).all()


@world(2)
def abort_ends_who_waits(rank, size, start):
    start()
    dist.barrier()
    store = dist.distributed_c10d._get_default_store()
    if rank == 0:
        store.wait(["past the barrier"])
        work = dist.all_reduce(torch.ones(3), async_op=True)
        dist.group.WORLD._get_backend(torch.device("cpu")).abort()
        with raises("abort", dist.DistBackendError):
            work.wait()
        store.set("aborted", "yes")
    else:
        store.set("past the barrier", "yes")
        store.wait(["aborted"])
        with apart_it_may_be_through():
            dist.all_reduce(torch.ones(3))
    with raises("abort", dist.DistBackendError):
        dist.all_reduce(torch.ones(3))


@world(2)
def a_message_without_a_receiver_is_a_timeout(rank, size, start):
    start()
    dist.barrier()
    hasty = dist.new_group(timeout=datetime.timedelta(seconds=5))
    if rank == 0:
        with raises("tag 3", dist.DistBackendError):
            dist.send(torch.ones(3), 1, tag=3, group=hasty)
    dist.barrier()


@world(3, status={1: 7})
def a_message_from_a_dead_rank(rank, size, start):
    start()
    dist.barrier()
    if rank == 1:
        os._exit(7)
    with raises("rank 1", dist.DistBackendError):
        dist.recv(torch.ones(3), 1)


@world(2)
def a_group_that_is_destroyed_is_closed(rank, size, start):
    start()
    group = dist.new_group()
    backend = group._get_backend(torch.device("cpu"))
    dist.all_reduce(torch.ones(2), group=group)
    dist.destroy_process_group(group)
    with raises("closed"):
        backend.allreduce([torch.ones(2)]).wait()
    dist.all_reduce(torch.ones(2))


@world(2)
def who_does_not_come_is_a_timeout(rank, size, start):
    if rank == 0:
        with raises("dp_open", Exception):
            start(datetime.timedelta(seconds=3))


@world(2)
def begins_again(rank, size, start):
    for i in range(3):
        start(number=i)
        x = torch.ones(2)
        dist.all_reduce(x)
        assert x.eq(2).all()
        dist.destroy_process_group()


@world(2)
def ends_without_goodbye(rank, size, start):
    start()
    dist.all_reduce(torch.ones(2), async_op=True)


@world(2)
def beside_gloo(rank, size, start):
    start()
    gloo = dist.new_group(backend="gloo")
    x, y = torch.ones(2), torch.ones(2)
    dist.all_reduce(x)
    dist.all_reduce(y, group=gloo)
    same(x, y)


def sharded(kind, net, mesh):
    """The parameters, or the optimizer's state, of a model cut over the ranks."""
    adam = functools.partial(torch.optim.AdamW, lr=0.01)
    if kind == "ZeroRedundancyOptimizer":
        from torch.distributed.optim import ZeroRedundancyOptimizer
        model = DDP(net, process_group=mesh.get_group())
        return model, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW,
                                              process_group=mesh.get_group(), lr=0.01)
    if kind == "FullyShardedDataParallel":
        from torch.distributed.fsdp import FullyShardedDataParallel
        model = FullyShardedDataParallel(net, mesh.get_group(), device_id=torch.device("cpu"))
        return model, adam(model.parameters())
    from torch.distributed.fsdp import fully_shard
    for layer in (net[0], net[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh), adam(net.parameters())


@world(2)
def parameters_in_shards(rank, size, start):
    """Over gloo and over dp the same numbers, to the last bit: two ranks' sums have no order."""
    from torch.distributed.device_mesh import DeviceMesh
    start()
    gloo, found = dist.new_group(backend="gloo"), []
    meshes = [DeviceMesh.from_group(group, "cpu") for group in (gloo, dist.group.WORLD)]
    for kind in ("ZeroRedundancyOptimizer", "FullyShardedDataParallel", "fully_shard"):
        for mesh in meshes:
            torch.manual_seed(1)
            net = torch.nn.Sequential(torch.nn.Linear(17, 33), torch.nn.ReLU(),
                                      torch.nn.Linear(33, 4))
            model, optimizer = sharded(kind, net, mesh)
            torch.manual_seed(10 + rank)
            x, y = torch.randn(9, 17), torch.randint(4, (9,))
            losses = []
            for _ in range(5):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            found.append(losses)
        assert found[-2] == found[-1], (kind, found[-2:])


def another_torch():
    """Who loads it into another torch than it was built for is told of both."""
    import dp_c10d
    program = ("import sys, types\n"
               "built = types.ModuleType('dp_c10d._built')\n"
               "built.TORCH = '2.1.0'\n"
               "sys.modules['dp_c10d._built'] = built\n"
               "import dp_c10d\n")
    failed = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True,
                            check=False)
    said = f"dp_c10d was built with torch 2.1.0, and this is torch {torch.__version__}: "
    assert failed.returncode == 1 and said in failed.stderr, failed.stderr
    assert dp_c10d.TORCH == torch.__version__


def by_torchrun():
    """env://, and what a user's program looks like."""
    program = ("import dp_c10d, torch, torch.distributed as dist\n"
               "dist.init_process_group('dp')\n"
               "x = torch.ones(3) * (dist.get_rank() + 1)\n"
               "dist.all_reduce(x)\n"
               "assert x.eq(3).all()\n"
               "dist.destroy_process_group()\n")
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(program)
        file.flush()
        subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone",
                        "--nproc-per-node=2", file.name], check=True, timeout=200,
                       stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def by_store():
    """A store of the user's own; and a child of fork ends, with all that Python does at its end."""
    program = ("import os, sys, torch, dp_c10d, torch.distributed as dist\n"
               "rank, port = int(sys.argv[1]), int(sys.argv[2])\n"
               "store = dist.TCPStore('127.0.0.1', port, 2, rank == 0)\n"
               "dist.init_process_group('dp', store=store, rank=rank, world_size=2)\n"
               "x = torch.ones(3) * (rank + 1)\n"
               "dist.all_reduce(x)\n"
               "assert x.eq(3).all()\n"
               "child = os.fork()\n"
               "if child == 0: sys.exit(0)\n"
               "assert os.waitpid(child, 0)[1] == 0\n"
               "dist.barrier()\n")
    import socket
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    both = [subprocess.Popen([sys.executable, "-c", program, str(rank), str(port)])
            for rank in (0, 1)]
    assert [each.wait(200) for each in both] == [0, 0]


# ---- the runner --------------------------------------------------------------------------------


def begin(rank, size, file, timeout=datetime.timedelta(seconds=120), number=0):
    import dp_c10d  # noqa: F401
    if MACHINES > 1:
        os.environ["DP_MACHINE"] = f"machine {rank % MACHINES}"
    dist.init_process_group("dp", init_method=f"file://{file}{number}", rank=rank, world_size=size,
                            timeout=timeout)


def run_cases(rank, size, names, file, results):
    torch.set_num_threads(1)
    begin(rank, size, file)
    store = dist.FileStore(file + ".results", size)
    for fn in CASES:
        name = fn.__name__
        if name not in names:
            continue
        try:
            fn(rank, size)
            said = ""
        except BaseException:
            said = traceback.format_exc()
        store.set(f"{name}/{rank}", said)
        said = [store.get(f"{name}/{r}").decode() for r in range(size)]
        failed = [f"rank {r}: {text}" for r, text in enumerate(said) if text]
        if rank == 0:
            results.put((name, "".join(failed)))
        if failed:  # the others are somewhere else
            results.close()
            results.join_thread()
            os._exit(1)
    dist.destroy_process_group()


def run_world(rank, index, file, results):
    torch.set_num_threads(1)
    fn, size, _, status = WORLDS[index]
    try:
        fn(rank, size, functools.partial(begin, rank, size, file))
    except BaseException:
        results.put((rank, traceback.format_exc()))
        results.close()
        results.join_thread()
        os._exit(1)


class Report:
    passed = failed = 0

    def __call__(self, name, why=""):
        print(f"not ok - c10d: {name}" if why else f"ok - c10d: {name}", flush=True)
        if why:
            print("#   " + why.replace("\n", "\n#   "), flush=True)
        self.passed += not why
        self.failed += bool(why)


def join(processes, seconds):
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.1, until - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    return codes


def answer(results, processes, name, seconds=120):
    for _ in range(seconds):
        ended = [process.exitcode for process in processes if process.exitcode is not None]
        with contextlib.suppress(queue.Empty):
            return results.get(timeout=1)
        if ended:
            return name, f"processes have ended: {ended}"
    return name, "it hangs"


def all_cases(size, word, folder, report):
    names = [fn.__name__ for fn in CASES if word in fn.__name__]
    file, results = os.path.join(folder, f"cases{size}"), mp.get_context("spawn").Queue()
    processes = mp.spawn(run_cases, (size, names, file, results), size, join=False).processes
    while names:
        name, why = answer(results, processes, names[0])
        names.remove(name)
        report(f"{name} x{size}", why)
        if why:
            for process in processes:
                process.kill()
            for each in names:
                report(f"{each} x{size}", "not run")
            return
    if any(join(processes, 60)):
        report(f"processes end x{size}", "exit status not 0")


def all_worlds(word, folder, report):
    for index, (fn, size, seconds, status) in enumerate(WORLDS):
        if word not in fn.__name__:
            continue
        context = mp.get_context("spawn")
        results = context.Queue()
        file = os.path.join(folder, fn.__name__)
        processes = [context.Process(target=run_world, args=(r, index, file, results))
                     for r in range(size)]
        for process in processes:
            process.start()
        codes = join(processes, seconds + 60)
        want = [status.get(r, 0) for r in range(size)]
        why = "" if codes == want else f"exit codes {codes}\n"
        while not results.empty():
            why += "rank {}: {}".format(*results.get())
        report(fn.__name__, why)


def main():
    word = sys.argv[1] if len(sys.argv) > 1 else ""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("PYTHONWARNINGS", "ignore")
    report = Report()
    with tempfile.TemporaryDirectory() as folder:
        for size in (2, 3, 4):
            all_cases(size, word, folder, report)
        all_worlds(word, folder, report)
        for fn in (another_torch, by_torchrun, by_store):
            if word in fn.__name__:
                try:
                    fn()
                    report(fn.__name__)
                except Exception:
                    report(fn.__name__, traceback.format_exc())
    print(f"{report.passed} passed, {report.failed} failed")
    sys.exit(report.failed > 0)


if __name__ == "__main__":
    main()
