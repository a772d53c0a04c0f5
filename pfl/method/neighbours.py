"""The scores of models with a local memory of features (kNN-Per)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from pfl.clients import Clients
from pfl.errors import ConfigError
from pfl.method.features import features, number_of_classes
from pfl.method.hooks import Method
from pfl.scores.evaluation import Scores
from pfl.scores.neighbours import best_weight


def check_neighbours(method: Method) -> None:
    """Refuses `loop.neighbours` where samples have no class, or the network no features.

    Raises:
        ConfigError: Classes, features or validation samples are missing.
    """
    if number_of_classes(method) is None:
        raise ConfigError("loop.neighbours: the targets are values; neighbours vote for classes")
    if not method.oracle.runner.head:
        raise ConfigError(
            f"loop.neighbours: {type(method.network).__name__} is a single layer, before which "
            f"there are no features; give a network with a body"
        )
    if not method.run.loop.datamodule.partition.val.sizes.any():
        raise ConfigError(
            "loop.neighbours: the mixture is chosen on validation samples; give data.protocol a "
            "validation share"
        )


def neighbour_scores(method: Method, clients: Clients, w: Tensor, keep: bool) -> Iterator[Scores]:
    """Yields the scores of C clients' models w [C, P] that are mixed with votes of neighbours.

    The loss is the cross entropy; the logarithm of a probability counts as -100 at least.
    """
    oracle = method.oracle
    neighbours = method.run.loop.neighbours
    assert neighbours is not None
    memory: list[list[tuple[Tensor, Tensor]]] = [[] for _ in clients.ids]
    for rows, batch in clients.training_samples():
        buffers = None if clients.buffers is None else clients.buffers[rows]
        z = features(oracle, w[rows], batch, buffers)
        for row, own, targets, n in zip(rows.tolist(), z, batch.targets, batch.counts, strict=True):
            memory[row].append((own[:n], targets[:n]))

    def answers(split: str) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yields a client's row, p and q [n, classes] and the classes of n of its samples."""
        order = np.argsort(-clients.data.sizes(split, clients.ids), kind="stable")
        asked = replace(clients.rows(order), split=split)
        models = w[torch.from_numpy(order)]
        for rows, batch in asked.samples():
            buffers = None if asked.buffers is None else asked.buffers[rows]
            outputs = oracle.evaluate(models[rows], batch, buffers)[2]
            z = features(oracle, models[rows], batch, buffers)
            for place, n in enumerate(batch.counts):
                row = int(order[place])
                p = outputs[place, :n].to(w.dtype).softmax(1)
                q = p  # a client without training samples has no neighbours
                if memory[row]:
                    known, labels = map(torch.cat, zip(*memory[row], strict=True))
                    q = neighbours.probabilities(z[place, :n], known, labels, p.shape[1])
                yield row, p, q, batch.targets[place, :n]

    held: dict[int, list[tuple[Tensor, ...]]] = {}
    for row, *parts in answers("val"):
        held.setdefault(row, []).append(tuple(parts))
    weights = {row: best_weight(*map(torch.cat, zip(*p, strict=True))) for row, p in held.items()}
    for row, p, q, targets in answers(clients.split):
        mixed = p + weights.get(row, 0.0) * (q - p)
        losses = -mixed.gather(1, targets[:, None]).log().clamp(min=-100)
        right = (mixed.argmax(1) == targets).to(w.dtype)
        predicted = [oracle.runner.predicted(mixed.log().cpu(), targets.cpu())] if keep else []
        one = torch.tensor([len(targets)])
        ids = torch.from_numpy(clients.ids[row : row + 1])
        yield Scores(ids, losses.sum()[None], right.sum()[None], one, predicted)
