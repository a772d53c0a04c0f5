"""The code of APPLE's authors: local training of core models and vectors, with all clients a round.

Their mixture of layers has two layers with tanh in place of the four of their network. Replaced are
PySyft, the loaders, and SGD, which has no momentum here.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    CLASSES,
    EPOCHS,
    EVERYONE,
    FEATURES,
    HIDDEN,
    RATE,
    ROUNDS,
    SIZES,
    Epochs,
    Iterates,
    Problem,
    absent,
    main,
    tensors,
    vector,
)


class Net(nn.Module):
    """A core model, which the server sends and gets."""

    def __init__(self, in_channels: int, num_classes: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(FEATURES, HIDDEN)
        self.fc2 = nn.Linear(HIDDEN, CLASSES)

    def get(self) -> None: ...

    def send(self, to: object) -> None: ...


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The clients' models and their vectors."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(checkout))
    absent("syft", "utils.data_loader", "utils.utils")
    networks: Any = importlib.import_module("utils.models")
    there: Any = importlib.import_module("train_APPLE")
    torch.autograd.set_detect_anomaly(False)
    networks.Net = Net

    def plain_sgd(groups: Any, lr: float, momentum: float) -> torch.optim.SGD:
        return torch.optim.SGD(groups, lr)

    there.optim = SimpleNamespace(SGD=plain_sgd)

    class Mixture(networks.ClientNet):
        def __init__(self, vector_of: list[float]) -> None:
            nn.Module.__init__(self)
            self.in_channels = self.num_classes = 0
            self.conv1s = nn.ModuleList()
            self.conv2s = nn.ModuleList()
            self.fc1s = nn.ModuleList([nn.Linear(FEATURES, HIDDEN) for _ in EVERYONE])
            self.fc2s = nn.ModuleList([nn.Linear(HIDDEN, CLASSES) for _ in EVERYONE])
            self.ps = nn.Parameter(torch.tensor(vector_of))

        def forward(self, x: Tensor) -> Any:
            return self.superBlock(self.superBlock(x, self.fc1s).tanh(), self.fc2s)

    args = SimpleNamespace(
        num_rounds=ROUNDS,
        num_local_epochs=EPOCHS,
        decay=1.0,
        lr_net=RATE,
        lr_coef=0.2,
        mu=0.25,
        reg_last_round_over_total_round=0.5,
        scheduler="cosine",
        limit_downloaded_models=10000,
        log_step=10000,
    )
    vectors = there.init_pss(list(SIZES))
    clients = [Mixture(one) for one in vectors]
    cores = [Net(0, 0) for _ in EVERYONE]
    for core in cores:
        nn.utils.vector_to_parameters(torch.tensor(problem.start), core.parameters())
    rows = []
    for now in range(ROUNDS):
        loaders = [Epochs(problem, now, i, [("train", EPOCHS)], tensors) for i in EVERYONE]
        with contextlib.redirect_stdout(None):
            cores, vectors, clients = there.train_one_round(
                args,
                cores,
                clients,
                vectors,
                list(SIZES),
                np.eye(len(SIZES)) == 1,
                now,
                nn.CrossEntropyLoss(),
                torch.device("cpu"),
                None,
                [(None, loader) for loader in loaders],
            )
        models = np.stack([vector(one.compress().parameters()) for one in clients])
        rows.append((models, copy.deepcopy(np.array(vectors))))
    return {"APPLE": {"v": np.stack([v for v, _ in rows]), "p": np.stack([p for _, p in rows])}}


if __name__ == "__main__":
    main(theirs)
