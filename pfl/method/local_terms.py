"""What is added to a client's loss in local training, one step at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from pfl.proximal import soft_threshold


@dataclass
class LocalTerms:
    """The terms of f_i(v + offset) - <drift, v> + pull/2 |v|^2 + l1 |v|_1, and what follows a step.

    Attributes:
        offset: A part of the models that does not move, [C, P]; None for zero.
        pull: The weight of the quadratic (proximal) term.
        drift: Minus the gradient at v = 0 of all that is added to f_i, [P] or [C, P]; a number is
            zero.
        l1: The weight of the l1 norm.
        prox: A function of v [A, P] and the learning rate that is applied after each step.
        part: The values that move, bool [P]; None for all. The others keep their bits.
        mask: A factor of 0 or 1 on every value after each step, [C, P]; None for none.
    """

    offset: Tensor | None
    pull: float
    drift: Tensor | float
    l1: float
    prox: Callable[[Tensor, float], Tensor] | None
    part: Tensor | None
    mask: Tensor | None

    def point(self, v: Tensor) -> Tensor:
        """Returns where the gradients of models v [C, P] are taken."""
        if self.offset is None:
            return v
        return v + self.offset

    def direction(self, g: Tensor, v: Tensor) -> Tensor:
        """Returns the gradients g of f_i, and of what is added to it but the l1 norm, [C, P]."""
        if self.pull or isinstance(self.drift, Tensor):
            return g + self.pull * v - self.drift
        return g

    def after_step(self, v: Tensor, rate: float) -> None:
        """Applies the l1 norm, `prox` and the mask to the models [A, P] that took a step."""
        if self.l1 > 0:
            self._move(v, soft_threshold(v, rate * self.l1))
        if self.prox is not None:
            self._move(v, self.prox(v, rate))
        if self.mask is not None:
            self._move(v, v * self.mask[: len(v)])

    def _move(self, v: Tensor, moved: Tensor) -> None:
        """Puts other values of the part in place."""
        if self.part is not None:
            moved = torch.where(self.part, moved, v)
        v.copy_(moved)
