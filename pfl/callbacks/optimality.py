"""Distances of a run to the solution, for problems whose solution is known."""
# mypy: disable-error-code="override"

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from pfl.callbacks.round_checkpoint import is_last
from pfl.clients import Clients
from pfl.datamodules.ranges import Checked, Count
from pfl.distributed.collectives import sum_over_processes
from pfl.errors import ConfigError
from pfl.method.algorithm import FederatedAlgorithm

Solution = tuple[Tensor, Tensor]  # models w [P] and w_i [M, P]


class Optimality(Checked, Callback):
    """Adds the optimality gap and the errors of the models to the rows of `metrics.csv`.

    f_i is the objective of client i, w the global model, and v_i the model that client i uses: its
    personalized model, or w if the method has none. All clients have the same weight.

    * `train/global/gap` is |mean_i grad f_i(w)|^2 over clients with samples. The full gradients
      take a pass over all data, which `train/samples` does not count.
    * If the data module has the clients' `true_models` w_i*: `train/global/total_error` is
      |w - mean_i w_i*|, and `train/personalized/total_error` is mean_i |v_i - w_i*|.
    * If the data module can `solve` min mean_i [f_i(w_i) + λ/2 |w_i - w|^2] for the method's
      `personalization_penalty` λ, with solution ŵ, ŵ_i: `train/global/optimization_error` is
      |w - ŵ|, and `train/personalized/optimization_error` is mean_i |v_i - ŵ_i|.
    * With true models and a solution, `.../statistical_error` are the errors of ŵ and ŵ_i against
      the true models.

    Distances are Euclidean, not squared, between the `identified` parts of the models (see
    `pfl.datamodules.TheoryProblem`). The solution is for f_i without weight decay and with the loss
    of the data module's problem. A method without a global model has no `global` numbers.

    Args:
        every: Rounds from one measurement to the next; the last round is always measured.

    Raises:
        ConfigError: If `every` is below 1.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(callbacks=[Optimality(every=10)], enable_progress_bar=False)
    """

    def __init__(self, every: Count = 1) -> None:
        self.every = every
        self._solved_penalty: float | None = None  # λ of the solution
        self._solution: Solution | None = None

    def setup(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm, stage: str) -> None:
        data = _data(trainer)
        size = pl_module.space.size
        truth = getattr(data, "true_models", None)
        if truth is not None and truth.shape[1] != size:
            raise ConfigError(
                f"model.network: {type(pl_module.network).__name__} has {size} parameters, but the "
                f"true models of {type(data).__name__} have {truth.shape[1]}; "
                f"choose the network in the description of the data module"
            )
        unseen = trainer.datamodule.unseen_clients  # type: ignore[attr-defined]
        if len(unseen) and (truth is not None or hasattr(data, "solve")):
            raise ConfigError(
                f"loop.unseen: {len(unseen)} clients; Optimality measures distances to the "
                f"solution for all clients, use null"
            )
        solved = hasattr(data, "solve") and pl_module.personalization_penalty is not None
        if truth is None and not solved and not pl_module.has_global:
            raise ConfigError(
                f"trainer.callbacks: Optimality has nothing to measure: {type(data).__name__} has "
                f"no solution, and {type(pl_module).__name__} has no global model; leave it out"
            )
        self._solved_penalty = self._solution = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if pl_module.rounds % self.every and not is_last(trainer):
            return
        with pl_module.in_full_precision():
            values = self._measure(pl_module, _data(trainer))
        pl_module.row.update(values)  # which loggers get
        pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1, logger=False)

    def _measure(self, algorithm: FederatedAlgorithm, data: Any) -> dict[str, float]:
        w = algorithm.global_model

        def identified(models: Tensor) -> Tensor:
            """Returns the part of models [..., P] that the data determine, float64."""
            part = getattr(data, "identified", None)
            if part:
                return part(models.double())
            return models.double()

        targets = {
            name: (identified(common.to(w.device)), identified(own.to(w.device)))
            for name, (common, own) in self._targets(algorithm, data).items()
        }
        # Sums over clients: gradients [P], number of clients with samples and of all clients,
        # distances to each target.
        gradients = torch.zeros_like(w, dtype=torch.float64)
        counts = gradients.new_zeros(2)
        distances = gradients.new_zeros(len(targets))
        for clients in algorithm.iter_clients("train"):
            if algorithm.has_global:
                gradients += full_gradients(algorithm, clients, w).double().sum(0)
            if algorithm.has_personalized:
                models = algorithm.personalized(clients)
            else:
                models = w[None]
            ids = torch.from_numpy(clients.ids).to(w.device)
            counts += counts.new_tensor([(clients.sizes > 0).sum(), len(clients)])
            for k, (_, own) in enumerate(targets.values()):
                distances[k] += (identified(models) - own[ids]).norm(dim=1).sum()
        # One reduction; processes without clients take part in it.
        sums = sum_over_processes(torch.cat([gradients, counts, distances]))
        gradients, counts, distances = sums.split([len(gradients), 2, len(distances)])
        values: dict[str, float] = {}
        if algorithm.has_global:
            values["train/global/gap"] = float((gradients / counts[0]).square().sum())
        for (name, (common, _)), distance in zip(targets.items(), distances, strict=True):
            if algorithm.has_global:
                error = (identified(w) - common).norm()
                values[f"train/global/{name}"] = float(error)
            values[f"train/personalized/{name}"] = float(distance / counts[1])
        if len(targets) == 2:
            (solution, solutions), (truth, truths) = targets.values()
            if algorithm.has_global:
                values["train/global/statistical_error"] = float((solution - truth).norm())
            error = (solutions - truths).norm(dim=1).mean()
            values["train/personalized/statistical_error"] = float(error)
        return values

    def _targets(self, algorithm: FederatedAlgorithm, data: Any) -> dict[str, Solution]:
        """Returns the models to compare with, by the name of the error."""
        targets = {}
        penalty = algorithm.personalization_penalty
        if penalty is not None and penalty != self._solved_penalty and hasattr(data, "solve"):
            self._solved_penalty = penalty
            self._solution = data.solve(penalty)
        if penalty is not None and self._solution is not None:
            targets["optimization_error"] = self._solution
        if (truth := getattr(data, "true_models", None)) is not None:
            targets["total_error"] = (truth.mean(0), truth)
        return targets


def full_gradients(algorithm: FederatedAlgorithm, clients: Clients, w: Tensor) -> Tensor:
    """Returns grad f_i(w) [C, P] at one model w [P]; zero for clients without samples."""
    gradients = w.new_zeros(len(clients), len(w))
    largest = max(1, int(clients.sizes.max(initial=0)))
    for _, batch in clients.samples(limit=largest):  # one batch of all samples, or none
        gradients = algorithm.oracle.gradient(w.expand_as(gradients), batch, clients.buffers)[1]
    return gradients


def _data(trainer: pl.Trainer) -> Any:
    return trainer.datamodule.datamodule  # type: ignore[attr-defined]
