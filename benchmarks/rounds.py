"""Rounds of one workload by this framework: the Trainer with its CSV files, FederatedLoop, ledger.

    python benchmarks/rounds.py TASK.npz [PROCESSES]

`benchmarks/compare.py` writes the tasks, runs everybody in turn and makes the table.
"""

import os
import sys
import tempfile

from torch import nn

from benchmarks.clock import Clock
from benchmarks.peers.task import Task, report
from benchmarks.peers.with_torch import network, score
from benchmarks.workloads import WORKLOADS
from pfl import Trainer
from pfl.algorithms import FedAvg


def run(task: Task, processes: int) -> tuple[nn.Module, list[float]]:
    """The trained network and the times."""
    clock, module = Clock(), network(task)
    with tempfile.TemporaryDirectory() as root:
        trainer = Trainer(
            max_epochs=len(task.cohorts),
            accelerator="cpu",
            devices=processes,
            strategy="auto" if processes == 1 else "client_parallel",
            default_root_dir=root,
            callbacks=[clock],
            enable_progress_bar=False,
            enable_checkpointing=False,
            limit_val_batches=0,
        )
        method = FedAvg(module, lr=task.rate, local_epochs=task.epochs, batch_size=task.batch)
        trainer.fit(method, datamodule=WORKLOADS[task.key].loop())
    return module, clock.stamps


def main() -> None:
    task = Task.load(sys.argv[1])
    module, stamps = run(task, int(sys.argv[2]) if sys.argv[2:] else 1)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        report(stamps, *score(module, task), packages=["lightning", "torch"])


if __name__ == "__main__":
    main()
