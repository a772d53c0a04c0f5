"""What every framework is given, and what it says afterwards; NumPy only, for all environments."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np


@dataclass
class Task:
    """Rounds of FedAvg: the mean of what the clients of a round reach by SGD on their own samples.

    Args:
        key: Of the workload, such as W1.
        network: A class in `models`, or in `benchmarks.peers.networks`.
        arguments: Of that class.
        epochs: Of every client in a round.
        batch: Samples of a local step.
        rate: Of SGD.
        inputs: Float32 [N, channels, height, width].
        targets: Classes [N].
        owned: The samples of each client, one array a client; clients may have unequal numbers.
        cohorts: The clients of each round [rounds, clients of a round]; the first one warms up.
        weights: The network's parameters at the beginning, in PyTorch's order and shapes.
    """

    key: str
    network: str
    arguments: dict[str, Any]
    epochs: int
    batch: int
    rate: float
    inputs: np.ndarray
    targets: np.ndarray
    owned: list[np.ndarray]
    cohorts: np.ndarray
    weights: list[np.ndarray]

    def save(self, path: Path) -> None:
        lists = ("weights", "owned")
        arrays = {k: v for k, v in vars(self).items() if isinstance(v, np.ndarray)}
        plain = {k: v for k, v in vars(self).items() if k not in arrays and k not in lists}
        arrays |= {f"weight{i:03}": w for i, w in enumerate(self.weights)}
        arrays["owned"] = np.concatenate(self.owned)
        arrays["ends"] = np.cumsum([len(own) for own in self.owned])
        arrays["plain"] = np.array(json.dumps(plain))
        np.savez(path, allow_pickle=False, **arrays)

    @classmethod
    def load(cls, path: str | Path) -> Task:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
        plain = json.loads(str(arrays.pop("plain")))
        weights = [arrays.pop(name) for name in sorted(arrays) if name.startswith("weight")]
        owned = np.split(arrays.pop("owned"), arrays.pop("ends")[:-1])
        return cls(weights=weights, owned=owned, **plain, **arrays)

    @property
    def parameters(self) -> int:
        return sum(w.size for w in self.weights)


@dataclass
class Report:
    """What a framework's process prints as one line of JSON."""

    first: float  # seconds of the first round, with compiling and the like
    seconds: list[float]  # of each further round
    parameters: int
    accuracy: float
    loss: float
    moved: float  # how far the weights are from the first ones, by the Euclidean norm
    versions: dict[str, str]
    evaluated: list[float] = field(default_factory=list)  # of rounds with the peer's evaluation
    peak_bytes: int = 0  # the most memory of a GPU that was in use; 0 on a CPU


def report(
    stamps: Sequence[float],
    parameters: int,
    accuracy: float,
    loss: float,
    moved: float,
    packages: Sequence[str],
    evaluated: Sequence[float] = (),
    peak_bytes: int = 0,
) -> None:
    """Print the line; `stamps` are the begin of the first round and the end of each, in seconds."""
    first, *seconds = np.diff(stamps).tolist()
    python = "{}.{}.{}".format(*sys.version_info)
    versions = {"Python": python} | {package: version(package) for package in packages}
    line = Report(
        first, seconds, parameters, accuracy, loss, moved, versions, list(evaluated), peak_bytes
    )
    print(json.dumps(asdict(line)))
