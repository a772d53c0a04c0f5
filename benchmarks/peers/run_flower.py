"""Flower: FedAvg in run_simulation, on one actor with all cores or on one for each core.

env-flower/bin/python benchmarks/peers/run_flower.py TASK.npz ACTORS
"""

import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.peers.flower_client import client_app
from benchmarks.peers.task import Task, report
from benchmarks.peers.with_torch import network, score


class Strategy(FedAvg):
    """FedAvg that trains the task's cohorts and notes when rounds begin."""

    def __init__(self, task: Task) -> None:
        super().__init__(fraction_evaluate=0.0)
        self.cohorts = task.cohorts.tolist()
        self.stamps: list[float] = []

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        self.stamps.append(time.perf_counter())
        nodes, messages = list(grid.get_node_ids()), []
        for client in self.cohorts[server_round - 1]:
            own = ConfigRecord({"client": client, "path": sys.argv[1]})
            record = RecordDict({"arrays": arrays, "config": own})
            messages += self._construct_messages(record, [nodes[client]], "train")
        return messages


def main() -> None:
    task, actors = Task.load(sys.argv[1]), int(sys.argv[2])
    cores = len(os.sched_getaffinity(0))
    server_app = ServerApp()

    @server_app.main()
    def serve(grid: Grid, context: Context) -> None:
        module, strategy = network(task), Strategy(task)
        arrays = ArrayRecord(module.state_dict())
        result = strategy.start(grid, arrays, num_rounds=len(task.cohorts))
        stamps = [*strategy.stamps, time.perf_counter()]
        module.load_state_dict(result.arrays.to_torch_state_dict())
        report(stamps, *score(module, task), packages=["flwr", "ray", "torch"])

    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(task.owned),
        backend_config={
            "init_args": {"num_cpus": cores},
            "client_resources": {"num_cpus": cores / actors, "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    main()
