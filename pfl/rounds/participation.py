"""Who takes part in a run: the cohort of each round, and the clients that never train."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np

from datamodules import FederatedDataModule
from datamodules.errors import require
from datamodules.randomness import generator
from pfl.errors import ConfigError

Sampling = Literal["uniform", "bernoulli", "weighted"]
Rounds: TypeAlias = Sequence[Sequence[int]]
"""A list of client ids for each round."""


class Participation:
    """Who trains in a round: functions of (seed, round).

    The docstring of `FederatedLoop` explains the arguments.

    Attributes:
        trace: The given cohorts; None: they are drawn.

    Example:
        >>> from datamodules import DigitsDataModule
        >>> who = Participation(DigitsDataModule(num_clients=10), seed=0, unseen=[3, 8])
        >>> who.cohort(0).tolist()
        [0, 1, 2, 4, 5, 6, 7, 9]
    """

    def __init__(
        self,
        datamodule: FederatedDataModule,
        seed: int,
        clients_per_round: int | None = None,
        sampling: Sampling = "uniform",
        trace: str | Rounds | None = None,
        unseen: float | str | Sequence[int] | None = None,
    ) -> None:
        self.datamodule, self.seed = datamodule, seed
        self.clients_per_round, self.sampling = clients_per_round, sampling
        samplings = ("uniform", "bernoulli", "weighted")
        require("loop.sampling", sampling, sampling in samplings, f"one of {', '.join(samplings)}")
        require(
            "loop.clients_per_round",
            clients_per_round,
            clients_per_round is None or _whole(clients_per_round),
            f"a whole number from 1 to {datamodule.num_clients} (data.num_clients), or null for "
            f"everyone",
        )
        self.trace: Rounds | None = _read_rounds("trace", trace)
        self.unseen: float | Sequence[int] | None = _read_unseen(unseen)

    # ---- the population -----------------------------------------------------------------------

    @cached_property
    def unseen_clients(self) -> np.ndarray:
        """The ids of the clients that never train, ascending int64."""
        total = self.datamodule.num_clients
        if self.unseen is None:
            return np.empty(0, np.int64)
        if isinstance(self.unseen, float):
            count = max(1, int(self.unseen * total + 0.5))
            drawn = generator(self.seed, "unseen").choice(total, count, replace=False)
            return np.sort(drawn).astype(np.int64)
        return np.sort(np.asarray(self.unseen, np.int64))

    @cached_property
    def population(self) -> np.ndarray:
        """The ids of the clients from which cohorts are drawn, ascending int64 [M]."""
        return np.setdiff1d(np.arange(self.datamodule.num_clients), self.unseen_clients)

    # ---- cohorts ------------------------------------------------------------------------------

    @property
    def cohort_size(self) -> int:
        """Number of clients in a round: the exact number, or the expected one (Bernoulli)."""
        if self.trace is not None:
            return max(map(len, self.trace), default=0)
        return len(self.population) if self.clients_per_round is None else self.clients_per_round

    def cohort(self, round_index: int) -> np.ndarray:
        """Returns the ids of the clients that train in a round, ascending int64."""
        if self.trace is not None:
            return np.sort(np.asarray(self.trace[round_index], np.int64))
        population, size = self.population, self.cohort_size
        total = len(population)
        if size == total:
            return population.copy()
        rng = generator(self.seed, "cohort", round_index)
        if self.sampling == "bernoulli":
            while not (chosen := rng.random(total) < size / total).any():
                pass
            return population[chosen]
        weights = None
        if self.sampling == "weighted":
            sizes = self.datamodule.client_sizes[population]
            weights = sizes / sizes.sum()
        return population[np.sort(rng.choice(total, size, replace=False, p=weights))]

    # ---- checks and words ---------------------------------------------------------------------

    def check(self, rounds: int | None) -> None:
        """Checks the arguments against the data.

        Args:
            rounds: The number of rounds of the run, if it is known.

        Raises:
            ConfigError: A value is impossible for these data.
        """
        everyone = self.datamodule.num_clients
        if self.unseen is not None:
            self._check_unseen(everyone)
        total, count = len(self.population), self.clients_per_round
        if count is not None and not 1 <= count <= total:
            of = "the clients that train" if len(self.unseen_clients) else "data.num_clients"
            raise ConfigError(
                f"loop.clients_per_round: {count}; it must be from 1 to {total} ({of}), or null "
                f"for everyone"
            )
        able = int((self.datamodule.client_sizes[self.population] > 0).sum())
        if self.trace is None and self.sampling == "weighted" and able < self.cohort_size:
            raise ConfigError(
                f"loop.clients_per_round: {count}; weighted sampling draws clients with samples, "
                f"and only {able} have some"
            )
        if self.trace is not None:
            _check_rounds("trace", self.trace, everyone, rounds)
            for number, cohort in enumerate(self.trace):
                if len(both := np.intersect1d(cohort, self.unseen_clients)):
                    raise ConfigError(
                        f"loop.trace: round {number} has client {both[0]:.0f}, which loop.unseen "
                        f"keeps out of training; take it out of one of them"
                    )

    def _check_unseen(self, total: int) -> None:
        if isinstance(self.unseen, float):
            expected = f"a share that leaves some of the {total} clients to train"
        else:
            assert self.unseen is not None
            _check_ids("loop.unseen", self.unseen, total)
            expected = f"a part of the {total} clients, since some must train"
        require("loop.unseen", self.unseen, len(self.population) > 0, expected)

    def require_all_clients(self, method: str) -> None:
        """Raises a ConfigError if a round that is not empty has some of the clients only."""
        total, key, sizes = len(self.population), "clients_per_round", [self.cohort_size]
        if self.trace is not None:
            key, sizes = "trace", [len(cohort) for cohort in self.trace]
        if some := [size for size in sizes if size not in (0, total)]:
            raise ConfigError(
                f"loop.{key}: {some[0]}; {method} needs all {total} clients in every round, use "
                f"null"
            )

    def describe(self) -> str:
        """Returns in words who trains."""
        if self.trace is not None:
            who = f"a replayed trace of {len(self.trace)} rounds"
        elif self.cohort_size == len(self.population):
            who = "all clients"
        else:
            who = f"{self.cohort_size} clients a round, {self.sampling} sampling"
        if unseen := len(self.unseen_clients):
            total = self.datamodule.num_clients
            who += f"; {unseen} of the {total} clients never train"
        return who


def _whole(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check_ids(key: str, ids: Sequence[int], total: int, where: str = "") -> None:
    """Refuses a list that does not hold different client ids; `where` names it within the key."""
    whole = all(_whole(client) for client in ids)
    known = whole and all(0 <= client < total for client in ids)
    if not known or len(set(ids)) < len(ids):
        raise ConfigError(
            f"{key}: {where}{list(ids)}; it must hold different client ids from 0 to {total - 1}"
        )


def _check_rounds(name: str, trace: Rounds, total: int, rounds: int | None) -> None:
    """Refuses a trace that is shorter than the run, or has something else than client ids."""
    if rounds is not None and rounds > len(trace):
        raise ConfigError(
            f"trainer.max_epochs: {rounds}; loop.{name} has only {len(trace)} rounds, set it to "
            f"at most that"
        )
    for number, ids in enumerate(trace):
        _check_ids(f"loop.{name}", ids, total, f"round {number} has ")


def _read_rounds(name: str, trace: str | Rounds | None) -> Rounds | None:
    """Returns a trace, which may be the path of a JSON file."""
    if not isinstance(trace, str):
        return trace
    rounds = _read_json(f"loop.{name}", trace)
    if not (isinstance(rounds, list) and all(isinstance(r, list) for r in rounds)):
        raise ConfigError(f"loop.{name}: {trace} must hold a list of lists of client ids")
    return rounds


def _read_unseen(unseen: float | str | Sequence[int] | None) -> float | Sequence[int] | None:
    """Returns a share or a list of client ids, which may be the path of a JSON file."""
    if isinstance(unseen, str):
        ids = _read_json("loop.unseen", unseen)
        if not isinstance(ids, list):
            raise ConfigError(f"loop.unseen: {unseen} must hold a list of client ids")
        return ids
    if isinstance(unseen, float | int):
        expected = "a share of the clients between 0 and 1, a list of their ids, or null for none"
        require("loop.unseen", unseen, 0 < unseen < 1, expected)
        return float(unseen)
    return unseen


def _read_json(key: str, path: str) -> Any:
    try:
        return json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path} cannot be read as JSON: {error}") from error
