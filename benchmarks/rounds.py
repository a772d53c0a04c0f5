"""Rounds of one workload by this framework: the Trainer with its CSV files, FederatedLoop, ledger.

    python -m benchmarks.rounds TASK.npz [PROCESSES]

`benchmarks/compare.py` writes the tasks, runs everybody in turn and makes the table.
"""

import os
import sys

from torch import nn

from benchmarks.clock import stamps_of
from benchmarks.peers.task import Task, report
from benchmarks.peers.with_torch import network, score
from benchmarks.workloads import WORKLOADS
from pfl.algorithms import FedAvg


def run(task: Task, processes: int) -> tuple[nn.Module, list[float]]:
    """The trained network and the times."""
    module = network(task)
    method = FedAvg(module, lr=task.rate, local_epochs=task.epochs, batch_size=task.batch)
    return module, stamps_of(method, WORKLOADS[task.key].loop(task), len(task.cohorts), processes)


def main() -> None:
    task = Task.load(sys.argv[1])
    module, stamps = run(task, int(sys.argv[2]) if sys.argv[2:] else 1)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        report(stamps, *score(module, task), packages=["lightning", "torch"])


if __name__ == "__main__":
    main()
