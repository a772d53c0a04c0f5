"""What clients remember, for cohorts of 10,000: time to write and read rows, and whole rounds.

    python -m benchmarks.store > benchmarks/results/store.md

A client's row is 7,850 floats (logistic regression on 28x28 pixels), 10,000 rows are 314 MB. In
whole rounds every one of 10,000 clients makes one local epoch of one batch of 5 samples.
"""

import platform
import statistics
import time
from typing import Any

import numpy as np
import torch

from benchmarks.clock import seconds_of, stamps_of
from datamodules import IID, TensorDataModule
from models import LogisticRegression
from pfl import FederatedLoop
from pfl.algorithms import FedCLUP, FedSLR, LocalTrain
from pfl.clients.store import ClientStore

CLIENTS, WIDTH, DENSITY, REPEATS, ROUNDS = 10_000, 7_850, 0.05, 3, 2
CHUNK = 1_000  # rows that are written and read together
KINDS: dict[str, tuple[int | None, dict[str, Any]]] = {
    "whole rows, memory": (None, {}),
    "whole rows, file": (0, {}),
    "bfloat16, memory": (None, {"dtype": torch.bfloat16}),
    "sparse rows (5%), memory": (None, {"sparse": True}),
    "sparse rows (5%), file": (0, {"sparse": True}),
}
METHODS = {"LocalTrain": LocalTrain, "FedCLUP": FedCLUP, "FedSLR": FedSLR}


def copies(width: int) -> None:
    """Prints how long rows of a width take."""
    rows = torch.randn(CLIENTS, width, generator=torch.Generator().manual_seed(0))
    kept = torch.rand(CLIENTS, width, generator=torch.Generator().manual_seed(1)) < DENSITY
    chunks = np.random.default_rng(0).permutation(CLIENTS).reshape(-1, CHUNK)
    for kind, (memory, options) in KINDS.items():
        values = rows * kept if "sparse" in kind else rows
        store = ClientStore(CLIENTS, memory=memory)
        store.declare("w", torch.zeros(width), **options)
        times: dict[str, list[float]] = {"write": [], "read": []}
        for _ in range(REPEATS + 1):
            begin = time.perf_counter()
            for ids in chunks:
                store.write("w", ids, values[:CHUNK])
            middle = time.perf_counter()
            for ids in chunks:
                store.read("w", ids)
            times["write"].append(1000 * (middle - begin))
            times["read"].append(1000 * (time.perf_counter() - middle))
        write, read = (statistics.median(times[what][1:]) for what in ("write", "read"))
        taken = sum(store.tiers.used.values()) / 1e6
        print(f"| {width:,} | {kind} | {write:.1f} | {read:.1f} | {taken:,.1f} |")


def round_of(method: str, memory: float | None) -> None:
    """Prints how long a round of all clients takes."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5 * CLIENTS, WIDTH // 10 - 1, generator=generator)
    targets = torch.randint(10, (5 * CLIENTS,), generator=generator)
    data = TensorDataModule(inputs, targets, num_clients=CLIENTS, partition=IID())
    algorithm = METHODS[method](LogisticRegression(WIDTH // 10 - 1, 10), lr=0.05, batch_size=5)
    loop = FederatedLoop(data, clients_at_once=CHUNK, state_memory=memory, evaluate=())
    stamps = stamps_of(algorithm, loop, ROUNDS)
    used = {tier: f"{n / 1e6:,.0f}" for tier, n in algorithm.store.tiers.used.items()}
    seconds = statistics.median(seconds_of(stamps))
    print(f"| {method} | {memory} | {seconds:.2f} | {used['memory']} | {used['file']} |")


def main() -> None:
    device = platform.processor() or platform.machine()
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} thread(s), {device}\n")
    print(f"{CLIENTS:,} clients, {CHUNK:,} at a time; the first pass is not counted.\n")
    print("| width | stored as | write, ms | read, ms | MB |\n|---|---|---|---|---|")
    for width in (10, 650, WIDTH):
        copies(width)
    print("\n| method | `loop.state_memory`, GiB | round, s | memory, MB | file, MB |")
    print("|---|---|---|---|---|")
    for method in METHODS:
        for memory in (None, 0.1):
            round_of(method, memory)


if __name__ == "__main__":
    main()
