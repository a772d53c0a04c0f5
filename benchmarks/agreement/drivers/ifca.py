"""jichan3751/ifca, the code of IFCA's authors: the whole run of its MNIST experiment.

Replaced are the network and its first values, the samples, which are MNIST's there, and the mean
loss and accuracy over test clients.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    EPOCHS,
    EVERYONE,
    RATE,
    ROUNDS,
    Iterates,
    Problem,
    first_network,
    main,
    starts,
    tensors,
    vector,
)

CLUSTERS = 3


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """All models, and those that the clients choose after a round."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(checkout / "mnist"))
    there: Any = importlib.import_module("train_cluster_mnist")
    models: list[np.ndarray] = []
    chosen: list[np.ndarray] = []

    class Experiment(there.TrainMNISTCluster):
        def setup_datasets(self) -> None:
            unknown = {"cluster_assign": [0] * len(EVERYONE)}
            self.dataset = {"train": unknown, "test": unknown}

        def setup_models(self) -> None:
            self.models = [first_network(values) for values in starts(problem.start, CLUSTERS)]
            self.criterion = torch.nn.CrossEntropyLoss()

        def load_data(self, m_i: int, train: bool = True) -> tuple[Any, Any]:
            return tensors(problem.inputs[m_i], problem.targets[m_i])

        def test(self, train: bool = False) -> dict[str, Any]:
            found: dict[str, Any] = super().test(train=train)
            if train and self.epoch >= 0:
                now = np.stack([vector(model.parameters()) for model in self.models])
                models.append(now.ravel())
                chosen.append(now[found["cluster_assign"]])
            return found

    config = dict(m=5, m_test=5, p=1, num_epochs=ROUNDS, lr=RATE, tau=EPOCHS)
    with tempfile.TemporaryDirectory() as folder:
        experiment = Experiment(config | {"project_dir": folder})
        experiment.config["p"] = CLUSTERS  # theirs divides the number of clients
        experiment.setup()
        experiment.run()
    return {"IFCA": {"server models": np.stack(models), "v": np.stack(chosen)}}


if __name__ == "__main__":
    main(theirs)
