"""Settings of papers, momentum, Adam, dropout and BatchNorm, on W2 and W3 beside a loop by hand.

    python -m benchmarks.settings [REPEATS] > benchmarks/results/settings.md

Ours is a run of FedAvg; by hand is `benchmarks.by_hand`'s `plain` with the same network and
optimizer. Both have the same samples and cohorts, two threads, and take turns in one process. Where
other programs use the cores, compare processor seconds: by hand, one thread (they are its least).
"""

import copy
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median

import torch
from torch import nn

from benchmarks.clock import heading, seconds_of, stamps_of
from benchmarks.peers.task import Task
from benchmarks.peers.with_torch import samples
from benchmarks.workloads import BATCH, RATE, WORKLOADS
from pfl.algorithms import FedAvg

THREADS = 2
ROUNDS = {"W1": 20, "W2": 6, "W3": 2}
Optimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "momentum": partial(torch.optim.SGD, lr=RATE, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=RATE),
}
Now = Callable[[], float]
SETTINGS: tuple[str, ...] = ("plain", "momentum", "Adam", "dropout", "BatchNorm")


def network_of(key: str, setting: str) -> nn.Module:
    """A workload's network, with dropout after or BatchNorm before its hidden activations.

    Dropout follows the hidden linear layers only, as in most papers.
    """
    network = WORKLOADS[key].make()
    layers: list[nn.Module] = []
    last: nn.Module | None = None
    for layer in network.body:  # type: ignore[union-attr]
        if setting == "BatchNorm" and isinstance(layer, nn.ReLU):
            if isinstance(last, nn.Conv2d):
                layers.append(nn.BatchNorm2d(last.out_channels))
            elif isinstance(last, nn.Linear):
                layers.append(nn.BatchNorm1d(last.out_features))
        layers.append(layer)
        if setting == "dropout" and isinstance(layer, nn.ReLU) and isinstance(last, nn.Linear):
            layers.append(nn.Dropout(0.5))
        last = layer
    network.body = nn.Sequential(*layers)
    return network


def by_hand(network: nn.Module, task: Task, make: Optimizer, now: Now) -> list[float]:
    """Seconds of each round but the first, with a copy and an optimizer for each client."""
    module = copy.deepcopy(network)
    stamps = [now()]
    for cohort in task.cohorts.tolist():
        state = {
            k: torch.zeros_like(v, dtype=torch.float32) for k, v in module.state_dict().items()
        }
        for client in cohort:
            own = copy.deepcopy(module)
            inputs, targets = samples(task, client)
            optimizer = make(own.parameters())
            for _ in range(task.epochs):
                for chosen in torch.randperm(len(targets)).split(task.batch):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(own(inputs[chosen]), targets[chosen]).backward()
                    optimizer.step()
            for name, value in own.state_dict().items():
                state[name] += value / len(cohort)
        module.load_state_dict(state)
        stamps.append(now())
    return [end - begin for begin, end in itertools.pairwise(stamps)][1:]


def ours(
    network: nn.Module, key: str, task: Task, setting: str, now: Now
) -> tuple[list[float], str]:
    """Seconds of each round but the first of a run, and the engine it took."""
    work = WORKLOADS[key]
    method = FedAvg(
        copy.deepcopy(network),
        lr=RATE,
        local_epochs=work.epochs,
        batch_size=BATCH,
        optimizer=OPTIMIZERS.get(setting),
    )
    seconds = seconds_of(stamps_of(method, work.loop(task), ROUNDS[key] + 1, now=now))
    return seconds, method.oracle.engine.name


def measure(key: str, setting: str, repeats: int) -> str:
    """A row of the table."""
    torch.manual_seed(0)
    network = network_of(key, setting)
    task = WORKLOADS[key].task(key, ROUNDS[key])
    make = OPTIMIZERS.get(setting, partial(torch.optim.SGD, lr=RATE))
    rows: dict[str, list[float]] = {"wall": [], "hand wall": [], "busy": [], "hand busy": []}
    engine = ""
    for _ in range(repeats):
        for name, now in (("wall", time.perf_counter), ("busy", time.process_time)):
            torch.set_num_threads(THREADS)
            seconds, engine = ours(network, key, task, setting, now)
            rows[name].append(1000 * median(seconds))
            torch.set_num_threads(THREADS if name == "wall" else 1)
            rows[f"hand {name}"].append(1000 * median(by_hand(network, task, make, now)))
    ratios = []
    for name in ("wall", "busy"):
        pairs = zip(rows[f"hand {name}"], rows[name], strict=True)
        ratios.append(median(hand / own for hand, own in pairs))
    load = os.getloadavg()[0]
    cells = " | ".join(", ".join(f"{ms:.0f}" for ms in times) for times in rows.values())
    shown = " | ".join(f"{ratio:.2f}" for ratio in ratios)
    return f"| {key} | {setting} | {engine} | {cells} | {shown} | {load:.1f} |"


def main() -> None:
    repeats = 3
    keys = ["W2", "W3"]
    chosen = SETTINGS
    if len(sys.argv) > 1:
        repeats = int(sys.argv[1])
    if len(sys.argv) > 2:
        keys = sys.argv[2].split(",")
    if len(sys.argv) > 3:
        chosen = tuple(sys.argv[3].split(","))
    torch.set_num_threads(THREADS)
    print(heading(repeats))
    print("Ratios are medians over the turns; load is the machine's, with that of this process.\n")
    print(
        "| workload | setting | engine | ours, ms | by hand, ms | ours, busy | by hand, busy ",
        end="",
    )
    print("| ratio | busy ratio | load |")
    print(f"|{'---|' * 10}")
    for key in keys:
        for setting in chosen:
            print(measure(key, setting, repeats), flush=True)


if __name__ == "__main__":
    main()
