"""Scores of every client, and the numbers that papers report about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torchmetrics
from torch import Tensor

from pfl.clients import Clients
from pfl.datamodules.errors import require_value
from pfl.engines.oracle import Oracle
from pfl.errors import ConfigError
from pfl.scores.distribution import worst_tenth
from pfl.scores.metrics import ClientMetrics
from pfl.scores.names import Directions, ScoreName, direction


class Scores(NamedTuple):
    """Sums over some samples of C clients.

    Attributes:
        ids: The clients, [C].
        losses, correct, counts: Losses, right answers and numbers of samples, [C].
        predicted: For each client its outputs [n, ...] and targets [n, ...] as metrics expect them
            (`ModelRunner.predicted`), on the host; empty where no metric asks for them.
    """

    ids: Tensor
    losses: Tensor
    correct: Tensor
    counts: Tensor
    predicted: Sequence[tuple[Tensor, Tensor]] = ()


@dataclass(frozen=True)
class Finetuning:
    """Local steps of every client before its model is scored, from its best model.

    Attributes:
        steps: The numbers of steps after which models are scored, ascending; none: no fine-tuning.
        lr: The learning rate; None: the method's, in the coming round.
    """

    steps: tuple[int, ...] = ()
    lr: float | None = None

    @classmethod
    def read(cls, steps: int | Sequence[int] | None, lr: float | None) -> Finetuning:
        """Returns the checked fine-tuning of the loop's arguments `finetune` and `finetune_lr`."""
        if steps is None:
            given = []
        elif isinstance(steps, int):
            given = [steps]
        else:
            given = list(steps)
        possible = all(type(k) is int and 0 <= k < 2**63 for k in given)
        expected = "a number of local steps of at least 0, a list of them, or null for none"
        require_value("loop.finetune", steps, possible, expected)
        require_value(
            "loop.finetune", steps, len({*given}) == len(given), "a list of different numbers"
        )
        return cls(tuple(sorted(given)), lr)

    @property
    def for_unseen(self) -> tuple[int, ...]:
        """The numbers of steps of clients that never trained; they are always scored at 0, too."""
        return tuple(sorted({0, *self.steps}))


class ClientScores(torchmetrics.Metric):
    """Loss and accuracy of each of M clients, summed over samples and processes, and metrics.

    For sequences of classes, only real targets are summed and counted.

    Args:
        num_clients: M.
        metrics: Further metrics.
        series: Returns a client's training targets [n, ...], on the host, for those that read them.
        name_of: Returns what an error calls a client.
        own_unit: Returns values of a client in the unit of its targets; None: they have it.

    Example:
        >>> import torch
        >>> scores = ClientScores(num_clients=2)
        >>> ids, losses, correct, count = map(torch.tensor, ([1], [3.0], [1.0], [4]))
        >>> scores.update(ids, losses, correct, count)  # of client 1, on four samples
        >>> scores.compute()["accuracy"].tolist()
        [nan, 0.25]
    """

    full_state_update = False
    loss_sum: Tensor
    correct_sum: Tensor
    count: Tensor
    values: Tensor

    def __init__(
        self,
        num_clients: int,
        metrics: ClientMetrics | None = None,
        series: Callable[[int], Tensor] | None = None,
        name_of: Callable[[int], str] = "client {}".format,
        own_unit: Callable[[int, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.metrics = metrics or ClientMetrics({})
        self._series = series
        self._name_of = name_of
        self._own_unit = own_unit
        for name in ("loss_sum", "correct_sum", "count"):
            zeros = torch.zeros(num_clients, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")
        if self.metrics:  # a client's values are on one process; the others have 0
            zeros = torch.zeros(len(self.metrics), num_clients, dtype=torch.float64)
            self.add_state("values", zeros, dist_reduce_fx="sum")
        self._begun: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(self, ids: Tensor, losses: Tensor, correct: Tensor, count: Tensor) -> None:
        """Adds sums over some samples of clients `ids`; all four [C]."""
        ids = ids.to(self.count.device)
        self.loss_sum.index_add_(0, ids, losses.to(self.loss_sum))
        self.correct_sum.index_add_(0, ids, correct.to(self.loss_sum))
        self.count.index_add_(0, ids, count.to(self.loss_sum))

    def add(self, scores: Scores) -> None:
        """Adds the scores of some samples; `finish` must follow the last samples of a client."""
        self.update(*scores[:4])
        if scores.predicted:
            self.keep(scores.ids.numpy(), scores.predicted)

    def keep(self, ids: np.ndarray, predicted: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Keeps outputs and targets of the clients `ids` for their metrics."""
        for client, pair in zip(ids.tolist(), predicted, strict=True):
            self._begun.setdefault(client, []).append(pair)

    def finish(self, but: int | None = None) -> None:
        """Computes the metrics of the clients whose samples were added, but for one with more."""
        for client in [c for c in self._begun if c != but]:
            predicted, targets = map(torch.cat, zip(*self._begun.pop(client), strict=True))
            if self._own_unit is not None:
                predicted = self._own_unit(client, predicted)
                targets = self._own_unit(client, targets)
            if self.metrics.read_series and self._series is not None:
                self.metrics.begin_client(self._series(client))
            try:
                values = self.metrics.values(predicted, targets)
            except ConfigError as error:
                raise ConfigError(f"{error} ({self._name_of(client)})") from error
            self.values[:, client] = values.to(self.values)

    def copy(self, client: int, ids: Tensor) -> None:
        """Gives the clients `ids` the scores of a client that has the same model and samples."""
        sums = (self.loss_sum, self.correct_sum, self.count)
        self.update(ids, *(one[client].repeat(len(ids)) for one in sums))
        if self.metrics:
            self.values[:, ids.to(self.values.device)] = self.values[:, [client]]

    def compute(self) -> dict[str, np.ndarray]:
        """Returns `accuracy` (NaN for regression), `loss`, `count` and each metric, float64 [M].

        Clients without samples have NaN, as clients have for which a metric is not defined.
        """
        count = self.count.cpu().numpy()
        with np.errstate(invalid="ignore", divide="ignore"):
            loss = self.loss_sum.cpu().numpy() / count
            accuracy = self.correct_sum.cpu().numpy() / count
        result = {"accuracy": accuracy, "loss": loss, "count": count}
        if self.metrics:
            values = np.where(count > 0, self.values.cpu().numpy(), np.nan)
            result |= zip(self.metrics.names, values, strict=True)
        return result


def scores_by_name(
    scores: Mapping[tuple[str, str], Mapping[str, np.ndarray]],
) -> dict[ScoreName, np.ndarray]:
    """Returns what is recorded for each client, [M] by name: all but the counts."""
    return {
        ScoreName(split, model, number): values
        for (split, model), numbers in scores.items()
        for number, values in numbers.items()
        if number != "count"
    }


def summarize(
    scores: dict[str, np.ndarray], higher_is_better: Directions | None = None
) -> dict[str, float]:
    """Returns the reported numbers of accuracy, loss and metrics over clients that have samples.

    They are the unweighted mean over clients; `_std`, the standard deviation over clients (divisor:
    the number of clients); `_worst10`, the mean of the worst tenth of the clients, rounded up;
    `_pooled`, the mean over all samples. Accuracy is left out for regression.

    Metrics have `_clients`, the number of clients for which the metric is defined, instead of
    `_pooled`. The other numbers are over these clients, and are left out if there are none.
    """
    result: dict[str, float] = {}
    count = scores["count"]
    if not count.any():
        return result
    for name in ("accuracy", "loss"):
        have = count > 0
        values = scores[name][have]
        if name == "accuracy" and np.isnan(values).all():
            continue
        result |= client_mean(name, values)
        result[f"{name}_pooled"] = float(np.average(values, weights=count[have]))
    for name in higher_is_better or {}:
        values = scores[name][~np.isnan(scores[name])]
        if len(values):
            result |= client_mean(name, values, higher_is_better)
        result[f"{name}_clients"] = float(len(values))
    return result


def client_mean(
    name: str | ScoreName, values: np.ndarray, metrics: Directions | None = None
) -> dict[str, float]:
    """Returns the mean over clients as `name`, and `_std` and `_worst10` of `summarize`."""
    with np.errstate(over="ignore", invalid="ignore"):  # models that diverged
        result = {str(name): float(values.mean()), f"{name}_std": float(values.std())}
    if (higher := direction(name, metrics)) is not None:
        if higher:
            sign = 1
        else:
            sign = -1
        result[f"{name}_worst10"] = sign * worst_tenth(sign * values)
    return result


def in_order(oracle: Oracle, clients: Clients) -> Clients:
    """Returns the clients with samples that lie in their order, if the engine keeps its inputs."""
    if not oracle.engine.keeps_inputs:
        return clients
    return replace(clients, data=clients.data.in_order(clients.split))


def row_scores(oracle: Oracle, clients: Clients, w: Tensor, keep: bool = False) -> Iterator[Scores]:
    """Yields the scores of every client's own model, w [C, P], on the client's own samples.

    With `keep` the scores have predictions, for metrics.
    """
    ids = torch.from_numpy(clients.ids)
    for rows, batch in in_order(oracle, clients).samples():
        if clients.buffers is None:
            buffers = None
        else:
            buffers = clients.buffers[rows]
        losses, correct, outputs = oracle.evaluate(w[rows], batch, buffers)
        predicted: list[tuple[Tensor, Tensor]] = []
        if keep:
            real = zip(outputs.cpu(), batch.targets.cpu(), batch.counts, strict=True)
            predicted = [oracle.runner.predicted(o[:n], t[:n]) for o, t, n in real]
        counts = oracle.runner.target_counts(batch.targets, 2)
        number = torch.tensor(batch.counts)
        if counts is not None:  # sequences: each real target counts once
            counts = counts * (batch.sample_weights(losses.dtype) > 0)
            losses = losses * counts
            correct = correct * counts
            number = counts.sum(1)
        yield Scores(ids[rows], losses.sum(1), correct.sum(1), number, predicted)
