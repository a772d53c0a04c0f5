"""facebookresearch/FLSim: its aggregators of messages that come one by one.

Local training with full batches and the loop in virtual time are written out, as for APPFL.
Replaced is what makes objects of hydra's files; its data classes have defaults that Python refuses
from 3.11 on unless they can be hashed.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[3]))

from benchmarks.agreement.drivers.appfl import Settings, trained
from benchmarks.agreement.problem import (
    EVERYONE,
    ROUNDS,
    SECONDS,
    Iterates,
    Problem,
    absent,
    first_network,
    main,
    vector,
)

MIXING = 0.6


class Model:
    """What they ask of a model."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def fl_get_module(self) -> nn.Module:
        return self.module


def theirs(problem: Problem, checkout: Path) -> dict[str, Iterates]:
    """The global models after every move of the server."""
    torch.set_default_dtype(torch.float64)
    absent("hydra", "hydra.core", "hydra.core.config_store", "hydra.utils", "omegaconf")
    absent("pandas", "flsim.privacy.privacy_engine", "flsim.privacy.privacy_engine_factory")
    vars(sys.modules["omegaconf"]).update(MISSING="???")
    sys.modules["omegaconf"].OmegaConf.create = lambda config: config
    make: Any = dataclasses.dataclass

    def hashed(kind: Any = None, **given: Any) -> Any:
        if kind is None:
            return partial(hashed, **given)
        theirs = kind.__module__.startswith("flsim")
        return make(kind, **given, **({"unsafe_hash": True} if theirs else {}))

    vars(dataclasses)["dataclass"] = hashed
    sys.path.insert(0, str(checkout))
    settings: Any = importlib.import_module("flsim.utils.config_utils")
    settings._validate_cfg = lambda kind, config: None
    there: Any = importlib.import_module("flsim.optimizers.async_aggregators")
    weights: Any = importlib.import_module("flsim.utils.async_trainer.async_staleness_weights")
    reducers: Any = importlib.import_module("flsim.reducers.base_round_reducer")
    vars(dataclasses)["dataclass"] = make
    del sys.modules["pandas"]  # PyTorch looks for it later

    def reducer(config: Any, **given: Any) -> Any:
        return reducers.RoundReducer(reduction_type=config.reduction_type, **given)

    there.instantiate = reducer

    def run(kind: Any, average: int, **settings: Any) -> Iterates:
        server = kind(global_model=Model(first_network(problem.start)), **settings)
        trust = weights.PolynomialStalenessWeight(exponent=0.5, avg_staleness=average)
        return {"w": moves(problem, server, trust)}

    buffered, at_once = there.FedAvgWithLRFedBuffAggregator, there.FedAvgWithLRAsyncAggregator
    towards = there.AsyncAggregationType.fed_async_aggregation
    size = Settings.K
    return {
        "FedBuff": run(buffered, 0, lr=1 / size, buffer_size=size),
        "FedBuff, sum": run(buffered, 1, lr=1.0, buffer_size=size),
        "FedAsync": run(at_once, 0, lr=MIXING, aggregation_type=towards),
    }


def moves(problem: Problem, server: Any, trust: Any) -> np.ndarray:
    """The global model after every move, [moves, P]."""

    def begin(i: int, now: float) -> None:
        module = server.global_model.fl_get_module()
        start = {name: value.clone() for name, value in module.state_dict().items()}
        training[i] = (now + SECONDS[i], start, server.global_seqnum)

    training: dict[int, tuple[float, Any, int]] = {}
    for i in EVERYONE:
        begin(i, 0.0)
    waiting: list[int] = []
    rows: list[np.ndarray] = []
    while len(rows) < ROUNDS:
        i = min(training, key=lambda client: training[client][0])
        now, start, number = training.pop(i)
        server.zero_grad()
        made, change = first_network(problem.start), first_network(problem.start)
        end = trained(problem, i, start)
        made.load_state_dict(end)
        change.load_state_dict({name: start[name] - end[name] for name in end})
        weight = trust.weight(server.model_staleness(number))
        waiting.append(i)
        if server.on_client_training_end(Model(change), Model(made), weight):
            rows.append(vector(server.global_model.fl_get_module().parameters()))
            for k in waiting:
                begin(k, now)
            waiting = []
    return np.stack(rows)


if __name__ == "__main__":
    main(theirs)
