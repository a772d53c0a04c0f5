"""The code of FedProto's authors: the whole run of networks that differ, with all clients a round.

Replaced are the networks, of which clients have one of two in turn, the reading of data, the order
of samples (a loader drops the last ones of an epoch), the evaluation, and SGD, which has no
momentum here. Models are recorded where class means are averaged.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import log_softmax

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    CLASSES,
    EPOCHS,
    EVERYONE,
    HIDDEN,
    MEMBERS,
    RATE,
    ROUNDS,
    SIZES,
    Epochs,
    Iterates,
    Problem,
    absent,
    main,
    padded,
    start,
    tanh_layers,
    tensors,
    vector,
)


class Layers(nn.Module):
    """A network that gives scores and features, as theirs."""

    def __init__(self, number: int) -> None:
        super().__init__()
        widths = MEMBERS[number]
        self.body = nn.Sequential(*tanh_layers(widths))
        if widths[-1] != HIDDEN:
            self.body.append(nn.AdaptiveAvgPool1d(HIDDEN))
        self.head = nn.Linear(HIDDEN, CLASSES)
        start(self, number)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.body(x)
        return log_softmax(self.head(z), 1), z


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The clients' models."""
    torch.set_default_dtype(torch.float64)
    absent("tensorboardX")
    sys.path.insert(0, str(checkout / "exps"))
    os.chdir(checkout / "exps")
    there: Any = importlib.import_module("federated_main")
    training: Any = importlib.import_module("update")
    sgd = torch.optim.SGD
    models = [Layers(i % len(MEMBERS)) for i in EVERYONE]
    rows: list[np.ndarray] = []
    average = there.proto_aggregation

    def loader(split: Any, **given: object) -> Epochs:
        return Epochs(problem, len(rows), split.idxs[0], [("train", EPOCHS)], tensors)

    def recorded(means: Any) -> Any:
        rows.append(padded([vector(one.parameters()) for one in models]))
        return average(means)

    vars(torch.optim)["SGD"] = lambda values, lr, momentum: sgd(values, lr)
    training.DataLoader = loader
    there.proto_aggregation = recorded
    there.test_inference_new_het_lt = lambda *given: ([0.0], [0.0])
    args = SimpleNamespace(
        dataset="",
        ways=0,
        shots=0,
        stdev=0,
        num_users=len(SIZES),
        rounds=ROUNDS,
        device="cpu",
        local_bs=0,
        optimizer="sgd",
        lr=RATE,
        train_ep=EPOCHS,
        ld=1.5,
        num_classes=CLASSES,
        verbose=False,
    )
    groups = {i: [i] for i in EVERYONE}
    with contextlib.redirect_stdout(None):
        there.FedProto_modelheter(args, None, None, groups, groups, models, None)
    return {"FedProto": {"client w": np.stack(rows)}}


if __name__ == "__main__":
    main(theirs)
