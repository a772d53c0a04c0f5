"""Where the time of local steps goes, and the share of the matrix-product rate that they reach.

    python -m benchmarks.shares > benchmarks/results/shares.md

For each workload: the local training of one round's clients on one core, as the framework groups
them; its operations in layers' products a second, as a share of what that core reaches with a large
matrix product in the same run; and its time by kind of operator (PyTorch's profiler).
"""

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.compare import machine
from benchmarks.gpu.work import products, rate
from benchmarks.workloads import BATCH, RATE, WORKLOADS
from pfl.clients import ClientData, Clients, LocalSchedule
from pfl.engines.batch import default_loss
from pfl.engines.local_step import Step
from pfl.engines.oracle import Oracle
from pfl.parameters import ParameterSpace

KINDS = {  # by words in the operators' names
    "products": ("mm", "convolution", "linear"),
    "gathering samples": ("index_select",),
    "pooling, activations": ("pool", "relu", "clamp_min", "threshold", "fill_", "zero_"),
    "normalization": ("norm",),
    "softmax and loss": ("softmax", "gather", "scatter", "nll", "mean", "exp", "sum", "neg"),
    "update": ("add_", "sub_", "mul_"),
}


def training(key: str) -> tuple[Callable[[], None], int]:
    """A function that trains a round's clients, and its operations in products."""
    workload = WORKLOADS[key]
    network, loop = workload.make(), workload.loop()
    data, space = ClientData(loop.datamodule), ParameterSpace(network)
    oracle = Oracle(network, space, default_loss)
    inputs, targets = data.gather(torch.arange(2), torch.float32, np.zeros(2, np.int64))
    oracle.inspect(inputs, targets)
    size = oracle.engine.group_size(workload.per_round, threads=1)

    def train() -> None:
        for group in Clients(loop.cohort(0), 0, data).groups(size):
            w = space.vector.detach().repeat(len(group), 1)
            oracle.descend(w, group.step_blocks(LocalSchedule(BATCH, workload.epochs)), Step(RATE))

    samples = workload.per_round * workload.samples * workload.epochs
    return train, samples * products(workload.make(), workload.shape)


def by_kind(train: Callable[[], None]) -> tuple[dict[str, float], float]:
    """Seconds by kind of operator, and all in all."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        begun = time.perf_counter()
        train()
        whole = time.perf_counter() - begun
    seconds = dict.fromkeys([*KINDS, "other operators"], 0.0)
    for event in found.key_averages():
        kinds = (kind for kind, words in KINDS.items() if any(w in event.key for w in words))
        seconds[next(kinds, "other operators")] += event.self_cpu_time_total / 1e6
    return seconds, whole


def main() -> None:
    torch.set_num_threads(1)
    print(f"{machine()}\n")
    names = [*KINDS, "other operators", "between operators"]
    print("| workload | share of the rate |", " | ".join(names), "|")
    print("|---|---|" + "---|" * len(names))
    for key, workload in WORKLOADS.items():
        train, operations = training(key)
        train()
        times = []
        for _ in range(3 if key != "W5" else 1):
            begun = time.perf_counter()
            train()
            times.append(time.perf_counter() - begun)
        share = operations / min(times) / rate(torch.device("cpu"), torch.float32)
        seconds, whole = by_kind(train)
        seconds["between operators"] = max(0.0, whole - sum(seconds.values()))
        cells = " | ".join(f"{seconds[name] / whole:.0%}" for name in names)
        print(f"| {key}: {workload.title} | {share:.0%} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
