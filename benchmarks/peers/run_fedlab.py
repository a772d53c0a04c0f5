"""FedLab: SGDSerialClientTrainer and SyncServerHandler in a StandalonePipeline.

env-fedlab/bin/python benchmarks/peers/run_fedlab.py TASK.npz
"""

import sys
import time
from pathlib import Path
from typing import Any

import torch
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, TensorDataset

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.peers.task import Task, report
from benchmarks.peers.with_torch import network, samples, score


class Data:
    """Each client's samples, in the form that FedLab's trainers ask for."""

    def __init__(self, task: Task) -> None:
        self.clients = [TensorDataset(*samples(task, i)) for i in range(len(task.owned))]

    def get_dataloader(self, client: int, batch_size: int) -> DataLoader:
        return DataLoader(self.clients[client], batch_size, shuffle=True)


class Server(SyncServerHandler):
    """Draws the task's cohorts."""

    cohorts: list[list[int]]

    def sample_clients(self) -> list[int]:
        return self.cohorts[self.round]


class Pipeline(StandalonePipeline):
    """Notes the time where FedLab would evaluate."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.stamps = [time.perf_counter()]

    def evaluate(self) -> None:
        self.stamps.append(time.perf_counter())


def main() -> None:
    task = Task.load(sys.argv[1])
    torch.manual_seed(0)
    share = task.cohorts.shape[1] / len(task.owned)
    server = Server(network(task), global_round=len(task.cohorts), sample_ratio=share)
    server.cohorts = task.cohorts.tolist()
    trainer = SGDSerialClientTrainer(network(task), num_clients=len(task.owned))
    trainer.setup_dataset(Data(task))
    trainer.setup_optim(task.epochs, task.batch, task.rate)
    pipeline = Pipeline(server, trainer)
    pipeline.main()
    report(pipeline.stamps, *score(server.model, task), packages=["fedlab", "torch"])


if __name__ == "__main__":
    main()
