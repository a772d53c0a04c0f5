"""How the server makes one message of the messages of a round's clients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from pfl.aggregation.joined import NOT_FINITE
from pfl.errors import ConfigError
from pfl.stages.stage import Messages, Place, References, Served, Stage, by_place


@dataclass
class Arrived:
    """What has arrived at the server in a round, over all processes.

    Attributes:
        ids: The clients whose messages arrived, ascending int64 [n].
        sizes: Their numbers of samples, int64 [n].
        samples: The number of their samples together.
        sums: The sums [K] of messages by name.
        rows: The messages [n, K] that are needed one by one, by name, in the order of `ids`.
    """

    ids: np.ndarray
    sizes: np.ndarray
    samples: float
    sums: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)


class Mean(Stage):
    """A stage that makes the means of messages itself.

    The messages of a group of clients are added up by `sums`, in the thread that trained them;
    `means` makes the means of the sums over all groups and processes.
    """

    place: ClassVar[Place] = Place.SERVER
    one_by_one: ClassVar[bool] = False
    """Whether `means` needs the messages of all clients at the same time, in `Arrived.rows`."""

    def sums(self, messages: Messages, sizes: np.ndarray, like: Tensor) -> dict[str, Tensor]:
        """Returns sums [K] by name over C clients' messages [C, K].

        Args:
            messages: The messages that the server reads as means, by name.
            sizes: Number of samples of each client, int64 [C].
            like: A tensor with the dtype and the device of the sums.
        """
        raise NotImplementedError

    def means(self, arrived: Arrived, metrics: dict[str, float]) -> dict[str, Tensor] | None:
        """Returns the means [K] by name; None if there is no client to average over.

        Args:
            arrived: What has arrived. Its sums and rows may be changed.
            metrics: Numbers of the round's row, to which the stage may add some.
        """
        raise NotImplementedError

    def participants(self, arrived: int) -> int:
        """Returns the number of clients in a round, as the server may know it."""
        return arrived


class WeightedMean(Mean):
    """The mean with the clients' weights: sum_i p_i x_i / sum_i p_i, for each message.

    Args:
        weighting: The weights p_i for messages that do not name their own: "samples" or "uniform".

    Example:
        >>> mean = WeightedMean("samples")
        >>> from pfl.communication import Message
        >>> sent = {"w": Message(torch.tensor([[1.0], [4.0]]), nbytes=4)}
        >>> sums = mean.sums(sent, np.array([2, 1]), like=torch.zeros(1))
        >>> mean.means(Arrived(np.array([5, 8]), np.array([2, 1]), 3, sums), {})
        {'w': tensor([2.])}
    """

    def __init__(self, weighting: str) -> None:
        self.weighting = weighting
        self._weightings: dict[str, str] = {}

    def sums(self, messages: Messages, sizes: np.ndarray, like: Tensor) -> dict[str, Tensor]:
        sums = {}
        for name, message in messages.items():
            weighting = message.weighting or self.weighting
            weights = torch.from_numpy(sizes).to(like)
            if weighting == "uniform":
                weights = torch.ones_like(weights)
            sums[name] = weights @ message.values.to(like)
            self._weightings[name] = weighting
        return sums

    def means(self, arrived: Arrived, metrics: dict[str, float]) -> dict[str, Tensor] | None:
        total = {"samples": arrived.samples, "uniform": float(len(arrived.ids))}
        if total[self.weighting] == 0:
            return None
        for name, values in arrived.sums.items():
            # Without samples all weights are 0, and so is the sum.
            values.div_(max(total[self._weightings[name]], 1.0))
        return arrived.sums


def client_weights(weighting: str, sizes: np.ndarray) -> Tensor:
    """Returns the weight of each client with a number of samples, [C]."""
    if weighting == "uniform":
        return torch.ones(len(sizes), dtype=torch.float64)
    return torch.from_numpy(sizes)


class MeasuredMean(Mean):
    """What a server makes of messages that are measured from their public references."""

    def __init__(self) -> None:
        self._references = References()
        self._found: dict[str, Tensor] = {}  # the references of the messages of the round
        self._served: Served

    def set_up(self, served: Served) -> None:
        self._served = served
        served.refuse_pooled(self.key)

    def begin(self, round_index: int) -> None:
        self._references.begin()
        self._found = {}

    def down(self, messages: Messages) -> Messages:
        self._references.note(messages)
        return messages

    def measured(
        self, messages: Messages, like: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Returns the values [C, K] of messages and their references [K], which are noted."""
        values = {name: message.values.to(like) for name, message in messages.items()}
        references = self._references.of(messages)
        self._found |= references
        return values, references

    def take_not_finite(self, arrived: Arrived, metrics: dict[str, float]) -> None:
        """Moves the number of clients whose messages counted as zero into the round's row."""
        if NOT_FINITE in arrived.sums:
            metrics["not_finite"] = float(arrived.sums.pop(NOT_FINITE))


class Stages(list[Stage]):
    """The stages of a run, in the order in which they act; none in a plain run.

    Args:
        stages: The stages, in any order.
        weighting: The clients' weights where no stage makes the means.

    Attributes:
        mean: Makes the means: the one stage that does, or a `WeightedMean`.

    Raises:
        ConfigError: A stage takes what another one needs, or two of them make the means.
    """

    def __init__(self, stages: Sequence[Stage], weighting: str) -> None:
        super().__init__(by_place(stages))
        made = [stage for stage in self if isinstance(stage, Mean)]
        if len(made) > 1:
            one, other = made[:2]
            raise ConfigError(
                f"{other.key}: {one.key} makes the means as well; leave one of them out"
            )
        self.mean: Mean = WeightedMean(weighting)
        if made:
            self.mean = made[0]
