"""The scripts of LG-FedAvg, FedBABU and FedRep, which descend from one another, as they are.

Replaced are command line, data and network (`utils`), the evaluation, where the iterates are
recorded (`models.test`), the draw of cohorts and the order of samples.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pickle
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.problem import (
    BATCH,
    CLASSES,
    COHORTS,
    EVERYONE,
    FEATURES,
    HIDDEN,
    RATE,
    ROUNDS,
    SIZES,
    Done,
    Epochs,
    Problem,
    absent,
    tensors,
    vector,
)

Models = Callable[..., np.ndarray | None]


class Network(nn.Module):
    """The head is called `linear`, which is how FedBABU's script tells it from the body."""

    weight_keys = (("body.weight", "body.bias"), (), (), ("linear.weight", "linear.bias"))

    def __init__(self, start: np.ndarray) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, HIDDEN)
        self.linear = nn.Linear(HIDDEN, CLASSES)
        nn.utils.vector_to_parameters(torch.tensor(start), self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.body(x)))


def run_script(
    problem: Problem,
    checkout: Path,
    script: str,
    models: Models,
    purposes: list[tuple[str, int]],
    **arguments: Any,
) -> np.ndarray:
    """The personalized models of all clients after every round, [rounds, clients, P].

    Args:
        problem: The problem.
        checkout: Of the script.
        script: Its name.
        models: Makes the clients' models of what the script evaluates, or nothing of evaluations
            that are not wanted.
        purposes: Of the epochs that a client takes in a round.
        arguments: Of its command line.
    """
    torch.set_default_dtype(torch.float64)
    given: dict[str, Any] = dict(
        gpu=-1,
        dataset="mnist",
        model="",
        iid=False,
        num_users=len(SIZES),
        frac=len(COHORTS[0]) / len(SIZES),
        local_bs=BATCH,
        lr=RATE,
        epochs=100,
        shard_per_user=0,
        results_save="0",
        test_freq=1,
        save_every=10000,
        m_tr=1,
        m_ft=1,
        load_fed="n",
        local_updates=10000,
        seed=0,
    )
    args = SimpleNamespace(**given | arguments)
    users = {i: np.array([i]) for i in EVERYONE}  # whose "samples" are the client's number
    rows: list[np.ndarray] = []
    now = SimpleNamespace(round=-1)

    def cohort(*args: object, **kwargs: object) -> np.ndarray:
        now.round += 1
        return np.array(COHORTS[now.round])

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        found = models(*args, **kwargs)
        if found is not None:
            rows.append(found)
            if len(rows) == ROUNDS:
                raise Done
        return (np.zeros(len(SIZES)), 0.0) if kwargs.get("return_all") else (0.0, 0.0)

    def average(net: nn.Module, *args: object, return_net: bool = False, **kwargs: object) -> Any:
        return (0.0, 0.0, net) if return_net else (0.0, 0.0)

    def loader(split: Any, **kwargs: object) -> Epochs:
        return Epochs(problem, now.round, int(split.idxs[0]), purposes, tensors)

    def stand_in(name: str, **functions: Any) -> None:
        module = ModuleType(name)
        vars(module).update(functions)
        sys.modules[name] = module

    sys.path.insert(0, str(checkout))
    absent("utils", "models.language_utils")
    stand_in("utils.options", args_parser=lambda: args)
    stand_in(
        "utils.train_utils",
        get_data=lambda args: (None, None, users, users),
        get_model=lambda args: Network(problem.start),
        read_data=None,
    )
    stand_in(
        "models.test",
        test_img=evaluate,
        test_img_local=evaluate,
        test_img_local_all=evaluate,
        test_img_avg_all=average,
        test_img_ensemble_all=None,
    )
    vars(importlib.import_module("models.Update"))["DataLoader"] = loader
    draw, load = np.random.choice, torch.load
    here = os.getcwd()
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(None):
        os.chdir(folder)  # they write there; LG-FedAvg reads the clients' samples from a file
        base = Path(f"save/mnist/_iidFalse_num5_C{args.frac}_le{arguments['local_ep']}/shard0/0")
        base.mkdir(parents=True)
        (base / "dict_users.pkl").write_bytes(pickle.dumps((users, users)))
        vars(np.random)["choice"] = cohort
        vars(torch)["load"] = lambda *args, **kwargs: Network(problem.start).state_dict()
        try:
            runpy.run_path(str(checkout / script), run_name="__main__")
        except Done:
            pass
        finally:
            vars(np.random)["choice"], vars(torch)["load"] = draw, load
            os.chdir(here)
    return np.stack(rows)


def of_networks(networks: list[nn.Module]) -> np.ndarray:
    return np.stack([vector(network.parameters()) for network in networks])
