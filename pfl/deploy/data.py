"""The data modules of a federation whose samples lie with the parties."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pfl.datamodules import FederatedDataModule
from pfl.datamodules.errors import require
from pfl.datamodules.partitions.index_arrays import IndexArrays, Ragged
from pfl.datamodules.partitions.partition import Partition
from pfl.datamodules.samples.loaded import Loaded
from pfl.datamodules.samples.samples import TensorSamples
from pfl.errors import ConfigError


class OwnSamples(FederatedDataModule):
    """A federation in which one client has a party's samples, and all others have none.

    Args:
        own: The party's data module. If it has one client, all its samples are the party's; if it
            has as many clients as the federation, the samples of `client`.
        client: The party's number.
        num_clients: The number of parties.
        seed: The seed of the run.
    """

    def __init__(self, own: FederatedDataModule, client: int, num_clients: int, seed: int) -> None:
        super().__init__(num_clients=num_clients, seed=seed)
        require("client", client, 0 <= client < num_clients, f"from 0 to {num_clients - 1}")
        self.own, self.client_id = own, client
        self.classes: int | None = None

    def load(self) -> Loaded:
        return self.own.load()

    def setup(self, stage: str | None = None) -> None:
        own, count = self.own, self.num_clients
        if self._partition is not None:
            return
        own.prepare_data()
        own.setup(stage)
        require("data.num_clients", own.num_clients, own.num_clients in (1, count), f"1 or {count}")
        mine = 0 if own.num_clients == 1 else self.client_id
        if not len(own.partition.train[mine]):
            raise ConfigError(f"data: party {self.client_id} has no samples to train with")
        parts = []
        for arrays in own.partition.splits.values():
            sizes = np.zeros(count, np.int64)
            sizes[self.client_id] = len(arrays[mine])
            parts.append(Ragged.from_sizes(arrays[mine], sizes))
        train, val, test = parts
        self._partition = Partition(train, val, test, targets=own.partition.targets)
        self._samples, self._transforms = own.samples, own.transforms

    @property
    def num_classes(self) -> int | None:
        """The number of classes in the federation, where the server has told it."""
        return self.own.num_classes if self.classes is None else self.classes

    def facts(self, *, sizes: bool) -> dict[str, Any]:
        """Returns the facts about the samples that the server needs, as plain values.

        Args:
            sizes: Whether numbers of samples are included; else a 1 stands for any number but 0.
        """
        counts = [int(part.sizes[self.client_id]) for part in self.partition.splits.values()]
        one = torch.tensor([0])
        inputs, targets = self.samples.gather(one)
        inputs = self.transforms(inputs, one, one)
        return {
            "sizes": counts if sizes else [min(1, count) for count in counts],
            "classes": self.own.num_classes,
            "input": [str(inputs.dtype).removeprefix("torch."), list(inputs.shape[1:])],
            "target": [str(targets.dtype).removeprefix("torch."), list(targets.shape[1:])],
        }


@dataclass
class Counted(IndexArrays):
    """Index arrays of which only the lengths are known: every index is 0."""

    sizes: np.ndarray

    def of(self, clients: np.ndarray | slice) -> np.ndarray:
        return np.zeros(int(self.sizes[clients].sum()), np.int64)

    def definition(self) -> tuple[np.ndarray, ...]:
        return (np.array([len(self.sizes)]),)  # parties may come later


class RemoteData(FederatedDataModule):
    """Numbers and shapes of samples that lie with the parties, as far as the server has them.

    Args:
        num_clients: The number of parties.
        seed: The seed of the run.
    """

    def __init__(self, num_clients: int, seed: int | None = None) -> None:
        super().__init__(num_clients=num_clients, seed=seed)
        self._meet: Callable[[], Mapping[int, Mapping[str, Any]]] | None = None
        self.classes: int | None = None

    def connect(self, meet: Callable[[], Mapping[int, Mapping[str, Any]]]) -> None:
        """Has `setup` call a function for the facts of the parties that are there, by client."""
        self._meet = meet

    def load(self) -> Loaded:
        raise ConfigError("data: RemoteData has no samples; `flwr run` starts a run with parties")

    def setup(self, stage: str | None = None) -> None:
        if self._partition is not None:
            return
        if self._meet is None:
            self.load()
        assert self._meet is not None
        facts = self._meet()
        first = next(iter(facts.values()))
        known = [one["classes"] for one in facts.values() if one["classes"] is not None]
        self.classes = max(known, default=None)
        (kind, shape), (target_kind, target_shape) = first["input"], first["target"]
        inputs = torch.zeros(1, *shape, dtype=getattr(torch, kind))
        targets = torch.zeros(1, *target_shape, dtype=getattr(torch, target_kind))
        self._samples = TensorSamples(inputs, targets)
        train, val, test = (Counted(np.zeros(self.num_clients, np.int64)) for _ in range(3))
        self._partition = Partition(train, val, test)
        for client, one in facts.items():
            self.add(client, one)

    def add(self, client: int, facts: Mapping[str, Any]) -> None:
        """Notes how many samples a party has."""
        for part, size in zip(self.partition.splits.values(), facts["sizes"], strict=True):
            part.sizes[client] = size

    @property
    def num_classes(self) -> int | None:
        """The largest number of classes that a party has told."""
        return self.classes

    def left_out(self) -> dict[str, int]:
        """Returns nothing: what the parties leave out is theirs."""
        return {}

    def describe(self) -> str:
        return f"{self.num_clients} parties with their own samples."
