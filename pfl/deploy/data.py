"""The data modules of a federation whose samples lie with the parties."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pfl.datamodules import FederatedDataModule, Normalize, TableDataModule
from pfl.datamodules.errors import require_value
from pfl.datamodules.partitions.index_arrays import IndexArrays, Ragged
from pfl.datamodules.partitions.partition import Partition
from pfl.datamodules.samples.loaded import Loaded
from pfl.datamodules.samples.samples import TensorSamples
from pfl.errors import ConfigError

NAMES = ("class_names", "feature_names", "levels", "transforms")
"""The facts about samples that give numbers their meaning: they are the same at all parties."""
SAME = ("input", "target", *NAMES)
"""All facts about samples that are the same at all parties."""


def told_names(data: FederatedDataModule) -> dict[str, Any]:
    """Returns the names of classes and columns, levels by column, and transforms as text.

    Args:
        data: A data module that is set up.
    """
    # A module may have the address of an object in its text, which differs by process.
    changes = [re.sub(" at 0x[0-9a-f]+", "", repr(one)) for one in data.transforms.transforms]
    return {
        "class_names": data.class_names,
        "feature_names": data.feature_names,
        "levels": data.category_levels,
        "transforms": changes,
    }


def sample_kinds(data: FederatedDataModule) -> dict[str, list[Any]]:
    """Returns the types and the shapes of an input, after the transforms, and of a target.

    Args:
        data: A data module that is set up.
    """
    one = torch.tensor([0])
    inputs, targets = data.samples.gather(one)
    inputs = data.transforms(inputs, one, one)
    kinds = {}
    for key, values in (("input", inputs), ("target", targets)):
        kinds[key] = [str(values.dtype).removeprefix("torch."), list(values.shape[1:])]
    return kinds


def own_statistics(data: FederatedDataModule) -> list[int]:
    """Returns which transforms would take their numbers from the samples.

    Args:
        data: A data module that is not set up yet.
    """
    places = []
    for place, transform in enumerate(data._transforms.transforms):
        if isinstance(transform, Normalize) and transform.mean is None:
            places.append(place)
    return places


def refuse_scaled_targets(data: FederatedDataModule) -> None:
    """Refuses `scale_targets`, whose numbers are those of one party's samples.

    Raises:
        ConfigError: The data module has it.
    """
    if data.scale_targets:
        raise ConfigError(
            "data.scale_targets: True, but the mean of one party's targets is not another's; it "
            "must be false: divide the targets in the files by a number that all parties know"
        )


def unlike(key: str, one: Any, whose: str, other: Any, others: str) -> str | None:
    """Returns in one line in what two descriptions of samples differ; None if they are equal.

    Args:
        key: The name of the fact.
        one: The fact at a party.
        whose: Words for this party.
        other: The fact at another party, or in the run's file.
        others: Words for where that is.
    """
    if one == other:
        return None
    return f"{key}: {whose} has {one}, and {others} has {other}; all parties must have the same"


class OwnSamples(FederatedDataModule):
    """A federation in which one client has a party's samples, and all others have none.

    Args:
        own: The party's data module. If it has one client, all its samples are the party's; if it
            has as many clients as the federation, the samples of `client`.
        client: The party's number.
        num_clients: The number of parties.
        seed: The seed of the run.
        shared: What all parties have in common, as `server.yaml` has it. A table takes classes,
            levels and the kind of targets that it has not been given, since a party's file may
            lack a class or a level, and have whole numbers alone where others have fractions.
    """

    def __init__(
        self,
        own: FederatedDataModule,
        client: int,
        num_clients: int,
        seed: int,
        shared: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(num_clients=num_clients, seed=seed)
        require_value("client", client, 0 <= client < num_clients, f"from 0 to {num_clients - 1}")
        self.own = own
        self.client_id = client
        self.classes: int | None = None
        if isinstance(own, TableDataModule) and shared is not None:
            kind, _ = shared.get("target") or ("", [])
            numbers = kind.startswith("float")
            own.take_names(shared.get("class_names"), shared.get("levels") or {}, numbers)

    def load(self) -> Loaded:
        return self.own.load()

    def setup(self, stage: str | None = None) -> None:
        if self._partition is not None:
            return
        own = self.own
        count = self.num_clients
        if own_statistics(own):
            raise ConfigError(
                "data.transforms: Normalize has no numbers, and those of one party's samples mean "
                "something else than those of another's; give mean and std as the run has them"
            )
        refuse_scaled_targets(own)
        own.prepare_data()
        own.setup(stage)
        require_value(
            "data.num_clients", own.num_clients, own.num_clients in (1, count), f"1 or {count}"
        )
        mine = self.client_id
        if own.num_clients == 1:
            mine = 0
        if not len(own.partition.train[mine]):
            raise ConfigError(f"data: party {self.client_id} has no samples to train with")
        parts = []
        for arrays in own.partition.splits.values():
            sizes = np.zeros(count, np.int64)
            sizes[self.client_id] = len(arrays[mine])
            parts.append(Ragged.from_sizes(arrays[mine], sizes))
        train, val, test = parts
        self._partition = Partition(train, val, test, targets=own.partition.targets)
        self._samples = own.samples
        self._transforms = own.transforms
        self._class_names = own.class_names
        self.feature_names = own.feature_names
        self.category_levels = own.category_levels
        self.conversions = own.conversions

    @property
    def num_classes(self) -> int | None:
        """The number of classes in the federation, where the server has told it."""
        if self.classes is None:
            return self.own.num_classes
        return self.classes

    def facts(self, *, sizes: bool) -> dict[str, Any]:
        """Returns the facts about the samples that the server needs, as plain values.

        Args:
            sizes: Whether numbers of samples are included; else a 1 stands for any number but 0.
        """
        counts = [int(part.sizes[self.client_id]) for part in self.partition.splits.values()]
        if not sizes:
            counts = [min(1, count) for count in counts]
        return {
            "sizes": counts,
            "classes": self.own.num_classes,
            **sample_kinds(self),
            **told_names(self),
        }


@dataclass
class Counted(IndexArrays):
    """Index arrays of which only the lengths are known: every index is 0."""

    sizes: np.ndarray

    def of(self, clients: np.ndarray | slice) -> np.ndarray:
        # One 0 for all places: this takes no memory, whatever number a party has told.
        total = int(self.sizes[clients].sum())
        return np.lib.stride_tricks.as_strided(np.zeros(1, np.int64), (total,), (0,))

    def definition(self) -> tuple[np.ndarray, ...]:
        return (np.array([len(self.sizes)]),)  # parties may come later


class RemoteData(FederatedDataModule):
    """Numbers and shapes of samples that lie with the parties, as far as the server has them.

    Args:
        num_clients: The number of parties.
        seed: The seed of the run.
        class_names: The names of the classes, in order, that all parties must have; None: those of
            the party that comes first.
        feature_names: The names of the inputs' columns, likewise.
        levels: The levels of each column of categories, likewise.
        transforms: The transforms with their numbers, as texts, likewise.
        input: The type and the shape of an input after the transforms, likewise.
        target: The type and the shape of a target, likewise.
        classes: The number of classes; None: the largest that a party tells.
    """

    has_samples = False

    def __init__(
        self,
        num_clients: int,
        seed: int | None = None,
        class_names: list[str] | None = None,
        feature_names: list[str] | None = None,
        levels: dict[str, list[str]] | None = None,
        transforms: list[str] | None = None,
        input: list[Any] | None = None,  # noqa: A002 - as the fact is called
        target: list[Any] | None = None,
        classes: int | None = None,
    ) -> None:
        super().__init__(num_clients=num_clients, seed=seed)
        self._class_names = class_names
        self.feature_names = feature_names
        self.category_levels = levels or {}
        self.transform_texts = transforms
        self._meet: Callable[[], Mapping[int, Mapping[str, Any]]] | None = None
        self.classes = classes

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
        if self.classes is None:
            self.classes = max(known, default=None)
        if self._class_names is None:
            self._class_names = first.get("class_names")
        if self.feature_names is None:
            self.feature_names = first.get("feature_names")
        if not self.category_levels:
            self.category_levels = first.get("levels") or {}
        kind, shape = first["input"]
        target_kind, target_shape = first["target"]
        inputs = torch.zeros((), dtype=getattr(torch, kind)).expand(1, *shape)
        targets = torch.zeros((), dtype=getattr(torch, target_kind)).expand(1, *target_shape)
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
        """The number of classes of the run, or the largest that a party has told."""
        return self.classes

    def left_out(self) -> dict[str, int]:
        """Returns nothing: what the parties leave out is theirs."""
        return {}

    def describe(self) -> str:
        return f"{self.num_clients} parties with their own samples."
