"""Features: what the last layer of a network gets, for methods that use them by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from pfl.engines.batch import Batch
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
    oracle: Oracle, w: Tensor, batch: Batch, head: str, buffers: Tensor | None = None
) -> Tensor:
    """Returns the inputs of the head for a batch of each of A clients' models, in evaluation mode.

    Works with every engine and in several threads. The network runs in the Trainer's precision; the
    features have the dtype of the models.

    Args:
        oracle: The method's `self.oracle`.
        w: The models, [A, P].
        batch: Samples [A, B, ...] of the clients, such as `clients.samples` yields.
        head: The name of the head, such as `head_name` returns.
        buffers: The models' running statistics, [A, ...], or None.

    Returns:
        The features, [A, B, K]; those of padding mean nothing.

    Raises:
        ConfigError: The output of the network is not that of its head.
    """
    runner = oracle.runner

    def run(w: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        network, _ = runner.replica(training=False)
        return _watched(network, head, lambda: functional_call(network, split(w), (inputs,)))

    def run_one(c: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        own = None if buffers is None else buffers[c]
        network, _ = runner.load(w[c], own, training=False)
        inputs = runner.laid_out(batch.inputs[c, :count])
        return _watched(network, head, lambda: network(inputs))

    split = runner.space.split
    with runner.precision():
        if oracle.engine.batched:
            calls = [vmap(run)(w, batch.inputs)]
        else:
            calls = [run_one(c, count) for c, count in enumerate(batch.counts)]
    for _, scores, outputs in calls:
        if scores.shape != outputs.shape or not torch.allclose(scores, outputs, equal_nan=True):
            raise _not_last(runner.network, head)
    if oracle.engine.batched:
        return calls[0][0].to(w.dtype)
    return nn.utils.rnn.pad_sequence([z for z, *_ in calls], batch_first=True).to(w.dtype)


def _watched(
    network: nn.Module, head: str, run: Callable[[], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the input and the output of the head when it was last called, and `run`'s result."""
    calls: list[tuple[Any, ...]] = []
    module = network.get_submodule(head)
    hook = module.register_forward_hook(lambda _, args, output: calls.append((*args, output)))
    try:
        outputs = run()
    finally:
        hook.remove()
    if not calls or len(calls[-1]) != 2:
        raise _not_last(network, head)
    return (*calls[-1], outputs)


def _not_last(network: nn.Module, head: str) -> ConfigError:
    return ConfigError(
        f"model.network: the output of {type(network).__name__} is not that of its last layer "
        f"{head!r}, which the method trains by itself; call the layer last, as self.head(features)"
    )
