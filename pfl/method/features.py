"""Features: what the last layer of a network gets, for methods that use them by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from pfl.clients import Clients
from pfl.engines.batch import Batch, Buffers
from pfl.engines.objective import watched_head
from pfl.engines.oracle import Oracle
from pfl.errors import ConfigError
from pfl.method.hooks import Method


@torch.no_grad()
def features(oracle: Oracle, w: Tensor, batch: Batch, buffers: Buffers = None) -> Tensor:
    """Returns the inputs of the head for a batch of each of A clients' models, in evaluation mode.

    Works with every engine and in several threads. The network runs in the Trainer's precision; the
    features have the dtype of the models.

    Args:
        oracle: The method's `self.oracle`.
        w: The models, [A, P].
        batch: Samples [A, B, ...] of the clients, such as `clients.samples` yields.
        buffers: The models' running statistics, [A, ...], or None.

    Returns:
        The features, [A, B, K]; those of padding mean nothing.

    Raises:
        ConfigError: The output of the network is not that of its head.
    """
    runner = oracle.runner
    head = oracle.runner.head

    def run(w: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        network, _ = runner.replica(training=False)
        return _run_watched(network, head, lambda: functional_call(network, split(w), (inputs,)))

    def run_one(c: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
        own = None if buffers is None else buffers[c]
        network, _ = runner.load(w[c], own, training=False)
        inputs = runner.laid_out(batch.inputs[c, :count])
        return _run_watched(network, head, lambda: network(inputs))

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


def class_sums(
    oracle: Oracle, clients: Clients, v: Tensor, classes: int, *, labelled: bool = True
) -> tuple[Tensor, Tensor]:
    """Returns sums over each client's samples of the features that its model gives them.

    Args:
        oracle: The method's `self.oracle`.
        clients: C clients, with the running statistics of their models.
        v: Their models, [C, P].
        classes: The number of classes.
        labelled: Whether the targets are classes; else all samples count as the first class.

    Returns:
        For each class the number of samples and the sum of their features, [C, classes, 1 + K]; and
        the sum of |z|^2 over all samples, [C].
    """
    head = oracle.runner.original.get_submodule(oracle.runner.head)
    width = cast(nn.Linear, head).in_features
    sums = v.new_zeros(len(clients), classes, 1 + width)
    squares = v.new_zeros(len(clients))
    for rows, batch in clients.samples():
        buffers = None if clients.buffers is None else clients.buffers[rows]
        z = features(oracle, v[rows], batch, buffers)
        member = (batch.sample_weights(z.dtype) > 0).to(z)[..., None]  # 0 for padding
        squares[rows] += (member * z.square()).sum((1, 2))
        if labelled:
            member = member * nn.functional.one_hot(batch.targets, classes)
        sums[rows, : member.shape[2], 0] += member.sum(1)
        sums[rows, : member.shape[2], 1:] += member.mT @ z
    return sums, squares


def distance_to_means(means: Tensor, features: Tensor, classes: Tensor) -> Tensor:
    """Returns 1/K |z - C_c|^2 of each sample, [n]; 0 where C_c is not known.

    Args:
        means: For each class whether C_c is known, 0 or 1, and its K values, [classes, 1 + K].
        features: z, [n, K].
        classes: c, int64 [n].
    """
    own = means[classes]
    return own[:, 0] * (features - own[:, 1:]).square().mean(1)


def require_trained_features(method: Method, same: str) -> None:
    """Refuses a frozen body, whose features no penalty on features moves.

    Args:
        method: The method.
        same: What it would be.

    Raises:
        ConfigError: The head alone is trained.
    """
    head = method.oracle.runner.head
    frozen = any(not p.requires_grad for p in method.network.parameters())
    if frozen and all(layer.name.startswith(f"{head}.") for layer in method.space.layers):
        name = type(method).__name__
        raise ConfigError(
            f"model.trainable: the head alone is trained, so that the penalty of {name} on "
            f"features has no effect, and {name} would be {same}; train a part of the body, or "
            f"take {same}"
        )


def linear_head(method: Method) -> nn.Linear:
    """Returns the head of a method's network.

    Raises:
        ConfigError: The head is not a linear layer.
    """
    name = method.oracle.runner.head
    network = method.network
    layer = network.get_submodule(name)
    if not isinstance(layer, nn.Linear):
        raise ConfigError(
            f"model.network: the head {name!r} of {type(network).__name__} is a "
            f"{type(layer).__name__}; {type(method).__name__} needs a linear layer"
        )
    return layer


def require_classes(method: Method) -> int:
    """Returns the number of classes; for `check_setup`.

    Raises:
        ConfigError: The samples have no classes, or several labels each.
    """
    classes = number_of_classes(method)
    if classes is None:
        name = type(method).__name__
        raise ConfigError(
            f"data: the targets are not classes, as in a regression or with several labels per "
            f"sample; {name} needs one class per sample, targets int64 [N]"
        )
    return classes


def number_of_classes(method: Method) -> int | None:
    """Returns the number of classes, or None for regression; for `check_setup`.

    Raises:
        ConfigError: A sample has several labels.
    """
    classes = method.problem_constant("num_classes")
    if classes is None:
        return None
    if not method.problem_constant("has_labels"):
        name = type(method).__name__
        raise ConfigError(f"data: the targets are several labels per sample; {name} needs one")
    return int(classes)


def _run_watched(
    network: nn.Module, head: str, run: Callable[[], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the input and the output of the head when it was last called, and `run`'s result."""
    with watched_head(network, head) as calls:
        outputs = run()
    if not calls or len(calls[-1][0]) != 1:
        raise _not_last(network, head)
    (features,), scores = calls[-1]
    return features, scores, outputs


def _not_last(network: nn.Module, head: str) -> ConfigError:
    return ConfigError(
        f"model.network: the output of {type(network).__name__} is not that of its last layer "
        f"{head!r}, which the method trains by itself; call the layer last, as self.head(features)"
    )
