"""The local baseline: what every client would have reached without the others."""
# mypy: disable-error-code="override"

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from pfl.callbacks.recorder import RunRecorder
from pfl.callbacks.round_checkpoint import SavingClock
from pfl.clients import Clients
from pfl.clients.store import ClientStore
from pfl.errors import ConfigError
from pfl.method import checkpoint, set_up
from pfl.method.algorithm import FederatedAlgorithm
from pfl.method.family import clients_by_member, read_rows, widest, write_rows
from pfl.method.hooks import Method
from pfl.method.messenger import Joined
from pfl.method.scoring import clients_in_group
from pfl.models.divided import WithPolicy, WithValve
from pfl.parameters import private_copy
from pfl.rounds.checkpoint_io import Malformed, check_parts
from pfl.rounds.loop import FederatedLoop
from pfl.scores.evaluation import ClientScores, Scores, row_scores, scores_by_name
from pfl.scores.names import ScoreName
from pfl.scores.runs import best_round

NumbersOf = dict[str, np.ndarray]
WITH_LAYERS = (Joined, WithPolicy, WithValve)  # networks to which a method has added some


class LocalBaseline(Callback):
    """Trains every client alone after the run, for comparison.

    Initial model, rounds, cohorts, local steps and learning rates are as in the run, but every
    client continues from its own last model: the result is that of `LocalTrain` with the same loop.
    Clients with networks of their own train these, and nothing that the method adds to them (a
    messenger, FedCP's policy, GPFL's valve, the dense updates of FLoRA and FedExLoRA).
    It is scored after the best round of the run by validation and after the last one, so that a
    client's gain compares models of the same round. The baseline takes about as long as the local
    training of the run itself; with a checkpoint of its own, `checkpoints/local.ckpt`, a resumed
    run continues it. If learning rates depend on a λ that changes (FedCLUP with `local_step:
    corollary2`), the baseline uses the last λ. After `fit`, `summary.json` compares with the
    baseline and `clients.csv` has its scores.

    Attributes:
        scores: The scores of every client on its test samples, as `ClientScores.compute` returns
            them; None before the baseline is trained.
        by_round: The same after both rounds, [M] by name.

    Example:
        >>> from pfl import Trainer
        >>> trainer = Trainer(callbacks=[LocalBaseline()], enable_progress_bar=False)
    """

    def __init__(self) -> None:
        self.scores: NumbersOf | None = None
        self.by_round: dict[int, dict[ScoreName, np.ndarray]] = {}
        self._initial: dict[str, Tensor] | None = None

    def setup(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm, stage: str) -> None:
        # The initial model of another run is forgotten; a checkpoint restores its own later.
        if stage == "fit" and pl_module.rounds == 0:
            self._initial = self.scores = None
            self.by_round = {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        if self._initial is None:
            models: list[Tensor] = []
            buffers: list[Tensor] = []
            for method in pl_module.members or [pl_module]:
                own = states_of(method)
                models.append(own["w"])
                buffers.append(own["buffers"])
            self._initial = {"w": torch.cat(models), "buffers": torch.cat(buffers)}

    def state_dict(self) -> dict[str, Any]:
        return {"initial": self._initial}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        vector = torch.zeros(0)
        own = {"initial": {"w": vector, "buffers": vector}}
        check_parts(state_dict, own, "LocalBaseline")
        self._initial = state_dict["initial"]

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: FederatedAlgorithm, checkpoint: dict[str, Any]
    ) -> None:
        saved = checkpoint.get("callbacks")
        missing = isinstance(saved, dict) and self.state_key not in saved
        if trainer.state.fn == "fit" and missing:
            raise ConfigError(
                "trainer.callbacks: LocalBaseline; the run of the checkpoint did not have it, so "
                "that its initial model is not known; leave LocalBaseline out, or start anew"
            )

    def on_train_end(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm) -> None:
        assert self._initial is not None
        loop = pl_module.run.loop
        rows = RunRecorder.of(trainer).rows
        best = best_round(rows, loop.select_by, loop.metrics.higher_is_better) or {}
        scored = {int(best.get("round", pl_module.rounds)), pl_module.rounds}
        if trainer.checkpoint_callbacks:
            saved = BaselineCheckpoint(trainer, pl_module)
        else:
            saved = None
        with pl_module.in_full_precision():
            found = train_local_baseline(pl_module, loop, self._initial, scored, saved)
        self.scores = found[pl_module.rounds]
        self.by_round = {
            k: scores_by_name({("test", "local"): values}) for k, values in found.items()
        }

    def teardown(self, trainer: pl.Trainer, pl_module: FederatedAlgorithm, stage: str) -> None:
        # The run has written its result, so the baseline's own checkpoint is not needed any more.
        if stage == "fit" and trainer.is_global_zero:
            BaselineCheckpoint.path(trainer).unlink(missing_ok=True)


class BaselineCheckpoint:
    """The clients' models after some rounds of the baseline, saved as often as it costs little."""

    def __init__(self, trainer: pl.Trainer, algorithm: FederatedAlgorithm) -> None:
        self.trainer = trainer
        self.clock = SavingClock(every_seconds=30.0)
        loop = algorithm.run.loop
        self.settings = {
            **RunRecorder.of(trainer).settings,
            "partition": loop.datamodule.partition.hash,
            "protocol": loop.describe(),
        }

    @staticmethod
    def path(trainer: pl.Trainer) -> Path:
        """Returns where the file of a run is."""
        return Path(trainer.default_root_dir) / "checkpoints" / "local.ckpt"

    def restore(self, store: ClientStore, scored: set[int]) -> tuple[int, dict[int, NumbersOf]]:
        """Restores the clients' models; returns the number of their rounds, and the scores.

        The number is 0 if there is no file for these settings. The baseline is scored after the
        rounds `scored`, and ends with the last one.
        """
        trainer = self.trainer
        path = self.path(self.trainer)
        if not trainer.strategy.broadcast(path.is_file()):
            return 0, {}
        try:
            saved = trainer.strategy.checkpoint_io.load_checkpoint(path)
            parts = {"settings": {}, "rounds": 0, "clients": {}, "scores": {}}
            check_parts(saved, parts, "local.ckpt")
            rounds = saved["rounds"]
            scores = saved["scores"]
            missing = {number for number in scored if number <= rounds} - scores.keys()
            if saved["settings"] != self.settings or rounds > max(scored) or missing:
                return 0, {}
            rank = trainer.global_rank
            world = trainer.world_size
            checkpoint.restore_states(store, saved["clients"], rank, world)
        except (ConfigError, Malformed) as error:
            rank_zero_warn(f"LocalBaseline starts anew: {error}", category=UserWarning)
            return 0, {}
        known = {k: {n: v.numpy() for n, v in scores[k].items()} for k in scored & scores.keys()}
        return rounds, known

    def save(self, store: ClientStore, rounds: int, scores: dict[int, NumbersOf]) -> None:
        """Saves the clients' models after a number of rounds if it is time to."""
        strategy = self.trainer.strategy
        if strategy.broadcast(self.clock.is_due()):
            with self.clock.saving():
                tensors = {
                    k: {n: torch.from_numpy(v) for n, v in one.items()} for k, one in scores.items()
                }
                content = {"settings": self.settings, "rounds": rounds, "scores": tensors}
                content["clients"] = checkpoint.client_states(store)
                if self.trainer.is_global_zero:
                    strategy.checkpoint_io.save_checkpoint(content, self.path(self.trainer))


class TrainingAlone:
    """Clients that train alone, each from its last model, in the rounds in which they take part.

    Args:
        algorithm: The algorithm whose network, local settings and engine are used.
        loop: The loop whose data and cohorts are used.
        initial: The initial model "w" [P] and its "buffers"; of all networks, one after the other,
            where the clients' differ.

    Attributes:
        data: The clients' samples.
        store: The last model of each client that has trained.
    """

    def __init__(
        self, algorithm: FederatedAlgorithm, loop: FederatedLoop, initial: Mapping[str, Tensor]
    ) -> None:
        self.loop = loop
        self.device = algorithm.device
        self.dtype = initial["w"].dtype
        self.methods: list[Method] = list(algorithm.members) or [algorithm]
        self.kinds = np.zeros(loop.num_clients, np.int64)  # which method trains each client
        if algorithm.members:
            self.kinds = algorithm.kinds
        self.first = first_states(self.methods, initial)
        self.data = loop.client_data(algorithm.device)
        for place, method in enumerate(self.methods):
            if isinstance(method.network, WITH_LAYERS):
                self.methods[place] = of_given_network(algorithm, method, self.first[place])
                self.first[place] = states_of(self.methods[place])
        self.store = loop.client_store(algorithm.device)
        for name in initial:
            rows = [own[name] for own in self.first]
            if max(map(len, rows)):
                self.store.declare(name, widest(rows))

    def train_round(self, round_index: int) -> None:
        """Trains the clients of a round (from 0) whose messages arrive, and keeps their models."""
        parts = self.loop.participation.parts
        for chunk in self._chunks(self.loop.cohort(round_index), round_index, "train"):
            for part in [part for part, arrives in parts(chunk) if arrives]:
                for method, clients in clients_by_member(self.methods, self.kinds, part):
                    self._train(method, clients)

    def scores(self, rounds: int) -> NumbersOf:
        """Returns all clients' test scores after some rounds, as `ClientScores.compute` does."""
        loop = self.loop
        metric = ClientScores(
            loop.num_clients,
            loop.metrics,
            loop.training_targets,
            loop.name_of,
            loop.own_unit,
        ).to(self.device)
        for chunk in self._chunks(loop.population, rounds, "test"):
            for method, clients in clients_by_member(self.methods, self.kinds, chunk):
                self._score(method, clients, metric)
        return metric.compute()

    def _train(self, method: Method, clients: Clients) -> None:
        def train(group: Clients) -> Tensor:
            return method.local_sgd(group, self._last_model(group))

        for group, w in method.groups.run(clients, train):
            write_rows(self.store, "w", group.ids, w)
            if group.buffers is not None:
                write_rows(self.store, "buffers", group.ids, group.buffers)

    def _score(self, method: Method, clients: Clients, metric: ClientScores) -> None:
        def score(group: Clients) -> list[Scores]:
            w = self._last_model(group)
            return list(row_scores(method.oracle, group, w, bool(self.loop.metrics)))

        size = clients_in_group(method, clients)
        for _, parts in method.groups.run(clients, score, size, "evaluation"):
            for one in parts:
                metric.add(one)
            metric.finish()

    def _chunks(self, ids: np.ndarray, round_index: int, split: str) -> list[Clients]:
        count = max(1, -(-len(ids) // self.loop.chunk_size))
        chunks = self.loop.chunks(ids, split, count, owned=True)
        return [Clients(c, round_index, self.data, split, dtype=self.dtype) for c in chunks]

    def _last_model(self, clients: Clients) -> Tensor:
        """Returns the models [C, P] of clients of one network, and sets their statistics."""
        own = self.first[self.kinds[clients.ids[0]]]
        state = {}
        for name in self.store.names:
            row = own[name].to(self.device)
            if len(row):
                state[name] = read_rows(self.store, name, clients.ids, row)
        clients.buffers = state.get("buffers")
        return state["w"]


def train_local_baseline(
    algorithm: FederatedAlgorithm,
    loop: FederatedLoop,
    initial: dict[str, Tensor],
    scored: set[int],
    saved: BaselineCheckpoint | None = None,
) -> dict[int, NumbersOf]:
    """Trains every client alone with an algorithm's network, local settings and engine.

    Args:
        algorithm: The algorithm whose settings are used.
        loop: The loop whose data and cohorts are used.
        initial: The initial model "w" [P] and its "buffers"; of all networks, one after the other,
            where the clients' differ.
        scored: The rounds after which the clients are scored; the baseline ends with the last one.
        saved: The checkpoint from which the training continues, and into which it is saved.

    Returns:
        By round the test scores of every client, as `ClientScores.compute` returns them.
    """
    shown = loop.client_data(algorithm.device).samples
    alone = TrainingAlone(algorithm, loop, initial)
    begin = 0
    scores: dict[int, NumbersOf] = {}
    if saved:
        begin, scores = saved.restore(alone.store, scored)
    for round_index in range(begin, max(scored)):
        alone.train_round(round_index)
        if round_index + 1 in scored:
            scores[round_index + 1] = alone.scores(round_index + 1)
        if saved is not None:
            saved.save(alone.store, round_index + 1, scores)
    alone.data.show(shown)  # a network without the method's layers was tried on the whole samples
    return scores


def states_of(method: Method) -> dict[str, Tensor]:
    """Returns the global model of a method and its running statistics."""
    w = method.global_model.clone()
    return {"w": w, "buffers": method.oracle.buffers.read(method.network, w)}


def of_given_network(
    server: FederatedAlgorithm, method: Method, first: Mapping[str, Tensor]
) -> FederatedAlgorithm:
    """Returns a method that trains the network to which another one has added layers.

    Args:
        server: The method of the run.
        method: The method with these layers, or that of one of the networks in the run.
        first: Its initial model "w" [P] and the "buffers" of this.
    """
    network: Any = private_copy(method.network)
    for name, values in method.space.split(first["w"]).items():
        network.get_parameter(name).data = values.clone()
    method.oracle.buffers.write(network, first["buffers"])
    made = FederatedAlgorithm(network.given, **method.local_settings)
    made.weighted_classes = server.weighted_classes
    made.to(server.device)
    made.enter(server.run)
    loop = server.run.loop
    precision = server.trainer.precision_plugin.forward_context
    set_up.inspect_network(made, loop, server.device, precision, store=False)
    set_up.make_private(made, loop)
    set_up.allocate_member(made, server.groups.threads)
    return made


def first_states(
    methods: Sequence[Method], initial: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    """Returns the initial model and the running statistics of each method's network."""
    models = initial["w"].split([method.space.size for method in methods])
    buffers = initial["buffers"].split([method.oracle.buffers.size for method in methods])
    pairs = zip(models, buffers, strict=True)
    return [{"w": w, "buffers": statistics} for w, statistics in pairs]
