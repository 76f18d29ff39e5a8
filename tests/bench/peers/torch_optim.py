"""torch_optim.py - steps of torch's optimizers, for the driver in bench.c.

    torch_optim.py

Says "ready" and torch's version; then, for each line "RULE COUNT STEPS" on the standard input,
steps COUNT floats STEPS times, and answers with the nanoseconds that one step took. Of the ways that
this torch has (fused, foreach, one parameter after another) the fastest one counts: each was tried
three times at first."""

import sys
import time

import torch

OPTIONS = [{"fused": True}, {"foreach": True}, {"foreach": False}, {}]


def make(rule, count, options):
    params = [torch.ones(count - 1000, requires_grad=True), torch.ones(1000, requires_grad=True)]
    for p in params:
        p.grad = torch.ones_like(p)
    if rule == "adamw":
        optimizer = torch.optim.AdamW(params, lr=1e-6, weight_decay=0.1, **options)
    else:
        optimizer = torch.optim.SGD(params, lr=1e-6, momentum=0.9, **options)

    def step():
        start = time.monotonic_ns()
        if rule.endswith("clipped"):
            torch.nn.utils.clip_grad_norm_(params, 1)
        optimizer.step()
        return time.monotonic_ns() - start

    return step


def fastest(rule, count):
    best = None
    for options in OPTIONS:
        try:
            step = make(rule, count, options)
            step()
            spent = min(step() for _ in range(3))
        except (TypeError, RuntimeError):  # this torch has no such way
            continue
        if best is None or spent < best[0]:
            best = spent, step
    return best[1]


last = None
print(f"ready torch {torch.__version__}", flush=True)
for request in sys.stdin:
    rule, count, steps = request.split()
    if last is None or last[0] != rule:
        last = None
        last = rule, fastest(rule, int(count))
    spent = sum(last[1]() for _ in range(int(steps)))
    print(f"{spent / int(steps):.1f}", flush=True)
