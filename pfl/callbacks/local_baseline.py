"""What every client would have reached alone."""

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
    """Trains every client alone once the run is over, for comparison.

    The same initial model, rounds, cohorts, local steps and learning rates as in the run, but a
    client goes on from its own last model: what `LocalTrain` computes under the same loop. It takes
    about as long as the local training of the run itself. (Rates that depend on a λ which moves are
    those of the last λ: FedCLUP's `local_step: corollary2`.)

    Attributes:
        scores: Of every client on its test samples: `accuracy`, `loss` and `count`, float64 [M].
    """

    def __init__(self) -> None:
        self.scores: dict[str, np.ndarray] | None = None
        self._initial: dict[str, Tensor] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget what another method began with; that of a resumed run comes after this."""
        assert isinstance(pl_module, FederatedAlgorithm)
        if stage == "fit" and pl_module.rounds == 0:
            self._initial = self.scores = None

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Remember the initial model."""
        assert isinstance(pl_module, FederatedAlgorithm)
        if self._initial is None:
            w = pl_module.global_model.clone()
            buffers = pl_module.oracle.buffers.read(pl_module.network, w)
            self._initial = {"w": w, "buffers": buffers}

    def state_dict(self) -> dict[str, Any]:
        """The initial model: a resumed run compares with the same beginning."""
        return {"initial": self._initial}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self._initial = state_dict["initial"]

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Train and score."""
        assert isinstance(pl_module, FederatedAlgorithm) and self._initial is not None
        loop = trainer.datamodule  # type: ignore[attr-defined]
        with pl_module.in_full_precision():
            self.scores = train_local_baseline(pl_module, loop, self._initial, pl_module.rounds)


def train_local_baseline(
    algorithm: FederatedAlgorithm, loop: FederatedLoop, initial: dict[str, Tensor], rounds: int
) -> dict[str, np.ndarray]:
    """`LocalTrain` with an algorithm's network, local settings and engine; its test scores."""
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
            for clients, w in algorithm.in_groups(chunk, train, len(chunk)):
                store.write("w", clients.ids, w)
                if clients.buffers is not None:
                    store.write("buffers", clients.ids, clients.buffers)
    metric = ClientScores(loop.num_clients).to(algorithm.device)
    for chunk in chunks(np.arange(loop.num_clients), rounds, "test"):
        for _, parts in algorithm.in_groups(chunk, score, len(chunk), "evaluation"):
            for scores in parts:
                metric.update(*scores)
    return metric.compute()
