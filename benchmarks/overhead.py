"""What a round costs without local work, and how long a run takes to begin.

    python -m benchmarks.overhead > benchmarks/results/overhead.md

The first: a logistic regression, 10 of 100 clients who send back what they received, without
evaluation, checkpoints and progress bar, against an epoch of an empty LightningModule with
Lightning's CSVLogger. The second: from the command `python -m pfl fit` to the end of the first
round, against a Python that imports lightning.pytorch only; the two alternate.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.clock import Clock, seconds_of, stamps_of
from benchmarks.compare import machine
from datamodules import IID, SplitOwn, TensorDataModule
from models import LogisticRegression
from pfl import FederatedLoop
from pfl.algorithms import FedAvg
from pfl.clients import Clients

ROUNDS, REPETITIONS, STARTS = 200, 5, 5


def milliseconds(stamps: list[float]) -> float:
    """Median time of an epoch, without the first ones and the last."""
    return 1000 * statistics.median(seconds_of(stamps[:-1])[9:])


class Idle(FedAvg):
    """Clients that send back what they received."""

    def client_update(self, clients: Clients, w: Tensor) -> Tensor:
        return w.expand(len(clients), -1)


class Bare(pl.LightningModule):
    """One parameter, one sample, one logged number."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("loss", self.w, on_step=False, on_epoch=True, batch_size=1)
        return self.w

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ours() -> float:
    data = TensorDataModule(
        torch.zeros(3000, 1, 28, 28),
        torch.arange(3000) % 10,
        num_clients=100,
        partition=IID(),
        protocol=SplitOwn(test=0.0, validation=0.0),
    )
    loop = FederatedLoop(data, clients_per_round=10)
    return milliseconds(stamps_of(Idle(LogisticRegression(784)), loop, ROUNDS))


def bare(root: str) -> float:
    clock, loader = Clock(), DataLoader(TensorDataset(torch.zeros(1)))
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        logger=CSVLogger(root),
        callbacks=[clock],
        log_every_n_steps=1,
        enable_model_summary=False,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_checkpointing=False,
        limit_val_batches=0,
    )
    trainer.fit(Bare(), loader)
    return milliseconds(clock.stamps)


def seconds(*command: str) -> float:
    begun = time.perf_counter()
    subprocess.run([sys.executable, *command], check=True, capture_output=True, env={**os.environ})
    return time.perf_counter() - begun


def starts(root: str) -> dict[str, list[float]]:
    run = ["-m", "pfl", "fit", "--config", "configs/quickstart.yaml"]
    run += ["--trainer.max_epochs", "1", "--trainer.default_root_dir", root]
    run += ["--trainer.limit_val_batches", "0"]
    times: dict[str, list[float]] = {"run of one round": [], "import of Lightning": []}
    for _ in range(STARTS):
        times["run of one round"].append(seconds(*run))
        times["import of Lightning"].append(seconds("-c", "import lightning.pytorch"))
    return times


def row(name: str, times: list[float]) -> str:
    return f"| {name} | {statistics.median(times):.2f} | {min(times):.2f} | {max(times):.2f} |"


def main() -> None:
    with tempfile.TemporaryDirectory() as root:
        rounds: dict[str, list[float]] = {"round without local work": [], "bare epoch": []}
        for _ in range(REPETITIONS):
            rounds["round without local work"].append(ours())
            rounds["bare epoch"].append(bare(root))
        begun = starts(root)
    print(f"{machine()}\n")
    print("| milliseconds | median | min | max |\n|---|---|---|---|")
    print(*(row(*entry) for entry in rounds.items()), sep="\n")
    print("\n| seconds | median | min | max |\n|---|---|---|---|")
    print(*(row(*entry) for entry in begun.items()), sep="\n")


if __name__ == "__main__":
    main()
