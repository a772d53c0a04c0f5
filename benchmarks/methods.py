"""A round of every method beside one of FedAvg, on the workloads' networks and data.

    python benchmarks/methods.py > benchmarks/results/methods.md
    python benchmarks/methods.py W1        # only this one

Methods take turns, and each run is compared with the FedAvg of its turn. Milliseconds are those of
ten clients (FedPD trains all hundred in a round).
"""

import statistics
import sys
from typing import Any

from benchmarks.clock import heading, seconds_of, stamps_of
from benchmarks.workloads import BATCH, RATE, WORKLOADS, Workload
from pfl import FederatedLoop, algorithms

METHODS: dict[str, dict[str, Any]] = {
    "FedAvg": {},
    "FedProx": {},
    "LocalTrain": {},
    "FedCLUP": {"penalty": 0.1, "server_step": "inverse_penalty"},
    "FedSLR": {},
    "FedACS": {},
    "FedPD": {},
    "FedAgg": {},
    "GPGD": {},
    "LPGD": {},
}
TURNS = 3


def milliseconds(name: str, workload: Workload) -> float:
    """Median of the rounds but the first."""
    everyone = name == "FedPD"
    clients = workload.clients if everyone else workload.per_round
    settings = {"local_epochs": workload.epochs, "batch_size": BATCH, **METHODS[name]}
    method = getattr(algorithms, name)(workload.make(), lr=RATE, **settings)
    loop = FederatedLoop(workload.data(), clients_per_round=None if everyone else clients)
    seconds = statistics.median(seconds_of(stamps_of(method, loop, workload.rounds + 1)))
    return 1000 * seconds * workload.per_round / clients


def main() -> None:
    print(heading(TURNS))
    print(
        "| workload | method | ms a round of ten clients | to FedAvg (min - max) |\n"
        "|---|---|---|---|"
    )
    for key in sys.argv[1:] or ["W1", "W2", "W3"]:
        turns = [
            {name: milliseconds(name, WORKLOADS[key]) for name in METHODS} for _ in range(TURNS)
        ]
        for name in METHODS:
            ms = statistics.median(turn[name] for turn in turns)
            ratios = sorted(turn[name] / turn["FedAvg"] for turn in turns)
            middle = statistics.median(ratios)
            print(
                f"| {key} | {name} | {ms:,.1f} | {middle:.2f} ({ratios[0]:.2f} - "
                f"{ratios[-1]:.2f}) |",
                flush=True,
            )


if __name__ == "__main__":
    main()
