"""pfl-research (github.com/apple/pfl-research): its algorithms on its simulated backend.

Given are the cohorts and the order of samples. It fixes float32 where it takes a model's change,
which is read as float64 here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    BATCH,
    COHORTS,
    EPOCHS,
    EVERYONE,
    RATE,
    ROUNDS,
    Epochs,
    Iterates,
    Problem,
    first_network,
    import_in_float64,
    main,
    tensors,
    vector,
)


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of all methods."""
    torch.set_default_dtype(torch.float64)
    import_in_float64(checkout)
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.algorithm.fedprox import FedProx, FedProxParams
    from pfl.algorithm.scaffold import SCAFFOLD, SCAFFOLDParams
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.data.user_state import InMemoryUserStateStorage
    from pfl.hyperparam.base import NNTrainHyperParams
    from pfl.metrics import Metrics
    from pfl.model.pytorch import PyTorchModel

    PyTorchModel.evaluate = lambda *args, **kwargs: Metrics()  # it takes the samples' order along
    now = SimpleNamespace(round=0)

    class Network(nn.Module):
        """The network with the functions that PyTorchModel asks for."""

        def __init__(self) -> None:
            super().__init__()
            self.body = first_network(problem.start)

        def loss(self, x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(self.body(x), y)

        def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
            return {}

    class Samples(PyTorchTensorDataset):  # type: ignore[misc]
        """A client's samples, in our order; a batch of all samples where no size is given."""

        def __init__(self, client: int) -> None:
            samples = tensors(problem.inputs[client], problem.targets[client])
            super().__init__(samples, user_id=str(client))
            self.client, self.begun = client, -1

        def iter(self, batch_size: int | None) -> Iterator[Any]:
            if batch_size is None:
                return iter([self.raw_data])
            if self.begun != now.round:
                self.begun = now.round
                purposes = [("train", EPOCHS)]
                self.coming = Epochs(problem, now.round, self.client, purposes, tensors)
            return iter(self.coming)

    class Recorder(TrainingProcessCallback):  # type: ignore[misc]
        """The model after every round."""

        rows: list[np.ndarray]

        def after_central_iteration(
            self, metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Any]:
            self.rows.append(vector(model.pytorch_model.parameters()))
            now.round += 1
            return False, Metrics()

    def run(algorithm: Any, parameters: Any = NNAlgorithmParams, **settings: Any) -> Iterates:
        module = Network()
        clients = [Samples(i) for i in EVERYONE]
        order = iter([i for cohort in COHORTS for i in cohort])
        data = FederatedDataset(clients.__getitem__, lambda: next(order))
        model = PyTorchModel(
            module,
            local_optimizer_create=torch.optim.SGD,
            central_optimizer=torch.optim.SGD(module.parameters(), lr=1.0),
        )
        recorder = Recorder()
        recorder.rows, now.round = [], 0
        algorithm.run(
            parameters(
                central_num_iterations=ROUNDS,
                evaluation_frequency=1000,
                train_cohort_size=len(COHORTS[0]),
                val_cohort_size=0,
                **settings,
            ),
            SimulatedBackend(training_data=data, val_data=data),
            model,
            NNTrainHyperParams(
                local_num_epochs=EPOCHS, local_learning_rate=RATE, local_batch_size=BATCH
            ),
            callbacks=[recorder],
            send_metrics_to_platform=False,
        )
        return {"w": np.stack(recorder.rows)}

    def scaffold(gradient: bool) -> Iterates:
        return run(
            SCAFFOLD(),
            SCAFFOLDParams,
            population=len(EVERYONE),
            use_gradient_as_control_variate=gradient,
            user_state_storage=InMemoryUserStateStorage(),
        )

    return {
        "FedAvg": run(FederatedAveraging()),
        "FedProx": run(FedProx(), FedProxParams, mu=0.3),
        "SCAFFOLD I": scaffold(True),
        "SCAFFOLD II": scaffold(False),
    }


if __name__ == "__main__":
    main(theirs)
