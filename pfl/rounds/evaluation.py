"""Scores of every client, and the numbers that papers report about them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torchmetrics
from torch import Tensor

from datamodules.errors import require
from pfl.clients import Clients
from pfl.engines.oracle import Oracle

Scores = tuple[Tensor, Tensor, Tensor, Tensor]
"""The arguments of `ClientScores.update` for some clients: ids, losses, correct answers, counts."""


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
        """Returns the fine-tuning of the loop's arguments `finetune` and `finetune_lr`.

        Raises:
            ConfigError: A number is impossible.
        """
        given = [] if steps is None else [steps] if isinstance(steps, int) else list(steps)
        possible = all(isinstance(k, int) and not isinstance(k, bool) and k >= 0 for k in given)
        expected = "a number of local steps of at least 0, a list of them, or null for none"
        require("loop.finetune", steps, possible and steps is not True, expected)
        holds = lr is None or 0 < lr < math.inf
        require("loop.finetune_lr", lr, holds, "positive and finite, or null for the method's")
        return cls(tuple(sorted(set(given))), lr)

    @property
    def for_unseen(self) -> tuple[int, ...]:
        """The numbers of steps of clients that never trained; they are always scored at 0, too."""
        return tuple(sorted({0, *self.steps}))


class ClientScores(torchmetrics.Metric):
    """Loss and accuracy of each client, summed sample by sample (and over processes).

    For sequences of classes, the sums and counts are those of real targets.

    Args:
        num_clients: The population, M.

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

    def __init__(self, num_clients: int) -> None:
        super().__init__()
        for name in ("loss_sum", "correct_sum", "count"):
            zeros = torch.zeros(num_clients, dtype=torch.float64)
            self.add_state(name, zeros, dist_reduce_fx="sum")

    def update(self, ids: Tensor, losses: Tensor, correct: Tensor, count: Tensor) -> None:
        """Adds sums over some samples of clients `ids`; all four [C]."""
        ids = ids.to(self.count.device)
        self.loss_sum.index_add_(0, ids, losses.to(self.loss_sum))
        self.correct_sum.index_add_(0, ids, correct.to(self.loss_sum))
        self.count.index_add_(0, ids, count.to(self.loss_sum))

    def compute(self) -> dict[str, np.ndarray]:
        """Returns `loss`, `accuracy` (NaN for regression) and `count`, float64 [M].

        Clients without samples have NaN.
        """
        count = self.count.cpu().numpy()
        with np.errstate(invalid="ignore", divide="ignore"):
            loss = self.loss_sum.cpu().numpy() / count
            accuracy = self.correct_sum.cpu().numpy() / count
        return {"loss": loss, "accuracy": accuracy, "count": count}


def summarize(scores: dict[str, np.ndarray]) -> dict[str, float]:
    """Returns the reported numbers of accuracy and loss over the clients that have samples.

    They are the unweighted mean over clients; `_std`, the standard deviation over clients (divisor:
    the number of clients); `_worst10`, the mean of the worst tenth of the clients, rounded up;
    `_pooled`, the mean over all samples. Accuracy is left out for regression.
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
    """Returns the mean of the lowest tenth of the values, rounded up to a whole number of values.

    NaN, the loss of a model that diverged, is the worst of all.
    """
    if np.isnan(values).any():
        return math.nan
    return float(np.sort(values)[: math.ceil(len(values) / 10)].mean())


def row_scores(oracle: Oracle, clients: Clients, w: Tensor) -> Iterator[Scores]:
    """Yields the scores of every client's own model, w [C, P], on the client's own samples."""
    ids = torch.from_numpy(clients.ids)
    for rows, batch in clients.samples():
        buffers = None if clients.buffers is None else clients.buffers[rows]
        losses, correct = oracle.evaluate(w[rows], batch, buffers)
        counts, number = oracle.runner.target_counts(batch.targets, 2), torch.tensor(batch.counts)
        if counts is not None:  # sequences: each real target counts once
            counts = counts * (batch.sample_weights(losses.dtype) > 0)
            losses, correct, number = losses * counts, correct * counts, counts.sum(1)
        yield ids[rows], losses.sum(1), correct.sum(1), number
