"""pfl-research: FederatedAveraging on SimulatedBackend, in one process or under torchrun.

    env-pfl_research/bin/python benchmarks/peers/run_pfl_research.py TASK.npz [cpu | cuda]
    env-pfl_research/bin/torchrun --nproc-per-node 2 benchmarks/peers/run_pfl_research.py TASK.npz

The samples are on the device before the first round, as in pfl-research's own benchmarks.
"""

import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

# `pfl` is pfl-research, but for the networks of this repository, which import its own package.
theirs = {name: sys.modules.pop(name) for name in [*sys.modules] if name.split(".")[0] == "pfl"}
sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.peers.task import Task, report  # noqa: E402
from benchmarks.peers.with_torch import network, peak_bytes, samples, score, wait_for  # noqa: E402

for name in [name for name in sys.modules if name.split(".")[0] == "pfl"]:
    del sys.modules[name]
sys.modules.update(theirs)
sys.path.pop(0)

DEVICE = sys.argv[2] if sys.argv[2:] else "cpu"
os.environ["PFL_PYTORCH_DEVICE"] = DEVICE  # else pfl-research takes a GPU if it sees one


class Network(nn.Module):
    """A network with the two functions that PyTorchModel asks for."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.body(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """When the first round began and when each ended."""

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        wait_for(DEVICE)
        self.stamps = [time.perf_counter()]
        return Metrics()

    def after_central_iteration(self, *args: object, **kwargs: object) -> tuple[bool, Metrics]:
        wait_for(DEVICE)
        self.stamps.append(time.perf_counter())
        return False, Metrics()


def main() -> None:
    task = Task.load(sys.argv[1])
    np.random.seed(0)
    module = Network(network(task)).to(DEVICE)
    pairs = [samples(task, client) for client in range(len(task.owned))]
    clients = [PyTorchTensorDataset((x.to(DEVICE), y.to(DEVICE))) for x, y in pairs]
    weighting = []
    if len({len(own) for own in task.owned}) > 1:
        weighting.append(WeightByDatapoints())
    order = iter(task.cohorts.flatten().tolist())
    data = FederatedDataset(clients.__getitem__, lambda: next(order))
    model = PyTorchModel(
        module,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
    )
    clock = Clock()
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=len(task.cohorts),
            evaluation_frequency=len(task.cohorts),  # only in the first round, which warms up
            train_cohort_size=task.cohorts.shape[1],
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data, postprocessors=weighting),
        model,
        NNTrainHyperParams(
            local_num_epochs=task.epochs,
            local_learning_rate=task.rate,
            local_batch_size=task.batch,
        ),
        callbacks=[clock],
        send_metrics_to_platform=False,
    )
    if os.environ.get("RANK", "0") == "0":
        peak = peak_bytes(DEVICE)
        scored = score(module.body, task)
        report(clock.stamps, *scored, packages=["pfl", "torch"], peak_bytes=peak)


if __name__ == "__main__":
    main()
