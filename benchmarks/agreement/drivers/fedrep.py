"""lgcollins/FedRep, the code of FedRep's authors: its script, as `scripts.py` says.

Its APFL script ends with a NameError (main_apfl.py:86), so that only the client's part is run.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.drivers.scripts import Network, run_script
from benchmarks.agreement.problem import (
    BATCH,
    EPOCHS,
    EVERYONE,
    HEAD_EPOCHS,
    RATE,
    Iterates,
    Problem,
    main,
    vector,
)

HEAD = [("head", HEAD_EPOCHS), ("train", EPOCHS)]


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The iterates of FedRep and FedPer, and of the first round of APFL's clients."""

    def models(net: nn.Module, *args: Any, w_locals: Any, w_glob_keys: Any, **kwargs: Any) -> Any:
        """The server's representation with each client's head."""
        state = net.state_dict()
        own = [key for key in state if key not in w_glob_keys]
        found = [{**state, **{key: w_locals[i][key] for key in own}} for i in EVERYONE]
        return np.stack([vector(values.values()) for values in found])

    def run(alg: str, purposes: list[tuple[str, int]]) -> np.ndarray:
        epochs = sum(count for _, count in purposes)
        settings = dict(alg=alg, local_ep=epochs, local_rep_ep=EPOCHS)
        return run_script(problem, checkout, "main_fedrep.py", models, purposes, **settings)

    found = {
        "FedRep": {"v": run("fedrep", HEAD)},
        "FedPer": {"v": run("fedper", [("train", EPOCHS)])},
    }
    return found | {"APFL": first_round(problem)}


def first_round(problem: Problem) -> Iterates:
    """v_i after the first round of APFL, for all clients, with full gradients."""
    update = importlib.import_module("models.Update")
    args = SimpleNamespace(
        dataset="mnist", local_bs=BATCH, local_ep=EPOCHS, local_updates=1e9, device="cpu"
    )
    args.alpha_apfl = 0.6
    rows: list[np.ndarray] = []
    for i in EVERYONE:
        vars(update)["DataLoader"] = lambda *args, i=i, **kwargs: [
            (torch.from_numpy(x), torch.from_numpy(y))
            for x, y in zip([problem.inputs[i]], [problem.targets[i]], strict=True)
        ]
        net = Network(problem.start)
        own = {key: value.clone() for key, value in net.state_dict().items()}
        client = update.LocalUpdateAPFL(args=args, dataset=None, idxs=[i])
        _, own, *_ = client.train(net=net, w_local=own, idx=i, lr=RATE)

        rows.append(vector(own.values()))
    return {"client v": np.stack(rows)[None]}


if __name__ == "__main__":
    main(theirs)
