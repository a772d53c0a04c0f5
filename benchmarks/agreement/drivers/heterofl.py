"""The code of HeteroFL's authors: how `Federation` hands out parts of the model and combines them.

Local steps are plain SGD on a network with the shapes of the part; their own networks have a scaler
and a static batch normalization besides. In float64 where they fix float32.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    CLASSES,
    COHORTS,
    EPOCHS,
    EVERYONE,
    RATE,
    SIZES,
    Iterates,
    Problem,
    first_network,
    import_in_float64,
    main,
    tensors,
    vector,
)

RATES = (1.0, 0.5)  # of the clients' widths, in turn


def trained(part: dict[str, Tensor], batches: list[Any], absent: Tensor) -> dict[str, Tensor]:
    """Local steps on a part of the model, with scores of absent classes set to 0."""
    values = [value.clone() for value in part.values()]
    for x, y in batches:
        at = [value.requires_grad_() for value in values]
        first, bias, head, offset = at
        scores = torch.tanh(x @ first.T + bias) @ head.T + offset
        loss = cross_entropy(scores.masked_fill(absent, 0), y)
        slopes = torch.autograd.grad(loss, at)
        values = [(v - RATE * g).detach() for v, g in zip(at, slopes, strict=True)]
    return OrderedDict(zip(part, values, strict=True))


def classes_of(problem: Problem, masked: bool) -> list[Tensor]:
    """The classes that each client trains: its own, or all of them without masks."""
    known = []
    for targets in problem.targets:
        labels = np.arange(CLASSES)
        if masked:
            labels = np.unique(targets)
        known.append(torch.from_numpy(labels))
    return known


def rounds(problem: Problem, server: Any, combine: Any, known: list[Tensor]) -> Iterates:
    """The server's model after each round.

    Args:
        problem: The problem.
        server: It has `distribute`, which hands out parts, and `global_parameters`.
        combine: The server's function that takes what clients have trained.
        known: The classes that each client trains.
    """
    rows = []
    for now, cohort in enumerate(COHORTS):
        parts, places = server.distribute(list(cohort))
        sent = []
        for i, part in zip(cohort, parts, strict=True):
            absent = torch.ones(CLASSES, dtype=torch.bool)
            absent[known[i]] = False
            epochs = [problem.batches("train", now, i, epoch) for epoch in range(EPOCHS)]
            batches = [tensors(*batch) for epoch in epochs for batch in epoch]
            sent.append(trained(part, batches, absent))
        combine(sent, places, list(cohort))
        rows.append(vector(server.global_parameters.values()))
    return {"w": np.stack(rows)}


def run(problem: Problem, federation: Any, masked: bool) -> Iterates:
    """The server's model after each round."""
    known = classes_of(problem, masked)
    model = OrderedDict(first_network(problem.start).state_dict())
    server = federation(model, [RATES[i % 2] for i in EVERYONE], known)
    return rounds(problem, server, server.combine, known)


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The server's models, without and with masks."""
    torch.set_default_dtype(torch.float64)
    os.chdir(checkout / "src")  # where the settings are read
    import_in_float64(checkout / "src")
    there: Any = importlib.import_module("fed")
    there.cfg.update(
        model_name="conv", model_split_mode="fix", global_model_rate=1.0, num_users=len(SIZES)
    )
    return {
        "HeteroFL": run(problem, there.Federation, masked=False),
        "HeteroFL, masked": run(problem, there.Federation, masked=True),
    }


if __name__ == "__main__":
    main(theirs)
