"""What the tests of every method have to know about one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

import pfl.algorithms
from models import HalfSquaredError
from pfl.algorithms import FederatedAlgorithm
from tests.algorithms import closed_forms as forms


@dataclass(frozen=True)
class Method:
    """What the common tests must know of a method.

    Attributes:
        name: Of the entry: that of the class, which may have several, and what sets them apart.
        limit: limit(quadratics, **arguments): where it ends. None: it adds layers to the network,
            and there is no closed form.
        cost: Of a participant in a round.
        arguments: The class's own, in all tests.
        private: The client states that hold personal parameters and must never leave the
            client. Not those that the method sends by design, or that the server can work out from
            what it is sent.
        trained_with_private: Whether what a client sends is trained together with its private
            states, and so depends on them.
        settle: Further ones where the limit is looked for.
        rounds, accuracy: After how many rounds the limit is reached, and how closely.
        problem: The problem whose limit is known, by number of clients.
        classes: Whether samples must have classes. The small world's then have, and the loss of the
            common tests is the cross entropy.
        counts_matter: Whether more copies of all samples change the result: from the second round
            on, or in every round.
        everyone: Whether all clients must take part in every round.
        timed: Whether the number of a round decides what it does, even with full gradients.
        draws: Whether clients draw numbers by their ids, even with full gradients.
        more_epochs: Epochs in which clients train the model that they send, or a part of it, beyond
            `local_epochs`.
        still: Patterns of the parameters that keep values of the first global model.
        whole: The client states, and values of the server's network, that hold whole numbers.
        kind: The class, where the package's own needs a change.
    """

    name: str
    limit: Callable[..., forms.Models] | None
    cost: forms.Cost
    arguments: Mapping[str, Any] = field(default_factory=dict)
    private: tuple[str, ...] = ()
    trained_with_private: bool = False
    settle: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.4, "local_steps": 6})
    rounds: int = 12
    accuracy: float = 1e-7
    problem: Callable[[int], forms.Quadratics] = forms.different
    classes: bool = False
    counts_matter: Literal["later", "always"] | None = None
    everyone: bool = False
    timed: bool = False
    draws: bool = False
    more_epochs: int = 0
    still: Sequence[str] = ()
    whole: Sequence[str] = ()
    kind: Any = None

    def __post_init__(self) -> None:
        if self.kind is None:
            kind = getattr(pfl.algorithms, self.name.split(",")[0])
            object.__setattr__(self, "kind", kind)

    @property
    def pooled(self) -> bool:
        """Whether one client, with id 0, trains on the samples of all."""
        return self.kind.pooled

    @property
    def loss(self) -> nn.Module | None:
        """The loss for the samples of the small world; None: the default."""
        return None if self.classes else HalfSquaredError()

    def make(self, network: nn.Module, **training: Any) -> FederatedAlgorithm:
        """The algorithm, with `loss` where no other one is given."""
        return self.kind(network, **{"loss": self.loss, **self.arguments, **training})
