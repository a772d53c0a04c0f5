"""PFLlib: its server and clients of FedAvg, by its own `train`.

    PYTHONPATH=PFLlib/system python benchmarks/peers/run_pfllib.py TASK.npz [cpu | cuda]

PFLlib is no package: PYTHONPATH names the folder `system` of its repository (TsingZ0/PFLlib; read
at commit d832e76). It reads a client's file in every round; here it gets the arrays of the task
instead, of which it makes its tensors, and its DataLoader moves every batch to the device. Clients
test on the first third of their samples, as many as PFLlib's split of 75 to 25 would give them.
PFLlib drops the last batch of an epoch if it is smaller than the others. Rounds without evaluation
are `seconds`; `evaluated` are two more rounds with it, as PFLlib has it in every round.
"""

import random
import sys
import time
from argparse import Namespace
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
from flcore.clients.clientbase import Client
from flcore.servers.serveravg import FedAvg
from flcore.trainmodel.models import FedAvgCNN
from torch import nn
from utils import data_utils

sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.peers.task import Task, report
from benchmarks.peers.with_torch import copy_weights, network, peak_bytes, score, wait_for

NEVER = 10**9  # rounds between evaluations; the first round always has one

# The defaults of PFLlib's command line, system/main.py.
DEFAULTS = {
    "algorithm": "FedAvg",
    "auto_break": False,
    "batch_num_per_client": 2,
    "client_drop_rate": 0.0,
    "dataset": "MNIST",
    "dlg_eval": False,
    "dlg_gap": 100,
    "few_shot": 0,
    "fine_tuning_epoch_new": 0,
    "goal": "test",
    "learning_rate_decay": False,
    "learning_rate_decay_gamma": 0.99,
    "num_new_clients": 0,
    "random_join_ratio": False,
    "save_folder_name": "items",
    "send_slow_rate": 0.0,
    "time_select": False,
    "time_threthold": 10000,
    "top_cnt": 100,
    "train_slow_rate": 0.0,
}


class Server(FedAvg):
    """PFLlib's server, which draws the task's cohorts, notes the time and writes no files."""

    def __init__(self, args: Namespace, cohorts: list[list[int]]) -> None:
        super().__init__(args, times=0)
        self.cohorts = iter(cohorts)
        self.stamps: list[float] = []

    def select_clients(self) -> list[Client]:
        self.note()
        selected = [self.clients[client] for client in next(self.cohorts)]
        self.current_num_join_clients = len(selected)
        return selected

    def save_results(self) -> None:
        self.note()

    def save_global_model(self) -> None:
        pass

    def note(self) -> None:
        wait_for(self.device)
        self.stamps.append(time.perf_counter())


def module_of(task: Task) -> nn.Module:
    """PFLlib's own class where the task's network is its, else the task's."""
    if task.network != "FedAvgCNN":
        return network(task)
    first, *_, hidden, _, scores, _ = task.weights
    module = FedAvgCNN(first.shape[1], len(scores), hidden.shape[1])
    return copy_weights(module, task)


def run(task: Task, device: str, cohorts: list[list[int]], eval_gap: int) -> Server:
    """A server that has trained these cohorts."""
    module = module_of(task).to(device)
    args = Namespace(
        **DEFAULTS,
        model=module,
        device=device,
        num_classes=list(module.parameters())[-1].numel(),
        num_clients=len(task.owned),
        join_ratio=1.0,  # `select_clients` sets the number
        global_rounds=len(cohorts) - 1,  # PFLlib trains one more
        local_epochs=task.epochs,
        batch_size=task.batch,
        local_learning_rate=task.rate,
        eval_gap=eval_gap,
    )
    server = Server(args, cohorts)
    server.train()
    return server


def main() -> None:
    task = Task.load(sys.argv[1])
    device = sys.argv[2] if sys.argv[2:] else "cpu"
    np.random.seed(0)
    random.seed(0)

    def read_data(dataset: str, client: int, is_train: bool = True) -> dict[str, np.ndarray]:
        own = task.owned[client]
        if not is_train:
            own = own[: max(1, len(own) // 3)]
        return {"x": task.inputs[own], "y": task.targets[own]}

    data_utils.read_data = read_data
    cohorts = task.cohorts.tolist()
    with redirect_stdout(sys.stderr):
        server = run(task, device, cohorts, eval_gap=NEVER)
        peak = peak_bytes(device)
        evaluated = run(task, device, cohorts[:2], eval_gap=1)
    report(
        server.stamps,
        *score(server.global_model, task),
        packages=["torch"],
        evaluated=np.diff(evaluated.stamps).tolist(),
        peak_bytes=peak,
    )


if __name__ == "__main__":
    main()
