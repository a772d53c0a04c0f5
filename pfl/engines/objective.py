"""Objectives: losses of a method's own, which see outputs, features and the client's tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn

from pfl.errors import ConfigError


class BatchSamples(NamedTuple):
    """The samples of one client in a mini-batch: inputs [n, ...] and targets [n, ...]."""

    inputs: Tensor
    targets: Tensor


class Outputs(NamedTuple):
    """What a model gives for n samples: outputs [n, ...], and features [n, K] before the head."""

    outputs: Tensor
    features: Tensor


ObjectiveLoss: TypeAlias = Callable[[Tensor, Tensor, BatchSamples, Mapping[str, Any]], Tensor]
"""loss(outputs, features, samples, own) -> [n]: a loss for each of a client's n samples."""


@dataclass(frozen=True)
class Objective:
    """A loss that replaces the method's loss in the gradients of many clients' models.

    The function is called for one client at a time, or inside of `torch.func.vmap`: it must use
    PyTorch's functions on its arguments, and the loss of a sample must not depend on the other
    samples of the batch, which may be padding.

    Attributes:
        loss: loss(outputs, features, samples, own), with gradients through outputs [n, ...] and the
            features [n, K], which are the input of the network's head; it returns one value for
            each of the n samples, [n]. `samples` has the inputs and the targets. `own` has the
            client's row of each tensor below, and the `Outputs` of each older model for the same
            samples, by name.
        own: What each client has or has received, [C, ...] by name.
        older: Models that do not move, [P] or [C, P] by name. They run in evaluation mode, with the
            running statistics that the client has now, and without gradients.

    Example:
        Squared distances of the features to a point of each client are added to the loss:

        >>> def f(outputs, features, samples, own):
        ...     away = (features - own["center"]).square().sum(1)
        ...     loss = nn.functional.cross_entropy(outputs, samples.targets, reduction="none")
        ...     return loss + away
        >>> import torch
        >>> objective = Objective(f, own={"center": torch.zeros(5, 8)})  # five clients
    """

    loss: ObjectiveLoss
    own: Mapping[str, Tensor] = field(default_factory=dict)
    older: Mapping[str, Tensor] = field(default_factory=dict)

    def rows(self, rows: slice | Tensor) -> Objective:
        """Returns the objective of some clients, which are rows of what this one has."""
        own = {name: values[rows] for name, values in self.own.items()}
        older = {name: w if w.dim() == 1 else w[rows] for name, w in self.older.items()}
        return Objective(self.loss, own, older)

    def losses(self, result: Outputs, samples: BatchSamples, own: Mapping[str, Any]) -> Tensor:
        """Returns the loss of each of a client's n samples, [n].

        Raises:
            ConfigError: The function does not return one value per sample.
        """
        losses = self.loss(result.outputs, result.features, samples, own)
        if not isinstance(losses, Tensor) or losses.shape != samples.targets.shape[:1]:
            n = len(samples.targets)
            returned = type(losses).__name__
            if isinstance(losses, Tensor):
                returned = str(list(losses.shape))
            raise ConfigError(
                f"model: the objective returns {returned} for {n} samples; it must return one loss "
                f"for each of them, [{n}]"
            )
        return losses


@contextmanager
def watched_head(network: nn.Module, head: str) -> Iterator[list[Any]]:
    """Records inside, for each call of the head, its arguments and its output."""
    calls: list[Any] = []
    module = network.get_submodule(head)
    hook = module.register_forward_hook(lambda _, args, output: calls.append((args, output)))
    try:
        yield calls
    finally:
        hook.remove()


def run_watched(network: nn.Module, head: str, run: Callable[[], Tensor]) -> Outputs:
    """Returns the outputs of `run()`, and the features that the head got when it was last called.

    Raises:
        ConfigError: The head was not called with one tensor.
    """
    with watched_head(network, head) as calls:
        outputs = run()
    args: tuple[Any, ...] = ()
    if calls:
        args = calls[-1][0]
    if len(args) != 1 or not isinstance(args[0], Tensor):
        raise ConfigError(
            f"model.network: {type(network).__name__} does not call its last layer {head!r} with "
            f"one tensor, the features that the objective of the method needs; call "
            f"self.head(features)"
        )
    return Outputs(outputs, args[0])
