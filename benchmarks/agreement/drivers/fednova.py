"""JYWa/FedNova, the code of FedNova's authors: its optimizer.

Each client is a process there and a thread here, so that the sum over them (`dist.all_reduce`) is
replaced. The loop over rounds and mini-batches is written out: their script divides the rate by ten
at the half of its rounds, and at three quarters once more, and fixes a weight decay.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier, local
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    EPOCHS,
    EVERYONE,
    RATE,
    ROUNDS,
    SIZES,
    Epochs,
    Iterates,
    Problem,
    first_network,
    main,
    tensors,
    vector,
)


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The global models."""
    torch.set_default_dtype(torch.float64)
    warnings.filterwarnings("ignore", message="This overload of add_ is deprecated")
    tensor: Any = torch.Tensor
    tensor.cuda = lambda values: values  # one number of theirs goes to a GPU
    sys.path.insert(0, str(checkout))
    kind: Any = importlib.import_module("distoptim").FedNova
    meeting, me = Barrier(len(EVERYONE)), local()
    given: dict[int, torch.Tensor] = {}

    def all_reduce(tensor: torch.Tensor, op: object = None) -> None:
        given[me.client] = tensor.clone()
        meeting.wait()
        tensor.copy_(torch.stack([given[i] for i in EVERYONE]).sum(0))
        meeting.wait()

    vars(torch.distributed)["all_reduce"] = all_reduce

    def client(i: int, settings: dict[str, float]) -> np.ndarray:
        me.client, network, rows = i, first_network(problem.start), []
        optimizer = kind(network.parameters(), SIZES[i] / sum(SIZES), lr=RATE, **settings)
        for now in range(ROUNDS):
            epochs: Any = Epochs(problem, now, i, [("train", EPOCHS)], tensors)
            for _ in range(EPOCHS):
                for x, y in epochs:
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(network(x), y).backward()
                    optimizer.step()
            optimizer.average()
            rows.append(vector(network.parameters()))
        return np.stack(rows)

    def run(**settings: float) -> Iterates:
        with ThreadPoolExecutor(len(EVERYONE)) as pool:
            first, *others = pool.map(lambda i: client(i, settings), EVERYONE)
        assert all((first == other).all() for other in others)
        return {"w": first}

    return {
        "FedNova": run(gmf=0),
        "server momentum": run(gmf=0.6),
        "proximal": run(gmf=0, mu=0.5),
    }


if __name__ == "__main__":
    main(theirs)
