"""Features: what the last layer of a network gets, for methods that use them by themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pfl.engines.oracle import Oracle
from pfl.errors import ConfigError


def head_name(network: nn.Module) -> str:
    """Returns the name of a network's head, "" for a network that is a single layer.

    The head is the module `head` of the network or, where there is none, the last module that has
    trainable parameters of its own, in the order in which the network lists its modules.

    Example:
        >>> head_name(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Flatten()))
        '2'
    """
    head = getattr(network, "head", None)
    if isinstance(head, nn.Module) and any(True for _ in head.parameters()):
        return "head"
    modules = network.named_modules(remove_duplicate=False)
    return [name for name, module in modules if _trains(module)][-1]


def _trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters(recurse=False))


@torch.no_grad()
def features(
    oracle: Oracle, w: Tensor, inputs: Tensor, head: str, buffers: Tensor | None = None
) -> Tensor:
    """Returns the inputs of a network's head, [n, ...], for one model in evaluation mode.

    Works with every engine and in several threads. The network runs in the Trainer's precision; the
    features have the dtype of the model.

    Args:
        oracle: The method's `self.oracle`.
        w: The model, [P].
        inputs: Samples, [n, ...].
        head: The name of the head, such as `head_name` returns.
        buffers: The model's running statistics, or None.

    Raises:
        ConfigError: The output of the network is not that of its head.
    """
    runner, calls = oracle.runner, []
    network, _ = runner.load(w, buffers, training=False)
    module = network.get_submodule(head)
    hook = module.register_forward_hook(lambda _, args, output: calls.append((*args, output)))
    try:
        with runner.precision():
            outputs = network(runner.laid_out(inputs))
    finally:
        hook.remove()
    if calls and len(calls[-1]) == 2:
        given, scores = calls[-1]
        same = scores.shape == outputs.shape
        if same and torch.allclose(scores, outputs, equal_nan=True):
            return given.to(w.dtype)
    raise ConfigError(
        f"model.network: the output of {type(network).__name__} is not that of its last layer "
        f"{head!r}, which the method trains by itself; call the layer last, as self.head(features)"
    )
