"""Set-up, rounds and memory by the size of the population, each case in a process of its own.

    python -m benchmarks.scale > benchmarks/results/scale.md

Up to 10,000 clients have 30 images each, dealt uniformly; 1,000,000 hold 30 each of 60,000 images
that they share (`Sampled`). A round is one local epoch of logistic regression on 28x28 images of
one byte a pixel (7,850 parameters), batch size 10, SGD, without evaluation, through the Trainer.
"""

import datetime
import json
import platform
import resource
import statistics
import subprocess
import sys
import time

import numpy as np
import torch

from benchmarks.clock import seconds_of, stamps_of
from datamodules import IID, Sampled, SplitOwn, TensorDataModule
from models import LogisticRegression
from pfl import FederatedLoop
from pfl.algorithms import FedAvg, LocalTrain

CASES = [  # clients, clients a round, method
    (100, 10, "FedAvg"),
    (10_000, 10, "FedAvg"),
    (1_000_000, 10, "FedAvg"),
    (10_000, 10_000, "FedAvg"),
    (1_000_000, 10_000, "FedAvg"),
    (1_000_000, 1_000, "FedAvg"),
    (1_000_000, 1_000, "LocalTrain"),
]
SIZE, SHARED, ROUNDS = 30, 60_000, 5


def peak() -> int:
    """The most memory that this process has held, in bytes."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def data(clients: int) -> TensorDataModule:
    """Images whose bytes carry no meaning: only time and memory are looked at."""
    samples = SIZE * clients if clients <= 10_000 else SHARED
    draws = np.random.default_rng(0).integers(0, 256, (samples, 1, 28, 28), np.uint8)
    return TensorDataModule(
        torch.from_numpy(draws),
        torch.arange(samples) % 10,
        num_clients=clients,
        partition=IID() if clients <= 10_000 else Sampled(SIZE),
        protocol=SplitOwn(),
    )


def measure(clients: int, cohort: int, method: str) -> dict[str, float | list[float]]:
    """One case: seconds of set-up, of every round but the first, and after the last; memory."""
    before, federated = peak(), data(clients)
    begun = time.perf_counter()
    federated.setup()
    setup = time.perf_counter() - begun
    network = LogisticRegression(784)
    algorithm = {"FedAvg": FedAvg, "LocalTrain": LocalTrain}[method]
    learner = algorithm(network, lr=0.01, local_epochs=1, batch_size=10)
    loop = FederatedLoop(federated, clients_per_round=cohort)
    stamps = stamps_of(learner, loop, ROUNDS + 1)
    end = time.perf_counter() - stamps[-1]
    return {
        "setup": setup,
        "rounds": seconds_of(stamps),
        "end": end,
        "memory": peak() - before - federated.samples.nbytes,
    }


def main() -> None:
    if sys.argv[1:]:
        print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])))
        return
    print(
        f"PyTorch {torch.__version__}, NumPy {np.__version__}, {torch.get_num_threads()} "
        f"thread(s), {platform.machine()}, {datetime.date.today()}\n"
    )
    print(
        "| clients | clients a round | method | set-up, s | round, s (min - max) | end of run, s "
        "| memory beyond the data, MB |\n|---|---|---|---|---|---|---|"
    )
    for clients, cohort, method in CASES:
        command = [sys.executable, "-m", "benchmarks.scale", str(clients), str(cohort), method]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        found = json.loads(output.splitlines()[-1])
        rounds = found["rounds"]
        print(
            f"| {clients:,} | {cohort:,} | {method} | {found['setup']:.2f} | "
            f"{statistics.median(rounds):.3f} ({min(rounds):.3f} - {max(rounds):.3f}) | "
            f"{found['end']:.2f} | {found['memory'] / 1e6:,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
