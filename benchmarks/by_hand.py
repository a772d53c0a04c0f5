"""Rounds of one workload by PyTorch alone, written by hand.

    python -m benchmarks.by_hand SIDE TASK.npz

SIDE is `plain` (a copy of the network and a torch.optim.SGD for each client) or `flat` (parameters
and gradients are views of two vectors; only PyTorch itself allocates in the loop).
"""

import copy
import sys
import time

import torch
from torch import Tensor, nn

from benchmarks.peers.task import Task, report
from benchmarks.peers.with_torch import network, samples, score, train


def plain(task: Task) -> tuple[nn.Module, list[float]]:
    """A copy of the network and an optimizer for each client."""
    module, stamps = network(task), [time.perf_counter()]
    for cohort in task.cohorts.tolist():
        mean = [torch.zeros_like(p) for p in module.parameters()]
        count = sum(len(task.owned[client]) for client in cohort)
        for client in cohort:
            own = copy.deepcopy(module)
            train(own, task, *samples(task, client))
            share = len(task.owned[client]) / count
            for total, p in zip(mean, own.parameters(), strict=True):
                total += share * p.detach()
        with torch.no_grad():
            for p, total in zip(module.parameters(), mean, strict=True):
                p.copy_(total)
        stamps.append(time.perf_counter())
    return module, stamps


def flat(task: Task) -> tuple[nn.Module, list[float]]:
    """One network whose parameters and gradients are views of two vectors."""
    module = network(task)
    w, g = flattened(module)
    start, total = w.clone(), torch.zeros_like(w)
    inputs, targets = torch.from_numpy(task.inputs), torch.from_numpy(task.targets)
    owned = [torch.from_numpy(own) for own in task.owned]
    x, y = inputs[: task.batch].clone(), targets[: task.batch].clone()
    orders = [torch.empty(len(own), dtype=torch.int64) for own in owned]
    stamps = [time.perf_counter()]
    for cohort in task.cohorts.tolist():
        total.zero_()
        count = sum(len(owned[client]) for client in cohort)
        for client in cohort:
            w.copy_(start)
            order = orders[client]
            for _ in range(task.epochs):
                torch.randperm(len(order), out=order)
                for chosen in owned[client][order].split(task.batch):
                    n = len(chosen)  # the last batch of an epoch may be smaller
                    torch.index_select(inputs, 0, chosen, out=x[:n])
                    torch.index_select(targets, 0, chosen, out=y[:n])
                    g.zero_()
                    nn.functional.cross_entropy(module(x[:n]), y[:n]).backward()
                    w.sub_(g, alpha=task.rate)
            total.add_(w, alpha=len(order) / count)
        start.copy_(total)
        stamps.append(time.perf_counter())
    w.copy_(start)
    return module, stamps


def flattened(module: nn.Module) -> tuple[Tensor, Tensor]:
    """Make a module's parameters and gradients views of two vectors, and return these."""
    parameters = list(module.parameters())
    w = torch.cat([p.detach().flatten() for p in parameters])
    g = torch.zeros_like(w)
    sizes = [p.numel() for p in parameters]
    for p, value, slope in zip(parameters, w.split(sizes), g.split(sizes), strict=True):
        p.data, p.grad = value.view_as(p), slope.view_as(p)
    return w, g


def main() -> None:
    side, path = sys.argv[1:]
    task = Task.load(path)
    torch.manual_seed(0)
    module, stamps = {"plain": plain, "flat": flat}[side](task)
    report(stamps, *score(module, task), packages=["torch"])


if __name__ == "__main__":
    main()
