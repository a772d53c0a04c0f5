"""LipingYi/FedMRL, the code of FedMRL's authors: its training function, whole.

Replaced are the networks (their features are 500, which is also where the function cuts the nested
representation, so that both heads read all of it here), the reading of data, the draw of clients,
the momentum, which the function fixes, and the evaluation, where the iterates are recorded.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    CLASSES,
    COHORTS,
    EPOCHS,
    EVERYONE,
    HIDDEN,
    MEMBERS,
    MESSENGER,
    RATE,
    ROUNDS,
    SIZES,
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


class Network(nn.Module):
    """Features of an input, and scores of a representation, in one call."""

    def __init__(self, widths: tuple[int, ...], number: int) -> None:
        super().__init__()
        self.body = nn.Sequential(*tanh_layers(widths), nn.AdaptiveAvgPool1d(HIDDEN))
        self.head = nn.Linear(HIDDEN, CLASSES)
        start(self, number)

    def forward(self, x: Tensor, nested: Tensor) -> tuple[Tensor | None, Tensor]:
        features = self.body(x)
        if nested.shape[1] != HIDDEN:  # the first call, which wants the features alone
            return None, features
        return self.head(nested), features


class Batches:
    """The epochs of a client in all rounds, one each time that it is iterated over."""

    def __init__(self, problem: Problem, client: int) -> None:
        rounds = [now for now, cohort in enumerate(COHORTS) if client in cohort]
        self.coming = [
            [tensors(*batch) for batch in problem.batches("train", now, client, epoch)]
            for now in rounds
            for epoch in range(EPOCHS)
        ]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.coming.pop(0))


def projector(**kwargs: object) -> nn.Module:
    made: nn.Module = start(nn.Linear(2 * HIDDEN, HIDDEN), 0)
    return made


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The clients' networks and projectors."""
    torch.set_default_dtype(torch.float64)
    sys.path.insert(0, str(checkout))
    absent("experiments.FLHetero.node", "experiments.utils")
    there: Any = importlib.import_module("experiments.FLHetero.FedMRL_hetero")
    given = vars(there)
    for i in EVERYONE:
        number = i % len(MEMBERS)
        given[f"CNN_{i + 1}_large"] = lambda number=number, **kw: Network(MEMBERS[number], number)
    given["CNN_5_small"] = lambda **kw: Network(MESSENGER, len(MEMBERS))
    given["projector"] = projector
    nobody = [0] * len(SIZES)
    given["BaseNodes"] = lambda *args, **kw: SimpleNamespace(
        train_sample_count=list(SIZES),
        eval_sample_count=nobody,
        test_sample_count=nobody,
        train_loaders=[Batches(problem, i) for i in EVERYONE],
        test_loaders=list(EVERYONE),
    )
    cohorts = iter(COHORTS)
    given["random"] = SimpleNamespace(sample=lambda *args: list(next(cohorts)))
    given["trange"] = range
    plain = torch.optim.SGD
    vars(torch.optim)["SGD"] = lambda params, lr, **kw: plain(params, lr)
    own = {}
    for i in EVERYONE:
        number = i % len(MEMBERS)
        own[i] = vector([*Network(MEMBERS[number], number).parameters(), *projector().parameters()])
    rows: list[np.ndarray] = []

    def record(large: nn.Module, small: nn.Module, mixer: nn.Module, i: int, *args: Any) -> Any:
        own[i] = vector([*large.parameters(), *mixer.parameters()])
        if i == COHORTS[len(rows)][-1]:
            rows.append(padded([own[i] for i in EVERYONE]))
        return torch.zeros(()), 0.0

    given["test_acc"] = record
    for name in ("test_acc_small", "test_acc_small_single", "test_acc_large_single"):
        given[name] = lambda *args: (torch.zeros(()), 0.0)
    settings = dict.fromkeys(
        [
            "data_path",
            "classes_per_node",
            "optim",
            "inner_lr",
            "embed_lr",
            "inner_wd",
            "embed_dim",
            "hyper_hid",
            "n_hidden",
            "n_kernels",
            "eval_every",
            "seed",
            "LowProb",
        ]
    )
    with tempfile.TemporaryDirectory() as folder:
        there.train(
            **settings,
            data_name="cifar10",
            num_nodes=len(SIZES),
            fraction=1.0,
            steps=ROUNDS,
            epochs=EPOCHS,
            lr=RATE,
            wd=0.0,
            bs=1,
            device="cpu",
            save_path=Path(folder),
        )
    return {"FedMRL": {"client u, P": np.stack(rows)}}


if __name__ == "__main__":
    main(theirs)
