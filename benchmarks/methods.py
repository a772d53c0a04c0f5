"""A round of every method beside one of FedAvg, on the workloads' networks and data.

    python benchmarks/methods.py > benchmarks/results/methods.md
    python benchmarks/methods.py W1 --turns 1 --methods FedAvg FedGH    # only these

Methods take turns, and each run is compared with the FedAvg of its turn. Milliseconds are those of
ten clients: a method that needs all hundred in a round, or trains one model on the samples of all,
counts a tenth. The time of a gradient is that of a round over its sample gradients, of which some
methods have more than FedAvg, and others a number that they draw.

FedBN needs normalization layers, which the networks do not have. It gets one that normalizes the
image, and so does the FedAvg beside it.
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
NORMALIZED = {"FedBN": "FedAvg, normalized"}
"""Methods on a network with a normalization layer, each with its FedAvg."""

EVERYONE = {"FedPD", "GlobalTrain", "L2GD"}
EXPORTED = sorted(set(algorithms.__all__) - {"FedAvg", "FederatedAlgorithm"}, key=str.lower)
METHODS = ["FedAvg", *NORMALIZED.values(), *EXPORTED]


class Counter(pl.Callback):
    """How many sample gradients each round had."""

    def __init__(self) -> None:
        self.totals = [0.0]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        assert isinstance(pl_module, FederatedAlgorithm)
        self.totals.append(pl_module.samples_seen)

    def after_the_first(self) -> list[float]:
        """Of each round but the first."""
        return [b - a for a, b in zip(self.totals[1:], self.totals[2:], strict=False)]


def make(name: str, workload: Workload) -> FederatedAlgorithm:
    """The method on the workload's network."""
    network = workload.make()
    if name in (*NORMALIZED, *NORMALIZED.values()):
        network = nn.Sequential(nn.GroupNorm(1, workload.shape[0]), network)
    settings = {"local_epochs": workload.epochs, "batch_size": BATCH, **ARGUMENTS.get(name, {})}
    kind = getattr(algorithms, name.partition(",")[0])
    method: FederatedAlgorithm = kind(network, lr=RATE, **settings)
    return method


def measured(name: str, workload: Workload) -> tuple[float, float]:
    """Milliseconds of a round, and nanoseconds of a sample gradient; medians."""
    clients, counter = workload.clients if name in EVERYONE else workload.per_round, Counter()
    loop = FederatedLoop(workload.data(), clients_per_round=clients)
    method = make(name, workload)
    stamps = stamps_of(method, loop, workload.rounds + 1, callbacks=[counter])
    seconds, samples = seconds_of(stamps), counter.after_the_first()
    per_gradient = [s / n for s, n in zip(seconds, samples, strict=True)]
    share = workload.per_round / clients
    return 1e3 * share * statistics.median(seconds), 1e9 * statistics.median(per_gradient)


def ratios(turns: list[dict[str, tuple[float, float]]], name: str, column: int) -> str:
    """The median and the range of a method's numbers over those of FedAvg in the same turn."""
    base = NORMALIZED.get(name, "FedAvg")
    values = sorted(turn[name][column] / turn[base][column] for turn in turns)
    return f"{statistics.median(values):.2f} ({values[0]:.2f} - {values[-1]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workloads", nargs="*", default=["W1", "W2", "W3"])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    arguments = parser.parse_args()
    print(heading(arguments.turns))
    print(
        "| workload | method | ms a round of ten clients | to FedAvg (min - max) "
        "| a gradient to FedAvg's (min - max) |\n|---|---|---|---|---|"
    )
    refused = []
    for key in arguments.workloads:
        workload, names = WORKLOADS[key], []
        for name in dict.fromkeys(["FedAvg", *arguments.methods]):
            try:
                make(name, workload)
                names += [NORMALIZED[name], name] if name in NORMALIZED else [name]
            except ConfigError as error:
                refused.append(f"{key}: {name} is left out. {error}")
        names = list(dict.fromkeys(names))
        turns = [{name: measured(name, workload) for name in names} for _ in range(arguments.turns)]
        for name in names:
            ms = statistics.median(turn[name][0] for turn in turns)
            columns = [key, name, f"{ms:,.1f}", ratios(turns, name, 0), ratios(turns, name, 1)]
            print(f"| {' | '.join(columns)} |", flush=True)
    print("\n" + "\n".join(refused))


if __name__ == "__main__":
    main()
