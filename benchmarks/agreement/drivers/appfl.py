"""APPFL's aggregators FedAsync and FedBuff, of its unpacked wheel.

Local training with full batches and the loop in virtual time are written out; a client whose
message is in the buffer begins again when the server has moved.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
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
    SECONDS,
    Iterates,
    Problem,
    absent,
    first_network,
    main,
    tensors,
    vector,
)


class Settings(dict[str, Any]):
    K = 2


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    absent("omegaconf")
    for name in ("appfl", "appfl.algorithm"):  # without what their __init__.py import
        sys.modules[name] = package = ModuleType(name)
        package.__path__ = [str(checkout / name.replace(".", "/"))]
    there: Any = importlib.import_module("appfl.algorithm.aggregator")
    root: dict[str, Any] = {"staleness_fn": "polynomial", "staleness_fn_kwargs": {"a": 0.5}}
    hinge: dict[str, Any] = {"staleness_fn": "hinge", "staleness_fn_kwargs": {"a": 2.0, "b": 1}}
    kinds: dict[str, tuple[Any, dict[str, Any], int]] = {
        "constant": (there.FedAsyncAggregator, {}, 1),
        "polynomial": (there.FedAsyncAggregator, root | {"alpha": 0.6}, 1),
        "hinge": (there.FedAsyncAggregator, hinge | {"alpha": 0.6}, 1),
        "FedBuff": (there.FedBuffAggregator, root | {"num_clients": len(EVERYONE)}, Settings.K),
    }
    return {
        name: {"w": run(problem, kind(first_network(problem.start), Settings(given)), size)}
        for name, (kind, given, size) in kinds.items()
    }


def run(problem: Problem, aggregator: Any, size: int) -> np.ndarray:
    """The global model after every move, [moves, P]."""
    training = {i: (SECONDS[i], aggregator.get_parameters(client_id=i)) for i in EVERYONE}
    buffer: list[int] = []
    rows: list[np.ndarray] = []
    while len(rows) < ROUNDS:
        i = min(training, key=lambda client: training[client][0])
        now, start = training.pop(i)
        made = aggregator.aggregate(i, trained(problem, i, start))
        aggregator.client_step.pop(i)  # of the download that follows an upload at once
        buffer.append(i)
        if len(buffer) == size:
            rows.append(vector(made.values()))
            for k in buffer:
                training[k] = (now + SECONDS[k], aggregator.get_parameters(client_id=k))
            buffer = []
    return np.stack(rows)


def trained(problem: Problem, client: int, start: dict[str, torch.Tensor]) -> Any:
    network = first_network(problem.start)
    network.load_state_dict(start)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    for inputs, targets in problem.batches("full", 0, client, 0) * EPOCHS:
        x, y = tensors(inputs, targets)
        optimizer.zero_grad()
        nn.functional.cross_entropy(network(x), y).backward()
        optimizer.step()
    return network.state_dict()


if __name__ == "__main__":
    main(theirs)
