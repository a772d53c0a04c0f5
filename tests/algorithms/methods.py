"""The list of all methods for the tests that every one of them must pass.

A new method gets one entry in `METHODS`: how it is made, where it ends on quadratics, what a round
costs, and which of its client states must never leave the client. Then test_conformance.py and
test_continued.py check it, and tests/test_strategy.py runs it in two processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import Natural, SharedTest, TensorDataModule
from pfl import Trainer
from pfl.algorithms import (
    GPGD,
    LPGD,
    SCAFFOLD,
    FedACS,
    FedAgg,
    FedAvg,
    FedCLUP,
    FederatedAlgorithm,
    FedPD,
    FedPer,
    FedProx,
    FedRep,
    FedSLR,
    LocalTrain,
)
from tests.algorithms import closed_forms as forms

# ---- a small world ------------------------------------------------------------------------------

SIZES = (5, 1, 4, 2)


def small_world(copies: int = 1, clients: int = 4) -> TensorDataModule:
    """Four clients of unequal size, one with a single sample; regression from R^3 to R^2.

    Each sample `copies` times. Everyone is tested on the same three samples. `clients=1`: all
    samples belong to one.
    """
    rng = np.random.default_rng(5)
    x, y, test = (torch.from_numpy(rng.normal(size=shape)) for shape in ((15, 3), (15, 2), (3, 2)))
    owners = np.repeat(np.arange(len(SIZES)), SIZES) % clients
    order = np.repeat(np.arange(len(owners)), copies)
    return TensorDataModule(
        x[order],
        y[order],
        x[12:],
        test,
        client_ids=owners[order],
        partition=Natural(),
        protocol=SharedTest(validation=0.0),
    )


def small_network(seed: int = 6) -> nn.Module:
    """From R^3 to R^2 with 4 hidden units, P = 26, in float64."""
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    values = torch.from_numpy(0.6 * np.random.default_rng(seed).normal(size=26))
    nn.utils.vector_to_parameters(values, network.parameters())
    return network


def normalized_network() -> nn.Module:
    """From R^3 to R^2 with BatchNorm, which takes batches of one sample: it has two positions."""
    middle = (nn.Unflatten(1, (2, 2)), nn.BatchNorm1d(2), nn.Flatten())
    network = nn.Sequential(nn.Linear(3, 4), *middle, nn.Tanh(), nn.Linear(4, 2)).double()
    values = torch.from_numpy(0.6 * np.random.default_rng(8).normal(size=30))
    nn.utils.vector_to_parameters(values, network.parameters())
    return network


# ---- methods ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """What the common tests must know of a method.

    Attributes:
        name: Of the entry; a class may have several.
        kind: The class.
        limit: limit(quadratics, **arguments): where it ends.
        cost: Of a participant in a round.
        private: The client states that hold personal parameters and must never leave the
            client. Not those that the method sends by design, or that the server can work out from
            what it is sent.
        trained_with_private: Whether what a client sends is trained together with its private
            states, and so depends on them.
        arguments: The class's own, in all tests.
        settle: Further ones where the limit is looked for.
        rounds, accuracy: After how many rounds the limit is reached, and how closely.
        problem: The problem whose limit is known, by number of clients.
        everyone: Whether all clients must take part in every round.
        timed: Whether the number of a round decides what it does, even with full gradients.
        more_epochs: Epochs in which clients train the model that they send, or a part of it, beyond
            `local_epochs`.
    """

    name: str
    kind: type[FederatedAlgorithm]
    limit: Callable[..., forms.Models]
    cost: forms.Cost
    private: tuple[str, ...] = ()
    trained_with_private: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)
    settle: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.4, "local_steps": 6})
    rounds: int = 12
    accuracy: float = 1e-7
    problem: Callable[[int], forms.Quadratics] = forms.different
    everyone: bool = False
    timed: bool = False
    more_epochs: int = 0

    def make(self, network: nn.Module, **training: Any) -> FederatedAlgorithm:
        """The algorithm."""
        return self.kind(network, **self.arguments, **training)


_COMPONENTS = {"proximal_step": 1.0, "low_rank_penalty": 3.0, "sparse_penalty": 0.02}
_PERSONAL = {"lr": 0.4, "local_steps": 6, "personal_epochs": 4}
_LISTED = [
    Method(
        name="FedAvg",
        kind=FedAvg,
        limit=forms.averaging,
        cost=forms.dense,
    ),
    Method(
        name="FedAvg, server Adam",  # ends where FedAvg ends
        kind=FedAvg,
        limit=forms.averaging,
        cost=forms.dense,
        arguments={
            "server_optimizer": partial(torch.optim.Adam, lr=0.5, betas=(0.3, 0.5), eps=0.5)
        },
        rounds=45,
    ),
    Method(
        name="FedProx",
        kind=FedProx,
        limit=forms.averaging,
        cost=forms.dense,
        arguments={"proximal_weight": 0.5},
        rounds=24,
    ),
    Method(
        name="SCAFFOLD",
        kind=SCAFFOLD,
        limit=forms.minimum,
        cost=forms.dense_and_control,
        settle={"lr": 0.2, "local_steps": 4},
        rounds=30,
    ),
    Method(
        name="SCAFFOLD, option I",
        kind=SCAFFOLD,
        limit=forms.minimum,
        cost=forms.dense_and_control,
        arguments={"option": "I"},
        settle={"lr": 0.2, "local_steps": 4},
        rounds=30,
    ),
    Method(
        name="LocalTrain",
        kind=LocalTrain,
        limit=forms.alone,
        cost=forms.nothing,
        private=("w",),
    ),
    Method(
        name="FedPer",
        kind=FedPer,
        limit=forms.partly_personal,
        cost=forms.body,
        private=("head",),
        trained_with_private=True,
        arguments={"personal": ["*bias"]},
    ),
    Method(
        name="FedRep",
        kind=FedRep,
        limit=forms.partly_personal,
        cost=forms.body,
        private=("head",),
        trained_with_private=True,
        arguments={"personal": ["*bias"], "head_epochs": 3},
        more_epochs=3,
    ),
    Method(
        name="FedSLR",
        kind=FedSLR,
        limit=forms.low_rank_and_sparse,
        cost=forms.factors_down,
        private=("p",),
        arguments=_COMPONENTS,
        settle=_PERSONAL,
        rounds=30,
        accuracy=1e-6,
    ),
    Method(
        name="FedSLR, all multipliers",
        kind=FedSLR,
        limit=forms.low_rank_and_sparse,
        cost=forms.factors_down,
        private=("p",),
        arguments=_COMPONENTS | {"memory_efficient": False},
        settle=_PERSONAL,
        rounds=30,
        accuracy=1e-6,
    ),
    Method(
        name="FedSLR, S+LR",
        kind=FedSLR,
        limit=forms.low_rank_and_sparse,
        cost=forms.sparse_down,
        private=("p",),
        arguments={
            "proximal_step": 1.0,
            "low_rank_penalty": 0.3,
            "sparse_penalty": 0.3,
            "global_component": "sparse",
            "personal_component": "low_rank",
        },
        settle=_PERSONAL,
        rounds=30,
        accuracy=1e-6,
    ),
    Method(
        name="LPGD",
        kind=LPGD,
        limit=forms.mean_of_low_rank,
        cost=forms.factors_up,
        arguments={"low_rank_penalty": 3.0},
        settle={"lr": 0.6, "local_steps": 40},
        rounds=2,
    ),
    Method(
        name="GPGD",
        kind=GPGD,
        limit=forms.low_rank_of_mean,
        cost=forms.factors_down,
        arguments={"low_rank_penalty": 5.0},
    ),
    Method(
        name="FedCLUP",
        kind=FedCLUP,
        limit=forms.held_together,
        cost=forms.dense,
        arguments={"penalty": 0.4},
        rounds=22,
    ),
    Method(
        name="FedPD",
        kind=FedPD,
        limit=forms.minimum,
        cost=forms.dense,
        rounds=32,
        accuracy=1e-6,
        everyone=True,
    ),
    Method(
        name="FedPD, VR",
        kind=FedPD,
        limit=forms.minimum,
        cost=forms.dense,
        arguments={"variance_reduction": True, "refresh_period": 2, "inner_step": 0.5},
        rounds=32,
        accuracy=1e-6,
        everyone=True,
    ),
    Method(
        name="FedPD, skipping",
        kind=FedPD,
        limit=forms.minimum,
        cost=forms.dense_or_skipped,
        arguments={"skip_probability": 0.5},
        rounds=22,
        problem=forms.alike,
        everyone=True,
        timed=True,
    ),
    Method(
        name="FedACS",
        kind=FedACS,
        limit=forms.collaboration,
        cost=forms.dense,
        settle={"lr": 0.3, "local_steps": 4},
        problem=forms.pairs,
    ),
    Method(
        name="FedACS, quantile 1",
        kind=FedACS,
        limit=forms.alone,
        cost=forms.dense,
        arguments={"quantile": 1.0, "candidates": "all"},
    ),
    Method(
        name="FedAgg",
        kind=FedAgg,
        limit=forms.averaging,
        cost=forms.gradients,
        settle={"lr": 0.5, "local_epochs": 1, "rate_penalty": 1e-13},
        rounds=35,
        accuracy=1e-6,
    ),
    Method(
        name="FedAgg, aggregated",
        kind=FedAgg,
        limit=forms.minimum,
        cost=forms.gradients,
        arguments={"dynamics": "aggregated"},
        settle={"lr": 0.3, "local_epochs": 1, "rate_penalty": 1e-13},
        rounds=40,
        accuracy=1e-6,
    ),
]
METHODS = {method.name: method for method in _LISTED}


# ---- what a run leaves --------------------------------------------------------------------------


def everything(algorithm: FederatedAlgorithm) -> dict[str, torch.Tensor]:
    """All that a run has computed, as tensors by name."""
    everyone = np.arange(algorithm.store.num_clients)
    actual = {f"module {name}": value for name, value in algorithm.state_dict().items()}
    for name in algorithm.store.names:
        actual[f"client {name}"] = algorithm.store.read(name, everyone)
        actual[f"seen {name}"] = torch.as_tensor(algorithm.store.seen(name))
    for name, value in _flat(algorithm.trainer.optimizers[0].state_dict()):
        actual[f"server optimizer {name}"] = value
    ledger = algorithm.ledger
    for way, counts in (("downlink", ledger.downlink), ("uplink", ledger.uplink)):
        actual[f"ledger {way}"] = torch.from_numpy(counts.copy())
    actual |= {
        f"row {name}": torch.tensor(float(value), dtype=torch.float64)
        for name, value in algorithm.row.items()
    }
    for name in ("rounds", "samples_seen", "bytes_up", "bytes_down"):
        actual[name] = torch.tensor(getattr(algorithm, name))
    actual["steps"] = torch.tensor([algorithm.trainer.global_step, algorithm.trainer.current_epoch])
    return {name: value.clone() for name, value in actual.items()}


def _flat(tree: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, dict | list):
        for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _flat(value, f"{path}/{key}")
    elif isinstance(tree, torch.Tensor | int | float):
        yield path, torch.as_tensor(tree)


def differing(actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> set[str]:
    """Names of what is not the same, bit for bit; NaN equals NaN."""
    return {
        name
        for name in actual.keys() | expected.keys()
        if name not in actual
        or name not in expected
        or actual[name].dtype != expected[name].dtype
        or not np.array_equal(actual[name], expected[name], equal_nan=True)
    }


def tables(algorithm: FederatedAlgorithm) -> dict[str, str]:
    """The tables that the method has recorded, as text."""
    assert isinstance(algorithm.trainer, Trainer)
    folder = algorithm.trainer.run_dir
    return {name: (folder / f"{name}.csv").read_text() for name in algorithm.tables}


def learned(names: Iterable[str]) -> set[str]:
    """Those that are models, or states of clients or the server."""
    return {name for name in names if name.split()[0] in ("module", "client")}


EVERY_METHOD = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
BATCHES = dict(lr=0.2, local_epochs=2, batch_size=2)  # clients take 6, 2, 4 and 2 steps
