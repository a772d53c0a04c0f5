"""A round of every method beside one of FedAvg, on the workloads' networks and data.

    python -m benchmarks.methods > benchmarks/results/methods.md
    python -m benchmarks.methods W1 --turns 1 --methods FedAvg FedGH    # only these

Each run is compared with one of FedAvg right before it. Milliseconds are those of ten clients: a
method that needs all hundred in a round, or trains one model on the samples of all, counts a tenth.
The time of a gradient is that of a round over its sample gradients, of which some methods have more
than FedAvg, and others a number that they draw.

FedBN needs normalization layers, which the networks do not have. It gets one that normalizes the
image, and so does the FedAvg that it is compared with.
"""

import argparse
import statistics
from typing import Any

import lightning.pytorch as pl
from torch import nn

from benchmarks.clock import heading, seconds_of, stamps_of
from benchmarks.workloads import BATCH, RATE, WORKLOADS, Workload
from pfl import FederatedLoop, algorithms
from pfl.algorithms import FederatedAlgorithm
from pfl.errors import ConfigError

ARGUMENTS: dict[str, dict[str, Any]] = {
    "FedCLUP": {"penalty": 0.1, "server_step": "inverse_penalty"},
    "FedGH": {"server_batch_size": 32},
    "L2GD": {"local_epochs": 1},
}
NORMALIZED = {"FedBN"}
EVERYONE = {"CFL", "FedPD", "GlobalTrain", "L2GD"}
METHODS = sorted(set(algorithms.__all__) - {"FederatedAlgorithm"}, key=str.lower)


class Counter(pl.Callback):
    """How many sample gradients each round had."""

    def __init__(self) -> None:
        self.totals = [0.0]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedAlgorithm)
        self.totals.append(pl_module.progress.samples)

    def after_the_first(self) -> list[float]:
        """Of each round but the first."""
        return [b - a for a, b in zip(self.totals[1:], self.totals[2:], strict=False)]


def make(name: str, workload: Workload, normalized: bool) -> FederatedAlgorithm:
    """The method on the workload's network, normalized or as it is."""
    network = workload.make()
    if normalized:
        network = nn.Sequential(nn.GroupNorm(1, workload.shape[0]), network)
    settings = {"local_epochs": workload.epochs, "batch_size": BATCH, **ARGUMENTS.get(name, {})}
    method: FederatedAlgorithm = getattr(algorithms, name)(network, lr=RATE, **settings)
    return method


def measured(name: str, workload: Workload, normalized: bool) -> tuple[float, float]:
    """Milliseconds of a round, and those of a sample gradient; medians."""
    clients, counter = workload.clients if name in EVERYONE else workload.per_round, Counter()
    loop = FederatedLoop(workload.data(), clients_per_round=clients)
    method = make(name, workload, normalized)
    stamps = stamps_of(method, loop, workload.rounds + 1, callbacks=[counter])
    seconds, samples = seconds_of(stamps), counter.after_the_first()
    per_gradient = [s / n for s, n in zip(seconds, samples, strict=True)]
    share = workload.per_round / clients
    return 1e3 * share * statistics.median(seconds), 1e3 * statistics.median(per_gradient)


def row(key: str, name: str, turns: int) -> str:
    """A line of the table."""
    workload, normalized = WORKLOADS[key], name in NORMALIZED
    make(name, workload, normalized)
    times: list[float] = []
    ratios: tuple[list[float], list[float]] = ([], [])
    for _ in range(turns):
        base = measured("FedAvg", workload, normalized)
        own = measured(name, workload, normalized)
        times.append(own[0])
        for values, one, other in zip(ratios, own, base, strict=True):
            values.append(one / other)
    columns = [key, name, f"{statistics.median(times):,.1f}"]
    columns += [f"{statistics.median(r):.2f} ({min(r):.2f} - {max(r):.2f})" for r in ratios]
    return f"| {' | '.join(columns)} |"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", default=["W1", "W2", "W3"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    arguments = parser.parse_args()
    print(heading(arguments.turns))
    print(
        "| workload | method | ms a round of ten clients | to FedAvg (min - max) "
        "| a gradient, to FedAvg's (min - max) |\n|---|---|---|---|---|"
    )
    refused = []
    for key in arguments.workloads:
        for name in arguments.methods:
            try:
                print(row(key, name, arguments.turns), flush=True)
            except ConfigError as error:
                refused.append(f"{key}: {name} is left out. {error}")
    print("", *refused, sep="\n")


if __name__ == "__main__":
    main()
