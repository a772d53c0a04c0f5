"""Clients that arguments of the loop name: by ids or names, for each round, and in JSON files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch

from pfl.datamodules import FederatedDataModule
from pfl.datamodules.errors import is_number, is_whole, require_value
from pfl.datamodules.randomness import fold
from pfl.errors import ConfigError
from pfl.files import read_value
from pfl.randomness import key

BY_CLIENT = ("work", "rate")
Rounds: TypeAlias = Sequence[Sequence[int | str]]
"""A list of clients for each round, by their ids or names."""
Ids: TypeAlias = Sequence[Sequence[int]]
"""A list of client ids for each round."""
ByClient: TypeAlias = Mapping[str, Mapping[str, float]]
"""Factors on the local steps ("work") and the learning rate ("rate") of clients, by their names."""


class KnownClients:
    """The clients of the data, which arguments of the loop give by their ids or names.

    Args:
        datamodule: The data.
    """

    def __init__(self, datamodule: FederatedDataModule) -> None:
        self.datamodule = datamodule

    @cached_property
    def _ids_by_name(self) -> dict[str, int]:
        """The ids of all clients by their names, or by their numbers where they have no names."""
        return {name: number for number, name in enumerate(self.datamodule.names_or_numbers)}

    def id_of(self, client: str | int, argument: str) -> int:
        """Returns the id of a client that an argument gives by its name or its id.

        Raises:
            ConfigError: No client has this name, or the id is also the name of another client, as
                where names count from 1.
        """
        known = self._ids_by_name
        if not isinstance(client, str):
            named = known.get(str(client), client)
            if named != client:
                raise ConfigError(
                    f"{argument}: {client}; the client of this name has the id {named}; give names "
                    f"in quotes, as in ['{client}']"
                )
            return client
        if client in known:
            return known[client]
        kind = "the name of a client"
        if self.datamodule.client_names is None:
            kind = f"a client's number from 0 to {len(known) - 1}"
        hint = ""
        if close := get_close_matches(client, known, n=1):
            hint = f"; did you mean {close[0]!r}?"
        raise ConfigError(f"{argument}: {client!r}; it must be {kind}{hint}")

    def ids_of(self, clients: Sequence[str | int], argument: str) -> list[int]:
        """Returns the ids of a list of clients."""
        return [self.id_of(client, argument) for client in clients]

    def ids_by_round(self, name: str, rounds: Rounds) -> Ids:
        """Returns the ids of the clients that `loop.<name>` gives for each round."""
        return [
            self.ids_of(clients, f"loop.{name}, round {number}")
            for number, clients in enumerate(rounds, 1)
        ]


@dataclass(frozen=True)
class Affected:
    """The clients to which something happens in a round: a share of them, or given ids.

    Attributes:
        name: The argument of the loop, which is also the purpose of the draws.
        rule: The probability of each client, drawn by (seed, round, client); or the clients of
            each round.

    Example:
        >>> Affected("dropout", [[], [2, 7]]).mask(0, 1, np.array([1, 2, 3]))
        array([False,  True, False])
    """

    name: str
    rule: float | Rounds

    @classmethod
    def read(cls, name: str, rule: float | str | Rounds) -> Affected:
        """Returns the clients of an argument, which may be the path of a JSON file."""
        if not isinstance(rule, float | int):
            return cls(name, read_rounds(name, rule))
        expected = "a share of at least 0 and below 1, or lists of client ids"
        require_value(f"loop.{name}", rule, 0 <= rule < 1 and rule is not False, expected)
        return cls(name, float(rule))

    def __bool__(self) -> bool:
        return bool(self.rule if isinstance(self.rule, float) else any(map(len, self.rule)))

    def by_ids(self, known: KnownClients) -> Affected:
        """Returns the same clients, of which all that are given have ids in place of names."""
        if isinstance(self.rule, float):
            return self
        return replace(self, rule=known.ids_by_round(self.name, self.rule))

    def mask(self, seed: int, round_index: int, ids: np.ndarray) -> np.ndarray:
        """Returns which of the clients `ids` belong to them in a round, bool [C].

        Clients that are given must have ids, not names (`by_ids`).
        """
        if not self:
            return np.zeros(len(ids), bool)
        if not isinstance(self.rule, float):
            return np.isin(ids, np.asarray(self.rule[round_index], np.int64))
        keys = torch.full((len(ids),), key(seed, self.name, round_index))
        bits = fold(keys, torch.from_numpy(ids)).numpy().view(np.uint64)
        return (bits >> np.uint64(11)) * 2.0**-53 < self.rule  # 53 bits: uniform in [0, 1)

    def check(self, total: int, rounds: int | None) -> None:
        """Refuses a trace that does not fit `total` clients and the rounds of the run."""
        if not isinstance(self.rule, float):
            check_rounds(self.name, self.rule, total, rounds)

    def describe(self) -> str:
        """Returns in words whom the rule means."""
        if isinstance(self.rule, float):
            return f"each client with probability {self.rule:g}"
        return "each client of a trace"


def is_list(value: object) -> bool:
    """Returns whether a value is a list, a tuple or an array, and no text."""
    return isinstance(value, Sequence | np.ndarray) and not isinstance(value, str)


def check_ids(key: str, ids: Sequence[Any], total: int, where: str = "") -> None:
    """Refuses a list that does not hold different client ids; `where` names it within the key."""
    whole = all(is_whole(client) for client in ids)
    known = whole and all(0 <= client < total for client in ids)
    if not known or len(set(ids)) < len(ids):
        raise ConfigError(
            f"{key}: {where}{list(ids)}; it must hold different client ids from 0 to {total - 1}"
        )


def check_rounds(name: str, trace: Rounds, total: int, rounds: int | None) -> None:
    """Refuses a trace that is shorter than the run, or has something else than client ids.

    A run without an end is longer than any trace.
    """
    if rounds is not None and not 0 <= rounds <= len(trace):
        given = str(rounds)
        if rounds < 0:
            given += " (no end)"
        raise ConfigError(
            f"trainer.max_epochs: {given}; loop.{name} has only {len(trace)} rounds, set it to "
            f"at most that"
        )
    for number, ids in enumerate(trace, 1):
        check_ids(f"loop.{name}", ids, total, f"round {number} has ")


def read_rounds(name: str, trace: str | Rounds) -> Rounds:
    """Returns a trace, which may be the path of a JSON file."""
    rounds = read_value(f"loop.{name}", trace) if isinstance(trace, str) else trace
    if not (is_list(rounds) and all(map(is_list, rounds))):
        raise ConfigError(f"loop.{name}: {trace} must hold a list of lists of client ids or names")
    return rounds


def read_by_client(given: str | ByClient | None) -> ByClient | None:
    """Returns factors by the names of clients, which may be those of a JSON file."""
    if given is None:
        return None
    key = "loop.by_client"
    found = read_value(key, given) if isinstance(given, str) else given
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key}: {found}; it must be like {{north: {{work: 2, rate: 0.5}}}}")
    for name, factors in found.items():
        known = isinstance(factors, Mapping) and factors.keys() <= {*BY_CLIENT}
        if not known:
            raise ConfigError(f"{key}.{name}: {factors}; it must be like {{work: 2, rate: 0.5}}")
        for what, value in factors.items():
            holds = is_number(value) and 0 < value < math.inf
            require_value(f"{key}.{name}.{what}", value, holds, "a number above 0")
    return {str(name): factors for name, factors in found.items()}


def read_unseen(unseen: float | str | Sequence[int | str] | None) -> float | list[int | str] | None:
    """Returns a share or a list of ids and names, which may be the path of a JSON file."""
    if unseen is None:
        return None
    if isinstance(unseen, float | int):
        expected = (
            "a share of the clients between 0 and 1, a list of their ids or names, or null for none"
        )
        require_value("loop.unseen", unseen, 0 < unseen < 1, expected)
        return float(unseen)
    ids = read_value("loop.unseen", unseen) if isinstance(unseen, str) else unseen
    if not is_list(ids):
        raise ConfigError(f"loop.unseen: {unseen} must hold a list of client ids or names")
    return list(ids)
