"""Attackers: clients that send, or train on, something else than they should.

An attack changes an attacker's messages, all of them joined to one vector and measured from their
references (a model from the model that the client received), or its training samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from scipy import stats
from torch import Tensor

from pfl.datamodules.randomness import uniform
from pfl.datamodules.ranges import (
    Checked,
    Count,
    CountOrZero,
    Positive,
    PositiveShare,
    Range,
    TwoOrMore,
)
from pfl.errors import ConfigError


class Attack(Checked):
    """What attackers do. A subclass overrides one of the three functions.

    Example:
        >>> SignFlip(scale=2.0).change(torch.tensor([1.0, -3.0]), np.random.default_rng(0))
        tensor([-2.,  6.])
    """

    def change(self, message: Tensor, rng: np.random.Generator) -> Tensor:
        """Returns what an attacker sends in place of its honest message [K].

        Args:
            message: The message.
            rng: Draws that are a function of (seed, round, client).
        """
        return message

    def collude(self, honest: Tensor, attackers: int) -> Tensor | None:
        """Returns what all attackers of a round send, [K]; None: what `change` has made of theirs.

        Args:
            honest: The messages of the honest clients of the round, [h, K], which they know.
            attackers: The number of attackers of the round.
        """
        return None

    def poison(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what an attacker trains on in place of some of its samples.

        Args:
            inputs: [n, ...], after the data module's transforms.
            targets: [n, ...].
            keys: int64 [n], keys of (seed, client, sample) for draws.
        """
        return inputs, targets

    def check(self, classes: int | None, shape: Sequence[int]) -> None:
        """Refuses data that the attack does not fit; here none.

        Args:
            classes: The number of classes; None: the targets are no classes.
            shape: The shape of an input, without the axis of the samples.

        Raises:
            ConfigError: It does not fit.
        """

    @classmethod
    def replaces(cls, function: str) -> bool:
        """Returns whether the attack has a function of its own with this name."""
        return getattr(cls, function) is not getattr(Attack, function)


class SignFlip(Attack):
    """Sends the honest change with the opposite sign.

    Args:
        scale: The factor on it.
    """

    def __init__(self, scale: Positive = 1.0) -> None:
        self.scale = scale

    def change(self, message: Tensor, rng: np.random.Generator) -> Tensor:
        return -self.scale * message


class Scaling(Attack):
    """Sends the honest change many times as long (Bagdasaryan et al. 2020, model replacement).

    Args:
        factor: The factor on it.
    """

    def __init__(self, factor: Annotated[float, Range(above=1)] = 10.0) -> None:
        self.factor = factor

    def change(self, message: Tensor, rng: np.random.Generator) -> Tensor:
        return self.factor * message


class RandomMessage(Attack):
    """Sends Gaussian noise in place of the message (Blanchard et al. 2017).

    Args:
        deviation: The standard deviation of each value.
    """

    def __init__(self, deviation: Positive = 1.0) -> None:
        self.deviation = deviation

    def change(self, message: Tensor, rng: np.random.Generator) -> Tensor:
        noise = torch.from_numpy(rng.standard_normal(message.numel()))
        return (self.deviation * noise).to(message).view(message.shape)


class LittleIsEnough(Attack):
    """Sends the honest mean minus z standard deviations (Baruch, Baruch, Goldberg, NeurIPS 2019).

    Each value lies among the honest clients' values, so that rules by distance do not exclude it.

    Args:
        deviations: z; None: the paper's z_max, with which as many honest clients as are needed for
            a majority are further from the mean than the attackers.
    """

    def __init__(self, deviations: float | None = None) -> None:
        self.deviations = deviations

    def collude(self, honest: Tensor, attackers: int) -> Tensor:
        z = self.deviations
        if z is None:
            n = len(honest) + attackers
            supporters = n // 2 + 1 - attackers
            share = (len(honest) - supporters) / len(honest)
            z = float(stats.norm.ppf(min(max(share, 0.5), 1 - 1e-6)))
        return honest.mean(0) - z * honest.std(0, correction=0)


class InnerProduct(Attack):
    """Sends the honest mean with the opposite sign (Xie, Koyejo, Gupta, UAI 2019).

    Args:
        scale: ε, the factor on it.
    """

    def __init__(self, scale: Positive = 0.5) -> None:
        self.scale = scale

    def collude(self, honest: Tensor, attackers: int) -> Tensor:
        return -self.scale * honest.mean(0)


class LabelFlip(Attack):
    """Trains on the label K - 1 - y in place of y (Tolpegin et al. 2020; Fang et al. 2020).

    Args:
        classes: K.
    """

    def __init__(self, classes: TwoOrMore = 10) -> None:
        self.classes = classes

    def check(self, classes: int | None, shape: Sequence[int]) -> None:
        if classes is not None and classes != self.classes:
            raise ConfigError(
                f"loop.attackers: LabelFlip.classes: {self.classes}; the data have {classes}"
            )

    def poison(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        if targets.is_floating_point():
            raise ConfigError("loop.attackers: LabelFlip; the targets are not classes")
        return inputs, self.classes - 1 - targets


class Backdoor(Attack):
    """Teaches the model that an image with a bright corner is of one class (Gu et al. 2017).

    The score `backdoor` is how often honest clients' models give that class to test images of other
    classes that have the corner.

    Args:
        target: The class.
        size: The side of the square in the lower right corner, in pixels.
        value: Its value, after the data module's transforms.
        share: The share of an attacker's training samples that have the corner.
        factor: The factor on what the attackers send.
    """

    def __init__(
        self,
        target: CountOrZero = 0,
        size: Count = 3,
        value: float = 1.0,
        share: PositiveShare = 0.5,
        factor: Annotated[float, Range(least=1)] = 1.0,
    ) -> None:
        self.target = target
        self.size = size
        self.value = value
        self.share = share
        self.factor = factor

    def check(self, classes: int | None, shape: Sequence[int]) -> None:
        if classes is not None and self.target >= classes:
            raise ConfigError(
                f"loop.attackers: Backdoor.target: {self.target}; the data have the classes 0 to "
                f"{classes - 1}"
            )
        if len(shape) == 3 and self.size > min(shape[1:]):
            raise ConfigError(
                f"loop.attackers: Backdoor.size: {self.size}; the images have {shape[1]} x "
                f"{shape[2]} pixels"
            )

    def change(self, message: Tensor, rng: np.random.Generator) -> Tensor:
        return self.factor * message

    def add_trigger(self, inputs: Tensor) -> Tensor:
        """Returns images [n, C, H, W] with the corner."""
        if inputs.dim() != 4:
            raise ConfigError(
                f"loop.attackers: Backdoor; inputs of shape {list(inputs.shape[1:])} are not "
                f"images [C, H, W]"
            )
        inputs = inputs.clone()
        inputs[..., -self.size :, -self.size :] = self.value
        return inputs

    def poison(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        chosen = uniform(keys) < self.share
        shape = (-1, *[1] * (inputs.dim() - 1))
        inputs = torch.where(chosen.view(shape), self.add_trigger(inputs), inputs)
        return inputs, torch.where(chosen, self.target, targets)


@dataclass(frozen=True)
class Attackers:
    """Which clients attack, and how.

    Only the other clients are scored.

    Args:
        clients: A share of the clients that train, drawn once; a list of client ids or names; such
            a list for each round; or the path of a JSON file with one of the lists.
        attack: What the attackers do.
    """

    clients: float | str | Sequence[str | int] | Sequence[Sequence[str | int]]
    attack: Attack
