"""The code of FedRolex's authors: how the server hands out parts of the model and combines them.

Local steps are plain SGD on a network with the shapes of the part: their clients need CUDA
(`resnet_client.py:55`), and `ray`, which is replaced. In float64 where they fix float32.
"""

from __future__ import annotations

import importlib
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.drivers.heterofl import RATES, trained
from benchmarks.agreement.problem import (
    CLASSES,
    COHORTS,
    EPOCHS,
    EVERYONE,
    Iterates,
    Problem,
    absent,
    first_network,
    import_in_float64,
    main,
    tensors,
    vector,
)


def run(problem: Problem, kind: Any, masked: bool) -> Iterates:
    """The server's model after each round."""
    known = []
    for targets in problem.targets:
        labels = np.arange(CLASSES)
        if masked:
            labels = np.unique(targets)
        known.append(torch.from_numpy(labels))
    layers = first_network(problem.start)  # by the names that they tell convolutions and heads by
    model = nn.Sequential(OrderedDict(zip(("conv1", "tanh", "linear"), layers, strict=True)))
    settings = {
        "model_split_mode": "fix",
        "global_model_rate": 1.0,
        "overlap": None,
        "weighting": "avg",
    }
    server = kind(model, [RATES[i % 2] for i in EVERYONE], {"label_split": known}, settings)
    rows = []
    for now, cohort in enumerate(COHORTS):
        parts, places = server.distribute(list(cohort))
        sent = []
        for i, part in zip(cohort, parts, strict=True):
            lacks = torch.ones(CLASSES, dtype=torch.bool)
            lacks[known[i]] = False
            epochs = [problem.batches("train", now, i, epoch) for epoch in range(EPOCHS)]
            batches = [tensors(*batch) for epoch in epochs for batch in epoch]
            sent.append(trained(part, batches, lacks))
        server.step(sent, places, list(cohort))
        rows.append(vector(server.global_parameters.values()))
    return {"w": np.stack(rows)}


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The server's models, without and with masks."""
    torch.set_default_dtype(torch.float64)
    absent("ray")
    sys.modules["ray"].get = lambda value: value  # type: ignore[attr-defined]
    import_in_float64(checkout)
    kind = importlib.import_module("resnet_server").ResnetServerRoll
    return {
        "FedRolex": run(problem, kind, masked=False),
        "FedRolex, masked": run(problem, kind, masked=True),
    }


if __name__ == "__main__":
    main(theirs)
