"""The local baseline: what every client would have reached without the others."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import numpy as np
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from pfl.clients import Clients
from pfl.method.algorithm import FederatedAlgorithm
from pfl.rounds.evaluation import ClientScores, Scores, row_scores
from pfl.rounds.loop import FederatedLoop


class LocalBaseline(Callback):
    """Trains every client alone after the run, for comparison.

    Initial model, rounds, cohorts, local steps and learning rates are those of the run, but every
    client continues from its own last model: the result is that of `LocalTrain` with the same
    loop. The baseline takes about as long as the local training of the run itself. If learning
    rates depend on a λ that changes (FedCLUP with `local_step: corollary2`), the baseline uses the
    last λ.

    Attributes:
        scores: `accuracy`, `loss` and `count` of every client on its test samples, float64 [M];
            None before the baseline is trained.

    Example:
        After `fit`, `summary.json` compares with the baseline and `clients.csv` has its scores.

        >>> from pfl import Trainer
        >>> baseline = LocalBaseline()
        >>> trainer = Trainer(callbacks=[baseline], enable_progress_bar=False)
        >>> trainer.callbacks[0] is baseline
        True
    """

    def __init__(self) -> None:
        self.scores: dict[str, np.ndarray] | None = None
        self._initial: dict[str, Tensor] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forgets the initial model of another run; a checkpoint restores its own later."""
        assert isinstance(pl_module, FederatedAlgorithm)
        if stage == "fit" and pl_module.rounds == 0:
            self._initial = self.scores = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Copies the initial model."""
        assert isinstance(pl_module, FederatedAlgorithm)
        if self._initial is None:
            w = pl_module.global_model.clone()
            buffers = pl_module.oracle.buffers.read(pl_module.network, w)
            self._initial = {"w": w, "buffers": buffers}

    def state_dict(self) -> dict[str, Any]:
        """Returns the initial model, so that a resumed run has the same baseline."""
        return {"initial": self._initial}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the initial model."""
        self._initial = state_dict["initial"]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Trains and scores the baseline."""
        assert isinstance(pl_module, FederatedAlgorithm) and self._initial is not None
        loop = trainer.datamodule  # type: ignore[attr-defined]
        with pl_module.in_full_precision():
            self.scores = train_local_baseline(pl_module, loop, self._initial, pl_module.rounds)


def train_local_baseline(
    algorithm: FederatedAlgorithm, loop: FederatedLoop, initial: dict[str, Tensor], rounds: int
) -> dict[str, np.ndarray]:
    """Trains every client alone with an algorithm's network, local settings and engine.

    Args:
        algorithm: The algorithm whose settings are used.
        loop: The loop whose data and cohorts are used.
        initial: The initial model "w" [P] and its "buffers".
        rounds: Number of rounds.

    Returns:
        The test scores `accuracy`, `loss` and `count` of every client, float64 [M].
    """
    store = loop.client_store(algorithm.device)
    for name, values in initial.items():
        if len(values):
            store.declare(name, values)
    data = loop.client_data(algorithm.device)

    def chunks(ids: np.ndarray, round_index: int, split: str) -> list[Clients]:
        count = max(1, -(-len(ids) // loop.chunk_size))
        chunks = loop.chunks(ids, split, count, owned=True)
        return [Clients(c, round_index, data, split, dtype=initial["w"].dtype) for c in chunks]

    def load_state(clients: Clients) -> Tensor:
        state = {name: store.read(name, clients.ids, algorithm.device) for name in store.names}
        clients.buffers = state.get("buffers")
        return state["w"]

    def train(clients: Clients) -> Tensor:
        return algorithm.local_sgd(clients, load_state(clients))

    def score(clients: Clients) -> list[Scores]:
        return list(row_scores(algorithm.oracle, clients, load_state(clients)))

    for round_index in range(rounds):
        for chunk in chunks(loop.cohort(round_index), round_index, "train"):
            kept = [part for part, arrives in loop.participation.parts(chunk) if arrives]
            for part in kept:
                for clients, w in algorithm.in_groups(part, train, len(chunk)):
                    store.write("w", clients.ids, w)
                    if clients.buffers is not None:
                        store.write("buffers", clients.ids, clients.buffers)
    metric = ClientScores(loop.num_clients).to(algorithm.device)
    for chunk in chunks(loop.population, rounds, "test"):
        for _, parts in algorithm.in_groups(chunk, score, len(chunk), "evaluation"):
            for scores in parts:
                metric.update(*scores)
    return metric.compute()
