"""564612540/FedPD, the Python code of FedPD's authors: its agents and optimizers.

The server's mean stands in the body of their script (fed_main.py:94-98); it is taken here. Replaced
are the network and the order of samples. Their files fix float32, which is read as float64 here.
"""

from __future__ import annotations

import copy
import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    BATCH,
    EVERYONE,
    RATE,
    ROUNDS,
    Epochs,
    Iterates,
    Problem,
    first_network,
    import_in_float64,
    main,
    tensors,
    vector,
)


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of both oracles."""
    torch.set_default_dtype(torch.float64)
    import_in_float64(checkout / "Python" / "src")
    module = importlib.import_module("agent")
    # The first step of their optimizers needs gradients of 0, which PyTorch before 2.0 left there.
    zero_grad = torch.optim.Optimizer.zero_grad
    optimizers: Any = torch.optim.Optimizer
    optimizers.zero_grad = lambda optimizer: zero_grad(optimizer, set_to_none=False)
    now = SimpleNamespace(round=0, agent=0)

    def loader(data: object, batch_size: int, shuffle: bool) -> Epochs:
        """All samples where they ask for batches of 128, and else the given mini-batches."""
        purposes = [("train", 4)] if batch_size == BATCH else [("full", 1)]
        return Epochs(problem, now.round, now.agent, purposes, tensors)

    vars(module)["DataLoader"] = loader

    def run(variance_reduction: bool, period: int) -> Iterates:
        args = SimpleNamespace(
            optimizer="FedPD",
            VR=variance_reduction,
            lr=RATE,
            mu=0.5,
            freq_in=4,
            freq_out=period,
            local_bs=BATCH,
            gpu=None,
        )
        server = first_network(problem.start)
        agents = [module.Agent(server, args, i, nn.CrossEntropyLoss()) for i in EVERYONE]
        owned = [[0] for _ in EVERYONE]
        rows: list[np.ndarray] = []
        for now.round in range(ROUNDS):
            first = now.round % period == 0
            sent: list[dict[str, Any]] = []
            for now.agent in EVERYONE:
                state = agents[now.agent].train_(server, 4, None, owned, first, first)
                sent.append(copy.deepcopy(state))
            mean = {key: sum(state[key] for state in sent) / len(sent) for key in sent[0]}
            server.load_state_dict(mean)
            rows.append(vector(server.parameters()))
        return {"w": np.stack(rows)}

    return {
        "FedPD-SGD": run(False, 1),
        "FedPD-SGD, period 2": run(False, 2),
        "FedPD-VR": run(True, 1),
    }


if __name__ == "__main__":
    main(theirs)
