"""What both sides of a comparison are given: clients, a network, cohorts and local steps.

NumPy only, so that every project's environment can import it.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import FileFinder, SourceFileLoader
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import MagicMock

import numpy as np

SIZES = (12, 7, 10, 6, 3)  # samples of the clients
FEATURES, HIDDEN, CLASSES = 5, 4, 3
MEMBERS, MESSENGER, NESTED = ((4,), (6, 8)), (4,), 2  # widths where clients' networks differ
BATCH, EPOCHS, HEAD_EPOCHS, RATE = 4, 2, 3, 0.1
PUBLIC, PUBLIC_PICKS = 8, 4  # inputs of a public data set, and those of a round
NOISE, GENERATOR, MADE = 2, 6, 8  # of a generator of features: inputs, units, and a step's features
DISTILLED = {"server_steps": 5, "server_lr": 0.05}
NEIGHBOURS, SHARE = 4, 0.3  # of training samples that vote, and their weight
SECONDS = (1.0, 1.3, 1.6, 1.9, 0.7)  # of a client's turn, where the server waits for no cohort
COHORTS = ((0, 1, 2), (2, 3, 4), (0, 2, 4), (1, 3, 4), (0, 1, 3), (0, 3, 4))
ROUNDS = len(COHORTS)
EVERYONE = tuple(range(len(SIZES)))
ALL = (EVERYONE,) * ROUNDS
ONE_EACH = tuple((cohort[now % 3],) for now, cohort in enumerate(COHORTS))

Iterates: TypeAlias = dict[str, np.ndarray]
"""What a method has after every round: by name [rounds, ...]."""


@dataclass
class Problem:
    """Classification by a network of two layers with tanh between them, in float64.

    Attributes:
        inputs: Of each client, [n_i, FEATURES].
        targets: Of each client, classes [n_i].
        start: The first parameters [P]: weights and biases of the layers in PyTorch's order.
        orders: Which of its samples a client takes: by (purpose, round, client) a list of epochs,
            each of which is a list of mini-batches, which are positions among its samples. With
            the purpose "public" and the client 0, those of a round among the public inputs.
    """

    inputs: list[np.ndarray]
    targets: list[np.ndarray]
    start: np.ndarray
    orders: dict[tuple[str, int, int], list[list[np.ndarray]]]

    def batches(
        self, purpose: str, round_index: int, client: int, epoch: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """The mini-batches of one epoch, as inputs and targets."""
        if purpose.startswith("full"):  # all samples in one batch, or in "full 3" in each of three
            return [(self.inputs[client], self.targets[client])] * int(purpose[5:] or 1)
        picks = self.orders[purpose, round_index, client][epoch]
        return [(self.inputs[client][p], self.targets[client][p]) for p in picks]

    def save(self, path: Path) -> None:
        named = [
            ["|".join(map(str, key)), [[batch.tolist() for batch in epoch] for epoch in epochs]]
            for key, epochs in self.orders.items()
        ]
        np.savez(
            path,
            inputs=np.concatenate(self.inputs),
            targets=np.concatenate(self.targets),
            start=self.start,
            orders=np.array(json.dumps(named)),
        )

    @classmethod
    def load(cls, path: str | Path) -> Problem:
        with np.load(path) as file:
            cuts = np.cumsum(SIZES)[:-1]
            inputs, targets = (np.split(file[name], cuts) for name in ("inputs", "targets"))
            start, named = file["start"], json.loads(str(file["orders"]))
        orders = {}
        for name, epochs in named:
            purpose, round_index, client = name.split("|")
            visits = [[np.array(batch) for batch in epoch] for epoch in epochs]
            orders[purpose, int(round_index), int(client)] = visits
        return cls(inputs, targets, start, orders)


def arrays() -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Inputs, targets and first parameters: clients that differ in inputs and in labels."""
    rng = np.random.default_rng(0)
    teacher = rng.normal(size=(FEATURES, CLASSES))
    inputs = [rng.normal(size=(n, FEATURES)) + 0.5 * rng.normal(size=FEATURES) for n in SIZES]
    own = [teacher + rng.normal(size=teacher.shape) for _ in SIZES]
    targets = [(x @ w).argmax(1) for x, w in zip(inputs, own, strict=True)]
    shapes = ((HIDDEN, FEATURES), (HIDDEN,), (CLASSES, HIDDEN), (CLASSES,))
    start = np.concatenate([0.5 * rng.normal(size=shape).ravel() for shape in shapes])
    return inputs, targets, start


def public_inputs() -> np.ndarray:
    """Inputs that the server and all clients have, without labels."""
    return np.random.default_rng(9).normal(size=(PUBLIC, FEATURES))


def starts(start: np.ndarray, count: int) -> np.ndarray:
    """First parameters of methods that have several models, [count, P]: the given ones and others.

    Args:
        start: The given ones [P].
        count: How many there are.
    """
    draw = np.random.default_rng(1)
    return np.stack([start, *(start + draw.normal(size=(count - 1, len(start))))])


def hypernetwork(size: int) -> np.ndarray:
    """The first values of a network at the server, and of its inputs, [size]."""
    return 0.5 * np.random.default_rng(2).normal(size=size)


def started(size: int, number: int) -> np.ndarray:
    """The first values of what a method adds to the network, [size].

    Args:
        size: How many there are.
        number: Of the part, where there are several.
    """
    return 0.5 * np.random.default_rng(3 + number).normal(size=size)


def padded(rows: Sequence[np.ndarray]) -> np.ndarray:
    """Values of clients whose networks differ, with zeros up to the longest row."""
    width = max(map(len, rows))
    return np.stack([np.pad(row, (0, width - len(row))) for row in rows])


class MadeFeatures:
    """Labels and noise for a generator of features, drawn alike on both sides.

    Args:
        round_index: The round.
        taker: The number of a client, or that of all clients for the server.
    """

    def __init__(self, round_index: int, taker: int) -> None:
        self._draw = np.random.default_rng([round_index, taker])

    def places(self, count: int) -> np.ndarray:
        """Where labels lie among those of all samples in their order, in [0, 1), [count]."""
        return self._draw.uniform(size=count)

    def noise(self, count: int) -> np.ndarray:
        """Noise, [count, NOISE]."""
        return self._draw.uniform(size=(count, NOISE))


BODY = HIDDEN * FEATURES + HIDDEN  # the first entries of a parameter vector; the head's follow


class Epochs:
    """Epochs of a client's mini-batches, one each time that it is iterated over.

    Args:
        problem: The problem.
        round_index: The round.
        client: The client.
        purposes: The loops of the round in order, by the purpose and the number of epochs.
        convert: Makes of a mini-batch's inputs and targets what the project takes.
    """

    def __init__(
        self,
        problem: Problem,
        round_index: int,
        client: int,
        purposes: list[tuple[str, int]],
        convert: Callable[[np.ndarray, np.ndarray], object],
    ) -> None:
        self._coming = [
            [convert(*batch) for batch in problem.batches(purpose, round_index, client, epoch)]
            for purpose, epochs in purposes
            for epoch in range(epochs)
        ]
        self._steps = len(self._coming[0])

    def __len__(self) -> int:
        return self._steps

    def __iter__(self) -> Iterator[object]:
        return iter(self._coming.pop(0))


def first_network(start: np.ndarray) -> Any:
    """The network as a sequence of layers, with its first parameters; needs PyTorch."""
    import torch
    from torch import nn

    made = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES))
    made.double()
    nn.utils.vector_to_parameters(torch.tensor(start), made.parameters())
    return made


class Done(Exception):
    """The last round has been recorded; it ends a run of another project."""


def start(module: Any, number: int) -> Any:
    """Gives a module the first values that both sides have, and returns it."""
    import torch
    from torch import nn

    count = sum(values.numel() for values in module.parameters())
    nn.utils.vector_to_parameters(torch.from_numpy(started(count, number)), module.parameters())
    return module


def tanh_layers(widths: Sequence[int]) -> list[Any]:
    """Linear layers of such widths over the problem's features, with tanh after each of them."""
    from torch import nn

    made: list[Any] = []
    for before, after in zip((FEATURES, *widths), widths, strict=False):
        made += [nn.Linear(before, after), nn.Tanh()]
    return made


def tensors(inputs: np.ndarray, targets: np.ndarray) -> tuple[Any, Any]:
    """A mini-batch as PyTorch has it."""
    import torch

    return torch.from_numpy(inputs), torch.from_numpy(targets)


def vector(parameters: Any) -> np.ndarray:
    """One vector of some tensors."""
    import torch

    return torch.cat([value.detach().reshape(-1) for value in parameters]).numpy().copy()


def absent(*modules: str) -> None:
    """Makes packages importable that a project imports and that its driver does not use."""
    for name in modules:
        sys.modules[name] = MagicMock()


class InFloat64(SourceFileLoader):
    """Loads a module with float64 wherever its source says float32, and without bytecode files."""

    def path_stats(self, path: str) -> Mapping[str, Any]:
        raise OSError  # there is no bytecode

    def get_data(self, path: str) -> bytes:
        return (
            super()
            .get_data(path)
            .replace(b"float32", b"float64")
            .replace(b".float()", b".double()")
        )


def import_in_float64(checkout: Path) -> None:
    """Makes the modules of a checkout importable, in float64 where they fix float32."""
    hook = FileFinder.path_hook((InFloat64, [".py"]))

    def only_there(path: str) -> Any:
        if not path.startswith(str(checkout)):
            raise ImportError
        return hook(path)

    sys.path_hooks.insert(0, only_there)
    sys.path.insert(0, str(checkout))


def drawn_cohorts() -> Callable[..., np.ndarray]:
    """A draw that replaces np.random.uniform where clients with numbers below 1/2 take part."""
    rounds = iter(COHORTS)

    def draw(*args: object, **kwargs: object) -> np.ndarray:
        cohort = next(rounds)
        return np.array([0.0 if i in cohort else 1.0 for i in EVERYONE])

    return draw


def commit(checkout: Path) -> str:
    """The commit of a checkout, or the digest of a wheel's list of files with their digests."""
    for record in checkout.glob("*.dist-info/RECORD"):
        return hashlib.sha256(record.read_bytes()).hexdigest()
    command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def relative(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference of a round over the largest value of the round, over all rounds."""
    if ours.shape != theirs.shape:
        raise ValueError(f"{ours.shape} here and {theirs.shape} there")
    axes = tuple(range(1, ours.ndim))
    largest = np.abs(ours).max(axes).clip(1e-300)  # what is 0 on both sides is the same
    return float((np.abs(ours - theirs).max(axes) / largest).max())


def main(theirs: Callable[[Problem, Path], dict[str, Iterates]]) -> None:
    """Runs a project's side: its arguments are a file of the problem, a checkout and a file."""
    problem, checkout, output = sys.argv[1:]
    found = theirs(Problem.load(problem), Path(checkout))
    flat = {f"{case}|{name}": v for case, rows in found.items() for name, v in rows.items()}
    np.savez(output, allow_pickle=False, **flat)
