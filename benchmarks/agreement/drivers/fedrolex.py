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

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.drivers.heterofl import RATES, classes_of, rounds
from benchmarks.agreement.problem import (
    EVERYONE,
    Iterates,
    Problem,
    absent,
    first_network,
    import_in_float64,
    main,
)


def run(problem: Problem, kind: Any, masked: bool) -> Iterates:
    """The server's model after each round."""
    known = classes_of(problem, masked)
    layers = first_network(problem.start)  # by the names that they tell convolutions and heads by
    model = nn.Sequential(OrderedDict(zip(("conv1", "tanh", "linear"), layers, strict=True)))
    settings = {
        "model_split_mode": "fix",
        "global_model_rate": 1.0,
        "overlap": None,
        "weighting": "avg",
    }
    server = kind(model, [RATES[i % 2] for i in EVERYONE], {"label_split": known}, settings)
    return rounds(problem, server, server.step, known)


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
