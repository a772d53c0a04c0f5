"""What it costs to evaluate all hundred clients after every round, and what a plain loop takes.

    python -m benchmarks.evaluation > benchmarks/results/evaluation.md
    python -m benchmarks.evaluation W1        # only this one

The workloads' networks and data, a fifth of each client's samples held out. FedAvg has one model
for everyone, FedCLUP one for everyone and one for each client. By hand: client after client, its
model on all of its test samples at once, loss and accuracy.
"""

import copy
import statistics
import sys
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from benchmarks.clock import heading, medians, seconds_of, stamps_of
from benchmarks.workloads import BATCH, RATE, WORKLOADS, Workload
from datamodules import SplitOwn
from pfl import FederatedLoop
from pfl.algorithms import FedAvg, FedCLUP, FederatedAlgorithm

TURNS = 3


def loop(workload: Workload, evaluated: bool) -> FederatedLoop:
    """The workload's, with test samples."""
    data = workload.data()
    data.protocol = SplitOwn(test=0.2, validation=0.0)
    evaluate: tuple[Literal["test"], ...] = ("test",) if evaluated else ()
    return FederatedLoop(data, clients_per_round=workload.per_round, evaluate=evaluate)


def round_of(method: type[FederatedAlgorithm], workload: Workload, evaluated: bool) -> float:
    """Median milliseconds of a round."""
    settings: dict[str, Any] = {"penalty": 0.1} if method is FedCLUP else {}
    settings |= {"lr": RATE, "local_epochs": workload.epochs, "batch_size": BATCH}
    algorithm, rounds = method(workload.make(), **settings), workload.rounds + 1
    limit: dict[str, Any] = {"limit_val_batches": None} if evaluated else {}
    stamps = stamps_of(algorithm, loop(workload, evaluated), rounds, **limit)
    return 1000 * statistics.median(seconds_of(stamps))


def by_hand(workload: Workload, kinds: int) -> float:
    """Median milliseconds of a plain loop with as many models for every client."""
    made = loop(workload, True)
    made.setup()
    data, network = made.datamodule, workload.make().eval()
    own = [copy.deepcopy(network) for _ in range(workload.clients)]
    batches = [
        data.samples.gather(torch.from_numpy(data.partition.test[c]))
        for c in range(workload.clients)
    ]

    @torch.no_grad()
    def evaluate() -> None:
        for model, (inputs, targets) in zip(own, batches, strict=True):
            for one in (network, model)[:kinds]:
                outputs = one(inputs)
                nn.functional.cross_entropy(outputs, targets).item()
                (outputs.argmax(1) == targets).float().mean().item()

    return medians({"loop": evaluate}, workload.rounds)["loop"]


def main() -> None:
    print(heading(TURNS))
    print(
        "| workload | method | round, ms | with evaluation, ms | evaluation, ms | by hand, ms | "
        "by hand / ours |\n|---|---|---|---|---|---|---|"
    )
    for key in sys.argv[1:] or ["W1", "W2", "W3"]:
        workload = WORKLOADS[key]
        for kinds, method in enumerate((FedAvg, FedCLUP), 1):
            runs = (
                partial(round_of, method, workload, False),
                partial(round_of, method, workload, True),
                partial(by_hand, workload, kinds),
            )
            turns = np.array([[run() for run in runs] for _ in range(TURNS)])
            bare, evaluated, hand = np.median(turns, 0)
            own = np.median(turns[:, 1] - turns[:, 0])
            print(
                f"| {key} | {method.__name__} | {bare:,.1f} | {evaluated:,.1f} | {own:,.1f} | "
                f"{hand:,.1f} | {hand / own:.2f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
