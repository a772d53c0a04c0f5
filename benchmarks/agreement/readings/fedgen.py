"""What PFLlib's and HtFLlib's FedGen compute instead, and our FedGen with the same draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot, relu

from benchmarks.agreement.problem import CLASSES, EVERYONE, Iterates, MadeFeatures, arrays, started
from pfl.algorithms import FedGen
from pfl.algorithms.distillation import fedgen


class GivenGenerator(fedgen.Generator):
    """A generator whose first values are given, and whose noise is uniform, as theirs."""

    def first_values(self, rng: Any) -> Tensor:
        return torch.from_numpy(started(sum(self.sizes), 0))

    def draw(self, rng: Any, shares: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = np.searchsorted(shares.cumsum(), rng.places(count), "right")
        return labels.clip(max=self.classes - 1), rng.noise(count)


class NormalizedGenerator(GivenGenerator):
    """The hidden layer is normalized over the features of a step, before the relu."""

    def __init__(self, classes: int, noise: int, hidden: int, features: int) -> None:
        super().__init__(classes, noise, hidden, features)
        self.sizes[2:2] = [hidden, hidden]

    def __call__(self, values: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        first, offset, scale, shift, second, last = values.split(self.sizes)
        x = torch.cat([noise, one_hot(labels, self.classes).to(noise)], -1)
        z = x @ first.view(self.hidden, -1).T + offset
        spread = (z.var(-2, unbiased=False, keepdim=True) + 1e-5).sqrt()
        z = relu((z - z.mean(-2, keepdim=True)) / spread * scale + shift)
        return z @ second.view(self.features, -1).T + last


class EarlyFedGen(FedGen):
    """Labels have the distribution of all clients' samples, from the first round on."""

    def begin_round(self, round_index: int) -> None:
        super().begin_round(round_index)
        counts = np.bincount(np.concatenate(arrays()[1]), minlength=CLASSES)
        self.label_shares.copy_(torch.from_numpy(counts / counts.sum()))

    def train_server(self, received: dict[str, Tensor]) -> None:
        super().train_server(received | {"labels": self.label_shares.clone()})


class LastingFedGen(EarlyFedGen):
    """Adam lasts over the rounds."""

    _adam: torch.optim.Adam | None = None

    def descend_at_server(
        self, values: Tensor, gradient: Callable[..., Any], *, steps: int, lr: float, **given: Any
    ) -> float:
        if self._adam is None:
            self._theta = values.clone().requires_grad_()
            self._adam = torch.optim.Adam([self._theta], lr)
        for step in range(steps):
            _, self._theta.grad = gradient(self._theta, step)
            self._adam.step()
        values.copy_(self._theta.detach())
        return 0.0


def _given(seed: int, purpose: str, round_index: int = 0, client: int = len(EVERYONE)) -> Any:
    return MadeFeatures(round_index, client)


def drawn_alike(made: type[fedgen.Generator], iterates: Callable[[], Iterates]) -> Iterates:
    """The iterates of a run of FedGen, with such a generator."""
    with patch.multiple(fedgen, Generator=made, generator=_given):
        return iterates()
