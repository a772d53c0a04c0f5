"""Scores of every client, and the numbers that papers report about them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torchmetrics
from torch import Tensor

from pfl.clients import Clients
from pfl.distributed.collectives import gather
from pfl.engines.oracle import Oracle
from pfl.engines.threads import GROUP_FLOATS

if TYPE_CHECKING:
    from pfl.method.module import FederatedModule

POOL = 4096  # samples in one forward pass of one model
POOL_ON_GPU = 1024  # which are enough to fill one, and its memory may not hold more

Scores = tuple[Tensor, Tensor, Tensor, Tensor]
"""Of some clients what `ClientScores.update` takes: ids, losses, correct answers, counts."""


class ClientScores(torchmetrics.Metric):
    """Loss and accuracy of each client, summed sample by sample (and over processes).

    Args:
        num_clients: The population, M.
    """

    full_state_update = False
    loss_sum: Tensor
    correct_sum: Tensor
    count: Tensor

    def __init__(self, num_clients: int) -> None:
        super().__init__()
        for name in ("loss_sum", "correct_sum", "count"):
            zeros = torch.zeros(num_clients, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, ids: Tensor, losses: Tensor, correct: Tensor, count: Tensor) -> None:
        """Add sums over some samples of clients `ids`; all four [C]."""
        ids = ids.to(self.count.device)
        self.loss_sum.index_add_(0, ids, losses.to(self.loss_sum))
        self.correct_sum.index_add_(0, ids, correct.to(self.loss_sum))
        self.count.index_add_(0, ids, count.to(self.loss_sum))

    def compute(self) -> dict[str, np.ndarray]:
        """`loss`, `accuracy` (NaN for regression) and `count`, float64 [M].

        Clients without samples have NaN.
        """
        count = self.count.cpu().numpy()
        with np.errstate(invalid="ignore", divide="ignore"):
            loss = self.loss_sum.cpu().numpy() / count
            accuracy = self.correct_sum.cpu().numpy() / count
        return {"loss": loss, "accuracy": accuracy, "count": count}


def summarize(scores: dict[str, np.ndarray]) -> dict[str, float]:
    """The reported numbers: for accuracy and loss, over the clients that have samples.

    The unweighted mean over clients; `_std` the standard deviation over clients (divisor: their
    number); `_worst10` the mean of the worst tenth of the clients, rounded up; `_pooled` the mean
    over all samples. Accuracy is left out for regression.
    """
    result: dict[str, float] = {}
    count = scores["count"]
    for name, sign in (("accuracy", 1), ("loss", -1)):
        have = count > 0
        values = scores[name][have]
        if not len(values) or (name == "accuracy" and np.isnan(values).all()):
            continue
        result[name] = float(values.mean())
        result[f"{name}_std"] = float(values.std())
        result[f"{name}_worst10"] = sign * worst_tenth(sign * values)
        result[f"{name}_pooled"] = float(np.average(values, weights=count[have]))
    return result


def worst_tenth(values: np.ndarray) -> float:
    """Mean of the lowest tenth of the values, rounded up to a whole number of them.

    NaN, the loss of a model that diverged, is the worst of all.
    """
    if np.isnan(values).any():
        return math.nan
    return float(np.sort(values)[: math.ceil(len(values) / 10)].mean())


class Evaluation:
    """Passes over all clients: collects scores of each split and kind of model.

    Attributes:
        scores: Of the last pass that was finished: what `ClientScores.compute` gives, by (split,
            "global" or "personalized").
    """

    def __init__(self, num_clients: int, device: torch.device) -> None:
        self.num_clients, self.device = num_clients, device
        self.scores: dict[tuple[str, str], dict[str, np.ndarray]] = {}
        self._metrics: dict[tuple[str, str], ClientScores] = {}
        self._used: dict[tuple[str, str], ClientScores] = {}
        self.begin()

    def begin(self) -> None:
        """Begin a pass; the scores stay those of the last one until this one is finished.

        It has the metrics of the one before: each refers to itself, so that their memory, some
        numbers for every client, would stay taken for many rounds.
        """
        self._used |= self._metrics
        self._metrics = {}
        self._numbers = np.zeros(2)  # sum over personalized models, and how many they are
        self._global_numbers: int | None = None
        self._shared: dict[str, Tensor] = {}

    def update(self, algorithm: FederatedModule, clients: Clients) -> None:
        """Score a chunk of clients with the models that the algorithm has."""
        if algorithm.has_global:
            self._global_numbers = algorithm.parameters_global()
            if algorithm.oracle.buffers.size and algorithm.buffer_policy == "local":
                self._score_own("global", algorithm, clients)
            else:
                self._score_global(self._metric(clients.split, "global"), algorithm, clients)
        if algorithm.has_personalized:
            self._score_own("personalized", algorithm, clients)

    def finish(self) -> dict[str, float]:
        """All reported numbers, named `<split>/<kind>/<number>`; every process must call it."""
        row: dict[str, float] = {}
        self.scores = {key: metric.compute() for key, metric in self._metrics.items()}
        for (split, kind), scores in self.scores.items():
            for name, value in summarize(scores).items():
                row[f"{split}/{kind}/{name}"] = value
        if self._global_numbers is not None:  # a sparse model may have none
            row["parameters/global"] = self._global_numbers
        if any(kind == "personalized" for _, kind in self._metrics):
            total, models = np.sum(gather(self._numbers), axis=0)
            row["parameters/personalized"] = float(total / models)
        return row

    def _metric(self, split: str, kind: str) -> ClientScores:
        if (split, kind) not in self._metrics:
            metric = self._used.pop((split, kind), None)
            if metric is None:
                metric = ClientScores(self.num_clients).to(self.device)
            metric.reset()
            metric.update(*torch.zeros(4, 0, dtype=torch.int64))  # a process may have no clients
            self._metrics[split, kind] = metric
        return self._metrics[split, kind]

    def _score_own(self, kind: str, algorithm: FederatedModule, clients: Clients) -> None:
        """Every client's own model, or the global one with its own buffers, group by group."""
        metric = self._metric(clients.split, kind)

        def score(group: Clients) -> tuple[list[float], list[Scores]]:
            with algorithm.in_full_precision():
                if not group.state:  # it has one where the chunk was read ahead
                    algorithm.load_state(group)
                if kind == "global":
                    w, numbers = algorithm.global_model.expand(len(group), -1), [0.0, 0]
                else:
                    w = algorithm.personalized(group)
                    total = algorithm.parameters_personalized(group, w).sum()
                    numbers = [float(total), len(group)]
                return numbers, list(row_scores(algorithm.oracle, group, w))

        size = _clients_at_once(algorithm, clients)
        for _, (numbers, parts) in algorithm.in_groups(clients, score, size, "evaluation"):
            self._numbers += numbers
            for part in parts:
                metric.update(*part)

    def _score_global(
        self, metric: ClientScores, algorithm: FederatedModule, clients: Clients
    ) -> None:
        if not len(clients):
            return
        if not clients.data.shared(clients.split):
            _score_pooled(metric, algorithm, clients)
            return
        # The same samples for everyone and one model: one client's score is everyone's.
        ids = clients.ids
        if clients.split not in self._shared:
            first, ids = ids[0], ids[1:]
            _score_pooled(metric, algorithm, replace(clients, ids=clients.ids[:1]))
            sums = (metric.loss_sum, metric.correct_sum, metric.count)
            self._shared[clients.split] = torch.stack([s[first] for s in sums])
        everyone = self._shared[clients.split][:, None].expand(3, len(ids))
        metric.update(torch.from_numpy(ids), *everyone)


def row_scores(oracle: Oracle, clients: Clients, w: Tensor) -> Iterator[Scores]:
    """Of every client's own model, w [C, P], on its own samples."""
    ids = torch.from_numpy(clients.ids)
    for rows, batch in clients.samples():
        buffers = None if clients.buffers is None else clients.buffers[rows]
        losses, correct = oracle.evaluate(w[rows], batch, buffers)
        yield ids[rows], losses.sum(1), correct.sum(1), torch.tensor(batch.counts)


def _score_pooled(metric: ClientScores, algorithm: FederatedModule, clients: Clients) -> None:
    """The global model on the pooled samples of all these clients, piece by piece."""
    oracle, w, data = algorithm.oracle, algorithm.global_model, clients.data
    buffers = oracle.buffers.read(algorithm.network, w) if oracle.buffers.size else None

    def score(piece: tuple[np.ndarray, Tensor]) -> tuple[Tensor, Tensor]:
        with algorithm.in_full_precision():
            inputs, targets = data.gather(piece[1], w.dtype)
            return oracle.evaluate_one(w, inputs, targets, buffers)

    pieces = list(clients.pooled(_samples_at_once(algorithm, clients)))
    for (owners, _), scores in zip(pieces, algorithm.threads.map(score, pieces), strict=True):
        ids = torch.from_numpy(clients.ids[owners])
        metric.update(ids, *scores, torch.ones(len(owners)))


def _clients_at_once(algorithm: FederatedModule, clients: Clients) -> int:
    """On a CPU each thread's share; less where models and samples take more than 32 MiB."""
    if algorithm.device.type != "cpu" or not len(clients):
        return max(1, len(clients))
    inputs = clients.sizes.mean() * math.prod(clients.data.samples.input_shape)
    share = -(-len(clients) // algorithm.threads.count)
    return max(1, min(share, int(8 * GROUP_FLOATS / (algorithm.space.size + inputs))))


def _samples_at_once(algorithm: FederatedModule, clients: Clients) -> int:
    """Of those that one model is evaluated on; on a CPU what the cache holds."""
    if algorithm.device.type != "cpu":
        return POOL_ON_GPU
    share = -(-int(clients.sizes.sum()) // algorithm.threads.count)
    size = math.prod(clients.data.samples.input_shape)
    fit = algorithm.oracle.engine.samples_at_once(size)
    return max(1, min(POOL, share, fit))


def predictions(algorithm: FederatedModule, clients: Clients) -> dict[str, np.ndarray]:
    """Predicted class (or value) of every sample of some clients, a row a sample.

    `client`, `sample` (its index in the data set), `target`, and `global` and `personalized`
    where the algorithm has such a model.
    """
    columns: dict[str, list[np.ndarray]] = {}
    w = {"global": algorithm.global_model.expand(len(clients), -1)} if algorithm.has_global else {}
    if algorithm.has_personalized:
        w["personalized"] = algorithm.personalized(clients)
    for owners, index in clients.pooled(POOL):
        inputs, targets = clients.data.gather(index, clients.dtype)
        values = {"client": clients.ids[owners], "sample": index.cpu().numpy()}
        values["target"] = targets.cpu().numpy()
        for kind, models in w.items():
            outputs = []
            for c in np.unique(owners):
                buffers = None if clients.buffers is None else clients.buffers[c]
                mine = torch.from_numpy(np.flatnonzero(owners == c)).to(inputs.device)
                outputs.append(algorithm.oracle.predict(models[c], inputs[mine], buffers))
            output = torch.cat(outputs)
            regression = targets.is_floating_point()
            chosen = output.reshape(targets.shape) if regression else output.argmax(1)
            values[kind] = chosen.cpu().numpy()
        for name, column in values.items():
            columns.setdefault(name, []).append(column)
    return {name: np.concatenate(parts) for name, parts in columns.items()}
