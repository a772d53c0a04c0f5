"""Networks that are common layers in turn, of which it is known what each layer does, and when."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from pfl._private import has_hooks
from pfl.engines.dropout import KeyedDropout, kept_of
from pfl.models.classifier import Classifier
from pfl.parameters import ParameterSpace

COMMON = (
    nn.Linear,
    nn.Conv2d,
    nn.MaxPool2d,
    nn.GroupNorm,
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.Flatten,
    nn.ReLU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Dropout,
    KeyedDropout,
)
OF_IMAGES = (nn.MaxPool2d, nn.GroupNorm)
"""Layers that a network without convolutions does not have, if its samples are vectors."""


class LayersInTurn(NamedTuple):
    """The layers of a network that runs one after another, each of them once.

    Attributes:
        steps: The layers, without those that never change anything.
        spans: For each layer, where the values of its parameters are in the vector of the space.
        of_vectors: Whether samples are vectors in all layers but a first `nn.Flatten`.
    """

    steps: list[nn.Module]
    spans: dict[nn.Module, list[slice]]
    of_vectors: bool


def layers_in_turn(
    network: nn.Module, space: ParameterSpace, inputs: Tensor
) -> LayersInTurn | None:
    """Returns the layers of a network for inputs [n, ...]; None unless it is common layers in turn.

    Each parameter of the space belongs to one layer, and none is frozen.
    """
    steps = [step for step in _steps(network) if not _is_identity(step)]
    changed = any("forward" in vars(m) or has_hooks(m) for m in network.modules())
    if changed or not all(_is_common(step) for step in steps):
        return None
    names = {parameter: name for name, parameter in network.named_parameters()}
    layers = space.spans
    spans: dict[nn.Module, list[slice]] = {}
    for step in steps:
        own = [layers.get(names[parameter]) for parameter in step.parameters()]
        spans[step] = [span for span in own if span is not None]
        if len(own) > len(spans[step]):  # a parameter is frozen
            return None
    if sum(len(spans[step]) for step in steps) != len(space.layers):  # a parameter is shared
        return None
    if not _norms_fit(steps, inputs):
        return None
    kinds = [type(step) for step in steps]
    if nn.Conv2d not in kinds:
        images = inputs.ndim > 2 and nn.Flatten not in kinds
        if images or any(kind in OF_IMAGES for kind in kinds):
            return None
        first = next(step for step in steps if spans[step])
        if _width(first) != inputs[0].numel():
            return None
        return LayersInTurn(steps, spans, of_vectors=True)
    flat = nn.Linear not in kinds or nn.Flatten in kinds[: kinds.index(nn.Linear)]
    if inputs.ndim != 4 or not flat:
        return None
    return LayersInTurn(steps, spans, of_vectors=False)


def _steps(network: nn.Module) -> list[nn.Module]:
    """Returns the layers of nested sequences; the network itself if it is not a sequence."""
    if type(network) is nn.Sequential:
        return [step for child in network for step in _steps(child)]
    if isinstance(network, Classifier) and type(network).forward is Classifier.forward:
        return [*_steps(network.body), network.head]
    return [network]


def _is_identity(step: nn.Module) -> bool:
    """Whether a layer never changes anything."""
    if isinstance(step, nn.Dropout):
        return kept_of(step) == 65536
    return isinstance(step, nn.Identity)


def _is_common(step: nn.Module) -> bool:
    """Whether a layer is one of the common ones, with common settings."""
    if type(step) is nn.Conv2d:
        return step.padding_mode == "zeros" and not isinstance(step.padding, str)
    if type(step) is nn.MaxPool2d:
        return not step.return_indices
    if type(step) in (nn.BatchNorm1d, nn.BatchNorm2d):
        return bool(step.track_running_stats) and step.running_mean is not None
    if type(step) is nn.Flatten:
        return (step.start_dim, step.end_dim) == (1, -1)
    return type(step) in COMMON


def _norms_fit(steps: list[nn.Module], inputs: Tensor) -> bool:
    """Whether BatchNorm1d gets vectors and BatchNorm2d maps."""
    flat = inputs.ndim == 2
    for step in steps:
        flat = flat or isinstance(step, nn.Flatten)
        if isinstance(step, nn.BatchNorm1d) and not flat:
            return False
        if isinstance(step, nn.BatchNorm2d) and flat:
            return False
    return True


def _width(layer: nn.Module) -> int | None:
    """Returns how many values a layer of vectors takes; None for a layer of images."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    if isinstance(layer, nn.BatchNorm1d):
        return layer.num_features
    return None
