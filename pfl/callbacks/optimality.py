"""How far a run is from the solution, on problems where that is known."""

from __future__ import annotations

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from pfl.callbacks.round_checkpoint import is_last
from pfl.clients import Clients, LocalSchedule
from pfl.distributed.collectives import sum_over_processes
from pfl.errors import ConfigError
from pfl.method.algorithm import FederatedAlgorithm

Solution = tuple[Tensor, Tensor]  # of w [P] and all w_i [M, P]


class Optimality(Callback):
    """Logs the optimality gap, and errors against known models, into the rows of `metrics.csv`.

    With clients' objectives f_i, uniform weights, the global model w, and v_i the model that client
    i uses (its personalized one, or w where the method has none):

    * `train/global/gap`: |mean_i grad f_i(w)|^2, over clients with samples. Full gradients: a pass
      over all data, which `train/samples` does not count.
    * Where the data module knows the clients' `true_models` w_i*: `train/global/total_error`,
      |w - mean_i w_i*|, and `train/personalized/total_error`, mean_i |v_i - w_i*|.
    * Where it can `solve` min mean_i [f_i(w_i) + λ/2 |w_i - w|^2] for the method's `personalization_penalty` λ,
      with solution ŵ, ŵ_i: `train/global/optimization_error`, |w - ŵ|, and
      `train/personalized/optimization_error`, mean_i |v_i - ŵ_i|; with both, also
      `.../statistical_error`, the errors that ŵ and ŵ_i themselves have.

    Distances are Euclidean, not squared, between what of the models is `identified` (see
    `datamodules.TheoryProblem`). The solution is that of f_i without weight decay, and for the loss
    that the data module is meant for. A method without a global model has no `global` numbers.

    Args:
        every: Rounds from one measurement to the next; the last round is always measured.
    """

    def __init__(self, every: int = 1) -> None:
        if every < 1:
            raise ConfigError(f"Optimality.every: {every}; it must be at least 1")
        self.every = every
        self._coupling: float | None = None
        self._solution: Solution | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Check that the true models are models of this network."""
        assert isinstance(pl_module, FederatedAlgorithm)
        data, size = pl_module._loop.datamodule, pl_module.space.size
        truth = getattr(data, "true_models", None)
        if truth is not None and truth.shape[1] != size:
            raise ConfigError(
                f"model.network: {type(pl_module.network).__name__} has {size} parameters, but the "
                f"true models of {type(data).__name__} have {truth.shape[1]}; "
                f"choose the network that the data module's description names"
            )
        self._coupling = self._solution = None

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure, and add to the round's row."""
        assert isinstance(pl_module, FederatedAlgorithm)
        if pl_module.rounds % self.every and not is_last(trainer):
            return
        with pl_module.in_full_precision():
            values = self._measure(pl_module)
        pl_module.row |= values
        pl_module.log_dict(values, on_step=False, on_epoch=True, batch_size=1)

    def _measure(self, algorithm: FederatedAlgorithm) -> dict[str, float]:
        w = algorithm.global_model
        targets = self._targets(algorithm)
        # Sums over clients: of gradients [P], of clients with samples, of all clients, of the
        # distances to each target.
        gradients = torch.zeros_like(w, dtype=torch.float64)
        counts = gradients.new_zeros(2)
        distances = gradients.new_zeros(len(targets))
        for clients in algorithm.iter_clients("train"):
            if algorithm.has_global:
                gradients += full_gradients(algorithm, clients, w).double().sum(0)
            models = algorithm.personalized(clients) if algorithm.has_personalized else w[None]
            ids = torch.from_numpy(clients.ids).to(w.device)
            counts += counts.new_tensor([(clients.sizes > 0).sum(), len(clients)])
            for k, (_, own) in enumerate(targets.values()):
                distances[k] += (_identified(algorithm, models) - own[ids]).norm(dim=1).sum()
        # One reduction, in which processes without clients take part too.
        sums = sum_over_processes(torch.cat([gradients, counts, distances]))
        gradients, counts, distances = sums.split([len(gradients), 2, len(distances)])
        values: dict[str, float] = {}
        if algorithm.has_global:
            values["train/global/gap"] = float((gradients / counts[0]).square().sum())
        for (name, (common, _)), distance in zip(targets.items(), distances, strict=True):
            if algorithm.has_global:
                error = (_identified(algorithm, w) - common).norm()
                values[f"train/global/{name}"] = float(error)
            values[f"train/personalized/{name}"] = float(distance / counts[1])
        return values | self._statistical(targets, algorithm.has_global)

    def _targets(self, algorithm: FederatedAlgorithm) -> dict[str, Solution]:
        """What models are compared with, by the name of the error: their identified parts."""
        data, targets = algorithm._loop.datamodule, {}
        personalization_penalty = algorithm.personalization_penalty
        if (
            personalization_penalty is not None
            and personalization_penalty != self._coupling
            and hasattr(data, "solve")
        ):
            self._coupling, self._solution = (
                personalization_penalty,
                data.solve(personalization_penalty),
            )
        if personalization_penalty is not None and self._solution is not None:
            targets["optimization_error"] = self._solution
        if (truth := getattr(data, "true_models", None)) is not None:
            targets["total_error"] = (truth.mean(0), truth)
        device = algorithm.global_model.device
        return {
            name: (
                _identified(algorithm, common.to(device)),
                _identified(algorithm, own.to(device)),
            )
            for name, (common, own) in targets.items()
        }

    def _statistical(self, targets: dict[str, Solution], has_global: bool) -> dict[str, float]:
        if len(targets) < 2:
            return {}
        (solution, solutions), (truth, truths) = targets.values()
        values = {}
        if has_global:
            values["train/global/statistical_error"] = float((solution - truth).norm())
        error = (solutions - truths).norm(dim=1).mean()
        return values | {"train/personalized/statistical_error": float(error)}


def full_gradients(algorithm: FederatedAlgorithm, clients: Clients, w: Tensor) -> Tensor:
    """grad f_i(w) [C, P] at one model w [P]; zero for clients without samples."""
    gradients = w.new_zeros(len(clients), len(w))
    for batch in clients.batches(LocalSchedule(None)):  # all samples, or none
        gradients = algorithm.oracle.gradient(w.expand_as(gradients), batch, clients.buffers)[1]
    return gradients


def _identified(algorithm: FederatedAlgorithm, models: Tensor) -> Tensor:
    """The part of models [..., P] that the data can tell, float64."""
    identified = getattr(algorithm._loop.datamodule, "identified", None)
    return identified(models.double()) if identified else models.double()
