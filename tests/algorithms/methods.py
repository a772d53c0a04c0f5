"""The list of all methods for the tests that every one of them must pass.

A new method gets an entry in entries_baselines.py: how it is made, where it ends on quadratics,
what a round costs, and which of its client states must never leave the client. Then
test_conformance.py and test_continued.py check it, and tests/distributed/test_strategy.py runs it
in two processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from datamodules import SharedTest, TensorDataModule
from pfl import Trainer
from pfl.algorithms import FederatedAlgorithm
from tests.algorithms import entries_baselines, entries_papers
from tests.problems import owned

# ---- a small world ------------------------------------------------------------------------------

SIZES = (5, 1, 4, 2)


def small_world(copies: int = 1, clients: int = 4, *, classes: bool = False) -> TensorDataModule:
    """Four clients of unequal size, one with a single sample; regression from R^3 to R^2.

    Each sample `copies` times. Everyone is tested on the same three samples. `clients=1`: all
    samples belong to one. `classes`: there are two, the signs of the first target.
    """
    rng = np.random.default_rng(5)
    x, y, test = (torch.from_numpy(rng.normal(size=shape)) for shape in ((15, 3), (15, 2), (3, 2)))
    if classes:
        y = (y[:, 0] > 0).long()
        test = (test[:, 0] > 0).long()
    owners = np.repeat(np.arange(len(SIZES)), SIZES) % clients
    order = np.repeat(np.arange(len(owners)), copies)
    return owned(
        owners[order], x[order], y[order], x[12:], test, protocol=SharedTest(validation=0.0)
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

METHODS = {entry.name: entry for entry in [*entries_baselines.ENTRIES, *entries_papers.ENTRIES]}


# ---- what a run leaves --------------------------------------------------------------------------


def everything(algorithm: FederatedAlgorithm) -> dict[str, torch.Tensor]:
    """All that a run has computed, as tensors by name."""
    everyone = np.arange(algorithm.store.num_clients)
    actual = {f"module {name}": value for name, value in algorithm.state_dict().items()}
    for name in algorithm.store.names:
        actual[f"client {name}"] = algorithm.store.read(name, everyone)
        actual[f"seen {name}"] = torch.as_tensor(algorithm.store.seen(name))
    for name in algorithm.states.messages:
        actual[f"client message {name}"] = algorithm.store.read(f"message {name}", everyone)
        actual[f"seen message {name}"] = torch.as_tensor(algorithm.store.seen(f"message {name}"))
    for name, value in _flat(algorithm.trainer.optimizers[0].state_dict()):
        actual[f"server optimizer {name}"] = value
    progress = algorithm.progress
    ledger = progress.ledger
    for way, counts in (("downlink", ledger.downlink), ("uplink", ledger.uplink)):
        actual[f"ledger {way}"] = torch.from_numpy(counts.copy())
    actual |= {
        f"row {name}": torch.tensor(float(value), dtype=torch.float64)
        for name, value in algorithm.row.items()
    }
    actual |= {
        "rounds": torch.tensor(progress.rounds),
        "samples_seen": torch.tensor(progress.samples),
        "bytes_up": torch.tensor(progress.bytes_up),
        "bytes_down": torch.tensor(progress.bytes_down),
    }
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
# The limit of FedAgg with a fixed point, and its bytes, are tested elsewhere.
FIXED_POINT = {"mean_field": "fixed_point", "tolerance": 1e-3}
VARIANTS = METHODS | {"FedAgg, fixed point": replace(METHODS["FedAgg"], arguments=FIXED_POINT)}
EVERY_VARIANT = pytest.mark.parametrize("method", VARIANTS.values(), ids=VARIANTS)
BATCHES = dict(lr=0.2, local_epochs=2, batch_size=2)  # clients take 6, 2, 4 and 2 steps
